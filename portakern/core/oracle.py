"""The float64 oracle's view of a call, and its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from portakern.core import outputs, registry
from portakern.core.call import Call
from portakern.core.config import NOTHING
from portakern.core.framework import host_framework
from portakern.errors import SpecError, UnavailableError
from portakern.spec.dtypes import DTYPES
from portakern.spec.fields import ArrayArg
from portakern.spec.tolerance import rounded

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
    found = impl.run(wide, NOTHING)
    outputs.exact(impl, wide, found)
    return found


def broken_rule(wide: Call) -> str | None:
    """The message of the first rule on values that a call in float64 breaks; None where it obeys them all."""
    return next((r.message for r in wide.spec.require if r.values and not r.holds(wide)), None)


def as_float64(call: Call) -> Call:
    """The call as the oracle sees it: NumPy, arrays of what may be a float widened to float64, also where this call's
    is an integer, as in a product of int8; indices and other integers as they are."""
    arrays = {
        a.name: _widen(call.framework.to_numpy(call.arrays[a.name]), a) if call.arrays[a.name] is not None else None
        for a in call.spec.arrays
    }
    given = {n: call.dtype_of(n) for n, a in call.arrays.items() if a is not None}
    return call.replace(arrays=arrays, framework=host_framework(), device="cpu", given=given)


def _widen(array: np.ndarray, argument: ArrayArg) -> np.ndarray:
    return array.astype(np.float64) if any(DTYPES[d].floating for d in argument.dtypes) else array


def rounded_oracle(call: Call) -> tuple[Any, ...]:
    """The oracle's outputs as NumPy arrays in the declared dtypes."""
    return tuple(
        None if y is None else rounded(y, dtype)
        for y, (_, dtype) in zip(oracle(call), call.outputs.values(), strict=True)
    )


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
