"""The linear layer with bias, activation and residual."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.geglu import share
from portakern.core.call import Call
from portakern.core.config import Config


def activated(z: np.ndarray, activation: str) -> np.ndarray:
    """f(z); gelu and silu of -inf are NaN by plain arithmetic."""
    if activation == "none":
        return z
    if activation == "relu":
        return np.where(z < 0, 0.0, z)
    if activation == "silu":
        return z / (1 + np.exp(-z))
    return z * share(z, "tanh" if activation == "gelu_tanh" else "none")


@BACKEND.implements("linear")
def linear(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """x (*batch, k) @ weight (n, k)^T + bias (n) -> f of it + residual (*batch, n)."""
    x, weight, bias, residual = (call.arrays[name] for name in ("x", "weight", "bias", "residual"))
    with np.errstate(all="ignore"):
        z = x @ weight.T
        z = z if bias is None else z + bias
        y = activated(z, call.options["activation"])
        return y if residual is None else y + residual, z if "pre" in call.wants else None
