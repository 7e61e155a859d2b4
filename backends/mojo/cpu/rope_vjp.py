"""Gradient of the rotary position embedding."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.cpu.rope import turned
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("rope_vjp")
def rope_vjp(call: Call, config: Config) -> tuple[np.ndarray]:
    """The transpose of a turn is the turn by -sin."""
    return (turned(call, call.arrays["d_y"], -call.arrays["sin"]),)
