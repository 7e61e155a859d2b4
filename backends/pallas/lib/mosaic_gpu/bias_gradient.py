"""The gradient of attention's bias on Hopper: dS, summed over what bias is broadcast over.

    s = c tanh(scale q k^T / c) + bias, P = exp(min(s - lse, 0));  without a softcap s = scale q k^T + bias
    Delta = rowsum(d_o * o) - d_lse;  dS = P (d_o v^T - Delta);  d_bias = dS where a pair sees each other, else 0

bias and d_bias: (batch or 1, heads or 1, q_len or 1, kv_len), and the others as in ``attention_vjp.py``. bias comes
after the softcap, so that dS has no slope of it.

A block owns a tile of d_bias, of 128 queries, 64 to a consumer, and 64 keys, and nobody else adds to it. It walks
what the tile is summed over: batch entries and key heads, whose keys come by in iterations, and in each iteration the
queries of the heads that share these, one tile after the other. One more warpgroup brings both through rings of
buffers. The sum stays in float32 registers, in an order that never changes, and is written once; nothing else takes
memory. Where bias has one row, an iteration walks the tiles of queries too, and at the end the sums of both consumers
are added, and their rows then. Tiles that the band empties are written as 0, and nothing is read for them.

The tile of bias is the same at every step. It comes once, to the buffer that the tile of d_bias leaves by.

stages: buffers for keys, and for queries: the tiling's, or as many as shared memory has room for. With tiles of 128
keys registers spill, up to 700 bytes a thread, and heads of 256 have no room.

Source: Dao, "FlashAttention-2" (2023), algorithm 2, whose dS this is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas.configs import FlashGradientsConfig
from portakern.backends.pallas.lib.blocks import Refs, padded, quotient, within
from portakern.backends.pallas.lib.mosaic_gpu.accumulators import finished, in_registers
from portakern.backends.pallas.lib.mosaic_gpu.chip import (
    SWIZZLED_BYTES,
    Swizzled,
    aligned,
    issue_product,
    launch,
    over_shared,
    padded_rows,
    store,
    tiled_buffer,
    whole_pieces,
)
from portakern.backends.pallas.lib.mosaic_gpu.flash import (
    COLUMN,
    ROW,
    TILE,
    anew,
    bring,
    heaviest_first,
    zeros,
)
from portakern.backends.pallas.lib.mosaic_gpu.head_parts import HeadBuffers
from portakern.backends.pallas.lib.mosaic_gpu.pairs import (
    CONSUMERS,
    NUMBERS,
    ROWS,
    AttentionGradientPlan,
    Fold,
    ResidentTile,
    after_reading,
    kept,
    plan_of,
    segments,
    slopes,
    walk,
    weights,
)
from portakern.backends.pallas.lib.mosaic_gpu.pipeline import drain_last, warp_specialized
from portakern.backends.pallas.lib.segments import Span, span_at, spans_of
from portakern.core.call import Call

QUERIES = CONSUMERS * ROWS
KEYS = 64
"""Queries and keys of a tile."""


class BiasTile(NamedTuple):
    """The tile of d_bias that a block owns: tile ``j`` of the keys of an entry of bias. In each of so many
    ``iterations`` ``span`` tiles of queries come by, from the ``first`` on."""

    batch: Any
    head: Any
    j: Any
    first: Any
    span: Any
    iterations: Any


class BiasPlan(NamedTuple):
    """How d_bias is cut.

    Attributes:
      pairs: how scores are made, with queries as rows and as many keys at a time as a buffer of bias has in a row.
      visits: the same pairs as they come by: a tile of resident keys, and tiles of queries.
      shape, dtype: those of bias.
    """

    pairs: AttentionGradientPlan
    visits: AttentionGradientPlan
    shape: tuple[int, ...]
    dtype: Any

    @property
    def one_row(self) -> bool:
        """Whether all queries share a row of bias."""
        return self.shape[2] == 1

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of an entry of d_bias, by queries and by keys."""
        return pl.cdiv(self.shape[2], QUERIES), self.visits.tiles

    @property
    def parts(self) -> list[slice]:
        """The keys of a tile, as many at a time as a buffer for bias has in a row."""
        columns = self.pairs.streamed.tile
        return [slice(first, first + columns) for first in range(0, KEYS, columns)]

    @property
    def key_heads(self) -> int:
        """Whose keys come by one after the other."""
        return self.visits.heads if self.shape[1] == 1 else 1

    @property
    def iterations(self) -> int:
        """Batch entries and key heads that a tile is summed over."""
        return (self.pairs.batch if self.shape[0] == 1 else 1) * self.key_heads

    @property
    def shared(self) -> int:
        """Bytes of shared memory, but for those to reduce across warps."""
        of_both = sum(map(sum, self.pairs.parts))
        operands = self.pairs.stages * (QUERIES + KEYS) * of_both * self.pairs.dtype.itemsize
        numbers, total = self.pairs.stages * len(NUMBERS) * QUERIES * 4, ROWS * KEYS * 4
        of_bias = KEYS * self.dtype.itemsize
        return aligned(operands, numbers, *((total, of_bias) if self.one_row else (QUERIES * of_bias,)))

    @property
    def fits(self) -> bool:
        """Whether a block has room for it: with one stage it has, of any heads that are served."""
        return over_shared(self.shared, "stages", across_warps=self.one_row) is None

    def block(self, index: Any, iterations: Any, spans: Any = None) -> BiasTile:
        """The tile of a block. ``iterations``: as many as there are. ``spans``: of each tile of keys the tiles of
        queries that may share a segment with it, in some batch entry of those that are summed (`segments`)."""
        band, (of_queries, of_keys) = self.visits.band._replace(block_q=KEYS), self.tiles
        places = self.shape[0] * self.shape[1]
        if self.one_row:
            place, j = heaviest_first(index, places, of_keys, band)
            first, last = band.span(j, self._span_at(spans, place, j))
            span = jnp.maximum(jnp.int32(last - first + 1), 0)
        else:
            place = quotient(index, of_queries * of_keys)
            rest = index - place * (of_queries * of_keys)
            i = quotient(rest, of_keys)
            j = rest - i * of_keys
            low, high = band.span(rest - i * of_keys, self._span_at(spans, place, j))
            first, span = i, ((low <= i) & (i <= high)).astype(jnp.int32)
        batch = quotient(place, self.shape[1])
        return BiasTile(batch, place - batch * self.shape[1], j, first, span, jnp.where(span > 0, iterations, 0))

    def _span_at(self, spans: Any, entry: Any, j: Any) -> Span | None:
        return None if spans is None else span_at(spans, quotient(entry, self.shape[1]), j)

    def iteration(self, block: BiasTile, iteration: Any) -> ResidentTile:
        """The keys of an iteration, and the heads and tiles of queries that come by."""
        batch = quotient(iteration, self.key_heads)
        head, heads = iteration - batch * self.key_heads, self.pairs.group
        streamed = head * heads
        if self.shape[1] > 1:
            head, streamed, heads = quotient(block.head, self.pairs.group), block.head, 1
        batch = batch if self.shape[0] == 1 else block.batch
        return ResidentTile(batch, head, block.j * KEYS, streamed, heads, block.first, block.span)


def bias_plan(call: Call, config: FlashGradientsConfig) -> BiasPlan:
    """With the tiling's stages, or as many as there is room for."""
    bias, dtype = call.arrays["bias"], jnp.dtype(call.arrays["bias"].dtype)
    columns = SWIZZLED_BYTES // dtype.itemsize
    for stages in range(config.stages, 0, -1):
        cut = FlashGradientsConfig(block_q=QUERIES, block_kv=KEYS, stages=stages)
        pairs, visits = (plan_of(call, cut, wants) for wants in (("d_q",), ("d_k",)))
        # A key's sum is its own, whatever keys beyond the last have; so is a query's, where it has a row of bias.
        band = pairs.band._replace(block_kv=columns, closed=True)
        pairs = pairs._replace(band=band, streamed=pairs.streamed._replace(tile=columns))
        visits = visits._replace(band=visits.band._replace(closed=bias.shape[2] > 1), rows=KEYS)
        plan = BiasPlan(pairs, visits, bias.shape, dtype)
        if plan.fits:
            break
    return plan


def copies(call: Call, config: FlashGradientsConfig) -> str | None:
    """What XLA copies besides, in words."""
    plan, kv_len = bias_plan(call, config), call.dims["kv_len"]
    wide = _width(plan)
    return f"for d_bias, bias is padded from {kv_len} keys to {wide}, and d_bias cut again" if wide != kv_len else None


def _width(plan: BiasPlan) -> int:
    """Keys of bias as the copy engine takes them: a row of its own in whole tiles, since it does not know where they
    end."""
    kv_len = plan.shape[3]
    return padded(kv_len, KEYS) if plan.one_row else whole_pieces(kv_len, plan.dtype)


def kernel(ref: Refs, *, plan: BiasPlan) -> None:
    """One tile of d_bias."""
    warpgroup = lax.axis_index("warpgroup")
    block = plan.block(lax.axis_index("block"), ref.iterations[0], getattr(ref, "spans", None))

    warp_specialized(
        warpgroup, CONSUMERS, lambda: produce(ref, plan, block), lambda: consume(ref, plan, warpgroup, block)
    )


def produce(ref: Refs, plan: BiasPlan, block: BiasTile) -> None:
    """Bring the tile of bias, then in each iteration keys, and queries as buffers are free."""
    stages = jnp.int32(plan.pairs.stages)
    pl.when(block.iterations > 0)(lambda: bring_bias(ref, plan, block))

    @pl.loop(0, block.iterations)
    def _(iteration: Any) -> None:
        tile, buffer = plan.iteration(block, iteration), lax.rem(iteration, stages)
        pl.when(iteration >= stages)(lambda: plgpu.barrier_wait(ref.keys_free.at[buffer]))
        for array, parts in ((ref.k, ref.keys), (ref.v, ref.values)):
            there = array.at[tile.batch, pl.ds(tile.row, KEYS), tile.head]
            bring(there, parts, (buffer,), ref.keys_arrived.at[buffer])
        pl.loop(0, tile.steps)(lambda step: bring_queries(ref, tile, iteration * tile.steps + step, stages, step))

    steps = block.iterations * plan.iteration(block, jnp.int32(0)).steps
    drain_last(ref.keys_free, block.iterations, stages)
    drain_last(ref.queries_free, steps, stages)


def bring_bias(ref: Refs, plan: BiasPlan, block: BiasTile) -> None:
    here = ref.bias.at[block.batch, block.head]
    if plan.one_row:
        keys = pl.ds(block.j * KEYS, KEYS)
        plgpu.copy_gmem_to_smem(here.at[0, keys], ref.bias_row, ref.bias_arrived)
        return
    for c in range(CONSUMERS):
        for part in range(len(plan.parts)):
            there = here.at[_query_and_key_rows(plan, block, c, part)]
            plgpu.copy_gmem_to_smem(there, ref.tile.copied.at[c, part], ref.bias_arrived)


def _query_and_key_rows(plan: BiasPlan, block: BiasTile, consumer: Any, part: int) -> tuple[Any, Any]:
    """The queries, and the keys, of a buffer for a part of a tile."""
    rows = pl.ds(block.first * QUERIES + consumer * ROWS, ROWS)
    return rows, pl.ds(block.j * KEYS + plan.parts[part].start, plan.pairs.streamed.tile)


def bring_queries(ref: Refs, tile: ResidentTile, count: Any, stages: Any, step: Any) -> None:
    """Bring the queries of an iteration's step, with their ``NUMBERS``, to the next buffer. count: steps before."""
    buffer, (head, i) = lax.rem(count, stages), tile.head_and_tile(step)
    arrived = ref.queries_arrived.at[buffer]
    pl.when(count >= stages)(lambda: plgpu.barrier_wait(ref.queries_free.at[buffer]))
    for c in range(CONSUMERS):
        rows = pl.ds(i * QUERIES + c * ROWS, ROWS)
        for array, parts in ((ref.q, ref.queries), (ref.d_o, ref.cotangents)):
            bring(array.at[tile.batch, rows, head], parts, (buffer, c), arrived)
        for n, name in enumerate(NUMBERS):
            there = getattr(ref, name).at[tile.batch, head, rows]
            plgpu.copy_gmem_to_smem(there, ref.numbers.at[buffer, n, c], arrived)


def consume(ref: Refs, plan: BiasPlan, warpgroup: Any, block: BiasTile) -> None:
    """Sum up dS of this warpgroup's queries, and write it."""
    pl.when(block.iterations > 0)(lambda: plgpu.barrier_wait(ref.bias_arrived))

    def of_iteration(visit: Callable[..., Any], iteration: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        tile, buffer = plan.iteration(block, iteration), lax.rem(iteration, jnp.int32(plan.pairs.stages))
        plgpu.barrier_wait(ref.keys_arrived.at[buffer])
        sums = visit(tile, partial(add, ref, plan, warpgroup, tile, iteration), sums)
        plgpu.barrier_arrive(ref.keys_free.at[buffer])
        return sums

    sums = tuple(zeros(plan.pairs.streamed.tile) for _ in plan.parts)
    for visit, first, after in visits_of(plan, block, ref.far[0] != 0):
        sums = lax.fori_loop(first, after, partial(of_iteration, visit), sums)
    (write_row if plan.one_row else write)(ref, plan, warpgroup, block, sums)


def visits_of(plan: BiasPlan, block: BiasTile, far: Any) -> list[tuple[Callable[..., Any], Any, Any]]:
    """How the tiles of queries of an iteration are visited, ``visit(tile, fold, sums)``, from one iteration on and
    before another.
    Where an iteration has one, the band cuts through it in all iterations or in none: as a choice within an iteration,
    that spilled. ``far``: all are cut (`is_far`)."""

    def heads(cut: bool, tile: ResidentTile, fold: Fold, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        return lax.fori_loop(0, tile.steps, partial(fold, cut), sums)

    if plan.one_row:
        return [(partial(walk, plan.visits, far=far), 0, block.iterations)]
    begin, end = plan.visits.inner(plan.iteration(block, jnp.int32(0))) if plan.pairs.band.has_edges else (0, 1)
    inside = jnp.where(far, 0, jnp.where(begin < end, block.iterations, 0))
    return [(partial(heads, False), 0, inside), (partial(heads, True), inside, block.iterations)]


def add(
    ref: Refs,
    plan: BiasPlan,
    warpgroup: Any,
    tile: ResidentTile,
    round: Any,
    cut: bool,
    step: Any,
    sums: tuple[Any, ...],
) -> tuple[Any, ...]:
    """The sum with dS of one tile of queries and the keys of an iteration. cut: whether some pair may not see each
    other."""
    pairs, stages, count = plan.pairs, jnp.int32(plan.pairs.stages), round * tile.steps + step
    buffer = lax.rem(count, stages)
    here, there = (anew(n, tile.row + count) for n in (buffer, lax.rem(round, stages)))
    plgpu.barrier_wait(ref.queries_arrived.at[buffer])

    def work(accumulators: Any, totals: Any) -> None:
        sides = (ref.queries, ref.keys), (ref.cotangents, ref.values)
        for acc, side in zip(accumulators, sides, strict=True):
            for rows, columns in zip(*side, strict=True):
                issue_product(acc, rows.tiled(here, warpgroup), columns.tiled(there), transposed=True)
        *lse, delta = (
            plgpu.load(ref.numbers.at[buffer, n, warpgroup], layout=ROW, optimized=False) for n in range(len(NUMBERS))
        )
        head, i = tile.head_and_tile(step)
        resident = tile._replace(head=head, row=i * QUERIES)
        first = quotient(tile.row, pairs.streamed.tile)
        places = [(warpgroup, resident, head, first + n, cut) for n in range(len(plan.parts))]
        dots = finished(accumulators[0], later=len(pairs.parts[1]))
        p = [
            weights(ref, pairs, place, lse, dots[:, keys], bias_of(ref, plan, warpgroup, n))[0]
            for n, (place, keys) in enumerate(zip(places, plan.parts, strict=True))
        ]
        d_p = finished(accumulators[1], later=0)
        for total, place, keys, p_n in zip(totals, places, plan.parts, p, strict=True):
            (d_s,) = kept(ref, pairs, place, 0.0, slopes(pairs, delta, p_n, None, d_p[:, keys]))
            if plan.one_row and cut:
                d_s = within(d_s, 0, resident.row + warpgroup * ROWS, pairs.resident.length, divisor=QUERIES)
            total[...] += d_s

    _, after = in_registers(pairs.interpret, work, (zeros(KEYS),) * 2, sums)
    after_reading(pairs.interpret)
    plgpu.barrier_arrive(ref.queries_free.at[buffer])
    return tuple(after)


def bias_of(ref: Refs, plan: BiasPlan, warpgroup: Any, part: int) -> Any:
    """A part of the tile of bias, beside this warpgroup's queries."""
    if not plan.one_row:
        return plgpu.load(ref.tile.tiled.at[warpgroup, part], layout=TILE).astype(jnp.float32)
    columns = pl.ds(plan.parts[part].start, plan.pairs.streamed.tile)
    row = plgpu.load(ref.bias_row.at[columns], layout=COLUMN, optimized=False).astype(jnp.float32)
    return lax.broadcast_in_dim(row, (ROWS, plan.pairs.streamed.tile), (1,))


def write(ref: Refs, plan: BiasPlan, warpgroup: Any, block: BiasTile, sums: tuple[Any, ...]) -> None:
    """Send this warpgroup's queries of a tile on their way, in the place of bias."""
    plgpu.commit_smem()  # every thread has read its bias
    for part, total in enumerate(sums):
        ref.tile.tiled[warpgroup, part] = total.astype(plan.dtype)
    plgpu.commit_smem()
    for part in range(len(sums)):
        there = ref.d_bias.at[block.batch, block.head].at[_query_and_key_rows(plan, block, warpgroup, part)]
        plgpu.copy_smem_to_gmem(ref.tile.copied.at[warpgroup, part], there)


def write_row(ref: Refs, plan: BiasPlan, warpgroup: Any, block: BiasTile, sums: tuple[Any, ...]) -> None:
    """Write the sum over all queries: one warpgroup hands its own to the other, which alone reduces across warps."""

    @pl.when(warpgroup == 1)
    def _() -> None:
        for part, total in enumerate(sums):
            ref.handed[part] = total
        plgpu.barrier_arrive(ref.handed_over)

    @pl.when(warpgroup == 0)
    def _() -> None:
        plgpu.barrier_wait(ref.handed_over)
        for part, total in enumerate(sums):
            row = jnp.sum(total + plgpu.load(ref.handed.at[part], layout=TILE), axis=0)
            keys = _query_and_key_rows(plan, block, 0, part)[1]
            store(ref.d_bias.at[block.batch, block.head, 0, keys], row.astype(plan.dtype))


def bias_gradient(call: Call, config: FlashGradientsConfig, inputs: Mapping[str, jax.Array]) -> jax.Array:
    """d_bias. inputs: among others q, k, v and d_o as the copy engine takes them, and ``NUMBERS``."""
    plan = bias_plan(call, config)
    width = _width(plan)
    bias = padded_rows(call.arrays["bias"], width)
    rows, keys = (padded(call.dims[name], QUERIES) for name in ("q_len", "kv_len"))
    # A number of iterations that compilers know they know too much (``anew``).
    more = {
        "far": jnp.max(inputs["far"]).reshape(1),
        "bias": bias,
        "iterations": jnp.full((1,), plan.iterations, jnp.int32),
    } | segments(call, rows, keys)
    more |= spans_of(call, QUERIES, KEYS, by_key=True, across_batch=plan.shape[0] == 1)
    found = launch(
        call,
        partial(kernel, plan=plan),
        f"{call.spec.name}_d_bias",
        (plan.shape[0] * plan.shape[1] * plan.tiles[0] * plan.tiles[1],),
        inputs={name: inputs[name] for name in ("q", "k", "v", "d_o", *NUMBERS)} | more,
        outputs={"d_bias": jax.ShapeDtypeStruct((*plan.shape[:3], width), plan.dtype)},
        scratch=scratch_of(plan),
        warpgroups=CONSUMERS + 1,
        approximate=True,
        across_warps=plan.one_row,
    )
    return found["d_bias"][..., : plan.shape[3]]


def scratch_of(plan: BiasPlan) -> dict[str, Any]:
    """The rings of keys and of queries with their barriers, the tile of bias, and a sum that is handed over."""
    stages, (of_first, of_second), dtype = plan.pairs.stages, plan.pairs.parts, plan.pairs.dtype
    one_row, columns, of_both = plan.one_row, plan.pairs.streamed.tile, len(of_first + of_second)
    of_queries = CONSUMERS * (of_both + len(NUMBERS))
    free = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages)
    row: dict[str, Any] = {"bias_row": plgpu.SMEM((KEYS,), plan.dtype)}
    handed: dict[str, Any] = {
        "handed": tiled_buffer((len(plan.parts), ROWS, columns), jnp.float32),
        "handed_over": plgpu.Barrier(num_arrivals=1),
    }
    tile: dict[str, Any] = {"tile": Swizzled((CONSUMERS, len(plan.parts), ROWS, columns), plan.dtype)}
    return {
        "bias_arrived": plgpu.Barrier(num_arrivals=1 if one_row else CONSUMERS * len(plan.parts)),
        **(row if one_row else {}),
        "cotangents": HeadBuffers((stages, CONSUMERS), ROWS, of_second, dtype),
        **(handed if one_row else {}),
        "keys": HeadBuffers((stages,), KEYS, of_first, dtype),
        "keys_arrived": plgpu.Barrier(num_arrivals=of_both, num_barriers=stages),
        "keys_free": free,
        "numbers": plgpu.SMEM((stages, len(NUMBERS), CONSUMERS, ROWS), jnp.float32),
        "queries": HeadBuffers((stages, CONSUMERS), ROWS, of_first, dtype),
        "queries_arrived": plgpu.Barrier(num_arrivals=of_queries, num_barriers=stages),
        "queries_free": free,
        **({} if one_row else tile),
        "values": HeadBuffers((stages,), KEYS, of_second, dtype),
    }
