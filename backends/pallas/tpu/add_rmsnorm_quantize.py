"""A residual added, and the root mean square normalisation of the sum on TPUs, in codes of 8 bits.

    s = x + residual, rounded to their dtype        q, scale = those of rmsnorm_quantize of s

x, residual, residual_out, q: (*batch, n); weight: (n) or None; scale: (*batch, groups). The kernel is
rmsnorm_quantize's: it makes the sum anew wherever it reads x, and writes it last.

Source: Xiong et al., "On layer normalization in the transformer architecture" (2020), section 3, for the sum.
"""

from __future__ import annotations

import jax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import WholeRowsConfig
from portakern.backends.pallas.tpu.rmsnorm_quantize import coded_rows, kernel, whole_rows
from portakern.core.call import Call


@BACKEND.implements("add_rmsnorm_quantize", **whole_rows("x", arrays=3))
def add_rmsnorm_quantize(call: Call, config: WholeRowsConfig) -> tuple[jax.Array, ...]:
    found = coded_rows(call, config, kernel, ("x", "residual"), ("residual_out",), flops=17)
    return found["q"], found["scale"], found["residual_out"]
