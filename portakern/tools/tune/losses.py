"""Losses of the shipped tilings relative to the best that a tuner found, over many calls."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MOST", "SMALL", "figures", "searched"]

Row = Mapping[str, Any]
SMALL, MOST = 0.05, 0.15
"""What the median loss of a family, and its worst, may be."""


def searched(row: Row, left: int | None = None) -> bool:
    """Whether anything beside the shipped tiling was tried, or there is nothing else; of rows that do not say so, by
    whether their run came to its end: ``left``, the keys that time did not reach."""
    exhausted = row.get("exhausted")
    return row["tried"] > 1 or row["refused"] > 0 or bool(not left if exhausted is None else exhausted)


def figures(rows: Sequence[Row]) -> list[str]:
    """Calls, tilings tried, losses, how many lie beyond both limits, and the gain as a geometric mean, of rows
    that were searched."""
    losses = [r["loss"] for r in rows]
    beyond = [sum(loss > most for loss in losses) for most in (SMALL, MOST)]
    return [
        str(len(rows)), f"{statistics.median(r['tried'] for r in rows):g}", f"{statistics.median(losses):.1%}",
        f"{max(losses):.1%}", *map(str, beyond),
        f"{statistics.geometric_mean(r['default'] / r['best'] for r in rows):.3f}",
    ]  # fmt: skip
