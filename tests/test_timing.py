"""The clocks: what a stopwatch samples, and how samples of several calls are taken in turns."""

from __future__ import annotations

import functools
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from portakern.core.framework import frameworks
from portakern.core.instruments import HOSTED, ClockSample, Instruments, Stopwatch
from portakern.errors import UnavailableError
from portakern.frameworks.jax import timing as jax_timing
from portakern.frameworks.torch import timing as torch_timing
from portakern.tools.bench import contenders
from portakern.tools.bench.timing import WARM_UP, device_times, interleaved


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_a_cpu_is_timed_by_the_host(name):
    framework = frameworks()[name]
    framework.load()
    device = framework.devices()[-1]
    found = device_times({"a": lambda: time.sleep(0.002), "b": lambda: None}, framework, device, rounds=3)
    assert found["a"].clock == found["b"].clock == "host"
    assert found["a"].rounds == 3
    assert found["a"].best_us <= found["a"].median_us <= found["a"].worst_us
    assert found["a"].best_us >= 2000 > found["b"].median_us


def test_calls_take_turns_and_each_comes_first():
    order = []

    class Watch(Stopwatch):
        def sample(self):
            order.append(self.run)
            return ClockSample(float(len(order)), 1.0)

    found = interleaved({n: Watch(n, None) for n in "abc"}, rounds=3)
    assert {tuple(sorted(order[i : i + 3])) for i in range(0, len(order), 3)} == {("a", "b", "c")}
    assert {order[i] for i in range(6, len(order), 3)} == {"a", "b", "c"}
    assert all(t.rounds == 3 and t.best_us > 6 for t in found.values())  # those before the first do not count


class Device:
    """Stands for ``torch.cuda``: a device that sleeps, and a host that takes its time. Times are in microseconds."""

    def __init__(self, host_us, waits=False):
        self.now = self.busy_until = 0.0
        self.host_us, self.waits = host_us, waits
        self.slept = []
        self.elsewhere_until = 0.0  # of another stream

    def module(self):
        outer = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = outer.busy_until = max(outer.busy_until, outer.now)

            def query(self):
                return self.at <= outer.now

            def synchronize(self):
                outer.now = max(outer.now, self.at)

            def elapsed_time(self, end):
                return 1e-3 * (end.at - self.at)

        def sleep(cycles):
            outer.slept.append(cycles / torch_timing.CYCLES_PER_US)
            outer.busy_until = max(outer.busy_until, outer.now) + outer.slept[-1]

        def device(which):
            import contextlib

            return contextlib.nullcontext()

        def synchronize(which):
            outer.now = max(outer.now, outer.busy_until, outer.elsewhere_until)

        return SimpleNamespace(cuda=SimpleNamespace(Event=Event, _sleep=sleep, device=device, synchronize=synchronize))

    def run(self):
        """Two kernels of 5 us, between which the host takes its time."""
        self.busy_until = max(self.busy_until, self.now) + 5
        self.now = max(self.now, self.busy_until) if self.waits else self.now
        self.now += self.host_us
        self.busy_until = max(self.busy_until, self.now) + 5


@pytest.fixture
def queued(monkeypatch):
    def made(device):
        filler = SimpleNamespace(zero_=lambda: None)
        monkeypatch.setattr(torch_timing, "_cache_filler", lambda which: filler)
        monkeypatch.setattr(torch_timing.time, "perf_counter", lambda: 1e-6 * device.now)
        monkeypatch.setitem(sys.modules, "torch", device.module())
        return torch_timing.QueuedEvents(device.run, "cuda:0")

    return made


@pytest.mark.parametrize("host_us", [1, 300, 4000])
def test_a_late_host_does_not_show(queued, host_us):
    device = Device(host_us)
    watch = queued(device)
    sample = watch.sample()
    assert sample.device_us == pytest.approx(10)  # two kernels, back to back
    assert sample.host_us == pytest.approx(host_us)
    assert watch.clock == "events"
    before = len(device.slept)
    watch.sample()
    assert len(device.slept) == before + 1  # what one sample learnt of the sleep serves the next


def test_a_call_that_waits_for_the_device_is_timed_with_its_waits_and_says_so(queued):
    device = Device(100, waits=True)
    watch = queued(device)
    sample = watch.sample()
    assert watch.clock == "events, with waits of the host"
    assert sample.device_us == pytest.approx(110)
    assert max(device.slept) <= torch_timing.LONGEST_US


@pytest.mark.parametrize(("elsewhere_us", "told"), [(0, False), (900, True)])
def test_work_on_another_stream_is_no_work_that_nobody_pays_for(queued, elsewhere_us, told):
    """The last event of a call's own stream passes while the device is at it still."""
    device = Device(3)
    watch = queued(device)

    def run():
        device.run()
        device.elsewhere_until = device.busy_until + elsewhere_us

    watch.run = run
    if not told:
        assert [watch.sample().device_us for _ in range(9)] == pytest.approx([10] * 9)
        return
    with pytest.raises(RuntimeError, match="its work went on for 900 us after the last that it gave the stream"):
        for _ in range(9):
            watch.sample()


class Queue:
    """Stands for JAX on an accelerator: calls take the host and the device their time, the device's in order."""

    def __init__(self, host_us, device_us):
        self.now = self.busy_until = 0.0
        self.host_us, self.device_us = host_us, device_us

    def call(self, device_us):
        self.now += self.host_us
        self.busy_until = max(self.busy_until, self.now) + device_us

    def block(self, results):
        self.now = max(self.now, self.busy_until)


@pytest.mark.parametrize(("host_us", "clock"), [(20, "queue"), (400, "queue, with waits for the host")])
def test_jax_is_timed_by_a_queue(monkeypatch, host_us, clock):
    """170 us to overwrite the cache, 12 us for the call: alone the call would show the host."""
    jax = frameworks()["jax"].load()
    queue = Queue(host_us, 12)
    monkeypatch.setattr(jax_timing, "_fill", lambda device: lambda: queue.call(170))
    monkeypatch.setattr(jax_timing.time, "perf_counter", lambda: 1e-6 * queue.now)
    monkeypatch.setattr(jax, "block_until_ready", queue.block)
    watch = jax_timing.Queued(lambda: queue.call(queue.device_us), "a device")
    sample = watch.sample()
    assert watch.clock == clock
    assert sample.host_us == pytest.approx(host_us)
    if clock == "queue":
        assert sample.device_us == pytest.approx(12, abs=host_us / 8 + 0.1)  # the first call of a queue waits


def test_a_long_call_is_timed_by_a_shorter_queue(monkeypatch):
    jax = frameworks()["jax"].load()
    queue, calls = Queue(20, 15_000), []
    monkeypatch.setattr(jax_timing, "_fill", lambda device: lambda: queue.call(170))
    monkeypatch.setattr(jax_timing.time, "perf_counter", lambda: 1e-6 * queue.now)
    monkeypatch.setattr(jax, "block_until_ready", queue.block)
    watch = jax_timing.Queued(lambda: calls.append(queue.call(queue.device_us)), "a device")
    for _ in range(2):
        assert watch.sample().device_us == pytest.approx(15_000, abs=20)
    assert len(calls) == jax_timing.QUEUED + 1 + 1 + 1  # and one of each sample for the host's time


def test_the_cache_is_overwritten_where_the_arrays_are(monkeypatch):
    jax = frameworks()["jax"].load()
    device = jax.local_devices(backend="cpu")[0]
    monkeypatch.setattr(jax_timing, "FILLER", 2**10)
    jax_timing._fill.cache_clear()
    written = jax_timing._fill(device)()
    jax_timing._fill.cache_clear()
    assert written.device == device and written.nbytes == 2**10 and bool((written == 1).all())
    watch = jax_timing.Queued(lambda: time.sleep(0.001), device)
    watch.sample()  # in which it is compiled
    assert 500 < watch.sample().device_us < 50_000
    jax_timing._fill.cache_clear()


class Profiler:
    """Stands for JAX's binding of CUPTI."""

    def __init__(self, kernels, taken=False):
        self.kernels, self.taken, self.on, self.recorded = kernels, taken, False, []

    def _cupti_init(self):
        if self.taken:
            raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")
        self.on = True

    def _cupti_get_timings(self, finalize):
        assert self.on and not finalize
        self.on = False
        return self.kernels


class Host(Instruments):
    """Instruments whose own clock is the host's, and that tell when the caches were overwritten."""

    def __init__(self, seen, recorder=None):
        super().__init__(None, None)
        self.seen, self.given = seen, recorder

    @property
    def recorder(self):
        return self.given

    def chill(self):
        self.seen.append("cold")


@pytest.fixture
def on_a_cpu(monkeypatch):
    jax = frameworks()["jax"].load()
    monkeypatch.setattr(jax_timing, "FILLER", 2**10)
    jax_timing._fill.cache_clear()
    yield jax.local_devices(backend="cpu")[0]
    jax_timing._fill.cache_clear()


def test_a_recorder_sums_the_kernels_of_a_call():
    profiler = Profiler([("a", 0.010), ("b", 0.002)])
    watch = Host(profiler.recorded).stopwatch(lambda: profiler.recorded.append(profiler.on), jax_timing.Cupti(profiler))
    assert watch.sample().device_us == pytest.approx(12)
    assert watch.clock == "cupti" and not profiler.on
    assert profiler.recorded == [False, "cold", True]  # the host's time is that of a call that nobody records


@pytest.mark.parametrize(("kernels", "found"), [([("a", 0.010), ("b", 0.009)], 11), ([("a", 0.004), ("b", 0.002)], 6),
                                               ([("a", 0.015)], 15)])  # fmt: skip
def test_kernels_that_overlap_are_not_counted_twice(kernels, found):
    """The second of two counts what it waits for the first."""

    class Spans(Stopwatch):
        def sample(self):
            return ClockSample(11.0, 1.0)

    class OnDevice(Host):
        def span_clock(self, run):
            return Spans(run, self.wait)

    watch = OnDevice([]).stopwatch(lambda: 0, jax_timing.Cupti(Profiler(kernels)))
    assert watch.sample().device_us == pytest.approx(found) and watch.clock == "cupti"


def test_the_hosts_time_of_a_recorded_call_is_that_of_few_samples():
    """It costs a call more, and is not what is compared."""
    profiler, calls = Profiler([("a", 0.010)]), []
    watch = Host([]).stopwatch(lambda: calls.append(profiler.on), jax_timing.Cupti(profiler))
    found = interleaved({"call": watch}, rounds=20)["call"]
    assert found.host_us > 0 and found.rounds == 20 and found.median_us == pytest.approx(10)
    assert calls.count(True) == 20 + WARM_UP and calls.count(False) == HOSTED > WARM_UP


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_one_library_tells_of_anothers_calls(name, monkeypatch):
    """So that what both take is compared by one clock."""
    profiler = Profiler([("a", 0.010)])
    of = frameworks()[name].instruments(frameworks()[name].load() and frameworks()[name].devices()[-1])
    watch = of.stopwatch(lambda: 0, jax_timing.Cupti(profiler))
    assert watch.sample().device_us == pytest.approx(10) and watch.clock == "cupti"
    assert of.recorder is None and of.stopwatch(lambda: 0, None).clock == "host"


def test_cupti_names_the_kernels_of_a_call_that_was_compiled(monkeypatch):
    profiler = Profiler([("a", 0.010), ("b", 0.002)])
    monkeypatch.setattr(jax_timing, "_binding", lambda: profiler)
    monkeypatch.setattr(jax_timing, "_fill", functools.cache(lambda platform: lambda: 0))
    of = jax_timing.JaxInstruments(frameworks()["jax"], type("Gpu", (), {"platform": "gpu"}))
    assert of.kernels(lambda: profiler.recorded.append(profiler.on)) == [("a", 10.0), ("b", 2.0)]
    assert profiler.recorded == [False, True]


@pytest.mark.parametrize("profiler", [Profiler([]), Profiler([("a", 1.0)], taken=True)])
def test_without_a_record_the_librarys_own_clock_is_asked_and_named(profiler, on_a_cpu, monkeypatch):
    of = jax_timing.JaxInstruments(frameworks()["jax"], on_a_cpu)
    monkeypatch.setattr(of, "own_clock", lambda run: jax_timing.Queued(run, on_a_cpu))
    watch = of.stopwatch(lambda: time.sleep(0.001), jax_timing.Cupti(profiler))
    watch.sample()  # in which what overwrites is compiled
    assert watch.sample().device_us > 500
    assert watch.clock.startswith("queue")


def test_a_run_has_the_clock_of_whoever_tells_of_all_kernels(monkeypatch):
    """Asked of every backend that takes part, of the peers too, but for those that are not here."""
    cupti = jax_timing.Cupti(Profiler([]))
    places = {"a": Host([]), "b": Host([], cupti)}

    def here(b, device):
        if b not in places:
            raise UnavailableError(f"{b} is not installed")
        return SimpleNamespace(instruments=lambda d: places[b]), device, None

    monkeypatch.setattr(contenders, "here", here)
    assert contenders.one_clock(["missing", "a", "b"], None) is cupti
    assert contenders.one_clock(["a", "missing"], None) is None


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_instruments_of_a_cpu(name):
    """What a benchmark asks of arrays, and a roof that can be timed."""
    framework = frameworks()[name]
    library = framework.load()
    device = framework.devices()[-1]
    of = framework.instruments(device)
    a, b, odd = (framework.from_numpy(np.array(v, np.float32), device) for v in ([1, 2], [1, 3], [1, np.nan]))
    assert of.same(a, a) and not of.same(a, b)
    assert of.has_nan(odd) and not of.has_nan(a)
    of.soil([((3, 4), "float32"), ((2,), "int32")])
    of.release()
    assert of.peak_bytes(lambda: a + b) is None  # no CPU's allocator tells
    assert of.kernels(lambda: a + b) is None
    if not framework.immutable:
        of.put(b, a)
        assert of.same(a, b)
    roofs = of.roofs()
    assert {"copy", "float32"} <= set(roofs) and roofs["copy"].unit == "bytes" and library is not None
    for roof in roofs.values():
        of.wait(roof.run())
        assert roof.work > 0 and roof.unit in ("bytes", "flops")


def test_torch_multiplies_as_it_is_told_and_no_longer():
    torch = frameworks()["torch"].load()
    before = torch.get_float32_matmul_precision()
    with torch_timing.multiplied("high"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_nothing_compiles_ahead_beside_a_process_that_holds_a_tpu():
    jax = frameworks()["jax"]
    for platform, shared in (("tpu", False), ("gpu", True), ("cpu", True)):
        assert jax.instruments(SimpleNamespace(platform=platform)).shared is shared
