"""A residual added, and the layer normalisation of the sum along the last axis, in one pass, and its gradients.

    s = x + residual, rounded to their dtype        y = (s - mean) / sqrt(var + eps) * weight + bias

Programs, tiles and the statistics of the sum are those of layernorm. A row that fits in ``tiles`` tiles is read
once, and its sum stays in registers; of a longer one x and residual are read twice (statistics, results), the second
time from cache.

    d_x = d_residual_out + the d_x of layernorm_vjp at the sum, which is the gradient of both terms

The gradients' kernels, programs and partial sums are those of layernorm's, whose d_x meets the other cotangent before
it is rounded.

Sources: Ba, Kiros and Hinton, "Layer Normalization" (2016), section 3; Chan, Golub and LeVeque, "Updating formulae and
a pairwise algorithm for computing sample variances" (1979), equation 2.1; the sum is that of pre-norm transformers,
Xiong et al., "On layer normalization in the transformer architecture" (2020), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import RowGradientsConfig, RowsConfig
from portakern.backends.triton.gpu.add_rmsnorm import SumStrides, load_sum, starts_of_sum, sum_tiles
from portakern.backends.triton.gpu.layernorm import (
    Affine,
    default_tiling,
    gradient_tiling,
    gradients,
    join,
    key,
    scale_and_shift,
    supports,
    supports_gradient,
)
from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import fresh_like, result_like, walk_rows
from portakern.backends.triton.lib.rows import RowExtents, centred, row_tile, whole_rows

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def add_layernorm_kernel(x, residual, weight, bias, y, total, extents, eps, strides, tile: tl.constexpr):
    n, x_row, residual_row, out, row_ok = starts_of_sum(x, residual, extents, strides, tile)
    affine = Affine(weight, strides.weight, bias, strides.bias)

    if tile.tiles:
        lane, inside, col, ok = whole_rows(n, row_ok, tile)
        s = sum_tiles(x_row, residual_row, strides, total + out, col, ok, tile.acc_dtype)
        d, r = centred(s, ok, n, eps)
        for i in tl.static_range(len(col)):
            normed = scale_and_shift(d[i] * r, affine, lane[i], inside[i], tile)
            tl.store(y + out + col[i], normed.to(y.dtype.element_ty), mask=ok[i])
    else:
        lane = tl.arange(0, tile.block_n).to(tl.int64)
        col = lane[None, :]
        mean = tl.full([tile.block_rows], 0.0, tile.acc_dtype)
        m2 = mean
        for start in range(0, tl.cast(n, tl.int64), tile.block_n):
            at = start + col
            ok = row_ok & (at < n)
            x_at, residual_at = x_row + at * strides.x.n, residual_row + at * strides.residual.n
            s = load_sum(x_at, residual_at, ok, tile.acc_dtype)
            mean, m2 = join(mean, m2, s, ok, start, n, tile)
        r = tl.rsqrt(m2 / n + eps)
        for start in range(0, tl.cast(n, tl.int64), tile.block_n):
            at = start + col
            ok = row_ok & (at < n)
            x_at, residual_at = x_row + at * strides.x.n, residual_row + at * strides.residual.n
            s = load_sum(x_at, residual_at, ok, tile.acc_dtype)
            tl.store(total + out + at, s.to(total.dtype.element_ty), mask=ok)
            xh = (s - mean[:, None]) * r[:, None]
            normed = scale_and_shift(xh, affine, start + lane, start + lane < n, tile)
            tl.store(y + out + at, normed.to(y.dtype.element_ty), mask=ok)


@BACKEND.implements(
    "add_layernorm",
    key=key,
    tiling=default_tiling,
    supports=supports,
    config=RowsConfig,
    overwrites=True,
)
def add_layernorm(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    x, residual, weight, bias = (call.arrays[name] for name in ("x", "residual", "weight", "bias"))
    n, y, total = call.dims["n"], fresh_like(x), result_like(residual, call, "residual_out")
    (x, residual), rows = walk_rows(x.ndim - 1, x, residual)
    weight_n, bias_n = (0 if w is None else w.stride(0) for w in (weight, bias))
    launch(add_layernorm_kernel, cdiv(rows.height, config.block_rows), call, x, residual, weight, bias, y, total,
           RowExtents(rows.height, rows.inner, n), call.options["eps"],
           SumStrides(rows.strides[0], rows.strides[1], weight_n, bias_n), tile=row_tile(call, rows, n, config),
           num_warps=config.num_warps)  # fmt: skip
    return y, total


@BACKEND.implements(
    "add_layernorm_vjp", key=key, tiling=gradient_tiling, supports=supports_gradient, config=RowGradientsConfig
)
def add_layernorm_vjp(call: Call, config: RowGradientsConfig) -> tuple[Any, ...]:
    return gradients(call, config, call.arrays["residual_out"], call.arrays["d_residual_out"])
