"""A residual added, and the RMS normalisation of the sum along the last axis, in one pass, and its gradients.

    s = x + residual, rounded to their dtype        y = s r weight        r = (sum(s^2) / n + eps)^-1/2

Programs and tiles are those of rmsnorm. A row that fits in ``tiles`` tiles is read once, and its sum stays in
registers; of a longer one x and residual are read twice (squares, results), the second time from cache.

    d_x = d_residual_out + the d_x of rmsnorm_vjp at the sum, which is the gradient of both terms

The gradients' kernels, programs and partial sums are those of rmsnorm's, whose d_x meets the other cotangent before
it is rounded.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4; the sum is that of pre-norm
transformers, Xiong et al., "On layer normalization in the transformer architecture" (2020), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import RowGradientsConfig, RowsConfig
from portakern.backends.triton.gpu.layernorm import (
    Affine,
    default_tiling,
    gradient_tiling,
    key,
    narrowed,
    scale_and_shift,
    supports,
    supports_gradient,
)
from portakern.backends.triton.gpu.rmsnorm import gradients, inverse_rms, rounds_before
from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import RowStrides, fresh_like, result_like, walk_rows
from portakern.backends.triton.lib.rows import RowExtents, own_rows, row_tile, start_of, whole_rows

if TYPE_CHECKING:
    from portakern.core.call import Call


class SumStrides(NamedTuple):
    """Of both terms of a sum, and of weight and bias, None where a norm has no bias."""

    x: RowStrides
    residual: RowStrides
    weight: int
    bias: int | None = None


@triton.jit
def starts_of_sum(x, residual, extents, strides, tile: tl.constexpr):
    """Of the rows that this program owns the numbers of each, and, as columns, where they begin in both terms and,
    counted in elements, in contiguous results, and which of them there are."""
    row, n = own_rows(extents, tile)
    x_row = start_of(x, row, extents, strides.x, tile)
    residual_row = start_of(residual, row, extents, strides.residual, tile)
    return n, x_row, residual_row, (row * n)[:, None], (row < extents.height)[:, None]


@triton.jit
def load_sum(x, residual, ok, acc_dtype: tl.constexpr):
    """x + residual, rounded to their dtype, and 0 where ``ok`` is not."""
    total = tl.load(x, mask=ok, other=0.0).to(acc_dtype) + tl.load(residual, mask=ok, other=0.0).to(acc_dtype)
    return total.to(x.dtype.element_ty).to(acc_dtype)


@triton.jit
def sum_tiles(x, residual, strides, total, col, ok, acc_dtype: tl.constexpr):
    """x + residual in the columns of each tile, which is stored in total as well."""
    x_n, residual_n = strides.x.n, strides.residual.n
    s = [load_sum(x + col[i] * x_n, residual + col[i] * residual_n, ok[i], acc_dtype) for i in (0, 1)[: len(col)]]
    for i in tl.static_range(len(col)):
        tl.store(total + col[i], s[i].to(total.dtype.element_ty), mask=ok[i])
    return s


@triton.jit
def add_rmsnorm_kernel(
    x, residual, weight, y, total, extents, eps, strides, narrow: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    n, x_row, residual_row, out, row_ok = starts_of_sum(x, residual, extents, strides, tile)
    affine = Affine(weight, strides.weight, None, None)

    if tile.tiles:
        lane, inside, col, ok = whole_rows(n, row_ok, tile)
        s = sum_tiles(x_row, residual_row, strides, total + out, col, ok, tile.acc_dtype)
        r = inverse_rms(s, n, eps)
        for i in tl.static_range(len(col)):
            xh = narrowed(s[i] * r, x, narrow)
            normed = scale_and_shift(xh, affine, lane[i], inside[i], tile)
            tl.store(y + out + col[i], normed.to(y.dtype.element_ty), mask=ok[i])
    else:
        lane = tl.arange(0, tile.block_n).to(tl.int64)
        col = lane[None, :]
        squares = tl.full([tile.block_rows], 0.0, tile.acc_dtype)
        for start in range(0, tl.cast(n, tl.int64), tile.block_n):
            at = start + col
            x_at, residual_at = x_row + at * strides.x.n, residual_row + at * strides.residual.n
            s = load_sum(x_at, residual_at, row_ok & (at < n), tile.acc_dtype)
            squares += tl.sum(s * s, 1)
        r = tl.rsqrt(squares / n + eps)[:, None]
        for start in range(0, tl.cast(n, tl.int64), tile.block_n):
            at = start + col
            ok = row_ok & (at < n)
            x_at, residual_at = x_row + at * strides.x.n, residual_row + at * strides.residual.n
            s = load_sum(x_at, residual_at, ok, tile.acc_dtype)
            tl.store(total + out + at, s.to(total.dtype.element_ty), mask=ok)
            normed = scale_and_shift(narrowed(s * r, x, narrow), affine, start + lane, start + lane < n, tile)
            tl.store(y + out + at, normed.to(y.dtype.element_ty), mask=ok)


@BACKEND.implements(
    "add_rmsnorm",
    key=key,
    tiling=default_tiling,
    supports=supports,
    config=RowsConfig,
    overwrites=True,
)
def add_rmsnorm(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    x, residual, weight = (call.arrays[name] for name in ("x", "residual", "weight"))
    n, y, total = call.dims["n"], fresh_like(x), result_like(residual, call, "residual_out")
    (x, residual), rows = walk_rows(x.ndim - 1, x, residual)
    weight_n = 0 if weight is None else weight.stride(0)
    launch(add_rmsnorm_kernel, cdiv(rows.height, config.block_rows), call, x, residual, weight, y, total,
           RowExtents(rows.height, rows.inner, n), call.options["eps"],
           SumStrides(rows.strides[0], rows.strides[1], weight_n), narrow=rounds_before(call),
           tile=row_tile(call, rows, n, config), num_warps=config.num_warps)  # fmt: skip
    return y, total


@BACKEND.implements(
    "add_rmsnorm_vjp", key=key, tiling=gradient_tiling, supports=supports_gradient, config=RowGradientsConfig
)
def add_rmsnorm_vjp(call: Call, config: RowGradientsConfig) -> tuple[Any, ...]:
    return gradients(call, config, call.arrays["residual_out"], call.arrays["d_residual_out"])
