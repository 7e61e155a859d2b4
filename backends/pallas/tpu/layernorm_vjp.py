"""Gradients of layer normalisation on TPUs, over the last axis, in two sweeps over a row.

    xh = (x - mean) r        r = (var + eps)^-1/2        h = weight d_y
    d_x = r (h - mean(h) - xh mean(h xh))        d_weight = sum over rows of d_y xh        d_bias = sum over rows of d_y

x, d_y: (*batch, n), weight, bias: (n) or None -> d_x: (*batch, n), d_weight, d_bias: (n). The grid is (row blocks,
sweeps, n blocks), see `Walk`. Sweep 0 takes of each block the mean, the sum of squares about it and the sums of h and
of h (x - mean), and merges them; sweep 1 writes d_x, and of d_weight and d_bias one row of partial sums for each row
block. In a row that fits one block the merge is exact. A second kernel adds the partial sums up, in order.

block_rows: rows a block holds, whose sums are one partial sum; block_n: elements of each row a block holds.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
equation 2.1, for the merge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import Blocks, Refs, block, step_along, within
from portakern.backends.pallas.tpu._chip import LANES, launch, sublanes
from portakern.backends.pallas.tpu._rows import Held, Walk, launched
from portakern.backends.pallas.tpu.layernorm import in_walks, merge, walk_of
from portakern.core.call import Call

HELD = Held(streamed=3, computed=5)


def kernel(ref: Refs, *, walk: Walk, eps: float) -> None:
    group, (sweep, step) = walk.group(), walk.sweep_and_step()

    def weighted(d_y: jax.Array) -> jax.Array:
        """h."""
        return d_y * ref.weight[...].astype(jnp.float32) if "weight" in ref else d_y

    def gather() -> None:
        x, h = ref.x[...].astype(jnp.float32), weighted(ref.d_y[...].astype(jnp.float32))
        block_mean, delta, moved = merge(ref.mean, ref.m2, x, walk, step)
        if "d_x" in ref:
            block_h = walk.sum_along_rows(h, step)
            # the sum of h (x - mean), of this block and of those before it, about the mean that now is
            moves = (delta - moved) * block_h - moved * ref.h_sum[...]
            ref.hx[...] += walk.sum_along_rows(h * (x - block_mean), step) + moves
            ref.h_sum[...] += block_h

    if "x" in ref:  # d_bias alone does not read it

        @pl.when((sweep == 0) & (step == 0))
        def start() -> None:
            for statistic in (ref.mean, ref.m2, ref.h_sum, ref.hx):
                statistic[...] = jnp.zeros_like(statistic)

        pl.when(sweep == 0)(gather)

    @pl.when(sweep == walk.sweeps - 1)
    def write() -> None:
        d_y = ref.d_y[...].astype(jnp.float32)
        if "x" in ref:
            x = ref.x[...].astype(jnp.float32)
            r = lax.rsqrt(ref.m2[...] / walk.n + eps)
            xh = (x - ref.mean[...]) * r
            if "d_x" in ref:
                d_x = r * (weighted(d_y) - ref.h_sum[...] / walk.n - xh * (r * (ref.hx[...] / walk.n)))
                ref.d_x[...] = with_past(ref, d_x).astype(ref.d_x.dtype)
            if "d_weight" in ref:
                ref.d_weight[...] = walk.sum_over_rows(d_y * xh, group)
        if "d_bias" in ref:
            ref.d_bias[...] = walk.sum_over_rows(d_y, group)


def with_past(ref: Refs, d_x: jax.Array) -> jax.Array:
    """d_x, and where there is one the cotangent of x itself, which went past the norm."""
    return d_x + ref.past[...].astype(jnp.float32) if "past" in ref else d_x


@BACKEND.implements("layernorm_vjp", **in_walks(HELD))
def layernorm_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    statistics = ("mean", "m2", "h_sum", "hx")
    return gradients(call, tiling, partial(kernel, eps=call.options["eps"]), statistics, 18, HELD, call.arrays["x"])


def gradients(
    call: Call,
    tiling: Mapping[str, int],
    kernel: Callable[..., None],
    statistics: tuple[str, ...],
    flops: int,
    held: Held,
    x: jax.Array,
    past: jax.Array | None = None,
) -> tuple[jax.Array | None, ...]:
    """The gradients of a normalisation of x along the last axis that the call wants; ``past`` is added to d_x.

    ``kernel(ref, walk=...)`` keeps the named statistics of each row, and does so many operations an element. It writes
    d_x, and partial sums of d_weight and d_bias over the rows of each row block.
    """
    d_y, weight, wants = call.arrays["d_y"], call.arrays["weight"], call.wants
    walk = walk_of(call, tiling)
    reads_x = "d_x" in wants or "d_weight" in wants
    if not reads_x:
        walk = walk._replace(sweeps=1)
    inputs: Blocks = {}
    if weight is not None and "d_x" in wants:
        inputs["weight"] = (weight.reshape(1, walk.n), walk.weights(in_every_sweep=True))
    found = launched(
        call,
        kernel,
        walk,
        held,
        rows={"d_y": d_y} | ({"x": x} if reads_x else {}),
        late={"past": past} if past is not None and "d_x" in wants else {},
        written={"d_x": x.dtype} if "d_x" in wants else {},
        inputs=inputs,
        outputs={name: walk.partial_sums() for name in ("d_weight", "d_bias") if name in wants},
        statistics=statistics,
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


def add_up(call: Call, sums: jax.Array, dtype: str) -> jax.Array:
    """(groups, n) partial sums -> (n), one block of groups after another."""
    height, n = sums.shape
    rows, block_n = block(height, 256, sublanes(jnp.float32)), block(n, 1024, LANES)

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
