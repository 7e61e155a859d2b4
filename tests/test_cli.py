"""The command line: readable tables, JSON, exit statuses."""

import json
import logging
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import portakern as pk
from portakern import inventory
from portakern.cli import app
from portakern.core import serve
from portakern.core.backend import Backend
from portakern.core.oracle import as_float64
from portakern.files import write_atomically

run = CliRunner().invoke


@pytest.mark.parametrize("command", [["ops"], ["backends"], ["show", "attention"], ["doctor"]])
def test_tables_and_json(command):
    text = run(app, command)
    assert text.exit_code == 0 and {"attention", "reference"} & set(text.output.split())
    data = json.loads(run(app, [*command, "--json"]).output)
    assert data


def test_check_passes_and_writes_json(tmp_path):
    file = tmp_path / "deep" / "report.json"
    result = run(
        app, ["check", "softmax", "--backend", "reference", "--max-examples", "15", "--seed", "3", "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    assert "passed" in result.output
    report = json.loads(file.read_text())["rows"][0]
    assert report["op"] == "softmax" and report["passed"] and report["examples"] == 15 and report["seed"] == 3
    assert [p.name for p in file.parent.iterdir()] == ["report.json"]


def test_a_command_leaves_the_level_of_the_log_as_it_was():
    log = logging.getLogger("portakern")
    before = log.level
    assert run(app, ["check", "softmax", "--backend", "reference", "--max-examples", "1"]).exit_code == 0
    assert log.level == before


def test_check_leaves_nothing_in_the_folder_where_it_runs(tmp_path):
    here, cache = tmp_path / "here", tmp_path / "cache"
    here.mkdir()
    environment = {n: v for n, v in os.environ.items() if n != "HYPOTHESIS_STORAGE_DIRECTORY"} | {
        "PORTAKERN_CACHE": str(cache)
    }
    command = [
        sys.executable,
        "-c",
        "from portakern.cli import main; main()",
        "check",
        "softmax",
        "--backend",
        "reference",
        "--max-examples",
        "3",
    ]
    ran = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and not list(here.iterdir()), ran.stderr


def test_check_fails_with_a_line_that_reproduces(monkeypatch):
    from portakern.backends.reference import BACKEND

    impl = BACKEND.implementation("softmax", BACKEND.families[0])

    def off_by_a_percent(call):
        return (np.float32(1.01) * impl.fn(as_float64(call), {})[0].astype(np.float32),)

    monkeypatch.setattr(serve, "rounded_oracle", off_by_a_percent)
    result = run(app, ["check", "softmax", "--backend", "reference", "--max-examples", "30", "--dtype", "float32"])
    assert result.exit_code == 1
    line = re.search(r"portakern check softmax --backend reference --case '(.*)'", result.output)
    again = run(app, ["check", "softmax", "--backend", "reference", "--case", line[1]])
    assert again.exit_code == 1 and "permitted error" in again.output
    monkeypatch.undo()
    assert run(app, ["check", "softmax", "--backend", "reference", "--case", line[1]]).exit_code == 0


def test_own_errors_have_no_traceback():
    ran = subprocess.run(
        [sys.executable, "-c", "from portakern.cli import main; main()", "show", "conv"], capture_output=True, text=True
    )
    assert ran.returncode == 2 and "op 'conv' is unknown" in ran.stderr and "Traceback" not in ran.stderr


def test_files_are_written_whole(tmp_path):
    file = tmp_path / "x.json"
    write_atomically(file, "one")
    with pytest.raises(TypeError):
        write_atomically(file, np.zeros(1))
    assert file.read_text() == "one" and list(tmp_path.iterdir()) == [file]


def test_doctor_says_that_triton_has_no_wheel_elsewhere(monkeypatch):

    monkeypatch.setattr(inventory.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(Backend, "unavailable", lambda self: "triton not installed" if self.name == "triton" else None)
    rows = {b["backend"]: b for b in inventory.doctor()["backends"]}
    assert "no wheel for Darwin" in rows["triton"]["next"]
    assert pk.backends()
