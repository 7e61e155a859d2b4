"""Softmax attention on Hopper, o = softmax(scale q k^T) v, never holding a whole row of scores: see ``_flash``.

q: (batch, q_len, kv_heads*group, d), k: (batch, kv_len, kv_heads, d), v: (batch, kv_len, kv_heads, dv)
-> o: (batch, q_len, kv_heads*group, dv), lse: (batch, kv_heads*group, q_len). Heads of q, k and v are up to 256 wide.
The copy engine wants them 16 bytes apart or a multiple of that, and XLA pads others.

block_q: queries of a block, 64 for each warpgroup that computes; block_kv: keys of a tile; stages: tiles of keys, and
of values, that are on their way or in use at a time.

Source: Shah et al., "FlashAttention-3" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas._band import Band
from portakern.backends.pallas.common import padded
from portakern.backends.pallas.gpu._chip import (
    BULK_BYTES,
    Swizzled,
    dtype_refused,
    launch,
    over_shared,
    padded_rows,
    products_refused,
    whole_pieces,
)
from portakern.backends.pallas.gpu._flash import PART, QUERIES, Plan, Scores, kernel
from portakern.core.call import Call
from portakern.spec import Count
from portakern.specs.attention import score_unit

KNOBS = {"stages": Count(2, 8)}

WIDEST = 256
"""Elements of a head at most: more do not fit into registers and shared memory beside each other."""

HELD = 200
"""Registers of a consumer's thread for sums, scores and weights: the others hold what it needs besides."""


def plan_of(call: Call, tiling: Mapping[str, int]) -> Plan:
    dims, block_q, block_kv = call.dims, tiling["block_q"], tiling["block_kv"]
    pre, unit = score_unit(call)
    return Plan(
        dims["batch"],
        dims["kv_heads"] * dims["group"],
        dims["group"],
        dims["q_len"],
        dims["d"],
        dims["dv"],
        block_q // QUERIES,
        block_kv,
        tiling["stages"],
        Band.of(call, block_q, block_kv),
        Scores(pre, call.options["softcap"], unit),
        jnp.dtype(call.dtype),
        call.interpret,
    )


def key(call: Call) -> dict[str, str | int]:
    """Rows count by whether they fit one warpgroup: a query's bits follow from the tiles of keys alone."""
    rows = "few" if call.dims["q_len"] <= QUERIES else "many"
    return {"dtype": call.dtype, "rows": rows, "d": max(call.dims["d"], call.dims["dv"])}


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    reason = products_refused(call) or dtype_refused(call)
    if reason:
        return reason
    for name, words in (("bias", "a bias"), ("q_segment_ids", "segments")):
        if call.arrays[name] is not None:
            return f"{words} in attention on Hopper {'is' if name == 'bias' else 'are'} not written yet: use the reference backend"
    widest = max(call.dims["d"], call.dims["dv"])
    if widest > WIDEST:
        return f"heads of {widest} are wider than the {WIDEST} elements that fit here: use the reference backend"
    block_q, block_kv = tiling["block_q"], tiling["block_kv"]
    for name, tile, legal in (("block_q", block_q, (64, 128)), ("block_kv", block_kv, (64, 128, 256))):
        if tile not in legal:
            return f"{name}={tile} is no tile of wgmma's here: use one of {', '.join(map(str, legal))}"
    plan = plan_of(call, tiling)
    held = plan.parts[1] * PART // 2 + block_kv // 2 + block_kv // 4
    if held > HELD:
        return (
            f"block_kv={block_kv} with heads of {call.dims['dv']} takes {held} registers a thread for sums and scores, "
            f"and {HELD} are free: use a smaller block_kv"
        )
    return over_shared(plan.shared, "block_kv or stages")


def copies(call: Call, tiling: Mapping[str, int]) -> str | None:
    """What XLA copies besides, in words."""
    found = []
    for names, extent in (("q and k", call.dims["d"]), ("v", call.dims["dv"])):
        if (wide := whole_pieces(extent, call.dtype)) != extent:
            found.append(f"heads of {names} are padded from {extent} to {wide}")
    if found and "v" in found[-1].split():
        found.append(f"o is cut from {whole_pieces(call.dims['dv'], call.dtype)} to {call.dims['dv']}")
    if "lse" in call.wants and _lse_length(call) != call.dims["q_len"]:
        found.append(f"lse is cut from {_lse_length(call)} queries to {call.dims['q_len']}")
    return "; ".join(found) or None


def _lse_length(call: Call) -> int:
    """Queries of lse as the kernel writes it."""
    return padded(call.dims["q_len"], BULK_BYTES // 4)


@BACKEND.implements("attention", key=key, supports=supports, knobs=KNOBS, copies=copies)
def attention(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array, jax.Array | None]:
    plan = plan_of(call, tiling)
    of_keys, of_values = plan.parts
    wide, dtype = whole_pieces(plan.dv, plan.dtype), plan.dtype
    outputs = {"o": jax.ShapeDtypeStruct((plan.batch, plan.q_len, plan.heads, wide), dtype)}
    scratch = {
        "queries": Swizzled((plan.consumers, of_keys, QUERIES, PART), dtype),
        "keys": Swizzled((plan.stages, of_keys, plan.block_kv, PART), dtype),
        "values": Swizzled((plan.stages, of_values, plan.block_kv, PART), dtype),
        "written": Swizzled((plan.consumers, plan.slots, QUERIES, PART), dtype),
        "q_arrived": plgpu.Barrier(num_arrivals=of_keys, num_barriers=plan.consumers),
        "k_arrived": plgpu.Barrier(num_arrivals=of_keys, num_barriers=plan.stages),
        "v_arrived": plgpu.Barrier(num_arrivals=of_values, num_barriers=plan.stages),
        "q_free": plgpu.Barrier(num_arrivals=1, num_barriers=plan.consumers),
        "k_free": plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=plan.stages),
        "v_free": plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=plan.stages),
    }
    if plan.consumers == 2:
        scratch["turn"] = plgpu.Barrier(num_arrivals=1, num_barriers=2)
    if "lse" in call.wants:
        lse_form = (plan.batch, plan.heads, _lse_length(call))
        outputs["lse"] = jax.ShapeDtypeStruct(lse_form, jnp.float32)
        scratch["lse_rows"] = plgpu.SMEM((plan.consumers, QUERIES), jnp.float32)
    found = launch(
        call,
        partial(kernel, plan=plan),
        "attention",
        (plan.blocks,),
        inputs={name: padded_rows(call.arrays[name]) for name in "qkv"},
        outputs=outputs,
        scratch=scratch,
        warpgroups=plan.consumers + 1,
        approximate=True,
    )
    return found["o"][..., : plan.dv], found["lse"][..., : plan.q_len] if "lse" in found else None
