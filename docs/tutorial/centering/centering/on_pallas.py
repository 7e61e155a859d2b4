"""Rows about their mean on TPUs: y = x - sum(x) / n, in two sweeps over each row.

The grid is (row blocks, sweeps, blocks along n). Sweep 0 adds up a row in VMEM, sweep 1 writes; a row that fits one
block needs one sweep, which does both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

import portakern as pk
from centering.center import key, row_tiles
from portakern.backends.pallas.lib import BlockWalk, Refs, RowsConfig, VmemUse, launched

HELD = VmemUse(streamed=2, computed=2)  # x and y come and go, and a block of each is computed with


def kernel(ref: Refs, *, walk: BlockWalk) -> None:
    sweep, step = walk.sweep_and_step()

    @pl.when((sweep == 0) & (step == 0))
    def start() -> None:
        ref.total[...] = jnp.zeros_like(ref.total)

    @pl.when(sweep == 0)
    def add() -> None:
        ref.total[...] += walk.sum_along_rows(ref.x[...].astype(jnp.float32), step)

    @pl.when(sweep == walk.sweeps - 1)
    def write() -> None:
        ref.y[...] = (ref.x[...].astype(jnp.float32) - ref.total[...] / walk.n).astype(ref.y.dtype)


def walk_of(call: pk.Call, config: RowsConfig) -> BlockWalk:
    """The rows of x, however many axes they lie along, and as XLA lays them out."""
    return BlockWalk.along_last(call, config, (*call.dims["batch"], call.dims["n"]))


def refused(call: pk.Call, config: RowsConfig) -> str | None:
    """Why a TPU cannot walk like this, or None."""
    return walk_of(call, config).refused(call, config, HELD)


@pk.backends()["pallas"].implements("center", key=key, tiling=row_tiles, supports=refused, config=RowsConfig)
def center(call: pk.Call, config: RowsConfig) -> tuple[jax.Array]:
    x = call.arrays["x"]
    found = launched(
        call,
        kernel,
        walk_of(call, config),
        HELD,
        rows={"x": x},
        written={"y": x.dtype},
        statistics=("total",),
        flops=2,
        transcendentals=0,
    )
    return (found["y"],)
