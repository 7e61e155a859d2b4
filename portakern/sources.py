"""The source of a result: the commit, and a hash of the code that decides it.

The hash is of syntax (:mod:`portakern.syntax`): of an implementation, of its op's spec, of what launches its kernels,
of every statement of backends and specs that these name, directly or not, and of the rows that the shipped tables of
tilings have for it. The names of modules, functions, variables and parameters do not count, nor do comments and
docstrings, nor how often the same statement is written. A result whose hash is no longer that of the source is another
program's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import subprocess
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import portakern
from portakern import syntax
from portakern.core import registry, tilings
from portakern.core.backend import Backend, Family
from portakern.core.targets import Target
from portakern.errors import SpecError
from portakern.syntax import Keyword, Module, Ref, Statement

__all__ = ["commit", "files", "fingerprint", "root", "trees", "unchanging"]

HERE = "portakern"
TOPS = ("portakern.backends", registry.SPECS)
ROUNDS = 3  # how far a statement's hash sees: with 0, two functions called in each other's place would go unseen
Location = tuple[str, int]
"""A statement: its module, and its number there."""


@dataclass
class _Known:
    """What was read inside :func:`unchanging`: the statements of checkouts, and the hashes that were computed."""

    trees: dict[Path, _Tree] = field(default_factory=dict)
    hashes: dict[object, str | None] = field(default_factory=dict)


_known: ContextVar[_Known | None] = ContextVar("sources that do not change", default=None)


def root() -> Path:
    """The folder that holds the package that runs."""
    return Path(portakern.__file__).resolve().parents[1]


@functools.cache
def commit() -> str | None:
    """The commit of the checkout that runs, with a + where files differ from it; None where there is no checkout."""
    found = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return None if found is None else found + ("+" if changed else "")


def _git(*arguments: str) -> str | None:
    if not (root() / ".git").exists():  # the package may lie in somebody else's repository
        return None
    try:
        done = subprocess.run(["git", "-C", str(root()), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def fingerprint(
    op: str, backend: Backend, variant: str | None, target: Target, checkout: Path | None = None
) -> str | None:
    """The hash of what decides a result of ``op`` on a variant of a backend, or None where that is no module of
    portakern's.

    Args:
      variant: None: the first that has the op there.
      target: whose tilings count.
      checkout: where the sources lie; None: those that run.
    """
    place = checkout or root()
    known = _known.get()
    if known is None:
        return _fingerprint(_Tree(place), op, backend, variant, target)
    key = (place, op, backend.name, variant, target)
    if key not in known.hashes:
        tree = known.trees.setdefault(place, _Tree(place))
        known.hashes[key] = _fingerprint(tree, op, backend, variant, target)
    return known.hashes[key]


def _fingerprint(tree: _Tree, op: str, backend: Backend, variant: str | None, target: Target) -> str | None:
    # Sources are read, not run: of what cannot be imported here too, such as Hopper's Pallas with an older JAX.
    lacking = [
        f for f in backend.declared if f.missing_packages() and f.compiles_for(target) and variant in (None, f.name)
    ]
    families = [
        f for f in (*(f for f, _ in backend.families_for(target, variant)), *lacking) if backend.module_of(op, f)
    ]
    module = backend.module_of(op, families[0]) if families else None
    if module is None or not files(tree.root, module):
        return None
    return _hashed(tree, op, families[0], module, target)


@contextlib.contextmanager
def unchanging() -> Iterator[None]:
    """Inside, sources are taken for what they are when first asked about: a report asks of thousands of rows."""
    if _known.get() is not None:
        yield
        return
    token = _known.set(_Known())
    try:
        yield
    finally:
        _known.reset(token)


def trees(paths: Iterable[Path]) -> str:
    """The hash of all statements of files, whatever the files are called."""
    read = [syntax.read(HERE, f.read_text(encoding="utf-8")) for f in paths]
    return _digest(sorted(_digest(map(_last_name, s.tokens)) for m in read for s in m.statements))


def _last_name(token: str | Ref | Keyword) -> str:
    return token if isinstance(token, str) else token.path.rpartition(".")[2] if isinstance(token, Ref) else token.name


def files(checkout: Path, module: str) -> list[Path]:
    """The files of a module of portakern in a checkout: all of a package's; none where there is no such module."""
    path = checkout.joinpath(*module.split("."))
    file = path.with_suffix(".py")
    if module.partition(".")[0] != HERE:
        return []
    return [file] if file.is_file() else sorted(path.glob("*.py")) if (path / "__init__.py").is_file() else []


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\f".join(texts).encode()).hexdigest()[:16]


def _hashed(tree: _Tree, op: str, family: Family, module: str, target: Target) -> str:
    of_gradients = registry.find_spec(op)
    forward = registry.forward_of(of_gradients) if of_gradients.is_vjp else None
    specs = [of_gradients, *([forward] if forward else [])]
    roots = tree.implementing(module, [s.name for s in specs])
    roots += tree.find(family.plans.replace(":", "."))[0] if family.plans else []
    homes = set[str]()
    for s in specs:
        roots += tree.find(f"{s.fn.__module__}.{s.name}")[0]
        homes |= tree.beside(s.fn.__module__)
    text = sorted({tree.hashed(at, ROUNDS + 1) for at in tree.reached(roots, homes)})
    package = module.rpartition(".")[0]
    folder = tree.root.joinpath(*package.split(".")).parent / "tuned"
    for table in tilings.tables_for(target):
        try:
            rows = tilings.shipped_rows(folder, table, op, package.rpartition(".")[2])
        except SpecError:  # a wrong table is the tables' own matter
            continue
        text.append(json.dumps([[table, dict(r.key), dict(r.tiling)] for r in rows], sort_keys=True))
    return _digest(text)


class _Tree:
    """The statements of a checkout's modules, and the statements that each refers to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file, self.module = functools.cache(self._file), functools.cache(self._module)
        self.find, self.added = functools.cache(self._find), functools.cache(self._added)
        self.hashed, self.named = functools.cache(self._hashed), functools.cache(self._named)

    def _file(self, name: str) -> Path | None:
        """The file of a module; of a package, its ``__init__.py``."""
        path = self.root.joinpath(*name.split("."))
        return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)

    def _module(self, name: str) -> Module:
        file = self.file(name)
        assert file is not None
        return syntax.read(name, file.read_text(encoding="utf-8"))

    def _find(self, path: str) -> tuple[list[Location], str]:
        """The statements that define what a path names, none outside backends and specs; and what tells it from what
        else they define."""
        names = path.split(".")
        held = next((i for i in range(len(names), 0, -1) if self.file(".".join(names[:i]))), 0)
        name, rest = ".".join(names[:held]), names[held:]
        if not f"{name}.".startswith(tuple(f"{top}." for top in TOPS)):
            return [], ".".join(rest)
        if not rest:
            return self.every(name), ""
        module = self.module(name)
        if rest[0] in module.names:
            found = [(name, n) for n in module.names[rest[0]]]
            return found, ".".join([str(self.statement(found[0]).binds.index(rest[0])), *rest[1:]])
        elsewhere = module.imported.get(rest[0])
        return self.find(".".join([elsewhere, *rest[1:]])) if elsewhere else ([], ".".join(rest))

    def every(self, name: str) -> list[Location]:
        return [(name, n) for n in range(len(self.module(name).statements))] if self.file(name) else []

    def statement(self, at: Location) -> Statement:
        return self.module(at[0]).statements[at[1]]

    def implementing(self, name: str, ops: list[str]) -> list[Location]:
        """What a module has for the first of ``ops``: what is registered under its name; or what has the name of one of
        them, as a library's function has; or all of the module."""
        every = self.every(name)
        registered = [at for at in every if ops[0] in self.statement(at).calls]
        called = [at for op in ops for at in every if op in self.statement(at).binds]
        return registered or called or every

    def beside(self, name: str) -> set[str]:
        """The modules of a spec: that one, and where specs have a package for it, all in it."""
        package = name.rpartition(".")[0]
        return {name} if package in TOPS else {f"{package}.{f.stem}" for f in files(self.root, package)}

    def reached(self, roots: Iterable[Location], homes: set[str]) -> set[Location]:
        """What statements name, from ``roots`` on, and what adds to any of that in its own module or in ``homes``."""
        queue, found = list(roots), set[Location]()
        while queue:
            at = queue.pop()
            if at not in found:
                found.add(at)
                queue += self.named(at)
                queue += [to for name in {at[0], *homes} for to in self.added(name).get(at, ())]
        return found

    def _named(self, at: Location) -> list[Location]:
        """The statements that a statement names."""
        paths = dict.fromkeys(t.path for t in self.statement(at).tokens if isinstance(t, Ref))
        return [to for path in paths for to in self.find(path)[0]]

    def _added(self, name: str) -> dict[Location, list[Location]]:
        """Statement -> those of a module that register with what it defines, or change it."""
        found: dict[Location, list[Location]] = {}
        for at in self.every(name):
            for path in self.statement(at).adds_to:
                for to in self.find(path)[0]:
                    found.setdefault(to, []).append(at)
        return found

    def _hashed(self, at: Location, rounds: int) -> str:
        """A hash of a statement, in which what it names stands as its own hash, that many rounds deep; "" of none."""
        if not rounds:
            return ""
        seen: dict[object, int] = {}
        text = []
        for t in self.statement(at).tokens:
            if isinstance(t, Ref):
                to, rest = self.find(t.path)
                number = seen.setdefault(tuple(to) or rest, len(seen))
                text.append(f"{number} {[self.hashed(other, rounds - 1) for other in to]} {rest}")
            else:
                text.append(self.keyword(t) if isinstance(t, Keyword) else t)
        return _digest(text)

    def keyword(self, k: Keyword) -> str:
        """An argument by name as its place among the parameters of what takes it, where that is known."""
        takes = (self.statement(at).params for path in k.functions for at in self.find(path)[0])
        return next((str(p.index(k.name)) for p in takes if k.name in p), k.name)
