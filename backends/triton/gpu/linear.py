"""The linear layer with what follows it, in one kernel.

    z[i, j] = sum_k x[i, k] weight[j, k] + bias[j]        y = f(z) + residual

x: (rows, k), weight: (n, k) -> y, and pre, which is z: (rows, n). A program computes one block_m x block_n tile,
walking k in steps of block_k, as matmul's does and in the same order of tiles; the sum is still in registers when bias,
activation and residual meet it, so that each of them costs its own bytes and no further pass over y. The activations
are those of swiglu's and geglu's kernels.

At 8192 x 4096 x 4096 in 16 bits on an H100 a pass of its own for an activation moves 128 MiB, 0.04 ms beside a product
of 0.4 ms; with a residual 0.06 ms more.

Source: the order of tiles in "Matrix Multiplication" of the Triton tutorials (Tillet).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu import matmul as products
from portakern.backends.triton.gpu.matmul import summed
from portakern.backends.triton.launch import accumulator, cdiv, dot_precision, launch
from portakern.backends.triton.layout import collapse, contiguous_strides, fresh, row_start
from portakern.backends.triton.lib.linear import finish
from portakern.backends.triton.lib.matmul import place
from portakern.spec import Count, Tile

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


# Of a loop that is known to turn once Triton makes the product alone, which then begins at what is added to it, not at
# zeros: a bias far above the products would be rounded with each of them. So the steps stay a number like any other.
@triton.jit(do_not_specialize=["steps_k"])
def linear_kernel(x, weight, bias, residual, y, pre, m, n, k, tiles_m, tiles_n, steps_k, inner,
                  x_outer, x_inner, x_k, w_n, w_k, bias_n, r_outer, r_inner, r_n,
                  activation: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
                  group: tl.constexpr, acc_dtype: tl.constexpr, precision: tl.constexpr, flat: tl.constexpr,
                  whole_k: tl.constexpr):  # fmt: skip
    """bias, residual and pre may be None."""
    tile_m, tile_n = place(tl.program_id(0), tiles_m, tiles_n, group)
    row = tile_m.to(tl.int64) * block_m + tl.arange(0, block_m)
    col = tile_n.to(tl.int64) * block_n + tl.arange(0, block_n)
    row_ok, col_ok = (row < m)[:, None], (col < n)[None, :]
    kk = tl.arange(0, block_k).to(tl.int64)
    x_tile = row_start(x, row, inner, x_outer, x_inner, flat, 1)[:, None] + kk[None, :] * x_k
    w_tile = weight + col[None, :] * w_n + kk[:, None] * w_k
    z = summed(x_tile, w_tile, row_ok, col_ok, k, steps_k, x_k, w_k,
               block_m, block_n, block_k, acc_dtype, precision, whole_k)  # fmt: skip
    residual_at = None
    if residual is not None:
        residual_at = row_start(residual, row, inner, r_outer, r_inner, flat, 1)[:, None] + col[None, :] * r_n
    finish(z, bias, bias_n, residual_at, y, pre, col, col < n, (row * n)[:, None] + col[None, :], row_ok & col_ok,
           activation, acc_dtype)  # fmt: skip


def as_product(call: Call) -> Call:
    """The call of matmul that has the same tiles: x (rows, k) times (k, n)."""
    return call.replace(dims={**call.dims, "batch": (), "m": prod(call.dims["batch"])})


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    return products.supports(as_product(call), tiling)


@BACKEND.implements(
    "linear",
    key=products.key,
    fit=products.fit,
    supports=supports,
    knobs={"num_warps": Tile(1, 32), "num_stages": Count(1, 8), "group": Tile(1, 64)},
)
def linear(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x, weight, bias, residual = (call.arrays[name] for name in ("x", "weight", "bias", "residual"))
    m, n, k = prod(call.dims["batch"]), call.dims["n"], call.dims["k"]
    x, residual, (outer, inner), strides = rows(x, residual)
    y, pre = (fresh((*x.shape[:-1], n), x.dtype, x.device) if name in call.wants else None for name in ("y", "pre"))
    tiles_m, tiles_n, steps_k = cdiv(m, tiling["block_m"]), cdiv(n, tiling["block_n"]), cdiv(k, tiling["block_k"])
    launch(linear_kernel, tiles_m * tiles_n, call, x, weight, bias, residual, y, pre, m, n, k, tiles_m, tiles_n,
           steps_k, inner, *strides[0], x.stride(-1), *weight.stride(), 0 if bias is None else bias.stride(0),
           *strides[1], 0 if residual is None else residual.stride(-1), activation=call.options["activation"],
           block_m=tiling["block_m"], block_n=tiling["block_n"], block_k=tiling["block_k"], group=tiling["group"],
           acc_dtype=accumulator(call.dtype), precision=dot_precision(call), flat=outer == 1,
           whole_k=k % tiling["block_k"] == 0, num_warps=tiling["num_warps"],
           num_stages=tiling["num_stages"], enable_fp_fusion=False)  # fmt: skip
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
