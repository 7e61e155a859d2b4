"""The verdict on a contender's result: comparison with the op's derived bound, in pieces if the call is large."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from portakern.core.framework import DTYPE_NAME, Framework
from portakern.core.instruments import Instruments
from portakern.core.targets import Target
from portakern.spec import Spec
from portakern.spec.dtypes import DTYPES, numpy_dtype
from portakern.spec.tolerance import compare
from portakern.testing.sampled import chosen_axes, part_call, picked, pieces
from portakern.testing.verdict import expected
from portakern.tools.bench.inputs import Inputs

__all__ = ["Expected", "Judge", "Known", "Verdict"]

WORK = 2e8
"""Operations that the oracle may take for a piece of a large call: a fraction of a second."""

MOST = 2**22
"""Elements of an output that are compared, where its pieces are larger."""


class Verdict(NamedTuple):
    """``right``: every element that was looked at lies within its bound. ``errors``: output -> the largest error in
    units of the bound, inf where that is no number. ``why``: what is wrong, in words."""

    right: bool
    errors: Mapping[str, float]
    why: str


class Expected(NamedTuple):
    """A piece of an output: its position, its exact values, and the permitted error."""

    name: str
    chosen: Mapping[str, Any]
    exact: np.ndarray
    bound: np.ndarray


Known = dict[tuple[Target, bool], list[Expected]]
"""What is expected on a target, compiled or interpreted."""


@dataclass
class Judge:
    """Compares the results of one call. Expected values are computed once for each kind of machine."""

    inputs: Inputs
    seed: int = 0
    known: Known = field(default_factory=dict)

    def verdict(self, framework: Framework, outputs: Sequence[Any], target: Target, interpret: bool) -> Verdict:
        """The verdict on the wanted outputs, arrays of ``framework``."""
        call = self.inputs.call
        if len(outputs) != len(call.wants):
            return Verdict(False, {}, f"{len(outputs)} outputs came back; expected {', '.join(call.wants)}")
        instruments = framework.instruments(framework.device(outputs[0]))
        for name, out in zip(call.wants, outputs, strict=True):
            shape, dtype = call.outputs[name]
            if not framework.owns(out) or tuple(out.shape) != shape:
                return Verdict(False, {}, f"{name} is {_describe(out)}; expected {dtype} {shape}")
            if not framework.settled(type(out)):
                why = f"{name} is a {type(out).__name__}, which may compute its values when they are read"
                return Verdict(False, {}, f"{why}; expected a plain {framework.title} array")
            if _name(out) != framework.stored_dtype(dtype):
                return Verdict(False, {}, f"{name} is {_name(out)}; expected {dtype}")
            if DTYPES[dtype].floating and instruments.has_nan(out):
                return Verdict(False, {name: math.inf}, f"{name} holds NaN, and no input does")
        among = self.expect(target, interpret)
        return self._compared(dict(zip(call.wants, outputs, strict=True)), among, instruments)

    def _compared(self, outputs: Mapping[str, Any], among: Sequence[Expected], instruments: Instruments) -> Verdict:
        call, errors, why = self.inputs.call, dict.fromkeys(outputs, 0.0), ""
        notation = {o.name: o.dims for o in call.spec.outputs}
        for piece in among:
            shape, dtype = call.outputs[piece.name]
            found_at = chosen_axes(shape, notation[piece.name], call, piece.chosen)
            got = instruments.picked(outputs[piece.name], found_at).astype(numpy_dtype(dtype), copy=False)
            found = compare(got, piece.exact, piece.bound, dtype, call.spec.output(piece.name).codes)
            bad = int(found.bad.sum())
            worst = math.inf if bad and found.worst <= 1 else found.worst
            errors[piece.name] = max(errors[piece.name], float(worst))
            if bad:
                why = why or f"{bad} of {found.bad.size} elements of {piece.name} that were compared are out of bounds"
        return Verdict(not why, errors, why)

    def expect(self, target: Target, interpret: bool) -> list[Expected]:
        """The pieces of what is expected."""
        known = self.known.get((target, interpret))
        if known is None:
            known = self.known[target, interpret] = list(self._compute(target, interpret))
        return known

    def _compute(self, target: Target, interpret: bool) -> Iterator[Expected]:
        inputs, place = self.inputs, {o.name: i for i, o in enumerate(self.inputs.spec.outputs)}
        call = inputs.counted(inputs.call) if inputs.spec.rewriter else inputs.call
        for piece in pieces(call, np.random.default_rng(self.seed), WORK):
            part = part_call(call, inputs.buffers, piece.chosen, {**inputs.options, **piece.options})
            part.target, part.interpret, part.wants = target, interpret, piece.wants
            _, exact, bounds = expected(part)
            for name in piece.wants:
                yield _thinned(Expected(name, piece.chosen, exact[place[name]], bounds[place[name]]), inputs.spec)


def _thinned(expected: Expected, spec: Spec[Any]) -> Expected:
    """Of a large output that the oracle must compute whole, such as a sum over rows for each class of a vocabulary,
    some indices along its first dimension: all would go from process to process, and be compared for seconds."""
    dims = spec.outputs[[o.name for o in spec.outputs].index(expected.name)].dims
    plain = not any(d.variadic or not d.alone for d in dims)
    if expected.exact.size <= MOST or not plain or dims[0].factors[0] in expected.chosen:
        return expected
    extent = expected.exact.shape[0]
    index = picked(np.random.default_rng(extent), extent, max(1, MOST * extent // expected.exact.size))
    chosen = {**expected.chosen, dims[0].factors[0]: [index]}
    return Expected(expected.name, chosen, expected.exact[index], expected.bound[index])


def _name(out: Any) -> str:
    return DTYPE_NAME.get(out.dtype, str(out.dtype))


def _describe(out: Any) -> str:
    """What came, in words."""
    return f"{getattr(out, 'dtype', type(out).__name__)} {tuple(getattr(out, 'shape', ()))}"
