"""Gradients of attention on Hopper, the scores recomputed tile by tile from q, k and lse and never stored.

    t = tanh(scale q k^T / c), s = c t + bias, P = exp(min(s - lse, 0));  without a softcap s = scale q k^T + bias
    Delta = rowsum(d_o * o) - d_lse;  dS = P (d_o v^T - Delta);  D = dS (1 - t^2), without a softcap dS
    d_q = scale D k;  d_k = scale D^T q;  d_v = P^T d_o

q: (batch, q_len, kv_heads*group, d), k: (batch, kv_len, kv_heads, d), v: (batch, kv_len, kv_heads, dv),
o and d_o: (batch, q_len, kv_heads*group, dv), lse, lse_low and d_lse: (batch, kv_heads*group, q_len). Heads are up
to 256 wide. d_k and d_v are summed over the group. d_bias has a kernel of its own (`bias_gradient`).

A first kernel sums Delta (`rows`). Then one kernel runs twice, each time with one side resident: 64 rows of it to a
warpgroup stay in shared memory, and tiles of the other side are streamed through a ring of buffers. For d_q queries are
resident; for d_k and d_v keys are, and the queries of all heads of their group come by, one head after the other. What
a block sums up is its alone, in float32 registers, in an order that never changes: nothing is added atomically. Tiles
of scores have a row for each resident row, so that D and P, rounded, are the left factor of the next product as they
stand. Where registers do not hold d_k and d_v beside each other, the kernel runs once for each.

block_q, block_kv: the queries and the keys of a tile that comes by; stages: buffers for them.

Source: Dao, "FlashAttention-2" (2023), algorithm 2; Shah et al., "FlashAttention-3" (2024), section 3.1, for the
warpgroups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import FlashGradientsConfig
from portakern.backends.pallas.lib.blocks import Refs
from portakern.backends.pallas.lib.mosaic_gpu import bias_gradient
from portakern.backends.pallas.lib.mosaic_gpu.accumulators import finished, in_registers
from portakern.backends.pallas.lib.mosaic_gpu.attention import key
from portakern.backends.pallas.lib.mosaic_gpu.attention_vjp import (
    DRAWN,
    copies,
    gradient_forms,
    kernel,
    plans,
    rings,
    supports,
    write,
)
from portakern.backends.pallas.lib.mosaic_gpu.chip import (
    issue_product,
    launch,
    padded_rows,
)
from portakern.backends.pallas.lib.mosaic_gpu.flash import (
    ROW,
    anew,
    zeros,
    zeros_of,
)
from portakern.backends.pallas.lib.mosaic_gpu.head_parts import LeavingBuffers
from portakern.backends.pallas.lib.mosaic_gpu.pairs import (
    CONSUMERS,
    NUMBERS,
    ROWS,
    SLOTS,
    AttentionGradientPlan,
    ResidentTile,
    TilePosition,
    after_reading,
    is_far,
    kept,
    masks,
    read_number,
    slopes,
    statistics,
    walk,
    weights,
)
from portakern.core.call import Call

UNSEEN = -(2**31)
"""The bits of -0."""

Multiply = Callable[[str, Any], int]
"""Issues the products of a gradient with a factor, and says how many they are."""


def consume(ref: Refs, plan: AttentionGradientPlan, warpgroup: Any, tile: ResidentTile) -> None:
    """Sum up the gradients of this warpgroup's resident rows, and write them."""
    plgpu.barrier_wait(ref.resident_arrived.at[warpgroup])
    none = zeros_of(plan.leaving)
    rows = pl.ds(tile.row + warpgroup * ROWS, ROWS)
    numbers = tuple(
        plgpu.load(getattr(ref, name).at[tile.batch, tile.head, rows], layout=ROW, optimized=False)
        for name in (NUMBERS if plan.by_query else ())
    )
    sums = walk(plan, tile, partial(add, ref, plan, warpgroup, tile, numbers), none, is_far(ref, plan, tile))
    write(ref, ref.written, plan, warpgroup, tile, sums)


def add(
    ref: Refs, plan: AttentionGradientPlan, warpgroup: Any, tile: ResidentTile, numbers: tuple[Any, ...], cut: bool,
    step: Any, sums: tuple[Any, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """The sums with what one streamed tile adds. numbers: ``NUMBERS`` of resident queries. cut: whether some pair may
    not see each other, by causality or a window, or as one lies beyond the end, or some lse be far from 0."""
    buffer = lax.rem(step, jnp.int32(plan.stages))
    place = warpgroup, tile, *tile.head_and_tile(step), cut
    plgpu.barrier_wait(ref.arrived.at[buffer])
    dots = plan.parts if plan.wants != ("d_v",) else plan.parts[:1]
    resident_buffers, streamed_buffers = (
        (ref.resident_first, ref.resident_second),
        (ref.streamed_first, ref.streamed_second),
    )
    here, there = anew(warpgroup, tile.row + step), anew(buffer, tile.row + step)

    def work(accumulators: Any, others: Any) -> None:
        found, left = accumulators[: len(dots)], iter(accumulators[len(dots) :])
        totals = {name: list(itertools.islice(left, len(parts))) for name, parts in plan.sums.items()}
        for acc, resident, streamed in zip(found, resident_buffers, streamed_buffers, strict=False):
            for rows, columns in zip(resident, streamed, strict=True):
                issue_product(acc, rows.tiled(here), columns.tiled(there), transposed=True)

        def multiply(name: str, factor: Any) -> int:
            rounded = factor.astype(plan.dtype)
            for part, acc in zip(streamed_buffers[name == "d_v"], totals[name], strict=True):
                issue_product(acc, rounded, part.tiled(there))
            return len(totals[name])

        known = numbers if plan.by_query else tuple(partial(read_number, ref, buffer, i) for i in range(len(NUMBERS)))
        (overlapped if plan.overlaps else in_sequence)(ref, plan, place, buffer, known, found, multiply)

    after, _ = in_registers(plan.interpret, work, (*[zeros(plan.streamed.tile)] * len(dots), *sums))
    if not plan.by_query:
        after_reading(plan.interpret)
    plgpu.barrier_arrive(ref.free.at[buffer])
    return tuple(after[len(dots) :])


def in_sequence(
    ref: Refs,
    plan: AttentionGradientPlan,
    position: TilePosition,
    buffer: Any,
    numbers: tuple[Any, ...],
    found: Any,
    multiply: Multiply,
) -> None:
    """P and D of a tile when all its dots are there, then all products with them."""
    dots = [finished(acc, later=0) for acc in found]
    *lse, delta = numbers
    p, t = weights(ref, plan, position, lse, dots[0])
    if not plan.by_query:
        plgpu.barrier_wait(ref.told.at[buffer])
    d_dot = [slopes(plan, delta, p, t, d_p) for d_p in dots[1:]]
    p, *d_dot = kept(ref, plan, position, 0.0, p, *d_dot)
    for name in plan.wants:
        multiply(name, p if name == "d_v" else d_dot[0])


def overlapped(
    ref: Refs,
    plan: AttentionGradientPlan,
    position: TilePosition,
    buffer: Any,
    numbers: tuple[Any, ...],
    found: Any,
    multiply: Multiply,
) -> None:
    """P beside the products dP, and D beside those with P. Pairs that do not see each other have a P of -0, which no
    exponential is: by that D knows them, whatever their dP holds."""
    *lse, delta = numbers
    p, t = weights(ref, plan, position, lse, finished(found[0], later=sum(map(len, plan.parts[1 : len(found)]))))
    (p,) = kept(ref, plan, position, -0.0, p)
    if not plan.by_query:
        plgpu.barrier_wait(ref.told.at[buffer])  # and a basic block ends, over which no wait for products moves
    later = multiply("d_v", p) if "d_v" in plan.wants else 0
    for acc in found[1:]:
        d_dot = slopes(plan, delta, p, t, finished(acc, later=later))
        if position[-1] or "q_ids" in ref:
            d_dot = jnp.where(lax.bitcast_convert_type(p, jnp.int32) == UNSEEN, 0.0, d_dot)
        for name in plan.wants:
            if name != "d_v":
                multiply(name, d_dot)


@BACKEND.implements("attention_vjp", key=key, supports=supports, config=FlashGradientsConfig, copies=copies,
                    drawn=DRAWN)  # fmt: skip
def attention_vjp(call: Call, config: FlashGradientsConfig) -> tuple[jax.Array | None, ...]:
    return all_gradients(call, config, call.spec.name)


def all_gradients(call: Call, config: FlashGradientsConfig, name: str) -> tuple[jax.Array | None, ...]:
    """What is wanted of d_q, d_k, d_v and d_bias. ``name``: how the names of kernels begin."""
    inputs = {name: padded_rows(call.arrays[name]) for name in ("q", "k", "v", "d_o")} | statistics(call)
    found: dict[str, jax.Array] = {}
    for plan in plans(call, config):
        found |= gradients(call, plan, inputs | masks(call, plan), "_".join((name, *plan.wants)))
    if "d_bias" in call.wants:
        found["d_bias"] = bias_gradient.bias_gradient(call, config, inputs)
    return tuple(found.get(output.name) for output in call.spec.outputs)


def gradients(
    call: Call, plan: AttentionGradientPlan, inputs: Mapping[str, jax.Array], name: str
) -> dict[str, jax.Array]:
    """The gradients of one plan, by name. ``name``: the kernel's."""
    arrivals, numbers, told = sum(map(len, plan.parts)), {}, {}
    if not plan.by_query:
        arrivals += len(NUMBERS) - 1
        numbers = {"numbers": plgpu.SMEM(plan.numbers, jnp.float32)}
        told = {"told": plgpu.Barrier(num_arrivals=1, num_barriers=plan.stages)}
    written = LeavingBuffers((CONSUMERS, SLOTS), ROWS, plan.leaving, plan.dtype)
    found = launch(
        call,
        partial(kernel, plan=plan, consume=consume),
        name,
        (plan.batch * plan.heads * plan.tiles,),
        inputs=inputs,
        outputs=gradient_forms(plan),
        scratch=rings(plan, arrivals, **numbers, **told, written=written),
        warpgroups=CONSUMERS + 1,
        approximate=True,
        across_warps=False,
    )
    return {of: found[of][..., : plan.dv if of == "d_v" else plan.d] for of in plan.wants}
