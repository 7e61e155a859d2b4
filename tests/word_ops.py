"""Small ops that use the words that no shipped op needs yet: their specs, references and right kernels."""

from __future__ import annotations

from math import inf, prod
from typing import Annotated, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float, Float8e4m3fn, Float8e5m2, Float32, Int, Int8, Int32, Int64, Num, UInt8

import portakern as pk
from portakern.spec import Rule, Tile, spec
from portakern.spec.options import Axis
from portakern.spec.tolerance import magnitude, round_to, units

A = TypeVar("A")
reference = pk.backends()["reference"].implements


# ------------------------------------------------------------------------------- int8 x scales, summed between offsets
class SegmentAddOut(NamedTuple):
    out: Float[A, "segments n"]


def rise(call):
    starts = call.arrays["starts"]
    return starts[0] == 0 and starts[-1] <= call.dims["rows"] and bool((np.diff(starts) >= 0).all())


@spec(
    tiling={},
    flops=lambda call: 2.0 * call.dims["rows"] * call.dims["n"],
    positive=("rows", "segments"),
    aliases={"out": "total"},
    require=[Rule(rise, "starts must rise from 0 and stay within the rows", values=True)],
    typical={"rows": 64, "n": 32, "segments": 4},
)
def segment_add(
    q: Int8[A, "rows n"], scales: Float[A, "rows"], starts: Int[A, "segments"], total: Float[A, "segments n"]
) -> SegmentAddOut:
    """out = total + the sum of q scales over the rows of each segment, which begin at starts."""
    raise NotImplementedError


@segment_add.values("starts")
def rising(rng, shape, dims, options):
    starts = np.sort(rng.integers(0, dims["rows"] + 1, shape))
    starts[0] = 0
    return starts


@segment_add.edge(dims={"rows": (30, 60), "segments": (2, 5)})
def one_large_scale(arrays, rng, options):
    """A row that is counted into its neighbour's segment shows."""
    arrays["scales"][rng.integers(len(arrays["scales"]))] = 1000


def sums(call, products):
    """What the rows of each segment add up to, (segments, n)."""
    segment = np.searchsorted(call.arrays["starts"], np.arange(call.dims["rows"]), side="right") - 1
    out = np.zeros((call.dims["segments"], call.dims["n"]), products.dtype)
    np.add.at(out, segment, products)
    return out


@segment_add.tolerance
def segment_add_bound(call, ref):
    unit = units(call)
    q, scales, total = (call.arrays[n].astype(float) for n in ("q", "scales", "total"))
    size = sums(call, np.abs(q) * magnitude(scales)[:, None]) + magnitude(total)
    flushed = sums(call, np.abs(q)) * unit.tau
    err = (call.dims["rows"] + 2) * (unit.u * size + unit.tau) + flushed
    return (round_to(np.where(size < unit.huge, err, inf), ref[0], call.dtype),)


@reference("segment_add")
def segment_add_reference(call, tiling):
    with np.errstate(all="ignore"):
        return (call.arrays["total"] + sums(call, call.arrays["q"] * call.arrays["scales"][:, None]),)


segment_add.sample("three_segments", dims={"rows": 7, "n": 4, "segments": 3})


# -------------------------------------------------------------------------------------------- an axis that disappears
class PeakOut(NamedTuple):
    y: Float[A, "*rest"]
    at: Int32[A, "*rest"]


@spec(
    tiling={"block": Tile(16, 64, of="axis")},
    flops=lambda call: float(prod(call.dims["shape"])),
    drops={"rest": "axis"},
    empty={"axis": {"y": -inf, "at": -1}},
    returns={"at": "return_at"},
    typical={"shape": (4, 8), "axis": 0},
)
def peak(
    x: Float[A, "*shape"],
    floor: Float[A, "*rest"] | None = None,
    *,
    axis: Annotated[int, Axis("x")] = -1,
    return_at: bool = False,
) -> PeakOut:
    """y = the greatest along axis, and no less than floor; at = where it first stands in x."""
    raise NotImplementedError


@peak.tolerance
def peak_bound(call, ref):
    flushed = np.abs(call.arrays["x"].max(call.options["axis"])) < units(call).tau  # all such are equal to a kernel
    y, at = ref
    return round_to(np.zeros(y.shape), y, call.dtype), None if at is None else np.where(flushed, inf, 0.0)


@reference("peak")
def peak_reference(call, tiling):
    x, floor, axis = call.arrays["x"], call.arrays["floor"], call.options["axis"]
    y = x.max(axis)
    return y if floor is None else np.maximum(y, floor), x.argmax(axis)


peak.sample("rows", dims={"shape": (3, 5)}, options={"return_at": True})
peak.sample("columns_with_a_floor", dims={"shape": (3, 4, 5)}, options={"axis": 1}, given=("floor",))


# ------------------------------------------------------------------------------------------------- floats of 8 bits
class ToFp8Out(NamedTuple):
    q: Float8e4m3fn[A, "m n"]
    scale: Float32[A, "m"]


@spec(tiling={}, flops=lambda call: 2.0 * call.dims["m"] * call.dims["n"], positive=("n",), codes=("q",))
def to_fp8(x: Float[A, "m n"]) -> ToFp8Out:
    """q = x / scale, scale = max |x| / 448 of each row, 1 where that is 0."""
    raise NotImplementedError


@to_fp8.tolerance
def to_fp8_bound(call, ref):
    unit, (q, scale) = units(call), ref
    unsure = (scale < 2.0**-110)[:, None]  # a scale that may flush
    err = 4 * unit.u * magnitude(q) + unit.tau
    return (
        np.where(unsure, inf, err),
        round_to(2 * unit.u * magnitude(scale) + unit.tau, scale, call.outputs["scale"][1]),
    )


@reference("to_fp8")
def to_fp8_reference(call, tiling):
    x = call.arrays["x"]
    with np.errstate(all="ignore"):
        top = np.abs(x).max(1)
        scale = np.where(top == 0, 1.0, top / 448)
        return x / scale[:, None], scale


def to_fp8_kernel(x):
    wide = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
    with np.errstate(all="ignore"):
        top = np.abs(wide).max(1)
        scale = np.where(top == 0, wide.dtype.type(1), top / wide.dtype.type(448))
        return (wide / scale[:, None]).astype(ml_dtypes.float8_e4m3fn, order="C"), scale


class FromFp8Out(NamedTuple):
    y: Float32[A, "m n"]


@spec(tiling={}, flops=lambda call: float(call.dims["m"] * call.dims["n"]))
def from_fp8(q: Float8e5m2[A, "m n"], scale: Float32[A, "m"]) -> FromFp8Out:
    """y = q scale."""
    raise NotImplementedError


@from_fp8.tolerance
def from_fp8_bound(call, ref):
    unit = units(call)
    err = unit.u * magnitude(ref[0]) + unit.tau * (1 + magnitude(call.arrays["q"]))
    flushed = np.abs(call.arrays["scale"])[:, None] < unit.tau  # times an infinite q it may be NaN
    return (round_to(np.where(flushed, inf, err), ref[0], "float32"),)


@reference("from_fp8")
def from_fp8_reference(call, tiling):
    with np.errstate(all="ignore"):
        return (call.arrays["q"] * call.arrays["scale"][:, None],)


# --------------------------------------------------------------------------------------------------- integers, bools
class MaskedAddOut(NamedTuple):
    s: Int32[A, "n"]
    kept: Bool[A, "n"]
    wide: Int64[A, "n"]


@spec(tiling={}, flops=lambda call: float(call.dims["n"]))
def masked_add(a: Int8[A, "n"], b: UInt8[A, "n"], keep: Bool[A, "n"]) -> MaskedAddOut:
    """s = a + b where keep, else 0; kept is keep itself; wide = 65536 a."""
    raise NotImplementedError


@masked_add.tolerance
def masked_add_bound(call, ref):
    return tuple(round_to(np.zeros(r.shape), r, d) for r, (_, d) in zip(ref, call.outputs.values(), strict=True))


@reference("masked_add")
def masked_add_reference(call, tiling):
    a, b, keep = (call.arrays[n] for n in ("a", "b", "keep"))
    return np.where(keep, a.astype(int) + b, 0), keep, a.astype(int) * 65536


# ----------------------------------------------------------------------------------------------- labels, page tables
class PickRowsOut(NamedTuple):
    y: Float[A, "picked n"]


@spec(
    tiling={},
    flops=lambda call: 0.0,
    positive=("rows",),
    require=[
        Rule(
            lambda call: bool(((call.arrays["rows_of"] < call.dims["rows"]) & (call.arrays["rows_of"] >= -1)).all()),
            "rows_of must name rows of pool, or be -1",
            values=True,
        )
    ],
)
def pick_rows(pool: Float[A, "rows n"], rows_of: Int[A, "picked"], *, ignore: bool = False) -> PickRowsOut:
    """y = the rows of pool that rows_of names, zeros where it is -1."""
    raise NotImplementedError


@pick_rows.tolerance
def pick_rows_bound(call, ref):
    return (np.zeros(ref[0].shape),)


@reference("pick_rows")
def pick_rows_reference(call, tiling):
    rows = call.arrays["rows_of"]
    return (np.where((rows >= 0)[:, None], call.arrays["pool"][rows], 0.0),)


# ------------------------------------------------------------------------------------- a product of 8-bit numbers
class ProductOut(NamedTuple):
    c: Float32[A, "m n"]


@spec(
    dtypes=("float8_e4m3fn", "float8_e5m2", "int8"),
    own_dtype=("b",),
    tiling={},
    flops=lambda call: 2.0 * call.dims["m"] * call.dims["n"] * call.dims["k"],
    typical={"m": 64, "n": 64, "k": 64},
)
def product(a: Num[A, "m k"], b: Num[A, "k n"], scale: Float32[A, "m"]) -> ProductOut:
    """c = (a b) scale."""
    raise NotImplementedError


@product.tolerance
def product_bound(call, ref):
    unit = units(call)
    size = magnitude(call.arrays["a"]) @ magnitude(call.arrays["b"])
    scale = magnitude(call.arrays["scale"])[:, None]
    err = (call.dims["k"] + 1) * unit.u * size * scale + unit.tau * (1 + size)
    return (round_to(np.where(size * scale < unit.huge, err, inf), ref[0], "float32"),)


@reference("product")
def product_reference(call, tiling):
    a, b, scale = call.arrays.values()
    with np.errstate(all="ignore"):
        return ((a @ b) * scale[:, None],)


product.sample("square", dims={"m": 4, "n": 4, "k": 4})


# ------------------------------------------------------------------------- an array of fewer bits beside the op's dtype
class ScoresOut(NamedTuple):
    s: Float32[A, "n"]


@spec(tiling={}, flops=lambda call: 2.0 * call.dims["n"], or_dtypes={"k": ("float8_e4m3fn", "float8_e5m2")})
def scores(q: Float[A, "n"], k: Float[A, "n"]) -> ScoresOut:
    """s = q k."""
    raise NotImplementedError


@scores.tolerance
def scores_bound(call, ref):
    unit, (s,) = units(call), ref
    q, k = (magnitude(call.arrays[n]) for n in "qk")
    err = unit.u * magnitude(s) + unit.tau * (1 + q + k)
    return (round_to(np.where(magnitude(s) < unit.huge, err, inf), s, call.outputs["s"][1]),)


@reference("scores")
def scores_reference(call, tiling):
    with np.errstate(all="ignore"):
        return (call.arrays["q"] * call.arrays["k"],)
