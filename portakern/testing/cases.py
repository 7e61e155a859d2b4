"""One test case: everything needed to build the arrays of a call again, small enough to print on a line."""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.call import Call, shape_of
from portakern.core.oracle import BrokenRule, as_float64, broken_rule, degenerate_outputs, rounded_oracle
from portakern.errors import SpecError
from portakern.spec import ArrayArg, Edge, Spec
from portakern.spec.dtypes import ANY_INDEX, DTYPES, numpy_dtype
from portakern.spec.fields import ValuesFn
from portakern.testing.layouts import LAYOUTS, REPEATS, Buffer
from portakern.testing.regimes import EACH_ALONE, REGIMES
from portakern.testing.sizes import one_form

__all__ = ["LAYOUTS", "REGIMES", "Case", "edges", "fixed_values", "generators"]

Shape = tuple[int, ...]

POOL = 2**21 - 9
"""Values that are drawn of an array with more elements, which then repeats them: a prime, so that no two rows of it are
alike."""


@dataclass(frozen=True)
class Case:
    """A call to make. Values come from ``seed`` and ``regime``, so that a failing case shrinks to a small shape and not
    to odd numbers.

    Attributes:
      dtype: the op's dtype; wider: names of arrays given in float32 beside it.
      shapes: array name -> shape, of the arrays that are given.
      options: option name -> value, of those that are not at their default.
      regime: how float values are drawn (a key of REGIMES); masks: array name -> regime of an additive mask.
      layouts: array name -> memory layout (a key of LAYOUTS).
      tiling: tile overrides; empty is the default tiling.
      dtypes: array name -> dtype, of arrays of a dtype of their own; the seed chooses those that are not named.
      edge: the corner of the contract that is planted (a key of :func:`edges`), or none.
      aliased: arrays that are one object.
      parts: axis -> the extents of the parts that it is cut into (:mod:`portakern.testing.partitioned`); empty: none.
      followup: what follows the call that is made twice: "", "changed" (a third on an input that holds other values) or
        "often" (more of both).
    """

    dtype: str
    shapes: Mapping[str, Shape]
    regime: str = "normal"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    tiling: Mapping[str, int] = field(default_factory=dict)
    wider: tuple[str, ...] = ()
    masks: Mapping[str, str] = field(default_factory=dict)
    edge: str = ""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    aliased: tuple[str, ...] = ()
    followup: str = ""
    parts: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON; empty fields are left out."""
        return json.dumps({k: v for k, v in asdict(self).items() if v not in ({}, (), [], "")}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Case:
        raw = json.loads(text)
        raw["shapes"] = {k: tuple(v) for k, v in raw["shapes"].items()}
        raw["wider"], raw["aliased"] = tuple(raw.get("wider", ())), tuple(raw.get("aliased", ()))
        raw["options"] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.get("options", {}).items()}
        return cls(**raw)

    def buffers(self, spec: Spec[Any]) -> dict[str, Buffer]:
        """The memory of every given array, in the spec's order."""
        given = {a.name: a for a in spec.arrays if a.name in self.shapes}
        forward = registry.forward_of(spec) if spec.is_vjp else None
        saved = {o.name for o in forward.outputs} & set(given) if forward else set()
        drawn = {a.name: (a, self.shapes[a.name]) for a in given.values() if a.name not in saved} | (
            self._more(spec, forward) if forward and saved else {}
        )
        values = self._values(spec, drawn, drawn)
        if self.aliased:
            values |= dict.fromkeys(self.aliased, values[self.aliased[0]])
        plant = edges(spec)[self.edge].plant if self.edge else None
        if plant:
            values = {n: _spread(v, drawn[n][1]) for n, v in values.items()}
            plant(
                values,
                np.random.default_rng([self.seed, 1]),
                {o.name: self.options.get(o.name, o.default) for o in spec.options},
            )
        with np.errstate(over="ignore", invalid="ignore"):
            arrays = {n: _spread(values[n].astype(numpy_dtype(self.dtype_of(a))), s) for n, (a, s) in drawn.items()}
        if forward and saved:  # a repeated index is so before anything is computed
            repeats = {n: layout for n, layout in self.layouts.items() if layout in REPEATS and n in drawn}
            arrays |= {n: np.array(LAYOUTS[layout](arrays[n]).view()) for n, layout in repeats.items()}
            arrays |= _forward_outputs(forward, arrays, self.options, saved)
        laid = {n: LAYOUTS[self.layouts.get(n, "contiguous")](arrays[n]) for n in given}
        return laid | dict.fromkeys(self.aliased, laid[self.aliased[0]]) if self.aliased else laid

    def drawn(self, spec: Spec[Any], name: str, measured: bool = False) -> np.ndarray:
        """The values of one argument before they are rounded to its dtype, by its generator where it has one;
        ``measured``: as it holds them in a benchmark."""
        given = {a.name: (a, self.shapes[a.name]) for a in spec.arrays if a.name in self.shapes}
        return _spread(self._values(spec, given, [name], measured)[name], self.shapes[name])

    def _values(
        self,
        spec: Spec[Any],
        given: Mapping[str, tuple[ArrayArg, Shape]],
        names: Iterable[str],
        measured: bool = False,
    ) -> dict[str, np.ndarray]:
        """Values of these arguments, of which each that sees others comes after them."""
        forward = registry.forward_of(spec) if spec.is_vjp else None
        made, found = {**generators(spec, forward)}, dict[str, np.ndarray]()
        seen = {n: s for n, s in (forward.seen if forward else {}).items() if n not in spec.generators} | spec.seen
        if measured:
            made, seen = made | spec.measured, seen | spec.measured_seen
        bound = self.bound_alone(spec) if made.keys() & given else None
        for name in _after_what_they_see(names, seen):
            if name not in given or name in found:
                continue
            a, shape = given[name]
            if bound and name in made:
                others = [_spread(found[n], given[n][1]) if n in given else None for n in seen.get(name, ())]
                found[name] = self._made(spec, made[name], bound, a, shape, others)
            else:
                found[name] = self._pool(a, shape)
        return {n: found[n] for n in names}

    def bound_alone(self, spec: Spec[Any]) -> Call:
        """The bound call on arrays of one element, stretched: its dimensions and canonical options."""
        arrays = {
            a.name: np.broadcast_to(np.zeros((), numpy_dtype(self.dtype_of(a))), self.shapes[a.name])
            for a in spec.arrays
            if a.name in self.shapes
        }
        return bind(spec, **arrays, **self.options)

    def with_integers(self, spec: Spec[Any]) -> Call:
        """The bound call on the integer arrays that are drawn, and others of one element, stretched: enough for what a
        spec counts of it."""
        given = {a.name: (a, self.shapes[a.name]) for a in spec.arrays if a.name in self.shapes}
        integers = [n for n, (a, _) in given.items() if not DTYPES[self.dtype_of(a)].floating]
        call = self.bound_alone(spec)
        drawn = self._values(spec, given, integers)
        values = {n: _spread(v, given[n][1]).astype(numpy_dtype(self.dtype_of(given[n][0]))) for n, v in drawn.items()}
        return call.replace(arrays={**call.arrays, **values})

    def obeys(self, spec: Spec[Any]) -> bool:
        """Whether the values that are drawn obey the rules on values, of a gradient op those of its forward too."""
        forward = registry.forward_of(spec) if spec.is_vjp else None
        if not any(r.values for r in (*spec.require, *(forward.require if forward else ()))):
            return True
        try:
            arrays = {n: b.view() for n, b in self.buffers(spec).items()}
        except BrokenRule:  # the forward op has nothing to save
            return False
        return broken_rule(as_float64(bind(spec, **arrays, **self.options))) is None

    def _more(self, spec: Spec[Any], forward: Spec[Any]) -> dict[str, tuple[ArrayArg, Shape]]:
        """The inputs that the forward op needs, and its gradient does not."""
        dims = self.bound_alone(spec).dims
        return {
            a.name: (a, shape_of(a.dims, dims)) for a in forward.arrays if not a.optional and a.name not in self.shapes
        }

    def dtype_of(self, a: ArrayArg) -> str:
        """The dtype of an argument in this case."""
        if a.name in self.dtypes:
            return self.dtypes[a.name]
        if a.follows:
            return "float32" if a.name in self.wider else self.dtype
        if a.statistic:
            return "float64" if self.dtype == "float64" else "float32"
        free = [d for d in a.dtypes if d != "float64"] or [*a.dtypes]  # whoever takes float64 says so for all arrays
        if DTYPES[free[0]].floating:
            return free[self.seed % len(free)]
        # each for itself: of two integer arrays that are compared with each other one may be wider
        return free[np.random.default_rng([self.seed, zlib.crc32(a.name.encode()), 1]).integers(len(free))]

    def _pool(self, a: ArrayArg, shape: Shape) -> np.ndarray:
        """Values of an argument, in its shape or (POOL,)."""
        rng = np.random.default_rng([self.seed, zlib.crc32(a.name.encode())])
        dtype = numpy_dtype(self.dtype_of(a))
        kind = DTYPES[self.dtype_of(a)]
        if kind.floating:
            regime = self.masks.get(a.name, self.regime)
            drawn = (POOL,) if regime in EACH_ALONE and math.prod(shape) > POOL else shape
            with np.errstate(over="ignore", invalid="ignore"):
                return np.array(REGIMES[regime](rng, drawn, dtype), np.float64)
        if kind.name not in ANY_INDEX:  # data, and not an index
            lowest = 0 if kind.kind in ("uint", "bool") else -int(kind.largest) - 1
            return rng.integers(lowest, int(kind.largest) + 1, shape)
        return np.sort(rng.integers(0, 4, shape), axis=-1) if self.seed % 2 else rng.integers(0, 3, shape)

    def _made(
        self,
        spec: Spec[Any],
        fn: ValuesFn,
        bound: Call,
        a: ArrayArg,
        shape: Shape,
        seen: Sequence[np.ndarray | None],
    ) -> np.ndarray:
        """What a declared generator gives, held to the argument's form."""
        rng = np.random.default_rng([self.seed, zlib.crc32(a.name.encode())])
        values = np.asarray(fn(rng, shape, bound.dims, bound.options, *seen))
        kind = DTYPES[self.dtype_of(a)]
        if values.shape != shape:
            raise SpecError(f"{spec.name}: the values of {a.name} have shape {values.shape}; expected {shape}")
        if kind.floating:
            return values.astype(np.float64)
        if values.dtype.kind not in "iub" or (values.astype(kind.numpy) != values).any():
            raise SpecError(
                f"{spec.name}: the values of {a.name} are {values.dtype}; expected integers that {kind.name} holds"
            )
        return values.astype(np.int64)


def _spread(values: np.ndarray, shape: Shape) -> np.ndarray:
    """Values in a shape, over and over where they are fewer."""
    return values if values.shape == shape else np.resize(values, shape)


def generators(spec: Spec[Any], forward: Spec[Any] | None) -> dict[str, ValuesFn]:
    """Argument -> its declared generator: the op's own, and those of the forward op."""
    if forward is None:
        return spec.generators
    defaults = {o.name: o.default for o in forward.options}  # of those that the gradient op does not have

    def with_defaults(fn: ValuesFn) -> ValuesFn:
        return lambda rng, shape, dims, options, *seen: fn(rng, shape, dims, {**defaults, **options}, *seen)

    return {name: with_defaults(fn) for name, fn in forward.generators.items()} | spec.generators


def _after_what_they_see(names: Iterable[str], seen: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Arguments, each after those whose values its own see; one may come several times."""
    for name in names:
        yield from _after_what_they_see(seen.get(name, ()), seen)
        yield name


def fixed_values(spec: Spec[Any], forward: Spec[Any] | None) -> set[str]:
    """The arguments whose values are for their places alone: those that a generator makes, or sees."""
    made = {**(forward.seen if forward else {}), **spec.seen}
    return {*generators(spec, forward), *(n for names in made.values() for n in names)}


def _forward_outputs(
    forward: Spec[Any], arrays: Mapping[str, np.ndarray], options: Mapping[str, Any], names: set[str]
) -> dict[str, np.ndarray]:
    """What the forward op's oracle gives for these arrays: the residuals of its gradient."""
    known = {o.name for o in forward.options}
    call = bind(
        forward,
        **{a.name: arrays[a.name] for a in forward.arrays if a.name in arrays},
        **{k: v for k, v in options.items() if k in known},
    )
    call = call.replace(wants=tuple(o.name for o in forward.outputs if o.name in names))
    outputs = degenerate_outputs(call) if call.degenerate else rounded_oracle(call)
    return {
        o.name: value
        for o, value in zip(forward.outputs, outputs, strict=True)
        if o.name in names and value is not None
    }


@functools.cache
def edges(spec: Spec[Any]) -> Mapping[str, Edge]:
    """The corners of the contract that the checker visits: those that follow from the signature, then those that the
    spec declares."""
    reduced = dict.fromkeys(spec.empty, (0, 0))
    variadic = {d.factors[0] for a in spec.arrays for d in a.dims if d.variadic}
    shown = dict.fromkeys(f for o in spec.outputs for d in o.dims for f in d.factors)
    found = [Edge(f"no_{d}", f"{d} = 0 is reduced away: the declared values", dims={d: (0, 0)}) for d in reduced]
    found += [
        Edge(f"empty_{d}", f"{d} = 0 is an extent of the output: an empty result", dims=_emptying(spec, d))
        for d in shown
        if d not in spec.positive
    ]
    found += [
        Edge(
            f"several_{tile}",
            f"{t.of} longer than two tiles, and ragged",
            dims={t.of: (257, 300), **({} if t.of in shown else dict.fromkeys(_widths_along(spec, t.of), (33, 140)))},
            smallest_tiles=True,
        )
        for tile, t in spec.tiling.items()
        if t.of
    ]
    found += [
        Edge("extents_of_1", "every extent is 1", dims=dict.fromkeys(spec.dims, (1, 1))),
        Edge(
            "no_tile_divides",
            "primes and odd sizes beyond the smallest tiles",
            dims={d: (17, 19) if d in variadic else (131, 139) for d in spec.dims if d not in spec.positive},
        ),
        Edge("beyond_the_dtype", "results that overflow their dtype", regime="near_overflow"),
        Edge("subnormals", "values that hardware may flush", regime="subnormal"),
        Edge("planted_nan_and_inf", "NaN and infinities anywhere", regime="special"),
        *_given_twice(spec),
    ]
    return {e.name: e for e in found} | spec.edges


def _given_twice(spec: Spec[Any]) -> Iterator[Edge]:
    """One array for several arguments, as ``attention(x, x, x)`` has it, where their shapes can be one.

    What a gradient op saved follows from its other arguments, and what a generator makes is made for one argument.
    """
    forward = registry.forward_of(spec) if spec.is_vjp else None
    apart = {o.name for o in (forward.outputs if forward else ())} | fixed_values(spec, forward) | {*spec.masks}
    left = [a for a in spec.arrays if a.follows and a.name not in apart]
    ones = {
        d: (1,) if any(f.variadic and d in f.factors for a in spec.arrays for f in a.dims) else 1 for d in spec.dims
    }
    while left:
        first, *others = left
        same = [
            first,
            *(a for a in others if a.optional == first.optional and one_form(spec, (first.name, a.name), ones)),
        ]
        left = [a for a in left if a not in same]
        if len(same) > 1:
            names = tuple(a.name for a in same)
            given = tuple(a.name for a in same if a.optional)
            yield Edge("_is_".join(names), "one array is given for each of them", given=given, aliased=names)


def _widths_along(spec: Spec[Any], dim: str) -> list[str]:
    """The dimensions that are the width of blocks of another: of one that is summed, each may need several tiles."""
    return [d.per for a in spec.arrays for d in a.dims if d.per and d.factors == (dim,)]


def _emptying(spec: Spec[Any], dim: str) -> dict[str, tuple[int, int]]:
    """The extents that make a dimension of an output empty: of one that lacks an axis, all but that axis's."""
    dropped = spec.dropped(dim)
    return {dropped[0]: (0, 0), dropped[1].name: (1, 40)} if dropped else {dim: (0, 0)}
