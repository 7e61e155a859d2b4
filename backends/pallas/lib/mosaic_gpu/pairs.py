"""What gradients of attention on Hopper are computed from: pairs of queries and keys, tile by tile.

    t = tanh(scale q k^T / c), s = c t + bias, P = exp(min(s - lse, 0));  without a softcap s = scale q k^T + bias
    Delta = rowsum(d_o * o) - d_lse;  dS = P (d_o v^T - Delta);  D = dS (1 - t^2), without a softcap dS

lse is two numbers, lse + lse_low, and scores are kept in the unit of the forward pass (`UnitOf`): so P is the
weight that a key had there, however large scores are. Where lse is near 0 its second number is next to nothing and is
left out: heads are marked of which a query has an lse far from 0, and only their tiles, and those that masks cut
through, take the way on which it is minded.

How the pairs are cut into tiles and in which order these come by, P and D of a tile, and which of its pairs see each
other. What is made of them the kernels say: ``attention_vjp.py`` those of q, k and v, ``bias_gradient.py`` the bias's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from math import e, log2
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from portakern.backends.pallas.configs import FlashGradientsConfig
from portakern.backends.pallas.lib.band import Band
from portakern.backends.pallas.lib.blocks import Refs, padded, quotient, words
from portakern.backends.pallas.lib.double_float import UnitOf, in_two
from portakern.backends.pallas.lib.mosaic_gpu import rows as row_walk
from portakern.backends.pallas.lib.mosaic_gpu.attention import extended, tanh
from portakern.backends.pallas.lib.mosaic_gpu.chip import aligned
from portakern.backends.pallas.lib.mosaic_gpu.flash import COLUMN, bias_tile, same_segment
from portakern.backends.pallas.lib.mosaic_gpu.head_parts import PART, Widths, widths_of
from portakern.backends.pallas.lib.mosaic_gpu.rows import Formula, WarpRowWalk, Weights
from portakern.backends.pallas.lib.segments import span_at, spans_of
from portakern.core.call import Call
from portakern.specs._exponents import two_parts
from portakern.specs.attention import far_from, scale_of

CONSUMERS, ROWS = 2, 64
"""Warpgroups that compute, and resident rows of each: those of one instruction of the tensor cores."""

SLOTS = 2
"""Buffers for what a consumer writes: one is filled while the other is on its way."""

NUMBERS = "shift", "low", "delta"
"""What a query brings along: the two numbers of lse, and Delta."""

LEAST = 1.1754944e-38
"""What stands for a second number of 0 of an lse that is far from 0: the least that is not flushed, since units of
large scales are large."""

TilePosition = tuple[Any, "ResidentTile", Any, Any, bool]
"""Where a tile of scores is: its warpgroup, the resident rows, the head and the streamed tile; and whether it is
``cut``: whether the band may cut through it, or lse be far from 0."""

Fold = Callable[[bool, Any, tuple[Any, ...]], tuple[Any, ...]]
"""Sums with what a turn adds, which may be cut."""


class Side(NamedTuple):
    """Queries or keys, as the kernel knows them: ``first`` meets the other side's in scores (q and k), ``second`` in dP
    (d_o and v). tile: rows that come by at a time. length: rows there are."""

    first: str
    second: str
    ids: str
    tile: int
    length: int


class AttentionGradientPlan(NamedTuple):
    """How some gradients are cut.

    Attributes:
      wants: the gradients. resident, streamed: the sides. batch, heads: of the resident rows; group: query heads of a
        key head.
      by_query: whether queries are resident. d, dv, stages, dtype, interpret: as the call and the tiling have them.
      parts: of a row of ``first``, and of ``second``.
      band: which streamed rows a resident one sees, in tiles of ``ROWS`` and of streamed rows.
      pre, capped, factor, unit: how scores come of dots: what multiplies a dot, whether its tanh is taken and what
        multiplies that, and the unit of the score. scale: of d_q and d_k.
      rows: of a resident tile.
    """

    wants: tuple[str, ...]
    resident: Side
    streamed: Side
    batch: int
    heads: int
    group: int
    by_query: bool
    d: int
    dv: int
    parts: tuple[Widths, Widths]
    stages: int
    band: Band
    pre: float | None
    capped: bool
    factor: float | None
    unit: float
    scale: float
    dtype: Any
    interpret: bool
    rows: int = CONSUMERS * ROWS

    @property
    def overlaps(self) -> bool:
        """Whether weights are computed beside products. Products of narrower heads are too short for what it costs,
        and those of wider ones leave no registers."""
        return PART < max(self.d, self.dv) <= 2 * PART

    @property
    def tiles(self) -> int:
        """Tiles of resident rows, of one head."""
        return pl.cdiv(self.resident.length, self.rows)

    @property
    def sums(self) -> dict[str, Widths]:
        """The parts of each gradient."""
        return {name: self.parts[name == "d_v"] for name in self.wants}

    @property
    def leaving(self) -> Widths:
        """The parts of all gradients."""
        return tuple(itertools.chain(*self.sums.values()))

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        of_both = sum(itertools.chain(*self.parts))
        rows = (CONSUMERS * ROWS + self.stages * self.streamed.tile) * of_both
        rows += CONSUMERS * SLOTS * ROWS * max(self.leaving)
        numbers = math.prod(self.numbers) * jnp.dtype(jnp.float32).itemsize
        return aligned(rows * self.dtype.itemsize, numbers)

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The buffers of ``NUMBERS`` that come by beside queries. Resident queries have theirs in registers."""
        return (0 if self.by_query else self.stages), len(NUMBERS), self.streamed.tile

    def inner(self, tile: ResidentTile, tiles_per_step: int = 1) -> tuple[Any, Any]:
        """Turns of so many streamed tiles ``tiles_per_step``: the first of a head all of whose pairs see each other,
        and the first after those."""
        band, rows, size = self.band, self.rows, self.streamed.tile
        turns, begin = lax.div(tile.span, jnp.int32(tiles_per_step)), jnp.int32(0)
        ends = [] if band.closed or not band.kv_len % size else [jnp.int32(band.kv_len // size)]
        if band.first is not None:
            from_ = quotient(jnp.maximum(band.first + tile.row + (rows - 1), 0) + (size - 1), size)
            begin = lax.div(jnp.maximum(from_ - tile.first, 0) + (tiles_per_step - 1), jnp.int32(tiles_per_step))
        if band.last is not None:
            ends.append(quotient(jnp.maximum(band.last + tile.row + 1, 0), size))
        end = turns
        for after in ends:
            end = jnp.minimum(end, lax.div(jnp.maximum(after - tile.first, 0), jnp.int32(tiles_per_step)))
        if band.rows and band.rows % rows:
            end = jnp.where(tile.row + rows <= band.rows, end, 0)
        begin = jnp.minimum(begin, turns)
        return begin, jnp.maximum(end, begin)

    @property
    def registers(self) -> int:
        """Registers of a consumer's thread: sums, two tiles of numbers, and what is rounded of them."""
        return sum(self.leaving) // 2 + self.streamed.tile + self.streamed.tile // 4 * len(self.wants)


class ResidentTile(NamedTuple):
    """The resident rows of one head, from ``row`` on, and what comes by: ``span`` tiles of each of so many ``heads`` of
    streamed rows, from ``streamed_head`` on, which begin with the ``first``."""

    batch: Any
    head: Any
    row: Any
    streamed_head: Any
    heads: int
    first: Any
    span: Any

    @classmethod
    def at(cls, plan: AttentionGradientPlan, batch: Any, head: Any, i: Any, spans: Any = None) -> ResidentTile:
        """Tile i of a head. ``spans``: where its segments are (`segments`)."""
        band = plan.band._replace(block_q=plan.rows)
        first, last = band.span(i, None if spans is None else span_at(spans, batch, i))
        streamed, heads = (quotient(head, plan.group), 1) if plan.by_query else (head * plan.group, plan.group)
        return cls(batch, head, i * plan.rows, streamed, heads, first, jnp.maximum(last - first + 1, 0))

    @property
    def steps(self) -> Any:
        return self.span * self.heads

    def head_and_tile(self, step: Any) -> tuple[Any, Any]:
        """The head and the streamed tile of a step."""
        if self.heads == 1:
            return self.streamed_head, self.first + step
        turn = lax.div(step, self.span)
        return self.streamed_head + turn, self.first + step - turn * self.span


class Delta(Formula):
    """The sum of o d_o, which is told of each row and no more."""

    writes = False
    empty = (0.0,)

    def of_chunk(self, x: Any, walk: WarpRowWalk, start: Any, weights: Weights) -> tuple[Any, ...]:
        return (jnp.sum(walk.within(x[0] * x[1], 0.0, start), axis=1),)

    def result(self, statistics: tuple[Any, ...], x: Any, walk: WarpRowWalk, weights: Weights) -> None:
        return None

    def row_numbers(self, statistics: tuple[Any, ...], walk: WarpRowWalk) -> tuple[Any, ...]:
        return statistics


def plan_of(call: Call, config: FlashGradientsConfig, wants: tuple[str, ...]) -> AttentionGradientPlan:
    dims, by_query = call.dims, wants == ("d_q",)
    queries = Side("q", "d_o", "q_ids", config.block_q, dims["q_len"])
    keys = Side("k", "v", "kv_ids", config.block_kv, dims["kv_len"])
    resident, streamed = (queries, keys) if by_query else (keys, queries)
    band = Band.of(call, ROWS, streamed.tile)
    if not by_query:
        first, last = (None if bound is None else -bound for bound in (band.last, band.first))
        band = Band(first, last, dims["q_len"], ROWS, streamed.tile)
    pre, factor, unit = UnitOf.gradients(call)
    return AttentionGradientPlan(
        wants,
        resident,
        streamed,
        dims["batch"],
        dims["kv_heads"] * (dims["group"] if by_query else 1),
        dims["group"],
        by_query,
        dims["d"],
        dims["dv"],
        (widths_of(dims["d"]), widths_of(dims["dv"])),
        config.stages,
        band,
        pre,
        call.options["softcap"] is not None,
        factor,
        unit,
        scale_of(call),
        jnp.dtype(call.dtype),
        call.interpret,
    )


def walk(
    plan: AttentionGradientPlan,
    tile: ResidentTile,
    fold: Fold,
    sums: tuple[Any, ...],
    far: Any,
    tiles_per_step: int = 1,
) -> tuple[Any, ...]:
    """``fold(cut, turn, sums)`` over all streamed tiles, so many ``tiles_per_step``: of each head those on borders of
    the band, those inside, where nothing has to be ``cut``, and those on borders. ``far``: all are cut (`is_far`)."""
    turns, each = (lax.div(n, jnp.int32(tiles_per_step)) for n in (tile.steps, tile.span))
    if plan.band.inside(*map(jnp.int32, (0, 0))) is True:
        near = jnp.where(far, 0, turns)
        sums = lax.fori_loop(0, near, partial(fold, False), sums)
        return lax.fori_loop(near, turns, partial(fold, True), sums)
    begin, end = plan.inner(tile, tiles_per_step)
    end = jnp.where(far, begin, end)

    def of_head(head: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        base = head * each
        before = [(True, 0, begin)] if plan.band.first is not None else []
        for cut, low, high in [*before, (False, begin, end), (True, end, each)]:
            sums = lax.fori_loop(base + low, base + high, partial(fold, cut), sums)
        return sums

    return of_head(0, sums) if tile.heads == 1 else lax.fori_loop(0, tile.heads, of_head, sums)


@plgpu.inline_mgpu()
def _fence(_: Any) -> None:
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


def after_reading(interpret: bool) -> None:
    """Keep what the copy engine writes to shared memory from now on behind what this warpgroup's threads have read of
    it themselves: the engine goes another way than they, which barriers do not order with theirs. ``commit_smem`` is
    this fence too and waits for the whole warpgroup besides; Pallas's interpreter knows it alone."""
    if interpret:
        plgpu.commit_smem()
    else:
        _fence()


def is_far(ref: Refs, plan: AttentionGradientPlan, tile: ResidentTile) -> Any:
    """Whether some query of a key head has an lse far from 0."""
    return ref.far[tile.batch, tile.streamed_head if plan.by_query else tile.head] != 0


def read_number(ref: Refs, buffer: Any, i: int) -> Any:
    """One of ``NUMBERS`` of the queries that have come."""
    return plgpu.load(ref.numbers.at[buffer, i], layout=COLUMN, optimized=False)


def weights(
    ref: Refs, plan: AttentionGradientPlan, position: TilePosition, lse: Sequence[Any], dots: Any, bias: Any = None
) -> tuple[Any, Any]:
    """P of a tile of dots, whether or not pairs see each other, and t where there is a softcap. Under a bias, which may
    be all that numbers hold for a whole row, the difference comes before the factor by which both would overflow.
    Elsewhere that product and the difference are one operation, as in the forward pass. lse: its two numbers. bias: the
    tile's, where it need not be read."""
    _, tile, head, _, cut = position
    x = dots if plan.pre is None else dots * plan.pre
    t = tanh(x) if plan.capped else None
    s = x if t is None else t
    s = s if plan.factor is None else s * plan.factor
    if bias is None and "bias" in ref:
        query_head = tile.head if plan.by_query else head
        bias = bias_tile(ref.bias, tile.batch, query_head, *resident_and_streamed_rows(plan, position), plan.by_query)
    shift = beside(plan, lse[0], s.shape)
    apart = s * rate_of(plan.unit) - shift if bias is None else (s + bias) - shift
    if cut:
        apart = corrected(apart, beside(plan, lse[1], s.shape))
    return jnp.exp2(apart if bias is None else apart * log2(e)), t


def corrected(apart: Any, low: Any) -> Any:
    """How far scores lie from lse, its second number ``low`` minded. It is 0 of queries whose lse is near 0, and of no
    others: no score of the others is above. So no bit depends on which way a tile takes."""
    below = apart - low
    return jnp.where((low != 0.0) & (below > 0.0), 0.0, below)


def rate_of(unit: float) -> float:
    """What float32 holds of the factor that takes scores in this unit to exponents of 2."""
    return two_parts(unit * log2(e))[0]


def slopes(plan: AttentionGradientPlan, delta: Any, p: Any, t: Any, d_p: Any) -> Any:
    """D of a tile of P and dP."""
    d_s = p * (d_p - beside(plan, delta, p.shape))
    return d_s if t is None else d_s * (1.0 - t * t)


def resident_and_streamed_rows(plan: AttentionGradientPlan, position: TilePosition) -> tuple[Any, Any]:
    """The resident rows, and the streamed ones, of a tile."""
    warpgroup, tile, _, j, _ = position
    return pl.ds((quotient(tile.row, ROWS) + warpgroup) * ROWS, ROWS), pl.ds(j * plan.streamed.tile, plan.streamed.tile)


def beside(plan: AttentionGradientPlan, number: Any, shape: tuple[int, int]) -> Any:
    """A number of each query, beside a tile."""
    return lax.broadcast_in_dim(number() if callable(number) else number, shape, (0 if plan.by_query else 1,))


def shares_segment(ref: Refs, plan: AttentionGradientPlan, position: TilePosition) -> Any:
    """Which pairs of a tile share a segment."""
    of_rows, of_columns = getattr(ref, plan.resident.ids), getattr(ref, plan.streamed.ids)
    return same_segment(of_rows, of_columns, position[1].batch, *resident_and_streamed_rows(plan, position))


def kept(ref: Refs, plan: AttentionGradientPlan, position: TilePosition, unseen: float, *tiles: Any) -> tuple[Any, ...]:
    """Tiles of numbers with ``unseen`` for pairs that do not see each other, whatever they hold."""
    warpgroup, tile, _, j, cut = position
    if "q_ids" in ref:
        same = shares_segment(ref, plan, position)
        tiles = tuple(jnp.where(same, x, unseen) for x in tiles)
    if not cut:
        return tiles
    seen = plan.band.allowed(quotient(tile.row, ROWS) + warpgroup, j)
    if seen is None:
        return tiles
    return tuple(jnp.where(seen, x, unseen) for x in tiles)


def statistics(call: Call) -> dict[str, jax.Array]:
    """What is known of queries. ``shift`` and ``low``, (batch, heads, q_len or more): lse as two numbers, of natural
    units where there is a bias, and elsewhere of those in which scores are exponents of 2; the second is 0 where lse is
    near 0. The first is inf for queries that saw no key, and for those that are not there: their P is 0. ``far``,
    (batch, kv_heads): whether some lse is not near 0. ``delta``."""
    batch, q_len, heads, dv = call.arrays["o"].shape
    of_rows = [call.arrays[name].reshape(-1, dv) for name in ("o", "d_o")]
    config = row_walk.default_tiling(dv, call.dtype, arrays=2)
    _, told = row_walk.launched(call, config, of_rows, Delta(), {}, extra_numbers=1)
    assert told is not None
    delta = jnp.swapaxes(told[0, : batch * q_len * heads].reshape(batch, q_len, heads), 1, 2)
    if call.arrays["d_lse"] is not None:
        delta = delta - call.arrays["d_lse"]
    unit = UnitOf.gradients(call).unit
    factor = 1.0 if call.arrays["bias"] is not None else rate_of(unit) / unit
    shift, low = in_two(call.arrays["lse"], call.arrays["lse_low"], factor, None)
    far = (jnp.abs(call.arrays["lse"]) >= far_from(call)) & (jnp.abs(shift) < jnp.inf)
    low = jnp.where(far, jnp.where(low == 0.0, LEAST, low), 0.0)
    unseen = call.arrays["lse"] == -jnp.inf
    whole = padded(q_len, CONSUMERS * ROWS)
    lacking = [(0, 0), (0, 0), (0, whole - q_len)]
    shift = jnp.pad(jnp.where(unseen, jnp.inf, shift), lacking, constant_values=jnp.inf)
    delta = extended(jnp.where(unseen, 0.0, delta), 2, whole)
    of_heads = jnp.any(far.reshape(batch, call.dims["kv_heads"], -1), axis=2).astype(jnp.int32)
    return {"far": of_heads, "shift": shift, "low": extended(low, 2, whole), "delta": delta}


def masks(call: Call, plan: AttentionGradientPlan) -> dict[str, jax.Array]:
    """Bias and segment ids, (batch, words, len), as the kernel reads them: in whole tiles, resident rows first. And
    which streamed tiles come by that may hold segments of a resident tile; or how many come by, where all see all: of a
    number of steps that compilers know they know too much (``anew``)."""
    rows, keys = (padded(call.dims[name], CONSUMERS * ROWS) for name in ("q_len", "kv_len"))
    by_query = plan.by_query
    of_queries, of_keys = (plan.rows, plan.streamed.tile) if by_query else (plan.streamed.tile, plan.rows)
    found = spans_of(call, of_queries, of_keys, by_key=not by_query)
    if not found and plan.band.first is None and plan.band.last is None:
        found["span"] = jnp.full((1,), pl.cdiv(plan.streamed.length, plan.streamed.tile), jnp.int32)
    bias = call.arrays["bias"]
    if bias is not None:
        bias = extended(extended(bias, 2, rows) if bias.shape[2] > 1 else bias, 3, keys)
        found["bias"] = bias if by_query else jnp.swapaxes(bias, 2, 3)
    return found | segments(call, rows, keys)


def segments(call: Call, rows: int, keys: int) -> dict[str, jax.Array]:
    """Segment ids, (batch, words, len), of so many queries and keys."""
    ids = [call.arrays[f"{side}_segment_ids"] for side in ("q", "kv")]
    if ids[0] is None:
        return {}
    wide = 2 if any(x.dtype.itemsize == 8 for x in ids) else 1
    forms = zip(("q_ids", "kv_ids"), ids, (rows, keys), strict=True)
    return {name: lengthened(words(x, wide), extent) for name, x, extent in forms}


def lengthened(ids: jax.Array, extent: int) -> jax.Array:
    """Segment ids, (batch, words, len), for so many rows. Rows beyond the end have the last id: they see no key that
    the last row does not, and what a key holds that no query sees, NaN perhaps, reaches no gradient by way of them."""
    lacking = extent - ids.shape[2]
    return (
        jnp.pad(ids, [(0, 0), (0, 0), (0, lacking)], "edge") if lacking and ids.shape[2] else extended(ids, 2, extent)
    )
