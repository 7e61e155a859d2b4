"""Strided views as few, large dimensions: a kernel that knows two row strides serves every view that collapses to two dimensions."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["collapse", "contiguous_strides", "pow2_at_least"]


def collapse(shape: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merge adjacent dimensions that every operand walks with one stride, and drop those of extent 1.

    Returns the merged shape and each operand's strides over it.

    >>> collapse((2, 3, 4), (12, 4, 1), (0, 0, 1))
    ((6, 4), [(4, 1), (0, 1)])
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
    return tuple(sizes), [tuple(s[i] for s in steps) for i in range(len(strides))]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def pow2_at_least(n: int, lo: int = 1, hi: int = 1 << 30) -> int:
    """The smallest power of two that is at least ``n``, kept between ``lo`` and ``hi``."""
    return min(max(1 << max(n - 1, 0).bit_length(), lo), hi)
