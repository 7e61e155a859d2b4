"""Gradient of the rotary position embedding."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.rope import turned
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("rope_vjp")
def rope_vjp(call: Call, config: Config) -> tuple[np.ndarray]:
    """The transpose of a turn is the turn by -sin."""
    d_y, cos, sin = (call.arrays[name] for name in ("d_y", "cos", "sin"))
    return (turned(d_y, cos, -sin, call.options["interleaved"]),)
