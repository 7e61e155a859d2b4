"""Logarithm of a sum of exponentials over one axis of any strided view.

    y = m + log l        m = max_j x_j, or 0 where that is infinite        l = sum_j exp(x_j - m)

A program owns ``block_rows`` rows and reads each once. One that fits in ``tiles`` tiles stays in registers; a longer
one is summed ``block_n`` elements at a time by online normalisation, which rescales l whenever m grows.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3.

Gradient of the logarithm of a sum of exponentials over one axis of any strided view.

    d_x_j = d_y exp(x_j - m) / l        m = max_j x_j        l = sum_j exp(x_j - m)

A program owns ``block_rows`` rows. A row that fits in ``tiles`` tiles is read once and stays in registers. A longer one
is read twice: first its statistics, by online normalisation, then its result, as softmax reads its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import RowsConfig
from portakern.backends.triton.copies import in_order
from portakern.backends.triton.gpu.softmax import default_tiling, exponentials, key, supports
from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import aligned, fresh, walk_rows
from portakern.backends.triton.lib.columns import (
    begin,
    joined,
    lead,
    load_block,
    side_by_side,
    strip_of,
    sum_parts,
    tree_sum,
    walk_strips,
    weigh_strips,
)
from portakern.backends.triton.lib.rows import (
    RowExtents,
    finite_or_zero,
    load_tiles,
    maximum_and_sum,
    of_long_rows,
    own_rows,
    row_tile,
    start_of,
    tile_rows_once,
    weigh_long_rows,
    whole_rows,
)

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def logsumexp_kernel(x, y, extents, x_strides, tile: tl.constexpr):
    row, n = own_rows(extents, tile)
    row_ok = (row < extents.height)[:, None]
    x_row = start_of(x, row, extents, x_strides, tile)

    if tile.tiles:
        _, _, col, ok = whole_rows(n, row_ok, tile)
        m, l = maximum_and_sum(load_tiles(x_row, x_strides.n, col, ok, float("-inf"), tile.acc_dtype))
    else:
        m, l, _ = of_long_rows(x_row, x_strides.n, n, row_ok, False, tile)
    tl.store(y + row, (finite_or_zero(m) + tl.log(l)).to(y.dtype.element_ty), mask=row < extents.height)


@triton.jit
def logsumexp_columns_kernel(x, y, m, l, extents, x_strides, y_strides, tile: tl.constexpr):
    """Rows that lie side by side, whole or joined from their parts."""
    lanes, x_n = aligned(extents.lanes, tile.unit), aligned(x_strides.n, tile.unit)
    lane, _, group = strip_of(tl.program_id(0), lanes, 0, tile)
    inside = lane < lanes
    if tile.parts:
        top, sums = joined(m, l, group * lanes + lane, inside, tile.parts, True)
    else:
        step = tl.arange(0, tile.block_n)[:, None].to(tl.int64)
        x_row = begin(x, group, lane, x_strides, tile.unit)
        t = load_block(x_row, tl.cast(0, tl.int64), step, x_n, extents.n, inside, float("-inf"), tile)
        top = tl.max(t[0], 0)[None, :]
        sums = tree_sum(tl.exp(t[0] - finite_or_zero(top)))
    out = finite_or_zero(top) + tl.log(sums)
    tl.store(begin(y, group, lane, y_strides, 1), out.to(y.dtype.element_ty), mask=inside)


def once_tiling(call: Call) -> RowsConfig:
    x, axis = lead(call)
    return default_tiling(call) if side_by_side(x, axis) else tile_rows_once(x.shape[axis], call.target.arch)


@BACKEND.implements("logsumexp", key=key, tiling=once_tiling, supports=supports, config=RowsConfig)
def logsumexp(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    x, axis = call.arrays["x"], call.options["axis"]
    y, n = fresh(call.dims["rest"], x.dtype, x.device), call.dims["axis"]
    if side_by_side(x, axis):
        (x,), strips = walk_strips(call, axis, config, x)
        m, l = sum_parts(call, strips, n, x)
        launch(logsumexp_columns_kernel, strips.programs // max(strips.parts, 1), call, x, y, m, l, strips.extents(n),
               strips.strides[0], strips.numbers, tile=strips.tile(call), num_warps=strips.num_warps)  # fmt: skip
        return (y,)
    (x,), rows = walk_rows(axis, x)
    launch(logsumexp_kernel, cdiv(rows.height, config.block_rows), call, x, y, RowExtents(rows.height, rows.inner, n),
           rows.strides[0], tile=row_tile(call, rows, n, config), num_warps=config.num_warps)  # fmt: skip
    return (y,)


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


@BACKEND.implements("logsumexp_vjp", key=key, tiling=default_tiling, supports=supports, config=RowsConfig)
def logsumexp_vjp(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    x, axis = call.arrays["x"], call.options["axis"]
    d_y = in_order(call, call.arrays["d_y"])  # one number a row, in the order of the rows: a copy is a small thing
    d_x, n = fresh(x.shape, x.dtype, x.device), call.dims["axis"]
    if side_by_side(x, axis):
        (x,), strips = walk_strips(call, axis, config, x)
        m, l = sum_parts(call, strips, n, x)
        launch(logsumexp_vjp_columns_kernel, strips.programs, call, x, d_y, d_x, m, l, strips.extents(n),
               *strips.strides, strips.numbers, tile=strips.tile(call), num_warps=strips.num_warps)  # fmt: skip
        return (d_x,)
    (x,), rows = walk_rows(axis, x)
    launch(logsumexp_vjp_kernel, cdiv(rows.height, config.block_rows), call, x, d_y, d_x,
           RowExtents(rows.height, rows.inner, n), *rows.strides, tile=row_tile(call, rows, n, config),
           num_warps=config.num_warps)  # fmt: skip
    return (d_x,)
