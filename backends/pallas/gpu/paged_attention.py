"""Attention over keys and values in pages on Hopper: decoding, chunks of prompts, and both in one call.

q: (tokens, kv_heads*group, d), k_pages: (pages, page_size, kv_heads, d), v_pages: (pages, page_size, kv_heads, dv)
-> o: (tokens, kv_heads*group, dv), lse: (kv_heads*group, tokens). Heads are up to 256 wide.

``lib/mosaic_gpu/sequences.py`` says how sequences are cut into tiles, and ``attention.py`` there how a tile's keys are
walked. A tile has as many whole pages as block_kv keys have room for, each of which the copy engine brings by a copy of
its own; of a longer page it has up to block_kv keys. Which page that is the producer reads in the table. Behind a
sequence's last page it takes that one again, and nothing of it counts.

block_q: rows of a block, 64 for each warpgroup that computes; block_kv: keys of a tile; stages: tiles of keys, and of
values, that are on their way or in use at a time.

Source: Kwon et al. 2023, "PagedAttention".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import StreamedTilesConfig
from portakern.backends.pallas.gpu.attention import write
from portakern.backends.pallas.lib.blocks import Refs, quotient
from portakern.backends.pallas.lib.mosaic_gpu.attention import LOG_SUM, key
from portakern.backends.pallas.lib.mosaic_gpu.chip import LANES, WARPS, padded_rows
from portakern.backends.pallas.lib.mosaic_gpu.flash import bring
from portakern.backends.pallas.lib.mosaic_gpu.head_parts import HeadPart, Widths, all_full
from portakern.backends.pallas.lib.mosaic_gpu.sequences import (
    SCALES,
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
from portakern.specs.paged_attention import dense_form

TOGETHER = 4
"""Pages whose numbers are read before the first of them is sent for."""


@dataclass(frozen=True)
class MosaicPagedPlan(SequencesPlan):
    """A tile's ``start`` is the number of its sequence in the table of pages.

    Attributes:
      page_size, pages: extents of the cache. number: pages of a tile, 1 where a page has several tiles.
    """

    page_size: int
    pages: int
    number: int

    @property
    def copies(self) -> int:  # type: ignore[override]
        return self.number

    @property
    def copied_rows(self) -> int:
        """Rows of one copy."""
        return min(self.page_size, self.block_kv)

    @property
    def parts(self) -> tuple[Widths, Widths]:
        """Each thread of the producer expects as many of a copy's bytes as the others: where rows of narrow parts are
        too few for that, all parts are full."""
        found = super().parts
        bytes_least = min(map(min, found)) * self.dtype.itemsize * self.copied_rows
        return found if bytes_least % (LANES * WARPS) == 0 else (all_full(found[0]), all_full(found[1]))

    def bring_rows(
        self, ref: Refs, name: str, parts: tuple[HeadPart, ...], tile: SequenceTile, step: Any, buffer: Any,
        arrived: Any,
    ) -> None:  # fmt: skip
        array, last = getattr(ref, name), quotient(jnp.maximum(tile.sight.kv_len - 1, 0), self.page_size)
        start, _ = self.key_tiles.span(tile.first + step)
        first = quotient(start, self.page_size)
        within = start - first * self.page_size

        def page(i: Any) -> Any:
            return jnp.clip(ref.page_table[tile.start, jnp.minimum(first + i, last)], 0, self.pages - 1)

        def copy(i: Any, number: Any) -> None:
            rows = array.at[number, pl.ds(within, self.copied_rows), tile.head]
            whole = self.number == 1 and self.copied_rows == self.block_kv
            bring(rows, parts, (buffer,), arrived, None if whole else i * self.copied_rows)

        def several(first: Any, count: int) -> None:  # a copy would wait for the number of the next page
            for i, number in enumerate([page(first + i) for i in range(count)]):
                copy(first + i, number)

        groups, left = divmod(self.number, TOGETHER)
        if groups:
            pl.loop(0, groups)(lambda i: several(jnp.int32(i) * TOGETHER, TOGETHER))
        several(groups * TOGETHER, left)


def plan_of(call: Call, config: StreamedTilesConfig) -> MosaicPagedPlan:
    size, block = call.dims["page_size"], config.block_kv
    number = max(block // size, 1)
    keys = KeyTiles(number * size, number * size, 1) if size <= block else KeyTiles(block, size, pl.cdiv(size, block))
    fields = fields_of(call, dense(call), config)
    return MosaicPagedPlan(**fields, key_tiles=keys, page_size=size, pages=call.dims["pages"], number=number)


def dense(call: Call) -> Call:
    """The call of attention of all tokens on as many keys as the table has room for."""
    return dense_form(call, call.dims["tokens"], call.dims["pages_each"] * call.dims["page_size"])


def supports(call: Call, config: StreamedTilesConfig) -> str | None:
    if {call.dtype_of(name) for name in ("k_pages", "v_pages")} != {call.dtype}:
        return "pages of 8 bits, which Pallas's kernels for GPUs do not take: use the Triton backend"
    return refused(call, dense(call), config, plan_of)


@BACKEND.implements("paged_attention", key=key, tiling=default_tiling, supports=supports, copies=copies,
                    config=StreamedTilesConfig)  # fmt: skip
def paged_attention(call: Call, config: StreamedTilesConfig) -> tuple[jax.Array | None, ...]:
    arrays, lens = call.arrays, call.arrays["kv_lens"]
    inputs = {name: padded_rows(arrays[f"{name}_pages"]) for name in "kv"}
    inputs["page_table"] = arrays["page_table"].astype(jnp.int32)
    inputs |= {name: arrays[name] for name in SCALES if arrays[name] is not None}
    numbers = jnp.arange(call.dims["sequences"], dtype=jnp.int32)
    found = attend(call, plan_of(call, config), (numbers, lens), inputs, write)
    return tuple(found.get(name) for name in ("o", *LOG_SUM)[: len(call.spec.outputs)])
