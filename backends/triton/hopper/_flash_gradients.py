"""The kernel of attention's gradients for Hopper: warps that copy, warps that compute (Dao 2023, FlashAttention-2,
algorithm 2; Shah et al. 2024, FlashAttention-3, whose division of labour it has).

    s = cap(scale q k^T)    P = exp(min(s - lse, 0))    D = P (d_o v^T - delta) cap'(s)    delta = rowsum(d_o o) - d_lse
    d_q = scale D k         d_k = scale D^T q   d_v = P^T d_o

One kernel, launched twice, on two sides in turn. The rows of one side are a program's own (*home*), 64 to a group of
four warps, and stay in shared memory; tiles of the other side (*guests*) come by through a ring of ``stages`` buffers
which one more warp, the producer, has the copy engine fill. For d_q queries are at home and keys come by; for d_k and
d_v keys are at home, and the queries of all heads of their group come by, one head after the other.

A side has two arrays: ``first``, q or k, which meet in scores, and ``second``, d_o or v, which meet in dP. Tiles have a
row for each row at home, so that P^T and D^T of d_v and d_k, as D of d_q, are the left operand of the next product as
they stand in registers. While the matrix unit works on dP the weights P are computed, and D while it works on d_v.

What a program sums up is its alone, in float32 registers, in an order that never changes: nothing is added atomically,
and the same call has the same bits each time. Seven products are computed where one kernel with ordered additions to
d_q would do with five.

lse is shift + low, and low is next to nothing where lse is near 0. Where a row of a tile of queries has an lse far from
0, which a ``flag`` says of ``plan.flagged`` queries, P is corrected for what shift lacks and kept below 1; elsewhere
one
branch is all that it costs. (Done to every P, it took 10 to 25 % of the gradients' time on an H100.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from portakern.backends.triton.hopper._flash import ROWS, boxed, reach, seen_pairs, span_of, tanh, tile_at
from portakern.backends.triton.hopper._warps import give_back, load_tile, store_tile
from portakern.backends.triton.lib.attention_vjp import FLAGS


class Plan(NamedTuple):
    """What the kernel is compiled for.

    ``by_key``: keys are at home, and d_k and d_v are summed; else d_q. ``consumers`` groups of 64 rows at home; tiles
    of ``block`` guests, of block_d and block_dv columns, ``stages`` of them on their way. ``ahead``: the products of a
    tile are computed beside the weights of the next. ``want_first``, ``want_second``: which of d_first and d_second
    are. registers: of a consumer's threads. ``flagged``: queries of which there is a flag."""

    by_key: bool
    consumers: int
    block: int
    block_d: int
    block_dv: int
    stages: int
    ahead: bool
    want_first: bool
    want_second: bool
    registers: int
    flagged: int


class Tiles(NamedTuple):
    """Tiles of a side in shared memory, with the barriers that say when they are there and when they are done with.
    shift and delta: numbers of queries that come by, a line a tile."""

    first: Any
    second: Any
    shift: Any
    delta: Any
    full: Any
    empty: Any


class Sides(NamedTuple):
    """Arrays in memory, described: (batch, length, heads, d or dv); the gradients None that nobody wants. shift, which
    is lse log2(e), and delta of queries: (heads of all batch entries, pitch), described where queries come by. low,
    what shift lacks, of that shape, and the flags, (heads of all batch entries, a flag for ``plan.flagged`` queries),
    are not described: they are seldom read."""

    home_first: Any
    home_second: Any
    guest_first: Any
    guest_second: Any
    shift: Any
    delta: Any
    low: Any
    flags: Any
    d_first: Any
    d_second: Any


class Work(NamedTuple):
    """The tiles of a call, as ``_flash.Work`` has them, with rows at home for queries and guests for keys. ``heads``,
    ``all_heads``: at home. ``pitch``: of a line of shift and delta."""

    tiles: int
    tiles_q: int
    together: int
    heads: int
    group: int
    all_heads: int
    q_len: int
    kv_len: int
    pitch: int


class Own(NamedTuple):
    """What a group of four warps owns: its rows at home in shared memory; what each sees, and what all see, of guests;
    their shift, delta, low and whether one of them is flagged, where they are queries; else the memory of ``low`` and
    ``flags``. low of queries: where it begins, and how many there are."""

    first: Any
    second: Any
    limits: Any
    all_lo: Any
    all_hi: Any
    shift: Any
    delta: Any
    low: Any
    flags: Any


@gluon.jit
def statistic_of(own, guest, stage, by_key: gl.constexpr, mma: gl.constexpr):
    """Shift or delta of the queries of a tile: rows at home have theirs in registers, guests in shared memory."""
    if by_key:
        return guest.index(stage).load(mma)
    else:
        return own


@gluon.jit
def any_flag(flags, line, start, queries: gl.constexpr, length, plan: gl.constexpr):
    """Whether one of so many ``queries`` from ``start`` on of a line is flagged."""
    each: gl.constexpr = plan.flagged * FLAGS
    at = flags + line.to(gl.int64) * ((length + each - 1) // each * FLAGS) + start // plan.flagged
    several: gl.constexpr = max(queries // plan.flagged, 1)
    if several == 1:
        return gl.load(at, mask=start < length, other=0) != 0
    elif several == 2:
        return gl.load(at.to(gl.pointer_type(gl.int16)), mask=start < length, other=0) != 0
    elif several == 4:
        return gl.load(at.to(gl.pointer_type(gl.int32)), mask=start < length, other=0) != 0
    else:
        return gl.load(at.to(gl.pointer_type(gl.int64)), mask=start < length, other=0) != 0


@gluon.jit
def far_of(own, line, start, work, plan: gl.constexpr):
    """Whether a query of a tile has an lse far from 0: of those at home it is known, guests of a ``line`` are asked."""
    if plan.by_key:
        return any_flag(own.flags, line, start, plan.block, work.kv_len, plan)
    else:
        return own.flags


@gluon.jit
def low_of(own, line, start, like, cols, work, by_key: gl.constexpr):
    """What shift lacks of the queries of a tile; 0 but where lse is far from 0."""
    if by_key:
        at = own.low + line.to(gl.int64) * work.pitch + start + cols
        return gl.load(at, mask=start + cols < work.kv_len, other=0.0)[None, :]
    else:
        low, left = own.low
        i = gl.arange(0, ROWS, gl.SliceLayout(1, like.type.layout))
        return gl.load(low + i, mask=i < left, other=0.0)[:, None]


@gluon.jit
def weights_of(dots, shift, far, place, cols, own, scores, work, by_key: gl.constexpr):
    """(P, P cap'(s)) of a tile of dot products. shift: lse log2(e), for P is 2^(s log2(e) - shift). place: (line, first
    guest). far: whether a query has an lse far from 0: the score is the number that it was in the forward pass, so that
    with what shift lacks P is what it was."""
    line, start = place
    t = dots
    if scores.softcap is not None:
        t = tanh(dots * scores.pre)
    apart = gl.fma(t, scores.rate, -shift.broadcast_to(t.shape))
    if far | (start < own.all_lo) | (start + dots.shape[1] > own.all_hi):
        if far:
            low = low_of(own, line, start, t, cols, work, by_key).broadcast_to(t.shape)
            apart -= low
            apart = gl.where((low != 0.0) & (apart > 0.0), 0.0, apart)
        apart = gl.where(seen_pairs(start, cols, own.limits), apart, float("-inf"))
    p = gl.exp2(apart)
    sloped = p
    if scores.softcap is not None:
        sloped = p * (1.0 - t * t)
    return p, sloped


@gluon.jit
def score_gradients(sloped, d_p, delta, start, cols, own):
    """D of a tile, from P cap'(s) and dP."""
    d = sloped * (d_p - delta)
    if (start < own.all_lo) | (start + d.shape[1] > own.all_hi):  # what a masked pair holds of dP may be NaN
        d = gl.where(seen_pairs(start, cols, own.limits), d, 0.0)
    return d


@gluon.jit
def guests_of(index, work, left, right, rows: gl.constexpr, block: gl.constexpr, by_key: gl.constexpr):
    """(first row at home, batch entry and head as one number, first guest, last guest, tiles of guests)."""
    tile, head = tile_at(index, work, right)
    top = tile * rows
    before = work.kv_len - work.q_len
    bottom = gl.minimum(top + rows, work.q_len) - 1
    first, last = span_of(top + before, bottom + before, work, left, right, block)
    steps = (last - first + block - 1) // block
    if by_key:
        steps = steps * work.group
    return top, head, first, last, steps


@gluon.jit
def after(start, first, last, block: gl.constexpr):
    """Where the tile of guests after the one at ``start`` begins: after a head's last, at the next head's first."""
    start += block
    return gl.where(start < last, start, first)


@gluon.jit
def next_tile(place, first, last, block: gl.constexpr):
    """The place (line, first guest) after one: after a head's last, the next head's first."""
    line, start = place
    following = after(start, first, last, block)
    return line + gl.where(following > start, 0, 1), following


@gluon.jit
def walk(unit, line, first, last, steps, own, guests, d_first, d_second, scores, work, plan: gl.constexpr,
         mma: gl.constexpr, left_first: gl.constexpr, left_second: gl.constexpr):  # fmt: skip
    """(d_first, d_second, unit) after all guests of a tile at home, of which the first have their numbers in a
    ``line``."""
    block: gl.constexpr = plan.block
    stages: gl.constexpr = plan.stages
    zeros = gl.zeros([ROWS, block], gl.float32, mma)
    cols = gl.arange(0, block, gl.SliceLayout(0, mma))
    place = line, first
    for _ in range(steps):
        start = place[1]
        far = far_of(own, place[0], start, work, plan)
        stage = unit % stages
        mbarrier.wait(guests.full.index(stage), (unit // stages) & 1)
        guest_first, guest_second = guests.first.index(stage), guests.second.index(stage)
        dots = warpgroup_mma(own.first, guest_first.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if plan.want_first:
            d_p = warpgroup_mma(own.second, guest_second.permute((1, 0)), zeros, use_acc=False, is_async=True)
        shift = statistic_of(own.shift, guests.shift, stage, plan.by_key, mma)
        dots = warpgroup_mma_wait(1 if plan.want_first else 0, deps=[dots])
        p, sloped = weights_of(dots, shift, far, place, cols, own, scores, work, plan.by_key)
        if plan.want_second:
            p16 = gl.convert_layout(p.to(own.first.dtype), left_second)
            d_second = warpgroup_mma(p16, guest_second, d_second, is_async=True)
        if plan.want_first:
            d_p = warpgroup_mma_wait(1 if plan.want_second else 0, deps=[d_p])
            delta = statistic_of(own.delta, guests.delta, stage, plan.by_key, mma)
            d = score_gradients(sloped, d_p, delta, start, cols, own)
            d16 = gl.convert_layout(d.to(own.first.dtype), left_first)
            d_first = warpgroup_mma(d16, guest_first, d_first, is_async=True)
        if not plan.want_first:
            d_second = warpgroup_mma_wait(0, deps=[d_second])
        elif not plan.want_second:
            d_first = warpgroup_mma_wait(0, deps=[d_first])
        else:
            d_first, d_second = warpgroup_mma_wait(0, deps=[d_first, d_second])
        give_back(guests.empty.index(stage), plan.by_key)
        unit += 1
        place = next_tile(place, first, last, block)
    return d_first, d_second, unit


@gluon.jit
def walk_ahead(unit, line, first, last, steps, own, guests, d_first, d_second, scores, work, plan: gl.constexpr,
               mma: gl.constexpr, left_first: gl.constexpr, left_second: gl.constexpr):  # fmt: skip
    """As ``walk``, with the last two products of a tile beside the weights of the next."""
    block: gl.constexpr = plan.block
    stages: gl.constexpr = plan.stages
    zeros = gl.zeros([ROWS, block], gl.float32, mma)
    cols = gl.arange(0, block, gl.SliceLayout(0, mma))
    place = line, first
    far = far_of(own, line, first, work, plan)
    stage = unit % stages
    mbarrier.wait(guests.full.index(stage), (unit // stages) & 1)
    dots = warpgroup_mma(own.first, guests.first.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    d_p = warpgroup_mma(own.second, guests.second.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    shift = statistic_of(own.shift, guests.shift, stage, plan.by_key, mma)
    dots = warpgroup_mma_wait(1, deps=[dots])
    p, sloped = weights_of(dots, shift, far, place, cols, own, scores, work, plan.by_key)
    d_p = warpgroup_mma_wait(0, deps=[d_p])
    delta = statistic_of(own.delta, guests.delta, stage, plan.by_key, mma)
    d = score_gradients(sloped, d_p, delta, first, cols, own)
    p16 = gl.convert_layout(p.to(own.first.dtype), left_second)
    d16 = gl.convert_layout(d.to(own.first.dtype), left_first)
    for _ in range(1, steps):
        before = stage
        unit += 1
        place = next_tile(place, first, last, block)
        start = place[1]
        far = far_of(own, place[0], start, work, plan)
        stage = unit % stages
        mbarrier.wait(guests.full.index(stage), (unit // stages) & 1)
        dots = warpgroup_mma(own.first, guests.first.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        d_p = warpgroup_mma(own.second, guests.second.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        d_second = warpgroup_mma(p16, guests.second.index(before), d_second, is_async=True)
        d_first = warpgroup_mma(d16, guests.first.index(before), d_first, is_async=True)
        shift = statistic_of(own.shift, guests.shift, stage, plan.by_key, mma)
        dots = warpgroup_mma_wait(3, deps=[dots])
        p, sloped = weights_of(dots, shift, far, place, cols, own, scores, work, plan.by_key)
        d_p = warpgroup_mma_wait(2, deps=[d_p])
        delta = statistic_of(own.delta, guests.delta, stage, plan.by_key, mma)
        d = score_gradients(sloped, d_p, delta, start, cols, own)
        d_first, d_second = warpgroup_mma_wait(0, deps=[d_first, d_second])
        p16 = gl.convert_layout(p.to(own.first.dtype), left_second)
        d16 = gl.convert_layout(d.to(own.first.dtype), left_first)
        give_back(guests.empty.index(before), plan.by_key)
    d_second = warpgroup_mma(p16, guests.second.index(stage), d_second, is_async=True)
    d_first = warpgroup_mma(d16, guests.first.index(stage), d_first, is_async=True)
    d_first, d_second = warpgroup_mma_wait(0, deps=[d_first, d_second])
    give_back(guests.empty.index(stage), plan.by_key)
    return d_first, d_second, unit + 1


@gluon.jit
def consumer(GROUP: gl.constexpr, home, guests, sides, scores, scale, window, work, plan: gl.constexpr):
    """Four warps that own 64 rows at home."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.block, 16])
    mma_first: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.block_d, 16])
    mma_second: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.block_dv, 16])
    left_first: gl.constexpr = gl.DotOperandLayout(0, mma_first, 2)
    left_second: gl.constexpr = gl.DotOperandLayout(0, mma_second, 2)
    row: gl.constexpr = gl.SliceLayout(1, mma)
    block: gl.constexpr = plan.block
    block_d: gl.constexpr = plan.block_d
    block_dv: gl.constexpr = plan.block_dv
    rows: gl.constexpr = ROWS * plan.consumers
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    dtype: gl.constexpr = home.first.dtype
    left, right = window
    home_first, home_second = home.first.index(GROUP), home.second.index(GROUP)
    unit = 0
    count = 0
    index = gl.program_id(0)
    while index < work.tiles:
        top, head, first, last, steps = guests_of(index, work, left, right, rows, block, plan.by_key)
        mine = top + GROUP * ROWS
        limits, all_lo, all_hi = reach(mine + work.kv_len - work.q_len, work, left, right, row)
        shift, delta, low, flags, line = None, None, sides.low, sides.flags, head * work.group
        if not plan.by_key:
            i, at = mine + gl.arange(0, ROWS, row), head.to(gl.int64) * work.pitch
            shift = gl.load(sides.shift + at + i, mask=i < work.q_len, other=0.0)[:, None]
            delta = gl.load(sides.delta + at + i, mask=i < work.q_len, other=0.0)[:, None]
            low = low + at + mine, work.q_len - mine
            flags = any_flag(flags, head, mine, ROWS, work.q_len, plan)
        mbarrier.wait(home.full.index(GROUP), count & 1)
        own = Own(home_first, home_second, limits, all_lo, all_hi, shift, delta, low, flags)
        d_first = gl.zeros([ROWS, block_d], gl.float32, mma_first)
        d_second = gl.zeros([ROWS, block_dv], gl.float32, mma_second)
        if plan.ahead:
            d_first, d_second, unit = walk_ahead(unit, line, first, last, steps, own, guests, d_first, d_second, scores,
                                                 work, plan, mma, left_first, left_second)  # fmt: skip
        else:
            d_first, d_second, unit = walk(unit, line, first, last, steps, own, guests, d_first, d_second, scores, work,
                                           plan, mma, left_first, left_second)  # fmt: skip
        b, h = head // work.heads, head % work.heads
        # The rows at home are not read any more: their gradients leave by way of their memory.
        if plan.want_first:
            home_first.store((d_first * scale).to(dtype))
            fence_async_shared()
            store_tile(sides.d_first, [b, mine, h, 0], boxed(home_first, box))
        if plan.want_second:
            home_second.store(d_second.to(dtype))
            fence_async_shared()
            store_tile(sides.d_second, [b, mine, h, 0], boxed(home_second, box))
        tma.store_wait(0)
        mbarrier.arrive(home.empty.index(GROUP), count=1)
        count += 1
        index += gl.num_programs(0)


@gluon.jit
def producer(home, guests, sides, window, work, plan: gl.constexpr):
    """One warp that fetches what the consumers take, in their order."""
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    block: gl.constexpr = plan.block
    stages: gl.constexpr = plan.stages
    consumers: gl.constexpr = plan.consumers
    row_bytes: gl.constexpr = 2 * (plan.block_d + plan.block_dv)
    rows: gl.constexpr = ROWS * plan.consumers
    left, right = window
    unit = 0
    count = 0
    index = gl.program_id(0)
    while index < work.tiles:
        top, head, first, last, steps = guests_of(index, work, left, right, rows, block, plan.by_key)
        b, h = head // work.heads, head % work.heads
        for g in gl.static_range(consumers):
            mbarrier.wait(home.empty.index(g), (count & 1) ^ 1)
            full = home.full.index(g)
            mbarrier.expect(full, ROWS * row_bytes)
            load_tile(sides.home_first, [b, top + g * ROWS, h, 0], full, boxed(home.first.index(g), box))
            load_tile(sides.home_second, [b, top + g * ROWS, h, 0], full, boxed(home.second.index(g), box))
        start = first
        guest = h // work.group
        if plan.by_key:
            guest = h * work.group
        for _ in range(steps):
            stage = unit % stages
            full = guests.full.index(stage)
            mbarrier.wait(guests.empty.index(stage), ((unit // stages) & 1) ^ 1)
            mbarrier.expect(full, block * row_bytes + (8 * block if plan.by_key else 0))
            load_tile(sides.guest_first, [b, start, guest, 0], full, boxed(guests.first.index(stage), box))
            load_tile(sides.guest_second, [b, start, guest, 0], full, boxed(guests.second.index(stage), box))
            if plan.by_key:
                line = b * work.heads * work.group + guest
                load_tile(sides.shift, [line, start], full, guests.shift.index(stage))
                load_tile(sides.delta, [line, start], full, guests.delta.index(stage))
            unit += 1
            if plan.by_key:
                guest = gl.where(start + block < last, guest, guest + 1)
            start = after(start, first, last, block)
        count += 1
        index += gl.num_programs(0)


@gluon.jit
def tiles_of(dtype: gl.constexpr, count: gl.constexpr, rows: gl.constexpr, plan: gl.constexpr, readers: gl.constexpr):
    """``count`` buffers for so many rows of a side, which so many groups read."""
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    line: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    first = gl.allocate_shared_memory(dtype, [count, rows, plan.block_d], tile)
    second = gl.allocate_shared_memory(dtype, [count, rows, plan.block_dv], tile)
    shift = gl.allocate_shared_memory(gl.float32, [count, 1, rows], line)
    delta = gl.allocate_shared_memory(gl.float32, [count, 1, rows], line)
    full = gl.allocate_shared_memory(gl.int64, [count, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [count, 1], bar)
    for i in gl.static_range(count):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=readers)
    return Tiles(first, second, shift, delta, full, empty)


@gluon.jit(do_not_specialize=list(Work._fields))
def attention_vjp_gradients_kernel(
    home_first, home_second, guest_first, guest_second, shift, delta, low, flags, d_first, d_second, scores, scale,
    window, tiles, tiles_q, together, heads, group, all_heads, q_len, kv_len, pitch, plan: gl.constexpr,
):  # fmt: skip
    """d_first and d_second, scaled, of rows at home: see ``Sides``, and ``Work`` for numbers, which come one by one:
    those of a tuple would be compiled in where they are 1, and again where they are multiples of 16."""
    work = Work(tiles, tiles_q, together, heads, group, all_heads, q_len, kv_len, pitch)
    sides = Sides(home_first, home_second, guest_first, guest_second, shift, delta, low, flags, d_first, d_second)
    dtype: gl.constexpr = home_first.dtype
    home = tiles_of(dtype, plan.consumers, ROWS, plan, 1)
    guests = tiles_of(dtype, plan.stages, plan.block, plan, plan.consumers)
    fence_async_shared()
    # A tuple that is given a name loses its constexprs: the groups are written out.
    if plan.consumers == 2:
        gl.warp_specialize([
            (consumer, (0, home, guests, sides, scores, scale, window, work, plan)),
            (consumer, (1, home, guests, sides, scores, scale, window, work, plan)),
            (producer, (home, guests, sides, window, work, plan)),
        ], [4, 1], [plan.registers, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, home, guests, sides, scores, scale, window, work, plan)),
            (consumer, (1, home, guests, sides, scores, scale, window, work, plan)),
            (consumer, (2, home, guests, sides, scores, scale, window, work, plan)),
            (producer, (home, guests, sides, window, work, plan)),
        ], [4, 4, 1], [plan.registers, plan.registers, 24])  # fmt: skip
