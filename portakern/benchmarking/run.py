"""A run: every case with all its contenders, each first held to the bound, then timed in turns with the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from portakern.benchmarking import roof
from portakern.benchmarking.ahead import Ahead, Foreseen, Visit
from portakern.benchmarking.behind import Behind
from portakern.benchmarking.contenders import Contender, Entry, Refused, contenders, here, one_clock, ready
from portakern.benchmarking.deadline import within
from portakern.benchmarking.foresight import Foresight
from portakern.benchmarking.inputs import Inputs, for_gradient, make
from portakern.benchmarking.rows import (
    FAILED,
    FAR_BEHIND,
    REFUSED,
    WRONG,
    Row,
    held_against,
    judged,
    said,
    settled,
    started,
    timed,
)
from portakern.benchmarking.spent import Spent
from portakern.benchmarking.suites import TimedCase
from portakern.benchmarking.timing import ROUNDS, CallFailed, Times, interleaved
from portakern.benchmarking.verdicts import Judge, Known, Verdict
from portakern.compiling.worker import one_line, reason
from portakern.core.backend import Backend
from portakern.core.gradients import wiring
from portakern.core.instruments import Recorder
from portakern.core.route import Choice, routes
from portakern.core.serve import serve
from portakern.core.targets import Target
from portakern.errors import SpecError, UnsupportedError

__all__ = ["FIRST_CALL", "DeviceLost", "Helped", "Outcome", "Plan", "of_gradient", "run", "visit"]

FIRST_CALL = 40.0
"""Seconds that a contender's first call may take, its compiler included: some compilers do not come back."""

VISITED = 3 * FIRST_CALL
"""The same of a visit, by the clock of a process that stands still every now and then."""


class DeviceLost(RuntimeError):
    """A kernel left the device unusable for this process."""


@dataclass(frozen=True)
class Plan:
    """What is to be timed.

    Attributes:
      cases: in the order of their importance, in which they are timed as they are ready. subjects: whose variants are
      measured, the one first in whose library's arrays the calls are made; against: the peers.
      device: the platform, None: the best that the first subject compiles for here.
      rounds: samples of each contender. seconds: no case is begun after so many; None: all are.
      every_peer: time those too that calls of a suite have shown to be far behind.
    """

    cases: Sequence[TimedCase]
    subjects: Sequence[Backend]
    against: Sequence[Backend]
    device: str | None = None
    rounds: int = ROUNDS
    seconds: float | None = None
    every_peer: bool = False

    @property
    def lead(self) -> Backend:
        return self.subjects[0]


@dataclass
class Outcome:
    """``rows``: one a contender and call; ``rates``: the measured roof; ``left_out``: cases that time did not reach;
    ``unserved``: (case, why) of those that arrays could not be made for; ``spent``: where the seconds went;
    ``recorder``: the one clock of all contenders, if there is one; ``behind``: which peers were far behind;
    ``took``: call -> the seconds that it cost."""

    rows: list[Row] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    left_out: list[TimedCase] = field(default_factory=list)
    unserved: list[tuple[TimedCase, str]] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)
    recorder: Recorder | None = None
    behind: Behind = field(default_factory=Behind)
    took: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Helped:
    """What other processes do meanwhile: ``foresight`` of what is expected, and compiling ``ahead``."""

    foresight: Foresight | None = None
    ahead: Ahead = field(default_factory=Ahead)

    def next(self, cases: Sequence[TimedCase], seconds: float = math.inf) -> TimedCase:
        """The first of these of which all is done that others do; where there is none within ``seconds``, nor within
        those that a visit is waited for, one that was visited, or the very first."""
        end = time.monotonic() + min(seconds, self.ahead.longest)
        while (done := self._done(cases)) is None and (left := end - time.monotonic()) > 0:
            wait([*self.ahead.pending(cases), *self._foreseen(cases)], left, FIRST_COMPLETED)
        return self.ahead.next(cases if done is None else [done])

    def _done(self, cases: Sequence[TimedCase]) -> TimedCase | None:
        known = (c for c in cases if self.foresight is None or self.foresight.is_ready(c))
        return next((c for c in known if self.ahead.is_ready(c)), None)

    def _foreseen(self, cases: Sequence[TimedCase]) -> list[Future[Any]]:
        return self.foresight.pending(cases) if self.foresight else []


def run(
    plan: Plan,
    done: Callable[[Outcome, TimedCase], None],
    start: float | None = None,
    helped: Helped = Helped(),
) -> Outcome:
    """Carry a plan out. ``done`` is called after each case with all that is known by then.

    ``start``: when the plan's seconds began, in ``time.perf_counter``'s time; None: now. ``helped``: by what other
    processes do meanwhile.

    Raises:
      DeviceLost: the device is unusable; what was measured before was handed to ``done``.
    """
    now = time.perf_counter()
    start = now if start is None else start
    found, calls, ahead = Outcome(spent=Spent({"before the first call": now - start})), set[str](), helped.ahead
    found.behind.every = plan.every_peer
    with found.spent.on("the roof"), ahead.quiet():
        framework, device, _ = here(plan.lead, plan.device)
        found.recorder = one_clock((*plan.subjects, *plan.against), plan.device)
        found.rates = roof.measure(framework.instruments(device), found.recorder, plan.rounds)
    left = list(plan.cases)
    while left:
        with found.spent.on("waiting for compilers"):
            case = helped.next(left, math.inf if plan.seconds is None else start + plan.seconds - time.perf_counter())
        if plan.seconds is not None and time.perf_counter() - start > plan.seconds:
            found.left_out = left  # it was waited for until the end
            break
        left, begun = [other for other in left if other is not case], time.perf_counter()
        try:
            trial = _Trial(plan, case, found, helped)
            if trial.call not in calls:  # options of two forward calls may be none of their gradients'
                rows = trial.rows()
                found.behind.note(case, rows)
                found.rows += rows
            calls.add(trial.call)
            found.took[trial.call] = time.perf_counter() - begun
        except (SpecError, UnsupportedError) as e:
            found.unserved.append((case, str(e)))
        done(found, case)
    return found


def visit(plan: Plan, case: TimedCase, enough: Callable[[], bool] = lambda: False) -> Visit:
    """Run every contender of a case once, and time nothing: kernels are compiled, and their compilers' caches on disk
    know them; and compute what is expected where that needs a device. ``enough``: asked before each contender, whether
    to leave out the others, and what is expected."""
    spent, runs = Spent(), dict[tuple[Target, bool], None]()
    with spent.on("arrays"):
        trial = _Trial(plan, case, Outcome(), Helped())
    for contender in trial.among:
        if enough():
            return Visit(spent.seconds)
        try:
            with spent.on(contender.backend.name), within(VISITED):
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
        return Visit(spent.seconds, trial.foreseen(runs))


def of_gradient(forward: Inputs, lead: Backend, right: Callable[[Inputs], bool] = lambda inputs: False) -> Inputs:
    """The inputs of the gradients. What the forward op saves for them, which ``lead`` computes, is held to its bound
    like any result, unless these inputs are known to be ``right``, or need not be.

    Raises:
      UnsupportedError: it is wrong.
    """
    choice, wired = Choice(lead), wiring(forward.spec)
    call = wired.training(forward.call)
    outputs = serve(call, routes(call, choice) or (), {})
    names = [o.name for o in forward.spec.outputs]
    inputs = for_gradient(forward, dict(zip(names, outputs, strict=True)))
    if not right(inputs):
        saving = Judge(replace(forward, call=call))
        kept = [o for o in outputs if o is not None]
        verdict = saving.verdict(call.framework, kept, call.target, call.interpret)
        if not verdict.right:
            raise UnsupportedError(f"{forward.spec.name}, which saves for its gradients, is wrong: {verdict.why}")
    return inputs


class _Trial:
    """One case."""

    def __init__(self, plan: Plan, case: TimedCase, found: Outcome, helped: Helped) -> None:
        self.plan, self.case, self.rates, self.spent, self.ahead = plan, case, found.rates, found.spent, helped.ahead
        self.recorder, self.behind = found.recorder, found.behind
        self.framework, self.device, self.target = here(plan.lead, plan.device)
        with self.spent.on("arrays"):
            forward = make(case, self.framework, self.device)
        foresight, foreseen = helped.foresight, helped.ahead.foreseen(case)
        self.saves = sorted(wiring(forward.spec).saves(forward.call.options)) if case.gradient else []
        known: Known = {}

        def right(inputs: Inputs) -> bool:
            if foreseen is None or foreseen.saved != inputs.mark(self.saves):
                return False
            known.update(foreseen.known)
            return True

        with self.spent.on("what gradients need"):
            self.inputs = of_gradient(forward, plan.lead, right) if case.gradient else forward
        with self.spent.on("waiting for what is expected"):
            self.judge = foresight.judge(case, self.inputs) if foresight else Judge(self.inputs)
        self.judge.known.update(known)
        self.call = said(case, self.inputs.call)
        self.among = contenders(self.inputs.spec, plan.subjects, plan.against, self.target)

    def foreseen(self, runs: Iterable[tuple[Target, bool]]) -> Foreseen:
        """What is expected of gradients that need what a forward op saved, where they run."""
        for target, interpret in runs:
            self.judge.expect(target, interpret)
        return Foreseen(self.inputs.mark(self.saves), self.judge.known)

    def rows(self) -> list[Row]:
        found: dict[str, Row] = {}
        right: dict[str, tuple[Entry, tuple[Any, ...]]] = {}
        for contender in self.among:
            if self.ahead.compiles(contender.backend):
                self._try(contender, found, right)
        with self.ahead.quiet():
            for contender in self.among:
                if not self.ahead.compiles(contender.backend):
                    self._try(contender, found, right)
            with self.spent.on("timing"):
                times = dict(self._times({n: e for n, (e, _) in right.items()}, found))
        for name, result in times.items():
            entry, before = right[name]
            with self.spent.on("second looks"):
                found[name] = self._settled(found[name], entry, before, result)
        return held_against([found[c.name] for c in self.among])

    def _try(
        self, contender: Contender, found: dict[str, Row], right: dict[str, tuple[Entry, tuple[Any, ...]]]
    ) -> None:
        """Take in the contender's row, and its entry if it is right."""
        name, row = contender.name, started(self.case, self.inputs.call, contender, self.target)
        if far := self.behind.why(self.case, name, contender.subject):
            found[name] = settled(row, FAR_BEHIND, far)
            return
        try:
            entry, outputs, verdict, seconds = self._tried(contender)
        except Refused as e:
            found[name] = settled(row, REFUSED, one_line(str(e)))
            return
        except Exception as e:
            found[name] = settled(row, FAILED, reason(e))
            self._still_there(contender)
            return
        found[name] = judged(row, verdict, entry.tiling, seconds)
        if verdict.right:
            right[name] = entry, outputs

    def _tried(self, contender: Contender) -> tuple[Entry, tuple[Any, ...], Verdict, float]:
        """The contender's first result, in memory that held NaN, what is to be said of it and of inputs that it did not
        leave alone, and the seconds that the first call took, its compilers included."""
        with self.spent.on(f"first calls of {contender.backend.name}"), within(FIRST_CALL):
            entry = ready(contender, self.inputs)
            framework, instruments = entry.framework, entry.instruments
            given = {n: a for n, a in entry.call.arrays.items() if a is not None and not framework.immutable}
            before = {n: framework.copy(a) for n, a in given.items()}
            wanted = entry.call.wants
            instruments.soil(form for n, form in entry.call.outputs.items() if n in wanted)
            start = time.perf_counter()
            outputs = tuple(entry.run())
            instruments.wait(outputs)
            seconds = time.perf_counter() - start
        with self.spent.on("verdicts"):
            for name, array in given.items():
                if not instruments.same(array, before[name]):
                    instruments.put(array, before[name])
                    return entry, outputs, Verdict(False, {}, f"the input {name} was written to"), seconds
            return entry, outputs, self._verdict(entry, outputs), seconds

    def _verdict(self, entry: Entry, outputs: Sequence[Any]) -> Verdict:
        return self.judge.verdict(entry.framework, outputs, entry.call.target, entry.call.interpret)

    def _times(self, entries: dict[str, Entry], found: dict[str, Row]) -> Iterator[tuple[str, Times]]:
        """Times of those that run to the end; whoever raises leaves, and the others begin anew."""
        while entries:
            watches = {n: e.instruments.stopwatch(e.run, self.recorder) for n, e in entries.items()}
            try:
                yield from interleaved(watches, self.plan.rounds).items()
                return
            except CallFailed as e:
                found[e.name] = settled(found[e.name], FAILED, reason(e.__cause__ or e))
                self._still_there(entries.pop(e.name).contender)

    def _settled(self, row: Row, entry: Entry, before: Sequence[Any], times: Times) -> Row:
        """The row with its time, if what the contender gives after being timed is right still: a kernel may be another
        one by then, chosen by an autotuner, and it may keep what it should not."""
        after = tuple(entry.run())
        entry.instruments.wait(after)
        if not all(entry.instruments.same(a, b) for a, b in zip(after, before, strict=True)):
            verdict = self._verdict(entry, after)
            if not verdict.right:
                why = f"right at first; after it was timed: {verdict.why}"
                return {**judged(row, verdict, entry.tiling, row["first_s"]), "why": why, "verdict": WRONG}
        del after
        return timed(row, times, entry.call, self.rates, entry.instruments.peak_bytes(entry.run))

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
