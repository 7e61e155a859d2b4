"""How the kernels of attention read their arrays: one head at a time, in blocks of queries or of keys.

A block of one head is (block, d), while the arrays hold heads second-minor, where a block of 1 is off the (8, 128)
grid: q, k and v are read, and o is written, as (batch, heads, len, d), a transposition that XLA makes. The view (batch,
len, heads*d) would not spare the copy (on a TPU it is a relayout too, since tiles span heads) and its blocks are
strided columns: with them the TPU compiler's own estimate for a bfloat16 4096 x 4096 x 128 attention was 39 % higher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas.lib.blocks import Blocks, quotient, words
from portakern.backends.pallas.lib.segments import Span, spans_of
from portakern.core import targets
from portakern.core.call import Call

Place = Callable[..., tuple[Any, Any, Any]]
"""From a grid step to the (batch, head, block of queries or keys) that it works on."""


class AttentionOperands:
    """The arrays that every kernel of attention reads, in the layout in which it reads them: of q, so many heads that
    share their keys as rows beside each other."""

    def __init__(self, call: Call, heads_per_block: int = 1) -> None:
        self.heads = {name: by_head(call.arrays[name]) for name in ("k", "v")}
        self.heads["q"] = by_head(call.arrays["q"], heads_per_block)
        self.bias = call.arrays["bias"]
        ids = {n: call.arrays[n] for n in ("q_segment_ids", "kv_segment_ids") if call.arrays[n] is not None}
        wide = any(a.dtype.itemsize == 8 for a in ids.values())
        self.ids = {name: words(a, 2 if wide else 1) for name, a in ids.items()}
        if ids and heads_per_block > 1:
            self.ids["q_segment_ids"] = jnp.repeat(self.ids["q_segment_ids"], heads_per_block, axis=2)

    def at(self, bq: int, bkv: int, query: Place, key: Place) -> Blocks:
        """These arrays in blocks of bq queries and bkv keys, which a grid step has resident where ``query`` and ``key``
        say."""
        found: Blocks = {}
        for name, length, place in (("q", bq, query), ("k", bkv, key), ("v", bkv, key)):
            array = self.heads[name]
            found[name] = (array, head_blocks(length, array.shape[3], place))
        if self.bias is not None:
            found["bias"] = (self.bias, bias_blocks(self.bias.shape, bq, bkv, query, key))
        for name, length, place in (("q_segment_ids", bq, query), ("kv_segment_ids", bkv, key)):
            if name in self.ids:
                found[name] = (self.ids[name], id_blocks(self.ids[name].shape[1], length, place))
        return found


@dataclass(frozen=True)
class SpanTable:
    """From a tile of a batch entry to its `Span`, as a kernel or an index map reads it.

    Attributes:
      table: what `spans_in_scalar_memory` gave. tiles: of a batch entry.
      parts: how many of the tiles that it counts a block holds; spans are counted in blocks.
    """

    table: Any
    batch: Any
    tiles: int
    parts: int = 1

    def in_parts(self, tile: Any) -> Span:
        """The span counted in parts of a block."""
        index = 2 * (self.batch * self.tiles + tile)
        return self.table[index], self.table[index + 1]

    def __call__(self, tile: Any) -> Span:
        first, after = self.in_parts(tile)
        if self.parts == 1:
            return first, after
        return quotient(first, self.parts), quotient(after + (self.parts - 1), self.parts)


def span_table(table: Any, batch: Any, tiles: int, parts: int = 1) -> SpanTable | None:
    """`SpanTable` of a kernel's ``spans``, or of what an index map is given besides a step's indices; None without
    spans."""
    if isinstance(table, tuple):
        table = table[0] if table else None
    return None if table is None else SpanTable(table, batch, tiles, parts)


def tile_span(table: Any, batch: Any, tile: Any, tiles: int) -> Span | None:
    """The `Span` of one of so many tiles of a batch entry; ``table``: as `span_table` takes it. None without spans."""
    spans = span_table(table, batch, tiles)
    return None if spans is None else spans(tile)


def spans_in_scalar_memory(call: Call, bq: int, bkv: int, **how: Any) -> dict[str, jax.Array]:
    """``scalars`` of a launch: `spans_of` the call as one row of numbers, since scalar memory pads rows. It has none
    without segments, and where spans would take too much of that memory: then every tile is visited."""
    found = spans_of(call, bq, bkv, **how)
    return {n: x.reshape(-1) for n, x in found.items() if x.size * x.dtype.itemsize <= MOST_SCALARS}


MOST_SCALARS = targets.least("tpu", "smem") // 4
"""Bytes of scalar memory for spans."""


def by_head(x: jax.Array, heads_per_block: int = 1) -> jax.Array:
    """(batch, len, heads, d) as (batch, heads / together, len * together, d): the rows of so many heads that follow
    each other, query by query."""
    if heads_per_block == 1:
        return jnp.swapaxes(x, 1, 2)
    batch, length, heads, d = x.shape
    groups = jnp.swapaxes(x.reshape(batch, length, heads // heads_per_block, heads_per_block, d), 1, 2)
    return groups.reshape(batch, heads // heads_per_block, length * heads_per_block, d)


def from_heads(x: jax.Array, heads_per_block: int = 1) -> jax.Array:
    """What `by_head` gave, as it was."""
    if heads_per_block == 1:
        return jnp.swapaxes(x, 1, 2)
    batch, groups, rows, d = x.shape
    queries = jnp.swapaxes(x.reshape(batch, groups, rows // heads_per_block, heads_per_block, d), 1, 2)
    return queries.reshape(batch, rows // heads_per_block, groups * heads_per_block, d)


def head_blocks(length: int, d: int, at: Place) -> pl.BlockSpec:
    """The (length, d) blocks of a (batch, heads, len, d) array."""
    return pl.BlockSpec((None, None, length, d), lambda *step: (*at(*step), 0))


def row_blocks(number: int, length: int, at: Place) -> pl.BlockSpec:
    """The (number, length) blocks of a (batch, heads, number, len) array, which holds so many numbers a query."""

    def index(*step: Any) -> tuple[Any, ...]:
        batch, head, block = at(*step)
        return batch, head, 0, block

    return pl.BlockSpec((None, None, number, length), index)


def id_blocks(number: int, length: int, at: Place) -> pl.BlockSpec:
    """The (number, length) blocks of the (batch, number, len) words of segment ids."""

    def index(*step: Any) -> tuple[Any, ...]:
        batch, _, block = at(*step)
        return batch, 0, block

    return pl.BlockSpec((None, number, length), index)


def bias_blocks(shape: tuple[int, ...], bq: int, bkv: int, query: Place, key: Place) -> pl.BlockSpec:
    """The blocks of a bias: (bq, bkv), or one row of bkv where all queries share it.

    Along an axis of extent 1, which broadcasts, every step reads block 0.
    """

    def index(*step: Any) -> tuple[Any, ...]:
        at_query = (0 if extent == 1 else place for extent, place in zip(shape[:3], query(*step), strict=True))
        return (*at_query, key(*step)[2])

    return pl.BlockSpec((None, None, 1 if shape[2] == 1 else bq, bkv), index)
