"""What other processes compile while this one times, and how they are kept from disturbing it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple

from portakern.benchmarking.others import Others
from portakern.benchmarking.suites import TimedCase
from portakern.benchmarking.verdicts import Known
from portakern.core.backend import Backend
from portakern.processes import stopped

__all__ = ["Ahead", "Foreseen", "Visit"]

SETTLED = 0.1
"""Seconds after which a device has finished what processes handed over before they were stopped: each waits for a call
before it makes another, and no call that is visited takes longer."""


class Foreseen(NamedTuple):
    """What a visit learned of gradients that need what a forward op saved: ``saved``: the mark of that, which was found
    right; ``known``: what is expected of gradients of just that."""

    saved: str
    known: Known


class Visit(NamedTuple):
    """A case that was visited: the seconds that its arrays and its contenders, by backend, took, and what is expected
    of it where only a device tells its inputs."""

    seconds: Mapping[str, float]
    foreseen: Foreseen | None = None


class Ahead(Others[Visit]):
    """Processes that visit cases, each a future; without any, nobody does.

    Attributes:
      visited: names of the backends whose calls are visited. longest: seconds that any case is waited for.
    """

    def __init__(
        self,
        futures: Mapping[int, Future[Visit]] | None = None,
        processes: ProcessPoolExecutor | None = None,
        visited: frozenset[str] = frozenset(),
        longest: float = 0.0,
    ) -> None:
        super().__init__(futures)
        self._processes = processes
        self.visited, self.longest = visited, longest
        self.seconds: Counter[str] = Counter()

    def at_work(self) -> bool:
        """Whether anything is left to visit."""
        return any(not f.done() for f in self._futures.values())

    def compiles(self, backend: Backend) -> bool:
        """Whether calls of a backend are visited."""
        return backend.name in self.visited

    def next(self, cases: Sequence[TimedCase]) -> TimedCase:
        """The first of these that was visited, or is not going to be; where there is none, the very first."""
        ready = next((c for c in cases if self.is_ready(c)), cases[0])
        visit = self._visit(ready)
        self.seconds.update(visit.seconds if visit else {})
        return ready

    def foreseen(self, case: TimedCase) -> Foreseen | None:
        """What a visit learned of a case's gradients, if one ended."""
        visit = self._visit(case)
        return visit.foreseen if visit else None

    def _visit(self, case: TimedCase) -> Visit | None:
        """How a visit ended; one that nobody has begun with is left to whoever times the case."""
        future = self._futures.get(id(case))
        if future is None or future.cancel() or not future.done():
            return None
        with suppress(Exception):  # what went wrong there goes wrong here, where it is told
            return future.result()
        return None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """While inside, nobody else uses the device: what visits stands still."""
        if self._processes is None or not self.at_work():
            yield
            return
        with stopped(self._processes):
            time.sleep(SETTLED)
            yield
