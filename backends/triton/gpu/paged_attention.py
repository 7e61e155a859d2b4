"""Attention over keys and values in pages: decoding, chunks of prompts, and both in one call.

    s_ij = cap(scale q_i . k_j), -inf where masked    cap(s) = c tanh(s / c)    m_i = max_j s_ij
    p_ij = exp(s_ij - m_i)    l_i = sum_j p_ij    o_i = sum_j p_ij v_j / l_i    lse_i = m_i + log l_i

A program owns block_q rows of one sequence and one key head: its queries, those of the heads of a group beside each
other. It walks the sequence's keys in tiles of block_kv as ``attention`` does, and finds the page of each in the table;
where pages are as long as tiles or longer, a tile lies in one page.

Where a sequence's queries are is not known before its kernel runs. With g rows a token there are at most tokens g //
block_q + sequences tiles, and tile t belongs to the last sequence s with starts[s] g // block_q + s <= t, which a
search finds; tiles that a sequence has too many end at once. Tokens behind the last sequence are one sequence more,
without keys.

Keys are walked in chunks of ``split_keys`` at multiples of it, whose states are merged in order (``lib.split_kv``).
Where there are few rows each chunk has a program, as many as the table has room for, of which those without keys end at
once; a second kernel merges what the others wrote. A sink comes after all keys, as in ``attention``. Keys and
values of 8 bits become q's dtype when they are read; k_scale multiplies scores, v_scale sums of values at last. A
query's bits depend on its own keys alone, since borders of tiles and chunks lie at fixed keys, and a tile that a row
does not see leaves the row as it is.

Sources: Kwon et al. 2023, "PagedAttention"; the search for a tile's sequence as in vLLM's unified Triton kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import PagedAttentionConfig
from portakern.backends.triton.gpu.attention import (
    head_dim_innermost,
    lane_sums,
    nothing,
    row_max,
    settled,
    unbiased,
    weights_under,
)
from portakern.backends.triton.launch import accumulator, compiler_options, launch
from portakern.backends.triton.lib.attention import (
    Parts,
    Results,
    head_tiles,
    key,
    sinks_of,
    slopes_of,
    store_rows,
    window_of,
)
from portakern.backends.triton.lib.band import band, fold, inside, limits, within
from portakern.backends.triton.lib.heads import Masks, Scores, load_tile, lowered, precision_of, product, slope_of
from portakern.backends.triton.lib.paged_attention import (
    COUNTED,
    PagedStrides,
    Sequences,
    adjacent,
    as_attention,
    capacity,
    combine,
    extents_of,
    fit,
    parts_of,
    programs_of,
    results_of,
    scaled,
    sequence_at,
    sinks_beside,
    supports,
)
from portakern.backends.triton.lib.split_kv import merge, origin, shrunk, store_part

if TYPE_CHECKING:
    from portakern.core.call import Call


class PagedCache(NamedTuple):
    """The pages of keys and of values, (pages, page_size, kv_heads, d), and the scale of each head, or None."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any


class PagedPlan(NamedTuple):
    """What the kernel is compiled for: the extents of its tiles, whether their columns reach past the head dimensions,
    how it multiplies and adds, and the keys of a page."""

    block_q: int
    block_kv: int
    block_d: int
    block_dv: int
    ragged_d: bool
    ragged_dv: bool
    precision: str
    acc_dtype: tl.dtype
    page_size: int


class PagedKeys(NamedTuple):
    """The keys and values of one sequence and head: the addresses of slot 0 of page 0, one for each column of a tile;
    the steps to the next page and slot; which columns lie in the head dimension; the row of the table and the step in
    it; and how many keys there are."""

    k: Any
    k_p: Any
    k_s: Any
    d_ok: Any
    v: Any
    v_p: Any
    v_s: Any
    dv_ok: Any
    table: Any
    table_step: Any
    kv_len: Any


class RowMask(NamedTuple):
    """Each row sees the keys [lo, hi), and its scores are less by ``slope``, in their unit, times the distance of a key
    from ``position``; both None where there are no slopes."""

    lo: Any
    hi: Any
    slope: Any
    position: Any


@triton.jit
def tile_owner(tile, starts, step, extents, block_q: tl.constexpr):
    """The last sequence whose first tile is ``tile`` or before; ``sequences`` for the tokens behind all of them. First
    tiles rise, so that those up to it are counted: a search by halves waits for memory at each step."""
    count = tile * 0
    for begin in range(0, extents.sequences + 1, COUNTED):
        s = begin + tl.arange(0, COUNTED)
        there = s <= extents.sequences
        first = tl.load(starts + s * step, mask=there, other=0).to(tl.int64) * extents.group // block_q + s
        count += tl.sum((there & (first <= tile)).to(tl.int32), 0)
    return count - 1


@triton.jit
def pre_of(pre, k_scale, kv_head):
    """``Scores.pre`` of a key head, whose dots its scale multiplies before anything else."""
    scale = tl.load(k_scale + kv_head)
    if pre is not None:
        scale = scale * pre
    return scale


@triton.jit
def slots(start, j, j_ok, keys, edge: tl.constexpr, plan: tl.constexpr):
    """(page, slot) of each key j of a tile that begins at ``start``, as columns."""
    if plan.page_size % plan.block_kv == 0:
        page = tl.load(keys.table + start // plan.page_size * keys.table_step).to(tl.int64)
        return page, (start % plan.page_size + tl.arange(0, plan.block_kv)).to(tl.int64)[:, None]
    else:
        page = load_tile(keys.table + j // plan.page_size * keys.table_step, j_ok, True, edge, False)
        return page.to(tl.int64)[:, None], (j % plan.page_size).to(tl.int64)[:, None]


@triton.jit
def visit_pages(state, q_tile, keys, rows, scores, first, last, edge: tl.constexpr, plan: tl.constexpr):
    """Fold the keys from ``first`` to ``last`` into the state (acc, l, m).

    ``edge``: some pair may lie outside [lo, hi), or some key past the end, whose slot may hold NaN.
    """
    acc, l, m = state
    for start in range(first, last, plan.block_kv):
        j = start + tl.arange(0, plan.block_kv)
        j_ok = j < keys.kv_len
        page, slot = slots(start, j, j_ok, keys, edge, plan)
        k_at = keys.k + (page * keys.k_p + slot * keys.k_s)
        k_tile = load_tile(k_at, j_ok[:, None], keys.d_ok, edge, plan.ragged_d).to(q_tile.dtype)
        s = unbiased(q_tile, k_tile, scores, plan)
        if rows.slope is not None:
            s = lowered(s, rows.slope, rows.position, start, plan.block_kv)
        if edge:
            s = tl.where(inside(j, rows.lo, rows.hi), s, float("-inf"))
        m_new = tl.maximum(m, row_max(s))
        under = origin(m_new, scores)
        p, alpha = weights_under(s, under), shrunk(m, under)
        l = tl.fma(l, tl.broadcast_to(alpha[:, None], l.shape), lane_sums(p))
        m = m_new
        v_at = keys.v + (page * keys.v_p + slot * keys.v_s)
        v_tile = load_tile(v_at, j_ok[:, None], keys.dv_ok, edge, plan.ragged_dv).to(q_tile.dtype)
        acc = acc * alpha[:, None]
        acc = product(p.to(v_tile.dtype), v_tile, acc, plan)
    return acc, l, m


@triton.jit
def keys_of(s, kv_head, kv_len, cache, sequences, extents, strides, plan: tl.constexpr):
    """``PagedKeys`` of one sequence and key head."""
    k, v, _, _ = cache
    dd, ddv = tl.arange(0, plan.block_d)[None, :], tl.arange(0, plan.block_dv)[None, :]
    k_p, k_s, k_h, k_d = strides.k
    v_p, v_s, v_h, v_d = strides.v
    table_s, table_step = strides.table
    k += kv_head * k_h + dd.to(tl.int64) * k_d
    v += kv_head * v_h + ddv.to(tl.int64) * v_d
    row = sequences.table + s.to(tl.int64) * table_s
    return PagedKeys(k, k_p, k_s, dd < extents.d, v, v_p, v_s, ddv < extents.dv, row, table_step, kv_len)


@triton.jit
def paged_attention_kernel(
    q, cache, sequences, masks, out, parts, scores, window, work, extents, strides, plan: tl.constexpr
):  # fmt: skip
    """A tile of block_q rows of o, and of lse unless that is None; or, where parts are not None, the state of one chunk
    of their keys. masks: the sinks and the slopes of heads. Grid: chunks times tiles times key heads, heads fastest,
    since theirs lie beside each other in a page."""
    left, right = window
    q_t, q_h, q_d = strides.q
    index, kv_heads = tl.program_id(0), extents.heads // extents.group
    kv_head, tile, share = index % kv_heads, index // kv_heads % work.tiles, index // kv_heads // work.tiles
    of_head = scores
    if cache.k_scale is not None:
        _, softcap, rate, unit, unit_low, natural, natural_low, beyond, octave, per_unit = scores
        pre = pre_of(scores.pre, cache.k_scale, kv_head)
        of_head = Scores(pre, softcap, rate, unit, unit_low, natural, natural_low, beyond, octave, per_unit)
    s = tile_owner(tile, sequences.starts, strides.starts, extents, plan.block_q)
    start, queries, kv_len = sequence_at(s, sequences, strides, extents)
    own = tile - ((start.to(tl.int64) * extents.group // plan.block_q).to(tl.int32) + s)
    row = (own * plan.block_q + tl.arange(0, plan.block_q))[:, None]
    i, head = row // extents.group, kv_head * extents.group + row % extents.group
    ok, token = i < queries, (start + i).to(tl.int64)

    behind = kv_len - queries
    top = own * plan.block_q // extents.group
    bottom = tl.minimum((own * plan.block_q + plan.block_q - 1) // extents.group, queries - 1)
    span = band(top + behind, bottom + behind, left, right, kv_len, plan.block_kv)
    slope, position = None, None
    if masks.slopes is not None:
        slope, position = slope_of(masks.slopes, head, scores), (i + behind).to(tl.int64)
    lo, hi = limits(i + behind, left, right, kv_len)
    rows = RowMask(lo, hi, slope, position)
    first, _, _, last = span
    begin = first // work.chunk * work.chunk
    if parts.sums is not None:
        begin = share * work.chunk
        last = tl.where(begin + work.chunk <= first, 0, tl.minimum(last, begin + work.chunk))
    needed = (top < queries) & ((begin < last) if parts.sums is not None else True)
    if needed:
        keys = keys_of(s, kv_head.to(tl.int64), kv_len, cache, sequences, extents, strides, plan)
        column = tl.arange(0, plan.block_d)[None, :]
        q_at = q + token * q_t + head.to(tl.int64) * q_h + column.to(tl.int64) * q_d
        q_tile = load_tile(q_at, ok, column < extents.d, True, plan.ragged_d)
        at_o = token * extents.heads + head
        if parts.sums is not None:
            here = within(span, begin, begin + work.chunk)
            state = settled(fold(visit_pages, nothing(plan), q_tile, keys, rows, of_head, here, left, plan))
            at = at_o * work.chunks + share
            store_part(parts.sums, parts.statistics, state, at, ok, extents.dv, plan.block_dv)
        else:
            acc, l, m = settled(nothing(plan))
            for chunk in range(begin, last, work.chunk):
                here = within(span, chunk, chunk + work.chunk)
                part = fold(visit_pages, nothing(plan), q_tile, keys, rows, of_head, here, left, plan)
                acc, l, m = merge((acc, l, m), settled(part), scores)
            at_lse = head.to(tl.int64) * extents.tokens + token
            sink = (
                None if masks.sinks is None else sinks_beside(masks.sinks, tl.reshape(head, [plan.block_q]), s, extents)
            )
            state = scaled((acc, l, m), cache.v_scale, kv_head)
            store_rows(out, state, at_o, at_lse, ok, scores, extents.dv, plan.block_dv, sink)


def default_tiling(call: Call) -> dict[str, int]:
    """Of 16 bits and heads up to 128, measured on an H200 (docs/porting/paged_attention.md): 64 rows fill the matrix
    unit, and tiles of 16 rows, which decode faster, have other bits. A program has some cost before its first key, so
    that chunks of 1024 keys are faster than 512 but for one short sequence. Others are not measured: wide heads take
    what registers have room for. Products of float32 are threefold where attention's are."""
    wide = max(head_tiles(as_attention(call)))
    if call.dtype in ("float16", "bfloat16"):
        tiles = (64, 64, 4, 3) if wide <= 128 else (64, 32, 8, 2) if wide <= 256 else (16, 16, 8, 1)
    else:
        tiles = (64, 32, 4, 2) if wide <= 64 else (64, 32, 8, 2) if wide <= 128 else (16, 16, 8, 1)
    names = ("block_q", "block_kv", "num_warps", "num_stages")
    return dict(zip(names, tiles, strict=True)) | {"split_keys": 1024, "threefold": int(call.target.arch == "sm_90")}


def plan_of(call: Call, config: PagedAttentionConfig) -> PagedPlan:
    (block_d, block_dv), d, dv = head_tiles(as_attention(call)), call.dims["d"], call.dims["dv"]
    return PagedPlan(config.block_q, config.block_kv, block_d, block_dv, block_d != d, block_dv != dv,
                     precision_of(call, config), accumulator(call.dtype), call.dims["page_size"])  # fmt: skip


@BACKEND.implements(
    "paged_attention", tiling=default_tiling, key=key, fit=fit, supports=supports, config=PagedAttentionConfig
)
def paged_attention(call: Call, config: PagedAttentionConfig) -> tuple[Any, ...]:
    arrays, options = call.arrays, call.options
    q, k, v = arrays["q"], arrays["k_pages"], arrays["v_pages"]
    sequences = Sequences(arrays["page_table"], arrays["kv_lens"], arrays["q_starts"])
    if not call.interpret:
        k, v = head_dim_innermost(k), head_dim_innermost(v)
    programs, work, spread = programs_of(call, config)
    plan, scores, out = plan_of(call, config), Scores.of(as_attention(call)), results_of(call)
    window = window_of(options["is_causal"], options["window"], call.dims["tokens"] + capacity(call))
    strides = PagedStrides(q.stride(), k.stride(), v.stride(), sequences.table.stride(), sequences.lens.stride(0),
                           sequences.starts.stride(0))  # fmt: skip
    parts = parts_of(call, work.chunks) if spread else Parts(None, None)
    k_scale, v_scale = (adjacent(arrays[n]) for n in ("k_scale", "v_scale"))
    masks = Masks(None, None, None, None, sinks=None if spread else sinks_of(call), slopes=slopes_of(call))
    launch(paged_attention_kernel, programs, call, q, PagedCache(k, v, k_scale, v_scale), sequences,
           masks, Results(None, None, None) if spread else out, parts, scores, window, work, extents_of(call), strides,
           plan=plan, **compiler_options(config))  # fmt: skip
    if spread:
        combine(call, parts, out, window, work, strides)
    return out.o, out.lse
