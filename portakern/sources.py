"""What a result was measured of: the commit, and a hash of the sources that decide it.

The hash is of an implementation's module, of the modules of backends and specs that it imports, directly or not, of its
op's spec, of what launches its kernels, and of the rows that the shipped tables of tilings have for it. Comments,
docstrings and blank lines do not count. A result whose hash is no longer that of the source is another program's.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import io
import json
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

import portakern
from portakern.core import registry, tilings
from portakern.core.backend import Backend, Family
from portakern.core.targets import Target
from portakern.errors import SpecError

__all__ = ["code", "commit", "files", "fingerprint", "imports", "root", "unchanging"]

HERE = "portakern"
TOPS = ("portakern.backends", registry.SPECS)
_known: ContextVar[dict[tuple[object, ...], str] | None] = ContextVar(
    "hashes of sources that do not change", default=None
)


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
    # Sources are read, not run: of what cannot be imported here too, such as Hopper's Pallas with an older JAX.
    lacking = [f for f in backend.declared if f.lacks() and f.compiles_for(target) and variant in (None, f.name)]
    families = [f for f in (*(f for f, _ in backend.families_for(target, variant)), *lacking) if backend.where(op, f)]
    module = backend.where(op, families[0]) if families else None
    if module is None or not files(place, module):
        return None
    known, key = _known.get(), (place, op, module, families[0].replays, target)
    if known is None:
        return _hashed(place, op, families[0], module, target)
    if key not in known:
        known[key] = _hashed(place, op, families[0], module, target)
    return known[key]


@contextlib.contextmanager
def unchanging() -> Iterator[None]:
    """Inside, sources are taken for what they are when first asked about: a report asks of thousands of rows."""
    if _known.get() is not None:
        yield
        return
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def _hashed(place: Path, op: str, family: Family, module: str, target: Target) -> str:
    launch = [family.replays.partition(":")[0]] if family.replays else []
    of_gradients = registry.find_spec(op)
    forward = registry.forward_of(of_gradients) if of_gradients.is_vjp else None
    specs = [f"{registry.SPECS}.{s}" for s in (op, *([forward.name] if forward else ()))]
    text = [code(f) for f in sorted(_reached(place, [module, *launch, *specs]))]
    package = module.rpartition(".")[0]
    folder = place.joinpath(*package.split(".")).parent / "tuned"
    for table in tilings.tables_for(target):
        try:
            rows = tilings.shipped_rows(folder, table, op, package.rpartition(".")[2])
        except SpecError:  # a wrong table is the tables' own matter
            continue
        text.append(json.dumps([[table, dict(r.key), dict(r.tiling)] for r in rows], sort_keys=True))
    return hashlib.sha256("\f".join(text).encode()).hexdigest()[:16]


def _reached(place: Path, modules: Iterable[str]) -> set[Path]:
    """The files of modules, all of a package's, and of what they import among backends and specs."""
    queue, found = list(modules), set[Path]()
    seen = whole = set(queue)
    while queue:
        module = queue.pop()
        # a package that was not asked for stands for its __init__.py alone
        own = files(place, module) if module in whole else files(place, module)[:1]
        found.update(own)
        new = {name for file in own for top in TOPS for name in imports(file, top)} - seen
        seen = seen | new
        queue += sorted(new)
    return found


def files(place: Path, module: str) -> list[Path]:
    """The files of a module of portakern in a checkout: all of a package's; none where there is no such module."""
    path = place.joinpath(*module.split("."))
    file = path.with_suffix(".py")
    if module.partition(".")[0] != HERE:
        return []
    return [file] if file.is_file() else sorted(path.glob("*.py")) if (path / "__init__.py").is_file() else []


def imports(file: Path, top: str) -> set[str]:
    """Modules under ``top`` that a file names anywhere in its imports."""
    return {n for n in _imported(file.read_text(encoding="utf-8")) if n == top or n.startswith(top + ".")}


@functools.lru_cache(1024)  # by their text, as files of one name change, and those of another checkout are the same
def _imported(source: str) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return frozenset(names)


def code(file: Path) -> str:
    """A file without comments, docstrings, blank lines and what hangs behind lines."""
    return _code(file.read_text(encoding="utf-8"))


@functools.lru_cache(1024)
def _code(source: str) -> str:
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            for i in range(first.lineno - 1, first.end_lineno or first.lineno):
                lines[i] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())
