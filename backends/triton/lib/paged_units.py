"""The units of a call of attention over pages, which programs that stay take one by one: how many there are is known on
the device alone.

A unit is a tile of queries of one sequence, for all keys that they see, or for one chunk of these. Tokens behind the
last sequence are one sequence more, without keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.launch import launch, torch_dtype
from portakern.backends.triton.layout import fresh

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

FIELDS = tl.constexpr(8)  # numbers of a row of a schedule


class UnitExtents(NamedTuple):
    """``sequences`` and ``tokens`` of a call; the steps between its lengths, and between starts; and what the first row
    of the schedule has after the number of units: ``chunks`` that the table has room for; steps of the table to the
    next sequence and entry; rows from a page of k, and of v, to the next."""

    sequences: int
    tokens: int
    lens_step: int
    starts_step: int
    chunks: int
    table_row: int
    table_step: int
    k_step: int
    v_step: int


class UnitTile(NamedTuple):
    """What the kernel is compiled for: queries of a tile; keys of a chunk, and whether each has a unit (``apart``);
    sequences that a program compares its own with at a time, and rows that it writes at a time."""

    queries: int
    chunk: int
    apart: bool
    others: int
    written: int


@triton.jit
def units_of(number, lens, starts, window, extents, tile: tl.constexpr):
    """(first token, queries, keys, tiles, first chunk, chunks) of sequences; of no sequence, nothing."""
    left, right = window
    there, inside = number <= extents.sequences, number < extents.sequences
    start = tl.load(starts + number * extents.starts_step, mask=there, other=0).to(tl.int32)
    end = tl.load(starts + (number + 1) * extents.starts_step, mask=inside, other=extents.tokens).to(tl.int32)
    keys = tl.load(lens + number * extents.lens_step, mask=inside, other=0).to(tl.int32)
    queries = tl.where(there, end - start, 0)
    chunk, chunks = number * 0, number * 0 + 1
    if tile.apart:
        last = keys
        if left is not None:
            chunk = tl.maximum(keys - queries - left, 0) // tile.chunk
        if right is not None:
            last = tl.maximum(tl.minimum(keys + right, keys), 0)
        chunks = tl.maximum((last + tile.chunk - 1) // tile.chunk - chunk, 0)
    return start, queries, keys, (queries + tile.queries - 1) // tile.queries, chunk, chunks


@triton.jit
def paged_attention_schedule_kernel(lens, starts, schedule, window, extents, tile: tl.constexpr):
    """The rows of ``schedule`` of one sequence, as many as it has units, those of its last queries first: (first token
    of the tile; queries from there on; keys of the sequence; the place of the first query among them; the sequence; the
    chunk). Sequences with most keys stand first. Before all rows stands one more: how many there are, and what
    ``UnitExtents`` says."""
    number = tl.program_id(0)
    start, queries, keys, tiles, chunk, chunks = units_of(number, lens, starts, window, extents, tile)
    first, total = number * 0, number * 0
    for least in range(0, extents.sequences + 1, tile.others):
        others = least + tl.arange(0, tile.others)
        _, _, their_keys, their_tiles, _, their_chunks = units_of(others, lens, starts, window, extents, tile)
        before = (their_keys > keys) | ((their_keys == keys) & (others < number))
        first += tl.sum(tl.where(before, their_tiles * their_chunks, 0), 0)
        total += tl.sum(their_tiles * their_chunks, 0)
    field = tl.arange(0, FIELDS)[None, :]
    for unit in range(0, tiles * chunks, tile.written):
        units = unit + tl.arange(0, tile.written)[:, None]
        top = (tiles - 1 - units // chunks) * tile.queries
        numbers = tl.where(field == 0, start + top, tl.where(field == 1, queries - top, keys))
        numbers = tl.where(field == 3, keys - queries + top, tl.where(field == 4, number, numbers))
        numbers = tl.where(field == 5, chunk + units % chunks, numbers)
        at = schedule + (1 + first + units).to(tl.int64) * FIELDS + field
        tl.store(at, numbers, mask=units < tiles * chunks)
    if number == 0:
        tl.store(schedule, total)
        tl.store(schedule + 1, total * 0 + extents.chunks)
        tl.store(schedule + 2, total * 0 + extents.table_row)
        tl.store(schedule + 3, total * 0 + extents.table_step)
        tl.store(schedule + 4, total * 0 + extents.k_step)
        tl.store(schedule + 5, total * 0 + extents.v_step)


class PagedSchedule(NamedTuple):
    """The schedule of a call's units, and the most that it can have, which lengths do not tell."""

    schedule: torch.Tensor
    most: int


def scheduled(
    call: Call, queries: int, chunk: int, chunks: int, apart: bool, window: tuple[int | None, int | None],
    steps: tuple[int, int],
) -> PagedSchedule:  # fmt: skip
    """The units of tiles of so many ``queries``: each ``chunk`` of keys, of ``chunks`` that the table has room for, if
    these are ``apart``. ``steps``: rows from a page of k, and of v, to the next."""
    dims, arrays = call.dims, call.arrays
    table, lens, starts = (arrays[n] for n in ("page_table", "kv_lens", "q_starts"))
    most = (dims["tokens"] // queries + dims["sequences"] + 1) * (chunks if apart else 1)
    schedule = fresh((most + 1, FIELDS.value), torch_dtype("int32"), lens.device)
    table_row, table_step = table.stride()
    extents = UnitExtents(
        dims["sequences"], dims["tokens"], lens.stride(0), starts.stride(0), chunks, table_row, table_step, *steps
    )
    tile = UnitTile(queries, chunk, apart, others=256, written=16)
    launch(paged_attention_schedule_kernel, dims["sequences"] + 1, call, lens, starts, schedule, window, extents,
           tile=tile, num_warps=4)  # fmt: skip
    return PagedSchedule(schedule, most)
