"""How sanitizers are asked and understood; on a device they run by hand."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sanitizer
from portakern import results

RACES = """
========= COMPUTE-SANITIZER
ok  softmax
========= Error: Race reported between Write access at kernel+0x40
=========     and Read access at kernel+0x80 [8 hazards]
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: main [0x1]
========= Error: Race reported between Write access at kernel+0x40
========= RACECHECK SUMMARY: 8 hazards displayed (8 errors, 0 warnings)
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""
ASSERTIONS = """
_flash.py:280: block: [0,0,0], thread: [0,0,0] Assertion `Buffer being accessed has outstanding reads` failed.
_flash.py:280: block: [0,0,0], thread: [1,0,0] Assertion `Buffer being accessed has outstanding reads` failed.
_flash.py:290: block: [0,0,0], thread: [1,0,0] Assertion `Buffer being accessed has outstanding reads` failed.
CONSAN SUMMARY: 1 launches
"""


@pytest.mark.parametrize(
    ("tool", "output", "errors", "said"),
    [
        ("racecheck", RACES, 8, 2),
        ("racecheck", "killed", None, 0),
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 0, 0),
        ("consan", ASSERTIONS, 2, 2),
        ("consan", "CONSAN SUMMARY: 7 launches", 0, 0),
        ("consan", "CONSAN SUMMARY: 0 launches", None, 0),
        ("consan", "killed", None, 0),
    ],
)
def test_what_a_tool_says_is_counted_and_kept(tool: str, output: str, errors: int | None, said: int) -> None:
    found, lacking = sanitizer.counted(tool, output)
    assert found == errors and (lacking is None) == (errors is not None)
    assert len(sanitizer.findings(tool, output)) == said


def test_of_a_file_its_name_is_kept_and_no_folder() -> None:
    """Results are kept, and other machines have other folders."""
    found = sanitizer.findings("consan", ASSERTIONS.replace("_flash.py", "/some/where/hopper/_flash.py"))
    assert found == sanitizer.findings("consan", ASSERTIONS) and found[0].startswith("_flash.py:280: ")


@pytest.fixture
def sanitizer_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "compute-sanitizer"


def stands(place: Path, script: str) -> None:
    place.write_text(f"#!/bin/sh\n{script}\n")
    place.chmod(0o755)


def test_a_tool_that_is_nvidia_s_is_given_the_command_line(sanitizer_that: Path) -> None:
    stands(sanitizer_that, 'shift 2\n"$@" && printf "\\377\\n========= ERROR SUMMARY: 3 errors\\n"')
    row = sanitizer.sanitize("softmax", "reference", None, "memcheck", 1, 60)
    assert (row["errors"], row["problem"]) == (3, None)
    row = sanitizer.sanitize("softmax", "reference", "no-such", "memcheck", 1, 60)
    assert row["variant"] == "no-such" and row["errors"] is None  # the command line refuses it


def test_what_a_tool_started_ends_when_its_time_is_over(sanitizer_that: Path) -> None:
    late = sanitizer_that.with_name("late")
    stands(sanitizer_that, f'echo "========= Error: a race" >&2\n(sleep 3; touch {late}) &\nwait')
    row = sanitizer.sanitize("softmax", "reference", None, "racecheck", 1, 0.5)
    assert (row["errors"], row["problem"], row["findings"]) == (None, "not done after 0 s", ["Error: a race"])
    time.sleep(3)
    assert not late.exists()


def test_what_a_run_found_is_written_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = tmp_path / "found.json", []

    def sanitize(op: str, *rest: Any) -> dict[str, Any]:
        late = time.monotonic() + 20
        while op == "second" and not file.exists() and time.monotonic() < late:
            time.sleep(0.01)
        if op == "second":
            seen.append([r["op"] for r in results.read(file).rows])
        return {"op": op, "backend": "triton", "variant": None, "tool": "memcheck", "examples": 1, "errors": 0,
                "problem": None, "findings": [], "seconds": 0.1}  # fmt: skip

    monkeypatch.setattr(sanitizer, "sanitize", sanitize)
    monkeypatch.setattr(sys, "argv", f"sanitizer.py first second --tool memcheck --jobs 1 --json {file}".split())
    sanitizer.main()
    assert seen == [["first"]] and [r["op"] for r in results.read(file).rows] == ["first", "second"]


def test_a_tool_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    row = sanitizer.sanitize("softmax", "reference", None, "memcheck", 1, 60)
    assert row["errors"] is None and row["problem"] == "compute-sanitizer cannot be run: No such file or directory"


def test_interpreted_kernels_are_none_that_triton_s_own_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    row = sanitizer.sanitize("softmax", "triton", None, "consan", 1, 60)
    assert (row["errors"], row["problem"], row["findings"]) == (None, "no kernel was watched", [])
