"""Scaled dot-product attention, one pass over the keys per tile of queries (Dao 2023, FlashAttention-2, algorithm 1).

    s_ij = cap(scale q_i . k_j) - slope |distance_ij| + bias_ij, -inf where masked    cap(s) = c tanh(s / c)
    m_i = max_j s_ij
    p_ij = exp(s_ij - m_i)    l_i = sum_j p_ij    o_i = sum_j p_ij v_j / l_i    lse_i = m_i + log l_i

A program owns block_q queries of one head and walks its keys in tiles of block_kv, keeping m, l and the unnormalised o
(``acc``) and rescaling them whenever m grows (online softmax, Milakov and Gimelshein 2018). Tiles that causal and
window masks empty, and tiles outside of the ranges of the queries' segments (``lib.segments``), are not visited; only
tiles on a mask's edge, or over the end of the keys, pay for masking. Tile borders lie at multiples of block_kv whatever
the masks, and a tile that is masked for a row leaves the row's state as it is to the bit, so no row depends on its
neighbours.

The scores and m stay in the unit in which they arise, |scale| for plain dots, c under a softcap, 1 once a bias is
added; p = 2^((s - m) rate) with rate = unit log2(e), since ``exp2`` is the hardware's instruction, and s rate - m rate
is one fused operation (``exponents`` of the spec).

A sink is one more score of each row of its head, with a value of 0. It comes after all keys, where o and lse are made
of the state: by the program that has all of a row, or by the merger of its chunks (``beside_sink``).

The gradients, three kernels more, lie in ``attention_vjp``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import AttentionConfig
from portakern.backends.triton.launch import (
    launch,
    torch_dtype,
)
from portakern.backends.triton.layout import fresh, gathered
from portakern.backends.triton.lib.attention import (
    Parts,
    Results,
    combine,
    fit,
    key,
    place_of_slopes,
    programs_of,
    results,
    rows_plan,
    sinks_of,
    slopes_of,
    store_rows,
    supports,
)
from portakern.backends.triton.lib.band import band, fold, inside, limits, within
from portakern.backends.triton.lib.heads import (
    AttentionExtents,
    Keys,
    Masks,
    PairMask,
    Scores,
    load_head,
    load_tile,
    lowered,
    product,
    program,
    rows_of,
    slope_of,
    strides_of,
)
from portakern.backends.triton.lib.segments import segment_ranges, within_ranges
from portakern.backends.triton.lib.split_kv import (
    merge,
    origin,
    shrunk,
    store_part,
)
from portakern.specs.attention import sight

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


@triton.jit
def tanh(x):
    """tanh x = 1 - 2 / (1 + exp(2x)) within 8 u, of 1 and not of tanh x, where the scores' bound allows 10.

    With u = 2^-24 and r = 1 / (1 + exp(2x)): ``exp2`` errs by 4 u of its result, hence r by 4 u r (1 - r), the sum and
    the quotient by 3 u r, and what x and the factor before ``exp2`` round to moves r by u / 2. The most that all of it
    comes to is 3.4 u at r = 3/4. An approximation near 0 that is right in its last place costs three times as many
    instructions, of which a score has no use: it is multiplied by the softcap, and beside it stand others near 1.
    """
    return 1.0 - 2.0 * (1.0 / (1.0 + tl.exp2(x * 2.8853900817779268)))


@triton.jit
def unbiased(a, b, scores, plan: tl.constexpr):
    """Scores of a tile a b^T before a bias; under a softcap, in its unit."""
    t = product(a, tl.trans(b), None, plan)
    if scores.pre is not None:
        t = t * scores.pre
    if scores.softcap is not None:
        t = tanh(t)
    return t


@triton.jit
def load_bias(pairs, position, position_ok, edge: tl.constexpr, plan: tl.constexpr):
    """The bias of a tile at the positions that are walked."""
    return load_tile(pairs.bias + position * pairs.bias_step, pairs.row_ok, position_ok, True, edge).to(plan.acc_dtype)


@triton.jit
def over_keys(
    visit: tl.constexpr, state, own, program, operands, strides, scores, window, extents, plan: tl.constexpr,
    chunk=None, share=None,
):  # fmt: skip
    """The state after ``visit`` has folded into it all the keys that a tile of queries sees.

    Query i stands beside key i + kv_len - q_len. own: what the program owns, as ``visit`` takes it. program: (tile,
    query head, key head, batch entry). chunk, share: as :func:`walk` takes them. The others are the kernel's arguments.
    """
    tile, head, kv_head, batch = program
    k, v, masks = operands
    bias, q_segments, kv_segments, q_ranges, _, _, slopes = masks
    k_b, k_s, k_h, k_d = strides.k
    v_b, v_s, v_h, v_d = strides.v
    bias_b, bias_h, bias_q, bias_s = strides.bias
    q_seg_b, q_seg_s = strides.q_segments
    kv_seg_b, kv_seg_s = strides.kv_segments
    left, right = window
    q_len, kv_len = extents.q_len, extents.kv_len

    dd, ddv = tl.arange(0, plan.block_d)[None, :], tl.arange(0, plan.block_dv)[None, :]
    k += (batch * k_b + kv_head * k_h) + dd.to(tl.int64) * k_d
    v += (batch * v_b + kv_head * v_h) + ddv.to(tl.int64) * v_d
    keys = Keys(k, k_s, dd < extents.d, v, v_s, ddv < extents.dv, kv_len)

    i, heads, top, bottom = rows_of(tile, head, extents, plan)
    i_ok, row = i < q_len, i.to(tl.int64)
    if bias is not None:
        bias += batch * bias_b + heads * bias_h + row * bias_q
    q_segment = None
    if q_segments is not None:
        q_segment = tl.load(q_segments + batch * q_seg_b + row * q_seg_s, mask=i_ok, other=0)
        kv_segments += batch * kv_seg_b
    lo, hi = limits(i + (kv_len - q_len), left, right, kv_len)
    slope, position = None, None
    if slopes is not None:
        slope, position = slope_of(slopes, heads, scores), row + extents.first_place
    pairs = PairMask(i_ok, lo, hi, bias, bias_s, q_segment, kv_segments, kv_seg_s, slope, position)

    top += kv_len - q_len
    bottom += kv_len - q_len
    span = band(top, bottom, left, right, kv_len, plan.block_kv)
    if q_ranges is not None:
        span = within_ranges(span, q_ranges, batch * q_len + row, i_ok, kv_len, plan.block_kv)
    return walk(visit, state, own, keys, pairs, scores, span, left, plan, chunk, share)


@triton.jit
def walk(visit: tl.constexpr, state, own, keys, pairs, scores, span, left, plan: tl.constexpr, chunk, share):
    """``fold`` over all keys; or over one chunk of them, the ``share``-th that the tile sees; or over all chunks, one
    after the other, where share is None."""
    first, _, _, last = span
    if chunk is None:
        return fold(visit, state, own, keys, pairs, scores, span, left, plan)
    elif share is not None:
        start = first // chunk * chunk + share * chunk
        here = within(span, start, start + chunk)
        return settled(fold(visit, state, own, keys, pairs, scores, here, left, plan))
    else:
        acc, l, m = settled(state)
        for start in range(first // chunk * chunk, last, chunk):
            here = within(span, start, start + chunk)
            part = fold(visit, nothing(plan), own, keys, pairs, scores, here, left, plan)
            acc, l, m = merge((acc, l, m), settled(part), scores)
        return acc, l, m


@triton.jit
def row_max(s):
    """The maximum of each row.

    Matrix units leave a row of scores in four lanes, two columns of each eight in every lane. A lane takes its own
    first, in chains of which none waits for another, and lanes are compared at the end alone.
    """
    rows: tl.constexpr = s.shape[0]
    eights: tl.constexpr = s.shape[1] // 8
    chains: tl.constexpr = eights if eights < 4 else 4
    s = tl.reshape(s, [rows, chains, eights // chains, 4, 2])
    return tl.max(tl.max(tl.max(tl.max(s, 2), 3), 1), 1)


@triton.jit
def lane_sums(p):
    """Of each row four sums, of what one lane holds (see ``row_max``): they are added up when all keys were seen."""
    rows: tl.constexpr = p.shape[0]
    eights: tl.constexpr = p.shape[1] // 8
    chains: tl.constexpr = eights if eights < 4 else 4
    p = tl.reshape(p, [rows, chains, eights // chains, 4, 2])
    return tl.sum(tl.sum(tl.sum(p, 2), 3), 1)


@triton.jit
def weights_under(s, under):
    """The weights of a tile of scores under their rows' maxima, of which ``under`` is the origin."""
    factor, offset = under
    return tl.exp2(tl.fma(s, tl.broadcast_to(factor[:, None], s.shape), tl.broadcast_to(-offset[:, None], s.shape)))


@triton.jit
def settled(state):
    """The state with one sum a row."""
    acc, l, m = state
    return acc, tl.sum(l, 1), m


@triton.jit
def visit(state, q_tile, keys, pairs, scores, first, last, edge: tl.constexpr, plan: tl.constexpr):
    """Fold the keys from ``first`` to ``last`` into the state (acc, l, m).

    ``edge``: some pair may lie outside [lo, hi), or some key past the end.
    """
    acc, l, m = state
    for start in range(first, last, plan.block_kv):
        j = start + tl.arange(0, plan.block_kv)
        j_ok = j < keys.kv_len
        row, col = j.to(tl.int64)[:, None], j.to(tl.int64)[None, :]
        k_tile = load_tile(keys.k + row * keys.k_s, j_ok[:, None], keys.d_ok, edge, plan.ragged_d)

        s = unbiased(q_tile, k_tile, scores, plan)
        if pairs.bias is not None and scores.softcap is not None:
            s = s * scores.softcap
        if pairs.slope is not None:
            s = lowered(s, pairs.slope, pairs.position, start, plan.block_kv)
        if pairs.bias is not None:
            s = s + load_bias(pairs, col, j_ok[None, :], edge, plan)
        if edge:
            s = tl.where(inside(j, pairs.lo, pairs.hi), s, float("-inf"))
        if pairs.segments is not None:
            kv_segment = tl.load(pairs.segments + col * pairs.segment_step, mask=j_ok[None, :], other=0)
            s = tl.where(pairs.segment == kv_segment, s, float("-inf"))

        m_new = tl.maximum(m, row_max(s))
        under = origin(m_new, scores)
        p, alpha = weights_under(s, under), shrunk(m, under)
        l = tl.fma(l, tl.broadcast_to(alpha[:, None], l.shape), lane_sums(p))
        m = m_new
        v_tile = load_tile(keys.v + row * keys.v_s, j_ok[:, None], keys.dv_ok, edge, plan.ragged_dv)
        acc = acc * alpha[:, None]
        acc = product(p.to(v_tile.dtype), v_tile, acc, plan)
    return acc, l, m


@triton.jit
def nothing(plan: tl.constexpr):
    """The state (acc, l, m) of rows that saw no key yet; l is the four sums of ``lane_sums``."""
    acc = tl.full([plan.block_q, plan.block_dv], 0.0, plan.acc_dtype)
    l = tl.full([plan.block_q, 4], 0.0, plan.acc_dtype)
    m = tl.full([plan.block_q], float("-inf"), plan.acc_dtype)
    return acc, l, m


class Work(NamedTuple):
    """How programs share a call.

    Attributes:
      tiles_q: tiles of queries of a head, or of a group of heads.
      chunk: how many keys have a state of their own (``lib.split_kv``); None: all.
      chunks: that a tile sees, each with a program of its own; None: one program has all.
    """

    tiles_q: int
    chunk: int | None
    chunks: int | None


@triton.jit
def attention_kernel(
    q, k, v, masks, out, parts, scores, window, work, extents, strides, plan: tl.constexpr
):  # fmt: skip
    """A tile of block_q rows of o, and of lse and lse_low unless these are None. ``lib.heads`` says what the groups
    hold. parts: None twice; or one chunk of keys is this program's, and the chunk's state goes there."""
    tiles_q, chunk, chunks = work
    _, right = window
    owners, step = extents.heads, 1
    if plan.packed:
        owners, step = extents.heads // extents.group, extents.group
    tile, owner, batch = program(tiles_q, owners)
    share = None
    if parts.sums is not None:
        share, batch = (batch % chunks).to(tl.int32), batch // chunks
    if right is not None:
        tile = tiles_q - 1 - tile  # the last queries may see most keys: start them first
    head = owner * step
    i, heads, _, _ = rows_of(tile, head, extents, plan)
    i_ok, row = i < extents.q_len, i.to(tl.int64)
    q_tile = load_head(q, strides.q, batch, heads, row, i_ok, extents.d, plan.block_d, plan.ragged_d)
    place = tile, head, head // extents.group, batch
    operands = k, v, masks
    state = nothing(plan)
    state = over_keys(visit, state, q_tile, place, operands, strides, scores, window, extents, plan, chunk, share)
    if chunk is None:
        state = settled(state)

    at = (batch * extents.heads + heads) * extents.q_len + row
    if parts.sums is None:
        at_o = (batch * extents.q_len + row) * extents.heads + heads
        sink = None
        if masks.sinks is not None:
            sink = tl.reshape(tl.load(masks.sinks + (heads + row * 0)), [plan.block_q])
        store_rows(out, state, at_o, at, i_ok, scores, extents.dv, plan.block_dv, sink)
    else:
        store_part(parts.sums, parts.statistics, state, at * chunks + share, i_ok, extents.dv, plan.block_dv)


def least_chunk(call: Call) -> dict[str, int]:
    """So many keys at least have a state of their own, where no row of a table says otherwise.

    At each border the loop over keys ends and begins anew. On an H100 (bfloat16, d 128, 4096 queries and keys) eight
    chunks of 512 took 14 % longer than one of all keys, so some 2 % a border; half of it is the price of 1024, at which
    one row of 8 heads over 8192 keys still has 64 programs.
    """
    return {"min_split_keys": 1024}


@BACKEND.implements("attention", tiling=least_chunk, key=key, fit=fit, supports=supports, config=AttentionConfig)
def attention(call: Call, config: AttentionConfig) -> tuple[Any, ...]:
    arrays, dims = call.arrays, call.dims
    q, k, v, bias = arrays["q"], arrays["k"], arrays["v"], arrays["bias"]
    segments = arrays["q_segment_ids"], arrays["kv_segment_ids"]
    if not call.interpret:
        k, v = head_dim_innermost(k), head_dim_innermost(v)
    plan, how = rows_plan(call, config)
    batch, q_len, heads, dv = dims["batch"], dims["q_len"], dims["kv_heads"] * dims["group"], dims["dv"]
    o, lse, low = results(call, q)

    scores = Scores.of(call)
    window = sight(call)
    extents = AttentionExtents(heads, dims["group"], q_len, dims["kv_len"], dims["d"], dv, place_of_slopes(call))
    strides = strides_of(q, k, v, bias, segments, (batch, heads, q_len, dims["kv_len"]))
    tiles_q, programs, chunk, chunks = programs_of(call, config, plan)
    parts, out = Parts(None, None), Results(o, lse, low)
    if chunks:
        accurate = torch_dtype("float64" if call.dtype == "float64" else "float32")
        sums = fresh((batch, heads, q_len, chunks, dv), accurate, q.device)
        parts = Parts(sums, fresh((batch, heads, q_len, chunks, 2), accurate, q.device))
    launch(attention_kernel, programs, call, q, k, v,
           Masks(bias, *segments, segment_ranges(call, *segments), None, None if chunks else sinks_of(call),
                 slopes_of(call)),
           Results(None, None, None) if chunks else out, parts, scores, window, Work(tiles_q, chunk, chunks), extents,
           strides, plan=plan, **how)  # fmt: skip
    if chunks:
        combine(call, parts, out, scores)
    return o, lse, low


def head_dim_innermost(x: torch.Tensor) -> torch.Tensor:
    """``x``, gathered into a copy where its elements of one head are not adjacent.

    Triton 3.6 compiles the kernel wrongly for Hopper when k is read across a stride: values come out wrong, or reads
    leave shared memory (compute-sanitizer: invalid __shared__ read), with value heads of up to 32. Such reads would not
    coalesce either.
    """
    return x if x.stride(-1) == 1 else gathered(x)
