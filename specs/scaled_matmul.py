"""Matrix product of 8-bit numbers with scales: one for all, for each row and column, or for each block.

    c[i, j] = sum over blocks p of k of scale_a[i, p] scale_b[p, j] (sum over k in p of a[i, k] b[k, j]) + bias[j]

A scale multiplies what it belongs to, as in torch.nn.functional.scaled_mm and DeepGEMM. The bounds of sums that a
matrix unit keeps to fewer bits than float32's: Xie et al. 2025, "MMA-Sim"; blocks of 128: DeepSeek-AI 2024,
"DeepSeek-V3 technical report", section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Num

from portakern.spec import Extent, Rule, Tile, spec
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import DType
from portakern.spec.tolerance import KAPPA, magnitude, round_to, store_spread, units

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")

RUN, STEP, CUT = 128, 32, 2.0**-13
"""A matrix unit may keep sums of at most RUN products to 13 bits behind the point: in one step of STEP products every
one, and the sum before them, is cut at CUT of the largest, and so is the sum after them at CUT of itself (MMA-Sim, of
wgmma on Hopper)."""

MOST_WHOLE = 131071
"""The most products of two int8 whose sum int32 always holds: of -128 and -128, 2^14 each."""


class ScaledMatmulOut(NamedTuple):
    c: Float[A, "m n"]


def of_integers(call: Call) -> bool:
    """Whether the operands are integers."""
    return not DTYPES[call.dtype].floating


def scale_blocks(call: Call) -> tuple[int, int]:
    """(how many blocks of k have scales of their own, the width of each but the last): one of all k where both scales
    have the extent 1 along k."""
    k, width = call.dims["k"], call.dims["k_width"]
    if call.arrays["scale_a"].shape[1] == call.arrays["scale_b"].shape[-2] == 1:
        return 1, k
    return -(-k // width), width


def one_kind(call: Call) -> bool:
    """Whether both operands are floats, or both int8."""
    return DTYPES[call.dtype].floating == DTYPES[call.dtype_of("b")].floating


EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "int8")
OF_ONE_KIND = Rule(one_kind, "a and b must both be 8-bit floats, which may differ, or both int8; convert one of them")
INT32_HOLDS = Rule(
    lambda call: not of_integers(call) or scale_blocks(call)[1] <= MOST_WHOLE,
    f"int32 holds no sum of more than {MOST_WHOLE} products of int8; give blocks of k scales of their own",
)


@spec(
    tiling={"block_m": Tile(16, 2048, of="m"), "block_n": Tile(16, 2048, of="n"), "block_k": Tile(32, 4096, of="k")},
    dtypes=EIGHT_BITS,
    own_dtype=("b",),
    result_dtype={"c": "out_dtype"},
    require=[OF_ONE_KIND, INT32_HOLDS],
    positive=("k",),
    apart=("m", "n"),
    budget="flops",
    typical={"m": 4096, "n": 4096, "k": 4096, "m_width": 1, "n_width": 128, "k_width": 128},
    flops=lambda call: 2.0 * call.dims["m"] * call.dims["n"] * call.dims["k"],
)
def scaled_matmul(
    a: Num[A, "m k"],
    b: Num[A, "k n"],
    scale_a: Float32[A, "#m/m_width #k/k_width"],
    scale_b: Float32[A, "#k/k_width #n/n_width"],
    bias: Float32[A, "n"] | None = None,
    *,
    m_width: Annotated[int, Extent()] = 1,
    n_width: Annotated[int, Extent()] = 1,
    k_width: Annotated[int, Extent()] = 128,
    precision: Literal["promoted", "ieee", "fast"] = "promoted",
    out_dtype: Annotated[Any, DType()] = "bfloat16",
) -> ScaledMatmulOut:
    """c = the sum over blocks of k of (scale_a a) (scale_b b), + bias, rounded once.

    Products are exact in float32, and those of int8 are summed in int32 without an error. Scales are applied to the
    sum of a block, in float32, or, where neither operand has more than one along k, to the whole sum.

    Along each axis a scale array has the extent 1, one scale for all, or one for each block: ceil(extent / width), the
    last of which may be short. The recipes, with the widths (m, n, k) in the order of DeepGEMM's ``recipe``:

    ============================================== ================================== ===================
    torch.nn.functional.scaled_mm                  scale_a, scale_b                   widths
    ============================================== ================================== ===================
    TensorWise                                     (1, 1), (1, 1)                     any
    RowWise                                        (m, 1), (1, n)                     1, 1, any
    BlockWise1x128 with BlockWise128x128           (m, k / 128), (k / 128, n / 128)   1, 128, 128
    BlockWise1x128 with BlockWise1x128             (m, k / 128), (k / 128, n)         1, 1, 128
    BlockWise128x128 with BlockWise1x128           (m / 128, k / 128), (k / 128, n)   128, 1, 128
    BlockWise1x32                                  (m, k / 32), (k / 32, n)           1, 1, 32
    rows beside blocks                             (m, 1), (k / 128, n / 128)         1, 128, 128
    ============================================== ================================== ===================

    The widths are said, as by the names of torch's recipes and by DeepGEMM's ``recipe``, and not read off the shapes:
    3 scales for 300 elements may be of 100 each or of 128, and a wrong guess would be a wrong result. A shape that no
    width explains is refused.

    A NaN or an infinity in a reaches its row of c, one in b its column, one in a scale its block; 0 times an infinite
    scale is NaN. float8_e4m3fn has NaN and no infinity.

    Args:
      a: (m, k); b: (k, n), each float8_e4m3fn or float8_e5m2, or both int8. Weights (n, k) come as b.T; Hopper's and
        CDNA's matrix units want them so.
      scale_a: (1 or m / m_width, 1 or k / k_width); scale_b: (1 or k / k_width, 1 or n / n_width), float32, rounded up.
        Scales of float8_e8m0fnu are powers of two: convert them to float32, which holds each of them. No kernel reads
        swizzled or packed scales.
      bias: (n), float32, which holds 16-bit ones.
      m_width, n_width, k_width: rows, columns and elements along k that share a scale.
      precision: of the sums of products of 8-bit floats; those of int8 are exact. "promoted": of at most 128 products
        to 13 bits behind the point, as Hopper's matrix unit has them, which are then added in float32; "ieee": all in
        float32, where the unit cannot by products of float16, at half the rate; "fast": of any number to 13 bits, as
        with torch's ``use_fast_accum``.
      out_dtype: dtype of c.

    Returns:
      c: (m, n). k = 0 is refused.
    """
    raise NotImplementedError


# -------------------------------------------------------------------------------------------------------------- bounds
def spread_out(scale: np.ndarray, axis: int, width: int, extent: int) -> np.ndarray:
    """Scales repeated for each index along an axis of so many; 1 stays."""
    if scale.shape[axis] == 1:
        return scale
    return np.take(scale, np.arange(extent) // width, axis)


class Blocks(NamedTuple):
    """Some blocks of k, (blocks, m, n) each, or what broadcasts to it.

    Attributes:
      dot: a b; size: |a| |b|; squares: of the products; scale: scale_a scale_b; a, b: |scale_a|, |scale_b|.
    """

    dot: np.ndarray
    size: np.ndarray
    squares: np.ndarray
    scale: np.ndarray
    a: np.ndarray
    b: np.ndarray


AT_ONCE = 2**20
"""Elements of a result that are worked on together."""


def blocks(call: Call) -> Iterator[Blocks]:
    """The blocks of k, as many together as fit. The last one is filled up with zeros."""
    dims, (count, width) = call.dims, scale_blocks(call)
    (m, k), n = call.arrays["a"].shape, dims["n"]
    behind = (0, count * width - k)
    a = np.pad(call.arrays["a"], ((0, 0), behind)).reshape(m, count, width).transpose(1, 0, 2)
    b = np.pad(call.arrays["b"], (behind, (0, 0))).reshape(count, width, n)
    of_a = spread_out(call.arrays["scale_a"], 0, dims["m_width"], m).T[:, :, None]
    of_b = spread_out(call.arrays["scale_b"], 1, dims["n_width"], n)[:, None, :]
    some = max(AT_ONCE // (m * n), 1)
    for first in range(0, count, some):
        own = slice(first, first + some)
        x, y = a[own], b[own]
        left, right = (of[own] if len(of) > 1 else of for of in (of_a, of_b))
        squares = np.square(magnitude(x)) @ np.square(magnitude(y))
        yield Blocks(x @ y, magnitude(x) @ magnitude(y), squares, left * right, np.abs(left), np.abs(right))


def cut_of(call: Call) -> float:
    """What the matrix unit may cut off a sum of |products| of 1 in a block: of so many steps, each of STEP products and
    the sum before them, and the sum after."""
    if of_integers(call):
        return 0.0
    most = {"promoted": RUN, "fast": inf}.get(call.options["precision"], 0)
    run = min(scale_blocks(call)[1], call.dims["k"], most)
    return float(CUT * (STEP + 2) * np.ceil(run / STEP))


def bias_of(call: Call) -> np.ndarray:
    """The bias, 0 where there is none."""
    bias = call.arrays["bias"]
    return np.zeros(call.dims["n"]) if bias is None else bias


@scaled_matmul.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of c, with B blocks of w products along k, P = |a| |b| of a block and s its scale,

        B_c = E (1 + U) + U |c| + eta
        E = sum over blocks (((w + B + 10) u + cut) |s| P + lost) + 2 u |bias|
        cut = 34 ceil(r / 32) 2^-13, r = min(w, 128) of "promoted", w of "fast"; 0 of "ieee" and of int8
        E = sum over blocks ((B + 6) u |s| P + lost) + 2 u |bias|, of int8, whose sums int32 holds

    Products of 8-bit floats are exact in float32. w - 1 additions in a block, B - 1 of blocks, two products with
    scales, and the bias; what is left is for split-k partial sums. In a step of the matrix unit none of 32 products and
    the sum before them is larger than P, and each loses less than 2^-13 of the largest; the sum after them 2^-13 of
    itself. A run of r products has r / 32 steps, and of a block of several runs each loses that share of its own part
    of P. lost: tau P for a product of scales that is subnormal, tau (|scale_a| + |scale_b|) P for a scale that is, and
    tau. Nothing is promised where a sum, a scale, or a part of their product reaches 2^127, or infinities meet a scale
    that may be flushed.
    """
    unit, (count, width), bias = units(call), scale_blocks(call), bias_of(call)
    steps = (count + 6 if of_integers(call) else min(width, call.dims["k"]) + count + 10) * unit.u + cut_of(call)
    with np.errstate(all="ignore"):
        err = total = np.broadcast_to(magnitude(bias), ref[0].shape)
        err = 2 * unit.u * err
        unsure = np.zeros(ref[0].shape, bool)
        for of in blocks(call):
            scale, far = np.abs(of.scale), np.maximum(of.size, 1)
            lost = unit.tau * (of.size * (1 + of.a + of.b) + 1)
            err = err + (steps * magnitude(of.scale) * of.size + lost).sum(0)
            total = total + (scale * far).sum(0)
            beyond = (magnitude(of.a) * far >= unit.huge) | (magnitude(of.b) * far >= unit.huge)
            faint = (of.a < unit.tau) | (of.b < unit.tau) | (scale < unit.tau)
            unsure |= (beyond | (faint & (~np.isfinite(of.dot) | np.isinf(of.a) | np.isinf(of.b)))).any(0)
        unsure |= (total >= unit.huge) & np.isfinite(ref[0])
    return (round_to(np.where(unsure, inf, err), ref[0], call.outputs["c"][1]),)


@scaled_matmul.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """RMS error, with D the dot of a block of w products, S^2 its squared products, k = KAPPA u:

        sigma^2 = store^2 + sum s^2 (k^2 ((w / 3 + 4) D^2 + (w / 6 + 1) S^2 + B (D^2 + S^2) / 3) + noise^2) + lean^2
                  + (k c)^2
        lean = sum |s| R 2^-13 4 t |D| / P M        noise^2 = R (2^-13 M)^2 2 t        M = (|D| / R + S / R^1/2) / 2

    with 10 t for 4 t of "fast", whose sums leave products behind that a run's would hold, for R runs of at most 128
    (or, "fast", one of any length) of t = r / 32 steps each; w terms, noise and lean are 0 of int8. What a step cuts
    off leans to 0: half a spacing of a sum of size M from each of 32 products, of one sign as far as |D| is P. The
    factors are those with which the simulated unit stays between 0.1 and 1 of sigma, of normal, positive, wide and
    uniform values and 128 to 4096 products.
    """
    unit, c, (count, width) = units(call), magnitude(ref[0]), scale_blocks(call)
    width, promoted = min(width, call.dims["k"]), call.options["precision"] == "promoted"
    terms = 0 if of_integers(call) else width
    runs = np.ceil(width / RUN) if promoted else 1.0
    steps = np.ceil(width / runs / STEP)
    k2, variance, lean = (KAPPA * unit.u) ** 2, np.zeros(c.shape), np.zeros(c.shape)
    with np.errstate(all="ignore"):
        for of in blocks(call):
            scale, dot, squares = magnitude(of.scale), magnitude(of.dot), of.squares
            own = (terms / 3 + 4) * dot**2 + (terms / 6 + 1) * squares + count / 3 * (dot**2 + squares)
            own = k2 * own
            if cut_of(call):
                typical = CUT * (dot / runs + np.sqrt(squares / runs)) / 2
                own = own + runs * 2 * steps * np.square(typical)
                share = np.where(of.size > 0, dot / np.maximum(of.size, unit.tau), 0)
                lean = lean + (scale * runs * (4 if promoted else 10) * steps * share * typical).sum(0)
            variance = variance + (np.square(scale) * own).sum(0)
        variance = variance + np.square(lean) + k2 * np.square(c)
    return (np.hypot(store_spread(c, call.outputs["c"][1]), np.sqrt(variance)),)


@scaled_matmul.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Integers in all, scales and bias too, whose sums float32 holds, and of which a block's are below 2^13 where the
    matrix unit may cut them."""
    arrays = [x for x in call.arrays.values() if x is not None]
    if not all(np.isfinite(x).all() and (x == np.trunc(x)).all() for x in arrays):
        return (np.zeros(ref[0].shape, bool),)
    total, held = np.abs(np.broadcast_to(bias_of(call), ref[0].shape)), np.ones(ref[0].shape, bool)
    with np.errstate(all="ignore"):
        for of in blocks(call):
            total = total + (np.abs(of.scale) * of.size).sum(0)
            held &= ((of.a * of.b < 2.0**24) & (of.size < (2.0**13 if cut_of(call) else 2.0**24))).all(0)
    return (held & (total < 2.0**24),)


# --------------------------------------------------------------------------------------------------------------- edges
SMALL = {"m": (1, 40), "n": (1, 40), "k": (1, 140), "m_width": (1, 9), "n_width": (1, 9), "k_width": (20, 60)}
DEEPSEEK = {"m": (1, 20), "n": (100, 300), "k": (100, 520), "m_width": (1, 1), "n_width": (128, 128),
            "k_width": (128, 128)}  # fmt: skip
ONE_BLOCK = {"scale_a": ("k",), "scale_b": ("k",)}


def in_powers_of_2(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    """Scales of 1 to 32, of which two beside each other mostly differ."""
    for name in ("scale_a", "scale_b"):
        arrays[name][...] = 2.0 ** rng.integers(0, 6, arrays[name].shape)


def plant(array: np.ndarray, rng: np.random.Generator, values: tuple[float, ...]) -> None:
    """One of these numbers in any place; the greatest where integers have none such."""
    value = rng.choice(values) if array.dtype.kind == "f" else 127
    array[tuple(rng.integers(n) for n in array.shape)] = value


@scaled_matmul.edge(dims=SMALL)
def nan_and_inf_in_a_row(arrays, rng, options):
    """NaN and inf (NaN too in float8_e4m3fn) in a row of a reach that row of c alone."""
    plant(arrays["a"], rng, (np.nan, inf))


@scaled_matmul.edge(dims=SMALL)
def nan_in_a_column(arrays, rng, options):
    """NaN codes in a column of b, of either sign, reach that column of c alone."""
    plant(arrays["b"], rng, (np.nan, -np.nan))


@scaled_matmul.edge(dims=SMALL)
def a_scale_that_is_nan(arrays, rng, options):
    """A NaN or infinite scale reaches what it belongs to."""
    plant(arrays[rng.choice(["scale_a", "scale_b"])], rng, (np.nan, inf))


@scaled_matmul.edge(dims={**SMALL, "k": (100, 140)}, regime="integers")
def blocks_of_other_scales(arrays, rng, options):
    """A scale that is taken from the block beside, from the other operand, twice or upside down shows."""
    in_powers_of_2(arrays, rng)


@scaled_matmul.edge(
    dims={**SMALL, "m": (20, 60), "n": (20, 60), "k": (90, 140), "k_width": (32, 32)},
    regime="integers",
    smallest_tiles=True,
)
def blocks_that_no_tile_divides(arrays, rng, options):
    """Tiles with several scales, and the other way round."""
    in_powers_of_2(arrays, rng)


@scaled_matmul.edge(dims=DEEPSEEK, regime="integers")
def rows_of_128_beside_squares_of_128(arrays, rng, options):
    """As DeepSeek has them, the last blocks ragged."""
    in_powers_of_2(arrays, rng)


@scaled_matmul.edge(dims=DEEPSEEK, regime="integers", stretched={"scale_a": ("k",)})
def rows_beside_squares_of_128(arrays, rng, options):
    """One scale for each row of a, and blocks of b."""
    in_powers_of_2(arrays, rng)


@scaled_matmul.edge(dims={**SMALL, "k": (65, 300), "m_width": (1, 1), "n_width": (1, 1), "k_width": (32, 32)})
def blocks_of_32(arrays, rng, options):
    """The mx formats' blocks, whose scales are powers of two."""
    for name in ("scale_a", "scale_b"):
        arrays[name][...] = 2.0 ** rng.integers(-20, 20, arrays[name].shape)


@scaled_matmul.edge(dims={**SMALL, "k": (1, 300), "m_width": (1, 1), "n_width": (1, 1)}, stretched=ONE_BLOCK)
def a_scale_for_each_row_and_column(arrays, rng, options):
    """One block along k."""


@scaled_matmul.edge(
    dims={**SMALL, "k": (1, 300)}, stretched={"scale_a": ("m", "k"), "scale_b": ("n", "k")}, given=("bias",)
)
def a_scale_for_each_tensor(arrays, rng, options):
    """One number each."""


@scaled_matmul.edge(dims={**SMALL, "k": (1, 300)})
def the_largest_numbers(arrays, rng, options):
    """Scales as a quantiser gives them, for values at the end of the range; int8 sums of 127 127 need all of int32."""
    for name in ("a", "b"):
        arrays[name][...] = np.sign(arrays[name]) * 448
    arrays["scale_a"][...], arrays["scale_b"][...] = 1e-3, 1 / 448


@scaled_matmul.edge(dims={**SMALL, "n": (129, 140), "m": (129, 140), "k": (1, 20)}, smallest_tiles=True)
def many_tiles_both_ways(arrays, rng, options):
    """However tiles are numbered, each is computed once."""


@scaled_matmul.edge(dims=SMALL, given=("bias",), options={"out_dtype": "float32"}, regime="integers")
def integers_and_a_bias(arrays, rng, options):
    """Exact: the bias is added once, behind the scales."""
    for name in ("scale_a", "scale_b"):
        arrays[name][...] = 2.0 ** rng.integers(0, 3, arrays[name].shape)


LONG = {"m": (1, 3), "n": (1, 3), "k": (2048, 3000), "m_width": (1, 1), "n_width": (1, 1), "k_width": (128, 128)}


@scaled_matmul.edge(dims=LONG, options={"precision": "promoted", "out_dtype": "float32"}, stretched=ONE_BLOCK)
def long_sums_of_one_sign(arrays, rng, options):
    """A sum that never leaves a matrix unit of 13 bits loses a few hundredths of itself; one that does, less than a
    thousandth."""
    for name in ("a", "b"):
        arrays[name][...] = np.abs(arrays[name])
    arrays["scale_a"][...], arrays["scale_b"][...] = 1, 1


@scaled_matmul.edge(
    dims=LONG, options={"precision": "ieee", "out_dtype": "float32"}, stretched=ONE_BLOCK, regime="integers"
)
def whole_sums_beyond_13_bits(arrays, rng, options):
    """Of "ieee" they are exact: 128 128 beside 1 1 is more than 13 bits behind the point hold."""
    for name in ("a", "b"):
        arrays[name][...] = np.where(rng.random(arrays[name].shape) < 1 / 16, 128, 1)
    arrays["scale_a"][...], arrays["scale_b"][...] = 1, 1


# ---------------------------------------------------------------------------------------------------------------- laws
def drawn(draw: Any) -> tuple[np.ndarray, ...]:
    """a, b and scales of blocks of 32 along k."""
    m, k, n = draw.extent(2, 60), draw.extent(1, 100), draw.extent(1, 40)
    count = -(-k // 32)
    scale_a, scale_b = (np.exp2(draw.rng.uniform(-6, 6, s)).astype(np.float32) for s in ((m, count), (count, n)))
    return draw.normal(m, k), draw.normal(k, n), scale_a, scale_b


@scaled_matmul.law
def rows_are_independent(run, draw):
    """A row alone has the bits that it has among others."""
    a, b, scale_a, scale_b = drawn(draw)
    row = draw.extent(0, len(a) - 1)
    one = slice(row, row + 1)
    alone = run(a[one], b, scale_a[one], scale_b, k_width=32)
    draw.same_bits(alone, run(a, b, scale_a, scale_b, k_width=32)[one], "a row alone")


@scaled_matmul.law
def powers_of_two_scale_exactly(run, draw):
    """A scale that is doubled doubles c, to the bit."""
    a, b, scale_a, scale_b = drawn(draw)
    options, two = {"k_width": 32, "out_dtype": "float32"}, np.float32(2)
    once = run(a, b, scale_a, scale_b, **options)
    draw.same_bits(run(a, b, scale_a * two, scale_b, **options), once * two, "scale_a doubled")
    draw.same_bits(run(a, b, scale_a, scale_b * two, **options), once * two, "scale_b doubled")


@scaled_matmul.law
def one_scale_for_many(run, draw):
    """A scale that rows, or columns, share gives the bits that it gives repeated for each, and for blocks of them."""
    a, b, scale_a, scale_b = drawn(draw)
    m, n = len(a), b.shape[1]
    scale_a, scale_b = scale_a[:1], scale_b[:, :1]
    shared = run(a, b, scale_a, scale_b, k_width=32)
    for wide in (1, 7):
        each = np.repeat(scale_a, -(-m // wide), 0), np.repeat(scale_b, -(-n // wide), 1)
        found = run(a, b, *each, m_width=wide, n_width=wide, k_width=32)
        draw.same_bits(found, shared, f"a scale repeated for blocks of {wide}")


@scaled_matmul.law
def scales_of_one_are_none(run, draw):
    """Of small integers and scales of 1, the plain product, to the bit."""
    m, k, n = draw.extent(1, 40), draw.extent(1, 60), draw.extent(1, 40)
    a, b = draw.integers(-4, 4, m, k), draw.integers(-4, 4, k, n)
    one = np.ones((1, 1), np.float32)
    want = a.astype(np.float32) @ b.astype(np.float32)
    draw.same_bits(run(a, b, one, one, out_dtype="float32") + 0, want + 0, "integers and scales of 1")
    bias = np.zeros(n, np.float32)
    draw.same_bits(run(a, b, one, one, bias, out_dtype="float32") + 0, want + 0, "with a bias of 0")


EXTENTS = {"m": 3, "n": 4, "k": 7, "m_width": 1, "n_width": 1, "k_width": 128}
scaled_matmul.sample("tensors", dims=EXTENTS, stretched={"scale_a": ("m",), "scale_b": ("n",)})
scaled_matmul.sample("rows_and_columns", dims=EXTENTS, given=("bias",), options={"precision": "fast"})
scaled_matmul.sample(
    "blocks",
    dims={**EXTENTS, "n_width": 3, "k_width": 3},
    options={"out_dtype": "float32", "precision": "ieee"},
)
