"""Gradient of softmax on TPUs: d_x = y (d_y - Delta), Delta = sum y d_y along one axis, in two sweeps over a row.

y, d_y: (*shape) -> d_x: (*shape), viewed in three axes as softmax views its array. The grid is (outer, row blocks, 2, n blocks). Sweep 0 sums y d_y; sweep 1
writes. A row that fits one block needs one sweep, which does both.

block_rows: softmax rows a block holds; block_n: elements of each row a block holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import (
    LANES,
    dtype_refused,
    in_order,
    interpreter,
    off_grid,
    over_vmem,
    padded,
    positions,
    step_along,
    sublanes,
)
from portakern.backends.pallas.tpu.softmax import blocks, default_tiling, key, view
from portakern.call import Call


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    shape, axis = view(call)
    rows, n = blocks(call, tiling)
    lanes = padded(rows) if axis == 1 else rows
    return (
        dtype_refused(call)
        or off_grid("block_rows", tiling["block_rows"], shape[3 - axis], LANES if axis == 1 else sublanes(call.dtype))
        or over_vmem(lanes * n * (6 * jnp.dtype(call.dtype).itemsize + 12), "block_rows or block_n")
    )


def kernel(y_ref: Any, d_y_ref: Any, d_x_ref: Any, delta_ref: Any, *, n: int, axis: int) -> None:
    sweep, step = step_along(2), step_along(3)
    y, d_y = y_ref[...].astype(jnp.float32), d_y_ref[...].astype(jnp.float32)
    block_n = y.shape[axis]

    @pl.when((sweep == 0) & (step == 0))
    def start() -> None:
        delta_ref[...] = jnp.zeros_like(delta_ref)

    @pl.when(sweep == 0)
    def reduce() -> None:
        terms = y * d_y
        if n % block_n:
            terms = jnp.where(positions(y.shape, axis, step * block_n) < n, terms, 0.0)
        delta_ref[...] += jnp.sum(terms, axis=axis, keepdims=True)

    @pl.when(sweep == pl.num_programs(2) - 1)
    def write() -> None:
        d_x_ref[...] = (y * (d_y - delta_ref[...])).astype(d_x_ref.dtype)


@BACKEND.implements("softmax_vjp", key=key, tiling=default_tiling, supports=supports)
def softmax_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    y, d_y = call.arrays["y"], call.arrays["d_y"]
    shape, axis = view(call)
    rows, n = blocks(call, tiling)
    steps = pl.cdiv(shape[axis], n)

    def spec(of_step: Callable[[Any, Any], Any]) -> pl.BlockSpec:
        if axis == 1:
            return pl.BlockSpec((None, n, rows), lambda o, r, sweep, step: (o, of_step(sweep, step), r))
        return pl.BlockSpec((None, rows, n), lambda o, r, sweep, step: (o, r, of_step(sweep, step)))

    d_x = pl.pallas_call(
        partial(kernel, n=shape[axis], axis=axis - 1),
        grid=(shape[0], pl.cdiv(shape[3 - axis], rows), min(steps, 2), steps),
        in_specs=[spec(lambda sweep, step: step)] * 2,
        out_specs=spec(
            lambda sweep, step: sweep * step
        ),  # sweep 0 stays on the block that sweep 1 writes first: nothing unwritten leaves VMEM
        out_shape=jax.ShapeDtypeStruct(shape, y.dtype),
        scratch_shapes=[pltpu.VMEM((1, rows) if axis == 1 else (rows, 1), jnp.float32)],
        compiler_params=in_order("parallel", "parallel", "arbitrary", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=4 * y.size, transcendentals=0, bytes_accessed=(5 if steps > 1 else 3) * y.size * y.dtype.itemsize
        ),
        interpret=interpreter(call),
        name="portakern_softmax_vjp",
    )(y.reshape(shape), d_y.reshape(shape))
    return (d_x.reshape(y.shape),)
