"""Tensors without memory, as far as what prepares a launch asks one: shapes, strides, views.

The Python around the kernels is written for PyTorch's tensors, of which it asks where they begin and how they are laid
out. Where another library holds the arrays, an :class:`AbstractArray` stands for each, in row-major order as these lie;
what the Python allocates, copies and launches goes into a :class:`Trace`. So no PyTorch is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from portakern.backends.triton.capture import Capture, Launched
from portakern.backends.triton.descriptors import base_of
from portakern.backends.triton.layout import contiguous_strides
from portakern.core.call import Call
from portakern.core.framework import BY_TYPE, DTYPE_NAME, Framework
from portakern.core.program import Copy, Loop, ProgramArray, Stack, View
from portakern.core.targets import Target
from portakern.spec.dtypes import numpy_dtype

__all__ = ["AbstractArray", "Trace", "abstracted"]


class AbstractArrays(Framework):
    """What binds a call of abstract arrays."""

    name, title, wrapper = "abstract", "abstract array", "AbstractArray"

    @staticmethod
    def device(array: Any) -> None:
        return None

    def is_array(self, value: Any) -> bool:
        return isinstance(value, AbstractArray)

    def target(self, device: Any) -> Target:
        return Target("traced")

    def strides(self, array: Any) -> list[int]:
        return list(array.stride())


ABSTRACT = AbstractArrays()


class Trace(Capture):
    """A capture of abstract arrays, on which nothing is allocated or launched.

    Attributes:
      places: every array so far. steps: copies, loops, and the launches as the implementation makes them.
      rows: of each new array that was taken row by row, which are arrays of their own, until a launch takes the whole.
    """

    runs = allocates = False

    def __init__(self) -> None:
        super().__init__()
        self.places: list[ProgramArray] = []
        self.steps: list[Any] = []
        self.rows: dict[int, tuple[int, ...]] = {}

    def allocate(self, shape: Sequence[int], dtype: str) -> AbstractArray:
        """A new array, as it lies."""
        self.places.append(ProgramArray(tuple(shape), dtype))
        return AbstractArray(self, len(self.places) - 1, tuple(shape), contiguous_strides(tuple(shape)), dtype)

    def fresh(self, shape: Sequence[int], dtype: Any) -> AbstractArray:
        return self.allocate(shape, DTYPE_NAME[dtype])

    def dtype(self, name: str) -> np.dtype[Any]:
        return numpy_dtype(name)

    def launched(self, launch: Launched) -> None:
        self.steps += [Stack(n, self.rows.pop(n)) for n in dict.fromkeys(numbers(launch.args)) if n in self.rows]
        self.steps.append(launch)

    def split(self, x: AbstractArray) -> tuple[AbstractArray, ...]:
        """The rows of a new array, for launches to write to before others take the whole."""
        rows = tuple(self.allocate(x.shape[1:], x.name) for _ in range(x.shape[0]))
        self.rows[x.number] = tuple(row.number for row in rows)
        return rows

    def repeat(
        self, first: int, times: int, length: int, piece: Any, reads: Sequence[Any], writes: Sequence[Any]
    ) -> None:
        """A loop, whose steps are what ``piece`` does for a part that begins anywhere."""
        before, self.steps = self.steps, []
        start = self.allocate((1,), "int32")
        parts = [None if x is None else self.allocate((length, *x.shape[1:]), x.name) for x in (*reads, *writes)]
        try:
            piece(0, start, *parts)
        finally:
            steps, self.steps = self.steps, before
        read = [(x.number, x.seen, p.number) for x, p in zip(reads, parts, strict=False) if p is not None]
        written = [(x.number, p.number) for x, p in zip(writes, parts[len(reads) :], strict=True) if p is not None]
        self.steps.append(Loop(first, times, length, start.number, tuple(read), tuple(written), tuple(steps)))

    def copied(self, x: AbstractArray, *more: tuple[str, tuple[Any, ...]]) -> AbstractArray:
        """The values of an abstract array, seen in another way yet, in memory of their own."""
        shape, dtype = x.shape, x.name
        for how, what in more:
            shape, dtype = (shape, what[0]) if how == "cast" else (what, dtype)
        made = self.allocate(shape, dtype)
        self.steps.append(Copy(made.number, x.number, (*x.seen, *more)))
        return made


class AbstractArray:
    """A view of a numbered array of a trace: its shape, strides and dtype, and how they came from the array as it lies
    (``seen``)."""

    device = None
    layout = None

    def __init__(
        self, trace: Trace, number: int, shape: tuple[int, ...], strides: tuple[int, ...], name: str, seen: View = ()
    ) -> None:
        self.trace, self.number, self.shape, self.strides, self.name, self.seen = (
            trace, number, shape, strides, name, seen,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"AbstractArray({self.name}, {self.shape}, strides {self.strides}, of array {self.number})"

    @property
    def dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self.name)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def stride(self, axis: int | None = None) -> Any:
        return self.strides if axis is None else self.strides[axis]

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return 0  # a multiple of 16, as every array of a program begins at one

    def ptr_range(self) -> int:
        """Bytes of the whole array, which is what Triton's compiler for AMD asks."""
        place = self.trace.places[self.number]
        return math.prod(place.shape) * numpy_dtype(place.dtype).itemsize

    def is_contiguous(self) -> bool:
        wanted = contiguous_strides(self.shape)
        return all(n == 1 or s == w for n, s, w in zip(self.shape, self.strides, wanted, strict=True))

    def _seen(self, how: str, what: tuple[Any, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> AbstractArray:
        return AbstractArray(self.trace, self.number, shape, strides, self.name, (*self.seen, (how, what)))

    def permute(self, *axes: int) -> AbstractArray:
        axes = tuple(a % self.ndim for a in axes)
        return self._seen("permute", axes, tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes))

    @property
    def mT(self) -> AbstractArray:  # as PyTorch calls it
        return self.permute(*range(self.ndim - 2), -1, -2)

    def apart(self) -> AbstractArray:
        """The same array in a trace of its own, to ask what would be done with it."""
        trace = Trace()
        trace.places = [*self.trace.places]
        return AbstractArray(trace, self.number, self.shape, self.strides, self.name, self.seen)

    def __iter__(self) -> Iterator[AbstractArray]:
        return iter(self.trace.split(self))

    def as_strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> AbstractArray:
        """Only what is a view of another shape."""
        found = self.reshape(shape)
        if any(a != b for n, a, b in zip(shape, found.strides, strides, strict=True) if n > 1):
            raise NotImplementedError(f"an abstract array of strides {self.strides} is seen with strides {strides}")
        return found

    def expand(self, *given: Any) -> AbstractArray:
        shape = extents(given)
        new = len(shape) - self.ndim
        own, steps = (1,) * new + self.shape, (0,) * new + self.strides
        shape = tuple(o if n == -1 else n for n, o in zip(shape, own, strict=True))
        strides = tuple(0 if o == 1 != n else s for n, o, s in zip(shape, own, steps, strict=True))
        return self._seen("expand", shape, shape, strides)

    def reshape(self, *given: Any) -> AbstractArray:
        """A view where strides can say it, else a copy."""
        known = -math.prod(extents(given))
        shape = tuple(self.numel() // known if n == -1 else n for n in extents(given))
        strides = viewed(self.shape, self.strides, shape)
        if strides is None:
            return self.trace.copied(self, ("reshape", shape))
        return self._seen("reshape", shape, shape, strides)

    def __getitem__(self, index: Any) -> AbstractArray:
        """Only ``x[None]`` and ``x[None, None]``: axes of extent 1 in front."""
        new = len(index) if isinstance(index, tuple) else 1
        if index not in (None, (None,) * new):
            raise NotImplementedError(f"an abstract array is indexed by {index!r}; expected Nones")
        return self.reshape((1,) * new + self.shape)

    def to(self, dtype: np.dtype[Any]) -> AbstractArray:
        name = DTYPE_NAME[dtype]
        return self if name == self.name else self.trace.copied(self, ("cast", (name,)))

    def view(self, dtype: np.dtype[Any]) -> AbstractArray:
        """Only as a dtype as wide: the same bits."""
        name = DTYPE_NAME[dtype]
        if numpy_dtype(name).itemsize != self.element_size():
            raise NotImplementedError(f"an abstract array of {self.name} is seen as {name}, which is not as wide")
        seen = (*self.seen, ("bits", (name,)))
        return AbstractArray(self.trace, self.number, self.shape, self.strides, name, seen)

    def contiguous(self) -> AbstractArray:
        return self if self.is_contiguous() else self.trace.copied(self)

    def clone(self, memory_format: Any = None) -> AbstractArray:
        return self.trace.copied(self)


BY_TYPE[AbstractArray] = ABSTRACT


def numbers(values: Sequence[Any]) -> Iterator[int]:
    """The numbers of the arrays among arguments, in their groups, and that are described."""
    for value in map(base_of, values):
        if isinstance(value, AbstractArray):
            yield value.number
        elif isinstance(value, tuple):
            yield from numbers(value)


def extents(given: tuple[Any, ...]) -> tuple[int, ...]:
    """A shape, given as one tuple or as numbers."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def viewed(shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a view of another shape with as many elements, None where there is no such view."""
    merged: list[list[int]] = []  # [extent, stride] of runs of axes that lie as one
    for n, s in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if merged and merged[-1][1] == n * s:
            merged[-1] = [merged[-1][0] * n, s]
        else:
            merged.append([n, s])
    found: list[int] = []
    left, step = 1, 1
    for n in reversed(wanted):
        if n == 1:
            found.append(step)
            continue
        if left == 1:
            if not merged:
                return None
            left, step = merged.pop()
        if left % n:
            return None
        found.append(step)
        left, step = left // n, step * n
    return None if merged or left != 1 else tuple(reversed(found))


def abstracted(call: Call, trace: Trace | None = None) -> Call:
    """The call with an abstract array in place of each: the first places of ``trace``, in the order of the arrays."""
    trace = Trace() if trace is None else trace
    arrays = {
        n: None if a is None else trace.allocate(tuple(a.shape), call.dtype_of(n)) for n, a in call.arrays.items()
    }
    return call.replace(arrays=arrays, framework=ABSTRACT, device=None, given=None)
