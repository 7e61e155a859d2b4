"""The walk that the ops on rows share (softmax and its gradient, layernorm, rmsnorm).

A block of one warpgroup owns ``block_rows`` rows, and works on as many of them at a time as its four warps hold with
``row_warps`` warps to a row. A row of up to ``block_n`` elements is read once: it is copied into shared memory, worked
on in registers and written where it was read, from where the copy engine takes it away; all rows of a block are on
their way at once. A longer row is worked on in chunks of ``block_n``, first for its statistics, then for its result.
One that fits into the shared memory of ``cluster`` blocks stays there (:func:`_kept`): each has a share of its chunks,
tells the others the statistics of that, and merges those of all in the order of the row. One that does not is read
twice, through a ring of buffers (:func:`_twice`); on the second read some of it is still in the L2 cache. An op of
several arrays reads the same rows of each side by side, and writes where it read the first.

The copy engine wants rows 16 bytes apart or a multiple of that. Rows of another length are read and written element by
element, neighbours by neighbouring threads (:func:`_direct`); shorter than all threads of a warpgroup, they are padded
by XLA.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from portakern.backends.pallas.configs import HopperRowsConfig
from portakern.backends.pallas.lib.blocks import Refs, padded
from portakern.backends.pallas.lib.mosaic_gpu.chip import (
    BARRIERS,
    BULK_BYTES,
    LANES,
    WARPS,
    _host_threads,
    aligned,
    dtype_refused,
    launch,
    over_shared,
    padded_rows,
    store,
    whole_pieces,
)
from portakern.core.call import Call
from portakern.core.config import fields_of

KEPT_BYTES, HALF_BYTES = 208 * 1024, 110 * 1024
"""Bytes of long rows that stay in the shared memory of a block at most, and so that two have a multiprocessor."""

LONG = 8192, 4096
"""Elements of a long row, of all arrays, that a block of it works on at a time: as many as let it have fewest blocks.
Fewer make more reductions across warps."""

RING = 3
"""Buffers that the chunks of a long row go through."""

HELD = 128
"""Elements of a row that a thread may hold: more do not fit into its 255 registers beside what is computed of them."""

THREADS = WARPS * LANES
"""Of a warpgroup."""

IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


Weights = Mapping[str, Callable[[], Any]]


class Formula:
    """What an op makes of a row. ``x`` is a float32 block of (rows, elements), or of an op of several arrays a tuple of
    blocks; statistics are (rows,); ``weights[name]()`` reads what every row shares, when it is needed: it would take
    registers before. ``writes``: whether there is a result, or only what is told of rows that are worked on as a
    whole."""

    writes = True
    empty: tuple[float, ...]
    """The statistics before a chunk was seen."""

    def of_chunk(self, x: Any, walk: WarpRowWalk, start: Any, weights: Weights) -> tuple[Any, ...]:
        """The statistics of a chunk alone, which begins at ``start``."""
        raise NotImplementedError

    def merged(self, before: tuple[Any, ...], after: tuple[Any, ...], seen: Any, here: Any) -> tuple[Any, ...]:
        """The statistics of ``seen`` elements of a row and of the ``here`` that follow: by default they are sums."""
        return tuple(x + y for x, y in zip(before, after, strict=True))

    def start(self, walk: WarpRowWalk) -> tuple[Any, ...]:
        return tuple(walk.full(value) for value in self.empty)

    def gather(
        self, statistics: tuple[Any, ...], x: Any, walk: WarpRowWalk, start: Any, weights: Weights, begin: Any = 0
    ) -> tuple[Any, ...]:
        """The statistics of a row from ``begin`` on, with one chunk more, which begins at ``start``."""
        before, here = walk.counted(start)
        return self.merged(statistics, self.of_chunk(x, walk, start, weights), before - begin, here)

    def result(self, statistics: tuple[Any, ...], x: Any, walk: WarpRowWalk, weights: Weights) -> Any:
        """The result of a chunk, once the statistics are of the whole row."""
        raise NotImplementedError

    def row_numbers(self, statistics: tuple[Any, ...], walk: WarpRowWalk) -> tuple[Any, ...]:
        """What the op wants to know of each row beside its result, (rows,) each."""
        return ()

    def whole_row(self, x: Any, walk: WarpRowWalk, weights: Weights) -> tuple[Any, tuple[Any, ...]]:
        """The result of whole rows, and what is told of them."""
        statistics = self.gather(self.start(walk), x, walk, 0, weights)
        return self.result(statistics, x, walk, weights), self.row_numbers(statistics, walk)


class WarpRowWalk(NamedTuple):
    """How a kernel walks the rows of an array (rows, n), or of several side by side.

    Attributes:
      pitch: elements from one row to the next.
      block_rows: rows of a block; chunk: elements of a row that are worked on at a time; row_warps: warps to a row.
      vector: neighbouring elements of a thread. arrays: how many are read. itemsize: bytes of an element.
      seam, skip: where rows are read element by element, so many elements of a chunk, from the ``seam`` on, are there
        a second time: the last elements are read together with ones before them, as the threads need it.
      cluster: blocks that share a row.
    """

    rows: int
    n: int
    pitch: int
    block_rows: int
    chunk: int
    row_warps: int
    vector: int
    arrays: int
    itemsize: int
    seam: int = 0
    skip: int = 0
    cluster: int = 1

    @classmethod
    def over(cls, call: Call, config: HopperRowsConfig, rows: int, n: int, arrays: int = 1) -> WarpRowWalk:
        """The walk of an op on rows of n elements, of so many arrays."""
        dtype = jnp.dtype(call.dtype)
        block_rows, block_n, row_warps = (config[name] for name in ("block_rows", "block_n", "row_warps"))
        if element_by_element(n, dtype):
            whole = padded(n, THREADS)
            walk = cls(rows, n, n, block_rows, min(block_n, whole), WARPS, 1, arrays, dtype.itemsize)
            return walk if block_n < whole else walk._replace(seam=n // THREADS * THREADS, skip=whole - n)
        vector = min(BULK_BYTES // dtype.itemsize, block_n // (LANES * row_warps))
        chunk = min(block_n, padded(n, LANES * row_warps * vector))
        walk = cls(rows, n, whole_pieces(n, dtype), block_rows, chunk, row_warps, vector, arrays, dtype.itemsize)
        cluster = min(config.cluster, walk.chunks)
        # In the interpreter a block takes a thread of the host: where these are too few it would wait for ever.
        return walk._replace(cluster=1 if call.interpret and cluster > _host_threads() else cluster)

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
    def direct(self) -> bool:
        """Whether its rows are read and written element by element."""
        return element_by_element(self.n, f"V{self.itemsize}")

    @property
    def share(self) -> int:
        """Chunks of a row that a block has, at most."""
        return pl.cdiv(self.chunks, self.cluster)

    @property
    def kept(self) -> bool:
        """Whether all chunks of a row stay in shared memory."""
        held = self.arrays * self.share * math.prod(self.block) * self.itemsize
        return self.chunks > 1 and self.share <= BARRIERS and held <= KEPT_BYTES

    @property
    def buffers(self) -> int:
        """Blocks of shared memory that are in use at a time, of each array."""
        if self.direct:
            return 0
        return self.groups if self.chunks == 1 else self.share if self.kept else RING

    @property
    def tail(self) -> WarpRowWalk | None:
        """The walk of what a row of several chunks that is read element by element has beyond its last whole chunk, or
        None: a chunk that begins in the one before, and ends where the row ends."""
        beyond = self.n % self.chunk
        length = padded(beyond, THREADS)
        return self._replace(chunk=length, skip=length - beyond) if beyond else None

    def spans(self, start: Any) -> list[tuple[Any, int]]:
        """Where a chunk that begins at ``start`` lies in its row: where each piece begins, and how long it is."""
        pieces = [(start, self.seam or self.chunk), (self.n - (self.chunk - self.seam), self.chunk - self.seam)]
        return pieces if 0 < self.seam < self.chunk else pieces[:1]

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

    def refused(self) -> str | None:
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
        if self.cluster > 1 and not self.kept:
            return (
                f"cluster={self.cluster} leaves a block {self.share} chunks of {self.at_once} x {self.chunk} elements "
                f"of a row, which it has to keep: it has room for {KEPT_BYTES // 1024} KiB and {BARRIERS} chunks. Use "
                "more blocks, another block_n or row_warps, or cluster=1, which reads rows twice"
            )
        needed = self.arrays * self.buffers * math.prod(self.block) * self.itemsize
        too_large = over_shared(aligned(needed), "block_rows or block_n")
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
        """A block that begins at ``start`` of its rows, with the number ``beyond`` for what lies beyond their end and
        what is there a second time."""
        if not self.skip and (self.direct or self.n % self.chunk == 0):
            return x
        at = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, self.block, 1), self.layout)
        if self.direct:
            counts = at >= self.seam + self.skip
            counts = counts | (at < self.seam) if self.seam else counts
        else:
            counts = start + at < self.n
        return jnp.where(counts, x, jnp.full(self.block, beyond, x.dtype))

    def counted(self, start: Any) -> tuple[Any, Any]:
        """How many elements of a row come before a chunk that begins at ``start``, and how many in it."""
        again = 0 if self.seam else self.skip
        return start + again, jnp.minimum(self.n - start, self.chunk) - again

    def full(self, value: float) -> Any:
        """A statistic of every row at once."""
        return plgpu.layout_cast(jnp.full((self.at_once,), value, jnp.float32), self.layout.reduce(1))


def key(call: Call, n: int) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": n}


def default_tiling(n: int, dtype: str, arrays: int = 1) -> HopperRowsConfig:
    """A formula of n and the dtype: about 16 KiB of a block's rows are on their way at once, short rows have a warp
    each, and a row that fits into the registers of four warps is worked on as a whole. A longer one has as many blocks
    as keep it. Rows that are read element by element have a block each."""
    size, longest = jnp.dtype(dtype).itemsize * arrays, THREADS * HELD // arrays
    whole = max(THREADS, pl.next_power_of_2(n))
    if whole > longest:
        block_n, cluster = (4096, 1) if element_by_element(n, dtype) else _fewest_blocks(n, size, arrays)
        return HopperRowsConfig(block_rows=1, block_n=block_n, row_warps=WARPS, cluster=cluster)
    if element_by_element(n, dtype):
        return HopperRowsConfig(block_rows=1, block_n=whole, row_warps=WARPS, cluster=1)
    row_warps = 1 if whole <= 1024 else 2 if whole <= 2048 else WARPS
    rows = max(WARPS // row_warps, min(32, 16384 // (size * whole)))
    return HopperRowsConfig(block_rows=rows, block_n=whole, row_warps=row_warps, cluster=1)


def _fewest_blocks(n: int, size: int, arrays: int) -> tuple[int, int]:
    """``block_n`` and the fewest blocks that keep rows of n elements, of ``size`` bytes in all arrays, if possible two
    on a multiprocessor: alone it computes while nothing is on its way. Rows too long for any are read twice."""
    clusters = fields_of(HopperRowsConfig)["cluster"].values
    assert clusters is not None
    for most, cluster in [*((HALF_BYTES, c) for c in clusters.values), (KEPT_BYTES, clusters.hi)]:
        for block_n in (elements // arrays for elements in LONG):
            if pl.cdiv(pl.cdiv(n, block_n), cluster) * block_n * size <= most:
                return block_n, cluster
    return LONG[-1], 1


def supports(call: Call, config: HopperRowsConfig, rows: int, n: int, arrays: int = 1) -> str | None:
    return dtype_refused(call) or WarpRowWalk.over(call, config, rows, n, arrays).refused()


def declared(
    view: Callable[[Call], tuple[int, int]], copies: Callable[[Call, HopperRowsConfig], str | None], arrays: int = 1
) -> dict[str, Any]:
    """What an op on rows of so many arrays declares beside its function. ``view``: the rows of a call, and the elements
    of each."""
    return {
        "key": lambda call: key(call, view(call)[1]),
        "tiling": lambda call: default_tiling(view(call)[1], call.dtype, arrays),
        "supports": lambda call, config: supports(call, config, *view(call), arrays),
        "config": HopperRowsConfig,
        "copies": copies,
    }


def element_by_element(n: int, dtype: Any) -> bool:
    """Whether rows of n elements are not for the copy engine, and long enough for all threads of a warpgroup."""
    return n >= THREADS and n * jnp.dtype(dtype).itemsize % BULK_BYTES != 0


def copies(call: Call, n: int) -> str | None:
    """What XLA pads of rows of n elements, in words."""
    pitch = whole_pieces(n, call.dtype)
    if pitch == n or element_by_element(n, call.dtype):
        return None
    return (
        f"rows of {n} elements are padded to {pitch}, and the results cut off again: the copy engine moves multiples "
        f"of {BULK_BYTES} bytes"
    )


def launched(
    call: Call,
    config: HopperRowsConfig,
    x: Sequence[jax.Array],
    formula: Formula,
    weights: Mapping[str, jax.Array],
    extra_numbers: int = 0,
    approximate: bool = False,
) -> tuple[Any, jax.Array | None]:
    """What a formula makes of the rows of arrays, (rows, n) each, and ``extra_numbers`` numbers of each row, (told,
    rows or more) in float32. ``weights``: what every row shares, (n,) each. ``approximate``: as of :func:`launch`."""
    rows, n = x[0].shape
    walk = WarpRowWalk.over(call, config, rows, n, len(x))
    kept = partial(_kept, interpret=call.interpret)
    read = _direct if walk.direct else _once if walk.chunks == 1 else kept if walk.kept else _twice
    if not walk.direct:
        x = [padded_rows(array) for array in x]
        weights = {name: padded_rows(w, walk.chunk * walk.chunks) for name, w in weights.items()}
    outputs = {"y": jax.ShapeDtypeStruct((rows, walk.pitch), x[0].dtype)} if formula.writes else {}
    if extra_numbers:
        outputs["told"] = jax.ShapeDtypeStruct((extra_numbers, padded(rows, walk.block_rows)), jnp.float32)
    if walk.cluster > 1:
        form = walk.cluster, len(formula.empty), padded(rows, walk.block_rows)
        outputs["shares"] = jax.ShapeDtypeStruct(form, jnp.float32)
    found = launch(
        call,
        partial(read, walk=walk, formula=formula, weights=tuple(weights)),
        call.spec.name,
        (pl.cdiv(rows, walk.block_rows),),
        inputs={**{operand(i): array for i, array in enumerate(x)}, **weights},
        outputs=outputs,
        scratch=_scratch(walk, x[0].dtype),
        cluster={"share": walk.cluster} if walk.cluster > 1 else {},
        approximate=approximate,
    )
    y = found.get("y")
    return y if y is None or walk.pitch == n else y[:, :n], found.get("told")


def _scratch(walk: WarpRowWalk, dtype: Any) -> dict[str, Any]:
    """``scratch`` of a walk: barriers for what blocks tell each other and for what arrives, and its buffers."""
    if walk.direct:
        return {}
    told = {"all_told": plgpu.ClusterBarrier(collective_axes=("share",))} if walk.cluster > 1 else {}
    return told | {
        "arrived": plgpu.Barrier(num_arrivals=walk.arrays * walk.at_once, num_barriers=walk.buffers),
        "buffer": plgpu.SMEM((walk.arrays, walk.buffers, *walk.block), dtype),
    }


def operand(array: int) -> str:
    """What the kernel calls one of the arrays that it reads."""
    return f"x{array}"


def _once(ref: Refs, *, walk: WarpRowWalk, formula: Formula, weights: tuple[str, ...]) -> None:
    """Rows that are read once."""
    first = lax.axis_index("block") * walk.block_rows
    shared = weights_of(ref, walk, weights, 0)

    @pl.loop(0, walk.groups)
    def read(group: Any) -> None:
        bring_rows(ref, walk, first + group * walk.at_once, 0, group)

    @pl.loop(0, walk.groups)
    def work(group: Any) -> None:
        plgpu.barrier_wait(ref.arrived.at[group])
        y, told = formula.whole_row(loaded(ref, walk, group), walk, shared)
        _tell(ref, first + group * walk.at_once, told)
        send_rows(ref, walk, first + group * walk.at_once, 0, group, y)

    plgpu.wait_smem_to_gmem(0)


def _twice(ref: Refs, *, walk: WarpRowWalk, formula: Formula, weights: tuple[str, ...]) -> None:
    """Rows that are read twice: step s of 2 * chunks works on chunk s modulo chunks, in buffer s modulo RING."""
    first = lax.axis_index("block") * walk.block_rows
    steps, of_chunk = 2 * walk.chunks, partial(weights_of, ref, walk, weights)

    @pl.loop(0, walk.groups)
    def work(group: Any) -> None:
        row = first + group * walk.at_once
        before = group * steps

        def read(step: Any) -> None:
            @pl.when(step < steps)
            def _() -> None:
                bring_rows(ref, walk, row, step % walk.chunks, (before + step) % RING)

        for step in range(RING - 1):
            read(jnp.int32(step))

        def gather(step: Any, statistics: tuple[Any, ...]) -> tuple[Any, ...]:
            buffer = (before + step) % RING
            plgpu.barrier_wait(ref.arrived.at[buffer])
            x = loaded(ref, walk, buffer)
            found = formula.gather(statistics, x, walk, step * walk.chunk, of_chunk(step))
            plgpu.commit_smem()  # every thread has read the buffer that is filled next
            read(step + RING - 1)
            return found

        statistics = lax.fori_loop(0, walk.chunks, gather, formula.start(walk))
        _tell(ref, row, formula.row_numbers(statistics, walk))

        @pl.loop(walk.chunks, steps)
        def write(step: Any) -> None:
            buffer, chunk = (before + step) % RING, step - walk.chunks
            plgpu.barrier_wait(ref.arrived.at[buffer])
            y = formula.result(statistics, loaded(ref, walk, buffer), walk, of_chunk(chunk))
            send_rows(ref, walk, row, chunk, buffer, y)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the chunk before has left its buffer, which is next
            read(step + RING - 1)

        plgpu.wait_smem_to_gmem(0)


def _kept(ref: Refs, *, walk: WarpRowWalk, formula: Formula, weights: tuple[str, ...], interpret: bool) -> None:
    """Rows that stay in shared memory, chunk c of a block's share in buffer c: all of it is on its way at once, and is
    looked at as it arrives. Then every chunk makes place for its result."""
    first, of_chunk = lax.axis_index("block") * walk.block_rows, partial(weights_of, ref, walk, weights)
    share = lax.axis_index("share") if walk.cluster > 1 else 0
    begin = share * walk.share
    chunks = jnp.clip(walk.chunks - begin, 0, walk.share)

    @pl.loop(0, walk.groups)
    def work(group: Any) -> None:
        row = first + group * walk.at_once

        @pl.loop(0, chunks)
        def read(buffer: Any) -> None:
            bring_rows(ref, walk, row, begin + buffer, buffer)

        def gather(buffer: Any, statistics: tuple[Any, ...]) -> tuple[Any, ...]:
            chunk = begin + buffer
            plgpu.barrier_wait(ref.arrived.at[buffer])
            x, start = loaded(ref, walk, buffer), chunk * walk.chunk
            return formula.gather(statistics, x, walk, start, of_chunk(chunk), begin * walk.chunk)

        statistics = lax.fori_loop(0, chunks, gather, formula.start(walk))
        if walk.cluster > 1:
            statistics = _of_all_shares(ref, walk, formula, row, share, statistics, interpret)
        pl.when(share == 0)(lambda: _tell(ref, row, formula.row_numbers(statistics, walk)))

        @pl.loop(0, chunks)
        def write(buffer: Any) -> None:
            chunk = begin + buffer
            y = formula.result(statistics, loaded(ref, walk, buffer), walk, of_chunk(chunk))
            send_rows(ref, walk, row, chunk, buffer, y)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next row comes into these buffers


def _of_all_shares(
    ref: Refs, walk: WarpRowWalk, formula: Formula, row: Any, share: Any, statistics: tuple[Any, ...], interpret: bool
) -> tuple[Any, ...]:
    """The statistics of whole rows, of those of this block's share. Blocks tell each other by way of device memory."""
    length, rows = walk.share * walk.chunk, pl.ds(row, walk.at_once)
    for i, numbers in enumerate(statistics):
        store(ref.shares.at[share, i, rows], numbers)
    _fence_of_cluster(interpret)
    plgpu.commit_smem()  # every thread has written before one of them says so
    plgpu.barrier_arrive(ref.all_told)
    plgpu.barrier_wait(ref.all_told)
    _fence_of_cluster(interpret)

    def told_by(owner: int) -> tuple[Any, ...]:
        places = (ref.shares.at[owner, i, rows] for i in range(len(statistics)))
        return tuple(plgpu.load(place, layout=walk.layout.reduce(1), optimized=False) for place in places)

    found = told_by(0)
    for owner in range(1, walk.cluster):
        seen = min(walk.n, owner * length)
        found = formula.merged(found, told_by(owner), seen, min(walk.n - seen, length))
    return found


@plgpu.inline_mgpu()
def _fence(_: Any) -> None:
    nvvm.fence_sc_cluster()


def _fence_of_cluster(interpret: bool) -> None:
    """Keep what this thread reads and writes in device memory from here on behind what it did before, as the blocks of
    its cluster see it: that a barrier orders shared memory alone, and a cache may hold what was there before, showed in
    wrong results. Pallas's interpreter knows no other order."""
    if not interpret:
        _fence()


def _direct(ref: Refs, *, walk: WarpRowWalk, formula: Formula, weights: tuple[str, ...]) -> None:
    """Rows that are read and written element by element: one of a single chunk stays in registers, a longer one is read
    twice. What is there a second time does not count, and is written before what does."""
    whole = walk.n // walk.chunk

    def shared(part: WarpRowWalk, start: Any) -> Weights:
        return {name: partial(_shared, ref, name, part, start) for name in weights}

    first = lax.axis_index("block") * walk.block_rows

    def read(row: Any, part: WarpRowWalk, start: Any) -> Any:
        arrays = (getattr(ref, operand(i)) for i in range(walk.arrays))
        found = tuple(_pieces(x, (pl.ds(row, 1),), part, start, walk.layout) for x in arrays)
        return found[0] if walk.arrays == 1 else found

    def write(row: Any, part: WarpRowWalk, start: Any, y: Any) -> None:
        end = part.chunk
        for begin, length in reversed(part.spans(start) if "y" in ref else ()):
            store(ref.y.at[pl.ds(row, 1), pl.ds(begin, length)], y[:, end - length : end].astype(ref.y.dtype))
            end -= length

    def twice(row: Any) -> None:
        tail = walk.tail
        last = walk.n - tail.chunk if tail else 0

        def gather(part: WarpRowWalk, start: Any, statistics: tuple[Any, ...]) -> tuple[Any, ...]:
            return formula.gather(statistics, read(row, part, start), part, start, shared(part, start))

        def result(part: WarpRowWalk, start: Any) -> None:
            write(row, part, start, formula.result(statistics, read(row, part, start), part, shared(part, start)))

        start = formula.start(walk)
        statistics = lax.fori_loop(0, whole, lambda chunk, found: gather(walk, chunk * walk.chunk, found), start)
        statistics = gather(tail, last, statistics) if tail else statistics
        _tell(ref, row, formula.row_numbers(statistics, walk))
        if tail:
            result(tail, last)
        pl.loop(0, whole)(lambda chunk: result(walk, chunk * walk.chunk))

    def once(row: Any) -> None:
        y, told = formula.whole_row(read(row, walk, 0), walk, shared(walk, 0))
        _tell(ref, row, told)
        write(row, walk, 0, y)

    @pl.loop(0, walk.block_rows)
    def work(group: Any) -> None:
        row = first + group
        pl.when(row < walk.rows)(lambda: (once if walk.chunks == 1 else twice)(row))


def _pieces(x: Any, row: tuple[Any, ...], walk: WarpRowWalk, start: Any, layout: Any) -> Any:
    """A chunk of rows, or of what every row shares, in float32, read as it lies in device memory."""
    places = (x.at[(*row, pl.ds(begin, length))] for begin, length in walk.spans(start))
    found = [plgpu.load(place, layout=layout, optimized=False).astype(jnp.float32) for place in places]
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=-1)


def weights_of(ref: Refs, walk: WarpRowWalk, names: tuple[str, ...], chunk: Any) -> Weights:
    """What every row shares, beside a chunk."""
    return {name: partial(_shared, ref, name, walk, chunk * walk.chunk) for name in names}


def _tell(ref: Refs, row: Any, numbers_of_rows: tuple[Any, ...]) -> None:
    """Write what is told of the rows from ``row`` on."""
    for i, numbers in enumerate(numbers_of_rows if "told" in ref else ()):
        store(ref.told.at[i, pl.ds(row, numbers.shape[0])], numbers)


def loaded(ref: Refs, walk: WarpRowWalk, buffer: Any) -> Any:
    """A block in float32, or of several arrays a tuple of them. What lies beyond the end of its rows is anything."""
    found = (plgpu.layout_cast(ref.buffer[i, buffer], walk.layout).astype(jnp.float32) for i in range(walk.arrays))
    return next(found) if walk.arrays == 1 else tuple(found)


def _shared(ref: Refs, name: str, walk: WarpRowWalk, start: Any) -> Any:
    """What every row shares beside a chunk, in float32; 0 beyond the end of a row."""
    return walk.beside(_pieces(getattr(ref, name), (), walk, start, walk.layout_of_a_row))


def _parts(walk: WarpRowWalk, chunk: Any, move: Callable[[int], None]) -> None:
    """Call ``move`` with the length of a chunk, of which the last may be shorter."""
    last = walk.pitch - (walk.chunks - 1) * walk.chunk
    if walk.chunks == 1 or last == walk.chunk:
        move(last)
        return
    pl.when(chunk < walk.chunks - 1)(lambda: move(walk.chunk))
    pl.when(chunk == walk.chunks - 1)(lambda: move(last))


def bring_rows(ref: Refs, walk: WarpRowWalk, row: Any, chunk: Any, buffer: Any) -> None:
    """Start a chunk of the rows from ``row`` on its way into a buffer. Rows that are not there arrive at once."""
    for i, array in itertools.product(range(walk.at_once), range(walk.arrays)):
        there = row + i < walk.rows

        def move(length: int, i: int = i, array: int = array) -> None:
            plgpu.copy_gmem_to_smem(
                getattr(ref, operand(array)).at[row + i, pl.ds(chunk * walk.chunk, length)],
                ref.buffer.at[array, buffer, i, pl.ds(0, length)],
                ref.arrived.at[buffer],
                oob_mode=IN_BOUNDS,
            )

        pl.when(there)(lambda move=move: _parts(walk, chunk, move))
        pl.when(jnp.logical_not(there))(lambda: plgpu.barrier_arrive(ref.arrived.at[buffer]))


def send_rows(ref: Refs, walk: WarpRowWalk, row: Any, chunk: Any, buffer: Any, y: Any) -> None:
    """Start results on their way to the rows from ``row`` on, in the buffer of their first argument."""
    if "y" not in ref:
        return
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
