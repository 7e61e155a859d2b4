"""What ties the packaging together: every dependency pinned, every tool configured for what is there, nothing heavy
imported by accident.
"""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
ACCELERATORS = ("cuda", "tpu")  # their own machines choose the versions


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(lines: list[str]) -> set[str]:
    names = {canonical(re.match(r"[\w.-]+", line)[0]) for line in lines}  # type: ignore[index]
    return names - {"portakern"}


def test_every_direct_dependency_is_pinned() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = requirements(PYPROJECT["project"]["dependencies"]).union(
        *(requirements(v) for k, v in extras.items() if k not in ACCELERATORS)
    )
    assert wanted - {canonical(p) for p in PINS} == set()


def test_the_extras_are_there_and_cpu_is_all_that_needs_no_accelerator() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert {"triton", "pallas", "cuda", "tpu", "cpu", "demo", "test", "dev"} <= set(extras)
    assert extras["cpu"] == ["portakern[triton,pallas]"]


def test_ci_runs_the_pinned_versions() -> None:
    """A stale environment would make every other result here about something else."""
    if "CI" not in os.environ:
        pytest.skip("only CI promises the pinned versions")
    found = {}
    for name in PINS:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    assert found == {name: PINS[name] for name in found}


def test_the_symlinks_lead_to_the_folders() -> None:
    for name in ("specs", "backends", "examples"):
        link = ROOT / "portakern" / name
        assert link.is_dir() and link.resolve() == ROOT / name


@pytest.mark.parametrize("module", ["portakern.specs.{}", "portakern.backends.reference.{}"])
def test_specs_and_the_oracle_import_no_framework(module: str) -> None:
    ops = sorted(m.name for m in pkgutil.iter_modules([str(ROOT / "specs")]) if not m.name.startswith("_"))
    code = "\n".join(
        [
            *(f"import {module.format(op)}" for op in ops),
            "import sys",
            "print({'torch', 'triton', 'jax'} & set(sys.modules))",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "set()"


def test_backend_packages_import_no_framework() -> None:
    code = "import portakern as pk, sys; pk.backends(); print({'torch', 'triton', 'jax'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout.strip()
        == "set()"
    )


@pytest.mark.parametrize("folder", ["", "triton", "pallas", "reference"])
def test_a_backend_refuses_to_be_imported_under_another_name(folder: str, tmp_path: Path) -> None:
    """A script run from inside backends/ would find our triton folder where it asked for Triton."""
    module = folder or "backends"
    where = ROOT / "backends" if folder else ROOT
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False, cwd=where
    )
    assert done.returncode != 0 and f"portakern.backends{'.' + folder if folder else ''}" in done.stderr


FOLDERS = ("portakern", "specs", "backends", "examples", "tests", "benchmarks", "docs", ".ci")


def sources() -> list[Path]:
    return [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]


def own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    documented = ast.get_docstring(function) is not None
    docstring = (function.body[0].end_lineno or 0) - function.body[0].lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_no_function_is_longer_than_a_screen() -> None:
    functions = {
        f"{p.relative_to(ROOT)}: {node.name}": own_lines(node)
        for p in sources()
        for node in ast.walk(ast.parse(p.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: n for name, n in functions.items() if n > 60} == {}


def test_no_line_is_wider_than_a_reader_bears() -> None:
    wide = {
        f"{p.relative_to(ROOT)}:{i}"
        for p in sources()
        for i, line in enumerate(p.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120
    }
    assert wide == set()


def test_the_source_distribution_holds_what_its_texts_speak_of(tmp_path) -> None:
    """And an index, which shows the README, gets no link that leads nowhere."""
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    source = tmp_path / "source"
    shutil.copytree(
        ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "results")
    )
    code = f"from setuptools.build_meta import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    built = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as t:
        names = {name.partition("/")[2] for name in t.getnames()}
        top = file.name.removesuffix(".tar.gz")
        description = t.extractfile(f"{top}/PKG-INFO").read().decode().partition("\n\n")[2]  # type: ignore[union-attr]
    assert {"constraints.txt", "CHANGELOG.md", "PORTING.md", "CONTRIBUTING.md", "LICENSE", "README.md"} <= names, built
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = {link.partition("#")[0] for link in re.findall(r"\]\(((?!\w+:|#)[^)]+)\)", readme)}
    kept = {link for link in links if link not in names and "results" not in link}
    assert kept == set()
    assert not re.findall(r"\]\((?!\w+:|#)", description) and "](https://triton-lang.org)" in description
    assert len(description) > 0.9 * len(readme)
