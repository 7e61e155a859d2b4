"""Machine code for hardware that is not present: :func:`compile_all` compiles many ops, :func:`lower` one call.

Compilers run in processes of their own (:mod:`portakern.tools.compile.pool`), on arrays without memory. Results are
kept in the user's cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from portakern import results
from portakern.core import registry, targets
from portakern.core.backend import Backend, Family
from portakern.core.call import Call
from portakern.core.dispatch import Choice
from portakern.errors import SpecError, UnsupportedError
from portakern.tools.compile import abstract, cache, pool
from portakern.tools.compile.build import Build
from portakern.tools.compile.pool import Job
from portakern.tools.compile.worker import build

__all__ = ["Build", "compile_all", "jobs_for", "lower", "record"]

TIMEOUT = 900.0  # seconds that one call may take


def jobs_for(
    ops: Sequence[str],
    target_names: Sequence[str],
    dtypes: Sequence[str] | None,
    backend: str | None = None,
    quick: bool = False,
    variant: str | None = None,
    shapes: Sequence[Mapping[str, Any]] = (),
    refused: Callable[[Job, str], None] = lambda job, why: None,
) -> list[Job]:
    """The typical call of each op, in each dtype (None: its usual ones), with every variant of every backend that
    compiles it for each target, and the same call where gradients are wanted of it, if it saves something for them; for
    each of ``shapes`` with these dimensions, options and optional arrays instead. A variant that refuses a
    call which another of its backend takes has none to compile, unless it was named: ``refused`` is told of it, and
    why.
    """
    b = None if backend is None else registry.backend(backend)
    hardware = [targets.find(t) for t in target_names]
    found = abstract.cells(list(ops), hardware, dtypes, b, variant)
    jobs = [
        Job(spec, of, family, h, form, quick=quick)
        for spec, of, family, h, dtype in found
        for shape in shapes or [{}]
        for typical in [abstract.typical_signature(spec, dtype, shape)]
        for form in (typical, abstract.training_signature(spec, typical))
        if form is not None
    ]
    return jobs if variant else _served(jobs, refused)


def _served(jobs: Sequence[Job], refused: Callable[[Job, str], None]) -> list[Job]:
    """Without those whose variant refuses what another takes for whoever names none."""
    alike: dict[tuple[str, str, str, str], list[Job]] = {}
    for job in jobs:
        alike.setdefault((job.spec.name, job.backend.name, job.hardware.name, repr(job.signature)), []).append(job)
    left_out: set[int] = set()
    for several in alike.values():
        if len(several) == 1:
            continue
        reasons = {id(job): _refusal(job) for job in several}
        if any(reasons[id(job)] is None and _taken_unasked(job) for job in several):
            for job in several:
                if (why := reasons[id(job)]) is not None:
                    left_out.add(id(job))
                    refused(job, why)
    return [job for job in jobs if id(job) not in left_out]


def _refusal(job: Job) -> str | None:
    """Why a job's variant refuses its call. Whatever else goes wrong is told by who compiles it."""
    try:
        impl = job.backend.implementation(job.spec.name, job.family)
        if impl is not None:
            abstract.abstract_call(job.spec, impl, job.signature, job.hardware, job.tiling)
    except UnsupportedError as e:
        return str(e)
    except Exception:
        return None
    return None


def _taken_unasked(job: Job) -> bool:
    """Whether a job's variant serves who names none."""
    with contextlib.suppress(Exception):
        impl = job.backend.implementation(job.spec.name, job.family)
        return impl is not None and not impl.why_not_automatic(None)
    return False


def compile_all(
    jobs: Sequence[Job],
    processes: int = 1,
    *,
    fresh: bool = False,
    timeout: float = TIMEOUT,
    done: Callable[[Build], None] = lambda built: None,
) -> list[Build]:
    """Compile the jobs, in their order. ``fresh``: also those whose result is kept; ``done`` is told of each as it
    ends.
    """
    results: dict[Job, Build] = {}
    cache.look_again()
    names = {id(job): cache.key(job) for job in jobs}
    for job in jobs:
        kept = None if fresh else cache.find(names[id(job)])
        if kept is not None:
            results[job] = kept
            done(kept)
    for job, built in pool.run([job for job in jobs if job not in results], processes, timeout):
        cache.keep(names[id(job)], built)
        results[job] = built
        done(built)
    return [results[job] for job in jobs]


def record(built: Sequence[Build], command: str, seconds: float) -> dict[str, Any]:
    """Results as a file of results keeps them. ``limits``: bytes that a program has on chip, by target and memory;
    ``scoped``: those that it gets unasked.
    """
    hardware = [targets.find(name) for name in dict.fromkeys(b.target for b in built)]
    limits = {
        h.name: {**h.on_chip, **{f"{memory} scoped": size for memory, size in h.scoped.items()}} for h in hardware
    }
    counts = {"wall_seconds": round(seconds, 1), "ok": sum(b.ok for b in built), "of": len(built)}
    return results.record(
        "compile-matrix",
        [b.to_dict() for b in built],
        command=command,
        device=results.HOST_CPU,
        **counts,
        limits=limits,
    )


def lower(
    call: Call, choice: Choice, target: str | None = None, *, cycles: bool = False, timeout: float = TIMEOUT
) -> Build:
    """Compile one bound call for a target, by default that of its arrays, with the assembly; with ``cycles`` the
    compiler's own estimate of a run too, where it has one, which takes longer.

    An op or backend that only this process knows is compiled in this process.

    Raises:
      SpecError: the target is unknown, or is a processor.
      UnsupportedError: no backend compiles the op for the target.
    """
    name = target or call.framework.target(call.device).arch
    if not name:
        raise SpecError(
            f"{call.spec.name}: the arrays are on {call.framework.target(call.device)}; name a target: one of "
            f"{', '.join(targets.HARDWARE)}"
        )
    hardware = targets.find(name)
    found = abstract.compilers(call.spec.name, hardware, choice.backend, choice.variant)
    if not found:
        raise UnsupportedError(
            "; ".join(
                (
                    f"{call.spec.name} on {hardware.target}: no backend compiles it ahead of time",
                    *([f"{choice.backend.name!r} was named"] if choice.backend else []),
                    *abstract.uncompiled([hardware], choice.backend),
                )
            )
        )
    if call.degenerate:
        raise UnsupportedError(f"{call!r}: an extent is 0, so that no kernel runs")
    form = abstract.signature_of(call)
    b, family = _first_that_takes(call, form, choice, found, hardware)
    job = Job(call.spec, b, family, hardware, form, choice.tiling, quick=not cycles, assembly=True)
    if registry.importable(call.spec, b):
        ((_, built),) = pool.run([job], 1, timeout)
        return built
    return build(call.spec, b, family, hardware, form, choice.tiling)


def _first_that_takes(
    call: Call,
    signature: abstract.CallSignature,
    choice: Choice,
    found: list[tuple[Backend, Family]],
    hardware: targets.Hardware,
) -> tuple[Backend, Family]:
    """Of the variants of the first backend the one that would serve the call: the last, whose refusal is then told, if
    none would.
    """
    mine = [(x, x[0].implementation(call.spec.name, x[1])) for x in found if x[0] is found[0][0]]
    asked = [(x, impl) for x, impl in mine if impl is None or not impl.why_not_automatic(choice.variant)]
    *before, (last, _) = asked or mine
    takes = (
        x for x, impl in before if impl and _refusal(Job(call.spec, *x, hardware, signature, choice.tiling)) is None
    )
    return next(takes, last)
