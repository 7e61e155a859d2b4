"""A residual added, and the layer normalisation of the sum over the last axis."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.add_rmsnorm import added
from portakern.backends.reference.layernorm import layernorm
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("add_layernorm")
def add_layernorm(call: Call, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """residual_out = x + residual, y = layernorm(residual_out).

    x, residual: (*batch, n), weight, bias: (n) or None -> y, residual_out: (*batch, n).
    """
    norm, total = added(call)
    return (*layernorm(norm, config), total)
