"""The gated product of a feed-forward layer."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("swiglu")
def swiglu(call: Call, config: Config) -> tuple[np.ndarray]:
    """y = gate / (1 + exp(-gate)) up. silu(-inf) is -inf / inf, NaN by plain arithmetic."""
    gate, up = call.arrays["gate"], call.arrays["up"]
    with np.errstate(all="ignore"):
        return (gate / (1 + np.exp(-gate)) * up,)
