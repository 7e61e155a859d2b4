"""Hypothesis strategies derived from a spec: shapes that satisfy its notation, every dtype, option, layout, regime and
legal tile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from portakern.core import registry
from portakern.core.call import dropped_dims, shape_of
from portakern.errors import SpecError
from portakern.spec import ArrayArg, Edge, Spec, Tile
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import Option
from portakern.testing.cases import Case, generators
from portakern.testing.layouts import LAYOUTS
from portakern.testing.regimes import MASK_REGIMES, VALUE_REGIMES

__all__ = ["Limits", "cases", "dtypes_of"]

Shape = tuple[int, ...]

EXTENTS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 127, 128, 129, 130, 200, 257, 300, 513)


@dataclass(frozen=True)
class Limits:
    """What a case may ask for: ``elements`` of the largest array, ``flops`` of the call, ``tile_volume`` the product of
    its tile extents, and which arguments the implementation takes. The defaults suit interpreters."""

    elements: int = 4096
    flops: float = 2e6
    tile_volume: int = 2**18
    dtypes: Sequence[str] = tuple(d for d in DTYPES if d != "float64")
    arguments: frozenset[str] | None = None  # None: all of the spec's
    strided: bool = True

    def takes(self, name: str) -> bool:
        return self.arguments is None or name in self.arguments


@st.composite
def cases(
    draw: st.DrawFn, spec: Spec[Any], limits: Limits, tiles: Mapping[str, Tile], edge: Edge | None = None
) -> Case:
    """A case of ``spec`` within ``limits``; ``tiles`` are the tile names and ranges that a tiling may set; ``edge``:
    the corner to visit."""
    edge = edge or Edge("")
    given = [
        a
        for a in spec.arrays
        if not a.optional
        or a.name in edge.given
        or (limits.takes(a.name) and a.name not in edge.absent and draw(st.booleans()))
    ]
    dims = _shrink_to_fit(spec, given, draw(_dims(spec, edge)), limits, edge)
    plain = [a for a in given if not any(f in spec.drops for d in a.dims for f in d.factors)]
    shapes = {a.name: _stretch(draw, a, dims, edge.stretched.get(a.name, ())) for a in plain}
    layouts = _layouts(draw, spec, given, limits, edge)
    dtype = draw(st.sampled_from(dtypes_of(spec, limits)))
    regime = edge.regime if edge.name else draw(st.sampled_from(VALUE_REGIMES))
    seed = draw(st.integers(0, 2**31 - 1))
    options = _options(draw, spec, shapes, limits, edge) | draw(_wants(spec, given, 5 if edge.name else 2))
    if spec.drops:
        shapes, dims = _along_axes(draw, spec, plain, shapes, dims, options, limits, edge)
        dims = dims | dropped_dims(spec, dims, options)
        shapes |= {a.name: _stretch(draw, a, dims) for a in given if a not in plain}
    narrow = DTYPES[dtype].floating and DTYPES[dtype].bits < 32
    case = Case(
        dtype=dtype,
        shapes={a.name: shapes[a.name] for a in given},
        regime=regime,
        seed=seed,
        options=options,
        layouts={k: v for k, v in layouts.items() if v != "contiguous"},
        tiling=draw(_tiling(spec, tiles, limits, edge)),
        wider=tuple(a.name for a in given if a.or_float32 and narrow and draw(st.booleans())),
        masks={a.name: draw(st.sampled_from(MASK_REGIMES)) for a in given if a.name in spec.masks and not edge.plant},
        edge=edge.name,
    )
    if not _binds(spec, case) or not case.obeys(spec):
        reject()
    return case


def dtypes_of(spec: Spec[Any], limits: Limits) -> list[str]:
    """The dtypes of the op that are drawn."""
    found = [d for d in limits.dtypes if d in spec.dtypes]
    if not found:
        raise SpecError(
            f"check({spec.name!r}): dtypes are {', '.join(limits.dtypes)}; expected some of {', '.join(spec.dtypes)}"
        )
    return sorted(found, key=spec.dtypes.index)


def _layouts(draw: st.DrawFn, spec: Spec[Any], given: Sequence[ArrayArg], limits: Limits, edge: Edge) -> dict[str, str]:
    """How the arrays lie in memory, of those that are not left as they come."""
    forward = registry.forward_of(spec) if spec.is_vjp else None
    made = generators(spec, forward)
    found = {}
    for a in given:
        if limits.strided and draw(st.booleans()):  # repeating index 0 would undo what is planted, or made to fit
            kinds = sorted(k for k in LAYOUTS if not (k == "expanded" and (edge.plant or a.name in made)))
            found[a.name] = draw(st.sampled_from(kinds))
    return found


def _options(
    draw: st.DrawFn, spec: Spec[Any], shapes: Mapping[str, Shape], limits: Limits, edge: Edge
) -> dict[str, Any]:
    """The options that are not at their default: the edge's, and half of the others."""
    found = dict(edge.options)
    for o in spec.options:
        if o.name not in edge.options and limits.takes(o.name) and draw(st.booleans()):
            value = draw(_option_values(o, shapes))
            if value != o.default:
                found[o.name] = value
    return found


def _along_axes(
    draw: st.DrawFn,
    spec: Spec[Any],
    arrays: Sequence[ArrayArg],
    shapes: Mapping[str, Shape],
    dims: dict[str, Any],
    options: Mapping[str, Any],
    limits: Limits,
    edge: Edge,
) -> tuple[dict[str, Shape], dict[str, Any]]:
    """Shapes and dimensions with the extent that the edge asks for along an axis that is dropped; others give way."""
    found, dims = dict(shapes), dict(dims)
    for dim in spec.drops:
        dropped = spec.dropped(dim)
        assert dropped
        whole, option = dropped
        if option.name not in edge.dims:
            continue
        lo, hi = edge.dims[option.name]
        extents = list(dims[whole])
        axis = options.get(option.name, option.default) % len(extents)
        extents[axis] = draw(st.integers(lo, min(hi, lo + 40)))
        while math.prod(map(_at_least_1, extents)) > max(limits.elements, extents[axis]):
            wide = max((i for i in range(len(extents)) if i != axis), key=lambda i: extents[i])
            extents[wide] = (extents[wide] + 1) // 2
        for a in arrays:
            found[a.name] = _with_run(a, found[a.name], whole, dims[whole], extents)
        dims[whole] = tuple(extents)
    return found, dims


def _with_run(a: ArrayArg, shape: Shape, run: str, before: Sequence[int], after: Sequence[int]) -> Shape:
    """An argument's shape when a run of axes takes other extents; an axis that is broadcast stays 1."""
    start = next((i for i, d in enumerate(a.dims) if d.variadic and d.factors == (run,)), None)
    if start is None:
        return shape
    own = len(shape) - (len(a.dims) - 1)  # how many axes the run has in this argument
    kept = zip(shape[start : start + own], before[len(before) - own :], after[len(after) - own :], strict=True)
    new = (got if got != was else now for got, was, now in kept)
    return (*shape[:start], *new, *shape[start + own :])


def _binds(spec: Spec[Any], case: Case) -> bool:
    """Whether the drawn arguments obey the rules across arguments (both of a pair, say)."""
    try:
        case.form(spec)
    except SpecError:
        return False
    return True


@st.composite
def _tiling(draw: st.DrawFn, spec: Spec[Any], tiles: Mapping[str, Tile], limits: Limits, edge: Edge) -> dict[str, int]:
    """The default (an empty tiling), the smallest tiles, or any."""
    kind = "smallest" if edge.smallest_tiles else draw(st.sampled_from(["default", "smallest", "any"]))
    if kind == "default":
        return {}
    if kind == "smallest":
        return {n: t.lo if n in spec.tiling else draw(st.sampled_from(t.values[:4])) for n, t in tiles.items()}
    return _fit_tiles(spec, {n: draw(st.sampled_from(t.values)) for n, t in tiles.items()}, tiles, limits)


def _fit_tiles(spec: Spec[Any], tiling: dict[str, int], tiles: Mapping[str, Tile], limits: Limits) -> dict[str, int]:
    """Halve the widest until the product of the spec's tiles, and of how many times its least value each knob is,
    fits."""
    while math.prod(v if n in spec.tiling else v // tiles[n].lo for n, v in tiling.items()) > limits.tile_volume:
        widest = max((n for n in tiling if tiling[n] > tiles[n].lo), key=lambda n: tiling[n])
        tiling[widest] //= 2
    return tiling


@st.composite
def _dims(draw: st.DrawFn, spec: Spec[Any], edge: Edge) -> dict[str, Any]:
    variadic = {d.factors[0] for a in spec.arrays for d in a.dims if d.variadic}
    dims: dict[str, Any] = {}
    for name in spec.dims:
        lo, hi = edge.dims.get(name, (0, max(EXTENTS)))
        choices = [e for e in EXTENTS if lo <= e <= hi]
        extent = st.integers(max(lo, 1) if hi else 0, min(hi, lo + 40))
        extent = st.one_of(st.sampled_from(choices), extent) if choices else extent
        if name not in edge.dims and name not in spec.positive and not edge.name and not draw(st.integers(0, 24)):
            extent = st.just(0)
        dims[name] = (
            tuple(draw(st.lists(extent, min_size=name in edge.dims, max_size=1 if lo > 64 else 3)))
            if name in variadic
            else draw(extent)
        )
    for a in spec.arrays:  # an op along an axis needs one
        run = a.dims[0].factors[0] if len(a.dims) == 1 and a.dims[0].variadic and not a.optional else None
        if run in dims and not dims[run]:
            dims[run] = (draw(st.sampled_from(EXTENTS)),)
    return dims


def _shrink_to_fit(
    spec: Spec[Any], given: Sequence[ArrayArg], dims: dict[str, Any], limits: Limits, edge: Edge
) -> dict[str, Any]:
    """Halve the largest extent until the arrays and the work fit; one that the edge bounds from below only while
    another cannot give."""

    def too_big() -> bool:
        full = {
            n: tuple(map(_at_least_1, e)) if isinstance(e, tuple) else _at_least_1(e) for n, e in dims.items()
        }  # a 0 may be broadcast away
        extents: list[int] = [math.prod(e) if isinstance(e, tuple) else e for e in full.values()]
        full |= {d: full[dropped[0]] for d in spec.drops if (dropped := spec.dropped(d))}  # an axis more than it has
        shapes = [
            *(a.dims for a in given),
            *(o.dims for o in spec.outputs if o.gradient_of is None or o.gradient_of in {a.name for a in given}),
        ]
        sizes = [math.prod(shape_of(s, full)) for s in shapes]
        return max(sizes) > limits.elements or math.prod(extents) > limits.flops / 4

    while too_big():
        name = max(
            dims,
            key=lambda d: (
                _widest(dims[d]) > 1 and _widest(dims[d]) // 2 >= edge.dims.get(d, (0, 0))[0],
                _widest(dims[d]),
            ),
        )
        extent = dims[name]
        if isinstance(extent, tuple):
            i = extent.index(max(extent))
            dims[name] = (*extent[:i], (extent[i] + 1) // 2, *extent[i + 1 :])
        else:
            dims[name] = (extent + 1) // 2
    return dims


def _at_least_1(extent: int) -> int:
    return max(extent, 1)


def _widest(extent: Any) -> int:
    return max(extent, default=0) if isinstance(extent, tuple) else int(extent)


def _stretch(draw: st.DrawFn, a: ArrayArg, dims: dict[str, Any], ones: Sequence[str] = ()) -> tuple[int, ...]:
    """The shape of an argument; axes that broadcast are 1, or missing at the front, now and then, and those of ``ones``
    always 1."""
    shape: list[int] = []
    for d in a.dims:
        extents = shape_of((d,), dims)
        if d.variadic and d.broadcast:
            extents = extents[draw(st.integers(0, len(extents))) if draw(st.booleans()) else 0 :]
        one = any(f in ones for f in d.factors)
        shape.extend(1 if d.broadcast and e != 0 and (one or draw(st.integers(0, 2)) == 0) else e for e in extents)
    return tuple(shape)


@st.composite
def _wants(draw: st.DrawFn, spec: Spec[Any], given: Sequence[ArrayArg], rarely: int) -> dict[str, tuple[str, ...]]:
    """Now and then some of the gradients only; less often on an edge, which is about one of them."""
    optional = {a.name for a in spec.arrays if a.optional}
    there = {a.name for a in given}
    names = [o.name for o in spec.outputs if o.gradient_of in there or o.gradient_of not in optional]
    if not spec.is_vjp or len(names) < 2 or draw(st.integers(0, rarely)):
        return {}
    return {"wants": tuple(sorted(draw(st.sets(st.sampled_from(names), min_size=1))))}


def _option_values(o: Option, shapes: Mapping[str, tuple[int, ...]]) -> st.SearchStrategy[Any]:
    if o.axis_of:
        ndim = len(shapes[o.axis_of])
        return st.integers(-ndim, ndim - 1)
    return st.sampled_from(o.choices)
