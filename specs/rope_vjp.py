"""Gradient of the rotary position embedding: the turn, transposed."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.tolerance import round_to, units
from portakern.specs._gradients import doubled
from portakern.specs.rope import (
    HALF,
    PAIRS_FIT,
    Turn,
    passing,
    several_ragged_tiles,
    special_tables,
    spread,
    tables_for_all_samples,
)

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


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


def turn(call: Call, ref: tuple[Any, ...]) -> Turn:
    """The errors of the turn by -sin, whose magnitude is that of sin."""
    return Turn.of(call.arrays["d_y"], ref[0], call, units(call))


@rope_vjp.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of d_x: that of rope at d_y and -sin."""
    with np.errstate(all="ignore"):
        return (round_to(turn(call, ref).error, ref[0], call.dtype),)


@rope_vjp.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of d_x: that of rope at d_y and -sin."""
    with np.errstate(all="ignore"):
        return (spread(turn(call, ref), ref[0], call.dtype),)


@rope_vjp.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
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
def tokens_are_independent(run, draw):
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
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles the gradient, to the bit."""
    seq, pairs = draw.extent(1, 9), draw.extent(1, 40)
    cos, sin = (draw.integers(-4, 4, 1, seq, pairs) for _ in range(2))
    doubled(lambda d_y: run(d_y, cos, sin), draw, ("d_x",), draw.normal(1, seq, 2, 2 * pairs + 1))
