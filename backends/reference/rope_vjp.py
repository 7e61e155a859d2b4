"""Gradient of the rotary position embedding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.rope import turned
from portakern.core.call import Call


@BACKEND.implements("rope_vjp")
def rope_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[np.ndarray]:
    """The transpose of a turn is the turn by -sin."""
    d_y, cos, sin = (call.arrays[name] for name in ("d_y", "cos", "sin"))
    return (turned(d_y, cos, -sin, call.options["interleaved"]),)
