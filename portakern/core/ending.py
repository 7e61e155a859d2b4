"""Whether this process was told to end: an interpreter that a kernel runs in may tell of it in words of its own, and a
module that is being imported, or a destructor, may tell of it not at all."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["end", "heard", "lost", "told"]

_told: list[BaseException] = []
_heard: list[BaseException] = []


def end(how: BaseException) -> NoReturn:
    """End what runs by raising ``how``, and remember that it was raised."""
    _told[:] = [how]
    _heard.clear()
    raise how


def told() -> BaseException | None:
    """What this process was told to end by, whatever was made of it since."""
    return _told[0] if _told else None


def heard() -> None:
    """What this process was told to end by arrived at somebody who ends it, and is at that."""
    _heard[:] = _told


def lost() -> bool:
    """Whether what this process was told to end by was dropped on the way: nobody has heard of it, and what runs in
    this thread is no clean-up after it."""
    if not _told or _heard:
        return False
    found, seen = sys.exc_info()[1], 0
    while found is not None and seen < 100:
        if found is _told[0]:
            return False
        found, seen = found.__cause__ or found.__context__, seen + 1
    return True
