"""The calls and contenders of a run, and a record of its time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from portakern.core.backend import Backend
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.timing import ROUNDS

__all__ = ["BenchPlan", "Spent"]


@dataclass(frozen=True)
class BenchPlan:
    """The calls and contenders of a run.

    Attributes:
      cases: in the order of their importance, in which they are timed as they are ready. subjects: whose variants are
      measured, the one first in whose library's arrays the calls are made; against: the peers.
      device: the platform, None: the best that the first subject compiles for here.
      rounds: samples of each contender, at most. seconds: no case is begun after so many; None: all are.
      every_peer: time those too that calls of a suite have shown to be far behind.
    """

    cases: Sequence[TimedCase]
    subjects: Sequence[Backend]
    against: Sequence[Backend]
    device: str | None = None
    rounds: int = ROUNDS
    seconds: float | None = None
    every_peer: bool = False

    def rounds_of(self, case: TimedCase) -> int:
        """Samples of each contender of a case."""
        return self.rounds if case.rounds is None else min(self.rounds, case.rounds)

    @property
    def lead(self) -> Backend:
        return self.subjects[0]


class Spent:
    """Seconds by activity; the time of a nested activity counts for the inner one alone. ``before``: seconds before
    counting began; ``clock``: the clock in seconds, wall-clock time by default."""

    def __init__(
        self, before: Mapping[str, float] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float, before or {})
        self.clock = clock
        self._inner = [0.0]

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Count the block under ``what``, however it ends."""
        start = self.clock()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = self.clock() - start
            self.seconds[what] += whole - self._inner.pop()
            self._inner[-1] += whole
