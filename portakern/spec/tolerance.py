"""What rounding may do to a result: the units that the specs' error bounds and spreads are written in, and the
comparison of a result with its bound.

A bound is a float64 array beside each output: the largest |computed - exact| that a correct kernel can show there. It
is derived from the operations that the op's definition needs, in the standard model fl(x op y) = (x op y)(1 + e), |e|
<= u (Higham, "Accuracy and stability of numerical algorithms", section 2.2), and not chosen. +inf says that the op
promises nothing at that element, for instance because float32 intermediates overflow.

A spread, sigma, is a float64 array beside it: the RMS error there if each rounding is random, uniform within half a
spacing and independent of the others. Where a kernel's error is typically many sigma, something else than rounding
caused it, even within the bound.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portakern.spec.dtypes import DTYPES

if TYPE_CHECKING:
    from portakern.core.call import Call

__all__ = [
    "KAPPA",
    "TF32_END",
    "Comparison",
    "Format",
    "Units",
    "abs_matmul",
    "beyond_range",
    "chain",
    "compare",
    "dot_spread",
    "format_of",
    "magnitude",
    "permitted_error",
    "round_to",
    "rounded",
    "rounding_error",
    "store_spread",
    "units",
]

KAPPA = 0.425
"""RMS of a rounding error over u|x|. It is uniform within u 2^e, and x = f 2^e: 1/sqrt(3) times the RMS of 1/f, sqrt(3
/ (8 log 2)) for a logarithmic f."""


TF32_END = 2.0**128 - 2.0**116
"""The least magnitude that rounds to infinity in tf32, which has float32's exponents and 10 bits: half way from its
largest number to 2^128. To saturate operands would cost an instruction each, where the copy engine rounds them unasked;
so from here on nothing is promised of a product in tf32 (:func:`beyond_range`)."""


@dataclass(frozen=True)
class Format:
    """A storage format.

    Attributes:
      U: unit roundoff of rounding to nearest. float64's is doubled, because the oracle rounds in float64 too. An
        integer rounds by no share of itself: 0.
      eta: absolute error of a stored subnormal: flushed to zero where hardware may (float32, bfloat16, float64), half a
        spacing where it does not (float16 and the floats of 8 bits). An integer's is 1/2, half the spacing of all of
        them: its reference is the value before it was rounded, and where that is whole and err 0, only that integer is
          right.
      overflow: the least magnitude that rounds to ``beyond``: infinity, or NaN in float8_e4m3fn, which has no infinity.
        An integer has none (inf): a formula that may leave its range says what is there, as clipping does.
    """

    U: float
    eta: float
    overflow: float
    beyond: float


@functools.cache
def format_of(dtype: str) -> Format:
    """The :class:`Format` of a dtype name."""
    d = DTYPES[dtype]
    eta = d.tiny if d.flushes else d.least / 2
    return Format(2 * d.U if dtype == "float64" else d.U, eta, d.overflow, d.overflows_to)


@dataclass(frozen=True)
class Units:
    """The accumulator of a call and what its hardware does to operands.

    Attributes:
      u: unit roundoff of the accumulator: 2^-24 (float32); 2^-52 in a float64 call, twice its own because the oracle
        rounds too.
      ex: relative error of exp, 8u: hardware exp2 (2 ulp) and everything better.
      tau: the smallest normal number of the accumulator; anything below may become 0.
      huge: 2^127, the guaranteed range of intermediates (half the overflow threshold, so that a factor log2(e) fits as
        well).
      flush: absolute error of an operand of the matrix unit: tau, or 2^-14 for float16 where the unit flushes its
        subnormals (gfx90a).
      tf32: relative error of a product of two operands that were cut to 10 bits, 2^-9 + 2^-20; 0 unless the call asked
        for it.
      end: the least finite magnitude that the matrix unit may read as infinite; inf where it reads what it is given.
      U: unit roundoff of the operands' dtype, eta: its :attr:`Format.eta`. Operands that are integers are exact.
      any_order: what ran may add the terms of a sum in any order, one after the other too (:meth:`chain`).
    """

    u: float
    ex: float
    tau: float
    huge: float
    flush: float
    tf32: float
    end: float
    U: float
    eta: float
    any_order: bool = False

    def chain(self, n: Any) -> Any:
        """Roundings on the longest path through a sum of n terms: :func:`chain`, or n, which no order exceeds."""
        return n if self.any_order else chain(n)


def units(call: Call) -> Units:
    """The units of one call."""
    accumulator = format_of("float64" if call.dtype == "float64" else "float32")
    U, eta = (format_of(call.dtype).U, format_of(call.dtype).eta) if DTYPES[call.dtype].floating else (0.0, 0.0)
    flush = 2.0**-14 if call.dtype == "float16" and call.target.arch == "gfx90a" else accumulator.eta
    tf32 = 2.0**-9 + 2.0**-20 if call.dtype == "float32" and call.options.get("precision") == "tf32" else 0.0
    huge = 2.0**1023 if call.dtype == "float64" else 2.0**127
    return Units(
        accumulator.U, 8 * accumulator.U, accumulator.eta, huge, flush, tf32, TF32_END if tf32 else np.inf, U,
        max(eta, flush), call.any_order,
    )  # fmt: skip


def chain(n: Any) -> Any:
    """Roundings on the longest path through a sum of n terms that lanes share: n / 32 within one warp, or n / 128 tiles
    at 4 each (rescaled by a new maximum); then a tree. A spec asks its call's units: :meth:`Units.chain`."""
    return np.minimum(n, n / 32 + 32)


def magnitude(x: np.ndarray) -> np.ndarray:
    """|x|, with 0 for infinities and NaN: the reference holds what those lead to, and no rounding changes it."""
    return np.where(np.isfinite(x), np.abs(x), 0.0)


def beyond_range(x: np.ndarray, unit: Units, axis: int) -> np.ndarray:
    """Whether a line along ``axis`` holds a finite operand that the matrix unit may read as infinite (``unit.end``):
    nothing is promised of what the line is multiplied with, since inf times 0 is NaN. The axis keeps the extent 1."""
    far = np.isfinite(x) & (np.abs(x) >= unit.end)
    return np.asarray(far.any(axis, keepdims=True))


def abs_matmul(a: np.ndarray, b: np.ndarray, unit: Units) -> np.ndarray:
    """|a| @ |b|, the scale of the rounding error of a @ b. +inf where kernels may differ: the sum passes ``unit.huge``,
    inf meets a subnormal, or an operand is beyond the unit's range."""
    total: np.ndarray = magnitude(a) @ magnitude(b)
    far = beyond_range(a, unit, -1) | beyond_range(b, unit, -2)
    total = np.where((total < unit.huge) & ~far, total, np.inf)
    if np.isinf(a).any() or np.isinf(b).any():
        small_a, small_b = (((x != 0) & (np.abs(x) < unit.tau)).astype(float) for x in (a, b))
        total[(np.isinf(a).astype(float) @ small_b + small_a @ np.isinf(b).astype(float)) > 0] = np.inf
    return total


def round_to(err: np.ndarray, ref: np.ndarray, dtype: str) -> np.ndarray:
    """The bound on the stored output, from the error ``err`` of the value before it is rounded to ``dtype``.

    It is err (1 + U) + U |ref| + eta, whatever the dtype: see :class:`Format` for an integer's U and eta. Beyond the
    dtype's range it means nothing, and :func:`compare` asks for what overflow gives there.
    """
    f = format_of(dtype)
    with np.errstate(all="ignore"):
        bound = err * (1 + f.U) + f.U * np.abs(ref) + f.eta
    return np.where(np.isfinite(ref), bound, np.where(np.isposinf(err), np.inf, 0.0))


def rounded(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Round float64 once, to nearest, ties to even; what lies beyond the dtype's range becomes its ``overflows_to``.

    An integer dtype rounds so too and stops at its ends; NaN becomes 0, as where XLA converts.
    """
    d, exact = DTYPES[dtype], np.asarray(exact)
    with np.errstate(over="ignore", invalid="ignore"):
        if d.floating:
            return (exact if d.native else _odd_float32(exact)).astype(d.numpy, order="C")
        if exact.dtype.kind in "iub" or d.kind == "bool":
            return exact.astype(d.numpy, order="C")
        whole = np.nan_to_num(np.rint(exact), posinf=np.inf, neginf=-np.inf)
        info = np.iinfo(d.numpy)
        ends = np.where(whole > 0, info.max, info.min).astype(d.numpy)  # 2^63 is no int64, and 2^63 - 1 no float64
        inside = (whole >= info.min) & (whole < 2.0 ** (d.bits - (d.kind == "int")))
        return np.asarray(np.where(inside, np.where(inside, whole, 0).astype(d.numpy), ends), order="C")


def _odd_float32(exact: np.ndarray) -> np.ndarray:
    """Float64 as float32 rounded to odd: of the two numbers around an inexact value the one whose last bit is 1.

    ml_dtypes rounds by way of float32, where a value beside a tie of its dtype may land on the tie. No tie is odd, so
    that rounding this once more gives what rounding once would (Boldo and Melquiond 2008, "Emulation of FMA and
    correctly rounded sums: proved algorithms using rounding to odd").
    """
    single = exact.astype(np.float32, order="C")
    inexact = (single != exact) & np.isfinite(exact)
    even = single.view(np.uint32) & 1 == 0
    beside = np.nextafter(single, np.where(exact > single, np.inf, -np.inf).astype(np.float32))
    return np.where(inexact & even, beside, single)


def rounding_error(exact: np.ndarray, err: np.ndarray, dtype: str) -> np.ndarray:
    """How far rounding to ``dtype`` may carry two numbers apart that lie within ``err`` of each other, the first of
    which is ``exact``: 0, unless a tie lies between them.

    Rounding is monotone, so that the ends of the range bound what lies in it; a result that is subnormal may be flushed
    where the dtype's are.
    """
    kind, near = DTYPES[dtype], rounded(exact, dtype).astype(np.float64)
    low, high = (rounded(exact + way * err, dtype).astype(np.float64) for way in (-1, 1))
    apart = np.maximum(high - near, near - low)
    flushed = kind.tiny if kind.flushes else 0.0
    return apart + np.where(np.abs(near) + apart <= kind.tiny, flushed, 0.0)


def store_spread(ref: np.ndarray, dtype: str) -> np.ndarray:
    """RMS error of storing ``ref`` as ``dtype``: a 12th of the squared spacing there, whatever the mantissa, and a
    subnormal's eta / sqrt(3)."""
    f = format_of(dtype)
    _, exponent = np.frexp(magnitude(ref))
    return np.hypot(np.ldexp(f.U, exponent) / np.sqrt(12), f.eta / np.sqrt(3))


def dot_spread(call: Call, k: Any) -> tuple[Any, Any]:
    """(x, y): the variance of a float32 dot of k products is x C^2 + y S^2, where C is the dot and S^2 the sum of its
    squared products.

    In order: products round by (KAPPA u)^2 S^2. A partial sum after i of k products is C i/k plus a bridge of variance
    S^2 i/k (1 - i/k), and each rounds by KAPPA u of itself: (KAPPA u)^2 k (C^2/3 + S^2/6). Blocked sums stay below
    that. A GPU's matrix unit aligns the products of a step to the largest and cuts what falls off, so that its errors
    lean to 0 and add up without a square
    root: u (k/16 + 4) for steps of 16 (Fasi, Higham, Mikaitis, Pranesh 2021, "Numerical behavior of NVIDIA tensor
      cores").
    tf32: cutting an operand to 10 bits loses a share of mean 0.72 2^-11 and of variance 0.05 2^-20; two operands: 0.52
      2^-20 C^2 + 0.1 2^-20 S^2; rounding
    to 10 bits instead, 0.36 2^-22 S^2. Units are known to do either.
    """
    unit = units(call)
    if _matrix_unit(call):
        x = y = (unit.u * (k / 16 + 4)) ** 2
    else:
        x, y = (KAPPA * unit.u) ** 2 * k / 3, (KAPPA * unit.u) ** 2 * (k / 6 + 1)
    return (x + 2.0**-20, y + 2.0**-21) if unit.tf32 else (x, y)


def _matrix_unit(call: Call) -> bool:
    """Whether the call's dots may run on a GPU's matrix unit. Its sums of products of 8-bit floats may have fewer bits
    than float32's: a spec that permits such sums adds their error."""
    compiled = call.target.platform in ("cuda", "rocm", "gpu") and not call.interpret
    return compiled and (DTYPES[call.dtype].bits <= 16 or call.options.get("precision") == "tf32")


@dataclass(frozen=True)
class Comparison:
    """A result against its reference.

    Attributes:
      worst: the largest err / bound over elements where result, reference and bound are finite; 0 where there is none.
      bad: which elements break the bound or the rules on NaN and inf.
      err: |result - reference|; 0 for equal non-finite values, inf for other non-finite differences.
    """

    worst: float
    bad: np.ndarray
    err: np.ndarray

    @property
    def ok(self) -> bool:
        return not self.bad.any()


def compare(actual: np.ndarray, ref: np.ndarray, bound: np.ndarray, dtype: str, codes: bool = False) -> Comparison:
    """Hold ``actual``, stored as ``dtype``, to the float64 reference: |actual - ref| <= bound.

    bound +inf accepts anything. A NaN or infinite reference must be met exactly. A finite reference may become an
    infinity only if ref with an error of that sign and of size bound reaches the dtype's overflow threshold, and must
    become one if |ref| - bound does. Where both infinities are right NaN is too: such an error is that of terms which
    overflow on the way to their difference.

    In float8_e4m3fn NaN takes the place of infinities of both signs: an infinite reference is met by NaN alone, and
    what overflows must be NaN. A conversion that stops at 448 instead, as some hardware's does, is right only for an op
    whose formula says so; its reference is clipped, and never overflows. An integer cannot hold NaN or inf: where the
    reference does, the op must promise nothing (+inf).

    ``codes``: the bound is that of the value before it is rounded, and ``actual`` is held to a set: right is what a
    value within ``bound`` of the reference rounds to, ties to even. That is the nearest number alone, unless a tie is
    so near; with a bound of 0, what the reference rounds to. A share is then the error that it takes to reach the code,
    of the bound.

    Raises:
      ValueError: a bound is NaN or negative at a finite reference: the spec is wrong.
    """
    shape = np.broadcast_shapes(np.shape(actual), np.shape(ref), np.shape(bound))
    flat = [np.broadcast_to(a, shape).reshape(-1) for a in (actual, ref, bound)]
    err, bad, worst = np.empty(flat[1].size), np.empty(flat[1].size, bool), 0.0
    with np.errstate(all="ignore"):
        for at in range(0, err.size, BLOCK):
            g, r, b = (a[at : at + BLOCK].astype(np.float64) for a in flat)
            if codes:
                within = _codes(g, r, b, dtype)
            else:
                within = _numbers(g, r, b, format_of(dtype)) or _any_values(g, r, b, format_of(dtype))
            worst, bad[at : at + BLOCK], err[at : at + BLOCK] = max(worst, within.worst), within.bad, within.err
    return Comparison(worst, bad.reshape(shape), err.reshape(shape))


BLOCK = 2**14
"""Elements that are compared at a time: all that is made on the way stays in a core's own cache."""


def _numbers(actual: np.ndarray, ref: np.ndarray, bound: np.ndarray, stored: Format) -> Comparison | None:
    """:func:`compare` where results and references are numbers, none of which may overflow; None where any is not."""
    err = np.abs(actual - ref)
    if not (err.max() < np.inf and bound.min() >= 0 and max(ref.max(), -ref.min()) < stored.overflow):
        return None  # and so where anything is NaN
    share = float(np.fmax.reduce(err / bound))  # 0 / 0 is NaN, and right
    return Comparison(share if share > 0 else 0.0, err > bound, err)


def _codes(actual: np.ndarray, ref: np.ndarray, bound: np.ndarray, dtype: str) -> Comparison:
    """:func:`compare` of codes: rounding is monotone, so that the ends of a range round to the ends of a set."""
    finite = np.isfinite(ref)
    _refuse_bound(bound, finite)
    low, high = (_rounded_ends(ref + way * bound, dtype) for way in (-1, 1))
    overflows = np.isnan(actual) & (np.isinf(low) | np.isinf(high))  # of a float that has NaN in place of infinities
    number = np.nan_to_num(ref)
    same = (actual == ref) | (np.isnan(actual) & (np.isnan(ref) | (np.isinf(ref) & np.isnan(format_of(dtype).beyond))))
    right = np.where(finite, (low <= actual) & (actual <= high) | overflows, same) | np.isposinf(bound)
    err = np.where(same, 0.0, np.abs(actual - ref))
    err = np.where(np.isnan(err), np.inf, err)
    measured = finite & np.isfinite(actual) & np.isfinite(bound) & (actual != _rounded_ends(number, dtype))
    share = np.where(measured, np.abs(number - _tie_toward(actual, number, dtype)) / bound, 0.0)
    return Comparison(float(np.fmax.reduce(share, initial=0.0)), ~right, err)


def _rounded_ends(x: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded numbers in float64, what overflows as an infinity of its sign."""
    found = rounded(x, dtype).astype(np.float64)
    return np.where(np.isnan(found) & ~np.isnan(x), np.copysign(np.inf, x), found)


def _tie_toward(code: np.ndarray, x: np.ndarray, dtype: str) -> np.ndarray:
    """Half way from codes to their neighbours on the side of x: the nearest value that rounds to the code, or next to
    it."""
    kind = DTYPES[dtype]
    if not kind.floating:
        return code + np.sign(x - code) / 2
    stored = np.nan_to_num(code).astype(kind.numpy)
    beside = np.nextafter(stored, np.copysign(kind.largest, x - code).astype(kind.numpy)).astype(np.float64)
    return code + (beside - code) / 2  # beside float64's largest number a sum of two is infinite


def permitted_error(bound: np.ndarray, ref: np.ndarray, dtype: str, codes: bool) -> np.ndarray:
    """The absolute error of a stored element that :func:`compare` permits: the bound, of a code the distance of the
    farthest in its set."""
    if not codes:
        return np.broadcast_to(bound, ref.shape)
    with np.errstate(all="ignore"):
        low, high = (_rounded_ends(ref + way * bound, dtype) for way in (-1, 1))
        return np.asarray(np.maximum(ref - low, high - ref))


def _refuse_bound(bound: np.ndarray, finite: np.ndarray) -> None:
    if not (bound[finite] >= 0).all():
        raise ValueError("the spec's bound is NaN or negative at a finite reference")


def _any_values(actual: np.ndarray, ref: np.ndarray, bound: np.ndarray, stored: Format) -> Comparison:
    """:func:`compare` of any values."""
    finite = np.isfinite(ref)
    _refuse_bound(bound, finite)
    no_inf = np.isnan(stored.beyond)
    same = (actual == ref) | (np.isnan(actual) & (np.isnan(ref) | (no_inf & np.isinf(ref))))
    err = np.where(same, 0.0, np.abs(actual - ref))
    err = np.where(np.isnan(err), np.inf, err)
    ratio = np.where(same, 0.0, err / bound)
    over = np.isnan(actual) if no_inf else np.isinf(actual)
    toward = np.abs(ref) if no_inf else np.copysign(1.0, actual) * ref
    may = finite & over & (toward + bound >= stored.overflow)
    may |= finite & np.isnan(actual) & (bound - np.abs(ref) >= stored.overflow)
    must = finite & (np.abs(ref) - bound >= stored.overflow)
    within = np.where(finite, err <= bound, same)
    bad = ~(np.isposinf(bound) | may | (within & ~must))
    measured = finite & np.isfinite(actual) & np.isfinite(bound)
    return Comparison(float(ratio[measured].max(initial=0.0)), bad, err)
