"""Files of results: one form, and errors that say what is wrong with a file and where."""

from __future__ import annotations

import copy
import json
import logging
import types
import typing
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from maint import store
from portakern import results, sources
from portakern.core.machine_code import Kernel
from portakern.results import ResultError
from portakern.testing import Report
from portakern.testing.report import Failure
from portakern.tools.compile import matrix
from portakern.tools.compile.build import Build

ROOT = Path(__file__).resolve().parents[1]
ROW = {"op": "softmax", "interface": "op", "median_us": 7.0, "best_us": 6.5, "worst_us": 9.0}
RUN = {
    "schema": 1,
    "benchmark": "launch",
    "command": "python benchmarks/launch.py",
    "date": "2026-01-31",
    "device": "a GPU",
    "environment": {"torch": "2.11"},
    "graphs": [],
    "rows": [ROW],
}
KERNEL = {
    "name": "k",
    "launches": 1,
    "threads": 128,
    "registers": None,
    "on_chip": {"shared": 10.5},
    "matrix": {},
    "spills": 0,
}
BUILD = {
    "op": "softmax", "direction": "forward", "dtype": "float32", "target": "sm_90", "backend": "triton",
    "call": "softmax(...)", "tiling": {"block_n": 128}, "ok": True, "reason": None, "final": True, "kernels": [KERNEL],
    "code_bytes": 1, "seconds": 1.0,
}  # fmt: skip


def changed(**new):
    """RUN with keys replaced, dropped where the value is None."""
    data = {**copy.deepcopy(RUN), **new}
    return {k: v for k, v in data.items() if v is not None}


def test_what_is_kept_is_small_and_every_row_stands():
    """Of all runs together no two rows measure one thing on one device; what a report does not show is not kept."""
    kept = store.read(ROOT / store.FOLDER)
    assert all(run.rows for run in kept) and len(kept) > 40
    assert len(store.newest(kept)) == sum(len(run.rows) for run in kept)
    assert sum(f.stat().st_size for f in (ROOT / store.FOLDER).iterdir()) < 1_000_000
    assert {f.suffix for f in (ROOT / store.FOLDER).iterdir()} == {".jsonl"}


def test_what_is_kept_comes_back_as_it_was(tmp_path):
    """Objects in one order and in several, lists of them, texts like those above, what is absent; of a kernel what is
    not so of most."""
    usual = {"spills": None, "cores": 1, "serialised": []}
    kernels = [{"launches": 1, "matrix": {"mma": 2}, **usual}, {"launches": 2, "registers": 30, "cores": 2}]
    row = {"dtype": "float32", "target": "sm_90", "backend": "triton", "variant": None, "ok": True, "reason": None}
    rows = [
        {**row, "op": "one", "tiling": {"a": 1, "b": 2}, "kernels": kernels, "seconds": 1.0},
        {**row, "op": "two", "tiling": {"b": 2, "a": 1}, "kernels": [], "ok": False, "reason": "no"},
        {**row, "op": "two", "dtype": "float16", "tiling": {}, "kernels": kernels[1:]},
        *(
            {**row, "op": op, "tiling": {}, "kernels": []}
            for op in ("two_gradients_of_a", "two_gradients_of_b", "=3 a", "=", "")
        ),
    ]
    run = results.Result(
        Path("x.json"), "compile-matrix", "c", "2026-01-01", "d", {}, rows, {"limits": {}}, None, "x.json"
    )
    store.write(tmp_path, "compile-matrix", [store.shown(run)])
    (read,) = store.read(tmp_path)
    expected = [{n: v for n, v in r.items() if n != "seconds"} for r in rows]
    expected[0]["kernels"] = [{"launches": 1, "matrix": {"mma": 2}}, kernels[1]]
    assert [{n: r.get(n) for n in e} for r, e in zip(read.rows, expected, strict=True)] == expected
    assert [*read.rows[1]["tiling"]] == ["b", "a"] and (read.name, read.device) == ("x.json", "d")
    lines = (tmp_path / "compile-matrix.jsonl").read_text().splitlines()
    assert len(lines) == 9 and [json.loads(line)[0] for line in lines[4:7]] == [
        "two_gradients_of_a",
        "=17 b",
        "=0 =3 a",
    ]
    (tmp_path / "compile-matrix.jsonl").write_text("{}\n")
    with pytest.raises(ResultError, match=r"compile-matrix.jsonl, line 1: is not a line of stored results"):
        store.read(tmp_path)


def test_fractions_are_kept_to_five_digits(tmp_path):
    row = {**ROW, "median_us": 6.54321987, "op": "softmax"}
    run = results.Result(Path("x.json"), "launch", "c", "2026-01-01", "d", {}, [row], {"graphs": []}, None, "x.json")
    store.write(tmp_path, "launch", [store.shown(run)])
    assert [r["median_us"] for r in store.read(tmp_path)[0].rows] == [6.5432]


def test_what_is_recorded_can_be_read(tmp_path):
    file = tmp_path / "deep" / "launch.json"
    results.write(
        file, results.record("launch", [ROW], command="python benchmarks/launch.py", device="a GPU", graphs=[])
    )
    run = results.read(file)
    assert (run.benchmark, run.device, run.rows, run.extra) == ("launch", "a GPU", [ROW], {"graphs": []})
    assert run.environment["portakern"] and run.keys == {("softmax", "op")}
    assert run.commit == sources.commit(), "a result says what was run"
    assert [p.name for p in file.parent.iterdir()] == ["launch.json"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "holds []; expected an object with schema, benchmark, command, date, device, environment, rows"),
        (changed(schema=None), "'schema' is missing; expected 1"),
        (changed(schema=2), "'schema' is 2; expected 1"),
        (
            changed(benchmark="lunch"),
            "'benchmark' is \"lunch\"; expected one of conformance, compile-matrix, tune, bench, launch",
        ),
        (changed(benchmark=["launch"]), "'benchmark' is [\"launch\"]; expected a text that is not empty"),
        (changed(date="31.1.2026"), "'date' is \"31.1.2026\"; expected a date like 2026-11-30"),
        (changed(date="20260131"), "'date' is \"20260131\"; expected a date like 2026-11-30"),
        (changed(device=["a GPU"]), "'device' is [\"a GPU\"]; expected a text that is not empty"),
        (changed(command=None), "'command' is missing; expected a text that is not empty"),
        (changed(graphs=None), "'graphs' is missing; expected a list"),
        (changed(graphs={}), "'graphs' is {}; expected a list"),
        (changed(note="fast"), "'note' is unknown; expected graphs"),
        (changed(rows=[]), "'rows' is empty; expected a row for each thing measured"),
        (changed(rows={}), "'rows' is {}; expected a list"),
        (changed(rows=[ROW, 3]), "'rows[1]' is 3; expected an object"),
        (changed(rows=[{**ROW, "best_us": "6.5"}]), "'rows[0].best_us' is \"6.5\"; expected a number"),
        (changed(rows=[{**ROW, "best_us": True}]), "'rows[0].best_us' is true; expected a number"),
        (
            changed(rows=[{k: v for k, v in ROW.items() if k != "interface"}]),
            "'rows[0].interface' is missing; expected a text that is not empty",
        ),
        (
            changed(rows=[{**ROW, "mean_us": 7.0}]),
            "'rows[0].mean_us' is unknown; expected op, interface, median_us, best_us, worst_us",
        ),
        (
            changed(rows=[ROW, {**ROW, "best_us": 1}]),
            "'rows[1]' measures what rows[0] does: op 'softmax', interface 'op'; expected one row for each",
        ),
        (
            changed(benchmark="compile-matrix", graphs=None, wall_seconds=1, ok=1, of=1, limits={}, rows=[BUILD]),
            "'rows[0].kernels[0].on_chip' is {\"shared\": 10.5}; expected an object of whole numbers",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path, data, message):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ResultError) as e:
        results.read(file)
    assert str(e.value).startswith(f"{file}: {message}"), e.value


def filled(of, **known):
    """A dataclass with something in every field, by the field's type: a new field is filled too."""
    hints = typing.get_type_hints(of)
    return of(**{f.name: known.get(f.name) or something(hints[f.name]) for f in fields(of)})


def something(hint):
    outer, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if outer in (typing.Union, types.UnionType):
        return something(inner[0])
    if outer in (list, tuple, set):
        return outer([something(inner[0])])
    if outer in (dict, Counter):
        return outer({something(inner[0]): something(inner[1]) if len(inner) > 1 else 2})
    return {str: "softmax", int: 3, float: 1.5, bool: True}.get(outer) or filled(outer)


REPORT = filled(Report, checked=("bounds",), failures=[filled(Failure, kind="promises")])


def test_every_field_of_a_check_and_of_what_is_compiled_is_of_the_form():
    """Files with a field that the form lacks are written, and nobody can read them."""
    row = REPORT.to_dict() | dict.fromkeys(("backend", "variant", "target", "commit", "sources"), "text")
    check = results.record("conformance", [row], command="portakern check", device="a GPU", wall_seconds=1.0)
    build = matrix.record([filled(Build, target="sm_90", kernels=[filled(Kernel)])], "portakern compile", 1.0)
    for data in (check, build):
        plain = json.loads(json.dumps(data))
        assert list(results.problems(plain)) == []
        for name in plain["rows"][0]:
            without = {n: kind for n, kind in results.BENCHMARKS[plain["benchmark"]].row.items() if n != name}
            form = results.Benchmark((), without)
            assert any("is unknown" in what for what in results._row_faults(plain["rows"], form)), name


def test_reports_of_parts_keep_every_field():
    """Merged with one of nothing, and read again by the benchmark that keeps parts of checks in files."""
    from benchmarks.emulated import _report

    nothing = Report(REPORT.op, REPORT.subject, REPORT.seed, checked=REPORT.checked)
    assert REPORT.merge(nothing) == REPORT == nothing.merge(REPORT)
    assert _report(json.loads(json.dumps(REPORT.to_dict()))) == REPORT


def test_parts_of_other_sources_are_not_taken(monkeypatch, tmp_path):
    """A run in the emulator goes on with parts that are kept: only with those of the sources that run."""
    pytest.importorskip("triton")
    from benchmarks import emulated

    asked = types.SimpleNamespace(keep=tmp_path, examples=100, seed=0, parts=4)

    def place(of):
        monkeypatch.setattr(sources, "fingerprint", lambda *_: of)
        emulated._sources.cache_clear()
        return emulated._part_path(asked, "softmax", "gfx942", 0)

    assert place("0123") == place("0123") != place("4567")
    emulated._sources.cache_clear()


def test_no_json_and_no_file(tmp_path):
    file = tmp_path / "run.json"
    with pytest.raises(ResultError, match=r"run\.json: cannot be read: No such file"):
        results.read(file)
    file.write_text("{")
    with pytest.raises(ResultError, match=r"run\.json: is not JSON: Expecting property name"):
        results.read(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ResultError, match=r"run\.json: is not JSON: 'utf-8' codec"):
        results.read(file)


def test_a_long_run_is_written_even_where_it_has_faults(tmp_path, caplog):
    file = tmp_path / "run.json"
    with caplog.at_level(logging.WARNING, "portakern"):
        results.write(file, results.record("launch", [{**ROW, "mean_us": 1.0}], command="x", device="y", graphs=[]))
    assert file.exists() and "'rows[0].mean_us' is unknown" in caplog.text


def test_the_command_names_its_file_only(monkeypatch, tmp_path):
    file = tmp_path / "a b.json"
    monkeypatch.setattr("sys.argv", ["bench", "--calls", "3", "--json", str(file), "--plot", str(tmp_path / "plots")])
    assert results.command_line("python bench.py", file) == "python bench.py --calls 3 --json 'a b.json' --plot plots"
