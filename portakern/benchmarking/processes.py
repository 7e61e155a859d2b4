"""Processes that work beside the one that times, and end when they are no longer needed, whatever they are at."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

__all__ = ["pool"]


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


def _begin(environment: dict[str, str], nice: int) -> None:
    os.environ.update(environment)
    if hasattr(os, "nice"):
        os.nice(nice)
