"""Softmax over one axis of any strided view.

    y_j = exp(x_j - m) / l        m = max_j x_j        l = sum_j exp(x_j - m)

A program owns ``block_rows`` rows. A row that fits in ``tiles`` tiles, one of ``block_n`` elements or that and one of
``tail``, is read once and stays in registers. A longer one is read twice: first its statistics, by online
normalisation, which rescales l whenever m grows; then its result.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3.

Gradient of softmax over one axis, from its result.

    d_x_j = y_j (d_y_j - Delta)        Delta = sum_j y_j d_y_j

A program owns ``block_rows`` rows of any strided views. A row that fits in ``tiles`` tiles is read once and
stays in registers, as in softmax. A longer one is read twice: first for Delta, then for its result.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import RowsConfig
from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import aligned, fresh_like, result_like, walk_rows
from portakern.backends.triton.lib.columns import (
    added,
    begin,
    lead,
    load_block,
    product,
    refuse_strips,
    side_by_side,
    store_block,
    strip_of,
    sum_parts,
    tile_columns,
    tiles_of,
    tree_sum,
    walk_strips,
    weigh_strips,
)
from portakern.backends.triton.lib.rows import (
    RowExtents,
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


def default_tiling(call: Call) -> RowsConfig:
    x, axis = lead(call)
    return (tile_columns if side_by_side(x, axis) else tile_rows)(x.shape[axis], call.target.arch)


def supports(call: Call, config: RowsConfig) -> str | None:
    x, axis = lead(call)
    if side_by_side(x, axis):
        return refuse_strips(call, x, axis, config)
    return refuse_rows(call, config, x.shape[axis], prod(x.shape) // x.shape[axis])


@BACKEND.implements("softmax", key=key, tiling=default_tiling, supports=supports, config=RowsConfig)
def softmax(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    x, axis = lead(call)
    y, n = fresh_like(x), x.shape[axis]
    if side_by_side(x, axis):
        (x,), strips = walk_strips(call, axis, config, x)
        m, l = sum_parts(call, strips, n, x)
        launch(softmax_columns_kernel, strips.programs, call, x, y, m, l, strips.extents(n), *strips.strides,
               tile=strips.tile(call), num_warps=strips.num_warps)  # fmt: skip
        return (y,)
    (x,), rows = walk_rows(axis, x)
    launch(softmax_kernel, cdiv(rows.height, config.block_rows), call, x, y, RowExtents(rows.height, rows.inner, n),
           *rows.strides, tile=row_tile(call, rows, n, config), num_warps=config.num_warps)  # fmt: skip
    return (y,)


@triton.jit
def softmax_vjp_kernel(y, d_y, d_x, extents, y_strides, d_y_strides, d_x_strides, tile: tl.constexpr):
    row, n = own_rows(extents, tile)
    row_ok = (row < extents.height)[:, None]
    y_row = start_of(y, row, extents, y_strides, tile)
    d_y_row = start_of(d_y, row, extents, d_y_strides, tile)
    d_x_row = start_of(d_x, row, extents, d_x_strides, tile)

    if tile.tiles:
        _, _, col, ok = whole_rows(n, row_ok, tile)
        p = load_tiles(y_row, y_strides.n, col, ok, 0.0, tile.acc_dtype)
        g = load_tiles(d_y_row, d_y_strides.n, col, ok, 0.0, tile.acc_dtype)
        delta = row_sum([p[i] * g[i] for i in (0, 1)[: tile.tiles]])[:, None]
        for i in tl.static_range(len(col)):
            tl.store(d_x_row + col[i] * d_x_strides.n, (p[i] * (g[i] - delta)).to(d_x.dtype.element_ty), mask=ok[i])
    else:
        lane = tl.arange(0, tile.block_n)[None, :].to(tl.int64)
        delta = tl.full([tile.block_rows], 0.0, tile.acc_dtype)
        for start in range(0, tl.cast(n, tl.int64), tile.block_n):
            col = start + lane
            ok = row_ok & (col < n)
            p = tl.load(y_row + col * y_strides.n, mask=ok, other=0.0).to(tile.acc_dtype)
            g = tl.load(d_y_row + col * d_y_strides.n, mask=ok, other=0.0).to(tile.acc_dtype)
            delta += tl.sum(p * g, 1)
        for start in range(0, tl.cast(n, tl.int64), tile.block_n):
            col = start + lane
            ok = row_ok & (col < n)
            p = tl.load(y_row + col * y_strides.n, mask=ok, other=0.0).to(tile.acc_dtype)
            g = tl.load(d_y_row + col * d_y_strides.n, mask=ok, other=0.0).to(tile.acc_dtype)
            tl.store(d_x_row + col * d_x_strides.n, (p * (g - delta[:, None])).to(d_x.dtype.element_ty), mask=ok)


@triton.jit
def softmax_vjp_columns_kernel(
    y, d_y, d_x, total, extents, y_strides, d_y_strides, d_x_strides, tile: tl.constexpr
):  # fmt: skip
    """Rows that lie side by side: whole ones, or ``parts`` of them, whose sums are in ``total``, from their ends."""
    lanes, y_n = aligned(extents.lanes, tile.unit), aligned(y_strides.n, tile.unit)
    d_y_n, d_x_n = aligned(d_y_strides.n, tile.unit), aligned(d_x_strides.n, tile.unit)
    lane, part, group = strip_of(tl.num_programs(0) - 1 - tl.program_id(0), lanes, tile.parts, tile)
    y_row, d_y_row = begin(y, group, lane, y_strides, tile.unit), begin(d_y, group, lane, d_y_strides, tile.unit)
    d_x_row = begin(d_x, group, lane, d_x_strides, tile.unit)
    step, inside = tl.arange(0, tile.block_n // tile.deep)[:, None].to(tl.int64), lane < lanes
    if tile.parts:
        delta = added(total, group * lanes + lane, inside, tile.parts)
    tiles, start, last = tiles_of(part, extents, tile)
    for _ in range(tiles):
        p = load_block(y_row, start, step, y_n, last, inside, 0.0, tile)
        g = load_block(d_y_row, start, step, d_y_n, last, inside, 0.0, tile)
        if not tile.parts:
            delta = tree_sum(product(p[0], g[0]))
        out = [p[i] * (g[i] - delta) for i in (0, 1, 2, 3, 4, 5, 6, 7)[: tile.deep]]
        store_block(d_x_row, start, step, d_x_n, last, inside, out)
        start -= tile.block_n


@BACKEND.implements(
    "softmax_vjp",
    key=key,
    tiling=default_tiling,
    supports=supports,
    config=RowsConfig,
    overwrites=True,
)
def softmax_vjp(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    y, d_y, axis = call.arrays["y"], call.arrays["d_y"], call.options["axis"]
    d_x = result_like(y, call, "d_x")
    n = y.shape[axis]
    if side_by_side(y, axis):
        (y, d_y), strips = walk_strips(call, axis, config, y, d_y)
        _, total = sum_parts(call, strips, n, y, d_y)
        launch(softmax_vjp_columns_kernel, strips.programs, call, y, d_y, d_x, total, strips.extents(n),
               *strips.strides, tile=strips.tile(call), num_warps=strips.num_warps)  # fmt: skip
        return (d_x,)
    (y, d_y), rows = walk_rows(axis, y, d_y)
    launch(softmax_vjp_kernel, cdiv(rows.height, config.block_rows), call, y, d_y, d_x,
           RowExtents(rows.height, rows.inner, n), *rows.strides, tile=row_tile(call, rows, n, config),
           num_warps=config.num_warps)  # fmt: skip
    return (d_x,)
