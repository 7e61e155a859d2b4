"""y[t] = weight[ids[t]]; NaN where an id is no row."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("embedding")
def embedding(call: Call, config: Config) -> tuple[np.ndarray]:
    weight, ids = call.arrays["weight"], call.arrays["ids"]
    there = (ids >= 0) & (ids < len(weight))
    y = weight[np.where(there, ids, 0)]
    y[~there] = np.nan
    return (y,)
