"""The float64 oracle's view of a call, and its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from portakern.core import outputs, registry
from portakern.core.call import Call
from portakern.core.framework import host_framework
from portakern.errors import SpecError, UnavailableError
from portakern.spec.dtypes import DTYPES

__all__ = [
    "BrokenRule",
    "as_float64",
    "broken_rule",
    "degenerate_outputs",
    "degenerate_values",
    "oracle",
    "rounded",
    "rounded_oracle",
]


class BrokenRule(SpecError):
    """The values of a call break one of the op's rules."""


def oracle(call: Call) -> tuple[Any, ...]:
    """Every output of ``call`` in float64 NumPy, unrounded; None for an output the call does not want.

    Raises:
      BrokenRule: the call breaks one of the op's rules on values, which nobody checks before.
    """
    b = registry.oracle_backend()
    (family, *_) = b.families
    impl = b.implementation(call.spec.name, family)
    if impl is None:
        raise UnavailableError(
            f"{call.spec.name} has no oracle: {family.package}.{call.spec.name} is missing; "
            f"register one with @pk.backends()[{b.name!r}].implements({call.spec.name!r})"
        )
    wide = as_float64(call)
    broken = broken_rule(wide)
    if broken:
        raise BrokenRule(f"{call.spec.name}: {broken}")
    found = impl.run(wide, {})
    outputs.exact(impl, wide, found)
    return found


def broken_rule(wide: Call) -> str | None:
    """The message of the first rule on values that a call in float64 breaks; None where it obeys them all."""
    return next((r.message for r in wide.spec.require if r.values and not r.holds(wide)), None)


def as_float64(call: Call) -> Call:
    """The call as the oracle sees it: NumPy, floating-point arrays widened to float64, integers as they are."""
    arrays = {n: a if a is None else _widen(call.framework.to_numpy(a)) for n, a in call.arrays.items()}
    given = {n: call.dtype_of(n) for n, a in call.arrays.items() if a is not None}
    return call.replace(arrays=arrays, framework=host_framework(), device="cpu", given=given)


def _widen(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def rounded_oracle(call: Call) -> tuple[Any, ...]:
    """The oracle's outputs as NumPy arrays in the declared dtypes."""
    return tuple(
        None if y is None else rounded(y, dtype)
        for y, (_, dtype) in zip(oracle(call), call.outputs.values(), strict=True)
    )


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
        return np.where(inside, np.where(inside, whole, 0).astype(d.numpy), ends)


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


def degenerate_values(call: Call) -> Mapping[str, float]:
    """Output name -> its value when a reduced extent is 0."""
    return next((values for dim, values in call.spec.empty.items() if call.dims[dim] == 0), {})


def degenerate_outputs(call: Call) -> tuple[Any, ...]:
    """The outputs of a call that has nothing to compute: empty ones, or the spec's value for a reduced extent of 0."""
    gone, full = degenerate_values(call), call.framework.full
    return tuple(
        full(shape, dtype, gone.get(n, 0.0), call.device) if n in call.wants else None
        for n, (shape, dtype) in call.outputs.items()
    )
