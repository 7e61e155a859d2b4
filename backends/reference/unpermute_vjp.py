"""d_x[positions[t, j]] = weights[t, j] d_y[t]; d_weights[t, j] = d_y[t] . x[positions[t, j]]."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("unpermute_vjp")
def unpermute_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    x, positions, weights, d_y = (call.arrays[name] for name in ("x", "positions", "weights", "d_y"))
    d_x, d_weights = np.zeros(x.shape), np.zeros(weights.shape)
    with np.errstate(all="ignore"):
        for t, j in np.argwhere((positions >= 0) & (positions < len(x))):
            d_x[positions[t, j]] = weights[t, j] * d_y[t]
            d_weights[t, j] = (d_y[t] * x[positions[t, j]]).sum()
    found = {"d_x": d_x, "d_weights": d_weights}
    return tuple(y if name in call.wants else None for name, y in found.items())
