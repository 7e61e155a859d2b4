"""Device time of calls on PyTorch's tensors: events on the stream, behind a kernel that keeps the device busy."""

from __future__ import annotations

import functools
import time
from typing import Any

from portakern.core.stopwatch import Run, Sample, Stopwatch

__all__ = ["QueuedEvents", "stopwatch"]

CYCLES_PER_US = 2000
"""Of the fastest clock that a chip may run at: at a slower one the device sleeps longer, which harms nothing."""

MARGIN_US = 30.0
LONGEST_US = 50_000.0
"""No call is slept for longer; one whose launches take the host more than this is one that waits for the device."""

CACHES = 4
"""How many times the size of the L2 cache is written to before each call."""


def stopwatch(run: Run, device: Any) -> Stopwatch:
    """By the host's clock on a CPU, where calls return when they are done."""
    return QueuedEvents(run, device) if device.type == "cuda" else Stopwatch(run, lambda result: None)


class QueuedEvents(Stopwatch):
    """Two events on the stream, between which the call's kernels follow each other without the host.

    Before the first event the device sleeps, then the L2 cache is overwritten; so the host has handed over the last
    kernel before the device begins with the first. Whether that was so is asked each time: the first event must not
    have passed when the second is recorded. Otherwise the host's time might show, and the call is made again behind a
    longer sleep. A call that waits for the device itself is timed with that in it, and ``clock`` says so.

    No graph is captured: what cannot be captured (allocations of other libraries, calls that wait, kernels that keep
    state on the host) is timed as everything else is.
    """

    clock = "events"

    def __init__(self, run: Run, device: Any) -> None:
        import torch

        self.run, self.device, self.torch = run, device, torch
        self.sleep_us = MARGIN_US
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(self) -> Sample:
        while True:
            found, late = self._once()
            if not late or self.clock != QueuedEvents.clock:
                return found
            longer = 2 * max(found.host_us, self.sleep_us) + MARGIN_US
            if longer > LONGEST_US:
                self.clock = "events, with waits of the host"
            else:
                self.sleep_us = longer

    def _once(self) -> tuple[Sample, bool]:
        """A sample, and whether the device may have waited for the host in it."""
        torch = self.torch
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(self.sleep_us * CYCLES_PER_US))
            _cache_filler(self.device).zero_()
            self.start.record()
            begin = time.perf_counter()
            self.run()
            host_us = 1e6 * (time.perf_counter() - begin)
            self.end.record()
            late = self.start.query()
            self.end.synchronize()
            return Sample(1e3 * self.start.elapsed_time(self.end), host_us), late


@functools.lru_cache(maxsize=1)
def _cache_filler(device: Any) -> Any:
    """Memory that is larger than the L2 cache."""
    import torch

    size = torch.cuda.get_device_properties(device).L2_cache_size or 2**26
    return torch.empty(CACHES * size, dtype=torch.int8, device=device)
