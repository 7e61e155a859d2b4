"""Softmax along one axis."""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Tile, spec
from portakern.spec.options import Axis
from portakern.spec.tolerance import KAPPA, round_to, store_spread, units
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
