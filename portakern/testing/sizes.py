"""Extents: those that odd cases are made of, those that people use, and the cuts that keep a case small."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from portakern.core import registry
from portakern.core.backend import ANY, Drawn
from portakern.core.call import shape_of
from portakern.spec import ArrayArg, Edge, Spec
from portakern.spec.options import Option
from portakern.testing.layouts import DRAWN
from portakern.testing.source import Source

__all__ = [
    "EXTENTS",
    "KINDS",
    "Limits",
    "at_least_1",
    "drawn_dims",
    "filling_dims",
    "one_form",
    "shrink_to_fit",
    "within_range",
]

EXTENTS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 127, 128, 129, 130, 200, 257, 300, 513)
"""Of small cases: on both sides of what tiles and vectors hold."""

WIDTHS = (96, 192, 320, 384, 640, 768, 1000, 1280, 1536, 3072)
"""Of cases as people run them: widths of models that are no power of two."""

POWERS = tuple(1 << e for e in range(3, 13))
"""And powers of two, with their neighbours."""

LONG = (4099, 4160, 5000, 8193, 16500, 32000, 33000, 50257, 65537, 128256, 151936, 262144)
"""And beyond: rows, keys and vocabularies longer than a kernel's longest tile, and than 16 bits count."""

HUGE = 2**18
"""Elements of the largest array with such an extent."""

FEW = (1, 2, 3, 4, 6)
LONGEST = 4096
"""The longest extent of such a case."""

RANK = 6
"""The most axes that an array of a case has."""

PAIRS = 2**27
"""The product of all extents of a case that fills a chip, at most: what its oracle works on, unless it takes a part."""


Flops = Callable[[Mapping[str, Any]], float]
"""The floating-point operations of a call of an op with these extents."""


@dataclass(frozen=True)
class Limits:
    """Limits of the size and the arguments of cases. The defaults suit interpreters.

    Attributes:
      elements: of the largest array; flops: of the call; tile_volume: the product of its tile sizes.
      typical_elements: elements of the largest array in a case with one or two typical extents; 0: no such case, also
        if ``elements`` is less than the default.
      programs: the most programs that a kernel launches for untiled axes such as heads; 0: any number.
      longest: the longest extent, in a case with one long extent.
      fill: the least elements of the largest array in a third of all cases, to fill a chip; 0: no such case.
      dtypes: the op's dtypes; empty: all. arguments: those that the implementation takes; None: all.
      layouts: the memory layouts of arrays (keys of LAYOUTS).
      shapes: fixed shapes of the calls, array -> shape; empty: shapes are drawn.
      always: arguments that every call passes, because the implementation has no default for them.
      options: fixed values of options, passed or built into the implementation.
      one_dtype: no array is float32 with 16-bit ones; empty: an extent may be 0.
      drawn: the limits of a variant that supports few calls; edges are not limited.
    """

    elements: int = 4096
    flops: float = 2e6
    tile_volume: int = 2**18
    dtypes: Sequence[str] = ()
    arguments: frozenset[str] | None = None
    layouts: Sequence[str] = DRAWN
    shapes: Sequence[Mapping[str, tuple[int, ...]]] = ()
    typical_elements: int = 2**15
    programs: int = 0
    longest: int = max(LONG)
    fill: int = 0
    always: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    one_dtype: bool = False
    empty: bool = True
    drawn: Drawn = ANY

    def takes(self, name: str) -> bool:
        return self.arguments is None or name in self.arguments


def _variadic(spec: Spec[Any]) -> set[str]:
    return {d.factors[0] for a in spec.arrays for d in a.dims if d.variadic}


KINDS = ("used", "odd", "odd", "long", "used", "odd", "rank", "odd", "used", "odd", "used")
"""What extents the free cases of a check have, one after the other; eleven, so that every dtype meets each."""


def drawn_dims(
    source: Source, spec: Spec[Any], edge: Edge, limits: Limits, kind: str = "", nth: int | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(dimension -> extent, which dimensions keep theirs while others give way).

    Beside an edge's own extents, most cases are small and odd. Of the others, some have one or two extents as people
    have them and few elements along the rest, some one that is longer than that, and some as many axes as anybody's
    arrays. ``kind``: one of KINDS; empty: any; ``nth``: how many of that kind came before (None: any number), for one
    dimension after the other is long, or as people have it.
    """
    kind = "odd" if edge.name else kind or source.pick(KINDS)
    if kind in ("used", "long") and limits.typical_elements > limits.elements >= Limits.elements:
        return _used(source, spec, limits, kind == "long", nth)
    dims = _odd(source, spec, edge, limits)
    if kind == "odd" and not edge.name and 0 < _product(dims) <= 16 and source.below(8):
        name = source.pick(list(dims))  # of few elements most calls are alike
        extent = source.pick(EXTENTS[5:])
        dims[name] = extent if isinstance(dims[name], int) else (*dims[name][:-1], extent)
    if kind == "rank":
        beside = min((len(a.dims) - 1 for a in spec.arrays for d in a.dims if d.variadic), default=0)
        for name in (n for n in spec.dims if n in _variadic(spec)):  # a set has another order in each process
            dims[name] = tuple(source.pick((1, 2, 3)) for _ in range(RANK - beside))
    return dims, ()


def _used(
    source: Source, spec: Spec[Any], limits: Limits, long: bool, nth: int | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    longest = _longest(spec)
    most = [n for n in spec.dims if longest[n] >= LONGEST]
    beyond = [e for e in LONG if e <= limits.longest]
    long = long and bool(most and beyond)
    few = (1, 2) if long else FEW
    likely = [n for n in spec.dims for _ in range(3 if n in most else 1)]
    among = most if long else list(spec.dims)
    turn = source.pick(most if long else likely) if nth is None else among[nth % len(among)]
    kept = dict.fromkeys((turn,) if long else (source.pick(likely), turn))
    if long and len(beyond) > 1:  # vocabularies in every second round of dimensions
        half, second = len(beyond) // 2, source.yes() if nth is None else nth // len(among) % 2 > 0
        beyond = beyond[:half] if second else beyond[half:]
    dims: dict[str, Any] = {}
    for name in spec.dims:
        used = None if name not in kept else source.pick(beyond) if long else _extent(source, longest[name])
        if name in _variadic(spec):
            ranks = (1, 2) if long and not used else (1, 1, 2, 2, 0)
            rest = [source.pick(few) for _ in range(source.pick(ranks))]
            place = source.pick((len(rest), 0))  # rows of that length, or so many
            dims[name] = (*rest[:place], used, *rest[place:]) if used else tuple(rest)
        else:
            dims[name] = used or source.pick(few)
    return _with_an_axis(source, spec, dims), tuple(kept)


def within_range(option: Option, drawn: int) -> int:
    """The extent that an option has, of a drawn number: beyond the end of its range another one from there, each as
    often."""
    assert option.range is not None
    lo, hi = option.range.lo, option.range.hi
    return int(max(drawn, lo) if drawn <= hi else lo + (drawn - lo) % (hi - lo + 1))


def filling_dims(
    source: Source, spec: Spec[Any], given: Sequence[ArrayArg], limits: Limits, flops: Flops | None = None
) -> dict[str, Any]:
    """Extents that fill a chip: one dimension after the other grows as far as people take it, until an array has as
    many elements as are asked for: thousands of rows, long rows, or both. ``flops``: as of :func:`shrink_to_fit`."""
    variadic, there = _variadic(spec), {a.name for a in given}
    shapes = [a.dims for a in given] + [o.dims for o in spec.outputs if o.gradient_of in (None, *there)]
    shapes = [s for s in shapes if not any(f in spec.drops for d in s for f in d.factors)]
    dims: dict[str, Any] = {n: (1,) if n in variadic else source.pick(FEW) for n in spec.dims}
    dims |= {o.name: within_range(o, dims[o.name]) for o in spec.extents}
    longest = {n: 4 * e if e == LONGEST else e for n, e in _longest(spec).items()}

    def elements(extents: Mapping[str, Any], among: Sequence[Any]) -> int:
        return max((math.prod(shape_of(s, dict(extents))) for s in among), default=1)

    for name in source.order(spec.dims):
        alone = {**dims, name: (1,) if name in variadic else 1}
        of_one = elements(alone, [s for s in shapes if any(name in d.factors for d in s)])
        beside = math.prod(math.prod(e) if isinstance(e, tuple) else e for e in alone.values())
        most = limits.fill if name in variadic or name == spec.batch else longest[name]
        room = most if flops else PAIRS // beside
        extent = max(1, min(most, -(-limits.fill // of_one), room) - source.pick((0, 0, 1)))
        dims[name] = (extent,) if name in variadic else extent
        while flops and extent > 1 and flops(dims) > PAIRS:
            extent //= 2
            dims[name] = (extent,) if name in variadic else extent
        if elements(dims, shapes) >= limits.fill:
            break
    for name, extent in dims.items():  # rows of a batch lie along two axes now and then; an op along an axis needs rows
        if isinstance(extent, tuple) and extent[0] > 64:
            split = source.pick((1, 7, 64, 1024, extent[0] // 8))  # the last: more rows than 16 bits count
            dims[name] = (split, -(-extent[0] // split)) if split > 1 and split < extent[0] else extent
    return dims


def _extent(source: Source, longest: int) -> int:
    """An extent as people have it, most often a power of two or next to one."""
    kinds = (WIDTHS, POWERS[:4], POWERS[4:], POWERS[4:])
    extent = source.pick(source.pick(kinds))
    return max(1, min(extent + source.pick((0, 0, -1, 1)), longest))


def _longest(spec: Spec[Any]) -> dict[str, int]:
    """Dimension -> the longest extent that people use: twice a typical call's, and at least 64."""
    forward = registry.forward_of(spec) if spec.is_vjp else None
    typical = {**(forward.typical if forward else {}), **spec.typical}
    found = {}
    for name in spec.dims:
        usual = typical.get(name, 256)
        found[name] = min(LONGEST, max(2 * max(usual, default=1) if isinstance(usual, tuple) else 2 * usual, 64))
    return found | {o.name: int(min(found[o.name], o.range.hi)) for o in spec.extents if o.range is not None}


def _with_an_axis(source: Source, spec: Spec[Any], dims: dict[str, Any]) -> dict[str, Any]:
    """An op along an axis needs one."""
    for a in spec.arrays:
        run = a.dims[0].factors[0] if len(a.dims) == 1 and a.dims[0].variadic and not a.optional else None
        if run in dims and not dims[run]:
            dims[run] = (source.pick(EXTENTS),)
    return dims


def _odd_extent(source: Source, lo: int, hi: int) -> int:
    """From lo to hi: one of those that odd cases are made of, or any of the first few."""
    choices = [e for e in EXTENTS if lo <= e <= hi]
    few = (max(lo, 1) if hi else 0, min(hi, lo + 40))
    return source.integer(*few) if not choices or source.yes() else source.pick(choices)


def _run_of_extents(source: Source, lo: int, hi: int, least: int) -> tuple[int, ...]:
    """The extents of a run of axes, ``least`` of them at least."""
    rank = source.integer(least, 1 if lo > 64 else 3)
    return tuple(_odd_extent(source, lo, hi) for _ in range(rank))


def _odd(source: Source, spec: Spec[Any], edge: Edge, limits: Limits) -> dict[str, Any]:
    variadic = _variadic(spec)
    dims: dict[str, Any] = {}
    for name in spec.dims:
        lo, hi = edge.dims.get(name, (0, max(EXTENTS)))
        may_be_0 = limits.empty and name not in edge.dims and name not in spec.positive and not edge.name
        if may_be_0 and source.yes(25):
            lo, hi = 0, 0
        if name in variadic:
            dims[name] = _run_of_extents(source, lo, hi, int(name in edge.dims))
        else:
            dims[name] = _odd_extent(source, lo, hi)
    return _with_an_axis(source, spec, dims)


def shrink_to_fit(
    spec: Spec[Any],
    given: Sequence[ArrayArg],
    dims: dict[str, Any],
    limits: Limits,
    edge: Edge,
    kept: Sequence[str] = (),
    flops: Flops | None = None,
) -> dict[str, Any]:
    """Halve the largest extent until the arrays, the work and the programs fit; one that the edge bounds from below, or
    that is to be kept, only while another cannot give; the first of these last. ``flops``: the work of a call with
    these extents; None: their product stands for it."""
    elements = max(limits.typical_elements, limits.elements) if kept else limits.elements
    if any(_widest(dims[n]) > LONGEST for n in kept):
        elements = max(elements, HUGE)
    alone = _alone(spec) if limits.programs else ()
    floor = {n: edge.dims[n][0] if n in edge.dims and not isinstance(dims[n], tuple) else 1 for n in spec.dims}
    work = max(limits.flops / 4, min(64.0 * math.prod(map(at_least_1, floor.values())), limits.flops))
    if limits.elements >= Limits.elements:  # what the edge is about has room
        elements = max(elements, min(2 * _largest(spec, given, floor), limits.typical_elements))

    def too_many() -> bool:
        return math.prod(math.prod(e) if isinstance(e := dims[n], tuple) else e for n in alone) > limits.programs > 0

    def too_big() -> bool:
        full = {
            n: tuple(map(at_least_1, e)) if isinstance(e, tuple) else at_least_1(e) for n, e in dims.items()
        }  # a 0 may be broadcast away
        extents: list[int] = [math.prod(e) if isinstance(e, tuple) else e for e in full.values()]
        full |= {d: full[dropped[0]] for d in spec.drops if (dropped := spec.dropped(d))}  # an axis more than it has
        shapes = [
            *(a.dims for a in given),
            *(o.dims for o in spec.outputs if o.gradient_of is None or o.gradient_of in {a.name for a in given}),
        ]
        sizes = [math.prod(shape_of(s, full)) for s in shapes]
        if max(sizes) > elements or flops is None:
            return max(sizes) > elements or math.prod(extents) > work
        return math.prod(extents) > 1 and flops(full) > limits.flops

    while (big := too_big()) or too_many():
        name = max(
            dims if big else alone,
            key=lambda d: (
                _widest(dims[d]) > 1 and _widest(dims[d]) // 2 >= edge.dims.get(d, (0, 0))[0],
                _widest(dims[d]) > 1 and d not in kept,
                _widest(dims[d]) > 1 and d not in kept[:1],
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


def _largest(spec: Spec[Any], given: Sequence[ArrayArg], dims: Mapping[str, int]) -> int:
    """Elements of the largest argument where runs of axes are one."""
    full = {n: (e,) if n in _variadic(spec) else e for n, e in dims.items()}
    full |= dict.fromkeys(spec.drops, (1,))
    return max((math.prod(shape_of(a.dims, full)) for a in given), default=1)


def _alone(spec: Spec[Any]) -> tuple[str, ...]:
    """The dimensions of which a kernel has a program for every index: each output has them, and no tile covers them."""
    tiled = {t.of for t in spec.tiling.values()}
    shown = [{f for d in o.dims for f in d.factors} for o in spec.outputs]
    return () if None in tiled else tuple(n for n in spec.dims if n not in tiled and all(n in s for s in shown))


def one_form(spec: Spec[Any], names: Sequence[str], dims: Mapping[str, Any]) -> dict[str, Any] | None:
    """The dimensions cut until these arguments have one shape; None where their notations allow none.

    Along each axis what two notations share may stay. Of the rest, one factor on either side takes the smaller of two
    extents, and any others become 1.
    """
    found, first = dict(dims), spec.argument(names[0])
    for other in map(spec.argument, names[1:]):
        if len(other.dims) != len(first.dims):
            return None
        for a, b in zip(first.dims, other.dims, strict=True):
            if (
                a.variadic != b.variadic
                or (a.plus, a.per) != (b.plus, b.per)
                or (a.variadic and a.factors != b.factors)
            ):
                return None
    for _ in range(len(names) * len(first.dims)):  # a cut may undo an earlier one: as often as there are axes
        for other in map(spec.argument, names[1:]):
            for a, b in zip(first.dims, other.dims, strict=True):
                ours, theirs = ([f for f in x.factors if f not in y.factors] for x, y in ((a, b), (b, a)))
                alone = len(ours) == len(theirs) == 1
                least = min(found[ours[0]], found[theirs[0]]) if alone else 1
                found |= dict.fromkeys((*ours, *theirs), least)
    return found


def _product(dims: Mapping[str, Any]) -> int:
    return math.prod(math.prod(e) if isinstance(e, tuple) else e for e in dims.values())


def at_least_1(extent: int) -> int:
    return max(extent, 1)


def _widest(extent: Any) -> int:
    return max(extent, default=0) if isinstance(extent, tuple) else int(extent)
