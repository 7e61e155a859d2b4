"""Layer normalisation."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import MojoFunction, layout, new, over_rows, rows_of, wide
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("layernorm")


@BACKEND.implements("layernorm")
def layernorm(call: Call, config: Config) -> tuple[np.ndarray]:
    x, weight, bias = call.arrays["x"], *(wide(call.arrays[name], call.dtype) for name in ("weight", "bias"))
    y = new(x.shape, call.dtype)
    rows, n = rows_of(x)
    over_rows(
        KERNEL,
        layout(x),
        weight,
        bias,
        layout(y),
        n,
        float(call.options["eps"]),
        rows=rows,
        n=n,
        space=1,
        dtype=call.dtype,
    )
    return (y,)
