"""Processes that work beside the one that times, and end when they are no longer needed, whatever they are at."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress

__all__ = ["pool", "stopped"]

log = logging.getLogger("portakern")

LONGEST = 120.0
"""Seconds that processes are stopped for at most: one of them may hold what the others wait for."""

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when the one that began it ends."""


@contextmanager
def pool(jobs: int, environment: Mapping[str, str], nice: int = 0) -> Iterator[ProcessPoolExecutor]:
    """``jobs`` new processes with more in their environment, which leave the cores to others by so much; CUDA and JAX
    do not survive a fork."""
    before = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")
    made = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_begin, initargs=(dict(environment), nice))
    try:
        yield made
    finally:
        own = set(made._processes or ())  # of all children those of this pool; concurrent.futures has no public name
        made.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process not in before and process.pid in own:
                process.kill()
                process.join()  # so that it holds no memory of a device any more
                while process.exitcode is None:  # the pool's own thread was told of its end, and is about to note it
                    time.sleep(1e-3)


@contextmanager
def stopped(processes: ProcessPoolExecutor) -> Iterator[None]:
    """While inside, a pool's processes stand still wherever they are, and go on afterwards; where a system has no
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


def _send(processes: ProcessPoolExecutor, number: int) -> None:
    for process in list((processes._processes or {}).values()):
        with suppress(ProcessLookupError, ValueError):  # it has ended, or was closed
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)


def _begin(environment: dict[str, str], nice: int) -> None:
    os.environ.update(environment)
    if hasattr(os, "nice"):
        os.nice(nice)
    if sys.platform == "linux":  # one that is stopped does not notice that nobody waits for it any more
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
