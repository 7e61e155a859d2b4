"""A residual added, and the root mean square normalisation of the sum."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import MojoFunction, layout, new, over_rows, rows_of, wide
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("rmsnorm", "add_rmsnorm")


@BACKEND.implements("add_rmsnorm")
def add_rmsnorm(call: Call, config: Config) -> tuple[np.ndarray, np.ndarray]:
    x, weight = call.arrays["x"], wide(call.arrays["weight"], call.dtype)
    y, total = new(x.shape, call.dtype), new(x.shape, call.dtype)
    rows, n = rows_of(x)
    over_rows(
        KERNEL,
        layout(x),
        layout(call.arrays["residual"]),
        weight,
        layout(y),
        layout(total),
        n,
        float(call.options["eps"]),
        int(call.options["rounding"] == "before_weight"),
        rows=rows,
        n=n,
        space=2,
        dtype=call.dtype,
    )
    return y, total
