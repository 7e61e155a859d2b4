"""Layer normalisation on TPUs: y = (x - mean) / sqrt(var + eps) * weight + bias along the last axis, in two sweeps over
a row.

x: (*batch, n), weight and bias: (n) or None -> y: (*batch, n). The grid is (row blocks, sweeps, n blocks), see `Walk`.
Sweep 0 takes the mean of each block and the sum of squares about it, and merges them into the row's mean and m2, the
sum of squares about that; sweep 1 normalises. In a row that fits one block the merge is exact, and what is left is the
two-pass formula. Lanes beyond n are no part of any sum. No difference of large squares is ever taken, so a large mean
costs no more than its own rounding; and the mean of what a block's mean leaves of it is added to that, so that equal
numbers have themselves as their mean, and leave 0, however sums and quotients round.

block_rows: rows a block holds; block_n: elements of each row a block holds.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
equation 2.1; Ba, Kiros and Hinton, "Layer Normalization" (2016), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Refs
from portakern.backends.pallas.tpu import _rows
from portakern.backends.pallas.tpu._rows import Held, Phases, Piece, Strip, Walk, launched, refused, row_tiling
from portakern.core.call import Call

HELD = Held(streamed=2, computed=3)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"]}


def default_tiling(call: Call, held: Held) -> dict[str, int]:
    return row_tiling(call, call.dims["n"], 1, held)


def walk_of(call: Call, tiling: Mapping[str, int]) -> Walk:
    """How a normalisation along the last axis walks the rows of its arrays."""
    return Walk.along_last(call, tiling, (*call.dims["batch"], call.dims["n"]))


supports = partial(refused, walk_of=walk_of)
in_walks = partial(_rows.in_walks, key=key, default=default_tiling, walk_of=walk_of)


def merge(mean: Any, strip: Strip, x: Callable[[Piece], Any]) -> tuple[Any, Any, Any, Any]:
    """Merge a block of rows, of which x gives each piece, into the mean of what the rows have shown before it (equation
    2.1).

    Returns the block's own mean, by how much it exceeds the mean so far, by how much it moves that, and what comes to
    the m2 of both because their means differ.
    """
    walk, seen = strip.walk, strip.step * strip.walk.block_n
    here = jnp.minimum(walk.n - seen, walk.block_n)
    share = jnp.where(seen == 0, jnp.float32(1), jnp.float32(here) / jnp.float32(seen + here))
    (total,) = strip.sums(lambda at: (x(at),))
    rounded = total / jnp.float32(here)
    (rest,) = strip.sums(lambda at: (x(at) - rounded,))
    block_mean = rounded + rest / jnp.float32(here)
    if walk.one_step:  # the same bits, for fewer columns of numbers
        mean[...] = block_mean
        return block_mean, 0.0, 0.0, 0.0
    delta = block_mean - mean[...]
    # delta is squared last: it is the whole mean in the first block, where its weight is 0
    between = delta * (delta * (share * jnp.float32(seen)))
    moved = delta * share
    mean[...] += moved
    return block_mean, delta, moved, between


def what_is_normed(ref: Refs, at: Piece) -> jax.Array:
    """A piece of rows of x, or where there is a residual of their sum, rounded to their dtype."""
    x = at(ref.x)
    if "residual" in ref:
        x = (x + at(ref.residual)).astype(ref.x.dtype).astype(jnp.float32)
    return x


def kernel(ref: Refs, *, strip: Strip, eps: float) -> Phases:
    x = partial(what_is_normed, ref)

    def start() -> None:
        ref.mean[...] = jnp.zeros_like(ref.mean)
        ref.m2[...] = jnp.zeros_like(ref.m2)

    def gather() -> None:
        block_mean, _, _, between = merge(ref.mean, strip, x)
        (m2,) = strip.sums(lambda at: (jnp.square(x(at) - block_mean),))
        ref.m2[...] += m2 + between

    def write() -> None:
        mean, r = ref.mean[...], lax.rsqrt(ref.m2[...] / strip.n + eps)
        for at in strip.pieces():
            y = (x(at) - mean) * r
            if "weight" in ref:
                y *= at(ref.weight)
            if "bias" in ref:
                y += at(ref.bias)
            at.write(ref.y, y)
            if "residual_out" in ref:
                at.write(ref.residual_out, x(at))

    return Phases(start, gather, write)


@BACKEND.implements("layernorm", **in_walks(HELD))
def layernorm(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array, ...]:
    return normalised(call, tiling, partial(kernel, eps=call.options["eps"]), statistics=("mean", "m2"), flops=9)


def normalised(
    call: Call,
    tiling: Mapping[str, int],
    kernel: Callable[..., Phases],
    statistics: tuple[str, ...],
    flops: int,
    held: Held = HELD,
) -> tuple[jax.Array, ...]:
    """y of a normalisation along the last axis, and where there is a residual the sum: what ``kernel(ref, strip=...)``
    makes of x, and of the residual, the weight and the bias that the call has.

    The kernel keeps the named statistics of each row, and does so many operations an element.
    """
    x, walk = call.arrays["x"], walk_of(call, tiling)

    def there(*names: str) -> dict[str, jax.Array]:
        return {name: call.arrays[name] for name in names if call.arrays.get(name) is not None}

    found = launched(
        call,
        kernel,
        walk,
        held,
        rows=there("x", "residual"),
        written={o.name: x.dtype for o in call.spec.outputs},
        inputs={
            name: (array.reshape(1, walk.n), walk.weights(in_every_sweep=False))
            for name, array in there("weight", "bias").items()
        },
        statistics=statistics,
        strips=True,
        flops=flops,
        transcendentals=walk.height,
    )
    return tuple(found[o.name] for o in call.spec.outputs)
