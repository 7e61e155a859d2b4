"""Matrix product with weights in codes of 8 or 4 bits."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("weight_only_matmul")
def weight_only_matmul(call: Call, config: Config) -> tuple[np.ndarray]:
    """sum over groups p of k: scale_b[p] (a[:, p] @ q[p] - zeros[p] sum a[:, p])."""
    a, b, scale, zeros, bias = (call.arrays[name] for name in ("a", "b", "scale_b", "zeros", "bias"))
    k, q = a.shape[1], b.astype(np.int64)
    if call.dims["codes_per_byte"] == 2:
        q = np.repeat(q, 2, axis=0)
        q[1::2] >>= 4
        q = q[:k] & 15
        if zeros is None:
            q = np.where(q < 8, q, q - 16)
    count = max(len(scale), 1 if zeros is None else len(zeros))
    width = call.dims["k_width"] if count > 1 else k
    c = np.zeros((len(a), b.shape[1]))
    with np.errstate(all="ignore"):
        for p in range(count):
            own = slice(p * width, (p + 1) * width)
            part = a[:, own] @ q[own].astype(np.float64)
            if zeros is not None:
                part = part - zeros[min(p, len(zeros) - 1)] * a[:, own].sum(1, keepdims=True)
            c = c + scale[min(p, len(scale) - 1)] * part
        return (c if bias is None else c + bias,)
