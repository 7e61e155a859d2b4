"""A residual added, and the root mean square normalisation of the sum over the last axis."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.rmsnorm import rmsnorm
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.core.oracle import rounded


def added(call: Call) -> tuple[Call, np.ndarray]:
    """The call of the norm on the sum, rounded to the dtype of x; and the sum as it is.

    inf - inf is NaN by plain arithmetic, and what is beyond the dtype an infinity.
    """
    with np.errstate(all="ignore"):
        total = call.arrays["x"] + call.arrays["residual"]
        return call.replace(arrays={**call.arrays, "x": rounded(total, call.dtype).astype(np.float64)}), total


@BACKEND.implements("add_rmsnorm")
def add_rmsnorm(call: Call, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """residual_out = x + residual, y = rmsnorm(residual_out).

    x, residual: (*batch, n), weight: (n) or None -> y, residual_out: (*batch, n).
    """
    norm, total = added(call)
    return (*rmsnorm(norm, config), total)
