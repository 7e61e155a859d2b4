"""Softmax over one axis of any strided view.

    y_j = exp(x_j - m) / l        m = max_j x_j        l = sum_j exp(x_j - m)

A program owns ``block_rows`` rows. A row that fits in ``tiles`` tiles, one of ``block_n`` elements or that and one of
``tail``, is read once and stays in registers. A longer one is read twice: first its statistics, by online
normalisation, which rescales l whenever m grows; then its result.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import fresh_like, walk_rows
from portakern.backends.triton.lib.columns import (
    lead,
    refuse_strips,
    side_by_side,
    sum_parts,
    tile_columns,
    walk_strips,
    weigh_strips,
)
from portakern.backends.triton.lib.rows import (
    Extents,
    load_tiles,
    of_long_rows,
    own_rows,
    refuse_rows,
    row_max,
    row_sum,
    row_tile,
    start_of,
    tile_rows,
    weigh_long_rows,
    whole_rows,
)
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def exponentials(t):
    """exp(x - m) of rows that stay in registers, and their sums l."""
    m = row_max(t)[:, None]
    p = [tl.exp(a - m) for a in t]
    return p, row_sum(p)[:, None]


@triton.jit
def softmax_kernel(x, y, extents, x_strides, y_strides, tile: tl.constexpr):
    row, n = own_rows(extents, tile)
    row_ok = (row < extents.height)[:, None]
    x_row, y_row = start_of(x, row, extents, x_strides, tile), start_of(y, row, extents, y_strides, tile)

    if tile.tiles:
        _, _, col, ok = whole_rows(n, row_ok, tile)
        p, l = exponentials(load_tiles(x_row, x_strides.n, col, ok, float("-inf"), tile.acc_dtype))
        for i in tl.static_range(len(col)):
            tl.store(y_row + col[i] * y_strides.n, (p[i] / l).to(y.dtype.element_ty), mask=ok[i])
    else:
        m, l, _ = of_long_rows(x_row, x_strides.n, n, row_ok, False, tile)
        weigh_long_rows(x_row, x_strides.n, y_row, y_strides.n, None, m, l, n, row_ok, tile)


@triton.jit
def softmax_columns_kernel(x, y, m, l, extents, x_strides, y_strides, tile: tl.constexpr):
    weigh_strips(x, y, None, m, l, extents, x_strides, y_strides, None, tile)


def key(call: Call) -> dict[str, str | int]:
    x, axis = lead(call)
    return {"dtype": call.dtype, "rows": "side by side" if side_by_side(x, axis) else "apart", "n": x.shape[axis]}


def default_tiling(call: Call) -> dict[str, int]:
    x, axis = lead(call)
    return (tile_columns if side_by_side(x, axis) else tile_rows)(x.shape[axis], call.target.arch)


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    x, axis = lead(call)
    if side_by_side(x, axis):
        return refuse_strips(call, x, axis, tiling)
    return refuse_rows(call, tiling, x.shape[axis], prod(x.shape) // x.shape[axis])


@BACKEND.implements("softmax", key=key, tiling=default_tiling, supports=supports, knobs={"num_warps": Tile(1, 32)})
def softmax(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x, axis = lead(call)
    y, n = fresh_like(x), x.shape[axis]
    if side_by_side(x, axis):
        (x,), strips = walk_strips(call, axis, tiling, x)
        m, l = sum_parts(call, strips, n, x)
        launch(softmax_columns_kernel, strips.programs, call, x, y, m, l, strips.extents(n), *strips.strides,
               tile=strips.tile(call), num_warps=strips.num_warps)  # fmt: skip
        return (y,)
    (x,), rows = walk_rows(axis, x)
    launch(softmax_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, y, Extents(rows.height, rows.inner, n),
           *rows.strides, tile=row_tile(call, rows, n, tiling), num_warps=tiling["num_warps"])  # fmt: skip
    return (y,)
