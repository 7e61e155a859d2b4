"""The rows of tokens sorted by their experts, where they went, and where experts end."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("permute")
def permute(call: Call, config: Config) -> tuple[np.ndarray, ...]:
    x, indices, experts = call.arrays["x"], call.arrays["indices"], call.dims["experts"]
    expert = indices.reshape(-1)
    expert = np.where((expert >= 0) & (expert < experts), expert, experts)
    order = np.argsort(expert, kind="stable")
    sizes = np.bincount(expert, minlength=experts + 1)
    ends = np.cumsum(sizes[:experts])
    sent = order[: ends[-1]]
    y, positions = np.zeros((expert.size, x.shape[1])), np.full(expert.size, -1)
    y[: ends[-1]], positions[sent] = x[sent // indices.shape[1]], np.arange(len(sent))
    return y, positions.reshape(indices.shape).astype(np.float64), ends.astype(np.float64)
