"""Matrix product of 8-bit numbers with scales."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("scaled_matmul")
def scaled_matmul(call: Call, config: Config) -> tuple[np.ndarray]:
    """sum over blocks p of k: scale_a[:, p] (a[:, p] @ b[p]) scale_b[p], each row's and column's that of its block."""
    a, b, scale_a, scale_b, bias = (call.arrays[name] for name in ("a", "b", "scale_a", "scale_b", "bias"))
    (m, k), n = a.shape, b.shape[1]
    count = max(scale_a.shape[1], scale_b.shape[0])
    width = call.dims["k_width"] if count > 1 else k
    rows = np.minimum(np.arange(m) // call.dims["m_width"], scale_a.shape[0] - 1)
    columns = np.minimum(np.arange(n) // call.dims["n_width"], scale_b.shape[1] - 1)
    c = np.zeros((m, n))
    with np.errstate(all="ignore"):
        for p in range(count):
            block = slice(p * width, (p + 1) * width)
            of_a = scale_a[rows, min(p, scale_a.shape[1] - 1)][:, None]
            of_b = scale_b[min(p, scale_b.shape[0] - 1), columns]
            c = c + of_a * of_b * (a[:, block] @ b[block])
        return (c if bias is None else c + bias,)
