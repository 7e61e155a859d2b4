"""Matrix multiplication on TPUs: C = A B, one output block at a time, k innermost.

a: (*#batch, m, k), b: (*#batch, k, n) -> c: (*batch, m, n). The grid is (*batch, m blocks, n blocks, k blocks), or with
n blocks before m blocks where that moves less (`by_columns`) or gives two cores as much (`for_two`). Every k step
multiplies a (block_m, block_k) by a (block_k, block_n) block on the matrix unit and adds the product to a float32
accumulator that stays in VMEM; the last step rounds it once to the output's dtype. Batch axes are grid axes: an operand
that is broadcast along one answers with block 0 there, so nothing is repeated in memory. Rows of batched a that share
one b are one taller matrix.

The gradients are d_a = d_c b^T and d_b = a^T d_c, each summed over the batch axes along which its operand was
broadcast. A batch axis that is summed is one more factor of the contraction, folded in beside n (d_a) or m (d_b), so
that each gradient is one product of this module. Transposing and folding are left to XLA.

block_m, block_n: the output block (sublanes, lanes); block_k: the share of k resident at a step. Larger blocks read
each operand fewer times. They are the most that a block holds: an extent is cut evenly into as many as that takes. A
block_k of all of k needs no accumulator, and the block of the outer axis then stays in VMEM while those of the inner
one go by. b is read as XLA keeps it, by rows or by columns.

Source: the blocked product of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008),
section 4, with VMEM as the cache.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import ProductConfig
from portakern.backends.pallas.lib.blocks import Refs, even_block, padded, row_block, step_along, within
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    LANES,
    dot,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
    vmem_limit,
)
from portakern.backends.pallas.lib.mosaic_tpu.layout import native_axes
from portakern.core import targets
from portakern.core.binder import sibling
from portakern.core.call import Call
from portakern.core.registry import find_spec
from portakern.specs.matmul import batch_axes, product_dtype
from portakern.specs.matmul import matmul as matmul_spec


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"], "k": call.dims["k"]}


class Chip(NamedTuple):
    """What the blocks of a product hang on: the VMEM that a kernel may have in bytes, its operands' bytes an element,
    operations and bytes a cycle, the products of bfloat16 that make one of its own, cores that share a launch, and the
    result's columns that are made together (`at_once`)."""

    vmem: int
    size: int
    rate: float
    bandwidth: float
    passes: int
    cores: int
    at_once: int

    @classmethod
    def of(cls, call: Call) -> Chip:
        """A call's; where that is not known, the one with the slowest memory, and what every one has of VMEM."""
        known = call.target.arch in targets.HARDWARE
        hardware = targets.HARDWARE[call.target.arch if known else SLOWEST]
        clock = hardware.clock or targets.HARDWARE[SLOWEST].clock or 1.0
        size = 4 if call.dtype in ("float32", "float64") else 2
        passes = FLOAT32_PASSES if size == 4 else 1
        rate, bandwidth = (hardware.flops["bfloat16"] or 1.0) / clock / passes, (hardware.bandwidth or 1.0) / clock
        vmem = vmem_limit(call) if known else targets.least("tpu", "vmem")
        return cls(vmem, size, rate, bandwidth, passes, hardware.cores or 1, at_once(call))

    @property
    def side(self) -> int:
        """Rows, and columns, of a matrix unit."""
        return round(math.sqrt(self.rate * self.passes / 2 / self.cores / UNITS))


def cycles(chip: Chip, m: int, n: int, k: int, tiles: tuple[int, int, int]) -> float:
    """About how long a product takes, the longer of two things and a little of the other: units and steps, of which the
    first waits for its windows and the last for the result to leave; and memory."""
    bm = even_block(m, tiles[0], sublanes(jnp.bfloat16) * 2 // chip.size)
    bn, bk = even_block(n, tiles[1], LANES), even_block(k, tiles[2], LANES)
    most = min(tiles[0], padded(m, LANES))
    needed = resident_bytes(most, bn, bk, chip.size, chip.size, chip.at_once)
    if needed > chip.vmem or most * bn * bk * chip.passes > MOST:
        return math.inf
    down, columns, depth = pl.cdiv(m, bm), pl.cdiv(n, bn), pl.cdiv(k, bk)
    rows, wide = down * bm, UNITS * chip.side
    products = rows * 2 * padded(bn, chip.side) * columns * padded(bk, chip.side) * depth / chip.rate
    narrow = bn < min(n, wide) or bm < min(m, wide)
    a_step = (NARROW if narrow else STEP) * chip.side + (ADD[chip.size] / chip.side * bm * bn if depth > 1 else 0.0)
    first_and_last = chip.size * (bm * bk + bk * bn + bm * bn) * chip.cores / chip.bandwidth
    issued = products + a_step * down * columns * depth / chip.cores + first_and_last
    a, b = rows * bk * depth, bk * depth * bn * columns
    read = a * columns + b * down if depth > 1 else min(a + b * down, b + a * columns)
    memory = chip.size * (read + rows * n) / chip.bandwidth
    return max(issued, memory) + SHARE * min(issued, memory)


@functools.cache
def least(chip: Chip, n: int, k: int) -> tuple[int, int, int]:
    """The blocks with which products of few and of many rows lose least against each's own best; a longer one counts
    more. block_k, which decides in which order a row is summed, hangs on n, k and the chip alone."""
    each = {tiles: [cycles(chip, m, n, k, tiles) for m in ROWS] for tiles in itertools.product(SIZES, SIZES, DEPTHS)}
    best = [min(found) for found in zip(*each.values(), strict=True)]

    def lost(found: Iterable[float]) -> float:
        return sum(math.sqrt(m) * x / y for m, x, y in zip(ROWS, found, best, strict=True))

    def depth_loses(bk: int) -> float:
        return lost(min(found) for found in zip(*(each[*pair, bk] for pair in PAIRS), strict=True))

    bk = min(DEPTHS, key=depth_loses)
    return *min(PAIRS, key=lambda pair: lost(each[*pair, bk])), bk


@functools.cache
def least_of(chip: Chip, m: int, n: int, k: int, block_k: int) -> tuple[int, int]:
    """block_m and block_n with which a product of m rows takes least."""
    return min(PAIRS, key=lambda pair: cycles(chip, m, n, k, (*pair, block_k)))


def default_tiling(call: Call) -> ProductConfig:
    """The blocks with which products of few and of many rows take least (`least`)."""
    block_m, block_n, block_k = least(Chip.of(call), call.dims["n"], call.dims["k"])
    return ProductConfig(block_m=block_m, block_n=block_n, block_k=block_k)


def fit(call: Call, config: ProductConfig) -> ProductConfig:
    """In place of the default's block_m and block_n those that suit the call's rows: an accelerator's units sum a row
    in one order whatever these are."""
    if call.interpret or config != default_tiling(call):
        return config
    best = least_of(Chip.of(call), rows_of(call), call.dims["n"], call.dims["k"], config.block_k)
    return config.replace(block_m=best[0], block_n=best[1])


SIZES = (256, 512, 1024, 2048)
PAIRS = tuple(itertools.product(SIZES, SIZES))
DEPTHS = (*SIZES, 2 * SIZES[-1])
ROWS = (320, 640, 1280, 2560, 5120)
MOST = 2**32  # multiplications of a step: its code is as long as they are many, and takes as long to compile
SLOWEST = "v5e"
FLOAT32_PASSES = 6  # products of bfloat16 parts that make one of float32
UNITS = 4  # matrix units of a core
# Cycles that a step waits beyond its products, by libtpu's estimates, for each lane of a matrix unit; and of blocks
# that are narrower than the units of a core beside each other.
STEP, NARROW = 1.4, 2.75
# Cycles a row of a unit's width, of adding a step's products to those before, where there are any, by bytes an element:
# those of float32 parts are added to each other too.
ADD = {2: 0.11, 4: 0.33}
SHARE = 0.02  # of what hides behind what takes longer: as little of it as may be


def rows_of(call: Call) -> int:
    """The rows of a for each b: those of all batch entries that share one b are one matrix."""
    shared = math.prod(call.arrays["b"].shape[:-2]) == 1
    return call.dims["m"] * (math.prod(call.dims["batch"]) if shared else 1)


def blocks(call: Call, config: ProductConfig, m: int) -> tuple[int, int, int]:
    """(block_m, block_n, block_k) of a call whose a has m rows for each b."""
    return (
        row_block(call, m, config.block_m, sublanes(call.arrays["a"].dtype), even=True),
        even_block(call.dims["n"], config.block_n, LANES),
        even_block(call.dims["k"], config.block_k, LANES),
    )


def resident(call: Call, bm: int, bn: int, bk: int) -> int:
    """The VMEM, in bytes, of one step: two blocks of each operand, so that one is moved while the other is used, one
    accumulator, and what the compiler keeps there for want of registers: of 16-bit operands a block of a, beside a byte
    for each element of the result, or the float32 sums of those columns that are made together (`at_once`) where these
    are more, and a little. Of float32 operands it keeps bfloat16 parts, the sum of their products, and where b's block
    is narrow as much as four blocks of a and a fifth of one."""
    size, out = call.arrays["a"].dtype.itemsize, jnp.dtype(call.outputs["c"][1]).itemsize
    return resident_bytes(bm, bn, bk, size, out, at_once(call))


LITTLE = 2**19
# Columns of a result whose sums leave the matrix units together, by chip, as libtpu orders the products of one step:
# those of one unit, 128 or 256 lanes wide, since the units share out rows; v7x's two take the same rows beside
# different columns. Until they are added to the accumulator the sums of a whole block's rows are kept.
AT_ONCE = {"v4": 128, "v5e": 128, "v5p": 128, "v6e": 256, "v7x": 512}


def at_once(call: Call) -> int:
    """Columns of the result that a call's chip makes together; of an unknown chip as `Chip.of` takes it."""
    return AT_ONCE.get(call.target.arch, AT_ONCE[SLOWEST])


def resident_bytes(bm: int, bn: int, bk: int, size: int, out: int, columns: int) -> int:
    """The same for operands and results of so many bytes an element, and so many columns that are made together."""
    operands = bm * bk + bk * bn
    blocks = 2 * operands * size + 2 * bm * bn * out + 4 * bm * bn
    if size < 4:
        return blocks + size * bm * bk * 21 // 20 + max(bm * bn, 4 * bm * min(bn, columns)) + LITTLE
    parts = max((blocks + 4 * (operands + bm * bn)) * 21 // 20, blocks + 4 * bm * (4 * bk * 21 // 20 + bn))
    return max(blocks * 6 // 5, parts + LITTLE)


def supports(call: Call, config: ProductConfig) -> str | None:
    m, n, k = rows_of(call), call.dims["n"], call.dims["k"]
    needed = resident(call, *blocks(call, config, m))
    return (
        dtype_refused(call, call.outputs["c"][1])
        or off_grid("block_m", config.block_m, m, sublanes(call.arrays["a"].dtype))
        or off_grid("block_n", config.block_n, n, LANES)
        or off_grid("block_k", config.block_k, k, LANES)
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
    last = within(last.astype(jnp.float32) if few else last, axis, start + sure, k, divisor=size).astype(x.dtype)
    return last if sure == 0 else jnp.concatenate([lax.slice_in_dim(x, 0, sure, axis=axis), last], axis)


def summed(
    ref: Refs,
    a: Any,
    b: Any,
    finish: Callable[[Any], None],
    *,
    k: int,
    k_of_b: int,
    axis: int,
    few: bool,
    few_of_b: bool,
) -> None:
    """A step of the sum over k: add the product of a block of a and one of b to those before, and at the last step give
    ``finish`` the float32 sums of the output's block. Where one step meets all of k there is no accumulator.

    ``k_of_b``: which axis of b's blocks is k's; ``axis``: the grid axis along which the blocks of k follow each other;
    ``few``, ``few_of_b``: of `within_k`, for a and for b.
    """
    step, last = step_along(axis), pl.num_programs(axis) - 1

    def operands() -> tuple[Any, Any]:
        of_a, of_b = a[...], b[...]
        start_of_k = step * of_a.shape[1]
        return within_k(of_a, 1, start_of_k, k, few), within_k(of_b, k_of_b, start_of_k, k, few_of_b)

    if "acc" not in ref:
        finish(dot(*operands(), (1, k_of_b)))
        return

    @pl.when(step == 0)
    def start() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    x, y = operands()
    ref.acc[...] += dot(x, y, (1, k_of_b))
    pl.when(step == last)(lambda: finish(ref.acc[...]))


def kernel(ref: Refs, **of_k: Any) -> None:
    """``of_k``: of `summed`."""

    def write(c: Any) -> None:
        ref.c[...] = c.astype(ref.c.dtype)

    summed(ref, ref.a, ref.b, write, **of_k)


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


@BACKEND.implements("matmul", key=key, tiling=default_tiling, fit=fit, supports=supports, config=ProductConfig)
def matmul(call: Call, config: ProductConfig) -> tuple[jax.Array]:
    a, b = call.arrays["a"], call.arrays["b"]
    shape, dtype = call.outputs["c"]
    if math.prod(b.shape[:-2]) == 1:
        a, b = a.reshape(-1, a.shape[-1]), b.reshape(b.shape[-2:])
    batch = shape[:-2] if b.ndim > 2 or a.ndim > 2 else ()
    (m, k), n = a.shape[-2:], b.shape[-1]
    bm, bn, bk = blocks(call, config, m)
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
    turned = native_axes(b.shape) == (b.ndim - 1, b.ndim - 2)  # XLA keeps b column by column
    products = math.prod(batch) * m * n * k
    bytes_of_a = products // n * pl.cdiv(n, bn) * a.dtype.itemsize
    bytes_of_b = products // m * pl.cdiv(m, bm) * b.dtype.itemsize
    found = launch(
        call,
        partial(
            kernel,
            k=k,
            k_of_b=1 if turned else 0,
            axis=depth,
            few=m < sublanes(jnp.float32),
            few_of_b=turned and n < sublanes(jnp.float32),
        ),
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


def product(call: Call, name: str) -> Call:
    """The call of matmul that gives a gradient: (*kept, i, K) times (*kept, K, j).

    K is made of the summed batch axes and, innermost, of n (d_a) or m (d_b).
    """
    rank, dtype = len(call.dims["batch"]), jnp.dtype(product_dtype(call))
    a, b, d_c = (
        x.reshape((1,) * (rank + 2 - x.ndim) + x.shape).astype(dtype)
        for x in (call.arrays[n] for n in ("a", "b", "d_c"))
    )
    left, right = (d_c, jnp.swapaxes(b, -1, -2)) if name == "d_a" else (jnp.swapaxes(a, -1, -2), d_c)
    kept, summed = batch_axes(call, name)
    left_kept, right_kept = ([x.shape[axis] for axis in kept] for x in (left, right))
    left = left.transpose(*kept, rank, *summed, rank + 1).reshape(*left_kept, left.shape[-2], -1)
    right = right.transpose(*kept, *summed, rank, rank + 1).reshape(*right_kept, -1, right.shape[-1])
    return sibling(
        call, find_spec("matmul"), left, right, precision=call.options["precision"], out_dtype=call.outputs[name][1]
    )


def gradient_key(call: Call) -> dict[str, str | int]:
    return {**key(call), "dtype": product_dtype(call)}


def supports_gradient(call: Call, config: ProductConfig) -> str | None:
    m, n, k, dtype = call.dims["m"], call.dims["n"], call.dims["k"], product_dtype(call)
    refused = dtype_refused(call, dtype, call.dtype_of("d_c"))
    kind = jnp.dtype("float32" if dtype == "float64" else dtype)
    for name, (i, j, summed) in {"d_a": (m, k, n), "d_b": (k, n, m)}.items():
        if name in call.wants and not refused:
            batch = tuple(call.dims["batch"][axis] for axis in batch_axes(call, name)[0])
            contraction = summed * math.prod(call.dims["batch"]) // math.prod(batch)
            inner = call.replace(
                spec=matmul_spec,
                dtype=dtype,
                arrays={
                    "a": jax.ShapeDtypeStruct((*batch, i, contraction), kind),
                    "b": jax.ShapeDtypeStruct((*batch, contraction, j), kind),
                },
                dims={"batch": batch, "m": i, "n": j, "k": contraction},
                options={"precision": call.options["precision"], "out_dtype": call.outputs[name][1]},
            )
            reason = supports(inner, config)
            refused = reason and f"{name}: {reason}"
    return refused


def gradient_tiling(call: Call) -> ProductConfig:
    return default_tiling(call.replace(dtype=product_dtype(call)))


@BACKEND.implements(
    "matmul_vjp", key=gradient_key, tiling=gradient_tiling, supports=supports_gradient, config=ProductConfig
)
def matmul_vjp(call: Call, config: ProductConfig) -> tuple[Any, ...]:
    def gradient(name: str) -> jax.Array | None:
        if name not in call.wants:
            return None
        (c,) = matmul(product(call, name), config)
        return c.reshape(call.outputs[name][0])

    return gradient("d_a"), gradient("d_b")
