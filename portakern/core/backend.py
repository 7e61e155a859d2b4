"""Backends: each holds the functions that implement ops for the arrays of one framework, in families for kinds of
machines."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import pkgutil
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from portakern import install
from portakern.core import outputs
from portakern.core.cache import BoundedCache, forget
from portakern.core.config import Config, completed, fields_of
from portakern.core.framework import Framework, frameworks
from portakern.core.observe import say
from portakern.core.targets import HOST, Hardware, Target, find
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.spec import Spec, Tile

if TYPE_CHECKING:
    from portakern.core.call import Call
    from portakern.core.machine_code import Compiled

__all__ = ["ANY", "Backend", "Compiler", "Drawn", "Family", "Implementation", "Need", "Profile"]

F = TypeVar("F", bound=Callable[..., Any])

IN_PROCESS = ""  # stands for a package where there is none: functions registered by hand


def _no_tiling(call: Call) -> Mapping[str, int]:
    return {}


def _always(call: Call, config: Config) -> str | None:
    return None


class Compiler(Protocol):
    """The interface of a family's module for compiling ahead of time. Importing the module imports no framework."""

    def unavailable(self, hardware: Hardware) -> str | None:
        """None, or what must be installed to compile for ``hardware``."""

    def environment(self, hardware: Hardware, quick: bool) -> dict[str, str]:
        """Environment variables of a process that compiles; ``{scratch}`` stands for a folder of the process.

        ``quick``: nothing slower than compiling.
        """

    def versions(self, hardware: Hardware) -> dict[str, str]:
        """The versions of everything that decides the machine code."""

    def build(self, impl: Implementation, call: Call, config: Config) -> Compiled:
        """Compile a call on abstract arrays for ``call.target``. Any exception is the reason for the failure."""

    # A compiler whose machine code lies on disk, where the launches of any process find it, may have
    # ``planned(impl, call, config) -> list[PlannedKernel]``, the kernels that a call on abstract arrays launches, and
    # ``make(source, hardware)``, which compiles one of them, in a process that knows neither the call nor its arrays.
    #
    # A compiler may have ``survey(impl, call, config) -> Compiled`` too: for a tuner, which compiles one call in many
    # tilings. Either it keeps the machine code where a launch finds it, and says so: ``LAUNCHES_FIND_IT = True``. Or it
    # takes what it found of a kernel that is the same but for its extents, so that calls of many are ranked in no time.
    # ``memory``, of the same form, says what each kernel takes and may take of the chip's memory, and nothing else.


class Need(NamedTuple):
    """A package, with a minimum ``version``, that the kernels of a family need.

    Attributes:
      package: its name on PyPI; version: the minimum, numbers with dots; note: a further requirement of that version.
    """

    package: str
    version: str
    note: str = ""

    def missing(self) -> str | None:
        """None, or what must be installed."""
        here = install.installed(self.package)
        if here is not None and _numbers(here) >= _numbers(self.version):
            return None
        asked = f"{self.package} >= {self.version}" + (f" ({self.note})" if self.note else "")
        return f"{asked}, and {f'{self.package} {here}' if here else 'none'} is installed"


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


@dataclass(frozen=True)
class Profile:
    """A context in which the checker runs a family's kernels.

    Attributes:
      context: "module:function" of a context manager, e.g. of a stricter interpreter.
      targets: the architectures that it can emulate; calls on the host's arrays are compiled for the target that is
        named, and the function gets this target. Empty: nothing is emulated.
    """

    context: str
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A package of op modules with kernels for one kind of machine. If several families of a backend implement an op,
    each is a variant of this op.

    Attributes:
      package: the package of the modules ``<package>.<op>``. The last part of its name is the variant's name.
      platforms: the platforms that its kernels are compiled for: cpu, cuda, rocm, tpu.
      targets: the supported architectures of those platforms; empty: all.
      before: the names of families that are tried after this one (:func:`in_order`).
      interprets: its kernels also run on CPU arrays, in an interpreter.
      needs: packages required in addition to the backend's ``requires``; without them the family is not available.
      compiler: the module that compiles ahead of time for absent hardware (see :class:`Compiler`), or None.
      plans: "module:function" that runs a call and makes a faster path for calls of its signature: ``(implementation,
        call, config) -> (outputs, arrays by name -> outputs)``; None if there is no faster path.
      lists: "module:function" that names the kernels of a call in launch order, without a launch: ``(implementation,
        call, config) -> names``; None: ``explain()`` names none.
      stages: "module:function" that embeds machine code of its kernels in programs of another framework
        (:attr:`portakern.core.framework.Framework.embeds`): ``(implementation, embed) -> the implementation for arrays
        of that framework``, which does not need the backend's own framework. None: not possible.
      profiles: name -> a :class:`Profile`, or only its place.
      imports: "module:function" of a context manager in which its modules are imported; None: no context.
    """

    package: str
    platforms: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    interprets: bool = False
    needs: tuple[Need, ...] = ()
    compiler: str | None = None
    plans: str | None = None
    lists: str | None = None
    stages: str | None = None
    profiles: Mapping[str, str | Profile] = field(default_factory=dict, hash=False)
    imports: str | None = None

    @property
    def name(self) -> str:
        """Its name in ``variant=``."""
        return self.package.rpartition(".")[2] or "own"

    def compiles_for(self, target: Target) -> bool:
        """Whether its kernels are compiled for a target."""
        return target.platform in self.platforms and (not self.targets or target.arch in self.targets)

    def overlaps(self, other: Family) -> bool:
        """Whether some call could go to either of the two: one that names no variant."""
        platforms, targets = {*self.platforms} & {*other.platforms}, {*self.targets} & {*other.targets}
        compiled = bool(platforms) and bool(targets or not self.targets or not other.targets)
        return compiled or all(f.interprets and not f.targets for f in (self, other))

    def is_narrower(self, other: Family) -> bool:
        """Whether it is for some of the architectures that another is for, and no others."""
        return bool(self.targets) and (not other.targets or {*self.targets} < {*other.targets})

    def modules(self) -> int:
        """How many modules its package has; 0 where there is none, or it cannot be imported."""
        try:
            found = importlib.util.find_spec(self.package) if self.package != IN_PROCESS else None
        except Exception:
            return 0
        return sum(1 for _ in pkgutil.iter_modules(found.submodule_search_locations)) if found else 0

    def missing_packages(self) -> str | None:
        """None, or what must be installed before its kernels can be imported."""
        return " and ".join(filter(None, (need.missing() for need in self.needs))) or None

    def module_of(self, op: str) -> str | None:
        """The module of an op in the family's package, found without importing its framework: the one that is called
        like the op, or for a gradient op that of its forward op, if its text registers the gradient too."""
        own, forward = f"{self.package}.{op}", op.removesuffix("_vjp")
        if importlib.util.find_spec(own):
            return own
        both = importlib.util.find_spec(f"{self.package}.{forward}") if forward != op else None
        registers = re.compile(rf'\bimplements\(\s*"{re.escape(op)}"')
        there = both and both.origin and registers.search(Path(both.origin).read_text(encoding="utf-8"))
        return both.name if both and there else None

    def load(self, module: str) -> None:
        """Import a module of ops."""
        with _load(self.imports)() if self.imports else nullcontext():
            importlib.import_module(module)

    def load_planner(self) -> Callable[..., Any] | None:
        """The function that learns to serve calls of a signature."""
        return _load(self.plans) if self.plans else None

    def kernels(self, impl: Implementation, call: Call, config: Config) -> tuple[str, ...]:
        """The kernels that a call would launch, in their order; none where nothing lists them."""
        return tuple(_load(self.lists)(impl, call, config)) if self.lists else ()

    def staged(self, impl: Implementation, framework: Framework) -> Implementation:
        """The implementation for a framework that embeds its machine code, always the same one."""
        assert self.stages is not None
        return _staged(self.stages, impl, framework)

    def load_compiler(self) -> Compiler:
        """The module that compiles ahead of time."""
        if self.compiler is None:
            raise UnavailableError(f"variant {self.name} cannot compile ahead of time; name another variant")
        found: Any = importlib.import_module(self.compiler)
        return found


def in_order(backend: str, families: Sequence[Family]) -> tuple[Family, ...]:
    """The families of a backend in the order in which they are tried. What they are called decides nothing.

    Of two that could serve one call that comes first which says so (:attr:`Family.before`, and what follows from it by
    way of others); where neither does, the one whose architectures are some of the other's. What no call could choose
    between is listed by the number of architectures, and then by name.

    Raises:
      SpecError: two families have no order, or form a cycle; ``before`` names no family; two have one name.
    """
    by_name = {f.name: f for f in families}
    if len(by_name) != len(families):
        twice = next(f.name for f in families if by_name[f.name] is not f)
        raise SpecError(f"backend {backend!r} has two families called {twice!r}; rename one")
    first = {f.name: {g.name for g in families if f.name in g.before} for f in families}  # name -> what precedes it
    for f in families:
        for name in f.before:
            if name not in by_name:
                raise SpecError(
                    f"backend {backend!r}: family {f.name!r} declares before={name!r}; expected one of "
                    f"{', '.join(n for n in by_name if n != f.name) or '(it has no other)'}"
                )
    said, by_targets = _all_before(backend, first), sorted(families, key=lambda f: (len(f.targets) or 10**6, f.name))
    for f, g in itertools.permutations(by_targets, 2):
        if f.overlaps(g) and f.name not in said[g.name] and g.name not in said[f.name]:
            if f.is_narrower(g):
                first[g.name].add(f.name)
            elif not g.is_narrower(f):
                raise SpecError(
                    f"backend {backend!r}: the order of its families {f.name!r} and {g.name!r} is "
                    f"not declared; "
                    f"to try {f.name!r} first, write Family(..., before=({g.name!r},)) in {f.package}"
                )
    said = _all_before(backend, first)
    found: list[Family] = []
    while by_targets:
        found.append(next(f for f in by_targets if not said[f.name] & {g.name for g in by_targets}))
        by_targets.remove(found[-1])
    return tuple(found)


def _all_before(backend: str, first: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """What precedes each family, by way of others too; SpecError where one precedes itself."""
    said = {name: set(names) for name, names in first.items()}
    for middle, name in itertools.product(said, said):
        if middle in said[name]:
            said[name] |= said[middle]
    for name, names in said.items():
        if name in names:
            circle = ", ".join(repr(other) for other in sorted(said) if other in names and name in said[other])
            raise SpecError(f"backend {backend!r}: the before= of families {circle} form a cycle; remove one")
    return said


@dataclass(frozen=True)
class Drawn:
    """Limits of the calls that the checker draws for a variant that supports few calls, so that its kernels run and do
    not refuse. Edges are not limited.

    Attributes:
      absent: optional arrays and options that no call has. multiples: dimension -> a divisor of its extent.
      least, most: dimension -> its smallest and largest extent. narrow: arrays that have the op's dtype, where others
        may have a wider one.
    """

    absent: tuple[str, ...] = ()
    multiples: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    narrow: tuple[str, ...] = ()

    def extent(self, name: str, extent: int) -> int:
        """The nearest extent from there on that is drawn, or the largest."""
        of = self.multiples.get(name, 1)
        nearest = -(-max(extent, self.least.get(name, 0)) // of) * of
        return min(nearest, self.most.get(name, nearest))

    def __str__(self) -> str:
        said = [f"no {name}" for name in self.absent]
        said += [f"{name} a multiple of {of}" for name, of in self.multiples.items()]
        said += [f"{name} at least {least}" for name, least in self.least.items()]
        said += [f"{name} no wider than the op's dtype" for name in self.narrow]
        return ", ".join([*said, *(f"{name} at most {most}" for name, most in self.most.items())])


ANY = Drawn()
"""Every call of the op."""


@dataclass(frozen=True, eq=False)
class Implementation:
    """One variant of one op on one backend.

    Attributes:
      fn: ``fn(call, config)`` returns all outputs in the spec's order, with None for outputs not in ``call.wants``.
      tiling: the default tiling of a call that no table has. With a ``key`` it runs once per key and target, and may
        use nothing else of the call.
      supports: None, or the reason, for a user, why this variant cannot serve the call with this config.
      config: the class of its tilings (:class:`portakern.Config`): the spec's tiles, other launch parameters. Tiles
        that the class does not declare are added from the spec.
      key: a function from a call to the names and values by which tables of tilings are looked up, with the target
        (:mod:`portakern.core.tilings`). None: no table is used.
      fit: ``fit(call, config)`` returns the config, or a copy that is changed for this call, e.g. to make room for a
        bias.
      takes: the spec's arguments that it supports; None: all. The checker draws no others, and checks no laws.
      copies: the copies that it makes with the framework before or after its kernels, in words; None: none.
      same_bits: a row's bits are the same in every tiling.
      overwrites: it supports ``overwrite=`` (:meth:`Call.overwritten`): it writes results over inputs and returns them;
        ``supports`` refuses the tilings in which it cannot.
      drawn: limits of the calls that the checker draws, for a variant that supports few calls.
      compiled_alone: the reason why its kernels do not run in the family's interpreter, in words; None: they do.
      delegate: ``delegate(call, config)`` for a supported call: None if its own kernels serve it; else the name of the
        variant that does, and that variant's tiling.
      ahead: the dtypes in which it and its gradients were measured at least as fast as the framework's equivalent
        functions. Code that replaces those functions reads it (:func:`portakern.core.dispatch.ahead`).
      unordered: non-deterministic outputs, whose bits may change from run to run -> the reason in words. Such a variant
        serves only calls that name it. The checker compares these outputs with their bounds only, and checks every
        promise for the others.

    ``tiling``, ``key`` and ``fit`` must not depend on batch or row counts, because a row's bits must not. Exceptions:
    ``same_bits``, and tiles in ``fit`` that do not change a row's bits.
    """

    backend: Backend
    family: Family
    op: str
    fn: Callable[[Call, Any], tuple[Any, ...]]
    tiling: Callable[[Call], Mapping[str, int]]
    supports: Callable[[Call, Any], str | None]
    config: type[Config] = Config
    key: Callable[[Call], Mapping[str, str | int]] | None = None
    fit: Callable[[Call, Any], Config] | None = None
    takes: Callable[[Spec[Any]], frozenset[str]] | None = None
    copies: Callable[[Call, Any], str | None] | None = None
    same_bits: bool = False
    overwrites: bool = False
    drawn: Drawn = ANY
    compiled_alone: str | None = None
    delegate: Callable[[Call, Any], tuple[str, Mapping[str, int]] | None] | None = None
    ahead: tuple[str, ...] = ()
    unordered: Mapping[str, str] = field(default_factory=dict)
    _looked: BoundedCache[Any, bool] = field(default_factory=BoundedCache, init=False, repr=False)
    _complete: BoundedCache[Spec[Any], type[Config]] = field(default_factory=BoundedCache, init=False, repr=False)

    @functools.cached_property
    def knobs(self) -> Mapping[str, Tile]:
        """The launch parameters of its own and their values, without the spec's tiles."""
        return {name: field.values for name, field in fields_of(self.config).items() if field.values is not None}

    @property
    def is_tiled(self) -> bool:
        """Whether its calls have a tiling: a Config of its own, or something that says one, gives them tiles."""
        return bool(fields_of(self.config)) or self.key is not None or self.tiling is not _no_tiling

    def configured(self, spec: Spec[Any], tiling: Mapping[str, int]) -> Config:
        """A tiling as its functions take it; SpecError where it has other names than the Config."""
        made = self._complete.get(spec)
        if made is None:
            made = self._complete.keep(spec, completed(self.config, spec.name, tuple(spec.tiling)))
        return tiling if isinstance(tiling, made) else made(**tiling)

    @functools.cached_property
    def is_own(self) -> bool:
        """Whether portakern brings it, so that its own tests hold it to its outputs."""
        return self.backend.own and self.fn.__module__.partition(".")[0] == __name__.partition(".")[0]

    def why_not_automatic(self, variant: str | None) -> str | None:
        """None, or why it serves no call that names this variant, or none: results whose bits change from run to run
        are for those alone who ask for them."""
        if variant is not None or not self.unordered:
            return None
        return f"not deterministic: bits of {', '.join(self.unordered)} may change from run to run"

    def why_not_interpreted(self, interpret: bool) -> str | None:
        """None, or why it serves no arrays that an interpreter would."""
        return (
            f"{self.family.name} is not interpreted: {self.compiled_alone}"
            if interpret and self.compiled_alone
            else None
        )

    def refuses(self, call: Call, config: Config) -> str | None:
        """None, or why it cannot serve the call with this config, in a user's words."""
        if call.over and not (self.overwrites or self.backend.oracle):  # whose caller rounds, and writes, its results
            return "it cannot write a result over an input; leave out overwrite="
        return self.supports(call, config)

    def resolve(self, call: Call, config: Config) -> tuple[Implementation, Config]:
        """The implementation whose kernels serve a call that this one supports with this config, and the config that
        they run with: its own, or those of the variant to which it leaves the call (``delegate``).

        Raises:
          UnsupportedError: that variant refuses the call. SpecError: there is none of its name.
        """
        to = self.delegate(call, config) if self.delegate is not None else None
        if to is None:
            return self, config
        variant, tiling = to
        self.backend.check_variant(variant)
        family = next(f for f in self.backend.families if f.name == variant)
        impl = self.backend.implementation(self.op, family)
        if impl is not None:
            config = impl.configured(call.spec, tiling)
        reason = impl.refuses(call, config) if impl is not None else f"it has no {self.op}"
        if impl is None or reason:
            raise UnsupportedError(
                f"{call!r} on {call.target}: backend {self.backend.name!r} cannot: {self.family.name} delegates it "
                f"to {variant}: {reason}"
            )
        return impl.resolve(call, config)

    def run(self, call: Call, config: Config) -> tuple[Any, ...]:
        """``fn``, held to returning a tuple of the right length, and where others bring it to what is in that tuple,
        the first time that a call of a signature comes."""
        out = self.fn(call, config)
        if not isinstance(out, tuple) or len(out) != len(call.spec.outputs):
            out = outputs.counted(self, call, out)
        if not self.is_own and not self.backend.oracle:
            out = outputs.wanted(call, out)
            form = (
                outputs.signature_of(call) if call.concrete else None
            )  # traced: it is compiled once, and looked at then
            if form is None or form not in self._looked:
                outputs.look(self, call, out)
                if form is not None:
                    self._looked.keep(form, True)
        return out


@dataclass(eq=False)
class Backend:
    """Implementations in one framework, in families: one for each kind of machine.

    Attributes:
      name: what users pass as ``backend=``.
      framework: whose arrays the implementations take: numpy, torch or jax.
      requires: modules that must be importable; extra: the portakern extra that installs them; install: what pip
        installs for the last of them, where that has another name.
      oracle: the float64 reference: takes float64 arrays of any device, its results are rounded by the caller.
      refusals: regular expressions of the reasons for which it may refuse a right call; the checker counts any other
        refusal as a failure.
      package: the package in which its families lie, a folder each with a module ``family`` that says what it is for
        (``FAMILY``); or else
      compiles: platform (cpu, cuda, rocm, tpu) -> the package that holds its op modules, or several, in the
        order in which they are tried;
      interprets: the package whose kernels can also run in an interpreter on CPU arrays, or None;
      compiler, profiles: as of each of those families (:class:`Family`).
      platforms: platforms served by functions that :meth:`implements` registers, with no package behind them. cpu when
        nothing else is given.
      peer: somebody else's kernels, to compare with: it runs when named, and lists of backends leave it out
        (:func:`portakern.core.registry.peers`).
      named_only: it serves calls that name it, and no others.
      own: portakern brings it, and it is no peer; the registry says so. auto: it may serve calls that name no backend:
        portakern's own may, but for those that run when named alone. Everybody else's run when named.
      standing_for: the hardware that the host stands in for, while a profile is on that has targets.
    """

    name: str
    framework: str
    requires: tuple[str, ...] = ()
    extra: str | None = None
    install: str | None = None
    oracle: bool = False
    refusals: Sequence[str] = ()
    package: str | None = None
    peer: bool = False
    named_only: bool = False
    compiles: InitVar[Mapping[str, str | Sequence[str]] | None] = None
    interprets: InitVar[str | None] = None
    compiler: InitVar[str | None] = None
    profiles: InitVar[Mapping[str, str | Profile] | None] = None
    platforms: InitVar[Sequence[str]] = ()
    own: bool = field(default=False, init=False)
    standing_for: Target | None = field(default=None, init=False, repr=False)
    _found: dict[tuple[str, str], Implementation] = field(default_factory=dict, init=False, repr=False)
    _elsewhere: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(
        self,
        compiles: Mapping[str, str | Sequence[str]] | None,
        interprets: str | None,
        compiler: str | None,
        profiles: Mapping[str, str | Profile] | None,
        platforms: Sequence[str],
    ) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"\w[\w.-]*", self.name):
            raise SpecError(
                f"backend name is {self.name!r}; expected letters, digits, '_', '-' and '.', beginning with a letter, "
                "a digit or '_' (the name is used for files and command-line options)"
            )
        if self.framework not in frameworks():
            raise SpecError(
                f"backend {self.name!r}: framework is {self.framework!r}; expected one of {', '.join(frameworks())}"
            )
        if isinstance(platforms, str):
            raise SpecError(
                f"backend {self.name!r}: platforms is {platforms!r}; expected a list of names: [{platforms!r}]"
            )
        if self.package is not None:
            return  # its families are found when they are asked for: the package is being imported now
        if not (platforms or compiles or interprets):
            platforms = ("cpu",)
        homes: dict[str, list[str]] = {IN_PROCESS: [*platforms]} if platforms else {}
        after: dict[str, list[str]] = defaultdict(list)  # package -> those that are listed after it for a platform
        for platform, packages in (compiles or {}).items():
            listed = [packages] if isinstance(packages, str) else list(packages)
            for i, package in enumerate(listed):
                homes.setdefault(package, []).append(platform)
                after[package] += listed[i + 1 :]
        if interprets:
            homes.setdefault(interprets, [])
        if platforms:
            after[IN_PROCESS] += [package for package in homes if package != IN_PROCESS]
        self.families = in_order(
            self.name,
            [
                Family(
                    package,
                    tuple(of),
                    before=tuple(dict.fromkeys(p.rpartition(".")[2] for p in after[package])),
                    interprets=package == interprets,
                    compiler=compiler,
                    profiles=profiles or {},
                )
                for package, of in homes.items()
            ],
        )

    @property
    def auto(self) -> bool:
        """Whether it may serve calls that name no backend."""
        return self.own and not self.named_only

    @functools.cached_property
    def families(self) -> tuple[Family, ...]:
        """Those whose kernels can be imported here, in the order in which they are tried (:func:`in_order`)."""
        return tuple(f for f in self.declared if f.missing_packages() is None)

    @functools.cached_property
    def declared(self) -> tuple[Family, ...]:
        """All families of the backend's package in the order of :attr:`families`, those among them for which something
        must be installed first (:meth:`Family.missing_packages`)."""
        if self.package is None:
            return self.families
        found: list[Family] = []
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            folders = [f"{path}/{module.name}" for path in package.__path__]
            if module.ispkg and any(m.name == "family" for m in pkgutil.iter_modules(folders)):
                found.append(importlib.import_module(f"{self.package}.{module.name}.family").FAMILY)
        if not found:
            raise SpecError(f"backend {self.name!r}: package {self.package!r} has no family: a folder with a family.py")
        return in_order(self.name, found)

    @functools.cached_property
    def configs(self) -> tuple[type[Config], ...]:
        """The Configs in the module ``configs`` of the backend's package, which imports no framework: they are known
        where its kernels cannot be imported. Empty where there is none."""
        module = f"{self.package}.configs"
        if self.package is None or importlib.util.find_spec(module) is None:
            return ()
        found = vars(importlib.import_module(module)).values()
        return tuple(c for c in found if isinstance(c, type) and issubclass(c, Config) and c is not Config)

    def implements(
        self,
        op: str,
        *,
        tiling: Callable[[Call], Mapping[str, int]] = _no_tiling,
        supports: Callable[[Call, Any], str | None] = _always,
        config: type[Config] = Config,
        key: Callable[[Call], Mapping[str, str | int]] | None = None,
        fit: Callable[[Call, Any], Config] | None = None,
        takes: Callable[[Spec[Any]], frozenset[str]] | None = None,
        copies: Callable[[Call, Any], str | None] | None = None,
        same_bits: bool = False,
        overwrites: bool = False,
        drawn: Drawn = ANY,
        compiled_alone: str | None = None,
        delegate: Callable[[Call, Any], tuple[str, Mapping[str, int]] | None] | None = None,
        ahead: tuple[str, ...] = (),
        unordered: Mapping[str, str] = MappingProxyType({}),
    ) -> Callable[[F], F]:
        """Register the decorated ``fn(call, config)`` as this backend's ``op`` (see :class:`Implementation`).

        A function in a family's package belongs to that family. A function from another module serves all platforms.
        It may replace only itself, when a notebook cell runs again.
        """

        def register(fn: F) -> F:
            package = fn.__module__.rpartition(".")[0]
            own = [f for f in self.families if f.package == package != IN_PROCESS]
            for family in () if own else self.families:
                there = self.module_of(op, family)
                before = self._found.get((family.package, op))
                if there and not (_same_place(before.fn, fn) if before else there == self._elsewhere.get(op)):
                    raise SpecError(
                        f"{op} on backend {self.name!r} is implemented by {there} already; "
                        f"register {fn.__module__}.{fn.__qualname__} on a new backend: pk.Backend(...)"
                    )
            for family in own or self._broadest():
                made = Implementation(
                    self, family, op, fn, tiling, supports, config, key, fit, takes, copies, same_bits, overwrites,
                    drawn, compiled_alone, delegate, ahead, unordered,
                )  # fmt: skip
                self._found[family.package, op] = made
                forget()  # ops that were made before serve their next call anew
            return fn

        return register

    def implemented_in(self, op: str, module: str) -> None:
        """Name the module of this backend's ``op``, for an op that is declared outside of the backend's package.

        The module is imported at the first call that needs it, and registers its function with :meth:`implements`. In
        this way a package names its Triton kernels without importing Triton.

        Raises:
          SpecError: another module has the op already.
        """
        for family in self.families:
            there = self.module_of(op, family)
            if there not in (None, module):
                raise SpecError(
                    f"{op} on backend {self.name!r} is implemented by {there} already; remove one, or register "
                    f"{module} on a new backend"
                )
        self._elsewhere[op] = module
        forget()

    def _broadest(self) -> list[Family]:
        """The fewest families that together serve every platform, and interpret what any does: those for all
        architectures first, and of others those with the most ops."""
        found: list[Family] = []
        for f in sorted(self.families, key=lambda f: (bool(f.targets), -f.modules())):
            served = {p for g in found for p in g.platforms}
            if {*f.platforms} - served or (f.interprets and not any(g.interprets for g in found)):
                found.append(f)
        return found

    def compiled_platforms(self) -> tuple[str, ...]:
        """The platforms that some family compiles for."""
        return tuple(dict.fromkeys(p for f in self.families for p in f.platforms))

    def can_interpret(self) -> bool:
        """Whether some family's kernels run on CPU arrays in an interpreter."""
        return any(f.interprets for f in self.families)

    def stands_in(self, target: Target) -> Target:
        """What calls of a target are served as: a profile may have the host stand in for other hardware."""
        return self.standing_for if self.standing_for is not None and target == HOST else target

    def families_for(self, target: Target, variant: str | None = None) -> tuple[tuple[Family, bool], ...]:
        """(family, interpreted) of what serves a target, in the order in which they are tried; of the one called
        ``variant`` alone, if it is named.

        A family for some architectures is interpreted only if it is named: elsewhere its place is after one that runs
        everywhere.
        """
        found = [(f, False) for f in self.families if f.compiles_for(target)]
        if target.platform == "cpu":
            found += [(f, True) for f in self.families if f.interprets and (not f.targets or f.name == variant)]
        if not found and self.oracle:
            found = [(f, False) for f in self.families if "cpu" in f.platforms]
        return tuple((f, interpreted) for f, interpreted in found if variant in (None, f.name))

    def stages_for(self, framework: Framework, target: Target, variant: str | None = None) -> tuple[Family, ...]:
        """Those families that serve arrays of another library on a target as parts of its own programs."""
        if framework.name == self.framework or target.platform not in framework.embeds:
            return ()
        return tuple(f for f, interpreted in self.families_for(target, variant) if f.stages and not interpreted)

    def module_of(self, op: str, family: Family) -> str | None:
        """The module that implements ``op`` in a family, found without importing its framework, or None."""
        found = self._found.get((family.package, op))
        if found:
            return found.fn.__module__
        if op in self._elsewhere and family in self._broadest():
            return self._elsewhere[op]
        if family.package == IN_PROCESS:
            return None
        try:
            return family.module_of(op)
        except ModuleNotFoundError:  # the package itself is missing
            return None
        except (Exception, SystemExit) as e:  # somebody's package, which every list of backends asks
            say(f"portakern: backend {self.name!r}: {family.package} is left out, it cannot be imported: {e!r}")
            return None

    def families_with(self, op: str) -> Iterator[Family]:
        """The families that implement ``op``, found without importing its framework."""
        return (f for f in self.families if self.module_of(op, f) is not None)

    def implementation(self, op: str, family: Family) -> Implementation | None:
        """The implementation of ``op`` in a family, imported by convention (:meth:`Family.module_of`)."""
        if (family.package, op) not in self._found and (module := self.module_of(op, family)) is not None:
            self.check_available(family.stages is not None)
            try:
                family.load(module)
            except SystemExit as e:  # of a module, and not of the program that asked for it
                raise UnavailableError(
                    f"backend {self.name!r} cannot run here: {module} called sys.exit when it was imported"
                ) from e
            if op in self._elsewhere and (family.package, op) not in self._found:
                raise SpecError(
                    f"{self._elsewhere[op]}, declared to implement {op} on backend {self.name!r}, does not "
                    f"register it: decorate its function with @pk.backends()[{self.name!r}].implements({op!r})"
                )
        return self._found.get((family.package, op))

    def missing_kernels(self, target: Target | None = None) -> tuple[str, ...]:
        """In words, which of the kernels that are declared, for a target or for any, are not there, and what must be
        installed first."""
        missing = ((f, f.missing_packages()) for f in self.declared if target is None or f.compiles_for(target))
        said = (f"its kernels for {', '.join(f.targets or f.platforms)} need {why}" for f, why in missing if why)
        return tuple(dict.fromkeys(said))

    def check_variant(self, variant: str) -> None:
        """SpecError where no family has this name, UnavailableError where something must be installed first."""
        if variant not in [f.name for f in self.families]:
            names = ", ".join(f.name for f in self.families)
            why = next((f.missing_packages() for f in self.declared if f.name == variant), None)
            if why is not None:
                raise UnavailableError(f"variant {variant!r} of backend {self.name!r} cannot run here: it needs {why}")
            raise SpecError(f"backend {self.name!r} has no variant {variant!r}; expected one of {names}")

    def profile(self, name: str | None, target: str | None = None) -> AbstractContextManager[Any]:
        """The context of a profile; None is no profile. ``target``: the architecture that it stands in for.

        Raises:
          SpecError: no such profile, or none for such a target. UnavailableError, as it is entered: it cannot run here.
        """
        standing = self.profile_target(name, target)
        if name is None:
            return nullcontext()
        context = _load(self._profiles[name].context)
        if standing is None:
            plain: AbstractContextManager[Any] = context()
            return plain
        return self._stands_for(standing, context)

    def profile_target(self, name: str | None, target: str | None) -> Target | None:
        """What a profile stands in for; None: nothing, kernels run where they run."""
        if name is not None and name not in self._profiles:
            raise SpecError(
                f"backend {self.name!r} has no profile {name!r}; "
                f"expected one of {', '.join(self._profiles) or '(it has none)'}"
            )
        known = self._profiles[name].targets if name is not None else ()
        if target is None and not known:
            return None
        if target is None or target not in known:
            having = [n for n, p in self._profiles.items() if p.targets]
            what = f"profile {name!r}" if name is not None else "no profile"
            expected = f"one of {', '.join(known)}" if known else "none"
            raise SpecError(
                f"backend {self.name!r} with {what}: target is {target!r}; expected {expected}"
                + (
                    f" (a target goes with the profile {' or '.join(map(repr, having))})"
                    if having and not known
                    else ""
                )
            )
        return find(target).target

    def profile_names(self) -> tuple[str, ...]:
        """What :meth:`profile` takes."""
        return tuple(self._profiles)

    @functools.cached_property
    def _profiles(self) -> dict[str, Profile]:
        known = {n: p for f in self.families for n, p in f.profiles.items()}
        return {n: p if isinstance(p, Profile) else Profile(p) for n, p in known.items()}

    @contextmanager
    def _stands_for(self, target: Target, context: Callable[..., AbstractContextManager[Any]]) -> Iterator[None]:
        before = self.standing_for
        with context(target):
            self.standing_for = target
            forget()  # what was decided for the host's arrays
            try:
                yield
            finally:
                self.standing_for = before
                forget()

    def unavailable(self, staged: bool = False) -> str | None:
        """None, or what must be installed before this backend can run. ``staged``: on another library's arrays, whose
        programs its kernels become part of, so that its own library may be missing."""
        missing = [m for m in self.requires if not (staged and m == self.framework) and not _is_importable(m)]
        if not missing:
            return None
        own = [self.install if self.install and m == self.requires[-1] else m for m in missing]
        how = install.command(self.extra) if self.extra else f"run: pip install {' '.join(own)}"
        return f"{' and '.join(missing)} not installed; {how}"

    def check_available(self, staged: bool = False) -> None:
        """UnavailableError where something must be installed first."""
        reason = self.unavailable(staged)
        if reason:
            raise UnavailableError(f"backend {self.name!r} cannot run here: {reason}")


@functools.cache
def _staged(entry: str, impl: Implementation, framework: Framework) -> Implementation:
    found: Implementation = _load(entry)(impl, framework.embed)
    return found


def _load(entry: str) -> Any:
    """What a text "module:name" names."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that it lies in
        return False


def _same_place(a: Callable[..., Any], b: Callable[..., Any]) -> bool:
    return (a.__module__, getattr(a, "__qualname__", a)) == (b.__module__, getattr(b, "__qualname__", b))
