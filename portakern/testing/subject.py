"""The subject of a check: a backend's op on a device, or a plain function."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from portakern.api import op
from portakern.core import registry, tilings
from portakern.core.backend import ANY, Backend, Drawn, Implementation
from portakern.core.binder import bind
from portakern.core.call import Call
from portakern.core.dispatch import to_framework
from portakern.core.failing import Ended
from portakern.core.framework import Framework, frameworks
from portakern.core.targets import HOST, Target
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.spec import Spec, Tile
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import shown
from portakern.testing.cases import Case
from portakern.testing.evidence import other_memory
from portakern.testing.fixed import with_shape
from portakern.testing.layouts import DRAWN
from portakern.testing.sizes import Limits
from portakern.testing.source import Rejected
from portakern.testing.strategies import drawn
from portakern.testing.verdict import KINDS, PROMISES, Broken

PROBES = 5

__all__ = [
    "Subject",
    "backend_subject",
    "backend_variants",
    "checked_kinds",
    "environment",
    "function_subject",
    "not_required",
]


@dataclass(frozen=True)
class Subject:
    """The implementation that a check runs: a backend's op on a device, or a function.

    Attributes:
      spec: the op; framework, device: its arrays and where they are; target, interpret: the hardware, and whether an
        interpreter runs the kernels.
      run: ``run(tiling)`` returns the callable; an empty tiling is the default.
      tiling: ``tiling(case, call)`` returns (overrides for the run, the full tiling, why the case's own tiling is not
        legal).
      tiles: the names and ranges of tiles.
      arguments: the arguments that it takes; None: all. always: those without a default, which every call passes.
      lawful: whether the spec's laws are checked; kernels of other libraries behind a backend do not promise them.
      oracle: whether it is the oracle itself.
      accepts: ``accepts(text)`` is true for a refusal that the backend declares.
      context: the context of its cases: the chosen profile.
      reproduce: ``reproduce(case)`` returns a line that runs a case again: for a shell, or for Python if a new process
        would not find the implementation.
      name: its name in reports.
      overwrites: whether it can write results over inputs, if the spec permits that.
      emulated: whether an emulator stands for the target. drawn: limits of the drawn calls, edges apart.
      unordered: non-deterministic outputs -> the reason; promises about bits are not checked for them.
      fresh: a context in which new memory for outputs like the given ones is filled with numbers, if possible.
      variant: its variant of the op; variants: all of its backend. "" and none for a function.
      lacks: dtypes of more than 32 bits that are not checked -> the reason: most accelerators have none.
      ways: other ways to call it (:meth:`portakern.core.framework.Framework.call_variants`).
      remote: whether it runs in a process of its own. Exceptions other than those that this process reports are then
        mistakes of the checker.
    """

    spec: Spec[Any]
    framework: Framework
    device: Any
    target: Target
    interpret: bool
    run: Callable[[Mapping[str, int]], Callable[..., Any]]
    tiling: Callable[[Case, Call], tuple[Mapping[str, int], Mapping[str, int], str | None]]
    tiles: Mapping[str, Tile]
    arguments: frozenset[str] | None
    accepts: Callable[[str], bool]
    context: Callable[[], AbstractContextManager[Any]]
    reproduce: Callable[[str], str]
    name: str
    always: frozenset[str] = frozenset()
    lawful: bool = True
    oracle: bool = False
    overwrites: bool = False
    emulated: bool = False
    drawn: Drawn = ANY
    unordered: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    call_variants: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = field(default_factory=dict)
    remote: bool = False
    fresh: Callable[[tuple[Any, ...]], AbstractContextManager[None]] = lambda like: nullcontext()
    variant: str = ""
    variants: tuple[str, ...] = ()

    def at_fault(self, error: Exception) -> bool:
        """Whether an exception says something of what is checked."""
        return not self.remote or isinstance(error, Broken | Ended)


def backend_variants(
    spec: Spec[Any],
    backend: str | Backend,
    device: str | None = None,
    profile: str | None = None,
    arch: str | None = None,
) -> tuple[str, ...]:
    """The variants of an op on a backend that run on the best device here that it serves, on ``device`` (a platform),
    or on what a profile stands in for.

    Raises:
      UnavailableError: the backend serves no such device here. UnsupportedError: it has no such op there.
    """
    b = registry.backend(backend)
    _, target = _device_and_target(b, device, b.profile_target(profile, arch))
    names = [f.name for f, _ in b.families_for(target) if b.module_of(spec.name, f) is not None]
    if not names:
        raise UnsupportedError(f"backend {b.name!r} has no {spec.name} on {target}")
    return tuple(names)


def _device_and_target(b: Backend, device: str | None, standing_for: Target | None = None) -> tuple[Any, Target]:
    """The device that a backend's kernels are checked on, and what it is, or what the host stands in for."""
    b.check_available()
    fw = frameworks()[b.framework]
    fw.load()
    for d in fw.devices():
        target = fw.target(d)
        if standing_for is not None:
            if target == HOST and device in (None, HOST.platform):
                return d, standing_for
        elif b.families_for(target) and device in (None, target.platform):
            return d, target
    here = ", ".join(str(fw.target(d)) for d in fw.devices())
    raise UnavailableError(f"backend {b.name!r} serves no {device or 'device'} here; devices of {fw.name}: {here}")


def backend_subject(
    spec: Spec[Any],
    backend: str | Backend,
    variant: str | None,
    device: str | None,
    profile: str | None,
    arch: str | None = None,
) -> Subject:
    """``spec`` on a backend, on the best device here that it serves, or on ``device`` (a platform), in a profile of the
    backend. ``arch``: what the profile stands in for.

    ``variant``: the one to check; None: the first that runs there. What a variant refuses and a later one takes is no
      failure of its.
    """
    b = registry.backend(backend)
    if variant is not None:
        b.check_variant(variant)
    fw = frameworks()[b.framework]
    standing_for = b.profile_target(profile, arch)
    found, target = _device_and_target(b, device, standing_for)
    homes = [(f, i) for f, i in b.families_for(target, variant) if b.module_of(spec.name, f) is not None]
    if not homes:
        raise UnsupportedError(
            f"backend {b.name!r} has no {spec.name}" + (f" in its variant {variant!r}" if variant else "")
        )
    family, interpret = homes[0]
    impl = b.implementation(spec.name, family)
    assert impl is not None
    alone = impl.why_not_interpreted(interpret)
    if alone is not None:
        raise UnsupportedError(f"{spec.name} on {target}: backend {b.name!r} cannot: {alone}")
    every = backend_variants(spec, b, device, profile, arch) if len(b.families) > 1 else (family.name,)
    others_follow = family.name in every[:-1]
    named = family.name if len(b.families) > 1 or impl.unordered else None
    how = "emulated" if standing_for else "oracle" if b.oracle else "interpreted" if interpret else "compiled"
    return Subject(
        spec, fw, found, target, interpret,
        run=lambda tiling: op(spec, backend=b, variant=named, tiling=tiling),
        tiling=lambda case, call: _legal(impl, spec, case, call, fw),
        tiles={**spec.tiling, **impl.knobs} if impl.is_tiled else {},
        arguments=None if impl.takes is None else impl.takes(spec) | {"wants"},
        accepts=lambda text: others_follow or any(re.search(pattern, text) for pattern in b.refusals),
        context=lambda: b.profile(profile, arch),
        reproduce=_backend_line(spec, b, {"variant": named, "device": device, "profile": profile, "target": arch}),
        name=f"{b.name} on {target} ({how})"
        + (f", variant {named}" if named else "")
        + (f", profile {profile}" if profile else ""),
        lawful=not b.peer, oracle=b.oracle, emulated=standing_for is not None, drawn=impl.drawn,
        overwrites=bool(spec.aliases) and not fw.immutable and (impl.overwrites or b.oracle),
        unordered=impl.unordered, lacks=_unserved(spec, fw, impl, target, interpret),
        fresh=functools.partial(other_memory, fw), variant=named or "",
        variants=tuple(f.name for f in b.families_with(spec.name)) if named else (),
    )  # fmt: skip


def _unserved(
    spec: Spec[Any],
    fw: Framework,
    impl: Implementation | None = None,
    target: Target = HOST,
    interpret: bool = False,
) -> dict[str, str]:
    """Dtypes of more than 32 bits that an array library does not hold, or an implementation does not take, with the
    reason."""
    found = {}
    for dtype in (d for d in spec.dtypes if DTYPES[d].bits > 32):
        if fw.stored_dtype(dtype) != dtype:
            found[dtype] = f"{fw.title} holds {dtype} as {fw.stored_dtype(dtype)} here"
        elif (
            impl is not None and not impl.backend.oracle and (why := _refusal(spec, fw, impl, dtype, target, interpret))
        ):
            found[dtype] = why
    return found


def _refusal(
    spec: Spec[Any], fw: Framework, impl: Implementation, dtype: str, target: Target, interpret: bool
) -> str | None:
    """Why an implementation does not take a dtype: what it says of a small call that it takes in the op's first dtype.
    None where it takes that, or none was drawn."""
    takes = None if impl.takes is None else impl.takes(spec) | {"wants"}
    limits = Limits(elements=256, arguments=takes, empty=False, drawn=impl.drawn, layouts=("contiguous",))

    def reason_of(case: Case, dtype: str) -> str | None:
        own = {n: d for n, d in case.dtypes.items() if d in spec.argument(n).or_dtypes}  # rules may ask for it
        case = replace(case, dtype=dtype, dtypes=own, wider=())
        call = bind(spec, **{n: b.view() for n, b in case.buffers(spec).items()}, **case.options)
        call.target, call.interpret = target, interpret
        call = call if fw.host_only else to_framework(call, fw)
        return "empty" if call.degenerate else impl.supports(call, tilings.default(impl, call).tiling)

    for seed in range(PROBES):
        try:
            case, _ = drawn(seed, spec, limits, {})
        except Rejected:
            return None
        with suppress(SpecError):  # a rule refuses the call in this dtype, as where an option names a narrower one
            if reason_of(case, spec.dtypes[0]) is None:
                return reason_of(case, dtype)
    return None


def environment(fw: Framework) -> str:
    """The variables that are set and change what a library computes, as they stand before a command of a shell."""
    return "".join(f"{n}={shlex.quote(os.environ[n])} " for n in fw.environment if n in os.environ)


def _backend_line(spec: Spec[Any], b: Backend, given: Mapping[str, str | None]) -> Callable[[str], str]:
    fw = frameworks()[b.framework]
    if not registry.importable(spec, b):
        return _python_line(spec, f"backend={b.name!r}" if registry.known(b) else "backend=...", given, fw)
    command = f"{environment(fw)}portakern check {spec.name} --backend {b.name}" + "".join(
        f" --{k} {v}" for k, v in given.items() if v
    )
    return lambda case: f"{command} --case {shlex.quote(case)}"


def _python_line(spec: Spec[Any], subject: str, given: Mapping[str, str | None], fw: Framework) -> Callable[[str], str]:
    """The line for a process that has what is checked: a spec that is not found by name goes by that of its variable,
    which is the same.
    """
    op = repr(spec.name) if registry.has_name(spec) else spec.name
    options = "".join(f", {k}={v!r}" for k, v in given.items() if v)
    where = f"  # in a process with {environment(fw)}".rstrip() if environment(fw) else ""
    return lambda case: f"portakern.testing.replay({op}, {case!r}, {subject}{options}){where}"


def _legal(
    impl: Implementation, spec: Spec[Any], case: Case, call: Call, fw: Framework
) -> tuple[Mapping[str, int], Mapping[str, int], str | None]:
    """The least tiling that the implementation supports, among the case's and those with its tiles doubled, each as
    often as it takes; none where there is no such tiling."""
    if impl.backend.oracle or call.degenerate:
        return {}, {}, None
    if not fw.host_only:
        call = to_framework(call, fw)
    default, reason = tilings.default(impl, call).tiling, None
    # an implementation may have fewer tiles than its spec, or none
    tiling = {n: v for n, v in case.tiling.items() if n in default}
    for grown in _grown(spec, tiling) if tiling else ():
        config = default.replace(**grown)
        refused = impl.supports(call, config)
        if refused is None:
            return grown, config, None
        reason = reason or refused
    return {}, default, reason


def _grown(spec: Spec[Any], tiling: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """A tiling, and those with tiles of the spec doubled, each for itself: what one tile's grid asks for leaves the
    others small, so that there are several of them. Those of the least product come first."""
    most = [(spec.tiling[n].hi // v).bit_length() if n in spec.tiling else 1 for n, v in tiling.items()]
    for doublings in sorted(itertools.product(*map(range, most)), key=sum):
        yield {n: v << times for (n, v), times in zip(tiling.items(), doublings, strict=True)}


def function_subject(spec: Spec[Any], fn: Callable[..., Any] | None, framework: str, device: str | None) -> Subject:
    """A bare callable over one framework's arrays. Its attribute ``refusals``, if any, declares the refusals that a
    backend would.
    """
    if not callable(fn):
        raise SpecError(f"check({spec.name!r}): fn is {fn!r}; expected a callable with the op's arguments")
    if framework not in frameworks():
        raise SpecError(f"check({spec.name!r}): framework is {framework!r}; expected one of {', '.join(frameworks())}")
    fw = frameworks()[framework]
    fw.load()
    found = next((d for d in fw.devices() if device is None or fw.target(d).platform == device), None)
    if found is None:
        raise UnavailableError(f"{framework} has no {device} device here")
    arguments, always = _taken(spec, fn)
    return Subject(
        spec, fw, found, fw.target(found), False,
        run=lambda tiling: fn,
        tiling=lambda case, call: ({}, {}, None),
        tiles={},
        arguments=arguments,
        accepts=lambda text: any(re.search(pattern, text) for pattern in getattr(fn, "refusals", ())),
        context=nullcontext,
        reproduce=_python_line(spec, "fn=...", {"framework": framework, "device": device}, fw),
        name=f"{_name_of(fn)} on {fw.target(found)}",
        always=always,
        lacks=_unserved(spec, fw),
        call_variants=fw.call_variants(),
        overwrites=bool(spec.aliases) and not fw.immutable and "overwrite" in (arguments or ()),
        fresh=getattr(fn, "fresh", None) or functools.partial(other_memory, fw),
    )  # fmt: skip


def _name_of(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__module__', None) or '?'}.{getattr(fn, '__qualname__', repr(fn))}"


def _taken(spec: Spec[Any], fn: Callable[..., Any]) -> tuple[frozenset[str] | None, frozenset[str]]:
    """(the op's arguments that a function takes, None for all; those among the optional ones that it has no default
    for).

    Raises:
      SpecError: it does not say what it takes, or cannot be called with the op's arguments alone.
    """
    called, required = f"check({spec.name!r}): {_name_of(fn)}", [a.name for a in spec.arrays if not a.optional]
    known = {a.name for a in spec.arrays if a.optional} | {o.name for o in spec.options}
    example = f"fn=lambda {', '.join(required)}, *, {', '.join(sorted(known))}: ..."
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        raise SpecError(
            f"{called} is a built-in function without a signature; wrap it in a function with the arguments that it "
            f"takes: {example}"
        ) from None
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(places) < len(required) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise SpecError(
            f"{called} takes {len(places)} arguments by position; expected {len(required)} for "
            f"{', '.join(required)}; wrap it: {example}"
        )
    named = [p for p in parameters if p not in places[: len(required)] and p.kind not in (p.VAR_POSITIONAL,)]
    lone = [p.name for p in named if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    strange = [n for n in lone if n not in known]
    if strange:
        raise SpecError(
            f"{called} needs {strange[0]}, which {spec.name} does not have; expected some of "
            f"{', '.join((*required, *sorted(known)))}; wrap it: {example}"
        )
    everything = any(p.kind is p.VAR_KEYWORD for p in named)
    return None if everything else frozenset(required) | {p.name for p in named}, frozenset(lone)


LEFT_OUT: Mapping[str, tuple[Callable[[Spec[Any], Limits], bool], str]] = {
    "one_dtype": (
        lambda spec, limits: limits.one_dtype and any(a.or_dtypes for a in spec.arrays),
        "arrays of another dtype than the op's",
    ),
    "no_empty": (lambda spec, limits: not limits.empty and not limits.shapes, "extents of 0"),
    "layouts": (
        lambda spec, limits: not {*DRAWN} <= {*limits.layouts},
        "memory layouts other than {layouts}",
    ),
    "no_laws": (
        lambda spec, limits: bool(limits.shapes and spec.laws),
        "laws, which need other shapes",
    ),
}
"""What a check need not require: name -> (whether its limits leave this out, the report's words)."""


def not_required(
    spec: Spec[Any], limits: Limits, excused: Collection[str], unordered: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The report's words on all that is not required of a subject. unordered: as in :class:`Subject`."""
    lacks = _lacking(spec, limits)
    lacking = [f"{', '.join(lacks)} (never passed)"] if lacks else []
    given = [f"calls without {n}, which has no default" for n in sorted(limits.always)]
    built_in = [f"values of {n} other than {v!r}" for n, v in limits.options.items()]
    shaped = [f"shapes other than {' or '.join(map(with_shape, limits.shapes))}"] if limits.shapes else []
    words = [what.format(layouts=", ".join(limits.layouts)) for made, what in LEFT_OUT.values() if made(spec, limits)]
    edges = ["the formula's results for NaN and infinities"] if "edges" in excused else []
    some = [n for n in PROMISES if n in excused and "promises" not in excused]
    applies = {"laws": not limits.shapes, "overwrite": bool(spec.aliases)}
    some = [n for n in some if applies.get(n, True)]
    beside = (
        [f"calls beyond these limits, edges apart: {limits.drawn}"] if limits.drawn != ANY and not limits.shapes else []
    )
    bits = [f"the same bits of {name} in each call: {why}" for name, why in (unordered or {}).items()]
    lesser = (f"promise {n}: {PROMISES[n]}" for n in some)
    return (*lacking, *beside, *given, *built_in, *shaped, *words, *edges, *bits, *lesser)


def _lacking(spec: Spec[Any], limits: Limits) -> list[str]:
    """The op's arguments that no call has: what is checked does not take them, or the given shapes have no such."""
    there = {n for shapes in limits.shapes for n in shapes}
    arrays = [
        a.name for a in spec.arrays if a.optional and (not limits.takes(a.name) or (there and a.name not in there))
    ]
    return arrays + [o.name for o in spec.options if not limits.takes(o.name) and o.name not in limits.options]


def checked_kinds(spec: Spec[Any], edges: bool, promises: bool | Collection[str]) -> tuple[tuple[str, ...], set[str]]:
    """(the kinds that are checked, the names of kinds and promises that are not).

    Raises:
      SpecError: an unknown promise.
    """
    known = [] if isinstance(promises, bool) else [promises] if isinstance(promises, str) else [*promises]
    for name in known:
        if name not in PROMISES:
            raise SpecError(
                f"check({spec.name!r}): promise {shown(name)} is unknown; expected some of {', '.join(PROMISES)}"
            )
    excused = set() if edges else {"edges"}
    if promises is not True:
        excused |= {*PROMISES} - {*known} if known else {"promises"}
    return tuple(k for k in KINDS if k not in excused), excused
