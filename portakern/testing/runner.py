"""Run cases, hold every element to its bound, and report."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.errors import Unsatisfiable

from portakern.core import registry
from portakern.core.backend import Backend
from portakern.core.binder import bind
from portakern.core.call import Call
from portakern.core.framework import Framework
from portakern.errors import SpecError, UnsupportedError
from portakern.spec import Edge, Spec
from portakern.spec.dtypes import numpy_dtype
from portakern.testing import printed
from portakern.testing.cases import Case, edges, generators
from portakern.testing.laws import LawCase, run_law
from portakern.testing.layouts import Buffer
from portakern.testing.report import Failure, Report
from portakern.testing.strategies import Limits, cases, dtypes_of
from portakern.testing.subject import Subject, backend_subject, backend_variants, function_subject
from portakern.testing.verdict import Broken, compare_call

__all__ = ["Failure", "Report", "check", "replay"]

EDGE_EXAMPLES = 5
FREE_RUN = 25  # free cases that one run of Hypothesis draws: parts of a check that may go to different processes


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
    """Check an implementation against the oracle on generated cases: up to half on the spec's named edges (at least 5
    an edge from 300 examples on), the rest drawn freely, and as many instances of each law as there are examples of an
    edge.

    Args:
      op: the op's name or spec.
      backend: a backend's name, or a Backend that nobody registered;
      variant: one of the backend's variants of the op; None: each that runs there, one after the other, with all the
        examples; or
      fn: any callable with the op's arguments, or some of them: optional arrays and options that it does not take are
        not drawn.
      framework: whose arrays ``fn`` takes: numpy, torch or jax.
      device: cpu, cuda, rocm or tpu; None: the best one here that the backend serves.
      dtypes: restrict the op's dtype to these.
      only: visit these edges and no others (see :func:`portakern.testing.edges`), with all the examples.
      max_examples: number of cases; seed: which ones.
      limits: sizes of the cases, and which arguments may be drawn; None: small where they are interpreted.
      profile: a profile that the backend declares (``Backend.profiles``), such as a stricter interpreter.
      shrink: make a failing case as small as possible; False stops at the first one.
      shard: (i, n): only the i-th of n parts of the work; :meth:`Report.merge` puts the parts together. What is drawn
        does not depend on n.
      progress: called with the number of cases done so far.

    Returns:
      A report; ``report.passed`` is False if any case broke the contract.

    Raises:
      SpecError: neither or both of backend and fn, unknown names. UnavailableError: the backend cannot run here.
    """
    spec = registry.find_spec(op) if isinstance(op, str) else op
    if not hasattr(seed, "__index__") or seed < 0:
        raise SpecError(f"check({spec.name!r}): seed is {seed!r}; expected a whole number >= 0")
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
    dtypes_of(spec, limits)  # says so where there is none
    start = time.perf_counter()
    runs = _plan(spec, limits, max_examples, only)
    with subject.context():
        _carry_out(subject, limits, runs, only is None, seed, report, shrink, shard, progress)
    report.seconds = time.perf_counter() - start
    return report


def _carry_out(
    subject: Subject,
    limits: Limits,
    runs: list[tuple[Edge | None, int]],
    with_laws: bool,
    seed: int,
    report: Report,
    shrink: bool,
    shard: tuple[int, int],
    progress: Callable[[int], None] | None,
) -> None:
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
        case = printed.read(spec, case)
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
    dtypes = [d for d in limits.dtypes if d in subject.spec.dtypes]
    for i in range(count):
        if not report.failures:
            _attempt(subject, LawCase(law, dtypes[(number + i) % len(dtypes)], start * 1000 + i), report)


def _explore(
    subject: Subject,
    limits: Limits,
    edge: Edge | None,
    count: int,
    start: int,
    report: Report,
    shrink: bool,
    progress: Callable[[int], None] | None,
) -> None:
    failed: list[tuple[Case, Exception]] = []
    seen: list[Case] = []

    @hypothesis_seed(start)
    @settings(
        max_examples=count + 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        print_blob=False,
        derandomize=False,
    )
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
    except Unsatisfiable:
        name = f"on its edge {edge.name!r} " if edge else ""
        raise SpecError(
            f"{subject.spec.name}: no case that was drawn {name}obeys the op's rules; declare how to make such values "
            "with "
            f"@{subject.spec.name}.values(argument), or widen the edge"
        ) from None
    except Exception as e:
        if not failed:
            raise
        # what fails once and not again (Hypothesis calls it flaky: a dead device, a race) is the first failure; what
        # came after may be its consequence
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
    arrays = _placed(subject, buffers)
    reference = bind(spec, **{n: b.view() for n, b in buffers.items()}, **case.options)
    reference.target, reference.interpret = subject.target, subject.interpret
    overrides, tiling, illegal = subject.tiling(case)
    run = subject.run(overrides)
    try:
        with fw.poisoned():
            got = _called(run, spec, arrays, case)
    except UnsupportedError as e:
        if not subject.accepts(str(e)):
            raise Broken(f"refused, and the backend does not declare it among its refusals: {e}") from e
        report.refused[str(e).partition("cannot: ")[2] or str(e)] += 1
        return
    outputs = _given(got)
    values = _values(reference, outputs, fw, arrays)
    fractions = compare_call(reference, values, tiling, _random_regime(spec, case))
    _check_inputs_untouched(subject, buffers, arrays, dict(zip(reference.wants, values, strict=True)))
    kept = [fw.to_numpy(o).tobytes() for o in outputs]
    again = _given(_called(run, spec, _placed(subject, buffers) if spec.aliases else arrays, case))
    for first, second in zip(kept, again, strict=True):
        if first != fw.to_numpy(second).tobytes():
            raise Broken("the same call twice gave different bits")
    for name, fraction in fractions.items():
        if fraction >= max(report.worst.values(), default=0.0):
            report.worst_case = case.to_json()
        report.worst[name] = max(report.worst.get(name, 0.0), fraction)
    if illegal:
        report.tilings_refused[illegal] += 1
    report.count(case, " ".join(f"{k}={v}" for k, v in overrides.items()) or "default")


def _placed(subject: Subject, buffers: Mapping[str, Buffer]) -> dict[str, Any]:
    """The case's arrays in the subject's framework and on its device, each in memory of its own."""
    fw, device = subject.framework, subject.device
    return {n: fw.strided(b.memory.copy(), b.shape, b.strides, b.offset, device) for n, b in buffers.items()}


def _called(run: Callable[..., Any], spec: Spec[Any], arrays: Mapping[str, Any], case: Case) -> Any:
    """The call, required arrays by position as users pass them."""
    positional = [arrays[a.name] for a in spec.arrays if not a.optional]
    named = {a.name: arrays[a.name] for a in spec.arrays if a.optional and a.name in arrays}
    return run(*positional, **named, **case.options)


def _random_regime(spec: Spec[Any], case: Case) -> str:
    """The regime whose values the case holds; none where they were planted, repeated, or made by a generator."""
    made = generators(spec, registry.forward_of(spec) if spec.is_vjp else None)
    shaped = any(a.name in made and a.name in case.shapes and a.follows for a in spec.arrays)
    special = case.edge or case.masks or "expanded" in case.layouts.values() or shaped
    return "" if special else case.regime


def _given(result: Any) -> tuple[Any, ...]:
    """The outputs that a call gave: gradients that it did not want are None."""
    return tuple(o for o in result if o is not None) if isinstance(result, tuple) else (result,)


def _values(call: Call, outputs: tuple[Any, ...], fw: Framework, inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """The wanted outputs on the host, held to whose arrays they are and what memory they may take."""
    if len(outputs) != len(call.wants):
        raise Broken(f"{len(outputs)} outputs came back; expected {len(call.wants)}: {', '.join(call.wants)}")
    values = []
    for name, out in zip(call.wants, outputs, strict=True):
        if not fw.owns(out):
            raise Broken(f"{name} came back as a {type(out).__name__}; expected a {fw.name} array")
        value = fw.to_numpy(out)
        own = inputs.get(call.spec.aliases.get(name, ""))
        in_place = own is not None and _same_memory(value, fw.to_numpy(own))
        if not fw.contiguous(out) and not in_place:
            raise Broken(f"{name} is not contiguous")
        for other, array in inputs.items():
            if np.may_share_memory(value, fw.to_numpy(array)) and not (in_place and array is own):
                raise Broken(f"{name} shares memory with the input {other}")
        declared = call.outputs[name][1]
        if value.dtype.name == fw.held(declared) != declared:
            value = value.astype(numpy_dtype(declared))
        values.append(value)
    return values


def _same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are one: element by element in the same place."""
    return (a.ctypes.data, a.shape, a.strides) == (b.ctypes.data, b.shape, b.strides)


def _check_inputs_untouched(
    subject: Subject, buffers: Mapping[str, Buffer], arrays: Mapping[str, Any], outputs: Mapping[str, np.ndarray]
) -> None:
    """An input holds what it held, or the output that may take its memory."""
    takers = {name: out for out, name in subject.spec.aliases.items()}
    for name, b in buffers.items():
        shown = subject.framework.to_numpy(arrays[name]).astype(b.memory.dtype, copy=False)  # JAX holds int64 as int32
        taker = outputs.get(takers.get(name, ""))
        in_place = taker is not None and shown.tobytes() == taker.tobytes()
        if shown.tobytes() != b.view().tobytes() and not in_place:
            raise Broken(f"the input {name} was written to")
