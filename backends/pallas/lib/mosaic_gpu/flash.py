"""How attention on Hopper is cut into tiles, and how these move: what the kernels of attention share.

One warpgroup of a block, the producer, has the copy engine bring queries, keys and values into rings of buffers; the
others consume, 64 queries each. Two barriers for each buffer say that it has arrived and that it is free. Consumers
take turns to issue products to the tensor cores, so that the softmax of one runs beside the products of the others.

A head is in parts (``head_parts``), each in a buffer of its own. The copy engine leaves 0 beyond the end of a head, as
it does beyond the last query and key.

Many keys are cut into splits of whole tiles, each of which has a state (acc, l, m) of its own, and the states of a
query's splits are merged from the first to the last. How long a split is follows from how many keys a query may see
and from the tiling, and not from how many queries, heads or samples there are. One block may walk all splits, or each
share have a block: the sums are the same, in the same order. So it may depend on the number of queries which of the two
happens, and no bit of a query does.

Source: Shah et al., "FlashAttention-3" (2024), algorithm 1 and section 3.1; the split of keys as Flash-Decoding has it
(Dao, Haziza, Massa, Sizov 2023).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas.configs import FlashConfig
from portakern.backends.pallas.lib.band import Band, both
from portakern.backends.pallas.lib.blocks import Refs, quotient
from portakern.backends.pallas.lib.mosaic_gpu.chip import ALIGNED, HOPPER, issue_product, over_shared
from portakern.backends.pallas.lib.mosaic_gpu.head_parts import HeadBuffers, HeadPart, Widths, widths_of
from portakern.backends.pallas.lib.segments import span_at
from portakern.core.call import Call

QUERIES = 64
"""Queries of a consumer: the rows of one instruction of the tensor cores."""

OF_THREE = 24, 160
"""Registers of a thread of the producer, and of three consumers."""

LSE_BYTES = 2 * ALIGNED
"""Shared memory for what is written of lse and lse_low, which is less."""

TOGETHER = 8
"""Heads whose tiles are taken by turns where the last queries see most keys: their keys stay in the L2 cache."""

BEGINNING = 1.0
"""What the beginning and the end of a tile of queries take, in tiles of keys."""

TILE = plgpu.Layout.WGMMA
"""Where the tensor cores leave the elements of a tile."""

ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)
"""Where numbers of its rows, and of its columns, lie beside it."""


COUNTED = 30
"""Bits of a ``count``."""


class QueryTile(NamedTuple):
    """``QUERIES`` queries a consumer of one head, from ``row`` on, and the tiles of keys that they see."""

    batch: Any
    head: Any
    row: Any
    first: Any
    steps: Any


@dataclass(frozen=True)
class MosaicFlashPlan:
    """How one attention is cut.

    Attributes:
      batch, heads, group, q_len, d, dv: extents; heads are those of q.
      consumers: warpgroups that compute; block_kv: keys of a tile; stages: buffers of keys, and of values.
      split_tiles: tiles of keys of a split, which begins at a multiple of so many.
      band: what a tile of all consumers' queries sees. scores, dtype, interpret: as the call has them.
    """

    batch: int
    heads: int
    group: int
    q_len: int
    d: int
    dv: int
    consumers: int
    block_kv: int
    stages: int
    split_tiles: int
    band: Band
    scores: Any
    dtype: Any
    interpret: bool

    skips = False
    """Whether a tile may have no step, and is passed by then."""

    copies = 1
    """Copies that bring a part of a head of a tile of keys."""

    mended = 0
    """Barriers of values besides those of the buffers."""

    @property
    def parts(self) -> tuple[Widths, Widths]:
        """Of a head of keys, and of values."""
        return widths_of(self.d), widths_of(self.dv)

    @property
    def tiles_q(self) -> int:
        return pl.cdiv(self.q_len, QUERIES * self.consumers)

    @property
    def tiles(self) -> int:
        return self.batch * self.heads * self.tiles_q

    @property
    def blocks(self) -> int:
        """Blocks of the grid: they stay, and tiles are dealt out beforehand."""
        return min(self.tiles, HOPPER.cores or 1)

    @property
    def scheduled(self) -> bool:
        """Whether blocks take several tiles, and a table (``schedule``) says which."""
        return self.tiles > self.blocks

    @property
    def has_splits(self) -> bool:
        """Whether the keys have several splits."""
        return self.split_tiles < pl.cdiv(self.band.kv_len, self.block_kv)

    @property
    def merges(self) -> bool:
        """Whether a consumer walks several splits, and merges them."""
        return self.has_splits

    @property
    def slots(self) -> int:
        """Buffers for what a consumer writes: one is filled while the other is on its way, where there is room. Where
        splits are merged, as many as take the room of their sums."""
        if self.merges:
            return pl.cdiv(sum(self.parts[1]) * jnp.dtype(jnp.float32).itemsize, self.parts[1][0] * self.dtype.itemsize)
        return 2 if over_shared(self._shared(2), "", across_warps=False) is None else 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self._shared(self.slots)

    def _shared(self, slots: int) -> int:
        of_keys, of_values = map(sum, self.parts)
        of_queries = self.consumers * QUERIES * (of_keys + slots * self.parts[1][0])
        return (of_queries + self.stages * self.block_kv * (of_keys + of_values)) * self.dtype.itemsize + LSE_BYTES

    def split_of(self, tile: QueryTile, step: Any) -> Any:
        """Shares that came before the one of a step's keys, of those that a tile sees."""
        return quotient(tile.first + step, self.split_tiles) - quotient(tile.first, self.split_tiles)

    def queries(self, q: Any, tile: QueryTile, rows: Any) -> Any:
        """Rows of a tile's queries, (rows, d), of all of them."""
        return q.at[tile.batch, rows, tile.head]

    def bring_keys(self, ref: Refs, tile: Any, step: Any, buffer: Any) -> None:
        """Start a step's keys on their way to a buffer that is free."""
        bring(self._keys_of(ref.k, tile, step), ref.keys, (buffer,), ref.k_arrived.at[buffer])

    def bring_values(self, ref: Refs, tile: Any, step: Any, buffer: Any) -> None:
        """Start a step's values on their way to a buffer that is free."""
        bring(self._keys_of(ref.v, tile, step), ref.values, (buffer,), ref.v_arrived.at[buffer])

    def _keys_of(self, array: Any, tile: QueryTile, step: Any) -> Any:
        rows = pl.ds((tile.first + step) * self.block_kv, self.block_kv)
        return array.at[tile.batch, rows, quotient(tile.head, self.group)]

    def dots(self, tile: Any, s: Any) -> Any:
        """Products of queries and keys, as scores are made of them."""
        return s

    def results(self, tile: Any, o: Any) -> Any:
        """Weighted means of values, as they are written."""
        return o

    def masked(self, tile: Any, warpgroup: Any, step: Any, s: Any) -> Any:
        """Scores of a warpgroup's queries, -inf where one does not see a key."""
        mine, i, j = self.band._replace(block_q=QUERIES), quotient(tile.row, QUERIES) + warpgroup, tile.first + step
        inside = mine.inside(i, j)
        if inside is True:
            return s
        return lax.cond(inside, lambda s: s, lambda s: jnp.where(mine.allowed(i, j), s, -jnp.inf), s)

    def tile(self, index: Any, ref: Refs) -> Any:
        """The tile of this index. ``ref.spans``: where its segments are (`segments`), if there are any."""
        spans = getattr(ref, "spans", None)
        place, i = heaviest_first(index, self.batch * self.heads, self.tiles_q, self.band)
        first, last = self.band.span(i, None if spans is None else span_at(spans, quotient(place, self.heads), i))
        first = jnp.clip(first, 0, (self.band.kv_len - 1) // self.block_kv)  # never none: one that no query sees
        steps = jnp.maximum(last - first, 0) + 1
        batch = quotient(place, self.heads)
        return QueryTile(batch, place - batch * self.heads, i * (QUERIES * self.consumers), first, steps)


def heaviest_first(index: Any, heads: int, tiles: int, band: Band) -> tuple[Any, Any]:
    """Which of so many heads of all sequences, and which of its tiles, has this index: of ``TOGETHER`` heads tiles that
    see most come first, the last ones where a band ends with them, else the first."""
    if band.first is None and band.last is None:
        place = quotient(index, tiles)
        return place, index - place * tiles
    section = quotient(index, TOGETHER * tiles)
    rest = index - section * (TOGETHER * tiles)
    width = jnp.minimum(heads - section * TOGETHER, TOGETHER)
    down = lax.div(rest, width)
    return section * TOGETHER + rest - down * width, down if band.last is None else tiles - 1 - down


def schedule(plan: MosaicFlashPlan) -> np.ndarray:
    """(blocks, 1 + rounds): how many tiles each block takes, and which. In the order of ``heaviest_first`` each tile
    goes to the block that will be done first, as if a multiprocessor took the next one then."""
    places, tiles = plan.batch * plan.heads, plan.tiles_q
    end = (plan.band.kv_len - 1) // plan.block_kv
    spans = (plan.band.span(i) for i in range(tiles))
    steps = [max(last - min(max(first, 0), end), 0) + 1 for first, last in spans]
    done = [(0.0, block) for block in range(plan.blocks)]
    scheduled: list[list[int]] = [[] for _ in done]
    for index in range(plan.tiles):
        section, rest = divmod(index, TOGETHER * tiles)
        down = rest // min(places - section * TOGETHER, TOGETHER)
        time, block = done[0]
        steps_here = steps[down if plan.band.last is None else tiles - 1 - down]
        heapq.heapreplace(done, (time + steps_here + BEGINNING, block))
        scheduled[block].append(index)
    found = np.zeros((plan.blocks, 1 + max(map(len, scheduled))), np.int32)
    for row, mine in zip(found, scheduled, strict=True):
        row[0], row[1 : 1 + len(mine)] = len(mine), mine
    return found


def tiles_of_split(call: Call, config: FlashConfig) -> int:
    """Tiles of keys that make a split."""
    kv_len, (left, right) = call.dims["kv_len"], call.options["window"] or (None, None)
    right = 0 if call.options["is_causal"] else right
    seen = kv_len if left is None or right is None else min(kv_len, left + right + 1)
    tiles = pl.cdiv(seen, config.block_kv)
    return max(pl.cdiv(tiles, config.max_splits), pl.cdiv(config.min_split_keys, config.block_kv))


class Merge(NamedTuple):
    """How the state of a split is added to that of those before it: of two sums the one whose maximum is lower shrinks
    by ``weight``. No sum has more than one product in it, so that compilers cannot differ in which one they fuse.

    before, more: the maxima of rows, or of one row.
    """

    before: Any
    more: Any
    weight: Any

    @classmethod
    def of(cls, scores: Any, before: Any, more: Any) -> Merge:
        """Where neither saw a key, nothing comes to nothing."""
        low, high = jnp.where(before >= more, more, before), jnp.where(before >= more, before, more)
        return cls(before, more, scores.alpha(low, scores.scaled_max(high)))

    @property
    def maximum(self) -> Any:
        return jnp.where(self.before >= self.more, self.before, self.more)

    def rows(self, before: Any, more: Any) -> Any:
        """The sum of l. Numbers alone are never fused, so those of rows must not be: a selection stands between."""
        earlier = self.before >= self.more
        scaled = jnp.where(earlier, more, before) * self.weight
        return jnp.where(earlier, before, more) + jnp.where(self.weight <= 1.0, scaled, self.weight)

    def elements(self, before: Any, more: Any) -> Any:
        """The sum of acc, (rows, columns), or of a part of one row's, which as many equal maxima stand beside."""
        of_rows = (lax.broadcast_in_dim(x, before.shape, (0,)) for x in self)
        m_before, m_more, weight = of_rows if before.ndim > 1 else self
        earlier = m_before >= m_more
        return jnp.where(earlier, before, more) + jnp.where(earlier, more, before) * weight


def rings(plan: MosaicFlashPlan, written: Any, **buffers: Any) -> dict[str, Any]:
    """``scratch`` for the rings that queries, keys and values come through, with their barriers, for what is
    ``written``, and for other buffers."""
    of_keys, of_values = plan.parts
    free = plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=plan.stages)
    several = {"ping_pong": plgpu.Barrier(num_arrivals=1, num_barriers=plan.consumers)} if plan.consumers > 1 else {}
    return {
        "k_arrived": plgpu.Barrier(num_arrivals=len(of_keys) * plan.copies, num_barriers=plan.stages),
        "k_free": free,
        "keys": HeadBuffers((plan.stages,), plan.block_kv, of_keys, plan.dtype),
        **buffers,
        "q_arrived": plgpu.Barrier(num_arrivals=len(of_keys), num_barriers=plan.consumers),
        "q_free": plgpu.Barrier(num_arrivals=1, num_barriers=plan.consumers),
        "queries": HeadBuffers((plan.consumers,), QUERIES, of_keys, plan.dtype),
        **several,
        "v_arrived": plgpu.Barrier(num_arrivals=len(of_values) * plan.copies, num_barriers=plan.stages + plan.mended),
        "v_free": free,
        "values": HeadBuffers((plan.stages,), plan.block_kv, of_values, plan.dtype),
        "written": written,
    }


def produce(ref: Refs, plan: MosaicFlashPlan, tile: QueryTile, before: Any) -> None:
    """Bring what one tile is made of, in the order in which it is used: values follow the next keys."""

    def keys(step: Any) -> None:
        buffer = lax.rem(before + step, jnp.int32(plan.stages))
        plgpu.barrier_wait(ref.k_free.at[buffer])
        plan.bring_keys(ref, tile, step, buffer)

    def values(step: Any) -> None:
        buffer = lax.rem(before + step, jnp.int32(plan.stages))
        plgpu.barrier_wait(ref.v_free.at[buffer])
        plan.bring_values(ref, tile, step, buffer)

    keys(jnp.int32(0))
    for c in range(plan.consumers):
        rows = pl.ds(tile.row + c * QUERIES, QUERIES)
        plgpu.barrier_wait(ref.q_free.at[c])
        bring(plan.queries(ref.q, tile, rows), ref.queries, (c,), ref.q_arrived.at[c])

    @pl.loop(1, tile.steps)
    def _(step: Any) -> None:
        step = jnp.int32(step)  # 64 bits wide, where JAX counts in them
        keys(step)
        values(step - 1)

    values(tile.steps - 1)


def bring(array: Any, parts: Sequence[HeadPart], buffer: tuple[Any, ...], arrived: Any, first: Any = None) -> None:
    """Start rows of a head, (rows, d), on their way to a buffer of each of its parts, or to its rows from ``first``
    on."""
    for part in parts:
        there = part.copied(*buffer) if first is None else part.copied(*buffer).at[pl.ds(first, array.shape[0])]
        plgpu.copy_gmem_to_smem(array.at[:, part.columns(array)], there, arrived)


def multiply_keys(ref: Refs, plan: MosaicFlashPlan, warpgroup: Any, buffer: Any, dots: Any) -> None:
    """Issue dots += q k^T."""
    for queries, keys in zip(ref.queries, ref.keys, strict=True):
        issue_product(dots, queries.tiled(warpgroup), keys.tiled(buffer), transposed=True)


def multiply_values(ref: Refs, plan: MosaicFlashPlan, buffer: Any, p: Any, products: Any) -> None:
    """Issue products += p v."""
    for values, acc in zip(ref.values, products, strict=True):
        issue_product(acc, p, values.tiled(buffer))


def in_ping_pong(ref: Refs, plan: MosaicFlashPlan, warpgroup: Any, issue: Callable[[], None]) -> None:
    """Issue products when it is this consumer's turn."""
    if plan.consumers > 1:
        plgpu.barrier_wait(ref.ping_pong.at[warpgroup])
    issue()
    if plan.consumers > 1:
        following = 1 - warpgroup if plan.consumers == 2 else lax.rem(warpgroup + 1, jnp.int32(plan.consumers))
        plgpu.barrier_arrive(ref.ping_pong.at[following])


def anew(index: Any, count: Any) -> Any:
    """``index``, of which compilers do not know that it is the same at each step of a loop. ``count``: below
    2^``COUNTED``, which they do not know either, and another number at each step. Where buffers lie that they know to
    stay they compute before the loop, four numbers a product, and keep that in registers or, where those are too few,
    in memory; one addition does for a buffer that they do not know."""
    return index + lax.shift_right_logical(count, jnp.int32(COUNTED))


def zeros(columns: int) -> Any:
    """A tile of sums."""
    return plgpu.layout_cast(jnp.zeros((QUERIES, columns), jnp.float32), TILE)


def zeros_of(widths: Widths) -> tuple[Any, ...]:
    """A tile of sums for each part of a head."""
    return tuple(zeros(width) for width in widths)


def same_segment(of_rows: Any, of_columns: Any, batch: Any, rows: Any, columns: Any) -> Any:
    """Which pairs of a tile share a segment: every 32-bit word of their ids, (batch, words, len), is equal."""
    shape = rows.size, columns.size

    def equal(word: int) -> Any:
        row = plgpu.load(of_rows.at[batch, word, rows], layout=ROW, optimized=False)
        column = plgpu.load(of_columns.at[batch, word, columns], layout=COLUMN, optimized=False)
        return lax.broadcast_in_dim(row, shape, (0,)) == lax.broadcast_in_dim(column, shape, (1,))

    return both(*(equal(word) for word in range(of_rows.shape[1])))


def bias_tile(bias: Any, batch: Any, head: Any, rows: Any, columns: Any, by_query: bool = True) -> Any:
    """The bias of a tile of scores, whose rows are queries, or keys if not ``by_query``. Along an axis of extent 1 all
    share it."""
    batches, heads = bias.shape[:2]
    here = bias.at[batch if batches > 1 else 0, head if heads > 1 else 0]
    if bias.shape[2 if by_query else 3] > 1:
        return plgpu.load(here.at[rows, columns], layout=TILE, optimized=False).astype(jnp.float32)
    place, layout, axis = (here.at[0, columns], COLUMN, 1) if by_query else (here.at[rows, 0], ROW, 0)
    shared = plgpu.load(place, layout=layout, optimized=False).astype(jnp.float32)
    return lax.broadcast_in_dim(shared, (rows.size, columns.size), (axis,))
