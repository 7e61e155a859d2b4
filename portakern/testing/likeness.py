"""Guess the mistake behind a wrong output, from its values. The verdict does not depend on the guess."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from portakern.core.call import Call
from portakern.spec.dtypes import DTYPES

__all__ = ["NUMBERLESS", "Likeness", "likeness"]

NUMBERLESS = ("nan", "leak", "overflow")
"""Names of what holds NaN or infinities: where those come from is not seen by looking
(:mod:`portakern.testing.evidence`)."""


class Likeness(NamedTuple):
    """A likely mistake. ``name``: one word; ``words``: a description. Empty if nothing fits."""

    name: str = ""
    words: str = ""


class _Seen(NamedTuple):
    """A wrong output: actual and expected values in float64, where it is ``bad``, and the call in float64."""

    call: Call
    actual: np.ndarray
    ref: np.ndarray
    bound: np.ndarray
    bad: np.ndarray
    dtype: str

    @property
    def numbers(self) -> np.ndarray:
        """Where both are numbers."""
        return np.isfinite(self.actual) & np.isfinite(self.ref)

    @property
    def largest(self) -> float:
        return max((float(np.abs(a).max()) for _, a in self.inputs()), default=0.0)

    def inputs(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, array in self.call.arrays.items():
            if array is not None and array.dtype.kind not in "iub" and array.size:
                yield name, array


def likeness(
    call: Call, actual: np.ndarray, ref: np.ndarray, bound: np.ndarray, bad: np.ndarray, dtype: str
) -> Likeness:
    """The first mistake that a wrong output looks like.

    Args:
      call: in float64; actual: as it came; ref, bound: from the oracle; bad: which elements are out of bounds.
      dtype: the output's.
    """
    wide = np.asarray(actual).astype(np.float64)
    seen = _Seen(call, wide, np.asarray(ref, np.float64), np.broadcast_to(bound, wide.shape), bad, dtype)
    with np.errstate(all="ignore"):
        for look in LOOKS:
            found = look(seen)
            if found:
                return found
    return Likeness()


def _one_value(s: _Seen) -> Likeness | None:
    if s.ref.size > 1 and not (s.ref == s.ref.flat[0]).all():
        if (s.actual == 0).all():
            return Likeness("zeros", "every element is 0")
        if np.isfinite(s.actual.flat[0]) and (s.actual == s.actual.flat[0]).all():
            return Likeness("constant", f"every element is {s.actual.flat[0]:.6g}")
        if np.isnan(s.actual).all() and np.isfinite(s.ref).all() and s.largest <= LARGE:
            return Likeness("nan", "every element is NaN")
    return None


def _an_input(s: _Seen) -> Likeness | None:
    for name, array in s.inputs():
        if array.shape == s.actual.shape and array.size > 1 and np.array_equal(array, s.actual, equal_nan=True):
            return Likeness("input", f"the input {name}, returned unchanged")
    return None


def _no_number(s: _Seen) -> Likeness | None:
    lost = s.bad & np.isfinite(s.ref) & ~np.isfinite(s.actual)
    kept = s.bad & ~np.isfinite(s.ref) & np.isfinite(s.actual)
    if lost.sum() * 2 > s.bad.sum():
        if not all(np.isfinite(a).all() for _, a in s.inputs()):
            return Likeness("leak", "a NaN or infinity spread to elements that do not depend on it")
        if s.largest > LARGE:
            return Likeness(
                "overflow", "an intermediate overflowed where the result does not: a maximum not subtracted?"
            )
        words = "NaN or infinity from finite, moderate inputs: 0/0, or a number beyond a dtype's range"
        return Likeness("nan", f"{words}{_where(s)}")
    if kept.sum() * 2 > s.bad.sum():
        return Likeness("swallowed", "a number where the result is NaN or infinite")
    return None


LARGE = 60.0
"""exp of more is beyond what float16 holds, and a few squares too."""


def _one_factor(s: _Seen) -> Likeness | None:
    use = s.numbers & (s.ref != 0) & (np.abs(s.ref) > 4 * s.bound)
    if use.sum() < 8:
        return None
    factor = s.actual[use] / s.ref[use]
    middle = float(np.median(factor))
    if abs(middle - 1) > 1e-3 and np.mean(np.abs(factor - middle) < 0.1 * abs(middle - 1)) > 0.95:
        return Likeness("scaled", f"the right elements times {middle:.6g}{_named(s, middle)}")
    return None


def _named(s: _Seen, factor: float) -> str:
    """What a factor is, if it is one of those that mistakes leave."""
    found = {1 / math.log(2): "log2 e: base 2 for base e", math.log(2): "ln 2: base e for base 2"}
    found |= {240 / 448: "240 / 448: the greatest number of another format of 8 bits"}
    for dim, extent in s.call.dims.items():
        for n in extent if isinstance(extent, tuple) else (extent,):
            if n > 2:
                where = f"{n}, an extent of {dim}"
                found |= {float(n): f"{where}: a sum for a mean", 1 / n: f"1 / {where}: a mean for a sum"}
                found |= {n / (n - 1): f"n / (n - 1) with n = {where}: n - 1 for n"}
                found |= {(n - 1) / n: f"(n - 1) / n with n = {where}: one too few, or n for n - 1"}
                found |= {math.sqrt(n / (n - 1)): f"the root of n / (n - 1) with n = {where}: n - 1 for n"}
                found |= {math.sqrt((n - 1) / n): f"the root of (n - 1) / n with n = {where}: n - 1 for n"}
                found |= {math.sqrt(n): f"the root of {where}", 1 / math.sqrt(n): f"1 / the root of {where}"}
    words = [w for value, w in found.items() if abs(abs(factor) - value) < 1e-3 * abs(value - 1)]
    return f", which is {words[0]}" if len(words) == 1 else ""


def _factor_of_each_row(s: _Seen) -> Likeness | None:
    """Rows whose denominators, norms or scales are off."""
    for axis in range(s.ref.ndim):
        use = s.numbers & (np.abs(s.ref) > 16 * s.bound)
        enough = use.sum(axis) >= 6
        if enough.sum() < 2 or s.bad.mean() < 0.5:
            continue
        factor = np.where(use, s.actual / np.where(use, s.ref, 1.0), np.nan)
        factor = np.where(np.expand_dims(enough, axis), factor, 1.0)
        middle = np.nanmedian(factor, axis, keepdims=True)
        off, slack = np.abs(middle - 1), s.bound / np.where(use, np.abs(s.ref), np.inf)
        whole = (off > 16 * slack.max(axis, keepdims=True)) & (middle != 0)
        near = np.abs(factor - middle) <= 0.05 * off + 2 * slack
        counted = use & np.expand_dims(enough, axis) & s.bad
        if whole.mean() < 0.7 or counted.sum() < 0.5 * s.bad.sum() or not near[counted].mean() > 0.97:
            continue
        least, most = float(np.min(middle)), float(np.max(middle))
        return Likeness("rows", f"the right elements times a factor of each row along axis {axis}, {least:.4g} to "
                        f"{most:.4g}: its sum, mean or norm is off")  # fmt: skip
    return None


def _one_offset(s: _Seen) -> Likeness | None:
    use = s.numbers & s.bad
    if use.sum() < 8:
        return None
    offset = s.actual[use] - s.ref[use]
    middle = float(np.median(offset))
    if abs(middle) < 16 * float(np.median(s.bound[use])):
        return None
    if np.mean(np.abs(offset - middle) <= 2 * s.bound[use] + 1e-6 * abs(middle)) > 0.95:
        return Likeness("offset", f"the right elements plus {middle:.6g}")
    return None


def _elsewhere(s: _Seen) -> Likeness | None:
    """Right elements in other places: one further, reversed, transposed."""
    if s.ref.size < 8 or s.ref.size > 2**22 or s.bad.mean() < 0.3:
        return None

    def agrees(other: np.ndarray) -> bool:
        right = (np.abs(s.actual - other) <= 2 * s.bound) | (s.actual == other)
        return bool(right[s.bad].mean() > 0.9) and not np.array_equal(other, s.ref, equal_nan=True)

    for axis in range(s.ref.ndim):
        for step in (1, -1):
            if agrees(np.roll(s.ref, step, axis)):
                return Likeness("moved", f"the right elements, shifted by one along axis {axis}")
        if agrees(np.flip(s.ref, axis)):
            return Likeness("moved", f"the right elements in reverse along axis {axis}")
    if s.ref.ndim > 1 and s.ref.shape[-1] == s.ref.shape[-2] and agrees(np.swapaxes(s.ref, -1, -2)):
        return Likeness("moved", "the right elements transposed")
    return None


def _few_bits(s: _Seen) -> Likeness | None:
    """Results of a narrower dtype than the output's."""
    use = s.numbers & (s.actual != 0)
    own = DTYPES[s.dtype]
    if use.sum() < 8 or not own.floating or own.bits < 32 or s.bad.mean() < 0.1:
        return None
    for name, narrow in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), ("float32", np.float32)):
        exact = (x[use].astype(narrow).astype(np.float64) == x[use] for x in (s.actual, s.ref))
        if DTYPES[name].bits < own.bits and next(exact).all() and next(exact).mean() < 0.5:
            return Likeness("downgraded", f"every element is a {name} number: stored or computed in {name}")
    use &= s.ref != 0
    relative = s.actual[use] / s.ref[use] - 1
    error = float(np.sqrt(np.mean(relative**2))) if relative.size >= 32 else 0.0
    # a formula that is off leans one way, or is far off in places; what rounds does neither
    if not abs(relative.mean()) < 0.15 * error or np.abs(relative).max() > 5 * error:
        return None
    if 2.0**-11 < error < 2.0**-6 and own.bits == 32:
        size = f"relative errors are about 2^{np.log2(error):.0f}"
        return Likeness("downgraded", f"{size}: as if computed in 16 bits, or without a small term")
    return None


def _region(s: _Seen) -> Likeness | None:
    where = _where(s)
    return Likeness("part", f"wrong in a part{where}{_last_tile(s)}") if where else None


def _last_tile(s: _Seen) -> str:
    """What is said of a part that is a last tile which is not full, of all rows."""
    if s.bad.mean() * s.bad.size < 2 or _where(s).count("along") != 1:
        return ""
    for axis, extent in enumerate(s.bad.shape):
        at = np.flatnonzero(s.bad.any(axis=tuple(i for i in range(s.bad.ndim) if i != axis)))
        first, tile = int(at[0]), int(at[0]) & -int(at[0])
        if tile >= 16 and extent - first < tile and int(at[-1]) == extent - 1 and len(at) == extent - first:
            return ": a last tile that is not full"
    return ""


def _where(s: _Seen) -> str:
    """The part of the output that all bad elements lie in, where it is not the whole."""
    found = []
    for axis, extent in enumerate(s.bad.shape):
        others = tuple(i for i in range(s.bad.ndim) if i != axis)
        at = np.flatnonzero(s.bad.any(axis=others))
        first, last = int(at[0]), int(at[-1])
        if last - first + 1 < extent and len(at) > (last - first + 1) // 2:
            end = f"{first} alone" if first == last else f"{first} to {last}"
            end = f"{first} to the end" if first < last == extent - 1 else end
            found.append(f"{end} of {extent} along axis {axis}")
    return f", {', '.join(found)}" if found else ""


LOOKS: tuple[Callable[[_Seen], Any], ...] = (
    _one_value, _an_input, _no_number, _one_factor, _one_offset, _elsewhere, _few_bits, _factor_of_each_row, _region,
)  # fmt: skip
