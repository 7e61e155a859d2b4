"""What bench times is what it verified: kernels that are fast because they do not do their work have no time."""

from __future__ import annotations

import threading
import time
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import portakern as pk
from portakern.core import registry
from portakern.core.framework import frameworks
from portakern.core.instruments import replaced_clocks
from portakern.tools.bench import contenders, fresh
from portakern.tools.bench.contenders import Contender, ready
from portakern.tools.bench.fresh import Fresh, turning
from portakern.tools.bench.inputs import for_gradient, make
from portakern.tools.bench.plan import BenchPlan
from portakern.tools.bench.roof import floor
from portakern.tools.bench.rows import impossible
from portakern.tools.bench.session import run
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.timing import Times
from portakern.tools.bench.trial import DeviceLost
from portakern.tools.bench.verdicts import Judge

CASE = TimedCase("mine", "softmax", "float32", {"shape": (64, 400)})


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return (e / e.sum(axis, keepdims=True)).astype(x.dtype)


def row(fn, framework="numpy", rounds=6, case=CASE, name="mine"):
    made = pk.Backend(name, framework=framework)
    made.implements("softmax")(lambda call, tiling: (fn(call.arrays["x"], call.options["axis"]),))
    outcome = run(BenchPlan([case], [pk.register(made)], [], "cpu", rounds=rounds), lambda found, case: None)
    return outcome.rows[0]


def replay():
    kept = []

    def fn(x, axis):
        if not kept:
            kept.append(softmax(x, axis))
        return kept[0].copy()

    return fn


def by_key(key):
    def made():
        kept = {}

        def fn(x, axis):
            if key(x) not in kept:
                kept[key(x)] = softmax(x, axis)
            return kept[key(x)].copy()

        return fn

    return made


def by_array():
    kept = []

    def fn(x, axis):
        for array, y in kept:
            if array is x:
                return y.copy()
        kept.append((x, softmax(x, axis)))
        return kept[-1][1].copy()

    return fn


def a_view_of_the_first():
    replayed = replay()
    kept = []

    def fn(x, axis):
        kept.append(replayed(x, axis)) if not kept else None
        return kept[0][:]

    return fn


def in_a_thread():
    calls = []

    def fn(x, axis):
        calls.append(1)
        y = np.empty_like(x)

        def work():
            time.sleep(0.0 if len(calls) == 1 else 0.005)
            y[...] = softmax(x, axis)

        worker = threading.Thread(target=work)
        worker.start()
        if len(calls) == 1:
            worker.join()
        else:
            y[...] = 0
        return y

    return fn


def over_its_inputs():
    calls = []

    def fn(x, axis):
        calls.append(1)
        if len(calls) == 1:
            return softmax(x, axis)
        y = np.full_like(x, 1.0 / x.shape[axis])
        x[...] = 0.0  # of which that is the softmax
        return y

    return fn


def sometimes():
    calls, replayed = [], replay()

    def fn(x, axis):
        calls.append(1)
        return softmax(x, axis) if len(calls) % 4 == 1 else replayed(x, axis)

    return fn


CHEATS = {
    "the last result again": replay,
    "results kept by address": by_key(lambda x: x.__array_interface__["data"][0]),
    "results kept by array": by_array,
    "results kept by shape": by_key(lambda x: x.shape),
    "a view of the first result": a_view_of_the_first,
    "work in a thread of its own": in_a_thread,
    "inputs made easy": over_its_inputs,
    "the first result three times of four": sometimes,
}


@pytest.mark.parametrize("name", CHEATS)
def test_who_does_not_do_its_work_while_it_is_timed_has_no_time(name):
    found = row(CHEATS[name]())
    assert found["verdict"] in ("wrong", "failed") and "median_us" not in found, found
    assert row(softmax, name="honest")["verdict"] == "right"


def test_results_kept_by_all_values_are_computed_anew_each_time():
    """No values come twice, so that such a kernel is as slow as it is."""
    computed, kept = [], {}

    def fn(x, axis):
        key = zlib.crc32(x.tobytes())
        if key not in kept:
            computed.append(1)
            kept[key] = softmax(x, axis)
        return kept[key].copy()

    found = row(fn)
    assert found["verdict"] == "right" and len(computed) >= 6 + 2 + 1, "each round, those before them, and the first"


def test_an_array_that_computes_when_it_is_read_is_none():
    class Lazy(np.ndarray):
        def __array_finalize__(self, of):
            pass

    assert (
        "y is a Lazy, which may compute its values when they are read"
        in row(lambda x, axis: softmax(x, axis).view(Lazy))["why"]
    )
    report = pk.check("softmax", fn=lambda x, axis=-1: softmax(x, axis).view(Lazy), max_examples=5, empty=False)
    assert not report.passed and any("expected a plain numpy array" in f.what for f in report.failures)


def test_a_tensor_that_computes_when_it_is_read_is_none():
    torch = pytest.importorskip("torch", reason="torch is not installed")

    class Lazy(torch.Tensor):
        """Of a form, without values: they are computed when somebody reads them."""

        @staticmethod
        def __new__(cls, x, axis):
            return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

        def __init__(self, x, axis):
            self.x, self.axis = x, axis

        @classmethod
        def __torch_dispatch__(cls, fn, types, args=(), kwargs=None):
            def read(a):
                return torch.softmax(a.x, a.axis) if isinstance(a, cls) else a

            return fn(*map(read, args), **{k: read(v) for k, v in (kwargs or {}).items()})

    found = row(Lazy, "torch")
    assert found["verdict"] in ("wrong", "failed") and "Lazy" in found["why"], found
    report = pk.check("softmax", fn=lambda x, axis=-1: Lazy(x, axis), framework="torch", max_examples=5)
    assert not report.passed and "Lazy" in report.failures[0].what


def test_a_clock_that_somebody_replaced_ends_the_run(monkeypatch):
    true, kept = time.perf_counter, []

    def fn(x, axis):
        if not kept:
            kept.append(monkeypatch.setattr(time, "perf_counter", lambda: true() * 1e-3))
        return softmax(x, axis)

    with pytest.raises(
        DeviceLost, match=r"code of one of mine.* replaced time\.perf_counter, with which times are measured"
    ):
        row(fn)
    monkeypatch.undo()
    assert replaced_clocks() == []


RATES = {"copy": 1e12, "bfloat16": 1e15, "float32": 5e13}


def call_of(op, dims, dtype="bfloat16", gradient=False, **more):
    inputs = make(TimedCase("mine", op, dtype, dims, **more), frameworks()["numpy"], "cpu")
    return (for_gradient(inputs, {}) if gradient else inputs).call


def test_what_is_faster_than_the_roof_is_an_error():
    call = call_of("softmax", {"shape": (256, 1024)})
    least = 1e6 * 2 * 2 * 256 * 1024 / 1e12
    assert floor(call, RATES) == pytest.approx(least)

    def of(us):
        return impossible(call, Times(us, us, us, us, 20, "events"), RATES, 1.25)

    assert of(least) is None and of(least / 1.24) is None
    assert "1.3 times as fast as the measured roof permits" in of(least / 1.3) and of(0.0)
    product = call_of("matmul", {"batch": (), "m": 64, "n": 64, "k": 64}, "float32")
    assert floor(product, RATES) == pytest.approx(1e6 * 3 * 4 * 64 * 64 / 1e12), "float32 may be products of bfloat16"
    assert floor(product, {"bfloat16": 1e10}) == pytest.approx(1e6 * 2 * 64**3 / 1e10)
    q = {"batch": 2, "q_len": 8, "kv_len": 512, "kv_heads": 2, "group": 1, "d": 16, "dv": 16}
    window = call_of("attention", q)
    assert floor(window, RATES) < 1e6 * sum(a.nbytes for a in window.arrays.values() if a is not None) / 1e12


def test_a_row_that_is_faster_than_the_roof_has_no_time(monkeypatch):
    monkeypatch.setattr("portakern.tools.bench.roof.measure", lambda *args: {"copy": 1e3})
    found = row(softmax)
    assert (found["verdict"], "median_us" in found) == ("failed", False) and "measured roof permits" in found["why"]


def test_documents_keep_their_places():
    """Queries and keys may change places where no mask is; then a tile would hold the first document and the last, and
    see all of the others, which a library that was told where documents end does not."""
    library = frameworks()["numpy"]
    library.load()
    dims = {"batch": 2, "kv_heads": 3, "group": 1, "q_len": 40, "kv_len": 40, "d": 8, "dv": 8}
    runs = dict.fromkeys(("q_segment_ids", "kv_segment_ids"), 10)
    inputs = make(TimedCase("mine", "attention", "float32", dims, given=tuple(runs), runs=runs), library, None)
    assert turning(inputs.call) == ("q_len", 0)
    assert turning(inputs.call, inputs.runs) == ("kv_heads", 0)
    entry = ready(Contender(registry.backend("reference"), None, True), inputs)
    assert Fresh(entry, tuple(entry.run()), Judge(inputs), {}).axis == ("kv_heads", 0)


@pytest.mark.parametrize(
    ("op", "dims", "gradient", "axis"),
    [
        ("softmax", {"shape": (6, 40)}, False, ("shape", 0)),
        ("softmax", {"shape": (1, 40)}, False, None),
        ("logsumexp", {"shape": (3, 6, 40)}, False, ("shape", 1)),
        ("matmul", {"batch": (2,), "m": 5, "n": 9, "k": 7}, False, ("n", 0)),
        ("rmsnorm", {"batch": (5,), "n": 40}, True, ("batch", 0)),
        ("linear", {"batch": (5,), "n": 40, "k": 30}, True, ("k", 0)),
        ("swiglu", {"batch": (5, 7)}, True, ("batch", 1)),
    ],
)
@pytest.mark.parametrize("framework", ["numpy", "jax"])
def test_values_that_change_places_give_the_results_in_other_places(op, dims, gradient, axis, framework, monkeypatch):
    """Of every array and output, for the oracle: what it gives of the new values, moved back, is what it gave."""
    library = frameworks()[framework]
    library.load()
    inputs = make(TimedCase("mine", op, "float32", dims), library, library.devices()[-1])
    if gradient:
        inputs = for_gradient(inputs, {})
    assert turning(inputs.call) == axis
    entry = ready(Contender(registry.backend("reference"), None, True), inputs)
    first = tuple(entry.run())
    timed = Fresh(entry, first, Judge(inputs), {})
    seen = []
    monkeypatch.setattr(timed.judge, "verdict", lambda *args: seen.append(1) or (_ for _ in ()).throw(AssertionError))
    monkeypatch.setattr(fresh, "ALWAYS", 0)
    monkeypatch.setattr(fresh, "ONE_IN", 10**9)
    for _ in range(3):
        timed.renew()
        given = {n: entry.framework.to_numpy(a).copy() for n, a in timed.made[0].items()} if axis else {}
        timed()
        if axis:
            assert any(not np.array_equal(given[n], inputs.buffers[n].view()) for n in given)
        outputs = dict(zip(entry.call.wants, timed.result, strict=True))
        back = dict(timed.moved(outputs, -timed.shifts[0])) if axis else outputs
        for got, want in zip(back.values(), first, strict=True):
            assert np.allclose(entry.framework.to_numpy(got), entry.framework.to_numpy(want), rtol=1e-5, atol=1e-6)
    timed.close()
    assert list(timed.served.arrays) == list(timed.base)
    assert all(timed.served.arrays[n] is array for n, array in timed.base.items())
    assert all(map(entry.instruments.same, entry.run(), first))


def test_a_call_that_a_variant_leaves_to_another_is_timed_under_that_ones_name_alone(monkeypatch):
    library = frameworks()["numpy"]
    library.load()
    inputs = make(TimedCase("mine", "softmax", "float32", {"shape": (3, 40)}), library, library.devices()[-1])
    real = contenders.pick

    def left_to_another(*args):
        route, tiling = real(*args)
        return replace(route, impl=replace(route.impl, family=SimpleNamespace(name="portable"))), tiling

    assert ready(Contender(registry.backend("reference"), "reference", True), inputs)
    monkeypatch.setattr(contenders, "pick", left_to_another)
    with pytest.raises(contenders.CallNotTaken, match="delegates this call to 'portable', which has its own row"):
        ready(Contender(registry.backend("reference"), "reference", True), inputs)
