"""Times of several calls that alternate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from portakern.core.framework import Framework
from portakern.core.instruments import ClockSample, Run, Stopwatch

__all__ = ["ROUNDS", "CallFailed", "Times", "device_times", "interleaved"]

ROUNDS = 20
"""Samples of each call."""

WARM_UP = 2
"""Rounds before the first that counts: compilers, autotuners and the chip's clock settle in them."""


class Times(NamedTuple):
    """Microseconds of one call: on the device the median, minimum and maximum of ``rounds`` samples; on the host the
    median until the call returns. ``clock``: the clock of the device times."""

    median_us: float
    best_us: float
    worst_us: float
    host_us: float
    rounds: int
    clock: str


class CallFailed(RuntimeError):
    """A call raised an exception while it was timed. ``name``: the name of the call; the cause is the exception."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} failed while it was timed")
        self.name = name


def device_times(runs: Mapping[str, Run], framework: Framework, device: Any, rounds: int = ROUNDS) -> dict[str, Times]:
    """Device time of each call, alone: no host time, cold L2 cache, the calls taking turns.

    Args:
      runs: name -> a call without arguments, on arrays of ``framework`` that lie on ``device``; it returns its arrays.
      framework, device: whose clock is asked. On a CPU that is the host's clock, and the caches are left as they are.
      rounds: samples of each call.

    Returns:
      name -> its times.

    Raises:
      CallFailed: a call raised.
    """
    instruments = framework.instruments(device)
    recorder = instruments.recorder
    return interleaved({name: instruments.stopwatch(run, recorder) for name, run in runs.items()}, rounds)


def interleaved(watches: Mapping[str, Stopwatch], rounds: int = ROUNDS) -> dict[str, Times]:
    """Times of calls that may be of several frameworks. A round samples each once, so that a clock that drifts drifts
    for all; each round begins with another, so that none always runs in the wake of the same."""
    names = list(watches)
    samples: dict[str, list[ClockSample]] = {name: [] for name in names}
    for i in range(-WARM_UP, rounds):
        first = i % max(len(names), 1)
        for name in names[first:] + names[:first]:
            try:
                sample = watches[name].sample()
            except Exception as e:
                raise CallFailed(name) from e
            if i >= 0:
                samples[name].append(sample)
    return {name: _summary(found, watches[name].clock) for name, found in samples.items()}


def _summary(samples: list[ClockSample], clock: str) -> Times:
    on_device = [s.device_us for s in samples]
    host = statistics.median(us for s in samples if not math.isnan(us := s.host_us))
    return Times(statistics.median(on_device), min(on_device), max(on_device), host, len(samples), clock)
