"""Logarithm of a sum of exponentials along one axis, and its gradient.

y = log sum exp x, and d_x = d_y exp(x) / sum exp x.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.options import Axis
from portakern.spec.tolerance import KAPPA, magnitude, round_to, store_spread, units
from portakern.specs._rows import plant, silence_all_but_one

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class LogsumexpOut(NamedTuple):
    y: Float[A, "*rest"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="axis")},
    drops={"rest": "axis"},
    empty={"axis": {"y": -inf}},
    apart=("shape",),
    vjp="logsumexp_vjp",
    autocast="float32",
    typical={"shape": (4096, 4096)},
    flops=lambda call: 4.0 * prod(call.dims["shape"]),
)
def logsumexp(x: Float[A, "*shape"], *, axis: Annotated[int, Axis("x")] = -1) -> LogsumexpOut:
    """y = m + log sum exp(x - m) along ``axis``, m = max x or 0 if that is infinite, in float32 (float64 for float64).

    Args:
      x: any shape with at least one axis.
      axis: the axis that is reduced; y does not have it.

    Returns:
      y: x's dtype. A row with NaN gives NaN, else one with +inf gives +inf; nothing but -inf, or nothing at all, -inf.
    """
    raise NotImplementedError


class Exponentials(NamedTuple):
    """The exponentials of rows, which keep an extent of 1 along the axis where they are one number a row.

    Attributes:
      p: exp(x - m) / l, the share of each element; d: m - x where p > 0, else 0. total: l = sum exp(x - m).
      entropy: H = sum p d.
    """

    p: np.ndarray
    d: np.ndarray
    total: np.ndarray
    entropy: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, axis: int) -> Exponentials:
        with np.errstate(all="ignore"):
            m = x.max(axis, keepdims=True, initial=-inf)
            e = np.exp(x - m)
            total = e.sum(axis, keepdims=True)
            p = e / total
            d = np.where(p > 0, m - x, 0.0)
            return cls(p, d, total, (p * d).sum(axis, keepdims=True))


@logsumexp.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of y, of a row of N elements whose maximum is m:

        B = E (1 + U) + U |y| + eta,  E = [4u H + ex + (c_N + 2) u] + 4u (1 + log l) + u |y| + 2 tau

    with d = m - x, l = sum exp(-d), H = sum exp(-d) d / l, c_N = chain(N) and :class:`portakern.spec.tolerance.Units`.

    In the bracket the share by which l errs, which is what its logarithm is moved by: exp(-d) errs by 4u d + ex, as in
    softmax, and the sum takes the average and adds its chain. Then the logarithm itself, which hardware takes to a
    share of 4u or, where l is near 1, to 4u of 1; and the addition of m. A flushed subnormal x moves y by no more than
    tau, and so does what exp loses of a sum that is at least 1.
    """
    y, axis, unit = ref[0], call.options["axis"], units(call)
    w = Exponentials.of(call.arrays["x"], axis)
    with np.errstate(all="ignore"):
        share = 4 * unit.u * w.entropy + unit.ex + (unit.chain(call.dims["axis"]) + 2) * unit.u
        err = (share + 4 * unit.u * (1 + np.log(w.total))).squeeze(axis) + unit.u * np.abs(y) + 2 * unit.tau
    return (round_to(err, y, call.dtype),)


@logsumexp.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of y, with the symbols of the bound and s_1^2 = sum (exp(-d) / l)^2:

        sigma^2 = store^2 + u^2 H^2 + (ex/4)^2 + (KAPPA u)^2 [c_N / 3 + s_1^2 (d^2 + 1) + 2 + 2 log^2 l + y^2]

    store is that of storing y (``store_spread``). The constant of exp leans one way in all elements alike: u H, and so
    does exp itself. The i-th of c_N additions rounds a partial sum of i/c_N of l. l's own last roundings: 2; its
    logarithm's and that of log l before m is added: 2; then y.
    """
    y, axis, unit = ref[0], call.options["axis"], units(call)
    w = Exponentials.of(call.arrays["x"], axis)
    with np.errstate(all="ignore"):
        own = (w.p**2 * (w.d**2 + 1)).sum(axis, keepdims=True)
        rounded = unit.chain(call.dims["axis"]) / 3 + own + 2 + 2 * np.log(w.total) ** 2
        share = (unit.u * w.entropy) ** 2 + (unit.ex / 4) ** 2 + (KAPPA * unit.u) ** 2 * rounded
        err = np.sqrt(share.squeeze(axis) + (KAPPA * unit.u * magnitude(y)) ** 2)
    return (np.hypot(store_spread(y, call.dtype), err),)


def rows_of(x: np.ndarray, options: Any) -> np.ndarray:
    """x with the reduced axis last, as a view."""
    return np.moveaxis(x, options["axis"], -1)


@logsumexp.edge(dims={"shape": (2, 140)})
def rows_of_minus_inf(arrays, rng, options):
    """A row of nothing but -inf is -inf, as the sum of no exponential is 0; its neighbours are not."""
    rows = rows_of(arrays["x"], options)
    rows[rng.random(rows.shape[:-1]) < 0.5] = -inf


@logsumexp.edge(dims={"shape": (2, 140)})
def infinite_elements(arrays, rng, options):
    """A +inf makes its row +inf; a -inf adds nothing."""
    plant(rng, rows_of(arrays["x"], options), rng.choice([inf, -inf]))


@logsumexp.edge(dims={"shape": (2, 140)})
def nan_elements(arrays, rng, options):
    """A NaN makes its row NaN, beside a +inf too, and no other."""
    rows = rows_of(arrays["x"], options)
    plant(rng, rows, rng.choice([inf, 1.0]))
    plant(rng, rows, np.nan)


@logsumexp.edge(dims={"axis": (300, 390)}, smallest_tiles=True)
def infinities_in_later_tiles(arrays, rng, options):
    """A +inf after finite tiles, and -inf in all tiles before a value: no inf - inf may arise in between."""
    rows = rows_of(arrays["x"], options)
    rows[..., :257] = np.where(rng.random(rows.shape[:-1])[..., None] < 0.5, -inf, rows[..., :257])
    plant(rng, rows, inf)


@logsumexp.edge(dims={"shape": (120, 600)}, regime="spikes")
def maximum_at_a_tile_border(arrays, rng, options):
    """A dropped element at the end of a tile is the largest of its row."""
    arrays["x"] *= 20


@logsumexp.edge(dims={"shape": (2, 140)})
def steps_of_1e4(arrays, rng, options):
    """Differences far beyond exp's range: subtract before scaling."""
    arrays["x"] *= 1e4


@logsumexp.edge(dims={"shape": (300, 1030)})
def rising_rows(arrays, rng, options):
    """Every tile raises the maximum, so that every tile rescales the sum."""
    rows = rows_of(arrays["x"], options)
    rows[...] = np.linspace(-8, 8, rows.shape[-1])


@logsumexp.edge(dims={"shape": (300, 1030)}, smallest_tiles=True)
def every_element_counts(arrays, rng, options):
    """Equal elements near -log n: y = x + log n is near 0, and each counts as much as any other."""
    arrays["x"][...] = -np.log(arrays["x"].shape[options["axis"]]) * (1 + 0.01 * rng.standard_normal())


@logsumexp.edge(dims={"shape": (1, 1)})
def rows_of_one(arrays, rng, options):
    """The logarithm of the exponential of one element is that element."""


@logsumexp.law
def one_element_is_itself(run, draw):
    """exp(0) = 1 and log 1 = 0, so that y is x, to the bit; elements of -inf beside it add nothing."""
    x = draw.normal(draw.extent(1, 9), draw.extent(1, 300))
    alone = draw.extent(0, x.shape[1] - 1)
    y, x[:, np.arange(x.shape[1]) != alone] = x[:, alone].copy(), -inf
    draw.same_bits(run(x), y, "the only element")


@logsumexp.law
def rows_are_independent(run, draw):
    """A row alone gives the same bits as among others."""
    draw.row_alone(run)


@logsumexp.law
def any_axis_is_the_last_axis(run, draw):
    """The axis is a way to address elements: where a row holds one value that counts, to the bit."""
    x = draw.integers(0, 0, 3, draw.extent(2, 130), 4)
    x[:, draw.extent(0, x.shape[1] - 1)] = draw.integers(200, 250, 3, 4)
    draw.same_bits(run(x, axis=1), run(np.ascontiguousarray(np.moveaxis(x, 1, 2)), axis=2), "another axis")


logsumexp.sample("rows", dims={"shape": (3, 5)})
logsumexp.sample("another_axis", dims={"shape": (2, 3, 4)}, options={"axis": 1})
logsumexp.sample("one_row", dims={"shape": (7,)})


# ---------------------------------------------------------------------------------------------------------- gradient
class LogsumexpVjpOut(NamedTuple):
    d_x: Float[A, "*shape"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 65536, of="axis")},
    drops={"rest": "axis"},
    apart=("shape",),
    flops=lambda call: 6.0 * prod(call.dims["shape"]),
)
def logsumexp_vjp(
    x: Float[A, "*shape"], d_y: Float[A, "*rest"], *, axis: Annotated[int, Axis("x")] = -1
) -> LogsumexpVjpOut:
    """d_x = d_y p, p = exp(x - m) / sum exp(x - m) along ``axis``, m = max x, in float32 (float64 for float64).

    The weights p are made from x again: exp(x - y) would carry the rounding of y, which in 16 bits is a part in a
    hundred of p and more.

    Args:
      x: what logsumexp was given; d_y: the cotangent of what it returned, without the axis.
      axis: the axis that logsumexp reduced.

    Returns:
      d_x: the shape and dtype of x. A row that holds NaN or +inf, or nothing but -inf, is all NaN.
    """
    raise NotImplementedError


def _cotangents(call: Call) -> np.ndarray:
    """d_y with an extent of 1 along the axis."""
    return np.expand_dims(call.arrays["d_y"], call.options["axis"])


@logsumexp_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of d_x along a row of N elements, with the symbols of logsumexp's and p = exp(-d) / l:

        B = E (1 + U) + U |d_x| + eta,  E = |d_y| p [4u (d + H) + 2 ex + (c_N + 10) u] + tau (2 |d_y| + 1)

    In order: the exponential of the element and the average of all in the sum, as in softmax; the sum's chain; the
    division, the product with d_y and whatever else a row passes through. What flushes is a p below tau, in two places,
    and a subnormal d_y, which p <= 1 does not enlarge.

    Nothing is promised where an infinite d_y meets a p that may become 0.
    """
    axis, unit, g = call.options["axis"], units(call), _cotangents(call)
    x = call.arrays["x"]
    w = Exponentials.of(x, axis)
    with np.errstate(all="ignore"):
        share = 4 * unit.u * (w.d + w.entropy) + 2 * unit.ex + (unit.chain(call.dims["axis"]) + 10) * unit.u
        err = magnitude(g) * (w.p * share + 2 * unit.tau) + unit.tau
        err = np.where(np.isinf(g) & np.isfinite(x) & (w.p < 2 * unit.tau), inf, err)
    return (round_to(err, ref[0], call.dtype),)


@logsumexp_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of d_x, with the symbols of the bound:

        sigma^2 = store^2 + d_x^2 [u^2 (d^2 + H^2) + 2 (ex/4)^2 + (KAPPA u)^2 (c_N / 3 + 5)] + lost^2

    It is softmax's, with the roundings of one more product. lost is all of d_x where p may become 0.
    """
    w, unit = Exponentials.of(call.arrays["x"], call.options["axis"]), units(call)
    with np.errstate(all="ignore"):
        rounded = (KAPPA * unit.u) ** 2 * (unit.chain(call.dims["axis"]) / 3 + 5)
        share = unit.u**2 * (w.d**2 + w.entropy**2) + 2 * (unit.ex / 4) ** 2 + rounded
        d_x = magnitude(ref[0])
        lost = np.where(w.p < 2 * unit.tau, d_x, 0.0)
        return (np.hypot(np.hypot(store_spread(ref[0], call.dtype), lost), d_x * np.sqrt(share)),)


@logsumexp_vjp.edge(dims={"shape": (2, 140)})
def rows_without_weights(arrays, rng, options):
    """A row of nothing but -inf, or with a +inf or NaN, has a gradient of NaN; its neighbours do not."""
    rows = rows_of(arrays["x"], options)
    plant(rng, rows, rng.choice([inf, np.nan, -inf]))
    rows[rng.random(rows.shape[:-1]) < 0.3] = -inf


@logsumexp_vjp.edge(dims={"shape": (2, 140)})
def nan_and_inf_in_cotangents(arrays, rng, options):
    """A NaN in d_y makes its row NaN, an infinity makes it infinite, but NaN where p is 0; other rows have neither."""
    plant(rng, rows_of(arrays["x"], options), -inf)
    g = arrays["d_y"]
    g[rng.random(g.shape) < 0.4] = rng.choice([np.nan, inf, -inf])


@logsumexp_vjp.edge(dims={"shape": (3, 140)})
def one_row_alone_has_a_cotangent(arrays, rng, options):
    """Each row meets its own d_y: zeros in all but one."""
    silence_all_but_one(rng, arrays["d_y"].reshape(-1, 1))


@logsumexp_vjp.edge(dims={"shape": (120, 600)}, regime="spikes")
def maximum_at_a_tile_border_vjp(arrays, rng, options):
    """A dropped element at the end of a tile is the largest of its row."""
    arrays["x"] *= 20
    arrays["d_y"][...] = 1 + rng.random(arrays["d_y"].shape)


logsumexp_vjp.edge(dims={"shape": (300, 1030)})(rising_rows)


@logsumexp_vjp.edge(dims={"shape": (300, 1030)}, smallest_tiles=True)
def every_element_counts_vjp(arrays, rng, options):
    """Equal elements, each 1/n: the last of a ragged row counts as much as any other."""
    arrays["x"][...] = 0


@logsumexp_vjp.edge(dims={"axis": (300, 390)}, smallest_tiles=True)
def tiles_of_minus_inf(arrays, rng, options):
    """Nothing but -inf in the first tiles, and then a value: -inf - -inf must not arise."""
    rows_of(arrays["x"], options)[..., :257] = -inf


@logsumexp_vjp.edge(dims={"shape": (2, 140)})
def steps_of_1e4_vjp(arrays, rng, options):
    """Differences far beyond exp's range, and a loss that is scaled up."""
    arrays["x"] *= 1e4
    arrays["d_y"] *= 1e4


@logsumexp_vjp.edge(dims={"shape": (1, 1)})
def rows_of_one_vjp(arrays, rng, options):
    """One element takes the whole cotangent."""


@logsumexp_vjp.law
def rows_are_independent_vjp(run, draw):
    """A row alone gives the same bits as among others."""
    rows, n = draw.extent(2, 40), draw.extent(1, 300)
    x, d_y = draw.normal(rows, n), draw.normal(rows)
    first = draw.extent(0, rows - 1)
    row = slice(first, first + 1)
    draw.same_bits(run(x[row], d_y[row])[0], run(x, d_y)[0][row], "a row alone")


@logsumexp_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles the gradient, to the bit."""
    x = draw.normal(draw.extent(1, 5), draw.extent(1, 300))
    d_y = draw.normal(x.shape[0]) * x.dtype.type(64)  # far from subnormal results
    draw.same_bits(run(x, d_y * x.dtype.type(2))[0], run(x, d_y)[0] * x.dtype.type(2), "a cotangent doubled")


@logsumexp_vjp.law
def even_rows_share_the_cotangent(run, draw):
    """2^k equal elements, and a cotangent that is one integer: every step is exact, and each has 2^-k of it."""
    n, rows = 2 ** draw.extent(0, 8), draw.extent(1, 5)
    x, d_y = np.repeat(draw.normal(rows, 1), n, axis=1), draw.integers(-100, 100, rows)
    share = (d_y * d_y.dtype.type(1 / n))[:, None]
    draw.same_bits(run(x, d_y)[0], np.broadcast_to(share, x.shape), "a cotangent shared")


@logsumexp_vjp.law
def any_axis_is_the_last_axis_vjp(run, draw):
    """The axis is a way to address elements: where a row holds one value that counts, to the bit."""
    x, d_y = draw.integers(0, 0, 3, draw.extent(2, 130), 4), draw.integers(1, 100, 3, 4)
    x[:, draw.extent(0, x.shape[1] - 1)] = 400
    last = run(np.ascontiguousarray(np.moveaxis(x, 1, 2)), d_y, axis=2)[0]
    draw.same_bits(run(x, d_y, axis=1)[0], np.moveaxis(last, 2, 1), "another axis")
