"""The pipeline of the gradients of attention on Hopper: one warpgroup brings rows, the others sum up.

The rows of one side, queries or keys, are a block's own, 64 to a warpgroup, and stay in shared memory; tiles of the
other side come by through a ring of buffers. What is computed of them the variants say.

Source: Shah et al., "FlashAttention-3" (2024), section 3.1, for the warpgroups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas.configs import FlashGradientsConfig
from portakern.backends.pallas.lib.blocks import Refs, quotient
from portakern.backends.pallas.lib.mosaic_gpu import bias_gradient
from portakern.backends.pallas.lib.mosaic_gpu import rows as row_walk
from portakern.backends.pallas.lib.mosaic_gpu.attention import operands_refused
from portakern.backends.pallas.lib.mosaic_gpu.chip import (
    in_slots,
    over_shared,
    whole_pieces,
)
from portakern.backends.pallas.lib.mosaic_gpu.flash import (
    COUNTED,
    bring,
    heaviest_first,
)
from portakern.backends.pallas.lib.mosaic_gpu.head_parts import HeadBuffers, LeavingViews, columns_of, starts_of
from portakern.backends.pallas.lib.mosaic_gpu.pairs import (
    CONSUMERS,
    NUMBERS,
    ROWS,
    SLOTS,
    AttentionGradientPlan,
    ResidentTile,
    plan_of,
)
from portakern.backends.pallas.lib.mosaic_gpu.pipeline import drain_last, warp_specialized
from portakern.core.backend import Drawn
from portakern.core.call import Call
from portakern.specs._exponents import LARGEST
from portakern.specs.attention import scale_of, score_unit

DRAWN = Drawn(("alibi_slopes", "gradient_dtype"), narrow=("o", "d_o"))

HELD = 224
"""Registers of a consumer's thread for sums, scores and weights: the others hold what it needs besides."""


def plans(call: Call, config: FlashGradientsConfig) -> list[AttentionGradientPlan]:
    """One for each run of the kernel."""
    keys = tuple(name for name in ("d_k", "d_v") if name in call.wants)
    found = [plan_of(call, config, ("d_q",))] if "d_q" in call.wants else []
    if keys and plan_of(call, config, ("d_k", "d_v")).registers > HELD:
        return found + [plan_of(call, config, (name,)) for name in keys]
    return found + [plan_of(call, config, keys)] if keys else found


def supports(call: Call, config: FlashGradientsConfig) -> str | None:
    if reason := operands_refused(call):
        return reason
    if call.dims["q_len"] * call.dims["group"] + call.dims["kv_len"] >= 1 << COUNTED:
        return f"2^{COUNTED} queries of a group and keys, or more: steps are counted with fewer bits here"
    if score_unit(call)[1] > LARGEST:
        return f"scale={scale_of(call):g} times log2(e) is beyond float32: multiply q by a part of it beforehand"
    for name in ("block_q", "block_kv"):
        if config[name] not in (64, 128):
            return f"{name}={config[name]} is not supported by wgmma here: use one of 64, 128"
    for plan in plans(call, config):
        if plan.registers > HELD:
            return (
                f"tiles of {plan.streamed.tile} with heads of {call.dims['d']} and {call.dims['dv']} take "
                f"{plan.registers} registers a thread for sums and scores, and {HELD} are free: use smaller "
                f"block_q and block_kv"
            )
        reason = over_shared(plan.shared, "block_q, block_kv or stages", across_warps=False)
        if reason:
            return reason
    return None


def copies(call: Call, config: FlashGradientsConfig) -> str | None:
    """What XLA copies besides, in words."""
    found = []
    for names, extent in (("q and k", call.dims["d"]), ("v and d_o", call.dims["dv"])):
        if (wide := whole_pieces(extent, call.dtype)) != extent:
            found.append(f"heads of {names} are padded from {extent} to {wide}, and of gradients cut again")
    if of_rows := row_walk.copies(call, call.dims["dv"]):
        found.append(f"for Delta {of_rows}")
    if call.arrays["bias"] is not None and plans(call, config):
        found.append("bias is padded to whole tiles" + (", and transposed for d_k and d_v" if _by_key(call) else ""))
    if "d_bias" in call.wants and (of_bias := bias_gradient.copies(call, config)):
        found.append(of_bias)
    return "; ".join(found) or None


def _by_key(call: Call) -> bool:
    return "d_k" in call.wants or "d_v" in call.wants


def rings(plan: AttentionGradientPlan, arrivals: int, **buffers: Any) -> dict[str, Any]:
    """``scratch`` for the ring of streamed tiles, each of which so many copies bring, for resident rows, and for other
    buffers."""
    of_first, of_second = plan.parts
    return {
        "arrived": plgpu.Barrier(num_arrivals=arrivals, num_barriers=plan.stages),
        "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=plan.stages),
        "streamed_first": HeadBuffers((plan.stages,), plan.streamed.tile, of_first, plan.dtype),
        "streamed_second": HeadBuffers((plan.stages,), plan.streamed.tile, of_second, plan.dtype),
        "resident_arrived": plgpu.Barrier(num_arrivals=len(of_first + of_second), num_barriers=CONSUMERS),
        "resident_first": HeadBuffers((CONSUMERS,), ROWS, of_first, plan.dtype),
        "resident_second": HeadBuffers((CONSUMERS,), ROWS, of_second, plan.dtype),
        **buffers,
    }


def gradient_forms(plan: AttentionGradientPlan) -> dict[str, jax.ShapeDtypeStruct]:
    """Gradients of resident rows by name, as the copy engine writes them."""
    widths = {name: whole_pieces(plan.dv if name == "d_v" else plan.d, plan.dtype) for name in plan.wants}
    shape = plan.batch, plan.resident.length, plan.heads
    return {name: jax.ShapeDtypeStruct((*shape, width), plan.dtype) for name, width in widths.items()}


def kernel(
    ref: Refs,
    *,
    plan: AttentionGradientPlan,
    consume: Callable[[Refs, AttentionGradientPlan, Any, ResidentTile], None],
    tile_of: Callable[[ResidentTile], ResidentTile] = lambda tile: tile,
) -> None:
    """One tile of resident rows, of which a consumer makes what ``consume`` does of ``tile_of`` it."""
    warpgroup = lax.axis_index("warpgroup")
    place, i = heaviest_first(lax.axis_index("block"), plan.batch * plan.heads, plan.tiles, plan.band)
    batch = quotient(place, plan.heads)
    tile = ResidentTile.at(plan, batch, place - batch * plan.heads, i, getattr(ref, "spans", None))
    tile = tile_of(tile._replace(span=ref.span[0]) if "span" in ref else tile)

    warp_specialized(
        warpgroup, CONSUMERS, lambda: produce(ref, plan, tile), lambda: consume(ref, plan, warpgroup, tile)
    )


def produce(ref: Refs, plan: AttentionGradientPlan, tile: ResidentTile) -> None:
    """Bring the resident rows, then streamed tiles as buffers are free."""
    for c in range(CONSUMERS):
        rows = pl.ds(tile.row + c * ROWS, ROWS)
        for name, parts in ((plan.resident.first, ref.resident_first), (plan.resident.second, ref.resident_second)):
            array = getattr(ref, name).at[tile.batch, rows, tile.head]
            bring(array, parts, (c,), ref.resident_arrived.at[c])

    @pl.loop(0, tile.steps)
    def _(step: Any) -> None:
        buffer = lax.rem(step, jnp.int32(plan.stages))
        head, j = tile.head_and_tile(step)
        pl.when(step >= plan.stages)(lambda: plgpu.barrier_wait(ref.free.at[buffer]))
        rows = pl.ds(j * plan.streamed.tile, plan.streamed.tile)
        for name, parts in ((plan.streamed.first, ref.streamed_first), (plan.streamed.second, ref.streamed_second)):
            array = getattr(ref, name).at[tile.batch, rows, head]
            bring(array, parts, (buffer,), ref.arrived.at[buffer])
        for i, name in enumerate(() if plan.by_query else NUMBERS):
            there = getattr(ref, name).at[tile.batch, head, rows]
            arrived = ref.told if name == "delta" else ref.arrived
            plgpu.copy_gmem_to_smem(there, ref.numbers.at[buffer, i], arrived.at[buffer])

    drain_last(ref.free, tile.steps, plan.stages)


def write(
    ref: Refs,
    buffers: LeavingViews,
    plan: AttentionGradientPlan,
    warpgroup: Any,
    tile: ResidentTile,
    sums: tuple[Any, ...],
) -> None:
    """Send the gradients of this warpgroup's resident rows on their way, by way of ``buffers``."""
    rows = pl.ds(tile.row + warpgroup * ROWS, ROWS)
    parts = [(name, start) for name, widths in plan.sums.items() for start in starts_of(widths)]
    for (name, start), total, (slot, leaving) in zip(parts, sums, in_slots(len(parts), SLOTS), strict=True):
        plgpu.wait_smem_to_gmem(leaving, wait_read_only=True)
        total, width = total if name == "d_v" else total * plan.scale, total.shape[1]
        buffer = buffers.buffer(width, warpgroup, slot)
        buffer.tiled[...] = total.astype(plan.dtype)
        plgpu.commit_smem()
        out = getattr(ref, name)
        there = out.at[tile.batch, rows, tile.head, columns_of(out, start, width)]
        plgpu.copy_smem_to_gmem(buffer.copied, there)
