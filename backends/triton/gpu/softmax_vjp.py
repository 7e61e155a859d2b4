"""Gradient of softmax over one axis, from its result.

    d_x_j = y_j (d_y_j - Delta)        Delta = sum_j y_j d_y_j

A program owns ``block_rows`` rows of any strided views. A row that fits in ``tiles`` tiles is read once and
stays in registers, as in softmax. A longer one is read twice: first for Delta, then for its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu.softmax import default_tiling, key, supports
from portakern.backends.triton.launch import accumulator, cdiv, launch
from portakern.backends.triton.layout import aligned, result_like, row_start, walk_rows
from portakern.backends.triton.lib.columns import (
    added,
    begin,
    load_block,
    product,
    side_by_side,
    store_block,
    strip_of,
    sum_parts,
    tiles_of,
    tree_sum,
    walk_strips,
)
from portakern.backends.triton.lib.rows import columns, load_tiles, row_sum, told
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def softmax_vjp_kernel(y, d_y, d_x, rows, rows_inner, n,
                       y_outer, y_inner, y_n, d_y_outer, d_y_inner, d_y_n, d_x_outer, d_x_inner, d_x_n,
                       block_rows: tl.constexpr, block_n: tl.constexpr, tail: tl.constexpr, tiles: tl.constexpr,
                       acc_dtype: tl.constexpr, flat: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    n = aligned(n, unit)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    row_ok = (row < rows)[:, None]
    y_row = row_start(y, row, rows_inner, y_outer, y_inner, flat, unit)[:, None]
    d_y_row = row_start(d_y, row, rows_inner, d_y_outer, d_y_inner, flat, unit)[:, None]
    d_x_row = row_start(d_x, row, rows_inner, d_x_outer, d_x_inner, flat, unit)[:, None]

    if tiles:
        lane, inside = columns(0, n, block_n, tail)
        col, ok = [a[None, :] for a in lane], [row_ok & a[None, :] for a in inside]
        p = load_tiles(y_row, y_n, col, ok, 0.0, acc_dtype)
        g = load_tiles(d_y_row, d_y_n, col, ok, 0.0, acc_dtype)
        delta = row_sum([p[i] * g[i] for i in (0, 1)[:tiles]])[:, None]
        for i in tl.static_range(tiles):
            tl.store(d_x_row + col[i] * d_x_n, (p[i] * (g[i] - delta)).to(d_x.dtype.element_ty), mask=ok[i])
    else:
        col = tl.arange(0, block_n)[None, :].to(tl.int64)
        delta = tl.zeros([block_rows], acc_dtype)
        for start in range(0, tl.cast(n, tl.int64), block_n):
            ok = row_ok & (start + col < n)
            p = tl.load(y_row + (start + col) * y_n, mask=ok, other=0.0).to(acc_dtype)
            g = tl.load(d_y_row + (start + col) * d_y_n, mask=ok, other=0.0).to(acc_dtype)
            delta += tl.sum(p * g, 1)
        for start in range(0, tl.cast(n, tl.int64), block_n):
            ok = row_ok & (start + col < n)
            p = tl.load(y_row + (start + col) * y_n, mask=ok, other=0.0).to(acc_dtype)
            g = tl.load(d_y_row + (start + col) * d_y_n, mask=ok, other=0.0).to(acc_dtype)
            tl.store(d_x_row + (start + col) * d_x_n, (p * (g - delta[:, None])).to(d_x.dtype.element_ty), mask=ok)


@triton.jit
def softmax_vjp_columns_kernel(y, d_y, d_x, total, lanes, n, chunk,
                               y_group, y_lane, y_n, d_y_group, d_y_lane, d_y_n, d_x_group, d_x_lane, d_x_n,
                               block_rows: tl.constexpr, block_n: tl.constexpr, parts: tl.constexpr,
                               deep: tl.constexpr, acc_dtype: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    """Rows that lie side by side: whole ones, or ``parts`` of them, whose sums are in ``total``, from their ends."""
    lanes, y_n, d_y_n, d_x_n = aligned(lanes, unit), aligned(y_n, unit), aligned(d_y_n, unit), aligned(d_x_n, unit)
    lane, part, group = strip_of(tl.num_programs(0) - 1 - tl.program_id(0), lanes, parts, block_rows)
    y_row, d_y_row = begin(y, group, lane, y_group, y_lane, unit), begin(d_y, group, lane, d_y_group, d_y_lane, unit)
    d_x_row = begin(d_x, group, lane, d_x_group, d_x_lane, unit)
    step, inside = tl.arange(0, block_n // deep)[:, None].to(tl.int64), lane < lanes
    if parts:
        delta = added(total, group * lanes + lane, inside, parts)
    tiles, start, last = tiles_of(part, chunk, n, block_n, parts)
    for _ in range(tiles):
        p = load_block(y_row, start, step, y_n, last, inside, 0.0, acc_dtype, deep)
        g = load_block(d_y_row, start, step, d_y_n, last, inside, 0.0, acc_dtype, deep)
        if not parts:
            delta = tree_sum(product(p[0], g[0]))
        out = [p[i] * (g[i] - delta) for i in (0, 1, 2, 3, 4, 5, 6, 7)[:deep]]
        store_block(d_x_row, start, step, d_x_n, last, inside, out)
        start -= block_n


@BACKEND.implements(
    "softmax_vjp",
    key=key,
    tiling=default_tiling,
    supports=supports,
    knobs={"num_warps": Tile(1, 32)},
    overwrites=True,
)
def softmax_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    y, d_y, axis = call.arrays["y"], call.arrays["d_y"], call.options["axis"]
    d_x = result_like(y, call, "d_x")
    n = y.shape[axis]
    if side_by_side(y, axis):
        (y, d_y), strips = walk_strips(call, axis, tiling, y, d_y)
        _, total = sum_parts(call, strips, n, y, d_y)
        launch(softmax_vjp_columns_kernel, strips.programs, call, y, d_y, d_x, total, strips.lanes, n,
               strips.chunk, *strips.strides[0], *strips.strides[1], *strips.strides[2],
               acc_dtype=accumulator(call.dtype), **strips.constants)  # fmt: skip
        return (d_x,)
    (y, d_y), rows = walk_rows(axis, y, d_y)
    launch(softmax_vjp_kernel, cdiv(rows.height, tiling["block_rows"]), call, y, d_y, d_x, rows.height, rows.inner, n,
           *rows.strides[0], *rows.strides[1], *rows.strides[2],
           acc_dtype=accumulator(call.dtype), **told(call, n, tiling), **rows.known(call.dtype))  # fmt: skip
    return (d_x,)
