"""Gradients of attention of packed sequences on Hopper: for each sequence those of ``attention``, by its own kernels.

q: (tokens, kv_heads*group, d), k: (kv_tokens, kv_heads, d), v: (kv_tokens, kv_heads, dv), starts: (sequences + 1,),
o and d_o: (tokens, kv_heads*group, dv), lse, lse_low and d_lse: (kv_heads*group, tokens); d_q, d_k, d_v like q, k, v.

XLA moves the sequences into one of ``length`` places, on both sides (`Places`): each begins at a multiple of 128, which
all tiles begin at, and its last query stands where its last key stands. There masks of each sequence are those of the
whole, and segment ids tell sequences from each other: the kernels of ``attention_vjp.py`` pass by the tiles that hold
none of a sequence. Places between sequences hold zeros, and ids that the other side has not. Results are moved back.

A sequence has as many places as the longer of its sides, so that no bit of it depends on where it lies.

block_q, block_kv: the queries and the keys of a tile that comes by; stages: buffers for them.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import FlashGradientsConfig
from portakern.backends.pallas.gpu.attention_vjp import all_gradients
from portakern.backends.pallas.lib.mosaic_gpu.attention import key
from portakern.backends.pallas.lib.mosaic_gpu.attention_vjp import copies as copies_of_attention
from portakern.backends.pallas.lib.mosaic_gpu.attention_vjp import supports as refused
from portakern.backends.pallas.lib.packed import last_at_most
from portakern.core.call import Call
from portakern.specs.varlen_attention import as_attention

BLOCK = 128
"""What every tile's length divides."""

IDS = 4
"""Ids of a sequence: the first of what it has, the others of places beside it, which each side has its own of."""


class Places(NamedTuple):
    """Where one side of the sequences is moved.

    Attributes:
      source: the token that stands at each place, a number beyond the last where none does; target: the place of each
        token, a number beyond the last of those that belong to no sequence. ids: of the segment of each place.
    """

    source: jax.Array
    target: jax.Array
    ids: jax.Array

    @classmethod
    def of(cls, starts: jax.Array, tokens: int, begin: jax.Array, width: jax.Array, length: int, side: int) -> Places:
        """begin, width: of each sequence its first place, and how many it has. side: 0 or 1."""
        lens, sequences = starts[1:] - starts[:-1], width.size
        place = jnp.arange(length, dtype=jnp.int32)
        s = last_at_most(begin, place)
        row = place - begin[s] - (width - lens)[s]
        there = (row >= 0) & (row < lens[s])
        behind = place >= begin[-1] + padded_up(width[-1])
        ids = jnp.where(there, IDS * s, IDS * jnp.where(behind, sequences, s) + 1 + side)
        token = jnp.arange(tokens, dtype=jnp.int32)
        own = jnp.clip(last_at_most(starts, token), 0, sequences - 1)
        inside = (token >= starts[0]) & (token < starts[-1])
        target = begin[own] + (width - lens)[own] + token - starts[own]
        return cls(jnp.where(there, starts[s] + row, tokens), jnp.where(inside, target, length), ids)

    def moved(self, x: jax.Array, axis: int = 0, fill: float = 0.0) -> jax.Array:
        """(1, ...) with the tokens of x at their places, and the number ``fill`` between them."""
        return jnp.take(x, self.source, axis, mode="fill", fill_value=fill)[None]

    def back(self, x: jax.Array) -> jax.Array:
        """What `moved` gave, as it was, and zeros of tokens that belong to no sequence."""
        return jnp.take(x[0], self.target, 0, mode="fill", fill_value=0)


def padded_up(lengths: jax.Array) -> jax.Array:
    """Lengths in whole blocks."""
    return (lengths + (BLOCK - 1)) // BLOCK * BLOCK


def length_of(call: Call) -> int:
    """Places that any lengths may need."""
    dims = call.dims
    return (dims["tokens"] + dims["kv_tokens"] + dims["sequences"] * (BLOCK - 1)) // BLOCK * BLOCK


def slots(call: Call) -> tuple[Places, Places]:
    """Of queries, and of keys."""
    starts = [call.arrays[name].astype(jnp.int32) for name in ("q_starts", "kv_starts")]
    width = jnp.maximum(*(x[1:] - x[:-1] for x in starts))
    ends = jnp.cumsum(padded_up(width), dtype=jnp.int32)
    begin, length = ends - padded_up(width), length_of(call)
    queries, keys = (
        Places.of(x, call.dims[name], begin, width, length, side)
        for side, (x, name) in enumerate(zip(starts, ("tokens", "kv_tokens"), strict=True))
    )
    return queries, keys


def alike(call: Call) -> Call:
    """The call of ``attention_vjp`` on moved sequences, without its arrays."""
    one, length = as_attention(call), length_of(call)
    wants = tuple(name for name in call.wants if name != "d_sinks")
    return one.replace(dims={**one.dims, "q_len": length, "kv_len": length}, wants=wants)


def default_tiling(call: Call) -> dict[str, int]:
    """That of ``attention_vjp``."""
    widest = max(call.dims["d"], call.dims["dv"])
    return {"block_q": 64, "block_kv": 128 if widest <= 64 else 64, "stages": 2 if widest <= 128 else 1}


def supports(call: Call, config: FlashGradientsConfig) -> str | None:
    return refused(alike(call), config)


def copies(call: Call, config: FlashGradientsConfig) -> str | None:
    """What XLA copies besides, in words."""
    moved = f"all arrays are moved to {length_of(call)} places, where sequences begin at multiples of {BLOCK}, and back"
    return "; ".join(filter(None, (moved, copies_of_attention(alike(call), config))))


@BACKEND.implements("varlen_attention_vjp", key=key, tiling=default_tiling, supports=supports, copies=copies,
                    config=FlashGradientsConfig)  # fmt: skip
def varlen_attention_vjp(call: Call, config: FlashGradientsConfig) -> tuple[jax.Array | None, ...]:
    queries, keys = slots(call)
    one, arrays = alike(call), call.arrays
    moved: dict[str, Any] = dict.fromkeys(one.arrays)
    moved |= {name: queries.moved(arrays[name]) for name in ("q", "o", "d_o")}
    moved |= {name: keys.moved(arrays[name]) for name in ("k", "v")}
    for name, fill in (("lse", -inf), ("lse_low", 0.0), ("d_lse", 0.0)):
        moved[name] = None if arrays[name] is None else queries.moved(arrays[name], 1, fill)
    moved |= {"q_segment_ids": queries.ids[None], "kv_segment_ids": keys.ids[None]}
    gradients = all_gradients(one.replace(arrays=moved), config, call.spec.name)
    found = dict(zip((output.name for output in one.spec.outputs), gradients, strict=True))
    of_side = {"d_q": queries, "d_k": keys, "d_v": keys}
    return tuple(
        of_side[output.name].back(found[output.name]) if found.get(output.name) is not None else None
        for output in call.spec.outputs
    )
