"""The online softmax of attention on Hopper, o = softmax(scale q k^T) v, which its variants share.

m is the running maximum of a query's scores, l the sum of exp(s - m) and acc the sum of exp(s - m) v, in registers.
Scores of keys i and products with values i - 1 are issued to the tensor cores together; the maxima of the scores are
found beside the products, and the weights exp(s - m) computed after them. Consumers (``flash``) take turns to issue,
two or, for narrow heads, three:

    consumer 0   S0        S1 P0           S2 P1     ...   P(n-1)
    weights 0       ------       ------
    consumer 1         S0        S1 P0           S2 P1     ...
    weights 1             ------       ------

Where keys have several splits (``flash``), each is walked so, and then merged with the sums of the splits before it,
which lie in shared memory.

A tile that is masked for a query leaves the query's state as it is to the bit, and tiles of keys begin at multiples of
block_kv whatever is masked: so no bit of a query depends on its neighbours, nor on how many there are.

Source: Shah et al., "FlashAttention-3" (2024), algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import e, log2
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas.configs import FlashConfig, StreamedTilesConfig
from portakern.backends.pallas.lib.band import Band
from portakern.backends.pallas.lib.blocks import Refs, padded, words
from portakern.backends.pallas.lib.double_float import in_two
from portakern.backends.pallas.lib.mosaic_gpu import chip
from portakern.backends.pallas.lib.mosaic_gpu.accumulators import finished, in_registers
from portakern.backends.pallas.lib.mosaic_gpu.chip import (
    BufferViews,
    dtype_refused,
    over_shared,
    products_refused,
)
from portakern.backends.pallas.lib.mosaic_gpu.flash import (
    OF_THREE,
    QUERIES,
    ROW,
    TILE,
    Merge,
    MosaicFlashPlan,
    QueryTile,
    bias_tile,
    in_ping_pong,
    multiply_keys,
    multiply_values,
    produce,
    same_segment,
    tiles_of_split,
    zeros,
    zeros_of,
)
from portakern.backends.pallas.lib.mosaic_gpu.head_parts import PART, parts_in
from portakern.backends.pallas.lib.mosaic_gpu.pipeline import REGISTERS, drain, free_all, warp_specialized
from portakern.core.call import Call
from portakern.specs._exponents import below_overflow, exponents, two_parts
from portakern.specs.attention import score_unit

WIDEST = 256
"""Elements of a head at most: more do not fit into registers and shared memory beside each other."""

HELD = 200
"""Registers of a consumer's thread for sums, scores and weights: the others hold what it needs besides."""


class GpuScores(NamedTuple):
    """How scores come of dots: what multiplies a dot first, the softcap, and the unit in which the scores then stand
    (``score_unit`` of the spec says why)."""

    pre: float | None
    softcap: float | None
    unit: float

    def from_dots(self, s: Any, bias: Any) -> Any:
        s = s if self.pre is None else s * self.pre
        s = s if self.softcap is None else tanh(s)
        if bias is None:
            return s
        return (s if self.softcap is None else s * self.softcap) + bias

    def scaled_max(self, m: Any) -> tuple[Any, Any]:
        """(factor, offset): under the maximum m of a row a score's weight is 2^(s factor - offset) (``exponents`` of
        the spec). Of a row that has seen no key, m counts as 0: -inf - -inf would be NaN."""
        scale_log2, beyond, power_of_two = exponents(self.unit)
        factor = jnp.where(jnp.abs(m) < beyond, scale_log2, power_of_two)
        return factor, jnp.where(m == -jnp.inf, 0.0, m * factor)

    def weights(self, s: Any, scaled: tuple[Any, Any]) -> Any:
        """Of scores, under maxima of rows that are scaled so."""
        factor, offset = (lax.broadcast_in_dim(x, s.shape, (0,)) for x in scaled)
        return jnp.exp2(s * factor - offset)

    def alpha(self, m: Any, scaled: tuple[Any, Any]) -> Any:
        """What sums of weights under the maximum m are multiplied by, to stand under another one, which is scaled. The
        product has to round as an offset does: a selection keeps it from being fused with the difference."""
        factor, offset = scaled
        return jnp.exp2(jnp.where(m == -jnp.inf, m, m * factor) - offset)

    def log_sum(self, l: Any, m: Any) -> dict[str, Any]:
        """m + log l in natural units, as two numbers by name: what was subtracted from scores, which is m factor as it
        rounds, and the rate is a number of float32."""
        scale_log2, beyond, _ = exponents(self.unit)
        log = jnp.where(l == 0.0, -jnp.inf, jnp.log(l))
        rounded = in_two(self.scaled_max(m)[1], None, self.unit / two_parts(scale_log2)[0], log)
        exact = in_two(m, None, self.unit, log)
        found = (jnp.where(jnp.abs(m) < beyond, a, b) for a, b in zip(rounded, exact, strict=True))
        return dict(zip(LOG_SUM, found, strict=True))


LOG_SUM = "lse", "lse_low"

THREE = 192
"""Queries of a block where heads are up to 64 wide: three consumers have room in registers, if nothing but a band is
hidden."""


def plan_of(call: Call, config: FlashConfig) -> MosaicFlashPlan:
    dims, block_kv = call.dims, config.block_kv
    block_q = min(config.block_q, padded(dims["q_len"], QUERIES))
    plain = call.options["softcap"] is None and call.arrays["bias"] is None and call.arrays["q_segment_ids"] is None
    if plain and block_q == 128 and max(dims["d"], dims["dv"]) <= PART and block_kv <= 128:
        block_q = THREE
    pre, unit = below_overflow(*score_unit(call))
    return MosaicFlashPlan(
        dims["batch"],
        dims["kv_heads"] * dims["group"],
        dims["group"],
        dims["q_len"],
        dims["d"],
        dims["dv"],
        block_q // QUERIES,
        block_kv,
        config.stages,
        tiles_of_split(call, config),
        Band.of(call, block_q, block_kv),
        GpuScores(pre, call.options["softcap"], unit),
        jnp.dtype(call.dtype),
        call.interpret,
    )


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "d": max(call.dims["d"], call.dims["dv"])}


def operands_refused(call: Call) -> str | None:
    """Why no tiling serves a call, forward or backward: its dtypes, or heads wider than fit."""
    widest = max(call.dims["d"], call.dims["dv"])
    if reason := products_refused(call) or dtype_refused(call):
        return reason
    if call.arrays["sinks"] is not None:
        return "sinks are given, which Pallas's kernels for GPUs do not take: use the Triton backend"
    if call.arrays.get("alibi_slopes") is not None:
        return "alibi_slopes are given, which Pallas's kernels for GPUs do not take: use the Triton backend"
    if {dtype for name, (_, dtype) in call.outputs.items() if name in ("o", "d_q", "d_k", "d_v")} != {call.dtype}:
        return "results of float32 are asked for, which Pallas's kernels for GPUs do not write: use the Triton backend"
    if call.spec.is_vjp and {call.dtype_of(name) for name in ("o", "d_o")} != {call.dtype}:
        return "o or d_o is float32, which Pallas's kernels for GPUs do not take: use the Triton backend"
    if widest > WIDEST:
        return f"heads of {widest} are wider than the {WIDEST} elements that fit here: use the reference backend"
    return None


def supports(call: Call, config: FlashConfig) -> str | None:
    return operands_refused(call) or tiles_refused(config, lambda: plan_of(call, config))


def tiles_refused(config: StreamedTilesConfig, planned: Callable[[], MosaicFlashPlan]) -> str | None:
    """Why tiles of these sizes do not serve a call. ``planned``: its plan, if they are sizes that there are."""
    block_q, block_kv = config.block_q, config.block_kv
    for name, tile, legal in (("block_q", block_q, (64, 128)), ("block_kv", block_kv, (64, 128, 256))):
        if tile not in legal:
            return f"{name}={tile} is not supported by wgmma here: use one of {', '.join(map(str, legal))}"
    plan = planned()
    held = sum(plan.parts[1]) // 2 + block_kv // 2 + block_kv // 4
    if held > HELD:
        return (
            f"block_kv={block_kv} with heads of {plan.dv} takes {held} registers a thread for sums and scores, "
            f"and {HELD} are free: use a smaller block_kv"
        )
    names = "block_kv or stages" + (", or max_splits=1" if plan.merges else "")
    return over_shared(plan.shared, names, across_warps=False)


def saved(call: Call) -> list[str]:
    """What is written of the log-sum-exp."""
    return [name for name in LOG_SUM if name in call.wants]


def whole_tiles(
    bias: jax.Array | None, ids: tuple[jax.Array | None, jax.Array | None], rows: int, keys: int
) -> dict[str, jax.Array]:
    """Bias and segment ids of queries and keys, (batch, words, len), as the kernel reads them: so many rows and keys,
    which are whole tiles."""
    found = {}
    if bias is not None:
        found["bias"] = extended(extended(bias, 2, rows) if bias.shape[2] > 1 else bias, 3, keys)
    given = [x for x in ids if x is not None]
    if given:
        wide = 2 if any(x.dtype.itemsize == 8 for x in given) else 1
        found |= {
            n: extended(words(x, wide), 2, e) for n, x, e in zip(("q_ids", "kv_ids"), given, (rows, keys), strict=True)
        }
    return found


def extended(x: jax.Array, axis: int, extent: int) -> jax.Array:
    """x with an axis of this extent."""
    lacking = extent - x.shape[axis]
    return jnp.pad(x, [(0, lacking if i == axis else 0) for i in range(x.ndim)]) if lacking else x


def kernel(ref: Refs, *, plan: MosaicFlashPlan, write: Callable[..., None]) -> None:
    """Compute the tiles of a block. ``write(ref, plan, warpgroup, tile, acc, l, m)`` takes what a consumer found of
    one: its queries' state after all keys of the tile."""
    warpgroup = lax.axis_index("warpgroup")

    def each_tile(work: Callable[..., None]) -> None:
        """Call ``work(tile, before)`` for the tiles of this block; ``before``: tiles of keys until then."""

        def one(index: Any, before: Any) -> Any:
            tile = plan.tile(index, ref)
            if plan.skips:
                pl.when(tile.steps > 0)(partial(work, tile, before))
            else:
                work(tile, before)
            return before + tile.steps

        if plan.scheduled:
            mine = ref.schedule.at[lax.axis_index("block")]
            lax.fori_loop(0, mine[0], lambda i, before: one(mine[1 + i], before), jnp.int32(0))
            return

        @plgpu.nd_loop((plan.tiles,), collective_axes="block", init_carry=jnp.int32(0))
        def _(info: plgpu.NDLoopInfo, carry: Any) -> Any:
            return one(jnp.int32(info.index[0]), carry)

    def producer() -> None:
        each_tile(partial(produce, ref, plan))
        drain(ref.q_free, ref.k_free, ref.v_free)

    def consumer() -> None:
        plgpu.barrier_arrive(ref.q_free.at[warpgroup])
        free_all(ref.k_free, ref.v_free)
        if plan.consumers > 1:
            pl.when(warpgroup == plan.consumers - 1)(lambda: plgpu.barrier_arrive(ref.ping_pong.at[0]))
        each_tile(partial(consume, ref, plan, warpgroup, write))
        if plan.consumers > 1:
            pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(ref.ping_pong.at[0]))

    warp_specialized(warpgroup, plan.consumers, producer, consumer, OF_THREE if plan.consumers == 3 else REGISTERS)


def consume(
    ref: Refs, plan: MosaicFlashPlan, warpgroup: Any, write: Callable[..., None], tile: QueryTile, before: Any
) -> None:
    """Compute this warpgroup's queries of one tile, and write them."""
    plgpu.barrier_wait(ref.q_arrived.at[warpgroup])
    if plan.merges:
        state = by_splits(ref, plan, warpgroup, tile, before)
    else:
        state = walk(ref, plan, warpgroup, tile, before, 0 * tile.steps, tile.steps)
    write(ref, plan, warpgroup, tile, *state)


def by_splits(ref: Refs, plan: MosaicFlashPlan, warpgroup: Any, tile: QueryTile, before: Any) -> tuple[Any, ...]:
    """The state (acc, l, m) of a tile, whose splits are walked one by one, and merged. The loop over a split's keys has
    no code of borders, which costs registers and time where there is none."""
    splits = plan.split_of(tile, tile.steps - 1)  # before the last one
    offset = lax.rem(tile.first, jnp.int32(plan.split_tiles))

    def split(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        first, end = (
            jnp.maximum(i * plan.split_tiles - offset, 0),
            jnp.minimum((i + 1) * plan.split_tiles - offset, tile.steps),
        )
        state = walk(ref, plan, warpgroup, tile, before, first, end)
        acc, l, m = merged(ref, plan, warpgroup, sums[1:], state, i > 0)
        pl.when(i < splits)(lambda: keep(ref, plan, warpgroup, acc, i == 0))
        return acc, l, m

    acc = zeros_of(plan.parts[1])
    l = plgpu.layout_cast(jnp.zeros((QUERIES,), jnp.float32), ROW)
    acc, l, m = lax.fori_loop(0, splits + 1, split, (acc, l, _unseen()))
    plgpu.commit_smem()  # these bytes are not read as sums any more
    return acc, l, m


def walk(
    ref: Refs, plan: MosaicFlashPlan, warpgroup: Any, tile: QueryTile, before: Any, first: Any, end: Any
) -> tuple[tuple[Any, ...], Any, Any]:
    """The state (acc, l, m) of the tiles of keys [first, end) of a tile."""
    state = first_keys(ref, plan, warpgroup, tile, before, first)
    more = partial(more_keys, ref, plan, warpgroup, tile, before)
    acc, l, m, p = lax.fori_loop(first + 1, end, more, state)
    pl.when(end == tile.steps)(lambda: plgpu.barrier_arrive(ref.q_free.at[warpgroup]))
    return last_values(ref, plan, lax.rem(before + end - 1, jnp.int32(plan.stages)), acc, p), l, m


def first_keys(
    ref: Refs, plan: MosaicFlashPlan, warpgroup: Any, tile: QueryTile, before: Any, step: Any
) -> tuple[Any, ...]:
    """The state (acc, l, m, p) after a split's first keys. Their values wait for the next: acc is 0, p the weights."""
    buffer = lax.rem(before + step, jnp.int32(plan.stages))
    plgpu.barrier_wait(ref.k_arrived.at[buffer])

    def work(accumulators: Any, others: Any) -> None:
        in_ping_pong(ref, plan, warpgroup, lambda: multiply_keys(ref, plan, warpgroup, buffer, accumulators[0]))

    (s,), _ = in_registers(plan.interpret, work, (zeros(plan.block_kv),))
    plgpu.barrier_arrive(ref.k_free.at[buffer])
    s = seen(ref, plan, warpgroup, tile, step, s)
    m = jnp.max(s, axis=1)
    p = plan.scores.weights(s, plan.scores.scaled_max(m))
    plgpu.barrier_wait(ref.v_arrived.at[buffer])
    acc = zeros_of(plan.parts[1])
    return acc, jnp.sum(p, axis=1), m, p.astype(plan.dtype)


def more_keys(
    ref: Refs, plan: MosaicFlashPlan, warpgroup: Any, tile: QueryTile, before: Any, step: Any, state: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The state with one tile of keys more, and with the values of the one before. The weights of the tile come when
    those products are done: they take the place of the weights that the products have read, and the other consumer's
    products run beside them."""
    acc, l, m, p = state
    buffer, last = (lax.rem(before + i, jnp.int32(plan.stages)) for i in (step, step - 1))
    plgpu.barrier_wait(ref.k_arrived.at[buffer])

    def work(accumulators: Any, others: Any) -> None:
        (dots, *products), (scores, m_new) = accumulators, others

        def issue() -> None:
            multiply_keys(ref, plan, warpgroup, buffer, dots)
            multiply_values(ref, plan, last, p, products)

        in_ping_pong(ref, plan, warpgroup, issue)
        s = finished(dots, later=len(products))
        plgpu.barrier_arrive(ref.k_free.at[buffer])
        s = seen(ref, plan, warpgroup, tile, step, s)
        scores[...] = s
        m_new[...] = jnp.maximum(m, jnp.max(s, axis=1))
        # The assembler moves the wait for the products before the maxima, unless a basic block ends between the two:
        # this wait ends one.
        plgpu.barrier_wait(ref.v_arrived.at[buffer])

    dots = zeros(plan.block_kv)
    (_, *acc), (s, m_new) = chip.in_registers(plan.interpret, work, (dots, *acc), (dots, m))
    plgpu.barrier_arrive(ref.v_free.at[last])
    scaled = plan.scores.scaled_max(m_new)
    # What is done with the sums needs alpha, so that it stays behind the wait if alpha does: one register a row. Hiding
    # the sums themselves, as accumulators does, costs 4 % at 16k keys.
    alpha, p = lax.optimization_barrier(plan.scores.alpha(m, scaled)), plan.scores.weights(s, scaled)
    acc = [part * lax.broadcast_in_dim(alpha, part.shape, (0,)) for part in acc]
    return tuple(acc), l * alpha + jnp.sum(p, axis=1), m_new, p.astype(plan.dtype)


def keep(ref: Refs, plan: MosaicFlashPlan, warpgroup: Any, acc: tuple[Any, ...], first: Any) -> None:
    """Leave sums in shared memory, where each thread reads what it wrote itself."""
    # What was written to these bytes before the first were not sums.
    pl.when(first)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
    for there, total in zip(sums_of(ref, plan, warpgroup), acc, strict=True):
        there[...] = total


def sums_of(ref: Refs, plan: MosaicFlashPlan, warpgroup: Any) -> list[Any]:
    """Where a consumer's sums lie, by part."""
    views = [BufferViews(None, sums) for sums in ref.written.sums]
    return [part.tiled(warpgroup) for part in parts_in(plan.parts[1], views)]


def merged(
    ref: Refs, plan: MosaicFlashPlan, warpgroup: Any, sums: tuple[Any, Any], state: tuple[Any, ...], begun: Any
) -> tuple[Any, ...]:
    """The state (acc, l, m) of a split merged with that of all before it. ``begun``: whether there are any."""
    (l_before, m_before), (acc, l, m) = sums, state
    merge = Merge.of(plan.scores, m_before, m)
    parts = []
    for there, part in zip(sums_of(ref, plan, warpgroup), acc, strict=True):
        known = lax.cond(begun, partial(plgpu.load, there, layout=TILE), partial(zeros, part.shape[1]))
        parts.append(merge.elements(known, part))
    return tuple(parts), merge.rows(l_before, l), merge.maximum


def last_values(ref: Refs, plan: MosaicFlashPlan, buffer: Any, acc: tuple[Any, ...], p: Any) -> tuple[Any, ...]:
    """acc with the values of the last keys."""
    acc, _ = in_registers(plan.interpret, lambda parts, _: multiply_values(ref, plan, buffer, p, parts), acc)
    plgpu.barrier_arrive(ref.v_free.at[buffer])
    return acc


def seen(ref: Refs, plan: MosaicFlashPlan, warpgroup: Any, tile: QueryTile, step: Any, s: Any) -> Any:
    """Scores from dots: -inf where a query does not see a key."""
    if "bias" in ref or "q_ids" in ref:
        rows = pl.ds(tile.row + warpgroup * QUERIES, QUERIES)
        keys = pl.ds((tile.first + step) * plan.block_kv, plan.block_kv)
    bias = bias_tile(ref.bias, tile.batch, tile.head, rows, keys) if "bias" in ref else None
    s = plan.scores.from_dots(plan.dots(tile, s), bias)
    if "q_ids" in ref:
        s = jnp.where(same_segment(ref.q_ids, ref.kv_ids, tile.batch, rows, keys), s, -jnp.inf)
    return plan.masked(tile, warpgroup, step, s)


def tanh(x: Any) -> Any:
    """1 - 2 / (1 + exp(2x)), within 8 units of roundoff of 1, where the scores' bound allows 10 (``tanh`` of Triton's
    kernel adds them up); the chip's own instruction has 11 bits."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2.0 * log2(e))))


def _unseen() -> Any:
    """The maximum m of rows that have seen no key."""
    return plgpu.layout_cast(jnp.full((QUERIES,), -jnp.inf, jnp.float32), ROW)
