"""A residual added, the root mean square normalisation of the sum over the last axis, and the gradients of both.

residual_out = x + residual, y = rmsnorm(residual_out), and d_x = d_residual_out + rmsnorm's d_x at residual_out.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.options import Range
from portakern.spec.tolerance import round_to
from portakern.specs._added import (
    FLUSHES,
    added_errors,
    added_variances,
    cancelling,
    inherit,
    normed,
    of_sum,
    opposed_infinities,
    rows_alone,
    sum_bound,
    sum_forced,
    sum_is_what_is_normed,
    sum_spread,
    without_a_cotangent_of_the_sum,
)
from portakern.specs._gradients import doubled, each_alone, row_alone, stored_bounds, stored_spreads
from portakern.specs.rmsnorm import RmsNormRows, d_weight_error, d_x_error, error, rmsnorm, rmsnorm_vjp, variances
from portakern.specs.rmsnorm import sigma as sigma_of_norm

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class AddRmsnormOut(NamedTuple):
    y: Float[A, "*batch n"]
    residual_out: Float[A, "*batch n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="n")},
    or_float32=("weight",),
    aliases={"residual_out": "residual"},
    apart=("batch",),
    vjp="add_rmsnorm_vjp",
    autocast="float32",
    typical={"batch": (4096,), "n": 4096, "weight": True},
    flops=lambda call: 5.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def add_rmsnorm(
    x: Float[A, "*batch n"],
    residual: Float[A, "*batch n"],
    weight: Float[A, "n"] | None = None,
    *,
    eps: Annotated[float, Range(0.0, typical=(1e-6, 1e-12, 1e-2))] = 1e-6,
    rounding: Literal["once", "before_weight"] = "once",
) -> AddRmsnormOut:
    """residual_out = x + residual and y = rmsnorm(residual_out): what a transformer does between two of its layers.

    The sum is rounded to its dtype, and what is normed is that, as where a model adds first; all else as in rmsnorm.

    Args:
      x: (*batch, n), what a layer gave; residual: of that shape, what went past it.
      weight, eps, rounding: as in rmsnorm.

    Returns:
      y: the shape and dtype of x; residual_out: the sum, which goes past the next layer, of the same. In the sum
      infinities of opposite sign make NaN; what NaN and infinities of the sum make of y, rmsnorm says.
    """
    raise NotImplementedError


@add_rmsnorm.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """y: rmsnorm's bound at the rounded sum, which is exact but for what flushes, 3 tau (:data:`FLUSHES`); the sum: U
    |residual_out| + eta and those 3 tau.
    """
    return round_to(error(of_sum(call), FLUSHES), ref[0], call.dtype), sum_bound(call, ref[1])


@add_rmsnorm.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """y: that of rmsnorm at the rounded sum; the sum: that of storing it."""
    return (*sigma_of_norm(of_sum(call), ref[:1]), sum_spread(call, ref[1]))


@add_rmsnorm.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sum, where nothing of it flushes, is rounded once."""
    return None, sum_forced(call, ref[1])


inherit(add_rmsnorm, rmsnorm)
add_rmsnorm.edge(dims={"n": (1, 300)})(cancelling)
add_rmsnorm.edge(dims={"n": (1, 300)})(opposed_infinities)
add_rmsnorm.law(sum_is_what_is_normed)
add_rmsnorm.law(rows_alone)


@add_rmsnorm.law
def scale_invariant(run, draw):
    """A sum that is 2^k times as large has the same norm at eps = 0, to the bit (k >= 0, see rmsnorm)."""
    shape = draw.extent(1, 5), draw.extent(1, 300)
    x, residual = draw.normal(*shape), draw.normal(*shape)
    two = x.dtype.type(2.0 ** draw.extent(0, 8))
    y, total = run(x, residual, eps=0.0)
    scaled, scaled_total = run(x * two, residual * two, eps=0.0)
    draw.same_bits(scaled_total, total * two, "a sum of scaled terms")
    draw.same_bits(scaled, y, "the norm of a scaled sum")


add_rmsnorm.sample("rows", dims={"batch": (3,), "n": 5}, options={"eps": 1e-2}, given=("weight",))
add_rmsnorm.sample("no_weight", dims={"batch": (2, 3), "n": 4})
add_rmsnorm.sample("wider_weight", dims={"batch": (3,), "n": 5}, given=("weight",), wider=("weight",))


# ---------------------------------------------------------------------------------------------------------- gradient
class AddRmsnormVjpOut(NamedTuple):
    d_x: Float[A, "*batch n"]
    d_weight: Float[A, "n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="n")},
    or_float32=("weight",),
    gradient_dtype=("d_weight",),
    also={"d_x": ("residual",)},
    typical={"batch": (4096,), "n": 4096, "weight": True, "d_residual_out": True},
    apart=lambda options, wants: ("batch",) if set(wants) == {"d_x"} else (),
    flops=lambda call: 13.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def add_rmsnorm_vjp(
    residual_out: Float[A, "*batch n"],
    d_y: Float[A, "*batch n"],
    weight: Float[A, "n"] | None = None,
    d_residual_out: Float[A, "*batch n"] | None = None,
    *,
    eps: Annotated[float, Range(0.0, typical=(1e-6, 1e-12, 1e-2))] = 1e-6,
    rounding: Literal["once", "before_weight"] = "once",
) -> AddRmsnormVjpOut:
    """d_x = d_residual_out + the d_x of rmsnorm_vjp at residual_out, and its d_weight, in float32 (float64 for
    float64).

    Args:
      residual_out: (*batch, n), the sum that add_rmsnorm returned; d_y, d_residual_out: the cotangents of what it
        returned, the second None for zeros.
      weight, eps, rounding: as in add_rmsnorm.

    Returns:
      d_x: the gradient with respect to x and to residual, which are one, of the shape and dtype of residual_out;
      d_weight: as in rmsnorm_vjp.
    """
    raise NotImplementedError


def norm_of(call: Call) -> tuple[Call, RmsNormRows, np.ndarray]:
    """The call of rmsnorm_vjp, its rows, and the d_x that is added to."""
    inner = normed(call, call.arrays["residual_out"])
    row = RmsNormRows.of(inner)
    mean = (row.h * row.xh).sum(1, keepdims=True) / call.dims["n"]
    return inner, row, (row.r * (row.h - row.xh * mean)).reshape(inner.arrays["x"].shape)


@add_rmsnorm_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """d_weight: rmsnorm_vjp's bound. d_x: its E, and of the sum with d_residual_out u |d_x| + tau more."""
    with np.errstate(all="ignore"):
        inner, row, of_norm = norm_of(call)
        of_x = None if ref[0] is None else added_errors(call, d_x_error(inner, row, of_norm), of_norm)
        return stored_bounds(call, ref, [of_x, d_weight_error(inner, row)])


@add_rmsnorm_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """That of rmsnorm_vjp, and of the sum (KAPPA u d_x)^2 more."""
    with np.errstate(all="ignore"):
        inner = normed(call, call.arrays["residual_out"])
        return stored_spreads(call, ref, added_variances(call, ref, variances(inner)))


inherit(add_rmsnorm_vjp, rmsnorm_vjp)


@add_rmsnorm_vjp.edge(dims={"n": (1, 300)}, given=("d_residual_out",))
def a_cotangent_of_the_sum_alone(arrays, rng, options):
    """With zeros for d_y the other cotangent goes through, an inf and a NaN in it to their own elements."""
    arrays["d_y"][...] = 0
    arrays["d_residual_out"][rng.random(arrays["d_residual_out"].shape) < 0.1] = rng.choice([np.inf, np.nan])


@add_rmsnorm_vjp.law
def rows_are_independent(run, draw):
    """A row of d_x alone has the same bits as among others."""
    row_alone(run, draw, weighted=True)


@add_rmsnorm_vjp.law
def gradients_do_not_depend_on_which_are_wanted(run, draw):
    """Each gradient, asked for alone, has the same bits."""
    shape = draw.extent(1, 150), draw.extent(1, 30)
    arrays = draw.normal(*shape), draw.normal(*shape), draw.normal(shape[1]), draw.normal(*shape)
    each_alone(run, draw, ("d_x", "d_weight"), arrays)


@add_rmsnorm_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """Cotangents that are doubled double both gradients, to the bit."""
    shape = draw.extent(1, 150), draw.extent(2, 30)
    total, d_y, weight = draw.normal(*shape), draw.normal(*shape), draw.normal(shape[1])
    doubled(lambda d_y: run(total, d_y, weight, d_y), draw, ("d_x", "d_weight"), d_y)


@add_rmsnorm_vjp.law
def the_cotangents_add(run, draw):
    """A cotangent of zeros for the sum is none, and one of the sum alone is its gradient, both to the bit."""
    without_a_cotangent_of_the_sum(run, draw, weights=1)
