"""Rows about their mean on TPUs: y = x - sum(x) / n, in two sweeps over each row.

The grid is (row blocks, sweeps, blocks along n). Sweep 0 adds up a row in VMEM, sweep 1 writes; a row that fits one
block needs one sweep, which does both.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu._rows import Held, Walk, launched
from portakern.core.call import Call

HELD = Held(streamed=2, computed=2)  # x and y come and go, and a block of each is computed with


def kernel(ref: Refs, *, walk: Walk) -> None:
    sweep, step = walk.sweep_and_step()
    x = ref.x[...].astype(jnp.float32)

    @pl.when((sweep == 0) & (step == 0))
    def start() -> None:
        ref.total[...] = jnp.zeros_like(ref.total)

    @pl.when(sweep == 0)
    def add() -> None:
        ref.total[...] += walk.sum_along_rows(x, step)

    @pl.when(sweep == walk.sweeps - 1)
    def write() -> None:
        ref.y[...] = (x - ref.total[...] / walk.n).astype(ref.y.dtype)


def walk_of(call: Call, tiling: Mapping[str, int]) -> Walk:
    """The rows of x, however many axes they lie along."""
    return Walk.over(call, tiling, (prod(call.dims["batch"]), call.dims["n"]), along=1)


def refused(call: Call, tiling: Mapping[str, int]) -> str | None:
    """Why a TPU cannot walk like this, or None."""
    return walk_of(call, tiling).refused(call, tiling, HELD)


def center(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array]:
    walk, x = walk_of(call, tiling), call.arrays["x"]
    form = jax.ShapeDtypeStruct(walk.shape, x.dtype)
    found = launched(
        call,
        kernel,
        walk,
        HELD,
        inputs={"x": (x.reshape(walk.shape), walk.read())},
        outputs={"y": (form, walk.written())},
        statistics=("total",),
        reads=1,
        flops=2,
        transcendentals=0,
    )
    return (found["y"].reshape(x.shape),)
