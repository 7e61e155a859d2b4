"""Gradient of the logarithm of a sum of exponentials on TPUs: d_x = d_y exp(x - m) / sum exp(x - m) along one axis.

x, d_x: (*shape), d_y: (*shape) without that axis. They are viewed in three axes as softmax views its arrays. The grid
is (outer, row blocks, sweeps, n blocks), see `Walk`. Sweep 0 gathers m and l as softmax does; sweep 1 writes.

block_rows: rows a block holds; block_n: elements of each row a block holds.

Source: the derivative of the formula of logsumexp, which is the softmax of x.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu._rows import Walk, launched
from portakern.backends.pallas.tpu.softmax import HELD, in_walks, online_step, walk_of
from portakern.core.call import Call


def kernel(ref: Refs, *, walk: Walk) -> None:
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
def logsumexp_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    x, d_y = call.arrays["x"], call.arrays["d_y"]
    walk = walk_of(call, tiling)
    found = launched(
        call,
        kernel,
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
