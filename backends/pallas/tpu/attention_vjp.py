"""Gradients of attention on TPUs, the scores recomputed block by block from q, k and lse and never stored.

    t = tanh(scale q k^T / c), s = c t + bias, P = exp(s - lse);  without a softcap s = scale q k^T + bias
    Delta = rowsum(d_o * o) - d_lse;  dS = P (d_o v^T - Delta);  D = dS (1 - t^2), without a softcap dS
    d_q = scale D k;  d_k = scale D^T q;  d_v = P^T d_o;  d_bias = dS

q: (batch, q_len, kv_heads*group, d), k: (batch, kv_len, kv_heads, d), v: (batch, kv_len, kv_heads, dv), o and d_o: (batch, q_len, kv_heads*group, dv),
lse and d_lse: (batch, kv_heads*group, q_len). d_k and d_v are summed over the group, d_bias over the axes along which bias has an extent of 1.

`by_row` writes lse and Delta as two rows of one array, with lse = inf for queries that saw no key: their P is 0. Three kernels read them, each the only owner
of what it sums, in float32 in VMEM and in the order of the grid, so that nothing is added atomically. The grid of `by_query` (d_q) is (batch, heads, query
blocks, key blocks); that of `by_key` (d_k, d_v) is (batch, kv_heads, key blocks, group, query blocks); that of `by_bias` (d_bias) has a place for each block
of bias, and inside it what that block is broadcast over. `by_query` holds scores as (queries, keys), the others as (keys, queries): P and D are always the left
factor of the next product as they stand, with the axis that it sums last. The forward pass's `Band` says which blocks meet, and, turned over, which query
blocks see a key block; others are not visited, nor fetched, unless bias has a row for each query. Arrays are read as (batch, heads, len, d), for
the reason that the forward pass gives.

block_q, block_kv: the queries and keys of one step, in all kernels. A step holds a few float32 arrays of block_q x block_kv.

Source: Dao, "FlashAttention-2" (2023), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import (
    LANES,
    VMEM_BYTES,
    block,
    dot,
    dtype_refused,
    in_order,
    interpreter,
    off_grid,
    over_vmem,
    padded,
    positions,
    quotient,
    row_block,
    step_along,
    sublanes,
)
from portakern.backends.pallas.tpu.attention import Band, both, head_blocks, key, same_segment, where_stretched, words
from portakern.call import Call
from portakern.specs.attention import scale_of, score_unit

Index = Callable[..., tuple[Any, Any, Any]]


def fit(call: Call, tiling: Mapping[str, int]) -> Mapping[str, int]:
    """Half of both, as often as VMEM demands."""
    bq, bkv = tiling["block_q"], tiling["block_kv"]
    while resident(call, bq, bkv) > VMEM_BYTES and bkv > LANES:
        bq, bkv = max(LANES, bq // 2), bkv // 2
    return {"block_q": bq, "block_kv": bkv}


def grains(call: Call) -> tuple[int, int]:
    """The native grid that block_q and block_kv lie on: sublanes, but lanes where segment ids or a bias have that axis last."""
    segments, rows = call.arrays["q_segment_ids"] is not None, sublanes(call.arrays["q"].dtype)
    return LANES if segments else rows, LANES if segments or call.arrays["bias"] is not None else rows


def resident(call: Call, bq: int, bkv: int) -> int:
    """The VMEM, in bytes, of one step of the kernel of d_k and d_v, which needs most: what is streamed twice, sums, and P, dP, dS and the mask of the step."""
    bias, heads = call.arrays["bias"], padded(call.dims["d"]) + padded(call.dims["dv"])
    streamed = call.arrays["q"].dtype.itemsize * heads * (bq + 2 * bkv) + (
        0 if bias is None else bias.dtype.itemsize * bq * padded(bkv)
    )
    split = 6 * heads * (bq + bkv) if call.dtype == "float32" else 0  # float32 operands as three bfloat16 summands
    return 2 * streamed + 4 * bkv * heads + 16 * bkv * padded(bq) + split


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    of_q, of_kv = grains(call)
    bq, bkv = block(call.dims["q_len"], tiling["block_q"], of_q), block(call.dims["kv_len"], tiling["block_kv"], of_kv)
    return (
        dtype_refused(call)
        or off_grid("block_q", tiling["block_q"], call.dims["q_len"], of_q)
        or off_grid("block_kv", tiling["block_kv"], call.dims["kv_len"], of_kv)
        or over_vmem(resident(call, bq, bkv), "block_q or block_kv")
    )


class Scores(NamedTuple):
    """How scores come of dots (``score_unit``)."""

    pre: float | None
    softcap: float | None
    unit: float
    scale: float

    @classmethod
    def of(cls, call: Call) -> Scores:
        pre, unit = score_unit(call)
        return cls(pre, call.options["softcap"], unit, scale_of(call))

    def weights(self, a: Any, b: Any, bias: Any, lse: Any, allowed: Any) -> tuple[Any, Any]:
        """P of the block a b^T of dots, and the slope of its softcap (None: 1)."""
        s, slope = dot(a, b, (1, 1)), None
        if self.pre is not None:
            s = s * self.pre
        if self.softcap is not None:
            s = jnp.tanh(s)
            slope = 1 - s * s
        if bias is not None:
            s = (s if self.softcap is None else s * self.softcap) + bias
        return selected(allowed, jnp.exp((s if self.unit == 1.0 else s * self.unit) - lse)), slope


def selected(allowed: Any, x: Any) -> Any:
    return x if allowed is None else jnp.where(allowed, x, 0.0)


def within(x: Any, start: Any, length: int) -> Any:
    """x, a block of rows from ``start``, with 0 for those beyond ``length``: what a product sums over may hold no NaN, since 0 * NaN is NaN."""
    return jnp.where(positions(x.shape, 0, start) < length, x, 0) if length % x.shape[0] else x


def turned(band: Band, q_len: int) -> Band:
    """The band as keys see it: which query blocks a key block is seen by. Its own block_q is then a block of keys, and kv_len is q_len."""
    first, last = (None if bound is None else -bound for bound in (band.last, band.first))
    return Band(first, last, q_len, band.block_kv, band.block_q)


def by_query(*refs: Any, names: tuple[str, ...], band: Band, scores: Scores) -> None:
    ref = dict(zip(names, refs, strict=True))
    i, step = step_along(2), step_along(3)
    first, last = band.span(i)
    j = first + step

    @pl.when(step == 0)
    def start() -> None:
        ref["acc"][...] = jnp.zeros_like(ref["acc"])

    def visit(edge: bool) -> None:
        k, bias = ref["k"][...], ref["bias"][...].astype(jnp.float32) if "bias" in ref else None
        segments = same_segment(ref["q_segment_ids"], ref["kv_segment_ids"]) if "q_segment_ids" in ref else None
        allowed = both(band.allowed(i, j) if edge else None, segments)
        lse, delta = ref["lse_delta"][0:1, :].T, ref["lse_delta"][1:2, :].T
        p, slope = scores.weights(ref["q"][...], k, bias, lse, allowed)
        d_s = selected(allowed, p * (dot(ref["d_o"][...], ref["v"][...], (1, 1)) - delta))
        d_s = d_s if slope is None else selected(allowed, d_s * slope)
        ref["acc"][...] += dot(d_s.astype(k.dtype), within(k, j * band.block_kv, band.kv_len) if edge else k, (1, 0))

    on_band(band, i, j, j <= last, visit)

    @pl.when(step == pl.num_programs(3) - 1)
    def finish() -> None:
        ref["d_q"][...] = (ref["acc"][...] * scores.scale).astype(ref["d_q"].dtype)


def by_key(*refs: Any, names: tuple[str, ...], band: Band, scores: Scores) -> None:
    ref = dict(zip(names, refs, strict=True))
    j, head, step = step_along(2), step_along(3), step_along(4)
    first, last = band.span(j)
    i = first + step

    @pl.when((head == 0) & (step == 0))
    def start() -> None:
        for acc in ("k_acc", "v_acc"):
            if acc in ref:
                ref[acc][...] = jnp.zeros_like(ref[acc])

    def visit(edge: bool) -> None:
        q, d_o = ref["q"][...], ref["d_o"][...]
        allowed, p, slope = weights_by_key(ref, band, scores, j, i, edge)
        if edge:
            q, d_o = (within(x, i * band.block_kv, band.kv_len) for x in (q, d_o))
        if "v_acc" in ref:
            ref["v_acc"][...] += dot(p.astype(d_o.dtype), d_o, (1, 0))
        if "k_acc" in ref:
            d_s = selected(allowed, p * (dot(ref["v"][...], d_o, (1, 1)) - ref["lse_delta"][1:2, :]))
            d_s = d_s if slope is None else selected(allowed, d_s * slope)
            ref["k_acc"][...] += dot(d_s.astype(q.dtype), q, (1, 0))

    on_band(band, j, i, i <= last, visit)

    @pl.when((head == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1))
    def finish() -> None:
        if "k_acc" in ref:
            ref["d_k"][...] = (ref["k_acc"][...] * scores.scale).astype(ref["d_k"].dtype)
        if "v_acc" in ref:
            ref["d_v"][...] = ref["v_acc"][...].astype(ref["d_v"].dtype)


def by_bias(*refs: Any, names: tuple[str, ...], band: Band, scores: Scores, one_row: bool) -> None:
    ref = dict(zip(names, refs, strict=True))
    j, summed = step_along(3), [step_along(axis) for axis in (4, 5, 6)]
    first, last = band.span(j)
    i = first + summed[2] if one_row else step_along(2)

    @pl.when((summed[0] == 0) & (summed[1] == 0) & (summed[2] == 0))
    def start() -> None:
        ref["acc"][...] = jnp.zeros_like(ref["acc"])

    def visit(edge: bool) -> None:
        allowed, p, _ = weights_by_key(ref, band, scores, j, i, edge)
        d_s = selected(allowed, p * (dot(ref["v"][...], ref["d_o"][...], (1, 1)) - ref["lse_delta"][1:2, :]))
        ref["acc"][...] += jnp.sum(d_s, axis=1, keepdims=True) if one_row else d_s

    on_band(band, j, i, (first <= i) & (i <= last), visit)

    @pl.when(
        (summed[0] == pl.num_programs(4) - 1)
        & (summed[1] == pl.num_programs(5) - 1)
        & (summed[2] == pl.num_programs(6) - 1)
    )
    def finish() -> None:
        ref["d_bias"][...] = ref["acc"][...].T.astype(ref["d_bias"].dtype)


def weights_by_key(ref: dict[str, Any], band: Band, scores: Scores, j: Any, i: Any, edge: bool) -> tuple[Any, Any, Any]:
    """(which pairs are allowed, P, the slope) of key block j, as rows, and query block i."""
    bias = ref["bias"][...].astype(jnp.float32).T if "bias" in ref else None
    segments = same_segment(ref["kv_segment_ids"], ref["q_segment_ids"]) if "q_segment_ids" in ref else None
    allowed = both(band.allowed(j, i) if edge else None, segments)
    return allowed, *scores.weights(ref["k"][...], ref["q"][...], bias, ref["lse_delta"][0:1, :], allowed)


def on_band(band: Band, row: Any, column: Any, visible: Any, visit: Callable[[bool], None]) -> None:
    """Visit the block (row, column) if some pair of it is visible, with the mask only if not all are."""
    inside = band.inside(row, column)
    pl.when(visible & inside)(lambda: visit(False))
    pl.when(visible & (inside ^ True))(lambda: visit(True))


def by_row(*refs: Any, names: tuple[str, ...]) -> None:
    ref = dict(zip(names, refs, strict=True))
    delta = jnp.sum(ref["d_o"][...].astype(jnp.float32) * ref["o"][...].astype(jnp.float32), axis=1, keepdims=True).T
    if "d_lse" in ref:
        delta = delta - ref["d_lse"][...]
    lse = ref["lse"][...]
    unseen = lse == -jnp.inf
    ref["lse_delta"][0:1, :] = jnp.where(unseen, jnp.inf, lse)
    ref["lse_delta"][1:2, :] = jnp.where(unseen, 0.0, delta)


class Operands:
    """The arrays that every kernel reads, in the layout in which it reads them, and their blocks at the places that a kernel's grid gives."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.heads = {name: jnp.swapaxes(call.arrays[name], 1, 2) for name in ("q", "k", "v", "d_o")}
        self.ids = {
            name: words(call.arrays[name])
            for name in ("q_segment_ids", "kv_segment_ids")
            if call.arrays[name] is not None
        }
        self.lse_delta = row_statistics(call, self.heads["d_o"])

    def at(self, bq: int, bkv: int, query: Index, key: Index) -> Blocks:
        """What a kernel reads: ``query`` and ``key`` give the (batch, head, block) of a step."""
        (batch, heads, _, q_len), bias = self.lse_delta.shape, self.call.arrays["bias"]
        lse_delta = jnp.pad(self.lse_delta, ((0, 0), (0, 0), (0, 0), (0, -q_len % bq))).reshape(batch, heads, 2, -1, bq)
        found = {name: (self.heads[name], head_blocks(bq, self.heads[name].shape[3], query)) for name in ("q", "d_o")}
        found |= {name: (self.heads[name], head_blocks(bkv, self.heads[name].shape[3], key)) for name in ("k", "v")}
        found["lse_delta"] = (
            jnp.swapaxes(lse_delta, 2, 3),
            pl.BlockSpec((None, None, None, 2, bq), lambda *step: (*query(*step), 0, 0)),
        )
        if bias is not None:
            found["bias"] = bias, bias_blocks(bias.shape, bq, bkv, query, key)
        for name, ids in self.ids.items():
            length, place = (bq, query) if name == "q_segment_ids" else (bkv, key)
            found[name] = ids, id_blocks(ids.shape[1], length, place)
        return found


def row_statistics(call: Call, d_o: jax.Array) -> jax.Array:
    """(batch, heads, 2, q_len): lse and Delta of every query. A kernel, because XLA's sums on a host have bits that depend on how many rows there are."""
    batch, heads, q_len, dv = d_o.shape
    rows = row_block(call, q_len, padded(max(2**18 // padded(dv), 1)), LANES)
    by_head = head_blocks(rows, dv, lambda b, h, i: (b, h, i))
    at_row = [pl.BlockSpec((None, None, n, rows), lambda b, h, i: (b, h, 0, i)) for n in (1, 2)]
    inputs = {"o": (jnp.swapaxes(call.arrays["o"], 1, 2), by_head), "d_o": (d_o, by_head)}
    inputs |= {
        name: (call.arrays[name][:, :, None], at_row[0]) for name in ("lse", "d_lse") if call.arrays[name] is not None
    }
    outputs = {"lse_delta": (jax.ShapeDtypeStruct((batch, heads, 2, q_len), jnp.float32), at_row[1])}
    return launch(call, by_row, (batch, heads, pl.cdiv(q_len, rows)), 0, inputs, outputs)["lse_delta"]


def id_blocks(number: int, length: int, at: Index) -> pl.BlockSpec:
    return pl.BlockSpec((None, number, length), lambda *step: (at(*step)[0], 0, at(*step)[2]))


def bias_blocks(shape: tuple[int, ...], bq: int, bkv: int, query: Index, key: Index) -> pl.BlockSpec:
    at = where_stretched(shape[:3], query)
    return pl.BlockSpec((None, None, 1 if shape[2] == 1 else bq, bkv), lambda *step: (*at(*step), key(*step)[2]))


Blocks = dict[str, tuple[Any, pl.BlockSpec]]
"""Name -> (array, or the form of one that is written; its blocks)."""


def launch(call: Call, kernel: Callable[..., None], grid: tuple[int, ...], summed: int, inputs: Blocks, outputs: Blocks, scratch: Any = MappingProxyType({}),
           pairs: int = 0, depth: int = 0) -> dict[str, jax.Array]:  # fmt: skip
    """Run ``kernel(*refs, names=...)``, whose last ``summed`` grid axes run in order, and each of whose steps does ``depth`` products for each of ``pairs``."""
    moved = sum(x.size * x.dtype.itemsize for x, _ in (*inputs.values(), *outputs.values()))
    results = pl.pallas_call(
        partial(kernel, names=(*inputs, *outputs, *scratch)),
        grid=grid,
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in outputs.values()],
        out_shape=[form for form, _ in outputs.values()],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
        compiler_params=in_order(*["parallel"] * (len(grid) - summed), *["arbitrary"] * summed),
        cost_estimate=pl.CostEstimate(
            flops=2 * prod(grid) * pairs * depth, transcendentals=prod(grid) * pairs, bytes_accessed=moved
        ),
        interpret=interpreter(call),
        name="portakern_attention_vjp_" + "_".join(outputs),
    )(*(array for array, _ in inputs.values()))
    return dict(zip(outputs, results, strict=True))


def query_gradient(call: Call, tiling: Mapping[str, int], operands: Operands) -> dict[str, jax.Array]:
    (batch, q_len, heads, d), group, (of_q, of_kv) = call.arrays["q"].shape, call.dims["group"], grains(call)
    bq, bkv = row_block(call, q_len, tiling["block_q"], of_q), block(call.dims["kv_len"], tiling["block_kv"], of_kv)
    band = Band.of(call, bq, bkv)

    def query(b: Any, h: Any, i: Any, step: Any) -> tuple[Any, Any, Any]:
        return b, h, i

    def key(b: Any, h: Any, i: Any, step: Any) -> tuple[Any, Any, Any]:
        return b, quotient(h, group), band.block(i, step)

    grid = batch, heads, pl.cdiv(q_len, bq), band.steps()
    outputs = {
        "d_q": (jax.ShapeDtypeStruct((batch, heads, q_len, d), call.arrays["q"].dtype), head_blocks(bq, d, query))
    }
    kernel = partial(by_query, band=band, scores=Scores.of(call))
    found = launch(
        call,
        kernel,
        grid,
        1,
        operands.at(bq, bkv, query, key),
        outputs,
        {"acc": (bq, d)},
        bq * bkv,
        2 * d + call.dims["dv"],
    )
    return {"d_q": jnp.swapaxes(found["d_q"], 1, 2)}


def key_gradients(call: Call, tiling: Mapping[str, int], operands: Operands) -> dict[str, jax.Array]:
    group, (of_q, of_kv), q_len = call.dims["group"], grains(call), call.dims["q_len"]
    batch, kv_len, kv_heads, _ = call.arrays["k"].shape
    bq, bkv = block(q_len, tiling["block_q"], of_q), row_block(call, kv_len, tiling["block_kv"], of_kv)
    band = turned(Band.of(call, bq, bkv), q_len)

    def query(b: Any, h: Any, j: Any, head: Any, step: Any) -> tuple[Any, Any, Any]:
        return b, h * group + head, band.block(j, step)

    def key(b: Any, h: Any, j: Any, head: Any, step: Any) -> tuple[Any, Any, Any]:
        return b, h, j

    outputs, scratch, depth = {}, {}, call.dims["d"] + call.dims["dv"]
    for name in ("k", "v"):
        if f"d_{name}" in call.wants:
            array = operands.heads[name]
            outputs[f"d_{name}"] = jax.ShapeDtypeStruct(array.shape, array.dtype), head_blocks(bkv, array.shape[3], key)
            scratch[f"{name}_acc"], depth = (bkv, array.shape[3]), depth + array.shape[3]
    grid = batch, kv_heads, pl.cdiv(kv_len, bkv), group, band.steps()
    kernel = partial(by_key, band=band, scores=Scores.of(call))
    found = launch(call, kernel, grid, 2, operands.at(bq, bkv, query, key), outputs, scratch, bq * bkv, depth)
    return {name: jnp.swapaxes(gradient, 1, 2) for name, gradient in found.items()}


def bias_gradient(call: Call, tiling: Mapping[str, int], operands: Operands) -> dict[str, jax.Array]:
    (batch, q_len, heads, _), group, (of_q, of_kv), kv_len = (
        call.arrays["q"].shape,
        call.dims["group"],
        grains(call),
        call.dims["kv_len"],
    )
    bias = call.arrays["bias"]
    batches, bias_heads, rows, _ = bias.shape
    bq, bkv = row_block(call, q_len, tiling["block_q"], of_q), row_block(call, kv_len, tiling["block_kv"], of_kv)
    band, one_row = turned(Band.of(call, bq, bkv), q_len), rows == 1

    def query(
        b: Any, h: Any, i: Any, j: Any, batch: Any, head: Any, step: Any
    ) -> tuple[Any, Any, Any]:  # of each pair of axes one has a single step
        return b + batch, h + head, band.block(j, step) if one_row else i

    def key(b: Any, h: Any, i: Any, j: Any, batch: Any, head: Any, step: Any) -> tuple[Any, Any, Any]:
        return b + batch, quotient(h + head, group), j

    grid = (
        batches,
        bias_heads,
        pl.cdiv(rows, bq),
        pl.cdiv(kv_len, bkv),
        batch // batches,
        heads // bias_heads,
        band.steps() if one_row else 1,
    )
    outputs = {"d_bias": (jax.ShapeDtypeStruct(bias.shape, bias.dtype), bias_blocks(bias.shape, bq, bkv, query, key))}
    kernel, scratch = (
        partial(by_bias, band=band, scores=Scores.of(call), one_row=one_row),
        {"acc": (bkv, 1 if one_row else bq)},
    )
    return launch(
        call,
        kernel,
        grid,
        3,
        operands.at(bq, bkv, query, key),
        outputs,
        scratch,
        bq * bkv,
        call.dims["d"] + call.dims["dv"],
    )


@BACKEND.implements("attention_vjp", key=key, fit=fit, supports=supports)
def attention_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    operands = Operands(call)
    found: dict[str, jax.Array] = {}
    if "d_q" in call.wants:
        found |= query_gradient(call, tiling, operands)
    if "d_k" in call.wants or "d_v" in call.wants:
        found |= key_gradients(call, tiling, operands)
    if "d_bias" in call.wants:
        found |= bias_gradient(call, tiling, operands)
    return tuple(found.get(output.name) for output in call.spec.outputs)
