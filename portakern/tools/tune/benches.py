"""The score of a tiling: device time if the target is present, otherwise the compiler's report.

A bench is one call, ready to be judged. Asked for some tilings it says which do not count, and why: the compiler
refuses them, dies of them or never ends, the kernel never ends (``isolation``), the implementation raises, or the
result is not within its bounds. Of the others it gives scores, less being better, which can be compared with each
other and with nothing else: times of one round of turns, or figures of one model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from portakern.api import op
from portakern.core.call import Call
from portakern.core.failing import kind_of
from portakern.core.targets import HOST
from portakern.errors import SpecError
from portakern.tools.bench.background import Background
from portakern.tools.bench.contenders import UserCall
from portakern.tools.bench.inputs import Inputs, make
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.timing import device_times
from portakern.tools.bench.trial import of_gradient
from portakern.tools.bench.verdicts import Expected, Judge
from portakern.tools.compile.abstract import abstract_call
from portakern.tools.compile.build import Build
from portakern.tools.compile.pool import Job, Pool
from portakern.tools.tune.space import Tiling, frozen
from portakern.tools.tune.static import Model, model_of
from portakern.tools.tune.target import TuneTarget

__all__ = [
    "ROUNDS", "Bench", "DeviceBench", "Effort", "Precomputed", "StaticBench", "bench_of", "called", "inputs_of",
    "launches_find_it", "sticky", "survey",
]  # fmt: skip

Key = tuple[tuple[str, int], ...]
Result = TypeVar("Result")
ROUNDS = (3, 20)
"""Samples of each call while candidates are screened, and of the last few."""

Effort = int
"""0: screening; 1: the last few."""


@dataclass(frozen=True)
class Precomputed:
    """Work that other processes did for a call. ``expected``: its results; ``built``: a function that waits, and gives
    tiling -> the compiler's message; ``isolated``: a function that gives the reason why a tiling must not be called
    in this process, or None, after a first call in another process; ``yields``: a function that has this other
    process free its device memory, and says whether there was any."""

    expected: Background[list[Expected]] = field(default_factory=Background)
    built: Callable[[], Mapping[Key, Build]] = dict
    isolated: Callable[[Tiling], str | None] = lambda tiling: None
    yields: Callable[[], bool] = lambda: False


def bench_of(case: TimedCase, on: TuneTarget, pool: Pool, known: Precomputed = Precomputed()) -> Bench:
    """The bench of a call.

    Raises:
      UnsupportedError: the implementation refuses the call under its own default.
    """
    return DeviceBench(case, on, pool, known) if on.is_here else StaticBench(case, on, pool)


def survey(
    case: TimedCase, on: TuneTarget, pool: Pool, tilings: Sequence[Tiling], quick: bool = True
) -> Iterator[tuple[Key, Build]]:
    """What the compiler says of each tiling, in processes of their own, as it comes: of a target that is not here, all
    that it has to say; else what a launch finds then."""
    assert on.hardware is not None
    way = "survey" if on.is_here or not launches_find_it(on) else "build"
    parts = case.spec, on.backend, on.family, on.hardware, case.signature
    jobs = {Job(*parts, tiling=dict(t), quick=quick, mode=way): t for t in tilings}
    for job, built in pool.run([*jobs]):
        yield frozen(jobs[job]), built


def launches_find_it(on: TuneTarget) -> bool:
    """Whether what its compiler makes ahead of time lies where a launch finds it."""
    if on.interpret or on.hardware is None or on.family.compiler is None:
        return False
    return bool(getattr(on.family.load_compiler(), "LAUNCHES_FIND_IT", False))


# -------------------------------------------------------------------------------------------------------------- static


@dataclass
class StaticBench:
    """A call for a chip that is not present. ``metric``, ``unit``: the meaning of a score, in words; ``call``: the
    bound call."""

    case: TimedCase
    on: TuneTarget
    pool: Pool
    call: Call = field(init=False)
    metric: str = field(init=False, default="")
    unit: str = field(init=False, default="")
    _built: dict[Key, Build] = field(init=False, default_factory=dict)
    _model: Model | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        assert self.on.hardware is not None
        spec, impl = self.case.spec, self.on.impl
        self.call, _ = abstract_call(spec, impl, self.case.signature, self.on.hardware, {})

    def build(self, tilings: Sequence[Tiling]) -> None:
        """Have tilings compiled beside each other."""
        new = [t for t in tilings if frozen(t) not in self._built]
        self._built |= dict(survey(self.case, self.on, self.pool, new))

    def refused(self, tilings: Sequence[Tiling]) -> dict[Key, str]:
        """The tilings that do not count, each with the reason."""
        self.build(tilings)
        keys = [frozen(t) for t in tilings]
        return {key: self._built[key].reason or "it gave no reason" for key in keys if not self._built[key].ok}

    def scores(self, tilings: Sequence[Tiling], effort: Effort) -> dict[Key, float]:
        """Scores of tilings that count."""
        self.build(tilings)
        built = {frozen(t): self._built[frozen(t)] for t in tilings}
        model = self.model(next(iter(built.values())))
        if effort and model.estimates:
            longer = dict(survey(self.case, self.on, self.pool, tilings, quick=False))
            if all(
                b.ok and all(k.cycles is not None for k in b.kernels) for b in longer.values()
            ):  # of two kinds of figures one is compared
                built = longer
        return {key: model.score(b, dict(key)) for key, b in built.items()}

    def model(self, built: Build) -> Model:
        """What scores are made of; every call of a bench has the same."""
        if self._model is None:
            assert self.on.hardware is not None
            self._model = model_of(built, self.on.hardware, self.call)
            self.metric, self.unit = self._model.metric, self._model.unit
        return self._model

    def rehearsed(self, tiling: Tiling) -> str | None:
        """Why a tiling gives wrong results in the interpreter of its kernels, on a call that has two tiles a dimension
        at most; None where it gives right ones, or where the kernels have no interpreter."""
        on = self.on
        if not on.family.interprets or on.impl.compiled_alone:
            return None
        framework = on.framework
        device = next(d for d in framework.devices() if framework.target(d).platform == HOST.platform)
        here = replace(on, target=HOST, device=device, interpret=True, hardware=None)
        tiles = {t.of: tiling[n] for n, t in self.case.spec.tiling.items() if t.of and n in tiling}
        dims = {n: _least(extent, tiles.get(n)) for n, extent in self.case.dims.items()}
        try:
            return DeviceBench(replace(self.case, dims=dims), here, self.pool).wrong(tiling)
        except SpecError as e:  # what it is for the chip, it is not here: a tiling that the smaller call cannot have
            return f"cannot be rehearsed: {e}"


def _least(extent: Any, tile: int | None) -> Any:
    """An extent of a rehearsal: one element beyond a tile, or a few."""
    if isinstance(extent, tuple):
        return tuple(min(e, 3) for e in extent[:-1]) + tuple(min(e, (tile or 128) + 1) for e in extent[-1:])
    return min(extent, tile + 1 if tile else 128)


# -------------------------------------------------------------------------------------------------------------- device


class DeviceBench:
    """A call on a device that is present, with its values, and its oracle's result, computed once. It has the methods
    of :class:`StaticBench`."""

    def __init__(self, case: TimedCase, on: TuneTarget, pool: Pool, known: Precomputed = Precomputed()) -> None:
        self.case, self.on, self.pool, self.known = case, on, pool, known
        self.inputs = self._with_room(lambda: inputs_of(case, on))
        expected = known.expected.take(case)
        self.judge = Judge(self.inputs, known={(on.target, False): expected} if expected is not None else {})
        self.judge.expect(on.target, on.interpret)
        self.call = self.inputs.call.replace(target=on.target, interpret=on.interpret)
        self.metric, self.unit = "device time", "us"
        self._known: dict[Key, str | None] = {}
        self._built: set[Key] = set()

    def build(self, tilings: Sequence[Tiling]) -> None:
        new = [t for t in tilings if frozen(t) not in self._built]
        for key, built in self._compiled(new).items():
            self._built.add(key)
            if not built.ok:
                self._known[key] = built.reason or "it gave no reason"

    def refused(self, tilings: Sequence[Tiling]) -> dict[Key, str]:
        new = [t for t in tilings if frozen(t) not in self._known]
        self.build(new)
        for tiling in new:
            if frozen(tiling) not in self._known:
                self._known[frozen(tiling)] = self.known.isolated(tiling) or self.wrong(tiling)
        return {key: why for t in tilings if (why := self._known[key := frozen(t)]) is not None}

    def _compiled(self, tilings: Sequence[Tiling]) -> dict[Key, Build]:
        """What compilers ahead of time say, where a launch finds what they made."""
        if not tilings or not launches_find_it(self.on):
            return {}
        ahead = self.known.built()
        found = {frozen(t): ahead[frozen(t)] for t in tilings if frozen(t) in ahead}
        return found | dict(survey(self.case, self.on, self.pool, [t for t in tilings if frozen(t) not in found]))

    def wrong(self, tiling: Tiling) -> str | None:
        """Why a tiling does not count: it raises, or leaves the bounds. Outputs are poisoned before."""
        framework = self.on.framework
        try:
            outputs = self._with_room(lambda: self._poisoned(tiling))
        except Exception as e:
            if sticky(e):
                raise
            return f"raised {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        verdict = self.judge.verdict(framework, outputs, self.on.target, self.on.interpret)
        errors = ", ".join(f"{name} {worst:.3g} times its bound" for name, worst in verdict.errors.items() if worst > 1)
        return None if verdict.right else f"wrong: {verdict.why}{f' ({errors})' if errors else ''}"

    def scores(self, tilings: Sequence[Tiling], effort: Effort) -> dict[Key, float]:
        runs = {str(i): partial(self._run, t) for i, t in enumerate(tilings)}
        times = self._with_room(lambda: device_times(runs, self.on.framework, self.on.device, ROUNDS[effort]))
        return {frozen(t): times[str(i)].median_us for i, t in enumerate(tilings)}

    def rehearsed(self, tiling: Tiling) -> str | None:
        return None  # it was held to the oracle before it was timed

    def _run(self, tiling: Tiling) -> tuple[Any, ...]:
        return called(self.inputs, self.on, tiling)

    def _poisoned(self, tiling: Tiling) -> tuple[Any, ...]:
        """The outputs, all there, in memory that held NaN."""
        framework = self.on.framework
        with framework.poisoned():
            outputs = self._run(tiling)
        framework.instruments(self.on.device).wait(outputs)
        return outputs

    def _with_room(self, run: Callable[[], Result]) -> Result:
        """What ``run`` gives; where memory runs out, once more with what another process held of it."""
        try:
            return run()
        except Exception as e:
            reason = e.__cause__ or e  # of one that failed while it was timed
            if kind_of(reason) != "memory" or not self.known.yields():
                raise
        self.on.framework.instruments(self.on.device).release()
        return run()


Bench = DeviceBench | StaticBench
"""A call that tilings are judged on."""


def called(inputs: Inputs, on: TuneTarget, tiling: Tiling) -> tuple[Any, ...]:
    """The outputs of a call as a user makes it who names the tiling."""
    named = on.family.name if len(on.backend.families) > 1 else None
    return UserCall(_op(inputs.spec, on.backend, named, frozen(tiling)), inputs.call)()


_ops: dict[Any, Any] = {}


def _op(spec: Any, backend: Any, variant: str | None, tiling: Key) -> Any:
    """The op with a tiling, the same object each time, so that what it has learned of a form is not learned again."""
    key = (spec, backend, variant, tiling)
    if key not in _ops:
        if len(_ops) > 256:
            _ops.clear()
        _ops[key] = op(spec, backend=backend, variant=variant, tiling=dict(tiling))
    return _ops[key]


def sticky(error: Exception) -> bool:
    """Whether a device will answer every later call with the same error: memory was read where there is none."""
    text = str(error).lower()
    return any(
        word in text for word in ("illegal memory", "misaligned address", "device-side assert", "launch failure")
    )


def inputs_of(case: TimedCase, on: TuneTarget) -> Inputs:
    """The arrays of a call; of a gradient those that the forward op of the same backend saves."""
    forward = make(case, on.framework, on.device)
    return of_gradient(forward, on.backend, lambda inputs: True) if case.gradient else forward
