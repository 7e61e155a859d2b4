"""Parts of arrays, one after another: what an implementation does for each of them in a loop of Python's where it runs,
and once where it is written down (:mod:`.lowering`), as the steps of a loop of the library whose program it becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from portakern.backends.triton.capture import tracing
from portakern.backends.triton.layout import fresh

__all__ = ["in_parts", "scratch"]


def in_parts(extent: int, length: int, piece: Callable[..., None], reads: Sequence[Any], writes: Sequence[Any]) -> None:
    """Call ``piece(first, start, *parts)`` for rows first .. first + length - 1 of the arrays, those that are read and
    then those that are written, of ``extent`` rows each; the last part may be shorter.

    Args:
      piece: first: an int; start: None, or an array of one int32 to be added to first, where the loop is not
        Python's. A part of None is None. What it writes to are parts of ``writes``, and arrays that it makes.
    """
    trace: Any = tracing()
    if trace is None or length >= extent:
        for first, last in chunks(extent, length):
            piece(first, None, *(x if x is None else part(x, first, last) for x in (*reads, *writes)))
        return
    whole = extent // length * length
    trace.repeat(0, whole // length, length, piece, reads, writes)
    if whole < extent:
        trace.repeat(whole, 1, extent - whole, piece, reads, writes)


def chunks(extent: int, length: int) -> list[tuple[int, int]]:
    """Where chunks begin and end."""
    return [(first, min(first + length, extent)) for first in range(0, extent, length)]


def part(x: Any, first: int, last: int) -> Any:
    """Rows first .. last - 1 of x."""
    return x if last - first == x.shape[0] else x[first:last]


def scratch(like: Any, rows: int, columns: int) -> Callable[[int, int], Any]:
    """What gives a part room for numbers of ``like``'s dtype, (rows, columns) of it at most: the beginning of one
    buffer, but where memory is the other library's to plan an array of its own."""
    if tracing() is not None:
        return lambda height, width: fresh((height, width), like.dtype, like.device)
    buffer = fresh((rows, columns), like.dtype, like.device)

    def allocate(height: int, width: int) -> Any:
        whole = (height, width) == (rows, columns)
        return buffer if whole else buffer.view(-1)[: height * width].view(height, width)

    return allocate
