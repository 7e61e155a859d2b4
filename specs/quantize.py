"""Arrays as codes of 8 bits, each block with one scale, of which codes and scales give them back: x = q scale, nearly.

    scale = max |x| / L,    q = x / scale, no further from 0 than L, rounded to nearest, ties to even

of each block of (height, width), where L is the largest number of the codes' dtype: 448, 57344 or 127.
"""

from __future__ import annotations

from math import frexp, inf, ldexp, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Num

from portakern.spec import Extent, Rule, Tile, spec
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import DType, Range
from portakern.spec.tolerance import KAPPA, magnitude, units

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")

CODES = ("float8_e4m3fn", "float8_e5m2", "int8")

LEAST_SCALE = 2.0**-126
"""No scale is below it: float32's least normal number, whose inverse is a number too."""


class QuantizeOut(NamedTuple):
    q: Num[A, "row_blocks*height column_blocks*width"]
    scale: Float32[A, "row_blocks column_blocks"]


COMPUTED = ("scales", "scale_ub", "scale_floor")

GIVEN_OR_COMPUTED = Rule(
    lambda call: (
        call.arrays["static_scale"] is None
        or all(call.options[name] == call.spec.option(name).default for name in COMPUTED)
    ),
    f"static_scale is the scale: leave out {', '.join(COMPUTED)}, which say how one is computed",
)


def scales_are_scales(call: Call) -> bool:
    """Whether given scales have an inverse that float32 holds."""
    given = call.arrays["static_scale"]
    return given is None or bool(((given >= LEAST_SCALE) & (given <= 1 / LEAST_SCALE)).all())


@spec(
    tiling={"block_rows": Tile(16, 256), "block_n": Tile(128, 32768, of="width")},
    result_dtype={"q": "to"},
    codes=("q",),
    require=(
        GIVEN_OR_COMPUTED,
        Rule(scales_are_scales, "static_scale must be from 2^-126 to 2^126 everywhere", values=True),
    ),
    apart=("row_blocks", "column_blocks"),
    typical={"row_blocks": 4096, "height": 1, "column_blocks": 32, "width": 128},
    flops=lambda call: 3.0 * prod(call.dims[d] for d in ("row_blocks", "height", "column_blocks", "width")),
)
def quantize(
    x: Float[A, "row_blocks*height column_blocks*width"],
    static_scale: Float32[A, "#row_blocks #column_blocks"] | None = None,
    *,
    height: Annotated[int, Extent()] = 1,
    width: Annotated[int, Extent()] = 128,
    to: Annotated[Any, DType(CODES)] = "float8_e4m3fn",
    scales: Literal["float32", "power_of_two"] = "float32",
    scale_ub: Annotated[float, Range(0.0, open=True, typical=(1.0, 1e-2, 1e4))] | None = None,
    scale_floor: Annotated[float, Range(0.0, 2.0**100, typical=(1 / (448 * 512), 1.0, 0.0))] = 0.0,
) -> QuantizeOut:
    """Codes of 8 bits and the scales of their blocks, for which x is about q scale.

    A block is (height, width). (1, n) is a scale for each row, as of a token; (1, 128) one for each group of 128
    numbers of a row; (m, n) one for the whole tensor; (128, 128) those of weights beside such groups. Of an array with
    more axes a caller passes the view of two.

    L is the largest number of ``to``: 448 of float8_e4m3fn, 57344 of float8_e5m2, 127 of int8, whose codes are -127 to
    127. In float32 (float64 for float64):

        scale = max |x| / L of a block, 1 of a block of zeros
        q = x / scale, and L or -L where that is further from 0, rounded to nearest, ties to even

    Args:
      x: (m, n), any strides.
      static_scale: (m / height or 1, n / width or 1), scales that were measured before: nothing of x is looked at to
        find them. Between 2^-126 and 2^126.
      height, width: of a block; they divide m and n.
      to: the dtype of the codes.
      scales: "power_of_two" takes the least power of two that is no less than max |x| / L: what ue8m0 can hold.
        Nothing is rounded then but the codes.
      scale_ub: max |x| counts as no more than this, so that one outlier does not take the digits of all: it saturates.
        vLLM's option of this name.
      scale_floor: scales are no less, those of zeros neither; with "power_of_two" the least power of two that is no
        less. vLLM has 1 / (L 512).

    Returns:
      q: the shape of x and the dtype ``to``. scale: (m / height, n / width), float32; given ones as they are.
      No scale is below 2^-126. A NaN makes the scale and all codes of its block NaN, and beside given scales its own
      code; an infinity without scale_ub makes the scale inf, the finite codes of its block 0 and its own NaN, and with
      one or beside given scales L of its sign. int8 has no NaN: nothing is promised of a code that would be.
      Nothing is promised of a block whose max |x| is subnormal.
    """
    raise NotImplementedError


def blocks_of(call: Call, x: np.ndarray) -> np.ndarray:
    """(row_blocks, height, column_blocks, width), a view."""
    return x.reshape([call.dims[name] for name in ("row_blocks", "height", "column_blocks", "width")])


def for_each_number(call: Call, scale: np.ndarray) -> np.ndarray:
    """Scales, one for each number of x: (m, n)."""
    dims = call.dims
    wide = np.broadcast_to(
        scale[:, None, :, None], [dims[n] for n in ("row_blocks", "height", "column_blocks", "width")]
    )
    return wide.reshape(dims["row_blocks"] * dims["height"], dims["column_blocks"] * dims["width"])


def largest(call: Call) -> float:
    """L."""
    return DTYPES[call.options["to"]].largest


class ScaleLimits(NamedTuple):
    """Between which computed scales lie, and what that of zeros is."""

    least: float
    most: float
    zeros: float


def scale_limits(call: Call) -> ScaleLimits:
    """The limits of scales, and that of max |x| as a limit of scales: dividing and rounding up to powers of two are
    monotone."""
    floor, limit = call.options["scale_floor"], call.options["scale_ub"]
    least = max(floor, LEAST_SCALE)
    most = inf if limit is None else limit / largest(call)
    if call.options["scales"] == "power_of_two":
        least, most = power_above(least), most if most == inf else power_above(most)
    return ScaleLimits(least, most, least if floor else 1.0)


def power_above(x: float) -> float:
    """The least power of two that is no less than x."""
    mantissa, exponent = frexp(x)
    return ldexp(1.0, exponent - (mantissa == 0.5))


def faint(call: Call) -> np.ndarray:
    """Of which blocks max |x| may be taken for 0: (row_blocks, column_blocks)."""
    top = np.abs(blocks_of(call, call.arrays["x"])).max((1, 3))
    return (top > 0) & (top < units(call).tau)


@quantize.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of a scale s, and of v = x / s before it is rounded to a code:

        s: 4u s      v: (4u + 5u) |v| + tau (1 / s + 1)

    max |x| is exact; the division by L is 2 ulp, and so is that by s, or its inverse is and the product rounds once
    more; x may be read as 0 where it is subnormal, and v may flush. A given scale errs by nothing, a power of two
    neither, by which also x / s is exact: what is left of E then is below every spacing of codes, so that there is one
    right code. Clipping moves no value further from another.

    A code that would be NaN is unsure in int8.
    """
    q, scale = ref
    unit, exact = units(call), call.options["scales"] == "power_of_two"
    given = call.arrays["static_scale"] is not None
    share = 0.0 if exact else 5 * unit.u if given else 9 * unit.u
    with np.errstate(all="ignore"):
        wide = for_each_number(call, scale)
        err = share * magnitude(q) + np.where(wide < inf, unit.tau * (1 / wide + 1), 0.0)
        of_scale = np.zeros(scale.shape) if exact or given else 4 * unit.u * magnitude(scale)
    if not given:
        of_scale = np.where(faint(call), inf, of_scale)
        err = np.where(for_each_number(call, faint(call)), inf, err)
    unsure = np.isnan(q) & (call.options["to"] == "int8")
    return np.where(unsure, inf, err), of_scale


@quantize.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of a scale: that of two divisions, 2 KAPPA u of it. A code is right or wrong, and not measured."""
    exact = call.arrays["static_scale"] is not None or call.options["scales"] == "power_of_two"
    return np.zeros(ref[0].shape), (0.0 if exact else 2 * KAPPA * units(call).u) * magnitude(ref[1])


# --------------------------------------------------------------------------------------------------------------- values
@quantize.values("static_scale")
def spread_scales(rng, shape, dims, options):
    """Scales that take some of the numbers to the ends of the codes, and others to subnormal ones."""
    return np.exp2(rng.uniform(-10, 3, shape)) * rng.choice([1.0, 2.0**-20, 2.0**20], shape)


# --------------------------------------------------------------------------------------------------------------- edges
ROWS = {"row_blocks": (1, 5), "height": (1, 1), "column_blocks": (1, 4), "width": (1, 140)}
BLOCKS = {"row_blocks": (1, 3), "height": (1, 9), "column_blocks": (1, 3), "width": (1, 40)}
EIGHT = {"height": 1, "width": 8}


@quantize.edge(dims=BLOCKS, absent=("static_scale",))
def blocks_of_zeros(arrays, rng, options):
    """The scale of zeros is 1, and not 0, or the floor."""
    arrays["x"][...] = 0


@quantize.edge(dims=BLOCKS, absent=("static_scale",))
def a_nan_in_a_block(arrays, rng, options):
    """A NaN reaches the scale and all codes of its block, and no others."""
    x = arrays["x"]
    x[rng.integers(x.shape[0]), rng.integers(x.shape[1])] = np.nan


@quantize.edge(dims=BLOCKS, absent=("static_scale",), options={"scale_ub": None})
def an_infinity_in_a_block(arrays, rng, options):
    """The scale is infinite, other codes of the block are 0, and its own is NaN."""
    x = arrays["x"]
    x[rng.integers(x.shape[0]), rng.integers(x.shape[1])] = rng.choice([inf, -inf])


@quantize.edge(dims=BLOCKS, absent=("static_scale",), options={"scale_ub": 1.0})
def infinities_under_a_limit(arrays, rng, options):
    """They saturate, with numbers beside them."""
    x = arrays["x"]
    x[rng.random(x.shape) < 0.2] = rng.choice([inf, -inf])


@quantize.edge(dims=BLOCKS, given=("static_scale",))
def special_numbers_beside_given_scales(arrays, rng, options):
    """Infinities saturate, and a NaN reaches its own code alone."""
    x = arrays["x"]
    x[rng.random(x.shape) < 0.2] = rng.choice([inf, -inf, np.nan])


@quantize.edge(dims=ROWS, options={"scales": "power_of_two"})
def ties(arrays, rng, options):
    """Numbers half way between two codes, of which the even one is right: of each binade of the codes."""
    x, kind = arrays["x"], DTYPES[options["to"]]
    every = np.arange(256, dtype=np.uint8).view(kind.numpy).astype(np.float64)
    codes = np.unique(every[np.abs(every) <= kind.largest])
    x[...] = rng.choice((codes[1:] + codes[:-1]) / 2, x.shape)
    x[:, 0] = kind.largest


quantize.edge(dims=ROWS, absent=("static_scale",), options={"scales": "power_of_two", "to": "int8"})(ties)


@quantize.edge(dims=ROWS, absent=("static_scale",), options={"scales": "power_of_two"})
def beside_a_power_of_two(arrays, rng, options):
    """max |x| is L 2^k, for which 2^k is the scale, or a bit more, for which it is 2^(k + 1)."""
    x, most = arrays["x"], DTYPES[options["to"]].largest
    x *= 1e-3
    rows = np.arange(x.shape[0])
    x[rows, rng.integers(x.shape[1], size=rows.size)] = (
        most * 2.0 ** rng.integers(-9, -3, rows.size) * rng.choice([1.0, 1 + 2.0**-7], rows.size)
    )


@quantize.edge(dims=ROWS, absent=("static_scale",), regime="wide")
def far_apart(arrays, rng, options):
    """Numbers of all sizes in one block: some codes are subnormal, or 0."""


@quantize.edge(dims=ROWS, given=("static_scale",), regime="wide")
def beyond_the_codes(arrays, rng, options):
    """Numbers too large for given scales take the last code of their sign."""
    arrays["x"][...] *= 64


@quantize.edge(dims={**ROWS, "width": (129, 600)}, absent=("static_scale",), smallest_tiles=True)
def rows_of_several_tiles(arrays, rng, options):
    """The greatest number stands in any tile, and each tile has its own size."""
    arrays["x"] *= 2.0 ** (np.arange(arrays["x"].shape[-1]) // 128)


@quantize.edge(
    dims={"row_blocks": (1, 2), "height": (9, 40), "column_blocks": (1, 2), "width": (100, 300)}, smallest_tiles=True
)
def blocks_of_several_tiles(arrays, rng, options):
    """One number is greater than all others, in any tile of the first block."""
    x = arrays["x"]
    x[rng.integers(x.shape[0]), rng.integers(x.shape[1])] = 100


@quantize.edge(dims={"row_blocks": (9, 30), "height": (1, 1), "column_blocks": (2, 5), "width": (8, 8)})
def many_groups_of_different_size(arrays, rng, options):
    """Each group has its own scale: those of its row or of the tensor are others."""
    arrays["x"] *= 2.0 ** rng.integers(-8, 6, (arrays["x"].shape[0], 1))


# ---------------------------------------------------------------------------------------------------------------- laws
KINDS = ({"to": "float8_e4m3fn"}, {"to": "float8_e5m2"}, {"to": "int8"}, {"scales": "power_of_two"})


def drawn_blocks(draw: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """An array of a few blocks, and the options of the call."""
    height, width = (1, draw.extent(1, 200)) if draw.extent(0, 1) else (draw.extent(1, 5), draw.extent(1, 40))
    x = draw.normal(height * draw.extent(1, 6), width * draw.extent(1, 4))
    return x, {"height": height, "width": width, **KINDS[draw.extent(0, 3)]}


@quantize.law
def powers_of_two_scale_exactly(run, draw):
    """2^k x has the codes of x, and 2^k times its scales."""
    x, options = drawn_blocks(draw)
    two = 2.0 ** draw.extent(0, 6)
    (q, scale), (q_scaled, scale_scaled) = run(x, **options), run(x * x.dtype.type(two), **options)
    draw.same_bits(q_scaled, q, "codes of 2^k x")
    draw.same_bits(scale_scaled, scale * scale.dtype.type(two), "scales of 2^k x")


@quantize.law
def blocks_are_independent(run, draw):
    """A block alone has the codes and the scale that it has among others."""
    x, options = drawn_blocks(draw)
    height, width = options["height"], options["width"]
    row, column = draw.extent(0, x.shape[0] // height - 1), draw.extent(0, x.shape[1] // width - 1)
    rows, columns = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
    (q, scale), (q_alone, scale_alone) = run(x, **options), run(np.ascontiguousarray(x[rows, columns]), **options)
    draw.same_bits(q_alone, q[rows, columns], "codes of a block alone")
    draw.same_bits(scale_alone, scale[row : row + 1, column : column + 1], "the scale of a block alone")


@quantize.law
def what_codes_and_scales_give_back_has_these_codes(run, draw):
    """q scale, quantised again: the same numbers, to the bit where scales are powers of two, and the same codes."""
    x, options = drawn_blocks(draw)
    x, options = x.astype(np.float32) if x.dtype.itemsize < 4 else x, {**options, "scales": "power_of_two"}

    def back(q, scale):
        tall = np.repeat(scale, options["height"], 0)
        return q.astype(x.dtype) * np.repeat(tall, options["width"], 1).astype(x.dtype)

    if draw.dtype not in ("float32", "float64"):
        return
    once = back(*run(x, **options))
    draw.same_bits(back(*run(once, **options)), once, "what codes and powers of two give back, quantised again")
    options["scales"] = "float32"
    q, scale = run(x, **options)
    draw.same_bits(run(back(q, scale), **options)[0], q, "codes of what codes and scales give back")


@quantize.law
def given_scales_that_are_those_found_give_the_same_codes(run, draw):
    """Powers of two that were found, given as they are: the same codes, and the scales back."""
    x, options = drawn_blocks(draw)
    q, scale = run(x, **{**options, "scales": "power_of_two"})
    given, returned = run(x, scale, **{**options, "scales": "float32"})
    draw.same_bits(given, q, "codes by given scales")
    draw.same_bits(returned, scale, "given scales")


@quantize.law
def one_given_scale_is_that_of_every_block(run, draw):
    """A scale of extent 1 counts for all blocks along its axis."""
    x, options = drawn_blocks(draw)
    options = {**options, "scales": "float32"}
    shape = x.shape[0] // options["height"], x.shape[1] // options["width"]
    one = np.full((1, 1), 0.25, np.float64 if draw.dtype == "float64" else np.float32)
    (q, scale), (q_whole, scale_whole) = run(x, one, **options), run(x, np.full(shape, one[0, 0]), **options)
    draw.same_bits(q, q_whole, "codes by one scale")
    draw.same_bits(scale, scale_whole, "one scale, for every block")


quantize.sample("groups", dims={"row_blocks": 3, "height": 1, "column_blocks": 2, "width": 8})
quantize.sample("tokens", dims={"row_blocks": 4, "height": 1, "column_blocks": 1, "width": 24}, options={"to": "int8"})
quantize.sample(
    "a_tensor",
    dims={"row_blocks": 1, "height": 5, "column_blocks": 1, "width": 12},
    options={"to": "float8_e5m2", "scales": "power_of_two"},
)
quantize.sample("given", dims={"row_blocks": 3, "height": 1, "column_blocks": 2, "width": 8}, given=("static_scale",))
