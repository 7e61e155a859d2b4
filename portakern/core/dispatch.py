"""Dispatch: find the implementation that serves a bound call, and its tiling. No implementation replaces another one
without a message."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from portakern.core import registry
from portakern.core.backend import Backend, Family, Implementation
from portakern.core.cache import BoundedCache
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.core.framework import Framework, convert, frameworks
from portakern.core.observe import say
from portakern.core.signatures import Signature
from portakern.core.targets import HOST, Target
from portakern.core.tilings import Resolved, resolve
from portakern.errors import SpecError, UnsupportedError
from portakern.spec import Spec
from portakern.spec.options import shown

__all__ = [
    "Choice", "Route", "ahead", "choose", "find_routes", "gradient_choice", "has_gradient_alone", "pick", "routes",
    "serving", "taking", "to_framework", "why_not",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Route:
    """The variant that may serve the calls of one framework and device, and its backend."""

    impl: Implementation
    interpret: bool
    target: Target
    framework: Framework
    """The implementation's, or the one in whose programs its kernels are embedded."""
    embedded: bool = False
    run: Callable[[Call, Config], tuple[Any, ...]] = field(init=False)
    """Runs the implementation as its framework does: directly, unless that has a way of its own."""

    def __post_init__(self) -> None:
        direct = type(self.framework).run is Framework.run
        run = self.impl.run if direct else functools.partial(self.framework.run, self.impl)
        object.__setattr__(self, "run", run)


@dataclass(eq=False)
class Choice:
    """The user's choice of an implementation for an op's calls; None where the arrays decide. What is cached for a
    choice does not count in comparisons.

    Attributes:
      backend, variant: the backend, and its variant of the op. tiling: overrides of the tiling.
      spends: arrays that nothing but the call's gradients reads afterwards, which these may overwrite.
      found: cached routes by framework and device, all of one spec; gradients: cached functions for the gradients of
        such calls; plans: cached decisions by signature (:class:`portakern.core.plan.CallPlan`).
    """

    backend: Backend | None = None
    variant: str | None = None
    tiling: Mapping[str, int] = field(default_factory=dict)
    spends: tuple[str, ...] = ()
    found: BoundedCache[tuple[Framework, Any], tuple[Route, ...]] = field(default_factory=BoundedCache, repr=False)
    gradients: BoundedCache[Any, Any] = field(default_factory=BoundedCache, repr=False)
    plans: BoundedCache[Signature, Any] = field(default_factory=BoundedCache, repr=False)

    def _key(self) -> tuple[Any, ...]:
        return self.backend, self.variant, tuple(sorted(self.tiling.items())), self.spends

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Choice) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    @classmethod
    def from_names(cls, spec: Spec[Any], backend: str | Backend | None, variant: str | None, tiling: Any) -> Choice:
        """What the maker of an op named, checked: SpecError for an unknown backend, variant or tile."""
        b = None if backend is None else registry.backend(backend)
        if variant is not None:
            if b is None:
                raise SpecError(f"{spec.name}: variant is {shown(variant)}, but no backend is named; pass backend= too")
            b.check_variant(variant)
        return cls(b, variant, _checked_tiling(spec, tiling or {}, b))


def _checked_tiling(spec: Spec[Any], tiling: Any, backend: Backend | None) -> dict[str, int]:
    """Python integers by name; of a backend's knobs names and values are checked when the implementation is known."""
    if not isinstance(tiling, Mapping):
        example = f"{{{next(iter(spec.tiling), 'name')!r}: 128}}"
        raise SpecError(f"{spec.name}: tiling is {shown(tiling)}; expected a dict from tile name to extent: {example}")
    found = {n: int(v) if hasattr(v, "__index__") and not isinstance(v, bool) else v for n, v in tiling.items()}
    for name, value in found.items():
        if name not in spec.tiling and backend is None:
            raise SpecError(
                f"{spec.name}: tiling has no {name!r}; expected one of {', '.join(spec.tiling)} "
                "(launch knobs need backend=)"
            )
        if name in spec.tiling and value not in spec.tiling[name]:
            values = ", ".join(map(str, spec.tiling[name].values))
            raise SpecError(
                f"{spec.name}: tiling[{name!r}] is {shown(value)}; "
                f"expected one of {values}: leave it out for the default"
            )
    return found


def routes(call: Call, choice: Choice) -> tuple[Route, ...] | None:
    """Who may serve calls like this one, in the order in which they are tried; None while their arrays have no
    device."""
    known = choice.found.get((call.framework, call.device))
    if known is not None:
        return known
    target = call.framework.target(call.device)
    if target.platform == "traced":
        return None
    backend = choice.backend or choose(call.spec, call.framework, target)
    found = find_routes(backend, call, target, choice.variant)
    announce(found[0])
    choice.found[call.framework, call.device] = found
    return found


def choose(spec: Spec[Any], framework: Framework, target: Target) -> Backend:
    """The backend that serves a framework's arrays on a target when none was named; UnsupportedError lists why none
    does.
    """
    known = registry.backends().values()
    for b in known:
        compiled = any(not interpreted for _, interpreted in b.families_for(target))
        if b.auto and b.framework == framework.name and compiled and not b.oracle:
            return b
    if target.platform == "cpu":
        return registry.oracle_backend()
    why = {b.name: why_not(b, spec, framework, target) for b in known}
    reasons = [f"{b.name}: {why[b.name]}" for b in known if not b.oracle and why[b.name]]
    serving = [f"backend={name!r}" for name, reason in why.items() if reason is None]
    raise UnsupportedError(
        f"{spec.name}: no backend serves {framework.name} arrays on {target} by default. {'; '.join(reasons)}. "
        f"Backends that can be named: {', '.join(serving) or 'none'}"
    )


def ahead(spec: Spec[Any], framework: Framework, target: Target, named: Backend | None = None) -> frozenset[str]:
    """The dtypes in which an op is worth putting where a model has its framework's own functions: what the variant that
    serves the target says of itself (:attr:`portakern.core.backend.Implementation.ahead`). Every dtype where nothing is
    compiled, since nobody asks the oracle or an interpreter for speed."""
    b = named or choose(spec, framework, target)
    homes = b.families_for(target)
    if b.oracle or all(interpreted for _, interpreted in homes):
        return frozenset(d for a in spec.arrays for d in a.dtypes)
    compiled = (b.implementation(spec.name, family) for family, interpreted in homes if not interpreted)
    return frozenset(next((impl.ahead for impl in compiled if impl is not None), ()))


def why_not(
    b: Backend, spec: Spec[Any], framework: Framework, target: Target, variant: str | None = None
) -> str | None:
    """None if ``b`` can serve a framework's arrays with ``spec`` on ``target``, else the reason."""
    missing = b.unavailable(bool(b.stages_for(framework, target, variant)))
    if missing:
        return missing
    homes = b.families_for(target, variant)
    if not homes:
        if variant is not None and b.families_for(target):
            return f"variant {variant!r} is not for {target}"
        return _nothing_for(b, target)
    if any(b.module_of(spec.name, family) for family, _ in homes):
        return None
    packages = ", ".join(family.package for family, _ in homes if family.package)
    return f"it has no {spec.name}" + (f" in {packages}" if packages else "")


def _nothing_for(b: Backend, target: Target) -> str:
    """Why no family of a backend serves a target."""
    lacking = b.missing_kernels(target)
    if lacking:
        return "; ".join(lacking)
    there = dict.fromkeys(arch for f in b.declared if target.platform in f.platforms for arch in f.targets)
    if there:
        chips = f"its kernels for {target.platform} are only for {', '.join(there)}"
        return chips if target.arch else f"{chips}, and the chip to lower for is unknown"
    also = ", has an interpreter on cpu" if b.can_interpret() else ""
    platforms = " and ".join(b.compiled_platforms())
    return f"it compiles for {platforms}{also}, and has no kernels for {target.platform}"


def find_routes(b: Backend, call: Call, target: Target, variant: str | None = None) -> tuple[Route, ...]:
    """The variants of ``call`` on ``b`` in the order in which they are tried, or the error that says why there is none.

    Those whose results have other bits from run to run are there only where ``variant`` names them. A variant that has
    an op's gradients and not the op leaves its calls to the others.
    """
    target = b.stands_in(target)
    if variant is not None and has_gradient_alone(b, call.spec, variant):
        variant = None
    staged = b.stages_for(call.framework, target, variant)
    b.check_available(bool(staged))
    found: list[Route] = []
    waiting: list[str] = []

    def serving(family: Family, interpret: bool) -> Implementation | None:
        impl = b.implementation(call.spec.name, family)
        if impl is None:
            return None
        unasked, alone = impl.why_not_automatic(variant), impl.why_not_interpreted(interpret)
        waiting.extend([f"{unasked}: name variant={family.name!r}"] if unasked else [alone] if alone else [])
        return None if unasked or alone else impl

    for family in staged:
        impl = serving(family, False)
        if impl is not None:
            found.append(Route(family.staged(impl, call.framework), False, target, call.framework, embedded=True))
    for family, interpret in () if found else b.families_for(target, variant):
        impl = serving(family, interpret)
        if impl is not None:
            found.append(Route(impl, interpret, target, frameworks()[b.framework]))
    if not found:
        reason = why_not(b, call.spec, call.framework, target, variant) or "; ".join(waiting) or "no variant"
        known = (o for o in registry.backends().values() if o is not b)
        others = [o.name for o in known if why_not(o, call.spec, call.framework, target) is None]
        raise UnsupportedError(
            f"{call.spec.name} on {target}: backend {b.name!r} cannot: {reason}. "
            f"Backends that can: {', '.join(others) or 'none'}"
        )
    return tuple(found)


def has_gradient_alone(b: Backend, spec: Spec[Any], variant: str) -> bool:
    """Whether a backend's variant of this name has the op of an op's gradients, and not the op itself."""
    of = [f for f in b.families if f.name == variant]
    return spec.vjp is not None and not _has(b, spec.name, of) and _has(b, spec.vjp, of)


def gradient_choice(b: Backend | None, vjp: Spec[Any], choice: Choice) -> Choice:
    """Who computes gradients of calls that went where a choice said: the same backend, and the variant that was named
    where that has them."""
    of = [f for f in b.families if f.name == choice.variant] if b else []
    tiling = {name: value for name, value in choice.tiling.items() if name in vjp.tiling}
    return Choice.from_names(vjp, b, choice.variant if b and _has(b, vjp.name, of) else None, tiling)


def _has(b: Backend, op: str, families: Iterable[Family]) -> bool:
    return any(b.module_of(op, family) is not None for family in families)


def pick(candidates: tuple[Route, ...], call: Call, user: Mapping[str, int]) -> tuple[Route, Config]:
    """Who serves the call, and with which tiling: the first candidate that takes it, or the variant to which that
    leaves it; UnsupportedError with every reason where none takes it."""
    route, found = taking(candidates, call, user)
    return serving(route, call, found.tiling)


def serving(route: Route, call: Call, config: Config) -> tuple[Route, Config]:
    """The route of the variant whose kernels serve a call that was taken, and their config."""
    impl, config = route.impl.resolve(call, config)
    if impl is route.impl:
        return route, config
    return replace(route, impl=impl.family.staged(impl, route.framework) if route.embedded else impl), config


def taking(candidates: tuple[Route, ...], call: Call, user: Mapping[str, int]) -> tuple[Route, Resolved]:
    """The first candidate that takes the call, and its tiling; UnsupportedError with every reason where none does."""
    if len(candidates) == 1:
        return candidates[0], resolve(candidates[0].impl, call, user)
    reasons = []
    for route in candidates:
        try:
            return route, resolve(route.impl, call, user)
        except (UnsupportedError, SpecError) as e:
            reasons.append(e)
    if all(isinstance(e, SpecError) for e in reasons):  # a tile that no variant has
        raise reasons[-1]
    told = "; ".join(
        f"{route.impl.family.name}: {str(e).partition('cannot: ')[2] or e}"
        for route, e in zip(candidates, reasons, strict=True)
    )
    name = candidates[0].impl.backend.name
    raise UnsupportedError(f"{call!r} on {call.target}: backend {name!r} cannot: {told}")


def to_framework(call: Call, framework: Framework) -> Call:
    """The same call with its arrays in another framework."""
    arrays = {n: a if a is None else convert(a, call.framework, framework) for n, a in call.arrays.items()}
    device = framework.device(next(iter(arrays.values())))
    return call.replace(arrays=arrays, framework=framework, device=device)


def announce(route: Route) -> None:
    """Say once that a slow path was taken."""
    b = route.impl.backend
    if route.interpret:
        say(f"portakern: {b.name} runs in its interpreter on CPU arrays: exact, slow")
    elif b.oracle and route.target != HOST:
        say(f"portakern: {b.name}, the float64 oracle, copies arrays from {route.target} to the host: exact, slow")
    elif b.oracle:
        say(f"portakern: CPU arrays run on {b.name}, the float64 oracle: exact, slow; backend= names another")
