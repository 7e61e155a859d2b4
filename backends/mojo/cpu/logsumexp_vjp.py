"""Gradient of the logarithm of a sum of exponentials."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import MojoFunction, layout, new, over_rows, rows_of, wide
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("logsumexp_vjp")


@BACKEND.implements("logsumexp_vjp")
def logsumexp_vjp(call: Call, config: Config) -> tuple[np.ndarray]:
    x, d_y, axis = call.arrays["x"], wide(call.arrays["d_y"], call.dtype), call.options["axis"]
    d_x = new(x.shape, call.dtype)
    rows, n = rows_of(x, axis)
    over_rows(KERNEL, layout(x, axis), d_y, layout(d_x, axis), n, rows=rows, n=n, space=1, dtype=call.dtype, cost=4)
    return (d_x,)
