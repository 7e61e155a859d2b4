"""Gradient of softmax."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import MojoFunction, layout, new, over_rows, rows_of
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("softmax_vjp")


@BACKEND.implements("softmax_vjp")
def softmax_vjp(call: Call, config: Config) -> tuple[np.ndarray]:
    y, d_y, axis = call.arrays["y"], call.arrays["d_y"], call.options["axis"]
    d_x = new(y.shape, call.dtype)
    rows, n = rows_of(y, axis)
    over_rows(KERNEL, *(layout(a, axis) for a in (y, d_y, d_x)), n, rows=rows, n=n, space=2, dtype=call.dtype)
    return (d_x,)
