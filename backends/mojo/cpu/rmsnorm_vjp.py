"""Gradients of root mean square normalisation."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import (
    CODES,
    MojoFunction,
    accumulator,
    layout,
    new,
    over_blocks,
    rows_of,
    summed,
    wide,
)
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("rmsnorm_vjp")


@BACKEND.implements("rmsnorm_vjp")
def rmsnorm_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    return gradients(call, call.arrays["x"], None)


def gradients(call: Call, x: np.ndarray, more: np.ndarray | None) -> tuple[np.ndarray | None, ...]:
    """``more``: is added to d_x."""
    d_y, weight = call.arrays["d_y"], call.arrays["weight"]
    d_x = new(x.shape, call.dtype)
    (rows, n), sums = rows_of(x), summed(call, "d_weight")
    once = call.options["rounding"] == "once"
    held = CODES.index(accumulator(call.dtype).name if once else call.dtype)
    over_blocks(
        KERNEL, layout(x), wide(weight, call.dtype), layout(d_y), layout(more), layout(d_x),
        sums.blocks, n, rows, float(call.options["eps"]), held, rows=rows, n=n, space=3, dtype=call.dtype,
    )  # fmt: skip
    return d_x, sums.result()
