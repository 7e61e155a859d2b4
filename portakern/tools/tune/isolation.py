"""Isolation of candidates: the first call of each on a device runs in another process, which serves many candidates.

A candidate that hangs costs its time limit and this process. One that accesses invalid memory makes the device unusable
for this process alone. A candidate that passed is called and timed in the tuner's process: if it hangs in a later call,
it ends the run. Isolation costs the start of a process, another start after each one that was killed, and one more call
for each candidate.
"""

from __future__ import annotations

from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack

from portakern.core import registry
from portakern.core.observe import say
from portakern.core.targets import HOST
from portakern.processes import SHARING, pool, unsaid
from portakern.tools.bench.inputs import Inputs
from portakern.tools.bench.suites import TimedCase
from portakern.tools.tune.benches import called, inputs_of, launches_find_it, sticky
from portakern.tools.tune.space import Tiling
from portakern.tools.tune.target import TuneTarget, tune_targets

__all__ = ["Isolated"]

SECONDS = 20.0
"""What a first call may take, beside its compilation: a kernel takes milliseconds, to load it some more."""

BEGINNING = 300.0
"""What the process may take to begin and to make a call's arrays."""


class Isolated:
    """The process that makes the first calls. ``compiling``: time limit of a compilation, in seconds."""

    def __init__(self, compiling: float) -> None:
        self.compiling = compiling
        self._stack = ExitStack()
        self._process: ProcessPoolExecutor | None = None
        self._made: dict[str, Future[None]] = {}
        self._unable: set[str] = set()

    def begin(self, case: TimedCase, on: TuneTarget, anew: bool = False) -> None:
        """Have the arrays of a call made there, while this process makes its own. ``anew``: the calls before are done
        with."""
        if anew:
            self._made.clear()
        if case.text in self._made or case.text in self._unable or not worthwhile(case, on):
            return
        who = str(on.target.arch or on.target.platform), on.backend.name, on.family.name
        try:
            try:
                self._made[case.text] = self._living().submit(_prepare, case, who, anew)
            except BrokenProcessPool:  # it ended while nobody asked it for anything, as a system short of memory has it
                self.close()
                self._made[case.text] = self._living().submit(_prepare, case, who, anew)
        except (OSError, BrokenProcessPool) as e:
            self._give_up(case, f"no other process could be started ({type(e).__name__}: {e})")

    def _living(self) -> ProcessPoolExecutor:
        """The process, a new one where there is none."""
        if self._process is None:
            self._process = self._stack.enter_context(pool(1, unsaid(SHARING)))
        return self._process

    def _give_up(self, case: TimedCase, why: str) -> None:
        """Run the candidates of a call in this process, with a message to the user."""
        self._unable.add(case.text)
        self.close()
        say(f"portakern: tune: candidates of {case.timed} run in this process, and one that hangs would end the run: "
            f"{why}")  # fmt: skip

    def refused(self, case: TimedCase, on: TuneTarget, tiling: Tiling) -> str | None:
        """Why a candidate must not be called in this process; None where it ended there, whatever it gave."""
        future = self._called(case, on, tiling) or self._called(case, on, tiling)
        if future is None:
            return None
        found = launches_find_it(on) and not case.layouts
        seconds = SECONDS if found else SECONDS + self.compiling
        try:
            said = future.result(seconds)
        except TimeoutError:
            said = f"hung: no result after {seconds:g} s, and its process was killed"
        except BrokenProcessPool:
            said = "died: its process ended"
        if said is not None:
            self.close()
        return said

    def _called(self, case: TimedCase, on: TuneTarget, tiling: Tiling) -> Future[str | None] | None:
        """The call of a candidate, begun; None where there is no process to call it, or none any more."""
        self.begin(case, on)
        if case.text not in self._made or self._process is None:
            return None
        try:
            wait(self._made.values(), BEGINNING)  # those of other calls too: they would disturb who is timed next
            self._made[case.text].result(0)
        except Exception as e:
            self._give_up(case, f"another process could not make the call ({type(e).__name__}: {e})")
            return None
        try:
            return self._process.submit(_call, case.text, dict(tiling))
        except BrokenProcessPool:  # it ended after the candidate before, which had counted
            self.close()
            return None

    def yields(self, case: TimedCase) -> bool:
        """Give back the memory that the process holds of the device, since that of this one ran out; whether there was
        a process."""
        if self._process is None:
            return False
        self._give_up(case, "the device has too little memory for a second process")
        return True

    def close(self) -> None:
        """End the process, whatever it is at; another takes its place when one is needed."""
        self._stack.close()
        self._process = None
        self._made.clear()


def worthwhile(case: TimedCase, on: TuneTarget) -> bool:
    """Whether a call is on a device that another process can use too, by a backend that it finds."""
    if not on.is_here or on.interpret or on.target.platform == HOST.platform:
        return False
    shared = on.framework.instruments(on.device).shared
    return shared and registry.importable(case.spec, on.backend)


# --------------------------------------------------------------------------------------------------- in that process

_held: dict[str, tuple[TuneTarget, Inputs]] = {}
"""The calls that candidates are of, all of one key."""


def _prepare(case: TimedCase, who: tuple[str, str, str], anew: bool) -> None:
    """Make a call's arrays, for a target, a backend and a variant; ``anew``: those of the calls before are let go."""
    if anew:
        _held.clear()
    (on, *_) = tune_targets(case.spec, *who)
    _held[case.text] = on, inputs_of(case, on)


def _call(name: str, tiling: dict[str, int]) -> str | None:
    """Why whoever calls a candidate can do nothing more with the device; None where it ended, with or without an
    error: its results, and what it raises, are judged elsewhere."""
    on, inputs = _held[name]
    try:
        outputs = called(inputs, on, tiling)
        on.framework.instruments(on.device).wait(outputs)
    except Exception as e:
        return f"left the device unusable: {str(e).splitlines()[0]}" if sticky(e) else None
    return None
