"""Measurements on a device: time, memory, the roof, and whether an array is unchanged and complete.

This module has what the host alone can measure, for every library. The adapter of a library adds what its device can
measure (:meth:`portakern.core.framework.Framework.instruments`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from portakern.core.framework import Framework

__all__ = [
    "HOST_CLOCK",
    "ClockSample",
    "Instruments",
    "RecordedStopwatch",
    "Recorder",
    "Roof",
    "Run",
    "Stopwatch",
    "clocked",
    "host_us",
    "renewed",
    "replaced_clocks",
]

Run = Callable[[], Any]
"""A call without arguments; what it returns are the arrays that it made."""

HOST_CLOCKS = {
    name: getattr(time, name) for name in ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "sleep")
}
"""What the standard library tells the time by, as it was when this was imported."""


def replaced_clocks() -> list[str]:
    """The functions of the host's clock that somebody put others in place of."""
    return [f"time.{name}" for name, fn in HOST_CLOCKS.items() if getattr(time, name, None) is not fn]


def renewed(run: Run, count: int = 1) -> bool:
    """Outside of any clock, before a call: a run that has other arrays each time (its ``renew``) takes them, for as
    many calls; whether it is such a run."""
    if (renew := getattr(run, "renew", None)) is None:
        return False
    renew(count)
    return True


def clocked(run: Run) -> None:
    """At once after the clock of a call has stopped: a run that looks at its result (``clocked``) does."""
    if (look := getattr(run, "clocked", None)) is not None:
        look()


HOST_CLOCK = "host"
"""The name of the clock that a device's own takes the place of."""


HOST_BEYOND, DEVICE_BEYOND = 32.0, 1.25
"""Of :attr:`Instruments.beyond_roof`. Of 2,119 results of the H100 and H200 the fastest right call took 1 / 1.14 of
what
a copy at its best allowed: it only reads, and a copy also turns memory round to write."""


class ClockSample(NamedTuple):
    """One call, in microseconds: ``device_us`` of work on the device, ``host_us`` until the call returned; nan if the
    sample does not measure it."""

    device_us: float
    host_us: float


class Stopwatch:
    """Measures the time of a call that is repeated; this class uses the host's clock and waits for the results.

    Attributes:
      clock: what the times are read from. A stopwatch may find on the way that a call cannot be timed as others are,
        and then says so here.
    """

    clock = HOST_CLOCK

    def __init__(self, run: Run, wait: Callable[[Any], Any]) -> None:
        """``wait`` returns when the arrays that it is given are there."""
        self.run, self.wait = run, wait
        self._last_us = 0.0

    def sample(self) -> ClockSample:
        """Call once, with the device's caches as cold as the clock can make them. The host's are left as they are."""
        if renewed(self.run, 2) and self._last_us < WARMED_US:
            self.wait(self.run())  # on other values: what made those left the host's caches with its own work
        start = time.perf_counter()
        result = self.run()
        back = time.perf_counter()
        self.wait(result)
        sample = ClockSample(1e6 * (time.perf_counter() - start), 1e6 * (back - start))
        clocked(self.run)
        self._last_us = sample.device_us
        return sample


def host_us(run: Run, wait: Callable[[Any], Any]) -> float:
    """Microseconds until a call comes back, with nothing in front of it; its result is there, and gone, afterwards."""
    if renewed(run):
        wait(run())
    start = time.perf_counter()
    result = run()
    back = time.perf_counter()
    wait(result)
    clocked(run)
    return 1e6 * (back - start)


WARMED_US = 5_000.0
"""A call by the host's clock that takes longer is not made once more before it."""

HOSTED = 9
"""Samples in which a recorded call is made once more, for the host's time: a median of few is enough of what is not
compared."""


class Recorder(Protocol):
    """Records every kernel that any library of this process runs on a device.

    Attributes:
      name: the clock's, for times that are read from it.
    """

    name: str

    def record(self, run: Run) -> Sequence[tuple[str, float]] | None:
        """Name and microseconds of each kernel of a call that returns when its work is done, in their order; None
        where nothing is told, as while another tool records."""


class RecordedStopwatch(Stopwatch):
    """The sum of the recorded times of a call's kernels: one clock for all libraries. Where kernels of a call overlap
    (one that is launched before the last has ended counts what it waits), the time from the first's start to the last's
    end is less, and counts, if the library can measure it (:meth:`Instruments.span_clock`).

    It leaves out the gaps between kernels, about a microsecond each, and copies that are no kernels. Where the recorder
    tells nothing, the library's own clock takes its place, and ``clock`` says so. The host's time is that of a call
    that nobody records, which the first :data:`HOSTED` samples make beside the one that counts.
    """

    def __init__(self, run: Run, instruments: Instruments, recorder: Recorder) -> None:
        super().__init__(run, instruments.wait)
        self.instruments, self.recorder = instruments, recorder
        self.clock = recorder.name
        self._instead: Stopwatch | None = None
        self._span: Stopwatch | None = None
        self._hosted = 0

    def sample(self) -> ClockSample:
        if self._instead is None:
            self._hosted += 1
            on_host = host_us(self.run, self.wait) if self._hosted <= HOSTED else math.nan
            renewed(self.run)
            self.instruments.chill()
            found = self.recorder.record(lambda: self.wait(self.run()))
            clocked(self.run)
            if found is not None:
                return ClockSample(self._without_overlap(found), on_host)
            self._instead = self.instruments.own_clock(self.run)
        sample = self._instead.sample()
        self.clock = self._instead.clock
        return sample

    def _without_overlap(self, kernels: Sequence[tuple[str, float]]) -> float:
        total = sum(us for _, us in kernels)
        if len(kernels) > 1:
            self._span = self._span or self.instruments.span_clock(self.run)
        return total if self._span is None else min(total, self._span.sample().device_us)


class Roof(NamedTuple):
    """A call that is limited by a single resource of the device: its ``work`` divided by its time is the rate of the
    resource.

    ``unit``: bytes, each counted once when it is read and once when it is written; or flops.
    """

    run: Run
    work: float
    unit: str


class Instruments:
    """Measurements of calls on one device; this class uses what the host alone can measure."""

    def __init__(self, framework: Framework, device: Any) -> None:
        self.framework, self.device = framework, device

    @property
    def shared(self) -> bool:
        """Whether other processes can use the device while this one does."""
        return True

    def wait(self, result: Any) -> None:
        """Return when the arrays that a call returned are there; whatever went wrong on the device is raised here."""

    @property
    def beyond_roof(self) -> float:
        """Times what the measured roof allows, beyond which a time is not believed. A host's caches are left as they
        are, and the nearest gives some twenty times what memory gives."""
        return HOST_BEYOND if self.on_host else DEVICE_BEYOND

    @property
    def on_host(self) -> bool:
        """Whether the device is the host, by whose clock and with whose caches calls are timed."""
        return bool(self.framework.target(self.device).platform == "cpu")

    @property
    def recorder(self) -> Recorder | None:
        """What the library has to tell of every kernel of this process, its own or not; None where it has nothing."""
        return None

    def stopwatch(self, run: Run, recorder: Recorder | None) -> Stopwatch:
        """What times a call: by what tells of its kernels, which may be another library's; else by this library's own
        clock."""
        return RecordedStopwatch(run, self, recorder) if recorder else self.own_clock(run)

    def own_clock(self, run: Run) -> Stopwatch:
        """By the device's own clock where the library can read it."""
        return Stopwatch(run, self.wait)

    def span_clock(self, run: Run) -> Stopwatch | None:
        """What times a call from the start of its first kernel to the end of its last one; None where nothing does."""
        return None

    def replaced(self) -> list[str]:
        """The functions that times are read from in whose place somebody put others."""
        return replaced_clocks()

    def taken(self, array: Any, indices: Iterable[tuple[int, np.ndarray]]) -> Any:
        """Some of an array, an array of the library's where that lies: of each axis that is named the indices."""
        for axis, index in indices:
            array = array.take(index, axis)
        return array

    def chill(self) -> None:
        """Overwrite the device's caches, and return when that is done; a host's are left as they are."""

    def same(self, a: Any, b: Any) -> bool:
        """Whether two arrays hold equal values; NaN equals nothing."""
        return bool(np.array_equal(self.framework.to_numpy(a), self.framework.to_numpy(b)))

    def has_nan(self, array: Any) -> bool:
        """Whether any element is NaN."""
        return bool(np.isnan(self.framework.to_numpy(array)).any())

    def picked(self, array: Any, indices: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
        """Some of an array on the host: of each axis that is named the indices, one after another."""
        found = self.framework.to_numpy(array)
        for axis, index in indices:
            found = np.take(found, index, axis)
        return found

    def soil(self, shapes: Iterable[tuple[tuple[int, ...], str]]) -> None:
        """Leave NaN in memory that the library will hand out for new arrays of these shapes and dtypes, where it keeps
        memory: an element that a kernel does not write is then seen."""

    def put(self, array: Any, values: Any) -> None:
        """Write values to an array where it lies."""
        array[...] = values

    def release(self) -> None:
        """Give memory back to the device that the library keeps for later."""

    def peak_bytes(self, run: Run) -> int | None:
        """Memory that a call takes at its height beyond what was taken before, its results included; None where the
        library does not tell."""
        return None

    def kernels(self, run: Run) -> Sequence[tuple[str, float]] | None:
        """What the device ran in one call, begun with cold caches: the name of each launch and its microseconds, in
        their order; None where the library does not tell."""
        return None

    def roofs(self) -> Mapping[str, Roof]:
        """ "copy", which reads and writes memory, and by name of a precision a matrix product in it."""
        source = np.zeros(2**20, np.float32)
        target, a = np.empty_like(source), np.ones((128, 128), np.float32)
        return {
            "copy": Roof(lambda: np.copyto(target, source), 2 * source.nbytes, "bytes"),
            "float32": Roof(lambda: a @ a, 2 * 128**3, "flops"),
        }
