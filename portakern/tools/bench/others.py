"""What other processes do of cases while this one times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from portakern.tools.bench.suites import TimedCase

__all__ = ["Others"]

T = TypeVar("T")


class Others(Generic[T]):
    """A future for each case that somebody works on, by the case's identity; of the others nothing is to come."""

    def __init__(self, futures: Mapping[int, Future[T]] | None = None) -> None:
        self._futures = dict(futures or {})

    def is_ready(self, case: TimedCase) -> bool:
        """Whether all that is done of a case was done."""
        future = self._futures.get(id(case))
        return future is None or future.done()

    def pending(self, cases: Sequence[TimedCase]) -> list[Future[Any]]:
        """What is still to be done of cases."""
        return [self._futures[id(c)] for c in cases if not self.is_ready(c)]
