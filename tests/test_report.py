"""`portakern report`: tables and plots follow the results, --check tells what does not, --add takes in what is fit for
it.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tokenize
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from portakern.cli import app
from portakern.core import targets
from portakern.reporting import checkout, lines, markdown, plots, roofline, speed, verdict
from portakern.reporting.kept import Kept, chip
from portakern.results import ResultError

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "NVIDIA H100 80GB HBM3"
TIME = {
    "op": "softmax", "dtype": "bfloat16", "call": "softmax(bfloat16; n=4096)", "tiling": {"block_n": 4096}, "us": 40.0,
    "bytes": 67108864, "flops": 83886080, "floor_us": 20.0, "peers": {"torch": 50.0}, "checked": True,
}  # fmt: skip


ABSENT = {"quack": "quack not installed; run: pip install quack-kernels"}


def timed(contender, us, q_len=1024, **changes):
    """A row of `portakern bench`: attention, by a backend of ours or by a peer."""
    subject, call = contender == "triton", f"attention(bfloat16; batch=2, q_len={q_len}, is_causal=True); with bias"
    times = {
        "median_us": us, "best_us": us - 1, "worst_us": us + 2, "host_us": 30.0, "rounds": 20, "clock": "events",
        "flop_rate": 600 * 10**12, "byte_rate": 10**11, "roof_us": us / 2, "limit": "bfloat16", "share": 0.5,
        "peak_bytes": 4096 * q_len,
    }  # fmt: skip
    return {
        "suite": "attention", "op": "attention", "dtype": "bfloat16", "call": call,
        "dims": {"batch": 2, "q_len": q_len}, "contender": contender, "backend": contender, "variant": None,
        "subject": subject, "target": "cuda sm_90",
        "bytes": 10**6, "flops": 10**9, "verdict": "right", "why": None, "error": 0.25, "errors": {"o": 0.25},
        "commit": "0" * 12, "sources": None, **times, **changes,
    }  # fmt: skip


NO_TIME = dict.fromkeys(timed("torch", 1.0).keys() & {"median_us", "best_us", "worst_us", "host_us", "share", "ratio"})
BENCH = [
    timed("triton", 100.0, best_peer="torch", ratio=0.5, sources="f" * 16),
    timed("torch", 50.0, best_peer="torch", ratio=1.0),
    timed("jax", 0.0, **NO_TIME, verdict="wrong", error=2.74),
    timed("liger", 0.0, **NO_TIME, verdict="refused", error=None, why="it has no attention"),
    timed("triton", 300.0, 2048, best_peer="torch", ratio=1.5),
    timed("torch", 450.0, 2048, best_peer="torch", ratio=1.0),
]


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
        built("matmul", "v5e", on_chip={"vmem": 2**20}, cycles=2000),
    ]
    kept = root / "benchmarks" / "results"
    put(
        kept,
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
    put(kept, "times-h100.json", run_of("times", [TIME]))
    put(kept, "bench.json", run_of("bench", BENCH, wall_seconds=9, rates={"copy": 3e12}, absent=ABSENT, left_out=[]))
    marks = "".join(
        f"## {name}\n\n<!-- portakern report: {name} -->\n<!-- end: {name} -->\n\n"
        for name in checkout.TABLES
        if name != "verdict"
    )
    mark = "<!-- portakern report: verdict -->\n<!-- end: verdict -->\n"
    (root / "PORTING.md").write_text(f"# Title\n\n{mark}")
    (root / "RESULTS.md").write_text("# Title\n\n" + marks + "The end.\n")
    (root / "README.md").write_text("No marks here.\n")
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
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'portakern[demo]'")
    for path, text in drawn.items():
        put_text(tree / path, text)
    checkout.update(tree)
    drawn.update({p.relative_to(tree): p.read_text() for p in (tree / checkout.PLOTS).iterdir()})
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
    assert [f"{s.path.relative_to(ROOT)}: {s.what}" for s in checkout.stale(ROOT)] == [], f"run: {checkout.COMMAND}"


def test_every_table_has_its_place_in_this_checkout():
    there = {
        name
        for page in checkout.PAGES
        for name in markdown.pieces((ROOT / page).read_text(encoding="utf-8"), ROOT / page)
    }
    assert there == set(checkout.TABLES)


# -------------------------------------------------------------------------------------------------- making and checking
def test_tables_show_the_results(fresh):
    pieces = markdown.pieces((fresh / "RESULTS.md").read_text(), fresh / "RESULTS.md")
    assert "| `softmax` | bfloat16 | triton | ok | ok | – |" in pieces["matrix"]
    assert (
        "| `matmul` | bfloat16 | triton | **no** (1) | – | ok |\n" in pieces["matrix"]
        and "1. takes | too much" in pieces["matrix"]
    )
    assert "3 of 4 typical calls compile and fit." in pieces["matrix"]
    assert "| `softmax` | bfloat16 | sm_90 | 1 | 30 | 0 | shared 32 B (50%) | 50% | none |" in pieces["resources"]
    assert "| sm_90 | H100 SXM5 80 GB | 1 of 2 | 0 | 0 | 50% | 50% |" in pieces["resources"]
    assert "| `softmax` | bfloat16 | triton | sm_90, gfx942 | `block_n=4096` |" in pieces["tilings"]
    assert "| `matmul` | bfloat16 | 2 |" in pieces["cycles"]
    assert (
        f"**{DEVICE}**" in pieces["times"]
        and "| `softmax` | bfloat16 | n=4096 | torch 50 | 40 | 20 | 50% |" in pieces["times"]
    )
    assert pieces["errors"].startswith("No conformance run is kept yet") and pieces["launch"].startswith(
        "Nothing was measured yet"
    )
    fast = pieces["speed"]
    assert "| `attention` | 2 | 1.00 | 0.50 | 1.50 | 50% | 0 |" in fast
    call = "| bfloat16 | batch=2, q_len=1024, causal; with bias | triton | torch 50, jax wrong, 2.74 × its bound |"
    assert f"{call} 100† | 99, 102 | 30 | 600 TFLOP/s | 50% | 0.50 | 0.25 |" in fast
    assert "† its sources have changed since it was measured (1 in all)." in fast and "liger" not in fast
    assert "Took no part: quack (quack not installed)." in fast
    assert "| sm_90 | H100 SXM5 80 GB | 3,350 |" in pieces["roofs"]
    told = markdown.pieces((fresh / "PORTING.md").read_text(), fresh / "PORTING.md")["verdict"]
    (line,) = (line for line in told.splitlines() if line.startswith("| `attention` |"))
    assert line.endswith(" | 1.00 (0.50 to 1.50)† | – | not run |") and "† the sources of what was" in told
    assert " | not timed | – | not run |" in told.partition("| `softmax` |")[2].partition("\n")[0]
    assert "| `softmax` | " in pieces["lines"] and (fresh / "README.md").read_text() == "No marks here.\n"
    for plot in (fresh / "docs" / "plots").iterdir():
        assert (
            ElementTree.parse(plot).getroot().tag.endswith("svg") and "Verdana, Arial, sans-serif" in plot.read_text()
        )
    assert [p.name for p in sorted((fresh / "docs" / "plots").iterdir())] == [
        "attention-memory.svg",
        "attention-rate.svg",
        "errors.svg",
        "heatmap.svg",
        "roofline-sm_90.svg",
        "speed.svg",
    ]


def test_two_generations_have_the_same_bytes(fresh):
    before = content(fresh)
    assert checkout.stale(fresh) == [] and checkout.update(fresh) == []
    for path in (fresh / "docs" / "plots").iterdir():
        path.unlink()
    (fresh / "RESULTS.md").write_text((fresh / "RESULTS.md").read_text().replace("| `softmax` |", "| `hardmax` |"))
    assert len(checkout.update(fresh)) == 7
    assert content(fresh) == before


def test_what_was_changed_by_hand_is_named(fresh):
    page, plot = fresh / "RESULTS.md", fresh / "docs" / "plots" / "roofline-sm_90.svg"
    assert report(fresh, "--check").exit_code == 0
    page.write_text(page.read_text().replace("| 40 | 20 |", "| 30 | 20 |").replace("The end.", "The prose may change."))
    plot.write_text(plot.read_text().replace("H100", "H200"))
    (fresh / "docs" / "plots" / "heatmap.svg").unlink()
    before = content(fresh)
    said = report(fresh, "--check")
    assert said.exit_code == 1 and content(fresh) == before
    assert said.output.splitlines() == [
        "RESULTS.md: table 'times' is stale or was changed by hand; run: portakern report",
        "docs/plots/heatmap.svg: is missing; run: portakern report",
        "docs/plots/roofline-sm_90.svg: was changed by hand; run: portakern report",
    ]
    mended = report(fresh)
    assert mended.exit_code == 0 and mended.output.splitlines() == [
        "wrote RESULTS.md",
        "wrote docs/plots/heatmap.svg",
        "wrote docs/plots/roofline-sm_90.svg",
    ]
    assert report(fresh, "--check").exit_code == 0 and "The prose may change." in page.read_text()


def test_results_that_change_make_tables_and_plots_stale(fresh):
    file = fresh / "benchmarks" / "results" / "compile-matrix.json"
    data = json.loads(file.read_text())
    data["rows"] = [built(target="sm_90", spills=8)]
    file.write_text(json.dumps(data))
    (fresh / "benchmarks" / "results" / "bench.json").unlink()
    gone = "shows what is no longer among the results"
    assert {
        s.what.removesuffix(" is stale or was changed by hand") for s in checkout.stale(fresh) if s.path.suffix == ".md"
    } == {f"table {name!r}" for name in ("verdict", "matrix", "resources", "tilings", "cycles", "speed")}
    assert {s.path.name: s.what for s in checkout.stale(fresh) if s.path.suffix == ".svg"} == {
        "heatmap.svg": "is stale",
        "roofline-sm_90.svg": "is stale",  # bench had measured more
        **dict.fromkeys(("attention-memory.svg", "attention-rate.svg", "errors.svg", "speed.svg"), gone),
    }
    checkout.update(fresh)
    assert sorted(p.name for p in (fresh / "docs" / "plots").iterdir()) == [
        "heatmap.svg",
        "roofline-sm_90.svg",
    ] and not checkout.stale(fresh)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (
            "<!-- portakern report: matrix -->\n",
            "RESULTS.md, line 1: <!-- portakern report: matrix --> has no end; expected <!-- end: matrix --> below it",
        ),
        ("a\n<!-- end: matrix -->\n", "RESULTS.md, line 2: <!-- end: matrix --> ends nothing; no mark is open there"),
        (
            "<!-- portakern report: matrix -->\n<!-- end: times -->\n",
            "RESULTS.md, line 2: <!-- end: times --> ends nothing; expected <!-- end: matrix -->",
        ),
        (
            "<!-- portakern report: matrix -->\n<!-- portakern report: times -->\n",
            (
                "RESULTS.md, line 2: <!-- portakern report: times --> stands inside 'matrix'; expected <!-- end: "
                "matrix --> before it"
            ),
        ),
        (
            "<!-- portakern report: haste -->\n<!-- end: haste -->\n",
            "RESULTS.md: there is no table 'haste'; expected one of verdict, matrix, ",
        ),
    ],
)
def test_marks_that_do_not_pair(tree, page, message):
    (tree / "RESULTS.md").write_text(page)
    for command in (checkout.stale, checkout.update):
        with pytest.raises(ResultError) as e:
            command(tree)
        assert str(e.value).startswith(message)
    assert (tree / "RESULTS.md").read_text() == page and not (tree / "docs").exists()


def test_elsewhere_than_in_a_checkout(tmp_path):
    said = report(tmp_path)
    assert isinstance(said.exception, ResultError)
    assert str(said.exception) == (
        f"portakern report works on a checkout of portakern, and {tmp_path} has no PORTING.md; clone the "
        "repository and run: pip install -e ."
    )


def test_without_matplotlib_nothing_is_half_done(tree, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    before = content(tree)
    said = report(tree)
    assert (
        str(said.exception) == "the plots of portakern report need matplotlib; run: pip install 'portakern[plots]'"
        and content(tree) == before
    )
    assert report(tree, "--check").exit_code == 1  # checking draws nothing


# --------------------------------------------------------------------------------------------------------------- adding
def test_a_new_run_is_taken_in(fresh, tmp_path):
    rows = [{"op": "softmax", "way": "op", "median_us": 7.0, "best_us": 6.5, "worst_us": 9.0}]
    said = report(fresh, "--add", put(tmp_path, "Launch H100.json", run_of("launch", rows, graphs=[])))
    assert said.exit_code == 0, said.output
    assert said.output.splitlines() == [f"launch-h100.json is new: launch on {DEVICE}, 1 row", "wrote RESULTS.md"]
    assert "| `softmax` | 7.0 |" in (fresh / "RESULTS.md").read_text() and checkout.stale(fresh) == []


def test_a_newer_run_replaces(fresh, tmp_path):
    file = put(tmp_path, "other.json", run_of("times", [{**TIME, "us": 25.0}], date="2026-03-02"))
    said = report(fresh, "--add", file)
    assert (
        said.output.splitlines()[0]
        == f"times-h100.json is replaced: times on {DEVICE} of 2026-03-01, 1 row, by that of 2026-03-02, 1 row"
    )
    assert "| torch 50 | 25 | 20 | 80% |" in (fresh / "RESULTS.md").read_text() and checkout.stale(fresh) == []
    assert sorted(p.name for p in (fresh / "benchmarks" / "results").iterdir()) == [
        "bench.json",
        "compile-matrix.json",
        "times-h100.json",
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (run_of("times", []), "'rows' is empty; expected a row for each thing measured"),
        (run_of("times", [{**TIME, "gbps": 3}]), "'rows[0].gbps' is unknown; expected op, dtype, call"),
        (run_of("times", [TIME], note=""), "'note' is unknown; expected wall_seconds"),
        (
            run_of("times", [TIME]),
            (
                "its date is 2026-03-01, and benchmarks/results/times-h100.json holds times on NVIDIA H100 80GB "
                "HBM3 of 2026-03-01; expected a later one"
            ),
        ),
        (
            run_of("compile-matrix", [built()], "host CPU", "2027-01-01", wall_seconds=1, ok=1, of=1, limits={}),
            (
                "it lacks 3 of the 4 rows of benchmarks/results/compile-matrix.json, such as matmul, bfloat16, "
                "sm_90, triton; expected the whole run"
            ),
        ),
        (
            run_of("times", [TIME], "NVIDIA B200"),
            (
                "benchmarks/results/times-h100.json is another run's: times on NVIDIA H100 80GB HBM3; give the "
                "file another name"
            ),
        ),
    ],
)
def test_a_bad_file_is_refused_and_changes_nothing(fresh, tmp_path, data, message):
    before, file = content(fresh), put(tmp_path, "times-h100.json", data)
    said = report(fresh, "--add", file)
    assert isinstance(said.exception, ResultError) and str(said.exception).startswith(f"{file}: {message}"), (
        said.exception
    )
    assert content(fresh) == before


def test_replace_takes_it_all_the_same(fresh, tmp_path):
    file = put(
        tmp_path, "times.json", run_of("times", [{**TIME, "call": "softmax(bfloat16; n=2)"}, {**TIME, "us": 30.0}])
    )
    assert report(fresh, "--add", file, "--replace").output.splitlines()[0].startswith("times-h100.json is replaced: ")
    assert "| 30 | 20 |" in (fresh / "RESULTS.md").read_text()
    assert (
        str(report(fresh, "--add", file, "--check").exception)
        == "report: --check writes nothing, and --add does; give one of them"
    )


# ------------------------------------------------------------------------------------------------------ what is counted
def test_the_verdict_tells_of_failures_and_of_16_bits_apart(tree):
    """The worst output of an op counts; a wrong call hides no speed behind it; float32 has a column of its own."""
    results = tree / "benchmarks" / "results"
    fine = timed("triton", 80.0, 4096, dtype="float32", error=0.125, best_peer="torch", ratio=1.25)
    wrong = {**timed("triton", 0.0, op="softmax"), **NO_TIME, "verdict": "wrong", "error": 7.0}
    rest = {"wall_seconds": 9, "rates": {"copy": 3e12}, "absent": {}, "left_out": []}
    put(results, "bench.json", run_of("bench", [fine, wrong], **rest))
    kept = Kept.of(tree)
    checked = {"op": "attention", "subject": "triton", "worst": {"o": 0.5, "lse": 2.5}, "passed": False}
    run = dataclasses.replace(kept.results[0], benchmark="conformance", device=DEVICE, rows=(checked,))
    told = verdict.verdict(dataclasses.replace(kept, results=(*kept.results, run)))
    assert " | 1.25 | 0.12 | **failed**, 2.500 | not run |" in told.partition("| `attention` |")[2].partition("\n")[0]
    assert " | **wrong** | – | not run | not run |" in told.partition("| `softmax` |")[2].partition("\n")[0]


def test_lines_that_a_port_has_alone(tmp_path, monkeypatch):
    """A line in another port's module, in the same order, is not the port's own; the oracle is no port."""
    for name, text in (("a", "x = 1\ny = 2\nz = 3\n"), ("b", "y = 2\nw = 4\nz = 3\n"), ("oracle", "w = 4\n")):
        put_text(tmp_path / "portakern" / "backends" / name / "some.py", text)
    put_text(tmp_path / "portakern" / "specs" / "some.py", "")

    class Family:
        def __init__(self, name, compiler):
            self.package, self.compiler = f"portakern.backends.{name}", compiler

    class Backend:
        auto, families = True, (Family("a", "x"), Family("b", "x"), Family("oracle", None))

    monkeypatch.setattr(lines.registry, "ops", lambda: ("some",))
    monkeypatch.setattr(lines.registry, "backends", lambda: {"any": Backend})
    assert lines.written(Kept(tmp_path, ())) == {"some": {"a": (3, 1), "b": (3, 1)}}


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
    put(
        tree / "benchmarks" / "results",
        "times-2.json",
        run_of("times", [{**TIME, "us": 30.0}, {**TIME, "dtype": "float32"}], date="2026-04-01"),
    )
    shown = {row["dtype"]: (row["us"], r.file.name) for row, r in Kept.of(tree).rows("times")}
    assert shown == {"bfloat16": (30.0, "times-2.json"), "float32": (40.0, "times-2.json")}


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (DEVICE, "sm_90"),
        ("NVIDIA A100-SXM4-80GB", "sm_80"),
        ("NVIDIA GeForce RTX 5090", "sm_120"),
        ("AMD Instinct MI300X", "gfx942"),
        ("host CPU", None),
        ("a GPU", None),
    ],
)
def test_chips_are_known_by_their_makers_names(device, name):
    assert chip(device) == name


def test_where_an_op_lies_under_the_roof(tree):
    data = roofline.roofline(Kept.of(tree), targets.find("sm_90"))
    (point,), h = data["points"], targets.find("sm_90")
    assert (
        point["intensity"] == 5 * 4096**2 / (2 * 2 * 4096**2)
        and point["by_memory"]
        and point["bound"] == pytest.approx(1.25 * h.bandwidth)
    )
    assert point["share"] == pytest.approx(83886080 / 40e-6 / point["bound"])
    assert len(data["measured"]) == 2  # and of bench's two calls, which are one work, one point
    other = roofline.roofline(Kept.of(tree), targets.find("v5e"))
    assert not other["measured"] and other["points"][0]["op"] == "matmul" and not other["points"][0]["by_memory"]


def test_what_was_tuned_is_drawn():
    rows = [
        {"op": "matmul", "target": "sm_90", "dtype": "bfloat16", "default": 10.0 + i, "best": 10.0} for i in range(3)
    ]
    data = speed._figures([], rows)
    assert list(data) == ["tuned.svg"] and len(data["tuned.svg"]["points"]) == 3
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'portakern[demo]'")
    assert "sm_90, 3 calls" in plots.draw(data["tuned.svg"])


def test_calls_are_short_where_their_op_and_dtype_stand_beside_them():
    call = "attention(bfloat16; batch=4, q_len=64, kv_heads=4, kv_len=64, is_causal=True); q swapped"
    assert speed._short(call) == "batch=4, q_len=64, kv_heads=4, kv_len=64, causal; q swapped"
