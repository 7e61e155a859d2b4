"""Prove that the linters see.

In a copy of the tree, plant forbidden imports, type errors, an undefined name and names that readers do not understand
(maint/names.py), and demand that each is reported;
and demand that ruff, mypy and import-linter each read as many files as there are. The packages under portakern/ are
partly symlinks, which a tool can skip in silence: then it reports success on a handful of files. maint/ is read too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SKIP = {
    ".git",
    "build",
    "dist",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".import_linter_cache",
    ".pytest_cache",
    ".hypothesis",
    ".site",
}

FORBIDDEN_IMPORT = (
    "backends/triton/planted_import.py",
    "import portakern.backends.pallas  # noqa: F401\n",
    "portakern.backends.triton.planted_import",
)
FAMILY_IMPORT = (
    "backends/triton/gpu/planted_import.py",
    "import portakern.backends.triton.hopper.matmul  # noqa: F401\n",
    "portakern.backends.triton.gpu.planted_import",
)
PALLAS_FAMILY_IMPORT = (
    "backends/pallas/fused/planted_import.py",
    "import portakern.backends.pallas.gpu.softmax  # noqa: F401\n",
    "portakern.backends.pallas.fused.planted_import",
)
LIB_IMPORT = (
    "backends/pallas/lib/mosaic_gpu/planted_import.py",
    "import portakern.backends.pallas.gpu.softmax  # noqa: F401\n",
    "portakern.backends.pallas.lib.mosaic_gpu.planted_import",
)
UPWARD_IMPORT = (
    "portakern/planted_import.py",
    "import maint.report  # noqa: F401\n",
    "portakern.planted_import",
)
MAINTAINERS_ERROR = (
    "maint/planted_type_error.py",
    'answer: int = "forty-two"\n',
    "planted_type_error.py:1: error: Incompatible types in assignment",
)
UNDEFINED_NAME = ("tests/planted_name.py", "print(planted)\n", "F821 Undefined name `planted`")
BANNED_WORD = (
    "specs/planted_word.py",
    "def settled(told: int) -> int:\n    return told\n",
    "specs/planted_word.py:1: parameter 'told'; use message",
)
SHARED_CLASS = (
    "specs/planted_class.py",
    "class Band:\n    pass\n",
    "class 'Band' is also in",
)
MYPY = ["mypy", "-p", "portakern", "-p", "maint"]
TYPE_ERROR = (
    "backends/reference/planted_type_error.py",
    'answer: int = "forty-two"\n',
    "planted_type_error.py:1: error: Incompatible types in assignment",
)


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        shutil.copytree(
            ROOT,
            tree,
            symlinks=True,
            ignore=lambda folder, names: [n for n in names if n in SKIP or (Path(folder) / n / "pyvenv.cfg").exists()],
        )
        failures = [*_all_files_read(tree), *_plants_reported(tree)]
    for failure in failures:
        print(f"FAILED: {failure}")
    return bool(failures)


def _all_files_read(tree: Path) -> Iterator[str]:
    """What is wrong with the number of files that each tool read."""
    package = len({p.resolve() for f in ("portakern", "maint") for p in _python_files(tree / f, follow=True)})
    everything = len({p.resolve() for p in _python_files(tree, follow=False)})
    linked = sum(len(list(_python_files(tree / folder, follow=False))) for folder in ("specs", "backends", "examples"))
    if not 0 < linked < package:
        yield (
            f"portakern/ and maint/ hold {package} files, and specs/, backends/ and examples/ {linked}: "
            "are the symlinks in place?"
        )
    for tool, count, pattern, expected in (
        ("mypy", [*MYPY], r"(?:in|checked) (\d+) source files?", package),
        ("import-linter", ["lint-imports"], r"Analyzed (\d+) files", package),
        ("ruff", ["ruff", "check", "--show-files", "."], None, everything),
    ):
        _, output = _run(tree, *count)
        found = re.search(pattern, output) if pattern else None
        read = int(found[1]) if found else sum(line.endswith(".py") for line in output.splitlines())
        print(f"{tool} read {read} of {expected} files")
        if read < expected:
            yield f"{tool} read {read} files of {expected}:\n{output[-2000:]}"


def _plants_reported(tree: Path) -> Iterator[str]:
    """What was planted and not reported."""
    for (path, text, report), command in (
        (FORBIDDEN_IMPORT, ["lint-imports"]),
        (FAMILY_IMPORT, ["lint-imports"]),
        (PALLAS_FAMILY_IMPORT, ["lint-imports"]),
        (LIB_IMPORT, ["lint-imports"]),
        (UPWARD_IMPORT, ["lint-imports"]),
        (MAINTAINERS_ERROR, MYPY),
        (TYPE_ERROR, MYPY),
        (UNDEFINED_NAME, ["ruff", "check", "tests"]),
        (BANNED_WORD, ["python", "-m", "maint.names"]),
        (SHARED_CLASS, ["python", "-m", "maint.names"]),
    ):
        (tree / path).write_text(text, encoding="utf-8")
        status, output = _run(tree, *command)
        (tree / path).unlink()
        seen = status != 0 and report in output
        print(f"{command[0]} on a planted {path}: {'reported' if seen else 'NOT reported'}")
        if not seen:
            yield f"{command[0]} did not report {path} (exit status {status}):\n{output[-2000:]}"


def _python_files(folder: Path, *, follow: bool) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, followlinks=follow):
        folders[:] = [f for f in folders if f not in SKIP]
        yield from (Path(parent) / n for n in names if n.endswith(".py"))


def _run(tree: Path, tool: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of a tool of this environment, run in the copy without any cache of the original's."""
    done = subprocess.run(
        [Path(sys.executable).parent / tool, *arguments], cwd=tree, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
