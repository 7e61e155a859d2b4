"""The rows of a table that ids name, and the gradient of the table.

    y[t] = weight[ids[t]]        d_weight[r] = sum of d_y[t] over the tokens t with ids[t] = r

weight: (rows, d), ids: (tokens) -> y: (tokens, d). Forward a program owns ``block_n`` numbers: of one row, or of
several short ones. A row that there is not is NaN, and is not read.

The gradient has no atomic operation. First tokens are sorted by row, those of one row in their order. A token's key is
its row and itself, 64 bits: no two are equal, so that one order is right. A program ranks ``block_tokens`` of them, a
key's rank being the number of smaller ones; then ``WAYS`` sorted runs at a time become one, in which a token's place is
the sum of its ranks in all of them, found by binary search. Tokens without a row stand last.

Then the tokens of a row are a segment, whose start a binary search finds. Sums are over ``CHUNK`` tokens at a time, one
after the other from the segment's start; the sums of a longer segment's chunks are added up in turn. So the bits of a
row hang on no other's tokens, and on no tile. Chunks begin in windows of as many places: of segments longer than a
chunk at most one comes into a window, with one chunk that begins there, and at most one begins in it and leaves it.
These are the two programs of a window. Last, a program owns ``block_n`` numbers of a row, or of several short ones, and
writes their sums, or zeros.

Source of the merge by ranks: Satish, Harris and Garland 2009, "Designing efficient sorting algorithms for manycore
GPUs", section 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import EmbeddingConfig, EmbeddingGradientConfig, RowsConfig
from portakern.backends.triton.launch import MAX_GRID, accumulator, cdiv, launch, refuse_tile, torch_dtype
from portakern.backends.triton.layout import fresh, pow2_at_least, row_start, walk_rows

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

CHUNK = tl.constexpr(32)
"""Tokens of a row that are added one after the other: what bits of a sum hang on, whatever the tiling."""

WAYS = tl.constexpr(16)
"""Sorted runs that become one at a time."""

MERGED = 32
"""Tokens whose places in a merged run one program finds."""

TOKEN_BITS = tl.constexpr(32)
"""Bits of a key below its row: its token."""


class EmbeddingExtents(NamedTuple):
    """``tokens``; ``rows`` of the table, of ``d`` numbers each."""

    tokens: int
    rows: int
    d: int


class CotangentExtents(NamedTuple):
    """As :class:`EmbeddingExtents`; ``inner``: tokens in the inner of the two dimensions that cotangents lie in."""

    tokens: int
    rows: int
    d: int
    inner: int


class SortExtents(NamedTuple):
    """``tokens``; ``rows`` of the table; tokens of a sorted ``run``; ``steps``: of a search, as many as find a place in
    a run."""

    tokens: int
    rows: int
    run: int
    steps: int


class EmbeddingTile(NamedTuple):
    """What kernels are compiled for: rows that a program owns, and numbers of each; what sums are kept in; of
    cotangents, ``flat`` and ``unit`` of :meth:`TensorRows.known`."""

    block_rows: int
    block_n: int
    acc_dtype: tl.dtype
    flat: bool = True
    unit: int = 1


@triton.jit
def own_tile(d, tile: tl.constexpr):
    """The rows, and the numbers of each, that this program owns."""
    tiles = tl.cdiv(d, tile.block_n)
    row = (tl.program_id(0) // tiles).to(tl.int64) * tile.block_rows + tl.arange(0, tile.block_rows)
    return row, (tl.program_id(0) % tiles).to(tl.int64) * tile.block_n + tl.arange(0, tile.block_n)


@triton.jit
def embedding_kernel(weight, ids, y, extents, strides, tile: tl.constexpr):
    of_row, of_number = strides
    token, n = own_tile(extents.d, tile)
    token_ok, n_ok = token < extents.tokens, n < extents.d
    row = tl.load(ids + token, mask=token_ok, other=-1).to(tl.int64)
    there = (row >= 0) & (row < extents.rows)
    at = weight + (row * of_row)[:, None] + (n * of_number)[None, :]
    x = tl.load(at, mask=there[:, None] & n_ok[None, :], other=float("nan"))
    tl.store(y + (token * extents.d)[:, None] + n[None, :], x, mask=token_ok[:, None] & n_ok[None, :])


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def default_tiling(call: Call) -> dict[str, int]:
    """Not measured: 32 bytes of 16-bit numbers for each thread of 8 warps."""
    return {"block_n": 4096, "num_warps": 8}


def rows_and_numbers(d: int, block_n: int) -> tuple[int, int]:
    """The rows that a program owns, and the numbers of each: ``block_n`` in all."""
    numbers = pow2_at_least(d, 1, block_n)
    return block_n // numbers, numbers


def programs(rows: int, d: int, block_n: int) -> int:
    """As many as own ``rows`` rows of d numbers."""
    block_rows, numbers = rows_and_numbers(d, block_n)
    return cdiv(rows, block_rows) * cdiv(d, numbers)


def refused(call: Call, config: EmbeddingConfig, rows: int) -> str | None:
    """Why programs cannot own ``rows`` rows in tiles of ``block_n`` numbers."""
    tile = RowsConfig(block_rows=1, block_n=config.block_n, num_warps=config.num_warps)
    return refuse_tile(call, tile, programs(rows, call.dims["d"], config.block_n))


def supports(call: Call, config: EmbeddingConfig) -> str | None:
    return refused(call, config, extents_of(call).tokens)


def extents_of(call: Call) -> EmbeddingExtents:
    tokens = 1
    for extent in call.dims["batch"]:
        tokens *= extent
    return EmbeddingExtents(tokens, call.dims["rows"], call.dims["d"])


@BACKEND.implements("embedding", tiling=default_tiling, key=key, supports=supports, config=EmbeddingConfig)
def embedding(call: Call, config: EmbeddingConfig) -> tuple[Any]:
    weight, ids, extents = call.arrays["weight"], call.arrays["ids"].contiguous(), extents_of(call)
    y = fresh((*call.dims["batch"], extents.d), weight.dtype, weight.device)
    tile = EmbeddingTile(*rows_and_numbers(extents.d, config.block_n), accumulator(call.dtype))
    launch(embedding_kernel, programs(extents.tokens, extents.d, config.block_n), call, weight, ids, y, extents,
           weight.stride(), tile=tile, num_warps=config.num_warps)  # fmt: skip
    return (y,)


# ------------------------------------------------------------------------------------------------------------- sorting
@triton.jit
def key_of(ids, token, ok, extents, padding):
    """The keys of tokens: 2^32 times the row, and the token. A token whose id is no row, or is padding, has the row
    behind the last; where not ``ok`` a key is larger than any."""
    row = tl.load(ids + token, mask=ok, other=-1).to(tl.int64)
    there = (row >= 0) & (row < extents.rows) & (row != padding)
    row = tl.where(there, row, tl.cast(extents.rows, tl.int64))
    return tl.where(ok, (row << TOKEN_BITS) + token, tl.cast(0x7FFFFFFFFFFFFFFF, tl.int64))


@triton.jit
def below(order, ids, key, low, high, extents, padding):
    """Where keys of sorted tokens, from place ``low`` to ``high``, are no longer smaller than ``key``: a binary
    search."""
    for _ in range(extents.steps):
        middle = (low + high) // 2
        token = tl.load(order + middle, mask=low < high, other=0)
        smaller = key_of(ids, token, low < high, extents, padding) < key
        low, high = tl.where(smaller, middle + 1, low), tl.where(smaller, high, middle)
    return low


@triton.jit
def embedding_vjp_sort_kernel(ids, order, extents, padding, block_tokens: tl.constexpr):
    """``block_tokens`` tokens by their keys: a key's rank is the number of smaller ones."""
    first = tl.program_id(0).to(tl.int64) * block_tokens
    token = first + tl.arange(0, block_tokens)
    key = key_of(ids, token, token < extents.tokens, extents, padding)
    rank = tl.full([block_tokens], 0, tl.int32)
    for begin in range(0, block_tokens, WAYS):
        other = first + begin + tl.arange(0, WAYS)
        beside = key_of(ids, other, other < extents.tokens, extents, padding)
        rank += tl.sum((beside[None, :] < key[:, None]).to(tl.int32), 1)
    tl.store(order + first + rank, token.to(tl.int32), mask=token < extents.tokens)


@triton.jit
def embedding_vjp_merge_kernel(ids, order, merged, extents, padding, block_tokens: tl.constexpr):
    """Each WAYS sorted runs that lie beside each other, as one: a key's rank in it is the sum of its ranks in them."""
    tokens, run = tl.cast(extents.tokens, tl.int64), tl.cast(extents.run, tl.int64)
    at = tl.program_id(0).to(tl.int64) * block_tokens + tl.arange(0, block_tokens)
    token = tl.load(order + at, mask=at < tokens, other=0)
    key = key_of(ids, token, at < tokens, extents, padding)
    first = at // (run * WAYS) * (run * WAYS)
    low = tl.minimum(first[:, None] + tl.arange(0, WAYS)[None, :] * run, tokens)
    rank = below(order, ids, key[:, None], low, tl.minimum(low + run, tokens), extents, padding) - low
    tl.store(merged + first + tl.sum(rank, 1), token, mask=at < tokens)


def sorted_tokens(
    call: Call, ids: torch.Tensor, extents: EmbeddingExtents, padding: int, config: EmbeddingGradientConfig
) -> torch.Tensor:
    """The tokens by their rows, those of one row in their order, and those without a row at the end."""
    tokens, rows, _ = extents
    run, tiles = config.block_tokens, cdiv(tokens, config.block_tokens)
    order, merged = (fresh((max(tokens, 1),), torch_dtype("int32"), ids.device) for _ in range(2))
    if tokens:
        launch(embedding_vjp_sort_kernel, tiles, call, ids, order, SortExtents(tokens, rows, run, 0), padding,
               block_tokens=config.block_tokens, num_warps=config.num_warps)  # fmt: skip
    while run < tokens:
        launch(embedding_vjp_merge_kernel, cdiv(tokens, MERGED), call, ids, order, merged,
               SortExtents(tokens, rows, run, run.bit_length()), padding, block_tokens=MERGED,
               num_warps=config.num_warps)  # fmt: skip
        order, merged, run = merged, order, run * WAYS.value
    return order


# ---------------------------------------------------------------------------------------------------------------- sums
@triton.jit
def embedding_vjp_starts_kernel(ids, order, starts, extents, padding, block_tokens: tl.constexpr):
    """Where each row's tokens begin in their order, and, of the row behind the last, where those of rows end."""
    row = tl.program_id(0).to(tl.int64) * block_tokens + tl.arange(0, block_tokens)
    start = below(order, ids, row << TOKEN_BITS, row * 0, row * 0 + extents.tokens, extents, padding)
    tl.store(starts + row, start.to(tl.int32), mask=row <= extents.rows)


@triton.jit
def segment_of(starts, row, extents):
    """Where the tokens of rows begin in their order, and where they end; 0 and 0 of rows that there are not."""
    ok = (row >= 0) & (row < extents.rows)
    start = tl.load(starts + row, mask=ok, other=0).to(tl.int64)
    return start, tl.load(starts + row + 1, mask=ok, other=0).to(tl.int64)


@triton.jit
def sum_of_tokens(order, d_y, start, stop, n, extents, strides, tile: tl.constexpr):
    """The sums of the cotangents of tokens at the places from ``start`` to ``stop``, one after the other."""
    acc = tl.full([tile.block_rows, tile.block_n], 0.0, tile.acc_dtype)
    n_ok, of_n = (n < extents.d)[None, :], (n * strides.n)[None, :]
    for first in range(0, tl.max(stop - start, 0), 4):
        at = [start + first + i for i in (0, 1, 2, 3)]
        token = [tl.load(order + a, mask=a < stop, other=0).to(tl.int64) for a in at]
        row = [row_start(d_y, t, extents.inner, strides.outer, strides.inner, tile.flat, tile.unit) for t in token]
        found = [tl.load(row[i][:, None] + of_n, mask=(at[i] < stop)[:, None] & n_ok, other=0.0) for i in (0, 1, 2, 3)]
        for i in tl.static_range(4):
            acc += found[i].to(tile.acc_dtype)
    return acc


@triton.jit
def sum_of_chunks(acc, partial, start, stop, n, d, tile: tl.constexpr):
    """acc, and the sums of the chunks of segments that are longer than one, one after the other."""
    chunks = tl.where(stop - start > CHUNK, (stop - start + CHUNK - 1) // CHUNK, 0)
    for first in range(0, tl.max(chunks, 0), 4):
        chunk = [first + i for i in (0, 1, 2, 3)]
        slot = [(start // CHUNK + c) * 2 + (c == 0) for c in chunk]
        found = [
            tl.load(partial + (slot[i] * d)[:, None] + n[None, :], mask=(chunk[i] < chunks)[:, None] & (n < d)[None, :],
                    other=0.0) for i in (0, 1, 2, 3)
        ]  # fmt: skip
        for i in tl.static_range(4):
            acc += found[i]
    return acc


@triton.jit
def embedding_vjp_chunks_kernel(ids, order, starts, d_y, partial, extents, strides, tile: tl.constexpr):
    """Sums of chunks of segments that are longer than one. partial: (windows, 2, d): of a window's chunks that of the
    segment that comes in, and that of the segment that leaves it."""
    slot, n = own_tile(extents.d, tile)
    tokens, window, leaving = tl.cast(extents.tokens, tl.int64), slot // 2 * CHUNK, slot % 2 == 1
    at = tl.where(leaving, tl.minimum(window + CHUNK, tokens) - 1, window)
    token = tl.load(order + at, mask=window < tokens, other=0)
    row = tl.load(ids + token, mask=window < tokens, other=-1).to(tl.int64)
    begin, end = segment_of(starts, row, extents)
    late = tl.maximum(window - begin, 0)
    start = begin + (late + CHUNK - 1) // CHUNK * CHUNK
    found = (start < end) & (end - begin > CHUNK) & ((begin >= window) == leaving)
    stop = tl.where(found, tl.minimum(start + CHUNK, end), start)
    acc = sum_of_tokens(order, d_y, start, stop, n, extents, strides, tile)
    tl.store(partial + (slot * extents.d)[:, None] + n[None, :], acc, mask=found[:, None] & (n < extents.d)[None, :])


@triton.jit
def embedding_vjp_kernel(order, starts, d_y, partial, d_weight, extents, strides, tile: tl.constexpr):
    row, n = own_tile(extents.d, tile)
    start, stop = segment_of(starts, row, extents)
    acc = sum_of_tokens(order, d_y, start, tl.where(stop - start > CHUNK, start, stop), n, extents, strides, tile)
    if partial is not None:
        acc = sum_of_chunks(acc, partial, start, stop, n, extents.d, tile)
    ok = (row < extents.rows)[:, None] & (n < extents.d)[None, :]
    tl.store(d_weight + (row * extents.d)[:, None] + n[None, :], acc.to(d_weight.dtype.element_ty), mask=ok)


def gradient_tiling(call: Call) -> dict[str, int]:
    """Not measured: 16 sums in float32 for each thread of 8 warps."""
    return {"block_tokens": 512, "block_n": 4096, "num_warps": 8}


def supports_gradient(call: Call, config: EmbeddingGradientConfig) -> str | None:
    tokens, rows, _ = extents_of(call)
    if max(tokens, rows) > MAX_GRID:
        return f"{tokens} tokens and {rows} rows: keys count both to 2^31 - 1; sum the gradients of fewer at a time"
    return refused(call, config, max(rows, 2 * cdiv(tokens, CHUNK.value)))


@BACKEND.implements(
    "embedding_vjp", tiling=gradient_tiling, key=key, supports=supports_gradient, config=EmbeddingGradientConfig
)
def embedding_vjp(call: Call, config: EmbeddingGradientConfig) -> tuple[Any]:
    weight, ids, (tokens, rows, d) = call.arrays["weight"], call.arrays["ids"].contiguous(), extents_of(call)
    padding = -1 if call.options["padding_index"] is None else call.options["padding_index"]
    order = sorted_tokens(call, ids, extents_of(call), padding, config)
    starts = fresh((rows + 1,), torch_dtype("int32"), weight.device)
    launch(embedding_vjp_starts_kernel, cdiv(rows + 1, config.block_tokens), call, ids, order, starts,
           SortExtents(tokens, rows, tokens, tokens.bit_length()), padding, block_tokens=config.block_tokens,
           num_warps=config.num_warps)  # fmt: skip
    (d_y,), walk = walk_rows(len(call.dims["batch"]), call.arrays["d_y"])
    extents = CotangentExtents(tokens, rows, d, walk.inner)
    tile = EmbeddingTile(*rows_and_numbers(d, config.block_n), accumulator(call.dtype), **walk.known(call.dtype))
    d_weight, partial = fresh((rows, d), torch_dtype(call.outputs["d_weight"][1]), weight.device), None
    if tokens > CHUNK.value:
        slots = 2 * cdiv(tokens, CHUNK.value)
        partial = fresh((slots, d), torch_dtype("float64" if call.dtype == "float64" else "float32"), weight.device)
        launch(embedding_vjp_chunks_kernel, programs(slots, d, config.block_n), call, ids, order, starts, d_y, partial,
               extents, walk.strides[0], tile=tile, num_warps=config.num_warps)  # fmt: skip
    launch(embedding_vjp_kernel, programs(rows, d, config.block_n), call, order, starts, d_y, partial, d_weight,
           extents, walk.strides[0], tile=tile, num_warps=config.num_warps)  # fmt: skip
    return (d_weight,)
