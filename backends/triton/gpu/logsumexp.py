"""Logarithm of a sum of exponentials over one axis of any strided view.

    y = m + log l        m = max_j x_j, or 0 where that is infinite        l = sum_j exp(x_j - m)

A program owns ``block_rows`` rows and reads each once. One that fits in ``tiles`` tiles stays in registers; a longer
one is summed ``block_n`` elements at a time by online normalisation, which rescales l whenever m grows.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu.softmax import default_tiling, key, supports
from portakern.backends.triton.launch import accumulator, cdiv, launch
from portakern.backends.triton.layout import aligned, fresh, row_start, walk_rows
from portakern.backends.triton.lib.columns import (
    begin,
    joined,
    load_block,
    side_by_side,
    strip_of,
    sum_parts,
    tree_sum,
    walk_strips,
)
from portakern.backends.triton.lib.rows import (
    columns,
    finite_or_zero,
    load_tiles,
    maximum_and_sum,
    of_long_rows,
    walked,
)
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def logsumexp_kernel(x, y, rows, rows_inner, n, x_outer, x_inner, x_n,
                     block_rows: tl.constexpr, block_n: tl.constexpr, tail: tl.constexpr, tiles: tl.constexpr,
                     deep: tl.constexpr, acc_dtype: tl.constexpr, flat: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    n = aligned(n, unit)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    row_ok = (row < rows)[:, None]
    x_row = row_start(x, row, rows_inner, x_outer, x_inner, flat, unit)[:, None]

    if tiles:
        lane, inside = columns(0, n, block_n, tail)
        col, ok = [a[None, :] for a in lane], [row_ok & a[None, :] for a in inside]
        m, l = maximum_and_sum(load_tiles(x_row, x_n, col, ok, float("-inf"), acc_dtype))
    else:
        m, l, _ = of_long_rows(x_row, x_n, n, row_ok, block_n, deep, False, acc_dtype)
    tl.store(y + row, (finite_or_zero(m) + tl.log(l)).to(y.dtype.element_ty), mask=row < rows)


@triton.jit
def logsumexp_columns_kernel(x, y, m, l, lanes, n, x_group, x_lane, x_n, y_group, y_lane,
                             block_rows: tl.constexpr, block_n: tl.constexpr, parts: tl.constexpr, deep: tl.constexpr,
                             acc_dtype: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    """Rows that lie side by side, whole or joined from their parts."""
    lanes, x_n = aligned(lanes, unit), aligned(x_n, unit)
    lane, _, group = strip_of(tl.program_id(0), lanes, 0, block_rows)
    inside = lane < lanes
    if parts:
        top, sums = joined(m, l, group * lanes + lane, inside, parts, True)
    else:
        step = tl.arange(0, block_n)[:, None].to(tl.int64)
        x_row = begin(x, group, lane, x_group, x_lane, unit)
        t = load_block(x_row, tl.cast(0, tl.int64), step, x_n, n, inside, float("-inf"), acc_dtype, deep)
        top = tl.max(t[0], 0)[None, :]
        sums = tree_sum(tl.exp(t[0] - finite_or_zero(top)))
    out = finite_or_zero(top) + tl.log(sums)
    tl.store(begin(y, group, lane, y_group, y_lane, 1), out.to(y.dtype.element_ty), mask=inside)


@BACKEND.implements("logsumexp", key=key, tiling=default_tiling, supports=supports, knobs={"num_warps": Tile(1, 32)})
def logsumexp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x, axis = call.arrays["x"], call.options["axis"]
    y, n = fresh(call.dims["rest"], x.dtype, x.device), call.dims["axis"]
    if side_by_side(x, axis):
        (x,), strips = walk_strips(call, axis, tiling, x)
        m, l = sum_parts(call, strips, n, x)
        launch(logsumexp_columns_kernel, strips.programs // max(strips.parts, 1), call, x, y, m, l, strips.lanes, n,
               *strips.strides[0], *strips.numbers, acc_dtype=accumulator(call.dtype), **strips.constants)  # fmt: skip
        return (y,)
    (x,), rows = walk_rows(axis, x)
    launch(logsumexp_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, y, rows.height, rows.inner, n,
           *rows.strides[0], acc_dtype=accumulator(call.dtype), **walked(call, n, tiling),
           **rows.known(call.dtype))  # fmt: skip
    return (y,)
