"""Gradients of the gated product gelu(gate) up."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.tolerance import KAPPA, magnitude, store_spread, units
from portakern.specs._gradients import stored_bounds
from portakern.specs.geglu import Share
from portakern.specs.swiglu_vjp import (
    each_gradient_alone,
    elements_are_independent,
    one_element,
    powers_of_two_scale_exactly,
    several_ragged_tiles,
)

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class GegluVjpOut(NamedTuple):
    d_gate: Float[A, "*batch"]
    d_up: Float[A, "*batch"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 16384, of="batch")},
    aliases={"d_gate": "gate", "d_up": "up"},
    apart=("batch",),
    flops=lambda call: 18.0 * prod(call.dims["batch"]),
)
def geglu_vjp(
    gate: Float[A, "*batch"],
    up: Float[A, "*batch"],
    d_y: Float[A, "*batch"],
    *,
    approximate: Literal["none", "tanh"] = "none",
) -> GegluVjpOut:
    """d_gate = d_y up D(gate) and d_up = d_y gate P(gate), with D the slope of g P(g), element by element.

    P as in geglu; D(g) = P(g) + g exp(-g^2 / 2) / sqrt(2 pi), or of the tanh form s (1 + g t' (1 - s)) with s = P(g)
    and t' = 2 sqrt(2 / pi) (1 + 3 0.044715 g^2). In float32 (float64 for float64).

    Args:
      gate, up, approximate: what geglu was given; d_y: the cotangent of what it returned. All of one shape.

    Returns:
      d_gate, d_up: the shape and dtype of gate. The slope at an infinite gate is its limit, 1 or 0; d_up is there what
      geglu gives with d_y for up.
    """
    raise NotImplementedError


@geglu_vjp.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bounds, with gelu = gate P, E_gelu as in geglu, and :class:`portakern.spec.tolerance.Units`:

        B = E (1 + U) + U |ref| + eta
        E of d_up = |d_y| (E_gelu + u |gelu|) + tau (|d_y| + |gelu| + 1)
        E of d_gate = |d_y up| (E_D + 2u |D|) + tau (|d_y up| + |d_y| + |up| + |d_y D| + |up D| + 1)

    E_D: see ``of_erf`` and ``of_tanh`` of geglu. It does not vanish with D, which is 0 near gate = -0.75. tau: each
    factor may be read as 0, next to the others, and so may the product of two.

    Nothing is promised where |d_y up| reaches 2^127, nor where an infinity meets what may be 0 or of either sign.
    """
    gate, up, d_y, unit = *(call.arrays[n] for n in ("gate", "up", "d_y")), units(call)
    with np.errstate(all="ignore"):
        at = Share.of(call, unit)
        a, b, gelu = magnitude(d_y), magnitude(up), np.abs(at.value)
        slope, d_slope = limits(at, gate, at.slope, at.d_slope)
        d_up = a * (at.error + unit.u * gelu) + unit.tau * (a + gelu + 1)
        both, t = a * b, np.abs(slope)
        flushed = unit.tau * (both + a + b + a * t + b * t + 1)
        d_gate = both * (d_slope + 2 * unit.u * t) + flushed
        infinite = np.isinf(up) | np.isinf(d_y)
        tiny = ((up != 0) & (b < unit.tau) & np.isfinite(up)) | ((d_y != 0) & (a < unit.tau) & np.isfinite(d_y))
        unsure = infinite & ((t <= d_slope) | tiny)
        d_gate = np.where(unsure | (both >= unit.huge), inf, d_gate)
        d_up = np.where(np.isinf(d_y) & at.vanishes(gate), inf, d_up)
    return stored_bounds(call, ref, (d_gate, d_up))


def limits(at: Share, gate: np.ndarray, slope: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slope and its error, with those far from 0 at an infinite gate."""
    infinite = np.isinf(gate)
    return np.where(infinite, gate > 0, slope), np.where(infinite, at.dp, error)


@geglu_vjp.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS errors, with those of P and D, s_P and s_D, in the two forms (``of_erf`` and ``of_tanh`` of geglu):

        of d_up: (d_y gate)^2 [s_P^2 + 2 (KAPPA u P)^2]
        of d_gate: (d_y up)^2 [s_D^2 + 2 (KAPPA u D)^2]

    and that of storing. What flushes is added whole, as in geglu.
    """
    gate, up, d_y, unit = *(call.arrays[n] for n in ("gate", "up", "d_y")), units(call)
    with np.errstate(all="ignore"):
        at, k = Share.of(call, unit), np.sqrt(2) * KAPPA * unit.u
        a, b = magnitude(d_y), magnitude(up)
        slope, of_slope = limits(at, gate, at.slope, at.slope_spread)
        t = np.abs(slope)
        own_up = a * np.abs(at.g) * np.hypot(at.spread, k * at.p)
        own_gate = a * b * np.hypot(of_slope, k * t)
        lost_up = unit.tau * ((np.abs(at.g) + 3) * a + np.abs(at.value) + 1)
        lost = unit.tau * ((np.abs(at.g) + 4) * a * b + a + b + (a + b) * t + 1)
    return tuple(
        None if y is None else np.hypot(store_spread(y, call.dtype), np.hypot(own, flushed))
        for y, own, flushed in zip(ref, (own_gate, own_up), (lost, lost_up), strict=True)
    )


@geglu_vjp.edge(dims={"batch": (1, 300)})
def special_gates(arrays, rng, options):
    """An infinite gate has a slope of 1 or 0, each in its own element."""
    arrays["gate"][rng.random(arrays["gate"].shape) < 0.3] = rng.choice([inf, -inf, np.nan])


@geglu_vjp.edge(dims={"batch": (1, 300)})
def special_factors(arrays, rng, options):
    """An infinity or NaN in up reaches d_gate alone, one in d_y both."""
    name = rng.choice(["up", "d_y"])
    arrays[name][rng.random(arrays[name].shape) < 0.3] = rng.choice([inf, -inf, np.nan])


@geglu_vjp.edge(dims={"batch": (1, 300)})
def saturated_gates(arrays, rng, options):
    """Far from 0, the slope is 1 or next to nothing, and never NaN: the cube overflows."""
    arrays["gate"] *= 10.0 ** rng.uniform(1, 30 if arrays["up"].size % 2 else 3)


@geglu_vjp.edge(dims={"batch": (1, 300)})
def faint_gates(arrays, rng, options):
    """Gates of -3 to -8, where next to nothing is left of the slope, beside a large cotangent."""
    arrays["gate"][...] = -rng.uniform(3, 8, arrays["gate"].shape)
    arrays["d_y"] *= 1000


@geglu_vjp.edge(dims={"batch": (1, 300)})
def gates_without_a_slope(arrays, rng, options):
    """gelu is least at -0.752, where the slope changes its sign."""
    arrays["gate"][...] = -0.7517915246935645 + 1e-3 * arrays["gate"]


# what the gradients of any gated product keep to, whatever its gate makes of a number
geglu_vjp.edge(dims={"batch": (1, 1300)}, smallest_tiles=True)(several_ragged_tiles)
geglu_vjp.edge(dims={"batch": (1, 1)})(one_element)
geglu_vjp.law(elements_are_independent)
geglu_vjp.law(each_gradient_alone)
geglu_vjp.law(powers_of_two_scale_exactly)
