"""Gradient of softmax along one axis."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("softmax_vjp")
def softmax_vjp(call: Call, config: Config) -> tuple[np.ndarray]:
    """d_x = y (d_y - sum y d_y) along the axis, from y as it was stored.

    0 * inf is NaN, by plain arithmetic, and a NaN anywhere makes its whole row NaN.
    """
    y, d_y = call.arrays["y"], call.arrays["d_y"]
    with np.errstate(all="ignore"):
        return (y * (d_y - (y * d_y).sum(call.options["axis"], keepdims=True)),)
