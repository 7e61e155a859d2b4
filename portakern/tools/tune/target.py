"""The target of a tuning: a variant of an op on a backend, on a device that is present or for a chip that is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from portakern.core import registry, targets
from portakern.core.backend import Backend, Family, Implementation
from portakern.core.framework import Framework, frameworks
from portakern.core.targets import HOST, Hardware, Target
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.install import installed
from portakern.spec import Spec
from portakern.tools.compile import abstract

__all__ = ["TuneTarget", "tune_targets"]


@dataclass(frozen=True, eq=False)
class TuneTarget:
    """Where an implementation runs.

    Attributes:
      impl: the implementation; framework: whose arrays it takes. target: what it is tuned for.
      device: that, in the framework's terms; None where it is not here. interpret: it runs in an interpreter.
      hardware: what is known of the target; None for a host.
    """

    impl: Implementation
    framework: Framework
    target: Target
    device: Any
    interpret: bool
    hardware: Hardware | None

    @property
    def backend(self) -> Backend:
        return self.impl.backend

    @property
    def family(self) -> Family:
        return self.impl.family

    @property
    def is_here(self) -> bool:
        return self.device is not None

    @property
    def chip(self) -> str:
        """What is measured, by its maker's name; of a target that is not here its name."""
        names = self.framework.accelerator_names() if self.is_here and self.target.platform != HOST.platform else []
        return names[0] if names else str(self.target)

    def versions(self) -> dict[str, str]:
        """The packages on which the machine code depends, with their versions."""
        if self.family.compiler and self.hardware is not None:
            found = self.family.load_compiler().versions(self.hardware)
        else:
            found = {name: version for name in self.backend.requires if (version := installed(name))}
        return {name: version.partition("+")[0] for name, version in found.items()}


def tune_targets(spec: Spec[Any], target: str | None, backend: str | None, variant: str | None) -> list[TuneTarget]:
    """The variants of an op that are to be tuned: of the backend that is named, else of portakern's own for the target.

    ``target``: an architecture, a platform, or None for the best device here.

    Raises:
      SpecError: an unknown target or variant. UnsupportedError: nothing of the op can be tuned there.
      UnavailableError: the target is not here, and neither is a compiler for it.
    """
    among = [registry.backend(backend)] if backend else [b for b in registry.backends().values() if b.auto]
    if variant:
        for b in among:
            b.check_variant(variant)
    found = [p for b in among if not b.oracle and not b.unavailable() for p in _targets_of(b, spec, target, variant)]
    lacks = [why for p in found if not p.is_here and (why := _no_compiler(p))]
    if lacks and len(lacks) == len(found):
        raise UnavailableError(f"tune: {'; '.join(dict.fromkeys(lacks))}")
    if target is None:  # of what is here, the accelerators
        found = [p for p in found if p.target.platform != HOST.platform] or (found if backend else [])
    missing = {b.name: why for b in among if (why := b.unavailable())}
    if not found and missing:
        raise UnavailableError(
            f"tune: {'; '.join(f'backend {name!r} cannot run here: {why}' for name, why in missing.items())}"
        )
    if not found:
        who = f"backend {backend!r}" if backend else "no backend of portakern"
        what = f"{spec.name} for {target}" if target else f"{spec.name} for an accelerator of this machine"
        raise UnsupportedError(
            f"tune: {who} {'has no' if backend else 'has'} {what}; name a --target, one of cpu, "
            f"{', '.join(h for h in targets.HARDWARE if h != target)}"
            + "".join(f"; {why}" for why in _later(among, target))
        )
    return found


def _later(among: list[Backend], target: str | None) -> list[str]:
    """What must be installed before more is there to tune for a target that is named."""
    hardware = targets.HARDWARE.get(target or "")
    return [why for b in among for why in abstract.uncompiled([hardware], b)] if hardware else []


def _no_compiler(on: TuneTarget) -> str | None:
    """What must be installed to compile for a target that is not here; None where that is there."""
    assert on.hardware is not None
    return on.family.load_compiler().unavailable(on.hardware)


def _targets_of(b: Backend, spec: Spec[Any], target: str | None, variant: str | None) -> Iterator[TuneTarget]:
    framework = frameworks()[b.framework]
    try:
        framework.load()
    except UnavailableError:
        return
    here = [(d, framework.target(d)) for d in framework.devices()]
    chosen = [(d, t) for d, t in here if target in (None, t.platform, t.arch)]
    for device, at in chosen[:1]:
        for family, interpret in b.families_for(at, variant):
            impl = b.implementation(spec.name, family) if b.module_of(spec.name, family) else None
            if impl is not None and impl.why_not_interpreted(interpret) is None:
                hardware = targets.HARDWARE.get(at.arch) or (targets.family(at.arch) if at.arch else None)
                yield TuneTarget(impl, framework, at, device, interpret, hardware)
    if chosen or target in (None, HOST.platform):
        return
    hardware = _hardware(target)
    for _, family in abstract.compilers(spec.name, hardware, b, variant):
        impl = b.implementation(spec.name, family)
        if impl is not None:
            yield TuneTarget(impl, framework, hardware.target, None, False, hardware)


def _hardware(name: str | None) -> Hardware:
    platforms = {h.platform for h in targets.HARDWARE.values()}
    if name in platforms:
        raise SpecError(f"tune: no {name} device is here; name an architecture: one of {', '.join(targets.HARDWARE)}")
    return targets.find(str(name))
