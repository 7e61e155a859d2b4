"""Root mean square normalisation."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import CODES, MojoFunction, accumulator, layout, new, over_rows, rows_of, wide
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("rmsnorm")


@BACKEND.implements("rmsnorm")
def rmsnorm(call: Call, config: Config) -> tuple[np.ndarray]:
    x, weight = call.arrays["x"], wide(call.arrays["weight"], call.dtype)
    y = new(x.shape, call.dtype)
    rows, n = rows_of(x)
    once = call.options["rounding"] == "once"
    held = CODES.index(accumulator(call.dtype).name if once else call.dtype)
    over_rows(
        KERNEL,
        layout(x),
        weight,
        layout(y),
        n,
        float(call.options["eps"]),
        held,
        rows=rows,
        n=n,
        space=1,
        dtype=call.dtype,
    )
    return (y,)
