"""End a command on Ctrl-C or SIGTERM, even if code on the way swallows the exception."""

from __future__ import annotations

import signal
import sys
import threading
import time

from portakern.core import ending

__all__ = ["ENDS", "Terminated", "listen", "status"]

AGAIN = 0.5
"""Seconds after which a command is told once more to end where what told it first was dropped on the way: by an
``except`` of everything in a library, or where the signal came in a destructor or a callback of the import system."""


class Terminated(BaseException):
    """The command got SIGTERM. This is no SystemExit, which a check would report as the failure of a case."""


ENDS: dict[int, type[BaseException]] = {signal.SIGTERM: Terminated, signal.SIGINT: KeyboardInterrupt}

_asks = threading.Event()
_watch: list[threading.Thread] = []


def listen() -> None:
    """Have both signals end what runs in the main thread. Who ignores SIGINT, in the background, goes on."""
    signal.signal(signal.SIGTERM, _end)  # a command that is ended ends the processes that it started
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def status(ended: BaseException) -> int:
    """The exit status that a shell gives to a process that a signal ended."""
    return 128 + next(number for number, kind in ENDS.items() if isinstance(ended, kind))


def _end(number: int, frame: object) -> None:
    if _asks.is_set():
        _asks.clear()
        if not ending.lost():
            return
    elif not _watch:
        _watch.append(threading.Thread(target=_ask, args=(number,), daemon=True))
        _watch[0].start()
    ending.end(ENDS[number]())


def _ask(number: int) -> None:
    """Ask the main thread again and again whether it is on its way out, which it alone knows."""
    while not sys.is_finalizing():
        time.sleep(AGAIN)
        _asks.set()
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, number)  # which ends its sleep, too
        else:
            signal.raise_signal(number)
