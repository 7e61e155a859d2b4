"""A head in parts, each of which has buffers of its own in shared memory.

A buffer's row holds at most 64 elements, 128 bytes, as many as lie swizzled together. The last part of a head has rows
of 16, 32 or 64 elements, swizzled by 32, 64 or 128 bytes, whichever are enough: a head of 96 is 64 and 32 elements, one
of 80 is 64 and 16. Where it ends beyond the head, the copy engine leaves 0 there, and writes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from portakern.backends.pallas.lib.mosaic_gpu.chip import BufferViews, Scratch, Swizzled, tiled_buffer

PART = 64
"""Elements of a head in a buffer's row, but of its last part."""

LAST = 16, 32, PART
"""Elements of a row of the last part."""

Widths = tuple[int, ...]
"""Elements of a row of each part of a head."""


def widths_of(extent: int) -> Widths:
    """The parts of a head of so many elements."""
    full, rest = divmod(extent, PART)
    return (PART,) * full + tuple(min(width for width in LAST if width >= rest) for _ in range(rest > 0))


def all_full(widths: Widths) -> Widths:
    """As many parts, of ``PART`` elements each."""
    return (PART,) * len(widths)


def starts_of(widths: Widths) -> list[int]:
    """Where each part begins in a head."""
    return [0, *accumulate(widths)][: len(widths)]


def columns_of(array: Any, start: int, width: int) -> Any:
    """Where a part of a head lies in an array. The last may end beyond it, for which a start has to be traced: one that
    is known is held to the extent."""
    return pl.ds(start if start + width <= array.shape[-1] else start + 0 * lax.axis_index("block"), width)


class HeadPart(NamedTuple):
    """The buffers of a part: ``views`` of those of all parts of its width, (*buffers, parts, rows, width), of which it
    is the one of this ``number``. start: where it begins in a head."""

    start: int
    width: int
    number: int
    views: BufferViews

    def copied(self, *buffer: Any) -> Any:
        """Rows of one of its buffers as the copy engine sees them."""
        return self.views.copied.at[(*buffer, self.number)]

    def tiled(self, *buffer: Any) -> Any:
        """Rows of one of its buffers as tensor cores and registers see them."""
        return self.views.tiled.at[(*buffer, self.number)]

    def columns(self, array: Any) -> Any:
        return columns_of(array, self.start, self.width)


def buffer_shapes(buffers: tuple[int, ...], rows: int, widths: Widths) -> list[tuple[int, ...]]:
    """Of the buffers of all parts, those of one width side by side."""
    return [(*buffers, count, rows, width) for width, count in Counter(widths).items()]


def parts_in(widths: Widths, views: Sequence[BufferViews]) -> tuple[HeadPart, ...]:
    """The parts of heads that lie in buffers of these shapes."""
    by_width = dict(zip(dict.fromkeys(widths), views, strict=True))
    numbers = (widths[:i].count(width) for i, width in enumerate(widths))
    return tuple(
        HeadPart(start, width, number, by_width[width])
        for start, width, number in zip(starts_of(widths), widths, numbers, strict=True)
    )


@dataclass(frozen=True)
class HeadBuffers(Scratch):
    """``scratch`` for rows of heads: (*buffers, rows, width) for each part. ``ref`` has a `HeadPart` for each."""

    buffers: tuple[int, ...]
    rows: int
    widths: Widths
    dtype: Any

    @property
    def _by_width(self) -> list[Swizzled]:
        return [Swizzled(shape, self.dtype) for shape in buffer_shapes(self.buffers, self.rows, self.widths)]

    def allocated(self, interpret: bool) -> Any:
        return [buffers.allocated(interpret) for buffers in self._by_width]

    def views(self, refs: Any, interpret: bool) -> tuple[HeadPart, ...]:
        found = [buffers.views(ref, interpret) for buffers, ref in zip(self._by_width, refs, strict=True)]
        return parts_in(self.widths, found)


class LeavingViews(NamedTuple):
    """What ``ref`` has of `LeavingBuffers`: views by width, and of sums by shape."""

    by_width: dict[int, BufferViews]
    sums: tuple[Any, ...]

    def buffer(self, width: int, *buffer: Any) -> BufferViews:
        """The first bytes of a buffer, as rows of so many elements."""
        *outer, last = buffer
        views, per_buffer = self.by_width[width], max(self.by_width) // width
        return BufferViews(*(x.at[(*outer, last * per_buffer)] for x in (views.copied, views.tiled)))


@dataclass(frozen=True)
class LeavingBuffers(Scratch):
    """``scratch`` for what leaves, (*buffers, rows, width) of whichever part it is: as wide as the widest. ``ref`` has
    `LeavingViews`. ``sums``: shapes of tiles of float32, which are the same bytes while nothing leaves. ``swizzled``:
    whether buffers are tiles as tensor cores leave them, or plain rows."""

    buffers: tuple[int, ...]
    rows: int
    widths: Widths
    dtype: Any
    sums: tuple[tuple[int, ...], ...] = ()
    swizzled: bool = True

    @property
    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Of the same bytes, as rows of each width."""
        *outer, last = self.buffers
        widest = max(self.widths)
        return {width: (*outer, last * (widest // width), self.rows, width) for width in dict.fromkeys(self.widths)}

    def allocated(self, interpret: bool) -> Any:
        if not self.swizzled:
            plain = [plgpu.SMEM(shape, self.dtype) for shape in self.shapes.values()]
            return plain if interpret else plgpu.RefUnion(*plain)
        tiled = [tiled_buffer(shape, self.dtype) for shape in self.shapes.values()]
        sums = [tiled_buffer(shape, jnp.float32) for shape in self.sums]
        if interpret:
            return [*tiled, *sums]
        copied = [plgpu.SMEM(x.shape, x.dtype, transforms=x.transforms[1:]) for x in tiled]
        return plgpu.RefUnion(*(x for pair in zip(copied, tiled, strict=True) for x in pair), *([sums] if sums else []))

    def views(self, refs: Any, interpret: bool) -> LeavingViews:
        count = len(self.shapes)
        if interpret or not self.swizzled:
            pairs, sums = [(x, x) for x in refs[:count]], (*refs[count:],)
        else:
            pairs, sums = [(refs[2 * i], refs[2 * i + 1]) for i in range(count)], (*(refs[-1] if self.sums else ()),)
        return LeavingViews({width: BufferViews(*p) for width, p in zip(self.shapes, pairs, strict=True)}, sums)
