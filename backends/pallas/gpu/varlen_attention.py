"""Attention of packed sequences on Hopper: for each sequence what ``attention`` computes, o = softmax(scale q k^T) v.

q: (tokens, kv_heads*group, d), k: (kv_tokens, kv_heads, d), v: (kv_tokens, kv_heads, dv), starts: (sequences + 1,)
-> o: (tokens, kv_heads*group, dv), lse and lse_low: (kv_heads*group, tokens). Heads are up to 256 wide.

``lib/mosaic_gpu/sequences.py`` says how sequences are cut into tiles, and ``attention.py`` there how a tile's keys are
walked. The copy engine takes keys and values from any row on: they are not moved.

block_q: rows of a block, 64 for each warpgroup that computes; block_kv: keys of a tile; stages: tiles of keys, and of
values, that are on their way or in use at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import StreamedTilesConfig
from portakern.backends.pallas.gpu.attention import write
from portakern.backends.pallas.lib.blocks import Refs
from portakern.backends.pallas.lib.mosaic_gpu.attention import LOG_SUM, key
from portakern.backends.pallas.lib.mosaic_gpu.chip import padded_rows
from portakern.backends.pallas.lib.mosaic_gpu.flash import bring
from portakern.backends.pallas.lib.mosaic_gpu.head_parts import HeadPart
from portakern.backends.pallas.lib.mosaic_gpu.sequences import (
    KeyTiles,
    SequencesPlan,
    SequenceTile,
    attend,
    copies,
    default_tiling,
    fields_of,
    refused,
)
from portakern.core.call import Call
from portakern.specs.varlen_attention import as_attention


@dataclass(frozen=True)
class VarlenPlan(SequencesPlan):
    """A tile's ``start`` is the row of its sequence's first key."""

    def bring_rows(
        self, ref: Refs, name: str, parts: tuple[HeadPart, ...], tile: SequenceTile, step: Any, buffer: Any,
        arrived: Any,
    ) -> None:  # fmt: skip
        rows = pl.ds(tile.start + (tile.first + step) * self.block_kv, self.block_kv)
        bring(getattr(ref, name).at[rows, tile.head], parts, (buffer,), arrived)


def plan_of(call: Call, config: StreamedTilesConfig) -> VarlenPlan:
    keys = KeyTiles(config.block_kv, config.block_kv, 1)
    return VarlenPlan(**fields_of(call, as_attention(call), config), key_tiles=keys)


def supports(call: Call, config: StreamedTilesConfig) -> str | None:
    return refused(call, as_attention(call), config, plan_of)


@BACKEND.implements("varlen_attention", key=key, tiling=default_tiling, supports=supports, copies=copies,
                    config=StreamedTilesConfig)  # fmt: skip
def varlen_attention(call: Call, config: StreamedTilesConfig) -> tuple[jax.Array | None, ...]:
    starts = call.arrays["kv_starts"]
    inputs = {name: padded_rows(call.arrays[name]) for name in "kv"}
    of_keys = starts[:-1], starts[1:] - starts[:-1]
    found = attend(call, plan_of(call, config), of_keys, inputs, write)
    return tuple(found.get(name) for name in ("o", *LOG_SUM))
