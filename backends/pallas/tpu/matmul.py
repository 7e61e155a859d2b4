"""Matrix multiplication on TPUs: C = A B, one output block at a time, k innermost.

a: (*#batch, m, k), b: (*#batch, k, n) -> c: (*batch, m, n). The grid is (*batch, m blocks, n blocks, k blocks). Every k
step multiplies a (block_m, block_k) by a (block_k, block_n) block on the matrix unit and adds the product to a float32
accumulator that stays in VMEM; the last step rounds it once to the output's dtype. Batch axes are grid axes: an operand
that is broadcast along one answers with block 0 there, so nothing is repeated in memory. Rows of batched a that share
one b are one taller matrix.

block_m, block_n: the output block (sublanes, lanes); block_k: the share of k resident at a step. Larger blocks read
each operand fewer times.

Source: the blocked product of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008),
section 4, with VMEM as the cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs, block, row_block, step_along, within
from portakern.backends.pallas.tpu._chip import LANES, dot, dtype_refused, launch, off_grid, over_vmem, sublanes
from portakern.core.call import Call


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"], "k": call.dims["k"]}


def blocks(call: Call, tiling: Mapping[str, int], m: int) -> tuple[int, int, int]:
    """(block_m, block_n, block_k) of a call whose a has m rows for each b."""
    return (
        row_block(call, m, tiling["block_m"], sublanes(call.arrays["a"].dtype)),
        block(call.dims["n"], tiling["block_n"], LANES),
        block(call.dims["k"], tiling["block_k"], LANES),
    )


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    m, n, k = (call.dims[axis] for axis in "mnk")
    bm, bn, bk = blocks(call, tiling, m)
    size, out = call.arrays["a"].dtype.itemsize, jnp.dtype(call.outputs["c"][1]).itemsize
    # two blocks of each operand, so that one is moved while the other is used, and one accumulator
    resident = 2 * (bm * bk + bk * bn) * size + 2 * bm * bn * out + 4 * bm * bn
    return (
        dtype_refused(call, call.outputs["c"][1])
        or off_grid("block_m", tiling["block_m"], m, sublanes(call.arrays["a"].dtype))
        or off_grid("block_n", tiling["block_n"], n, LANES)
        or off_grid("block_k", tiling["block_k"], k, LANES)
        or over_vmem(resident, "block_m, block_n or block_k")
    )


def kernel(ref: Refs, *, k: int, axis: int) -> None:
    """``axis`` is the grid axis along which the blocks of k follow each other."""
    step, last = step_along(axis), pl.num_programs(axis) - 1

    @pl.when(step == 0)
    def start() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    a, b = ref.a[...], ref.b[...]
    start_of_k = step * a.shape[1]
    # both sides: beyond k lies anything, and 0 * NaN is NaN
    a, b = within(a, 1, start_of_k, k), within(b, 0, start_of_k, k)
    ref.acc[...] += dot(a, b, (1, 0))

    @pl.when(step == last)
    def finish() -> None:
        ref.c[...] = ref.acc[...].astype(ref.c.dtype)


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


@BACKEND.implements("matmul", key=key, supports=supports)
def matmul(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    a, b = call.arrays["a"], call.arrays["b"]
    shape, dtype = call.outputs["c"]
    if math.prod(b.shape[:-2]) == 1:
        a, b = a.reshape(-1, a.shape[-1]), b.reshape(b.shape[-2:])
    batch = shape[:-2] if b.ndim > 2 or a.ndim > 2 else ()
    (m, k), n = a.shape[-2:], b.shape[-1]
    bm, bn, bk = blocks(call, tiling, m)
    grid = (*batch, pl.cdiv(m, bm), pl.cdiv(n, bn), pl.cdiv(k, bk))
    rank = len(grid)
    rows, columns, depth = rank - 3, rank - 2, rank - 1
    products = math.prod(batch) * m * n * k
    bytes_of_a = products // n * pl.cdiv(n, bn) * a.dtype.itemsize
    bytes_of_b = products // m * pl.cdiv(m, bm) * b.dtype.itemsize
    found = launch(
        call,
        partial(kernel, k=k, axis=depth),
        "portakern_matmul",
        grid,
        in_order=1,
        inputs={
            "a": (a, operand(a.shape, (bm, bk), (rows, depth), rank)),
            "b": (b, operand(b.shape, (bk, bn), (depth, columns), rank)),
        },
        outputs={
            "c": (
                jax.ShapeDtypeStruct((*batch, m, n), dtype),
                operand((*batch, m, n), (bm, bn), (rows, columns), rank),
            )
        },
        scratch={"acc": (bm, bn)},
        cost=pl.CostEstimate(flops=2 * products, transcendentals=0, bytes_accessed=bytes_of_a + bytes_of_b),
    )
    return (found["c"].reshape(shape),)
