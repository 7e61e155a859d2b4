"""Gradient of the logarithm of a sum of exponentials over one axis of any strided view.

    d_x_j = d_y exp(x_j - m) / l        m = max_j x_j        l = sum_j exp(x_j - m)

A program owns ``block_rows`` rows. A row that fits in ``tiles`` tiles is read once and stays in registers. A longer one
is read twice: first its statistics, by online normalisation, then its result, as softmax reads its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.copies import in_order
from portakern.backends.triton.gpu.softmax import default_tiling, exponentials, key, supports
from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import fresh, walk_rows
from portakern.backends.triton.lib.columns import side_by_side, sum_parts, walk_strips, weigh_strips
from portakern.backends.triton.lib.rows import (
    Extents,
    load_tiles,
    of_long_rows,
    own_rows,
    row_tile,
    start_of,
    weigh_long_rows,
    whole_rows,
)
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def logsumexp_vjp_kernel(x, d_y, d_x, extents, x_strides, d_x_strides, tile: tl.constexpr):
    row, n = own_rows(extents, tile)
    row_ok = (row < extents.height)[:, None]
    x_row, d_x_row = start_of(x, row, extents, x_strides, tile), start_of(d_x, row, extents, d_x_strides, tile)
    g = tl.load(d_y + row, mask=row < extents.height, other=0.0).to(tile.acc_dtype)[:, None]

    if tile.tiles:
        _, _, col, ok = whole_rows(n, row_ok, tile)
        p, l = exponentials(load_tiles(x_row, x_strides.n, col, ok, float("-inf"), tile.acc_dtype))
        for i in tl.static_range(len(col)):
            tl.store(d_x_row + col[i] * d_x_strides.n, (g * (p[i] / l)).to(d_x.dtype.element_ty), mask=ok[i])
    else:
        m, l, _ = of_long_rows(x_row, x_strides.n, n, row_ok, False, tile)
        weigh_long_rows(x_row, x_strides.n, d_x_row, d_x_strides.n, g, m, l, n, row_ok, tile)


@triton.jit
def logsumexp_vjp_columns_kernel(
    x, d_y, d_x, m, l, extents, x_strides, d_x_strides, d_y_strides, tile: tl.constexpr
):  # fmt: skip
    weigh_strips(x, d_x, d_y, m, l, extents, x_strides, d_x_strides, d_y_strides, tile)


@BACKEND.implements(
    "logsumexp_vjp", key=key, tiling=default_tiling, supports=supports, knobs={"num_warps": Tile(1, 32)}
)
def logsumexp_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x, axis = call.arrays["x"], call.options["axis"]
    d_y = in_order(call, call.arrays["d_y"])  # one number a row, in the order of the rows: a copy is a small thing
    d_x, n = fresh(x.shape, x.dtype, x.device), call.dims["axis"]
    if side_by_side(x, axis):
        (x,), strips = walk_strips(call, axis, tiling, x)
        m, l = sum_parts(call, strips, n, x)
        launch(logsumexp_vjp_columns_kernel, strips.programs, call, x, d_y, d_x, m, l, strips.extents(n),
               *strips.strides, strips.numbers, tile=strips.tile(call), num_warps=strips.num_warps)  # fmt: skip
        return (d_x,)
    (x,), rows = walk_rows(axis, x)
    launch(logsumexp_vjp_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, d_y, d_x,
           Extents(rows.height, rows.inner, n), *rows.strides, tile=row_tile(call, rows, n, tiling),
           num_warps=tiling["num_warps"])  # fmt: skip
    return (d_x,)
