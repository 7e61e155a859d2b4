"""Attention over keys and values in pages on TPUs: decoding, chunks of prompts, and both in one call.

q: (tokens, kv_heads*group, d), k_pages: (pages, page_size, kv_heads, d), v_pages: (pages, page_size, kv_heads, dv)
-> o: (tokens, kv_heads*group, dv), lse: (kv_heads*group, tokens).

A tile is block_q rows of one sequence: its queries, those of the heads of a group beside each other, of several key
heads. The grid is (blocks of key heads, tiles, steps), steps in order. A step takes as many pages as hold block_kv
keys, each a block of its own, so that the pipeline copies those of the next step meanwhile; the scores of each key
head, and the running maximum m, sum l and acc of its rows are as in ``attention``. Pages are read as they lie, several
heads beside each other: the cache is not copied.

Which sequence a tile is of, and which pages a step reads, follows from the lengths and the table, which are in scalar
memory before the first step (`tiles_of`). Steps before the window and behind the last key compute nothing, and name
pages that are there already. With g rows a token there are at most tokens g // block_q + sequences + 1 tiles; tokens
behind the last sequence are one sequence more, without keys. Rows are gathered into tiles, and results out of them, by
XLA.

Steps begin at multiples of their keys, and a step that a row does not see leaves it as it is: a query's bits depend on
its own keys alone.

Sources: Kwon et al. 2023, "PagedAttention"; Dao 2023, "FlashAttention-2", algorithm 1; several blocks of one array a
step as in JAX's paged_attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import TilesConfig
from portakern.backends.pallas.lib.blocks import Blocks, Refs, padded, positions, quotient, row_block
from portakern.backends.pallas.lib.double_float import beside_sink, in_two
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    LANES,
    across,
    dot,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
    vmem_limit,
    whole_lanes,
)
from portakern.backends.pallas.tpu.attention import TpuScores
from portakern.backends.pallas.tpu.softmax import online_step
from portakern.core import targets
from portakern.core.call import Call
from portakern.specs.paged_attention import dense_form

MOST_SCALARS = targets.least("tpu", "smem") // 2
"""Bytes of scalar memory for the table and what is known of tiles."""

MOST_HEADS = 32
"""Key heads of a block of pages of 8 bits, where there are more than one block: their native grid; half as many of
wider numbers."""

MOST_PAGES = 8
"""Pages of a step, of which each is two operands of the kernel: more only where they hold fewer than LEAST_KEYS."""

LEAST_KEYS = 16
"""Keys of a step: the bound allows a step of so many its rounding."""


class Paging(NamedTuple):
    """How a call is cut: key heads of a block; rows of a tile; pages of a step; tiles and steps at most; how far a
    query sees to the left and right, None for all the way; and the extents that kernels count with."""

    heads: int
    bq: int
    pages: int
    tiles: int
    steps: int
    left: int | None
    right: int | None
    page_size: int
    group: int

    @property
    def keys(self) -> int:
        """Keys of a step."""
        return self.pages * self.page_size

    @classmethod
    def of(cls, call: Call, config: TilesConfig) -> Paging:
        dims = call.dims
        size, group, (left, right) = dims["page_size"], dims["group"], call.options["window"] or (None, None)
        right = 0 if call.options["is_causal"] else right
        bq = row_block(call, rows_each(call), config.block_q, grain_of(call))
        pages = max(min(pl.cdiv(config.block_kv, size), MOST_PAGES), pl.cdiv(LEAST_KEYS, size))
        steps = pl.cdiv(dims["pages_each"], pages)
        if left is not None and right is not None:
            seen = left + right + 1 + min(bq // group + 1, dims["tokens"])
            steps = min(steps, pl.cdiv(seen, pages * size) + 1)
        tiles = dims["tokens"] * group // bq + dims["sequences"] + 1
        return cls(min(dims["kv_heads"], most_heads(call)), bq, pages, tiles, steps, left, right, size, group)


def grain_of(call: Call) -> int:
    """The native grid that block_q lies on: sublanes, but lanes where lse, sinks or slopes of rows have that axis
    last."""
    lanes = "lse" in call.wants or any(call.arrays[n] is not None for n in ("sinks", "alibi_slopes"))
    return LANES if lanes else sublanes(call.arrays["q"].dtype)


def most_heads(call: Call) -> int:
    """Key heads of a block at most."""
    return MOST_HEADS // 2 if widest(call) > 1 else MOST_HEADS


def widest(call: Call) -> int:
    """Bytes of a number of the pages whose native grid is coarsest: 1 where either has 8 bits."""
    return min(call.arrays[n].dtype.itemsize for n in ("k_pages", "v_pages"))


def rows_each(call: Call) -> int:
    """How many rows a sequence has if all have as many: more tiles of fewer rows are no more work where sequences have
    one query each."""
    return pl.cdiv(call.dims["tokens"], call.dims["sequences"]) * call.dims["group"]


def tiles_of(call: Call, paging: Paging) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """(of each tile its sequence, its keys, how far its first query stands behind the sequence's first key, which row
    of the sequence its first one is, and the steps that hold keys that it sees: the first, and the one after the last;
    and the table in one row), (tiles, bq) the row of q that each row of a tile is, and (rows) the row of a tile that
    each row of q is."""
    bq, group, sequences, rows = paging.bq, paging.group, call.dims["sequences"], call.dims["tokens"] * paging.group
    table, lens, starts = (call.arrays[n].astype(jnp.int32) for n in ("page_table", "kv_lens", "q_starts"))
    lens = jnp.append(lens, 0)  # of the tokens behind the last sequence
    first_tile = starts * group // bq + jnp.arange(sequences + 1, dtype=jnp.int32)

    tile = jnp.arange(paging.tiles, dtype=jnp.int32)
    s = jnp.sum(first_tile <= tile[:, None], 1, dtype=jnp.int32) - 1
    first_row = (tile - first_tile[s]) * bq
    ends = jnp.append(starts[1:], call.dims["tokens"])
    kv_len, queries = lens[s], ends[s] - starts[s]
    top = kv_len - queries + first_row // group
    bottom = kv_len - queries + jnp.minimum((first_row + bq - 1) // group, queries - 1)
    begin = 0 * tile if paging.left is None else jnp.maximum(top - paging.left, 0) // paging.keys
    last = kv_len if paging.right is None else jnp.clip(bottom + paging.right + 1, 0, kv_len)
    last = jnp.where(first_row < queries * group, last, 0)
    scalars = {
        "sequence": jnp.minimum(s, sequences - 1), "kv_len": kv_len, "behind": kv_len - queries, "first_row": first_row,
        "begin": begin, "end": (last + paging.keys - 1) // paging.keys, "table": table.reshape(-1),
    }  # fmt: skip

    source = jnp.clip((starts[s] * group + first_row)[:, None] + jnp.arange(bq, dtype=jnp.int32), 0, rows - 1)
    row = jnp.arange(rows, dtype=jnp.int32)
    owner = jnp.sum(starts <= (row // group)[:, None], 1, dtype=jnp.int32) - 1
    return scalars, source, first_tile[owner] * bq + row - starts[owner] * group


def kernel(ref: Refs, *, paging: Paging, scores: TpuScores) -> None:
    """One step of one tile, for each key head in turn."""
    tile, bq = pl.program_id(1), paging.bq
    step, last = ref.begin[tile] + pl.program_id(2), pl.num_programs(2) - 1
    kv_len, start = ref.kv_len[tile], step * paging.keys

    @pl.when(pl.program_id(2) == 0)
    def begin() -> None:
        ref.m[...] = jnp.full_like(ref.m, -jnp.inf)
        ref.l[...] = jnp.zeros_like(ref.l)
        ref.acc[...] = jnp.zeros_like(ref.acc)

    @pl.when(step < ref.end[tile])
    def attend() -> None:
        shape = (bq, paging.keys)
        key = positions(shape, 1, start)
        place = ref.behind[tile] + quotient(positions(shape, 0, ref.first_row[tile]), paging.group)
        visible = key < kv_len
        if paging.left is not None:
            visible &= key >= place - paging.left
        if paging.right is not None:
            visible &= key <= place + paging.right
        for head in range(paging.heads):
            mine = pl.ds(head * bq, bq)
            k, v = (of_head(ref, name, head, paging).astype(ref.q.dtype) for name in ("k", "v"))
            dots = dot(ref.q[head], k, (1, 1))
            if "k_scale" in ref:
                dots = dots * across(ref.k_scale[head], dots.shape[1])
            fall = None
            if "slopes" in ref:
                fall = ref.slopes[head : head + 1, :].T * jnp.abs(place - key).astype(jnp.float32)
            s, _ = scores.from_dots(dots, None, fall)
            m, p, shrink = online_step(ref.m[mine], jnp.where(visible, s, -jnp.inf), axis=1, unit=scores.unit)
            v = jnp.where(positions(v.shape, 0, start) < kv_len, v, jnp.zeros_like(v))  # p is 0 there, 0 * NaN is NaN
            ref.l[mine] = ref.l[mine] * shrink + jnp.sum(p, axis=1, keepdims=True)
            ref.acc[mine] = ref.acc[mine] * across(shrink, v.shape[1]) + dot(p.astype(v.dtype), v, (1, 0))
            ref.m[mine] = m

    @pl.when(pl.program_id(2) == last)
    def finish() -> None:
        for head in range(paging.heads):
            mine = pl.ds(head * bq, bq)
            l = ref.l[mine]
            total = across(l, ref.acc.shape[1])
            o = jnp.where(total == 0, 0.0, ref.acc[mine] / total)
            if "v_scale" in ref:
                o = o * across(ref.v_scale[head], o.shape[1])
            lse, low = in_two(ref.m[mine], None, scores.unit, jnp.log(l))  # no code where nothing reads it
            lse = jnp.where(l == 0, -jnp.inf, lse)
            if "sinks" in ref:
                share, lse, _ = beside_sink(lse, low, ref.sinks[head : head + 1, :].T)
                o = o * across(share, o.shape[1])
            ref.o[head] = o.astype(ref.o.dtype)
            if "lse" in ref:
                ref.lse[head : head + 1, :] = lse[:, :1].T


def of_head(ref: Refs, name: str, head: int, paging: Paging) -> jax.Array:
    """The keys or values of one head in a step's pages, (keys, d)."""
    pages = [getattr(ref, f"{name}{number}")[:, head, :] for number in range(paging.pages)]
    return pages[0] if len(pages) == 1 else jnp.concatenate(pages, 0)


def page_blocks(call: Call, paging: Paging) -> Blocks:
    """The pages of a step: k0, k1, ... and v0, v1, ... Behind a sequence's last page, and of steps that compute
    nothing, the last page that is one."""
    each, size = call.dims["pages_each"], paging.page_size

    def index(number: int) -> Any:
        def at(
            heads: Any, tile: Any, step: Any, sequence: Any, kv_len: Any, behind: Any, first_row: Any, begin: Any,
            end: Any, table: Any,
        ) -> tuple[Any, ...]:  # fmt: skip
            here = jnp.minimum(begin[tile] + step, jnp.maximum(end[tile] - 1, 0)) * paging.pages + number
            last = quotient(jnp.maximum(kv_len[tile] - 1, 0), size)
            page = table[sequence[tile] * each + jnp.minimum(here, last)]
            return jnp.maximum(page, 0), 0, heads, 0

        return at

    return {
        f"{name}{number}": (array, pl.BlockSpec((None, size, paging.heads, array.shape[3]), index(number)))
        for name, array in (("k", call.arrays["k_pages"]), ("v", call.arrays["v_pages"]))
        for number in range(paging.pages)
    }


def sink_blocks(call: Call, paging: Paging, source: jax.Array) -> Blocks:
    """The sink of each row of a tile, -inf of tokens behind the last sequence, if there are sinks: (tiles, kv_heads,
    bq). ``source``: as of `tiles_of`."""
    if call.arrays["sinks"] is None:
        return {}
    sinks = call.arrays["sinks"].astype(jnp.float32).reshape(-1, paging.group)
    beside = quotient(source, paging.group) < call.arrays["q_starts"][-1]
    of_rows = jnp.where(beside[:, None], jnp.swapaxes(sinks[:, source % paging.group], 0, 1), -jnp.inf)
    return {"sinks": (of_rows, pl.BlockSpec((None, paging.heads, paging.bq), lambda h, t, *_: (t, h, 0)))}


def slope_blocks(call: Call, paging: Paging, source: jax.Array, unit: float) -> Blocks:
    """The slope of each row of a tile in the unit of scores, if there are slopes: (tiles, kv_heads, bq). ``source``: as
    of `tiles_of`. A unit next to nothing has an inverse that is finite."""
    if call.arrays["alibi_slopes"] is None:
        return {}
    slopes = call.arrays["alibi_slopes"].astype(jnp.float32) * np.float32(min(1.0 / unit, 2.0**127))
    of_rows = jnp.swapaxes(slopes.reshape(-1, paging.group)[:, source % paging.group], 0, 1)
    return {"slopes": (of_rows, pl.BlockSpec((None, paging.heads, paging.bq), lambda h, t, *_: (t, h, 0)))}


def scale_blocks(call: Call, paging: Paging) -> Blocks:
    """The scales of keys and of values that are given, each along the lanes of a register: (kv_heads, 1, LANES)."""
    given = {n: call.arrays[n] for n in ("k_scale", "v_scale") if call.arrays[n] is not None}
    blocks = pl.BlockSpec((paging.heads, 1, LANES), lambda h, t, *_: (h, 0, 0))
    return {n: (jnp.broadcast_to(x[:, None, None], (x.size, 1, LANES)), blocks) for n, x in given.items()}


def resident(call: Call, paging: Paging, heads: int) -> int:
    """The VMEM, in bytes, of one step of so many key heads: pages, queries and results, twice; the sums; the scores of
    a head, and its keys and values."""
    dims, dtype = call.dims, call.arrays["q"].dtype
    d, dv, keys = whole_lanes(dims["d"]), whole_lanes(dims["dv"]), whole_lanes(paging.keys)
    rows = heads * paging.bq
    streamed = dtype.itemsize * (paging.keys * padded(heads, sublanes(dtype)) + rows) * (d + dv)
    sums = 4 * rows * (dv + 2 * LANES)
    return 2 * streamed + sums + 20 * paging.bq * keys + 6 * keys * (d + dv)


def default_tiling(call: Call) -> dict[str, int]:
    """Not measured: rows that fill a matrix unit, and keys that take longer to arrive than a step waits."""
    return {"block_q": 128, "block_kv": 256}


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "d": max(call.dims["d"], call.dims["dv"])}


def fit(call: Call, config: TilesConfig) -> TilesConfig:
    """Half of the keys, then of the rows, as often as VMEM demands of as many heads as a block of wide pages may have:
    no bit depends on how many there are, or on whether the pages have 8 bits."""
    bq, bkv = config.block_q, config.block_kv

    def needed() -> int:
        return resident(call, Paging.of(call, TilesConfig(block_q=bq, block_kv=bkv)), MOST_HEADS // 2)

    while needed() > vmem_limit(call) and bq > 16:
        bq, bkv = (bq, bkv // 2) if bkv > 64 else (bq // 2, bkv)
    return config if (bq, bkv) == (config.block_q, config.block_kv) else TilesConfig(block_q=bq, block_kv=bkv)


def supports(call: Call, config: TilesConfig) -> str | None:
    paging = Paging.of(call, config)
    scalars = 4 * (6 * paging.tiles + call.dims["sequences"] * call.dims["pages_each"])
    if scalars > MOST_SCALARS:
        return (
            f"the page table and what is known of {paging.tiles} tiles take {scalars} bytes, and scalar memory has "
            f"{MOST_SCALARS} for them: use larger pages, a larger block_q, or fewer sequences in a call"
        )
    return (
        dtype_refused(call)
        or off_grid("block_q", config.block_q, rows_each(call), grain_of(call))
        or over_vmem(call, resident(call, paging, paging.heads), "block_q or block_kv")
    )


@BACKEND.implements(
    "paged_attention", tiling=default_tiling, key=key, fit=fit, supports=supports, config=TilesConfig
)  # fmt: skip
def paged_attention(call: Call, config: TilesConfig) -> tuple[jax.Array | None, ...]:
    q, dims, paging = call.arrays["q"], call.dims, Paging.of(call, config)
    (tokens, heads, d), dv, dtype = q.shape, dims["dv"], q.dtype
    heads_at_once, bq, tiles, group, kv_heads = paging.heads, paging.bq, paging.tiles, paging.group, dims["kv_heads"]
    scalars, source, target, rows_at_once = *tiles_of(call, paging), heads_at_once * bq
    rows = jnp.swapaxes(q.reshape(tokens, kv_heads, group, d), 0, 1).reshape(kv_heads, tokens * group, d)

    def tile_blocks(*extents: int) -> pl.BlockSpec:
        return pl.BlockSpec((heads_at_once, None, *extents), lambda h, t, *_: (h, t, *(0 for _ in extents)))

    inputs = {"q": (rows[:, source], tile_blocks(bq, d)), **page_blocks(call, paging)}
    scores = TpuScores.of(dense_form(call, tokens, dims["pages_each"] * dims["page_size"]))
    inputs |= sink_blocks(call, paging, source) | scale_blocks(call, paging)
    inputs |= slope_blocks(call, paging, source, scores.unit)
    outputs: Blocks = {"o": (jax.ShapeDtypeStruct((kv_heads, tiles, bq, dv), dtype), tile_blocks(bq, dv))}
    if "lse" in call.wants:
        form = jax.ShapeDtypeStruct((tiles, kv_heads, bq), jnp.float32)
        outputs["lse"] = (form, pl.BlockSpec((None, heads_at_once, bq), lambda h, t, *_: (t, h, 0)))
    pairs = tokens * heads * dims["pages_each"] * dims["page_size"]
    found = launch(
        call,
        partial(kernel, paging=paging, scores=scores),
        "portakern_paged_attention",
        (pl.cdiv(kv_heads, heads_at_once), tiles, paging.steps),
        in_order=1,
        inputs=inputs,
        outputs=outputs,
        scratch={"m": (rows_at_once, LANES), "l": (rows_at_once, LANES), "acc": (rows_at_once, dv)},
        vmem=resident(call, paging, heads_at_once),
        scalars=scalars,
        cost=pl.CostEstimate(
            flops=2 * pairs * (d + dv),
            transcendentals=pairs,
            bytes_accessed=dtype.itemsize * (tokens * heads + tiles * paging.steps * paging.keys * kv_heads) * (d + dv),
        ),
    )
    o = found["o"].reshape(kv_heads, tiles * bq, dv)[:, target].reshape(kv_heads, tokens, group, dv)
    lse = None
    if "lse" in found:
        of_rows = jnp.swapaxes(found["lse"], 0, 1).reshape(kv_heads, tiles * bq)[:, target]
        lse = jnp.swapaxes(of_rows.reshape(kv_heads, tokens, group), 1, 2).reshape(heads, tokens)
    return jnp.swapaxes(o, 0, 1).reshape(tokens, heads, dv), lse
