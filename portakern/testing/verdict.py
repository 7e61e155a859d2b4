"""Compare the outputs of one call: shapes, dtypes, and every element with its bound; and locate the first wrong
element."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from portakern.core.call import Call
from portakern.core.oracle import as_float64, degenerate_outputs, oracle
from portakern.errors import SpecError
from portakern.spec.tolerance import Comparison, compare, permitted_error
from portakern.testing.likeness import Likeness, likeness
from portakern.testing.mistakes import Wrong
from portakern.testing.sampled import SampledCall
from portakern.testing.statistics import examine
from portakern.testing.threads import one_thread

__all__ = [
    "KINDS",
    "PROMISES",
    "Broken",
    "BrokenPromise",
    "Expected",
    "OtherEdges",
    "Refused",
    "compare_bounds",
    "compare_call",
    "compare_elsewhere",
    "expected",
]

KINDS = ("bounds", "edges", "promises")
"""What may be broken: an element is wrong, or an output is of another form; NaN and infinities lead elsewhere than in
the formula; bits, memory or neighbours are not as portakern's own kernels promise them."""


PROMISES = {
    "inputs": "an input is not written to",
    "outside": "memory outside an input's elements is not written to",
    "own_memory": "an output has its own memory, not an input's",
    "overwrite": "a result written over an input has the same bits as otherwise, and nothing else is written to",
    "kept": "a later call neither reuses the memory of an earlier result nor writes to it",
    "contiguous": "outputs are contiguous",
    "ways": "a call also works on another thread, on read-only arrays, and under the library's transformations",
    "same_bits": "the same call gives the same bits again",
    "sums": "a sum of n terms is a chain of at most n / 32 + 32 additions; terms that cancel come first, others last",
    "laws": "the spec's laws between two calls hold to the bit, e.g. a row alone and among others",
}
"""What portakern's own kernels promise beyond the bounds: name -> in words. Without ``sums`` bounds are those of sums
in any order, one term after the other too."""


class Broken(AssertionError):
    """A failing case, with a message; ``kind`` is one of KINDS.

    ``cause``: a broken promise (one of PROMISES), or for a wrong output the likely mistake in one word ("": unknown);
    ``explanation``: the same in words. ``fractions``: output -> largest error / error bound of the compared outputs;
    ``tiling``: the tiling of the case, in words; ``wrong``: the output that is out of bounds.
    """

    kind = "bounds"
    tiling = "default"
    wrong: Wrong | None = None

    def __init__(self, what: str, cause: str = "", explanation: str = "") -> None:
        super().__init__(what)
        self.cause, self.explanation = cause, explanation
        self.fractions: dict[str, float] = {}

    def after(self, what: str, cause: str = "", explanation: str = "") -> Self:
        """The same after something that is to be told first, of which it may look like another mistake."""
        new = type(self)(f"{what}: {self}", cause or self.cause, explanation or self.explanation).at(self.fractions)
        new.wrong = self.wrong if not cause else None
        return new

    def at(self, fractions: dict[str, float]) -> Self:
        """This, with the shares that were measured."""
        self.fractions = fractions
        return self


class Refused(Broken):
    """A valid call that a backend refuses without declaring this refusal."""

    kind = "refused"


class OtherEdges(Broken):
    """Inputs hold NaN or infinities, and every wrong element is or should be NaN or infinite."""

    kind = "edges"


class BrokenPromise(Broken):
    """A broken promise: portakern's own kernels also give the same bits for the same call and row, return contiguous
    outputs in their own memory, and do not write to inputs."""

    kind = "promises"


Expected = tuple[Call, tuple[Any, ...], tuple[Any, ...]]


@one_thread()
def expected(call: Call) -> Expected:
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
    call: Call,
    outputs: Sequence[np.ndarray],
    tiling: Mapping[str, int] | None = None,
    regime: str = "",
    within: tuple[SampledCall, Mapping[str, np.ndarray]] | None = None,
    known: Expected | None = None,
) -> dict[str, float]:
    """Output name -> largest error / error bound, for the wanted outputs of ``call`` as NumPy arrays.

    ``call.target`` and ``call.interpret`` are those of the run; ``tiling``: its tiling; ``regime``: the regime of the
    values, "" for others; ``within``: if the call is a part of a large call, that call and all its outputs; ``known``:
    the result of :func:`expected` for the call, if known.

    Raises:
      Broken: a wrong shape or dtype; an element out of bounds (the message has its index, tile, mask region, value,
        expected value and bound); or errors within bounds that random rounding does not give (see
        :mod:`portakern.testing.statistics`).
      OtherEdges: the inputs hold NaN or infinities, and every element out of bounds is or should be one.
    """
    wide, exact, bounds = known = known or expected(call)
    fractions = compare_bounds(call, outputs, tiling, within, known)
    with one_thread():
        found = examine(wide, outputs, exact, bounds, regime)
    for name, evidence in found.items():
        if evidence.reasons:
            reasons = "; ".join(evidence.reasons)
            which = "rounding" if evidence.applies else "inexact"
            raise Broken(f"{name}: {reasons} (every element is within its bound)", which, LOOKS[which]).at(fractions)
    return fractions


def compare_bounds(
    call: Call,
    outputs: Sequence[np.ndarray],
    tiling: Mapping[str, int] | None = None,
    within: tuple[SampledCall, Mapping[str, np.ndarray]] | None = None,
    known: Expected | None = None,
) -> dict[str, float]:
    """:func:`compare_call` without the statistics of errors that lie within their bounds."""
    wide, exact, bounds = known or expected(call)
    fractions = {}
    elsewhere = ""
    wanted = [(o.name, exact[i], bounds[i]) for i, o in enumerate(call.spec.outputs) if o.name in call.wants]
    for (name, ref, bound), got in zip(wanted, outputs, strict=True):
        shape, dtype = call.outputs[name]
        if got.shape != shape:
            raise Broken(f"{name} has shape {got.shape}; expected {shape}", "form", LOOKS["form"])
        if got.dtype.name != dtype:
            raise Broken(f"{name} is {got.dtype.name}; expected {dtype}", "form", LOOKS["form"])
        codes = call.spec.output(name).codes
        result = compare(got, ref, bound, dtype, codes)
        fractions[name] = _share(result, got, ref)
        if result.bad.any():
            permitted = permitted_error(bound, ref, dtype, codes)
            what = describe(wide, name, got, ref, permitted, result.bad, tiling or {}, within)
            if not _only_edges(wide, got, ref, result.bad):
                error = Broken(what, *_looks(wide, name, got, ref, bound, dtype, within)).at(fractions)
                error.wrong = Wrong(wide, name, got, ref, permitted, result.bad, dtype)
                raise error
            elsewhere = elsewhere or what
    if elsewhere:
        raise OtherEdges(f"edge semantics differ: {elsewhere}", "edges").at(fractions)
    return fractions


def _share(found: Comparison, actual: np.ndarray, ref: np.ndarray) -> float:
    """The largest share of what is permitted; inf where NaN or an infinity is wrong, or should have come."""
    with np.errstate(all="ignore"):
        numbers = np.isfinite(np.asarray(actual).astype(np.float64)) & np.isfinite(ref)
    return math.inf if (found.bad & ~numbers).any() else float(found.worst)


def _looks(
    wide: Call,
    name: str,
    actual: np.ndarray,
    ref: np.ndarray,
    bound: np.ndarray,
    dtype: str,
    within: tuple[SampledCall, Mapping[str, np.ndarray]] | None,
) -> Likeness:
    """What a wrong output looks like: a part by itself, else all of it."""
    codes = wide.spec.output(name).codes
    permitted = permitted_error(bound, ref, dtype, codes)
    found = likeness(wide, actual, ref, permitted, compare(actual, ref, bound, dtype, codes).bad, dtype)
    if within is None or not within[0].stands or found.name not in ("", "part"):
        return found
    part, whole = within
    refs, bounds = part.spread(name, ref), part.spread(name, np.broadcast_to(bound, ref.shape))
    permitted = permitted_error(bounds, refs, dtype, codes)
    return likeness(wide, whole[name], refs, permitted, compare(whole[name], refs, bounds, dtype, codes).bad, dtype)


LOOKS = {
    "form": "an output of another shape, dtype or kind",
    "rounding": "steps that round too often, one way, or in too few bits",
    "inexact": "something is rounded that need not be: too few bits, or a term that is missing",
}


def compare_elsewhere(
    call: Call, name: str, actual: np.ndarray, some: np.ndarray, part: SampledCall, known: Expected
) -> None:
    """Hold all of a large output to the oracle of its part, whose elements stand for others.

    Args:
      call: on the part; name: the output; actual: all of it; some: its part.
      known: what :func:`expected` gave for the call.

    Raises:
      Broken, OtherEdges: as :func:`compare_call`.
    """
    same = part.spread(name, some)
    raw = np.dtype(f"u{actual.itemsize}")
    differ = actual.view(raw) != same.view(raw)
    if not differ.any():
        return
    wide, exact, bounds = known
    i = next(i for i, o in enumerate(call.spec.outputs) if o.name == name)
    ref, bound = (part.spread(name, np.broadcast_to(a, exact[i].shape)) for a in (exact[i], bounds[i]))
    bad = np.zeros(actual.shape, bool)
    dtype, codes = actual.dtype.name, call.spec.output(name).codes
    found = compare(actual[differ], ref[differ], bound[differ], dtype, codes)
    bad[differ], share = found.bad, {name: _share(found, actual[differ], ref[differ])}
    if bad.any():
        bound = permitted_error(bound, ref, dtype, codes)
        what = describe(call, name, actual, ref, bound, bad, {})
        if _only_edges(wide, actual, ref, bad):
            raise OtherEdges(f"edge semantics differ: {what}", "edges").at(share)
        raise Broken(what, *likeness(wide, actual, ref, bound, bad, dtype)).at(share)


def _only_edges(wide: Call, actual: np.ndarray, ref: np.ndarray, bad: np.ndarray) -> bool:
    """Whether all that is bad is NaN or infinite, or should be, in a call whose own arrays hold such values."""
    with np.errstate(all="ignore"):
        numbers = np.isfinite(np.asarray(actual).astype(np.float64)) & np.isfinite(ref)
    if (bad & numbers).any():
        return False
    floats = (a for a in wide.arrays.values() if a is not None and a.dtype.kind not in "iub")
    return not all(np.isfinite(a).all() for a in floats)


def describe(
    call: Call,
    name: str,
    actual: np.ndarray,
    ref: np.ndarray,
    bound: np.ndarray,
    bad: np.ndarray,
    tiling: Mapping[str, int],
    within: tuple[SampledCall, Any] | None = None,
) -> str:
    """The first bad element in words."""
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
    value, want = np.asarray(actual[index], np.float64), ref[index]
    known = bad.shape == call.outputs[name][0]  # not all of an output that the call is a part of
    places = [
        *tiles_of(call, name, index, tiling),
        *([call.spec.region(call, name, index)] if call.spec.region and known else []),
    ]
    where = f" ({'; '.join(places)})" if places else ""
    at = list(within[0].full_index(name, index) if within else index)
    return (
        f"{name}{at}{where} is {value:.9g}; the oracle says {want:.9g}, permitted error {bound[index]:.3g}, "
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
            if d.factors == (of,) and d.alone and not d.variadic:
                found.append(
                    f"{tile}={extent}: tile {index[-back] // extent} of {-(-call.dims[of] // extent)}, element "
                    f"{index[-back] % extent}"
                )
    return found
