"""Root mean square normalisation over the last axis (Zhang and Sennrich 2019, eq. 4)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call


@BACKEND.implements("rmsnorm")
def rmsnorm(call: Call, tiling: Mapping[str, int]) -> tuple[np.ndarray]:
    """y = x r weight, r = (mean x^2 + eps)^-1/2.

    x: (*batch, n), weight: (n) or None -> y: (*batch, n). A NaN makes r, and so its row, NaN; an inf makes r 0, and
    0 * inf is NaN at its own element alone.
    """
    x, weight = call.arrays["x"], call.arrays["weight"]
    with np.errstate(all="ignore"):
        r = 1 / np.sqrt(np.square(x).sum(-1, keepdims=True) / x.shape[-1] + call.options["eps"])
        y = x * r
        return (y if weight is None else y * weight,)
