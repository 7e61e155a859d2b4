"""A time limit for code that might hang."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["DeadlineExceeded", "within"]


class DeadlineExceeded(RuntimeError):
    """A block took longer than its time limit."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise DeadlineExceeded in the block where it takes longer than ``seconds`` of wall-clock time.

    By a signal, which Python hands to the main thread between two of its own instructions: what a library does in one
    call of C is not cut short. In other threads, and on systems without the signal, the block takes what it takes. An
    alarm that was set before goes off when it would have.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise DeadlineExceeded(f"it took more than {seconds:g} s")

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3) if left else 0.0, interval)
