"""`portakern report`: tables and plots follow the results, --check tells what does not, --add takes in what is fit for
it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import tokenize
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from maint import compiled, coverage, judges, lines, markdown, plots, rehash, summaries, timed
from maint import report as reporting
from maint.measurements import AGED, STALE, StoredResults
from portakern import sources
from portakern.cli import app
from portakern.core import registry, targets
from portakern.results import ResultError
from portakern.testing import subject
from portakern.tools.bench import agreement
from portakern.tools.bench import plots as bench_plots
from tests.keeping import keep

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "NVIDIA H100 80GB HBM3"
CALL = {"op": "softmax", "interface": "op", "median_us": 40.0, "best_us": 39.5, "worst_us": 44.0}
"""A row of benchmarks/launch.py."""
PAGE_ONE = ("reach", "ports", "speeds")  # of PORTING.md
ABSENT = {"quack": "quack not installed; run: pip install quack-kernels"}


def bench(contender, us, q_len=1024, **changes):
    """A row of `portakern bench`: attention, by a backend of ours or by a peer."""
    subject, call = contender == "triton", f"attention(bfloat16; batch=2, q_len={q_len}, is_causal=True); with bias"
    times = {
        "median_us": us, "best_us": us - 1, "worst_us": us + 2, "host_us": 30.0, "rounds": 20, "clock": "events",
        "flop_rate": 600 * 10**12, "byte_rate": 10**11, "roof_us": us / 2, "limited_by": "bfloat16", "roof_share": 0.5,
        "peak_bytes": 4096 * q_len,
    }  # fmt: skip
    return {
        "suite": "attention", "op": "attention", "dtype": "bfloat16", "call": call,
        "dims": {"batch": 2, "q_len": q_len}, "contender": contender, "backend": contender, "variant": None,
        "subject": subject, "target": "cuda sm_90",
        "bytes": 10**6, "flops": 10**9, "verdict": "right", "why": None, "error": 0.25, "errors": {"o": 0.25},
        "commit": "0" * 12, "sources": None, **times, **changes,
    }  # fmt: skip


NO_TIME = dict.fromkeys(bench("torch", 1.0).keys() & {"median_us", "best_us", "worst_us", "host_us", "share", "ratio"})
BENCH = [
    bench("triton", 100.0, best_peer="torch", ratio=0.5, sources="f" * 16),
    bench("torch", 50.0, best_peer="torch", ratio=1.0),
    bench("jax", 0.0, **NO_TIME, verdict="wrong", error=2.74),
    bench("liger", 0.0, **NO_TIME, verdict="refused", error=None, why="it has no attention"),
    bench("triton", 300.0, 2048, best_peer="torch", ratio=1.5),
    bench("torch", 450.0, 2048, best_peer="torch", ratio=1.0),
]


def launched(*rows, **extra):
    return run_of("launch", rows or [CALL], graphs=[], **extra)


def run_of(benchmark, rows, device=DEVICE, date="2026-03-01", **extra):
    head = {"schema": 1, "benchmark": benchmark, "command": "a command", "date": date, "device": device}
    return {**head, "environment": {"torch": "2.11"}, **extra, "rows": rows}


def built(op="softmax", target="sm_90", dtype="bfloat16", reason=None, **kernel):
    made = {
        "name": "k", "launches": 1, "threads": 256, "registers": 30, "spills": 0, "on_chip": {"shared": 32},
        "occupancy": 0.5, "matrix": {}, "code_bytes": 100, "cycles": None, "undefined": [], **kernel,
    }  # fmt: skip
    return {
        "op": op, "direction": "forward", "dtype": dtype, "target": target, "backend": "triton", "call": f"{op}(...)",
        "tiling": {"block_n": 4096}, "ok": reason is None, "reason": reason, "final": True,
        "kernels": [made] if reason is None else [], "code_bytes": 100, "seconds": 1.0,
    }  # fmt: skip


def put(folder: Path, name: str, data) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(data))
    return folder / name


@pytest.fixture
def tree(tmp_path):
    """A small checkout: every table, one chip and a half."""
    root = tmp_path / "tree"
    rows = [
        built(),
        built(target="gfx942", spills=4),
        built("matmul", reason="takes | too much"),
        built("matmul", "v5e", on_chip={"vmem": 2**20}, cycles=2_000_000, issued=2_100_000),
    ]
    keep(
        root,
        "compile-matrix.json",
        run_of(
            "compile-matrix",
            rows,
            "host CPU",
            wall_seconds=1,
            ok=3,
            of=4,
            limits={"sm_90": {"shared": 64}, "v5e": {"vmem": 2**21}},
        ),
    )
    keep(root, "launch-h100.json", launched())
    keep(
        root, "bench.json", run_of("bench", BENCH, wall_seconds=9, rates={"copy": 3e12}, not_timed=ABSENT, left_out=[])
    )
    marks = "".join(
        f"## {name}\n\n<!-- portakern report: {name} -->\n<!-- end: {name} -->\n\n"
        for name in reporting.TABLES
        if name not in PAGE_ONE
    )
    first = [f"<!-- portakern report: {name} -->\n<!-- end: {name} -->\n" for name in PAGE_ONE]
    (root / "PORTING.md").write_text("\n".join(["# Title\n", *first]))
    (root / "README.md").write_text("# Title\n\n" + marks + "The end.\n")
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "portakern", root / "portakern", ignore=skip)
    return root


@pytest.fixture(scope="module")
def drawn():
    """The plots of that checkout, drawn once."""
    return {}


@pytest.fixture
def fresh(tree, drawn):
    """The same, up to date."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install -e '.[demo]'")
    for path, text in drawn.items():
        put_text(tree / path, text)
    reporting.update(tree)
    drawn.update({p.relative_to(tree): p.read_text() for p in (tree / reporting.PLOTS).iterdir()})
    return tree


def put_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def report(root, *arguments):
    return CliRunner().invoke(app, ["report", "--root", str(root), *map(str, arguments)])


def content(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and (root / "portakern") not in p.parents
    }


def test_the_report_of_this_checkout_is_up_to_date():
    assert [f"{s.path.relative_to(ROOT)}: {s.what}" for s in reporting.stale(ROOT)] == [], f"run: {reporting.COMMAND}"


def test_every_table_has_its_place_in_this_checkout():
    """On a page that keeps it, or on one that gets it when the site is built."""
    there = {
        n for page in reporting.PAGES for n in markdown.pieces((ROOT / page).read_text(encoding="utf-8"), ROOT / page)
    }
    for page in (ROOT / "docs").rglob("*.md"):
        there |= {*re.findall(r"^<!-- table: (\w+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)}
    assert there == set(reporting.TABLES)


# -------------------------------------------------------------------------------------------------- making and checking
def test_tables_show_the_results(fresh):
    pieces = markdown.pieces((fresh / "README.md").read_text(), fresh / "README.md")
    assert "| `softmax` | bfloat16 | triton | ok | ok | – |" in pieces["matrix"]
    assert (
        "| `matmul` | bfloat16 | triton | **no** (1) | – | ok |\n" in pieces["matrix"]
        and "1. takes | too much" in pieces["matrix"]
    )
    assert "3 of 4 typical calls compile and fit." in pieces["matrix"]
    assert "| `softmax` | bfloat16 | sm_90 | 1 | 30 | 0 | shared 32 B (50%) | 50% | none |" in pieces["resources"]
    assert "| sm_90 | H100 SXM5 80 GB | 1 of 2 | 0 | 0 | 50% | 50% |" in pieces["resources"]
    assert "| `softmax` | bfloat16 | triton | sm_90, gfx942 | `block_n=4096` |" in pieces["tilings"]
    assert "| `matmul` | bfloat16 | 2,000 |" in pieces["cycles"]
    assert f"**{DEVICE}**" in pieces["launch"] and "| `softmax` | 40.0 |" in pieces["launch"]
    assert pieces["errors"].startswith("No conformance run is stored yet")
    assert pieces["steps"].startswith("No step was timed yet")
    fast = pieces["speed"]
    assert "| `attention` | 2 | 1.00 | 0.50 | 1.50 | 50% | 0 |" in fast
    call = "| bfloat16 | batch=2, q_len=1024, causal; with bias | triton | torch 50, jax wrong, 2.74 × its bound |"
    assert f"{call} 100, stale | 99, 102 | 30 | 600 TFLOP/s | 50% | 0.50 | 0.25 |" in fast
    assert (
        "Stale: measured before the kernel, or the call of a peer, was last changed (1 in all)" in fast
        and "liger" not in fast
    )
    assert "Not timed: quack (quack not installed)." in fast
    assert "| sm_90 | H100 SXM5 80 GB | 3,350 |" in pieces["roofs"]
    told = markdown.pieces((fresh / "PORTING.md").read_text(), fresh / "PORTING.md")["speeds"]
    (line,) = (line for line in told.splitlines() if line.startswith("| `attention` |"))
    assert line.endswith(" | 1.00 (0.50 to 1.50), stale | – |") and AGED in told
    assert "| `softmax` | " in pieces["lines"]
    for plot in (fresh / "docs" / "plots").iterdir():
        assert (
            ElementTree.parse(plot).getroot().tag.endswith("svg") and "Verdana, Arial, sans-serif" in plot.read_text()
        )
    assert [p.name for p in sorted((fresh / "docs" / "plots").iterdir())] == [
        "glance.svg",
        "heatmap.svg",
    ]


def test_two_generations_have_the_same_bytes(fresh):
    before = content(fresh)
    assert reporting.stale(fresh) == [] and reporting.update(fresh) == []
    for path in (fresh / "docs" / "plots").iterdir():
        path.unlink()
    (fresh / "README.md").write_text((fresh / "README.md").read_text().replace("| `softmax` |", "| `hardmax` |"))
    assert len(reporting.update(fresh)) == 3
    assert content(fresh) == before


def test_what_was_changed_by_hand_is_named(fresh):
    page, plot = fresh / "README.md", fresh / "docs" / "plots" / "glance.svg"
    assert report(fresh, "--check").exit_code == 0
    page.write_text(page.read_text().replace("| 40.0 |", "| 30.0 |").replace("The end.", "The prose may change."))
    plot.write_text(plot.read_text().replace("H100", "H200"))
    (fresh / "docs" / "plots" / "heatmap.svg").unlink()
    before = content(fresh)
    said = report(fresh, "--check")
    assert said.exit_code == 1 and content(fresh) == before
    assert said.output.splitlines() == [
        "README.md: table 'launch' is stale or was changed by hand; run: portakern report",
        "docs/plots/heatmap.svg: is missing; run: portakern report",
        "docs/plots/glance.svg: was changed by hand; run: portakern report",
    ]
    mended = report(fresh)
    assert mended.exit_code == 0 and mended.output.splitlines() == [
        "wrote README.md",
        "wrote docs/plots/heatmap.svg",
        "wrote docs/plots/glance.svg",
    ]
    assert report(fresh, "--check").exit_code == 0 and "The prose may change." in page.read_text()


def test_results_that_change_make_tables_and_plots_stale(fresh):
    more = run_of("compile-matrix", [built(target="sm_90", spills=8)], "host CPU", limits={})
    keep(fresh, "compile-matrix.json", more)
    (fresh / "benchmarks" / "results" / "bench.jsonl").unlink()
    gone = "shows what is no longer among the results"
    assert {
        s.what.removesuffix(" is stale or was changed by hand")
        for s in reporting.stale(fresh)
        if s.path.suffix == ".md"
    } == {
        f"table {name!r}"
        for name in (
            "chips",
            "porting",
            "reach",
            "speeds",
            "losses",
            "matrix",
            "resources",
            "tilings",
            "cycles",
            "speed",
        )
    }
    assert {s.path.name: s.what for s in reporting.stale(fresh) if s.path.suffix == ".svg"} == {
        "heatmap.svg": "is stale",
        "glance.svg": gone,
    }
    reporting.update(fresh)
    assert [p.name for p in (fresh / "docs" / "plots").iterdir()] == ["heatmap.svg"] and not reporting.stale(fresh)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (
            "<!-- portakern report: matrix -->\n",
            "README.md, line 1: <!-- portakern report: matrix --> has no end; expected <!-- end: matrix --> below it",
        ),
        ("a\n<!-- end: matrix -->\n", "README.md, line 2: <!-- end: matrix --> ends nothing; no mark is open there"),
        (
            "<!-- portakern report: matrix -->\n<!-- end: launch -->\n",
            "README.md, line 2: <!-- end: launch --> ends nothing; expected <!-- end: matrix -->",
        ),
        (
            "<!-- portakern report: matrix -->\n<!-- portakern report: launch -->\n",
            (
                "README.md, line 2: <!-- portakern report: launch --> stands inside 'matrix'; expected <!-- end: "
                "matrix --> before it"
            ),
        ),
        (
            "<!-- portakern report: haste -->\n<!-- end: haste -->\n",
            "README.md: there is no table 'haste'; expected one of headline, chips, porting, ",
        ),
    ],
)
def test_marks_that_do_not_pair(tree, page, message):
    (tree / "README.md").write_text(page)
    for command in (reporting.stale, reporting.update):
        with pytest.raises(ResultError) as e:
            command(tree)
        assert str(e.value).startswith(message)
    assert (tree / "README.md").read_text() == page and not (tree / "docs").exists()


def test_elsewhere_than_in_a_checkout(tmp_path):
    said = report(tmp_path)
    assert isinstance(said.exception, ResultError)
    assert str(said.exception) == (
        f"portakern report works on a checkout of portakern, and {tmp_path} has no PORTING.md; "
        "in a checkout of portakern run: pip install -e ."
    )


def test_a_wheel_says_that_it_needs_a_checkout_and_compares_without(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "root", lambda: tmp_path)
    said = CliRunner().invoke(app, ["report", "--check"])
    assert str(said.exception) == (
        f"portakern report needs a checkout of portakern, and {tmp_path} has no maint/report.py; run it in a checkout "
        "(report --compare FIRST SECOND needs none)"
    )
    files = (
        benched(tmp_path, "first.json", BENCH),
        benched(tmp_path, "second.json", [{**r, "host_us": 9.0} for r in BENCH]),
    )
    done = CliRunner().invoke(app, ["report", "--compare", *map(str, files)])
    assert done.exit_code == 0 and "2 of 2 ratios of portakern are within 5%" in done.output, done.output


def test_without_matplotlib_nothing_is_half_done(tree, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    before = content(tree)
    said = report(tree)
    assert (
        str(said.exception)
        == "plots need matplotlib, which is not installed; in a checkout of portakern run: pip install -e '.[plots]'"
        and content(tree) == before
    )
    assert report(tree, "--check").exit_code == 1  # checking draws nothing


# --------------------------------------------------------------------------------------------------------------- adding
def test_a_new_run_is_taken_in(fresh, tmp_path):
    said = report(fresh, "--add", put(tmp_path, "Launch B200.json", launched(device="NVIDIA B200")))
    assert said.exit_code == 0, said.output
    assert said.output.splitlines() == ["launch-b200.json is new: launch on NVIDIA B200, 1 row", "wrote README.md"]
    assert "**NVIDIA B200**" in (fresh / "README.md").read_text() and reporting.stale(fresh) == []


def test_a_newer_run_replaces(fresh, tmp_path):
    file = put(tmp_path, "other.json", launched({**CALL, "median_us": 25.0}, date="2026-03-02"))
    said = report(fresh, "--add", file)
    assert (
        said.output.splitlines()[0]
        == f"launch-h100.json is replaced: launch on {DEVICE} of 2026-03-01, 1 row, by that of 2026-03-02, 1 row"
    )
    assert "| `softmax` | 25.0 |" in (fresh / "README.md").read_text() and reporting.stale(fresh) == []
    assert sorted(p.name for p in (fresh / "benchmarks" / "results").iterdir()) == [
        "bench.jsonl",
        "compile-matrix.jsonl",
        "launch.jsonl",
    ]


def benched(folder, name, rows, device=DEVICE):
    """A run of the bench in a file."""
    return put(folder, name, run_of("bench", rows, device, wall_seconds=9, rates={}, not_timed={}, left_out=[]))


def test_two_runs_are_held_against_each_other(tmp_path):
    """Ratios of ours by the size of the call, times of all, and each ratio that differs by more than runs may."""
    first = [
        bench("triton", 100.0, best_peer="torch", ratio=0.5), bench("torch", 50.0, ratio=1.0),
        bench("triton", 8.0, 64, best_peer="torch", ratio=1.0), bench("torch", 8.0, 64, ratio=1.0),
        bench("jax", 60.0, ratio=0.8), bench("liger", 0.0, **NO_TIME, verdict="refused", why="it has no attention"),
    ]  # fmt: skip
    second = [
        bench("triton", 103.0, best_peer="torch", ratio=0.49), bench("torch", 50.5, ratio=1.0),
        bench("triton", 10.0, 64, best_peer="torch", ratio=0.8), bench("torch", 8.0, 64, ratio=1.0, host_us=31.0),
        bench("jax", 0.0, **NO_TIME, verdict="far behind", why="not timed"), first[-1],
    ]  # fmt: skip
    files = benched(tmp_path, "first.json", first), benched(tmp_path, "second.json", second)
    found = agreement.agreement(*files)
    table = {line[0]: line[1:] for line in found.table()}
    assert table["under 10 us"] == ["1", "0", "20.0%", "20.0%", "2", "1", "12.5%", "25.0%"]
    assert table["to 1 ms"] == ["1", "1", "2.0%", "2.0%", "1", "1", "3.0%", "3.0%"]
    assert table["to 100 us"] == ["0", "–", "–", "–", "1", "1", "1.0%", "1.0%"]
    assert table["all"][:2] == ["2", "1"] and table["all"][4:6] == ["4", "3"]
    assert (found.alone, found.changed, found.kept, found.turned) == (1, 0, 0, [])
    said = CliRunner().invoke(app, ["report", "--compare", *map(str, files)])
    assert said.exit_code == 1 and "1 of 2 ratios of portakern are within 5%" in said.output
    assert "-20.0% triton 1.000, then 0.800 of the best peer's speed (8.0, then 10.0 us): attention(" in said.output
    assert "1 times are in one run only" in said.output


def test_runs_that_agree_end_with_status_0(tmp_path):
    rows = [bench("triton", 100.0, ratio=0.5), bench("torch", 50.0, ratio=1.0)]
    again = [bench("triton", 101.0, ratio=0.5), bench("torch", 50.0, ratio=1.0)]
    first, second = benched(tmp_path, "first.json", rows), benched(tmp_path, "second.json", again)
    said = CliRunner().invoke(app, ["report", "--compare", str(first), str(second)])
    assert said.exit_code == 0 and "1 of 1 ratios of portakern are within 5%" in said.output, said.output
    # torch's row is the first run's to the last digit: a file that was continued holds what it held
    assert "1 times were left out: the second file copies" in said.output
    same = CliRunner().invoke(app, ["report", "--compare", str(first), str(first)])
    assert "share no ratio that both measured with the same sources" in str(same.exception)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"verdict": "wrong", "why": "NaN", **NO_TIME}, "right, then wrong: triton on attention("),
        ({"median_us": 100.5, "sources": "f" * 16}, "1 times were left out: their sources changed"),
    ],
)
def test_what_two_runs_do_not_share_is_told(tmp_path, changes, told):
    rows = [bench("triton", 100.0, ratio=0.5), bench("triton", 300.0, 2048, ratio=0.5)]
    again = [bench("triton", 100.0, ratio=0.5) | changes, bench("triton", 301.0, 2048, ratio=0.5)]
    files = benched(tmp_path, "first.json", rows), benched(tmp_path, "second.json", again)
    said = CliRunner().invoke(app, ["report", "--compare", *map(str, files)])
    assert told in said.output and said.exit_code == ("wrong" in told)


def test_what_cannot_be_compared_is_refused(tmp_path):
    first = benched(tmp_path, "first.json", [bench("triton", 100.0, ratio=0.5)])
    other = benched(tmp_path, "other.json", [bench("triton", 100.0, ratio=0.5)], "NVIDIA B200")
    with pytest.raises(ResultError, match="it ran on NVIDIA B200, and .*first.json on NVIDIA H100 80GB HBM3"):
        agreement.agreement(first, other)
    times = put(tmp_path, "launch.json", launched())
    with pytest.raises(ResultError, match="it holds results of launch; expected those of portakern bench"):
        agreement.agreement(first, times)
    refused = CliRunner().invoke(app, ["report", "--check", "--compare", str(first), str(first)])
    assert "leave out --check" in str(refused.exception)


def test_losses_of_what_is_shipped_stand_by_target_and_family(tree):
    def row(call, best, tried=9, **more):
        tiles = {key: {"block_n": 64} for key in ("default_tiling", "best_tiling", "kept_tiling")}
        return {
            "op": "softmax", "family": "rows", "dtype": "bfloat16", "call": call, "target": "sm_90",
            "backend": "triton", "variant": "gpu", "metric": "device time", "unit": "us", "default": 10.0,
            "best": best, "loss": round(10.0 / best - 1, 4), "tried": tried, "refused": 0, "wrong": 0, **tiles, **more,
        }  # fmt: skip

    kept = StoredResults.load(tree)
    assert "Nothing was tuned yet" in timed.tuned(kept)
    rows = [row("a", 10.0), row("b", 9.5), row("c", 8.0), row("d", 10.0, 1), row("e", 10.0, 1, exhausted=True)]
    keep(tree, "tune.json", run_of("tune", rows, wall_seconds=60, seed=0, keys_left=2))
    text = timed.tuned(StoredResults.load(tree))
    assert "| sm_90 | rows | triton, gpu | 4 | 9 | 2.6% | 25.0% | 2 | 1 | 1.071 | 1 |" in text
    assert "did not reach in time, whose calls have no row: tune.json 2." in text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (run_of("launch", [], graphs=[]), "'rows' is empty; expected a row for each thing measured"),
        (launched({**CALL, "gbps": 3}), "'rows[0].gbps' is unknown; expected op, interface"),
        (launched(note=""), "'note' is unknown; expected graphs"),
        (
            launched(),
            (
                "its date is 2026-03-01, and launch-h100.json of benchmarks/results holds launch on NVIDIA H100 80GB "
                "HBM3 of 2026-03-01; expected a later one"
            ),
        ),
        (
            run_of("compile-matrix", [built()], "host CPU", "2027-01-01", wall_seconds=1, ok=1, of=1, limits={}),
            (
                "it lacks 3 of the 4 rows of compile-matrix.json of benchmarks/results, such as matmul, bfloat16, "
                "sm_90, triton; expected the whole run"
            ),
        ),
        (
            launched(device="NVIDIA B200"),
            (
                "benchmarks/results has another run of that name: launch on NVIDIA H100 80GB HBM3; give the "
                "file another name"
            ),
        ),
    ],
)
def test_a_bad_file_is_refused_and_changes_nothing(fresh, tmp_path, data, message):
    before, file = content(fresh), put(tmp_path, "launch-h100.json", data)
    said = report(fresh, "--add", file)
    assert isinstance(said.exception, ResultError) and str(said.exception).startswith(f"{file}: {message}"), (
        said.exception
    )
    assert content(fresh) == before


def test_replace_takes_it_all_the_same(fresh, tmp_path):
    file = put(tmp_path, "launch.json", launched({**CALL, "op": "matmul"}, {**CALL, "median_us": 30.0}))
    assert report(fresh, "--add", file, "--replace").output.splitlines()[0].startswith("launch-h100.json is replaced: ")
    assert "| `softmax` | 30.0 |" in (fresh / "README.md").read_text()
    assert (
        str(report(fresh, "--add", file, "--check").exception)
        == "report: --check and --add exclude each other; pass one of them"
    )


# ------------------------------------------------------------------------------------------------------ what is counted
def test_the_table_of_speeds_tells_of_failures_and_of_float32_apart(tree):
    """A wrong call hides no speed behind it; float32 has a column of its own."""
    fine = bench("triton", 80.0, 4096, dtype="float32", error=0.125, best_peer="torch", ratio=1.25)
    wrong = {**bench("triton", 0.0, op="softmax"), **NO_TIME, "verdict": "wrong", "error": 7.0}
    rest = {"wall_seconds": 9, "rates": {"copy": 3e12}, "not_timed": {}, "left_out": []}
    keep(tree, "bench.json", run_of("bench", [fine, wrong], **rest))
    told = timed.speeds(StoredResults.load(tree))
    assert told.partition("| `attention` |")[2].startswith(" 1.25 | 0.12 |\n")
    assert told.partition("| `softmax` |")[2].startswith(" **wrong** | – |\n")


def checked_on(subject, op="softmax", passed=True, **more):
    return {"op": op, "subject": subject, "examples": 100, "worst": {"y": 0.5}, "passed": passed, **more}


def with_rows(kept, benchmark, rows, device):
    run = dataclasses.replace(kept.results[0], file=Path(f"{benchmark}-{device}"), benchmark=benchmark, device=device)
    return dataclasses.replace(kept, results=(*kept.results, dataclasses.replace(run, rows=tuple(rows))))


def test_what_ran_where_is_counted(tree, monkeypatch):
    """Of a kind of machine and backend: what compiles everywhere, what an interpreter of these kernels ran, a stricter
    one, the device; what failed is no op that ran; a function that was checked is nobody's port.
    """
    monkeypatch.setattr(lines, "ops", lambda root: ["one", "another"])
    kept = with_rows(
        StoredResults.load(tree),
        "conformance",
        [
            checked_on("triton on cpu (interpreted), variant gpu"),
            checked_on("triton on cpu (interpreted)", "matmul"),
            checked_on("pallas on cpu (interpreted), profile simulated"),
            checked_on("pallas on tpu v5e (compiled), profile emulated", "matmul", passed=False),
            checked_on("my_function on cpu"),
            checked_on("triton on rocm gfx942 (emulated), profile emulated"),
        ],
        "host CPU",
    )
    kept = with_rows(
        kept,
        "conformance",
        [checked_on("triton on cuda sm_90 (compiled)"), checked_on("triton on cuda sm_90 (compiled)", "matmul", False)],
        DEVICE,
    )
    said = [line for line in coverage.reach(kept).splitlines() if line.startswith(("| NV", "| AMD", "| TPU"))]
    jax_there, nvidia, amd, tpu = (line.replace("not measured", "no") for line in said)
    assert nvidia == (
        "| NVIDIA GPUs | triton | 1 of 2 ops, 1 architecture | all 2 ops, 200 cases, 100 an op | no | no | "
        f"1 of 2 ops, 200 cases, 100 an op, **failed**: matmul | 1 of 2 ops{STALE} |"
    )
    assert jax_there == "| NVIDIA GPUs | pallas | no | no | no | no | no | no |"  # whether or not it is installed
    assert AGED in coverage.reach(kept) and f"\nRun and timed on: {DEVICE}. Counted" in coverage.reach(kept)
    assert amd == (
        "| AMD GPUs | triton | 1 of 2 ops, 1 architecture | all 2 ops, 200 cases, 100 an op | no | "
        "1 of 2 ops, 100 cases, 100 an op | no | no |"
    )
    assert tpu == "| TPUs | pallas | no | no | 1 of 2 ops, 200 cases, 100 an op, **failed**: matmul | no | no | no |"
    nothing = coverage.reach(dataclasses.replace(kept, results=()))
    assert nothing.count(" | ".join(["not measured"] * 6)) == 4


def test_few_cases_take_the_place_of_many_only_where_the_sources_are_others(tree):
    """Or where they found what the many did not. And the line says how many cases the op of fewest had."""
    simulated = "pallas on cpu (interpreted), profile simulated"

    def told(*runs):
        kept = StoredResults.load(tree)
        for day, rows in enumerate(runs):
            kept = with_rows(kept, "conformance", [checked_on(simulated, **row) for row in rows], "host CPU")
            last = dataclasses.replace(kept.results[-1], date=f"2030-01-0{day + 1}")
            kept = dataclasses.replace(kept, results=(*kept.results[:-1], last))
        return next(line for line in coverage.reach(kept).splitlines() if line.startswith("| TPU"))

    many, few = {"examples": 200, "sources": "a"}, {"examples": 12, "sources": "a"}
    other = {"op": "matmul", "examples": 12}
    assert "212 cases, 12 to 200 an op" in told([many, other], [few])
    assert "24 cases, 12 an op" in told([many, other], [{**few, "sources": "b"}])
    assert "12 cases, 12 an op, **failed**: softmax" in told([many], [{**few, "passed": False}])
    assert "200 cases, 200 an op, **failed**: softmax" in told([{**many, "passed": False}], [few])
    assert "300 cases, 300 an op |" in told([{**many, "passed": False}], [{**many, "examples": 300}])
    assert "12 cases, 12 an op |" in told([{"examples": 200}], [{"examples": 12}]), "nobody knows that they are alike"


@pytest.mark.parametrize("profile", [None, "simulated"])
def test_reach_reads_what_the_checker_calls_its_subjects(profile):
    """Every installed backend's, as far as it runs here."""
    for b in (b for b in registry.backends().values() if b.auto and b.can_interpret() and not b.unavailable()):
        name = subject.backend_subject(registry.find_spec("softmax"), b, None, "cpu", None).name
        said = coverage.SUBJECT.fullmatch(name + (f", profile {profile}" if profile else ""))
        assert said and said["backend"] == b.name and said["target"] == "cpu" and said["profile"] == profile, name
    variant = coverage.SUBJECT.fullmatch("triton on cuda sm_90 (compiled), variant hopper")
    assert variant and variant.group("target", "how", "variant") == ("cuda sm_90", "compiled", "hopper")


def test_losses_are_said_from_the_worst(tree):
    """Slower on any call is slower; a wrong result and what stands beside no peer are told too; the host's time."""
    quick = bench("triton", 40.0, op="softmax", best_peer="liger", ratio=1.25)
    wrong = {**bench("triton", 0.0, 4096, op="softmax"), **NO_TIME, "verdict": "wrong", "error": 7.0}
    even = bench("triton", 100.0, op="rmsnorm", best_peer="torch", ratio=0.98)
    rest = {"wall_seconds": 9, "rates": {"copy": 3e12}, "not_timed": {}, "left_out": []}
    keep(tree, "bench.json", run_of("bench", [*BENCH, quick, wrong, even], **rest))
    ways = {"op": 12.0, "torch": 10.0, "op, forward and backward": 30.0, "torch, forward and backward": 20.0}
    host = [
        {"op": op, "interface": w, "median_us": us * n}
        for n, op in enumerate(["rope", "another"], 1)
        for w, us in ways.items()
    ]
    (tree / "benchmarks" / "results" / "launch.jsonl").unlink()
    told = timed.losses(with_rows(StoredResults.load(tree), "launch", host, DEVICE))
    assert f"Time divided by the best peer's, {DEVICE}; a difference below 3% counts as the same:" in told
    assert "* slower: `attention` on 1 of 2 calls, at most 2.00 (bfloat16, beside torch)." in told
    assert "* the same: `rmsnorm`." in told and "* faster: `softmax` 0.80." in told
    assert "* **wrong**: `softmax` bfloat16." in told and "* timed without a peer: `matmul`." in told
    assert f"function, {DEVICE}: 1.20 times forward, 1.50 times with" in " ".join(told.split())
    assert timed.losses(dataclasses.replace(StoredResults.load(tree), results=())) == "Nothing was timed yet."


def test_an_estimate_that_cannot_be_true_is_not_shown(tree):
    """One far below what is issued missed a branch; beside one that nothing counts there is nothing to hold it to."""

    def told(*kernels):
        row = built("matmul", "v5e")
        row["kernels"] = [{**row["kernels"][0], **kernel} for kernel in kernels]
        keep(tree, "compile-matrix.json", run_of("compile-matrix", [row], "host CPU", limits={}))
        return compiled.cycles(StoredResults.load(tree))

    believed = {"cycles": 90_000, "issued": 100_000, "moved": 0}
    assert "| `matmul` | bfloat16 | 90 |" in told(believed)
    assert "| `matmul` | bfloat16 | 100 |" in told({**believed, "cycles": 60_000}), "and what is issued is shown"
    assert "| `matmul` | bfloat16 | 100 |" in told({**believed, "cycles": None})
    assert "| `matmul` | bfloat16 | 180 |" in told({**believed, "launches": 2, "issued": 200_000})
    v5e = targets.find("v5e")
    assert "| `matmul` | bfloat16 | 300 |" in told({**believed, "moved": int(300_000 * v5e.bandwidth / v5e.clock)})
    for missing in ({"cycles": 90_000}, {}):
        assert "No cycle counts are stored." in told(believed, missing)


def test_kernels_stand_beside_the_best_of_others(tree):
    row = {
        "case": "a call", "op": "matmul", "dtype": "bfloat16", "target": "v6e", "xla": {}, "flash": {}, "splash": {},
        "portakern": {"least": 41_000, "around": 0}, "over_xla": 0.4, "over_flash": 1.02, "over_splash": None,
    }  # fmt: skip
    slow = row | {"target": "v5e", "over_xla": 1.2, "portakern": {"least": 50_000, "around": 7000}}
    alone = row | {"case": "another", "over_xla": None, "over_flash": None}
    unknown = alone | {"target": "v5e", "portakern": {"why": "the compiler's process ended"}}
    rows = [row, slow, alone, unknown]
    keep(tree, "tpu-cycles.json", run_of("tpu-cycles", rows, "host CPU", wall_seconds=120.0))
    told = compiled.beside(StoredResults.load(tree))
    assert "| case | v5e | v6e |" in told and "| a call | 50 + 7 (**1.20** xla) | 41 (1.02 flash) |" in told
    assert "| another | – | 41 |" in told and "1 of 4 are slower by more than 3 %" in told and "2 minutes" in told


def test_tilings_that_a_compiler_took_stand_by_op_and_target(tree):
    def row(op, target, **more):
        found = {
            "tilings": 200,
            "refused": [],
            "largest_share": 0.991,
            "large_tilings": 3,
            "smallest_ratio": 1.01,
            "median_ratio": 1.2,
        }
        return {"op": op, "target": target, "seconds": 90.0, "vmem_bytes": "100/101", **found, **more}

    bad = "softmax(float32; ...) on v5e, {}: it takes 17 MiB"
    rows = [
        row("matmul", "v6e"),
        row("matmul", "v4", smallest_ratio=1.04, median_ratio=2.0, large_tilings=1),
        row("softmax", "v5e", refused=[bad], tilings=31, large_tilings=0, smallest_ratio=None, median_ratio=None),
    ]
    keep(tree, "tpu-legal.json", run_of("tpu-legal", rows, "host CPU", wall_seconds=1.0))
    told = compiled.legal(StoredResults.load(tree))
    assert "431 tilings, 1 of them refused by libtpu" in told and "4 minutes" in told and f"* {bad}" in told
    assert "| op | v4 | v5e | v6e | estimates |" in told
    assert "| `matmul` | 200 (99%) | – | 200 (99%) | 1.01, 1.20 |" in told
    assert "| `softmax` | – | 31 (99%, **1 refused**) | – | – |" in told and STALE not in told
    rows[0] |= {"backend": "pallas", "variant": "tpu", "sources": "0" * 16}
    keep(tree, "tpu-legal.json", run_of("tpu-legal", rows, "host CPU", wall_seconds=1.0))
    told = compiled.legal(StoredResults.load(tree))
    assert f"| `matmul` | 200 (99%) | – | 200 (99%){STALE} |" in told and "(1 in all)" in told


def test_a_figure_names_the_commit_that_it_was_measured_at(tree):
    shown = [r.name for r in StoredResults.load(tree).results]
    assert "launch-h100.json" in shown and f": 2026-03-01, {DEVICE}" in timed.launch(StoredResults.load(tree))
    keep(tree, "launch-h100.json", launched(commit="0123456789ab+"))
    assert f": 2026-03-01 at 0123456789ab+, {DEVICE}" in timed.launch(StoredResults.load(tree))


def test_what_is_said_never_to_have_run_is_in_no_kept_result():
    """Prose that a result makes untrue: where this fails, the page that it names has to say what is so now."""
    kept = StoredResults.load(ROOT)
    ran = {r.target.platform for r in coverage.ran(kept) if r.how == "compiled" and not r.profile}
    ran |= {row["target"].partition(" ")[0] for row, _ in kept.rows("bench") if row["subject"]}
    by_jax = [b for b in registry.backends().values() if b.auto and b.framework == "jax"]
    served = {p for b in by_jax for f in b.declared for p in f.platforms}
    porting = " ".join((ROOT / "PORTING.md").read_text(encoding="utf-8").split())
    said = {
        "AMD: no kernel ran on hardware.": "rocm" not in ran,
        "TPU: no kernel ran on hardware,": "tpu" not in ran,
        "on other GPUs they are refused": "rocm" not in served,
        "times come from an H100 and two H200s": {r.device for _, r in kept.rows("bench")} == {DEVICE, "NVIDIA H200"},
    }
    assert {text: text in porting for text in said} == said, "PORTING.md"
    over: dict[bool, list[float]] = {}
    for row, _ in kept.rows("tpu-cycles"):
        if row["op"].partition("_")[0] not in ("attention", "linear"):
            others = [ratio for name, ratio in row.items() if name.startswith("over_") and ratio]
            over.setdefault(row["op"] == "matmul", []).append(max(others))
    rows, products = (f"{min(over[kind]):.2f} to {max(over[kind]):.2f}" for kind in (False, True))
    assert f"take {rows} of the static cycles of XLA's own programs, and products {products}" in porting


def test_the_first_figures_name_their_hardware(tree):
    """A model's step stands beside Liger's, faults beside a flat tolerance; without one of them it is left out."""
    kept = StoredResults.load(tree)
    assert summaries.headline(kept) == "Nothing was measured yet."
    step = {"stage": "eager", "ms": 80.0, "best_ms": 79.0, "worst_ms": 90.0, "peak_gib": 7.2, "gradients_apart": 0.03}
    rows = [step | {"contender": "portakern"}, step | {"contender": "torch", "ms": 110.4, "peak_gib": 20.0}]
    sizes = {"sizes": {"model": "8 layers"}}
    alone = with_rows(kept, "model-step", rows, DEVICE)
    assert summaries.headline(alone) == "Nothing was measured yet.", "Liger's is not known"
    rows.append(step | {"contender": "liger", "ms": 88.0, "gradients_apart": 0.029})
    run = dataclasses.replace(with_rows(kept, "model-step", rows, DEVICE).results[-1], extra=sizes)
    said = summaries.headline(dataclasses.replace(kept, results=(*kept.results, run)))
    assert f"On one {DEVICE}, `portakern.torch.apply(model)`" in said and "(8 layers) from 110 ms and 20.0 GiB" in said
    assert "to 80 ms and 7.2 GiB. Liger's patch takes 88 ms and 7.2 GiB." in said and said.count("\n") == 0
    faults = [
        {
            "name": n,
            "op": "softmax",
            "backend": "triton",
            "max_error": e,
            "seeds": {"0": {"caught": c}},
            "flat_tolerance": {},
        }
        for n, e, c in (("a", 1e-3, True), ("b", 1.0, False))
    ]
    said = summaries.headline(with_rows(kept, "mutants", faults, "host CPU"))
    assert (
        "2 mistakes were planted" in said and "misses 1 of them (50%)" in said and "finds 1 on each of 1 seeds" in said
    )


def test_chips_that_ran_and_chips_that_never_did_are_told_apart(tree):
    kept = StoredResults.load(tree)
    rows = [checked_on("triton on cuda sm_90 (compiled)"), checked_on("triton on cuda sm_90 (compiled)", "softmax_vjp")]
    rows.append(checked_on("triton on cuda sm_90 (compiled)", "matmul", passed=False))
    said = summaries.chips(with_rows(kept, "conformance", rows, DEVICE))
    ran, never = said.split("**Compiled for, and never run on:**")
    assert f"* {DEVICE}: Triton, 1 ops and their gradients." in ran
    assert "* AMD GPUs: MI300X." in never and "* TPUs: TPU v5e." in never and "H100" not in never


def test_a_port_says_what_it_cost_and_how_fast_it_is(tree, monkeypatch):
    """AMD has Triton's files for NVIDIA; a time is of the port whose variant it names; what nobody measured says so."""
    monkeypatch.setattr(lines, "ops", lambda root: ["softmax"])
    kept = with_rows(
        StoredResults.load(tree), "conformance", [checked_on("triton on cpu (interpreted)", seconds=9.0)], ""
    )
    text = summaries.porting(kept)
    told = {line.split(" | ")[0]: line.rstrip(" |").split(" | ")[1:] for line in text.splitlines() if line[0:1] == "|"}
    heads = told.pop("| port")
    assert heads == ["Triton, NVIDIA GPUs", "Triton, AMD GPUs", "Pallas, TPUs", "Pallas, sm_90", "Triton, sm_90"]
    assert told["| lines of code in the ops' files"][1] == "0: the same files"
    assert [*map(str.isdigit, told["| lines of code in the ops' files"])] == [True, False, True, True, False]
    assert told["| typical calls that compile"] == ["1 of 2", "1 of 1", *["not measured"] * 3]
    assert told["| of these with spilled registers"][:2] == ["0", "1"]
    assert told["| cases checked"] == [*["100 interpreted"] * 2, *["not measured"] * 3]
    assert told["| processor time to check an op"][0] == "9 s (9 to 9)"
    assert told["| speed"] == ["H100 80GB HBM3: 1.00 (0.50 to 1.50), stale", *["not measured"] * 4] and AGED in text
    row = {"case": "a call", "op": "softmax", "target": "v5e", "portakern": {}, "over_xla": 0.8, "over_flash": 0.5}
    text = summaries.porting(with_rows(kept, "tpu-cycles", [row], "host CPU"))
    assert "| not measured; by static cycles 1.25 (1.25 to 1.25) |" in text


def test_the_versions_that_were_tried_are_those_of_the_kept_results():
    """README's range of versions is what the kept runs had."""
    (line,) = re.findall(r"^Tried: (.*?)\.(?: |$)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    said = {name.lower(): (lo, hi) for name, lo, hi in re.findall(r"(\w+) ([\d.]+) to ([\d.]+\d)", line)}
    assert said.keys() == {"python", "torch", "triton", "jax"}
    for name, ends in said.items():
        versions = [r.environment[name] for r in StoredResults.load(ROOT).results if r.environment.get(name)]
        tried = sorted({tuple(int(part) for part in v.split(".")[:2]) for v in versions})
        assert ends == tuple(".".join(map(str, v)) for v in (tried[0], tried[-1])), name


def test_lines_that_a_port_has_alone(tmp_path, monkeypatch):
    """A line in another backend's module, in the same order, is not the port's own; the oracle is no port, and a
    variant beside it no other backend."""
    texts = {"a/one": "x = 1\ny = 2\nz = 3\n", "a/two": "x = 1\n", "b": "y = 2\nw = 4\nz = 3\n", "oracle": "w = 4\n"}
    for name, text in texts.items():
        put_text(tmp_path / "portakern" / "backends" / name / "some.py", text)
    put_text(tmp_path / "portakern" / "specs" / "some.py", "")

    class Family:
        def __init__(self, name, compiler):
            self.package, self.compiler = f"portakern.backends.{name.replace('/', '.')}", compiler

    class Backend:
        auto, declared = True, (Family("a/one", "x"), Family("a/two", "x"), Family("b", "x"), Family("oracle", None))

    monkeypatch.setattr(lines.registry, "own_modules", lambda: {"some": "portakern.specs.some"})
    monkeypatch.setattr(lines.registry, "backends", lambda: {"any": Backend})
    assert lines.written(StoredResults(tmp_path, ())) == {"some": {"a.one": (3, 1), "a.two": (1, 1), "b": (3, 1)}}


def test_lines_are_those_of_the_source_and_no_file_counts_twice(monkeypatch):
    """Pallas on Hopper was left out of the table wherever jax was too old to import it, and files that several columns
    import were counted in each."""
    kept = StoredResults(ROOT, ())
    monkeypatch.setattr(lines, "ops", lambda root: ["softmax", "matmul"])
    shown, written = lines.lines(kept), lines.written(kept)
    assert {"pallas.gpu", "pallas.tpu", "triton.gpu", "triton.hopper"} <= set(written["matmul"])
    seen: list[str] = []
    monkeypatch.setattr(lines, "code_lines", lambda text: seen.append(text) or 1)
    lines.lines(kept)
    texts = [text for text in seen if text.strip()]
    assert len(texts) == len(set(texts)) > 30
    monkeypatch.undo()
    monkeypatch.setattr(lines, "ops", lambda root: ["softmax", "matmul"])
    monkeypatch.setattr(lines.registry.backends()["pallas"], "families", ())  # nothing of it can be imported
    assert (lines.lines(kept), lines.written(kept)) == (shown, written)


def test_lines_of_code():
    source = (
        '"""Module."""\n\nimport x  # why\n\n\ndef f():\n    """Doc\n    of two lines."""\n    # a comment\n    '
        'return """a\n    b"""\n'
    )
    assert lines.code_lines(source) == 4
    text = Path(lines.__file__).read_text()
    with tokenize.open(lines.__file__) as f:
        assert 40 < lines.code_lines(text) < len(f.read().splitlines())


def test_the_newest_of_several_runs_is_shown(tree):
    more = launched({**CALL, "median_us": 30.0}, {**CALL, "op": "matmul"}, date="2026-02-01")
    keep(tree, "launch-2.json", more)
    shown = {row["op"]: (row["median_us"], r.name) for row, r in StoredResults.load(tree).rows("launch")}
    assert shown == {"softmax": (40.0, "launch-h100.json"), "matmul": (40.0, "launch-2.json")}


def test_a_plot_of_times_shows_one_device():
    """A bar or a curve of two devices compares what nobody measured."""
    faster = [{**r, "median_us": r["median_us"] / 3, "flop_rate": 10**15, "ratio": 9.0} for r in BENCH[:2]]
    found = bench_plots._figures({"another GPU": faster, DEVICE: BENCH})
    assert [b["ratio"] for b in found["speed.svg"]["bars"]] == [0.5, 1.5]
    (panel,) = found["attention-rate.svg"]["panels"].values()
    assert panel["triton"] == [[1024, 600 * 10**12], [2048, 600 * 10**12]]
    assert all(DEVICE in found[name]["title"] for name in ("speed.svg", "attention-rate.svg", "attention-memory.svg"))


def test_a_figure_for_strangers_shows_one_device(tree):
    data = plots.glance({"a GPU": BENCH[:2], DEVICE: BENCH})
    assert data["title"] == DEVICE and [p["x"] for p in data["speeds"]] == [0.5, 1.5]
    assert sorted(p["x"] for p in data["errors"] if not p["subject"]) == [0.25, 0.25, 2.74]
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install -e '.[demo]'")
    drawn = plots.drawn(data)
    assert f">Measured on {DEVICE}<" in drawn and ">attention<" in drawn and "portakern, bf16" in drawn
    assert "glance.svg" not in plots.plots(dataclasses.replace(StoredResults.load(tree), results=()))


def test_what_a_plot_says_is_not_rounded():
    """Coordinates are; the figures that a reader reads are not."""
    assert bench_plots._shortened('<path d="M 1.23456 -0.0004"/><text x="0.001">0.001, 12.3456</text>') == (
        '<path d="M 1.23 -0"/><text x="0">0.001, 12.3456</text>'
    )


def test_calls_are_short_where_their_op_and_dtype_stand_beside_them():
    call = "attention(bfloat16; batch=4, q_len=64, kv_heads=4, kv_len=64, is_causal=True); q swapped"
    assert bench_plots.call_without_op(call) == "batch=4, q_len=64, kv_heads=4, kv_len=64, causal; q swapped"


# -------------------------------------------------------------------------------------------------------------- judges
def judged(name, right=False, kind="", group="cheats", **verdicts):
    """A subject under rules: a text is why it was rejected, True and False whether what passed was to be seen."""
    sorts = {
        "rejected": {k: v for k, v in verdicts.items() if isinstance(v, str)},
        "passed": {k: v for k, v in verdicts.items() if isinstance(v, bool)},
        "silent": {k: "" for k, v in verdicts.items() if v is None},
    }
    return {
        "group": group, "name": name, "op": "softmax", "framework": "torch", "right": right, "kind": kind, **sorts,
        "seconds": dict.fromkeys(verdicts, 0.5), "sources": "0123abcd",
    }  # fmt: skip


def a_rule(name, **changes):
    where = [{"repository": "theirs/harness", "path": "eval.py", "at": "0123456789abcdef"}]
    return {
        "name": name, "title": name.title(), "rule": "a tolerance", "inputs": "random", "gradients": False,
        "sources": where, "own": ["softmax"], "cut": ["23_Softmax: rows"], **changes,
    }  # fmt: skip


def test_the_table_of_judges_counts_what_was_judged(tree):
    rows = [
        judged("softmax: zeros", kind="zeros", ours="bounds", theirs=True, filtered=None),
        judged("matmul: zeros", kind="zeros", ours="bounds", theirs="far", filtered=None),
        judged("softmax: a fault", group="functions", ours="bounds", theirs=False, filtered="far"),
        judged("softmax: right", right=True, group="unusual", ours=False, theirs="far", filtered=None),
    ]
    rules = [a_rule("ours"), a_rule("theirs"), a_rule("filtered", cut=[], own=[])]
    run = run_of("judges", rows, "host CPU", tasks="12 of 14", wall_seconds=1, rules=rules, sources={})
    keep(tree, "judges.json", run)
    text = judges.judges(StoredResults.load(tree))
    assert "| Ours | 2 of 2 | 1 of 1 | – | – | – | 0 of 1 | 0.50 |" in text
    assert "| Theirs | 1 of 2 | 0 of 1 | – | – | 1 of 2 | 1 of 1 | 0.50 |" in text
    assert "| Filtered | – | 1 of 1 | – | – | 0 of 0 | – | 0.50 |" in text
    assert "| zeros | 0 of 2 | 1 of 2 | – |" in text
    assert "| softmax: right | Theirs |" in text
    assert "theirs/harness, eval.py, 0123456789ab" in text and "12 of 14 verdicts" in text


def test_without_a_run_of_judges_the_page_says_so(tree):
    assert "Not run yet" in judges.judges(StoredResults.load(tree))


def test_results_that_a_new_name_made_stale_are_given_todays_hash(tree, tmp_path, monkeypatch, capsys):
    """Those that were current before it, and no others; under the variant's new name too."""
    now = {"softmax": "a" * 16, "matmul": "b" * 16}
    monkeypatch.setattr(sources, "fingerprint", lambda op, backend, variant, target, root: now[op])
    rows = [
        bench("triton", 100.0, op="softmax", variant="old", sources="a" * 16) | {"contender": "triton/old"},
        bench("triton", 100.0, op="matmul", sources="0" * 16),
    ]
    run = run_of("bench", rows, wall_seconds=9, rates={}, not_timed={}, left_out=[])
    keep(tree, "bench.json", run)

    def rehashed(*arguments):
        monkeypatch.setattr("sys.argv", ["rehash", str(tmp_path / "current.json"), *arguments])
        monkeypatch.setattr(rehash, "checkout", lambda: tree)
        assert rehash.main() == 0
        return capsys.readouterr().out

    assert rehashed() == "1 of 2 rows are current\n"
    now["softmax"] = "c" * 16
    assert rehashed("--write", "--variant", "old=new") == "1 rows have today's hash\n"
    found = {r["op"]: (r["contender"], r["variant"], r["sources"]) for r, _ in StoredResults.load(tree).rows("bench")}
    assert found == {"softmax": ("triton/new", "new", "c" * 16), "matmul": ("triton", None, "0" * 16)}
