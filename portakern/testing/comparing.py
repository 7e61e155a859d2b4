"""Run one case: a sequence of calls, and the checks of each call."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.call import Call
from portakern.core.framework import Framework, strided_view
from portakern.core.oracle import as_float64, broken_rule
from portakern.errors import NotEmulatedError, SpecError, UnsupportedError
from portakern.spec import Spec
from portakern.spec.dtypes import DTYPES, numpy_dtype
from portakern.testing.cases import Case, fixed_values, generators
from portakern.testing.evidence import source_of_nan
from portakern.testing.layouts import REPEATS, Buffer, same_bits
from portakern.testing.report import Report
from portakern.testing.sampled import SampledCall, part_call, repeated
from portakern.testing.subject import Subject
from portakern.testing.verdict import (
    LOOKS,
    PROMISES,
    Broken,
    BrokenPromise,
    OtherEdges,
    Refused,
    compare_call,
    compare_elsewhere,
    expected,
)

__all__ = ["run_case", "wanted_outputs"]


RENEWED = 1 << 30
"""The bit of a case's seed that makes its values others."""

WAYS = 10
"""Of so many cases one is called in each other way that people have."""


@dataclass(frozen=True)
class CallOutputs:
    """The outputs of a call: the arrays, which a later call might overwrite, and a copy of their values."""

    outputs: tuple[Any, ...]
    values: tuple[np.ndarray, ...]

    def same(self, other: CallOutputs, which: Collection[int] | None = None) -> bool:
        """Whether both hold the same bits. ``which``: in the outputs at these places; None: in all."""
        pairs = enumerate(zip(self.values, other.values, strict=True))
        return all(same_bits(*pair) for i, pair in pairs if which is None or i in which)


class CaseOnSubject:
    """A case on a subject. ``excused``: kinds of failures that are not reported, since they are known or were not
    requested."""

    def __init__(self, subject: Subject, case: Case, excused: Collection[str]) -> None:
        self.subject, self.case, self.excused = subject, case, excused
        self.any_order = bool({BrokenPromise.kind, "sums"} & {*excused})
        self.fw: Framework = subject.framework
        self.buffers = case.buffers(subject.spec)
        self.reference = self.bound(self.buffers)
        self.part = SampledCall.from_call(self.reference, case.seed, case.aliased)
        if self.part.stands:
            self.buffers = repeated(self.buffers, self.reference, self.part.chosen, self.part.stands)
            self.reference = self.bound(self.buffers)
        self.arrays = self.place_arrays()
        self.overrides, self.tiling, self.illegal = subject.tiling(case, self.reference)
        self.run = subject.run(self.overrides)
        self.now: dict[str, np.ndarray] = {}  # what inputs hold that were changed
        self.now_buffers: Mapping[str, Buffer] = self.buffers

    @property
    def ran_with(self) -> str:
        """Its tiling in words."""
        return " ".join(f"{k}={v}" for k, v in self.overrides.items()) or "default"

    def bound(self, buffers: Mapping[str, Buffer]) -> Call:
        """The call as the oracle gets it, with what ran it."""
        call = bind(self.subject.spec, **{n: b.view() for n, b in buffers.items()}, **self.case.options)
        call.target, call.interpret = self.subject.target, self.subject.interpret
        call.any_order = self.any_order
        return call

    def place_arrays(self) -> dict[str, Any]:
        """The case's arrays in the subject's framework and on its device, each in memory of its own."""
        placed: dict[int, Any] = {}
        for b in self.buffers.values():
            if id(b) not in placed:
                memory = b.memory.copy()
                placed[id(b)] = self.fw.strided(memory, b.shape, b.strides, b.offset, self.subject.device)
        return {n: placed[id(b)] for n, b in self.buffers.items()}

    def called(self, **overwrite: Any) -> Any:
        """The call, required arrays by position as users pass them; an option that has no default there by its own."""
        spec, arrays = self.subject.spec, self.arrays
        positional = [arrays[a.name] for a in spec.arrays if not a.optional]
        named = {a.name: arrays[a.name] for a in spec.arrays if a.optional and a.name in arrays}
        options = {o.name: o.default for o in spec.options if o.name in self.subject.always} | {**self.case.options}
        known = self.subject.arguments
        options = {n: v for n, v in options.items() if known is None or n in known}
        with self.fw.compiled_each():
            return self.run(*positional, **named, **options, **overwrite)

    def breaks(self, which: str, what: str) -> None:
        """A promise is broken; told unless it is known, or nobody asked for it."""
        if not {BrokenPromise.kind, which} & {*self.excused}:
            raise BrokenPromise(what, which, PROMISES[which])

    def hold(self, result: Any, call: Call, arrays: Mapping[str, Any]) -> CallOutputs:
        """The wanted outputs, copied at once, and held to whose arrays they are and what memory they may take."""
        outputs = wanted_outputs(result, call)
        if len(outputs) != len(call.wants):
            raise Broken(
                f"{len(outputs)} outputs came back; expected {len(call.wants)}: {', '.join(call.wants)}, and None for "
                "each that call.wants does not name",
                "form",
                LOOKS["form"],
            )
        fw, values = self.fw, []
        for name, out in zip(call.wants, outputs, strict=True):
            if not fw.owns(out):
                what = f"{name} came back as a {type(out).__name__}; expected a {fw.name} array"
                raise Broken(what, "form", LOOKS["form"])
            if not fw.settled(type(out)):
                what = f"{name} came back as a {type(out).__name__}, which may compute its values when they are read"
                raise Broken(f"{what}; expected a plain {fw.name} array", "form", LOOKS["form"])
            shown = fw.to_numpy(out)
            taken = call.spec.aliases[name] if call.overwritten(name) is not None else None
            if taken is not None and shown.size and not self.lies_over(out, arrays[taken]):
                self.breaks("overwrite", f"{name} is not in the memory of {taken}, which it must overwrite")
            if not fw.contiguous(out):
                self.breaks("contiguous", f"{name} is not contiguous")
            for other, array in arrays.items():
                if fw.overlap(out, array) and other != taken:
                    self.breaks("own_memory", f"{name} shares memory with the input {other}")
            declared = call.outputs[name][1]
            values.append(
                np.array(shown, numpy_dtype(declared) if shown.dtype.name == fw.stored_dtype(declared) else None)
            )
        return CallOutputs(outputs, tuple(values))

    def lies_over(self, out: Any, array: Any) -> bool:
        """Whether an output is an input's memory."""
        fw = self.fw
        return fw.overlap(out, array) and same_bits(fw.to_numpy(out), fw.to_numpy(array))

    def compare(self, outputs: CallOutputs, call: Call, regime: str = "") -> dict[str, float]:
        """The fractions of the bound; none where NaN and infinities lead elsewhere, and that is known. What is wrong
        but for sums in another order than was promised breaks that promise alone."""
        try:
            return self.compared(outputs, call, regime)
        except OtherEdges:
            if OtherEdges.kind not in self.excused:
                raise
            return {}
        except Broken as e:
            if call.any_order or e.cause == "form":
                raise
            try:
                fractions = self.compared(outputs, call.replace(any_order=True), regime)
            except Broken:
                raise e from None
            self.breaks("sums", str(e))
            return fractions

    def compared(self, outputs: CallOutputs, call: Call, regime: str) -> dict[str, float]:
        """Of a large call as much as the oracle computes in a moment is compared, and the rest with what stands for it
        there."""
        part = self.part
        if not part.chosen:
            return compare_call(call, outputs.values, self.tiling, regime)
        some = part_call(call, self.now_buffers, part.chosen, self.case.options)
        values = self.parts_of(outputs, call)
        whole = dict(zip(call.wants, outputs.values, strict=True))
        known = expected(some)
        fractions = compare_call(some, values, self.tiling, regime, (part, whole), known)
        for name, value in zip(call.wants, values, strict=True) if part.stands else ():
            compare_elsewhere(some, name, whole[name], value, part, known)
        return fractions

    def parts_of(self, outputs: CallOutputs, call: Call) -> list[np.ndarray]:
        """The parts of outputs that are compared; Broken where those are of another form."""
        for name, value in zip(call.wants, outputs.values, strict=True):
            shape, dtype = call.outputs[name]
            if value.shape != shape or value.dtype.name != dtype:
                raise Broken(
                    f"{name} is {value.dtype.name} {value.shape}; expected {dtype} {shape}", "form", LOOKS["form"]
                )
        return [self.part.part_of_output(n, v) for n, v in zip(call.wants, outputs.values, strict=True)]

    def otherwise(self, first: CallOutputs, call: Call) -> None:
        """Now and then the call once more in another way that people have: it is as right there."""
        ways = self.subject.call_variants
        turn = self.case.seed >> 4
        if not ways or turn % WAYS >= len(ways) or call.degenerate:
            return
        words, way = [*ways.items()][turn % WAYS]
        run, self.run = self.run, way(self.run)
        try:
            found = self.hold(self.called(), call, self.arrays)
            if not found.same(first):
                self.compare(found, call)
        except BrokenPromise as e:
            raise e.after(words) from None
        except Broken as e:
            raise e.after(words, "way", f"right, but for calls {words}") from None
        except UnsupportedError:
            raise
        except Exception as e:
            self.breaks("ways", f"{words}: raised {type(e).__name__}: {e}")
        finally:
            self.run = run

    def again(self, before: CallOutputs, call: Call, arrays: Mapping[str, Any]) -> CallOutputs:
        """The call once more: the same bits in other memory, and what came before left alone."""
        after = self.hold(self.called(), call, arrays)
        if not after.same(before, self.ordered(call)):
            try:
                self.compare(after, call)
            except Broken as e:
                raise e.after("called again", "once", "right on the first call only") from None
            self.breaks("same_bits", "the same call twice gave different bits")
        self.apart(before, after, call)
        return after

    def ordered(self, call: Call) -> list[int]:
        """The places of those outputs of a call whose bits are promised."""
        return [i for i, name in enumerate(call.wants) if name not in self.subject.unordered]

    def apart(self, before: CallOutputs, after: CallOutputs, call: Call) -> None:
        """A result is its caller's: a later call neither hands the same memory out nor writes to it."""
        for i, name in enumerate(call.wants):
            first, second = before.outputs[i], after.outputs[i]
            if self.fw.immutable or not before.values[i].size:
                continue
            if self.fw.overlap(first, second):
                self.breaks("kept", f"{name} of two calls shares memory: the second overwrites the first's")
            if not same_bits(self.fw.to_numpy(first).astype(before.values[i].dtype, copy=False), before.values[i]):
                self.breaks("kept", f"{name} of an earlier call was overwritten by a later one")

    def untouched(self, arrays: Mapping[str, Any], call: Call) -> bool:
        """Whether every input holds what it held, but for those that the call has written over."""
        as_it_was = True
        for name, b in self.buffers.items():
            shown = self.fw.to_numpy(arrays[name]).astype(b.memory.dtype, copy=False)  # JAX holds int64 as int32
            if name not in call.over and not same_bits(shown, self.now.get(name, b.view())):
                self.breaks("inputs", f"the input {name} was written to")
                as_it_was = False
            self.surroundings(name, b, arrays[name])
        return as_it_was

    def surroundings(self, name: str, b: Buffer, array: Any) -> None:
        """What lies beside an input in its memory, which a kernel that misses an end would write to."""
        whole = self.fw.memory(array) if b.memory.size > math.prod(b.shape) else None
        if whole is None or whole.size != b.memory.nbytes:
            return
        beside, word = np.ones(b.memory.size, bool), np.dtype(f"u{b.memory.itemsize}")
        strided_view(beside, b.shape, b.strides, b.offset)[...] = False
        changed = beside & (whole.view(word) != b.memory.view(word))
        if changed.any():
            first = int(np.argmax(changed)) - b.offset
            self.breaks("outside", f"memory outside the input {name} was written to, {first} elements from its start")

    def changed(self, first: CallOutputs) -> None:
        """An input takes other values where it lies, and the call is made a third time; "often": it changes there and
        back again.

        A kernel that keeps results by an array's identity, by a shape, or from its n-th call on, gives old ones here.
        """
        name = _changeable(self.subject.spec, self.case)
        if (name is None or self.case.seed >> 8 & 1) and (self.renewed(first) or name is None):
            return
        b = self.buffers[name]
        negated = Buffer(-b.memory, b.shape, b.strides, b.offset)
        buffers = {**self.buffers, name: negated}
        other = self.bound(buffers)
        if any(r.values for r in other.spec.require) and broken_rule(as_float64(other)):
            return
        self.negate(name)
        second = self.on_others(first, other, buffers, f"after {name} was negated in place")
        for turn in range(4 if self.case.followup == "often" else 0):
            self.negate(name)
            self.now_buffers = self.buffers if turn % 2 == 0 else buffers
            self.again(first if turn % 2 == 0 else second, self.reference if turn % 2 == 0 else other, self.arrays)

    def renewed(self, first: CallOutputs) -> bool:
        """Every input takes other values where it lies, integers and what the forward op saved too, and the call is
        made a third time. A kernel that keeps what it read of any of them gives old results. Whether it could be."""
        spec, case = self.subject.spec, self.case
        kinds = {a.name: case.dtype_of(a) for a in spec.arrays if a.name in case.shapes}
        case = replace(case, seed=case.seed ^ RENEWED, dtypes=kinds)
        if self.part.chosen or {*REPEATS} & {*case.layouts.values()} or not case.obeys(spec):
            return False
        buffers = case.buffers(spec)
        other = self.bound(buffers)
        if [b.strides for b in buffers.values()] != [b.strides for b in self.buffers.values()]:
            return False
        for name, b in buffers.items():
            self.write(name, b.view())
        self.on_others(first, other, buffers, "after every input took other values in place")
        return True

    def on_others(self, first: CallOutputs, other: Call, buffers: Mapping[str, Buffer], when: str) -> CallOutputs:
        """The call on the values that its arrays hold now; ``when``: since what, in words."""
        self.now_buffers = {**buffers}
        second = self.hold(self.called(), other, self.arrays)
        try:
            self.compare(second, other)
        except Broken as e:
            kept = ("kept", "the result of an earlier call was kept") if second.same(first) else ()
            raise e.after(when, *kept) from None
        self.apart(first, second, other)
        self.untouched(self.arrays, other)
        return second

    def write(self, name: str, values: np.ndarray) -> None:
        """Other values in an argument, where it lies if arrays change."""
        given = self.fw.from_numpy(np.array(values), self.subject.device)
        if self.fw.immutable:
            self.arrays = {**self.arrays, name: given}
        else:
            self.fw.write(self.arrays[name], given)
        self.now[name] = np.array(self.fw.to_numpy(self.arrays[name])).astype(values.dtype, copy=False)

    def over(self, first: CallOutputs | None) -> None:
        """The call once more, its results written over inputs: the same bits, there, and nothing else is changed. What
        a result cannot lie over is refused before anything is."""
        spec, call = self.subject.spec, self.reference
        wanted = [n for out, n in spec.aliases.items() if out in call.wants and n in self.buffers]
        self.arrays, self.now = self.place_arrays(), {}
        able = [n for n in wanted if self.may_be_overwritten(n)]
        for name in (n for n in wanted if n not in able):
            try:
                self.called(overwrite=name)
            except SpecError:
                continue
            finally:
                self.untouched(self.arrays, call)
            self.breaks("overwrite", f"a result was written over {name}, whose elements share memory")
        if not able:
            return
        call = call.replace(over=tuple(able))
        found = self.overwriting(tuple(able))
        if found is None:  # not in this tiling, whose bits the first ones are
            self.run = self.subject.run({})
            found, first = self.overwriting(tuple(able)), first if not self.overrides else None
        if found is None:
            return
        second = self.hold(found, call, self.arrays)
        names = " and ".join(able)
        if first is None or not second.same(first, self.ordered(call)):
            try:
                self.compare(second, self.reference)
            except Broken as e:
                raise e.after(f"with overwrite of {names}", "overwrite", PROMISES["overwrite"]) from None
            if first is not None:
                self.breaks("overwrite", f"with overwrite of {names} the call gives other bits")
        self.untouched(self.arrays, call)

    def overwriting(self, names: tuple[str, ...]) -> Any:
        """The call with results over these arguments; None where its tiling does not allow it."""
        try:
            return self.called(overwrite=names)
        except UnsupportedError as e:
            if not self.subject.accepts(str(e)):
                raise Refused(f"refused, but the backend does not declare this refusal: {e}") from e
            return None

    def may_be_overwritten(self, name: str) -> bool:
        """Whether a result may lie over an argument: alone in its memory, and without gaps."""
        others = [a for n, a in self.arrays.items() if n != name]
        return 0 in self.arrays[name].shape or self.fw.may_overwrite(self.arrays[name], others)

    def negate(self, name: str) -> None:
        """The same array with every element negated; a new one where arrays never change."""
        if self.fw.immutable:
            self.arrays = {**self.arrays, name: -self.arrays[name]}
        else:
            self.arrays[name][...] = -self.arrays[name]
        self.now[name] = np.array(self.fw.to_numpy(self.arrays[name]))  # libraries differ in the sign of a NaN


def wanted_outputs(result: Any, call: Call) -> tuple[Any, ...]:
    """The outputs that a call wants, of what came back: a bare array, or a tuple or list with a place for each output
    of the op, where others may be there as well, or for each that is wanted."""
    if not isinstance(result, tuple | list):
        return (result,)
    if len(result) == len(call.spec.outputs) > len(call.wants):
        places = {o.name: out for o, out in zip(call.spec.outputs, result, strict=True)}
        if all(places[name] is not None for name in call.wants):
            return tuple(places[name] for name in call.wants)
    return tuple(o for o in result if o is not None)


def run_case(subject: Subject, case: Case, report: Report, excused: Collection[str] = ()) -> None:
    """Run one case; raise Broken where the contract is."""
    trial = CaseOnSubject(subject, case, excused)
    _call, fw = trial.reference, subject.framework
    try:
        with fw.poisoned(subject.run):
            got = trial.called()
        _check_contract(trial, got, report)
    except NotEmulatedError as e:
        report.add_refusal(e)
        return
    except UnsupportedError as e:  # of the first call, or of one with other values in the same arrays
        if not subject.accepts(str(e)):
            raise Refused(f"refused, but the backend does not declare this refusal: {e}") from e
        report.add_refusal(e)
        return
    except Broken as e:
        e.tiling = trial.ran_with
        raise
    if trial.illegal:
        report.tilings_refused[trial.illegal] += 1
    report.add_case(case, trial.ran_with)


def _check_contract(trial: CaseOnSubject, actual: Any, report: Report) -> None:
    """Hold the first call's result, and all calls that follow, to the contract."""
    subject, case, call = trial.subject, trial.case, trial.reference
    first = trial.hold(actual, call, trial.arrays)
    try:
        fractions = trial.compare(first, call, _random_regime(subject.spec, case))
    except Broken as e:
        if (source := source_of_nan(trial, e.cause, first)) is not None:
            e.cause, e.explanation = source
        raise
    kept = trial.untouched(trial.arrays, call)
    if not kept:
        trial.arrays = trial.place_arrays()
    trial.again(first, call, trial.arrays)
    if kept:
        trial.otherwise(first, call)
    if trial.untouched(trial.arrays, call) and kept and case.followup:
        trial.changed(first)
    if subject.overwrites:
        trial.over(first)
    report.add_errors(fractions, case)


def _changeable(spec: Spec[Any], case: Case) -> str | None:
    """An argument whose values may be others without making the call another: none that a saved result follows from,
    that a generator made, or whose elements share memory."""
    forward = registry.forward_of(spec) if spec.is_vjp else None
    fixed = {*fixed_values(spec, forward), *spec.masks, *case.aliased}
    if forward:
        fixed |= {a.name for a in forward.arrays} | {o.name for o in forward.outputs}
    free = [
        a.name
        for a in spec.arrays
        if a.name in case.shapes and a.name not in fixed and case.layouts.get(a.name) not in REPEATS
        and DTYPES[case.dtype_of(a)].floating and DTYPES[case.dtype_of(a)].bits > 8
    ]  # fmt: skip
    return free[case.seed % len(free)] if free else None


def _random_regime(spec: Spec[Any], case: Case) -> str:
    """The regime whose values the case holds; none where they were planted, repeated, or made by a generator."""
    made = generators(spec, registry.forward_of(spec) if spec.is_vjp else None)
    shaped = any(a.name in made and a.name in case.shapes and a.follows for a in spec.arrays)
    special = case.edge or case.masks or case.aliased or {*REPEATS} & {*case.layouts.values()} or shaped
    return "" if special else case.regime
