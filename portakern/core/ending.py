"""Record that this process was told to end (Ctrl-C, SIGTERM). The exception alone is not enough: an interpreter that
runs a kernel may wrap it in an exception of its own, and a module import or a destructor may swallow it."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["acknowledge", "cause", "end", "lost"]

_cause: list[BaseException] = []
_acknowledged: list[BaseException] = []


def end(how: BaseException) -> NoReturn:
    """End what runs by raising ``how``, and remember that it was raised."""
    _cause[:] = [how]
    _acknowledged.clear()
    raise how


def cause() -> BaseException | None:
    """What this process was told to end by, whatever was made of it since."""
    return _cause[0] if _cause else None


def acknowledge() -> None:
    """What this process was told to end by arrived at somebody who ends it, and is at that."""
    _acknowledged[:] = _cause


def lost() -> bool:
    """Whether what this process was told to end by was dropped on the way: nobody has heard of it, and what runs in
    this thread is no clean-up after it."""
    if not _cause or _acknowledged:
        return False
    found, seen = sys.exc_info()[1], 0
    while found is not None and seen < 100:
        if found is _cause[0]:
            return False
        found, seen = found.__cause__ or found.__context__, seen + 1
    return True
