"""The kernels of attention over pages for Hopper: a warp that copies pages, and groups of four warps that compute.

A kernel before them writes down the units of a call on the device: a tile of queries of one sequence, for one chunk of
its keys or for all of them. Programs stay, and take one unit after another, for each head of keys. The producer reads
the table, has the copy engine bring a page, or the part of it that a tile of keys has, and runs ahead into the next
unit as far as shared memory has room. Tiles of keys are copied in columns of 128 bytes, each of them page by page.

Slots behind a sequence's last key may hold NaN, which times a weight of 0 is NaN. So a page is described as rows that
end at the last key, as a sequence of packed ones is (``lib.gluon_sequences``): the copy engine reads 0 behind it, and
where a tile reaches over the last page it reads 0 without a look at the table.

Few queries, up to 32 rows in a tile, are computed as in ``_shares``; others as in ``_flash``, where a border between
chunks does not end the walk over keys. Both do what the portable kernel does in the same order: a row's bits do not
tell which it was, nor whether a chunk had a program of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from portakern.backends.triton.hopper._flash import (
    Buffers,
    KeyLimits,
    Outputs,
    PingPong,
    QkvInputs,
    attend,
    merge,
    store_log_sum,
)
from portakern.backends.triton.hopper._shares import ChunkOutputs, attend_few, laid, rows_boxed, spread
from portakern.backends.triton.hopper._warps import as_tiles
from portakern.backends.triton.lib.gluon import (
    ROWS,
    ROWS_FROM,
    acquire,
    boxed,
    each_at,
    head_buffers,
    load_tile,
    reach,
    ring_of,
    span_of,
    tile_layout,
)
from portakern.backends.triton.lib.paged_units import FIELDS

LINE = gl.constexpr(64)  # numbers of a line of 128 bytes, as far as the copy engine's boxes reach


class PagedShape(NamedTuple):
    """What a call has, and what the schedule says of it: tokens, heads of keys and the group of each; the columns of a
    value; how many units there are, and chunks that the table has room for; the steps of the table to the next sequence
    and entry; rows of k, and of v, from a page to the next."""

    tokens: Any
    kv_heads: Any
    group: Any
    dv: Any
    units: Any
    chunks: Any
    table_row: Any
    table_step: Any
    k_step: Any
    v_step: Any


class PagedUnit(NamedTuple):
    """A tile of queries of a sequence: its first token; the sequence's queries from there on; the keys of the
    sequence; the position of the first query among them; which sequence; and which chunk of its keys."""

    token: Any
    queries: Any
    kv_len: Any
    position: Any
    sequence: Any
    share: Any


@gluon.jit
def shape_of(q, v, schedule):
    """What a call has, from its descriptors and the first row of its schedule."""
    return PagedShape(
        q.shape[2], q.shape[1], q.shape[3], v.shape[4], gl.load(schedule), gl.load(schedule + 1),
        gl.load(schedule + 2), gl.load(schedule + 3), gl.load(schedule + 4), gl.load(schedule + 5),
    )  # fmt: skip


@gluon.jit
def unit_at(index, schedule, work):
    """(the ``index``-th unit, its head of keys): the heads of a tile follow each other."""
    at = schedule + (index // work.kv_heads + 1) * FIELDS
    own = PagedUnit(
        gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5)
    )  # fmt: skip
    return own, index % work.kv_heads


@gluon.jit
def keys_of_unit(own, left, right, plan: gl.constexpr):
    """[first, last): the keys of a unit, from the border of a tile; never none. What no query of the tile sees stands
    in for a chunk of which they see nothing."""
    queries: gl.constexpr = plan.consumers * plan.rows // plan.heads
    bottom = own.position + gl.minimum(own.queries, queries) - 1
    first, last = span_of(own.position, bottom, own, left, right, plan.block_kv)
    if plan.apart:
        first = gl.maximum(first, own.share * plan.chunk)
        last = gl.maximum(gl.minimum(last, own.share * plan.chunk + plan.chunk), first + 1)
    return first, last


@gluon.jit
def limits_of_unit(own, left, right, group: gl.constexpr, row: gl.constexpr, plan: gl.constexpr):
    """What each row of a group of warps sees, and what all of them do, in the unit's keys."""
    position = own.position + group * (plan.rows // plan.heads)
    limits, all_lo, all_hi = reach(position, own, left, right, row, plan.heads, plan.rows)
    if plan.apart:
        limits, all_lo, all_hi = within_chunk(limits, all_lo, all_hi, own.share * plan.chunk, plan)
    return limits, all_lo, all_hi


@gluon.jit
def within_chunk(limits, all_lo, all_hi, start, plan: gl.constexpr):
    """Of what rows see, and what all of them see, the part that lies in the chunk from ``start`` on."""
    lo, hi = limits
    end = start + plan.chunk
    return (gl.maximum(lo, start), gl.minimum(hi, end)), gl.maximum(all_lo, start), gl.minimum(all_hi, end)


# ------------------------------------------------------------------------------------------------------------ producer
@gluon.jit
def pages_at(j, own, table, work, plan: gl.constexpr):
    """The pages of a tile of keys from ``j`` on; 0 of those behind the last key, whose entries nobody reads."""
    size: gl.constexpr = plan.page_size
    found = ()
    for part in gl.static_range(plan.block_kv // plan.box):
        key = j + part * plan.box
        page = gl.load(table + key // size * work.table_step, mask=key < own.kv_len, other=0)
        found = found + (page.to(gl.int32),)  # type: ignore[assignment]
    return found


@gluon.jit
def load_pages(x, step, pages, tiles, stage, j, kv_len, h, full, plan: gl.constexpr):
    """Begin to copy a tile of keys or values from key ``j`` on, page by page and line by line. ``step``: rows of x from
    a page to the next."""
    size: gl.constexpr = plan.page_size
    parts: gl.constexpr = plan.block_kv // plan.box
    lines: gl.constexpr = tiles.shape[2] // LINE
    boxes = as_tiles(tiles, tiles.shape[0] * lines * parts, plan.box, LINE, tile_layout(LINE))
    for part in gl.static_range(parts):
        key = j + part * plan.box
        filled = gl.maximum(gl.minimum(kv_len - key // size * size, size), 0)
        end, row = pages[part] * step + filled, ROWS_FROM - filled + key % size
        for line in gl.static_range(lines):
            tile = boxes.index((stage * lines + line) * parts + part)
            load_tile(x, [ROWS_FROM, end, row, h, line * LINE], full, boxed(tile, tile_layout(LINE, 5)))


@gluon.jit
def fetch_first_pages(unit, first, own, h, tiles, ring, inputs, table, work, plan: gl.constexpr):
    """Begin to copy the first keys of a walk, as unit 0 of those that ``_flash`` has. Their pages."""
    pages = pages_at(first, own, table, work, plan)
    stage, full = acquire(ring, unit, plan.block_kv * plan.block_d * 2)
    load_pages(inputs.k[0], work.k_step, pages, tiles.k[0], stage, first, own.kv_len, h, full, plan)
    return pages


@gluon.jit
def fetch_other_pages(unit, span, pages, own, h, tiles, ring, inputs, table, work, plan: gl.constexpr):
    """Begin to copy, as there is room, the units 1 to n of a walk over a span: keys i and values i - 1 under one
    barrier. ``pages``: of the first keys. What ``unit`` is after them."""
    block: gl.constexpr = plan.block_kv
    k, v = inputs.k[0], inputs.v[0]
    k_tiles, v_tiles = tiles.k[0], tiles.v[0]
    first, last = span
    for j in range(first + block, last, block):
        following = pages_at(j, own, table, work, plan)
        stage, full = acquire(ring, unit, block * (plan.block_d + plan.block_dv) * 2)
        load_pages(k, work.k_step, following, k_tiles, stage, j, own.kv_len, h, full, plan)
        load_pages(v, work.v_step, pages, v_tiles, stage, j - block, own.kv_len, h, full, plan)
        pages = following
        unit += 1
    stage, full = acquire(ring, unit, block * plan.block_dv * 2)
    load_pages(v, work.v_step, pages, v_tiles, stage, (last - 1) // block * block, own.kv_len, h, full, plan)
    return unit + 1


@gluon.jit
def fetch_queries(iteration, own, h, tiles, q_ring, q, plan: gl.constexpr):
    """Begin to copy the queries of a unit: of few rows to one of two buffers in turn, else to that of each group."""
    columns: gl.constexpr = plan.block_d
    consumers: gl.constexpr = plan.consumers
    for g in gl.static_range(consumers):
        buffer, parity = g, iteration & 1
        if consumers == 1:
            buffer, parity = iteration & 1, iteration // 2
        mbarrier.wait(q_ring.empty.index(buffer), parity ^ 1)
        mbarrier.expect(q_ring.full.index(buffer), ROWS * columns * 2)
        at = [0, h, own.token + g * (plan.rows // plan.heads), 0, 0]
        load_tile(q, at, q_ring.full.index(buffer), rows_boxed(tiles.q[0].index(buffer), plan.heads))


@gluon.jit
def producer(tiles, q_ring, ring, inputs, table, schedule, window, work, plan: gl.constexpr):
    """One warp that fetches what the consumers take, in their order. The first keys of a unit have room before the
    queries of the one before are done with."""
    left, right = window
    walked: gl.constexpr = plan.chunk if plan.by_chunks else 1 << 30
    unit = 0
    iteration = 0
    for index in range(gl.program_id(0), work.units * work.kv_heads, gl.num_programs(0)):
        own, h = unit_at(index, schedule, work)
        first, last = keys_of_unit(own, left, right, plan)
        pages_of = table + own.sequence.to(gl.int64) * work.table_row
        begin = first // walked * walked
        for start in range(begin, last, walked):
            here, end = gl.maximum(first, start), gl.minimum(last, start + walked)
            pages = fetch_first_pages(unit, here, own, h, tiles, ring, inputs, pages_of, work, plan)
            if start == begin:
                fetch_queries(iteration, own, h, tiles, q_ring, inputs.q[0], plan)
            unit = fetch_other_pages(unit + 1, (here, end), pages, own, h, tiles, ring, inputs, pages_of, work,
                                     plan)  # fmt: skip
        iteration = (iteration + 1) & 3


# ----------------------------------------------------------------------------------------------------------- consumers
@gluon.jit
def leave_rows(state, own, h, group: gl.constexpr, parts, out, scores, work, plan: gl.constexpr):
    """Write the state of a chunk, or o and lse from the state of all keys, of a group of warps' rows: as
    ``paged_attention_kernel`` does."""
    pieces, l, m = state
    acc = pieces[0]
    row_s: gl.constexpr = gl.SliceLayout(1, laid(plan.rows, plan.block_kv))
    row_o: gl.constexpr = gl.SliceLayout(1, laid(plan.rows, plan.block_dv))
    column = gl.arange(0, plan.block_dv, gl.SliceLayout(0, laid(plan.rows, plan.block_dv)))
    at, _, there = rows_at(own, h, group, row_o, work, plan)
    at_s, at_lse, there_s = rows_at(own, h, group, row_s, work, plan)
    ok = there[:, None] & (column < work.dv)[None, :]
    if plan.apart:
        at = at * work.chunks + own.share
        at_s = (at_s * work.chunks + own.share) * 2
        gl.store(parts.acc + (at * work.dv)[:, None] + column[None, :], acc, mask=ok)
        gl.store(parts.statistics + at_s, l, mask=there_s)
        gl.store(parts.statistics + at_s + 1, m, mask=there_s)
    else:
        inverse = 1.0 / gl.where(l == 0.0, 1.0, l)
        result = acc * gl.convert_layout(inverse, row_o)[:, None]
        gl.store(out.o + (at * work.dv)[:, None] + column[None, :], result.to(out.o.dtype.element_ty), mask=ok)
        store_log_sum(out.lse, out.low, at_lse, (l, m), scores, there_s)


@gluon.jit
def rows_at(own, h, group: gl.constexpr, row: gl.constexpr, work, plan: gl.constexpr):
    """Where each row of a group of warps lies in (tokens, heads) and in (heads, tokens), and which rows there are."""
    i = gl.arange(0, plan.rows, row)
    query, of_group = group * (plan.rows // plan.heads) + i // plan.heads, i % plan.heads
    head, token = h * work.group + of_group, (own.token + query).to(gl.int64)
    there = (query < own.queries) & (of_group < work.group)
    return token * (work.kv_heads * work.group) + head, head.to(gl.int64) * work.tokens + token, there


@gluon.jit
def few_consumer(tiles, q_ring, ring, schedule, parts, out, softmax, work, plan: gl.constexpr):
    """Four warps that walk the chunks of each unit of this program, one after the other."""
    rows: gl.constexpr = plan.rows
    block_dv: gl.constexpr = plan.block_dv
    row_s: gl.constexpr = gl.SliceLayout(1, laid(rows, plan.block_kv))
    left, right = softmax.window
    scores = softmax.scores
    unit = 0
    iteration = 0
    for index in range(gl.program_id(0), work.units * work.kv_heads, gl.num_programs(0)):
        own, h = unit_at(index, schedule, work)
        first, last = keys_of_unit(own, left, right, plan)
        limits, all_lo, all_hi = limits_of_unit(own, left, right, 0, row_s, plan)
        mbarrier.wait(q_ring.full.index(iteration & 1), iteration // 2)
        q = tiles.q[0].index(iteration & 1)
        spread(q, rows)
        acc = (gl.zeros([rows, block_dv], gl.float32, laid(rows, block_dv)),)
        l = gl.zeros([rows], gl.float32, row_s)
        m = gl.full([rows], float("-inf"), gl.float32, row_s)
        for start in range(first // plan.chunk * plan.chunk, last, plan.chunk):
            limits_here, lo, hi = within_chunk(limits, all_lo, all_hi, start, plan)
            part, unit = attend_few(unit, gl.maximum(first, start), gl.minimum(last, start + plan.chunk), q, tiles,
                                    ring, KeyLimits(limits_here, lo, hi, None), scores, plan)  # fmt: skip
            if plan.apart:
                acc, l, m = part
            else:
                acc, l, m = merge((acc, l, m), part, scores)
        # All four warps have issued the last products, and so read their queries.
        mbarrier.arrive(q_ring.empty.index(iteration & 1), count=1)
        leave_rows((acc, l, m), own, h, 0, parts, out, scores, work, plan)
        iteration = (iteration + 1) & 3


@gluon.jit
def consumer(GROUP: gl.constexpr, tiles, q_ring, ring, pingpong, schedule, parts, out, softmax, work,
             plan: gl.constexpr):  # fmt: skip
    """Four warps that own 64 rows of each unit of this program."""
    row_s: gl.constexpr = gl.SliceLayout(1, laid(plan.rows, plan.block_kv))
    left, right = softmax.window
    q = each_at(tiles.q, GROUP)
    chunk = gl.to_tensor(plan.chunk)
    unit = 0
    handoff = 0
    parity = 0
    for index in range(gl.program_id(0), work.units * work.kv_heads, gl.num_programs(0)):
        own, h = unit_at(index, schedule, work)
        span = keys_of_unit(own, left, right, plan)
        limits, all_lo, all_hi = limits_of_unit(own, left, right, GROUP, row_s, plan)
        mbarrier.wait(q_ring.full.index(GROUP), parity)
        state, handoff, unit = attend(handoff, unit, span, q, q_ring.empty.index(GROUP), tiles, ring, pingpong,
                                      KeyLimits(limits, all_lo, all_hi, None), (softmax.scores, chunk), GROUP,
                                      plan)  # fmt: skip
        own, h = unit_at(index, schedule, work)  # read again: registers are dear in a walk
        leave_rows(state, own, h, GROUP, parts, out, softmax.scores, work, plan)
        parity = 1 - parity


# ------------------------------------------------------------------------------------------------------------- kernels
@gluon.jit
def paged_attention_pages_kernel(q, k, v, table, schedule, parts, statistics, o, lse, softmax, plan: gl.constexpr):
    """The units of a schedule (``lib.paged_units``): the state of each chunk, parts (tokens, heads, chunks, dv) and
    statistics (.., 2), l and m, if these are ``apart``; else o, (tokens, heads, dv), and lse, (heads, tokens), unless
    that is None.

    q: described, (1, kv_heads, tokens, group, d), in boxes of ``plan.heads`` heads and 64 rows; k, v: described as
    sequences of rows (``lib.tma.paged``), in boxes of ``plan.box`` slots and a line.
    """
    dtype: gl.constexpr = k.dtype
    q_tiles = head_buffers(dtype, 2, ROWS, plan.block_d, 0)
    k_tiles = head_buffers(dtype, plan.stages, plan.block_kv, plan.block_d, 0)
    v_tiles = head_buffers(dtype, plan.stages, plan.block_kv, plan.block_dv, 0)
    tiles = Buffers(q_tiles, k_tiles, v_tiles, None)
    q_ring, ring = ring_of(2, 1), ring_of(plan.stages, plan.consumers)
    inputs, out, parts = QkvInputs((q,), (k,), (v,)), Outputs(o, lse, None), ChunkOutputs(parts, statistics)
    if plan.consumers == 1:
        fence_async_shared()
        gdc_wait()
        if plan.apart:
            gdc_launch_dependents()
        work = shape_of(q, v, schedule)
        gl.warp_specialize([
            (few_consumer, (tiles, q_ring, ring, schedule, parts, out, softmax, work, plan)),
            (producer, (tiles, q_ring, ring, inputs, table, schedule, softmax.window, work, plan)),
        ], [1], [plan.producer_registers])  # fmt: skip
    else:
        pingpong = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(pingpong.index(i), count=1)
        fence_async_shared()
        gdc_wait()
        if plan.apart:
            gdc_launch_dependents()
        work = shape_of(q, v, schedule)
        first = PingPong(pingpong.index(0), pingpong.index(1))
        last = PingPong(pingpong.index(1), pingpong.index(0))
        gl.warp_specialize([
            (consumer, (0, tiles, q_ring, ring, first, schedule, parts, out, softmax, work, plan)),
            (consumer, (1, tiles, q_ring, ring, last, schedule, parts, out, softmax, work, plan)),
            (producer, (tiles, q_ring, ring, inputs, table, schedule, softmax.window, work, plan)),
        ], [4, 1], [plan.registers, plan.producer_registers])  # fmt: skip
