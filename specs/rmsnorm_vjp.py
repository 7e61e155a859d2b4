"""Gradients of root mean square normalisation over the last axis."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.options import Range
from portakern.spec.tolerance import KAPPA, chain, magnitude, round_to, store_spread, units
from portakern.specs.rmsnorm import normalised_error, root, root_spread

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class RmsnormVjpOut(NamedTuple):
    d_x: Float[A, "*batch n"]
    d_weight: Float[A, "n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 16384, of="n")},
    or_float32=("weight",),
    flops=lambda call: 12.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def rmsnorm_vjp(
    x: Float[A, "*batch n"],
    d_y: Float[A, "*batch n"],
    weight: Float[A, "n"] | None = None,
    *,
    eps: Annotated[float, Range(0.0, typical=(1e-6, 1e-12, 1e-2))] = 1e-6,
) -> RmsnormVjpOut:
    """With r = (mean(x^2) + eps)^-1/2, xh = x r and h = d_y weight, in float32 (float64 for float64):

    d_x = r (h - xh mean(h xh)) and d_weight = sum of d_y xh over all rows.

    Args:
      x: (*batch, n), as in rmsnorm; d_y: (*batch, n), the cotangent of its y.
      weight: (n,), x's dtype or float32, as in rmsnorm.
      eps: as in rmsnorm.

    Returns:
      d_x: the shape and dtype of x; d_weight: those of weight, None where that was not given.
      An inf or NaN in a row of x makes its row of d_x NaN; the inf its column of d_weight, the NaN all of it. A NaN in d_y its row of d_x and its column of
      d_weight. Guaranteed while a row's sums of x^2 and of |h x| are under 2^127 (2^1023 in float64).
    """
    raise NotImplementedError


class _Rows(NamedTuple):
    """x, d_y, h and xh by rows of n, (rows, n), and of each row r, rho and whether nothing is promised of it, (rows, 1): see rmsnorm's ``root``."""

    x: np.ndarray
    g: np.ndarray
    h: np.ndarray
    xh: np.ndarray
    dxh: np.ndarray
    r: np.ndarray
    rho: np.ndarray
    unsure: np.ndarray

    @classmethod
    def of(cls, call: Call) -> _Rows:
        x, g = (call.arrays[name].reshape(-1, call.dims["n"]) for name in ("x", "d_y"))
        r, rho, unsure = (a.reshape(-1, 1) for a in root(call))
        xh = x * r
        return cls(
            x,
            g,
            g if call.arrays["weight"] is None else g * call.arrays["weight"],
            xh,
            normalised_error(call, xh, r, rho),
            r,
            rho,
            unsure,
        )


@rmsnorm_vjp.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """xh errs by dxh, and r by rho of itself: dxh and rho as in rmsnorm's bound.

    With X = |xh| + dxh and c2 = mean(h xh), h = w d_y errs by dh = u|h| + lost, where lost = tau (|d_y| + |w| + 1) is what flushes; c2 by
    d2 = mean(|h| dxh + ((c_N + 6) u |h| + lost) X) + tau (1 + r): h, the products, their sum and the division (2 ulp); products h x that r meets last may flush.
    d_x:      E = r (1 + rho) [dh + X d2 + dxh |c2| + 3u (|h| + X (|c2| + d2)) + 2 tau] + rho |d_x|
    d_weight: E = sum |d_y| dxh + (M + 2) u sum |d_y| X + tau sum (|d_y| + X + 1), sums over the M rows, in any order
    and B = E (1 + U) + U |value| + eta, U and eta of the gradient's own dtype.

    Nothing is promised of a row where rmsnorm promises nothing (all of d_weight takes part in it), or where h, r times the terms of d_x, or a sum of |h xh|,
    |h x| or |d_y xh| reaches 2^127. An infinite h or d_y gives infinities and NaN by the sign of xh: nothing is promised beside an x whose xh may flush.
    """
    with np.errstate(all="ignore"):
        row = _Rows.of(call)
        errors: list[Any] = [None if ref[0] is None else _d_x_error(call, row, ref[0]), _d_weight_error(call, row)]
        return tuple(
            None if y is None else round_to(e, y, dtype)
            for e, y, (_, dtype) in zip(errors, ref, call.outputs.values(), strict=True)
        )


def _d_x_error(call: Call, row: _Rows, d_x: np.ndarray) -> np.ndarray:
    unit, n, w = units(call), call.dims["n"], call.arrays["weight"]
    w = np.ones(1) if w is None else w
    u, tau, r, rho, dxh = unit.u, unit.tau, row.r, row.rho, row.dxh

    def mean(values: np.ndarray) -> np.ndarray:
        return values.sum(1, keepdims=True) / n

    h, size, c2 = magnitude(row.h), np.abs(row.xh) + dxh, magnitude(mean(row.h * row.xh))
    lost = tau * (magnitude(row.g) + magnitude(w) + 1)
    d2 = mean(h * dxh + ((chain(n) + 6) * u * h + lost) * size) + tau * (1 + r)
    terms = h + size * (c2 + d2)
    err = r * (1 + rho) * (u * h + lost + size * d2 + dxh * c2 + 3 * u * terms + 2 * tau) + rho * np.abs(
        d_x.reshape(-1, n)
    )
    tiny_g, tiny_w = ((a != 0) & (np.abs(a) < tau) for a in (row.g, w))
    ambiguous = (row.x != 0) & (np.abs(row.xh) <= dxh)
    unsure = row.unsure | ((np.isinf(row.g) & tiny_w) | (np.isinf(w) & tiny_g)).any(1, keepdims=True)
    unsure = unsure | (np.isinf(row.h).any(1, keepdims=True) & ambiguous.any(1, keepdims=True))
    sums = [(h * factor).sum(1, keepdims=True) >= unit.huge for factor in (size, magnitude(row.x))]
    unsure = (
        unsure | sums[0] | sums[1] | (h >= unit.huge).any(1, keepdims=True) | (np.maximum(r, 1) * terms >= unit.huge)
    )
    return np.where(unsure, inf, err).reshape(d_x.shape)


def _d_weight_error(call: Call, row: _Rows) -> np.ndarray:
    unit, g, size = units(call), magnitude(row.g), np.abs(row.xh) + row.dxh
    products = (g * size).sum(0)
    err = (g * row.dxh).sum(0) + (g.shape[0] + 2) * unit.u * products + unit.tau * (g + size + 1).sum(0)
    ambiguous = np.isinf(row.g) & (row.x != 0) & (np.abs(row.xh) <= row.dxh)
    return np.where(row.unsure.any() | (products >= unit.huge) | ambiguous.any(0), inf, err)


@rmsnorm_vjp.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """With k = KAPPA u and q the variance of r's relative error (rmsnorm's ``root_spread``), one draw for a row.

    A mean of N terms of which c are added one after another errs by s^2 = k^2 [(c / 3 + 1) mean^2 + (c / 6 + log2 N + 1) S^2 / N], S^2 their mean square: the
    i-th addition rounds a partial sum of i/c of the whole and a bridge, every level of a tree the root of the terms, then each term. c is c_N in a row, M in a
    column. c2 is one draw for a row too: t^2 = (1 + 8/M) s^2 makes room for what M rows may draw. r stands once in r h and three times in r xh c2.
    d_x:      store^2 + q (d_x - 2 r xh c2)^2 + r^2 [3 k^2 (h^2 + (xh c2)^2) + xh^2 t^2(h xh)]
    d_weight: store^2 + sum (d_y xh)^2 (q + 2 k^2) + M^2 s^2(d_y xh)
    """
    k2, q, n, dtypes = (
        (KAPPA * units(call).u) ** 2,
        root_spread(call),
        call.dims["n"],
        [dtype for _, dtype in call.outputs.values()],
    )

    def spread(values: np.ndarray, axis: int, longest: float) -> np.ndarray:
        count = values.shape[axis]
        squares, mean = np.square(values).sum(axis, keepdims=True) / count, values.sum(axis, keepdims=True) / count
        return k2 * ((longest / 3 + 1) * mean**2 + (longest / 6 + np.log2(count) + 1) * squares / count)

    with np.errstate(all="ignore"):
        row = _Rows.of(call)
        h, xh, rows = row.h, row.xh, row.g.shape[0]
        pull = xh * ((h * xh).sum(1, keepdims=True) / n)
        own = (
            q * np.square(h - 3 * pull)
            + 3 * k2 * (h**2 + pull**2)
            + xh**2 * (1 + 8 / rows) * spread(h * xh, 1, chain(n))
        )
        weight = np.square(row.g * xh).sum(0) * (q + 2 * k2) + rows**2 * spread(row.g * xh, 0, rows)[0]
        variances = (row.r**2 * own).reshape(call.arrays["x"].shape), weight
        return tuple(
            None if y is None else np.hypot(store_spread(y, dtype), np.sqrt(s))
            for y, dtype, s in zip(ref, dtypes, variances, strict=True)
        )


def _plant(rng: np.random.Generator, x: np.ndarray, value: float) -> None:
    x[rng.random(x.shape[:-1]) < 0.5, rng.integers(x.shape[-1])] = value


@rmsnorm_vjp.edge(dims={"n": (1, 300)})
def nan_or_inf_in_a_row(arrays, rng, options):
    """An inf or NaN in x makes its row of d_x NaN, and no other; the inf its column of d_weight, the NaN all of it."""
    _plant(rng, arrays["x"], rng.choice([np.nan, inf, -inf]))


@rmsnorm_vjp.edge(dims={"n": (1, 300)})
def nan_or_inf_in_cotangents(arrays, rng, options):
    """A NaN in d_y makes its row of d_x and its column of d_weight NaN, and no other; an inf what arithmetic makes of it."""
    _plant(rng, arrays["d_y"], rng.choice([np.nan, inf]))


@rmsnorm_vjp.edge(dims={"n": (1, 300)}, given=("weight",))
def nan_in_a_weight(arrays, rng, options):
    """NaN in weight makes d_x NaN and leaves d_weight alone."""
    arrays["weight"][rng.integers(arrays["weight"].shape[0])] = np.nan


@rmsnorm_vjp.edge(dims={"n": (1, 300)})
def rows_of_zeros(arrays, rng, options):
    """A row of zeros: eps alone scales its gradient, and it adds nothing to d_weight."""
    arrays["x"][rng.random(arrays["x"].shape[:-1]) < 0.5] = 0


@rmsnorm_vjp.edge(dims={"batch": (5, 7), "n": (2, 300)}, options={"eps": 0.0}, given=("weight",))
def no_eps(arrays, rng, options):
    """eps = 0 is allowed, also where a tile has rows to spare: those have no squares, and leave nothing in the sums over rows."""


@rmsnorm_vjp.edge(dims={"n": (1, 300)}, options={"eps": 1e-2})
def rows_next_to_eps(arrays, rng, options):
    """A mean of squares like eps: xh is shorter than the root of n, and d_x no longer orthogonal to x."""
    arrays["x"] *= 0.1


@rmsnorm_vjp.edge(dims={"n": (129, 300)})
def padding_lanes(arrays, rng, options):
    """Lanes beyond n, in rows and cotangents with a mean: counted in a sum they would add to it."""
    arrays["x"] += 50
    arrays["d_y"] += 3


@rmsnorm_vjp.edge(dims={"n": (129, 513)}, smallest_tiles=True)
def many_tiles(arrays, rng, options):
    """Rows of several tiles, of which the last is ragged; each tile has its own size."""
    arrays["x"] *= 2.0 ** (np.arange(arrays["x"].shape[-1]) // 128)


@rmsnorm_vjp.edge(dims={"n": (1, 1)})
def rows_of_one_element(arrays, rng, options):
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
    rows = arrays["d_y"].reshape(-1, arrays["d_y"].shape[-1])
    rows[np.arange(len(rows)) != rng.choice([0, len(rows) // 2, len(rows) - 1])] = 0


@rmsnorm_vjp.law
def rows_are_independent(run, draw):
    """A row of d_x alone has the same bits as among others."""
    shape = draw.extent(2, 40), draw.extent(1, 300)
    x, d_y, weight, row = draw.normal(*shape), draw.normal(*shape), draw.normal(shape[1]), draw.extent(0, shape[0] - 1)
    draw.same_bits(
        run(x[row : row + 1], d_y[row : row + 1], weight)[0], run(x, d_y, weight)[0][row : row + 1], "a row alone"
    )


@rmsnorm_vjp.law
def gradients_do_not_depend_on_which_are_wanted(run, draw):
    """Each gradient, asked for alone, has the same bits."""
    shape = draw.extent(1, 150), draw.extent(1, 30)
    arrays = draw.normal(*shape), draw.normal(*shape), draw.normal(shape[1])
    for i, (name, together) in enumerate(zip(("d_x", "d_weight"), run(*arrays), strict=True)):
        draw.same_bits(run(*arrays, wants=(name,))[i], together, f"{name} alone")


@rmsnorm_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles both gradients, to the bit."""
    shape = draw.extent(1, 150), draw.extent(2, 30)
    x, d_y, weight = draw.normal(*shape), draw.normal(*shape), draw.normal(shape[1])
    two, d_y = x.dtype.type(2), d_y * x.dtype.type(64)  # far from subnormal results
    for name, doubled, once in zip(("d_x", "d_weight"), run(x, d_y * two, weight), run(x, d_y, weight), strict=True):
        draw.same_bits(doubled, once * two, f"{name} of a cotangent doubled")
