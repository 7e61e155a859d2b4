"""How kernels over rows share them: the tiles, by a formula and within limits, and what a program owns.

A row that a program keeps in registers lies in one tile or, where the power of two that covers it would be much longer
than the row, in two: the first is full, so that no column of it is masked, and the second takes what is left. A kernel
holds a tuple of as many tiles wherever it would hold a tile, and sums and maxima are over all of them.

Kernels take their numbers in groups: ``RowExtents`` of the rows, ``RowStrides`` of each array (``layout``), and as the
constant ``tile`` a ``RowTile``.
"""

from __future__ import annotations

import functools
from math import e, log2
from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.configs import RowsConfig
from portakern.backends.triton.launch import accumulator, cdiv, fits_registers, lanes, refuse_over, refuse_tile
from portakern.backends.triton.layout import SHAPES, TensorRows, aligned, pow2_at_least, row_start
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    from portakern.core.call import Call

LOG2_E = tl.constexpr(log2(e))


class RowExtents(NamedTuple):
    """``height``: how many rows there are, ``inner`` of them in the inner row dimension; ``n``: the numbers of each."""

    height: int
    inner: int
    n: int


class TiledExtents(NamedTuple):
    """Of rows that are cut into ``steps`` tiles each, which have programs of their own."""

    height: int
    inner: int
    n: int
    steps: int


class GroupedExtents(NamedTuple):
    """Of rows that programs walk ``group`` at a time; ``parts`` programs share a row."""

    height: int
    inner: int
    group: int
    parts: int
    n: int


class RowTile(NamedTuple):
    """What a kernel over rows is compiled for.

    Attributes:
      block_rows, block_n: the extents of a tile; acc_dtype: what sums are kept in.
      flat, unit: of :meth:`TensorRows.known`.
      tail: the width of a second tile, or 0; tiles: how many hold a row, 0 where it is read in blocks.
      deep: of a row that is read in blocks, how many tiles make a block.
      adjacent: of a row that is read in blocks, how many elements a thread has beside each other.
      stages: tiles of rows one after another whose loads are under way.
    """

    block_rows: int
    block_n: int
    acc_dtype: tl.dtype
    flat: bool
    unit: int
    tail: int = 0
    tiles: int = 0
    deep: int = 1
    adjacent: int = 1
    stages: int = 1


@triton.jit
def own_rows(extents, tile: tl.constexpr):
    """The rows that this program owns, and the numbers of each."""
    n = aligned(extents.n, tile.unit)
    return tl.program_id(0).to(tl.int64) * tile.block_rows + tl.arange(0, tile.block_rows), n


@triton.jit
def start_of(x, row, extents, strides, tile: tl.constexpr):
    """Where rows begin in x, as a column."""
    return row_start(x, row, extents.inner, strides.outer, strides.inner, tile.flat, tile.unit)[:, None]


@triton.jit
def starts_of(x, y, extents, x_strides, tile: tl.constexpr):
    """Of the rows that this program owns the numbers of each and, as columns, where they begin in x and, contiguous,
    in y, and which of them there are."""
    row, n = own_rows(extents, tile)
    x_row = start_of(x, row, extents, x_strides, tile)
    return n, x_row, (y + row * n)[:, None], (row < extents.height)[:, None]


@triton.jit
def tile_of(steps, tile: tl.constexpr):
    """The rows and the elements of each that this program owns."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // steps * tile.block_rows + tl.arange(0, tile.block_rows)
    return row, (pid % steps * tile.block_n + tl.arange(0, tile.block_n))[None, :]


@triton.jit
def columns(first, n, tile: tl.constexpr):
    """The columns from ``first`` on that a program keeps, a tile at a time, and which of them the row has: all of the
    first tile's, where a second one follows."""
    lane = tl.cast(first, tl.int64) + tl.arange(0, tile.block_n)
    if tile.tail == 0:
        return (lane,), (lane < n,)
    else:
        rest = tl.cast(first, tl.int64) + tile.block_n + tl.arange(0, tile.tail)
        return (lane, rest), (tl.full([tile.block_n], 1, tl.int1), rest < n)


@triton.jit
def whole_rows(n, row_ok, tile: tl.constexpr):
    """All columns of rows that stay in registers, a tile at a time: by themselves and which of them there are, and both
    beside the rows."""
    lane, inside = columns(0, n, tile)
    return lane, inside, [a[None, :] for a in lane], [row_ok & a[None, :] for a in inside]


@triton.jit
def load_tiles(x, step, col, ok, other, acc_dtype: tl.constexpr):
    """What lies in the columns of each tile, ``step`` apart, and ``other`` where not ``ok``."""
    return [tl.load(x + col[i] * step, mask=ok[i], other=other).to(acc_dtype) for i in (0, 1)[: len(col)]]


@triton.jit
def row_max(tiles):
    """The largest element of each row."""
    found = tl.max(tiles[0], 1)
    if len(tiles) > 1:
        found = tl.maximum(found, tl.max(tiles[1], 1))
    return found


@triton.jit
def row_sum(tiles):
    """The sum of each row."""
    found = tl.sum(tiles[0], 1)
    if len(tiles) > 1:
        found += tl.sum(tiles[1], 1)
    return found


@triton.jit
def finite_or_zero(m):
    """What is subtracted from a row whose maximum is m: inf - inf would be NaN, and exp(inf) and log(0) are right."""
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton.jit
def exp_or_zero(t):
    """e^t, which may be 0 where it is below the least normal number: ``exp`` of float32 takes three more instructions
    to give that its digits, for the one of ``exp2``."""
    return tl.exp2(t * LOG2_E) if t.dtype == tl.float32 else tl.exp(t)


@triton.jit
def running(m, l, tiles):
    """Each place's maximum m, and its sum l = sum exp(x - m), of what it had and of what ``tiles`` bring there. Where m
    has one number along the last axis, the places along it share their maximum, and one exponential rescales them.

    No place asks another, or none of another thread, so that no thread waits, and the tiles are loaded at once. What
    had no number yet, or nothing but -inf, has the sum 0; what has +inf keeps the sum +inf, which nothing rescales:
    0 inf would be NaN."""
    top = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        top = tl.maximum(top, tiles[i])
    if m.shape[-1] < l.shape[-1]:
        top = tl.max(top, len(m.shape) - 1, keep_dims=True)
    top = tl.maximum(m, top)
    shift = finite_or_zero(top)
    found = exp_or_zero(tiles[0] - shift)
    for i in tl.static_range(1, len(tiles)):
        found += exp_or_zero(tiles[i] - shift)
    return top, tl.fma(l, exp_or_zero(tl.minimum(m - shift, 0.0)), found)


@triton.jit
def load_columns(row, start, col, step, n, row_ok, ends: tl.constexpr, other, tile: tl.constexpr):
    """What rows have from column ``start`` on, in ``deep`` tiles one after another, each of the columns ``col``;
    ``other`` beyond n, which only the block in which a row ``ends`` reaches. In others no column has a mask, nor has a
    row that is alone: a program has one that is there, and whoever does not want it does not ask."""
    at = [start + i * col.shape[1] + col for i in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)[: tile.deep]]
    if ends:
        return [tl.load(row + a * step, mask=row_ok & (a < n), other=other).to(tile.acc_dtype) for a in at]
    elif row.shape[0] == 1:
        return [tl.load(row + a * step).to(tile.acc_dtype) for a in at]
    else:
        return [tl.load(row + a * step, mask=row_ok, other=other).to(tile.acc_dtype) for a in at]


@triton.jit
def places_of(n, row_ok, tile: tl.constexpr):
    """Of rows of n that are read ``block_n`` numbers at a time, in ``deep`` tiles: the columns of a tile's places, a
    zero for each place of each row, n, and where the last whole block ends."""
    places: tl.constexpr = tile.block_n // tile.deep
    zeros = tl.zeros([row_ok.shape[0], places], tile.acc_dtype)
    n = tl.cast(n, tl.int64)
    return tl.arange(0, places)[None, :].to(tl.int64), zeros, n, n // tile.block_n * tile.block_n


@triton.jit
def vectors(x, tile: tl.constexpr):
    """The numbers of rows by the vectors in which a thread moves them: (rows, vectors, numbers of one)."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // tile.adjacent, tile.adjacent])


@triton.jit
def of_long_rows(x_row, x_n, n, row_ok, sums: tl.constexpr, tile: tl.constexpr):
    """m = max x and l = sum exp(x - m), or sum exp(x) where m is infinite, of rows that are read ``block_n`` numbers at
    a time, and the sum of x if ``sums``: place by place (:func:`running`), and once across the places. Those that a
    thread loads at once share their maximum."""
    col, total, n, whole = places_of(n, row_ok, tile)
    l = vectors(total, tile)
    m = tl.max(l, 2, keep_dims=True) - float("inf")
    wanted = tl.max(tl.max(row_ok.to(tl.int64), 1), 0)  # 0: no row
    for ends in tl.static_range(2):
        for start in range(whole if ends else 0, n if ends else whole * wanted, tile.block_n):
            t = load_columns(x_row, start, col, x_n, n, row_ok, ends, float("-inf"), tile)
            m, l = running(m, l, [vectors(x, tile) for x in t])
            if sums:
                for i in tl.static_range(len(t)):
                    total += tl.where(start + i * col.shape[1] + col < n, t[i], 0.0)
    top = tl.max(tl.max(m, 2), 1)
    scale = tl.exp(tl.minimum(m - finite_or_zero(top)[:, None, None], 0.0))
    return top, tl.sum(tl.sum(l * scale, 2), 1), tl.sum(total, 1)


@triton.jit
def weigh_long_rows(x_row, x_n, y_row, y_n, g, m, l, n, row_ok, tile: tl.constexpr):
    """y = g exp(x - m) / l of long rows, g None for 1, from their ends, where what was read last is still near; NaN
    where m is infinite."""
    col, _, n, whole = places_of(n, row_ok, tile)
    share = tl.where(tl.abs(m) == float("inf"), float("nan"), 1.0 / l)[:, None]
    m = m[:, None]
    for others in tl.static_range(2):
        for back in range(0, whole if others else n - whole, tile.block_n):
            start = whole - tile.block_n - back if others else whole
            t = load_columns(x_row, start, col, x_n, n, row_ok, not others, float("-inf"), tile)
            for i in tl.static_range(len(t)):
                at = start + i * col.shape[1] + col
                out = tl.exp(t[i] - m) * share
                if g is not None:
                    out = g * out
                ok = row_ok if others else row_ok & (at < n)
                tl.store(y_row + at * y_n, out.to(y_row.dtype.element_ty), mask=ok)


@triton.jit
def centred(t, ok, n, eps):
    """x - mean of rows that stay in registers, 0 where not ``ok``, and (var + eps)^-1/2. Equal numbers leave 0: what a
    sum and its quotient have lost of the mean is the mean of what they leave."""
    rounded = row_sum(t) / n
    rest = row_sum([tl.where(ok[i], t[i] - rounded[:, None], 0.0) for i in (0, 1)[: len(t)]])
    mean = (rounded + rest / n)[:, None]
    d = [tl.where(ok[i], t[i] - mean, 0.0) for i in (0, 1)[: len(t)]]
    return d, tl.rsqrt(row_sum([a * a for a in d]) / n + eps)[:, None]


def first_tile(n: int, least: int) -> int:
    """How wide the first tile is of a row that stays in registers; where it is narrower than the row, a second one
    follows.

    Two tiles are taken where they are a quarter shorter than one, or more, of at least 512 columns where each element
    has a mask of its own and 2048 where 8 share one (H100, bfloat16, 8192 x 1001: softmax 18.7 us in two, 17.3 in one;
    4096 x 6927: logsumexp 35.9 and 34.2).

    ``least``: from this width on, rows that are not aligned lie in two however long the second is."""
    whole = pow2_at_least(n, 128)
    half, odd = whole // 2, n % 8 > 0
    shorter = half >= (512 if odd else 2048) and 2 * (n - half) <= half
    two = shorter or (odd and least <= half)
    return half if two and n < whole else whole


@functools.lru_cache(SHAPES)
def kept(n: int, block_rows: int, block_n: int, num_warps: int, least: int) -> tuple[int, int]:
    """How wide a second tile is of rows of n, or 0, and how many tiles hold a row; 0: it does not stay in registers,
    and is read in blocks.

    ``least``: what all threads of a program read of a row at once. A second tile is no narrower, so that they share it
    as they share the first: numbers that both tiles of a row have to do with need not change hands, and no two threads
    hold one element."""
    if n <= block_n:
        return 0, 1
    tail = pow2_at_least(n - block_n, min(least, block_n))
    return (tail, 2) if tail <= block_n and fits_registers(block_rows * (block_n + tail), num_warps) else (0, 0)


def tiles_of(call: Call, n: int, config: RowsConfig) -> tuple[int, int]:
    """:func:`kept`, of a call's rows of n."""
    num_warps = config.num_warps
    return kept(n, config.block_rows, config.block_n, num_warps, threads_read(call, n, num_warps))


def threads_read(call: Call, n: int, num_warps: int) -> int:
    """How many elements of a row of n the threads of a program read at once."""
    vector = 16 // numpy_dtype(call.dtype).itemsize
    return num_warps * lanes(call.target.arch) * (1 if n % vector else vector)


def row_tile(call: Call, rows: TensorRows, n: int, config: RowsConfig) -> RowTile:
    """The tile of a kernel over rows of n. A long row is read ``deep`` tiles at a time: as many as one has elements
    that all threads read at once, so that what a thread adds up is in its own hands."""
    tail, tiles = tiles_of(call, n, config)
    deep = 1 if tiles else min(max(config.block_n // threads_read(call, n, config.num_warps), 1), 16)
    tile = block_tile(call, rows, config)
    return tile._replace(tail=tail, tiles=tiles, deep=deep, adjacent=tile.unit if rows.strides[0].n == 1 else 1)


def block_tile(call: Call, rows: TensorRows, config: RowsConfig) -> RowTile:
    """The tile of a kernel that knows no row as a whole."""
    return RowTile(config.block_rows, config.block_n, accumulator(call.dtype), **rows.known(call.dtype))


def shared_tile(call: Call, rows: TensorRows, n: int, config: RowsConfig) -> tuple[int, RowTile]:
    """How many programs share a row of n that may not stay in registers, and the tile of each."""
    tail, tiles = tiles_of(call, n, config)
    tile = block_tile(call, rows, config)._replace(tail=tail, tiles=tiles or 1)
    return 1 if tiles else cdiv(n, config.block_n), tile


def refuse_rows(call: Call, config: RowsConfig, n: int, rows: int) -> str | None:
    """Why rows of n cannot be walked with this tiling."""
    tail, _ = tiles_of(call, n, config)
    reason = refuse_tile(call, config, rows)
    return reason or (refuse_over(call, config.num_warps, config.block_rows * tail) if tail else None)


def tile_rows(n: int, arch: str, norm: bool = False) -> RowsConfig:
    """A formula of n instead of a table: nothing that was timed asked for another choice at some n, or on some chip.

    A program takes a whole row where 1024 threads can hold it, some short ones together (:func:`rows_per_program`), and
    else a
    block of it at a time, twice: 16384 numbers, held by 1024 threads (H100, 4096 x 65536: layernorm 450 us, 592 by 512
    threads, rmsnorm 480 and 500; x 131072: layernorm 1052 and 1275, softmax 954 and 1047), or 4096 of rows that are not
    aligned (H100, n = 131072: 74 us in blocks of 16384, 82 in blocks of 8192; n = 21775, which is not aligned: 76 us in
    blocks of 4096, 121 in blocks of 8192).

    A thread takes 16 elements, or 32 of rows longer than 8192, or than 2048 in two tiles, and of those of 257 to 512,
    but for norms to 1024 (H200, softmax of 16384 x 640: 14.6 us for 15.6, x 448: 9.6 for 10.6; rmsnorm of 12818 x 960
    lost a twentieth); and 32 of rows that are not aligned, which are read one element at a time and want more reads
    under way in each thread (H100, n = 4097 in one tile: 40 us where 16 take 47). Of two tiles the first counts
    (H100, softmax of 4095 x 5000: 32.0 us with 4 warps, 33.5 with 8; layernorm of 4096 x 12288: 72.9 with 8, 75.9 with
    16; H200, rmsnorm of 2304 x 10186: 36.1 us with 8, 37.5 with 16), and both of rows that are not aligned, but for
    norms (softmax of 4095 x 5001: 36.4 with 8, 37.0 with 4).

    ``norm``: rows share weights. Such gain by two tiles however long the second is, and by one warp where that has room
    (H200, layernorm of 28800 x 582: 23.7 us, 29.1 in two warps; of 32768 x 205: 11.8 and 14.5; softmax lost, 12.9 and
    12.6). Others gain by two from 8193 on (H200, softmax of 2048 x 13001: 46.8 us, 63.5 in one)."""
    odd, width = n % 8 > 0, lanes(arch)
    if n > (20480 if odd else 32768):  # odd rows that are longer would not fit in the registers of 1024 threads
        block_n = 4096 if odd else 16384
        return RowsConfig(block_rows=1, block_n=block_n, num_warps=block_n // (16 * width))
    block_n = first_tile(n, 1024 if norm else 8192)
    two = n > block_n
    row = block_n + pow2_at_least(n - block_n) if two else block_n
    short = not odd and (block_n == 512 or (block_n == 1024 and not norm))
    elements = 32 if odd or short or block_n > (2048 if two else 8192) else 16
    least = 1 if short or (norm and odd) else 64 // elements
    if odd and row == 1024:  # H100, 8192 x 1001: softmax 17.3 us, 18.1 in two rows of 2 warps
        least = 128 // width
    block_rows = rows_per_program(n, row, block_n, norm)
    counted = row if two and odd and not norm else block_n
    num_warps = pow2_at_least(block_rows * counted // (elements * width), least, 1024 // width)
    return RowsConfig(block_rows=block_rows, block_n=block_n, num_warps=num_warps)


def tile_rows_once(n: int, arch: str) -> RowsConfig:
    """:func:`tile_rows` of rows that are read once, and kept by nobody: those of more than 8192 aligned numbers go by
    blocks of 4096 in 128 threads, of which eight programs fit on a multiprocessor, so that the loads of some are under
    way while others compute.

    H200, bfloat16, cross_entropy of 8192 x 128256: 469 us, by 256 threads in blocks of 8192 472, by 1024 in blocks of
    16384 629, QuACK 582; of 16384 x 32000: 241, 251, 517 (by 1024 threads that hold the row), QuACK 262. With blocks
    copied to shared memory ahead, in 4 or 8 stages: 468 and 240."""
    if n % 8 or n <= 8192:
        return tile_rows(n, arch)
    return RowsConfig(block_rows=1, block_n=4096, num_warps=128 // lanes(arch))


def rows_per_program(n: int, row: int, block_n: int, norm: bool) -> int:
    """How many rows of n a program takes, whose tiles have ``row`` columns.

    About 2048 elements of rows in one tile, or 1024 of 257 to 512 and of those that are not aligned (H100, rmsnorm of
    9152 x 141: 6.8 us in both; of 192 x 455: 4.8 us in four rows, 4.4 in two; layernorm of 576 x 205, whose eight rows
    gave 72 programs: 6.0 us, 4.8 in two rows of four warps; H200, layernorm of 16384 x 448: 10.0 us in two rows, 10.4
    in four).

    Of rows in two tiles norms take two: of aligned ones where the first has 16384 columns, so that 1024 threads are at
    work (H200, 1408 x 23488: layernorm 46.5 us for 53.1, rmsnorm 38.4 for 51.1; 4096 x 16384, in one tile: 87.3 for
    74.7), and of others up to 8192 (rmsnorm of 4096 x 12286: 69.8 us in one, 91.9 in two), unless one fills a warp by
    itself (16384 x 1198: layernorm 27.7 us in one warp, 29.1 in two rows of two)."""
    odd = n % 8 > 0
    if n > block_n:
        pair = norm and (n <= 8192 and not 640 < row <= 1280 if odd else block_n == 16384)
        return 2 if pair else 1
    if odd and row == 1024:
        return 2 if norm else 1
    return pow2_at_least((1024 if odd or row == 512 else 2048) // row, 1, 16)


@triton.jit
def maximum_and_sum(t):
    """m and l of rows that stay in registers, each of one number a row."""
    m = row_max(t)
    shift = finite_or_zero(m)[:, None]
    return m, row_sum([tl.exp(a - shift) for a in t])
