"""What the specs of ops that give their result in codes of 8 bits share: y as quantize has it, a scale for each group
of numbers of a row, but from y as it is computed: no y of 16 bits comes between.

    scale = max |y| / L of a group,    q = y / scale, no further from 0 than L, rounded to nearest, ties to even
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portakern.spec import Spec
from portakern.spec.tolerance import KAPPA, magnitude, units
from portakern.specs.quantize import largest, scale_limits

if TYPE_CHECKING:
    from portakern.core.call import Call


def in_groups(call: Call, rows: np.ndarray) -> np.ndarray:
    """Rows of n numbers by groups, of which the last may lack some: (*batch, groups, width), with zeros there."""
    n, width = rows.shape[-1], min(call.options["width"], rows.shape[-1])
    behind = [(0, 0)] * (rows.ndim - 1) + [(0, -n % width)]
    return np.pad(rows, behind).reshape(*rows.shape[:-1], -1, width)


def for_each_number(call: Call, groups: np.ndarray, n: int) -> np.ndarray:
    """A number of each group, (*batch, groups), beside each of a row's n: (*batch, n)."""
    return np.take(groups, np.arange(n) // call.options["width"], -1)


def exact_scale(call: Call, top: np.ndarray) -> np.ndarray:
    """The scale of groups whose greatest magnitude is known. It grows with that, but for the scale of zeros."""
    limits, scale = scale_limits(call), top / largest(call)
    if call.options["scales"] == "power_of_two":
        mantissa, exponent = np.frexp(scale)
        scale = np.where(np.isfinite(scale), np.ldexp(1.0, exponent - (mantissa == 0.5)), scale)
    return np.where(top == 0, limits.zeros, np.clip(scale, limits.least, limits.most))


class Unquantised(NamedTuple):
    """y before it is quantised, (*batch, n).

    Attributes:
      y: as it is; err: how far a kernel's may be off, inf where nothing is promised; spread: its typical error.
    """

    y: np.ndarray
    err: np.ndarray
    spread: np.ndarray

    @classmethod
    def of(cls, y: np.ndarray, err: np.ndarray, spread: np.ndarray, *factors: np.ndarray) -> Unquantised:
        """A product of which a factor is 0 has no error: zeros are zeros, and their scale is that of zeros."""
        none = np.logical_or.reduce([np.broadcast_to(f == 0, y.shape) for f in factors]) & (y == 0) & np.isfinite(err)
        return cls(y, np.where(none, 0.0, err), np.where(none, 0.0, spread))


class Ends(NamedTuple):
    """Between which numbers the greatest magnitude of a group may lie, and its scale; all (*batch, groups)."""

    low_top: np.ndarray
    high_top: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, call: Call, found: Unquantised) -> Ends:
        size = np.where(np.isnan(found.y), 0.0, np.abs(found.y))
        low_top = in_groups(call, np.where(np.isinf(size), size, np.maximum(size - found.err, 0.0))).max(-1)
        high_top = in_groups(call, size + found.err).max(-1)
        share = 0.0 if call.options["scales"] == "power_of_two" else 4 * units(call).u
        low, high = exact_scale(call, low_top) * (1 - share), exact_scale(call, high_top) * (1 + share)
        return cls(low_top, high_top, low, high)


def code_bounds(call: Call, ref: tuple[Any, ...], found: Unquantised) -> tuple[np.ndarray, np.ndarray]:
    """The bounds of v = y / scale before it is rounded to a code, and of the scale s, where y errs by E:

        s: from f(max(|y| - E)) to f(max(|y| + E)), and 4u of these
        v: (1 + 5u) E / s + |v| (ds + 5u (1 + ds)) + tau (1 / s + 1)

    f is the scale of a greatest magnitude, which grows with it; ds is the share of v that the ends of s move it by. The
    division by L is 2 ulp, and so is that by s, or its inverse is and the product rounds once more. By a power of two
    it is exact; where the greatest magnitude lies that near to a power of two times L, two of them are right, and codes
    by either. Clipping moves no value further from another.

    Nothing is promised of a group whose greatest magnitude may be subnormal, but is not surely 0, and of codes in int8
    that would be NaN.
    """
    q, scale = ref
    unit, n = units(call), q.shape[-1]
    with np.errstate(all="ignore"):
        ends = Ends.of(call, found)
        unsure = (ends.high_top > 0) & (ends.low_top < unit.tau)
        unsure |= in_groups(call, np.isposinf(found.err)).any(-1)
        of_scale = np.where(np.isfinite(scale), np.maximum(scale - ends.low, ends.high - scale), 0.0)
        share = np.where(np.isfinite(scale), np.maximum(scale / ends.low - 1, 1 - scale / ends.high), 0.0)
        u = 0.0 if call.options["scales"] == "power_of_two" else 5 * unit.u
        inverse = np.where(np.isfinite(scale), 1 / ends.low, 0.0)
        share, inverse = (for_each_number(call, a, n) for a in (share + u * (1 + share), inverse))
        err = (1 + u) * found.err * inverse + share * magnitude(q) + unit.tau * (inverse + 1)
    lost = for_each_number(call, unsure, n) | (np.isnan(q) & (call.options["to"] == "int8"))
    return np.where(lost, inf, err), np.where(unsure, inf, of_scale)


def code_spreads(call: Call, ref: tuple[Any, ...], found: Unquantised) -> tuple[np.ndarray, np.ndarray]:
    """The RMS error of a scale: that of the greatest number, or of any that may be the greatest, and of two divisions,
    2 KAPPA u. Of a power of two it is what its bound is: mostly 0. A code is right or wrong, and not measured."""
    q, scale = ref
    with np.errstate(all="ignore"):
        ends = Ends.of(call, found)
        if call.options["scales"] == "power_of_two":
            off = np.where(np.isfinite(scale), np.maximum(scale - ends.low, ends.high - scale), 0.0)
        else:
            may_be = np.abs(found.y) + found.err >= for_each_number(call, ends.low_top, q.shape[-1])
            off = in_groups(call, np.where(may_be, found.spread, 0.0)).max(-1) / largest(call)
            off = np.hypot(off, 2 * KAPPA * units(call).u * magnitude(scale))
    return np.zeros(q.shape), off


# ------------------------------------------------------------------------------------------------------ edges and laws
def inherit(op: Spec[Any], norm: Spec[Any]) -> None:
    """The corners of the op whose result is quantised."""
    op.edges.update(norm.edges)


def drawn_groups(draw: Any, n: int) -> dict[str, Any]:
    """The options of a call on rows of n: some groups, or one of all numbers."""
    kinds = {"to": "float8_e4m3fn"}, {"to": "float8_e5m2"}, {"to": "int8"}, {"scales": "power_of_two"}
    return {"width": draw.extent(1, n) if draw.extent(0, 1) else n, **kinds[draw.extent(0, 3)]}


def same_outputs(draw: Any, found: tuple[Any, ...], want: tuple[Any, ...], what: str) -> None:
    """Assert that codes, scales and what else a call gives are those of another, to the bit."""
    for i, (one, other) in enumerate(zip(found, want, strict=True)):
        draw.same_bits(one, other, f"{what}, output {i}")


def rows_alone(run: Callable[..., Any], draw: Any, count: int) -> None:
    """A row of ``count`` arrays alone has the codes and the scales that it has among others."""
    shape = draw.extent(2, 40), draw.extent(1, 300)
    arrays, options = [draw.normal(*shape) for _ in range(count)], drawn_groups(draw, shape[1])
    first = draw.extent(0, shape[0] - 1)
    row = slice(first, first + 1)
    among = tuple(out[row] for out in run(*arrays, **options))
    same_outputs(draw, run(*(a[row] for a in arrays), **options), among, "a row alone")
