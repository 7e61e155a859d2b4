"""Matrix multiplication on Hopper: C = A B, in tiles that warpgroups of two kinds make together.

a: (*#batch, m, k), b: (*#batch, k, n) -> c: (*batch, m, n). As many blocks run as there are multiprocessors, and each
takes one tile of C after the other. In a block one warpgroup produces: it copies (block_m, block_k) of A and (block_k,
block_n) of B into a ring of buffers, as soon as one is free. The others consume: each multiplies its half of a tile on
the tensor cores (wgmma, accumulators in float32 registers), rounds it once, and writes it while the next tile is on its
way. Two barriers for each buffer say that it has arrived and that it is free.

The copy engine leaves 0 for what lies beyond m, n or k, and writes nothing there. It wants rows 16 bytes apart or a
multiple of that, so that another k or n is padded by XLA; B's tiles want n as a multiple of 64, and where that alone is
lacking, and rows are few, come in pieces of 64 columns, which are multiplied one after the other. Rows of batched a
that share one b are one taller matrix. What lies in memory as A^T or B^T, as gradients have it, is read as it lies: of
16 bits tensor cores take either.

Of float32 operands tensor cores take 10 bits of each fraction (tf32), and want both along k, so that XLA transposes B.
In ieee each is split into three parts of bfloat16, a = a_0 + a_1 + a_2, of which six products make one that is exact to
float32: C = A_2 B_0 + A_1 B_1 + A_0 B_2 + A_1 B_0 + A_0 B_1 + A_0 B_0, a single product with six times k, whose
smallest terms come first (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022).

A long k and few columns make too few tiles. There the sum over k goes in chunks, each summed alone: by blocks of their
own, whose sums another kernel adds up in order, or, where there are tiles enough, by one block one after another. How
long a chunk is follows from n and k alone, and so do an element's bits.

Two blocks of a cluster may make tiles that lie one below the other (``pair=1``) or side by side (2). What both need, of
B or of A, each fetches a half of, for both.

block_m: rows of a tile of C; block_n, beside: it has so many times block_n columns; block_k: the share of k in a
buffer; stages: buffers; band: tiles of C that lie beside each other are finished first, so many rows of tiles wide.

Source: Thakkar et al., CUTLASS, "Efficient GEMM in CUDA" (warp-specialised persistent kernels for Hopper).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import HopperProductConfig
from portakern.backends.pallas.lib.blocks import Refs, padded
from portakern.backends.pallas.lib.mosaic_gpu.chip import (
    BULK_BYTES,
    HOPPER,
    SWIZZLED_BYTES,
    BufferViews,
    Swizzled,
    dtype_refused,
    in_slots,
    launch,
    over_shared,
    padded_rows,
    tiled_buffer,
    whole_pieces,
)
from portakern.backends.pallas.lib.mosaic_gpu.columns import ColumnTerms, column_sums
from portakern.backends.pallas.lib.mosaic_gpu.pipeline import drain, free_all, warp_specialized
from portakern.core.call import Call

FEW_ROWS = 64
"""Rows of the lowest tile that tensor cores multiply."""

DEEP, PARTS, NARROW = 4096, 8, 2048
"""A sum over at least ``PARTS`` times ``DEEP`` elements of k goes in so many chunks, where c has at most ``NARROW``
columns: 128 rows of it would leave most multiprocessors idle for long."""

PRODUCTS = (2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)
"""Which parts of float32 operands are multiplied. The three products that are left out are below 2^-24 of the whole."""

TWO_SUMS = 128 * 128
"""Elements of a tile of which two warpgroups hold two sums in registers."""

RUN = 128
"""Elements of operands in parts that tensor cores add up in a row: they cut what they add, so that errors of longer
sums lean one way, by a unit in the last place for each 16 elements. Sums of so many are added in registers, rounded."""

PIECED_ROWS = 8192
"""Rows up to which B comes in pieces of 64 columns, whose products take 4 % longer, where a copy of all B would be
needed otherwise."""

RATES = {
    "tiles": {
        "128 x 256": 1.0, "128 x 192": 0.97, "128 x 128": 0.92, "64 x 128": 0.69,
        "128 x 256 by pairs": 0.99, "128 x 192 by pairs": 0.96, "128 x 128 by pairs": 0.85, "64 x 128 by pairs": 0.63,
    },
    "pieces": {
        "128 x 256": 0.78, "128 x 192": 0.66, "128 x 128": 0.62, "64 x 128": 0.4,
        "128 x 256 by pairs": 1.0, "128 x 192 by pairs": 0.88, "128 x 128 by pairs": 0.81, "64 x 128 by pairs": 0.55,
    },
}  # fmt: skip
"""The tiles of C that there are where B comes in tiles or in pieces, and which part of the best rate a multiprocessor
reaches on them: measured on an H100. Rows of B that come in pieces begin within lines of the cache, so that each 128
bytes of them are asked of L2 twice; a pair of blocks asks once for both."""

OUT_SLOTS, OUT_ROWS = 2, 64
"""Buffers for what a consumer writes, and rows of each: one is filled while the other is on its way."""


ANY_TILING = HopperProductConfig(block_m=128, block_n=256, block_k=64, stages=2, band=1, beside=1)
"""For what a plan says of a call whatever the tiling."""


class ClusterPair(IntEnum):
    """Which tiles of C two blocks of a cluster make: unlike ones, one below the other, which share B, or side by side,
    which share A."""

    NONE = 0
    BELOW = 1
    BESIDE = 2


class MatmulPlan(NamedTuple):
    """How one product is cut.

    Attributes:
      batch, m, n, k: extents; a_batch, b_batch: 1 where the operand is the same for every entry of the batch.
      block_m, block_n, block_k, stages, band, beside: the tiling. consumers: warpgroups that multiply; along: the axis
        of a tile that they share, 0 or 1. size: bytes of an element; out: dtype of C. a_transposed, b_transposed:
        whether the kernel reads A^T and B^T. split: whether operands come in parts. pair: a `ClusterPair`.
    """

    batch: int
    m: int
    n: int
    k: int
    a_batch: int
    b_batch: int
    block_m: int
    block_n: int
    block_k: int
    stages: int
    band: int
    beside: int
    size: int
    out: Any
    a_transposed: bool
    b_transposed: bool
    split: bool
    pair: int = 0

    @property
    def paired(self) -> tuple[int, int]:
        """Tiles, one below the other and side by side, that the blocks of a cluster make at a time."""
        return {ClusterPair.NONE: (1, 1), ClusterPair.BELOW: (2, 1), ClusterPair.BESIDE: (1, 2)}[ClusterPair(self.pair)]

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.block_n * self.beside

    @property
    def consumers(self) -> int:
        return 1 if self.block_m * self.width <= 64 * 64 else 2

    @property
    def along(self) -> int:
        halves = self.block_m % 128 or self.width % 128 == 0
        return 1 if halves and (self.width > self.block_m or self.width == 256) else 0

    @property
    def ragged(self) -> bool:
        """Whether B comes in pieces: the copy engine brings no tile of it as tensor cores read them, and XLA would pad
        it for that alone, and for few rows."""
        alone = self.n % (SWIZZLED_BYTES // self.size) != 0 and self.n % 8 == self.k % 8 == 0
        return not self.b_transposed and alone and self.batch * self.m <= PIECED_ROWS

    @property
    def piece(self) -> int:
        """Columns of B that come, and are multiplied, at a time."""
        return SWIZZLED_BYTES // self.size if self.ragged else self.width

    @property
    def part(self) -> tuple[int, int]:
        """The rows and columns of a tile that one consumer makes."""
        rows, columns = self.block_m, self.width
        return (rows // self.consumers, columns) if self.along == 0 else (rows, columns // self.consumers)

    @property
    def tiles(self) -> tuple[int, int]:
        below, beside = self.paired
        return padded(pl.cdiv(self.m, self.block_m), below), padded(pl.cdiv(self.n, self.width), beside)

    @property
    def steps(self) -> int:
        """Buffers that a tile takes."""
        return pl.cdiv(self.k, self.block_k)

    @property
    def chunk(self) -> int:
        """Steps of a chunk of k."""
        return padded(pl.cdiv(self.k, PARTS), DEEP) // self.block_k if is_deep(self.n, self.k) else self.steps

    @property
    def run(self) -> int:
        """Steps that tensor cores add up in a row."""
        return min(self.chunk, RUN // self.block_k) if self.split else self.chunk

    @property
    def parts(self) -> int:
        """Chunks of k."""
        return pl.cdiv(self.steps, self.chunk)

    @property
    def num_splits(self) -> int:
        """Blocks that share a tile's sum: each chunk has its own, or one takes all of them, if these are no sums of
        sums, of which a third would not fit into registers."""
        if self.split:
            return self.parts
        tiles, cores = self.batch * math.prod(self.tiles), HOPPER.cores or 1
        rounds = pl.cdiv(tiles * self.parts, cores) * self.chunk
        return self.parts if rounds < 0.8 * pl.cdiv(tiles, cores) * self.steps else 1

    @property
    def written(self) -> Any:
        """The dtype of what a block writes: C, or its part of the sums."""
        return self.out if self.num_splits == 1 else jnp.dtype(jnp.float32)

    @property
    def out_columns(self) -> int:
        """Columns that are written at a time."""
        return SWIZZLED_BYTES // self.written.itemsize

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        ring = self.stages * (self.block_m + self.width) * self.block_k * self.size
        return ring + self.consumers * OUT_SLOTS * OUT_ROWS * SWIZZLED_BYTES


def is_deep(n: int, k: int) -> bool:
    """Whether the sum over k goes in chunks."""
    return k >= PARTS * DEEP and n <= NARROW


def in_parts(call: Call) -> bool:
    """Whether operands are split."""
    return call.dtype == "float32" and call.options["precision"] == "ieee"


def operands(call: Call) -> str:
    """The dtype that tensor cores multiply."""
    return "bfloat16" if in_parts(call) else call.dtype


def split(x: jax.Array, operand: int, axis: int) -> jax.Array:
    """An operand six times as long along the axis of k: its parts in each of ``PRODUCTS``. What is not finite is all in
    the first part, and meets the other operand's first part alone: beside the 0 of another it would be NaN."""

    def parts(x: jax.Array) -> tuple[jax.Array, ...]:
        finite = jnp.isfinite(x)
        rest, found = jnp.where(finite, x, 0.0), []
        for _ in range(3):
            part = lax.reduce_precision(rest, 8, 7)
            cut = lax.bitcast_convert_type(
                lax.bitcast_convert_type(rest, jnp.uint32) & jnp.uint32(0xFFFF0000), jnp.float32
            )
            found.append(jnp.where(jnp.isfinite(part), part, cut))  # rounded it would be inf
            rest = rest - found[-1]
        return *found, jnp.where(finite, found[0], x)

    found = parts(x)
    chosen = [found[product[operand]] for product in PRODUCTS[:-1]]
    return jnp.concatenate([*chosen, found[-1]], axis).astype(jnp.bfloat16)


def plan_of(call: Call, config: HopperProductConfig, transposed: Collection[str] = ()) -> MatmulPlan:
    """``transposed``: which operands lie in memory transposed."""
    batch, dims = math.prod(call.dims["batch"]), call.dims
    m = dims["m"] if "a" in transposed else rows_of(call)
    a, b = (_entries(call, name) for name in ("a", "b"))
    if m != dims["m"]:
        batch, a = 1, 1
    parts = in_parts(call)
    return MatmulPlan(
        batch,
        m,
        dims["n"],
        dims["k"] * (len(PRODUCTS) if parts else 1),
        a,
        b,
        **config,
        size=jnp.dtype(operands(call)).itemsize,
        out=jnp.dtype(call.outputs["c"][1]),
        a_transposed="a" in transposed and operands(call) != "float32",
        b_transposed="b" in transposed or operands(call) == "float32",
        split=parts,
    )


def rows_of(call: Call) -> int:
    """Rows of a product: where all entries of a batch share one b, they are one tall matrix."""
    batch, m = math.prod(call.dims["batch"]), call.dims["m"]
    return batch * m if (_entries(call, "a"), _entries(call, "b")) == (batch, 1) else m


def _entries(call: Call, name: str) -> int:
    """The entries of an operand's own batch: 1 where it has none, else the whole batch, to which XLA broadcasts what
    lacks some axes of it."""
    return 1 if math.prod(call.arrays[name].shape[:-2]) == 1 else math.prod(call.dims["batch"])


def key(call: Call) -> dict[str, str | int]:
    """The tile of C: its rows are few, or its sums are in chunks, or it is the one that is done first. An element's
    bits follow from the order of k alone, which every tile keeps on the tensor cores; the interpreter's own sums follow
    the tile."""
    if not call.interpret and rows_of(call) <= FEW_ROWS:
        return {"dtype": operands(call), "tile": "few rows"}
    return {"dtype": operands(call), "tile": "deep k" if in_chunks(call) else best_tile((call, ()))}


def in_chunks(call: Call) -> bool:
    """Whether the sum over k goes in chunks."""
    plan = plan_of(call, ANY_TILING)
    return is_deep(plan.n, plan.k)


def best_tile(*products: tuple[Call, Collection[str]]) -> str:
    """The tile of C with which the multiprocessors are done first with these products: each a call, and which of its
    operands lie in memory transposed."""
    calls = [call for call, _ in products]
    largest = TWO_SUMS if any(map(in_parts, calls)) else 128 * 256
    names = [name for name in RATES["tiles"] if math.prod(_extents(name)) <= largest]
    if any(call.interpret for call in calls):
        return names[0]
    return min(names, key=lambda name: sum(cost(call, name, transposed) for call, transposed in products))


def _extents(name: str) -> tuple[int, int]:
    """Rows and columns of a tile of that name."""
    rows, columns = map(int, name.removesuffix(" by pairs").split(" x "))
    return rows, columns


def cost(call: Call, name: str, transposed: Collection[str]) -> float:
    """The rounds of tiles that the multiprocessors make, times what one takes. A pair whose second tile lies beyond the
    last row fetches for nothing."""
    plan = plan_of(call, ANY_TILING, transposed)
    rows, columns = _extents(name)
    below = pl.cdiv(plan.m, rows) or 1
    paired = padded(below, 2) if name.endswith("by pairs") else below
    rounds = pl.cdiv(plan.batch * paired * pl.cdiv(plan.n, columns), HOPPER.cores or 1)
    return rounds * rows * columns / RATES["pieces" if plan.ragged else "tiles"][name] * paired / below


def supports(call: Call, config: HopperProductConfig) -> str | None:
    reason = dtype_refused(call, call.outputs["c"][1])
    if reason:
        return reason
    block_m, block_n, block_k = (config[f"block_{axis}"] for axis in "mnk")
    for name, tile, legal in (("block_m", block_m, (64, 128, 256)), ("block_n", block_n, (64, 128, 256))):
        if tile not in legal:
            return f"{name}={tile} is not supported by wgmma here: use one of {', '.join(map(str, legal))}"
    plan = plan_of(call, config)
    if block_k * plan.size != SWIZZLED_BYTES:
        return (
            f"block_k={block_k} is not the {SWIZZLED_BYTES} bytes that a row of a buffer has: use "
            f"{SWIZZLED_BYTES // plan.size}"
        )
    if block_m * plan.width > 128 * 256 or plan.width > 256:
        return (
            f"a tile of {block_m} x {plan.width} does not fit into the registers of two warpgroups: use at most "
            "128 x 256"
        )
    if math.prod(plan.part) * plan.consumers != block_m * plan.width or plan.part[1] % 64:
        return f"two warpgroups cannot share a tile of {block_m} x {plan.width}: use another block_m or beside"
    if (plan.split or plan.run < plan.steps) and math.prod(plan.part) * 2 > TWO_SUMS:
        return (
            f"k={plan.k} is summed {plan.run * block_k} at a time, and two sums of a tile of {block_m} x {plan.width} "
            "do not fit into the registers of two warpgroups: use at most 128 x 128"
        )
    return over_shared(plan.shared, "block_m, block_n or stages")


def copies(call: Call, config: HopperProductConfig, transposed: Collection[str] = ()) -> str | None:
    """What XLA copies besides, in words. ``transposed``: as of :func:`plan_of`."""
    found = ["a and b are split into parts of bfloat16, six times k deep"] if in_parts(call) else []
    plan = plan_of(call, config, transposed)
    k, a_m, b_n, c_n = _padded_extents(plan)
    turned = {"a": plan.a_transposed, "b": plan.b_transposed}
    found += [f"{name} is transposed" for name in turned if turned[name] != (name in transposed)]
    if k != plan.k:
        found.append(f"k of a and b is padded from {plan.k} to {k}")
    if a_m != plan.m:
        found.append(f"m of a is padded from {plan.m} to {a_m}")
    if b_n != plan.n:
        found.append(f"n of b is padded from {plan.n} to {b_n}")
    if c_n != plan.n:
        found.append(f"c is cut from {c_n} columns to {plan.n}")
    batch = math.prod(call.dims["batch"])
    for name in ("a", "b"):
        if math.prod(call.arrays[name].shape[:-2]) not in (1, batch):
            found.append(f"{name} is repeated along the batch axes that it lacks")
    return "; ".join(found) or None


def _padded_extents(plan: MatmulPlan) -> tuple[int, int, int, int]:
    """k as the kernel sees it, m of A, n of B, and n of what it writes."""
    line = SWIZZLED_BYTES // plan.size
    a_m = padded(plan.m, line) if plan.a_transposed else plan.m
    b_n = plan.n if plan.b_transposed else padded(plan.n, 8 if plan.ragged else line)
    k = padded(plan.k, BULK_BYTES // plan.size)
    return k, a_m, b_n, whole_pieces(plan.n, plan.written)


class Place(NamedTuple):
    """A tile of C in one entry of the batch, from (row, column) on, and which chunk of k: so many steps."""

    part: Any
    entry: Any
    row: Any
    column: Any
    steps: Any


def kernel(ref: Refs, *, plan: MatmulPlan) -> None:
    warpgroup = lax.axis_index("warpgroup")
    tiles_m, tiles_n = plan.tiles

    def tile_at(index: Any) -> Place:
        """In bands of rows of tiles, so that operands stay in L2."""
        (below, beside), mine = plan.paired, lax.axis_index("pair") if plan.pair else 0
        shape = tiles_m // below, tiles_n // beside
        entry, within = lax.div(index, math.prod(shape)), lax.rem(index, math.prod(shape))
        i, j = plgpu.planar_snake(within, shape, 0, plan.band)
        i, j = i * below + mine * (below - 1), j * beside + mine * (beside - 1)
        part, entry = (0, entry) if plan.num_splits == 1 else (lax.div(entry, plan.batch), lax.rem(entry, plan.batch))
        steps = plan.steps if plan.num_splits == 1 else jnp.minimum(plan.chunk, plan.steps - part * plan.chunk)
        return Place(part, entry, i * plan.block_m, j * plan.width, steps)

    def each_tile(work: Callable[[Place, Any], None]) -> None:
        """Call ``work(place, before)`` for the tiles of this block; ``before``: steps until then."""
        tiles = plan.num_splits * plan.batch * tiles_m * tiles_n // math.prod(plan.paired)

        @plgpu.nd_loop((tiles,), collective_axes="block", init_carry=jnp.int32(0))
        def _(info: plgpu.NDLoopInfo, carry: Any) -> Any:
            tile = tile_at(info.index[0])
            work(tile, carry)
            return carry + tile.steps

    def producer() -> None:
        each_tile(partial(produce, ref, plan))
        drain(ref.free)

    def consumer() -> None:
        free_all(ref.free)
        each_tile(partial(consume, ref, plan, warpgroup))

    warp_specialized(warpgroup, plan.consumers, producer, consumer)


def a_buffers(plan: MatmulPlan, dtype: Any) -> Any:
    """``scratch`` for :func:`launch`: tiles of A or of A^T."""
    if plan.a_transposed:
        return tiled_buffer((plan.stages, plan.block_k, plan.block_m), dtype)
    return Swizzled((plan.stages, plan.block_m, plan.block_k), dtype)


def b_buffers(plan: MatmulPlan, dtype: Any) -> Any:
    """``scratch`` for :func:`launch`: tiles of B, each in its pieces, or of B^T."""
    pieces = plan.stages, plan.width // plan.piece
    if plan.b_transposed:
        return Swizzled((*pieces, plan.width, plan.block_k), dtype)
    form = *pieces, plan.block_k, plan.piece
    return Swizzled(form, dtype) if plan.ragged else tiled_buffer(form, dtype)


def rings(ref: Refs, plan: MatmulPlan) -> tuple[BufferViews, BufferViews]:
    """These, as the copy engine and as tensor cores see them."""
    a = BufferViews(ref.a_ring, ref.a_ring) if plan.a_transposed else ref.a_ring
    return a, ref.b_ring if plan.ragged or plan.b_transposed else BufferViews(ref.b_ring, ref.b_ring)


def produce(ref: Refs, plan: MatmulPlan, tile: Place, before: Any) -> None:
    """Bring what one tile of C is made of. Of what a pair of blocks share each fetches a half, for both."""
    for_both = {pair: {"collective_axes": "pair"} if plan.pair == pair else {} for pair in ClusterPair}
    of_a, of_b = (tile.entry if batch > 1 else 0 for batch in (plan.a_batch, plan.b_batch))
    a_ring, b_ring = rings(ref, plan)

    @pl.loop(0, tile.steps)
    def _(step: Any) -> None:
        buffer, k = lax.rem(before + step, plan.stages), (tile.part * plan.chunk + step) * plan.block_k
        plgpu.barrier_wait(ref.free.at[buffer])
        rows, deep = pl.ds(tile.row, plan.block_m), pl.ds(k, plan.block_k)
        a = ref.a.at[(of_a, *((deep, rows) if plan.a_transposed else (rows, deep)))]
        plgpu.copy_gmem_to_smem(a, a_ring.copied.at[buffer], ref.arrived.at[buffer], **for_both[ClusterPair.BESIDE])
        for piece in range(plan.width // plan.piece):
            columns = pl.ds(tile.column + piece * plan.piece, plan.piece)
            b = ref.b.at[(of_b, *((columns, deep) if plan.b_transposed else (deep, columns)))]
            plgpu.copy_gmem_to_smem(
                b, b_ring.copied.at[buffer, piece], ref.arrived.at[buffer], **for_both[ClusterPair.BELOW]
            )


def consume(ref: Refs, plan: MatmulPlan, warpgroup: Any, tile: Place, before: Any) -> None:
    """Make this warpgroup's part of one tile of C, and write it."""
    rows, columns = plan.part
    mine = pl.ds(warpgroup * plan.part[plan.along], plan.part[plan.along])
    width = min(columns, plan.piece)

    def chain(steps: Any, before: Any) -> tuple[Any, ...]:
        work = partial(multiply, ref, plan, warpgroup, steps, before)
        return pl.run_scoped(work, *[plgpu.ACC((rows, width), jnp.float32)] * (columns // width))

    def run(i: Any, total: tuple[Any, ...]) -> tuple[Any, ...]:
        done = i * plan.run
        more = chain(jnp.minimum(plan.run, tile.steps - done), before + done)
        return tuple(x + y for x, y in zip(total, more, strict=True))

    if plan.parts == plan.num_splits and not plan.split:
        c = chain(tile.steps, before)
    else:
        zeros = plgpu.layout_cast(jnp.zeros((rows, width), jnp.float32), plgpu.Layout.WGMMA)
        c = lax.fori_loop(0, pl.cdiv(tile.steps, plan.run), run, (zeros,) * (columns // width))
    write(ref, plan, warpgroup, mine, tile, tuple(x.astype(plan.written) for x in c))


def multiply(ref: Refs, plan: MatmulPlan, warpgroup: Any, steps: Any, before: Any, *sums: Any) -> tuple[Any, ...]:
    """The sums of products of so many buffers, for the rows or columns of a tile that are this warpgroup's: of all its
    columns, or of a piece each."""
    mine = pl.ds(warpgroup * plan.part[plan.along], plan.part[plan.along])
    first = warpgroup * len(sums) if plan.along == 1 else 0
    a_ring, b_ring = rings(ref, plan)

    def left(buffer: Any) -> Any:
        a = a_ring.tiled.at[buffer]
        if plan.a_transposed:
            return (a.at[:, mine] if plan.along == 0 else a).T
        return a.at[mine] if plan.along == 0 else a

    def right(buffer: Any, i: int) -> Any:
        if plan.ragged:
            return b_ring.tiled.at[buffer, first + i]
        b = b_ring.tiled.at[buffer, 0]
        if plan.b_transposed:
            return (b.at[mine] if plan.along == 1 else b).T
        return b.at[:, mine] if plan.along == 1 else b

    @pl.loop(0, steps)
    def _(step: Any) -> None:
        buffer = lax.rem(before + step, plan.stages)
        plgpu.barrier_wait(ref.arrived.at[buffer])
        for i, acc in enumerate(sums):
            plgpu.wgmma(acc, left(buffer), right(buffer, i))
        plgpu.wgmma_wait(len(sums))  # the step before is done with its buffer

        @pl.when(step > 0)
        def _() -> None:
            plgpu.barrier_arrive(ref.free.at[lax.rem(before + step - 1, plan.stages)])

    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(ref.free.at[lax.rem(before + steps - 1, plan.stages)])
    # Compilers know of no register that a wait for products is for: of few steps, which they lay out one after another,
    # they did with sums what comes next before the wait.
    return tuple(lax.optimization_barrier(acc[...]) for acc in sums)


def write(ref: Refs, plan: MatmulPlan, warpgroup: Any, mine: Any, tile: Place, c: tuple[Any, ...]) -> None:
    """Send this warpgroup's part of one tile of C on its way."""
    rows, columns = plan.part
    first_row = tile.row + (mine.start if plan.along == 0 else 0)
    first_column = tile.column + (mine.start if plan.along == 1 else 0)
    entry = tile.part * plan.batch + tile.entry
    pieces = [*itertools.product(range(0, rows, OUT_ROWS), range(0, columns, plan.out_columns))]
    for (slot, leaving), (i, j) in zip(in_slots(len(pieces), OUT_SLOTS), pieces, strict=True):
        plgpu.wait_smem_to_gmem(leaving, wait_read_only=True)
        within, at = divmod(j, c[0].shape[1])
        ref.written.tiled[warpgroup, slot] = c[within][i : i + OUT_ROWS, at : at + plan.out_columns]
        plgpu.commit_smem()
        there = ref.c.at[entry, pl.ds(first_row + i, OUT_ROWS), pl.ds(first_column + j, plan.out_columns)]
        plgpu.copy_smem_to_gmem(ref.written.copied.at[warpgroup, slot], there)


@BACKEND.implements("matmul", key=key, supports=supports, config=HopperProductConfig, copies=copies, same_bits=True)
def matmul(call: Call, config: HopperProductConfig) -> tuple[jax.Array]:
    return (product(call, config, call.arrays),)


def product(
    call: Call, config: HopperProductConfig, arrays: Mapping[str, jax.Array], transposed: Collection[str] = ()
) -> jax.Array:
    """C of a call on these arrays, of which those in ``transposed`` are (..., k, m) and (..., n, k)."""
    plan = plan_of(call, config, transposed)
    a, b = _as_read(call, plan, arrays, transposed)
    dtype, columns = a.dtype, _padded_extents(plan)[-1]
    # What a block fetches for both may come where the other still multiplies, so both say when that is free.
    blocks = math.prod(plan.paired)
    free = partial(plgpu.ClusterBarrier, collective_axes=("pair",)) if plan.pair else plgpu.Barrier
    found = launch(
        call,
        partial(kernel, plan=plan),
        "matmul",
        (min(max(1, (HOPPER.cores or 1) // blocks), plan.num_splits * plan.batch * math.prod(plan.tiles) // blocks),),
        inputs={"a": a, "b": b},
        outputs={"c": jax.ShapeDtypeStruct((plan.num_splits * plan.batch, plan.m, columns), plan.written)},
        scratch={
            "a_ring": a_buffers(plan, dtype),
            "arrived": plgpu.Barrier(num_arrivals=1 + plan.width // plan.piece, num_barriers=plan.stages),
            "b_ring": b_buffers(plan, dtype),
            "free": free(num_arrivals=plan.consumers, num_barriers=plan.stages),
            "written": Swizzled((plan.consumers, OUT_SLOTS, OUT_ROWS, plan.out_columns), plan.written),
        },
        warpgroups=plan.consumers + 1,
        cluster={"pair": 2} if plan.pair else {},
    )
    c = found["c"] if plan.num_splits == 1 else _added_up(call, found["c"], plan)
    return (c if columns == plan.n else c[..., : plan.n]).reshape(call.outputs["c"][0])


def _as_read(
    call: Call, plan: MatmulPlan, arrays: Mapping[str, jax.Array], transposed: Collection[str]
) -> tuple[jax.Array, jax.Array]:
    """A and B as the kernel reads them, (entries, rows, columns): split, transposed and padded by XLA where they are
    not so already."""
    k, a_m, b_n, _ = _padded_extents(plan)

    def operand_read(name: str, operand: int, entries: int, turned: bool, rows: int, columns: int) -> jax.Array:
        x, last_is_k = _with_whole_batch(call, arrays[name]), (name == "a") != (name in transposed)
        x = split(x, operand, -1 if last_is_k else -2) if plan.split else x
        x = jnp.swapaxes(x, -1, -2) if turned != (name in transposed) else x
        x = padded_rows(x.reshape(entries, -1, x.shape[-1]), columns)
        return jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0))) if rows > x.shape[1] else x

    a = operand_read("a", 0, plan.a_batch, plan.a_transposed, *((k, a_m) if plan.a_transposed else (plan.m, k)))
    b = operand_read("b", 1, plan.b_batch, plan.b_transposed, *((plan.n, k) if plan.b_transposed else (k, b_n)))
    return a, b


def _added_up(call: Call, parts: jax.Array, plan: MatmulPlan) -> jax.Array:
    """(batch, m, n): the sums of all chunks of k, in order."""
    shape = plan.batch, plan.m, parts.shape[-1]
    terms = ColumnTerms(("c",), lambda ref, row, columns: {"c": columns(ref.parts.at[row])})
    (c,) = column_sums(call, {"parts": parts.reshape(plan.num_splits, -1)}, {}, terms, plan.out).values()
    return c.reshape(shape)


def _with_whole_batch(call: Call, x: jax.Array) -> jax.Array:
    """An operand with all axes of the batch, or as it is where it has one entry."""
    if math.prod(x.shape[:-2]) in (1, math.prod(call.dims["batch"])):
        return x
    return jnp.broadcast_to(x, (*call.dims["batch"], *x.shape[-2:]))
