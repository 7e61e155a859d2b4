"""Lines of code of each op on each backend, without blank lines, comments and docstrings."""

from __future__ import annotations

import ast
import difflib
import functools
import io
import statistics
import textwrap
import tokenize
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from maint.markdown import NONE, table
from maint.measurements import StoredResults
from portakern.core import registry
from portakern.sources import files

__all__ = ["code_lines", "lines", "ops", "ports", "written"]

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SILENT = {getattr(tokenize, n) for n in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")}


def code_lines(source: str) -> int:
    """Lines on which code stands."""
    return len(_code_lines(source))


@functools.lru_cache(1024)  # several commands, or tables, in one process count the same text
def _code_lines(source: str) -> set[int]:
    """Their numbers: not blank, no comment, no docstring."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            first = node.body[0]
            found.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def ops(root: Path) -> list[str]:
    """The ops whose specs lie in a checkout."""
    return [op for op, module in sorted(registry.own_modules().items()) if files(root, module)]


def _text(root: Path, module: str) -> list[str]:
    """The lines of a module's code, without what hangs behind them."""
    return [line for file in files(root, module) for line in _bare(file.read_text(encoding="utf-8"))]


@functools.lru_cache(1024)
def _bare(source: str) -> list[str]:
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    return [line for n in sorted(_code_lines(source)) if (line := lines[n - 1].strip())]


def written(kept: StoredResults) -> dict[str, dict[str, tuple[int, int]]]:
    """Op -> port -> lines of its module, and how many of them stand in no other backend's module of that op in this
    order.

    A port is a package of kernels that a compiler takes; the oracle is none. Variants of one backend share what they
    like; what several have of an op lies in ``lib``, a column of its own.
    """
    compiled = [f.package for b in registry.backends().values() if b.auto for f in b.declared if f.compiler]
    packages = _with_lib(p for p in compiled if p)
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for op in ops(kept.root):
        texts = {p: text for p in packages if (text := _text(kept.root, f"{p}.{op}"))}
        found[op] = {}
        for p, text in texts.items():
            others = [other for q, other in texts.items() if _backend(q) != _backend(p)]
            pairs = (difflib.SequenceMatcher(None, other, text, autojunk=False) for other in others)
            shared = {i for pair in pairs for m in pair.get_matching_blocks() for i in range(m.b, m.b + m.size)}
            found[op][p.rpartition("backends.")[2]] = len(text), len(text) - len(shared)
    return found


def _with_lib(packages: Iterable[str]) -> list[str]:
    """These packages, and of each backend the one that its families share modules of."""
    found = [*packages]
    return list(dict.fromkeys([*found, *(f"{p.rpartition('.')[0]}.lib" for p in found)]))


def _backend(package: str) -> str:
    return package.rpartition("backends.")[2].partition(".")[0]


def ports(kept: StoredResults) -> str:
    """A line an op: the lines of each port, and how many are its own."""
    found = written(kept)
    columns = list(dict.fromkeys(port for there in found.values() for port in there))
    body = [[f"`{op}`", *(_share(there.get(port)) for port in columns)] for op, there in found.items()]
    notes = (
        "Lines: code of the op's own module, and the share of its lines that no other backend's module of the op has; "
        "lib: the module that variants of a backend share. "
    )
    return table(["op", *columns], body) + "\n\n" + textwrap.fill(notes + _alone(found), 118)


def _alone(written: Mapping[str, Mapping[str, tuple[int, int]]]) -> str:
    """How much of a port is its own: of the median one, and of the one with the least."""
    shares = [(own / n, op, port) for op, there in written.items() for port, (n, own) in there.items() if n]
    if not shares:
        return ""
    least, op, port = min(shares)
    return (
        f"The median share is {statistics.median(s for s, _, _ in shares):.0%}; the smallest is {least:.0%}, of "
        f"`{op}` in {port}."
    )


def _share(found: tuple[int, int] | None) -> str:
    return NONE if found is None or not found[0] else f"{found[0]} ({found[1] / found[0]:.0%})"


def lines(kept: StoredResults) -> str:
    """Op by backend, counted from the source as it is, whatever of it can be imported here. A file is counted once: one
    that holds an op and its gradient in the op's row."""
    names = ops(kept.root)
    packages = {f.package for b in registry.backends().values() if b.auto for f in b.declared if f.package}
    columns = {p.rpartition("backends.")[2]: p for p in _with_lib(sorted(packages))}
    columns = {"spec": registry.SPECS} | {
        head: p for head, p in columns.items() if any(files(kept.root, f"{p}.{op}") for op in names)
    }
    body = [[f"`{op}`", *(_count(files(kept.root, f"{p}.{op}")) for p in columns.values())] for op in names]
    own = {f for p in columns.values() for op in names for f in files(kept.root, f"{p}.{op}")}
    folders = dict.fromkeys(p if p == registry.SPECS else f"portakern.backends.{_backend(p)}" for p in columns.values())
    beside = {f.rpartition(".")[2]: {*kept.root.joinpath(*f.split(".")).rglob("*.py")} - own for f in folders}
    return table(["op", *columns], body) + (
        "\n\nLines of code: no blank lines, comments or docstrings. One module may hold an op and its gradient. "
        "Modules that all ops share: "
        f"{', '.join(f'{_count(among)} lines in {name}' for name, among in beside.items())}."
    )


def _count(among: Collection[Path]) -> str:
    return str(sum(code_lines(f.read_text(encoding="utf-8")) for f in among)) if among else NONE
