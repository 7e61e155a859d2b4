"""Root mean square normalisation over the last axis, in codes of 8 bits: rmsnorm and quantize in one pass.

With y as rmsnorm's, in float32: scale = max |y| / L of each group of ``width`` numbers of a row, and q = y / scale.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Num

from portakern.spec import Extent, Tile, spec
from portakern.spec.options import DType, Range
from portakern.spec.tolerance import KAPPA, magnitude, rounded, rounding_error, units
from portakern.specs._codes import (
    Unquantised,
    code_bounds,
    code_spreads,
    drawn_groups,
    inherit,
    rows_alone,
    same_outputs,
)
from portakern.specs.quantize import CODES
from portakern.specs.rmsnorm import error, normalised_error, rmsnorm, root, root_spread, rounds

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class RmsnormQuantizeOut(NamedTuple):
    q: Num[A, "*batch n"]
    scale: Float32[A, "*batch n/width"]


@spec(
    tiling={"block_rows": Tile(1, 256)},
    or_float32=("weight",),
    result_dtype={"q": "to"},
    codes=("q",),
    apart=("batch",),
    typical={"batch": (4096,), "n": 4096, "width": 128, "weight": True},
    flops=lambda call: 7.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def rmsnorm_quantize(
    x: Float[A, "*batch n"],
    weight: Float[A, "n"] | None = None,
    *,
    width: Annotated[int, Extent()] = 128,
    eps: Annotated[float, Range(0.0, typical=(1e-6, 1e-12, 1e-2))] = 1e-6,
    rounding: Literal["once", "before_weight"] = "once",
    to: Annotated[Any, DType(CODES)] = "float8_e4m3fn",
    scales: Literal["float32", "power_of_two"] = "float32",
    scale_ub: Annotated[float, Range(0.0, open=True, typical=(1.0, 1e-2, 1e4))] | None = None,
    scale_floor: Annotated[float, Range(0.0, 2.0**100, typical=(1 / (448 * 512), 1.0, 0.0))] = 0.0,
) -> RmsnormQuantizeOut:
    """Codes of 8 bits of y = rmsnorm(x, weight), and a scale for each ``width`` numbers of a row: y is about q scale.

    What is quantised is y in float32 (float64 for float64): it is never rounded to 16 bits. quantize of a y that
    rmsnorm rounded to x's dtype has other codes where that rounding crosses a tie.

    Args:
      x, weight, eps, rounding: as in rmsnorm.
      width: how many numbers of a row share a scale, the last of a row as many as are left: 128 for groups, n (or more)
        for one scale a token. scaled_matmul takes both as ``scale_a``, with ``k_width=width``.
      to, scales, scale_ub, scale_floor: as in quantize.

    Returns:
      q: the shape of x and the dtype ``to``; scale: (*batch, n / width rounded up), float32. The scale of a group is 1
      where y is all zeros, and q saturates at L under scale_ub, as in quantize. What rmsnorm makes of NaN and
      infinities is quantised: a NaN in x makes all codes and scales of its row NaN; an infinity those of its own group,
      and the others of its row codes of zeros. No code of int8 that would be NaN is promised, and nothing of a group
      whose max |y| may be subnormal.
    """
    raise NotImplementedError


def computed(call: Call, flushes: float = 1.0) -> Unquantised:
    """rmsnorm's y in float32, by how much it may be off, and by how much it mostly is: rho of
    :func:`portakern.specs.rmsnorm.root_spread` and two products. What is rounded before the weight mostly does not
    change where x r does; where it may, its whole error counts."""
    x, w, unit, narrow = call.arrays["x"], call.arrays["weight"], units(call), rounds(call)
    w = np.ones(1) if w is None else w
    with np.errstate(all="ignore"):
        r, rho, _ = root(call)
        xh, other = x * r, np.zeros(1)
        if narrow:
            dxh = normalised_error(call, magnitude(x) * r, r, rho, flushes)
            other = rounding_error(magnitude(xh), dxh, narrow)
            xh = rounded(xh, narrow).astype(np.float64)
        y = xh * w
        share = np.sqrt(root_spread(call) + 2 * (KAPPA * unit.u) ** 2)
        return Unquantised.of(y, error(call, flushes), np.hypot(share * magnitude(y), magnitude(w) * other), x, w, r)


@rmsnorm_quantize.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """rmsnorm's E, without the rounding of y to its dtype, through :func:`portakern.specs._codes.code_bounds`."""
    return code_bounds(call, ref, computed(call))


@rmsnorm_quantize.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of scales: :func:`portakern.specs._codes.code_spreads`."""
    return code_spreads(call, ref, computed(call))


# --------------------------------------------------------------------------------------------------------------- edges
inherit(rmsnorm_quantize, rmsnorm)


@rmsnorm_quantize.edge(dims={"n": (2, 300), "width": (1, 60)}, given=("weight",))
def groups_of_different_size(arrays, rng, options):
    """Each group has its own scale, those of zeros 1, or the floor; the last group is short."""
    weight = arrays["weight"]
    group = np.arange(weight.size) // options["width"]
    weight *= rng.choice([0.0, *2.0 ** np.arange(-6, 7)], group[-1] + 1)[group]


@rmsnorm_quantize.edge(dims={"n": (1, 300), "width": (1, 60)}, given=("weight",), options={"scale_ub": None})
def inf_in_a_weight(arrays, rng, options):
    """The scale of its group is infinite, its own code NaN and the others 0."""
    arrays["weight"][rng.integers(arrays["weight"].size)] = rng.choice([np.inf, -np.inf])


@rmsnorm_quantize.edge(dims={"n": (1, 300)}, options={"scale_ub": 1.0})
def numbers_beyond_the_limit(arrays, rng, options):
    """Where max |y| counts as no more than 1, most numbers of a row saturate."""


@rmsnorm_quantize.edge(dims={"n": (129, 600), "width": (128, 600)}, smallest_tiles=True)
def groups_of_several_tiles(arrays, rng, options):
    """The greatest number of a group stands in any of its tiles."""
    arrays["x"] *= 2.0 ** rng.integers(-6, 7, arrays["x"].shape)


@rmsnorm_quantize.edge(dims={"batch": (1, 3), "n": (1030, 1100), "width": (1100, 1200)})
def tokens_whose_last_number_is_greatest(arrays, rng, options):
    """A row that lies in two tiles has one scale, which is that of its last number."""
    arrays["x"][..., -1] = 50


# ---------------------------------------------------------------------------------------------------------------- laws
@rmsnorm_quantize.law
def rows_are_independent(run, draw):
    """A row alone has the codes and the scales that it has among others."""
    rows_alone(run, draw, 1)


@rmsnorm_quantize.law
def scale_invariant(run, draw):
    """2^k x has the codes and the scales of x at eps = 0, to the bit (k >= 0, see rmsnorm)."""
    x = draw.normal(draw.extent(1, 5), draw.extent(1, 300))
    options = {"eps": 0.0, **drawn_groups(draw, x.shape[1])}
    scaled = x * x.dtype.type(2.0 ** draw.extent(0, 8))
    same_outputs(draw, run(scaled, **options), run(x, **options), "a row scaled by a power of two")


@rmsnorm_quantize.law
def a_weight_of_powers_of_two_scales_the_scales(run, draw):
    """A weight of 2^k has the codes of a weight of 1, and 2^k times its scales."""
    x = draw.normal(draw.extent(1, 5), draw.extent(1, 300))
    two, options = x.dtype.type(2.0 ** draw.extent(0, 6)), drawn_groups(draw, x.shape[1])
    q, scale = run(x, np.full(x.shape[1], two), **options)
    same_outputs(draw, (q, scale / scale.dtype.type(two)), run(x, np.ones_like(x[0]), **options), "a weight of 2^k")


@rmsnorm_quantize.law
def groups_share_nothing_but_the_norm(run, draw):
    """A group's codes and scale do not change with the weights of others."""
    x = draw.normal(draw.extent(1, 5), draw.extent(2, 300))
    n = x.shape[1]
    options = {**drawn_groups(draw, n), "width": draw.extent(1, n)}
    group = draw.extent(0, (n - 1) // options["width"])
    own = slice(group * options["width"], (group + 1) * options["width"])
    weight, other = draw.normal(n), draw.normal(n)
    other[own] = weight[own]
    (q, scale), (q_other, scale_other) = run(x, weight, **options), run(x, other, **options)
    draw.same_bits(q_other[:, own], q[:, own], "codes beside other groups")
    draw.same_bits(scale_other[:, group], scale[:, group], "a scale beside other groups")


rmsnorm_quantize.sample("groups", dims={"batch": (3,), "n": 12, "width": 4}, given=("weight",))
rmsnorm_quantize.sample("tokens", dims={"batch": (2, 3), "n": 20, "width": 20}, options={"to": "int8"})
rmsnorm_quantize.sample(
    "wider_weight",
    dims={"batch": (3,), "n": 10, "width": 4},
    options={"scales": "power_of_two"},
    given=("weight",),
    wider=("weight",),
)
