"""Gradient of the logarithm of a sum of exponentials along one axis."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("logsumexp_vjp")
def logsumexp_vjp(call: Call, config: Config) -> tuple[np.ndarray]:
    """d_x = d_y exp(x - m) / sum exp(x - m) along the axis, m = max x.

    A row of -inf, or with +inf (inf - inf) or NaN, is all NaN by plain arithmetic.
    """
    x, axis = call.arrays["x"], call.options["axis"]
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
        return (np.expand_dims(call.arrays["d_y"], axis) * (e / e.sum(axis, keepdims=True)),)
