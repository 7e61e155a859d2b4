"""Gradients of attention, from its inputs, o and lse, without the scores (Dao 2023, FlashAttention-2, algorithm 2).

    p_ij = exp(min(s_ij - lse_i, 0))    dp_ij = d_o_i . v_j    delta_i = d_o_i . o_i - d_lse_i
    d_bias_ij = p_ij (dp_ij - delta_i)    ds_ij = d_bias_ij cap'(t_ij)
    d_q_i = scale sum_j ds_ij k_j    d_k_j = scale sum_i ds_ij q_i    d_v_j = sum_i p_ij d_o_i
    d_sink = -sum_i exp(min(sink - lse_i, 0)) delta_i

with s_ij = cap(t_ij) - slope |distance_ij| + bias_ij, t = scale q.k and cap'(t) = 1 - tanh(t / c)^2 (1 without a
softcap); p and d_bias are 0 at masked pairs. lse is two numbers, lse and lse_low, and scores are kept in the unit of
the forward pass: so s - lse is what it was there, and p the weight that a key had, however large s is.

Every sum has one owner, so nothing is added atomically and a result has the same bits on every run. The kernel of the
statistics writes delta and lse. A program of the one of d_k and d_v owns block_kv keys of one key head and walks, head
by head of its group, the tiles of block_q queries that see them; one of d_q owns dq_block_q queries and walks tiles of
dq_block_kv keys; one of d_bias owns a block_q x block_kv tile of the bias and walks the axes along which the bias is
broadcast; one of d_sinks owns a head. The first three recompute p by ``weights`` and ds by ``score_gradients``. As in
the forward pass tiles that masks empty are not visited, and only those on an edge pay for masking.

A tile of scores is a b^T either way round: d_q has queries as rows; d_k and d_v have keys as rows, so that p^T and ds^T
are what the next dots take. ``lib.heads`` says what the groups hold in which the kernels take their numbers.

A module of its own: with the forward pass, whose walk over keys, scores and bias it takes, it would have 800 lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import AttentionGradientsConfig
from portakern.backends.triton.gpu.attention import head_dim_innermost, load_bias, over_keys, unbiased
from portakern.backends.triton.launch import (
    accumulator,
    cdiv,
    compiler_options,
    dot_precision,
    launch,
    refuse_common,
    shared_limit,
    tmem_columns,
    torch_dtype,
)
from portakern.backends.triton.layout import fresh
from portakern.backends.triton.lib.attention import (
    STATISTICS_AT_ONCE,
    key,
    padded,
    place_of_slopes,
    sink_gradient,
    slopes_of,
    statistics,
)
from portakern.backends.triton.lib.band import band, fold, inside, limits
from portakern.backends.triton.lib.heads import (
    AttentionExtents,
    AttentionPlan,
    Masks,
    PairMask,
    Scores,
    load_head,
    load_tile,
    lowered,
    precision_of,
    product,
    program,
    slope_of,
    strides_of,
)
from portakern.backends.triton.lib.segments import segment_ranges, within_ranges
from portakern.specs.attention import scale_of, sight

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


class OfQueries(NamedTuple):
    """What lies in memory of each query: its d_o, and what ``attention_vjp_statistics_kernel`` wrote."""

    d_o: Any
    shift: Any
    low: Any
    delta: Any


class KeyGradients(NamedTuple):
    """Where d_k and d_v go; None for one that nobody wants."""

    d_k: Any
    d_v: Any


class GradientWork(NamedTuple):
    """``tiles``: of a head; ``scale``: what a sum is multiplied by at last."""

    tiles: int
    scale: float


class BiasWork(NamedTuple):
    """Of a bias: the tiles of keys and of queries, its heads, and over how many batch entries and heads its gradient is
    summed."""

    tiles: int
    tiles_q: int
    heads: int
    sum_batches: int
    sum_heads: int


class Queries(NamedTuple):
    """The queries of one head with their d_o, as ``Keys`` has keys with their values; and the addresses of what
    ``attention_vjp_statistics_kernel`` wrote, one number a row."""

    q: Any
    q_s: Any
    d_ok: Any
    d_o: Any
    do_s: Any
    dv_ok: Any
    shift: Any
    low: Any
    delta: Any
    q_len: Any


@triton.jit
def weights(a, b, shift, low, bias, allowed, scores, start, block: tl.constexpr, plan: tl.constexpr, slope, position):
    """(p, t) of a tile of scores a b^T; ``allowed`` None: every pair is. ``shift`` + ``low``: lse in the scores' unit.
    The difference comes before the factor ``rate``, by which the largest scores would overflow. ``block`` columns from
    ``start`` on, ``slope``, ``position``: as ``lowered`` takes them; None twice for no slopes."""
    t = unbiased(a, b, scores, plan)
    s = t
    if scores.unit is not None:
        s = s * scores.unit
    if slope is not None:
        s = lowered(s, slope, position, start, block)
    if bias is not None:
        s = s + bias
    apart = tl.minimum((s - shift) - low, 0.0, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(apart * scores.rate)
    if allowed is not None:
        p = tl.where(allowed, p, 0.0)
    return p, t


@triton.jit
def score_gradients(p, t, a, b, delta, allowed, scores, plan: tl.constexpr):
    """(d_bias, ds) of a tile, whose dp is a b^T."""
    d_bias = p * (product(a, tl.trans(b), None, plan) - delta)
    ds = d_bias
    if scores.softcap is not None:
        ds = ds * (1.0 - t * t)
    if allowed is not None:  # once more: what a masked pair, or memory past an extent, holds may be NaN
        d_bias, ds = tl.where(allowed, d_bias, 0.0), tl.where(allowed, ds, 0.0)
    return d_bias, ds


@triton.jit
def seen(position, position_ok, pairs, edge: tl.constexpr):
    """Which pairs of a tile see each other, where there are segments or, with ``edge``, where a pair may lie outside
    [lo, hi). Triton 3.6 lets no function return None, so that a caller asks only then."""
    if pairs.segments is not None:
        at = pairs.segments + position.to(tl.int64) * pairs.segment_step
        allowed = tl.load(at, mask=position_ok, other=0)[None, :] == pairs.segment
        if edge:
            allowed = inside(position, pairs.lo, pairs.hi) & allowed
    else:
        allowed = inside(position, pairs.lo, pairs.hi)
    return allowed


@triton.jit
def visit_queries(state, own, queries, pairs, scores, first, last, edge: tl.constexpr, plan: tl.constexpr):
    """Add the queries from ``first`` to ``last`` to the state (dk, dv). ``edge``: a pair may lie outside [lo, hi)."""
    dk, dv = state
    k_tile, v_tile = own
    for start in range(first, last, plan.block_q):
        i = start + tl.arange(0, plan.block_q)
        i_ok, row = i < queries.q_len, i.to(tl.int64)
        q_tile = load_tile(queries.q + row[:, None] * queries.q_s, i_ok[:, None], queries.d_ok, edge, plan.ragged_d)
        d_o_tile = load_tile(
            queries.d_o + row[:, None] * queries.do_s, i_ok[:, None], queries.dv_ok, edge, plan.ragged_dv
        ).to(v_tile.dtype)
        bias_tile, allowed = None, None
        if pairs.bias is not None:
            bias_tile = load_bias(pairs, row[None, :], i_ok[None, :], edge, plan)
        if edge or pairs.segments is not None:
            allowed = seen(i, i_ok, pairs, edge)
        shift_i = load_tile(queries.shift + i, i_ok, i_ok, edge, False)[None, :]
        low_i = load_tile(queries.low + i, i_ok, i_ok, edge, False)[None, :]
        p, t = weights(k_tile, q_tile, shift_i, low_i, bias_tile, allowed, scores, start, plan.block_q, plan,
                       pairs.slope, pairs.position)  # fmt: skip
        if plan.want_v:
            dv = product(p.to(d_o_tile.dtype), d_o_tile, dv, plan)
        if plan.want_k:
            delta_i = load_tile(queries.delta + i, i_ok, i_ok, edge, False)[None, :]
            _, ds = score_gradients(p, t, v_tile, d_o_tile, delta_i, allowed, scores, plan)
            dk = product(ds.to(q_tile.dtype), q_tile, dk, plan)
    return dk, dv


@triton.jit
def attention_vjp_d_k_d_v_kernel(
    q, k, v, of_queries, masks, out, scores, window, work, extents, strides, plan: tl.constexpr
):
    """A tile of block_kv rows of d_k and of d_v, of those that ``plan`` wants."""
    heads, group, q_len, kv_len, d, dv, _ = extents
    d_o, shift, low, delta = of_queries
    bias, q_segments, kv_segments, _, kv_ranges, _, slopes = masks
    left, right = window
    q_b, q_s, q_h, q_d = strides.q
    do_b, do_s, do_h, do_d = strides.d_o
    bias_b, bias_h, bias_q, bias_s = strides.bias
    q_seg_b, q_seg_s = strides.q_segments
    kv_seg_b, kv_seg_s = strides.kv_segments
    kv_heads = heads // group
    tile, kv_head, batch = program(work.tiles, kv_heads)
    j = (tile * plan.block_kv + tl.arange(0, plan.block_kv))[:, None]
    j_ok, col = j < kv_len, j.to(tl.int64)
    k_tile = load_head(k, strides.k, batch, kv_head, col, j_ok, d, plan.block_d, plan.ragged_d)
    v_tile = load_head(v, strides.v, batch, kv_head, col, j_ok, dv, plan.block_dv, plan.ragged_dv)
    kv_segment = None
    if q_segments is not None:
        kv_segment = tl.load(kv_segments + batch * kv_seg_b + col * kv_seg_s, mask=j_ok, other=0)
        q_segments += batch * q_seg_b

    # Key j stands beside query j - (kv_len - q_len), and is seen from as far as queries see, the other way round.
    top = tile * plan.block_kv - (kv_len - q_len)
    bottom = top + tl.minimum(plan.block_kv, kv_len - tile * plan.block_kv) - 1
    span = band(top, bottom, right, left, q_len, plan.block_q)
    if kv_ranges is not None:
        span = within_ranges(span, kv_ranges, batch * kv_len + col, j_ok, q_len, plan.block_q)
    lo, hi = limits(j - (kv_len - q_len), right, left, q_len)

    dd, ddv = tl.arange(0, plan.block_d)[None, :], tl.arange(0, plan.block_dv)[None, :]
    d_ok, dv_ok = dd < d, ddv < dv
    dk_acc = tl.full([plan.block_kv, plan.block_d], 0.0, plan.acc_dtype)
    dv_acc = tl.full([plan.block_kv, plan.block_dv], 0.0, plan.acc_dtype)
    for head in range(kv_head * group, kv_head * group + group):
        q_of = q + (batch * q_b + head * q_h) + dd.to(tl.int64) * q_d
        do_of = d_o + (batch * do_b + head * do_h) + ddv.to(tl.int64) * do_d
        rows = (batch * heads + head) * q_len
        queries = Queries(q_of, q_s, d_ok, do_of, do_s, dv_ok, shift + rows, low + rows, delta + rows, q_len)
        bias_of = None
        if bias is not None:
            bias_of = bias + (batch * bias_b + head * bias_h) + col * bias_s
        slope, position = None, None
        if slopes is not None:
            slope, position = slope_of(slopes, head, scores), col - extents.first_place
        pairs = PairMask(j_ok, lo, hi, bias_of, bias_q, kv_segment, q_segments, q_seg_s, slope, position)
        state = dk_acc, dv_acc
        dk_acc, dv_acc = fold(visit_queries, state, (k_tile, v_tile), queries, pairs, scores, span, right, plan)

    at = (batch * kv_len + col) * kv_heads + kv_head
    if plan.want_k:
        tl.store(out.d_k + at * d + dd, (dk_acc * work.scale).to(out.d_k.dtype.element_ty), mask=j_ok & d_ok)
    if plan.want_v:
        tl.store(out.d_v + at * dv + ddv, dv_acc.to(out.d_v.dtype.element_ty), mask=j_ok & dv_ok)


@triton.jit
def visit_keys(dq, own, keys, pairs, scores, first, last, edge: tl.constexpr, plan: tl.constexpr):
    """Add the keys from ``first`` to ``last`` to dq. ``edge``: a pair may lie outside [lo, hi)."""
    q_tile, d_o_tile, shift_i, low_i, delta_i = own
    for start in range(first, last, plan.block_kv):
        j = start + tl.arange(0, plan.block_kv)
        j_ok, col = j < keys.kv_len, j.to(tl.int64)
        k_tile = load_tile(keys.k + col[:, None] * keys.k_s, j_ok[:, None], keys.d_ok, edge, plan.ragged_d)
        v_tile = load_tile(keys.v + col[:, None] * keys.v_s, j_ok[:, None], keys.dv_ok, edge, plan.ragged_dv)
        bias_tile, allowed = None, None
        if pairs.bias is not None:
            bias_tile = load_bias(pairs, col[None, :], j_ok[None, :], edge, plan)
        if edge or pairs.segments is not None:
            allowed = seen(j, j_ok, pairs, edge)
        p, t = weights(q_tile, k_tile, shift_i, low_i, bias_tile, allowed, scores, start, plan.block_kv, plan,
                       pairs.slope, pairs.position)  # fmt: skip
        _, ds = score_gradients(p, t, d_o_tile, v_tile, delta_i, allowed, scores, plan)
        dq = product(ds.to(k_tile.dtype), k_tile, dq, plan)
    return dq


@triton.jit
def attention_vjp_d_q_kernel(
    q, k, v, of_queries, masks, d_q, scores, window, work, extents, strides, plan: tl.constexpr
):
    """A tile of block_q rows of d_q."""
    _, right = window
    d_o, shift, low, delta = of_queries
    tile, head, batch = program(work.tiles, extents.heads)
    if right is not None:
        tile = work.tiles - 1 - tile  # the last queries may see most keys: start them first
    i = (tile * plan.block_q + tl.arange(0, plan.block_q))[:, None]
    i_ok, row = i < extents.q_len, i.to(tl.int64)
    q_tile = load_head(q, strides.q, batch, head, row, i_ok, extents.d, plan.block_d, plan.ragged_d)
    d_o_tile = load_head(d_o, strides.d_o, batch, head, row, i_ok, extents.dv, plan.block_dv, plan.ragged_dv)
    d_o_tile = d_o_tile.to(v.dtype.element_ty)
    at = (batch * extents.heads + head) * extents.q_len + row
    shift_i, delta_i = tl.load(shift + at, mask=i_ok, other=0.0), tl.load(delta + at, mask=i_ok, other=0.0)
    low_i = tl.load(low + at, mask=i_ok, other=0.0)

    acc = tl.full([plan.block_q, plan.block_d], 0.0, plan.acc_dtype)
    own = q_tile, d_o_tile, shift_i, low_i, delta_i
    place = tile, head, head // extents.group, batch
    operands = k, v, masks
    acc = over_keys(visit_keys, acc, own, place, operands, strides, scores, window, extents, plan)
    dd = tl.arange(0, plan.block_d)[None, :]
    at = ((batch * extents.q_len + row) * extents.heads + head) * extents.d + dd
    tl.store(d_q + at, (acc * work.scale).to(d_q.dtype.element_ty), mask=i_ok & (dd < extents.d))


@triton.jit
def of_one_segment(masks, strides, batch, row, row_ok, col, col_ok):
    """Which pairs of a tile have one segment: queries ``row``, a column of numbers, and keys ``col``, a row of them."""
    q_seg_b, q_seg_s = strides.q_segments
    kv_seg_b, kv_seg_s = strides.kv_segments
    q_segment = tl.load(masks.q_segments + batch * q_seg_b + row * q_seg_s, mask=row_ok, other=0)
    kv_segment = tl.load(masks.kv_segments + batch * kv_seg_b + col * kv_seg_s, mask=col_ok, other=0)
    return q_segment == kv_segment


@triton.jit
def attention_vjp_d_bias_kernel(
    q, k, v, of_queries, masks, d_bias, scores, window, work, extents, strides, plan: tl.constexpr
):
    """A tile of the bias gradient: the sum over ``sum_batches`` batch entries, ``sum_heads`` heads and, with
    ``one_row``, all queries, that share the bias."""
    heads, group, q_len, kv_len, d, dv, _ = extents
    d_o, shift, low, delta = of_queries
    bias, q_segments, _, _, kv_ranges, _, slopes = masks
    tiles, bias_tiles_q, bias_heads, sum_batches, sum_heads = work
    left, right = window
    bias_b, bias_h, bias_q, bias_s = strides.bias
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    bias_tile_q, bias_row = rest % bias_tiles_q, rest // bias_tiles_q
    bias_head, bias_batch = bias_row % bias_heads, bias_row // bias_heads
    j = tile * plan.block_kv + tl.arange(0, plan.block_kv)
    j_ok, col = j < kv_len, j.to(tl.int64)
    top = tile * plan.block_kv - (kv_len - q_len)
    bottom = top + tl.minimum(plan.block_kv, kv_len - tile * plan.block_kv) - 1
    first, _, _, last = band(top, bottom, right, left, q_len, plan.block_q)
    if not plan.one_row:  # its own queries, unless no key of the tile sees them
        first = tl.maximum(first, bias_tile_q * plan.block_q)
        last = tl.minimum(last, bias_tile_q * plan.block_q + plan.block_q)
    span = first, first, last, last

    acc = tl.full([plan.block_q, plan.block_kv], 0.0, plan.acc_dtype)
    for n in range(sum_batches * sum_heads):
        batch, head = (bias_batch + n // sum_heads).to(tl.int64), (bias_head + n % sum_heads).to(tl.int64)
        kv_head, key = head // group, col[:, None]
        k_tile = load_head(k, strides.k, batch, kv_head, key, j_ok[:, None], d, plan.block_d, plan.ragged_d)
        v_tile = load_head(v, strides.v, batch, kv_head, key, j_ok[:, None], dv, plan.block_dv, plan.ragged_dv)
        if kv_ranges is not None:
            first, _, _, last = within_ranges(span, kv_ranges, batch * kv_len + j, j_ok, q_len, plan.block_q)
        for start in range(first, last, plan.block_q):
            i = (start + tl.arange(0, plan.block_q))[:, None]
            i_ok, row, at = i < q_len, i.to(tl.int64), (batch * heads + head) * q_len + i
            q_tile = load_head(q, strides.q, batch, head, row, i_ok, d, plan.block_d, plan.ragged_d)
            d_o_tile = load_head(d_o, strides.d_o, batch, head, row, i_ok, dv, plan.block_dv, plan.ragged_dv)
            d_o_tile = d_o_tile.to(v_tile.dtype)
            lo, hi = limits(i + (kv_len - q_len), left, right, kv_len)
            allowed = inside(j, lo, hi) & i_ok
            if q_segments is not None:
                allowed &= of_one_segment(masks, strides, batch, row, i_ok, col[None, :], j_ok[None, :])
            shift_i, delta_i = tl.load(shift + at, mask=i_ok, other=0.0), tl.load(delta + at, mask=i_ok, other=0.0)
            low_i = tl.load(low + at, mask=i_ok, other=0.0)
            bias_at = bias + (batch * bias_b + head * bias_h) + (row * bias_q + col[None, :] * bias_s)
            bias_tile = load_tile(bias_at, i_ok, j_ok[None, :], True, True).to(plan.acc_dtype)
            slope, position = None, None
            if slopes is not None:
                slope, position = slope_of(slopes, head, scores), row + extents.first_place
            p, t = weights(q_tile, k_tile, shift_i, low_i, bias_tile, allowed, scores, tile * plan.block_kv,
                           plan.block_kv, plan, slope, position)  # fmt: skip
            acc += score_gradients(p, t, d_o_tile, v_tile, delta_i, allowed, scores, plan)[0]

    of_bias = bias_batch.to(tl.int64) * bias_heads + bias_head
    if plan.one_row:
        tl.store(d_bias + of_bias * kv_len + col, tl.sum(acc, 0).to(d_bias.dtype.element_ty), mask=j_ok)
    else:
        i = (bias_tile_q * plan.block_q + tl.arange(0, plan.block_q))[:, None]
        at = (of_bias * q_len + i) * kv_len + col[None, :]
        tl.store(d_bias + at, acc.to(d_bias.dtype.element_ty), mask=(i < q_len) & j_ok[None, :])


def fit(call: Call, config: AttentionGradientsConfig) -> AttentionGradientsConfig:
    """Smaller tiles where terms of the scores take registers beside them, or where shared memory has no room."""
    terms = *(call.arrays[n] for n in ("bias", "q_segment_ids", "alibi_slopes")), call.options["softcap"]
    if any(term is not None for term in terms):
        config = config.replace(block_q=min(config.block_q, 32))
    while shared_bytes(call, config) > shared_limit(call.target.arch):
        if config.num_stages > 1:
            config = config.replace(num_stages=config.num_stages - 1)
            continue
        widest = max(("block_q", "block_kv", "dq_block_q", "dq_block_kv"), key=config.__getitem__)
        if config[widest] == 16:
            break
        config = config.replace(**{widest: config[widest] // 2})
    return config


def of_keys(call: Call) -> bool:
    """Whether a gradient is wanted that programs own by keys."""
    return any(name in call.wants for name in ("d_k", "d_v", "d_bias"))


def _passes(call: Call, config: AttentionGradientsConfig) -> list[tuple[int, int, int]]:
    """(rows that a program owns, rows that it walks at a time, columns that it sums up), for each launch."""
    d, dv = padded(call.dims["d"]), padded(call.dims["dv"])
    own_keys = (config.block_kv, config.block_q, d + dv)
    return [own_keys] * of_keys(call) + [(config.dq_block_q, config.dq_block_kv, d)] * ("d_q" in call.wants)


def shared_bytes(call: Call, config: AttentionGradientsConfig) -> int:
    """Shared memory that the compiler gives this call, or somewhat less: two tiles that stay, and a buffer a stage for
    the two that the loop loads.

    On AMD a stage is one buffer less, what stays passes through before the loop and ds within it.
    """
    size, bias = (2 if call.dtype in ("float16", "bfloat16") else 4), call.arrays["bias"]
    d, dv, stages = padded(call.dims["d"]), padded(call.dims["dv"]), config.num_stages

    def bytes_of(own: int, walked: int) -> int:
        if call.target.arch.startswith("gfx"):
            buffers = (stages - 1) * walked * (d + dv) if stages > 1 else max(own, walked) * max(d, dv)
            return max(own * max(d, dv), buffers + own * walked) * size
        extra = 0 if bias is None else max(1, stages - 1) * own * walked * bias.element_size()
        if call.dtype_of("d_o") == "float32" and size == 2:  # read so before it is rounded
            extra += stages * max(own, walked) * dv * 2
        extra += walked * max(d, dv) * size if stages == 1 else (stages - 1) * walked * 16 + 2048
        if precision_of(call, config) == "threefold":
            extra += max(own, walked) * max(d, dv) * size
        return (own + stages * walked) * (d + dv) * size + extra

    return max((bytes_of(own, walked) for own, walked, _ in _passes(call, config)), default=0)


def supports(call: Call, config: AttentionGradientsConfig) -> str | None:
    dims, warps, d, dv = call.dims, config.num_warps, padded(call.dims["d"]), padded(call.dims["dv"])
    if dims["q_len"] + dims["kv_len"] > 1 << 30:
        return "more than 2^30 queries and keys: positions are 32-bit here"
    for own, walked, _ in _passes(call, config):
        if max(own * walked, max(own, walked) * max(d, dv)) > 1 << 20:
            return (
                f"tiles of {own} and {walked} rows at head dimensions {dims['d']} and {dims['dv']} exceed Triton's "
                "limit of 2^20 elements"
            )
    columns = tmem_columns(call.target.arch) if call.dtype != "float32" or dot_precision(call) == "tf32" else 0
    if 0 < columns <= d + dv and of_keys(call) and config.block_kv >= 64 and warps in (4, 8):
        return (
            f"d_k and d_v of {config.block_kv} keys fill the {columns} columns of {call.target.arch}'s tensor "
            "memory; use block_kv = 32"
        )
    shared, limit = shared_bytes(call, config), shared_limit(call.target.arch)
    if not call.interpret and shared > limit:
        return (
            f"this tiling with {config.num_stages} stages takes {shared} bytes of shared memory; "
            f"{call.target.arch} has {limit}"
        )
    tiles_q, tiles_kv = (
        cdiv(dims["q_len"], min(config.dq_block_q, max(1, STATISTICS_AT_ONCE // dv))),
        cdiv(dims["kv_len"], config.block_kv),
    )
    tiles_bias = cdiv(dims["q_len"], config.block_q) * tiles_kv if "d_bias" in call.wants else 0
    kept = [
        (f"a tile of {own} rows that walks {walked} at a time", own * (summed + 2 * walked))
        for own, walked, summed in _passes(call, config)
    ]
    return refuse_common(
        call, warps, max(tiles_q, tiles_kv, tiles_bias) * dims["kv_heads"] * dims["group"] * dims["batch"], *kept
    )


def ranges_of(call: Call) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The ranges of queries, of which gradients of q take note, and of keys, of which the others do."""
    queries, keys = call.arrays["q_segment_ids"], call.arrays["kv_segment_ids"]
    return (
        segment_ranges(call, queries, keys) if "d_q" in call.wants else None,
        segment_ranges(call, keys, queries) if of_keys(call) else None,
    )


@BACKEND.implements("attention_vjp", key=key, fit=fit, supports=supports, config=AttentionGradientsConfig)
def attention_vjp(call: Call, config: AttentionGradientsConfig) -> tuple[Any, ...]:
    arrays, dims, wants = call.arrays, call.dims, call.wants
    q, k, v, bias, d_o = arrays["q"], arrays["k"], arrays["v"], arrays["bias"], arrays["d_o"]
    o = arrays["o"]
    segments = arrays["q_segment_ids"], arrays["kv_segment_ids"]
    if not call.interpret:
        q, k, v, o, d_o = (head_dim_innermost(x) for x in (q, k, v, o, d_o))
    batch, q_len, heads, d = q.shape
    kv_len, dv, group, acc_dtype = dims["kv_len"], dims["dv"], dims["group"], accumulator(call.dtype)
    block_d, block_dv = padded(d), padded(dv)
    scores, rate = Scores.of_gradients(call)
    shift, low, _, delta = statistics(call, o, d_o, rate)
    out = {
        name: fresh(shape, torch_dtype(dtype), q.device) if name in wants else None
        for name, (shape, dtype) in call.outputs.items()
    }
    sink_gradient(call, delta, out["d_sinks"])
    scale, ranges = scale_of(call), ranges_of(call)
    given = q, k, v, OfQueries(d_o, shift, low, delta), Masks(bias, *segments, *ranges, None, slopes_of(call))
    window = sight(call)
    extents = AttentionExtents(heads, group, q_len, kv_len, d, dv, place_of_slopes(call))
    strides = strides_of(q, k, v, bias, segments, (batch, heads, q_len, kv_len))._replace(d_o=d_o.stride())
    plan = AttentionPlan(config.block_q, config.block_kv, block_d, block_dv, block_d != d, block_dv != dv,
                precision_of(call, config), acc_dtype)  # fmt: skip
    how, tiles_kv = compiler_options(config), cdiv(kv_len, plan.block_kv)
    if "d_k" in wants or "d_v" in wants:
        programs, own = tiles_kv * dims["kv_heads"] * batch, plan._replace(want_k="d_k" in wants, want_v="d_v" in wants)
        launch(attention_vjp_d_k_d_v_kernel, programs, call, *given, KeyGradients(out["d_k"], out["d_v"]),
               scores, window, GradientWork(tiles_kv, scale), extents, strides, plan=own, **how)  # fmt: skip
    if "d_q" in wants:
        tiles_q = cdiv(q_len, config.dq_block_q)
        own = plan._replace(block_q=config.dq_block_q, block_kv=config.dq_block_kv)
        launch(attention_vjp_d_q_kernel, tiles_q * heads * batch, call, *given, out["d_q"],
               scores, window, GradientWork(tiles_q, scale), extents, strides, plan=own, **how)  # fmt: skip
    if "d_bias" in wants:
        bias_batches, bias_heads, bias_rows, _ = bias.shape
        tiles_q = cdiv(bias_rows, plan.block_q)
        launch(attention_vjp_d_bias_kernel, tiles_kv * tiles_q * bias_heads * bias_batches, call, *given, out["d_bias"],
               scores, window, BiasWork(tiles_kv, tiles_q, bias_heads, batch // bias_batches, heads // bias_heads),
               extents, strides, plan=plan._replace(one_row=bias_rows == 1), **how | {"num_stages": 1})  # fmt: skip
    return tuple(out.values())
