"""Who notes what an implementation allocates and launches (see :mod:`portakern.backends.triton.replay`)."""

from __future__ import annotations

from threading import get_ident
from typing import Any

__all__ = ["TAPES", "Tape", "note_launch", "note_tensor"]


class Tape:
    """What one run of an implementation did.

    Attributes:
      made: the tensors that it allocated, kept alive, so that no other takes their place. launches: kernel, grid,
        positional arguments and constexprs, in order.
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.launches: list[tuple[Any, int, tuple[Any, ...], dict[str, Any]]] = []


TAPES: dict[int, Tape] = {}
"""The tape of each thread that takes notes. Every allocation and launch that is not a replay asks whether there is
any."""


def note_tensor(tensor: Any) -> Any:
    """A tensor that was allocated, noted; handed back."""
    if tape := TAPES.get(get_ident()):
        tape.made.append(tensor)
    return tensor


def note_launch(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
    """A launch, noted."""
    if tape := TAPES.get(get_ident()):
        tape.launches.append((kernel, grid, args, constexprs))
