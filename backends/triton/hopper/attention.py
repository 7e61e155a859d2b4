"""Attention for Hopper's copy engine and asynchronous matrix unit, in 16 bits: see ``_flash``, and ``_shares`` for few
queries.

Calls of few queries go to the portable kernel with the tiling of here where there are more chunks of keys than
multiprocessors, and where one chunk holds all keys unless the tiling says ``alone``. All kernels add up the same
numbers in the same order, so that a row's bits do not tell which it was.
Everything that this variant does not take is refused by what decides bits anyway: dtypes, head dimensions, bias and
segments. Interpreted calls are all the portable kernel's: Gluon is compiled alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon import language as gl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.descriptors import describe
from portakern.backends.triton.gpu import attention as portable
from portakern.backends.triton.gpu._heads import Scores
from portakern.backends.triton.gpu._split import chunk_length
from portakern.backends.triton.hopper._flash import Plan, Work, attention_flash_kernel
from portakern.backends.triton.hopper._shares import Shares, attention_shares_kernel
from portakern.backends.triton.launch import cdiv, launch, shared_limit, torch_dtype
from portakern.backends.triton.layout import contiguous_strides, fresh, pow2_at_least
from portakern.core.backend import Drawn
from portakern.spec import Count
from portakern.specs.attention import score_unit

if TYPE_CHECKING:
    from portakern.core.call import Call

QUERIES = 64  # of a consumer
TOGETHER = 8  # heads at most whose tiles are taken by turns where the last queries see most keys: their keys stay in L2
BEGINNINGS = 1.7, 3.3  # tiles of keys that a tile's beginning takes as long as: of a program that stays, and a new one
REGISTERS = {2: (240, 168), 3: (160, 128)}  # consumers -> registers of their threads, and of all threads at the start
MOST_STAGES = 6  # of keys on their way to one group of rows
BARRIERS = 1024  # bytes of shared memory that are set aside for them
KNOBS = {
    **portable.KNOBS,
    "consumers": Count(2, 3),
    "stay": Count(0, 1),
    "shares": Count(0, 2),
    "alone": Count(0, 1),
}
"""``stay``: whether programs stay and take tiles by pairs where some see more keys than others, if that is faster (see
``stays``). ``shares``: whether chunks of keys that have programs of their own are this variant's; 1: where each chunk
of the call has a multiprocessor, 2: anywhere. ``alone``: whether few queries over one chunk of keys are this variant's
too, where ``shares`` lets them be; that was compiled and run on the host alone, not on a device, and tables ship 0. No
bit of a result depends on any of them."""


def plan_of(call: Call, tiling: Mapping[str, int]) -> Plan:
    """What the kernel is compiled for."""
    block_d, block_dv = (pow2_at_least(call.dims[n], 64) for n in ("d", "dv"))
    chunked, consumers = chunk_length(call, tiling) is not None, tiling["consumers"]
    apart = Plan(consumers, tiling["block_kv"], block_d, block_dv, tiling["num_stages"], chunked, o_in_q=False,
                 registers=REGISTERS[consumers][0])  # fmt: skip
    crowded = block_d == block_dv and shared_bytes(apart) > shared_limit(call.target.arch)
    return apart._replace(o_in_q=crowded)


def shared_bytes(plan: Plan) -> int:
    """Shared memory that the kernel takes."""
    rows = plan.consumers * QUERIES
    held = rows * plan.block_d + plan.stages * plan.block_kv * (plan.block_d + plan.block_dv)
    held += 0 if plan.o_in_q else rows * plan.block_dv
    return 2 * held + BARRIERS


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    dims, plan = call.dims, plan_of(call, tiling)
    if call.interpret:
        return portable.supports(call, tiling)
    if call.dtype not in ("float16", "bfloat16"):
        return f"{call.dtype} goes to the portable kernel: this one is for float16 and bfloat16"
    for name in ("bias", "q_segment_ids"):
        if call.arrays[name] is not None:
            return f"{name} goes to the portable kernel"
    if dims["d"] % 8 or dims["dv"] % 8 or max(dims["d"], dims["dv"]) > 256:
        return f"head dimensions {dims['d']} and {dims['dv']}: this kernel takes multiples of 8 up to 256"
    if plan.stages < 2:
        return f"num_stages = {plan.stages}: the next keys arrive before these leave their place; take 2 or more"
    if plan.block_kv > 256:
        return f"block_kv = {plan.block_kv}: the matrix unit takes up to 256 keys at a time"
    needed = plan.block_kv // 2 + plan.block_kv // 4 + plan.block_dv // 2
    if needed > plan.registers - 30:
        return (
            f"tiles of {plan.block_kv} keys at head dimension {dims['dv']} need some {needed} registers a thread for "
            f"scores and sums; {plan.consumers} consumers have {plan.registers}"
        )
    if shared_bytes(plan) > shared_limit(call.target.arch):
        return (
            f"{plan.stages} stages of {plan.block_kv} keys take {shared_bytes(plan)} bytes of shared memory; "
            f"{call.target.arch or 'sm_90'} has {shared_limit(call.target.arch)}"
        )
    return portable.supports(call, tiling)


def least_chunk(call: Call) -> dict[str, int]:
    """So many keys at least have a state of their own, where no row of a table says otherwise.

    Chunks do not end the walk over keys here: a border costs the arithmetic of one merge, some 110 instructions of a
    warp where 512 keys are 4000, but code that can meet one is slower also where it meets none. So the forward pass
    wants one chunk, and decoding as many as there are multiprocessors for, if what is written of them weighs little. On
    an H100 (d 128) chunks of 512 and of 1024 took: 4096 queries and keys, causal, 499 and 491 us; one query over 8192
    keys of 8 heads 27.5 and 25.0, 32 such sequences 386 and 376; 1024 queries and keys 177 and, being one chunk, 162,
    one query over 1024 keys 14.1 and 18.7.
    """
    return {"chunk": 1024}


DRAWN = Drawn(("bias", "q_segment_ids", "kv_segment_ids"), {"d": 8, "dv": 8}, {"q_len": QUERIES + 1})


@BACKEND.implements("attention", tiling=least_chunk, key=portable.key, fit=portable.fit, supports=supports, knobs=KNOBS,
                    drawn=DRAWN)  # fmt: skip
def attention(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    dims, options = call.dims, call.options
    rows, _ = portable.rows_plan(call, tiling)
    _, _, chunk, chunks = portable.programs_of(call, tiling, rows)
    few = chunks or rows.packed or dims["q_len"] <= QUERIES
    shares = chunks or (1 if few and chunk is None and tiling.get("alone") else None)
    if shares is not None and not in_shares(call, tiling, shares):
        shares = None
    if call.interpret or (few and shares is None):
        return portable.attention(call, tiling)
    plan = plan_of(call, tiling)
    batch, q_len, kv_len = dims["batch"], dims["q_len"], dims["kv_len"]
    heads = dims["kv_heads"] * dims["group"]
    q, k, v = (movable(call.arrays[n]) for n in "qkv")
    o, lse = fresh((batch, q_len, heads, dims["dv"]), q.dtype, q.device), None
    if "lse" in call.wants:
        lse = fresh((batch, heads, q_len), torch_dtype(call.outputs["lse"][1]), q.device)

    pre, unit = score_unit(call)
    scores = Scores(pre, options["softcap"], unit * portable.LOG2E, unit)
    left, right = portable._band(options["is_causal"], options["window"], q_len + kv_len)
    if shares is not None:
        by_shares(call, tiling, plan, (q, k, v), (o, lse), scores, (left, right), shares)
        return (o, lse)
    work, programs = work_of(call, tiling, plan.consumers * QUERIES, (left, right), processors(q.device))
    described = (tiled(q, QUERIES, plan.block_d), tiled(k, plan.block_kv, plan.block_d),
                 tiled(v, plan.block_kv, plan.block_dv), tiled(o, QUERIES, plan.block_dv))  # fmt: skip
    launch(attention_flash_kernel, programs, call, *described, lse, scores, (left, right), *work,
           plan=plan, num_warps=4, maxnreg=REGISTERS[plan.consumers][1])  # fmt: skip
    return (o, lse)


def in_shares(call: Call, tiling: Mapping[str, int], chunks: int) -> bool:
    """Whether ``by_shares`` takes so many chunks of each group of heads. Where programs would take several chunks each,
    the portable kernel's are as fast or faster (H100, 8 key heads: one sequence of 8192 keys 25.0 us for 29.3, 32 of
    them 380 for 376; 8 of 32768 keys 380 for 378)."""
    total = call.dims["batch"] * call.dims["kv_heads"] * chunks
    wanted = tiling["shares"] == 2 or (tiling["shares"] == 1 and total <= processors(call.arrays["q"].device))
    return wanted and rows_of(call) <= QUERIES


def rows_of(call: Call) -> int:
    """How many rows a group of heads has, in boxes whose extents are powers of two."""
    return call.dims["q_len"] * pow2_at_least(call.dims["group"])


def by_shares(
    call: Call, tiling: Mapping[str, int], plan: Plan, arrays: tuple[Any, ...], out: tuple[Any, Any], scores: Scores,
    window: tuple[int | None, int | None], chunks: int,
) -> None:  # fmt: skip
    """Each chunk of keys by itself, and then, where there are several, their merger, which is launched beside the end
    of the first kernel."""
    dims, (q, k, v) = call.dims, arrays
    batch, q_len, kv_heads, group, dv = (dims[n] for n in ("batch", "q_len", "kv_heads", "group", "dv"))
    heads, total, chunk = kv_heads * group, batch * kv_heads * chunks, chunk_length(call, tiling) or dims["kv_len"]
    plan, limit = plan._replace(consumers=1, stages=2, chunked=False, o_in_q=False), shared_limit(call.target.arch)
    while plan.stages < MOST_STAGES and shared_bytes(plan._replace(stages=plan.stages + 1, o_in_q=True)) <= limit:
        plan = plan._replace(stages=plan.stages + 1)
    parts, statistics, written = None, None, out
    if chunks > 1:
        parts = fresh((batch, heads, q_len, chunks, dv), torch.float32, q.device)
        statistics = fresh((batch, heads, q_len, chunks, 2), torch.float32, q.device)
        written = None, None
    work = Shares(total, chunks, kv_heads, group, q_len, dims["kv_len"], chunk, dv)
    launch(attention_shares_kernel, min(total, processors(q.device)), call, by_group(q, group, plan.block_d),
           tiled(k, plan.block_kv, plan.block_d), tiled(v, plan.block_kv, plan.block_dv), parts, statistics,
           *written, scores, window, *work, plan=plan, heads=pow2_at_least(group), num_warps=4,
           maxnreg=REGISTERS[2][1])  # fmt: skip
    if chunks > 1:
        portable.combine(call, (parts, statistics), out, scores, follows=True)


def by_group(q: torch.Tensor, group: int, columns: int) -> Any:
    """(batch, length, heads, d) in tiles of all rows of a group's heads: (batch, groups, length, group, d)."""
    batch, length, heads, d = q.shape
    by_batch, by_row, by_head, _ = q.stride()
    shape = batch, heads // group, length, group, d
    strides = [
        s if extent > 1 else of_a_copy
        for s, extent, of_a_copy in zip(
            (by_batch, group * by_head, by_row, by_head, 1), shape, contiguous_strides(shape), strict=True
        )
    ]
    together = pow2_at_least(group)
    block = 1, 1, QUERIES // together, together, columns
    return describe(q, shape, strides, block, gl.NVMMASharedLayout(128, 16, 5))


def work_of(
    call: Call, tiling: Mapping[str, int], queries: int, window: tuple[int | None, int | None], processors: int
) -> tuple[Work, int]:
    """The tiles of so many ``queries``, and how many programs take them.

    Tiles that are alike are dealt out beforehand. Where some see more keys, so are their pairs, if these fill the
    multiprocessors; otherwise the longest come first, and a multiprocessor takes the next one when it is done.
    """
    dims = call.dims
    heads, kv_len = dims["kv_heads"] * dims["group"], dims["kv_len"]
    all_heads, tiles_q = dims["batch"] * heads, cdiv(dims["q_len"], queries)
    tiles = tiles_q * all_heads
    ahead, programs, together = tiles, min(tiles, processors), 1
    if window[1] is not None:
        together = cdiv(all_heads, cdiv(all_heads, TOGETHER))
    if window != (None, None):
        pairs = cdiv(tiles, 2)
        if tiling.get("stay") and stays(call, tiling, queries, window, pairs, processors):
            ahead, programs = pairs, min(pairs, processors)
        else:
            programs = tiles
    chunk = chunk_length(call, tiling) or kv_len
    return Work(
        tiles, ahead, tiles_q, together, heads, dims["group"], all_heads, dims["q_len"], kv_len, chunk
    ), programs


def stays(
    call: Call, tiling: Mapping[str, int], queries: int, window: tuple[int | None, int | None], pairs: int,
    processors: int,
) -> bool:  # fmt: skip
    """Whether programs that stay and take tiles by pairs end before programs of one tile, of which the longest come
    first and leave no multiprocessor idle.

    Those that stay lose the last round's rest, the others at each tile's beginning. The times of a tile on an H100
    (causal, d 128, 512 to 16384 keys, 16 heads) are those of the keys that it sees and ``BEGINNINGS``, within 2 %.
    """
    q_len, kv_len, (left, right) = call.dims["q_len"], call.dims["kv_len"], window
    seen = kv_len if right is None else max(0, kv_len - q_len // 2 + right)
    if left is not None:
        seen = min(seen, queries + left + (kv_len if right is None else right))
    here, anew = (min(seen, kv_len) / tiling["block_kv"] + beginning for beginning in BEGINNINGS)
    return cdiv(pairs, processors) * processors * here <= pairs * anew


def movable(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy where the copy engine cannot move its rows: from odd addresses, or over odd strides."""
    odd = [s % 8 or not s for s, extent in zip(x.stride()[:3], x.shape[:3], strict=True) if extent > 1]
    if x.stride(3) == 1 and not any(odd) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def tiled(x: torch.Tensor, rows: int, columns: int) -> Any:
    """(batch, length, heads, d) in tiles of so many rows of one head."""
    strides = [
        s if extent > 1 else of_a_copy
        for s, extent, of_a_copy in zip(x.stride(), x.shape, contiguous_strides(x.shape), strict=True)
    ]
    return describe(x, x.shape, strides, (1, rows, 1, columns), gl.NVMMASharedLayout(128, 16, 4))


@functools.cache
def processors(device: torch.device) -> int:
    """How many multiprocessors a device has; an H100's where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
