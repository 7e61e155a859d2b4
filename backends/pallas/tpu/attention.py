"""Softmax attention on TPUs, o = softmax(scale q k^T) v, never holding a whole row of scores.

q: (batch, q_len, kv_heads*group, d), k: (batch, kv_len, kv_heads, d), v: (batch, kv_len, kv_heads, dv)
-> o: (batch, q_len, kv_heads*group, dv), lse and lse_low: (batch, kv_heads*group, q_len).

One step takes a block of rows against a few blocks of keys. Rows are queries, those of the heads of a group beside
each other, so that keys are read once for all of them (with a bias a head has its own). The grid is (batch, heads or
kv_heads, row blocks, key blocks), key blocks in order. m is the running maximum of a query's scores, l the sum of exp(s
- m) and acc the sum of exp(s - m) v, all float32 in VMEM; a block that raises m scales l and acc down by exp(m_old -
m_new); the last step writes acc / l. m and l are repeated along the 128 lanes of a register: a column would be stored
and read with masks and permutes. Scores and m stay in the unit in which they arise (``score_unit``), and only their
difference is brought to natural units. The log-sum-exp, m + log l, is computed as two numbers (`double_float`), which
gradients read. A sink, one more score of each row with a value of 0, comes in the last step (`beside_sink`). With
slopes each row has two numbers besides, its head's slope and its place among the keys, of which a step makes what its
scores fall by (`fall_of`).

Where one sequence and one group are all, two cores share the row blocks, in an order that gives both as much of a band
(`dealt`).

`Band` says which key blocks a row block can see: the grid has steps for no more than those, and a step past the last
one computes nothing: what its index map names are the first blocks of the row block that follows. How the arrays are
laid out in memory is said in ``_heads.py``.

Of segments a row block visits the key blocks from the first to the last that may hold one of its own (`segments`): the
steps of others compute and fetch as little as those past the band's end.

block_q, block_kv: the rows that a step holds, and the keys whose scores it has at a time. Large block_kv feeds the
matrix unit; the scores, block_q x block_kv in float32, bound both. A step has several such blocks of keys, one after
another (`parts`): the results are the same to the bit. On an edge of the band those that nobody sees are passed by
(`KeyStep`).

Source: Dao, "FlashAttention-2" (2023), algorithm 1; Milakov and Gimelshein (2018) for the running maximum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import TilesConfig
from portakern.backends.pallas.lib.band import Band, both, dealt
from portakern.backends.pallas.lib.blocks import (
    Blocks,
    Refs,
    block,
    even_block,
    positions,
    quotient,
    row_block,
    settled,
    step_along,
    within,
)
from portakern.backends.pallas.lib.double_float import UnitOf, beside_sink, in_two
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
from portakern.backends.pallas.lib.mosaic_tpu.rows import STEP
from portakern.backends.pallas.lib.segments import Span
from portakern.backends.pallas.tpu._heads import (
    AttentionOperands,
    Place,
    from_heads,
    head_blocks,
    row_blocks,
    span_table,
    spans_in_scalar_memory,
)
from portakern.backends.pallas.tpu.softmax import online_step
from portakern.core import targets
from portakern.core.call import Call
from portakern.specs.attention import first_place, score_unit


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "d": max(call.dims["d"], call.dims["dv"]), "reach": reach(call)}


def reach(call: Call) -> int:
    """How many keys a window lets a query see; of one that has no end, or hides no key for its width, EVERY."""
    left, right = call.options["window"] or (None, None)
    if call.options["is_causal"]:
        right = 0 if right is None else min(right, 0)
    seen = EVERY if left is None or right is None else max(left + 1 + right, 1)
    return EVERY if seen >= call.dims["kv_len"] else seen


EVERY = 2**31 - 1


def grains(call: Call) -> tuple[int, int]:
    """The native grid that block_q and block_kv lie on.

    It is sublanes, but lanes where lse, segment ids, sinks or slopes of rows, or a bias have that axis last.
    """
    rows, segments = sublanes(call.arrays["q"].dtype), call.arrays["q_segment_ids"] is not None
    of_q = LANES if segments or saved(call) or has_sinks(call) or has_slopes(call) else rows
    of_kv = LANES if segments or call.arrays["bias"] is not None else rows
    return of_q, of_kv


def saved(call: Call) -> list[str]:
    """What is written of the log-sum-exp."""
    return [name for name in ("lse", "lse_low") if name in call.wants]


def has_sinks(call: Call) -> bool:
    """Whether each row reads a sink, as those of the forward pass do."""
    return call.arrays["sinks"] is not None and not call.spec.is_vjp


def has_slopes(call: Call) -> bool:
    """Whether each row reads a slope and its place, as those of the forward pass do."""
    return call.arrays["alibi_slopes"] is not None and not call.spec.is_vjp


def heads_per_block(call: Call) -> int:
    """How many heads' queries are rows of one block."""
    return call.dims["group"] if call.arrays["bias"] is None else 1


def blocks(call: Call, config: TilesConfig) -> tuple[int, int]:
    """How many rows one step holds, and how many keys it has scores of at a time."""
    of_q, of_kv = grains(call)
    kv_len, tile = call.dims["kv_len"], config.block_kv
    rows = call.dims["q_len"] * heads_per_block(call)
    bq, square = (row_block(call, rows, config.block_q, grain, even=True) for grain in (of_q, LANES))
    if banded(call) and 16 * square <= 17 * bq:
        bq = square  # blocks of rows and of keys then meet the band's edges in corners, and fewer of them do
    return bq, block(kv_len, tile, of_kv) if kv_len <= tile else min(tile, even_block(kv_len, tile, LANES))


def banded(call: Call) -> bool:
    """Whether there are pairs that causality or a window hides."""
    return call.options["is_causal"] or call.options["window"] is not None


def parts(call: Call, bq: int, bkv: int) -> int:
    """How many blocks of keys a step holds: as many as give it PAIRS pairs, since a step of few waits longer than it
    computes, and of larger blocks four, of which one's products hide what the other's exponentials take; in a band two,
    since its edges pass by the parts that nobody sees; and no more than a window reaches. Pairs count as they lie in
    registers: a step of many narrow blocks would take more VMEM than they hold. Interpreted, where blocks are small,
    two, so that there are several steps too."""
    most = 2 if call.interpret else max(2 if banded(call) else 4, PAIRS // (bq * whole_lanes(bkv)))
    seen = min(call.dims["kv_len"], reach(call) + bq // heads_per_block(call))
    number = max(1, min(most, pl.cdiv(pl.cdiv(seen, bkv), least_steps(call, bq, seen))))
    while number > 1 and resident(call, bq, bkv, number) > vmem_limit(call):
        number //= 2
    return number


PAIRS = 2**18


def least_steps(call: Call, bq: int, seen: int) -> int:
    """In how many steps a block of rows takes the keys that it sees at least. Nothing is computed while the keys of the
    first step arrive, and each step waits besides: where few blocks of rows are all, one step of all keys would be
    slower than several."""
    hardware = targets.HARDWARE.get(call.target.arch)
    if hardware is None or call.interpret:
        return 1
    dims, cores = call.dims, hardware.cores or 1
    size = (whole_lanes(dims["d"]) + whole_lanes(dims["dv"])) * call.arrays["k"].dtype.itemsize
    arriving = seen * size * cores * (hardware.clock or 0.0) / (hardware.bandwidth or math.inf)
    heads = dims["kv_heads"] * dims["group"] // heads_per_block(call)
    blocks_of_rows = pl.cdiv(dims["batch"] * heads * pl.cdiv(dims["q_len"] * heads_per_block(call), bq), cores)
    return max(1, round(math.sqrt(arriving / (STEP * blocks_of_rows))))


def pieces_of(call: Call, bq: int, bkv: int) -> int:
    """In how many pieces the rows of a step on an edge of the band pass by parts of the keys that they do not see; 0 of
    few rows, to whom passing by costs more than what they would spare. Two where a half passes by what the other sees:
    of a band with one edge, which cuts blocks from corner to corner, where a half is as long as a part of the keys. A
    row's results are the same to the bit."""
    if not banded(call) or bq < (2 * GRAIN if call.interpret else LANES):
        return 0
    passes_by = reach(call) < EVERY or 2 * bkv * heads_per_block(call) <= bq
    return 2 if passes_by and bq % (2 * grains(call)[0]) == 0 else 1


GRAIN = 16
"""Rows of the least tile: interpreted ones of twice that are not few, so that small calls go both ways."""


def refused(call: Call, config: TilesConfig, needed: int, rows: int, names: str = "block_q or block_kv") -> str | None:
    """Why a TPU cannot run attention, or its gradients, on so many rows in these tiles, which need so many bytes of
    VMEM; or None. ``names``: what to choose smaller."""
    of_q, of_kv = grains(call)
    return (
        dtype_refused(call)
        or off_grid("block_q", config.block_q, rows, of_q)
        or off_grid("block_kv", config.block_kv, call.dims["kv_len"], of_kv)
        or places_refused(call)
        or over_vmem(call, needed, names)
    )


MOST_PLACES = 2**22
"""Queries and keys beside slopes: so few have places that float32 holds, and those of other parts are far from them."""


def places_refused(call: Call) -> str | None:
    """Why slopes cannot be served, or None."""
    if call.arrays["alibi_slopes"] is not None and call.dims["q_len"] + call.dims["kv_len"] > MOST_PLACES:
        return "more than 2^22 queries and keys beside slopes: places are float32 on TPUs; use the reference backend"
    return None


def resident(call: Call, bq: int, bkv: int, number: int) -> int:
    """The VMEM, in bytes, of one step of so many blocks of keys: what is streamed, twice, the sums, and what is
    computed. That is what one block's scores become, beside the products that are begun of the next where there are
    more than two; or, of many small blocks, whose products are begun before the first of them is needed, the scores of
    PAIRS pairs and their rows' maxima, which have a register's width of lanes, and a block's k and v turned. Bytes of a
    pair are what libtpu took of random tilings on five chips, the largest of each kind.
    """
    d, dv, lanes = whole_lanes(call.dims["d"]), whole_lanes(call.dims["dv"]), whole_lanes(bkv)
    keys = bkv * number
    size = call.arrays["q"].dtype.itemsize
    streamed = size * (bq * d + keys * (d + dv) + bq * dv)
    if call.options.get("out_dtype") and size == 2:
        streamed += 2 * bq * dv
    bias = call.arrays["bias"]
    if bias is not None:
        streamed += bias.dtype.itemsize * whole_lanes(keys) * (8 if bias.shape[2] == 1 else bq)
    streamed += 4 * 8 * bq * (has_sinks(call) + has_slopes(call))  # rows of numbers take 8 sublanes
    sums = 4 * bq * (dv + 2 * LANES)  # acc, and m and l, which have a register's width of lanes
    scores, little = 12, 0  # s, p and the mask of one step
    scores += 4 * (bias is not None or has_slopes(call))  # a bias in float32, or distances
    wide, wide_v = d // LANES - 1, dv // LANES - 1
    if size == 4:
        scores += 6 + 4 * wide + 17 * wide_v  # bfloat16 parts, and sums of their products
        scores += 2 * (call.options["softcap"] is not None)
        scores += 8 * min(number, 4) * (bkv < LANES)  # of several blocks at a time
        little, turned = 2**19, 0  # parts of k and v
    else:
        turned = size * bkv * (d + dv)
        scores += wide_v + (2 * wide + 2 * wide_v) * (number > 2)
    scores += 3 * (number > 2)
    begun = 4 * min(number * bq, PAIRS // lanes) * (lanes + LANES) + turned
    return 2 * streamed + sums + max(scores * bq * lanes, begun) + little


def fit(call: Call, config: TilesConfig) -> TilesConfig:
    """Half of both, as often as VMEM demands of a bias or long heads, however few rows there are."""
    bq, bkv = config.block_q, config.block_kv
    while resident(call, bq, bkv, 1) > vmem_limit(call) and bkv > LANES:
        bq, bkv = max(LANES, bq // 2), bkv // 2
    return config if bkv == config.block_kv else TilesConfig(block_q=bq, block_kv=bkv)


def supports(call: Call, config: TilesConfig) -> str | None:
    rows, (bq, bkv) = call.dims["q_len"] * heads_per_block(call), blocks(call, config)
    return refused(call, config, resident(call, bq, bkv, parts(call, bq, bkv)), rows)


def may_share(call: Call) -> bool:
    """Whether two cores may share a launch, of which each takes half of an axis. JAX often knows no chip yet."""
    hardware = targets.HARDWARE.get(call.target.arch)
    return hardware is None or (hardware.cores or 1) > 1


class TpuScores(NamedTuple):
    """How scores come of dots: what multiplies a dot, whether its tanh is taken and what multiplies that, None for
    nothing, and the unit in which the scores then stand.

    ``score_unit`` of the spec says why they are kept in that unit. ``settle``: whether they are rounded before a bias
    is added, as interpreted calls need it that take their maximum, or measure from it (`settled`).
    """

    pre: float | None
    capped: bool
    factor: float | None
    unit: float
    settle: bool

    @classmethod
    def of(cls, call: Call) -> TpuScores:
        (pre, unit), softcap = score_unit(call), call.options["softcap"]
        return cls(pre, softcap is not None, None if call.arrays["bias"] is None else softcap, unit, call.interpret)

    @classmethod
    def of_gradients(cls, call: Call) -> TpuScores:
        pre, factor, unit = UnitOf.gradients(call)
        return cls(pre, call.options["softcap"] is not None, factor, unit, call.interpret)

    def from_dots(self, s: Any, bias: Any, fall: Any = None) -> tuple[Any, Any]:
        """(the scores of a block of dots s, the tanh of its softcap), the latter None where there is no softcap.
        ``fall``: by how much slopes make scores less, in their unit."""
        tanh = None
        if self.pre is not None:
            s = s * self.pre
        if self.capped:
            s = tanh = jnp.tanh(s)
        if self.factor is not None:
            s = s * self.factor
        if self.settle:
            s = settled(s)
        if fall is not None:
            s = s - (settled(fall) if self.settle else fall)
        return (s if bias is None else s + bias), tanh


def visible_pairs(ref: Refs, band: Band, row: Any, column: Any, edge: bool, *, by_key: bool = False) -> Any:
    """Which pairs of the block (row, column) are visible, or None where all are.

    These are the pairs in the band, which only an edge block looks at, that share a segment. Rows are queries; with
    ``by_key`` they are keys, and the band is turned over.
    """
    segments = None
    if "q_segment_ids" in ref:
        rows, columns = ref.q_segment_ids, ref.kv_segment_ids
        segments = same_segment(columns, rows) if by_key else same_segment(rows, columns)
    return both(band.allowed(row, column) if edge else None, segments)


def same_segment(rows: Any, columns: Any) -> Any:
    """Which pairs of this step share a segment: every 32-bit word of their ids is equal."""
    return both(*(columns[word : word + 1, :] == rows[word : word + 1, :].T for word in range(rows.shape[0])))


def part_of(ref: Refs, number: int, bkv: int) -> Refs:
    """What a step works on, with the bkv keys of one of its parts."""
    keys, every = pl.ds(number * bkv, bkv), slice(None)
    cuts = {"k": (keys, every), "v": (keys, every), "bias": (every, keys), "kv_segment_ids": (every, keys)}
    return Refs(**{name: x.at[cuts[name]] if name in cuts else x for name, x in vars(ref).items()})


def piece_of(ref: Refs, number: int, rows: int) -> Refs:
    """What a step works on, with the rows of one of its pieces."""
    mine, every = pl.ds(number * rows, rows), slice(None)
    cuts = dict.fromkeys(("q_segment_ids", "slopes"), (every, mine))
    cuts |= dict.fromkeys(("q", "m", "l", "acc"), (mine, every))
    if "bias" in ref and ref.bias.shape[0] > 1:
        cuts["bias"] = (mine, every)
    return Refs(**{name: x.at[cuts[name]] if name in cuts else x for name, x in vars(ref).items()})


class KeyStep(NamedTuple):
    """Rows of block i beside the keys of step j, which ``add(ref, keys, row, column, edge)`` takes ``bkv`` at a time:
    ``keys`` is the band in such parts. On an edge rows pass by parts that they do not see, in so many ``pieces``.
    ``segment_span``: the parts that may hold segments of these rows; None where all may."""

    ref: Refs
    band: Band
    bkv: int
    pieces: int
    i: Any
    j: Any
    add: Callable[[Refs, Band, Any, Any, bool], None]
    segment_span: Span | None = None

    @property
    def number(self) -> int:
        return self.band.block_kv // self.bkv

    @property
    def keys(self) -> Band:
        return self.band._replace(block_kv=self.bkv)

    def part(self, part: int, edge: bool) -> None:
        """All rows and the keys of one part."""
        self.add(part_of(self.ref, part, self.bkv), self.keys, self.i, self.j * self.number + part, edge)

    @property
    def full(self) -> Any:
        """Whether every part of this step may hold segments of these rows; None where segments hide nothing."""
        if self.segment_span is None:
            return None
        first, after = self.segment_span
        return (first <= self.j * self.number) & ((self.j + 1) * self.number <= after)

    def holds(self, part: int) -> Any:
        """Whether a part may, or None."""
        if self.segment_span is None:
            return None
        column = self.j * self.number + part
        return (self.segment_span[0] <= column) & (column < self.segment_span[1])

    def parts(self, edge: bool) -> None:
        """All rows and every part that holds a key, and may hold segments of these rows."""
        if self.segment_span is None:
            self.all_parts(edge)
            return
        pl.when(self.full)(partial(self.all_parts, edge))
        for part in range(self.number):
            pl.when((self.full ^ True) & self.holds(part))(partial(self.part, part, edge))

    def all_parts(self, edge: bool) -> None:
        """All rows and every part that holds a key."""
        band, of_last = self.band, pl.cdiv(self.band.kv_len % self.band.block_kv, self.bkv) or self.number
        for part in range(self.number):
            if part < of_last or not edge:
                self.part(part, edge)
            elif band.has_edges:  # others have no edge but in the last step
                pl.when(self.j < band.kv_len // band.block_kv)(partial(self.part, part, edge))

    def seen_parts(self) -> None:
        """On an edge of the band, what is seen of each part."""
        if self.pieces == 0 or self.pieces * self.number == 1:
            self.parts(True)
        elif self.pieces == 1 and self.number == 2 and self.band.first is None:
            self.two_parts()
        else:
            self.each_piece()

    def two_parts(self) -> None:
        """Where there is a right edge alone: a first part that all rows see wholly and the second, in one piece of
        code, so that the products of one hide the exponentials of the other; or what is seen of both."""
        column, last = 2 * self.j, self.keys.span(self.i)[1]
        beside = both(self.keys.inside(self.i, column) & (column + 1 <= last), self.full)

        @pl.when(beside)
        def beside_each_other() -> None:
            self.part(0, False)
            self.part(1, True)

        @pl.when(beside ^ True)
        def on_its_own() -> None:
            if self.segment_span is None:
                self.part(0, True)
            else:
                pl.when(self.holds(0))(partial(self.part, 0, True))
            pl.when(both(column + 1 <= last, self.holds(1)))(partial(self.part, 1, True))

    def each_piece(self) -> None:
        """Each piece of the rows and each part of the keys of which a row of that piece sees some."""
        small = self.keys._replace(block_q=self.band.block_q // self.pieces)
        for piece, part in itertools.product(range(self.pieces), range(self.number)):
            row, column = self.i * self.pieces + piece, self.j * self.number + part
            first, last = small.span(row)
            here = piece_of(part_of(self.ref, part, self.bkv), piece, small.block_q)
            visible = both((first <= column) & (column <= last), self.holds(part))
            small.visit(row, column, visible, partial(self.add, here, small, row, column))


def kernel(
    ref: Refs, *, band: Band, order: Callable[[Any], Any], bkv: int, pieces: int, scores: TpuScores, saved: list[str],
    interpreted: bool, tiles: int,
) -> None:  # fmt: skip
    """A step holds band.block_kv keys, which it takes bkv at a time, and on the band's edge its rows in ``pieces``.
    ``order``: which block of rows, of so many ``tiles``, stands at a place of the grid. ``saved``: what the rows of
    ``lse`` are."""
    i, step = order(step_along(2)), step_along(3)
    spans = span_table(getattr(ref, "spans", None), step_along(0), tiles, band.block_kv // bkv)
    first, last = band.span(i, None if spans is None else spans(i))
    j = first + step

    @pl.when(step == 0)
    def start() -> None:
        ref.m[...] = jnp.full_like(ref.m, -jnp.inf)
        ref.l[...] = jnp.zeros_like(ref.l)
        ref.acc[...] = jnp.zeros_like(ref.acc)

    def add(ref: Refs, keys: Band, i: Any, j: Any, edge: bool) -> None:
        bias = ref.bias[...].astype(jnp.float32) if "bias" in ref else None
        fall = None
        if "slopes" in ref:
            fall = fall_of(ref.slopes[:1, :].T, ref.slopes[1:, :].T, j * bkv, bkv)
        s, _ = scores.from_dots(dot(ref.q[...], ref.k[...], (1, 1)), bias, fall)
        visible = visible_pairs(ref, keys, i, j, edge)
        if visible is not None:
            s = jnp.where(visible, s, -jnp.inf)
        m, p, shrink = online_step(ref.m[...], s, axis=1, unit=scores.unit)
        v = ref.v[...]
        if edge:  # p is 0 beyond kv_len, and 0 * NaN is NaN
            v = within(v, 0, j * bkv, band.kv_len)
        ref.l[...] = ref.l[...] * shrink + jnp.sum(p, axis=1, keepdims=True)
        ref.acc[...] = ref.acc[...] * across(shrink, ref.acc.shape[1]) + dot(p.astype(v.dtype), v, (1, 0))
        ref.m[...] = m

    in_parts = None if spans is None or spans.parts == 1 else spans.in_parts(i)
    keys = KeyStep(ref, band, bkv, pieces, i, j, add, in_parts)

    def attend(edge: bool) -> None:
        if band.has_edges and (edge or (interpreted and pieces > 1)):  # a row's bits depend there on the rows beside it
            keys.seen_parts()
        else:
            keys.parts(edge)

    band.visit(i, j, j <= last, attend)

    @pl.when(step == pl.num_programs(3) - 1)
    def finish() -> None:
        l = ref.l[...]
        total = across(l, ref.acc.shape[1])
        o = jnp.where(total == 0, 0.0, ref.acc[...] / total)
        if "sinks" in ref:
            share, _, _ = log_sum(ref, scores.unit)
            o = o * across(share, o.shape[1])
        ref.o[...] = o.astype(ref.o.dtype)
        if "lse" in ref:
            numbers = dict(zip(("share", "lse", "lse_low"), log_sum(ref, scores.unit), strict=True))
            for row, name in enumerate(saved):
                ref.lse[row : row + 1, :] = numbers[name][:, :1].T


def log_sum(ref: Refs, unit: float) -> tuple[Any, Any, Any]:
    """(what a sink leaves of o, lse, lse_low) of rows whose keys were all seen; the first is None without sinks."""
    l = ref.l[...]
    lse, low = in_two(ref.m[...], None, unit, jnp.log(l))
    lse = jnp.where(l == 0, -jnp.inf, lse)
    return beside_sink(lse, low, ref.sinks[...].T) if "sinks" in ref else (None, lse, low)


def sink_blocks(call: Call, heads_per_block: int, bq: int, written: Place) -> Blocks:
    """The sink of each row, as `by_head` has rows, if there are sinks: (1, heads / together, 1, len * together). Blocks
    are those of results: at the last step, where they are read, others may be of the rows that follow."""
    if not has_sinks(call):
        return {}
    q_len = call.dims["q_len"]
    of_groups = call.arrays["sinks"].astype(jnp.float32).reshape(-1, 1, heads_per_block)
    of_rows = jnp.tile(of_groups, (1, q_len, 1)).reshape(1, of_groups.shape[0], 1, q_len * heads_per_block)
    return {"sinks": (of_rows, row_blocks(1, bq, lambda *step: (0, *written(*step)[1:])))}


def fall_of(slope: Any, position: Any, start: Any, bkv: int) -> Any:
    """By how much slopes make the scores of rows, (rows, bkv), less: ``slope`` times the distance from ``position``,
    both (rows, 1), of each of ``bkv`` keys from ``start`` on."""
    return slope * jnp.abs(position - positions((1, bkv), 1, start).astype(jnp.float32))


def slope_rows(call: Call, unit: float, heads_per_block: int = 1) -> jax.Array:
    """Of each row, as `by_head` has rows, the slope of its head in the unit of scores, and where its query stands among
    the keys: (1, heads / together, 2, len * together) float32. A unit next to nothing has an inverse that is finite."""
    q_len, heads = call.dims["q_len"], call.dims["kv_heads"] * call.dims["group"]
    of_heads = call.arrays["alibi_slopes"].astype(jnp.float32) * np.float32(min(1.0 / unit, 2.0**127))
    places = (np.arange(q_len) + first_place(call)).astype(np.float32)
    shape = heads // heads_per_block, q_len, heads_per_block
    rows = [
        jnp.broadcast_to(of_heads.reshape(-1, 1, heads_per_block), shape),
        jnp.broadcast_to(places[None, :, None], shape),
    ]
    return jnp.stack(rows, 1).reshape(1, shape[0], 2, q_len * heads_per_block)


def slope_blocks(call: Call, heads_per_block: int, bq: int, query: Place) -> Blocks:
    """`slope_rows` of a forward call, if there are slopes."""
    if not has_slopes(call):
        return {}
    rows = slope_rows(call, TpuScores.of(call).unit, heads_per_block)
    return {"slopes": (rows, row_blocks(2, bq, lambda *step: (0, *query(*step)[1:])))}


def by_query_head(x: jax.Array, heads_per_block: int) -> jax.Array:
    """Numbers of rows, (batch, heads / together, len * together), as (batch, heads, len)."""
    batch, groups, rows = x.shape
    length = rows // heads_per_block
    return jnp.swapaxes(x.reshape(batch, groups, length, heads_per_block), 2, 3).reshape(batch, -1, length)


@BACKEND.implements("attention", key=key, fit=fit, supports=supports, config=TilesConfig)
def attention(call: Call, config: TilesConfig) -> tuple[jax.Array | None, ...]:
    batch, q_len, heads, d = call.arrays["q"].shape
    dv, dtype, shared = call.dims["dv"], call.arrays["q"].dtype, heads_per_block(call)
    heads, rows, of_keys = heads // shared, q_len * shared, call.dims["group"] // shared
    bq, bkv = blocks(call, config)
    band = Band.of(call, bq, bkv * parts(call, bq, bkv), shared).closing(q_len)
    down, steps = pl.cdiv(rows, bq), band.steps()

    split = batch * heads == 1 and may_share(call)  # several batches or heads are what cores share, where there are any
    order = partial(dealt, blocks=down) if split and band.one_sided else lambda place: place

    def ahead(b: Any, index: Any, step: Any, spans: tuple[Any, ...]) -> tuple[Any, Any]:
        return band.ahead(index, step, down, order, span_table(spans, b, down, band.block_kv // bkv))

    def query(b: Any, h: Any, index: Any, step: Any, *spans: Any) -> tuple[Any, Any, Any]:
        return b, h, ahead(b, index, step, spans)[0]

    def key(b: Any, h: Any, index: Any, step: Any, *spans: Any) -> tuple[Any, Any, Any]:
        return b, quotient(h, of_keys), ahead(b, index, step, spans)[1]

    def written(b: Any, h: Any, index: Any, step: Any, *spans: Any) -> tuple[Any, Any, Any]:
        return b, h, order(index)

    inputs = AttentionOperands(call, shared).at(bq, band.block_kv, query, key) | sink_blocks(call, shared, bq, written)
    inputs |= slope_blocks(call, shared, bq, query)
    o = jax.ShapeDtypeStruct((batch, heads, rows, dv), call.outputs["o"][1])
    outputs: Blocks = {"o": (o, head_blocks(bq, dv, written))}
    if numbers := saved(call):
        form = jax.ShapeDtypeStruct((batch, heads, len(numbers), rows), jnp.float32)
        outputs["lse"] = (form, row_blocks(len(numbers), bq, written))
    pairs = batch * heads * rows * min(call.dims["kv_len"], steps * band.block_kv)
    found = launch(
        call,
        partial(
            kernel,
            band=band,
            order=order,
            bkv=bkv,
            pieces=pieces_of(call, bq, bkv),
            scores=TpuScores.of(call),
            saved=numbers,
            interpreted=call.interpret,
            tiles=down,
        ),
        "portakern_attention",
        (batch, heads, down, steps),
        in_order=1,
        inputs=inputs,
        outputs=outputs,
        scratch={"m": (bq, LANES), "l": (bq, LANES), "acc": (bq, dv)},
        vmem=resident(call, bq, bkv, band.block_kv // bkv),
        scalars=spans_in_scalar_memory(call, bq, bkv, rows_per_query=shared),
        cost=pl.CostEstimate(
            flops=2 * pairs * (d + dv),
            transcendentals=pairs,
            bytes_accessed=dtype.itemsize * (batch * heads * rows * (d + dv) + pairs // bq * (d + dv)),
        ),
    )
    of_rows = {name: by_query_head(found["lse"][:, :, row], shared) for row, name in enumerate(numbers)}
    return from_heads(found["o"], shared), of_rows.get("lse"), of_rows.get("lse_low")
