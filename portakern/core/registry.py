"""The registry of ops and backends. Modules are found by name and imported on first use."""

from __future__ import annotations

import difflib
import functools
import importlib
import itertools
import logging
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from portakern import install
from portakern.core.backend import Backend
from portakern.core.cache import forget
from portakern.core.framework import frameworks
from portakern.errors import SpecError, UnavailableError
from portakern.spec import Spec

__all__ = [
    "backend",
    "backends",
    "find_spec",
    "forward_of",
    "has_name",
    "importable",
    "known",
    "loadable",
    "ops",
    "oracle_backend",
    "own_modules",
    "peers",
    "register",
]

log = logging.getLogger("portakern")

SPECS = "portakern.specs"  # the package of portakern's own specs, and the entry-point group of everybody else's
BACKENDS_GROUP = "portakern.backends"


def _source(entry: EntryPoint) -> str:
    """Where an entry point comes from, in words."""
    dist = getattr(entry, "dist", None)
    return f"{entry.value} ({dist.name} {dist.version})" if dist else entry.value


def _is_own(entry: EntryPoint) -> bool:
    return _name_of(getattr(entry, "dist", None)) == "portakern"


@functools.cache
def _name_of(dist: Distribution | None) -> str | None:
    """A distribution's name, for which all that its wheel says of it is parsed each time."""
    return None if dist is None else dist.name


_registered: dict[str, Backend] = {}

_origins: dict[str, str] = {}
"""Name of a backend that was registered in this process -> the module that did."""


_left_out: dict[str, str] = {}
"""Name of an installed backend that is not known -> why."""


@functools.cache
def _installed() -> Mapping[str, Backend]:
    """Backends from the ``portakern.backends`` entry-point group, portakern's own first; one broken plug-in must not
    take the others down, nor vanish unseen.
    """
    found: dict[str, Backend] = {}
    entries = sorted(entry_points(group=BACKENDS_GROUP), key=lambda e: (not _is_own(e), e.name, e.value))
    for name, given in itertools.groupby(entries, key=lambda e: e.name):
        entry, *others = given
        if name in found:
            _leave_out(name, [entry, *others], "portakern's own has that name; rename its entry point")
        elif others and not _is_own(entry):  # which one served would depend on the order of the path
            _leave_out(name, [entry, *others], "two packages have this name; uninstall one, or rename its entry point")
        else:
            try:
                b = entry.load()
                _check_backend(entry, b, found)
            except (Exception, SystemExit) as e:
                _leave_out(name, [entry], f"cannot be loaded: {_message_of(e)}")
            else:
                b.own = _is_own(entry) and not b.peer
                found[name] = b
            if others:
                _leave_out(name, others, "portakern's own has that name; rename its entry point")
    if not any(b.auto for b in found.values()):
        raise UnavailableError(
            f"no backend is registered: portakern's entry points are missing; install portakern; {install.command()}"
        )
    return MappingProxyType(found)


def _leave_out(name: str, entries: Sequence[EntryPoint], why: str) -> None:
    _left_out[name] = f"{' and '.join(map(_source, entries))} left out: {why}"
    log.warning("portakern: backend %r: %s", name, _left_out[name])


def _message_of(error: BaseException) -> str:
    """What was raised, on a line: a module that ends the process says nothing else."""
    if isinstance(error, SystemExit):
        return f"its module called sys.exit({'' if error.code is None else repr(error.code)})"
    known = isinstance(error, (SpecError, UnavailableError))
    return str(error) if known else f"{type(error).__name__}: {error}"


def _check_backend(entry: EntryPoint, b: Any, known: Mapping[str, Backend]) -> None:
    if not isinstance(b, Backend):
        raise SpecError(f"it is a {type(b).__name__}; expected a portakern.Backend")
    if b.name != entry.name:
        raise SpecError(f"its entry point is named {entry.name!r}, but the backend {b.name!r}; make the names equal")
    _check_oracle(b, known)
    if not _is_own(entry):
        _ = b.families, b.unavailable()  # asked of every backend, so that one that cannot say so must not be among them


def _check_oracle(b: Backend, known: Mapping[str, Backend]) -> None:
    first = next((o.name for o in known.values() if o.oracle), None)
    if b.oracle and first:
        raise SpecError(
            f"backend {b.name!r} has oracle=True, but {first!r} is the oracle already; register its ops there: "
            f"@pk.backends()[{first!r}].implements(...)"
        )


def backends() -> Mapping[str, Backend]:
    """Every backend by name: installed ones (the ``portakern.backends`` entry-point group), then those registered in
    this process. Peers are not among them (:func:`peers`)."""
    return MappingProxyType({n: b for n, b in _everyone().items() if not b.peer})


def peers() -> Mapping[str, Backend]:
    """Other people's kernels by name, each behind a backend that serves nothing unless it is named
    (``Backend.peer``).
    """
    return MappingProxyType({n: b for n, b in _everyone().items() if b.peer})


def _everyone() -> dict[str, Backend]:
    return {**_installed(), **_registered}


def known(b: Backend) -> bool:
    """Whether :func:`backend` gives this one for its name, in this process."""
    return _everyone().get(b.name) is b


def register(b: Backend) -> Backend:
    """Register a backend in this process, for calls with ``backend="name"``. Calls without ``backend=`` do not use it.

    A backend that the same module, script or notebook cell registered under this name is replaced. Existing ops keep
    the old one.

    Raises:
      SpecError: the name is taken by another module, the backend declares a second oracle, or the order of its
        families is not declared.
    """
    if not isinstance(b, Backend):
        raise SpecError(f"register() got a {type(b).__name__}; expected a portakern.Backend")
    origin = sys._getframe(1).f_globals.get("__name__", "?")
    before = _origins.get(b.name) if b.name in _registered else None
    others = {n: o for n, o in _everyone().items() if n != b.name or before != origin}
    if b.name in others:
        taken = before or ("portakern itself" if others[b.name].own else "an installed package")
        raise SpecError(
            f"backend name {b.name!r} is taken by {taken}, and {origin} registers another; choose another name, or "
            "pass the Backend object itself as backend=, which needs no registration"
        )
    _check_oracle(b, others)
    _ = b.families  # whose order must be declared
    if _registered.get(b.name, b) is not b:
        log.info(
            "portakern: %s registers backend %r anew, which replaces the one that it registered before", origin, b.name
        )
    _registered[b.name], _origins[b.name] = b, origin
    forget()  # what was decided with the one before
    return b


def backend(name: str | Backend) -> Backend:
    """A backend by name, or one that nobody registered as itself; SpecError lists the known names."""
    if isinstance(name, Backend):
        return name
    found = _registered.get(name) or _installed().get(name) if isinstance(name, str) else None
    if found is None:
        why = f" ({_left_out[name]})" if isinstance(name, str) and name in _left_out else ""
        raise SpecError(
            f"backend {name!r} is unknown{why}; {_alike(str(name))}expected one of {', '.join(backends())}, a peer "
            f"({', '.join(peers()) or 'none'}), or a Backend object"
        )
    return found


def _alike(name: str) -> str:
    """Names of backends and peers that are most like another, signs and capitals apart, in words."""
    known = {_plain(n): n for n in _everyone()}
    alike = [known[n] for n in difflib.get_close_matches(_plain(name), known, 3, 0.55)]
    return f"did you mean {' or '.join(map(repr, alike))}? " if alike else ""


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def oracle_backend() -> Backend:
    """The backend that every other is held to."""
    return next(b for b in backends().values() if b.oracle)


def has_name(spec: Spec[Any]) -> bool:
    """Whether ``find_spec`` gives this spec for its name."""
    return spec.name in ops() and find_spec(spec.name) is spec


def importable(spec: Spec[Any], b: Backend) -> bool:
    """Whether another process finds both by name."""
    return _installed().get(b.name) is b and has_name(spec)


@functools.cache
def own_modules() -> Mapping[str, str]:
    """Each op of portakern's own -> the module that declares it: the one that is called like the op, and for a gradient
    op that of its forward op. Texts are read and no module is imported."""
    folder, found = Path(importlib.import_module(SPECS).__path__[0]), {}
    for info in pkgutil.iter_modules([str(folder)]):
        if not info.name.startswith("_"):
            module, gradient = f"{SPECS}.{info.name}", f"{info.name}_vjp"
            found[info.name] = module
            file = folder / (f"{info.name}/__init__.py" if info.ispkg else f"{info.name}.py")
            # vjp="softmax_vjp", or "attention_vjp" among a package's names
            if f'"{gradient}"' in file.read_text(encoding="utf-8"):
                found[gradient] = module
    return MappingProxyType(found)


@functools.cache
def _spec_sources() -> Mapping[str, list[EntryPoint | str]]:
    """Op name -> where it is declared: a module of portakern's, or entry points of the ``portakern.specs`` group. More
    than one is a clash; nobody takes the name of one of portakern's.
    """
    found: dict[str, list[EntryPoint | str]] = {op: [module] for op, module in own_modules().items()}
    own = frozenset(found)
    for entry in sorted(entry_points(group=SPECS), key=lambda e: (e.name, e.value)):
        if entry.name in own:
            why = "portakern's own has that name; rename its entry point"
            log.warning("portakern: op %r: %s left out: %s", entry.name, _source(entry), why)
        else:
            found.setdefault(entry.name, []).append(entry)
    return MappingProxyType(found)


@functools.cache
def ops() -> tuple[str, ...]:
    """The names of all declared ops, portakern's own and those of the ``portakern.specs`` entry-point group, without
    importing their specs.
    """
    return tuple(sorted(_spec_sources()))


@functools.cache
def loadable() -> tuple[str, ...]:
    """The names of those ops whose specs can be loaded; what keeps the others out is said aloud."""
    found = []
    for name in ops():
        try:
            find_spec(name)
            found.append(name)
        except (SpecError, UnavailableError) as e:
            log.warning("portakern: left out: %s", e)
    return tuple(found)


@functools.cache
def find_spec(op: str) -> Spec[Any]:
    """An op's spec by name.

    Raises:
      SpecError: the name is unknown, comes from two places, or leads to something that is no spec of that name.
      UnavailableError: the package that declares it cannot be imported.
    """
    sources = _spec_sources().get(op)
    if sources is None:
        gradients = {f"{name}_vjp" for name in ops()}
        known = ", ".join(name for name in ops() if name not in gradients)
        raise SpecError(
            f"op {op!r} is unknown; expected one of {known}, OP_vjp for gradients of OP, or a spec{_meant(op)}"
        )
    named = [s if isinstance(s, str) else _source(s) for s in sources]
    if len(sources) > 1:
        raise SpecError(
            f"op {op!r} comes from {len(sources)} places: {' and '.join(named)}; uninstall one, or rename its entry "
            "point"
        )
    source = sources[0]
    try:
        found = getattr(importlib.import_module(source), op) if isinstance(source, str) else source.load()
    except (Exception, SystemExit) as e:  # whatever somebody's module does when it is imported
        raise UnavailableError(f"op {op!r} cannot be loaded from {named[0]}: {_message_of(e)}") from e
    if not isinstance(found, Spec) or found.name != op:
        what = f"the spec of {found.name!r}" if isinstance(found, Spec) else f"a {type(found).__name__}"
        raise SpecError(f"op {op!r}: {named[0]} is {what}; expected a spec with the function name {op!r}")
    return found


def _meant(name: str) -> str:
    """What somebody who asked for an op of this name may have meant: the op, and an array library's own function."""
    twins = {f"portakern.{f.name}.{name}": (f, f.twins[name]) for f in frameworks().values() if name in f.twins}
    near = [op for _, op in twins.values()] or difflib.get_close_matches(name.lower(), ops(), n=1)
    if not near:
        return ""
    faces = "".join(f", or {face}, which takes what {f.title}'s function takes" for face, (f, _) in twins.items())
    return f"; did you mean {near[0]!r}{faces}?"


@functools.cache
def forward_of(vjp: Spec[Any]) -> Spec[Any] | None:
    """The op whose gradients ``vjp`` computes, among the declared ones; None where there is none."""
    for name in ops():
        try:
            found = find_spec(name)
        except (SpecError, UnavailableError):  # somebody's broken plug-in: it is told of when it is asked for
            continue
        if found.vjp == vjp.name:
            return found
    return None
