"""Which queries meet which keys where a sequence lies on several devices and keys travel around their ring.

Each device holds chunks of the sequence, one behind the other in its memory. At step s device r holds the keys of
device r - s, and :func:`pairs` lists the calls that its queries need with them: those where no pair of a query and a
key is masked without a mask, those that the mask crosses with the places from which it counts, and none of those that
it hides. Everything here is numbers that each device knows without asking another.

Two orders: **zigzag**, where the sequence is cut into two chunks for each device, and device r of n holds chunks r and
2n - 1 - r, so that under a causal mask all devices have equal work at each step (the order of zigzag ring attention, by
Zhu 2024, and of Llama 3's context parallelism, section 3.3.2); and **contiguous**, one chunk for each device.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from portakern.errors import SpecError

__all__ = [
    "ORDERS",
    "Layout",
    "Pair",
    "Visible",
    "check_shapes",
    "checked_lengths",
    "chunks",
    "pairs",
    "steps",
    "zigzag_order",
]

ORDERS = ("zigzag", "contiguous")


class Visible(NamedTuple):
    """The keys that a query at i sees: those from i - left to i + right; None: without an end."""

    left: int | None
    right: int | None

    @classmethod
    def of(cls, is_causal: bool, window: tuple[int | None, int | None] | None) -> Visible:
        left, right = window or (None, None)
        return cls(left, (0 if right is None else min(right, 0)) if is_causal else right)

    def some(self, nearest: int, furthest: int) -> bool:
        """Whether a distance from ``nearest`` to ``furthest``, of a key less that of a query, is seen."""
        return (self.left is None or furthest >= -self.left) and (self.right is None or nearest <= self.right)

    def all(self, nearest: int, furthest: int) -> bool:
        """Whether all distances from ``nearest`` to ``furthest`` are seen."""
        return (self.left is None or nearest >= -self.left) and (self.right is None or furthest <= self.right)


class SequenceChunk(NamedTuple):
    """Tokens that are neighbours in the sequence: where they begin there; first, end: where they lie on a device."""

    start: int
    first: int
    end: int


Layout = tuple[tuple[SequenceChunk, ...], ...]
"""Of each device the chunks that it holds."""


class Pair(NamedTuple):
    """Queries and keys of two devices that meet in one call.

    Attributes:
      q_first, q_end; kv_first, kv_end: where they lie on their devices.
      q_start: how far the first query stands behind the first key; None: the mask hides no pair of them.
    """

    q_first: int
    q_end: int
    kv_first: int
    kv_end: int
    q_start: int | None

    def options(self, common: Mapping[str, Any], mask: Mapping[str, Any]) -> dict[str, Any]:
        """The options of its call: those of all calls, and where the mask crosses it the mask with its place."""
        if self.q_start is None:
            return dict(common)
        ends_alike = self.q_start == (self.kv_end - self.kv_first) - (self.q_end - self.q_first)  # the op's default
        return {**common, **mask, **({} if ends_alike else {"q_start": self.q_start, "kv_start": 0})}


def check_shapes(**shapes: tuple[int, ...]) -> None:
    """SpecError where an array, by its argument's name and query first, has not four axes, or other extents of batch
    and tokens than query."""
    query = shapes["query"]
    for name, shape in shapes.items():
        if len(shape) != 4 or shape[:2] != query[:2]:
            raise SpecError(
                f"ring_attention: {name} has shape {shape} beside query of {query}; expected (batch, tokens, heads, "
                "width), with query's batch and tokens"
            )


def checked_lengths(lengths: Sequence[int] | None, tokens: int, count: int) -> list[int]:
    """How many tokens each of ``count`` devices holds; ``tokens`` on each where ``lengths`` is None.

    Raises:
      SpecError: lengths that are no integers from 0 up, or not as many as devices.
    """
    if lengths is None:
        return [tokens] * count
    try:
        sizes = [operator.index(n) for n in lengths]
    except TypeError:
        sizes = []
    if len(sizes) != count or min(sizes) < 0:
        raise SpecError(
            f"ring_attention: lengths is {lengths!r} on {count} devices; expected an integer from 0 up for each of "
            "them, the tokens that it holds"
        )
    return sizes


def chunks(order: str, lengths: Sequence[int]) -> Layout:
    """The chunks of each device, of which device r holds ``lengths[r]`` tokens.

    Raises:
      SpecError: an unknown order; in zigzag, lengths that are odd or differ.
    """
    if order not in ORDERS:
        raise SpecError(f"ring_attention: order is {order!r}; expected one of {', '.join(map(repr, ORDERS))}")
    count = len(lengths)
    if order == "contiguous":
        starts = [sum(lengths[:r]) for r in range(count)]
        return tuple((SequenceChunk(start, 0, n),) for start, n in zip(starts, lengths, strict=True))
    if len(set(lengths)) > 1 or lengths[0] % 2:
        raise SpecError(
            f"ring_attention: devices hold {list(lengths)} tokens in order='zigzag'; expected the same even number on "
            f"each, two chunks: pad the sequence to a multiple of {2 * count}, or pass order='contiguous'"
        )
    half = lengths[0] // 2
    return tuple(
        (SequenceChunk(r * half, 0, half), SequenceChunk((2 * count - 1 - r) * half, half, 2 * half))
        for r in range(count)
    )


def zigzag_order(length: int, count: int) -> list[int]:
    """The tokens of a sequence as ``count`` devices hold them one behind the other in zigzag order.

    Raises:
      SpecError: a length that 2 ``count`` does not divide.
    """
    if count < 1 or length % (2 * count):
        raise SpecError(
            f"zigzag: {length} tokens on {count} devices; expected a multiple of twice the number of devices"
        )
    every = chunks("zigzag", [length // count] * count)
    return [token for own in every for p in own for token in range(p.start, p.start + p.end - p.first)]


@functools.lru_cache(4096)
def pairs(layout: Layout, visible: Visible, rank: int, source: int) -> tuple[Pair, ...]:
    """The calls that bring all queries of device ``rank`` and all keys of device ``source`` that they see together."""
    queries, keys = ([p for p in layout[r] if p.end > p.first] for r in (rank, source))
    if rank == source and visible == (None, 0) and keys:  # the order of tokens is all that this mask knows
        return (Pair(0, queries[-1].end, 0, keys[-1].end, 0),)
    unmasked: list[Pair] = []
    masked = []
    for k in keys:
        seen: list[Pair] = []
        for q in queries:
            nearest, furthest = k.start - q.start - (q.end - q.first - 1), k.start + k.end - k.first - 1 - q.start
            if visible.all(nearest, furthest):
                joins = bool(seen) and seen[-1].q_end == q.first
                first = seen.pop().q_first if joins else q.first
                seen.append(Pair(first, q.end, k.first, k.end, None))
            elif visible.some(nearest, furthest):
                masked.append(Pair(q.first, q.end, k.first, k.end, q.start - k.start))
        for pair in seen:
            last = next((p for p in unmasked if p[:2] == pair[:2] and p.kv_end == pair.kv_first), None)
            if last is not None:
                unmasked.remove(last)
                pair = pair._replace(kv_first=last.kv_first)
            unmasked.append(pair)
    return tuple(masked + unmasked)


@functools.lru_cache(1024)
def steps(layout: Layout, visible: Visible) -> int:
    """The number of steps after which no device needs keys that it has not seen, its own being the first."""
    count = len(layout)
    needed = [s for s in range(count) if any(pairs(layout, visible, r, (r - s) % count) for r in range(count))]
    return max(needed, default=0) + 1
