"""A residual added, and the layer normalisation of the sum on TPUs, along the last axis, in two sweeps over a row.

    s = x + residual, rounded to their dtype        y = (s - mean) / sqrt(var + eps) * weight + bias

x, residual: (*batch, n), weight, bias: (n) or None -> y, residual_out: (*batch, n). Grid and kernel are layernorm's,
which makes the sum anew in each sweep; the last one writes it.

block_rows: rows a block holds; block_n: elements of each row a block holds.

Source: Ba, Kiros and Hinton, "Layer Normalization" (2016), section 3; the sum is that of pre-norm transformers, Xiong
et al., "On layer normalization in the transformer architecture" (2020), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.tpu.add_rmsnorm import HELD
from portakern.backends.pallas.tpu.layernorm import in_walks, kernel, normalised
from portakern.core.call import Call


@BACKEND.implements("add_layernorm", **in_walks(HELD))
def add_layernorm(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array, ...]:
    run = partial(kernel, eps=call.options["eps"])
    return normalised(call, tiling, run, statistics=("mean", "m2"), flops=10, held=HELD)
