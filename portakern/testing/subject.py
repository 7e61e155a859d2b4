"""What is being checked: a backend's op on a device, or a bare function."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from portakern import dispatch, registry
from portakern.core import tilings
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.frameworks import FRAMEWORKS, Framework, Target
from portakern.spec import Spec, Tile
from portakern.testing.cases import Case

__all__ = ["Subject", "backend_subject", "function_subject"]


@dataclass(frozen=True)
class Subject:
    """Something that runs an op.

    Attributes:
      spec: the op; framework, device: the arrays that it takes; target, interpret: what runs them.
      run: ``run(tiling)`` gives the callable; an empty tiling is the default.
      tiling: ``tiling(case)`` gives (overrides to run with, the whole tiling, why the case's own tiling is not legal).
      tiles: the names and ranges that a tiling may set.
      arguments: the arguments that it takes; None: all.
      accepts: whether a refusal with this text is one that the backend declares.
      context: what its cases run in: the profile that was named.
      reproduce: ``reproduce(case)``, a line that runs a case again: for a shell, or for Python where a new process would not find what is checked.
      name: for people.
    """

    spec: Spec[Any]
    framework: Framework
    device: Any
    target: Target
    interpret: bool
    run: Callable[[Mapping[str, int]], Callable[..., Any]]
    tiling: Callable[[Case], tuple[Mapping[str, int], Mapping[str, int], str | None]]
    tiles: Mapping[str, Tile]
    arguments: frozenset[str] | None
    accepts: Callable[[str], bool]
    context: Callable[[], AbstractContextManager[Any]]
    reproduce: Callable[[str], str]
    name: str


def backend_subject(
    spec: Spec[Any], backend: str | registry.Backend, device: str | None, profile: str | None
) -> Subject:
    """``spec`` on a backend, on the best device here that it serves, or on ``device`` (a platform), in a profile of the backend."""
    b = registry.backend(backend)
    b.check_available()
    fw = FRAMEWORKS[b.framework]
    fw.load()
    served = ((d, fw.target(d)) for d in fw.devices())
    found, target = next(
        ((d, t) for d, t in served if b.package_for(t.platform) is not None and device in (None, t.platform)),
        (None, None),
    )
    if target is None:
        here = ", ".join(str(fw.target(d)) for d in fw.devices())
        raise UnavailableError(f"backend {b.name!r} serves no {device or 'device'} here; devices of {fw.name}: {here}")
    package, interpret = b.package_for(target.platform) or ("", False)
    impl = b.implementation(spec.name, package)
    if impl is None:
        raise UnsupportedError(f"backend {b.name!r} has no {spec.name}")
    how = "oracle" if b.oracle else "interpreted" if interpret else "compiled"
    return Subject(
        spec, fw, found, target, interpret,
        run=lambda tiling: dispatch.op(spec, backend=b, tiling=tiling),
        tiling=lambda case: _legal(impl, spec, case, fw, target, interpret),
        tiles={} if b.oracle else {**spec.tiling, **impl.knobs},
        arguments=None,
        accepts=lambda text: any(re.search(pattern, text) for pattern in b.refusals),
        context=lambda: b.profile(profile),
        reproduce=_backend_line(spec, b, {"device": device, "profile": profile}),
        name=f"{b.name} on {target} ({how})" + (f", profile {profile}" if profile else ""),
    )  # fmt: skip


def _backend_line(spec: Spec[Any], b: registry.Backend, given: Mapping[str, str | None]) -> Callable[[str], str]:
    if not registry.importable(spec, b):
        return _python_line(
            spec, f"backend={b.name!r}" if registry.backends().get(b.name) is b else "backend=...", given
        )
    command = f"portakern check {spec.name} --backend {b.name}" + "".join(f" --{k} {v}" for k, v in given.items() if v)
    return lambda case: f"{command} --case {shlex.quote(case)}"


def _python_line(spec: Spec[Any], subject: str, given: Mapping[str, str | None]) -> Callable[[str], str]:
    """The line for a process that has what is checked: a spec that is not found by name goes by that of its variable, which is the same."""
    op = repr(spec.name) if registry.has_name(spec) else spec.name
    options = "".join(f", {k}={v!r}" for k, v in given.items() if v)
    return lambda case: f"portakern.testing.replay({op}, {case!r}, {subject}{options})"


def _legal(
    impl: registry.Implementation, spec: Spec[Any], case: Case, fw: Framework, target: Target, interpret: bool
) -> tuple[Mapping[str, int], Mapping[str, int], str | None]:
    """The case's tiling, its tiles doubled until the implementation supports it; none where it never does."""
    call = dispatch.op(spec).bind(**{n: b.view() for n, b in case.buffers(spec).items()}, **case.options)
    if impl.backend.oracle or call.degenerate:
        return {}, {}, None
    call = call.replace(target=target, interpret=interpret)
    if fw.name != "numpy":
        call = dispatch.to_framework(call, fw)
    default, reason = tilings.default(impl, call).tiling, None
    tiling = {
        n: v for n, v in case.tiling.items() if n in default
    }  # an implementation may have fewer tiles than its spec, or none
    while tiling:
        reason = impl.supports(call, {**default, **tiling})
        if reason is None:
            return tiling, {**default, **tiling}, None
        grown = {n: min(2 * v, spec.tiling[n].hi) if n in spec.tiling else v for n, v in tiling.items()}
        tiling = grown if grown != tiling else {}
    return {}, default, reason


def function_subject(spec: Spec[Any], fn: Callable[..., Any] | None, framework: str, device: str | None) -> Subject:
    """A bare callable over one framework's arrays. Its attribute ``refusals``, if any, declares the refusals that a backend would."""
    if not callable(fn):
        raise SpecError(f"check({spec.name!r}): fn is {fn!r}; expected a callable with the op's arguments")
    if framework not in FRAMEWORKS:
        raise SpecError(f"check({spec.name!r}): framework is {framework!r}; expected one of {', '.join(FRAMEWORKS)}")
    fw = FRAMEWORKS[framework]
    fw.load()
    found = next((d for d in fw.devices() if device is None or fw.target(d).platform == device), None)
    if found is None:
        raise UnavailableError(f"{framework} has no {device} device here")
    parameters = inspect.signature(fn).parameters.values()
    arguments = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(p.name for p in parameters)
    return Subject(
        spec, fw, found, fw.target(found), False,
        run=lambda tiling: fn,
        tiling=lambda case: ({}, {}, None),
        tiles={},
        arguments=arguments,
        accepts=lambda text: any(re.search(pattern, text) for pattern in getattr(fn, "refusals", ())),
        context=nullcontext,
        reproduce=_python_line(spec, "fn=...", {"framework": framework, "device": device}),
        name=f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))} on {fw.target(found)}",
    )  # fmt: skip
