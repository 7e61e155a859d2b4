"""Lines of code of each op on each backend: those that are not blank, comment or docstring."""

from __future__ import annotations

import ast
import difflib
import functools
import io
import statistics
import textwrap
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from maint.kept import Kept
from maint.markdown import NONE, table
from portakern.core import registry
from portakern.sources import files

__all__ = ["code_lines", "lines", "ops", "ports", "written"]

SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@functools.lru_cache(1024)  # several commands, or tables, in one process count the same text
def code_lines(source: str) -> int:
    """Lines on which code stands."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            first = node.body[0]
            found.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(found)


def _shared(root: Path, ops: set[str], top: str) -> set[Path]:
    """The other modules of a package that the modules of its ops import, directly or not."""
    queue, seen, found = sorted(ops), set(ops), set[Path]()
    own = {file for op in ops for file in files(root, op)}
    while queue:
        module = queue.pop()
        # a package that is no op stands for its __init__.py alone
        mine = files(root, module) if module in ops else files(root, module)[:1]
        found.update(mine)
        new = {name for file in mine for name in _imports(file, top)} - seen
        seen |= new
        queue += sorted(new)
    return found - own


def ops(root: Path) -> list[str]:
    """The ops whose specs lie in a checkout."""
    return [op for op in registry.ops() if files(root, f"{registry.SPECS}.{op}")]


def _text(root: Path, module: str) -> list[str]:
    return [line.strip() for file in files(root, module) for line in _code(file).splitlines()]


def written(kept: Kept) -> dict[str, dict[str, tuple[int, int]]]:
    """Op -> port -> lines of its module, and how many of them stand in no other backend's module of that op in this
    order.

    A port is a package of kernels that a compiler takes; the oracle is none. Variants of one backend share what they
    like.
    """
    packages = [f.package for b in registry.backends().values() if b.auto for f in b.declared if f.compiler]
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for op in ops(kept.root):
        texts = {p: text for p in packages if p and (text := _text(kept.root, f"{p}.{op}"))}
        found[op] = {}
        for p, text in texts.items():
            others = [other for q, other in texts.items() if _backend(q) != _backend(p)]
            pairs = (difflib.SequenceMatcher(None, other, text, autojunk=False) for other in others)
            shared = {i for pair in pairs for m in pair.get_matching_blocks() for i in range(m.b, m.b + m.size)}
            found[op][p.rpartition("backends.")[2]] = len(text), len(text) - len(shared)
    return found


def _backend(package: str) -> str:
    return package.rpartition("backends.")[2].partition(".")[0]


def ports(kept: Kept) -> str:
    """A line an op: the lines of each port, and how many are its own."""
    found = written(kept)
    columns = list(dict.fromkeys(port for there in found.values() for port in there))
    body = [[f"`{op}`", *(_share(there.get(port)) for port in columns)] for op, there in found.items()]
    notes = "Lines: code of the op's own module, and the share of it that no other backend's module of the op has. "
    return table(["op", *columns], body) + "\n\n" + textwrap.fill(notes + _alone(found), 118)


def _alone(written: Mapping[str, Mapping[str, tuple[int, int]]]) -> str:
    """How much of a port is its own: of the median one, and of the one with the least."""
    shares = [(own / n, op, port) for op, there in written.items() for port, (n, own) in there.items() if n]
    if not shares:
        return ""
    least, op, port = min(shares)
    return (
        f"Half of the ports have at least {statistics.median(s for s, _, _ in shares):.0%} of their lines to "
        f"themselves; the least, {least:.0%}, has {port}'s `{op}`."
    )


def _share(found: tuple[int, int] | None) -> str:
    return NONE if found is None or not found[0] else f"{found[0]} ({found[1] / found[0]:.0%})"


def lines(kept: Kept) -> str:
    """Op by backend, counted from the source as it is, whatever of it can be imported here. A file is counted once."""
    names = ops(kept.root)
    specs = [f"{registry.SPECS}.{op}" for op in names]
    columns: dict[str, tuple[str, dict[str, str]]] = {"spec": (registry.SPECS, dict(zip(names, specs, strict=True)))}
    for b in registry.backends().values():
        packages = sorted(
            p for f in b.declared if (p := f.package) and b.auto and any(files(kept.root, f"{p}.{op}") for op in names)
        )
        top = min(packages, key=len, default="").rpartition(b.name)[0] + b.name
        for p in packages:
            columns[p.rpartition("backends.")[2]] = (
                top,
                {op: f"{p}.{op}" for op in names if files(kept.root, f"{p}.{op}")},
            )

    def count(among: set[Path]) -> str:
        return str(sum(code_lines(f.read_text(encoding="utf-8")) for f in among)) if among else NONE

    body = [
        [
            f"`{op}`",
            *(count(set(files(kept.root, there[op])) if op in there else set()) for _, there in columns.values()),
        ]
        for op in names
    ]
    own = {f for _, there in columns.values() for module in there.values() for f in files(kept.root, module)}
    shared = {name: _shared(kept.root, set(there.values()), top) - own for name, (top, there) in columns.items()}
    times = Counter(file for found in shared.values() for file in found)
    body.append(["what they share", *(count({f for f in found if times[f] == 1}) for found in shared.values())])
    common: dict[str, set[Path]] = {}
    for name, found in shared.items():
        common.setdefault(_backend(columns[name][0]), set()).update(f for f in found if times[f] > 1)
    several = ", ".join(f"{name} {count(among)}" for name, among in common.items() if among)
    return table(["op", *columns], body) + (
        "\n\nLines of code: no blank lines, comments or docstrings. What they share: the modules beside them that "
        f"they import, and no other column. Modules that several columns import: {several or NONE}."
    )


def _imports(file: Path, top: str) -> set[str]:
    """Modules under ``top`` that a file names anywhere in its imports."""
    return {n for n in _imported(file.read_text(encoding="utf-8")) if n == top or n.startswith(top + ".")}


@functools.lru_cache(1024)
def _imported(source: str) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return frozenset(names)


def _code(file: Path) -> str:
    """A file without comments, docstrings, blank lines and what hangs behind lines."""
    return _bare(file.read_text(encoding="utf-8"))


@functools.lru_cache(1024)
def _bare(source: str) -> str:
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
