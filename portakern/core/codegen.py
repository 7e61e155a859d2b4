"""Compile functions from generated source text, and keep the text for tracebacks, debuggers and ``inspect.getsource``.

The text is registered with :mod:`linecache` under a name in angle brackets and without a modification time, so that
``checkcache`` keeps it, as for ``dataclasses`` and ``attrs``. It is removed with the last function of the text.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import threading
import weakref
from collections.abc import Mapping
from types import CodeType
from typing import Any

__all__ = ["executed", "written"]


def written(title: str, source: str, names: Mapping[str, Any], function: str) -> Any:
    """The function called ``function`` that ``source`` defines.

    Args:
      title: what it is, as in "binder of softmax": its file in tracebacks is ``<binder of softmax>``, or
        ``<binder of softmax-1>`` where a function of other text has that name.
      source: the text of a module. It runs: write it from specs, types and numbers alone.
      names: what the text names, beside Python's own.
    """
    source, code, lines = _compiled(source)
    text = _registered(title, source, lines)
    return executed(_filed(code, text.file), {**names, "__portakern_text__": text}, function)


@functools.lru_cache(256)
def _compiled(source: str) -> tuple[str, CodeType, list[str]]:
    """A text with its code and lines, which functions of the same text share."""
    return source, compile(source, "<written>", "exec"), source.splitlines(keepends=True)


def _filed(code: CodeType, file: str) -> CodeType:
    """A copy of compiled code whose lines are those of a file. Functions with globals of their own must share none:
    CPython keeps in the code where it found a global."""
    constants = tuple(_filed(c, file) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=file, co_consts=constants)


def executed(code: CodeType, scope: dict[str, Any], function: str) -> Any:
    """The function called ``function`` that a module's code defines, run in ``scope``."""
    exec(code, scope)
    return scope[function]


class _Text:
    """A text that linecache holds under the name ``file``. The globals of its functions keep this object alive."""

    def __init__(self, file: str, source: str, lines: list[str]) -> None:
        self.file, self.source = file, source
        self.entry = len(source), None, lines, file


_lock = threading.RLock()  # reentrant: the garbage collector may run _forget within it
_texts: weakref.WeakValueDictionary[str, _Text] = weakref.WeakValueDictionary()
"""File -> the text that some function still has."""


def _registered(title: str, source: str, lines: list[str]) -> _Text:
    with _lock:
        for file in itertools.chain([f"<{title}>"], (f"<{title}-{n}>" for n in itertools.count(1))):
            text = _texts.get(file)
            if text is None and file not in linecache.cache:
                text = _texts[file] = _Text(file, source, lines)
                weakref.finalize(text, _forget, file, text.entry).atexit = False
            if text is not None and text.source == source:
                linecache.cache[file] = text.entry  # again: somebody may have emptied linecache
                return text
    raise AssertionError("itertools.count ends")


def _forget(file: str, entry: tuple[Any, ...]) -> None:
    with _lock:
        if linecache.cache.get(file) is entry:
            del linecache.cache[file]
