"""Packed sequences: where each begins, and in what order programs take their tiles where lengths are known on the
device alone.

A tile belongs to one sequence, and begins a multiple of its rows behind the sequence's first row. Rows before the first
start and from the last one on are sequences too, which have no keys, or no queries: so every row of a result is written
by one program. Numbers from 0 on count them: 0 are the rows before the first sequence, the number of sequences + 1
those behind the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.launch import cdiv, launch, torch_dtype
from portakern.backends.triton.layout import fresh
from portakern.specs.varlen_attention import as_attention

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


class Starts(NamedTuple):
    """The cumulative lengths of queries and of keys, one more of each than there are sequences."""

    queries: Any
    keys: Any


def mean_sequence(call: Call) -> Call:
    """The call of attention that one sequence is if all have as many queries: what tiles for few queries are for."""
    return as_attention(call, q_len=cdiv(call.dims["tokens"], call.dims["sequences"]))


def too_many_tiles(call: Call) -> str | None:
    """A sequence without tokens has a tile in the grid too."""
    if call.dims["sequences"] <= 1 << 20:
        return None
    return f"{call.dims['sequences']} sequences, of which each may need a tile: more than 2^20 are not served"


@triton.jit
def between(starts, step, number, sequences, tokens):
    """(start, length) of a sequence's rows. Number 0 are the rows before the first sequence, number ``sequences`` + 1
    those from the last one's end on."""
    start = tl.load(starts + tl.maximum(number - 1, 0) * step).to(tl.int32)
    end = tl.load(starts + tl.minimum(number, sequences) * step).to(tl.int32)
    start, end = tl.where(number == 0, 0, start), tl.where(number > sequences, tokens, end)
    return start, end - start


# ------------------------------------------------------------------------------------------------------------ schedule
FIELDS = tl.constexpr(8)  # numbers of a row of a schedule, of which the last is not in use
CLAIMED = tl.constexpr(32)  # numbers of a program among claims: a line of the cache

SORTED = 1 << 14  # sequences from which on it takes long to find their order: each is compared with all others


class ScheduleExtents(NamedTuple):
    """``sequences``: how many there are; ``own_tokens``, ``other_tokens``: of the side that programs own, and of the
    other one; ``own_step``, ``other_step``: strides of their starts; ``seen``: positions of the other side that a tile
    sees at most, as masks have it; ``cached``: positions of the other side that the L2 cache has room for, or 0, and
    heads do not take turns; ``heads``: of the side that programs own; ``interleaved_heads``: that take turns at
    most."""

    sequences: int
    own_tokens: int
    other_tokens: int
    own_step: int
    other_step: int
    seen: int
    cached: int
    heads: int
    interleaved_heads: int


class ScheduleTile(NamedTuple):
    """What the kernel is compiled for: rows of a tile, sequences that a program compares its own with at a time, and
    rows of the schedule that it writes at a time."""

    rows: int
    others: int
    written: int


@triton.jit
def sequence_lengths(number, own, other, extents, exists):
    """(start, length, start on the other side, length there) of sequences, as far as they exist. What lies outside
    of all sequences has nothing on the other side."""
    inside = (number > 0) & (number <= extents.sequences) & exists
    number = tl.where(exists, number, 0)
    start, length = between(own, extents.own_step, number, extents.sequences, extents.own_tokens)
    other_start, other_length = between(other, extents.other_step, number, extents.sequences, extents.other_tokens)
    return start, tl.where(exists, length, 0), other_start, tl.where(inside, other_length, 0)


@triton.jit
def varlen_attention_schedule_kernel(own, other, schedule, extents, tile: tl.constexpr):
    """The rows of ``schedule`` of one sequence, as many as it has tiles, each with the same numbers: (the first of
    these rows; how many there are; start and length of the sequence; start and length of what it meets on the other
    side; heads that take turns). Sequences whose tiles see most positions stand first. Before all rows stands one more:
    how many rows there are; 0, to count those that were taken; and the tokens of both sides.
    """
    number = tl.program_id(0)
    start, length, other_start, other_length = sequence_lengths(number, own, other, extents, number >= 0)
    tiles, seen = (length + tile.rows - 1) // tile.rows, tl.minimum(other_length, extents.seen)
    first, total = number * 0, number * 0
    for least in range(0, extents.sequences + 2, tile.others):
        others = least + tl.arange(0, tile.others)
        there = others < extents.sequences + 2
        _, theirs, _, other_lengths = sequence_lengths(others, own, other, extents, there)
        their_tiles, they_see = (theirs + tile.rows - 1) // tile.rows, tl.minimum(other_lengths, extents.seen)
        before = (they_see > seen) | ((they_see == seen) & (others < number))
        first += tl.sum(tl.where(before, their_tiles, 0), 0)
        total += tl.sum(their_tiles, 0)
    width = number * 0 + 1
    if extents.cached > 0:
        width = tl.minimum(tl.maximum(extents.cached // tl.maximum(other_length, 1), 1), extents.interleaved_heads)
        width = (extents.heads + width - 1) // width
        width = (extents.heads + width - 1) // width
    field = tl.arange(0, FIELDS)[None, :]
    numbers = tl.where(field == 0, first, tl.where(field == 1, tiles, tl.where(field == 2, start, length)))
    numbers = tl.where(field == 4, other_start, tl.where(field == 5, other_length, numbers))
    numbers = tl.where(field == 6, width, numbers)
    for row in range(0, tiles, tile.written):
        rows = row + tl.arange(0, tile.written)[:, None]
        at = schedule + (1 + first + rows).to(tl.int64) * FIELDS + field
        tl.store(at, tl.broadcast_to(numbers, (tile.written, FIELDS)), mask=rows < tiles)
    if number == 0:
        tl.store(schedule, total)
        tl.store(schedule + 1, total * 0)
        tl.store(schedule + 2, total * 0 + extents.own_tokens)
        tl.store(schedule + 3, total * 0 + extents.other_tokens)


class Scheduled(NamedTuple):
    """The schedule of a call's tiles, and the most that it can have, which lengths do not tell."""

    schedule: torch.Tensor
    most: int


def scheduled(
    call: Call, by_key: bool, rows: int, window: tuple[int | None, int | None], cached: int, interleaved_heads: int
) -> Scheduled:
    """In which order programs take tiles of so many ``rows`` of queries, or of keys where ``by_key``.

    Args:
      window: how far to the left and to the right of its place a query sees. cached: positions of the other side, of
        one head, that the L2 cache has room for; interleaved_heads: heads at most that take turns there; these count
        where some tiles of a sequence see more than others.
    """
    dims = call.dims
    sides = [(call.arrays["q_starts"], dims["tokens"]), (call.arrays["kv_starts"], dims["kv_tokens"])]
    (own, own_tokens), (other, other_tokens) = reversed(sides) if by_key else sides
    heads = dims["kv_heads"] * (1 if by_key else dims["group"])
    most = own_tokens // rows + dims["sequences"] + 2
    schedule = fresh((most + 1, FIELDS.value), torch_dtype("int32"), own.device)
    left, right = window
    seen = other_tokens if left is None or right is None else min(other_tokens, left + right + rows)
    extents = ScheduleExtents(
        dims["sequences"],
        own_tokens,
        other_tokens,
        own.stride(0),
        other.stride(0),
        seen,
        cached,
        heads,
        interleaved_heads,
    )
    tile = ScheduleTile(rows, others=256, written=16)
    launch(varlen_attention_schedule_kernel, dims["sequences"] + 2, call, own, other, schedule, extents, tile=tile,
           num_warps=4)  # fmt: skip
    return Scheduled(schedule, most)
