"""Memory layouts of a case's arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from portakern.core.framework import strided_view

__all__ = ["DRAWN", "LAYOUTS", "REPEATS", "Buffer", "row_major", "same_bits"]

Shape = tuple[int, ...]

BESIDE = 67
"""Elements of poison before and behind what is shifted: odd, so that no vector of two elements is aligned."""


class Buffer(NamedTuple):
    """A one-dimensional memory and the strided view of it that the kernel gets; strides and offset in elements. The
    other elements of the memory are poison."""

    memory: np.ndarray
    shape: Shape
    strides: tuple[int, ...]
    offset: int

    def view(self) -> np.ndarray:
        return strided_view(self.memory, self.shape, self.strides, self.offset)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are one another's copy, bit by bit: every NaN is itself alone, and -0 is not 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    word = np.dtype(f"u{a.itemsize}")
    return bool((a.view(word) == b.view(word)).all())


def other_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays of one shape and dtype have other bits; every NaN is equal, and -0 is not 0."""
    word = np.dtype(f"u{a.itemsize}")
    nan = np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
    return (np.ascontiguousarray(a).view(word) != np.ascontiguousarray(b).view(word)) & ~nan


def _poison(size: int, dtype: np.dtype[Any]) -> np.ndarray:
    return np.full(size, np.nan if dtype.kind not in "iub" else 119, dtype)


def _embed(values: np.ndarray, order: tuple[int, ...], pad: tuple[int, ...], step: int, offset: int) -> Buffer:
    """Lay ``values`` out with axes in memory order ``order`` (outermost first), ``pad`` elements after each axis, every
    ``step``-th element of the innermost."""
    strides = [0] * values.ndim
    extent = step
    for axis in reversed(order):
        strides[axis] = extent
        extent *= values.shape[axis] + pad[axis]
    buffer = Buffer(_poison(offset + max(extent, 1), values.dtype), values.shape, tuple(strides), offset)
    buffer.view()[...] = values
    return buffer


def _contiguous(values: np.ndarray) -> Buffer:
    if values.size:  # nothing is left to poison
        return Buffer(np.array(values, order="C").reshape(-1), values.shape, row_major(values.shape), 0)
    return _embed(values, tuple(range(values.ndim)), (0,) * values.ndim, 1, 0)


def _shifted(values: np.ndarray) -> Buffer:
    """In row-major order, from an odd address on, with poison before and behind: as a slice of a larger array lies."""
    buffer = Buffer(_poison(values.size + 2 * BESIDE + 1, values.dtype), values.shape, row_major(values.shape), BESIDE)
    buffer.view()[...] = values
    return buffer


def row_major(shape: Shape) -> tuple[int, ...]:
    """The strides of an array without gaps."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _transposed(values: np.ndarray) -> Buffer:
    return _embed(values, tuple(reversed(range(values.ndim))), (0,) * values.ndim, 1, 0)


def _sliced(values: np.ndarray) -> Buffer:
    return _embed(values, tuple(range(values.ndim)), (3,) * values.ndim, 1, 5)


def _strided(values: np.ndarray) -> Buffer:
    return _embed(values, tuple(range(values.ndim)), (0,) * values.ndim, 2, 1)


def _swapped(values: np.ndarray) -> Buffer:
    """The two middle axes swapped in memory, as heads and sequence are between (b, s, h, d) and (b, h, s, d)."""
    order = list(range(values.ndim))
    if values.ndim > 2:
        order[-3], order[-2] = order[-2], order[-3]
    return _embed(values, tuple(order), (0,) * values.ndim, 1, 0)


def _expanded(values: np.ndarray) -> Buffer:
    """The first axis longer than 1 repeated by a stride of 0, so its values become those of index 0: of a matrix not
    the last, and of a vector its only one."""
    if values.ndim == 1:
        return _uniform(values)
    axis = next((i for i, n in enumerate(values.shape[:-1]) if n > 1), None)
    if axis is None or not values.size:
        return _contiguous(values)
    one = _contiguous(np.take(values, [0], axis))
    return Buffer(one.memory, values.shape, tuple(0 if i == axis else s for i, s in enumerate(one.strides)), 0)


def _stepped(values: np.ndarray) -> Buffer:
    return _embed(values, tuple(range(values.ndim)), (0,) * values.ndim, 3, 2)


def _beside(values: np.ndarray) -> Buffer:
    """Rows of one of three arrays that lie beside each other, as q, k and v of one product do."""
    n = values.shape[-1] if values.ndim else 0
    return _embed(values, tuple(range(values.ndim)), (*(0 for _ in values.shape[:-1]), 2 * n)[: values.ndim], 1, n)


def _reversed(values: np.ndarray) -> Buffer:
    """Every axis walked from its end."""
    b = _embed(np.flip(values), tuple(range(values.ndim)), (0,) * values.ndim, 1, 0)
    if not values.size:
        return b
    end = sum((n - 1) * s for n, s in zip(b.shape, b.strides, strict=True))
    return Buffer(b.memory, b.shape, tuple(-s for s in b.strides), b.offset + end)


def _uniform(values: np.ndarray) -> Buffer:
    """One number for all elements, by strides of 0, as the cotangent of a sum is."""
    if not values.size:
        return _contiguous(values)
    return Buffer(np.array(values, order="C").reshape(-1)[:1].copy(), values.shape, (0,) * values.ndim, 0)


LAYOUTS: dict[str, Callable[[np.ndarray], Buffer]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "sliced": _sliced,
    "strided": _strided,
    "swapped": _swapped,
    "expanded": _expanded,
    "shifted": _shifted,
    "stepped": _stepped,
    "beside": _beside,
    "uniform": _uniform,
    "reversed": _reversed,
}
"""How an array lies in memory."""

REPEATS = ("expanded", "uniform")
"""Those in which elements share memory."""

DRAWN = tuple(name for name in LAYOUTS if name not in ("shifted", "reversed"))
"""Those that are drawn unless others are named: what is shifted asks of a kernel that takes contiguous arrays alone
what is sliced asks of the others; and what is reversed, where a library has negative strides."""
