"""Gradients of the gated product of a feed-forward layer."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("swiglu_vjp")
def swiglu_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """d_gate = d_y up s (1 + gate q) and d_up = d_y gate s, with s = 1 / (1 + exp(-gate)) and q = 1 / (1 + exp(gate)).

    silu(-inf) and the slope at an infinite gate are NaN by plain arithmetic, as in swiglu.
    """
    gate, up, d_y = (call.arrays[name] for name in ("gate", "up", "d_y"))
    with np.errstate(all="ignore"):
        s, q = 1 / (1 + np.exp(-gate)), 1 / (1 + np.exp(gate))
        d_gate = d_y * up * (s * (1 + gate * q)) if "d_gate" in call.wants else None
        d_up = d_y * (gate * s) if "d_up" in call.wants else None
    return d_gate, d_up
