"""Gradients of attention on Hopper in one pass over the scores, with d_q added up in memory:

    t = tanh(scale q k^T / c), s = c t + bias, P = exp(min(s - lse, 0));  without a softcap s = scale q k^T + bias
    Delta = rowsum(d_o * o) - d_lse;  dS = P (d_o v^T - Delta);  D = dS (1 - t^2), without a softcap dS
    d_q = scale D k;  d_k = scale D^T q;  d_v = P^T d_o

q: (batch, q_len, kv_heads*group, d), k: (batch, kv_len, kv_heads, d), v: (batch, kv_len, kv_heads, dv),
o and d_o: (batch, q_len, kv_heads*group, dv), lse, lse_low and d_lse: (batch, kv_heads*group, q_len). Heads are up
to 128 wide.

``gpu/attention_vjp.py`` runs one kernel twice, and so computes the scores and d_o v^T twice: seven products. Here the
run for d_k and d_v, with 128 resident keys and queries that come by, computes d_q besides: five products. What these
keys add to a tile's d_q is added to sums in memory, in float32, by the copy engine. As many blocks add to a d_q as
there are tiles of keys that its query sees, in the order in which they come: **its last bits may change from one run to
the next**. d_k and d_v have one owner and one order, as there.

A consumer has D^T of its 64 keys in registers. d_q wants that of all 128 keys as one left operand, since each addition
to memory that is spared is worth more than a barrier: so both consumers put theirs into shared memory, in one of two
buffers in alternation, and each computes half of the tile's d_q. Of heads of 65 to 128 a tile is 64 queries, of which a
consumer has 64 columns; of narrower heads it is two tiles of 64 queries that came by, of which each has one. A buffer
is written anew when both have put the tile in between into the other one, hence are done with products of this one.

block_q: 64, the queries that come by together; block_kv: 64, the keys of a consumer; stages: buffers for queries; last:
1, the products with d_k come after those with d_q, and d_q leaves beside them; 0, before them, while the other consumer
shows its D. Tiles all of whose pairs see each other have a loop of their own, without a mask. P and D of a tile are
computed when all its dots are there, and d_q in the same iteration: walks in which they run beside products, or in
which d_q waits for the next tile, are slower (docs/porting/attention.md).

Source: Dao, "FlashAttention-2" (2023), algorithm 2, with its additions to d_q; Shah et al., "FlashAttention-3" (2024),
section 3.1, for the warpgroups.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import FlashGradientsConfig, UnorderedGradientsConfig
from portakern.backends.pallas.lib.band import both
from portakern.backends.pallas.lib.blocks import Refs, padded, positions, quotient
from portakern.backends.pallas.lib.mosaic_gpu import attention_vjp as ordered
from portakern.backends.pallas.lib.mosaic_gpu.accumulators import finished, in_registers
from portakern.backends.pallas.lib.mosaic_gpu.attention import key
from portakern.backends.pallas.lib.mosaic_gpu.bias_gradient import bias_gradient
from portakern.backends.pallas.lib.mosaic_gpu.chip import (
    aligned,
    issue_product,
    launch,
    over_shared,
    padded_rows,
    tiled_buffer,
    whole_pieces,
)
from portakern.backends.pallas.lib.mosaic_gpu.flash import COLUMN, anew, zeros, zeros_of
from portakern.backends.pallas.lib.mosaic_gpu.head_parts import PART, LeavingBuffers, all_full
from portakern.backends.pallas.lib.mosaic_gpu.pairs import (
    CONSUMERS,
    NUMBERS,
    ROWS,
    SLOTS,
    AttentionGradientPlan,
    ResidentTile,
    TilePosition,
    is_far,
    masks,
    plan_of,
    read_number,
    shares_segment,
    slopes,
    statistics,
    walk,
    weights,
)
from portakern.backends.pallas.unordered import _additions
from portakern.core.call import Call
from portakern.specs.attention import scale_of

WIDEST = 2 * PART  # head dimension
ALIGNED = 8  # queries: the sums that the copy engine adds to have whole groups of so many
ADDED = "many blocks add to it in memory, in the order in which they come"


WANTS = "d_k", "d_v"
"""The gradients that registers sum up."""


class Added(NamedTuple):
    """How d_q is added up, and how the run with resident keys, ``plan``, is cut.

    together: tiles of queries whose d_q two consumers compute. last: whether an iteration's products with d_k are its
    last.
    """

    plan: AttentionGradientPlan
    tiles_per_iteration: int
    last: bool

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the ordered kernel's, where what is written has the room of what is to be added, and
        two buffers of D."""
        leaving = CONSUMERS * ROWS * PART * jnp.dtype(jnp.float32).itemsize
        written = CONSUMERS * SLOTS * ROWS * PART * self.plan.dtype.itemsize
        shown = 2 * self.tiles_per_iteration * CONSUMERS * ROWS * PART * self.plan.dtype.itemsize
        numbers = aligned(4 * math.prod(self.numbers)) - aligned(4 * math.prod(self.plan.numbers))
        return self.plan.shared - written + max(leaving, written) + shown + numbers

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The buffers of ``NUMBERS``, and one of 0, 1, 2 ... for each consumer."""
        stages, of_query, rows = self.plan.numbers
        return stages + 1, of_query, rows

    @property
    def columns(self) -> int:
        """Of the sums."""
        return sum(self.plan.parts[0])

    def tile(self, tile: ResidentTile) -> ResidentTile:
        """The same tile of keys, and whole groups of tiles of queries that are computed ``together``."""
        if self.tiles_per_iteration == 1:
            return tile
        first = lax.div(jnp.int32(tile.first), jnp.int32(self.tiles_per_iteration))
        after = lax.div(
            jnp.int32(tile.first + tile.span + (self.tiles_per_iteration - 1)), jnp.int32(self.tiles_per_iteration)
        )
        span = jnp.where(tile.span > 0, after - first, 0)
        return tile._replace(first=first * self.tiles_per_iteration, span=span * self.tiles_per_iteration)


def added(call: Call, config: UnorderedGradientsConfig) -> Added:
    plan = plan_of(call, config, WANTS)
    plan = plan._replace(band=plan.band._replace(closed=True))  # queries that are not there have an lse of inf
    parts = all_full(plan.parts[0]), plan.parts[1]
    if len(parts[1]) > len(parts[0]):  # a tile's d_q is then two halves of columns all the same
        plan, parts = plan._replace(d=PART + 8), (all_full(parts[1]), parts[1])
    return Added(plan._replace(parts=parts), CONSUMERS // len(parts[0]), config.last)


def without_d_q(call: Call) -> Call:
    """The call for d_k and d_v alone."""
    return call.replace(wants=tuple(n for n in call.wants if n != "d_q") or WANTS)


def supports(call: Call, config: UnorderedGradientsConfig) -> str | None:
    widest = max(call.dims["d"], call.dims["dv"])
    if widest > WIDEST:
        return (
            f"heads of {widest} are wider than the {WIDEST} elements that fit here, where sums of d_k and d_v lie "
            "beside each other: leave variant= out"
        )
    if (config.block_q, config.block_kv) != (ROWS, ROWS):
        return f"block_q={config.block_q}, block_kv={config.block_kv}: a consumer's products here take 64 and 64"
    reason = ordered.supports(without_d_q(call), config)
    return reason or over_shared(added(call, config).shared, "stages", across_warps=False)


def copies(call: Call, config: UnorderedGradientsConfig) -> str | None:
    """What XLA copies besides, in words."""
    found = [] if (of_ordered := ordered.copies(without_d_q(call), config)) is None else [of_ordered]
    if "d_q" in call.wants:
        if (wide := added(call, config).plan.d) != call.dims["d"]:
            found.append(f"heads of q and k are padded from {call.dims['d']} to {wide}")
        found.append("d_q's sums, in float32, are set to 0 before the kernel, and scaled and rounded after it")
    return "; ".join(found) or None


def consume(ref: Refs, plan: AttentionGradientPlan, warpgroup: Any, tile: ResidentTile, *, how: Added) -> None:
    """Sum up d_k and d_v of this warpgroup's resident rows and write them, and add its half of each d_q to memory."""
    ref.numbers[plan.stages, warpgroup] = plgpu.broadcasted_iota(jnp.float32, (ROWS,), 0, layout=COLUMN)
    plgpu.commit_smem()
    for c in range(CONSUMERS):
        plgpu.barrier_wait(ref.resident_arrived.at[c])
    none = zeros_of(plan.leaving)
    sums = walk(
        plan, tile, partial(fold, ref, how, warpgroup, tile), none, is_far(ref, plan, tile), how.tiles_per_iteration
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    ordered.write(ref, ref.leaving, plan, warpgroup, tile, sums)


def fold(
    ref: Refs, how: Added, warpgroup: Any, tile: ResidentTile, cut: bool, iteration: Any, sums: tuple[Any, ...]
) -> tuple[Any, ...]:
    """(d_k, d_v) with the queries of an iteration, ``tiles_per_iteration`` tiles of them, whose d_q is added to
    memory."""
    shown = lax.rem(iteration, jnp.int32(2))
    arrive(ref, how, iteration, 0)  # before the accumulators are set to 0, which the first products then do

    def work(accumulators: Any, others: Any) -> None:
        dots, d_ps, *totals = accumulators
        for n in range(how.tiles_per_iteration):
            if n:
                arrive(ref, how, iteration, n)
                dots[...] = d_ps[...] = zeros(PART)
            d = fold_tile(ref, how, (warpgroup, tile, iteration, n, cut), dots, d_ps, totals)
            ref.shown[shown, n, warpgroup] = d
            if n == how.tiles_per_iteration - 1:
                plgpu.commit_smem()
                plgpu.barrier_arrive(ref.there.at[shown])
            if n < how.tiles_per_iteration - 1 or not how.last:
                key_gradients(ref, how, iteration, n, d, totals)
        plgpu.barrier_wait(ref.there.at[shown])
        dots[...] = zeros(PART)
        query_gradients(ref, how, warpgroup, tile, iteration, dots)
        if how.last:
            key_gradients(ref, how, iteration, how.tiles_per_iteration - 1, d, totals)
        d_q = finished(dots, later=len(how.plan.parts[0]) if how.last else 0)
        if not how.last:
            free(ref, how, iteration)
        leave(ref, how, warpgroup, tile, iteration, d_q)

    after, _ = in_registers(how.plan.interpret, work, (zeros(PART), zeros(PART), *sums))
    if how.last:
        free(ref, how, iteration)
    return tuple(after[2:])


def arrive(ref: Refs, how: Added, iteration: Any, n: int) -> None:
    """Wait for the queries of a tile."""
    buffer = lax.rem(iteration * how.tiles_per_iteration + n, jnp.int32(how.plan.stages))
    plgpu.barrier_wait(ref.arrived.at[buffer])
    plgpu.barrier_wait(ref.told.at[buffer])


def fold_tile(ref: Refs, how: Added, where: tuple[Any, ...], dots: Any, d_ps: Any, totals: list[Any]) -> Any:
    """D of a tile of queries; its products with d_v are issued."""
    warpgroup, tile, iteration, n, cut = where
    plan, step = how.plan, iteration * how.tiles_per_iteration + n
    buffer = lax.rem(step, jnp.int32(plan.stages))
    place = warpgroup, tile, *tile.head_and_tile(step), cut

    here = anew(warpgroup, tile.row + iteration)
    for keys, queries in zip(ref.resident_first, ref.streamed_first, strict=True):
        issue_product(dots, keys.tiled(here), queries.tiled(buffer), transposed=True)
    for values, d_o in zip(ref.resident_second, ref.streamed_second, strict=True):
        issue_product(d_ps, values.tiled(here), d_o.tiled(buffer), transposed=True)
    *lse, delta = (partial(read_number, ref, buffer, i) for i in range(len(NUMBERS)))
    p, t = weights(ref, plan, place, lse, finished(dots, later=0))
    d = slopes(plan, delta, p, t, finished(d_ps, later=0))
    p, d = kept(ref, how, place, p, d)
    for total, d_o in zip(totals[len(plan.parts[0]) :], ref.streamed_second, strict=True):
        issue_product(total, p.astype(plan.dtype), d_o.tiled(buffer))
    return d.astype(plan.dtype)


def key_gradients(ref: Refs, how: Added, iteration: Any, n: int, d: Any, totals: list[Any]) -> None:
    """Issue d_k += D^T q of a tile of queries."""
    buffer = lax.rem(iteration * how.tiles_per_iteration + n, jnp.int32(how.plan.stages))
    for total, queries in zip(totals, ref.streamed_first, strict=False):
        issue_product(total, d, queries.tiled(buffer))


def kept(ref: Refs, how: Added, position: TilePosition, *tiles: Any) -> tuple[Any, ...]:
    """Tiles of numbers with 0 for pairs that do not see each other, whatever they hold."""
    warpgroup, tile, _, j, masked = position
    plan, shape = how.plan, tiles[0].shape
    key = positions(shape, 0, (quotient(tile.row, ROWS) + warpgroup) * ROWS)
    rules = [key < plan.resident.length] if plan.resident.length % (CONSUMERS * ROWS) else []
    if "q_ids" in ref:
        rules.append(shares_segment(ref, plan, position))

    def cut(bounds: Sequence[tuple[int | None, Any]], *tiles: Any) -> tuple[Any, ...]:
        from_first = [(key - (j * ROWS - bound)).astype(jnp.float32) for bound, _ in bounds]
        more = [sees(x, columns(ref, how, warpgroup, shape)) for x, (_, sees) in zip(from_first, bounds, strict=True)]
        seen = both(*rules, *more)
        return tiles if seen is None else tuple(jnp.where(seen, x, 0.0) for x in tiles)

    edges = [(plan.band.first, operator.le), (plan.band.last, operator.ge)]
    edges = [(bound, sees) for bound, sees in edges if bound is not None]
    return cut(edges if masked else [], *tiles)


def columns(ref: Refs, how: Added, warpgroup: Any, shape: tuple[int, int]) -> Any:
    """The number of each column of a tile. It is read: what they know beforehand compilers keep in registers."""
    found = plgpu.load(ref.numbers.at[how.plan.stages, warpgroup], layout=COLUMN, optimized=False)
    return lax.broadcast_in_dim(found, shape, (1,))


def query_gradients(ref: Refs, how: Added, warpgroup: Any, tile: ResidentTile, iteration: Any, acc: Any) -> None:
    """Issue acc += this warpgroup's half of D k of an iteration: its columns, or its tile of queries."""
    n, part = (0, warpgroup) if how.tiles_per_iteration == 1 else (warpgroup, 0)
    keys = ref.resident_first[0]._replace(number=part)  # of parts of one width
    for c in range(CONSUMERS):
        shown = ref.shown.at[lax.rem(iteration, jnp.int32(2)), n, c].T
        issue_product(acc, shown, keys.tiled(anew(c, tile.row + iteration)))


def leave(ref: Refs, how: Added, warpgroup: Any, tile: ResidentTile, iteration: Any, d_q: Any) -> None:
    """Have this warpgroup's half of an iteration's d_q added to the sums; nobody waits for it."""
    n, part = (0, warpgroup) if how.tiles_per_iteration == 1 else (warpgroup, 0)
    head, j = tile.head_and_tile(iteration * how.tiles_per_iteration + n)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was in this buffer before has left
    ref.leaving.sums[0][warpgroup] = d_q
    plgpu.commit_smem()
    there = ref.sums.at[tile.batch, pl.ds(j * ROWS, ROWS), head, pl.ds(part * PART, PART)]
    plgpu.copy_smem_to_gmem(ref.leaving.sums[0].at[warpgroup], there, reduction_op="add")


def free(ref: Refs, how: Added, iteration: Any) -> None:
    """Hand the queries of an iteration back."""
    for n in range(how.tiles_per_iteration):
        plgpu.barrier_arrive(ref.free.at[lax.rem(iteration * how.tiles_per_iteration + n, jnp.int32(how.plan.stages))])


def kernel(ref: Refs, *, how: Added) -> None:
    ordered.kernel(ref, plan=how.plan, consume=partial(consume, how=how), tile_of=how.tile)


def delegate(call: Call, config: UnorderedGradientsConfig) -> tuple[str, FlashGradientsConfig] | None:
    """Gradients without d_q have no sum that several blocks add to: they are the ordered kernel's."""
    if "d_q" in call.wants:
        return None
    return "gpu", FlashGradientsConfig(block_q=config.block_q, block_kv=config.block_kv, stages=config.stages)


@BACKEND.implements("attention_vjp", key=key, supports=supports, config=UnorderedGradientsConfig,
                    copies=copies, delegate=delegate, drawn=ordered.DRAWN, unordered={"d_q": ADDED})  # fmt: skip
def attention_vjp(call: Call, config: UnorderedGradientsConfig) -> tuple[jax.Array | None, ...]:
    how, d = added(call, config), call.dims["d"]
    plan, batch, q_len = how.plan, call.dims["batch"], call.dims["q_len"]
    heads = call.dims["kv_heads"] * plan.group
    width = whole_pieces(plan.d, plan.dtype)
    inputs = {name: padded_rows(call.arrays[name], width) for name in ("q", "k")}
    inputs |= {name: padded_rows(call.arrays[name]) for name in ("v", "d_o")}
    inputs |= statistics(call) | masks(call, plan)
    rows = padded(q_len, ALIGNED)
    sums = jax.new_ref(jnp.zeros((batch, rows, heads, how.columns), jnp.float32))
    if call.interpret:
        _additions.known()
    found = launched(call, how, inputs | {"sums": sums})
    d_q = (jax.freeze(sums)[:, :q_len, :, :d] * scale_of(call)).astype(plan.dtype)
    found = {"d_q": d_q, "d_k": found["d_k"][..., :d], "d_v": found["d_v"][..., : plan.dv]}
    if "d_bias" in call.wants:
        found["d_bias"] = bias_gradient(call, config, inputs)
    return tuple(found[o.name] if o.name in call.wants else None for o in call.spec.outputs)


def launched(call: Call, how: Added, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
    """d_k and d_v; what is added to ``sums`` is in that array."""
    plan = how.plan
    return launch(
        call,
        partial(kernel, how=how),
        f"{call.spec.name}_unordered",
        (plan.batch * plan.heads * plan.tiles,),
        inputs=inputs,
        outputs=ordered.gradient_forms(plan),
        scratch=ordered.rings(
            plan,
            sum(map(len, plan.parts)) + len(NUMBERS) - 1,
            leaving=LeavingBuffers((CONSUMERS, SLOTS), ROWS, plan.leaving, plan.dtype, sums=((CONSUMERS, ROWS, PART),)),
            numbers=plgpu.SMEM(how.numbers, jnp.float32),
            shown=tiled_buffer((2, how.tiles_per_iteration, CONSUMERS, ROWS, PART), plan.dtype),
            there=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=2),
            told=plgpu.Barrier(num_arrivals=1, num_barriers=plan.stages),
        ),
        warpgroups=CONSUMERS + 1,
        approximate=True,
        across_warps=False,
    )
