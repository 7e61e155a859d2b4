"""Cross entropy of logits with integer labels."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import MojoFunction, accumulator, layout, over_rows, rows_of
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("cross_entropy")


@BACKEND.implements("cross_entropy")
def cross_entropy(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    x, labels = call.arrays["logits"], np.ascontiguousarray(call.arrays["labels"], np.int64)
    ignored, e, z = (call.options[name] for name in ("ignore_index", "label_smoothing", "z_loss"))
    made = {name: np.empty(labels.shape, accumulator(call.dtype)) for name in call.wants}
    outputs = tuple(made.get(o.name) for o in call.spec.outputs)
    rows, n = rows_of(x)
    over_rows(
        KERNEL, layout(x), labels, *outputs, n, ignored, float(e), float(z), rows=rows, n=n, space=1, dtype=call.dtype,
        cost=4,
    )  # fmt: skip
    return outputs
