"""The rows of tokens sorted by their experts, where they went and where experts end; and the gradient.

    y[positions[t, j]] = x[t], where positions sorts the pairs (t, j) by indices[t, j], equal ones as they stand
    d_x[t] = sum_j d_y[positions[t, j]]

x: (tokens, d), indices: (tokens, k) -> y: (tokens k, d). Pairs are sorted as ``embedding``'s gradient sorts tokens: by
keys of their expert and their number, no two of which are equal, without an atomic operation. A program then writes
where some pairs went and which tokens their rows are, a binary search finds the end of each expert, and a program of
the last kernel owns ``block_n`` numbers of y, as of ``embedding``'s, with zeros for a row of no token.

The gradient is ``unpermute`` with weights of 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import EmbeddingConfig, EmbeddingGradientConfig
from portakern.backends.triton.gpu import unpermute as sums
from portakern.backends.triton.gpu.embedding import (
    TOKEN_BITS,
    EmbeddingExtents,
    EmbeddingTile,
    SortExtents,
    below,
    own_tile,
    programs,
    refused,
    rows_and_numbers,
    sorted_tokens,
)
from portakern.backends.triton.launch import MAX_GRID, accumulator, cdiv, launch, torch_dtype
from portakern.backends.triton.layout import fresh

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def permute_places_kernel(indices, order, positions, tokens, k, extents, block_tokens: tl.constexpr):
    """Of sorted pairs: where each went, and the token of its row; -1 for a pair of no expert."""
    at = tl.program_id(0).to(tl.int64) * block_tokens + tl.arange(0, block_tokens)
    ok = at < extents.tokens
    pair = tl.load(order + at, mask=ok, other=0)
    expert = tl.load(indices + pair, mask=ok, other=-1).to(tl.int64)
    there = (expert >= 0) & (expert < extents.rows)
    tl.store(positions + pair, tl.where(there, at, -1).to(tl.int32), mask=ok)
    tl.store(tokens + at, tl.where(there, pair // k, -1).to(tl.int32), mask=ok)


@triton.jit
def permute_ends_kernel(indices, order, group_ends, extents, block_tokens: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64) * block_tokens + tl.arange(0, block_tokens)
    key = (expert + 1) << TOKEN_BITS
    end = below(order, indices, key, expert * 0, expert * 0 + extents.tokens, extents, -1)
    tl.store(group_ends + expert, end.to(tl.int32), mask=expert < extents.rows)


@triton.jit
def permute_kernel(x, tokens, y, extents, strides, tile: tl.constexpr):
    of_token, of_number = strides
    row, n = own_tile(extents.d, tile)
    row_ok, n_ok = row < extents.tokens, n < extents.d
    token = tl.load(tokens + row, mask=row_ok, other=-1).to(tl.int64)
    at = x + (token * of_token)[:, None] + (n * of_number)[None, :]
    found = tl.load(at, mask=(token >= 0)[:, None] & n_ok[None, :], other=0.0)
    tl.store(y + (row * extents.d)[:, None] + n[None, :], found, mask=row_ok[:, None] & n_ok[None, :])


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def default_tiling(call: Call) -> dict[str, int]:
    """Not measured: 32 bytes of 16-bit numbers for each thread of 8 warps."""
    return {"block_tokens": 512, "block_n": 4096, "num_warps": 8}


def pairs_of(call: Call) -> int:
    pairs: int = call.dims["tokens"] * call.dims["k"]
    return pairs


def supports(call: Call, config: EmbeddingGradientConfig) -> str | None:
    pairs, experts = pairs_of(call), call.dims["experts"]
    if max(pairs, experts) > MAX_GRID:
        return f"{pairs} rows and {experts} experts: keys count both to 2^31 - 1; sort fewer tokens at a time"
    return refused(call, config, pairs)


@BACKEND.implements("permute", tiling=default_tiling, key=key, supports=supports, config=EmbeddingGradientConfig)
def permute(call: Call, config: EmbeddingGradientConfig) -> tuple[Any, ...]:
    x, indices, (pairs, experts, d) = call.arrays["x"], call.arrays["indices"].contiguous(), extents_of(call)
    positions = fresh(indices.shape, torch_dtype("int32"), x.device)
    tokens, group_ends = (fresh((extent,), torch_dtype("int32"), x.device) for extent in (pairs, experts))
    y, sort, block = fresh((pairs, d), x.dtype, x.device), config.block_tokens, {"num_warps": config.num_warps}
    order = sorted_tokens(call, indices, extents_of(call), -1, config)
    searched = SortExtents(pairs, experts, pairs, pairs.bit_length())
    launch(permute_places_kernel, cdiv(pairs, sort), call, indices, order, positions, tokens, call.dims["k"], searched,
           block_tokens=sort, **block)  # fmt: skip
    launch(permute_ends_kernel, cdiv(experts, sort), call, indices, order, group_ends, searched, block_tokens=sort,
           **block)  # fmt: skip
    tile = EmbeddingTile(*rows_and_numbers(d, config.block_n), accumulator(call.dtype))
    launch(permute_kernel, programs(pairs, d, config.block_n), call, x, tokens, y, extents_of(call), x.stride(),
           tile=tile, **block)  # fmt: skip
    return y, positions, group_ends


def extents_of(call: Call) -> EmbeddingExtents:
    """Pairs are the tokens that are sorted, and experts the rows by which they are."""
    return EmbeddingExtents(pairs_of(call), call.dims["experts"], call.dims["d"])


# ------------------------------------------------------------------------------------------------------------- gradient
def supports_gradient(call: Call, config: EmbeddingConfig) -> str | None:
    return refused(call, config, call.dims["tokens"])


@BACKEND.implements(
    "permute_vjp", tiling=sums.default_tiling, key=key, supports=supports_gradient, config=EmbeddingConfig
)
def permute_vjp(call: Call, config: EmbeddingConfig) -> tuple[Any]:
    return (sums.weighted_sums(call, config, call.arrays["d_y"], call.arrays["positions"], None),)
