"""Attention of few queries on Hopper, as decoding has it, by splits of the keys: o = softmax(scale q k^T) v.

q: (batch, q_len, kv_heads*group, d), k: (batch, kv_len, kv_heads, d), v: (batch, kv_len, kv_heads, dv)
-> o: (batch, q_len, kv_heads*group, dv), lse and lse_low: (batch, kv_heads*group, q_len). Heads are up to 256 wide, and
a group has up to 64 queries.

The queries of all heads of a group are the rows of one tile, so that their keys are read once: row r is query
r // group of head r % group. The keys are cut into splits of whole tiles, as ``flash`` says. A block walks a split
as ``gpu`` walks each of all, and leaves what it knows of each row:

    m_c = max s_j,  l_c = sum exp(s_j - m_c),  acc_c = sum exp(s_j - m_c) v_j,  over the keys j of split c

A second kernel, a block a row, merges these in the order of the keys:

    m' = max(m, m_c),  l' = exp(m - m') l + exp(m_c - m') l_c,  acc' = exp(m - m') acc + exp(m_c - m') acc_c

and in the end o = acc / l, lse = m + log l. The kernel of ``gpu`` does the same to the splits that it walks one after
the other, with the same tiling. So no bit of a query depends on its neighbours, nor on how many there are, nor on
whether they fit one tile.

block_q: 64, the rows of a tile; block_kv: keys of a tile; stages: tiles of keys, and of values, that are on their way
or in use at a time; splits, chunk: what makes a split.

Source: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023); the walk over keys is FlashAttention-3's (Shah et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import FlashConfig
from portakern.backends.pallas.lib.band import Band
from portakern.backends.pallas.lib.blocks import Refs, padded, quotient
from portakern.backends.pallas.lib.mosaic_gpu import attention as online
from portakern.backends.pallas.lib.mosaic_gpu.chip import (
    LANES,
    WARPS,
    in_slots,
    launch,
    over_shared,
    padded_rows,
    store,
    whole_pieces,
)
from portakern.backends.pallas.lib.mosaic_gpu.flash import QUERIES, Merge, MosaicFlashPlan, QueryTile, rings
from portakern.backends.pallas.lib.mosaic_gpu.head_parts import LeavingBuffers, starts_of
from portakern.backends.pallas.lib.segments import span_at, spans_of
from portakern.core.backend import Drawn
from portakern.core.call import Call

DRAWN = Drawn(("alibi_slopes", "out_dtype"), most={"q_len": 8, "group": 8})

THREADS = LANES * WARPS
"""Elements of a row that the second kernel works on at a time: one a thread."""

STRIDED = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
"""Where these lie. Where it is not said, Mosaic looks for it, and takes seconds for what many splits hold."""

TOGETHER = 8
"""Shares of a row that are on their way at a time."""


@dataclass(frozen=True)
class Packed(MosaicFlashPlan):
    """The plan of queries that share a tile: ``heads`` are those of k, ``group`` is 1, and ``q_len`` counts rows, of
    which each query has as many as ``band`` says."""

    merges = False  # a tile is of one split
    scheduled = False

    @property
    def seen(self) -> tuple[int, int]:
        """The first and the last tile of keys that a query sees: never none, but one that no query sees."""
        first, last = self.band.span(0)
        first = min(first, (self.band.kv_len - 1) // self.block_kv)
        return first, max(first, last)

    @property
    def splits(self) -> int:
        """How many splits hold these."""
        first, last = self.seen
        return last // self.split_tiles - first // self.split_tiles + 1

    @property
    def tiles(self) -> int:
        return self.batch * self.heads * self.splits

    def _shared(self, slots: int) -> int:
        return super()._shared(0) + slots * QUERIES * self.parts[1][0] * jnp.dtype(jnp.float32).itemsize

    def queries(self, q: Any, tile: QueryTile, rows: Any) -> Any:
        return q.at[tile.batch, tile.head, rows]

    def tile(self, index: Any, ref: Refs) -> QueryTile:
        """All rows of a head, and the tiles of one split; of segments those that may hold some of these rows', and
        never none."""
        spans = getattr(ref, "spans", None)
        place, batch = quotient(index, self.splits), quotient(index, self.splits * self.heads)
        first, last = self.seen
        start = (index - place * self.splits + first // self.split_tiles) * self.split_tiles
        begin = jnp.maximum(start, first)
        steps = jnp.minimum(start + self.split_tiles, last + 1) - begin
        if spans is not None:
            first, after = span_at(spans, batch, 0)
            end = begin + steps
            begin = jnp.clip(first, begin, end - 1)
            steps = jnp.maximum(jnp.minimum(after, end) - begin, 1)
        row = 0 * index  # traced: a start that is known is held to the rows that there are
        return QueryTile(batch, place - batch * self.heads, row, begin, steps)

    def split_index(self, tile: QueryTile) -> Any:
        """Which share of its head a tile is."""
        return quotient(tile.first, self.split_tiles) - self.seen[0] // self.split_tiles


def plan_of(call: Call, config: FlashConfig) -> Packed:
    dims, block_kv = call.dims, config.block_kv
    whole = online.plan_of(call, config.replace(block_q=QUERIES))
    changed = {
        "heads": dims["kv_heads"],
        "group": 1,
        "q_len": dims["q_len"] * dims["group"],
        "band": Band.of(call, QUERIES, block_kv, dims["group"]),
    }
    same = {field.name: getattr(whole, field.name) for field in fields(whole)}
    return Packed(**same | changed)


def supports(call: Call, config: FlashConfig) -> str | None:
    if config.block_q != QUERIES:
        return f"block_q={config.block_q} is not supported here: use {QUERIES}, which all queries of a group share"
    rows = call.dims["q_len"] * call.dims["group"]
    if rows > QUERIES:
        return (
            f"{call.dims['q_len']} queries of {call.dims['group']} heads are {rows} rows, more than the {QUERIES} that "
            "decode together: use variant 'gpu'"
        )
    return online.supports(call, config) or over_shared(
        plan_of(call, config).shared, "block_kv or stages", across_warps=False
    )


def copies(call: Call, config: FlashConfig) -> str | None:
    """What XLA copies besides, in words."""
    dims, bias = call.dims, call.arrays["bias"]
    found = []
    if dims["q_len"] > 1 and dims["kv_heads"] > 1:
        found.append("queries of a group are gathered")
    for names, extent in (("q and k", dims["d"]), ("v", dims["dv"])):
        if (wide := whole_pieces(extent, call.dtype)) != extent:
            found.append(f"heads of {names} are padded from {extent} to {wide}")
    if (wide := padded(dims["dv"], THREADS)) != dims["dv"]:
        found.append(f"o is cut from {wide} to {dims['dv']}")
    if bias is not None and (bias.shape[1] * bias.shape[2] > 1 or bias.shape[3] % config.block_kv):
        found.append(f"bias is gathered and padded to whole tiles of {QUERIES} x {config.block_kv}")
    return "; ".join(found) or None


def packed(call: Call, plan: Packed) -> dict[str, jax.Array]:
    """What the kernel reads: q as (batch, kv_heads, rows, d), and bias and segment ids of whole tiles of such rows."""
    q, k, v, bias = (call.arrays[name] for name in ("q", "k", "v", "bias"))
    q_ids, group = call.arrays["q_segment_ids"], call.dims["group"]
    by_head = q.reshape(plan.batch, -1, plan.heads, group, plan.d).swapaxes(1, 2)
    if bias is not None and bias.shape[1] * bias.shape[2] > 1:
        batch, _, _, kv_len = bias.shape
        heads = plan.heads if bias.shape[1] > 1 else 1
        bias = jnp.broadcast_to(bias, (batch, heads * group, call.dims["q_len"], kv_len))
        bias = bias.reshape(batch, heads, group, -1, kv_len).swapaxes(2, 3).reshape(batch, heads, -1, kv_len)
    ids = None if q_ids is None else jnp.repeat(q_ids, group, axis=1), call.arrays["kv_segment_ids"]
    arrays = {"q": by_head.reshape(plan.batch, plan.heads, plan.q_len, plan.d), "k": k, "v": v}
    masks = online.whole_tiles(bias, ids, QUERIES, padded(plan.band.kv_len, plan.block_kv))
    masks |= spans_of(call, call.dims["q_len"], plan.block_kv)
    return {name: padded_rows(x) for name, x in arrays.items()} | masks


def write(ref: Refs, plan: Packed, warpgroup: Any, tile: QueryTile, acc: tuple[Any, ...], l: Any, m: Any) -> None:
    """Leave what is known of the rows after one split. Whole pieces are written, of rows that there are: the copy
    engine does not stop where an axis ends."""
    place = tile.batch, tile.head, plan.split_index(tile)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    ref.known[0] = l
    ref.known[1] = m
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(ref.known, ref.statistics.at[place])
    rows = pl.ds(0, plan.q_len)
    slots = in_slots(len(acc), plan.slots)
    for start, part, (slot, leaving) in zip(starts_of(plan.parts[1]), acc, slots, strict=True):
        plgpu.wait_smem_to_gmem(leaving, wait_read_only=True)
        buffer = ref.written.buffer(part.shape[1], slot)
        buffer.tiled[...] = part
        plgpu.commit_smem()
        there = ref.parts.at[(*place, rows, pl.ds(start, part.shape[1]))]
        plgpu.copy_smem_to_gmem(buffer.copied.at[rows], there)


class SplitState(NamedTuple):
    """What is known of one row after some splits. acc: its elements, ``THREADS`` at a time."""

    l: Any
    m: Any
    acc: tuple[Any, ...]


def combine(ref: Refs, *, plan: Packed, group: int) -> None:
    """Merge a row's splits. One that holds no key that the row sees has l = 0 and m = -inf, and adds nothing."""
    index = lax.axis_index("block")
    place, batch = quotient(index, plan.q_len), quotient(index, plan.q_len * plan.heads)
    row, kv_head = index - place * plan.q_len, place - batch * plan.heads
    query = quotient(row, group)
    head = kv_head * group + row - query * group
    columns = range(0, ref.o.shape[-1], THREADS)

    def known(share: Any) -> SplitState:
        l, m = (ref.statistics[batch, kv_head, share, which, row] for which in (0, 1))
        part = ref.parts.at[batch, kv_head, share, row]
        return SplitState(l, m, tuple(plgpu.load(part.at[pl.ds(c, THREADS)], layout=STRIDED) for c in columns))

    def more(first: Any, count: int, total: SplitState) -> SplitState:
        """The state with so many splits more: all are on their way before the first is merged."""
        for share in [known(first + i) for i in range(count)]:
            of_row = Merge.of(plan.scores, total.m, share.m)
            of_elements = Merge.of(plan.scores, _each(total.m), _each(share.m))
            acc = (of_elements.elements(before, part) for before, part in zip(total.acc, share.acc, strict=True))
            total = SplitState(of_row.rows(total.l, share.l), of_row.maximum, tuple(acc))
        return total

    if plan.has_splits:
        nothing = SplitState(jnp.float32(0.0), jnp.float32(-jnp.inf), tuple(_each(0.0) for _ in columns))
        groups, left = divmod(plan.splits, TOGETHER)
        total = lax.fori_loop(0, groups, lambda i, total: more(i * TOGETHER, TOGETHER, total), nothing)
        total = more(groups * TOGETHER, left, total)
    else:
        total = known(0)
    inverse = 1.0 / jnp.where(total.l == 0.0, 1.0, total.l)
    for column, acc in zip(columns, total.acc, strict=True):
        store(ref.o.at[batch, query, head, pl.ds(column, THREADS)], (acc * inverse).astype(plan.dtype))
    if "l" in ref:
        ref.l[batch, head, query] = total.l
        ref.m[batch, head, query] = total.m


def _each(x: Any) -> Any:
    """A number beside each element."""
    return plgpu.layout_cast(jnp.full((THREADS,), x, jnp.float32), STRIDED)


@BACKEND.implements("attention", key=online.key, supports=supports, config=FlashConfig, copies=copies, drawn=DRAWN)
def attention(call: Call, config: FlashConfig) -> tuple[jax.Array | None, ...]:
    plan, dims = plan_of(call, config), call.dims
    of_shares, wide = (plan.batch, plan.heads, plan.splits), padded(plan.dv, THREADS)
    known = launch(
        call,
        partial(online.kernel, plan=plan, write=write),
        "attention_shares",
        (plan.blocks,),
        inputs=packed(call, plan),
        outputs={
            "parts": jax.ShapeDtypeStruct((*of_shares, plan.q_len, wide), jnp.float32),
            "statistics": jax.ShapeDtypeStruct((*of_shares, 2, QUERIES), jnp.float32),
        },
        scratch=rings(
            plan,
            written=LeavingBuffers((plan.slots,), QUERIES, plan.parts[1], jnp.float32, swizzled=False),
            known=plgpu.SMEM((2, QUERIES), jnp.float32),
        ),
        warpgroups=plan.consumers + 1,
        approximate=True,
        across_warps=False,
    )
    heads = dims["kv_heads"] * dims["group"]
    outputs = {"o": jax.ShapeDtypeStruct((plan.batch, dims["q_len"], heads, wide), plan.dtype)}
    form = jax.ShapeDtypeStruct((plan.batch, heads, dims["q_len"]), jnp.float32)
    # lse is computed from them outside of the kernel: it needs a bitcast, which Mosaic GPU lowers for arrays and fails
    # to lower for scalars (jax 0.11 and 0.12)
    outputs |= dict.fromkeys(("l", "m") if online.saved(call) else (), form)
    found = launch(
        call,
        partial(combine, plan=plan, group=dims["group"]),
        "attention_combine",
        (plan.batch * plan.heads * plan.q_len,),
        inputs=known,
        outputs=outputs,
        scratch={},
        approximate=True,
    )
    numbers = plan.scores.log_sum(found["l"], found["m"]) if online.saved(call) else {}
    return found["o"][..., : plan.dv], *(numbers[name] if name in call.wants else None for name in online.LOG_SUM)
