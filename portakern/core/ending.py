"""Whether this process was told to end: an interpreter that a kernel runs in may tell of it in words of its own."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["end", "told"]

_told: list[BaseException] = []


def end(how: BaseException) -> NoReturn:
    """End what runs by raising ``how``, and remember that it was raised."""
    _told[:] = [how]
    raise how


def told() -> BaseException | None:
    """What this process was told to end by, whatever was made of it since."""
    return _told[0] if _told else None
