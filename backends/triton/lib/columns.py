"""Rows that lie side by side: the axis that is reduced is not the one along which memory runs.

Such a row is a column of a matrix in memory, and a program owns ``block_rows`` of them next to each other, a *strip*,
so that what a warp reads at once is contiguous. Of a strip it holds ``block_n`` numbers a row at a time, in tiles whose
first axis runs along the rows. Where that is a whole row, in one tile, one kernel does all. A longer one is cut into
``parts``, whose sums programs of their own find, each walking its part ``deep`` tiles at a time; in a second kernel the
same programs join them and walk back, so that what was read last is still in the cache.

Along a part each place of a tile has a sum of its own, in the order of the tiles; those of a row's places are added by
halves (:func:`tree_sum`). Parts and tiles follow from the rows' length, and where a product meets a sum the source says
whether they are fused: compilers do so where both lie in one block of their code, which hangs on masks and vectors. So
a row has the same bits in strips of any width and beside any number of others.

Kernels take their numbers in groups: ``StripExtents``, ``StripStrides`` of each array, and as the constant ``tile`` a
``StripTile``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.configs import RowsConfig
from portakern.backends.triton.launch import accumulator, cdiv, lanes, launch, refuse_tile, torch_dtype
from portakern.backends.triton.layout import TensorRows, aligned, fresh, pow2_at_least, walk_rows
from portakern.backends.triton.lib.rows import (
    finite_or_zero,
    running,
)
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

PARTS = 8
"""The most parts that a row is cut into: each program of the second kernel reads what all of them found."""

DEEP = 8
"""In how many tiles a program holds what it has of a longer row at a time: all are read at once, and a number of one
meets those of the others in one thread."""


class StripExtents(NamedTuple):
    """``lanes``: how many rows lie side by side; ``n``: the numbers of a row; ``chunk``: those of a part of it."""

    lanes: int
    n: int
    chunk: int


class StripStrides(NamedTuple):
    """Of one array: between groups of rows, between rows side by side, and along a row, None where a row has one
    number."""

    group: int
    lane: int
    n: int | None = None


class StripTile(NamedTuple):
    """What a kernel over strips is compiled for: see :class:`Strips`."""

    block_rows: int
    block_n: int
    parts: int
    deep: int
    acc_dtype: tl.dtype
    unit: int


@triton.jit
def tree_sum(t):
    """The sum over the first axis, which stays: of its two halves, and so on. Two numbers have one sum, in whatever
    layout they meet."""
    for _ in tl.static_range(16):
        if t.shape[0] > 1:
            t = tl.sum(tl.reshape(t, [2, t.shape[0] // 2, t.shape[1]]), 0)
    return t


@triton.jit
def product(a, b):
    """a b, rounded before anything is added to it.

    Of a b + c d a compiler fuses one product with the sum and rounds the other alone. Where c d comes from another
    thread, that one does the same the other way round, and the two have not one sum. What is fused with zero is left.
    """
    return tl.fma(a, b, tl.zeros_like(a))


@triton.jit
def strip_of(index, lanes, parts: tl.constexpr, tile: tl.constexpr):
    """Of program ``index``: which rows it has beside each other, which part of them, and in which group of rows."""
    strips = tl.cdiv(lanes, tile.block_rows)
    lane = (index % strips).to(tl.int64) * tile.block_rows + tl.arange(0, tile.block_rows)
    index = index // strips
    if parts:
        return lane[None, :], (index % parts).to(tl.int64), (index // parts).to(tl.int64)
    else:
        return lane[None, :], 0, index.to(tl.int64)


@triton.jit
def tiles_of(part, extents, tile: tl.constexpr):
    """How many tiles a program walks, where the last of them begins, and where its part ends."""
    if tile.parts:
        last = tl.minimum((part + 1) * extents.chunk, extents.n)
        tiles = tl.cdiv(last - part * extents.chunk, tile.block_n)
        return tiles, part * extents.chunk + (tiles - 1) * tile.block_n, last
    else:
        return 1, tl.cast(0, tl.int64), extents.n


@triton.jit
def begin(x, group, lane, strides, unit: tl.constexpr):
    """Where the rows of a strip begin."""
    return x + (group * aligned(strides.group, unit) + lane * strides.lane)


@triton.jit
def load_block(row, start, step, step_n, last, inside, other, tile: tl.constexpr):
    """What rows have from ``start`` on: ``deep`` tiles one after another, each of the numbers ``step``, and ``other``
    where the rows have ended. All are on their way before one of them is needed."""
    at = [start + i * step.shape[0] + step for i in (0, 1, 2, 3, 4, 5, 6, 7)[: tile.deep]]
    return [tl.load(row + a * step_n, mask=(a < last) & inside, other=other).to(tile.acc_dtype) for a in at]


@triton.jit
def store_block(row, start, step, step_n, last, inside, tiles):
    """The reverse of :func:`load_block`."""
    for i in tl.static_range(len(tiles)):
        at = start + i * step.shape[0] + step
        tl.store(row + at * step_n, tiles[i].to(row.dtype.element_ty), mask=(at < last) & inside)


@triton.jit
def softmax_part_sums_kernel(x, other, m, total, extents, x_strides, other_strides, tile: tl.constexpr):
    """Of each part of ``chunk`` numbers of a row its maximum m and sum exp(x - m); or sum x other, where that is given.

    m, total: (rows, parts). A part of nothing but -inf has the sum 0, and one with +inf the sum +inf."""
    lanes, x_n, other_n = (
        aligned(extents.lanes, tile.unit),
        aligned(x_strides.n, tile.unit),
        aligned(other_strides.n, tile.unit),
    )
    lane, part, group = strip_of(tl.program_id(0), lanes, tile.parts, tile)
    x_row = begin(x, group, lane, x_strides, tile.unit)
    first = part * extents.chunk
    last = tl.minimum(first + extents.chunk, extents.n)
    places: tl.constexpr = tile.block_n // tile.deep
    step, inside = tl.arange(0, places)[:, None].to(tl.int64), lane < lanes
    top = tl.full([places, tile.block_rows], float("-inf"), tile.acc_dtype)
    acc = tl.full([places, tile.block_rows], 0.0, tile.acc_dtype)
    for start in range(first, last, tile.block_n):
        if other is None:
            t = load_block(x_row, start, step, x_n, last, inside, float("-inf"), tile)
            top, acc = running(top, acc, t)
        else:
            other_row = begin(other, group, lane, other_strides, tile.unit)
            t = load_block(x_row, start, step, x_n, last, inside, 0.0, tile)
            g = load_block(other_row, start, step, other_n, last, inside, 0.0, tile)
            for i in tl.static_range(len(t)):
                acc = tl.fma(t[i], g[i], acc)
    at = (group * lanes + lane) * tile.parts + part
    if other is None:
        highest = tl.max(top, 0)[None, :]
        acc = product(acc, tl.exp(tl.minimum(top - finite_or_zero(highest), 0.0)))
        tl.store(m + at, highest, mask=inside)
    tl.store(total + at, tree_sum(acc), mask=inside)


@triton.jit
def of_parts(found, row, inside, other, parts: tl.constexpr):
    """What the parts of rows found: (parts, rows), filled up to a power of two with ``other``."""
    part = tl.arange(0, triton.next_power_of_2(parts))[:, None]
    return tl.load(found + row * parts + part, mask=(part < parts) & inside, other=other)


@triton.jit
def joined(m, total, row, inside, parts: tl.constexpr, finite: tl.constexpr):
    """m and l of whole rows, each of one number a row, from those of their parts. l = sum exp(x), and not NaN, where m
    is +inf, if ``finite``."""
    tops = of_parts(m, row, inside, float("-inf"), parts)
    top = tl.max(tops, 0)[None, :]
    if finite:
        d = tl.minimum(tops - tl.where(tl.abs(top) == float("inf"), 0.0, top), 0.0)
    else:
        d = tops - top
    return top, tree_sum(product(of_parts(total, row, inside, 0.0, parts), tl.exp(d)))


@triton.jit
def added(total, row, inside, parts: tl.constexpr):
    """The sum of what the parts of a row found."""
    return tree_sum(of_parts(total, row, inside, 0.0, parts))


@triton.jit
def weigh_strips(x, y, g, m, l, extents, x_strides, y_strides, g_strides, tile: tl.constexpr):
    """y = g exp(x - max x) / sum exp(x - max x) along rows that lie side by side: whole ones, or ``parts`` of them,
    whose m and l are known, from their ends. g is one number a row, or None for 1."""
    lanes, x_n, y_n = (
        aligned(extents.lanes, tile.unit),
        aligned(x_strides.n, tile.unit),
        aligned(y_strides.n, tile.unit),
    )
    lane, part, group = strip_of(tl.num_programs(0) - 1 - tl.program_id(0), lanes, tile.parts, tile)
    x_row, y_row = begin(x, group, lane, x_strides, tile.unit), begin(y, group, lane, y_strides, tile.unit)
    step, inside = tl.arange(0, tile.block_n // tile.deep)[:, None].to(tl.int64), lane < lanes
    if g is not None:
        factor = tl.load(begin(g, group, lane, g_strides, 1), mask=inside, other=0.0).to(tile.acc_dtype)
    if tile.parts:
        top, total = joined(m, l, group * lanes + lane, inside, tile.parts, False)
    tiles, start, last = tiles_of(part, extents, tile)
    for _ in range(tiles):
        t = load_block(x_row, start, step, x_n, last, inside, float("-inf"), tile)
        if not tile.parts:
            top = tl.max(t[0], 0)[None, :]
        p = [tl.exp(a - top) for a in t]
        if not tile.parts:
            total = tree_sum(p[0])
        share = 1.0 / total
        if g is None:
            out = [a * share for a in p]
        else:
            out = [factor * (a * share) for a in p]
        store_block(y_row, start, step, y_n, last, inside, out)
        start -= tile.block_n


def side_by_side(x: torch.Tensor, axis: int) -> bool:
    """Whether the rows of x along this axis lie side by side: memory runs along another one.

    Its strides alone say so, as those of a row among others: a row by itself is read in the same way."""
    steps = x.stride()
    return any(0 < step < steps[axis] for step in steps)


class Strips(NamedTuple):
    """How kernels walk rows that lie side by side.

    Attributes:
      height: how many rows. lanes: how many of them lie side by side; groups: of how many such.
      strides: for each tensor, and last for a contiguous result, its strides.
      numbers: those of an array of one number a row.
      unit: what divides lanes, and every distance but that between two of them, which is then 1.
      parts: how many parts a row has that is not held whole, else 0. chunk: how long one is.
      block_rows, block_n: the extents of a tile; num_warps: the warps of a program.
    """

    height: int
    lanes: int
    groups: int
    strides: tuple[StripStrides, ...]
    numbers: StripStrides
    unit: int
    parts: int
    chunk: int
    block_rows: int
    block_n: int
    num_warps: int

    @property
    def programs(self) -> int:
        """How many write a result: one a strip of whole rows, or of each of their parts."""
        return self.groups * cdiv(self.lanes, self.block_rows) * max(self.parts, 1)

    def extents(self, n: int) -> StripExtents:
        return StripExtents(self.lanes, n, self.chunk)

    def tile(self, call: Call) -> StripTile:
        deep = DEEP if self.parts else 1
        return StripTile(self.block_rows, self.block_n, self.parts, deep, accumulator(call.dtype), self.unit)


def walk_strips(call: Call, axis: int, config: RowsConfig, *tensors: Any) -> tuple[tuple[Any, ...], Strips]:
    """The tensors, whose rows along ``axis`` lie side by side, and how to walk them."""
    tensors, rows = walk_rows(axis, *tensors)
    return tensors, strips_of(call, rows, tensors[0].shape[axis], config)


def strips_of(call: Call, rows: TensorRows, n: int, config: RowsConfig) -> Strips:
    lanes, groups, numbers = rows.inner, rows.height // rows.inner, StripStrides(rows.inner, 1)
    strides: tuple[tuple[int, int, int], ...] = rows.strides
    outer, inner, _ = strides[0]
    if groups > 1 and (0 < outer < inner or lanes == 1):
        lanes, groups, numbers = groups, lanes, StripStrides(1, rows.inner)
        strides = tuple((b, a, c) for a, b, c in strides)
    tile = tile_of_strips(call, n, lanes, config)
    blocks = cdiv(n, tile.block_n)
    chunk = tile.block_n * cdiv(blocks, PARTS)
    vector = 16 // numpy_dtype(call.dtype).itemsize
    alike = all(lane == 1 and not group % vector and not step % vector for group, lane, step in strides)
    unit, parts = vector if alike and lanes % vector == 0 else 1, cdiv(n, chunk) if blocks > 1 else 0
    of_arrays = tuple(StripStrides(a, b, c) for a, b, c in strides)
    return Strips(rows.height, lanes, groups, of_arrays, numbers, unit, parts, chunk, **tile)


def tile_of_strips(call: Call, n: int, lanes_there_are: int, config: RowsConfig) -> RowsConfig:
    """A tiling's tile, no longer than a row and no wider than its strip, and warps that have a number each of it."""
    width = lanes(call.target.arch)
    block_n = min(config.block_n, pow2_at_least(n))
    block_rows = min(config.block_rows, max(pow2_at_least(lanes_there_are), width // block_n))
    num_warps = min(config.num_warps, max(block_rows * block_n // width, 1))
    return RowsConfig(block_rows=block_rows, block_n=block_n, num_warps=num_warps)


def refuse_strips(call: Call, x: torch.Tensor, axis: int, config: RowsConfig) -> str | None:
    """Why rows that lie side by side cannot be walked with this tiling."""
    _, strips = walk_strips(call, axis, config, x)
    tile = RowsConfig(block_rows=strips.block_rows, block_n=strips.block_n, num_warps=strips.num_warps)
    return refuse_tile(call, tile, strips.programs * strips.block_rows)


def tile_columns(n: int, arch: str) -> RowsConfig:
    """A formula of n: whole rows of up to 1024 numbers; of longer ones 128 of 32 rows; 32 numbers a thread.

    64 rows side by side are 128 bytes of 16-bit numbers, a line of the cache; 16 are a sector of it, the least that
    memory moves. In parts 32 are enough: twice the programs, and fewer numbers to be added up in each (H200, 4096 x
    4096 along axis 0 in bfloat16: logsumexp 16.6 us, 18.9 with 64 and 21.4 with 128; softmax 34.5, 35.4 and 37.2)."""
    block_n = pow2_at_least(n) if n <= 1024 else 128
    block_rows = 32 if n > 1024 else 64 if block_n <= 256 else 16384 // block_n
    num_warps = pow2_at_least(block_rows * block_n // (32 * lanes(arch)), 1, 1024 // lanes(arch))
    return RowsConfig(block_rows=block_rows, block_n=max(block_n, 128), num_warps=num_warps)


def sum_parts(
    call: Call, strips: Strips, n: int, x: Any, other: Any = None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Each part's maximum and sum (:func:`softmax_part_sums_kernel`), or None where rows are held whole."""
    if not strips.parts:
        return None, None
    dtype = torch_dtype("float64" if call.dtype == "float64" else "float32")
    total = fresh((strips.height, strips.parts), dtype, x.device)
    m = fresh((strips.height, strips.parts), dtype, x.device) if other is None else None
    launch(softmax_part_sums_kernel, strips.programs, call, x, other, m, total, strips.extents(n),
           strips.strides[0], strips.strides[0 if other is None else 1], tile=strips.tile(call),
           num_warps=strips.num_warps)  # fmt: skip
    return m, total


def lead(call: Call) -> tuple[Any, int]:
    """The array whose rows are read, and the axis along which they lie: the last, where a call names none."""
    x = call.arrays[call.spec.lead.name]
    return x, call.options.get("axis", x.ndim - 1)
