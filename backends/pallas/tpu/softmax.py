"""Softmax on TPUs along one axis, and its gradient, each in two sweeps over a row.

    y = exp(x - max x) / sum exp(x - max x)        d_x = y (d_y - Delta)        Delta = sum y d_y

x, y, d_y, d_x: (*shape). Arrays are viewed as (outer, n, inner) with n the softmax axis, where a block reduces along
sublanes instead of lanes, or as (rows, n) when that axis is the last; XLA transposes nothing. The grid is (outer, row
blocks, sweeps, n blocks), see `BlockWalk`. Sweep 0 keeps the running maximum m of a row and the sum l of exp(x - m), or
of the gradient sums y d_y, with y as the forward pass stored it; sweep 1 writes.

block_rows: softmax rows a block holds; block_n: elements of each row a block holds.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import RowsConfig
from portakern.backends.pallas.lib.blocks import Refs
from portakern.backends.pallas.lib.mosaic_tpu import rows as row_walk
from portakern.backends.pallas.lib.mosaic_tpu.chip import across
from portakern.backends.pallas.lib.mosaic_tpu.rows import BlockWalk, Phases, Strip, VmemUse, launched, row_tiling
from portakern.core.call import Call

HELD = VmemUse(streamed=2, computed=3)


def view(call: Call) -> tuple[tuple[int, int, int], int]:
    """The array's shape in three axes, and which of the last two is the softmax axis.

    These are (outer, n, inner) and 1, or (1, rows, n) and 2.
    """
    shape, axis = call.dims["shape"], call.options["axis"]
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    return ((outer, shape[axis], inner), 1) if inner > 1 else ((1, outer, shape[axis]), 2)


def key(call: Call) -> dict[str, str | int]:
    """``across``: where the softmax axis lies, along sublanes or along lanes."""
    shape, axis = view(call)
    return {"dtype": call.dtype, "across": "sublanes" if axis == 1 else "lanes", "n": shape[axis]}


def default_tiling(call: Call, vmem_use: VmemUse) -> RowsConfig:
    shape, axis = view(call)
    return row_tiling(call, shape[axis], axis - 1, vmem_use)


def walk_of(call: Call, config: RowsConfig) -> BlockWalk:
    """How softmax and its gradient walk the rows of their arrays."""
    if call.options["axis"] == len(call.dims["shape"]) - 1:
        return BlockWalk.along_last(call, config, call.dims["shape"])
    shape, axis = view(call)
    return BlockWalk.over(call, config, shape, axis - 1)


in_walks = partial(row_walk.in_walks, key=key, default=default_tiling, walk_of=walk_of)


def shift_of(m: Any) -> Any:
    """What is subtracted from a row whose maximum so far is m: one that has shown nothing but -inf has weights of 0 for
    now, not the NaN of inf - inf."""
    return jnp.where(m == -jnp.inf, 0.0, m)


def online_step(m_old: Any, x: Any, axis: int, unit: float = 1.0) -> tuple[Any, Any, Any]:
    """One step of the online softmax of unit * x: what a row's next block x does to its running maximum m_old.

    Returns the new maximum m (in the unit of x, as m_old, and repeated along lanes as m_old is), the weights p =
    exp(unit (x - m)), and exp(unit (m_old - m)), by which sums of earlier weights shrink.
    """
    m = jnp.maximum(m_old, jnp.max(x, axis=axis, keepdims=True))
    shift = shift_of(m)
    below, fallen = x - (shift if axis == 0 else across(shift, x.shape[1])), m_old - shift
    return m, exponential(below, unit), exponential(fallen, unit)


def exponential(x: Any, unit: float) -> Any:
    """exp(unit * x)."""
    rate = unit * math.log2(math.e)  # one product instead of the unit's and that of exp itself
    if unit != 1.0 and rate <= float(jnp.finfo(jnp.float32).max):
        return jnp.exp2(x * rate)
    return jnp.exp(x if unit == 1.0 else x * unit)


def kernel(ref: Refs, *, strip: Strip) -> Phases:
    def start() -> None:
        ref.m[...] = jnp.full_like(ref.m, -jnp.inf)
        ref.l[...] = jnp.zeros_like(ref.l)

    def gather() -> None:
        m = jnp.maximum(ref.m[...], strip.maximum(lambda at: at.within(at(ref.x), -jnp.inf)))
        shift = shift_of(m)
        (l,) = strip.sums(lambda at: (jnp.exp(at(ref.x) - shift),))
        ref.l[...] = ref.l[...] * jnp.exp(ref.m[...] - shift) + l
        ref.m[...] = m

    def write() -> None:
        m, l = ref.m[...], ref.l[...]
        for at in strip.pieces():
            at.write(ref.y, jnp.exp(at(ref.x) - m) / l)

    return Phases(start, gather, write)


@BACKEND.implements("softmax", **in_walks(HELD))
def softmax(call: Call, config: RowsConfig) -> tuple[jax.Array]:
    x = call.arrays["x"]
    found = launched(
        call,
        kernel,
        walk_of(call, config),
        HELD,
        rows={"x": x},
        written={"y": x.dtype},
        statistics=("m", "l"),
        strips=True,
        flops=6,
        transcendentals=2 * x.size,
    )
    return (found["y"],)


GRADIENT_HELD = VmemUse(streamed=3, computed=3)


def gradient_kernel(ref: Refs, *, strip: Strip) -> Phases:
    def start() -> None:
        ref.delta[...] = jnp.zeros_like(ref.delta)

    def gather() -> None:
        (delta,) = strip.sums(lambda at: (at(ref.y) * at(ref.d_y),))
        ref.delta[...] += delta

    def write() -> None:
        delta = ref.delta[...]
        for at in strip.pieces():
            at.write(ref.d_x, at(ref.y) * (at(ref.d_y) - delta))

    return Phases(start, gather, write)


@BACKEND.implements("softmax_vjp", **in_walks(GRADIENT_HELD))
def softmax_vjp(call: Call, config: RowsConfig) -> tuple[jax.Array]:
    y, d_y = call.arrays["y"], call.arrays["d_y"]
    found = launched(
        call,
        gradient_kernel,
        walk_of(call, config),
        GRADIENT_HELD,
        rows={"y": y, "d_y": d_y},
        written={"d_x": y.dtype},
        statistics=("delta",),
        strips=True,
        flops=4,
        transcendentals=0,
    )
    return (found["d_x"],)
