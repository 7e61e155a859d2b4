"""`portakern bench`: nothing has a time that was not found right, suites are data that binds, and a run keeps what it
has."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import portakern as pk
from portakern import results, sources
from portakern.cli import app
from portakern.cli import bench as command
from portakern.cli.bench import _parts
from portakern.core import registry
from portakern.core.framework import frameworks, host_framework
from portakern.core.instruments import Instruments, Stopwatch
from portakern.core.targets import HOST, Target
from portakern.errors import SpecError
from portakern.processes import pool
from portakern.specs.attention.scores import allowed, allowed_pairs
from portakern.tools.bench import suites
from portakern.tools.bench import trial as of_case
from portakern.tools.bench.background import ENVIRONMENT, WORKERS, Background, WarmUp, references, warm_up
from portakern.tools.bench.contenders import by_platform
from portakern.tools.bench.inputs import for_gradient, make
from portakern.tools.bench.lock import DeviceLock
from portakern.tools.bench.plan import BenchPlan
from portakern.tools.bench.pruning import Pruned
from portakern.tools.bench.resuming import Earlier
from portakern.tools.bench.roof import ceiling, moved
from portakern.tools.bench.rows import describe, held_against
from portakern.tools.bench.session import Helped, run
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.timing import CallFailed, interleaved
from portakern.tools.bench.trial import DeviceLost, Trial, Visit, visit
from portakern.tools.bench.verdicts import Judge
from portakern.tools.bench.workers import BenchWorker, Here, workers
from portakern.tools.compile.abstract import abstract_call, bind_signature

ROOT = Path(__file__).resolve().parents[1]
CASE = TimedCase("mine", "softmax", "float32", {"shape": (6, 40)})


def numpy_softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return (e / e.sum(axis, keepdims=True)).astype(x.dtype)


def backend(name, fn, peer=False, **kwargs):
    """A backend in NumPy whose softmax is ``fn(x, axis)``."""
    made = pk.Backend(name, framework="numpy", peer=peer, **kwargs)
    made.implements("softmax")(lambda call, tiling: (fn(call.arrays["x"], call.options["axis"]),))
    return pk.register(made)


def timed(subject, *against, case=CASE):
    outcome = run(BenchPlan([case], [subject], against, "cpu", rounds=2), lambda found, case: None)
    return {r["contender"]: r for r in outcome.rows}


def test_a_wrong_kernel_is_listed_as_wrong_and_has_no_time():
    """However fast: what leaves out one element of a row is off by more than the bound."""
    wrong = backend("fast", lambda x, axis: numpy_softmax(x, axis) * np.float32(1 + 1e-4))
    rows = timed(wrong, backend("right", numpy_softmax, peer=True))
    assert rows["fast"]["verdict"] == "wrong" and rows["fast"]["error"] > 5
    assert not {"median_us", "ratio", "host_us", "share"} & set(rows["fast"])
    assert rows["fast"]["why"] == "240 of 240 elements of y that were compared are out of bounds"
    assert rows["right"]["verdict"] == "right" and rows["right"]["median_us"] > 0


def test_only_a_right_peer_is_held_against():
    """The wrong one is faster, and counts for nothing."""
    slow = backend("slow", lambda x, axis: time.sleep(0.01) or numpy_softmax(x, axis), peer=True)
    wrong = backend("wrong", lambda x, axis: x + 1, peer=True)
    rows = timed(backend("mine", numpy_softmax), slow, wrong)
    assert rows["mine"]["best_peer"] == "slow" and rows["mine"]["ratio"] > 2 and rows["slow"]["ratio"] == 1
    assert rows["wrong"]["verdict"] == "wrong" and "ratio" not in rows["wrong"]
    alone = timed(registry.backend("mine"), wrong)
    assert "ratio" not in alone["mine"] and alone["mine"]["median_us"]


def test_an_interpreters_time_is_held_against_nothing():
    times = {"median_us": 5.0, "verdict": "right"}
    mine = {**times, "subject": True, "interpreted": True, "contender": "mine"}
    theirs = {**times, "subject": False, "contender": "theirs"}
    assert all("ratio" not in r for r in held_against([mine, {**theirs, "interpreted": True}]))
    ours, peer = held_against([mine, theirs])
    assert "ratio" not in ours and peer["ratio"] == 1
    pytest.importorskip("triton", reason="triton is not installed")
    triton = registry.backend("triton")
    rows = run(BenchPlan([CASE], [triton], [], "cpu", rounds=2), lambda found, case: None).rows
    assert all(r["interpreted"] for r in rows if r["backend"] == "triton")
    words = _parts(next(r for r in rows if r["backend"] == "triton"))
    assert "time of the interpreter, not of a device" in words and not any("roof" in w for w in words)


def test_backends_that_are_measured_together_are_no_peers_of_each_other():
    """Peers are timed once beside both, and a slow peer is the best one though the other backend is faster."""
    slow = backend("slow", lambda x, axis: time.sleep(0.01) or numpy_softmax(x, axis), peer=True)
    both = [backend("mine", numpy_softmax), backend("another", numpy_softmax)]
    rows = run(BenchPlan([CASE], both, [slow], "cpu", rounds=2), lambda found, case: None).rows
    assert [(r["contender"], r["subject"]) for r in rows] == [("mine", True), ("another", True), ("slow", False)]
    assert {r["best_peer"] for r in rows} == {"slow"} and all(r["first_s"] >= 0 for r in rows)


def test_the_backend_of_most_ops_makes_the_calls(monkeypatch):
    more = backend("more", numpy_softmax)
    more.implements("layernorm")(lambda call, tiling: ())
    assert by_platform([backend("mine", numpy_softmax), more], "cpu") == [[more, registry.backend("mine")]]
    monkeypatch.setattr("portakern.tools.bench.contenders._ops", None)  # which loads every spec
    assert by_platform([more], "cpu") == [[more]]


def in_place(x, axis):
    x *= 2
    return numpy_softmax(x / 2, axis)


def unwritten(x, axis):
    y = numpy_softmax(x, axis)
    y[-1, -1] = np.nan
    return y


class Later:
    """Right when it is first called, and wrong from the third call on: a tuner that writes over results, say."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, axis):
        self.calls += 1
        return numpy_softmax(x, axis) * np.float32(1 if self.calls < 3 else 1.01)


def failing(x, axis):
    raise ZeroDivisionError("no tiles\nleft")


def refusing(x, axis):
    raise pk.UnsupportedError("softmax: backend 'fn' cannot: it takes no rows of 40")


@pytest.mark.parametrize(
    ("fn", "verdict", "why"),
    [
        (in_place, "wrong", "the input x was written to"),
        (unwritten, "wrong", "y holds NaN, and no input does"),
        (Later(), "wrong", "right before it was timed, wrong on other values during timing: 240 of 240 elements of y"),
        (failing, "failed", "ZeroDivisionError: no tiles"),
        (lambda x, axis: numpy_softmax(x, axis).astype(np.float16), "failed", "float16"),
    ],
    ids=["in_place", "unwritten", "later", "failing", "narrow"],
)
def test_what_else_is_wrong_with_a_contender(fn, verdict, why):
    """And nobody else is the worse for it."""
    rows = timed(backend("mine", fn), backend("right", numpy_softmax, peer=True))
    assert rows["mine"]["verdict"] == verdict and why in rows["mine"]["why"]
    assert "median_us" not in rows["mine"] and rows["right"]["verdict"] == "right"


def test_who_refuses_is_listed_with_its_reason():
    picky = pk.Backend("picky", framework="numpy", peer=True)
    picky.implements("softmax", supports=lambda call, tiling: "it takes no rows of 40")(lambda call, tiling: ())
    rows = timed(backend("mine", numpy_softmax), pk.register(picky))
    assert (rows["picky"]["verdict"], rows["picky"]["why"]) == ("refused", "it takes no rows of 40")


def test_a_call_that_takes_long_has_fewer_samples():
    """A suite says so; a plan of fewer still has its own, and such a row is not timed again for having few."""
    plan = BenchPlan([case := replace(CASE, rounds=3)], [backend("mine", numpy_softmax)], [], "cpu")
    outcome = run(plan, lambda found, case: None)
    assert [r["rounds"] for r in outcome.rows] == [3] and plan.rounds_of(CASE) == plan.rounds
    assert replace(plan, rounds=2).rounds_of(case) == 2
    earlier = Earlier({Earlier()._key(plan, case): outcome.rows})
    assert earlier.left(plan)[0].cases == [] and earlier.left(replace(plan, cases=[CASE]))[0].cases == [CASE]
    assert any(c.rounds for c in suites.cases_of("long_context"))


def test_a_call_that_fails_while_it_is_timed_leaves_the_others_their_times():
    class Dies:
        def __init__(self):
            self.calls = 0

        def __call__(self, x, axis):
            self.calls += 1
            if self.calls == 3:
                raise MemoryError("nothing is left")
            return numpy_softmax(x, axis)

    rows = timed(backend("mine", numpy_softmax), backend("dies", Dies(), peer=True))
    assert (rows["dies"]["verdict"], rows["dies"]["why"]) == ("failed", "MemoryError: nothing is left")
    assert rows["mine"]["rounds"] == 2
    with pytest.raises(CallFailed, match="b failed while it was timed"):
        interleaved({"a": Stopwatch(lambda: 1, lambda r: None), "b": Stopwatch(lambda: 1 / 0, lambda r: None)})


def test_large_calls_are_judged_in_part():
    """One element in a million is not always met; a block that was never computed is, wherever it lies."""
    case = TimedCase("mine", "softmax", "float32", {"shape": (1024, 512)})

    def hole(x, axis):
        y = numpy_softmax(x, axis)
        y[256:512] = 0
        return y

    rows = timed(backend("mine", hole), backend("right", numpy_softmax, peer=True), case=case)
    assert rows["mine"]["verdict"] == "wrong" and rows["right"]["verdict"] == "right"


def test_of_a_large_sum_some_is_compared(monkeypatch):
    """Which the oracle has to compute whole; what is wrong where it was looked at is seen."""
    case = TimedCase("mine", "linear", "float32", {"batch": (5,), "n": 40, "k": 30}, gradient=True)
    library = frameworks()["numpy"]
    inputs = for_gradient(make(case, library, "cpu"), {})
    whole = {e.name: e for e in Judge(inputs).expect(Target("cpu"), False)}
    monkeypatch.setattr("portakern.tools.bench.verdicts.MOST", 300)
    some = Judge(inputs)
    part = {e.name: e for e in some.expect(Target("cpu"), False)}
    (rows,) = part["d_weight"].chosen["n"]
    assert len(rows) == 10 and {0, 39} <= {*rows} and part["d_x"].chosen == whole["d_x"].chosen == {}
    assert np.array_equal(part["d_weight"].exact, whole["d_weight"].exact[rows])
    x, weight, d_y = (inputs.buffers[n].view() for n in ("x", "weight", "d_y"))
    d_x, d_weight = d_y @ weight, d_y.T @ x
    assert some.verdict(library, (d_x, d_weight), Target("cpu"), False).right
    d_weight[rows[3]] += 1
    wrong = some.verdict(library, (d_x, d_weight), Target("cpu"), False)
    assert not wrong.right and "30 of 300 elements of d_weight" in wrong.why


def test_gradients_are_timed_on_what_a_right_forward_op_saved():
    case = TimedCase("mine", "softmax", "float32", {"shape": (6, 40)}, gradient=True)
    triton = registry.backend("triton")
    if triton.unavailable():
        pytest.skip(triton.unavailable())
    rows = timed(triton, registry.backend("torch"), case=case)
    assert rows["triton"]["op"] == "softmax_vjp" and {r["verdict"] for r in rows.values()} == {"right"}
    wrong = backend("wrong", lambda x, axis: x + 1)
    outcome = run(BenchPlan([case], [wrong], [], "cpu", rounds=2), lambda found, case: None)
    assert not outcome.rows
    assert "softmax, which its gradient reads, is wrong: 240 of 240" in outcome.unserved[0][1]


def test_what_other_processes_expect_is_what_this_one_would(tmp_path):
    """A sum over rows cannot be compared in part: it is computed whole, and elsewhere."""
    dims = {"batch": (700,), "n": 512}
    sums = TimedCase("mine", "layernorm", "float32", dims, given=("weight", "bias"), gradient=True)
    saves = TimedCase("mine", "softmax", "float32", {"shape": (6, 40)}, gradient=True)
    library, target = frameworks()["numpy"], Target("cuda", "sm_90")
    inputs = for_gradient(make(sums, library, "cpu"), {})
    with references([sums, saves], target, 1) as expected:
        assert len(expected._futures) == 1  # what softmax saves is known on the device alone
        wait(expected._futures.values())
        ahead = Judge(inputs, known={(target, False): expected.take(sums)})
        assert ahead.known[target, False] and expected.take(saves) is expected.take(sums) is None
    for a, b in zip(ahead.expect(target, False), Judge(inputs).expect(target, False), strict=True):
        assert a.name == b.name and np.array_equal(a.exact, b.exact) and np.array_equal(a.bound, b.bound)
    assert {e.name: e.exact.shape for e in ahead.expect(target, False)}["d_weight"] == (512,)


def test_what_gradients_are_is_computed_where_their_inputs_are_made(monkeypatch):
    """Whoever visits gradients of what a forward op saved computes what is expected of them, and who times them takes
    that over if it saved the same."""
    case = TimedCase("mine", "softmax", "float32", {"shape": (6, 40)}, gradient=True)
    torch = registry.backend("torch")
    plan = BenchPlan([case], [torch], [], "cpu", rounds=2)
    seen = visit(plan, case)
    assert seen.of_saved.known and "what is expected" in seen.seconds
    assert visit(plan, CASE).of_saved is None and visit(plan, case, lambda: True).of_saved is None
    future: Future = Future()
    future.set_result(seen)
    helped = Helped(warm=WarmUp({id(case): future}))
    computed, compute = [], Judge._compute
    monkeypatch.setattr(Judge, "_compute", lambda self, *a: computed.append(self) or compute(self, *a))
    assert {r["verdict"] for r in run(plan, lambda f, c: None, helped=helped).rows} == {"right"} and not computed
    future = Future()
    future.set_result(seen._replace(of_saved=seen.of_saved._replace(saved="other")))
    helped = Helped(warm=WarmUp({id(case): future}))
    assert {r["verdict"] for r in run(plan, lambda f, c: None, helped=helped).rows} == {"right"}
    assert len(computed) == 2  # what was saved, and the gradients


def test_cases_are_visited_ahead_by_other_processes():
    """They find everybody by name, subjects of other libraries too, and their end is the context's; what visits stands
    still while somebody reads a clock."""
    triton, pallas = registry.backend("triton"), registry.backend("pallas")
    if triton.unavailable() or pallas.unavailable():
        pytest.skip(triton.unavailable() or pallas.unavailable())
    before, peers = multiprocessing.active_children(), [registry.backend("torch"), registry.backend("jax")]
    none = TimedCase("mine", "softmax", "float32", {})
    plan = BenchPlan([CASE, none], [triton, pallas], peers, "cpu")
    with warm_up(plan, 1) as warm:
        helped = Helped(warm=warm)
        assert warm.visited == {"triton", "pallas", "torch"}  # XLA times what it compiles
        assert helped.next([none]) is none  # which is no call: whoever times it says so
        assert helped.next([CASE]) is CASE and warm.is_ready(CASE) and warm.is_ready(none)
        assert helped.computed(CASE) == helped.computed(none) == (None, None)
        assert {"arrays", "triton", "pallas", "torch"} == set(helped.visits) and min(helped.visits.values()) >= 0
    assert multiprocessing.active_children() == before
    with warm_up(plan, 0) as warm:
        assert Helped(warm=warm).next([none, CASE]) is none
        assert not warm.visited and not Helped(warm=warm).visits


def test_what_compiles_ahead_keeps_it_where_whoever_times_looks(monkeypatch):
    """Where Triton's own choice is, or the user's; Inductor moves it otherwise, from its first kernel on."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    given = []

    @contextmanager
    def processes(jobs, environment, nice, begin):
        given.append(environment)
        yield None

    monkeypatch.setattr("portakern.tools.bench.background.pool", processes)
    plan = BenchPlan([], [registry.backend("torch")], [], "cpu")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with triton.knobs.cache.scope(), warm_up(plan, 1):
        assert given[0]["TRITON_CACHE_DIR"] == triton.knobs.cache.dir == ENVIRONMENT["TRITON_CACHE_DIR"]
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    with warm_up(plan, 1):
        assert given[1]["TRITON_CACHE_DIR"] == "mine" and given[1].keys() > ENVIRONMENT.keys()


def state(pid):
    """Of a process of Linux, by its letter."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's state in /proc")
def join(device, number):
    device.join(number)
    held[:] = [device]


held = []
"""Of another process, the device that it joined."""


def hold(seconds):
    """Hold a device for so long; the seconds that this process was stopped for by then."""
    with held[0].exclusive():
        time.sleep(seconds)
    return time.perf_counter() - held[0].clock()


def test_processes_stand_still_while_a_clock_is_read(monkeypatch, caplog):
    """All but whoever holds the device, which are told how long that was; whoever waits for one that stands still does
    not wait for ever."""
    device = DeviceLock(2, 1)
    device.join(0)
    with pool(1, {}, 0, join, device, 1) as timing, pool(1, {}, 0, device.join) as visiting:
        own, another = (p.submit(os.getpid).result() for p in (timing, visiting))
        with device.exclusive():
            assert state(own) == state(another) == "T" and not device.case_ready.value
            time.sleep(0.2)
        device._pids[0] = 0  # the next is not to stop this process
        waiting = timing.submit(hold, 1.0)
        while state(another) != "T":
            time.sleep(0.01)
        assert state(own) != "T" and time.perf_counter() - device.clock() < 0.01
        assert waiting.result() > 0.2 and state(another) != "T"
        monkeypatch.setattr("portakern.processes.LONGEST", 0.2)
        device.number = 0
        with caplog.at_level("WARNING", "portakern"), device.exclusive():
            while state(another) == "T":
                time.sleep(0.01)
        assert "were stopped for 0.2 s, and go on" in caplog.text
        device.forget()
        with device.exclusive():
            assert state(own) == "T" and state(another) != "T"


def test_no_case_is_waited_for_longer_than_is_said():
    case, other = CASE, TimedCase("mine", "softmax", "float16", {"shape": (6, 40)})
    visits = {id(c): Future() for c in (case, other)}
    visits[id(case)].set_running_or_notify_cancel()
    helped, start = Helped(warm=WarmUp(visits, longest=0.1)), time.monotonic()
    assert helped.ready([case, other]) is None and helped.next([case, other]) is case
    assert 0.1 <= time.monotonic() - start < 10
    assert helped.computed(case) == (None, None) and not helped.visits


def test_several_processes_time_what_one_would():
    """Each holds the device while it reads a clock. A call that two of them were given at once stands in one row."""
    triton, torch = registry.backend("triton"), registry.backend("torch")
    if triton.unavailable() or torch.unavailable():
        pytest.skip(triton.unavailable() or torch.unavailable())
    none = TimedCase("mine", "softmax", "float32", {})
    cases = [CASE, replace(CASE, suite="another"), replace(CASE, gradient=True), none]
    plan, told = BenchPlan(cases, [triton], [torch], "cpu", rounds=2), []
    before = multiprocessing.active_children()
    with warm_up(plan, 1) as warm, workers(plan, warm) as timing:
        assert len(timing) == WORKERS
        outcome = run(plan, lambda found, case: told.append(case), helped=Helped(Background(), warm, timing))
        assert not warm.processes._processes and not any(warm.device._pids[WORKERS:])  # nothing was left to visit
    assert multiprocessing.active_children() == before and len(told) == 4
    found = {(r["op"], r["contender"]): r for r in outcome.rows}
    assert len(found) == len(outcome.rows) == 4 and {r["verdict"] for r in outcome.rows} == {"right"}
    assert all(r["median_us"] > 0 and r["first_s"] >= 0 for r in outcome.rows)
    assert [case for case, _ in outcome.unserved] == [none] and outcome.rates and len(outcome.call_seconds) == 2
    assert {"timing", "verdicts", "first calls of triton"} < outcome.spent.seconds.keys()
    with warm_up(plan, 0) as warm, workers(plan, warm) as timing:
        assert [type(worker) for worker in timing] == [Here]


class Waits:
    """Times nothing, until it is ended."""

    def roof(self):
        future = Future()
        future.set_result({})
        return future

    def time(self, asked):
        self.future = Future()
        return self.future

    def end(self):
        self.future.set_exception(BrokenProcessPool("it was killed"))


def test_a_case_that_does_not_end_ends_the_run(monkeypatch):
    """As a kernel does that waits for itself: nothing but the end of its process ends it."""
    monkeypatch.setattr("portakern.tools.bench.session.ENDLESS", 0.1)
    plan, kept = BenchPlan([CASE], [registry.backend("triton")], [], "cpu", rounds=2), []
    with pytest.raises(DeviceLost, match=r"the process that timed softmax float32 of mine has ended \(it was killed\)"):
        run(plan, lambda found, case: kept.append(case), helped=Helped(workers=[Waits()]))
    assert not kept


def test_a_process_that_times_can_be_ended():
    with pool(1, {}) as processes:
        worker = BenchWorker(processes, None, (["nobody"], []), frozenset())
        with pytest.raises(SpecError, match="nobody"):
            worker.roof()
        future = processes.submit(time.sleep, 60)
        worker.end()
        with pytest.raises(BrokenProcessPool):
            future.result()


class Told(BaseException):
    """What a signal's handler raises."""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of processes in /proc")
def test_a_process_that_was_being_begun_when_a_signal_came_ends_too(monkeypatch):
    """It is in no list yet, neither the pool's nor multiprocessing's."""

    def told(*_):
        raise Told

    begun, begin = [], SpawnProcess._Popen

    def interrupted(process):
        begun.append(begin(process))
        signal.raise_signal(signal.SIGTERM)
        return begun[-1]

    monkeypatch.setattr(SpawnProcess, "_Popen", staticmethod(interrupted))
    before = signal.signal(signal.SIGTERM, told)
    try:
        with pytest.raises(Told), pool(2, {}) as processes:
            processes.submit(time.sleep, 60)
        assert begun and not Path(f"/proc/{begun[0].pid}").exists()
        assert signal.getsignal(signal.SIGTERM) is told
    finally:
        signal.signal(signal.SIGTERM, before)


def test_cases_are_timed_as_they_are_ready():
    """In the order of their importance those that were visited, or are to be visited by nobody; then whichever is."""
    cases = [replace(CASE, dims={"shape": (i,)}) for i in range(4)]
    first, second, third = (Future() for _ in range(3))
    helped = Helped(warm=WarmUp(dict(zip(map(id, cases), (first, second, third), strict=False)), longest=5.0))
    first.set_running_or_notify_cancel()
    second.set_running_or_notify_cancel()
    third.set_result(Visit({"torch": 2.0}))
    assert helped.next(cases) is cases[2] and not helped.computed(cases[2]).of_saved
    assert helped.visits == {"torch": 2.0}
    assert helped.next(cases[:2] + cases[3:]) is cases[3]
    timer = threading.Timer(0.05, second.set_exception, [ValueError("a compiler ended")])
    timer.start()
    start = time.monotonic()
    assert helped.next(cases[:2]) is cases[1]
    assert not first.done() and time.monotonic() - start < 4
    timer.join()


def test_what_nobody_works_on_any_more_is_timed_first():
    """A case whose oracle is still at work waits for others, and is waited for when nothing else is left."""
    cases = [replace(CASE, dims={"shape": (i,)}) for i in range(3)]
    oracle: Future = Future()
    oracle.set_running_or_notify_cancel()
    visited: Future = Future()
    visited.set_running_or_notify_cancel()
    helped = Helped(Background({id(cases[0]): oracle}), WarmUp({id(cases[1]): visited}, longest=0.05))
    assert helped.next(cases) is cases[2]
    assert helped.next(cases[:2]) is cases[0]  # it was visited, and the other was not
    visited.set_result(Visit({}))
    assert helped.next(cases[:2]) is cases[1]
    oracle.set_result([])
    assert helped.next(cases) is cases[0] and Helped().next(cases) is cases[0]


def slower(seconds, fn=numpy_softmax):
    def run(x, axis):
        time.sleep(seconds)
        return fn(x, axis)

    return run


def test_a_peer_that_is_far_behind_is_timed_on_two_calls_of_a_suite():
    """And said to be that on the others, as is a wrong one; subjects never are, nor is anybody on another suite."""
    mine = backend("mine", slower(0.02))
    best = backend("best", slower(0.002), peer=True)
    far = backend("far", slower(0.02), peer=True)
    wrong = backend("wrong", lambda x, axis: x + 1, peer=True)
    cases = [replace(CASE, dims={"shape": (6, n)}) for n in (40, 41, 42)] + [replace(CASE, suite="another")]
    plan = BenchPlan(cases, [mine], [best, far, wrong], "cpu", rounds=2)
    verdicts, asked = {}, []
    for row in run(plan, lambda found, case: asked.append(case)).rows:
        verdicts.setdefault(row["contender"], []).append(row["verdict"])
        last = row if row["verdict"] == "far behind" and row["contender"] == "far" else None
        assert last is None or ("median_us" not in last and "ratio" not in last)
        assert last is None or re.fullmatch(
            r"not timed: \d.* to \d.* times the best peer's time on 2 of 2 calls of the suite before", last["why"]
        )
    # the last case is the first one's call, and nothing is timed twice
    assert verdicts == {
        "mine": ["right"] * 3, "best": ["right"] * 3, "far": ["right", "right", "far behind"],
        "wrong": ["wrong", "wrong", "far behind"],
    }  # fmt: skip
    every = run(replace(plan, every_peer=True), lambda found, case: None).rows
    assert {r["verdict"] for r in every} == {"right", "wrong"} and len(asked) == 4


def test_who_was_far_behind_stays_so_in_a_file_that_is_continued():
    mine, far = backend("mine", numpy_softmax), backend("far", lambda x, axis: x + 1, peer=True)
    cases = [replace(CASE, dims={"shape": (6, n)}) for n in (40, 41, 42)]
    plan, kept = BenchPlan(cases, [mine], [far], "cpu", rounds=2), {}
    for row in run(plan, lambda found, case: None).rows:
        kept.setdefault((row["call"], row["target"]), []).append(row)
    assert [r["verdict"] for rows in kept.values() for r in rows if not r["subject"]] == ["wrong"] * 2 + ["far behind"]
    assert not Earlier(kept).left(plan)[0].cases
    assert Earlier(kept).left(replace(plan, every_peer=True))[0].cases == cases[2:]


def test_who_is_far_behind_is_so_on_every_call_before():
    """Of one suite, op and dtype; a peer that was close once is timed on."""
    pruned = Pruned()

    def rows(ratio, verdict="right"):
        return [{"contender": "peer", "subject": False, "verdict": verdict, "ratio": ratio}]

    pruned.note(CASE, rows(0.4))
    assert pruned.why(CASE, "peer", False) is None  # one call says too little
    pruned.note(CASE, rows(None, "refused"))
    assert pruned.why(CASE, "peer", False) is None
    pruned.note(CASE, rows(None, "failed"))
    assert pruned.why(CASE, "peer", False) == (
        "not timed: 2.5 to 2.5 times the best peer's time on 1, no right result on 1 of 2 calls of the suite before"
    )
    assert pruned.why(CASE, "peer", True) is None and pruned.why(CASE, "other", False) is None
    for other in (replace(CASE, suite="s"), replace(CASE, dtype="float16"), replace(CASE, gradient=True)):
        assert pruned.why(other, "peer", False) is None
    pruned.note(CASE, rows(0.6))
    assert pruned.why(CASE, "peer", False) is None


def test_a_budget_says_what_it_left_out():
    cases = [CASE, TimedCase("mine", "softmax", "float16", {"shape": (3, 5)})]
    outcome = run(
        BenchPlan(cases, [backend("mine", numpy_softmax)], [], "cpu", 2, seconds=0.0), lambda found, case: None
    )
    assert outcome.left_out == cases and not outcome.rows


def test_a_device_that_does_not_answer_ends_the_run(monkeypatch):
    def lost(self, result):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("portakern.tools.bench.roof.measure", lambda instruments, recorder, rounds: {})
    monkeypatch.setattr(Instruments, "wait", lost)
    with pytest.raises(DeviceLost, match=r"mine left the device unusable on softmax.* --against"):
        timed(backend("mine", failing))


# ------------------------------------------------------------------------------------------------------------- suites
@pytest.mark.parametrize("name", suites.names())
def test_every_case_of_a_suite_is_a_call(name):
    """Bound on arrays without values: what is written in a suite is what its op takes."""
    cases = list(suites.cases_of(name))
    assert cases and all(c.suite == name for c in cases)
    oracle = registry.oracle_backend()
    for case in cases:
        spec = case.forward
        impl = oracle.implementation(spec.name, oracle.families[0])
        assert impl is not None and not set(spec.dims) - set(case.dims), case
        said = {o.name for o in spec.extents}  # by an option too
        dims = {n: e if n in said else _small(e) for n, e in case.dims.items()}
        for rule in spec.require:
            dims |= rule.mends(dims) if rule.mends else {}
        options = {n: dims.get(n, value) for n, value in case.options.items()}  # an option may be an extent
        small = suites.TimedCase(case.suite, case.op, case.dtype, dims, options, case.given, case.layouts,
                                 overwrite=case.overwrite, array_dtypes=case.array_dtypes)  # fmt: skip
        library = frameworks()["numpy"]
        call = make(small, library, library.devices()[0]).call
        assert call.flops >= 0 and abstract_call
        timed = registry.find_spec(case.timed)  # of a gradient with what its forward pass keeps, as an earlier run said
        assert bind_signature(timed, case.signature, host_framework(), HOST).spec is timed
    if name not in (suites.TYPICAL, suites.SAMPLES):
        x = suites.read(name).x
        assert x is None or all(x in c.dims for c in cases)


def _over(op, names, **dims):
    return suites.TimedCase("mine", op, "float32", dims, overwrite=names)


@pytest.mark.parametrize(
    "case",
    [
        _over("kv_append", ("k_pages", "v_pages"), tokens=5, kv_heads=2, d=8, dv=4, pages=6, page_size=4, pairs=4),
        _over("rope", ("x",), batch=2, seq=3, heads=2, d=8, pairs=4),
        _over("rope", ("x",), batch=1, seq=1, heads=1, d=8, pairs=4),
    ],
    ids=["once more is the same", "once more is another", "nothing changes places"],
)
def test_a_call_in_place_is_right_each_time_that_it_is_timed(case):
    """What is rotated twice is wrong: the values are those of a first call before each sample. Who cannot write over an
    argument is told so, and not timed."""
    pytest.importorskip("triton", reason="triton is not installed")
    rows = timed(registry.backend("triton"), registry.backend("torch"), case=case)
    mine, theirs = rows["triton"], rows["torch"]
    assert mine["verdict"] == "right" and mine["median_us"] > 0, mine
    assert f"overwrite={case.overwrite}" in mine["call"]
    assert theirs["verdict"] == "refused" and theirs["why"].startswith("it cannot write a result over an input")


def test_overwriting_is_part_of_a_call_and_gradients_are_not_asked_of_it(monkeypatch, tmp_path):
    case = _over("rope", ("x",), batch=1)
    assert case.text != replace(case, overwrite=()).text
    found = [c for c in suites.cases_of("paged") if c.overwrite]
    assert found and all(bind_signature(c.forward, c.signature, host_framework(), HOST) for c in found)
    (tmp_path / "mine.toml").write_text('about = "x"\n[[case]]\nop = "rope"\noverwrite = ["x"]\ngradients = true\n')
    monkeypatch.setattr(suites, "FOLDER", tmp_path)
    with pytest.raises(pk.SpecError, match="gradients are asked of a call with overwrite"):
        suites.read("mine")


def _small(extent):
    return tuple(min(e, 3) for e in extent) if isinstance(extent, tuple) else min(extent, 3)


def test_every_op_is_timed():
    """A new op is, by its typical call, before anybody writes it into a suite."""
    timed_ops = {c.timed for name in suites.names() for c in suites.cases_of(name)}
    assert timed_ops == set(registry.loadable())


def test_what_matters_most_comes_first_and_nothing_twice():
    cases = suites.in_order([c for name in suites.names() for c in suites.cases_of(name)])
    ranks = [c.rank for c in cases]
    assert ranks == sorted(ranks) and len({repr(c) for c in cases}) == len(cases)
    first = [c.timed for c in cases[: len({c.timed for c in cases})]]
    assert len(set(first)) == len(first)  # each op once before any twice


def test_a_shape_of_the_users():
    given = suites.parse_shape("m=7,is_causal=true,shape=8x16,scale=0.5,precision=tf32")
    assert given == {"m": 7, "is_causal": True, "shape": (8, 16), "scale": 0.5, "precision": "tf32"}
    case = suites.shaped(registry.find_spec("softmax"), {"shape": 12})
    assert case.dims == {"shape": (12,)}
    with pytest.raises(SpecError, match="softmax: --shape names 'n'; expected some of shape, axis"):
        suites.shaped(registry.find_spec("softmax"), {"n": 3})
    with pytest.raises(SpecError, match=r"--shape has 'm'; expected name=value"):
        suites.parse_shape("m")
    with pytest.raises(SpecError, match=r"suite 'atention' is unknown; expected one of attention, "):
        suites.read("atention")


def test_the_roof_of_a_call():
    library = frameworks()["numpy"]
    call = make(TimedCase("s", "matmul", "float32", {"batch": (), "m": 64, "n": 64, "k": 64}), library, "cpu").call
    assert moved(call) == 3 * 64 * 64 * 4
    assert ceiling(call, {"copy": 49152e6, "float32": 1e18}).limit == "copy"
    found = ceiling(call, {"copy": 49152e9, "float32": 2 * 64**3 * 1e6, "tf32": 1e18})
    assert (found.limit, found.us) == ("float32", pytest.approx(1.0))
    assert ceiling(call, {}) is None


def test_a_row_names_what_it_measured():
    triton = registry.backend("triton")
    if triton.unavailable():
        pytest.skip(triton.unavailable())
    rows = timed(triton, backend("somebodys", numpy_softmax, peer=True))
    assert rows["triton"]["sources"] == sources.fingerprint("softmax", triton, None, Target("cpu"))
    assert rows["somebodys"]["sources"] is None  # it is no module of portakern's
    assert rows["triton"]["commit"] == sources.commit()


# ------------------------------------------------------------------------------------------------------- command line
def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_the_command_writes_rows_that_can_be_read(tmp_path):
    triton = registry.backend("triton")
    if triton.unavailable():
        pytest.skip(triton.unavailable())
    file = tmp_path / "new" / "rows.json"
    gradient = registry.find_spec("softmax").vjp
    found = bench("softmax", gradient, "--backend", "triton", "--against", "torch", "--against", "liger",
                  "--device", "cpu", "--rounds", "2", "--dtype", "float32", "--json", file)  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "clock: host" in found.output and "liger is not timed: " in found.output
    read = results.read(file)
    assert read.benchmark == "bench" and {r["op"] for r in read.rows} == {"softmax", gradient}
    assert {r["contender"] for r in read.rows} == {"triton", "torch"} and read.device == "host CPU"
    assert read.extra["rates"]["copy"] > 0 and "liger" in read.extra["not_timed"]
    assert (
        read.extra["call_seconds"].keys() == {r["call"] for r in read.rows}
        and min(read.extra["call_seconds"].values()) >= 0
    )
    assert "seconds of the slowest calls: " in found.output


def test_an_op_that_is_named_is_timed_with_its_gradients():
    def named(op, gradients=True):
        return {c.timed for c in command._cases([op], None, None, None, gradients, any_cpu=False)}

    gradient = registry.find_spec("linear").vjp
    assert named("linear") == {"linear", gradient}  # of a suite; another op's from its typical call:
    assert named("rope") == {"rope", registry.find_spec("rope").vjp}
    assert named("linear", gradients=False) == {"linear"} and named(gradient) == {gradient}


def test_a_table_is_completed_by_several_runs(tmp_path, monkeypatch):
    """What stands in the file is not timed again, until what decides it changes; calls that were not asked for stay."""
    timed_now, rows_of, file = [], Trial.rows, tmp_path / "rows.json"

    def rows(self):
        timed_now.append(self.case.timed)
        return rows_of(self)

    monkeypatch.setattr(Trial, "rows", rows)
    triton, gradient = registry.backend("triton"), registry.find_spec("softmax").vjp
    if triton.unavailable():
        pytest.skip(triton.unavailable())

    def again(*more):
        timed_now.clear()
        found = bench("softmax", "--backend", "triton", "--against", "torch", "--device", "cpu", "--shape", "shape=3x5",
                      "--dtype", "float32", "--rounds", "2", "--json", file, *more)  # fmt: skip
        return list(timed_now), " ".join((found.output or str(found.exception)).split()), found.exception

    assert again("--no-gradients")[0] == ["softmax"]
    first = results.read(file)
    done, shown, _ = again()
    assert done == [gradient] and "1 calls are already in" in shown
    both = results.read(file)
    assert [*both.rows[: len(first.rows)]] == [*first.rows] and {r["op"] for r in both.rows} == {"softmax", gradient}
    assert both.extra["wall_seconds"] >= first.extra["wall_seconds"] and both.extra["rates"]
    assert again()[0] == [] and len(results.read(file).rows) == len(both.rows)  # nothing is left
    assert again("--rounds", "3")[0] == ["softmax", gradient]  # more samples than stand there
    real = sources.fingerprint
    monkeypatch.setattr(sources, "fingerprint", lambda op, *a: "another" if op == "softmax" else real(op, *a))
    three = [*results.read(file).rows]
    with monkeypatch.context() as over:
        over.setattr("portakern.tools.bench.session._Run._seconds", lambda self: -1.0)
        before = file.read_text()
        done, shown, _ = again("--no-gradients", "--plot", tmp_path / "plots")
    assert not done and "1 calls were not timed, the budget ended" in shown and "calls are already in" in shown
    assert f"{sum(r['op'] == 'softmax' for r in three)} rows of" in shown and "(their sources have changed)" in shown
    assert file.read_text() == before  # a run that comes to nothing leaves what holds and what does not as it was
    assert again("--no-gradients")[0] == ["softmax"] and {r["op"] for r in results.read(file).rows} == {
        "softmax", gradient
    }  # fmt: skip
    assert again("--no-gradients", "--fresh")[0] == ["softmax"] and len(results.read(file).rows) == 2
    assert again("--no-gradients", "--against", "reference")[0] == ["softmax"]
    assert "no longer has the times of reference of 1 calls" in again("--no-gradients", "--rounds", "3")[1]
    file.write_text(json.dumps({**json.loads(file.read_text()), "device": "another"}))
    done, _, refused = again()
    assert not done and isinstance(refused, SpecError)
    assert "bench on another, which this run on host CPU cannot continue; name another file" in str(refused)


def test_a_case_says_its_call_without_arrays():
    """As the call on its arrays does, which is how rows of an earlier run are found."""
    host, target = host_framework(), Target("cpu")
    cases = [c for c in suites.cases_of(suites.SAMPLES, ["float32", "bfloat16"]) if not c.gradient]
    for case in cases:
        call = make(case, host, host.devices()[0]).call
        assert describe(case, bind_signature(case.forward, case.signature, host, target)) == describe(case, call), case


@pytest.mark.parametrize("width", [60, 80, 200])
def test_figures_stay_with_their_words_at_any_width(width):
    row = {
        "contender": "flex_attention", "verdict": "right", "median_us": 34458.5, "best_us": 11556.4,
        "worst_us": 58573.5, "host_us": 34431.0, "limited_by": "copy", "byte_rate": 2 * 10**12,
        "roof_share": 0.4, "ratio": 0.5, "error": 0.99, "clock": "host", "first_s": 3.21,
    }  # fmt: skip
    lines = command._lines(row, width)
    assert max(map(len, lines)) <= width and (len(lines) == 1) == (width == 200)
    assert {len(line) - len(line.lstrip()) for line in lines[1:]} <= {command.NAMES}
    parts = [part for line in lines for part in line[command.NAMES :].rstrip(",").split(", ")]
    assert parts == command._parts(row) and "error 0.99 of the bound" in parts
    wrong = command._lines({**row, "median_us": None, "verdict": "wrong", "why": "6 of 15 elements"}, width)
    assert [" ".join(line.split()) for line in wrong] == [
        "flex_attention wrong: 6 of 15 elements, 0.99 times its bound"
    ]


def test_a_run_that_ends_early_keeps_its_rows(tmp_path, monkeypatch):
    """The second case is one that nobody survives."""
    backend("mine", numpy_softmax)
    file, rows_of = tmp_path / "rows.json", Trial.rows

    def rows(self):
        if self.inputs.call.dtype == "float16":
            raise KeyboardInterrupt
        return rows_of(self)

    monkeypatch.setattr(Trial, "rows", rows)
    found = bench("softmax", "--backend", "mine", "--against", "mine", "--device", "cpu", "--rounds", "2",
                  "--shape", "shape=3x5", "--dtype", "float32", "--dtype", "float16", "--no-gradients",
                  "--json", file)  # fmt: skip
    assert found.exit_code != 0
    assert [(r["dtype"], r["verdict"]) for r in results.read(file).rows] == [("float32", "right")]


def test_a_first_call_that_does_not_come_back_is_ended(monkeypatch):
    """The others are timed, and an alarm that somebody had set is still set."""
    monkeypatch.setattr(of_case, "FIRST_CALL", 0.2)

    def never(x, axis):
        time.sleep(20)
        return x

    start, before = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, 300.0)
    try:
        rows = timed(backend("mine", numpy_softmax), backend("never", never, peer=True))
        left, _ = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
    assert rows["never"]["verdict"] == "failed" and "it took more than 0.2 s" in rows["never"]["why"]
    assert rows["mine"]["verdict"] == "right" and 270 < left < 300 and time.monotonic() - start < 15


def test_a_wrong_subject_is_the_commands_failure():
    backend("mine", lambda x, axis: x + 1)
    found = bench("softmax", "--backend", "mine", "--against", "reference", "--device", "cpu", "--rounds", "2",
                  "--shape", "shape=3x5", "--dtype", "float32", "--no-gradients")  # fmt: skip
    assert found.exit_code == 1
    assert "  mine            wrong: 15 of 15 elements of y" in found.output
    assert "reference" in found.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "rwos"], "bench: --suite is 'rwos'; expected one of attention, convolution, decode,"),
        (["--shape", "m=4"], "bench: --shape needs an op; name it"),
        (["softmax", "--shape", "shape=4", "--suite", "rows"], "bench: --shape and --suite exclude each other"),
        (["softmax", "--dtype", "fp8"], "bench: --dtype is 'fp8'; expected one of"),
        (["conv"], "op 'conv' is unknown"),
        (["softmax", "--backend", "triton", "--device", "tpu"], "bench: backend 'triton' serves no tpu here"),
    ],
)
def test_what_is_asked_wrongly_is_refused_before_anything_runs(arguments, said):
    found = bench(*arguments)
    assert found.exit_code != 0 and said in str(found.exception)


PACKED = TimedCase(
    "mine", "attention", "float32",
    {"batch": 2, "kv_heads": 1, "group": 2, "q_len": 20, "kv_len": 20, "d": 8, "dv": 8}, {"is_causal": True},
    ("q_segment_ids", "kv_segment_ids"), runs={"q_segment_ids": 7, "kv_segment_ids": 7},
)  # fmt: skip


def test_packed_documents_are_runs_of_ids_and_only_pairs_that_see_each_other_count():
    """A kernel that skips other documents would else be faster than the roof allows, and have no time."""
    inputs = make(PACKED, host_framework(), "cpu")
    ids = inputs.buffers["q_segment_ids"].view()
    assert ids.tolist() == [[0] * 7 + [1] * 7 + [2] * 6] * 2
    of_a_head = 7 * 8 // 2 + 7 * 8 // 2 + 6 * 7 // 2
    assert inputs.counted(inputs.call).flops == 2 * 2 * 2 * of_a_head * (8 + 8)
    assert "q_segment_ids in runs of 7" in describe(PACKED, inputs.call)
    assert PACKED.text != replace(PACKED, runs={"q_segment_ids": 5, "kv_segment_ids": 7}).text
    (row, *_) = run(BenchPlan([PACKED], [registry.backend("reference")], [], "cpu"), lambda found, case: None).rows
    assert row["verdict"] == "right" and row["flops"] == inputs.counted(inputs.call).flops


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (5, 2)}, {"window": (None, 1)}])
def test_pairs_are_counted_as_the_oracle_masks_them(options):
    rng = np.random.default_rng(3)
    arrays = {n: np.ones((2, length, 1, 8), np.float32) for n, length in (("q", 13), ("k", 17), ("v", 17))}
    ids = {f"{n}_segment_ids": rng.integers(-1, 3, (2, length)) for n, length in (("q", 13), ("kv", 17))}
    for given in ({}, ids):
        call = pk.op("attention").bind(**arrays, **given, **options)
        seen = np.mean([allowed(call, b).sum() for b in range(2)])
        assert allowed_pairs(call) == seen


def test_an_array_of_another_dtype_is_drawn_compiled_and_timed_as_it_is():
    pytest.importorskip("triton", reason="triton is not installed")
    dims = {"tokens": 3, "kv_heads": 1, "group": 2, "d": 16, "dv": 16, "pages": 4, "page_size": 4}
    wide = suites.TimedCase(
        "mine", "paged_attention", "float32", dims | {"sequences": 2, "pages_each": 2}, given=("k_scale",)
    )
    narrow = replace(wide, array_dtypes={"k_pages": "float8_e4m3fn", "v_pages": "float8_e5m2"})
    assert wide.text != narrow.text
    assert [narrow.signature["arrays"][n][1] for n in ("q", "k_pages", "v_pages")] == [
        "float32", "float8_e4m3fn", "float8_e5m2",
    ]  # fmt: skip
    row = timed(registry.backend("triton"), case=narrow)["triton"]
    assert row["verdict"] == "right" and "k_pages float8_e4m3fn; v_pages float8_e5m2" in row["call"], row
