"""Rotary position embedding."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """y_a = x_a cos - x_b sin and y_b = x_b cos + x_a sin; what is in no pair stays."""
    pairs, y = cos.shape[-1], np.array(x)
    a, b = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    cos, sin = cos[:, :, None], sin[:, :, None]  # one for all heads
    with np.errstate(all="ignore"):
        y[..., a] = x[..., a] * cos - x[..., b] * sin
        y[..., b] = x[..., b] * cos + x[..., a] * sin
    return y


@BACKEND.implements("rope")
def rope(call: Call, config: Config) -> tuple[np.ndarray]:
    x, cos, sin = (call.arrays[name] for name in ("x", "cos", "sin"))
    return (turned(x, cos, sin, call.options["interleaved"]),)
