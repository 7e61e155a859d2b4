"""Compiling ahead: every case visited once, by many processes at a time, so that the run that times finds compiled code
in the compilers' caches on disk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import as_completed
from contextlib import suppress

from portakern.benchmarking.processes import pool
from portakern.benchmarking.run import Plan, visit
from portakern.benchmarking.suites import TimedCase
from portakern.core import registry
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

    Contenders of other libraries than the subject's are not visited: a compiler that times what it compiles, as XLA
    does, would choose by what other processes do meanwhile.
    """
    framework = plan.subject.framework
    others = [b.name for b in plan.against if registry.known(b) and b.framework == framework]
    if jobs < 1 or not registry.known(plan.subject):
        return 0
    visited = 0
    with pool(jobs, ALONE) as processes:
        waiting = [processes.submit(_visit, plan.subject.name, others, plan.device, case) for case in plan.cases]
        with suppress(TimeoutError):
            for future in as_completed(waiting, timeout=seconds):
                visited += future.exception() is None
                done()
    return visited


def _visit(subject: str, against: list[str], device: str | None, case: TimedCase) -> None:
    plan = Plan([case], registry.backend(subject), [registry.backend(n) for n in against], device)
    visit(plan, case)
