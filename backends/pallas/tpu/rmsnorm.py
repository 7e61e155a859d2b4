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

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu._rows import Phases, Strip
from portakern.backends.pallas.tpu.layernorm import HELD, in_walks, normalised, what_is_normed
from portakern.core.call import Call


def narrowed(values: jax.Array, dtype: Any, narrow: bool) -> jax.Array:
    """Rounded to a dtype and back."""
    return values.astype(dtype).astype(values.dtype) if narrow else values


def rounds_before(call: Call) -> bool:
    """Whether x r is rounded before it meets the weight, and is not as wide as what it is computed in."""
    return call.options["rounding"] == "before_weight" and call.dtype in ("float16", "bfloat16")


def kernel(ref: Refs, *, strip: Strip, eps: float, narrow: bool) -> Phases:
    x = partial(what_is_normed, ref)

    def start() -> None:
        ref.squares[...] = jnp.zeros_like(ref.squares)

    def gather() -> None:
        (squares,) = strip.sums(lambda at: (jnp.square(x(at)),))
        ref.squares[...] += squares

    def write() -> None:
        r = lax.rsqrt(ref.squares[...] / strip.n + eps)
        for at in strip.pieces():
            y = narrowed(x(at) * r, ref.x.dtype, narrow)
            if "weight" in ref:
                y *= at(ref.weight)
            at.write(ref.y, y)
            if "residual_out" in ref:
                at.write(ref.residual_out, x(at))

    return Phases(start, gather, write)


@BACKEND.implements("rmsnorm", **in_walks(HELD))
def rmsnorm(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array, ...]:
    run = partial(kernel, eps=call.options["eps"], narrow=rounds_before(call))
    return normalised(call, tiling, run, statistics=("squares",), flops=4)
