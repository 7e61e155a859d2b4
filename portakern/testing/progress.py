"""Progress of a check, on one line of the terminal that is rewritten."""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import TracebackType

__all__ = ["Line", "Tally", "interactive"]

PATIENCE, PACE = 2.0, 0.5
"""Seconds that a check takes before anything is shown, and between two times."""


def interactive() -> bool:
    """Whether a person calls from a notebook, or types into a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    typed = hasattr(sys, "ps1") or shell is not None
    return typed and ("ipykernel" in sys.modules or sys.stderr.isatty())


class Line:
    """A context in which ``line(done)`` shows the progress, ``done`` of ``total`` cases of ``what``. The line is erased
    at the end."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self.began = self.shown = time.monotonic()
        self.width = 0

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self.began >= PATIENCE and now - self.shown >= PACE:
            self.shown = now
            self._write(f"{self.what}: {done} of {self.total} cases, {now - self.began:.0f} s")

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


class Tally:
    """Counts the cases of several checks, and returns a line of progress from time to time."""

    EVERY = 15.0
    """Seconds between two lines: a log of a long run stays short."""

    def __init__(self, checks: int, cases: int) -> None:
        self.checks, self.cases = checks, cases
        self.done: Counter[object] = Counter()
        self.began = self.said = time.monotonic()

    def take(self, check: object, cases: int) -> str:
        """Count cases of a check; the line, "" where the last one is not old enough."""
        self.done[check] += cases
        now = time.monotonic()
        if now - self.said < self.EVERY:
            return ""
        self.said = now
        whole = sum(done >= self.cases for done in self.done.values())
        return (
            f"{self.done.total():,} of {self.checks * self.cases:,} cases, {whole} of {self.checks} checks done, "
            f"{now - self.began:.0f} s"
        )
