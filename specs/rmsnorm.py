"""Root mean square normalisation over the last axis, and its gradients.

With r = (mean(x^2) + eps)^-1/2, xh = x r and h = d_y weight: y = xh weight, and d_x = r (h - xh mean(h xh)),
d_weight = sum of d_y xh.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import Range
from portakern.spec.tolerance import KAPPA, magnitude, round_to, rounded, rounding_error, store_spread, units
from portakern.specs._gradients import doubled, each_alone, row_alone, stored_bounds, stored_spreads
from portakern.specs._rows import mean_variance, plant, share_of_root, silence_all_but_one

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class RmsnormOut(NamedTuple):
    y: Float[A, "*batch n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="n")},
    or_float32=("weight",),
    apart=("batch",),
    vjp="rmsnorm_vjp",
    autocast="float32",
    typical={"batch": (4096,), "n": 4096, "weight": True},
    flops=lambda call: 4.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def rmsnorm(
    x: Float[A, "*batch n"],
    weight: Float[A, "n"] | None = None,
    *,
    eps: Annotated[float, Range(0.0, typical=(1e-6, 1e-12, 1e-2))] = 1e-6,
    rounding: Literal["once", "before_weight"] = "once",
) -> RmsnormOut:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 (float64 for float64).

    The source is Zhang and Sennrich 2019, equation 4.

    Args:
      x: (*batch, n).
      weight: (n,), x's dtype or float32; None is 1. A model that keeps weight - 1 passes the sum.
      eps: added to the mean of squares, >= 0; a number, where torch.nn.functional.rms_norm takes None for a dtype's
        own.
      rounding: "once" rounds the result to x's dtype and nothing before it, as torch.nn.functional.rms_norm and Gemma
        do; "before_weight" also rounds x / sqrt(...) to x's dtype before the product with weight, as Llama does. They
        differ where x has 16 bits and there is a weight.

    Returns:
      y: the shape and dtype of x. What arithmetic makes of infinities: a NaN makes its row NaN; an inf makes its own
      element NaN and the others of its row 0. Guaranteed while a row's sum of x^2 is under 2^127 (2^1023 in float64).
    """
    raise NotImplementedError


def root(call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """r of each row, (*batch, 1); rho, the share of itself by which it errs; and of which rows nothing is promised.

    r = v^-1/2 with v = mean x^2 + eps, which errs by the share (c_N + 6) u of itself, c_N = chain(n): the square, c_N
    additions, a division (2 ulp), the sum with eps; 3 tau come or go where squares, their mean or eps flush. rho is the
    share by which the ends of that range move v^-1/2, and 4u for the root (2 ulp). An infinite v makes r 0, exactly.

    Nothing is promised where the low end is not positive (eps = 0 on a row of zeros, or of squares next to subnormal),
    or where sum x^2 reaches 2^127.
    """
    x, unit = call.arrays["x"], units(call)
    total = np.square(x).sum(-1, keepdims=True)
    v, share = total / x.shape[-1] + call.options["eps"], (unit.chain(x.shape[-1]) + 6) * unit.u
    low, high = v * (1 - share) - 3 * unit.tau, v * (1 + share) + 3 * unit.tau
    rho = np.maximum(np.sqrt(v / low) - 1, 1 - np.sqrt(v / high)) + 4 * unit.u
    unsure = (low <= 0) | (np.isfinite(x).all(-1, keepdims=True) & (total >= unit.huge))
    return 1 / np.sqrt(v), np.where(np.isinf(v), 0.0, rho), unsure


def rounds(call: Call) -> str | None:
    """The dtype to which xh is rounded before it meets the weight; None where it is not, or rounds in computing."""
    kind = DTYPES[call.dtype_of("x")]
    return kind.name if call.options["rounding"] == "before_weight" and kind.bits < 32 else None


def normalised_error(call: Call, xh: np.ndarray, r: np.ndarray, rho: np.ndarray, flushes: float = 1.0) -> np.ndarray:
    """dxh = |xh| (rho + 4u) + r tau (1 + rho) + tau, by which xh = x r may be off.

    In order: r and the product (or a quotient by the root, 2 ulp); x where it flushes, or ``flushes`` times tau of it;
    the product where it does.
    """
    unit = units(call)
    return np.abs(xh) * (rho + 4 * unit.u) + r * flushes * unit.tau * (1 + rho) + unit.tau


@rmsnorm.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of y, w being weight, with :class:`portakern.spec.tolerance.Units`:

        B = E (1 + U) + U |y| + eta,  E = |w| dxh + u |xh w| + tau (|xh| + 1)

    Where rounding is "before_weight", xh is the rounded one, and two that lie within dxh of each other are rounded to
    numbers that lie further apart by what :func:`portakern.spec.tolerance.rounding_error` says: mostly not at all.

    xh = x r errs by dxh (:func:`normalised_error`), of which r's share is rho (:func:`root`); then the product with w
    rounds, and w or the product may flush. Beyond what root promises: nothing where |xh w| reaches 2^127, or where w is
    infinite beside an x whose xh may flush (0 * inf is NaN).
    """
    return (round_to(error(call), ref[0], call.dtype),)


def error(call: Call, flushes: float = 1.0) -> np.ndarray:
    """E of :func:`bound`, where x may have lost so many tau on its way here."""
    x, w, unit = call.arrays["x"], call.arrays["weight"], units(call)
    w = np.ones(1) if w is None else w
    with np.errstate(all="ignore"):
        r, rho, unsure = root(call)
        xh = magnitude(x) * r
        dxh, narrow = normalised_error(call, xh, r, rho, flushes), rounds(call)
        if narrow:
            dxh, xh = rounding_error(xh, dxh, narrow), rounded(xh, narrow).astype(np.float64)
        product = xh * magnitude(w)
        err = magnitude(w) * dxh + unit.u * product + unit.tau * (xh + 1)
        unsure = unsure | (product >= unit.huge) | (np.isinf(w) & (x != 0) & (xh <= dxh))
        return np.where(unsure, inf, err)


def root_spread(call: Call) -> float:
    """The variance of r's relative error, (1 + 8/M) (KAPPA u)^2 (c_N / 12 + 5): of half that of v, and of the root.

    The i-th of c_N = chain(n) additions rounds a partial sum of i/c_N of the whole, c_N / 3 in all; a tree's levels 2;
    half of it leaves a quarter, c_N / 12 + 1/2. The square, the division (2 ulp) and the sum with eps leave less than
    2, an approximate root less than 3. It is one draw for a row: 8/M makes room for what M rows may draw.
    """
    rows, unit = max(prod(call.dims["batch"]), 1), units(call)
    return float((1 + 8 / rows) * (KAPPA * unit.u) ** 2 * (unit.chain(call.dims["n"]) / 12 + 5))


@rmsnorm.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """sigma^2 = store^2 + y^2 [q + 2 (KAPPA u)^2], the RMS error of y.

    In order: storing y (``store_spread``), r's error with q of :func:`root_spread`, two products.
    """
    share = np.sqrt(root_spread(call) + 2 * (KAPPA * units(call).u) ** 2)
    return (np.hypot(store_spread(ref[0], call.dtype), share * np.abs(ref[0])),)


@rmsnorm.edge(dims={"n": (1, 300)})
def nan_in_a_row(arrays, rng, options):
    """A NaN makes its whole row NaN, and no other."""
    plant(rng, arrays["x"], np.nan)


@rmsnorm.edge(dims={"n": (1, 300)})
def inf_in_a_row(arrays, rng, options):
    """An inf makes its own element NaN and the others of its row 0."""
    plant(rng, arrays["x"], rng.choice([inf, -inf]))


@rmsnorm.edge(dims={"n": (1, 300)}, absent=("weight",))
def rows_of_zeros(arrays, rng, options):
    """A row of zeros stays zeros, whatever eps > 0."""
    arrays["x"][rng.random(arrays["x"].shape[:-1]) < 0.5] = 0


@rmsnorm.edge(dims={"n": (1, 300)}, options={"eps": 0.0})
def no_eps(arrays, rng, options):
    """eps = 0 is allowed."""


@rmsnorm.edge(dims={"n": (1, 300)}, options={"eps": 1e-2})
def rows_next_to_eps(arrays, rng, options):
    """A mean of squares like eps: added outside the root, or to the root, it would be another number."""
    arrays["x"] *= 0.1


@rmsnorm.edge(dims={"n": (2, 300)}, regime="large_mean")
def large_mean(arrays, rng, options):
    """The mean is not subtracted."""


@rmsnorm.edge(dims={"n": (1, 300)})
def squares_beyond_float16(arrays, rng, options):
    """Squares of ordinary values of every dtype reach past float16's 65504."""
    arrays["x"] *= 512


@rmsnorm.edge(dims={"n": (129, 513)}, smallest_tiles=True)
def many_tiles(arrays, rng, options):
    """Rows of several tiles, of which the last is ragged; each tile has its own size."""
    arrays["x"] *= 2.0 ** (np.arange(arrays["x"].shape[-1]) // 128)


@rmsnorm.edge(dims={"n": (1, 300)}, given=("weight",))
def nan_in_a_weight(arrays, rng, options):
    """NaN in weight reaches its column alone."""
    arrays["weight"][rng.integers(arrays["weight"].shape[0])] = np.nan


@rmsnorm.edge(dims={"n": (1, 1)})
def rows_of_one_element(arrays, rng, options):
    """n = 1: the sign of x, times the weight, but for eps."""


@rmsnorm.law
def rows_are_independent(run, draw):
    """A row alone gives the same bits as among others."""
    draw.row_alone(run)


@rmsnorm.law
def scale_invariant(run, draw):
    """rmsnorm(2^k x) = rmsnorm(x) at eps = 0, to the bit.

    Powers of two round nothing, unless they lead to subnormal numbers (so k >= 0).
    """
    x = draw.normal(draw.extent(1, 5), draw.extent(1, 300))
    scaled = x * x.dtype.type(2.0 ** draw.extent(0, 8))
    draw.same_bits(run(scaled, eps=0.0), run(x, eps=0.0), "a row scaled by a power of two")


@rmsnorm.law
def a_weight_of_powers_of_two_scales_exactly(run, draw):
    """A weight of 2^k w multiplies by 2^k what w gives, to the bit; w = 64 keeps results far from subnormal ones."""
    x = draw.normal(draw.extent(1, 5), draw.extent(1, 300))
    two, weight = x.dtype.type(2.0 ** draw.extent(0, 3)), np.full(x.shape[-1], x.dtype.type(64))
    draw.same_bits(run(x, weight * two), run(x, weight) * two, "a weight times a power of two")


rmsnorm.sample("rows", dims={"batch": (3,), "n": 5}, options={"eps": 1e-2}, given=("weight",))
rmsnorm.sample("no_weight", dims={"batch": (2, 3), "n": 4})
rmsnorm.sample("wider_weight", dims={"batch": (3,), "n": 5}, given=("weight",), wider=("weight",))


# ---------------------------------------------------------------------------------------------------------- gradient
class RmsnormVjpOut(NamedTuple):
    d_x: Float[A, "*batch n"]
    d_weight: Float[A, "n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="n")},
    or_float32=("weight",),
    gradient_dtype=("d_weight",),
    apart=lambda options, wants: ("batch",) if set(wants) == {"d_x"} else (),
    flops=lambda call: 12.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def rmsnorm_vjp(
    x: Float[A, "*batch n"],
    d_y: Float[A, "*batch n"],
    weight: Float[A, "n"] | None = None,
    *,
    eps: Annotated[float, Range(0.0, typical=(1e-6, 1e-12, 1e-2))] = 1e-6,
    rounding: Literal["once", "before_weight"] = "once",
) -> RmsnormVjpOut:
    """With r = (mean(x^2) + eps)^-1/2, xh = x r and h = d_y weight, in float32 (float64 for float64):

    d_x = r (h - xh mean(h xh)) and d_weight = sum of d_y xh over all rows.

    Args:
      x: (*batch, n), as in rmsnorm; d_y: (*batch, n), the cotangent of its y.
      weight: (n,), x's dtype or float32, as in rmsnorm.
      eps: as in rmsnorm.
      rounding: as in rmsnorm. "before_weight" takes the rounding for the identity, as autograd does: d_weight is the
        sum of d_y times xh as it was rounded to x's dtype, and h, the cotangent of that, is rounded to x's dtype.

    Returns:
      d_x: the shape and dtype of x; d_weight: those of weight, None where that was not given.
      An inf or NaN in a row of x makes its row of d_x NaN; the inf its column of d_weight, the NaN all of it. A NaN in
      d_y its row of d_x and its column of d_weight. Guaranteed while a row's sums of x^2 and of |h x| are under 2^127
      (2^1023 in float64).
    """
    raise NotImplementedError


def moved_by(call: Call, v: np.ndarray) -> tuple[np.ndarray | float, np.ndarray | float]:
    """How far x may be off, (rows, n), and by which share of itself that moves r = v^-1/2, (rows, 1), +inf where v may
    be 0. sqrt(v - eps), the root mean square of x, moves by that of the difference at most."""
    if "x" not in call.off:
        return 0.0, 0.0
    off = call.off["x"].reshape(-1, call.dims["n"])
    moved = np.sqrt(np.square(off).sum(1, keepdims=True) / call.dims["n"])
    return off, share_of_root(np.sqrt(np.maximum(v - call.options["eps"], 0.0)), moved, v)


class RmsNormRows(NamedTuple):
    """The call by rows of n, (rows, n) or (rows, 1).

    Attributes:
      g: d_y; x, h, xh, r: as in the contract; dxh: how far xh may be off.
      rho: the share of itself by which r may be off; unsure: whether nothing is promised of a row (rmsnorm's ``root``).
      met, dmet: xh as it meets d_y in d_weight, rounded or not, and how far that may be off; dh: how far h may be.
    """

    x: np.ndarray
    g: np.ndarray
    h: np.ndarray
    xh: np.ndarray
    dxh: np.ndarray
    r: np.ndarray
    rho: np.ndarray
    unsure: np.ndarray
    met: np.ndarray
    dmet: np.ndarray
    dh: np.ndarray

    @classmethod
    def of(cls, call: Call) -> RmsNormRows:
        x, g = (call.arrays[name].reshape(-1, call.dims["n"]) for name in ("x", "d_y"))
        r, rho, unsure = (a.reshape(-1, 1) for a in root(call))
        xh = x * r
        w = np.ones(1) if call.arrays["weight"] is None else call.arrays["weight"]
        h, unit, narrow = g * w, units(call), rounds(call)
        off, share = moved_by(call, 1 / r**2)
        rho, unsure = rho + share * (1 + rho), unsure | np.isinf(share)
        met, dxh = xh, normalised_error(call, xh, r, rho) + r * (1 + rho) * off
        dmet, dh = dxh, unit.u * magnitude(h) + unit.tau * (magnitude(g) + magnitude(w) + 1)
        if narrow:
            dmet, met = rounding_error(xh, dxh, narrow), rounded(xh, narrow).astype(np.float64)
            dh, h = rounding_error(h, dh, narrow), rounded(h, narrow).astype(np.float64)
        return cls(x, g, h, xh, dxh, r, rho, unsure, met, np.nan_to_num(dmet), np.nan_to_num(dh))


@rmsnorm_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bounds of the gradients: each is B = E (1 + U) + U |value| + eta, U and eta of the gradient's own dtype.

    xh errs by dxh and r by rho of itself, both as in rmsnorm's bound; u and tau are
    :class:`portakern.spec.tolerance.Units`, w is weight, c_N = chain(n), and M the number of rows. With

        X = |xh| + dxh,  c2 = mean(h xh),  lost = tau (|d_y| + |w| + 1), which is what flushes in h,

    h = w d_y errs by dh = u |h| + lost, and c2 by d2: h, the products, their sum and the division (2 ulp); products h x
    that r meets last may flush.

        d2 = mean(|h| dxh + ((c_N + 6) u |h| + lost) X) + tau (1 + r)

    And so the gradients, where sums are over the M rows, in any order:

        d_x:      E = r (1 + rho) [dh + X d2 + dxh |c2| + 3u (|h| + X (|c2| + d2)) + 2 tau] + rho |d_x|
        d_weight: E = sum |d_y| dxh + (M + 2) u sum |d_y| X + tau sum (|d_y| + X + 1)

    Where rounding is "before_weight", h is the rounded one, dh what its rounding makes of u |h| + lost
    (:func:`portakern.spec.tolerance.rounding_error`), and d2 has dh X in place of (u |h| + lost) X; in d_weight, xh and
    dxh are those of the rounded one.

    Where x may be off by o, rho has the share by which that moves r (:func:`moved_by`) more, and dxh r (1 + rho) o.

    Nothing is promised of a row where rmsnorm promises nothing (all of d_weight takes part in it), or where h, r times
    the terms of d_x, or a sum of |h xh|, |h x| or |d_y xh| reaches 2^127. An infinite h or d_y gives infinities and NaN
    by the sign of xh: nothing is promised beside an x whose xh may flush.
    """
    with np.errstate(all="ignore"):
        row = RmsNormRows.of(call)
        of_x = None if ref[0] is None else d_x_error(call, row, ref[0])
        return stored_bounds(call, ref, [of_x, d_weight_error(call, row)])


def d_x_error(call: Call, row: RmsNormRows, d_x: np.ndarray) -> np.ndarray:
    """E of d_x."""
    unit, n, w = units(call), call.dims["n"], call.arrays["weight"]
    w = np.ones(1) if w is None else w
    u, tau, r, rho, dxh, dh = unit.u, unit.tau, row.r, row.rho, row.dxh, row.dh

    def mean(values: np.ndarray) -> np.ndarray:
        return values.sum(1, keepdims=True) / n

    h, size, c2 = magnitude(row.h), np.abs(row.xh) + dxh, magnitude(mean(row.h * row.xh))
    d2 = mean(h * dxh + ((unit.chain(n) + 5) * u * h + dh) * size) + tau * (1 + r)
    terms = h + size * (c2 + d2)
    inner = dh + size * d2 + dxh * c2 + 3 * u * terms + 2 * tau
    err = r * (1 + rho) * inner + rho * np.abs(d_x.reshape(-1, n))

    tiny_g, tiny_w = ((a != 0) & (np.abs(a) < tau) for a in (row.g, w))
    ambiguous = (row.x != 0) & (np.abs(row.xh) <= dxh)
    unsure = row.unsure | ((np.isinf(row.g) & tiny_w) | (np.isinf(w) & tiny_g)).any(1, keepdims=True)
    unsure = unsure | (np.isinf(row.h).any(1, keepdims=True) & ambiguous.any(1, keepdims=True))
    for factor in (size, magnitude(row.x)):
        unsure = unsure | ((h * factor).sum(1, keepdims=True) >= unit.huge)
    unsure = unsure | (h >= unit.huge).any(1, keepdims=True) | (np.maximum(r, 1) * terms >= unit.huge)
    return np.where(unsure, inf, err).reshape(d_x.shape)


def d_weight_error(call: Call, row: RmsNormRows) -> np.ndarray:
    """E of d_weight."""
    unit, g, size = units(call), magnitude(row.g), np.abs(row.met) + row.dmet
    products = (g * size).sum(0)
    err = (g * row.dmet).sum(0) + (g.shape[0] + 2) * unit.u * products + unit.tau * (g + size + 1).sum(0)
    ambiguous = np.isinf(row.g) & (row.x != 0) & (np.abs(row.xh) <= row.dxh)
    return np.where(row.unsure.any() | (products >= unit.huge) | ambiguous.any(0), inf, err)


@rmsnorm_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """RMS errors of the gradients, with the symbols of the bound and k = KAPPA u.

    q is the variance of r's relative error (rmsnorm's ``root_spread``), one draw for a row. A mean errs by s^2
    (``mean_variance``), where the longest chain of additions is c_N in a row and M in a column. c2 is one draw for a
    row too: t^2 = (1 + 8/M) s^2 makes room for what M rows may draw. r stands once in r h and three times in r xh c2.

        d_x:      store^2 + q (d_x - 2 r xh c2)^2 + r^2 [3 k^2 (h^2 + (xh c2)^2) + xh^2 t^2(h xh)]
        d_weight: store^2 + sum (d_y xh)^2 (q + 2 k^2) + M^2 s^2(d_y xh)

    are the variances, xh of d_weight as it meets d_y, store being the RMS error of storing (``store_spread``).
    """
    with np.errstate(all="ignore"):
        return stored_spreads(call, ref, variances(call))


def variances(call: Call) -> list[np.ndarray]:
    """Those of :func:`sigma_vjp`, without storing."""
    unit, n = units(call), call.dims["n"]
    k2, q = (KAPPA * unit.u) ** 2, root_spread(call)
    with np.errstate(all="ignore"):
        row = RmsNormRows.of(call)
        h, xh, rows = row.h, row.xh, row.g.shape[0]
        pull = xh * ((h * xh).sum(1, keepdims=True) / n)
        of_c2 = xh**2 * (1 + 8 / rows) * mean_variance(h * xh, 1, unit.chain(n), k2)
        own = q * np.square(h - 3 * pull) + 3 * k2 * (h**2 + pull**2) + of_c2
        terms = row.g * row.met
        of_weight = np.square(terms).sum(0) * (q + 2 * k2) + rows**2 * mean_variance(terms, 0, rows, k2)[0]
        if rounds(call):  # beside a tie a term may be another by a whole spacing, which is no matter of chance
            of_weight = np.where(((row.dmet > 0) & (row.g != 0)).any(0), inf, of_weight)
        return [(row.r**2 * own).reshape(call.arrays["x"].shape), of_weight]


@rmsnorm_vjp.edge(dims={"n": (1, 300)})
def nan_or_inf_in_a_row(arrays, rng, options):
    """An inf or NaN in x makes its row of d_x NaN, and no other; the inf its column of d_weight, the NaN all of it."""
    plant(rng, arrays["x"], rng.choice([np.nan, inf, -inf]))


@rmsnorm_vjp.edge(dims={"n": (1, 300)})
def nan_or_inf_in_cotangents(arrays, rng, options):
    """A NaN in d_y makes its row of d_x and its column of d_weight NaN, and no other; an inf what arithmetic makes."""
    plant(rng, arrays["d_y"], rng.choice([np.nan, inf]))


@rmsnorm_vjp.edge(dims={"n": (1, 300)}, given=("weight",))
def nan_in_a_weight_vjp(arrays, rng, options):
    """NaN in weight makes d_x NaN and leaves d_weight alone."""
    arrays["weight"][rng.integers(arrays["weight"].shape[0])] = np.nan


@rmsnorm_vjp.edge(dims={"n": (1, 300)})
def rows_of_zeros_vjp(arrays, rng, options):
    """A row of zeros: eps alone scales its gradient, and it adds nothing to d_weight."""
    arrays["x"][rng.random(arrays["x"].shape[:-1]) < 0.5] = 0


@rmsnorm_vjp.edge(dims={"batch": (5, 7), "n": (2, 300)}, options={"eps": 0.0}, given=("weight",))
def no_eps_vjp(arrays, rng, options):
    """eps = 0 is allowed, also where a tile has rows to spare.

    Those have no squares, and leave nothing in the sums over rows.
    """


@rmsnorm_vjp.edge(dims={"n": (1, 300)}, options={"eps": 1e-2})
def rows_next_to_eps_vjp(arrays, rng, options):
    """A mean of squares like eps: xh is shorter than the root of n, and d_x no longer orthogonal to x."""
    arrays["x"] *= 0.1


@rmsnorm_vjp.edge(dims={"n": (129, 300)})
def padding_lanes(arrays, rng, options):
    """Lanes beyond n, in rows and cotangents with a mean: counted in a sum they would add to it."""
    arrays["x"] += 50
    arrays["d_y"] += 3


rmsnorm_vjp.edge(dims={"n": (129, 513)}, smallest_tiles=True)(many_tiles)


@rmsnorm_vjp.edge(dims={"n": (1, 1)})
def rows_of_one_element_vjp(arrays, rng, options):
    """n = 1: y is a sign but for eps, and d_x what eps leaves of the difference."""


@rmsnorm_vjp.edge(dims={"batch": (520, 700), "n": (1, 5)}, given=("weight",))
def many_rows(arrays, rng, options):
    """d_weight is a sum of several partial sums."""


@rmsnorm_vjp.edge(dims={"batch": (257, 300), "n": (1, 12)}, given=("weight",), regime="constant", smallest_tiles=True)
def many_rows_of_one_size(arrays, rng, options):
    """Every row adds alike to d_weight: one that is dropped or counted twice shows."""
    arrays["d_y"][...] = 1
    arrays["x"][...] = 1


@rmsnorm_vjp.edge(dims={"batch": (100, 300), "n": (2, 12)}, given=("weight",))
def one_row_with_a_cotangent(arrays, rng, options):
    """One row, the last of all or another, makes d_weight alone."""
    silence_all_but_one(rng, arrays["d_y"])


@rmsnorm_vjp.law
def rows_are_independent_vjp(run, draw):
    """A row of d_x alone has the same bits as among others."""
    row_alone(run, draw, weighted=True)


@rmsnorm_vjp.law
def gradients_do_not_depend_on_which_are_wanted(run, draw):
    """Each gradient, asked for alone, has the same bits."""
    shape = draw.extent(1, 150), draw.extent(1, 30)
    arrays = draw.normal(*shape), draw.normal(*shape), draw.normal(shape[1])
    each_alone(run, draw, ("d_x", "d_weight"), arrays)


@rmsnorm_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles both gradients, to the bit."""
    shape = draw.extent(1, 150), draw.extent(2, 30)
    x, d_y, weight = draw.normal(*shape), draw.normal(*shape), draw.normal(shape[1])
    doubled(lambda d_y: run(x, d_y, weight), draw, ("d_x", "d_weight"), d_y)
