"""How sanitizers are asked and understood; on a device they run by hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks import sanitizer

RACES = """
========= COMPUTE-SANITIZER
ok  softmax
========= Error: Race reported between Write access at kernel+0x40
=========     and Read access at kernel+0x80 [8 hazards]
========= Error: Race reported between Write access at kernel+0x40
========= RACECHECK SUMMARY: 8 hazards displayed (8 errors, 0 warnings)
"""
ASSERTIONS = """
_flash.py:280: block: [0,0,0], thread: [0,0,0] Assertion `Buffer being accessed has outstanding reads` failed.
_flash.py:280: block: [0,0,0], thread: [1,0,0] Assertion `Buffer being accessed has outstanding reads` failed.
"""


@pytest.mark.parametrize(
    ("tool", "output", "errors", "said"),
    [
        ("racecheck", RACES, 8, 2),
        ("racecheck", "killed", None, 0),
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 0, 0),
        ("consan", ASSERTIONS, 1, 1),
        ("consan", "ok  softmax", 0, 0),
    ],
)
def test_what_a_tool_says_is_counted_and_kept(tool: str, output: str, errors: int | None, said: int) -> None:
    assert sanitizer.counted(tool, output) == errors
    assert len(sanitizer.findings(tool, output)) == said


def test_a_tool_that_is_nvidia_s_is_given_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text('#!/bin/sh\nshift 2\n"$@" && echo "========= ERROR SUMMARY: 3 errors"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    row = sanitizer.sanitize("softmax", "reference", "memcheck", 1, 60)
    assert (row["errors"], row["problem"]) == (3, None)


def test_triton_s_own_runs_the_command_line_with_memory_of_its_own() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    row = sanitizer.sanitize("softmax", "triton", "consan", 1, 60)
    assert (row["errors"], row["problem"], row["said"]) == (0, None, []), sys.executable
