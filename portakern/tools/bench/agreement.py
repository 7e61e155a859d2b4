"""Compare two runs of ``portakern bench``: the speed ratios to the best peer in both."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from portakern import results
from portakern.results import ResultError

__all__ = ["HEADS", "WITHIN", "Agreement", "RowPair", "agreement"]

Row = Mapping[str, Any]
NONE = "–"  # a cell about which nothing is known
WITHIN = 0.05
"""What two runs may differ by."""

SIZES = (("under 10 us", 10.0), ("to 100 us", 100.0), ("to 1 ms", 1000.0), ("above", inf))
"""Calls by their time: of a few microseconds one is a tenth, and what the clock of the chip does shows."""

HEADS = ["call", "our ratios", "within", "median", "worst", "all times", "within", "median", "worst"]
MEASURED = ("median_us", "best_us", "worst_us", "host_us")


@dataclass(frozen=True)
class RowPair:
    """The rows of a contender on one call in two runs, right and timed in both."""

    first: Row
    second: Row

    @property
    def us(self) -> float:
        return float(self.first["median_us"])

    @property
    def time(self) -> float:
        """By how much the time of the second run is larger, as a share of the first's."""
        return float(self.second["median_us"] / self.first["median_us"] - 1)

    @property
    def ratio(self) -> float | None:
        """The same of the ratio to the best peer; None where a run has none."""
        ratios = self.first.get("ratio"), self.second.get("ratio")
        return float(ratios[1] / ratios[0] - 1) if ratios[0] and ratios[1] else None

    def __str__(self) -> str:
        first, second = self.first, self.second
        ratios = f"{first['ratio']:.3f}, then {second['ratio']:.3f} of the best peer's speed" if self.ratio else ""
        times = f"{first['median_us']:,.1f}, then {second['median_us']:,.1f} us"
        return f"{first['contender']} {ratios} ({times}): {first['call']}"


@dataclass(frozen=True)
class Agreement:
    """The rows that two runs of one device have in common.

    Attributes:
      pairs: rows that both timed, of the same sources. alone: rows that one of them timed and the other does not have,
      or has without a time, such as of a peer that was far behind. changed: how many measured other sources; kept: how
      many are one measurement, which the second run took over from the first.
      turned: (first, second) of rows that are right in one and wrong, or failed, in the other.
    """

    pairs: Sequence[RowPair]
    alone: int
    changed: int
    kept: int
    turned: Sequence[tuple[Row, Row]]

    @property
    def own(self) -> list[RowPair]:
        """Pairs of subjects that have a ratio."""
        return [p for p in self.pairs if p.first["subject"] and p.ratio is not None]

    @property
    def beyond(self) -> list[RowPair]:
        """portakern's pairs whose ratios differ by more than runs may, the worst first."""
        return sorted((p for p in self.own if abs(p.ratio or 0) > WITHIN), key=lambda p: -abs(p.ratio or 0))

    def table(self) -> list[list[str]]:
        """A line a size of calls, and one of all, under :data:`HEADS`."""
        lines, least = [], 0.0
        for name, most in SIZES:
            lines.append([name, *self._figures(least, most)])
            least = most
        return [*lines, ["all", *self._figures(0.0, inf)]]

    def _figures(self, least: float, most: float) -> list[str]:
        ratios = [abs(p.ratio or 0) for p in self.own if least <= p.us < most]
        return _spread(ratios) + _spread([abs(p.time) for p in self.pairs if least <= p.us < most])


def _spread(differences: Sequence[float]) -> list[str]:
    """How many there are, how many of them runs may differ by, the median, the worst."""
    if not differences:
        return ["0", NONE, NONE, NONE]
    inside = sum(d <= WITHIN for d in differences)
    return [str(len(differences)), str(inside), f"{statistics.median(differences):.1%}", f"{max(differences):.1%}"]


def agreement(first: Path, second: Path) -> Agreement:
    """Hold a run against an earlier one.

    Raises:
      ResultError: a file is no run of ``portakern bench``, or they ran on different devices.
    """
    runs = [results.read(file) for file in (first, second)]
    for run in runs:
        if run.benchmark != "bench":
            raise ResultError(f"{run.file}: it holds results of {run.benchmark}; expected those of portakern bench")
    if runs[0].device != runs[1].device:
        raise ResultError(
            f"{second}: it ran on {runs[1].device}, and {first} on {runs[0].device}; expected two runs on devices of "
            "one kind"
        )
    before, after = ({run.key(row): row for row in run.rows} for run in runs)
    both = [(before[key], after[key]) for key in before if key in after]
    same = [(a, b) for a, b in both if a.get("sources") == b.get("sources")]
    timed = [RowPair(a, b) for a, b in same if a.get("median_us") and b.get("median_us")]
    pairs = [p for p in timed if any(p.first[name] != p.second[name] for name in MEASURED)]
    turned = [(a, b) for a, b in same if _right(a) is not None and _right(b) is not None and _right(a) != _right(b)]
    here, there = ({key for key, row in rows.items() if row.get("median_us")} for rows in (before, after))
    other = {key for key in here & there if before[key].get("sources") != after[key].get("sources")}
    return Agreement(pairs, len(here ^ there), len(other), len(timed) - len(pairs), turned)


def _right(row: Row) -> bool | None:
    """Whether a result was right; None where there was none."""
    return {"right": True, "wrong": False, "failed": False}.get(row["verdict"])
