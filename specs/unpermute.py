"""Each token's rows, where positions say that they stand, weighted and summed, as a mixture of experts brings the rows
of its experts back to their tokens; and its gradients.

y[t] = sum_j weights[t, j] x[positions[t, j]]
d_x[positions[t, j]] = weights[t, j] d_y[t]        d_weights[t, j] = sum_i d_y[t, i] x[positions[t, j], i]

A token's sum is over its own terms in their order: what other tokens have changes no bit of it.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Int

from portakern.spec import Rule, spec
from portakern.spec.dtypes import numpy_dtype
from portakern.spec.tolerance import KAPPA, Units, format_of, magnitude, units
from portakern.specs._gradients import doubled, each_alone, stored_bounds, stored_spreads

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class UnpermuteOut(NamedTuple):
    y: Float[A, "tokens d"]


def used(positions: np.ndarray, rows: int) -> np.ndarray:
    """Which positions are rows: others add nothing."""
    return (positions >= 0) & (positions < rows)


def _no_row_twice(call: Call) -> bool:
    positions = call.arrays["positions"]
    named = positions[positions >= 0]
    return len(np.unique(named)) == named.size


NO_ROW_TWICE = Rule(
    _no_row_twice,
    "positions must name no row twice; pass what permute gave, or a negative number where a token has no row",
    values=True,
)


def bytes_moved(call: Call) -> float:
    """Each term's row is read, and each token's sum written."""
    dims, size = call.dims, numpy_dtype(call.dtype).itemsize
    terms = dims["tokens"] * dims["k"]
    return float((min(terms, dims["rows"]) + dims["tokens"]) * dims["d"] * size + 8 * terms)


@spec(
    tiling={},
    require=(NO_ROW_TWICE,),
    positive=("rows",),
    empty={"k": {"y": 0.0}},
    apart=("tokens", "d"),
    vjp="unpermute_vjp",
    budget="flops",
    typical={"tokens": 1024, "k": 4, "rows": 4096, "d": 1024},
    flops=lambda call: 2.0 * call.dims["tokens"] * call.dims["k"] * call.dims["d"],
    bytes_moved=bytes_moved,
)
def unpermute(x: Float[A, "rows d"], positions: Int[A, "tokens k"], weights: Float32[A, "tokens k"]) -> UnpermuteOut:
    """y[t] = sum of weights[t, j] x[positions[t, j]] over j, in float32 (float64 for float64), rounded once.

    Args:
      x: (rows, d), such as the results of experts in the order of ``permute``, of any strides.
      positions: (tokens, k), int32 or int64, where the rows of each token stand: what ``permute`` gave. A number that
        is no row, a negative one too, adds nothing, whatever its weight. No row may be named twice; kernels do not read
        positions to find out, and of a row that is named twice no gradient is promised.
      weights: (tokens, k), float32 (float64 beside float64), what a row counts, as a router's probabilities.

    Returns:
      y: (tokens, d), x's dtype. The terms of a token are added in the order of j, whatever other tokens name. A token
      without a row is zeros. NaN and infinities of a row, or of a weight, reach the token that names it: 0 times an
      infinity is NaN.
    """
    raise NotImplementedError


@unpermute.values("positions")
def drawn_positions(rng: np.random.Generator, shape: Any, dims: Any, options: Any) -> np.ndarray:
    """Rows in any order, some of them of no token; in half of the calls some tokens lack some."""
    rows = dims.get("rows", shape[0] * shape[1])
    found = rng.permutation(max(rows, shape[0] * shape[1]))[: shape[0] * shape[1]].reshape(shape)
    lost = (found >= rows) | (rng.random(shape) < rng.choice([0.0, 0.3]))
    return np.where(lost, -1, found).astype(np.int32)


@unpermute.values("positions", measured=True)
def all_rows(rng: np.random.Generator, shape: Any, dims: Any, options: Any) -> np.ndarray:
    rows = dims.get("rows", shape[0] * shape[1])
    found = rng.permutation(max(rows, shape[0] * shape[1]))[: shape[0] * shape[1]].reshape(shape)
    return np.where(found < rows, found, -1).astype(np.int32)


# --------------------------------------------------------------------------------------------------------------- error
class Terms(NamedTuple):
    """Of each number of y: how many terms its token has (tokens, 1), the sums of their magnitudes and squares, the most
    that flushed operands change, whether all are integers, and whether an infinity meets what may become 0."""

    number: np.ndarray
    size: np.ndarray
    squares: np.ndarray
    lost: np.ndarray
    integral: np.ndarray
    unsure: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, positions: np.ndarray, weights: np.ndarray, unit: Units) -> Terms:
        shape = (len(positions), x.shape[1])
        size, squares, lost = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        integral, unsure, named = np.ones(shape, bool), np.zeros(shape, bool), used(positions, len(x))
        with np.errstate(all="ignore"):
            for j in range(positions.shape[1]):
                ok = named[:, j, None]
                row, weight = np.where(ok, x[np.where(ok[:, 0], positions[:, j], 0)], 0.0), weights[:, j, None]
                weight = np.where(ok, weight, 0.0)
                product = magnitude(row) * magnitude(weight)
                size += product
                squares += product**2
                lost += np.where(ok, unit.tau * (2 + magnitude(row) + magnitude(weight)), 0.0)
                integral &= (row == np.rint(row)) & (weight == np.rint(weight))
                unsure |= (np.isinf(row) & faint(weight, unit)) | (np.isinf(weight) & faint(row, unit))
        return cls(named.sum(1)[:, None], size, squares, lost, integral, unsure)

    def error(self, unit: Units) -> np.ndarray:
        """Of the sum before it is rounded; +inf where nothing is promised."""
        err = (unit.chain(self.number) + 1) * unit.u * self.size + self.lost
        return np.where(self.unsure | (self.size >= unit.huge), inf, err)

    def variance(self, y: np.ndarray, unit: Units) -> np.ndarray:
        with np.errstate(all="ignore"):
            return (KAPPA * unit.u) ** 2 * (
                self.number * magnitude(y) ** 2 / 3 + (self.number / 6 + 1) * self.squares
            ) + self.lost**2

    def forced(self, y: np.ndarray, unit: Units, dtype: str) -> np.ndarray:
        """Where one result is right: tokens without rows, and sums of integers that the accumulator holds."""
        kept = (np.abs(y) >= max(unit.tau, format_of(dtype).eta)) | (y == 0)
        found: np.ndarray = (self.number == 0) | (self.integral & (self.size < 1 / unit.u) & np.isfinite(y) & kept)
        return found


def faint(x: np.ndarray, unit: Units) -> np.ndarray:
    """Where a number that is not 0 may be read as 0."""
    return (x != 0) & (np.abs(x) < unit.tau)


def terms_of(call: Call) -> Terms:
    arrays = call.arrays
    return Terms.of(arrays["x"], arrays["positions"], arrays["weights"], units(call))


@unpermute.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """E (1 + U) + U |y| + eta, with

        E = (chain(c) + 1) u S + tau sum (2 + |w| + |x|)        S = sum |w x|

    of the c terms of a token: each product rounds, and their sum in some order (:class:`~portakern.spec.tolerance.
    Units`). A weight that is subnormal may be read as 0 beside its row, and a row's number beside its weight; a product
    and a partial sum may flush. Without terms y is exact. Nothing is promised where S reaches 2^127, nor where an
    infinity meets a number that may be read as 0.
    """
    found = terms_of(call)
    (stored,) = stored_bounds(call, ref, [found.error(units(call))])
    return (np.where(found.number > 0, stored, 0.0),)


@unpermute.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """store^2 + (KAPPA u)^2 (c y^2 / 3 + (c / 6 + 1) S2) + lost^2, S2 the sum of squared terms, as in
    :func:`~portakern.spec.tolerance.dot_spread`; lost is what the bound has with tau, all of it."""
    return stored_spreads(call, ref, [terms_of(call).variance(ref[0], units(call))])


@unpermute.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tokens without rows, and sums of integers."""
    return (terms_of(call).forced(ref[0], units(call), call.dtype),)


@unpermute.locate
def locate_token(call: Call, output: str, index: tuple[int, ...]) -> str:
    """Which rows a token has, or which token a row."""
    positions = call.arrays["positions"]
    if output == "d_x":
        at = np.argwhere(positions == index[0])
        return f"the row of token {at[0][0]}, term {at[0][1]}" if len(at) else "a row of no token"
    return f"a token of the rows {positions[index[0]].tolist()} of {call.dims['rows']}"


# --------------------------------------------------------------------------------------------------------------- edges
SEVERAL = {"tokens": (2, 30), "k": (1, 6), "rows": (3, 90), "d": (1, 40)}


@unpermute.edge(dims=SEVERAL)
def tokens_without_rows(arrays, rng, options):
    """A token of no row is zeros, whatever its weights hold, and has no gradients."""
    lost = rng.random(len(arrays["positions"])) < 0.5
    arrays["positions"][lost] = rng.choice([-1, -7, -(2**31)])
    arrays["weights"][lost] = rng.choice([np.nan, inf, 1.0])


@unpermute.edge(dims=SEVERAL)
def positions_behind_the_last_row(arrays, rng, options):
    """They are no row: nothing is read there, and nothing written."""
    positions = arrays["positions"]
    far = len(arrays["x"]) + np.arange(positions.size).reshape(positions.shape)
    positions[...] = np.where(rng.random(positions.shape) < 0.5, far, positions)


@unpermute.edge(dims=SEVERAL)
def special_numbers(arrays, rng, options):
    """NaN and infinities of a row reach the token that names it."""
    for name in ("x", "d_y"):
        if name in arrays:
            array = arrays[name]
            array[rng.random(array.shape) < 0.2] = rng.choice([inf, -inf, np.nan])


@unpermute.edge(dims=SEVERAL)
def special_weights(arrays, rng, options):
    """Those of a weight reach all numbers of its token; a weight of 0 still makes a NaN of an infinity."""
    weights = arrays["weights"]
    weights[rng.random(weights.shape) < 0.3] = rng.choice([inf, np.nan, 0.0])
    arrays["x"][rng.random(arrays["x"].shape) < 0.1] = inf


@unpermute.edge(dims={"tokens": (1, 4), "k": (1, 3), "rows": (3, 12), "d": (1030, 2100)}, smallest_tiles=True)
def long_rows(arrays, rng, options):
    """Rows of several tiles, the last of which is ragged."""


@unpermute.edge(dims={"tokens": (1, 9), "k": (20, 40), "rows": (200, 400), "d": (1, 9)}, regime="integers")
def many_terms(arrays, rng, options):
    """Integers, whose sums are exact: a term that is left out, or met twice, shows."""
    arrays["weights"][...] = rng.integers(1, 4, arrays["weights"].shape)


@unpermute.edge(dims=SEVERAL, regime="wide")
def terms_that_cancel(arrays, rng, options):
    """Each term comes again with the other sign: the error is a share of the sum of magnitudes."""
    x, positions, half = arrays["x"], arrays["positions"], arrays["positions"].shape[1] // 2
    for a, b in zip(positions[:, :half].ravel(), positions[:, half : 2 * half].ravel(), strict=True):
        if a >= 0 and b >= 0:
            x[b] = -x[a]
    arrays["weights"][:, half : 2 * half] = arrays["weights"][:, :half]


@unpermute.edge(dims={"tokens": (2, 9), "k": (1, 4), "rows": (100, 200), "d": (1, 20)})
def more_rows_than_terms(arrays, rng, options):
    """Rows of no token are not read, and their gradient is exact zeros."""
    spare = np.ones(len(arrays["x"]), bool)
    named = arrays["positions"]
    spare[named[named >= 0]] = False
    arrays["x"][spare] = rng.choice([np.nan, inf])


# ---------------------------------------------------------------------------------------------------------------- laws
def drawn(draw: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, positions all of which are rows, and weights."""
    tokens, k, d = draw.extent(1, 30), draw.extent(1, 6), draw.extent(1, 70)
    rows = tokens * k + draw.extent(0, 9)
    positions = draw.rng.permutation(rows)[: tokens * k].reshape(tokens, k).astype(np.int32)
    return draw.normal(rows, d), positions, weights_of(draw, tokens, k)


def weights_of(draw: Any, *shape: int) -> np.ndarray:
    """float64 beside float64, else float32."""
    return draw.rng.standard_normal(shape).astype("float64" if draw.dtype == "float64" else "float32")


@unpermute.law
def a_token_alone(run, draw):
    """A token gives alone, of its own rows alone, what it gives among others."""
    x, positions, weights = drawn(draw)
    t = draw.extent(0, len(positions) - 1)
    own = np.arange(positions.shape[1], dtype=np.int32)[None]
    alone = run(x[positions[t]], own, weights[t : t + 1])
    draw.same_bits(alone, run(x, positions, weights)[t : t + 1], "a token alone")


@unpermute.law
def one_row_of_weight_one(run, draw):
    """With one row a token, whose weight is 1, y is made of rows, to the bit."""
    x, positions, weights = drawn(draw)
    draw.same_bits(run(x, positions[:, :1], 0 * weights[:, :1] + 1), x[positions[:, 0]], "rows of weight 1")


@unpermute.law
def a_term_that_is_left_out(run, draw):
    """A term at the end of a token's without a row changes nothing."""
    x, positions, weights = drawn(draw)
    fewer = run(x, positions[:, :-1], weights[:, :-1]) if positions.shape[1] > 1 else 0 * x[positions[:, 0]]
    dropped = np.concatenate((positions[:, :-1], 0 * positions[:, :1] - 1), 1)
    draw.same_bits(run(x, dropped, weights), fewer + x.dtype.type(0), "a term without a row")


@unpermute.law
def doubled_weights(run, draw):
    """Weights that are doubled double y, to the bit."""
    x, positions, weights = drawn(draw)
    x = x * x.dtype.type(64)
    two = weights.dtype.type(2)
    twice = run(x, positions, weights * two)
    draw.same_bits(twice, run(x, positions, weights) * x.dtype.type(2), "twice the weights")


unpermute.sample("experts", dims={"tokens": 5, "k": 2, "rows": 12, "d": 4})
unpermute.sample("one_row_each", dims={"tokens": 3, "k": 1, "rows": 3, "d": 7})


# ------------------------------------------------------------------------------------------------------------ gradient
class UnpermuteVjpOut(NamedTuple):
    d_x: Float[A, "rows d"]
    d_weights: Float32[A, "tokens k"]


@spec(
    tiling={},
    require=(NO_ROW_TWICE,),
    gradient_dtype=("d_x",),
    positive=("rows",),
    empty={"k": {"d_x": 0.0}, "tokens": {"d_x": 0.0}, "d": {"d_weights": 0.0}},
    budget="flops",
    flops=lambda call: 3.0 * call.dims["tokens"] * call.dims["k"] * call.dims["d"],
)
def unpermute_vjp(
    x: Float[A, "rows d"],
    positions: Int[A, "tokens k"],
    weights: Float32[A, "tokens k"],
    d_y: Float[A, "tokens d"],
) -> UnpermuteVjpOut:
    """d_x[positions[t, j]] = weights[t, j] d_y[t] and d_weights[t, j] = sum of d_y[t] x[positions[t, j]] over d, in
    float32 (float64 for float64), each rounded once.

    Args:
      x, positions, weights: as in unpermute.
      d_y: (tokens, d), the cotangent of y, of any strides.

    Returns:
      d_x: the shape and dtype of x. A row of no token is exact zeros.
      d_weights: the shape and dtype of weights. Exact zero where a position is no row.
    """
    raise NotImplementedError


class Owners(NamedTuple):
    """Of each row: the token that names it, and the weight with which it does; -1 and 0 of a row that none names."""

    token: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(cls, call: Call) -> Owners:
        positions, rows = call.arrays["positions"], call.dims["rows"]
        token, weight = np.full(rows, -1), np.zeros(rows)
        t, j = np.nonzero(used(positions, rows))
        token[positions[t, j]], weight[positions[t, j]] = t, call.arrays["weights"][t, j]
        return cls(token, weight)

    def terms(self, call: Call, unit: Units) -> Terms:
        """d_x is what unpermute makes of d_y, with one term a row."""
        return Terms.of(call.arrays["d_y"], self.token[:, None], self.weight[:, None], unit)


class Dots(NamedTuple):
    """Of each of d_weights: the sums of magnitudes and of squares of d_y x, what flushed operands change, and whether
    there is a row, all are integers, and an infinity meets what may become 0. (tokens, k)."""

    size: np.ndarray
    squares: np.ndarray
    lost: np.ndarray
    there: np.ndarray
    integral: np.ndarray
    unsure: np.ndarray

    @classmethod
    def of(cls, call: Call, unit: Units) -> Dots:
        x, positions, d_y = (call.arrays[name] for name in ("x", "positions", "d_y"))
        there = used(positions, len(x))
        row, g = x[np.where(there, positions, 0)], d_y[:, None, :]
        with np.errstate(all="ignore"):
            product = magnitude(row) * magnitude(g)
            lost = unit.tau * (2 + magnitude(row) + magnitude(g))
            integral = (row == np.rint(row)) & (g == np.rint(g))
            unsure = (np.isinf(row) & faint(g, unit)) | (np.isinf(g) & faint(row, unit))
            return cls(product.sum(-1), (product**2).sum(-1), lost.sum(-1), there, integral.all(-1), unsure.any(-1))


@unpermute_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """d_x: unpermute's, with one term a row. d_weights: E (1 + U) + U |d_weights| + eta, with

        E = (chain(d) + 1) u S + tau sum (2 + |d_y| + |x|)        S = sum |d_y x|

    Exact zeros where there is no row. Nothing is promised where S reaches 2^127, nor where an infinity meets a number
    that may be read as 0.
    """
    unit = units(call)
    terms, dots = Owners.of(call).terms(call, unit), Dots.of(call, unit)
    err = (unit.chain(call.dims["d"]) + 1) * unit.u * dots.size + dots.lost
    err = np.where(dots.unsure | (dots.size >= unit.huge), inf, err)
    d_x, d_weights = stored_bounds(call, ref, (terms.error(unit), err))
    return (
        None if d_x is None else np.where(terms.number > 0, d_x, 0.0),
        None if d_weights is None else np.where(dots.there, d_weights, 0.0),
    )


@unpermute_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """d_x: unpermute's, with one term a row. d_weights: store^2 + (KAPPA u)^2 (d d_weights^2 / 3 + (d / 6 + 1) S2)."""
    unit, d = units(call), call.dims["d"]
    terms, dots = Owners.of(call).terms(call, unit), Dots.of(call, unit)
    with np.errstate(all="ignore"):
        size = 0.0 if ref[1] is None else magnitude(ref[1]) ** 2
        of_weights = (KAPPA * unit.u) ** 2 * (d * size / 3 + (d / 6 + 1) * dots.squares) + dots.lost**2
    return stored_spreads(call, ref, (0.0 if ref[0] is None else terms.variance(ref[0], unit), of_weights))


@unpermute_vjp.exact
def exact_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rows of no token, weights of no row, and sums of integers that the accumulator holds."""
    unit, (d_x, d_weights) = units(call), ref
    dots = Dots.of(call, unit)
    integral = dots.integral & (dots.size < 1 / unit.u)
    return (
        None if d_x is None else Owners.of(call).terms(call, unit).forced(d_x, unit, call.dtype),
        None if d_weights is None else ~dots.there | (integral & np.isfinite(d_weights)),
    )


unpermute_vjp.locate(locate_token)

unpermute_vjp.edges.update(
    (plant.__name__, unpermute.edges[plant.__name__])
    for plant in (
        tokens_without_rows, positions_behind_the_last_row, special_numbers, special_weights, long_rows, many_terms,
        more_rows_than_terms,
    )
)  # fmt: skip


@unpermute_vjp.edge(dims={"tokens": (1, 9), "k": (1, 4), "rows": (4, 40), "d": (300, 1100)}, regime="wide")
def dots_that_cancel(arrays, rng, options):
    """The second half of a dot takes the first away again."""
    x, d_y, half = arrays["x"], arrays["d_y"], arrays["x"].shape[1] // 2
    x[:, half : 2 * half], d_y[:, half : 2 * half] = x[:, :half], -d_y[:, :half]


def drawn_vjp(draw: Any) -> tuple[np.ndarray, ...]:
    x, positions, weights = drawn(draw)
    return x, positions, weights, draw.normal(len(positions), x.shape[1])


@unpermute_vjp.law
def a_token_alone_vjp(run, draw):
    """A token's gradients have the same bits alone, with its own rows alone, and among others."""
    x, positions, weights, d_y = drawn_vjp(draw)
    t = draw.extent(0, len(positions) - 1)
    own = np.arange(positions.shape[1], dtype=np.int32)[None]
    d_x, d_weights = run(x, positions, weights, d_y)
    alone = run(x[positions[t]], own, weights[t : t + 1], d_y[t : t + 1])
    draw.same_bits(alone[0], d_x[positions[t]], "rows of a token alone")
    draw.same_bits(alone[1], d_weights[t : t + 1], "weights of a token alone")


@unpermute_vjp.law
def each_gradient_alone(run, draw):
    """A gradient asked for alone has the same bits."""
    each_alone(run, draw, ("d_x", "d_weights"), drawn_vjp(draw))


@unpermute_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles both gradients, to the bit."""
    x, positions, weights, d_y = drawn_vjp(draw)
    doubled(lambda d_y: run(x, positions, weights, d_y), draw, ("d_x", "d_weights"), d_y)
