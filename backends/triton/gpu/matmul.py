"""Matrix product with batch broadcasting, and its gradients, each of which is one matrix product.

    c[.., i, j] = sum_k a[.., i, k] b[.., k, j]

a: (*#batch, m, k), b: (*#batch, k, n) -> c: (*batch, m, n). A program computes one block_m x block_n tile of c, walking
k in steps of block_k. Tiles are numbered so that ``group`` rows of tiles are finished column by column before the next
group starts, which keeps their operands in L2.

    d_a = d_c b^T        d_b = a^T d_c        both summed over the batch axes along which their operand was broadcast

A batch axis that is summed is one more factor of the contraction, folded in beside n (d_a) or m (d_b). The transposed
operands are strided views; only a cotangent whose summed axes lie between its rows is gathered into a copy. The tiling
is that of the product, for both.

Source: the order of tiles in "Matrix Multiplication" of the Triton tutorials (Tillet).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import ProductConfig
from portakern.backends.triton.launch import (
    accumulator,
    cdiv,
    dot_precision,
    launch,
    refuse_common,
    shared_limit,
    torch_dtype,
)
from portakern.backends.triton.layout import collapse, contiguous_strides, fresh, pow2_at_least
from portakern.backends.triton.lib.matmul import product, products, tile_index
from portakern.specs.matmul import batch_axes, product_dtype

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


class MatmulExtents(NamedTuple):
    """Of a product; ``tiles_m``, ``tiles_n``: the tiles of c; ``steps_k``: of the sum; ``batch_inner``: the extent of
    the inner batch dimension."""

    m: int
    n: int
    k: int
    tiles_m: int
    tiles_n: int
    steps_k: int
    batch_inner: int


class MatrixStrides(NamedTuple):
    """Of one array: in the outer and the inner batch dimension, between rows and between columns, None for 1."""

    outer: int
    inner: int
    row: int
    col: int | None = None


class ProductTile(NamedTuple):
    """What a product is compiled for: the extents of a tile, how many rows of tiles make a group, what is summed in and
    how products are taken, and whether no step of k is ragged."""

    block_m: int
    block_n: int
    block_k: int
    group: int
    acc_dtype: tl.dtype
    precision: str
    whole_k: bool

    @classmethod
    def of(cls, call: Call, config: ProductConfig) -> ProductTile:
        blocks = (config[name] for name in ("block_m", "block_n", "block_k", "group"))
        block_m, block_n, block_k, group = blocks
        whole_k = call.dims["k"] % block_k == 0
        return cls(block_m, block_n, block_k, group, accumulator(call.dtype), dot_precision(call), whole_k)


@triton.jit
def begin(x, outer, inner, strides):
    """Where a matrix of x begins."""
    return x + (outer * strides.outer + inner * strides.inner)


@triton.jit
def summed(a_tile, b_tile, i_ok, j_ok, k, steps_k, a_k, b_k, tile: tl.constexpr):
    """The product of the rows of a and the columns of b whose first tiles along k are a_tile and b_tile."""
    kk = tl.arange(0, tile.block_k)
    acc = tl.full([tile.block_m, tile.block_n], 0.0, tile.acc_dtype)
    for step in range(steps_k):
        if tile.whole_k:
            at, bt = tl.load(a_tile, mask=i_ok, other=0.0), tl.load(b_tile, mask=j_ok, other=0.0)
        else:
            left = k - tl.cast(step, tl.int64) * tile.block_k
            # Both operands read 0 beyond k: a NaN there times 0 would be NaN.
            at = tl.load(a_tile, mask=i_ok & (kk < left)[None, :], other=0.0)
            bt = tl.load(b_tile, mask=j_ok & (kk < left)[:, None], other=0.0)
        acc = tl.dot(at, bt, acc, input_precision=tile.precision, out_dtype=tile.acc_dtype)
        a_tile += tl.cast(a_k, tl.int64) * tile.block_k
        b_tile += tl.cast(b_k, tl.int64) * tile.block_k
    return acc


@triton.jit
def matmul_kernel(a, b, c, extents, a_strides, b_strides, c_strides, tile: tl.constexpr):
    program, tiles = tl.program_id(0), extents.tiles_m * extents.tiles_n
    batch, index = program // tiles, program % tiles
    tile_m, tile_n = tile_index(index, extents.tiles_m, extents.tiles_n, tile.group)
    i = tile_m.to(tl.int64) * tile.block_m + tl.arange(0, tile.block_m)
    j = tile_n.to(tl.int64) * tile.block_n + tl.arange(0, tile.block_n)
    kk = tl.arange(0, tile.block_k)
    outer, inner = (batch // extents.batch_inner).to(tl.int64), (batch % extents.batch_inner).to(tl.int64)
    a_tile = begin(a, outer, inner, a_strides) + (i[:, None] * a_strides.row + kk[None, :].to(tl.int64) * a_strides.col)
    b_tile = begin(b, outer, inner, b_strides) + (kk[:, None].to(tl.int64) * b_strides.row + j[None, :] * b_strides.col)
    i_ok, j_ok = (i < extents.m)[:, None], (j < extents.n)[None, :]
    acc = summed(a_tile, b_tile, i_ok, j_ok, extents.k, extents.steps_k, a_strides.col, b_strides.row, tile)
    c_tile = begin(c, outer, inner, c_strides) + (i[:, None] * c_strides.row + j[None, :])
    tl.store(c_tile, acc.to(c.dtype.element_ty), mask=i_ok & j_ok)


def key(call: Call) -> dict[str, str | int]:
    """Of n, k and the dtype, never of m or the batch: the same row gives the same bits in any company.

    ``aligned``: n and k are multiples of 8; else operands arrive element by element, through registers.
    """
    n, k = call.dims["n"], call.dims["k"]
    return {"products": products(call, call.dtype), "aligned": n % 8 == k % 8 == 0, "n": n, "k": k}


def fit(call: Call, config: ProductConfig) -> ProductConfig:
    return fit_to(call.dims["n"], call.dims["k"], config)


def fit_to(n: int, k: int, config: ProductConfig) -> ProductConfig:
    """Tiles no wider than n and k need."""
    block_n, block_k = config.block_n, config.block_k
    if n >= block_n and k >= block_k:
        return config
    narrow = {"block_n": pow2_at_least(n, 16, block_n), "block_k": pow2_at_least(k, 16, block_k)}
    return config.replace(**narrow)


def supports(call: Call, config: ProductConfig) -> str | None:
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    if max(block_m * block_n, block_m * block_k, block_k * block_n) > 1 << 20:
        return f"a tile of {block_m} x {block_n} x {block_k} has an operand over Triton's limit of 2^20 elements"
    if not call.interpret:
        size = 2 if call.dtype in ("float16", "bfloat16") else 4
        # The matrix units of Hopper and Blackwell read shared memory, so every stage stays there.
        in_registers = call.target.arch not in ("sm_90", "sm_100", "sm_103")
        buffers = max(1, config.num_stages - in_registers)
        shared = buffers * (block_m + block_n) * block_k * size
        if shared > shared_limit(call.target.arch):
            arch, limit = call.target.arch, shared_limit(call.target.arch)
            return (
                f"{config.num_stages} stages of {block_m} x {block_n} x {block_k} take {shared} bytes "
                f"of shared memory; {arch} has {limit}"
            )
        if block_m * block_n > config.num_warps * 32 * 256:
            return (
                f"a {block_m} x {block_n} accumulator does not fit in the registers of {config.num_warps} warps; "
                "use a smaller tile or more warps"
            )
    tiles = cdiv(call.dims["m"], block_m) * cdiv(call.dims["n"], block_n)
    for extent in call.dims["batch"]:
        tiles *= extent
    return refuse_common(call, config.num_warps, tiles)


@BACKEND.implements("matmul", key=key, fit=fit, supports=supports, config=ProductConfig)
def matmul(call: Call, config: ProductConfig, into: torch.Tensor | None = None) -> tuple[Any, ...]:
    """``into``: contiguous memory for c, where another op has some."""
    dims, a, b = call.dims, call.arrays["a"], call.arrays["b"]
    batch, m, n, k = dims["batch"], dims["m"], dims["n"], dims["k"]
    dtype = call.options["out_dtype"]
    c = fresh((*batch, m, n), torch_dtype(dtype) if dtype else a.dtype, a.device) if into is None else into
    if a.shape[:-2] != b.shape[:-2]:
        a, b = a.expand(*batch, m, k), b.expand(*batch, k, n)
    rows, strides = _rows(a, b, c)
    # Batch axes that two strides an operand cannot walk are the one case that gathers (and broadcasts) copies.
    if len(rows) > 3:
        a, b = a.contiguous(), b.contiguous()
        rows, strides = _rows(a, b, c)
    batch_outer, batch_inner, m = ((1, 1) + rows)[-3:]
    (a_outer, a_inner, a_m), (b_outer, b_inner, _), (c_outer, c_inner, c_m) = (((0, 0) + s)[-3:] for s in strides)
    tiles_m, tiles_n, steps_k = cdiv(m, config.block_m), cdiv(n, config.block_n), cdiv(k, config.block_k)
    launch(matmul_kernel, batch_outer * batch_inner * tiles_m * tiles_n, call, a, b, c,
           MatmulExtents(m, n, k, tiles_m, tiles_n, steps_k, batch_inner),
           MatrixStrides(a_outer, a_inner, a_m, a.stride(-1)),
           MatrixStrides(b_outer, b_inner, b.stride(-2), b.stride(-1)), MatrixStrides(c_outer, c_inner, c_m),
           tile=ProductTile.of(call, config), num_warps=config.num_warps,
           num_stages=config.num_stages)  # fmt: skip
    return (c,)


def _rows(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The batch axes and m, collapsed together, and the strides of a, b and c over them.

    Where b is not batched, all rows of a become one tall matrix. m stays, even as 1.
    """
    shape, (sa, sb, sc) = collapse(
        c.shape[:-1], a.stride()[:-1], (*b.stride()[:-2], 0), contiguous_strides(c.shape)[:-1]
    )
    if shape and not sb[-1]:
        return shape, [sa, sb, sc]
    return (*shape, 1), [(*sa, 0), (*sb, 0), (*sc, 0)]


def reach(call: Call) -> int:
    """The extent for which the tiles of a product suit the n columns of d_b and the k columns of d_a.

    It is the larger of both, and odd where either is no multiple of 8.
    """
    n, k = call.dims["n"], call.dims["k"]
    return max(n, k) | (n % 8 > 0 or k % 8 > 0)


def gradient_key(call: Call) -> dict[str, str | int]:
    """That of a product with this reach."""
    extent, kind = reach(call), products(call, product_dtype(call))
    return {"products": kind, "aligned": extent % 8 == 0, "n": extent, "k": extent}


def fit_gradient(call: Call, config: ProductConfig) -> ProductConfig:
    extent = reach(call)
    return fit_to(extent, extent, config)


def supports_gradient(call: Call, config: ProductConfig) -> str | None:
    m, n, k, batch = (call.dims[name] for name in ("m", "n", "k", "batch"))
    dims = {"d_a": {"m": m, "n": k, "k": n}, "d_b": {"m": k, "n": n, "k": m}}
    for name in call.wants:
        kept, _ = batch_axes(call, name)
        reason = supports(
            call.replace(dtype=product_dtype(call), dims=dims[name] | {"batch": tuple(batch[i] for i in kept)}), config
        )
        if reason:
            return f"{name}: {reason}"
    return None


@BACKEND.implements("matmul_vjp", key=gradient_key, fit=fit_gradient, supports=supports_gradient, config=ProductConfig)
def matmul_vjp(call: Call, config: ProductConfig) -> tuple[Any, ...]:
    def gradient(name: str) -> torch.Tensor | None:
        if name not in call.wants:
            return None
        (c,) = matmul(product(call, name), config)
        return c.reshape(call.outputs[name][0])

    return gradient("d_a"), gradient("d_b")
