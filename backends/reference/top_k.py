"""The k greatest or least numbers of each row, and their places."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("top_k")
def top_k(call: Call, config: Config) -> tuple[np.ndarray, ...]:
    """Each row is sorted: by what is NaN, then by size, and equal numbers stay as they stood. The first k are taken."""
    x = call.arrays["x"]
    nan = np.isnan(x)
    size = np.where(nan, 0.0, x)
    keys = (-size, ~nan) if call.options["largest"] else (size, nan)  # the last one counts first, False before True
    indices = np.lexsort(keys, axis=-1)[..., : call.dims["k"]]
    return np.take_along_axis(x, indices, -1), indices.astype(np.float64)
