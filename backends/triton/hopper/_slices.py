"""The kernels of attention for Hopper where few queries meet many keys, and no bit of a row may tell that the keys were
not walked by one program: three launches that end in the sums of ``_flash`` over one chunk of all keys.

Scores are products over d alone, and maxima are exact in any order. So tiles of keys have programs of their own for both
(``attention_scores_kernel``), and again for weights, which need the maxima of the tiles before (``attention_weights_
kernel``). Sums must be taken tile after tile; but a column of V has its own, so that slices of columns have programs
(``attention_slices_kernel``), which walk all keys with nothing to do but products and a scale. The queries of all heads
of a group are the rows of one tile.

With rows r, tiles t of keys and s_rt the scores of a tile:

    m_rt = max(m_r,t-1, max s_rt)    p_rt = exp(s_rt - m_rt)    alpha_rt = exp(m_r,t-1 - m_rt)
    l_rt = alpha_rt l_r,t-1 + sum p_rt    acc_rt = alpha_rt acc_r,t-1 + p_rt V_t

Source: online softmax (Milakov and Gimelshein 2018) cut along V's columns in place of keys.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from portakern.backends.triton.hopper._flash import (
    _OLD,
    ROWS,
    beside,
    boxed,
    lane_sums,
    reach,
    row_max,
    seen_scores,
    span_of,
    weights_of,
)
from portakern.backends.triton.hopper._shares import rows_boxed
from portakern.backends.triton.hopper._warps import load_tile


class Slices(NamedTuple):
    """A call. ``tiles``: of keys; ``slices``: of V's columns; ``rows``: of a group of heads, of the ``ROWS`` of a tile;
    ``kv_heads``: groups of a batch entry, which have ``group`` heads each."""

    tiles: int
    slices: int
    rows: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    dv: int


@gluon.jit
def spanned(work, left, right, block: gl.constexpr):
    """The first and the last tile of keys that some query sees."""
    first, last = span_of(work.kv_len - work.q_len, work.kv_len - 1, work, left, right, block)
    return first // block, (last - 1) // block


@gluon.jit
def lanes_of(l):
    """The rows of the sums of lanes, as a column, and the lanes."""
    row = gl.arange(0, l.shape[0], gl.SliceLayout(1, l.type.layout))
    return row[:, None], gl.arange(0, l.shape[1], gl.SliceLayout(0, l.type.layout))[None, :]


@gluon.jit
def packed(tile):
    """A tile in shared memory as the box (1, rows, columns) that the copy engine moves."""
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    if _OLD:
        return tile._reinterpret(tile.dtype, [1, tile.shape[0], tile.shape[1]], box)
    else:
        return tile.reinterpret(tile.dtype, [1, tile.shape[0], tile.shape[1]], box)


@gluon.jit(do_not_specialize=list(Slices._fields))
def attention_scores_kernel(
    q, k, scores_of, maxima, scores, window, tiles, slices, rows, kv_heads, group, q_len, kv_len, dv,
    plan: gl.constexpr, heads: gl.constexpr,
):  # fmt: skip
    """Scores of a tile of keys, (groups, rows, tiles * block_kv), -inf where not seen, and their maxima, (groups, tiles,
    ROWS). q: described, (batch, kv_heads, q_len, group, d); k: described, (batch, kv_len, kv_heads, d)."""
    gdc_launch_dependents()
    work = Slices(tiles, slices, rows, kv_heads, group, q_len, kv_len, dv)
    block: gl.constexpr = plan.block_kv
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block, 16])
    row_s: gl.constexpr = gl.SliceLayout(1, mma)
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    q_tile = gl.allocate_shared_memory(k.dtype, [1, ROWS, plan.block_d], tile).index(0)
    k_tile = gl.allocate_shared_memory(k.dtype, [1, block, plan.block_d], tile).index(0)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    left, right = window
    at = gl.program_id(0) % work.tiles
    of = gl.program_id(0) // work.tiles
    first, last = spanned(work, left, right, block)
    if (at >= first) & (at <= last):
        mbarrier.init(full, count=1)
        fence_async_shared()
        mbarrier.expect(full, (ROWS + block) * plan.block_d * 2)
        load_tile(q, [of // work.kv_heads, of % work.kv_heads, 0, 0, 0], full, rows_boxed(q_tile, heads))
        load_tile(k, [of // work.kv_heads, at * block, of % work.kv_heads, 0], full, boxed(k_tile, box))
        limits, all_lo, all_hi = reach(work.kv_len - work.q_len, work, left, right, row_s, heads)
        mbarrier.wait(full, 0)
        zeros = gl.zeros([ROWS, block], gl.float32, mma)
        dots = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[dots])
        cols = gl.arange(0, block, gl.SliceLayout(0, mma))
        s = seen_scores(s, at * block, cols, limits, all_lo, all_hi, scores)
        row = gl.arange(0, ROWS, row_s)
        there = row < work.rows
        line = (of.to(gl.int64) * work.rows + row) * (work.tiles * block) + at * block
        gl.store(scores_of + line[:, None] + cols[None, :], s, mask=there[:, None] & (cols < block)[None, :])
        gl.store(maxima + (of.to(gl.int64) * work.tiles + at) * ROWS + row, row_max(s, row_s), mask=there)


@gluon.jit
def greatest_before(maxima, first, at, of, there, work, plan: gl.constexpr):
    """The greatest score of each row in the tiles from ``first`` to the one before ``at``; -inf of none."""
    block: gl.constexpr = plan.block_kv
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block, 16])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, mma))
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, mma))
    for some in range(first, at, block):
        tile = some + gl.arange(0, block, gl.SliceLayout(0, mma))
        place = (of.to(gl.int64) * work.tiles + tile) * ROWS
        found = gl.load(maxima + place[None, :] + row[:, None], mask=there[:, None] & (tile < at)[None, :],
                        other=float("-inf"))  # fmt: skip
        m = gl.maximum(m, gl.max(found, 1))
    return m


@gluon.jit(do_not_specialize=list(Slices._fields))
def attention_weights_kernel(
    scores_of, maxima, weights, alphas, sums, greatest, scores, window, tiles, slices, rows, kv_heads, group, q_len,
    kv_len, dv, plan: gl.constexpr,
):  # fmt: skip
    """Of a tile of keys the weights, (groups, rows, tiles * block_kv), what they make of the sums before, alphas,
    (groups, tiles, ROWS), and their sums, (groups, tiles, ROWS, 4); greatest, (groups, ROWS): each row's score."""
    gdc_wait()
    gdc_launch_dependents()
    work = Slices(tiles, slices, rows, kv_heads, group, q_len, kv_len, dv)
    block: gl.constexpr = plan.block_kv
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block, 16])
    row_s: gl.constexpr = gl.SliceLayout(1, mma)
    left, right = window
    at = gl.program_id(0) % work.tiles
    of = gl.program_id(0) // work.tiles
    first, last = spanned(work, left, right, block)
    if (at >= first) & (at <= last):
        row = gl.arange(0, ROWS, row_s)
        there = row < work.rows
        cols = gl.arange(0, block, gl.SliceLayout(0, mma))
        line = (of.to(gl.int64) * work.rows + row) * (work.tiles * block) + at * block
        ok = there[:, None] & (cols < block)[None, :]
        s = gl.load(scores_of + line[:, None] + cols[None, :], mask=ok, other=float("-inf"))
        m = greatest_before(maxima, first, at, of, there, work, plan)
        p, m, alpha = weights_of(s, m, scores, row_s)
        gl.store(weights + line[:, None] + cols[None, :], p.to(weights.dtype.element_ty), mask=ok)
        place = (of.to(gl.int64) * work.tiles + at) * ROWS
        gl.store(alphas + place + row, alpha, mask=there)
        l = lane_sums(p)
        line_l, lane = lanes_of(l)
        gl.store(sums + (place + line_l) * 4 + lane, l, mask=(line_l < work.rows) & (lane < 4))
        gl.store(greatest + of.to(gl.int64) * ROWS + row, m, mask=there & (row >= (last - at) * ROWS))


@gluon.jit
def producer(p_tiles, v_tiles, full, empty, p, v, window, work, plan: gl.constexpr, columns: gl.constexpr):
    """One warp that fetches weights and values, tile after tile."""
    box: gl.constexpr = gl.NVMMASharedLayout(columns * 2, 16, 4)
    block: gl.constexpr = plan.block_kv
    stages: gl.constexpr = plan.stages
    left, right = window
    which = gl.program_id(0) % work.slices
    of = gl.program_id(0) // work.slices
    first, last = spanned(work, left, right, block)
    for at in range(first, last + 1):
        unit = at - first
        stage = unit % stages
        mbarrier.wait(empty.index(stage), ((unit // stages) & 1) ^ 1)
        mbarrier.expect(full.index(stage), (ROWS + columns) * block * 2)
        load_tile(v, [of // work.kv_heads, at * block, of % work.kv_heads, which * columns], full.index(stage),
                  boxed(v_tiles.index(stage), box))  # fmt: skip
        load_tile(p, [of, 0, at * block], full.index(stage), packed(p_tiles.index(stage)))


@gluon.jit
def factors(alphas, sums, at, last, of, l, row, work):
    """(alpha, sums of lanes) of a tile of keys; of one beyond the last, nothing."""
    place = (of.to(gl.int64) * work.tiles + at) * ROWS
    line_l, lane = lanes_of(l)
    left_over = (last - at + 1) * ROWS  # no row is beyond it, unless the tile is
    alpha = gl.load(alphas + place + row, mask=(row < work.rows) & (row < left_over), other=0.0)
    ok = (line_l < work.rows) & (line_l < left_over) & (lane < 4)
    return alpha, gl.load(sums + (place + line_l) * 4 + lane, mask=ok, other=0.0)


@gluon.jit
def consumer(
    p_tiles, v_tiles, full, empty, alphas, sums, greatest, o, lse, scores, window, work, plan: gl.constexpr,
    columns: gl.constexpr, heads: gl.constexpr,
):  # fmt: skip
    """Four warps that walk the keys of this program's columns. What scales them is read two tiles ahead."""
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.block_kv, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    row_s: gl.constexpr = gl.SliceLayout(1, mma_s)
    row_o: gl.constexpr = gl.SliceLayout(1, mma_o)
    stages: gl.constexpr = plan.stages
    left, right = window
    which = gl.program_id(0) % work.slices
    of = gl.program_id(0) // work.slices
    first, last = spanned(work, left, right, plan.block_kv)
    row = gl.arange(0, ROWS, row_s)
    block: gl.constexpr = plan.block_kv
    l = lane_sums(gl.zeros([ROWS, block], gl.float32, mma_s))
    acc = gl.zeros([ROWS, columns], gl.float32, mma_o)
    alpha, more = factors(alphas, sums, first, last, of, l, row, work)
    alpha_next, more_next = factors(alphas, sums, first + 1, last, of, l, row, work)
    for at in range(first, last + 1):
        unit = at - first
        stage = unit % stages
        alpha_then, more_then = factors(alphas, sums, at + 2, last, of, l, row, work)
        acc = acc * gl.convert_layout(alpha, row_o)[:, None]
        mbarrier.wait(full.index(stage), (unit // stages) & 1)
        products = warpgroup_mma(p_tiles.index(stage), v_tiles.index(stage), acc, use_acc=at > first, is_async=True)
        # The first tile's alpha is that of no score, which a scale of zero makes NaN.
        l = gl.where(at > first, gl.fma(l, beside(alpha, l), more), more)
        acc = warpgroup_mma_wait(0, deps=[products])
        mbarrier.arrive(empty.index(stage), count=1)
        alpha, more = alpha_next, more_next
        alpha_next, more_next = alpha_then, more_then
    l_row = gl.convert_layout(gl.sum(l, 1), row_s)
    inverse = 1.0 / gl.where(l_row == 0.0, 1.0, l_row)
    out = acc * gl.convert_layout(inverse, row_o)[:, None]
    place, there = out_at(of, work, row_o, heads)
    column = which * columns + gl.arange(0, columns, gl.SliceLayout(0, mma_o))
    gl.store(o + (place * work.dv)[:, None] + column[None, :], out.to(o.dtype.element_ty),
             mask=there[:, None] & (column < work.dv)[None, :])  # fmt: skip
    if lse is not None:
        query, head = row // heads, of % work.kv_heads * work.group + row % heads
        place = (of // work.kv_heads * work.kv_heads * work.group + head).to(gl.int64) * work.q_len + query
        ok = (row < work.rows) & (row % heads < work.group) & (row >= which * ROWS)  # one slice's programs write it
        m = gl.load(greatest + of.to(gl.int64) * ROWS + row, mask=ok, other=0.0)
        gl.store(lse + place, m * scores.unit + gl.log(l_row), mask=ok)


@gluon.jit
def out_at(of, work, layout: gl.constexpr, heads: gl.constexpr):
    """Where each row lies in (batch, q_len, heads), and which rows there are."""
    i = gl.arange(0, ROWS, layout)
    query, of_group = i // heads, i % heads
    line = (of // work.kv_heads).to(gl.int64) * work.q_len + query
    head = of % work.kv_heads * work.group + of_group
    return line * (work.kv_heads * work.group) + head, (i < work.rows) & (of_group < work.group)


@gluon.jit(do_not_specialize=list(Slices._fields))
def attention_slices_kernel(
    p, v, alphas, sums, greatest, o, lse, scores, window, tiles, slices, rows, kv_heads, group, q_len, kv_len, dv,
    plan: gl.constexpr, columns: gl.constexpr, heads: gl.constexpr,
):  # fmt: skip
    """``columns`` columns of o, (batch, q_len, heads, dv), and lse, (batch, heads, q_len), unless that is None, from the
    weights p, described, v, described, and what ``attention_weights_kernel`` wrote besides."""
    gdc_wait()
    work = Slices(tiles, slices, rows, kv_heads, group, q_len, kv_len, dv)
    stages: gl.constexpr = plan.stages
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    p_tiles = gl.allocate_shared_memory(v.dtype, [stages, ROWS, plan.block_kv], gl.NVMMASharedLayout(128, 16, 2))
    narrow: gl.constexpr = gl.NVMMASharedLayout(columns * 2, 16, 2)
    v_tiles = gl.allocate_shared_memory(v.dtype, [stages, plan.block_kv, columns], narrow)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], bar)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (p_tiles, v_tiles, full, empty, alphas, sums, greatest, o, lse, scores, window, work, plan, columns,
                    heads)),
        (producer, (p_tiles, v_tiles, full, empty, p, v, window, work, plan, columns)),
    ], [1], [24])  # fmt: skip
