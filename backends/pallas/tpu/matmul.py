"""Matrix multiplication on TPUs: C = A B, one output block at a time, k innermost.

a: (*#batch, m, k), b: (*#batch, k, n) -> c: (*batch, m, n). The grid is (*batch, m blocks, n blocks, k blocks). Every k step multiplies a (block_m, block_k)
by a (block_k, block_n) block on the MXU and adds the product to a float32 accumulator that stays in VMEM; the last step rounds it once to the output's dtype.
Batch axes are grid axes: an operand that is broadcast along one answers with block 0 there, so nothing is repeated in memory. Rows of batched a that share one
b are one taller matrix.

block_m, block_n: the output block (sublanes, lanes); block_k: the share of k resident at a step. Larger blocks read each operand fewer times.

Source: the blocked product of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008), section 4, with VMEM as the cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import (
    LANES,
    block,
    dot,
    dtype_refused,
    in_order,
    interpreter,
    off_grid,
    over_vmem,
    positions,
    row_block,
    step_along,
    sublanes,
)
from portakern.call import Call


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"], "k": call.dims["k"]}


def blocks(call: Call, tiling: Mapping[str, int], m: int) -> tuple[int, int, int]:
    grain = sublanes(call.arrays["a"].dtype)
    n, k = call.dims["n"], call.dims["k"]
    return (
        row_block(call, m, tiling["block_m"], grain),
        block(n, tiling["block_n"], LANES),
        block(k, tiling["block_k"], LANES),
    )


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    m, n, k = (call.dims[axis] for axis in "mnk")
    bm, bn, bk = blocks(call, tiling, m)
    size, out = call.arrays["a"].dtype.itemsize, jnp.dtype(call.outputs["c"][1]).itemsize
    resident = 2 * (bm * bk + bk * bn) * size + 2 * bm * bn * out + 4 * bm * bn
    return (
        dtype_refused(call, call.outputs["c"][1])
        or off_grid("block_m", tiling["block_m"], m, sublanes(call.arrays["a"].dtype))
        or off_grid("block_n", tiling["block_n"], n, LANES)
        or off_grid("block_k", tiling["block_k"], k, LANES)
        or over_vmem(resident, "block_m, block_n or block_k")
    )


def kernel(a_ref: Any, b_ref: Any, c_ref: Any, acc_ref: Any, *, k: int, axis: int) -> None:
    step, last = step_along(axis), pl.num_programs(axis) - 1
    block_k = a_ref.shape[1]

    @pl.when(step == 0)
    def start() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    a, b = a_ref[...], b_ref[...]
    if k % block_k:  # both sides: beyond k lies anything, and 0 * NaN is NaN
        a = jnp.where(positions(a.shape, 1, step * block_k) < k, a, 0)
        b = jnp.where(positions(b.shape, 0, step * block_k) < k, b, 0)
    acc_ref[...] += dot(a, b, (1, 0))

    @pl.when(step == last)
    def finish() -> None:
        c_ref[...] = acc_ref[...].astype(c_ref.dtype)


def operand(shape: tuple[int, ...], block_shape: tuple[int, int], axes: tuple[int, int], rank: int) -> pl.BlockSpec:
    """Blocks of an operand whose matrix axes follow the grid axes `axes`, and whose batch axes follow the grid's batch axes unless their extent is 1."""
    batch = shape[:-2]
    first = rank - 3 - len(batch)

    def index(*step: Any) -> tuple[Any, ...]:
        return (
            *(0 if extent == 1 else step[first + d] for d, extent in enumerate(batch)),
            step[axes[0]],
            step[axes[1]],
        )

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
    c = pl.pallas_call(
        partial(kernel, k=k, axis=depth),
        grid=grid,
        in_specs=[operand(a.shape, (bm, bk), (rows, depth), rank), operand(b.shape, (bk, bn), (depth, columns), rank)],
        out_specs=operand((*batch, m, n), (bm, bn), (rows, columns), rank),
        out_shape=jax.ShapeDtypeStruct((*batch, m, n), dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=in_order(*["parallel"] * depth, "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=2 * products,
            transcendentals=0,
            bytes_accessed=products // n * pl.cdiv(n, bn) * a.dtype.itemsize
            + products // m * pl.cdiv(m, bm) * b.dtype.itemsize,
        ),
        interpret=interpreter(call),
        name="portakern_matmul",
    )(a, b)
    return (c.reshape(shape),)
