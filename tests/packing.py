"""Segment ids of packed sequences, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np


def packed(rng: Any, batch: int, length: int) -> Any:
    """Documents one behind the other."""
    return np.sort(rng.integers(0, 5, (batch, length)), 1)


def mixed(rng: Any, batch: int, length: int) -> Any:
    """A few segments in any order: ranges hold other segments too."""
    return rng.integers(0, 3, (batch, length))


def apart(rng: Any, batch: int, length: int) -> Any:
    """Ids that hardly any position of the other side has."""
    return rng.integers(0, 1000, (batch, length))


KINDS = {f.__name__: f for f in (packed, mixed, apart)}


def ids_of(kind: str, batch: int, q_len: int, kv_len: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Of attention: ``q_segment_ids`` and ``kv_segment_ids``, int64. kind: of ``KINDS``."""
    rng = np.random.default_rng(seed)
    return {f"{side}_segment_ids": KINDS[kind](rng, batch, n) for side, n in (("q", q_len), ("kv", kv_len))}
