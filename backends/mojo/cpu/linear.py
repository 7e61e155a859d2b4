"""A linear layer with what follows it."""

from __future__ import annotations

from math import prod

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.configs import ProductConfig
from portakern.backends.mojo.launch import MojoFunction, layout, new, wide
from portakern.backends.mojo.products import over_tiles, packed, tiling
from portakern.core.call import Call

KERNEL = MojoFunction("linear")
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
"""Those of lib/activations.mojo, each at its code."""


@BACKEND.implements("linear", tiling=tiling, config=ProductConfig, same_bits=True)
def linear(call: Call, config: ProductConfig) -> tuple[np.ndarray | None, ...]:
    x, weight, bias, residual = (call.arrays[name] for name in ("x", "weight", "bias", "residual"))
    n, _ = weight.shape
    m = prod(x.shape[:-1])
    y = new((*x.shape[:-1], n), call.dtype)
    pre = new(y.shape, call.dtype) if "pre" in call.wants else None
    over_tiles(
        KERNEL,
        packed(x, m, call.dtype, right=False),
        packed(weight, n, call.dtype, right=True),
        layout(y),
        wide(bias, call.dtype),
        layout(residual),
        layout(pre),
        ACTIVATIONS.index(call.options["activation"]),
        batch=1,
        config=config,
    )
    return y, pre
