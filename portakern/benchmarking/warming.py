"""Compiling ahead: every case visited once, by many processes at a time, so that the run that times finds compiled code
in the compilers' caches on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import replace

from portakern.benchmarking.processes import pool
from portakern.benchmarking.run import Plan, visit
from portakern.benchmarking.suites import TimedCase
from portakern.core import registry
from portakern.core.backend import Backend
from portakern.core.framework import frameworks
from portakern.files import cache_folder

__all__ = ["ENVIRONMENT", "warm"]

ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # libraries share a device, and JAX keeps what it once had
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4",
    "JAX_COMPILATION_CACHE_DIR": str(cache_folder() / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # its own processes take seconds to begin, and minutes to end
}
"""What a process that times is to have in its environment before it loads a library."""

ALONE = {
    **ENVIRONMENT,
    "OMP_NUM_THREADS": "1",
}


def warm(plan: Plan, jobs: int, seconds: float, done: Callable[[], None]) -> int:
    """Visit the plan's cases with ``jobs`` processes for at most ``seconds``; how many were visited. ``done`` is called
    after each. What is not reached is compiled when it is timed.

    Contenders of other libraries than the first subject's are not visited: a compiler that times what it compiles, as
    XLA does, would choose by what other processes do meanwhile.
    """
    framework = plan.lead.framework
    visited_too = [b for b in (*plan.subjects[1:], *plan.against) if registry.known(b) and b.framework == framework]
    if jobs < 1 or not registry.known(plan.lead):
        return 0
    start, visited = time.monotonic(), 0
    with pool(jobs, ALONE) as processes:
        names = [b.name for b in visited_too]
        waiting = [processes.submit(_visit, plan.lead.name, names, plan.device, case) for case in plan.cases]
        _loaded(plan, visited_too, start + seconds)
        with suppress(TimeoutError):
            for future in as_completed(waiting, timeout=max(0.0, start + seconds - time.monotonic())):
                visited += future.exception() is None
                done()
    return visited


def _loaded(plan: Plan, others: Sequence[Backend], deadline: float) -> None:
    """Load meanwhile, in this process, what the first call of each op has its libraries load: some take ten seconds."""
    everybody = (*plan.subjects, *plan.against)
    for name in {b.framework for b in everybody if b.unavailable() is None}:
        with suppress(Exception):  # who needs it will meet this again, and say it
            frameworks()[name].load()
            frameworks()[name].devices()
    plan = replace(plan, subjects=plan.subjects[:1], against=others)
    for case in {case.timed: case for case in reversed(plan.cases)}.values():
        if time.monotonic() > deadline:
            return
        with suppress(Exception):
            visit(plan, case)


def _visit(lead: str, others: list[str], device: str | None, case: TimedCase) -> None:
    plan = Plan([case], [registry.backend(lead)], [registry.backend(n) for n in others], device)
    visit(plan, case)
