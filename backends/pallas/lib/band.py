"""Which keys causality and a window let a query see, and so which blocks of queries and keys meet at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas.lib.blocks import positions, quotient
from portakern.backends.pallas.lib.segments import Span
from portakern.core.call import Call
from portakern.specs.attention import sight


class Band(NamedTuple):
    """The keys that causality and the window let a query see, in blocks of block_q rows and block_kv keys.

    Query i sees key j where first <= j - i <= last; None is no bound. Each query has ``heads`` rows, one after another:
    row r is one of query r // heads. ``rows``: how many there are, where what lies beyond the last one must not count.
    ``closed``: no query that is there sees beyond the last key, so that nothing else needs to hide what lies there.
    """

    first: int | None
    last: int | None
    kv_len: int
    block_q: int
    block_kv: int
    heads: int = 1
    rows: int | None = None
    closed: bool = False

    @classmethod
    def of(cls, call: Call, block_q: int, block_kv: int, heads: int = 1) -> Band:
        """The band of a call."""
        (left, right), kv_len = sight(call), call.dims["kv_len"]
        aligned = kv_len - call.dims["q_len"]  # where ``sight`` counts from
        first, last = None if left is None else aligned - left, None if right is None else aligned + right
        return cls(first, last, kv_len, block_q, block_kv, heads)

    def closing(self, q_len: int) -> Band:
        """The same, for kernels that let queries beyond the last one compute what they like."""
        return self._replace(closed=self.last is not None and self.last <= self.kv_len - q_len)

    @property
    def has_edges(self) -> bool:
        """Whether it hides any pair of a query and a key that are there."""
        return self.first is not None or self.last is not None

    def span(self, i: Any, segment_span: Span | None = None) -> tuple[Any, Any]:
        """The first and the last key block that query block i can see.

        Where it sees none, the last lies before the first. ``segment_span``: the key blocks that may hold its segments.
        """
        low, high = (max, min) if isinstance(i, int) else (jnp.maximum, jnp.minimum)
        first, last = 0, (self.kv_len - 1) // self.block_kv
        if self.first is not None:
            first = quotient(low(quotient(i * self.block_q, self.heads) + self.first, 0), self.block_kv)
        if self.last is not None:
            query = quotient((i + 1) * self.block_q - 1, self.heads)
            key = high(low(query + self.last, -1), self.kv_len - 1)
            last = quotient(key + self.block_kv, self.block_kv) - 1
        if segment_span is None:
            return first, last
        return jnp.maximum(first, segment_span[0]), jnp.minimum(last, segment_span[1] - 1)

    def steps(self) -> int:
        """Key blocks that any one query block can see, at most."""
        whole = pl.cdiv(self.kv_len, self.block_kv)
        if self.first is None or self.last is None:
            return whole
        width = max(1, pl.cdiv(self.block_q - 1, self.heads) + 1 + self.last - self.first)
        return min(whole, pl.cdiv(width - 1, self.block_kv) + 1)

    def block(self, i: Any, step: Any, segment_span: Span | None = None) -> Any:
        """The key block that a step of query block i has resident: past the last visible one, that one again."""
        first, last = self.span(i, segment_span)
        return jnp.clip(first + step, 0, jnp.maximum(last, 0))

    def ahead(
        self,
        position: Any,
        step: Any,
        blocks: int,
        order: Callable[[Any], Any],
        segment_spans: Callable[[Any], Span] | None = None,
    ) -> tuple[Any, Any]:
        """The query block and the key block that a step has resident. ``position``: which of so many query blocks it is
        in the grid's order; ``order``: which query block stands there. Past the last key block that it sees, those of
        the first step of the query block at the next place, which are then there when it begins. ``segment_spans``:
        from a query block to the key blocks that may hold its segments."""
        i = order(position)
        if not self.has_edges and segment_spans is None:
            return i, self.block(i, step)
        mine = None if segment_spans is None else segment_spans(i)
        first, last = self.span(i, mine)
        skipped = (first + step > last) & (position + 1 < blocks)
        i_next = order(position + 1 if segment_spans is None else jnp.minimum(position + 1, blocks - 1))
        following = self.span(i_next, None if segment_spans is None else segment_spans(i_next))[0]
        end = (self.kv_len - 1) // self.block_kv
        following = min(following, end) if isinstance(following, int) else jnp.minimum(following, end)
        return jnp.where(skipped, i_next, i), jnp.where(skipped, following, self.block(i, step, mine))

    @property
    def one_sided(self) -> bool:
        """Whether query blocks see more keys the later, or the earlier, they stand."""
        return (self.first is None) != (self.last is None)

    def inside(self, i: Any, j: Any) -> Any:
        """Whether every pair of query block i and key block j is visible."""
        within: Any = True
        if self.rows and self.rows % self.block_q:
            within &= (i + 1) * self.block_q <= self.rows
        if self.kv_len % self.block_kv and not self.closed:
            within &= (j + 1) * self.block_kv <= self.kv_len
        low, high = self._bounds()
        if low is not None:
            within &= j * (self.block_kv * self.heads) - (i + 1) * self.block_q >= low - 1
        if high is not None:
            within &= (j + 1) * (self.block_kv * self.heads) - i * self.block_q <= high + self.heads
        return within

    def _bounds(self) -> tuple[int | None, int | None]:
        """Row r sees key j where these bound heads * j - r, which spares each pair a quotient."""
        low = None if self.first is None else self.heads * (self.first - 1) + 1
        return low, None if self.last is None else self.heads * self.last

    def allowed(self, i: Any, j: Any) -> Any:
        """Which pairs of query block i and key block j are visible, or None where all are."""
        shape = (self.block_q, self.block_kv)
        key = positions(shape, 1, j * self.block_kv)
        row = positions(shape, 0, i * self.block_q)
        offset = (key if self.heads == 1 else key * self.heads) - row
        rules = []
        if self.rows and self.rows % self.block_q:
            rules.append(row < self.rows)
        if self.kv_len % self.block_kv and not self.closed:
            rules.append(key < self.kv_len)
        low, high = self._bounds()
        if low is not None:
            rules.append(offset >= low)
        if high is not None:
            rules.append(offset <= high)
        return both(*rules)

    def visit(self, i: Any, j: Any, visible: Any, body: Callable[[bool], None]) -> None:
        """Run ``body(edge)`` on query block i and key block j if some pair of it is visible.

        ``edge`` says whether some pair is not, so that blocks wholly inside the band pay for no mask.
        """
        inside = self.inside(i, j)
        pl.when(visible & inside)(lambda: body(False))
        pl.when(visible & (inside ^ True))(lambda: body(True))


def dealt(position: Any, blocks: int) -> Any:
    """The block at a place among so many, of which the first half of the places goes to one core and the other half to
    another: as much work for both where it grows from block to block.

    Counted from the last block, each core has one of every two, and it has the larger one of a pair in turn: of eight
    blocks 1, 2, 5, 6 and 0, 3, 4, 7. Where their number is odd, the first core has the first block besides.
    """
    if blocks < 3:
        return position
    odd, half = blocks % 2, pl.cdiv(blocks, 2)
    core = (position >= half).astype(position.dtype)
    pair = position - core * (half - odd)
    return 2 * pair + ((pair + core + 1) & 1) - odd


def both(*rules: Any) -> Any:
    """What all of these masks allow, where None allows everything."""
    rules = tuple(rule for rule in rules if rule is not None)
    return None if not rules else rules[0] if len(rules) == 1 else rules[0] & both(*rules[1:])
