"""The cache of compiled calls: one JSON file for each call, named after a hash of everything that its result depends
on.

These are the call, the target, the compilers' versions, the tables of tilings, and the text of every module that the
implementation and the spec import within their own packages.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from portakern.core import tilings
from portakern.core.observe import say
from portakern.files import cache_folder, write_atomically
from portakern.tools.compile.build import Build
from portakern.tools.compile.pool import Job

__all__ = ["digest", "find", "find_data", "keep", "keep_data", "key", "look_again"]


def key(job: Job) -> str:
    """A name for the job's result."""
    modules = [
        job.backend.module_of(job.spec.name, job.family) or "",
        job.family.compiler or "",
        job.spec.fn.__module__,
        "portakern.core.machine_code",
        "portakern.tools.compile.build",
    ]
    what = {
        "job": [
            job.spec.name,
            job.backend.name,
            job.family.name,
            job.hardware.name,
            job.signature,
            job.tiling,
            job.quick,
        ],
        "hardware": repr(job.hardware),
        "versions": job.family.load_compiler().versions(job.hardware),
        "source": _digest(frozenset(modules)),
        "tilings": list(tilings.content(modules[0].rpartition(".")[0], job.backend.name, job.hardware.target).values()),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def look_again() -> None:
    """Read source files anew: they may have changed since the last call of this process."""
    _read.cache_clear()
    _digest.cache_clear()


def digest(modules: Iterable[str], within: Iterable[str] = ()) -> str:
    """Of the text of these modules, and of what they import within their own packages, or within those named."""
    return _digest(frozenset(modules), frozenset(within))


def find(name: str) -> Build | None:
    """A kept result; None where there is none, or somebody's accident: the call is compiled again."""
    try:
        return Build.from_dict(find_data(name))
    except (KeyError, TypeError, AttributeError, RecursionError):
        return None


def find_data(name: str) -> Any:
    """What is kept under a name, as plain data; None where nothing is, or nothing that can be read."""
    try:
        return json.loads(_file(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def keep(name: str, built: Build) -> None:
    """Keep a result, unless another attempt could end otherwise."""
    if built.final:
        keep_data(name, built.to_dict())


def keep_data(name: str, data: Any) -> None:
    """Keep plain data under a name. Where the folder cannot be used that is said once, and the result stands."""
    try:
        write_atomically(_file(name), json.dumps(data) + "\n")
    except OSError as e:
        where = f"{cache_folder()}: {e.strerror or e}"
        say(f"portakern: compiled kernels cannot be cached in {where}; set PORTAKERN_CACHE to a writable folder")


def _file(name: str) -> Path:
    return cache_folder() / "compile" / name[:2] / f"{name}.json"


@functools.cache
def _digest(modules: frozenset[str], within: frozenset[str] = frozenset()) -> str:
    """Of the text of these modules and of those they import, directly or not, from the same top-level packages, or from
    the packages named."""
    roots = within or {m.partition(".")[0] for m in modules if m}
    seen: dict[str, str] = {}
    queue = sorted(m for m in modules if m)
    while queue:
        module = queue.pop()
        if module in seen:
            continue
        text, imports = _read(module)
        seen[module] = text
        queue += [i for i in imports if any(f"{i}.".startswith(f"{r}.") for r in roots) and i not in seen]
    return hashlib.sha256("".join(f"{m}\0{t}\0" for m, t in sorted(seen.items())).encode()).hexdigest()


@functools.cache
def _read(module: str) -> tuple[str, tuple[str, ...]]:
    """A module's text, and all that it may import anywhere in it; nothing for a name that is no module with a source
    file.
    """
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return "", ()
    if found is None or not found.origin or not found.origin.endswith(".py"):
        return "", ()
    text = Path(found.origin).read_text(encoding="utf-8")
    package = module if found.submodule_search_locations is not None else module.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                if node.level
                else node.module or ""
            )
            names += [base, *(f"{base}.{a.name}" for a in node.names)]
    return text, tuple(names)
