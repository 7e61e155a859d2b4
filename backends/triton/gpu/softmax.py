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
from portakern.backends.triton.launch import accumulator, cdiv, launch
from portakern.backends.triton.layout import aligned, fresh_like, row_start, walk_rows
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
    columns,
    load_tiles,
    of_long_rows,
    refuse_rows,
    row_max,
    row_sum,
    tile_rows,
    walked,
    weigh_long_rows,
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
def softmax_kernel(x, y, rows, rows_inner, n,
                   x_outer, x_inner, x_n, y_outer, y_inner, y_n,
                   block_rows: tl.constexpr, block_n: tl.constexpr, tail: tl.constexpr, tiles: tl.constexpr,
                   deep: tl.constexpr, acc_dtype: tl.constexpr, flat: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    n = aligned(n, unit)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    row_ok = (row < rows)[:, None]
    x_row = row_start(x, row, rows_inner, x_outer, x_inner, flat, unit)[:, None]
    y_row = row_start(y, row, rows_inner, y_outer, y_inner, flat, unit)[:, None]

    if tiles:
        lane, inside = columns(0, n, block_n, tail)
        col, ok = [a[None, :] for a in lane], [row_ok & a[None, :] for a in inside]
        p, l = exponentials(load_tiles(x_row, x_n, col, ok, float("-inf"), acc_dtype))
        for i in tl.static_range(tiles):
            tl.store(y_row + col[i] * y_n, (p[i] / l).to(y.dtype.element_ty), mask=ok[i])
    else:
        m, l, _ = of_long_rows(x_row, x_n, n, row_ok, block_n, deep, False, acc_dtype)
        weigh_long_rows(x_row, x_n, y_row, y_n, None, m, l, n, row_ok, block_n, deep, acc_dtype)


@triton.jit
def softmax_columns_kernel(x, y, m, l, lanes, n, chunk, x_group, x_lane, x_n, y_group, y_lane, y_n,
                           block_rows: tl.constexpr, block_n: tl.constexpr, parts: tl.constexpr, deep: tl.constexpr,
                           acc_dtype: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    weigh_strips(x, y, None, m, l, lanes, n, chunk, x_group, x_lane, x_n, y_group, y_lane, y_n, 0, 0,
                 block_rows, block_n, parts, deep, acc_dtype, unit)  # fmt: skip


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
        launch(softmax_columns_kernel, strips.programs, call, x, y, m, l, strips.lanes, n, strips.chunk,
               *strips.strides[0], *strips.strides[1], acc_dtype=accumulator(call.dtype),
               **strips.constants)  # fmt: skip
        return (y,)
    (x,), rows = walk_rows(axis, x)
    launch(softmax_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, y, rows.height, rows.inner, n,
           *rows.strides[0], *rows.strides[1], acc_dtype=accumulator(call.dtype), **walked(call, n, tiling),
           **rows.known(call.dtype))  # fmt: skip
    return (y,)
