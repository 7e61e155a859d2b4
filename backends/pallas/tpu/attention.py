"""Softmax attention on TPUs, o = softmax(scale q k^T) v, never holding a whole row of scores.

q: (batch, q_len, kv_heads*group, d), k: (batch, kv_len, kv_heads, d), v: (batch, kv_len, kv_heads, dv)
-> o: (batch, q_len, kv_heads*group, dv), lse: (batch, kv_heads*group, q_len).

One step takes a block of rows against a few blocks of keys. Rows are queries, those of the heads of a group beside
each other, so that keys are read once for all of them (with a bias a head has its own). The grid is (batch, heads or
kv_heads, row blocks, key blocks), key blocks in order. m is the running maximum of a query's scores, l the sum of exp(s
- m) and acc the sum of exp(s - m) v, all float32 in VMEM; a block that raises m scales l and acc down by exp(m_old -
m_new); the last step writes acc / l. m and l are repeated along the 128 lanes of a register: a column would be stored
and read with masks and permutes. Scores and m stay in the unit in which they arise (``score_unit``), and only their
difference is brought to natural units.

Where one sequence and one group are all, two cores share the row blocks, in an order that gives both as much of a band
(`dealt`).

`Band` says which key blocks a row block can see: the grid has steps for no more than those, and a step past the last
one computes nothing: what its index map names are the first blocks of the row block that follows. How the arrays are
laid out in memory is said in ``_heads.py``.

block_q, block_kv: the rows that a step holds, and the keys whose scores it has at a time. Large block_kv feeds the
matrix unit; the scores, block_q x block_kv in float32, bound both. A step has several such blocks of keys, one after
another (`parts`): the results are the same to the bit. A step on an edge of the band takes each half of its rows
through those of them that it sees.

Source: Dao, "FlashAttention-2" (2023), algorithm 1; Milakov and Gimelshein (2018) for the running maximum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas._band import Band, both, dealt
from portakern.backends.pallas.common import (
    Blocks,
    Refs,
    block,
    even_block,
    quotient,
    row_block,
    settled,
    step_along,
    within,
)
from portakern.backends.pallas.tpu._chip import (
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
from portakern.backends.pallas.tpu._heads import Operands, from_heads, head_blocks, row_blocks
from portakern.backends.pallas.tpu.softmax import online_step
from portakern.core import targets
from portakern.core.call import Call
from portakern.specs.attention import score_unit


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

    It is sublanes, but lanes where lse, segment ids or a bias have that axis last.
    """
    rows, segments = sublanes(call.arrays["q"].dtype), call.arrays["q_segment_ids"] is not None
    of_q = LANES if segments or "lse" in call.wants else rows
    of_kv = LANES if segments or call.arrays["bias"] is not None else rows
    return of_q, of_kv


def together(call: Call) -> int:
    """How many heads' queries are rows of one block."""
    return call.dims["group"] if call.arrays["bias"] is None else 1


def blocks(call: Call, tiling: Mapping[str, int]) -> tuple[int, int]:
    """How many rows one step holds, and how many keys it has scores of at a time."""
    of_q, of_kv = grains(call)
    kv_len, tile = call.dims["kv_len"], tiling["block_kv"]
    rows = call.dims["q_len"] * together(call)
    bq, square = (row_block(call, rows, tiling["block_q"], grain, even=True) for grain in (of_q, LANES))
    if banded(call) and 16 * square <= 17 * bq:
        bq = square  # blocks of rows and of keys then meet the band's edges in corners, and fewer of them do
    return bq, block(kv_len, tile, of_kv) if kv_len <= tile else min(tile, even_block(kv_len, tile, LANES))


def banded(call: Call) -> bool:
    """Whether there are pairs that causality or a window hides."""
    return call.options["is_causal"] or call.options["window"] is not None


def parts(call: Call, bq: int, bkv: int) -> int:
    """How many blocks of keys a step holds: as many as give it PAIRS pairs, since a step of few waits longer than it
    computes, and of larger blocks four, of which one's products hide what the other's exponentials take; in a band two,
    since its edges pass by the parts that nobody sees. Pairs count as they lie in registers: a step of many narrow
    blocks would take more VMEM than they hold. Interpreted, where blocks are small, two, so that there are several
    steps too."""
    most = 2 if call.interpret else max(2 if banded(call) else 4, PAIRS // (bq * whole_lanes(bkv)))
    number = max(1, min(most, pl.cdiv(call.dims["kv_len"], bkv)))
    while number > 1 and resident(call, bq, bkv, number) > vmem_limit(call):
        number //= 2
    return number


PAIRS = 2**18


def halves_of(call: Call, bq: int) -> int:
    """How many pieces of its rows a step takes one after another where it meets an edge of the band: each passes by the
    keys that it does not see. A row's results are the same to the bit."""
    return 2 if banded(call) and bq % (2 * grains(call)[0]) == 0 else 1


def refused(
    call: Call, tiling: Mapping[str, int], needed: int, rows: int, names: str = "block_q or block_kv"
) -> str | None:
    """Why a TPU cannot run attention, or its gradients, on so many rows in these tiles, which need so many bytes of
    VMEM; or None. ``names``: what to choose smaller."""
    of_q, of_kv = grains(call)
    return (
        dtype_refused(call)
        or off_grid("block_q", tiling["block_q"], rows, of_q)
        or off_grid("block_kv", tiling["block_kv"], call.dims["kv_len"], of_kv)
        or over_vmem(call, needed, names)
    )


def resident(call: Call, bq: int, bkv: int, number: int) -> int:
    """The VMEM, in bytes, of one step of so many blocks of keys."""
    d, dv, lanes = whole_lanes(call.dims["d"]), whole_lanes(call.dims["dv"]), whole_lanes(bkv)
    keys = bkv * number
    streamed = call.arrays["q"].dtype.itemsize * (bq * d + keys * (d + dv) + bq * dv)
    bias = call.arrays["bias"]
    if bias is not None:
        streamed += bias.dtype.itemsize * whole_lanes(keys) * (8 if bias.shape[2] == 1 else bq)
    sums = 4 * bq * (dv + 2 * LANES)  # acc, and m and l, which have a register's width of lanes
    scores, little = (12 if bias is None else 16), 0  # s, p and the mask of one step, and a bias in float32
    if call.arrays["q"].dtype.itemsize == 4:
        scores += 6 + 4 * (d // LANES - 1) + 12 * (dv // LANES - 1)  # bfloat16 parts, and sums of their products
        scores += 3 * (number > 2)  # of several blocks at a time
        little = 2**19  # parts of k and v
    return 2 * streamed + sums + scores * bq * lanes + little


def fit(call: Call, tiling: Mapping[str, int]) -> Mapping[str, int]:
    """Half of both, as often as VMEM demands of a bias or long heads, however few rows there are."""
    bq, bkv = tiling["block_q"], tiling["block_kv"]
    while resident(call, bq, bkv, 1) > vmem_limit(call) and bkv > LANES:
        bq, bkv = max(LANES, bq // 2), bkv // 2
    return tiling if bkv == tiling["block_kv"] else {"block_q": bq, "block_kv": bkv}


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    rows, (bq, bkv) = call.dims["q_len"] * together(call), blocks(call, tiling)
    return refused(call, tiling, resident(call, bq, bkv, parts(call, bq, bkv)), rows)


def may_share(call: Call) -> bool:
    """Whether two cores may share a launch, of which each takes half of an axis. JAX often knows no chip yet."""
    hardware = targets.HARDWARE.get(call.target.arch)
    return hardware is None or (hardware.cores or 1) > 1


class Scores(NamedTuple):
    """How scores come of dots: what multiplies a dot, the softcap, and the unit in which the scores then stand.

    ``score_unit`` of the spec says why they are kept in that unit.
    """

    pre: float | None
    softcap: float | None
    unit: float

    @classmethod
    def of(cls, call: Call) -> Scores:
        pre, unit = score_unit(call)
        return cls(pre, call.options["softcap"], unit)

    def from_dots(self, s: Any, bias: Any, settle: bool = False) -> tuple[Any, Any]:
        """(the scores of a block of dots s, the tanh of its softcap), the latter None where there is no softcap.

        ``settle`` rounds the scores before the bias is added, as interpreted calls that take their maximum need it
        (`settled`).
        """
        tanh = None
        if self.pre is not None:
            s = s * self.pre
        if self.softcap is not None:
            s = tanh = jnp.tanh(s)
        if self.softcap is not None and bias is not None:
            s = s * self.softcap
        if settle:
            s = settled(s)
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


def half_of(ref: Refs, number: int, rows: int) -> Refs:
    """What a step works on, with the rows of one half."""
    mine, every = pl.ds(number * rows, rows), slice(None)
    cuts = {"q_segment_ids": (every, mine), **dict.fromkeys(("q", "m", "l", "acc"), (mine, every))}
    if "bias" in ref and ref.bias.shape[0] > 1:
        cuts["bias"] = (mine, every)
    return Refs(**{name: x.at[cuts[name]] if name in cuts else x for name, x in vars(ref).items()})


def kernel(
    ref: Refs, *, band: Band, order: Callable[[Any], Any], bkv: int, halves: int, scores: Scores, interpreted: bool
) -> None:
    """A step holds band.block_kv keys, which it takes bkv at a time, and on the band's edge ``halves`` of its rows.
    ``order``: which block of rows stands at a place of the grid."""
    i, step = order(step_along(2)), step_along(3)
    first, last = band.span(i)
    j = first + step

    @pl.when(step == 0)
    def start() -> None:
        ref.m[...] = jnp.full_like(ref.m, -jnp.inf)
        ref.l[...] = jnp.zeros_like(ref.l)
        ref.acc[...] = jnp.zeros_like(ref.acc)

    number, keys = band.block_kv // bkv, band.part(bkv)
    has_edges = band.first is not None or band.last is not None
    there = pl.cdiv(band.kv_len % band.block_kv, bkv)  # parts of the last step that hold a key

    def attend(edge: bool) -> None:
        if halves == 2 and (edge or interpreted):  # interpreted, a row's bits depend on the rows beside it
            attend_by_halves()
            return
        for part in range(there if edge and not has_edges else number):
            add(ref if number == 1 else part_of(ref, part, bkv), keys, i, j * number + part, edge)

    def attend_by_halves() -> None:
        small = keys._replace(block_q=band.block_q // 2)
        for half, part in itertools.product(range(2), range(number)):
            rows, columns = i * 2 + half, j * number + part
            low, high = small.span(rows)
            here = half_of(ref if number == 1 else part_of(ref, part, bkv), half, small.block_q)
            small.visit(rows, columns, (low <= columns) & (columns <= high), partial(add, here, small, rows, columns))

    def add(ref: Refs, keys: Band, i: Any, j: Any, edge: bool) -> None:
        bias = ref.bias[...].astype(jnp.float32) if "bias" in ref else None
        s, _ = scores.from_dots(dot(ref.q[...], ref.k[...], (1, 1)), bias, settle=interpreted)
        visible = visible_pairs(ref, keys, i, j, edge)
        if visible is not None:
            s = jnp.where(visible, s, -jnp.inf)
        m, p, shrink = online_step(ref.m[...], s, axis=1, unit=scores.unit)
        v = ref.v[...]
        if edge:  # p is 0 beyond kv_len, and 0 * NaN is NaN
            v = within(v, 0, j * bkv, band.kv_len, of=band.block_kv)
        ref.l[...] = ref.l[...] * shrink + jnp.sum(p, axis=1, keepdims=True)
        ref.acc[...] = ref.acc[...] * across(shrink, ref.acc.shape[1]) + dot(p.astype(v.dtype), v, (1, 0))
        ref.m[...] = m

    band.visit(i, j, j <= last, attend)

    @pl.when(step == pl.num_programs(3) - 1)
    def finish() -> None:
        l = ref.l[...]
        total = across(l, ref.acc.shape[1])
        ref.o[...] = jnp.where(total == 0, 0.0, ref.acc[...] / total).astype(ref.o.dtype)
        if "lse" in ref:
            lse = jnp.where(l == 0, -jnp.inf, ref.m[...] * scores.unit + jnp.log(l))
            ref.lse[...] = lse[:, :1].T


@BACKEND.implements("attention", key=key, fit=fit, supports=supports)
def attention(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array, jax.Array | None]:
    batch, q_len, heads, d = call.arrays["q"].shape
    dv, dtype, shared = call.dims["dv"], call.arrays["q"].dtype, together(call)
    heads, rows, of_keys = heads // shared, q_len * shared, call.dims["group"] // shared
    bq, bkv = blocks(call, tiling)
    band = Band.of(call, bq, bkv * parts(call, bq, bkv), shared)
    down = pl.cdiv(rows, bq)

    split = batch * heads == 1 and may_share(call)  # several batches or heads are what cores share, where there are any
    order = partial(dealt, blocks=down) if split and band.one_sided else lambda place: place

    def query(b: Any, h: Any, place: Any, step: Any) -> tuple[Any, Any, Any]:
        return b, h, band.ahead(place, step, down, order)[0]

    def key(b: Any, h: Any, place: Any, step: Any) -> tuple[Any, Any, Any]:
        return b, quotient(h, of_keys), band.ahead(place, step, down, order)[1]

    def written(b: Any, h: Any, place: Any, step: Any) -> tuple[Any, Any, Any]:
        return b, h, order(place)

    inputs = Operands(call, shared).at(bq, band.block_kv, query, key)
    outputs: Blocks = {"o": (jax.ShapeDtypeStruct((batch, heads, rows, dv), dtype), head_blocks(bq, dv, written))}
    if "lse" in call.wants:
        outputs["lse"] = (jax.ShapeDtypeStruct((batch, heads, 1, rows), jnp.float32), row_blocks(1, bq, written))
    steps = band.steps()
    pairs = batch * heads * rows * min(call.dims["kv_len"], steps * band.block_kv)
    found = launch(
        call,
        partial(
            kernel,
            band=band,
            order=order,
            bkv=bkv,
            halves=halves_of(call, bq),
            scores=Scores.of(call),
            interpreted=call.interpret,
        ),
        "portakern_attention",
        (batch, heads, down, steps),
        in_order=1,
        inputs=inputs,
        outputs=outputs,
        scratch={"m": (bq, LANES), "l": (bq, LANES), "acc": (bq, dv)},
        vmem=resident(call, bq, bkv, band.block_kv // bkv),
        cost=pl.CostEstimate(
            flops=2 * pairs * (d + dv),
            transcendentals=pairs,
            bytes_accessed=dtype.itemsize * (batch * heads * rows * (d + dv) + pairs // bq * (d + dv)),
        ),
    )
    lse = None
    if "lse" in found:
        lse = jnp.swapaxes(found["lse"].reshape(batch, heads, q_len, shared), 2, 3).reshape(batch, -1, q_len)
    return from_heads(found["o"], shared), lse
