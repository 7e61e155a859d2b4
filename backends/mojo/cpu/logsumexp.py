"""Logarithm of a sum of exponentials."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import MojoFunction, layout, new, over_rows, rows_of
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("logsumexp")


@BACKEND.implements("logsumexp")
def logsumexp(call: Call, config: Config) -> tuple[np.ndarray]:
    x, axis = call.arrays["x"], call.options["axis"]
    y = new(call.dims["rest"], call.dtype)
    rows, n = rows_of(x, axis)
    over_rows(KERNEL, layout(x, axis), layout(y[..., None]), n, rows=rows, n=n, space=1, dtype=call.dtype, cost=4)
    return (y,)
