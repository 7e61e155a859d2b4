"""A run: every case with all its contenders, in this process or in several that share the device."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from portakern.tools.bench.background import Background, WarmUp
from portakern.tools.bench.plan import BenchPlan, Spent
from portakern.tools.bench.pruning import Pruned
from portakern.tools.bench.rows import Row
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.trial import Computed, DeviceLost, TimingContext
from portakern.tools.bench.verdicts import Expected
from portakern.tools.bench.workers import BenchWorker, Here, Measured, TimeRequest

__all__ = ["Helped", "Outcome", "run"]


@dataclass
class Outcome:
    """The results of a run. ``rows``: one for each contender and call; ``rates``: the measured roof; ``left_out``:
    cases that did not fit into the time limit; ``unserved``: (case, reason) of those whose arrays cannot be made;
    ``spent``: seconds by activity; ``pruned``: peers that were far behind; ``call_seconds``: call -> seconds that it
    took."""

    rows: list[Row] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    left_out: list[TimedCase] = field(default_factory=list)
    unserved: list[tuple[TimedCase, str]] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)
    pruned: Pruned = field(default_factory=Pruned)
    call_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Helped:
    """Work of other processes: they compute ``references``, ``warm`` up compilers' caches, and ``workers`` time cases;
    without workers this process does. ``visits``: the seconds of the visits that were used."""

    references: Background[list[Expected]] = field(default_factory=Background)
    warm: WarmUp = field(default_factory=WarmUp)
    workers: Sequence[BenchWorker] = ()
    visits: Counter[str] = field(default_factory=Counter)

    def next(self, cases: Sequence[TimedCase], seconds: float = math.inf) -> TimedCase:
        """The first of these of which all is done that others do; where there is none within ``seconds``, nor within
        those that a visit is waited for, one that was visited, or the very first."""
        end = time.monotonic() + min(seconds, self.warm.longest)
        while (done := self.ready(cases)) is None and (left := end - time.monotonic()) > 0:
            wait(self.pending(cases), left, FIRST_COMPLETED)
        return done or next((c for c in cases if self.warm.is_ready(c)), cases[0])

    def ready(self, cases: Sequence[TimedCase]) -> TimedCase | None:
        """The first of these of which all is done that others do, if there is one."""
        return next((c for c in cases if self.references.is_ready(c) and self.warm.is_ready(c)), None)

    def pending(self, cases: Sequence[TimedCase]) -> list[Future[Any]]:
        """What others are still to do."""
        return [*self.warm.pending(cases), *self.references.pending(cases)]

    def computed(self, case: TimedCase) -> Computed:
        """What others found out of a case, once."""
        visit = self.warm.take(case)
        self.visits.update(visit.seconds if visit else {})
        return Computed(self.references.take(case), visit.of_saved if visit else None)


def run(
    plan: BenchPlan,
    done: Callable[[Outcome, TimedCase], None],
    start: float | None = None,
    helped: Helped = Helped(),
) -> Outcome:
    """Carry a plan out. ``done`` is called after each case with all that is known by then.

    ``start``: when the plan's seconds began, in ``time.perf_counter``'s time; None: now. ``helped``: by what other
    processes do meanwhile.

    Raises:
      DeviceLost: the device is unusable; what was measured before was handed to ``done``.
    """
    now = time.perf_counter()
    start = now if start is None else start
    found = Outcome(spent=Spent({"before the first call": now - start}), pruned=Pruned(plan.every_peer))
    workers = [*helped.workers] or [Here(TimingContext(plan, visited=helped.warm.visited))]
    with found.spent.on("roof and loading" if helped.workers else "the roof"):
        found.rates = workers[0].roof().result()
    return _Run(plan, done, start, helped, found, workers).carried_out()


ENDLESS = 300.0
"""Seconds in which something ends, or nothing is going to: ten times what the dearest case takes."""


class _Run:
    """The remaining cases of a plan, and the worker of each case in progress."""

    def __init__(
        self,
        plan: BenchPlan,
        done: Callable[[Outcome, TimedCase], None],
        start: float,
        helped: Helped,
        found: Outcome,
        workers: list[BenchWorker],
    ) -> None:
        self.plan, self.done, self.start, self.helped, self.found = plan, done, start, helped, found
        self.left, self.idle = list(plan.cases), workers
        self.busy: dict[Future[Measured], tuple[BenchWorker, TimedCase]] = {}
        self.calls = set[str]()

    def carried_out(self) -> Outcome:
        while self.left or self.busy:
            while self.left and self.idle and self._begun():
                pass
            if self.busy:
                finished, _ = wait([*self.busy, *self._others()], ENDLESS, FIRST_COMPLETED)
                for worker, _ in self.busy.values() if not finished else ():
                    worker.end()
                for future in [f for f in self.busy if f in finished]:
                    self._take(future)
        return self.found

    def _others(self) -> list[Future[Any]]:
        """What else to wait for: where somebody is idle, what will be ready to be timed."""
        return self.helped.pending(self.left) if self.idle else []

    def _seconds(self) -> float:
        """Those that are left in which a case may begin."""
        return math.inf if self.plan.seconds is None else self.start + self.plan.seconds - time.perf_counter()

    def _begun(self) -> bool:
        """Whether a case was given to whoever is idle. Nobody waits for one while another is timed."""
        helped, found = self.helped, self.found
        with found.spent.on("waiting for compilers"):
            case = helped.ready(self.left) if self.busy else helped.next(self.left, self._seconds())
        if self._seconds() < 0:  # it was waited for until the end
            found.left_out, self.left = self.left, []
            return False
        if case is None:
            return False
        self.left, worker = [other for other in self.left if other is not case], self.idle.pop(0)
        request = TimeRequest(case, helped.computed(case), found.pruned, frozenset(self.calls), found.rates)
        self.busy[worker.time(request)] = worker, case
        return True

    def _take(self, future: Future[Measured]) -> None:
        """Take in what became of a case."""
        worker, case = self.busy.pop(future)
        try:
            measured = future.result()
        except BrokenProcessPool as e:
            raise DeviceLost(
                f"bench: the process that timed {case.timed} {case.dtype} of {case.suite} has ended ({e}); the rows "
                "before it are kept"
            ) from e
        found = self.found
        self.idle.append(worker)
        for what, seconds in measured.seconds.items():
            found.spent.seconds[what] += seconds
        if measured.unserved is not None:
            found.unserved.append((case, measured.unserved))
        elif measured.call not in self.calls:  # options of two forward calls may be none of their gradients'
            self.calls.add(measured.call)
            found.pruned.note(case, measured.rows)
            found.rows += measured.rows
            found.call_seconds[measured.call] = measured.total_seconds
        self.helped.warm.end()
        self.done(found, case)
