"""Suppose a mistake, compute what it gives, and compare: what a wrong output looks like, by the oracle of other calls.

Each supposition is the call with one thing changed: an option, an array that is ignored, transposed, shifted or
rounded, the end of a summed dimension left out, or what the op's spec declares
(:meth:`portakern.spec.Spec.mistake`). It fits if the oracle and the bound of the changed call accept the output
that those of the call refuse. Nothing is told where more than two fit that give other results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from portakern.core.call import Call
from portakern.core.oracle import as_float64, oracle
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import Option, shown
from portakern.spec.tolerance import compare, permitted_error
from portakern.testing.likeness import Likeness
from portakern.testing.threads import one_thread

__all__ = ["Wrong", "supposed", "suppositions"]

ELEMENTS, SECONDS = 1 << 22, 6.0
"""At most: elements of a call that is supposed to be another, and the time for all suppositions."""

EVIDENCE = 16.0
"""Bits that an agreement must be worth: of each wrong element the logarithm of its error in units of the bound."""

DISTINCT = 4
"""Errors that differ from each other, at least."""

AGREEING = 0.98
SAYS = 2
"""Suppositions that fit and are told beside each other, at most."""

VAGUE = ("", "part", "tail", "scaled", "offset", "moved", "downgraded", "rows")
"""Names of likenesses that a supposition is more than."""

NARROWER: tuple[tuple[str, Callable[[np.ndarray], np.ndarray], int], ...] = (
    ("bfloat16", lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float64), 16),
    ("float16", lambda x: x.astype(np.float16).astype(np.float64), 16),
    ("tf32", lambda x: _tf32(x, 0x1000), 19),
    ("tf32 towards 0", lambda x: _tf32(x, 0), 19),
)
LOG2_E = 1 / math.log(2)
TILES = tuple(1 << i for i in range(9, 2, -1))


class Wrong(NamedTuple):
    """A wrong output: ``name`` of ``call`` in float64, what came, what was expected and its bound, where it is ``bad``,
    and the output's dtype."""

    call: Call
    name: str
    actual: np.ndarray
    ref: np.ndarray
    bound: np.ndarray
    bad: np.ndarray
    dtype: str


class Supposition(NamedTuple):
    """``words``: what the output looks like; ``name``: the same in one word; ``of``: the option, array or dimension;
    ``call``: the call that it would be right for."""

    name: str
    of: str
    words: str
    call: Call


def _tf32(x: np.ndarray, half: int) -> np.ndarray:
    """As matrix units read float32: ten bits behind the point; ``half``: of the last of them, to round to nearest."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(half)) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


@one_thread()
def supposed(wrong: Wrong, found: Likeness) -> Likeness:
    """What a wrong output looks like, which was found to look like ``found``: the mistake that was supposed and fits,
    else ``found``."""
    size = sum(a.size for a in wrong.call.arrays.values() if a is not None)
    if found.name not in VAGUE or size > ELEMENTS or _evidence(wrong) < EVIDENCE:
        return found
    until = time.monotonic() + SECONDS
    fit: list[tuple[Supposition, np.ndarray]] = []
    with np.errstate(all="ignore"):
        for s in suppositions(wrong.call, wrong.name):
            if time.monotonic() > until:
                break
            if all(s.of != f.of for f, _ in fit) and (exact := _fitting(s.call, wrong)) is not None:
                fit.append((s, exact))
        alike = all(np.allclose(exact, fit[0][1], rtol=1e-9, atol=0, equal_nan=True) for _, exact in fit)
    if not fit or (len(fit) > SAYS and not alike):
        return found
    return Likeness(fit[0][0].name, "; or ".join(s.words for s, _ in fit[:SAYS]))


def _evidence(w: Wrong) -> float:
    with np.errstate(all="ignore"):
        error = np.abs(np.asarray(w.actual).astype(np.float64) - w.ref)[w.bad]
        share = error / np.maximum(np.broadcast_to(w.bound, w.ref.shape)[w.bad], 1e-300)
    share = share[np.isfinite(share)]
    if len(np.unique(np.asarray(w.actual).astype(np.float64)[w.bad] - w.ref[w.bad])) < DISTINCT:
        return 0.0
    return float(np.log2(np.clip(share, 1.0, 2.0**20)).sum())


def _fitting(call: Call, w: Wrong) -> np.ndarray | None:
    """The oracle's output of another call, if what came is right for it, and what is expected is not."""
    try:
        exact = oracle(call)
        bounds = call.spec.bound(as_float64(call), exact) if call.spec.bound else ()
    except Exception:  # there is no such call
        return None
    i = next(i for i, o in enumerate(call.spec.outputs) if o.name == w.name)
    other, bound = exact[i], bounds[i]
    if other is None or other.shape != w.ref.shape:
        return None
    codes = call.spec.output(w.name).codes
    permitted = permitted_error(np.broadcast_to(bound, other.shape), other, w.dtype, codes)
    apart = np.abs(other - w.ref) > np.maximum(permitted, np.broadcast_to(w.bound, other.shape))
    apart |= np.isfinite(other) != np.isfinite(w.ref)
    right = ~compare(w.actual, other, bound, w.dtype, codes).bad & (np.isfinite(permitted) | ~np.isfinite(other))
    fits = apart[w.bad].mean() >= 0.9 and right[w.bad].mean() >= AGREEING and right.mean() >= AGREEING
    return other if fits else None


def suppositions(call: Call, output: str) -> Iterator[Supposition]:
    """The calls that a wrong kernel may have computed, those that the spec declares first."""
    for words, fn in call.spec.mistakes.items():
        other = fn(call)
        if other is not None:
            yield Supposition("declared", words, words, other)
    yield from _options(call)
    yield from _ends(call, output)
    yield from _arrays(call)


def _options(call: Call) -> Iterator[Supposition]:
    for o in call.spec.options:
        value = call.options[o.name]
        for other, why in _other_values(o, value):
            if other != value:
                text = f"as if {o.name} were {shown(other)}, not {shown(value)}{why}"
                yield Supposition("option", o.name, text, call.replace(options={**call.options, o.name: other}))


def _other_values(o: Option, value: Any) -> Iterator[tuple[Any, str]]:
    """(another value of an option, why it may be that one)."""
    if o.axis_of or o.extent or o.kind == "dtype":
        return
    if o.kind == "bool":
        yield not value, ""
    elif o.kind == "choice":
        yield from ((c, "") for c in o.choices)
    elif value is None:
        return
    elif o.kind == "int":
        yield from ((value + 1, ": off by one"), (value - 1, ": off by one"))
    elif o.kind == "tuple":
        for i, n in enumerate(value):
            for step in (1, -1) if n is not None else ():
                yield (*value[:i], n + step, *value[i + 1 :]), ": off by one"
    elif o.kind == "float":
        yield from ((value * LOG2_E, ": times log2 e"), (value / LOG2_E, ": times ln 2"), (1.0, ""), (0.0, ""))
    if o.kind != "bool" and (o.default is not None or o.optional):
        yield o.default, ", its default"


def _arrays(call: Call) -> Iterator[Supposition]:
    """One array, or all, as something else: what is likely, and what an oracle is seldom asked for, first."""

    def other(words: str, name: str, **changed: Any) -> Supposition:
        return Supposition(name, next(iter(changed)), f"as if {words}", call.replace(arrays={**call.arrays, **changed}))

    given = {a.name: call.arrays[a.name] for a in call.spec.arrays if call.arrays[a.name] is not None}
    given = {name: x for name, x in given.items() if x.size}
    floats = {n: x for n, x in given.items() if x.dtype.kind not in "iub"}
    for name in given:
        if call.spec.argument(name).optional:
            yield other(f"{name} were not there", "ignored", **{name: None})
    for kind, cast, bits in NARROWER:
        wider = {n: cast(a) for n, a in floats.items() if DTYPES[call.dtype_of(n)].bits > bits}
        if wider:
            yield other(f"{' and '.join(wider)} were rounded to {kind} first", "downgraded", **wider)
    for name, x in given.items():
        if name not in floats:
            yield other(f"{name} held numbers greater by 1", "shifted", **{name: x + 1})
            yield other(f"{name} held numbers less by 1", "shifted", **{name: x - 1})
            continue
        yield from (other(words, one, **{name: y}) for words, one, y in _as_numbers(name, x))
        if 2 * x.size <= max(y.size for y in floats.values()) and name != call.spec.lead.name:
            yield from (other(words, one, **{name: y}) for words, one, y in _as_factors(name, x))
    for name, x in floats.items():
        yield from (other(words, one, **{name: y}) for words, one, y in _moved(name, x))


def _as_numbers(name: str, x: np.ndarray) -> Iterator[tuple[str, str, np.ndarray]]:
    """(in words, in one word, the array) of other values of an array."""
    yield f"{name} were 0 everywhere: it is ignored", "ignored", np.zeros_like(x)
    yield f"{name} were 1 everywhere: it is ignored", "ignored", np.ones_like(x)
    yield f"{name} were times log2 e: base e for base 2", "base", x * LOG2_E
    yield f"{name} were times ln 2: base 2 for base e", "base", x / LOG2_E
    yield f"{name} were 1 + {name}", "offset", 1 + x
    n = x.shape[-1] if x.ndim else 1
    if n > 1:
        for factor, said in ((math.sqrt(n), f"sqrt {n}"), (n, f"{n}")):
            yield f"{name} were times {said}, an extent of its own: a scale is missing", "scale", x * factor
            yield f"{name} were divided by {said}, an extent of its own: scaled twice", "scale", x / factor


def _as_factors(name: str, x: np.ndarray) -> Iterator[tuple[str, str, np.ndarray]]:
    """Of a table, a slope or a scale, which is smaller than what it meets: of others another mistake is likelier."""
    yield f"{name} had the other sign", "sign", -x
    yield f"{name} were 1 / {name}: multiplied where it should divide, or the reverse", "inverse", 1 / x
    yield f"{name} counted twice", "twice", x * x


def _moved(name: str, x: np.ndarray) -> Iterator[tuple[str, str, np.ndarray]]:
    """The same numbers of an array in other positions."""
    if x.ndim > 1 and min(x.shape[-2:]) > 1:
        swapped = np.swapaxes(x, -1, -2)
        if swapped.shape == x.shape:
            yield f"{name} were transposed", "transposed", swapped
        else:
            yield f"{name} were read in the transposed order", "transposed", swapped.reshape(x.shape)
            wrong = np.swapaxes(x.reshape(swapped.shape), -1, -2)
            yield f"{name} lay transposed in memory", "transposed", wrong
    for axis in range(x.ndim):
        if x.shape[axis] > 3:  # of fewer too much looks alike
            yield f"{name} were read in reverse along its axis {axis}", "shifted", np.flip(x, axis)
            for step, where in ((-1, "further"), (1, "before")):
                text = f"{name} were read one place {where} along its axis {axis}"
                yield text, "shifted", np.roll(x, step, axis)
        if x.shape[axis] > 1:
            first = np.broadcast_to(np.take(x, [0], axis), x.shape)
            yield f"{name} had its first place everywhere along its axis {axis}", "repeated", first


def _ends(call: Call, output: str) -> Iterator[Supposition]:
    """The call without the end, or the beginning, of a dimension that the output does not have."""
    declared = call.spec.output(output).dims
    kept = {factor for d in declared for factor in d.factors}
    for dim, n in call.dims.items():
        if dim in kept or type(n) is not int or n < 2:
            continue
        positions = {
            a.name: [axis for axis, d in enumerate(reversed(a.dims), 1) if dim in d.factors]
            for a in call.spec.arrays
            if call.arrays[a.name] is not None
        }
        if any(len(axes) > 1 for axes in positions.values()):
            continue
        alone = all(d.factors == (dim,) and d.alone for a in call.spec.arrays for d in a.dims if dim in d.factors)
        if not alone:
            continue
        left = dict.fromkeys(m for m in (n - 1, *(n // t * t for t in TILES)) if 0 < m < n)
        for m in left:
            cut = dict(_cut(call, positions, m))
            lost = "the last element" if m == n - 1 else f"the last {n - m} of {n} elements"
            end = "" if m == n - 1 else ": a last tile that is not full"
            yield Supposition("tail", dim, f"as if {lost} along {dim} were left out{end}",
                              call.replace(arrays={**call.arrays, **cut}, dims={**call.dims, dim: m}))  # fmt: skip


def _cut(call: Call, positions: dict[str, list[int]], extent: int) -> Iterator[tuple[str, np.ndarray]]:
    for name, axes in positions.items():
        if axes:
            x = call.arrays[name]
            yield name, x[(..., slice(extent), *[slice(None)] * (axes[0] - 1))]
