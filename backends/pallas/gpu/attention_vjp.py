"""Gradients of attention on Hopper, the scores recomputed tile by tile from q, k and lse and never stored.

    t = tanh(scale q k^T / c), s = c t + bias, P = exp(s - lse);  without a softcap s = scale q k^T + bias
    Delta = rowsum(d_o * o) - d_lse;  dS = P (d_o v^T - Delta);  D = dS (1 - t^2), without a softcap dS
    d_q = scale D k;  d_k = scale D^T q;  d_v = P^T d_o

q: (batch, q_len, kv_heads*group, d), k: (batch, kv_len, kv_heads, d), v: (batch, kv_len, kv_heads, dv),
o and d_o: (batch, q_len, kv_heads*group, dv), lse and d_lse: (batch, kv_heads*group, q_len). Heads are up to 256 wide.
d_k and d_v are summed over the group.

A first kernel sums Delta (`_rows`). Then one kernel runs twice, on two sides in turn: the rows of one side are a
block's own, 64 to a warpgroup, and stay in shared memory; tiles of the other side come by through a ring of buffers, as
one more warpgroup brings them. For d_q queries are at home and keys come by; for d_k and d_v keys are at home, and the
queries of all heads of their group come by, one head after the other. What a block sums up is its alone, in float32
registers, in an order that never changes: nothing is added atomically. Tiles of scores have a row for each row at home,
so that D and P, rounded, are the left factor of the next product as they stand. Where registers do not hold d_k and d_v
beside each other, the kernel runs once for each.

block_q, block_kv: the queries and the keys of a tile that comes by; stages: buffers for them.

Source: Dao, "FlashAttention-2" (2023), algorithm 2; Shah et al., "FlashAttention-3" (2024), section 3.1, for the
warpgroups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from math import e, log2
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas._band import Band, both
from portakern.backends.pallas.common import Refs, padded, quotient
from portakern.backends.pallas.gpu import _rows
from portakern.backends.pallas.gpu._chip import (
    Swizzled,
    aligned,
    dtype_refused,
    finished,
    in_registers,
    in_slots,
    issue_product,
    launch,
    over_shared,
    padded_rows,
    products_refused,
    whole_pieces,
)
from portakern.backends.pallas.gpu._flash import (
    COLUMN,
    CONSUMER_REGISTERS,
    COUNTED,
    PART,
    PRODUCER_REGISTERS,
    ROW,
    TILE,
    anew,
    bring,
    heaviest_first,
    part_of,
)
from portakern.backends.pallas.gpu._rows import Formula, Walk, Weights
from portakern.backends.pallas.gpu.attention import WIDEST, extended, tanh
from portakern.backends.pallas.tpu._heads import words
from portakern.core.call import Call
from portakern.spec import Count
from portakern.specs._exponents import LARGEST
from portakern.specs.attention import scale_of, score_unit

KNOBS = {"stages": Count(1, 8)}
"""One stage will do: a tile is done with before the next is waited for."""

CONSUMERS, ROWS = 2, 64
"""Warpgroups that compute, and rows at home of each: those of one instruction of the tensor cores."""

HELD = 224
"""Registers of a consumer's thread for sums, scores and weights: the others hold what it needs besides."""

NUMBERS = "lse", "delta"
"""What a query brings along."""

UNSEEN = -(2**31)
"""The bits of -0."""

Place = tuple[Any, "Tile", Any, Any, bool]
"""Where a tile of scores is: its warpgroup, the rows at home, the head and the tile of guests; and whether the band may
cut through it."""

Fold = Callable[[bool, Any, tuple[Any, ...]], tuple[Any, ...]]
"""Sums with what a turn adds, which the band may cut through."""

Multiply = Callable[[str, Any], int]
"""Issues the products of a gradient with a factor, and says how many they are."""

SLOTS = 2
"""Buffers for what a consumer writes: one is filled while the other is on its way."""


class Side(NamedTuple):
    """Queries or keys, as the kernel knows them: ``first`` meets the other side's in scores (q and k), ``second`` in dP
    (d_o and v). tile: rows that come by at a time. length: rows there are."""

    first: str
    second: str
    ids: str
    tile: int
    length: int


class Plan(NamedTuple):
    """How some gradients are cut.

    Attributes:
      wants: the gradients. home, guest: the sides. batch, heads: of the rows at home; group: query heads of a key head.
      by_query: whether queries are at home. d, dv, stages, dtype, interpret: as the call and the tiling have them.
      band: which guests a row at home sees, in tiles of ``ROWS`` and of guests.
      pre, softcap, unit: how scores come of dots (``score_unit``). scale: of d_q and d_k.
    """

    wants: tuple[str, ...]
    home: Side
    guest: Side
    batch: int
    heads: int
    group: int
    by_query: bool
    d: int
    dv: int
    stages: int
    band: Band
    pre: float | None
    softcap: float | None
    unit: float
    scale: float
    dtype: Any
    interpret: bool

    @property
    def beside(self) -> bool:
        """Whether weights are computed beside products. Products of narrower heads are too short for what it costs,
        and those of wider ones leave no registers."""
        return PART < max(self.d, self.dv) <= 2 * PART

    @property
    def parts(self) -> tuple[int, int]:
        """Buffers of a row: of ``first``, and of ``second``."""
        return pl.cdiv(self.d, PART), pl.cdiv(self.dv, PART)

    @property
    def tiles(self) -> int:
        """Tiles of rows at home, of one head."""
        return pl.cdiv(self.home.length, CONSUMERS * ROWS)

    @property
    def sums(self) -> dict[str, int]:
        """Parts of each gradient."""
        return {name: self.parts[name == "d_v"] for name in self.wants}

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        rows = (CONSUMERS * ROWS + self.stages * self.guest.tile) * sum(self.parts) + CONSUMERS * SLOTS * ROWS
        numbers = math.prod(self.numbers) * jnp.dtype(jnp.float32).itemsize
        return aligned(rows * PART * self.dtype.itemsize, numbers)

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The buffers of lse and Delta that come by beside queries. Queries at home have theirs in registers."""
        return (0 if self.by_query else self.stages), len(NUMBERS), self.guest.tile

    def inner(self, tile: Tile, together: int = 1) -> tuple[Any, Any]:
        """Turns of so many tiles of guests ``together``: the first of a head all of whose pairs see each other, and the
        first after those."""
        band, rows, size = self.band, CONSUMERS * ROWS, self.guest.tile
        turns, begin = lax.div(tile.span, jnp.int32(together)), jnp.int32(0)
        ends = [] if band.closed or not band.kv_len % size else [jnp.int32(band.kv_len // size)]
        if band.first is not None:
            from_ = quotient(jnp.maximum(band.first + tile.row + (rows - 1), 0) + (size - 1), size)
            begin = lax.div(jnp.maximum(from_ - tile.first, 0) + (together - 1), jnp.int32(together))
        if band.last is not None:
            ends.append(quotient(jnp.maximum(band.last + tile.row + 1, 0), size))
        end = turns
        for after in ends:
            end = jnp.minimum(end, lax.div(jnp.maximum(after - tile.first, 0), jnp.int32(together)))
        if band.rows and band.rows % rows:
            end = jnp.where(tile.row + rows <= band.rows, end, 0)
        begin = jnp.minimum(begin, turns)
        return begin, jnp.maximum(end, begin)

    @property
    def held(self) -> int:
        """Registers of a consumer's thread: sums, two tiles of numbers, and what is rounded of them."""
        return sum(self.sums.values()) * PART // 2 + self.guest.tile + self.guest.tile // 4 * len(self.wants)


class Delta(Formula):
    """The sum of o d_o, which is told of each row and no more."""

    writes = False
    empty = (0.0,)

    def of_chunk(self, x: Any, walk: Walk, start: Any, weights: Weights) -> tuple[Any, ...]:
        return (jnp.sum(walk.within(x[0] * x[1], 0.0, start), axis=1),)

    def result(self, statistics: tuple[Any, ...], x: Any, walk: Walk, weights: Weights) -> None:
        return None

    def told(self, statistics: tuple[Any, ...], walk: Walk) -> tuple[Any, ...]:
        return statistics


def plan_of(call: Call, tiling: Mapping[str, int], wants: tuple[str, ...]) -> Plan:
    dims, by_query = call.dims, wants == ("d_q",)
    queries = Side("q", "d_o", "q_ids", tiling["block_q"], dims["q_len"])
    keys = Side("k", "v", "kv_ids", tiling["block_kv"], dims["kv_len"])
    home, guest = (queries, keys) if by_query else (keys, queries)
    band = Band.of(call, ROWS, guest.tile)
    if not by_query:
        first, last = (None if bound is None else -bound for bound in (band.last, band.first))
        band = Band(first, last, dims["q_len"], ROWS, guest.tile)
    pre, unit = score_unit(call)
    return Plan(
        wants,
        home,
        guest,
        dims["batch"],
        dims["kv_heads"] * (dims["group"] if by_query else 1),
        dims["group"],
        by_query,
        dims["d"],
        dims["dv"],
        tiling["stages"],
        band,
        pre,
        call.options["softcap"],
        unit,
        scale_of(call),
        jnp.dtype(call.dtype),
        call.interpret,
    )


def plans(call: Call, tiling: Mapping[str, int]) -> list[Plan]:
    """One for each run of the kernel."""
    keys = tuple(name for name in ("d_k", "d_v") if name in call.wants)
    found = [plan_of(call, tiling, ("d_q",))] if "d_q" in call.wants else []
    if keys and plan_of(call, tiling, ("d_k", "d_v")).held > HELD:
        return found + [plan_of(call, tiling, (name,)) for name in keys]
    return found + [plan_of(call, tiling, keys)] if keys else found


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "d": max(call.dims["d"], call.dims["dv"])}


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    reason = products_refused(call) or dtype_refused(call)
    if reason:
        return reason
    widest = max(call.dims["d"], call.dims["dv"])
    if widest > WIDEST:
        return f"heads of {widest} are wider than the {WIDEST} elements that fit here: use the reference backend"
    if call.dims["q_len"] * call.dims["group"] + call.dims["kv_len"] >= 1 << COUNTED:
        return f"2^{COUNTED} queries of a group and keys, or more: steps are counted with fewer bits here"
    if "d_bias" in call.wants:
        return (
            "the gradient of a bias is not written yet for Hopper: leave bias out of what is differentiated, or use "
            "the reference backend"
        )
    if score_unit(call)[1] > LARGEST:
        return f"scale={scale_of(call):g} times log2(e) is beyond float32: multiply q by a part of it beforehand"
    for name in ("block_q", "block_kv"):
        if tiling[name] not in (64, 128):
            return f"{name}={tiling[name]} is no tile of wgmma's here: use one of 64, 128"
    for plan in plans(call, tiling):
        if plan.held > HELD:
            return (
                f"tiles of {plan.guest.tile} with heads of {call.dims['d']} and {call.dims['dv']} take {plan.held} "
                f"registers a thread for sums and scores, and {HELD} are free: use smaller block_q and block_kv"
            )
        reason = over_shared(plan.shared, "block_q, block_kv or stages", across_warps=False)
        if reason:
            return reason
    return None


def copies(call: Call, tiling: Mapping[str, int]) -> str | None:
    """What XLA copies besides, in words."""
    found = []
    for names, extent in (("q and k", call.dims["d"]), ("v and d_o", call.dims["dv"])):
        if (wide := whole_pieces(extent, call.dtype)) != extent:
            found.append(f"heads of {names} are padded from {extent} to {wide}, and of gradients cut again")
    if of_rows := _rows.copies(call, call.dims["dv"]):
        found.append(f"for Delta {of_rows}")
    if call.arrays["bias"] is not None:
        found.append("bias is padded to whole tiles" + (", and transposed for d_k and d_v" if _by_key(call) else ""))
    return "; ".join(found) or None


def _by_key(call: Call) -> bool:
    return "d_k" in call.wants or "d_v" in call.wants


def kernel(
    ref: Refs,
    *,
    plan: Plan,
    tile_of: Callable[[Tile], Tile] = lambda tile: tile,
    consumer_of: Callable[[Refs, Plan, Any, Tile], None] | None = None,
) -> None:
    """One tile of rows at home. ``tile_of``, ``consumer_of``: what another kernel makes of it, and does with it."""
    warpgroup = lax.axis_index("warpgroup")
    place, i = heaviest_first(lax.axis_index("block"), plan.batch * plan.heads, plan.tiles, plan.band)
    batch = quotient(place, plan.heads)
    tile = Tile.at(plan, batch, place - batch * plan.heads, i)
    tile = tile_of(tile._replace(span=ref.span[0]) if "span" in ref else tile)

    @pl.when(warpgroup == CONSUMERS)
    def producer() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce(ref, plan, tile)

    @pl.when(warpgroup < CONSUMERS)
    def consumer() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        (consumer_of or consume)(ref, plan, warpgroup, tile)
        plgpu.wait_smem_to_gmem(0)


class Tile(NamedTuple):
    """The rows at home of one head, from ``row`` on, and what comes by: ``span`` tiles of each of so many ``heads`` of
    guests, from ``guest`` on, which begin with the ``first``."""

    batch: Any
    head: Any
    row: Any
    guest: Any
    heads: int
    first: Any
    span: Any

    @classmethod
    def at(cls, plan: Plan, batch: Any, head: Any, i: Any) -> Tile:
        band = plan.band._replace(block_q=CONSUMERS * ROWS)
        first, last = band.span(i)
        guest, heads = (quotient(head, plan.group), 1) if plan.by_query else (head * plan.group, plan.group)
        return cls(batch, head, i * (CONSUMERS * ROWS), guest, heads, first, jnp.maximum(last - first + 1, 0))

    @property
    def steps(self) -> Any:
        return self.span * self.heads

    def place(self, step: Any) -> tuple[Any, Any]:
        """The head and the tile of guests of a step."""
        if self.heads == 1:
            return self.guest, self.first + step
        turn = lax.div(step, self.span)
        return self.guest + turn, self.first + step - turn * self.span


def produce(ref: Refs, plan: Plan, tile: Tile) -> None:
    """Bring the rows at home, then guests as buffers are free."""
    for c in range(CONSUMERS):
        rows = pl.ds(tile.row + c * ROWS, ROWS)
        for name, buffers in ((plan.home.first, ref.home_first), (plan.home.second, ref.home_second)):
            array = getattr(ref, name).at[tile.batch, rows, tile.head]
            bring(array, buffers.copied.at[c], ref.home_arrived.at[c])

    @pl.loop(0, tile.steps)
    def _(step: Any) -> None:
        buffer = lax.rem(step, jnp.int32(plan.stages))
        head, j = tile.place(step)
        pl.when(step >= plan.stages)(lambda: plgpu.barrier_wait(ref.free.at[buffer]))
        rows = pl.ds(j * plan.guest.tile, plan.guest.tile)
        for name, buffers in ((plan.guest.first, ref.guest_first), (plan.guest.second, ref.guest_second)):
            array = getattr(ref, name).at[tile.batch, rows, head]
            bring(array, buffers.copied.at[buffer], ref.arrived.at[buffer])
        for i, name in enumerate(() if plan.by_query else NUMBERS):
            there = getattr(ref, name).at[tile.batch, head, rows]
            plgpu.copy_gmem_to_smem(there, ref.numbers.at[buffer, i], (ref.arrived, ref.told)[i].at[buffer])

    @pl.loop(jnp.maximum(tile.steps - plan.stages, 0), tile.steps)
    def _(step: Any) -> None:  # every arrival at a barrier is waited for once
        plgpu.barrier_wait(ref.free.at[lax.rem(step, jnp.int32(plan.stages))])


def consume(ref: Refs, plan: Plan, warpgroup: Any, tile: Tile) -> None:
    """Sum up the gradients of this warpgroup's rows at home, and write them."""
    plgpu.barrier_wait(ref.home_arrived.at[warpgroup])
    zeros = tuple(_zeros(PART) for _ in range(sum(plan.sums.values())))
    rows = pl.ds(tile.row + warpgroup * ROWS, ROWS)
    numbers = tuple(
        plgpu.load(getattr(ref, name).at[tile.batch, tile.head, rows], layout=ROW, optimized=False)
        for name in (NUMBERS if plan.by_query else ())
    )
    sums = walk(plan, tile, partial(add, ref, plan, warpgroup, tile, numbers), zeros)
    write(ref, ref.written, plan, warpgroup, tile, sums)


def walk(plan: Plan, tile: Tile, fold: Fold, sums: tuple[Any, ...], together: int = 1) -> tuple[Any, ...]:
    """``fold(cut, turn, sums)`` over all guests, so many tiles ``together``: of each head those on borders of the band,
    those inside, where nothing has to be ``cut``, and those on borders."""
    turns, each = (lax.div(n, jnp.int32(together)) for n in (tile.steps, tile.span))
    if plan.band.inside(*map(jnp.int32, (0, 0))) is True:
        return lax.fori_loop(0, turns, partial(fold, False), sums)
    begin, end = plan.inner(tile, together)

    def of_head(head: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        base = head * each
        before = [(True, 0, begin)] if plan.band.first is not None else []
        for cut, low, high in [*before, (False, begin, end), (True, end, each)]:
            sums = lax.fori_loop(base + low, base + high, partial(fold, cut), sums)
        return sums

    return of_head(0, sums) if tile.heads == 1 else lax.fori_loop(0, tile.heads, of_head, sums)


def write(ref: Refs, buffers: Any, plan: Plan, warpgroup: Any, tile: Tile, sums: tuple[Any, ...]) -> None:
    """Send the gradients of this warpgroup's rows at home on their way, by way of ``buffers``."""
    rows = pl.ds(tile.row + warpgroup * ROWS, ROWS)
    places = [(name, part) for name, parts in plan.sums.items() for part in range(parts)]
    for (name, part), total, (slot, leaving) in zip(places, sums, in_slots(len(places), SLOTS), strict=True):
        plgpu.wait_smem_to_gmem(leaving, wait_read_only=True)
        total = total if name == "d_v" else total * plan.scale
        buffers.tiled[warpgroup, slot] = total.astype(plan.dtype)
        plgpu.commit_smem()
        out = getattr(ref, name)
        there = out.at[tile.batch, rows, tile.head, part_of(out, part)]
        plgpu.copy_smem_to_gmem(buffers.copied.at[warpgroup, slot], there)


def add(
    ref: Refs, plan: Plan, warpgroup: Any, tile: Tile, numbers: tuple[Any, ...], cut: bool, step: Any,
    sums: tuple[Any, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """The sums with what one tile of guests adds. numbers: lse and Delta of queries at home. cut: whether some pair may
    not see each other, by causality or a window, or as one lies beyond the end."""
    buffer = lax.rem(step, jnp.int32(plan.stages))
    place = warpgroup, tile, *tile.place(step), cut
    plgpu.barrier_wait(ref.arrived.at[buffer])
    dots = plan.parts if plan.wants != ("d_v",) else plan.parts[:1]
    homes, guests = (ref.home_first, ref.home_second), (ref.guest_first, ref.guest_second)
    here, there = anew(warpgroup, tile.row + step), anew(buffer, tile.row + step)

    def work(accumulators: Any, others: Any) -> None:
        found, left = accumulators[: len(dots)], iter(accumulators[len(dots) :])
        totals = {name: list(itertools.islice(left, parts)) for name, parts in plan.sums.items()}
        for acc, home, guest, parts in zip(found, homes, guests, dots, strict=False):
            for part in range(parts):
                issue_product(acc, home.tiled.at[here, part], guest.tiled.at[there, part], transposed=True)

        def multiply(name: str, factor: Any) -> int:
            rounded = factor.astype(plan.dtype)
            for part, acc in enumerate(totals[name]):
                issue_product(acc, rounded, guests[name == "d_v"].tiled.at[there, part])
            return len(totals[name])

        known = numbers if plan.by_query else tuple(partial(_number, ref, buffer, i) for i in range(len(NUMBERS)))
        (in_turns if plan.beside else at_once)(ref, plan, place, buffer, known, found, multiply)

    after, _ = in_registers(plan.interpret, work, (*[_zeros(plan.guest.tile)] * len(dots), *sums))
    if not plan.by_query:
        after_reading(plan.interpret)
    plgpu.barrier_arrive(ref.free.at[buffer])
    return tuple(after[len(dots) :])


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


def at_once(
    ref: Refs, plan: Plan, place: Place, buffer: Any, numbers: tuple[Any, ...], found: Any, multiply: Multiply
) -> None:
    """P and D of a tile when all its dots are there, then all products with them."""
    dots = [finished(acc, later=0) for acc in found]
    p, t = weights(ref, plan, place, numbers[0], dots[0])
    if not plan.by_query:
        plgpu.barrier_wait(ref.told.at[buffer])
    d_dot = [slopes(plan, numbers[1], p, t, d_p) for d_p in dots[1:]]
    p, *d_dot = kept(ref, plan, place, 0.0, p, *d_dot)
    for name in plan.wants:
        multiply(name, p if name == "d_v" else d_dot[0])


def in_turns(
    ref: Refs, plan: Plan, place: Place, buffer: Any, numbers: tuple[Any, ...], found: Any, multiply: Multiply
) -> None:
    """P beside the products dP, and D beside those with P. Pairs that do not see each other have a P of -0, which no
    exponential is: by that D knows them, whatever their dP holds."""
    p, t = weights(ref, plan, place, numbers[0], finished(found[0], later=sum(plan.parts[1 : len(found)])))
    (p,) = kept(ref, plan, place, -0.0, p)
    if not plan.by_query:
        plgpu.barrier_wait(ref.told.at[buffer])  # and a basic block ends, over which no wait for products moves
    later = multiply("d_v", p) if "d_v" in plan.wants else 0
    for acc in found[1:]:
        d_dot = slopes(plan, numbers[1], p, t, finished(acc, later=later))
        if place[-1] or "q_ids" in ref:
            d_dot = jnp.where(lax.bitcast_convert_type(p, jnp.int32) == UNSEEN, 0.0, d_dot)
        for name in plan.wants:
            if name != "d_v":
                multiply(name, d_dot)


def _number(ref: Refs, buffer: Any, i: int) -> Any:
    """lse or Delta of the queries that have come."""
    return plgpu.load(ref.numbers.at[buffer, i], layout=COLUMN, optimized=False)


def weights(ref: Refs, plan: Plan, place: Place, lse: Any, dots: Any) -> tuple[Any, Any]:
    """P of a tile of dots, whether or not pairs see each other, and t where there is a softcap. Under a bias, which may
    be all that numbers hold for a whole row, the difference comes before the factor by which both would overflow."""
    _, tile, head, _, _ = place
    x = dots if plan.pre is None else dots * plan.pre
    t = None if plan.softcap is None else tanh(x)
    s = x if t is None else t
    if "bias" in ref:
        query_head = tile.head if plan.by_query else head
        bias = bias_of(ref, plan, tile, query_head, *_places(plan, place))
        s = (s if plan.softcap is None else s * plan.softcap) + bias
        return jnp.exp2((s - _beside(plan, lse, s.shape)) * log2(e)), t
    return jnp.exp2(s * (plan.unit * log2(e)) - _beside(plan, lse, s.shape)), t


def slopes(plan: Plan, delta: Any, p: Any, t: Any, d_p: Any) -> Any:
    """D of a tile of P and dP."""
    d_s = p * (d_p - _beside(plan, delta, p.shape))
    return d_s if t is None else d_s * (1.0 - t * t)


def _places(plan: Plan, place: Place) -> tuple[Any, Any]:
    """The rows at home, and the guests, of a tile."""
    warpgroup, tile, _, j, _ = place
    return pl.ds((quotient(tile.row, ROWS) + warpgroup) * ROWS, ROWS), pl.ds(j * plan.guest.tile, plan.guest.tile)


def _beside(plan: Plan, number: Any, shape: tuple[int, int]) -> Any:
    """A number of each query, beside a tile."""
    return lax.broadcast_in_dim(number() if callable(number) else number, shape, (0 if plan.by_query else 1,))


def kept(ref: Refs, plan: Plan, place: Place, unseen: float, *tiles: Any) -> tuple[Any, ...]:
    """Tiles of numbers with ``unseen`` for pairs that do not see each other, whatever they hold."""
    warpgroup, tile, _, j, cut = place
    if "q_ids" in ref:
        same = same_segment(ref, plan, tile, *_places(plan, place), tiles[0].shape)
        tiles = tuple(jnp.where(same, x, unseen) for x in tiles)
    if not cut:
        return tiles
    seen = plan.band.allowed(quotient(tile.row, ROWS) + warpgroup, j)
    return tuple(jnp.where(seen, x, unseen) for x in tiles)


def bias_of(ref: Refs, plan: Plan, tile: Tile, head: Any, rows: Any, guests: Any) -> Any:
    """The bias of a tile of scores, whose rows are those at home. Along an axis of extent 1 all share it."""
    batches, heads = ref.bias.shape[:2]
    here = ref.bias.at[tile.batch if batches > 1 else 0, head if heads > 1 else 0]
    shape, queries = (ROWS, plan.guest.tile), ref.bias.shape[2 if plan.by_query else 3]
    if queries > 1:
        return plgpu.load(here.at[rows, guests], layout=TILE, optimized=False).astype(jnp.float32)
    place, layout, axis = (here.at[0, guests], COLUMN, 1) if plan.by_query else (here.at[rows, 0], ROW, 0)
    return lax.broadcast_in_dim(plgpu.load(place, layout=layout, optimized=False).astype(jnp.float32), shape, (axis,))


def same_segment(ref: Refs, plan: Plan, tile: Tile, rows: Any, guests: Any, shape: tuple[int, int]) -> Any:
    """Which pairs of a tile share a segment: every 32-bit word of their ids is equal."""
    at_home, coming = getattr(ref, plan.home.ids), getattr(ref, plan.guest.ids)

    def equal(word: int) -> Any:
        of_rows = plgpu.load(at_home.at[tile.batch, word, rows], layout=ROW, optimized=False)
        of_guests = plgpu.load(coming.at[tile.batch, word, guests], layout=COLUMN, optimized=False)
        return lax.broadcast_in_dim(of_rows, shape, (0,)) == lax.broadcast_in_dim(of_guests, shape, (1,))

    return both(*(equal(word) for word in range(at_home.shape[1])))


def _zeros(columns: int) -> Any:
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), TILE)


def statistics(call: Call) -> dict[str, jax.Array]:
    """lse, as an exponent of 2 where there is no bias, and Delta of every query, (batch, heads, q_len or more). lse is
    inf for queries that saw no key, and for those that are not there: their P is 0."""
    batch, q_len, heads, dv = call.arrays["o"].shape
    of_rows = [call.arrays[name].reshape(-1, dv) for name in ("o", "d_o")]
    tiling = _rows.default_tiling(dv, call.dtype, arrays=2)
    _, told = _rows.launched(call, tiling, of_rows, Delta(), {}, told=1)
    assert told is not None
    delta = jnp.swapaxes(told[0, : batch * q_len * heads].reshape(batch, q_len, heads), 1, 2)
    if call.arrays["d_lse"] is not None:
        delta = delta - call.arrays["d_lse"]
    lse = call.arrays["lse"]
    unseen = lse == -jnp.inf
    whole = padded(q_len, CONSUMERS * ROWS)
    lse = jnp.pad(
        jnp.where(unseen, jnp.inf, lse * (log2(e) if call.arrays["bias"] is None else 1.0)),
        [(0, 0), (0, 0), (0, whole - q_len)],
        constant_values=jnp.inf,
    )
    return {"lse": lse, "delta": extended(jnp.where(unseen, 0.0, delta), 2, whole)}


def masks(call: Call, plan: Plan) -> dict[str, jax.Array]:
    """Bias and segment ids, (batch, words, len), as the kernel reads them: in whole tiles, rows at home first. And how
    many tiles of guests come by, where all see all: of a number of steps that compilers know they know too much
    (``anew``)."""
    rows, keys = (padded(call.dims[name], CONSUMERS * ROWS) for name in ("q_len", "kv_len"))
    found, by_query = {}, plan.by_query
    if plan.band.first is None and plan.band.last is None:
        found["span"] = jnp.full((1,), pl.cdiv(plan.guest.length, plan.guest.tile), jnp.int32)
    bias = call.arrays["bias"]
    if bias is not None:
        bias = extended(extended(bias, 2, rows) if bias.shape[2] > 1 else bias, 3, keys)
        found["bias"] = bias if by_query else jnp.swapaxes(bias, 2, 3)
    ids = [call.arrays[f"{side}_segment_ids"] for side in ("q", "kv")]
    if ids[0] is not None:
        wide = 2 if any(x.dtype.itemsize == 8 for x in ids) else 1
        forms = zip(("q_ids", "kv_ids"), ids, (rows, keys), strict=True)
        found |= {name: extended(words(x, wide), 2, extent) for name, x, extent in forms}
    return found


@BACKEND.implements("attention_vjp", key=key, supports=supports, knobs=KNOBS, copies=copies)
def attention_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    inputs = {name: padded_rows(call.arrays[name]) for name in ("q", "k", "v", "d_o")} | statistics(call)
    found: dict[str, jax.Array] = {}
    for plan in plans(call, tiling):
        found |= gradients(call, plan, inputs | masks(call, plan))
    return tuple(found.get(output.name) for output in call.spec.outputs)


def gradients(call: Call, plan: Plan, inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The gradients of one plan, by name."""
    (of_first, of_second), dtype = plan.parts, plan.dtype
    extents = {name: plan.dv if name == "d_v" else plan.d for name in plan.wants}
    outputs = {
        name: jax.ShapeDtypeStruct((plan.batch, plan.home.length, plan.heads, whole_pieces(extent, dtype)), dtype)
        for name, extent in extents.items()
    }
    rows, arrivals, numbers = plan.guest.tile, of_first + of_second, {}
    if not plan.by_query:
        arrivals, numbers = (
            arrivals + 1,
            {
                "numbers": plgpu.SMEM(plan.numbers, jnp.float32),
                "told": plgpu.Barrier(num_arrivals=1, num_barriers=plan.stages),
            },
        )
    found = launch(
        call,
        partial(kernel, plan=plan),
        "_".join((call.spec.name, *plan.wants)),
        (plan.batch * plan.heads * plan.tiles,),
        inputs=inputs,
        outputs=outputs,
        scratch={
            "home_first": Swizzled((CONSUMERS, of_first, ROWS, PART), dtype),
            "home_second": Swizzled((CONSUMERS, of_second, ROWS, PART), dtype),
            "guest_first": Swizzled((plan.stages, of_first, rows, PART), dtype),
            "guest_second": Swizzled((plan.stages, of_second, rows, PART), dtype),
            "written": Swizzled((CONSUMERS, SLOTS, ROWS, PART), dtype),
            **numbers,
            "home_arrived": plgpu.Barrier(num_arrivals=of_first + of_second, num_barriers=CONSUMERS),
            "arrived": plgpu.Barrier(num_arrivals=arrivals, num_barriers=plan.stages),
            "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=plan.stages),
        },
        warpgroups=CONSUMERS + 1,
        approximate=True,
        across_warps=False,
    )
    return {name: found[name][..., :extent] for name, extent in extents.items()}
