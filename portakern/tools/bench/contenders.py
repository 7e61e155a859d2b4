"""The contenders of a call: the subject's variants, and the peers that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from portakern.api import op
from portakern.core import registry
from portakern.core.backend import Backend
from portakern.core.call import Call
from portakern.core.dispatch import pick, routes, to_framework
from portakern.core.framework import Framework, frameworks
from portakern.core.instruments import Instruments, Recorder
from portakern.core.targets import HOST, Target
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.spec import Spec
from portakern.testing import backend_variants
from portakern.tools.bench.inputs import Inputs

__all__ = [
    "CallNotTaken",
    "Contender",
    "ReadyCall",
    "UserCall",
    "absent",
    "against_named",
    "by_platform",
    "contenders",
    "here",
    "one_clock",
    "ready",
]  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """A variant of an op on a backend. ``subject``: it is measured; others are what it is compared with."""

    backend: Backend
    variant: str | None
    subject: bool

    @property
    def name(self) -> str:
        return f"{self.backend.name}/{self.variant}" if self.variant else self.backend.name


class CallNotTaken(Exception):
    """A contender that does not take a call; the message says why."""


@dataclass(frozen=True)
class ReadyCall:
    """A contender with the arrays of a call on its device.

    Attributes:
      run: the call, without arguments; what it returns are the wanted outputs.
      call: on the contender's own arrays; tiling: with which tiles it runs.
    """

    contender: Contender
    run: Callable[[], tuple[Any, ...]]
    call: Call
    tiling: Mapping[str, int]

    @property
    def framework(self) -> Framework:
        return self.call.framework

    @property
    def instruments(self) -> Instruments:
        return self.framework.instruments(self.call.device)


ELSE = "--device cpu times kernels by the host's clock on CPU arrays, in their interpreters"


def here(b: Backend, device: str | None) -> tuple[Framework, Any, Target]:
    """Where a backend is measured: the best device here that it compiles for, or ``device``, a platform.

    Raises:
      UnavailableError: it is not installed. UnsupportedError: no device here that it compiles for, and none was named.
    """
    b.check_available()
    framework = frameworks()[b.framework]
    framework.load()
    for d in framework.devices():
        target = framework.target(d)
        compiled = any(not interpreted for _, interpreted in b.families_for(target))
        if device == target.platform and b.families_for(target):
            return framework, d, target
        if device is None and compiled and target.platform != "cpu":
            return framework, d, target
    asked = device or "accelerator"
    raise UnsupportedError(
        f"bench: backend {b.name!r} serves no {asked} here" + (f"; {ELSE}" if device != HOST.platform else "")
    )


def one_clock(backends: Iterable[Backend], device: str | None) -> Recorder | None:
    """What tells of the kernels of all these backends, if the library of any of them has that: times of two clocks are
    not to be compared where they differ by what passes around a kernel."""
    for b in backends:
        try:
            framework, found, _ = here(b, device)
        except (UnavailableError, UnsupportedError):
            continue
        if recorder := framework.instruments(found).recorder:
            return recorder
    return None


def contenders(
    spec: Spec[Any], subjects: Sequence[Backend], against: Sequence[Backend], target: Target
) -> list[Contender]:
    """Everybody who has the op and can run here, the subjects' variants first."""
    found = []
    for b in (*subjects, *against):
        variants = _variants(spec, b, target)
        several = len(variants) > 1
        found += [Contender(b, v if several else None, b in subjects) for v in variants]
    return found


def _variants(spec: Spec[Any], b: Backend, target: Target) -> Sequence[str | None]:
    """Those that may serve a call that names none: results whose bits change from run to run are nobody's figures who
    did not ask for them. None if it is not installed, has no such op, or nothing for this platform."""
    if b.unavailable():
        return ()
    try:
        names = backend_variants(spec, b, target.platform)
    except (UnavailableError, UnsupportedError):
        return ()
    if len(names) == 1:
        return names
    found = {f.name: b.implementation(spec.name, f) for f in b.families if f.name in names}
    return tuple(n for n in names if (impl := found[n]) is None or not impl.why_not_automatic(None))


def by_platform(subjects: Sequence[Backend], device: str | None) -> list[list[Backend]]:
    """The subjects by the platform that they are measured on, whoever has most ops first: in its library's arrays
    calls are made, and only what it has can be timed."""
    platforms: dict[str, list[tuple[Backend, Target]]] = {}
    for b in subjects:
        target = here(b, device)[2]
        platforms.setdefault(target.platform, []).append((b, target))
    return [
        [b for b, _ in sorted(found, key=lambda x: -_ops(*x))] if len(found) > 1 else [found[0][0]]
        for found in platforms.values()
    ]


def _ops(b: Backend, target: Target) -> int:
    """How many ops a backend has for a target. Every spec is loaded for that."""
    return sum(bool(_variants(registry.find_spec(name), b, target)) for name in registry.loadable())


def absent(against: Sequence[Backend]) -> dict[str, str]:
    """Name -> why it takes no part, of those that cannot run here."""
    return {b.name: reason for b in against if (reason := b.unavailable())}


def against_named(names: Sequence[str] | None) -> list[Backend]:
    """The backends and peers of these names; every peer when none is named."""
    return [registry.backend(n) for n in names] if names else list(registry.peers().values())


def ready(contender: Contender, inputs: Inputs) -> ReadyCall:
    """The contender with the call in its own library's arrays, and all prepared that is not the op's own work.

    Raises:
      CallNotTaken: it does not take the call.
    """
    b = contender.backend
    chosen = op(inputs.spec, backend=b, variant=contender.variant)
    call = inputs.call
    framework = frameworks()[b.framework]
    framework.load()
    try:
        candidates = routes(call, chosen.choice) or ()
        if framework is not call.framework:
            call = _crossed(inputs, framework)
        call = call.replace(target=candidates[0].target, interpret=candidates[0].interpret)
        route, tiling = pick(candidates, call, {})
    except (UnsupportedError, UnavailableError, SpecError) as e:
        raise CallNotTaken(str(e).partition("cannot: ")[2] or str(e)) from e
    if contender.variant and (serves := route.impl.family.name) != contender.variant:
        raise CallNotTaken(f"it delegates this call to {serves!r}, which has its own row")
    prepared = None if call.over else getattr(route.impl.fn, "prepared", None)
    return ReadyCall(contender, prepared(call) if prepared else UserCall(chosen, call), call, dict(tiling))


def _crossed(inputs: Inputs, framework: Framework) -> Call:
    """The call in another library's arrays; they cross before anything is timed."""
    crossed = to_framework(inputs.call, framework)
    lead = next(a for a in crossed.arrays.values() if a is not None)
    if inputs.strided and framework.strides(lead) is None:
        raise CallNotTaken(f"this call tests strides, and {framework.title}'s arrays have none")
    return crossed


class UserCall:
    """A call of an op as a user makes it, which returns the wanted outputs.

    Attributes:
      first: the arguments that it was made with, to which nothing is written; arrays: those of the next call, which may
      change between calls. over: names of those that it writes over, copies of the first ones.
    """

    def __init__(self, chosen: Any, call: Call) -> None:
        self.chosen, self.over = chosen, call.over
        self.first = {n: a for n, a in call.arrays.items() if a is not None}
        self.arrays = {n: call.framework.copy(a) if n in self.over else a for n, a in self.first.items()}
        self.options: dict[str, Any] = {o.name: call.options[o.name] for o in call.spec.options}
        if self.over:
            self.options["overwrite"] = self.over
        if call.spec.is_vjp:
            self.options["wants"] = call.wants

    def restore(self, instruments: Instruments) -> None:
        """The values that it was made with, where the call before wrote results over them."""
        for name in self.over:
            instruments.put(self.arrays[name], self.first[name])

    def __call__(self) -> tuple[Any, ...]:
        result = self.chosen(**self.arrays, **self.options)
        return tuple(o for o in result if o is not None) if isinstance(result, tuple) else (result,)
