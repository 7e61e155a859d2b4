"""The rows of tokens sorted by their experts, as a mixture of experts hands them to products of groups; and the
gradient.

y[positions[t, j]] = x[t], where positions sorts the pairs (t, j) by indices[t, j], equal ones as they stand
d_x[t] = sum_j d_y[positions[t, j]]

Forward nothing is computed, and nothing rounds. What ``unpermute`` does with weights of 1 is the gradient.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int, Int32

from portakern.spec import Rule, spec
from portakern.spec.dtypes import numpy_dtype
from portakern.spec.options import Extent
from portakern.spec.tolerance import units
from portakern.specs._gradients import doubled, stored_bounds, stored_spreads
from portakern.specs.unpermute import NO_ROW_TWICE, Terms, drawn_positions

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class PermuteOut(NamedTuple):
    y: Float[A, "tokens*k d"]
    positions: Int32[A, "tokens k"]
    group_ends: Int32[A, "experts"]


def bytes_moved(call: Call) -> float:
    """The rows of tokens are read once, and written once for each of their experts; integers."""
    dims, size = call.dims, numpy_dtype(call.dtype).itemsize
    pairs = dims["tokens"] * dims["k"]
    index = numpy_dtype(call.dtype_of("indices") or "int32").itemsize
    return float((dims["tokens"] + pairs) * dims["d"] * size + pairs * (4 + index) + 4 * dims["experts"])


@spec(
    tiling={},
    codes=("y",),
    positive=("k", "d"),
    empty={"tokens": {"group_ends": 0.0}},
    vjp="permute_vjp",
    budget="flops",
    typical={"tokens": 4096, "k": 2, "d": 1024, "experts": 64},
    flops=lambda call: float(call.dims["tokens"] * call.dims["k"] * call.dims["d"] + call.dims["experts"]),
    bytes_moved=bytes_moved,
)
def permute(
    x: Float[A, "tokens d"], indices: Int[A, "tokens k"], *, experts: Annotated[int, Extent()] = 1
) -> PermuteOut:
    """The row of each token once for each of its experts, those of an expert beside each other.

    Rows of an expert stand in the order of their tokens, and two of one token in that of indices. So one result is
    right: the sort is stable.

    Args:
      x: (tokens, d), of any strides.
      indices: (tokens, k), int32 or int64, the experts of each token, as ``top_k`` of a router's logits gives them. A
        number that is no expert, such as -1 or one of an expert on another device, sends the token nowhere.
      experts: how many experts there are, from 0 to experts - 1.

    Returns:
      y: (tokens * k, d), with the bits of the rows of x. Behind the last expert's rows, as many as were sent nowhere,
      are zeros.
      positions: (tokens, k), int32: y[positions[t, j]] is x[t] for the expert indices[t, j]; -1 for one that is none.
      ``unpermute`` reads it.
      group_ends: (experts,), int32, before which row of y each expert's end: what ``grouped_matmul`` takes.
    """
    raise NotImplementedError


@permute.values("indices")
def drawn_experts(rng: np.random.Generator, shape: Any, dims: Any, options: Any) -> np.ndarray:
    """Experts of which some are chosen often; in half of the calls, and beside one expert, some indices are none."""
    experts = dims["experts"]
    often = rng.integers(0, experts, 2)
    found = np.where(
        rng.random(shape) < rng.choice([0.0, 0.5]), rng.choice(often, shape), rng.integers(0, experts, shape)
    )
    strange = rng.choice([-1, experts, experts + 9], shape)
    return np.where(rng.random(shape) < (rng.choice([0.0, 0.3]) if experts > 1 else 0.3), strange, found)


@permute.values("indices", measured=True)
def even_experts(rng: np.random.Generator, shape: Any, dims: Any, options: Any) -> np.ndarray:
    return rng.integers(0, dims["experts"], shape)


@permute.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """0: y is made of rows, and the order has no ties."""
    return tuple(np.zeros(y.shape) for y in ref)


@permute.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """0: a result is right or wrong, and not measured."""
    return tuple(np.zeros(y.shape) for y in ref)


# --------------------------------------------------------------------------------------------------------------- edges
SEVERAL = {"tokens": (2, 40), "k": (1, 5), "d": (1, 40), "experts": (1, 12)}


@permute.edge(dims=SEVERAL)
def indices_that_are_no_expert(arrays, rng, options):
    """They send a token nowhere, however far from an expert they are."""
    indices, experts = arrays["indices"], options["experts"]
    outside = rng.choice([-1, -experts, -experts - 1, experts, experts + 7, 2**31 - 1, -(2**31)], indices.shape)
    indices[...] = np.where(rng.random(indices.shape) < 0.6, outside, indices)


@permute.edge(dims=SEVERAL)
def tokens_of_no_expert(arrays, rng, options):
    """Nothing but zeros, positions of -1, and groups without rows."""
    arrays["indices"][...] = rng.choice([-1, options["experts"]])


@permute.edge(dims=SEVERAL)
def tokens_of_one_expert(arrays, rng, options):
    """All rows are one group's, in the order of tokens."""
    arrays["indices"][...] = options["experts"] - 1


@permute.edge(dims={**SEVERAL, "experts": (200, 600)})
def more_experts_than_rows(arrays, rng, options):
    """Most groups are empty."""


@permute.edge(dims=SEVERAL)
def special_numbers(arrays, rng, options):
    """NaN, infinities and -0 of a token are in its rows, to the bit, and in no other."""
    x = arrays["x"]
    x[rng.random(x.shape) < 0.3] = rng.choice([inf, -inf, np.nan, -0.0])


@permute.edge(dims=SEVERAL, regime="subnormal")
def subnormal_rows(arrays, rng, options):
    """Subnormal numbers of a row are its numbers."""


@permute.edge(dims={"tokens": (1, 4), "k": (1, 3), "d": (1030, 2100), "experts": (1, 3)}, smallest_tiles=True)
def long_rows(arrays, rng, options):
    """Rows of several tiles, the last of which is ragged."""


@permute.edge(dims={"tokens": (200, 500), "k": (2, 3), "d": (1, 2), "experts": (2, 9)}, smallest_tiles=True)
def more_tokens_than_are_sorted_at_once(arrays, rng, options):
    """Runs that are sorted alone become one, in which equal ones stand as they came."""


# ---------------------------------------------------------------------------------------------------------------- laws
def drawn(draw: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows, and indices some of which are no expert."""
    tokens, k, d, experts = draw.extent(1, 60), draw.extent(1, 5), draw.extent(1, 40), draw.extent(1, 12)
    return draw.normal(tokens, d), draw.integers(-1, experts, tokens, k, dtype="int64"), experts


@permute.law
def rows_where_positions_say(run, draw):
    """y at the positions is x, to the bit, and positions rise with the experts, and with the tokens of one."""
    x, indices, experts = drawn(draw)
    y, positions, ends = run(x, indices, experts=experts)
    used = (indices >= 0) & (indices < experts)
    draw.same_bits(y[positions[used]], x[np.nonzero(used)[0]], "rows of tokens")
    draw.same_bits(y[ends[-1] :], 0 * y[ends[-1] :], "rows behind the last expert's")
    order = np.argsort(indices[used], kind="stable")
    draw.same_bits(positions[used][order], np.arange(used.sum(), dtype=np.int32), "positions by expert")


@permute.law
def ends_are_sums_of_counts(run, draw):
    """Group ends are how many rows there are up to each expert."""
    x, indices, experts = drawn(draw)
    counts = np.bincount(indices[(indices >= 0) & (indices < experts)], minlength=experts)
    draw.same_bits(run(x, indices, experts=experts)[2], np.cumsum(counts).astype(np.int32), "group ends")


@permute.law
def either_width_of_integers(run, draw):
    """Indices of 32 and of 64 bits give the same bits."""
    x, indices, experts = drawn(draw)
    for narrow, wide in zip(
        run(x, indices.astype(np.int32), experts=experts), run(x, indices, experts=experts), strict=True
    ):
        draw.same_bits(narrow, wide, "indices of 32 bits")


permute.sample("experts", dims={"tokens": 5, "k": 2, "d": 4, "experts": 3})
permute.sample("one_expert_each", dims={"tokens": 7, "k": 1, "d": 3, "experts": 4})


# ------------------------------------------------------------------------------------------------------------ gradient
class PermuteVjpOut(NamedTuple):
    d_x: Float[A, "tokens d"]


IN_Y = Rule(
    lambda call: bool((call.arrays["positions"] < call.dims["tokens"] * call.dims["k"]).all()),
    "positions must be rows of d_y, from 0 to tokens * k - 1, or negative",
    values=True,
)


@spec(
    tiling={},
    require=(NO_ROW_TWICE, IN_Y),
    positive=("k", "d"),
    budget="flops",
    typical={"tokens": 2048, "k": 2, "d": 1024, "experts": 64},
    flops=lambda call: float(call.dims["tokens"] * call.dims["k"] * call.dims["d"]),
)
def permute_vjp(
    d_y: Float[A, "tokens*k d"],
    positions: Int32[A, "tokens k"],
    group_ends: Int32[A, "experts"],
    *,
    experts: Annotated[int, Extent()] = 1,
) -> PermuteVjpOut:
    """d_x[t] = sum of d_y[positions[t, j]] over j, in float32 (float64 for float64), rounded once.

    Args:
      d_y: (tokens * k, d), the cotangent of y, of any strides.
      positions: (tokens, k), int32, what permute gave; group_ends: (experts,), for its extent alone.
      experts: how many experts permute was given.

    Returns:
      d_x: (tokens, d), the shape and dtype of permute's x. A token's terms are added in the order of j, whatever other
      tokens have. A position that is no row, a negative one too, adds nothing; a token without a row is zeros.
    """
    raise NotImplementedError


permute_vjp.values("positions")(drawn_positions)


def terms_of(call: Call) -> Terms:
    """Those of unpermute, with weights of 1."""
    positions = call.arrays["positions"]
    return Terms.of(call.arrays["d_y"], positions, np.ones(positions.shape), units(call))


@permute_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """unpermute's, with weights of 1."""
    found = terms_of(call)
    (stored,) = stored_bounds(call, ref, [found.error(units(call))])
    return (np.where(found.number > 0, stored, 0.0),)


@permute_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """unpermute's, with weights of 1, whose products do not round."""
    found = terms_of(call)
    return stored_spreads(call, ref, [found.variance(ref[0], units(call))])


@permute_vjp.exact
def exact_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tokens without rows, and sums of integers."""
    return (terms_of(call).forced(ref[0], units(call), call.dtype),)


ROWS = {"tokens": (2, 40), "k": (1, 6), "d": (1, 40), "experts": (1, 12)}


@permute_vjp.edge(dims=ROWS)
def tokens_without_rows(arrays, rng, options):
    """A token of no expert is zeros; what cotangents hold behind the last expert's rows reaches nothing."""
    indices, d_y = arrays["indices"], arrays["d_y"]
    indices[...] = rng.integers(0, options["experts"], indices.shape)
    indices[rng.random(len(indices)) < 0.5] = rng.choice([-1, options["experts"]])
    d_y[((indices >= 0) & (indices < options["experts"])).sum() :] = rng.choice([np.nan, inf])


@permute_vjp.edge(dims=ROWS)
def special_cotangents(arrays, rng, options):
    """NaN and infinities reach their own token."""
    d_y = arrays["d_y"]
    d_y[rng.random(d_y.shape) < 0.2] = rng.choice([inf, -inf, np.nan])


@permute_vjp.edge(dims={"tokens": (1, 4), "k": (1, 3), "d": (1030, 2100)}, smallest_tiles=True)
def long_rows_vjp(arrays, rng, options):
    """Rows of several tiles, the last of which is ragged."""


@permute_vjp.edge(dims={"tokens": (1, 9), "k": (20, 40), "d": (1, 9)}, regime="integers")
def many_terms(arrays, rng, options):
    """Integers, whose sums are exact: a term that is left out, or met twice, shows."""
    arrays["d_y"][...] = rng.integers(1, 4, arrays["d_y"].shape)


def _drawn_vjp(draw: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, k, d = draw.extent(1, 30), draw.extent(1, 6), draw.extent(1, 70)
    positions = draw.rng.permutation(tokens * k).reshape(tokens, k).astype(np.int32)
    return positions, np.full(1, tokens * k, np.int32), draw.normal(tokens * k, d)


@permute_vjp.law
def a_token_alone(run, draw):
    """A token gives alone, of its own rows alone, what it gives among others."""
    positions, ends, d_y = _drawn_vjp(draw)
    t = draw.extent(0, len(positions) - 1)
    own = np.arange(positions.shape[1], dtype=np.int32)[None]
    among = run(d_y, positions, ends)[0][t : t + 1]
    draw.same_bits(run(d_y[positions[t]], own, ends)[0], among, "a token alone")


@permute_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles the gradient, to the bit."""
    positions, ends, d_y = _drawn_vjp(draw)
    doubled(lambda d_y: run(d_y, positions, ends), draw, ("d_x",), d_y)
