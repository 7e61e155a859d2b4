"""Matrix product."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.configs import ProductConfig
from portakern.backends.mojo.products import product, tiling
from portakern.core.call import Call


@BACKEND.implements("matmul", tiling=tiling, config=ProductConfig, same_bits=True)
def matmul(call: Call, config: ProductConfig) -> tuple[np.ndarray]:
    a, b = call.arrays["a"], call.arrays["b"]
    return (product(a, b, call.dtype, call.outputs["c"][1], config),)
