"""Gradients of a residual added and the root mean square normalisation of the sum on TPUs.

    d_x = d_residual_out + the d_x of rmsnorm_vjp at the sum, which is the gradient of both terms

residual_out, d_y, d_residual_out: (*batch, n), weight: (n) or None -> d_x: (*batch, n), d_weight: (n). Grid and kernels
are those of rmsnorm_vjp, whose last sweep alone reads d_residual_out.

Source: the derivative of Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.tpu._rows import Held
from portakern.backends.pallas.tpu.layernorm import in_walks
from portakern.backends.pallas.tpu.layernorm_vjp import gradients
from portakern.backends.pallas.tpu.rmsnorm import rounds_before
from portakern.backends.pallas.tpu.rmsnorm_vjp import kernel
from portakern.core.call import Call

HELD = Held(streamed=4, computed=5)


@BACKEND.implements("add_rmsnorm_vjp", **in_walks(HELD))
def add_rmsnorm_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    run = partial(kernel, eps=call.options["eps"], narrow=rounds_before(call))
    x, past = call.arrays["residual_out"], call.arrays["d_residual_out"]
    return gradients(call, tiling, run, ("squares", "hx"), 13, HELD, x, past)
