"""The gated product of a feed-forward layer, silu(gate) up, and its gradients.

With s = 1 / (1 + exp(-gate)): y = gate s up, d_gate = d_y up s (1 + gate (1 - s)) and d_up = d_y gate s.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.tolerance import KAPPA, Units, magnitude, round_to, store_spread, units
from portakern.specs._gradients import doubled, each_alone, stored_bounds

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class SwigluOut(NamedTuple):
    y: Float[A, "*batch"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 16384, of="batch")},
    apart=("batch",),
    vjp="swiglu_vjp",
    typical={"batch": (4096, 4096)},
    flops=lambda call: 6.0 * prod(call.dims["batch"]),
)
def swiglu(gate: Float[A, "*batch"], up: Float[A, "*batch"]) -> SwigluOut:
    """y = silu(gate) up = gate / (1 + exp(-gate)) up, element by element, in float32 (float64 for float64).

    The source is Shazeer 2020, "GLU variants improve transformer", equation 5, with Swish_1 for silu.

    Args:
      gate: any shape, contiguous or not: such as one half of a projection; up: of that shape.

    Returns:
      y: the shape and dtype of gate. An infinity or NaN reaches its own element alone, by plain arithmetic: silu(inf)
      is inf, silu(-inf) is NaN, and an infinite up beside silu(0) gives NaN.
    """
    raise NotImplementedError


class Gate(NamedTuple):
    """What is known of a gate g, and how far rounding may move it.

    Attributes:
      g: the gate, 0 where it is not finite. s: 1 / (1 + exp(-g)); q: 1 - s. ds, dq: bounds of their errors, as a share.
      silu: g s; d_silu: the bound of its absolute error.
    """

    g: np.ndarray
    s: np.ndarray
    q: np.ndarray
    ds: np.ndarray
    dq: np.ndarray
    silu: np.ndarray
    d_silu: np.ndarray

    @classmethod
    def of(cls, gate: np.ndarray, unit: Units) -> Gate:
        """A share of exp(-g) of 4u |g| + ex moves s by q of it and q by s of it; a sum, a quotient and a product: 5u.

        What is lost of s where it is below tau, or where exp(-g) overflows, is less than tau; and so is g itself.
        """
        g = np.where(np.isfinite(gate), gate, 0.0)
        small = np.exp(-np.abs(g))
        low, high = small / (1 + small), 1 / (1 + small)
        s, q = np.where(g >= 0, high, low), np.where(g >= 0, low, high)
        exp = 4 * unit.u * np.abs(g) + unit.ex
        ds, dq = q * exp + 5 * unit.u, s * exp + 5 * unit.u
        silu = g * s
        return cls(g, s, q, ds, dq, silu, np.abs(silu) * (ds + unit.u) + unit.tau * (np.abs(g) + 2))


def vanishes(gate: np.ndarray, at: Gate) -> np.ndarray:
    """Where silu(gate) may be 0 or not: an infinity that meets it may become NaN or not. silu(0) is 0."""
    return (np.abs(at.silu) <= at.d_silu) & (gate != 0)


@swiglu.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of y, with g = gate, s = 1 / (1 + exp(-g)), q = 1 - s and :class:`portakern.spec.tolerance.Units`:

        B = E (1 + U) + U |y| + eta
        E = |y| [q (4u |g| + ex) + 7u] + tau [(|g| + 3) |up| + |g s| + 1]

    exp(-g) errs by 4u |g| + ex, taken as exp2 of a product with log2(e), and s by q of that; a sum, a quotient of 4u,
    and two products. tau: what flushes of exp(-g), of s, of gate and of up, each next to what it is multiplied with,
    and a silu that is subnormal.

    Nothing is promised where an infinite up meets a silu that may become 0.
    """
    gate, up, unit = call.arrays["gate"], call.arrays["up"], units(call)
    with np.errstate(all="ignore"):
        at = Gate.of(gate, unit)
        factor = magnitude(up)
        err = at.d_silu * factor + unit.u * np.abs(at.silu) * factor + unit.tau * (factor + np.abs(at.silu) + 1)
        err = np.where(np.isinf(up) & vanishes(gate, at), inf, err)
    return (round_to(err, ref[0], call.dtype),)


@swiglu.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of y, with the symbols of the bound:

        sigma^2 = store^2 + y^2 [q^2 ((u g)^2 + (ex/4)^2) + (KAPPA u)^2 (q^2 g^2 + 6)] + lost^2

    store is that of storing y (``store_spread``). The argument of exp2 rounds, its constant leans by up to 0.3 u in all
    elements alike, and exp errs by ex/4. Then a sum, a quotient of twice a rounding, and two products. lost is what
    the bound has with tau, all of it: whether hardware flushes is no matter of chance.
    """
    gate, up, unit = call.arrays["gate"], magnitude(call.arrays["up"]), units(call)
    with np.errstate(all="ignore"):
        at = Gate.of(gate, unit)
        lean = (unit.u * at.g) ** 2 + (unit.ex / 4) ** 2
        share = at.q**2 * lean + (KAPPA * unit.u) ** 2 * ((at.q * at.g) ** 2 + 6)
        lost = unit.tau * ((np.abs(at.g) + 3) * up + np.abs(at.silu) + 1)
        return (np.hypot(np.hypot(store_spread(ref[0], call.dtype), lost), magnitude(ref[0]) * np.sqrt(share)),)


@swiglu.edge(dims={"batch": (1, 300)})
def special_gates(arrays, rng, options):
    """silu(inf) is inf, silu(-inf) and silu(NaN) are NaN, each in its own element."""
    arrays["gate"][rng.random(arrays["gate"].shape) < 0.3] = rng.choice([inf, -inf, np.nan])


@swiglu.edge(dims={"batch": (1, 300)})
def special_ups(arrays, rng, options):
    """An infinity or NaN in up reaches its own element: with the sign of the gate, and NaN beside a gate of 0."""
    arrays["up"][rng.random(arrays["up"].shape) < 0.3] = rng.choice([inf, -inf, np.nan])
    arrays["gate"][rng.random(arrays["gate"].shape) < 0.3] = 0


@swiglu.edge(dims={"batch": (1, 300)})
def saturated_gates(arrays, rng, options):
    """Far from 0, silu is the gate itself or next to nothing, and never NaN: exp(-gate) overflows."""
    arrays["gate"] *= 200


@swiglu.edge(dims={"batch": (1, 300)})
def faint_gates(arrays, rng, options):
    """Gates of -10 to -25, where silu is small and as exact as anywhere: 1 - s would have lost it."""
    arrays["gate"][...] = -rng.uniform(10, 25, arrays["gate"].shape)


@swiglu.edge(dims={"batch": (1, 300)})
def large_products(arrays, rng, options):
    """A small silu beside a large up: the product is ordinary, and so is its error."""
    arrays["gate"][...] = -rng.uniform(5, 10, arrays["gate"].shape)
    arrays["up"] *= 2000


@swiglu.edge(dims={"batch": (1, 1300)}, smallest_tiles=True)
def several_ragged_tiles(arrays, rng, options):
    """The last element of the last tile counts as any other."""


@swiglu.edge(dims={"batch": (1, 1)})
def one_element(arrays, rng, options):
    """The smallest array."""


@swiglu.law
def elements_are_independent(run, draw):
    """A row alone gives the same bits as among others."""
    rows, n = draw.extent(2, 40), draw.extent(1, 300)
    gate, up = draw.normal(rows, n), draw.normal(rows, n)
    first = draw.extent(0, rows - 1)
    row = slice(first, first + 1)
    draw.same_bits(run(gate[row], up[row]), run(gate, up)[row], "a row alone")


@swiglu.law
def powers_of_two_scale_exactly(run, draw):
    """An up that is doubled doubles y, to the bit."""
    gate = draw.normal(draw.extent(1, 5), draw.extent(1, 300))
    up = draw.normal(*gate.shape) * gate.dtype.type(64)  # far from subnormal results
    draw.same_bits(run(gate, up * up.dtype.type(2)), run(gate, up) * up.dtype.type(2), "up doubled")


@swiglu.law
def a_large_gate_multiplies(run, draw):
    """From 100 on silu(gate) is gate, to the bit: y is a product of two integers."""
    gate, up = draw.integers(100, 120, draw.extent(1, 300)), draw.integers(-8, 8, 1)
    up = np.broadcast_to(up, gate.shape).copy()
    draw.same_bits(run(gate, up), gate * up, "an open gate")


swiglu.sample("rows", dims={"batch": (3, 5)})
swiglu.sample("one_axis", dims={"batch": (7,)})
swiglu.sample("three_axes", dims={"batch": (2, 3, 4)})


# ---------------------------------------------------------------------------------------------------------- gradient
class SwigluVjpOut(NamedTuple):
    d_gate: Float[A, "*batch"]
    d_up: Float[A, "*batch"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 16384, of="batch")},
    aliases={"d_gate": "gate", "d_up": "up"},
    apart=("batch",),
    flops=lambda call: 11.0 * prod(call.dims["batch"]),
)
def swiglu_vjp(gate: Float[A, "*batch"], up: Float[A, "*batch"], d_y: Float[A, "*batch"]) -> SwigluVjpOut:
    """d_gate = d_y up s (1 + gate q) and d_up = d_y gate s, with s = 1 / (1 + exp(-gate)), q = 1 / (1 + exp(gate)).

    In float32 (float64 for float64), element by element.

    Args:
      gate, up: what swiglu was given; d_y: the cotangent of what it returned. All of one shape.

    Returns:
      d_gate, d_up: the shape and dtype of gate. An infinite gate gives NaN in d_gate (inf 0), and in d_up what swiglu
      gives with d_y for up.
    """
    raise NotImplementedError


class Slope(NamedTuple):
    """silu'(gate) = s (1 + g q), and the bound of its absolute error.

    Attributes:
      t: the slope; dt: its bound; gq: g q.
    """

    t: np.ndarray
    dt: np.ndarray
    gq: np.ndarray

    @classmethod
    def of(cls, at: Gate, u: float, tau: float) -> Slope:
        """g q errs by dq and a product, 1 + g q by that and a sum, and the product with s by ds and one more.

        tau: s and q lose less than that to underflow, g times as much in g q, and g is read as 0 where it is subnormal.
        """
        gq = at.g * at.q
        inner = 1 + gq
        d_inner = np.abs(gq) * (at.dq + u) + u * np.abs(inner) + tau * (np.abs(at.g) + 2)
        t = at.s * inner
        return cls(t, at.s * d_inner + np.abs(t) * (at.ds + u) + tau * (np.abs(inner) + 1), gq)


@swiglu_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bounds, with g, s, q as above, t = s (1 + g q) and :class:`portakern.spec.tolerance.Units`:

        B = E (1 + U) + U |ref| + eta
        E of d_up = |d_y| (E_silu + u |g s|) + tau (|d_y| + |g s| + 1)
        E of d_gate = |d_y up| (E_t + 2u |t|) + tau (|d_y up| + |d_y| + |up| + |d_y t| + |up t| + 1)
        E_t = s [|g q| (dq + u) + u |1 + g q| + |1 + g q| (ds + u)] + tau (...)

    E_silu, and ds and dq, the shares by which s and q err, are swiglu's: a q made as 1 - s is outside them where it is
    small. E_t does not vanish with t, which is 0 near g = -1.28. tau: each factor may be read as 0, next to the others,
    and so may the product of two.

    Nothing is promised where |d_y up| reaches 2^127, nor where an infinity meets what may be 0 or of either sign.
    """
    (gate, up, d_y), unit = (call.arrays[n] for n in ("gate", "up", "d_y")), units(call)
    with np.errstate(all="ignore"):
        at = Gate.of(gate, unit)
        slope = Slope.of(at, unit.u, unit.tau)
        a, b, silu, t = magnitude(d_y), magnitude(up), np.abs(at.silu), np.abs(slope.t)
        d_up = a * (at.d_silu + unit.u * silu) + unit.tau * (a + silu + 1)
        both = a * b
        flushed = unit.tau * (both + a + b + a * t + b * t + 1)
        d_gate = both * (slope.dt + 2 * unit.u * t) + flushed
        infinite = np.isinf(up) | np.isinf(d_y)
        tiny = ((up != 0) & (b < unit.tau) & np.isfinite(up)) | ((d_y != 0) & (a < unit.tau) & np.isfinite(d_y))
        unsure = infinite & ((t <= slope.dt) | tiny)
        d_gate = np.where(unsure | (both >= unit.huge), inf, d_gate)
        d_up = np.where(np.isinf(d_y) & vanishes(gate, at), inf, d_up)
    return stored_bounds(call, ref, (d_gate, d_up))


@swiglu_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS errors, with the symbols of the bounds, e^2 = (u g)^2 + (ex/4)^2 + (KAPPA u g)^2 that of exp(-g):

        of d_up: d_up^2 [q^2 e^2 + 6 k^2],  k = KAPPA u
        of d_gate: (d_y up)^2 s^2 [(e (g q s - q (1 + g q)))^2 + k^2 (6 (g q)^2 + 8 (1 + g q)^2)]

    and that of storing. exp(-g) is in s and in q at once: s falls by q of its error and q rises by s of it. A sum and a
    quotient in each; then the products and the sum of 1. What flushes is added whole, as in swiglu.
    """
    gate, up, d_y = (call.arrays[n] for n in ("gate", "up", "d_y"))
    unit = units(call)
    with np.errstate(all="ignore"):
        at, k2 = Gate.of(gate, unit), (KAPPA * unit.u) ** 2
        slope = Slope.of(at, unit.u, unit.tau)
        a, b, t = magnitude(d_y), magnitude(up), np.abs(slope.t)
        e2 = (unit.u * at.g) ** 2 + (unit.ex / 4) ** 2 + k2 * at.g**2
        lost_up = unit.tau * ((np.abs(at.g) + 3) * a + np.abs(at.silu) + 1)
        own_up = a * np.abs(at.silu) * np.sqrt(at.q**2 * e2 + 6 * k2)
        inner = 1 + slope.gq
        together = e2 * (slope.gq * at.s - at.q * inner) ** 2
        own_gate = a * b * at.s * np.sqrt(together + k2 * (6 * slope.gq**2 + 8 * inner**2))
        lost = unit.tau * ((np.abs(at.g) + 4) * a * b + a + b + (a + b) * t + 1)
    return tuple(
        None if y is None else np.hypot(store_spread(y, call.dtype), np.hypot(own, flushed))
        for y, own, flushed in zip(ref, (own_gate, own_up), (lost, lost_up), strict=True)
    )


@swiglu_vjp.edge(dims={"batch": (1, 300)})
def special_gates_vjp(arrays, rng, options):
    """An infinite gate has NaN in d_gate, in its own element; in d_up inf gives inf."""
    arrays["gate"][rng.random(arrays["gate"].shape) < 0.3] = rng.choice([inf, -inf, np.nan])


@swiglu_vjp.edge(dims={"batch": (1, 300)})
def special_factors(arrays, rng, options):
    """An infinity or NaN in up reaches d_gate alone, one in d_y both."""
    name = rng.choice(["up", "d_y"])
    arrays[name][rng.random(arrays[name].shape) < 0.3] = rng.choice([inf, -inf, np.nan])


@swiglu_vjp.edge(dims={"batch": (1, 300)})
def saturated_gates_vjp(arrays, rng, options):
    """Far from 0, the slope is 1 or next to nothing, and never NaN."""
    arrays["gate"] *= 200


@swiglu_vjp.edge(dims={"batch": (1, 300)})
def faint_gates_vjp(arrays, rng, options):
    """Gates of -10 to -25, where the slope is small and as exact as anywhere."""
    arrays["gate"][...] = -rng.uniform(10, 25, arrays["gate"].shape)
    arrays["d_y"] *= 1000


@swiglu_vjp.edge(dims={"batch": (1, 300)})
def gates_without_a_slope(arrays, rng, options):
    """silu is least at -1.278, where the slope changes its sign."""
    arrays["gate"][...] = -1.278464542761 + 1e-3 * arrays["gate"]


@swiglu_vjp.edge(dims={"batch": (1, 300)})
def closing_gates(arrays, rng, options):
    """Gates of 5 to 20: g q is what is left of the slope beside 1, and 1 - s has lost most of q."""
    arrays["gate"][...] = rng.uniform(5, 20, arrays["gate"].shape)


swiglu_vjp.edge(dims={"batch": (1, 1300)}, smallest_tiles=True)(several_ragged_tiles)


swiglu_vjp.edge(dims={"batch": (1, 1)})(one_element)


@swiglu_vjp.law
def elements_are_independent_vjp(run, draw):
    """A row alone gives the same bits as among others."""
    rows, n = draw.extent(2, 40), draw.extent(1, 300)
    arrays = [draw.normal(rows, n) for _ in range(3)]
    first = draw.extent(0, rows - 1)
    row = slice(first, first + 1)
    for name, alone, among in zip(("d_gate", "d_up"), run(*(a[row] for a in arrays)), run(*arrays), strict=True):
        draw.same_bits(alone, among[row], f"{name} of a row alone")


@swiglu_vjp.law
def each_gradient_alone(run, draw):
    """Each gradient, asked for alone, has the same bits as among all."""
    shape = draw.extent(1, 5), draw.extent(1, 300)
    each_alone(run, draw, ("d_gate", "d_up"), [draw.normal(*shape) for _ in range(3)])


@swiglu_vjp.law
def powers_of_two_scale_exactly_vjp(run, draw):
    """A cotangent that is doubled doubles both gradients, to the bit."""
    shape = draw.extent(1, 5), draw.extent(1, 300)
    gate, up = draw.integers(-4, 4, *shape), draw.integers(-4, 4, *shape)
    doubled(lambda d_y: run(gate, up, d_y), draw, ("d_gate", "d_up"), draw.normal(*shape))
