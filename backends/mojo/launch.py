"""Calls of kernels: how arrays are described to them, and how threads share their rows."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portakern.backends.mojo.library import function
from portakern.core.framework import DTYPE_NAME
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    from portakern.core.call import Call

__all__ = [
    "CODES",
    "MojoFunction",
    "RowLayout",
    "accumulator",
    "in_parts",
    "layout",
    "new",
    "over_blocks",
    "over_elements",
    "over_rows",
    "rows_of",
    "summed",
    "wide",
]

CODES = ("float32", "float64", "bfloat16", "float16")
"""The dtypes of lib/arrays.mojo, each at its code."""

SHARE = 1 << 16
"""Numbers that a thread gets at least: to wake one takes as long as some ten thousand of them."""

BLOCK = 32
"""Rows whose sum a kernel makes in one go (``BLOCK`` of lib/norms.mojo): a sum of n rows has n / 32 + 32 additions in
a row, as many as the specs' bounds allow."""

PIECE = 4096
"""Numbers that an op on elements takes at a time: in 32 bits, three such arrays fit the first cache."""


def accumulator(dtype: str) -> np.dtype[Any]:
    """What the kernels compute in."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def new(shape: Sequence[int], dtype: str) -> np.ndarray:
    return np.empty(shape, numpy_dtype(dtype))


def wide(array: Any, dtype: str) -> Any:
    """A short array that all rows share, side by side in the accumulator's dtype."""
    return None if array is None else np.ascontiguousarray(array, accumulator(dtype))


class RowLayout:
    """An array as lib/arrays.mojo reads it (``Rows``): integers in memory, which lives as long as the array."""

    def __init__(self, array: np.ndarray, step: int, beside: Sequence[tuple[int, int]]) -> None:
        """``step``: from one number of a row to the next; ``beside``: (extent, stride) of the axes that rows lie in."""
        head = (array.ctypes.data, CODES.index(DTYPE_NAME[array.dtype]), step, len(beside))
        said = (*head, *(e for e, _ in beside), *(s for _, s in beside))
        self.array, self.integers = array, (ctypes.c_int64 * len(said))(*said)


def layout(array: np.ndarray | None, axis: int = -1) -> RowLayout | None:
    """The rows of an array along an axis, in the order of the others; None of no array."""
    if array is None:
        return None
    size = array.itemsize
    if not array.flags.aligned or any(s % size for s in array.strides):
        array = np.ascontiguousarray(array)
    steps = [s // size for s in array.strides]
    beside = [(array.shape[i], steps[i]) for i in range(array.ndim) if i != axis % array.ndim]
    return RowLayout(array, steps[axis], _merged(beside))


def _merged(axes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(extent, stride) of as few axes as count the same elements in the same order."""
    found: list[tuple[int, int]] = []
    for extent, step in axes:
        if extent == 1:
            continue
        if found and found[-1][1] == extent * step:
            found[-1] = (found[-1][0] * extent, step)
        else:
            found.append((extent, step))
    return found


class MojoFunction:
    """A function of a module of Mojo, compiled when it is called for the first time. Layouts and arrays are passed as
    addresses, None as 0."""

    def __init__(self, module: str, name: str | None = None) -> None:
        self.module, self.name = module, name or module

    def __call__(self, *args: Any) -> int:
        """What the function returns; of one that returns nothing, any number."""
        found: int = function(self.module, self.name)(*map(_passed, args))
        return found


def _passed(value: Any) -> Any:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, float):
        return ctypes.c_double(value)
    return ctypes.c_int64(value) if isinstance(value, int) else ctypes.byref(value.integers)


def over_rows(kernel: MojoFunction, *args: Any, rows: int, n: int, space: int, dtype: str, cost: int = 1) -> None:
    """``kernel(*args, memory for some rows of n numbers, first row, end)``, on as many threads as the rows are worth.

    ``space``: how many rows the memory has; ``cost``: how much longer a number takes than a few operations. No row's
    result depends on which thread computes it, or on what it computed before.
    """

    def run(first: int, end: int) -> None:
        kernel(*args, np.empty(space * n, accumulator(dtype)), first, end)

    in_parts(run, rows, rows * n * cost)


class BlockSums(NamedTuple):
    """Sums over rows: of each block of rows, added up by a kernel, and of these. None: nobody wants them."""

    blocks: np.ndarray | None
    dtype: str

    def result(self) -> np.ndarray | None:
        return None if self.blocks is None else self.blocks.sum(0).astype(numpy_dtype(self.dtype))


def summed(call: Call, output: str) -> BlockSums:
    """Zeros for a gradient (n,) that is a sum over the rows of d_y."""
    (rows, _), (shape, dtype) = rows_of(call.arrays["d_y"]), call.outputs[output]
    blocks = np.zeros((-(-rows // BLOCK), *shape), accumulator(call.dtype)) if output in call.wants else None
    return BlockSums(blocks, dtype)


def over_blocks(kernel: MojoFunction, *args: Any, rows: int, n: int, space: int, dtype: str) -> None:
    """:func:`over_rows` of blocks of rows, which no number of threads changes."""
    over_rows(kernel, *args, rows=-(-rows // BLOCK), n=n, space=space, dtype=dtype, cost=4 * BLOCK)


def over_elements(kernel: MojoFunction, *arrays: np.ndarray | None, space: int, cost: int = 1) -> None:
    """``kernel(*arrays, n, their size, memory, first, end)`` over arrays of one shape, the results last: rows along the
    last axis, or where all lie without gaps, pieces of n elements, of which the last may be shorter."""
    lead = arrays[0]
    assert lead is not None
    if all(a is None or (a.flags.c_contiguous and a.flags.aligned) for a in arrays):
        n = min(lead.size, PIECE)
        rows = -(-lead.size // n)
        layouts = [None if a is None else RowLayout(a, 1, [(rows, n)]) for a in arrays]
    else:
        rows, n = rows_of(lead)
        layouts = [layout(a) for a in arrays]
    over_rows(kernel, *layouts, n, lead.size, rows=rows, n=n, space=space, dtype=DTYPE_NAME[lead.dtype], cost=cost)


def in_parts(run: Callable[[int, int], object], count: int, work: float) -> None:
    """``run(first, end)`` of parts of ``count`` things, each on a thread."""
    threads = int(max(1, min(_threads(), count, work // SHARE)))
    if threads == 1:
        run(0, count)
        return
    ends = [count * i // threads for i in range(threads + 1)]
    list(_pool(os.getpid()).map(run, ends[:-1], ends[1:]))


@functools.cache
def _threads() -> int:
    """How many threads: what the user says to OpenMP's programs, else every core that this process may use."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if said.isdigit() and int(said):
        return int(said)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process: one that was forked has none of its parent's."""
    return ThreadPoolExecutor(_threads(), "portakern-mojo")


def rows_of(array: np.ndarray, axis: int = -1) -> tuple[int, int]:
    """(how many rows along an axis, their length)."""
    n = array.shape[axis]
    return prod(array.shape) // n if n else 0, n
