"""The linear layer with what follows it, in one kernel, and its gradients.

    z[i, j] = sum_k x[i, k] weight[j, k] + bias[j]        y = f(z) + residual

x: (rows, k), weight: (n, k) -> y, and pre, which is z: (rows, n). A program computes one block_m x block_n tile,
walking k in steps of block_k, as matmul's does and in the same order of tiles; the sum is still in registers when bias,
activation and residual meet it, so that each of them costs its own bytes and no further pass over y. The activations
are those of swiglu's and geglu's kernels.

At 8192 x 4096 x 4096 in 16 bits on an H100 a pass of its own for an activation moves 128 MiB, 0.04 ms beside a product
of 0.4 ms; with a residual 0.06 ms more.

    d_z = d_y f'(pre)        d_x = d_z weight        d_weight = d_z^T x        d_bias = sum over rows of d_z

One walk over d_y and pre writes d_z, in x's dtype, and sums what it writes over groups of rows; the gradient of
layernorm's bias adds these up. Without an activation d_z is d_y, and the walk only sums. matmul takes the two products,
with the tilings that it has for them: 4 rows n k operations, at 8192 x 4096 x 4096 in 16 bits on an H100 0.7 ms, beside
which the walk moves 0.2 GB in 0.07 ms.

Source: the order of tiles in "Matrix Multiplication" of the Triton tutorials (Tillet).
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import ProductConfig
from portakern.backends.triton.gpu import matmul as products
from portakern.backends.triton.gpu.linear_cross_entropy import multiply, refused
from portakern.backends.triton.gpu.matmul import ProductTile, summed
from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import RowStrides, collapse, contiguous_strides, fresh, row_start
from portakern.backends.triton.lib.linear import finish, gradients, supports_gradient
from portakern.backends.triton.lib.matmul import tile_index

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call
    from portakern.core.config import Config


class LinearExtents(NamedTuple):
    """Of a product; ``inner``: the rows of x in the inner of two dimensions, None where there is one."""

    m: int
    n: int
    k: int
    tiles_m: int
    tiles_n: int
    inner: int | None


class LinearStrides(NamedTuple):
    """Of x and the residual by rows, of weight (n, k), and of bias; 0 for what is absent."""

    x: RowStrides
    weight_n: int
    weight_k: int
    bias: int
    residual: RowStrides


@triton.jit
def rows_at(x, row, extents, strides):
    """Where rows begin in x."""
    if extents.inner is None:
        return row_start(x, row, 1, strides.outer, strides.inner, True, 1)
    else:
        return row_start(x, row, extents.inner, strides.outer, strides.inner, False, 1)


# Of a loop that is known to turn once Triton makes the product alone, which then begins at what is added to it, not at
# zeros: a bias far above the products would be rounded with each of them. So the steps stay a number like any other.
@triton.jit(do_not_specialize=["steps_k"])
def linear_kernel(
    x, weight, bias, residual, y, pre, extents, steps_k, strides, activation: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    """bias, residual and pre may be None."""
    tile_m, tile_n = tile_index(tl.program_id(0), extents.tiles_m, extents.tiles_n, tile.group)
    row = tile_m.to(tl.int64) * tile.block_m + tl.arange(0, tile.block_m)
    col = tile_n.to(tl.int64) * tile.block_n + tl.arange(0, tile.block_n)
    row_ok, col_ok = (row < extents.m)[:, None], (col < extents.n)[None, :]
    kk = tl.arange(0, tile.block_k).to(tl.int64)
    x_tile = rows_at(x, row, extents, strides.x)[:, None] + kk[None, :] * strides.x.n
    w_tile = weight + col[None, :] * strides.weight_n + kk[:, None] * strides.weight_k
    z = summed(x_tile, w_tile, row_ok, col_ok, extents.k, steps_k, strides.x.n, strides.weight_k, tile)
    residual_at = None
    if residual is not None:
        residual_at = rows_at(residual, row, extents, strides.residual)[:, None] + col[None, :] * strides.residual.n
    at = (row * extents.n)[:, None] + col[None, :]
    finish(z, bias, strides.bias, residual_at, y, pre, col, col < extents.n, at, row_ok & col_ok, activation,
           tile.acc_dtype)  # fmt: skip


def as_product(call: Call) -> Call:
    """The call of matmul that has the same tiles: x (rows, k) times (k, n)."""
    return call.replace(dims={**call.dims, "batch": (), "m": prod(call.dims["batch"])})


def supports(call: Call, config: ProductConfig) -> str | None:
    return products.supports(as_product(call), config)


@BACKEND.implements("linear", key=products.key, fit=products.fit, supports=supports, config=ProductConfig)
def linear(call: Call, config: ProductConfig) -> tuple[Any, ...]:
    x, weight, bias, residual = (call.arrays[name] for name in ("x", "weight", "bias", "residual"))
    m, n, k = prod(call.dims["batch"]), call.dims["n"], call.dims["k"]
    x, residual, (outer, inner), of_rows = rows(x, residual)
    y, pre = (fresh((*x.shape[:-1], n), x.dtype, x.device) if name in call.wants else None for name in ("y", "pre"))
    tiles_m, tiles_n, steps_k = cdiv(m, config.block_m), cdiv(n, config.block_n), cdiv(k, config.block_k)
    (x_outer, x_inner), (r_outer, r_inner) = of_rows
    weight_n, weight_k = weight.stride()
    strides = LinearStrides(
        RowStrides(x_outer, x_inner, x.stride(-1)), weight_n, weight_k, 0 if bias is None else bias.stride(0),
        RowStrides(r_outer, r_inner, 0 if residual is None else residual.stride(-1)),
    )  # fmt: skip
    launch(linear_kernel, tiles_m * tiles_n, call, x, weight, bias, residual, y, pre,
           LinearExtents(m, n, k, tiles_m, tiles_n, None if outer == 1 else inner), steps_k,
           strides, activation=call.options["activation"], tile=ProductTile.of(call, config),
           num_warps=config.num_warps,
           num_stages=config.num_stages, enable_fp_fusion=False)  # fmt: skip
    return y, pre


def rows(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Any, Any, tuple[int, ...], tuple[Any, Any]]:
    """x and residual, their rows in two dimensions (outer, inner), and the strides of each over these.

    Rows that two strides do not describe are gathered first.
    """

    def walked(*of: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        shape = x.shape[:-1]
        return collapse(shape, *(contiguous_strides(shape) if t is None else t.stride()[:-1] for t in of))

    extents, strides = walked(x, residual, None)
    if len(extents) > 2:
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        extents, strides = walked(x, residual, None)
    of_x, of_residual = (((0, 0) + s)[-2:] for s in strides[:2])
    return x, residual, ((1, 1) + extents)[-2:], (of_x, of_residual)


@BACKEND.implements("linear_vjp", supports=partial(supports_gradient, refusal=refused))
def linear_vjp(call: Call, config: Config) -> tuple[Any, ...]:
    return gradients(call, multiply)
