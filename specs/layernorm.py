"""Layer normalisation over the last axis."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.options import Range
from portakern.spec.tolerance import KAPPA, Units, magnitude, round_to, store_spread, units
from portakern.specs._rows import numbers_of_few_digits, plant

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
