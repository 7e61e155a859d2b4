"""The gated product of a feed-forward layer, in codes of 8 bits before they are rounded."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.rmsnorm_quantize import coded
from portakern.backends.reference.swiglu import swiglu
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("swiglu_quantize")
def swiglu_quantize(call: Call, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """gate, up: (*batch, n) -> q: (*batch, n), scale: (*batch, n / width)."""
    return coded(call, swiglu(call, config)[0])
