"""Attention of packed sequences and its gradients on TPUs: for each sequence what ``attention`` and ``attention_vjp``
compute, whose formulas and symbols these are.

q: (tokens, kv_heads*group, d), k: (kv_tokens, kv_heads, d), v: (kv_tokens, kv_heads, dv), starts: (sequences + 1,)
-> o: (tokens, kv_heads*group, dv), lse and lse_low: (kv_heads*group, tokens); d_q, d_k, d_v like q, k and v.

A TPU's blocks begin at multiples of their length. So before a kernel each sequence is moved to such a place
(`PackedTiles`), with zeros behind its end, while the arrays are turned to (kv_heads, rows, d) as attention's kernels
want them too; results are moved back. Rows of q are queries, those of the heads of a group beside each other. How many
blocks a sequence has is known on the device alone: there are as many as any lengths may need. No bit of a row depends
on where its sequence lies.

The grid is (kv_heads, row blocks, key blocks), key blocks in order; of the kernel of d_k and d_v (kv_heads, key blocks,
row blocks). d_sinks is attention's own kernel, on a batch of one. A block reads in scalar memory where its sequence's
blocks on the other side begin, and how long both sides are (`Companion`); a step visits the first of these that the
masks let see each other, and those that follow it. Steps past the last one compute and fetch nothing; there are as many
as the longest sequence needs that the arrays can hold.

block_q, block_kv: the rows and the keys of a step. They do not follow from how many there are.

Source: Dao, "FlashAttention-2" (2023), algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import TilesConfig
from portakern.backends.pallas.lib.blocks import Blocks, Refs, padded
from portakern.backends.pallas.lib.mosaic_tpu.chip import LANES, across, dot, launch, sublanes, vmem_limit
from portakern.backends.pallas.lib.packed import Companion, PackedTiles, last_at_most
from portakern.backends.pallas.tpu import attention as forward
from portakern.backends.pallas.tpu import attention_vjp as backward
from portakern.backends.pallas.tpu._heads import MOST_SCALARS, by_head
from portakern.backends.pallas.tpu.attention import TpuScores, fall_of, log_sum, saved
from portakern.backends.pallas.tpu.attention_vjp import (
    DELTA,
    LOW,
    PLACE,
    SHIFT,
    SLOPE,
    fall_by_key,
    selected,
    weights,
)
from portakern.backends.pallas.tpu.softmax import online_step
from portakern.core.call import Call
from portakern.specs.attention import scale_of, sight
from portakern.specs.varlen_attention import as_attention

ENTRIES = 4
"""Numbers of a block in scalar memory."""

OF_HEADS = ("sinks", "alibi_slopes")
"""Arrays that have heads alone, and no tokens."""


# ------------------------------------------------------------------------------------------------------ what meets what
class Walk(NamedTuple):
    """The blocks that a kernel's own blocks meet, one in each step.

    Attributes:
      own, met: lengths of blocks: of rows and of keys, or where ``by_key`` of keys and of rows.
      left, right, heads: as in `Companion`.
    """

    own: int
    met: int
    left: int | None
    right: int | None
    heads: int
    by_key: bool

    @classmethod
    def of(cls, call: Call, bq: int, bkv: int, by_key: bool) -> Walk:
        left, right = sight(as_attention(call))
        return cls(*((bkv, bq) if by_key else (bq, bkv)), left, right, call.dims["group"], by_key)

    def block(self, table: Any, tile: Any, step: Any) -> tuple[Companion, Any, Any, Any, Any]:
        """(`Companion`, the place of the own block in its sequence, that of the block which a step meets, whether there
        is such a block, its number among all)."""
        at, length, other, other_length = (table[ENTRIES * tile + n] for n in range(ENTRIES))
        rows, kv_len = (other_length, length) if self.by_key else (length, other_length)
        beside = Companion(self.left, self.right, self.heads, rows, kv_len)
        blocks = beside.row_blocks if self.by_key else beside.key_blocks
        first, last = blocks(at, self.own, self.met)
        there = (first + step <= last) & (other_length > 0)
        return beside, at, (first + step) * self.met, there, other + jnp.clip(first + step, 0, jnp.maximum(last, 0))

    def steps(self, table: jax.Array) -> jax.Array:
        """How many blocks any own block meets, at most; at least one."""
        every = table.reshape(-1, ENTRIES).T.reshape(ENTRIES, 1, -1)
        beside, at, _, _, _ = self.block(every, 0, 0)
        blocks = beside.row_blocks if self.by_key else beside.key_blocks
        first, last = blocks(at, self.own, self.met)
        return jnp.maximum(jnp.max(jnp.where(every[3] > 0, last - first + 1, 0)), 1).astype(jnp.int32)

    def visit(self, table: Any, tile: Any, step: Any, add: Callable[[Any, Any], None]) -> None:
        """Run ``add(which pairs are visible, None: all; the first key)`` where a step meets a block."""
        beside, at, met, there, _ = self.block(table, tile, step)
        (row, rows), (key, keys) = (
            ((met, self.met), (at, self.own)) if self.by_key else ((at, self.own), (met, self.met))
        )
        full = beside.full(row, rows, key, keys)
        shape = (self.own, self.met)
        pl.when(there & full)(lambda: add(None, key))
        pl.when(there & (full ^ True))(lambda: add(beside.visible(row, key, shape, self.by_key), key))


# ------------------------------------------------------------------------------------------------------- what calls ask
def key(call: Call) -> dict[str, str | int]:
    return forward.key(as_attention(call))


def blocks(call: Call, config: TilesConfig) -> tuple[int, int]:
    """Rows and keys of a step. Tiles do not shrink with what there is: sums over them would have other bits."""
    grain = sublanes(call.arrays["q"].dtype)
    return padded(config.block_q, grain), padded(config.block_kv, grain)


def resident(call: Call, bq: int, bkv: int) -> int:
    """The VMEM, in bytes, of one step."""
    one = as_attention(call)
    return backward.resident(one, bq, bkv) if call.spec.is_vjp else forward.resident(one, bq, bkv, 1)


def fit(call: Call, config: TilesConfig) -> TilesConfig:
    """Half of both, as often as VMEM demands."""
    bq, bkv = config.block_q, config.block_kv
    while resident(call, bq, bkv) > vmem_limit(call) and bkv > LANES:
        bq, bkv = max(LANES, bq // 2), bkv // 2
    return config if bkv == config.block_kv else TilesConfig(block_q=bq, block_kv=bkv)


def supports(call: Call, config: TilesConfig) -> str | None:
    dims, (bq, bkv) = call.dims, blocks(call, config)
    rows = dims["tokens"] * dims["group"]
    if max(rows, dims["kv_tokens"]) * dims["group"] > 1 << 29:
        return (
            "more than 2^29 rows of queries and keys, counted once for each query head of a key head: places are 32-bit"
        )
    tiles = max(rows // bq, dims["kv_tokens"] // bkv) + dims["sequences"] + 2
    if 4 * ENTRIES * tiles > MOST_SCALARS:
        most = MOST_SCALARS // (4 * ENTRIES)
        return (
            f"{tiles} blocks, one for each sequence among them; scalar memory has room for {most}: choose larger tiles"
        )
    return forward.refused(as_attention(call), config, resident(call, bq, bkv), rows)


# -------------------------------------------------------------------------------------------------------------- kernels
def has_slopes(ref: Refs) -> bool:
    """Whether what gradients read of rows has slopes and places."""
    return bool(ref.of_rows.shape[0] > PLACE.start)


def attend(ref: Refs, *, walk: Walk, scores: TpuScores, saved: list[str]) -> None:
    """o of a block of rows, and what is ``saved`` of the log-sum-exp."""
    tile, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def start() -> None:
        ref.m[...] = jnp.full_like(ref.m, -jnp.inf)
        ref.l[...] = jnp.zeros_like(ref.l)
        ref.acc[...] = jnp.zeros_like(ref.acc)

    def add(visible: Any, key: Any) -> None:
        fall = None
        if "slopes" in ref:
            fall = fall_of(ref.slopes[:1, :].T, ref.slopes[1:, :].T, key, walk.met)
        s, _ = scores.from_dots(dot(ref.q[...], ref.k[...], (1, 1)), None, fall)
        if visible is not None:
            s = jnp.where(visible, s, -jnp.inf)
        m, p, shrink = online_step(ref.m[...], s, axis=1, unit=scores.unit)
        v = ref.v[...]
        ref.l[...] = ref.l[...] * shrink + jnp.sum(p, axis=1, keepdims=True)
        ref.acc[...] = ref.acc[...] * across(shrink, ref.acc.shape[1]) + dot(p.astype(v.dtype), v, (1, 0))
        ref.m[...] = m

    walk.visit(ref.table, tile, step, add)

    @pl.when(step == pl.num_programs(2) - 1)
    def finish() -> None:
        l = ref.l[...]
        total = across(l, ref.acc.shape[1])
        o = jnp.where(total == 0, 0.0, ref.acc[...] / total)
        if "sinks" in ref:
            share, _, _ = log_sum(ref, scores.unit)
            o = o * across(share, o.shape[1])
        ref.o[...] = o.astype(ref.o.dtype)
        if saved:
            numbers = dict(zip(("share", "lse", "lse_low"), log_sum(ref, scores.unit), strict=True))
            for row, name in enumerate(saved):
                ref.lse[row : row + 1, :] = numbers[name][:, :1].T


def by_query(ref: Refs, *, walk: Walk, scores: TpuScores, scale: float) -> None:
    """d_q of a block of rows, summed over the key blocks that they see."""
    tile, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def start() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    def add(visible: Any, key: Any) -> None:
        k = ref.k[...]
        shift, low, delta = (ref.of_rows[row, :].T for row in (SHIFT, LOW, DELTA))
        fall = fall_of(ref.of_rows[SLOPE, :].T, ref.of_rows[PLACE, :].T, key, walk.met) if has_slopes(ref) else None
        p, slope = weights(scores, dot(ref.q[...], k, (1, 1)), None, (shift, low), visible, fall)
        d_s = selected(visible, p * (dot(ref.d_o[...], ref.v[...], (1, 1)) - delta))
        d_dot = d_s if slope is None else selected(visible, d_s * slope)
        ref.acc[...] += dot(d_dot.astype(k.dtype), k, (1, 0))

    walk.visit(ref.table, tile, step, add)

    @pl.when(step == pl.num_programs(2) - 1)
    def finish() -> None:
        ref.d_q[...] = (ref.acc[...] * scale).astype(ref.d_q.dtype)


def by_key(ref: Refs, *, walk: Walk, scores: TpuScores, scale: float) -> None:
    """d_k and d_v of a block of keys, summed over the row blocks that see them, from the sequence's first on."""
    tile, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def start() -> None:
        if "k_acc" in ref:
            ref.k_acc[...] = jnp.zeros_like(ref.k_acc)
        if "v_acc" in ref:
            ref.v_acc[...] = jnp.zeros_like(ref.v_acc)

    def add(visible: Any, key: Any) -> None:
        q, d_o, lse = ref.q[...], ref.d_o[...], (ref.of_rows[SHIFT, :], ref.of_rows[LOW, :])
        fall = fall_by_key(ref, key, walk.own) if has_slopes(ref) else None
        p, slope = weights(scores, dot(ref.k[...], q, (1, 1)), None, lse, visible, fall)
        if "v_acc" in ref:
            ref.v_acc[...] += dot(p.astype(d_o.dtype), d_o, (1, 0))
        if "k_acc" in ref:
            d_s = selected(visible, p * (dot(ref.v[...], d_o, (1, 1)) - ref.of_rows[DELTA, :]))
            d_dot = d_s if slope is None else selected(visible, d_s * slope)
            ref.k_acc[...] += dot(d_dot.astype(q.dtype), q, (1, 0))

    walk.visit(ref.table, tile, step, add)

    @pl.when(step == pl.num_programs(2) - 1)
    def finish() -> None:
        if "k_acc" in ref:
            ref.d_k[...] = (ref.k_acc[...] * scale).astype(ref.d_k.dtype)
        if "v_acc" in ref:
            ref.d_v[...] = ref.v_acc[...].astype(ref.d_v.dtype)


# ------------------------------------------------------------------------------------------------ what they read, write
class PackedOperands:
    """The arrays of a call as kernels read them, and the kernels on them. ``rows`` and ``keys``: their tiles."""

    def __init__(self, call: Call, config: TilesConfig) -> None:
        self.call, self.dims = call, call.dims
        bq, bkv = blocks(call, config)
        self.bq, self.bkv = bq, bkv
        self.rows = PackedTiles.of(call.arrays["q_starts"], self.dims["tokens"], self.dims["group"], bq)
        self.keys = PackedTiles.of(call.arrays["kv_starts"], self.dims["kv_tokens"], 1, bkv)
        of_rows: list[str] = [n for n in ("q", "d_o") if n in call.arrays]
        self.arrays = {n: self.rows.spread(self.by_row(call.arrays[n])) for n in of_rows}
        self.arrays |= {n: self.keys.spread(jnp.swapaxes(call.arrays[n], 0, 1)) for n in ("k", "v")}

    def by_row(self, x: jax.Array) -> jax.Array:
        """(tokens, heads, d) as (kv_heads, tokens * group, d)."""
        return by_head(x[None], self.dims["group"])[0]

    def from_rows(self, x: jax.Array) -> jax.Array:
        """(kv_heads, rows in tiles, d) as (tokens, heads, d)."""
        x = self.rows.gathered(x)
        by_token = x.reshape(x.shape[0], -1, self.dims["group"], x.shape[2])
        return jnp.swapaxes(by_token, 0, 1).reshape(by_token.shape[1], -1, x.shape[2])

    def from_keys(self, x: jax.Array) -> jax.Array:
        """(kv_heads, keys in tiles, d) as (kv_tokens, kv_heads, d)."""
        return jnp.swapaxes(self.keys.gathered(x), 0, 1)

    def sinks(self) -> jax.Array | None:
        """(kv_heads, tiles, 1, block): the sink of each row, -inf of tokens of no sequence; None without sinks."""
        if self.call.arrays["sinks"] is None:
            return None
        dims, sinks = self.dims, self.call.arrays["sinks"].astype(jnp.float32)
        of_tokens = jnp.where(in_a_sequence(self.call)[:, None], sinks, -jnp.inf)
        of_rows = self.rows.spread(self.by_row(of_tokens[..., None]), -jnp.inf)
        return of_rows.reshape(dims["kv_heads"], self.rows.tiles, 1, self.bq)

    def slopes(self, unit: float) -> jax.Array | None:
        """(kv_heads, tiles, 2, block): of each row the slope of its head in the unit of scores, and where its query
        stands among the keys of its sequence; None without slopes. A unit next to nothing has a finite inverse."""
        if self.call.arrays["alibi_slopes"] is None:
            return None
        dims, slopes = self.dims, self.call.arrays["alibi_slopes"].astype(jnp.float32)
        q_starts, kv_starts = (self.call.arrays[n].astype(jnp.int32) for n in ("q_starts", "kv_starts"))
        token = jnp.arange(dims["tokens"], dtype=jnp.int32)
        own = jnp.clip(last_at_most(q_starts, token), 0, dims["sequences"] - 1)
        place = token - q_starts[own + 1] + kv_starts[own + 1] - kv_starts[own]  # the last query is at the last key
        heads = dims["kv_heads"] * dims["group"]
        of_tokens = [
            jnp.broadcast_to(x, (dims["tokens"], heads))
            for x in (slopes * np.float32(min(1.0 / unit, 2.0**127)), place.astype(jnp.float32)[:, None])
        ]
        of_rows = self.rows.spread(self.by_row(jnp.stack(of_tokens, 2)))
        return jnp.swapaxes(of_rows.reshape(dims["kv_heads"], self.rows.tiles, self.bq, 2), 2, 3)

    def statistics(self, x: jax.Array) -> jax.Array:
        """(kv_heads, tiles, numbers, block) as (numbers, heads, tokens)."""
        kv_heads, _, numbers, _ = x.shape
        found = self.rows.gathered(jnp.moveaxis(x, 2, 3).reshape(kv_heads, -1, numbers))
        by_token = found.reshape(kv_heads, self.dims["tokens"], self.dims["group"], numbers)
        return by_token.transpose(3, 0, 2, 1).reshape(numbers, -1, self.dims["tokens"])

    def over_tiles(
        self, kernel: Callable[..., None], name: str, by_key: bool, outputs: dict[str, Any], scratch: Any, depth: int,
        more: Mapping[str, jax.Array | None], **how: Any,
    ) -> dict[str, jax.Array]:  # fmt: skip
        """Run a kernel of whose steps each does ``depth`` products for a pair. ``outputs``: name -> (the form, whether
        it has numbers of rows instead of rows); ``more``: name -> what it reads of numbers of rows, or None."""
        walk = Walk.of(self.call, self.bq, self.bkv, by_key)
        own, met = (self.keys, self.rows) if by_key else (self.rows, self.keys)

        def own_block(h: Any, tile: Any, step: Any, table: Any) -> tuple[Any, Any]:
            return h, tile

        def met_block(h: Any, tile: Any, step: Any, table: Any) -> tuple[Any, Any]:
            return h, walk.block(table, tile, step)[4]

        row, keys = (met_block, own_block) if by_key else (own_block, met_block)
        inputs: Blocks = {
            n: (x, _rows_block(x, *((self.bkv, keys) if n in ("k", "v") else (self.bq, row))))
            for n, x in self.arrays.items()
        }
        inputs |= {n: (x, _numbers_block(x, row)) for n, x in more.items() if x is not None}
        made: Blocks = {
            n: (form, (_numbers_block if numbers else partial(_rows_block, length=walk.own))(form, at=own_block))
            for n, (form, numbers) in outputs.items()
        }
        table = own.table(met)
        exponentials = self.dims["kv_heads"] * self.dims["tokens"] * self.dims["group"] * self.dims["kv_tokens"]
        return launch(
            self.call,
            partial(kernel, walk=walk, **how),
            name,
            (self.dims["kv_heads"], own.tiles, walk.steps(table)),
            in_order=1,
            inputs=inputs,
            outputs=made,
            scratch=scratch,
            vmem=resident(self.call, self.bq, self.bkv),
            scalars={"table": table},
            cost=pl.CostEstimate(
                flops=2 * exponentials * depth,
                transcendentals=exponentials,
                bytes_accessed=sum(x.size * x.dtype.itemsize for x, _ in (*inputs.values(), *made.values())),
            ),
        )


def in_a_sequence(call: Call) -> jax.Array:
    """(tokens,): whether each token of queries belongs to a sequence."""
    starts, token = call.arrays["q_starts"], jnp.arange(call.dims["tokens"])
    return (token >= starts[0]) & (token < starts[-1])


def _rows_block(x: Any, length: int, at: Any) -> pl.BlockSpec:
    """The (length, d) blocks of (kv_heads, rows, d)."""
    return pl.BlockSpec((None, length, x.shape[2]), lambda *step: (*at(*step), 0))


def _numbers_block(x: Any, at: Any) -> pl.BlockSpec:
    """The (numbers, block) blocks of (kv_heads, tiles, numbers, block), which holds so many numbers a row."""
    return pl.BlockSpec((None, None, *x.shape[2:]), lambda *step: (*at(*step), 0, 0))


@BACKEND.implements("varlen_attention", key=key, fit=fit, supports=supports, config=TilesConfig)
def varlen_attention(call: Call, config: TilesConfig) -> tuple[jax.Array | None, ...]:
    packed, numbers, dv = PackedOperands(call, config), saved(call), call.dims["dv"]
    kv_heads, rows, bq, scores = call.dims["kv_heads"], packed.rows, packed.bq, TpuScores.of(as_attention(call))
    outputs = {"o": (jax.ShapeDtypeStruct((kv_heads, rows.tiles * bq, dv), call.arrays["q"].dtype), False)}
    if numbers:
        outputs["lse"] = (jax.ShapeDtypeStruct((kv_heads, rows.tiles, len(numbers), bq), jnp.float32), True)
    found = packed.over_tiles(
        attend,
        "portakern_varlen_attention",
        False,
        outputs,
        {"m": (bq, LANES), "l": (bq, LANES), "acc": (bq, dv)},
        call.dims["d"] + dv,
        {"sinks": packed.sinks(), "slopes": packed.slopes(scores.unit)},
        scores=scores,
        saved=numbers,
    )
    of_rows = dict(zip(numbers, packed.statistics(found["lse"]), strict=True)) if numbers else {}
    return packed.from_rows(found["o"]), of_rows.get("lse"), of_rows.get("lse_low")


# ------------------------------------------------------------------------------------------------------------- gradient
def row_numbers(packed: PackedOperands, unit: float) -> jax.Array:
    """(kv_heads, tiles, 3 or with slopes 5, block): what attention's gradients know of every row; zeros of one that is
    not there, whose q and d_o are zeros too."""
    call, (bq, group) = packed.call, (packed.bq, packed.dims["group"])
    one = as_attention(call)
    arrays = {n: None if x is None else x[None] for n, x in one.arrays.items() if n not in OF_HEADS}
    numbers = backward.row_statistics(one.replace(arrays=arrays), by_head(arrays["d_o"]))[0]
    by_row = numbers.reshape(-1, group, *numbers.shape[1:]).transpose(0, 3, 1, 2)  # (kv_heads, tokens, group, 3)
    spread = packed.rows.spread(by_row.reshape(by_row.shape[0], -1, by_row.shape[3]))
    found = jnp.swapaxes(spread.reshape(spread.shape[0], packed.rows.tiles, bq, -1), 2, 3)
    slopes = packed.slopes(unit)
    return found if slopes is None else jnp.concatenate([found, slopes], 2)


def sink_gradient(call: Call) -> dict[str, jax.Array]:
    """d_sinks: attention's of a batch of one, in which tokens of no sequence saw no key and have no cotangent."""
    one, inside = as_attention(call), in_a_sequence(call)
    nothing = {"o": 0.0, "d_o": 0.0, "lse": -jnp.inf, "lse_low": 0.0, "d_lse": 0.0}
    arrays = {n: x if x is None or n in OF_HEADS else x[None] for n, x in one.arrays.items()}
    for name, value in nothing.items():
        if arrays[name] is not None:
            here = inside[:, None, None] if name in ("o", "d_o") else inside
            arrays[name] = jnp.where(here, arrays[name], value)
    one = one.replace(arrays=arrays)
    return backward.sink_gradient(one, backward.GradientOperands(one))


@BACKEND.implements("varlen_attention_vjp", key=key, fit=fit, supports=supports, config=TilesConfig)
def varlen_attention_vjp(call: Call, config: TilesConfig) -> tuple[jax.Array | None, ...]:
    packed, wants, found = PackedOperands(call, config), call.wants, {}
    dims, dtype = call.dims, call.arrays["q"].dtype
    scores = TpuScores.of_gradients(as_attention(call))
    how: dict[str, Any] = {
        "more": {"of_rows": row_numbers(packed, scores.unit)},
        "scores": scores,
        "scale": scale_of(call),
    }
    d, dv = dims["d"], dims["dv"]
    if "d_q" in wants:
        form = jax.ShapeDtypeStruct((dims["kv_heads"], packed.rows.tiles * packed.bq, d), dtype)
        made = packed.over_tiles(by_query, "portakern_varlen_attention_vjp_d_q", False, {"d_q": (form, False)},
                             {"acc": (packed.bq, d)}, 2 * d + dv, **how)  # fmt: skip
        found["d_q"] = packed.from_rows(made["d_q"])
    widths = {name: width for name, width in (("d_k", d), ("d_v", dv)) if name in wants}
    if widths:
        keys = packed.keys.tiles * packed.bkv
        outputs = {n: (jax.ShapeDtypeStruct((dims["kv_heads"], keys, w), dtype), False) for n, w in widths.items()}
        sums = {f"{n[2:]}_acc": (packed.bkv, w) for n, w in widths.items()}
        made = packed.over_tiles(by_key, "portakern_varlen_attention_vjp_d_k_d_v", True, outputs, sums,
                             d + dv + sum(widths.values()), **how)  # fmt: skip
        found |= {name: packed.from_keys(x) for name, x in made.items()}
    found |= sink_gradient(call) if "d_sinks" in wants else {}
    return tuple(found.get(output.name) for output in call.spec.outputs)
