"""The gated product of a feed-forward layer, gelu(gate) up, and its gradients.

With gelu(g) = g P(g): y = gelu(gate) up, d_gate = d_y up gelu'(gate) and d_up = d_y gelu(gate).
"""

from __future__ import annotations

from math import inf, pi, prod, sqrt
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.tolerance import KAPPA, Units, magnitude, round_to, store_spread, units
from portakern.specs._gradients import stored_bounds
from portakern.specs.swiglu import (
    each_gradient_alone,
    elements_are_independent,
    elements_are_independent_vjp,
    one_element,
    powers_of_two_scale_exactly,
    powers_of_two_scale_exactly_vjp,
    several_ragged_tiles,
)

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


K, C = 2 * sqrt(2 / pi), 0.044715
"""Of the tanh form: t = K g (1 + C g^2)."""
ROOT_HALF, ROOT_2PI = sqrt(0.5), sqrt(2 * pi)
ERF = 12.0
"""By how many u of 1 erf may be off. Measured in float32 over -8 to 8, at 2e6 points: NumPy's and PyTorch's ``erf`` 1,
Triton's 2, XLA's 5.6; and what ``gelu`` is made of in PyTorch on CPUs, which no other function shows: oneDNN's 11.3 (at
-2.99, after ``F.gelu``), and a formula of Abramowitz and Stegun (7.1.26, off by 2.5 before it rounds), as
``torch.compile`` and builds without oneDNN have it, 9.3 (at 0.07). It is 1 minus something there, so that a small erf
is off by as much as a large one."""
FAR = 40.0
"""Beyond it the share is 1 or nothing in every dtype, and so is the slope: exp(-FAR^2 / 2) is 0 in float64 too."""


class GegluOut(NamedTuple):
    y: Float[A, "*batch"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 16384, of="batch")},
    apart=("batch",),
    vjp="geglu_vjp",
    typical={"batch": (4096, 4096)},
    flops=lambda call: 10.0 * prod(call.dims["batch"]),
)
def geglu(
    gate: Float[A, "*batch"], up: Float[A, "*batch"], *, approximate: Literal["none", "tanh"] = "none"
) -> GegluOut:
    """y = gate P(gate) up, element by element, in float32 (float64 for float64), P the share of the gate that is open.

    P(g) = (1 + erf(g / sqrt 2)) / 2, or with approximate="tanh" s(t) = 1 / (1 + exp(-t)) of t = 2 sqrt(2 / pi) (g +
    0.044715 g^3), which is (1 + tanh(t / 2)) / 2. The options are those of ``torch.nn.functional.gelu``. The sources
    are Shazeer 2020, "GLU variants improve transformer", equation 5, and Hendrycks and Gimpel 2016, "Gaussian error
    linear units", for both forms.

    Args:
      gate: any shape, contiguous or not: such as one half of a projection; up: of that shape.
      approximate: which form P has.

    Returns:
      y: the shape and dtype of gate. An infinity or NaN reaches its own element alone, by plain arithmetic: gelu(inf)
      is inf, gelu(-inf) is NaN, and an infinite up beside gelu(0) gives NaN. P is promised to a few 2^-24 of 1 and not
      of itself: 1 + erf, and 1 + tanh where that is added, have lost what is left of it below -5.
    """
    raise NotImplementedError


class Share(NamedTuple):
    """What is known of a gate g, and how far rounding may move it.

    Attributes:
      g: the gate, 0 where it is not finite. p: P(g); dp: the bound of its absolute error. spread: its RMS error.
      value: g p; error: the bound of its absolute error.
      slope: of g P(g); d_slope: the bound of its absolute error; slope_spread: its RMS error.
    """

    g: np.ndarray
    p: np.ndarray
    dp: np.ndarray
    spread: np.ndarray
    value: np.ndarray
    error: np.ndarray
    slope: np.ndarray
    d_slope: np.ndarray
    slope_spread: np.ndarray

    @classmethod
    def of(cls, call: Call, unit: Units) -> Share:
        gate = call.arrays["gate"]
        g = np.where(np.isfinite(gate), gate, 0.0)
        near = np.clip(g, -FAR, FAR)  # nothing of it changes beyond
        p, dp, spread, *slope = (of_tanh if call.options["approximate"] == "tanh" else of_erf)(near, unit)
        value = g * p
        error = np.abs(g) * dp + unit.u * np.abs(value) + unit.tau * (np.abs(g) + 2)
        return cls(g, p, dp, spread, value, error, *slope)

    def vanishes(self, gate: np.ndarray) -> np.ndarray:
        """Where gelu(gate) may be 0 or not: an infinity that meets it may become NaN or not. gelu(0) is 0."""
        return (np.abs(self.value) <= self.error) & (gate != 0)


def of_tanh(g: np.ndarray, unit: Units) -> tuple[np.ndarray, ...]:
    """p, its error and spread, and the same of the slope p (1 + q r), q = 1 - p and r = g t' = K g (1 + 3 C g^2).

    t and r err by 7u of themselves: C g^2 by 3u and a sum, a constant and two products. exp(-t) then by 7u |t| + 4u
    |t| + ex, of which p takes the share q and q the share p; a sum, a quotient and a product are 5u. The slope is a
    product, a sum and a product of these. A kernel may as well add 1 and tanh(t / 2) = 2 p - 1, which errs by 4u of
    itself, and take q from 1 - tanh^2, until tanh is 1: where |r| is 40. At random it has the constants' lean and the
    argument's of exp2, u each, tanh two roundings, and its square, which meets r / 4, one more: 5/4 of p's.
    """
    u, k2 = unit.u, (KAPPA * unit.u) ** 2
    t, r = K * g * (1 + C * g**2), K * g * (1 + 3 * C * g**2)
    small = np.exp(-np.abs(t))
    low, high = small / (1 + small), 1 / (1 + small)
    p, q = np.where(g >= 0, high, low), np.where(g >= 0, low, high)
    of_exp = 11 * u * np.abs(t) + unit.ex
    share_p, share_q = q * of_exp + 5 * u, p * of_exp + 5 * u
    of_1 = 2 * u * np.abs(2 * p - 1)
    dp = p * share_p + of_1 + unit.tau
    random = 2 * (u * t) ** 2 + (unit.ex / 4) ** 2 + 6 * k2 * t**2
    random_1 = KAPPA * u * np.abs(2 * p - 1)
    spread = np.hypot(p * np.sqrt(q**2 * random + 5 * k2), random_1)

    qr = q * r
    inner = 1 + qr
    d_inner = np.abs(qr) * (share_q + 8 * u) + u * np.abs(inner) + unit.tau * (np.abs(r) + 2)
    slope = p * inner
    d_slope = p * d_inner + np.abs(slope) * (share_p + u) + unit.tau * (np.abs(inner) + 1)
    met = np.minimum(np.abs(r), 40)
    d_slope = d_slope + of_1 * (1 + met)
    together = random * (qr * p - q * inner) ** 2 + 2 * (u * qr) ** 2
    of_slope = np.hypot(p * np.sqrt(together + k2 * (12 * qr**2 + 8 * inner**2)), random_1 * (1 + 1.25 * met))
    return p, dp, spread, slope, d_slope, of_slope


def of_erf(g: np.ndarray, unit: Units) -> tuple[np.ndarray, ...]:
    """p, its error and spread, and the same of the slope p + g n, with n = exp(-g^2 / 2) / sqrt(2 pi).

    The argument g / sqrt 2 errs by 2u of itself, which moves p by 2u |g| n; erf by ``ERF`` u of 1, half of which
    reaches p; the sum 1 + erf by u. exp(-g^2 / 2) errs by u and 4u of its argument, and by ex; then a constant, two
    products and a sum. At random erf errs by a sixth of its bound.
    """
    u, k2 = unit.u, (KAPPA * unit.u) ** 2
    p, n = normal_share(g), np.exp(-(g**2) / 2) / ROOT_2PI
    gn = g * n
    dp = u * (2 * np.abs(gn) + ERF / 2 + p) + unit.tau
    spread = u * np.sqrt(2 * gn**2 + (ERF / 12) ** 2 + (KAPPA * p) ** 2)
    slope, argument = p + gn, g**2 / 2
    of_n = 5 * u * argument + unit.ex + 4 * u
    d_slope = dp + np.abs(gn) * of_n + u * (p + np.abs(gn)) + unit.tau * (np.abs(g) + 2)
    of_n2 = (u * argument) ** 2 + (unit.ex / 4) ** 2 + k2 * (argument**2 + 4) + u**2
    return p, dp, spread, slope, d_slope, np.hypot(np.hypot(spread, gn * np.sqrt(of_n2)), KAPPA * u * slope)


def normal_share(g: np.ndarray) -> np.ndarray:
    """P(g) of the first form, as exact where it is small."""
    from math import erfc

    return np.vectorize(erfc, otypes=[np.float64])(-ROOT_HALF * g) / 2 if g.size else g


@geglu.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of y, with g = gate, gelu = g P(g) and :class:`portakern.spec.tolerance.Units`:

        B = E (1 + U) + U |y| + eta
        E = |up| (|g| E_P + 2u |gelu|) + tau [(|g| + 3) |up| + |gelu| + 1]
        E_P of the first form = u (2 |g| n + ERF / 2 + P),  n = exp(-g^2 / 2) / sqrt(2 pi)
        E_P of the tanh form  = P [(1 - P) (11u |t| + ex) + 5u] + 2u |2 P - 1|

    erf errs by ``ERF`` u, and 1 + erf has lost what P is below -5, as 1 + tanh has; 1 / (1 + exp(-t)) has not. Two
    products follow. tau: what flushes of P, of gate and of up, each next to what it is multiplied with, and a gelu that
    is subnormal.

    Nothing is promised where an infinite up meets a gelu that may become 0.
    """
    gate, up, unit = call.arrays["gate"], call.arrays["up"], units(call)
    with np.errstate(all="ignore"):
        at, factor = Share.of(call, unit), magnitude(up)
        err = at.error * factor + unit.u * np.abs(at.value) * factor + unit.tau * (factor + np.abs(at.value) + 1)
        err = np.where(np.isinf(up) & at.vanishes(gate), inf, err)
    return (round_to(err, ref[0], call.dtype),)


@geglu.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of y: sigma^2 = store^2 + (g up s_P)^2 + 2 (KAPPA u y)^2 + lost^2.

    store is that of storing y (``store_spread``), s_P what the two forms have (:func:`of_erf`, :func:`of_tanh`), lost
    what the bound has with tau, all of it: whether hardware flushes is no matter of chance.
    """
    up, unit = magnitude(call.arrays["up"]), units(call)
    with np.errstate(all="ignore"):
        at = Share.of(call, unit)
        own = np.abs(at.g) * up * np.hypot(at.spread, np.sqrt(2) * KAPPA * unit.u * at.p)
        lost = unit.tau * ((np.abs(at.g) + 3) * up + np.abs(at.value) + 1)
        return (np.hypot(np.hypot(store_spread(ref[0], call.dtype), lost), own),)


@geglu.edge(dims={"batch": (1, 300)})
def special_gates(arrays, rng, options):
    """gelu(inf) is inf, gelu(-inf) and gelu(NaN) are NaN, each in its own element."""
    arrays["gate"][rng.random(arrays["gate"].shape) < 0.3] = rng.choice([inf, -inf, np.nan])


@geglu.edge(dims={"batch": (1, 300)})
def special_ups(arrays, rng, options):
    """An infinity or NaN in up reaches its own element: with the sign of the gate, and NaN beside a gate of 0."""
    arrays["up"][rng.random(arrays["up"].shape) < 0.3] = rng.choice([inf, -inf, np.nan])
    arrays["gate"][rng.random(arrays["gate"].shape) < 0.3] = 0


@geglu.edge(dims={"batch": (1, 300)})
def saturated_gates(arrays, rng, options):
    """Far from 0, gelu is the gate itself or next to nothing, and never NaN: the cube overflows."""
    arrays["gate"] *= 10.0 ** rng.uniform(1, 30 if arrays["up"].size % 2 else 3)


@geglu.edge(dims={"batch": (1, 300)})
def faint_gates(arrays, rng, options):
    """Gates of -3 to -8, where next to nothing is left of the share, beside a large up."""
    arrays["gate"][...] = -rng.uniform(3, 8, arrays["gate"].shape)
    arrays["up"] *= 2000


@geglu.edge(dims={"batch": (1, 300)})
def gates_around_0(arrays, rng, options):
    """Small gates, of which half goes through."""
    arrays["gate"] *= 2.0 ** -rng.uniform(3, 20)


# what any gated product keeps to, whatever its gate makes of a number
geglu.edge(dims={"batch": (1, 1300)}, smallest_tiles=True)(several_ragged_tiles)
geglu.edge(dims={"batch": (1, 1)})(one_element)
geglu.law(elements_are_independent)
geglu.law(powers_of_two_scale_exactly)


@geglu.law
def a_large_gate_multiplies(run, draw):
    """From 100 on gelu(gate) is gate, to the bit and in both forms: y is a product of two integers."""
    gate, up = draw.integers(100, 120, draw.extent(1, 300)), draw.integers(-8, 8, 1)
    up = np.broadcast_to(up, gate.shape).copy()
    for approximate in ("none", "tanh"):
        draw.same_bits(run(gate, up, approximate=approximate), gate * up, "an open gate")


geglu.sample("rows", dims={"batch": (3, 5)})
geglu.sample("tanh", dims={"batch": (7,)}, options={"approximate": "tanh"})
geglu.sample("three_axes", dims={"batch": (2, 3, 4)})


# ---------------------------------------------------------------------------------------------------------- gradient
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
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
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
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
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
def special_gates_vjp(arrays, rng, options):
    """An infinite gate has a slope of 1 or 0, each in its own element."""
    arrays["gate"][rng.random(arrays["gate"].shape) < 0.3] = rng.choice([inf, -inf, np.nan])


@geglu_vjp.edge(dims={"batch": (1, 300)})
def special_factors(arrays, rng, options):
    """An infinity or NaN in up reaches d_gate alone, one in d_y both."""
    name = rng.choice(["up", "d_y"])
    arrays[name][rng.random(arrays[name].shape) < 0.3] = rng.choice([inf, -inf, np.nan])


@geglu_vjp.edge(dims={"batch": (1, 300)})
def saturated_gates_vjp(arrays, rng, options):
    """Far from 0, the slope is 1 or next to nothing, and never NaN: the cube overflows."""
    arrays["gate"] *= 10.0 ** rng.uniform(1, 30 if arrays["up"].size % 2 else 3)


@geglu_vjp.edge(dims={"batch": (1, 300)})
def faint_gates_vjp(arrays, rng, options):
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
geglu_vjp.law(elements_are_independent_vjp)
geglu_vjp.law(each_gradient_alone)
geglu_vjp.law(powers_of_two_scale_exactly_vjp)
