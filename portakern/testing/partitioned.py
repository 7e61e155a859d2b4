"""Check calls that are cut into parts: the parts are computed one after the other and put together, as devices would
that hold a part each, and the result is compared with that of the full call.

Where a call may be cut, and how results are put together, is the op's rule (:mod:`portakern.core.partitions`).

* Outputs that lie side by side are within the bounds of the full call, and have its bits where the implementation
  serves both with one plan: the same variant and the same tiling. Other plans, such as one that follows the dimension
  that is cut, may sum in another order; the same holds of the oracle, and of an implementation that has no tiling.
* A sum of W parts is within sum B_p + (W - 1) u sum (|y_p| + B_p), B_p the bound of a part's call and u the unit of the
  dtype that adds, and one rounding to the result's dtype.
* A mean weighted by exp(lse) is within the bounds of the parts' calls, weighted so, and what the weights may be off by
  (:func:`_merge_error`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from portakern.core.binder import bind
from portakern.core.call import Call
from portakern.core.observe import Served, observe
from portakern.core.oracle import rounded
from portakern.core.partitions import (
    JOINED_IN_WORDS,
    CutAxis,
    Joined,
    PartitionRule,
    aligned,
    described,
    partition_rules,
)
from portakern.errors import NotEmulatedError, SpecError, UnsupportedError
from portakern.spec import Spec
from portakern.spec.dtypes import DTYPES, numpy_dtype
from portakern.spec.tolerance import format_of, magnitude, round_to
from portakern.testing.cases import Case
from portakern.testing.comparing import wanted_outputs
from portakern.testing.layouts import LAYOUTS, Buffer, other_bits
from portakern.testing.report import Report
from portakern.testing.sizes import Limits
from portakern.testing.subject import Subject
from portakern.testing.verdict import (
    LOOKS,
    Broken,
    BrokenPromise,
    Expected,
    OtherEdges,
    Refused,
    compare_bounds,
    expected,
)

__all__ = ["MOST_PARTS", "ServedCase", "check_divisible", "combined", "cut_case", "pieces_of", "run_partitioned"]

MOST_PARTS = 64

NOT_CUT = "not cut: no rule allows a cut of the call"


def check_divisible(spec: Spec[Any], count: Any) -> None:
    """SpecError where a check in parts cannot be: no number of parts, or an op without a dimension that may be cut."""
    if type(count) is not int or not 2 <= count <= MOST_PARTS:
        raise SpecError(f"check({spec.name!r}): parts is {count!r}; expected a whole number from 2 to {MOST_PARTS}")
    if not described(spec):
        raise SpecError(
            f"check({spec.name!r}): parts is {count}, and no dimension of {spec.name} may be cut; declare apart=, "
            "sums= or merges= in its spec"
        )


# ---------------------------------------------------------------------------------------------------------- what is cut
def cut_case(spec: Spec[Any], case: Case, count: int, limits: Limits) -> Case:
    """The case with the extents of its parts along a dimension, which its seed chooses among those that its rules
    allow; without any where there is none. ``count``: the most parts."""
    call = case.bound_alone(spec)
    usable = [r for r in partition_rules(call) if r.refusal is None and _divisors(r, count)]
    usable = [r for r in usable if all(map(limits.takes, r.options_at(0, r.extent)))]
    if not usable:
        return replace(case, parts={})
    rng = np.random.default_rng([case.seed, 4])
    names = list(dict.fromkeys(r.dimension for r in usable))
    dimension = names[int(rng.integers(len(names)))]
    along = [r for r in usable if r.dimension == dimension]
    rule = along[int(rng.integers(len(along)))]
    number = int(rng.choice(_divisors(rule, count)))
    if rule.equal:
        extents = [rule.extent // number] * number
    elif rng.random() < 0.3:  # as arrays are divided among devices: equal extents but for the last ones
        each = -(-rule.extent // number)
        extents = [max(0, min(each, rule.extent - i * each)) for i in range(number)]
        extents = [n for n in extents if n or _may_be_empty(spec, rule, limits)]
    else:
        ends = np.sort(rng.choice(np.arange(1, rule.extent), number - 1, replace=False))
        extents = np.diff([0, *ends, rule.extent]).tolist()
    return replace(case, parts={rule.name: [int(n) for n in extents]})


def _divisors(rule: PartitionRule, count: int) -> list[int]:
    """The numbers of parts that an axis may be cut into."""
    numbers = range(2, min(count, rule.extent) + 1)
    return [n for n in numbers if not rule.equal or rule.extent % n == 0]


def _may_be_empty(spec: Spec[Any], rule: PartitionRule, limits: Limits) -> bool:
    return limits.empty and rule.dimension not in spec.positive


class Piece(NamedTuple):
    """A part of a call: where it begins along the dimension, its extent there, its arrays and options."""

    offset: int
    extent: int
    arrays: dict[str, np.ndarray]
    options: dict[str, Any]
    wants: tuple[str, ...]


def pieces_of(call: Call, rule: PartitionRule, extents: Sequence[int]) -> list[Piece]:
    """The parts of a call of NumPy arrays, one behind the other along the dimension of the rule."""
    found = []
    for i, (offset, extent) in enumerate(ranges(extents)):
        arrays = {
            name: _taken(array, rule.arrays[name], offset, extent)
            for name, array in call.arrays.items()
            if array is not None and (i == 0 or name not in rule.once)
        }
        wants = tuple(n for n in call.wants if i == 0 or rule.outputs[n].kind != "first")
        found.append(Piece(offset, extent, arrays, part_options(rule, offset, extent), wants))
    return found


def ranges(extents: Sequence[int]) -> list[tuple[int, int]]:
    """(where it begins, its extent) of each part."""
    return [(sum(extents[:i]), extent) for i, extent in enumerate(extents)]


def part_options(rule: PartitionRule, offset: int, extent: int) -> dict[str, Any]:
    """The options of a part that are others than those of the call."""
    return rule.options_at(offset, extent)


def _taken(array: np.ndarray, at: CutAxis | None, offset: int, extent: int) -> np.ndarray:
    if at is None:
        return array
    index = [slice(None)] * array.ndim
    index[at.axis] = slice(offset * at.inner, (offset + extent) * at.inner)
    return np.ascontiguousarray(array[tuple(index)])


# --------------------------------------------------------------------------------------------------------- put together
Results = Sequence[Mapping[str, np.ndarray]]
"""The outputs of each part, by name."""


def combined(call: Call, rule: PartitionRule, results: Results) -> list[np.ndarray]:
    """The outputs that a call wants, of those of its parts, in the order of the parts.

    Sums and means are taken in float32, or in float64 for float64, one part after the other, and rounded once. So are
    results that lie side by side where the parts gave them in float32, beside sums that they were asked for so.
    """
    found = []
    for name in call.wants:
        how, dtype = rule.outputs[name], call.outputs[name][1]
        some = [r[name] for r in results if name in r]
        if how.kind == "beside":
            assert how.at is not None
            found.append(_stored(np.concatenate(some, axis=how.at.axis), dtype))
        elif how.kind == "first":
            found.append(_stored(some[0], dtype))
        else:
            wide = numpy_dtype(_adder(dtype))
            with np.errstate(all="ignore"):
                logs = [r[how.by].astype(wide) for r in results] if how.by else []
                total = _joined(call, name, how, [y.astype(wide) for y in some], logs)
            found.append(_stored(total, dtype))
    return found


def _stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """An array rounded to a dtype, or as it is where it has it."""
    return array if array.dtype == numpy_dtype(dtype) else rounded(array.astype(np.float64), dtype)


def _adder(dtype: str) -> str:
    """The dtype in which parts are added."""
    return dtype if DTYPES[dtype].bits >= 32 else "float32"


def _joined(call: Call, name: str, how: Joined, some: Sequence[np.ndarray], logs: Sequence[np.ndarray]) -> np.ndarray:
    """A sum, a mean weighted by the exponential of ``logs``, or the log-sum-exp of some."""
    if how.kind == "sum":
        return functools.reduce(np.add, some)
    logs = some if how.kind == "weight" else logs
    top = np.maximum.reduce(logs)
    level = np.where(np.isneginf(top), 0, top).astype(top.dtype)
    weights = [np.exp(x - level) for x in logs]
    total = functools.reduce(np.add, weights)
    if how.kind == "weight":
        return np.where(np.isinf(top), top, level + np.log(total))
    found = np.zeros(some[0].shape, some[0].dtype)
    for weight, log, y in zip(weights, logs, some, strict=True):
        share, none = (aligned(call, how.by, name, a) for a in (weight / total, np.isneginf(log)))
        found = found + np.where(none, 0, share * y).astype(found.dtype)
    return found


# --------------------------------------------------------------------------------------------------------------- bounds
def combined_bounds(call: Call, rule: PartitionRule, known: Expected, parts: Sequence[Expected]) -> tuple[Any, ...]:
    """The bound of each output that is put together: that of the full call (``known``) where parts lie side by side.

    Nothing is promised where nothing is of the full call, where the magnitudes of what is added reach half the range of
    the dtype that adds, or where a part's result may be infinite and that of the full call is not.
    """
    found = []
    for i, o in enumerate(call.spec.outputs):
        how = rule.outputs.get(o.name)
        if how is None or how.kind in ("beside", "first"):
            found.append(known[2][i])
            continue
        exact = [(p[1][i], np.broadcast_to(p[2][i], p[1][i].shape)) for p in parts]
        dtype = call.outputs[o.name][1]
        with np.errstate(all="ignore"):
            if how.kind == "sum":
                err = _sum_error(exact, _adder(dtype))
            else:
                names = [each.name for each in call.spec.outputs]
                at = i if how.kind == "weight" else names.index(how.by)
                logs = [(p[1][at], np.broadcast_to(p[2][at], p[1][at].shape)) for p in parts]
                err = _merge_error(call, o.name, how, exact, logs)
            bound = round_to(err, known[1][i], dtype)
        found.append(np.where(np.isposinf(known[2][i]), np.inf, bound))
    return tuple(found)


Exact = Sequence[tuple[np.ndarray, np.ndarray]]
"""Of each part an exact output and its bound."""


def _range_of(adder: str) -> float:
    return 2.0**1023 if adder == "float64" else 2.0**127


def _sum_error(exact: Exact, adder: str) -> np.ndarray:
    """sum B_p + (W - 1) u sum (|y_p| + B_p)."""
    bounds = functools.reduce(np.add, (b for _, b in exact))
    sizes = functools.reduce(np.add, (magnitude(y) for y, _ in exact)) + bounds
    err = bounds + (len(exact) - 1) * format_of(adder).U * sizes
    return np.where(np.isnan(err) | (sizes >= _range_of(adder)), np.inf, err)


def _merge_error(call: Call, name: str, how: Joined, exact: Exact, logs: Exact) -> np.ndarray:
    """How far a mean weighted by w_p = exp(l_p - l), l the log-sum-exp of the parts' l_p, or l itself may be off.

    With L the largest bound of an l_p, u the unit of the dtype that adds and ex = 8u the error of an exponential, a
    weight before it is divided is off by a share of t = 2 L + 105 u + ex: differences from the maximum that are larger
    than 104 give 0. Divided by the sum of W such weights it is off by a share h = exp(2 t + (W + 3) u) - 1, and

        mean: sum w_p (B_p (1 + h) + h |y_p|) + (W + 1) u (1 + h) sum w_p (|y_p| + B_p) + 2 tau sum (|y_p| + B_p)
        l:    L + t + (W + 4 + log W) u + u |l|
    """
    dtype, count = call.outputs[name][1], len(exact)
    adder = _adder(dtype)
    u, tau = format_of(adder).U, format_of(adder).eta
    top = np.maximum.reduce([x for x, _ in logs])
    level = np.where(np.isfinite(top), top, 0.0)
    total = np.log(functools.reduce(np.add, (np.exp(x - level) for x, _ in logs))) + level
    off = functools.reduce(np.maximum, (np.where(np.isneginf(x), 0.0, b) for x, b in logs))
    share = 2 * off + 113 * u
    if how.kind == "weight":
        err = off + share + (count + 4 + math.log(count)) * u + u * magnitude(total)
        return np.where(np.isnan(err), np.inf, err)
    h = aligned(call, how.by, name, np.expm1(2 * share + (count + 3) * u))
    err, sizes, far = np.zeros(exact[0][0].shape), np.zeros(exact[0][0].shape), np.zeros(exact[0][0].shape, bool)
    for (y, b), (x, _) in zip(exact, logs, strict=True):
        seen = aligned(call, how.by, name, ~np.isneginf(x))
        weight = np.where(seen, aligned(call, how.by, name, np.exp(x - total)), 0.0)
        size = np.where(seen, magnitude(y) + b, 0.0)
        err = err + np.where(seen, weight * (b + h * size), 0.0)
        sizes = sizes + weight * (1 + h) * size * (count + 1) * u + 2 * tau * size
        far = (
            far | (seen & np.isfinite(y) & (size >= format_of(dtype).overflow)) | (seen & np.isinf(y) & (weight < tau))
        )
    err = err + sizes
    return np.where(np.isnan(err) | far | (err >= _range_of(adder)), np.inf, err)


# ------------------------------------------------------------------------------------------------------------- one case
class ServedCall(NamedTuple):
    """The outputs of a call by name, and the plan that served it: backend, variant and tiling, None where the
    implementation does not say."""

    outputs: dict[str, np.ndarray]
    plan: tuple[Any, ...] | None


class ServedCase:
    """A case on a subject, whose calls are made of contiguous arrays. ``any_order``: whether its bounds are those of
    sums in any order."""

    def __init__(self, subject: Subject, case: Case, any_order: bool = False) -> None:
        self.subject, self.case, self.any_order = subject, case, any_order
        self.full = self.bound({n: np.array(b.view(), order="C") for n, b in case.buffers(subject.spec).items()}, {})
        self.overrides = subject.tiling(case, self.full)[0]

    def bound(self, arrays: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> Call:
        """A call of NumPy arrays, with what runs it."""
        call = bind(self.subject.spec, **arrays, **{**self.case.options, **options})
        call.target, call.interpret = self.subject.target, self.subject.interpret
        call.any_order = self.any_order
        return call

    def ran(
        self, call: Call, options: Mapping[str, Any], lay: Callable[[np.ndarray], Buffer] = LAYOUTS["contiguous"]
    ) -> ServedCall:
        """Serve a call; ``options``: those that are not at their default; ``lay``: how its arrays lie in memory."""
        subject, spec, fw = self.subject, self.subject.spec, self.subject.framework
        given = {n: self.on_device(lay(a)) for n, a in call.arrays.items() if a is not None}
        positional = [given[a.name] for a in spec.arrays if not a.optional]
        named = {a.name: given[a.name] for a in spec.arrays if a.optional and a.name in given}
        always = {o.name: o.default for o in spec.options if o.name in subject.always}
        known = subject.arguments
        options = {n: v for n, v in {**always, **options}.items() if known is None or n in known}
        seen: list[Served] = []
        with observe(seen.append), fw.compiled_each(), fw.poisoned(subject.run):
            result = subject.run(self.overrides)(*positional, **named, **options)
        plan = tuple((s.backend, s.variant, tuple(sorted(s.tiling.items()))) for s in seen) or None
        return ServedCall(dict(zip(call.wants, self.outputs_of(result, call), strict=True)), plan)

    def on_device(self, b: Buffer) -> Any:
        return self.subject.framework.strided(b.memory, b.shape, b.strides, b.offset, self.subject.device)

    def outputs_of(self, result: Any, call: Call) -> list[np.ndarray]:
        """The wanted outputs as NumPy arrays of their declared dtypes and shapes."""
        fw, outputs = self.subject.framework, wanted_outputs(result, call)
        if len(outputs) != len(call.wants):
            text = f"{len(outputs)} outputs came back; expected {len(call.wants)}: {', '.join(call.wants)}"
            raise Broken(text, "form", LOOKS["form"])
        found = []
        for name, out in zip(call.wants, outputs, strict=True):
            shape, dtype = call.outputs[name]
            array = fw.to_numpy(out)
            array = np.array(array, numpy_dtype(dtype) if array.dtype.name == fw.stored_dtype(dtype) else None)
            if array.shape != shape or array.dtype.name != dtype:
                text = f"{name} is {array.dtype.name} {array.shape}; expected {dtype} {shape}"
                raise Broken(text, "form", LOOKS["form"])
            found.append(array)
        return found


class CaseInParts(ServedCase):
    """A case that is cut, on a subject. ``excused``: kinds of failures that are not reported."""

    def __init__(self, subject: Subject, case: Case, excused: Collection[str]) -> None:
        super().__init__(subject, case, any_order=bool({BrokenPromise.kind, "sums"} & {*excused}))
        self.excused = excused
        ((name, self.extents),) = case.parts.items()
        rules = {r.name: r for r in partition_rules(self.full)}
        self.rule = _allowed(subject.spec, rules, name, self.extents)

    def hold(self) -> tuple[dict[str, float], bool]:
        """(output -> largest error / error bound, whether bits were compared); raise Broken where a result is wrong."""
        full = self.ran(self.full, self.case.options)
        calls, ran = [], []
        for i, piece in enumerate(pieces_of(self.full, self.rule, self.extents)):
            wants = {"wants": piece.wants} if self.subject.spec.is_vjp else {}
            if not piece.wants:
                continue
            call = self.bound(piece.arrays, {**piece.options, **wants})
            try:
                ran.append(self.ran(call, {**self.case.options, **piece.options, **wants}))
            except Broken as e:
                raise e.after(f"part {i + 1} of {len(self.extents)} along {self.rule.name}") from None
            calls.append(call)
        results = [r.outputs for r in ran]
        outputs = combined(self.full, self.rule, results)
        known = expected(self.full)
        sums = any(how.kind not in ("beside", "first") for how in self.rule.outputs.values())
        bounds = combined_bounds(self.full, self.rule, known, [expected(c) for c in calls] if sums else [])
        try:
            fractions = compare_bounds(self.full, outputs, known=(known[0], known[1], bounds))
        except Broken as e:
            words = f"{len(self.extents)} parts along {self.rule.name} put together"
            raise e.after(words, "parts", f"the parts are not put together as the rule says ({self.kinds()})") from None
        return fractions, self.compare_bits(full, ran, outputs)

    def kinds(self) -> str:
        """How the outputs are put together, in words."""
        kinds = {how.kind for how in self.rule.outputs.values()}
        return ", ".join(words for kind, words in JOINED_IN_WORDS.items() if kind in kinds)

    def compare_bits(self, full: ServedCall, ran: Sequence[ServedCall], outputs: Sequence[np.ndarray]) -> bool:
        """Hold outputs that lie side by side to the bits of the full call, where one plan serves both; whether it
        does. The order of the oracle's sums follows shapes, as NumPy's does, and an implementation without a tiling
        does not say its plan."""
        silent = full.plan is not None and not all(tiling for *_, tiling in full.plan)
        if self.subject.oracle or silent or any(r.plan != full.plan for r in ran):
            return False
        if {BrokenPromise.kind, "laws"} & {*self.excused}:
            return False
        for name, out in zip(self.full.wants, outputs, strict=True):
            if self.rule.outputs[name].kind != "beside" or name in self.subject.unordered:
                continue
            differ = other_bits(out, full.outputs[name])
            if differ.any():
                at = tuple(int(i) for i in np.unravel_index(int(np.argmax(differ)), differ.shape))
                raise BrokenPromise(
                    f"{name}{list(at)} of {len(self.extents)} parts along {self.rule.name} is {float(out[at]):.9g}, "
                    f"and {float(full.outputs[name][at]):.9g} of the full call; {int(differ.sum())} of {differ.size} "
                    "elements have other bits",
                    "laws",
                    "a part of a call has the bits that the full call has there, served by the same plan",
                )
        return True


def _allowed(spec: Spec[Any], rules: Mapping[str, PartitionRule], name: str, extents: Sequence[int]) -> PartitionRule:
    """The rule that a case is cut by.

    Raises:
      SpecError: no rule allows such parts.
    """
    rule = rules.get(name)
    if rule is None:
        raise SpecError(f"{spec.name}: parts names {name!r}; expected an axis among {', '.join(rules) or '(none)'}")
    if rule.refusal:
        raise SpecError(f"{spec.name}: parts along {name}: {rule.refusal}")
    if sum(extents) != rule.extent or min(extents, default=-1) < 0:
        raise SpecError(f"{spec.name}: parts along {name} are {[*extents]}; expected extents that add to {rule.extent}")
    if rule.equal and len({*extents}) > 1:
        raise SpecError(
            f"{spec.name}: parts along {name} are {[*extents]}; expected equal ones: it is one of a product"
        )
    return rule


def run_partitioned(subject: Subject, case: Case, report: Report, excused: Collection[str] = ()) -> None:
    """Run one case in its parts; raise Broken where the contract is."""
    if not case.parts:
        report.parts[NOT_CUT] += 1
        return
    try:
        trial = CaseInParts(subject, case, excused)
        fractions, bits = trial.hold()
    except NotEmulatedError as e:
        report.add_refusal(e)
        return
    except UnsupportedError as e:
        if not subject.accepts(str(e)):
            raise Refused(f"refused, but the backend does not declare this refusal: {e}") from e
        report.add_refusal(e)
        return
    except OtherEdges:
        if OtherEdges.kind not in excused:
            raise
        return
    compared = "bounds, and bits of what lies side by side" if bits else "bounds"
    report.parts[f"cut along {trial.rule.dimension} ({trial.kinds()}): {compared}"] += 1
    report.add_errors(fractions, case)
    report.add_case(
        case, "default" if not trial.overrides else " ".join(f"{k}={v}" for k, v in trial.overrides.items())
    )
