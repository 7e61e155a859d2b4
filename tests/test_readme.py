"""The README's Python runs as printed, top to bottom in one session, and CI finds the commands that it tells readers to run."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [(README[: m.start()].count("\n") + 2, m[1]) for m in re.finditer(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)]
FRAMEWORKS = {"torch": r"^import torch|backend=\"triton\"", "triton": r"backend=\"triton\"", "jax": r"^import jax|backend=\"pallas\""}


@pytest.fixture(scope="module")
def session() -> dict[str, object]:
    """The names that earlier blocks defined."""
    return {"__name__": "readme"}


@pytest.mark.parametrize(("line", "block"), BLOCKS, ids=[f"line{line}" for line, _ in BLOCKS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # one block shows a kernel that overflows
def test_python_block(line: int, block: str, session: dict[str, object]) -> None:
    for module, pattern in FRAMEWORKS.items():
        if re.search(pattern, block, re.MULTILINE) and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    exec(compile("\n" * (line - 1) + block, str(ROOT / "README.md"), "exec"), session)


@pytest.mark.parametrize("name", ["demo", "test", "lint"])
def test_ci_finds_the_commands(name: str) -> None:
    command = runpy.run_path(str(ROOT / ".ci" / "readme.py"))["command"]
    assert command(name).startswith("pip install -c constraints.txt -e '.[")
    with pytest.raises(LookupError, match="0 bash blocks"):
        command("no such block")


def test_relative_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
