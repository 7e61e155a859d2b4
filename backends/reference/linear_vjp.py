"""Gradients of the linear layer with bias, activation and residual."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.geglu_vjp import slope
from portakern.core.call import Call
from portakern.core.config import Config


def d_activated(d_y: np.ndarray, z: np.ndarray, activation: str) -> np.ndarray:
    """d_y f'(z). relu selects; the slope of silu is 1 / (1 + exp(-z)) (1 + z / (1 + exp(z)))."""
    if activation == "none":
        return d_y
    if activation == "relu":
        return np.where(z <= 0, 0.0, d_y)
    if activation == "silu":
        small = np.exp(-np.abs(z))
        s, q = (np.where(z * sign >= 0, 1.0, small) / (1 + small) for sign in (1, -1))
        return d_y * (s * (1 + z * q))
    return d_y * slope(z, "tanh" if activation == "gelu_tanh" else "none")


@BACKEND.implements("linear_vjp")
def linear_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """d_x = d_z weight, d_weight = d_z^T x, d_bias = the sum of d_z over rows."""
    x, weight, d_y, pre = (call.arrays[name] for name in ("x", "weight", "d_y", "pre"))
    with np.errstate(all="ignore"):
        d_z = d_activated(d_y, pre, call.options["activation"])
        rows = d_z.reshape(-1, d_z.shape[-1])
        d_x = d_z @ weight if "d_x" in call.wants else None
        d_weight = rows.T @ x.reshape(-1, x.shape[-1]) if "d_weight" in call.wants else None
        return d_x, d_weight, rows.sum(0) if "d_bias" in call.wants else None
