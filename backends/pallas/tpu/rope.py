"""Rotary position embedding on TPUs; its gradient is the same kernel with -sin for sin.

    y = x c + partner(x) s        c = (cos, cos), s = (-sin, sin) over the two numbers of a pair

x: (batch, seq, heads, d) is read and written as (batch, heads, seq, d), a transposition that XLA makes and that cancels
against attention's own. The grid is (batch, seq blocks, head blocks), heads last, so that the tables of a token stay
resident for all of its heads. The tables come as wide as a head: XLA lays out a few numbers a token, and the kernel has
lanes to multiply. partner exchanges the two numbers of a pair: lanes are rotated by their distance, to the left for the
first and to the right for the second, so that what wraps around is read by nobody. Nothing is masked: what lies beyond
an array reaches only what is dropped.

block_seq: tokens a block holds; block_heads: heads a block holds, one after the other.

Source: Su et al., "RoFormer" (2021), equation 34.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import RopeConfig
from portakern.backends.pallas.lib.blocks import Refs, positions, row_block
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
    vmem_granted,
    whole_lanes,
)
from portakern.core.call import Call


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def blocks(call: Call, config: RopeConfig) -> tuple[int, int]:
    """The tokens and the heads of a block."""
    block_seq = row_block(call, call.dims["seq"], config.block_seq, sublanes(call.dtype))
    return block_seq, row_block(call, call.dims["heads"], config.block_heads, 1)


def supports(call: Call, config: RopeConfig) -> str | None:
    block_seq, block_heads = blocks(call, config)
    size, lanes = jnp.dtype(call.dtype).itemsize, whole_lanes(call.dims["d"])
    needed = block_seq * lanes * (2 * 2 * block_heads * size + 2 * 2 * 4 + 6 * 4) + 2**18
    return (
        dtype_refused(call)
        or off_grid("block_seq", config.block_seq, call.dims["seq"], sublanes(call.dtype))
        or over_vmem(call, needed, "block_seq or block_heads", vmem_granted(call))
    )


def wide(first: Any, second: Any, d: int, interleaved: bool) -> Any:
    """A table as wide as a head, from what it has for the first and the second number of each pair; 0 for others."""
    both = jnp.stack((first, second), -1) if interleaved else jnp.stack((first, second), -2)
    flat = both.reshape(*first.shape[:-1], 2 * first.shape[-1])
    return jnp.pad(flat, [(0, 0), (0, 0), (0, d - flat.shape[-1])])


def kernel(ref: Refs, *, pairs: int, interleaved: bool) -> None:
    cos, sin = ref.cos[...].astype(jnp.float32), ref.sin[...].astype(jnp.float32)
    lane = positions(cos.shape, 1, 0)
    apart, first = (1, lane % 2 == 0) if interleaved else (pairs, lane < pairs)
    for head in range(ref.x.shape[0]):
        stored = ref.x[head]
        x = stored.astype(jnp.float32)
        partner = jnp.where(first, jnp.roll(x, -apart, 1), jnp.roll(x, apart, 1))
        y = (x * cos + partner * sin).astype(stored.dtype)
        ref.y[head] = y if 2 * pairs == x.shape[1] else jnp.where(lane < 2 * pairs, y, stored)


def turned(call: Call, config: RopeConfig, x: jax.Array, transposed: bool) -> jax.Array:
    """x, each pair of its numbers turned by the call's tables, with -sin where ``transposed``."""
    dims, interleaved = call.dims, call.options["interleaved"]
    cos, sin = call.arrays["cos"], call.arrays["sin"]
    sin = -sin if transposed else sin
    tables = {"cos": wide(cos, cos, dims["d"], interleaved), "sin": wide(-sin, sin, dims["d"], interleaved)}
    x = jnp.swapaxes(x, 1, 2)
    block_seq, block_heads = blocks(call, config)
    heads = pl.BlockSpec((None, block_heads, block_seq, dims["d"]), lambda batch, tile, head: (batch, head, tile, 0))

    def columns(table: jax.Array) -> pl.BlockSpec:
        shared = table.shape[0] == 1
        return pl.BlockSpec((None, block_seq, dims["d"]), lambda batch, tile, head: (0 if shared else batch, tile, 0))

    found = launch(
        call,
        partial(kernel, pairs=dims["pairs"], interleaved=interleaved),
        f"portakern_{call.spec.name}",
        (dims["batch"], pl.cdiv(dims["seq"], block_seq), pl.cdiv(dims["heads"], block_heads)),
        in_order=0,
        inputs={"x": (x, heads)} | {name: (table, columns(table)) for name, table in tables.items()},
        outputs={"y": (jax.ShapeDtypeStruct(x.shape, x.dtype), heads)},
        cost=pl.CostEstimate(flops=3 * x.size, transcendentals=0, bytes_accessed=2 * x.size * x.dtype.itemsize),
    )
    return jnp.swapaxes(found["y"], 1, 2)


@BACKEND.implements("rope", key=key, supports=supports, config=RopeConfig)
def rope(call: Call, config: RopeConfig) -> tuple[jax.Array]:
    return (turned(call, config, call.arrays["x"], transposed=False),)


@BACKEND.implements("rope_vjp", key=key, supports=supports, config=RopeConfig)
def rope_vjp(call: Call, config: RopeConfig) -> tuple[jax.Array]:
    return (turned(call, config, call.arrays["d_y"], transposed=True),)
