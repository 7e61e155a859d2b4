"""Gradients of a residual added and the root mean square normalisation of the sum."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.rmsnorm_vjp import rmsnorm_vjp
from portakern.core.call import Call
from portakern.core.config import Config


def at_sum(call: Call) -> Call:
    """The call of the norm's gradients, at the sum that was normed."""
    given = None if call.given is None else {**call.given, "x": call.dtype}
    return call.replace(arrays={**call.arrays, "x": call.arrays["residual_out"]}, given=given)


def with_that_of_the_sum(call: Call, d_x: np.ndarray | None) -> np.ndarray | None:
    """d_x of the norm, and d_residual_out of the sum that goes past it."""
    other = call.arrays["d_residual_out"]
    with np.errstate(all="ignore"):
        return d_x if d_x is None or other is None else d_x + other


@BACKEND.implements("add_rmsnorm_vjp")
def add_rmsnorm_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """d_x = d_residual_out + d_x of rmsnorm at residual_out; d_weight of rmsnorm there.

    residual_out, d_y, d_residual_out: (*batch, n), weight: (n) or None -> d_x: (*batch, n), d_weight: (n).
    """
    d_x, *others = rmsnorm_vjp(at_sum(call), config)
    return with_that_of_the_sum(call, d_x), *others
