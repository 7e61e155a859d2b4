"""Matrix product: c[m, n] = sum over k of a[m, k] b[k, n]."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("matmul")
def matmul(call: Call, config: Config) -> tuple[np.ndarray]:
    """a (*#batch, m, k) @ b (*#batch, k, n) -> c (*batch, m, n); no product is left out, so that 0 * inf is NaN."""
    with np.errstate(all="ignore"):
        return (np.matmul(call.arrays["a"], call.arrays["b"]),)
