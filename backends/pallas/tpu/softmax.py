"""Softmax on TPUs: y = exp(x - max x) / sum exp(x - max x) along one axis, in two sweeps over a row.

x: (*shape) -> y: (*shape). The array is viewed as (outer, n, inner) with n the softmax axis, or as (1, rows, n) when that axis is the last: nothing is
transposed, a block reduces along sublanes instead of lanes. The grid is (outer, row blocks, 2, n blocks). Sweep 0 keeps the running maximum m and the sum l of
exp(x - m); sweep 1 writes exp(x - m) / l. A row that fits one block needs one sweep, which does both.

block_rows: softmax rows a block holds; block_n: elements of each row a block holds.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3.
"""

from __future__ import annotations

import math
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
    block,
    dtype_refused,
    in_order,
    interpreter,
    off_grid,
    over_vmem,
    padded,
    positions,
    row_block,
    step_along,
    sublanes,
)
from portakern.call import Call

# Of one block, with double buffers and float32 intermediates 10 to 14 MiB; a gradient, which streams another array, has half. Thousands of cycles that the
# compiler expects of bfloat16 at 4096 x 4096 by rows of a block, 16, 32, 64, 128: v5e 271, 160, 108, 90; v6e 201, 115, 80, 64.
ELEMENTS = 2**19


def view(call: Call) -> tuple[tuple[int, int, int], int]:
    """The array's shape in three axes, and which of the last two is the softmax axis: (outer, n, inner) and 1, or (1, rows, n) and 2."""
    shape, axis = call.dims["shape"], call.options["axis"]
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    return ((outer, shape[axis], inner), 1) if inner > 1 else ((1, outer, shape[axis]), 2)


def key(call: Call) -> dict[str, str | int]:
    """``across``: where the softmax axis lies, along sublanes or along lanes."""
    shape, axis = view(call)
    return {"dtype": call.dtype, "across": "sublanes" if axis == 1 else "lanes", "n": shape[axis]}


def default_tiling(call: Call) -> dict[str, int]:
    shape, axis = view(call)
    if axis == 1:
        return {"block_rows": LANES, "block_n": max(128, min(2048, pl.next_power_of_2(shape[1])))}
    block_n = max(128, min(16384, pl.next_power_of_2(shape[2])))
    return {"block_rows": min(256, ELEMENTS // (2 if call.spec.is_vjp else 1) // block_n), "block_n": block_n}


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    shape, axis = view(call)
    rows, n = blocks(call, tiling)
    item = call.arrays["x"].dtype.itemsize
    return (
        dtype_refused(call)
        or off_grid(
            "block_rows",
            tiling["block_rows"],
            shape[3 - axis],
            LANES if axis == 1 else sublanes(call.arrays["x"].dtype),
        )
        or over_vmem(
            padded(rows) * n * (4 * item + 12) if axis == 1 else rows * n * (4 * item + 12), "block_rows or block_n"
        )
    )


def blocks(call: Call, tiling: Mapping[str, int]) -> tuple[int, int]:
    """How many rows, and how much of each, one block holds."""
    shape, axis = view(call)
    grain = sublanes(call.dtype)
    of_rows, of_n = (LANES, grain) if axis == 1 else (grain, LANES)
    return row_block(call, shape[3 - axis], tiling["block_rows"], of_rows), block(shape[axis], tiling["block_n"], of_n)


def kernel(x_ref: Any, y_ref: Any, m_ref: Any, l_ref: Any, *, n: int, axis: int) -> None:
    sweep, step = step_along(2), step_along(3)
    x = x_ref[...].astype(jnp.float32)
    block_n = x.shape[axis]
    if n % block_n:
        x = jnp.where(positions(x.shape, axis, step * block_n) < n, x, -jnp.inf)

    @pl.when((sweep == 0) & (step == 0))
    def start() -> None:
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)

    @pl.when(sweep == 0)
    def reduce() -> None:
        m = jnp.maximum(m_ref[...], jnp.max(x, axis=axis, keepdims=True))
        origin = jnp.where(m == -jnp.inf, 0.0, m)  # while a row has shown nothing but -inf
        l_ref[...] = l_ref[...] * jnp.exp(m_ref[...] - origin) + jnp.sum(jnp.exp(x - origin), axis=axis, keepdims=True)
        m_ref[...] = m

    @pl.when(sweep == pl.num_programs(2) - 1)
    def write() -> None:
        y_ref[...] = (jnp.exp(x - m_ref[...]) / l_ref[...]).astype(y_ref.dtype)


@BACKEND.implements("softmax", key=key, tiling=default_tiling, supports=supports)
def softmax(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    x = call.arrays["x"]
    shape, axis = view(call)
    rows, n = blocks(call, tiling)
    steps = pl.cdiv(shape[axis], n)

    def spec(of_step: Callable[[Any, Any], Any]) -> pl.BlockSpec:
        if axis == 1:
            return pl.BlockSpec((None, n, rows), lambda o, r, sweep, step: (o, of_step(sweep, step), r))
        return pl.BlockSpec((None, rows, n), lambda o, r, sweep, step: (o, r, of_step(sweep, step)))

    state = pltpu.VMEM((1, rows) if axis == 1 else (rows, 1), jnp.float32)
    y = pl.pallas_call(
        partial(kernel, n=shape[axis], axis=axis - 1),
        grid=(shape[0], pl.cdiv(shape[3 - axis], rows), min(steps, 2), steps),
        in_specs=[spec(lambda sweep, step: step)],
        out_specs=spec(
            lambda sweep, step: sweep * step
        ),  # sweep 0 stays on the block that sweep 1 writes first: nothing unwritten leaves VMEM
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        scratch_shapes=[state, state],
        compiler_params=in_order("parallel", "parallel", "arbitrary", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=6 * x.size,
            transcendentals=2 * x.size,
            bytes_accessed=(3 if steps > 1 else 2) * x.size * x.dtype.itemsize,
        ),
        interpret=interpreter(call),
        name="portakern_softmax",
    )(x.reshape(shape))
    return (y.reshape(x.shape),)
