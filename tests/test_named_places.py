"""Modules, files and helpers that docstrings, CONTRIBUTING.md and the guides for contributors name are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.test_layers import modules

ROOT = Path(__file__).resolve().parents[1]
GUIDES = ("CONTRIBUTING.md", "docs/how-to/new-op.md", "docs/how-to/new-backend.md", "docs/how-to/third-party-kernel.md")
GUIDE = "\n".join((ROOT / guide).read_text(encoding="utf-8") for guide in GUIDES)
HOMES = (ROOT, ROOT / "portakern", *(p for p in (ROOT / "backends").iterdir() if p.is_dir()))


def docstrings() -> dict[str, str]:
    """Module -> all of its docstrings."""
    found = {}
    for name, file in modules().items():
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found[name] = "\n".join(ast.get_docstring(n) or "" for n in nodes if isinstance(n, documented))
    return found


def resolves(dotted: str, known: dict[str, Path]) -> bool:
    """Whether a dotted name is a module, or a name that the text of its closest module has."""
    module = dotted
    while module not in known:
        module = module.rpartition(".")[0]
        if not module:
            return False
    rest = dotted[len(module) + 1 :].partition(".")[0]
    return not rest or bool(re.search(rf"\b{rest}\b", known[module].read_text(encoding="utf-8")))


def test_modules_that_are_named_are_there():
    known = {**modules()}
    named = {
        (where, name)
        for where, text in {**docstrings(), "CONTRIBUTING.md": GUIDE}.items()
        for name in re.findall(r"(?<![\w.])portakern(?:\.[A-Za-z_]\w*)+", text)
    }
    assert len(named) > 100
    assert sorted((where, name) for where, name in named if not resolves(name, known)) == []
    assert not resolves("portakern.tools.compile.calls", known) and not resolves("portakern.nothing.here", known)


def test_modules_that_a_package_lists_are_there():
    """Two that no longer were stood in that of ``portakern.tools.compile``."""
    known = modules()
    listed = {
        (name, module)
        for name, text in docstrings().items()
        if known[name].name == "__init__.py" and not name.startswith("portakern.backends.")
        for group in re.findall(r"\(((?:``\w+``(?:,\s)?)+)\)", text)
        for module in re.findall(r"\w+", group)
    }
    assert ("portakern.tools.compile", "cache") in listed
    assert {(name, module) for name, module in listed if f"{name}.{module}" not in known} == set()


def test_files_that_the_guide_names_are_there():
    paths = {p for p in re.findall(r"`([\w./-]+(?:/|\.py))`", GUIDE) if "..." not in p}
    every = {
        p.name for home in ("portakern", "backends", "specs", "tests", "docs") for p in (ROOT / home).rglob("*.py")
    }
    assert len(paths) > 40
    lost = {p for p in paths if not any((h / p).exists() for h in HOMES) and ("/" in p or p not in every)}
    assert lost == set()


def test_helpers_that_the_guide_places_in_an_op_are_there():
    sentences = re.findall(r"modules of ops import each other's helpers: (.*?)\. ", GUIDE, re.DOTALL)
    placed = [place for sentence in sentences for place in re.findall(r"`(\w+)` of\s+(\w+)", sentence)]
    assert len(placed) > 1
    files = [file for folder in ("backends", "specs") for file in (ROOT / folder).rglob("*.py")]
    for helper, op in placed:
        homes = [file for file in files if f"def {helper}(" in file.read_text(encoding="utf-8")]
        assert any(file.stem == op for file in homes), f"{helper} lies in {homes}, not in {op}"
