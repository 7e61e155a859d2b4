"""Gradients as users call them: the bound of the forward and the backward pass together.

The checker compares a gradient op with its formula on the arrays that the forward call saved. This module compares both
passes with the derivative of the forward formula: the oracle of the gradient op in float64, on unrounded results of the
forward oracle. The bound is that of the gradient op, which takes into account the error of the saved arrays
(:attr:`portakern.core.call.Call.off`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.call import Call
from portakern.core.gradients import wiring
from portakern.core.oracle import as_float64, oracle, rounded
from portakern.spec import Spec
from portakern.spec.dtypes import DTYPES
from portakern.spec.tolerance import format_of

__all__ = ["WholeGradient", "backward_call", "cotangents_of", "exact_rests", "fraction", "whole_gradients"]


class WholeGradient(NamedTuple):
    """The gradient with respect to one input, in float64, and the largest permitted error in the op's dtype."""

    exact: np.ndarray
    bound: np.ndarray


def cotangents_of(spec: Spec[Any], rng: np.random.Generator, call: Call) -> dict[str, np.ndarray]:
    """Random cotangents by output, of all that the gradient takes some of and the caller is shown."""
    wired, outputs = wiring(spec), call.outputs
    shown = {o.name for o in spec.shown}
    return {
        n: rounded(rng.standard_normal(outputs[n][0]), outputs[n][1])
        for n in wired.cotangents
        if n in call.wants and n in shown
    }


def whole_gradients(
    op: str, given: Mapping[str, np.ndarray], options: Mapping[str, Any], cotangents: Mapping[str, np.ndarray]
) -> dict[str, WholeGradient]:
    """By input, its gradient and the bound of that.

    Args:
      op: the forward op; given, options: its call. cotangents: output -> array, of its dtype.
    """
    spec = registry.find_spec(op)
    wired, call = wiring(spec), bind(spec, **given, **options)
    forward = wired.training(call)
    if call.degenerate:  # what is reduced over nothing is a constant
        shapes = {n: np.zeros(given[n].shape) for n in wired.gradients if n in given}
        return {n: WholeGradient(zeros, zeros) for n, zeros in shapes.items()}
    wide = as_float64(forward)
    names = [o.name for o in spec.outputs]
    exact = dict(zip(names, oracle(forward), strict=True))
    if any(o.saved and exact[o.name] is not None for o in spec.outputs):
        exact |= exact_rests(call, wide)
    with np.errstate(all="ignore"):
        assert spec.bound is not None
        off = dict(zip(names, spec.bound(wide, tuple(exact[n] for n in names)), strict=True))
    saved = [n for n in wired.saves(call.options) if exact.get(n) is not None]
    backward = backward_call(wired, call, forward, exact, saved, cotangents)
    backward = backward.replace(off={n: _off(exact[n], off[n], forward.outputs[n][1]) for n in saved})
    found = oracle(backward)
    with np.errstate(all="ignore"):
        assert wired.vjp.bound is not None
        bounds = wired.vjp.bound(backward, found)
    outputs = [o.name for o in wired.vjp.outputs]
    both = {n: WholeGradient(e, b) for n, e, b in zip(outputs, found, bounds, strict=True) if e is not None}
    both |= {
        n: WholeGradient(a, np.zeros(a.shape))
        for n, a in backward.arrays.items()
        if n.startswith("d_") and a is not None
    }
    return {name: both[output] for name, output in wired.gradients.items() if output in both}


def exact_rests(call: Call, wide: Call) -> dict[str, Any]:
    """The outputs that only the gradient reads, of the call in float64: they hold what another output has lost. Results
    are of float64 too, whatever dtype an option names."""
    arrays = {n: a for n, a in wide.arrays.items() if a is not None}
    named = {o.dtype_option for o in call.spec.outputs}
    options = {n: value for n, value in call.options.items() if n not in named}
    double = wiring(call.spec).training(bind(call.spec, **arrays, **options))
    return {o.name: y for o, y in zip(call.spec.outputs, oracle(double), strict=True) if o.saved}


def _off(exact: np.ndarray, bound: np.ndarray, dtype: str) -> np.ndarray:
    """How far a saved array may be off: its bound, by none where it is no number, by anything where storing it may give
    an infinity."""
    with np.errstate(all="ignore"):
        beyond = np.isfinite(exact) & (np.abs(exact) + bound >= format_of(dtype).overflow)
    return np.where(np.isnan(bound), 0.0, np.where(beyond, np.inf, bound))


def backward_call(
    wired: Any, call: Call, forward: Call, exact: Mapping[str, Any], saved: list[str], cotangents: Mapping[str, Any]
) -> Call:
    """The gradient's call in float64 on what is exact, with the dtypes that it has where it is not."""
    arrays = {n: call.arrays[n] for n in wired.inputs if call.arrays[n] is not None}
    arrays |= {n: rounded(exact[n], forward.outputs[n][1]) for n in saved}
    arrays |= {argument: cotangents[n] for n, argument in wired.cotangents.items() if n in cotangents}
    bound = as_float64(bind(wired.vjp, **arrays, **{n: call.options[n] for n in wired.options}))
    numbers = [n for n in saved if DTYPES[forward.outputs[n][1]].floating]  # an integer is exact
    return bound.replace(arrays={**bound.arrays, **{n: exact[n] for n in numbers}})


def fraction(gradient: WholeGradient, actual: np.ndarray) -> float:
    """The largest share of its bound that a gradient is off by; inf where NaN or an infinity is not what it is."""
    end, actual = np.finfo(actual.dtype).max if actual.dtype.kind == "f" else 2.0**127, np.asarray(actual, np.float64)
    bound = np.where(np.isnan(gradient.bound), np.inf, gradient.bound)
    with np.errstate(all="ignore"):
        off = np.abs(actual - gradient.exact)
        same = (actual == gradient.exact) | (np.isnan(actual) & np.isnan(gradient.exact))
        same |= np.isinf(actual) & (np.sign(actual) == np.sign(gradient.exact)) & (np.abs(gradient.exact) + bound > end)
        share = np.where(same | np.isinf(bound), 0.0, np.where(bound > 0, off / bound, np.inf))
    return float(np.where(np.isnan(share), np.inf, share).max(initial=0.0))
