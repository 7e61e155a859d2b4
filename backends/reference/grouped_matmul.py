"""Matrix products of groups of rows: c[i] = a[i] b[g], where g is the group of row i."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("grouped_matmul")
def grouped_matmul(call: Call, config: Config) -> tuple[np.ndarray]:
    """a (rows, k), of which the rows before group_ends[g] and after the end of the group before are multiplied by
    b[g] (k, n) -> c (rows, n); zeros in rows of no group."""
    a, b, ends = (call.arrays[name] for name in ("a", "b", "group_ends"))
    c, start = np.zeros((len(a), b.shape[2])), 0
    with np.errstate(all="ignore"):
        for g, end in enumerate(ends):
            c[start:end] = a[start:end] @ b[g]
            start = end
    return (c,)
