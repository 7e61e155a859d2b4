"""Each block of the README's Python runs as printed when it is copied alone, CI finds the commands that it tells
readers to run, and both it and the porting report are short.
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
    *(
        p.relative_to(ROOT)
        for pattern in ("examples/*/README.md", "docs/porting/*.md", "docs/how-to/new-*.md")
        for p in ROOT.glob(pattern)
    ),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # one block shows a kernel that overflows
def test_each_python_block_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for framework in ("torch", "triton"):
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    assert pages.run(ROOT / "README.md", alone=True) == 4


def test_a_block_that_needs_another_is_told_of(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n")
    assert pages.run(page) == 2
    with pytest.raises(NameError):
        pages.run(page, alone=True)


def test_the_readme_is_read_in_five_minutes() -> None:
    """And its first lines say what was measured, how to install, and how to run and check a kernel."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1500, "move details to docs/"
    first = text.partition("## ")[0]
    at = [first.index(part) for part in ("report: headline", "pip install", 'device="cuda"', "pk.check(", "```text")]
    assert at == sorted(at)


def test_the_readme_counts_the_ops() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    own = [registry.find_spec(op) for op in registry.own_modules()]
    gradients = {spec.vjp for spec in own} - {None}
    without = len(own) - 2 * len(gradients)
    found = re.findall(r"(\d+) ops and their gradients, and (\d+) without, for", text)
    assert found == [(str(len(gradients)), str(without))]


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


def test_sections_that_are_linked_to_are_there() -> None:
    """Where a link names one of a text of the repository: the site's build, which takes minutes, follows all."""
    pages = [*map(Path, ("README.md", "PORTING.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
    pages += [
        p.relative_to(ROOT) for folder in ("docs", "examples", "notebooks") for p in (ROOT / folder).rglob("*.md")
    ]
    lost, count = [], 0
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]+\.md)?#([\w-]+)\)", text):
            target = (ROOT / page).parent / path if path else ROOT / page
            made = (
                re.search(r"^(::: |<!-- include)", target.read_text(encoding="utf-8"), re.M)
                if target.exists()
                else True
            )
            if not made:  # what is made with the site has other sections
                count += 1
                headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}
                lost += [] if anchor in slugs else [(str(page), path, anchor)]
    assert lost == [] and count > 30


def test_the_guide_for_contributors_is_short() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 2500, "move details to docs/how-to"


def test_the_porting_report_begins_with_one_page() -> None:
    """What a port takes: one table and at most 600 words. What an op needed stands in docs/porting, what was measured
    in docs/reference/results.md."""
    text = (ROOT / "PORTING.md").read_text(encoding="utf-8")
    page = [line for line in text.partition("## One port")[0].splitlines() if not line.startswith("|")]
    assert sum(len(line.split()) for line in page) <= 600 and len(text.split()) <= 2000, "move details to docs/porting"
    assert len(re.findall(r"^\|(?:-+:?\|)+$", text, re.MULTILINE)) == 3
    assert re.findall(r"<!-- portakern report: (\w+) -->", text) == ["porting"]
