"""What ties the packaging together: every dependency pinned, every tool configured for what is there, nothing heavy
imported by accident.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
from email.message import Message
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import portakern
from portakern import install
from portakern.core import registry
from tests.test_layers import graph, modules, room

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
    assert {"check", "cli", "plots", "triton", "pallas", "cuda", "tpu", "cpu", "demo", "test", "dev"} <= set(extras)
    assert extras["cpu"] == ["portakern[triton,pallas,cli]"]


TOOLS = {"hypothesis", "typer", "rich", "matplotlib", "filelock", "optuna"}
ROOMS_WITH_TOOLS = {
    "portakern.bounds",
    "portakern.cli",
    "portakern.composed",
    "portakern.testing",
    "portakern.judging",
    "portakern.tools.judge",
    "portakern.tools.bench",
    "portakern.tools.profile",
    "portakern.tools.tune",
}


def test_ops_need_nothing_that_only_checking_and_printing_need() -> None:
    """No import, lazy ones counted, leads from an op to a tool or to a folder that needs one."""
    assert not requirements(PYPROJECT["project"]["dependencies"]) & TOOLS
    files = {n: f for n, f in modules().items() if not n.startswith(("portakern.examples", "portakern.__main__"))}
    kernels = {n: f for n, f in files.items() if room(n) not in ROOMS_WITH_TOOLS}
    assert {"portakern.api", "portakern.tools.compile.matrix", "portakern.backends.triton.gpu.softmax"} <= set(kernels)
    back = {n: found for n, others in graph(files).items() if n in kernels and (found := others - set(kernels))}
    assert back == {}
    pattern = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(sorted(TOOLS))})\b", re.MULTILINE)
    assert [n for n, f in kernels.items() if pattern.search(f.read_text(encoding="utf-8"))] == []
    assert any(pattern.search(f.read_text(encoding="utf-8")) for n, f in files.items() if n not in kernels)


WITHOUT = "import sys; sys.modules.update(dict.fromkeys({missing!r})); "


@pytest.mark.parametrize(
    ("missing", "code", "status", "said"),
    [
        (
            [*TOOLS],
            "import numpy, portakern as pk; print(pk.op('softmax')(numpy.zeros((2, 4), 'float32'))[0, 0])",
            0,
            "0.25",
        ),
        (
            ["typer"],
            "sys.argv = ['portakern', 'ops']; import portakern.__main__ as m; m.main()",
            2,
            "portakern's command line needs typer, which is not installed; in a checkout of portakern run: "
            "pip install -e '.[cli]'",
        ),
        (
            ["hypothesis", "typer", "rich", "filelock", "torch", "triton", "jax"],
            "import portakern as pk; print(pk.check('softmax', backend='reference', max_examples=3).passed)",
            0,
            "True",
        ),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(missing: list[str], code: str, status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing) + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == status and said in done.stdout + done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_and_the_address_stand_in_one_place() -> None:
    assert set(PYPROJECT["project"]["dynamic"]) == {"version", "readme", "urls"}
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "portakern.__version__"}
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert "\nversion:" not in citation and "url:" not in citation


def test_hooks_run_the_linters_of_the_readme_and_the_workflow_runs_ci() -> None:
    hooks = re.findall(r"^ +entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    lint = runpy.run_path(str(ROOT / ".ci" / "readme.py"))["command"]("lint").splitlines()
    assert hooks == lint[1:]
    assert "run: .ci/run\n" in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "wrong-result.yml").read_text(encoding="utf-8")
    assert "line that reproduces it" in template and "portakern doctor --json" in template


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


@pytest.mark.parametrize("of", ["specs", "oracle"])
def test_specs_and_the_oracle_import_no_framework(of: str) -> None:
    own = registry.own_modules()
    modules = own.values() if of == "specs" else [f"portakern.backends.reference.{op}" for op in own]
    code = "\n".join(
        [
            *(f"import {module}" for module in dict.fromkeys(modules)),
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


FOLDERS = ("portakern", "specs", "backends", "examples", "tests", "benchmarks", "docs", "maint", "notebooks", ".ci")


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


KEYWORDS = {
    "backends/pallas/lib/mosaic_tpu/rows.py: launched",
    "portakern/cli/bench.py: bench",
    "portakern/cli/check.py: check",
    "portakern/cli/invariance.py: invariance",
    "portakern/cli/judge.py: judge",
    "portakern/cli/tune.py: tune",
    "portakern/core/backend.py: implements",
    "portakern/frameworks/jax/functions.py: dot_product_attention",
    "portakern/frameworks/jax/paged.py: ragged_paged_attention",
    "portakern/frameworks/jax/ring.py: ring_attention",
    "portakern/frameworks/torch/convolution.py: causal_conv1d",
    "portakern/frameworks/torch/ring.py: ring_attention",
    "portakern/frameworks/torch/scaled.py: scaled_grouped_mm",
    "portakern/frameworks/torch/scaled.py: scaled_mm",
    "portakern/frameworks/torch/varlen.py: varlen_attn",
    "portakern/spec/declare.py: spec",
    "portakern/testing/runner.py: check",
    "portakern/tools/judge/judgement.py: judge",
    "specs/attention/contract.py: attention",
    "specs/attention/contract.py: attention_vjp",
    "specs/linear_cross_entropy.py: linear_cross_entropy_vjp",
    "specs/paged_attention.py: paged_attention",
    "specs/varlen_attention.py: varlen_attention",
    "specs/varlen_attention.py: varlen_attention_vjp",
}
"""Interfaces whose keywords users name: commands' options, declarations, and the signature of an op, or of PyTorch's
or JAX's own function."""


@pytest.mark.parametrize("folder", ["portakern", "specs", "backends", "maint"])
def test_what_a_function_takes_is_grouped(folder: str) -> None:
    """At most 12 parameters: more of them are extents, strides or a tile, which have names."""
    many = {
        f"{p.relative_to(ROOT)}: {node.name}": n
        for p in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(p.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        if (n := len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])) > 12
    }
    assert {*many} <= KEYWORDS


def test_no_line_is_wider_than_a_reader_bears() -> None:
    wide = {
        f"{p.relative_to(ROOT)}:{i}"
        for p in sources()
        for i, line in enumerate(p.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120
    }
    assert wide == set()


def named_files(text: str) -> set[str]:
    """The files and folders of the repository that a text names: in links, in backticks, in commands."""
    links = re.findall(r"\]\(((?!\w+:|#)[^)#]+)", text)
    words = [word.strip("`'\"") for word in re.split(r"[\s(),]+", text)]
    paths = [*links, *words, *(w.replace(".", "/") for w in words if w.startswith("tests."))]
    found = {path for path in paths if re.fullmatch(r"\.?\w[\w./-]*", path) and (ROOT / path).exists()}
    return found - {"build", "dist"}  # words of a text too, where somebody has built here


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One made of a copy of the tree, under an address."""
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".git", ".venv*", ".*cache", ".hypothesis", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    code = f"from setuptools.build_meta import build_sdist; print(build_sdist({str(folder)!r}))"
    environment = {**os.environ, "PORTAKERN_REPOSITORY": "https://host.example/owner/portakern/"}
    done = subprocess.run([sys.executable, "-c", code], cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.tar.gz")
    return file


def test_the_source_distribution_holds_what_its_texts_speak_of(source_distribution: Path) -> None:
    with tarfile.open(source_distribution) as t:
        names = {name.partition("/")[2] for name in t.getnames()}
    always = {
        "constraints.txt",
        "CHANGELOG.md",
        "PORTING.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "CITATION.cff",
    }
    named = named_files((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {"docs/how-to/check.md", "docs/plots/glance.svg", ".ci/run", "examples/train", "specs"} <= {
        path.rstrip("/").removesuffix("/README.md") for path in named
    }
    held = names | {name.removeprefix("portakern/") for name in names}  # the folders that portakern/ links to lie in it
    assert {path for path in always | named if path.rstrip("/") not in held} == set()


def test_an_index_shows_the_readme_with_links_that_lead_somewhere(source_distribution: Path) -> None:
    """To the repository where its address is known; else a file's link is its words alone."""
    top = source_distribution.name.removesuffix(".tar.gz")
    with tarfile.open(source_distribution) as t:
        text = t.extractfile(f"{top}/PKG-INFO").read().decode()  # type: ignore[union-attr]
    metadata, description = Parser().parsestr(text), text.partition("\n\n")[2]
    address = "https://host.example/owner/portakern"
    assert metadata["Name"] == "portakern" and metadata["Version"] == portakern.__version__
    assert metadata.get_all("Project-URL") == [
        f"Source, {address}",
        f"Changelog, {address}/blob/HEAD/CHANGELOG.md",
        f"Documentation, {address}/blob/HEAD/README.md",
        f"Issues, {address}/issues",
    ]
    assert metadata["Author"] == "portakern contributors"
    assert not re.findall(r"\]\((?!\w+:|#)", description) and "](https://triton-lang.org)" in description
    assert f"[PORTING.md]({address}/blob/HEAD/PORTING.md)" in description
    assert f"]({address}/raw/HEAD/docs/plots/glance.svg)" in description and "![" in description  # blob is a page
    assert len(description) > 0.9 * len((ROOT / "README.md").read_text(encoding="utf-8"))


def test_an_index_shows_words_where_nobody_said_where_the_repository_lies() -> None:
    """And of a picture nothing: its words alone would be a sentence about what is not there."""
    code = "import sys, setuptools; setuptools.setup = lambda **k: print(k['long_description']); import runpy; "
    environment = {**os.environ, "PORTAKERN_REPOSITORY": ""}
    done = subprocess.run(
        [sys.executable, "-c", code + "runpy.run_path('setup.py')"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (picture,) = re.findall(r"!\[(.*?)\]", readme)
    assert (
        picture not in done.stdout
        and "![" not in done.stdout
        and "PORTING.md lists the limits of the checks" in done.stdout
    )


@pytest.mark.parametrize(("seconds", "fails"), [(15, False), (25, True)])
def test_a_test_that_a_busy_machine_would_end_fails_here(tmp_path: Path, seconds: int, fails: bool) -> None:
    """Of its limit it may take a third of the processor's time."""
    (tmp_path / "test_it.py").write_text(
        "import pytest, time\n@pytest.mark.timeout(60)\ndef test_it():\n"
        f"    clock = time.process_time\n    time.process_time = lambda: clock() + {seconds}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", ROOT / "pyproject.toml"]
    environment = {k: v for k, v in os.environ.items() if k != "HYPOTHESIS_PROFILE"}
    done = subprocess.run([*command, tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == fails and ("its limit is 60 s; expected a third" in done.stdout) is fails, done.stdout


def test_what_to_run_is_one_text_which_names_the_address_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install.command() == "in a checkout of portakern run: pip install -e ."
    assert install.command("cuda", "cli") == "in a checkout of portakern run: pip install -e '.[cuda,cli]'"
    message = Message()
    message["Project-URL"] = "Issues, https://host.example/owner/portakern/issues"
    message["Project-URL"] = "Source, https://host.example/owner/portakern"
    monkeypatch.setattr(install, "metadata", lambda name: message)
    assert install.command("cli") == "run: pip install 'portakern[cli] @ git+https://host.example/owner/portakern'"


def test_no_text_tells_readers_to_install_portakern_from_an_index() -> None:
    """It is on none, and the name is anybody's to take there."""
    pages = ("*.md", "docs/**/*.md", "examples/**/*.md", "notebooks/*.md", ".github/**/*")
    texts = [*sources(), *(p for pattern in pages for p in ROOT.glob(pattern))]
    found = [
        f"{p.relative_to(ROOT)}: {line.strip()}"
        for p in texts
        if p.is_file() and p.name not in ("CHANGELOG.md", "install.py", "test_tooling.py")
        for line in p.read_text(encoding="utf-8").splitlines()
        if re.search(r"pip install (?:-\S+ )*['\"]?portakern\b", line)
    ]
    assert len(texts) > 500 and found == []
