"""Resolve what readers are told to install from PyPI alone, on every Python that pyproject.toml names.

Only metadata is read: nothing is built, and no wheel is fetched. A wheel on this machine's disk or an index that its
pip knows would hide that PyPI's torch demands another triton, so uv is used without any configuration.

``resolves.py UV`` names uv's executable.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = tuple(PROJECT["optional-dependencies"])
PATCH = {"3.11": "3.11.9"}  # of which mkdocs-material's dependencies want a patch release; else the first
LINUX = "x86_64-manylinux_2_34"  # the oldest of mojo-compiler's wheels; libtpu's are for 2_31
SHOWN = ("torch", "triton", "jax")


class Wish(NamedTuple):
    """What somebody may install: extras, with constraints.txt or without, on a platform."""

    extras: tuple[str, ...]
    pinned: bool
    platform: str = LINUX


WISHES = (
    # a solution of all extras at once is one of each, and of each set that a page tells readers to install
    Wish(EXTRAS, pinned=False),
    Wish(EXTRAS, pinned=True),
    Wish(("pallas", "cli"), pinned=False, platform="macos"),
    Wish(("pallas", "cli"), pinned=False, platform="windows"),
)


def pythons() -> Iterator[str]:
    for line in PROJECT["classifiers"]:
        named = re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line)
        if named:
            yield named[1]


def resolve(uv: str, wish: Wish, python: str, cache: str) -> tuple[bool, str]:
    """Whether there is a solution, and a line that says which, or why not."""
    options = [f"--extra={extra}" for extra in wish.extras]
    if wish.pinned:
        options += ["--constraints", str(ROOT / "constraints.txt")]
    done = subprocess.run(
        [
            uv, "pip", "compile", "--no-config", "--quiet", "--no-header", "--no-annotate", "--only-binary=:all:",
            f"--cache-dir={cache}",
            f"--python-version={PATCH.get(python, python)}", f"--python-platform={wish.platform}",
            *options, str(ROOT / "pyproject.toml"),
        ],
        capture_output=True, text=True, check=False, cwd=Path(cache).parent,
        env={name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))},
    )  # fmt: skip
    extras = "every extra" if wish.extras == EXTRAS else f"[{','.join(wish.extras)}]"
    what = f"{extras}{' with constraints.txt' if wish.pinned else ''} on {wish.platform}"
    if done.returncode:
        return False, f"Python {python}: {what}\n{done.stderr}"
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)$", done.stdout, re.MULTILINE))
    shown = " ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    return True, f"Python {python}: {what}: {len(versions)} packages {shown}"


def main(uv: str) -> int:
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(4) as pool:

        def answers(asked: list[tuple[Wish, str]]) -> list[tuple[bool, str]]:
            return list(pool.map(lambda a: resolve(uv, *a, f"{scratch}/cache"), asked))

        asked = [(wish, python) for python in pythons() for wish in WISHES]
        found = answers(asked)
        without = [a for a, (fine, _) in zip(asked, found, strict=True) if not fine]
        # whose fault it is
        found += answers([(wish._replace(extras=(extra,)), p) for wish, p in without for extra in wish.extras])
    for fine, line in found:
        print(line if fine else f"FAILED: {line}")
    return int(bool(without))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
