"""Run many checks in several processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from functools import reduce
from typing import Any

from portakern.processes import SHARING, pool, unsaid
from portakern.testing.check_options import CheckOptions
from portakern.testing.report import Report
from portakern.testing.runner import check_subject, subject_of, with_rest
from portakern.testing.subject import Subject
from portakern.testing.suite import WHAT

__all__ = ["Interrupted", "check_all"]

Of = tuple[str, str, str | None]
"""An op, a backend and one of its variants."""

SHARDS = 48
"""Parts of one check: more than it has runs of cases, so that no process is left with several of the longest, which
come last in a check and are begun first."""

BESIDE_OTHERS = SHARING | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""What processes that share a machine are told: each would have as many threads as there are cores."""


class Interrupted(BaseException):
    """Checks were interrupted (Ctrl-C or a signal). ``reports``: their partial reports, with the rest as left out;
    ``by``: the exception that interrupted them."""

    def __init__(self, reports: list[Report], by: BaseException) -> None:
        super().__init__(reports, by)
        self.reports, self.by = reports, by


def check_all(
    subjects: Sequence[Of],
    jobs: int,
    advance: Callable[[Of, int], None],
    seconds: float | None = None,
    **options: Any,
) -> list[Report]:
    """A report for each (op, backend, variant), with ``options`` of :func:`portakern.testing.check`.

    ``jobs``: number of processes; the cases do not depend on it. ``advance(subject, cases)`` is called as cases finish.
    ``seconds``: time limit of all subjects together, loading included, after which no case is started; each subject
    gets an equal share.

    Raises:
      Interrupted: by Ctrl-C or a signal.
    """
    deadline = None if seconds is None else time.time() + seconds
    found: dict[Of, list[Report]] = {subject: [] for subject in subjects}
    parts = 1 if jobs == 1 else SHARDS
    try:
        if jobs > 1:
            _shared(found, jobs, advance, deadline, options)
        for i, subject in enumerate(subjects if jobs == 1 else ()):
            found[subject].append(_alone(subject, advance, _until(deadline, len(subjects) - i), options))
    except BaseException as e:
        told = _cause(e)
        if told is None:
            raise
        lacking = [subject for subject in subjects if len(found[subject]) < parts]
        if hasattr(told, "found"):  # of the check that was under way in this process
            found[lacking[0]].append(told.found)
        raise Interrupted(
            [_with_rest(s, found[s], options) if s in lacking else _merged(found[s]) for s in subjects], told
        ) from e
    return [_merged(reports) for reports in found.values()]


def _cause(e: BaseException | None) -> BaseException | None:
    """What told the program to end, if that is what is behind an exception: a signal that comes while a lock is waited
    for makes another one of it as the lock is let go."""
    while isinstance(e, Exception):
        e = e.__context__
    return e


def _merged(reports: Sequence[Report]) -> Report:
    return reduce(Report.merge, reports)


def _with_rest(subject: Of, found: Sequence[Report], options: Mapping[str, Any]) -> Report:
    op, backend, variant = subject
    of = _subject_and_options(op, {**options, "backend": backend, "variant": variant})
    return with_rest(*of, _merged(found) if found else None)


def _shared(
    found: Mapping[Of, list[Report]],
    jobs: int,
    advance: Callable[[Of, int], None],
    deadline: float | None,
    options: Mapping[str, Any],
) -> None:
    with pool(jobs, unsaid(BESIDE_OTHERS)) as processes:
        waiting = {
            processes.submit(_part, op, deadline, backend=backend, variant=variant, shard=(i, SHARDS), **options): (
                op,
                backend,
                variant,
            )
            for i in _order(deadline)
            for op, backend, variant in found
        }
        for done in as_completed(waiting):
            report, subject = done.result(), waiting[done]
            found[subject].append(report)
            advance(subject, report.examples)


def _order(deadline: float | None) -> list[int]:
    """Shards as they are begun: the longest first. With a deadline from both ends by turns, so that edges, which come
    first in a check, and free cases are both met before it: a check that misses one is unfinished."""
    if deadline is None:
        return [*reversed(range(SHARDS))]
    return sorted(range(SHARDS), key=lambda i: min(i, SHARDS - 1 - i))


def _part(op: str, deadline: float | None, **options: Any) -> Report:
    """A check in another process, which begins no case after ``deadline``."""
    return check_subject(*_subject_and_options(op, {**options, "until": deadline}))


def _subject_and_options(op: str, options: Mapping[str, Any]) -> tuple[Subject, CheckOptions]:
    """What is checked, and what is asked of it, of arguments for both."""
    what = {n: v for n, v in options.items() if n in WHAT}
    return subject_of(op, **what), CheckOptions(**{n: v for n, v in options.items() if n not in WHAT})


def _until(deadline: float | None, sharing: int) -> float | None:
    """Until when one has time of those who share what is left until a deadline; None: as long as it takes."""
    now = time.time()
    return None if deadline is None else now + max(0.0, deadline - now) / sharing


def _alone(subject: Of, advance: Callable[[Of, int], None], until: float | None, options: Mapping[str, Any]) -> Report:
    seen = 0

    def progress(done: int) -> None:
        nonlocal seen
        advance(subject, done - seen)
        seen = done

    op, backend, variant = subject
    more = {"backend": backend, "variant": variant, "progress": progress, "until": until}
    return check_subject(*_subject_and_options(op, {**options, **more}))
