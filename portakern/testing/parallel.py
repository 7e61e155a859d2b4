"""Many checks over several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import reduce
from typing import Any

from portakern.testing.runner import Report, check

__all__ = ["check_all"]

SHARDS = 12  # parts of one check; more than cores share one, so that no process is left with the longest


def check_all(
    pairs: Sequence[tuple[str, str]], jobs: int, advance: Callable[[str, str, int], None], **options: Any
) -> list[Report]:
    """A report for each (op, backend), with ``options`` of :func:`portakern.testing.check`.

    ``jobs`` processes share the work; what is drawn does not depend on how many. ``advance(op, backend, cases)`` is called as cases are done.
    """
    if jobs == 1:
        return [_alone(op, backend, advance, options) for op, backend in pairs]
    parts: dict[tuple[str, str], list[Report]] = {pair: [] for pair in pairs}
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_one_thread
    ) as pool:  # CUDA and JAX do not survive a fork
        waiting = {
            pool.submit(check, op, backend=backend, shard=(i, SHARDS), **options): (op, backend)
            for i in range(SHARDS)
            for op, backend in pairs
        }
        for done in as_completed(waiting):
            report, (op, backend) = done.result(), waiting[done]
            parts[op, backend].append(report)
            advance(op, backend, report.examples)
    return [reduce(Report.merge, reports) for reports in parts.values()]


def _alone(op: str, backend: str, advance: Callable[[str, str, int], None], options: dict[str, Any]) -> Report:
    seen = 0

    def progress(done: int) -> None:
        nonlocal seen
        advance(op, backend, done - seen)
        seen = done

    return check(op, backend=backend, progress=progress, **options)


def _one_thread() -> None:
    """A process a core: thread pools within each would fight over the cores."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
