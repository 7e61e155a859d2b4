"""The float64 oracle's view of a call, and its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from portakern.core import registry
from portakern.core.call import Call
from portakern.core.framework import host_framework
from portakern.errors import UnavailableError
from portakern.spec.dtypes import numpy_dtype

__all__ = ["as_float64", "degenerate_outputs", "degenerate_values", "oracle", "rounded", "rounded_oracle"]


def oracle(call: Call) -> tuple[Any, ...]:
    """Every output of ``call`` in float64 NumPy, unrounded; None for an output the call does not want."""
    b = registry.oracle_backend()
    (family, *_) = b.families
    impl = b.implementation(call.spec.name, family)
    if impl is None:
        raise UnavailableError(
            f"{call.spec.name} has no oracle: {family.package}.{call.spec.name} is missing; "
            f"register one with @pk.backends()[{b.name!r}].implements({call.spec.name!r})"
        )
    return impl.run(as_float64(call), {})


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
    """Round float64 once, to nearest even. ml_dtypes goes through float32, where a value beside a tie of bfloat16 may land on it: step off again."""
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return exact.astype(numpy_dtype(dtype), order="C")
        single = exact.astype(np.float32, order="C")
        on_tie = (single.view(np.uint32) & 0xFFFF == 0x8000) & (single != exact)
        beside = np.nextafter(single, np.where(exact > single, np.inf, -np.inf).astype(np.float32))
        return np.where(on_tie, beside, single).astype(numpy_dtype(dtype))


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
