"""Compiling ahead: every case visited once, by many processes at a time, in the order of the cases' importance, so that
whoever times finds compiled code in the compilers' caches on disk. That begins as soon as any case was visited, with
those first that were; the processes go on behind, and stand still while a clock is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from portakern.core import registry
from portakern.files import cache_folder
from portakern.processes import SHARING, pool
from portakern.tools.bench.ahead import Ahead
from portakern.tools.bench.plan import Plan
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.trial import FIRST_CALL, Visit, visit

__all__ = ["ENVIRONMENT", "shared", "warming"]

ENVIRONMENT = {
    **SHARING,  # libraries share a device
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4",  # and JAX keeps what it once had
    "JAX_COMPILATION_CACHE_DIR": str(cache_folder() / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # its own processes take seconds to begin, and minutes to end
    # Triton's own choice, said: Inductor sets another from its first kernel on, and what was compiled before is lost.
    "TRITON_CACHE_DIR": str(Path(os.environ.get("TRITON_HOME", Path.home()), ".triton", "cache")),
}
"""What a process that times is to have in its environment before it loads a library, where its user says nothing."""

AHEAD = {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
"""What else a process that compiles ahead is to have: one core, and memory that it does not keep. That takes time where
nothing is timed."""

MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"

NICE = 5
"""By how much what compiles ahead leaves the cores to what times."""


def shared(several: int) -> dict[str, str]:
    """What each of several processes that time on one device is to have: its share of what one might keep."""
    return {MEMORY: str(float(os.environ.get(MEMORY, ENVIRONMENT[MEMORY])) / several)}


@contextmanager
def warming(plan: Plan, jobs: int) -> Iterator[Ahead]:
    """Visit the plan's cases with ``jobs`` processes, which end with the context.

    Visited are the subjects, and the peers in the first subject's library. Peers in other libraries are not: a compiler
    that times what it compiles, as XLA does, would choose by what other processes do meanwhile. They are compiled when
    they are timed, while the others stand still. Kernels of a subject leave nothing to a library's compiler to choose.
    """
    others = [b for b in (*plan.subjects[1:], *plan.against) if registry.known(b)]
    others = [b for b in others if b in plan.subjects or b.framework == plan.lead.framework]
    if jobs < 1 or not registry.known(plan.lead):
        yield Ahead()
        return
    alike = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    with pool(jobs, {**alike, **AHEAD}, NICE) as processes:
        names = [b.name for b in others]
        futures = {id(c): processes.submit(_visit, plan.lead.name, names, plan.device, c) for c in plan.cases}
        yield Ahead(futures, processes, frozenset((plan.lead.name, *names)), 2 * FIRST_CALL)


def _visit(lead: str, others: list[str], device: str | None, case: TimedCase) -> Visit:
    plan = Plan([case], [registry.backend(lead)], [registry.backend(n) for n in others], device)
    return visit(plan, case)
