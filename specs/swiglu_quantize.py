"""The gated product of a feed-forward layer, silu(gate) up, in codes of 8 bits: swiglu and quantize in one pass.

With y as swiglu's, in float32: scale = max |y| / L of each group of ``width`` numbers of a row, and q = y / scale.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Num

from portakern.spec import Extent, Tile, spec
from portakern.spec.options import DType, Range
from portakern.spec.tolerance import KAPPA, magnitude, units
from portakern.specs._codes import Unquantised, code_bounds, code_spreads, drawn_groups, rows_alone, same_outputs
from portakern.specs.quantize import CODES
from portakern.specs.swiglu import Gate, vanishes

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class SwigluQuantizeOut(NamedTuple):
    q: Num[A, "*batch n"]
    scale: Float32[A, "*batch n/width"]


@spec(
    tiling={"block_rows": Tile(1, 256)},
    result_dtype={"q": "to"},
    codes=("q",),
    apart=("batch",),
    typical={"batch": (4096,), "n": 4096, "width": 128},
    flops=lambda call: 9.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def swiglu_quantize(
    gate: Float[A, "*batch n"],
    up: Float[A, "*batch n"],
    *,
    width: Annotated[int, Extent()] = 128,
    to: Annotated[Any, DType(CODES)] = "float8_e4m3fn",
    scales: Literal["float32", "power_of_two"] = "float32",
    scale_ub: Annotated[float, Range(0.0, open=True, typical=(1.0, 1e-2, 1e4))] | None = None,
    scale_floor: Annotated[float, Range(0.0, 2.0**100, typical=(1 / (448 * 512), 1.0, 0.0))] = 0.0,
) -> SwigluQuantizeOut:
    """Codes of 8 bits of y = silu(gate) up, and a scale for each ``width`` numbers of a row: y is about q scale.

    What is quantised is y in float32 (float64 for float64): it is never rounded to 16 bits.

    Args:
      gate: (*batch, n), any strides, such as one half of a projection; up: of that shape.
      width, to, scales, scale_ub, scale_floor: as in rmsnorm_quantize.

    Returns:
      q: the shape of gate and the dtype ``to``; scale: (*batch, n / width rounded up), float32. What swiglu makes of
      NaN and infinities is quantised, as quantize says: each reaches its own group alone. No code of int8 that would
      be NaN is promised, and nothing of a group whose max |y| may be subnormal or reaches 2^127 (2^1023 in float64).
    """
    raise NotImplementedError


def computed(call: Call) -> Unquantised:
    """swiglu's y in float32, by how much it may be off, and by how much it mostly is: E and sigma of
    :mod:`portakern.specs.swiglu`, without the rounding to its dtype."""
    gate, up, unit = call.arrays["gate"], call.arrays["up"], units(call)
    with np.errstate(all="ignore"):
        at, factor = Gate.of(gate, unit), magnitude(up)
        err = at.d_silu * factor + unit.u * np.abs(at.silu) * factor + unit.tau * (factor + np.abs(at.silu) + 1)
        unsure = (np.isinf(up) & vanishes(gate, at)) | (np.abs(at.silu) * factor >= unit.huge)
        err = np.where(unsure, inf, err)
        lean = (unit.u * at.g) ** 2 + (unit.ex / 4) ** 2
        share = at.q**2 * lean + (KAPPA * unit.u) ** 2 * ((at.q * at.g) ** 2 + 6)
        lost = unit.tau * ((np.abs(at.g) + 3) * factor + np.abs(at.silu) + 1)
        y = gate / (1 + np.exp(-gate)) * up
        return Unquantised.of(y, err, np.hypot(lost, magnitude(y) * np.sqrt(share)), gate, up)


@swiglu_quantize.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """swiglu's E, without the rounding of y to its dtype, through :func:`portakern.specs._codes.code_bounds`."""
    return code_bounds(call, ref, computed(call))


@swiglu_quantize.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of scales: :func:`portakern.specs._codes.code_spreads`."""
    return code_spreads(call, ref, computed(call))


# --------------------------------------------------------------------------------------------------------------- edges
@swiglu_quantize.edge(dims={"n": (1, 300)}, options={"scale_ub": None})
def special_gates(arrays, rng, options):
    """silu(inf) is inf, silu(-inf) and silu(NaN) are NaN: the scale of the group is what the greatest number is."""
    arrays["gate"][rng.random(arrays["gate"].shape) < 0.02] = rng.choice([inf, -inf, np.nan])


@swiglu_quantize.edge(dims={"n": (1, 300)}, options={"scale_ub": 1.0})
def infinities_under_a_limit(arrays, rng, options):
    """They saturate, with numbers beside them."""
    arrays["up"][rng.random(arrays["up"].shape) < 0.1] = rng.choice([inf, -inf])


@swiglu_quantize.edge(dims={"n": (1, 300)})
def saturated_gates(arrays, rng, options):
    """Far from 0, silu is the gate itself or next to nothing, and never NaN: exp(-gate) overflows."""
    arrays["gate"] *= 200


@swiglu_quantize.edge(dims={"n": (1, 300)})
def faint_gates(arrays, rng, options):
    """Gates of -10 to -25: the scale is small, and as exact as anywhere."""
    arrays["gate"][...] = -rng.uniform(10, 25, arrays["gate"].shape)


@swiglu_quantize.edge(dims={"n": (2, 300), "width": (1, 60)})
def groups_of_zeros(arrays, rng, options):
    """Their scale is 1, or the floor; each other group has its own. The last one is short."""
    group = np.arange(arrays["up"].shape[-1]) // options["width"]
    arrays["up"] *= rng.choice([0.0, *2.0 ** np.arange(-6, 7)], group[-1] + 1)[group]


@swiglu_quantize.edge(dims={"n": (129, 600), "width": (128, 600)}, smallest_tiles=True)
def groups_of_several_tiles(arrays, rng, options):
    """The greatest number of a group stands in any of its tiles."""
    arrays["up"] *= 2.0 ** rng.integers(-6, 7, arrays["up"].shape)


# ---------------------------------------------------------------------------------------------------------------- laws
@swiglu_quantize.law
def rows_are_independent(run, draw):
    """A row alone has the codes and the scales that it has among others."""
    rows_alone(run, draw, 2)


@swiglu_quantize.law
def powers_of_two_scale_the_scales(run, draw):
    """2^k up has the codes of up, and 2^k times its scales, to the bit; no number is near the ends of the range."""
    shape = draw.extent(1, 5), draw.extent(1, 300)
    gate, up, options = draw.normal(*shape), draw.normal(*shape), drawn_groups(draw, shape[1])
    two = up.dtype.type(2.0 ** draw.extent(0, 4))
    q, scale = run(gate, up * two, **options)
    same_outputs(draw, (q, scale / scale.dtype.type(two)), run(gate, up, **options), "2^k up")


swiglu_quantize.sample("groups", dims={"batch": (3,), "n": 12, "width": 4})
swiglu_quantize.sample("tokens", dims={"batch": (2, 3), "n": 20, "width": 20}, options={"to": "int8"})
swiglu_quantize.sample("short", dims={"batch": (3,), "n": 10, "width": 4}, options={"scales": "power_of_two"})
