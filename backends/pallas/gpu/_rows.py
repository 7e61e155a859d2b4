"""The walk that the ops on rows share (softmax and its gradient, layernorm, rmsnorm).

A block of one warpgroup owns ``block_rows`` rows, and works on as many of them at a time as its four warps hold with
``row_warps`` warps to a row. A row of up to ``block_n`` elements is read once: it is copied into shared memory, worked
on in registers and written where it was read, from where the copy engine takes it away; all rows of a block are on
their way at once. A longer row is read twice, in chunks of ``block_n`` that go through a ring of buffers: first for its
statistics, then for its result. On the second read much of it is still in the L2 cache. An op of several arrays reads
the same rows of each side by side, and writes where it read the first.

Rows lie 16 bytes apart or a multiple of that, as the copy engine needs it: those of another length are padded by XLA.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas.common import Refs, padded
from portakern.backends.pallas.gpu._chip import (
    BARRIERS,
    BULK_BYTES,
    LANES,
    WARPS,
    dtype_refused,
    launch,
    over_shared,
    padded_rows,
    whole_pieces,
)
from portakern.core.call import Call
from portakern.spec import Tile

KNOBS = {"row_warps": Tile(1, WARPS)}
"""``row_warps``: warps to a row."""

RING = 3
"""Buffers that the chunks of a long row go through."""

HELD = 128
"""Elements of a row that a thread may hold: more do not fit into its 255 registers beside what is computed of them."""

IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


Weights = Mapping[str, Callable[[], Any]]


class Formula(Protocol):
    """What an op makes of a row. ``x`` is a float32 block of (rows, elements), or of an op of several arrays a tuple of
    blocks; statistics are (rows,); ``weights[name]()`` reads what every row shares, when it is needed: it would take
    registers before."""

    def whole(self, x: Any, walk: Walk, weights: Weights) -> Any:
        """The result of whole rows."""

    def start(self, walk: Walk) -> tuple[Any, ...]:
        """The statistics before a chunk was seen."""

    def gather(self, statistics: tuple[Any, ...], x: Any, walk: Walk, start: Any) -> tuple[Any, ...]:
        """The statistics with one chunk more, which begins at ``start``."""

    def result(self, statistics: tuple[Any, ...], x: Any, walk: Walk, weights: Weights) -> Any:
        """The result of a chunk, once the statistics are of the whole row."""


class Walk(NamedTuple):
    """How a kernel walks the rows of an array (rows, n), or of several side by side.

    Attributes:
      pitch: elements from one row to the next.
      block_rows: rows of a block; chunk: elements of a row that are worked on at a time; row_warps: warps to a row.
      vector: neighbouring elements of a thread. arrays: how many are read.
    """

    rows: int
    n: int
    pitch: int
    block_rows: int
    chunk: int
    row_warps: int
    vector: int
    arrays: int

    @classmethod
    def over(cls, call: Call, tiling: Mapping[str, int], rows: int, n: int, arrays: int = 1) -> Walk:
        """The walk of an op on rows of n elements, of so many arrays."""
        dtype = jnp.dtype(call.dtype)
        block_n, row_warps = tiling["block_n"], tiling["row_warps"]
        vector = min(BULK_BYTES // dtype.itemsize, block_n // (LANES * row_warps))
        chunk = min(block_n, padded(n, LANES * row_warps * vector))
        return cls(rows, n, whole_pieces(n, dtype), tiling["block_rows"], chunk, row_warps, vector, arrays)

    @property
    def at_once(self) -> int:
        """Rows that the warps of a block work on at a time."""
        return WARPS // self.row_warps

    @property
    def groups(self) -> int:
        """How often a block takes up so many rows."""
        return self.block_rows // self.at_once

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return pl.cdiv(self.n, self.chunk)

    @property
    def block(self) -> tuple[int, int]:
        """The shape of what is worked on at a time."""
        return self.at_once, self.chunk

    @property
    def buffers(self) -> int:
        """Blocks of shared memory that are in use at a time, of each array."""
        return self.groups if self.chunks == 1 else RING

    @property
    def layout(self) -> plgpu.Layout:
        """Where the elements of a block lie: a row's in ``row_warps`` warps, neighbours in one thread."""
        along = LANES * self.vector
        tiles = ((self.at_once, self.row_warps * along), *[(along,)] * (self.row_warps > 1), (self.vector,))
        warps = (-4, -3) if 1 < self.row_warps < WARPS else (-3,)
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), warps, (-2,), -1)

    @property
    def layout_of_a_row(self) -> Any:
        """Where the elements of what every row shares lie beside a block."""
        return self.layout.reduce(0)

    def refused(self, call: Call, itemsize: int) -> str | None:
        """Why it cannot be walked so, or None."""
        if self.block_rows % self.at_once:
            return (
                f"block_rows={self.block_rows} with row_warps={self.row_warps} leaves warps without a row: use a "
                f"multiple of {self.at_once}, or row_warps={WARPS}"
            )
        held = self.chunk // (LANES * self.row_warps)
        if held * self.arrays > HELD:
            return (
                f"{self.chunk} elements in {self.row_warps} warps are {held} a thread, and {HELD // self.arrays} fit "
                "into its registers: use a smaller block_n or more row_warps"
            )
        needed = self.arrays * self.buffers * math.prod(self.block) * itemsize
        too_large = over_shared(needed, "block_rows or block_n")
        if self.buffers > BARRIERS and not too_large:
            return (
                f"block_rows={self.block_rows} with row_warps={self.row_warps} waits at {self.buffers} barriers, and "
                f"there are {BARRIERS} of a kind: use at most block_rows={BARRIERS * self.at_once}"
            )
        return too_large

    def spread(self, statistic: Any) -> Any:
        """One number a row, beside a block."""
        return lax.broadcast_in_dim(statistic, self.block, (0,))

    def beside(self, row: Any) -> Any:
        """What every row shares, beside a block."""
        return lax.broadcast_in_dim(row, self.block, (1,))

    def within(self, x: Any, beyond: float, start: Any = 0) -> Any:
        """A block that begins at ``start`` of its rows, with the number ``beyond`` for what lies beyond their end."""
        if self.n % self.chunk == 0:
            return x
        at = start + plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, self.block, 1), self.layout)
        return jnp.where(at < self.n, x, jnp.full(self.block, beyond, x.dtype))

    def full(self, value: float) -> Any:
        """A statistic of every row at once."""
        return plgpu.layout_cast(jnp.full((self.at_once,), value, jnp.float32), self.layout.reduce(1))


def key(call: Call, n: int) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": n}


def default_tiling(n: int, dtype: str, arrays: int = 1) -> dict[str, int]:
    """A formula of n and the dtype: about 16 KiB of a block's rows are on their way at once, short rows have a warp
    each, and a row that fits into the registers of four warps is read once."""
    size, longest = jnp.dtype(dtype).itemsize * arrays, WARPS * LANES * HELD // arrays
    whole = max(128, pl.next_power_of_2(n))
    row_warps = 1 if whole <= 1024 else 2 if whole <= 2048 else WARPS
    block_n = whole if whole <= longest else 4096
    rows = max(WARPS // row_warps, min(32, 16384 // (size * whole))) if whole <= longest else 1
    return {"block_rows": rows, "block_n": block_n, "row_warps": row_warps}


def supports(call: Call, tiling: Mapping[str, int], rows: int, n: int, arrays: int = 1) -> str | None:
    reason = dtype_refused(call)
    return reason or Walk.over(call, tiling, rows, n, arrays).refused(call, jnp.dtype(call.dtype).itemsize)


def copies(call: Call, n: int) -> str | None:
    """What XLA pads of rows of n elements, in words."""
    pitch = whole_pieces(n, call.dtype)
    if pitch == n:
        return None
    return (
        f"rows of {n} elements are padded to {pitch}, and the results cut off again: the copy engine moves multiples "
        f"of {BULK_BYTES} bytes"
    )


def launched(
    call: Call, tiling: Mapping[str, int], x: Sequence[jax.Array], formula: Formula, weights: Mapping[str, jax.Array]
) -> jax.Array:
    """What a formula makes of the rows of arrays, (rows, n) each. ``weights``: what every row shares, (n,) each."""
    rows, n = x[0].shape
    walk = Walk.over(call, tiling, rows, n, len(x))
    shared = {name: padded_rows(w, walk.chunk * walk.chunks) for name, w in weights.items()}
    run = partial(_once if walk.chunks == 1 else _twice, walk=walk, formula=formula, weights=tuple(shared))
    found = launch(
        call,
        run,
        call.spec.name,
        (pl.cdiv(rows, walk.block_rows),),
        inputs={**{_name(i): padded_rows(array) for i, array in enumerate(x)}, **shared},
        outputs={"y": jax.ShapeDtypeStruct((rows, walk.pitch), x[0].dtype)},
        scratch={
            "buffer": plgpu.SMEM((walk.arrays, walk.buffers, *walk.block), x[0].dtype),
            "arrived": plgpu.Barrier(num_arrivals=walk.arrays * walk.at_once, num_barriers=walk.buffers),
        },
    )
    return found["y"] if walk.pitch == n else found["y"][:, :n]


def _name(array: int) -> str:
    """What the kernel calls one of the arrays that it reads."""
    return f"x{array}"


def _once(ref: Refs, *, walk: Walk, formula: Formula, weights: tuple[str, ...]) -> None:
    """Rows that are read once."""
    first = lax.axis_index("block") * walk.block_rows
    shared = {name: partial(_shared, ref, name, walk, 0) for name in weights}

    @pl.loop(0, walk.groups)
    def read(group: Any) -> None:
        _read(ref, walk, first + group * walk.at_once, 0, group)

    @pl.loop(0, walk.groups)
    def work(group: Any) -> None:
        plgpu.barrier_wait(ref.arrived.at[group])
        y = formula.whole(_loaded(ref, walk, group), walk, shared)
        _write(ref, walk, first + group * walk.at_once, 0, group, y)

    plgpu.wait_smem_to_gmem(0)


def _twice(ref: Refs, *, walk: Walk, formula: Formula, weights: tuple[str, ...]) -> None:
    """Rows that are read twice: step s of 2 * chunks works on chunk s modulo chunks, in buffer s modulo RING."""
    first = lax.axis_index("block") * walk.block_rows
    steps = 2 * walk.chunks

    @pl.loop(0, walk.groups)
    def work(group: Any) -> None:
        row = first + group * walk.at_once
        before = group * steps

        def read(step: Any) -> None:
            @pl.when(step < steps)
            def _() -> None:
                _read(ref, walk, row, step % walk.chunks, (before + step) % RING)

        for step in range(RING - 1):
            read(jnp.int32(step))

        def gather(step: Any, statistics: tuple[Any, ...]) -> tuple[Any, ...]:
            buffer = (before + step) % RING
            plgpu.barrier_wait(ref.arrived.at[buffer])
            x = _loaded(ref, walk, buffer)
            found = formula.gather(statistics, x, walk, step * walk.chunk)
            plgpu.commit_smem()  # every thread has read the buffer that is filled next
            read(step + RING - 1)
            return found

        statistics = lax.fori_loop(0, walk.chunks, gather, formula.start(walk))

        @pl.loop(walk.chunks, steps)
        def write(step: Any) -> None:
            buffer, chunk = (before + step) % RING, step - walk.chunks
            plgpu.barrier_wait(ref.arrived.at[buffer])
            shared = {name: partial(_shared, ref, name, walk, chunk) for name in weights}
            _write(ref, walk, row, chunk, buffer, formula.result(statistics, _loaded(ref, walk, buffer), walk, shared))
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the chunk before has left its buffer, which is next
            read(step + RING - 1)

        plgpu.wait_smem_to_gmem(0)


def _loaded(ref: Refs, walk: Walk, buffer: Any) -> Any:
    """A block in float32, or of several arrays a tuple of them. What lies beyond the end of its rows is anything."""
    found = (plgpu.layout_cast(ref.buffer[i, buffer], walk.layout).astype(jnp.float32) for i in range(walk.arrays))
    return next(found) if walk.arrays == 1 else tuple(found)


def _shared(ref: Refs, name: str, walk: Walk, chunk: Any) -> Any:
    """What every row shares beside a chunk, in float32; 0 beyond the end of a row."""
    place = getattr(ref, name).at[pl.ds(chunk * walk.chunk, walk.chunk)]
    row = plgpu.load(place, layout=walk.layout_of_a_row, optimized=False)
    return walk.beside(row.astype(jnp.float32))


def _parts(walk: Walk, chunk: Any, move: Callable[[int], None]) -> None:
    """Call ``move`` with the length of a chunk, of which the last may be shorter."""
    last = walk.pitch - (walk.chunks - 1) * walk.chunk
    if walk.chunks == 1 or last == walk.chunk:
        move(last)
        return
    pl.when(chunk < walk.chunks - 1)(lambda: move(walk.chunk))
    pl.when(chunk == walk.chunks - 1)(lambda: move(last))


def _read(ref: Refs, walk: Walk, row: Any, chunk: Any, buffer: Any) -> None:
    """Start a chunk of the rows from ``row`` on its way into a buffer. Rows that are not there arrive at once."""
    for i, array in itertools.product(range(walk.at_once), range(walk.arrays)):
        there = row + i < walk.rows

        def move(length: int, i: int = i, array: int = array) -> None:
            plgpu.copy_gmem_to_smem(
                getattr(ref, _name(array)).at[row + i, pl.ds(chunk * walk.chunk, length)],
                ref.buffer.at[array, buffer, i, pl.ds(0, length)],
                ref.arrived.at[buffer],
                oob_mode=IN_BOUNDS,
            )

        pl.when(there)(lambda move=move: _parts(walk, chunk, move))
        pl.when(jnp.logical_not(there))(lambda: plgpu.barrier_arrive(ref.arrived.at[buffer]))


def _write(ref: Refs, walk: Walk, row: Any, chunk: Any, buffer: Any, y: Any) -> None:
    """Start results on their way to the rows from ``row`` on, in the buffer of their first argument."""
    ref.buffer[0, buffer] = y.astype(ref.buffer.dtype)
    plgpu.commit_smem()
    for i in range(walk.at_once):

        def move(length: int, i: int = i) -> None:
            plgpu.copy_smem_to_gmem(
                ref.buffer.at[0, buffer, i, pl.ds(0, length)],
                ref.y.at[row + i, pl.ds(chunk * walk.chunk, length)],
                commit_group=False,
            )

        pl.when(row + i < walk.rows)(lambda move=move: _parts(walk, chunk, move))
    plgpu.commit_smem_to_gmem_group()
