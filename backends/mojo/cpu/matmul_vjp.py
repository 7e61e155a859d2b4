"""Gradients of the matrix product: each is one product, to which the batch axes are folded that it sums over."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.configs import ProductConfig
from portakern.backends.mojo.products import product, tiling
from portakern.core.call import Call
from portakern.specs.matmul import folded


@BACKEND.implements("matmul_vjp", tiling=tiling, config=ProductConfig, same_bits=True)
def matmul_vjp(call: Call, config: ProductConfig) -> tuple[np.ndarray | None, ...]:
    def gradient(name: str) -> np.ndarray | None:
        if name not in call.wants:
            return None
        of = folded(call, name)
        wide = of.dtype == "float64"
        a, b = (x.astype(np.float64, copy=False) if wide else x for x in (of.arrays["a"], of.arrays["b"]))
        shape, dtype = call.outputs[name]
        return product(a, b, of.dtype, dtype, config).reshape(shape)

    return gradient("d_a"), gradient("d_b")
