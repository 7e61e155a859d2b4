"""What variants of attention over pages share: which sequence has a token, what merges the states of chunks, how many
programs a call has, and what no variant takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.launch import (
    WITHOUT_E4M3,
    accumulator,
    cdiv,
    launch,
    refuse_common,
    shared_limit,
    torch_dtype,
)
from portakern.backends.triton.layout import fresh, gathered, pow2_at_least
from portakern.backends.triton.lib.attention import (
    AHEAD,
    AT_ONCE,
    FEW_ROWS,
    Parts,
    Results,
    head_tiles,
    shared_bytes,
    sinks_of,
    store_rows,
)
from portakern.backends.triton.lib.band import limits
from portakern.backends.triton.lib.heads import Scores
from portakern.backends.triton.lib.split_kv import ENOUGH, merge
from portakern.specs.paged_attention import NARROW, dense_form

if TYPE_CHECKING:
    import torch

    from portakern.backends.triton.configs import PagedAttentionConfig
    from portakern.core.call import Call

COUNTED = tl.constexpr(256)
"""Sequences whose starts a program reads at once."""


class Sequences(NamedTuple):
    """The pages of each sequence, (sequences, pages_each); its keys; where its queries begin, (sequences + 1)."""

    table: Any
    lens: Any
    starts: Any


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


class MergeTile(NamedTuple):
    """What the merger is compiled for: the heads of a program, the width of their tile, what it sums in, and whether it
    is launched before the kernel that writes the parts has ended (``follows``), for whose end it waits then."""

    heads: int
    block_dv: int
    acc_dtype: tl.dtype
    follows: bool


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
    end = tl.where(lo < hi, tl.cdiv(tl.maximum(hi, 0), work.chunk), 0)
    if tile.follows:
        tl.extra.cuda.gdc_wait()
    for following in range(begin, end, AHEAD):
        read = ()
        for ahead in tl.static_range(AHEAD):
            chunk = following + ahead
            at, here = row * work.chunks + chunk, ok & (chunk < end)
            columns = here[:, None] & (ddv < extents.dv)
            acc_part = tl.load(sums + at[:, None] * extents.dv + ddv, mask=columns, other=0.0)
            l_part = tl.load(statistics + at * 2, mask=here, other=0.0)
            m_part = tl.load(statistics + at * 2 + 1, mask=here, other=float("-inf"))
            read = read + ((acc_part, l_part, m_part),)  # type: ignore[assignment]
        tl.debug_barrier()  # else each part is read when the one before is merged, and waited for
        for ahead in tl.static_range(AHEAD):
            acc, l, m = merge((acc, l, m), read[ahead], scores)
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


def results_of(call: Call) -> Results:
    """Where o and lse go, lse None where nobody wants it."""
    (shape, _), (lse_shape, lse_dtype), q = call.outputs["o"], call.outputs["lse"], call.arrays["q"]
    lse = fresh(lse_shape, torch_dtype(lse_dtype), q.device) if "lse" in call.wants else None
    return Results(fresh(shape, q.dtype, q.device), lse, None)


def parts_of(call: Call, chunks: int) -> Parts:
    """Where the states of so many chunks go."""
    at, wide = (call.dims["tokens"], call.dims["kv_heads"] * call.dims["group"], chunks), call.outputs["lse"][1]
    device: torch.device = call.arrays["q"].device
    return Parts(
        fresh((*at, call.dims["dv"]), torch_dtype(wide), device), fresh((*at, 2), torch_dtype(wide), device)
    )  # fmt: skip


def extents_of(call: Call) -> PagedExtents:
    dims = call.dims
    return PagedExtents(
        dims["tokens"], dims["kv_heads"] * dims["group"], dims["group"], dims["d"], dims["dv"], dims["sequences"]
    )


def combine(
    call: Call, parts: Parts, out: Results, window: tuple[int | None, int | None], work: PagedWork,
    strides: PagedStrides, follows: bool = False,
) -> None:  # fmt: skip
    """Merge the parts of the chunks, and what heads have besides, into o and lse. ``follows``: NVIDIA's, see
    ``MergeTile``."""
    arrays, heads = call.arrays, call.dims["kv_heads"] * call.dims["group"]
    dense = as_attention(call)
    block_dv, few = head_tiles(dense)[1], call.dims["tokens"] * heads <= FEW_ROWS
    rows = 1 if few else pow2_at_least(min(heads, max(1, AT_ONCE // block_dv)))
    sequences = Sequences(arrays["page_table"], arrays["kv_lens"], arrays["q_starts"])
    launch(paged_attention_combine_kernel, call.dims["tokens"] * cdiv(heads, rows), call, *parts, out, sequences,
           OfHeads(sinks_of(call), adjacent(arrays["v_scale"])), Scores.of(dense), window, work, extents_of(call),
           strides, tile=MergeTile(rows, block_dv, accumulator(call.dtype), follows), num_warps=4,
           **({"launch_pdl": True} if follows else {}))  # fmt: skip
