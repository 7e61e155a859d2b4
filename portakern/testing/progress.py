"""Progress of checks: who looks on, and lines of a long run."""

from __future__ import annotations

import sys
import time
from collections import Counter

__all__ = ["Tally", "interactive"]


def interactive() -> bool:
    """Whether a person calls from a notebook, or types into a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    typed = hasattr(sys, "ps1") or shell is not None
    return typed and ("ipykernel" in sys.modules or sys.stderr.isatty())


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
