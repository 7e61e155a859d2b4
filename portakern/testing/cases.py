"""One test case: everything needed to build the arrays of a call again, small enough to print on a line."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.call import shape_of
from portakern.core.oracle import degenerate_outputs, rounded_oracle
from portakern.spec import ArrayArg, Edge, Spec
from portakern.spec.dtypes import numpy_dtype

__all__ = ["LAYOUTS", "REGIMES", "Buffer", "Case", "edges"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A call to make. Values come from ``seed`` and ``regime``, so that a failing case shrinks to a small shape and not to odd numbers.

    Attributes:
      dtype: the op's dtype; wider: names of arrays given in float32 beside it.
      shapes: array name -> shape, of the arrays that are given.
      options: option name -> value, of those that are not at their default.
      regime: how float values are drawn (a key of REGIMES); masks: array name -> regime of an additive mask.
      layouts: array name -> memory layout (a key of LAYOUTS).
      tiling: tile overrides; empty is the default tiling.
      edge: the corner of the contract that is planted (a key of :func:`edges`), or none.
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

    def to_json(self) -> str:
        """One line of JSON; empty fields are left out."""
        return json.dumps({k: v for k, v in asdict(self).items() if v not in ({}, (), [], "")}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Case:
        raw = json.loads(text)
        raw["shapes"] = {k: tuple(v) for k, v in raw["shapes"].items()}
        raw["wider"] = tuple(raw.get("wider", ()))
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
        values = {n: self._values(a, shape) for n, (a, shape) in drawn.items()}
        plant = edges(spec)[self.edge].plant if self.edge else None
        if plant:
            plant(
                values,
                np.random.default_rng([self.seed, 1]),
                {o.name: self.options.get(o.name, o.default) for o in spec.options},
            )
        with np.errstate(over="ignore", invalid="ignore"):
            arrays = {n: values[n].astype(numpy_dtype(self.dtype_of(a))) for n, (a, _) in drawn.items()}
        if forward and saved:
            arrays |= _forward_outputs(forward, arrays, self.options, saved)
        return {n: LAYOUTS[self.layouts.get(n, "contiguous")](arrays[n]) for n in given}

    def _more(self, spec: Spec[Any], forward: Spec[Any]) -> dict[str, tuple[ArrayArg, Shape]]:
        """The inputs that the forward op needs, and its gradient does not."""
        arrays = {
            a.name: np.broadcast_to(np.zeros((), numpy_dtype(self.dtype_of(a))), self.shapes[a.name])
            for a in spec.arrays
            if a.name in self.shapes
        }
        dims = bind(spec, **arrays, **self.options).dims
        return {
            a.name: (a, shape_of(a.dims, dims)) for a in forward.arrays if not a.optional and a.name not in self.shapes
        }

    def dtype_of(self, a: ArrayArg) -> str:
        """The dtype of an argument in this case."""
        if a.follows:
            return "float32" if a.name in self.wider else self.dtype
        if a.statistic:
            return "float64" if self.dtype == "float64" else "float32"
        free = [d for d in a.dtypes if d != "float64"] or [*a.dtypes]  # whoever takes float64 says so for all arrays
        return free[self.seed % len(free)]

    def _values(self, a: ArrayArg, shape: Shape) -> np.ndarray:
        rng = np.random.default_rng([self.seed, zlib.crc32(a.name.encode())])
        dtype = numpy_dtype(self.dtype_of(a))
        if dtype.kind not in "iub":
            fill = REGIMES[self.masks.get(a.name, self.regime)]
            with np.errstate(over="ignore", invalid="ignore"):
                return np.array(fill(rng, shape, dtype), np.float64)
        return np.sort(rng.integers(0, 4, shape), axis=-1) if self.seed % 2 else rng.integers(0, 3, shape)


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


class Buffer(NamedTuple):
    """A one-dimensional memory and the strided view of it that the kernel gets; strides and offset in elements. The rest of the memory is poison."""

    memory: np.ndarray
    shape: Shape
    strides: tuple[int, ...]
    offset: int

    def view(self) -> np.ndarray:
        itemsize = self.memory.itemsize
        return np.lib.stride_tricks.as_strided(
            self.memory[self.offset :], self.shape, tuple(s * itemsize for s in self.strides)
        )


@functools.cache
def edges(spec: Spec[Any]) -> Mapping[str, Edge]:
    """The corners of the contract that the checker visits: those that follow from the signature, then those that the spec declares."""
    reduced = dict.fromkeys(spec.empty, (0, 0))
    variadic = {d.factors[0] for a in spec.arrays for d in a.dims if d.variadic}
    shown = dict.fromkeys(f for o in spec.outputs for d in o.dims for f in d.factors)
    found = [Edge(f"no_{d}", f"{d} = 0 is reduced away: the declared values", dims={d: (0, 0)}) for d in reduced]
    found += [
        Edge(f"empty_{d}", f"{d} = 0 is an extent of the output: an empty result", dims={d: (0, 0)})
        for d in shown
        if d not in spec.positive
    ]
    found += [
        Edge(
            f"several_{tile}", f"{t.of} longer than two tiles, and ragged", dims={t.of: (257, 300)}, smallest_tiles=True
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
    ]
    return {e.name: e for e in found} | spec.edges


def _finfo(dtype: np.dtype[Any]) -> Any:
    import ml_dtypes

    return ml_dtypes.finfo(dtype)


def _normal(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    return rng.standard_normal(shape)


def _integers(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(float)


def _spikes(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros but for ones at the ends, at powers of two and beside them: where tiles begin and end."""
    values = np.zeros(shape)
    if shape and values.size:
        n = shape[-1]
        edges = [i for i in {0, n - 1, *(p + s for p in (16, 32, 64, 128, 256) for s in (-1, 0))} if 0 <= i < n]
        columns = rng.choice(edges, shape[:-1])
        np.put_along_axis(values, np.expand_dims(columns, -1), 1.0, -1)
    return values


def _wide(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    exponent = 6 if dtype == np.float16 else 12
    return rng.standard_normal(shape) * np.exp2(rng.uniform(-exponent, exponent, shape))


def _near_overflow(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    return rng.uniform(-1, 1, shape) * float(_finfo(dtype).max)


def _large_mean(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    return 40000.0 + rng.integers(0, 4, shape)


def _constant(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    return np.broadcast_to(rng.standard_normal(shape[:-1] + (1,) if shape else ()), shape)


def _very_negative(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    low = -6e4 if dtype == np.float16 else -1e5
    return low + rng.standard_normal(shape)


def _subnormal(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    return rng.standard_normal(shape) * float(_finfo(dtype).smallest_normal) / 4


def _special(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    """Normal values with a few NaN, inf and -inf planted."""
    values = rng.standard_normal(shape)
    flat = values.reshape(-1)
    for _ in range(int(rng.integers(1, 4)) if flat.size else 0):
        flat[rng.integers(flat.size)] = rng.choice([np.nan, np.inf, -np.inf])
    return values


def _mask(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    """An additive mask: 0 or -inf, with whole rows of -inf."""
    values = np.where(rng.random(shape) < 0.5, 0.0, -np.inf)
    return _some_rows(rng, values, -np.inf)


def _mask_finfo_min(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    """The other habit: the dtype's most negative finite number, with whole rows of it."""
    low = float(_finfo(dtype).min)
    values = np.where(rng.random(shape) < 0.5, 0.0, low)
    return _some_rows(rng, values, low)


def _some_rows(rng: np.random.Generator, values: np.ndarray, value: float) -> np.ndarray:
    if values.ndim:
        values[rng.random(values.shape[:-1]) < 0.3] = value
    return values


REGIMES: dict[str, Callable[[np.random.Generator, Shape, np.dtype[Any]], np.ndarray]] = {
    "normal": _normal, "integers": _integers, "spikes": _spikes, "wide": _wide, "constant": _constant, "large_mean": _large_mean, "very_negative": _very_negative,
    "near_overflow": _near_overflow, "subnormal": _subnormal, "special": _special, "mask": _mask, "mask_finfo_min": _mask_finfo_min,
}  # fmt: skip
"""How float values are drawn; each gives float64 that is then rounded to the array's dtype."""

MASK_REGIMES = ("normal", "mask", "mask_finfo_min", "very_negative")
VALUE_REGIMES = tuple(r for r in REGIMES if not r.startswith("mask"))


def _poison(size: int, dtype: np.dtype[Any]) -> np.ndarray:
    return np.full(size, np.nan if dtype.kind not in "iub" else 119, dtype)


def _embed(values: np.ndarray, order: tuple[int, ...], pad: tuple[int, ...], step: int, offset: int) -> Buffer:
    """Lay ``values`` out with axes in memory order ``order`` (outermost first), ``pad`` elements after each axis, every ``step``-th element of the innermost."""
    strides = [0] * values.ndim
    extent = step
    for axis in reversed(order):
        strides[axis] = extent
        extent *= values.shape[axis] + pad[axis]
    buffer = Buffer(_poison(offset + max(extent, 1), values.dtype), values.shape, tuple(strides), offset)
    buffer.view()[...] = values
    return buffer


def _contiguous(values: np.ndarray) -> Buffer:
    return _embed(values, tuple(range(values.ndim)), (0,) * values.ndim, 1, 0)


def _transposed(values: np.ndarray) -> Buffer:
    return _embed(values, tuple(reversed(range(values.ndim))), (0,) * values.ndim, 1, 0)


def _sliced(values: np.ndarray) -> Buffer:
    return _embed(values, tuple(range(values.ndim)), (3,) * values.ndim, 1, 5)


def _strided(values: np.ndarray) -> Buffer:
    return _embed(values, tuple(range(values.ndim)), (0,) * values.ndim, 2, 1)


def _swapped(values: np.ndarray) -> Buffer:
    """The two middle axes swapped in memory, as heads and sequence are between (b, s, h, d) and (b, h, s, d)."""
    order = list(range(values.ndim))
    if values.ndim > 2:
        order[-3], order[-2] = order[-2], order[-3]
    return _embed(values, tuple(order), (0,) * values.ndim, 1, 0)


def _expanded(values: np.ndarray) -> Buffer:
    """The first axis longer than 1 repeated by a stride of 0, so its values become those of index 0."""
    axis = next((i for i, n in enumerate(values.shape[:-1]) if n > 1), None)
    if axis is None or not values.size:
        return _contiguous(values)
    one = _contiguous(np.take(values, [0], axis))
    return Buffer(one.memory, values.shape, tuple(0 if i == axis else s for i, s in enumerate(one.strides)), 0)


LAYOUTS: dict[str, Callable[[np.ndarray], Buffer]] = {
    "contiguous": _contiguous, "transposed": _transposed, "sliced": _sliced, "strided": _strided, "swapped": _swapped, "expanded": _expanded,
}  # fmt: skip
"""How an array lies in memory."""
