"""How kernels over rows share them: the tiles, by a formula and within limits, and what a program owns.

A row that a program keeps in registers lies in one tile or, where the power of two that covers it would be much longer
than the row, in two: the first is full, so that no column of it is masked, and the second takes what is left. A kernel
holds a tuple of as many tiles wherever it would hold a tile, and sums and maxima are over all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from portakern.backends.triton.launch import TILE_REGISTERS, cdiv, lanes, refuse_over, refuse_tile
from portakern.backends.triton.layout import SHAPES, pow2_at_least
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def tile_of(steps, block_rows: tl.constexpr, block_n: tl.constexpr):
    """The rows and the elements of each that this program owns."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // steps * block_rows + tl.arange(0, block_rows)
    return row, (pid % steps * block_n + tl.arange(0, block_n))[None, :]


@triton.jit
def columns(first, n, block_n: tl.constexpr, tail: tl.constexpr):
    """The columns from ``first`` on that a program keeps, a tile at a time, and which of them the row has: all of the
    first tile's, where a second one follows."""
    lane = tl.cast(first, tl.int64) + tl.arange(0, block_n)
    if tail == 0:
        return (lane,), (lane < n,)
    else:
        rest = tl.cast(first, tl.int64) + block_n + tl.arange(0, tail)
        return (lane, rest), (tl.full([block_n], 1, tl.int1), rest < n)


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
def centred(t, ok, n, eps, tiles: tl.constexpr):
    """x - mean of rows that stay in registers, 0 where not ``ok``, and (var + eps)^-1/2."""
    mean = (row_sum(t) / n)[:, None]
    d = [tl.where(ok[i], t[i] - mean, 0.0) for i in (0, 1)[:tiles]]
    return d, tl.rsqrt(row_sum([a * a for a in d]) / n + eps)[:, None]


def first_tile(n: int, least: int = 0) -> int:
    """How wide the first tile is of a row that stays in registers; where it is narrower than the row, a second one
    follows.

    Two tiles are taken where they are a quarter shorter than one, or more, of at least 512 columns where each element
    has a mask of its own and 2048 where 8 share one (H100, bfloat16, 8192 x 1001: softmax 18.7 us in two, 17.3 in one;
    4096 x 6927: logsumexp 35.9 and 34.2).

    ``least``: from this width on, rows that are not aligned lie in two however long the second is."""
    whole = pow2_at_least(n, 128)
    half, odd = whole // 2, n % 8 > 0
    shorter = half >= (512 if odd else 2048) and 2 * (n - half) <= half
    two = shorter or (odd and 0 < least <= half)
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
    fits = tail <= block_n and block_rows * (block_n + tail) <= num_warps * 32 * TILE_REGISTERS
    return (tail, 2) if fits else (0, 0)


def blocks(tiling: Mapping[str, int]) -> dict[str, int]:
    """The constants of a kernel that reads rows in blocks."""
    return {name: tiling[name] for name in ("block_rows", "block_n", "num_warps")}


def told(call: Call, n: int, tiling: Mapping[str, int]) -> dict[str, int]:
    """The constants of a kernel whose programs have rows of n."""
    found, vector = blocks(tiling), 16 // numpy_dtype(call.dtype).itemsize
    at_once = tiling["num_warps"] * lanes(call.target.arch) * (1 if n % vector else vector)
    found["tail"], found["tiles"] = kept(n, *found.values(), at_once)
    return found


def parts_of(call: Call, n: int, tiling: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """How many programs share a row of n that may not stay in registers, and the constants of their kernel."""
    constants = told(call, n, tiling)
    return (1, constants) if constants["tiles"] else (cdiv(n, tiling["block_n"]), constants | {"tiles": 1})


def refuse_rows(call: Call, tiling: Mapping[str, int], n: int, rows: int) -> str | None:
    """Why rows of n cannot be walked with this tiling."""
    tail = told(call, n, tiling)["tail"]
    reason = refuse_tile(call, tiling, rows)
    return reason or (refuse_over(call, tiling["num_warps"], tiling["block_rows"] * tail) if tail else None)


def tile_rows(n: int, arch: str, pairs: int = 0, of_first: bool = False) -> dict[str, int]:
    """A formula of n instead of a table: nothing that was timed asked for another choice at some n, or on some chip.

    A program takes a whole row where 1024 threads can hold it, and about 2048 elements of short rows, or 1024 of those
    that are not aligned, in two warps (H100, rmsnorm of 9152 x 141: 6.8 us in both; of 192 x 455: 4.8 us in four rows,
    4.4 in two; layernorm of 576 x 205, whose eight rows gave 72 programs: 6.0 us, 4.8 in two rows of four warps, and of
    the four rows that it takes now no time is known). A thread takes 16 elements, or 32 of rows longer than 16384 and
    of rows that are not aligned, which are read one element at a time and want more reads under way in each thread
    (H100, n = 4097 in one tile: 40 us where 16 take 47). Longer rows are read twice, in blocks that half of a
    multiprocessor's threads hold (H100, n = 131072: 74 us in blocks of 16384, 82 in blocks of 8192; n = 21775, which is
    not aligned: 76 us in blocks of 4096, 121 in blocks of 8192).

    Two tiles (:func:`first_tile`) are of one row; a thread takes 32 elements of those of 4096 or more, counted in the
    first of aligned rows (H100, bfloat16, softmax of 4095 x 5000: 32.0 us with 4 warps, 33.5 with 8; layernorm of
    4096 x 12288: 72.9 with 8, 75.9 with 16) and in both of others (softmax of 4095 x 5001: 36.4 with 8, 37.0 with 4).

    ``pairs``: up to which n a program takes two of the rows that are not aligned. Norms gain by it, since two rows
    share their weights, softmax lost. Norms also gain by two tiles however long the second is.

    ``of_first``: threads for the first tile alone. Layernorm, 2 x 4096 of 4096 x 6927: 61 us with 8 warps, 92 with 16;
    rmsnorm has half the registers a thread with 16 (60 for 151, no spills), and 54.5 us."""
    odd, width = n % 8 > 0, lanes(arch)
    if n > (20480 if odd else 32768):  # odd rows that are longer would not fit in the registers of 1024 threads
        block_n, elements = (4096, 16) if odd else (16384, 32)
        row, two = block_n, False
    else:
        block_n = first_tile(n, 1024 if pairs else 0)
        two = n > block_n
        row = block_n + pow2_at_least(n - block_n) if two and odd and not of_first else block_n
        elements = 32 if odd or block_n > (2048 if two else 8192) else 16
    block_rows, least = pow2_at_least((1024 if odd else 2048) // block_n, 1, 16), max(64 // elements, 1)
    if two:
        block_rows = 2 if odd and n <= pairs else 1
    elif odd and block_n == 1024:  # H100, 8192 x 1001: softmax 17.3 us, 18.1 in two rows of 2 warps
        block_rows, least = 2 if pairs else 1, 128 // width
    num_warps = pow2_at_least(block_rows * row // (elements * width), least, 1024 // width)
    return {"block_rows": block_rows, "block_n": block_n, "num_warps": num_warps}
