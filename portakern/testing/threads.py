"""Limit NumPy's matrix products to one thread while the oracle computes."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["one_thread"]

_lock = threading.Lock()
_inside: list[int] = []
"""For each who is in :func:`one_thread`, how many threads there were before the first."""


@contextmanager
def one_thread() -> Iterator[None]:
    """OpenBLAS, as NumPy's wheels bring it, in one thread; any other library as it is.

    The oracle's products take milliseconds. More threads shorten that by little where cores are idle; where none is,
    each waits for the others to get one: 1.4 s in place of 2 ms, with two cores and six busy processes.
    """
    found = _openblas()
    if found is None:
        yield
        return
    get, put = found
    with _lock:
        _inside.append(_inside[0] if _inside else get())
        put(1)
    try:
        yield
    finally:
        with _lock:
            before = _inside.pop()
            if not _inside:
                put(before)


@functools.cache
def _openblas() -> tuple[Any, Any] | None:
    """The functions that get and set its number of threads."""
    for file in sorted(Path(np.__file__).parents[1].glob("numpy.libs/*openblas*")):
        library = ctypes.CDLL(str(file))  # the one that is loaded already
        for form in ("scipy_openblas_%s_num_threads64_", "openblas_%s_num_threads64_", "openblas_%s_num_threads"):
            if hasattr(library, form % "set"):
                return getattr(library, form % "get"), getattr(library, form % "set")
    return None
