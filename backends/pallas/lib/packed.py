"""Sequences that are packed one behind the other, in tiles: which rows a tile has, and which keys rows see."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from portakern.backends.pallas.lib.band import both
from portakern.backends.pallas.lib.blocks import positions, quotient


class PackedTiles(NamedTuple):
    """The rows of an array of packed sequences, moved to where tiles of ``block`` rows begin.

    The tiles of the sequence that begins at row b, of number n, are counted from floor(b / block) + n on: that leaves
    room for ceil(length / block) of them before those of the next. What lies before the first start and from the last
    one on are sequences too.

    Attributes:
      block, tiles: rows of a tile, and how many tiles there are, of which some are not in use.
      source: the row that stands at each place of the tiles; a number beyond the last row where none does.
      target: where each row stands.
      first: the first tile of each sequence. number: the sequence of each tile. lens: rows of each sequence.
    """

    block: int
    tiles: int
    source: jax.Array
    target: jax.Array
    first: jax.Array
    number: jax.Array
    lens: jax.Array

    @classmethod
    def of(cls, starts: jax.Array, tokens: int, rows: int, block: int) -> PackedTiles:
        """``rows``: that a token has."""
        total, starts = tokens * rows, starts.astype(jnp.int32) * rows
        ends = jnp.concatenate([jnp.zeros(1, jnp.int32), starts, jnp.full(1, total, jnp.int32)])
        begins, lens = ends[:-1], ends[1:] - ends[:-1]
        first = quotient(begins, block) + jnp.arange(begins.size, dtype=jnp.int32)
        tiles = total // block + begins.size
        number = last_at_most(first, jnp.arange(tiles, dtype=jnp.int32))
        within = (jnp.arange(tiles, dtype=jnp.int32) - first[number]) * block
        row = within[:, None] + jnp.arange(block, dtype=jnp.int32)
        source = jnp.where(row < lens[number][:, None], begins[number][:, None] + row, total).reshape(-1)
        each = jnp.arange(total, dtype=jnp.int32)
        own = last_at_most(begins, each)
        return cls(block, tiles, source, first[own] * block + each - begins[own], first, number, lens)

    def spread(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """(heads, rows, ...) with rows at their places, and the number ``fill`` between them."""
        return x.at[:, self.source].get(mode="fill", fill_value=fill)

    def gathered(self, x: jax.Array) -> jax.Array:
        """What `spread` gave, as it was."""
        return x[:, self.target]

    def table(self, other: PackedTiles) -> jax.Array:
        """Of each tile: the first of its rows, counted from its sequence's start; its sequence's rows; the first tile
        of that sequence among the ``other`` ones; and that one's rows, 0 of tiles that are not in use."""
        n, sequences = self.number, self.lens.size - 2
        within = (jnp.arange(self.tiles, dtype=jnp.int32) - self.first[n]) * self.block
        inside = (n > 0) & (n <= sequences) & (within < self.lens[n])
        entries = within, self.lens[n], other.first[n], jnp.where(inside, other.lens[n], 0)
        return jnp.stack(entries, 1).reshape(-1)


def last_at_most(rising: jax.Array, x: jax.Array) -> jax.Array:
    """The index of the last of these numbers, of which the first is 0, that is at most x."""
    return jnp.searchsorted(rising, x, side="right", method="compare_all").astype(jnp.int32) - 1


class Companion(NamedTuple):
    """What one sequence's rows and keys see of each other.

    Attributes:
      left, right: how far a query sees from its own place, None for all the way. heads: rows of a query.
      rows, kv_len: of the sequence.
    """

    left: int | None
    right: int | None
    heads: int
    rows: Any
    kv_len: Any

    @property
    def aligned(self) -> Any:
        """The key beside which the first query stands: the last one stands beside the last key."""
        return self.kv_len - quotient(self.rows, self.heads)

    def key_blocks(self, row: Any, count: int, block: int) -> tuple[Any, Any]:
        """The first and the last block of keys that so many rows see; where they see none the last lies before the
        first."""
        first, end = 0, self.kv_len
        if self.left is not None:
            first = jnp.maximum(quotient(row, self.heads) + self.aligned - self.left, 0)
        if self.right is not None:
            query = quotient(jnp.minimum(row + count, self.rows) + (self.heads - 1), self.heads)
            end = jnp.clip(query + self.aligned + self.right, 0, self.kv_len)
        return quotient(first, block), quotient(end + (block - 1), block) - 1

    def row_blocks(self, key: Any, count: int, block: int) -> tuple[Any, Any]:
        """The first and the last block of rows that see so many keys."""
        first, end = 0, self.rows
        if self.right is not None:
            first = jnp.maximum(key - self.aligned - self.right, 0) * self.heads
        if self.left is not None:
            end = jnp.clip((key + count - self.aligned + self.left) * self.heads, 0, self.rows)
        return quotient(first, block), quotient(end + (block - 1), block) - 1

    def full(self, row: Any, rows: int, key: Any, keys: int) -> Any:
        """Whether all of these rows see all of these keys. What rows beyond the last one see does not count."""
        found = key + keys <= self.kv_len
        if self.left is not None:
            found &= key + self.left >= quotient(row + (rows - 1), self.heads) + self.aligned
        if self.right is not None:
            found &= key + (keys - 1) <= quotient(row, self.heads) + self.aligned + self.right
        return found

    def visible(self, row: Any, key: Any, shape: tuple[int, int], by_key: bool) -> Any:
        """Which pairs of a block see each other; its rows are keys where ``by_key``."""
        keys, rows = (positions(shape, axis, at) for axis, at in ((int(not by_key), key), (int(by_key), row)))
        offset = keys * self.heads - rows  # this spares each pair a quotient
        low = None if self.left is None else offset > (self.aligned - self.left - 1) * self.heads
        high = None if self.right is None else offset <= (self.aligned + self.right) * self.heads
        return both(keys < self.kv_len, low, high)
