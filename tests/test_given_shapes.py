"""Kernels that were written for one shape are judged on it; verdicts are told apart, and so is what they look like."""

import json
from collections import Counter

import numpy as np
import pytest

import portakern as pk
from portakern import testing
from portakern.core import registry
from portakern.testing import check_options, runner
from portakern.testing.fixed import TELLING
from portakern.testing.layouts import BESIDE
from portakern.testing.regimes import VALUE_REGIMES
from portakern.testing.report import Report

SHAPE = (24, 1025)
"""Rows that no tile divides."""


@pytest.fixture(autouse=True)
def soon_large(monkeypatch):
    """More elements than are compared one by one are few here."""
    monkeypatch.setattr("portakern.testing.sampled.LARGE", 20_000)
    monkeypatch.setattr("portakern.testing.sampled.WORK", 60_000)


HOW = {"shapes": [{"x": SHAPE}], "dtypes": ["float32"], "layouts": ["contiguous", "shifted"], "max_examples": 20}


def right(x):
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)


def zeros(x):
    return np.zeros_like(x)


def sixteen_bits(x):
    import ml_dtypes

    return right(x).astype(ml_dtypes.bfloat16).astype(x.dtype)


def no_maximum(x):
    with np.errstate(all="ignore"):
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def one_element(x):
    y = right(x)
    y[17, 901] *= np.float32(1.5)
    return y


def reversed_rows(x):
    return np.ascontiguousarray(right(x)[::-1])


def doubled(x):
    return right(x) * np.float32(1.25)


def plants_nan(x):
    y = right(x)
    y[:, 1024:] = np.nan
    return y


def by_address(x, kept={}):  # noqa: B006
    at = x.ctypes.data, x.shape
    if at not in kept:
        kept[at] = x, right(x)
    return kept[at][1].copy()


WRONG = {
    zeros: "zeros",
    sixteen_bits: "downgraded",
    no_maximum: "overflow",
    one_element: "part",
    reversed_rows: "moved",
    doubled: "scaled",
    plants_nan: "nan",
    by_address: "kept",
}


def test_a_right_kernel_passes_in_every_regime_and_every_concession_is_told():
    def softmax(x):
        assert x.shape == SHAPE
        return right(x)

    report = pk.check("softmax", fn=softmax, **{**HOW, "max_examples": 30}, seed=3)
    assert report.outcome == "right" and report.examples == 30 and not report.left_out, report.failures
    assert {cell.split(" | ")[1] for cell in report.combinations} == {*VALUE_REGIMES}
    assert {"nan_elements", "rising_rows", "maximum_at_a_tile_border", "tiles_of_minus_inf"} <= {*report.edges}
    assert {*report.layouts} == {"contiguous", "shifted"}
    assert report.not_required == (
        "axis (never passed)",
        "shapes other than x [24, 1025]",
        "memory layouts other than contiguous, shifted",
        "laws, which need other shapes",
    )


@pytest.mark.parametrize("fn", WRONG, ids=lambda f: f.__name__)
def test_wrong_kernels_are_found_and_say_what_they_look_like(fn):
    report = pk.check("softmax", fn=fn, **HOW, promises=False, edges=False)
    assert report.outcome == "wrong" and report.failures[0].cause == WRONG[fn], report.failures
    assert json.loads(report.failures[0].case)["shapes"] == {"x": [*SHAPE]}
    again = testing.replay("softmax", report.failures[0].case, fn=fn, promises=False, edges=False)
    assert again.failures[0].kind == "bounds"


def test_an_element_that_the_oracle_did_not_compute_is_compared_with_what_stands_for_it():
    report = pk.check("softmax", fn=one_element, **{**HOW, "max_examples": 1})
    assert "y[17, 901] is " in report.failures[0].what and report.examples == 1
    case = testing.Case("float32", {"a": (180, 60), "b": (60, 170)}, seed=5)
    whole = lambda a, b: (a.astype(np.float64) @ b).astype(a.dtype)  # noqa: E731
    assert testing.replay("matmul", case, fn=whole).passed

    def one_tile(a, b):
        c = whole(a, b)
        c[160:180, 150:170] = c[100:120, 150:170]
        return c

    report = testing.replay("matmul", case, fn=one_tile)
    assert report.outcome == "wrong" and report.failures[0].explanation == (
        "wrong in a part, 160 to the end of 180 along axis 0, 150 to the end of 170 along axis 1"
    )


def changed_input(x):
    y = right(x)
    x[0, 0] = 7
    return y


def beyond_the_end(x):
    y, memory = right(x), x
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    memory = memory.view(x.dtype)
    if memory.size > x.size:
        memory[BESIDE + x.size] = 0
    return y


def one_buffer(x, kept=np.empty(SHAPE, np.float32)):  # noqa: B008
    kept[...] = right(x)
    return kept


def never_the_same(x, state=[0]):  # noqa: B006
    state[0] += 1
    return np.nextafter(right(x), np.float32(state[0] % 2))


BROKEN = {changed_input: "inputs", beyond_the_end: "outside", one_buffer: "kept", never_the_same: "same_bits"}


@pytest.mark.parametrize("fn", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_promise_is_named_and_may_be_let_go(fn):
    report = pk.check("softmax", fn=fn, **HOW)
    assert report.outcome == "broke a promise" and report.failures[0].cause == BROKEN[fn], report.failures
    assert testing.verdict.PROMISES[BROKEN[fn]] in str(report.failures[0])
    others = [p for p in testing.verdict.PROMISES if p != BROKEN[fn]]
    report = pk.check("softmax", fn=fn, **HOW, promises=others)
    assert fn is changed_input or report.outcome == "right", report.failures
    assert f"promise {BROKEN[fn]}: {testing.verdict.PROMISES[BROKEN[fn]]}" in report.not_required


def one_term_after_the_other(x):
    """Right, by the longest chain of additions that there is."""
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / np.cumsum(e, -1, dtype=np.float32)[..., -1:]


def a_term_short(x):
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / np.cumsum(e[..., :-1], -1, dtype=np.float32)[..., -1:]


def test_sums_in_another_order_break_a_promise_and_are_right_where_nobody_made_it():
    how = {**HOW, "shapes": [{"x": (24, 4096)}], "max_examples": 12}
    report = pk.check("softmax", fn=one_term_after_the_other, **how)
    assert (report.outcome, report.failures[0].cause) == ("broke a promise", "sums"), report.failures
    assert "elements are out of bounds" in report.failures[0].what
    for promises in (("inputs", "kept"), False):
        report = pk.check("softmax", fn=one_term_after_the_other, **how, promises=promises)
        assert report.outcome == "right", report.failures
        assert pk.check("softmax", fn=a_term_short, **how, promises=promises).outcome == "wrong"
    case = testing.Case("float32", {"x": (24, 4096)}, seed=1)
    assert testing.replay("softmax", case, fn=one_term_after_the_other).passed  # by its bounds, and random as any sum's
    case = testing.Case("float32", {"x": (24, 4096)}, regime="constant", seed=1)
    assert testing.replay("softmax", case, fn=one_term_after_the_other).passed


def begins_at_the_bias(x, weight, bias):
    """Right, but that each partial sum rounds the bias too."""
    return one_by_one(x, weight, bias + np.zeros((len(x), 1), np.float32))


def another_bias(x, weight, bias):
    return one_by_one(x, weight, bias * np.float32(1 + 2.0**-10) + np.zeros((len(x), 1), np.float32))


def one_by_one(x, weight, z):
    with np.errstate(all="ignore"):
        for step in range(x.shape[1]):
            z = z + x[:, step, None] * weight[None, :, step]
    return z


def test_what_is_added_to_a_sum_comes_last_or_a_promise_is_broken():
    how = {**HOW, "shapes": [{"x": (9, 20), "weight": (30, 20), "bias": (30,)}]}
    report = pk.check("linear", fn=begins_at_the_bias, **how, edges=["a_bias_far_above_the_products"])
    assert (report.outcome, report.failures[0].cause) == ("broke a promise", "sums"), report.failures
    loose = {**how, "promises": ("inputs",)}
    assert pk.check("linear", fn=begins_at_the_bias, **loose).outcome == "right"
    assert pk.check("linear", fn=another_bias, **loose).outcome == "wrong"


def refuses(x):
    raise ValueError("no rows of that length")


def asserts(x):
    assert x.shape[-1] % 128 == 0, "rows of whole tiles"


def crashes(x):
    return np.zeros(3) @ np.zeros(4)


def exhausts(x):
    return np.empty((1 << 50,), np.float32)


ENDS = {refuses: "refused", asserts: "refused", crashes: "crashed", exhausts: "ran out of memory"}


@pytest.mark.parametrize("fn", ENDS, ids=lambda f: f.__name__)
def test_what_is_no_output_is_told_apart(fn):
    report = pk.check("softmax", fn=fn, **HOW)
    assert report.outcome == ENDS[fn] and report.verdicts == dict.fromkeys(("bounds", "edges", "promises"))
    assert report.to_dict()["outcome"] == ENDS[fn] and ENDS[fn] in report.verdict


def test_other_edges_are_let_go_where_the_caller_allows_them():
    def drops_nan(x):
        return np.nan_to_num(right(x))

    assert pk.check("softmax", fn=drops_nan, **HOW).outcome == "other edges"
    report = pk.check("softmax", fn=drops_nan, **HOW, edges=False)
    assert report.outcome == "right" and report.verdicts["edges"] is None
    assert "the formula's results for NaN and infinities" in report.not_required


def test_arguments_are_given_where_shapes_name_them():
    seen = set()

    def norm(x, weight=None, bias=None, *, eps=1e-5):
        seen.add((x.shape, weight is not None, bias is not None, x.dtype == getattr(weight, "dtype", x.dtype)))
        return pk.op("layernorm", backend="reference")(x, weight, bias, eps=eps)

    shapes = [{"x": (6, 200)}, {"x": (3, 2, 70), "weight": (70,)}]
    report = pk.check("layernorm", fn=norm, shapes=shapes, one_dtype=True, max_examples=40)
    assert report.outcome == "right", report.failures
    assert seen == {((6, 200), False, False, True), ((3, 2, 70), True, False, True)}
    assert not {"no_n", "empty_batch", "rows_of_one_element", "nan_in_a_bias"} & {*report.edges}


def test_time_that_is_up_leaves_cases_out_and_says_so():
    report = pk.check("softmax", fn=right, **HOW, seconds=1e-9)
    assert (report.examples, report.left_out, report.outcome) == (1, 19, "unfinished") and not report.failures
    assert not report.passed and {"wide", "special"} < {*report.not_reached}
    assert report.verdict.startswith("unfinished: not reached: ")
    assert report.to_dict()["not_reached"] == [*report.not_reached] and report.verdicts == dict.fromkeys(
        report.verdicts
    )


def test_the_time_is_up_for_a_kernel_that_is_wrong_where_it_did_not_get_to(monkeypatch):
    """Right on the first case, which is what a kernel without a maximum is on ordinary values."""
    clock = iter(range(10**6))
    monkeypatch.setattr(runner.time, "perf_counter", lambda: float(next(clock)))
    calls = {"fn": no_maximum, **HOW, "dtypes": ["float32"]}
    assert pk.check("softmax", **calls, seconds=0.5).outcome == "unfinished"
    assert pk.check("softmax", **calls, seconds=100.0).outcome == "wrong"


def test_the_time_is_up_in_calls_of_any_shape_too():
    report = pk.check("softmax", fn=right, empty=False, max_examples=30, seconds=1e-9)
    assert (report.examples, report.left_out, report.outcome) == (1, 29, "unfinished") and not report.failures


def test_right_needs_every_regime_and_edge_once_and_no_more():
    report = Report(
        "softmax", "", 0, examples=2, combinations=Counter({"float32 | wide | - | ": 1, "f | normal | tie | ": 1})
    )
    report.left_out_by_name.update(["wide", "tie"])
    assert report.passed and report.outcome == "right"
    report.left_out_by_name["special"] += 1
    assert report.not_reached == ("special",) and report.outcome == "unfinished"
    merged = report.merge(Report("softmax", "", 0, examples=1, combinations=Counter({"float32 | special | - | ": 1})))
    assert merged.passed and not merged.not_reached


def test_the_first_ten_cases_on_ordinary_calls_meet_every_regime():
    limits = check_options.CheckOptions(shapes=[{"x": (4, 40)}], dtypes=["float32"], max_examples=60)
    subject = runner.subject_of(registry.find_spec("softmax"), None, None, right, "numpy", None, None, None)
    listed = [c for c in runner.cases_of(subject, limits) if not c.edge]
    assert [c.regime for c in listed[:2]] == ["normal", "wide"] and {c.regime for c in listed[:10]} == {*TELLING}


MISTAKES = [
    ({}, r"shapes are {}; expected a list of them, \[{\"x\": \(...\)}\]"),
    ([], r"shapes are \[\]; expected a list"),
    ([{"y": (2, 3)}], "shapes name 'y'; softmax has x"),
    ([{}], "shapes lack x, which every call has"),
    ([{"x": 5}], "shapes give x 5; expected extents"),
    ([{"x": (2, -1)}], "shapes give x"),
    ([(2, 3)], r"shapes hold \(2, 3\); expected array -> shape"),
]


@pytest.mark.parametrize(("shapes", "words"), MISTAKES, ids=lambda v: str(v)[:20])
def test_shapes_that_are_none_are_named(shapes, words):
    with pytest.raises(pk.SpecError, match=words):
        pk.check("softmax", fn=right, shapes=shapes)


def test_other_words_that_are_none_are_named():
    with pytest.raises(pk.SpecError, match="layout 'odd' is unknown; expected some of contiguous"):
        pk.check("softmax", fn=right, layouts="odd")
    with pytest.raises(pk.SpecError, match="promise 'speed' is unknown; expected some of inputs"):
        pk.check("softmax", fn=right, promises=["speed"])
    with pytest.raises(pk.SpecError, match="no call of these shapes has edge 'tiles_of_minus_inf'"):
        pk.check("softmax", fn=right, shapes=[{"x": (2, 8)}], only_edges=["tiles_of_minus_inf"])
    with pytest.raises(pk.SpecError, match="matmul"):
        pk.check("matmul", fn=np.matmul.__call__, shapes=[{"a": (2, 3), "b": (4, 5)}])


def test_gradients_have_given_shapes_too():
    spec = registry.find_spec("rmsnorm_vjp")
    shapes = dict.fromkeys(("x", "d_y"), (5, 80)) | {"weight": (80,)}
    assert {a.name for a in spec.arrays} >= {*shapes}
    report = pk.check("rmsnorm_vjp", backend="reference", shapes=[shapes], max_examples=20)
    assert report.outcome == "right", report.failures
