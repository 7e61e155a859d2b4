"""Check names: no two classes share one, and none is on the lists of words that only their authors understand.

    python -m maint.names        # what breaks a rule, one a line; exit status 1 where anything does

``specs/``, ``backends/``, ``portakern/`` and ``maint/`` are read. The rules are for modules, classes, functions, their
parameters, and the annotated fields of classes, which reports and results show. Options of commands are not read.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Set
from pathlib import Path

from maint.report import checkout

__all__ = ["BANNED", "BANNED_ALONE", "BANNED_MODULES", "BANNED_TEXT", "SHARED", "faults"]

FOLDERS = ("portakern", "specs", "backends", "maint")

BANNED = {
    "asked": "requested, or what it is: options, arguments",
    "conceded": "not_required",
    "concessions": "not_required",
    "form": "signature, layout, shape or kind",
    "fully": "full_... of what: full_shapes",
    "got": "actual",
    "guest": "streamed",
    "guests": "streamed tiles",
    "held": "what it is: values, outputs, registers",
    "house": "package",
    "ours": "own, or actual beside expected",
    "place": "index, position, path, pointers or target",
    "places": "indices, positions or slots",
    "room": "width, space or whether it fits",
    "said": "text or message",
    "theirs": "original, candidate or expected",
    "told": "message, description or callbacks",
    "took": "seconds, or bytes of what",
    "together": "what is counted: heads_per_block, tiles_per_iteration",
    "turn": "iteration, step or barrier",
    "turns": "iterations or steps",
    "unmet": "not_reached",
    "untold": "unknown",
    "unvisited": "not_covered",
    "walls": "protections",
    "way": "mode, variant or layout",
    "ways": "modes, variants or layouts",
    "whole": "full or total",
}
"""Name of a module, class, function, parameter or field, without underscores before it -> what to call it."""

BANNED_ALONE = {"it", "of", "so", "there"}
"""Names that mean something in a sentence alone. A class method ``of`` is a constructor: ``Scores.of(call)``."""

BANNED_MODULES = {"here", "kept", "misc", "part", "parts", "reach", "run", "utils", "what"}
"""Names that say nothing of what a module holds."""

BANNED_TEXT = {
    r"\bwings?\b": "adapter",
    r"\bours\b": "portakern's",
    r"\bguests?\b": "streamed rows or tiles",
    r"\bat home\b": "resident",
}
"""Words of docstrings, as regular expressions -> what to write."""

SHARED = {
    r"\w+Config": "what an op's kernels take as a tiling on one backend: each has a configs.py of its own",
}
"""Names that classes of several modules may share, as regular expressions -> why. None may share one in a module."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def faults(root: Path) -> list[str]:
    """What breaks a rule in a checkout, each with its file, its line and the name to use."""
    found, classes = list[str](), defaultdict[str, list[str]](list)
    for file in sorted(f for folder in FOLDERS for f in _files(root / folder)):
        at = file.relative_to(root).as_posix()
        found += [f"{at}:1: module {file.stem!r}; {hint}" for hint in _hint(file.stem, BANNED_MODULES | BANNED_ALONE)]
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found += [f"{at}:{line}: {fault}" for line, fault in _in_tree(tree, inside=None)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(f"{at}:{node.lineno}")
    for name, where in classes.items():
        if len(where) > 1 and not any(re.fullmatch(pattern, name) for pattern in SHARED):
            found.append(f"{where[0]}: class {name!r} is also in {', '.join(where[1:])}; give each a name of its own")
    return found


def _files(folder: Path) -> list[Path]:
    """The Python files of a folder; of portakern/ those that links lead to lie in specs/ and backends/."""
    return [f for f in folder.rglob("*.py") if not any(p.is_symlink() for p in f.parents)]


def _in_tree(tree: ast.AST, inside: Definition | None) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of everything that is defined in a tree. ``inside``: the definition that it is of."""
    if isinstance(tree, ast.Module | Definition):
        yield from _in_docstring(tree)
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            constructor = node.name == "of" and isinstance(inside, ast.ClassDef)
            yield from ((node.lineno, f"{node.name!r}; {hint}") for hint in _hint(node.name) if not constructor)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _takes_options(node):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield from ((a.lineno, f"parameter {a.arg!r}; {hint}") for a in every for hint in _hint(a.arg))
        if isinstance(node, ast.AnnAssign) and isinstance(tree, ast.ClassDef) and isinstance(node.target, ast.Name):
            yield from (
                (node.lineno, f"field {node.target.id!r}; {hint}") for hint in _hint(node.target.id, frozenset())
            )
        yield from _in_tree(node, node if isinstance(node, Definition) else inside)


def _in_docstring(node: ast.Module | Definition) -> Iterator[tuple[int, str]]:
    text = ast.get_docstring(node) or ""
    for pattern, instead in BANNED_TEXT.items():
        for word in re.findall(pattern, text, re.IGNORECASE):
            yield getattr(node, "lineno", 1), f"docstring says {word!r}; write {instead}"


def _hint(name: str, empty: Set[str] = frozenset(BANNED_ALONE)) -> list[str]:
    """What to use in place of a name; nothing where it may stay. ``empty``: names that say nothing."""
    name = name.lstrip("_")
    if name in empty:
        return ["say what it stands for"]
    return [f"use {BANNED[name]}"] if name in BANNED else []


def _takes_options(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a command, whose parameters are a user's options."""
    return any("command" in ast.unparse(d) or "callback" in ast.unparse(d) for d in node.decorator_list)


def main() -> int:
    found = faults(checkout())
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
