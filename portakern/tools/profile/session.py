"""The profile of a call: measured on a device here, or the part of it that needs no device."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from portakern import sources
from portakern.core import registry, targets
from portakern.core.call import Call
from portakern.core.dispatch import Choice
from portakern.core.framework import frameworks
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.spec.dtypes import DTYPES
from portakern.tools.bench import roof
from portakern.tools.bench.contenders import ReadyCall
from portakern.tools.compile import abstract
from portakern.tools.compile.build import Build
from portakern.tools.compile.matrix import lower
from portakern.tools.profile import counters
from portakern.tools.profile.facts import COMPILER, NCU, ROOF, SPEC, TIMES, Fact, Profiled, kernels_of, whole_of
from portakern.tools.profile.subject import ProfileRequest, command

__all__ = ["CallProfile", "ahead", "here", "looked_at"]

SHEET = "data sheet"
"""The maker's figures, where nothing is measured."""

SAMPLES = 5
"""Calls that are looked at for the kernels' times, of which the median counts."""

ROUNDS = 10
"""Samples of the roof."""

COUNTING = 240.0
"""Seconds that counting may take, which makes each launch many times."""


@dataclass
class CallProfile:
    """The profile of a call and of each of its kernels.

    Attributes:
      facts: of the whole call. missing: a source of facts -> why it has none.
    """

    op: str
    dtype: str
    call: str
    target: targets.Target
    backend: str
    variant: str | None
    kernels: list[Profiled]
    facts: list[Fact] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """A row a kernel, as results keep it."""
        backend = registry.backend(self.backend)
        hashed = sources.fingerprint(self.op, backend, self.variant, self.target)
        whole = {
            "op": self.op, "dtype": self.dtype, "call": self.call, "target": str(self.target), "backend": self.backend,
            "variant": self.variant, "call_facts": [fact._asdict() for fact in self.facts], "missing": self.missing,
            "commit": sources.commit(), "sources": hashed,
        }  # fmt: skip
        return [{**whole, **kernel.to_dict()} for kernel in self.kernels]


def ahead(request: ProfileRequest, target: str) -> CallProfile:
    """What a compiler and the spec say of a call on a chip that need not be here.

    Raises:
      SpecError: the target is unknown, or the op has no such call. UnsupportedError: no backend compiles it for that.
    """
    hardware, case = targets.find(target), request.case
    named = registry.backend(request.backend) if request.backend else None
    found = abstract.compilers(request.op, hardware, named, request.variant)
    if not found:
        who = "".join(f"; {why}" for why in abstract.uncompiled([hardware], named))
        who = f"; {request.backend!r} was named{who}" if named else who
        raise UnsupportedError(f"profile: no backend compiles {request.op} for {hardware.name} ahead of time{who}")
    framework = frameworks()[found[0][0].framework]
    call = abstract.bind_signature(registry.find_spec(request.op), case.signature, framework, hardware.target)
    built = lower(call, Choice(named, request.variant), target)
    if not built.kernels:
        raise UnsupportedError(f"profile: {call!r} for {hardware.name}: {built.reason}")
    kernels = kernels_of(built.kernels, [], [], None, hardware)
    facts = [*_declared(call), *_least(call, hardware)]
    why = "nothing was run: leave --target out on a machine with the GPU"
    return CallProfile(request.op, call.dtype, repr(call), hardware.target, built.backend, built.variant, kernels,
                   facts, dict.fromkeys((TIMES, ROOF, NCU), why))  # fmt: skip


def here(request: ProfileRequest, count: bool = True) -> CallProfile:
    """The call on the best device here that its backend compiles for: times, roof, the compiler's report, and, if
    ``count``, counters.

    Raises:
      UnsupportedError, UnavailableError: there is no such device, or the call is refused.
    """
    entry, target = request.made()
    return looked_at(request, entry, target, count)


def looked_at(request: ProfileRequest, entry: ReadyCall, target: targets.Target, count: bool) -> CallProfile:
    """The profile of a call that was made ready on a device."""
    call, instruments = _with_integers(entry.call), entry.instruments
    missing: dict[str, str] = {}
    samples = [s for s in (instruments.kernels(entry.run) for _ in range(SAMPLES)) if s]
    if not samples:
        missing[TIMES] = f"{entry.framework.title} reports no kernel times on {target}"
    ceiling = roof.ceiling(call, roof.measure(instruments, instruments.recorder, ROUNDS))
    built = _report(entry, target, request, missing)
    instruments.release()
    counted = _counted(request, target, missing) if count else []
    hardware = targets.family(target.arch)
    kernels = kernels_of(built.kernels if built else [], samples, counted, ceiling, hardware)
    whole = whole_of(samples)
    facts = _declared(call)
    if ceiling:
        facts.append(Fact(f"minimum time, by {ceiling.what}", ceiling.us, "us", ROOF))
    if whole:
        facts.append(Fact("time of its kernels", whole, "us", TIMES))
    if ceiling and whole:
        facts.append(Fact("share of the roof", 100 * ceiling.us / whole, "%", ROOF))
    variant = built.variant if built else request.variant
    return CallProfile(request.op, call.dtype, repr(call), target, entry.contender.backend.name, variant, kernels,
                   facts, missing)  # fmt: skip


def _counted(request: ProfileRequest, target: targets.Target, missing: dict[str, str]) -> list[counters.Counted]:
    """The counters; why there are none goes to ``missing``."""
    ncu = counters.find()
    try:
        if target.platform != counters.PLATFORM:
            raise counters.NotCounted(f"it reads NVIDIA's GPUs, and this is {target}")
        if ncu is None:
            raise counters.NotCounted(counters.MISSING)
        return counters.collect(ncu, command(request), COUNTING, os.environ)
    except counters.NotCounted as e:
        missing[NCU] = str(e)
        return []


def _report(entry: ReadyCall, target: targets.Target, request: ProfileRequest, missing: dict[str, str]) -> Build | None:
    choice = Choice(entry.contender.backend, request.variant, dict(entry.tiling))
    try:
        built = lower(entry.call, choice, target.arch)
    except (SpecError, UnsupportedError, UnavailableError) as e:
        missing[COMPILER] = str(e)
        return None
    if not built.kernels:
        missing[COMPILER] = str(built.reason)
    return built


def _with_integers(call: Call) -> Call:
    """The call with the values of its integer arrays on the host, from which a spec may count operations."""
    arrays = {n: a for n, a in call.arrays.items() if a is not None and not DTYPES[call.dtype_of(n)].floating}
    return call.replace(arrays={**call.arrays, **{n: call.framework.to_numpy(a) for n, a in arrays.items()}})


def _declared(call: Call) -> list[Fact]:
    """What the spec says that a call takes: the least bytes, and operations."""
    moved, flops = roof.moved(call), float(call.flops)
    return [
        Fact("bytes, each array once", moved, "bytes", SPEC),
        Fact("operations", flops, "flop", SPEC),
        Fact("intensity", flops / moved if moved else 0.0, "flop a byte", SPEC),
    ]


def _least(call: Call, hardware: targets.Hardware) -> list[Fact]:
    """The least time by the maker's data sheet, which no program reaches."""
    found = {"device memory": _over(roof.moved(call), hardware.bandwidth)}
    found[f"products in {call.dtype}"] = _over(call.flops, hardware.flops.get(call.dtype))
    return [Fact(f"minimum time, by {what}", us, "us", SHEET) for what, us in found.items() if us]


def _over(work: float, rate: float | None) -> float | None:
    return 1e6 * work / rate if rate else None
