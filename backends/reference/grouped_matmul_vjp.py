"""Gradients of matrix products of groups of rows."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("grouped_matmul_vjp")
def grouped_matmul_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """d_a (rows, k): d_c b_g^T in the rows of group g; d_b (groups, k, n): a^T d_c over them. Zeros where there are
    none."""
    a, b, ends, d_c = (call.arrays[name] for name in ("a", "b", "group_ends", "d_c"))
    d_a, d_b, start = np.zeros(a.shape), np.zeros(b.shape), 0
    with np.errstate(all="ignore"):
        for g, end in enumerate(ends):
            d_a[start:end] = d_c[start:end] @ b[g].T
            d_b[g] = a[start:end].T @ d_c[start:end]
            start = end
    return tuple(x if name in call.wants else None for name, x in (("d_a", d_a), ("d_b", d_b)))
