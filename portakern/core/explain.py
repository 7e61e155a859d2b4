"""Explain in words which implementation a call would run on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from portakern.core import registry
from portakern.core.call import Call
from portakern.core.config import NOTHING, Config
from portakern.core.dispatch import Choice, Route, choose, find_routes, serving, taking, to_framework, why_not
from portakern.core.gradients import wiring
from portakern.core.tilings import attempt
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.spec import ArrayArg
from portakern.spec.dtypes import numpy_dtype

__all__ = ["explain"]


def explain(call: Call, choice: Choice) -> str:
    """A few lines: the call, how devices share it, its backend and variant, the tiling and its source, and
    why the others do not serve it."""
    target = call.framework.target(call.device)
    lines = [repr(call), f"  arrays: {call.framework.name} on {target}", *_readings(call), *_kept(call)]
    traced = target.platform == "traced"
    if traced:
        expected = call.framework.lowering_target()
        if expected is None:
            return "\n".join(
                [*lines, f"  backend: chosen later, when {call.framework.title} lowers the traced function"]
            )
        lines.append(f"  lowered: later, by {call.framework.title}; if for {expected}:")
        call, target = call.replace(concrete=False), expected
    chosen = None
    try:
        chosen = choice.backend or choose(call.spec, call.framework, target)
        told, call = call.framework.in_parts(call, choice, target, chosen.oracle)
        lines += told
        candidates = find_routes(chosen, call, target, choice.variant)
        if traced and candidates[0].framework is not call.framework and not chosen.oracle:
            raise UnsupportedError(
                f"backend {chosen.name!r} runs {chosen.framework} kernels, which {call.framework.title} cannot stage "
                f"into a traced function for {target}"
            )
        lines += _plan(call, choice, candidates)
    except (UnsupportedError, UnavailableError) as e:
        lines.append(f"  refused: {e}")
    for b in registry.backends().values():
        if b is not chosen:
            named = "another backend was named" if choice.backend else "used for these arrays only when named"
            lines.append(f"  not {b.name}: {why_not(b, call.spec, call.framework, target) or named}")
    return "\n".join(lines)


def _readings(call: Call) -> list[str]:
    """How the axes of each array are read: as the spec's signature names them."""
    return [
        f"    {a.name}: {' '.join(f'{n}={e}' for n, e in _axes(a, call.arrays[a.name].shape)) or 'scalar'}"
        for a in call.spec.arrays
        if call.arrays[a.name] is not None
    ]


def _kept(call: Call) -> list[str]:
    """What a differentiated call keeps for its gradients beside its arguments, where that depends on options."""
    if call.spec.vjp is None or not registry.find_spec(call.spec.vjp).reads:
        return []
    forms = {name: call.outputs[name] for name in wiring(call.spec).saves(call.options)}
    sizes = (f"{n} ({math.prod(shape) * numpy_dtype(t).itemsize / 2**20:,.1f} MiB)" for n, (shape, t) in forms.items())
    return [f"  kept for gradients: {', '.join(sizes) or 'the arguments alone'}"]


def _axes(a: ArrayArg, shape: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """The name of each axis, or run of axes, with its extent."""
    left, after = [*shape], len(a.dims)
    for d in a.dims:
        after -= 1
        name = d.name
        if d.variadic:
            run = [left.pop(0) for _ in range(len(left) - after)]
            yield f"*{name}", f"({', '.join(map(str, run))})"
        else:
            yield name, left.pop(0)


def _plan(call: Call, choice: Choice, candidates: tuple[Route, ...]) -> list[str]:
    route = candidates[0]
    backend, framework = route.impl.backend, route.framework
    inner = call.replace(target=route.target, interpret=route.interpret)
    how = f"compiled for {route.target}"
    how = "float64 oracle on the host" if backend.oracle else "interpreter" if route.interpret else how
    lines = [f"  backend: {backend.name} ({'named' if choice.backend else 'chosen from the arrays'}), {how}"]
    if call.degenerate:
        return [*lines, f"  implementation: {route.impl.fn.__module__}", "  kernels: none, an extent is 0"]
    config = NOTHING
    asked, sources = route, dict[str, str]()
    if not backend.oracle:
        if framework is not call.framework:
            inner = to_framework(inner, framework)
        asked, resolved = taking(candidates, inner, choice.tiling)
        sources = resolved.sources
        route, config = serving(asked, inner, resolved.tiling)
    lines.append(f"  implementation: {route.impl.fn.__module__}")
    if len(backend.families) > 1:
        lines += _variants(inner, choice, candidates, asked, route)
    if route.embedded:
        lines.append(
            f"  embedded: its machine code is part of {framework.title}'s program, without {backend.framework}"
        )
    if framework is not call.framework:
        lines.append(f"  conversion: {call.framework.name} -> {framework.name} and back")
    if not backend.oracle:
        parts = (f"{name}={tile} ({sources.get(name) or asked.impl.family.name})" for name, tile in config.items())
        lines.append(f"  tiling: {', '.join(parts) or 'none'}")
        lines += _kernels(route, inner, config)
        copied = route.impl.copies(inner, config) if route.impl.copies else None
        lines += [f"  copied by {framework.title}: {copied}"] if copied else []
        lines += [f"  not deterministic: {name}: {why}" for name, why in route.impl.unordered.items()]
    return lines


def _kernels(route: Route, call: Call, config: Config) -> list[str]:
    """What the implementation would launch: which of several kernels it takes follows from the call's form."""
    impl = route.impl.backend.implementation(call.spec.name, route.impl.family)  # as it is where it is not embedded
    counts = Counter(route.impl.family.kernels(impl, call, config)) if impl is not None else Counter[str]()
    told = (name if count == 1 else f"{name} x{count}" for name, count in counts.items())
    return [f"  kernels: {', '.join(told)}"] if counts else []


def _variants(call: Call, choice: Choice, candidates: tuple[Route, ...], requested: Route, served: Route) -> list[str]:
    """Every variant of the backend in their order, and why it is not the one that serves: ``served``, to which
    ``requested`` left the call where that is another one."""
    of, left = {route.impl.family: route for route in candidates}, requested.impl.family.name
    lines = []
    for family in served.impl.backend.families:
        route = of.get(family)
        named = " (named)" if choice.variant == family.name else ""
        if family is served.impl.family:
            why = f"serves this call{named}" if requested is served else f"serves this call, delegated by {left}{named}"
        elif route is requested:
            why = f"delegates this call to {served.impl.family.name}{named}"
        elif choice.variant == family.name:
            why = f"has no {call.spec.name}; serves its gradients"
        elif choice.variant is not None and left == choice.variant:
            why = "another variant was named"
        elif route is None:
            has = served.impl.backend.module_of(call.spec.name, family) is not None
            why = f"not for {call.target}" if has else f"has no {call.spec.name}"
            impl = served.impl.backend.implementation(call.spec.name, family) if has else None
            if impl is not None and (unasked := impl.why_not_automatic(None)) and family.compiles_for(call.target):
                why = f"used only when named: {unasked}"
            if has and served.embedded and family.compiles_for(call.target):
                why = f"cannot be embedded in {served.framework.title}'s programs: it runs in its own framework only"
        else:
            why = _reason(route, call, choice) or f"{left} comes first"
        lines.append(f"  variant {family.name}: {why}")
    return lines


def _reason(route: Route, call: Call, choice: Choice) -> str | None:
    """Why a variant does not take the call; None where it would."""
    try:
        return attempt(route.impl, call, choice.tiling)[1]
    except SpecError as e:  # it has no such tile
        return str(e)
