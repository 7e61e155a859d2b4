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

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu._rows import Held, Phases, Strip, launched
from portakern.backends.pallas.tpu.softmax import in_walks, walk_of
from portakern.core.call import Call

HELD = Held(streamed=3, computed=3)


def kernel(ref: Refs, *, strip: Strip) -> Phases:
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
        strips=True,
        flops=4,
        transcendentals=0,
    )
    return (found["d_x"],)
