"""Gradients of attention on TPUs, the scores recomputed block by block from q, k and lse and never stored.

    t = tanh(scale q k^T / c), s = c t - a + bias, P = exp(min(s - lse, 0));  without a softcap c t is scale q k^T
    Delta = rowsum(d_o * o) - d_lse;  dS = P (d_o v^T - Delta);  D = dS (1 - t^2), without a softcap dS
    a: a head's slope times the distance, or 0
    d_q = scale D k;  d_k = scale D^T q;  d_v = P^T d_o;  d_bias = dS;  d_sink = -sum exp(min(sink - lse, 0)) Delta

q: (batch, q_len, kv_heads*group, d), k: (batch, kv_len, kv_heads, d), v: (batch, kv_len, kv_heads, dv),
o and d_o: (batch, q_len, kv_heads*group, dv), lse, lse_low and d_lse: (batch, kv_heads*group, q_len).
d_k and d_v are summed over the group, d_bias over the axes along which bias has an extent of 1.

`at_once` makes d_q, d_k and d_v, with five products for a pair of blocks: d_q is summed while the keys go by, and d_k
and d_v stay in VMEM, all of them, until the last query was there. Where VMEM does not hold them (`fit`), or not all are
wanted, there are two kernels with seven products. Each kernel is the only owner of what it sums, in float32 in VMEM and
in the order of the grid, so that nothing is added atomically.

lse is two numbers, lse + lse_low, and scores are kept in the unit of the forward pass (`UnitOf`): so a score is the
number that it was there, and P the weight that its key had, however large scores are.

`by_row` writes three rows of one array: the two numbers of lse in the scores' unit, and Delta. The first is inf for
queries that saw no key: their P is 0. The others read them, and with slopes two
rows more (`slope_rows`). The grid of `by_query` (d_q) is (batch, heads, query blocks, key blocks); that of `by_key`
(d_k, d_v) is (batch, kv_heads, key blocks, group, query blocks); that of
`by_bias` (d_bias) has a place for each block of bias, and inside it what that block is broadcast over; that of
`by_sinks` (d_sinks) is (heads, blocks of the queries of all batch entries). `by_query` holds
scores as (queries, keys), the others as (keys, queries): P and D are always the left factor of the next product as they
stand, with the axis that it sums last. The forward pass's `Band` says which blocks meet, and, turned over, which query
blocks see a key block; the spans of segments (`segments`) say so besides. Others are not visited, nor fetched, unless
bias has a row for each query. Arrays are read as (batch, heads, len, d), for the reason that ``_heads.py`` gives.

block_q, block_kv: the queries and keys of one step, in all kernels. A step holds a few float32 arrays of block_q x
block_kv. kernels: 1 or 2, those of d_q, d_k and d_v.

Source: Dao, "FlashAttention-2" (2023), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import AttentionGradientsConfig
from portakern.backends.pallas.lib.band import Band
from portakern.backends.pallas.lib.blocks import (
    Blocks,
    Refs,
    block,
    padded,
    positions,
    quotient,
    row_block,
    step_along,
    within,
)
from portakern.backends.pallas.lib.double_float import in_two
from portakern.backends.pallas.lib.mosaic_tpu.chip import LANES, dot, launch, vmem_limit, whole_lanes
from portakern.backends.pallas.tpu._heads import (
    AttentionOperands,
    Place,
    bias_blocks,
    by_head,
    from_heads,
    head_blocks,
    row_blocks,
    spans_in_scalar_memory,
    tile_span,
)
from portakern.backends.pallas.tpu.attention import (
    TpuScores,
    fall_of,
    grains,
    key,
    refused,
    slope_rows,
    visible_pairs,
)
from portakern.backends.pallas.tpu.softmax import exponential
from portakern.core.call import Call
from portakern.specs.attention import scale_of


def fit(call: Call, config: AttentionGradientsConfig) -> AttentionGradientsConfig:
    """Half of both, as often as VMEM demands; two kernels where it does not hold what one keeps there, or where that is
    so much that compiling takes minutes."""
    bq, bkv, kernels = config.block_q, config.block_kv, config.kernels
    while resident(call, bq, bkv) > vmem_limit(call) and bkv > LANES:
        bq, bkv = max(LANES, bq // 2), bkv // 2
    too_much = resident_at_once(call, bq, bkv) > vmem_limit(call) or call.dims["kv_len"] > MOST_KEYS
    if wants_all(call) and too_much:
        kernels = 2
    return AttentionGradientsConfig(block_q=bq, block_kv=bkv, kernels=kernels)


MOST_KEYS = 16384


def wants_all(call: Call) -> bool:
    """Whether a kernel that makes d_q, d_k and d_v makes nothing in vain."""
    return {"d_q", "d_k", "d_v"} <= {*call.wants}


def resident(call: Call, bq: int, bkv: int) -> int:
    """The VMEM, in bytes, of one step of the kernel of d_k and d_v, which of the two needs most.

    These are what is streamed, twice, the sums, and P, dP, dS and the mask of the step.
    """
    heads = whole_lanes(call.dims["d"]) + whole_lanes(call.dims["dv"])
    streamed = call.arrays["q"].dtype.itemsize * heads * (bq + 2 * bkv) + wider(call) * heads * bkv
    return 2 * streamed + 4 * bkv * heads + of_a_step(call, bq, bkv)


def wider(call: Call) -> int:
    """Bytes that an element of d_q, d_k or d_v has beyond one of the inputs."""
    size: int = call.arrays["q"].dtype.itemsize
    return dtype_of(call, "d_q").itemsize - size


def resident_at_once(call: Call, bq: int, bkv: int) -> int:
    """The same of the one kernel of d_q, d_k and d_v: sums and results of all keys are there."""
    d, dv = whole_lanes(call.dims["d"]), whole_lanes(call.dims["dv"])
    keys, size = padded(call.dims["kv_len"], bkv), call.arrays["q"].dtype.itemsize
    streamed = size * ((d + dv) * (bq + bkv + keys) + bq * d) + wider(call) * ((d + dv) * keys + bq * d)
    return 2 * streamed + 4 * (keys * (d + dv) + bq * d) + of_a_step(call, bq, bkv)


def of_a_step(call: Call, bq: int, bkv: int) -> int:
    """What a step of any of the kernels computes, and a bias: P, dP, dS and the mask. With a cap on scores its
    derivative is one more factor, and q and the operands of dP wait beside it. Of float32 operands there are bfloat16
    parts, those of q in both directions, and for each register's width of dv but the first a sum of products that is
    added to dP."""
    bias, pairs = call.arrays["bias"], bkv * whole_lanes(bq)
    d, dv = whole_lanes(call.dims["d"]), whole_lanes(call.dims["dv"])
    streamed = 0 if bias is None else 2 * bias.dtype.itemsize * bq * whole_lanes(bkv)
    if "d_bias" in call.wants:
        streamed += (4 + 2 * (dtype_of(call, "d_bias").itemsize - bias.dtype.itemsize)) * pairs  # its sum
    pairs_more = 4 * pairs * (call.arrays["alibi_slopes"] is not None)  # distances
    waiting = call.arrays["q"].dtype.itemsize * ((d + dv) * bq + dv * bkv) if call.options["softcap"] else 0
    split = 0
    if call.dtype == "float32":
        split = 16 * d * bq + 6 * dv * (bq + bkv) + 12 * (dv // LANES - 1) * pairs
    return streamed + 16 * pairs + pairs_more + waiting + split


def supports(call: Call, config: AttentionGradientsConfig) -> str | None:
    of_q, of_kv = grains(call)
    bq, bkv = block(call.dims["q_len"], config.block_q, of_q), block(call.dims["kv_len"], config.block_kv, of_kv)
    at_once = resident_at_once(call, bq, bkv) if config.kernels == 1 and wants_all(call) else 0
    needed = max(at_once, resident(call, bq, bkv))
    names = "block_q or block_kv" if needed > at_once else "block_q or block_kv, or kernels=2"
    return refused(call, config, needed, call.dims["q_len"], names)


# The kernels

SHIFT, LOW, DELTA, SLOPE, PLACE = (slice(row, row + 1) for row in range(5))
"""What the rows of ``of_rows`` are: the two numbers of lse, and Delta; the last two in calls with slopes."""


def by_row(ref: Refs, *, unit: float) -> None:
    """lse of a block of queries as two numbers of so many natural ``unit``s, and Delta."""
    products = ref.d_o[...].astype(jnp.float32) * ref.o[...].astype(jnp.float32)
    delta = jnp.sum(products, axis=1, keepdims=True).T
    if "d_lse" in ref:
        delta = delta - ref.d_lse[...]
    unseen = ref.lse[...] == -jnp.inf
    lse, low = in_two(ref.lse[...], ref.lse_low[...] if "lse_low" in ref else None, 1.0 / unit, None)
    ref.of_rows[SHIFT, :] = jnp.where(unseen, jnp.inf, lse)
    ref.of_rows[LOW, :] = low
    ref.of_rows[DELTA, :] = jnp.where(unseen, 0.0, delta)


def by_query(ref: Refs, *, band: Band, scores: TpuScores, scale: float, tiles: int) -> None:
    """d_q of a block of queries, of so many ``tiles``, summed over the key blocks that they see."""
    i, step = step_along(2), step_along(3)
    first, last = band.span(i, tile_span(getattr(ref, "spans", None), step_along(0), i, tiles))
    j = first + step

    @pl.when(step == 0)
    def start() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    def add(edge: bool) -> None:
        k, bias = ref.k[...], ref.bias[...].astype(jnp.float32) if "bias" in ref else None
        visible = visible_pairs(ref, band, i, j, edge)
        shift, low, delta = (ref.of_rows[row, :].T for row in (SHIFT, LOW, DELTA))
        fall = None
        if ref.of_rows.shape[0] > PLACE.start:
            fall = fall_of(ref.of_rows[SLOPE, :].T, ref.of_rows[PLACE, :].T, j * band.block_kv, band.block_kv)
        p, slope = weights(scores, dot(ref.q[...], k, (1, 1)), bias, (shift, low), visible, fall)
        d_s = selected(visible, p * (dot(ref.d_o[...], ref.v[...], (1, 1)) - delta))
        d_dot = d_s if slope is None else selected(visible, d_s * slope)
        keys = within(k, 0, j * band.block_kv, band.kv_len) if edge else k
        ref.acc[...] += dot(d_dot.astype(k.dtype), keys, (1, 0))

    band.visit(i, j, j <= last, add)

    @pl.when(step == pl.num_programs(3) - 1)
    def finish() -> None:
        ref.d_q[...] = (ref.acc[...] * scale).astype(ref.d_q.dtype)


def by_key(ref: Refs, *, band: Band, scores: TpuScores, scale: float, tiles: int) -> None:
    """d_k and d_v of a block of keys, of so many ``tiles``, summed over the heads of their group and the query blocks
    that see them.

    The band is turned over.
    """
    j, head, step = step_along(2), step_along(3), step_along(4)
    first, last = band.span(j, tile_span(getattr(ref, "spans", None), step_along(0), j, tiles))
    i = first + step

    @pl.when((head == 0) & (step == 0))
    def start() -> None:
        if "k_acc" in ref:
            ref.k_acc[...] = jnp.zeros_like(ref.k_acc)
        if "v_acc" in ref:
            ref.v_acc[...] = jnp.zeros_like(ref.v_acc)

    def add(edge: bool) -> None:
        q, d_o = ref.q[...], ref.d_o[...]
        visible, p, slope = weights_by_key(ref, band, scores, j, i, edge)
        if edge:
            q, d_o = (within(x, 0, i * band.block_kv, band.kv_len) for x in (q, d_o))
        if "v_acc" in ref:
            ref.v_acc[...] += dot(p.astype(d_o.dtype), d_o, (1, 0))
        if "k_acc" in ref:
            d_s = selected(visible, p * (dot(ref.v[...], d_o, (1, 1)) - ref.of_rows[DELTA, :]))
            d_dot = d_s if slope is None else selected(visible, d_s * slope)
            ref.k_acc[...] += dot(d_dot.astype(q.dtype), q, (1, 0))

    band.visit(j, i, i <= last, add)

    @pl.when((head == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1))
    def finish() -> None:
        if "k_acc" in ref:
            ref.d_k[...] = (ref.k_acc[...] * scale).astype(ref.d_k.dtype)
        if "v_acc" in ref:
            ref.d_v[...] = ref.v_acc[...].astype(ref.d_v.dtype)


def at_once(ref: Refs, *, band: Band, turned: Band, scores: TpuScores, scale: float, tiles: int) -> None:
    """d_q of a block of queries, of so many ``tiles``, and d_k and d_v of all keys, which stay in VMEM until every
    query was there.

    Blocks meet in the order of `by_query`, which gives a key's sums that of `by_key`; scores are held as there.
    """
    head, i, step = step_along(2), step_along(3), step_along(4)
    first, last = band.span(i, tile_span(getattr(ref, "spans", None), step_along(0), i, tiles))
    j, last_step = first + step, step == pl.num_programs(4) - 1

    @pl.when((head == 0) & (i == 0) & (step == 0))
    def start() -> None:
        ref.k_acc[...] = jnp.zeros_like(ref.k_acc)
        ref.v_acc[...] = jnp.zeros_like(ref.v_acc)

    @pl.when(step == 0)
    def start_queries() -> None:
        ref.q_acc[...] = jnp.zeros_like(ref.q_acc)

    def add(edge: bool) -> None:
        q, d_o, k = ref.q[...], ref.d_o[...], ref.k[...]
        visible, p, slope = weights_by_key(ref, turned, scores, j, i, edge)
        if edge:
            q, d_o = (within(x, 0, i * band.block_q, turned.kv_len) for x in (q, d_o))
            k = within(k, 0, j * band.block_kv, band.kv_len)
        keys = pl.ds(j * band.block_kv, band.block_kv)
        ref.v_acc[keys, :] += dot(p.astype(d_o.dtype), d_o, (1, 0))
        d_s = selected(visible, p * (dot(ref.v[...], d_o, (1, 1)) - ref.of_rows[DELTA, :]))
        d_dot = (d_s if slope is None else selected(visible, d_s * slope)).astype(q.dtype)
        ref.k_acc[keys, :] += dot(d_dot, q, (1, 0))
        ref.q_acc[...] += dot(d_dot, k, (0, 0))

    turned.visit(j, i, j <= last, add)

    @pl.when(last_step)
    def finish_queries() -> None:
        ref.d_q[...] = (ref.q_acc[...] * scale).astype(ref.d_q.dtype)

    @pl.when((head == pl.num_programs(2) - 1) & (i == pl.num_programs(3) - 1) & last_step)
    def finish() -> None:
        ref.d_k[...] = (ref.k_acc[...] * scale).astype(ref.d_k.dtype)
        ref.d_v[...] = ref.v_acc[...].astype(ref.d_v.dtype)


def by_bias(ref: Refs, *, band: Band, scores: TpuScores, one_row: bool, tiles: int) -> None:
    """d_bias of a block of bias, summed over what the block is broadcast over.

    These are batch entries, heads and, in ``one_row``, the query blocks too. The band is turned over. ``tiles``: of
    keys.
    """
    j, batch, head, step = (step_along(axis) for axis in (3, 4, 5, 6))
    first, last = band.span(j, tile_span(getattr(ref, "spans", None), step_along(0) + batch, j, tiles))
    i = first + step if one_row else step_along(2)

    @pl.when((batch == 0) & (head == 0) & (step == 0))
    def start() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    def add(edge: bool) -> None:
        visible, p, _ = weights_by_key(ref, band, scores, j, i, edge)
        d_s = selected(visible, p * (dot(ref.v[...], ref.d_o[...], (1, 1)) - ref.of_rows[DELTA, :]))
        ref.acc[...] += jnp.sum(d_s, axis=1, keepdims=True) if one_row else d_s

    band.visit(j, i, (first <= i) & (i <= last), add)

    last_batch, last_head, last_step = (pl.num_programs(axis) - 1 for axis in (4, 5, 6))

    @pl.when((batch == last_batch) & (head == last_head) & (step == last_step))
    def finish() -> None:
        ref.d_bias[...] = ref.acc[...].T.astype(ref.d_bias.dtype)


def by_sinks(ref: Refs) -> None:
    """d_sinks of a head, summed over blocks of the rows of all batch entries, in order. Rows that are not there have an
    lse of -inf."""

    @pl.when(step_along(1) == 0)
    def start() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    lse, low = ref.lse[...], ref.lse_low[...] if "lse_low" in ref else 0.0
    p = jnp.exp(jnp.minimum((ref.sinks[:, :1] - lse) - low, 0.0))
    ref.acc[...] -= jnp.where(lse == -jnp.inf, 0.0, p * ref.delta[...])

    @pl.when(step_along(1) == pl.num_programs(1) - 1)
    def finish() -> None:
        total = jnp.sum(ref.acc[...], axis=1, keepdims=True)
        ref.d_sinks[...] = jnp.broadcast_to(total, ref.d_sinks.shape)


def weights(
    scores: TpuScores, dots: Any, bias: Any, lse: tuple[Any, Any], visible: Any, fall: Any = None
) -> tuple[Any, Any]:
    """P of a block of dots, and the slope of its softcap (None: 1). ``lse``: as `by_row` writes it; ``fall``: what
    scores are less by, or None."""
    (s, tanh), (shift, low) = scores.from_dots(dots, bias, fall), lse
    slope = None if tanh is None else 1 - tanh * tanh
    return selected(visible, exponential(jnp.minimum((s - shift) - low, 0.0), scores.unit)), slope


def weights_by_key(ref: Refs, band: Band, scores: TpuScores, j: Any, i: Any, edge: bool) -> tuple[Any, Any, Any]:
    """(which pairs are visible, P, the slope) of key block j, as rows, and query block i."""
    bias = ref.bias[...].astype(jnp.float32).T if "bias" in ref else None
    visible = visible_pairs(ref, band, j, i, edge, by_key=True)
    lse, fall = (ref.of_rows[SHIFT, :], ref.of_rows[LOW, :]), None
    if ref.of_rows.shape[0] > PLACE.start:
        fall = fall_by_key(ref, j * band.block_q, band.block_q)
    return visible, *weights(scores, dot(ref.k[...], ref.q[...], (1, 1)), bias, lse, visible, fall)


def fall_by_key(ref: Refs, start: Any, bkv: int) -> Any:
    """By how much slopes make the scores of ``bkv`` keys, (bkv, rows), from ``start`` on, less."""
    keys = positions((bkv, 1), 0, start).astype(jnp.float32)
    return ref.of_rows[SLOPE, :] * jnp.abs(ref.of_rows[PLACE, :] - keys)


def selected(visible: Any, x: Any) -> Any:
    """x where a pair is visible and 0 elsewhere, whatever the arithmetic made of it there."""
    return x if visible is None else jnp.where(visible, x, 0.0)


# What they read and write


class GradientOperands(AttentionOperands):
    """What every gradient reads: the forward pass's operands, the cotangent d_o, and what `by_row` says of
    every query."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        d_o = by_head(call.arrays["d_o"])
        self.of_rows = row_statistics(call, d_o)
        if call.arrays["alibi_slopes"] is not None:
            slopes = slope_rows(call, TpuScores.of_gradients(call).unit)
            every = jnp.broadcast_to(slopes, (self.of_rows.shape[0], *slopes.shape[1:]))
            self.of_rows = jnp.concatenate([self.of_rows, every], 2)
        self.d_o = d_o.astype(call.arrays["q"].dtype)

    def at(self, bq: int, bkv: int, query: Place, key: Place) -> Blocks:
        # Each block of queries becomes a row of its own, since bq need not be a multiple of the lanes along which
        # queries lie here.
        batch, heads, number, q_len = self.of_rows.shape
        padding = (0, 0), (0, 0), (0, 0), (0, -q_len % bq)
        of_rows = jnp.pad(self.of_rows, padding).reshape(batch, heads, number, -1, bq)
        a_block = pl.BlockSpec((None, None, None, number, bq), lambda *step: (*query(*step), 0, 0))
        return super().at(bq, bkv, query, key) | {
            "d_o": (self.d_o, head_blocks(bq, self.d_o.shape[3], query)),
            "of_rows": (jnp.swapaxes(of_rows, 2, 3), a_block),
        }


def row_statistics(call: Call, d_o: jax.Array) -> jax.Array:
    """(batch, heads, 3, q_len): what `by_row` says of every query.

    A kernel, because XLA's sums on a host have bits that depend on how many rows there are.
    """
    batch, heads, q_len, dv = d_o.shape
    rows = row_block(call, q_len, whole_lanes(max(2**18 // whole_lanes(dv), 1)), LANES)

    def block_of(b: Any, h: Any, i: Any) -> tuple[Any, Any, Any]:
        return b, h, i

    by_rows = head_blocks(rows, dv, block_of)
    inputs: Blocks = {"o": (by_head(call.arrays["o"]), by_rows), "d_o": (d_o, by_rows)}
    for name in ("lse", "lse_low", "d_lse"):
        if call.arrays[name] is not None:
            inputs[name] = (call.arrays[name][:, :, None], row_blocks(1, rows, block_of))
    form = jax.ShapeDtypeStruct((batch, heads, 3, q_len), jnp.float32)
    outputs: Blocks = {"of_rows": (form, row_blocks(3, rows, block_of))}
    kernel = partial(by_row, unit=TpuScores.of_gradients(call).unit)
    return launched(call, kernel, (batch, heads, pl.cdiv(q_len, rows)), 0, inputs, outputs)["of_rows"]


def turned(band: Band, q_len: int) -> Band:
    """The band as keys see it: which query blocks a key block is seen by.

    Its own block_q is then a block of keys, and kv_len is q_len.
    """
    first, last = (None if bound is None else -bound for bound in (band.last, band.first))
    return Band(first, last, q_len, band.block_kv, band.block_q)


def launched(
    call: Call,
    kernel: Callable[[Refs], None],
    grid: tuple[int, ...],
    in_order: int,
    inputs: Blocks,
    outputs: Blocks,
    scratch: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    pairs: int = 0,
    depth: int = 0,
    scalars: Mapping[str, jax.Array] = MappingProxyType({}),
) -> dict[str, jax.Array]:
    """`launch` a kernel named after its outputs, each of whose steps does ``depth`` products for each of ``pairs``."""
    moved = sum(x.size * x.dtype.itemsize for x, _ in (*inputs.values(), *outputs.values()))
    exponentials = prod(grid) * pairs
    return launch(
        call,
        kernel,
        "portakern_attention_vjp_" + "_".join(outputs),
        grid,
        in_order=in_order,
        inputs=inputs,
        outputs=outputs,
        scratch=scratch,
        cost=pl.CostEstimate(flops=2 * exponentials * depth, transcendentals=exponentials, bytes_accessed=moved),
        vmem=vmem_limit(call),  # blocks were chosen to fit that
        scalars=scalars,
    )


# The gradients


def dtype_of(call: Call, gradient: str) -> Any:
    return jnp.dtype(call.outputs[gradient][1])


def query_gradient(call: Call, config: AttentionGradientsConfig, saved: GradientOperands) -> dict[str, jax.Array]:
    (batch, q_len, heads, d), group = call.arrays["q"].shape, call.dims["group"]
    of_q, of_kv = grains(call)
    bq, bkv = row_block(call, q_len, config.block_q, of_q), block(call.dims["kv_len"], config.block_kv, of_kv)
    band, tiles = Band.of(call, bq, bkv), pl.cdiv(q_len, bq)

    def query(b: Any, h: Any, i: Any, step: Any, *spans: Any) -> tuple[Any, Any, Any]:
        return b, h, i

    def key(b: Any, h: Any, i: Any, step: Any, *spans: Any) -> tuple[Any, Any, Any]:
        return b, quotient(h, group), band.block(i, step, tile_span(spans, b, i, tiles))

    form = jax.ShapeDtypeStruct((batch, heads, q_len, d), dtype_of(call, "d_q"))
    found = launched(
        call,
        partial(by_query, band=band, scores=TpuScores.of_gradients(call), scale=scale_of(call), tiles=tiles),
        grid=(batch, heads, tiles, band.steps()),
        in_order=1,
        inputs=saved.at(bq, bkv, query, key),
        outputs={"d_q": (form, head_blocks(bq, d, query))},
        scratch={"acc": (bq, d)},
        pairs=bq * bkv,
        depth=2 * d + call.dims["dv"],
        scalars=spans_in_scalar_memory(call, bq, bkv),
    )
    return {"d_q": from_heads(found["d_q"])}


def key_gradients(call: Call, config: AttentionGradientsConfig, saved: GradientOperands) -> dict[str, jax.Array]:
    group, q_len = call.dims["group"], call.dims["q_len"]
    batch, kv_len, kv_heads, _ = call.arrays["k"].shape
    of_q, of_kv = grains(call)
    bq, bkv = block(q_len, config.block_q, of_q), row_block(call, kv_len, config.block_kv, of_kv)
    band, tiles = turned(Band.of(call, bq, bkv), q_len), pl.cdiv(kv_len, bkv)

    def query(b: Any, h: Any, j: Any, head: Any, step: Any, *spans: Any) -> tuple[Any, Any, Any]:
        return b, h * group + head, band.block(j, step, tile_span(spans, b, j, tiles))

    def key(b: Any, h: Any, j: Any, head: Any, step: Any, *spans: Any) -> tuple[Any, Any, Any]:
        return b, h, j

    outputs: Blocks = {}
    scratch, depth = {}, call.dims["d"] + call.dims["dv"]
    for name in ("k", "v"):
        if f"d_{name}" in call.wants:
            array = saved.heads[name]
            width = array.shape[3]
            outputs[f"d_{name}"] = (
                jax.ShapeDtypeStruct(array.shape, dtype_of(call, f"d_{name}")),
                head_blocks(bkv, width, key),
            )
            scratch[f"{name}_acc"] = (bkv, width)
            depth += width
    found = launched(
        call,
        partial(by_key, band=band, scores=TpuScores.of_gradients(call), scale=scale_of(call), tiles=tiles),
        grid=(batch, kv_heads, tiles, group, band.steps()),
        in_order=2,
        inputs=saved.at(bq, bkv, query, key),
        outputs=outputs,
        scratch=scratch,
        pairs=bq * bkv,
        depth=depth,
        scalars=spans_in_scalar_memory(call, bq, bkv, by_key=True),
    )
    return {name: from_heads(gradient) for name, gradient in found.items()}


def all_gradients(call: Call, config: AttentionGradientsConfig, saved: GradientOperands) -> dict[str, jax.Array]:
    """d_q, d_k and d_v of one kernel."""
    (batch, q_len, heads, d), group = call.arrays["q"].shape, call.dims["group"]
    kv_len, dv = call.dims["kv_len"], call.dims["dv"]
    of_q, of_kv = grains(call)
    bq, bkv = row_block(call, q_len, config.block_q, of_q), block(kv_len, config.block_kv, of_kv)
    band, keys, tiles = Band.of(call, bq, bkv), padded(kv_len, bkv), pl.cdiv(q_len, bq)

    def query(b: Any, h: Any, head: Any, i: Any, step: Any, *spans: Any) -> tuple[Any, Any, Any]:
        return b, h * group + head, i

    def key(b: Any, h: Any, head: Any, i: Any, step: Any, *spans: Any) -> tuple[Any, Any, Any]:
        return b, h, band.block(i, step, tile_span(spans, b, i, tiles))

    def every_key(b: Any, h: Any, head: Any, i: Any, step: Any, *spans: Any) -> tuple[Any, Any, Any]:
        return b, h, 0

    of_q = jax.ShapeDtypeStruct((batch, heads, q_len, d), dtype_of(call, "d_q"))
    outputs: Blocks = {"d_q": (of_q, head_blocks(bq, d, query))}
    for name, array in (("d_k", saved.heads["k"]), ("d_v", saved.heads["v"])):
        form = jax.ShapeDtypeStruct(array.shape, dtype_of(call, name))
        outputs[name] = (form, head_blocks(keys, array.shape[3], every_key))
    of_keys, scores = turned(band, q_len)._replace(rows=kv_len), TpuScores.of_gradients(call)
    found = launched(
        call,
        partial(at_once, band=band, turned=of_keys, scores=scores, scale=scale_of(call), tiles=tiles),
        grid=(batch, heads // group, group, tiles, band.steps()),
        in_order=3,
        inputs=saved.at(bq, bkv, query, key),
        outputs=outputs,
        scratch={"q_acc": (bq, d), "k_acc": (keys, d), "v_acc": (keys, dv)},
        pairs=bq * bkv,
        depth=3 * d + 2 * dv,
        scalars=spans_in_scalar_memory(call, bq, bkv),
    )
    return {name: from_heads(gradient) for name, gradient in found.items()}


def bias_gradient(call: Call, config: AttentionGradientsConfig, saved: GradientOperands) -> dict[str, jax.Array]:
    (batch, q_len, heads, _), group, kv_len = call.arrays["q"].shape, call.dims["group"], call.dims["kv_len"]
    bias = call.arrays["bias"]
    batches, bias_heads, rows, _ = bias.shape
    of_q, of_kv = grains(call)
    bq, bkv = row_block(call, q_len, config.block_q, of_q), row_block(call, kv_len, config.block_kv, of_kv)
    band, one_row, tiles = turned(Band.of(call, bq, bkv), q_len), rows == 1, pl.cdiv(kv_len, bkv)

    # b and batch, h and head: of each pair of grid axes one has a single step, whose index is 0
    def query(b: Any, h: Any, i: Any, j: Any, batch: Any, head: Any, step: Any, *spans: Any) -> tuple[Any, Any, Any]:
        seen = band.block(j, step, tile_span(spans, b + batch, j, tiles)) if one_row else i
        return b + batch, h + head, seen

    def key(b: Any, h: Any, i: Any, j: Any, batch: Any, head: Any, step: Any, *spans: Any) -> tuple[Any, Any, Any]:
        return b + batch, quotient(h + head, group), j

    of_bias = (batches, bias_heads, pl.cdiv(rows, bq), tiles)
    summed = (batch // batches, heads // bias_heads, band.steps() if one_row else 1)
    form = jax.ShapeDtypeStruct(bias.shape, dtype_of(call, "d_bias"))
    return launched(
        call,
        partial(by_bias, band=band, scores=TpuScores.of_gradients(call), one_row=one_row, tiles=tiles),
        grid=(*of_bias, *summed),
        in_order=3,
        inputs=saved.at(bq, bkv, query, key),
        outputs={"d_bias": (form, bias_blocks(bias.shape, bq, bkv, query, key))},
        scratch={"acc": (bkv, 1 if one_row else bq)},
        pairs=bq * bkv,
        depth=call.dims["d"] + call.dims["dv"],
        scalars=spans_in_scalar_memory(call, bq, bkv, by_key=True),
    )


ROWS_AT_ONCE = 8 * LANES
"""Rows of a head that a step of `by_sinks` takes."""


def sink_gradient(call: Call, saved: GradientOperands) -> dict[str, jax.Array]:
    """Each head's sink lies along all lanes of a register, and so does its gradient."""
    sinks, (batch, heads, _, q_len) = call.arrays["sinks"], saved.of_rows.shape
    whole = padded(batch * q_len, ROWS_AT_ONCE)

    def of_head(h: Any, i: Any) -> tuple[Any, Any, Any]:
        return 0, h, 0

    def of_rows(h: Any, i: Any) -> tuple[Any, Any, Any]:
        return 0, h, i

    form, a_head = jax.ShapeDtypeStruct((1, heads, 1, LANES), jnp.float32), row_blocks(1, LANES, of_head)
    inputs: Blocks = {"sinks": (jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None, None], form.shape), a_head)}
    numbers = {"lse": call.arrays["lse"], "lse_low": call.arrays["lse_low"], "delta": saved.of_rows[:, :, DELTA.start]}
    for name, x in numbers.items():
        if x is not None:
            of_head_rows = jnp.swapaxes(x, 0, 1).reshape(1, heads, 1, batch * q_len)
            lacking = (0, 0), (0, 0), (0, 0), (0, whole - batch * q_len)
            beyond = -jnp.inf if name == "lse" else 0.0
            rows = jnp.pad(of_head_rows, lacking, constant_values=beyond)
            inputs[name] = (rows, row_blocks(1, ROWS_AT_ONCE, of_rows))
    grid, scratch = (heads, whole // ROWS_AT_ONCE), {"acc": (1, ROWS_AT_ONCE)}
    found = launched(call, by_sinks, grid, 1, inputs, {"d_sinks": (form, a_head)}, scratch, pairs=ROWS_AT_ONCE)
    return {"d_sinks": found["d_sinks"][0, :, 0, 0].astype(dtype_of(call, "d_sinks"))}


@BACKEND.implements("attention_vjp", key=key, fit=fit, supports=supports, config=AttentionGradientsConfig)
def attention_vjp(call: Call, config: AttentionGradientsConfig) -> tuple[jax.Array | None, ...]:
    saved = GradientOperands(call)
    found = all_gradients(call, config, saved) if config.kernels == 1 and wants_all(call) else {}
    rest = [name for name in call.wants if name not in found]
    found |= query_gradient(call, config, saved) if "d_q" in rest else {}
    found |= key_gradients(call, config, saved) if "d_k" in rest or "d_v" in rest else {}
    found |= bias_gradient(call, config, saved) if "d_bias" in rest else {}
    found |= sink_gradient(call, saved) if "d_sinks" in rest else {}
    return tuple(found.get(output.name) for output in call.spec.outputs)
