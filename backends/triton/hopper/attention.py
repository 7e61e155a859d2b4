"""Attention for Hopper's copy engine and asynchronous matrix unit, in 16 bits, and its gradients: see ``_flash``,
``_shares`` for few queries, and ``_flash_gradients``.

Calls of few queries are left to the portable variant with the tiling of here (``delegate``) where a group of heads has
more than 64 rows, or more than 32 and chunks of keys that are not worth a program each, or where they have segments.
All kernels add up the same numbers in the same order, so that a row's bits do not tell which it was.
Everything that this variant does not take, forward or backward, is refused by what decides bits and what kernels are
compiled for: dtypes, head dimensions and bias, and no lengths or batches. Gluon is compiled alone: nothing of this runs
in the interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton.experimental.gluon import language as gl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import FewQueries, FlashConfig, FlashGradientsConfig, UnsplitConfig
from portakern.backends.triton.descriptors import describe
from portakern.backends.triton.hopper._flash import (
    LogSums,
    OtherArrays,
    TileSchedule,
    attention_flash_kernel,
    attention_flash_pieces_kernel,
)
from portakern.backends.triton.hopper._flash_gradients import (
    OtherGradientArrays,
    attention_vjp_gradients_kernel,
    attention_vjp_pieces_kernel,
)
from portakern.backends.triton.hopper._shares import HALF, attention_shares_kernel
from portakern.backends.triton.launch import GLUON, cdiv, launch, shared_limit, torch_dtype
from portakern.backends.triton.layout import contiguous_strides, fresh, pow2_at_least
from portakern.backends.triton.lib import attention as shared
from portakern.backends.triton.lib import attention_vjp_gluon as gradients
from portakern.backends.triton.lib.attention_gluon import (
    DRAWN,
    FlashPlan,
    few_plan,
    fit,
    key,
    plan_of,
    portable,
    shared_bytes,
    supports,
)
from portakern.backends.triton.lib.gluon import OrderedSegments, Softmax
from portakern.backends.triton.lib.heads import Scores
from portakern.backends.triton.lib.segments import longest_first
from portakern.backends.triton.lib.split_kv import chunk_length, chunks_of_a_tile, seen_keys, worth_spreading
from portakern.backends.triton.lib.tma import (
    IN_L2,
    QUERIES,
    REGISTERS,
    TOGETHER,
    in_pieces,
    movable,
    processors,
    tiled,
)
from portakern.specs.attention import scale_of, sight

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

BEGINNINGS = 1.7, 3.3  # tiles of keys that a tile's beginning takes as long as: of a program that stays, and a new one
SATURATED = 48  # programs that read keys as fast as memory gives them
MERGER = 3.0  # tiles of keys that the merger of chunks takes as long as
MOST_STAGES = 6  # of keys on their way to one group of rows


def least_chunk(call: Call) -> dict[str, int]:
    """So many keys at least have a state of their own, where no row of a table says otherwise.

    Chunks do not end the walk over keys here: a border costs the arithmetic of one merge, some 110 instructions of a
    warp where 512 keys are 4000, but code that can meet one is slower also where it meets none. So the forward pass
    wants one chunk, and decoding as many as there are multiprocessors for, if what is written of them weighs little. On
    an H100 (d 128) chunks of 512 and of 1024 took: 4096 queries and keys, causal, 499 and 491 us; one query over 8192
    keys of 8 heads 27.5 and 25.0, 32 such sequences 386 and 376; 1024 queries and keys 177 and, being one chunk, 162,
    one query over 1024 keys 14.1 and 18.7.
    """
    return {"min_split_keys": 1024}


def delegate(call: Call, config: FlashConfig) -> tuple[str, UnsplitConfig] | None:
    """Few queries that are not shared out are the portable kernel's, with the tiling of here, on which bits depend."""
    return ("gpu", portable(call, config)) if shares_of(call, config) is None and few_queries(call, config) else None


@BACKEND.implements("attention", tiling=least_chunk, key=key, fit=fit, supports=supports,
                    config=FlashConfig, delegate=delegate, drawn=DRAWN, compiled_alone=GLUON)  # fmt: skip
def attention(call: Call, config: FlashConfig) -> tuple[Any, ...]:
    shares = shares_of(call, config)
    plan = plan_of(call, config)
    q, k, v = (movable(call.arrays[n]) for n in "qkv")
    o, lse, low = shared.results(call, q)
    scores = Scores.of(call)
    left, right = sight(call)
    if shares is not None:
        by_shares(call, config, plan, (q, k, v), (o, lse, low), scores, (left, right), *shares)
        return o, lse, low
    segments: Any = gradients.segments_of(call, "q", "kv")
    if segments is not None:
        order = longest_first(call, segments.summaries, plan.consumers * QUERIES, (left, right))
        segments = OrderedSegments(segments.ranges, segments.summaries, segments.own_firsts, segments.firsts, order)
    work, programs = work_of(call, config, plan.consumers * QUERIES, (left, right), processors(q.device))
    columns, columns_dv = (plan.block_d, plan.more_d), (plan.block_dv, plan.more_dv)
    described = [in_pieces(x, rows, *of) for x, rows, of in (
        (q, QUERIES, columns), (k, plan.block_kv, columns), (v, plan.block_kv, columns_dv),
        (o, QUERIES, columns_dv))]  # fmt: skip
    log_sums, softmax = LogSums(lse, low), Softmax(scores, (left, right))
    compiled = {"plan": plan, "num_warps": 4, "maxnreg": REGISTERS[plan.consumers][1]}
    if plan.more_d or plan.more_dv:
        launch(attention_flash_pieces_kernel, programs, call, *(piece for x in described for piece in x),
               OtherArrays(lse, low, segments), softmax, work.chunk, **compiled)  # fmt: skip
    else:
        *inputs, of_o = (first for first, _ in described)
        launch(attention_flash_kernel, programs, call, *inputs, segments, of_o, log_sums, softmax, work.ahead,
               work.interleaved_heads, work.group, work.chunk, **compiled)  # fmt: skip
    return o, lse, low


def few_queries(call: Call, config: FlashConfig) -> bool:
    """Whether tiles of queries that are this variant's would be half empty, or too few to occupy a GPU."""
    rows, _ = shared.rows_plan(call, config)
    _, _, _, chunks = shared.programs_of(call, config, rows)
    return bool(chunks) or rows.packed or call.dims["q_len"] <= QUERIES


def shares_of(call: Call, config: FlashConfig) -> tuple[int, bool] | None:
    """(chunks of each group of heads, whether one program walks them all) where ``by_shares`` takes the call; else
    None."""
    dims, wanted, rows = call.dims, config.few_queries, rows_of(call)
    if wanted == FewQueries.PORTABLE or rows > QUERIES or call.arrays["q_segment_ids"] is not None:
        return None
    chunk, groups = chunk_length(call, config), dims["batch"] * dims["kv_heads"]
    chunks = 1 if chunk is None else chunks_of_a_tile(call, chunk, dims["q_len"])
    may_walk = rows <= HALF.value
    if chunks == 1:
        # One chunk is a walk of one border less.
        return (1, False) if chunk is None or may_walk else None
    apart = worth_spreading(call, groups, chunks)
    if wanted == FewQueries.FASTER:
        walked, split = times(call, config, chunks)
        walks = may_walk and (walked <= split or not apart)
    else:
        walks = may_walk and wanted == FewQueries.WALKED
    return (chunks, walks) if walks or apart else None


def times(call: Call, config: FlashConfig, chunks: int) -> tuple[float, float]:
    """What a program for each group of heads and a program for each chunk would take, in the time of a tile of keys.

    A program computes no faster than a tile in that time (0.7 us at d 128), and ``SATURATED`` of them together read no
    faster. On an H200 that chose the faster one for 42 calls of 512 to 54720 keys and 1 to 256 groups of heads.
    """
    dims, many = call.dims, processors(call.arrays["q"].device)
    groups, tiles = dims["batch"] * dims["kv_heads"], cdiv(seen_keys(call), config.block_kv)
    memory = groups * tiles / SATURATED
    each = cdiv(chunk_length(call, config) or dims["kv_len"], config.block_kv)
    longest = cdiv(groups * chunks, many) * min(each, tiles)
    return max(cdiv(groups, many) * tiles, memory), max(longest, memory) + MERGER


def rows_of(call: Call) -> int:
    """How many rows a group of heads has, in boxes whose extents are powers of two."""
    return call.dims["q_len"] * pow2_at_least(call.dims["group"])


def by_shares(
    call: Call, config: FlashConfig, plan: FlashPlan, arrays: tuple[Any, ...], out: tuple[Any, Any, Any],
    scores: Scores,
    window: tuple[int | None, int | None], chunks: int, walks: bool,
) -> None:  # fmt: skip
    """Each group of heads by a program that ``walks`` its chunks; or each chunk of keys by itself, and then, where
    there are several, their merger, which is launched beside the end of the first kernel."""
    dims, (q, k, v) = call.dims, arrays
    batch, q_len, kv_heads, group, dv = (dims[n] for n in ("batch", "q_len", "kv_heads", "group", "dv"))
    heads, groups, chunk = kv_heads * group, batch * kv_heads, chunk_length(call, config) or dims["kv_len"]
    rows = HALF.value if rows_of(call) <= HALF.value else QUERIES
    plan = few_plan(call, plan)._replace(chunked=walks, heads=pow2_at_least(group), rows=rows)
    limit = shared_limit(call.target.arch)
    while plan.stages < MOST_STAGES and shared_bytes(plan._replace(stages=plan.stages + 1, o_in_q=True)) <= limit:
        plan = plan._replace(stages=plan.stages + 1)
    parts, statistics, written = None, None, out
    if chunks > 1 and not walks:
        float32 = torch_dtype("float32")
        parts = fresh((batch, heads, q_len, chunks, dv), float32, q.device)
        statistics = fresh((batch, heads, q_len, chunks, 2), float32, q.device)
        written = None, None, None
    programs = evenly(groups if walks else groups * chunks, processors(q.device))
    launch(attention_shares_kernel, programs, call, by_group(q, group, plan.block_d),
           tiled(k, plan.block_kv, plan.block_d), tiled(v, plan.block_kv, plan.block_dv), parts, statistics, *written,
           Softmax(scores, window), chunks, chunk, plan=plan, num_warps=4, maxnreg=REGISTERS[2][1])  # fmt: skip
    if parts is not None:
        shared.combine(call, (parts, statistics), out, scores, follows=True)


def evenly(parts: int, processors: int) -> int:
    """How many programs take so many parts one after another, so that each has as many as any other, or one less."""
    return cdiv(parts, cdiv(parts, processors))


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
    call: Call, config: FlashConfig, queries: int, window: tuple[int | None, int | None], processors: int
) -> tuple[TileSchedule, int]:
    """The tiles of so many ``queries``, and how many programs take them.

    Tiles that are alike are dealt out beforehand. Where some see more keys, so are their pairs, if these fill the
    multiprocessors; otherwise the longest come first, and a multiprocessor takes the next one when it is done. Those of
    a packed call are dealt out in an order of their own (``longest_first``).
    """
    dims = call.dims
    heads, kv_len = dims["kv_heads"] * dims["group"], dims["kv_len"]
    all_heads, tiles_q = dims["batch"] * heads, cdiv(dims["q_len"], queries)
    tiles = tiles_q * all_heads
    ahead, programs, together = tiles, min(tiles, processors), 1
    if window[1] is not None:
        keys = IN_L2 // (2 * (dims["d"] + dims["dv"]))
        together = max(1, min(TOGETHER, keys * dims["group"] // max(1, kv_len)))
        together = cdiv(all_heads, cdiv(all_heads, together))
    if window != (None, None) and call.arrays["q_segment_ids"] is None:
        pairs = cdiv(tiles, 2)
        if config.persistent and persistent(call, config, queries, window, pairs, processors):
            ahead, programs = pairs, min(pairs, processors)
        else:
            programs = tiles
    chunk = chunk_length(call, config) or kv_len
    return TileSchedule(
        tiles, ahead, tiles_q, together, heads, dims["group"], all_heads, dims["q_len"], kv_len, chunk
    ), programs


def persistent(
    call: Call, config: FlashConfig, queries: int, window: tuple[int | None, int | None], pairs: int,
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
    here, anew = (min(seen, kv_len) / config.block_kv + beginning for beginning in BEGINNINGS)
    return cdiv(pairs, processors) * processors * here <= pairs * anew


@BACKEND.implements("attention_vjp", key=shared.key, fit=gradients.fit, supports=gradients.supports,
                    config=FlashGradientsConfig, drawn=gradients.DRAWN, compiled_alone=GLUON)  # fmt: skip
def attention_vjp(call: Call, config: FlashGradientsConfig) -> tuple[Any, ...]:
    dims = call.dims
    q, k, v, d_o, o = (movable(call.arrays[n]) for n in ("q", "k", "v", "d_o", "o"))
    out = {
        name: fresh(shape, torch_dtype(dtype), q.device) if name in call.wants else None
        for name, (shape, dtype) in call.outputs.items()
    }
    scale, (scores, rate) = scale_of(call), gradients.scores_of(call)
    lines, rest, delta = gradients.lines_of(call, o, d_o, rate)
    shared.sink_gradient(call, delta, out["d_sinks"])
    left, right = sight(call)
    plans = gradients.plans(call, config)
    segments = gradients.segments_of_both(call, {plan.by_key for plan in plans.values()})
    for wants, plan in plans.items():
        first, second = (out.get(n) if n in wants else None for n in (("d_k", "d_v") if plan.by_key else ("d_q", "")))
        keys = (k, v), dims["kv_len"], dims["kv_heads"]
        queries = (q, d_o), dims["q_len"], dims["kv_heads"] * dims["group"]
        (home, home_len, heads), (guests, _, _) = (keys, queries) if plan.by_key else (queries, keys)
        window = (right, left) if plan.by_key else (left, right)
        tiles_home = cdiv(home_len, QUERIES * plan.consumers)
        tiles = tiles_home * heads * dims["batch"]
        programs = min(tiles, processors(q.device)) if window == (None, None) else tiles
        columns = (plan.block_d, plan.more_d), (plan.block_dv, plan.more_dv)
        described = [in_pieces(x, rows, *of) for arrays, rows in ((home, QUERIES), (guests, plan.block))
                     for x, of in zip(arrays, columns, strict=True)]  # fmt: skip
        numbers = gradients.in_parts(lines, plan.block) if plan.by_key else lines
        softmax = Softmax(scores, window, scale)
        compiled = {"plan": plan, "num_warps": 4, "maxnreg": REGISTERS[plan.consumers][1]}
        if plan.more_d or plan.more_dv:
            others = OtherGradientArrays(rest, segments[plan.by_key], first, second)
            launch(attention_vjp_pieces_kernel, programs, call, *(piece for x in described for piece in x), numbers,
                   others, softmax, **compiled)  # fmt: skip
        else:
            sums = [None if x is None else tiled(x, QUERIES, of[0])
                    for x, of in zip((first, second), columns, strict=True)]  # fmt: skip
            launch(attention_vjp_gradients_kernel, programs, call, *(x for x, _ in described), numbers, rest,
                   segments[plan.by_key], *sums, softmax, dims["group"], **compiled)  # fmt: skip
    return tuple(out.values())
