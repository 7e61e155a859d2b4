"""A residual added and the layer normalisation of the sum on TPUs, with its gradients.

    s = x + residual, rounded to their dtype        y = layernorm(s)        d_x = d_residual_out + layernorm_vjp's

x, residual, y, residual_out, d_y, d_residual_out, d_x: (*batch, n); weight, bias: (n) or None; d_weight, d_bias: (n).
Grid and kernels are layernorm's, and read and write what those of add_rmsnorm do.

Source: Xiong et al., "On layer normalization in the transformer architecture" (2020), section 3, for the sum.
"""

from __future__ import annotations

from functools import partial

import jax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import RowsConfig
from portakern.backends.pallas.tpu.add_rmsnorm import GRADIENT_HELD, HELD
from portakern.backends.pallas.tpu.layernorm import gradient_kernel, gradients, in_walks, kernel, normalised
from portakern.core.call import Call


@BACKEND.implements("add_layernorm", **in_walks(HELD))
def add_layernorm(call: Call, config: RowsConfig) -> tuple[jax.Array, ...]:
    run = partial(kernel, eps=call.options["eps"])
    return normalised(call, config, run, statistics=("mean", "m2"), flops=10, vmem_use=HELD)


@BACKEND.implements("add_layernorm_vjp", **in_walks(GRADIENT_HELD))
def add_layernorm_vjp(call: Call, config: RowsConfig) -> tuple[jax.Array | None, ...]:
    x, past = call.arrays["residual_out"], call.arrays["d_residual_out"]
    run = partial(gradient_kernel, eps=call.options["eps"])
    return gradients(call, config, run, ("mean", "m2", "h_sum", "hx"), 19, GRADIENT_HELD, x, past)
