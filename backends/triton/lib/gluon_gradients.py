"""Attention's gradients for Hopper, in Gluon: what comes by, and the weights and gradients of a tile of scores."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from portakern.backends.triton.lib.attention import FLAGS
from portakern.backends.triton.lib.gluon import (
    ROWS,
    Ring,
    acquire,
    by_row,
    each_at,
    head_buffers,
    load_head,
    load_tile,
    only_seen,
    packed_span,
    ring_of,
    span_of,
    tanh,
    tile_at,
)
from portakern.backends.triton.lib.gluon_sequences import claim_tile, scheduled_tiles, sequence_row
from portakern.backends.triton.lib.tma import TOGETHER

AT_A_TIME = gl.constexpr(TOGETHER)
LINE = gl.constexpr(4)  # float32 numbers: lines of queries' numbers begin at multiples of 16 bytes


class GradientsPlan(NamedTuple):
    """What the kernel is compiled for.

    ``by_key``: keys are resident, and d_k and d_v are summed; else d_q. ``consumers`` groups of 64 resident rows; tiles
    of ``block`` streamed rows, of block_d and block_dv columns, and of more_d and more_dv columns in a second piece
    unless that is 0, ``stages`` of them on their way. ``ahead``: the products of a tile are computed beside the weights
    of the next. ``want_first``, ``want_second``: which of d_first and d_second are. registers: of a consumer's
    threads. ``flagged``: queries of which there is a flag. ``apart``: tiles that take masks have a loop of their
    own. ``packed``: sequences are packed."""

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
    more_d: int = 0
    more_dv: int = 0
    apart: bool = False
    packed: bool = False


class SharedTiles(NamedTuple):
    """Tiles of a side in shared memory, of each piece of a head, and the ring whose stages they are. shift and delta:
    numbers of queries that come by, a line a tile."""

    first: Any
    second: Any
    shift: Any
    delta: Any
    ring: Ring


class LseRest(NamedTuple):
    """low, what shift lacks of lse, in lines as shift is; and the flags that say where low is not 0, (heads of all
    batch entries, a flag for ``plan.flagged`` queries). Neither is described: both are seldom read."""

    low: Any
    flags: Any


class Sides(NamedTuple):
    """Arrays in memory, described, in pieces: (batch, length, heads, d or dv); the gradients None that nobody wants,
    and no descriptors where heads have two pieces. lines: of the queries of all heads and batch entries,
    ``GradientTileSchedule.pitch`` apart, shift, which is lse log2(e), and behind them delta; described where queries
    come by. segments: of the resident side, None of a call without; sequences: the schedule of tiles of packed ones, or
    None. Arrays of packed sequences are described as such (``lib.tma.ragged``)."""

    resident_first: Any
    resident_second: Any
    streamed_first: Any
    streamed_second: Any
    lines: Any
    rest: LseRest
    d_first: Any
    d_second: Any
    segments: Any
    sequences: Any


class GradientTileSchedule(NamedTuple):
    """The tiles of a call, as ``_flash.TileSchedule`` has them, with resident rows for queries and streamed ones for
    keys. ``heads``, ``all_heads``: resident. ``pitch``: of a line of shift and delta. Of packed sequences what stands
    between ``tiles_q`` and ``kv_len`` is one sequence's, whose first resident row, streamed row and tile are ``start``,
    ``other_start`` and ``first``, each 0 elsewhere: Triton 3.6 returns no None from a function."""

    tiles: Any
    tiles_q: Any
    interleaved_heads: Any
    heads: Any
    group: Any
    all_heads: Any
    q_len: Any
    kv_len: Any
    pitch: Any
    start: Any
    other_start: Any
    first: Any


@gluon.jit
def sequence_at(index, work, sequences):
    """The schedule of the ``index``-th tile's sequence, which is taken as a batch entry is."""
    row = sequence_row(index, sequences, work.heads)
    return GradientTileSchedule(
        work.tiles, row.tiles, row.width, work.heads, work.group, work.heads, row.length, row.other_length,
        work.pitch, row.start, row.other_start, row.first * work.heads,
    )  # fmt: skip


@gluon.jit
def resident_rows(head, work, plan: gl.constexpr):
    """Where the copy engine finds a tile's resident rows, as ``load_head`` takes it."""
    if plan.packed:
        return work.start + work.q_len, work.q_len
    else:
        return head // work.heads


@gluon.jit
def streamed_rows(head, work, plan: gl.constexpr):
    """Where the copy engine finds the rows that come by, as ``load_head`` takes it."""
    if plan.packed:
        return work.other_start + work.kv_len, work.kv_len
    else:
        return head // work.heads


@gluon.jit
def packed_work(sequences, heads, group, plan: gl.constexpr):
    """:func:`work_of` packed sequences, before it is known of which one a tile is."""
    tokens = gl.load(sequences.schedule + (3 if plan.by_key else 2))
    pitch = gl.cdiv(tokens, LINE) * LINE
    tiles = scheduled_tiles(sequences, heads)
    return GradientTileSchedule(tiles, 0, 1, heads, group, heads, 0, 0, pitch, 0, 0, 0)


@gluon.jit
def work_of(sides, window, group, plan: gl.constexpr):
    """What follows from how long both sides are, and how many heads are resident. group: query heads of a key head, or
    None, and keys are resident. Under a window a program has one tile; else programs stay."""
    batch, q_len, heads, _ = sides.resident_first[0].shape
    left, right = window
    if group is None:
        group = sides.streamed_first[0].shape[2] // heads
    tiles_q, all_heads = gl.cdiv(q_len, ROWS * plan.consumers), batch * heads
    if plan.by_key:
        pitch = sides.lines.shape[1]
    else:
        pitch = gl.cdiv(q_len, LINE) * LINE
    kv_len = sides.streamed_first[0].shape[1]
    tiles = gl.num_programs(0)
    if left is None and right is None:
        tiles = tiles_q * all_heads
    return GradientTileSchedule(
        tiles, tiles_q, AT_A_TIME, heads, group, all_heads, q_len, kv_len, pitch, 0, 0, 0
    )  # fmt: skip


class Own(NamedTuple):
    """What a group of four warps owns: its resident rows in shared memory, in pieces; what each sees, and what all
    see, of streamed rows; their shift, delta, low and whether one of them is flagged, where they are queries; else the
    memory of ``low`` and ``flags``. low of queries: where it begins, and how many there are. others: what their ranges
    hold of other segments, None of a call without segments."""

    first: Any
    second: Any
    limits: Any
    all_lo: Any
    all_hi: Any
    shift: Any
    delta: Any
    low: Any
    flags: Any
    others: Any = None


@gluon.jit
def statistic_of(own, streamed, stage, by_key: gl.constexpr, mma: gl.constexpr):
    """Shift or delta of the queries of a tile: resident rows have theirs in registers, streamed ones in shared
    memory."""
    if by_key:
        return streamed.index(stage).load(mma)
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
def any_flag_of(flags, line, first, queries: gl.constexpr, end, pitch, plan: gl.constexpr):
    """As ``any_flag``, of tokens from ``first`` on, where flags begin at others: one more is read. A flag of another
    sequence's queries changes no bit."""
    each: gl.constexpr = plan.flagged * FLAGS
    several: gl.constexpr = (queries + plan.flagged - 2) // plan.flagged + 1
    at = flags + line.to(gl.int64) * ((pitch + each - 1) // each * FLAGS)
    number = first // plan.flagged
    found = gl.load(at + number, mask=first < end, other=0)
    for n in gl.static_range(1, several):
        found = found | gl.load(at + (number + n), mask=(number + n) * plan.flagged < end, other=0)
    return found != 0


@gluon.jit
def far_of(own, line, start, work, plan: gl.constexpr):
    """Whether a query of a tile has an lse far from 0: of resident ones it is known, streamed ones of a ``line`` are
    read."""
    if not plan.by_key:
        return own.flags
    elif plan.packed:
        end = work.other_start + work.kv_len
        return any_flag_of(own.flags, line, work.other_start + start, plan.block, end, work.pitch, plan)
    else:
        return any_flag(own.flags, line, start, plan.block, work.kv_len, plan)


@gluon.jit
def plain_tile(own, position, left, work, plan: gl.constexpr):
    """1 where the streamed tile at a ``position`` is seen whole by all own rows, and none of its queries has an lse far
    from 0; else 0, as when no tiles are ``left``."""
    line, start = position
    there = left > 0
    far = far_of(own, gl.where(there, line, 0), start, work, plan)
    edge = far | (start < own.all_lo) | (start + plan.block > own.all_hi)
    return gl.where(there & (edge == 0), 1, 0)


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
def weights_of(dots, shift, far, position, cols, own, scores, work, by_key: gl.constexpr,
               masked: gl.constexpr = True):  # fmt: skip
    """(P, P cap'(s)) of a tile of dot products, with no mask unless it is ``masked``. shift: lse log2(e), for P is
    2^(s log2(e) - shift). position: (line, first streamed row). far: whether a query has an lse far from 0: the score
    is the number that it was in the forward pass, so that with what shift lacks P is what it was."""
    line, start = position
    t = dots
    if scores.softcap is not None:
        t = tanh(dots * scores.pre)
    apart = gl.fma(t, scores.rate, -shift.broadcast_to(t.shape))
    if masked:
        edge = far | (start < own.all_lo) | (start + dots.shape[1] > own.all_hi)
        if edge:
            if far:
                low = low_of(own, line, start, t, cols, work, by_key).broadcast_to(t.shape)
                apart -= low
                apart = gl.where((low != 0.0) & (apart > 0.0), 0.0, apart)
            apart = only_seen(apart, float("-inf"), start, cols, own.limits, own.others, by_row(dots.shape[1]))
    p = gl.exp2(apart)
    sloped = p
    if scores.softcap is not None:
        sloped = p * (1.0 - t * t)
    return p, sloped


@gluon.jit
def score_gradients(sloped, d_p, delta, start, cols, own, masked: gl.constexpr = True):
    """D of a tile, from P cap'(s) and dP."""
    d = sloped * (d_p - delta)
    if masked:
        edge = (start < own.all_lo) | (start + d.shape[1] > own.all_hi)
        if edge:  # what a masked pair holds of dP may be NaN
            d = only_seen(d, 0.0, start, cols, own.limits, own.others, by_row(d.shape[1]))
    return d


@gluon.jit
def guests_of(index, work, window, sides, rows: gl.constexpr, block: gl.constexpr, by_key: gl.constexpr):
    """(first resident row, batch entry and head as one number, first and last streamed row, streamed tiles)."""
    left, right = window
    if sides.sequences is not None:
        index = index - work.first
    tile, head = tile_at(index, work, right, left is not None or right is not None)
    top = tile * rows
    before = work.kv_len - work.q_len
    bottom = gl.minimum(top + rows, work.q_len) - 1
    span = span_of(top + before, bottom + before, work, left, right, block)
    if sides.segments is not None:
        span = packed_span(span, sides.segments, head // work.heads, top, work, rows, block)
    first, last = span
    steps = (last - first + block - 1) // block
    if by_key:
        steps = steps * work.group
    return top, head, first, last, steps


@gluon.jit
def after(start, first, last, block: gl.constexpr):
    """Where the streamed tile after the one at ``start`` begins: after a head's last, at the next head's first."""
    start += block
    return gl.where(start < last, start, first)


@gluon.jit
def next_tile(position, first, last, block: gl.constexpr):
    """The position (line, first streamed row) after one: after a head's last, the next head's first."""
    line, start = position
    following = after(start, first, last, block)
    return line + gl.where(following > start, 0, 1), following


@gluon.jit
def schedule_of(sides, window, group, plan: gl.constexpr):
    """``work_of``, or of packed sequences ``packed_work``."""
    if sides.sequences is not None:
        return packed_work(sides.sequences, sides.resident_first[0].shape[3], group, plan)
    else:
        return work_of(sides, window, group, plan)


@gluon.jit
def line_at(b, head, start, work, plan: gl.constexpr):
    """(line, number in it) of the shift of a head's streamed query ``start``."""
    heads = work.heads * work.group
    if plan.packed:
        at = work.other_start + start
        return at % LINE * heads + head, at - at % LINE
    else:
        return b * heads + head, start


@gluon.jit
def all_lines(work, plan: gl.constexpr):
    """How many lines of shift there are before those of delta."""
    lines = work.all_heads
    if plan.by_key:
        lines = lines * work.group
    if plan.packed:
        lines = lines * LINE
    return lines


@gluon.jit
def producer(resident, streamed, sides, softmax, group, plan: gl.constexpr):
    """One warp that fetches what the consumers take, in their order."""
    block: gl.constexpr = plan.block
    consumers: gl.constexpr = plan.consumers
    row_bytes: gl.constexpr = 2 * (plan.block_d + plan.more_d + plan.block_dv + plan.more_dv)
    rows: gl.constexpr = ROWS * plan.consumers
    work = schedule_of(sides, softmax.window, group, plan)
    unit = 0
    count = 0
    index = gl.program_id(0)
    while index < work.tiles:
        its = work if sides.sequences is None else sequence_at(index, work, sides.sequences)
        top, head, first, last, steps = guests_of(index, its, softmax.window, sides, rows, block, plan.by_key)
        b, h = resident_rows(head, its, plan), head % work.heads
        for g in gl.static_range(consumers):
            mbarrier.wait(resident.ring.empty.index(g), (count & 1) ^ 1)
            full = resident.ring.full.index(g)
            mbarrier.expect(full, ROWS * row_bytes)
            load_head(sides.resident_first, b, top + g * ROWS, h, full, each_at(resident.first, g))
            load_head(sides.resident_second, b, top + g * ROWS, h, full, each_at(resident.second, g))
        b = streamed_rows(head, its, plan)
        start = first
        streamed_head = h // work.group
        if plan.by_key:
            streamed_head = h * work.group
        for _ in range(steps):
            stage, full = acquire(streamed.ring, unit, block * row_bytes + (8 * block if plan.by_key else 0))
            load_head(sides.streamed_first, b, start, streamed_head, full, each_at(streamed.first, stage))
            load_head(sides.streamed_second, b, start, streamed_head, full, each_at(streamed.second, stage))
            if plan.by_key:
                line, at = line_at(b, streamed_head, start, its, plan)
                load_tile(sides.lines, [line, at], full, streamed.shift.index(stage))
                load_tile(sides.lines, [all_lines(work, plan) + line, at], full, streamed.delta.index(stage))
            unit += 1
            if plan.by_key:
                streamed_head = gl.where(start + block < last, streamed_head, streamed_head + 1)
            start = after(start, first, last, block)
        count += 1
        if sides.sequences is not None:
            index = claim_tile(count, sides.sequences, resident.ring, work.tiles)
        else:
            index += gl.num_programs(0)


@gluon.jit
def tiles_of(dtype: gl.constexpr, count: gl.constexpr, rows: gl.constexpr, plan: gl.constexpr, readers: gl.constexpr):
    """``count`` buffers for so many rows of a side, which so many groups read."""
    line: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    first = head_buffers(dtype, count, rows, plan.block_d, plan.more_d)
    second = head_buffers(dtype, count, rows, plan.block_dv, plan.more_dv)
    shift = gl.allocate_shared_memory(gl.float32, [count, 1, rows], line)
    delta = gl.allocate_shared_memory(gl.float32, [count, 1, rows], line)
    return SharedTiles(first, second, shift, delta, ring_of(count, readers))
