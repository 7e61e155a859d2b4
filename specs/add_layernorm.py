"""A residual added, and the layer normalisation of the sum over the last axis."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.options import Range
from portakern.spec.tolerance import round_to
from portakern.specs._added import (
    FLUSHES,
    cancelling,
    inherit,
    of_sum,
    opposed_infinities,
    rows_alone,
    sum_bound,
    sum_forced,
    sum_is_what_is_normed,
    sum_spread,
)
from portakern.specs.layernorm import error, layernorm
from portakern.specs.layernorm import sigma as sigma_of_norm

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class AddLayernormOut(NamedTuple):
    y: Float[A, "*batch n"]
    residual_out: Float[A, "*batch n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="n")},
    or_float32=("weight", "bias"),
    aliases={"residual_out": "residual"},
    apart=("batch",),
    vjp="add_layernorm_vjp",
    autocast="float32",
    typical={"batch": (4096,), "n": 4096, "weight": True, "bias": True},
    flops=lambda call: 9.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def add_layernorm(
    x: Float[A, "*batch n"],
    residual: Float[A, "*batch n"],
    weight: Float[A, "n"] | None = None,
    bias: Float[A, "n"] | None = None,
    *,
    eps: Annotated[float, Range(0.0, typical=(1e-5, 1e-12, 1e-2))] = 1e-5,
) -> AddLayernormOut:
    """residual_out = x + residual and y = layernorm(residual_out): what a transformer does between two of its layers.

    The sum is rounded to its dtype, and what is normed is that, as where a model adds first; all else as in layernorm.

    Args:
      x: (*batch, n), what a layer gave; residual: of that shape, what went past it.
      weight, bias, eps: as in layernorm.

    Returns:
      y: the shape and dtype of x; residual_out: the sum, which goes past the next layer, of the same. In the sum
      infinities of opposite sign make NaN; what NaN and infinities of the sum make of y, layernorm says.
    """
    raise NotImplementedError


@add_layernorm.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """y: layernorm's bound at the rounded sum, which is exact but for what flushes, 3 tau (:data:`FLUSHES`); the sum: U
    |residual_out| + eta and those 3 tau.
    """
    return round_to(error(of_sum(call), FLUSHES), ref[0], call.dtype), sum_bound(call, ref[1])


@add_layernorm.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """y: that of layernorm at the rounded sum; the sum: that of storing it."""
    return (*sigma_of_norm(of_sum(call), ref[:1]), sum_spread(call, ref[1]))


@add_layernorm.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sum, where nothing of it flushes, is rounded once."""
    return None, sum_forced(call, ref[1])


inherit(add_layernorm, layernorm)
add_layernorm.edge(dims={"n": (1, 300)})(cancelling)
add_layernorm.edge(dims={"n": (1, 300)})(opposed_infinities)
add_layernorm.law(sum_is_what_is_normed)
add_layernorm.law(rows_alone)


@add_layernorm.law
def scale_invariant(run, draw):
    """A sum that is 2^k times as large has the same norm at eps = 0, to the bit: powers of two round nothing."""
    shape = draw.extent(1, 5), draw.extent(2, 300)
    x, residual = draw.normal(*shape), draw.normal(*shape)
    two = x.dtype.type(2.0 ** draw.extent(0, 4))
    y, total = run(x, residual, eps=0.0)
    scaled, scaled_total = run(x * two, residual * two, eps=0.0)
    draw.same_bits(scaled_total, total * two, "a sum of scaled terms")
    draw.same_bits(scaled, y, "the norm of a scaled sum")


add_layernorm.sample("rows", dims={"batch": (3,), "n": 5}, options={"eps": 1e-2}, given=("weight", "bias"))
add_layernorm.sample("no_weight", dims={"batch": (2, 3), "n": 4}, given=("bias",))
add_layernorm.sample("wider_weight", dims={"batch": (3,), "n": 5}, given=("weight",), wider=("weight",))
