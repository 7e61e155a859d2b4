"""The checker: it passes right kernels, finds wrong ones, and hands out a line that shows the fault again."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import portakern as pk
from portakern import testing
from portakern.core import registry, serve
from portakern.core.targets import Target
from portakern.testing import Case, Limits
from portakern.testing.cases import LAYOUTS, REGIMES


def softmax_float32(x, axis=-1):
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
        return np.ascontiguousarray(e / e.sum(axis, keepdims=True))


def right(x, *, axis=-1):
    return softmax_float32(x, axis).astype(x.dtype)


WRONG = {
    "unshifted": (
        lambda x: (np.exp(x.astype(np.float32)) / np.exp(x.astype(np.float32)).sum(-1, keepdims=True)).astype(x.dtype),
        "y",
    ),
    "one percent off": (lambda x: (softmax_float32(x) * np.float32(1.01)).astype(x.dtype), "permitted error"),
    "wrong dtype": (lambda x: softmax_float32(x).astype(np.float64), "y is float64; expected"),
    "wrong shape": (lambda x: softmax_float32(x)[None].astype(x.dtype), "y has shape"),
    "transposed memory": (lambda x: np.asfortranarray(softmax_float32(x).astype(x.dtype)), "y is not contiguous"),
    "crash": (lambda x: 1 / 0, "raised ZeroDivisionError"),
    "a list": (lambda x: [1.0], "expected a numpy array"),
    "two outputs": (lambda x: (x, x), "2 outputs came back; expected 1"),
}


def writes_its_input(x):
    y = right(x)
    x[...] = 0
    return y


def never_the_same(x, state=[0]):  # noqa: B006
    state[0] += 1
    return np.nextafter(right(x), np.float32(state[0] % 2)).astype(x.dtype)


WRONG["writes its input"] = (writes_its_input, "input x was written to")
WRONG["different bits"] = (never_the_same, "different bits")


def test_a_right_function_passes_and_reports_its_share_of_the_bound():
    report = pk.check("softmax", fn=right, max_examples=60)
    assert report.passed and report.examples == 60 and 0.03 < report.worst["y"] <= 1
    assert any(k.startswith("float32 | normal | - | ") for k in report.cells) and report.layouts["transposed"]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_functions_fail_with_words(name):
    fn, words = WRONG[name]
    with np.errstate(all="ignore"):
        report = pk.check("softmax", fn=fn, max_examples=150, dtypes=["float32"])
    assert not report.passed and words in report.failures[0].what


def test_failures_shrink_and_replay():
    def drops_the_tail(x, *, axis=-1):
        return right(
            x
            if x.shape[axis] < 17 or axis not in (-1, x.ndim - 1)
            else np.concatenate([x[..., :-1], np.full_like(x[..., -1:], -np.inf)], -1),
            axis=axis,
        )

    report = pk.check("softmax", fn=drops_the_tail, max_examples=300)
    case = report.failures[0].case
    assert np.prod(json.loads(case)["shapes"]["x"]) <= 300
    again = testing.replay("softmax", case, fn=drops_the_tail)
    assert again.failures[0].what == report.failures[0].what
    assert testing.replay("softmax", case, fn=right).passed


strict = False


@contextmanager
def stricter():
    global strict
    strict = True
    try:
        yield
    finally:
        strict = False


def wrong_where_strict(call, tiling):
    return (
        softmax_float32(call.arrays["x"], call.options["axis"]).astype(call.dtype) * np.asarray(1 + strict, call.dtype),
    )


@pytest.mark.parametrize("registered", [True, False])
def test_the_line_for_a_backend_of_this_process_is_python(monkeypatch, registered):
    ours = pk.Backend("ours", "numpy", profiles={"strict": f"{__name__}:stricter"})
    ours.implements("softmax")(wrong_where_strict)
    if registered:
        monkeypatch.setattr(registry, "_registered", {"ours": ours})
    assert pk.check("softmax", backend=ours, max_examples=20, dtypes=["float32"]).passed
    report = pk.check(
        "softmax", backend="ours" if registered else ours, max_examples=20, dtypes=["float32"], profile="strict"
    )
    (failure,) = report.failures
    assert ("backend='ours'" if registered else "backend=...") in failure.reproduce
    if registered:
        assert eval(failure.reproduce, {"portakern": pk}).failures[0].what == failure.what
    assert testing.replay("softmax", failure.case, backend=ours).passed  # only in its profile is it wrong


def test_the_line_for_a_function_names_its_framework():
    pytest.importorskip("torch", reason="torch is not installed")
    report = pk.check("softmax", fn=lambda x: x, framework="torch", device="cpu", max_examples=20)
    assert report.failures[0].reproduce.endswith("fn=..., framework='torch', device='cpu')")


def test_the_line_for_a_backend_that_a_shell_finds_names_device_and_profile(monkeypatch):
    oracle = registry.backend("reference")
    strict = replace(oracle.families[0], profiles={"strict": f"{__name__}:stricter"})
    monkeypatch.setattr(oracle, "families", (strict,))
    monkeypatch.setattr(serve, "rounded_oracle", lambda call: (call.arrays["x"],))
    report = pk.check("softmax", backend="reference", device="cpu", profile="strict", max_examples=20)
    assert re.match(
        r"portakern check softmax --backend reference --device cpu --profile strict --case '\{.*\}'$",
        report.failures[0].reproduce,
    )


def test_a_function_has_no_profile():
    with pytest.raises(pk.SpecError, match="profile is 'strict'; a function has none"):
        pk.check("softmax", fn=right, profile="strict")


def test_optional_arguments_are_drawn_only_where_taken():
    def bare(x, *, eps=1e-5):
        x64 = x.astype(np.float64)
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(
                ((x64 - x64.mean(-1, keepdims=True)) / np.sqrt(x64.var(-1, keepdims=True) + eps)).astype(x.dtype)
            )

    report = pk.check("layernorm", fn=bare, max_examples=40)
    assert report.passed, report.failures


def test_check_takes_a_backend_or_a_function():
    for kwargs in ({}, {"backend": "reference", "fn": right}):
        with pytest.raises(pk.SpecError, match="either backend= or fn="):
            pk.check("softmax", **kwargs)
    with pytest.raises(pk.SpecError, match="framework is 'cupy'"):
        pk.check("softmax", fn=right, framework="cupy")
    with pytest.raises(pk.UnavailableError, match="serves no tpu here"):
        pk.check("softmax", backend="reference", device="tpu")


def test_functions_of_other_frameworks():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    report = pk.check(
        "softmax",
        fn=lambda x, axis=-1: torch.softmax(x.float(), axis).to(x.dtype).contiguous(),
        framework="torch",
        device="cpu",
        max_examples=30,
    )
    assert report.passed, report.failures


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("regime", REGIMES)
def test_cases_build_what_they_say(regime, layout, dtype):
    case = Case(dtype, {"x": (3, 4, 5)}, regime=regime, seed=3, layouts={"x": layout})
    spec = registry.find_spec("softmax")
    a, b = case.buffers(spec)["x"], Case.from_json(case.to_json()).buffers(spec)["x"]
    assert a.view().shape == (3, 4, 5) and a.view().dtype.name == dtype
    assert a.view().tobytes() == b.view().tobytes()
    if regime == "normal":
        assert np.isfinite(a.view().astype(float)).all()


def test_cases_survive_json():
    case = Case(
        "float16",
        {"q": (1, 2, 3, 4)},
        options={"window": (1, None)},
        wider=("bias",),
        masks={"bias": "mask"},
        tiling={"block_q": 16},
    )
    assert Case.from_json(case.to_json()) == case


def test_audit_sees_every_call_and_its_share_of_the_bound():
    x = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    softmax, matmul = pk.op("softmax"), pk.op("matmul")
    with testing.audit() as seen:
        softmax(x)
        pk.op("softmax", backend="reference")(x)
        matmul(x, x.T)
    assert seen.calls == {(softmax.spec.name, "reference"): 2, (matmul.spec.name, "reference"): 1}
    assert not seen.broken and 0 <= seen.worst["softmax"] <= 1


def test_limits_hold():
    seen = []

    def spy(a, b):
        seen.append((a.shape, b.shape))
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(a.dtype)

    with np.errstate(all="ignore"):
        pk.check("matmul", fn=spy, max_examples=40, dtypes=["float32"], limits=Limits(elements=50))
    assert seen and max(np.prod(s) for pair in seen for s in pair) <= 50


def test_target_reads_well():
    assert str(Target("cuda", "sm_90")) == "cuda sm_90" and str(Target("cpu")) == "cpu"
