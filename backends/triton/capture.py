"""Captures: what a run of an implementation allocates and launches, in order (:mod:`.plan`, :mod:`.lowering`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

__all__ = ["CAPTURES", "Capture", "Launched", "capturing", "note_tensor", "tracing"]


class Launched(NamedTuple):
    """A launch as it was asked for, and what launched it (:data:`portakern.backends.triton.launcher.Handles`) where
    that is kept.
    """

    kernel: Any
    grid: int
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    handles: Any = None


class Capture:
    """What one run of an implementation did.

    Attributes:
      made: the tensors that it allocated, kept alive, so that no other takes their place. launches: in their order.
      runs: whether launches take place. allocates: whether arrays are made; a capture that says no, a trace, is asked
        for what stands for a new array (``fresh``, ``dtype``), and for loops over parts of arrays (``repeat``, of which
        :mod:`.chunked` tells).
    """

    runs = True
    allocates = True

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.launches: list[Launched] = []

    def launched(self, launch: Launched) -> None:
        self.launches.append(launch)

    def fresh(self, shape: Sequence[int], dtype: Any) -> Any:
        """What stands for a new array, in a trace."""
        raise NotImplementedError

    def dtype(self, name: str) -> Any:
        """The dtype of this name, in a trace."""
        raise NotImplementedError


CAPTURES: dict[int, Capture] = {}
"""The capture of each thread that has one. Every allocation and launch that no plan makes asks whether there is any."""


@contextmanager
def capturing(capture: Capture) -> Iterator[None]:
    """While inside, this thread's allocations and launches are captured."""
    thread = get_ident()
    before = CAPTURES.get(thread)
    CAPTURES[thread] = capture
    try:
        yield
    finally:
        if before is None:
            del CAPTURES[thread]
        else:
            CAPTURES[thread] = before


def tracing() -> Capture | None:
    """This thread's capture, if it stands in for allocating and launching."""
    capture = CAPTURES.get(get_ident())
    return None if capture is None or capture.allocates else capture


def note_tensor(tensor: Any) -> Any:
    """A tensor that was allocated, captured; handed back."""
    if capture := CAPTURES.get(get_ident()):
        capture.made.append(tensor)
    return tensor
