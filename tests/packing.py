"""Calls of attention on packed sequences, for tests: of arrays in NumPy, which each test hands to its library."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from portakern.testing import layouts

IDS = "q_segment_ids", "kv_segment_ids"


def documents(rng: Any, batch: int, length: int) -> Any:
    """Documents one behind the other."""
    return np.sort(rng.integers(0, 5, (batch, length)), 1)


def shuffled(rng: Any, batch: int, length: int) -> Any:
    """A few segments in any order: what lies between two positions of one holds others too."""
    return rng.integers(0, 3, (batch, length))


def scattered(rng: Any, batch: int, length: int) -> Any:
    """Ids that hardly any position of the other side has."""
    return rng.integers(0, 1000, (batch, length))


def disjoint(rng: Any, batch: int, length: int) -> Any:
    """Ids that queries and keys do not share, if there are not as many of both."""
    return np.full((batch, length), length)


KINDS = {f.__name__: f for f in (documents, shuffled, scattered, disjoint)}


def ids_of(kind: str, batch: int, q_len: int, kv_len: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Segment ids of queries and keys, int64. kind: of ``KINDS``."""
    rng = np.random.default_rng(seed)
    return {name: KINDS[kind](rng, batch, n) for name, n in zip(IDS, (q_len, kv_len), strict=True)}


def packed_arrays(
    kind: str, batch: int, q_len: int, kv_heads: int, group: int, kv_len: int, bias: tuple[int, ...] | None = None
) -> dict[str, np.ndarray]:
    """q, k and v with heads of 16, normal, a bias of this shape, and ids of a kind."""
    rng = np.random.default_rng(1)
    shapes = {"q": (batch, q_len, kv_heads * group, 16)} | dict.fromkeys("kv", (batch, kv_len, kv_heads, 16))
    shapes |= {} if bias is None else {"bias": bias}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()} | ids_of(kind, batch, q_len, kv_len)


def same_bits(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether results that both calls gave, of which there are several, have the same bits."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(some, others, strict=True) if a is not None]
    return len(pairs) > 1 and all(layouts.same_bits(a, b) for a, b in pairs)
