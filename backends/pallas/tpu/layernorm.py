"""Layer normalisation on TPUs: y = (x - mean) / sqrt(var + eps) * weight + bias along the last axis, in two sweeps over a row.

x: (*batch, n), weight and bias: (n) or None -> y: (*batch, n). The grid is (row blocks, 2, n blocks). Sweep 0 takes the mean of each block and the sum of
squares about it, and merges them into the row's mean and m2; sweep 1 normalises. A row that fits one block needs one sweep, which does both, and its merge is
exact: the two-pass formula. Lanes beyond n are no part of either sum. No difference of large squares is ever taken, so a large mean costs no more than its
own rounding.

block_rows: rows a block holds; block_n: elements of each row a block holds.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979), equation 2.1; Ba, Kiros and Hinton,
"Layer Normalization" (2016), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import (
    LANES,
    block,
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

# Of one block, with double buffers and float32 intermediates 10 to 14 MiB; a gradient, which streams more arrays, has half. Thousands of cycles that the
# compiler expects of bfloat16 at 4096 x 4096 by rows of a block, 16, 32, 64, 128: v5e 262, 155, 108, 87; v6e 192, 112, 73, 60.
ELEMENTS = 2**19


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"]}


def default_tiling(call: Call) -> dict[str, int]:
    block_n = max(128, min(16384, pl.next_power_of_2(call.dims["n"])))
    return {"block_rows": min(256, ELEMENTS // (2 if call.spec.is_vjp else 1) // block_n), "block_n": block_n}


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    x = call.arrays["x"]
    rows, n = blocks(call, tiling)
    return (
        dtype_refused(call)
        or off_grid("block_rows", tiling["block_rows"], math.prod(call.dims["batch"]), sublanes(x.dtype))
        or over_vmem(rows * n * (4 * x.dtype.itemsize + 12), "block_rows or block_n")
    )


def blocks(call: Call, tiling: Mapping[str, int]) -> tuple[int, int]:
    """How many rows, and how much of each, one block holds."""
    rows = row_block(call, math.prod(call.dims["batch"]), tiling["block_rows"], sublanes(call.dtype))
    return rows, block(call.dims["n"], tiling["block_n"], LANES)


def kernel(*refs: Any, names: tuple[str, ...], n: int, eps: float) -> None:
    ref = dict(zip(names, refs, strict=True))
    sweep, step = step_along(1), step_along(2)
    x = ref["x"][...].astype(jnp.float32)
    block_n = x.shape[1]
    ragged = n % block_n != 0
    mean, m2 = ref["mean"], ref["m2"]

    def total(values: Any) -> Any:
        if ragged:
            values = jnp.where(positions(x.shape, 1, step * block_n) < n, values, 0.0)
        return jnp.sum(values, axis=1, keepdims=True)

    @pl.when((sweep == 0) & (step == 0))
    def start() -> None:
        mean[...] = jnp.zeros_like(mean)
        m2[...] = jnp.zeros_like(m2)

    @pl.when(sweep == 0)
    def merge() -> None:
        seen = step * block_n
        here = jnp.minimum(n - seen, block_n)
        share = jnp.float32(here) / jnp.float32(seen + here)
        block_mean = total(x) / jnp.float32(here)
        delta = block_mean - mean[...]
        # delta is squared last: it is the whole mean in the first block, where its weight is 0
        m2[...] += total(jnp.square(x - block_mean)) + delta * (delta * (share * jnp.float32(seen)))
        mean[...] += delta * share

    @pl.when(sweep == pl.num_programs(1) - 1)
    def write() -> None:
        y = (x - mean[...]) * lax.rsqrt(m2[...] / n + eps)
        if "weight" in ref:
            y *= ref["weight"][...].astype(jnp.float32)
        if "bias" in ref:
            y += ref["bias"][...].astype(jnp.float32)
        ref["y"][...] = y.astype(ref["y"].dtype)


@BACKEND.implements("layernorm", key=key, tiling=default_tiling, supports=supports)
def layernorm(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    x, n = call.arrays["x"], call.dims["n"]
    rows, block_n = blocks(call, tiling)
    height, steps = math.prod(call.dims["batch"]), pl.cdiv(n, block_n)
    affine = {name: call.arrays[name].reshape(1, n) for name in ("weight", "bias") if call.arrays[name] is not None}
    state = pltpu.VMEM((rows, 1), jnp.float32)
    y = pl.pallas_call(
        partial(kernel, names=("x", *affine, "y", "mean", "m2"), n=n, eps=call.options["eps"]),
        grid=(pl.cdiv(height, rows), min(steps, 2), steps),
        in_specs=[
            pl.BlockSpec((rows, block_n), lambda row, sweep, step: (row, step)),
            *(pl.BlockSpec((1, block_n), lambda row, sweep, step: (0, sweep * step)) for _ in affine),
        ],
        out_specs=pl.BlockSpec(
            (rows, block_n), lambda row, sweep, step: (row, sweep * step)
        ),  # sweep 0 stays on the block that sweep 1 writes first
        out_shape=jax.ShapeDtypeStruct((height, n), x.dtype),
        scratch_shapes=[state, state],
        compiler_params=in_order("parallel", "arbitrary", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=9 * x.size, transcendentals=height, bytes_accessed=(3 if steps > 1 else 2) * x.size * x.dtype.itemsize
        ),
        interpret=interpreter(call),
        name="portakern_layernorm",
    )(x.reshape(height, n), *affine.values())
    return (y.reshape(x.shape),)
