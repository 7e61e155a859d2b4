"""Matrix product with batch broadcasting.

    c[.., i, j] = sum_k a[.., i, k] b[.., k, j]

a: (*#batch, m, k), b: (*#batch, k, n) -> c: (*batch, m, n). A program computes one block_m x block_n tile of c, walking
k in steps of block_k. Tiles are numbered so that ``group`` rows of tiles are finished column by column before the next
group starts, which keeps their operands in L2.

Source: the order of tiles in "Matrix Multiplication" of the Triton tutorials (Tillet).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
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
from portakern.backends.triton.lib.matmul import place, products
from portakern.spec import Count, Tile

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


@triton.jit
def summed(a_tile, b_tile, i_ok, j_ok, k, steps_k, a_k, b_k,
           block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, acc_dtype: tl.constexpr,
           precision: tl.constexpr, whole_k: tl.constexpr):  # fmt: skip
    """The product of the rows of a and the columns of b whose first tiles along k are a_tile and b_tile."""
    kk = tl.arange(0, block_k)
    acc = tl.zeros([block_m, block_n], acc_dtype)
    for step in range(steps_k):
        if whole_k:
            at, bt = tl.load(a_tile, mask=i_ok, other=0.0), tl.load(b_tile, mask=j_ok, other=0.0)
        else:
            left = k - tl.cast(step, tl.int64) * block_k
            # Both operands read 0 beyond k: a NaN there times 0 would be NaN.
            at = tl.load(a_tile, mask=i_ok & (kk < left)[None, :], other=0.0)
            bt = tl.load(b_tile, mask=j_ok & (kk < left)[:, None], other=0.0)
        acc = tl.dot(at, bt, acc, input_precision=precision, out_dtype=acc_dtype)
        a_tile += tl.cast(a_k, tl.int64) * block_k
        b_tile += tl.cast(b_k, tl.int64) * block_k
    return acc


@triton.jit
def matmul_kernel(a, b, c, m, n, k, tiles_m, tiles_n, steps_k, batch_inner,
                  a_outer, a_inner, a_m, a_k, b_outer, b_inner, b_k, b_n, c_outer, c_inner, c_m,
                  block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, group: tl.constexpr,
                  acc_dtype: tl.constexpr, precision: tl.constexpr, whole_k: tl.constexpr):  # fmt: skip
    batch, tile = tl.program_id(0) // (tiles_m * tiles_n), tl.program_id(0) % (tiles_m * tiles_n)
    tile_m, tile_n = place(tile, tiles_m, tiles_n, group)
    i = tile_m.to(tl.int64) * block_m + tl.arange(0, block_m)
    j = tile_n.to(tl.int64) * block_n + tl.arange(0, block_n)
    kk = tl.arange(0, block_k)
    outer, inner = (batch // batch_inner).to(tl.int64), (batch % batch_inner).to(tl.int64)
    a_tile = a + (outer * a_outer + inner * a_inner) + (i[:, None] * a_m + kk[None, :].to(tl.int64) * a_k)
    b_tile = b + (outer * b_outer + inner * b_inner) + (kk[:, None].to(tl.int64) * b_k + j[None, :] * b_n)
    i_ok, j_ok = (i < m)[:, None], (j < n)[None, :]
    acc = summed(a_tile, b_tile, i_ok, j_ok, k, steps_k, a_k, b_k,
                 block_m, block_n, block_k, acc_dtype, precision, whole_k)  # fmt: skip
    c_tile = c + (outer * c_outer + inner * c_inner) + (i[:, None] * c_m + j[None, :])
    tl.store(c_tile, acc.to(c.dtype.element_ty), mask=i_ok & j_ok)


def key(call: Call) -> dict[str, str | int]:
    """Of n, k and the dtype, never of m or the batch: the same row gives the same bits in any company.

    ``aligned``: n and k are multiples of 8; else operands arrive element by element, through registers.
    """
    n, k = call.dims["n"], call.dims["k"]
    return {"products": products(call, call.dtype), "aligned": n % 8 == k % 8 == 0, "n": n, "k": k}


def fit(call: Call, tiling: Mapping[str, int]) -> Mapping[str, int]:
    return fit_to(call.dims["n"], call.dims["k"], tiling)


def fit_to(n: int, k: int, tiling: Mapping[str, int]) -> Mapping[str, int]:
    """Tiles no wider than n and k need."""
    block_n, block_k = tiling["block_n"], tiling["block_k"]
    if n >= block_n and k >= block_k:
        return tiling
    narrow = {"block_n": pow2_at_least(n, 16, block_n), "block_k": pow2_at_least(k, 16, block_k)}
    return {**tiling, **narrow}


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    block_m, block_n, block_k = tiling["block_m"], tiling["block_n"], tiling["block_k"]
    if max(block_m * block_n, block_m * block_k, block_k * block_n) > 1 << 20:
        return f"a tile of {block_m} x {block_n} x {block_k} has an operand over Triton's limit of 2^20 elements"
    if not call.interpret:
        size = 2 if call.dtype in ("float16", "bfloat16") else 4
        # The matrix units of Hopper and Blackwell read shared memory, so every stage stays there.
        in_registers = call.target.arch not in ("sm_90", "sm_100", "sm_103")
        buffers = max(1, tiling["num_stages"] - in_registers)
        shared = buffers * (block_m + block_n) * block_k * size
        if shared > shared_limit(call.target.arch):
            arch, limit = call.target.arch, shared_limit(call.target.arch)
            return (
                f"{tiling['num_stages']} stages of {block_m} x {block_n} x {block_k} take {shared} bytes "
                f"of shared memory; {arch} has {limit}"
            )
        if block_m * block_n > tiling["num_warps"] * 32 * 256:
            return (
                f"a {block_m} x {block_n} accumulator does not fit in the registers of {tiling['num_warps']} warps; "
                "use a smaller tile or more warps"
            )
    tiles = cdiv(call.dims["m"], block_m) * cdiv(call.dims["n"], block_n)
    for extent in call.dims["batch"]:
        tiles *= extent
    return refuse_common(call, tiling["num_warps"], tiles)


@BACKEND.implements(
    "matmul",
    key=key,
    fit=fit,
    supports=supports,
    knobs={"num_warps": Tile(1, 32), "num_stages": Count(1, 8), "group": Tile(1, 64)},
)
def matmul(call: Call, tiling: Mapping[str, int], into: torch.Tensor | None = None) -> tuple[Any, ...]:
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
    tiles_m, tiles_n, steps_k = cdiv(m, tiling["block_m"]), cdiv(n, tiling["block_n"]), cdiv(k, tiling["block_k"])
    a_strides, b_strides = (a_outer, a_inner, a_m, a.stride(-1)), (b_outer, b_inner, b.stride(-2), b.stride(-1))
    launch(matmul_kernel, batch_outer * batch_inner * tiles_m * tiles_n, call, a, b, c,
           m, n, k, tiles_m, tiles_n, steps_k, batch_inner, *a_strides, *b_strides, c_outer, c_inner, c_m,
           block_m=tiling["block_m"], block_n=tiling["block_n"], block_k=tiling["block_k"], group=tiling["group"],
           acc_dtype=accumulator(call.dtype), precision=dot_precision(call), whole_k=k % tiling["block_k"] == 0,
           num_warps=tiling["num_warps"], num_stages=tiling["num_stages"])  # fmt: skip
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
