"""Matrix products of groups of rows, each with a matrix of its own, and their gradients.

    c[i, j] = sum_k a[i, k] b[g, k, j]        d_a = d_c b_g^T        d_b[g] = a_g^T d_c_g        g: the group of row i

a: (rows, k), b: (groups, k, n), ends: (groups,), where each group ends -> c: (rows, n). A tile of rows begins where its
group does, so that no bit of a row depends on where its group lies. How many tiles a group has is known on the device
alone: the grid has as many as any sizes may need. With B rows of a tile, the tiles of group g, which begins at row b,
are counted from floor(b / B) + g on, which leaves room for those that its size needs before the next group's. A program
counts the groups that begin at or before its tile, and ends at once where the tile has no row. Rows of no group are one
more group, whose program writes zeros and reads nothing.

d_a is the same product, of d_c and the transposed matrices. A program of d_b owns a tile of one group's matrix and sums
over the group's rows from its first one on; of a group without rows it writes zeros. Nothing is added atomically.

Source: the grouped product of Gale et al., "MegaBlocks" (2023), section 5; the count of tiles is varlen_attention's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import ProductConfig
from portakern.backends.triton.gpu.matmul import ProductTile, fit, fit_gradient, gradient_key, key, summed
from portakern.backends.triton.gpu.matmul import supports as supports_product
from portakern.backends.triton.launch import accumulator, cdiv, dot_precision, launch, torch_dtype
from portakern.backends.triton.layout import fresh, fresh_like
from portakern.backends.triton.lib.matmul import tile_index
from portakern.specs.matmul import product_dtype

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


COUNTED = tl.constexpr(256)
"""Groups whose ends a program reads at once."""


class GroupedProductExtents(NamedTuple):
    """Of a product of groups of rows; ``tiles_m``, ``tiles_n``: the tiles of c that any sizes may need; ``steps_k``: of
    the sum."""

    rows: int
    n: int
    k: int
    groups: int
    tiles_m: int
    tiles_n: int
    steps_k: int


class GroupedStrides(NamedTuple):
    """Of a, (rows, k); of b, (groups, k, n); and of the ends."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    ends: int


class MatrixGradientStrides(NamedTuple):
    """Of a, (rows, k); of d_c, (rows, n); and of the ends."""

    a: tuple[int, ...]
    d_c: tuple[int, ...]
    ends: int


@triton.jit
def end_of(ends, step, group, rows):
    """The row before which a group ends, within those that there are; 0 before the first group."""
    at = tl.maximum(group, 0).to(tl.int64) * step
    end = tl.load(ends + at, mask=group >= 0, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(end, 0), rows)


@triton.jit
def rows_of_tile(tile, ends, step, rows, groups, block_m: tl.constexpr):
    """(the group of a tile, its first row, the end of the group); group ``groups`` has the rows of no group."""
    group = tile * 0
    for begin in range(0, groups, COUNTED):
        g = begin + tl.arange(0, COUNTED)
        first = tl.load(ends + g.to(tl.int64) * step, mask=g < groups, other=0).to(tl.int64) // block_m + g + 1
        group += tl.sum(((g < groups) & (first <= tile)).to(tl.int32), 0)
    start = end_of(ends, step, group - 1, rows)
    stop = tl.cast(rows, tl.int64)
    if group < groups:
        stop = end_of(ends, step, group, rows)
    return group, start + (tile - start // block_m - group) * block_m, stop


@triton.jit
def grouped_matmul_kernel(a, b, ends, c, extents, strides, tile: tl.constexpr):
    n, k, rows = extents.n, extents.k, extents.rows
    a_m, a_k = strides.a
    b_g, b_k, b_n = strides.b
    tile_m, tile_n = tile_index(tl.program_id(0), extents.tiles_m, extents.tiles_n, tile.group)
    group, at, stop = rows_of_tile(tile_m, ends, strides.ends, rows, extents.groups, tile.block_m)
    if (at < 0) | (at >= stop):  # ends that fall may lead before the first row
        return
    i = at + tl.arange(0, tile.block_m)
    j = tile_n.to(tl.int64) * tile.block_n + tl.arange(0, tile.block_n)
    kk = tl.arange(0, tile.block_k).to(tl.int64)
    i_ok, j_ok = (i < stop)[:, None], (j < n)[None, :]
    steps_k = tl.where(group < extents.groups, extents.steps_k, 0)
    a_tile = a + (i[:, None] * a_m + kk[None, :] * a_k)
    b_tile = b + group.to(tl.int64) * b_g + (kk[:, None] * b_k + j[None, :] * b_n)
    acc = summed(a_tile, b_tile, i_ok, j_ok, k, steps_k, a_k, b_k, tile)
    tl.store(c + (i[:, None] * n + j[None, :]), acc.to(c.dtype.element_ty), mask=i_ok & j_ok)


def supports(call: Call, config: ProductConfig) -> str | None:
    dims = call.dims
    return refused(call, config, dims["rows"] + (dims["groups"] + 1) * config.block_m, dims["n"], dims["k"])


def refused(call: Call, config: ProductConfig, m: int, n: int, k: int, batch: tuple[int, ...] = ()) -> str | None:
    """Why a product of these extents is refused, or None."""
    return supports_product(call.replace(dims={"batch": batch, "m": m, "n": n, "k": k}), config)


@BACKEND.implements("grouped_matmul", key=key, fit=fit, supports=supports, config=ProductConfig)
def grouped_matmul(call: Call, config: ProductConfig) -> tuple[Any, ...]:
    a, b, dtype = call.arrays["a"], call.arrays["b"], call.options["out_dtype"]
    c = fresh((call.dims["rows"], call.dims["n"]), torch_dtype(dtype) if dtype else a.dtype, a.device)
    multiply(call, a, b, c, config)
    return (c,)


def multiply(call: Call, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, config: ProductConfig) -> None:
    """c = a b_g in the rows of each group g, and zeros in the others."""
    (rows, k), (groups, _, n), ends = a.shape, b.shape, call.arrays["group_ends"]
    tiles_m, tiles_n = rows // config.block_m + groups + 1, cdiv(n, config.block_n)
    extents = GroupedProductExtents(rows, n, k, groups, tiles_m, tiles_n, cdiv(k, config.block_k))
    launch(grouped_matmul_kernel, tiles_m * tiles_n, call, a, b, ends, c, extents,
           GroupedStrides(a.stride(), b.stride(), ends.stride(0)), tile=tile_of(call, config, k % config.block_k == 0),
           num_warps=config.num_warps, num_stages=config.num_stages)  # fmt: skip


def tile_of(call: Call, config: ProductConfig, whole_k: bool) -> ProductTile:
    """``whole_k``: whether no step of the sum is ragged."""
    return ProductTile(config.block_m, config.block_n, config.block_k, config.group, accumulator(call.dtype),
                       dot_precision(call), whole_k)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- gradient
@triton.jit
def grouped_matmul_vjp_d_b_kernel(a, d_c, ends, d_b, extents, strides, tile: tl.constexpr):
    """A tile of the gradient of one group's matrix; ``extents``: of that matrix, (k, n), whose tiles they count."""
    tiles, n, k = extents.tiles_m * extents.tiles_n, extents.n, extents.k
    a_m, a_k = strides.a
    c_m, c_n = strides.d_c
    group = tl.program_id(0) // tiles
    tile_k, tile_n = tile_index(tl.program_id(0) % tiles, extents.tiles_m, extents.tiles_n, tile.group)
    start = end_of(ends, strides.ends, group - 1, extents.rows)
    size = tl.maximum(end_of(ends, strides.ends, group, extents.rows) - start, 0)
    i = tile_k.to(tl.int64) * tile.block_m + tl.arange(0, tile.block_m)
    j = tile_n.to(tl.int64) * tile.block_n + tl.arange(0, tile.block_n)
    row = start + tl.arange(0, tile.block_k)
    i_ok, j_ok = (i < k)[:, None], (j < n)[None, :]
    a_tile = a + (i[:, None] * a_k + row[None, :] * a_m)
    c_tile = d_c + (row[:, None] * c_m + j[None, :] * c_n)
    steps = (size + tile.block_k - 1) // tile.block_k
    acc = summed(a_tile, c_tile, i_ok, j_ok, size, steps, a_m, c_m, tile)
    d_b_tile = d_b + group.to(tl.int64) * k * n + (i[:, None] * n + j[None, :])
    tl.store(d_b_tile, acc.to(d_b.dtype.element_ty), mask=i_ok & j_ok)


def supports_gradient(call: Call, config: ProductConfig) -> str | None:
    rows, groups, k, n = (call.dims[name] for name in ("rows", "groups", "k", "n"))
    extents = {"d_a": (rows + (groups + 1) * config.block_m, k, n), "d_b": (k, n, rows, (groups,))}
    for name in call.wants:
        reason = refused(call.replace(dtype=product_dtype(call)), config, *extents[name])
        if reason:
            return f"{name}: {reason}"
    return None


@BACKEND.implements(
    "grouped_matmul_vjp", key=gradient_key, fit=fit_gradient, supports=supports_gradient, config=ProductConfig
)
def grouped_matmul_vjp(call: Call, config: ProductConfig) -> tuple[Any, ...]:
    one = call.replace(dtype=product_dtype(call))
    dtype, d_a, d_b = torch_dtype(one.dtype), None, None
    a, b, d_c = (call.arrays[name] for name in ("a", "b", "d_c"))
    if "d_a" in call.wants:
        d_a = fresh(a.shape, torch_dtype(call.outputs["d_a"][1]), a.device)
        multiply(one, d_c.to(dtype), b.to(dtype).mT, d_a, config)
    if "d_b" in call.wants:
        d_b = fresh_like(b)
        matrix_gradients(one, a.to(dtype), d_c.to(dtype), d_b, config)
    return d_a, d_b


def matrix_gradients(call: Call, a: torch.Tensor, d_c: torch.Tensor, d_b: torch.Tensor, config: ProductConfig) -> None:
    """d_b = a_g^T d_c_g of each group g."""
    (rows, k), n, groups, ends = a.shape, d_c.shape[1], d_b.shape[0], call.arrays["group_ends"]
    tiles_k, tiles_n = cdiv(k, config.block_m), cdiv(n, config.block_n)
    extents = GroupedProductExtents(rows, n, k, groups, tiles_k, tiles_n, 0)
    launch(grouped_matmul_vjp_d_b_kernel, groups * tiles_k * tiles_n, call, a, d_c, ends, d_b, extents,
           MatrixGradientStrides(a.stride(), d_c.stride(), ends.stride(0)), tile=tile_of(call, config, False),
           num_warps=config.num_warps, num_stages=config.num_stages)  # fmt: skip
