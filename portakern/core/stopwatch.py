"""How long a call takes: the face that every library's clock has. Each library's own is in its wing
(:meth:`portakern.core.framework.Framework.stopwatch`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["HOST_CLOCK", "Run", "Sample", "Stopwatch"]

Run = Callable[[], Any]
"""A call without arguments; what it returns are the arrays that it made."""

HOST_CLOCK = "host"
"""The name of the clock that a device's own takes the place of."""


class Sample(NamedTuple):
    """One call, in microseconds: ``device_us`` of its work, ``host_us`` until it came back to its caller."""

    device_us: float
    host_us: float


class Stopwatch:
    """Times one call over and over; this one by the host's clock, until the results are there.

    Attributes:
      clock: what the times are read from. A stopwatch may find on the way that a call cannot be timed as others are,
        and then says so here.
    """

    clock = HOST_CLOCK

    def __init__(self, run: Run, wait: Callable[[Any], Any]) -> None:
        """``wait`` returns when the arrays that it is given are there."""
        self.run, self.wait = run, wait

    def sample(self) -> Sample:
        """Call once, with the device's caches as cold as the clock can make them. The host's are left as they are."""
        start = time.perf_counter()
        result = self.run()
        back = time.perf_counter()
        self.wait(result)
        return Sample(1e6 * (time.perf_counter() - start), 1e6 * (back - start))
