"""Matrix products of groups of rows of 8-bit numbers with scales, each group with a matrix of its own, as quantised
experts of a mixture have them.

    c[i, j] = sum over blocks p of k of scale_a[i, p] scale_b[g, p, j] (sum over k in p of a[i, k] b[g, k, j])
              + bias[g, j]

g is the group of row i. Each group is a call of ``scaled_matmul`` by itself: its bounds and typical errors are those of
that call. Groups are those of ``grouped_matmul``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Float32, Int, Num

from portakern.spec import Extent, Tile, spec
from portakern.spec.options import DType
from portakern.specs import grouped_matmul as groups
from portakern.specs import scaled_matmul as scaled

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


def bytes_moved(call: Call) -> float:
    """grouped_matmul's, the scales and the bias."""
    beside = [call.arrays[name] for name in ("scale_a", "scale_b", "bias")]
    return groups.bytes_moved(call) + sum(4.0 * np.prod(x.shape) for x in beside if x is not None)


class ScaledGroupedMatmulOut(NamedTuple):
    c: Float[A, "rows n"]


@spec(
    tiling={"block_m": Tile(16, 2048, of="rows"), "block_n": Tile(16, 2048, of="n"), "block_k": Tile(32, 4096, of="k")},
    dtypes=scaled.EIGHT_BITS,
    own_dtype=("b",),
    result_dtype={"c": "out_dtype"},
    require=[scaled.OF_ONE_KIND, scaled.INT32_HOLDS, groups.ENDS_RISE],
    empty={"groups": {"c": 0.0}},
    positive=("k",),
    apart=("n",),
    budget="flops",
    typical={"rows": 4096, "groups": 8, "k": 2048, "n": 2048, "n_width": 128, "k_width": 128},
    flops=groups.work,
    bytes_moved=bytes_moved,
)
def scaled_grouped_matmul(
    a: Num[A, "rows k"],
    b: Num[A, "groups k n"],
    group_ends: Int[A, "groups"],
    scale_a: Float32[A, "#rows #k/k_width"],
    scale_b: Float32[A, "#groups #k/k_width #n/n_width"],
    bias: Float32[A, "groups n"] | None = None,
    *,
    n_width: Annotated[int, Extent()] = 1,
    k_width: Annotated[int, Extent()] = 128,
    precision: Literal["promoted", "ieee", "fast"] = "promoted",
    out_dtype: Annotated[Any, DType()] = "bfloat16",
) -> ScaledGroupedMatmulOut:
    """c = the sum over blocks of k of (scale_a a) (scale_b b_g), + bias_g, for the rows of each group g, rounded once.

    Group g has the rows from group_ends[g - 1], of the first group from 0, up to group_ends[g]. A row's result is that
    of ``scaled_matmul`` on it, its scales, and its group's matrix, scales and bias, and its bits depend on nothing
    else.

    Along each axis a scale array has the extent 1, one scale for all, or one for each row, group or block:

    ============================================== ============================ =============================== ======
    torch.nn.functional.scaled_grouped_mm          scale_a                      scale_b                         widths
    ============================================== ============================ =============================== ======
    TensorWise, of all rows and of each group      (1, 1)                       (groups, 1, 1)                  any
    RowWise                                        (rows, 1)                    (groups, 1, n)                  1, any
    BlockWise1x128 with BlockWise128x128           (rows, k / 128)              (groups, k / 128, n / 128)      128, 128
    BlockWise1x32                                  (rows, k / 32)               (groups, k / 32, n)             1, 32
    rows beside blocks                             (rows, 1)                    (groups, k / 128, n / 128)      128, 128
    ============================================== ============================ =============================== ======

    The widths are those (n, k) of ``scaled_matmul``; a row of a is a token, and shares no scale unless all do.

    Args:
      a: (rows, k), the rows of a group beside each other, group after group; b: (groups, k, n), a matrix for each
        group; each float8_e4m3fn or float8_e5m2, or both int8. Weights (groups, n, k) come as b.mT; Hopper's and
        CDNA's matrix units want them so.
      group_ends: (groups,), the row before which each group ends, as in grouped_matmul: they rise, may repeat, and may
        leave rows.
      scale_a: (1 or rows, 1 or k / k_width); scale_b: (1 or groups, 1 or k / k_width, 1 or n / n_width), float32,
        rounded up. float8_e8m0fnu is converted to float32, which holds it.
      bias: (groups, n), float32, which holds 16-bit ones.
      n_width, k_width: columns and elements along k that share a scale.
      precision: of the sums of products of 8-bit floats, as in scaled_matmul.
      out_dtype: dtype of c.

    Returns:
      c: (rows, n). Rows from the last end on belong to no group: zeros, whatever a and scale_a hold there. k = 0 is
      refused.
    """
    raise NotImplementedError


def of_group(call: Call, g: int, rows: slice) -> Call:
    """The call of scaled_matmul that a group of a call in NumPy is."""
    a, b, scale_a, scale_b, bias = (call.arrays[name] for name in ("a", "b", "scale_a", "scale_b", "bias"))
    k, n = call.dims["k"], b.shape[2]
    return call.replace(
        spec=scaled.scaled_matmul,
        arrays={
            "a": a[rows],
            "b": b[g],
            "scale_a": scale_a if len(scale_a) == 1 else scale_a[rows],
            "scale_b": scale_b[min(g, len(scale_b) - 1)],
            "bias": None if bias is None else bias[g],
        },
        options={**call.options, "m_width": 1},
        dims={**call.dims, "m": rows.stop - rows.start, "n": n, "k": k, "m_width": 1},
        wants=("c",),
    )


def products_of(call: Call, name: str) -> Iterator[tuple[Any, Call]]:
    """(its rows, the call of scaled_matmul that gives them) of each group that has any."""
    for g, rows in groups.groups_of(call):
        yield rows, of_group(call, g, rows)


@scaled_grouped_matmul.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """scaled_matmul's of each group; rows of no group are exact zeros."""
    return groups.each_group(call, ref, "bound", 0.0, products_of)


@scaled_grouped_matmul.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """scaled_matmul's of each group; nothing is said of rows of no group, which are exact."""
    return groups.each_group(call, ref, "spread", inf, products_of)


@scaled_grouped_matmul.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Integers whose sums float32, and the matrix unit, hold, as in scaled_matmul, and rows of no group."""
    return groups.each_group(call, ref, "forced", True, products_of)


scaled_grouped_matmul.locate(groups.locate_group)
scaled_grouped_matmul.values("group_ends")(groups.drawn_ends)
scaled_grouped_matmul.values("group_ends", measured=True)(groups.equal_ends)


# --------------------------------------------------------------------------------------------------------------- edges
for plant in (
    groups.no_group_has_a_row,
    groups.all_rows_in_one_group,
    groups.groups_of_one_row,
    groups.hundreds_of_groups,
    groups.ends_beside_tile_borders,
    groups.sizes_of_whole_tiles,
    groups.many_tiles_both_ways,
):
    scaled_grouped_matmul.edges[plant.__name__] = groups.grouped_matmul.edges[plant.__name__]

SMALL = {"rows": (6, 50), "groups": (2, 5), "n": (1, 40), "k": (1, 140), "n_width": (1, 9), "k_width": (20, 60)}
ONE_BLOCK = {"scale_a": ("k",), "scale_b": ("k",)}


@scaled_grouped_matmul.edge(dims=SMALL, given=("bias",))
def rows_of_no_group(arrays, rng, options):
    """Rows from the last end on are zeros, whatever their codes and scales are."""
    ends, a, scale = (arrays[name] for name in ("group_ends", "a", "scale_a"))
    ends[...] = np.minimum(ends, len(a) - rng.integers(1, len(a)))
    beyond = slice(int(ends[-1]), None)
    a[beyond] = np.nan if a.dtype.kind == "f" else 127
    if len(scale) > 1:
        scale[beyond] = rng.choice([np.nan, inf])


@scaled_grouped_matmul.edge(dims=SMALL)
def nan_in_another_group(arrays, rng, options):
    """NaN in the matrix, or in the scales, of one group stays in its rows."""
    b, scale = arrays["b"], arrays["scale_b"]
    g = int(rng.integers(len(b)))
    if b.dtype.kind == "f" and rng.random() < 0.5:
        b[g, rng.integers(b.shape[1])] = rng.choice([np.nan, -np.nan])
    elif len(scale) > 1:
        scale[g] = rng.choice([np.nan, inf])


@scaled_grouped_matmul.edge(dims=SMALL)
def nan_and_inf_in_a_row(arrays, rng, options):
    """NaN and inf (NaN too in float8_e4m3fn) in a row of a, or in its scales, reach that row of c alone."""
    scaled.plant(arrays[rng.choice(["a", "scale_a"])], rng, (np.nan, inf))


@scaled_grouped_matmul.edge(dims={**SMALL, "k": (100, 140)}, regime="integers")
def blocks_of_other_scales(arrays, rng, options):
    """A scale that is taken from the block, the row or the group beside, or from the other operand, shows."""
    scaled.in_powers_of_2(arrays, rng)


@scaled_grouped_matmul.edge(
    dims={**SMALL, "rows": (33, 70), "n": (20, 60), "k": (90, 140), "k_width": (32, 32)},
    regime="integers",
    smallest_tiles=True,
)
def blocks_that_no_tile_divides(arrays, rng, options):
    """Tiles with several scales, and the other way round, in groups that begin anywhere."""
    scaled.in_powers_of_2(arrays, rng)


DEEPSEEK = {"rows": (6, 20), "groups": (2, 3), "n": (100, 200), "k": (100, 300), "n_width": (128, 128),
            "k_width": (128, 128)}  # fmt: skip


@scaled_grouped_matmul.edge(dims=DEEPSEEK, regime="integers")
def rows_of_128_beside_squares_of_128(arrays, rng, options):
    """As DeepSeek has them, the last blocks ragged."""
    scaled.in_powers_of_2(arrays, rng)


@scaled_grouped_matmul.edge(dims=DEEPSEEK, regime="integers", stretched={"scale_a": ("k",)})
def rows_beside_squares_of_128(arrays, rng, options):
    """One scale for each row of a, and blocks of b."""
    scaled.in_powers_of_2(arrays, rng)


@scaled_grouped_matmul.edge(dims={**SMALL, "k": (1, 300), "n_width": (1, 1)}, stretched=ONE_BLOCK)
def a_scale_for_each_row_and_column(arrays, rng, options):
    """One block along k, and columns of each group."""


@scaled_grouped_matmul.edge(
    dims={**SMALL, "k": (1, 300)}, stretched={"scale_a": ("rows", "k"), "scale_b": ("n", "k")}, given=("bias",)
)
def a_scale_for_each_group(arrays, rng, options):
    """One number for all rows, and one for each matrix."""


@scaled_grouped_matmul.edge(dims={**SMALL, "k": (65, 300), "n_width": (1, 1), "k_width": (32, 32)})
def blocks_of_32(arrays, rng, options):
    """The mx formats' blocks, whose scales are powers of two."""
    for name in ("scale_a", "scale_b"):
        arrays[name][...] = 2.0 ** rng.integers(-20, 20, arrays[name].shape)


@scaled_grouped_matmul.edge(dims=SMALL, given=("bias",), options={"out_dtype": "float32"}, regime="integers")
def integers_and_a_bias(arrays, rng, options):
    """Exact: the bias of a row's group is added once, behind the scales."""
    for name in ("scale_a", "scale_b"):
        arrays[name][...] = 2.0 ** rng.integers(0, 3, arrays[name].shape)


LONG = {"rows": (2, 3), "groups": (1, 2), "n": (1, 3), "k": (2048, 3000), "n_width": (1, 1), "k_width": (128, 128)}


@scaled_grouped_matmul.edge(dims=LONG, options={"precision": "promoted", "out_dtype": "float32"}, stretched=ONE_BLOCK)
def long_sums_of_one_sign(arrays, rng, options):
    """A sum that never leaves a matrix unit of 13 bits loses a few hundredths of itself; one that does, less than a
    thousandth."""
    scaled.long_sums_of_one_sign(arrays, rng, options)


@scaled_grouped_matmul.edge(
    dims=LONG, options={"precision": "ieee", "out_dtype": "float32"}, stretched=ONE_BLOCK, regime="integers"
)
def whole_sums_beyond_13_bits(arrays, rng, options):
    """Of "ieee" they are exact: 128 128 beside 1 1 is more than 13 bits behind the point hold."""
    scaled.whole_sums_beyond_13_bits(arrays, rng, options)


# ---------------------------------------------------------------------------------------------------------------- laws
def drawn(draw: Any) -> tuple[np.ndarray, ...]:
    """a, b, ends of which the last may leave rows, and scales of blocks of 32 along k."""
    rows, k, n, number = draw.extent(4, 60), draw.extent(1, 100), draw.extent(1, 40), draw.extent(1, 4)
    ends = np.sort(draw.integers(0, rows, number, dtype="int64"))
    count = -(-k // 32)
    scales = (np.exp2(draw.rng.uniform(-6, 6, s)).astype(np.float32) for s in ((rows, count), (number, count, n)))
    return draw.normal(rows, k), draw.normal(number, k, n), ends, *scales


@scaled_grouped_matmul.law
def a_row_alone(run, draw):
    """A row of a group, alone with that group's matrix, has the bits that it has among others."""
    a, b, ends, scale_a, scale_b = drawn(draw)
    row = draw.extent(0, len(a) - 1)
    g, one = int(np.searchsorted(ends, row, side="right")), slice(row, row + 1)
    if g < len(ends):
        own = slice(g, g + 1)
        alone = run(a[one], b[own], np.ones(1, np.int64), scale_a[one], scale_b[own], k_width=32)
        draw.same_bits(alone, run(a, b, ends, scale_a, scale_b, k_width=32)[one], "a row alone")


@scaled_grouped_matmul.law
def a_group_in_two(run, draw):
    """A group that is split in two with one matrix and its scales gives the same bits."""
    a, b, ends, scale_a, scale_b = drawn(draw)
    g = draw.extent(0, len(ends) - 1)
    between = draw.extent(*groups.span_of(ends, g))
    again = np.insert(b, g, b[g], 0), np.insert(ends, g, between), scale_a, np.insert(scale_b, g, scale_b[g], 0)
    found = run(a, *again, k_width=32)
    draw.same_bits(found, run(a, b, ends, scale_a, scale_b, k_width=32), "a group split in two")


@scaled_grouped_matmul.law
def groups_in_another_order(run, draw):
    """Groups that change places take their rows and scales with them, to the bit."""
    a, b, ends, scale_a, scale_b = drawn(draw)
    order, rows, moved = groups.permuted(draw, ends)
    if len(rows):
        found = run(a[rows], b[order], moved, scale_a[rows], scale_b[order], k_width=32)
        draw.same_bits(found, run(a, b, ends, scale_a, scale_b, k_width=32)[rows], "groups in another order")


@scaled_grouped_matmul.law
def powers_of_two_scale_exactly(run, draw):
    """A scale that is doubled doubles c, to the bit."""
    a, b, ends, scale_a, scale_b = drawn(draw)
    options, two = {"k_width": 32, "out_dtype": "float32"}, np.float32(2)
    once = run(a, b, ends, scale_a, scale_b, **options)
    draw.same_bits(run(a, b, ends, scale_a * two, scale_b, **options), once * two, "scale_a doubled")
    draw.same_bits(run(a, b, ends, scale_a, scale_b * two, **options), once * two, "scale_b doubled")


@scaled_grouped_matmul.law
def one_scale_for_many(run, draw):
    """A scale that rows, groups or columns share gives the bits that it gives repeated for each."""
    a, b, ends, scale_a, scale_b = drawn(draw)
    scale_a, scale_b, n = scale_a[:1], scale_b[:1, :, :1], b.shape[2]
    shared = run(a, b, ends, scale_a, scale_b, k_width=32)
    for wide in (1, 7):
        columns = np.repeat(np.repeat(scale_b, len(b), 0), -(-n // wide), 2)
        found = run(a, b, ends, np.repeat(scale_a, len(a), 0), columns, n_width=wide, k_width=32)
        draw.same_bits(found, shared, f"a scale repeated for blocks of {wide}")


@scaled_grouped_matmul.law
def both_integer_types(run, draw):
    """Ends of 32 and of 64 bits give the same bits."""
    a, b, ends, *scales = drawn(draw)
    wide = run(a, b, ends, *scales, k_width=32)
    draw.same_bits(run(a, b, ends.astype(np.int32), *scales, k_width=32), wide, "ends of 32 bits")


EXTENTS = {"rows": 7, "groups": 3, "n": 4, "k": 7, "n_width": 1, "k_width": 128}
scaled_grouped_matmul.sample("groups", dims=EXTENTS, stretched={"scale_a": ("rows",), "scale_b": ("n",)})
scaled_grouped_matmul.sample("rows_and_columns", dims=EXTENTS, given=("bias",), options={"precision": "fast"})
scaled_grouped_matmul.sample(
    "blocks",
    dims={**EXTENTS, "n_width": 3, "k_width": 3},
    options={"out_dtype": "float32", "precision": "ieee"},
)
