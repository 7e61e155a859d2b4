"""Scaled dot-product attention, one pass over the keys per tile of queries (Dao 2023, FlashAttention-2, algorithm 1).

    s_ij = cap(scale q_i . k_j) + bias_ij, -inf where masked    cap(s) = c tanh(s / c)    m_i = max_j s_ij
    p_ij = exp(s_ij - m_i)    l_i = sum_j p_ij    o_i = sum_j p_ij v_j / l_i    lse_i = m_i + log l_i

A program owns block_q queries of one head and walks its keys in tiles of block_kv, keeping m, l and the unnormalised o
(``acc``) and rescaling them whenever m grows (online softmax, Milakov and Gimelshein 2018). Tiles that causal and
window masks empty are not visited; only tiles on a mask's edge, or over the end of the keys, pay for masking. Tile
borders lie at multiples of block_kv whatever the masks, and a tile that is masked for a row leaves the row's state as
it is to the bit, so no row depends on its neighbours.

The scores and m stay in the unit in which they arise, |scale| for plain dots, c under a softcap, 1 once a bias is
added; p = 2^((s - m) rate) with rate = unit log2(e), since ``exp2`` is the hardware's instruction, and s rate - m rate
is one fused operation (``exponents`` of the spec).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu.matmul import products
from portakern.backends.triton.launch import (
    accumulator,
    cdiv,
    compiler_options,
    launch,
    refuse_common,
    shared_limit,
    torch_dtype,
)
from portakern.backends.triton.layout import fresh, gathered, pow2_at_least
from portakern.backends.triton.lib.band import band, fold, limits
from portakern.backends.triton.lib.heads import (
    Extents,
    Keys,
    Pairs,
    Plan,
    Scores,
    load_head,
    load_tile,
    precision_of,
    product,
    program,
    rows_of,
    strides_of,
)
from portakern.backends.triton.lib.split_kv import (
    chunk_length,
    chunks_of_a_tile,
    cut,
    log_sum,
    merge,
    origin,
    shrunk,
    store_part,
    worth_spreading,
)
from portakern.spec import Count, Tile
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

AT_ONCE = 1024  # elements of o for a program of attention_combine_kernel
FEW_ROWS = 512  # so many rows at most have a program of attention_combine_kernel each
AHEAD = tl.constexpr(8)  # parts that it reads before it needs the first of them
KNOBS = {
    "chunk": Tile(16, 1 << 20),
    "whole": Tile(16, 1 << 20),
    "most": Tile(1, 128),
    "few_q": Tile(16, 128),
    "few_stages": Count(1, 8),
    "threefold": Count(0, 1),
    "num_warps": Tile(1, 16),
    "num_stages": Count(1, 8),
    "matrix_instr_nonkdim": Tile(16, 32),
}


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
def over_keys(
    visit: tl.constexpr, state, own, place, operands, strides, scores, window, extents, plan: tl.constexpr, chunk=None,
    share=None,
):  # fmt: skip
    """The state after ``visit`` has folded into it all the keys that a tile of queries sees.

    Query i stands beside key i + kv_len - q_len. own: what the program owns, as ``visit`` takes it. place: (tile, query
    head, key head, batch entry). chunk, share: as :func:`walk` takes them. The others are the kernel's arguments.
    """
    tile, head, kv_head, batch = place
    k, v, bias, q_segments, kv_segments = operands
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
    pairs = Pairs(i_ok, lo, hi, bias, bias_s, q_segment, kv_segments, kv_seg_s)

    top += kv_len - q_len
    bottom += kv_len - q_len
    span = band(top, bottom, left, right, kv_len, plan.block_kv)
    return walk(visit, state, own, keys, pairs, scores, span, left, plan, chunk, share)


@triton.jit
def walk(visit: tl.constexpr, state, own, keys, pairs, scores, span, left, plan: tl.constexpr, chunk, share):
    """``fold`` over all keys; or over one chunk of them, the ``share``-th that the tile sees; or over all chunks, one
    after the other, where share is None."""
    first, _, _, last = span
    if chunk is None:
        return fold(visit, state, own, keys, pairs, scores, span, left, plan)
    elif share is not None:
        here = cut(span, first // chunk * chunk + share * chunk, chunk)
        return settled(fold(visit, state, own, keys, pairs, scores, here, left, plan))
    else:
        acc, l, m = settled(state)
        for start in range(first // chunk * chunk, last, chunk):
            here = cut(span, start, chunk)
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

        s = product(q_tile, tl.trans(k_tile), None, plan)
        if scores.pre is not None:
            s = s * scores.pre
        if scores.softcap is not None:
            s = tanh(s)
        if pairs.bias is not None:
            if scores.softcap is not None:
                s = s * scores.softcap
            bias = load_tile(pairs.bias + col * pairs.bias_step, pairs.row_ok, j_ok[None, :], True, edge)
            s = s + bias.to(plan.acc_dtype)
        if edge:
            s = tl.where((j[None, :] >= pairs.lo) & (j[None, :] < pairs.hi), s, float("-inf"))
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


@triton.jit
def store_rows(o, lse, low, state, at_o, at_lse, ok, scores, dv, block_dv: tl.constexpr):
    """Rows of o, and of lse and low unless these are None, from the state of all their keys. ``at_o``, ``at_lse``:
    where they are, in rows of o and in elements of lse, as columns."""
    acc, l, m = state
    ddv = tl.arange(0, block_dv)[None, :]
    out = acc * (1.0 / tl.where(l == 0.0, 1.0, l))[:, None]  # l = 0: every key masked, and acc is 0 too
    tl.store(o + at_o * dv + ddv, out.to(o.dtype.element_ty), mask=ok & (ddv < dv))
    if lse is not None or low is not None:
        total, rest = log_sum(l, m, scores)
        if lse is not None:
            tl.store(lse + at_lse, total[:, None], mask=ok)
        if low is not None:
            tl.store(low + at_lse, rest[:, None], mask=ok)


@triton.jit
def attention_kernel(
    q, k, v, bias, q_segments, kv_segments, o, lse, low, parts, statistics, scores, window, tiles_q, chunk, chunks,
    extents, strides, plan: tl.constexpr,
):  # fmt: skip
    """A tile of block_q rows of o, and of lse and low (lse_low) unless these are None. ``lib.heads`` says what the groups
    hold.

    chunk: how many keys have a state of their own (``lib.split_kv``), None for all. parts, statistics: None; or one chunk is
    this program's, of ``chunks`` that its tile sees, and the chunk's state goes there.
    """
    _, right = window
    owners, step = extents.heads, 1
    if plan.packed:
        owners, step = extents.heads // extents.group, extents.group
    tile, owner, batch = program(tiles_q, owners)
    share = None
    if parts is not None:
        share, batch = (batch % chunks).to(tl.int32), batch // chunks
    if right is not None:
        tile = tiles_q - 1 - tile  # the last queries may see most keys: start them first
    head = owner * step
    i, heads, _, _ = rows_of(tile, head, extents, plan)
    i_ok, row = i < extents.q_len, i.to(tl.int64)
    q_tile = load_head(q, strides.q, batch, heads, row, i_ok, extents.d, plan.block_d, plan.ragged_d)
    place = tile, head, head // extents.group, batch
    operands = k, v, bias, q_segments, kv_segments
    state = nothing(plan)
    state = over_keys(visit, state, q_tile, place, operands, strides, scores, window, extents, plan, chunk, share)
    if chunk is None:
        state = settled(state)

    at = (batch * extents.heads + heads) * extents.q_len + row
    if parts is None:
        at_o = (batch * extents.q_len + row) * extents.heads + heads
        store_rows(o, lse, low, state, at_o, at, i_ok, scores, extents.dv, plan.block_dv)
    else:
        store_part(parts, statistics, state, at * chunks + share, i_ok, extents.dv, plan.block_dv)


@triton.jit(do_not_specialize=["chunks", "total"])
def attention_combine_kernel(
    parts, statistics, o, lse, low, scores, chunks, heads, q_len, total, dv,
    rows: tl.constexpr, block_dv: tl.constexpr, acc_dtype: tl.constexpr, follows: tl.constexpr,
):  # fmt: skip
    """o, and lse and low unless these are None, of ``rows`` of the ``total`` rows, whose ``chunks`` parts are merged in
    order.

    parts: (batch, heads, q_len, chunks, dv); statistics: (batch, heads, q_len, chunks, 2), l and m. follows: launched
    before the kernel that writes these has ended, for whose end it waits here.
    """
    if follows:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    row_ok, ddv = row < total, tl.arange(0, block_dv)[None, :]
    acc = tl.full([rows, block_dv], 0.0, acc_dtype)
    l = tl.full([rows], 0.0, acc_dtype)
    m = tl.full([rows], float("-inf"), acc_dtype)
    for first in range(0, chunks, AHEAD):
        read = ()
        for ahead in tl.static_range(AHEAD):
            chunk = first + ahead
            at, ok = row * chunks + chunk, row_ok & (chunk < chunks)
            acc_part = tl.load(parts + at[:, None] * dv + ddv, mask=ok[:, None] & (ddv < dv), other=0.0)
            l_part = tl.load(statistics + at * 2, mask=ok, other=0.0)
            m_part = tl.load(statistics + at * 2 + 1, mask=ok, other=float("-inf"))
            read = read + ((acc_part, l_part, m_part),)  # type: ignore[assignment]
        tl.debug_barrier()  # else each part is read when the one before is merged, and waited for
        for ahead in tl.static_range(AHEAD):
            acc, l, m = merge((acc, l, m), read[ahead], scores)
    head, batch, query = row // q_len % heads, row // q_len // heads, row % q_len
    at_o = ((batch * q_len + query) * heads + head)[:, None]
    store_rows(o, lse, low, (acc, l, m), at_o, row[:, None], row_ok[:, None], scores, dv, block_dv)


def padded(d: int) -> int:
    """The tile extent that a head dimension takes: dots want powers of two, of at least 16."""
    return pow2_at_least(d, 16)


def head_tiles(call: Call) -> tuple[int, int]:
    """The tile extents that d and dv take: ``padded``, but in 16 bits on Hopper alike up to 64, where rows of 128 bytes
    begin.

    A k and v that cannot be copied asynchronously (one stage, or rows that are no multiple of 4 bytes) take turns at
    one address of shared memory. Where their tiles differ in layout, which rows of 32, 64 and 128 bytes do, ptxas 12.8,
    which Triton 3.6 brings, forms addresses for the matrix unit from uniform registers that nothing wrote: products
    past the first 16 keys read other memory, or leave shared memory. ptxas 12.9 is right (``undefined_registers``).
    """
    d, dv = padded(call.dims["d"]), padded(call.dims["dv"])
    least = min(64, max(d, dv)) if call.target.arch == "sm_90" and call.dtype in ("float16", "bfloat16") else 0
    return max(d, least), max(dv, least)


def key(call: Call) -> dict[str, str | int]:
    """Of the head dimensions, the dtype and the target alone, never of how many queries, heads or samples there are.

    ``size``: bytes of an element, by which float64 is told from float32.
    """
    size = numpy_dtype(call.dtype).itemsize
    return {"products": products(call, call.dtype), "d": max(call.dims["d"], call.dims["dv"]), "size": size}


def fit(call: Call, tiling: Mapping[str, int]) -> Mapping[str, int]:
    """Fewer stages, then fewer keys at a time, where shared memory has no room: a bias takes some too."""
    limit = shared_limit(call.target.arch)
    if shared_bytes(call, tiling) <= limit:
        return tiling
    smaller = dict(tiling)
    while smaller["num_stages"] > 1 and shared_bytes(call, smaller) > limit:
        smaller["num_stages"] -= 1
    while smaller["block_kv"] > 16 and shared_bytes(call, smaller) > limit:
        smaller["block_kv"] //= 2
    return smaller


def shared_bytes(call: Call, tiling: Mapping[str, int]) -> int:
    """Shared memory that the compiler gives this call: q, and a buffer a stage for each tile that the loop loads.

    On AMD a stage is one buffer less, q passes through before the loop and p within it.
    """
    size, bias = (2 if call.dtype in ("float16", "bfloat16") else 4), call.arrays["bias"]
    (d, dv), block_q, block_kv, stages = head_tiles(call), tiling["block_q"], tiling["block_kv"], tiling["num_stages"]
    if call.target.arch.startswith("gfx"):
        return max(block_q * d * size, max(1, stages - 1) * block_kv * (d + dv) * size + block_q * block_kv * size)
    extra = 0 if bias is None else block_q * block_kv * bias.element_size()
    extra += 0 if call.arrays["q_segment_ids"] is None else block_kv * 8
    if precision_of(call, tiling) == "threefold":  # both parts of q, and of k or v in turn
        parts = 2 * (block_q * d + block_kv * max(d, dv))
        return (parts + (stages - 1) * block_kv * (d + dv)) * size + max(0, stages - 1) * extra
    return (block_q * d + stages * block_kv * (d + dv)) * size + max(0, stages - 1) * extra


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    dims, block_q, block_kv = call.dims, tiling["block_q"], tiling["block_kv"]
    d, dv = head_tiles(call)
    if dims["q_len"] + dims["kv_len"] > 1 << 30:
        return "more than 2^30 queries and keys: positions are 32-bit here"
    if max(block_q * block_kv, max(block_q, block_kv) * max(d, dv)) > 1 << 20:
        return (
            f"tiles of {block_q} x {block_kv} at head dimensions {dims['d']} and {dims['dv']} exceed Triton's limit "
            "of 2^20 elements"
        )
    if not call.interpret:
        shared, limit = shared_bytes(call, tiling), shared_limit(call.target.arch)
        if shared > limit:
            return (
                f"tiles of {block_q} x {block_kv} with {tiling['num_stages']} stages take {shared} bytes of shared "
                f"memory; {call.target.arch} has {limit}"
            )
    _, programs, _, _ = programs_of(call, tiling, rows_plan(call, tiling)[0])
    return refuse_common(
        call, tiling["num_warps"], programs, (f"a tile of {block_q} x {block_kv}", block_q * (dv + block_kv))
    )


def least_chunk(call: Call) -> dict[str, int]:
    """So many keys at least have a state of their own, where no row of a table says otherwise.

    At each border the loop over keys ends and begins anew. On an H100 (bfloat16, d 128, 4096 queries and keys) eight
    chunks of 512 took 14 % longer than one of all keys, so some 2 % a border; half of it is the price of 1024, at which
    one row of 8 heads over 8192 keys still has 64 programs.
    """
    return {"chunk": 1024}


@BACKEND.implements("attention", tiling=least_chunk, key=key, fit=fit, supports=supports, knobs=KNOBS)
def attention(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    arrays, dims, options = call.arrays, call.dims, call.options
    q, k, v, bias = arrays["q"], arrays["k"], arrays["v"], arrays["bias"]
    segments = arrays["q_segment_ids"], arrays["kv_segment_ids"]
    if not call.interpret:
        k, v = _head_dim_innermost(k), _head_dim_innermost(v)
    plan, how = rows_plan(call, tiling)
    batch, q_len, heads, dv = dims["batch"], dims["q_len"], dims["kv_heads"] * dims["group"], dims["dv"]
    o, lse, low = results(call, q)

    scores = Scores.of(call)
    window = _band(options["is_causal"], options["window"], q_len + dims["kv_len"])
    extents = Extents(heads, dims["group"], q_len, dims["kv_len"], dims["d"], dv)
    strides = strides_of(q, k, v, bias, segments, (batch, heads, q_len, dims["kv_len"]))
    tiles_q, programs, chunk, chunks = programs_of(call, tiling, plan)
    parts, statistics, out = None, None, (o, lse, low)
    if chunks:
        accurate = torch_dtype("float64" if call.dtype == "float64" else "float32")
        parts = fresh((batch, heads, q_len, chunks, dv), accurate, q.device)
        statistics = fresh((batch, heads, q_len, chunks, 2), accurate, q.device)
        out = None, None, None
    launch(attention_kernel, programs, call, q, k, v, bias, *segments, *out, parts, statistics,
           scores, window, tiles_q, chunk, chunks, extents, strides, plan=plan, **how)  # fmt: skip
    if chunks:
        combine(call, (parts, statistics), (o, lse, low), scores)
    return o, lse, low


def results(call: Call, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Memory for o, lse and lse_low; None for one of these that nobody wants."""
    (shape, _), *rows = (call.outputs[name] for name in ("o", "lse", "lse_low"))
    o = fresh(shape, q.dtype, q.device)
    wanted = ("lse" in call.wants, "lse_low" in call.wants)
    lse, low = (
        fresh(extents, torch_dtype(dtype), q.device) if there else None
        for (extents, dtype), there in zip(rows, wanted, strict=True)
    )
    return o, lse, low


def combine(
    call: Call, found: tuple[Any, Any], out: tuple[Any, Any, Any], scores: Scores, follows: bool = False
) -> None:
    """Merge the parts and statistics that were ``found`` into o, lse and lse_low. ``follows``: NVIDIA's, see the
    kernel."""
    batch, heads, q_len, chunks, dv = found[0].shape
    total, block_dv = batch * heads * q_len, head_tiles(call)[1]
    rows = max(1, AT_ONCE // block_dv) if total > FEW_ROWS else 1
    launch(attention_combine_kernel, cdiv(total, rows), call, *found, *out, scores, chunks, heads, q_len, total,
           dv, rows=rows, block_dv=block_dv, acc_dtype=accumulator(call.dtype), follows=follows,
           num_warps=4, **({"launch_pdl": True, "maxnreg": 128} if follows else {}))  # fmt: skip


def rows_plan(call: Call, tiling: Mapping[str, int]) -> tuple[Plan, dict[str, int]]:
    """How a tile's rows are chosen and computed, and what the compiler is told.

    A head whose queries do not fill a tile shares it with the other heads of its group; rows that are few altogether
    take a tile of ``few_q``, with ``few_stages`` of keys on their way, or as many as there is room for. None of it
    moves a bit of a row where a row of scores lies in as many lanes either way, which is why ``few_q`` stands in rows
    of tables and has no formula.
    """
    dims, block_q, warps, stages = call.dims, tiling["block_q"], tiling["num_warps"], tiling["num_stages"]
    packed = dims["group"] > 1 and dims["q_len"] < block_q
    few = min(tiling.get("few_q", block_q), block_q)
    if dims["q_len"] * (dims["group"] if packed else 1) <= few < block_q:
        block_q, warps = few, min(warps, max(4, warps * few // block_q))
        for more in range(stages + 1, tiling.get("few_stages", stages) + 1):
            needed = shared_bytes(call, {**tiling, "block_q": few, "num_stages": more})
            stages = more if needed <= shared_limit(call.target.arch) else stages
    (block_d, block_dv), d, dv = head_tiles(call), dims["d"], dims["dv"]
    plan = Plan(block_q, tiling["block_kv"], block_d, block_dv, block_d != d, block_dv != dv,
                precision_of(call, tiling), accumulator(call.dtype), packed=packed)  # fmt: skip
    return plan, compiler_options(tiling) | {"num_warps": warps, "num_stages": stages}


def programs_of(call: Call, tiling: Mapping[str, int], plan: Plan) -> tuple[int, int, int | None, int | None]:
    """(tiles of queries that a head has, or a group; programs; keys of a chunk, or None; chunks of a tile that have
    programs of their own, or None)."""
    dims, chunk = call.dims, chunk_length(call, tiling)
    packed = dims["group"] if plan.packed else 1
    tiles_q = cdiv(dims["q_len"] * packed, plan.block_q)
    programs = tiles_q * dims["kv_heads"] * (dims["group"] // packed) * dims["batch"]
    if chunk is None:
        return tiles_q, programs, None, None
    chunks = chunks_of_a_tile(call, chunk, min(dims["q_len"], cdiv(plan.block_q, packed) + 1))
    if chunks > 1 and worth_spreading(call, programs, chunks):
        return tiles_q, programs * chunks, chunk, chunks
    return tiles_q, programs, chunk, None


def _head_dim_innermost(x: torch.Tensor) -> torch.Tensor:
    """``x``, gathered into a copy where its elements of one head are not adjacent.

    Triton 3.6 compiles the kernel wrongly for Hopper when k is read across a stride: values come out wrong, or reads
    leave shared memory (compute-sanitizer: invalid __shared__ read), with value heads of up to 32. Such reads would not
    coalesce either.
    """
    return x if x.stride(-1) == 1 else gathered(x)


def _band(is_causal: bool, window: tuple[int | None, int | None] | None, enough: int) -> tuple[int | None, int | None]:
    """Causal and window masks as one: how far left and right of its own place a query sees, None for all the way."""
    left, right = window or (None, None)
    if is_causal:
        right = 0
    return (None if left is None else min(left, enough)), (None if right is None else min(right, enough))
