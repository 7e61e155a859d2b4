"""Sampling of large calls: the oracle computes some indices along dimensions that are independent of each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from portakern.core.binder import bind
from portakern.core.call import Call
from portakern.spec import Dim, Spec
from portakern.testing.layouts import Buffer

__all__ = [
    "LARGE",
    "OutputSample",
    "SampledCall",
    "along",
    "apart",
    "chosen_axes",
    "extents_of",
    "part_call",
    "part_of",
    "picked",
    "pieces",
    "repeated",
    "rewritten",
    "stand_ins",
    "taken",
    "turned",
    "with_what_follows",
]

LARGE = 2**18
"""Elements of the largest array beyond which a call is compared in part."""

WORK = 1e8
"""Floating-point operations that the oracle may take for the part: a fraction of a second."""


def apart(
    spec: Spec[Any], options: Mapping[str, Any], wants: Sequence[str], given: Collection[str] = ()
) -> tuple[str, ...]:
    """The dimensions along which a call that has these arrays may be taken apart; without those that offsets number,
    unless the spec says what becomes of these, and those of which blocks share a number."""
    found = spec.apart_in(options, wants, given)
    widths = {o.name: options.get(o.name, o.default) for o in spec.extents}
    fixed = {d.factors[0] for a in spec.arrays for d in a.dims if d.per and widths[d.per] != 1}
    fixed |= set() if spec.rewriter else {f for a in spec.arrays for d in a.dims if d.plus for f in d.factors}
    return tuple(n for n in found if n not in fixed)


def picked(rng: np.random.Generator, extent: int, count: int) -> np.ndarray:
    """Indices along a dimension: the ends, both sides of powers of two, where tiles and counters end, and any."""
    borders = [i for e in range(7, 31) for i in ((1 << e) - 1, 1 << e) if i < extent]
    some: Sequence[int] = rng.permutation(borders)[: max(count // 3, 1)].tolist() if borders else []
    anywhere = rng.integers(0, max(extent, 1), count)
    first = dict.fromkeys([0, extent - 1, *map(int, some), *map(int, anywhere)])
    return np.array(sorted([*first][:count]) if extent else [], dtype=np.int64)


class OutputSample(NamedTuple):
    """What is compared of some outputs of a call: dimension -> indices, as of :func:`part_of`, and the options that are
    others there."""

    wants: tuple[str, ...]
    chosen: Mapping[str, Any]
    options: Mapping[str, Any]


def pieces(call: Call, rng: np.random.Generator, work: float | None = None) -> Iterator[OutputSample]:
    """The pieces of a call that stand for it: all of a small one; of a large one what ``work`` operations of the oracle
    reach, for each output by itself, since one may be taken apart where another cannot."""
    sizes = [math.prod(a.shape) for a in call.arrays.values() if a is not None]
    if max((*sizes, *(math.prod(shape) for shape, _ in call.outputs.values())), default=0) <= LARGE:
        yield OutputSample(call.wants, {}, {})
        return
    for name in call.wants:
        one = call.replace(wants=(name,))
        chosen = _picked_of(one, rng, work)
        along = list(call.spec.stretches(one, rng)) if call.spec.stretches else []
        for indices, options in along or [({}, {})]:
            together = {**chosen, **{n: [i] for n, i in indices.items()}}
            yield OutputSample((name,), with_what_follows(one, together), options)


def part_of(call: Call, rng: np.random.Generator, work: float | None = None) -> dict[str, Any]:
    """Dimension -> the indices to compare, of a variadic one a list of them for each axis; empty where the call cannot
    be taken apart."""
    return with_what_follows(call, _picked_of(call, rng, work))


def rewritten(call: Call, chosen: Mapping[str, Any]) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    """What a spec says of a call of which some indices are taken (:meth:`portakern.spec.Spec.rewrite`)."""
    if not chosen or call.spec.rewriter is None:
        return {}, {}
    return call.spec.rewriter(call, {n: i if isinstance(call.dims[n], tuple) else i[0] for n, i in chosen.items()})


def with_what_follows(call: Call, chosen: dict[str, Any]) -> dict[str, Any]:
    """The indices with those along other dimensions that come along: of runs that lack an axis, and by the spec's
    word."""
    chosen = chosen | _with_an_axis_dropped(call, chosen)
    return chosen | {n: [np.asarray(i, np.int64)] for n, i in rewritten(call, chosen)[0].items()}


def _picked_of(call: Call, rng: np.random.Generator, work: float | None) -> dict[str, Any]:
    """What is taken along the dimensions that are apart."""
    spec = call.spec
    names = apart(spec, call.options, call.wants, call.present)
    axes = [(n, i, e) for n in names for i, e in enumerate(extents_of(call, n)) if not along(call, n, i)]
    chosen: dict[str, Any] = {n: [np.arange(e) for e in extents_of(call, n)] for n in names}
    count, most = 24, WORK if work is None else work
    while axes:
        for name, i, extent in axes:
            chosen[name][i] = picked(rng, extent, count)
        kept = math.prod(len(chosen[n][i]) / max(e, 1) for n, i, e in axes)
        if call.flops * kept <= most or count <= 2:
            return chosen
        count = max(2, count * 2 // 3)
    return {}


def _with_an_axis_dropped(call: Call, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The same of the runs that lack an axis of one that was chosen."""
    found = {}
    for name in call.spec.drops:
        dropped = call.spec.dropped(name)
        if dropped and dropped[0] in chosen:
            whole, option = chosen[dropped[0]], dropped[1]
            axis = call.options[option.name] % len(whole)
            found[name] = [*whole[:axis], *whole[axis + 1 :]]
    return found


def extents_of(call: Call, name: str) -> tuple[int, ...]:
    """The extents of a dimension: one, or of a variadic one those of its axes."""
    extent = call.dims[name]
    return extent if isinstance(extent, tuple) else (extent,)


def along(call: Call, name: str, axis: int) -> bool:
    """Whether the op works along this axis of a run."""
    of = [o for o in call.spec.options if o.axis_of and call.spec.argument(o.axis_of).dims[0].factors == (name,)]
    return any(call.options[o.name] % len(call.dims[name]) == axis for o in of)


def taken(array: np.ndarray, dims: Sequence[Dim], call: Call, chosen: Mapping[str, Any]) -> np.ndarray:
    """An argument or output of a call at the chosen indices; what is broadcast along a dimension stays whole."""
    for axis, index in chosen_axes(array.shape, dims, call, chosen):
        array = np.take(array, index, axis)
    return array


def chosen_axes(
    shape: Sequence[int], dims: Sequence[Dim], call: Call, chosen: Mapping[str, Any]
) -> Iterator[tuple[int, np.ndarray]]:
    """Axes of an argument or output of this shape, each with the chosen indices along it."""
    for axis, d, i in _axes(shape, dims, call):
        if d.factors[0] in chosen and not d.plus:
            inner = math.prod(call.dims[f] for f in d.factors[1:])
            yield axis, (chosen[d.factors[0]][i][:, None] * inner + np.arange(inner)).reshape(-1)


def _axes(shape: Sequence[int], dims: Sequence[Dim], call: Call) -> Iterator[tuple[int, Dim, int]]:
    """(an axis, its dimension, which of that dimension's axes it is) of an argument or output of this shape, the last
    first; without those along which it is broadcast."""
    axis = len(shape)
    for d in reversed(dims):  # axes that are missing at the front were broadcast
        for i in reversed(range(len(call.dims[d.factors[0]]) if d.variadic else 1)):
            axis -= 1
            if axis >= 0 and not (d.broadcast and shape[axis] == 1):
                yield axis, d, i


def turned(call: Call, name: str, axis: int, shift: int) -> dict[str, Any]:
    """Dimension -> its indices, of a variadic one for each axis, with those along one axis turned round by ``shift``:
    an
    array at them has the values of this one in other places, and so has what a call gives of it."""
    whole = [np.arange(e) for e in extents_of(call, name)]
    whole[axis] = np.roll(whole[axis], -shift)
    return {name: whole} | _with_an_axis_dropped(call, {name: whole})


def stand_ins(call: Call, chosen: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Dimension -> for every index along it the place in ``chosen`` of one that stands for it: itself where it was
    chosen, else any."""

    def stands_for(index: np.ndarray, extent: int) -> np.ndarray:
        found = rng.integers(0, len(index), extent)
        found[index] = np.arange(len(index))
        return found

    names = [n for n in chosen if n not in call.spec.drops]
    found: dict[str, Any] = {
        n: [stands_for(i, e) for i, e in zip(chosen[n], extents_of(call, n), strict=True)] for n in names
    }
    return found | _with_an_axis_dropped(call, found)


def repeated(
    buffers: Mapping[str, Buffer], call: Call, chosen: Mapping[str, Any], stands: Mapping[str, Any]
) -> dict[str, Buffer]:
    """The same memories, in which what was chosen stands for the rest: the oracle of the part is that of the whole."""
    whole = {n: [i[s] for i, s in zip(chosen[n], stands[n], strict=True)] for n in chosen}
    made: dict[int, Buffer] = {}
    for a in call.spec.arrays:
        b = buffers.get(a.name)
        if b is None:
            continue
        if id(b) not in made:
            made[id(b)] = Buffer(b.memory.copy(), b.shape, b.strides, b.offset)
        own = made[id(b)].view()  # of one array for several arguments, what is chosen of each is repeated in turn
        own[...] = taken(own, a.dims, call, whole)
    return {n: made[id(b)] for n, b in buffers.items()}


def part_call(call: Call, buffers: Mapping[str, Buffer], chosen: Mapping[str, Any], options: Mapping[str, Any]) -> Call:
    """The call on its part, for the oracle."""
    _, values = rewritten(call, chosen)
    arrays = {}
    for a in call.spec.arrays:
        if a.name in buffers:
            own = buffers[a.name].view()
            new = values.get(a.name)
            arrays[a.name] = taken(own, a.dims, call, chosen) if new is None else np.asarray(new).astype(own.dtype)
    part = bind(call.spec, **arrays, **options)
    part.target, part.interpret, part.any_order = call.target, call.interpret, call.any_order
    return part


def _along_one_axis(
    call: Call, chosen: Mapping[str, Any], same: Sequence[str]
) -> Iterator[tuple[tuple[str, int], list[tuple[str, int]]]]:
    """Of each axis of one array that is given for several arguments: an axis of a dimension that was chosen, and those
    of the other dimensions that lie along it. They are chosen alike, or else what repeats one undoes the other."""
    found: dict[int, dict[tuple[str, int], None]] = {}
    for n in same:
        array = call.arrays[n]
        if array is not None:
            for axis, d, i in _axes(array.shape, call.spec.argument(n).dims, call):
                if d.factors[0] in chosen:
                    found.setdefault(axis, {})[d.factors[0], i] = None
    for first, *others in found.values():
        yield first, others


@dataclass(frozen=True)
class SampledCall:
    """What of a large call is compared with the oracle, and stands for the rest; empty where all is.

    ``chosen``, ``stands``: of :func:`part_of` and :func:`stand_ins`. Where values of arrays are places in others,
    nothing can stand for anything else, and the rest is not compared."""

    call: Call
    chosen: Mapping[str, Any]
    stands: Mapping[str, Any]

    @classmethod
    def from_call(cls, call: Call, seed: int, same: Sequence[str] = ()) -> SampledCall:
        """``same``: the arguments for which one array is given."""
        shapes = [*(a.shape for a in call.arrays.values() if a is not None), *(s for s, _ in call.outputs.values())]
        rng = np.random.default_rng([seed, 2])
        chosen = part_of(call, rng) if max(map(math.prod, shapes)) > LARGE else {}
        if all(len(i) == e for n in chosen for i, e in zip(chosen[n], extents_of(call, n), strict=True)):
            chosen = {}  # all of it, as of one long row
        if call.spec.rewriter:
            return cls(call, chosen, {})
        stands = stand_ins(call, chosen, rng) if chosen else {}
        for (name, i), others in _along_one_axis(call, chosen, same):
            for other, j in others:
                chosen[other][j], stands[other][j] = chosen[name][i], stands[name][i]
        return cls(call, chosen, stands)

    def dims(self, name: str) -> Sequence[Dim]:
        return next(o.dims for o in self.call.spec.outputs if o.name == name)

    def part_of_output(self, name: str, full: np.ndarray) -> np.ndarray:
        """The part of an output."""
        return taken(full, self.dims(name), self.call, self.chosen)

    def spread(self, name: str, some: np.ndarray) -> np.ndarray:
        """The whole of an output, of which this is the part."""
        return taken(some, self.dims(name), self.call, self.stands)

    def full_index(self, name: str, index: tuple[int, ...]) -> tuple[int, ...]:
        """Where an element of the part of an output lies in the whole of it."""
        found, shape = [*index], self.call.outputs[name][0]
        for axis, at in chosen_axes(shape, self.dims(name), self.call, self.chosen):
            found[axis] = int(at[index[axis]])
        return tuple(found)
