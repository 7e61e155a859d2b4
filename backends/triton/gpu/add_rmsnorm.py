"""A residual added, and the root mean square normalisation of the sum along the last axis, in one pass.

    s = x + residual, rounded to their dtype        y = s r weight        r = (sum(s^2) / n + eps)^-1/2

Programs and tiles are those of rmsnorm. A row that fits in ``tiles`` tiles is read once, and its sum stays in
registers; of a longer one x and residual are read twice (squares, results), the second time from cache.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4; the sum is that of pre-norm
transformers, Xiong et al., "On layer normalization in the transformer architecture" (2020), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu.layernorm import default_tiling, key, narrowed, scale_and_shift, supports
from portakern.backends.triton.gpu.rmsnorm import rounds_before
from portakern.backends.triton.launch import accumulator, cdiv, launch
from portakern.backends.triton.layout import aligned, fresh_like, result_like, row_start, walk_rows
from portakern.backends.triton.lib.rows import columns, row_sum, told
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def load_sum(x, residual, ok, acc_dtype: tl.constexpr):
    """x + residual, rounded to their dtype, and 0 where ``ok`` is not."""
    total = tl.load(x, mask=ok, other=0.0).to(acc_dtype) + tl.load(residual, mask=ok, other=0.0).to(acc_dtype)
    return total.to(x.dtype.element_ty).to(acc_dtype)


@triton.jit
def sum_tiles(x, x_n, residual, residual_n, total, col, ok, acc_dtype: tl.constexpr):
    """x + residual in the columns of each tile, which is stored in total as well."""
    s = [load_sum(x + col[i] * x_n, residual + col[i] * residual_n, ok[i], acc_dtype) for i in (0, 1)[: len(col)]]
    for i in tl.static_range(len(col)):
        tl.store(total + col[i], s[i].to(total.dtype.element_ty), mask=ok[i])
    return s


@triton.jit
def add_rmsnorm_kernel(x, residual, weight, y, total, rows, rows_inner, n, eps,
                       x_outer, x_inner, x_n, residual_outer, residual_inner, residual_n, weight_n,
                       block_rows: tl.constexpr, block_n: tl.constexpr, tail: tl.constexpr, tiles: tl.constexpr,
                       acc_dtype: tl.constexpr, narrow: tl.constexpr, flat: tl.constexpr,
                       unit: tl.constexpr):  # fmt: skip
    n = aligned(n, unit)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    x_row = row_start(x, row, rows_inner, x_outer, x_inner, flat, unit)[:, None]
    residual_row = row_start(residual, row, rows_inner, residual_outer, residual_inner, flat, unit)[:, None]
    out, row_ok = (row * n)[:, None], (row < rows)[:, None]

    if tiles:
        lane, inside = columns(0, n, block_n, tail)
        col, ok = [a[None, :] for a in lane], [row_ok & a[None, :] for a in inside]
        s = sum_tiles(x_row, x_n, residual_row, residual_n, total + out, col, ok, acc_dtype)
        r = tl.rsqrt(row_sum([a * a for a in s]) / n + eps)[:, None]
        for i in tl.static_range(tiles):
            xh = narrowed(s[i] * r, x, narrow)
            normed = scale_and_shift(xh, weight, None, weight_n, 0, lane[i], inside[i], acc_dtype, unit)
            tl.store(y + out + col[i], normed.to(y.dtype.element_ty), mask=ok[i])
    else:
        lane = tl.arange(0, block_n).to(tl.int64)
        col = lane[None, :]
        squares = tl.zeros([block_rows], acc_dtype)
        for start in range(0, tl.cast(n, tl.int64), block_n):
            at = start + col
            s = load_sum(x_row + at * x_n, residual_row + at * residual_n, row_ok & (at < n), acc_dtype)
            squares += tl.sum(s * s, 1)
        r = tl.rsqrt(squares / n + eps)[:, None]
        for start in range(0, tl.cast(n, tl.int64), block_n):
            at = start + col
            ok = row_ok & (at < n)
            s = load_sum(x_row + at * x_n, residual_row + at * residual_n, ok, acc_dtype)
            tl.store(total + out + at, s.to(total.dtype.element_ty), mask=ok)
            normed = scale_and_shift(
                narrowed(s * r, x, narrow), weight, None, weight_n, 0, start + lane, start + lane < n, acc_dtype, unit
            )
            tl.store(y + out + at, normed.to(y.dtype.element_ty), mask=ok)


@BACKEND.implements(
    "add_rmsnorm",
    key=key,
    tiling=default_tiling,
    supports=supports,
    knobs={"num_warps": Tile(1, 32)},
    overwrites=True,
)
def add_rmsnorm(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x, residual, weight = (call.arrays[name] for name in ("x", "residual", "weight"))
    n, y, total = call.dims["n"], fresh_like(x), result_like(residual, call, "residual_out")
    (x, residual), rows = walk_rows(x.ndim - 1, x, residual)
    launch(add_rmsnorm_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, residual, weight, y, total,
           rows.height, rows.inner, n, call.options["eps"], *rows.strides[0], *rows.strides[1],
           0 if weight is None else weight.stride(0), acc_dtype=accumulator(call.dtype), narrow=rounds_before(call),
           **told(call, n, tiling), **rows.known(call.dtype))  # fmt: skip
    return y, total
