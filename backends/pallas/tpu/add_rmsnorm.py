"""A residual added and the root mean square normalisation of the sum on TPUs, with its gradients.

    s = x + residual, rounded to their dtype        y = rmsnorm(s)        d_x = d_residual_out + rmsnorm_vjp's

x, residual, y, residual_out, d_y, d_residual_out, d_x: (*batch, n); weight: (n) or None; d_weight: (n). d_x is the
gradient of both terms. Grid and kernels are rmsnorm's: the forward one makes the sum anew in each sweep, and the last
sweep writes it; of the gradient the last sweep alone reads d_residual_out.

Source: Xiong et al., "On layer normalization in the transformer architecture" (2020), section 3, for the sum.
"""

from __future__ import annotations

from functools import partial

import jax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import RowsConfig
from portakern.backends.pallas.lib.mosaic_tpu.rows import VmemUse
from portakern.backends.pallas.tpu.layernorm import gradients, in_walks, normalised
from portakern.backends.pallas.tpu.rmsnorm import gradient_kernel, kernel, rounds_before
from portakern.core.call import Call

HELD = VmemUse(streamed=4, computed=4)


@BACKEND.implements("add_rmsnorm", **in_walks(HELD))
def add_rmsnorm(call: Call, config: RowsConfig) -> tuple[jax.Array, ...]:
    run = partial(kernel, eps=call.options["eps"], narrow=rounds_before(call))
    return normalised(call, config, run, statistics=("squares",), flops=5, vmem_use=HELD)


GRADIENT_HELD = VmemUse(streamed=4, computed=5)


@BACKEND.implements("add_rmsnorm_vjp", **in_walks(GRADIENT_HELD))
def add_rmsnorm_vjp(call: Call, config: RowsConfig) -> tuple[jax.Array | None, ...]:
    run = partial(gradient_kernel, eps=call.options["eps"], narrow=rounds_before(call))
    x, past = call.arrays["residual_out"], call.arrays["d_residual_out"]
    return gradients(call, config, run, ("squares", "hx"), 13, GRADIENT_HELD, x, past)
