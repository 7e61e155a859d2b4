"""Matrix products of groups of rows of 8-bit numbers with scales, each group with a matrix of its own.

    c[i, j] = sum_p scale_a[i, p] scale_b[g, p, j] (sum_{k in block p} a[i, k] b[g, k, j]) + bias[g, j]

a: (rows, k), b: (groups, k, n), scales by blocks, ends: (groups,), where each group ends -> c: (rows, n). A program
finds its group and its rows as grouped_matmul's do: tiles begin where their group does, and the grid has as many as any
sizes may need. It computes its tile of c as scaled_matmul's do, with the group's matrix, scales and bias. Rows of no
group are one more group, whose programs write zeros and read nothing.

Source: Gale et al., "MegaBlocks" (2023), section 5, for groups; DeepSeek-AI, "DeepSeek-V3 technical report" (2024),
section 3.3.2, for sums that leave the matrix unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import ProductConfig
from portakern.backends.triton.gpu.grouped_matmul import rows_of_tile
from portakern.backends.triton.gpu.scaled_matmul import ScaledTile, fit, key, refused, scaled_sum
from portakern.backends.triton.launch import cdiv, launch, torch_dtype
from portakern.backends.triton.layout import fresh
from portakern.backends.triton.lib.matmul import tile_index
from portakern.backends.triton.lib.scaled_matmul import shared_strides
from portakern.specs.scaled_matmul import scale_blocks

if TYPE_CHECKING:
    from portakern.core.call import Call


class ScaledGroupedExtents(NamedTuple):
    """Of a product; ``tiles_m``, ``tiles_n``: the tiles of c that any sizes may need; ``blocks``: those of k that have
    scales; ``width``: of such a block, ``steps``: of its sum; ``n_width``: columns that share a scale."""

    rows: int
    n: int
    k: int
    groups: int
    tiles_m: int
    tiles_n: int
    blocks: int
    width: int
    steps: int
    n_width: int


class ScaledGroupedStrides(NamedTuple):
    """Of the operands, of the ends, of the scales, 0 along an axis that shares one, and of the bias."""

    a_row: int
    a_col: int
    b_group: int
    b_row: int
    b_col: int
    ends: int
    scale_a_row: int
    scale_a_col: int
    scale_b_group: int
    scale_b_row: int
    scale_b_col: int
    bias_group: int
    bias_col: int


@triton.jit
def scaled_grouped_matmul_kernel(a, b, ends, scale_a, scale_b, bias, c, extents, strides, tile: tl.constexpr):
    """bias may be None."""
    tile_m, tile_n = tile_index(tl.program_id(0), extents.tiles_m, extents.tiles_n, tile.group)
    group, at, stop = rows_of_tile(tile_m, ends, strides.ends, extents.rows, extents.groups, tile.block_m)
    if (at < 0) | (at >= stop):  # ends that fall may lead before the first row
        return
    i = at + tl.arange(0, tile.block_m)
    j = tile_n.to(tl.int64) * tile.block_n + tl.arange(0, tile.block_n)
    kk = tl.arange(0, tile.block_k).to(tl.int64)
    i_ok, j_ok = i < stop, j < extents.n
    c_tile = c + (i * extents.n)[:, None] + j[None, :]
    if group == extents.groups:
        zeros = tl.full([tile.block_m, tile.block_n], 0.0, tl.float32)
        tl.store(c_tile, zeros.to(c.dtype.element_ty), mask=i_ok[:, None] & j_ok[None, :])
        return
    own = group.to(tl.int64)
    a_tile = a + (i[:, None] * strides.a_row + kk[None, :] * strides.a_col)
    b_tile = b + own * strides.b_group + (kk[:, None] * strides.b_row + j[None, :] * strides.b_col)
    of_a = scale_a + i * strides.scale_a_row
    of_b = scale_b + own * strides.scale_b_group + j // extents.n_width * strides.scale_b_col
    of_bias = None if bias is None else bias + own * strides.bias_group + j * strides.bias_col
    acc = scaled_sum(a_tile, b_tile, of_a, of_b, of_bias, i_ok, j_ok, extents, strides, tile)
    tl.store(c_tile, acc.to(c.dtype.element_ty), mask=i_ok[:, None] & j_ok[None, :])


def tiles_of_rows(call: Call, config: ProductConfig) -> int:
    """The tiles that any sizes of groups may need."""
    return call.dims["rows"] // config.block_m + call.dims["groups"] + 1


def supports(call: Call, config: ProductConfig) -> str | None:
    return refused(call, config, tiles_of_rows(call, config))


@BACKEND.implements("scaled_grouped_matmul", key=key, fit=fit, supports=supports, config=ProductConfig)
def scaled_grouped_matmul(call: Call, config: ProductConfig) -> tuple[Any, ...]:
    a, b, ends, scale_a, scale_b, bias = (
        call.arrays[name] for name in ("a", "b", "group_ends", "scale_a", "scale_b", "bias")
    )
    rows, groups, n, k = (call.dims[name] for name in ("rows", "groups", "n", "k"))
    c = fresh((rows, n), torch_dtype(call.options["out_dtype"]), a.device)
    tiles_m, tiles_n = tiles_of_rows(call, config), cdiv(n, config.block_n)
    blocks, width = scale_blocks(call)
    strides = ScaledGroupedStrides(  # type: ignore[call-arg]
        *a.stride(),
        *b.stride(),
        ends.stride(0),
        *shared_strides(scale_a),
        *shared_strides(scale_b),
        *((0, 0) if bias is None else bias.stride()),
    )
    launch(scaled_grouped_matmul_kernel, tiles_m * tiles_n, call, a, b, ends, scale_a, scale_b, bias, c,
           ScaledGroupedExtents(rows, n, k, groups, tiles_m, tiles_n, blocks, width, cdiv(width, config.block_k),
                                call.dims["n_width"]),
           strides, tile=ScaledTile.of(call, config), num_warps=config.num_warps,
           num_stages=config.num_stages)  # fmt: skip
    return (c,)
