"""Packed sequences: which keys each query sees by segment ids, and which queries see each key, before attention runs.

Attention with segment ids sees pairs of one segment alone. Of each row of one side (queries or keys) a kernel finds the
*range* [lo, hi) of the other side: from the first position that has the row's id to behind the last. Attention does not
visit tiles outside of the ranges of all its rows. Where ids are sorted, as those of documents that are packed one
behind the other, what is left is block-diagonal. Ids in any order are right: a range may hold other segments too, and
pairs are compared in the tiles that are visited.

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


TILE = RangeTile(rows=64, positions=128, ahead=32)


@triton.jit
def segment_ranges_kernel(own, other, ranges, strides, extents, tile: tl.constexpr):
    """The ranges, (batch, rows, 2), of the rows of a tile. A row whose id nobody has gets [extents.other, 0)."""
    index, batch = tl.program_id(0) % extents.tiles, (tl.program_id(0) // extents.tiles).to(tl.int64)
    own_b, own_s = strides.own
    other_b, other_s = strides.other
    other += batch * other_b
    row = index * tile.rows + tl.arange(0, tile.rows)
    # Rows and positions past the end have the id of the last one, which widens no range of ids.
    ids = tl.load(own + batch * own_b + tl.minimum(row, extents.own - 1).to(tl.int64) * own_s)
    least, greatest = tl.min(ids, 0), tl.max(ids, 0)
    part, column = tl.arange(0, tile.ahead), tl.arange(0, tile.positions)
    lo, hi = tl.full([tile.rows], 0, tl.int32) + extents.other, tl.full([tile.rows], 0, tl.int32)
    for start in range(0, extents.other, tile.ahead * tile.positions):
        at = start + part[:, None] * tile.positions + column[None, :]
        read = tl.load(other + tl.minimum(at, extents.other - 1).to(tl.int64) * other_s)
        meets = (tl.min(read, 1) <= greatest) & (tl.max(read, 1) >= least)
        meets &= start + part * tile.positions < extents.other
        first = tl.min(tl.where(meets, part, tile.ahead), 0)
        last = tl.max(tl.where(meets, part + 1, 0), 0)
        for here in range(first, last):
            j = start + here * tile.positions + column
            j_ok = j < extents.other
            same = ids[:, None] == tl.load(other + j.to(tl.int64) * other_s, mask=j_ok, other=0)[None, :]
            same &= j_ok[None, :]
            lo = tl.minimum(lo, tl.min(tl.where(same, j[None, :], extents.other), 1))
            hi = tl.maximum(hi, tl.max(tl.where(same, j[None, :] + 1, 0), 1))
    at = ranges + (batch * extents.own + row) * 2
    tl.store(at, lo, mask=row < extents.own)
    tl.store(at + 1, hi, mask=row < extents.own)


def segment_ranges(call: Call, own: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """The ranges of rows with the ids ``own`` among positions with the ids ``other``, (batch, rows, 2) int32; None of
    a call without ids."""
    if own is None or other is None:
        return None
    (batch, rows), positions = own.shape, other.shape[1]
    ranges = fresh((batch, rows, 2), torch_dtype("int32"), own.device)
    tiles = cdiv(rows, TILE.rows)
    launch(segment_ranges_kernel, tiles * batch, call, own, other, ranges, RangeStrides(own.stride(), other.stride()),
           RangeExtents(tiles, rows, positions), tile=TILE, num_warps=4)  # fmt: skip
    return ranges


@triton.jit
def within_ranges(span, ranges, at, ok, length, block: tl.constexpr):
    """Of the tiles of ``block`` positions that ``band`` gives those that lie in a range of the rows of a tile. ``at``,
    ``ok``: the rows among those of all batch entries, and which of them exist. length: of the other side."""
    start = tl.min(tl.load(ranges + at * 2, mask=ok, other=length)) // block * block
    end = tl.max(tl.load(ranges + at * 2 + 1, mask=ok, other=0))
    return within(span, start, tl.maximum(start, end))
