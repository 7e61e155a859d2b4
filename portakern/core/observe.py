"""Observers of op calls, and log messages that appear once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from portakern.core.call import Call
from portakern.spec import Rule, Spec

__all__ = ["OBSERVERS", "Served", "observe", "say", "tell"]

log = logging.getLogger("portakern")
_said: set[str] = set()
OBSERVERS: list[Callable[[Served], None]] = []
"""The active observers; every call checks whether there is one."""


@dataclass(frozen=True)
class Served:
    """One finished op call, for :func:`observe`: the ``call``, its backend, variant and tiling, and its outputs (None
    if not wanted).
    """

    call: Call
    backend: str
    variant: str
    interpret: bool
    tiling: Mapping[str, int]
    outputs: tuple[Any, ...]


@contextmanager
def observe(callback: Callable[[Served], None]) -> Iterator[None]:
    """A context in which ``callback`` gets every op call after the call ran. Calls in functions that ``jax.jit``
    compiles inside the context are reported when the functions run, with NumPy arrays.
    """
    OBSERVERS.append(callback)
    try:
        yield
    finally:
        OBSERVERS.remove(callback)


def tell(served: Served) -> None:
    """Pass a call to the observers."""
    for callback in tuple(OBSERVERS):  # another thread's may come or go meanwhile, and none may be passed over
        callback(served)


def doubt(spec: Spec[Any], rule: Rule) -> None:
    """Log that a call is probably a mistake, by a rule in ``doubts`` of its spec."""
    say(f"portakern: {spec.name}: {rule.message}; its explain(...) prints how each axis is read")


def say(text: str, level: int = logging.WARNING) -> None:
    """Log a line, once in a process."""
    if text not in _said:
        _said.add(text)
        log.log(level, text)
