"""Run cases, compare every element with its bound, and report."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from portakern.core import ending, registry
from portakern.core.backend import Backend
from portakern.core.config import fields_of
from portakern.core.failing import Ended, kind_of
from portakern.core.framework import advised
from portakern.defaults import EXAMPLES
from portakern.errors import NotEmulatedError, SpecError, UnavailableError, UnsupportedError
from portakern.progress import Line
from portakern.spec import Spec
from portakern.spec.dtypes import DTYPES
from portakern.testing import printed
from portakern.testing.cases import Case
from portakern.testing.check_options import CheckOptions
from portakern.testing.comparing import run_case
from portakern.testing.coverage import Coverage, contract
from portakern.testing.fixed import CasePreset
from portakern.testing.laws import ArgumentNotTaken, LawCase, run_law
from portakern.testing.likeness import Likeness
from portakern.testing.mistakes import supposed
from portakern.testing.partitioned import check_divisible, cut_case, run_partitioned
from portakern.testing.plan import EDGE_EXAMPLES, CaseGroup, plan
from portakern.testing.progress import interactive
from portakern.testing.regimes import VALUE_REGIMES
from portakern.testing.report import Failure, Report
from portakern.testing.sizes import Limits
from portakern.testing.source import Rejected, Source, shrunk
from portakern.testing.strategies import case_of, drawn, dtypes_of
from portakern.testing.subject import (
    Subject,
    backend_subject,
    backend_variants,
    checked_kinds,
    function_subject,
    not_required,
)
from portakern.testing.verdict import Broken, BrokenPromise, OtherEdges

__all__ = [
    "Failure",
    "Report",
    "cases_of",
    "check",
    "check_subject",
    "replay",
    "replay_subject",
    "subject_of",
    "with_rest",
]

TIMED = 5  # of which, where the time may be up, so many come before others
RUNS = 1000  # of a check, and cases of a run, at most: numbers that cases are drawn from lie so far apart


def check(
    op: str | Spec[Any],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    fn: Callable[..., Any] | None = None,
    framework: str = "numpy",
    device: str | None = None,
    dtypes: Sequence[str] | None = None,
    only_edges: Sequence[str] | None = None,
    max_examples: int = EXAMPLES,
    seed: int = 0,
    limits: Limits | None = None,
    profile: str | None = None,
    target: str | None = None,
    shapes: Sequence[Mapping[str, Sequence[int]]] | None = None,
    layouts: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    empty: bool = True,
    one_dtype: bool = False,
    edges: bool = True,
    promises: bool | Collection[str] = True,
    parts: int | None = None,
    seconds: float | None = None,
    shrink: bool = True,
    shard: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Check an implementation against the oracle on generated cases. Up to half of the cases are the spec's edges (at
    least 5 per edge from 300 examples on), the others are drawn freely. Each law runs as often as each edge. Half of
    the cases are float32.

    ``report.verdicts`` has three kinds: *bounds*: every element is within its error bound. *edges*: NaN and infinities
    give the results of the formula. *promises*: further properties of portakern's own kernels, such as the same bits
    for the same call, and for a row alone and among others (the spec's laws), outputs in contiguous memory of their
    own, and unchanged inputs. A check continues after a broken promise or a wrong edge, to check the other kinds.

    Args:
      op: the op's name or spec.
      backend: a backend's name, or a Backend object, registered or not. Pass either backend or fn.
      variant: a variant of the backend; None: each that runs on the device, with all the examples.
      fn: a callable with the op's arguments, or some of them. Required arrays are passed by position, others by name.
        Optional arrays and options that fn does not take are not drawn; those without a default in fn are always
        passed.
      framework: the framework of ``fn``'s arrays: numpy, torch or jax.
      device: cpu, cuda, rocm or tpu; None: the best one here that the backend serves.
      dtypes: restrict the op's dtype to these.
      only_edges: run only these edges (see :func:`portakern.testing.edges`), with all the examples.
      max_examples: number of cases; seed: seed of the cases.
      limits: sizes of the cases, and the arguments that may be drawn. None: small sizes, smaller under emulation; with
        kernels compiled for an accelerator, a third of the cases fill it (``Limits.fill``) and are compared in part.
      profile: a profile that the backend declares (``Backend.profiles``), such as a stricter interpreter.
      target: the architecture that the profile emulates, for a profile that emulates hardware.
      shapes: the shapes of all calls, one dict from array to shape each, for a kernel with fixed shapes. Optional
        arrays are passed where they are named. All regimes of values are used in turn, and the edges that such calls
        can have. Laws are not checked, since they need other shapes, and failing cases are not shrunk.
      layouts: memory layouts of arrays, from :data:`portakern.testing.layouts.LAYOUTS`; None: any.
      options: fixed values of options in every case. A function that lacks such an option must have this value built
        in.
      empty: False: no extent is 0. one_dtype: True: no array is float32 with 16-bit ones.
      edges: False: NaN and infinities may give other results than the formula.
      promises: False: check none; or the names of those to check (:data:`portakern.testing.verdict.PROMISES`).
      parts: cut each call along a drawn dimension that the op's rule allows, into this many parts at most, compute one
        part after the other, put the results together and compare them with the full call, with bounds for sums and
        means of parts (:mod:`portakern.testing.partitioned`). Arrays are contiguous, laws are not checked, and neither
        are promises other than the bits of results that lie side by side. None: calls are not cut.
      seconds: time after the first case at which no further case or law is started; laws then come before free cases.
        ``report.left_out`` counts what did not run. If a regime of values, an edge or a law was not reached, the check
        does not pass; it is unfinished (``report.not_reached`` names them).
      shrink: make a failing case as small as possible; False: stop at the first failure.
      shard: (i, n): run only part i of n; :meth:`Report.merge` combines the parts. The cases do not depend on n.
      progress: called with the number of cases done. None: in a notebook or an interactive terminal, a progress line
        appears after two seconds.

    Returns:
      A report; ``report.passed`` is False if a case failed.

    Raises:
      SpecError: neither or both of backend and fn, unknown names, a function that cannot be called with the op's
        arguments. UnavailableError: the backend cannot run here.
    """
    spec = registry.find_spec(op) if isinstance(op, str) else op
    if not hasattr(seed, "__index__") or seed < 0:
        raise SpecError(f"check({spec.name!r}): seed is {seed!r}; expected a whole number >= 0")
    given = locals()
    check_options = CheckOptions(**{f.name: given[f.name] for f in fields(CheckOptions) if f.name in given})
    several = () if backend is None or variant is not None else backend_variants(spec, backend, device, profile, target)
    if backend is not None and len(several) > 1:
        every = (backend_subject(spec, backend, name, device, profile, target) for name in several)
        return functools.reduce(Report.merge, (_shown(subject, check_options) for subject in every))
    return _shown(subject_of(spec, backend, variant, fn, framework, device, profile, target), check_options)


def _shown(subject: Subject, options: CheckOptions) -> Report:
    """Check, with a progress line in an interactive session."""
    if options.progress is not None or not interactive():
        return check_subject(subject, options)
    with Line(f"{subject.spec.name} on {subject.name}", options.max_examples) as line:
        return check_subject(subject, replace(options, progress=line))


def check_subject(subject: Subject, check_options: CheckOptions) -> Report:
    """Check what is made of a backend or a function."""
    spec, limits = subject.spec, check_options.limits_of(subject)
    if check_options.parts is not None:
        check_divisible(spec, check_options.parts)
    kinds, excused = checked_kinds(spec, check_options.edges, check_options.promises)
    words = not_required(spec, limits, excused, subject.unordered)
    if not (check_options.dtypes or (check_options.limits and check_options.limits.dtypes)):
        words = (
            *words,
            *(f"dtype {dtype}: {why}" for dtype, why in subject.lacks.items() if dtype in spec.dtypes),
        )
    report = Report(spec.name, subject.name, check_options.seed, checked=kinds, not_required=words)
    if check_options.parts is not None:
        words = (*words, "laws, and promises other than the bits of results that lie side by side")
        report.not_required = words
    report.coverage[subject.name] = _coverage(subject, limits, excused, check_options.parts)
    start = time.perf_counter()
    work = _CheckRun(
        subject,
        limits,
        check_options.seed,
        report,
        check_options.shrink and not limits.shapes,
        check_options.progress,
        excused,
        parts=check_options.parts,
    )
    work.limit = math.inf if check_options.seconds is None else check_options.seconds
    work.until = math.inf if check_options.until is None else check_options.until
    try:
        work.all_of(check_options)
    except BaseException as e:
        if not isinstance(e, Exception):  # the program is told to end: what was found goes with it
            e.found = report  # type: ignore[attr-defined]
        raise
    finally:
        report.seconds = time.perf_counter() - start
    return report


def _coverage(subject: Subject, limits: Limits, excused: Collection[str], parts: int | None) -> Coverage:
    """The coverage before the first case: nothing is covered but the subject's own variant."""
    lawful = (
        parts is None
        and not limits.shapes
        and not {BrokenPromise.kind, "laws"} & {*excused}
        and bool(_lawful(subject, limits))
    )
    declared = contract(
        subject.spec, limits.takes, lawful, limits.empty, limits.layouts, bool(subject.tiles), subject.variants
    )
    return Coverage(declared, {"variants": {subject.variant}} if subject.variant else {})


def _lawful(subject: Subject, limits: Limits) -> list[str]:
    """The dtypes in which it is held to laws: where an oracle's float64 is not rounded, its library's order shows."""
    there = dtypes_of(subject.spec, limits) if subject.lawful else []
    return [d for d in there if not (subject.oracle and DTYPES[d].bits > 32)]


def with_rest(subject: Subject, check_options: CheckOptions, found: Report | None) -> Report:
    """What a check found before it was interrupted, with all that it did not come to, laws too, as left out. None of
    that is drawn, which would take long: a case whose regime is not known yet is missed by each."""
    spec, limits = subject.spec, check_options.limits_of(subject)
    kinds, excused = checked_kinds(spec, check_options.edges, check_options.promises)
    rest = Report(spec.name, subject.name, check_options.seed, checked=kinds)
    rest.coverage[subject.name] = _coverage(subject, limits, excused, check_options.parts)
    left = _LeftOut(subject, limits, check_options.seed, rest, False, None, excused, parts=check_options.parts)
    left.all_of(check_options)
    if found is None:
        return rest
    rest.left_out = max(0, rest.left_out - found.examples - found.refused.total() - found.not_emulated.total())
    rest.left_out_by_name -= found.reached
    return found.merge(rest)


def cases_of(subject: Subject, check_options: CheckOptions) -> list[Case | LawCase]:
    """The cases and instances of laws that :func:`check_subject` would try, of which none runs."""
    spec, limits = subject.spec, check_options.limits_of(subject)
    excused = checked_kinds(spec, check_options.edges, check_options.promises)[1]
    work = _Listing(
        subject,
        limits,
        check_options.seed,
        Report(spec.name, "", check_options.seed),
        False,
        None,
        excused,
        parts=check_options.parts,
    )
    work.all_of(check_options)
    return work.listed


@dataclass
class _CheckRun:
    """A check in progress. ``excused``: kinds that were not requested or have failed; a failure of any other kind ends
    the check. ``limit``: seconds after the first case at which no further case starts; ``until``: the time at which
    no further case starts. ``parts``: the most parts that each case is cut into; None: none is cut. ``idle``: whether
    the last law had nothing to assert."""

    subject: Subject
    limits: Limits
    seed: int
    report: Report
    shrink: bool
    progress: Callable[[int], None] | None
    excused: set[str] = field(default_factory=set)
    limit: float = math.inf
    until: float = math.inf
    first_began: float | None = None
    parts: int | None = None
    idle: bool = False

    @property
    def ended(self) -> bool:
        return any(f.kind not in (OtherEdges.kind, BrokenPromise.kind) for f in self.report.failures)

    def time_is_up(self) -> bool:
        """Whether no further case is to begin; the seconds count from the first one."""
        if self.first_began is None:
            self.first_began = time.perf_counter()
            return self.limit <= 0 or time.time() >= self.until
        return self.over

    @property
    def over(self) -> bool:
        """Whether the time is up by now; no case need have begun."""
        spent = 0.0 if self.first_began is None else time.perf_counter() - self.first_began
        return (self.first_began is not None and spent >= self.limit) or time.time() >= self.until

    def leave_out(self, run: CaseGroup, presets: Sequence[CasePreset]) -> None:
        """Count cases that are not run. None is drawn, which takes its time: where it is not known, any regime of
        values may be theirs."""
        for turn in presets:
            self.report.left_out += 1
            self.report.left_out_by_name.update(
                [run.edge.name] if run.edge else [turn.regime] if turn.regime else VALUE_REGIMES
            )

    def all_of(self, check_options: CheckOptions) -> None:
        """Carry out what is asked, or the part of it that is asked for."""
        runs = plan(self.subject.spec, self.limits, check_options.max_examples, check_options.only_edges)
        laws = check_options.only_edges is None and not self.limits.shapes and self.parts is None
        self.carry_out(runs, laws, check_options.shard)

    def carry_out(self, runs: list[CaseGroup], with_laws: bool, shard: tuple[int, int]) -> None:
        part, parts = shard
        numbered = [*enumerate(runs)][part::parts]
        each = max(1, min(EDGE_EXAMPLES, max((len(run.presets) for run in runs if run.edge), default=1)))
        with_laws = with_laws and bool(_lawful(self.subject, self.limits))
        laws = [*enumerate(self.subject.spec.laws if with_laws else ())][part::parts]
        timed = min(self.limit, self.until) < math.inf and not self.limits.shapes
        whole: list[Piece] = [(number, run, range(len(run.presets))) for number, run in numbered]
        first, rest = _most_telling(numbered) if timed else (whole, [])
        with self.subject.context():
            for number, run, places in first:
                self.explore(run, self.seed * RUNS + number, places)
            for number, name in laws:
                if not {BrokenPromise.kind, "laws"} & self.excused and not self.ended:
                    self.instances(name, each, number)
            for number, run, places in rest:
                self.explore(run, self.seed * RUNS + number, places)

    def instances(self, law: str, count: int, number: int) -> None:
        """Every other instance is of the first dtype, float32 where there is one: 16 bits hide most differences. Which
        of the others comes first differs from law to law. One that is refused, or has nothing to assert in its dtype,
        makes room for one of another."""
        dtypes, i = _lawful(self.subject, self.limits), 0
        while i < count and dtypes:
            if self.over:
                self.report.left_out_by_name[f"law {law}"] += count - i
                return
            first, *others = dtypes
            dtype = others[(number + i // 2) % len(others)] if i % 2 and others else first
            refused, self.idle = self.report.refused.total(), False
            failure = self.attempt(LawCase(law, dtype, self.seed * 1000 + i))
            if failure:
                self.report.add_failure(failure)
                self.excused.add(failure.kind)
                return
            if self.report.refused.total() > refused or (self.idle and len(dtypes) > 1):
                dtypes.remove(dtype)
            else:
                i += 1

    def attempt(self, case: Case | LawCase) -> Failure | None:
        """Run a case; what it broke, if anything."""
        try:
            if isinstance(case, LawCase):
                self.idle = run_law(self.subject, case, self.limits) is False
                self.report.laws[case.law] += 1
                self.report.cover("laws", case.law)
            else:
                self.tries(case)
        except ArgumentNotTaken:
            return None
        except NotEmulatedError as e:
            self.report.add_refusal(e)
            return None
        except Exception as e:
            _unless_told_to_end()
            if not self.subject.at_fault(e):
                raise
            if isinstance(case, LawCase) and isinstance(e, UnsupportedError) and self.subject.accepts(str(e)):
                self.report.add_refusal(e)
                return None
            return self.failure(case, e)
        return None

    def failure(self, case: Case | LawCase, error: Exception, first: Exception | None = None) -> Failure:
        """What a case broke, which the report counts among those that were compared if its outputs were; ``first``: the
        same of the case that it was made smaller from, which shows more."""
        if isinstance(case, Case) and isinstance(error, Broken) and error.kind in (Broken.kind, OtherEdges.kind):
            self.report.add_errors(error.fractions, case)
            if error.kind == Broken.kind:  # after another it runs once more
                self.report.add_case(case, error.tiling)
        if isinstance(error, Broken):
            for shown in (first, error):
                if isinstance(shown, Broken) and shown.wrong is not None:
                    before = Likeness(shown.cause, shown.explanation)
                    if (found := supposed(shown.wrong, before)) != before:
                        error.cause, error.explanation = found
                        break
        return _failure(self.subject, case, error)

    def tries(self, case: Case) -> None:
        """Run one case; what it breaks is raised."""
        if case.parts or self.parts is not None:
            run_partitioned(self.subject, case, self.report, self.excused)
        else:
            run_case(self.subject, case, self.report, self.excused)

    def cut(self, case: Case) -> Case:
        """The case, cut where that is required."""
        return case if self.parts is None else cut_case(self.subject.spec, case, self.parts, self.limits)

    def explore(self, run: CaseGroup, start: int, positions: Sequence[int]) -> None:
        """Draw some cases of a run and try them. A failure that is not the end may hide another of the same case."""
        left = [*positions]
        while left and not self.ended:
            if self.over:
                self.leave_out(run, [run.presets[place] for place in left])
                return
            seed = start * RUNS + left[0]
            case, source = self.drawn(run, left[0], seed)
            if self.time_is_up():
                continue
            error = self.outcome(case)
            if error is not None:
                first = error
                case, error = self.smallest(run, left[0], seed, source, error) or (case, error)
                failure = self.failure(case, error, first)
                self.report.add_failure(failure)
                self.excused.add(failure.kind)
                continue
            left.pop(0)
            if self.progress:
                self.progress(self.report.examples + sum(self.report.refused.values()))

    def drawn(self, run: CaseGroup, position: int, seed: int) -> tuple[Case, Source]:
        """A case of a run."""
        spec = self.subject.spec
        try:
            preset = run.presets[position]
            case, source = drawn(seed, spec, self.limits, self.subject.tiles, run.edge, preset, run.fills)
            return self.cut(case), source
        except Rejected:
            name = f"on its edge {run.edge.name!r} " if run.edge else ""
            raise SpecError(
                f"{spec.name}: no case that was drawn {name}obeys the op's rules; declare how to make "
                f"such values with @{spec.name}.values(argument), or widen the edge"
            ) from None

    def outcome(self, case: Case) -> Exception | None:
        """What a case broke; None where it held. What is no fault of the subject is raised."""
        try:
            self.tries(case)
        except Exception as e:
            _unless_told_to_end()
            if not self.subject.at_fault(e):
                raise
            return e
        return None

    def smallest(
        self, run: CaseGroup, position: int, seed: int, source: Source, error: Exception
    ) -> tuple[Case, Exception] | None:
        """A case of less choices that fails in the same way, and how; None where there is none, or the time is up."""
        if not self.shrink:
            return None
        spec, known, turn = self.subject.spec, getattr(error, "kind", None), run.presets[position]

        def fails(preset: CasePreset, choices: Sequence[int] | None) -> tuple[Case, Exception] | None:
            if self.over:
                return None
            source.begin(choices)
            try:
                case = self.cut(case_of(source, spec, self.limits, self.subject.tiles, run.edge, preset, run.fills))
            except Rejected:
                return None
            found = self.outcome(case)
            same = type(found) is type(error) and getattr(found, "kind", None) == known
            return (case, found) if found is not None and same else None

        first = None
        if turn.kind and turn.shapes is None:  # does it need such extents, or such values?
            plain = turn._replace(kind="odd")
            for other in (plain._replace(regime="normal"), plain, turn):
                if first := fails(other, None):
                    turn = other
                    break
        choices = [*source.choices]
        return shrunk(choices, lambda less: fails(turn, less)) or first


Piece = tuple[int, CaseGroup, Sequence[int]]
"""A run with its number, and the places of some of its cases."""


def _most_telling(runs: Sequence[tuple[int, CaseGroup]]) -> tuple[list[Piece], list[Piece]]:
    """(each edge once, the other cases, a few free ones and those of an edge by turns): where the time may be up before
    all, whatever is asked is met early. The cases are the same in any order."""
    first: list[Piece] = [(n, run, range(1)) for n, run in runs if run.edge]
    more = [(n, run, range(1, len(run.presets))) for n, run in runs if run.edge]
    free = [
        (n, run, range(i, min(i + TIMED, len(run.presets))))
        for n, run in runs
        for i in range(0, len(run.presets) if not run.edge else 0, TIMED)
    ]
    return first, [part for pair in itertools.zip_longest(free, more) for part in pair if part]


def _unless_told_to_end() -> None:
    """What a case raises once the process was told to end is that end, and no failure."""
    if (how := ending.cause()) is not None:
        raise how from None


@dataclass
class _Listing(_CheckRun):
    """A check that lists its cases and runs none."""

    listed: list[Case | LawCase] = field(default_factory=list)

    def tries(self, case: Case) -> None:
        self.listed.append(case)

    def attempt(self, case: Case | LawCase) -> Failure | None:
        self.listed.append(case)
        return None


@dataclass
class _LeftOut(_CheckRun):
    """A check that counts all of its cases as left out, and runs none."""

    def explore(self, run: CaseGroup, start: int, positions: Sequence[int]) -> None:
        self.leave_out(run, [run.presets[place] for place in positions])

    def attempt(self, case: Case | LawCase) -> Failure | None:
        assert isinstance(case, LawCase), case
        self.report.left_out_by_name[f"law {case.law}"] += 1
        return None


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
    target: str | None = None,
    edges: bool = True,
    promises: bool | Collection[str] = True,
) -> Report:
    """Run one case of a failure again; arguments as for :func:`check`."""
    spec = registry.find_spec(op) if isinstance(op, str) else op
    subject = subject_of(spec, backend, variant, fn, framework, device, profile, target)
    return replay_subject(subject, case, edges=edges, promises=promises)


def replay_subject(
    subject: Subject, case: str | Case | LawCase, *, edges: bool = True, promises: bool | Collection[str] = True
) -> Report:
    """Run one case again on what is made of a backend or a function."""
    spec = subject.spec
    if isinstance(case, str):
        case = printed.read(spec, case)
        _refuse_unknown_tiles(subject, case)
    kinds, excused = checked_kinds(spec, edges, promises)
    report = Report(spec.name, subject.name, 0, checked=kinds)
    work = _CheckRun(subject, Limits(arguments=subject.arguments), 0, report, False, None, excused)
    with subject.context():
        failure = work.attempt(case)
    if failure:
        report.add_failure(failure)
    return report


def _refuse_unknown_tiles(subject: Subject, case: Case | LawCase) -> None:
    """SpecError for a tile or knob of a case that no implementation of the op has. Those of others than the subject,
    where the case was found, are left out when it is tried here."""
    spec, left = subject.spec, [n for n in case.tiling if n not in subject.tiles] if isinstance(case, Case) else []
    known = {*spec.tiling, *subject.tiles}
    if all(name in known for name in left):
        return
    for b in (*registry.backends().values(), *registry.peers().values()):
        for family in (f for f in b.declared if b.module_of(spec.name, f)):
            try:
                if family.missing_packages() is None:
                    known |= {*getattr(b.implementation(spec.name, family), "knobs", {})}
                    continue
            except UnavailableError:
                pass
            known |= {
                name for config in b.configs for name in fields_of(config)
            }  # which of them this kernel has cannot be known here
    for name in left:
        if name not in known:
            raise SpecError(
                f"{spec.name}: the case's tiling has {name!r}; expected names among {', '.join(sorted(known))}"
            )


def subject_of(
    op: str | Spec[Any],
    backend: str | Backend | None = None,
    variant: str | None = None,
    fn: Callable[..., Any] | None = None,
    framework: str = "numpy",
    device: str | None = None,
    profile: str | None = None,
    target: str | None = None,
) -> Subject:
    """What :func:`check` checks; arguments as there."""
    spec = registry.find_spec(op) if isinstance(op, str) else op
    if (backend is None) == (fn is None):
        raise SpecError(f"check({spec.name!r}): pass either backend= or fn=, one of the two")
    if backend is not None:
        return backend_subject(spec, backend, variant, device, profile, target)
    for name, value in (("profile", profile), ("variant", variant), ("target", target)):
        if value is not None:
            raise SpecError(
                f"check({spec.name!r}): {name} is {value!r}; a function has none, only a backend: pass backend="
            )
    return function_subject(spec, fn, framework, device)


def _failure(subject: Subject, case: Case | LawCase, error: Exception) -> Failure:
    text = case.to_json()
    what = str(error) if isinstance(error, Broken | Ended) else f"raised {type(error).__name__}: {error}"
    what = what if isinstance(error, Broken) else advised(what)
    named = (f"law {case.law}: " if isinstance(case, LawCase) else f"edge {case.edge}: " if case.edge else "") + what
    if not isinstance(error, Broken):
        return Failure(subject.spec.name, named, text, subject.reproduce(text), kind_of(error))
    return Failure(subject.spec.name, named, text, subject.reproduce(text), error.kind, error.cause, error.explanation)
