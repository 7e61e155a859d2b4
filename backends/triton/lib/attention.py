"""Of attention's forward pass what decides tiles and programs, memory for results, and the merger of chunks of keys; of
its gradients what they measure scores from, a number a row, by a kernel before theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.configs import FewQueriesTilesConfig
from portakern.backends.triton.launch import (
    accumulator,
    cdiv,
    compiler_options,
    launch,
    refuse_common,
    shared_limit,
    torch_dtype,
)
from portakern.backends.triton.layout import fresh, gathered, pow2_at_least
from portakern.backends.triton.lib.heads import (
    AttentionPlan,
    Scores,
    precision_of,
    program,
)
from portakern.backends.triton.lib.matmul import products
from portakern.backends.triton.lib.split_kv import (
    alike,
    beside_sink,
    chunk_length,
    chunks_of_a_tile,
    log_sum,
    merge,
    worth_spreading,
)
from portakern.spec.dtypes import numpy_dtype
from portakern.specs.attention import first_place

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

AT_ONCE = 1024  # elements of o for a program of attention_combine_kernel

FEW_ROWS = 512  # so many rows at most have a program of attention_combine_kernel each

AHEAD = tl.constexpr(8)  # parts that it reads before it needs the first of them


class Results(NamedTuple):
    """Where o, lse and lse_low go; None for what this kernel does not write."""

    o: Any
    lse: Any
    low: Any


class Parts(NamedTuple):
    """Where the states of chunks go: sums and statistics. None where there are no chunks."""

    sums: Any
    statistics: Any


class Rows(NamedTuple):
    """Of o: its heads, the queries of a head, and the numbers of a row."""

    heads: int
    q_len: int
    dv: int


class CombineTile(NamedTuple):
    """What the merger of chunks is compiled for: the rows of a program, the width of their tile, what it sums in, and
    whether it is launched before what it reads is there."""

    rows: int
    block_dv: int
    acc_dtype: tl.dtype
    follows: bool


@triton.jit
def store_rows(out, state, at_o, at_lse, ok, scores, dv, block_dv: tl.constexpr, sink=None):
    """Rows of o, and of lse and low unless these are None, from the state of all their keys. ``at_o``, ``at_lse``:
    where they are, in rows of o and in elements of lse, as columns. ``sink``: of each row, None for none."""
    acc, l, m = state
    ddv = tl.arange(0, block_dv)[None, :]
    rows = acc * (1.0 / tl.where(l == 0.0, 1.0, l))[:, None]  # l = 0: every key masked, and acc is 0 too
    if sink is not None:
        total, rest = log_sum(l, m, scores)
        share, _, _ = beside_sink(total, rest, sink.to(m.dtype))
        rows = rows * share[:, None]
    tl.store(out.o + at_o * dv + ddv, rows.to(out.o.dtype.element_ty), mask=ok & (ddv < dv))
    if out.lse is not None or out.low is not None:
        total, rest = log_sum(l, m, scores)
        if sink is not None:
            _, total, rest = beside_sink(total, rest, sink.to(m.dtype))
        if out.lse is not None:
            tl.store(out.lse + at_lse, total[:, None], mask=ok)
        if out.low is not None:
            tl.store(out.low + at_lse, rest[:, None], mask=ok)


@triton.jit(do_not_specialize=["chunks", "total"])
def attention_combine_kernel(
    parts, statistics, sinks, o, lse, low, scores, chunks, total, extents, tile: tl.constexpr
):  # fmt: skip
    """o, and lse and low unless these are None, of ``rows`` of the ``total`` rows, whose ``chunks`` parts are merged in
    order, and after them the sink of their head, unless that is None.

    parts: (batch, heads, q_len, chunks, dv); statistics: (batch, heads, q_len, chunks, 2), l and m; sinks: (heads,).
    follows: launched before the kernel that writes the parts has ended, for whose end it waits here.
    """
    if tile.follows:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * tile.rows + tl.arange(0, tile.rows)
    row_ok, ddv = row < total, tl.arange(0, tile.block_dv)[None, :]
    acc = tl.full([tile.rows, tile.block_dv], 0.0, tile.acc_dtype)
    l = tl.full([tile.rows], 0.0, tile.acc_dtype)
    m = tl.full([tile.rows], float("-inf"), tile.acc_dtype)
    for first in range(0, chunks, AHEAD):
        read = ()
        for ahead in tl.static_range(AHEAD):
            chunk = first + ahead
            at, ok = row * chunks + chunk, row_ok & (chunk < chunks)
            acc_part = tl.load(parts + at[:, None] * extents.dv + ddv, mask=ok[:, None] & (ddv < extents.dv), other=0.0)
            l_part = tl.load(statistics + at * 2, mask=ok, other=0.0)
            m_part = tl.load(statistics + at * 2 + 1, mask=ok, other=float("-inf"))
            read = read + ((acc_part, l_part, m_part),)  # type: ignore[assignment]
        tl.debug_barrier()  # else each part is read when the one before is merged, and waited for
        for ahead in tl.static_range(AHEAD):
            acc, l, m = merge((acc, l, m), read[ahead], scores)
    head, batch, query = (
        row // extents.q_len % extents.heads,
        row // extents.q_len // extents.heads,
        row % extents.q_len,
    )
    at_o = ((batch * extents.q_len + query) * extents.heads + head)[:, None]
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + head)
    store_rows(
        Results(o, lse, low), (acc, l, m), at_o, row[:, None], row_ok[:, None], scores, extents.dv, tile.block_dv, sink
    )


def padded(d: int) -> int:
    """The tile extent that a head dimension takes: dots want powers of two, of at least 16."""
    return pow2_at_least(d, 16)


def head_tiles(call: Call) -> tuple[int, int]:
    """The tile extents that d and dv take: ``padded``, but in 16 bits on Hopper alike up to 64, where rows of 128 bytes
    begin.

    A k and v that cannot be copied asynchronously (one stage, or rows that are no multiple of 4 bytes) take turns at
    one address of shared memory. Where their tiles differ in layout, which rows of 32, 64 and 128 bytes do, ptxas 12.8,
    which Triton 3.6 brings, forms addresses for the matrix unit from uniform registers that nothing wrote: products
    past the first 16 keys read other memory, or leave shared memory. ptxas 12.9 is right (``undefined_registers``).
    """
    d, dv = padded(call.dims["d"]), padded(call.dims["dv"])
    least = min(64, max(d, dv)) if call.target.arch == "sm_90" and call.dtype in ("float16", "bfloat16") else 0
    return max(d, least), max(dv, least)


def key(call: Call) -> dict[str, str | int]:
    """Of the head dimensions, the dtype and the target alone, never of how many queries, heads or samples there are.

    ``size``: bytes of an element, by which float64 is told from float32.
    """
    size = numpy_dtype(call.dtype).itemsize
    return {"products": products(call, call.dtype), "d": max(call.dims["d"], call.dims["dv"]), "size": size}


def fit(call: Call, config: FewQueriesTilesConfig) -> FewQueriesTilesConfig:
    """Fewer stages, then fewer keys at a time, where shared memory has no room: a bias takes some too."""
    limit = shared_limit(call.target.arch)
    while config.num_stages > 1 and shared_bytes(call, config) > limit:
        config = config.replace(num_stages=config.num_stages - 1)
    while config.block_kv > 16 and shared_bytes(call, config) > limit:
        config = config.replace(block_kv=config.block_kv // 2)
    return config


def shared_bytes(call: Call, config: FewQueriesTilesConfig) -> int:
    """Shared memory that the compiler gives this call: q, and a buffer a stage for each tile that the loop loads.

    On AMD a stage is one buffer less, q passes through before the loop and p within it.
    """
    size, bias = (2 if call.dtype in ("float16", "bfloat16") else 4), call.arrays["bias"]
    (d, dv), block_q, block_kv, stages = head_tiles(call), config.block_q, config.block_kv, config.num_stages
    if call.target.arch.startswith("gfx"):
        return max(block_q * d * size, max(1, stages - 1) * block_kv * (d + dv) * size + block_q * block_kv * size)
    extra = 0 if bias is None else block_q * block_kv * bias.element_size()
    extra += 0 if call.arrays["q_segment_ids"] is None else block_kv * 8
    if precision_of(call, config) == "threefold":  # both parts of q, and of k or v in turn
        parts = 2 * (block_q * d + block_kv * max(d, dv))
        return (parts + (stages - 1) * block_kv * (d + dv)) * size + max(0, stages - 1) * extra
    return (block_q * d + stages * block_kv * (d + dv)) * size + max(0, stages - 1) * extra


def supports(call: Call, config: FewQueriesTilesConfig) -> str | None:
    dims, block_q, block_kv = call.dims, config.block_q, config.block_kv
    d, dv = head_tiles(call)
    if dims["q_len"] + dims["kv_len"] > 1 << 30:
        return "more than 2^30 queries and keys: positions are 32-bit here"
    if max(block_q * block_kv, max(block_q, block_kv) * max(d, dv)) > 1 << 20:
        return (
            f"tiles of {block_q} x {block_kv} at head dimensions {dims['d']} and {dims['dv']} exceed Triton's limit "
            "of 2^20 elements"
        )
    if not call.interpret:
        shared, limit = shared_bytes(call, config), shared_limit(call.target.arch)
        if shared > limit:
            return (
                f"tiles of {block_q} x {block_kv} with {config.num_stages} stages take {shared} bytes of shared "
                f"memory; {call.target.arch} has {limit}"
            )
    _, programs, _, _ = programs_of(call, config, rows_plan(call, config)[0])
    return refuse_common(
        call, config.num_warps, programs, (f"a tile of {block_q} x {block_kv}", block_q * (dv + block_kv))
    )


def results(call: Call, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Memory for o, lse and lse_low; None for one of these that nobody wants."""
    (shape, dtype_of_o), *rows = (call.outputs[name] for name in ("o", "lse", "lse_low"))
    o = fresh(shape, torch_dtype(dtype_of_o), q.device)
    wanted = ("lse" in call.wants, "lse_low" in call.wants)
    lse, low = (
        fresh(extents, torch_dtype(dtype), q.device) if there else None
        for (extents, dtype), there in zip(rows, wanted, strict=True)
    )
    return o, lse, low


def combine(
    call: Call, found: tuple[Any, Any], out: tuple[Any, Any, Any], scores: Scores, follows: bool = False
) -> None:
    """Merge the parts and statistics that were ``found``, and sinks, into o, lse and lse_low. ``follows``: NVIDIA's,
    see the kernel."""
    batch, heads, q_len, chunks, dv = found[0].shape
    total, block_dv = batch * heads * q_len, head_tiles(call)[1]
    rows = max(1, AT_ONCE // block_dv) if total > FEW_ROWS else 1
    tile = CombineTile(rows, block_dv, accumulator(call.dtype), follows)
    launch(attention_combine_kernel, cdiv(total, rows), call, *found, sinks_of(call), *out, scores, chunks, total,
           Rows(heads, q_len, dv), tile=tile, num_warps=4,
           **({"launch_pdl": True, "maxnreg": 128} if follows else {}))  # fmt: skip


def sinks_of(call: Call) -> torch.Tensor | None:
    """The sinks of a call, one beside the other."""
    return _beside_each_other(call.arrays["sinks"])


def slopes_of(call: Call) -> torch.Tensor | None:
    """The slopes of a call, one beside the other."""
    return _beside_each_other(call.arrays["alibi_slopes"])


def place_of_slopes(call: Call) -> int | None:
    """The key beside which query 0 stands, None of a call without slopes."""
    return None if call.arrays["alibi_slopes"] is None else first_place(call)


def _beside_each_other(numbers: torch.Tensor | None) -> torch.Tensor | None:
    return numbers if numbers is None or numbers.stride(0) == 1 else gathered(numbers)


def rows_plan(call: Call, config: FewQueriesTilesConfig) -> tuple[AttentionPlan, dict[str, int]]:
    """How a tile's rows are chosen and computed, and what the compiler is told.

    A head whose queries do not fill a tile shares it with the other heads of its group; rows that are few altogether
    take a tile of ``block_q_few``, with ``num_stages_few`` of keys on their way, or as many as there is room for. None
    of it moves a bit of a row where a row of scores lies in as many lanes either way, which is why ``block_q_few``
    stands in rows of tables and has no formula.
    """
    dims, block_q, warps, stages = call.dims, config.block_q, config.num_warps, config.num_stages
    packed = dims["group"] > 1 and dims["q_len"] < block_q
    few = min(config.get("block_q_few", block_q), block_q)
    if dims["q_len"] * (dims["group"] if packed else 1) <= few < block_q:
        block_q, warps = few, min(warps, max(4, warps * few // block_q))
        for more in range(stages + 1, config.get("num_stages_few", stages) + 1):
            needed = shared_bytes(call, config.replace(block_q=few, num_stages=more))
            stages = more if needed <= shared_limit(call.target.arch) else stages
    (block_d, block_dv), d, dv = head_tiles(call), dims["d"], dims["dv"]
    plan = AttentionPlan(block_q, config.block_kv, block_d, block_dv, block_d != d, block_dv != dv,
                precision_of(call, config), accumulator(call.dtype), packed=packed)  # fmt: skip
    return plan, compiler_options(config) | {"num_warps": warps, "num_stages": stages}


def programs_of(
    call: Call, config: FewQueriesTilesConfig, plan: AttentionPlan
) -> tuple[int, int, int | None, int | None]:
    """(tiles of queries that a head has, or a group; programs; keys of a chunk, or None; chunks of a tile that have
    programs of their own, or None)."""
    dims, chunk = call.dims, chunk_length(call, config)
    packed = dims["group"] if plan.packed else 1
    tiles_q = cdiv(dims["q_len"] * packed, plan.block_q)
    programs = tiles_q * dims["kv_heads"] * (dims["group"] // packed) * dims["batch"]
    if chunk is None:
        return tiles_q, programs, None, None
    chunks = chunks_of_a_tile(call, chunk, min(dims["q_len"], cdiv(plan.block_q, packed) + 1))
    if chunks > 1 and worth_spreading(call, programs, chunks):
        return tiles_q, programs * chunks, chunk, chunks
    return tiles_q, programs, chunk, None


def window_of(
    is_causal: bool, window: tuple[int | None, int | None] | None, enough: int
) -> tuple[int | None, int | None]:
    """Causal and window masks as one: how far left and right of its own place a query sees, None for all the way."""
    left, right = window or (None, None)
    if is_causal:
        right = 0
    return (None if left is None else min(left, enough)), (None if right is None else min(right, enough))


STATISTICS_AT_ONCE = 4096  # elements of o for a program of attention_vjp_statistics_kernel

FLAGS = tl.constexpr(8)  # of a head's queries are a multiple of so many, of which a power of two is read at once


class Statistics(NamedTuple):
    """Where what is known of each query goes. flags and sums may be None."""

    shift: Any
    low: Any
    flags: Any
    delta: Any
    sums: Any


class StatisticsExtents(NamedTuple):
    """``tiles``: of a head's queries; ``pitch``: from head to head of what is written."""

    tiles: int
    heads: int
    q_len: int
    pitch: int
    dv: int


class Rate(NamedTuple):
    """What lse is multiplied by to be in the unit of scores, in two parts."""

    high: float
    low: float


class StatisticsStrides(NamedTuple):
    """Of what is read; None for what is absent."""

    o: tuple[int, ...] | None
    d_o: tuple[int, ...] | None
    lse: tuple[int, ...] | None
    d_lse: tuple[int, ...] | None
    lse_low: tuple[int, ...] | None


class StatisticsTile(NamedTuple):
    """What the kernel is compiled for. ``copies``: of shift and delta; each begins one query after the one before."""

    rows: int
    block_dv: int
    columns: int
    acc_dtype: tl.dtype
    limit: float
    copies: int


@triton.jit
def attention_vjp_statistics_kernel(o, d_o, lse, d_lse, lse_low, out, extents, rate, strides, tile: tl.constexpr):
    """delta = sum(o d_o) - d_lse and shift + low = (lse + lse_low) (rate + rate_low), what scores are measured from in
    their unit; all (batch, heads, pitch), where pitch >= q_len, and of shift and delta ``copies`` such. low is 0, and
    only there, where |lse| is below ``limit``; flags, (batch, heads, ``FLAGS``), unless that is None, say where one of
    ``rows`` queries is not so. sums: memory of the queries' ``columns`` each that is set to 0, (batch, heads, pitch,
    columns), or None.

    A row that sees no key gets shift = inf, so that its p is 0, and delta = 0. To be compiled without contraction:
    products fused into the first step of a butterfly sum leave lanes a bit apart.
    """
    o_b, o_s, o_h, o_d = strides.o
    do_b, do_s, do_h, do_d = strides.d_o
    lse_b, lse_h, lse_s = strides.lse
    index, head, batch = program(extents.tiles, extents.heads)
    i = index * tile.rows + tl.arange(0, tile.rows)
    i_ok, row, ddv = i < extents.q_len, i.to(tl.int64), tl.arange(0, tile.block_dv)[None, :]
    ok = i_ok[:, None] & (ddv < extents.dv)
    o_at = o + batch * o_b + head * o_h + (row[:, None] * o_s + ddv.to(tl.int64) * o_d)
    d_o_at = d_o + batch * do_b + head * do_h + (row[:, None] * do_s + ddv.to(tl.int64) * do_d)
    o_tile = tl.load(o_at, mask=ok, other=0.0).to(tile.acc_dtype)
    d_o_tile = tl.load(d_o_at, mask=ok, other=0.0).to(tile.acc_dtype)
    total = tl.sum(o_tile * d_o_tile, 1)
    if d_lse is not None:
        dl_b, dl_h, dl_s = strides.d_lse
        total -= tl.load(d_lse + batch * dl_b + head * dl_h + row * dl_s, mask=i_ok, other=0.0)
    l = tl.load(lse + batch * lse_b + head * lse_h + row * lse_s, mask=i_ok, other=0.0)
    rest = tl.full([tile.rows], 0.0, tile.acc_dtype)
    if lse_low is not None:
        low_b, low_h, low_s = strides.lse_low
        rest = tl.load(lse_low + batch * low_b + head * low_h + row * low_s, mask=i_ok, other=0.0)
    unseen = l == float("-inf")
    high = l * rate.high
    rest = tl.fma(l, alike(l, rate.high), -high) + (l * rate.low + rest * rate.high)
    at = (batch * extents.heads + head) * extents.pitch + row
    shift, delta = tl.where(unseen, float("inf"), high), tl.where(unseen, 0.0, total)
    tl.store(out.shift + at, shift, mask=i_ok)
    far = i_ok & (tl.abs(l) >= tile.limit) & (tl.abs(high) < float("inf"))
    # the least number that is not flushed stands for a rest of 0: in units of a scale of 1e30 it is 1e-8 in float32
    least: tl.constexpr = 2.2250738585072014e-308 if tile.acc_dtype == tl.float64 else 1.1754944e-38
    tl.store(out.low + at, tl.where(far, tl.where(rest == 0.0, least, rest), 0.0), mask=i_ok)
    if out.flags is not None:
        pitch_of_flags = tl.cdiv(extents.tiles, FLAGS) * FLAGS
        line, i = out.flags + (batch * extents.heads + head) * pitch_of_flags, tl.arange(0, FLAGS)
        if index == extents.tiles - 1:  # what several flags that are read at once have behind the last
            tl.store(line + extents.tiles + i, tl.zeros([FLAGS], tl.int8), mask=extents.tiles + i < pitch_of_flags)
        tl.store(line + index, tl.max(far.to(tl.int32), 0).to(tl.int8))
    tl.store(out.delta + at, delta, mask=i_ok)
    copies: tl.constexpr = tile.copies
    for copy in tl.static_range(1, copies):
        to = at - copy + copy * (tl.num_programs(0) // extents.tiles).to(tl.int64) * extents.pitch
        tl.store(out.shift + to, shift, mask=i_ok & (row >= copy))
        tl.store(out.delta + to, delta, mask=i_ok & (row >= copy))
    if out.sums is not None:
        zeros = tl.full([tile.rows, tile.columns], 0.0, tl.float32)
        tl.store(out.sums + at[:, None] * tile.columns + tl.arange(0, tile.columns)[None, :], zeros, mask=i_ok[:, None])


def statistics(
    call: Call, o: torch.Tensor, d_o: torch.Tensor, rate: tuple[float, float], multiple: int = 1, limit: float = 0.0,
    sums: torch.Tensor | None = None, lines: Sequence[torch.Tensor] = (), copies: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """(shift, low, flags, delta) of ``attention_vjp_statistics_kernel``: pitch is q_len, or the next multiple of so
    many. rate: in two parts, what lse is multiplied by. limit: the |lse| from which on there is a low, and a flag; 0:
    always, and there are no flags. sums: what it sets to 0. lines: memory for shift and delta, of so many copies."""
    lse, d_lse, lse_low = (call.arrays[name] for name in ("lse", "d_lse", "lse_low"))
    batch, q_len, heads, dv = o.shape
    block_dv, pitch, rows = padded(dv), cdiv(q_len, multiple) * multiple, flagged(dv)
    low = fresh((batch, heads, pitch), lse.dtype, o.device)
    shift, delta = lines or (fresh((batch, heads, pitch), lse.dtype, o.device) for _ in range(2))
    tiles = cdiv(q_len, rows)
    flags = (
        fresh((batch, heads, cdiv(tiles, FLAGS.value) * FLAGS.value), torch_dtype("int8"), o.device) if limit else None
    )
    strides = StatisticsStrides(*(None if x is None else x.stride() for x in (o, d_o, lse, d_lse, lse_low)))
    tile = StatisticsTile(rows, block_dv, 0 if sums is None else sums.shape[-1], accumulator(call.dtype), limit, copies)
    launch(attention_vjp_statistics_kernel, tiles * heads * batch, call, o, d_o, lse, d_lse, lse_low,
           Statistics(shift, low, flags, delta, sums), StatisticsExtents(tiles, heads, q_len, pitch, dv), Rate(*rate),
           strides, tile=tile, enable_fp_fusion=False)  # fmt: skip
    return shift, low, flags, delta


ROWS_AT_ONCE = 1024  # of a head's rows, in a program of attention_vjp_d_sinks_kernel


class SinkStrides(NamedTuple):
    """Of lse and lse_low; None for what is absent."""

    lse: tuple[int, ...]
    lse_low: tuple[int, ...] | None


class SinkExtents(NamedTuple):
    """``total``: rows of a head, in all batch entries; ``pitch``: from head to head of delta."""

    total: int
    heads: int
    q_len: int
    pitch: int


class SinkTile(NamedTuple):
    """What the kernel is compiled for."""

    rows: int
    acc_dtype: tl.dtype


@triton.jit
def attention_vjp_d_sinks_kernel(sinks, lse, lse_low, delta, d_sinks, extents, strides, tile: tl.constexpr):
    """d_sinks of one head, -sum exp(min(sink - lse - lse_low, 0)) delta over batch entries and queries, ``rows`` of
    them at a time, one after another. delta: (batch, heads, pitch); rows with lse = -inf add nothing."""
    head = tl.program_id(0).to(tl.int64)
    lse_b, lse_h, lse_s = strides.lse
    sink = tl.load(sinks + head).to(tile.acc_dtype)
    total = tl.full([tile.rows], 0.0, tile.acc_dtype)
    for start in range(0, extents.total, tile.rows):
        place = (start + tl.arange(0, tile.rows)).to(tl.int64)
        ok, batch, row = place < extents.total, place // extents.q_len, place % extents.q_len
        l = tl.load(lse + batch * lse_b + head * lse_h + row * lse_s, mask=ok, other=float("-inf"))
        rest = tl.full([tile.rows], 0.0, tile.acc_dtype)
        if lse_low is not None:
            low_b, low_h, low_s = strides.lse_low
            rest = tl.load(lse_low + batch * low_b + head * low_h + row * low_s, mask=ok, other=0.0)
        delta_i = tl.load(delta + (batch * extents.heads + head) * extents.pitch + row, mask=ok, other=0.0)
        p = tl.exp(tl.minimum((sink - l) - rest, 0.0, propagate_nan=tl.PropagateNan.ALL))
        total -= tl.where(l == float("-inf"), 0.0, p * delta_i)
    tl.store(d_sinks + head, tl.sum(total, 0).to(d_sinks.dtype.element_ty))


def sink_gradient(call: Call, delta: torch.Tensor, d_sinks: torch.Tensor | None) -> None:
    """Write d_sinks, unless it is None, from the delta of ``statistics``."""
    if d_sinks is None:
        return
    lse, lse_low = call.arrays["lse"], call.arrays["lse_low"]
    (batch, heads, q_len), pitch = lse.shape, delta.shape[-1]
    strides = SinkStrides(lse.stride(), None if lse_low is None else lse_low.stride())
    tile = SinkTile(ROWS_AT_ONCE, accumulator(call.dtype))
    launch(attention_vjp_d_sinks_kernel, heads, call, sinks_of(call), lse, lse_low, delta, d_sinks,
           SinkExtents(batch * q_len, heads, q_len, pitch), strides, tile=tile, num_warps=4)  # fmt: skip


def flagged(dv: int) -> int:
    """How many queries share a flag that says whether one of them has an lse far from 0."""
    return max(1, STATISTICS_AT_ONCE // padded(dv))
