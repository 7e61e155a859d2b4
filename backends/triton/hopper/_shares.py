"""The kernel of attention for Hopper where there are few queries, as in decoding: each chunk of a row's keys is a
program's, which leaves the chunk's state (acc, l, m) for ``attention_combine_kernel`` of ``gpu/attention.py``; or a
program walks all chunks of a group of heads, merges their states in the same order, and writes o itself.

The queries of all heads of a group are the rows of one tile, so that their keys are read once. One warp has the copy
engine bring queries, keys and values, and runs ahead into the next chunk as far as shared memory has room; four warps
compute. There are as many programs as multiprocessors at most, and each takes one chunk, or one group, after another.

The matrix unit takes 64 rows, 16 a warp, of which a thread holds parts of two: i and i + 8. Up to 32 rows that there
are lie where the first of the two is, so that a thread computes the weights of one row; the others are zeros, whose
scores stand for their weights. What a row goes through is ``attend`` of ``_flash`` step by step.

Source: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023); the walk over keys is FlashAttention-3's (Shah et al. 2024).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from portakern.backends.triton.hopper._flash import (
    Buffers,
    KeyLimits,
    Outputs,
    QkvInputs,
    beside,
    fetch_first,
    fetch_others,
    lane_sums,
    merge,
    risen,
    seen_scores,
    store_log_sum,
    weights_under,
)
from portakern.backends.triton.lib.gluon import _OLD, ROWS, Ring, await_full, load_tile, reach, ring_of, span_of

HALF = gl.constexpr(32)  # rows of which each thread has one


class Shares(NamedTuple):
    """The chunks of a call. ``groups``: of heads, in all batch entries; ``num_splits``: chunks of each; ``kv_heads``:
    groups of a batch entry, which have ``group`` heads each."""

    groups: int
    num_splits: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    chunk: int
    dv: int


class ChunkOutputs(NamedTuple):
    """Where the states of chunks go, (batch, heads, q_len, chunks, dv) and (.., 2), l and m; None twice where there are
    no chunks but o."""

    acc: Any
    statistics: Any


@gluon.constexpr_function
def laid(rows, columns):
    """How rows that are computed of lie in registers, scores and sums alike: as the matrix unit has them, without those
    that are no rows."""
    if rows == ROWS:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    across = [[0, 1]]
    while 8 << (len(across) - 1) < columns:
        across.append([0, 8 << (len(across) - 1)])
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(across, lanes, [[8, 0], [16, 0]], [], [rows, columns])


@gluon.jit
def pairs(x):
    """The rows of a tile of 64 that a thread has first, and those that it has beside."""
    columns: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [4, 2, 8, columns]), (0, 2, 3, 1)))


@gluon.jit
def rows_in(x, rows: gl.constexpr):
    """The rows that are computed of, from a tile of the matrix unit's."""
    columns: gl.constexpr = x.shape[1]
    if rows == HALF:
        first, _ = pairs(x)
        x = gl.convert_layout(gl.reshape(first, [rows, columns]), laid(rows, columns), assert_trivial=True)
    return x


@gluon.jit
def others_in(x, rows: gl.constexpr, dtype: gl.constexpr):
    """The other rows of a tile of the matrix unit's, if it has any, in ``dtype``."""
    columns: gl.constexpr = x.shape[1]
    if rows == HALF:
        _, x = pairs(x)
        x = gl.convert_layout(gl.reshape(x, [rows, columns]), laid(rows, columns), assert_trivial=True)
    return x.to(dtype)


@gluon.jit
def filled(x, others, layout: gl.constexpr):
    """The rows that are computed of as a tile of the matrix unit's, with ``others`` beside, as ``pairs`` has them."""
    columns: gl.constexpr = x.shape[1]
    if x.shape[0] == HALF:
        both = gl.join(gl.reshape(x, [4, 8, columns]), gl.reshape(others, [4, 8, columns]))
        x = gl.reshape(gl.permute(both, (0, 3, 1, 2)), [ROWS, columns])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def scaled(acc, alpha, rows: gl.constexpr):
    """Sums, each row by its own factor."""
    block_dv: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = laid(ROWS, block_dv)
    if rows == HALF:
        both = gl.join(gl.reshape(alpha, [4, 8]), gl.reshape(alpha, [4, 8]))
        alpha = gl.reshape(gl.permute(both, (0, 2, 1)), [ROWS])
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def taken(index, work):
    """(batch entry, group of heads, which of its chunks) of the ``index``-th chunk. The last chunks of all groups, the
    ones that may be short, come last."""
    share = index // work.groups
    head = index - share * work.groups
    return head // work.kv_heads, head % work.kv_heads, share


@gluon.jit
def part_of(share, work, left, right, block: gl.constexpr):
    """(where a chunk begins and ends, and [first, last) of the keys in it that some query sees; never none)."""
    top = work.kv_len - work.q_len
    first, last = span_of(top, work.kv_len - 1, work, left, right, block)
    start = (first // work.chunk + share) * work.chunk
    end = start + work.chunk
    # A chunk may lie beyond all that is seen: the last keys stand in for it, of which ``limits`` show none.
    first = gl.minimum(gl.maximum(first, start), (work.kv_len - 1) // block * block)
    last = gl.maximum(gl.minimum(last, end), first + 1)
    return start, end, first, last


@gluon.jit
def rows_boxed(tile, heads: gl.constexpr):
    """A tile of queries in shared memory as the box (1, 1, queries, heads, columns) that the copy engine moves."""
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, 5)
    if _OLD:
        return tile._reinterpret(tile.dtype, [1, 1, ROWS // heads, heads, tile.shape[1]], box)
    else:
        return tile.reinterpret(tile.dtype, [1, 1, ROWS // heads, heads, tile.shape[1]], box)


@gluon.jit
def walks_of(work, plan: gl.constexpr):
    """(walks over keys of all programs, chunks of each)."""
    total, each = work.groups * work.num_splits, 1
    if plan.chunked:
        total, each = work.groups, work.num_splits
    return total, each


@gluon.jit
def producer(tiles, q_ring, ring, inputs, window, work, plan: gl.constexpr):
    """One warp that fetches what the consumer takes, in its order."""
    left, right = window
    unit = 0
    total, each = walks_of(work, plan)
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        b, h, of = taken(index, work)
        for share in range(of, of + each):
            _, _, first, last = part_of(share, work, left, right, plan.block_kv)
            fetch_first(unit, first, (b, h), inputs.k, tiles, ring, plan)
            if share == of:
                mbarrier.wait(q_ring.empty, (index // gl.num_programs(0) & 1) ^ 1)
                mbarrier.expect(q_ring.full, ROWS * plan.block_d * 2)
                load_tile(inputs.q[0], [b, h, 0, 0, 0], q_ring.full, rows_boxed(tiles.q[0], plan.heads))
            unit = fetch_others(unit + 1, first, last, (b, h), inputs.k, inputs.v, tiles, ring, plan)


@gluon.jit
def spread(q_tile, rows: gl.constexpr):
    """Have rows of queries lie as ``filled`` has them."""
    block_d: gl.constexpr = q_tile.shape[1]
    if rows == HALF:
        x = q_tile.slice(0, rows).load(laid(rows, block_d))
        q_tile.store(filled(x, gl.zeros_like(x), laid(ROWS, block_d)))
        fence_async_shared()


@gluon.jit
def no_sums(s):
    """What ``lane_sums`` begin with."""
    sums = lane_sums(s)
    return gl.zeros_like(sums)


@gluon.jit
def folded(state, dots, start, cols, band, scores, dtype: gl.constexpr, plan: gl.constexpr):
    """(weights of a tile of scores, for the matrix unit; (l, m) with them; the factor of what was summed before)."""
    l, m = state
    row: gl.constexpr = gl.SliceLayout(1, laid(plan.rows, plan.block_kv))
    s, others = dots
    s = seen_scores(s, start, cols, band, scores)
    m, under, alpha = risen(s, m, scores, row)
    p = weights_under(s, under)
    l = gl.fma(l, beside(alpha, l), lane_sums(p))
    weights: gl.constexpr = gl.DotOperandLayout(0, laid(ROWS, plan.block_dv), 2)
    return filled(p.to(dtype), others, weights), (l, m), alpha


@gluon.jit
def attend_few(unit, first, last, q, tiles, ring, band, scores, plan: gl.constexpr):
    """The state (acc, l, m) of the keys [first, last), acc in tiles of the matrix unit, and what ``unit`` is after."""
    rows: gl.constexpr = plan.rows
    block: gl.constexpr = plan.block_kv
    block_dv: gl.constexpr = plan.block_dv  # Triton 3.6 takes no number of a tuple in a shape
    stages: gl.constexpr = plan.stages
    mma_s: gl.constexpr = laid(ROWS, block)
    row: gl.constexpr = gl.SliceLayout(1, laid(rows, block))
    cols = gl.arange(0, block, gl.SliceLayout(0, laid(rows, block)))
    dtype: gl.constexpr = tiles.k[0].dtype
    zeros = gl.zeros([ROWS, block], gl.float32, mma_s)
    acc = warpgroup_mma_init(gl.zeros([ROWS, block_dv], gl.float32, laid(ROWS, block_dv)))

    stage = await_full(ring, unit)
    dots = warpgroup_mma(q, tiles.k[0].index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    dots = warpgroup_mma_wait(0, deps=[dots])
    s = rows_in(dots, rows), others_in(dots, rows, dtype)
    state = no_sums(s[0]), gl.full([rows], float("-inf"), gl.float32, row)
    for start in range(first + block, last, block):
        stage = await_full(ring, unit + 1)
        p16, state, alpha = folded(state, s, start - block, cols, band, scores, dtype, plan)
        await_full(ring, unit + 1)  # a basic block ends, over which no wait for products moves
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ring.empty.index(unit % stages), count=1)
        acc = scaled(acc, alpha, rows)
        dots = warpgroup_mma(q, tiles.k[0].index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        acc = warpgroup_mma(p16, tiles.v[0].index(stage), acc, is_async=True)
        dots = warpgroup_mma_wait(1, deps=[dots])
        s = rows_in(dots, rows), others_in(dots, rows, dtype)
        unit += 1
    final = (last - 1) // block * block
    p16, state, alpha = folded(state, s, final, cols, band, scores, dtype, plan)
    stage = await_full(ring, unit + 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(ring.empty.index(unit % stages), count=1)
    acc = warpgroup_mma(p16, tiles.v[0].index(stage), scaled(acc, alpha, rows), is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    l, m = state
    return ((rows_in(acc, rows),), gl.convert_layout(gl.sum(l, 1), row), m), unit + 2


@gluon.jit
def consumer(tiles, q_ring, ring, parts, out, softmax, work, plan: gl.constexpr):
    """Four warps that walk the chunks of this program."""
    rows: gl.constexpr = plan.rows
    block_dv: gl.constexpr = plan.block_dv
    row_s: gl.constexpr = gl.SliceLayout(1, laid(rows, plan.block_kv))
    scores = softmax.scores
    left, right = softmax.window
    top = work.kv_len - work.q_len
    unit = 0
    total, each = walks_of(work, plan)
    seen, all_lo, all_hi = reach(top, work, left, right, row_s, plan.heads, rows)
    lo, hi = seen
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        b, h, of = taken(index, work)
        mbarrier.wait(q_ring.full, index // gl.num_programs(0) & 1)
        spread(tiles.q[0], rows)
        acc = (gl.zeros([rows, block_dv], gl.float32, laid(rows, block_dv)),)
        l = gl.zeros([rows], gl.float32, row_s)
        m = gl.full([rows], float("-inf"), gl.float32, row_s)
        for share in range(of, of + each):
            start, end, first, last = part_of(share, work, left, right, plan.block_kv)
            limits = gl.maximum(lo, start), gl.minimum(hi, end)
            band = KeyLimits(limits, gl.maximum(all_lo, start), gl.minimum(all_hi, end))
            part, unit = attend_few(unit, first, last, tiles.q[0], tiles, ring, band, scores, plan)
            if plan.chunked:
                acc, l, m = merge((acc, l, m), part, scores)
            else:
                acc, l, m = part
        # All four warps have issued the last products, and so read their queries.
        mbarrier.arrive(q_ring.empty, count=1)
        leave((acc, l, m), (b, h, of), parts, out, scores, work, plan)


@gluon.jit
def leave(state, at, parts, out, scores, work, plan: gl.constexpr):
    """Write the state of a chunk, or o, and lse and low unless these are None, from the state of all keys: as
    ``store_rows`` of the portable kernel does. at: (batch entry, group of heads, which chunk)."""
    pieces, l, m = state
    acc = pieces[0]
    b, h, share = at
    rows: gl.constexpr = plan.rows
    block_dv: gl.constexpr = plan.block_dv
    row_s: gl.constexpr = gl.SliceLayout(1, laid(rows, plan.block_kv))
    row_o: gl.constexpr = gl.SliceLayout(1, laid(rows, block_dv))
    column = gl.arange(0, block_dv, gl.SliceLayout(0, laid(rows, block_dv)))
    at, at_o, _, there = row_at(b, h, share, work, row_o, plan.heads, rows)
    ok = there[:, None] & (column < work.dv)[None, :]
    at_s, _, at_lse, there_s = row_at(b, h, share, work, row_s, plan.heads, rows)
    if parts.acc is not None:
        gl.store(parts.acc + (at * work.dv)[:, None] + column[None, :], acc, mask=ok)
        gl.store(parts.statistics + at_s * 2, l, mask=there_s)
        gl.store(parts.statistics + at_s * 2 + 1, m, mask=there_s)
    else:
        inverse = 1.0 / gl.where(l == 0.0, 1.0, l)
        result = acc * gl.convert_layout(inverse, row_o)[:, None]
        gl.store(out.o + (at_o * work.dv)[:, None] + column[None, :], result.to(out.o.dtype.element_ty), mask=ok)
        store_log_sum(out.lse, out.low, at_lse, (l, m), scores, there_s)


@gluon.jit
def row_at(b, h, share, work, row: gl.constexpr, heads: gl.constexpr, rows: gl.constexpr):
    """Where the state of each row's chunk lies in (batch, heads, q_len, chunks), where the row in (batch, q_len,
    heads) and in (batch, heads, q_len), and which rows there are."""
    i = gl.arange(0, rows, row)
    query, of_group = i // heads, i % heads
    head = (b * work.kv_heads + h) * work.group + of_group
    at_lse = head.to(gl.int64) * work.q_len + query
    at_o = (b * work.q_len + query).to(gl.int64) * (work.kv_heads * work.group) + h * work.group + of_group
    return at_lse * work.num_splits + share, at_o, at_lse, (query < work.q_len) & (of_group < work.group)


@gluon.jit(do_not_specialize=["num_splits", "chunk"])
def attention_shares_kernel(q, k, v, parts, statistics, o, lse, low, softmax, num_splits, chunk, plan: gl.constexpr):
    """The state of each chunk: parts, (batch, heads, q_len, chunks, dv), and statistics, (.., 2), l and m; or, where
    parts is None, o, (batch, q_len, heads, dv), and lse and low, (batch, heads, q_len), unless these are None: then
    ``num_splits`` is 1, or a program takes all of them (``plan.chunked``).

    q: described, (batch, kv_heads, q_len, group, d), in boxes of ``plan.heads`` heads, of ``plan.rows`` rows in all;
    k, v: described, (batch, kv_len, kv_heads, d). num_splits: chunks of a group of heads; chunk: keys of one.
    """
    batch, kv_heads, q_len, group, _ = q.shape
    work = Shares(batch * kv_heads, num_splits, kv_heads, group, q_len, k.shape[1], chunk, v.shape[3])
    inputs, parts, out = QkvInputs((q,), (k,), (v,)), ChunkOutputs(parts, statistics), Outputs(o, lse, low)
    dtype: gl.constexpr = k.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tile = gl.allocate_shared_memory(dtype, [1, ROWS, plan.block_d], tile).index(0)
    k_tiles = gl.allocate_shared_memory(dtype, [plan.stages, plan.block_kv, plan.block_d], tile)
    v_tiles = gl.allocate_shared_memory(dtype, [plan.stages, plan.block_kv, plan.block_dv], tile)
    tiles = Buffers((q_tile,), (k_tiles,), (v_tiles,), None)
    of_q, ring = ring_of(1, 1), ring_of(plan.stages, 1)
    q_ring = Ring(of_q.full.index(0), of_q.empty.index(0))
    fence_async_shared()
    if parts.acc is not None:
        gdc_launch_dependents()  # the merger may take its places, and waits there for the end of all programs
    gl.warp_specialize([
        (consumer, (tiles, q_ring, ring, parts, out, softmax, work, plan)),
        (producer, (tiles, q_ring, ring, inputs, softmax.window, work, plan)),
    ], [1], [24])  # fmt: skip
