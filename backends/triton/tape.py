"""Who notes what an implementation allocates and launches (see :mod:`portakern.backends.triton.replay`)."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

__all__ = ["TAPES", "Tape", "note_launch", "note_tensor", "silent"]


class Tape:
    """What one run of an implementation did.

    Attributes:
      made: the tensors that it allocated, kept alive, so that no other takes their place. launches: kernel, grid,
        positional arguments and constexprs, in order.
      runs: whether launches that are noted take place. allocates: whether arrays are made; a tape that says no is asked
        for what stands for a new array (``fresh``, ``dtype``), and for loops over parts of arrays (``repeat``, of which
        :mod:`.parts` tells).
    """

    runs = True
    allocates = True

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.launches: list[tuple[Any, int, tuple[Any, ...], dict[str, Any]]] = []

    def launched(self, kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
        self.launches.append((kernel, grid, args, constexprs))

    def fresh(self, shape: Sequence[int], dtype: Any) -> Any:
        """What stands for a new array, on a tape that allocates nothing."""
        raise NotImplementedError

    def dtype(self, name: str) -> Any:
        """The dtype of this name, on a tape that allocates nothing."""
        raise NotImplementedError


TAPES: dict[int, Tape] = {}
"""The tape of each thread that takes notes. Every allocation and launch that is not a replay asks whether there is
any."""


def silent() -> Tape | None:
    """This thread's tape, if it stands in for allocating and launching."""
    tape = TAPES.get(get_ident())
    return None if tape is None or tape.allocates else tape


def note_tensor(tensor: Any) -> Any:
    """A tensor that was allocated, noted; handed back."""
    if tape := TAPES.get(get_ident()):
        tape.made.append(tensor)
    return tensor


def note_launch(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any]) -> bool:
    """A launch, noted; whether it is to take place."""
    tape = TAPES.get(get_ident())
    if tape is not None:
        tape.launched(kernel, grid, args, constexprs)
    return tape is None or tape.runs
