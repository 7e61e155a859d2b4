"""Classify the exception of a kernel: it refused the call, ran out of memory, or crashed."""

from __future__ import annotations

import dis
import os
from pathlib import Path
from types import TracebackType

import portakern
from portakern.errors import UnsupportedError

__all__ = ["Ended", "kind_of"]

OUT_OF_MEMORY = (
    "out of memory",
    "resource_exhausted",
    "can't allocate memory",
    "bad_alloc",
    "cudaerrormemoryallocation",
)
OURS = str(Path(portakern.__file__).parent) + os.sep
RAISES = dis.opmap["RAISE_VARARGS"]


class Ended(Exception):
    """A kernel's own process reported a failure, or ended: ``kind`` is refused, memory, crashed or hung."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def kind_of(error: BaseException) -> str:
    """One of refused, memory and crashed, and of another process's also hung.

    A kernel refuses where it says so: by UnsupportedError or NotImplementedError, or by a ``raise`` or an ``assert`` of
    its own; what the interpreter or a library raises under it is a crash.
    """
    if isinstance(error, Ended):
        return error.kind
    said = f"{type(error).__name__}: {error}".lower()
    if isinstance(error, MemoryError) or any(words in said for words in ("outofmemoryerror", *OUT_OF_MEMORY)):
        return "memory"
    if isinstance(error, UnsupportedError | NotImplementedError) or _says_so(error.__traceback__):
        return "refused"
    return "crashed"


def _says_so(last: TracebackType | None) -> bool:
    """Whether the innermost frame lies in the kernel's own file, the one that portakern called, and raised by a
    statement."""
    frames = []
    while last is not None:
        frames.append(last)
        last = last.tb_next
    files = [f.tb_frame.f_code.co_filename for f in frames]
    called = max((i for i, file in enumerate(files) if file.startswith(OURS)), default=-1) + 1
    if called == len(files) or files[-1] != files[called]:
        return False
    code, at = frames[-1].tb_frame.f_code.co_code, frames[-1].tb_lasti
    return 0 <= at < len(code) and code[at] == RAISES
