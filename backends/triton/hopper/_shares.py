"""The kernel of attention for Hopper where there are few queries, as in decoding: each chunk of a row's keys is a
program's, which leaves the chunk's state (acc, l, m) for ``attention_combine_kernel`` of ``gpu/attention.py``. Where
one chunk holds all keys and the tiling says ``alone``, its state is the row's, and the program writes o itself: that
was compiled and run on the host, never on a device.

The queries of all heads of a group are the rows of one tile, so that their keys are read once. One warp has the copy
engine bring queries, keys and values, and runs ahead into the next chunk as far as shared memory has room; four warps
walk a chunk by ``attend`` of ``_flash``. There are as many programs as multiprocessors, and each takes one chunk after
another.

Source: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023); the walk over keys is FlashAttention-3's (Shah et al. 2024).
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from portakern.backends.triton.hopper._flash import _OLD, ROWS, attend, fetch_first, fetch_others, reach, span_of
from portakern.backends.triton.hopper._warps import load_tile


class Shares(NamedTuple):
    """The chunks of a call. ``total``: of all groups of heads; ``chunks``: of one; ``kv_heads``: groups of a batch
    entry, which have ``group`` heads each."""

    total: int
    chunks: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    chunk: int
    dv: int


@gluon.jit
def part_of(index, work, left, right, block: gl.constexpr):
    """(batch entry, group of heads, which of its chunks, where the chunk begins and ends, and [first, last) of the keys
    in it that some query sees; never none)."""
    share = index % work.chunks
    head = index // work.chunks
    top = work.kv_len - work.q_len
    first, last = span_of(top, work.kv_len - 1, work, left, right, block)
    start = (first // work.chunk + share) * work.chunk
    end = start + work.chunk
    # A chunk may lie beyond all that is seen: the last keys stand in for it, of which ``limits`` show none.
    first = gl.minimum(gl.maximum(first, start), (work.kv_len - 1) // block * block)
    last = gl.maximum(gl.minimum(last, end), first + 1)
    return head // work.kv_heads, head % work.kv_heads, share, start, end, first, last


@gluon.jit
def rows_boxed(tile, heads: gl.constexpr):
    """A tile of queries in shared memory as the box (1, 1, queries, heads, columns) that the copy engine moves."""
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, 5)
    if _OLD:
        return tile._reinterpret(tile.dtype, [1, 1, ROWS // heads, heads, tile.shape[1]], box)
    else:
        return tile.reinterpret(tile.dtype, [1, 1, ROWS // heads, heads, tile.shape[1]], box)


@gluon.jit
def producer(
    q_tile, k_tiles, v_tiles, q_full, q_empty, full, empty, q, k, v, window, work, plan: gl.constexpr,
    heads: gl.constexpr,
):  # fmt: skip
    """One warp that fetches what the consumer takes, in its order."""
    left, right = window
    unit = 0
    for index in range(gl.program_id(0), work.total, gl.num_programs(0)):
        b, h, _, _, _, first, last = part_of(index, work, left, right, plan.block_kv)
        fetch_first(unit, first, b, h, k, k_tiles, full, empty, plan)
        mbarrier.wait(q_empty, (index // gl.num_programs(0) & 1) ^ 1)
        mbarrier.expect(q_full, ROWS * plan.block_d * 2)
        load_tile(q, [b, h, 0, 0, 0], q_full, rows_boxed(q_tile, heads))
        unit = fetch_others(unit + 1, first, last, b, h, k, v, k_tiles, v_tiles, full, empty, plan)


@gluon.jit
def consumer(
    q_tile, k_tiles, v_tiles, q_full, q_empty, full, empty, parts, statistics, o, lse, scores, window, work,
    plan: gl.constexpr, heads: gl.constexpr,
):  # fmt: skip
    """Four warps that walk the chunks of this program."""
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.block_kv, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.block_dv, 16])
    row_s: gl.constexpr = gl.SliceLayout(1, mma_s)
    row_o: gl.constexpr = gl.SliceLayout(1, mma_o)
    left, right = window
    top = work.kv_len - work.q_len
    column = gl.arange(0, plan.block_dv, gl.SliceLayout(0, mma_o))
    unit = 0
    turn = 0
    for index in range(gl.program_id(0), work.total, gl.num_programs(0)):
        b, h, share, start, end, first, last = part_of(index, work, left, right, plan.block_kv)
        seen, all_lo, all_hi = reach(top, work, left, right, row_s, heads)
        lo, hi = seen
        limits = gl.maximum(lo, start), gl.minimum(hi, end)
        mbarrier.wait(q_full, index // gl.num_programs(0) & 1)
        acc, l, m, turn, unit = attend(turn, unit, first, last, q_tile, q_empty, k_tiles, v_tiles, full, empty, q_full,
                                       q_full, limits, gl.maximum(all_lo, start), gl.minimum(all_hi, end), scores,
                                       work.chunk, 0, plan)  # fmt: skip
        at, at_o, there = row_at(b, h, share, work, row_o, heads)
        ok = there[:, None] & (column < work.dv)[None, :]
        at_s, _, there_s = row_at(b, h, share, work, row_s, heads)
        if parts is not None:
            gl.store(parts + (at * work.dv)[:, None] + column[None, :], acc, mask=ok)
            gl.store(statistics + at_s * 2, l, mask=there_s)
            gl.store(statistics + at_s * 2 + 1, m, mask=there_s)
        else:  # as ``store_rows`` of the portable kernel
            inverse = 1.0 / gl.where(l == 0.0, 1.0, l)
            out = acc * gl.convert_layout(inverse, row_o)[:, None]
            gl.store(o + (at_o * work.dv)[:, None] + column[None, :], out.to(o.dtype.element_ty), mask=ok)
            if lse is not None:
                gl.store(lse + at_s, m * scores.unit + gl.log(l), mask=there_s)


@gluon.jit
def row_at(b, h, share, work, row: gl.constexpr, heads: gl.constexpr):
    """Where the state of each row's chunk lies in (batch, heads, q_len, chunks), where the row in (batch, q_len,
    heads), and which rows there are."""
    i = gl.arange(0, ROWS, row)
    query, of_group = i // heads, i % heads
    head = (b * work.kv_heads + h) * work.group + of_group
    at = (head.to(gl.int64) * work.q_len + query) * work.chunks + share
    at_o = (b * work.q_len + query).to(gl.int64) * (work.kv_heads * work.group) + h * work.group + of_group
    return at, at_o, (query < work.q_len) & (of_group < work.group)


@gluon.jit(do_not_specialize=list(Shares._fields))
def attention_shares_kernel(
    q, k, v, parts, statistics, o, lse, scores, window, total, chunks, kv_heads, group, q_len, kv_len, chunk, dv,
    plan: gl.constexpr, heads: gl.constexpr,
):  # fmt: skip
    """The state of each chunk: parts, (batch, heads, q_len, chunks, dv), and statistics, (.., 2), l and m; or, where
    ``chunks`` is 1 and parts None, o, (batch, q_len, heads, dv), and lse, (batch, heads, q_len), unless that is None.

    q: described, (batch, kv_heads, q_len, group, d), in boxes of ``heads`` heads, the least power of two that holds a
    group; k, v: described, (batch, kv_len, kv_heads, d). From ``total`` on: ``Shares``.
    """
    work = Shares(total, chunks, kv_heads, group, q_len, kv_len, chunk, dv)
    dtype: gl.constexpr = k.dtype
    stages: gl.constexpr = plan.stages
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_tile = gl.allocate_shared_memory(dtype, [1, ROWS, plan.block_d], tile)
    k_tiles = gl.allocate_shared_memory(dtype, [stages, plan.block_kv, plan.block_d], tile)
    v_tiles = gl.allocate_shared_memory(dtype, [stages, plan.block_kv, plan.block_dv], tile)
    q_bars = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], bar)
    for i in gl.static_range(2):
        mbarrier.init(q_bars.index(i), count=1)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    if parts is not None:
        gdc_launch_dependents()  # the merger may take its places, and waits there for the end of all programs
    gl.warp_specialize([
        (consumer, (q_tile.index(0), k_tiles, v_tiles, q_bars.index(0), q_bars.index(1), full, empty, parts, statistics,
                    o, lse, scores, window, work, plan, heads)),
        (producer, (q_tile.index(0), k_tiles, v_tiles, q_bars.index(0), q_bars.index(1), full, empty, q, k, v, window,
                    work, plan, heads)),
    ], [1], [24])  # fmt: skip
