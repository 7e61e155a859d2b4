"""Gradients of layer normalisation on TPUs, over the last axis, in two sweeps over a row.

    xh = (x - mean) r        r = (var + eps)^-1/2        h = weight d_y
    d_x = r (h - mean(h) - xh mean(h xh))        d_weight = sum over rows of d_y xh        d_bias = sum over rows of d_y

x, d_y: (*batch, n), weight, bias: (n) or None -> d_x: (*batch, n), d_weight, d_bias: (n). The grid is (row blocks, 2, n blocks). Sweep 0 takes of each block
the mean, the sum of squares about it and the sums of h and of h (x - mean), and merges them; sweep 1 writes d_x, and of d_weight and d_bias one row of partial
sums for each row block. A row that fits one block needs one sweep, which does both, and its merge is exact. A second kernel adds the partial sums up in order.

block_rows: rows a block holds, whose sums are one partial sum; block_n: elements of each row a block holds.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979), equation 2.1.
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
    step_along,
    sublanes,
)
from portakern.backends.pallas.tpu.layernorm import blocks, default_tiling, key
from portakern.call import Call


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    rows, n = blocks(call, tiling)
    return (
        dtype_refused(call)
        or off_grid("block_rows", tiling["block_rows"], math.prod(call.dims["batch"]), sublanes(call.dtype))
        or over_vmem(rows * n * (6 * jnp.dtype(call.dtype).itemsize + 20), "block_rows or block_n")
    )


def kernel(*refs: Any, names: tuple[str, ...], height: int, n: int, eps: float) -> None:
    ref = dict(zip(names, refs, strict=True))
    rows, sweep, step = step_along(0), step_along(1), step_along(2)
    d_y = ref["d_y"][...].astype(jnp.float32)
    block_rows, block_n = d_y.shape
    x = ref["x"][...].astype(jnp.float32) if "x" in ref else None
    h = d_y * ref["weight"][...].astype(jnp.float32) if "weight" in ref else d_y

    def along_row(values: Any) -> Any:
        if n % block_n:
            values = jnp.where(positions(values.shape, 1, step * block_n) < n, values, 0.0)
        return jnp.sum(values, axis=1, keepdims=True)

    def over_rows(values: Any) -> Any:
        if height % block_rows:  # beyond the last row lies anything
            values = jnp.where(positions(values.shape, 0, rows * block_rows) < height, values, 0.0)
        return jnp.sum(values, axis=0, keepdims=True)

    if x is not None:

        @pl.when((sweep == 0) & (step == 0))
        def start() -> None:
            for state in ("mean", "m2", "h_sum", "hx"):
                ref[state][...] = jnp.zeros_like(ref[state])

        @pl.when(sweep == 0)
        def merge() -> None:
            seen = step * block_n
            here = jnp.minimum(n - seen, block_n)
            share = jnp.float32(here) / jnp.float32(seen + here)
            block_mean = along_row(x) / jnp.float32(here)
            delta = block_mean - ref["mean"][...]
            # delta is squared last: it is the whole mean in the first block, where its weight is 0
            ref["m2"][...] += along_row(jnp.square(x - block_mean)) + delta * (delta * (share * jnp.float32(seen)))
            if "d_x" in ref:
                block_h = along_row(h)
                # both sums, about the new mean
                ref["hx"][...] += along_row(h * (x - block_mean)) + (
                    (delta - delta * share) * block_h - delta * share * ref["h_sum"][...]
                )
                ref["h_sum"][...] += block_h
            ref["mean"][...] += delta * share

    @pl.when(sweep == pl.num_programs(1) - 1)
    def write() -> None:
        if x is not None:
            r = lax.rsqrt(ref["m2"][...] / n + eps)
            xh = (x - ref["mean"][...]) * r
            if "d_x" in ref:
                d_x = r * (h - ref["h_sum"][...] / n - xh * (r * (ref["hx"][...] / n)))
                ref["d_x"][...] = d_x.astype(ref["d_x"].dtype)
            if "d_weight" in ref:
                ref["d_weight"][...] = over_rows(d_y * xh)
        if "d_bias" in ref:
            ref["d_bias"][...] = over_rows(d_y)


@BACKEND.implements("layernorm_vjp", key=key, tiling=default_tiling, supports=supports)
def layernorm_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    x, d_y, weight, n, wants = call.arrays["x"], call.arrays["d_y"], call.arrays["weight"], call.dims["n"], call.wants
    rows, block_n = blocks(call, tiling)
    height = math.prod(call.dims["batch"])
    groups, steps, item = pl.cdiv(height, rows), pl.cdiv(n, block_n), x.dtype.itemsize
    reads_x = "d_x" in wants or "d_weight" in wants
    sweeps = min(steps, 2) if reads_x else 1

    def written(
        sweep: Any, step: Any
    ) -> Any:  # sweep 0 stays on the block that sweep 1 writes first: nothing unwritten leaves VMEM
        return step if sweeps == 1 else sweep * step

    of_rows = pl.BlockSpec((rows, block_n), lambda row, sweep, step: (row, step))
    inputs = {"d_y": (d_y.reshape(height, n), of_rows)}
    if reads_x:
        inputs["x"] = (x.reshape(height, n), of_rows)
    if weight is not None and "d_x" in wants:
        inputs["weight"] = (weight.reshape(1, n), pl.BlockSpec((1, block_n), lambda row, sweep, step: (0, step)))
    outputs = {}
    if "d_x" in wants:
        spec = pl.BlockSpec((rows, block_n), lambda row, sweep, step: (row, written(sweep, step)))
        outputs["d_x"] = (jax.ShapeDtypeStruct((height, n), x.dtype), spec)
    for name in ("d_weight", "d_bias"):
        if name in wants:
            spec = pl.BlockSpec((None, 1, block_n), lambda row, sweep, step: (row, 0, written(sweep, step)))
            outputs[name] = (jax.ShapeDtypeStruct((groups, 1, n), jnp.float32), spec)
    state = {name: pltpu.VMEM((rows, 1), jnp.float32) for name in ("mean", "m2", "h_sum", "hx")}
    results = pl.pallas_call(
        partial(kernel, names=(*inputs, *outputs, *state), height=height, n=n, eps=call.options["eps"]),
        grid=(groups, sweeps, steps),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in outputs.values()],
        out_shape=[shape for shape, _ in outputs.values()],
        scratch_shapes=[*state.values()],
        compiler_params=in_order("parallel", "arbitrary", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=18 * x.size, transcendentals=height, bytes_accessed=(1 + 2 * sweeps) * x.size * item
        ),
        interpret=interpreter(call),
        name="portakern_layernorm_vjp",
    )(*(array for array, _ in inputs.values()))
    found = dict(zip(outputs, results, strict=True))
    return (
        found["d_x"].reshape(x.shape) if "d_x" in found else None,
        *(
            add_up(call, found[name].reshape(groups, n), call.outputs[name][1]) if name in found else None
            for name in ("d_weight", "d_bias")
        ),
    )


def sum_kernel(x_ref: Any, sum_ref: Any, acc_ref: Any, *, height: int) -> None:
    step = step_along(1)
    x = x_ref[...]
    if height % x.shape[0]:
        x = jnp.where(positions(x.shape, 0, step * x.shape[0]) < height, x, 0.0)

    @pl.when(step == 0)
    def start() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.sum(x, axis=0, keepdims=True)

    @pl.when(step == pl.num_programs(1) - 1)
    def finish() -> None:
        sum_ref[...] = acc_ref[...].astype(sum_ref.dtype)


def add_up(call: Call, sums: jax.Array, dtype: str) -> jax.Array:
    """(groups, n) partial sums -> (n), one block of groups after another."""
    height, n = sums.shape
    rows, block_n = block(height, 256, sublanes(jnp.float32)), block(n, 1024, LANES)
    total: jax.Array = pl.pallas_call(
        partial(sum_kernel, height=height),
        grid=(pl.cdiv(n, block_n), pl.cdiv(height, rows)),
        in_specs=[pl.BlockSpec((rows, block_n), lambda column, step: (step, column))],
        out_specs=pl.BlockSpec((1, block_n), lambda column, step: (0, column)),
        out_shape=jax.ShapeDtypeStruct((1, n), dtype),
        scratch_shapes=[pltpu.VMEM((1, block_n), jnp.float32)],
        compiler_params=in_order("parallel", "arbitrary"),
        cost_estimate=pl.CostEstimate(flops=sums.size, transcendentals=0, bytes_accessed=4 * sums.size),
        interpret=interpreter(call),
        name=f"portakern_{call.spec.name}_sum",
    )(sums)
    return total.reshape(n)
