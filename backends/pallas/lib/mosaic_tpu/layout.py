"""Where XLA puts the elements of the arrays that a TPU program begins and ends with, and rows that lie side by side.

The last two axes of an array's layout lie along sublanes and along lanes, and are padded: lanes to a multiple of 128,
sublanes to 1, 2, 4 or a multiple of 8. XLA chooses for those two whichever axes cost the least padding. So rows of 1000
elements lie along sublanes as soon as enough of them lie side by side, and a kernel that wants them along lanes makes
XLA copy the array, before the kernel and after it. A kernel that takes the array as it lies, and turns each block of it
in registers, works on the same rows with the same instructions: no bit differs, and nothing is copied.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas.lib.blocks import padded
from portakern.backends.pallas.lib.mosaic_tpu.chip import LANES, whole_lanes


def native_axes(shape: tuple[int, ...]) -> tuple[int, int]:
    """The axes of an array, of two or more, that XLA lays along sublanes and along lanes: those that are padded least,
    and of equals the last. As libtpu 0.0.50 answered for 75 shapes."""

    def whole_sublanes(extent: int) -> int:
        return next((few for few in (1, 2, 4) if extent <= few), padded(extent, 8))

    def size(axes: tuple[int, int]) -> tuple[int, int, int]:
        rest = math.prod(extent for axis, extent in enumerate(shape) if axis not in axes)
        sublane, lane = axes
        return rest * whole_sublanes(shape[sublane]) * whole_lanes(shape[lane]), -lane, -sublane

    every = range(len(shape))
    return min(((sublane, lane) for lane in every for sublane in every if sublane != lane), key=size)


class SideBySide(NamedTuple):
    """An array of rows along its last axis, of which those of another axis lie side by side along lanes.

    Attributes:
      shape: the array's own; axis: the one along lanes.
    """

    shape: tuple[int, ...]
    axis: int

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> SideBySide | None:
        """How XLA lays out the rows of an array, or None where it does so in another way."""
        if len(shape) < 2 or shape[-1] % LANES == 0:
            return None
        sublane, lane = native_axes(shape)
        return cls(shape, lane) if lane != sublane == len(shape) - 1 else None

    @property
    def rows(self) -> tuple[int, int, int]:
        """The array's shape, were its rows one after another: (outer, rows, n)."""
        n, rows = self.shape[-1], self.shape[self.axis]
        return math.prod(self.shape) // max(n * rows, 1), rows, n

    def as_it_lies(self, array: Any) -> Any:
        """The array as (outer, n, rows), which moves nothing where XLA chose the layout."""
        outer, rows, n = self.rows
        return jnp.moveaxis(array, self.axis, -1).reshape(outer, n, rows)

    def back(self, array: Any) -> Any:
        """The array of its own shape again."""
        axes = [extent for axis, extent in enumerate(self.shape) if axis != self.axis]
        return jnp.moveaxis(array.reshape(*axes, self.shape[self.axis]), -1, self.axis)

    def numbers(self, array: Any) -> Any:
        """An array of one number a row as (outer, rows)."""
        outer, rows, _ = self.rows
        return jnp.moveaxis(array.reshape(self.shape[:-1]), self.axis, -1).reshape(outer, rows)

    def numbers_back(self, array: Any) -> Any:
        """One number a row, of (outer, rows), in the order of the array's own axes."""
        axes = [extent for axis, extent in enumerate(self.shape[:-1]) if axis != self.axis]
        return jnp.moveaxis(array.reshape(*axes, self.shape[self.axis]), -1, self.axis)


class Turned:
    """A block of rows that lies as (block_n, block_rows), for a kernel that works on rows: it is turned where it is
    read, ``once`` where all that read it do so in one step, and where it is written.

    ``apart``: nothing moves past a turn; for interpreted calls. A compiler for a host adds up along the other axis
    instead of turning, in another order.
    """

    def __init__(self, ref: Any, once: bool, apart: bool) -> None:
        self.ref, self.dtype, self.once = ref, ref.dtype, once
        self.settled = lax.optimization_barrier if apart else lambda rows: rows
        self.seen: dict[Any, Any] = {}

    def __getitem__(self, index: Any) -> Any:
        lying, known = turned(index), str(index)  # slices of Python 3.11 are no keys
        if not self.once or known not in self.seen:
            self.seen[known] = self.settled(self.ref[lying].T)
        return self.seen[known]

    def __setitem__(self, index: Any, rows: Any) -> None:
        self.ref[turned(index)] = self.settled(rows).T


def turned(index: Any) -> Any:
    """Where a place of a block lies when the block is turned."""
    return index[::-1] if isinstance(index, tuple) else index
