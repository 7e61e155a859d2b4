"""Run cases, hold every element to its bound, and report."""

from __future__ import annotations

import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from portakern.core import registry
from portakern.core.backend import Backend
from portakern.core.binder import bind
from portakern.core.call import Call
from portakern.core.framework import Framework
from portakern.errors import SpecError, UnsupportedError
from portakern.spec import Edge, Spec
from portakern.testing.cases import Buffer, Case, edges
from portakern.testing.laws import LawCase, run_law
from portakern.testing.strategies import Limits, cases
from portakern.testing.subject import Subject, backend_subject, backend_variants, function_subject
from portakern.testing.verdict import Broken, compare_call

__all__ = ["Failure", "Report", "check", "replay"]

EDGE_EXAMPLES = 5
FREE_RUN = 25  # free cases that one run of Hypothesis draws: parts of a check that may go to different processes


@dataclass(frozen=True)
class Failure:
    """A case that broke the contract. ``reproduce`` is a line for a shell or for Python (see :class:`Subject`); ``case`` the same for :func:`replay`."""

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
      refused: reason -> number of cases refused with it, all of them declared by the backend (an undeclared refusal is a failure).
      tilings_refused: reason -> number of drawn tilings that were not legal for their case, which then ran with the default.
      cells: "dtype | regime | edge | tiling" -> number of compared cases.
      layouts, edges, laws: name -> number of compared cases.
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
    tilings_refused: Counter[str] = field(default_factory=Counter)
    cells: Counter[str] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)
    edges: Counter[str] = field(default_factory=Counter)
    laws: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failures and self.examples + sum(self.laws.values()) > 0

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}  # asdict() counts a Counter's pairs
        plain = {k: dict(sorted(v.items())) if isinstance(v, Counter) else v for k, v in plain.items()}
        return {**plain, "failures": [asdict(f) for f in self.failures], "passed": self.passed}

    def merge(self, other: Report) -> Report:
        """This report and that of another shard of the same check, as one; seconds add up."""
        worst = {k: max(self.worst.get(k, 0.0), other.worst.get(k, 0.0)) for k in {**self.worst, **other.worst}}
        worse = max(other.worst.values(), default=0.0) > max(self.worst.values(), default=0.0)
        subject = self.subject if other.subject in self.subject else f"{self.subject}; {other.subject}"
        return Report(
            self.op, subject, self.seed, self.examples + other.examples, self.failures + other.failures, worst,
            other.worst_case if worse else self.worst_case, self.refused + other.refused, self.tilings_refused + other.tilings_refused,
            self.cells + other.cells, self.layouts + other.layouts, self.edges + other.edges, self.laws + other.laws, self.seconds + other.seconds,
        )  # fmt: skip

    def count(self, case: Case, tiling: str) -> None:
        self.examples += 1
        self.cells[f"{case.dtype} | {case.regime} | {case.edge or '-'} | {tiling}"] += 1
        self.layouts.update({*case.layouts.values()} or {"contiguous"})
        if case.edge:
            self.edges[case.edge] += 1


def check(
    op: str | Spec[Any],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    fn: Callable[..., Any] | None = None,
    framework: str = "numpy",
    device: str | None = None,
    dtypes: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    max_examples: int = 100,
    seed: int = 0,
    limits: Limits | None = None,
    profile: str | None = None,
    shrink: bool = True,
    shard: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Check an implementation against the oracle on generated cases: up to half on the spec's named edges (at least 5 an edge from 300 examples on), the rest
    drawn freely, and as many instances of each law as there are examples of an edge.

    Args:
      op: the op's name or spec.
      backend: a backend's name, or a Backend that nobody registered;
      variant: one of the backend's variants of the op; None: each that runs there, one after the other, with all the examples; or
      fn: any callable with the op's arguments, or some of them: optional arrays and options that it does not take are not drawn.
      framework: whose arrays ``fn`` takes: numpy, torch or jax.
      device: cpu, cuda, rocm or tpu; None: the best one here that the backend serves.
      dtypes: restrict the op's dtype to these.
      only: visit these edges and no others (see :func:`portakern.testing.edges`), with all the examples.
      max_examples: number of cases; seed: which ones.
      limits: sizes of the cases, and which arguments may be drawn; None: small where they are interpreted.
      profile: a profile that the backend declares (``Backend.profiles``), such as a stricter interpreter.
      shrink: make a failing case as small as possible; False stops at the first one.
      shard: (i, n): only the i-th of n parts of the work; :meth:`Report.merge` puts the parts together. What is drawn does not depend on n.
      progress: called with the number of cases done so far.

    Returns:
      A report; ``report.passed`` is False if any case broke the contract.

    Raises:
      SpecError: neither or both of backend and fn, unknown names. UnavailableError: the backend cannot run here.
    """
    spec = registry.find_spec(op) if isinstance(op, str) else op
    several = () if backend is None or variant is not None else backend_variants(spec, backend, device)
    if len(several) > 1:
        every = functools.partial(
            check, op, backend=backend, device=device, dtypes=dtypes, only=only, max_examples=max_examples, seed=seed,
            limits=limits, profile=profile, shrink=shrink, shard=shard, progress=progress,
        )  # fmt: skip
        return functools.reduce(Report.merge, (every(variant=name) for name in several))
    subject = _subject(spec, backend, variant, fn, framework, device, profile)
    report = Report(spec.name, subject.name, seed)
    limits = limits or Limits()
    limits = replace(
        limits,
        dtypes=tuple(dtypes or limits.dtypes),
        arguments=subject.arguments if limits.arguments is None else limits.arguments,
    )
    start = time.perf_counter()
    runs = _plan(spec, limits, max_examples, only)
    with subject.context():
        _carry_out(subject, limits, runs, only is None, seed, report, shrink, shard, progress)
    report.seconds = time.perf_counter() - start
    return report


def _carry_out(subject: Subject, limits: Limits, runs: list[tuple[Edge | None, int]], with_laws: bool, seed: int, report: Report, shrink: bool,
               shard: tuple[int, int], progress: Callable[[int], None] | None) -> None:  # fmt: skip
    part, parts = shard
    for number, (edge, n) in enumerate(runs):
        if not report.failures and number % parts == part:
            _explore(subject, limits, edge, n, seed * 1000 + number, report, shrink, progress)
    for number, name in enumerate(subject.spec.laws if limits.arguments is None and with_laws else ()):
        if not report.failures and number % parts == part:
            _instances(subject, name, limits, runs[0][1], number, seed, report)


def _plan(
    spec: Spec[Any], limits: Limits, max_examples: int, only: Sequence[str] | None
) -> list[tuple[Edge | None, int]]:
    """How many cases to draw on each edge, and (None) on none."""
    known = edges(spec)
    for name in only or ():
        if name not in known:
            raise SpecError(f"check({spec.name!r}): edge {name!r} is unknown; expected one of {', '.join(known)}")
    corners = [
        e
        for e in known.values()
        if (only is None or e.name in only) and all(limits.takes(name) for name in (*e.options, *e.given))
    ]
    if only is not None:
        return [(e, max(1, max_examples // len(corners))) for e in corners]
    each = max(1, min(EDGE_EXAMPLES, max_examples // (2 * len(corners))))
    visited = corners[: max_examples // (2 * each)]
    free = max_examples - each * len(visited)
    return [
        *((e, each) for e in visited),
        *((None, n) for n in (FREE_RUN,) * (free // FREE_RUN) + (free % FREE_RUN,) if n),
    ]


def replay(
    op: str | Spec[Any],
    case: str | Case | LawCase,
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    fn: Callable[..., Any] | None = None,
    framework: str = "numpy",
    device: str | None = None,
    profile: str | None = None,
) -> Report:
    """Run one case of a failure again; arguments as for :func:`check`."""
    spec = registry.find_spec(op) if isinstance(op, str) else op
    subject = _subject(spec, backend, variant, fn, framework, device, profile)
    report = Report(spec.name, subject.name, 0)
    if isinstance(case, str):
        case = LawCase(**json.loads(case)) if "law" in json.loads(case) else Case.from_json(case)
    with subject.context():
        _attempt(subject, case, report)
    return report


def _subject(
    spec: Spec[Any],
    backend: str | Backend | None,
    variant: str | None,
    fn: Callable[..., Any] | None,
    framework: str,
    device: str | None,
    profile: str | None,
) -> Subject:
    if (backend is None) == (fn is None):
        raise SpecError(f"check({spec.name!r}): pass either backend= or fn=, one of the two")
    if backend is not None:
        return backend_subject(spec, backend, variant, device, profile)
    for name, value in (("profile", profile), ("variant", variant)):
        if value is not None:
            raise SpecError(
                f"check({spec.name!r}): {name} is {value!r}; a function has none, only a backend: pass backend="
            )
    return function_subject(spec, fn, framework, device)


def _attempt(subject: Subject, case: Case | LawCase, report: Report) -> None:
    """Run a case; a failure goes into the report."""
    try:
        if isinstance(case, LawCase):
            run_law(subject, case)
            report.laws[case.law] += 1
        else:
            _run(subject, case, report)
    except Exception as e:
        report.failures.append(_failure(subject, case, e))


def _instances(subject: Subject, law: str, limits: Limits, count: int, number: int, start: int, report: Report) -> None:
    """The dtype that comes first differs from law to law: there may be fewer instances than dtypes."""
    for i in range(count):
        if not report.failures:
            _attempt(subject, LawCase(law, limits.dtypes[(number + i) % len(limits.dtypes)], start * 1000 + i), report)


def _explore(subject: Subject, limits: Limits, edge: Edge | None, count: int, start: int, report: Report, shrink: bool,
             progress: Callable[[int], None] | None) -> None:  # fmt: skip
    failed: list[tuple[Case, Exception]] = []
    seen: list[Case] = []

    @hypothesis_seed(start)
    @settings(max_examples=count + 1, database=None, deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
              phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,), print_blob=False, derandomize=False)  # fmt: skip
    @given(cases(subject.spec, limits, subject.tiles, edge))
    def one(case: Case) -> None:
        seen.append(case)
        if len(seen) == 1 or (
            failed and not shrink
        ):  # Hypothesis begins with the simplest case of all, the same for every seed
            return
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
        # what fails once and not again (Hypothesis calls it flaky: a dead device, a race) is the first failure; what came after may be its consequence
        case, error = next(((c, x) for c, x in reversed(failed) if type(x) is type(e)), failed[0])
        report.failures.append(_failure(subject, case, error))


def _failure(subject: Subject, case: Case | LawCase, error: Exception) -> Failure:
    text = case.to_json()
    what = str(error) if isinstance(error, Broken) else f"raised {type(error).__name__}: {error}"
    named = (f"law {case.law}: " if isinstance(case, LawCase) else f"edge {case.edge}: " if case.edge else "") + what
    return Failure(subject.spec.name, named, text, subject.reproduce(text))


def _run(subject: Subject, case: Case, report: Report) -> None:
    """Run one case; raise Broken where the contract is."""
    spec, fw = subject.spec, subject.framework
    buffers = case.buffers(spec)
    arrays = {n: fw.strided(b.memory.copy(), b.shape, b.strides, b.offset, subject.device) for n, b in buffers.items()}
    reference = bind(spec, **{n: b.view() for n, b in buffers.items()}, **case.options)
    reference.target, reference.interpret = subject.target, subject.interpret
    positional = [arrays[a.name] for a in spec.arrays if not a.optional]
    named = {a.name: arrays[a.name] for a in spec.arrays if a.optional and a.name in arrays}
    overrides, tiling, illegal = subject.tiling(case)
    run = subject.run(overrides)
    try:
        with fw.poisoned():
            got = run(*positional, **named, **case.options)
    except UnsupportedError as e:
        if not subject.accepts(str(e)):
            raise Broken(f"refused, and the backend does not declare it among its refusals: {e}") from e
        report.refused[str(e).partition("cannot: ")[2] or str(e)] += 1
        return
    outputs = _given(got)
    regime = (
        "" if case.edge or case.masks or "expanded" in case.layouts.values() else case.regime
    )  # planted or repeated values are not random
    fractions = _compare_all(reference, outputs, fw, arrays, tiling, regime)
    _check_inputs_untouched(subject, buffers, arrays)
    again = run(*positional, **named, **case.options)
    for first, second in zip(outputs, _given(again), strict=True):
        if fw.to_numpy(first).tobytes() != fw.to_numpy(second).tobytes():
            raise Broken("the same call twice gave different bits")
    for name, fraction in fractions.items():
        if fraction >= max(report.worst.values(), default=0.0):
            report.worst_case = case.to_json()
        report.worst[name] = max(report.worst.get(name, 0.0), fraction)
    if illegal:
        report.tilings_refused[illegal] += 1
    report.count(case, " ".join(f"{k}={v}" for k, v in overrides.items()) or "default")


def _given(result: Any) -> tuple[Any, ...]:
    """The outputs that a call gave: gradients that it did not want are None."""
    return tuple(o for o in result if o is not None) if isinstance(result, tuple) else (result,)


def _compare_all(
    call: Call,
    outputs: tuple[Any, ...],
    fw: Framework,
    inputs: Mapping[str, Any],
    tiling: Mapping[str, int],
    regime: str,
) -> dict[str, float]:
    if len(outputs) != len(call.wants):
        raise Broken(f"{len(outputs)} outputs came back; expected {len(call.wants)}: {', '.join(call.wants)}")
    values = []
    for name, out in zip(call.wants, outputs, strict=True):
        if not fw.owns(out):
            raise Broken(f"{name} came back as a {type(out).__name__}; expected a {fw.name} array")
        if not fw.contiguous(out):
            raise Broken(f"{name} is not contiguous")
        values.append(fw.to_numpy(out))
        for other, array in inputs.items():
            if np.may_share_memory(values[-1], fw.to_numpy(array)):
                raise Broken(f"{name} shares memory with the input {other}")
    return compare_call(call, values, tiling, regime)


def _check_inputs_untouched(subject: Subject, buffers: Mapping[str, Buffer], arrays: Mapping[str, Any]) -> None:
    for name, b in buffers.items():
        shown = subject.framework.to_numpy(arrays[name]).astype(b.memory.dtype, copy=False)  # JAX holds int64 as int32
        if shown.tobytes() != b.view().tobytes():
            raise Broken(f"the input {name} was written to")
