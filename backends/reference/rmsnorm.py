"""Root mean square normalisation over the last axis (Zhang and Sennrich 2019, eq. 4)."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.core.oracle import rounded
from portakern.spec.dtypes import DTYPES


def narrowed(call: Call, values: np.ndarray) -> np.ndarray:
    """Rounded to the dtype of x where that has 16 bits; wider ones are what kernels compute in."""
    dtype = call.dtype_of("x")
    return rounded(values, dtype).astype(np.float64) if DTYPES[dtype].bits < 32 else values


@BACKEND.implements("rmsnorm")
def rmsnorm(call: Call, config: Config) -> tuple[np.ndarray]:
    """y = x r weight, r = (mean x^2 + eps)^-1/2; rounded "before_weight", x r is rounded to x's dtype.

    x: (*batch, n), weight: (n) or None -> y: (*batch, n). A NaN makes r, and so its row, NaN; an inf makes r 0, and
    0 * inf is NaN at its own element alone.
    """
    x, weight = call.arrays["x"], call.arrays["weight"]
    with np.errstate(all="ignore"):
        r = 1 / np.sqrt(np.square(x).sum(-1, keepdims=True) / x.shape[-1] + call.options["eps"])
        y = x * r
        if call.options["rounding"] == "before_weight":
            y = narrowed(call, y)
        return (y if weight is None else y * weight,)
