"""What other processes compile while cases are timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress

from portakern.tools.bench.others import Others
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.trial import Foreseen, Visit

__all__ = ["Ahead"]


class Ahead(Others[Visit]):
    """Processes that visit cases, each a future; without any, nobody does.

    Attributes:
      processes: those that visit. visited: names of the backends whose calls are visited. longest: seconds that any
      case is waited for.
    """

    def __init__(
        self,
        futures: Mapping[int, Future[Visit]] | None = None,
        processes: ProcessPoolExecutor | None = None,
        visited: frozenset[str] = frozenset(),
        longest: float = 0.0,
    ) -> None:
        super().__init__(futures)
        self.processes = processes
        self.visited, self.longest = visited, longest
        self.seconds: Counter[str] = Counter()

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

    def end(self) -> None:
        """Let the processes go when there is nothing left to visit: each holds memory of the device."""
        if self.processes is not None and all(f.done() for f in self._futures.values()):
            self.processes.shutdown(wait=False)

    def _visit(self, case: TimedCase) -> Visit | None:
        """How a visit ended; one that nobody has begun with is left to whoever times the case."""
        future = self._futures.get(id(case))
        if future is None or future.cancel() or not future.done():
            return None
        with suppress(Exception):  # what went wrong there goes wrong here, where it is told
            return future.result()
        return None
