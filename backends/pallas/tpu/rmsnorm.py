"""Root mean square normalisation on TPUs: y = x (sum(x^2) / n + eps)^-1/2 weight along the last axis, in two sweeps over a row.

x: (*batch, n), weight: (n) or None -> y: (*batch, n). The grid is (row blocks, 2, n blocks). Sweep 0 adds up the squares of each block, sweep 1 normalises. A
row that fits one block needs one sweep, which does both. Lanes beyond n are no part of the sum.

block_rows: rows a block holds; block_n: elements of each row a block holds.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.
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
from portakern.backends.pallas.common import in_order, interpreter, positions, step_along
from portakern.backends.pallas.tpu.layernorm import blocks, default_tiling, key, supports
from portakern.call import Call


def kernel(*refs: Any, names: tuple[str, ...], n: int, eps: float) -> None:
    ref = dict(zip(names, refs, strict=True))
    sweep, step = step_along(1), step_along(2)
    x = ref["x"][...].astype(jnp.float32)
    block_n, squares = x.shape[1], ref["squares"]

    @pl.when((sweep == 0) & (step == 0))
    def start() -> None:
        squares[...] = jnp.zeros_like(squares)

    @pl.when(sweep == 0)
    def add() -> None:
        seen = jnp.where(positions(x.shape, 1, step * block_n) < n, x, 0.0) if n % block_n else x
        squares[...] += jnp.sum(jnp.square(seen), axis=1, keepdims=True)

    @pl.when(sweep == pl.num_programs(1) - 1)
    def write() -> None:
        y = x * lax.rsqrt(squares[...] / n + eps)
        if "weight" in ref:
            y *= ref["weight"][...].astype(jnp.float32)
        ref["y"][...] = y.astype(ref["y"].dtype)


@BACKEND.implements("rmsnorm", key=key, tiling=default_tiling, supports=supports)
def rmsnorm(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    x, n = call.arrays["x"], call.dims["n"]
    rows, block_n = blocks(call, tiling)
    height, steps = math.prod(call.dims["batch"]), pl.cdiv(n, block_n)
    weight = {} if call.arrays["weight"] is None else {"weight": call.arrays["weight"].reshape(1, n)}
    y = pl.pallas_call(
        partial(kernel, names=("x", *weight, "y", "squares"), n=n, eps=call.options["eps"]),
        grid=(pl.cdiv(height, rows), min(steps, 2), steps),
        in_specs=[
            pl.BlockSpec((rows, block_n), lambda row, sweep, step: (row, step)),
            *(pl.BlockSpec((1, block_n), lambda row, sweep, step: (0, sweep * step)) for _ in weight),
        ],
        out_specs=pl.BlockSpec(
            (rows, block_n), lambda row, sweep, step: (row, sweep * step)
        ),  # sweep 0 stays on the block that sweep 1 writes first
        out_shape=jax.ShapeDtypeStruct((height, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((rows, 1), jnp.float32)],
        compiler_params=in_order("parallel", "arbitrary", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=4 * x.size, transcendentals=height, bytes_accessed=(3 if steps > 1 else 2) * x.size * x.dtype.itemsize
        ),
        interpret=interpreter(call),
        name="portakern_rmsnorm",
    )(x.reshape(height, n), *weight.values())
    return (y.reshape(x.shape),)
