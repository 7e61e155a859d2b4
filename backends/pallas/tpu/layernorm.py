"""Layer normalisation on TPUs along the last axis, and its gradients, each in two sweeps over a row.

    xh = (x - mean) r        r = (var + eps)^-1/2        y = xh weight + bias        h = weight d_y
    d_x = r (h - mean(h) - xh mean(h xh))        d_weight = sum over rows of d_y xh        d_bias = sum over rows of d_y

x, y, d_y, d_x: (*batch, n); weight, bias: (n) or None; d_weight, d_bias: (n). The grid is (row blocks, sweeps, n
blocks), see `BlockWalk`. Sweep 0 takes the mean of each block and the sum of squares about it, and merges them into the
row's mean and m2, the sum of squares about that; of a gradient also the sums of h and of h (x - mean). Sweep 1 writes
y, or d_x, and of d_weight and d_bias one row of partial sums for each row block, which a second kernel adds up in
order.

In a row that fits one block the merge is exact, and what is left is the two-pass formula. Lanes beyond n are no part of
any sum. No difference of large squares is ever taken, so a large mean costs no more than its own rounding. The mean of
what a block's mean leaves of it is added to that, so that equal numbers have themselves as their mean, and leave 0,
however sums and quotients round.

block_rows: rows a block holds, whose gradient sums are one partial sum; block_n: elements of each row a block holds.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
equation 2.1; Ba, Kiros and Hinton, "Layer Normalization" (2016), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import RowsConfig
from portakern.backends.pallas.lib.blocks import Blocks, Refs, block, even_block, step_along, within
from portakern.backends.pallas.lib.mosaic_tpu import rows as row_walk
from portakern.backends.pallas.lib.mosaic_tpu.chip import LANES, launch, sublanes
from portakern.backends.pallas.lib.mosaic_tpu.rows import (
    BlockWalk,
    Phases,
    Strip,
    StripSlice,
    VmemUse,
    launched,
    refused,
    row_tiling,
)
from portakern.core.call import Call

HELD = VmemUse(streamed=2, computed=3)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"]}


def default_tiling(call: Call, vmem_use: VmemUse) -> RowsConfig:
    return row_tiling(call, call.dims["n"], 1, vmem_use)


def walk_of(call: Call, config: RowsConfig) -> BlockWalk:
    """How a normalisation along the last axis walks the rows of its arrays."""
    return BlockWalk.along_last(call, config, (*call.dims["batch"], call.dims["n"]))


supports = partial(refused, walk_of=walk_of)
in_walks = partial(row_walk.in_walks, key=key, default=default_tiling, walk_of=walk_of)


def merge(mean: Any, strip: Strip, x: Callable[[StripSlice], Any]) -> tuple[Any, Any, Any, Any]:
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


def what_is_normed(ref: Refs, at: StripSlice) -> jax.Array:
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
def layernorm(call: Call, config: RowsConfig) -> tuple[jax.Array, ...]:
    return normalised(call, config, partial(kernel, eps=call.options["eps"]), statistics=("mean", "m2"), flops=9)


def normalised(
    call: Call,
    config: RowsConfig,
    kernel: Callable[..., Phases],
    statistics: tuple[str, ...],
    flops: int,
    vmem_use: VmemUse = HELD,
) -> tuple[jax.Array, ...]:
    """y of a normalisation along the last axis, and where there is a residual the sum: what ``kernel(ref, strip=...)``
    makes of x, and of the residual, the weight and the bias that the call has.

    The kernel keeps the named statistics of each row, and does so many operations an element.
    """
    x, walk = call.arrays["x"], walk_of(call, config)

    def present(*names: str) -> dict[str, jax.Array]:
        return {name: call.arrays[name] for name in names if call.arrays.get(name) is not None}

    found = launched(
        call,
        kernel,
        walk,
        vmem_use,
        rows=present("x", "residual"),
        written={o.name: x.dtype for o in call.spec.outputs},
        inputs={
            name: (array.reshape(1, walk.n), walk.weights(in_every_sweep=False))
            for name, array in present("weight", "bias").items()
        },
        statistics=statistics,
        strips=True,
        flops=flops,
        transcendentals=walk.height,
    )
    return tuple(found[o.name] for o in call.spec.outputs)


GRADIENT_HELD = VmemUse(streamed=3, computed=5)


def gradient_kernel(ref: Refs, *, strip: Strip, eps: float) -> Phases:
    n = strip.n

    def h(at: StripSlice) -> jax.Array:
        return at(ref.d_y) * at(ref.weight) if "weight" in ref else at(ref.d_y)

    def start() -> None:
        for statistic in (ref.mean, ref.m2, ref.h_sum, ref.hx):
            statistic[...] = jnp.zeros_like(statistic)

    def gather() -> None:
        if "x" not in ref:  # d_bias alone does not read it
            return
        block_mean, delta, moved, between = merge(ref.mean, strip, lambda at: at(ref.x))

        def sums(at: StripSlice) -> tuple[jax.Array, ...]:
            d = at(ref.x) - block_mean
            return (jnp.square(d), h(at), h(at) * d) if "d_x" in ref else (jnp.square(d),)

        block_m2, *of_h = strip.sums(sums)
        ref.m2[...] += block_m2 + between
        if "d_x" in ref:
            block_h, block_hx = of_h
            if not strip.walk.one_step:
                # the sum of h (x - mean), of this block and of those before it, about the mean that now is
                block_hx += (delta - moved) * block_h - moved * ref.h_sum[...]
            ref.hx[...] += block_hx
            ref.h_sum[...] += block_h

    def write() -> None:
        if "x" in ref:
            mean, r = ref.mean[...], lax.rsqrt(ref.m2[...] / n + eps)
            h_mean, hxh_mean = ref.h_sum[...] / n, r * (ref.hx[...] / n)
        for at in strip.pieces():
            if "x" in ref:
                xh = (at(ref.x) - mean) * r
                if "d_x" in ref:
                    at.write(ref.d_x, with_past(ref, at, r * (h(at) - h_mean - xh * hxh_mean)))
                if "d_weight" in ref:
                    at.add_to(ref.d_weight, at(ref.d_y) * xh)
            if "d_bias" in ref:
                at.add_to(ref.d_bias, at(ref.d_y))

    return Phases(start, gather, write)


def with_past(ref: Refs, at: StripSlice, d_x: jax.Array) -> jax.Array:
    """A piece of d_x, and where there is one the cotangent of x itself, which went past the norm."""
    return d_x + at(ref.past) if "past" in ref else d_x


@BACKEND.implements("layernorm_vjp", **in_walks(GRADIENT_HELD))
def layernorm_vjp(call: Call, config: RowsConfig) -> tuple[jax.Array | None, ...]:
    statistics = ("mean", "m2", "h_sum", "hx")
    return gradients(
        call, config, partial(gradient_kernel, eps=call.options["eps"]), statistics, 18, GRADIENT_HELD, call.arrays["x"]
    )


def gradients(
    call: Call,
    config: RowsConfig,
    gradient_kernel: Callable[..., Phases],
    statistics: tuple[str, ...],
    flops: int,
    vmem_use: VmemUse,
    x: jax.Array,
    past: jax.Array | None = None,
) -> tuple[jax.Array | None, ...]:
    """The gradients of a normalisation of x along the last axis that the call wants; ``past`` is added to d_x.

    ``kernel(ref, strip=...)`` keeps the named statistics of each row, and does so many operations an element. It writes
    d_x, and partial sums of d_weight and d_bias over the rows of each row block.
    """
    d_y, weight, wants = call.arrays["d_y"], call.arrays["weight"], call.wants
    walk = walk_of(call, config)
    reads_x = "d_x" in wants or "d_weight" in wants
    if not reads_x:
        walk = walk._replace(sweeps=1)
    inputs: Blocks = {}
    if weight is not None and "d_x" in wants:
        inputs["weight"] = (weight.reshape(1, walk.n), walk.weights(in_every_sweep=True))
    found = launched(
        call,
        gradient_kernel,
        walk,
        vmem_use,
        rows={"d_y": d_y} | ({"x": x} if reads_x else {}),
        late={"past": past} if past is not None and "d_x" in wants else {},
        written={"d_x": x.dtype} if "d_x" in wants else {},
        inputs=inputs,
        statistics=statistics,
        sums=tuple(name for name in ("d_weight", "d_bias") if name in wants),
        strips=True,
        flops=flops,
        transcendentals=walk.height,
    )

    def finished(name: str) -> jax.Array | None:
        if name not in found:
            return None
        if name == "d_x":
            return found[name]
        return add_up(call, found[name].reshape(-1, walk.n), call.outputs[name][1])

    return tuple(finished(output.name) for output in call.spec.outputs)


def sum_kernel(ref: Refs, *, height: int) -> None:
    step = step_along(1)
    partial_sums = ref.sums[...]
    rows = within(partial_sums, 0, step * partial_sums.shape[0], height)

    @pl.when(step == 0)
    def start() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    ref.acc[...] += jnp.sum(rows, axis=0, keepdims=True)

    @pl.when(step == pl.num_programs(1) - 1)
    def finish() -> None:
        ref.total[...] = ref.acc[...].astype(ref.total.dtype)


SUMS = 2**18
"""Partial sums of a block, 1 MiB: a step of few waits longer than it adds."""


def add_up(call: Call, sums: jax.Array, dtype: str) -> jax.Array:
    """(groups, n) partial sums -> (n), one block of groups after another."""
    height, n = sums.shape
    rows = block(height, 256, sublanes(jnp.float32))
    block_n = even_block(n, max(SUMS // rows, LANES), LANES)

    def at_sums(column: Any, step: Any) -> tuple[Any, Any]:
        return step, column

    def at_total(column: Any, step: Any) -> tuple[Any, Any]:
        return 0, column

    found = launch(
        call,
        partial(sum_kernel, height=height),
        f"portakern_{call.spec.name}_sum",
        (pl.cdiv(n, block_n), pl.cdiv(height, rows)),
        in_order=1,
        inputs={"sums": (sums, pl.BlockSpec((rows, block_n), at_sums))},
        outputs={"total": (jax.ShapeDtypeStruct((1, n), dtype), pl.BlockSpec((1, block_n), at_total))},
        scratch={"acc": (1, block_n)},
        cost=pl.CostEstimate(flops=sums.size, transcendentals=0, bytes_accessed=4 * sums.size),
    )
    return found["total"].reshape(n)
