"""Matrix products of groups of rows on TPUs, each with a matrix of its own, and their gradients.

a: (rows, k), b: (groups, k, n), ends: (groups,), where each group ends -> c: (rows, n). The grid is (n blocks, visits,
k blocks). A visit is of one block of rows for one group: a block in which several groups have rows is visited by each
in turn, stays in VMEM meanwhile, and takes of each product the rows that are that group's. A visit of rows of no group
writes zeros. There are at most as many visits as blocks of rows and groups together. Which they are is worked out of
the ends before the kernel, and read in scalar memory by the maps of blocks (`RowVisits`). Those that are left over come
last, and move and compute nothing.

    d_a = d_c b_g^T        d_b[g] = sum over the rows i of group g of a[i]^T d_c[i]

d_a is the same product, whose kernel reads b as it lies. Of d_b the grid is (k blocks, n blocks, visits), and the
visits of a group follow each other while its block is summed in VMEM (`SumVisits`); a group without rows has one, which
writes zeros. In which order rows are summed must not depend on where their group begins. A block may begin at any whole
native tile of rows, so each group is first moved to one, in one pass over a and d_c, and its blocks are counted from
there.

block_m, block_n, block_k: as in matmul, of each product: of d_b block_k is of rows.

Source: the grouped product of Gale et al., "MegaBlocks" (2023), section 5, in the form of JAX's megablox, whose visits
these are.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import ProductConfig
from portakern.backends.pallas.lib.blocks import Refs, even_block, padded, positions, quotient, row_block, step_along
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    LANES,
    dot,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
)
from portakern.backends.pallas.lib.mosaic_tpu.layout import native_axes
from portakern.backends.pallas.tpu import matmul as products
from portakern.backends.pallas.tpu._heads import MOST_SCALARS
from portakern.backends.pallas.tpu.matmul import Chip, default_tiling, key, resident_bytes, within_k
from portakern.core.call import Call
from portakern.specs.matmul import product_dtype


# --------------------------------------------------------------------------------------------------------------- groups
class Groups(NamedTuple):
    """Where each group begins, and where it ends: int32 numbers from 0 to the rows, whatever the call says."""

    starts: jax.Array
    ends: jax.Array

    @classmethod
    def of(cls, ends: jax.Array, rows: int) -> Groups:
        ends = lax.cummax(jnp.clip(ends, 0, rows).astype(jnp.int32))
        return cls(jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]]), ends)

    @property
    def sizes(self) -> jax.Array:
        return self.ends - self.starts


def _number_of(ends: jax.Array, x: jax.Array) -> jax.Array:
    """How many of these numbers, none smaller than the one before, are at most x."""
    return jnp.searchsorted(ends, x, side="right", method="compare_all").astype(jnp.int32)


class RowVisits(NamedTuple):
    """What each step along the visits of c does, in scalar memory.

    Attributes:
      block: of rows of c. first, end: the rows of it that are written, from the block's first row on.
      multiplied: whether they are rows of a group; others are zeros.
      source, matrix: the block of rows of a and the matrix that are read; of a visit that multiplies nothing those of
        the last one that does, so that nothing is moved.
    """

    block: jax.Array
    first: jax.Array
    end: jax.Array
    multiplied: jax.Array
    source: jax.Array
    matrix: jax.Array

    @classmethod
    def of(cls, ends: jax.Array, rows: int, block: int) -> RowVisits:
        number, down = ends.size, pl.cdiv(rows, block)
        starts, ends = Groups.of(jnp.append(ends, ends.dtype.type(rows)), rows)  # rows of no group are one more
        before = quotient(starts, block)
        count = jnp.where(ends > starts, quotient(ends + (block - 1), block) - before, 0)
        after = jnp.cumsum(count, dtype=jnp.int32)
        step = jnp.arange(down + number, dtype=jnp.int32)
        group = jnp.minimum(_number_of(after, step), number)
        there = step < after[-1]
        at = jnp.where(there, before[group] + step - (after - count)[group], down - 1)
        first, end = (jnp.where(there, jnp.clip(x[group] - at * block, 0, block), 0) for x in (starts, ends))
        read = jnp.minimum(step, jnp.maximum(after[-2] - 1, 0))
        matrix = jnp.minimum(group[read], number - 1)
        return cls(at, first, end, (step < after[-2]).astype(jnp.int32), at[read], matrix)


class SumVisits(NamedTuple):
    """What each step along the visits of d_b does, in scalar memory.

    Attributes:
      group: of which rows are summed. row: the first of them, as they were moved; size: how many they are.
      begins, finishes: whether the sum of a group begins, and whether it is whole.
    """

    group: jax.Array
    row: jax.Array
    size: jax.Array
    begins: jax.Array
    finishes: jax.Array

    @classmethod
    def of(cls, sizes: jax.Array, origins: jax.Array, rows: int, block: int) -> SumVisits:
        """``origins``: where each group's rows begin, as they were moved."""
        count = jnp.maximum(quotient(sizes + (block - 1), block), 1)
        after = jnp.cumsum(count, dtype=jnp.int32)
        step = jnp.arange(rows // block + sizes.size, dtype=jnp.int32)
        there, one = step < after[-1], jnp.minimum(step, after[-1] - 1)
        group = _number_of(after, one)
        at = (one - (after - count)[group]) * block
        size = jnp.where(there, jnp.clip(sizes[group] - at, 0, block), 0)
        begins, finishes = there & (at == 0), there & (step == after[group] - 1)
        return cls(group, origins[group] + at, size, begins.astype(jnp.int32), finishes.astype(jnp.int32))


def moved(groups: Groups, rows: int, grain: int, spare: int) -> tuple[jax.Array, jax.Array]:
    """(where each group begins, the row that stands at each place) once groups begin at multiples of ``grain``, with
    ``spare`` places behind them; the number ``rows`` where none stands."""
    after = jnp.cumsum(quotient(groups.sizes + (grain - 1), grain) * grain, dtype=jnp.int32)
    places = jnp.concatenate([jnp.zeros(1, jnp.int32), after[:-1]])
    place = jnp.arange(padded(rows, grain) + grain * after.size + spare, dtype=jnp.int32)
    group = jnp.minimum(_number_of(after, place), after.size - 1)
    within = place - places[group]
    return places, jnp.where(within < groups.sizes[group], groups.starts[group] + within, rows)


# ------------------------------------------------------------------------------------------------------- what calls ask
@functools.cache
def least_of(chip: Chip, rows: int, groups: int, n: int, k: int, block_k: int) -> tuple[int, int]:
    """block_m and block_n with which a product takes least whose groups each have a visit beside those of their
    rows."""
    sizes = itertools.product((128, *products.SIZES), products.SIZES)
    return min(sizes, key=lambda pair: products.cycles(chip, rows + groups * pair[0], n, k, (*pair, block_k)))


def fit(call: Call, config: ProductConfig) -> ProductConfig:
    """In place of the default's block_m and block_n those that suit the call's rows and groups."""
    if call.interpret or config != default_tiling(call):
        return config
    dims = call.dims
    best = least_of(Chip.of(call), dims["rows"], dims["groups"], dims["n"], dims["k"], config.block_k)
    return config.replace(block_m=best[0], block_n=best[1])


class ProductBlocks(NamedTuple):
    """Of rows, and of the two dimensions of a matrix: the one that stays and the one that is summed."""

    m: int
    n: int
    k: int

    @classmethod
    def of(cls, call: Call, config: ProductConfig, rows: int, n: int, k: int, dtype: Any) -> ProductBlocks:
        m = row_block(call, rows, config.block_m, sublanes(dtype), even=True)
        return cls(m, even_block(n, config.block_n, LANES), even_block(k, config.block_k, LANES))

    def resident(self, call: Call, dtype: Any, stored: Any) -> int:
        """The VMEM, in bytes, of one step: a product's, and the block of c that is chosen from."""
        sizes = (jnp.dtype(x).itemsize for x in (dtype, stored))
        return resident_bytes(*self, *sizes, products.at_once(call)) + 4 * self.m * self.n  # type: ignore[call-arg]


def too_many(rows: int, visits: int, numbers: int) -> str | None:
    """Why a call has too many rows, or visits of which each has so many numbers, or None."""
    if rows > 1 << 30:
        return f"{rows} rows: places are 32-bit, and more than 2^30 rows are not served"
    if 4 * numbers * visits <= MOST_SCALARS:
        return None
    return (
        f"{visits} blocks of rows and groups together, of which scalar memory has room for "
        f"{MOST_SCALARS // (4 * numbers)}: choose a larger block of rows, or give fewer groups at once"
    )


def refused(call: Call, config: ProductConfig, n: int, k: int, dtype: Any, stored: Any) -> str | None:
    """Why a product of the call's rows with matrices (k, n) is refused, or None."""
    rows, groups = call.dims["rows"], call.dims["groups"]
    blocks = ProductBlocks.of(call, config, rows, n, k, dtype)
    return (
        off_grid("block_m", config.block_m, rows, sublanes(dtype))
        or off_grid("block_n", config.block_n, n, LANES)
        or off_grid("block_k", config.block_k, k, LANES)
        or too_many(rows, pl.cdiv(rows, blocks.m) + groups, len(RowVisits._fields))
        or over_vmem(call, blocks.resident(call, dtype, stored), "block_m, block_n or block_k")
    )


def supports(call: Call, config: ProductConfig) -> str | None:
    stored, a = call.outputs["c"][1], call.arrays["a"]
    return dtype_refused(call, stored) or refused(call, config, call.dims["n"], call.dims["k"], a.dtype, stored)


# --------------------------------------------------------------------------------------------------------------- kernel
def write(ref: Refs, c: Any, first: Any, end: Any) -> None:
    """Store rows first to end of a block of c; the others stay."""
    whole = end - first == c.shape[0]

    def store() -> None:
        ref.c[...] = c.astype(ref.c.dtype)

    def choose() -> None:
        row = positions(c.shape, 0, 0)
        held = (row >= first) & (row < end)
        ref.c[...] = jnp.where(held, c, ref.c[...].astype(jnp.float32)).astype(ref.c.dtype)

    pl.when(whole)(store)
    pl.when(whole ^ True)(choose)


def kernel(ref: Refs, *, k: int, k_of_b: int, few: bool, few_of_b: bool) -> None:
    """``k_of_b``: which axis of b's blocks is k's; ``few``, ``few_of_b``: of matmul's `within_k`, for a and for b."""
    visit, step, last = pl.program_id(1), step_along(2), pl.num_programs(2) - 1
    first, end, multiplied = ref.first[visit], ref.end[visit], ref.multiplied[visit] == 1

    def product() -> Any:
        of_a, of_b = ref.a[...], ref.b[...]
        start = step * of_a.shape[1]
        return dot(within_k(of_a, 1, start, k, few), within_k(of_b, k_of_b, start, k, few_of_b), (1, k_of_b))

    if "acc" not in ref:
        pl.when(multiplied)(lambda: write(ref, product(), first, end))
        pl.when((multiplied ^ True) & (end > first))(
            lambda: write(ref, jnp.zeros(ref.c.shape, jnp.float32), first, end)
        )
        return

    @pl.when((step == 0) & (end > first))
    def begin() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    @pl.when(multiplied)
    def add() -> None:
        ref.acc[...] += product()

    pl.when((step == last) & (end > first))(lambda: write(ref, ref.acc[...], first, end))


@BACKEND.implements("grouped_matmul", key=key, tiling=default_tiling, fit=fit, supports=supports, config=ProductConfig)
def grouped_matmul(call: Call, config: ProductConfig) -> tuple[jax.Array]:
    a, b = call.arrays["a"], call.arrays["b"]
    return (multiply(call, a, b, False, call.outputs["c"][1], config),)


def multiply(call: Call, a: jax.Array, b: jax.Array, by_rows: bool, dtype: Any, config: ProductConfig) -> jax.Array:
    """a b_g in the rows of each group g, and zeros in the others; ``by_rows``: a b_g^T."""
    (rows, k), (groups, *matrix) = a.shape, b.shape
    n = matrix[0] if by_rows else matrix[1]
    if native_axes(b.shape) == (2, 1):  # XLA keeps each matrix column by column
        b, by_rows = jnp.swapaxes(b, 1, 2), not by_rows
    blocks = ProductBlocks.of(call, config, rows, n, k, a.dtype)
    depth = pl.cdiv(k, blocks.k)
    visits = RowVisits.of(call.arrays["group_ends"], rows, blocks.m)

    def along_k(v: Any, d: Any, visits: RowVisits) -> Any:
        return jnp.where(visits.multiplied[v] == 1, d, depth - 1)

    def of_a(j: Any, v: Any, d: Any, *scalars: Any) -> Any:
        of = RowVisits(*scalars)
        return of.source[v], along_k(v, d, of)

    def of_b(j: Any, v: Any, d: Any, *scalars: Any) -> Any:
        of = RowVisits(*scalars)
        at = along_k(v, d, of)
        return (of.matrix[v], j, at) if by_rows else (of.matrix[v], at, j)

    few = {"few": rows < sublanes(jnp.float32), "few_of_b": by_rows and n < sublanes(jnp.float32)}
    read = a.dtype.itemsize * (rows * k * pl.cdiv(n, blocks.n) + groups * k * n)
    found = launch(
        call,
        functools.partial(kernel, k=k, k_of_b=1 if by_rows else 0, **few),
        f"portakern_{call.spec.name}",
        (pl.cdiv(n, blocks.n), visits.block.size, depth),
        in_order=2,
        scalars=visits._asdict(),
        inputs={
            "a": (a, pl.BlockSpec((blocks.m, blocks.k), of_a)),
            "b": (b, pl.BlockSpec((None, *((blocks.n, blocks.k) if by_rows else (blocks.k, blocks.n))), of_b)),
        },
        outputs={
            "c": (
                jax.ShapeDtypeStruct((rows, n), dtype),
                pl.BlockSpec((blocks.m, blocks.n), lambda j, v, d, *scalars: (RowVisits(*scalars).block[v], j)),
            )
        },
        scratch={"acc": (blocks.m, blocks.n)} if depth > 1 else {},
        vmem=blocks.resident(call, a.dtype, dtype),
        cost=pl.CostEstimate(flops=2 * rows * n * k, transcendentals=0, bytes_accessed=read + rows * n * 4),
    )
    return found["c"]


# ------------------------------------------------------------------------------------------------------------- gradient
def sum_of_rows(ref: Refs) -> None:
    """A step of the sum over a group's rows: add a^T d_c of those of one block."""
    visit, height = pl.program_id(2), ref.a.shape[0]
    size = ref.size[visit]

    @pl.when(ref.begins[visit] == 1)
    def begin() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    def add(rows: Any) -> None:
        ref.acc[...] += dot(  # type: ignore[call-arg]
            *(x if rows is None else _those(x, rows) for x in (ref.a[...], ref.d_c[...])), (0, 0)
        )

    pl.when(size == height)(lambda: add(None))
    pl.when((size > 0) & (size < height))(lambda: add(size))

    @pl.when(ref.finishes[visit] == 1)
    def write() -> None:
        ref.d_b[...] = ref.acc[...].astype(ref.d_b.dtype)


def _those(x: Any, rows: Any) -> Any:
    """x with zeros behind so many rows, where another group's lie: 0 * NaN is NaN."""
    return jnp.where(positions(x.shape, 0, 0) < rows, x, jnp.zeros((), x.dtype))


def matrix_gradients(call: Call, a: jax.Array, d_c: jax.Array, dtype: Any, config: ProductConfig) -> jax.Array:
    """d_b of each group. The height of a block of rows does not follow from how many there are."""
    (rows, k), n, grain = a.shape, d_c.shape[1], sublanes(a.dtype)
    height, bk, bn = sum_blocks(config, k, n, grain)
    groups = Groups.of(call.arrays["group_ends"], rows)
    places, source = moved(groups, rows, grain, height)
    a, d_c = (x.at[source].get(mode="fill", fill_value=0) for x in (a, d_c))
    visits = SumVisits.of(groups.sizes, places, rows, height)

    def of_rows(v: Any, scalars: Any) -> Any:
        return pl.multiple_of(SumVisits(*scalars).row[v], grain)

    def block(width: int, axis: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (pl.Element(height), pl.Element(width)),
            lambda i, j, v, *scalars: (of_rows(v, scalars), (i, j)[axis] * width),
        )

    count = groups.sizes.size
    found = launch(
        call,
        sum_of_rows,
        f"portakern_{call.spec.name}_d_b",
        (pl.cdiv(k, bk), pl.cdiv(n, bn), visits.row.size),
        in_order=1,
        scalars=visits._asdict(),
        inputs={"a": (a, block(bk, 0)), "d_c": (d_c, block(bn, 1))},
        outputs={
            "d_b": (
                jax.ShapeDtypeStruct((count, k, n), dtype),
                pl.BlockSpec((None, bk, bn), lambda i, j, v, *scalars: (SumVisits(*scalars).group[v], i, j)),
            )
        },
        scratch={"acc": (bk, bn)},
        vmem=resident_sum(call, config, k, n, a.dtype, dtype),
        cost=pl.CostEstimate(
            flops=2 * rows * n * k,
            transcendentals=0,
            bytes_accessed=a.dtype.itemsize * rows * (k * pl.cdiv(n, bn) + n * pl.cdiv(k, bk)) + count * k * n * 4,
        ),
    )
    return found["d_b"]


def sum_blocks(config: ProductConfig, k: int, n: int, grain: int) -> tuple[int, int, int]:
    """(rows of a block, k and n of it)."""
    return padded(config.block_k, grain), even_block(k, config.block_m, LANES), even_block(n, config.block_n, LANES)


def resident_sum(call: Call, config: ProductConfig, k: int, n: int, dtype: Any, stored: Any) -> int:
    """The VMEM, in bytes, of one step of d_b."""
    height, bk, bn = sum_blocks(config, k, n, sublanes(dtype))
    sizes = (jnp.dtype(x).itemsize for x in (dtype, stored))
    return resident_bytes(bk, bn, height, *sizes, products.at_once(call))  # type: ignore[call-arg]


SUMMED = {2: 512, 4: 256}
"""Rows of a block of d_b, and columns of one of d_a, by bytes of an element: groups of few rows fill a part of it."""


def gradient_key(call: Call) -> dict[str, str | int]:
    return {**key(call), "dtype": product_dtype(call)}


def gradient_tiling(call: Call) -> ProductConfig:
    wide = product_dtype(call) in ("float32", "float64")
    return ProductConfig(block_m=512, block_n=512 if wide else 1024, block_k=SUMMED[4 if wide else 2])


def supports_gradient(call: Call, config: ProductConfig) -> str | None:
    rows, groups, k, n = (call.dims[name] for name in ("rows", "groups", "k", "n"))
    taken = product_dtype(call)
    lacking = dtype_refused(call, taken, call.dtype_of("d_c"))
    if lacking:
        return lacking
    dtype = jnp.dtype(taken)
    reasons = {"d_a": None, "d_b": None}
    if "d_a" in call.wants:
        reasons["d_a"] = refused(call, config, k, n, dtype, call.outputs["d_a"][1])  # type: ignore[assignment]
    if "d_b" in call.wants:
        reasons["d_b"] = (
            off_grid("block_m", config.block_m, k, LANES)  # type: ignore[assignment]
            or off_grid("block_n", config.block_n, n, LANES)
            or off_grid("block_k", config.block_k, rows, sublanes(dtype))
            or too_many(rows, rows // padded(config.block_k, sublanes(dtype)) + groups, len(SumVisits._fields))
            or over_vmem(call, resident_sum(call, config, k, n, dtype, call.outputs["d_b"][1]), "tiles")
        )
    return next((f"{name}: {reason}" for name, reason in reasons.items() if reason), None)


@BACKEND.implements(
    "grouped_matmul_vjp",
    key=gradient_key,
    tiling=gradient_tiling,
    supports=supports_gradient,
    config=ProductConfig,
)
def grouped_matmul_vjp(call: Call, config: ProductConfig) -> tuple[Any, ...]:
    dtype, d_a, d_b = jnp.dtype(product_dtype(call)), None, None
    a, b, d_c = (call.arrays[name].astype(dtype) for name in ("a", "b", "d_c"))
    if "d_a" in call.wants:
        d_a = multiply(call, d_c, b, True, call.outputs["d_a"][1], config)
    if "d_b" in call.wants:
        d_b = matrix_gradients(call, a, d_c, call.outputs["d_b"][1], config)
    return d_a, d_b
