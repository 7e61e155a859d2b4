"""Softmax attention on TPUs, never holding a row of scores: o = softmax(scale q k^T) v, one block of queries against one block of keys at a time.

q: (batch, q_len, kv_heads*group, d), k: (batch, kv_len, kv_heads, d), v: (batch, kv_len, kv_heads, dv)
-> o: (batch, q_len, kv_heads*group, dv), lse: (batch, kv_heads*group, q_len).

Scores and m stay in the unit in which they arise (``score_unit``). The grid is (batch, heads, query blocks, key blocks), key blocks in order. m is the running maximum of a query's scores, l the sum of exp(s - m) and acc the
sum of exp(s - m) v, all float32 in VMEM; a block that raises m scales l and acc down by exp(m_old - m_new); the last step writes acc / l.
Query head h reads kv head h // group through its index map. `Band` says which key blocks a query block can see: the grid has steps for no more than those,
and a step past the last one computes nothing and repeats the block before it in its index map, so that nothing is fetched either. Blocks wholly inside the
band skip its mask.

A block of one head is (block, d), while the arrays hold heads second-minor, where a block of 1 is off the (8, 128) grid: q, k and v are read, and o is
written, as (batch, heads, len, d), a transposition that XLA makes. The view (batch, len, heads*d) would not spare the
copy (on a TPU it is a relayout too, since tiles span heads) and its blocks are strided columns: with them the TPU compiler's own estimate for a
bfloat16 4096 x 4096 x 128 attention was 39 % higher.

block_q, block_kv: the queries and keys of one step. Large block_kv feeds the MXU; the scores of one step, block_q x block_kv in float32, bound both.

Source: Dao, "FlashAttention-2" (2023), algorithm 1; Milakov and Gimelshein (2018) for the running maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.common import (
    LANES,
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
    settled,
    step_along,
    sublanes,
)
from portakern.call import Call
from portakern.specs.attention import score_unit


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "d": max(call.dims["d"], call.dims["dv"])}


def grains(call: Call) -> tuple[int, int]:
    """The native grid that block_q and block_kv lie on: sublanes, but lanes where lse, segment ids or a bias have that axis last."""
    segments, rows = call.arrays["q_segment_ids"] is not None, sublanes(call.arrays["q"].dtype)
    return LANES if segments or "lse" in call.wants else rows, LANES if segments or call.arrays[
        "bias"
    ] is not None else rows


def blocks(call: Call, tiling: Mapping[str, int]) -> tuple[int, int]:
    of_q, of_kv = grains(call)
    return row_block(call, call.dims["q_len"], tiling["block_q"], of_q), block(
        call.dims["kv_len"], tiling["block_kv"], of_kv
    )


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    of_q, of_kv = grains(call)
    bq, bkv = blocks(call, tiling)
    d, dv, lanes, item = padded(call.dims["d"]), padded(call.dims["dv"]), padded(bkv), call.arrays["q"].dtype.itemsize
    bias = call.arrays["bias"]
    streamed = item * (bq * d + bkv * (d + dv) + bq * dv) + (
        0 if bias is None else bias.dtype.itemsize * lanes * (8 if bias.shape[2] == 1 else bq)
    )
    resident = 2 * streamed + 4 * bq * (dv + 2 * LANES) + 12 * bq * lanes  # the last: s, p and the mask of one step
    return (
        dtype_refused(call)
        or off_grid("block_q", tiling["block_q"], call.dims["q_len"], of_q)
        or off_grid("block_kv", tiling["block_kv"], call.dims["kv_len"], of_kv)
        or over_vmem(resident, "block_q or block_kv")
    )


class Band(NamedTuple):
    """The keys that causality and the window let a query see: first <= key - query <= last, where None is no bound."""

    first: int | None
    last: int | None
    kv_len: int
    block_q: int
    block_kv: int

    @classmethod
    def of(cls, call: Call, block_q: int, block_kv: int) -> Band:
        left, right = call.options["window"] or (None, None)
        if call.options["is_causal"]:
            right = 0 if right is None else min(right, 0)
        q_len, kv_len = call.dims["q_len"], call.dims["kv_len"]
        aligned, far = kv_len - q_len, kv_len + q_len  # no window wider than that says more, and an int32 holds it
        first = None if left is None else aligned - min(left, far)
        return cls(first, None if right is None else aligned + min(right, far), kv_len, block_q, block_kv)

    def span(self, i: Any) -> tuple[Any, Any]:
        """The first and the last key block that query block i can see; where it sees none the last lies before the first."""
        low, high = (max, min) if isinstance(i, int) else (jnp.maximum, jnp.minimum)
        first, last = 0, (self.kv_len - 1) // self.block_kv
        if self.first is not None:
            first = quotient(low(i * self.block_q + self.first, 0), self.block_kv)
        if self.last is not None:
            key = high(low((i + 1) * self.block_q - 1 + self.last, -1), self.kv_len - 1)
            last = quotient(key + self.block_kv, self.block_kv) - 1
        return first, last

    def steps(self) -> int:
        """Key blocks that any one query block can see, at most."""
        whole = pl.cdiv(self.kv_len, self.block_kv)
        if self.first is None or self.last is None:
            return whole
        width = max(1, self.block_q + self.last - self.first)
        return min(whole, pl.cdiv(width - 1, self.block_kv) + 1)

    def block(self, i: Any, step: Any) -> Any:
        """The key block that a step of query block i has resident: past the last visible one, that one again."""
        first, last = self.span(i)
        return jnp.clip(first + step, 0, jnp.maximum(last, 0))

    def inside(self, i: Any, j: Any) -> Any:
        """Whether every pair of query block i and key block j is visible."""
        within: Any = True
        if self.kv_len % self.block_kv:
            within &= (j + 1) * self.block_kv <= self.kv_len
        if self.first is not None:
            within &= j * self.block_kv - (i + 1) * self.block_q >= self.first - 1
        if self.last is not None:
            within &= (j + 1) * self.block_kv - i * self.block_q <= self.last + 1
        return within

    def allowed(self, i: Any, j: Any) -> Any:
        """Which pairs of query block i and key block j are visible, or None where all are."""
        shape = (self.block_q, self.block_kv)
        key = positions(shape, 1, j * self.block_kv)
        offset = key - positions(shape, 0, i * self.block_q)
        rules = []
        if self.kv_len % self.block_kv:
            rules.append(key < self.kv_len)
        if self.first is not None:
            rules.append(offset >= self.first)
        if self.last is not None:
            rules.append(offset <= self.last)
        return both(*rules)


def both(*rules: Any) -> Any:
    rules = tuple(rule for rule in rules if rule is not None)
    return None if not rules else rules[0] if len(rules) == 1 else rules[0] & both(*rules[1:])


def kernel(
    *refs: Any,
    names: tuple[str, ...],
    band: Band,
    pre: float | None,
    softcap: float | None,
    unit: float,
    interpreted: bool,
) -> None:
    ref = dict(zip(names, refs, strict=True))
    m_ref, l_ref, acc_ref = ref["m"], ref["l"], ref["acc"]
    i, step = step_along(2), step_along(3)
    first, last = band.span(i)
    j = first + step

    @pl.when(step == 0)
    def start() -> None:
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def attend(edge: bool) -> None:
        s = dot(ref["q"][...], ref["k"][...], (1, 1))
        if pre is not None:
            s = s * pre
        if softcap is not None:
            s = jnp.tanh(s)
        if softcap is not None and "bias" in ref:
            s = s * softcap
        if interpreted:
            s = settled(s)
        if "bias" in ref:
            s = s + ref["bias"][...].astype(jnp.float32)
        segments = same_segment(ref["q_segment_ids"], ref["kv_segment_ids"]) if "q_segment_ids" in ref else None
        allowed = both(band.allowed(i, j) if edge else None, segments)
        if allowed is not None:
            s = jnp.where(allowed, s, -jnp.inf)
        m_old = m_ref[...]
        m_new = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))
        origin = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # while a row has seen no key at all
        p = jnp.exp((s - origin) * unit)
        shrink = jnp.exp((m_old - origin) * unit)
        v = ref["v"][...]
        if edge and band.kv_len % band.block_kv:  # p is 0 beyond kv_len, and 0 * NaN is NaN
            v = jnp.where(positions(v.shape, 0, j * band.block_kv) < band.kv_len, v, 0)
        l_ref[...] = l_ref[...] * shrink + jnp.sum(p, axis=1, keepdims=True)
        acc_ref[...] = acc_ref[...] * shrink + dot(p.astype(v.dtype), v, (1, 0))
        m_ref[...] = m_new

    visible, inside = j <= last, band.inside(i, j)
    pl.when(visible & inside)(lambda: attend(edge=False))
    pl.when(visible & (inside ^ True))(lambda: attend(edge=True))

    @pl.when(step == pl.num_programs(3) - 1)
    def finish() -> None:
        l = l_ref[...]
        ref["o"][...] = jnp.where(l == 0, 0.0, acc_ref[...] / l).astype(ref["o"].dtype)
        if "lse" in ref:
            ref["lse"][...] = jnp.where(l == 0, -jnp.inf, m_ref[...] * unit + jnp.log(l)).T


def same_segment(rows: Any, columns: Any) -> Any:
    """Which pairs of this step share a segment: every 32-bit word of their ids is equal."""
    return both(*(columns[word : word + 1, :] == rows[word : word + 1, :].T for word in range(rows.shape[0])))


def words(ids: jax.Array) -> jax.Array:
    """(batch, len) segment ids as (batch, words, len) int32: a TPU has no 64-bit integers."""
    if ids.dtype.itemsize < 8:
        return ids.astype(jnp.int32)[:, None]
    return jnp.moveaxis(lax.bitcast_convert_type(ids, jnp.int32), -1, 1)


def head_blocks(length: int, d: int, at: Callable[..., tuple[Any, Any, Any]]) -> pl.BlockSpec:
    """The (length, d) blocks of a (batch, heads, len, d) array at the (batch, head, position) that `at` gives for a grid step."""
    return pl.BlockSpec((None, None, length, d), lambda *step: (*at(*step), 0))


def where_stretched(extents: tuple[int, ...], at: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """The index map `at`, answering 0 on the axes that broadcast."""
    return lambda *step: tuple(0 if extent == 1 else index for extent, index in zip(extents, at(*step), strict=True))


@BACKEND.implements("attention", key=key, supports=supports)
def attention(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array, jax.Array | None]:
    q, k, v, bias = (call.arrays[name] for name in ("q", "k", "v", "bias"))
    batch, q_len, heads, d = q.shape
    dv, group = v.shape[3], call.dims["group"]
    bq, bkv = blocks(call, tiling)
    band = Band.of(call, bq, bkv)

    def at_query(b: Any, h: Any, i: Any, step: Any) -> tuple[Any, Any, Any]:
        return b, h, i

    def at_key(b: Any, h: Any, i: Any, step: Any) -> tuple[Any, Any, Any]:
        return b, quotient(h, group), band.block(i, step)

    inputs = {
        "q": (jnp.swapaxes(q, 1, 2), head_blocks(bq, d, at_query)),
        "k": (jnp.swapaxes(k, 1, 2), head_blocks(bkv, d, at_key)),
        "v": (jnp.swapaxes(v, 1, 2), head_blocks(bkv, dv, at_key)),
    }
    if bias is not None:
        at = where_stretched(bias.shape[:3], lambda b, h, i, step: (b, h, i))
        rows = 1 if bias.shape[2] == 1 else bq
        inputs["bias"] = bias, pl.BlockSpec((None, None, rows, bkv), lambda *step: (*at(*step), band.block(*step[2:])))
    if call.arrays["q_segment_ids"] is not None:
        q_ids, kv_ids = words(call.arrays["q_segment_ids"]), words(call.arrays["kv_segment_ids"])
        inputs["q_segment_ids"] = q_ids, pl.BlockSpec((None, q_ids.shape[1], bq), lambda b, h, i, step: (b, 0, i))
        inputs["kv_segment_ids"] = (
            kv_ids,
            pl.BlockSpec((None, kv_ids.shape[1], bkv), lambda b, h, i, step: (b, 0, band.block(i, step))),
        )

    outputs = {"o": (jax.ShapeDtypeStruct((batch, heads, q_len, dv), q.dtype), head_blocks(bq, dv, at_query))}
    if "lse" in call.wants:
        spec = pl.BlockSpec((None, None, 1, bq), lambda b, h, i, step: (b, h, 0, i))
        outputs["lse"] = jax.ShapeDtypeStruct((batch, heads, 1, q_len), jnp.float32), spec

    pre, unit = score_unit(call)
    steps = band.steps()
    pairs = batch * heads * q_len * min(call.dims["kv_len"], steps * bkv)
    results = pl.pallas_call(
        partial(
            kernel,
            names=(*inputs, *outputs, "m", "l", "acc"),
            band=band,
            pre=pre,
            softcap=call.options["softcap"],
            unit=unit,
            interpreted=call.interpret,
        ),
        grid=(batch, heads, pl.cdiv(q_len, bq), steps),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in outputs.values()],
        out_shape=[shape for shape, _ in outputs.values()],
        scratch_shapes=[pltpu.VMEM((bq, width), jnp.float32) for width in (1, 1, dv)],
        compiler_params=in_order("parallel", "parallel", "parallel", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (d + dv),
            transcendentals=pairs,
            bytes_accessed=q.dtype.itemsize * (batch * heads * q_len * (d + dv) + pairs // bq * (d + dv)),
        ),
        interpret=interpreter(call),
        name="portakern_attention",
    )(*(array for array, _ in inputs.values()))
    return jnp.swapaxes(results[0], 1, 2), results[1][:, :, 0] if "lse" in call.wants else None
