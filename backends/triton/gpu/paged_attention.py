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
from portakern.backends.triton.launch import (
    WITHOUT_E4M3,
    accumulator,
    cdiv,
    compiler_options,
    launch,
    refuse_common,
    shared_limit,
    torch_dtype,
)
from portakern.backends.triton.layout import fresh, gathered, pow2_at_least
from portakern.backends.triton.lib.attention import (
    AT_ONCE,
    Parts,
    Results,
    head_tiles,
    key,
    shared_bytes,
    sinks_of,
    store_rows,
    window_of,
)
from portakern.backends.triton.lib.band import band, fold, inside, limits, within
from portakern.backends.triton.lib.heads import Scores, load_tile, precision_of, product
from portakern.backends.triton.lib.split_kv import ENOUGH, merge, origin, shrunk, store_part
from portakern.specs.paged_attention import NARROW, dense_form

if TYPE_CHECKING:
    from portakern.core.call import Call


COUNTED = tl.constexpr(256)
"""Sequences whose starts a program reads at once."""


class Sequences(NamedTuple):
    """The pages of each sequence, (sequences, pages_each); its keys; where its queries begin, (sequences + 1)."""

    table: Any
    lens: Any
    starts: Any


class PagedCache(NamedTuple):
    """The pages of keys and of values, (pages, page_size, kv_heads, d), and the scale of each head, or None."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any


class OfHeads(NamedTuple):
    """What merged rows meet: the sink of each head, and the scale of the values of each key head; None for none."""

    sinks: Any
    v_scale: Any


class PagedExtents(NamedTuple):
    """``heads`` are those of q, of which ``group`` share one of k and v."""

    tokens: int
    heads: int
    group: int
    d: int
    dv: int
    sequences: int


class PagedStrides(NamedTuple):
    """Of q, (tokens, heads, d); of k and v, (pages, page_size, kv_heads, d); and of each of ``Sequences``."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    table: tuple[int, ...]
    lens: int
    starts: int


class PagedWork(NamedTuple):
    """How programs share a call: tiles of rows of a key head; keys of a chunk; the chunks that the table has room
    for."""

    tiles: int
    chunk: int
    chunks: int


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


class MergeTile(NamedTuple):
    """What the merger is compiled for: the heads of a program, the width of their tile, and what it sums in."""

    heads: int
    block_dv: int
    acc_dtype: tl.dtype


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


class RowLimits(NamedTuple):
    """Each row sees the keys [lo, hi)."""

    lo: Any
    hi: Any


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
def token_owner(token, starts, step, extents):
    """The last sequence that begins at ``token`` or before; ``sequences`` for one behind all of them."""
    count = token * 0
    for begin in range(0, extents.sequences + 1, COUNTED):
        s = begin + tl.arange(0, COUNTED)
        there = s <= extents.sequences
        first = tl.load(starts + s * step, mask=there, other=0).to(tl.int64)
        count += tl.sum((there & (first <= token)).to(tl.int32), 0)
    return count - 1


@triton.jit
def sequence_at(s, sequences, strides, extents):
    """(first token, queries, keys) of a sequence."""
    there = s < extents.sequences
    first = tl.load(sequences.starts + s * strides.starts).to(tl.int32)
    last = tl.load(sequences.starts + (s + 1) * strides.starts, mask=there, other=extents.tokens).to(tl.int32)
    keys = tl.load(sequences.lens + s * strides.lens, mask=there, other=0).to(tl.int32)
    return first, last - first, keys


@triton.jit
def pre_of(pre, k_scale, kv_head):
    """``Scores.pre`` of a key head, whose dots its scale multiplies before anything else."""
    scale = tl.load(k_scale + kv_head)
    if pre is not None:
        scale = scale * pre
    return scale


@triton.jit
def scaled(state, v_scale, kv_head):
    """The state with its sums of values in their own unit. ``kv_head``: of each row, or one."""
    acc, l, m = state
    if v_scale is not None:
        acc = acc * (tl.load(v_scale + kv_head) + tl.full(l.shape, 0.0, l.dtype))[:, None]
    return acc, l, m


@triton.jit
def sinks_beside(sinks, head, s, extents):
    """The sink of each row, -inf of tokens behind the last sequence."""
    return tl.load(sinks + head, mask=(s < extents.sequences) & (head < extents.heads), other=float("-inf"))


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
    q, cache, sequences, sinks, out, parts, scores, window, work, extents, strides, plan: tl.constexpr
):  # fmt: skip
    """A tile of block_q rows of o, and of lse unless that is None; or, where parts are not None, the state of one chunk
    of their keys. sinks: of each head, or None. Grid: chunks times tiles times key heads, heads fastest, since theirs
    lie beside each other in a page."""
    left, right = window
    q_t, q_h, q_d = strides.q
    index, kv_heads = tl.program_id(0), extents.heads // extents.group
    kv_head, tile, share = index % kv_heads, index // kv_heads % work.tiles, index // kv_heads // work.tiles
    of_head = scores
    if cache.k_scale is not None:
        _, softcap, rate, unit, unit_low, natural, natural_low, beyond, octave = scores
        pre = pre_of(scores.pre, cache.k_scale, kv_head)
        of_head = Scores(pre, softcap, rate, unit, unit_low, natural, natural_low, beyond, octave)
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
    rows = RowLimits(*limits(i + behind, left, right, kv_len))
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
            sink = None if sinks is None else sinks_beside(sinks, tl.reshape(head, [plan.block_q]), s, extents)
            state = scaled((acc, l, m), cache.v_scale, kv_head)
            store_rows(out, state, at_o, at_lse, ok, scores, extents.dv, plan.block_dv, sink)


@triton.jit
def paged_attention_combine_kernel(
    sums, statistics, out, sequences, of_heads, scores, window, work, extents, strides, tile: tl.constexpr
):  # fmt: skip
    """o, and lse unless that is None, of one token and ``heads`` heads, whose parts are merged in order: those of the
    chunks that the token sees, which are written; and after them what heads have besides.

    sums: (tokens, heads, chunks, dv); statistics: (tokens, heads, chunks, 2), l and m.
    """
    left, right = window
    blocks = tl.cdiv(extents.heads, tile.heads)
    token, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    s = token_owner(token, sequences.starts, strides.starts, extents)
    start, queries, kv_len = sequence_at(s, sequences, strides, extents)
    lo, hi = limits(token - start + kv_len - queries, left, right, kv_len)
    begin = tl.maximum(lo, 0) // work.chunk

    head = block * tile.heads + tl.arange(0, tile.heads)
    ok, ddv = head < extents.heads, tl.arange(0, tile.block_dv)[None, :]
    row = token.to(tl.int64) * extents.heads + head
    acc = tl.full([tile.heads, tile.block_dv], 0.0, tile.acc_dtype)
    l = tl.full([tile.heads], 0.0, tile.acc_dtype)
    m = tl.full([tile.heads], float("-inf"), tile.acc_dtype)
    for chunk in range(begin, tl.where(lo < hi, tl.cdiv(tl.maximum(hi, 0), work.chunk), 0)):
        at = row * work.chunks + chunk
        acc_part = tl.load(sums + at[:, None] * extents.dv + ddv, mask=ok[:, None] & (ddv < extents.dv), other=0.0)
        l_part = tl.load(statistics + at * 2, mask=ok, other=0.0)
        m_part = tl.load(statistics + at * 2 + 1, mask=ok, other=float("-inf"))
        acc, l, m = merge((acc, l, m), (acc_part, l_part, m_part), scores)
    at_lse = (head.to(tl.int64) * extents.tokens + token)[:, None]
    sink = None if of_heads.sinks is None else sinks_beside(of_heads.sinks, head, s, extents)
    kv_head = tl.minimum(head, extents.heads - 1) // extents.group
    state = scaled((acc, l, m), of_heads.v_scale, kv_head)
    store_rows(out, state, row[:, None], at_lse, ok[:, None], scores, extents.dv, tile.block_dv, sink)


def as_attention(call: Call) -> Call:
    """The call of attention of all tokens and as many keys as a sequence may have, for what is asked of its tiles."""
    return dense_form(call, call.dims["tokens"], capacity(call))


def capacity(call: Call) -> int:
    """Keys that the table has room for."""
    return call.dims["pages_each"] * call.dims["page_size"]


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


def fit(call: Call, config: PagedAttentionConfig) -> PagedAttentionConfig:
    """Fewer stages, then fewer keys and rows at a time, where shared memory has no room."""
    limit, dense = shared_limit(call.target.arch), as_attention(call)
    while config.num_stages > 1 and shared_bytes(dense, config) > limit:  # type: ignore[arg-type]
        config = config.replace(num_stages=config.num_stages - 1)
    while config.block_kv > 16 and shared_bytes(dense, config) > limit:  # type: ignore[arg-type]
        config = config.replace(block_kv=config.block_kv // 2)
    return config


def supports(call: Call, config: PagedAttentionConfig) -> str | None:
    dense, block_q, block_kv = as_attention(call), config.block_q, config.block_kv
    d, dv = head_tiles(dense)
    if call.dims["tokens"] + capacity(call) > 1 << 30:
        return "more than 2^30 tokens and keys that the table has room for: positions are 32-bit here"
    if max(block_q * block_kv, max(block_q, block_kv) * max(d, dv)) > 1 << 20:
        return (
            f"tiles of {block_q} x {block_kv} at head dimensions {call.dims['d']} and {call.dims['dv']} exceed "
            "Triton's limit of 2^20 elements"
        )
    if not call.interpret:
        shared, limit = shared_bytes(dense, config), shared_limit(call.target.arch)  # type: ignore[arg-type]
        if shared > limit:
            return (
                f"tiles of {block_q} x {block_kv} with {config.num_stages} stages take {shared} bytes of shared "
                f"memory; {call.target.arch} has {limit}"
            )
    programs, _, _ = programs_of(call, config)
    return narrow_refused(call) or refuse_common(
        call, config.num_warps, programs, (f"a tile of {block_q} x {block_kv}", block_q * (dv + block_kv))
    )


def programs_of(call: Call, config: PagedAttentionConfig) -> tuple[int, PagedWork, bool]:
    """(programs, how they share the call, whether each chunk has its own), from what the arrays have room for.

    Each chunk has a program where there are few otherwise, and what they write down is at most a quarter of what they
    read. No bit depends on it.
    """
    dims, room = call.dims, capacity(call)
    chunk = max(config.split_keys, config.block_kv)
    chunks = cdiv(room, chunk)
    tiles = dims["tokens"] * dims["group"] // config.block_q + dims["sequences"] + 1
    programs = tiles * dims["kv_heads"]
    size = 2 if call.dtype in ("float16", "bfloat16") else 4
    written = dims["tokens"] * dims["group"] * chunks * dims["dv"] * 4
    read = dims["sequences"] * room * (dims["d"] + dims["dv"]) * size
    spread = chunks > 1 and programs < ENOUGH and 4 * written <= read
    return programs * (chunks if spread else 1), PagedWork(tiles, chunk, chunks), spread


def adjacent(x: Any) -> Any:
    """Numbers of heads one beside the other, None of none."""
    return x if x is None or x.stride(0) == 1 else gathered(x)


def narrow_refused(call: Call) -> str | None:
    """Why a target cannot take the call's pages of 8 bits, or None."""
    arch, found = call.target.arch, {call.dtype_of(n) for n in ("k_pages", "v_pages")} & {*NARROW}
    if call.interpret or not found:
        return None
    if arch in WITHOUT_E4M3 and "float8_e4m3fn" in found:
        return f"Triton reads no float8_e4m3fn on {arch}; use float8_e5m2, or pages of {call.dtype}"
    if arch == "gfx90a" and call.dtype == "float16":
        return "gfx90a reads float16 of less than 2^-14 as 0, numbers of 8 bits among them: use bfloat16 queries"
    return None


def plan_of(call: Call, config: PagedAttentionConfig) -> PagedPlan:
    (block_d, block_dv), d, dv = head_tiles(as_attention(call)), call.dims["d"], call.dims["dv"]
    return PagedPlan(config.block_q, config.block_kv, block_d, block_dv, block_d != d, block_dv != dv,
                     precision_of(call, config), accumulator(call.dtype), call.dims["page_size"])  # fmt: skip


@BACKEND.implements(
    "paged_attention", tiling=default_tiling, key=key, fit=fit, supports=supports, config=PagedAttentionConfig
)
def paged_attention(call: Call, config: PagedAttentionConfig) -> tuple[Any, ...]:
    arrays, dims, options = call.arrays, call.dims, call.options
    q, k, v = arrays["q"], arrays["k_pages"], arrays["v_pages"]
    sequences = Sequences(arrays["page_table"], arrays["kv_lens"], arrays["q_starts"])
    if not call.interpret:
        k, v = head_dim_innermost(k), head_dim_innermost(v)
    heads, number = dims["kv_heads"] * dims["group"], dims["sequences"]
    shape, lse_form = call.outputs["o"][0], call.outputs["lse"]
    o = fresh(shape, q.dtype, q.device)
    lse = fresh(lse_form[0], torch_dtype(lse_form[1]), q.device) if "lse" in call.wants else None

    programs, work, spread = programs_of(call, config)
    plan, scores = plan_of(call, config), Scores.of(as_attention(call))
    window = window_of(options["is_causal"], options["window"], dims["tokens"] + capacity(call))
    extents = PagedExtents(dims["tokens"], heads, dims["group"], dims["d"], dims["dv"], number)
    strides = PagedStrides(q.stride(), k.stride(), v.stride(), sequences.table.stride(), sequences.lens.stride(0),
                           sequences.starts.stride(0))  # fmt: skip
    parts, out = Parts(None, None), Results(o, lse, None)
    if spread:
        wide, at = torch_dtype(lse_form[1]), (dims["tokens"], heads, work.chunks)
        parts = Parts(fresh((*at, dims["dv"]), wide, q.device), fresh((*at, 2), wide, q.device))
    sinks, (k_scale, v_scale) = sinks_of(call), (adjacent(arrays[n]) for n in ("k_scale", "v_scale"))
    launch(paged_attention_kernel, programs, call, q, PagedCache(k, v, k_scale, v_scale), sequences,
           None if spread else sinks, Results(None, None, None) if spread else out, parts, scores, window, work,
           extents, strides, plan=plan, **compiler_options(config))  # fmt: skip
    if spread:
        rows = pow2_at_least(min(heads, max(1, AT_ONCE // plan.block_dv)))
        tile = MergeTile(rows, plan.block_dv, plan.acc_dtype)
        launch(paged_attention_combine_kernel, dims["tokens"] * cdiv(heads, rows), call, *parts, out, sequences,
               OfHeads(sinks, v_scale), scores, window, work, extents, strides, tile=tile, num_warps=4)  # fmt: skip
    return o, lse
