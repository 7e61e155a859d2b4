"""Caches of decisions, which later calls reuse: tables of bounded size that are cleared together."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

__all__ = ["BoundedCache", "forget"]

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict that is emptied when it is full: it does not grow with the number of shapes in a program. A look-up costs
    as much as in a dict, since it updates nothing."""

    __slots__ = ("__weakref__", "limit")
    __hash__ = object.__hash__  # type: ignore[assignment]  # told apart as objects, not by what they hold

    def __init__(self, limit: int = 1024) -> None:
        super().__init__()
        self.limit = limit
        _tables.add(self)

    def keep(self, key: K, value: V) -> V:
        """Remember a value, which is handed back."""
        if len(self) >= self.limit:
            self.clear()
        self[key] = value
        return value


_tables: weakref.WeakSet[BoundedCache[Any, Any]] = weakref.WeakSet()


def forget() -> None:
    """Decide everything anew: an implementation, or a table of tilings, may have changed."""
    for table in list(_tables):
        table.clear()
