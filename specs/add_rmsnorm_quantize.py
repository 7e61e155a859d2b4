"""A residual added, and the root mean square normalisation of the sum over the last axis, in codes of 8 bits.

residual_out = x + residual, and q and scale are those of rmsnorm_quantize(residual_out).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from jaxtyping import Float, Float32, Num

from portakern.spec import Extent, Tile, spec
from portakern.spec.options import DType, Range
from portakern.specs._added import (
    FLUSHES,
    cancelling,
    inherit,
    of_sum,
    opposed_infinities,
    sum_bound,
    sum_forced,
    sum_spread,
)
from portakern.specs._codes import code_bounds, code_spreads, drawn_groups, rows_alone, same_outputs
from portakern.specs.quantize import CODES
from portakern.specs.rmsnorm_quantize import computed, rmsnorm_quantize

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class AddRmsnormQuantizeOut(NamedTuple):
    q: Num[A, "*batch n"]
    scale: Float32[A, "*batch n/width"]
    residual_out: Float[A, "*batch n"]


@spec(
    tiling={"block_rows": Tile(1, 256)},
    or_float32=("weight",),
    result_dtype={"q": "to"},
    codes=("q",),
    aliases={"residual_out": "residual"},
    apart=("batch",),
    typical={"batch": (4096,), "n": 4096, "width": 128, "weight": True},
    flops=lambda call: 8.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def add_rmsnorm_quantize(
    x: Float[A, "*batch n"],
    residual: Float[A, "*batch n"],
    weight: Float[A, "n"] | None = None,
    *,
    width: Annotated[int, Extent()] = 128,
    eps: Annotated[float, Range(0.0, typical=(1e-6, 1e-12, 1e-2))] = 1e-6,
    rounding: Literal["once", "before_weight"] = "once",
    to: Annotated[Any, DType(CODES)] = "float8_e4m3fn",
    scales: Literal["float32", "power_of_two"] = "float32",
    scale_ub: Annotated[float, Range(0.0, open=True, typical=(1.0, 1e-2, 1e4))] | None = None,
    scale_floor: Annotated[float, Range(0.0, 2.0**100, typical=(1 / (448 * 512), 1.0, 0.0))] = 0.0,
) -> AddRmsnormQuantizeOut:
    """residual_out = x + residual, and the codes and scales of rmsnorm(residual_out), as rmsnorm_quantize gives them.

    The sum is rounded to its dtype, and what is normed is that, as in add_rmsnorm; the norm is quantised from float32.

    Args:
      x: (*batch, n), what a layer gave; residual: of that shape, what went past it.
      weight, width, eps, rounding, to, scales, scale_ub, scale_floor: as in rmsnorm_quantize.

    Returns:
      q, scale: as in rmsnorm_quantize; residual_out: the sum, of the shape and dtype of x, as in add_rmsnorm.
    """
    raise NotImplementedError


@add_rmsnorm_quantize.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """rmsnorm_quantize's at the rounded sum, which is exact but for what flushes, 3 tau; the sum's is add_rmsnorm's."""
    return *code_bounds(call, ref[:2], computed(of_sum(call), FLUSHES)), sum_bound(call, ref[2])


@add_rmsnorm_quantize.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those of rmsnorm_quantize at the rounded sum, and of add_rmsnorm's sum."""
    return *code_spreads(call, ref[:2], computed(of_sum(call), FLUSHES)), sum_spread(call, ref[2])


@add_rmsnorm_quantize.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sum, where nothing of it flushes, is rounded once."""
    return None, None, sum_forced(call, ref[2])


inherit(add_rmsnorm_quantize, rmsnorm_quantize)
add_rmsnorm_quantize.edge(dims={"n": (1, 300)})(cancelling)
add_rmsnorm_quantize.edge(dims={"n": (1, 300)})(opposed_infinities)


@add_rmsnorm_quantize.law
def rows_are_independent(run, draw):
    """A row alone has the codes, the scales and the sum that it has among others."""
    rows_alone(run, draw, 2)


@add_rmsnorm_quantize.law
def sum_is_what_is_normed(run, draw):
    """The sum is that of its terms in any order, and codes and scales are those of the sum as it is stored."""
    shape = draw.extent(2, 40), draw.extent(1, 300)
    x, residual, options = draw.normal(*shape), draw.normal(*shape), drawn_groups(draw, shape[1])
    found = run(x, residual, **options)
    same_outputs(draw, run(residual, x, **options), found, "terms in another order")
    total = found[2]
    same_outputs(draw, run(total, total * 0, **options), found, "a sum alone")


add_rmsnorm_quantize.sample("groups", dims={"batch": (3,), "n": 12, "width": 4}, given=("weight",))
add_rmsnorm_quantize.sample("tokens", dims={"batch": (2, 3), "n": 20, "width": 20}, options={"to": "int8"})
add_rmsnorm_quantize.sample(
    "wider_weight",
    dims={"batch": (3,), "n": 10, "width": 4},
    options={"scales": "power_of_two"},
    given=("weight",),
    wider=("weight",),
)
