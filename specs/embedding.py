"""The rows of a table that ids name, as the embedding of tokens takes them, and the gradient of the table.

y[t] = weight[ids[t]]        d_weight[r] = sum of d_y[t] over the tokens t with ids[t] = r

Nothing is computed forward, and nothing rounds. The gradient of a row is the sum over its own tokens in their order:
what other tokens name changes no bit of it.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int

from portakern.spec import Rule, spec
from portakern.spec.dtypes import numpy_dtype
from portakern.spec.options import Range
from portakern.spec.tolerance import KAPPA, format_of, magnitude, units
from portakern.specs._gradients import doubled, stored_bounds, stored_spreads

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


class EmbeddingOut(NamedTuple):
    y: Float[A, "*batch d"]


def _padding_is_a_row(call: Call) -> bool:
    index = call.options["padding_index"]
    return index is None or index < call.dims["rows"]


RULES = (
    Rule(
        _padding_is_a_row,
        "padding_index must be a row of weight, from 0 to rows - 1; one that counts from the end is rows + "
        "padding_index",
    ),
)
Padding = Annotated[int, Range(0, 2**31 - 1, typical=(0, 1, 2))]


def tokens_of(call: Call) -> int:
    return int(prod(call.dims["batch"]))


def named_rows(call: Call, ids: np.ndarray) -> int:
    """How many rows of the table some token names."""
    return len(np.unique(ids[(ids >= 0) & (ids < call.dims["rows"])]))


def bytes_moved(call: Call) -> float:
    """A row is read once however many tokens name it; of ids that are not known, no two are the same."""
    tokens, ids = tokens_of(call), call.integers("ids")
    size, of_id = (numpy_dtype(call.dtype_of(name) or call.dtype).itemsize for name in ("weight", "ids"))
    read = min(tokens, call.dims["rows"]) if ids is None else named_rows(call, ids)
    return float((tokens + read) * call.dims["d"] * size + tokens * of_id)


@spec(
    tiling={},
    require=RULES,
    positive=("rows",),
    codes=("y",),
    apart=("batch", "d"),
    vjp="embedding_vjp",
    budget="flops",
    typical={"rows": 4096, "batch": (2048,), "d": 4096},
    flops=lambda call: float((tokens_of(call) + call.dims["rows"]) * call.dims["d"]),
    bytes_moved=bytes_moved,
)
def embedding(
    weight: Float[A, "rows d"],
    ids: Int[A, "*batch"],
    *,
    padding_index: Padding | None = None,
) -> EmbeddingOut:
    """y[t] = weight[ids[t]], to the bit: a table's rows by their numbers.

    Args:
      weight: (rows, d), the table, of any strides: a head's (d, rows) weights are given as a transposed view.
      ids: (*batch), int32 or int64, the row that each token takes.
      padding_index: a row, from 0 to rows - 1, whose gradient is 0, as of ``torch.nn.functional.embedding``; forward it
        is a row as any other. None: no row.

    Returns:
      y: (*batch, d), with the bits of the rows, NaN and infinities too; a subnormal number is one of them. An id that
      is no row, a negative one too, gives a row of NaN, and nothing is read out of bounds: kernels do not read ids to
      refuse them. PyTorch's function raises an error on a CPU, and on a GPU ends the process; JAX's index gives NaN
      beyond the end, and counts negative ids from it.
    """
    raise NotImplementedError


@embedding.values("ids")
def drawn_ids(rng: np.random.Generator, shape: Any, dims: Any, options: Any) -> np.ndarray:
    """Rows of which some are named often, as in text."""
    rows = dims["rows"]
    often = rng.integers(0, rows, 3)
    return np.where(rng.random(shape) < rng.choice([0.0, 0.5]), rng.choice(often, shape), rng.integers(0, rows, shape))


@embedding.values("ids", measured=True)
def even_ids(rng: np.random.Generator, shape: Any, dims: Any, options: Any) -> np.ndarray:
    return rng.integers(0, dims["rows"], shape)


@embedding.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """0: y is made of rows, and each number is right or wrong."""
    return (np.zeros(ref[0].shape),)


@embedding.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """0: a number is right or wrong, and not measured."""
    return (np.zeros(ref[0].shape),)


# --------------------------------------------------------------------------------------------------------------- edges
def _row(arrays: Any) -> int:
    return len(arrays["weight"])


SEVERAL = {"rows": (2, 40), "batch": (2, 40), "d": (1, 40)}


@embedding.edge(dims=SEVERAL)
def ids_that_are_no_row(arrays, rng, options):
    """Ids below 0 and from rows on give rows of NaN, and add to no row's gradient; others are as they were."""
    rows = _row(arrays)
    outside = rng.choice([-1, -rows, -rows - 1, rows, rows + 7, 2**31 - 1, -(2**31)], arrays["ids"].shape)
    arrays["ids"][...] = np.where(rng.random(arrays["ids"].shape) < 0.5, outside, arrays["ids"])


@embedding.edge(dims=SEVERAL)
def no_id_is_a_row(arrays, rng, options):
    """Nothing but NaN, and a gradient of zeros."""
    arrays["ids"][...] = rng.choice([-1, _row(arrays)])


@embedding.edge(dims=SEVERAL)
def the_first_and_the_last_row(arrays, rng, options):
    """The table's own ends."""
    arrays["ids"][...] = rng.choice([0, _row(arrays) - 1], arrays["ids"].shape)


@embedding.edge(dims=SEVERAL)
def special_numbers(arrays, rng, options):
    """NaN and infinities of a row reach the tokens that name it, and no other; those of a cotangent its row."""
    for name in ("weight", "d_y"):
        if name in arrays:
            array = arrays[name]
            array[rng.random(array.shape) < 0.2] = rng.choice([inf, -inf, np.nan])


@embedding.edge(dims={"rows": (1, 1), "batch": (2, 70), "d": (1, 20)})
def a_table_of_one_row(arrays, rng, options):
    """Every id is 0: of the gradient one row, the sum over all tokens."""
    arrays["ids"][...] = 0


@embedding.edge(dims={"rows": (1, 4), "batch": (1, 9), "d": (1030, 2100)}, smallest_tiles=True)
def long_rows(arrays, rng, options):
    """Rows of several tiles, the last of which is ragged."""


@embedding.edge(dims={"rows": (3, 300), "batch": (0, 0), "d": (1, 9)})
def no_tokens(arrays, rng, options):
    """An empty y, and a gradient of zeros."""


@embedding.edge(dims=SEVERAL, regime="subnormal")
def subnormal_rows(arrays, rng, options):
    """Subnormal numbers of a row are its numbers."""


@embedding.edge(dims=SEVERAL, options={"padding_index": 1})
def tokens_of_padding(arrays, rng, options):
    """Half of the tokens name the padding row: forward a row as any other, whose gradient is 0."""
    arrays["ids"][rng.random(arrays["ids"].shape) < 0.5] = 1


# ---------------------------------------------------------------------------------------------------------------- laws
def _drawn(draw: Any, tokens: tuple[int, int] = (1, 90)) -> tuple[np.ndarray, np.ndarray]:
    """A table and ids, all of which are rows."""
    rows, d, count = draw.extent(1, 40), draw.extent(1, 70), draw.extent(*tokens)
    return draw.normal(rows, d), draw.integers(0, rows - 1, count, dtype="int64")


@embedding.law
def rows_to_the_bit(run, draw):
    """Each row of y is the row of the table that its id names."""
    weight, ids = _drawn(draw)
    draw.same_bits(run(weight, ids), weight[ids], "rows of the table")


@embedding.law
def a_token_alone(run, draw):
    """A token gives alone what it gives among others."""
    weight, ids = _drawn(draw)
    t = draw.extent(0, len(ids) - 1)
    draw.same_bits(run(weight, ids[t : t + 1]), run(weight, ids)[t : t + 1], "a token alone")


@embedding.law
def either_width_of_integers(run, draw):
    """Ids of 32 and of 64 bits give the same bits."""
    weight, ids = _drawn(draw)
    draw.same_bits(run(weight, ids.astype(np.int32)), run(weight, ids), "ids of 32 bits")


embedding.sample("tokens", dims={"rows": 5, "batch": (2, 3), "d": 4})
embedding.sample("padded", dims={"rows": 3, "batch": (7,), "d": 5}, options={"padding_index": 1})


# ------------------------------------------------------------------------------------------------------------ gradient
class EmbeddingVjpOut(NamedTuple):
    d_weight: Float[A, "rows d"]


def bytes_moved_vjp(call: Call) -> float:
    """The cotangents of tokens and their ids are read once, and every row of the gradient is written."""
    tokens = tokens_of(call)
    size, of_id = (numpy_dtype(call.dtype_of(name) or call.dtype).itemsize for name in ("weight", "ids"))
    return float((tokens + call.dims["rows"]) * call.dims["d"] * size + tokens * of_id)


@spec(
    tiling={},
    gradient_dtype=("d_weight",),
    require=RULES,
    positive=("rows",),
    apart=("d",),
    budget="flops",
    flops=lambda call: float((tokens_of(call) + call.dims["rows"]) * call.dims["d"]),
    bytes_moved=bytes_moved_vjp,
)
def embedding_vjp(
    weight: Float[A, "rows d"],
    ids: Int[A, "*batch"],
    d_y: Float[A, "*batch d"],
    *,
    padding_index: Padding | None = None,
) -> EmbeddingVjpOut:
    """d_weight[r] = sum of d_y[t] over the tokens t with ids[t] = r, in float32 (float64 for float64), rounded once.

    The bits of a row depend on the cotangents of its own tokens in their order, and on nothing else: where they stand
    among others, and what those name, changes none.

    Args:
      weight: (rows, d), of which the extents alone are read; ids: (*batch), as in embedding.
      d_y: (*batch, d), the cotangent of y, of any strides.
      padding_index: a row whose gradient is 0, whatever its tokens' cotangents hold; None: no row.

    Returns:
      d_weight: (rows, d). A row that no token names is exact zeros, and so is the padding row. The cotangent of a token
      whose id is no row, a negative one too, reaches nothing.
    """
    raise NotImplementedError


class RowSums:
    """Of each row of the gradient: how many tokens it has, the sums over them of |d_y| and of d_y^2, and whether all
    d_y are integers."""

    def __init__(self, call: Call) -> None:
        rows, d = call.dims["rows"], call.dims["d"]
        ids, d_y = call.arrays["ids"].reshape(-1), call.arrays["d_y"].reshape(-1, d)
        used = (ids >= 0) & (ids < rows)
        if call.options["padding_index"] is not None:
            used &= ids != call.options["padding_index"]
        self.count = np.bincount(ids[used], minlength=rows)[:, None]
        self.size, self.squares, broken = np.zeros((rows, d)), np.zeros((rows, d)), np.zeros((rows, d))
        with np.errstate(over="ignore"):
            np.add.at(self.size, ids[used], magnitude(d_y[used]))
            np.add.at(self.squares, ids[used], magnitude(d_y[used]) ** 2)
            np.add.at(broken, ids[used], d_y[used] != np.rint(d_y[used]))
        self.whole = broken == 0


@embedding_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """E (1 + U) + U |d_weight| + eta, with

        E = chain(c) u sum |d_y| + 2 c tau

    of the c tokens of a row: their sum in some order, c - 1 roundings or fewer on each path (:class:`~portakern.spec.
    tolerance.Units`); a cotangent or a partial sum that is subnormal may be 0. A row without tokens, and the padding
    row, are exact. Nothing is promised where the sum of |d_y| reaches 2^127.
    """
    unit, found = units(call), RowSums(call)
    err = unit.chain(found.count) * unit.u * found.size + 2 * found.count * unit.tau
    err = np.where(found.size < unit.huge, err, inf)
    (bound,) = stored_bounds(call, ref, [err])
    return (np.where(found.count > 0, bound, 0.0),)


@embedding_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """store^2 + (KAPPA u)^2 c (d_weight^2 / 3 + S^2 / 6): partial sums of c terms in order, S^2 the sum of their
    squares, as in :func:`~portakern.spec.tolerance.dot_spread`."""
    unit, found = units(call), RowSums(call)
    with np.errstate(all="ignore"):
        variance = (KAPPA * unit.u) ** 2 * found.count * (magnitude(ref[0]) ** 2 / 3 + found.squares / 6)
        return stored_spreads(call, ref, [variance])


@embedding_vjp.exact
def exact_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rows without tokens, the padding row, rows of one token that nothing flushes, and sums of integers that the
    accumulator holds."""
    unit, found, (d_weight,) = units(call), RowSums(call), ref
    kept = (np.abs(d_weight) >= max(unit.tau, format_of(call.outputs["d_weight"][1]).eta)) | (d_weight == 0)
    whole = found.whole & (found.size < 1 / unit.u)
    return (np.isfinite(d_weight) & (((found.count <= 1) & kept) | whole),)


@embedding_vjp.locate
def locate_row(call: Call, output: str, index: tuple[int, ...]) -> str:
    """How many tokens name the row of an element, and the first of them."""
    tokens = np.flatnonzero(call.arrays["ids"].reshape(-1) == index[0])
    if index[0] == call.options["padding_index"]:
        return "the padding row"
    return f"a row of {len(tokens)} tokens, the first of which is {tokens[0]}" if len(tokens) else "a row of no token"


embedding_vjp.edges.update(
    (plant.__name__, embedding.edges[plant.__name__])
    for plant in (
        ids_that_are_no_row, no_id_is_a_row, the_first_and_the_last_row, special_numbers, a_table_of_one_row, long_rows,
        no_tokens, tokens_of_padding,
    )
)  # fmt: skip

MANY = {"rows": (2, 9), "batch": (300, 900), "d": (1, 3)}


@embedding_vjp.edge(dims=MANY, regime="integers", smallest_tiles=True)
def rows_of_many_tokens(arrays, rng, options):
    """Each row has far more tokens than are summed at once; a token that is dropped, or met twice, shows."""
    arrays["ids"][...] = rng.integers(0, _row(arrays), arrays["ids"].shape)
    arrays["d_y"][...] = rng.integers(1, 4, arrays["d_y"].shape)


@embedding_vjp.edge(dims={**MANY, "rows": (40, 90)}, regime="integers", smallest_tiles=True)
def counts_beside_chunks(arrays, rng, options):
    """Rows of 31, 32, 33, 64 and 65 tokens, and of one, which begin anywhere among the others."""
    ids, rows = arrays["ids"].reshape(-1), _row(arrays)
    counts = np.resize(rng.permutation([31, 32, 33, 64, 65, 1, 0, 2]), rows)
    ids[...] = rng.permutation(np.resize(np.repeat(np.arange(rows), counts), ids.size))
    arrays["d_y"][...] = rng.integers(1, 4, arrays["d_y"].shape)


@embedding_vjp.edge(dims={**MANY, "rows": (400, 900), "d": (1, 2)}, regime="integers", smallest_tiles=True)
def each_token_its_own_row(arrays, rng, options):
    """Rows of one token each, in any order: every cotangent is a row of the gradient, to the bit."""
    arrays["ids"][...] = rng.permutation(max(_row(arrays), arrays["ids"].size))[: arrays["ids"].size].reshape(
        arrays["ids"].shape
    )


@embedding_vjp.edge(dims={**MANY, "batch": (600, 1100), "d": (1, 1)}, smallest_tiles=True)
def one_row_for_all_tokens(arrays, rng, options):
    """As of padding that is not declared: one sum over all tokens, between rows without any."""
    arrays["ids"][...] = rng.integers(_row(arrays))


@embedding_vjp.edge(dims={"rows": (2, 5), "batch": (20, 90), "d": (1, 9)}, regime="wide")
def cotangents_that_cancel(arrays, rng, options):
    """Each cotangent comes again with the other sign: the error is a share of the sum of magnitudes."""
    d_y, ids = arrays["d_y"].reshape(-1, arrays["d_y"].shape[-1]), arrays["ids"].reshape(-1)
    half = len(d_y) // 2
    d_y[half : 2 * half], ids[half : 2 * half] = -d_y[:half], ids[:half]


def _drawn_vjp(draw: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A table of few rows, so that each has tokens, ids, and cotangents."""
    rows, d, count = draw.extent(1, 9), draw.extent(1, 40), draw.extent(1, 300)
    ids = draw.integers(0, rows - 1, count, dtype="int64")
    return draw.normal(rows, d), ids, draw.normal(count, d)


@embedding_vjp.law
def a_row_alone(run, draw):
    """A row has the same bits whatever else there is: its own tokens alone, in their order, give it."""
    weight, ids, d_y = _drawn_vjp(draw)
    row = draw.extent(0, len(weight) - 1)
    own = ids == row
    draw.same_bits(run(weight, ids[own], d_y[own])[0][row], run(weight, ids, d_y)[0][row], "a row alone")


@embedding_vjp.law
def other_ids_moved_about(run, draw):
    """Tokens of other rows, in any other order and with other ids, leave a row's bits as they were."""
    weight, ids, d_y = _drawn_vjp(draw)
    row = draw.extent(0, len(weight) - 1)
    order = np.argsort(draw.rng.random(len(ids)) + 2 * (ids == row), kind="stable")
    own = np.flatnonzero(ids == row)
    order[len(ids) - len(own) :] = own  # the row's tokens last, in their order
    others = ids[order].copy()
    others[: len(ids) - len(own)] = draw.rng.permutation(others[: len(ids) - len(own)])
    draw.same_bits(run(weight, others, d_y[order])[0][row], run(weight, ids, d_y)[0][row], "other tokens elsewhere")


@embedding_vjp.law
def rows_in_another_order(run, draw):
    """Rows that change places take their gradients with them, to the bit."""
    weight, ids, d_y = _drawn_vjp(draw)
    order = draw.rng.permutation(len(weight))
    draw.same_bits(run(weight, order[ids], d_y)[0][order], run(weight, ids, d_y)[0], "rows in another order")


@embedding_vjp.law
def either_width_of_integers_vjp(run, draw):
    """Ids of 32 and of 64 bits give the same bits."""
    weight, ids, d_y = _drawn_vjp(draw)
    draw.same_bits(run(weight, ids.astype(np.int32), d_y)[0], run(weight, ids, d_y)[0], "ids of 32 bits")


@embedding_vjp.law
def padding_changes_no_other_row(run, draw):
    """With a padding row the others keep their bits, and its own are zeros."""
    weight, ids, d_y = _drawn_vjp(draw)
    row = draw.extent(0, len(weight) - 1)
    wanted = run(weight, ids, d_y)[0].copy()
    wanted[row] = 0
    draw.same_bits(run(weight, ids, d_y, padding_index=row)[0], wanted, "beside a padding row")


@embedding_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles the gradient, to the bit."""
    weight, ids, d_y = _drawn_vjp(draw)
    doubled(lambda d_y: run(weight, ids, d_y), draw, ("d_weight",), d_y)
