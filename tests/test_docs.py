"""The site's pages run as printed, the tutorial's op is installed as its package installs it, its planted mistake is
found, and what is made for the site is made right.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import typer

import portakern as pk
from portakern.cli import app
from portakern.core import registry
from tests import pages

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TUTORIAL = DOCS / "tutorial"
PAGES = sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md") if any(pages.blocks(p.read_text())))

TUTORIAL_CODE = sorted(p.relative_to(ROOT).as_posix() for p in TUTORIAL.rglob("*.py"))


def forget() -> None:
    """What the registry found in entry points."""
    for kept in (registry._spec_sources, registry.ops, registry.loadable, registry.find_spec, registry.forward_of):
        kept.cache_clear()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch):
    """The tutorial's package, as if pip had installed it."""
    for name in ("torch", "triton", "jax"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    project = tomllib.loads((TUTORIAL / "centering/pyproject.toml").read_text(encoding="utf-8"))["project"]
    real = registry.entry_points

    def with_ours(group: str) -> list[EntryPoint]:
        ours = project["entry-points"].get(group, {})
        return [*real(group=group), *(EntryPoint(name, value, group) for name, value in ours.items())]

    monkeypatch.setattr(registry, "entry_points", with_ours)
    monkeypatch.syspath_prepend(str(TUTORIAL / "centering"))
    forget()
    yield project
    for b in pk.backends().values():
        for at in [at for at, made in b._found.items() if made.fn.__module__.partition(".")[0] == project["name"]]:
            del b._found[at]
        b._elsewhere.pop("center", None)
    for name in [n for n in sys.modules if n.partition(".")[0] == project["name"]]:
        del sys.modules[name]
    monkeypatch.undo()
    forget()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # one block shows a kernel that overflows
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_as_printed(page: str, package: object) -> None:
    assert pages.run(DOCS / page) > 0


def test_a_page_that_says_otherwise_is_told_of(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    with pytest.raises(AssertionError, match="line 2 prints\n2\n"):
        pages.run(page)


TEXTS = [
    Path("README.md"),
    Path("PORTING.md"),
    Path("CONTRIBUTING.md"),
    *(p.relative_to(ROOT) for p in DOCS.rglob("*.md")),
]


def test_no_text_holds_both_sides_of_a_merge() -> None:
    marks = "<" * 7 + " ", ">" * 7 + " "
    texts = [*TEXTS, Path("CHANGELOG.md")]
    held = [t for t in texts if any(line.startswith(marks) for line in (ROOT / t).read_text("utf-8").splitlines())]
    assert not held


@pytest.mark.parametrize("text", TEXTS, ids=str)
def test_commands_are_ones_that_the_command_line_takes(text: Path) -> None:
    """Every `portakern ...` line of a shell block: its command is there, with those options. None is run."""
    for line in shell_lines((ROOT / text).read_text(encoding="utf-8")):
        parsed(line)


def test_a_command_that_is_not_there_is_told_of() -> None:
    text = "```bash\npip install x && portakern check softmax --haste 3  # quick\n```\n"
    (line,) = shell_lines(text)
    with pytest.raises(Exception, match="No such option: --haste"):  # typer has a click of its own
        parsed(line)


def shell_lines(text: str) -> list[list[str]]:
    """The words of every call of portakern in the shell blocks of a text."""
    found = []
    for block in (m["body"] for m in pages.FENCE.finditer(text) if m["head"] == "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for part in " ".join(shlex.quote(w) for w in words).split("'&&'"):
                call = shlex.split(part)
                if call[:1] == ["portakern"]:
                    found.append(call[1 : call.index(">") if ">" in call else None])
    return found


def parsed(words: list[str]) -> None:
    name, *arguments = words
    if name != "--version":
        command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
        command.make_context(name, arguments)


def edited(diff: str, source: str) -> str:
    """The source with the one line of a diff replaced."""
    old, new = (next(x[1:] for x in diff.splitlines() if x.startswith(sign)) for sign in "-+")
    assert source.count(old + "\n") == 1
    return source.replace(old + "\n", new + "\n")


def test_the_planted_mistake_is_found(package: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the page's one line in the kernel the checker says what the page says, and the whole kernel passes."""
    text = (TUTORIAL / "index.md").read_text(encoding="utf-8")
    shown = {m["head"] + m["more"]: m["body"] for m in pages.FENCE.finditer(text)}
    whole = Path(importlib.import_module("centering.on_triton").__file__ or "").read_text(encoding="utf-8")
    file = tmp_path / "on_triton.py"
    file.write_text(edited(shown['diff title="centering/on_triton.py"'], whole), encoding="utf-8")
    loaded("centering.on_triton", file)  # which registers its function in the place of the package's
    report = pk.check("center", backend="triton", device="cpu", max_examples=12)
    said = f"{report.verdict}\n{report.failures[0].op}: {report.failures[0].what}\n"
    pages.check_printed(shown['text title="what the checker says"'], said, "the planted mistake")


def loaded(name: str, file: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


PUBLIC = re.compile(r"portakern(\.(torch|jax|errors|testing|spec(\.\w+)?|backends\.\w+\.lib))?")
"""Modules that people outside of this repository import from: every one has its page under reference/."""


@pytest.mark.parametrize("text", ["CONTRIBUTING.md", *(f"docs/{p}" for p in PAGES), *TUTORIAL_CODE], ids=str)
def test_what_readers_are_told_to_import_is_public(text: str) -> None:
    code = (ROOT / text).read_text(encoding="utf-8")
    if text.endswith(".md"):
        code = "\n".join(m["body"] for m in pages.FENCE.finditer(code) if m["head"].startswith("python"))
    lines = (re.match(r"\s*(?:from|import) (portakern[\w.]*)", line) for line in code.splitlines())
    assert [m[1] for m in lines if m and not PUBLIC.fullmatch(m[1])] == []


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch):
    """A module of those that make the site, by name."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(DOCS / "_maker"))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(DOCS)):
            del sys.modules[name]


def test_links_into_the_repository_lead_to_pages_of_the_site(maker) -> None:
    repository, root = maker("repository"), DOCS.parent
    text = "[a](specs/softmax.py#L3), `[b](specs/softmax.py)`, [c](README.md), [d](https://x.org), [e](specs)\n"
    wanted = "[a](../source/specs/softmax.py.md#L3), `[b](specs/softmax.py)`, [c](../index.md), [d](https://x.org), "
    here = {"README.md": "index.md"}
    assert repository.relinked(text, "how-to/page.md", "", root, here) == wanted + "[e](../source/specs/index.md)\n"
    made = repository.pages(root, [(root / "x.md", text)], here)
    assert "def softmax(" in made["source/specs/softmax.py.md"] and "source/specs/_rows.py.md" in made
    assert "[softmax.py](softmax.py)" in made["source/specs/index.md"]


def test_sections_come_by_their_headings(maker) -> None:
    sections, root = maker("sections"), DOCS.parent
    text = "# A\none\n## B c\ntwo\n```bash\n## no heading\n```\n### D\nthree\n## E\nfour\n"
    assert sections.section(text, "b-c", "x.md") == "\ntwo\n```bash\n## no heading\n```\n### D\nthree\n"
    with pytest.raises(LookupError, match="x.md has no section #no-heading; expected one of a, b-c, d, e"):
        sections.section(text, "no-heading", "x.md")
    page = '<!-- include: README.md#portakern to "**On a GPU" -->'
    assert "pip install -e" in sections.included(page, root, "docs", lambda text, folder: text, str)
    with pytest.raises(LookupError, match="'not there' stands there 0 times"):
        sections.included(page.replace("**On a GPU", "not there"), root, "docs", lambda text, folder: text, str)


OWN = [page for page in PAGES if "<!-- include: README.md" in (DOCS / page).read_text(encoding="utf-8")]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # one block shows a kernel that overflows
@pytest.mark.parametrize("page", ["index.md", *OWN])  # which has no other blocks
def test_a_page_runs_with_the_sections_that_it_shows(page: str, maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections of the README among the page's own blocks."""
    for framework in ("torch", "triton"):
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    monkeypatch.setattr(registry, "_registered", {})  # one section registers a backend
    text = re.sub(r"^<!-- include: (?!README).*-->$", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert (
        pages.run(DOCS / page, text=maker("sections").included(text, ROOT, "docs", lambda piece, folder: piece, str))
        > 1
    )


def test_lists_are_nested_as_python_markdown_reads_them(maker) -> None:
    markdown, adapted = pytest.importorskip("markdown"), maker("dialect").adapted
    text = (
        "Text:\n* one\n  more\n  * inner\n\n    ```\n    code\n    ```\n* two\n\n10. first\n    * deep\n\n    after\n"
    )
    html = markdown.markdown(adapted(text), extensions=["sane_lists", "pymdownx.superfences"])
    assert [html.count(f"<{tag}") for tag in ("ul>", "ol", "li>", "pre>")] == [3, 1, 5, 1], html


def test_every_op_has_its_page(maker) -> None:
    made = maker("operations").made(DOCS.parent)
    assert set(made.pages) == {f"reference/ops/{name}.md" for name in (*registry.ops(), "index")}
    page = made.pages["reference/ops/softmax.md"]
    assert "softmax on NVIDIA" in made.data["reference/ops/softmax.svg"]
    speed = json.loads(made.data["reference/results.json"])["speed"]
    assert {len(row) for row in speed["rows"]} == {len(speed["columns"])} and len(speed["rows"]) > 100
    for part in (
        "* `x`: any shape",
        "chain(N)",
        "rising_rows",
        "shift_invariant",
        "backends/triton/gpu/softmax.py",
        "| 0.9",
    ):
        assert part in page, part


@pytest.mark.parametrize("op", registry.ops())
def test_the_call_on_an_ops_page_runs(op: str, maker) -> None:
    code = maker("opening").example(registry.find_spec(op)).removeprefix("```python\n").removesuffix("```")
    exec(compile(code, op, "exec"), {})
