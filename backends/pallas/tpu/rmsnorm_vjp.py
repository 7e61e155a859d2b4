"""Gradients of root mean square normalisation on TPUs, over the last axis, in two sweeps over a row.

    xh = x r        r = (mean(x^2) + eps)^-1/2        h = weight d_y
    d_x = r (h - xh mean(h xh))        d_weight = sum over rows of d_y xh

x, d_y: (*batch, n), weight: (n) or None -> d_x: (*batch, n), d_weight: (n). The grid is (row blocks, 2, n blocks). Sweep 0 adds up x^2 and h x of each block;
sweep 1 writes d_x, and of d_weight one row of partial sums for each row block. A row that fits one block needs one sweep, which does both. A second kernel,
layernorm_vjp's, adds the partial sums up in order.

block_rows: rows a block holds, whose sums are one partial sum; block_n: elements of each row a block holds.
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
from portakern.backends.pallas.tpu.layernorm import blocks, default_tiling, key
from portakern.backends.pallas.tpu.layernorm_vjp import add_up, supports
from portakern.call import Call


def kernel(*refs: Any, names: tuple[str, ...], height: int, n: int, eps: float) -> None:
    ref = dict(zip(names, refs, strict=True))
    rows, sweep, step = step_along(0), step_along(1), step_along(2)
    x, d_y = ref["x"][...].astype(jnp.float32), ref["d_y"][...].astype(jnp.float32)
    block_rows, block_n = x.shape
    h = d_y * ref["weight"][...].astype(jnp.float32) if "weight" in ref else d_y

    def along_row(values: Any) -> Any:
        if n % block_n:
            values = jnp.where(positions(values.shape, 1, step * block_n) < n, values, 0.0)
        return jnp.sum(values, axis=1, keepdims=True)

    @pl.when((sweep == 0) & (step == 0))
    def start() -> None:
        for state in ("squares", "hx"):
            ref[state][...] = jnp.zeros_like(ref[state])

    @pl.when(sweep == 0)
    def add() -> None:
        ref["squares"][...] += along_row(jnp.square(x))
        if "d_x" in ref:
            ref["hx"][...] += along_row(h * x)

    @pl.when(sweep == pl.num_programs(1) - 1)
    def write() -> None:
        r = lax.rsqrt(ref["squares"][...] / n + eps)
        xh = x * r
        if "d_x" in ref:
            ref["d_x"][...] = (r * (h - xh * (r * (ref["hx"][...] / n)))).astype(ref["d_x"].dtype)
        if "d_weight" in ref:
            product = d_y * xh
            if height % block_rows:  # beyond the last row lies anything
                product = jnp.where(positions(product.shape, 0, rows * block_rows) < height, product, 0.0)
            ref["d_weight"][...] = jnp.sum(product, axis=0, keepdims=True)


@BACKEND.implements("rmsnorm_vjp", key=key, tiling=default_tiling, supports=supports)
def rmsnorm_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    x, d_y, weight, n, wants = call.arrays["x"], call.arrays["d_y"], call.arrays["weight"], call.dims["n"], call.wants
    rows, block_n = blocks(call, tiling)
    height = math.prod(call.dims["batch"])
    groups, steps = pl.cdiv(height, rows), pl.cdiv(n, block_n)
    of_rows = pl.BlockSpec((rows, block_n), lambda row, sweep, step: (row, step))
    inputs = {"x": (x.reshape(height, n), of_rows), "d_y": (d_y.reshape(height, n), of_rows)}
    if weight is not None and "d_x" in wants:
        inputs["weight"] = (weight.reshape(1, n), pl.BlockSpec((1, block_n), lambda row, sweep, step: (0, step)))
    outputs = {}
    if "d_x" in wants:  # sweep 0 stays on the block that sweep 1 writes first: nothing unwritten leaves VMEM
        spec = pl.BlockSpec((rows, block_n), lambda row, sweep, step: (row, sweep * step))
        outputs["d_x"] = (jax.ShapeDtypeStruct((height, n), x.dtype), spec)
    if "d_weight" in wants:
        spec = pl.BlockSpec((None, 1, block_n), lambda row, sweep, step: (row, 0, sweep * step))
        outputs["d_weight"] = (jax.ShapeDtypeStruct((groups, 1, n), jnp.float32), spec)
    sweeps, state = min(steps, 2), pltpu.VMEM((rows, 1), jnp.float32)
    results = pl.pallas_call(
        partial(kernel, names=(*inputs, *outputs, "squares", "hx"), height=height, n=n, eps=call.options["eps"]),
        grid=(groups, sweeps, steps),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in outputs.values()],
        out_shape=[shape for shape, _ in outputs.values()],
        scratch_shapes=[state, state],
        compiler_params=in_order("parallel", "arbitrary", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=12 * x.size, transcendentals=height, bytes_accessed=(1 + 2 * sweeps) * x.size * x.dtype.itemsize
        ),
        interpret=interpreter(call),
        name="portakern_rmsnorm_vjp",
    )(*(array for array, _ in inputs.values()))
    found = dict(zip(outputs, results, strict=True))
    return (
        found["d_x"].reshape(x.shape) if "d_x" in found else None,
        add_up(call, found["d_weight"].reshape(groups, n), call.outputs["d_weight"][1])
        if "d_weight" in found
        else None,
    )
