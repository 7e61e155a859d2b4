"""Keys and values of new tokens written into a cache of pages on TPUs.

    k_out[slots[t] // page_size, slots[t] % page_size] = k[t]        v_out likewise

k: (tokens, kv_heads, d), v: (tokens, kv_heads, dv), the cache (pages, page_size, kv_heads, d) and of dv. The grid is
(tokens), in order. A step copies one token's row: its block of the result is that of the token's slot, which the index
map reads in scalar memory. The results lie over copies of the cache, which XLA leaves out where the cache is donated,
and no step reads them: what no step writes stays.

A step must write some row. That of a token which is skipped writes what the last token before it did, or, in front of
all, the first one after it: the same bits, at the same place. Where all are skipped, every step writes the first row of
the cache, as it is, from a copy that XLA makes of this row.

The layout is that of Kwon et al. 2023, "PagedAttention".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.lib.blocks import Blocks, Refs, padded, quotient
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    dtype_refused,
    launch,
    over_vmem,
    sublanes,
    vmem_granted,
    whole_lanes,
)
from portakern.core import targets
from portakern.core.call import Call
from portakern.core.config import Config

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


def kernel(ref: Refs) -> None:
    """One row of each cache."""
    some = ref.some[0] > 0
    for cache, new, old in ((ref.k_out, ref.k, ref.k_first), (ref.v_out, ref.v, ref.v_first)):
        cache[...] = jnp.where(some, new[...], old[...])


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
        pages, row = arrays[f"{name}_pages"], (None, heads, d)
        inputs[name] = arrays[name], pl.BlockSpec(row, lambda t, source, slot, some: (source[t], 0, 0))
        inputs[f"{name}_first"] = pages[:1, 0], pl.BlockSpec(row, lambda t, *_: (0, 0, 0))
        whole[f"{name}_pages"] = pages, pl.BlockSpec(memory_space=pl.ANY)
        form = jax.ShapeDtypeStruct(pages.shape, pages.dtype)
        outputs[f"{name}_out"] = form, pl.BlockSpec((None, *row), at_slot(size))
    written = dims["tokens"] * heads * (dims["d"] + dims["dv"]) * arrays["k"].dtype.itemsize
    found = launch(
        call,
        kernel,
        "portakern_kv_append",
        (dims["tokens"],),
        in_order=1,
        inputs=inputs | whole,
        outputs=outputs,
        over={"k_out": "k_pages", "v_out": "v_pages"},
        scalars=writers(arrays["slots"], dims["pages"] * size),
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * written),
    )
    return found["k_out"], found["v_out"]


def at_slot(page_size: int) -> Any:
    """The block of a step's slot: its page, its place there, and all heads."""

    def index(t: Any, source: Any, slot: Any, some: Any) -> tuple[Any, ...]:
        page = quotient(slot[t], page_size)
        return page, slot[t] - page * page_size, 0, 0

    return index
