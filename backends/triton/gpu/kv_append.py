"""Keys and values of new tokens written into a cache of pages, on the way turned by positions and rounded to 8 bits.

    k_out[slots[t] // page_size, slots[t] % page_size] = rope(k[t]) / k_scale        v_out likewise, of v[t] / v_scale

k: (tokens, kv_heads, d), v: (tokens, kv_heads, dv), of any strides; the result in row-major order, so that slot s is
row s of (pages * page_size, kv_heads * d). A program owns a token: it reads its slot, and writes its row of k and its
row of v. A token whose slot is negative, or beyond the cache, is written nowhere. Where a result is a new array,
another kernel copies the cache before, of which a program owns a slot.

A row that is written as it is is a line of numbers, of which block_n are copied at a time. Where keys are turned,
numbers are scaled, or pages have 8 bits, a tile is (heads, pairs) or (heads, numbers), of block_n numbers: then a scale
is read once a head, and no index is divided. A pair is turned by the expressions of rope's kernel, in float32, divided
by the scale, and rounded once; codes are made as quantize makes them.

The layout is that of Kwon et al. 2023, "PagedAttention"; the turn is that of Su et al. 2021, "RoFormer".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import AppendConfig
from portakern.backends.triton.gpu.quantize import CodeFormat, code_of, converts, word_of
from portakern.backends.triton.launch import accumulator, launch, refuse_common, torch_dtype
from portakern.backends.triton.layout import fresh_like, pow2_at_least

if TYPE_CHECKING:
    from portakern.core.call import Call


class AppendExtents(NamedTuple):
    """``slots``: places in the cache; ``heads``, and ``d`` and ``dv``, numbers of a head of k and of v; ``pairs``:
    that are turned of a head of k."""

    slots: int
    heads: int
    d: int
    dv: int
    pairs: int


class AppendStrides(NamedTuple):
    """Of k and v along (tokens, heads, d), of slots, of cos and sin along (tokens, pairs), of the scales."""

    k: Any
    v: Any
    slots: int
    cos: Any
    sin: Any
    k_scale: int
    v_scale: int


class AppendPlan(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
      block_n: numbers of a step of a row that is copied; k_copied, v_copied: rows are, as they are; k_dense, v_dense:
        whether the heads of a token lie beside each other.
      heads, numbers: of a tile of a row that is not; pairs: of a tile of pairs, with as many heads.
      turned: keys are; full: every number of a head of k is in a pair; interleaved: a pair is two neighbours.
      acc_dtype: what is computed in; word: the integer as wide; mantissa: bits of its significand.
      native: floats of 8 bits are converted by the hardware.
      k_code, k_code_bias, k_largest, v_code, v_code_bias, v_largest: of pages of 8 bits, as in
        :class:`portakern.backends.triton.gpu.quantize.CodeFormat`; 0 of wide ones.
    """

    block_n: int
    k_copied: bool
    v_copied: bool
    k_dense: bool
    v_dense: bool
    heads: int
    numbers: int
    pairs: int
    turned: bool
    full: bool
    interleaved: bool
    acc_dtype: tl.dtype
    word: tl.dtype
    mantissa: int
    native: bool
    k_code: int
    k_code_bias: int
    k_largest: float
    v_code: int
    v_code_bias: int
    v_largest: float


class CacheExtents(NamedTuple):
    """Of one cache: places of a page, its heads, and their numbers."""

    page_size: int
    heads: int
    d: int


class CachePlan(NamedTuple):
    """What the kernel is compiled for: numbers of a step, and whether the heads of a slot lie beside each other."""

    block_n: int
    dense: bool


@triton.jit
def kv_append_row(source, target, heads, d, of_head, of_number, dense: tl.constexpr, block_n: tl.constexpr):
    """One row of (heads, d), of any strides, copied to one without gaps."""
    width = heads * d
    for first in range(0, width, block_n):
        n = first + tl.arange(0, block_n)
        if dense:
            at = n.to(tl.int64)
        else:
            at = (n // d).to(tl.int64) * of_head + (n % d).to(tl.int64) * of_number
        tl.store(target + n, tl.load(source + at, mask=n < width), mask=n < width)


@triton.jit
def inverses(scale, h, heads, of_scale, plan: tl.constexpr):
    """1 / scale of the heads h; 1 without scales."""
    one = tl.full(h.shape, 1.0, plan.acc_dtype)
    if scale is None:
        return one
    else:
        return tl.div_rn(one, tl.load(scale + h * of_scale, mask=h < heads, other=1.0).to(plan.acc_dtype))


@triton.jit
def kv_append_store(target, x, inverse, ok, code: tl.constexpr, code_bias: tl.constexpr, largest: tl.constexpr,
                    plan: tl.constexpr):  # fmt: skip
    """x / scale, in pages of k's dtype or as codes."""
    found = x.to(plan.acc_dtype) * inverse
    if code > 0:
        found = code_of(found, code, code_bias, largest, plan)
    tl.store(target, found.to(target.dtype.element_ty), mask=ok)


@triton.jit
def kv_append_numbers(source, scale, target, begin, extents, strides, code: tl.constexpr, code_bias: tl.constexpr,
                      largest: tl.constexpr, plan: tl.constexpr):  # fmt: skip
    """The numbers of each head from ``begin`` on. extents: heads, numbers of each; strides: of heads, of numbers, of
    scales."""
    heads, d = extents
    of_head, of_number, of_scale = strides
    for first_head in range(0, heads, plan.heads):
        h = first_head + tl.arange(0, plan.heads)[:, None]
        inverse = inverses(scale, h, heads, of_scale, plan)
        for first in range(begin, d, plan.numbers):
            n = first + tl.arange(0, plan.numbers)[None, :]
            ok = (h < heads) & (n < d)
            at = h.to(tl.int64) * of_head + n.to(tl.int64) * of_number
            x = tl.load(source + at, mask=ok, other=0.0)
            kv_append_store(target + h * d + n, x, inverse, ok, code, code_bias, largest, plan)


@triton.jit
def kv_append_pairs(source, cos, sin, scale, target, extents, strides, code: tl.constexpr, code_bias: tl.constexpr,
                    largest: tl.constexpr, plan: tl.constexpr):  # fmt: skip
    """The pairs of each head, turned. extents: heads, numbers of each, pairs of each; strides: of heads, of numbers, of
    scales, of pairs in cos and in sin."""
    heads, d, pairs = extents
    of_head, of_number, of_scale, of_cos, of_sin = strides
    for first_head in range(0, heads, plan.heads):
        h = first_head + tl.arange(0, plan.heads)[:, None]
        inverse = inverses(scale, h, heads, of_scale, plan)
        for first in range(0, pairs, plan.pairs):
            p = first + tl.arange(0, plan.pairs)[None, :]
            ok = (h < heads) & (p < pairs)
            c = tl.load(cos + p.to(tl.int64) * of_cos, mask=p < pairs, other=0.0).to(plan.acc_dtype)
            s = tl.load(sin + p.to(tl.int64) * of_sin, mask=p < pairs, other=0.0).to(plan.acc_dtype)
            if plan.interleaved:
                n, m = 2 * p, 2 * p + 1
            else:
                n, m = p, p + pairs
            x = source + h.to(tl.int64) * of_head
            a = tl.load(x + n.to(tl.int64) * of_number, mask=ok, other=0.0).to(plan.acc_dtype)
            b = tl.load(x + m.to(tl.int64) * of_number, mask=ok, other=0.0).to(plan.acc_dtype)
            y = target + h * d
            kv_append_store(y + n, a * c - b * s, inverse, ok, code, code_bias, largest, plan)
            kv_append_store(y + m, b * c + a * s, inverse, ok, code, code_bias, largest, plan)


@triton.jit
def kv_append_kernel(
    k, v, slots, cos, sin, k_scale, v_scale, k_out, v_out, extents, strides, plan: tl.constexpr
):  # fmt: skip
    """One program a token."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t * strides.slots).to(tl.int64)
    if (slot >= 0) & (slot < extents.slots):
        heads, d, dv, pairs = extents.heads, extents.d, extents.dv, extents.pairs
        of_token, of_head, of_number = strides.k
        k_row, k_new = k_out + slot * (heads * d), k + t * of_token
        if plan.turned:
            of_row, of_cos = strides.cos
            of_line, of_sin = strides.sin
            kv_append_pairs(k_new, cos + t * of_row, sin + t * of_line, k_scale, k_row, (heads, d, pairs),
                            (of_head, of_number, strides.k_scale, of_cos, of_sin),
                            plan.k_code, plan.k_code_bias, plan.k_largest, plan)  # fmt: skip
            if not plan.full:
                kv_append_numbers(k_new, k_scale, k_row, 2 * pairs, (heads, d), (of_head, of_number, strides.k_scale),
                                  plan.k_code, plan.k_code_bias, plan.k_largest, plan)  # fmt: skip
        elif not plan.k_copied:
            kv_append_numbers(k_new, k_scale, k_row, 0, (heads, d), (of_head, of_number, strides.k_scale),
                              plan.k_code, plan.k_code_bias, plan.k_largest, plan)  # fmt: skip
        else:
            kv_append_row(k_new, k_row, heads, d, of_head, of_number, plan.k_dense, plan.block_n)
        of_token, of_head, of_number = strides.v
        v_row, v_new = v_out + slot * (heads * dv), v + t * of_token
        if not plan.v_copied:
            kv_append_numbers(v_new, v_scale, v_row, 0, (heads, dv), (of_head, of_number, strides.v_scale),
                              plan.v_code, plan.v_code_bias, plan.v_largest, plan)  # fmt: skip
        else:
            kv_append_row(v_new, v_row, heads, dv, of_head, of_number, plan.v_dense, plan.block_n)


@triton.jit
def kv_append_copy_kernel(pages, out, extents, strides, plan: tl.constexpr):
    """A cache of any strides, copied: one program a slot."""
    slot = tl.program_id(0)
    page, place = (slot // extents.page_size).to(tl.int64), (slot % extents.page_size).to(tl.int64)
    of_page, of_place, of_head, of_number = strides
    source = pages + page * of_page + place * of_place
    target = out + slot.to(tl.int64) * (extents.heads * extents.d)
    kv_append_row(source, target, extents.heads, extents.d, of_head, of_number, plan.dense, plan.block_n)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def default_tiling(call: Call) -> dict[str, int]:
    """Not measured: 16 bytes of 16-bit numbers for each thread of 4 warps."""
    return {"block_n": 1024, "num_warps": 4}


def supports(call: Call, config: AppendConfig) -> str | None:
    slots = call.dims["pages"] * call.dims["page_size"]
    return refuse_common(call, config.num_warps, max(call.dims["tokens"], slots))


def dense(x: Any) -> bool:
    """Whether the heads of a row, the last two axes, lie beside each other, without gaps."""
    heads, d = x.shape[-2:]
    return (x.stride(-1) == 1 or d == 1) and (x.stride(-2) == d or heads == 1)


def cache_of(call: Call, config: AppendConfig, output: str, name: str) -> Any:
    """The cache itself where the call is to write over it, else its copy."""
    over = call.overwritten(output)
    if over is not None:
        return over
    pages = call.arrays[name]
    number, size, heads, d = pages.shape
    out, plan = fresh_like(pages), CachePlan(config.block_n, dense(pages))
    launch(kv_append_copy_kernel, number * size, call, bytes_of(pages), bytes_of(out), CacheExtents(size, heads, d),
           pages.stride(), plan=plan, num_warps=config.num_warps)  # fmt: skip
    return out


def bytes_of(pages: Any) -> Any:
    """Pages of 8 bits as integers, which every chip copies; wider ones as they are."""
    return pages.view(torch_dtype("uint8")) if pages.element_size() == 1 else pages


def plan_of(call: Call, config: AppendConfig) -> AppendPlan:
    dims, arrays, turned = call.dims, call.arrays, call.arrays["cos"] is not None
    k, v = (
        CodeFormat(0, 0, 0.0) if call.dtype_of(name) == call.dtype else CodeFormat.of(call.dtype_of(name))
        for name in ("k_pages", "v_pages")
    )
    copied = [arrays[name] is None and not of.code for name, of in (("k_scale", k), ("v_scale", v))]
    numbers = pow2_at_least(max(dims["d"], dims["dv"]), 16, config.block_n)
    word, mantissa = word_of(call)
    return AppendPlan(
        config.block_n, copied[0] and not turned, copied[1], dense(arrays["k"]), dense(arrays["v"]),
        pow2_at_least(dims["kv_heads"], 1, config.block_n // numbers), numbers, numbers // 2,
        turned, turned and 2 * dims["pairs"] == dims["d"], call.options["interleaved"],
        accumulator(call.dtype), word, mantissa, converts(call), k.code, k.code_bias, k.largest,
        v.code, v.code_bias, v.largest,
    )  # fmt: skip


@BACKEND.implements(
    "kv_append", tiling=default_tiling, key=key, supports=supports, config=AppendConfig, overwrites=True
)
def kv_append(call: Call, config: AppendConfig) -> tuple[Any, ...]:
    dims, arrays = call.dims, call.arrays
    k_out, v_out = cache_of(call, config, "k_out", "k_pages"), cache_of(call, config, "v_out", "v_pages")
    if dims["tokens"]:
        names = ("k", "v", "slots", "cos", "sin", "k_scale", "v_scale")
        new, plan = [arrays[name] for name in names], plan_of(call, config)
        extents = AppendExtents(
            dims["pages"] * dims["page_size"], dims["kv_heads"], dims["d"], dims["dv"], dims["pairs"]
        )
        pages = [out if plan.native else bytes_of(out) for out in (k_out, v_out)]
        launch(kv_append_kernel, dims["tokens"], call, *new, *pages, extents, strides_of(call), plan=plan,
               num_warps=config.num_warps)  # fmt: skip
    return k_out, v_out


def strides_of(call: Call) -> AppendStrides:
    arrays = call.arrays
    cos, sin = ((0, 0) if arrays[n] is None else arrays[n].stride() for n in ("cos", "sin"))
    k_scale, v_scale = (0 if arrays[n] is None else arrays[n].stride(0) for n in ("k_scale", "v_scale"))
    of_slots = arrays["slots"].stride(0)
    return AppendStrides(arrays["k"].stride(), arrays["v"].stride(), of_slots, cos, sin, k_scale, v_scale)
