"""y[t] = sum of weights[t, j] x[positions[t, j]] over j."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


def weighted_sums(x: np.ndarray, positions: np.ndarray, weights: np.ndarray) -> np.ndarray:
    y = np.zeros((len(positions), x.shape[1]))
    with np.errstate(all="ignore"):
        for j in range(positions.shape[1]):
            there = (positions[:, j] >= 0) & (positions[:, j] < len(x))
            y[there] += weights[there, j, None] * x[positions[there, j]]
    return y


@BACKEND.implements("unpermute")
def unpermute(call: Call, config: Config) -> tuple[np.ndarray]:
    return (weighted_sums(*(call.arrays[name] for name in ("x", "positions", "weights"))),)
