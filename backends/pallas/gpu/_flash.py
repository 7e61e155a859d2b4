"""The kernel of attention on Hopper: a warpgroup that copies, and warpgroups that compute.

The producer has the copy engine bring queries, keys and values. Each consumer owns 64 queries. Scores of keys i and
products with values i - 1 are issued to the tensor cores together, and the softmax of the scores runs beside the
products; two consumers take turns to issue, so that the softmax of one runs beside the products of the other:

    consumer 0   S0        S1 P0        S2 P1     ...   P(n-1)
    softmax 0       ------       ------
    consumer 1        S0        S1 P0        S2 P1      ...
    softmax 1            ------       ------

A tile that is masked for a query leaves the query's state as it is to the bit, and tiles of keys begin at multiples of
``block_kv`` whatever is masked: so no bit of a query depends on its neighbours, nor on how many there are.

Every buffer holds 64 elements of a head, 128 bytes, a row: a head is as many buffers side by side (``parts``), of which
the last may reach beyond its end. The copy engine leaves 0 there, as it does beyond the last query and key.

Source: Shah et al., "FlashAttention-3" (2024), algorithms 1 and 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from math import e, log2
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas._band import Band
from portakern.backends.pallas.common import Refs, quotient
from portakern.backends.pallas.gpu._chip import HOPPER, finished, in_registers, issue_product, over_shared

QUERIES = 64
"""Queries of a consumer: the rows of one instruction of the tensor cores."""

PART = 64
"""Elements of a head in a buffer's row."""

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Registers that a thread keeps: of 65536, what the producer gives up goes to two consumers."""

LSE_BYTES = 1024
"""Shared memory for what is written of lse, and to align it."""

TOGETHER = 8
"""Heads whose tiles are taken by turns where the last queries see most keys: their keys stay in the L2 cache."""

TILE, ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
"""Where the tensor cores leave the elements of a tile, and where its rows' numbers lie beside it."""


class Scores(NamedTuple):
    """How scores come of dots: what multiplies a dot first, the softcap, and the unit in which the scores then stand
    (``score_unit`` of the spec says why)."""

    pre: float | None
    softcap: float | None
    unit: float

    def from_dots(self, s: Any) -> Any:
        s = s if self.pre is None else s * self.pre
        return s if self.softcap is None else tanh(s)

    def weight(self, difference: Any) -> Any:
        """exp of a difference of scores. It is scaled after it was taken."""
        return jnp.exp2(difference * (self.unit * log2(e)))


class Tile(NamedTuple):
    """``QUERIES`` queries a consumer of one head, from ``row`` on, and the tiles of keys that they see."""

    batch: Any
    head: Any
    row: Any
    first: Any
    steps: Any


class Plan(NamedTuple):
    """How one attention is cut.

    Attributes:
      batch, heads, group, q_len, d, dv: extents; heads are those of q.
      consumers: warpgroups that compute; block_kv: keys of a tile; stages: buffers of keys, and of values.
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
    band: Band
    scores: Scores
    dtype: Any
    interpret: bool

    @property
    def parts(self) -> tuple[int, int]:
        """Buffers of a head of keys, and of values."""
        return pl.cdiv(self.d, PART), pl.cdiv(self.dv, PART)

    @property
    def tiles_q(self) -> int:
        return pl.cdiv(self.q_len, QUERIES * self.consumers)

    @property
    def tiles(self) -> int:
        return self.batch * self.heads * self.tiles_q

    @property
    def blocks(self) -> int:
        """Blocks of the grid: tiles that are alike are dealt out beforehand, and of others a multiprocessor takes the
        next when it is done."""
        alike = self.band.first is None and self.band.last is None
        return min(self.tiles, HOPPER.cores or 1) if alike else self.tiles

    @property
    def slots(self) -> int:
        """Buffers for what a consumer writes: one is filled while the other is on its way, where there is room."""
        return 2 if over_shared(self._shared(2), "") is None else 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self._shared(self.slots)

    def _shared(self, slots: int) -> int:
        of_keys, of_values = self.parts
        rows = self.consumers * QUERIES * (of_keys + slots) + self.stages * self.block_kv * (of_keys + of_values)
        return rows * PART * self.dtype.itemsize + LSE_BYTES

    def tile(self, index: Any) -> Tile:
        """The tile of this index. Where the last queries see most keys, their tiles come first."""
        if self.band.last is None:
            place, i = quotient(index, self.tiles_q), lax.rem(index, jnp.int32(self.tiles_q))
        else:
            section = quotient(index, TOGETHER * self.tiles_q)
            rest = index - section * (TOGETHER * self.tiles_q)
            width = jnp.minimum(self.batch * self.heads - section * TOGETHER, TOGETHER)
            down = lax.div(rest, width)
            place, i = section * TOGETHER + rest - down * width, self.tiles_q - 1 - down
        first, last = self.band.span(i)
        first = jnp.clip(first, 0, (self.band.kv_len - 1) // self.block_kv)  # never none: a tile that all are masked from
        steps = jnp.maximum(last - first, 0) + 1
        batch = quotient(place, self.heads)
        return Tile(batch, place - batch * self.heads, i * (QUERIES * self.consumers), first, steps)


def kernel(ref: Refs, *, plan: Plan) -> None:
    warpgroup = lax.axis_index("warpgroup")

    def each_tile(work: Callable[..., None]) -> None:
        """Call ``work(tile, before)`` for the tiles of this block; ``before``: tiles of keys until then."""

        @plgpu.nd_loop((plan.tiles,), collective_axes="block", init_carry=jnp.int32(0))
        def _(info: plgpu.NDLoopInfo, carry: Any) -> Any:
            tile = plan.tile(info.index[0])
            work(tile, carry)
            return carry + tile.steps

    @pl.when(warpgroup == plan.consumers)
    def producer() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        each_tile(partial(produce, ref, plan))
        for free in (ref.q_free, ref.k_free, ref.v_free):  # every arrival at a barrier is waited for once
            for buffer in range(free.shape[0]):
                plgpu.barrier_wait(free.at[buffer])

    @pl.when(warpgroup < plan.consumers)
    def consumer() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        plgpu.barrier_arrive(ref.q_free.at[warpgroup])
        for buffer in range(plan.stages):
            plgpu.barrier_arrive(ref.k_free.at[buffer])
            plgpu.barrier_arrive(ref.v_free.at[buffer])
        if plan.consumers == 2:
            pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(ref.turn.at[0]))
        each_tile(partial(consume, ref, plan, warpgroup))
        if plan.consumers == 2:
            pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(ref.turn.at[0]))
        plgpu.wait_smem_to_gmem(0)


def produce(ref: Refs, plan: Plan, tile: Tile, before: Any) -> None:
    """Bring what one tile is made of, in the order in which it is used: values follow the next keys."""
    kv_head = quotient(tile.head, plan.group)

    def keys(step: Any) -> None:
        rows = pl.ds((tile.first + step) * plan.block_kv, plan.block_kv)
        buffer = lax.rem(before + step, jnp.int32(plan.stages))
        _bring(ref.k.at[tile.batch, rows, kv_head], ref.keys.copied.at[buffer], ref.k_free, ref.k_arrived, buffer)

    def values(step: Any) -> None:
        rows = pl.ds((tile.first + step) * plan.block_kv, plan.block_kv)
        buffer = lax.rem(before + step, jnp.int32(plan.stages))
        _bring(ref.v.at[tile.batch, rows, kv_head], ref.values.copied.at[buffer], ref.v_free, ref.v_arrived, buffer)

    keys(jnp.int32(0))
    for c in range(plan.consumers):
        rows = pl.ds(tile.row + c * QUERIES, QUERIES)
        _bring(ref.q.at[tile.batch, rows, tile.head], ref.queries.copied.at[c], ref.q_free, ref.q_arrived, c)

    @pl.loop(1, tile.steps)
    def _(step: Any) -> None:
        keys(step)
        values(step - 1)

    values(tile.steps - 1)


def _bring(array: Any, buffer: Any, free: Any, arrived: Any, index: Any) -> None:
    """Start rows of a head, (rows, d), on their way to a buffer, (parts, rows, 64), when that is free."""
    plgpu.barrier_wait(free.at[index])
    for part in range(buffer.shape[0]):
        plgpu.copy_gmem_to_smem(array.at[:, _part(array, part)], buffer.at[part], arrived.at[index])


def consume(ref: Refs, plan: Plan, warpgroup: Any, tile: Tile, before: Any) -> None:
    """Compute this warpgroup's queries of one tile, and write them."""
    plgpu.barrier_wait(ref.q_arrived.at[warpgroup])
    acc, l, m, p = first_keys(ref, plan, warpgroup, tile, before)
    acc, l, m, p = lax.fori_loop(
        1, tile.steps, partial(more_keys, ref, plan, warpgroup, tile, before), (acc, l, m, p)
    )
    plgpu.barrier_arrive(ref.q_free.at[warpgroup])
    acc = last_values(ref, plan, lax.rem(before + tile.steps - 1, jnp.int32(plan.stages)), acc, p)
    write(ref, plan, warpgroup, tile, acc, l, m)


def first_keys(ref: Refs, plan: Plan, warpgroup: Any, tile: Tile, before: Any) -> tuple[Any, ...]:
    """The state (acc, l, m, p) after the first keys. Their values wait for the next: acc is 0, and p their weights."""
    buffer = lax.rem(before, jnp.int32(plan.stages))
    plgpu.barrier_wait(ref.k_arrived.at[buffer])

    def work(accumulators: Any, others: Any) -> None:
        in_turn(ref, plan, warpgroup, lambda: multiply_keys(ref, plan, warpgroup, buffer, accumulators[0]))

    (s,), _ = in_registers(plan.interpret, work, (_zeros(plan.block_kv),))
    plgpu.barrier_arrive(ref.k_free.at[buffer])
    s = seen(plan, warpgroup, tile, jnp.int32(0), s)
    m, _, p = online(plan, s, plgpu.layout_cast(jnp.full((QUERIES,), -jnp.inf, jnp.float32), ROW))
    plgpu.barrier_wait(ref.v_arrived.at[buffer])
    acc = tuple(_zeros(PART) for _ in range(plan.parts[1]))
    return acc, jnp.sum(p, axis=1), m, p.astype(plan.dtype)


def more_keys(
    ref: Refs, plan: Plan, warpgroup: Any, tile: Tile, before: Any, step: Any, state: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The state with one tile of keys more, and with the values of the one before."""
    acc, l, m, p = state
    buffer, last = (lax.rem(before + i, jnp.int32(plan.stages)) for i in (step, step - 1))
    plgpu.barrier_wait(ref.k_arrived.at[buffer])

    def work(accumulators: Any, others: Any) -> None:
        (dots, *products), (l, m, alpha, weights) = accumulators, others

        def issue() -> None:
            multiply_keys(ref, plan, warpgroup, buffer, dots)
            multiply_values(ref, plan, last, weights[...], products)

        in_turn(ref, plan, warpgroup, issue)
        s = finished(dots, later=len(products))
        plgpu.barrier_arrive(ref.k_free.at[buffer])
        s = seen(plan, warpgroup, tile, step, s)
        m[...], alpha[...], p = online(plan, s, m[...])
        l[...] = l[...] * alpha[...] + jnp.sum(p, axis=1)
        weights[...] = p.astype(plan.dtype)
        # The assembler moves the wait for the products before the softmax, unless a basic block ends between the two:
        # this wait ends one.
        plgpu.barrier_wait(ref.v_arrived.at[buffer])

    (_, *acc), (l, m, alpha, p) = in_registers(plan.interpret, work, (_zeros(plan.block_kv), *acc), (l, m, m, p))
    plgpu.barrier_arrive(ref.v_free.at[last])
    return tuple(part * lax.broadcast_in_dim(alpha, part.shape, (0,)) for part in acc), l, m, p


def last_values(ref: Refs, plan: Plan, buffer: Any, acc: tuple[Any, ...], p: Any) -> tuple[Any, ...]:
    """acc with the values of the last keys."""
    acc, _ = in_registers(plan.interpret, lambda parts, _: multiply_values(ref, plan, buffer, p, parts), acc)
    plgpu.barrier_arrive(ref.v_free.at[buffer])
    return acc


def multiply_keys(ref: Refs, plan: Plan, warpgroup: Any, buffer: Any, dots: Any) -> None:
    """Issue dots += q k^T."""
    for part in range(plan.parts[0]):
        queries, keys = ref.queries.tiled.at[warpgroup, part], ref.keys.tiled.at[buffer, part]
        issue_product(dots, queries, keys, transposed=True)


def multiply_values(ref: Refs, plan: Plan, buffer: Any, p: Any, products: Any) -> None:
    """Issue products += p v."""
    for part, acc in enumerate(products):
        issue_product(acc, p, ref.values.tiled.at[buffer, part])


def in_turn(ref: Refs, plan: Plan, warpgroup: Any, issue: Callable[[], None]) -> None:
    """Issue products when it is this consumer's turn."""
    if plan.consumers == 2:
        plgpu.barrier_wait(ref.turn.at[warpgroup])
    issue()
    if plan.consumers == 2:
        plgpu.barrier_arrive(ref.turn.at[1 - warpgroup])


def seen(plan: Plan, warpgroup: Any, tile: Tile, step: Any, s: Any) -> Any:
    """Scores from dots: -inf where a query does not see a key."""
    s = plan.scores.from_dots(s)
    mine = plan.band._replace(block_q=QUERIES)
    i, j = quotient(tile.row, QUERIES) + warpgroup, tile.first + step
    inside = mine.inside(i, j)
    if inside is True:
        return s
    return lax.cond(inside, lambda s: s, lambda s: jnp.where(mine.allowed(i, j), s, -jnp.inf), s)


def online(plan: Plan, s: Any, m_old: Any) -> tuple[Any, Any, Any]:
    """One step of the online softmax: the maximum m with the scores s, what the sums until now shrink by, and the
    weights exp(s - m). A row that has seen no key so far has weights of 0, and not the NaN of inf - inf."""
    m = jnp.maximum(m_old, jnp.max(s, axis=1))
    origin = jnp.where(m == -jnp.inf, 0.0, m)
    p = plan.scores.weight(s - lax.broadcast_in_dim(origin, s.shape, (0,)))
    return m, plan.scores.weight(m_old - origin), p


def write(ref: Refs, plan: Plan, warpgroup: Any, tile: Tile, acc: tuple[Any, ...], l: Any, m: Any) -> None:
    """o = acc / l and lse = m + log l. A row that saw no key has l = 0: zeros, and -inf."""
    rows = pl.ds(tile.row + warpgroup * QUERIES, QUERIES)
    if "lse" in ref:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ref.lse_rows[warpgroup] = m * plan.scores.unit + jnp.log(l)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ref.lse_rows.at[warpgroup], ref.lse.at[tile.batch, tile.head, rows])
    inverse = 1.0 / jnp.where(l == 0.0, 1.0, l)
    for part, slot in zip(range(len(acc)), itertools.cycle(range(plan.slots)), strict=False):
        plgpu.wait_smem_to_gmem(plan.slots - 1, wait_read_only=True)
        o = acc[part] * lax.broadcast_in_dim(inverse, acc[part].shape, (0,))
        ref.written.tiled[warpgroup, slot] = o.astype(plan.dtype)
        plgpu.commit_smem()
        there = ref.o.at[tile.batch, rows, tile.head, _part(ref.o, part)]
        plgpu.copy_smem_to_gmem(ref.written.copied.at[warpgroup, slot], there)


def tanh(x: Any) -> Any:
    """Within a few units in the last place; the chip's own instruction has 11 bits. Lambert's continued fraction, cut
    at the seventh term, up to 1/2, and (1 - e) / (1 + e) with e = exp(-2 |x|) beyond, where 1 - e does not cancel."""
    x2 = x * x
    num = 135135.0 + x2 * (17325.0 + x2 * (378.0 + x2))
    den = 135135.0 + x2 * (62370.0 + x2 * (3150.0 + x2 * 28.0))
    far = jnp.exp2(jnp.abs(x) * (-2.0 * log2(e)))
    large = (1.0 - far) / (1.0 + far)
    return jnp.where(jnp.abs(x) < 0.5, x * (num / den), jnp.where(x < 0.0, -large, large))


def _part(array: Any, part: int) -> Any:
    """Where a part of a head lies in an array. The last may reach beyond the end, for which a start has to be traced:
    one that is known is held to the extent."""
    start = part * PART
    return pl.ds(start if start + PART <= array.shape[-1] else start + 0 * lax.axis_index("block"), PART)


def _zeros(columns: int) -> Any:
    return plgpu.layout_cast(jnp.zeros((QUERIES, columns), jnp.float32), TILE)
