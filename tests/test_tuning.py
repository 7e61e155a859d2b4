"""portakern tune: which tilings are tried, what counts, what is kept, and that nothing is lost."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pytest
from typer.testing import CliRunner

import portakern as pk
from portakern import cli, results
from portakern.cli import tune as tune_command
from portakern.core import observe, registry, targets, tilings
from portakern.core.machine_code import Kernel
from portakern.core.tilings import Row
from portakern.errors import SpecError, UnavailableError
from portakern.spec import Tile
from portakern.tools.bench import suites
from portakern.tools.compile.build import Build
from portakern.tools.compile.pool import Pool
from portakern.tools.tune import benches, isolation, static, store
from portakern.tools.tune import search as searches
from portakern.tools.tune.journal import Journal
from portakern.tools.tune.losses import searched
from portakern.tools.tune.sampled import draw, families
from portakern.tools.tune.search import Climb, ExhaustiveSearch, OptunaSearch, search
from portakern.tools.tune.session import Callbacks, groups_of
from portakern.tools.tune.session import tune as tune_groups
from portakern.tools.tune.space import Space, frozen, space_of
from portakern.tools.tune.target import tune_targets
from portakern.tools.tune.tuner import SearchPlan, _form_call, _opening, row_of

SECONDS = {32: 0.004, 64: 0.002, 128: 0.0}
"""How long the kernel of these tests takes, by its only tile, beside the little that it does."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache folder of this test's own."""
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    tilings.forget()
    yield tmp_path
    tilings.forget()


class ThreeTiles(pk.Config):
    rows_at_once: Annotated[int, Tile(32, 128), "rows at once"]


class TwoTiles(ThreeTiles):
    rows_at_once: Annotated[int, Tile(32, 64)]


class FiveTiles(ThreeTiles):
    rows_at_once: Annotated[int, Tile(16, 256)]


def softmax(call, tiling):
    """Right with every tile but 128, with which it is fastest: it leaves a row out."""
    x, axis = call.arrays["x"].astype(np.float32), call.options["axis"]
    e = np.exp(x - x.max(axis, keepdims=True))
    y = np.ascontiguousarray(e / e.sum(axis, keepdims=True)).astype(call.arrays["x"].dtype)
    time.sleep(SECONDS[tiling["rows_at_once"]])
    if tiling["rows_at_once"] == 128:
        y[-1] = 0
    return (y,)


def registered(fn=softmax, refuse=None, config=ThreeTiles):
    backend = pk.Backend("mine", framework="numpy")
    backend.implements(
        "softmax",
        key=lambda call: {"dtype": call.dtype, "n": call.dims["shape"][-1]},
        tiling=lambda call: {"rows_at_once": 32},
        config=config,
        supports=lambda call, tiling: refuse(tiling) if refuse else None,
    )(fn)
    pk.register(backend)
    return backend


def of_op(spec, dtype, given):
    (case,) = suites.requested_cases(spec.name, given, [dtype], gradients=False)
    return case


def asked(**dims):
    return [of_op(registry.find_spec("softmax"), "float32", dims or {"shape": (4, 40)})]


def tuned(plan=None, **options):
    told = SimpleNamespace(progress=[], found=[], refused=[])
    groups = groups_of(options.pop("asked", asked()), "cpu", "mine", None)
    into = Callbacks(told.progress.append, told.found.append, lambda group, why: told.refused.append(why))
    with Pool(1, 10) as pool:
        found, left = tune_groups(groups, plan or SearchPlan(), pool, into, **options)
    return found, left, told


# ------------------------------------------------------------------------------------------- what is wrong never counts


def test_a_wrong_kernel_is_never_chosen_however_fast_and_is_said_to_be_wrong(own_cache):
    registered()
    (finding,), _, told = tuned()
    assert finding.best == {"rows_at_once": 64}
    assert list(finding.wrong) == [frozen({"rows_at_once": 128})]
    assert "out of bounds" in finding.wrong[frozen({"rows_at_once": 128})]
    (row,) = finding.rows
    assert row["best_tiling"] == {"rows_at_once": 64} and row["wrong"] == 1
    assert [judged["changes"] for judged in row["comparisons"]] == [{"rows_at_once": 64}], (
        "nor counted among what is right"
    )
    assert row["comparisons"][0]["ratio"] < 1
    assert told.progress[-1].best == {"rows_at_once": 64}
    table = json.loads((own_cache / "tuned" / "mine" / "cpu.json").read_text())
    (kept,) = table["ops"]["softmax"][__name__.rpartition(".")[0].rpartition(".")[2] or "tests"]
    assert kept["tiling"] == {"rows_at_once": 64} and kept["key"] == {"dtype": "float32", "n": 40}


def test_a_wrong_kernel_is_never_chosen_as_a_gpu_would_show(own_cache):
    """The test of a device, on the CPU."""
    pytest.importorskip("torch", reason="torch is not installed")
    from tests.gpu import tuned_beside_a_wrong_kernel

    finding = tuned_beside_a_wrong_kernel("cpu", (512, 512))
    assert finding.best == {"rows_at_once": 64} and list(finding.wrong) == [(("rows_at_once", 128),)]
    assert '"rows_at_once": 64' in (own_cache / "tuned" / "seeded" / "cpu.json").read_text()


def test_a_function_without_a_key_is_not_searched_and_the_command_says_so(own_cache):
    backend = pk.Backend("mine", framework="numpy")
    backend.implements("softmax")(softmax)
    pk.register(backend)
    command = ["tune", "softmax", "--backend", "mine", "--target", "cpu", "--dtype", "float32", "--shape", "shape=4x40"]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 1 and "no tiling is faster" not in result.output
    assert "not searched: softmax on mine declares no key" in result.output
    assert "nothing was searched: no call can be tuned" in result.output


def test_the_command_says_what_is_wrong_and_ends_with_status_1(own_cache, monkeypatch):
    registered()
    file = own_cache / "results.json"
    command = ["tune", "softmax", "--backend", "mine", "--target", "cpu", "--dtype", "float32", "--shape", "shape=4x40"]
    result = CliRunner().invoke(cli.app, [*command, "--json", str(file)])
    assert result.exit_code == 1, result.output
    assert "WRONG RESULT, tiling dropped: softmax with rows_at_once=128: wrong: " in result.output
    assert "wrote 1 of 1 in" in result.output
    (row,) = results.read(file).rows
    assert row["best_tiling"] == {"rows_at_once": 64} and row["default"] > row["best"] and row["loss"] > 0.2


def test_a_file_of_results_says_what_was_not_reached_whenever_its_run_ends(own_cache, monkeypatch):
    """It is written after each key, and may be the last that is."""
    registered()
    file, left = own_cache / "results.json", []
    write = tune_command._write
    monkeypatch.setattr(
        tune_command, "_write", lambda *a: (write(*a), left.append(results.read(file).extra["keys_left"]))
    )
    command = ["tune", "softmax", "--backend", "mine", "--target", "cpu", "--dtype", "float32", "--json", str(file)]
    shapes = [part for n in (40, 48, 56) for part in ("--shape", f"shape=4x{n}")]
    CliRunner().invoke(cli.app, [*command, *shapes])
    assert left == [2, 1, 0, 0]


def test_what_is_shipped_must_be_right():
    def wrong(call, tiling):
        return (np.zeros(call.dims["shape"], np.float32),)

    registered(wrong)
    found, _, told = tuned()
    assert not found and "the shipped tiling {'rows_at_once': 32} cannot be measured: wrong" in told.refused[0]


def test_an_output_that_is_not_written_everywhere_does_not_count():
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def lazy(call, tiling):
        x = call.arrays["x"]
        y = torch.empty_like(x)
        rows = slice(None) if tiling["rows_at_once"] == 32 else slice(0, -1)
        y[rows] = torch.softmax(x, call.options["axis"])[rows]
        return (y,)

    backend = pk.Backend("mine", framework="torch")
    backend.implements(
        "softmax", key=lambda call: {"dtype": call.dtype}, tiling=lambda call: {"rows_at_once": 32},
        config=TwoTiles,
    )(lazy)  # fmt: skip
    pk.register(backend)
    (finding,), _, _ = tuned()
    assert finding.best is None and "NaN" in next(iter(finding.wrong.values()))


def test_a_candidate_that_raises_costs_itself():
    def raises(call, tiling):
        if tiling["rows_at_once"] == 64:
            raise RuntimeError("out of resources")
        return softmax(call, tiling)

    registered(raises)
    (finding,), _, _ = tuned()
    assert finding.refused[frozen({"rows_at_once": 64})] == "raised RuntimeError: out of resources"
    assert finding.best is None, "the only other one is wrong"


# ------------------------------------------------------------------------------------------------------------ journal


def test_a_tuner_that_was_killed_goes_on_where_it_was(own_cache):
    registered()
    calls: list[int] = []

    def counting(call, tiling):
        calls.append(tiling["rows_at_once"])
        return softmax(call, tiling)

    registry._registered.clear()
    registered(counting)
    tuned(write=False)
    assert 64 in calls and 128 in calls
    calls.clear()
    found, _, _ = tuned()
    assert not calls and found[0].best == {"rows_at_once": 64}, "nothing is tried again"
    tuned(fresh=True)
    assert calls, "--fresh forgets"


def test_candidates_of_a_search_that_did_not_end_are_not_judged_again(own_cache):
    calls: list[int] = []

    def slow(call, tiling):
        calls.append(tiling["rows_at_once"])
        return softmax(call, tiling)

    registered(slow)
    kinds: list[str] = []
    over = SimpleNamespace(now=False)

    class Hurried(SearchPlan):
        @property
        def over(self):
            return over.now

    original = Journal.note

    def note(self, kind, name, value):
        original(self, kind, name, value)
        kinds.append(kind)
        over.now = over.now or kind == "judged"

    plan = Hurried(batch=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "note", note)
        tuned(plan)
    assert "found" not in kinds
    assert sum(kind == "judged" for kind in kinds) == 1, "the time was over after the first"
    calls.clear()
    over.now = False
    (finding,), _, _ = tuned(Hurried())
    assert finding.best == {"rows_at_once": 64} and 128 in calls


def test_what_ended_the_process_is_not_tried_again(own_cache):
    script = textwrap.dedent("""
        import sys; sys.path.insert(0, "."); import tests.test_tuning as t, os, signal
        def deadly(call, tiling):
            if tiling["rows_at_once"] == 64 and sys.argv[1] == "1": os.kill(os.getpid(), signal.SIGKILL)
            return t.softmax(call, tiling)
        t.registered(deadly)
        (found,), _, _ = t.tuned(t.SearchPlan(batch=1))
        print(found.best, found.refused.get((("rows_at_once", 64),)))
    """)
    ended = [
        subprocess.run([sys.executable, "-c", script, n], capture_output=True, text=True, timeout=100) for n in "12"
    ]
    assert ended[0].returncode == -signal.SIGKILL, ended[0].stderr
    assert "an earlier run ended while it was tried" in ended[1].stdout, ended[1].stderr


@pytest.mark.parametrize("deaths", [1, 2])
def test_of_candidates_that_were_timed_together_when_a_run_ended_each_is_judged_by_itself(own_cache, deaths):
    """What was found before holds: the one that was wrong is not called again. Who was there when somebody ended the
    run counts; who ends the next run by itself does not."""
    script = textwrap.dedent("""
        import sys; sys.path.insert(0, "."); import tests.test_tuning as t, os, signal, time
        from portakern.spec import Tile
        calls = []
        t.SECONDS.update({16: 0.004, 32: 0.004, 64: 0.001, 256: 0.004})
        def deadly(call, tiling):
            calls.append(tiling["rows_at_once"])
            if calls[-1] == 64 and calls.count(64) == 2 and sys.argv[1] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            return t.softmax(call, tiling)
        t.registered(deadly, config=t.FiveTiles)
        (found,), _, _ = t.tuned()
        for tile in 16, 64, 128, 256:
            key = (("rows_at_once", tile),)
            print(tile, tile in calls, key in found.refused and found.refused[key].split(":")[0])
    """)
    runs = ["dies"] * deaths + ["lives"]
    ended = [
        subprocess.run([sys.executable, "-c", script, n], capture_output=True, text=True, timeout=100) for n in runs
    ]
    assert [run.returncode for run in ended] == [-signal.SIGKILL] * deaths + [0], ended[-1].stderr
    said = {line.split()[0]: line.split(maxsplit=2)[1:] for line in ended[-1].stdout.splitlines()}
    assert said["128"] == ["False", "wrong"] and said["16"][1] == said["256"][1] == "False"
    blamed = ["False", "an earlier run ended while it was tried"]
    assert said["64"] == (["True", "False"] if deaths == 1 else blamed)


class Scripted:
    """A process that does nothing: each time that something is asked of it, what is next."""

    def __init__(self, *does):
        self.does = list(does)

    def submit(self, task, *args):
        done, future = self.does.pop(0), Future()
        if done is ENDED:
            raise BrokenProcessPool
        if isinstance(done, Exception):
            raise done
        if callable(done):
            future.set_exception(done())
        else:
            future.set_result(done)
        return future


ENDED = object()
"""It has ended before it was asked."""


@pytest.mark.parametrize(
    ("processes", "expected", "said"),
    [
        ([[OSError("Cannot allocate memory")]], None, "process could be started (OSError: Cannot allocate memory)"),
        ([[lambda: MemoryError("none left")]], None, "could not make the call (MemoryError: none left)"),
        ([[ENDED], [None, "spoilt"]], "spoilt", ""),
        ([[ENDED], [ENDED]], None, "no other process could be started (BrokenProcessPool"),
        ([[None, ENDED], [None, "spoilt"]], "spoilt", ""),
        ([[None, lambda: BrokenProcessPool()]], "died: its process ended", ""),
        ([[None, ENDED], [lambda: MemoryError("none left")]], None, "could not make the call"),
    ],
    ids=["never begun", "no room", "ended at rest", "ends always", "ended between", "dies of it", "no more room"],
)  # fmt: skip
def test_a_candidate_is_blamed_for_its_own_end_alone(own_cache, monkeypatch, caplog, processes, expected, said):
    """Where no other process can call it, this one does, which is said once."""
    registered()
    (group,) = groups_of(asked(), "cpu", "mine", None)
    made = [Scripted(*does) for does in processes]
    monkeypatch.setattr(isolation, "worthwhile", lambda case, on: True)
    monkeypatch.setattr(isolation, "pool", lambda jobs, told: nullcontext(made.pop(0)))
    monkeypatch.setattr(observe, "_said", set())
    with closing(isolation.Isolated(1)) as calling:
        calling.begin(group.cases[0], group.on)
        assert calling.refused(group.cases[0], group.on, {"rows_at_once": 64}) == expected
        assert not made and (expected or calling.refused(group.cases[0], group.on, {"rows_at_once": 32}) is None)
    heard = caplog.text
    assert (said in heard and heard.count("run in this process") == 1) if said else not heard


@pytest.mark.parametrize("when", ["arrays", "check", "times"])
def test_memory_that_another_process_holds_is_no_fault_of_a_candidate(own_cache, monkeypatch, when):
    """It is given back, and what ran out of it is tried once more."""
    held = [when != "arrays"] * 2

    def hungry(call, tiling):
        if held[0]:
            raise MemoryError("CUDA out of memory")
        return softmax(call, tiling)

    def yields():
        before, held[:] = held[1], [False, False]
        return before

    def arrays(*given, real=benches.make):
        if held[1]:
            raise MemoryError("CUDA out of memory")
        return real(*given)

    registered(hungry)
    (group,) = groups_of(asked(), "cpu", "mine", None)
    monkeypatch.setattr(benches, "make", arrays)
    held[:] = [False, when == "arrays"]
    with Pool(1, 10) as pool:
        bench = benches.bench_of(group.cases[0], group.on, pool, benches.Precomputed(yields=yields))
        held[:] = [when == "check"] * 2
        assert bench.refused([{"rows_at_once": 64}]) == {}
        held[:] = [when == "times"] * 2
        assert bench.scores([{"rows_at_once": 64}], 0)
        held[:] = [True, False]  # nobody else has any
        (why,) = bench.refused([{"rows_at_once": 32}]).values()
    assert why == "raised MemoryError: CUDA out of memory"


HANGING = """
    import time
    import numpy as np
    import portakern as pk
    from typing import Annotated
    from portakern.spec import Tile

    BACKEND = pk.Backend("hanging", framework="numpy", platforms=["cpu"])

    class FiveTiles(pk.Config):
        rows_at_once: Annotated[int, Tile(16, 256)]

    @BACKEND.implements("softmax", key=lambda call: {"n": 1}, tiling=lambda call: {"rows_at_once": 32},
                        config=FiveTiles)
    def softmax(call, tiling):
        rows = tiling["rows_at_once"]
        while rows == 64:  # as a group of warps that nobody arrives for
            time.sleep(0.01)
        if rows == 128:
            import os
            os._exit(3)
        if rows == 256:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        x = call.arrays["x"]
        time.sleep(0.001 if rows == 16 else 0.004)
        e = np.exp(x - x.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True),)
"""


def test_a_candidate_that_never_ends_costs_its_seconds_and_not_the_run(own_cache, tmp_path):
    """Nor does one that ends the process which calls it, or spoils the device; a run that goes on tries none again."""
    (tmp_path / "hanging.py").write_text(textwrap.dedent(HANGING))
    made = tmp_path / "hanging-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text("[portakern.backends]\nhanging = hanging:BACKEND\n")
    script = textwrap.dedent("""
        import time
        from portakern.tools.tune import isolation, session
        from tests import test_tuning as t
        from portakern.tools.compile.pool import Pool

        def main():
            isolation.worthwhile = lambda case, on: True  # as on a GPU
            isolation.SECONDS = 2.0
            began, real = [], isolation.pool
            isolation.pool = lambda jobs, told: began.append(jobs) or real(jobs, told)
            groups = session.groups_of(t.asked() + t.asked(shape=(5, 40)), "cpu", "hanging", None)
            told = session.Callbacks(lambda p: None, lambda f: None, lambda g, why: print(why))
            with Pool(1, 1) as pool:
                start = time.perf_counter()
                (found,), _ = session.tune(groups, t.SearchPlan(), pool, told)
            print(found.best, len(began), time.perf_counter() - start < 60)
            for key, why in sorted(found.fatal.items()):
                print(dict(key)["rows_at_once"], why)

        if __name__ == "__main__":
            main()
    """)
    file = tmp_path / "run_it.py"
    file.write_text(script)
    root = str(Path(__file__).parent.parent)
    paths = os.pathsep.join([str(tmp_path), root, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    expected = [
        "64 hung: no result after 3 s, and its process was killed",
        "128 died: its process ended",
        "256 left the device unusable: CUDA error: an illegal memory access was encountered",
    ]
    for processes in 4, 1:  # one more after each that ended; the second run tries none of these candidates
        ran = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=100, cwd=root,
                             env=environment)  # fmt: skip
        assert ran.stdout.splitlines() == [f"{{'rows_at_once': 16}} {processes} True", *expected], ran.stderr
        (journal,) = (own_cache / "tuning").glob("*.sqlite")
        with closing(sqlite3.connect(journal)) as database, database:
            assert database.execute("DELETE FROM notes WHERE kind = 'found'").rowcount == 1


def test_a_journal_is_one_of_its_own_and_holds_what_several_note(own_cache):
    one, other = Journal(["a"]), Journal(["a"])
    one.note("judged", "one", {"ratio": 0.5})
    other.note("judged", "two", 1)
    other.note("judged", "one", {"ratio": 0.25})
    for journal in (one, other, Journal(["a"])):
        assert journal.get("judged", "one") == {"ratio": 0.25} and journal.get("judged", "two") == 1
        journal.close()
    assert Journal(["b"]).get("judged", "two") is None and Journal(["a"], fresh=True).get("judged", "two") is None
    one.path.write_text("my notes " * 100)
    with pytest.raises(
        SpecError, match=r"tune: the journal .*\.sqlite cannot be used: file is not a database; --fresh"
    ):
        Journal(["a"])
    assert Journal(["a"], fresh=True).get("judged", "two") is None


# ------------------------------------------------------------------------------------------------------------- tables


def row(n, tile=64, **more):
    return Row(f"n {n}", {"dtype": "float32", "n": n}, {"rows_at_once": tile}, "measured in a test", "", more)


def test_two_tuners_at_once_lose_nothing(own_cache):
    path = own_cache / "tuned" / "mine" / "cpu.json"

    def write(first):
        for n in range(first, first + 8):
            store.keep(path, "softmax", "tests", [row(n)])

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 100, 200)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    entries = json.loads(path.read_text())["ops"]["softmax"]["tests"]
    assert sorted(e["key"]["n"] for e in entries) == [*range(8), *range(100, 108), *range(200, 208)]
    store.keep(path, "softmax", "tests", [row(3, 128)])
    entries = json.loads(path.read_text())["ops"]["softmax"]["tests"]
    assert [e["tiling"]["rows_at_once"] for e in entries if e["key"]["n"] == 3] == [128]


def test_a_file_that_is_no_table_is_moved_aside_and_that_is_said(own_cache, caplog):
    path = own_cache / "tuned" / "mine" / "cpu.json"
    path.parent.mkdir(parents=True)
    path.write_text("my notes")
    with caplog.at_level(logging.WARNING, "portakern"):
        store.keep(path, "softmax", "tests", [row(1)])
    (aside,) = path.parent.glob("cpu.json.wrong-*")
    assert aside.read_text() == "my notes" and str(aside) in caplog.text
    assert json.loads(path.read_text())["schema"] == tilings.SCHEMA


def test_a_table_is_written_as_it_is_read():
    for path in sorted((registry.backend("triton").package and _shipped("triton")).glob("*.json")):
        table = json.loads(path.read_text())
        assert json.loads(store.text_of(table)) == {**table, "notes": table.get("notes", [])}
        assert all(len(line) <= 120 for line in store.text_of(table).splitlines()), path


def _shipped(backend):
    return tilings.shipped_folder(f"{registry.backend(backend).package}.gpu")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"versions": {"numpy": "0.1"}}, "was tuned with numpy 0.1, and "),
        ({"versions": {"numpy": np.__version__}}, None),
        ({"versions": {"no_such_package": "1"}}, None),
        ({}, None),
    ],
)
def test_a_table_of_another_compiler_serves_and_says_so_once(made, words, own_cache, caplog):
    registered()
    path = own_cache / "tuned" / "mine" / "cpu.json"
    store.keep(path, "softmax", "tests", [row(40, **made)])
    op, x = pk.op("softmax", backend="mine"), np.zeros((3, 40), np.float32)
    tilings._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "portakern"):
        for _ in range(2):
            tilings.forget()
            assert "rows_at_once=64 (cache: n 40)" in op.explain(x)
    told = [r.getMessage() for r in caplog.records if "was tuned" in r.getMessage()]
    assert len(told) == (words is not None)
    assert words is None or (words in told[0] and "portakern tune softmax" in told[0])


def test_a_table_of_another_chip_serves_and_says_so(own_cache, caplog):
    registered()
    impl = registry.backend("mine").implementation("softmax", registry.backend("mine").families[0])
    framework = SimpleNamespace(accelerator_names=lambda: ["NVIDIA H200"])
    call = SimpleNamespace(target=targets.Target("cuda", "sm_90"), framework=framework)
    tilings._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "portakern"):
        tilings._warn_of_age(row(1, device="NVIDIA H100"), impl, call)
    assert "was tuned on NVIDIA H100, and this is NVIDIA H200" in caplog.text


def test_a_row_of_nonsense_in_made_is_noticed(own_cache):
    path = own_cache / "tuned" / "mine" / "cpu.json"
    store.keep(path, "softmax", "tests", [row(1)])
    text = path.read_text()
    for wrong in ('"made": 3', '"made": {"versions": [1]}', '"made": {"device": 1}'):
        path.write_text(text.replace('"source"', f'{wrong}, "source"'))
        with pytest.raises(ValueError, match="made"):
            tilings.check_table(path)


def test_a_shipped_row_that_is_nearer_comes_before_the_users():
    pytest.importorskip("triton", reason="triton is not installed")
    op = pk.op("attention", backend="triton")

    def source(d):
        q = np.zeros((1, 8, 2, d), np.float32)
        return op.explain(q, q, q)

    path = tilings.own_table("triton", targets.HOST)
    mine = Row("mine", {"products": "ieee", "d": 16}, {"block_q": 128}, "measured in a test", "")
    store.keep(path, "attention", "gpu", [mine])
    assert "block_q=128 (cache: mine)" in source(16)
    assert "block_q=32 (shipped cpu: ieee, d to 128)" in source(100), "d = 16 says nothing of 100"


# ------------------------------------------------------------------------------------------------- spaces and searches


def space(refuses=lambda tiling: None, **values):
    values = values or {"a": (1, 2, 4, 8, 16), "b": (1, 2, 4, 8, 16), "c": (1, 2, 3)}
    return Space(values, refuses)


def far(tiling):
    """How far from the best of these tests."""
    return 1.0 + abs(np.log2(tiling["a"]) - 3) + abs(np.log2(tiling["b"]) - 1) + abs(tiling["c"] - 2)


def best_of(hunt, tries=75):
    scores = {}
    while len(scores) < tries and (batch := hunt.ask(5)):
        assert not any(frozen(t) in scores for t in batch), "nothing is tried twice"
        scores |= {frozen(t): far(t) for t in batch}
        hunt.tell([(t, far(t)) for t in batch])
    return dict(min(scores, key=scores.get)), len(scores)


def test_all_of_a_small_space_is_tried_the_seeds_first():
    seeds = [{"a": 4, "b": 4, "c": 1}, {"a": 3, "b": 1, "c": 1}]
    hunt = search("auto", space(), seeds)
    assert isinstance(hunt, ExhaustiveSearch) and hunt.left[0] == seeds[0], "what is not legal is no seed"
    assert best_of(hunt) == ({"a": 8, "b": 2, "c": 2}, 75)


def test_a_climb_finds_the_best_without_trying_all():
    best, tried = best_of(search("climb", space(), [{"a": 1, "b": 16, "c": 1}]), 60)
    assert best == {"a": 8, "b": 2, "c": 2} and tried < 60


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="optuna, of the tune extra, is not installed")
def test_optuna_searches_a_large_space(monkeypatch):
    monkeypatch.setattr(searches, "SMALL", 10)
    hunt = search("auto", space(lambda t: "no" if t["a"] == t["b"] else None), [{"a": 1, "b": 16, "c": 1}])
    assert isinstance(hunt, OptunaSearch)
    best, _ = best_of(hunt, 40)
    assert far(best) <= 2


def test_a_chip_without_its_compiler_is_refused_once(monkeypatch):
    """Before the first of many calls, in the words of who compiles for it."""
    family = registry.backends()["pallas"].families[0]
    monkeypatch.setattr(family.load_compiler(), "unavailable", lambda hardware: f"nothing compiles for {hardware.name}")
    with pytest.raises(UnavailableError, match=r"^tune: nothing compiles for v5e$"):
        tune_targets(registry.find_spec("softmax"), "v5e", None, None)


def test_without_optuna_a_large_space_says_what_to_do(monkeypatch):
    monkeypatch.setattr(searches, "SMALL", 10)
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"75 combinations .*pip install -e '\.\[tune\]', or pass --search"):
        search("auto", space(), [])
    with pytest.raises(SpecError, match="search is 'best'; expected one of auto, all, climb, optuna"):
        search("best", space(), [])
    assert isinstance(search("climb", space(), []), Climb)


def test_a_climb_asks_for_the_neighbours_of_what_is_shipped_at_once():
    """Before any tiling has a score, so that compilers have as much to do as there is room for."""
    found = Space({"a": (1, 2, 3), "b": (1, 2)}, lambda tiling: None)
    shipped, other = {"a": 2, "b": 1}, {"a": 3, "b": 2}
    asked = Climb(found, [shipped, other], 0).ask(9)
    assert asked[:2] == [shipped, other] and asked[2:] == [*found.neighbours(shipped)] and len(asked) == 6


def test_a_space_holds_what_is_shipped():
    """Also a tile beyond the extent, which serves calls of one query as any: a search would have nowhere to begin."""
    pytest.importorskip("triton", reason="triton is not installed")
    spec = registry.find_spec("attention")
    one = of_op(spec, "bfloat16", {"q_len": 1, "kv_len": 8192, "d": 128, "dv": 128})
    (group,) = groups_of([one], "sm_90", "triton", "hopper")
    opening = _opening(group, SearchPlan("climb"), [_form_call(one, group.on)])
    (shipped,) = opening.shipped
    assert shipped["block_q"] > 1 and opening.space.legal(shipped)
    assert opening.space.values["block_q"] == (16, shipped["block_q"])
    first = opening.hunt.ask(12)
    assert len(first) == 12 and first[0] == shipped


def test_a_space_is_legal_and_ends_where_a_tile_covers_its_extent():
    pytest.importorskip("triton", reason="triton is not installed")
    spec = registry.find_spec("matmul")
    (on,) = tune_targets(spec, "sm_90", "triton", "gpu")
    groups = groups_of([of_op(spec, "bfloat16", {"m": 40, "n": 4096, "k": 4096})], "sm_90", "triton", "gpu")
    assert groups[0].key == {"products": "16-bit", "aligned": True, "n": 4096, "k": 4096}
    from portakern.tools.compile.abstract import bind_signature

    call = bind_signature(spec, groups[0].cases[0].signature, on.framework, on.target)
    found = space_of(spec, on.impl, [call], tilings.shipped(on.impl, call))
    assert found.values["block_m"] == (16, 32, 64, 128), "64 covers 40, and 128 is shipped"
    big = {"block_m": 64, "block_n": 1024, "block_k": 1024, "num_warps": 8, "num_stages": 3, "group": 8}
    assert not found.legal(big) and found.legal({**big, "block_n": 128, "block_k": 64})
    assert all(found.legal(t) for t in found.neighbours({**big, "block_n": 128, "block_k": 64}))


# --------------------------------------------------------------------------------------------------- chips not here


def built(tiling, **kernel):
    return Build(
        "matmul", "forward", "bfloat16", "v5e", "pallas", tiling=tiling, ok=True, kernels=[Kernel("k", **kernel)]
    )


def test_cycles_are_bounded_by_memory_and_by_the_peak_rate():
    hardware = targets.find("v5e")
    call = SimpleNamespace(dtype="bfloat16", flops=2.0 * 4096**3)
    model = static.model_of(built({}, issued=10), hardware, call)
    least = 4096**3 / (4 * 128**2)
    assert model.score(built({}, issued=10, moved=0), {}) == pytest.approx(least)
    assert model.score(built({}, issued=2_000_000, moved=0), {}) == 2_000_000
    assert model.score(built({}, issued=10, cycles=3_000_000), {}) == 3_000_000, "the compiler's own estimate is better"
    moved = model.score(built({}, issued=10, moved=10**9), {})
    assert moved == pytest.approx(1e9 / (819e9 / 1.503e9), rel=1e-3)


def test_where_nothing_counts_cycles_spills_and_empty_cores_cost():
    call = SimpleNamespace(dtype="bfloat16", flops=1.0, spec=registry.find_spec("matmul"))
    model = static.model_of(built({}, occupancy=0.5), targets.find("gfx942"), call)
    tile = {"block_m": 128, "block_n": 128, "block_k": 32, "num_warps": 8}
    fit = model.score(built(tile, occupancy=0.5, spills=0), tile)
    assert fit < model.score(built(tile, occupancy=0.25, spills=0), tile)
    assert fit < model.score(built(tile, occupancy=0.5, spills=8), tile)
    assert "guess" in model.metric


def test_a_rows_source_says_whether_it_was_measured(own_cache):
    registered()
    (finding,), _, _ = tuned(write=False)
    kept = row_of(finding, "a host")
    assert kept.source.startswith("measured on a host: ") and kept.made["device"] == "a host"
    assert kept.key == {"dtype": "float32", "n": 40} and kept.name == "float32, n 40"


# ---------------------------------------------------------------------------------------------------------- the rest


def test_the_next_key_is_compiled_while_one_is_judged(monkeypatch):
    """A launch finds what was compiled ahead; nothing is compiled twice."""
    compiled, judging, overlapped = [], threading.Event(), []

    def survey(case, on, pool, tilings, quick=True):
        for tiling in tilings:
            compiled.append((case.text, frozen(tiling)))
            if case.text == second.text:
                overlapped.append(judging.wait(30))  # while the first key is judged
            yield frozen(tiling), Build("softmax", "forward", "float32", "cpu", "mine", ok=True)

    def watched(call, tiling):
        if call.dims["shape"] == (4, 40):
            judging.set()
            while len([text for text, _ in compiled if text == second.text]) < 3:
                time.sleep(0.001)
        return softmax(call, tiling)

    registered(watched)
    first, second = asked()[0], asked(shape=(4, 50))[0]
    for module in ("portakern.tools.tune.precompile", "portakern.tools.tune.benches"):
        monkeypatch.setattr(f"{module}.launches_find_it", lambda on: True)
        monkeypatch.setattr(f"{module}.survey", survey)
    found, left, _ = tuned(asked=[first, second])
    assert [f.best for f in found] == [{"rows_at_once": 64}] * 2 and not left
    assert overlapped and all(overlapped)
    assert len(compiled) == len(set(compiled)) == 6 and {text for text, _ in compiled} == {first.text, second.text}


def test_runs_of_several_threads_share_a_pool(monkeypatch):
    """A process has one job at a time, whoever asks; every run has the results of its own jobs."""
    busy, together = set(), []

    def serve(worker, job, timeout):
        together.append(worker in busy)
        busy.add(worker)
        time.sleep(0.005)
        busy.discard(worker)
        return job

    monkeypatch.setattr("portakern.tools.compile.pool._CompilerWorker.serve", serve)
    with Pool(2, 10) as pool, ThreadPoolExecutor(3) as threads:
        runs = [[f"job {i} of {run}" for i in range(4)] for run in range(3)]
        found = list(threads.map(lambda jobs: list(pool.run(jobs)), runs))
    assert [sorted(pairs) for pairs in found] == [[(job, job) for job in jobs] for jobs in runs]
    assert len(together) == 12 and not any(together)


def test_keys_come_in_the_order_of_their_calls():
    """So that a run of several ops that is cut short has some of each."""
    backend = registered()
    other, lengths = "logsumexp", (40, 50)
    ops = ("softmax", other)
    backend.implements(other, key=lambda call: {"n": call.dims["axis"]}, tiling=lambda call: {"rows_at_once": 32},
                       config=ThreeTiles)(softmax)  # fmt: skip
    calls = [of_op(registry.find_spec(op), "float32", {"shape": (4, n)}) for n in lengths for op in ops]
    found = [(g.cases[0].timed, g.key["n"]) for g in groups_of(calls, "cpu", "mine", None)]
    assert found == [(op, n) for n in lengths for op in ops]


def test_an_op_without_a_key_does_not_end_the_tuning_of_others(caplog):
    """A suite has calls of ops whose kernels are other ops', and whose tiles are in their tables."""
    keyless = "logsumexp"
    registered().implements(keyless, config=ThreeTiles)(softmax)
    (tabled,) = asked()
    calls = [of_op(registry.find_spec(keyless), "float32", {"shape": (4, 40)}), tabled]
    assert [g.cases for g in groups_of(calls, "cpu", "mine", None)] == [(tabled,)]
    assert f"{keyless} on mine declares no key" in caplog.text


def test_calls_of_one_key_are_judged_together():
    registered()
    calls = asked(shape=(4, 40)) + asked(shape=(9, 40)) + asked(shape=(4, 48))
    assert [len(g.cases) for g in groups_of(calls, "cpu", "mine", None)] == [2, 1]
    found, _, _ = tuned(asked=calls)
    assert [len(f.rows) for f in found] == [2, 1] and len({f.rows[0]["call"] for f in found}) == 2


def test_each_call_is_held_against_its_own_best(own_cache):
    """What is best for most calls of a key is not best for all, and the loss of each says so."""

    def picky(call, tiling):
        y = softmax(call, {"rows_at_once": 32})
        many = call.dims["shape"][0] > 5
        time.sleep(0.01 if many == (tiling["rows_at_once"] == 32) else 0.0)
        return y

    registered(picky, config=TwoTiles)
    found, _, _ = tuned(asked=asked(shape=(4, 40)) + asked(shape=(9, 40)))
    few, many = found[0].rows
    assert few["best_tiling"] == {"rows_at_once": 32} and few["loss"] == 0
    assert many["best_tiling"] == {"rows_at_once": 64} and many["loss"] > 0.3


def test_a_call_that_is_begun_with_has_one_batch_tried():
    """However little its share of the time is: that nothing was tried would be no loss of nothing."""

    class Hurried(SearchPlan):
        @property
        def over(self):
            return next(over)

    registered()
    over = itertools.chain([False], itertools.repeat(True))
    (finding,), _, _ = tuned(Hurried(batch=2))
    row = finding.rows[0]
    assert finding.best == {"rows_at_once": 64} and (row["tried"], row["exhausted"]) == (2, False)
    assert searched(row)
    over = itertools.repeat(False)
    (finding,), _, _ = tuned(Hurried(batch=1), fresh=True)
    assert finding.rows[0]["exhausted"] and finding.rows[0]["wrong"] == 1


def test_a_row_for_which_nothing_was_tried_says_nothing_of_loss():
    nothing = {"tried": 1, "refused": 0, "exhausted": False}
    assert not searched(nothing) and searched({**nothing, "exhausted": True}), "there is no other tiling"
    assert searched({**nothing, "refused": 3}) and searched({**nothing, "tried": 2})
    older = {"tried": 1, "refused": 0}
    assert searched(older) and not searched(older, 3), "of a run whose time was over"


def test_losses_of_calls_that_had_no_time_are_not_shown(own_cache, monkeypatch):
    """As of a run that was cut: they are counted, and are no losses of nothing."""
    rows = [
        {"target": "cpu", "family": "rows", "default": 1.0, "best": b, "loss": 1 / b - 1, "tried": t, "refused": 0,
         "exhausted": t > 1}
        for b, t in ((0.5, 9), (0.8, 7), (1.0, 1))
    ]  # fmt: skip
    said: list[Any] = []
    monkeypatch.setattr("portakern.cli.tune.show_table", lambda title, heads, lines: said.extend([heads, *lines]))
    monkeypatch.setattr("portakern.cli.tune.say", lambda text, style=None: said.append(text))
    from portakern.cli.tune import _show_losses

    _show_losses(rows)
    assert dict(zip(said[0], said[1], strict=True)) == {
        "target": "cpu", "family": "rows", "calls": "2", "tried, median": "8", "median": "62.5%", "worst": "100.0%",
        "beyond 5%": "2", "beyond 15%": "2", "gain": "1.581",
    }  # fmt: skip
    assert said[2].startswith("1 calls were not tuned, the time ended")


def test_what_the_time_does_not_reach_is_counted():
    registered()
    found, left, _ = tuned(SearchPlan(deadline=time.monotonic() - 1))
    assert not found and left == 1


def test_drawn_calls_are_the_same_for_a_seed_and_within_limits():
    for family, rule in families().items():
        one, same = (draw(family, 6, 1, ["bfloat16"]) for _ in range(2))
        assert [a.text for a in one] == [a.text for a in same] != [a.text for a in draw(family, 6, 2, ["bfloat16"])]
        for a in one:
            assert max(np.prod(shape) for shape, _, _ in a.signature["arrays"].values()) <= rule["most_elements"]
    with pytest.raises(SpecError, match="family 'x' is unknown; expected one of"):
        draw("x", 1, 0, ["bfloat16"])


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["--budget", "soon"], "--budget is 'soon'; expected a time, e.g. 90, 90s, 5m or 1h"),
        (["--loss", "matmul", "matmul"], "--loss measures random calls"),
        (["matmul", "--target", "h100"], "target 'h100' is unknown"),
        (["matmul", "--suite", "rows", "--shape", "shape=3x4"], "pass one of them"),
        (["matmul", "--dtype", "bf16"], "--dtype is 'bf16'"),
    ],
)
def test_bad_input_ends_in_words(command, words):
    result = CliRunner().invoke(cli.app, ["tune", *command])
    assert isinstance(result.exception, SpecError) and words in str(result.exception), result.output


def test_nothing_is_left_of_a_lock_that_another_holds(own_cache, monkeypatch):
    import filelock

    path = own_cache / "tuned" / "mine" / "cpu.json"
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.05)
    with filelock.FileLock(path.with_name(f".{path.name}.lock")), pytest.raises(SpecError, match="held the lock"):
        store.keep(path, "softmax", "tests", [row(1)])
    assert not path.exists() and os.listdir(path.parent) == [f".{path.name}.lock"]
