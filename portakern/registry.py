"""Which ops exist, which backends exist, and which function implements which op where. Everything is found by name and loaded on first use."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from portakern.errors import SpecError, UnavailableError
from portakern.spec import Spec, Tile

if TYPE_CHECKING:
    from portakern.call import Call
    from portakern.compiling.report import Compiled
    from portakern.targets import Hardware

__all__ = ["Backend", "Compiler", "Implementation", "backend", "backends", "find_spec", "forward_of", "ops", "register"]

Tiling = Mapping[str, int]
F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger("portakern")

SPECS = "portakern.specs"  # the package of portakern's own specs, and the entry-point group of everybody else's
BACKENDS_GROUP = "portakern.backends"
FRAMEWORKS = ("numpy", "torch", "jax")
IN_PROCESS = ""  # stands for a package where there is none: functions registered by hand


def _no_tiling(call: Call) -> dict[str, int]:
    return {}


def _always(call: Call, tiling: Tiling) -> str | None:
    return None


class Compiler(Protocol):
    """What a backend's module for compiling ahead of time has. Importing it imports no framework."""

    def unavailable(self, hardware: Hardware) -> str | None:
        """None, or what must be installed to compile for ``hardware``."""

    def environment(self, hardware: Hardware, quick: bool) -> dict[str, str]:
        """Environment variables of a process that compiles; ``{scratch}`` stands for a folder of the process. ``quick``: nothing slower than compiling."""

    def versions(self, hardware: Hardware) -> dict[str, str]:
        """The versions of everything that decides the machine code."""

    def build(self, impl: Implementation, call: Call, tiling: Tiling) -> Compiled:
        """Compile a call on arrays without memory, for ``call.target``. Any exception is the reason why it cannot be."""


@dataclass(frozen=True, eq=False)
class Implementation:
    """One op on one backend.

    Attributes:
      fn: ``fn(call, tiling)`` returns every output in the spec's order, None for one that ``call.wants`` does not name.
      tiling: the default tiling of a call where no table has one. Where there is a ``key`` it is asked once for each key
        and target, so that it may use nothing else of a call.
      supports: None, or why this backend cannot serve the call with this tiling, in a user's words.
      knobs: launch parameters of this backend's own, tunable beside the spec's tiles.
      key: name -> value of what decides a call's tiling beside the target; tables are looked up by it
        (``portakern.core.tilings``). None: no table is asked.
      fit: ``fit(call, tiling)`` gives a tiling that was found as it is, or a changed copy for this very call, where a
        bias takes room, say.

    Neither ``tiling`` nor ``key`` nor ``fit`` may depend on batch or row counts, so that a row's bits do not either.
    """

    backend: Backend
    op: str
    fn: Callable[[Call, Tiling], tuple[Any, ...]]
    tiling: Callable[[Call], dict[str, int]]
    supports: Callable[[Call, Tiling], str | None]
    knobs: Mapping[str, Tile]
    key: Callable[[Call], Mapping[str, str | int]] | None = None
    fit: Callable[[Call, Tiling], Tiling] | None = None

    def run(self, call: Call, tiling: Tiling) -> tuple[Any, ...]:
        """``fn``, held to returning a tuple of the right length: a bare array would be taken apart along its first axis."""
        outputs = self.fn(call, tiling)
        if not isinstance(outputs, tuple) or len(outputs) != len(call.spec.outputs):
            got = f"{len(outputs)} outputs" if isinstance(outputs, tuple) else f"a {type(outputs).__name__}"
            names = ", ".join(o.name for o in call.spec.outputs)
            raise TypeError(
                f"{self.op} on backend {self.backend.name!r} returned {got}; expected a tuple with every output of the spec: ({names},)"
            )
        return outputs


@dataclass(eq=False)
class Backend:
    """A family of implementations in one framework.

    Attributes:
      name: what users pass as ``backend=``.
      framework: whose arrays the implementations take: numpy, torch or jax.
      compiles: platform (cpu, cuda, rocm, tpu) -> the package that holds its op modules.
      interprets: the package whose kernels can also run in an interpreter on CPU arrays, or None.
      requires: modules that must be importable; extra: the portakern extra that installs them.
      oracle: the float64 reference: takes float64 arrays of any device, its results are rounded by the caller.
      refusals: regular expressions of the reasons for which it may refuse a right call; the checker counts any other refusal as a failure.
      compiler: the module that compiles its calls for hardware that is not here (see :class:`Compiler`), or None.
      profiles: name -> "module:function" of a context manager in which the checker runs this backend, a slower and stricter interpreter, say.
      platforms: platforms served by functions that :meth:`implements` registers, with no package behind them. cpu when nothing else is given.
      auto: it may serve calls that name no backend. The registry says so of portakern's own; everybody else's run when named.
    """

    name: str
    framework: str
    compiles: Mapping[str, str] = field(default_factory=dict)
    interprets: str | None = None
    requires: tuple[str, ...] = ()
    extra: str | None = None
    oracle: bool = False
    refusals: Sequence[str] = ()
    profiles: Mapping[str, str] = field(default_factory=dict)
    compiler: str | None = None
    platforms: InitVar[Sequence[str]] = ()
    auto: bool = field(default=False, init=False)
    _found: dict[tuple[str, str], Implementation] = field(default_factory=dict, repr=False)

    def __post_init__(self, platforms: Sequence[str]) -> None:
        if self.framework not in FRAMEWORKS:
            raise SpecError(
                f"backend {self.name!r}: framework is {self.framework!r}; expected one of {', '.join(FRAMEWORKS)}"
            )
        if isinstance(platforms, str):
            raise SpecError(
                f"backend {self.name!r}: platforms is {platforms!r}; expected a list of names: [{platforms!r}]"
            )
        if not (platforms or self.compiles or self.interprets):
            platforms = ("cpu",)
        self.compiles = {**dict.fromkeys(platforms, IN_PROCESS), **self.compiles}

    def implements(
        self,
        op: str,
        *,
        tiling: Callable[[Call], dict[str, int]] = _no_tiling,
        supports: Callable[[Call, Tiling], str | None] = _always,
        knobs: Mapping[str, Tile] = MappingProxyType({}),
        key: Callable[[Call], Mapping[str, str | int]] | None = None,
        fit: Callable[[Call, Tiling], Tiling] | None = None,
    ) -> Callable[[F], F]:
        """Register the decorated ``fn(call, tiling)`` as this backend's ``op`` (see :class:`Implementation`).

        A function of the backend's own package serves the platforms of that package; one from elsewhere serves all platforms, and replaces no other:
        only itself, when a notebook cell runs again.
        """

        def register(fn: F) -> F:
            package = fn.__module__.rpartition(".")[0]
            homes = {package} & self.packages - {IN_PROCESS}
            for home in homes or self.packages:
                there = self.where(op, home)
                before = self._found.get((home, op))
                if there and not homes and not (before and _same_place(before.fn, fn)):
                    raise SpecError(
                        f"{op} on backend {self.name!r} is taken by {there}; {fn.__module__}.{fn.__qualname__} needs a backend of its own: pk.Backend(...)"
                    )
                self._found[home, op] = Implementation(self, op, fn, tiling, supports, knobs, key, fit)
            return fn

        return register

    @property
    def packages(self) -> set[str]:
        return {*self.compiles.values(), *([self.interprets] if self.interprets else [])}

    def package_for(self, platform: str) -> tuple[str, bool] | None:
        """(package, interpreted) that serves a platform, or None."""
        if platform in self.compiles:
            return self.compiles[platform], False
        if platform == "cpu" and self.interprets:
            return self.interprets, True
        if self.oracle:
            return self.compiles["cpu"], False
        return None

    def where(self, op: str, package: str) -> str | None:
        """The module that implements ``op`` in ``package``, found without importing its framework, or None."""
        found = self._found.get((package, op))
        if found:
            return found.fn.__module__
        if package == IN_PROCESS:
            return None
        try:
            return f"{package}.{op}" if importlib.util.find_spec(f"{package}.{op}") else None
        except ModuleNotFoundError:  # the package itself is missing
            return None

    def has(self, op: str, package: str) -> bool:
        """Whether ``op`` is implemented, without importing its framework."""
        return self.where(op, package) is not None

    def implementation(self, op: str, package: str) -> Implementation | None:
        """The implementation of ``op`` in ``package``, imported by convention from ``<package>.<op>``."""
        if (package, op) not in self._found and self.has(op, package):
            self.check_available()
            importlib.import_module(f"{package}.{op}")
        return self._found.get((package, op))

    def profile(self, name: str | None) -> AbstractContextManager[Any]:
        """The context of a profile; None is no profile."""
        if name is None:
            return nullcontext()
        if name not in self.profiles:
            raise SpecError(
                f"backend {self.name!r} has no profile {name!r}; expected one of {', '.join(self.profiles) or '(it has none)'}"
            )
        module, _, function = self.profiles[name].partition(":")
        context: AbstractContextManager[Any] = getattr(importlib.import_module(module), function)()
        return context

    def load_compiler(self) -> Compiler:
        """The module that compiles ahead of time."""
        if self.compiler is None:
            raise UnavailableError(f"backend {self.name!r} compiles nothing ahead of time")
        found: Any = importlib.import_module(self.compiler)
        return found

    def unavailable(self) -> str | None:
        """None, or what must be installed before this backend can run."""
        missing = [m for m in self.requires if importlib.util.find_spec(m) is None]
        if not missing:
            return None
        return f"{' and '.join(missing)} not installed; run: pip install " + (
            f"'portakern[{self.extra}]'" if self.extra else " ".join(missing)
        )

    def check_available(self) -> None:
        reason = self.unavailable()
        if reason:
            raise UnavailableError(f"backend {self.name!r} cannot run here: {reason}")


def _same_place(a: Callable[..., Any], b: Callable[..., Any]) -> bool:
    return (a.__module__, getattr(a, "__qualname__", a)) == (b.__module__, getattr(b, "__qualname__", b))


def _source(entry: EntryPoint) -> str:
    """Where an entry point comes from, in words."""
    dist = getattr(entry, "dist", None)
    return f"{entry.value} ({dist.name} {dist.version})" if dist else entry.value


def _ours(entry: EntryPoint) -> bool:
    dist = getattr(entry, "dist", None)
    return dist is not None and dist.name == "portakern"


_registered: dict[str, Backend] = {}


@functools.cache
def _installed() -> Mapping[str, Backend]:
    """Backends from the ``portakern.backends`` entry-point group, portakern's own first; one broken plug-in must not take the others down, nor vanish unseen."""
    found: dict[str, Backend] = {}
    sources: dict[str, str] = {}
    for entry in sorted(entry_points(group=BACKENDS_GROUP), key=lambda e: (not _ours(e), e.name)):
        if entry.name in found:
            raise SpecError(
                f"backend {entry.name!r} comes from two places: {sources[entry.name]} and {_source(entry)}; uninstall one, or rename its entry point"
            )
        try:
            b = entry.load()
            _check_backend(entry, b, found)
        except Exception as e:
            log.warning("portakern: backend %r (%s) cannot be loaded and is left out: %s", entry.name, entry.value, e)
            continue
        b.auto = _ours(entry)
        found[entry.name], sources[entry.name] = b, _source(entry)
    if not found:
        raise UnavailableError(
            "no backend is registered: portakern must be installed (pip install -e . in a checkout) so that its entry points exist"
        )
    return MappingProxyType(found)


def _check_backend(entry: EntryPoint, b: Any, known: Mapping[str, Backend]) -> None:
    if not isinstance(b, Backend):
        raise SpecError(f"it is a {type(b).__name__}; expected a portakern.Backend")
    if b.name != entry.name:
        raise SpecError(f"its entry point is called {entry.name!r} and its name is {b.name!r}; make them equal")
    _check_oracle(b, known)


def _check_oracle(b: Backend, known: Mapping[str, Backend]) -> None:
    first = next((o.name for o in known.values() if o.oracle), None)
    if b.oracle and first:
        raise SpecError(
            f"backend {b.name!r} says oracle=True, and {first!r} is the oracle; register its ops there: @pk.backends()[{first!r}].implements(...)"
        )


def backends() -> Mapping[str, Backend]:
    """Every backend by name: installed ones (the ``portakern.backends`` entry-point group), then those registered in this process."""
    return MappingProxyType({**_installed(), **_registered})


def register(b: Backend) -> Backend:
    """Make a backend known by its name in this process. Calls that name no backend are served as before.

    Raises:
      SpecError: the name is taken, or it claims to be a second oracle.
    """
    if not isinstance(b, Backend):
        raise SpecError(f"register() got a {type(b).__name__}; expected a portakern.Backend")
    known = backends()
    if b.name in known:
        raise SpecError(
            f"backend name {b.name!r} is taken; choose another, or pass the Backend object itself as backend=, which needs no registration"
        )
    _check_oracle(b, known)
    _registered[b.name] = b
    return b


def backend(name: str | Backend) -> Backend:
    """A backend by name, or one that nobody registered as itself; SpecError lists the known names."""
    if isinstance(name, Backend):
        return name
    known = backends()
    if not isinstance(name, str) or name not in known:
        raise SpecError(f"backend {name!r} is unknown; expected one of {', '.join(known)}, or a Backend object")
    return known[name]


def has_name(spec: Spec[Any]) -> bool:
    """Whether ``find_spec`` gives this spec for its name."""
    return spec.name in ops() and find_spec(spec.name) is spec


def importable(spec: Spec[Any], b: Backend) -> bool:
    """Whether another process finds both by name."""
    return _installed().get(b.name) is b and has_name(spec)


@functools.cache
def _spec_sources() -> Mapping[str, list[EntryPoint | str]]:
    """Op name -> where it is declared: a module of portakern's, or entry points of the ``portakern.specs`` group. More than one is a clash."""
    found: dict[str, list[EntryPoint | str]] = {}
    for module in pkgutil.iter_modules(importlib.import_module(SPECS).__path__):
        if not module.name.startswith("_"):
            found[module.name] = [f"{SPECS}.{module.name}"]
    for entry in sorted(entry_points(group=SPECS), key=lambda e: (e.name, e.value)):
        found.setdefault(entry.name, []).append(entry)
    return MappingProxyType(found)


@functools.cache
def ops() -> tuple[str, ...]:
    """The names of all declared ops, portakern's own and those of the ``portakern.specs`` entry-point group, without importing their specs."""
    return tuple(sorted(_spec_sources()))


@functools.cache
def find_spec(op: str) -> Spec[Any]:
    """An op's spec by name.

    Raises:
      SpecError: the name is unknown, comes from two places, or leads to something that is no spec of that name.
      UnavailableError: the package that declares it cannot be imported.
    """
    sources = _spec_sources().get(op)
    if sources is None:
        raise SpecError(f"op {op!r} is unknown; expected one of {', '.join(ops())}, or a spec")
    named = [s if isinstance(s, str) else _source(s) for s in sources]
    if len(sources) > 1:
        raise SpecError(
            f"op {op!r} comes from {len(sources)} places: {' and '.join(named)}; uninstall one, or rename its entry point"
        )
    source = sources[0]
    try:
        found = getattr(importlib.import_module(source), op) if isinstance(source, str) else source.load()
    except (ImportError, AttributeError) as e:
        raise UnavailableError(f"op {op!r} cannot be loaded from {named[0]}: {e}") from e
    if not isinstance(found, Spec) or found.name != op:
        what = f"the spec of {found.name!r}" if isinstance(found, Spec) else f"a {type(found).__name__}"
        raise SpecError(f"op {op!r} leads to {what} in {named[0]}; expected a spec whose function is called {op!r}")
    return found


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
