"""Softmax."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import MojoFunction, layout, new, over_rows, rows_of
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("softmax")


@BACKEND.implements("softmax")
def softmax(call: Call, config: Config) -> tuple[np.ndarray]:
    x, axis = call.arrays["x"], call.options["axis"]
    y = new(x.shape, call.dtype)
    rows, n = rows_of(x, axis)
    over_rows(KERNEL, layout(x, axis), layout(y, axis), n, rows=rows, n=n, space=1, dtype=call.dtype, cost=4)
    return (y,)
