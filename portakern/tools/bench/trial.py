"""One case with all its contenders: each is checked against the bound, then all are timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from portakern.core.backend import Backend
from portakern.core.dispatch import Choice
from portakern.core.gradients import wiring
from portakern.core.instruments import Recorder
from portakern.core.plan import serve
from portakern.core.targets import Target
from portakern.errors import UnsupportedError
from portakern.tools.bench.contenders import CallNotTaken, Contender, ReadyCall, UserCall, contenders, here, ready
from portakern.tools.bench.deadline import within
from portakern.tools.bench.fresh import Fresh, StaleResult
from portakern.tools.bench.inputs import Inputs, for_gradient, make
from portakern.tools.bench.plan import BenchPlan, Spent
from portakern.tools.bench.pruning import Pruned
from portakern.tools.bench.rows import (
    FAILED,
    FAR_BEHIND,
    REFUSED,
    WRONG,
    Row,
    describe,
    held_against,
    impossible,
    judged,
    settled,
    started,
    timed,
)
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.timing import CallFailed, Times, interleaved
from portakern.tools.bench.verdicts import Expected, Judge, Known, Verdict
from portakern.tools.compile.worker import one_line, reason

__all__ = ["FIRST_CALL", "Computed", "DeviceLost", "OfSaved", "TimingContext", "Trial", "Visit", "of_gradient", "visit"]

FIRST_CALL = 40.0
"""Seconds that a contender's first call may take, its compiler included: some compilers do not come back."""

STILL = 3
"""Times as many, where a process stands still every now and then while the seconds pass."""


class DeviceLost(RuntimeError):
    """A kernel left the device unusable for this process."""


class OfSaved(NamedTuple):
    """Results of a visit for gradients that need arrays saved by a forward op. ``saved``: a hash of these arrays, which
    were right; ``known``: the expected gradients for exactly these."""

    saved: str
    known: Known


class Visit(NamedTuple):
    """A case that was visited: the seconds that its arrays and its contenders, by backend, took, and what is expected
    of it where only a device tells its inputs."""

    seconds: dict[str, float]
    of_saved: OfSaved | None = None


class Computed(NamedTuple):
    """Results that other processes computed for a case. ``expected``: the expected outputs, if the arrays follow from a
    seed; ``of_saved``: the same if they do not. None: nothing."""

    expected: list[Expected] | None = None
    of_saved: OfSaved | None = None


@dataclass
class TimingContext:
    """Where cases are timed.

    Attributes:
      plan: who takes part, and how often each is sampled. rates: the measured roof; recorder: the one clock of all
      contenders, if there is one; spent: where the seconds go.
      quiet: while inside, nobody else uses the device. visited: backends whose calls others compile ahead, which may
      be called the first time while others use it too. clock: seconds, without those that the process stood still for;
      shared: whether it stands still at all.
    """

    plan: BenchPlan
    rates: dict[str, float] = field(default_factory=dict)
    recorder: Recorder | None = None
    spent: Spent = field(default_factory=Spent)
    quiet: Callable[[], AbstractContextManager[None]] = nullcontext
    visited: frozenset[str] = frozenset()
    clock: Callable[[], float] = time.perf_counter
    shared: bool = False

    @property
    def patience(self) -> float:
        """Seconds that a first call may take."""
        return FIRST_CALL * (STILL if self.shared else 1)


def visit(plan: BenchPlan, case: TimedCase, enough: Callable[[], bool] = lambda: False) -> Visit:
    """Run every contender of a case once, and time nothing: kernels are compiled, and their compilers' caches on disk
    know them; and compute what is expected where that needs a device. ``enough``: asked before each contender, whether
    to leave out the others, and what is expected."""
    spent, context, runs = Spent(), TimingContext(plan, shared=True), dict[tuple[Target, bool], None]()
    with spent.on("arrays"):
        trial = Trial(context, case)
    for contender in trial.among:
        if enough():
            return Visit(spent.seconds)
        try:
            with spent.on(contender.backend.name), within(context.patience):
                entry = ready(contender, trial.inputs)
                entry.instruments.wait(entry.run())
            runs[entry.call.target, entry.call.interpret] = None
        except Exception:  # whoever times it will meet this again, and say it
            continue
        finally:
            trial.framework.instruments(trial.device).release()
    if not (case.gradient and wiring(case.forward).outputs):
        return Visit(spent.seconds)  # other processes know what is expected, and need no device
    with spent.on("what is expected"):
        return Visit(spent.seconds, trial.of_saved(runs))


def of_gradient(forward: Inputs, lead: Backend, right: Callable[[Inputs], bool] = lambda inputs: False) -> Inputs:
    """The inputs of the gradients. What the forward op saves for them, which ``lead`` computes, is held to its bound
    like any result, unless these inputs are known to be ``right``, or need not be.

    Raises:
      UnsupportedError: it is wrong.
    """
    choice, wired = Choice(lead), wiring(forward.spec)
    call = wired.training(forward.call)
    outputs = serve(call, choice)
    names = [o.name for o in forward.spec.outputs]
    inputs = for_gradient(forward, dict(zip(names, outputs, strict=True)))
    if not right(inputs):
        saving = Judge(replace(forward, call=call))
        kept = [o for o in outputs if o is not None]
        verdict = saving.verdict(call.framework, kept, call.target, call.interpret)
        if not verdict.right:
            raise UnsupportedError(f"{forward.spec.name}, which its gradient reads, is wrong: {verdict.why}")
    return inputs


class Trial:
    """One case with all its contenders."""

    def __init__(
        self, context: TimingContext, case: TimedCase, computed: Computed | None = None, pruned: Pruned | None = None
    ) -> None:
        self.context, self.case, self.pruned, plan = context, case, pruned or Pruned(), context.plan
        expected, of_saved = computed or Computed()
        self.framework, self.device, self.target = here(plan.lead, plan.device)
        with context.spent.on("arrays"):
            forward = make(case, self.framework, self.device)
        self.saves = sorted(wiring(forward.spec).saves(forward.call.options)) if case.gradient else []
        known: Known = {} if expected is None else {(self.target, False): expected}

        def right(inputs: Inputs) -> bool:
            if of_saved is None or of_saved.saved != inputs.mark(self.saves):
                return False
            known.update(of_saved.known)
            return True

        with context.spent.on("what gradients need"):
            self.inputs = of_gradient(forward, plan.lead, right) if case.gradient else forward
        self.judge = Judge(self.inputs, known=known)
        self.call = describe(case, self.inputs.call)
        self.among = contenders(self.inputs.spec, plan.subjects, plan.against, self.target)

    def of_saved(self, runs: Iterable[tuple[Target, bool]]) -> OfSaved:
        """What is expected of gradients that need what a forward op saved, where they run."""
        for target, interpret in runs:
            self.judge.expect(target, interpret)
        return OfSaved(self.inputs.mark(self.saves), self.judge.known)

    def rows(self) -> list[Row]:
        found: dict[str, Row] = {}
        right: dict[str, tuple[ReadyCall, tuple[Any, ...]]] = {}
        for contender in self.among:
            if contender.backend.name in self.context.visited:
                self._try(contender, found, right, self.context.patience)
        with self.context.quiet():
            for contender in self.among:
                if contender.backend.name not in self.context.visited:
                    self._try(contender, found, right, FIRST_CALL)
            with self.context.spent.on("timing"):
                times = self._times(right, found)
        for name, result in times.items():
            entry, before = right[name]
            with self.context.spent.on("second looks"):
                found[name] = self._settled(found[name], entry, before, result)
        return held_against([found[c.name] for c in self.among])

    def _try(
        self,
        contender: Contender,
        found: dict[str, Row],
        right: dict[str, tuple[ReadyCall, tuple[Any, ...]]],
        patience: float,
    ) -> None:
        """Take in the contender's row, and its entry if it is right."""
        name, row = contender.name, started(self.case, self.inputs.counted(self.inputs.call), contender, self.target)
        if far := self.pruned.why(self.case, name, contender.subject):
            found[name] = settled(row, FAR_BEHIND, far)
            return
        try:
            entry, outputs, verdict, seconds = self._tried(contender, patience)
        except CallNotTaken as e:
            found[name] = settled(row, REFUSED, one_line(str(e)))
            return
        except Exception as e:
            found[name] = settled(row, FAILED, reason(e))
            self._still_there(contender)
            return
        found[name] = judged(row, verdict, entry.tiling, seconds)
        if verdict.right:
            right[name] = entry, outputs

    def _tried(self, contender: Contender, patience: float) -> tuple[ReadyCall, tuple[Any, ...], Verdict, float]:
        """The contender's first result, in memory that held NaN, what is to be said of it and of inputs that it did not
        leave alone, and the seconds that the first call took, its compilers included."""
        with self.context.spent.on(f"first calls of {contender.backend.name}"), within(patience):
            entry = ready(contender, self.inputs)
            framework, instruments = entry.framework, entry.instruments
            given = {n: a for n, a in entry.call.arrays.items() if a is not None and not framework.immutable}
            before = {n: framework.copy(a) for n, a in given.items()}
            wanted = entry.call.wants
            instruments.soil(form for n, form in entry.call.outputs.items() if n in wanted)
            start = self.context.clock()
            outputs = tuple(entry.run())
            instruments.wait(outputs)
            seconds = self.context.clock() - start
            if entry.call.over:  # later calls write over them
                outputs = tuple(framework.copy(o) for o in outputs)
        with self.context.spent.on("verdicts"):
            for name, array in given.items():
                if not instruments.same(array, before[name]):
                    instruments.put(array, before[name])
                    return entry, outputs, Verdict(False, {}, f"the input {name} was written to"), seconds
            return entry, outputs, self._verdict(entry, outputs), seconds

    def _verdict(self, entry: ReadyCall, outputs: Sequence[Any]) -> Verdict:
        return self.judge.verdict(entry.framework, outputs, entry.call.target, entry.call.interpret)

    def _times(self, right: dict[str, tuple[ReadyCall, tuple[Any, ...]]], found: dict[str, Row]) -> dict[str, Times]:
        """Times of those that run to the end, on other values each time; whoever raises leaves, and the others begin
        anew."""
        working: dict[str, list[dict[str, Any]]] = {}
        runs = {n: Fresh(entry, before, self.judge, working) for n, (entry, before) in right.items()}
        try:
            while runs:
                watches = {n: r.instruments.stopwatch(r, self.context.recorder) for n, r in runs.items()}
                try:
                    times = interleaved(watches, self.context.plan.rounds_of(self.case))
                    self._check_clocks(runs.values())
                    return times
                except CallFailed as e:
                    stale = isinstance(e.__cause__, StaleResult)
                    why = str(e.__cause__) if stale else reason(e.__cause__ or e)
                    found[e.name] = settled(found[e.name], WRONG if stale else FAILED, why)
                    run = runs.pop(e.name)
                    run.close()
                    self._still_there(run.entry.contender)
            return {}
        finally:
            for run in runs.values():
                run.close()

    def _check_clocks(self, runs: Iterable[Fresh]) -> None:
        """DeviceLost if a contender's code replaced a function with which times are measured."""
        for name in dict.fromkeys(name for run in runs for name in run.instruments.replaced()):
            raise DeviceLost(
                f"bench: code of one of {', '.join(c.name for c in self.among)} replaced {name}, with which times are "
                "measured: the times of this process are invalid; earlier rows are saved"
            )

    def _settled(self, row: Row, entry: ReadyCall, before: Sequence[Any], times: Times) -> Row:
        """The row with its time, if what the contender gives after being timed is right still: a kernel may be another
        one by then, chosen by an autotuner, and it may keep what it should not."""
        if isinstance(entry.run, UserCall):
            entry.run.restore(entry.instruments)
        after = tuple(entry.run())
        entry.instruments.wait(after)
        if not all(entry.instruments.same(a, b) for a, b in zip(after, before, strict=True)):
            verdict = self._verdict(entry, after)
            if not verdict.right:
                why = f"right before it was timed, wrong afterwards: {verdict.why}"
                return {**judged(row, verdict, entry.tiling, row["first_s"]), "why": why, "verdict": WRONG}
        del after
        counted = self.inputs.counted(entry.call)
        if too_fast := impossible(counted, times, self.context.rates, entry.instruments.beyond_roof):
            return settled(row, FAILED, too_fast)
        return timed(row, times, counted, self.context.rates, entry.instruments.peak_bytes(entry.run))

    def _still_there(self, contender: Contender) -> None:
        """DeviceLost where the device does not answer after a failure."""
        try:
            instruments = self.framework.instruments(self.device)
            instruments.wait(None)
            instruments.release()
        except Exception as e:
            raise DeviceLost(
                f"bench: {contender.name} left the device unusable on {self.case.timed}: {one_line(str(e))}; the rows "
                f"before it are kept. Leave it out: name the others with --against"
            ) from e
