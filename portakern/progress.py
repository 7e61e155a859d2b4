"""Progress on one line of the terminal that is rewritten."""

from __future__ import annotations

import sys
import time
from types import TracebackType

__all__ = ["Line"]

PATIENCE, PACE = 2.0, 0.5
"""Seconds that work takes before anything is shown, and between two times."""


class Line:
    """A context in which ``line(done)`` shows the progress, ``done`` of ``total`` of these units of ``what``. The line
    is erased at the end."""

    def __init__(self, what: str, total: int, unit: str = "cases") -> None:
        self.what, self.total, self.unit = what, total, unit
        self.began = self.shown = time.monotonic()
        self.width = 0

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self.began >= PATIENCE and now - self.shown >= PACE:
            self.shown = now
            self._write(f"{self.what}: {done} of {self.total} {self.unit}, {now - self.began:.0f} s")

    def _write(self, text: str) -> None:
        print(f"\r{text:{self.width}}", end="", file=sys.stderr, flush=True)
        self.width = len(text)

    def __enter__(self) -> Line:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.width:
            self._write("")
            print("\r", end="", file=sys.stderr, flush=True)
