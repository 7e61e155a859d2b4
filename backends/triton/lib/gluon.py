"""What warp-specialized kernels in Gluon share: copies of tiles, buffers that are handed back, tiles of attention."""

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

from portakern.backends.triton.lib import segments
from portakern.backends.triton.lib.tma import RAGGED_ROWS

# Releases before 3.8 have these under longer names.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

SUMMARY = gl.constexpr(segments.SUMMARY.value)
ROWS = gl.constexpr(64)  # of a group of four warps: what one instruction of the matrix unit takes
ROWS_FROM = gl.constexpr(RAGGED_ROWS)

# Release 3.9 gave it another name.
_OLD = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "reinterpret"))


class Softmax(NamedTuple):
    """From dot products to weights: their units (``lib.heads.Scores``); the window, how far to the left and to the
    right of its own place a row sees, None for all the way; and, of gradients, what those of q and k are multiplied
    by."""

    scores: Any
    window: Any
    scale: Any = None


class Segments(NamedTuple):
    """Of a packed call (``lib.segments``): the ranges of the rows that programs own, and the numbers of each tile of
    them; and where on one side the id of each own row and of each of the other side's positions comes first, which
    tells segments apart as ids do."""

    ranges: Any
    summaries: Any
    own_firsts: Any
    firsts: Any


class OrderedSegments(NamedTuple):
    """As ``Segments``, with the order in which programs take their tiles. A group of its own, since Triton 3.6 takes no
    None within a group of a group."""

    ranges: Any
    summaries: Any
    own_firsts: Any
    firsts: Any
    order: Any


class OtherSegments(NamedTuple):
    """Whether rows from ``top`` on may meet other segments in their ranges: ``mixed``. own_firsts, firsts: of the rows
    of their batch entry, and of the positions of the other side. How many of both there are."""

    own_firsts: Any
    firsts: Any
    top: Any
    mixed: Any
    q_len: Any
    kv_len: Any


class Ring(NamedTuple):
    """The barriers of a ring of buffers in shared memory, a stage each. ``full``: what is copied there has come.
    ``empty``: all who read it are done. The ``unit``-th filling of the ring is that of stage unit % stages."""

    full: Any
    empty: Any


@gluon.constexpr_function
def accumulator(columns):
    """How a tile of so many columns lies in the registers of four warps that multiply."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def by_row(columns):
    """How a number for each row lies beside such a tile."""
    return gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16]))


@gluon.constexpr_function
def tile_layout(columns, rank=2):
    """How a tile of 16-bit rows lies in shared memory: by lines of up to 128 bytes, as the copy engine swizzles them.
    rank: 4 or 5 of the box that it moves."""
    return gl.NVMMASharedLayout(min(2 * columns, 128), 16, rank)


@gluon.jit
def head_buffers(dtype: gl.constexpr, count: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr,
                 more: gl.constexpr):  # fmt: skip
    """``count`` buffers for so many rows of a head, of each of its pieces: ``columns``, and ``more`` unless that is
    0."""
    first = gl.allocate_shared_memory(dtype, [count, rows, columns], tile_layout(columns))
    if more:
        return first, gl.allocate_shared_memory(dtype, [count, rows, more], tile_layout(more))
    else:
        return (first,)


@gluon.jit
def each_at(pieces, i):
    """Of each piece's buffers the ``i``-th."""
    found = ()
    for n in gl.static_range(len(pieces)):
        found = found + (pieces[n].index(i),)  # type: ignore[assignment]
    return found


@gluon.jit
def load_head(x, b, i, h, full, tiles):
    """Begin to copy rows from ``i`` on of a head of a batch entry, piece after piece; or, of packed sequences, of the
    one that ``b`` is (end, length) of: see ``lib.gluon_sequences``."""
    for n in gl.static_range(len(x)):
        column = n * tiles[0].shape[1]
        if len(x[n].shape) == 5:
            end, length = b
            at = [ROWS_FROM, end, ROWS_FROM - length + i, h, column]
            load_tile(x[n], at, full, boxed(tiles[n], tile_layout(tiles[n].shape[1], 5)))
        else:
            load_tile(x[n], [b, i, h, column], full, boxed(tiles[n], tile_layout(tiles[n].shape[1], 4)))


@gluon.jit
def store_head(x, b, i, h, tiles):
    """Begin to copy rows of a head to their places from ``i`` on, piece after piece. b: as of ``load_head``."""
    for n in gl.static_range(len(x)):
        column = n * tiles[0].shape[1]
        if len(x[n].shape) == 5:
            end, length = b
            at = [ROWS_FROM, end, ROWS_FROM - length + i, h, column]
            store_tile(x[n], at, boxed(tiles[n], tile_layout(tiles[n].shape[1], 5)))
        else:
            store_tile(x[n], [b, i, h, column], boxed(tiles[n], tile_layout(tiles[n].shape[1], 4)))


@gluon.jit
def dots_of(q, k, stage, zeros):
    """q k^T of a tile of rows, on its way: the sum of the pieces' products."""
    dots = warpgroup_mma(q[0], k[0].index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    for n in gl.static_range(1, len(q)):
        dots = warpgroup_mma(q[n], k[n].index(stage).permute((1, 0)), dots, is_async=True)
    return dots


@gluon.jit
def weights_for(p16, acc):
    """Weights as the left operand of products that acc sums up: the registers that they are in."""
    layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(acc.shape[1]), 2)
    return gl.convert_layout(p16, layout)


@gluon.jit
def products_of(p16, v, stage, acc, grows):
    """The products of weights and each piece of a tile of rows, on their way, added to acc if that ``grows``."""
    found = (warpgroup_mma(p16, v[0].index(stage), acc[0], use_acc=grows, is_async=True),)
    for n in gl.static_range(1, len(v)):
        p = weights_for(p16, acc[n])
        product = warpgroup_mma(p, v[n].index(stage), acc[n], use_acc=grows, is_async=True)
        found = found + (product,)  # type: ignore[assignment]
    return found


@gluon.jit
def finished(products):
    """The sums of each piece, with nothing on its way any more."""
    if len(products) == 1:
        return (warpgroup_mma_wait(0, deps=products),)
    else:
        return warpgroup_mma_wait(0, deps=products)


@gluon.jit
def finished_both(first, second):
    """Two sums of pieces, with nothing on its way any more."""
    found = warpgroup_mma_wait(0, deps=first + second)
    firsts, seconds = (), ()
    for n in gl.static_range(len(first)):
        firsts = firsts + (found[n],)  # type: ignore[assignment]
    for n in gl.static_range(len(second)):
        seconds = seconds + (found[len(first) + n],)  # type: ignore[assignment]
    return firsts, seconds


@gluon.jit
def zero_sums(columns: gl.constexpr, more: gl.constexpr):
    """Accumulators of each piece of a head, 0."""
    first = gl.zeros([ROWS, columns], gl.float32, accumulator(columns))
    if more:
        return first, gl.zeros([ROWS, more], gl.float32, accumulator(more))
    else:
        return (first,)


@gluon.jit
def pieces_of(first, more):
    """The pieces of a head: a second one unless that is None."""
    if more is not None:
        return first, more
    else:
        return (first,)


@gluon.constexpr_function
def by_column(columns):
    """How a number for each column lies beside such a tile."""
    return gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16]))


@gluon.jit
def ring_of(stages: gl.constexpr, readers: gl.constexpr):
    """A ring that so many ``readers`` hand back. Copies arrive at barriers by the way that threads' writes take: a
    fence has to follow."""
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=readers)
    return Ring(full, empty)


@gluon.jit
def acquire(ring, unit, moved: gl.constexpr):
    """The producer's next stage, once it is free, and the barrier at which the ``moved`` bytes of its copies arrive."""
    stages: gl.constexpr = ring.full.shape[0]
    stage = unit % stages
    mbarrier.wait(ring.empty.index(stage), (unit // stages & 1) ^ 1)
    full = ring.full.index(stage)
    mbarrier.expect(full, moved)
    return stage, full


@gluon.jit
def await_full(ring, unit):
    """A consumer's next stage, once its copies have come."""
    stages: gl.constexpr = ring.full.shape[0]
    stage = unit % stages
    mbarrier.wait(ring.full.index(stage), unit // stages & 1)
    return stage


@gluon.jit
def give_back(empty, read: gl.constexpr):
    """Have the copy engine fill a buffer again, which ``empty`` stands for. read: threads have read it themselves, not
    products alone. What the engine writes comes by another way, where a fence alone keeps it behind what threads read:
    see "Async proxy" in PTX's ISA."""
    if read:
        fence_async_shared()
    mbarrier.arrive(empty, count=1)


@gluon.jit
def tanh(x):
    """As ``tanh`` of the portable kernel: the quotient of 1 and a number from 1 on is this instruction's result there
    too, but for what surrounds it for divisors beyond 2^126."""
    r = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(x * 2.8853900817779268)], gl.float32, is_pure=True, pack=1
    )
    return 1.0 - 2.0 * r


@gluon.jit
def tile_at(index, work, right, by_turns: gl.constexpr = True):
    """(first tile of queries, batch entry and head as one number) of a tile. Where the last queries see most keys,
    their tiles come first. by_turns: heads' tiles are taken by turns."""
    if not by_turns:
        return index % work.tiles_q, index // work.tiles_q
    else:
        section = index // (work.interleaved_heads * work.tiles_q)
        rest = index - section * (work.interleaved_heads * work.tiles_q)
        width = gl.minimum(work.interleaved_heads, work.all_heads - section * work.interleaved_heads)
        tile = rest // width
        head = section * work.interleaved_heads + rest - tile * width
        if right is not None:
            tile = work.tiles_q - 1 - tile
        return tile, head


@gluon.jit
def packed_tile(index, segments, work):
    """As ``tile_at`` of a packed call whose tiles have an order: each for all heads."""
    entry = gl.load(segments.order + index // work.heads)
    batch = entry // work.tiles_q
    return entry - batch * work.tiles_q, batch * work.heads + index % work.heads


@gluon.jit
def span_of(top, bottom, work, left, right, block: gl.constexpr):
    """[first, last): the keys that places ``top`` to ``bottom`` see, from the border of a tile; never none."""
    first, last = top * 0, top * 0 + work.kv_len
    if left is not None:
        first = gl.maximum(top - left, 0) // block * block
    if right is not None:
        last = gl.minimum(bottom + right + 1, work.kv_len)
    first = gl.minimum(first, (work.kv_len - 1) // block * block)
    return first, gl.maximum(last, first + 1)


@gluon.jit
def reach(top, work, left, right, row: gl.constexpr, heads: gl.constexpr = 1, rows: gl.constexpr = ROWS):
    """What each of so many ``rows`` from place ``top`` on sees, as [lo, hi), and what all of them see. ``heads``: of
    which each place has a row."""
    place = top + gl.arange(0, rows, row) // heads
    lo, hi = place * 0, place * 0 + work.kv_len
    all_lo, all_hi = top * 0, top * 0 + work.kv_len
    if left is not None:
        lo, all_lo = place - left, top + (rows - 1) // heads - left
    if right is not None:
        hi = gl.minimum(place + right + 1, work.kv_len)
        all_hi = gl.minimum(top + right + 1, work.kv_len)
    return (lo, hi), all_lo, all_hi


@gluon.jit
def packed_span(span, segments, batch, top, work, rows: gl.constexpr, block: gl.constexpr):
    """Of the span of so many ``rows`` from ``top`` on the tiles that lie in one of their ranges; never none."""
    first, last = span
    start, end = top * 0 + work.kv_len, top * 0
    tiles = gl.cdiv(work.q_len, ROWS)
    for group in gl.static_range(rows // ROWS):
        tile = top // ROWS + group
        at = segments.summaries + (batch * tiles + tile) * SUMMARY
        start = gl.minimum(start, gl.load(at, mask=tile < tiles, other=0x7FFFFFFF))
        end = gl.maximum(end, gl.load(at + 1, mask=tile < tiles, other=0))
    first = gl.minimum(gl.maximum(first, start // block * block), (work.kv_len - 1) // block * block)
    return first, gl.maximum(gl.minimum(last, end), first + 1)


@gluon.jit
def packed_reach(reached, segments, head, top, work, row: gl.constexpr):
    """What ``reach`` gives of the rows from ``top`` on, within their ranges, and what these ranges hold besides: where
    that is other segments, no column is seen by all rows. head: that and the batch entry as one number."""
    limits, all_lo, all_hi = reached
    lo, hi = limits
    batch = (head // work.heads).to(gl.int64)
    i, tiles, tile = top + gl.arange(0, ROWS, row), gl.cdiv(work.q_len, ROWS), top // ROWS
    ranges = segments.ranges + batch * work.q_len * 2
    lo = gl.maximum(lo, gl.load(ranges + i * 2, mask=i < work.q_len, other=0))
    hi = gl.minimum(hi, gl.load(ranges + i * 2 + 1, mask=i < work.q_len, other=0))
    of_tile = segments.summaries + (batch * tiles + tile) * SUMMARY
    all_lo = gl.maximum(all_lo, gl.load(of_tile + 2, mask=tile < tiles, other=0))
    all_hi = gl.minimum(all_hi, gl.load(of_tile + 3, mask=tile < tiles, other=0))
    mixed = gl.load(of_tile + 4, mask=tile < tiles, other=0) != 0
    own_firsts, firsts = segments.own_firsts + batch * work.q_len, segments.firsts + batch * work.kv_len
    others = OtherSegments(own_firsts, firsts, top, mixed, work.q_len, work.kv_len)
    return (lo, hi), gl.where(mixed, work.kv_len, all_lo), all_hi, others


@gluon.jit
def only_seen(x, hidden, start, cols, limits, others, row: gl.constexpr):
    """A tile x of pairs, whose columns begin at ``start``, and ``hidden`` at those outside of each row's [lo, hi) or of
    other segments."""
    x = gl.where(seen_pairs(start, cols, limits), x, hidden)
    if others is not None:
        x = of_one_segment(x, hidden, start, cols, others, row)
    return x


@gluon.jit
def of_one_segment(x, hidden, start, cols, others, row: gl.constexpr):
    """As ``only_seen``, by segments: where their ids come first. Numbers leave the branch, since what is true of each
    pair would take a register when it does."""
    if others.mixed:
        i, j = others.top + gl.arange(0, ROWS, row), start + cols
        own = gl.load(others.own_firsts + i, mask=i < others.q_len, other=0)
        first = gl.load(others.firsts + j, mask=j < others.kv_len, other=-1)
        x = gl.where(own[:, None] == first[None, :], x, hidden)
    return x


@gluon.constexpr_function
def box_of(rows, columns, rank):
    """The extents of such a box."""
    return [1] * (rank - 3) + [rows, 1, columns]


@gluon.jit
def boxed(tile, layout: gl.constexpr):
    """A tile in shared memory as the box (1, rows, 1, columns) that the copy engine moves, or (1, 1, rows, 1, columns)
    where the layout has five extents."""
    if _OLD:
        return tile._reinterpret(tile.dtype, box_of(tile.shape[0], tile.shape[1], layout.rank), layout)
    else:
        return tile.reinterpret(tile.dtype, box_of(tile.shape[0], tile.shape[1], layout.rank), layout)


@gluon.jit
def seen_pairs(start, cols, limits):
    """Which of the columns from ``start`` on lie in each row's [lo, hi)."""
    lo, hi = limits
    # Bits 1 and 2 of a column tell lanes apart, the others are known when this is compiled: compared apart, columns are
    # immediate operands, and no registers that are kept throughout the loop.
    lane, known = (cols & 6)[None, :], (cols & 249)[None, :]
    return (known >= (lo - start)[:, None] - lane) & (known < (hi - start)[:, None] - lane)
