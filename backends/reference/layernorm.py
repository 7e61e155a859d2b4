"""Layer normalisation over the last axis (Ba, Kiros, Hinton 2016, eq. 3-4)."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("layernorm")
def layernorm(call: Call, config: Config) -> tuple[np.ndarray]:
    """y = (x - mean) / sqrt(var + eps) * weight + bias, var = mean (x - mean)^2.

    x: (*batch, n), weight and bias: (n) or None -> y: (*batch, n). An inf or NaN makes var, and so its whole row, NaN.
    """
    x, weight, bias = (call.arrays[name] for name in ("x", "weight", "bias"))
    n = x.shape[-1]
    with np.errstate(all="ignore"):
        centred = x - mean_of(x)
        var = np.square(centred).sum(-1, keepdims=True) / n
        y = centred / np.sqrt(var + call.options["eps"])
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias,)


def mean_of(x: np.ndarray) -> np.ndarray:
    """The mean of each row, (*batch, 1). Of equal numbers it is that number, however their sum rounds."""
    mean = x.sum(-1, keepdims=True) / x.shape[-1]
    return mean + (x - mean).sum(-1, keepdims=True) / x.shape[-1]
