"""Matrix products of groups of rows of 8-bit numbers with scales."""

from __future__ import annotations

import itertools

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("scaled_grouped_matmul")
def scaled_grouped_matmul(call: Call, config: Config) -> tuple[np.ndarray]:
    """c[i] = sum over blocks p of k: scale_a[i, p] (a[i, p] @ b[g, p]) scale_b[g, p] + bias[g], where g is the group
    of row i; zeros in rows of no group."""
    a, b, ends, scale_a, scale_b, bias = (
        call.arrays[name] for name in ("a", "b", "group_ends", "scale_a", "scale_b", "bias")
    )
    (rows, k), (_, _, n) = a.shape, b.shape
    count = max(scale_a.shape[1], scale_b.shape[1])
    width = call.dims["k_width"] if count > 1 else k
    columns = np.minimum(np.arange(n) // call.dims["n_width"], scale_b.shape[2] - 1)
    of_a = np.broadcast_to(scale_a, (rows, count))
    c = np.zeros((rows, n))
    with np.errstate(all="ignore"):
        for g, (start, end) in enumerate(itertools.pairwise([0, *ends.astype(int)])):
            of_b = np.broadcast_to(scale_b[g % len(scale_b)], (count, scale_b.shape[2]))[:, columns]
            for p, block in enumerate(slice(at, at + width) for at in range(0, k, width)):
                part = a[start:end, block] @ b[g, block]
                c[start:end] += of_a[start:end, p, None] * of_b[p] * part
            c[start:end] += 0 if bias is None else bias[g]
    return (c,)
