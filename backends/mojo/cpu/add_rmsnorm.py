"""A residual added, and the root mean square normalisation of the sum."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import MojoFunction, form, new, over_rows, rows_of, wide
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("rmsnorm", "add_rmsnorm")


@BACKEND.implements("add_rmsnorm")
def add_rmsnorm(call: Call, config: Config) -> tuple[np.ndarray, np.ndarray]:
    x, weight = call.arrays["x"], wide(call.arrays["weight"], call.dtype)
    y, total = new(x.shape, call.dtype), new(x.shape, call.dtype)
    rows, n = rows_of(x)
    over_rows(
        KERNEL, form(x), form(call.arrays["residual"]), weight, form(y), form(total), n, float(call.options["eps"]),
        int(call.options["rounding"] == "before_weight"), rows=rows, n=n, room=2, dtype=call.dtype,
    )  # fmt: skip
    return y, total
