"""Packed sequences: which keys each query sees by segment ids, and which queries see each key, before attention runs.

Attention with segment ids sees pairs of one segment alone. Of each row of one side (queries or keys) a kernel finds the
*range* [lo, hi) of the other side: from the first position that has the row's id to behind the last. A tile of rows
does not visit what lies outside of the ranges of all of its rows. Where ids are sorted, as those of documents that are
packed one behind the other, what is left is block-diagonal. Ids in any order are right: a range may hold other segments
too, and pairs are compared in the tiles that are visited.

A tile that is masked for a row leaves the row's state as it is, so a row has the same bits as without ranges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.launch import cdiv, launch, torch_dtype
from portakern.backends.triton.layout import fresh
from portakern.backends.triton.lib.band import within

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


class RangeStrides(NamedTuple):
    """Of the ids of the rows, and of the ids of the other side: (batch, position)."""

    own: tuple[int, int]
    other: tuple[int, int]


class RangeExtents(NamedTuple):
    """``tiles``: of the rows of a batch entry; ``own``: its rows; ``other``: positions of the other side."""

    tiles: int
    own: int
    other: int


class RangeTile(NamedTuple):
    """What the kernel is compiled for: the rows of a program, the positions that are compared with them at a time, and
    how many tiles of such positions are read at once to find those that may hold an id of the rows."""

    rows: int
    positions: int
    ahead: int


SUMMARY = tl.constexpr(5)  # numbers of a tile

TILE = RangeTile(rows=64, positions=32, ahead=64)


@triton.jit
def nothing_met(rows: tl.constexpr, columns: tl.constexpr, length):
    """The (lo, hi, count) of places that met no position with their id, out of ``length``."""
    lo, hi = tl.full([rows, columns], 0, tl.int32) + length, tl.full([rows, columns], 0, tl.int32)
    return lo, hi, hi


@triton.jit
def met(state, same, position, length):
    """The (lo, hi, count) of places with one more position each, where it has the ``same`` id."""
    lo, hi, count = state
    lo = tl.minimum(lo, tl.where(same, position, length))
    return lo, tl.maximum(hi, tl.where(same, position + 1, 0)), count + same.to(tl.int32)


@triton.jit
def attention_segment_ranges_kernel(own, other, ranges, summaries, strides, extents, tile: tl.constexpr):
    """The ranges, (batch, rows, 2), of the rows of a tile. A row whose id nobody has gets [extents.other, 0).

    summaries: (batch, tiles, 5) numbers of the tile, or None: where the first of its ranges begins, where the last
    ends, where the last begins, where the first ends, and whether a range holds other segments too.

    Each place of a tile of ids keeps what it met, and places of a row are joined at the end alone. Rows of one id, as
    a single query is, are compared with all positions that are read at once.
    """
    index, batch = tl.program_id(0) % extents.tiles, (tl.program_id(0) // extents.tiles).to(tl.int64)
    own_b, own_s = strides.own
    other_b, other_s = strides.other
    other += batch * other_b
    row = index * tile.rows + tl.arange(0, tile.rows)
    # Rows and positions past the end have the id of the last one, which widens no range of ids.
    ids = tl.load(own + batch * own_b + tl.minimum(row, extents.own - 1).to(tl.int64) * own_s)
    least, greatest = tl.min(ids, 0), tl.max(ids, 0)
    part, column = tl.arange(0, tile.ahead), tl.arange(0, tile.positions)
    of_rows = nothing_met(tile.rows, tile.positions, extents.other)
    of_all = nothing_met(tile.ahead, tile.positions, extents.other)
    for start in range(0, extents.other, tile.ahead * tile.positions):
        at = start + part[:, None] * tile.positions + column[None, :]
        read = tl.load(other + tl.minimum(at, extents.other - 1).to(tl.int64) * other_s)
        if least == greatest:
            of_all = met(of_all, (read == least) & (at < extents.other), at, extents.other)
        else:
            meets = (tl.min(read, 1) <= greatest) & (tl.max(read, 1) >= least)
            meets &= start + part * tile.positions < extents.other
            first = tl.min(tl.where(meets, part, tile.ahead), 0)
            last = tl.max(tl.where(meets, part + 1, 0), 0)
            for here in range(first, last):
                j = (start + here * tile.positions + column)[None, :]
                j_ok = j < extents.other
                same = (ids[:, None] == tl.load(other + j.to(tl.int64) * other_s, mask=j_ok, other=0)) & j_ok
                of_rows = met(of_rows, same, j, extents.other)
    lo = tl.minimum(tl.min(of_rows[0], 1), tl.min(of_all[0]))
    hi = tl.maximum(tl.max(of_rows[1], 1), tl.max(of_all[1]))
    count = tl.sum(of_rows[2], 1) + tl.sum(of_all[2])
    at = ranges + (batch * extents.own + row) * 2
    tl.store(at, lo, mask=row < extents.own)
    tl.store(at + 1, hi, mask=row < extents.own)
    if summaries is not None:
        at = summaries + (batch * extents.tiles + index) * SUMMARY
        tl.store(at, tl.min(lo, 0))
        tl.store(at + 1, tl.max(hi, 0))
        tl.store(at + 2, tl.max(lo, 0))
        tl.store(at + 3, tl.min(hi, 0))
        tl.store(at + 4, tl.max((count < hi - lo).to(tl.int32), 0))


def segment_ranges(call: Call, own: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """The ranges of rows with the ids ``own`` among positions with the ids ``other``, (batch, rows, 2) int32; None of
    a call without ids."""
    return None if own is None or other is None else ranges_and_summaries(call, own, other, False)[0]


def ranges_and_summaries(
    call: Call, own: torch.Tensor, other: torch.Tensor, summarised: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The ranges, and the numbers of each tile of ``TILE.rows`` rows, (batch, tiles, 5) int32, where these are asked
    for: see the kernel."""
    (batch, rows), positions = own.shape, other.shape[1]
    int32, tiles = torch_dtype("int32"), cdiv(rows, TILE.rows)
    ranges = fresh((batch, rows, 2), int32, own.device)
    summaries = fresh((batch, tiles, SUMMARY.value), int32, own.device) if summarised else None
    launch(attention_segment_ranges_kernel, tiles * batch, call, own, other, ranges, summaries,
           RangeStrides(own.stride(), other.stride()), RangeExtents(tiles, rows, positions), tile=TILE,
           num_warps=4)  # fmt: skip
    return ranges, summaries


@triton.jit
def within_ranges(span, ranges, at, ok, length, block: tl.constexpr):
    """Of the tiles of ``block`` positions that ``band`` gives those that lie in a range of the rows of a tile. ``at``,
    ``ok``: the rows among those of all batch entries, and which of them exist. length: of the other side."""
    start = tl.min(tl.load(ranges + at * 2, mask=ok, other=length)) // block * block
    end = tl.max(tl.load(ranges + at * 2 + 1, mask=ok, other=0))
    return within(span, start, tl.maximum(start, end))
