"""The gated product of a feed-forward layer."""

from __future__ import annotations

import numpy as np

from portakern.backends.mojo import BACKEND
from portakern.backends.mojo.launch import MojoFunction, new, over_elements
from portakern.core.call import Call
from portakern.core.config import Config

KERNEL = MojoFunction("swiglu")


@BACKEND.implements("swiglu")
def swiglu(call: Call, config: Config) -> tuple[np.ndarray]:
    gate, up = call.arrays["gate"], call.arrays["up"]
    y = new(gate.shape, call.dtype)
    over_elements(KERNEL, gate, up, y, space=2, cost=4)
    return (y,)
