"""Rotary position embedding: each pair of a head's numbers, turned by the angle of its token; and its gradient.

y_a = x_a cos - x_b sin and y_b = x_b cos + x_a sin; the gradient is the turn, transposed: by cos and -sin.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Rule, Tile, spec
from portakern.spec.tolerance import KAPPA, Units, format_of, magnitude, round_to, store_spread, units
from portakern.specs._gradients import doubled

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class RopeOut(NamedTuple):
    y: Float[A, "batch seq heads d"]


PAIRS_FIT = Rule(
    lambda call: 2 * call.dims["pairs"] <= call.dims["d"],
    "cos and sin have more columns than d / 2 pairs; pass one column a pair (of tables whose halves repeat each other, "
    "the first half: cos[..., : d // 2])",
    mends=lambda dims: {"d": max(dims["d"], 2), "pairs": max(min(dims["pairs"], dims["d"] // 2), 1)},
)


@spec(
    tiling={"block_seq": Tile(4, 256, of="seq"), "block_heads": Tile(8, 256, of="heads")},
    or_float32=("cos", "sin"),
    require=(PAIRS_FIT,),
    positive=("d", "pairs"),
    aliases={"y": "x"},
    apart=("batch", "seq", "heads"),
    vjp="rope_vjp",
    typical={"batch": 1, "seq": 4096, "heads": 32, "d": 128, "pairs": 64},
    flops=lambda call: 6.0 * call.dims["batch"] * call.dims["seq"] * call.dims["heads"] * call.dims["pairs"],
)
def rope(
    x: Float[A, "batch seq heads d"],
    cos: Float[A, "#batch seq pairs"],
    sin: Float[A, "#batch seq pairs"],
    *,
    interleaved: bool = False,
) -> RopeOut:
    """y_a = x_a cos - x_b sin and y_b = x_b cos + x_a sin for each pair (a, b) of a head's numbers, in float32.

    With P pairs, the i-th is (i, P + i), the halves of Llama and GPT-NeoX, or with interleaved (2 i, 2 i + 1), the
    neighbours of GPT-J. What lies beyond the 2 P first numbers of a head passes through. In float64 for float64. The
    source is Su et al. 2021, "RoFormer", equation 34.

    The tables say everything of positions: no angle is formed here, so that no bit of one is lost here either, at
    position 131072 as at 0. Frequencies of any scaling, and an attention factor, are in the tables
    (``portakern.torch.rotary_tables``, ``portakern.jax.rotary_tables``), which all layers of a model, q and k, share.

    Args:
      x: (batch, seq, heads, d), any strides: the view q.transpose(1, 2) of a model that keeps heads first costs
        nothing; cos, sin: (batch or 1, seq, P), one column a pair, of x's dtype or float32. Two equal halves, as
        transformers has them, are one too many: cos[..., :P].
      interleaved: which numbers of a head are a pair.

    Returns:
      y: the shape and dtype of x. Infinities and NaN of a number, or of a table, reach their pair by plain arithmetic
      (inf 0 is NaN), and no other. cos and sin have no gradient.
    """
    raise NotImplementedError


def pairs_of(x: np.ndarray, pairs: int, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    """Views of the first and the second number of each pair, (..., pairs) each."""
    turned = x[..., : 2 * pairs]
    return (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :pairs], turned[..., pairs:])


class RotationErrors(NamedTuple):
    """The errors of one turn of x by cos and sin, or by cos and -sin, of which no magnitude knows.

    Attributes:
      error: the bound of the absolute error of each element before it is stored, 0 where x passes through.
      variance: of the error of each, from random rounding. lost: what of it may flush.
    """

    error: np.ndarray
    variance: np.ndarray
    lost: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray, call: Call, unit: Units) -> RotationErrors:
        """``y`` is what exact arithmetic makes of x."""
        interleaved, pairs = call.options["interleaved"], call.dims["pairs"]
        cos, sin = (call.arrays[name][:, :, None, :] for name in ("cos", "sin"))
        found = cls(*(np.zeros(x.shape) for _ in cls._fields))
        here = [pairs_of(a, pairs, interleaved) for a in (x, y, *found)]
        (first, second), (y_first, y_second), *made = here
        for i, (own, other, result) in enumerate(((first, second, y_first), (second, first, y_second))):
            p, q = magnitude(own) * magnitude(cos), magnitude(other) * magnitude(sin)
            sizes = magnitude(own) + magnitude(other) + magnitude(cos) + magnitude(sin)
            lost = unit.tau * (sizes + 3)
            unsure = (p + q >= unit.huge) | _faint(own, cos, unit) | _faint(other, sin, unit)
            error, variance, flushed = (each[i] for each in made)
            error[...] = np.where(unsure, inf, 2 * unit.u * (p + q) + lost)
            variance[...] = (KAPPA * unit.u) ** 2 * (p**2 + q**2 + magnitude(result) ** 2)
            flushed[...] = lost
        return found


def _faint(a: np.ndarray, b: np.ndarray, unit: Units) -> np.ndarray:
    """Where an infinity meets a factor that may be read as 0."""
    one, other = (np.isinf(x) & (y != 0) & (np.abs(y) < unit.tau) for x, y in ((a, b), (b, a)))
    return one | other


@rope.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of y, of the pair (a, b) and with :class:`portakern.spec.tolerance.Units`:

        B = E (1 + U) + U |y| + eta
        E of y_a = 2u (|x_a cos| + |x_b sin|) + tau (|x_a| + |x_b| + |cos| + |sin| + 3)

    and of y_b with a and b exchanged: two products and a sum, which no angle is part of. tau: each factor may be read
    as 0 beside the other, each product and the sum may flush. What passes through has E = 0.

    Nothing is promised where |x_a cos| + |x_b sin| reaches 2^127, nor where an infinity meets a subnormal factor.
    """
    with np.errstate(all="ignore"):
        return (round_to(RotationErrors.of(call.arrays["x"], ref[0], call, units(call)).error, ref[0], call.dtype),)


@rope.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of y, k = KAPPA u: sigma^2 = store^2 + k^2 (|x_a cos|^2 + |x_b sin|^2 + y^2) + lost^2.

    store is that of storing y (``store_spread``), lost what the bound has with tau, all of it.
    """
    with np.errstate(all="ignore"):
        return (spread(RotationErrors.of(call.arrays["x"], ref[0], call, units(call)), ref[0], call.dtype),)


def spread(errors: RotationErrors, y: np.ndarray, dtype: str) -> np.ndarray:
    return np.hypot(store_spread(y, dtype), np.hypot(np.sqrt(errors.variance), errors.lost))


@rope.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """What passes through is what came."""
    return (passing(call, call.arrays["x"]),)


def passing(call: Call, x: np.ndarray) -> np.ndarray:
    """Which elements pass through as they are: no flush can reach them."""
    beyond = np.arange(x.shape[-1]) >= 2 * call.dims["pairs"]
    return beyond & ((np.abs(x) >= max(units(call).tau, format_of(call.dtype).eta)) | (x == 0))


HALF = {"seq": (1, 9), "heads": (1, 9), "d": (64, 80), "pairs": (20, 32)}


@rope.edge(dims=HALF)
def special_numbers(arrays, rng, options):
    """An infinity or NaN in x reaches both of its pair, and no other number."""
    x = arrays["x"]
    x[rng.random(x.shape) < 0.1] = rng.choice([inf, -inf, np.nan])


@rope.edge(dims=HALF)
def special_tables(arrays, rng, options):
    """An infinity or NaN in a table reaches its pair in every head."""
    table = arrays[rng.choice(["cos", "sin"])]
    table[rng.random(table.shape) < 0.1] = rng.choice([inf, -inf, np.nan])


@rope.edge(dims=HALF)
def infinities_that_pass_through(arrays, rng, options):
    """What lies beyond the pairs is read by nothing, and stays what it is."""
    arrays["x"][..., 2 * arrays["cos"].shape[-1] :] = rng.choice([inf, -inf, np.nan])


@rope.edge(dims={**HALF, "batch": (2, 5)}, stretched={"cos": ("batch",), "sin": ("batch",)})
def tables_for_all_samples(arrays, rng, options):
    """One table serves the batch."""


@rope.edge(dims={"seq": (3, 20), "heads": (9, 20), "d": (8, 12), "pairs": (3, 4)}, smallest_tiles=True)
def several_ragged_tiles(arrays, rng, options):
    """The last token and the last head count as any other."""


@rope.edge(dims=HALF)
def cancelling(arrays, rng, options):
    """x_a cos and x_b sin all but cancel: the error is a share of the products, and not of what is left."""
    for name in ("cos", "sin"):
        arrays[name][...] = np.sqrt(0.5)
    first, second = pairs_of(arrays["x"], arrays["cos"].shape[-1], options["interleaved"])
    second[...] = first * (1 + 2.0**-9)


@rope.edge(dims=HALF, regime="near_overflow")
def large_numbers(arrays, rng, options):
    """Numbers near the end of the range stay in it, turned by any angle but for those that lead out of it."""
    angle = rng.uniform(-np.pi, np.pi, arrays["cos"].shape)
    for name, table in (("cos", np.cos(angle)), ("sin", np.sin(angle))):
        arrays[name][...] = table if arrays[name].shape == table.shape else table[: len(arrays[name])]


@rope.edge(dims={"seq": (1, 9), "heads": (1, 3), "d": (64, 64), "pairs": (32, 32)})
def far_positions(arrays, rng, options):
    """Tokens at position 131072, by the frequencies of base 10000: tables hold angles of 2 10^4 turns as any other."""
    angle = (131072 - np.arange(arrays["cos"].shape[1]))[:, None] * 10000.0 ** -(np.arange(32) / 32)
    arrays["cos"][...], arrays["sin"][...] = np.cos(angle), np.sin(angle)


@rope.law
def tokens_are_independent(run, draw):
    """A token alone, and a head alone, give the same bits as among others."""
    seq, heads, pairs = draw.extent(2, 20), draw.extent(2, 9), draw.extent(1, 20)
    x = draw.normal(2, seq, heads, 2 * pairs + draw.extent(0, 5))
    cos, sin = draw.normal(1, seq, pairs), draw.normal(1, seq, pairs)
    i, h = draw.extent(0, seq - 1), draw.extent(0, heads - 1)
    whole, token = run(x, cos, sin), slice(i, i + 1)
    draw.same_bits(run(x[:, token], cos[:, token], sin[:, token]), whole[:, token], "a token alone")
    draw.same_bits(run(x[:, :, h : h + 1], cos, sin), whole[:, :, h : h + 1], "a head alone")


@rope.law
def a_quarter_turn_exchanges(run, draw):
    """cos = 0 and sin = 1 give (-x_b, x_a), cos = 1 and sin = 0 give x, to the bit."""
    seq, pairs = draw.extent(1, 20), draw.extent(1, 40)
    x, one = draw.normal(1, seq, 3, 2 * pairs), draw.integers(1, 1, 1, seq, pairs)
    zero = one - one
    want = np.concatenate((-x[..., pairs:], x[..., :pairs]), -1)
    draw.same_bits(run(x, zero, one) + 0, want + 0, "a quarter turn")  # a zero of either sign
    draw.same_bits(run(x, one, zero) + 0, x + 0, "no turn")


@rope.law
def conventions_are_orders(run, draw):
    """Neighbours are halves in another order of the numbers, to the bit where nothing rounds."""
    seq, pairs, rest = draw.extent(1, 9), draw.extent(1, 40), draw.extent(0, 5)
    x, cos, sin = (draw.integers(-4, 4, 1, seq, *shape) for shape in ((3, 2 * pairs + rest), (pairs,), (pairs,)))
    order = np.r_[np.stack((np.arange(pairs), pairs + np.arange(pairs)), -1).ravel(), 2 * pairs + np.arange(rest)]
    beside = run(np.ascontiguousarray(x[..., order]), cos, sin, interleaved=True)
    draw.same_bits(beside + 0, run(x, cos, sin)[..., order] + 0, "numbers in the other order")


@rope.law
def powers_of_two_scale_exactly(run, draw):
    """An x that is doubled doubles y, to the bit."""
    seq, pairs = draw.extent(1, 9), draw.extent(1, 40)
    x = draw.normal(1, seq, 2, 2 * pairs + 1)
    x = x * x.dtype.type(64)  # far from subnormal results
    cos, sin = (draw.integers(-4, 4, 1, seq, pairs) for _ in range(2))
    two = x.dtype.type(2)
    draw.same_bits(run(x * two, cos, sin), run(x, cos, sin) * two, "x doubled")


rope.sample("halves", dims={"batch": 2, "seq": 3, "heads": 2, "d": 8, "pairs": 4})
rope.sample("neighbours", dims={"batch": 1, "seq": 5, "heads": 3, "d": 6, "pairs": 3}, options={"interleaved": True})
rope.sample(
    "part_of_a_head",
    dims={"batch": 2, "seq": 3, "heads": 2, "d": 10, "pairs": 2},
    stretched={"cos": ("batch",), "sin": ("batch",)},
    wider=("cos", "sin"),
)


# ---------------------------------------------------------------------------------------------------------- gradient
class RopeVjpOut(NamedTuple):
    d_x: Float[A, "batch seq heads d"]


@spec(
    tiling={"block_seq": Tile(4, 256, of="seq"), "block_heads": Tile(8, 256, of="heads")},
    or_float32=("cos", "sin"),
    require=(PAIRS_FIT,),
    positive=("d", "pairs"),
    aliases={"d_x": "d_y"},
    apart=("batch", "seq", "heads"),
    flops=lambda call: 6.0 * call.dims["batch"] * call.dims["seq"] * call.dims["heads"] * call.dims["pairs"],
)
def rope_vjp(
    d_y: Float[A, "batch seq heads d"],
    cos: Float[A, "#batch seq pairs"],
    sin: Float[A, "#batch seq pairs"],
    *,
    interleaved: bool = False,
) -> RopeVjpOut:
    """d_x_a = d_y_a cos + d_y_b sin and d_x_b = d_y_b cos - d_y_a sin for each pair (a, b): rope by cos and -sin.

    For tables of one angle that is the turn back; for any others, such as those with an attention factor, it is the
    gradient just the same. Nothing of x is needed.

    Args:
      d_y: (batch, seq, heads, d), the cotangent of what rope returned; cos, sin, interleaved: what rope was given.

    Returns:
      d_x: the shape and dtype of d_y. NaN and infinities reach what they reach in rope.
    """
    raise NotImplementedError


def rotation_errors(call: Call, ref: tuple[Any, ...]) -> RotationErrors:
    """The errors of the turn by -sin, whose magnitude is that of sin."""
    return RotationErrors.of(call.arrays["d_y"], ref[0], call, units(call))


@rope_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of d_x: that of rope at d_y and -sin."""
    with np.errstate(all="ignore"):
        return (round_to(rotation_errors(call, ref).error, ref[0], call.dtype),)


@rope_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of d_x: that of rope at d_y and -sin."""
    with np.errstate(all="ignore"):
        return (spread(rotation_errors(call, ref), ref[0], call.dtype),)


@rope_vjp.exact
def exact_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """What passes through is what came."""
    return (passing(call, call.arrays["d_y"]),)


@rope_vjp.edge(dims=HALF)
def special_cotangents(arrays, rng, options):
    """An infinity or NaN in a cotangent reaches both of its pair, and no other number."""
    d_y = arrays["d_y"]
    d_y[rng.random(d_y.shape) < 0.1] = rng.choice([inf, -inf, np.nan])


rope_vjp.edge(dims=HALF)(special_tables)
rope_vjp.edge(dims={**HALF, "batch": (2, 5)}, stretched={"cos": ("batch",), "sin": ("batch",)})(tables_for_all_samples)
rope_vjp.edge(dims={"seq": (3, 20), "heads": (9, 20), "d": (8, 12), "pairs": (3, 4)}, smallest_tiles=True)(
    several_ragged_tiles
)


@rope_vjp.law
def tokens_are_independent_vjp(run, draw):
    """A token alone gives the same bits as among others."""
    seq, pairs = draw.extent(2, 20), draw.extent(1, 20)
    d_y, cos, sin = draw.normal(2, seq, 3, 2 * pairs + 1), draw.normal(1, seq, pairs), draw.normal(1, seq, pairs)
    first = draw.extent(0, seq - 1)
    token = slice(first, first + 1)
    alone = run(d_y[:, token], cos[:, token], sin[:, token])[0]
    draw.same_bits(alone, run(d_y, cos, sin)[0][:, token], "a token alone")


@rope_vjp.law
def a_quarter_turn_is_undone(run, draw):
    """cos = 0 and sin = 1, which make (-x_b, x_a) of x, give (d_y_b, -d_y_a), to the bit."""
    seq, pairs = draw.extent(1, 20), draw.extent(1, 40)
    d_y, one = draw.normal(1, seq, 3, 2 * pairs), draw.integers(1, 1, 1, seq, pairs)
    want = np.concatenate((d_y[..., pairs:], -d_y[..., :pairs]), -1)
    draw.same_bits(run(d_y, one - one, one)[0] + 0, want + 0, "a quarter turn")  # a zero of either sign


@rope_vjp.law
def powers_of_two_scale_exactly_vjp(run, draw):
    """A cotangent that is doubled doubles the gradient, to the bit."""
    seq, pairs = draw.extent(1, 9), draw.extent(1, 40)
    cos, sin = (draw.integers(-4, 4, 1, seq, pairs) for _ in range(2))
    doubled(lambda d_y: run(d_y, cos, sin), draw, ("d_x",), draw.normal(1, seq, 2, 2 * pairs + 1))
