"""Matrix product of rows in 16 or 32 bits with weights in codes of 8 or 4 bits, on TPUs.

    c[i, j] = sum_p scale_b[p, j] (sum_{k in p} a[i, k] q[k, j] - zeros[p, j] sum_{k in p} a[i, k]) + bias[j]

a: (m, k), codes b: (k, n) or, two in a byte, (k / 2, n) -> c: (m, n). The grid is (m blocks, n blocks, k steps), k
innermost. A step holds as many groups of k as block_k has room for, or a part of one; the sum of a group meets its
scale in float32 and is added to an accumulator in VMEM.

Codes leave HBM as they are, and become bfloat16 in VMEM (float32 beside float32 rows), which holds each of them: int8
by way of int32, halves of bytes by shifts. The low halves of a step lie before the high ones then, as whole blocks of
sublanes. XLA puts the elements of a in the same order, in a copy, which is little beside the weights where rows are
few. A group that does not fill whole lanes is filled up with zeros by XLA.

Source: the blocked product of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008), as
matmul's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import ProductConfig
from portakern.backends.pallas.lib.blocks import Refs, even_block, padded, row_block, step_along
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    LANES,
    dot,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
)
from portakern.backends.pallas.tpu.scaled_matmul import LEAST, BlockSteps, laid_out
from portakern.core.call import Call
from portakern.specs.weight_only_matmul import weight_groups


def steps_of(call: Call, config: ProductConfig) -> BlockSteps:
    """How k is walked. A part of a group fills whole lanes, and its bytes whole sublanes of int8."""
    count, width = weight_groups(call)
    parts = pl.cdiv(width, config.block_k)
    depth = padded(pl.cdiv(width, parts), LANES)
    groups = 1 if count == 1 or parts > 1 else max(min(config.block_k // depth, count), 1)
    return BlockSteps(count, parts, groups, depth, count == 1)


def numbers(codes: Any, packed: bool, unsigned: bool, dtype: Any) -> Any:
    """The codes of a step as numbers: of bytes that hold two, all low halves before all high ones."""
    codes = codes.astype(jnp.int32)
    if packed:
        low, high = (lax.shift_left(codes, jnp.int32(by)) for by in (28, 24))
        shift = lax.shift_right_logical if unsigned else lax.shift_right_arithmetic
        codes = jnp.concatenate([shift(half, jnp.int32(28)) for half in (low, high)], 0)
    return codes.astype(jnp.float32).astype(dtype)


def kernel(ref: Refs, *, steps: BlockSteps, packed: bool, dtype: Any) -> None:
    step, last = step_along(2), pl.num_programs(2) - 1
    group = lax.div(step, jnp.int32(steps.parts)) * steps.blocks_per_step
    own_bytes = steps.depth // (2 if packed else 1)

    @pl.when(step == 0)
    def start() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    found = ref.acc[...]
    for g in range(steps.blocks_per_step):
        x = ref.a[:, g * steps.depth : (g + 1) * steps.depth].astype(dtype)
        codes = ref.b[g * own_bytes : (g + 1) * own_bytes, :]
        part = dot(x, numbers(codes, packed, "zeros" in ref, dtype), (1, 0))
        if "zeros" in ref:
            part -= ref.zeros[pl.ds(group + g, 1), :] * x.astype(jnp.float32).sum(1, keepdims=True)
        found += part * ref.scale_b[pl.ds(group + g, 1), :]
    ref.acc[...] = found

    @pl.when(step == last)
    def finish() -> None:
        c = ref.acc[...]
        if "bias" in ref:
            c = c + ref.bias[...]
        ref.c[...] = c.astype(ref.c.dtype)


def wide_dtype(call: Call) -> Any:
    """What a and the codes are multiplied as: bfloat16 beside rows in bfloat16, else float32. A host's interpreter
    multiplies float32."""
    return jnp.bfloat16 if call.dtype == "bfloat16" and not call.interpret else jnp.float32


def blocks(call: Call, config: ProductConfig) -> tuple[int, int]:
    """(block_m, block_n) of a call."""
    rows = row_block(call, call.dims["m"], config.block_m, sublanes(jnp.bfloat16), even=True)
    return rows, even_block(call.dims["n"], config.block_n, LANES)


def resident(call: Call, config: ProductConfig) -> int:
    """The VMEM, in bytes, of one step: two blocks of each operand, codes as int32, as float32 and as what is
    multiplied, two blocks of c, the sums, and scales and zeros of the columns."""
    steps, (bm, bn) = steps_of(call, config), blocks(call, config)
    of_a = 2 * bm * steps.resident * jnp.dtype(call.dtype).itemsize
    of_b = bn * (2 * steps.resident // call.dims["codes_per_byte"] + 12 * steps.depth)
    out = jnp.dtype(call.outputs["c"][1]).itemsize
    of_scales = 2 * 2 * 4 * padded(padded(steps.blocks, steps.blocks_per_step), 8) * bn
    return of_a + of_b + (2 * out + 4 * 4) * bm * bn + of_scales + 2 * 4 * 8 * bn


def supports(call: Call, config: ProductConfig) -> str | None:
    m, n, (count, width) = call.dims["m"], call.dims["n"], weight_groups(call)
    if count > 1 and width < LEAST:
        return (
            f"groups of {width} elements along k are too narrow for a TPU's {LANES} lanes: of {LEAST} on they are "
            "written; convert and scale the weights, and use matmul"
        )
    return (
        dtype_refused(call, call.outputs["c"][1])
        or off_grid("block_m", config.block_m, m, sublanes(jnp.bfloat16))
        or off_grid("block_n", config.block_n, n, LANES)
        or off_grid("block_k", config.block_k, width, LANES)
        or over_vmem(call, resident(call, config), "block_m, block_n or block_k")
    )


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"], "k": call.dims["k"]}


def in_order(a: jax.Array, steps: BlockSteps, width: int, packed: bool) -> jax.Array:
    """a filled up as its codes are; of bytes that hold two, each step's elements with even places before the others."""
    if packed and a.shape[1] % 2:
        a, width = jnp.pad(a, ((0, 0), (0, 1))), padded(width, 2)
    a = laid_out(a, 1, steps, width)
    if not packed:
        return a
    return a.reshape(len(a), -1, steps.depth // 2, 2).swapaxes(2, 3).reshape(a.shape)


def of_each_group(x: jax.Array, steps: BlockSteps) -> jax.Array:
    """Scales or zeros of all groups, in float32, those behind the last 0."""
    count = padded(steps.blocks, steps.blocks_per_step)
    x = jnp.broadcast_to(x.astype(jnp.float32), (steps.blocks, x.shape[1]))
    return jnp.pad(x, ((0, count - steps.blocks), (0, 0)))


@BACKEND.implements("weight_only_matmul", key=key, supports=supports, config=ProductConfig)
def weight_only_matmul(call: Call, config: ProductConfig) -> tuple[jax.Array]:
    dims, (_, width), bias = call.dims, weight_groups(call), call.arrays["bias"]
    ((m, n), dtype), packed = call.outputs["c"], dims["codes_per_byte"] == 2
    steps, (bm, bn) = steps_of(call, config), blocks(call, config)
    a = in_order(call.arrays["a"], steps, width, packed)
    of_bytes = steps._replace(depth=steps.depth // dims["codes_per_byte"])
    b = laid_out(call.arrays["b"], 0, of_bytes, pl.cdiv(width, dims["codes_per_byte"]))
    scale = of_each_group(call.arrays["scale_b"], steps)
    grid = (pl.cdiv(m, bm), pl.cdiv(n, bn), steps.number)
    columns = pl.BlockSpec((scale.shape[0], bn), lambda i, j, s: (0, j))
    inputs = {
        "a": (a, pl.BlockSpec((bm, steps.resident), lambda i, j, s: (i, s))),
        "b": (b, pl.BlockSpec((of_bytes.resident, bn), lambda i, j, s: (s, j))),
        "scale_b": (scale, columns),
    }
    if call.arrays["zeros"] is not None:
        inputs["zeros"] = (of_each_group(call.arrays["zeros"], steps), columns)
    if bias is not None:
        of_bias = bias.astype(jnp.float32).reshape(1, n)
        inputs["bias"] = (of_bias, pl.BlockSpec((1, bn), lambda i, j, s: (0, j)))
    found = launch(
        call,
        partial(kernel, steps=steps, packed=packed, dtype=wide_dtype(call)),
        "portakern_weight_only_matmul",
        grid,
        in_order=1,
        inputs=inputs,
        outputs={"c": (jax.ShapeDtypeStruct((m, n), dtype), pl.BlockSpec((bm, bn), lambda i, j, s: (i, j)))},
        scratch={"acc": (bm, bn)},
        vmem=resident(call, config),
        cost=pl.CostEstimate(
            flops=2 * m * n * dims["k"],
            transcendentals=0,
            bytes_accessed=a.size * a.dtype.itemsize * grid[1] + b.size * grid[0],
        ),
    )
    return (found["c"],)
