"""Gradients of layer normalisation over the last axis."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.options import Range
from portakern.spec.tolerance import KAPPA, chain, magnitude, round_to, store_spread, units

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class LayernormVjpOut(NamedTuple):
    d_x: Float[A, "*batch n"]
    d_weight: Float[A, "n"]
    d_bias: Float[A, "n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 16384, of="n")},
    or_float32=("weight", "bias"),
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
      weight, bias: (n,), x's dtype or float32, as in layernorm. The values of bias are not read: it says that d_bias exists, and its dtype.
      eps: as in layernorm.

    Returns:
      d_x: the shape and dtype of x; d_weight, d_bias: those of weight and bias, None where that was not given.
      An inf or NaN in a row of x makes its row of d_x and all of d_weight NaN; a NaN in d_y its row of d_x and its column of d_weight and d_bias.
    """
    raise NotImplementedError


class _Rows(NamedTuple):
    """x and h by rows of n, (rows, n) or (rows, 1): see :func:`bound`. dxh is +inf in a row of which nothing is promised."""

    x: np.ndarray
    g: np.ndarray
    h: np.ndarray
    xh: np.ndarray
    r: np.ndarray
    rho: np.ndarray
    dxh: np.ndarray
    mean: np.ndarray
    v: np.ndarray

    @classmethod
    def of(cls, call: Call) -> _Rows:
        n, unit = call.dims["n"], units(call)
        x, g = (call.arrays[name].reshape(-1, n) for name in ("x", "d_y"))
        u, tau, c = unit.u, unit.tau, chain(n) + 2
        size, mean = np.abs(x).sum(1, keepdims=True), x.sum(1, keepdims=True) / n
        var = np.square(x - mean).sum(1, keepdims=True) / n
        delta, sd, v = c * u * size / n, np.sqrt(var), var + call.options["eps"]
        low = np.maximum(sd - delta, 0) ** 2 * (1 - (c + 4) * u) + call.options["eps"] - 3 * tau
        high = (sd + delta) ** 2 * (1 + (c + 4) * u) + call.options["eps"] + 3 * tau
        rho = np.maximum(np.sqrt(v / low) - 1, 1 - np.sqrt(v / high)) + 4 * u
        r = 1 / np.sqrt(v)
        xh = (x - mean) * r
        dxh = r * (delta + 3 * tau) * (1 + rho) + np.abs(xh) * (rho + 4 * u) + tau
        overflows = np.isfinite(x).all(1, keepdims=True) & ((size >= unit.huge) | (n * var >= unit.huge))
        h = g if call.arrays["weight"] is None else g * call.arrays["weight"]
        return cls(x, g, h, xh, r, rho, np.where((low <= 0) | overflows, inf, dxh), mean, v)


@layernorm_vjp.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """xh errs by dxh = r (delta + 3 tau)(1 + rho) + |xh| (rho + 4u) + tau, and r by rho of itself: delta and rho as in layernorm's bound.

    With X = |xh| + dxh, c1 = mean h and c2 = mean(h xh), h = w d_y errs by dh = u|h| + lost, where lost = tau (|d_y| + |w| + 1) is what flushes;
    c1 by d1 = (c_N + 3) u mean|h| + mean lost + tau: the products, their sum and the division; c2 by d2 = mean(|h| dxh + ((c_N + 4) u |h| + lost) X) + tau.
    d_x:      E = r (1 + rho) [dh + d1 + X d2 + dxh |c2| + 4u (|h| + |c1| + d1 + X (|c2| + d2)) + 2 tau] + rho |d_x|
    d_weight: E = sum |d_y| dxh + (M + 3) u sum |d_y| X + tau sum (|d_y| + X + 1), sums over the M rows, in any order
    d_bias:   E = (M + 1) u sum |d_y| + M tau
    and B = E (1 + U) + U |value| + eta, U and eta of the gradient's own dtype.

    Nothing is promised of a row where layernorm promises nothing (all of d_weight takes part in it), or where r times the terms of d_x, or a sum, reach 2^127.
    An infinite h or d_y gives infinities and NaN by the sign of xh: nothing is promised where |xh| <= dxh, or where it arises beside a subnormal.
    """
    unit, dtypes = units(call), [dtype for _, dtype in call.outputs.values()]
    with np.errstate(all="ignore"):
        row = _Rows.of(call)
        errors: list[Any] = [None if ref[0] is None else _d_x_error(call, row, ref[0]), *_column_errors(unit, row)]
        return tuple(
            None if y is None else round_to(e, y, dtype) for e, y, dtype in zip(errors, ref, dtypes, strict=True)
        )


def _d_x_error(call: Call, row: _Rows, d_x: np.ndarray) -> np.ndarray:
    unit, n, w = units(call), call.dims["n"], call.arrays["weight"]
    w = np.ones(1) if w is None else w
    u, tau, c = unit.u, unit.tau, chain(n)

    def mean(values: np.ndarray) -> np.ndarray:
        return values.sum(1, keepdims=True) / n

    h, size, xh = magnitude(row.h), np.abs(row.xh) + row.dxh, row.xh
    c1, c2 = np.abs(mean(row.h)), np.abs(mean(row.h * xh))
    lost = tau * (magnitude(row.g) + magnitude(w) + 1)
    d1 = (c + 3) * u * mean(h) + mean(lost) + tau
    d2 = mean(h * row.dxh + ((c + 4) * u * h + lost) * size) + tau
    terms = h + c1 + d1 + size * (c2 + d2)
    err = row.r * (1 + row.rho) * (
        u * h + lost + d1 + size * d2 + row.dxh * c2 + 4 * u * terms + 2 * tau
    ) + row.rho * np.abs(d_x.reshape(-1, n))
    tiny_g, tiny_w = ((a != 0) & (np.abs(a) < tau) for a in (row.g, w))
    infinite, ambiguous = np.isinf(row.h), np.abs(xh) <= row.dxh
    sums = (n * mean(h) >= unit.huge) | (n * mean(h * size) >= unit.huge)
    unsure = (
        sums
        | np.isinf(row.dxh)
        | ((infinite & ambiguous) | (np.isinf(row.g) & tiny_w) | (np.isinf(w) & tiny_g)).any(1, keepdims=True)
    )
    unsure = (
        unsure
        | (infinite.any(1, keepdims=True) & ambiguous)
        | (np.isfinite(terms) & (np.maximum(row.r, 1) * terms >= unit.huge))
    )
    return np.where(unsure, inf, err).reshape(d_x.shape)


def _column_errors(unit: Any, row: _Rows) -> tuple[np.ndarray, np.ndarray]:
    """E of d_weight and of d_bias."""
    g, size, rows = magnitude(row.g), np.abs(row.xh) + row.dxh, row.g.shape[0]
    products, total = (g * size).sum(0), g.sum(0)
    weight = (g * row.dxh).sum(0) + (rows + 3) * unit.u * products + unit.tau * (g + size + 1).sum(0)
    unsure = np.isinf(row.dxh).any() | (products >= unit.huge) | (np.isinf(row.g) & (np.abs(row.xh) <= row.dxh)).any(0)
    bias = (rows + 1) * unit.u * total + rows * unit.tau
    return np.where(unsure, inf, weight), np.where(total >= unit.huge, inf, bias)


@layernorm_vjp.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """With k = KAPPA u, a mean of N terms of which c are added one after another errs by s^2 = k^2 [(c / 3 + 1) mean^2 + (c / 6 + log2 N + 1) S^2 / N],
    S^2 their mean square: the i-th addition rounds a partial sum of i/c of the whole and a bridge, every level of a tree the root of the terms, then each term.
    c is c_N in a row, M in a column. A mean of a row is one draw for all its elements: t^2 = (1 + 8/M) s^2 makes room for what M rows may draw.

    xh moves by a shift of its row, r ds with ds^2 = t^2 of x, and by a share of itself of variance q = k^2 (c_N / 3 + 8) + (ds^2 / v)^2; r by that share too.
    d_x:      store^2 + q d_x^2 + r^2 [4 k^2 (h^2 + c1^2 + (xh c2)^2) + t^2(h) + xh^2 (t^2(h xh) + (c1 r ds)^2 + q c2^2) + c2^2 ((r ds)^2 + q xh^2)]
    d_weight: store^2 + sum d_y^2 ((r ds)^2 + q xh^2) + M^2 s^2(d_y xh)
    d_bias:   store^2 + M^2 s^2(d_y)
    """
    k2, n, dtypes = (KAPPA * units(call).u) ** 2, call.dims["n"], [dtype for _, dtype in call.outputs.values()]

    def spread(values: np.ndarray, axis: int, longest: float, spare: float = 1.0) -> np.ndarray:
        count = values.shape[axis]
        squares, mean = np.square(values).sum(axis, keepdims=True) / count, values.sum(axis, keepdims=True) / count
        return spare * k2 * ((longest / 3 + 1) * mean**2 + (longest / 6 + np.log2(count) + 1) * squares / count)

    with np.errstate(all="ignore"):
        row, c = _Rows.of(call), chain(n)
        g, h, xh, r2, rows = row.g, row.h, row.xh, 1 / row.v, row.g.shape[0]
        spare = 1 + 8 / rows
        shift2 = spread(row.x - row.mean, 1, c, spare) + spare * k2 * (c / 3 + 1) * row.mean**2
        q = k2 * (c / 3 + 8) + (shift2 * r2) ** 2
        c1, c2 = h.sum(1, keepdims=True) / n, (h * xh).sum(1, keepdims=True) / n
        of_c2 = spread(h * xh, 1, c, spare) + c1**2 * r2 * shift2 + q * c2**2
        terms = (
            4 * k2 * (h**2 + c1**2 + (xh * c2) ** 2)
            + spread(h, 1, c, spare)
            + xh**2 * of_c2
            + c2**2 * (r2 * shift2 + q * xh**2)
        )
        own = r2 * (terms + q * np.square(h - c1 - xh * c2))
        weight = (g**2 * (r2 * shift2 + q * xh**2)).sum(0) + rows**2 * spread(g * xh, 0, rows)[0]
        variances = own.reshape(call.arrays["x"].shape), weight, rows**2 * spread(g, 0, rows)[0]
        return tuple(
            None if y is None else np.hypot(store_spread(y, dtype), np.sqrt(s))
            for y, dtype, s in zip(ref, dtypes, variances, strict=True)
        )


@layernorm_vjp.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """d_bias where a column of d_y is of integers with sum |d_y| < 1/u: every partial sum is an integer that the accumulator holds."""
    g = call.arrays["d_y"].reshape(-1, call.dims["n"])
    whole = np.isfinite(g).all(0) & (g == np.trunc(g)).all(0) & (magnitude(g).sum(0) < 1 / units(call).u)
    return None, None, None if ref[2] is None else whole


def _plant(rng: np.random.Generator, x: np.ndarray, value: float) -> None:
    x[rng.random(x.shape[:-1]) < 0.5, rng.integers(x.shape[-1])] = value


@layernorm_vjp.edge(dims={"n": (1, 300)})
def nan_or_inf_in_a_row(arrays, rng, options):
    """An inf or NaN in x makes its row of d_x NaN, and all of d_weight; no other row, and not d_bias."""
    _plant(rng, arrays["x"], rng.choice([np.nan, inf, -inf]))


@layernorm_vjp.edge(dims={"n": (1, 300)})
def nan_or_inf_in_cotangents(arrays, rng, options):
    """A NaN in d_y makes its row of d_x and its column of d_weight and d_bias NaN, and no other."""
    _plant(rng, arrays["d_y"], rng.choice([np.nan, np.nan, inf]))


@layernorm_vjp.edge(dims={"n": (1, 300)}, given=("weight", "bias"))
def nan_in_weight_and_bias(arrays, rng, options):
    """NaN in weight makes d_x NaN and leaves d_weight alone; bias is not read at all."""
    arrays["weight"][rng.integers(arrays["weight"].shape[0])] = np.nan
    arrays["bias"][...] = np.nan


@layernorm_vjp.edge(dims={"n": (2, 300)})
def constant_rows(arrays, rng, options):
    """A row without variance: eps alone scales its gradient."""
    arrays["x"][...] = rng.standard_normal((*arrays["x"].shape[:-1], 1))


@layernorm_vjp.edge(dims={"batch": (5, 7), "n": (2, 300)}, options={"eps": 0.0}, given=("weight",))
def no_eps(arrays, rng, options):
    """eps = 0 is allowed, also where a tile has rows to spare: those have no variance, and leave nothing in the sums over rows."""


@layernorm_vjp.edge(dims={"n": (100, 300)})
def large_mean(arrays, rng, options):
    """A mean of 200 with a spread of 1: E[x^2] - mean^2 has few digits left."""
    arrays["x"][...] = 200 + np.round(4 * arrays["x"]) / 4


@layernorm_vjp.edge(dims={"n": (129, 300)})
def padding_lanes(arrays, rng, options):
    """Lanes beyond n, in rows and cotangents with a mean: counted in a sum they would add to it."""
    arrays["x"] += 50
    arrays["d_y"] += 3


@layernorm_vjp.edge(dims={"n": (1, 1)})
def rows_of_one_element(arrays, rng, options):
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
    rows = arrays["d_y"].reshape(-1, arrays["d_y"].shape[-1])
    rows[np.arange(len(rows)) != rng.choice([0, len(rows) // 2, len(rows) - 1])] = 0


@layernorm_vjp.edge(dims={"n": (2, 140)}, given=("bias",), absent=("weight",))
def bias_alone(arrays, rng, options):
    """weight is 1 and has no gradient; bias has."""


@layernorm_vjp.edge(dims={"batch": (5, 7), "n": (2, 140)}, options={"eps": 0.0}, given=("weight",), absent=("bias",))
def weight_alone(arrays, rng, options):
    """bias has no gradient; weight has, of rows that no tile divides and without eps."""


@layernorm_vjp.law
def rows_are_independent(run, draw):
    """A row of d_x alone has the same bits as among others."""
    shape = draw.extent(2, 40), draw.extent(1, 300)
    x, d_y, weight, row = draw.normal(*shape), draw.normal(*shape), draw.normal(shape[1]), draw.extent(0, shape[0] - 1)
    draw.same_bits(
        run(x[row : row + 1], d_y[row : row + 1], weight)[0], run(x, d_y, weight)[0][row : row + 1], "a row alone"
    )


@layernorm_vjp.law
def gradients_do_not_depend_on_which_are_wanted(run, draw):
    """Each gradient, asked for alone, has the same bits."""
    shape = draw.extent(1, 150), draw.extent(1, 30)
    arrays = draw.normal(*shape), draw.normal(*shape), draw.normal(shape[1]), draw.normal(shape[1])
    for i, (name, together) in enumerate(zip(("d_x", "d_weight", "d_bias"), run(*arrays), strict=True)):
        draw.same_bits(run(*arrays, wants=(name,))[i], together, f"{name} alone")


@layernorm_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles every gradient, to the bit."""
    shape = draw.extent(1, 150), draw.extent(2, 30)
    x, d_y, weight, bias = draw.normal(*shape), draw.normal(*shape), draw.normal(shape[1]), draw.normal(shape[1])
    two, d_y = x.dtype.type(2), d_y * x.dtype.type(64)  # far from subnormal results
    for name, doubled, once in zip(
        ("d_x", "d_weight", "d_bias"), run(x, d_y * two, weight, bias), run(x, d_y, weight, bias), strict=True
    ):
        draw.same_bits(doubled, once * two, f"{name} of a cotangent doubled")


@layernorm_vjp.law
def a_weight_of_ones_changes_nothing(run, draw):
    """weight None is 1."""
    shape = draw.extent(1, 5), draw.extent(1, 300)
    x, d_y = draw.normal(*shape), draw.normal(*shape)
    draw.same_bits(run(x, d_y, np.ones(shape[1], x.dtype))[0], run(x, d_y)[0], "a weight of ones")
