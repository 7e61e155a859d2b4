"""The comparison of rules that judge kernels: each rule does what its source says, portakern's finds every kind of
cheat and leaves right kernels of unusual kinds alone. The whole is ``python -m benchmarks.judges``."""

import logging
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch", reason="the rules compare with PyTorch, which is not installed: pip install torch")
pytest.importorskip("jax", reason="JAXBench's rule compares with JAX, which is not installed: pip install jax")

ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:  # importing by path leaves siblings unseen
    sys.path.insert(0, str(ROOT))

from benchmarks.judges import __main__ as command  # noqa: E402
from benchmarks.judges import corpus, stale  # noqa: E402
from benchmarks.judges import rule as judging  # noqa: E402
from benchmarks.judges.corpus import cheats, level_1, right  # noqa: E402
from benchmarks.judges.corpus.planted import kernel  # noqa: E402
from benchmarks.judges.rules import backendbench, gpuemu, portakern, rules  # noqa: E402
from benchmarks.judges.subject import Candidate, Subject  # noqa: E402
from benchmarks.judges.working import Task, work  # noqa: E402
from benchmarks.kernelbench import beside_earlier  # noqa: E402
from maint import store  # noqa: E402
from portakern import sources  # noqa: E402
from portakern.results import read, record, write  # noqa: E402


# ---------------------------------------------------------------------------------------------- functions of the tests
@pytest.fixture(autouse=True)
def kept_level():
    """A verdict is given in a process of its own elsewhere, which silences what portakern says there."""
    logger = logging.getLogger("portakern")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def a_few_samples(monkeypatch):
    """PyTorch's own table of ops takes seconds to import; the whole comparison has all of its samples."""
    rows = np.random.default_rng(0).normal(size=(6, 40)).astype(ml_dtypes.bfloat16)
    arrays = {"x": rows, "weight": rows[0], "bias": rows[1]}
    monkeypatch.setattr(backendbench, "samples", lambda: {"layernorm": [({"x": rows}, {}), (arrays, {"eps": 0.5})]})


def exact_softmax(x):
    e = np.exp(x.astype(np.float64) - x.astype(np.float64).max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def exact_layernorm(x, weight, bias, eps):
    d = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    y = d / np.sqrt((d * d).mean(-1, keepdims=True) + eps)
    y = y if weight is None else y * weight.astype(np.float64)
    return y if bias is None else y + bias.astype(np.float64)


def softmax_off(by, as_dtype=None):
    """Too large by ``by``, a number or one for each dtype."""

    def fn(x, *, axis=-1):
        off = by.get(x.dtype.name, 0.0) if isinstance(by, dict) else by
        return np.moveaxis(exact_softmax(np.moveaxis(x, axis, -1)) + off, -1, axis).astype(as_dtype or x.dtype)

    return fn


def layernorm_off(by, as_dtype=None):
    def fn(x, weight=None, bias=None, *, eps=1e-5):
        return (exact_layernorm(x, weight, bias, eps) + by).astype(as_dtype or x.dtype)

    return fn


def swiglu_off(by):
    def fn(gate, up):
        g = gate.astype(np.float64)
        return (g / (1 + np.exp(-g)) * up + by).astype(gate.dtype)

    return fn


def matmul_times(factor, plus=0.0, as_dtype=None):
    def fn(a, b):
        exact = (a.astype(np.float64) @ b.astype(np.float64)) * factor + plus
        return exact.astype(np.float32).astype(as_dtype or a.dtype)

    return fn


def with_nan(fn):
    def faulty(x, weight=None, bias=None, *, eps=1e-5):
        y = fn(x, weight, bias, eps=eps)
        y[..., -1] = np.nan
        return y

    return faulty


class SecondCall:
    """Right on every other call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, weight=None, *, eps=1e-6):
        self.calls += 1
        y = right.sum_of_squares_by_dot(x, weight, eps=eps)
        return y if self.calls % 2 else y * 0


def input_written(x, weight=None, bias=None, *, eps=1e-5):
    y = layernorm_off(0.0)(x, weight, bias, eps=eps)
    x[...] = 0
    return y


class TorchProduct:
    """PyTorch's product in float32: GPU MODE holds float16 to 1e-5, so that nothing else passes, better or not."""

    framework = "torch"

    def __call__(self, a, b):
        return (a.float() @ b.float()).to(a.dtype)


F32, F64 = np.float32, np.float64
PASSES = [
    ("kernelbench-float32", "layernorm", layernorm_off(0.9e-4)),
    ("kernelbench-float32", "layernorm", input_written),
    ("kernelbench-bfloat16", "softmax", softmax_off(0.009)),
    ("backendbench", "layernorm", layernorm_off(0.004)),
    ("flashinfer-bench", "matmul", matmul_times(1.005)),
    ("flashinfer-bench", "layernorm", layernorm_off(0.004)),
    ("gpu-mode", "matmul", TorchProduct()),
    ("gpu-mode", "layernorm", layernorm_off(0.019)),
    ("gpu-mode", "layernorm", layernorm_off(0.0, F64)),
    ("robust-kbench", "swiglu", swiglu_off(0.8e-5)),
    ("jaxbench", "softmax", softmax_off(0.009)),
    ("jaxbench", "softmax", softmax_off(0.0, F32)),
    ("helion-examples", "softmax", softmax_off(0.09)),
    ("helion-examples", "layernorm", layernorm_off(0.0, F32)),
    ("helion-autotuner", "softmax", softmax_off(0.009)),
    ("helion-autotuner", "matmul", matmul_times(1.0, plus=0.1)),
    ("gpuemu-default", "softmax", softmax_off({"float32": 0.9e-5, "float16": 0.4e-3})),
    ("gpuemu-calibrated", "rmsnorm", kernel("rmsnorm", {}, truncates=False)),
]
FAILS = [
    ("kernelbench-float32", "layernorm", layernorm_off(1.5e-4), "Output mismatch"),
    ("kernelbench-float32", "layernorm", with_nan(layernorm_off(0.0)), "Output mismatch"),
    ("kernelbench-float32", "softmax", lambda x: exact_softmax(x)[..., :-1].astype(x.dtype), "shape mismatch"),
    ("kernelbench-float32", "softmax", softmax_off(0.0, F64), "did not match"),
    ("kernelbench-bfloat16", "softmax", softmax_off(0.011), "Output mismatch"),
    ("backendbench", "layernorm", layernorm_off(0.05), "not close"),
    ("backendbench", "layernorm", layernorm_off(0.0, F32), "dtype"),
    ("flashinfer-bench", "matmul", matmul_times(1.02), "INCORRECT_NUMERICAL"),
    ("flashinfer-bench", "layernorm", layernorm_off(0.0, F32), "INCORRECT_DTYPE"),
    ("flashinfer-bench", "layernorm", with_nan(layernorm_off(0.0)), "not finite"),
    ("gpu-mode", "matmul", matmul_times(1.001), "mismatched elements"),
    ("gpu-mode", "layernorm", layernorm_off(0.03), "mismatched elements"),
    ("gpu-mode", "layernorm", with_nan(layernorm_off(0.0)), "mismatched elements"),
    ("robust-kbench", "swiglu", swiglu_off(2e-5), "not close"),
    ("robust-kbench", "rmsnorm", SecondCall(), "not close"),
    ("jaxbench", "softmax", softmax_off(0.011), "values differ"),
    ("jaxbench", "layernorm", with_nan(layernorm_off(0.0)), "values differ"),
    ("helion-examples", "softmax", softmax_off(0.11), "not close"),
    ("helion-examples", "layernorm", layernorm_off(0.05), "not close"),
    ("helion-autotuner", "softmax", softmax_off(0.011), "not close"),
    ("helion-autotuner", "layernorm", layernorm_off(0.0, F32), "dtype"),
    ("helion-autotuner", "matmul", matmul_times(1.0, plus=0.6), "not close"),
    ("gpuemu-default", "softmax", softmax_off({"float32": 1.2e-5}), "float32: diff=1."),
    ("gpuemu-default", "softmax", softmax_off({"float16": 2e-3}), "float16: diff="),
    ("gpuemu-default", "softmax", softmax_off(0.0, F64), "dtype mismatch"),
    ("gpuemu-calibrated", "matmul", matmul_times(1.001), "Tolerance exceeded"),
]


def verdict(name, op, fn):
    framework = getattr(fn, "framework", "numpy")
    return rules()[name].judge(Subject("test", "by hand", op, lambda: fn, framework, right=True))


@pytest.mark.parametrize(("name", "op", "fn"), PASSES, ids=[f"{n}-{op}-{i}" for i, (n, op, _) in enumerate(PASSES)])
def test_a_rule_lets_pass_what_its_source_does(name, op, fn):
    found = verdict(name, op, fn)
    assert found.rejected is False, found.why


@pytest.mark.parametrize(
    ("name", "op", "fn", "why"), FAILS, ids=[f"{n}-{op}-{i}" for i, (n, op, *_) in enumerate(FAILS)]
)
def test_a_rule_rejects_what_its_source_does(name, op, fn, why):
    found = verdict(name, op, fn)
    assert found.rejected and why in found.why, found.why


def test_every_rule_is_pinned_by_a_pass_and_a_fail():
    others = set(rules()) - {"portakern"}
    assert {n for n, *_ in PASSES} == {n for n, *_ in FAILS} == others
    assert all(r.sources and r.rule and r.inputs for r in rules().values())


def test_robust_kbench_drops_a_task_whose_results_are_all_near_0():
    found = verdict("robust-kbench", "softmax", softmax_off(0.0))
    assert found.rejected is None and "filter" in found.why


def test_a_task_with_an_option_that_a_function_lacks_is_not_posed():
    without = Candidate(Subject("test", "plain", "attention", lambda: right.backwards_attention))
    every = Candidate(Subject("test", "simulated", "attention", lambda: kernel("attention", {}, truncates=False)))
    rule = rules()["jaxbench"]
    assert [t.options for t in rule.tasks_for(every)] == [{"is_causal": True}] * 2
    assert [(t.own, dict(t.options)) for t in rule.tasks_for(without)] == [("", {})]


def test_what_a_candidate_raises_rejects_it_and_what_a_rule_raises_does_not(monkeypatch):
    def broken(x):
        raise ZeroDivisionError("of the kernel's own")

    assert "ZeroDivisionError" in verdict("kernelbench-float32", "softmax", broken).why
    monkeypatch.setattr(judging, "wide", lambda arrays: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division"):
        verdict("kernelbench-float32", "softmax", softmax_off(0.0))


def test_a_miss_is_told_to_lie_in_the_comparison_or_in_the_inputs():
    def ended(x):  # right as long as no row is longer than a test has
        y = exact_softmax(x).astype(x.dtype)
        return y if x.shape[-1] < 10**6 else y * 0

    seen = rules()["jaxbench"].judge(Subject("test", "zeros", "softmax", lambda: lambda x: x * 0))
    unseen = rules()["jaxbench"].judge(Subject("test", "ended", "softmax", lambda: ended))
    assert (seen.rejected, seen.shown) == (False, True) and (unseen.rejected, unseen.shown) == (False, False)


def test_calibration_takes_a_right_kernels_own_errors():
    errors = [
        float(e.max())
        for _, e in gpuemu.largest(
            gpuemu.Candidate(gpuemu.simulated("softmax", {}, "c", right=True)), "softmax", "float32"
        )
    ]
    assert len(errors) == gpuemu.ITERATIONS
    assert gpuemu.calibrated("softmax", "float32") == pytest.approx(1.5 * np.percentile(errors, 95))


# ---------------------------------------------------------------------------------------------------- portakern's rule
@pytest.fixture
def few(monkeypatch):
    """A short check, on a shape of which its rows are past 1024 all the same."""
    monkeypatch.setattr(portakern, "EXAMPLES", dict.fromkeys(portakern.EXAMPLES, 12))
    monkeypatch.setattr(portakern, "ON_SHAPES", 3)


CHEATS = {kind: next(o for o in ("softmax", "rmsnorm") if o in ops) for kind, (_, ops, _) in cheats.KINDS.items()}


@pytest.mark.parametrize("kind", CHEATS)
def test_every_kind_of_cheat_is_caught(kind, few):
    subject = corpus.subjects()["cheats", f"{CHEATS[kind]} in torch: {kind}"]
    found = rules()["portakern"].judge(subject)
    assert found.rejected, kind
    assert found.why.startswith("promises:") or kind not in cheats.OF_PROMISES, found.why
    assert "bounds:" in found.why or kind in cheats.OF_PROMISES, found.why


SLOW = ("attention", "outer products")
QUICK = [n for n, (op, _) in right.NUMPY.items() if not {n, op} & {*SLOW}]


@pytest.mark.parametrize("name", QUICK)
def test_a_right_kernel_of_an_unusual_kind_passes(name, few):
    op, _ = right.NUMPY[name]
    found = rules()["portakern"].judge(corpus.subjects()["unusual", f"{op}: {name}"])
    assert not found.rejected, found.why


@pytest.mark.parametrize("name", ["36_RMSNorm_"])
def test_a_reference_of_level_1_is_right(name):
    assert name in {p.name for p in level_1.PROBLEMS}
    found = rules()["portakern"].judge(corpus.subjects()["level 1", name])
    assert not found.rejected, found.why


# ----------------------------------------------------------------------------------------------------------- the whole
def test_a_task_of_a_worker_is_a_verdict():
    done = work(Task("cheats", "softmax in torch: zeros", "jaxbench"))
    assert done["rejected"] is False and done["shown"] is True


def test_a_run_taken_up_again_gives_the_verdicts_of_other_sources_anew(tmp_path, monkeypatch):
    subjects = [s for s in corpus.subjects().values() if (s.group, s.op) == ("level 1", "softmax")]
    monkeypatch.setattr(corpus, "subjects", lambda: {(s.group, s.name): s for s in subjects})
    given = {"rejected": False, "why": "", "seconds": 2.0, "shown": None}
    (one,) = subjects
    tasks = {Task(one.group, one.name, r): given for r in rules()}
    command.save(tmp_path / "judges.json", tasks, len(tasks), 1.0)
    assert dict(command.kept(tmp_path / "judges.json")) == tasks
    of_rule = stale.of_rule
    monkeypatch.setattr(stale, "of_rule", lambda name: "another" if name == "gpu-mode" else of_rule(name))
    assert {*tasks} - {*dict(command.kept(tmp_path / "judges.json"))} == {Task(one.group, one.name, "gpu-mode")}
    monkeypatch.setattr(stale, "of_subject", lambda s: "another")
    assert not [*command.kept(tmp_path / "judges.json")]


def test_sources_of_a_verdict_are_its_rules_and_its_subjects(tmp_path):
    """In a checkout where one file differs, those verdicts alone are of other sources that it decides."""
    for name in ("benchmarks", "portakern", "specs", "backends", "tests"):
        shutil.copytree(
            ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("results", "__pycache__")
        )
    subjects = [*corpus.subjects().values()]

    def told(place=None):
        stale._of.cache_clear()
        with sources.unchanging():
            return {n: stale.of_rule(n, place) for n in rules()}, {
                (s.group, s.op): stale.of_subject(s, place) for s in subjects
            }

    here = told()

    def differ(texts):
        """What differs with more at the end of files, or a text in place of another."""
        before = {file: (tmp_path / file).read_text() for file in texts}
        for file, text in texts.items():
            more = before[file].replace(*text) if isinstance(text, tuple) else before[file] + text
            (tmp_path / file).write_text(more)
        there = told(tmp_path)
        for file, text in before.items():
            (tmp_path / file).write_text(text)
        return [{n for n in ours if ours[n] != theirs[n]} for ours, theirs in zip(here, there, strict=True)]

    rule, oracle = "benchmarks/judges/rules/gpu_mode.py", "backends/reference/rmsnorm.py"
    of_rules, ops = differ({rule: "\n# more words\n", oracle: ("1 / np.sqrt", "2 / np.sqrt")})
    assert not of_rules and ("cheats", "rmsnorm") in ops and not {op for _, op in ops} & {"softmax", "matmul"}
    assert differ({rule: "\nMORE = 1\n"}) == [{"gpu-mode"}, set()]
    of_rules, ops = differ(
        {"portakern/testing/verdict.py": "\nMORE = 1\n", "benchmarks/judges/corpus/cheats.py": "\nMORE = 1\n"}
    )
    assert of_rules == {"portakern"} and {group for group, _ in ops} == {"cheats"}


def test_what_is_kept_says_what_the_page_does():
    (run,) = (r for r in store.read(ROOT / store.FOLDER) if r.benchmark == "judges")
    rows = run.rows
    assert {r["kind"] for r in rows} >= set(cheats.KINDS) and {r["group"] for r in rows} == set(corpus.GROUPS)
    assert not [r["name"] for r in rows if set(r["seconds"]) != set(rules())], "take the run up again with --resume"
    caught = {(r["group"], r["name"]) for r in rows if r["verdicts"].get("portakern") == "rejected"}
    assert not [name for group, name in caught if group in ("unusual", "level 1")]
    missed = [r["name"] for r in rows if not r["right"] and (r["group"], r["name"]) not in caught]
    assert not missed


def test_a_problem_that_is_judged_anew_leaves_the_others_of_its_file(tmp_path):
    file, row = (
        tmp_path / "kernelbench.json",
        dict.fromkeys(("op", "verdict", "why"), "right")
        | {
            "seconds": 1.0,
            "load_seconds": 0.5,
            "cases": 60,
            "left_out": 0,
            "worst": {},
            "full_shapes": False,
            "not_required": [],
        },
    )
    ran = {"repository": "r", "repository_commit": "c0ffee", "left_out": {}, "wall_seconds": 10}

    def run(numbers, **others):
        rows = [row | {"problem": f"{n}_Softmax"} | others for n in numbers]
        write(file, beside_earlier(record("kernelbench", rows, command="c", device="H100", **ran), file))
        return {r["problem"]: r["why"] for r in read(file).rows}

    assert run([23, 4]) == {"23_Softmax": "right", "4_Softmax": "right"}
    assert run([23], why="anew") == {"4_Softmax": "right", "23_Softmax": "anew"}
    assert [r["problem"] for r in read(file).rows] == ["4_Softmax", "23_Softmax"]
    assert read(file).extra["wall_seconds"] == 20 and all("commit" in r for r in read(file).rows)
    ran["repository_commit"] = "another"
    assert run([36]) == {"36_Softmax": "right"}
