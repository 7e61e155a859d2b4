"""The kernel of attention's gradients for Hopper: warps that copy, warps that compute (Dao 2023, FlashAttention-2,
algorithm 2; Shah et al. 2024, FlashAttention-3, whose division of labour it has).

    s = cap(scale q k^T)    P = exp(min(s - lse, 0))    D = P (d_o v^T - delta) cap'(s)    delta = rowsum(d_o o) - d_lse
    d_q = scale D k         d_k = scale D^T q   d_v = P^T d_o

One kernel, launched twice, on two sides in turn. The rows of one side are a program's own (*resident*), 64 to a group
of four warps, and stay in shared memory; tiles of the other side (*streamed*) come by through a ring of ``stages``
buffers which one more warp, the producer, has the copy engine fill. For d_q queries are resident and keys come by; for
d_k and d_v keys are resident, and the queries of all heads of their group come by, one head after the other.

A side has two arrays: ``first``, q or k, which meet in scores, and ``second``, d_o or v, which meet in dP. Tiles have a
row for each resident row, so that P^T and D^T of d_v and d_k, as D of d_q, are the left operand of the next product as
they stand in registers. While the matrix unit works on dP the weights P are computed, and D while it works on d_v.

What a program sums up is its alone, in float32 registers, in an order that never changes: nothing is added atomically,
and the same call has the same bits each time. Seven products are computed where one kernel with ordered additions to
d_q would do with five.

lse is shift + low, and low is next to nothing where lse is near 0. Where a row of a tile of queries has an lse far from
0, which a ``flag`` says of ``plan.flagged`` queries, P is corrected for what shift lacks and kept below 1; elsewhere it
costs one branch. (Done to every P, it took 10 to 25 % of the gradients' time on an H100.)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from portakern.backends.triton.lib.gluon import (
    ROWS,
    accumulator,
    await_full,
    boxed,
    by_row,
    give_back,
    packed_reach,
    reach,
    store_tile,
)
from portakern.backends.triton.lib.gluon_gradients import (
    Own,
    Sides,
    any_flag,
    far_of,
    guests_of,
    next_tile,
    producer,
    score_gradients,
    statistic_of,
    tiles_of,
    weights_of,
    work_of,
)


@gluon.jit
def first_products(own, streamed, stage, plan: gl.constexpr):
    """Of a streamed tile the dot products, and what follows dP, on their way; dP alone where nobody wants it."""
    block: gl.constexpr = plan.block
    zeros = gl.zeros([ROWS, block], gl.float32, accumulator(block))
    dots = warpgroup_mma(own.first, streamed.first.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    d_p = zeros
    if plan.want_first:
        d_p = warpgroup_mma(
            own.second, streamed.second.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
    return dots, d_p


@gluon.jit
def walk(unit, position, streamed_span, own, streamed, sums, scores, work, plan: gl.constexpr):
    """(d_first, d_second, unit) after all that is streamed past a resident tile, from a ``position`` (line, first
    streamed row) on. streamed_span: (first, last, steps), of each head of theirs, and of all."""
    block: gl.constexpr = plan.block
    mma: gl.constexpr = accumulator(block)
    left_first: gl.constexpr = gl.DotOperandLayout(0, accumulator(plan.block_d), 2)
    left_second: gl.constexpr = gl.DotOperandLayout(0, accumulator(plan.block_dv), 2)
    d_first, d_second = sums
    first, last, steps = streamed_span
    cols = gl.arange(0, block, gl.SliceLayout(0, mma))
    for _ in range(steps):
        line, start = position
        far = far_of(own, line, start, work, plan)
        stage = await_full(streamed.ring, unit)
        dots, d_p = first_products(own, streamed, stage, plan)
        shift = statistic_of(own.shift, streamed.shift, stage, plan.by_key, mma)
        dots = warpgroup_mma_wait(1 if plan.want_first else 0, deps=[dots])
        p, sloped = weights_of(dots, shift, far, position, cols, own, scores, work, plan.by_key)
        if plan.want_second:
            p16 = gl.convert_layout(p.to(own.first.dtype), left_second)
            d_second = warpgroup_mma(p16, streamed.second.index(stage), d_second, is_async=True)
        if plan.want_first:
            d_p = warpgroup_mma_wait(1 if plan.want_second else 0, deps=[d_p])
            delta = statistic_of(own.delta, streamed.delta, stage, plan.by_key, mma)
            d = score_gradients(sloped, d_p, delta, start, cols, own)
            d16 = gl.convert_layout(d.to(own.first.dtype), left_first)
            d_first = warpgroup_mma(d16, streamed.first.index(stage), d_first, is_async=True)
        if not plan.want_first:
            d_second = warpgroup_mma_wait(0, deps=[d_second])
        elif not plan.want_second:
            d_first = warpgroup_mma_wait(0, deps=[d_first])
        else:
            d_first, d_second = warpgroup_mma_wait(0, deps=[d_first, d_second])
        give_back(streamed.ring.empty.index(stage), plan.by_key)
        unit += 1
        position = next_tile(position, first, last, block)
    return d_first, d_second, unit


@gluon.jit
def walk_ahead(unit, position, streamed_span, own, streamed, sums, scores, work, plan: gl.constexpr):
    """As ``walk``, with the last two products of a tile beside the weights of the next."""
    block: gl.constexpr = plan.block
    mma: gl.constexpr = accumulator(block)
    left_first: gl.constexpr = gl.DotOperandLayout(0, accumulator(plan.block_d), 2)
    left_second: gl.constexpr = gl.DotOperandLayout(0, accumulator(plan.block_dv), 2)
    d_first, d_second = sums
    first, last, steps = streamed_span
    cols = gl.arange(0, block, gl.SliceLayout(0, mma))
    far = far_of(own, position[0], first, work, plan)
    stage = await_full(streamed.ring, unit)
    dots, d_p = first_products(own, streamed, stage, plan)
    shift = statistic_of(own.shift, streamed.shift, stage, plan.by_key, mma)
    dots = warpgroup_mma_wait(1, deps=[dots])
    p, sloped = weights_of(dots, shift, far, position, cols, own, scores, work, plan.by_key)
    d_p = warpgroup_mma_wait(0, deps=[d_p])
    delta = statistic_of(own.delta, streamed.delta, stage, plan.by_key, mma)
    d = score_gradients(sloped, d_p, delta, first, cols, own)
    p16 = gl.convert_layout(p.to(own.first.dtype), left_second)
    d16 = gl.convert_layout(d.to(own.first.dtype), left_first)
    for _ in range(1, steps):
        before = stage
        unit += 1
        position = next_tile(position, first, last, block)
        start = position[1]
        far = far_of(own, position[0], start, work, plan)
        stage = await_full(streamed.ring, unit)
        dots, d_p = first_products(own, streamed, stage, plan)
        d_second = warpgroup_mma(p16, streamed.second.index(before), d_second, is_async=True)
        d_first = warpgroup_mma(d16, streamed.first.index(before), d_first, is_async=True)
        shift = statistic_of(own.shift, streamed.shift, stage, plan.by_key, mma)
        dots = warpgroup_mma_wait(3, deps=[dots])
        p, sloped = weights_of(dots, shift, far, position, cols, own, scores, work, plan.by_key)
        d_p = warpgroup_mma_wait(2, deps=[d_p])
        delta = statistic_of(own.delta, streamed.delta, stage, plan.by_key, mma)
        d = score_gradients(sloped, d_p, delta, start, cols, own)
        d_first, d_second = warpgroup_mma_wait(0, deps=[d_first, d_second])
        p16 = gl.convert_layout(p.to(own.first.dtype), left_second)
        d16 = gl.convert_layout(d.to(own.first.dtype), left_first)
        give_back(streamed.ring.empty.index(before), plan.by_key)
    d_second = warpgroup_mma(p16, streamed.second.index(stage), d_second, is_async=True)
    d_first = warpgroup_mma(d16, streamed.first.index(stage), d_first, is_async=True)
    d_first, d_second = warpgroup_mma_wait(0, deps=[d_first, d_second])
    give_back(streamed.ring.empty.index(stage), plan.by_key)
    return d_first, d_second, unit + 1


@gluon.jit
def consumer(GROUP: gl.constexpr, resident, streamed, sides, softmax, group, plan: gl.constexpr):
    """Four warps that own 64 resident rows."""
    row: gl.constexpr = by_row(plan.block)
    block: gl.constexpr = plan.block
    block_d: gl.constexpr = plan.block_d
    block_dv: gl.constexpr = plan.block_dv
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    dtype: gl.constexpr = resident.first.dtype
    left, right = softmax.window
    work = work_of(sides, softmax.window, group, plan)
    resident_first, resident_second = resident.first.index(GROUP), resident.second.index(GROUP)
    unit = 0
    count = 0
    index = gl.program_id(0)
    while index < work.tiles:
        top, head, first, last, steps = guests_of(
            index, work, softmax.window, sides, ROWS * plan.consumers, block, plan.by_key
        )
        mine = top + GROUP * ROWS
        limits, all_lo, all_hi = reach(mine + work.kv_len - work.q_len, work, left, right, row)
        others = None
        if sides.segments is not None:
            reached = limits, all_lo, all_hi
            limits, all_lo, all_hi, others = packed_reach(reached, sides.segments, head, mine, work, row)
        shift, delta, low, flags, line = None, None, sides.rest.low, sides.rest.flags, head * work.group
        if not plan.by_key:
            i, at = mine + gl.arange(0, ROWS, row), head.to(gl.int64) * work.pitch
            behind = work.all_heads.to(gl.int64) * work.pitch
            shift = gl.load(sides.lines + at + i, mask=i < work.q_len, other=0.0)[:, None]
            delta = gl.load(sides.lines + behind + at + i, mask=i < work.q_len, other=0.0)[:, None]
            low = low + at + mine, work.q_len - mine
            flags = any_flag(flags, head, mine, ROWS, work.q_len, plan)
        mbarrier.wait(resident.ring.full.index(GROUP), count & 1)
        own = Own(resident_first, resident_second, limits, all_lo, all_hi, shift, delta, low, flags, others)
        sums = (gl.zeros([ROWS, block_d], gl.float32, accumulator(block_d)),
                gl.zeros([ROWS, block_dv], gl.float32, accumulator(block_dv)))  # fmt: skip
        streamed_span = first, last, steps
        if plan.ahead:
            d_first, d_second, unit = walk_ahead(unit, (line, first), streamed_span, own, streamed, sums,
                                                 softmax.scores, work, plan)  # fmt: skip
        else:
            d_first, d_second, unit = walk(
                unit, (line, first), streamed_span, own, streamed, sums, softmax.scores, work, plan
            )
        b, h = head // work.heads, head % work.heads
        # The resident rows are not read any more: their gradients leave by way of their memory.
        if plan.want_first:
            resident_first.store((d_first * softmax.scale).to(dtype))
            fence_async_shared()
            store_tile(sides.d_first, [b, mine, h, 0], boxed(resident_first, box))
        if plan.want_second:
            resident_second.store(d_second.to(dtype))
            fence_async_shared()
            store_tile(sides.d_second, [b, mine, h, 0], boxed(resident_second, box))
        tma.store_wait(0)
        mbarrier.arrive(resident.ring.empty.index(GROUP), count=1)
        count += 1
        index += gl.num_programs(0)


@gluon.jit(do_not_specialize=["group"])
def attention_vjp_gradients_kernel(
    resident_first, resident_second, streamed_first, streamed_second, lines, rest, segments, d_first, d_second, softmax,
    group, plan: gl.constexpr,
):  # fmt: skip
    """d_first and d_second, scaled, of resident rows: see ``Sides``. group: query heads of a key head."""
    sides = Sides(
        resident_first, resident_second, streamed_first, streamed_second, lines, rest, d_first, d_second, segments
    )
    dtype: gl.constexpr = resident_first.dtype
    resident = tiles_of(dtype, plan.consumers, ROWS, plan, 1)
    streamed = tiles_of(dtype, plan.stages, plan.block, plan, plan.consumers)
    fence_async_shared()
    # A tuple that is given a name loses its constexprs: the groups are written out.
    if plan.consumers == 2:
        gl.warp_specialize([
            (consumer, (0, resident, streamed, sides, softmax, group, plan)),
            (consumer, (1, resident, streamed, sides, softmax, group, plan)),
            (producer, (resident, streamed, sides, softmax, group, plan)),
        ], [4, 1], [plan.registers, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, resident, streamed, sides, softmax, group, plan)),
            (consumer, (1, resident, streamed, sides, softmax, group, plan)),
            (consumer, (2, resident, streamed, sides, softmax, group, plan)),
            (producer, (resident, streamed, sides, softmax, group, plan)),
        ], [4, 4, 1], [plan.registers, plan.registers, 24])  # fmt: skip
