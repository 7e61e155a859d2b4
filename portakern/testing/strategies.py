"""Draw cases from a spec: shapes that satisfy its notation, and every dtype, option, layout, regime and legal tile."""

from __future__ import annotations

import difflib
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from portakern.core import registry
from portakern.core.backend import ANY, Drawn
from portakern.core.call import dropped_dims, shape_of
from portakern.errors import SpecError
from portakern.spec import ArrayArg, Edge, Spec, Tile
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import HUGE, TINY, Option, Range
from portakern.testing.cases import Case, fixed_values
from portakern.testing.fixed import CasePreset
from portakern.testing.layouts import REPEATS
from portakern.testing.regimes import MASK_REGIMES, VALUE_REGIMES
from portakern.testing.sizes import Limits, at_least_1, drawn_dims, filling_dims, one_form, shrink_to_fit, within_range
from portakern.testing.source import Rejected, Source

__all__ = ["Limits", "case_of", "drawn", "dtype_cycle", "dtypes_of"]

Shape = tuple[int, ...]


ATTEMPTS = 300
"""How often a case is drawn that obeys the op's rules, before there is none."""


def drawn(
    seed: int,
    spec: Spec[Any],
    limits: Limits,
    tiles: Mapping[str, Tile],
    edge: Edge | None = None,
    preset: CasePreset | None = None,
    fills: bool = False,
) -> tuple[Case, Source]:
    """A case of :func:`case_of`, the same wherever ``seed`` is, and the choices that made it.

    Raises:
      Rejected: no case that was drawn obeys the op's rules.
    """
    for attempt in range(ATTEMPTS):
        source = Source(seed * ATTEMPTS + attempt)
        try:
            return case_of(source, spec, limits, tiles, edge, preset, fills), source
        except Rejected:
            continue
    raise Rejected


def case_of(
    source: Source,
    spec: Spec[Any],
    limits: Limits,
    tiles: Mapping[str, Tile],
    edge: Edge | None = None,
    preset: CasePreset | None = None,
    fills: bool = False,
) -> Case:
    """A case of ``spec`` within ``limits``; ``tiles`` are the tile names and ranges that a tiling may set; ``edge``:
    the corner to visit; ``preset`` gives the dtype, and what else is not drawn; None: all is. What is drawn of the rest
    does not depend on it. ``fills``: the arrays fill a chip.

    Raises:
      Rejected: what was drawn is no case.
    """
    edge, preset = edge or Edge(""), preset or CasePreset("")
    given, plain, shapes, dims, kept = _shaped(source, spec, limits, edge, preset, fills)
    layouts = _layouts(source, spec, given, limits, edge)
    dtype = preset.dtype or source.pick(dtypes_of(spec, limits))
    regime = edge.regime if edge.name else preset.regime or source.pick(VALUE_REGIMES)
    options = _options(source, spec, shapes, limits, edge) | _wants(source, spec, limits, given, 6 if edge.name else 3)
    options |= spec.extent_options(dims)
    if preset.across:
        shapes, dims, options = _across(spec, plain, shapes, dims, options, limits, edge)
    if preset.shapes is None:
        shapes, dims = _along_axes(source, spec, plain, shapes, dims, options, limits, edge)
    if spec.drops and preset.shapes is None:
        dims = dims | dropped_dims(spec, dims, options)
        shapes |= {a.name: _stretch(source, a, dims) for a in given if a not in plain}
    given = [a for a in given if spec.reads_under(a.name, options, True)]
    narrow = DTYPES[dtype].floating and DTYPES[dtype].bits < 32
    case = Case(
        dtype=dtype,
        shapes={a.name: shapes[a.name] for a in given},
        regime=regime,
        seed=source.seed_of_values,
        options=options,
        layouts={a.name: layouts[a.name] for a in given if layouts.get(a.name, "contiguous") != "contiguous"},
        tiling={}
        if kept
        else _tiling(source, spec, tiles, limits, edge, preset.times),  # the least tiles of long extents are many
        wider=tuple(
            a.name for a in given if "float32" in a.or_dtypes and source.yes() and _may_widen(a, narrow, limits, edge)
        ),
        masks={a.name: source.pick(MASK_REGIMES) for a in given if a.name in spec.masks and not edge.plant},
        edge=edge.name,
        dtypes={a.name: dtype for a in given if limits.one_dtype and not a.follows and dtype in a.dtypes}
        | _narrower(source, given, dtype, limits, edge),
        aliased=edge.aliased,
        followup="" if edge.aliased else source.pick(FOLLOWUPS) if preset.followup is None else preset.followup,
    )
    if not _binds(spec, case) or not case.obeys(spec):
        raise Rejected
    return case


def _shaped(
    source: Source, spec: Spec[Any], limits: Limits, edge: Edge, preset: CasePreset, fills: bool
) -> tuple[list[ArrayArg], list[ArrayArg], dict[str, Shape], dict[str, Any], Sequence[str]]:
    """(the arrays that are given, those of them without a dropped axis, their shapes, the dimensions, those that keep
    their extents)."""
    if preset.shapes is not None:
        given = [a for a in spec.arrays if a.name in preset.shapes]
        return given, given, dict(preset.shapes), {}, spec.dims
    drawn = _drawn(limits, edge)
    given = [
        a
        for a in spec.arrays
        if not a.optional
        or a.name in edge.given
        or a.name in limits.always
        or a.name in spec.reads  # until the options say whether it is
        or (limits.takes(a.name) and a.name not in (*edge.absent, *drawn.absent) and source.yes())
    ]
    kept: Sequence[str] = spec.dims
    flops = functools.partial(_flops, spec, given, limits, edge) if spec.budget == "flops" else None
    if fills:
        dims = filling_dims(source, spec, given, limits, flops)
    else:
        wide, kept = drawn_dims(source, spec, edge, limits, preset.kind, preset.nth)
        dims = shrink_to_fit(spec, given, wide, limits, edge, kept, flops)
    dims = {n: e if isinstance(e, tuple) else drawn.extent(n, e) for n, e in dims.items()}
    dims |= {o.name: _extent_of(o, dims[o.name], limits, edge) for o in spec.extents}
    if edge.aliased:
        dims = one_form(spec, edge.aliased, dims) or dims
    for rule in spec.require:
        dims = {**dims, **rule.mends(dims)} if rule.mends else dims
    plain = [a for a in given if not any(f in spec.drops for d in a.dims for f in d.factors)]
    shapes = {a.name: _stretch(source, a, dims, edge.stretched.get(a.name, ()), edge.aliased) for a in plain}
    if len({shapes[name] for name in edge.aliased if name in shapes}) > 1:
        raise Rejected  # a rule mended the extents of one of them alone
    return given, plain, shapes, dims, kept


def _flops(spec: Spec[Any], given: Sequence[ArrayArg], limits: Limits, edge: Edge, dims: Mapping[str, Any]) -> float:
    """The operations of a call with these extents, with integers as they are drawn for it, and the options that are
    fixed; of one that the op refuses, the product of all extents."""
    extents = {**dims, **dropped_dims(spec, dims, {})}
    shapes = {a.name: shape_of(a.dims, extents) for a in given}
    options = {n: v for n, v in {**limits.options, **edge.options}.items() if n in {o.name for o in spec.options}}
    case = Case(spec.dtypes[0], shapes, options={**options, **spec.extent_options(dims)})
    try:
        return spec.flops(case.with_integers(spec))
    except SpecError:
        return float(math.prod(math.prod(e) if isinstance(e, tuple) else e for e in dims.values()))


def _extent_of(option: Option, drawn: int, limits: Limits, edge: Edge) -> int:
    """The extent that an option has: the fixed one, or what was drawn, within the option's range."""
    fixed = {**edge.options, **limits.options}
    if option.name in fixed or not limits.takes(option.name):
        return int(fixed.get(option.name, option.default))
    return within_range(option, drawn)


def _drawn(limits: Limits, edge: Edge) -> Drawn:
    """What is drawn of a variant that takes few calls: on an edge whatever is there."""
    return ANY if edge.name else limits.drawn


FOLLOWUPS = ("",) * 9 + ("changed",) * 4 + ("often",)
"""What follows a call that was made twice: often nothing, for each call takes its time."""

ALIASES = {"half": "float16", "fp": "float", "bf": "bfloat", "f": "float", "i": "int", "u": "uint", "single": "float32",
           "double": "float64"}  # fmt: skip
"""Other names of dtypes, or what they begin with."""


def dtypes_of(spec: Spec[Any], limits: Limits) -> list[str]:
    """The dtypes of the op that are drawn.

    Raises:
      SpecError: a name that is none of a dtype, or none that the op has.
    """
    if not limits.dtypes:
        return [*spec.dtypes]
    for name in limits.dtypes:
        if name not in DTYPES:
            meant = _meant(name)
            raise SpecError(
                f"check({spec.name!r}): dtype {name!r} is unknown; "
                + (f"did you mean {meant!r}? " if meant else "")
                + f"{spec.name} has {', '.join(spec.dtypes)}"
            )
    found = [d for d in limits.dtypes if d in spec.dtypes]
    if not found:
        raise SpecError(
            f"check({spec.name!r}): dtypes are {', '.join(limits.dtypes)}; expected some of {', '.join(spec.dtypes)}"
        )
    return sorted(found, key=spec.dtypes.index)


def _meant(name: str) -> str | None:
    """The dtype that somebody may mean by another name."""
    text = str(name).removeprefix("torch.").removeprefix("np.").lower()
    letters = text.rstrip("0123456789_")
    whole = ALIASES.get(text) or ALIASES.get(letters, letters) + text[len(letters) :]
    return whole if whole in DTYPES else next(iter(difflib.get_close_matches(text, DTYPES, 1)), None)


def dtype_cycle(dtypes: Sequence[str], count: int, first: int = 0) -> list[str]:
    """The dtypes of so many cases, one after the other: every second case has the first of them, where rounding hides
    least, and the others share the rest; ``first`` says where in that round they begin."""
    lead, *others = dtypes
    wide = [d for d in others if DTYPES[d].bits > 32]  # what few people run has a smaller share
    others = [d for d in others if d not in wide] * (2 if wide else 1) + wide
    round_ = [d for other in others for d in (lead, other)] or [lead]
    return [round_[(first + i) % len(round_)] for i in range(count)]


def _may_widen(a: ArrayArg, narrow: bool, limits: Limits, edge: Edge) -> bool:
    return narrow and not limits.one_dtype and a.name not in (*edge.aliased, *_drawn(limits, edge).narrow)


def _narrower(source: Source, given: Sequence[ArrayArg], dtype: str, limits: Limits, edge: Edge) -> dict[str, str]:
    """The arrays that have a dtype narrower than the op's in this case."""
    found = {}
    for a in given:
        others = [d for d in a.or_dtypes if DTYPES[d].bits < DTYPES[dtype].bits]
        if others and not limits.one_dtype and a.name not in edge.aliased and source.yes():
            found[a.name] = source.pick(others)
    return found


def _layouts(source: Source, spec: Spec[Any], given: Sequence[ArrayArg], limits: Limits, edge: Edge) -> dict[str, str]:
    """How the arrays lie in memory, of those that are not left as they come."""
    forward = registry.forward_of(spec) if spec.is_vjp else None
    made = {*fixed_values(spec, forward), *(o.name for o in (forward.outputs if forward else ()))}
    cotangents = {f"d_{o.name}" for o in (forward.outputs if forward else ())}
    found = {}
    for a in given:
        if {*limits.layouts} != {"contiguous"} and source.yes():
            # repeating index 0 would undo what is planted, or made to fit
            kinds = sorted(k for k in limits.layouts if not (k in REPEATS and (edge.plant or a.name in made)))
            if "uniform" in kinds and len(kinds) > 1 and not source.yes(2 if a.name in cotangents else 12):
                kinds.remove("uniform")
            elif "uniform" in kinds:
                kinds = ["uniform"]
            found[a.name] = source.pick(kinds)
    if edge.aliased:
        found |= dict.fromkeys(edge.aliased, found.get(edge.aliased[0], "contiguous"))
    return found


def _options(
    source: Source, spec: Spec[Any], shapes: Mapping[str, Shape], limits: Limits, edge: Edge
) -> dict[str, Any]:
    """The options that are not at their default: the edge's, and half of the others."""
    fixed, absent = {**edge.options, **limits.options}, _drawn(limits, edge).absent
    found = {o.name: fixed[o.name] for o in spec.options if o.name in fixed and fixed[o.name] != o.default}
    for o in spec.options:
        if o.name not in fixed and not o.extent and limits.takes(o.name) and o.name not in absent and source.yes():
            value = _option_value(source, o, shapes, 10 if edge.name else 6)
            if value != o.default:
                found[o.name] = value
    return found


BESIDE = 5
"""Rows beside each other, where there was one."""


def _edge_axes(spec: Spec[Any], edge: Edge) -> list[Option]:
    """The options that name an axis to whose extent the edge gives bounds."""
    return [o for o in spec.options if o.axis_of and o.name in edge.dims]


def _run_of(spec: Spec[Any], option: Option) -> str:
    """The run of axes of which an option names one."""
    return spec.argument(str(option.axis_of)).dims[0].factors[0]


def _across(
    spec: Spec[Any],
    arrays: Sequence[ArrayArg],
    shapes: Mapping[str, Shape],
    dims: dict[str, Any],
    options: dict[str, Any],
    limits: Limits,
    edge: Edge,
) -> tuple[dict[str, Shape], dict[str, Any], dict[str, Any]]:
    """Shapes, dimensions and options where the axis of which the edge gives the extent is not the last: the first in
    its place, beside one more where there is no other. What was drawn stays, and is drawn whosever turn it is."""
    found, dims, options = dict(shapes), dict(dims), dict(options)
    for option in _edge_axes(spec, edge):
        whole, fixed = _run_of(spec, option), {**edge.options, **limits.options}
        rank = len(dims[whole])
        if (
            option.name in fixed
            or not limits.takes(option.name)
            or options.get(option.name, option.default) % rank < rank - 1
        ):
            continue
        if rank == 1:
            for a in arrays:
                found[a.name] = _with_another(a, found[a.name], whole)
            dims[whole] = (*dims[whole], BESIDE)
        options[option.name] = 0
    return found, dims, options


def _with_another(a: ArrayArg, shape: Shape, run: str) -> Shape:
    """An argument's shape with an axis more at the end of a run."""
    behind = next((len(a.dims) - 1 - i for i, d in enumerate(a.dims) if d.variadic and d.factors == (run,)), None)
    end = len(shape) - (behind or 0)
    return shape if behind is None else (*shape[:end], BESIDE, *shape[end:])


def _along_axes(
    source: Source,
    spec: Spec[Any],
    arrays: Sequence[ArrayArg],
    shapes: Mapping[str, Shape],
    dims: dict[str, Any],
    options: Mapping[str, Any],
    limits: Limits,
    edge: Edge,
) -> tuple[dict[str, Shape], dict[str, Any]]:
    """Shapes and dimensions with the extent that the edge asks for along the axis of an option; others give way."""
    found, dims = dict(shapes), dict(dims)
    for option in _edge_axes(spec, edge):
        whole = _run_of(spec, option)
        lo, hi = edge.dims[option.name]
        extents = list(dims[whole])
        axis = options.get(option.name, option.default) % len(extents)
        extents[axis] = source.integer(lo, min(hi, lo + 40))
        while math.prod(map(at_least_1, extents)) > max(limits.elements, extents[axis]):
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
        case.bound_alone(spec)
    except SpecError:
        return False
    return True


def _tiling(
    source: Source, spec: Spec[Any], tiles: Mapping[str, Tile], limits: Limits, edge: Edge, times: int
) -> dict[str, int]:
    """The default (an empty tiling), the smallest tiles or now and then twice those, which a kernel can take in halves,
    or any."""
    kind = "smallest" if edge.smallest_tiles else source.pick(["default", "smallest", "any"])
    if kind == "default":
        return {}
    if kind == "smallest":
        times = times or source.pick((1, 1, 2))
        return {n: min(times * t.lo, t.hi) if n in spec.tiling else source.pick(t.values[:4]) for n, t in tiles.items()}
    return _fit_tiles(spec, {n: source.pick(t.values) for n, t in tiles.items()}, tiles, limits)


def _fit_tiles(spec: Spec[Any], tiling: dict[str, int], tiles: Mapping[str, Tile], limits: Limits) -> dict[str, int]:
    """Halve the widest until the product of the spec's tiles, and of how many times its least value each knob is,
    fits."""

    def share(name: str, value: int) -> int:  # a knob may be 0: a yes or no
        return value if name in spec.tiling else max(value, 1) // max(tiles[name].lo, 1)

    while math.prod(itertools.starmap(share, tiling.items())) > limits.tile_volume:
        widest = max((n for n in tiling if tiling[n] > tiles[n].lo), key=lambda n: tiling[n])
        tiling[widest] //= 2
    return tiling


def _stretch(
    source: Source, a: ArrayArg, dims: dict[str, Any], ones: Sequence[str] = (), full: Sequence[str] = ()
) -> tuple[int, ...]:
    """The shape of an argument; axes that broadcast are 1, or missing at the front, now and then, and those of ``ones``
    always 1. Arguments of ``full`` have every axis."""
    shape: list[int] = []
    if a.name in full:
        return shape_of(a.dims, dims)
    for d in a.dims:
        extents = shape_of((d,), dims)
        if d.variadic and d.broadcast:
            extents = extents[source.integer(0, len(extents)) if source.yes() else 0 :]
        one = any(f in ones for f in d.factors)
        shape.extend(1 if d.broadcast and e != 0 and (one or source.yes(3)) else e for e in extents)
    return tuple(shape)


def _wants(
    source: Source, spec: Spec[Any], limits: Limits, given: Sequence[ArrayArg], one_in: int
) -> dict[str, tuple[str, ...]]:
    """Now and then some of the gradients only; less often on an edge, which is about one of them."""
    optional = {a.name for a in spec.arrays if a.optional}
    there = {a.name for a in given}
    names = [o.name for o in spec.outputs if o.gradient_of in there or o.gradient_of not in optional]
    if not spec.is_vjp or len(names) < 2 or not limits.takes("wants") or not source.yes(one_in):
        return {}
    return {"wants": tuple(sorted(source.some(names)))}


def _option_value(source: Source, o: Option, shapes: Mapping[str, tuple[int, ...]], one_in: int) -> Any:
    """A value that an option takes: most usual, one in so many at an end of its range and one anywhere in it. On an
    edge fewer, where a scale of 1e30 leaves nothing of what it is about. An axis is often the longest."""
    if o.axis_of:
        shape = shapes[o.axis_of]
        anywhere = source.integer(-len(shape), len(shape) - 1)
        return shape.index(max(shape)) if source.yes() else anywhere
    if o.range is None:
        return source.pick(o.choices)
    kind = source.below(one_in)
    if o.choices and kind < one_in - 2:
        return source.pick(o.choices)
    if o.kind == "float":
        return _anywhere(source, o.range) if kind == one_in - 2 else source.pick(_ends(o.range))
    ends = [e for e in (0, 1, 2**20, -1, -5) if e in o.range] or [*o.choices] or [o.default]
    if o.kind == "tuple":
        return tuple(source.pick((None, *ends)) for _ in next(filter(None, o.choices)))
    return source.pick(ends)


def _anywhere(source: Source, within: Range) -> float:
    """A number of any size in a range."""
    found = _scaled(source.pick((1.0, -1.0)), source.integer(-20, 20), source.integer(8, 15))
    return next((v for v in (found, -found) if v in within), source.pick(_ends(within)))


def _scaled(sign: float, exponent: int, eighths: int) -> float:
    """A number of few digits, so that it reads well where it fails."""
    return sign * eighths / 8 * 2.0**exponent


FAR = 1e30
"""As far as a range without an end is tried: what float32 holds beside any sum of ordinary values."""


def _ends(r: Range) -> list[float]:
    """The ends of a range, or what lies next to one that is not in it, with 0, both signs and sizes far from usual."""
    some = (r.lo, r.hi, r.lo + max(TINY, abs(r.lo) / 64), r.hi - abs(r.hi) / 64, 0.0, -1.0, -0.375, 100.0, FAR, -FAR)
    return sorted({float(v) for v in some if v in r and abs(v) <= HUGE}, key=lambda v: (abs(v), v))
