"""What is measured of calls on PyTorch's tensors. Time is that between two events on the stream, behind a kernel that
keeps the device busy meanwhile."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from portakern.core.instruments import ClockSample, Instruments, Roof, Run, Stopwatch, clocked, renewed

__all__ = ["QueuedEvents", "TorchInstruments"]

CYCLES_PER_US = 2000
"""Of the fastest clock that a chip may run at: at a slower one the device sleeps longer, which harms nothing."""

MARGIN_US = 30.0
LONGEST_US = 50_000.0
"""No call is slept for longer; one whose launches take the host more than this is one that waits for the device."""

SEEN, LEFT_US, LEFT = 5, 200.0, 0.25
"""A call left work on another stream if, of so many samples or more, the device was busy in the median for so many
microseconds after the call's last event, and for this share of its time. Waiting for an idle device takes some 10."""

CACHES = 4
"""How many times the size of the L2 cache is written to before each call."""


ROOF_BYTES = 2**30
ROOF_EXTENT = 8192
"""Of the copy and of the products that are the roof: large enough that nothing else counts."""

SMALL = 2**20, 128
"""The same where the host is the device."""


class TorchInstruments(Instruments):
    """Of tensors on a GPU or a CPU."""

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    def wait(self, result: Any) -> None:
        if self.on_gpu:
            import torch

            torch.cuda.synchronize(self.device)

    def replaced(self) -> list[str]:
        import torch

        found = super().replaced()
        if self.on_gpu:
            events, cuda = torch.cuda.Event, torch.cuda
            theirs = {
                "torch.cuda.Event": events, "torch.cuda.synchronize": cuda.synchronize,
                "torch.cuda._sleep": cuda._sleep,
                **{f"torch.cuda.Event.{n}": getattr(events, n) for n in ("record", "query", "synchronize",
                "elapsed_time")},
            }  # fmt: skip
            found += [name for name, fn in theirs.items() if not _of_torch(fn)]
        return found

    def own_clock(self, run: Run) -> Stopwatch:
        return QueuedEvents(run, self.device) if self.on_gpu else super().own_clock(run)

    def span_clock(self, run: Run) -> Stopwatch | None:
        return QueuedEvents(run, self.device) if self.on_gpu else None

    def chill(self) -> None:
        if self.on_gpu:
            _cache_filler(self.device).zero_()
            self.wait(None)

    def same(self, a: Any, b: Any) -> bool:
        import torch

        if a.dtype.itemsize == 1:  # floats of 8 bits have next to no operations
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        return a.dtype == b.dtype and torch.equal(a, b)

    def has_nan(self, array: Any) -> bool:
        return bool((array.float() if array.dtype.itemsize == 1 else array).isnan().any())

    def picked(self, array: Any, indices: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
        """Picked on the device: to copy all of a large array to the host takes longer than the call that made it."""
        return self.framework.to_numpy(self.taken(array, indices))

    def taken(self, array: Any, indices: Iterable[tuple[int, np.ndarray]]) -> Any:
        import torch

        bits = array.view(torch.uint8) if array.dtype.itemsize == 1 else array
        for axis, index in indices:
            bits = bits.index_select(axis, torch.from_numpy(index).to(bits.device))
        return bits.view(array.dtype)

    def soil(self, shapes: Iterable[tuple[tuple[int, ...], str]]) -> None:
        """PyTorch's allocator hands the last freed block of a size out first."""
        import torch

        kinds = [(shape, getattr(torch, dtype)) for shape, dtype in shapes]
        for _ in range(2):  # a kernel's scratch memory may take the first
            held = [torch.full(s, torch.nan, dtype=d, device=self.device) for s, d in kinds if d.is_floating_point]
        del held

    def put(self, array: Any, values: Any) -> None:
        array.copy_(values)

    def release(self) -> None:
        if self.on_gpu:
            import torch

            torch.cuda.empty_cache()

    def peak_bytes(self, run: Run) -> int | None:
        if not self.on_gpu:
            return None
        import torch

        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = run()
        torch.cuda.synchronize(self.device)
        del result
        return int(torch.cuda.max_memory_allocated(self.device)) - before

    def kernels(self, run: Run) -> Sequence[tuple[str, float]] | None:
        """As PyTorch's profiler, which asks the maker's library (CUPTI, ROCTracer), has them."""
        if not self.on_gpu:
            return None
        import torch
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        run()
        self.chill()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            run()
            torch.cuda.synchronize(self.device)
        # a range of the host's code, such as an op's own, stands on the device too, with the time of what it launched
        launches = [e for e in recorded.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        ordered = sorted(launches, key=lambda e: e.time_range.start)
        return [(e.name, float(e.time_range.elapsed_us())) for e in ordered] or None

    def roofs(self) -> Mapping[str, Roof]:
        import torch

        size, n = (ROOF_BYTES, ROOF_EXTENT) if self.on_gpu else SMALL
        source = torch.ones(size, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        found = {"copy": Roof(lambda: target.copy_(source), 2.0 * size, "bytes")}
        wide = torch.randn(n, n, device=self.device)
        for name in ("bfloat16", "float16"):
            narrow = wide.to(getattr(torch, name))
            found[name] = Roof(functools.partial(torch.matmul, narrow, narrow), 2.0 * n**3, "flops")
        for name, precision in (("tf32", "high"), ("float32", "highest")):
            found[name] = Roof(functools.partial(_product, wide, precision), 2.0 * n**3, "flops")
        return found


def _of_torch(fn: Any) -> bool:
    """Whether a function or class is PyTorch's own: its text lies in PyTorch's files, or it has none."""
    import torch

    code, home = getattr(fn, "__code__", None), str(Path(torch.__file__).parent)
    if code is not None:
        return str(code.co_filename).startswith(home)
    return str(getattr(fn, "__module__", None) or "torch").partition(".")[0] == "torch"


def _product(a: Any, precision: str) -> Any:
    """A product of float32 matrices as precise as PyTorch's word says."""
    import torch

    with multiplied(precision):
        return torch.matmul(a, a)


@contextmanager
def multiplied(precision: str) -> Iterator[None]:
    """While inside, PyTorch multiplies float32 matrices as ``torch.set_float32_matmul_precision`` says."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
        self.left_us: list[float] = []
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(self) -> ClockSample:
        while True:
            found, late = self._once()
            if not late or self.clock != QueuedEvents.clock:
                return found
            longer = 2 * max(found.host_us, self.sleep_us) + MARGIN_US
            if longer > LONGEST_US:
                self.clock = "events, with waits of the host"
            else:
                self.sleep_us = longer

    def _once(self) -> tuple[ClockSample, bool]:
        """A sample, and whether the device may have waited for the host in it."""
        torch = self.torch
        renewed(self.run)
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
            begin = time.perf_counter()
            torch.cuda.synchronize(self.device)
            self.left_us.append(1e6 * (time.perf_counter() - begin))
            clocked(self.run)
            sample = ClockSample(1e3 * self.start.elapsed_time(self.end), host_us)
        if len(self.left_us) >= SEEN and statistics.median(self.left_us) > max(LEFT_US, LEFT * sample.device_us):
            raise RuntimeError(
                f"its work went on for {statistics.median(self.left_us):.0f} us after the last that it gave the stream "
                "on which it was called: work on another stream is to be waited for there"
            )
        return sample, late


@functools.lru_cache(maxsize=1)
def _cache_filler(device: Any) -> Any:
    """Memory that is larger than the L2 cache."""
    import torch

    size = torch.cuda.get_device_properties(device).L2_cache_size or 2**26
    return torch.empty(CACHES * size, dtype=torch.int8, device=device)
