"""Where a call may be cut into parts, and how the results of the parts are put together.

A spec declares along which dimensions results lie side by side (``apart``), are sums over parts (``sums``) or are
merged by their log-sum-exp (``merges``), and along which a part must be told where it begins (``starts``). All else
follows here, for each axis of a call that may be cut:

* an array that has the dimension is cut there, every other is the same for each part;
* an output that has it lies side by side, one that lacks it is a sum, is merged, or is the first part's alone.

Rules of gradients follow from the forward op. Where it is apart, a gradient that lacks the dimension is a sum over the
parts. Where its outputs are sums or are merged, the parts are given the cotangents and results of the whole, and
gradients that lack the dimension are sums too, except those of arrays that count once.

An axis is not cut that an option names, whose extent of 1 is stretched (such an array is the same for each part), or
that offsets number (``sequences+1``). Of a product of dimensions, such as ``kv_heads*group``, the first one is cut, in
equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from portakern.core import registry
from portakern.core.call import Call
from portakern.spec import Dim, Origin, Spec, When
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import Option

__all__ = [
    "JOINED_IN_WORDS",
    "CutAxis",
    "Joined",
    "PartitionRule",
    "aligned",
    "axis_name",
    "described",
    "partition_rules",
]

WIDE = "float32"
"""What parts of sums are stored in, where the result has fewer bits."""


class CutAxis(NamedTuple):
    """An axis of an array that is cut: its number, and how many elements of it one index of the dimension has."""

    axis: int
    inner: int


@dataclass(frozen=True)
class Joined:
    """How an output of all parts is put together.

    Attributes:
      kind: "beside" (side by side along ``at``), "sum", "merge" (weighted by the exponential of the output ``by``),
        "weight" (the logarithm of such weights: their log-sum-exp) or "first" (the first part's alone).
    """

    kind: Literal["beside", "sum", "merge", "weight", "first"]
    at: CutAxis | None = None
    by: str = ""


JOINED_IN_WORDS: Mapping[str, str] = {
    "beside": "side by side",
    "sum": "sum",
    "merge": "weighted mean",
    "weight": "log-sum-exp",
    "first": "of the first part",
}
"""How an output of all parts is put together (:class:`Joined`) -> in words."""


@dataclass(frozen=True)
class PartitionRule:
    """How a call may be cut along one axis of a dimension.

    Attributes:
      dimension; axis: which of a run of axes, counted from its end, or None for a single one; extent: its extent.
      equal: whether all parts must have the same extent, as where a product of dimensions is cut.
      arrays: array that is given -> the axis that is cut, None for one that every part is given as it is.
      once: the arrays that only the first part is given.
      outputs: output that the call wants -> how it is put together.
      options: options of the parts that are others than those of the call; starts: option -> where the call begins
        along its dimension, and whether that is the one that is cut (then a part begins further on).
      refusal: why the call may not be cut here, in words; None where it may.
    """

    dimension: str
    axis: int | None
    extent: int
    equal: bool
    arrays: Mapping[str, CutAxis | None]
    once: tuple[str, ...]
    outputs: Mapping[str, Joined]
    options: Mapping[str, Any] = field(default_factory=dict)
    starts: Mapping[str, tuple[int, bool]] = field(default_factory=dict)
    extent_option: str | None = None
    refusal: str | None = None

    @property
    def name(self) -> str:
        """The axis in words: ``k``, or ``batch[-1]`` for the last axis of a run."""
        return axis_name(self.dimension, self.axis)

    def options_at(self, offset: int, extent: int) -> dict[str, Any]:
        """The options of the part that begins at ``offset`` along the dimension and has this extent there, other than
        those of the call."""
        begin = {name: start + offset * moves for name, (start, moves) in self.starts.items()}
        return {**self.options, **begin, **({self.extent_option: extent} if self.extent_option else {})}


def axis_name(dimension: str, axis: int | None) -> str:
    """A dimension, or an axis of a run of them, in words."""
    return dimension if axis is None else f"{dimension}[{axis}]"


class _Divisible(NamedTuple):
    """A dimension along which an op may be cut: how outputs without it are joined (None: there may be none), the
    arrays that count once, the output that weighs parts, and whether an option says where a part begins."""

    dimension: str
    lacking: Mapping[str, Joined] | None
    once: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    placed: bool = False


def partition_rules(call: Call) -> list[PartitionRule]:
    """A rule for each axis of a call along which the op may be cut, those that its dtypes refuse among them."""
    found = []
    for candidate in _candidates(call.spec, call.options, call.wants, call.present):
        run = call.dims.get(candidate.dimension)
        slots: Sequence[int | None] = range(-len(run), 0) if isinstance(run, tuple) else (None,)
        for slot in slots:
            with suppress(_OtherExtent):
                rule = _rule(call, candidate, slot)
                if rule is not None:
                    found.append(rule)
    return found


def _candidates(
    spec: Spec[Any], options: Mapping[str, Any], wants: Sequence[str], given: Collection[str]
) -> Iterator[_Divisible]:
    """The dimensions along which an op may be cut under these options, in calls that have these arrays."""
    forward = registry.forward_of(spec) if spec.is_vjp else spec
    if forward is None:
        return
    known = {o.name: options.get(o.name, o.default) for o in forward.options}
    placed_in = partial(_is_placed, spec, options=known, given=given)
    wanted = [o.name for o in forward.outputs] if spec.is_vjp else wants
    apart = forward.apart(known, wanted) if callable(forward.apart) else forward.apart
    begun = [d for d in forward.starts if d not in forward.sums and d not in forward.merges]
    gradients = {o.name: Joined("sum") for o in spec.outputs} if spec.is_vjp else None
    for dim in dict.fromkeys((*apart, *begun)):
        placed = placed_in(forward.starts.get(dim))
        if _numbered(spec, dim) or placed is None:
            continue
        if dim in apart or placed:
            yield _Divisible(dim, gradients, placed=placed)
    for dim in (*forward.sums, *forward.merges):
        combined = [s for s in forward.sums.get(dim, ()) if _holds(s.when, known)]
        merged = [m for m in forward.merges.get(dim, ()) if _holds(m.when, known)]
        placed = placed_in(forward.starts.get(dim))
        if not (combined or merged) or _numbered(spec, dim) or placed is None:
            continue
        once = tuple(dict.fromkeys([n for s in combined for n in s.once] + [n for m in merged for n in m.once]))
        if spec.is_vjp:
            alone = {o.name: Joined("first") for o in spec.outputs if o.gradient_of in once}
            yield _Divisible(dim, {**(gradients or {}), **alone}, once, placed=placed)
        else:
            weights = tuple(dict.fromkeys(m.by for m in merged))
            lacking = {s.output: Joined("sum") for s in combined}
            lacking |= {m.output: Joined("merge", by=m.by) for m in merged} | {n: Joined("weight") for n in weights}
            yield _Divisible(dim, lacking, once, weights, placed)


def _holds(when: When | None, options: Mapping[str, Any]) -> bool:
    return when is None or when.holds(options)


def _is_placed(
    spec: Spec[Any], start: Origin | None, *, options: Mapping[str, Any], given: Collection[str]
) -> bool | None:
    """Whether an option says where a part along a dimension begins; None where one must, and there is none."""
    if start is None or not start.matters(options, given):
        return False
    return True if start.option in {o.name for o in spec.options} else None


def _numbered(spec: Spec[Any], dim: str) -> bool:
    """Whether some axis has a dimension in another way than alone or as the first of a product: it is not cut."""
    axes = [d for dims in (*(a.dims for a in spec.arrays), *(o.dims for o in spec.outputs)) for d in dims]
    return any(dim in d.factors and (d.plus or d.factors[0] != dim) for d in axes)


def _rule(call: Call, candidate: _Divisible, slot: int | None) -> PartitionRule | None:
    """The rule of a candidate along one axis; None where that is not cut."""
    spec, dim = call.spec, candidate.dimension
    if dim not in call.dims or (slot is not None and _along(call, dim, slot)):
        return None
    extent = call.dims[dim] if slot is None else call.dims[dim][slot]
    given = {a.name: a for a in spec.arrays if call.arrays[a.name] is not None}
    arrays = {n: _axis(call, a.dims, tuple(call.arrays[n].shape), dim, slot) for n, a in given.items()}
    if all(at is None for at in arrays.values()) or any(not given[n].optional for n in candidate.once if n in given):
        return None
    outputs: dict[str, Joined] = {}
    for o in spec.outputs:
        if o.name not in call.wants:
            continue
        like = o.gradient_of or o.alias_of
        at = arrays[like] if like in arrays else _axis(call, o.dims, call.outputs[o.name][0], dim, slot)
        if at is None and (candidate.lacking is None or o.name not in candidate.lacking):
            return None
        outputs[o.name] = Joined("beside", at) if at is not None else (candidate.lacking or {})[o.name]
    options, refusal = _parts_options(call, outputs)
    requested: dict[str, Any] = {o.wanted_by: True for o in spec.outputs if o.name in candidate.weights and o.wanted_by}
    if candidate.placed:
        requested |= _totals(call, dim)
    return PartitionRule(
        dim,
        slot,
        extent,
        any(len(d.factors) > 1 for a in given.values() for d in a.dims if dim in d.factors),
        arrays,
        tuple(n for n in candidate.once if n in given),
        outputs,
        options | requested,
        _starts(call, dim) if candidate.placed else {},
        next((o.name for o in spec.extents if o.name == dim), None),
        refusal,
    )


def _parts_options(call: Call, outputs: Mapping[str, Joined]) -> tuple[dict[str, Any], str | None]:
    """(the options under which parts of sums are stored in float32, why they cannot be)."""
    options: dict[str, Any] = {}
    for o in call.spec.outputs:
        if o.name in outputs and outputs[o.name].kind == "sum":
            dtype = DTYPES[call.outputs[o.name][1]]
            if not dtype.floating or dtype.bits >= DTYPES[WIDE].bits:
                continue
            if o.dtype_option is None:
                return {}, (
                    f"{o.name} is a sum of parts, each of which would be rounded to {dtype.name} before they are "
                    f"added, and {call.spec.name} has no option to store them in {WIDE}; give it {WIDE} arrays, or "
                    "gather what is cut"
                )
            options[o.dtype_option] = WIDE
    return options, None


def _starts(call: Call, dim: str) -> dict[str, tuple[int, bool]]:
    """Every option that is a start, of the whole call: what one is by default may hang on the extent that is cut."""
    forward = registry.forward_of(call.spec) if call.spec.is_vjp else call.spec
    own = {o.name for o in call.spec.options}
    found = {}
    for name, start in (forward.starts if forward else {}).items():
        if start.option in own and start.option is not None:
            value = call.options[start.option]
            found[start.option] = (start.default(call.dims) if value is None else value, name == dim)
    return found


def _totals(call: Call, dim: str) -> dict[str, int]:
    """The option that says how long the whole is along a dimension that is cut."""
    forward = registry.forward_of(call.spec) if call.spec.is_vjp else call.spec
    total = forward.starts[dim].total if forward and dim in forward.starts else None
    if total is None or total not in call.options:
        return {}
    begin = sum(start for start, moves in _starts(call, dim).values() if moves)
    given = call.options[total]
    return {total: begin + call.dims[dim] if given is None else given}


def _along(call: Call, dim: str, slot: int) -> bool:
    """Whether an option names this axis of a run, counted from its end."""
    named = [o for o in call.spec.options if o.axis_of and call.spec.argument(o.axis_of).dims[0].factors == (dim,)]
    rank = len(call.dims[dim])
    return any(call.options[o.name] % rank == rank + slot for o in named)


def _axis(call: Call, dims: Sequence[Dim], shape: tuple[int, ...], dim: str, slot: int | None) -> CutAxis | None:
    """The axis of an array or output of this shape that carries a dimension, or one axis of a run; None where it has
    none, or is stretched along it."""
    axis = len(shape)
    for d in reversed(dims):
        name = d.factors[0]
        for back in range(1, (len(call.dims[name]) if d.variadic else 1) + 1):
            axis -= 1
            if axis < 0:
                return None  # a leading axis that was broadcast
            own = _slot(call, name, -back) if d.variadic else None
            if (name, own) == (dim, slot) or (d.variadic and own == (dim, slot)):
                inner = math.prod(call.dims[f] for f in d.factors[1:])
                full = (call.dims[dim] if slot is None else call.dims[dim][slot]) * inner
                if shape[axis] not in (1, full):
                    raise _OtherExtent
                return CutAxis(axis, inner) if shape[axis] == full and not (d.broadcast and full == 1) else None
    return None


class _OtherExtent(Exception):
    """An axis that carries a dimension has fewer or more elements, as where there is one for each block of it."""


def _slot(call: Call, name: str, back: int) -> tuple[str, int]:
    """The run and the axis of it, counted from the end, that an axis of a run is: of a run that lacks an axis, those of
    the run that has it."""
    dropped = call.spec.dropped(name)
    if dropped is None:
        return name, back
    whole, option = dropped
    gone = call.options[option.name] % len(call.dims[whole]) - len(call.dims[whole])
    return whole, back if back > gone else back - 1


def aligned(call: Call, name: str, other: str, array: Any) -> Any:
    """An output with its axes where another output has the same dimensions, and extents of 1 where it lacks them."""
    dims = {o.name: [(d.name, i) for d in o.dims for i in range(_rank(call, d))] for o in call.spec.outputs}
    own, wanted = dims[name], dims[other]
    order = [own.index(axis) for axis in wanted if axis in own]
    shape = iter(array.transpose(order).shape)
    return array.transpose(order).reshape([next(shape) if axis in own else 1 for axis in wanted])


def _rank(call: Call, d: Dim) -> int:
    return len(call.dims[d.factors[0]]) if d.variadic else 1


# ------------------------------------------------------------------------------------------------------------- in words
def described(spec: Spec[Any]) -> list[dict[str, str]]:
    """The rules of an op in words, for all calls: each dimension with the arrays that are cut, how each output is put
    together, and the options under which it is not cut."""
    plain = {o.name: o.default for o in spec.options}
    wants = tuple(o.name for o in spec.outputs if not o.saved)

    def under(**changed: Any) -> dict[str, _Divisible]:
        return {c.dimension: c for c in _candidates(spec, {**plain, **changed}, wants, ())}

    usual = under()
    others = {(o, v): under(**{o.name: v}) for o in spec.options for v in o.choices if v != o.default}
    rows = []
    for dim in dict.fromkeys(d for found in (usual, *others.values()) for d in found):
        candidate = next(found[dim] for found in (usual, *others.values()) if dim in found)
        rows.append(
            {
                "dimension": dim,
                "cut": ", ".join(a.name for a in spec.arrays if _has(spec, a.dims, dim)),
                "outputs": "; ".join(_joins(spec, candidate, dim)),
                "options": _under(dim in usual, {key: dim in found for key, found in others.items()}),
                "notes": "; ".join(_notes(spec, candidate, dim)),
            }
        )
    return rows


def _has(spec: Spec[Any], dims: Sequence[Dim], dim: str) -> bool:
    runs = [(spec.dropped(d.factors[0]) or (d.factors[0],))[0] for d in dims]
    return dim in runs


def _joins(spec: Spec[Any], candidate: _Divisible, dim: str) -> Iterator[str]:
    """Each output with how it is put together."""
    kinds: dict[str, list[str]] = {}
    for o in spec.shown:
        joined = None if _has(spec, o.dims, dim) else (candidate.lacking or {}).get(o.name)
        kind = "beside" if joined is None else joined.kind
        words = JOINED_IN_WORDS[kind] if joined is None or not joined.by else f"mean weighted by exp({joined.by})"
        kinds.setdefault(words, []).append(o.name)
    yield from (f"{', '.join(names)}: {words}" for words, names in kinds.items())


def _under(usual: bool, others: Mapping[tuple[Option, Any], bool]) -> str:
    """The options under which a dimension is, or is not, cut; ``usual``: whether it is with all at their defaults."""
    apart = {key for key, there in others.items() if there != usual}
    names: dict[str, None] = {}
    for option, value in others:
        if (option, value) in apart:
            every = all((o, v) in apart for o, v in others if o is option)
            words = f"{option.name}={value!r}"
            if every and option.kind in ("int", "float", "tuple"):
                words = option.name
            elif every and sum(o is option for o, _ in others) > 1:
                words = f"{option.name} other than {option.default!r}"
            names[words] = None
    return f"{'not' if usual else 'only'} with {' or '.join(names)}" if names else ""


def _notes(spec: Spec[Any], candidate: _Divisible, dim: str) -> Iterator[str]:
    axes = [d for a in spec.arrays for d in a.dims if d.factors[0] == dim]
    if any(len(d.factors) > 1 for d in axes):
        yield "equal parts"
    if any(d.variadic for d in axes):
        named = [o.name for o in spec.options if o.axis_of and spec.argument(o.axis_of).dims[0].factors == (dim,)]
        yield "any axis" + (f" but {named[0]}" if named else "")
    stretched = [a.name for a in spec.arrays if any(d.broadcast and d.factors[0] == dim for d in a.dims)]
    if stretched:
        own = [f"d_{n}" for n in stretched if f"d_{n}" in {o.name for o in spec.outputs}]
        yield f"{', '.join(stretched)} not cut where stretched" + (f", and {', '.join(own)} a sum" if own else "")
    once = [a.name for a in spec.arrays if a.name in candidate.once]
    if once:
        yield f"{', '.join(once)} given to the first part alone"
    lacking = [o for o in spec.shown if not _has(spec, o.dims, dim) and o.name in (candidate.lacking or {})]
    sums = [o for o in lacking if (candidate.lacking or {})[o.name].kind == "sum"]
    options = dict.fromkeys(o.dtype_option for o in sums if o.dtype is None)  # others have no 16 bits
    if options:
        yield "; ".join(
            f"parts of 16-bit results are asked in {WIDE} ({option})" if option else "not where the sum has 16 bits"
            for option in options
        )
    forward = registry.forward_of(spec) if spec.is_vjp else spec
    start = forward.starts.get(dim) if forward else None
    if start is not None and start.option in {o.name for o in spec.options}:
        where = [start.when.words, *start.beside] if start.when else []
        yield f"{start.option} says where a part begins" + (f", {' or '.join(where)}" if where else "")
