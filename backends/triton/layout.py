"""Strided views as few, large dimensions.

A kernel that knows two row strides serves every view that collapses to two dimensions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.capture import CAPTURES, note_tensor, tracing
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

__all__ = [
    "SHAPES",
    "RowStrides",
    "TensorRows",
    "aligned",
    "collapse",
    "contiguous_strides",
    "fresh",
    "fresh_like",
    "gathered",
    "pow2_at_least",
    "result_like",
    "row_start",
    "rows_of",
    "walk_rows",
]  # fmt: skip

SHAPES = 4096  # the latest shapes whose layout is remembered: to work one out takes longer than to launch its kernel


@triton.jit
def aligned(number, unit: tl.constexpr):
    """``number``, which is a multiple of ``unit``: so written, the compiler knows it.

    By itself it only asks of a number whether 16 divides it.
    """
    return number if unit == 1 else number // unit * unit


@triton.jit
def row_start(x, row, rows_inner, x_outer, x_inner, flat: tl.constexpr, unit: tl.constexpr):
    """Where rows begin (see :class:`TensorRows`).

    One row dimension needs no division, so that the compiler still sees which rows are adjacent.
    """
    if flat:
        return x + row * aligned(x_inner, unit)
    else:
        return x + ((row // rows_inner) * aligned(x_outer, unit) + (row % rows_inner) * aligned(x_inner, unit))


class RowStrides(NamedTuple):
    """Of one array: between rows in their outer and in their inner dimension, and along a row."""

    outer: int
    inner: int
    n: int


class TensorRows(NamedTuple):
    """How a kernel walks the rows of several tensors of one shape.

    Row i is (i // inner, i % inner) in two row dimensions.

    Attributes:
      height: how many rows; inner: the extent of the inner row dimension; flat: the outer one has extent 1.
      strides: for each tensor, and last for a contiguous result, its strides.
      step: what divides the rows' length and every distance between two of them.
    """

    height: int
    inner: int
    flat: bool
    strides: tuple[RowStrides, ...]
    step: int

    def known(self, dtype: str) -> dict[str, Any]:
        """What a kernel is compiled for: ``flat``, and ``unit``, how many elements a thread may move at once.

        In every row these are the 16 bytes that it can, else 1. With 8 bytes, a row would move, and be summed, in one
        way where the first row of a call lies at a multiple of 16 bytes and in another where it does not.
        """
        elements = 16 // numpy_dtype(dtype).itemsize
        return {"flat": self.flat, "unit": 1 if self.step % elements else elements}


def walk_rows(axis: int, *tensors: Any) -> tuple[tuple[Any, ...], TensorRows]:
    """The tensors, whose rows lie along ``axis``, and how to walk them.

    Three or more row dimensions that no two strides describe are the one case that gathers copies.
    """
    shape = tensors[0].shape
    rows = rows_of(axis, shape, *[t.stride() for t in tensors])
    if rows is None:
        tensors = tuple(t.contiguous() for t in tensors)
        rows = rows_of(axis, shape, *[contiguous_strides(shape)] * len(tensors))
        assert rows is not None
    return tensors, rows


@functools.lru_cache(SHAPES)
def rows_of(axis: int, shape: tuple[int, ...], *strides: tuple[int, ...]) -> TensorRows | None:
    """How to walk tensors of these strides, None where two row dimensions do not suffice."""

    def across(dims: Sequence[int]) -> tuple[int, ...]:
        return (*dims[:axis], *dims[axis + 1 :])

    strides = (*strides, contiguous_strides(shape))
    extents, steps = collapse(across(shape), *map(across, strides))
    if len(extents) > 2:
        return None
    outer, inner = ((1, 1) + extents)[-2:]
    # a single row keeps the stride that it has among others, and with it its layout and its bits
    across_and_along = (
        (*((0, shape[axis] * s[axis]) + step)[-2:], s[axis]) for s, step in zip(strides, steps, strict=True)
    )
    whole = tuple(RowStrides(a, b, c) for a, b, c in across_and_along)
    return TensorRows(
        outer * inner, inner, len(extents) < 2, whole, gcd(shape[axis], *(s for step in whole for s in step[:2]))
    )


@functools.lru_cache(SHAPES)
def collapse(shape: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Merge adjacent dimensions that every operand walks with one stride, and drop those of extent 1.

    Returns the merged shape and each operand's strides over it.

    >>> collapse((2, 3, 4), (12, 4, 1), (0, 0, 1))
    ((6, 4), ((4, 1), (0, 1)))
    """
    sizes: list[int] = []
    steps: list[tuple[int, ...]] = []
    for size, *step in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if sizes and all(outer == inner * size for outer, inner in zip(steps[-1], step, strict=True)):
            sizes[-1] *= size
            steps[-1] = tuple(step)
        else:
            sizes.append(size)
            steps.append(tuple(step))
    return tuple(sizes), tuple(tuple(s[i] for s in steps) for i in range(len(strides)))


@functools.lru_cache(SHAPES)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def fresh(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised contiguous tensor. ``torch.empty`` takes 2 us longer to understand its arguments."""
    if CAPTURES and (trace := tracing()):
        return trace.fresh(shape, dtype)
    made = sys.modules["torch"].empty_strided(shape, contiguous_strides(shape), dtype=dtype, device=device)
    return note_tensor(made) if CAPTURES else made


def fresh_like(x: torch.Tensor) -> torch.Tensor:
    """A fresh tensor of this shape, dtype and device."""
    return fresh(x.shape, x.dtype, x.device)


def result_like(x: torch.Tensor, call: Call, output: str) -> torch.Tensor:
    """Where an output goes: over the input that the call names for it, or a fresh tensor like ``x``."""
    over = call.overwritten(output)
    return fresh_like(x) if over is None else over


def gathered(x: torch.Tensor) -> torch.Tensor:
    """A copy in row-major order."""
    if CAPTURES and tracing():
        return x.clone()
    return x.clone(memory_format=sys.modules["torch"].contiguous_format)


@functools.lru_cache(SHAPES)
def pow2_at_least(n: int, lo: int = 1, hi: int = 1 << 30) -> int:
    """The smallest power of two that is at least ``n``, kept between ``lo`` and ``hi``."""
    return min(max(1 << max(n - 1, 0).bit_length(), lo), hi)
