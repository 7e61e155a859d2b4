"""Each candidate's first call on a device is made in another process, which lives on and serves many: one that never
ends costs its seconds and that process, and one that reads memory where there is none spoils the device for that
process alone. With it ends its context of the device, and what it had begun there. What ended there is called and timed
here: a candidate that waits for ever at a later call still ends the run.

It costs that process's beginning, once and after each that was killed, and one more call a candidate. On two cores
that others used too, 60 candidates of softmax of 64 x 512 by Triton's interpreter took 36.1 and 35.6 s for 27.5 and
27.0: 8.6 more, which is the beginning (8.1 and 8.9); their calls there, 40 ms of the 450 that a candidate takes in all,
are not seen beside what the others' work changes. On a GPU it was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from portakern.core import registry
from portakern.core.observe import say
from portakern.core.targets import HOST
from portakern.processes import SHARING, pool, unsaid
from portakern.tools.bench.inputs import Inputs
from portakern.tools.bench.suites import TimedCase
from portakern.tools.tune.asked import Asked
from portakern.tools.tune.judges import called, inputs_of, launches_find_it, sticky
from portakern.tools.tune.place import Place, places
from portakern.tools.tune.space import Tiling

__all__ = ["Apart", "calling_apart"]

SECONDS = 20.0
"""What a first call may take, beside its compilation: a kernel takes milliseconds, to load it some more."""

BEGINNING = 300.0
"""What the process may take to begin and to make a call's arrays."""


class _Who(NamedTuple):
    """A call and who serves it, as another process finds them."""

    case: TimedCase
    target: str
    backend: str
    variant: str


class Apart:
    """The process that calls candidates first. ``compiling``: seconds that a compilation may take."""

    def __init__(self, compiling: float) -> None:
        self.compiling = compiling
        self._stack = ExitStack()
        self._process: ProcessPoolExecutor | None = None
        self._made: dict[str, Future[None]] = {}
        self._unable: set[str] = set()

    def begin(self, asked: Asked, place: Place, anew: bool = False) -> None:
        """Have the arrays of a call made there, while this process makes its own. ``anew``: the calls before are done
        with."""
        if anew:
            self._made.clear()
        if asked.text in self._made or asked.text in self._unable or not worthwhile(asked, place):
            return
        target = str(place.target.arch or place.target.platform)
        who = _Who(asked.case, target, place.backend.name, place.family.name)
        try:
            try:
                self._made[asked.text] = self._living().submit(_prepare, asked.text, who, anew)
            except BrokenProcessPool:  # it ended while nobody asked it for anything, as a system short of memory has it
                self.end()
                self._made[asked.text] = self._living().submit(_prepare, asked.text, who, anew)
        except (OSError, BrokenProcessPool) as e:
            self._give_up(asked, f"no other could be begun ({type(e).__name__}: {e})")

    def _living(self) -> ProcessPoolExecutor:
        """The process, a new one where there is none."""
        if self._process is None:
            self._process = self._stack.enter_context(pool(1, unsaid(SHARING)))
        return self._process

    def _give_up(self, asked: Asked, why: str) -> None:
        """Leave the candidates of a call to this process, which is said."""
        self._unable.add(asked.text)
        self.end()
        say(f"portakern: tune: candidates of {asked.case.timed} are called in this process first, where one that never "
            f"ends would end the run: {why}")  # fmt: skip

    def refused(self, asked: Asked, place: Place, tiling: Tiling) -> str | None:
        """Why a candidate must not be called in this process; None where it ended there, whatever it gave."""
        future = self._called(asked, place, tiling) or self._called(asked, place, tiling)
        if future is None:
            return None
        found = launches_find_it(place) and not asked.case.layouts
        seconds = SECONDS if found else SECONDS + self.compiling
        try:
            said = future.result(seconds)
        except TimeoutError:
            said = f"hung: it had not ended after {seconds:g} s, when the process that called it was killed"
        except BrokenProcessPool:
            said = "died: the process that called it ended"
        if said is not None:
            self.end()
        return said

    def _called(self, asked: Asked, place: Place, tiling: Tiling) -> Future[str | None] | None:
        """The call of a candidate, begun; None where there is no process to call it, or none any more."""
        self.begin(asked, place)
        if asked.text not in self._made or self._process is None:
            return None
        try:
            wait(self._made.values(), BEGINNING)  # those of other calls too: they would disturb who is timed next
            self._made[asked.text].result(0)
        except Exception as e:
            self._give_up(asked, f"another could not make the call ({type(e).__name__}: {e})")
            return None
        try:
            return self._process.submit(_call, asked.text, dict(tiling))
        except BrokenProcessPool:  # it ended after the candidate before, which had counted
            self.end()
            return None

    def yields(self, asked: Asked) -> bool:
        """Give back the memory that the process holds of the device, since that of this one ran out; whether there was
        a process."""
        if self._process is None:
            return False
        self._give_up(asked, "there is no room on the device for a second process")
        return True

    def end(self) -> None:
        """End the process, whatever it is at; another takes its place when one is needed."""
        self._stack.close()
        self._process = None
        self._made.clear()


def worthwhile(asked: Asked, place: Place) -> bool:
    """Whether a call is on a device that another process can use too, by a backend that it finds."""
    if not place.is_here or place.interpret or place.target.platform == HOST.platform:
        return False
    shared = place.framework.instruments(place.device).shared
    return shared and registry.importable(asked.spec, place.backend)


@contextmanager
def calling_apart(compiling: float) -> Iterator[Apart]:
    """Who calls candidates first, until the context ends."""
    apart = Apart(compiling)
    try:
        yield apart
    finally:
        apart.end()


# --------------------------------------------------------------------------------------------------- in that process

_held: dict[str, tuple[Place, Inputs]] = {}
"""The calls that candidates are of, all of one key."""


def _prepare(name: str, who: _Who, anew: bool) -> None:
    """Make a call's arrays; ``anew``: those of the calls before are let go."""
    if anew:
        _held.clear()
    asked = Asked(who.case)
    (place, *_) = places(asked.spec, who.target, who.backend, who.variant)
    _held[name] = place, inputs_of(asked, place)


def _call(name: str, tiling: dict[str, int]) -> str | None:
    """Why whoever calls a candidate can do nothing more with the device; None where it ended, with or without an
    error: its results, and what it raises, are judged elsewhere."""
    place, inputs = _held[name]
    try:
        outputs = called(inputs, place, tiling)
        place.framework.instruments(place.device).wait(outputs)
    except Exception as e:
        return f"spoilt the device: {str(e).splitlines()[0]}" if sticky(e) else None
    return None
