"""Root mean square normalisation on TPUs: y = x (sum(x^2) / n + eps)^-1/2 weight along the last axis, in two sweeps
over a row.

x: (*batch, n), weight: (n) or None -> y: (*batch, n). The grid is (row blocks, sweeps, n blocks), see `Walk`. Sweep 0
adds up the squares of each block, sweep 1 normalises (``narrow``: and rounds to x's dtype before the weight). Lanes
beyond n are no part of the sum.

block_rows: rows a block holds; block_n: elements of each row a block holds.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu._rows import Walk
from portakern.backends.pallas.tpu.layernorm import HELD, in_walks, normalised, what_is_normed
from portakern.core.call import Call


def narrowed(values: jax.Array, dtype: Any, narrow: bool) -> jax.Array:
    """Rounded to a dtype and back."""
    return values.astype(dtype).astype(values.dtype) if narrow else values


def rounds_before(call: Call) -> bool:
    """Whether x r is rounded before it meets the weight, and is not as wide as what it is computed in."""
    return call.options["rounding"] == "before_weight" and call.dtype in ("float16", "bfloat16")


def kernel(ref: Refs, *, walk: Walk, eps: float, narrow: bool) -> None:
    sweep, step = walk.sweep_and_step()

    @pl.when((sweep == 0) & (step == 0))
    def start() -> None:
        ref.squares[...] = jnp.zeros_like(ref.squares)

    @pl.when(sweep == 0)
    def add() -> None:
        ref.squares[...] += walk.sum_along_rows(jnp.square(what_is_normed(ref)), step)

    @pl.when(sweep == walk.sweeps - 1)
    def write() -> None:
        x = what_is_normed(ref)
        y = narrowed(x * lax.rsqrt(ref.squares[...] / walk.n + eps), ref.x.dtype, narrow)
        if "weight" in ref:
            y *= ref.weight[...].astype(jnp.float32)
        ref.y[...] = y.astype(ref.y.dtype)
        if "residual_out" in ref:
            ref.residual_out[...] = x.astype(ref.residual_out.dtype)


@BACKEND.implements("rmsnorm", **in_walks(HELD))
def rmsnorm(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array, ...]:
    run = partial(kernel, eps=call.options["eps"], narrow=rounds_before(call))
    return normalised(call, tiling, run, statistics=("squares",), flops=4)
