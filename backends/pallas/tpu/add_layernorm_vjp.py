"""Gradients of a residual added and the layer normalisation of the sum on TPUs.

    d_x = d_residual_out + the d_x of layernorm_vjp at the sum, which is the gradient of both terms

residual_out, d_y, d_residual_out: (*batch, n), weight, bias: (n) or None -> d_x: (*batch, n), d_weight, d_bias: (n).
Grid and kernels are those of layernorm_vjp, whose last sweep alone reads d_residual_out.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
equation 2.1, for the merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.tpu.add_rmsnorm_vjp import HELD
from portakern.backends.pallas.tpu.layernorm import in_walks
from portakern.backends.pallas.tpu.layernorm_vjp import gradients, kernel
from portakern.core.call import Call


@BACKEND.implements("add_layernorm_vjp", **in_walks(HELD))
def add_layernorm_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    x, past = call.arrays["residual_out"], call.arrays["d_residual_out"]
    run = partial(kernel, eps=call.options["eps"])
    return gradients(call, tiling, run, ("mean", "m2", "h_sum", "hx"), 19, HELD, x, past)
