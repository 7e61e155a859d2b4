"""Codes of 8 bits, before they are rounded, and the scales of their blocks."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.specs.quantize import LEAST_SCALE, blocks_of, for_each_number, largest


def power_of_two(x: np.ndarray) -> np.ndarray:
    """The least powers of two that are no less than x; NaN and inf as they are."""
    mantissa, exponent = np.frexp(x)
    return np.where(np.isfinite(x), np.ldexp(1.0, exponent - (mantissa == 0.5)), x)


def scales(call: Call, top: np.ndarray) -> np.ndarray:
    """Of blocks, by their greatest magnitudes."""
    options = call.options
    if options["scale_ub"] is not None:
        top = np.minimum(top, options["scale_ub"])
    scale = np.maximum(np.maximum(top / largest(call), options["scale_floor"]), LEAST_SCALE)
    scale = power_of_two(scale) if options["scales"] == "power_of_two" else scale
    return np.where((top == 0) & (options["scale_floor"] == 0), 1.0, scale)


@BACKEND.implements("quantize")
def quantize(call: Call, config: Config) -> tuple[np.ndarray, ...]:
    x, given, most = call.arrays["x"], call.arrays["static_scale"], largest(call)
    shape = call.dims["row_blocks"], call.dims["column_blocks"]
    with np.errstate(all="ignore"):
        if given is None:
            scale = scales(call, np.abs(blocks_of(call, call.arrays["x"])).max((1, 3)))
        else:
            scale = np.array(np.broadcast_to(given, shape))
        return np.clip(x / for_each_number(call, scale), -most, most), scale
