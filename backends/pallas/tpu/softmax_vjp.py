"""Gradient of softmax on TPUs: d_x = y (d_y - Delta), Delta = sum y d_y along one axis, in two sweeps over a row.

y, d_y: (*shape) -> d_x: (*shape), viewed in three axes as softmax views its array. The grid is (outer, row blocks,
sweeps, n blocks), see `Walk`. Sweep 0 sums y d_y; sweep 1 writes.

block_rows: softmax rows a block holds; block_n: elements of each row a block holds.

Source: the derivative of the formula of softmax, with y as the forward pass stored it.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu._rows import Held, Walk, launched
from portakern.backends.pallas.tpu.softmax import in_walks, walk_of
from portakern.core.call import Call

HELD = Held(streamed=3, computed=3)


def kernel(ref: Refs, *, walk: Walk) -> None:
    sweep, step = walk.sweep_and_step()

    def both() -> tuple[jax.Array, jax.Array]:
        return ref.y[...].astype(jnp.float32), ref.d_y[...].astype(jnp.float32)

    @pl.when((sweep == 0) & (step == 0))
    def start() -> None:
        ref.delta[...] = jnp.zeros_like(ref.delta)

    @pl.when(sweep == 0)
    def reduce() -> None:
        y, d_y = both()
        ref.delta[...] += walk.sum_along_rows(y * d_y, step)

    @pl.when(sweep == walk.sweeps - 1)
    def write() -> None:
        y, d_y = both()
        ref.d_x[...] = (y * (d_y - ref.delta[...])).astype(ref.d_x.dtype)


@BACKEND.implements("softmax_vjp", **in_walks(HELD))
def softmax_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    y, d_y = call.arrays["y"], call.arrays["d_y"]
    found = launched(
        call,
        kernel,
        walk_of(call, tiling),
        HELD,
        rows={"y": y, "d_y": d_y},
        written={"d_x": y.dtype},
        statistics=("delta",),
        flops=4,
        transcendentals=0,
    )
    return (found["d_x"],)
