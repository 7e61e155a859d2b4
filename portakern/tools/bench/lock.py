"""A lock of the device for several processes: the one that holds it has the device alone; the others are stopped."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from portakern.processes import stopped

__all__ = ["DeviceLock"]

SETTLED = 0.1
"""Seconds after which a device has finished what processes handed over before they were stopped: each waits for a call
before it makes another, and no call that is visited takes longer."""


class DeviceLock:
    """Passed to processes at their start, which register with it. Timing processes have numbers below ``workers``; up
    to ``others`` more processes never hold the lock.

    Attributes:
      case_ready: its ``value`` is 1 when there is something to do that is of more use than to get ready.
    """

    def __init__(self, workers: int, others: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.workers, self.number = workers, -1
        self._turn, self._next = spawn.Lock(), spawn.Value("i", workers)
        self.case_ready = spawn.RawValue("b", 0)  # without a lock, which a process that is stopped could hold
        self._pids, self._stood = spawn.RawArray("i", workers + others), spawn.RawArray("d", workers + others)

    def join(self, number: int | None = None) -> None:
        """Have this process stopped while another holds the lock; ``number``: of one that times."""
        with self._next.get_lock():
            if number is None:
                number = self._next.value
                self._next.value += 1
            self.number, self._pids[number] = number, os.getpid()

    def forget(self) -> None:
        """Of those that never hold it none is left: the system may give their ids to others."""
        self._pids[self.workers :] = [0] * (len(self._pids) - self.workers)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """While inside, no other process that joined uses the device, or anything else."""
        with self._turn:
            others, start = [i for i, pid in enumerate(self._pids) if pid and i != self.number], time.monotonic()
            try:
                with stopped([self._pids[i] for i in others]):
                    time.sleep(SETTLED)
                    yield
            finally:
                for i in others:
                    self._stood[i] += time.monotonic() - start

    def clock(self) -> float:
        """Seconds, without those that this process was stopped for."""
        return time.perf_counter() - self._stood[self.number]
