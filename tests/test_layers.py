"""The house is acyclic: no module of portakern imports, anywhere in its text, one that leads back to it."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "portakern"


def modules() -> dict[str, Path]:
    """Name -> file of every module of the package, the folders that it links to included."""
    found = {}
    for folder, _, names in os.walk(ROOT, followlinks=True):
        for file in names:
            if file.endswith(".py"):
                path = Path(folder) / file
                parts = ("portakern", *path.relative_to(ROOT).with_suffix("").parts)
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.AST, package: str, known: set[str]) -> Iterator[str]:
    """The modules among ``known`` that a tree imports at any depth, but for blocks under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for a in node.names:
                name = f"{base}.{a.name}"
                if name in known or base in known:
                    yield name if name in known else base
        yield from imported(node, package, known)


def graph(files: dict[str, Path]) -> dict[str, set[str]]:
    """Module -> what it imports."""
    edges = {}
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        edges[name] = set(imported(ast.parse(path.read_text(encoding="utf-8")), package, set(files))) - {name}
    return edges


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules, larger than one, each of which reaches all the others (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            circle = [stack.pop()]
            while circle[-1] != node:
                circle.append(stack.pop())
            if len(circle) > 1:
                found.append(sorted(circle))

    for node in edges:
        if node not in index:
            visit(node)
    return found


def test_no_import_runs_in_a_circle():
    assert circles(graph(modules())) == []


def room(name: str) -> str:
    """The folder that a module stands in: a tool is one."""
    parts = name.split(".")
    return ".".join(parts[: 3 if parts[1:2] == ["tools"] else 2])


def rooms(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same graph between the folders of ``portakern/`` and ``portakern/tools/`` (a module there counts as one)."""

    found: dict[str, set[str]] = {}
    for name, others in edges.items():
        found.setdefault(room(name), set()).update({room(o) for o in others} - {room(name)})
    return found


def test_no_folder_imports_back():
    """What a folder builds on knows nothing of it: binding of frameworks' wings, routing of backends, compiling of the
    ops' face.
    """
    assert circles(rooms(graph(modules()))) == []


def test_a_circle_is_seen(tmp_path):
    lazy = tmp_path / "a.py"
    lazy.write_text("def f():\n    from portakern import b\n")
    other = tmp_path / "b.py"
    other.write_text("import portakern.a\n")
    typed = tmp_path / "c.py"
    typed.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import portakern.d\n")
    back = tmp_path / "d.py"
    back.write_text("import portakern.c\n")
    files = {"portakern.a": lazy, "portakern.b": other, "portakern.c": typed, "portakern.d": back}
    assert circles(graph(files)) == [["portakern.a", "portakern.b"]]
