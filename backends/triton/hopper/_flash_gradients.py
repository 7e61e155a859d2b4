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

Tiles at an edge, whose pairs are masked, and tiles of queries with an lse far from 0 have a loop of their own
(``plan.apart``): the others' loop has no branch, which would split its schedule. ptxas moves a wait for products up
over whatever comes before in its block of instructions, exponentials too, which then are not computed beside the
products. So where no product is begun between P and D, a stage is waited for once more: that ends at once, and ends the
block.

lse is shift + low, and low is next to nothing where lse is near 0. Where a row of a tile of queries has an lse far from
0, which a ``flag`` says of ``plan.flagged`` queries, P is corrected for what shift lacks and kept below 1. (Done to
every P, it took 10 to 25 % of the gradients' time on an H100.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from portakern.backends.triton.lib.gluon import (
    ROWS,
    accumulator,
    await_full,
    by_column,
    by_row,
    dots_of,
    each_at,
    finished,
    finished_both,
    give_back,
    packed_reach,
    pieces_of,
    products_of,
    reach,
    store_head,
    zero_sums,
)
from portakern.backends.triton.lib.gluon_gradients import (
    LseRest,
    Own,
    Sides,
    all_lines,
    any_flag,
    any_flag_of,
    far_of,
    guests_of,
    next_tile,
    plain_tile,
    producer,
    resident_rows,
    schedule_of,
    score_gradients,
    sequence_at,
    statistic_of,
    tiles_of,
    weights_of,
)
from portakern.backends.triton.lib.gluon_sequences import SequenceSchedule, claimed_tile


class OtherGradientArrays(NamedTuple):
    """Of a call beside the arrays that are described."""

    rest: Any
    segments: Any
    d_first: Any
    d_second: Any


@gluon.jit
def first_products(own, streamed, stage, plan: gl.constexpr):
    """Of a streamed tile the dot products, and what follows dP, on their way; dP alone where nobody wants it."""
    block: gl.constexpr = plan.block
    zeros = gl.zeros([ROWS, block], gl.float32, accumulator(block))
    dots = dots_of(own.first, streamed.first, stage, zeros)
    d_p = zeros
    if plan.want_first:
        d_p = dots_of(own.second, streamed.second, stage, zeros)
    return dots, d_p


@gluon.jit
def fold_tile(masked: gl.constexpr, unit, position, far, own, streamed, sums, scores, work, plan: gl.constexpr):
    """(d_first, d_second) with a streamed tile. A product of pieces counts as many as there are."""
    block: gl.constexpr = plan.block
    mma: gl.constexpr = accumulator(block)
    left_first: gl.constexpr = gl.DotOperandLayout(0, accumulator(plan.block_d), 2)
    left_second: gl.constexpr = gl.DotOperandLayout(0, accumulator(plan.block_dv), 2)
    dtype: gl.constexpr = own.first[0].dtype
    d_first, d_second = sums
    _, start = position
    cols = gl.arange(0, block, gl.SliceLayout(0, mma))
    stage = await_full(streamed.ring, unit)
    dots, d_p = first_products(own, streamed, stage, plan)
    shift = statistic_of(own.shift, streamed.shift, stage, plan.by_key, mma)
    dots = warpgroup_mma_wait(len(own.second) if plan.want_first else 0, deps=[dots])
    p, sloped = weights_of(dots, shift, far, position, cols, own, scores, work, plan.by_key, masked)
    if plan.want_second:
        p16 = gl.convert_layout(p.to(dtype), left_second)
        d_second = products_of(p16, streamed.second, stage, d_second, True)
    else:
        await_full(streamed.ring, unit)  # see the module
    if plan.want_first:
        d_p = warpgroup_mma_wait(len(d_second) if plan.want_second else 0, deps=[d_p])
        delta = statistic_of(own.delta, streamed.delta, stage, plan.by_key, mma)
        d = score_gradients(sloped, d_p, delta, start, cols, own, masked)
        d16 = gl.convert_layout(d.to(dtype), left_first)
        d_first = products_of(d16, streamed.first, stage, d_first, True)
    if not plan.want_first:
        d_second = finished(d_second)
    elif not plan.want_second:
        d_first = finished(d_first)
    else:
        d_first, d_second = finished_both(d_first, d_second)
    give_back(streamed.ring.empty.index(stage), plan.by_key)
    return d_first, d_second


@gluon.jit
def walk(unit, position, streamed_span, own, streamed, sums, scores, work, plan: gl.constexpr):
    """(d_first, d_second, unit) after all that is streamed past a resident tile, from a ``position`` (line, first
    streamed row) on. streamed_span: (first, last, steps), of each head of theirs, and of all."""
    first, last, left = streamed_span
    if plan.apart:
        plain = plain_tile(own, position, left, work, plan)
        while left > 0:
            while (left > 0) & (plain == 0):
                following, left = next_tile(position, first, last, plan.block), left - 1
                plain = plain_tile(own, following, left, work, plan)
                far = far_of(own, position[0], position[1], work, plan)
                sums = fold_tile(True, unit, position, far, own, streamed, sums, scores, work, plan)
                unit, position = unit + 1, following
            while plain != 0:
                following, left = next_tile(position, first, last, plan.block), left - 1
                plain = plain_tile(own, following, left, work, plan)
                sums = fold_tile(False, unit, position, False, own, streamed, sums, scores, work, plan)
                unit, position = unit + 1, following
    else:
        for _ in range(left):
            far = far_of(own, position[0], position[1], work, plan)
            sums = fold_tile(True, unit, position, far, own, streamed, sums, scores, work, plan)
            unit, position = unit + 1, next_tile(position, first, last, plan.block)
    d_first, d_second = sums
    return d_first, d_second, unit


@gluon.jit
def walk_ahead(unit, position, streamed_span, own, streamed, sums, scores, work, plan: gl.constexpr):
    """As ``walk``, with the last two products of a tile beside the weights of the next."""
    block: gl.constexpr = plan.block
    mma: gl.constexpr = accumulator(block)
    left_first: gl.constexpr = gl.DotOperandLayout(0, accumulator(plan.block_d), 2)
    left_second: gl.constexpr = gl.DotOperandLayout(0, accumulator(plan.block_dv), 2)
    dtype: gl.constexpr = own.first[0].dtype
    d_first, d_second = sums
    first, last, steps = streamed_span
    cols = gl.arange(0, block, gl.SliceLayout(0, mma))
    far = far_of(own, position[0], first, work, plan)
    stage = await_full(streamed.ring, unit)
    dots, d_p = first_products(own, streamed, stage, plan)
    shift = statistic_of(own.shift, streamed.shift, stage, plan.by_key, mma)
    dots = warpgroup_mma_wait(len(own.second), deps=[dots])
    p, sloped = weights_of(dots, shift, far, position, cols, own, scores, work, plan.by_key)
    d_p = warpgroup_mma_wait(0, deps=[d_p])
    delta = statistic_of(own.delta, streamed.delta, stage, plan.by_key, mma)
    d = score_gradients(sloped, d_p, delta, first, cols, own)
    p16 = gl.convert_layout(p.to(dtype), left_second)
    d16 = gl.convert_layout(d.to(dtype), left_first)
    behind: gl.constexpr = len(d_second) + len(d_first)  # products of the tile before, on their way
    for _ in range(1, steps):
        before = stage
        unit += 1
        position = next_tile(position, first, last, block)
        start = position[1]
        far = far_of(own, position[0], start, work, plan)
        stage = await_full(streamed.ring, unit)
        dots, d_p = first_products(own, streamed, stage, plan)
        d_second = products_of(p16, streamed.second, before, d_second, True)
        d_first = products_of(d16, streamed.first, before, d_first, True)
        shift = statistic_of(own.shift, streamed.shift, stage, plan.by_key, mma)
        dots = warpgroup_mma_wait(len(own.second) + behind, deps=[dots])
        p, sloped = weights_of(dots, shift, far, position, cols, own, scores, work, plan.by_key)
        await_full(streamed.ring, unit)  # see the module
        d_p = warpgroup_mma_wait(behind, deps=[d_p])
        delta = statistic_of(own.delta, streamed.delta, stage, plan.by_key, mma)
        d = score_gradients(sloped, d_p, delta, start, cols, own)
        d_first, d_second = finished_both(d_first, d_second)
        p16 = gl.convert_layout(p.to(dtype), left_second)
        d16 = gl.convert_layout(d.to(dtype), left_first)
        give_back(streamed.ring.empty.index(before), plan.by_key)
    d_second = products_of(p16, streamed.second, stage, d_second, True)
    d_first = products_of(d16, streamed.first, stage, d_first, True)
    d_first, d_second = finished_both(d_first, d_second)
    give_back(streamed.ring.empty.index(stage), plan.by_key)
    return d_first, d_second, unit + 1


@gluon.jit
def multiplied(sums, scale):
    """Sums of each piece, times a number."""
    found = ()
    for n in gl.static_range(len(sums)):
        found = found + (sums[n] * scale,)  # type: ignore[assignment]
    return found


@gluon.jit
def heads_of(rows):
    """How many heads a described array has, and how wide they are."""
    if len(rows.shape) == 5:
        return rows.shape[3], rows.shape[4]
    else:
        return rows.shape[2], rows.shape[3]


@gluon.jit
def length_of(b, rows):
    """How many rows a batch entry has, or the sequence that ``b`` is (end, length) of."""
    if len(rows.shape) == 5:
        _end, length = b
        return length
    else:
        return rows.shape[1]


@gluon.jit
def lines_before(b, rows):
    """How many rows stand before those of a batch entry, or of a sequence."""
    if len(rows.shape) == 5:
        end, length = b
        return (end - length).to(gl.int64)
    else:
        return b.to(gl.int64) * rows.shape[1]


@gluon.jit
def leave(x, sums, at, tiles, rows, plan: gl.constexpr):
    """Write gradients of ``rows`` to x, at (batch entry, first row, head): by way of the memory of the rows, which are
    not read any more, or, where x is not described, from the registers that they are in."""
    b, i, h = at
    if plan.more_d or plan.more_dv:
        heads, d = heads_of(rows[0])
        for n in gl.static_range(len(sums)):
            row = i + gl.arange(0, ROWS, by_row(sums[n].shape[1]))
            column = n * sums[0].shape[1] + gl.arange(0, sums[n].shape[1], by_column(sums[n].shape[1]))
            line = (lines_before(b, rows[0]) + row) * heads + h
            ok = (row < length_of(b, rows[0]))[:, None] & (column < d)[None, :]
            gl.store(x + (line[:, None] * d + column[None, :]), sums[n].to(tiles[0].dtype), mask=ok)
    else:
        for n in gl.static_range(len(sums)):
            tiles[n].store(sums[n].to(tiles[n].dtype))
        fence_async_shared()
        store_head(x, b, i, h, tiles)


@gluon.jit
def consumer(GROUP: gl.constexpr, resident, streamed, sides, softmax, group, plan: gl.constexpr):
    """Four warps that own 64 resident rows."""
    row: gl.constexpr = by_row(plan.block)
    block: gl.constexpr = plan.block
    left, right = softmax.window
    work = schedule_of(sides, softmax.window, group, plan)
    resident_first, resident_second = each_at(resident.first, GROUP), each_at(resident.second, GROUP)
    unit = 0
    count = 0
    index = gl.program_id(0)
    while index < work.tiles:
        its = work if sides.sequences is None else sequence_at(index, work, sides.sequences)
        top, head, first, last, steps = guests_of(
            index, its, softmax.window, sides, ROWS * plan.consumers, block, plan.by_key
        )
        mine = top + GROUP * ROWS
        limits, all_lo, all_hi = reach(mine + its.kv_len - its.q_len, its, left, right, row)
        others = None
        if sides.segments is not None:
            reached = limits, all_lo, all_hi
            limits, all_lo, all_hi, others = packed_reach(reached, sides.segments, head, mine, work, row)
        shift, delta, low, flags, line = None, None, sides.rest.low, sides.rest.flags, head * work.group
        if plan.by_key and sides.sequences is not None:
            low = low + its.other_start
        if not plan.by_key:
            i, at = mine + gl.arange(0, ROWS, row), head.to(gl.int64) * work.pitch
            if sides.sequences is not None:
                at = at + its.start
            behind = all_lines(work, plan).to(gl.int64) * work.pitch
            shift = gl.load(sides.lines + at + i, mask=i < its.q_len, other=0.0)[:, None]
            delta = gl.load(sides.lines + behind + at + i, mask=i < its.q_len, other=0.0)[:, None]
            low = low + at + mine, its.q_len - mine
            if sides.sequences is not None:
                end = its.start + its.q_len
                flags = any_flag_of(flags, head, its.start + mine, ROWS, end, work.pitch, plan)
            else:
                flags = any_flag(flags, head, mine, ROWS, its.q_len, plan)
        mbarrier.wait(resident.ring.full.index(GROUP), count & 1)
        own = Own(resident_first, resident_second, limits, all_lo, all_hi, shift, delta, low, flags, others)
        sums = zero_sums(plan.block_d, plan.more_d), zero_sums(plan.block_dv, plan.more_dv)
        streamed_span = first, last, steps
        if plan.ahead:
            d_first, d_second, unit = walk_ahead(unit, (line, first), streamed_span, own, streamed, sums,
                                                 softmax.scores, its, plan)  # fmt: skip
        else:
            d_first, d_second, unit = walk(
                unit, (line, first), streamed_span, own, streamed, sums, softmax.scores, its, plan
            )
        at = resident_rows(head, its, plan), mine, head % work.heads
        if plan.want_first:
            leave(sides.d_first, multiplied(d_first, softmax.scale), at, resident_first, sides.resident_first, plan)
        if plan.want_second:
            leave(sides.d_second, d_second, at, resident_second, sides.resident_second, plan)
        tma.store_wait(0)
        mbarrier.arrive(resident.ring.empty.index(GROUP), count=1)
        count += 1
        if sides.sequences is not None:
            index = claimed_tile(count, sides.sequences, resident.ring, GROUP)
        else:
            index += gl.num_programs(0)


@gluon.jit
def by_roles(sides, softmax, group, plan: gl.constexpr):
    """d_first and d_second, scaled, of resident rows, by a producer and its consumers."""
    dtype: gl.constexpr = sides.resident_first[0].dtype
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


@gluon.jit(do_not_specialize=["group"])
def attention_vjp_gradients_kernel(
    resident_first, resident_second, streamed_first, streamed_second, lines, rest, segments, d_first, d_second, softmax,
    group, plan: gl.constexpr,
):  # fmt: skip
    """d_first and d_second, scaled, of resident rows: see ``Sides``. group: query heads of a key head."""
    sides = Sides(
        (resident_first,), (resident_second,), (streamed_first,), (streamed_second,), lines, rest, (d_first,),
        (d_second,), segments, None,
    )  # fmt: skip
    by_roles(sides, softmax, group, plan)


@gluon.jit
def attention_vjp_pieces_kernel(
    resident_first, resident_first_more, resident_second, resident_second_more, streamed_first, streamed_first_more,
    streamed_second, streamed_second_more, lines, others, softmax, plan: gl.constexpr,
):  # fmt: skip
    """As ``attention_vjp_gradients_kernel``, of heads in two pieces: ``.._more`` describe the columns after the first
    ones, None where there are none. others: rest, segments, and d_first and d_second, which are no descriptors."""
    rest, segments, d_first, d_second = others
    group = streamed_first.shape[2] // resident_first.shape[2]
    if not plan.by_key:
        group = resident_first.shape[2] // streamed_first.shape[2]
    sides = Sides(
        pieces_of(resident_first, resident_first_more), pieces_of(resident_second, resident_second_more),
        pieces_of(streamed_first, streamed_first_more), pieces_of(streamed_second, streamed_second_more), lines, rest,
        d_first, d_second, segments, None,
    )  # fmt: skip
    by_roles(sides, softmax, group, plan)


class SequenceGradientArrays(NamedTuple):
    """Of a call of packed sequences beside the arrays that are described: the members of ``LseRest``, and of
    ``SequenceSchedule``; and of heads in two pieces the gradients, which are no descriptors, each None where nobody
    wants it."""

    low: Any
    flags: Any
    schedule: Any
    claims: Any
    d_first: Any
    d_second: Any


@gluon.jit
def varlen_attention_vjp_gradients_kernel(
    resident_first, resident_second, streamed_first, streamed_second, lines, others, d_first, d_second, softmax,
    plan: gl.constexpr,
):  # fmt: skip
    """As ``attention_vjp_gradients_kernel``, of packed sequences: described as such (see ``lib.tma.ragged``). others:
    ``SequenceGradientArrays``."""
    low, flags, schedule, claims, _, _ = others
    group = streamed_first.shape[3] // resident_first.shape[3]
    if not plan.by_key:
        group = resident_first.shape[3] // streamed_first.shape[3]
    sides = Sides(
        (resident_first,), (resident_second,), (streamed_first,), (streamed_second,), lines, LseRest(low, flags),
        (d_first,), (d_second,), None, SequenceSchedule(schedule, claims),
    )  # fmt: skip
    by_roles(sides, softmax, group, plan)


@gluon.jit
def varlen_attention_vjp_pieces_kernel(
    resident_first, resident_first_more, resident_second, resident_second_more, streamed_first, streamed_first_more,
    streamed_second, streamed_second_more, lines, others, softmax, plan: gl.constexpr,
):  # fmt: skip
    """As ``attention_vjp_pieces_kernel``, of packed sequences. others: ``SequenceGradientArrays``."""
    low, flags, schedule, claims, d_first, d_second = others
    group = streamed_first.shape[3] // resident_first.shape[3]
    if not plan.by_key:
        group = resident_first.shape[3] // streamed_first.shape[3]
    sides = Sides(
        pieces_of(resident_first, resident_first_more), pieces_of(resident_second, resident_second_more),
        pieces_of(streamed_first, streamed_first_more), pieces_of(streamed_second, streamed_second_more), lines,
        LseRest(low, flags), d_first, d_second, None, SequenceSchedule(schedule, claims),
    )  # fmt: skip
    by_roles(sides, softmax, group, plan)
