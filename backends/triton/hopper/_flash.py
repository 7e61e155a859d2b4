"""The kernel of attention for Hopper: warps that copy, warps that compute (Shah et al. 2024, FlashAttention-3).

One warp, the producer, has the copy engine bring tiles of queries, keys and values to shared memory. ``consumers``
groups of four warps own 64 queries each. Scores of keys i and products with values i - 1 are issued to the matrix unit
together, and the maxima of the scores are found beside the products; the weights come after these, in the registers of
the weights that they have read. Groups take turns (``pingpong``), so that the weights of one are computed beside the
products of the others.

Keys i and values i - 1 arrive under one barrier, as unit i of a walk over n tiles: unit 0 is keys alone, unit n values
alone. Chunks of keys (``lib/split_kv.py``) do not end the walk: the first scores of a chunk are issued beside the last
products of the one before, whose state is then merged with the total row's, and the chunk's first product begins its
sum anew. The row's state stays in registers, two accumulators beside one tile of scores; at head dimensions beyond 128
the compiler moves it to local memory, which is touched where chunks meet and nowhere else.

Arithmetic and the order of sums are those of ``gpu/attention.py`` with the same block_kv and chunk: ``row_max``,
``lane_sums``, ``origin``. A row's bits are the same whichever of the two computes it.
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
    acquire,
    await_full,
    by_row,
    dots_of,
    each_at,
    finished,
    head_buffers,
    load_head,
    only_seen,
    packed_reach,
    packed_span,
    packed_tile,
    pieces_of,
    products_of,
    reach,
    ring_of,
    span_of,
    store_head,
    tanh,
    tile_at,
    zero_sums,
)
from portakern.backends.triton.lib.gluon_sequences import (
    SequenceSchedule,
    claim_tile,
    claimed_tile,
    scheduled_tiles,
    sequence_row,
)
from portakern.backends.triton.lib.tma import IN_L2, TOGETHER

AT_A_TIME, CACHED = gl.constexpr(TOGETHER), gl.constexpr(IN_L2)


class TileSchedule(NamedTuple):
    """The tiles of a call. ``tiles``: of all heads; ``ahead``: how many of them are taken from the first on, the others
    from the last on (see ``following``); ``tiles_q``: of one head; ``interleaved_heads``: heads whose tiles are taken
    in turn, the last queries first where these see most keys. Of packed sequences, what stands between ``tiles_q`` and
    ``chunk`` is one sequence's, whose first query, key and tile are ``q_start``, ``kv_start`` and ``first``;
    ``tokens``: queries of all sequences."""

    tiles: int
    ahead: int
    tiles_q: int
    interleaved_heads: int
    heads: int
    group: int
    all_heads: int
    q_len: int
    kv_len: int
    chunk: int
    q_start: Any = None
    kv_start: Any = None
    first: Any = None
    tokens: Any = None


class QkvInputs(NamedTuple):
    """The pieces of q, k and v, described, (batch, length, heads, d)."""

    q: Any
    k: Any
    v: Any


class LogSums(NamedTuple):
    """Where lse and lse_low go, each None where nobody wants it."""

    lse: Any
    low: Any


class Outputs(NamedTuple):
    """The pieces of o, described, and where lse and lse_low go, each None where nobody wants it."""

    o: Any
    lse: Any
    low: Any


class OtherArrays(NamedTuple):
    """Of a call beside q, k, v and o, each None where it is absent. lse and low are no group of their own: Triton 3.6
    takes no None within a group of a group."""

    lse: Any
    low: Any
    segments: Any


class Buffers(NamedTuple):
    """Tiles in shared memory, of each piece of a head: of the groups' queries and results, and a ring's of keys and
    values."""

    q: Any
    k: Any
    v: Any
    o: Any


class PingPong(NamedTuple):
    """Barriers by which groups take turns: the one that this group waits at, and the one where the next group does."""

    own: Any
    other: Any


class KeyLimits(NamedTuple):
    """What rows see of the keys: ``limits``, each its own [lo, hi), and [all_lo, all_hi), what all of them see;
    ``others``: what these hold of other segments, None of a call without segments."""

    limits: Any
    all_lo: Any
    all_hi: Any
    others: Any = None


@gluon.jit
def sequence_at(index, work, sequences):
    """The schedule of the ``index``-th tile's sequence, which is taken as a batch entry is."""
    row = sequence_row(index, sequences, work.heads)
    return TileSchedule(
        work.tiles, work.ahead, row.tiles, row.width, work.heads, work.group, work.heads, row.length,
        row.other_length, work.chunk, row.start, row.other_start, row.first * work.heads, work.tokens,
    )  # fmt: skip


@gluon.jit
def place_at(index, work, right, segments):
    """(tile of queries, batch entry and head as one number) of the ``index``-th tile."""
    if work.first is not None:
        return tile_at(index - work.first, work, right)
    elif segments is None:
        return tile_at(index, work, right)
    else:
        return packed_tile(index, segments, work)


@gluon.jit
def queries_of(head, work):
    """Where the copy engine finds a tile's queries, as ``load_head`` takes it."""
    if work.q_start is None:
        return head // work.heads
    else:
        return work.q_start + work.q_len, work.q_len


@gluon.jit
def keys_of(head, work):
    """Where the copy engine finds a tile's keys, as ``load_head`` takes it."""
    if work.kv_start is None:
        return head // work.heads
    else:
        return work.kv_start + work.kv_len, work.kv_len


@gluon.jit
def line_of(head, work):
    """Where lse of a head of a batch entry, or of one of a sequence, begins."""
    if work.q_start is None:
        return head.to(gl.int64) * work.q_len
    else:
        return head.to(gl.int64) * work.tokens + work.q_start


@gluon.jit
def following(index, back, work, left, right, segments):
    """The tile that a program takes next, and whether it counts ``back`` from the last one.

    Where some tiles see more keys than others, a program takes them by pairs, the i-th and the i-th from the end, which
    together see as much as any other pair: so programs that stay are done together, with nothing to ask each other.
    Tiles of a packed call are in order of what they see (``lib.segments.longest_first``): a program takes one of each
    round, and who has the i-th of a round has the i-th from the end of the next.
    """
    if segments is not None:
        return index + 2 * (gl.num_programs(0) - index % gl.num_programs(0)) - 1, back
    elif left is None and right is None:
        return index + gl.num_programs(0), back
    else:
        return work.tiles - 1 - index + back * gl.num_programs(0), 1 - back


@gluon.jit
def there_is(index, back, work, sequences):
    """Whether a program has this tile to do."""
    if sequences is not None:
        return index < work.tiles
    else:
        return (index < work.ahead) != (back == 1)


@gluon.jit
def row_max(s, row: gl.constexpr):
    """As ``row_max`` of the portable kernel."""
    rows: gl.constexpr = s.shape[0]
    eights: gl.constexpr = s.shape[1] // 8
    chains: gl.constexpr = eights if eights < 4 else 4
    s = gl.reshape(s, [rows, chains, eights // chains, 4, 2])
    return gl.convert_layout(gl.max(gl.max(gl.max(gl.max(s, 2), 3), 1), 1), row)


@gluon.jit
def lane_sums(p):
    """As ``lane_sums`` of the portable kernel."""
    rows: gl.constexpr = p.shape[0]
    eights: gl.constexpr = p.shape[1] // 8
    chains: gl.constexpr = eights if eights < 4 else 4
    p = gl.reshape(p, [rows, chains, eights // chains, 4, 2])
    return gl.sum(gl.sum(gl.sum(p, 2), 3), 1)


@gluon.jit
def column_of(alpha, tile):
    """A number for each row, as a column of the tile's."""
    return gl.convert_layout(alpha, gl.SliceLayout(1, tile.type.layout))[:, None]


@gluon.jit
def beside(alpha, l):
    """A number for each row, as it lies beside the sums of the row's lanes."""
    return column_of(alpha, l).broadcast_to(l.shape)


@gluon.jit
def seen_scores(s, start, cols, band, scores):
    """Scores from dots: capped, and -inf outside [lo, hi) unless every row of the tile sees all of it, and in other
    segments."""
    if scores.pre is not None:
        s = s * scores.pre
    if scores.softcap is not None:
        s = tanh(s)
    if (start < band.all_lo) | (start + s.shape[1] > band.all_hi):
        s = only_seen(s, float("-inf"), start, cols, band.limits, band.others, by_row(s.shape[1]))
    return s


@gluon.jit
def origin(m, scores):
    """As ``origin`` of ``lib/split_kv.py``."""
    factor = gl.where(gl.abs(m) < scores.beyond, scores.rate, scores.octave)
    return factor, gl.where(m == float("-inf"), 0.0, m * factor)


@gluon.jit
def shrunk(m, under):
    """As ``shrunk`` of ``lib/split_kv.py``, with an instruction that is never fused for the selection there."""
    factor, offset = under
    before = gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [m, factor], gl.float32, is_pure=True, pack=1
    )
    return gl.exp2(before - offset)


@gluon.jit
def log_sum(l, m, scores):
    """As ``log_sum`` of ``lib/split_kv.py``, with an instruction that is never fused for the selection there."""
    factor, offset = origin(m, scores)
    exact = factor == scores.rate
    of, log = gl.where(exact, offset, m), gl.log(l)
    natural = gl.where(exact, scores.natural, scores.unit)
    product = gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [of, natural], gl.float32, is_pure=True, pack=1
    )
    rest = gl.fma(of, gl.where(exact, scores.natural_low, scores.unit_low), gl.fma(of, natural, -product))
    total = product + log
    added = total - product
    rest += (product - (total - added)) + (log - added)
    rest = gl.where(gl.abs(total) < float("inf"), rest, 0.0)
    high = total + rest
    return high, gl.where(gl.abs(high) < float("inf"), rest - (high - total), 0.0)


@gluon.jit
def store_log_sum(lse, low, at, state, scores, ok):
    """Write lse and lse_low of rows to their places, each unless it is None."""
    if lse is not None or low is not None:
        l, m = state
        total, rest = log_sum(l, m, scores)
        if lse is not None:
            gl.store(lse + at, total, mask=ok)
        if low is not None:
            gl.store(low + at, rest, mask=ok)


@gluon.jit
def risen(s, m, scores, row: gl.constexpr):
    """(the maxima of rows with a tile of scores more, their origin, the factor alpha of what stood under m)."""
    m_new = gl.maximum(m, row_max(s, row))
    under = origin(m_new, scores)
    return m_new, under, shrunk(m, under)


@gluon.jit
def weights_under(s, under):
    """As ``weights_under`` of the portable kernel."""
    factor, offset = under
    return gl.exp2(gl.fma(s, factor[:, None].broadcast_to(s.shape), (-offset)[:, None].broadcast_to(s.shape)))


@gluon.jit
def merge(total, part, scores):
    """As ``merge`` of ``lib/split_kv.py``."""
    acc, l, m = total
    acc_part, l_part, m_part = part
    m_new = gl.maximum(m, m_part)
    under = origin(m_new, scores)
    alpha, beta = shrunk(m, under), shrunk(m_part, under)
    merged = ()
    for n in gl.static_range(len(acc)):
        a, b = column_of(alpha, acc[n]), column_of(beta, acc[n])
        merged = merged + (gl.fma(acc[n], a.broadcast_to(acc[n].shape), acc_part[n] * b),)  # type: ignore[assignment]
    return merged, gl.fma(l, alpha, l_part * beta), m_new


@gluon.jit
def scaled_pieces(acc, alpha):
    """Sums of each piece, each row by its own factor."""
    found = ()
    for n in gl.static_range(len(acc)):
        found = found + (acc[n] * column_of(alpha, acc[n]),)  # type: ignore[assignment]
    return found


@gluon.jit
def at_border(opens, total, part, alpha, opened, start, scores, plan: gl.constexpr):
    """(total, acc, first key of the chunk): a chunk that is done (``opens``: the next one has begun) is merged into the
    total, and its accumulator not set back, since the next product writes it anew; else the accumulator is scaled."""
    acc, l, m = part
    if opens:
        total = merge(total, (acc, gl.convert_layout(gl.sum(l, 1), by_row(plan.block_kv)), m), scores)
        opened = start
    else:
        acc = scaled_pieces(acc, alpha)
    return total, acc, opened


@gluon.jit
def wait_pingpong(handoff, pingpong, GROUP: gl.constexpr, plan: gl.constexpr):
    """Wait until the group before has issued its products."""
    if plan.pingpong:
        mbarrier.wait(pingpong.own, (handoff & 1) ^ (1 if GROUP == 0 else 0))


@gluon.jit
def signal_pingpong(pingpong, plan: gl.constexpr):
    """Let the next group issue its products."""
    if plan.pingpong:
        mbarrier.arrive(pingpong.other, count=1)


@gluon.jit
def first_dots(handoff, unit, q, tiles, ring, pingpong, GROUP: gl.constexpr, plan: gl.constexpr):
    """The products of queries and the first tile of keys, with nothing beside them."""
    block: gl.constexpr = plan.block_kv
    zeros = gl.zeros([ROWS, block], gl.float32, accumulator(block))
    stage = await_full(ring, unit)
    wait_pingpong(handoff, pingpong, GROUP, plan)
    dots = dots_of(q, tiles.k, stage, zeros)
    signal_pingpong(pingpong, plan)
    s = warpgroup_mma_wait(0, deps=[dots])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return s


@gluon.jit
def last_products(p16, state, total, grows, unit, tiles, ring, scores, plan: gl.constexpr):
    """The state (acc, l, m) with the last tile's products, which start the accumulator unless it ``grows``."""
    acc, l, m = state
    stage = unit % plan.stages
    products = products_of(p16, tiles.v, stage, acc, grows)
    l_row = gl.convert_layout(gl.sum(l, 1), by_row(plan.block_kv))
    acc = finished(products)
    mbarrier.arrive(ring.empty.index(stage), count=1)
    if plan.chunked:
        acc, l_row, m = merge(total, (acc, l_row, m), scores)
    return acc, l_row, m


@gluon.jit
def attend(handoff, unit, span, q, q_empty, tiles, ring, pingpong, band, scores_chunk, GROUP: gl.constexpr,
           plan: gl.constexpr):  # fmt: skip
    """The state (acc, l, m) of the keys of a span [first, last), and what ``handoff`` and ``unit`` are after them. q is
    given back when the last scores are there, unless o is to take its place."""
    weights: gl.constexpr = gl.DotOperandLayout(0, accumulator(plan.block_dv), 2)
    row_s: gl.constexpr = by_row(plan.block_kv)
    block: gl.constexpr = plan.block_kv
    stages: gl.constexpr = plan.stages
    dtype: gl.constexpr = q[0].dtype
    first, last = span
    scores, chunk = scores_chunk
    cols = gl.arange(0, block, gl.SliceLayout(0, accumulator(block)))
    zeros = gl.zeros([ROWS, block], gl.float32, accumulator(block))
    nothing = gl.full([ROWS], float("-inf"), gl.float32, row_s)
    acc = zero_sums(plan.block_dv, plan.more_dv)
    total = acc, gl.zeros([ROWS], gl.float32, row_s), nothing
    opened = first  # the first key of the chunk that acc, l and m are of
    border = first // chunk * chunk + chunk  # the first key of the next one: counted, since a division takes 200 cycles
    s = first_dots(handoff, unit, q, tiles, ring, pingpong, GROUP, plan)
    handoff += 1
    s = seen_scores(s, first, cols, band, scores)
    m, under, _ = risen(s, nothing, scores, row_s)
    p = weights_under(s, under)
    l = lane_sums(p)
    p16 = gl.convert_layout(p.to(dtype), weights)
    unit += 1
    await_full(ring, unit)
    for start in range(first + block, last, block):
        wait_pingpong(handoff, pingpong, GROUP, plan)
        dots = dots_of(q, tiles.k, unit % stages, zeros)
        products = products_of(p16, tiles.v, unit % stages, acc, start - block > opened)
        signal_pingpong(pingpong, plan)
        s = warpgroup_mma_wait(len(products), deps=[dots])
        handoff += 1
        s = seen_scores(s, start, cols, band, scores)
        m_before = m
        if plan.chunked:
            opens = start == border
            border += gl.where(opens, chunk, 0)
            m = gl.where(opens, nothing, m)
        m, under, alpha = risen(s, m, scores, row_s)
        # The assembler moves the wait for the products before the maxima, unless a basic block ends between the two:
        # this wait ends one. The weights come after it, and take the place of those that the products have read.
        await_full(ring, unit + 1)
        acc = finished(products)
        mbarrier.arrive(ring.empty.index(unit % stages), count=1)
        if plan.chunked:
            total, acc, opened = at_border(opens, total, (acc, l, m_before), alpha, opened, start, scores, plan)
        else:
            acc = scaled_pieces(acc, alpha)
        p = weights_under(s, under)
        l = gl.fma(l, beside(alpha, l), lane_sums(p))
        p16 = gl.convert_layout(p.to(dtype), weights)
        unit += 1
    if not plan.o_in_q:
        mbarrier.arrive(q_empty, count=1)
    grows = (last - 1) // block * block > opened
    state = last_products(p16, (acc, l, m), total, grows, unit, tiles, ring, scores, plan)
    return state, handoff, unit + 1


@gluon.jit
def consumer(GROUP: gl.constexpr, tiles, q_ring, ring, pingpong, out, softmax, packed, work, plan: gl.constexpr):
    """Four warps that own 64 queries of each tile of this program. packed: (segments, sequences)."""
    row_s: gl.constexpr = by_row(plan.block_kv)
    block: gl.constexpr = plan.block_kv
    scores = softmax.scores
    left, right = softmax.window
    segments, sequences = packed
    before = work.kv_len - work.q_len  # keys that stand before query 0
    q = each_at(tiles.q, GROUP)
    unit = 0
    handoff = 0
    count = 0
    index = gl.program_id(0)
    back = 0
    while there_is(index, back, work, sequences):
        own = work if sequences is None else sequence_at(index, work, sequences)
        tile, head = place_at(index, own, right, segments)
        if sequences is not None:
            before = own.kv_len - own.q_len
        top = tile * (ROWS * plan.consumers)
        mine_top = top + GROUP * ROWS
        bottom = gl.minimum(top + ROWS * plan.consumers, own.q_len) - 1
        span = span_of(top + before, bottom + before, own, left, right, block)
        limits, all_lo, all_hi = reach(mine_top + before, own, left, right, row_s)
        others = None
        if segments is not None:
            b = head // work.heads
            span = packed_span(span, segments, b, top, work, ROWS * plan.consumers, block)
            reached = limits, all_lo, all_hi
            limits, all_lo, all_hi, others = packed_reach(reached, segments, head, mine_top, work, row_s)

        mbarrier.wait(q_ring.full.index(GROUP), count & 1)
        state, handoff, unit = attend(handoff, unit, span, q, q_ring.empty.index(GROUP), tiles, ring, pingpong,
                                      KeyLimits(limits, all_lo, all_hi, others), (scores, work.chunk), GROUP,
                                      plan)  # fmt: skip
        acc, l, m = state
        results = scaled_pieces(acc, 1.0 / gl.where(l == 0.0, 1.0, l))
        o_tiles = q if plan.o_in_q else each_at(tiles.o, GROUP)
        tma.store_wait(0)
        for n in gl.static_range(len(results)):
            o_tiles[n].store(results[n].to(q[0].dtype))
        fence_async_shared()
        store_head(out.o, queries_of(head, own), mine_top, head % work.heads, o_tiles)
        if plan.o_in_q:
            tma.store_wait(0)
            mbarrier.arrive(q_ring.empty.index(GROUP), count=1)
        i = mine_top + gl.arange(0, ROWS, row_s)
        store_log_sum(out.lse, out.low, line_of(head, own) + i, (l, m), scores, i < own.q_len)
        count += 1
        if sequences is not None:
            index = claimed_tile(count, sequences, q_ring, GROUP)
        else:
            index, back = following(index, back, work, left, right, segments)
    tma.store_wait(0)


@gluon.jit
def fetch_first(unit, first, at, k, tiles, ring, plan: gl.constexpr):
    """Begin to copy the first keys of a walk, those of a place (batch entry, head): unit 0."""
    b, head = at
    stage, full = acquire(ring, unit, plan.block_kv * (plan.block_d + plan.more_d) * 2)
    load_head(k, b, first, head, full, each_at(tiles.k, stage))


@gluon.jit
def fetch_others(unit, first, last, at, k, v, tiles, ring, plan: gl.constexpr):
    """Begin to copy, as there is room, the units 1 to n of a walk over [first, last). What ``unit`` is after them."""
    block: gl.constexpr = plan.block_kv
    columns: gl.constexpr = plan.block_d + plan.more_d
    columns_dv: gl.constexpr = plan.block_dv + plan.more_dv
    b, head = at
    for j in range(first + block, last, block):
        stage, full = acquire(ring, unit, block * (columns + columns_dv) * 2)
        load_head(k, b, j, head, full, each_at(tiles.k, stage))
        load_head(v, b, j - block, head, full, each_at(tiles.v, stage))
        unit += 1
    stage, full = acquire(ring, unit, block * columns_dv * 2)
    load_head(v, b, (last - 1) // block * block, head, full, each_at(tiles.v, stage))
    return unit + 1


@gluon.jit
def producer(tiles, q_ring, ring, inputs, window, packed, work, plan: gl.constexpr):
    """One warp that fetches what the consumers take, in their order."""
    block: gl.constexpr = plan.block_kv
    consumers: gl.constexpr = plan.consumers
    left, right = window
    segments, sequences = packed
    before = work.kv_len - work.q_len
    unit = 0
    count = 0
    index = gl.program_id(0)
    back = 0
    while there_is(index, back, work, sequences):
        own = work if sequences is None else sequence_at(index, work, sequences)
        tile, head = place_at(index, own, right, segments)
        if sequences is not None:
            before = own.kv_len - own.q_len
        top = tile * (ROWS * plan.consumers)
        bottom = gl.minimum(top + ROWS * plan.consumers, own.q_len) - 1
        span = span_of(top + before, bottom + before, own, left, right, block)
        b = keys_of(head, own)
        if segments is not None:
            span = packed_span(span, segments, b, top, work, ROWS * plan.consumers, block)
        first, last = span
        h = head % work.heads
        kv_h = h // work.group
        # The first keys have room before the queries of the tile before are done with.
        fetch_first(unit, first, (b, kv_h), inputs.k, tiles, ring, plan)
        for g in gl.static_range(consumers):
            mbarrier.wait(q_ring.empty.index(g), (count & 1) ^ 1)
            mbarrier.expect(q_ring.full.index(g), ROWS * (plan.block_d + plan.more_d) * 2)
            load_head(inputs.q, queries_of(head, own), top + g * ROWS, h, q_ring.full.index(g), each_at(tiles.q, g))
        unit = fetch_others(unit + 1, first, last, (b, kv_h), inputs.k, inputs.v, tiles, ring, plan)
        count += 1
        if sequences is not None:
            index = claim_tile(count, sequences, q_ring, work.tiles)
        else:
            index, back = following(index, back, work, left, right, segments)


@gluon.jit
def by_roles(inputs, out, packed, softmax, work, plan: gl.constexpr):
    """o, and lse and lse_low, by a producer and its consumers. packed: (segments, sequences), each None where there are
    none."""
    dtype: gl.constexpr = inputs.q[0].dtype
    q_tiles = head_buffers(dtype, plan.consumers, ROWS, plan.block_d, plan.more_d)
    k_tiles = head_buffers(dtype, plan.stages, plan.block_kv, plan.block_d, plan.more_d)
    v_tiles = head_buffers(dtype, plan.stages, plan.block_kv, plan.block_dv, plan.more_dv)
    o_tiles = q_tiles
    if not plan.o_in_q:
        o_tiles = head_buffers(dtype, plan.consumers, ROWS, plan.block_dv, plan.more_dv)
    tiles = Buffers(q_tiles, k_tiles, v_tiles, o_tiles)
    q_ring, ring = ring_of(plan.consumers, 1), ring_of(plan.stages, plan.consumers)
    consumers: gl.constexpr = plan.consumers
    pingpong = gl.allocate_shared_memory(gl.int64, [consumers, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(consumers):
        mbarrier.init(pingpong.index(i), count=1)
    fence_async_shared()
    first = PingPong(pingpong.index(0), pingpong.index(1))
    last = PingPong(pingpong.index(consumers - 1), pingpong.index(0))
    # A tuple that is given a name loses its constexprs: the groups are written out.
    if plan.consumers == 2:
        gl.warp_specialize([
            (consumer, (0, tiles, q_ring, ring, first, out, softmax, packed, work, plan)),
            (consumer, (1, tiles, q_ring, ring, last, out, softmax, packed, work, plan)),
            (producer, (tiles, q_ring, ring, inputs, softmax.window, packed, work, plan)),
        ], [4, 1], [plan.registers, 24])  # fmt: skip
    else:
        second = PingPong(pingpong.index(1), pingpong.index(2))
        gl.warp_specialize([
            (consumer, (0, tiles, q_ring, ring, first, out, softmax, packed, work, plan)),
            (consumer, (1, tiles, q_ring, ring, second, out, softmax, packed, work, plan)),
            (consumer, (2, tiles, q_ring, ring, last, out, softmax, packed, work, plan)),
            (producer, (tiles, q_ring, ring, inputs, softmax.window, packed, work, plan)),
        ], [4, 4, 1], [plan.registers, plan.registers, 24])  # fmt: skip


@gluon.jit(do_not_specialize=["ahead", "interleaved_heads", "group", "chunk"])
def attention_flash_kernel(
    q, k, v, segments, o, log_sums, softmax, ahead, interleaved_heads, group, chunk, plan: gl.constexpr
):
    """o, and lse and lse_low unless these are None. q, k, v, o: described, (batch, length, heads, d). segments: None of
    a call that has none. From ``ahead`` on: of ``TileSchedule``, numbers that are handed over one by one, as in a tuple
    Triton would compile the kernel for what divides them."""
    batch, q_len, heads, _ = q.shape
    tiles_q, all_heads = gl.cdiv(q_len, ROWS * plan.consumers), batch * heads
    work = TileSchedule(
        tiles_q * all_heads, ahead, tiles_q, interleaved_heads, heads, group, all_heads, q_len, k.shape[1], chunk,
        None, None, None, None,
    )  # fmt: skip
    inputs, out = QkvInputs((q,), (k,), (v,)), Outputs((o,), log_sums.lse, log_sums.low)
    by_roles(inputs, out, (segments, None), softmax, work, plan)


@gluon.jit
def order_of(tiles, all_heads, group, kv_len, segments, window, plan: gl.constexpr):
    """``ahead`` and ``interleaved_heads`` of ``TileSchedule``."""
    left, right = window
    ahead, interleaved_heads = tiles, 1
    if segments is None and (left is not None or right is not None):
        ahead = gl.where(gl.num_programs(0) < tiles, gl.cdiv(tiles, 2), tiles)
    if right is not None:
        keys: gl.constexpr = CACHED // (2 * (plan.block_d + plan.more_d + plan.block_dv + plan.more_dv))
        cached = gl.maximum(gl.minimum(keys * group // kv_len, AT_A_TIME), 1)
        interleaved_heads = gl.cdiv(all_heads, gl.cdiv(all_heads, cached))
    return ahead, interleaved_heads


@gluon.jit(do_not_specialize=["chunk"])
def attention_flash_pieces_kernel(
    q, q_more, k, k_more, v, v_more, o, o_more, others, softmax, chunk, plan: gl.constexpr
):
    """As ``attention_flash_kernel``, of heads in two pieces: q_more, k_more, v_more and o_more describe the columns
    after those of q, k, v and o, None where there are none. others: lse, low and segments."""
    lse, low, segments = others
    inputs = QkvInputs(pieces_of(q, q_more), pieces_of(k, k_more), pieces_of(v, v_more))
    batch, q_len, heads, _ = q.shape
    _, kv_len, kv_heads, _ = k.shape
    tiles_q, all_heads, group = gl.cdiv(q_len, ROWS * plan.consumers), batch * heads, heads // kv_heads
    tiles = tiles_q * all_heads
    ahead, interleaved_heads = order_of(tiles, all_heads, group, kv_len, segments, softmax.window, plan)
    work = TileSchedule(
        tiles, ahead, tiles_q, interleaved_heads, heads, group, all_heads, q_len, kv_len, chunk, None, None, None, None
    )
    by_roles(inputs, Outputs(pieces_of(o, o_more), lse, low), (segments, None), softmax, work, plan)


class SequenceArrays(NamedTuple):
    """Of a call of packed sequences beside q, k, v and o: lse and low, each None where it is absent, and the members of
    ``SequenceSchedule``."""

    lse: Any
    low: Any
    schedule: Any
    claims: Any


@gluon.jit(do_not_specialize=["tokens"])
def varlen_attention_flash_kernel(
    q, q_more, k, k_more, v, v_more, o, o_more, others, softmax, tokens, plan: gl.constexpr
):
    """As ``attention_flash_pieces_kernel``, of packed sequences: q, k, v and o are described as sequences of rows (see
    ``lib.tma.ragged``). others: ``SequenceArrays``. tokens: queries of all sequences."""
    lse, low, schedule, claims = others
    inputs = QkvInputs(pieces_of(q, q_more), pieces_of(k, k_more), pieces_of(v, v_more))
    sequences = SequenceSchedule(schedule, claims)
    heads, kv_heads = q.shape[3], k.shape[3]
    tiles = scheduled_tiles(sequences, heads)
    work = TileSchedule(
        tiles, tiles, 0, 1, heads, heads // kv_heads, heads, 0, 0, 1, None, None, None, tokens
    )  # fmt: skip
    by_roles(inputs, Outputs(pieces_of(o, o_more), lse, low), (None, sequences), softmax, work, plan)
