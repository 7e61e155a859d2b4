"""The kernels of many calls, compiled beside each other before the first of them: :func:`build_kernels`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from portakern.core import registry, targets
from portakern.core.backend import Implementation
from portakern.core.call import Call
from portakern.core.dispatch import Choice, choose, find_routes, gradient_choice, taking
from portakern.core.framework import Framework
from portakern.core.gradients import wiring
from portakern.core.machine_code import PlannedKernel
from portakern.core.observe import log
from portakern.core.targets import Target
from portakern.errors import SpecError, UnsupportedError
from portakern.progress import Line
from portakern.spec import Spec
from portakern.tools.compile import pool
from portakern.tools.compile.abstract import (
    CallSignature,
    bind_signature,
    gradient_signature,
    signature_of,
    training_signature,
)
from portakern.tools.compile.build import Build
from portakern.tools.compile.pool import Job
from portakern.tools.compile.worker import make

__all__ = ["Warmed", "build_kernels"]

TIMEOUT = 900.0  # seconds that one kernel may take


@dataclass(frozen=True)
class Warmed:
    """What :func:`portakern.warm` did; ``print`` shows it.

    Attributes:
      calls: the different calls, of which gradients are calls of their own. kernels: theirs, each once.
      compiled: the kernels that were not in the cache, and are now. seconds: all of it.
      failures: each call that was refused, or of which a kernel was not compiled, and why. The same call made for real
        raises an error.
    """

    calls: int
    kernels: int
    compiled: int
    seconds: float
    failures: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        calls, kernels = (f"{n} {what}{'s' * (n != 1)}" for n, what in ((self.calls, "call"), (self.kernels, "kernel")))
        others = f"{self.kernels - self.compiled} in the cache{' or failed' * bool(self.failures)}"
        lines = [f"{calls}, {kernels}: {self.compiled} compiled, {others}, {self.seconds:.1f} s"]
        return "\n".join(lines + [f"  not compiled: {call}: {why}" for call, why in self.failures])


class _Request(NamedTuple):
    """A call whose kernels are wanted, without its arrays, for a target."""

    spec: Spec[Any]
    signature: CallSignature
    choice: Choice
    framework: Framework
    target: Target

    @property
    def key(self) -> str:
        return json.dumps([self.spec.name, self.signature, str(self.choice), str(self.target)], sort_keys=True)


def build_kernels(
    calls: Iterable[tuple[Call, Choice]],
    *,
    train: bool,
    target: str | None = None,
    processes: int | None = None,
    progress: bool | None = None,
) -> Warmed:
    """Compile what bound calls launch; see :func:`portakern.warm`. The calls' arrays may be abstract."""
    start = time.perf_counter()
    processes = _checked(processes)
    failures: list[tuple[str, str]] = []
    requests: dict[str, _Request] = {}
    for call, choice in calls:
        try:
            requests |= {r.key: r for r in _requests(call, choice, train, target)}
        except UnsupportedError as e:
            failures.append((repr(call), str(e)))
    bound = [(bind_signature(r.spec, r.signature, r.framework, r.target), r) for r in requests.values()]
    found: dict[str, tuple[Job, PlannedKernel, str]] = {}
    for call, request in sorted(bound, key=lambda pair: -pair[0].flops):  # kernels of products take longest to compile
        try:
            for job, kernel in _planned(call, request):
                found.setdefault(kernel.key, (job, kernel, repr(call)))
        except UnsupportedError as e:
            failures.append((repr(call), str(e).removeprefix(f"{call!r} ")))
    missing = {id(job): (kernel, text) for job, kernel, text in found.values() if not kernel.is_cached}
    compiled = 0
    shown = sys.stderr.isatty() if progress is None else progress
    with Line("compiling", len(missing), "kernels") if shown else nullcontext() as line:
        jobs = [job for job, kernel, _ in found.values() if not kernel.is_cached]
        for done, (job, built) in enumerate(_compiled(jobs, processes), 1):
            if line is not None:
                line(done)
            kernel, text = missing[id(job)]
            compiled += built.ok and bool(kernel.name)
            if not built.ok:
                failures.append((text, f"{kernel.name or 'the driver'}: {built.reason}"))
    for text, why in failures:
        log.warning("portakern: warm: %s is not compiled: %s", text, why)
    number = sum(bool(kernel.name) for _, kernel, _ in found.values())
    return Warmed(len(requests), number, compiled, round(time.perf_counter() - start, 2), tuple(failures))


def _checked(processes: int | None) -> int:
    if processes is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if type(processes) is not int or processes < 1:
        raise SpecError(
            f"warm: processes is {processes!r}; expected a whole number of at least 1, or None for all cores"
        )
    return processes


def _requests(call: Call, choice: Choice, train: bool, target: str | None) -> Iterator[_Request]:
    """A call, as it trains where that is asked for, and the call of its gradients."""
    spec, framework = call.spec, call.framework
    on = targets.find(target).target if target else framework.target(call.device)
    if on.platform == "meta":
        raise SpecError(
            f"warm: {call!r} is on arrays without a device; pass target=, one of {', '.join(targets.HARDWARE)}, or "
            "arrays of the device"
        )
    signature = signature_of(call)
    if not (train and spec.vjp):
        yield _Request(spec, signature, choice, framework, on)
        return
    wanted = [n for n, a in call.arrays.items() if a is not None and framework.wants_gradient(a)]
    gradients, vjp = gradient_signature(spec, call, wanted), wiring(spec).vjp
    backend = choice.backend or choose(spec, framework, on)
    yield _Request(spec, training_signature(spec, signature) or signature, choice, framework, on)
    if gradients is not None:
        yield _Request(vjp, gradients, gradient_choice(backend, vjp, choice), framework, on)


def _planned(call: Call, request: _Request) -> Iterator[tuple[Job, PlannedKernel]]:
    """The kernels of a call.

    Raises:
      UnsupportedError: the call is refused, or is of a library or backend whose kernels are not kept.
    """
    framework, target, choice = request.framework, request.target, request.choice
    if framework.compiles_ahead:
        raise UnsupportedError(f"{framework.title} compiles its own programs: {framework.compiles_ahead}")
    if call.degenerate:
        return
    backend = choice.backend or choose(call.spec, framework, target)
    if not backend.oracle and backend.framework != framework.name:
        raise UnsupportedError(f"{backend.name} takes arrays of {backend.framework}: pass such arrays")
    if backend.oracle or not any(not interpreted for _, interpreted in backend.families_for(target, choice.variant)):
        raise UnsupportedError(f"{backend.name} compiles nothing for {target}: pass target=, such as target='sm_90'")
    route, resolved = taking(find_routes(backend, call, target, choice.variant), call, choice.tiling)
    impl, config = route.impl.resolve(call, resolved.tiling)
    hardware = targets.find(target.arch)
    for kernel in _planner(impl, hardware)(impl, call, config):
        yield Job(call.spec, backend, impl.family, hardware, request.signature, kernel=kernel.source), kernel


def _planner(impl: Implementation, hardware: targets.Hardware) -> Any:
    compiler: Any = impl.family.load_compiler() if impl.family.compiler else None
    missing = None if compiler is None else compiler.unavailable(hardware)
    if missing:
        raise UnsupportedError(missing)
    if not hasattr(compiler, "planned"):
        raise UnsupportedError(f"{impl.backend.name} keeps no machine code where a later launch finds it")
    return compiler.planned


def _compiled(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, Build]]:
    """Jobs as they end; those of a backend that only this process knows are done here."""
    others = [job for job in jobs if registry.importable(job.spec, job.backend)]
    for job in jobs:
        if job not in others:
            yield job, make(job.backend, job.family, job.hardware, job.spec.name, job.kernel)
    if others:
        yield from pool.run(others, processes, TIMEOUT)
