"""How kernels over rows share them: the tiles, by a formula and within limits, and what a program owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from portakern.backends.triton.launch import lanes
from portakern.backends.triton.layout import pow2_at_least

if TYPE_CHECKING:
    pass


@triton.jit
def tile_of(steps, block_rows: tl.constexpr, block_n: tl.constexpr):
    """The rows and the elements of each that this program owns."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // steps * block_rows + tl.arange(0, block_rows)
    return row, (pid % steps * block_n + tl.arange(0, block_n))[None, :]


def tile_rows(n: int, arch: str, pairs: bool = False) -> dict[str, int]:
    """A formula of n instead of a table: nothing that was timed asked for another choice at some n, or on some chip.

    A program takes a whole row where 1024 threads can hold it, and about 2048 elements of short rows; a thread takes 16
    elements, or 32 of rows longer than 16384 and of rows that are not aligned, which are read one element at a time and
    want more reads under way in each thread (H100, n = 4097: 40 us where 16 take 47). Longer rows are read twice, in
    blocks that half of a multiprocessor's threads hold (H100, n = 131072: 74 us in blocks of 16384, 82 in blocks of
    8192; n = 21775, which is not aligned: 76 us in blocks of 4096, 121 in blocks of 8192).

    ``pairs``: two rows of 2049 to 16384 elements that are not aligned a program. Norms gain by it (H100, 4928 x 4041:
    42 us, 50 one at a time; 2304 x 10186: 67 and 76; 192 x 14500: 12.7 and 13.4), softmax loses (641 x 6926: 18 and
    13)."""
    whole, width = pow2_at_least(n, 128), lanes(arch)
    if n % 8:
        block_n, elements = (whole, 32) if whole <= 16384 else (4096, 16)
    else:
        block_n, elements = (whole if whole <= 32768 else 16384), (16 if whole <= 8192 else 32)
    block_rows = pow2_at_least(2048 // block_n, 1, 16)
    if pairs and n % 8 and 2048 < n <= 16384:
        block_rows, elements = 2, (64 if whole <= 8192 else 32)
    num_warps = pow2_at_least(block_rows * block_n // (elements * width), max(64 // elements, 1), 1024 // width)
    return {"block_rows": block_rows, "block_n": block_n, "num_warps": num_warps}
