"""Worker processes that end when they are no longer needed, whatever they are doing."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

__all__ = ["SHARING", "pool", "stopped", "unsaid"]

log = logging.getLogger("portakern")

SHARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""What a process is told of a device that is not its own: JAX would take most of its memory at once, for good."""

LONGEST = 120.0
"""Seconds that processes are stopped for at most: one of them may hold what the others wait for."""

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when the one that began it ends."""


def unsaid(environment: Mapping[str, str]) -> dict[str, str]:
    """What of it the user's own environment says nothing about."""
    return {name: value for name, value in environment.items() if name not in os.environ}


class _WorkerProcess(SpawnProcess):
    """A process whose start no signal interrupts: signals are delivered afterwards. An exception in the middle of a
    start would leave a process that nobody ends."""

    def start(self) -> None:
        with _told_later():
            super().start()


class _Workers(SpawnContext):
    """Starts worker processes and lists them. They are spawned, since CUDA and JAX do not survive a fork."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[_WorkerProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> _WorkerProcess:  # type: ignore[override]
        """A process that is kept in the list; whoever begins it calls this by its name there."""
        self.made.append(_WorkerProcess(*args, **kwargs))
        return self.made[-1]


@contextmanager
def pool(
    jobs: int, environment: Mapping[str, str], nice: int = 0, begin: Callable[..., None] | None = None, *given: Any
) -> Iterator[ProcessPoolExecutor]:
    """``jobs`` new processes with more in their environment, which leave the cores to others by so much, and call
    ``begin`` with what is ``given`` first. They end with the block, also where an exception leaves it, that of a signal
    among them."""
    workers = _Workers()
    made = ProcessPoolExecutor(
        jobs, mp_context=workers, initializer=_begin, initargs=(dict(environment), nice, begin, given)
    )
    try:
        yield made
    finally:
        made.shutdown(wait=False, cancel_futures=True)  # it would wait for all that it was given
        for process in workers.made:
            if process.pid is not None:  # it was begun
                process.kill()
                process.join()  # so that it holds no memory of a device any more
                while process.exitcode is None:  # the pool's own thread was told of its end, and is about to note it
                    time.sleep(1e-3)


@contextmanager
def _told_later() -> Iterator[None]:
    """Inside, signals that would end the program are kept, and told afterwards."""
    if threading.current_thread() is not threading.main_thread():  # which alone is told of signals
        yield
        return
    kept: list[int] = []
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    handlers = {n: handler for n, handler in handlers.items() if callable(handler)}  # the system's raise nothing here
    for number in handlers:
        signal.signal(number, lambda n, _: kept.append(n))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for told in kept:
            signal.raise_signal(told)


@contextmanager
def stopped(processes: Sequence[int]) -> Iterator[None]:
    """While inside, processes of these ids stand still wherever they are, and go on afterwards; where a system has no
    signal for that, they work on. After :data:`LONGEST` seconds they go on in any case, which is logged."""
    if not hasattr(signal, "SIGSTOP"):
        yield
        return
    _send(processes, signal.SIGSTOP)

    def too_long() -> None:
        log.warning(
            "portakern: processes that compile ahead were stopped for %g s, and go on while calls are timed", LONGEST
        )
        _send(processes, signal.SIGCONT)

    alarm = threading.Timer(LONGEST, too_long)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()
        _send(processes, signal.SIGCONT)


def _send(processes: Sequence[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(process, number)


def _begin(environment: dict[str, str], nice: int, begin: Callable[..., None] | None, given: Sequence[Any]) -> None:
    os.environ.update(environment)
    if hasattr(os, "nice"):
        os.nice(nice)
    if sys.platform == "linux":  # one that is stopped does not notice that nobody waits for it any more
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # it ended before this was asked for
            os._exit(1)
    if begin is not None:
        begin(*given)
