"""Many checks over several processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from functools import reduce
from typing import Any

from portakern.processes import SHARING, pool, unsaid
from portakern.testing.report import Report
from portakern.testing.runner import check

__all__ = ["check_all"]

SHARDS = 48
"""Parts of one check: more than it has runs of cases, so that no process is left with several of the longest, which
come last in a check and are begun first."""

BESIDE_OTHERS = SHARING | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""What processes that share a machine are told: each would have as many threads as there are cores."""


def check_all(
    subjects: Sequence[tuple[str, str, str | None]],
    jobs: int,
    advance: Callable[[tuple[str, str, str | None], int], None],
    seconds: float | None = None,
    **options: Any,
) -> list[Report]:
    """A report for each (op, backend, variant), with ``options`` of :func:`portakern.testing.check`.

    ``jobs`` processes share the work; what is drawn does not depend on how many. ``advance(subject, cases)`` is called
    as cases are done. ``seconds``: after these no further case begins, of all subjects together; each has about its
    share of the cases by then, and the laws are asked in any case.
    """
    deadline = None if seconds is None else time.time() + seconds
    if jobs == 1:
        return [
            _alone(subject, advance, {**options, "seconds": _left(deadline, len(subjects) - i)})
            for i, subject in enumerate(subjects)
        ]
    parts: dict[tuple[str, str, str | None], list[Report]] = {subject: [] for subject in subjects}
    with pool(jobs, unsaid(BESIDE_OTHERS)) as processes:
        waiting = {
            processes.submit(_part, op, deadline, backend=backend, variant=variant, shard=(i, SHARDS), **options): (
                op,
                backend,
                variant,
            )
            for i in reversed(range(SHARDS))
            for op, backend, variant in subjects
        }
        for done in as_completed(waiting):
            report, subject = done.result(), waiting[done]
            parts[subject].append(report)
            advance(subject, report.examples)
    return [reduce(Report.merge, reports) for reports in parts.values()]


def _part(op: str, deadline: float | None, **options: Any) -> Report:
    """A check in another process, which begins no case after ``deadline``."""
    return check(op, seconds=_left(deadline), **options)


def _left(deadline: float | None, sharing: int = 1) -> float | None:
    """Seconds of one of those who share what is left until a deadline; None: as many as it takes."""
    return None if deadline is None else max(0.0, deadline - time.time()) / sharing


def _alone(
    subject: tuple[str, str, str | None],
    advance: Callable[[tuple[str, str, str | None], int], None],
    options: dict[str, Any],
) -> Report:
    seen = 0

    def progress(done: int) -> None:
        nonlocal seen
        advance(subject, done - seen)
        seen = done

    op, backend, variant = subject
    return check(op, backend=backend, variant=variant, progress=progress, **options)
