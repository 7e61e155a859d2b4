"""Where a run's seconds went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

__all__ = ["Spent"]


class Spent:
    """Seconds by what they went into; of what runs inside of something else, to the inner alone. ``before``: those
    that went before anybody counted; ``clock``: seconds, of wall-clock time where nothing is said."""

    def __init__(
        self, before: Mapping[str, float] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds: dict[str, float] = dict(before or {})
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
            self.seconds[what] = self.seconds.get(what, 0.0) + whole - self._inner.pop()
            self._inner[-1] += whole

    def take(self, seconds: Mapping[str, float]) -> None:
        """Add what somebody else counted."""
        for what, more in seconds.items():
            self.seconds[what] = self.seconds.get(what, 0.0) + more

    def __str__(self) -> str:
        most = sorted(self.seconds.items(), key=lambda x: -x[1])
        return ", ".join(f"{what} {seconds:.0f} s" for what, seconds in most)
