"""Keys and values of new tokens written into a cache of pages.

    k_out[slots[t] // page_size, slots[t] % page_size] = k[t]        v_out likewise

k: (tokens, kv_heads, d), v: (tokens, kv_heads, dv), of any strides; the result in row-major order, so that slot s is
row s of (pages * page_size, kv_heads * d). A program owns a token: it reads its slot, and copies its row of k and its
row of v, block_n numbers at a time. A token whose slot is negative, or beyond the cache, is copied nowhere. Where a
result is a new array, another kernel copies the cache before, of which a program owns a slot.

The layout is that of Kwon et al. 2023, "PagedAttention".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import AppendConfig
from portakern.backends.triton.launch import launch, refuse_common
from portakern.backends.triton.layout import fresh_like

if TYPE_CHECKING:
    from portakern.core.call import Call


class AppendExtents(NamedTuple):
    """``slots``: places in the cache; ``heads``, and ``d`` and ``dv``, numbers of a head of k and of v."""

    slots: int
    heads: int
    d: int
    dv: int


class AppendStrides(NamedTuple):
    """Of k and v along (tokens, heads, d), of slots."""

    k: Any
    v: Any
    slots: int


class AppendPlan(NamedTuple):
    """What the kernel is compiled for: numbers of a step, and whether the heads of a token of k, and of v, lie beside
    each other."""

    block_n: int
    k_dense: bool
    v_dense: bool


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
def kv_append_kernel(k, v, slots, k_out, v_out, extents, strides, plan: tl.constexpr):
    """One program a token."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t * strides.slots).to(tl.int64)
    if (slot >= 0) & (slot < extents.slots):
        heads, d, dv = extents.heads, extents.d, extents.dv
        of_token, of_head, of_number = strides.k
        k_row = k_out + slot * (heads * d)
        kv_append_row(k + t * of_token, k_row, heads, d, of_head, of_number, plan.k_dense, plan.block_n)
        of_token, of_head, of_number = strides.v
        v_row = v_out + slot * (heads * dv)
        kv_append_row(v + t * of_token, v_row, heads, dv, of_head, of_number, plan.v_dense, plan.block_n)


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
    launch(kv_append_copy_kernel, number * size, call, pages, out, CacheExtents(size, heads, d), pages.stride(),
           plan=plan, num_warps=config.num_warps)  # fmt: skip
    return out


@BACKEND.implements(
    "kv_append", tiling=default_tiling, key=key, supports=supports, config=AppendConfig, overwrites=True
)
def kv_append(call: Call, config: AppendConfig) -> tuple[Any, ...]:
    dims, (k, v, slots) = call.dims, (call.arrays[name] for name in ("k", "v", "slots"))
    k_out, v_out = cache_of(call, config, "k_out", "k_pages"), cache_of(call, config, "v_out", "v_pages")
    if dims["tokens"]:
        extents = AppendExtents(dims["pages"] * dims["page_size"], dims["kv_heads"], dims["d"], dims["dv"])
        strides = AppendStrides(k.stride(), v.stride(), slots.stride(0))
        plan = AppendPlan(config.block_n, dense(k), dense(v))
        launch(kv_append_kernel, dims["tokens"], call, k, v, slots, k_out, v_out, extents, strides, plan=plan,
               num_warps=config.num_warps)  # fmt: skip
    return k_out, v_out
