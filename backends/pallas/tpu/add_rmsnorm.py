"""A residual added, and the root mean square normalisation of the sum on TPUs, along the last axis, in two sweeps over
a row.

    s = x + residual, rounded to their dtype        y = s (sum(s^2) / n + eps)^-1/2 weight

x, residual: (*batch, n), weight: (n) or None -> y, residual_out: (*batch, n). Grid and kernel are rmsnorm's, which
makes the sum anew in each sweep; the last one writes it.

block_rows: rows a block holds; block_n: elements of each row a block holds.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4; the sum is that of pre-norm
transformers, Xiong et al., "On layer normalization in the transformer architecture" (2020), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.tpu._rows import Held
from portakern.backends.pallas.tpu.layernorm import in_walks, normalised
from portakern.backends.pallas.tpu.rmsnorm import kernel, rounds_before
from portakern.core.call import Call

HELD = Held(streamed=4, computed=4)


@BACKEND.implements("add_rmsnorm", **in_walks(HELD))
def add_rmsnorm(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array, ...]:
    run = partial(kernel, eps=call.options["eps"], narrow=rounds_before(call))
    return normalised(call, tiling, run, statistics=("squares",), flops=5, held=HELD)
