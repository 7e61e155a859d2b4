"""A residual added, and the root mean square normalisation of the sum, in codes of 8 bits before they are rounded."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.add_rmsnorm import added
from portakern.backends.reference.rmsnorm_quantize import rmsnorm_quantize
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("add_rmsnorm_quantize")
def add_rmsnorm_quantize(call: Call, config: Config) -> tuple[np.ndarray, ...]:
    """x, residual: (*batch, n), weight: (n) or None -> q, residual_out: (*batch, n), scale: (*batch, n / width)."""
    norm, total = added(call)
    return (*rmsnorm_quantize(norm, config), total)
