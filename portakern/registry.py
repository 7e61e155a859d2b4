"""Which ops exist, which backends exist, and which function implements which op where. Everything is found by name and loaded on first use."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from portakern.errors import SpecError, UnavailableError
from portakern.spec import Spec, Tile

if TYPE_CHECKING:
    from portakern.call import Call

__all__ = ["Backend", "Implementation", "backend", "backends", "find_spec", "ops"]

Tiling = Mapping[str, int]
F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger("portakern")

SPECS = "portakern.specs"
BACKENDS_GROUP = "portakern.backends"


def _no_tiling(call: Call) -> dict[str, int]:
    return {}


def _always(call: Call, tiling: Tiling) -> str | None:
    return None


@dataclass(frozen=True, eq=False)
class Implementation:
    """One op on one backend.

    Attributes:
      fn: ``fn(call, tiling)`` returns every output in the spec's order, None for one that ``call.wants`` does not name.
      tiling: the default tiling of a call; it must not depend on batch or row counts, so that a row's bits do not either.
      supports: None, or why this backend cannot serve the call with this tiling, in a user's words.
      knobs: launch parameters of this backend's own, tunable beside the spec's tiles.
    """

    backend: Backend
    op: str
    fn: Callable[[Call, Tiling], tuple[Any, ...]]
    tiling: Callable[[Call], dict[str, int]]
    supports: Callable[[Call, Tiling], str | None]
    knobs: Mapping[str, Tile]


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
    """

    name: str
    framework: str
    compiles: Mapping[str, str] = field(default_factory=dict)
    interprets: str | None = None
    requires: tuple[str, ...] = ()
    extra: str | None = None
    oracle: bool = False
    _found: dict[tuple[str, str], Implementation] = field(default_factory=dict, repr=False)

    def implements(
        self,
        op: str,
        *,
        tiling: Callable[[Call], dict[str, int]] = _no_tiling,
        supports: Callable[[Call, Tiling], str | None] = _always,
        knobs: Mapping[str, Tile] = MappingProxyType({}),
    ) -> Callable[[F], F]:
        """Register the decorated ``fn(call, tiling)`` as this backend's ``op`` (see :class:`Implementation`)."""

        def register(fn: F) -> F:
            package = fn.__module__.rpartition(".")[0]
            for home in {package} & self.packages or self.packages:  # a function from elsewhere serves every platform of the backend
                self._found[home, op] = Implementation(self, op, fn, tiling, supports, knobs)
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

    def has(self, op: str, package: str) -> bool:
        """Whether ``op`` is implemented, without importing its framework."""
        return (package, op) in self._found or importlib.util.find_spec(f"{package}.{op}") is not None

    def implementation(self, op: str, package: str) -> Implementation | None:
        """The implementation of ``op`` in ``package``, imported by convention from ``<package>.<op>``."""
        if (package, op) not in self._found and self.has(op, package):
            self.check_available()
            importlib.import_module(f"{package}.{op}")
        return self._found.get((package, op))

    def unavailable(self) -> str | None:
        """None, or what must be installed before this backend can run."""
        missing = [m for m in self.requires if importlib.util.find_spec(m) is None]
        if not missing:
            return None
        return f"{' and '.join(missing)} not installed; run: pip install 'portakern[{self.extra}]'"

    def check_available(self) -> None:
        reason = self.unavailable()
        if reason:
            raise UnavailableError(f"backend {self.name!r} cannot run here: {reason}")


@functools.cache
def backends() -> Mapping[str, Backend]:
    """Every registered backend by name, from the ``portakern.backends`` entry-point group."""
    found: dict[str, Backend] = {}
    for entry in sorted(entry_points(group=BACKENDS_GROUP), key=lambda e: e.name):
        try:
            found[entry.name] = entry.load()
        except ImportError as e:  # one broken plug-in must not take the others down, nor vanish unseen
            log.warning("portakern: backend %r (%s) cannot be loaded and is left out: %s", entry.name, entry.value, e)
    if not found:
        raise UnavailableError("no backend is registered: portakern must be installed (pip install -e . in a checkout) so that its entry points exist")
    return MappingProxyType(found)


def backend(name: str | Backend) -> Backend:
    """A backend by name, or one that nobody registered as itself; SpecError lists the known names."""
    if isinstance(name, Backend):
        return name
    known = backends()
    if name not in known:
        raise SpecError(f"backend {name!r} is unknown; expected one of {', '.join(known)}")
    return known[name]


@functools.cache
def ops() -> tuple[str, ...]:
    """The names of all declared ops, without importing their specs."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(importlib.import_module(SPECS).__path__)))


@functools.cache
def find_spec(op: str) -> Spec[Any]:
    """An op's spec by name; SpecError lists the known ones."""
    if op not in ops():
        raise SpecError(f"op {op!r} is unknown; expected one of {', '.join(ops())}")
    found: Spec[Any] = getattr(importlib.import_module(f"{SPECS}.{op}"), op)
    return found
