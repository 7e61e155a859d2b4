"""Softmax attention on Hopper, o = softmax(scale q k^T) v, never holding a whole row of scores.

q: (batch, q_len, kv_heads*group, d), k: (batch, kv_len, kv_heads, d), v: (batch, kv_len, kv_heads, dv)
-> o: (batch, q_len, kv_heads*group, dv), lse and lse_low: (batch, kv_heads*group, q_len). Heads are up to 256 wide.

How a tile's keys are walked stands in ``lib/mosaic_gpu/attention.py``, and in ``flash.py`` there how tiles are cut.

block_q: queries of a block at most, 64 for each warpgroup that computes; block_kv: keys of a tile; stages: tiles of
keys, and of values, that are on their way or in use at a time; splits, chunk: what makes a split.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import FlashConfig
from portakern.backends.pallas.lib.blocks import Refs, padded
from portakern.backends.pallas.lib.mosaic_gpu.attention import (
    LOG_SUM,
    kernel,
    key,
    plan_of,
    saved,
    supports,
    whole_tiles,
)
from portakern.backends.pallas.lib.mosaic_gpu.chip import (
    in_slots,
    launch,
    padded_rows,
    whole_pieces,
)
from portakern.backends.pallas.lib.mosaic_gpu.flash import (
    QUERIES,
    MosaicFlashPlan,
    QueryTile,
    rings,
    schedule,
)
from portakern.backends.pallas.lib.mosaic_gpu.head_parts import LeavingBuffers, buffer_shapes, columns_of, starts_of
from portakern.backends.pallas.lib.segments import spans_of
from portakern.core.backend import Drawn
from portakern.core.call import Call


def copies(call: Call, config: FlashConfig) -> str | None:
    """What XLA copies besides, in words."""
    found = []
    for names, extent in (("q and k", call.dims["d"]), ("v", call.dims["dv"])):
        if (wide := whole_pieces(extent, call.dtype)) != extent:
            found.append(f"heads of {names} are padded from {extent} to {wide}")
    if found and "v" in found[-1].split():
        found.append(f"o is cut from {whole_pieces(call.dims['dv'], call.dtype)} to {call.dims['dv']}")
    plan, bias = plan_of(call, config), call.arrays["bias"]
    tiles = plan.consumers * QUERIES, plan.block_kv
    if bias is not None and ((bias.shape[2] > 1 and bias.shape[2] % tiles[0]) or bias.shape[3] % tiles[1]):
        found.append(f"bias is padded to whole tiles of {tiles[0]} x {tiles[1]}")
    written = _lse_length(plan)
    if saved(call) and written != call.dims["q_len"]:
        found.append(f"lse is cut from {written} queries to {call.dims['q_len']}")
    return "; ".join(found) or None


def _lse_length(plan: MosaicFlashPlan) -> int:
    """Queries of lse as the kernel writes it: whole tiles. The engine that copies contiguous bytes stops where the
    array ends and not where an axis does: what a tile has beyond the last query would fall on the next head's first."""
    return padded(plan.q_len, plan.consumers * QUERIES)


def write(
    ref: Refs, plan: MosaicFlashPlan, warpgroup: Any, tile: QueryTile, acc: tuple[Any, ...], l: Any, m: Any
) -> None:
    """o = acc / l and lse = m + log l. A row that saw no key has l = 0: zeros, and -inf."""
    rows = pl.ds(tile.row + warpgroup * QUERIES, QUERIES)
    wanted = [name for name in LOG_SUM if name in ref]
    if wanted:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        found = plan.scores.log_sum(l, m)
        for i, name in enumerate(wanted):
            ref.lse_rows[i, warpgroup] = found[name]
        plgpu.commit_smem()
        for i, name in enumerate(wanted):
            there = getattr(ref, name).at[tile.batch, tile.head, rows]
            plgpu.copy_smem_to_gmem(ref.lse_rows.at[i, warpgroup], there)
    inverse = 1.0 / jnp.where(l == 0.0, 1.0, l)
    slots = in_slots(len(acc), plan.slots)
    for start, part, (slot, leaving) in zip(starts_of(plan.parts[1]), acc, slots, strict=True):
        plgpu.wait_smem_to_gmem(leaving, wait_read_only=True)
        o, width = plan.results(tile, part * lax.broadcast_in_dim(inverse, part.shape, (0,))), part.shape[1]
        buffer = ref.written.buffer(width, warpgroup, slot)
        buffer.tiled[...] = o.astype(plan.dtype)
        plgpu.commit_smem()
        there = ref.o.at[tile.batch, rows, tile.head, columns_of(ref.o, start, width)]
        plgpu.copy_smem_to_gmem(buffer.copied, there)


@BACKEND.implements("attention", key=key, supports=supports, config=FlashConfig, copies=copies,
                    drawn=Drawn(("alibi_slopes", "out_dtype")))  # fmt: skip
def attention(call: Call, config: FlashConfig) -> tuple[jax.Array | None, ...]:
    plan = plan_of(call, config)
    wide, dtype = whole_pieces(plan.dv, plan.dtype), plan.dtype
    outputs = {"o": jax.ShapeDtypeStruct((plan.batch, plan.q_len, plan.heads, wide), dtype)}
    of_values = plan.parts[1]
    sums = tuple(buffer_shapes((plan.consumers,), QUERIES, of_values)) if plan.merges else ()
    numbers, more = saved(call), {}
    if numbers:
        form = jax.ShapeDtypeStruct((plan.batch, plan.heads, _lse_length(plan)), jnp.float32)
        outputs |= dict.fromkeys(numbers, form)
        more["lse_rows"] = plgpu.SMEM((len(numbers), plan.consumers, QUERIES), jnp.float32)
    ids = call.arrays["q_segment_ids"], call.arrays["kv_segment_ids"]
    rows, keys = padded(plan.q_len, plan.consumers * QUERIES), padded(plan.band.kv_len, plan.block_kv)
    inputs = whole_tiles(call.arrays["bias"], ids, rows, keys)
    inputs |= spans_of(call, plan.consumers * QUERIES, plan.block_kv)
    if plan.scheduled:
        inputs["schedule"] = jnp.asarray(schedule(plan))
    found = launch(
        call,
        partial(kernel, plan=plan, write=write),
        "attention",
        (plan.blocks,),
        inputs={name: padded_rows(call.arrays[name]) for name in "qkv"} | inputs,
        outputs=outputs,
        scratch=rings(plan, LeavingBuffers((plan.consumers, plan.slots), QUERIES, of_values, dtype, sums), **more),
        warpgroups=plan.consumers + 1,
        approximate=True,
        across_warps=False,
    )
    return found["o"][..., : plan.dv], *(found[name][..., : plan.q_len] if name in found else None for name in LOG_SUM)
