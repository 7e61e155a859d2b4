"""The gated product of a feed-forward layer, with gelu."""

from __future__ import annotations

from math import erfc, pi, sqrt

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


def share(gate: np.ndarray, approximate: str) -> np.ndarray:
    """P(g) = erfc(-g / sqrt 2) / 2, or 1 / (1 + exp(-t)) with t = 2 sqrt(2 / pi) (g + 0.044715 g^3)."""
    if approximate == "tanh":
        return 1 / (1 + np.exp(-2 * sqrt(2 / pi) * gate * (1 + 0.044715 * gate**2)))
    return np.vectorize(erfc, otypes=[np.float64])(-gate * sqrt(0.5)) / 2


@BACKEND.implements("geglu")
def geglu(call: Call, config: Config) -> tuple[np.ndarray]:
    """y = gate P(gate) up. gelu(-inf) is -inf 0, NaN by plain arithmetic."""
    gate, up = call.arrays["gate"], call.arrays["up"]
    with np.errstate(all="ignore"):
        return (gate * share(gate, call.options["approximate"]) * up,)
