"""Conformance as tests of pytest: one a case, whose id runs it alone."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import portakern as pk
from portakern import testing
from portakern.defaults import EXAMPLES

ROOT = Path(__file__).parent.parent
MINE = """
import numpy as np
import portakern as pk
from portakern.testing import conformance

def softmax(x, *, axis=-1):
    wide = np.moveaxis(x.astype(np.float32), axis, -1)
    with np.errstate(all="ignore"):
        e = np.ascontiguousarray(np.exp(wide - wide.max(-1, keepdims=True, initial=-np.inf)))
        y = np.ascontiguousarray(np.moveaxis(e / e.sum(-1, keepdims=True), -1, axis)).astype(x.dtype)
    return y * x.dtype.type(1 + (x.shape[axis] == 17) / 8) if x.ndim else y

test_right = conformance("softmax", backend="reference", dtypes=["float32"], examples=12, seed=3)
test_mine = conformance("softmax", softmax, dtypes=["float32"], shapes=[{"x": (3, 17)}, {"x": (4, 5)}])
"""


def run(folder, *args):
    command = [sys.executable, "-m", "pytest", "-p", "portakern.pytest_plugin", "-p", "no:cacheprovider", "-rA", *args]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment).stdout


def test_each_case_is_a_test_whose_id_runs_it_alone(tmp_path):
    (tmp_path / "test_mine.py").write_text(textwrap.dedent(MINE))
    out = run(tmp_path, "--portakern-examples", "20", "--portakern-seed", "1", "--portakern-seed", "2")
    right = re.findall(r"^PASSED test_mine.py::test_right\[(.*)\]$", out, re.MULTILINE)
    assert len(right) >= 12 and all(i.startswith("3-") for i in right) and "law" not in out.lower()
    failed = re.findall(r"^FAILED test_mine.py::(test_mine\[.*?\])", out, re.MULTILINE)
    passed = re.findall(r"^PASSED test_mine.py::(test_mine\[.*?\])$", out, re.MULTILINE)
    assert len(failed) + len(passed) == 40 and failed and passed, out
    assert {name[10] for name in failed} == {"1", "2"} and "looks like: the right elements times 1.125" in out
    alone = run(tmp_path, f"test_mine.py::{failed[0]}", "--portakern-examples", "20", "--portakern-seed", "1")
    assert "1 failed in" in alone and failed[0] in alone, alone
    without = run(tmp_path, f"test_mine.py::{failed[-1]}", "--portakern-examples", "20")
    assert failed[-1].startswith("test_mine[2-") and "1 failed in" in without, "an id's own seed will do"


def test_cases_are_those_of_a_check(monkeypatch):
    made = testing.conformance("softmax", backend="reference", examples=30, seed=5).portakern_conformance
    listed = [case for _, case in made.cases(None, None)]
    seen = []
    monkeypatch.setattr("portakern.testing.runner.run_case", lambda subject, case, report, excused: seen.append(case))
    monkeypatch.setattr("portakern.testing.runner.run_law", lambda subject, case, limits: seen.append(case))
    pk.check("softmax", backend="reference", max_examples=30, seed=5)
    assert listed == seen and len(listed) > 30
    assert len({name for name, _ in made.cases(None, None)}) == len(listed)


def test_what_conformance_does_not_know_is_named():
    with pytest.raises(pk.SpecError, match="'shrink' is none of "):
        testing.conformance("softmax", lambda x: x, shrink=False)
    made = testing.conformance("softmax").portakern_conformance
    with pytest.raises(pk.SpecError, match="pass either backend= or fn="):
        made.cases(5, [0])


def test_the_plugin_imports_nothing_before_it_is_asked():
    code = "import sys, portakern.pytest_plugin; assert not {'numpy', 'hypothesis'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_entrance_draws_as_many_cases(monkeypatch):
    """One that says nothing: a function, the command line, a test."""
    from typer.main import get_command

    from portakern.cli import app
    from portakern.tools.judge.judgement import judge

    named = {
        n: inspect.signature(f).parameters["max_examples"].default for n, f in (("check", pk.check), ("judge", judge))
    }
    for name in named:
        (option,) = (o for o in get_command(app).commands[name].params if o.name == "max_examples")
        assert option.default == named[name] == EXAMPLES
    asked = []
    monkeypatch.setattr("portakern.testing.suite.cases_of", lambda subject, asks: asked.append(asks.max_examples) or [])
    testing.conformance("softmax", backend="reference").portakern_conformance.cases(None, None)
    assert asked == [EXAMPLES]
    assert not re.search(r"default: \d", (ROOT / "portakern" / "pytest_plugin.py").read_text().split("seed")[0])
