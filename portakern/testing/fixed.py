"""Checks of calls with given shapes, for kernels that were written for these shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from portakern.core.call import shape_of
from portakern.errors import SpecError
from portakern.spec import Edge, Spec
from portakern.spec.options import shown
from portakern.testing.cases import Case
from portakern.testing.sampled import along, apart, chosen_axes, extents_of

__all__ = ["CasePreset", "checked_shapes", "cut_to", "fits", "given_optional", "turns_of", "with_shape"]

Shapes = Mapping[str, tuple[int, ...]]

ROWS = 1 << 22
"""Elements that the oracle and the bound of a row of layernorm take 0.1 s for."""

FOLLOWS = ("", "changed", "", "often", "", "", "changed")
"""What follows the calls of one case after the other; seven of them, so that they meet every regime."""


TELLING = (
    "normal", "wide", "very_negative", "special", "large_mean", "near_overflow", "integers", "spikes", "constant",
    "subnormal",
)  # fmt: skip
"""Every regime of values, those first in which most mistakes show: the time may be up before the last."""


class CasePreset(NamedTuple):
    """The part of a case that is not drawn: its dtype, and the following.

    * ``shapes``: the shapes, if shapes are given; ``regime``: the regime of values, "" for any; ``followup``: what
      follows the call, None for any.
    * ``times``: for an edge with the smallest tiles, how many times these; 0 for any.
    * ``across``: for an edge that gives the extent of an option's axis, whether this is another axis than the last;
      False for any.
    * ``kind``, ``nth``: for a case without an edge, the kind of its extents (one of KINDS, "" for any), and how many
      cases of this kind came before; None for any number.
    """

    dtype: str
    shapes: Shapes | None = None
    regime: str = ""
    followup: str | None = None
    times: int = 0
    across: bool = False
    kind: str = ""
    nth: int | None = None


def checked_shapes(
    spec: Spec[Any], shapes: Sequence[Mapping[str, Sequence[int]]], options: Mapping[str, Any]
) -> tuple[Shapes, ...]:
    """Shapes as cases hold them.

    Raises:
      SpecError: an unknown array, a required one that is missing, no extents, or shapes that are no call of the op.
    """
    prefix = f"check({spec.name!r}): shapes"
    if isinstance(shapes, Mapping) or not isinstance(shapes, Sequence) or not shapes:
        raise SpecError(f"{prefix} are {shown(shapes)}; expected a list of them, [{{{_example(spec)}}}]")
    found = []
    for given in shapes:
        if not isinstance(given, Mapping):
            raise SpecError(f"{prefix} hold {shown(given)}; expected array -> shape, {{{_example(spec)}}}")
        for name, shape in given.items():
            if name not in {a.name for a in spec.arrays}:
                names = ", ".join(a.name for a in spec.arrays)
                raise SpecError(f"{prefix} name {name!r}; {spec.name} has {names}")
            if not isinstance(shape, Sequence) or not all(type(n) is int and n >= 0 for n in shape):
                raise SpecError(f"{prefix} give {name} {shown(shape)}; expected extents, (64, 1000)")
        for a in spec.arrays:
            if not a.optional and a.name not in given:
                raise SpecError(f"{prefix} lack {a.name}, which every call has; expected {{{_example(spec)}}}")
        one = {a.name: tuple(given[a.name]) for a in spec.arrays if a.name in given}
        _case(spec, one, options).bound_alone(spec)  # says what is wrong with the call itself, in the op's words
        found.append(one)
    return tuple(found)


def _example(spec: Spec[Any]) -> str:
    return ", ".join(f'"{a.name}": (...)' for a in spec.arrays if not a.optional)


def _case(spec: Spec[Any], shapes: Shapes, options: Mapping[str, Any]) -> Case:
    return Case(spec.dtypes[0], shapes, options=dict(options))


def with_shape(shapes: Shapes) -> str:
    """Shapes in words."""
    return ", ".join(f"{n} {list(s)}" for n, s in shapes.items())


def turns_of(
    count: int, dtypes: Sequence[str], shapes: Sequence[Shapes], edge: Edge | None, first: int
) -> Iterator[CasePreset]:
    """The turns of so many cases: every regime before one comes again, then in another dtype or on other shapes."""
    for i in range(first, first + count):
        regime = "" if edge else TELLING[i % len(TELLING)]
        among = i if edge else i + i // len(TELLING)
        at = among % (len(dtypes) * len(shapes))
        yield CasePreset(dtypes[at % len(dtypes)], shapes[at // len(dtypes)], regime, FOLLOWS[i % len(FOLLOWS)])


def fits(edge: Edge, spec: Spec[Any], shapes: Shapes, options: Mapping[str, Any]) -> bool:
    """Whether a call of these shapes can be on an edge: it has the arrays, no extent is below the edge's, and where the
    edge is about one extent it has that. An edge that says no more than which extents there are is every call's."""
    wanted = {name for name, _ in edge.options.items()} | {*edge.given, *edge.aliased} | {*edge.stretched}
    missing = {a.name for a in spec.arrays} & wanted - {*shapes}
    if missing or {*edge.absent} & {*shapes} or edge.stretched or not (edge.plant or edge.aliased):
        return False
    if len({shapes[n] for n in edge.aliased}) > 1:
        return False
    fixed = {**options, **edge.options}
    axes = {o.name: shapes[o.axis_of][fixed.get(o.name, o.default)] for o in spec.options if o.axis_of}
    dims = {**axes, **_case(spec, shapes, fixed).bound_alone(spec).dims}
    for name, (lo, hi) in edge.dims.items():
        found = dims.get(name)
        if found is None:
            continue
        extents = found if isinstance(found, tuple) else (found,)
        if lo == hi and any(n != lo for n in extents):
            return False
        if max(extents, default=0) < lo or (isinstance(found, tuple) and not found):
            return False
    return True


def given_optional(
    spec: Spec[Any], shapes: Mapping[str, Sequence[int]], names: Sequence[str], options: Mapping[str, Any]
) -> dict[str, Sequence[int]]:
    """The shapes with those of optional arrays, where they follow from the others."""
    dims = _case(spec, {n: tuple(s) for n, s in shapes.items()}, options).bound_alone(spec).dims
    return {**shapes, **{n: shape_of(spec.argument(n).dims, dims) for n in names if n not in shapes}}


def cut_to(
    spec: Spec[Any], shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any], elements: int, flops: float
) -> Shapes:
    """The shapes, with extents halved along dimensions whose indices do not see each other until the largest array has
    so many elements, the call so many floating-point operations, and two indices along each so few elements (ROWS) that
    the oracle has them in a moment."""
    whole = {n: tuple(s) for n, s in shapes.items()}
    call = _case(spec, whole, options).bound_alone(spec)
    kept: dict[str, list[int]] = {
        n: [*extents_of(call, n)] for n in apart(spec, call.options, call.wants, call.present)
    }
    axes = [(n, i) for n in kept for i in range(len(kept[n])) if not along(call, n, i)]

    def now() -> Shapes:
        chosen = {n: [np.arange(e) for e in extents] for n, extents in kept.items()}
        found = {n: list(s) for n, s in whole.items()}
        for a in spec.arrays:
            for axis, index in chosen_axes(whole[a.name], a.dims, call, chosen) if a.name in whole else ():
                found[a.name][axis] = len(index)
        return {n: tuple(s) for n, s in found.items()}

    found: Shapes = whole
    while axes:
        call_now = _case(spec, found, options).bound_alone(spec)
        largest = max(math.prod(s) for s in (*found.values(), *(s for s, _ in call_now.outputs.values())))
        name, i = max(axes, key=lambda at: kept[at[0]][at[1]])
        rows = largest * math.prod(min(kept[n][axis], 2) / kept[n][axis] for n, axis in axes)
        if (largest <= elements and rows <= ROWS and call_now.flops <= flops) or kept[name][i] == 1:
            break
        kept[name][i] = -(-kept[name][i] // 2)
        found = now()
    return found
