"""Statistics of errors: whether they are as large as random rounding makes them, or larger, or biased.

A bound holds for the worst case, which a sum of a thousand roundings never meets; a fault that moves every element by a
tenth of it passes. The spec's ``sigma`` is the RMS error of random rounding at each element. In units of it a right
kernel's errors have an RMS of 1 at most (``z``), are a few sigma at most (``largest``), and point away from 0 as often
as towards it (``bias``), which truncation in place of rounding does not. Under tf32, which may cut operands, errors may
lean. Sums may run in any order (:func:`any_order`). Where integers are small enough for every partial sum to be exact,
no error is right at all (the spec's ``exact``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from portakern.core.call import Call
from portakern.core.oracle import rounded
from portakern.spec.dtypes import DTYPES
from portakern.spec.tolerance import units
from portakern.testing.sampled import along, apart, extents_of

__all__ = ["RANDOM", "Evidence", "examine", "judge"]

RANDOM = ("normal", "wide")
"""Regimes whose values are random enough for errors to be so."""

LEAST = 64
"""The fewest elements, and distinct values among them, that statistics are taken of."""

MOST = 2**17
"""The most elements among which values are counted: of more, as many that lie evenly apart. Counting sorts."""

FEW = 16.0
"""How few values may hold most elements: the inverse of the chance that two elements are alike but for the sign."""

Z, BIAS = 1.5, 0.25
"""A right kernel of 16 bits has z = 1, of float32 0.4 to 1, as sigma allows for the slackest hardware; z^2 of 64
uniform errors varies by 0.11 about that. BIAS: what P and l, rounded alike in all elements of a row, may leave; 4 /
sqrt(n) is chance."""


def largest_right(n: int) -> float:
    """The greatest of n errors in units of sigma: 10 + 1.5 log10 n.

    A flat 10 is passed by right dots: their partial sums wander, and the tail falls by a decade in 1.5 sigma only.
    Measured in 6e6 sequential float32 dots of 256 products: 4.4 at 1e-3, 6.0 at 1e-4, 7.4 at 1e-5, 9.1 at 1e-6, the
    greatest 12. This line leaves a chance below 1e-6 in an output of any size."""
    return 10 + 1.5 * float(np.log10(n))


def any_order(call: Call, sigma: np.ndarray, loose: np.ndarray) -> np.ndarray:
    """sigma where sums may run in any order: sigma^2 + (loose^2 - sigma^2) (1 + 8 / M).

    Args:
      sigma: of sums as portakern's kernels add them up; loose: of sums that run one term after the other.

    What such an order brings is one draw for all elements of a sum; 8 / M makes room for what the M parts of a call
    that do not see each other may draw. What each element does by itself, as its last rounding, gets none."""
    names = apart(call.spec, call.options, call.wants, call.present)
    parts = math.prod(e for n in names for i, e in enumerate(extents_of(call, n)) if not along(call, n, i))
    with np.errstate(invalid="ignore"):
        more = np.maximum(loose**2 - sigma**2, 0.0)
    return np.asarray(np.hypot(sigma, np.sqrt(more * (1 + 8 / max(parts, 1)))))


def absorbed(call: Call, refs: Sequence[Any], output: int) -> np.ndarray:
    """What comes to sigma where the terms of a sum lie far apart and it runs one term after the other.

    Terms below half a spacing of what was added up before them are lost, each by all of itself and all alike: that is
    no random walk, and only the bound knows how far it goes. It is the share of the bound that the order has."""
    assert call.spec.bound is not None
    any_way, shared = (call.spec.bound(call.replace(any_order=loose), tuple(refs))[output] for loose in (True, False))
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nan_to_num(any_way - shared, nan=0.0) / Z)


@dataclass(frozen=True)
class Evidence:
    """The errors of one output in units of sigma.

    Attributes:
      z: their RMS; bias: the mean of those away from 0 minus those towards it; largest: the greatest.
      applies: enough distinct random elements were there to judge; else nothing was.
      reasons: what is wrong, in words; empty if nothing.
    """

    z: float = 0.0
    bias: float = 0.0
    largest: float = 0.0
    applies: bool = False
    reasons: tuple[str, ...] = ()


def examine(
    call: Call, outputs: Sequence[np.ndarray], refs: Sequence[Any], bounds: Sequence[Any], regime: str = ""
) -> dict[str, Evidence]:
    """Judge the wanted outputs of a call that lie within their bounds.

    Args:
      call: the call in float64 (``portakern.core.oracle.as_float64``), its ``target`` and ``interpret`` those of the
        run: a compiled matrix unit rounds unlike NumPy.
      outputs: the wanted outputs in the spec's order, as they were stored.
      refs, bounds: of every output of the spec, from the oracle and the spec's tolerance.
      regime: how the values were drawn; statistics are taken for those of RANDOM alone. Exact results are demanded
        wherever the values force them and the bound promises anything.
    """
    spec, nothing = call.spec, (None,) * len(refs)
    if call.degenerate:
        return {name: Evidence() for name in call.wants}
    with np.errstate(all="ignore"):
        spread = spec.spread if regime in RANDOM else None
        spreads: Sequence[Any] = spread(call.replace(any_order=False), tuple(refs)) if spread else nothing
        forced: Sequence[Any] = spec.forced(call, tuple(refs)) if spec.forced else nothing
    wanted = [i for i, o in enumerate(spec.outputs) if o.name in call.wants]
    seen = {}
    for i, got in zip(wanted, outputs, strict=True):
        name = spec.outputs[i].name
        dtype = call.outputs[name][1]
        unbiased = DTYPES[dtype].floating and DTYPES[dtype].bits <= 16 and not units(call).tf32
        evidence = Evidence()
        if spreads[i] is not None:
            evidence = judge(got, refs[i], bounds[i], spreads[i], unbiased=unbiased)
        if evidence.reasons and spread is not None:
            with np.errstate(all="ignore"):
                loose = spread(call.replace(any_order=True), tuple(refs))[i]
                loose = any_order(call, spreads[i], loose)
                if regime == "wide":
                    loose = np.hypot(loose, absorbed(call, refs, i))
            evidence = judge(got, refs[i], bounds[i], loose, unbiased=unbiased)
        exact = np.False_ if forced[i] is None else forced[i] & np.isfinite(bounds[i])
        wrong = int(np.sum(exact & (got != rounded(refs[i], dtype))))
        if wrong:
            evidence = replace(
                evidence,
                reasons=(
                    *evidence.reasons,
                    f"{wrong} of {np.sum(exact)} elements that no step can round are not exact",
                ),
            )
        seen[name] = evidence
    return seen


def judge(actual: np.ndarray, ref: np.ndarray, bound: np.ndarray, sigma: np.ndarray, *, unbiased: bool) -> Evidence:
    """Judge an output that lies within its bound. Only for values of the RANDOM regimes.

    ``unbiased``: rounding to a 16-bit output outweighs every other error, so that errors may not lean.

    Elements count where reference, result, bound and sigma are finite and sigma is positive. Results whose values
    repeat, such as those of a broadcast row or of a row that one term dominates, are no more evidence than one copy:
    ``n`` of the bias test is the number of distinct results. Where a few values hold most elements, as in a norm of
    rows of one number, which is +weight or -weight, nothing is judged: the error of one rounding is that of them all.
    """
    actual, bound = np.asarray(actual).astype(np.float64), np.broadcast_to(bound, ref.shape)
    use = np.isfinite(ref) & np.isfinite(actual) & np.isfinite(bound) & np.isfinite(sigma) & (sigma > 0)
    some = actual[use]
    some = some[:: max(-(-some.size // MOST), 1)]
    distinct = np.unique(some).size
    _, counts = np.unique(np.abs(some), return_counts=True)
    if distinct < LEAST or 1 / np.sum((counts / counts.sum()) ** 2) < FEW:
        return Evidence()
    error = (actual[use] - ref[use]) / sigma[use]
    z, largest, bias = (
        float(np.sqrt(np.mean(error**2))),
        float(np.abs(error).max()),
        float(np.mean(np.sign(ref[use]) * error)),
    )
    reasons = []
    if z > Z:
        reasons.append(f"typical errors are {z:.2f} times those of random rounding; at most {Z:.3g} are right")
    if largest > largest_right(error.size):
        reasons.append(
            f"the largest error is {largest:.1f} times that of random rounding; at most "
            f"{largest_right(error.size):.1f} is right"
        )
    most_lean = BIAS + 4 / np.sqrt(min(distinct, _draws(actual[use], ref[use]))) if unbiased else math.inf
    if abs(bias) > most_lean:
        way = "towards 0, as truncation in place of rounding does" if bias < 0 else "away from 0"
        reasons.append(f"errors lean {way}: {abs(bias):.2f} of random rounding's; at most {most_lean:.2f} is right")
    return Evidence(z, bias, largest, True, tuple(reasons))


def _draws(actual: np.ndarray, ref: np.ndarray) -> int:
    """How many errors were drawn: that of x r in a row with one r is the same share wherever x has the same digits, of
    which bfloat16 has 128."""
    step = max(-(-actual.size // MOST), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = (actual[::step] - ref[::step]) / ref[::step]
    return int(np.unique(np.round(shares[np.isfinite(shares)], 12)).size) or 1
