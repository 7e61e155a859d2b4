"""Layer normalisation over the last axis, and its gradients.

With r = (var + eps)^-1/2, xh = (x - mean) r and h = d_y weight: y = xh weight + bias, and
d_x = r (h - mean h - xh mean(h xh)), d_weight = sum of d_y xh, d_bias = sum of d_y.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.options import Range
from portakern.spec.tolerance import KAPPA, Units, magnitude, round_to, store_spread, units
from portakern.specs._gradients import doubled, each_alone, row_alone, stored_bounds, stored_spreads
from portakern.specs._rows import mean_variance, numbers_of_few_digits, plant, share_of_root, silence_all_but_one

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class LayernormOut(NamedTuple):
    y: Float[A, "*batch n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="n")},
    or_float32=("weight", "bias"),
    apart=("batch",),
    vjp="layernorm_vjp",
    autocast="float32",
    typical={"batch": (4096,), "n": 4096, "weight": True, "bias": True},
    flops=lambda call: 8.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def layernorm(
    x: Float[A, "*batch n"],
    weight: Float[A, "n"] | None = None,
    bias: Float[A, "n"] | None = None,
    *,
    eps: Annotated[float, Range(0.0, typical=(1e-5, 1e-12, 1e-2))] = 1e-5,
) -> LayernormOut:
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last axis, var the mean squared deviation.

    The source is Ba, Kiros, Hinton 2016, equations 3 and 4.

    Args:
      x: (*batch, n).
      weight, bias: (n,), x's dtype or float32; None is 1 and 0.
      eps: added to the variance, >= 0.

    Returns:
      y: the shape and dtype of x. A row that holds inf or NaN is all NaN.
    """
    raise NotImplementedError


class Moments(NamedTuple):
    """What the statistics of rows are, and how far rounding may move them, (*batch, 1) but for ``centred``.

    Attributes:
      size: sum |x|; mean, var: the statistics; centred: x - mean; v = var + eps.
      delta: how far the mean may be off.
      low: the low end of the range of v; where it is not positive nothing is promised.
      rho: the share of itself by which r = v^-1/2 may be off.
    """

    size: np.ndarray
    mean: np.ndarray
    centred: np.ndarray
    var: np.ndarray
    v: np.ndarray
    delta: np.ndarray
    low: np.ndarray
    rho: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, eps: float, unit: Units, exact: np.ndarray | bool = False) -> Moments:
        """The moments of the rows of x, (*batch, n), where u and tau are those of ``unit``.

        On the way to a mean lie c = chain(n) + 2 roundings, so that it errs by delta = c u mean |x|. Two passes about
        such a mean find between var and var + delta^2; merging partial means (Welford) finds the mean square of
        deviations that are each off by delta, between (sqrt(var) - delta)^2 and (sqrt(var) + delta)^2. Summing that
        rounds by a share (c + 4) u, and 3 tau come or go where squares, var or eps flush. rho is the share by which the
        ends of that range of v move r, and 4u for the root.

        Where the mean of some rows is known to be exact, delta is 0 (``exact``, (*batch, 1)).
        """
        n = x.shape[-1]
        u, tau, c = unit.u, unit.tau, unit.chain(n) + 2
        size, mean = np.abs(x).sum(-1, keepdims=True), x.sum(-1, keepdims=True) / n
        centred = x - mean
        var = np.square(centred).sum(-1, keepdims=True) / n
        delta = np.where(exact, 0.0, c * u * size / n)
        sd, v = np.sqrt(var), var + eps
        low = np.maximum(sd - delta, 0) ** 2 * (1 - (c + 4) * u) + eps - 3 * tau
        high = (sd + delta) ** 2 * (1 + (c + 4) * u) + eps + 3 * tau
        rho = np.maximum(np.sqrt(v / low) - 1, 1 - np.sqrt(v / high)) + 4 * u
        return cls(size, mean, centred, var, v, delta, low, rho)

    def normalised_error(self, r: np.ndarray, xh: np.ndarray, unit: Units, flushes: float = 1.0) -> np.ndarray:
        """How far xh = (x - mean) r may be off, given its magnitude, where x may have lost so many tau on its way: see
        :func:`bound`.
        """
        lost = (2 + flushes) * unit.tau
        return r * (self.delta + lost) * (1 + self.rho) + xh * (self.rho + 4 * unit.u) + unit.tau


def exactly_constant(x: np.ndarray, eps: float, unit: Units) -> np.ndarray:
    """The rows of x, (*batch, n), whose mean no kernel may round: (*batch, 1).

    They hold one finite number alone, of so few digits that the accumulator holds every multiple of it up to n. Its sum
    has nothing to round in any order, nor has the quotient; Welford's steps, and those of a shifted mean, add 0. Where
    the number is so large that one rounding of it is more than 2^-10 sqrt(eps), that would pass for variance: 7 numbers
    of 1e6 times the rounded 1/7 are off by 0.06, and (x - mean) r is -0.9987 for 0. Of smaller numbers it leaves less
    than a thousandth, and is let pass; and so it is in 16 bits, where kernels are known to fold x r - mean r (PyTorch's
    on CPUs), of which each rounds by a share of the mean.
    """
    if unit.u < unit.U:
        return np.zeros((*x.shape[:-1], 1), bool)
    first = x[..., :1]
    mantissa, _ = np.frexp(magnitude(first))
    whole = (mantissa * 2.0**53).astype(np.int64)
    odd = whole // np.maximum(whole & -whole, 1)
    same = np.isfinite(first) & (x == first).all(-1, keepdims=True) & (unit.u * np.abs(first) > 2.0**-10 * eps**0.5)
    found: np.ndarray = same & (odd * float(x.shape[-1]) <= 1 / unit.u)
    return found


@layernorm.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of y, w and b being weight and bias, with :class:`portakern.spec.tolerance.Units`:

        B = E (1 + U) + U |y| + eta
        E = |w| dxh + 2u (|b| + |xh w|) + tau (|xh| + 2)
        dxh = r (delta + 3 tau) (1 + rho) + |xh| (rho + 4u) + tau

    v = var + eps, r = v^-1/2, xh = (x - mean) r, which errs by dxh. The mean errs by delta and r by a share rho of
    itself (:meth:`Moments.of`); a row of one large number of few digits has an exact mean (:func:`exactly_constant`).
    x - mean and its product with r round by less than 4u. Last, w, its product with xh and b may flush.

    Nothing is promised where the low end of v is not positive (eps = 0 on a row whose variance is 0, drowns in the
    mean's rounding or is subnormal), or where sum |x|, sum (x - mean)^2 or the output's terms reach 2^127, or w is
    infinite (xh rounds to either side of 0).
    """
    return (round_to(error(call), ref[0], call.dtype),)


def error(call: Call, flushes: float = 1.0) -> np.ndarray:
    """E of :func:`bound`, where x may have lost so many tau on its way here."""
    x, w, b = (call.arrays[name] for name in ("x", "weight", "bias"))
    w, b = 1.0 if w is None else np.abs(w), 0.0 if b is None else magnitude(b)
    unit, n = units(call), x.shape[-1]
    with np.errstate(all="ignore"):
        row = Moments.of(x, call.options["eps"], unit, exactly_constant(x, call.options["eps"], unit))
        r, xh = 1 / np.sqrt(row.v), np.abs(row.centred) / np.sqrt(row.v)
        err = w * row.normalised_error(r, xh, unit, flushes) + 2 * unit.u * (b + xh * w) + unit.tau * (xh + 2)
        overflows = (row.size >= unit.huge) | (n * row.var >= unit.huge) | (xh * w + b >= unit.huge) | np.isinf(w)
        return np.where((row.low <= 0) | (np.isfinite(x).all(-1, keepdims=True) & overflows), np.inf, err)


@layernorm.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of y, with the symbols of the bound, k = KAPPA u and c_N = chain(n):

        sigma^2 = store^2 + w^2 [(r ds)^2 + xh^2 k^2 (c_N / 3 + 8) + (xh ds^2 / v)^2] + k^2 (b^2 + (xh w)^2)
        ds^2 = k^2 [(c_N / 3 + 1) mean^2 + (c_N / 6 + log2 n) var / n]

    store is that of storing y (``store_spread``), and ds that of the mean: the i-th of c_N additions rounds a partial
    sum of i/c_N of n mean and a bridge of the deviations, every level of a tree the root of n deviations, and then the
    division. It shifts a row as one, and moves the variance by ds^2. The sum of squares rounds like the mean, by half
    of which r moves; 8: the squares, v, the root, x - mean and two products. A kernel may add b - mean r w instead, and
    round b and xh w apart.
    """
    x, w, b = (call.arrays[name] for name in ("x", "weight", "bias"))
    w, b = 1.0 if w is None else magnitude(w), 0.0 if b is None else magnitude(b)
    n, unit = x.shape[-1], units(call)
    k = KAPPA * unit.u
    with np.errstate(all="ignore"):
        mean = x.sum(-1, keepdims=True) / n
        var = np.square(x - mean).sum(-1, keepdims=True) / n
        v, c = var + call.options["eps"], unit.chain(n)
        ds2 = k**2 * ((c / 3 + 1) * mean**2 + (c / 6 + np.log2(n)) * var / n)
        xh2 = np.square(x - mean) / v
        variance = w**2 * (ds2 / v + xh2 * (k**2 * (c / 3 + 8) + (ds2 / v) ** 2)) + k**2 * (b**2 + xh2 * w**2)
        return (np.hypot(store_spread(ref[0], call.dtype), np.sqrt(variance)),)


@layernorm.edge(dims={"n": (1, 300)})
def nan_or_inf_in_a_row(arrays, rng, options):
    """An inf or NaN makes its whole row NaN, and no other."""
    plant(rng, arrays["x"], rng.choice([np.nan, inf, -inf]))


@layernorm.edge(dims={"n": (2, 300)}, regime="constant")
def constant_rows(arrays, rng, options):
    """A row without variance gives its bias."""


@layernorm.edge(dims={"n": (3, 1000)}, options={"eps": 1e-12})
def large_constant_rows(arrays, rng, options):
    """A row of one large number of few digits, whose sums are exact: times 1/7, rounded, 7e6 is not 1e6."""
    numbers_of_few_digits(arrays["x"], rng)


@layernorm.edge(dims={"n": (2, 300)})
def a_large_offset_common_to_a_row(arrays, rng, options):
    """Numbers that differ in their last digits alone: what is left of each is no more than the mean's own rounding."""
    numbers_of_few_digits(arrays["x"], rng)
    arrays["x"] *= 1 + 2.0 ** rng.choice([-7, -10, -20]) * rng.integers(0, 3, arrays["x"].shape)


@layernorm.edge(dims={"n": (2, 300)}, options={"eps": 0.0})
def no_eps(arrays, rng, options):
    """eps = 0 is allowed."""


@layernorm.edge(dims={"n": (100, 300)}, regime="large_mean")
def large_mean(arrays, rng, options):
    """A mean of 40000 with a spread of 1: E[x^2] - mean^2 has no digit left."""


@layernorm.edge(dims={"n": (129, 300)}, absent=("weight", "bias"))
def padding_lanes(arrays, rng, options):
    """Lanes beyond n, in a row with a mean: counted in a sum of squares they would add mean^2 each."""
    arrays["x"] += 50


@layernorm.edge(dims={"n": (1, 300)}, given=("weight", "bias"))
def nan_in_a_weight(arrays, rng, options):
    """NaN in weight reaches its column alone."""
    arrays["weight"][rng.integers(arrays["weight"].shape[0])] = np.nan


@layernorm.edge(dims={"n": (1, 1)})
def rows_of_one_element(arrays, rng, options):
    """n = 1: the variance is 0 and the row is its bias."""


@layernorm.law
def rows_are_independent(run, draw):
    """A row alone gives the same bits as among others."""
    draw.row_alone(run)


@layernorm.law
def a_constant_row_is_its_bias(run, draw):
    """A row of one number of few digits gives its bias to the bit, but in 16 bits (:func:`exactly_constant`). Of these
    lengths 1/n is rounded by so much that n numbers of 255 times it are none."""
    for odd in draw.rng.choice([7, 13, 15, 41, 51, 55, 61], 2):
        n = draw.extent(int(odd), int(odd)) << draw.extent(0, 4)
        bias = draw.normal(n)
        if bias.itemsize > 2:
            x = np.empty((8, n), bias.dtype)
            numbers_of_few_digits(x, draw.rng)
            draw.same_bits(run(x, None, bias), np.broadcast_to(bias, x.shape), "the norm of a constant row")


@layernorm.law
def scale_invariant(run, draw):
    """layernorm(2^k x) = layernorm(x) at eps = 0, to the bit: powers of two round nothing."""
    x = draw.normal(draw.extent(1, 5), draw.extent(2, 300))
    scaled = x * x.dtype.type(2.0 ** draw.extent(-4, 4))
    draw.same_bits(run(scaled, eps=0.0), run(x, eps=0.0), "a row scaled by a power of two")


@layernorm.law
def weight_of_ones_and_bias_of_zeros_change_nothing(run, draw):
    """weight None is 1 and bias None is 0."""
    x = draw.normal(draw.extent(1, 5), draw.extent(2, 300))
    n = x.shape[-1]
    draw.same_bits(run(x, np.ones(n, x.dtype), np.zeros(n, x.dtype)), run(x), "a weight of ones and a bias of zeros")


layernorm.sample("rows", dims={"batch": (3,), "n": 5}, options={"eps": 1e-2}, given=("weight", "bias"))
layernorm.sample("no_weight", dims={"batch": (2, 3), "n": 4}, given=("bias",))
layernorm.sample("wider_weight", dims={"batch": (3,), "n": 5}, given=("weight",), wider=("weight",))


# ---------------------------------------------------------------------------------------------------------- gradient
class LayernormVjpOut(NamedTuple):
    d_x: Float[A, "*batch n"]
    d_weight: Float[A, "n"]
    d_bias: Float[A, "n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="n")},
    or_float32=("weight", "bias"),
    gradient_dtype=("d_weight", "d_bias"),
    apart=lambda options, wants: ("batch",) if set(wants) == {"d_x"} else (),
    flops=lambda call: 18.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def layernorm_vjp(
    x: Float[A, "*batch n"],
    d_y: Float[A, "*batch n"],
    weight: Float[A, "n"] | None = None,
    bias: Float[A, "n"] | None = None,
    *,
    eps: Annotated[float, Range(0.0, typical=(1e-5, 1e-12, 1e-2))] = 1e-5,
) -> LayernormVjpOut:
    """With r = (var + eps)^-1/2, xh = (x - mean) r and h = d_y weight, in float32 (float64 for float64):

    d_x = r (h - mean h - xh mean(h xh)), d_weight = sum of d_y xh and d_bias = sum of d_y, both over all rows.

    Args:
      x: (*batch, n), as in layernorm; d_y: (*batch, n), the cotangent of its y.
      weight, bias: (n,), x's dtype or float32, as in layernorm. The values of bias are not read: it says that d_bias
        exists, and its dtype.
      eps: as in layernorm.

    Returns:
      d_x: the shape and dtype of x; d_weight, d_bias: those of weight and bias, None where that was not given.
      An inf or NaN in a row of x makes its row of d_x and all of d_weight NaN; a NaN in d_y its row of d_x and its
      column of d_weight and d_bias.
    """
    raise NotImplementedError


class LayerNormRows(NamedTuple):
    """The call by rows of n, (rows, n) or (rows, 1).

    Attributes:
      g: d_y; h, xh, r: as in the contract; moments: of x.
      dxh: how far xh may be off, +inf in a row of which nothing is promised.
    """

    g: np.ndarray
    h: np.ndarray
    xh: np.ndarray
    r: np.ndarray
    dxh: np.ndarray
    moments: Moments

    @classmethod
    def of(cls, call: Call) -> LayerNormRows:
        n, unit = call.dims["n"], units(call)
        x, g = (call.arrays[name].reshape(-1, n) for name in ("x", "d_y"))
        row = Moments.of(x, call.options["eps"], unit)
        if "x" in call.off:
            off = call.off["x"].reshape(-1, n)
            off = off + off.sum(1, keepdims=True) / n  # of x - mean x
            moved = np.sqrt(np.square(off).sum(1, keepdims=True) / n)
            rho = row.rho + share_of_root(np.sqrt(row.var), moved, row.v) * (1 + row.rho)
            row = row._replace(delta=row.delta + off, rho=rho)
        r = 1 / np.sqrt(row.v)
        xh = row.centred * r
        dxh = row.normalised_error(r, np.abs(xh), unit)
        overflows = (row.size >= unit.huge) | (n * row.var >= unit.huge)
        unsure = (row.low <= 0) | (np.isfinite(x).all(1, keepdims=True) & overflows)
        h = g if call.arrays["weight"] is None else g * call.arrays["weight"]
        return cls(g, h, xh, r, np.where(unsure, inf, dxh), row)


@layernorm_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bounds of the gradients: each is B = E (1 + U) + U |value| + eta, U and eta of the gradient's own dtype.

    xh errs by dxh and r by rho of itself, both as in layernorm's bound; u and tau are
    :class:`portakern.spec.tolerance.Units`, w is weight, c_N = chain(n), and M the number of rows. With

        X = |xh| + dxh,  c1 = mean h,  c2 = mean(h xh),  lost = tau (|d_y| + |w| + 1), which is what flushes in h,

    h = w d_y errs by dh = u |h| + lost; c1 by d1: the products, their sum and the division; and c2 by d2:

        d1 = (c_N + 3) u mean |h| + mean lost + tau
        d2 = mean(|h| dxh + ((c_N + 4) u |h| + lost) X) + tau

    And so the gradients, where sums are over the M rows, in any order:

        d_x:      E = r (1 + rho) [dh + d1 + X d2 + dxh |c2| + 4u (|h| + |c1| + d1 + X (|c2| + d2)) + 2 tau] + rho |d_x|
        d_weight: E = sum |d_y| dxh + (M + 3) u sum |d_y| X + tau sum (|d_y| + X + 1)
        d_bias:   E = (M + 1) u sum |d_y| + M tau

    Where x may be off by o, x - mean x is by o + mean o, and rho has the share by which that moves r more.

    Nothing is promised of a row where layernorm promises nothing (all of d_weight takes part in it), or where r times
    the terms of d_x, or a sum, reach 2^127. An infinite h or d_y gives infinities and NaN by the sign of xh: nothing is
    promised where |xh| <= dxh, or where it arises beside a subnormal.
    """
    with np.errstate(all="ignore"):
        row = LayerNormRows.of(call)
        of_x = None if ref[0] is None else d_x_error(call, row, ref[0])
        return stored_bounds(call, ref, [of_x, *column_errors(units(call), row)])


def d_x_error(call: Call, row: LayerNormRows, d_x: np.ndarray) -> np.ndarray:
    """E of d_x."""
    unit, n, w = units(call), call.dims["n"], call.arrays["weight"]
    w = np.ones(1) if w is None else w
    u, tau, c, rho = unit.u, unit.tau, unit.chain(n), row.moments.rho

    def mean(values: np.ndarray) -> np.ndarray:
        return values.sum(1, keepdims=True) / n

    h, size, xh = magnitude(row.h), np.abs(row.xh) + row.dxh, row.xh
    c1, c2 = np.abs(mean(row.h)), np.abs(mean(row.h * xh))
    lost = tau * (magnitude(row.g) + magnitude(w) + 1)
    d1 = (c + 3) * u * mean(h) + mean(lost) + tau
    d2 = mean(h * row.dxh + ((c + 4) * u * h + lost) * size) + tau
    terms = h + c1 + d1 + size * (c2 + d2)
    inner = u * h + lost + d1 + size * d2 + row.dxh * c2 + 4 * u * terms + 2 * tau
    err = row.r * (1 + rho) * inner + rho * np.abs(d_x.reshape(-1, n))

    tiny_g, tiny_w = ((a != 0) & (np.abs(a) < tau) for a in (row.g, w))
    infinite, ambiguous = np.isinf(row.h), np.abs(xh) <= row.dxh
    odd = (infinite & ambiguous) | (np.isinf(row.g) & tiny_w) | (np.isinf(w) & tiny_g)
    overflows = (n * mean(h) >= unit.huge) | (n * mean(h * size) >= unit.huge)
    overflows = overflows | (np.isfinite(terms) & (np.maximum(row.r, 1) * terms >= unit.huge))
    unsure = np.isinf(row.dxh) | odd.any(1, keepdims=True) | (infinite.any(1, keepdims=True) & ambiguous) | overflows
    return np.where(unsure, inf, err).reshape(d_x.shape)


def column_errors(unit: Any, row: LayerNormRows) -> tuple[np.ndarray, np.ndarray]:
    """E of d_weight and of d_bias."""
    g, size, rows = magnitude(row.g), np.abs(row.xh) + row.dxh, row.g.shape[0]
    products, total = (g * size).sum(0), g.sum(0)
    weight = (g * row.dxh).sum(0) + (rows + 3) * unit.u * products + unit.tau * (g + size + 1).sum(0)
    unsure = np.isinf(row.dxh).any() | (products >= unit.huge) | (np.isinf(row.g) & (np.abs(row.xh) <= row.dxh)).any(0)
    bias = (rows + 1) * unit.u * total + rows * unit.tau
    return np.where(unsure, inf, weight), np.where(total >= unit.huge, inf, bias)


@layernorm_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """RMS errors of the gradients, with the symbols of the bound and k = KAPPA u.

    A mean errs by s^2 (``mean_variance``), where the longest chain of additions is c_N in a row and M in a column. A
    mean of a row is one draw for all its elements: t^2 = (1 + 8/M) s^2 makes room for what M rows may draw.

    xh moves by a shift of its row, r ds with ds^2 = t^2 of x, and by a share of itself of variance q; r by that share
    too:

        q = k^2 (c_N / 3 + 8) + (ds^2 / v)^2

        d_x:      store^2 + q d_x^2 + r^2 [4 k^2 (h^2 + c1^2 + (xh c2)^2) + t^2(h)
                  + xh^2 (t^2(h xh) + (c1 r ds)^2 + q c2^2) + c2^2 ((r ds)^2 + q xh^2)]
        d_weight: store^2 + sum d_y^2 ((r ds)^2 + q xh^2) + M^2 s^2(d_y xh)
        d_bias:   store^2 + M^2 s^2(d_y)

    are the variances, store being the RMS error of storing (``store_spread``).
    """
    with np.errstate(all="ignore"):
        return stored_spreads(call, ref, variances(call))


def variances(call: Call) -> list[np.ndarray]:
    """Those of :func:`sigma_vjp`, without storing."""
    k2, n = (KAPPA * units(call).u) ** 2, call.dims["n"]
    with np.errstate(all="ignore"):
        row, c = LayerNormRows.of(call), units(call).chain(n)
        g, h, xh, r2, mean, rows = row.g, row.h, row.xh, 1 / row.moments.v, row.moments.mean, row.g.shape[0]
        t2 = (1 + 8 / rows) * k2
        shift2 = mean_variance(row.moments.centred, 1, c, t2) + t2 * (c / 3 + 1) * mean**2
        q = k2 * (c / 3 + 8) + (shift2 * r2) ** 2
        c1, c2 = h.sum(1, keepdims=True) / n, (h * xh).sum(1, keepdims=True) / n
        of_xh = r2 * shift2 + q * xh**2
        of_c2 = mean_variance(h * xh, 1, c, t2) + c1**2 * r2 * shift2 + q * c2**2
        terms = 4 * k2 * (h**2 + c1**2 + (xh * c2) ** 2) + mean_variance(h, 1, c, t2) + xh**2 * of_c2 + c2**2 * of_xh
        own = r2 * (terms + q * np.square(h - c1 - xh * c2))
        of_weight = (g**2 * of_xh).sum(0) + rows**2 * mean_variance(g * xh, 0, rows, k2)[0]
        of_bias = rows**2 * mean_variance(g, 0, rows, k2)[0]
        return [own.reshape(call.arrays["x"].shape), of_weight, of_bias]


@layernorm_vjp.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """d_bias where a column of d_y is of integers with sum |d_y| < 1/u: the accumulator holds every partial sum."""
    g = call.arrays["d_y"].reshape(-1, call.dims["n"])
    whole = np.isfinite(g).all(0) & (g == np.trunc(g)).all(0) & (magnitude(g).sum(0) < 1 / units(call).u)
    return None, None, None if ref[2] is None else whole


@layernorm_vjp.edge(dims={"n": (1, 300)})
def nan_or_inf_in_a_row_vjp(arrays, rng, options):
    """An inf or NaN in x makes its row of d_x NaN, and all of d_weight; no other row, and not d_bias."""
    plant(rng, arrays["x"], rng.choice([np.nan, inf, -inf]))


@layernorm_vjp.edge(dims={"n": (1, 300)})
def nan_or_inf_in_cotangents(arrays, rng, options):
    """A NaN in d_y makes its row of d_x and its column of d_weight and d_bias NaN, and no other."""
    plant(rng, arrays["d_y"], rng.choice([np.nan, np.nan, inf]))


@layernorm_vjp.edge(dims={"n": (1, 300)}, given=("weight", "bias"))
def nan_in_weight_and_bias(arrays, rng, options):
    """NaN in weight makes d_x NaN and leaves d_weight alone; bias is not read at all."""
    arrays["weight"][rng.integers(arrays["weight"].shape[0])] = np.nan
    arrays["bias"][...] = np.nan


@layernorm_vjp.edge(dims={"n": (2, 300)})
def constant_rows_vjp(arrays, rng, options):
    """A row without variance: eps alone scales its gradient."""
    arrays["x"][...] = rng.standard_normal((*arrays["x"].shape[:-1], 1))


@layernorm_vjp.edge(dims={"n": (3, 1000)}, options={"eps": 1e-12})
def large_constant_rows_vjp(arrays, rng, options):
    """A row of one large number of few digits, whose sums are exact: eps alone scales its gradient."""
    numbers_of_few_digits(arrays["x"], rng)


@layernorm_vjp.edge(dims={"batch": (5, 7), "n": (2, 300)}, options={"eps": 0.0}, given=("weight",))
def no_eps_vjp(arrays, rng, options):
    """eps = 0 is allowed, also where a tile has rows to spare.

    Those have no variance, and leave nothing in the sums over rows.
    """


@layernorm_vjp.edge(dims={"n": (100, 300)})
def large_mean_vjp(arrays, rng, options):
    """A mean of 200 with a spread of 1: E[x^2] - mean^2 has few digits left."""
    arrays["x"][...] = 200 + np.round(4 * arrays["x"]) / 4


@layernorm_vjp.edge(dims={"n": (129, 300)})
def padding_lanes_vjp(arrays, rng, options):
    """Lanes beyond n, in rows and cotangents with a mean: counted in a sum they would add to it."""
    arrays["x"] += 50
    arrays["d_y"] += 3


@layernorm_vjp.edge(dims={"n": (1, 1)})
def rows_of_one_element_vjp(arrays, rng, options):
    """n = 1: the variance is 0, x does not matter, and d_x and d_weight are 0."""


@layernorm_vjp.edge(dims={"batch": (520, 700), "n": (1, 5)}, given=("weight", "bias"))
def many_rows(arrays, rng, options):
    """d_weight and d_bias are sums of several partial sums."""


@layernorm_vjp.edge(
    dims={"batch": (257, 300), "n": (1, 12)}, given=("weight", "bias"), regime="integers", smallest_tiles=True
)
def many_rows_of_integers(arrays, rng, options):
    """d_bias is exact: a row that is dropped or counted twice shows."""


@layernorm_vjp.edge(dims={"batch": (100, 300), "n": (2, 12)}, given=("weight", "bias"))
def one_row_with_a_cotangent(arrays, rng, options):
    """One row, the last of all or another, makes d_weight and d_bias alone."""
    silence_all_but_one(rng, arrays["d_y"])


@layernorm_vjp.edge(dims={"n": (2, 140)}, given=("bias",), absent=("weight",))
def bias_alone(arrays, rng, options):
    """weight is 1 and has no gradient; bias has."""


@layernorm_vjp.edge(dims={"batch": (5, 7), "n": (2, 140)}, options={"eps": 0.0}, given=("weight",), absent=("bias",))
def weight_alone(arrays, rng, options):
    """bias has no gradient; weight has, of rows that no tile divides and without eps."""


@layernorm_vjp.law
def rows_are_independent_vjp(run, draw):
    """A row of d_x alone has the same bits as among others."""
    row_alone(run, draw, weighted=True)


@layernorm_vjp.law
def gradients_do_not_depend_on_which_are_wanted(run, draw):
    """Each gradient, asked for alone, has the same bits."""
    shape = draw.extent(1, 150), draw.extent(1, 30)
    arrays = draw.normal(*shape), draw.normal(*shape), draw.normal(shape[1]), draw.normal(shape[1])
    each_alone(run, draw, ("d_x", "d_weight", "d_bias"), arrays)


@layernorm_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles every gradient, to the bit."""
    shape = draw.extent(1, 150), draw.extent(2, 30)
    x, d_y, weight, bias = draw.normal(*shape), draw.normal(*shape), draw.normal(shape[1]), draw.normal(shape[1])
    doubled(lambda d_y: run(x, d_y, weight, bias), draw, ("d_x", "d_weight", "d_bias"), d_y)


@layernorm_vjp.law
def a_weight_of_ones_changes_nothing(run, draw):
    """weight None is 1."""
    shape = draw.extent(1, 5), draw.extent(1, 300)
    x, d_y = draw.normal(*shape), draw.normal(*shape)
    draw.same_bits(run(x, d_y, np.ones(shape[1], x.dtype))[0], run(x, d_y)[0], "a weight of ones")
