"""Softmax along one axis, and its gradient.

y = exp(x - max x) / sum exp(x - max x), and d_x = y (d_y - sum y d_y).
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.options import Axis
from portakern.spec.tolerance import KAPPA, magnitude, round_to, store_spread, units
from portakern.specs._gradients import row_alone
from portakern.specs._rows import plant

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class SoftmaxOut(NamedTuple):
    y: Float[A, "*shape"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="shape")},
    apart=("shape",),
    vjp="softmax_vjp",
    autocast="float32",
    typical={"shape": (4096, 4096)},
    flops=lambda call: 5.0 * prod(call.dims["shape"]),
)
def softmax(x: Float[A, "*shape"], *, axis: Annotated[int, Axis("x")] = -1) -> SoftmaxOut:
    """y = exp(x - max x) / sum exp(x - max x) along ``axis``, in float32 (float64 for float64).

    Args:
      x: any shape with at least one axis.
      axis: the axis that sums to 1.

    Returns:
      y: the shape and dtype of x. A row that holds NaN or +inf, or nothing but -inf, is all NaN.
    """
    raise NotImplementedError


@softmax.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of y along a row of N elements, whose maximum is m:

        B = E (1 + U) + U y + eta,  E = y [4u (d + H) + 2 ex + (c_N + 8) u],  d = m - x, H = sum y d, c_N = chain(N)

    where u, U, ex, tau and eta are :class:`portakern.spec.tolerance.Units`.

    x - m rounds by u d, and exp of it, taken as exp2 of a product with log2(e), errs by 4u d + ex. The sum carries the
    average of that, 4u H + ex, plus its chain of c_N additions; the division and whatever else a row passes through are
    within 8u. exp(-d) below tau may be 0: the sum is at least 1, so eta covers it. A flushed subnormal x moves d by
    less than any of these.
    """
    x, y, axis, unit = call.arrays["x"], ref[0], call.options["axis"], units(call)
    with np.errstate(all="ignore"):
        d = np.where(y > 0, x.max(axis, keepdims=True, initial=-np.inf) - x, 0.0)
        entropy = (y * d).sum(axis, keepdims=True)
        err = y * (4 * unit.u * (d + entropy) + 2 * unit.ex + (unit.chain(x.shape[axis]) + 8) * unit.u)
    return (round_to(err, y, call.dtype),)


@softmax.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of y, with the symbols of the bound:

        sigma^2 = store^2 + y^2 [u^2 (d^2 + H^2) + 2 (ex/4)^2 + (KAPPA u)^2 (c_N / 3 + 4)]

    store is that of storing y (``store_spread``). x - m and its product with log2(e) round by KAPPA u d each, and the
    constant errs by up to 0.3 u of itself in every element alike: u d altogether, of which the sum takes the average
    u H. exp errs by ex/4 in the element and, as it leans one way, on average. The i-th of c_N additions rounds a
    partial sum of i/c_N of the whole. Division, product and the sum's own last roundings: 4.
    """
    x, y, axis, unit = call.arrays["x"], ref[0], call.options["axis"], units(call)
    u, ex, c = unit.u, unit.ex, unit.chain(x.shape[axis])
    with np.errstate(all="ignore"):
        d = np.where(y > 0, x.max(axis, keepdims=True, initial=-np.inf) - x, 0.0)
        entropy = (y * d).sum(axis, keepdims=True)
        share = u**2 * (d**2 + entropy**2) + 2 * (ex / 4) ** 2 + (KAPPA * u) ** 2 * (c / 3 + 4)
        return (np.hypot(store_spread(y, call.dtype), y * np.sqrt(share)),)


@softmax.edge(dims={"shape": (2, 140)})
def rows_of_minus_inf(arrays, rng, options):
    """A row of nothing but -inf is NaN, as NumPy's would be; its neighbours are not."""
    rows = np.moveaxis(arrays["x"], options["axis"], -1)
    rows[rng.random(rows.shape[:-1]) < 0.5] = -inf


@softmax.edge(dims={"shape": (2, 140)})
def infinite_elements(arrays, rng, options):
    """A +inf makes its whole row NaN; a -inf is a zero."""
    plant(rng, np.moveaxis(arrays["x"], options["axis"], -1), rng.choice([inf, -inf]))


@softmax.edge(dims={"shape": (2, 140)})
def nan_elements(arrays, rng, options):
    """A NaN makes its whole row NaN, and no other."""
    plant(rng, np.moveaxis(arrays["x"], options["axis"], -1), np.nan)


@softmax.edge(dims={"shape": (120, 600)}, regime="spikes")
def maximum_at_a_tile_border(arrays, rng, options):
    """A dropped element at the end of a tile is the largest of its row."""
    arrays["x"] *= 20


@softmax.edge(dims={"shape": (2, 140)})
def steps_of_1e4(arrays, rng, options):
    """Differences far beyond exp's range: subtract before scaling."""
    arrays["x"] *= 1e4


@softmax.edge(dims={"shape": (300, 1030)})
def rising_rows(arrays, rng, options):
    """Every tile raises the maximum, so that every tile rescales the sum."""
    rows = np.moveaxis(arrays["x"], options["axis"], -1)
    rows[...] = np.linspace(-8, 8, rows.shape[-1])


@softmax.edge(dims={"axis": (300, 390)}, smallest_tiles=True)
def tiles_of_minus_inf(arrays, rng, options):
    """Nothing but -inf in the first tiles, and then a value: -inf - -inf must not arise."""
    np.moveaxis(arrays["x"], options["axis"], -1)[..., :257] = -inf


@softmax.law
def shift_invariant(run, draw):
    """softmax(x + c) = softmax(x), to the bit where x + c is exact."""
    x = draw.integers(-8, 8, draw.extent(1, 5), draw.extent(1, 300))
    draw.same_bits(run(x + x.dtype.type(draw.extent(1, 100))), run(x), "a shifted row")


@softmax.law
def rows_are_independent(run, draw):
    """A row alone gives the same bits as among others."""
    draw.row_alone(run)


@softmax.law
def any_axis_is_the_last_axis(run, draw):
    """The axis is a way to address elements: where a row holds one value that counts, to the bit."""
    x = draw.integers(0, 0, 3, draw.extent(2, 130), 4)
    x[:, draw.extent(0, x.shape[1] - 1)] = 400
    draw.same_bits(run(x, axis=1), np.moveaxis(run(np.moveaxis(x, 1, 2), axis=2), 2, 1), "another axis")


softmax.sample("rows", dims={"shape": (3, 5)})
softmax.sample("another_axis", dims={"shape": (2, 3, 4)}, options={"axis": 1})


# ---------------------------------------------------------------------------------------------------------- gradient
class SoftmaxVjpOut(NamedTuple):
    d_x: Float[A, "*shape"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="shape")},
    aliases={"d_x": "d_y"},
    apart=("shape",),
    flops=lambda call: 4.0 * prod(call.dims["shape"]),
)
def softmax_vjp(
    y: Float[A, "*shape"], d_y: Float[A, "*shape"], *, axis: Annotated[int, Axis("y")] = -1
) -> SoftmaxVjpOut:
    """d_x = y (d_y - Delta), Delta = sum y d_y along ``axis``, in float32 (float64 for float64).

    Args:
      y: what softmax returned, as it was stored; d_y: its cotangent.
      axis: the axis along which y sums to 1.

    Returns:
      d_x: the shape and dtype of y. A row with a NaN in y or d_y is all NaN.
    """
    raise NotImplementedError


def _delta(call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(Delta, sum |y d_y|, sum (y d_y)^2) along the axis, which keeps an extent of 1; the sums of finite terms."""
    y, g, axis = call.arrays["y"], call.arrays["d_y"], call.options["axis"]
    terms = magnitude(y) * magnitude(g)
    return (y * g).sum(axis, keepdims=True), terms.sum(axis, keepdims=True), np.square(terms).sum(axis, keepdims=True)


@softmax_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of d_x along a row of N elements, with c_N = chain(N) and :class:`portakern.spec.tolerance.Units`:

        B = E (1 + U) + U |d_x| + eta
        E = |y| [(c_N + 2) u sum |y d_y| + 2u (|d_y| + |Delta|)] + flushed
        flushed = tau [|y| sum (|y| + |d_y| + 2) + |d_y| + |Delta| + 1]

    The products of Delta round by u and their sum by a chain of c_N. y (d_y - Delta) and y d_y - y Delta both round by
    2u (|d_y| + |Delta|) |y| at most. flushed: subnormal elements are read as 0, each next to the other factor, and
    results become 0.

    Where y is off by o, |y| + o stands for |y|, Delta is off by s = sum o |d_y|, and E has
    o (|d_y - Delta| + s) + |y| s more.

    Nothing is promised where sum |y d_y|, |d_y| + |Delta| or its product with y reach 2^127, and where an infinity
    meets a subnormal, or is in y itself.
    """
    y, g, axis, unit = call.arrays["y"], call.arrays["d_y"], call.options["axis"], units(call)
    with np.errstate(all="ignore"):
        (delta, size, _), n = _delta(call), y.shape[axis]
        tiny_y = (y != 0) & (np.abs(y) < unit.tau)
        off = call.off.get("y", 0.0)
        shift = (off * magnitude(g)).sum(axis, keepdims=True)
        moved = off * (magnitude(g - delta) + shift) + magnitude(y) * shift
        size = size + shift
        y, g, apart = magnitude(y) + off, magnitude(g), magnitude(g) + np.abs(delta) + shift
        lost = y * (unit.tau * (y + g + 2)).sum(axis, keepdims=True) + unit.tau * (apart + 1)
        err = y * ((unit.chain(n) + 2) * unit.u * size + 2 * unit.u * apart) + lost + moved
        unsure = np.isinf(call.arrays["y"]) | (np.isinf(call.arrays["d_y"]) & tiny_y)
        overflows = (size >= unit.huge) | (np.isfinite(delta) & (apart * np.maximum(1, y) >= unit.huge))
        overflows = overflows | (np.isinf(delta) & tiny_y)
        err = np.where(overflows | unsure.any(axis, keepdims=True), inf, err)
    return (round_to(err, ref[0], call.dtype),)


@softmax_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of d_x, with the symbols of the bound, over R rows:

        sigma^2 = store^2 + (KAPPA u y)^2 [(1 + 8/R) s^2 + d_y^2 + Delta^2 + (d_y - Delta)^2]
        s^2 = (c_N / 3 + 1) Delta^2 + (c_N / 6 + log2 N + 1) sum (y d_y)^2

    store is that of storing d_x (``store_spread``). s is the share of the sum Delta: the i-th of c_N additions rounds a
    partial sum of i/c_N of Delta and a bridge of the products, every level of a tree the root of N products, and each
    product itself. That is one draw for a whole row: 8/R makes room for what R rows may draw. Then d_y - Delta rounds
    and its product with y, or two products and their difference. A subnormal y may be read as 0, which loses all of
    y (d_y - Delta).
    """
    y, g, n = magnitude(call.arrays["y"]), call.arrays["d_y"], call.arrays["y"].shape[call.options["axis"]]
    unit = units(call)
    k, c = KAPPA * unit.u, unit.chain(n)
    with np.errstate(all="ignore"):
        delta, _, squares = _delta(call)
        shared = (1 + 8 / delta.size) * ((c / 3 + 1) * delta**2 + (c / 6 + np.log2(n) + 1) * squares)
        flushed = np.where(y < unit.tau, y * np.abs(g - delta), 0.0)
        own = k * y * np.sqrt(shared + g**2 + delta**2 + (g - delta) ** 2)
        return (np.hypot(np.hypot(store_spread(ref[0], call.dtype), flushed), own),)


@softmax_vjp.edge(dims={"shape": (2, 140)})
def nan_and_inf_in_cotangents(arrays, rng, options):
    """A NaN in d_y makes its whole row NaN, and no other; an infinity makes infinities and NaN by plain arithmetic."""
    plant(rng, np.moveaxis(arrays["d_y"], options["axis"], -1), rng.choice([np.nan, inf, -inf]))


@softmax_vjp.edge(dims={"shape": (2, 140)})
def rows_that_softmax_made_nan(arrays, rng, options):
    """A row of y that is NaN has a gradient of NaN; its neighbours do not."""
    rows = np.moveaxis(arrays["x"], options["axis"], -1)
    rows[rng.random(rows.shape[:-1]) < 0.5] = -inf


@softmax_vjp.edge(dims={"shape": (120, 600)}, regime="spikes")
def one_hot_rows(arrays, rng, options):
    """Rows that are saturated: y is 1 somewhere, mostly at the border of a tile, 0 elsewhere, and d_x is 0."""
    arrays["x"] *= 1000
    arrays["d_y"][...] = rng.standard_normal(arrays["d_y"].shape)


@softmax_vjp.edge(dims={"shape": (2, 300)})
def constant_cotangents(arrays, rng, options):
    """y sums to 1, so that a cotangent that is constant along the axis leaves nothing but rounding."""
    rows = np.moveaxis(arrays["d_y"], options["axis"], -1)
    rows[...] = rng.standard_normal((*rows.shape[:-1], 1))


@softmax_vjp.edge(dims={"shape": (2, 140)})
def large_cotangents(arrays, rng, options):
    """A loss that is scaled up: d_y of 10^4."""
    arrays["d_y"] *= 1e4


@softmax_vjp.edge(dims={"shape": (300, 1030)}, smallest_tiles=True)
def every_tile_counts(arrays, rng, options):
    """Each tile adds to Delta, and as much as any other."""
    arrays["x"][...] = 0
    arrays["d_y"][...] = 1 + 0.1 * arrays["d_y"]


@softmax_vjp.law
def rows_are_independent_vjp(run, draw):
    """A row alone gives the same bits as among others."""
    row_alone(run, draw, weighted=False)


@softmax_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles the gradient, to the bit."""
    y = draw.normal(draw.extent(1, 5), draw.extent(1, 300))
    d_y = draw.normal(*y.shape) * y.dtype.type(64)  # far from subnormal results
    draw.same_bits(run(y, d_y * y.dtype.type(2))[0], run(y, d_y)[0] * y.dtype.type(2), "a cotangent doubled")


@softmax_vjp.law
def even_rows_have_no_gradient_of_a_constant(run, draw):
    """y = 2^-k in 2^k places, and a cotangent that is one integer: every step is exact, and the gradient is 0."""
    n = 2 ** draw.extent(0, 8)
    y = np.full((draw.extent(1, 5), n), 1 / n).astype(draw.normal(1).dtype)
    d_y = np.broadcast_to(draw.integers(-100, 100, y.shape[0], 1), y.shape).copy()
    draw.same_bits(np.abs(run(y, d_y)[0]), np.zeros_like(y), "the gradient of a constant")


@softmax_vjp.law
def any_axis_is_the_last_axis_vjp(run, draw):
    """The axis is a way to address elements: where every sum is exact, to the bit."""
    n = draw.extent(2, 130)
    y, d_y = draw.integers(-4, 4, 3, n, 4), draw.integers(-4, 4, 3, n, 4)
    last = run(*(np.ascontiguousarray(np.moveaxis(a, 1, 2)) for a in (y, d_y)), axis=2)[0]
    draw.same_bits(run(y, d_y, axis=1)[0], np.moveaxis(last, 2, 1), "another axis")
