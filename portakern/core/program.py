"""The work of a call as a list of steps that another library can embed in its own programs: copies of arrays, arrays
stacked, launches of machine code, and loops of these over parts of arrays.

A backend builds a program (``stages`` of :class:`portakern.core.backend.Family`); a framework that can embed machine
code takes it (:meth:`portakern.core.framework.Framework.embed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = [
    "Code", "Copy", "DescribedArray", "Launch", "Loop", "Program", "ProgramArray", "ProgramStep", "ScalarArgument",
    "Stack", "TileFormat", "View",
]  # fmt: skip

View = tuple[tuple[str, tuple[Any, ...]], ...]
"""How an array is seen: steps from the array as it lies, ("permute", axes), ("expand", shape), ("reshape", shape),
("cast", (dtype name,)) or ("bits", (name of a dtype as wide,)), which has the same bits."""


class ProgramArray(NamedTuple):
    """An array of a program: its shape and the name of its dtype, in row-major order."""

    shape: tuple[int, ...]
    dtype: str


class ScalarArgument(NamedTuple):
    """A scalar argument of a kernel. ``kind``: bool, i32, i64, u64, f32 or f64."""

    kind: str
    value: int | float


class TileFormat(NamedTuple):
    """What a kernel's code fixes of a tensor descriptor: the copy engine's tiles.

    Attributes:
      element, swizzle: ``CUtensorMapDataType`` and ``CUtensorMapSwizzle`` of CUDA's driver.
      block: the extents of what is copied at a time.
    """

    element: int
    swizzle: int
    block: tuple[int, ...]


class DescribedArray(NamedTuple):
    """An argument for NVIDIA's copy engine (TMA): a tensor descriptor of an array, made at each launch.

    Attributes:
      array: its number. shape, strides: the extents, and the strides in elements, as which it is described.
    """

    array: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tiles: TileFormat


@dataclass(frozen=True)
class Code:
    """A compiled kernel.

    Attributes:
      name: the name of its function. platform, arch: the hardware that it is compiled for.
      text: assembly that the driver of the platform compiles (PTX), or empty. binary: machine code; empty if only the
        text may be embedded, so that the driver compiles it for any chip.
      warps: warps of a program, of ``lanes`` threads each; shared: bytes of shared memory.
      tiles: of each tensor descriptor among its arguments, in order.
    """

    name: str
    platform: str
    arch: str
    text: str
    binary: bytes
    warps: int
    lanes: int
    shared: int
    tiles: tuple[TileFormat, ...] = ()


@dataclass(frozen=True)
class Copy:
    """A copy of the array ``source``, through a view, into the array ``to``."""

    to: int
    source: int
    view: View


@dataclass(frozen=True)
class Stack:
    """The arrays ``parts``, of one shape, as the rows of the array ``to``."""

    to: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """A launch of ``grid`` programs of a kernel. Each argument, in order, is the number of an array, a described array
    or a scalar."""

    code: Code
    grid: int
    arguments: tuple[int | DescribedArray | ScalarArgument, ...]

    @property
    def passed(self) -> tuple[int, ...]:
        """The arrays of its arguments, in order; one that it takes twice stands there twice."""
        of = (a.array if isinstance(a, DescribedArray) else a for a in self.arguments)
        return tuple(a for a in of if isinstance(a, int))

    @property
    def arrays(self) -> tuple[int, ...]:
        """The arrays that it takes, in the order in which it first does."""
        return tuple(dict.fromkeys(self.passed))


@dataclass(frozen=True)
class Loop:
    """Steps that run once for each part of some arrays, of ``length`` rows each: only one part is in memory at a time.
    The steps write to arrays of their own, or to a part of a result.

    Attributes:
      first: the row where the first part begins; times: how many parts there are.
      start: an array of one int32, the row where a part begins.
      reads: (array, how it is seen, its part) of those that are read in parts.
      writes: (array, its part) of those that parts become; rows that none became are 0.
      steps: what is done for a part; they may read every array that is there before.
    """

    first: int
    times: int
    length: int
    start: int
    reads: tuple[tuple[int, View, int], ...]
    writes: tuple[tuple[int, int], ...]
    steps: tuple[ProgramStep, ...]


ProgramStep = Copy | Stack | Launch | Loop


@dataclass(frozen=True)
class Program:
    """Steps over numbered arrays.

    Attributes:
      inputs: names of the call's arrays, the first ones of ``arrays``. The others have no values until a step writes
        them.
      written: the inputs that a launch may write to.
      outputs: for each output of the op, its array and a view of it; None for an output that is not wanted.
    """

    inputs: tuple[str, ...]
    arrays: tuple[ProgramArray, ...]
    steps: tuple[ProgramStep, ...]
    outputs: tuple[tuple[int, View] | None, ...]
    written: frozenset[int] = frozenset()
