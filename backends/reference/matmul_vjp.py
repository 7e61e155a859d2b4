"""Gradients of the matrix product."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("matmul_vjp")
def matmul_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """d_a = d_c b^T and d_b = a^T d_c, each summed over the batch axes along which its operand was broadcast.

    No product is left out: 0 * inf is NaN.
    """
    a, b, d_c = (call.arrays[name] for name in ("a", "b", "d_c"))
    with np.errstate(all="ignore"):
        d_a = unbroadcast(np.matmul(d_c, np.swapaxes(b, -1, -2)), a.shape) if "d_a" in call.wants else None
        d_b = unbroadcast(np.matmul(np.swapaxes(a, -1, -2), d_c), b.shape) if "d_b" in call.wants else None
    return d_a, d_b


def unbroadcast(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum x over the axes that broadcasting made of ``shape``: those missing at the front, and those that are 1."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(i for i, extent in enumerate(shape) if extent == 1 != x.shape[i]), keepdims=True)
