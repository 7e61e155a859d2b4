"""Matrix multiplication on TPUs: C = A B, one output block at a time, k innermost.

a: (*#batch, m, k), b: (*#batch, k, n) -> c: (*batch, m, n). The grid is (*batch, m blocks, n blocks, k blocks), or with
n blocks before m blocks where that moves less (`by_columns`) or gives two cores as much (`for_two`). Every k step
multiplies a (block_m, block_k) by a (block_k, block_n) block on the matrix unit and adds the product to a float32
accumulator that stays in VMEM; the last step rounds it once to the output's dtype. Batch axes are grid axes: an operand
that is broadcast along one answers with block 0 there, so nothing is repeated in memory. Rows of batched a that share
one b are one taller matrix.

block_m, block_n: the output block (sublanes, lanes); block_k: the share of k resident at a step. Larger blocks read
each operand fewer times. They are the most that a block holds: an extent is cut evenly into as many as that takes. A
block_k of all of k needs no accumulator, and the block of the outer axis then stays in VMEM while those of the inner
one go by. b is read as XLA keeps it, by rows or by columns.

Source: the blocked product of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008),
section 4, with VMEM as the cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs, even_block, padded, row_block, step_along, within
from portakern.backends.pallas.tpu._chip import (
    LANES,
    dot,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
    vmem_limit,
)
from portakern.core import targets
from portakern.core.call import Call


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"], "k": call.dims["k"]}


def default_tiling(call: Call) -> dict[str, int]:
    """The blocks with which ROWS rows cost least, by what products, waits and memory take. Of n, k and the chip alone;
    where that is not known, of the one with the slowest memory."""
    hardware = targets.HARDWARE.get(call.target.arch) or targets.HARDWARE[SLOWEST]
    unknown = call.target.arch not in targets.HARDWARE
    n, k, size = call.dims["n"], call.dims["k"], 4 if call.dtype in ("float32", "float64") else 2
    clock = hardware.clock or targets.HARDWARE[SLOWEST].clock or 1.0
    passes, cores = FLOAT32_PASSES if size == 4 else 1, hardware.cores or 1
    rate = (hardware.flops["bfloat16"] or 1.0) / clock / passes
    bandwidth = (hardware.bandwidth or 1.0) / clock
    limit = targets.least("tpu", "vmem") if unknown else vmem_limit(call)
    wide = 2 * math.sqrt(rate * passes / 2 / cores)  # twice the side of all its matrix units as one

    def cost(tiles: tuple[int, ...]) -> float:
        bm, bn, bk = tiles[0], even_block(n, tiles[1], LANES), even_block(k, tiles[2], LANES)
        if resident_bytes(bm, bn, bk, size, size) > limit or bm * bn * bk * passes > MOST:
            return math.inf
        columns, depth = pl.cdiv(n, bn), pl.cdiv(k, bk)
        products = ROWS * 2 * bn * columns * bk * depth / rate
        of_register = 1024 * 2 * bk / rate * cores  # cycles that the products of a register take one core
        products += OUT / of_register * ROWS * bn * columns * depth / 1024 / cores
        added = ADD * bm * bn if depth > 1 else 0.0
        narrow = bn < min(n, wide) or bm < wide
        waits = ((NARROW if narrow else STEP * wide) + added) * ROWS / bm * columns * depth / cores
        first_and_last = size * (bm * bk + bk * bn + bm * bn) * cores  # nothing else goes on meanwhile
        of_a, of_b, down = ROWS * bk * depth, bk * depth * bn * columns, ROWS / bm
        again = of_a * columns + of_b * down if depth > 1 else min(of_a + of_b * down, of_b + of_a * columns)
        moved = size * (again + ROWS * n)
        longer, shorter = max(products + waits, moved / bandwidth), min(products + waits, moved / bandwidth)
        return longer + SHARE * shorter + first_and_last / bandwidth

    best = min(itertools.product(SIZES, SIZES, (*SIZES, 2 * SIZES[-1])), key=cost)
    return dict(zip(("block_m", "block_n", "block_k"), best, strict=True))


SIZES = (256, 512, 1024, 2048)
ROWS = 4096
MOST = 2**32  # multiplications of a step: its code is as long as they are many, and takes as long to compile
SLOWEST = "v5e"
FLOAT32_PASSES = 6  # products of bfloat16 parts that make one of float32
# Cycles that a step waits beyond its code, by libtpu's estimates: for each lane of the matrix units beside each other,
# and of blocks that are narrower than those.
STEP, NARROW = 0.2, 500
OUT = 3.0  # cycles of taking a register's results out of the units, times those that hide them: squared cycles
ADD = 0.4 / 1024  # cycles an element of adding a step's products to those before, where there are any
SHARE = 0.02  # of what hides behind what takes longer: with other than ROWS rows it may be that which takes longer


def blocks(call: Call, tiling: Mapping[str, int], m: int) -> tuple[int, int, int]:
    """(block_m, block_n, block_k) of a call whose a has m rows for each b."""
    return (
        row_block(call, m, tiling["block_m"], sublanes(call.arrays["a"].dtype), even=True),
        even_block(call.dims["n"], tiling["block_n"], LANES),
        even_block(call.dims["k"], tiling["block_k"], LANES),
    )


def resident(call: Call, bm: int, bn: int, bk: int) -> int:
    """The VMEM, in bytes, of one step: two blocks of each operand, so that one is moved while the other is used, one
    accumulator, and a fifth more: the compiler keeps values there for which it has no registers, up to 15 % of the rest
    at 1024 x 1024 x 1024. Of float32 operands it keeps bfloat16 parts there too, and the sum of their products; of a's,
    where b's block is narrow, as much as four blocks of a."""
    return resident_bytes(bm, bn, bk, call.arrays["a"].dtype.itemsize, jnp.dtype(call.outputs["c"][1]).itemsize)


def resident_bytes(bm: int, bn: int, bk: int, size: int, out: int) -> int:
    """The same for operands and results of so many bytes an element."""
    operands = bm * bk + bk * bn
    blocks = 2 * operands * size + 2 * bm * bn * out + 4 * bm * bn
    if size < 4:
        return blocks * 6 // 5
    return max(blocks * 6 // 5, (blocks + 4 * (operands + bm * bn)) * 21 // 20, blocks + 4 * bm * (4 * bk + bn))


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    m, n, k = (call.dims[axis] for axis in "mnk")
    needed = resident(call, *blocks(call, tiling, m))
    return (
        dtype_refused(call, call.outputs["c"][1])
        or off_grid("block_m", tiling["block_m"], m, sublanes(call.arrays["a"].dtype))
        or off_grid("block_n", tiling["block_n"], n, LANES)
        or off_grid("block_k", tiling["block_k"], k, LANES)
        or over_vmem(call, needed, "block_m, block_n or block_k")
    )


def within_k(x: jax.Array, axis: int, start: Any, k: int, few: bool = False) -> jax.Array:
    """A block of an operand whose ``axis`` is k's and begins at ``start``, with 0 for what lies beyond k: both operands
    need it, since anything lies there, and 0 * NaN is NaN.

    Only the last elements of a block can lie there, as many as all blocks together hold beyond k: only the registers
    that hold those are chosen from. Of an array with ``few`` rows, less than a register's, Mosaic chooses in float32
    alone.
    """
    size = x.shape[axis]
    sure = (size - -k % size) // LANES * LANES
    if sure == size:
        return x
    last = lax.slice_in_dim(x, sure, size, axis=axis)
    last = within(last.astype(jnp.float32) if few else last, axis, start + sure, k, of=size).astype(x.dtype)
    return last if sure == 0 else jnp.concatenate([lax.slice_in_dim(x, 0, sure, axis=axis), last], axis)


def kernel(ref: Refs, *, k: int, k_of_b: int, axis: int, few: bool) -> None:
    """``k_of_b``: which axis of b's blocks is k's; ``axis``: the grid axis along which the blocks of k follow each
    other; ``few``: of `within_k`."""
    step, last = step_along(axis), pl.num_programs(axis) - 1
    if "acc" not in ref:
        a, b = within_k(ref.a[...], 1, 0, k, few), within_k(ref.b[...], k_of_b, 0, k)
        ref.c[...] = dot(a, b, (1, k_of_b)).astype(ref.c.dtype)
        return

    @pl.when(step == 0)
    def start() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    a, b = ref.a[...], ref.b[...]
    start_of_k = step * a.shape[1]
    a, b = within_k(a, 1, start_of_k, k, few), within_k(b, k_of_b, start_of_k, k)
    ref.acc[...] += dot(a, b, (1, k_of_b))

    @pl.when(step == last)
    def finish() -> None:
        ref.c[...] = ref.acc[...].astype(ref.c.dtype)


def lies_by_columns(rows: int, columns: int) -> bool:
    """Whether XLA keeps a matrix in device memory column by column: it does where that pads it less. The axis along
    which elements lie is padded to whole lanes, the other to 8 rows."""

    def stored(major: int, minor: int) -> int:
        return padded(major, 8) * padded(minor, LANES)

    return stored(columns, rows) < stored(rows, columns)


def by_columns(m: int, n: int, k: int, bm: int, bn: int, bk: int) -> bool:
    """Whether blocks of n follow each other in the grid's outer axis and those of m in the inner one, which moves
    fewer bytes: with all of k in a block, the outer axis's operand is read once and the other's for each of its
    blocks."""
    down, columns = pl.cdiv(m, bm), pl.cdiv(n, bn)
    return bk >= k and k * n + columns * m * k < m * k + down * k * n


def for_two(m: int, n: int, bm: int, bn: int, columns_first: bool) -> tuple[int, int, bool]:
    """The blocks, and whether those of n are the grid's outer axis, where each of two cores takes half of that: an axis
    of an even number of blocks, if need be of one more than there were."""
    down, columns = pl.cdiv(m, bm), pl.cdiv(n, bn)
    if (columns if columns_first else down) % 2 == 0:
        return bm, bn, columns_first
    if (down if columns_first else columns) % 2 == 0:
        return bm, bn, not columns_first
    rows = padded(pl.cdiv(m, down + 1), 2 * sublanes(jnp.float32))
    if down * rows < m:  # and not so few rows that one block less still holds them
        return rows, bn, False
    return bm, bn, columns_first


def operand(shape: tuple[int, ...], block_shape: tuple[int, int], axes: tuple[int, int], rank: int) -> pl.BlockSpec:
    """Blocks of an operand in a grid of ``rank`` axes.

    The operand's matrix axes follow the grid axes ``axes``, its batch axes the grid's batch axes, unless their extent
    is 1.
    """
    batch = shape[:-2]
    first = rank - 3 - len(batch)

    def index(*step: Any) -> tuple[Any, ...]:
        at_batch = (0 if extent == 1 else step[first + d] for d, extent in enumerate(batch))
        return (*at_batch, step[axes[0]], step[axes[1]])

    return pl.BlockSpec((*(None for _ in batch), *block_shape), index)


@BACKEND.implements("matmul", key=key, tiling=default_tiling, supports=supports)
def matmul(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    a, b = call.arrays["a"], call.arrays["b"]
    shape, dtype = call.outputs["c"]
    if math.prod(b.shape[:-2]) == 1:
        a, b = a.reshape(-1, a.shape[-1]), b.reshape(b.shape[-2:])
    batch = shape[:-2] if b.ndim > 2 or a.ndim > 2 else ()
    (m, k), n = a.shape[-2:], b.shape[-1]
    bm, bn, bk = blocks(call, tiling, m)
    columns_first = by_columns(m, n, k, bm, bn, bk)
    hardware = targets.HARDWARE.get(call.target.arch)
    if hardware and (hardware.cores or 1) > 1 and math.prod(batch) == 1:
        bm, bn, columns_first = for_two(m, n, bm, bn, columns_first)
    outer = (pl.cdiv(n, bn), pl.cdiv(m, bm)) if columns_first else (pl.cdiv(m, bm), pl.cdiv(n, bn))
    grid = (*batch, *outer, pl.cdiv(k, bk))
    rank = len(grid)
    rows, columns, depth = rank - 3, rank - 2, rank - 1
    if columns_first:
        rows, columns = columns, rows
    turned = lies_by_columns(k, n)
    products = math.prod(batch) * m * n * k
    bytes_of_a = products // n * pl.cdiv(n, bn) * a.dtype.itemsize
    bytes_of_b = products // m * pl.cdiv(m, bm) * b.dtype.itemsize
    found = launch(
        call,
        partial(kernel, k=k, k_of_b=1 if turned else 0, axis=depth, few=m < sublanes(jnp.float32)),
        "portakern_matmul",
        grid,
        in_order=1,
        inputs={
            "a": (a, operand(a.shape, (bm, bk), (rows, depth), rank)),
            "b": (jnp.swapaxes(b, -1, -2), operand(b.shape, (bn, bk), (columns, depth), rank))
            if turned
            else (b, operand(b.shape, (bk, bn), (depth, columns), rank)),
        },
        outputs={
            "c": (
                jax.ShapeDtypeStruct((*batch, m, n), dtype),
                operand((*batch, m, n), (bm, bn), (rows, columns), rank),
            )
        },
        scratch={"acc": (bm, bn)} if pl.cdiv(k, bk) > 1 else {},
        vmem=resident(call, bm, bn, bk),
        cost=pl.CostEstimate(flops=2 * products, transcendentals=0, bytes_accessed=bytes_of_a + bytes_of_b),
    )
    return (found["c"].reshape(shape),)
