"""The gated product of a feed-forward layer on TPUs, and its gradients, element by element.

    y = g s u        d_g = d_y u s (1 + g q)        d_u = d_y g s        s = 1 / (1 + exp(-g))        q = 1 - s

gate, up, y, d_y, d_gate, d_up: (*batch), viewed as (rows, n) with n the last axis. The grid is (row blocks, n blocks):
nothing is carried from step to step, and nothing is masked, as what lies beyond an array reaches only what is dropped.

block_rows: rows a block holds; block_n: elements of each row a block holds. They are the most that a block holds: an
extent is cut evenly into as many as that takes.

Source: Shazeer, "GLU variants improve transformer" (2020), equation 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import RowsConfig
from portakern.backends.pallas.lib.blocks import Refs, even_block, row_block
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    LANES,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
    vmem_granted,
)
from portakern.core.call import Call


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": view(call)[1]}


def view(call: Call) -> tuple[int, int]:
    """The arrays' shape in two axes, (rows, n)."""
    shape = call.dims["batch"]
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def blocks(call: Call, config: RowsConfig) -> tuple[int, int]:
    """The extents of a block."""
    rows, n = view(call)
    block_rows = row_block(call, rows, config.block_rows, sublanes(call.dtype), even=True)
    return block_rows, even_block(n, config.block_n, LANES)


def refused(call: Call, config: RowsConfig, streamed: int, computed: int) -> str | None:
    """Why a TPU cannot hold blocks of so many arrays twice, and so many of float32 beside them, or None."""
    block_rows, block_n = blocks(call, config)
    needed = block_rows * block_n * (2 * streamed * jnp.dtype(call.dtype).itemsize + 4 * computed)
    return (
        dtype_refused(call)
        or off_grid("block_rows", config.block_rows, view(call)[0], sublanes(call.dtype))
        or over_vmem(call, needed, "block_rows or block_n", vmem_granted(call))
    )


def supports(call: Call, config: RowsConfig) -> str | None:
    return refused(call, config, streamed=3, computed=3)


def open_and_shut(g: Any) -> tuple[Any, Any]:
    """s = 1 / (1 + exp(-g)) and q = 1 - s, each as exact where it is small."""
    e = jnp.exp(-jnp.abs(g))
    high = 1.0 / (1.0 + e)
    low = e * high
    return jnp.where(g >= 0, high, low), jnp.where(g >= 0, low, high)


def kernel(ref: Refs) -> None:
    g = ref.gate[...].astype(jnp.float32)
    s, _ = open_and_shut(g)
    ref.y[...] = (g * s * ref.up[...].astype(jnp.float32)).astype(ref.y.dtype)


def element_by_element(
    call: Call,
    config: RowsConfig,
    kernel: Callable[[Refs], None],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    flops: int,
) -> dict[str, jax.Array]:
    """What a kernel of blocks of the named arrays, all of one shape, writes by name; so many operations an element."""
    (rows, n), (block_rows, block_n) = view(call), blocks(call, config)
    spec = pl.BlockSpec((block_rows, block_n), lambda row, column: (row, column))
    form = jax.ShapeDtypeStruct((rows, n), call.arrays[inputs[0]].dtype)
    size = rows * n
    found = launch(
        call,
        kernel,
        f"portakern_{call.spec.name}",
        (pl.cdiv(rows, block_rows), pl.cdiv(n, block_n)),
        in_order=0,
        inputs={name: (call.arrays[name].reshape(rows, n), spec) for name in inputs},
        outputs=dict.fromkeys(outputs, (form, spec)),
        cost=pl.CostEstimate(
            flops=flops * size,
            transcendentals=size,
            bytes_accessed=(len(inputs) + len(outputs)) * size * form.dtype.itemsize,
        ),
    )
    return {name: y.reshape(call.dims["batch"]) for name, y in found.items()}


@BACKEND.implements("swiglu", key=key, supports=supports, config=RowsConfig)
def swiglu(call: Call, config: RowsConfig) -> tuple[jax.Array]:
    return (element_by_element(call, config, kernel, ("gate", "up"), ("y",), flops=6)["y"],)


def supports_gradient(call: Call, config: RowsConfig) -> str | None:
    return refused(call, config, streamed=5, computed=4)


def gradient_kernel(ref: Refs) -> None:
    g, d_y = ref.gate[...].astype(jnp.float32), ref.d_y[...].astype(jnp.float32)
    s, q = open_and_shut(g)
    if "d_gate" in ref:
        ref.d_gate[...] = (d_y * ref.up[...].astype(jnp.float32) * (s * (1.0 + g * q))).astype(ref.d_gate.dtype)
    if "d_up" in ref:
        ref.d_up[...] = (d_y * (g * s)).astype(ref.d_up.dtype)


@BACKEND.implements("swiglu_vjp", key=key, supports=supports_gradient, config=RowsConfig)
def swiglu_vjp(call: Call, config: RowsConfig) -> tuple[jax.Array | None, ...]:
    inputs = ("gate", "up", "d_y") if "d_gate" in call.wants else ("gate", "d_y")
    found = element_by_element(call, config, gradient_kernel, inputs, call.wants, flops=11)
    return found.get("d_gate"), found.get("d_up")
