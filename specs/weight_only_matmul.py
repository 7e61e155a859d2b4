"""Matrix product of rows in 16 or 32 bits with weights in codes of 8 or 4 bits, groups of which share a scale.

    c[i, j] = sum over groups p of k of scale_b[p, j] (sum over k in p of a[i, k] q[k, j]
                                                       - zeros[p, j] sum over k in p of a[i, k]) + bias[j]

q are the codes that b holds: the weight is scale_b (q - zeros). Weights alone in few bits: Frantar et al. 2022, "GPTQ";
Lin et al. 2023, "AWQ".

An op of its own, beside scaled_matmul: a has no scale here and one of other dtypes, two codes lie in a byte, and sums
are float32's, without a choice. Only the scales of groups along k, and how they are named, are common to both.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int8

from portakern.spec import Extent, Range, Rule, Tile, spec
from portakern.spec.options import DType
from portakern.spec.tolerance import KAPPA, magnitude, round_to, store_spread, units
from portakern.specs.scaled_matmul import AT_ONCE

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class WeightOnlyMatmulOut(NamedTuple):
    c: Float[A, "m n"]


def weight_groups(call: Call) -> tuple[int, int]:
    """(how many groups of k have scales or zeros of their own, the width of each but the last): one of all k where both
    have the extent 1 along k."""
    k, width, zeros = call.dims["k"], call.dims["k_width"], call.arrays["zeros"]
    if call.arrays["scale_b"].shape[0] == 1 and (zeros is None or zeros.shape[0] == 1):
        return 1, k
    return -(-k // width), width


def whole_bytes(call: Call) -> bool:
    """Whether no byte has codes of two groups."""
    count, width = weight_groups(call)
    return count == 1 or width % call.dims["codes_per_byte"] == 0


@spec(
    tiling={"block_m": Tile(16, 2048, of="m"), "block_n": Tile(16, 2048, of="n"), "block_k": Tile(32, 4096, of="k")},
    or_float32=("scale_b", "zeros", "bias"),
    result_dtype={"c": "out_dtype"},
    require=[
        Rule(
            whole_bytes,
            "k_width must be even where two codes share a byte (codes_per_byte=2): no byte has codes of two groups",
        )
    ],
    positive=("k",),
    apart=("m", "n"),
    budget="flops",
    typical={"m": 4096, "n": 4096, "k": 4096, "k_width": 128, "codes_per_byte": 1},
    flops=lambda call: 2.0 * call.dims["m"] * call.dims["n"] * call.dims["k"],
)
def weight_only_matmul(
    a: Float[A, "m k"],
    b: Int8[A, "k/codes_per_byte n"],
    scale_b: Float[A, "#k/k_width n"],
    zeros: Float[A, "#k/k_width n"] | None = None,
    bias: Float[A, "n"] | None = None,
    *,
    k_width: Annotated[int, Extent()] = 128,
    codes_per_byte: Annotated[int, Extent(), Range(1, 2)] = 1,
    out_dtype: Annotated[Any, DType()] | None = None,
) -> WeightOnlyMatmulOut:
    """c = a times the weights scale_b (q - zeros), + bias, summed in float32 (float64 for float64) and rounded once.

    No weight is rounded: codes are exact in each dtype of a, their products with a and the sums of a group are taken
    in float32, and the scale meets the sum of a group, or of a part of one. What the widely used kernels do, a weight
    scaled and rounded to 16 bits before it is multiplied, errs by 2^-9 or 2^-12 of each product, and is not offered.

    Codes of 8 bits are int8. Of 4 bits, byte t of a column has q[2 t] in its low half and q[2 t + 1] in its high one;
    without zeros they are two's complement, -8 to 7, with zeros unsigned, 0 to 15. Of an odd k the last high half
    counts nowhere. How the layouts of GPTQ, AWQ, ONNX and PyTorch map onto this one:
    docs/porting/weight_only_matmul.md.

    NaN and infinities in a reach their row of c, in scale_b, zeros and bias their column. What an infinity in scale_b
    or zeros, or in a beside zeros, gives there is not promised: NaN or an infinity.

    Args:
      a: (m, k).
      b: (k, n) int8, or (k / 2, n), rounded up, with codes_per_byte=2; an array of uint8 is given as a view of int8.
        Weights (n, k) come as b.T, and are read faster so by most GPUs.
      scale_b: (k / k_width, n), rounded up, or (1, n) for all of k; zeros: the same, in units of codes. Either may have
        one row beside groups of the other.
      bias: (n).
      scale_b, zeros and bias have the dtype of a, or are float32.
      k_width: elements along k that share a scale; even with codes_per_byte=2.
      codes_per_byte: 1, of 8 bits, or 2, of 4 bits.
      out_dtype: dtype of c; None: that of a.

    Returns:
      c: (m, n). k = 0 is refused.
    """
    raise NotImplementedError


# -------------------------------------------------------------------------------------------------------------- bounds
def decoded(b: np.ndarray, k: int, codes_per_byte: int, unsigned: bool) -> np.ndarray:
    """The codes (k, n) in float64 of bytes; ``unsigned``: those of 4 bits are 0 to 15, and not -8 to 7."""
    if codes_per_byte == 1:
        return b.astype(np.float64)
    whole = b.astype(np.int64)
    halves = np.stack([whole & 15, whole >> 4 & 15], 1)
    codes = halves.reshape(-1, b.shape[1])[:k]
    return (codes if unsigned else (codes ^ 8) - 8).astype(np.float64)


def codes_of(call: Call) -> np.ndarray:
    """A call's."""
    unsigned = call.arrays["zeros"] is not None
    return decoded(call.arrays["b"], call.dims["k"], call.dims["codes_per_byte"], unsigned)


class WeightGroups(NamedTuple):
    """Some groups of k, (groups, m, n) each, or what broadcasts to it.

    Attributes:
      scale, zero: |scale_b|, |zeros|; codes, row: sums of |q| and of |a|; dot, size, squares: of a q, of |a| |q| and of
        their squares, and each with that of a times a zero beside; infinite: whether a scale, a zero, or a row beside
        zeros is.
    """

    scale: np.ndarray
    zero: np.ndarray
    codes: np.ndarray
    row: np.ndarray
    dot: np.ndarray
    size: np.ndarray
    squares: np.ndarray
    infinite: np.ndarray


def groups(call: Call) -> Iterator[WeightGroups]:
    """The groups of k, as many together as fit. The last one is filled up with zeros."""
    (count, width), (m, k), n = weight_groups(call), call.arrays["a"].shape, call.dims["n"]
    behind = (0, count * width - k)
    a = np.pad(magnitude(call.arrays["a"]), ((0, 0), behind)).reshape(m, count, width).transpose(1, 0, 2)
    signed = np.pad(call.arrays["a"], ((0, 0), behind)).reshape(m, count, width).transpose(1, 0, 2)
    b = np.pad(codes_of(call), (behind, (0, 0))).reshape(count, width, n)
    zeros = call.arrays["zeros"]
    scale, zero = (
        np.broadcast_to(np.zeros((1, n)) if of is None else of, (count, n))[:, None, :]
        for of in (call.arrays["scale_b"], zeros)
    )
    some = max(AT_ONCE // (m * n), 1)
    for first in range(0, count, some):
        own = slice(first, first + some)
        x, y, z = a[own], np.abs(b[own]), magnitude(zero[own])
        row, squared = x.sum(2, keepdims=True), np.square(x)
        dot = signed[own] @ b[own] - zero[own] * signed[own].sum(2, keepdims=True)
        yield WeightGroups(
            magnitude(scale[own]), z, y.sum(1, keepdims=True), row, dot, x @ y + z * row,
            squared @ np.square(y) + np.square(z) * squared.sum(2, keepdims=True),
            np.isinf(scale[own]) | np.isinf(zero[own])
            | ((zeros is not None) & np.isinf(signed[own]).any(2, keepdims=True)),
        )  # fmt: skip


def bias_of(call: Call) -> np.ndarray:
    """|bias|, 0 where there is none."""
    bias = call.arrays["bias"]
    return np.zeros(call.dims["n"]) if bias is None else magnitude(bias)


@weight_only_matmul.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of c, with B groups of w products along k, P = |a| |q| + |z| sum |a| of a group and s its scale,

        B_c = E (1 + U) + U |c| + eta
        E = sum over groups ((w + B + 8) u |s| P + lost) + 2 u |bias|

    A product and the w - 1 additions after it: w u of |a| |q|. The sum of a, its product with the zero and the
    difference: (w + 1) u of |z| sum |a|, and u of the whole. Then the scale, B - 1 additions of groups and that of the
    bias: w + B + 2 at most. A code less its zero in float32 before the product errs no more. The rest is for parts of
    groups and split-k partial sums.

    lost, of numbers that may be taken for 0: |s| (flush (sum |q| + w |z|) + tau (2 w + 4 + sum |a|)) of operands,
    products and a zero, and tau (P + 2) of a scale, and of what it makes. Nothing is promised where a sum or a part of
    its product with the scale reaches 2^127, of infinite scales and zeros, and where an infinity meets zeros, or a
    scale that may be flushed.
    """
    unit, (count, width), bias = units(call), weight_groups(call), bias_of(call)
    width = min(width, call.dims["k"])
    with np.errstate(all="ignore"):
        err, total = np.broadcast_to(2 * unit.u * bias, ref[0].shape), np.broadcast_to(bias, ref[0].shape)
        unsure = np.zeros(ref[0].shape, bool)
        for of in groups(call):
            operands = unit.flush * (of.codes + width * of.zero) + unit.tau * (2 * width + 4 + of.row)
            lost = of.scale * operands + unit.tau * (of.size + 2)
            err = err + ((width + count + 8) * unit.u * of.scale * of.size + lost).sum(0)
            total = total + (of.scale * np.maximum(of.size, 1)).sum(0)
            faint = (of.scale < unit.tau) & ~np.isfinite(of.dot)
            beyond = (of.size >= unit.huge) & np.isfinite(of.dot)
            unsure |= (faint | beyond | of.infinite).any(0)
        unsure |= (total >= unit.huge) & np.isfinite(ref[0])
    return (round_to(np.where(unsure, inf, err), ref[0], call.outputs["c"][1]),)


@weight_only_matmul.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """RMS error, with D the dot of a group of w products less its zero's, S^2 the squares of both, k = KAPPA u:

        sigma^2 = store^2 + sum s^2 k^2 ((w / 3 + 4) D^2 + (w / 6 + 1) S^2 + B (D^2 + S^2) / 3 + 4 (|z| sum |a|)^2 / w)
                  + (k c)^2 + flush^2 ...

    as scaled_matmul's sums in float32 have it. The last term in the sum is of what zeros add and take away again.
    """
    unit, c, (count, width) = units(call), magnitude(ref[0]), weight_groups(call)
    width = min(width, call.dims["k"])
    k2, variance = (KAPPA * unit.u) ** 2, np.zeros(c.shape)
    with np.errstate(all="ignore"):
        for of in groups(call):
            d2, far = np.square(magnitude(of.dot)), np.square(of.zero * of.row)
            own = (width / 3 + 4) * d2 + (width / 6 + 1) * of.squares + count / 3 * (d2 + of.squares) + 4 * far / width
            lost = unit.flush**2 * (np.square(of.codes) + width * np.square(of.zero))
            variance = variance + (np.square(of.scale) * (k2 * own + lost)).sum(0)
        variance = variance + k2 * np.square(c)
    return (np.hypot(store_spread(c, call.outputs["c"][1]), np.sqrt(variance)),)


@weight_only_matmul.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Integers in all, scales, zeros and bias too, whose sums the accumulator holds."""
    arrays = [call.arrays[name] for name in ("a", "scale_b", "zeros", "bias")]
    held = np.ones(ref[0].shape, bool)
    if not all(x is None or (np.isfinite(x).all() and (x == np.trunc(x)).all()) for x in arrays):
        return (~held,)
    most, total = 1 / units(call).u, np.broadcast_to(bias_of(call), ref[0].shape)
    for of in groups(call):
        held &= (of.size < most).all(0)
        total = total + (of.scale * of.size).sum(0)
    return (held & (total < most),)


# --------------------------------------------------------------------------------------------------------------- edges
SMALL = {"m": (1, 40), "n": (1, 40), "k": (1, 140), "k_width": (32, 60)}
SEVERAL = {**SMALL, "k": (90, 300), "k_width": (32, 32)}
FOUR_BITS = {"codes_per_byte": (2, 2)}
EIGHT_BITS = {"codes_per_byte": (1, 1)}


def in_powers_of_2(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    """Scales of 1 to 16, of which two beside each other mostly differ."""
    arrays["scale_b"][...] = 2.0 ** rng.integers(0, 5, arrays["scale_b"].shape)


def plant(array: np.ndarray, rng: np.random.Generator, values: tuple[float, ...]) -> None:
    """One of these numbers in any place."""
    array[tuple(rng.integers(n) for n in array.shape)] = rng.choice(values)


@weight_only_matmul.edge(dims=SMALL)
def nan_and_inf_in_a_row(arrays, rng, options):
    """NaN and inf in a row of a reach that row of c alone."""
    plant(arrays["a"], rng, (np.nan, inf))


@weight_only_matmul.edge(dims=SMALL)
def a_scale_that_is_nan(arrays, rng, options):
    """A NaN among scales reaches its column."""
    plant(arrays["scale_b"], rng, (np.nan,))


@weight_only_matmul.edge(dims=SMALL, given=("zeros",))
def a_zero_that_is_nan(arrays, rng, options):
    """A NaN among zeros reaches its column."""
    plant(arrays["zeros"], rng, (np.nan,))


@weight_only_matmul.edge(dims={**SEVERAL, **EIGHT_BITS}, regime="integers")
def groups_of_other_scales(arrays, rng, options):
    """A scale that is taken from the group beside, twice or upside down shows."""
    in_powers_of_2(arrays, rng)


@weight_only_matmul.edge(dims={**SEVERAL, **FOUR_BITS}, regime="integers")
def groups_of_other_scales_in_4_bits(arrays, rng, options):
    """Halves of a byte that change places, or lose their sign, show."""
    in_powers_of_2(arrays, rng)


@weight_only_matmul.edge(dims={**SEVERAL, **FOUR_BITS}, given=("zeros",), regime="integers")
def zeros_of_codes_of_4_bits(arrays, rng, options):
    """Unsigned codes, and a zero of each group."""
    in_powers_of_2(arrays, rng)
    arrays["zeros"][...] = rng.integers(0, 16, arrays["zeros"].shape)


@weight_only_matmul.edge(dims={**SEVERAL, **EIGHT_BITS}, given=("zeros",), regime="integers")
def zeros_of_codes_of_8_bits(arrays, rng, options):
    """Signed codes, and zeros of either sign."""
    in_powers_of_2(arrays, rng)
    arrays["zeros"][...] = rng.integers(-128, 128, arrays["zeros"].shape)


@weight_only_matmul.edge(dims=SEVERAL, given=("zeros",), regime="integers", stretched={"scale_b": ("k",)})
def zeros_of_groups_beside_scales_of_columns(arrays, rng, options):
    """Only zeros have groups."""
    in_powers_of_2(arrays, rng)
    arrays["zeros"][...] = rng.integers(0, 16, arrays["zeros"].shape)


@weight_only_matmul.edge(dims={**SMALL, "k": (1, 300)}, regime="integers", stretched={"scale_b": ("k",)})
def a_scale_for_each_column(arrays, rng, options):
    """One group along k."""
    in_powers_of_2(arrays, rng)


@weight_only_matmul.edge(dims={**SMALL, **FOUR_BITS, "k": (65, 65), "k_width": (32, 32)}, regime="integers")
def an_odd_k(arrays, rng, options):
    """The last byte has one code; its other half reaches nothing."""
    arrays["b"][-1] = rng.integers(-128, 128, arrays["b"].shape[1])
    in_powers_of_2(arrays, rng)


@weight_only_matmul.edge(
    dims={**SEVERAL, "m": (20, 60), "n": (20, 60), "k_width": (48, 48)}, regime="integers", smallest_tiles=True
)
def groups_that_no_step_divides(arrays, rng, options):
    """Each group has steps of its own, the last of them ragged."""
    in_powers_of_2(arrays, rng)


@weight_only_matmul.edge(dims={**SMALL, "k": (500, 1100), "k_width": (128, 128), "m": (1, 4)}, given=("bias", "zeros"))
def few_rows_and_many_groups(arrays, rng, options):
    """Partial sums of k, and a bias that is added once."""


@weight_only_matmul.edge(dims=SMALL, regime="integers", given=("bias",), options={"out_dtype": "float32"})
def integers_and_a_bias(arrays, rng, options):
    """Exact: the bias is added once, behind the scales."""
    in_powers_of_2(arrays, rng)


@weight_only_matmul.edge(dims={**SMALL, "n": (129, 140), "m": (129, 140), "k": (1, 20)}, smallest_tiles=True)
def many_tiles_both_ways(arrays, rng, options):
    """However tiles are numbered, each is computed once."""


LONG = {"m": (1, 3), "n": (1, 3), "k": (2048, 3000), "k_width": (128, 128)}


@weight_only_matmul.edge(dims=LONG, options={"out_dtype": "float32"})
def long_sums_of_one_sign(arrays, rng, options):
    """A weight that is rounded to 16 bits before its product errs in each product by far more than the sum does."""
    arrays["a"][...] = np.abs(arrays["a"])
    arrays["b"][...] = np.abs(arrays["b"] % 120)
    arrays["scale_b"][...] = 1 + rng.random(arrays["scale_b"].shape) / 4


# ---------------------------------------------------------------------------------------------------------------- laws
def drawn(draw: Any, most: int = 140) -> tuple[np.ndarray, ...]:
    """a, b of 8 bits and scales of groups of 32 along k."""
    m, k, n = draw.extent(2, 60), draw.extent(1, most), draw.extent(1, 40)
    b = draw.integers(-128, 127, k, n, dtype="int8")
    scale = np.exp2(draw.rng.uniform(-6, 6, (-(-k // 32), n))).astype(np.float32)
    return draw.normal(m, k), b, scale


@weight_only_matmul.law
def rows_are_independent(run, draw):
    """A row alone has the bits that it has among others."""
    a, b, scale = drawn(draw, 700)
    row = draw.extent(0, len(a) - 1)
    draw.same_bits(run(a[row : row + 1], b, scale, k_width=32), run(a, b, scale, k_width=32)[row : row + 1], "a row")


@weight_only_matmul.law
def powers_of_two_scale_exactly(run, draw):
    """Scales that are doubled double c, to the bit."""
    a, b, scale = drawn(draw)
    once = run(a, b, scale, k_width=32)
    draw.same_bits(run(a, b, scale * np.float32(2), k_width=32), once * once.dtype.type(2), "scale_b doubled")


@weight_only_matmul.law
def whole_columns_are_groups_alike(run, draw):
    """Of integers, a scale for all of k gives what it gives repeated for each group."""
    m, k, n = draw.extent(1, 40), draw.extent(1, 140), draw.extent(1, 40)
    a, b = draw.integers(-4, 4, m, k), draw.integers(-8, 7, k, n, dtype="int8")
    scale = np.exp2(draw.rng.integers(0, 3, (1, n))).astype(np.float32)
    each = np.repeat(scale, -(-k // 32), 0)
    draw.same_bits(run(a, b, each, k_width=32) + 0, run(a, b, scale, k_width=32) + 0, "a scale repeated")


@weight_only_matmul.law
def codes_of_4_bits_are_those_of_8(run, draw):
    """Of integers, codes of 4 bits in pairs give what they do as int8; unsigned ones beside zeros of 8 too."""
    m, k, n = draw.extent(1, 40), draw.extent(1, 140), draw.extent(1, 40)
    a, codes = draw.integers(-4, 4, m, k), draw.rng.integers(-8, 8, (k + k % 2, n))
    scale, eight = np.ones((1, n), np.float32), np.full((1, n), 8, np.float32)
    want = run(a, codes[:k].astype(np.int8), scale, out_dtype="float32") + 0
    signed = (codes[::2] & 15 | codes[1::2] << 4).astype(np.int8)
    found = run(a, signed, scale, codes_per_byte=2, out_dtype="float32")
    draw.same_bits(found + 0, want, "pairs of signed codes")
    found = run(a, signed ^ np.int8(-120), scale, eight, codes_per_byte=2, out_dtype="float32")
    draw.same_bits(found + 0, want, "pairs of unsigned codes less 8")


EXTENTS = {"m": 3, "n": 4, "k": 7, "k_width": 4, "codes_per_byte": 1}
weight_only_matmul.sample(
    "columns", dims=EXTENTS, stretched={"scale_b": ("k",)}, given=("bias",), options={"out_dtype": "float32"}
)
weight_only_matmul.sample("eight_bits", dims=EXTENTS)
weight_only_matmul.sample("four_bits", dims={**EXTENTS, "codes_per_byte": 2}, given=("zeros", "bias"))
