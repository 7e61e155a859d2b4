"""The k greatest or least numbers of each row, in order, and where they stand; and the gradient.

    values[t] = x[indices[t]], where indices sorts x by size and, of equal numbers, by place
    d_x[indices[t]] = d_values[t], and 0 elsewhere

Nothing is computed, and nothing rounds: one order is right, and one result.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int32

from portakern.spec import Rule, Tile, spec
from portakern.spec.options import Extent

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class TopKOut(NamedTuple):
    values: Float[A, "*batch k"]
    indices: Int32[A, "*batch k"]


ENOUGH = Rule(
    lambda call: call.dims["k"] <= call.dims["n"],
    "k must be no more than the numbers of a row, the extent of the last axis of x",
    mends=lambda dims: {"k": max(min(dims["k"], dims["n"]), 1)},
)


def comparisons(call: Call) -> float:
    """Each number is compared with the least of those that are kept, at least once."""
    return float(prod(call.dims["batch"]) * call.dims["n"])


@spec(
    tiling={"block_rows": Tile(1, 1024)},
    require=(ENOUGH,),
    positive=("n",),
    apart=("batch",),
    vjp="top_k_vjp",
    typical={"batch": (4096,), "n": 256, "k": 8},
    flops=comparisons,
)
def top_k(x: Float[A, "*batch n"], *, k: Annotated[int, Extent()] = 1, largest: bool = True) -> TopKOut:
    """The k greatest numbers along the last axis, the greatest first, and their places.

    Of equal numbers the one with the lower index comes first; 0 and -0 are equal. A NaN is greater than any other
    number and equal to every NaN, as in NumPy's and PyTorch's sorts. So one result is right. JAX's top_k differs: -0 is
    less than 0 there, and a NaN with its sign set less than -inf.

    Args:
      x: (*batch, n), any strides.
      k: how many, from 1 to n.
      largest: False gives the k least numbers, the least first; NaN then comes last. Equal numbers stand by their
        index here too.

    Returns:
      values: (*batch, k), numbers of x, to the bit: a subnormal number stays one, and -0 stays -0.
      indices: (*batch, k), int32, where each stands along the last axis: no two of a row are the same.
    """
    raise NotImplementedError


@top_k.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """0: numbers are compared and copied. Keys of comparisons are exact, and the order has no ties."""
    return tuple(np.zeros(y.shape) for y in ref)


@top_k.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """0: a result is right or wrong, and not measured."""
    return tuple(np.zeros(y.shape) for y in ref)


# --------------------------------------------------------------------------------------------------------------- edges
SMALL = {"batch": (1, 6), "n": (2, 70), "k": (1, 9)}


def shuffled(rng: Any, x: np.ndarray, numbers: Any) -> None:
    """Fill x with some of these numbers."""
    x[...] = rng.choice(numbers, x.shape)


@top_k.edge(dims=SMALL)
def ties(arrays, rng, options):
    """Of equal numbers the first come first, and where k cuts through them the others are left out."""
    shuffled(rng, arrays["x"], [1.0, 2.0, 3.0])


@top_k.edge(dims={"batch": (1, 3), "n": (100, 300), "k": (1, 40)}, smallest_tiles=True)
def ties_in_several_tiles(arrays, rng, options):
    """Equal numbers of a later tile do not drive out those of an earlier one."""
    shuffled(rng, arrays["x"], [1.0, 2.0])


@top_k.edge(dims=SMALL)
def both_zeros(arrays, rng, options):
    """-0 and 0 are equal, and each keeps its sign."""
    shuffled(rng, arrays["x"], [0.0, -0.0, -1.0])


@top_k.edge(dims=SMALL)
def nan_and_infinities(arrays, rng, options):
    """NaN is the greatest number, beyond inf, whatever its sign and bits; two NaN are equal."""
    shuffled(rng, arrays["x"], [np.nan, -np.nan, inf, -inf, 1.0])


@top_k.edge(dims=SMALL)
def rows_of_nan(arrays, rng, options):
    """The first k places."""
    arrays["x"][...] = np.nan


@top_k.edge(dims={"batch": (1, 4), "n": (3, 70), "k": (3, 40)})
def rows_of_the_least_numbers(arrays, rng, options):
    """Nothing but -inf, or inf, beside which nothing that pads a row may be chosen."""
    arrays["x"][...] = -inf if options["largest"] else np.nan


@top_k.edge(dims=SMALL, regime="subnormal")
def subnormal_numbers(arrays, rng, options):
    """They differ from each other and from 0."""


@top_k.edge(dims={"batch": (1, 4), "n": (1, 40), "k": (1, 40)})
def every_number_of_a_row(arrays, rng, options):
    """k = n: the row is sorted, and all of it comes back."""


@top_k.edge(dims={"batch": (1, 3), "n": (130, 600), "k": (1, 5)}, smallest_tiles=True)
def the_last_number_is_the_first(arrays, rng, options):
    """The last of a ragged row wins."""
    arrays["x"][..., -1] = 100 if options["largest"] else -100


@top_k.edge(dims={"batch": (1, 3), "n": (130, 600), "k": (1, 40)}, smallest_tiles=True)
def rising_and_falling_rows(arrays, rng, options):
    """Each tile has better numbers than all before, or none."""
    x = arrays["x"]
    x[...] = np.arange(x.shape[-1]) * rng.choice([0.25, -0.25])


@top_k.edge(dims={"batch": (1, 2), "n": (70, 300), "k": (33, 70)})
def many_of_a_row(arrays, rng, options):
    """k is larger than a small tile."""


# ---------------------------------------------------------------------------------------------------------------- laws
@top_k.law
def rows_are_independent(run, draw):
    """A row alone gives the same results as among others."""
    rows, n = draw.extent(2, 20), draw.extent(1, 200)
    x, k = draw.normal(rows, n), draw.extent(1, n)
    first = draw.extent(0, rows - 1)
    for alone, among in zip(run(x[first : first + 1], k=k), run(x, k=k), strict=True):
        draw.same_bits(alone, among[first : first + 1], "a row alone")


@top_k.law
def values_are_the_numbers_at_the_indices(run, draw):
    """To the bit, the sign of a zero too."""
    n = draw.extent(1, 200)
    x = draw.integers(-1, 1, draw.extent(1, 9), n)
    x *= np.where(draw.integers(0, 1, *x.shape) > 0, x.dtype.type(-1), x.dtype.type(1))
    values, indices = run(x, k=draw.extent(1, n))
    draw.same_bits(values, np.take_along_axis(x, indices, -1), "the numbers at the indices")


@top_k.law
def fewer_are_the_first_of_more(run, draw):
    """The first j of k are what k = j gives."""
    n = draw.extent(1, 200)
    x, k = draw.integers(-3, 3, draw.extent(1, 9), n), draw.extent(1, n)
    j = draw.extent(1, k)
    for few, many in zip(run(x, k=j), run(x, k=k), strict=True):
        draw.same_bits(few, many[:, :j], "the first of more")


@top_k.law
def the_least_are_the_greatest_of_the_negative(run, draw):
    """Signs turned, least and greatest change places, and indices stay."""
    n = draw.extent(1, 200)
    x, k = draw.integers(-3, 3, draw.extent(1, 9), n), draw.extent(1, n)
    draw.same_bits(run(x, k=k, largest=False)[1], run(-x, k=k)[1], "places of the least")


top_k.sample("experts", dims={"batch": (5,), "n": 16, "k": 3})
top_k.sample("least", dims={"batch": (2, 3), "n": 7, "k": 7}, options={"largest": False})
top_k.sample("one_row", dims={"batch": (), "n": 40, "k": 2})


# ------------------------------------------------------------------------------------------------------------ gradient
class TopKVjpOut(NamedTuple):
    d_x: Float[A, "*batch n"]


@spec(
    tiling={"block_rows": Tile(1, 1024)},
    require=(ENOUGH,),
    positive=("n",),
    apart=("batch",),
    flops=comparisons,
)
def top_k_vjp(
    x: Float[A, "*batch n"],
    indices: Int32[A, "*batch k"],
    d_values: Float[A, "*batch k"],
    *,
    k: Annotated[int, Extent()] = 1,
) -> TopKVjpOut:
    """d_x[indices[t]] = d_values[t], and 0 elsewhere: numbers that were not chosen have no influence.

    Args:
      x: (*batch, n), what top_k was given, for its shape alone: no number of it is read.
      indices: (*batch, k), int32, what top_k gave: from 0 to n - 1, no two of a row the same.
      d_values: (*batch, k), the cotangent of the values.
      k: how many numbers top_k chose.

    Returns:
      d_x: the shape and dtype of x. Its numbers are those of d_values, to the bit, NaN and infinities too, or 0.
    """
    raise NotImplementedError


@top_k_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """0: numbers are copied."""
    return (np.zeros(ref[0].shape),)


@top_k_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """0: a number is right or wrong, and not measured."""
    return (np.zeros(ref[0].shape),)


@top_k_vjp.edge(dims=SMALL)
def special_cotangents(arrays, rng, options):
    """NaN and infinities reach their own place alone, also where they meet a 0."""
    g = arrays["d_values"]
    g[rng.random(g.shape) < 0.4] = rng.choice([np.nan, inf, -inf])


@top_k_vjp.edge(dims=SMALL)
def special_numbers_of_x(arrays, rng, options):
    """x is not read: its NaN reach nothing."""
    arrays["x"][...] = np.nan


@top_k_vjp.edge(dims={"batch": (1, 4), "n": (1, 40), "k": (1, 40)})
def every_number_of_a_row_vjp(arrays, rng, options):
    """Every number has a gradient."""


@top_k_vjp.edge(dims={"batch": (1, 3), "n": (130, 600), "k": (1, 40)}, smallest_tiles=True)
def rows_of_several_tiles(arrays, rng, options):
    """A cotangent goes to the tile of its number, and others of the tile are 0."""


@top_k_vjp.law
def rows_are_independent_vjp(run, draw):
    """A row alone gives the same bits as among others."""
    rows, n = draw.extent(2, 20), draw.extent(1, 200)
    x, k, first = draw.normal(rows, n), draw.extent(1, n), draw.extent(0, rows - 1)
    indices = np.stack([np.random.default_rng(row).permutation(n)[:k] for row in range(rows)]).astype(np.int32)
    d_values, row = draw.normal(rows, k), slice(first, first + 1)
    alone = run(x[row], indices[row], d_values[row], k=k)[0]
    draw.same_bits(alone, run(x, indices, d_values, k=k)[0][row], "a row alone")


@top_k_vjp.law
def what_is_gathered_from_it_is_the_cotangent(run, draw):
    """d_x at the indices is d_values."""
    n = draw.extent(1, 200)
    x, k = draw.normal(draw.extent(1, 9), n), draw.extent(1, n)
    indices = np.argsort(-x.astype(np.float64), -1)[:, :k].astype(np.int32)
    d_values = draw.normal(x.shape[0], k)
    found = run(x, indices, d_values, k=k)[0]
    draw.same_bits(np.take_along_axis(found, indices, -1), d_values, "the gradient at the indices")
