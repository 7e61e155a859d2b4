"""Gradients of layer normalisation."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import MojoFunction, layout, new, over_blocks, rows_of, summed, wide
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("layernorm_vjp")


@BACKEND.implements("layernorm_vjp")
def layernorm_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    x, d_y, weight = (call.arrays[name] for name in ("x", "d_y", "weight"))
    d_x = new(x.shape, call.dtype)
    (rows, n), d_weight, d_bias = rows_of(x), summed(call, "d_weight"), summed(call, "d_bias")
    over_blocks(
        KERNEL, layout(x), wide(weight, call.dtype), layout(d_y), layout(d_x), d_weight.blocks, d_bias.blocks, n, rows,
        float(call.options["eps"]), rows=rows, n=n, space=2, dtype=call.dtype,
    )  # fmt: skip
    return d_x, d_weight.result(), d_bias.result()
