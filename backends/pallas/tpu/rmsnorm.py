"""Root mean square normalisation on TPUs along the last axis, and its gradients, each in two sweeps over a row.

    xh = x r        r = (mean(x^2) + eps)^-1/2        y = xh weight        h = weight d_y
    d_x = r (h - xh mean(h xh))        d_weight = sum over rows of d_y xh

x, y, d_y, d_x: (*batch, n); weight: (n) or None; d_weight: (n). The grid is (row blocks, sweeps, n blocks), see
`BlockWalk`. Sweep 0 adds up the squares of each block, and of a gradient h x; sweep 1 writes, as layernorm's kernels
do. With ``narrow`` xh is rounded to x's dtype before the weight, and in the gradients so are h, and xh where d_weight
meets it.

block_rows: rows a block holds; block_n: elements of each row a block holds.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4, and its derivative.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import RowsConfig
from portakern.backends.pallas.lib.blocks import Refs
from portakern.backends.pallas.lib.mosaic_tpu.rows import Phases, Strip, StripSlice
from portakern.backends.pallas.tpu.layernorm import (
    GRADIENT_HELD,
    HELD,
    gradients,
    in_walks,
    normalised,
    what_is_normed,
    with_past,
)
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
def rmsnorm(call: Call, config: RowsConfig) -> tuple[jax.Array, ...]:
    run = partial(kernel, eps=call.options["eps"], narrow=rounds_before(call))
    return normalised(call, config, run, statistics=("squares",), flops=4)


def gradient_kernel(ref: Refs, *, strip: Strip, eps: float, narrow: bool) -> Phases:
    n = strip.n

    def h(at: StripSlice) -> jax.Array:
        return narrowed(at(ref.d_y) * at(ref.weight), ref.x.dtype, narrow) if "weight" in ref else at(ref.d_y)

    def start() -> None:
        ref.squares[...] = jnp.zeros_like(ref.squares)
        ref.hx[...] = jnp.zeros_like(ref.hx)

    def gather() -> None:
        def sums(at: StripSlice) -> tuple[jax.Array, ...]:
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


@BACKEND.implements("rmsnorm_vjp", **in_walks(GRADIENT_HELD))
def rmsnorm_vjp(call: Call, config: RowsConfig) -> tuple[jax.Array | None, ...]:
    run = partial(gradient_kernel, eps=call.options["eps"], narrow=rounds_before(call))
    return gradients(call, config, run, ("squares", "hx"), 12, GRADIENT_HELD, call.arrays["x"])
