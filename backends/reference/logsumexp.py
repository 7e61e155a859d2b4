"""Logarithm of a sum of exponentials along one axis."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("logsumexp")
def logsumexp(call: Call, config: Config) -> tuple[np.ndarray]:
    """y = m + log sum exp(x - m) along the axis, m = max x, or 0 where that is infinite.

    Then exp(inf) = inf and log 0 = -inf by plain arithmetic, and a NaN anywhere is the sum's.
    """
    x, axis = call.arrays["x"], call.options["axis"]
    with np.errstate(all="ignore"):
        m = x.max(axis, keepdims=True, initial=-np.inf)
        m = np.where(np.isinf(m), 0.0, m)
        return ((m + np.log(np.exp(x - m).sum(axis, keepdims=True))).squeeze(axis),)
