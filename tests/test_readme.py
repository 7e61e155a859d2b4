"""The README's Python runs as printed, top to bottom in one session, and CI finds the commands that it tells readers to
run.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from portakern.core import registry

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [
    (README[: m.start()].count("\n") + 2, m[1])
    for m in re.finditer(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # one block shows a kernel that overflows
def test_python_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})  # the README registers a backend, of which no other test knows
    for framework in ("torch", "triton"):
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    jax = pytest.importorskip("jax", reason="jax is not installed")
    session: dict[str, object] = {"__name__": "readme"}
    with jax.default_device(
        jax.local_devices(backend="cpu")[0]
    ):  # the README speaks to a reader without an accelerator
        for line, block in BLOCKS:
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
