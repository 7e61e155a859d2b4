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
from portakern.backends.triton.launch import accumulator, cdiv, launch
from portakern.backends.triton.layout import aligned, fresh, row_start, walk_rows
from portakern.backends.triton.lib.columns import side_by_side, sum_parts, walk_strips, weigh_strips
from portakern.backends.triton.lib.rows import columns, load_tiles, of_long_rows, walked, weigh_long_rows
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def logsumexp_vjp_kernel(x, d_y, d_x, rows, rows_inner, n, x_outer, x_inner, x_n, d_x_outer, d_x_inner, d_x_n,
                         block_rows: tl.constexpr, block_n: tl.constexpr, tail: tl.constexpr, tiles: tl.constexpr,
                         deep: tl.constexpr, acc_dtype: tl.constexpr, flat: tl.constexpr,
                         unit: tl.constexpr):  # fmt: skip
    n = aligned(n, unit)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    row_ok = (row < rows)[:, None]
    x_row = row_start(x, row, rows_inner, x_outer, x_inner, flat, unit)[:, None]
    d_x_row = row_start(d_x, row, rows_inner, d_x_outer, d_x_inner, flat, unit)[:, None]
    g = tl.load(d_y + row, mask=row < rows, other=0.0).to(acc_dtype)[:, None]

    if tiles:
        lane, inside = columns(0, n, block_n, tail)
        col, ok = [a[None, :] for a in lane], [row_ok & a[None, :] for a in inside]
        p, l = exponentials(load_tiles(x_row, x_n, col, ok, float("-inf"), acc_dtype))
        for i in tl.static_range(tiles):
            tl.store(d_x_row + col[i] * d_x_n, (g * (p[i] / l)).to(d_x.dtype.element_ty), mask=ok[i])
    else:
        m, l, _ = of_long_rows(x_row, x_n, n, row_ok, block_n, deep, False, acc_dtype)
        weigh_long_rows(x_row, x_n, d_x_row, d_x_n, g, m, l, n, row_ok, block_n, deep, acc_dtype)


@triton.jit
def logsumexp_vjp_columns_kernel(x, d_y, d_x, m, l, lanes, n, chunk,
                                 x_group, x_lane, x_n, d_x_group, d_x_lane, d_x_n, d_y_group, d_y_lane,
                                 block_rows: tl.constexpr, block_n: tl.constexpr, parts: tl.constexpr,
                                 deep: tl.constexpr, acc_dtype: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    weigh_strips(x, d_x, d_y, m, l, lanes, n, chunk, x_group, x_lane, x_n, d_x_group, d_x_lane, d_x_n, d_y_group,
                 d_y_lane, block_rows, block_n, parts, deep, acc_dtype, unit)  # fmt: skip


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
        launch(logsumexp_vjp_columns_kernel, strips.programs, call, x, d_y, d_x, m, l, strips.lanes, n,
               strips.chunk, *strips.strides[0], *strips.strides[1], *strips.numbers,
               acc_dtype=accumulator(call.dtype), **strips.constants)  # fmt: skip
        return (d_x,)
    (x,), rows = walk_rows(axis, x)
    launch(logsumexp_vjp_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, d_y, d_x, rows.height, rows.inner, n,
           *rows.strides[0], *rows.strides[1], acc_dtype=accumulator(call.dtype), **walked(call, n, tiling),
           **rows.known(call.dtype))  # fmt: skip
    return (d_x,)
