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

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu._rows import Phases, Piece, Strip
from portakern.backends.pallas.tpu.layernorm import in_walks
from portakern.backends.pallas.tpu.layernorm_vjp import HELD, gradients, with_past
from portakern.backends.pallas.tpu.rmsnorm import narrowed, rounds_before
from portakern.core.call import Call


def kernel(ref: Refs, *, strip: Strip, eps: float, narrow: bool) -> Phases:
    n = strip.n

    def h(at: Piece) -> jax.Array:
        return narrowed(at(ref.d_y) * at(ref.weight), ref.x.dtype, narrow) if "weight" in ref else at(ref.d_y)

    def start() -> None:
        ref.squares[...] = jnp.zeros_like(ref.squares)
        ref.hx[...] = jnp.zeros_like(ref.hx)

    def gather() -> None:
        def sums(at: Piece) -> tuple[jax.Array, ...]:
            x = at(ref.x)
            return (jnp.square(x), h(at) * x) if "d_x" in ref else (jnp.square(x),)

        squares, *hx = strip.sums(sums)
        ref.squares[...] += squares
        if "d_x" in ref:
            ref.hx[...] += hx[0]

    def write() -> None:
        r = lax.rsqrt(ref.squares[...] / n + eps)
        hxh_mean = r * (ref.hx[...] / n)
        for at in strip.pieces():
            xh = at(ref.x) * r
            if "d_x" in ref:
                at.write(ref.d_x, with_past(ref, at, r * (h(at) - xh * hxh_mean)))
            if "d_weight" in ref:
                at.add_to(ref.d_weight, at(ref.d_y) * narrowed(xh, ref.x.dtype, narrow))

    return Phases(start, gather, write)


@BACKEND.implements("rmsnorm_vjp", **in_walks(HELD))
def rmsnorm_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    run = partial(kernel, eps=call.options["eps"], narrow=rounds_before(call))
    return gradients(call, tiling, run, ("squares", "hx"), 12, HELD, call.arrays["x"])
