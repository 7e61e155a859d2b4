"""The processes that time cases: this one, or several, of which one at a time has the device while it measures.

Most of the work on a case is not timing: arrays are made, results compared, programs traced. Meanwhile another process
has the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from portakern.core import registry
from portakern.core.framework import frameworks
from portakern.errors import SpecError, UnsupportedError
from portakern.processes import pool
from portakern.tools.bench import roof
from portakern.tools.bench.background import WORKERS, WarmUp, shared
from portakern.tools.bench.contenders import here, one_clock
from portakern.tools.bench.lock import DeviceLock
from portakern.tools.bench.plan import BenchPlan, Spent
from portakern.tools.bench.pruning import Pruned
from portakern.tools.bench.rows import Row
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.trial import Computed, TimingContext, Trial, visit

__all__ = ["BenchWorker", "Here", "Measured", "TimeRequest", "workers"]


class TimeRequest(NamedTuple):
    """A case to time, with the results of other processes for it, the pruned baselines, the calls that were timed, and
    the measured roof."""

    case: TimedCase
    computed: Computed
    pruned: Pruned
    calls: frozenset[str]
    rates: dict[str, float]


@dataclass(frozen=True)
class Measured:
    """The result of a request. ``call``: in words; ``rows``: empty if the call was timed before; ``unserved``: why
    arrays cannot be made for it; ``seconds``: by activity; ``total_seconds``: their sum."""

    call: str = ""
    rows: list[Row] = field(default_factory=list)
    unserved: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0


class BenchWorker:
    """A process that times one case after another. ``request``: what :func:`_ready` takes."""

    def __init__(self, process: ProcessPoolExecutor, *request: Any) -> None:
        self.process, self.readied = process, process.submit(_ready, *request)

    def roof(self) -> Future[dict[str, float]]:
        """The limits of the device, measured."""
        self.readied.result()
        return self.process.submit(_roof)

    def time(self, request: TimeRequest) -> Future[Measured]:
        """Time a case. Of the errors that come out of the future, DeviceLost ends the run."""
        if self.readied.done():
            self.readied.result()
        return self.process.submit(_measured, request)

    def end(self) -> None:
        """Stop, whatever it is at: a kernel that waits for itself keeps its process for ever."""
        for process in list((self.process._processes or {}).values()):
            process.kill()


class Here(BenchWorker):
    """This process as the worker: it times a case at once, and returns a future that is done."""

    def __init__(self, context: TimingContext) -> None:
        self.context = context

    def roof(self) -> Future[dict[str, float]]:
        future: Future[dict[str, float]] = Future()
        future.set_result(_roof(self.context))
        return future

    def time(self, request: TimeRequest) -> Future[Measured]:
        future: Future[Measured] = Future()
        try:
            future.set_result(_measured(request, self.context))
        except Exception as e:
            future.set_exception(e)
        return future

    def end(self) -> None:
        pass


@contextmanager
def workers(plan: BenchPlan, warm: WarmUp, several: int = WORKERS) -> Iterator[list[BenchWorker]]:
    """``several`` processes that time the cases of a plan, and end with the block; this one where ``warm`` visits
    nothing, as on a device that no two processes can share."""
    device = warm.device
    if device is None or several < 1:
        yield [Here(TimingContext(plan, visited=warm.visited))]
        return
    visits = warm.pending(plan.cases)
    device.case_ready.value = len(visits) < len(plan.cases)
    for future in visits:
        future.add_done_callback(lambda _: setattr(device.case_ready, "value", 1))
    names = [b.name for b in plan.subjects], [b.name for b in plan.against]
    bare = replace(plan, subjects=(), against=())
    with ExitStack() as ends:
        begun = [ends.enter_context(pool(1, shared(several), 0, _join, device, n)) for n in range(several)]
        yield [BenchWorker(process, bare, names, warm.visited) for process in begun]


_device: list[DeviceLock] = []
_context: list[TimingContext] = []
"""Of a process that times, those that it has."""


def _join(device: DeviceLock, number: int) -> None:
    device.join(number)
    _device[:] = [device]


def _ready(bare: BenchPlan, names: tuple[list[str], list[str]], visited: frozenset[str]) -> None:
    """Have a context, and load what first calls will need."""
    subjects, against = ([registry.backend(n) for n in group] for group in names)
    (device,) = _device
    plan = replace(bare, subjects=subjects, against=against)
    _context[:] = [TimingContext(plan, quiet=device.exclusive, visited=visited, clock=device.clock, shared=True)]
    _load(plan, visited, device)


def _load(plan: BenchPlan, visited: frozenset[str], device: DeviceLock) -> None:
    """Load in this process what the first call of each op has its libraries load, some of which take ten seconds, until
    any case was visited: a case of each op, those of the fewest dimensions first, whose kernels compile the fastest."""
    for name in {b.framework for b in (*plan.subjects, *plan.against) if b.unavailable() is None}:
        with suppress(Exception):  # who needs it will meet this again, and say it
            frameworks()[name].load()
            frameworks()[name].devices()
    others = [b for b in (*plan.subjects[1:], *plan.against) if b.name in visited]
    plan = replace(plan, subjects=plan.subjects[:1], against=others)
    for case in sorted({c.timed: c for c in reversed(plan.cases)}.values(), key=lambda c: len(c.dims)):
        if device.case_ready.value:
            return
        with suppress(Exception):
            visit(plan, case, lambda: bool(device.case_ready.value))


def _roof(context: TimingContext | None = None) -> dict[str, float]:
    context = context or _context[0]
    _clocked(context)
    framework, device, _ = here(context.plan.lead, context.plan.device)
    with context.quiet():
        return roof.measure(framework.instruments(device), context.recorder, context.plan.rounds)


def _clocked(context: TimingContext) -> None:
    """Find the one clock of all contenders, once."""
    if context.recorder is None:
        context.recorder = one_clock((*context.plan.subjects, *context.plan.against), context.plan.device)


def _measured(request: TimeRequest, context: TimingContext | None = None) -> Measured:
    context = context or _context[0]
    _clocked(context)
    context.rates, context.spent = request.rates, Spent(clock=context.clock)
    begun = context.clock()
    try:
        call, rows = _rows(context, request)
    except (SpecError, UnsupportedError) as e:
        return Measured(unserved=str(e), seconds=context.spent.seconds)
    finally:
        if context.shared:  # what a library keeps for its next call is missing elsewhere
            framework, device, _ = here(context.plan.lead, context.plan.device)
            framework.instruments(device).release()
    return Measured(call, rows, None, context.spent.seconds, context.clock() - begun)


def _rows(context: TimingContext, request: TimeRequest) -> tuple[str, list[Row]]:
    """The call in words, and its rows where it was not timed before; no array is left behind."""
    trial = Trial(context, request.case, request.computed, request.pruned)
    return trial.call, [] if trial.call in request.calls else trial.rows()
