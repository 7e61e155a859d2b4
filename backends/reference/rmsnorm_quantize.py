"""Root mean square normalisation over the last axis, in codes of 8 bits before they are rounded."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.quantize import scales
from portakern.backends.reference.rmsnorm import rmsnorm
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.specs.quantize import largest


def coded(call: Call, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes of y, (*batch, n), and a scale for every ``width`` numbers of a row, the last as many as are left."""
    n, width, most = y.shape[-1], call.options["width"], largest(call)
    with np.errstate(all="ignore"):
        scale = scales(call, np.maximum.reduceat(np.abs(y), np.arange(0, n, width), -1))
        return np.clip(y / np.take(scale, np.arange(n) // width, -1), -most, most), scale


@BACKEND.implements("rmsnorm_quantize")
def rmsnorm_quantize(call: Call, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """x: (*batch, n), weight: (n) or None -> q: (*batch, n), scale: (*batch, n / width)."""
    return coded(call, rmsnorm(call, config)[0])
