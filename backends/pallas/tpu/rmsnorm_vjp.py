"""Gradients of root mean square normalisation on TPUs, over the last axis, in two sweeps over a row.

    xh = x r        r = (mean(x^2) + eps)^-1/2        h = weight d_y
    d_x = r (h - xh mean(h xh))        d_weight = sum over rows of d_y xh

x, d_y: (*batch, n), weight: (n) or None -> d_x: (*batch, n), d_weight: (n). The grid is (row blocks, sweeps, n blocks),
see `Walk`. ``narrow``: h, and xh where d_weight meets it, are rounded to x's dtype. Sweep 0 adds up x^2 and h x of each
block; sweep 1 writes d_x, and of d_weight one row of partial sums for each row block, which layernorm_vjp's second
kernel adds up in order.

block_rows: rows a block holds, whose sums are one partial sum; block_n: elements of each row a block holds.

Source: the derivative of Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu._rows import Walk
from portakern.backends.pallas.tpu.layernorm import in_walks
from portakern.backends.pallas.tpu.layernorm_vjp import HELD, gradients, with_past
from portakern.backends.pallas.tpu.rmsnorm import narrowed, rounds_before
from portakern.core.call import Call


def kernel(ref: Refs, *, walk: Walk, eps: float, narrow: bool) -> None:
    group, (sweep, step) = walk.group(), walk.sweep_and_step()

    def weighted(d_y: jax.Array) -> jax.Array:
        """h."""
        if "weight" not in ref:
            return d_y
        return narrowed(d_y * ref.weight[...].astype(jnp.float32), ref.x.dtype, narrow)

    @pl.when((sweep == 0) & (step == 0))
    def start() -> None:
        ref.squares[...] = jnp.zeros_like(ref.squares)
        ref.hx[...] = jnp.zeros_like(ref.hx)

    @pl.when(sweep == 0)
    def add() -> None:
        x, h = ref.x[...].astype(jnp.float32), weighted(ref.d_y[...].astype(jnp.float32))
        ref.squares[...] += walk.sum_along_rows(jnp.square(x), step)
        if "d_x" in ref:
            ref.hx[...] += walk.sum_along_rows(h * x, step)

    @pl.when(sweep == walk.sweeps - 1)
    def write() -> None:
        x, d_y = ref.x[...].astype(jnp.float32), ref.d_y[...].astype(jnp.float32)
        r = lax.rsqrt(ref.squares[...] / walk.n + eps)
        xh = x * r
        if "d_x" in ref:
            d_x = r * (weighted(d_y) - xh * (r * (ref.hx[...] / walk.n)))
            ref.d_x[...] = with_past(ref, d_x).astype(ref.d_x.dtype)
        if "d_weight" in ref:
            ref.d_weight[...] = walk.sum_over_rows(d_y * narrowed(xh, ref.x.dtype, narrow), group)


@BACKEND.implements("rmsnorm_vjp", **in_walks(HELD))
def rmsnorm_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    run = partial(kernel, eps=call.options["eps"], narrow=rounds_before(call))
    return gradients(call, tiling, run, ("squares", "hx"), 12, HELD, call.arrays["x"])
