"""The command line: readable tables, JSON, exit statuses."""

import contextlib
import dataclasses
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import portakern as pk
from portakern import inventory, results, sources, testing
from portakern.cli import app, main
from portakern.core import observe as watching
from portakern.core import plan, registry, tilings
from portakern.core.backend import Backend
from portakern.core.machine_code import Kernel
from portakern.core.oracle import as_float64
from portakern.core.targets import Target
from portakern.files import write_atomically
from portakern.testing import parallel, runner
from portakern.tools.compile import cache
from portakern.tools.compile import matrix as compiling
from portakern.tools.compile.build import Build

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
    (report,) = results.read(file).rows
    assert report["op"] == "softmax" and report["passed"] and report["examples"] == 15 and report["seed"] == 3
    oracle = registry.oracle_backend()
    assert report["sources"] == sources.fingerprint("softmax", oracle, None, Target("cpu"))
    assert (report["backend"], report["target"], report["commit"]) == ("reference", "cpu", sources.commit())
    assert [p.name for p in file.parent.iterdir()] == ["report.json"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_check_begins_no_case_after_its_budget(jobs):
    ops = list(pk.ops())[:2]
    subjects = [(op, "reference", None) for op in ops]
    reports = testing.check_all(subjects, jobs, lambda subject, cases: None, seconds=0.0, max_examples=20)
    assert [(r.op, r.examples, r.left_out, r.passed) for r in reports] == [(op, 0, 20, False) for op in ops]


def test_a_check_with_a_budget_begins_edges_and_free_cases_by_turns():
    last = parallel.SHARDS - 1
    assert parallel._order(time.time())[:4] == [0, last, 1, last - 1]
    assert parallel._order(None)[:2] == [last, last - 1]
    assert {*parallel._order(0.0)} == {*parallel._order(None)} == {*range(parallel.SHARDS)}


def test_checks_one_after_the_other_share_a_budget(monkeypatch):
    clock, given = iter([0.0, 0.0, 20.0, 60.0]), []
    monkeypatch.setattr(parallel.time, "time", lambda: next(clock))
    monkeypatch.setattr(parallel, "check_subject", lambda subject, asked: given.append(asked.until))
    subjects = [(op, "reference", None) for op in [*pk.ops()][:3]]
    parallel.check_all(subjects, 1, lambda *_: None, seconds=90.0)
    assert given == [30.0, 55.0, 90.0]


def test_check_says_what_its_budget_left_out(monkeypatch):
    monkeypatch.setattr(runner._CheckRun, "over", property(lambda self: self.until < float("inf")))
    asked = ["check", "softmax", "--backend", "reference", "--max-examples", "20"]
    found = run(app, [*asked, "--budget", "5"])
    assert found.exit_code == 1 and "20 cases of softmax on reference" in found.output
    found = run(app, asked)
    assert found.exit_code == 0 and "budget" not in found.output


def interrupt(within_a_lock: bool) -> None:
    """As a signal does, also one that comes while a lock is waited for, which is let go without having been had."""
    if not within_a_lock:
        raise KeyboardInterrupt
    lock = threading.Lock()
    with lock:
        lock.release()
        raise KeyboardInterrupt


@pytest.mark.parametrize(("jobs", "within_a_lock"), [(1, False), (2, False), (2, True)])
def test_a_check_that_is_ended_keeps_what_it_found(jobs, within_a_lock, tmp_path, monkeypatch):
    """What it did not come to is named, laws too, of which a budget leaves out none."""
    seen, file, check_all = [], tmp_path / "report.json", testing.check_all

    def until(subjects, jobs, advance, budget, **asked):
        def told(subject, cases):
            seen.append(cases)
            if sum(seen) >= 20:
                interrupt(within_a_lock)

        return check_all(subjects, jobs, told, budget, **asked)

    monkeypatch.setattr(testing, "check_all", until)
    ops = [op for op in pk.ops() if registry.find_spec(op).laws][:2]
    asked = ["check", *ops, "--backend", "reference", "--jobs", f"{jobs}", "--max-examples", "60"]
    found = run(app, [*asked, "--json", str(file)])
    assert found.exit_code == 130 and "the check was interrupted" in found.output
    reports = results.read(file).rows
    done = [r["examples"] + sum(r["refused"].values()) for r in reports]
    assert 0 < sum(done) < 120 and [d + r["left_out"] for d, r in zip(done, reports, strict=True)] == [60, 60]
    assert all(r["outcome"] in ("unfinished", "not run") and not r["passed"] for r in reports)
    assert "FAILED" not in found.output
    laws = {f"law {name}" for name in registry.find_spec(ops[1]).laws}
    assert laws <= {*reports[1]["not_reached"]} | {f"law {name}" for name in reports[1]["laws"]}


def test_check_asks_for_what_it_is_told_to(tmp_path, monkeypatch):
    """Of a kernel that leaves the last bit to chance, which breaks a promise and no bound; in one dtype."""
    backend = pk.backends()["reference"]
    seen, family, coin = [], next(backend.families_with("softmax")), random.Random(0)
    impl = backend.implementation("softmax", family)

    def counting(call, tiling):
        seen.append(call.dtype)
        (y,) = impl.fn(call, tiling)
        if y.size and coin.random() < 0.5:
            y.flat[0] = np.nextafter(y.flat[0], np.float64(2))
        return (y,)

    monkeypatch.setitem(backend._found, (family.package, "softmax"), dataclasses.replace(impl, fn=counting))
    file = tmp_path / "report.json"
    asked = ["check", "softmax", "--backend", "reference", "--max-examples", "6", "--dtype", "float64"]
    told = run(app, [*asked, "--json", str(file)])
    assert told.exit_code == 1 and "promises" in told.output and {*seen} == {"float64"}
    assert run(app, [*asked, "--no-promises", "--json", str(file)]).exit_code == 0
    (report,) = results.read(file).rows
    assert report["passed"] and "promises" not in report["checked"]


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


def test_check_leaves_out_what_a_backend_lacks_on_a_device(monkeypatch):
    """As Pallas lacks ops on Hopper that it has on TPUs, and says so; a pair that is named must be there."""
    variants, (there, lacking) = testing.backend_variants, pk.ops()[:2]

    def on_a_gpu(spec, backend, *where):
        if spec.name == lacking:
            raise pk.UnsupportedError(f"backend {backend!r} has no {spec.name} on a GPU")
        return variants(spec, backend, *where)

    monkeypatch.setattr(testing, "backend_variants", on_a_gpu)
    monkeypatch.setattr(registry, "loadable", lambda: (there, lacking))
    result = run(app, ["check", "--backend", "reference", "--max-examples", "3"])
    assert result.exit_code == 0, result.output
    assert f"not checked: backend 'reference' has no {lacking} on a GPU" in result.output and "passed" in result.output
    named = run(app, ["check", lacking, there, "--backend", "reference"])
    assert named.exit_code and f"has no {lacking} on a GPU" in str(named.exception)
    monkeypatch.setattr(registry, "loadable", lambda: (lacking,))
    nothing = run(app, ["check", "--backend", "reference"])
    assert nothing.exit_code and f"has no {lacking} on a GPU" in str(nothing.exception)


def test_check_fails_with_a_line_that_reproduces(monkeypatch):
    from portakern.backends.reference import BACKEND

    impl = BACKEND.implementation("softmax", BACKEND.families[0])

    def off_by_a_percent(call):
        return (np.float32(1.01) * impl.fn(as_float64(call), {})[0].astype(np.float32),)

    monkeypatch.setattr(plan, "rounded_oracle", off_by_a_percent)
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


def test_files_are_written_whole_and_in_utf_8(tmp_path):
    """Whatever the locale is, and by every part of the package."""
    write = "from portakern.files import write_atomically as write"
    code = f"import sys; from pathlib import Path; {write}; write(Path(sys.argv[1]), chr(0x2020))"
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    file = tmp_path / "file"
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, env={**os.environ, **plain})
    assert file.read_text(encoding="utf-8") == chr(0x2020)
    package = Path(results.__file__).parent
    wrong = [path for path in package.rglob("*.py") if re.search(r"\.write_(text|bytes)\(", path.read_text("utf-8"))]
    assert not wrong


def test_doctor_says_that_triton_has_no_wheel_elsewhere(monkeypatch):
    inventory.devices()  # libraries that are loaded while the system's name is another look for that one's files
    monkeypatch.setattr(inventory.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(Backend, "unavailable", lambda self: "triton not installed" if self.name == "triton" else None)
    rows = {b["backend"]: b for b in inventory.doctor()["backends"]}
    assert "no wheel for Darwin" in rows["triton"]["next_step"]
    assert pk.backends()


CASE = '{"dtype":"float32","shapes":{"x":[3]}'
CHECK = ["check", "softmax", "--backend", "reference"]
BAD_INPUT = {
    "a seed": ([*CHECK, "--seed", "-5"], "Invalid value for '--seed'"),
    "no JSON": ([*CHECK, "--case", "{bad"], "softmax: the case '{bad' is not JSON: "),
    "nested JSON": ([*CHECK, "--case", "[" * 100_000], "is not JSON: "),
    "a list": ([*CHECK, "--case", "[]"], "the case is []; expected the JSON object that a failure printed"),
    "a law": (
        [*CHECK, "--case", '{"law":"nope","dtype":"float32","seed":1}'],
        "the case's law is 'nope'; expected one of shift_invariant",
    ),
    "a law's seed": (
        [*CHECK, "--case", '{"law":"shift_invariant","dtype":"float32","seed":-1}'],
        "the case's seed is -1; expected a whole number >= 0",
    ),
    "a field": ([*CHECK, "--case", CASE + ',"nope":1}'], "the case has 'nope'; expected names among dtype, shapes"),
    "no shapes": ([*CHECK, "--case", '{"dtype":"float32"}'], "the case has no 'shapes'"),
    "a dtype": ([*CHECK, "--case", CASE.replace("float32", "fp32") + "}"], "the case's dtype is 'fp32'; expected one"),
    "a shape": (
        [*CHECK, "--case", CASE.replace("[3]", '["a"]') + "}"],
        "the case's shapes['x'] is ['a']; expected a list",
    ),
    "an array": (
        [*CHECK, "--case", CASE.replace('"x"', '"y"') + "}"],
        "the case's shapes has 'y'; expected names among x",
    ),
    "a layout": (
        [*CHECK, "--case", CASE + ',"layouts":{"x":"odd"}}'],
        "the case's layouts['x'] is 'odd'; expected one of",
    ),
    "an option": ([*CHECK, "--case", CASE + ',"options":{"axis":7}}'], "softmax: axis is 7; expected an integer from"),
    "an edge of a case": ([*CHECK, "--case", CASE + ',"edge":"odd"}'], "the case's edge is 'odd'; expected one of"),
    "a regime": ([*CHECK, "--case", CASE + ',"regime":[1]}'], "the case's regime is [1]; expected one of normal"),
    "tiles": (
        [*CHECK, "--case", CASE + ',"tiling":{"block_n":"a"}}'],
        "the case's tiling is {'block_n': 'a'}; expected",
    ),
    "a tile": (
        [*CHECK, "--case", CASE + ',"tiling":{"nope":1}}'],
        "the case's tiling has 'nope'; expected names among",
    ),
    "arrays that are one": (
        [*CHECK, "--case", CASE + ',"aliased":["x","y"]}'],
        "the case's aliased is ['x', 'y']; expected a",
    ),
    "too many cases": ([*CHECK, "--max-examples", "9" * 20], "check: max_examples is 99999999999999999999; expected a"),
    "no file": ([*CHECK, "--json", "/dev/null/x/y"], "check: --json is /dev/null/x/y, which cannot be written: "),
    "a folder": ([*CHECK, "--json", "/"], "check: --json is /, which cannot be written: it is a folder"),
    "one dtype of two": (
        [*CHECK, "--dtype", "float32", "--dtype", "fp16"],
        "check: --dtype is 'fp16'; expected one of",
    ),
    "an edge": ([*CHECK, "--edge", "odd"], "edge 'odd' is unknown; expected one of"),
    "a dtype to compile": (
        ["compile", "softmax", "--target", "sm_90", "--dtype", "fp16"],
        "compile: --dtype is 'fp16'",
    ),
    "an op to compile": (["compile", "conv", "--target", "sm_90"], "op 'conv' is unknown"),
    "results": (["report", "--add", "/nowhere.json"], "/nowhere.json: cannot be read: No such file"),
}


def test_another_ops_knob_is_refused_where_every_kernel_of_the_op_is_known(monkeypatch):
    triton = registry.backend("triton")
    if any(f.missing_packages() for f in triton.declared) or triton.unavailable():
        pytest.skip(triton.unavailable() or "a variant of triton cannot be imported here")
    known = {"reference": registry.backend("reference"), "triton": triton}
    monkeypatch.setattr(registry, "backends", lambda: known)
    with pytest.raises(pk.SpecError, match="the case's tiling has 'swap_ab'; expected names among"):
        testing.replay("softmax", CASE + ',"tiling":{"swap_ab":1}}', backend="reference")


def test_a_case_may_have_another_implementations_knobs():
    case = CASE + ',"tiling":{"num_warps":4,"block_n":128}}'
    assert testing.replay("softmax", case, backend="reference").passed


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_ends_in_a_line_and_status_2(name, monkeypatch, capsys):
    command, words = BAD_INPUT[name]
    monkeypatch.setattr(sys, "argv", ["portakern", *command])
    monkeypatch.setattr(signal, "signal", lambda *a: None)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and words in said and "Traceback" not in said
    assert len(said.strip().splitlines()) == 1 or "Usage" in said


def test_a_seed_is_held_to_its_range_in_python_too():
    for seed in (-1, None, 1.5):
        with pytest.raises(pk.SpecError, match=r"check\('softmax'\): seed is .*; expected a whole number >= 0"):
            pk.check("softmax", backend="reference", seed=seed)


TOLD_TO_END = """
import os, signal, sys
import numpy as np
import portakern as pk
from portakern.cli import main
mine, calls = pk.Backend("mine", framework="numpy"), []
@mine.implements("softmax")
def softmax(call, tiling):
    calls.append(1)
    if len(calls) == 30:
        try:
            os.kill(os.getpid(), HOW)
        except BaseException as e:
            raise (RuntimeError("a callback failed") if WRAPPED else e)
    return (pk.op("softmax", backend="reference")(call.arrays["x"], axis=call.options["axis"]),)
pk.register(mine)
sys.argv = ["portakern", "check", "softmax", "--backend", "mine"]
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM")
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("how, status", [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_check_that_is_told_to_end_says_nothing(how, status, wrapped):
    """Its end is no failure of the case that was running, which would be run again and printed, also where what runs
    it tells of it in words of its own, as JAX's callbacks do."""
    code = TOLD_TO_END.replace("HOW", f"signal.{how}").replace("WRAPPED", str(wrapped))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    said = ran.stdout + ran.stderr
    assert ran.returncode == status and "xception" not in said and "Traceback" not in said and "FAILED" not in said, (
        said
    )


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM")
def test_a_check_in_processes_ends_when_it_is_told_to():
    code = "from portakern.cli import main; main()"
    work = ["check", "matmul", "--backend", "reference", "--jobs", "2", "--max-examples", "100000"]
    ran = subprocess.Popen(
        [sys.executable, "-c", code, *work],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    children = Path(f"/proc/{ran.pid}/task/{ran.pid}/children")
    if not children.exists():
        ran.kill()
        pytest.skip("no list of a process's children here")
    try:
        deadline = time.monotonic() + 60
        while (
            len(started := children.read_text().split()) < 3 and time.monotonic() < deadline
        ):  # a tracker, two workers
            time.sleep(0.1)
        ran.terminate()
        assert ran.wait(30) == 143
        assert len(started) >= 3 and not [pid for pid in started[1:] if Path(f"/proc/{pid}").exists()]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
        ran.wait()


BUILT = Build("softmax", "forward", "float32", "sm_90", "triton", ok=True, kernels=[Kernel("k", on_chip={"shared": 1})])
ODD = {
    "kernels of lists": '{"kernels":[[1]]}',
    "nested": "[" * 100_000,
    "a number": "3",
    "no text": b"\xff\xfe",
    "seconds in words": json.dumps({**BUILT.to_dict(), "seconds": "long"}),
    "a kernel in words": json.dumps({**BUILT.to_dict(), "kernels": [{"name": "k", "registers": "many"}]}),
    "a kernel's memory": json.dumps({**BUILT.to_dict(), "kernels": [{"name": "k", "on_chip": {"shared": None}}]}),
    "verdict": json.dumps({**BUILT.to_dict(), "ok": "yes"}),
}


def test_an_odd_file_in_the_cache_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    cache.keep("abc", BUILT)
    assert cache.find("abc").to_dict() == BUILT.to_dict()
    (file,) = tmp_path.rglob("*.json")
    for name, text in ODD.items():
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert cache.find("abc") is None, name


def test_a_cache_that_cannot_be_used_costs_nothing_but_a_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PORTAKERN_CACHE", "/dev/null/x")
    watching._said.clear()
    with caplog.at_level(logging.WARNING, "portakern"):
        cache.keep("abc", BUILT)
        cache.keep("abc", BUILT)
    assert cache.find("abc") is None
    (record,) = caplog.records
    assert "cannot be cached in /dev/null/x: Not a directory; set PORTAKERN_CACHE" in record.getMessage()


def test_tables_of_tilings_in_the_cache_may_hold_anything(tmp_path, monkeypatch, caplog):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    table = tmp_path / "tuned" / "triton" / "cpu.json"
    table.parent.mkdir(parents=True)
    table.write_text("[" * 100_000)
    tilings.forget()
    with caplog.at_level(logging.WARNING, "portakern"):
        assert pk.op("softmax", backend="triton")(np.ones((2, 3), np.float32)).shape == (2, 3)
    assert f"tiling table {table} is ignored: it cannot be read" in caplog.text
    (job,) = compiling.jobs_for(["softmax"], ["sm_90"], ["float32"])
    own, cuda, other = (table.with_name(f"{name}.json") for name in ("sm_90", "cuda", "sm_80"))
    own.write_bytes(b"\xff")
    first = cache.key(job)
    other.write_bytes(b"\xff")  # a look-up for the target does not read it
    assert cache.key(job) == first
    other.write_bytes(b"\xfe")
    own.write_text('{"ops": {"softmax": {"gpu": [{"from": "sm_80/softmax"}]}}}')  # now it may
    second = cache.key(job)
    other.write_bytes(b"\xff")
    third = cache.key(job)
    cuda.write_bytes(b"\xfe")
    assert len({first, second, third, cache.key(job)}) == 4
    tilings.forget()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_machine_code_can_be_read_at_any_width(width, monkeypatch, capsys):
    from portakern.cli import common
    from portakern.cli import compile as compile_command

    kernel = Kernel(
        "d_k_d_v_kernel", 2, 128, 255, 720, {"shared": 99328}, 0.12, {"HGMMA.64x64x16.F32.BF16": 72}, 70758, None
    )
    failed = Build("softmax", "forward", "float32", "v5e", "pallas", reason="libtpu is not installed")
    built = [Build("attention_vjp", "backward", "bfloat16", "sm_90", "triton", ok=True, kernels=[kernel]), failed]
    monkeypatch.setattr(common.out, "_width", width)
    compile_command._show_builds(built)
    said = capsys.readouterr().out
    lines = said.splitlines()
    for word in ("d_k_d_v_kernel", "HGMMA.64x64x16.F32.BF16", "255", "720", "97.0", "12%", "attention_vjp", "sm_90"):
        assert word in said  # in one piece
    assert max(map(len, lines)) <= width and len(lines) <= 10
    assert ("┃ target ┃ op " in said) == (width == 200)
    if width == 80:
        assert lines[0] == "attention_vjp bfloat16 for sm_90: ok, 0.0 s"
        assert lines[1].startswith("  d_k_d_v_kernel x2: 255 registers; 720 spills; on-chip memory shared 97.0 KiB;")
        assert "softmax float32 for v5e: libtpu is not installed" in lines


def test_tables_keep_words_whole_at_80_columns_and_become_lines_where_they_cannot(monkeypatch, capsys):
    from portakern.cli import common

    columns = ["op", "on", "verdict", "cases", "refused", "worst", "s"]
    rows = [["attention_vjp", "pallas on cpu (interpreted)", "passed", "100", "0", "d_q 0.02, d_bias 0.04", "101.2"]]
    words = [word for cell in (*columns, *rows[0]) for word in cell.split()]
    for width, table in ((200, True), (80, True), (60, False), (40, False)):
        monkeypatch.setattr(common.out, "_width", width)
        common.show_table("Conformance", columns, rows)
        said = capsys.readouterr().out
        assert ("┃" in said) == table
        assert [w for w in words if w not in said] == []  # in one piece
        assert max(map(len, said.splitlines())) <= width
    common.show_table("Peers", columns, [])
    assert capsys.readouterr().out == "Peers: none\n"
    common.show_table("Backends", ["next"], [["pip install -e '.[cpu]'"]])
    assert "'.[cpu]'" in capsys.readouterr().out  # no markup


@pytest.mark.parametrize("command", [["ops"], ["backends"], ["doctor"], ["show", "attention_vjp"]])
def test_lists_fit_80_columns_with_no_word_broken(command, monkeypatch):
    from portakern.cli import common

    monkeypatch.setattr(common.out, "_width", 80)
    said = run(app, command).output
    tables = [line for line in said.splitlines() if line[:1] in "┏┃┡│└"]
    if command != ["ops"]:
        assert tables and max(map(len, tables)) <= 80
    else:  # its longest words leave no room for a table: a line for each op, and for each of its cells
        assert not tables and max(map(len, said.splitlines())) <= 80
        assert [line for line in said.splitlines() if line.startswith("op ")] == [f"op {name}" for name in pk.ops()]
    if command == ["ops"]:  # three backends are no column
        assert len(tables) < 4 * len(pk.ops()) and re.search(r"\ball\b", said)
    named = {"ops": pk.ops(), "backends": pk.backends(), "doctor": pk.backends()}
    for word in named.get(command[0], ["q_segment_ids", "portakern.backends.triton.gpu.attention_vjp"]):
        assert word in said


def test_json_is_one_thing_in_every_command(tmp_path):
    """A file takes it beside the tables; alone, or with -, it is printed, and nothing else is on standard output."""
    file = tmp_path / "found.json"
    check = ["check", "softmax", "--backend", "reference", "--max-examples", "2"]
    for command in (["ops"], ["backends"], ["show", "softmax"], ["doctor"], check):
        for printed in (["--json"], ["--json", "-"]):
            found = run(app, [*command, *printed])
            assert found.exit_code == 0 and json.loads(found.stdout), command
        file.unlink(missing_ok=True)
        found = run(app, [*command, "--json", str(file)])
        assert found.exit_code == 0 and json.loads(file.read_text()) and "{" not in found.stdout[:1], command
    first, *rest = check
    assert json.loads(run(app, [first, "--json", *rest]).stdout)["rows"], "an op's name behind --json is no file"
    assert not (Path.cwd() / "softmax").exists()
    for name in ("demo", "bench", "judge", "tune", "profile", "compile"):
        assert "--json" in run(app, [name, "--help"]).output


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["bench", "softmax", "--against", "flashattn"], ["did you mean 'flash_cute'", "a peer (", "sdpa_flash"]),
        (["check", "softmax", "--backend", "tritn"], ["did you mean 'triton'?"]),
        (["check", "softmax", "--device", "gpu"], ["--device is 'gpu'", "cpu, cuda, rocm, tpu", "cuda or rocm?"]),
        (["bench", "softmax", "--device", "nvidia"], ["--device is 'nvidia'", "did you mean cuda?"]),
        (["judge", "mine.py", "--op", "softmax", "--device", "gpu"], ["--device is 'gpu'", "cuda or rocm?"]),
        (["check", "softmax", "--profile", "emulatd"], ["which no backend declares here", "triton: emulated"]),
        (["check", "softmax", "--profile", "emulated"], ["target is None", "gfx942"]),
        (["judge", "mine.py", "--op", "softmax", "--shapes", "64x1000"], ["judge: --shapes has", "x=64x39321"]),
    ],
)
def test_messages_name_what_was_asked_and_what_there_is(asked, said, tmp_path, monkeypatch):
    for library in ("torch", "triton", "jax"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def softmax(x):\n    return x\n")
    found = run(app, asked)
    assert isinstance(found.exception, pk.SpecError)
    for words in said:
        assert words in str(found.exception)
    assert "pallas" not in str(found.exception) or "--profile" in asked or "--against" in asked or "tritn" in asked
