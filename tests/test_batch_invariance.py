"""benchmarks/batch_invariance.py on the host: what a request is, how results are compared, contenders that end their
process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import batch_invariance as bench
from maint import checked, store
from maint.measurements import StoredResults
from portakern import results
from portakern.core import registry
from portakern.tools.bench.contenders import Contender
from tests.keeping import keep
from tests.ops import forward_records, record

DTYPE = "float32"


def test_every_op_that_rounds_has_requests() -> None:
    assert {r.op for r in forward_records() if not r.exact} <= set(bench.ops())


@pytest.mark.parametrize("op", bench.ops())
def test_a_request_alone_is_the_request_among_others(op: str) -> None:
    """By the oracle, whose sums may run in another order: both calls are the same mathematics."""
    spec, oracle = registry.find_spec(op), registry.backend("reference")
    dtype = DTYPE if DTYPE in spec.dtypes else spec.usual_dtypes[0]
    for seed in range(2):
        case = bench.drawn_case(spec, dtype, np.random.default_rng(seed), small=True)
        pair = bench.drawn_pair(case, oracle, "cpu", seed)
        alone, among = (bench.outputs_of(Contender(oracle, None, True), x) for x in (pair.alone, pair.among))
        shares = pair.shares(among)
        assert all(x.size for x in alone) and any(x.size < y.size for x, y in zip(alone, among, strict=True))
        for x, y in zip(alone, shares, strict=True):
            np.testing.assert_allclose(x.astype(float), y.astype(float), rtol=1e-5, atol=1e-6)


def test_other_bits_and_the_largest_difference_are_said() -> None:
    one = np.array([1.0, np.nan, 3.0], np.float32)
    assert bench.difference([one], [one.copy()]) == (True, 0.0)
    assert bench.difference([one], [one + np.array([0, 0, 2], np.float32)]) == (False, 2.0)
    assert bench.difference([one], [np.array([1, 5, 3], np.float32)]) == (False, np.inf)
    assert bench.difference([np.zeros(2)], [-np.zeros(2)]) == (False, 0.0)


def test_a_run_on_the_interpreter_is_kept_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    file = tmp_path / "found.json"
    words = ["softmax", "--device", "cpu", "--backend", "triton", "--against", "torch", "--small", "--calls", "3"]
    monkeypatch.setattr(sys, "argv", ["batch_invariance", *words, "--json", str(file)])
    assert bench.main() == 0, capfd.readouterr()
    run = results.read(file)
    rows = {row["contender"]: row for row in run.rows}
    assert {*rows} == {"triton", "torch"} and rows["triton"]["subject"] and not rows["torch"]["subject"]
    assert (rows["triton"]["calls"], rows["triton"]["same"], rows["triton"]["largest"]) == (3, 3, 0)
    keep(tmp_path, "batch-invariance.json", json.loads(file.read_text()))
    kept = StoredResults(tmp_path, tuple(store.read(tmp_path / store.FOLDER)))
    assert "| `softmax` | bfloat16 | **triton** | 3 of 3" in checked.requests_alone(kept)
    assert checked.requests_alone(StoredResults(tmp_path, ())).startswith("Not measured")


STANDS = """#!{python}
import json, sys, time
given = sys.argv[1:]
after = lambda word: given[given.index(word) + 1]
without, first = given[given.index("--without") + 1:], int(after("--first"))
with open(after("--events"), "a") as file:
    tell = lambda **event: (file.write(json.dumps(event) + "\\n"), file.flush())
    names = [n for n in ("crashes", "hangs", "works") if n not in without]
    for name in names:
        tell(name=name, dtype="float32", subject=False, backend=name, variant=None, target="cpu", commit=None,
             sources=None)
    for call in range(first, 4):
        for name in names:
            tell(begins=name, call=call)
            if name == "crashes" and call == 1:
                sys.exit("no such memory")
            if name == "hangs" and call == 2:
                time.sleep(60)
            tell(ends=name, call=call, same=call != 3, largest=0.5 * (call == 3))
"""


def test_a_contender_that_ends_its_process_or_hangs_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker"
    worker.write_text(STANDS.format(python=sys.executable))
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    asked = bench.parser().parse_args(["softmax", "--timeout", "3"])
    asked.passed = []
    rows: dict[str, dict[str, Any]] = {row["contender"]: row for row in bench.Part("softmax", asked).rows()}
    found = {name: (row["calls"], row["same"], row["largest"]) for name, row in rows.items()}
    assert found == {"crashes": (1, 1, 0.0), "hangs": (2, 2, 0.0), "works": (4, 3, 0.5)}
    assert rows["crashes"]["why"] == "its process ended with 1: no such memory"
    assert rows["hangs"]["why"] == "not done after 3 s" and rows["works"]["why"] is None


def test_a_row_of_no_group_is_alone_a_row_of_no_group() -> None:
    said = record("grouped_matmul").alone
    assert said is not None
    arrays = {"a": np.ones((4, 2)), "b": np.ones((2, 2, 3)), "group_ends": np.array([1, 3], np.int32)}
    assert [said.arrays(arrays, row)["group_ends"].tolist() for row in range(4)] == [[1], [1], [1], [0]]
