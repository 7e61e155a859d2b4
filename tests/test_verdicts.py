"""What a verdict says of what was not asked, of what was refused, and of where a wrong value came from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import portakern as pk
from portakern import testing
from portakern.cli import app
from portakern.testing import edges, progress
from portakern.testing.coverage import PARTS
from portakern.testing.report import LEAST, Report
from portakern.testing.runner import subject_of
from tests.test_cli import run


def right(x, axis=-1):
    return pk.op("softmax", backend="reference")(x, axis=axis)


def overflows(x, axis=-1):
    with np.errstate(all="ignore"):
        e = np.exp(x)
        return e / e.sum(axis=axis, keepdims=True)


def test_one_case_is_no_word_on_the_edges_that_it_did_not_visit():
    report = pk.check("softmax", fn=right, max_examples=1)
    assert report.passed and report.not_covered.keys() <= {*PARTS}
    every = [*edges(pk.op("softmax").spec)]
    assert len(report.not_covered["edges"]) >= len(every) - 1
    assert {"float16", "bfloat16"} <= {*report.not_covered["dtypes"]}
    for said in (str(report), report.verdict):
        assert f"not covered: {len(report.not_covered['edges'])} of {len(every)} edges" in said
    assert ", ".join(report.not_covered["edges"]) in str(report)
    assert report.to_dict()["not_covered"] == {what: [*names] for what, names in report.not_covered.items()}
    more = report.merge(pk.check("softmax", fn=right, max_examples=30, seed=1))
    assert len(more.not_covered.get("edges", ())) < len(report.not_covered["edges"])


def test_a_variant_that_nobody_ran_is_not_visited():
    report = pk.check("attention", backend="pallas", variant="tpu", max_examples=1)
    others = {f.name for f in pk.backends()["pallas"].families_with("attention")} - {"tpu"}
    assert {*report.not_covered.get("variants", ())} == others


def test_the_default_covers_all_of_an_ops_contract():
    for op in ("softmax", "layernorm", "matmul_vjp"):
        report = pk.check(op, backend="reference")
        assert report.passed and {*report.not_covered} <= {"dtypes"}, report.not_covered
        assert {*report.not_covered.get("dtypes", ())} <= {"float64"}


def test_the_command_line_says_what_was_not_covered(tmp_path):
    file = tmp_path / "found.json"
    found = run(app, ["check", "softmax", "--backend", "reference", "--max-examples", "2", "--json", str(file)])
    assert found.exit_code == 0
    assert "not covered on reference" in found.output and "tiles_of_minus_inf" in found.output
    (row,) = json.loads(file.read_text())["rows"]
    assert "tiles_of_minus_inf" in row["not_covered"]["edges"]


def test_wrong_values_are_told_before_promises_and_the_worst_error_counts_them():
    report = pk.check("softmax", fn=overflows, dtypes=["float32"])
    assert [f.kind for f in report.failures] == ["bounds", "promises"]
    assert report.worst == {"y": np.inf} and report.worst_case == report.failures[0].case
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["worst"]["y"] > 1e300
    assert Report.merge(*[pk.check("softmax", fn=f) for f in (right, overflows)]).failures[0].kind == "bounds"
    doubled = pk.check("softmax", fn=lambda x, axis=-1: 2 * right(x, axis=axis), max_examples=5)
    assert doubled.failures[0].kind == "bounds" and doubled.worst["y"] > 1 and doubled.examples >= 1


def test_a_check_that_was_never_begun_did_not_fail():
    (report,) = testing.check_all([("softmax", "reference", None)], 1, lambda *_: None, seconds=0.0, max_examples=20)
    assert (report.outcome, report.passed) == ("not run", False) and report.verdict.startswith("not run")
    assert not report.laws and {f"law {n}" for n in pk.op("softmax").spec.laws} <= {*report.not_reached}


def test_a_budget_ends_between_cases_and_laws():
    def slow(x, axis=-1):
        time.sleep(0.02)
        return right(x, axis=axis)

    start = time.perf_counter()
    report = pk.check("softmax", fn=slow, seconds=0.3, max_examples=400)
    assert time.perf_counter() - start < 2.5 and 0 < report.examples < 100
    assert report.examples + report.left_out == 400
    report = pk.check("softmax", fn=slow, seconds=0.05, max_examples=60)
    assert report.outcome == "unfinished" and not report.laws and {*report.left_out_by_name} >= {"law shift_invariant"}


def test_a_failing_case_is_made_smaller_within_the_time_alone():
    """Without that limit 40 cases more are tried here."""
    calls = []

    def wrong(x, axis=-1):
        calls.append(x.shape)
        time.sleep(0.02)
        return np.full_like(x, np.nan) if x.size > 40 and x.shape[-1] % 5 == 3 else right(x, axis=axis)

    report = pk.check("softmax", fn=wrong, seconds=0.3, max_examples=40, dtypes=["float32"])
    assert report.outcome == "wrong" and len(calls) < 30


class Refusing:
    """Takes so many elements."""

    refusals = ("too many",)

    def __init__(self, most):
        self.most = most

    def __call__(self, x, axis=-1):
        if x.size > self.most:
            raise pk.UnsupportedError("cannot: too many elements")
        return right(x, axis)


def test_a_kernel_that_refuses_nearly_all_is_not_right():
    report = pk.check("softmax", fn=Refusing(1))
    assert 0 < report.compared < LEAST * (report.compared + sum(report.refused.values())) and not report.failures
    assert not report.passed and report.outcome == "mostly refused" and report.verdict.startswith("mostly refused: ")
    report = pk.check("softmax", fn=Refusing(40))
    assert report.passed and report.outcome == "right"
    (caveat,) = [words for words in report.caveats if "were refused" in words]
    assert caveat in str(report) and caveat in report.to_dict()["caveats"]


def test_what_takes_one_dtype_alone_may_still_pass():
    spec = pk.op("softmax").spec
    for dtype in spec.dtypes:
        if dtype != "float64":

            def one(x, axis=-1, dtype=dtype):
                if x.dtype.name != dtype:
                    raise pk.UnsupportedError(f"cannot: another dtype than {dtype}")
                return right(x, axis)

            one.refusals = ("another dtype",)
            report = pk.check("softmax", fn=one, max_examples=60)
            assert report.passed and {*report.not_covered["dtypes"]} == {*spec.dtypes} - {dtype}


def test_arguments_that_were_never_asked_are_conceded():
    spec = pk.op("attention").spec
    names = [a.name for a in spec.arrays if a.optional] + [o.name for o in spec.options]
    report = pk.check("attention", fn=lambda q, k, v: pk.op("attention", backend="reference")(q, k, v), max_examples=2)
    assert report.not_required[0] == f"{', '.join(names)} (never passed)"
    assert report.not_required[0] in str(report) and not {*names} & {*report.not_covered.get("arguments", ())}
    report = pk.check(
        "rmsnorm", fn=lambda x, *, eps=1e-6: x, shapes=[{"x": (3, 5)}], options={"rounding": "before_weight"}
    )
    assert report.not_required[0] == "weight (never passed)"


def nothing_written(x, axis=-1):
    import torch

    return torch.empty(x.shape, dtype=x.dtype)


def zero_by_zero(x, axis=-1):
    import torch

    return (torch.softmax(x.double(), axis) * 0 / 0).to(x.dtype).contiguous()


def another_stride(x, axis=-1):
    """Takes two columns to lie side by side."""
    import torch

    if x.dim() == 2 and x.stride(1) == 2:
        x = torch.as_strided(x, x.shape, (x.stride(0), 1))
    return torch.softmax(x.double(), axis).to(x.dtype).contiguous()


@pytest.mark.parametrize(
    ("fn", "which"), [(nothing_written, "unwritten"), (zero_by_zero, "nan"), (another_stride, "beside")]
)
def test_where_a_nan_came_from_is_told_by_calls_over_other_memory(fn, which):
    pytest.importorskip("torch")
    report = pk.check("softmax", fn=fn, framework="torch", dtypes=["float32"], shrink=False, promises=False)
    assert report.failures[0].cause == which, report.failures
    assert ("was never written" in report.failures[0].explanation) == (which == "unwritten")


def test_a_line_that_reproduces_names_what_is_set_in_the_environment(monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("triton")  # imported while the variable is set, it would be interpreted in later tests too
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    report = pk.check("softmax", fn=zero_by_zero, framework="torch", max_examples=3, shrink=False)
    assert "  # in a process with " in report.failures[0].reproduce
    assert "TRITON_INTERPRET=1" in report.failures[0].reproduce
    compile(report.failures[0].reproduce, "line", "eval")
    line = subject_of("softmax", backend="triton").reproduce("{}")
    assert "TRITON_INTERPRET=1 " in line.partition("portakern check")[0]


LAUNCH = """
import torch, triton, triton.language as tl
import portakern as pk

@triton.jit
def copy(x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, tl.load(x + i))

def softmax(x, axis=-1):
    y = torch.empty(x.shape, dtype=x.dtype)
    copy[(1,)](x, y, 16)
    return y

print(pk.check("softmax", fn=softmax, framework="torch", max_examples=1).failures[0])
"""


def test_a_launch_without_a_gpu_says_what_to_set(tmp_path):
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    file = tmp_path / "launch.py"
    file.write_text(LAUNCH)
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, file], capture_output=True, text=True, env=environment, timeout=120)
    assert "0 active drivers" in ran.stdout and "set TRITON_INTERPRET=1" in ran.stdout, ran.stdout + ran.stderr


def test_a_check_shows_how_far_it_is_where_somebody_waits(monkeypatch, capsys):
    clock = iter(range(10**6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    pk.check("softmax", fn=right, max_examples=20)
    assert not capsys.readouterr().err, "a program waits for nothing"
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    pk.check("softmax", fn=right, max_examples=20)
    said = capsys.readouterr().err
    assert "of 20 cases, " in said and said.startswith("\r") and said.endswith(" \r")
    pk.check("softmax", fn=right, max_examples=20, progress=lambda done: None)
    assert not capsys.readouterr().err


def test_the_command_line_says_how_far_it_is_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(progress.Tally, "EVERY", 0.0)
    found = run(app, ["check", "softmax", "swiglu", "--backend", "reference", "--max-examples", "5"])
    assert "10 of 10 cases, 2 of 2 checks done" in found.stderr and "of 2 checks done" not in found.stdout
