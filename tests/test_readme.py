"""The README's Python runs as printed, top to bottom in one session, and CI finds the commands that it tells readers to
run.
"""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from portakern.core import registry
from tests import pages

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [
    "README.md",
    "PORTING.md",
    "docs/reference/results.md",
    "CONTRIBUTING.md",
    *(p.relative_to(ROOT) for pattern in ("examples/*/README.md", "docs/porting/*.md") for p in ROOT.glob(pattern)),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # one block shows a kernel that overflows
def test_python_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})  # the README registers a backend, of which no other test knows
    for framework in ("torch", "triton"):
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    assert pages.run(ROOT / "README.md") > 8


@pytest.mark.parametrize("name", ["demo", "test", "lint", "docs"])
def test_ci_finds_the_commands(name: str) -> None:
    command = runpy.run_path(str(ROOT / ".ci" / "readme.py"))["command"]
    assert command(name).startswith("pip install -c constraints.txt -e '.[")
    with pytest.raises(LookupError, match="0 bash blocks"):
        command("no such block")


def test_what_was_tried_is_what_installs() -> None:
    """README's range of each framework is the one that pyproject.toml admits, and the one whose ends .ci/run tries."""
    said = re.search(
        r"^Tried: (.*), and no others install", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert said is not None
    ranges = dict(re.findall(r"(torch|triton|jax) (\d+\.\d+ to \d+\.\d+)", said[1]))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    admitted = {}
    for name, least, major, minor in re.findall(r"(torch|triton|jax)>=([\d.]+),<(\d+)\.(\d+)", str(extras)):
        admitted[name] = f"{least} to {major}.{int(minor) - 1}"
    assert ranges == admitted and len(ranges) == 3


def test_relative_links_lead_somewhere() -> None:
    links = {
        (name, link)
        for name in TEXTS
        for link in re.findall(r"\]\((?!\w+:|#|\.\.\.)([^)#\s]+)\)", (ROOT / name).read_text(encoding="utf-8"))
    }
    assert len(links) > 50
    assert {(name, link) for name, link in links if not ((ROOT / name).parent / link).exists()} == set()


def test_the_porting_report_is_read_in_one_sitting() -> None:
    """Six pages, and what is made of results, which grows with the ops: what an op needed stands in docs/porting, what
    was measured in docs/reference/results.md."""
    text = (ROOT / "PORTING.md").read_text(encoding="utf-8")
    own = re.sub(r"<!-- portakern report: (\w+) -->.*?<!-- end: \1 -->", "", text, flags=re.DOTALL)
    words = sum(len(line.split()) for line in own.splitlines() if not line.startswith("| `"))
    assert len(text.splitlines()) <= 330 and words <= 2900, "move details to docs/porting or docs/reference/results.md"
    tables = re.findall(r"<!-- portakern report: (\w+) -->", text.partition("## Words")[0])
    assert tables == ["reach", "ports", "speeds"], "what came out stands on page one"
