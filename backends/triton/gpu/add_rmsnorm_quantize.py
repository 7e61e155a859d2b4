"""A residual added, and the RMS normalisation of the sum along the last axis, in codes of 8 bits, in one pass.

    s = x + residual, rounded to their dtype        y = s r weight        r = (sum(s^2) / n + eps)^-1/2
    scale = max |y| / L of a group        q = y / scale, no further from 0 than L, rounded to nearest, ties to even

Programs, tiles and groups are those of rmsnorm_quantize; the sum is made as in add_rmsnorm. Of rows that do not stay in
registers a group's sum is stored as its codes are, when neither term is read any more: it may lie over the residual.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4; Micikevicius et al., "FP8
formats for deep learning" (2022).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import CodedRowsConfig
from portakern.backends.triton.gpu.add_rmsnorm import SumStrides, load_sum, starts_of_sum, sum_tiles
from portakern.backends.triton.gpu.layernorm import Affine, default_tiling, key, supports
from portakern.backends.triton.gpu.rmsnorm import inverse_rms, rounds_before
from portakern.backends.triton.gpu.rmsnorm_quantize import (
    CodedExtents,
    NormLimits,
    fresh_codes,
    group_plans,
    normed,
    store_codes,
    walk_groups,
)
from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import result_like, walk_rows
from portakern.backends.triton.lib.rows import own_rows, row_tile, whole_rows

if TYPE_CHECKING:
    from portakern.core.call import Call


class SummedRows(NamedTuple):
    """Rows of a sum to norm: where those of its terms and of the result begin, the terms' steps, which of them there
    are, their r, and what follows the norm."""

    x: Any
    x_n: Any
    residual: Any
    residual_n: Any
    total: Any
    ok: Any
    r: Any
    affine: Any


@triton.jit
def summed_columns(rows, lane, inside, last: tl.constexpr, narrow: tl.constexpr, tile: tl.constexpr):
    """y in columns ``lane``, those ``inside``, of rows that are read again; ``last``: for the last time, and the sum is
    stored."""
    at, ok = lane[None, :], rows.ok & inside[None, :]
    s = load_sum(rows.x + at * rows.x_n, rows.residual + at * rows.residual_n, ok, tile.acc_dtype)
    if last:
        tl.store(rows.total + at, s.to(rows.total.dtype.element_ty), mask=ok)
    return normed(s, rows.r, rows.x, rows.affine, lane, inside, narrow, tile)


@triton.jit
def squares_of_long_sums(x_row, residual_row, strides, n, row_ok, tile: tl.constexpr):
    """The sum of squares of rows of a sum that are read ``block_n`` numbers at a time."""
    squares = tl.full([tile.block_rows], 0.0, tile.acc_dtype)
    for start in range(0, tl.cast(n, tl.int64), tile.block_n):
        at = start + tl.arange(0, tile.block_n).to(tl.int64)[None, :]
        x_at, residual_at = x_row + at * strides.x.n, residual_row + at * strides.residual.n
        s = load_sum(x_at, residual_at, row_ok & (at < n), tile.acc_dtype)
        squares += tl.sum(s * s, 1)
    return squares


@triton.jit
def add_rmsnorm_quantize_kernel(
    x, residual, weight, q, scale, total, extents, strides, limits, narrow: tl.constexpr, codes: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    n, x_row, residual_row, out, row_ok = starts_of_sum(x, residual, extents, strides, tile)
    row, _ = own_rows(extents, tile)
    scale_row = (scale + row * extents.groups)[:, None]
    affine = Affine(weight, strides.weight, None, None)

    if tile.tiles:
        lane, inside, col, ok = whole_rows(n, row_ok, tile)
        s = sum_tiles(x_row, residual_row, strides, total + out, col, ok, tile.acc_dtype)
        r = inverse_rms(s, n, limits.eps)
        y = [normed(s[i], r, x, affine, lane[i], inside[i], narrow, tile) for i in (0, 1)[: len(s)]]
        store_codes(y, q + out, scale_row, col, ok, extents.groups, limits, codes)
    else:
        squares = squares_of_long_sums(x_row, residual_row, strides, n, row_ok, tile)
        r = tl.rsqrt(squares / n + limits.eps)[:, None]
        rows = SummedRows(x_row, strides.x.n, residual_row, strides.residual.n, total + out, row_ok, r, affine)
        walk_groups(summed_columns, rows, q + out, scale_row, extents, limits, narrow, codes, tile)


@BACKEND.implements(
    "add_rmsnorm_quantize", key=key, tiling=default_tiling, supports=supports, config=CodedRowsConfig, overwrites=True
)
def add_rmsnorm_quantize(call: Call, config: CodedRowsConfig) -> tuple[Any, ...]:
    x, residual, weight = (call.arrays[name] for name in ("x", "residual", "weight"))
    total = result_like(residual, call, "residual_out")
    (x, residual), rows = walk_rows(x.ndim - 1, x, residual)
    extents = CodedExtents.of(call, rows)
    codes, tile = group_plans(call, extents.width, row_tile(call, rows, extents.n, config))
    q, scale, stored = fresh_codes(call, x, codes)
    strides = SumStrides(rows.strides[0], rows.strides[1], 0 if weight is None else weight.stride(0))
    launch(add_rmsnorm_quantize_kernel, cdiv(rows.height, config.block_rows), call, x, residual, weight, stored, scale,
           total, extents, strides, NormLimits.of(call), narrow=rounds_before(call), codes=codes, tile=tile,
           num_warps=config.num_warps)  # fmt: skip
    return q, scale, total
