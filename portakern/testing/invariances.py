"""Bits of one call against those of another: the properties that an implementation may have beyond its bounds, each
tried on drawn calls, with the smallest call that breaks it.

Which properties an op has follows from its declaration: the dimensions that are ``apart``, those that offsets number
(``rewrite``), the rules by which a call is cut (:mod:`portakern.core.partitions`), and its laws.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from portakern.core import registry
from portakern.core.backend import Backend
from portakern.core.call import Call
from portakern.core.framework import advised
from portakern.core.partitions import PartitionRule, partition_rules
from portakern.errors import NotEmulatedError, SpecError, UnsupportedError
from portakern.spec import Spec
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import shown
from portakern.testing import printed
from portakern.testing.cases import Case, fixed_values
from portakern.testing.check_options import CheckOptions
from portakern.testing.fixed import CasePreset
from portakern.testing.laws import ArgumentNotTaken, LawCase, run_law
from portakern.testing.layouts import DRAWN, LAYOUTS, REPEATS, Buffer, other_bits
from portakern.testing.partitioned import ServedCase, combined, pieces_of
from portakern.testing.runner import subject_of
from portakern.testing.sampled import along, apart, chosen_axes, extents_of, part_call, taken, with_what_follows
from portakern.testing.sizes import Limits
from portakern.testing.source import Rejected, Source, shrunk
from portakern.testing.strategies import case_of, drawn, dtype_cycle, dtypes_of
from portakern.testing.subject import Subject
from portakern.testing.verdict import BrokenPromise

__all__ = ["PROPERTIES", "BitDifference", "InvarianceReport", "InvarianceRow", "invariance", "invariance_of"]

CASES = 24
ODD = 6
"""How many cases of small extents are drawn in search of one that breaks a property too."""

SEEDS = 2**32
"""How far the seeds of such cases lie apart."""

EACH = 2
"""Dimensions or layouts of a property that one case tries; the next case tries others."""

FILLS = (0.0, np.nan, np.inf)
"""What stands for padding."""


# -------------------------------------------------------------------------------------------------------- a difference
class BitDifference(NamedTuple):
    """The first element, in the order of memory, that has other bits in a second call.

    Attributes:
      output, at: where it is in the result of the first call, or in the part of it that is compared.
      first, second: the values; bits: both as hexadecimal numbers. differing, elements: how many differ, of how many.
      largest: the largest difference of two elements; infinite where one alone is NaN.
    """

    output: str
    at: tuple[int, ...]
    first: float
    second: float
    bits: tuple[str, str]
    differing: int
    elements: int
    largest: float

    def __str__(self) -> str:
        return (
            f"{self.output}{[*self.at]} is {self.first:.9g} and {self.second:.9g} (bits {' and '.join(self.bits)}); "
            f"{self.differing} of {self.elements} elements differ, by at most {self.largest:.3g}"
        )


def bit_difference(output: str, first: np.ndarray, second: np.ndarray) -> BitDifference | None:
    """The first element with other bits; None where all are the same. Every NaN is equal, and -0 is not 0."""
    other = other_bits(first, second)
    if not other.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(other)), other.shape))
    word = np.dtype(f"u{first.itemsize}")
    bits = [f"0x{int(x[index].view(word)):0{2 * first.itemsize}x}" for x in (first, second)]
    with np.errstate(invalid="ignore", over="ignore"):
        by = np.abs(first[other].astype(np.float64) - second[other].astype(np.float64))
    largest = float(np.nan_to_num(by, nan=np.inf, posinf=np.inf).max())
    values = float(first[index]), float(second[index])
    return BitDifference(output, index, *values, (bits[0], bits[1]), int(other.sum()), int(other.size), largest)


class PairOfCalls(ServedCase):
    """A case on a subject, whose call is compared with others. The tiling is the subject's own."""

    def __init__(self, subject: Subject, case: Case, limits: Limits) -> None:
        super().__init__(subject, case)
        self.limits = limits

    @functools.cached_property
    def results(self) -> Mapping[str, np.ndarray]:
        """The outputs of the call."""
        return self.ran(self.full, self.case.options).outputs

    def rng(self, *words: str) -> np.random.Generator:
        return np.random.default_rng([self.case.seed, zlib.crc32(" ".join(words).encode())])

    def differ(self, first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> BitDifference | None:
        """The first difference of two calls' outputs, but for those that are declared to have no fixed order."""
        names = [n for n in first if n not in self.subject.unordered]
        found = (bit_difference(n, first[n], second[n]) for n in names)
        return next((d for d in found if d is not None), None)

    def chosen(self, name: str, numbered: bool) -> tuple[Mapping[str, Any], Call] | None:
        """One index along a dimension, with what comes along, and the call of this index alone; None where none has
        results."""
        call, rng = self.full, self.rng(name)
        extents = extents_of(call, name)
        axis = int(rng.choice([i for i, e in enumerate(extents) if e > 1 and not along(call, name, i)]))
        buffers = {n: LAYOUTS["contiguous"](a) for n, a in call.arrays.items() if a is not None}
        names = apart(call.spec, call.options, call.wants, call.present)
        for index in rng.permutation(extents[axis])[: extents[axis] if numbered else 1]:
            indices = {n: [np.arange(e) for e in extents_of(call, n)] for n in names}
            indices[name][axis] = np.array([index])
            chosen = with_what_follows(call, indices)
            part = part_call(call, buffers, chosen, self.case.options)
            if all(np.prod(shape) for shape, _ in part.outputs.values()):
                return chosen, part
        return None

    def share(self, outputs: Mapping[str, np.ndarray], chosen: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The outputs at the chosen indices."""
        return {n: taken(x, self.full.spec.output(n).dims, self.full, chosen) for n, x in outputs.items()}


Compared = Callable[[], "BitDifference | None"]
Comparisons = Iterator[tuple[str, Compared]]
"""(a dimension or a layout, what compares the calls there)."""


# ---------------------------------------------------------------------------------------------------------- properties
def _again(pair: PairOfCalls) -> Comparisons:
    yield "", lambda: pair.differ(pair.results, pair.ran(pair.full, pair.case.options).outputs)


def _in_layouts(pair: PairOfCalls) -> Comparisons:
    if not any(a is not None and a.ndim for a in pair.full.arrays.values()):
        return
    names = [n for n in (*DRAWN, "shifted") if n not in (*REPEATS, "contiguous")]

    def compared(lay: Callable[[np.ndarray], Buffer]) -> BitDifference | None:
        return pair.differ(pair.results, pair.ran(pair.full, pair.case.options, lay).outputs)

    for name in (*names, "reversed") if pair.subject.framework.reverses else names:
        yield name, functools.partial(compared, LAYOUTS[name])


def _separable(pair: PairOfCalls, numbered: bool) -> Iterator[str]:
    """The dimensions of several indices that do not see each other: those that offsets number, or those of the first
    array."""
    call, spec = pair.full, pair.full.spec
    counted = {f for a in spec.arrays for d in a.dims if d.plus for f in d.factors}
    first = {f for d in spec.arrays[0].dims for f in d.factors[:1]}
    for name in apart(spec, call.options, call.wants, call.present):
        several = any(e > 1 and not along(call, name, i) for i, e in enumerate(extents_of(call, name)))
        if several and (name in counted if numbered else name in first - counted):
            yield name


def _alone(pair: PairOfCalls, numbered: bool) -> Comparisons:
    def compared(name: str) -> BitDifference | None:
        found = pair.chosen(name, numbered)
        if found is None:
            return None
        chosen, part = found
        return pair.differ(pair.share(pair.results, chosen), pair.ran(part, pair.case.options).outputs)

    for name in _separable(pair, numbered):
        yield name, functools.partial(compared, name)


def _padded(pair: PairOfCalls) -> Comparisons:
    spec = pair.full.spec
    kept = fixed_values(spec, registry.forward_of(spec) if spec.is_vjp else None)

    def compared(name: str, numbered: bool) -> BitDifference | None:
        found = pair.chosen(name, numbered)
        if found is None:
            return None
        fill = FILLS[pair.case.seed % len(FILLS)]
        arrays = {
            a.name: x if a.name in kept or x.dtype.kind in "iub" else _filled(pair.full, a.name, found[0], fill)
            for a in spec.arrays
            if (x := pair.full.arrays[a.name]) is not None
        }
        padded = pair.ran(pair.bound(arrays, {}), pair.case.options).outputs
        return pair.differ(pair.share(pair.results, found[0]), pair.share(padded, found[0]))

    for numbered in (False, True):
        for name in _separable(pair, numbered):
            yield name, functools.partial(compared, name, numbered)


def _filled(call: Call, name: str, chosen: Mapping[str, Any], fill: float) -> np.ndarray:
    """An argument with padding wherever nothing was chosen."""
    array, kept = np.array(call.arrays[name]), np.ones((), bool)
    for axis, index in chosen_axes(array.shape, call.spec.argument(name).dims, call, chosen):
        own = np.zeros(array.shape[axis], bool)
        own[index] = True
        kept = kept & own.reshape([-1 if i == axis else 1 for i in range(array.ndim)])
    return np.where(kept, array, np.asarray(fill).astype(array.dtype))


def _in_parts(pair: PairOfCalls) -> Comparisons:
    rules: dict[str, list[PartitionRule]] = {}
    for rule in partition_rules(pair.full):
        beside = all(how.kind == "beside" for how in rule.outputs.values())
        if beside and rule.refusal is None and rule.extent > 1:
            rules.setdefault(rule.dimension, []).append(rule)

    def compared(dimension: str) -> BitDifference | None:
        rng = pair.rng("split", dimension)
        rule = rules[dimension][int(rng.integers(len(rules[dimension])))]
        number = next(n for n in range(2, rule.extent + 1) if not rule.equal or rule.extent % n == 0)
        first = int(rng.integers(1, rule.extent))
        extents = [rule.extent // number] * number if rule.equal else [first, rule.extent - first]
        pieces = pieces_of(pair.full, rule, extents)
        if not all(pair.limits.takes(n) for piece in pieces for n in piece.options):
            raise UnsupportedError(f"it takes no {', '.join(pieces[0].options)}, which parts along {rule.name} need")
        ran = []
        for piece in pieces:
            options = {**piece.options, **({"wants": piece.wants} if pair.full.spec.is_vjp else {})}
            ran.append(pair.ran(pair.bound(piece.arrays, options), {**pair.case.options, **options}).outputs)
        return pair.differ(pair.results, dict(zip(pair.full.wants, combined(pair.full, rule, ran), strict=True)))

    for dimension in rules:
        yield dimension, functools.partial(compared, dimension)


class BitProperty(NamedTuple):
    """A property: in words, and where it may be tried on a call."""

    words: str
    comparisons: Callable[[PairOfCalls], Comparisons]


PROPERTIES: Mapping[str, BitProperty] = {
    "repeat": BitProperty("the same call gives the same bits again", _again),
    "batch": BitProperty(
        "an index alone has the bits that it has among others", functools.partial(_alone, numbered=False)
    ),
    "packing": BitProperty(
        "a sequence alone has the bits that it has packed with others", functools.partial(_alone, numbered=True)
    ),
    "padding": BitProperty("an index has the same bits whatever others hold: zeros, NaN or infinities", _padded),
    "split": BitProperty("parts of a call, side by side, have the bits of the call", _in_parts),
    "layout": BitProperty("the same values in another memory layout give the same bits", _in_layouts),
    "law": BitProperty("a law of the spec holds to the bit", lambda pair: iter(())),
}
"""Every property, under its name."""
LAW = "law"


# ------------------------------------------------------------------------------------------------------------ a report
@dataclass
class InvarianceRow:
    """One property along a dimension, in a layout, or of a law.

    Attributes:
      name: of the property; along: the dimension, layout or law.
      cases: the calls that were compared; same: those with the same bits. refused: the calls that were refused;
        failed: those that raised something else.
      difference: in the smallest case that breaks it, or what that raises; why: the first refusal.
      case: the smallest case that breaks it, as JSON; shapes: its shapes. largest: the largest difference of all.
    """

    name: str
    along: str
    cases: int = 0
    same: int = 0
    refused: int = 0
    failed: int = 0
    difference: str | None = None
    case: str | None = None
    shapes: str | None = None
    largest: float = 0.0
    why: str | None = None

    @property
    def broken(self) -> bool:
        return bool(self.failed) or self.same < self.cases

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)


@dataclass
class InvarianceReport:
    """Which properties an implementation holds.

    Attributes:
      op, subject: what was tried; seed: of its cases. rows: by property and place.
      unordered: outputs that are declared to have no fixed order, and are not compared -> why.
      left_out: cases that were not run, since the time was up.
    """

    op: str
    subject: str
    seed: int
    rows: list[InvarianceRow] = field(default_factory=list)
    unordered: Mapping[str, str] = field(default_factory=dict)
    left_out: int = 0

    @property
    def passed(self) -> bool:
        """Whether something was compared, and no property was broken."""
        return any(r.cases for r in self.rows) and not any(r.broken for r in self.rows)

    def holds(self, property: str) -> bool | None:
        """Whether a property held wherever it was tried; None where it was not."""
        mine = [r for r in self.rows if r.name == property and (r.cases or r.failed)]
        return not any(r.broken for r in mine) if mine else None

    def row(self, property: str, along: str) -> InvarianceRow:
        """The row of a property at a place, made where there is none yet."""
        found = next((r for r in self.rows if (r.name, r.along) == (property, along)), None)
        if found is None:
            self.rows.append(found := InvarianceRow(property, along))
        return found


class Broke(NamedTuple):
    """What became of one comparison: a difference, or what was raised."""

    what: str
    largest: float
    failed: bool


def invariance(
    op: str | Spec[Any],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    fn: Callable[..., Any] | None = None,
    framework: str = "numpy",
    device: str | None = None,
    properties: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    cases: int = CASES,
    seed: int = 0,
    seconds: float | None = None,
    case: str | None = None,
) -> InvarianceReport:
    """Which bits of an implementation depend on what they should not: the batch, padding, the packing of sequences, the
    cut of a call, the memory layout, or the time.

    >>> pk.invariance("softmax", backend="triton").passed
    >>> pk.invariance("matmul", fn=my_matmul, framework="torch", properties=["batch"]).rows[0].difference

    Args:
      op, backend, variant, fn, framework, device: as for :func:`portakern.check`; any backend, peers too.
      properties: those to try, names of :data:`PROPERTIES`; None: each that the op's declaration has.
      dtypes: the op's dtypes; None: all that the implementation serves, by turns.
      cases: number of drawn calls; seed: their seed; seconds: time after which no further call is drawn.
      case: try this case alone: the JSON text of a row.

    Returns:
      A report with a row for each property and dimension; ``report.passed`` is False where one was broken.

    Raises:
      SpecError: unknown names. UnavailableError: the backend cannot run here.
    """
    subject = subject_of(op, backend, variant, fn, framework, device)
    return invariance_of(subject, properties, dtypes, cases, seed, seconds, case)


def invariance_of(
    subject: Subject,
    properties: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    cases: int = CASES,
    seed: int = 0,
    seconds: float | None = None,
    case: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> InvarianceReport:
    """:func:`invariance` of what is made of a backend, a function or a file; ``options``: values that are built in."""
    spec, wanted = subject.spec, tuple(properties or PROPERTIES)
    for name in wanted:
        if name not in PROPERTIES:
            raise SpecError(
                f"invariance({spec.name!r}): property {shown(name)} is unknown; expected some of "
                f"{', '.join(PROPERTIES)}"
            )
    if type(cases) is not int or cases < 1:
        raise SpecError(f"invariance({spec.name!r}): cases is {shown(cases)}; expected a whole number >= 1")
    limits = CheckOptions(dtypes=dtypes, seed=seed, empty=False, options=options).limits_of(subject)
    run = _InvarianceRun(subject, limits, wanted, InvarianceReport(spec.name, subject.name, seed))
    run.report.unordered = subject.unordered
    run.until = None if seconds is None else time.perf_counter() + seconds
    with subject.context():
        if case is not None:
            run.one(printed.read(spec, case), 0, None, every=True)
        else:
            run.all_of(cases, seed)
    run.report.rows.sort(key=lambda r: ([*PROPERTIES].index(r.name), r.along))
    return run.report


class CaseSource(NamedTuple):
    """The choices that a case was drawn from, which are made smaller."""

    source: Source
    preset: CasePreset
    fills: bool


@dataclass
class _InvarianceRun:
    """An investigation in progress. ``until``: the time after which no case begins."""

    subject: Subject
    limits: Limits
    wanted: Sequence[str]
    report: InvarianceReport
    until: float | None = None

    @property
    def over(self) -> bool:
        return self.until is not None and time.perf_counter() > self.until

    def all_of(self, count: int, seed: int) -> None:
        """Draw cases and try them, then the laws."""
        spec, dtypes = self.subject.spec, dtypes_of(self.subject.spec, self.limits)
        plain = [name for name in self.wanted if name != LAW]
        for i, dtype in enumerate(dtype_cycle(dtypes, count) if plain else ()):
            if self.over:
                self.report.left_out += 1
                continue
            preset, fills = CasePreset(dtype, regime="normal", followup=""), bool(self.limits.fill) and i % 3 == 2
            try:
                case, source = drawn(seed * 1000 + i, spec, self.limits, {}, None, preset, fills)
            except Rejected:
                raise SpecError(
                    f"invariance({spec.name!r}): no call was found that obeys the op's rules; declare values with "
                    f"@{spec.name}.values(argument)"
                ) from None
            self.one(case, i, CaseSource(source, preset, fills))
        for number, law in enumerate(spec.laws if LAW in self.wanted else ()):
            there = [d for d in dtypes if not (self.subject.oracle and DTYPES[d].bits > 32)]
            for i, dtype in enumerate(dtype_cycle(there, max(2, count // 8), number)):
                if not self.over:
                    self.law(LawCase(law, dtype, seed * 1000 + i))

    def redrawn(self, drawn_from: CaseSource, choices: Sequence[int] | None) -> Case | None:
        """The case of these choices; None where there is none, or the time is up."""
        if self.over:
            return None
        drawn_from.source.begin(choices)
        try:
            return case_of(
                drawn_from.source, self.subject.spec, self.limits, {}, None, drawn_from.preset, drawn_from.fills
            )
        except Rejected:
            return None

    def one(self, case: Case | LawCase, number: int, drawn_from: CaseSource | None, every: bool = False) -> None:
        """Try a case; ``every``: at all places of each property."""
        if isinstance(case, LawCase):
            return self.law(case)
        pair = PairOfCalls(self.subject, case, self.limits)
        for name in self.wanted:
            known = [along for along, _ in PROPERTIES[name].comparisons(pair)]
            for i in range(len(known) if every else min(EACH, len(known))):
                along = known[(number * EACH + i) % len(known)]
                row = self.report.row(name, along)
                broke = self.compare(pair, name, along, row)
                if broke is not None and row.case is None:
                    self.keep(row, *self.smallest(case, name, along, broke, drawn_from))

    def compare(self, pair: PairOfCalls, name: str, along: str, row: InvarianceRow | None) -> Broke | None:
        """Compare two calls; what differed or was raised. The row counts it, where there is one."""
        row = row or InvarianceRow(name, along)
        found = next((c for at, c in PROPERTIES[name].comparisons(pair) if at == along), None)
        if found is None:
            return None
        try:
            difference = found()
        except (NotEmulatedError, UnsupportedError) as e:
            row.refused += 1
            row.why = row.why or str(e)
            return None
        except Exception as e:
            if not self.subject.at_fault(e):
                raise
            row.failed += 1
            return Broke(advised(f"raised {type(e).__name__}: {e}"), 0.0, failed=True)
        row.cases += 1
        row.same += difference is None
        if difference is None:
            return None
        row.largest = max(row.largest, difference.largest)
        return Broke(str(difference), difference.largest, failed=False)

    def smallest(
        self, case: Case, name: str, along: str, broke: Broke, drawn_from: CaseSource | None
    ) -> tuple[Case, Broke]:
        """The smallest case that breaks a property there in the same way, and how."""
        if drawn_from is None:
            return case, broke

        def fails(those: CaseSource, choices: Sequence[int] | None) -> tuple[Case, Broke] | None:
            less = self.redrawn(those, choices)
            if less is None:
                return None
            found = self.compare(PairOfCalls(self.subject, less, self.limits), name, along, None)
            return (less, found) if found is not None and found.failed == broke.failed else None

        odd = drawn_from.preset._replace(kind="odd")  # small extents, which people seldom have
        for i in range(ODD):
            small = CaseSource(Source(drawn_from.source.seed + i * SEEDS), odd, fills=False)
            if first := fails(small, None):
                return shrunk([*small.source.choices], functools.partial(fails, small)) or first
        self.redrawn(drawn_from, None)
        return shrunk([*drawn_from.source.choices], functools.partial(fails, drawn_from)) or (case, broke)

    def keep(self, row: InvarianceRow, case: Case, broke: Broke) -> None:
        row.difference, row.case = broke.what, case.to_json()
        row.shapes = ", ".join(f"{n} {[*s]}" for n, s in case.shapes.items())
        row.largest = max(row.largest, broke.largest)

    def law(self, case: LawCase) -> None:
        """Try an instance of a law."""
        row = self.report.row(LAW, case.law)
        try:
            compared = run_law(self.subject, case, self.limits)
            row.cases, row.same = row.cases + compared, row.same + compared
        except ArgumentNotTaken:
            return
        except UnsupportedError as e:
            row.refused += 1
            row.why = row.why or str(e)
        except Exception as e:
            if not self.subject.at_fault(e):
                raise
            broken = isinstance(e, BrokenPromise)
            row.cases, row.failed = row.cases + broken, row.failed + (not broken)
            if row.case is None:
                row.difference = str(e) if broken else advised(f"raised {type(e).__name__}: {e}")
                row.case = case.to_json()
