"""Work that other processes do for a case before it is timed.

They compute expected results (:func:`references`): a sum over all rows of a large call cannot be compared in part, and
the oracle takes longer for it than all timing. They also run every case once (:func:`warm_up`), the most important
first, so that the timing process finds compiled code in the compilers' caches on disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from portakern.core import registry
from portakern.core.framework import host_framework
from portakern.core.gradients import wiring
from portakern.core.targets import Target
from portakern.files import cache_folder
from portakern.processes import SHARING, pool
from portakern.tools.bench.inputs import for_gradient, make
from portakern.tools.bench.lock import DeviceLock
from portakern.tools.bench.plan import BenchPlan
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.trial import FIRST_CALL, Visit, visit
from portakern.tools.bench.verdicts import Expected, Judge

__all__ = ["ENVIRONMENT", "WORKERS", "Background", "WarmUp", "references", "set_environment", "shared", "warm_up"]

T = TypeVar("T")

WORKERS = 2
"""Processes that time: while one has the device, the others stand still, so that more have ever less to do."""

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


def set_environment() -> None:
    """Have what a process that times is to have, before it loads a library."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


AHEAD = {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
"""What else a process that compiles ahead is to have: one core, and memory that it does not keep. That takes time where
nothing is timed."""

MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"

NICE = 5
"""By how much what compiles ahead leaves the cores to what times."""


class Background(Generic[T]):
    """The futures of cases that other processes work on, by the identity of the case. A case without a future has no
    such work."""

    def __init__(self, futures: Mapping[int, Future[T]] | None = None) -> None:
        self._futures = dict(futures or {})

    def is_ready(self, case: TimedCase) -> bool:
        """Whether all that is done of a case was done."""
        future = self._futures.get(id(case))
        return future is None or future.done()

    def pending(self, cases: Sequence[TimedCase]) -> list[Future[Any]]:
        """What is still to be done of cases."""
        return [self._futures[id(c)] for c in cases if not self.is_ready(c)]

    def take(self, case: TimedCase) -> T | None:
        """What was done of a case, once. What nobody has begun with is left to whoever times the case."""
        future = self._futures.pop(id(case), None)
        if future is None or future.cancel() or not future.done():
            return None
        with suppress(Exception):  # what went wrong there goes wrong here, where it is told
            return future.result()
        return None


class WarmUp(Background[Visit]):
    """First runs ("visits") of cases in other processes, which fill the compilers' caches; without processes there are
    none.

    Attributes:
      processes: those that visit; device: what they share with those that time. visited: names of the backends whose
      calls are visited. longest: seconds that any case is waited for.
    """

    def __init__(
        self,
        futures: Mapping[int, Future[Visit]] | None = None,
        processes: ProcessPoolExecutor | None = None,
        device: DeviceLock | None = None,
        visited: frozenset[str] = frozenset(),
        longest: float = 0.0,
    ) -> None:
        super().__init__(futures)
        self.processes, self.device, self.visited, self.longest = processes, device, visited, longest

    def end(self) -> None:
        """Let the processes go when there is nothing left to visit: each holds memory of the device."""
        if self.processes is not None and all(f.done() for f in self._futures.values()):
            if self.device is not None:
                self.device.forget()
            self.processes.shutdown(wait=False)


def shared(several: int) -> dict[str, str]:
    """What each of several processes that time on one device is to have: its share of what one might keep."""
    return {MEMORY: str(float(os.environ.get(MEMORY, ENVIRONMENT[MEMORY])) / several)}


@contextmanager
def warm_up(plan: BenchPlan, jobs: int) -> Iterator[WarmUp]:
    """Visit the plan's cases with ``jobs`` processes, which stand still while a clock is read, and end with the
    context.

    Visited are the subjects, and the peers in the first subject's library. Peers in other libraries are not: a compiler
    that times what it compiles, as XLA does, would choose by what other processes do meanwhile. They are compiled when
    they are timed, while the others stand still. Kernels of a subject leave nothing to a library's compiler to choose.
    """
    others = [b for b in (*plan.subjects[1:], *plan.against) if registry.known(b)]
    others = [b for b in others if b in plan.subjects or b.framework == plan.lead.framework]
    if jobs < 1 or not registry.known(plan.lead):
        yield WarmUp()
        return
    alike = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    device = DeviceLock(WORKERS, jobs)
    with pool(jobs, {**alike, **AHEAD}, NICE, device.join) as processes:
        names = [b.name for b in others]
        futures = {id(c): processes.submit(_visit, plan.lead.name, names, plan.device, c) for c in plan.cases}
        yield WarmUp(futures, processes, device, frozenset((plan.lead.name, *names)), 2 * FIRST_CALL)


def _visit(lead: str, others: list[str], device: str | None, case: TimedCase) -> Visit:
    plan = BenchPlan([case], [registry.backend(lead)], [registry.backend(n) for n in others], device)
    return visit(plan, case)


@contextmanager
def references(cases: Sequence[TimedCase], target: Target, jobs: int) -> Iterator[Background[list[Expected]]]:
    """Compute with ``jobs`` processes what is expected on a target: of calls whose arrays follow from a seed, which
    excludes gradients that need what a forward op saved (who visits them learns that). The processes leave the cores to
    what compiles and times meanwhile, and end with the context."""
    able = [c for c in cases if not (c.gradient and wiring(c.forward).outputs)] if jobs else []
    if not able:
        yield Background()
        return
    with pool(jobs, {"OMP_NUM_THREADS": "1"}, nice=10) as others:
        yield Background({id(c): others.submit(_expected, c, target) for c in able})


def _expected(case: TimedCase, target: Target) -> list[Expected]:
    """The pieces of what a case gives on a target, from arrays on the host."""
    host = host_framework()
    device: Any = host.devices()[0]
    inputs = make(case, host, device)
    judge = Judge(for_gradient(inputs, {}) if case.gradient else inputs)
    return judge.expect(target, False)
