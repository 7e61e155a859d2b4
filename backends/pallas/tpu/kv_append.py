"""Keys and values of new tokens written into a cache of pages on TPUs, on the way turned and rounded to 8 bits.

    k_out[slots[t] // page_size, slots[t] % page_size] = rope(k[t]) / k_scale        v_out likewise, of v[t] / v_scale

k: (tokens, kv_heads, d), v: (tokens, kv_heads, dv), the cache (pages, page_size, kv_heads, d) and of dv. The grid is
(tokens), in order. A step writes one token's row: its block of the result is that of the token's slot, which the index
map reads in scalar memory. The results lie over copies of the cache, which XLA leaves out where the cache is donated,
and no step reads them: what no step writes stays.

A step must write some row. That of a token which is skipped writes what the last token before it did, or, in front of
all, the first one after it: the same bits, at the same place. Where all are skipped, every step writes the first row of
the cache, as it is, from a copy that XLA makes of this row.

Keys are turned as rope's kernel turns them: by tables as wide as a head, of which a step has the token's row, and each
number's partner in the lanes beside it. Pages of 8 bits are bytes to the kernel: codes are made of bits, as quantize's
are, and XLA sees in them the floats that they are. The inverses of scales come as wide as a head.

The layout is that of Kwon et al. 2023, "PagedAttention"; the turn is that of Su et al. 2021, "RoFormer".
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.lib.blocks import Blocks, Refs, padded, positions, quotient
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    dtype_refused,
    launch,
    over_vmem,
    sublanes,
    vmem_granted,
    whole_lanes,
)
from portakern.backends.pallas.tpu.quantize import code_of, inverse
from portakern.backends.pallas.tpu.rope import wide
from portakern.core import targets
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.spec.dtypes import DTYPES

MOST_SCALARS = targets.least("tpu", "smem") // 2
"""Bytes of scalar memory for the slots."""


def writers(slots: jax.Array, rows: int) -> dict[str, jax.Array]:
    """Of each step the token whose row it writes, and its slot; and whether there is such a token."""
    used = (slots >= 0) & (slots < rows)
    token = jnp.arange(slots.shape[0], dtype=jnp.int32)
    before = lax.cummax(jnp.where(used, token, -1))
    first = jnp.argmax(used).astype(jnp.int32)
    source, some = jnp.where(before < 0, first, before), jnp.any(used)
    slot = jnp.where(some, slots[source], 0).astype(jnp.int32)
    return {"source": source, "slot": slot, "some": some.astype(jnp.int32).reshape(1)}


def kernel(ref: Refs, *, call: Call) -> None:
    """One row of each cache."""
    some, refs = ref.some[0] > 0, vars(ref)
    for name in ("k", "v"):
        x, cache = refs[name][...], refs[f"{name}_out"]
        if name == "k" and "cos" in ref:
            x = turned_keys(ref, x, call)
        if f"{name}_inverse" in ref:
            x = x.astype(jnp.float32) * refs[f"{name}_inverse"][...]
        if narrow(call, name):
            x = x.astype(jnp.float32)
            dtype = call.dtype_of(f"{name}_pages")
            x = code_of(x, dtype, DTYPES[dtype].largest)
        cache[...] = jnp.where(some, x.astype(cache.dtype), refs[f"{name}_first"][...])


def turned_keys(ref: Refs, x: Any, call: Call) -> Any:
    """(heads, d) numbers of one token, turned, in float32; those in no pair as they are."""
    pairs, interleaved, x = call.dims["pairs"], call.options["interleaved"], x.astype(jnp.float32)
    lane = positions(x.shape, 1, 0)
    apart, first = (1, lane % 2 == 0) if interleaved else (pairs, lane < pairs)
    partner = jnp.where(first, jnp.roll(x, -apart, 1), jnp.roll(x, apart, 1))
    return jnp.where(lane < 2 * pairs, x * ref.cos[...] + partner * ref.sin[...], x)


def narrow(call: Call, name: str) -> bool:
    """Whether the pages of keys, or of values, have 8 bits."""
    return call.dtype_of(f"{name}_pages") != call.dtype


def supports(call: Call, config: Config) -> str | None:
    dims, dtype = call.dims, call.arrays["k"].dtype
    if dims["pages"] * dims["page_size"] >= 2**31:
        return (
            f"the cache has {dims['pages']} * {dims['page_size']} slots, and a TPU counts to 2^31 - 1: use fewer pages"
        )
    scalars = 4 * (2 * dims["tokens"] + 1)
    if scalars > MOST_SCALARS:
        return (
            f"the slots of {dims['tokens']} tokens take {scalars} bytes, and scalar memory has {MOST_SCALARS} for "
            "them: append fewer tokens in a call"
        )
    row = padded(dims["kv_heads"], sublanes(dtype)) * (whole_lanes(dims["d"]) + whole_lanes(dims["dv"]))
    needed = 7 * row * dtype.itemsize  # token, first row and result, each twice, and the row on its way
    if any(call.arrays[n] is not None for n in ("cos", "k_scale", "v_scale")) or narrow(call, "k") or narrow(call, "v"):
        needed += 8 * row * 4  # numbers on their way, inverses and tables in float32
    return dtype_refused(call) or over_vmem(call, needed, "kv_heads, d or dv", vmem_granted(call))


@BACKEND.implements("kv_append", supports=supports)
def kv_append(call: Call, config: Config) -> tuple[jax.Array, ...]:
    dims, arrays = call.dims, call.arrays
    if not dims["tokens"]:
        return jnp.copy(arrays["k_pages"]), jnp.copy(arrays["v_pages"])
    size, heads = dims["page_size"], dims["kv_heads"]
    inputs: Blocks = {}
    outputs: Blocks = {}
    whole = {}
    for name, d in (("k", dims["d"]), ("v", dims["dv"])):
        pages, row = as_bytes(arrays[f"{name}_pages"]), (None, heads, d)
        inputs[name] = arrays[name], pl.BlockSpec(row, of_token)
        inputs[f"{name}_first"] = pages[:1, 0], pl.BlockSpec(row, lambda t, *_: (0, 0, 0))
        if arrays[f"{name}_scale"] is not None:
            inverses = jnp.broadcast_to(inverse(arrays[f"{name}_scale"])[:, None], (heads, d))
            inputs[f"{name}_inverse"] = inverses, pl.BlockSpec((heads, d), lambda t, *_: (0, 0))
        whole[f"{name}_pages"] = pages, pl.BlockSpec(memory_space=pl.ANY)
        form = jax.ShapeDtypeStruct(pages.shape, pages.dtype)
        outputs[f"{name}_out"] = form, pl.BlockSpec((None, *row), at_slot(size))
    written = dims["tokens"] * heads * (dims["d"] + dims["dv"]) * arrays["k"].dtype.itemsize
    found = launch(
        call,
        partial(kernel, call=call),
        "portakern_kv_append",
        (dims["tokens"],),
        in_order=1,
        inputs=inputs | tables(call) | whole,
        outputs=outputs,
        over={"k_out": "k_pages", "v_out": "v_pages"},
        scalars=writers(arrays["slots"], dims["pages"] * size),
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * written),
    )
    return tuple(as_floats(found[f"{name}_out"], arrays[f"{name}_pages"].dtype) for name in ("k", "v"))


def of_token(t: Any, source: Any, slot: Any, some: Any) -> tuple[Any, ...]:
    """The block of the token whose row a step writes."""
    return source[t], 0, 0


def tables(call: Call) -> Blocks:
    """What multiplies the numbers of a head, and what their partners: (tokens, 1, d) each."""
    cos, sin, d = call.arrays["cos"], call.arrays["sin"], call.dims["d"]
    if cos is None:
        return {}
    cos, sin, interleaved = cos.astype(jnp.float32), sin.astype(jnp.float32), call.options["interleaved"]
    found = {"cos": wide(cos[:, None], cos[:, None], d, interleaved), "sin": wide(-sin[:, None], sin[:, None], d,
             interleaved)}  # fmt: skip
    return {name: (table, pl.BlockSpec((None, 1, d), of_token)) for name, table in found.items()}


def as_bytes(pages: jax.Array) -> jax.Array:
    """Pages of 8 bits as integers; wider ones as they are."""
    return lax.bitcast_convert_type(pages, jnp.int8) if pages.dtype.itemsize == 1 else pages


def as_floats(pages: jax.Array, dtype: Any) -> jax.Array:
    return pages if pages.dtype == dtype else lax.bitcast_convert_type(pages, dtype)


def at_slot(page_size: int) -> Any:
    """The block of a step's slot: its page, its place there, and all heads."""

    def index(t: Any, source: Any, slot: Any, some: Any) -> tuple[Any, ...]:
        page = quotient(slot[t], page_size)
        return page, slot[t] - page * page_size, 0, 0

    return index
