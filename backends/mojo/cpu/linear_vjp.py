"""Gradients of a linear layer with what follows it."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.configs import LinearGradientsConfig
from portakern.backends.mojo.cpu.linear import ACTIVATIONS
from portakern.backends.mojo.launch import MojoFunction, accumulator, layout, over_blocks, summed
from portakern.backends.mojo.products import product, tiling
from portakern.core.call import Call

KERNEL = MojoFunction("linear_vjp", "linear_slope")


@BACKEND.implements("linear_vjp", tiling=tiling, config=LinearGradientsConfig, same_bits=True)
def linear_vjp(call: Call, config: LinearGradientsConfig) -> tuple[np.ndarray | None, ...]:
    x, weight, d_y = (call.arrays[name] for name in ("x", "weight", "d_y"))
    activation = ACTIVATIONS.index(call.options["activation"])
    pre = call.arrays["pre"] if activation else None
    (n, k), d_bias = weight.shape, summed(call, "d_bias")
    d_z = np.empty(d_y.shape, accumulator(call.dtype))
    over_blocks(
        KERNEL,
        layout(d_y),
        layout(pre),
        layout(d_z),
        d_bias.blocks,
        activation,
        n,
        d_z.size // n,
        rows=d_z.size // n,
        n=n,
        space=3,
        dtype=call.dtype,
    )
    rows, (_, to_x), (_, to_weight) = d_z.reshape(-1, n), call.outputs["d_x"], call.outputs["d_weight"]
    d_x = product(rows, weight, call.dtype, to_x, config).reshape(x.shape) if "d_x" in call.wants else None
    if "d_weight" not in call.wants:
        return d_x, None, d_bias.result()
    return d_x, product(rows.T, x.reshape(-1, k), call.dtype, to_weight, config), d_bias.result()
