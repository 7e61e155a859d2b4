"""Packed sequences in kernels whose warps have roles: whose rows a tile has, and how the producer hands out tiles.

How many tiles there are is known on the device, and what they cost differs. So a program that is done with a tile takes
the next one that nobody has (``lib.sequences`` puts them in order). The producer takes it, and tells the consumers of
it beside the barrier at which their rows arrive: of two numbers in turn one is written where the other may still be
read, and is not written again before the rows of the tile after it are handed back. Who takes a tile decides no bit of
it.

The copy engine is told of each sequence alone. It cuts off what lies beyond an array's extents, and there is one
description of the whole array; but an address is a sum that wraps at 64 bits. So rows are described as 2^30 from which
a row of a sequence of n is counted as 2^30 - n + i, and two more extents of the array take back what that is too much:
2^30 steps of (2^34 - the step between rows) elements, and as many steps between rows as the sequence's end is at. What
lies behind the sequence's end is read as 0 and not written. The trick is that of Triton's ``tools/ragged_tma.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from portakern.backends.triton.lib import sequences as scheduling

FIELDS, CLAIMED = gl.constexpr(scheduling.FIELDS.value), gl.constexpr(scheduling.CLAIMED.value)
together = getattr(gl, "barrier", None) or gl.thread_barrier


class SequenceSchedule(NamedTuple):
    """``schedule``: of ``lib.sequences``. ``claims``: two numbers of each program, ``CLAIMED`` apart."""

    schedule: Any
    claims: Any


class SequenceRow(NamedTuple):
    """A row of the schedule: the first of its sequence's rows, and how many there are, which is the tiles of a head;
    start and length of the sequence on the side that programs own, and on the other one; heads that take turns."""

    first: Any
    tiles: Any
    start: Any
    length: Any
    other_start: Any
    other_length: Any
    width: Any


@gluon.jit
def scheduled_tiles(sequences, heads):
    """How many tiles a call has."""
    return gl.load(sequences.schedule) * heads


@gluon.jit
def sequence_row(index, sequences, heads):
    """The row of the schedule that the ``index``-th tile has."""
    at = sequences.schedule + (index // heads + 1) * FIELDS
    return SequenceRow(
        gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5),
        gl.load(at + 6),
    )  # fmt: skip


@gluon.jit
def claim_at(sequences, count):
    """Where a program's ``count``-th tile is written."""
    return sequences.claims + gl.program_id(0) * CLAIMED + count % 2


@gluon.jit
def claim_tile(count, sequences, ring, tiles):
    """The producer's next tile, its ``count``-th: it is written where consumers look for it when their rows arrive at
    ``ring``. One past the last, from ``tiles`` on, arrives with no rows, and ends them."""
    consumers: gl.constexpr = ring.full.shape[0]
    index = gl.num_programs(0) + gl.atomic_add(sequences.schedule + 1, 1, sem="relaxed")
    gl.store(claim_at(sequences, count), index)
    together()
    if index >= tiles:
        for g in gl.static_range(consumers):
            mbarrier.wait(ring.empty.index(g), (count & 1) ^ 1)
            mbarrier.arrive(ring.full.index(g), count=1)
    return index


@gluon.jit
def claimed_tile(count, sequences, ring, group: gl.constexpr):
    """The ``count``-th tile of this program, for a group of consumers."""
    mbarrier.wait(ring.full.index(group), count & 1)
    return gl.load(claim_at(sequences, count))
