"""Operands that cannot be described, copied to scratch memory where they can be.

The copy engine takes an array whose rows begin at multiples of 16 bytes and have their elements side by side. Rows of
an odd stride are read in words of 8 bytes that begin anywhere, and shifted into place: element by element, which is 2
bytes, a copy runs at a third of the memory's rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import fresh, pow2_at_least

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

__all__ = ["Operand", "begins_off_lines", "describable", "operand"]

LINE = 128  # bytes of a line of the cache; scratch rows begin at multiples
PIECE = 16  # bytes that the copy engine moves at least
FARTHEST = 2**40  # bytes that a stride of a map may have


@triton.jit(do_not_specialize=["rows", "length", "x_batch", "x_row", "y_batch", "y_row", "elements"])
def matmul_shift_rows(
    x, y, rows, length, x_batch, x_row, y_batch, y_row, elements, per_word: tl.constexpr, block_rows: tl.constexpr,
    block_words: tl.constexpr,
):  # fmt: skip
    """y[z, r, :length] = x[z, r, :length], in words of ``per_word`` elements, which are 8 bytes.

    A word of y holds the end of one word of x and the beginning of the next. elements: from the first of x to its last;
    words that reach beyond either are not read, and what they hold of x is copied one by one.
    """
    size: tl.constexpr = 8 // per_word
    blocks_r = tl.cdiv(rows, block_rows)
    z, block = (tl.program_id(0) // blocks_r).to(tl.int64), tl.program_id(0) % blocks_r
    r = (block * block_rows + tl.arange(0, block_rows)).to(tl.int64)
    live = (r < rows)[:, None]
    start = x.to(tl.int64)
    end = start + elements * size
    begin = start + (z * x_batch + r * x_row) * size  # of each row, in bytes
    word, shift = (begin // 8 * 8)[:, None], (begin % 8 * 8)[:, None]
    stop = (begin + length * size)[:, None]
    from_row, to_row = x + (z * x_batch + r * x_row)[:, None], y + (z * y_batch + r * y_row)[:, None]
    to_words = to_row.to(tl.int64).to(tl.pointer_type(tl.int64))
    ones = tl.full([1, 1], -1, tl.int64)
    for first in range(0, tl.cdiv(length, per_word), block_words):
        j = first + tl.arange(0, block_words)[None, :]
        at = word + j * 8
        words = at.to(tl.pointer_type(tl.int64))
        low = tl.load(words, mask=live & (at < stop) & (at >= start) & (at + 8 <= end), other=0)
        high = tl.load(words + 1, mask=live & (at + 8 < stop) & (at + 16 <= end), other=0)
        low = (low >> shift) & ~(ones << (63 - shift) << 1)
        tl.store(to_words + j, low | (high << (63 - shift) << 1), mask=live & (j * per_word < length))
    tl.debug_barrier()
    e = tl.arange(0, 2 * per_word)[None, :]
    early = live & (e < length) & (word < start)
    tl.store(to_row + e, tl.load(from_row + e, mask=early, other=0.0), mask=early)
    e = length - 1 - e
    late = live & (e >= 0) & (begin[:, None] + e * size + 16 > end)
    tl.store(to_row + e, tl.load(from_row + e, mask=late, other=0.0), mask=late)


@triton.jit(do_not_specialize=["rows", "columns", "x_batch", "y_batch", "y_row"])
def matmul_gather_tiles(
    x, y, rows, columns, x_batch, x_row, x_column, y_batch, y_row, block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):  # fmt: skip
    """y[z, r, j] = x[z, r, j], of x in any strides; a tile is turned in shared memory where x lies the other way."""
    blocks_r, blocks_j = tl.cdiv(rows, block_rows), tl.cdiv(columns, block_columns)
    z, tile = (tl.program_id(0) // (blocks_r * blocks_j)).to(tl.int64), tl.program_id(0) % (blocks_r * blocks_j)
    r = (tile // blocks_j * block_rows + tl.arange(0, block_rows))[:, None]
    j = (tile % blocks_j * block_columns + tl.arange(0, block_columns))[None, :]
    inside = (r < rows) & (j < columns)
    from_x = x + z * x_batch + (r.to(tl.int64) * x_row + j.to(tl.int64) * x_column)
    tl.store(y + z * y_batch + (r.to(tl.int64) * y_row + j), tl.load(from_x, mask=inside, other=0.0), mask=inside)


class Operand(NamedTuple):
    """An operand of a product that can be described.

    Attributes:
      memory: the tensor; batch, row: its strides over the batch axis (0: it has none) and from line to line.
      across: its lines run along the first of its two axes: (m, k) lies as (k, m) in memory.
    """

    memory: torch.Tensor
    batch: int
    row: int
    across: bool


def begins_off_lines(x: torch.Tensor) -> bool:
    """Whether lines of x, which can be described, begin within lines of the cache."""
    apart = max(x.stride()[-2:]) * x.element_size()
    return x.ndim > 1 and x.shape[-1] > 1 < x.shape[-2] and apart % PIECE == 0 != apart % LINE


def describable(x: torch.Tensor) -> bool:
    """Whether the copy engine can take x as its strides are, if it begins at a multiple of 16 bytes."""
    size, (rows, columns), (x_row, x_column) = x.element_size(), x.shape[-2:], x.stride()[-2:]
    batch = zip(x.shape[:-2], x.stride()[:-2], strict=True)
    return all(extent == 1 or stride * size % PIECE == 0 for extent, stride in batch) and (
        _in_lines(x_row, x_column, rows, columns, size) or _in_lines(x_column, x_row, columns, rows, size)
    )


def _in_lines(stride: int, unit: int, extent: int, length: int, size: int, border: int = PIECE) -> bool:
    """Whether ``extent`` lines of ``length`` elements side by side begin at multiples of ``border`` bytes."""
    apart = stride * size % border == 0 and length <= stride < FARTHEST // size
    return (unit == 1 or length == 1) and (extent == 1 or apart)


def operand(
    call: Call, x: torch.Tensor, batch: int, extents: tuple[int, int, int], along: int | None, full: bool = False
) -> Operand:
    """``x``, or a copy of it, as it can be described.

    Args:
      batch: its stride over the batch axis. extents: batch entries that it has, and of its two axes.
      along: which of the axes lines must run along, if any: 0 or 1.
      full: lines must begin where lines of the cache do.
    """
    entries, rows, columns = extents
    x_row, x_column = x.stride(-2), x.stride(-1)
    size = x.element_size()
    for line, stride, unit in ((1, x_row, x_column), (0, x_column, x_row)):
        extent, length = (columns, rows)[line], (rows, columns)[line]
        one_line = extent == 1
        fits = _in_lines(stride, unit, extent, length, size, LINE if full else PIECE)
        of_batches = entries == 1 or (batch * size % PIECE == 0 and 0 < batch < FARTHEST // size)
        if along in (None, line) and fits and of_batches and x.data_ptr() % PIECE == 0:
            return Operand(x, batch, length_of(length, size) if one_line else stride, line == 0)
    if along is None:  # as it lies
        along = 0 if x_row == 1 and x_column != 1 else 1
    lines, length = (rows, columns) if along == 1 else (columns, rows)
    stride, unit = (x_row, x_column) if along == 1 else (x_column, x_row)
    y_row = length_of(length, size)
    y = fresh((entries, lines, y_row), x.dtype, x.device)
    if unit == 1 and size < 8:
        elements = (entries - 1) * batch + (lines - 1) * stride + length
        words = pow2_at_least(cdiv(length, 8 // size), 32, 256)
        block_rows = 1024 // words
        launch(matmul_shift_rows, entries * cdiv(lines, block_rows), call, x, y, lines, length, batch, stride,
               lines * y_row, y_row, elements, per_word=8 // size, block_rows=block_rows, block_words=words,
               num_warps=4)  # fmt: skip
    else:
        grid = entries * cdiv(lines, 64) * cdiv(length, 64)
        launch(matmul_gather_tiles, grid, call, x, y, lines, length, batch, stride, unit, lines * y_row, y_row,
               block_rows=64, block_columns=64, num_warps=8)  # fmt: skip
    return Operand(y, lines * y_row if entries > 1 else 0, y_row, along == 0)


def length_of(length: int, size: int) -> int:
    """How many elements a scratch line has, whole lines of the cache: copies into shared memory from others are a
    quarter slower."""
    return cdiv(length * size, LINE) * LINE // size
