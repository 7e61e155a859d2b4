"""Gradients of the linear layer with bias, activation and residual."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import When, spec
from portakern.spec.tolerance import KAPPA, format_of, magnitude, round_to, rounded, store_spread, units
from portakern.specs._gradients import doubled, each_alone
from portakern.specs._rows import mean_variance
from portakern.specs.linear import Activated, rows_of
from portakern.specs.linear_cross_entropy import as_product, lost, measured, of_brackets, of_matmul, room

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class LinearVjpOut(NamedTuple):
    d_x: Float[A, "*batch k"]
    d_weight: Float[A, "n k"]
    d_bias: Float[A, "n"]


@spec(
    tiling={},
    positive=("k",),
    passes={"residual": "d_y"},
    reads={"pre": When(lambda options: options["activation"] != "none", "where there is an activation")},
    apart=lambda options, wants: (
        "k",
        *(["batch"] if set(wants) == {"d_x"} else []),
        *(["n"] if "d_x" not in wants else []),
    ),
    typical={"batch": (4096,), "n": 4096, "k": 4096, "pre": True, "bias": True, "activation": "gelu_tanh"},
    flops=lambda call: (
        (2.0 * call.dims["k"] * len({"d_x", "d_weight"} & {*call.wants}) + 1)
        * prod(call.dims["batch"])
        * call.dims["n"]
    ),
)
def linear_vjp(
    x: Float[A, "*batch k"],
    weight: Float[A, "n k"],
    d_y: Float[A, "*batch n"],
    pre: Float[A, "*batch n"] | None = None,
    bias: Float[A, "n"] | None = None,
    *,
    activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
    precision: Literal["ieee", "tf32"] = "ieee",
) -> LinearVjpOut:
    """d_x = d_z weight, d_weight = d_z^T x and d_bias = the sum of d_z over all rows, with d_z = d_y f'(pre).

    Products and sums are float32 (float64 for float64) and rounded once; d_z may be rounded to x's dtype before them,
    once. f' of relu is 0 up to 0 and 1 beyond, and selects: what it leaves out is 0 whatever d_y holds. The gradient of
    the residual is d_y and is not computed.

    Args:
      x, weight, activation, precision: what linear was given.
      d_y: (*batch, n), the cotangent of its y.
      pre: (*batch, n), what it found; None where there is no activation, and d_z is d_y.
      bias: (n,), as in linear. Its values are not read: it says that d_bias exists.

    Returns:
      d_x, d_weight, d_bias: the shape and dtype of x, weight and bias, None where that was not given. The slope at an
      infinite pre is its limit, 1 or 0, but NaN for silu (inf 0).
    """
    raise NotImplementedError


CURVE = 0.81
"""No |f''| of an activation is more: it is largest in 0, 2 phi(0) = .798 for gelu, a little more for its tanh form
(.801), and 1/2 for silu."""


class Cotangent(NamedTuple):
    """d_z of all rows, (rows, n), as a kernel multiplies it.

    Attributes:
      value: exact; err: how far a kernel's may be off, +inf where it is not known; spread: the RMS of that.
    """

    value: np.ndarray
    err: np.ndarray
    spread: np.ndarray

    @classmethod
    def of(cls, call: Call) -> Cotangent:
        d_y, unit = rows_of(call, "d_y"), units(call)
        if call.options["activation"] == "none":
            return cls(d_y, np.zeros(d_y.shape), np.zeros(d_y.shape))
        z, off = rows_of(call, "pre"), np.broadcast_to(call.off.get("pre", 0.0), call.arrays["pre"].shape)
        off = off.reshape(d_y.shape)
        if call.options["activation"] == "relu":
            # selected and not multiplied: what is stored is d_y itself, and what is subnormal may be lost
            err = np.where(np.isfinite(d_y) & (np.abs(d_y) < unit.eta), unit.eta, 0.0)
            err = np.where(np.abs(z) <= off, magnitude(d_y), err) if "pre" in call.off else err
            return cls(np.where(z <= 0, 0.0, d_y), err, np.zeros(d_y.shape))
        at, size = Activated.of(call, z, unit), magnitude(d_y)
        value = d_y * at.slope
        d_slope = at.d_slope + CURVE * off
        err = size * (d_slope + unit.u * np.abs(at.slope)) + unit.tau * (size + np.abs(at.slope) + 1)
        unsure = np.isinf(d_y) & (np.abs(at.slope) <= d_slope)
        err = round_to(np.where(unsure, inf, err), value, call.dtype)
        own = size * np.hypot(at.slope_spread, KAPPA * unit.u * at.slope)
        return cls(value, err, np.hypot(store_spread(value, call.dtype), own))


@linear_vjp.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bounds, each E (1 + U) + U |value| + eta, with E_d how far a kernel's d_z may be off, M the number of rows:

        d_x, d_weight: matmul's of d_z as large as it may be, and sum E_d |weight| or sum E_d |x| beside it
        d_bias: E = (M + 1) u sum (|d_z| + E_d) + sum E_d + M tau
        E_d = [|d_y| (E_f' + u |f'|) + tau (|d_y| + |f'| + 1)] (1 + U) + U |d_z| + eta

    E_f' is that of the slope of geglu's or swiglu's gate; U is what storing d_z costs. Without an activation, and for
    relu, E_d is 0 but for what flushes. Where pre may be off by o, E_f' has ``CURVE`` o more, and relu may select
    either where |pre| <= o. Nothing is promised where an infinite d_y meets a slope that may be 0.
    """
    unit, m = units(call), prod(call.dims["batch"])
    with np.errstate(all="ignore"):
        d_z = Cotangent.of(call)
        found: list[Any] = [None, None, None]
        for i, (a, b, err) in enumerate(products(call, d_z)):
            if ref[i] is not None:
                found[i] = of_brackets(call, a, err, b, ref[i].reshape(a.shape[0], b.shape[1])).reshape(ref[i].shape)
        if ref[2] is not None:
            sizes = (magnitude(d_z.value) + d_z.err).sum(0)
            err = (m + 1) * unit.u * sizes + d_z.err.sum(0) + m * unit.tau
            beyond = (magnitude(d_z.value) + d_z.err >= format_of(call.dtype).overflow).any(0)
            found[2] = round_to(np.where(beyond | (sizes >= unit.huge), inf, err), ref[2], call.dtype)
    return tuple(found)


def products(call: Call, d_z: Cotangent) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]:
    """The two products of d_z: its factors and how far the first may be off."""
    return (
        (d_z.value, np.asarray(call.arrays["weight"]), d_z.err),
        (d_z.value.T, rows_of(call, "x"), d_z.err.T),
    )


def finite(x: np.ndarray) -> np.ndarray:
    """x, with 0 for infinities and NaN."""
    return np.where(np.isfinite(x), x, 0.0)


@linear_vjp.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS errors, with s_d that of d_z as it is stored, s_c of a product alone, M the number of rows:

        d_x, d_weight: s_c^2 + R sum s_d^2 weight^2, or x^2
        d_bias: store^2 + M^2 s^2 + sum s_d^2          s^2: of a mean (``mean_variance``)

    R is the ``room`` for what numbers of d_z draw. An error is not known where d_z is ``lost``, or where what storing
    it costs adds up instead of being random: of many that are alike.
    """
    m = prod(call.dims["batch"])
    with np.errstate(all="ignore"):
        d_z = Cotangent.of(call)
        rounding = d_z.spread.any()
        known = finite(d_z.value)
        off = finite(rounded(known, call.dtype).astype(np.float64) - known) if rounding else np.zeros(known.shape)
        found: list[Any] = [None, None, None]
        for i, ((a, b, _), s, o) in enumerate(
            zip(products(call, d_z), (d_z.spread, d_z.spread.T), (off, off.T), strict=True)
        ):
            if ref[i] is not None:
                y = ref[i].reshape(a.shape[0], b.shape[1])
                product = of_matmul(call, "spread", a, b, y)
                gone = rounding & lost(call, a, -1)
                met = room(call, np.where(gone, 0.0, a)) * (magnitude(s) ** 2 @ magnitude(b) ** 2)
                unknown = (np.abs(o @ finite(b)) > 4 * np.sqrt(met)) | gone
                found[i] = np.where(unknown, inf, np.sqrt(product**2 + met)).reshape(ref[i].shape)
        if ref[2] is not None:
            met = (magnitude(d_z.spread) ** 2).sum(0)
            variance = m**2 * mean_variance(known, 0, m, (KAPPA * units(call).u) ** 2)[0]
            spread = np.hypot(store_spread(ref[2], call.dtype), np.sqrt(variance + met))
            unknown = (np.abs(off.sum(0)) > 4 * np.sqrt(met)) | (rounding & lost(call, known, 0)[0])
            found[2] = np.where(unknown, inf, spread)
    return tuple(found)


@linear_vjp.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Integers whose sums the accumulator holds, where d_z is d_y or 0."""
    if call.options["activation"] not in ("none", "relu"):
        return tuple(None if y is None else np.zeros(y.shape, bool) for y in ref)
    found: list[Any] = [None, None, None]
    with np.errstate(all="ignore"):
        d_z = Cotangent.of(call)
        for i, (a, b, _) in enumerate(products(call, d_z)):
            if ref[i] is not None:
                (whole,) = measured(as_product(call, a, b), "forced", ref[i].reshape(a.shape[0], b.shape[1]))
                found[i] = whole.reshape(ref[i].shape)
        if ref[2] is not None:
            whole = np.isfinite(d_z.value) & (d_z.value == np.trunc(d_z.value))
            found[2] = whole.all(0) & (magnitude(d_z.value).sum(0) < 1 / units(call).u)
    return tuple(found)


@linear_vjp.edge(dims={"batch": (1, 40), "k": (1, 40), "n": (1, 40)})
def nan_and_inf_in_a_cotangent(arrays, rng, options):
    """NaN in d_y reaches a row of d_x, a row of d_weight and an element of d_bias."""
    d_y = arrays["d_y"].reshape(-1, arrays["d_y"].shape[-1])
    d_y[rng.integers(len(d_y)), rng.integers(d_y.shape[-1])] = rng.choice([np.nan, inf, -inf])


@linear_vjp.edge(dims={"batch": (1, 40), "k": (1, 40), "n": (1, 40)})
def infinite_rows(arrays, rng, options):
    """An infinite or NaN x makes an infinite or NaN pre, whose slope is its limit: 1 or 0, or NaN."""
    x = arrays["x"].reshape(-1, arrays["x"].shape[-1])
    x[rng.integers(len(x)), rng.integers(x.shape[-1])] = rng.choice([inf, np.nan])


@linear_vjp.edge(dims={"batch": (1, 20), "k": (1, 20), "n": (1, 40)}, options={"activation": "gelu_tanh"})
def around_0(arrays, rng, options):
    """z of about 1, where the slopes of the two forms of gelu differ most."""
    arrays["x"] /= 4


@linear_vjp.edge(dims={"batch": (1, 20), "k": (1, 20), "n": (1, 40)}, options={"activation": "silu"})
def silus_around_0(arrays, rng, options):
    """silu is least at -1.28, where its slope changes its sign."""
    arrays["x"] /= 4


@linear_vjp.edge(dims={"batch": (1, 20), "k": (1, 20), "n": (1, 40)})
def saturated(arrays, rng, options):
    """Far from 0 the slope is 1 or next to nothing, and never NaN: cubes overflow."""
    arrays["x"] *= 10.0 ** rng.uniform(1, 15 if arrays["x"].size % 2 else 3)


@linear_vjp.edge(dims={"batch": (1, 20), "k": (1, 20), "n": (1, 40)}, regime="integers", options={"activation": "relu"})
def the_kink(arrays, rng, options):
    """Sums that are 0 have a slope of 0, and what relu leaves out is 0 beside any cotangent."""
    arrays["x"][rng.random(arrays["x"].shape) < 0.5] = 0


@linear_vjp.edge(dims={"batch": (129, 300), "k": (1, 20), "n": (1, 40)}, regime="integers")
def many_rows_of_integers(arrays, rng, options):
    """Sums over rows are exact: one that is dropped or counted twice shows."""


@linear_vjp.edge(dims={"batch": (17, 40), "k": (1, 20), "n": (1025, 1100)})
def several_ragged_tiles(arrays, rng, options):
    """The last column of the last tile counts as any other."""


@linear_vjp.edge(dims={"batch": (1, 1), "k": (1, 40), "n": (1, 40)})
def one_row(arrays, rng, options):
    """Each element of d_weight is one product."""


@linear_vjp.edge(dims={"batch": (1, 9), "k": (1, 40), "n": (1, 40)}, options={"precision": "tf32"})
def products_of_10_bits(arrays, rng, options):
    """precision counts where products are of float32."""


NAMES = ("d_x", "d_weight", "d_bias")


def drawn(draw):
    """x, weight, d_y, pre and bias of a call."""
    rows, k, n = draw.extent(2, 70), draw.extent(1, 70), draw.extent(1, 140)
    return draw.normal(rows, k), draw.normal(n, k), draw.normal(rows, n), draw.normal(rows, n), draw.normal(n)


@linear_vjp.law
def rows_are_independent(run, draw):
    """A row of d_x alone has the same bits as among others."""
    x, weight, d_y, pre, _ = drawn(draw)
    first = draw.extent(0, len(x) - 1)
    row = slice(first, first + 1)
    alone = run(x[row], weight, d_y[row], pre[row], activation="silu")[0]
    draw.same_bits(alone, run(x, weight, d_y, pre, activation="silu")[0][row], "a row alone")


@linear_vjp.law
def gradients_do_not_depend_on_which_are_wanted(run, draw):
    """Each gradient, asked for alone, has the same bits."""
    arrays = drawn(draw)
    each_alone(lambda *a, **o: run(*a, activation="gelu_tanh", **o), draw, NAMES, arrays)


@linear_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles every gradient, to the bit."""
    x, weight, d_y, pre, bias = drawn(draw)
    pre = np.abs(pre)  # where no slope is so small that the product is subnormal
    doubled(lambda d_y: run(x, weight, d_y, pre, bias, activation="gelu"), draw, NAMES, d_y)


@linear_vjp.law
def an_open_activation_is_none(run, draw):
    """From 100 on every slope is 1, and every gradient that of the layer without an activation, to the bit."""
    x, weight, d_y, pre, bias = drawn(draw)
    bare = run(x, weight, d_y, None, bias)
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        opened = run(x, weight, d_y, np.abs(pre) + pre.dtype.type(100), bias, activation=activation)
        for name, one, other in zip(NAMES, opened, bare, strict=True):
            draw.same_bits(one, other, f"{name} of {activation}")


linear_vjp.sample("plain", dims={"batch": (3,), "k": 5, "n": 4})
linear_vjp.sample("gelu", dims={"batch": (2, 3), "k": 5, "n": 4}, given=("bias",), options={"activation": "gelu"})
linear_vjp.sample("silu", dims={"batch": (3,), "k": 5, "n": 4}, options={"activation": "silu"})
