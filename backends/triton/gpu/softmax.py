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
from portakern.backends.triton.gpu._columns import (
    begin,
    joined,
    load_tile,
    refuse_strips,
    side_by_side,
    strip_of,
    sum_parts,
    tile_columns,
    tiles_of,
    tree_sum,
    walk_strips,
)
from portakern.backends.triton.gpu._rows import columns, load_tiles, refuse_rows, row_max, row_sum, tile_rows, told
from portakern.backends.triton.launch import accumulator, cdiv, launch
from portakern.backends.triton.layout import aligned, fresh_like, row_start, walk_rows
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
                   acc_dtype: tl.constexpr, flat: tl.constexpr, unit: tl.constexpr):  # fmt: skip
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
        col = tl.arange(0, block_n)[None, :].to(tl.int64)
        m = tl.full([block_rows], float("-inf"), acc_dtype)
        l = tl.zeros([block_rows], acc_dtype)
        for start in range(0, tl.cast(n, tl.int64), block_n):
            t = tl.load(x_row + (start + col) * x_n, mask=row_ok & (start + col < n), other=float("-inf")).to(acc_dtype)
            m_new = tl.maximum(m, tl.max(t, 1))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing but -inf so far: -inf - -inf would be NaN
            l = l * tl.exp(m - shift) + tl.sum(tl.exp(t - shift[:, None]), 1)
            m = m_new
        for start in range(0, tl.cast(n, tl.int64), block_n):
            ok = row_ok & (start + col < n)
            t = tl.load(x_row + (start + col) * x_n, mask=ok, other=float("-inf")).to(acc_dtype)
            tl.store(y_row + (start + col) * y_n, (tl.exp(t - m[:, None]) / l[:, None]).to(y.dtype.element_ty), mask=ok)


@triton.jit
def softmax_columns_kernel(x, y, m, l, lanes, n, chunk, x_group, x_lane, x_n, y_group, y_lane, y_n,
                           block_rows: tl.constexpr, block_n: tl.constexpr, parts: tl.constexpr,
                           acc_dtype: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    """Rows that lie side by side: whole ones, or ``parts`` of them, whose m and l are known, from their ends."""
    lanes, x_n, y_n = aligned(lanes, unit), aligned(x_n, unit), aligned(y_n, unit)
    lane, part, group = strip_of(tl.num_programs(0) - 1 - tl.program_id(0), lanes, parts, block_rows)
    x_row, y_row = begin(x, group, lane, x_group, x_lane, unit), begin(y, group, lane, y_group, y_lane, unit)
    step, inside = tl.arange(0, block_n)[:, None].to(tl.int64), lane < lanes
    if parts:
        top, total = joined(m, l, group * lanes + lane, inside, parts, False)
    tiles, start, last = tiles_of(part, chunk, n, block_n, parts)
    for _ in range(tiles):
        ok = (start + step < last) & inside
        t = load_tile(x_row, start, step, x_n, ok, float("-inf"), acc_dtype)
        if parts:
            p = tl.exp(t - top)
        else:
            p = tl.exp(t - tl.max(t, 0)[None, :])
            total = tree_sum(p)
        tl.store(y_row + (start + step) * y_n, (p / total).to(y.dtype.element_ty), mask=ok)
        start -= block_n


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


def lead(call: Call) -> tuple[Any, int]:
    """The array whose rows are read, and the axis along which they lie."""
    return call.arrays[call.spec.lead.name], call.options["axis"]


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
           *rows.strides[0], *rows.strides[1], acc_dtype=accumulator(call.dtype), **told(call, n, tiling),
           **rows.known(call.dtype))  # fmt: skip
    return (y,)
