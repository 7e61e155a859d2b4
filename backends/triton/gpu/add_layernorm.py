"""A residual added, and the layer normalisation of the sum along the last axis, in one pass.

    s = x + residual, rounded to their dtype        y = (s - mean) / sqrt(var + eps) * weight + bias

Programs, tiles and the statistics of the sum are those of layernorm. A row that fits in ``tiles`` tiles is read
once, and its sum stays in registers; of a longer one x and residual are read twice (statistics, results), the second
time from cache.

Sources: Ba, Kiros and Hinton, "Layer Normalization" (2016), section 3; Chan, Golub and LeVeque, "Updating formulae and
a pairwise algorithm for computing sample variances" (1979), equation 2.1; the sum is that of pre-norm transformers,
Xiong et al., "On layer normalization in the transformer architecture" (2020), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu.add_rmsnorm import load_sum, sum_tiles
from portakern.backends.triton.gpu.layernorm import default_tiling, join, key, scale_and_shift, supports
from portakern.backends.triton.launch import accumulator, cdiv, launch
from portakern.backends.triton.layout import aligned, fresh_like, result_like, row_start, walk_rows
from portakern.backends.triton.lib.rows import centred, columns, told
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def add_layernorm_kernel(x, residual, weight, bias, y, total, rows, rows_inner, n, eps,
                         x_outer, x_inner, x_n, residual_outer, residual_inner, residual_n, weight_n, bias_n,
                         block_rows: tl.constexpr, block_n: tl.constexpr, tail: tl.constexpr, tiles: tl.constexpr,
                         acc_dtype: tl.constexpr, flat: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    n = aligned(n, unit)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    x_row = row_start(x, row, rows_inner, x_outer, x_inner, flat, unit)[:, None]
    residual_row = row_start(residual, row, rows_inner, residual_outer, residual_inner, flat, unit)[:, None]
    out, row_ok = (row * n)[:, None], (row < rows)[:, None]

    if tiles:
        lane, inside = columns(0, n, block_n, tail)
        col, ok = [a[None, :] for a in lane], [row_ok & a[None, :] for a in inside]
        s = sum_tiles(x_row, x_n, residual_row, residual_n, total + out, col, ok, acc_dtype)
        d, r = centred(s, ok, n, eps, tiles)
        for i in tl.static_range(tiles):
            normed = scale_and_shift(d[i] * r, weight, bias, weight_n, bias_n, lane[i], inside[i], acc_dtype, unit)
            tl.store(y + out + col[i], normed.to(y.dtype.element_ty), mask=ok[i])
    else:
        lane = tl.arange(0, block_n).to(tl.int64)
        col = lane[None, :]
        mean, m2 = tl.zeros([block_rows], acc_dtype), tl.zeros([block_rows], acc_dtype)
        for start in range(0, tl.cast(n, tl.int64), block_n):
            at = start + col
            ok = row_ok & (at < n)
            s = load_sum(x_row + at * x_n, residual_row + at * residual_n, ok, acc_dtype)
            mean, m2 = join(mean, m2, s, ok, start, n, block_n, acc_dtype)
        r = tl.rsqrt(m2 / n + eps)
        for start in range(0, tl.cast(n, tl.int64), block_n):
            at = start + col
            ok = row_ok & (at < n)
            s = load_sum(x_row + at * x_n, residual_row + at * residual_n, ok, acc_dtype)
            tl.store(total + out + at, s.to(total.dtype.element_ty), mask=ok)
            xh = (s - mean[:, None]) * r[:, None]
            normed = scale_and_shift(
                xh, weight, bias, weight_n, bias_n, start + lane, start + lane < n, acc_dtype, unit
            )
            tl.store(y + out + at, normed.to(y.dtype.element_ty), mask=ok)


@BACKEND.implements(
    "add_layernorm",
    key=key,
    tiling=default_tiling,
    supports=supports,
    knobs={"num_warps": Tile(1, 32)},
    overwrites=True,
)
def add_layernorm(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x, residual, weight, bias = (call.arrays[name] for name in ("x", "residual", "weight", "bias"))
    n, y, total = call.dims["n"], fresh_like(x), result_like(residual, call, "residual_out")
    (x, residual), rows = walk_rows(x.ndim - 1, x, residual)
    weight_n, bias_n = (0 if w is None else w.stride(0) for w in (weight, bias))
    launch(add_layernorm_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, residual, weight, bias, y, total,
           rows.height, rows.inner, n, call.options["eps"], *rows.strides[0], *rows.strides[1], weight_n, bias_n,
           acc_dtype=accumulator(call.dtype), **told(call, n, tiling), **rows.known(call.dtype))  # fmt: skip
    return y, total
