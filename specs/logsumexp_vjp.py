"""Gradient of the logarithm of a sum of exponentials along one axis."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.options import Axis
from portakern.spec.tolerance import KAPPA, magnitude, round_to, store_spread, units
from portakern.specs._rows import plant, silence_all_but_one
from portakern.specs.logsumexp import Weights, rows_of

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


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
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of d_x along a row of N elements, with the symbols of logsumexp's and p = exp(-d) / l:

        B = E (1 + U) + U |d_x| + eta,  E = |d_y| p [4u (d + H) + 2 ex + (c_N + 10) u] + tau (2 |d_y| + 1)

    In order: the exponential of the element and the average of all in the sum, as in softmax; the sum's chain; the
    division, the product with d_y and whatever else a row passes through. What flushes is a p below tau, in two places,
    and a subnormal d_y, which p <= 1 does not enlarge.

    Nothing is promised where an infinite d_y meets a p that may become 0.
    """
    axis, unit, g = call.options["axis"], units(call), _cotangents(call)
    x = call.arrays["x"]
    w = Weights.of(x, axis)
    with np.errstate(all="ignore"):
        share = 4 * unit.u * (w.d + w.entropy) + 2 * unit.ex + (unit.chain(call.dims["axis"]) + 10) * unit.u
        err = magnitude(g) * (w.p * share + 2 * unit.tau) + unit.tau
        err = np.where(np.isinf(g) & np.isfinite(x) & (w.p < 2 * unit.tau), inf, err)
    return (round_to(err, ref[0], call.dtype),)


@logsumexp_vjp.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of d_x, with the symbols of the bound:

        sigma^2 = store^2 + d_x^2 [u^2 (d^2 + H^2) + 2 (ex/4)^2 + (KAPPA u)^2 (c_N / 3 + 5)] + lost^2

    It is softmax's, with the roundings of one more product. lost is all of d_x where p may become 0.
    """
    w, unit = Weights.of(call.arrays["x"], call.options["axis"]), units(call)
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
def maximum_at_a_tile_border(arrays, rng, options):
    """A dropped element at the end of a tile is the largest of its row."""
    arrays["x"] *= 20
    arrays["d_y"][...] = 1 + rng.random(arrays["d_y"].shape)


@logsumexp_vjp.edge(dims={"shape": (300, 1030)})
def rising_rows(arrays, rng, options):
    """Every tile raises the maximum, so that every tile rescales the sum."""
    rows = rows_of(arrays["x"], options)
    rows[...] = np.linspace(-8, 8, rows.shape[-1])


@logsumexp_vjp.edge(dims={"shape": (300, 1030)}, smallest_tiles=True)
def every_element_counts(arrays, rng, options):
    """Equal elements, each 1/n: the last of a ragged row counts as much as any other."""
    arrays["x"][...] = 0


@logsumexp_vjp.edge(dims={"axis": (300, 390)}, smallest_tiles=True)
def tiles_of_minus_inf(arrays, rng, options):
    """Nothing but -inf in the first tiles, and then a value: -inf - -inf must not arise."""
    rows_of(arrays["x"], options)[..., :257] = -inf


@logsumexp_vjp.edge(dims={"shape": (2, 140)})
def steps_of_1e4(arrays, rng, options):
    """Differences far beyond exp's range, and a loss that is scaled up."""
    arrays["x"] *= 1e4
    arrays["d_y"] *= 1e4


@logsumexp_vjp.edge(dims={"shape": (1, 1)})
def rows_of_one(arrays, rng, options):
    """One element takes the whole cotangent."""


@logsumexp_vjp.law
def rows_are_independent(run, draw):
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
def any_axis_is_the_last_axis(run, draw):
    """The axis is a way to address elements: where a row holds one value that counts, to the bit."""
    x, d_y = draw.integers(0, 0, 3, draw.extent(2, 130), 4), draw.integers(1, 100, 3, 4)
    x[:, draw.extent(0, x.shape[1] - 1)] = 400
    last = run(np.ascontiguousarray(np.moveaxis(x, 1, 2)), d_y, axis=2)[0]
    draw.same_bits(run(x, d_y, axis=1)[0], np.moveaxis(last, 2, 1), "another axis")
