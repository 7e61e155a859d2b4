"""Gradients of the gated product with gelu."""

from __future__ import annotations

from math import pi, sqrt

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.geglu import share
from portakern.core.call import Call
from portakern.core.config import Config


def slope(gate: np.ndarray, approximate: str) -> np.ndarray:
    """The derivative of g P(g): P + g exp(-g^2 / 2) / sqrt(2 pi), or P (1 + g t' (1 - P)) of the tanh form.

    It is 1 or 0 to the last bit of float64 beyond 40, and so at infinities, where plain arithmetic has inf 0.
    """
    g = np.clip(gate, -40, 40)
    p = share(g, approximate)
    if approximate == "none":
        return p + g * np.exp(-(g**2) / 2) / sqrt(2 * pi)
    return p * (1 + 2 * sqrt(2 / pi) * g * (1 + 3 * 0.044715 * g**2) * share(-g, approximate))


@BACKEND.implements("geglu_vjp")
def geglu_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """d_gate = d_y up D(gate) and d_up = d_y gate P(gate)."""
    gate, up, d_y = (call.arrays[name] for name in ("gate", "up", "d_y"))
    approximate = call.options["approximate"]
    with np.errstate(all="ignore"):
        d_gate = d_y * up * slope(gate, approximate) if "d_gate" in call.wants else None
        d_up = d_y * (gate * share(gate, approximate)) if "d_up" in call.wants else None
    return d_gate, d_up
