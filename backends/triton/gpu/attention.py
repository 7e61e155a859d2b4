"""Scaled dot-product attention, one pass over the keys per tile of queries (Dao 2023, FlashAttention-2, algorithm 1).

    s_ij = cap(scale q_i . k_j) + bias_ij,  -inf where masked        cap(s) = c tanh(s / c)
    m_i = max_j s_ij        p_ij = exp(s_ij - m_i)        l_i = sum_j p_ij        o_i = sum_j p_ij v_j / l_i        lse_i = m_i + log l_i

A program owns block_q queries of one head and walks its keys in tiles of block_kv, keeping m, l and the unnormalised o (``acc``) and
rescaling them whenever m grows (online softmax, Milakov and Gimelshein 2018). Tiles that causal and window masks empty are not visited;
only tiles on a mask's edge, or over the end of the keys, pay for masking. Tile borders lie at multiples of block_kv whatever the masks,
and a tile that is masked for a row leaves the row's state as it is to the bit, so no row depends on its neighbours.

The scores and m stay in the unit in which they arise, |scale| for plain dots, c under a softcap, 1 once a bias is added; p = 2^((s - m) rate)
with rate = unit log2(e), since ``exp2`` is the hardware's instruction. The difference comes before the factor (see ``score_unit``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import e, log2
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu.matmul import products
from portakern.backends.triton.launch import (
    accumulator,
    cdiv,
    compiler_options,
    dot_precision,
    prepare,
    refuse_common,
    shared_limit,
    torch_dtype,
)
from portakern.backends.triton.layout import SHAPES, fresh, pow2_at_least
from portakern.spec import Count, Tile
from portakern.specs.attention import score_unit

if TYPE_CHECKING:
    from portakern.call import Call

KNOBS = {"num_warps": Tile(1, 16), "num_stages": Count(1, 8), "matrix_instr_nonkdim": Tile(16, 32)}


@triton.jit
def tanh(x):
    """Within a few units in the last place for every x, in float32 and in float64: Lambert's continued fraction, cut at the seventh
    term, up to 1/2 (it is exact to 2e-16 there), and (1 - e) / (1 + e) with e = exp(-2|x|) beyond, where 1 - e does not cancel."""
    x2 = x * x
    num = 135135.0 + x2 * (17325.0 + x2 * (378.0 + x2))
    den = 135135.0 + x2 * (62370.0 + x2 * (3150.0 + x2 * 28.0))
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.5, x * (num / den), tl.where(x < 0.0, -large, large))


@triton.jit
def load_tile(ptr, row_ok, col_ok, mask_rows: tl.constexpr, mask_cols: tl.constexpr):
    """Masked lanes read 0, so that memory past an extent, which may hold NaN, meets no product."""
    if mask_rows and mask_cols:
        return tl.load(ptr, mask=row_ok & col_ok, other=0.0)
    elif mask_rows:
        return tl.load(ptr, mask=row_ok, other=0.0)
    elif mask_cols:
        return tl.load(ptr, mask=col_ok, other=0.0)
    else:
        return tl.load(ptr)


@triton.jit
def visit(acc, l, m, q_tile, first, last, k, v, bias, kv_segments, q_segment, i_ok, limit_lo, limit_hi,
          d, dv, kv_len, pre, softcap, rate, k_s, k_d, v_s, v_d, bias_s, kv_seg_s,
          block_kv: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr, whole_d: tl.constexpr, whole_dv: tl.constexpr, edge: tl.constexpr,
          precision: tl.constexpr, acc_dtype: tl.constexpr):  # fmt: skip
    """Fold the keys from ``first`` to ``last`` into (acc, l, m). ``edge``: some pair may lie outside [limit_lo, limit_hi)."""
    dd, ddv = tl.arange(0, block_d)[None, :], tl.arange(0, block_dv)[None, :]
    for start in range(first, last, block_kv):
        j = start + tl.arange(0, block_kv)
        j_ok = j < kv_len
        row, col = j.to(tl.int64)[:, None], j.to(tl.int64)[None, :]
        k_tile = load_tile(k + (row * k_s + dd.to(tl.int64) * k_d), j_ok[:, None], dd < d, edge, not whole_d)

        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=precision, out_dtype=acc_dtype)
        if pre is not None:
            s = s * pre
        if softcap is not None:
            s = tanh(s)
        if bias is not None:
            if softcap is not None:
                s = s * softcap
            s = s + load_tile(bias + col * bias_s, i_ok, j_ok[None, :], True, edge).to(acc_dtype)
        if edge:
            s = tl.where((j[None, :] >= limit_lo) & (j[None, :] < limit_hi), s, float("-inf"))
        if kv_segments is not None:
            kv_segment = tl.load(kv_segments + col * kv_seg_s, mask=j_ok[None, :], other=0)
            s = tl.where(q_segment == kv_segment, s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key allowed so far: -inf - -inf would be NaN
        p, alpha = tl.exp2((s - shift[:, None]) * rate), tl.exp2((m - shift) * rate)
        l = l * alpha + tl.sum(p, 1)
        m = m_new
        v_tile = load_tile(v + (row * v_s + ddv.to(tl.int64) * v_d), j_ok[:, None], ddv < dv, edge, not whole_dv)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=precision, out_dtype=acc_dtype)
    return acc, l, m


@triton.jit
def attention_kernel(q, k, v, bias, q_segments, kv_segments, o, lse, pre, softcap, rate, unit, left, right,
                     tiles_q, heads, group, q_len, kv_len, d, dv,
                     q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d, bias_b, bias_h, bias_q, bias_s, q_seg_b, q_seg_s, kv_seg_b, kv_seg_s,
                     block_q: tl.constexpr, block_kv: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
                     whole_d: tl.constexpr, whole_dv: tl.constexpr, precision: tl.constexpr, acc_dtype: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0) % tiles_q
    if right is not None:
        tile = tiles_q - 1 - tile  # the last queries may see most keys: start them first
    head = (tl.program_id(0) // tiles_q % heads).to(tl.int64)
    batch = (tl.program_id(0) // tiles_q // heads).to(tl.int64)
    i = tile * block_q + tl.arange(0, block_q)
    i_ok, row, dd = (i < q_len)[:, None], i.to(tl.int64)[:, None], tl.arange(0, block_d)[None, :]
    q_tile = load_tile(
        q + (batch * q_b + head * q_h) + (row * q_s + dd.to(tl.int64) * q_d), i_ok, dd < d, True, not whole_d
    )
    k += batch * k_b + (head // group) * k_h
    v += batch * v_b + (head // group) * v_h
    if bias is not None:
        bias += batch * bias_b + head * bias_h + row * bias_q
    q_segment = None
    if q_segments is not None:
        q_segment = tl.load(q_segments + batch * q_seg_b + row * q_seg_s, mask=i_ok, other=0)
        kv_segments += batch * kv_seg_b

    # Row i may see the keys [limit_lo, limit_hi). Some row of the tile sees [first, last), every row sees [lo_all, hi_all).
    at = kv_len - q_len  # query i stands beside key i + at
    top, bottom = tile * block_q + at, tl.minimum(tile * block_q + block_q, q_len) - 1 + at
    first, lo_all = tile * 0, tile * 0
    last, hi_all = first + kv_len, first + kv_len
    limit_lo, limit_hi = tl.zeros([block_q, 1], tl.int32), tl.full([block_q, 1], kv_len, tl.int32)
    if left is not None:
        limit_lo = i[:, None] + (at - left)
        first, lo_all = tl.maximum(top - left, 0) // block_kv * block_kv, tl.maximum(bottom - left, 0)
    if right is not None:
        limit_hi = tl.minimum(i[:, None] + (at + right + 1), kv_len)
        last, hi_all = (
            tl.minimum(tl.maximum(bottom + right + 1, 0), kv_len),
            tl.minimum(tl.maximum(top + right + 1, 0), kv_len),
        )
    inner_first = tl.minimum((lo_all + block_kv - 1) // block_kv * block_kv, last)
    inner_last = tl.maximum(hi_all // block_kv * block_kv, inner_first)

    m = tl.full([block_q], float("-inf"), acc_dtype)
    l = tl.zeros([block_q], acc_dtype)
    acc = tl.zeros([block_q, block_dv], acc_dtype)
    if left is not None:
        acc, l, m = visit(acc, l, m, q_tile, first, inner_first, k, v, bias, kv_segments, q_segment, i_ok, limit_lo, limit_hi, d, dv, kv_len, pre, softcap, rate,
                          k_s, k_d, v_s, v_d, bias_s, kv_seg_s, block_kv, block_d, block_dv, whole_d, whole_dv, True, precision, acc_dtype)  # fmt: skip
    acc, l, m = visit(acc, l, m, q_tile, inner_first, inner_last, k, v, bias, kv_segments, q_segment, i_ok, limit_lo, limit_hi, d, dv, kv_len, pre, softcap, rate,
                      k_s, k_d, v_s, v_d, bias_s, kv_seg_s, block_kv, block_d, block_dv, whole_d, whole_dv, False, precision, acc_dtype)  # fmt: skip
    acc, l, m = visit(acc, l, m, q_tile, inner_last, last, k, v, bias, kv_segments, q_segment, i_ok, limit_lo, limit_hi, d, dv, kv_len, pre, softcap, rate,
                      k_s, k_d, v_s, v_d, bias_s, kv_seg_s, block_kv, block_d, block_dv, whole_d, whole_dv, True, precision, acc_dtype)  # fmt: skip

    ddv = tl.arange(0, block_dv)[None, :]
    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]  # l = 0: every key masked, and acc is 0 too
    tl.store(o + ((batch * q_len + row) * heads + head) * dv + ddv, out.to(o.dtype.element_ty), mask=i_ok & (ddv < dv))
    if lse is not None:
        total = m * unit + tl.log(l)
        tl.store(lse + (batch * heads + head) * q_len + i, total, mask=i < q_len)


def padded(d: int) -> int:
    """The tile extent that a head dimension takes: dots want powers of two, of at least 16."""
    return pow2_at_least(d, 16)


def head_tiles(call: Call) -> tuple[int, int]:
    """The tile extents that d and dv take: ``padded``, but in 16 bits on Hopper alike up to 64, where rows of 128 bytes begin.

    A k and v that cannot be copied asynchronously (one stage, or rows that are no multiple of 4 bytes) take turns at one address of shared memory. Where their
    tiles differ in layout, which rows of 32, 64 and 128 bytes do, ptxas 12.8, which Triton 3.6 brings, forms addresses for the matrix unit from uniform
    registers that nothing wrote: products past the first 16 keys read other memory, or leave shared memory. ptxas 12.9 is right (``undefined_registers``).
    """
    d, dv = padded(call.dims["d"]), padded(call.dims["dv"])
    least = min(64, max(d, dv)) if call.target.arch == "sm_90" and call.dtype in ("float16", "bfloat16") else 0
    return max(d, least), max(dv, least)


def key(call: Call) -> dict[str, str | int]:
    """Of the head dimensions, the dtype and the target alone, never of how many queries, heads or samples there are."""
    return {"products": products(call, call.dtype), "d": max(call.dims["d"], call.dims["dv"])}


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
    return (block_q * d + stages * block_kv * (d + dv)) * size + max(0, stages - 1) * extra


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    dims, block_q, block_kv = call.dims, tiling["block_q"], tiling["block_kv"]
    d, dv = head_tiles(call)
    if dims["q_len"] + dims["kv_len"] > 1 << 30:
        return "more than 2^30 queries and keys: positions are 32-bit here"
    if max(block_q * block_kv, max(block_q, block_kv) * max(d, dv)) > 1 << 20:
        return f"tiles of {block_q} x {block_kv} at head dimensions {dims['d']} and {dims['dv']} exceed Triton's limit of 2^20 elements"
    if not call.interpret:
        shared, limit = shared_bytes(call, tiling), shared_limit(call.target.arch)
        if shared > limit:
            return f"tiles of {block_q} x {block_kv} with {tiling['num_stages']} stages take {shared} bytes of shared memory; {call.target.arch} has {limit}"
    programs = cdiv(dims["q_len"], block_q) * dims["kv_heads"] * dims["group"] * dims["batch"]
    return refuse_common(
        call, tiling["num_warps"], programs, (f"a tile of {block_q} x {block_kv}", block_q * (dv + block_kv))
    )


_prepared = functools.lru_cache(SHAPES)(functools.partial(prepare, attention_kernel))


@BACKEND.implements("attention", key=key, fit=fit, supports=supports, knobs=KNOBS)
def attention(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    arrays, dims, options = call.arrays, call.dims, call.options
    q, k, v, bias, q_segments, kv_segments = (
        arrays[n] for n in ("q", "k", "v", "bias", "q_segment_ids", "kv_segment_ids")
    )
    if not call.interpret:
        k, v = _head_dim_innermost(k), _head_dim_innermost(v)
    batch, q_len, heads, d = q.shape
    kv_len, dv = dims["kv_len"], dims["dv"]
    o = fresh((batch, q_len, heads, dv), q.dtype, q.device)
    lse = None
    if "lse" in call.wants:
        lse = fresh((batch, heads, q_len), torch_dtype(call.outputs["lse"][1]), q.device)
    left, right = _band(options["is_causal"], options["window"], q_len + kv_len)
    pre, unit = score_unit(call)
    bias_strides = (0, 0, 0, 0) if bias is None else bias.expand(batch, heads, q_len, kv_len).stride()
    q_seg_strides, kv_seg_strides = (
        ((0, 0), (0, 0)) if q_segments is None else (q_segments.stride(), kv_segments.stride())
    )
    (block_d, block_dv), tiles_q = head_tiles(call), cdiv(q_len, tiling["block_q"])
    run = _prepared(tiles_q * heads * batch, pre, options["softcap"], unit * log2(e), unit, left, right, tiles_q, heads, dims["group"], q_len, kv_len, d, dv,
                    *q.stride(), *k.stride(), *v.stride(), *bias_strides, *q_seg_strides, *kv_seg_strides,
                    block_q=tiling["block_q"], block_kv=tiling["block_kv"], block_d=block_d, block_dv=block_dv, whole_d=block_d == d, whole_dv=block_dv == dv,
                    precision=dot_precision(call), acc_dtype=accumulator(call.dtype), **compiler_options(tiling))  # fmt: skip
    run(call, q, k, v, bias, q_segments, kv_segments, o, lse)
    return (o, lse)


def _head_dim_innermost(x: torch.Tensor) -> torch.Tensor:
    """``x``, gathered into a copy where its elements of one head are not adjacent.

    Triton 3.6 compiles the kernel wrongly for Hopper when k is read across a stride: values come out wrong, or reads leave shared memory (compute-sanitizer:
    invalid __shared__ read), with value heads of up to 32. Such reads would not coalesce either.
    """
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _band(is_causal: bool, window: tuple[int | None, int | None] | None, enough: int) -> tuple[int | None, int | None]:
    """Causal and window masks as one band: how far left and right of its own place a query sees, None for all the way."""
    left, right = window or (None, None)
    if is_causal:
        right = 0
    return (None if left is None else min(left, enough)), (None if right is None else min(right, enough))
