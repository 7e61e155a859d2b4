"""The kernel of attention's gradients for Hopper in five products (Dao 2023, FlashAttention-2, algorithm 2; Shah et al.
2024, FlashAttention-3, section 3 and its backward pass):

    s = cap(scale q k^T)    P = exp(min(s - lse, 0))    D = P (d_o v^T - delta) cap'(s)    delta = rowsum(d_o o) - d_lse
    d_q = scale D k         d_k = scale D^T q   d_v = P^T d_o

The two launches of ``hopper/_flash_gradients.py`` compute s and d_o v^T twice, once for d_q and once for d_k and d_v.
Here there is one, with resident keys as there for d_k and d_v: a program owns 128 keys, and the queries that see them
come by. What a tile of queries gets of these keys is added to its d_q in memory, in float32. So many programs add to a
d_q, in the order in which they come: **its last bits may change from one run to the next**. d_k and d_v are summed by
one owner in one order, as there.

D^T of a group's 64 keys lies in its registers. d_q wants the D^T of both groups as one left operand, since each
addition to memory that is spared is worth more than a barrier: so both groups put theirs into shared memory, in one of
two buffers in turn, and each group of warps computes half of the tile's d_q: 64 of 128 columns at head dimension 128,
64 of 128 queries at 64, and hands it over to the copy engine, which adds it to memory. It does so when the tile's D is
there (``walk_each``), or beside the weights of the tile that follows, when the other group's D has long been there,
which takes registers (``walk_behind``). A group writes a buffer anew when both have put the tile in between into the
other one, hence are done with the products of this one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from portakern.backends.triton.lib.gluon import ROWS, accumulator, boxed, by_row, packed_reach, reach, store_tile
from portakern.backends.triton.lib.gluon_gradients import (
    Own,
    Sides,
    any_flag,
    guests_of,
    next_tile,
    producer,
    score_gradients,
    tiles_of,
    weights_of,
    work_of,
)
from portakern.backends.triton.lib.heads import program


@builtin
def add_tile(described: Any, at: Any, tile: Any, _semantic: Any = None) -> None:
    """Begin to add a tile to memory: ``tma.async_atomic_add``, which releases before 3.8 have under no name."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, described.handle, at, tile.handle)


GROUPS = gl.constexpr(2)  # of four warps, each of which owns 64 keys and computes half of a tile's d_q


class GroupExchange(NamedTuple):
    """What the groups show each other. ``tiles``: D^T, rounded, two buffers of a tile a group; ``there``: whether all
    groups have put theirs into a buffer; ``done``: whether all are done with the resident keys. ``leaving``: a group's
    half of a d_q each, where the copy engine adds to memory."""

    tiles: Any
    there: Any
    done: Any
    leaving: Any


class QueryWalk(NamedTuple):
    """What a walk over queries works with: what a group of warps owns, all resident keys, the ring of queries, what
    groups show each other, where d_q is added up, and units and tiles."""

    own: Any
    keys: Any
    streamed: Any
    parts: Any
    sums: Any
    scores: Any
    work: Any


@gluon.jit
def query_gradients(GROUP: gl.constexpr, buffer, keys, parts, plan: gl.constexpr):
    """This group's half of D k of a tile, (64, 64), on its way."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    d_q = gl.zeros([64, 64], gl.float32, half)
    for g in gl.static_range(GROUPS):
        if plan.block > 64:
            part, k = parts.tiles.index((buffer * 2 + GROUP) * GROUPS + g), keys.index(g)
        else:
            part, k = parts.tiles.index(buffer * GROUPS + g), keys.index(g).slice(GROUP * 64, 64, 1)
        d_q = warpgroup_mma(part.permute((1, 0)), k, d_q, use_acc=g > 0, is_async=True)
    return d_q


@gluon.jit
def add_to_memory(GROUP: gl.constexpr, sums, parts, d_q, position, plan: gl.constexpr):
    """Have this group's half of d_q added to the sums of the queries of a ``position``, (head of all batch entries,
    first query); nobody waits for it."""
    head, start = position
    leaving = parts.leaving.index(GROUP)
    tma.store_wait(0)  # what was in this tile before has left
    leaving.store(d_q)
    fence_async_shared()
    box = boxed(leaving, gl.NVMMASharedLayout(128, 32, 4))
    if plan.block > 64:
        add_tile(sums, [head, start + GROUP * 64, 0, 0], box)
    else:
        add_tile(sums, [head, start, 0, GROUP * 64], box)


@gluon.jit
def fold_tile(GROUP: gl.constexpr, follows: gl.constexpr, ring_state, position, before, context, d_first, d_second,
              plan: gl.constexpr):  # fmt: skip
    """(d_k, d_v) with a tile of queries, 64 at a time of the ``block`` that come together, their last products on the
    way; D is put where the other group sees it. ``follows``: beside its first weights d_q of the tile ``before`` is
    computed and added."""
    mma: gl.constexpr = accumulator(64)
    left_first: gl.constexpr = gl.DotOperandLayout(0, accumulator(plan.block_d), 2)
    left_second: gl.constexpr = gl.DotOperandLayout(0, accumulator(plan.block_dv), 2)
    several: gl.constexpr = plan.block // 64
    own, keys, streamed, parts, sums, scores, work = context
    stage, phase, buffer, filled = ring_state
    line, start = position
    zeros = gl.zeros([ROWS, 64], gl.float32, mma)
    cols = gl.arange(0, 64, gl.SliceLayout(0, mma))
    far = any_flag(own.flags, line, start, plan.block, work.kv_len, plan)
    mbarrier.wait(streamed.ring.full.index(stage), phase)
    for n in gl.static_range(several):
        q, d_o = streamed.first[0].index(stage).slice(n * 64, 64), streamed.second[0].index(stage).slice(n * 64, 64)
        dots = warpgroup_mma(own.first, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        shift = streamed.shift.index(stage).slice(n * 64, 64, 1).load(mma)
        if follows and n == 0:
            mbarrier.wait(parts.there.index(buffer ^ 1), filled ^ buffer ^ 1)
            d_q = query_gradients(GROUP, buffer ^ 1, keys, parts, plan)
            dots = warpgroup_mma_wait(2, deps=[dots])
            p, sloped = weights_of(dots, shift, far, position, cols, own, scores, work, True)
            d_q = warpgroup_mma_wait(0, deps=[d_q])
            add_to_memory(GROUP, sums, parts, d_q, before, plan)
            d_p = warpgroup_mma(own.second, d_o.permute((1, 0)), zeros, use_acc=False, is_async=True)
        else:
            d_p = warpgroup_mma(own.second, d_o.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dots = warpgroup_mma_wait(1, deps=[dots])
            p, sloped = weights_of(dots, shift, far, (line, start + n * 64), cols, own, scores, work, True)
        p16 = gl.convert_layout(p.to(q.dtype), left_second)
        d_second = warpgroup_mma(p16, d_o, d_second, is_async=True)
        d_p = warpgroup_mma_wait(1, deps=[d_p])
        delta = streamed.delta.index(stage).slice(n * 64, 64, 1).load(mma)
        d = score_gradients(sloped, d_p, delta, start + n * 64, cols, own)
        d16 = d.to(q.dtype)
        parts.tiles.index((buffer * several + n) * GROUPS + GROUP).store(d16)
        d_first = warpgroup_mma(gl.convert_layout(d16, left_first), q, d_first, is_async=True)
    fence_async_shared()
    mbarrier.arrive(parts.there.index(buffer), count=1)
    return d_first, d_second


@gluon.jit
def next_stage(ring_state, stages: gl.constexpr):
    """What comes after (stage, its phase, buffer, its phase). Counted one by one: of a count of tiles the compiler
    would keep an address of each buffer."""
    stage, phase, buffer, filled = ring_state
    phase ^= gl.where(stage == stages - 1, 1, 0)
    stage = gl.where(stage == stages - 1, 0, stage + 1)
    return stage, phase, buffer ^ 1, filled ^ buffer


@gluon.jit
def walk_each(GROUP: gl.constexpr, ring_state, position, streamed_span, context, d_first, d_second, plan: gl.constexpr):
    """(d_k, d_v, ring_state) after all queries that see the resident keys, from ``position`` on. streamed_span: (first,
    last, steps), of each head of theirs, and of all. A group waits at each tile for the other one's D."""
    first, last, steps = streamed_span
    streamed, parts = context.streamed, context.parts
    for _ in range(steps):
        d_first, d_second = fold_tile(GROUP, False, ring_state, position, position, context, d_first, d_second, plan)
        stage, _, buffer, filled = ring_state
        mbarrier.wait(parts.there.index(buffer), filled)
        d_q = query_gradients(GROUP, buffer, context.keys, parts, plan)
        d_first, d_second = warpgroup_mma_wait(2, deps=[d_first, d_second])
        mbarrier.arrive(streamed.ring.empty.index(stage), count=1)
        d_q = warpgroup_mma_wait(0, deps=[d_q])
        add_to_memory(GROUP, context.sums, parts, d_q, position, plan)
        ring_state = next_stage(ring_state, plan.stages)
        position = next_tile(position, first, last, plan.block)
    return d_first, d_second, ring_state


@gluon.jit
def walk_behind(
    GROUP: gl.constexpr, ring_state, position, streamed_span, context, d_first, d_second, plan: gl.constexpr
):
    """As ``walk_each``, with d_q of a tile computed beside the weights of the next, so that no group waits for what the
    other has just begun."""
    first, last, steps = streamed_span
    streamed, parts = context.streamed, context.parts
    d_first, d_second = fold_tile(GROUP, False, ring_state, position, position, context, d_first, d_second, plan)
    d_first, d_second = warpgroup_mma_wait(0, deps=[d_first, d_second])
    mbarrier.arrive(streamed.ring.empty.index(ring_state[0]), count=1)
    ring_state = next_stage(ring_state, plan.stages)
    before = position
    position = next_tile(position, first, last, plan.block)
    for _ in range(1, steps):
        d_first, d_second = fold_tile(GROUP, True, ring_state, position, before, context, d_first, d_second, plan)
        d_first, d_second = warpgroup_mma_wait(0, deps=[d_first, d_second])
        mbarrier.arrive(streamed.ring.empty.index(ring_state[0]), count=1)
        ring_state = next_stage(ring_state, plan.stages)
        before = position
        position = next_tile(position, first, last, plan.block)
    _, _, buffer, filled = ring_state
    mbarrier.wait(parts.there.index(buffer ^ 1), filled ^ buffer ^ 1)
    d_q = query_gradients(GROUP, buffer ^ 1, context.keys, parts, plan)
    d_q = warpgroup_mma_wait(0, deps=[d_q])
    add_to_memory(GROUP, context.sums, parts, d_q, before, plan)
    return d_first, d_second, ring_state


@gluon.jit
def reach_of_keys(first, work, left, right, row: gl.constexpr):
    """As ``reach``, of the keys from ``first`` on. Those that are not there are seen by no query: they are 0, of which
    a query's weight is 2^-shift. That may be large, and a d_o that is infinite would make NaN of it in its d_q."""
    limits, all_lo, all_hi = reach(first + work.kv_len - work.q_len, work, left, right, row)
    lo, hi = limits
    lo = gl.where(first + gl.arange(0, ROWS, row) < work.q_len, lo, work.kv_len)
    return (lo, hi), gl.where(first + ROWS > work.q_len, work.kv_len, all_lo), all_hi


@gluon.jit
def consumer(GROUP: gl.constexpr, resident, streamed, parts, sides, sums, softmax, group, plan: gl.constexpr):
    """Four warps that own 64 keys."""
    block: gl.constexpr = plan.block
    block_d: gl.constexpr = plan.block_d
    block_dv: gl.constexpr = plan.block_dv
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    dtype: gl.constexpr = resident.first[0].dtype
    left, right = softmax.window
    work = work_of(sides, softmax.window, group, plan)
    resident_first, resident_second = resident.first[0].index(GROUP), resident.second[0].index(GROUP)
    ring_state = 0, 0, 0, 0
    count = 0
    index = gl.program_id(0)
    while index < work.tiles:
        top, head, first, last, steps = guests_of(index, work, softmax.window, sides, ROWS * GROUPS, block, True)
        mine = top + GROUP * ROWS
        limits, all_lo, all_hi = reach_of_keys(mine, work, left, right, by_row(64))
        others = None
        if sides.segments is not None:
            reached = limits, all_lo, all_hi
            limits, all_lo, all_hi, others = packed_reach(reached, sides.segments, head, mine, work, by_row(64))
        for g in gl.static_range(GROUPS):
            mbarrier.wait(resident.ring.full.index(g), count & 1)
        own = Own(resident_first, resident_second, limits, all_lo, all_hi, None, None, sides.rest.low, sides.rest.flags,
                  others)  # fmt: skip
        context = QueryWalk(own, resident.first[0], streamed, parts, sums, softmax.scores, work)
        d_first = gl.zeros([ROWS, block_d], gl.float32, accumulator(block_d))
        d_second = gl.zeros([ROWS, block_dv], gl.float32, accumulator(block_dv))
        position, streamed_span = (head * work.group, first), (first, last, steps)
        if plan.ahead:
            d_first, d_second, ring_state = walk_behind(
                GROUP, ring_state, position, streamed_span, context, d_first, d_second, plan
            )
        else:
            d_first, d_second, ring_state = walk_each(
                GROUP, ring_state, position, streamed_span, context, d_first, d_second, plan
            )
        mbarrier.arrive(parts.done, count=1)
        mbarrier.wait(parts.done, count & 1)
        # The resident rows are not read any more: their gradients leave by way of their memory.
        b, h = head // work.heads, head % work.heads
        resident_first.store((d_first * softmax.scale).to(dtype))
        resident_second.store(d_second.to(dtype))
        fence_async_shared()
        if sides.d_first is not None:
            store_tile(sides.d_first, [b, mine, h, 0], boxed(resident_first, box))
        if sides.d_second is not None:
            store_tile(sides.d_second, [b, mine, h, 0], boxed(resident_second, box))
        tma.store_wait(0)
        mbarrier.arrive(resident.ring.empty.index(GROUP), count=1)
        count += 1
        index += gl.num_programs(0)


@gluon.jit
def attention_vjp_unordered_kernel(
    k, v, q, d_o, lines, rest, segments, sums, d_k, d_v, softmax, plan: gl.constexpr,
):  # fmt: skip
    """d_k and d_v, scaled, and D k added to ``sums``, float32, described: (heads of all batch entries, pitch, 1,
    block_d). The other arguments are those of ``attention_vjp_gradients_kernel`` with resident keys; d_k and d_v may be
    None."""
    sides = Sides((k,), (v,), (q,), (d_o,), lines, rest, d_k, d_v, segments, None)
    dtype: gl.constexpr = k.dtype
    block: gl.constexpr = plan.block
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    resident = tiles_of(dtype, GROUPS, ROWS, plan, 1)
    streamed = tiles_of(dtype, plan.stages, plan.block, plan, GROUPS)
    parts = GroupExchange(
        gl.allocate_shared_memory(dtype, [2 * (block // 64) * GROUPS, ROWS, 64], swizzled),
        gl.allocate_shared_memory(gl.int64, [2, 1], bar),
        gl.allocate_shared_memory(gl.int64, [1, 1], bar).index(0),
        gl.allocate_shared_memory(gl.float32, [GROUPS, 64, 64], gl.NVMMASharedLayout(128, 32, 2)),
    )
    mbarrier.init(parts.there.index(0), count=GROUPS)
    mbarrier.init(parts.there.index(1), count=GROUPS)
    mbarrier.init(parts.done, count=GROUPS)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (0, resident, streamed, parts, sides, sums, softmax, None, plan)),
        (consumer, (1, resident, streamed, parts, sides, sums, softmax, None, plan)),
        (producer, (resident, streamed, sides, softmax, None, plan)),
    ], [4, 1], [plan.registers, 24])  # fmt: skip


@triton.jit
def attention_vjp_unordered_round_kernel(
    sums, d_q, scale, tiles, heads, q_len, pitch, d, rows: tl.constexpr, columns: tl.constexpr
):
    """d_q = scale sums, of d columns, (batch, q_len, heads, d). sums: (batch, heads, pitch, columns)."""
    tile, head, batch = program(tiles, heads)
    i, j = (tile * rows + tl.arange(0, rows)).to(tl.int64)[:, None], tl.arange(0, columns)[None, :]
    ok = (i < q_len) & (j < d)
    total = tl.load(sums + ((batch * heads + head) * pitch + i) * columns + j, mask=ok, other=0.0)
    at = ((batch * q_len + i) * heads + head) * d + j
    tl.store(d_q + at, (total * scale).to(d_q.dtype.element_ty), mask=ok)
