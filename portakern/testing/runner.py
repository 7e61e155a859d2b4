"""Run cases, compare every element with the oracle within its bound, and report."""

from __future__ import annotations

import inspect
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings

from portakern import dispatch, registry
from portakern.call import Call
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.frameworks import FRAMEWORKS, Framework
from portakern.spec import Spec, Tile
from portakern.testing.cases import Buffer, Case
from portakern.testing.strategies import Limits, cases
from portakern.tolerance import compare

__all__ = ["Failure", "Report", "check", "replay"]


@dataclass(frozen=True)
class Failure:
    """A case that broke the contract. ``reproduce`` is a line for a shell; ``case`` the same for :func:`replay`."""

    op: str
    what: str
    case: str
    reproduce: str

    def __str__(self) -> str:
        return f"{self.op}: {self.what}\n  reproduce: {self.reproduce}"


@dataclass
class Report:
    """What a check found.

    Attributes:
      op, subject: what was checked, on what (backend, device, compiled or interpreted).
      seed: the seed of the run; examples: cases that ran and were compared.
      failures: broken cases, shrunk by Hypothesis; empty when all passed.
      worst: output name -> largest error as a fraction of what is permitted.
      worst_case: the case that reached it.
      refused: reason -> number of cases refused with it.
      covered: counts of compared cases by dtype, regime, layout and tiling.
      seconds: wall time.
    """

    op: str
    subject: str
    seed: int
    examples: int = 0
    failures: list[Failure] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    worst_case: str = ""
    refused: Counter[str] = field(default_factory=Counter)
    covered: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failures and self.examples > 0

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {**asdict(self), "passed": self.passed, "refused": dict(self.refused), "covered": dict(sorted(self.covered.items()))}


class Broken(AssertionError):
    """A case that broke the contract, with what is wrong in words."""


@dataclass
class _Subject:
    """What is being checked: a backend's op on a device, or a bare function."""

    spec: Spec[Any]
    framework: Framework
    device: Any
    call: Callable[[Case], Callable[..., Any]]  # the callable that runs a case
    tiles: Mapping[str, Tile]
    arguments: frozenset[str] | None
    command: str
    name: str


def check(
    op: str | Spec[Any],
    *,
    backend: str | registry.Backend | None = None,
    fn: Callable[..., Any] | None = None,
    framework: str = "numpy",
    device: str | None = None,
    dtypes: Sequence[str] | None = None,
    max_examples: int = 100,
    seed: int = 0,
    limits: Limits | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Check an implementation against the oracle on generated cases.

    Args:
      op: the op's name or spec.
      backend: a registered backend; or
      fn: any callable with the op's arguments, or some of them: optional arrays and options that it does not take are not drawn.
      framework: whose arrays ``fn`` takes: numpy, torch or jax.
      device: cpu, cuda, rocm or tpu; None: the best one here that the backend serves.
      dtypes: restrict the op's dtype to these.
      max_examples: number of cases; seed: which ones.
      limits: sizes of the cases; None: small where they are interpreted.
      progress: called with the number of cases done so far.

    Returns:
      A report; ``report.passed`` is False if any case broke the contract, which is shrunk to the smallest that does.

    Raises:
      SpecError: neither or both of backend and fn, unknown names. UnavailableError: the backend cannot run here.
    """
    spec = registry.find_spec(op) if isinstance(op, str) else op
    if (backend is None) == (fn is None):
        raise SpecError(f"check({spec.name!r}): pass either backend= or fn=, one of the two")
    subject = _backend_subject(spec, backend, device) if backend else _function_subject(spec, fn, framework, device)
    report = Report(spec.name, subject.name, seed)
    limits = limits or Limits()
    limits = replace(limits, dtypes=tuple(dtypes or limits.dtypes), arguments=subject.arguments)
    start = time.perf_counter()
    _explore(subject, limits, max_examples, seed, report, progress)
    report.seconds = time.perf_counter() - start
    return report


def replay(op: str | Spec[Any], case: str | Case, *, backend: str | registry.Backend | None = None, fn: Callable[..., Any] | None = None, framework: str = "numpy",
           device: str | None = None) -> Report:  # fmt: skip
    """Run one case of a failure again; arguments as for :func:`check`."""
    spec = registry.find_spec(op) if isinstance(op, str) else op
    subject = _backend_subject(spec, backend, device) if backend else _function_subject(spec, fn, framework, device)
    report = Report(spec.name, subject.name, 0)
    case = Case.from_json(case) if isinstance(case, str) else case
    try:
        _run(subject, case, report)
    except Exception as e:
        report.failures.append(_failure(subject, case, e))
    return report


def _explore(subject: _Subject, limits: Limits, max_examples: int, start: int, report: Report, progress: Callable[[int], None] | None) -> None:
    failed: list[tuple[Case, Exception]] = []

    @seed(start)
    @settings(max_examples=max_examples, database=None, deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
              phases=(Phase.generate, Phase.shrink), print_blob=False)  # fmt: skip
    @given(cases(subject.spec, limits, subject.tiles))
    def one(case: Case) -> None:
        try:
            _run(subject, case, report)
        except Exception as e:
            failed.append((case, e))
            raise
        if progress:
            progress(report.examples + sum(report.refused.values()))

    try:
        one()
    except Exception as e:
        if not failed:
            raise
        case, error = next(((c, x) for c, x in reversed(failed) if type(x) is type(e)), failed[-1])
        report.failures.append(_failure(subject, case, error))


def _failure(subject: _Subject, case: Case, error: Exception) -> Failure:
    text = case.to_json()
    what = str(error) if isinstance(error, Broken) else f"raised {type(error).__name__}: {error}"
    return Failure(
        subject.spec.name, what, text, f"{subject.command} --case {shlex.quote(text)}" if subject.command else f"portakern.testing.replay(..., {text!r})"
    )


def _run(subject: _Subject, case: Case, report: Report) -> None:
    """Run one case; raise Broken where the contract is."""
    spec, fw = subject.spec, subject.framework
    buffers = case.buffers(spec)
    before = {n: b.memory.copy() for n, b in buffers.items()}
    arrays = {n: fw.strided(b.memory.copy(), b.shape, b.strides, b.offset, subject.device) for n, b in buffers.items()}
    reference = dispatch.op(spec).bind(**{n: b.view() for n, b in buffers.items()}, **case.options)
    positional = [arrays[a.name] for a in spec.arrays if not a.optional]
    named = {a.name: arrays[a.name] for a in spec.arrays if a.optional and a.name in arrays}
    run = subject.call(case)
    try:
        got = run(*positional, **named, **case.options)
    except UnsupportedError as e:
        report.refused[_without_numbers(str(e))] += 1
        return
    outputs = tuple(got) if isinstance(got, tuple) else (got,)
    fractions = _compare_all(reference, outputs, fw)
    _check_inputs_untouched(subject, buffers, before, arrays)
    again = run(*positional, **named, **case.options)
    for first, second in zip(outputs, again if isinstance(again, tuple) else (again,), strict=True):
        if fw.to_numpy(first).tobytes() != fw.to_numpy(second).tobytes():
            raise Broken("the same call twice gave different bits")
    for name, fraction in fractions.items():
        if fraction >= max(report.worst.values(), default=0.0):
            report.worst_case = case.to_json()
        report.worst[name] = max(report.worst.get(name, 0.0), fraction)
    report.examples += 1
    report.covered.update([f"dtype {case.dtype}", f"regime {case.regime}", "tiling drawn" if case.tiling else "tiling default",
                           *(f"layout {v}" for v in {*case.layouts.values()} or {"contiguous"})])  # fmt: skip


def compare_call(call: Call, outputs: Sequence[np.ndarray]) -> dict[str, float]:
    """Output name -> worst fraction of the bound, for the wanted outputs of ``call`` (any framework's); Broken names the first bad element."""
    if call.spec.bound is None:
        raise SpecError(f"{call.spec.name} declares no tolerance; give its spec one with @{call.spec.name}.tolerance")
    wide = dispatch.as_float64(call)
    if call.degenerate:
        exact: tuple[Any, ...] = tuple(None if o is None else np.asarray(o, np.float64) for o in dispatch.degenerate_outputs(wide))
        bounds: tuple[Any, ...] = tuple(None if o is None else np.zeros_like(o) for o in exact)
    else:
        exact = dispatch.oracle(call)
        with np.errstate(all="ignore"):
            bounds = call.spec.bound(wide, exact)
    fractions = {}
    wanted = [(o.name, exact[i], bounds[i]) for i, o in enumerate(call.spec.outputs) if o.name in call.wants]
    for (name, ref, bound), got in zip(wanted, outputs, strict=True):
        shape, dtype = call.outputs[name]
        if got.shape != shape:
            raise Broken(f"{name} has shape {got.shape}; expected {shape}")
        if got.dtype.name != dtype:
            raise Broken(f"{name} is {got.dtype.name}; expected {dtype}")
        result = compare(got, ref, bound, dtype)
        if result.bad.any():
            raise Broken(_describe(name, got, ref, np.broadcast_to(bound, shape), result.bad))
        fractions[name] = float(result.worst)
    return fractions


def _compare_all(call: Call, outputs: tuple[Any, ...], fw: Framework) -> dict[str, float]:
    if len(outputs) != len(call.wants):
        raise Broken(f"{len(outputs)} outputs came back; expected {len(call.wants)}: {', '.join(call.wants)}")
    for name, out in zip(call.wants, outputs, strict=True):
        if not fw.owns(out):
            raise Broken(f"{name} came back as a {type(out).__name__}; expected a {fw.name} array")
        if not fw.contiguous(out):
            raise Broken(f"{name} is not contiguous")
    return compare_call(call, [fw.to_numpy(o) for o in outputs])


def _describe(name: str, got: np.ndarray, ref: np.ndarray, bound: np.ndarray, bad: np.ndarray) -> str:
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
    value, want = np.asarray(got[index], np.float64), ref[index]
    return (
        f"{name}{list(index)} is {value:.9g}; the oracle says {want:.9g}, permitted error {bound[index]:.3g}, "
        f"actual {abs(value - want):.3g}; {int(bad.sum())} of {bad.size} elements are out of bounds"
    )


def _check_inputs_untouched(subject: _Subject, buffers: Mapping[str, Buffer], before: Mapping[str, np.ndarray], arrays: Mapping[str, Any]) -> None:
    for name, b in buffers.items():
        shown = subject.framework.to_numpy(arrays[name]).astype(b.memory.dtype, copy=False)  # JAX holds int64 as int32
        if shown.tobytes() != b._replace(memory=before[name]).view().tobytes():
            raise Broken(f"the input {name} was written to")


def _without_numbers(text: str) -> str:
    """A refusal without the call's own figures, so that equal reasons count together."""
    return text.partition("cannot: ")[2] or text


def _backend_subject(spec: Spec[Any], backend: str | registry.Backend, device: str | None) -> _Subject:
    b = registry.backend(backend)
    name = b.name
    b.check_available()
    fw = FRAMEWORKS[b.framework]
    fw.load()
    for found in fw.devices():
        target = fw.target(found)
        home = b.package_for(target.platform)
        if home and (device is None or device == target.platform):
            break
    else:
        raise UnavailableError(
            f"backend {name!r} serves no {device or 'device'} here; devices of {fw.name}: {', '.join(str(fw.target(d)) for d in fw.devices())}"
        )
    impl = b.implementation(spec.name, home[0])
    if impl is None:
        raise UnsupportedError(f"backend {name!r} has no {spec.name}")
    tiles = {**spec.tiling, **impl.knobs} if not b.oracle else {}

    def caller(case: Case) -> Callable[..., Any]:
        return dispatch.op(spec, backend=b, tiling=_legal(impl, spec, case, fw, target, home[1]))

    how = "interpreted" if home[1] else "compiled" if not b.oracle else "oracle"
    where = f" --device {device}" if device else ""
    return _Subject(spec, fw, found, caller, tiles, None, f"portakern check {spec.name} --backend {name}{where}", f"{name} on {target} ({how})")


def _legal(impl: registry.Implementation, spec: Spec[Any], case: Case, fw: Framework, target: Any, interpret: bool) -> Mapping[str, int]:
    """The case's tiling if the implementation supports it, else its default (an empty override)."""
    if not case.tiling:
        return {}
    call = dispatch.op(spec).bind(**{n: b.view() for n, b in case.buffers(spec).items()}, **case.options)
    call = call.replace(target=target, interpret=interpret)
    if call.degenerate:
        return {}
    if fw.name != "numpy":
        call = dispatch.to_framework(call, fw)
    tiling = {**impl.tiling(call), **case.tiling}
    return {} if impl.supports(call, tiling) else case.tiling


def _function_subject(spec: Spec[Any], fn: Callable[..., Any] | None, framework: str, device: str | None) -> _Subject:
    if not callable(fn):
        raise SpecError(f"check({spec.name!r}): fn is {fn!r}; expected a callable with the op's arguments")
    if framework not in FRAMEWORKS:
        raise SpecError(f"check({spec.name!r}): framework is {framework!r}; expected one of {', '.join(FRAMEWORKS)}")
    fw = FRAMEWORKS[framework]
    fw.load()
    found = next((d for d in fw.devices() if device is None or fw.target(d).platform == device), None)
    if found is None:
        raise UnavailableError(f"{framework} has no {device} device here")
    parameters = inspect.signature(fn).parameters.values()
    arguments = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(p.name for p in parameters)
    name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))} on {fw.target(found)}"
    return _Subject(spec, fw, found, lambda case: fn, {}, arguments, "", name)
