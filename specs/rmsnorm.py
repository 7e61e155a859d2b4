"""Root mean square normalisation over the last axis."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import Range
from portakern.spec.tolerance import KAPPA, magnitude, round_to, rounded, rounding_error, store_spread, units
from portakern.specs._rows import plant

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
