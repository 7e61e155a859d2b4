"""benchmarks/batch_invariance.py on the host: its rows are kept and shown, and a command that ends loses its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import batch_invariance
from maint import checked, store
from maint.measurements import StoredResults
from portakern import results
from tests.keeping import keep


def test_a_benchmark_on_the_interpreter_is_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    file = tmp_path / "found.json"
    words = ["softmax", "--device", "cpu", "--backend", "triton", "--against", "torch", "--property", "batch",
             "--cases", "2", "--json", str(file)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["batch_invariance", *words])
    assert batch_invariance.main() == 0
    rows = {row["backend"]: row for row in results.read(file).rows}
    assert {*rows} == {"triton", "torch"} and rows["torch"]["peer"] and not rows["triton"]["peer"]
    assert (rows["triton"]["cases"], rows["triton"]["same"]) == (2, 2) or rows["triton"]["cases"] == 1
    keep(tmp_path, "invariance.json", json.loads(file.read_text()))
    kept = StoredResults(tmp_path, tuple(store.read(tmp_path / store.FOLDER)))
    assert "| `softmax` | **triton on cpu" in checked.invariances(kept)
    assert checked.invariances(StoredResults(tmp_path, ())).startswith("Not measured")


STANDS = """#!{python}
import sys, time
backend = sys.argv[sys.argv.index("--backend") + 1]
if backend == "triton":
    sys.exit("no such memory")
time.sleep(60)
"""


def test_a_command_that_ends_or_hangs_loses_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stands = tmp_path / "python"
    stands.write_text(STANDS.format(python=sys.executable))
    stands.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stands))
    options = batch_invariance.parser().parse_args(["softmax", "--timeout", "2"])
    rows = {
        name: batch_invariance.rows_of(batch_invariance.Contender("softmax", name, False), options)[0]
        for name in ("triton", "pallas")
    }
    assert rows["triton"]["why"] == "its process ended with 1: no such memory"
    assert rows["pallas"]["why"] == "not done after 2 s" and all(row["failed"] == 1 for row in rows.values())
