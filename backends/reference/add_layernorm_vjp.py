"""Gradients of a residual added and the layer normalisation of the sum."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.add_rmsnorm_vjp import at_sum, with_that_of_the_sum
from portakern.backends.reference.layernorm_vjp import layernorm_vjp
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("add_layernorm_vjp")
def add_layernorm_vjp(call: Call, config: Config) -> tuple[np.ndarray | None, ...]:
    """d_x = d_residual_out + d_x of layernorm at residual_out; d_weight and d_bias of layernorm there.

    residual_out, d_y, d_residual_out: (*batch, n), weight, bias: (n) or None -> d_x: (*batch, n), d_weight, d_bias:
    (n).
    """
    d_x, *others = layernorm_vjp(at_sum(call), config)
    return with_that_of_the_sum(call, d_x), *others
