"""Matrix products of groups of rows, each with a matrix of its own, as the experts of a mixture have them; and its
gradients.

c = a b_g, d_a = d_c b_g^T and d_b_g = a^T d_c, where g is the group of a row, and a sum over rows is over those of g.
Each group is a call of ``matmul`` by itself: its bounds and typical errors are those of that call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int

from portakern.spec import Rule, Tile, spec
from portakern.spec.dtypes import numpy_dtype
from portakern.spec.options import DType
from portakern.specs._gradients import doubled, each_alone
from portakern.specs.matmul import matmul, product_dtype
from portakern.specs.varlen_attention import drawn_lengths

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")

TILING = {"block_m": Tile(16, 2048, of="rows"), "block_n": Tile(16, 2048, of="n"), "block_k": Tile(16, 4096, of="k")}


# ---------------------------------------------------------------------------------------------------------- the groups
def _rise(call: Call) -> bool:
    ends = call.arrays["group_ends"]
    return ends.size == 0 or bool(ends[0] >= 0 and ends[-1] <= call.dims["rows"] and (np.diff(ends) >= 0).all())


ENDS_RISE = Rule(
    _rise,
    "group_ends are the rows before which groups end: numbers from 0 to rows, none smaller than the one before; pass "
    "the cumulative sums of the groups' sizes",
    values=True,
)


def groups_of(call: Call) -> Iterator[tuple[int, slice]]:
    """(its number, its rows) of each group of a call in NumPy that has any."""
    ends = [0, *(int(end) for end in call.arrays["group_ends"])]
    for g, (start, end) in enumerate(itertools.pairwise(ends)):
        if start < end:
            yield g, slice(start, end)


def sizes_of(call: Call) -> list[int]:
    """How many rows each group has; where that is not known, as many as there are, of one group after the other."""
    ends = call.integers("group_ends")
    if ends is not None:
        return [int(size) for size in np.diff(ends, prepend=0)]
    rows, groups = call.dims["rows"], call.dims["groups"]
    return [rows // groups + (g < rows % groups) for g in range(groups)] if groups else []


def work(call: Call) -> float:
    """Floating-point operations of one product of all groups."""
    return 2.0 * sum(sizes_of(call)) * call.dims["n"] * call.dims["k"]


def _size(call: Call, name: str) -> int:
    return numpy_dtype(call.outputs[name][1] if name in call.outputs else call.dtype_of(name) or call.dtype).itemsize


def bytes_moved(call: Call) -> float:
    """The rows of groups, the matrices of groups that have rows, the results and the ends."""
    dims, sizes = call.dims, sizes_of(call)
    matrices = sum(size > 0 for size in sizes) * dims["k"] * dims["n"] * _size(call, "b")
    operands = sum(sizes) * dims["k"] * _size(call, "a") + matrices
    return operands + dims["rows"] * dims["n"] * _size(call, "c") + dims["groups"] * _size(call, "group_ends")


# --------------------------------------------------------------------------------------------------------------- spec
class GroupedMatmulOut(NamedTuple):
    c: Float[A, "rows n"]


@spec(
    tiling=TILING,
    result_dtype={"c": "out_dtype"},
    require=[ENDS_RISE],
    empty={"k": {"c": 0.0}, "groups": {"c": 0.0}},
    apart=("n",),
    vjp="grouped_matmul_vjp",
    autocast="lower",
    budget="flops",
    typical={"rows": 4096, "groups": 8, "k": 2048, "n": 2048},
    flops=work,
    bytes_moved=bytes_moved,
)
def grouped_matmul(
    a: Float[A, "rows k"],
    b: Float[A, "groups k n"],
    group_ends: Int[A, "groups"],
    *,
    precision: Literal["ieee", "tf32"] = "ieee",
    out_dtype: Annotated[Any, DType()] | None = None,
) -> GroupedMatmulOut:
    """c = a b_g for the rows of each group g, accumulated in float32 (float64 for float64) and rounded once.

    Group g has the rows from group_ends[g - 1], of the first group from 0, up to group_ends[g]. A row's result is that
    of ``matmul`` on it and its group's matrix, and its bits depend on nothing else.

    Groups are given by where they end, as ``offs`` of torch's ``grouped_mm`` gives them, and not by their sizes, as in
    ``jax.lax.ragged_dot``: a program finds the group of a row by ends as they are, while sizes would have to be summed
    on the device before. The ends of sizes are ``cumsum(sizes)``.

    Args:
      a: (rows, k), the rows of a group beside each other, group after group.
      b: (groups, k, n), a matrix for each group, of any strides: weights that lie as (groups, n, k) are given as a
        transposed view.
      group_ends: (groups,), which rise and may repeat (a group without rows), within 0 and rows. Others are the
        caller's mistake: no result is promised, and nothing is read or written out of bounds.
      precision: of products of float32, as in matmul.
      out_dtype: dtype of c; None: that of a and b.

    Returns:
      c: (rows, n). Rows from the last end on belong to no group: zeros, whatever a holds there. NaN and infinities stay
      in their row of a, and in their group's rows of b. k = 0 gives zeros.
    """
    raise NotImplementedError


grouped_matmul.sample("three_groups", dims={"rows": 7, "groups": 3, "k": 5, "n": 4})
grouped_matmul.sample("float32_result", dims={"rows": 7, "groups": 2, "k": 5, "n": 4}, options={"out_dtype": "float32"})


def as_product(call: Call, a: np.ndarray, b: np.ndarray, stored: str, dtype: str | None = None) -> Call:
    """The call of matmul that multiplies a (m, k) and b (k, n), with products in ``dtype`` (None: the call's), and
    stores the result as ``stored``. Like all calls here, it is of float64 arrays."""
    return call.replace(
        spec=matmul,
        arrays={"a": a, "b": b},
        options={"precision": call.options["precision"], "out_dtype": stored},
        dims={"batch": (), "m": a.shape[0], "n": b.shape[1], "k": a.shape[1]},
        dtype=dtype or call.dtype,
        wants=("c",),
        given=None,
    )


def products_of(call: Call, name: str) -> Iterator[tuple[Any, Call]]:
    """(where it lies, the call of matmul that gives it) for each group's part of an output."""
    a, b, d_c = (call.arrays.get(n) for n in ("a", "b", "d_c"))
    stored = call.outputs[name][1]
    for g, rows in groups_of(call):
        if name == "c":
            yield rows, as_product(call, a[rows], b[g], stored)  # type: ignore[index]
        elif name == "d_a":
            yield rows, as_product(call, d_c[rows], b[g].T, stored, product_dtype(call))  # type: ignore[index]
        else:
            yield g, as_product(call, a[rows].T, d_c[rows], stored, product_dtype(call))  # type: ignore[index]


Products = Callable[["Call", str], Iterator[tuple[Any, "Call"]]]


def each_group(
    call: Call, ref: Sequence[Any], measure: str, otherwise: Any, products: Products = products_of
) -> tuple[Any, ...]:
    """What ``measure`` of the product's own spec says of each group's part of each wanted output; ``otherwise``: of
    what is no group's product."""
    found: list[Any] = []
    for o, exact_value in zip(call.spec.outputs, ref, strict=True):
        whole = None if exact_value is None else np.full(exact_value.shape, otherwise)
        if whole is not None:
            for at, product in products(call, o.name):
                (whole[at],) = getattr(product.spec, measure)(product, (exact_value[at],))
        found.append(whole)
    return tuple(found)


@grouped_matmul.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """matmul's of each group, with K = k; rows of no group are exact zeros."""
    return each_group(call, ref, "bound", 0.0)


@grouped_matmul.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """matmul's of each group; nothing is said of rows of no group, which are exact."""
    return each_group(call, ref, "spread", inf)


@grouped_matmul.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Integers whose sums the accumulator holds, as in matmul, and rows of no group."""
    return each_group(call, ref, "forced", True)


@grouped_matmul.locate
def locate_group(call: Call, output: str, index: tuple[int, ...]) -> str:
    """The group of an element, and how many rows it has."""
    for g, rows in groups_of(call):
        if g == index[0] if output == "d_b" else rows.start <= index[0] < rows.stop:
            where = "" if output == "d_b" else f"row {index[0] - rows.start} of "
            return f"{where}group {g}, which has the rows {rows.start} to {rows.stop - 1}"
    return "a group without rows" if output == "d_b" else "a row of no group"


# ------------------------------------------------------------------------------------------------------------- values
@grouped_matmul.values("group_ends")
def drawn_ends(rng: np.random.Generator, shape: Any, dims: Any, options: Any) -> np.ndarray:
    """Groups of any sizes, of which some may be empty; in every third call some rows at the end belong to none."""
    if not shape[0]:
        return np.zeros(0, np.int64)
    rows = dims["rows"] if rng.random() < 2 / 3 else int(rng.integers(0, dims["rows"] + 1))
    return np.cumsum(drawn_lengths(rng, rows, shape[0]))


@grouped_matmul.values("group_ends", measured=True)
def equal_ends(rng: np.random.Generator, shape: Any, dims: Any, options: Any) -> np.ndarray:
    return np.round(np.linspace(0, dims["rows"], shape[0] + 1)).astype(np.int64)[1:]


# ------------------------------------------------------------------------------------------------------------ corners
SEVERAL = {"rows": (20, 60), "groups": (2, 6), "k": (1, 40), "n": (1, 40)}


@grouped_matmul.edge(dims=SEVERAL)
def rows_of_no_group(arrays, rng, options):
    """Rows from the last end on are zeros: NaN and inf there reach nothing."""
    ends, a = arrays["group_ends"], arrays["a"]
    ends[...] = np.minimum(ends, len(a) - rng.integers(1, len(a)))
    for name in ("a", "d_c"):
        if name in arrays:
            arrays[name][int(ends[-1]) :] = rng.choice([np.nan, inf])


@grouped_matmul.edge(dims=SEVERAL)
def no_group_has_a_row(arrays, rng, options):
    """All ends are 0: zeros."""
    arrays["group_ends"][...] = 0


@grouped_matmul.edge(dims={**SEVERAL, "groups": (3, 9)}, regime="integers")
def all_rows_in_one_group(arrays, rng, options):
    """Every other group is empty, before it or behind it."""
    ends = arrays["group_ends"]
    ends[...] = len(arrays["a"])
    ends[: rng.integers(len(ends))] = 0


@grouped_matmul.edge(dims=SEVERAL)
def nan_in_another_group(arrays, rng, options):
    """NaN in the rows and the matrix of one group stays in what is that group's."""
    b, ends = arrays["b"], arrays["group_ends"]
    g = int(rng.integers(len(b)))
    b[g, rng.integers(b.shape[1])] = rng.choice([np.nan, inf])
    rows = slice(int(ends[g - 1]) if g else 0, int(ends[g]))
    arrays["a"][rows] = np.nan
    if "d_c" in arrays:
        arrays["d_c"][rows] = np.nan


@grouped_matmul.edge(dims=SEVERAL)
def zero_times_inf(arrays, rng, options):
    """0 * inf is NaN: no product is left out."""
    j = rng.integers(arrays["a"].shape[1])
    arrays["a"][:, j], arrays["b"][:, j] = 0, inf


@grouped_matmul.edge(dims={"rows": (40, 80), "groups": (40, 80), "k": (1, 20), "n": (1, 20)}, smallest_tiles=True)
def groups_of_one_row(arrays, rng, options):
    """As many groups as rows: far more than tiles of rows."""
    arrays["group_ends"][...] = np.minimum(np.arange(1, len(arrays["group_ends"]) + 1), len(arrays["a"]))


@grouped_matmul.edge(dims={"rows": (1, 40), "groups": (257, 520), "k": (1, 9), "n": (1, 9)}, smallest_tiles=True)
def hundreds_of_groups(arrays, rng, options):
    """More groups than a program may read the ends of at once, most of them empty."""


@grouped_matmul.edge(
    dims={"rows": (65, 140), "groups": (2, 6), "k": (1, 20), "n": (17, 40)}, regime="integers", smallest_tiles=True
)
def ends_beside_tile_borders(arrays, rng, options):
    """Groups that end at multiples of 16 rows, or a row beside: a row that is dropped, or multiplied twice, shows."""
    rows = len(arrays["a"])
    ends = 16 * rng.integers(0, rows // 16 + 1, arrays["group_ends"].shape) + rng.integers(-1, 2)
    arrays["group_ends"][...] = np.sort(np.clip(ends, 0, rows))


@grouped_matmul.edge(
    dims={"rows": (65, 140), "groups": (3, 6), "k": (1, 20), "n": (1, 20)}, regime="integers", smallest_tiles=True
)
def sizes_of_whole_tiles(arrays, rng, options):
    """Groups of one tile, of one row less and more, and of two, which begin anywhere."""
    ends = np.cumsum(np.resize(rng.permutation([16, 15, 17, 32]), len(arrays["group_ends"])))
    arrays["group_ends"][...] = np.minimum(ends, len(arrays["a"]))


@grouped_matmul.edge(dims={"rows": (2, 20), "groups": (1, 3), "k": (129, 300), "n": (2, 20)}, regime="spikes")
def one_hot_rows_at_tile_borders(arrays, rng, options):
    """A dropped or repeated step of k shows as a missing or doubled spike."""
    arrays["b"][...] = rng.integers(1, 5, arrays["b"].shape)


@grouped_matmul.edge(
    dims={"rows": (3, 20), "groups": (1, 3), "k": (1, 40), "n": (1, 20)}, options={"out_dtype": "float32"}
)
def another_output_dtype(arrays, rng, options):
    """c in float32 is rounded once, from the accumulator."""


@grouped_matmul.edge(
    dims={"rows": (100, 160), "groups": (2, 4), "k": (1, 20), "n": (80, 120)}, regime="integers", smallest_tiles=True
)
def many_tiles_both_ways(arrays, rng, options):
    """However tiles are numbered, each is computed once."""


# --------------------------------------------------------------------------------------------------------------- laws
def _drawn(draw: Any, rows: tuple[int, int] = (4, 90)) -> tuple[Any, Any, np.ndarray]:
    """a, b and the ends, of which the last may leave some rows."""
    height, k, n, groups = draw.extent(*rows), draw.extent(1, 90), draw.extent(1, 60), draw.extent(1, 5)
    ends = np.sort(draw.integers(0, height, groups, dtype="int64"))
    return draw.normal(height, k), draw.normal(groups, k, n), ends


def rows_of(ends: np.ndarray, g: int) -> slice:
    return slice(int(ends[g - 1]) if g else 0, int(ends[g]))


def permuted(draw: Any, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(groups in another order, their rows, their ends)."""
    order = draw.rng.permutation(len(ends))
    rows = np.concatenate([np.arange(0), *(np.arange(len(x := range(*span_of(ends, g)))) + x.start for g in order)])
    return order, rows, np.cumsum(np.diff(ends, prepend=0)[order])


def span_of(ends: np.ndarray, g: int) -> tuple[int, int]:
    rows = rows_of(ends, g)
    return rows.start, rows.stop


@grouped_matmul.law
def a_row_alone(run, draw):
    """A row of a group, alone with that group's matrix, has the bits that it has among others."""
    a, b, ends = _drawn(draw)
    row = draw.extent(0, len(a) - 1)
    g = int(np.searchsorted(ends, row, side="right"))
    if g < len(ends):
        alone = run(a[row : row + 1], b[g : g + 1], np.ones(1, np.int64))
        draw.same_bits(alone, run(a, b, ends)[row : row + 1], "a row alone")


@grouped_matmul.law
def a_group_in_two(run, draw):
    """A group that is split in two with one matrix gives the same bits."""
    a, b, ends = _drawn(draw)
    g = draw.extent(0, len(ends) - 1)
    between = draw.extent(*span_of(ends, g))
    found = run(a, np.insert(b, g, b[g], 0), np.insert(ends, g, between))
    draw.same_bits(found, run(a, b, ends), "a group split in two")


@grouped_matmul.law
def groups_in_another_order(run, draw):
    """Groups that change places take their rows with them, to the bit."""
    a, b, ends = _drawn(draw)
    order, rows, moved = permuted(draw, ends)
    if len(rows):
        draw.same_bits(run(a[rows], b[order], moved), run(a, b, ends)[rows], "groups in another order")


@grouped_matmul.law
def both_integer_types(run, draw):
    """Ends of 32 and of 64 bits give the same bits."""
    a, b, ends = _drawn(draw)
    draw.same_bits(run(a, b, ends.astype(np.int32)), run(a, b, ends), "ends of 32 bits")


@grouped_matmul.law
def identity(run, draw):
    """a I = a, to the bit, and zeros in rows of no group."""
    a, _, ends = _drawn(draw)
    k = a.shape[1]
    eye = np.broadcast_to(np.eye(k), (len(ends), k, k)).astype(a.dtype)
    inside = (np.arange(len(a)) < ends[-1])[:, None]
    draw.same_bits(run(a, eye, ends), np.where(inside, a, 0).astype(a.dtype), "a times the identity")


@grouped_matmul.law
def powers_of_two_scale_exactly(run, draw):
    """(2 a) b = 2 (a b), to the bit."""
    a, b, ends = _drawn(draw)
    two = a.dtype.type(2)
    draw.same_bits(run(a * two, b, ends), run(a, b, ends) * two, "a doubled")


# ----------------------------------------------------------------------------------------------------------- gradient
class GroupedMatmulVjpOut(NamedTuple):
    d_a: Float[A, "rows k"]
    d_b: Float[A, "groups k n"]


def bytes_moved_vjp(call: Call) -> float:
    """Of d_a the cotangent's rows and the matrices of groups that have rows; of d_b the rows of both; what both need is
    read once."""
    dims, sizes = call.dims, sizes_of(call)
    read = sum(sizes) * dims["n"] * _size(call, "d_c") + dims["groups"] * _size(call, "group_ends")
    if "d_a" in call.wants:
        read += sum(size > 0 for size in sizes) * dims["k"] * dims["n"] * _size(call, "b")
        read += dims["rows"] * dims["k"] * _size(call, "d_a")
    if "d_b" in call.wants:
        read += sum(sizes) * dims["k"] * _size(call, "a") + dims["groups"] * dims["k"] * dims["n"] * _size(call, "d_b")
    return read


@spec(
    tiling=TILING,
    own_dtype=("d_c",),
    gradient_dtype=("d_a",),
    require=[ENDS_RISE],
    apart=lambda options, wants: ("k", *(["n"] if "d_a" not in wants else [])),
    budget="flops",
    flops=lambda call: len(call.wants) * work(call),
    bytes_moved=bytes_moved_vjp,
)
def grouped_matmul_vjp(
    a: Float[A, "rows k"],
    b: Float[A, "groups k n"],
    group_ends: Int[A, "groups"],
    d_c: Float[A, "rows n"],
    *,
    precision: Literal["ieee", "tf32"] = "ieee",
) -> GroupedMatmulVjpOut:
    """d_a = d_c b_g^T and d_b_g = a_g^T d_c_g of each group g, accumulated in float32 and rounded once.

    The gradients of a group have the same bits alone and among any others: the sum over its rows begins at its first
    one, and has one order.

    Args:
      a: (rows, k); b: (groups, k, n); group_ends: (groups,), as in grouped_matmul.
      d_c: (rows, n), the cotangent of c, of any float dtype. A product of two dtypes is taken in float32, or in float64
        where one of them is.
      precision: for float32 products, as in matmul.

    Returns:
      d_a: (rows, k), zeros in rows of no group; d_b: (groups, k, n), zeros for a group without rows. What a and d_c
      hold in rows of no group reaches neither.
    """
    raise NotImplementedError


@grouped_matmul_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """matmul's of each group, with K = n for d_a and the group's rows for d_b; what is no product is an exact zero. u,
    tf32 and flush are those of the dtype in which products are taken, U and eta those of the gradient's."""
    return each_group(call, ref, "bound", 0.0)


@grouped_matmul_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """matmul's of each group; nothing is said of what is no product, which is exact."""
    return each_group(call, ref, "spread", inf)


@grouped_matmul_vjp.exact
def exact_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Integers whose sums the accumulator holds, and what is no product."""
    return each_group(call, ref, "forced", True)


grouped_matmul_vjp.locate(locate_group)

CORNERS = (
    rows_of_no_group,
    no_group_has_a_row,
    all_rows_in_one_group,
    nan_in_another_group,
    groups_of_one_row,
    hundreds_of_groups,
    ends_beside_tile_borders,
    sizes_of_whole_tiles,
    many_tiles_both_ways,
)
grouped_matmul_vjp.edges.update((plant.__name__, grouped_matmul.edges[plant.__name__]) for plant in CORNERS)


@grouped_matmul_vjp.edge(dims=SEVERAL)
def nan_and_inf_in_a_cotangent(arrays, rng, options):
    """A NaN in d_c reaches a row of d_a, and a column of its group's d_b, alone."""
    d_c = arrays["d_c"]
    d_c[rng.integers(len(d_c)), rng.integers(d_c.shape[1])] = rng.choice([np.nan, inf])


@grouped_matmul_vjp.edge(dims={"rows": (129, 300), "groups": (1, 3), "k": (1, 30), "n": (1, 30)}, regime="integers")
def one_hot_rows_of_cotangents(arrays, rng, options):
    """A row of the cotangent that is dropped, or met twice, in the sum over a group's rows shows in d_b."""
    keep = rng.integers(len(arrays["d_c"]), size=3)
    kept = arrays["d_c"][keep].copy()
    arrays["d_c"][...] = 0
    arrays["d_c"][keep] = kept


@grouped_matmul_vjp.edge(dims={"rows": (2, 30), "groups": (1, 3), "k": (1, 30), "n": (129, 300)}, regime="integers")
def one_hot_columns_of_cotangents(arrays, rng, options):
    """A step along n that is dropped, or repeated, shows in d_a."""
    keep = rng.integers(arrays["d_c"].shape[1], size=3)
    kept = arrays["d_c"][:, keep].copy()
    arrays["d_c"][...] = 0
    arrays["d_c"][:, keep] = kept


@grouped_matmul_vjp.edge(dims=SEVERAL, options={"precision": "tf32"})
def products_of_10_bits(arrays, rng, options):
    """precision counts where products are of float32."""


def _drawn_vjp(draw: Any) -> tuple[Any, ...]:
    a, b, ends = _drawn(draw, (4, 300))
    return a, b, ends, draw.normal(len(a), b.shape[2])


@grouped_matmul_vjp.law
def a_group_alone(run, draw):
    """The gradients of a group have the same bits alone and among others."""
    a, b, ends, d_c = _drawn_vjp(draw)
    g = draw.extent(0, len(ends) - 1)
    rows = rows_of(ends, g)
    if rows.start < rows.stop:
        d_a, d_b = run(a, b, ends, d_c)
        alone = run(a[rows], b[g : g + 1], np.array([rows.stop - rows.start]), d_c[rows])
        draw.same_bits(alone[0], d_a[rows], "d_a of a group alone")
        draw.same_bits(alone[1], d_b[g : g + 1], "d_b of a group alone")


@grouped_matmul_vjp.law
def groups_in_another_order_vjp(run, draw):
    """Groups that change places take their gradients with them, to the bit."""
    a, b, ends, d_c = _drawn_vjp(draw)
    order, rows, moved = permuted(draw, ends)
    if len(rows):
        d_a, d_b = run(a, b, ends, d_c)
        found = run(a[rows], b[order], moved, d_c[rows])
        draw.same_bits(found[0], d_a[rows], "d_a of groups in another order")
        draw.same_bits(found[1], d_b[order], "d_b of groups in another order")


@grouped_matmul_vjp.law
def a_row_alone_vjp(run, draw):
    """A row of d_a, alone, has the same bits as among others."""
    a, b, ends, d_c = _drawn_vjp(draw)
    row = draw.extent(0, len(a) - 1)
    g = int(np.searchsorted(ends, row, side="right"))
    if g < len(ends):
        one = slice(row, row + 1)
        alone = run(a[one], b[g : g + 1], np.ones(1, np.int64), d_c[one])[0]
        draw.same_bits(alone, run(a, b, ends, d_c)[0][one], "a row alone")


@grouped_matmul_vjp.law
def gradients_do_not_depend_on_which_are_wanted(run, draw):
    """Each gradient, asked for alone, has the same bits."""
    each_alone(run, draw, ("d_a", "d_b"), _drawn_vjp(draw))


@grouped_matmul_vjp.law
def powers_of_two_scale_exactly_vjp(run, draw):
    """A cotangent that is doubled doubles both gradients, to the bit."""
    a, b, ends, d_c = _drawn_vjp(draw)
    doubled(lambda d_c: run(a, b, ends, d_c), draw, ("d_a", "d_b"), d_c)


@grouped_matmul_vjp.law
def both_integer_types_vjp(run, draw):
    """Ends of 32 and of 64 bits give the same bits."""
    a, b, ends, d_c = _drawn_vjp(draw)
    narrow = run(a, b, ends.astype(np.int32), d_c)
    for name, x, y in zip(("d_a", "d_b"), narrow, run(a, b, ends, d_c), strict=True):
        draw.same_bits(x, y, f"{name} with ends of 32 bits")
