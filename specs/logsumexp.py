"""Logarithm of a sum of exponentials along one axis."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.options import Axis
from portakern.spec.tolerance import KAPPA, magnitude, round_to, store_spread, units
from portakern.specs._rows import plant

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


class Weights(NamedTuple):
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
    def of(cls, x: np.ndarray, axis: int) -> Weights:
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
    w = Weights.of(call.arrays["x"], axis)
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
    w = Weights.of(call.arrays["x"], axis)
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
