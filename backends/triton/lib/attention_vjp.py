"""What attention's gradients measure scores from, a number a row: a kernel before theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.launch import (
    accumulator,
    cdiv,
    launch,
    torch_dtype,
)
from portakern.backends.triton.layout import fresh
from portakern.backends.triton.lib.attention import padded
from portakern.backends.triton.lib.heads import (
    program,
)
from portakern.backends.triton.lib.split_kv import alike
from portakern.spec import Count, Tile

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

AT_ONCE = 4096  # elements of o for a program of attention_vjp_statistics_kernel

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
    """What the kernel is compiled for."""

    rows: int
    block_dv: int
    columns: int
    acc_dtype: tl.dtype
    limit: float


@triton.jit
def attention_vjp_statistics_kernel(o, d_o, lse, d_lse, lse_low, out, extents, rate, strides, tile: tl.constexpr):
    """delta = sum(o d_o) - d_lse and shift + low = (lse + lse_low) (rate + rate_low), what scores are measured from in
    their unit; all (batch, heads, pitch), where pitch >= q_len. low is 0, and only there, where |lse| is below
    ``limit``; flags, (batch, heads, ``FLAGS``), unless that is None, say where one of ``rows`` queries is not so.
    sums: memory of the queries' ``columns`` each that is set to 0, (batch, heads, pitch, columns), or None.

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
    tl.store(out.shift + at, tl.where(unseen, float("inf"), high), mask=i_ok)
    far = i_ok & (tl.abs(l) >= tile.limit) & (tl.abs(high) < float("inf"))
    tl.store(out.low + at, tl.where(far, tl.where(rest == 0.0, 1e-30, rest), 0.0), mask=i_ok)
    if out.flags is not None:
        pitch_of_flags = tl.cdiv(extents.tiles, FLAGS) * FLAGS
        line, i = out.flags + (batch * extents.heads + head) * pitch_of_flags, tl.arange(0, FLAGS)
        if index == extents.tiles - 1:  # what several flags that are read at once have behind the last
            tl.store(line + extents.tiles + i, tl.zeros([FLAGS], tl.int8), mask=extents.tiles + i < pitch_of_flags)
        tl.store(line + index, tl.max(far.to(tl.int32), 0).to(tl.int8))
    tl.store(out.delta + at, tl.where(unseen, 0.0, total), mask=i_ok)
    if out.sums is not None:
        zeros = tl.full([tile.rows, tile.columns], 0.0, tl.float32)
        tl.store(out.sums + at[:, None] * tile.columns + tl.arange(0, tile.columns)[None, :], zeros, mask=i_ok[:, None])


def statistics(
    call: Call, o: torch.Tensor, d_o: torch.Tensor, rate: tuple[float, float], multiple: int = 1, limit: float = 0.0,
    sums: torch.Tensor | None = None, lines: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """(shift, low, flags, delta) of ``attention_vjp_statistics_kernel``: pitch is q_len, or the next multiple of so
    many. rate: in two parts, what lse is multiplied by. limit: the |lse| from which on there is a low, and a flag; 0:
    always, and there are no flags. sums: what it sets to 0. lines: memory for shift and delta."""
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
    tile = StatisticsTile(rows, block_dv, 0 if sums is None else sums.shape[-1], accumulator(call.dtype), limit)
    launch(attention_vjp_statistics_kernel, tiles * heads * batch, call, o, d_o, lse, d_lse, lse_low,
           Statistics(shift, low, flags, delta, sums), StatisticsExtents(tiles, heads, q_len, pitch, dv), Rate(*rate),
           strides, tile=tile, enable_fp_fusion=False)  # fmt: skip
    return shift, low, flags, delta


def flagged(dv: int) -> int:
    """How many queries share a flag that says whether one of them has an lse far from 0."""
    return max(1, AT_ONCE // padded(dv))


KNOBS = {
    "num_warps": Tile(1, 16),
    "num_stages": Count(1, 8),
    "dq_block_q": Tile(16, 1024),
    "dq_block_kv": Tile(16, 1024),
    "threefold": Count(0, 1),
    "matrix_instr_nonkdim": Tile(16, 32),
}
