"""The verdict on one call's outputs: shapes, dtypes, every element within its bound; and where the first bad one
lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from portakern.core.call import Call
from portakern.core.oracle import as_float64, degenerate_outputs, oracle
from portakern.errors import SpecError
from portakern.spec.tolerance import compare
from portakern.testing.statistics import examine

__all__ = ["Broken", "compare_call", "expected"]


class Broken(AssertionError):
    """A case that broke the contract, with what is wrong in words."""


def expected(call: Call) -> tuple[Call, tuple[Any, ...], tuple[Any, ...]]:
    """(the call in float64, the exact outputs, their bounds); None for an output that the call does not want."""
    if call.spec.bound is None:
        raise SpecError(f"{call.spec.name} declares no tolerance; give its spec one with @{call.spec.name}.tolerance")
    wide = as_float64(call)
    if call.degenerate:
        exact: tuple[Any, ...] = tuple(
            None if o is None else np.asarray(o, np.float64) for o in degenerate_outputs(wide)
        )
        return wide, exact, tuple(None if o is None else np.zeros_like(o) for o in exact)
    exact = oracle(call)
    with np.errstate(all="ignore"):
        return wide, exact, call.spec.bound(wide, exact)


def compare_call(
    call: Call, outputs: Sequence[np.ndarray], tiling: Mapping[str, int] | None = None, regime: str = ""
) -> dict[str, float]:
    """Output name -> worst fraction of the bound, for the wanted outputs of ``call`` as NumPy arrays.

    ``call.target`` and ``call.interpret`` say what ran; ``tiling`` with which tiles; ``regime`` how the values were
    drawn, "" for anything but a regime's own values.

    Raises:
      Broken: a wrong shape or dtype; an element out of bounds: it names the first one, its tile and mask region, what
        came, what was wanted and the bound; errors within bounds that random rounding would not give (see
        :mod:`portakern.testing.statistics`).
    """
    wide, exact, bounds = expected(call)
    fractions = {}
    wanted = [(o.name, exact[i], bounds[i]) for i, o in enumerate(call.spec.outputs) if o.name in call.wants]
    for (name, ref, bound), got in zip(wanted, outputs, strict=True):
        shape, dtype = call.outputs[name]
        if got.shape != shape:
            raise Broken(f"{name} has shape {got.shape}; expected {shape}")
        if got.dtype.name != dtype:
            raise Broken(f"{name} is {got.dtype.name}; expected {dtype}")
        result = compare(got, ref, bound, dtype)
        if result.bad.any():
            raise Broken(describe(call, name, got, ref, np.broadcast_to(bound, shape), result.bad, tiling or {}))
        fractions[name] = float(result.worst)
    for name, evidence in examine(wide, outputs, exact, bounds, regime).items():
        if evidence.reasons:
            raise Broken(f"{name}: {'; '.join(evidence.reasons)} (every element is within its bound)")
    return fractions


def describe(
    call: Call,
    name: str,
    got: np.ndarray,
    ref: np.ndarray,
    bound: np.ndarray,
    bad: np.ndarray,
    tiling: Mapping[str, int],
) -> str:
    """The first bad element in words."""
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
    value, want = np.asarray(got[index], np.float64), ref[index]
    places = [
        *tiles_of(call, name, index, tiling),
        *([call.spec.region(call, name, index)] if call.spec.region else []),
    ]
    where = f" ({'; '.join(places)})" if places else ""
    return (
        f"{name}{list(index)}{where} is {value:.9g}; the oracle says {want:.9g}, permitted error {bound[index]:.3g}, "
        f"actual {abs(value - want):.3g}; {int(bad.sum())} of {bad.size} elements are out of bounds"
    )


def tiles_of(call: Call, name: str, index: tuple[int, ...], tiling: Mapping[str, int]) -> list[str]:
    """In which tile an output's element lies, along each tiled dimension that the output has."""
    output = next(o for o in call.spec.outputs if o.name == name)
    found = []
    for tile, extent in tiling.items():
        of = call.spec.tiling[tile].of if tile in call.spec.tiling else None
        if of is None:
            continue
        for back, d in enumerate(reversed(output.dims), 1):
            if d.factors == (of,) and not d.variadic:
                found.append(
                    f"{tile}={extent}: tile {index[-back] // extent} of {-(-call.dims[of] // extent)}, element "
                    f"{index[-back] % extent}"
                )
    return found
