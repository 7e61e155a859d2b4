"""Where the elements of matrix instructions lie, from AMD's ISA documents and its matrix instruction calculator.

D = A B + C with A of m x k, B of k x n elements. A lane holds ``per`` neighbouring elements of k of one row of A, and
of one column of B; lanes that hold more of the same row follow each other m lanes apart. Where the elements of D lie
differs: by generation and by size.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np

from portakern.backends.triton.emulator.faults import lacking

__all__ = ["Layout", "layout"]

TYPES = {"F32": 0, "BF16": 1, "F16": 2, "XF32": 3}  # machine.c's
_NAME = re.compile(r"V_(MFMA|WMMA)_F32_(\d+)X(\d+)X(\d+)_(XF32|F32|BF16|F16)(?:_1K)?")


@dataclass(frozen=True)
class Layout:
    """Where the elements are, in units of an element's size within an operand's registers.

    Attributes:
      m, n, k: the extents; type: of A's and B's elements.
      registers: of A and of B each; outputs: of D. twin: registers whose lanes 16 to 31 repeat lanes 0 to 15, or 0.
      table: places of A's elements by row, of B's by column, and the row and the column of each number of D.
    """

    m: int
    n: int
    k: int
    type: int
    registers: int
    outputs: int
    twin: int
    table: np.ndarray


@functools.cache
def layout(name: str, isa: str) -> Layout:
    """The layout of a matrix instruction; NotEmulatedError where it is not known."""
    found = _NAME.fullmatch(name)
    if found is None or (found[1] == "MFMA") != (isa == "cdna"):
        raise lacking(name)
    m, n, k = (int(e) for e in found.groups()[1:4])
    of_word = 1 if found[5].endswith("F32") else 2
    lanes = 64 if isa == "cdna" else 32
    twin = isa == "rdna3"
    if m != n or m not in (16, 32) or (isa != "cdna" and (m, k) != (16, 16)):
        raise lacking(name)
    groups = 1 if twin else lanes // m  # of lanes that share a row
    per = k // groups
    row, col = np.arange(m)[:, None], np.arange(k)[None, :]
    lane, element = row + m * (col // per), col % per
    operand = ((element // of_word * lanes + lane) * of_word + element % of_word).astype(np.int32)
    outputs = m * n // lanes
    r, at = np.arange(outputs)[:, None], np.arange(lanes)[None, :]
    if isa == "rdna3":  # rows of one parity in each half of the wave
        rows = 2 * r + at // 16
    elif isa == "rdna4":
        rows = r + 8 * (at // 16)
    elif m == 16:
        rows = 4 * (at // 16) + r
    else:  # 4 rows of a lane, then those 8 further down
        rows = 8 * (r // 4) + 4 * (at // 32) + r % 4
    columns = np.broadcast_to(at % n, rows.shape)
    parts = (operand, operand, rows, columns)
    table = np.concatenate([np.ascontiguousarray(p, np.int32).ravel() for p in parts])
    registers = per // of_word
    return Layout(m, n, k, TYPES[found[5]], registers, outputs, registers if twin else 0, table)
