"""Pruned baselines: peers that were far behind on earlier calls of a suite, and are not timed on the others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from portakern.tools.bench.rows import FAILED, RIGHT, WRONG, Row
from portakern.tools.bench.suites import TimedCase

__all__ = ["Pruned"]

CALLS = 2
"""Calls of a suite that a peer is timed on in any case."""

FAR = 2.0
"""Times the best peer's time: whoever takes this on each call is not going to be the best on the next."""

Key = tuple[str, str, str, str]


@dataclass
class Pruned:
    """For each peer, how many times slower than the best it was on the calls of a suite, an op and a dtype; inf if it
    was wrong or did not finish. ``every``: time each peer all the same."""

    every: bool = False
    _factors: dict[Key, list[float]] = field(default_factory=dict)

    def note(self, case: TimedCase, rows: Iterable[Row]) -> None:
        """Take in what became of a call."""
        for row in rows:
            if not row["subject"] and (factor := _factor(row)) is not None:
                self._factors.setdefault(self._key(case, row["contender"]), []).append(factor)

    def why(self, case: TimedCase, contender: str, subject: bool) -> str | None:
        """Why a contender is not timed on a call; None where it is."""
        known = self._factors.get(self._key(case, contender), [])
        if subject or self.every or len(known) < CALLS or min(known) < FAR:
            return None
        timed = sorted(f for f in known if math.isfinite(f))
        times = f"{timed[0]:.1f} to {timed[-1]:.1f} times the best peer's time on {len(timed)}" if timed else ""
        wrong = f"no right result on {len(known) - len(timed)}" if len(timed) < len(known) else ""
        return f"not timed: {', '.join(filter(None, (times, wrong)))} of {len(known)} calls of the suite before"

    def _key(self, case: TimedCase, contender: str) -> Key:
        return case.suite, case.timed, case.dtype, contender


def _factor(row: dict[str, Any]) -> float | None:
    """A peer's time over the best peer's; None of one that takes no part."""
    if row["verdict"] in (WRONG, FAILED):
        return math.inf
    return 1 / row["ratio"] if row["verdict"] == RIGHT and row.get("ratio") else None
