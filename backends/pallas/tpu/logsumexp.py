"""Logarithm of a sum of exponentials on TPUs along one axis, and its gradient.

    y = m + log sum exp(x - m)        d_x = d_y exp(x - m) / sum exp(x - m)

x, d_x: (*shape); y, d_y: (*shape) without that axis. Arrays are viewed as softmax views its own: XLA transposes
nothing. The grid is (outer, row blocks, sweeps, n blocks), see `BlockWalk`. The forward kernel has one sweep: each step
merges a block into the running maximum m of a row and the sum l of exp(x - m), and the last one writes m + log l. The
gradient gathers m and l in sweep 0 as softmax does, and writes in sweep 1.

block_rows: rows a block holds; block_n: elements of each row a block holds.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import RowsConfig
from portakern.backends.pallas.lib.blocks import Refs
from portakern.backends.pallas.lib.mosaic_tpu.rows import BlockWalk, launched
from portakern.backends.pallas.tpu.softmax import HELD, in_walks, online_step, walk_of
from portakern.core.call import Call


def finite_or_zero(m: Any) -> Any:
    """What is subtracted from a row whose maximum is m: inf - inf would be NaN, and exp(inf) and log(0) are right."""
    return jnp.where(jnp.abs(m) == jnp.inf, 0.0, m)


def add_to_log_sum(ref: Refs, walk: BlockWalk, x: Any) -> None:
    """One step of the online softmax: merge a block into the running maximum m of its rows and the sum l of exp(x -
    m)."""
    m = jnp.maximum(ref.m[...], jnp.max(x, axis=walk.along, keepdims=True))
    shift = finite_or_zero(m)
    ref.l[...] = ref.l[...] * jnp.exp(ref.m[...] - shift) + jnp.sum(jnp.exp(x - shift), axis=walk.along, keepdims=True)
    ref.m[...] = m


def kernel(ref: Refs, *, walk: BlockWalk) -> None:
    _, step = walk.sweep_and_step()
    x = walk.within_rows(ref.x[...].astype(jnp.float32), step, -jnp.inf)

    @pl.when(step == 0)
    def start() -> None:
        ref.m[...] = jnp.full_like(ref.m, -jnp.inf)
        ref.l[...] = jnp.zeros_like(ref.l)

    add_to_log_sum(ref, walk, x)

    @pl.when(step == walk.grid[-1] - 1)
    def finish() -> None:
        y = finite_or_zero(ref.m[...]) + jnp.log(ref.l[...])
        ref.y[...] = walk.turned(y).astype(ref.y.dtype)


@BACKEND.implements("logsumexp", **in_walks(HELD))
def logsumexp(call: Call, config: RowsConfig) -> tuple[jax.Array]:
    x = call.arrays["x"]
    walk = walk_of(call, config)._replace(sweeps=1)  # no element is written: nothing is read again
    shape, blocks = walk.numbers()
    found = launched(
        call,
        kernel,
        walk,
        HELD,
        rows={"x": x},
        outputs={"y": (jax.ShapeDtypeStruct(shape, x.dtype), blocks)},
        statistics=("m", "l"),
        flops=4,
        transcendentals=x.size,
    )
    return (walk.from_numbers(found["y"], call.dims["rest"]),)


def gradient_kernel(ref: Refs, *, walk: BlockWalk) -> None:
    sweep, step = walk.sweep_and_step()

    @pl.when((sweep == 0) & (step == 0))
    def start() -> None:
        ref.m[...] = jnp.full_like(ref.m, -jnp.inf)
        ref.l[...] = jnp.zeros_like(ref.l)

    @pl.when(sweep == 0)
    def reduce() -> None:
        x = walk.within_rows(ref.x[...].astype(jnp.float32), step, -jnp.inf)
        m, p, shrink = online_step(ref.m[...], x, walk.along)
        ref.l[...] = ref.l[...] * shrink + jnp.sum(p, axis=walk.along, keepdims=True)
        ref.m[...] = m

    @pl.when(sweep == walk.sweeps - 1)
    def write() -> None:
        x = ref.x[...].astype(jnp.float32)
        d_y = walk.turned(ref.d_y[...].astype(jnp.float32))
        ref.d_x[...] = (d_y * (jnp.exp(x - ref.m[...]) / ref.l[...])).astype(ref.d_x.dtype)


@BACKEND.implements("logsumexp_vjp", **in_walks(HELD))
def logsumexp_vjp(call: Call, config: RowsConfig) -> tuple[jax.Array]:
    x, d_y = call.arrays["x"], call.arrays["d_y"]
    walk = walk_of(call, config)
    found = launched(
        call,
        gradient_kernel,
        walk,
        HELD,
        rows={"x": x},
        written={"d_x": x.dtype},
        inputs={"d_y": (walk.to_numbers(d_y), walk.numbers()[1])},
        statistics=("m", "l"),
        flops=7,
        transcendentals=2 * x.size,
    )
    return (found["d_x"],)
