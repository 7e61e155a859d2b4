"""Softmax along one axis."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("softmax")
def softmax(call: Call, config: Config) -> tuple[np.ndarray]:
    """y = exp(x - m) / sum exp(x - m), m = max x along the axis.

    A row of -inf, or with +inf (inf - inf) or NaN, is all NaN by plain arithmetic.
    """
    x, axis = call.arrays["x"], call.options["axis"]
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
        return (e / e.sum(axis, keepdims=True),)
