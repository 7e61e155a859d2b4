"""Attention on Hopper of sequences whose lengths are data: which rows a tile has, and which tiles of keys these see.

The rows of a tile belong to one sequence: its queries, those of the heads of a group beside each other, so that keys
are read once a group. XLA gathers rows into tiles before the kernel, and results out of them after it; keys and values
stay where they are. A table, made by XLA too, has six numbers for each tile (`Entry`), and there are as many tiles as
any lengths may need: those that no row fills are passed by.

Tiles of keys are counted from the sequence's first key, and their length does not depend on any length. So a query has
the same bits alone, in a chunk, and beside other sequences.

What lies behind a sequence's last key may be NaN, and 0 * NaN is NaN: of a tile of values that ends behind it the
producer, when they have arrived, writes zeros over what lies there, and only then tells the consumers. Scores of such
keys are replaced, whatever they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas.configs import StreamedTilesConfig
from portakern.backends.pallas.lib.blocks import Refs, positions, quotient
from portakern.backends.pallas.lib.mosaic_gpu.attention import GpuScores, kernel, operands_refused, saved, tiles_refused
from portakern.backends.pallas.lib.mosaic_gpu.chip import launch, padded_rows, whole_pieces
from portakern.backends.pallas.lib.mosaic_gpu.flash import QUERIES, TILE, MosaicFlashPlan, rings
from portakern.backends.pallas.lib.mosaic_gpu.head_parts import HeadPart, LeavingBuffers
from portakern.backends.pallas.lib.packed import Companion, PackedTiles
from portakern.core.call import Call
from portakern.specs._exponents import below_overflow
from portakern.specs.attention import score_unit, sight

MOST = 1 << 29
"""Rows and keys of a call, counted once for each query head of a key head: places are numbers of 32 bits."""


SCALES = "k_scale", "v_scale"
"""Inputs of a kernel, if a call has them: a number of each head of keys."""


class KeyTiles(NamedTuple):
    """How the keys of a sequence are cut: of every ``period`` keys ``each`` tiles, of ``size`` keys but the last."""

    size: int
    period: int
    each: int

    def tile_of(self, key: Any) -> Any:
        """The tile that a key is in."""
        whole = quotient(key, self.period)
        return whole * self.each + quotient(key - whole * self.period, self.size)

    def span(self, tile: Any) -> tuple[Any, Any]:
        """The first key of a tile, and the first one behind it."""
        whole = quotient(tile, self.each)
        start = whole * self.period + (tile - whole * self.each) * self.size
        return start, jnp.minimum(start + self.size, (whole + 1) * self.period)


class Entry(NamedTuple):
    """What the table has of a tile: its first tile of keys, and how many follow with it, 0 of a tile that no row fills;
    where its sequence's keys are; how many keys and rows that has; and its own first row, counted from there."""

    first: Any
    steps: Any
    start: Any
    kv_len: Any
    rows: Any
    position: Any

    @classmethod
    def of(cls, packed: PackedTiles, starts: jax.Array, kv_lens: jax.Array, plan: SequencesPlan) -> Entry:
        """Of all tiles. starts, kv_lens: of each sequence, and of what lies before and behind them, without a key."""
        n, cut = packed.number, plan.key_tiles
        position = (jnp.arange(packed.tiles, dtype=jnp.int32) - packed.first[n]) * packed.block
        rows, kv_len = packed.lens[n], kv_lens[n]
        beside = Companion(plan.left, plan.right, plan.rows_each, rows, kv_len)
        keys = beside.key_blocks(position, packed.block, 1)
        last_key = jnp.maximum(kv_len - 1, 0)
        first, last = (cut.tile_of(jnp.clip(jnp.asarray(key, jnp.int32), 0, last_key)) for key in keys)
        steps = jnp.where(position < rows, jnp.maximum(last - first, 0) + 1, 0)
        return cls(first, steps, starts[n], kv_len, rows, position)

    def table(self) -> jax.Array:
        """(tiles, 6), int32."""
        return jnp.stack([jnp.broadcast_to(x, self.steps.shape).astype(jnp.int32) for x in self], 1)


class SequenceTile(NamedTuple):
    """As a `QueryTile` of `flash`, of one sequence. row: its first among those of all tiles; position: among those of
    its sequence. start: where the sequence's keys are. sight: what rows and keys of the sequence see of each other.
    scales: what keys, and values, of its head are multiplied by, None for 1."""

    batch: Any
    head: Any
    row: Any
    first: Any
    steps: Any
    start: Any
    position: Any
    sight: Companion
    scales: tuple[Any, Any]


@dataclass(frozen=True)
class SequencesPlan(MosaicFlashPlan):
    """The plan of a call on sequences: ``heads`` are those of k, ``group`` is 1, and ``q_len`` counts rows of tiles.

    Attributes:
      rows_each: rows of a query. left, right: how far it sees from its own place, None for all the way.
      key_tiles: how keys are cut.
    """

    rows_each: int
    left: int | None
    right: int | None
    key_tiles: KeyTiles

    merges = False
    scheduled = False
    skips = True
    mended = 1

    @property
    def blocks(self) -> int:
        """One for each tile: how much each has to do is known on the device alone."""
        return self.tiles

    def tile(self, index: Any, ref: Refs) -> SequenceTile:
        """The last tiles first, which see most under a causal mask, and of each all heads."""
        down = quotient(index, self.heads)
        number = self.tiles_q - 1 - down
        of = Entry(*(ref.table[number, i] for i in range(len(Entry._fields))))
        beside = Companion(self.left, self.right, self.rows_each, of.rows, of.kv_len)
        row, head = number * (QUERIES * self.consumers), index - down * self.heads
        k_scale, v_scale = (getattr(ref, name)[head] if name in ref else None for name in SCALES)
        scales = k_scale, v_scale
        return SequenceTile(jnp.int32(0), head, row, of.first, of.steps, of.start, of.position, beside, scales)

    def dots(self, tile: SequenceTile, s: Any) -> Any:
        return s if tile.scales[0] is None else s * tile.scales[0]

    def results(self, tile: SequenceTile, o: Any) -> Any:
        return o if tile.scales[1] is None else o * tile.scales[1]

    def bring_rows(
        self, ref: Refs, name: str, parts: tuple[HeadPart, ...], tile: SequenceTile, step: Any, buffer: Any,
        arrived: Any,
    ) -> None:  # fmt: skip
        """Start a step's keys, or values, on their way."""
        raise NotImplementedError

    def bring_keys(self, ref: Refs, tile: SequenceTile, step: Any, buffer: Any) -> None:
        self.bring_rows(ref, "k", ref.keys, tile, step, buffer, ref.k_arrived.at[buffer])

    def bring_values(self, ref: Refs, tile: SequenceTile, step: Any, buffer: Any) -> None:
        """Values of a tile that ends behind the last key arrive at a barrier of their own, and at the consumers' when
        zeros are written over what is behind it."""
        count = self.keys_there(tile, step)[1]
        whole = count >= self.block_kv
        barrier = jnp.where(whole, buffer, jnp.int32(self.stages))
        self.bring_rows(ref, "v", ref.values, tile, step, buffer, ref.v_arrived.at[barrier])

        @pl.when(whole ^ True)
        def _() -> None:
            plgpu.barrier_wait(ref.v_arrived.at[self.stages])
            for part in ref.values:
                for first in range(0, self.block_kv, QUERIES):
                    pl.when(count < first + QUERIES)(partial(clear_behind, part, buffer, first, count))
            plgpu.commit_smem()
            for _ in range(len(ref.values) * self.copies):
                plgpu.barrier_arrive(ref.v_arrived.at[buffer])

    def keys_there(self, tile: SequenceTile, step: Any) -> tuple[Any, Any]:
        """A step's first key, counted from the sequence's first, and how many of the tile's are the sequence's."""
        start, end = self.key_tiles.span(tile.first + step)
        return start, jnp.maximum(jnp.minimum(end, tile.sight.kv_len) - start, 0)

    def masked(self, tile: SequenceTile, warpgroup: Any, step: Any, s: Any) -> Any:
        start, count = self.keys_there(tile, step)
        row = tile.position + warpgroup * QUERIES
        full = (count >= self.block_kv) & tile.sight.full(row, QUERIES, start, self.block_kv)

        def hide(s: Any) -> Any:
            visible = tile.sight.visible(row, start, s.shape, by_key=False)
            if self.key_tiles.size < self.block_kv or self.key_tiles.period % self.block_kv:
                visible &= positions(s.shape, 1, 0) < count
            return jnp.where(visible, s, -jnp.inf)

        return lax.cond(full, lambda s: s, hide, s)


def clear_behind(part: HeadPart, buffer: Any, first: int, count: Any) -> None:
    """Write zeros over ``QUERIES`` rows of a buffer, from ``first`` on, as far as they lie behind ``count``."""
    there = part.tiled(buffer).at[pl.ds(first, QUERIES)]
    x = plgpu.load(there, layout=TILE, optimized=False)
    there[...] = jnp.where(positions(x.shape, 0, first) < count, x, jnp.zeros_like(x))


def fields_of(call: Call, dense: Call, config: StreamedTilesConfig) -> dict[str, Any]:
    """What a `SequencesPlan` of a call has but its keys. ``dense``: a call of attention that says what this one says of
    scores and masks, with all tokens and keys."""
    dims, consumers = call.dims, config.block_q // QUERIES
    block, (left, right) = consumers * QUERIES, sight(dense)
    pre, unit = below_overflow(*score_unit(dense))
    tiles = dims["tokens"] * dims["group"] // block + dims["sequences"] + 2
    return {
        "batch": 1, "heads": dims["kv_heads"], "group": 1, "q_len": tiles * block, "d": dims["d"], "dv": dims["dv"],
        "consumers": consumers, "block_kv": config.block_kv, "stages": config.stages, "split_tiles": MOST,
        "band": None, "scores": GpuScores(pre, call.options["softcap"], unit), "dtype": jnp.dtype(call.dtype),
        "interpret": call.interpret, "rows_each": dims["group"], "left": left, "right": right,
    }  # fmt: skip


def default_tiling(call: Call) -> dict[str, int]:
    """Not measured. Fewer rows where sequences have as few, which changes no bit; of wide heads fewer keys."""
    rows = pl.cdiv(call.dims["tokens"], max(call.dims["sequences"], 1)) * call.dims["group"]
    wide = max(call.dims["d"], call.dims["dv"]) > 128
    return {"block_q": QUERIES if rows <= QUERIES else 2 * QUERIES, "block_kv": 64 if wide else 128, "stages": 2}


def refused(call: Call, dense: Call, config: StreamedTilesConfig, plan: Any) -> str | None:
    """Why the kernels do not serve a call, or these tiles. ``plan``: from a call and a config to its plan."""
    if max(dense.dims["q_len"] * call.dims["group"], dense.dims["kv_len"]) * call.dims["group"] > MOST:
        return (
            "more than 2^29 rows of queries and keys, counted once for each query head of a key head: places are 32-bit"
        )
    return operands_refused(call) or tiles_refused(config, lambda: plan(call, config))


def copies(call: Call, config: StreamedTilesConfig) -> str:
    """What XLA copies besides, in words."""
    found = ["queries are gathered into tiles of their sequences, and o out of them"]
    for names, extent in (("q and k", call.dims["d"]), ("v", call.dims["dv"])):
        if (wide := whole_pieces(extent, call.dtype)) != extent:
            found.append(f"heads of {names} are padded from {extent} to {wide}")
    return "; ".join(found)


def attend(
    call: Call, plan: SequencesPlan, of_keys: tuple[jax.Array, jax.Array], inputs: dict[str, jax.Array], write: Any
) -> dict[str, jax.Array]:
    """o, (tokens, heads, dv), and what is saved of the log-sum-exp, (heads, tokens), by name.

    of_keys: where the keys of each sequence are, and how many there are, (sequences,). inputs: k and v, and what else
    ``plan.bring_rows`` reads. write: as of ``kernel``."""
    dims, numbers, consumers = call.dims, saved(call), plan.consumers
    (tokens, heads, _), (kv_heads, group) = call.arrays["q"].shape, (dims["kv_heads"], dims["group"])
    packed = PackedTiles.of(call.arrays["q_starts"], tokens, group, consumers * QUERIES)
    assert packed.tiles == plan.tiles_q
    starts, lens = (jnp.pad(x.astype(jnp.int32), 1) for x in of_keys)
    q = padded_rows(call.arrays["q"]).reshape(tokens, kv_heads, group, -1)
    by_row = jnp.swapaxes(q, 1, 2).reshape(tokens * group, kv_heads, -1)
    rows = by_row.at[packed.source].get(mode="fill", fill_value=0)
    of_values, shape = plan.parts[1], (plan.q_len, kv_heads, whole_pieces(plan.dv, plan.dtype))
    outputs = {"o": jax.ShapeDtypeStruct((1, *shape), plan.dtype)}
    outputs |= dict.fromkeys(numbers, jax.ShapeDtypeStruct((1, kv_heads, plan.q_len), jnp.float32))
    more = {"lse_rows": plgpu.SMEM((len(numbers), consumers, QUERIES), jnp.float32)} if numbers else {}
    found = launch(
        call,
        partial(kernel, plan=plan, write=write),
        call.spec.name,
        (plan.blocks,),
        inputs={"q": rows[None], "table": Entry.of(packed, starts, lens, plan).table()} | inputs,
        outputs=outputs,
        scratch=rings(plan, LeavingBuffers((consumers, plan.slots), QUERIES, of_values, plan.dtype), **more),
        warpgroups=consumers + 1,
        approximate=True,
        across_warps=False,
    )
    o = found["o"][0, :, :, : plan.dv][packed.target].reshape(tokens, group, kv_heads, plan.dv)
    results = {"o": jnp.swapaxes(o, 1, 2).reshape(tokens, heads, plan.dv)}
    for name in numbers:
        of_rows = found[name][0][:, packed.target].reshape(kv_heads, tokens, group)
        results[name] = jnp.swapaxes(of_rows, 1, 2).reshape(heads, tokens)
    return results
