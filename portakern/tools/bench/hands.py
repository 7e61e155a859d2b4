"""Who times cases: this process, or several others, of which each is alone with the device while it reads a clock.

Most of what a case takes is no timing: arrays are made, results held to their bounds, programs traced again. While one
process is at that, another has the device."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from portakern.core import registry
from portakern.core.framework import frameworks
from portakern.errors import SpecError, UnsupportedError
from portakern.processes import pool
from portakern.tools.bench import roof
from portakern.tools.bench.ahead import Ahead
from portakern.tools.bench.behind import Behind
from portakern.tools.bench.contenders import here, one_clock
from portakern.tools.bench.floor import Seat, open_floor
from portakern.tools.bench.plan import Plan
from portakern.tools.bench.rows import Row
from portakern.tools.bench.spent import Spent
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.trial import Stand, Told, Trial, visit
from portakern.tools.bench.warming import shared

__all__ = ["HANDS", "Asked", "Hand", "Here", "Measured", "alone", "hands"]

HANDS = 2
"""Processes that time: while one has the device, the others stand still, so that more have ever less to do."""

WAITING = -1
"""The number at the floor of processes that never time."""


class Asked(NamedTuple):
    """A case to time, with what other processes found out of it, who was behind so far, the calls that were timed, and
    the measured roof."""

    case: TimedCase
    told: Told
    behind: Behind
    calls: frozenset[str]
    rates: dict[str, float]


@dataclass(frozen=True)
class Measured:
    """``call``: in words; ``rows``: none of a call that was timed before; ``unserved``: why arrays cannot be made for
    it; ``seconds``: where they went; ``took``: all of them."""

    call: str = ""
    rows: list[Row] = field(default_factory=list)
    unserved: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    took: float = 0.0


class Hand(Protocol):
    """Who times one case after another."""

    def roof(self) -> Future[dict[str, float]]:
        """The limits of the device, measured."""

    def time(self, asked: Asked) -> Future[Measured]:
        """Time a case. Of the errors that come out of the future, DeviceLost ends the run."""

    def end(self) -> None:
        """Stop, whatever it is at: a kernel that waits for itself keeps its process for ever."""


class Here(Hand):
    """This process, which is at it until a case is timed."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand

    def roof(self) -> Future[dict[str, float]]:
        future: Future[dict[str, float]] = Future()
        future.set_result(_roof(self.stand))
        return future

    def time(self, asked: Asked) -> Future[Measured]:
        future: Future[Measured] = Future()
        try:
            future.set_result(_measured(self.stand, asked))
        except Exception as e:
            future.set_exception(e)
        return future

    def end(self) -> None:
        """While anybody waits it is at nothing."""


class Another(Hand):
    """Another process; ``asked``: what :func:`_sit` takes."""

    def __init__(self, process: ProcessPoolExecutor, *asked: Any) -> None:
        self.process = process
        self.seated = process.submit(_sit, *asked)

    def roof(self) -> Future[dict[str, float]]:
        self.seated.result()
        return self.process.submit(_roof)

    def time(self, asked: Asked) -> Future[Measured]:
        if self.seated.done():
            self.seated.result()
        return self.process.submit(_measured, None, asked)

    def end(self) -> None:
        for process in list((self.process._processes or {}).values()):
            process.kill()


def alone(plan: Plan, ahead: Ahead) -> list[Hand]:
    """This process, which times by itself."""
    return [Here(Stand(plan, visited=ahead.visited))]


@contextmanager
def hands(plan: Plan, ahead: Ahead, several: int = HANDS) -> Iterator[list[Hand]]:
    """``several`` processes that time the cases of a plan, and end with the block; this one where ``ahead`` visits
    nothing, as on a device that no two processes can share."""
    if ahead.processes is None or several < 1:
        yield alone(plan, ahead)
        return
    names = plan.lead.name, [b.name for b in plan.subjects], [b.name for b in plan.against]
    numbers = range(several)
    with ExitStack() as ends:
        pools = {n: ends.enter_context(pool(1, shared(several))) for n in numbers} | {WAITING: ahead.processes}
        floor = ends.enter_context(open_floor(pools, lambda: any(map(ahead.is_ready, plan.cases))))
        bare = replace(plan, subjects=(), against=())
        yield [Another(pools[n], floor.address, n, bare, names, ahead.visited) for n in numbers]


_stand: list[Stand] = []
"""Of a process that times, the one that it has."""


def _sit(
    address: str, number: int, bare: Plan, names: tuple[str, list[str], list[str]], visited: frozenset[str]
) -> None:
    """Take a seat, and load what first calls will need."""
    _, subjects, against = names
    seat = Seat(address, number)
    plan = replace(
        bare, subjects=[registry.backend(n) for n in subjects], against=[registry.backend(n) for n in against]
    )
    _stand[:] = [Stand(plan, quiet=seat.alone, visited=visited, clock=seat.clock, shared=True)]
    _load(_stand[0], seat)


def _load(stand: Stand, seat: Seat) -> None:
    """Load in this process what the first call of each op has its libraries load, some of which take ten seconds, until
    any case was visited: a case of each op, those of the fewest dimensions first, whose kernels compile the fastest."""
    plan = stand.plan
    for name in {b.framework for b in (*plan.subjects, *plan.against) if b.unavailable() is None}:
        with suppress(Exception):  # who needs it will meet this again, and say it
            frameworks()[name].load()
            frameworks()[name].devices()
    others = [b for b in (*plan.subjects[1:], *plan.against) if b.name in stand.visited]
    plan = replace(plan, subjects=plan.subjects[:1], against=others)
    for case in sorted({c.timed: c for c in reversed(plan.cases)}.values(), key=lambda c: len(c.dims)):
        if seat.enough():
            return
        with suppress(Exception):
            visit(plan, case, seat.enough)


def _roof(stand: Stand | None = None) -> dict[str, float]:
    stand = stand or _stand[0]
    _clocked(stand)
    framework, device, _ = here(stand.plan.lead, stand.plan.device)
    with stand.quiet():
        return roof.measure(framework.instruments(device), stand.recorder, stand.plan.rounds)


def _clocked(stand: Stand) -> None:
    """Find the one clock of all contenders, once."""
    if stand.recorder is None:
        stand.recorder = one_clock((*stand.plan.subjects, *stand.plan.against), stand.plan.device)


def _measured(stand: Stand | None, asked: Asked) -> Measured:
    stand = stand or _stand[0]
    _clocked(stand)
    stand.rates, stand.spent = asked.rates, Spent(clock=stand.clock)
    begun = stand.clock()
    try:
        call, rows = _rows(stand, asked)
    except (SpecError, UnsupportedError) as e:
        return Measured(unserved=str(e), seconds=stand.spent.seconds)
    finally:
        if stand.shared:  # what a library keeps for its next call is missing elsewhere
            framework, device, _ = here(stand.plan.lead, stand.plan.device)
            framework.instruments(device).release()
    return Measured(call, rows, None, stand.spent.seconds, stand.clock() - begun)


def _rows(stand: Stand, asked: Asked) -> tuple[str, list[Row]]:
    """The call in words, and its rows where it was not timed before; no array is left behind."""
    trial = Trial(stand, asked.case, asked.told, asked.behind)
    return trial.call, [] if trial.call in asked.calls else trial.rows()
