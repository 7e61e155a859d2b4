"""Packed sequences: which keys each query sees by segment ids, and which queries see each key, before attention runs.

Attention with segment ids sees pairs of one segment alone. Of each row of one side (queries or keys) a kernel finds the
*range* [lo, hi) of the other side: from the first position that has the row's id to behind the last. A tile of rows
does not visit what lies outside of the ranges of all of its rows. Where ids are sorted, as those of documents that are
packed one behind the other, what is left is block-diagonal. Ids in any order are right: a range may hold other segments
too, and pairs are compared in the tiles that are visited.

A tile that is masked for a row leaves the row's state as it is, so a row has the same bits as without ranges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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
    """``tiles``, ``other_tiles``: of the rows of a batch entry, and of the positions of the other side; ``batch``:
    entries; ``own``: rows of one; ``other``: positions of the other side."""

    tiles: int
    other_tiles: int
    batch: int
    own: int
    other: int


class RangeTile(NamedTuple):
    """What the kernel is compiled for: the rows of a program, the positions that are compared with them at a time, and
    how many tiles of such positions are read at once to find those that may hold an id of the rows."""

    rows: int
    positions: int
    ahead: int


class OrderExtents(NamedTuple):
    """``tiles``: of a batch entry, and ``all_tiles``: of all of them; ``summaries``: of a batch entry; ``before``:
    positions that stand before row 0; ``other``: positions of a batch entry."""

    tiles: int
    all_tiles: int
    summaries: int
    before: int
    other: int


class OrderTile(NamedTuple):
    """What the kernel is compiled for: rows of a tile that is put in order, and how many such tiles a program has, and
    compares them with at a time."""

    rows: int
    own: int
    others: int


SUMMARY = tl.constexpr(5)  # numbers of a tile

TILE = RangeTile(rows=64, positions=32, ahead=64)
SUMMARISED = tl.constexpr(TILE.rows)


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
def joined(of_rows, of_all, which):
    """The (lo, hi, count) of rows: of those in ``which`` what all places met."""
    lo, hi, count = of_rows
    lo = tl.where(which, tl.min(tl.min(of_all[0], 1), 0), lo)
    hi = tl.where(which, tl.max(tl.max(of_all[1], 1), 0), hi)
    return lo, hi, tl.where(which, tl.sum(tl.sum(of_all[2], 1), 0), count)


@triton.jit
def ranges_of(own, other, row, length, positions, tile: tl.constexpr):
    """The (lo, hi, count) of each ``row``, out of ``length``, among so many ``positions`` of one batch entry: its range
    and how many positions in it have its id. own, other: (ids, how far apart they are).

    Each place of a tile of ids keeps what it met of the least and of the greatest id of the rows, which are all ids of
    them where documents are longer than a tile. Rows of ids between these are compared one by one with the positions of
    those tiles that may hold one.
    """
    own, own_s = own
    other, other_s = other
    # Rows past the end have the id of the last one, which widens no range of ids.
    ids = tl.load(own + tl.minimum(row, length - 1).to(tl.int64) * own_s)
    least, greatest = tl.min(ids, 0), tl.max(ids, 0)
    between = tl.max(((ids > least) & (ids < greatest)).to(tl.int32), 0) != 0
    part, column = tl.arange(0, tile.ahead), tl.arange(0, tile.positions)
    lo, hi, count = nothing_met(tile.rows, 1, positions)
    of_least = nothing_met(tile.ahead, tile.positions, positions)
    of_greatest = of_least
    for start in range(0, positions, tile.ahead * tile.positions):
        at = start + part[:, None] * tile.positions + column[None, :]
        there = at < positions
        read = tl.load(other + at.to(tl.int64) * other_s, mask=there, other=0)
        of_least = met(of_least, (read == least) & there, at, positions)
        of_greatest = met(of_greatest, (read == greatest) & there, at, positions)
        if between:
            meets = (tl.min(read, 1) < greatest) & (tl.max(read, 1) > least)
            meets &= start + part * tile.positions < positions
            first = tl.min(tl.where(meets, part, tile.ahead), 0)
            last = tl.max(tl.where(meets, part + 1, 0), 0)
            for here in range(first, last):
                j = (start + here * tile.positions + column)[None, :]
                j_ok = j < positions
                same = (ids[:, None] == tl.load(other + j.to(tl.int64) * other_s, mask=j_ok, other=0)) & j_ok
                lo = tl.minimum(lo, tl.min(tl.where(same, j, positions), 1)[:, None])
                hi = tl.maximum(hi, tl.max(tl.where(same, j + 1, 0), 1)[:, None])
                count += tl.sum(same.to(tl.int32), 1)[:, None]
    found = tl.reshape(lo, [tile.rows]), tl.reshape(hi, [tile.rows]), tl.reshape(count, [tile.rows])
    found = joined(found, of_least, ids == least)
    return joined(found, of_greatest, (ids == greatest) & (least < greatest))


@triton.jit
def attention_segment_ranges_kernel(
    own, other, ranges, summaries, own_firsts, firsts, strides, extents, tile: tl.constexpr
):
    """The ranges, (batch, rows, 2), of the rows of a tile. A row whose id nobody has gets [extents.other, 0).

    summaries: (batch, tiles, 5) numbers of the tile, or None: where the first of its ranges begins, where the last
    ends, where the last begins, where the first ends, and whether a range holds other segments too.
    own_firsts, firsts: the first position that has the id of each row, (batch, rows), and of each position, (batch,
    positions), which further programs find; or None.
    """
    own_b, own_s = strides.own
    other_b, other_s = strides.other
    program = tl.program_id(0)
    if program < extents.tiles * extents.batch:
        index, batch = program % extents.tiles, (program // extents.tiles).to(tl.int64)
        row = index * tile.rows + tl.arange(0, tile.rows)
        mine, theirs = (own + batch * own_b, own_s), (other + batch * other_b, other_s)
        lo, hi, count = ranges_of(mine, theirs, row, extents.own, extents.other, tile)
        at = ranges + (batch * extents.own + row) * 2
        tl.store(at, lo, mask=row < extents.own)
        tl.store(at + 1, hi, mask=row < extents.own)
        if own_firsts is not None:
            tl.store(own_firsts + batch * extents.own + row, lo, mask=row < extents.own)
        if summaries is not None:
            at = summaries + (batch * extents.tiles + index) * SUMMARY
            tl.store(at, tl.min(lo, 0))
            tl.store(at + 1, tl.max(hi, 0))
            tl.store(at + 2, tl.max(lo, 0))
            tl.store(at + 3, tl.min(hi, 0))
            tl.store(at + 4, tl.max((count < hi - lo).to(tl.int32), 0))
    if firsts is not None:
        program -= extents.tiles * extents.batch
        if program >= 0:
            index, batch = program % extents.other_tiles, (program // extents.other_tiles).to(tl.int64)
            row = index * tile.rows + tl.arange(0, tile.rows)
            theirs = other + batch * other_b, other_s
            lo, hi, count = ranges_of(theirs, theirs, row, extents.other, extents.other, tile)
            tl.store(firsts + batch * extents.other + row, lo, mask=row < extents.other)


@triton.jit
def positions_seen(entry, summaries, left, right, extents, tile: tl.constexpr):
    """How many positions the rows of tiles may see: from where their first range begins to where their last ends,
    within the window of a row's place (``left`` and ``right`` of it, None: all that way). -1 of tiles past the end."""
    batch, index = entry // extents.tiles, entry % extents.tiles
    start, end = tl.full([entry.shape[0]], 0, tl.int32) + extents.other, tl.full([entry.shape[0]], 0, tl.int32)
    for group in tl.static_range(tile.rows // SUMMARISED):
        summary = index * (tile.rows // SUMMARISED) + group
        ok = (entry < extents.all_tiles) & (summary < extents.summaries)
        at = summaries + (batch.to(tl.int64) * extents.summaries + summary) * SUMMARY
        start = tl.minimum(start, tl.load(at, mask=ok, other=0x7FFFFFFF))
        end = tl.maximum(end, tl.load(at + 1, mask=ok, other=0))
    place = index * tile.rows + extents.before
    if left is not None:
        start = tl.maximum(start, place - left)
    if right is not None:
        end = tl.minimum(end, place + tile.rows + right)
    return tl.where(entry < extents.all_tiles, tl.maximum(end - start, 0), -1)


@triton.jit
def attention_segment_order_kernel(summaries, order, window, extents, tile: tl.constexpr):
    """The tiles of all batch entries, as batch entry x tiles + tile, those that see most positions first: (batch x
    tiles,) int32. Each tile counts those that come before it."""
    left, right = window
    entry = tl.program_id(0) * tile.own + tl.arange(0, tile.own)
    seen = positions_seen(entry, summaries, left, right, extents, tile)[:, None]
    rank = tl.full([tile.own], 0, tl.int32)
    for start in range(0, extents.all_tiles, tile.others):
        others = start + tl.arange(0, tile.others)
        theirs = positions_seen(others, summaries, left, right, extents, tile)[None, :]
        before = (theirs > seen) | ((theirs == seen) & (others[None, :] < entry[:, None]))
        rank += tl.sum(before.to(tl.int32), 1)
    tl.store(order + rank, entry, mask=entry < extents.all_tiles)


def segment_ranges(call: Call, own: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """The ranges of rows with the ids ``own`` among positions with the ids ``other``, (batch, rows, 2) int32; None of
    a call without ids."""
    return None if own is None or other is None else _found(call, own, other, False, False)[0]


class SegmentTables(NamedTuple):
    """What ``attention_segment_ranges_kernel`` finds: int32, (batch, rows, 2), (batch, tiles of ``TILE.rows`` rows, 5),
    (batch, rows) and (batch, positions)."""

    ranges: torch.Tensor
    summaries: Any
    own_firsts: Any
    firsts: Any


def segment_tables(call: Call, own: torch.Tensor, other: torch.Tensor, firsts: bool = True) -> SegmentTables:
    """The tables of rows with the ids ``own`` among positions with the ids ``other``, without the last two unless
    ``firsts``."""
    return _found(call, own, other, True, firsts)


def _found(call: Call, own: torch.Tensor, other: torch.Tensor, summarised: bool, firsts: bool) -> SegmentTables:
    (batch, rows), positions = own.shape, other.shape[1]
    int32, tiles, other_tiles = torch_dtype("int32"), cdiv(rows, TILE.rows), cdiv(positions, TILE.rows)
    found = SegmentTables(
        fresh((batch, rows, 2), int32, own.device),
        fresh((batch, tiles, SUMMARY.value), int32, own.device) if summarised else None,
        fresh((batch, rows), int32, own.device) if firsts else None,
        fresh((batch, positions), int32, own.device) if firsts else None,
    )
    extents = RangeExtents(tiles, other_tiles, batch, rows, positions)
    launch(attention_segment_ranges_kernel, (tiles + (other_tiles if firsts else 0)) * batch, call, own, other, *found,
           RangeStrides(own.stride(), other.stride()), extents, tile=TILE,
           num_warps=8, **({"maxnreg": 128} if call.target.platform == "cuda" else {}))  # fmt: skip
    return found


def longest_first(
    call: Call, summaries: torch.Tensor, rows: int, window: tuple[int | None, int | None]
) -> torch.Tensor:
    """In which order programs take tiles of so many ``rows`` of queries: (batch x tiles,) int32, see the kernel."""
    dims = call.dims
    (batch, of_entry, _), q_len, kv_len = summaries.shape, dims["q_len"], dims["kv_len"]
    tiles = cdiv(q_len, rows)
    order = fresh((batch * tiles,), torch_dtype("int32"), summaries.device)
    tile = OrderTile(rows, own=32, others=64)
    extents = OrderExtents(tiles, batch * tiles, of_entry, kv_len - q_len, kv_len)
    launch(attention_segment_order_kernel, cdiv(batch * tiles, tile.own), call, summaries, order, window, extents,
           tile=tile, num_warps=4)  # fmt: skip
    return order


@triton.jit
def within_ranges(span, ranges, at, ok, length, block: tl.constexpr):
    """Of the tiles of ``block`` positions that ``band`` gives those that lie in a range of the rows of a tile. ``at``,
    ``ok``: the rows among those of all batch entries, and which of them exist. length: of the other side."""
    start = tl.min(tl.load(ranges + at * 2, mask=ok, other=length)) // block * block
    end = tl.max(tl.load(ranges + at * 2 + 1, mask=ok, other=0))
    return within(span, start, tl.maximum(start, end))
