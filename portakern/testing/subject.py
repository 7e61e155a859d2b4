"""What is being checked: a backend's op on a device, or a bare function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from portakern import dispatch, registry
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
      command: the shell command that checks it, or empty; name: for people.
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
    command: str
    name: str


def backend_subject(spec: Spec[Any], backend: str | registry.Backend, device: str | None) -> Subject:
    """``spec`` on a backend, on the best device here that it serves, or on ``device`` (a platform)."""
    b = registry.backend(backend)
    b.check_available()
    fw = FRAMEWORKS[b.framework]
    fw.load()
    served = ((d, fw.target(d)) for d in fw.devices())
    found, target = next(((d, t) for d, t in served if b.package_for(t.platform) is not None and device in (None, t.platform)), (None, None))
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
        command=f"portakern check {spec.name} --backend {b.name}" + (f" --device {device}" if device else ""),
        name=f"{b.name} on {target} ({how})",
    )  # fmt: skip


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
    default, reason = impl.tiling(call), None
    tiling = {n: v for n, v in case.tiling.items() if n in default}  # an implementation may have fewer tiles than its spec, or none
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
        command="",
        name=f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))} on {fw.target(found)}",
    )  # fmt: skip
