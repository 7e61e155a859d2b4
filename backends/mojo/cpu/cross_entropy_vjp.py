"""Gradient of the cross entropy of logits with integer labels."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import MojoFunction, layout, new, over_rows, rows_of, wide
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.specs.cross_entropy import classes_of

KERNEL = MojoFunction("cross_entropy_vjp")


@BACKEND.implements("cross_entropy_vjp")
def cross_entropy_vjp(call: Call, config: Config) -> tuple[np.ndarray]:
    x, labels = call.arrays["logits"], np.ascontiguousarray(call.arrays["labels"], np.int64)
    ignored, first, e, z = (call.options[n] for n in ("ignore_index", "first_class", "label_smoothing", "z_loss"))
    known = (wide(call.arrays[name], call.dtype) for name in ("lse", "lse_low", "d_loss"))
    d_logits = new(x.shape, call.dtype)
    rows, n = rows_of(x)
    over_rows(
        KERNEL, layout(x), labels, *known, layout(d_logits), n, ignored, first, classes_of(call), float(e), float(z),
        rows=rows, n=n, space=1, dtype=call.dtype, cost=4,
    )  # fmt: skip
    return (d_logits,)
