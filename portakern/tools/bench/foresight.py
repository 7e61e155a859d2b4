"""What is expected of calls, computed ahead by other processes: a sum over all rows of a large call cannot be compared
in part, and takes the oracle longer than all that is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from portakern.core.framework import host_framework
from portakern.core.gradients import wiring
from portakern.core.targets import Target
from portakern.processes import pool
from portakern.tools.bench.inputs import Inputs, for_gradient, make
from portakern.tools.bench.others import Others
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.verdicts import Expected, Judge, Known

__all__ = ["Foresight", "foreseeing"]


class Foresight(Others[list[Expected]]):
    """What other processes compute of cases, or nothing."""

    def __init__(self, target: Target, futures: dict[int, Future[list[Expected]]]) -> None:
        super().__init__(futures)
        self.target = target

    def judge(self, case: TimedCase, inputs: Inputs) -> Judge:
        """A judge of a case that knows what was computed of it."""
        known: Known = {}
        if (found := self.expected(case)) is not None:
            known[self.target, False] = found
        return Judge(inputs, known=known)

    def expected(self, case: TimedCase) -> list[Expected] | None:
        """What was computed of a case, once. What nobody has begun with is left to whoever judges it."""
        future = self._futures.pop(id(case), None)
        if future is None or future.cancel():
            return None
        with suppress(Exception):  # what went wrong there goes wrong here, where it is told
            return future.result()
        return None


@contextmanager
def foreseeing(cases: Sequence[TimedCase], target: Target, jobs: int) -> Iterator[Foresight]:
    """Compute ahead with ``jobs`` processes what is expected on a target: of calls whose arrays follow from a seed,
    which excludes gradients that need what a forward op saved (who compiles them ahead learns that). The processes
    leave the cores to what compiles and times meanwhile, and end with the context."""
    able = [c for c in cases if not (c.gradient and wiring(c.forward).outputs)] if jobs else []
    if not able:
        yield Foresight(target, {})
        return
    with pool(jobs, {"OMP_NUM_THREADS": "1"}, nice=10) as others:
        yield Foresight(target, {id(c): others.submit(expected, c, target) for c in able})


def expected(case: TimedCase, target: Target) -> list[Expected]:
    """The pieces of what a case gives on a target, from arrays on the host."""
    host = host_framework()
    device: Any = host.devices()[0]
    inputs = make(case, host, device)
    judge = Judge(for_gradient(inputs, {}) if case.gradient else inputs)
    return judge.expect(target, False)
