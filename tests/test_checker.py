"""The checker: it passes right kernels, finds wrong ones, and hands out a line that shows the fault again."""

import json
import re
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings

import portakern as pk
from portakern import testing
from portakern.core import plan, registry
from portakern.core.backend import Drawn, Profile
from portakern.core.targets import Target
from portakern.spec.dtypes import numpy_dtype
from portakern.testing import Case, Limits
from portakern.testing.cases import LAYOUTS, REGIMES, edges
from portakern.testing.subject import backend_subject
from tests.drawing import cases
from tests.ops import forward_records
from tests.places import DEEP


def softmax_float32(x, axis=-1):
    x = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
    with np.errstate(all="ignore"):
        e = np.exp(np.moveaxis(x - x.max(axis, keepdims=True, initial=-np.inf), axis, -1))
        e = np.ascontiguousarray(e)  # along other axes NumPy adds one after the other, and not pairwise
        return np.ascontiguousarray(np.moveaxis(e / e.sum(-1, keepdims=True), -1, axis))


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
    assert any(k.startswith("float32 | normal | - | ") for k in report.combinations) and report.layouts["transposed"]


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
    monkeypatch.setattr(oracle, "_profiles", {"strict": Profile(f"{__name__}:stricter")})  # kept once it was asked for
    monkeypatch.setattr(plan, "rounded_oracle", lambda call: (call.arrays["x"],))
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
        fn=lambda x, axis=-1: torch.softmax(x.double(), axis).to(x.dtype).contiguous(),
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
        pk.check("matmul", fn=spy, max_examples=40, dtypes=["float32"], limits=Limits(elements=50), promises=False)
    assert seen and max(np.prod(s) for pair in seen for s in pair) <= 50


def test_a_variant_that_takes_few_calls_is_drawn_those():
    """Else nearly all that is drawn is refused, and its kernels hardly run; edges come as they are."""

    def product(call, tiling):
        a, b = (x.astype(np.float64) for x in call.arrays.values())
        return (np.ascontiguousarray(np.matmul(a, b), numpy_dtype(call.outputs["c"][1])),)

    def refuses(call, tiling):
        dims = call.dims
        narrow = dims["k"] % 8 or dims["n"] < 9 or dims["m"] > 2 or call.options["precision"] != "ieee"
        return "this variant takes few calls" if narrow else None

    def report_of(**kwargs):
        some = pk.Backend("some", framework="numpy", refusals=("takes few",))
        some.implements("matmul", supports=refuses, **kwargs)(product)
        return pk.check("matmul", backend=some, max_examples=20, promises=False)

    before, report = report_of(), report_of(drawn=Drawn(("precision",), {"k": 8}, {"n": 9}, {"m": 2}))
    assert not before.failures and not report.failures
    assert before.refused.total() > 10 >= report.refused.total()  # half of the 20 are edges
    assert report.not_required == (
        "calls beyond these limits, edges apart: no precision, k a multiple of 8, n at least 9, m at most 2",
    )


@pytest.mark.parametrize(
    ("refuses", "ran"),
    [
        (lambda t: t["block_m"] < 128, {"block_m": 128, "block_n": 16, "block_k": 16}),
        (lambda t: t["block_n"] < 32 or t["block_m"] > 32, {"block_m": 16, "block_n": 32, "block_k": 16}),
        (lambda t: t["block_m"] * t["block_k"] < 1024, {"block_m": 16, "block_n": 16, "block_k": 64}),
        (lambda t: True, {}),
    ],
)
def test_a_tile_that_is_not_legal_leaves_the_others_small(refuses, ran):
    """Else there is one block of each wherever the native grid asks for a large one, and borders of blocks are not
    seen."""
    some = pk.Backend("some", framework="numpy")
    least = dict.fromkeys(("block_m", "block_n", "block_k"), 16)

    @some.implements(
        "matmul", tiling=lambda call: least, supports=lambda call, t: "off the grid" if refuses(t) else None
    )
    def product(call, tiling):
        return (np.matmul(*call.arrays.values()),)

    spec = registry.find_spec("matmul")
    case = Case("float32", {"a": (300, 20), "b": (20, 300)}, tiling=least)
    given, used, why = backend_subject(spec, some, None, None, None).tiling(case, case.bound_alone(spec))
    assert given == ran and used == least | ran and (why == "off the grid") == (not ran)


def test_the_smallest_tiles_are_doubled_now_and_then():
    """A kernel may take its tile in halves, if that is no smaller than its grid."""
    spec = registry.find_spec("matmul")
    edge = edges(spec)["several_block_m"]
    drawn = []

    @settings(max_examples=40, derandomize=True, database=None)
    @given(cases(spec, Limits(), spec.tiling, edge))
    def look(case):
        drawn.append(tuple(case.tiling.values()))

    look()
    assert {*drawn} == {(16, 16, 16), (32, 32, 32)} and drawn.count((16, 16, 16)) > drawn.count((32, 32, 32))


@pytest.mark.parametrize("seed", [0, 1])
def test_small_tiles_of_both_sizes_are_met_on_every_seed(seed):
    tilings, some = [], pk.Backend("some", framework="numpy")

    @some.implements("matmul", tiling=lambda call: dict.fromkeys(("block_m", "block_n", "block_k"), 16))
    def product(call, tiling):
        tilings.append(tuple(tiling.values()))
        return (np.matmul(*call.arrays.values()).astype(numpy_dtype(call.outputs["c"][1])),)

    pk.check("matmul", backend=some, only_edges=["several_block_m"], max_examples=2, seed=seed, shrink=False)
    assert {*tilings} >= {(16, 16, 16), (32, 32, 32)}


def test_target_reads_well():
    assert str(Target("cuda", "sm_90")) == "cuda sm_90" and str(Target("cpu")) == "cpu"


# --- what a kernel may keep between calls, and what it may be given ---


def same_result_for_the_same_object(x, kept={}):  # noqa: B006
    if id(x) not in kept:
        kept.clear()
        kept[id(x)] = x, right(x)  # the object with it, whose id is then nobody else's
    return kept[id(x)][1].copy()


def replayed(x, state={}):  # noqa: B006
    """As a captured graph that reads what its inputs held: from its third call with a shape on."""
    calls, first = state.get((x.shape, x.dtype), (0, None))
    first = right(x) if first is None else first
    state[x.shape, x.dtype] = calls + 1, first
    return first.copy() if calls >= 2 else right(x)


def one_buffer(x, state={}):  # noqa: B006
    out = state.setdefault((x.shape, x.dtype), np.empty(x.shape, x.dtype))
    out[...] = right(x)
    return out


def wrong_in_whole_tiles(x, *, axis=-1):
    return right(x, axis=axis) if x.shape[axis] % 1024 else right(x, axis=axis) * x.dtype.type(1.25)


KEPT = {
    "by the identity of its argument": (same_result_for_the_same_object, " in place", "bounds"),
    "from the third call with a shape on": (replayed, "", "bounds"),  # of one case or of several
    "in one buffer": (one_buffer, "shares memory: the second overwrites the first's", "promises"),
    "wrong where a row fills whole tiles": (wrong_in_whole_tiles, "permitted error", "bounds"),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_kept_between_calls_is_found(name, seed):
    fn, words, kind = KEPT[name]
    report = pk.check("softmax", fn=fn, max_examples=400, seed=seed, shrink=False)
    assert [(f.kind, words in f.what) for f in report.failures] == [(kind, True)], report.failures


def test_one_array_may_stand_for_several():
    def unless_one(a, b):
        c = np.matmul(a.astype(np.float64), b.astype(np.float64))
        return (c + (a is b)).astype(a.dtype)

    with np.errstate(all="ignore"):
        report = pk.check("matmul", fn=unless_one, max_examples=100, promises=False)
    assert "edge a_is_b: c[" in report.failures[0].what
    assert json.loads(report.failures[0].case)["aliased"] == ["a", "b"]
    case = Case.from_json(report.failures[0].case)
    buffers = case.buffers(registry.find_spec("matmul"))
    assert buffers["a"] is buffers["b"]
    assert {"q_is_k_is_v"} <= testing.edges(registry.find_spec("attention")).keys()


def rows_by_blas(x, *, axis=-1):
    """A row alone is added up in another order than among others, as a library does that picks a kernel by size."""
    x64 = np.moveaxis(x.astype(np.float64 if x.dtype == np.float64 else np.float32), axis, -1)
    with np.errstate(all="ignore"):
        e = np.ascontiguousarray(np.exp(x64 - x64.max(-1, keepdims=True, initial=-np.inf)))
        reverse = np.ascontiguousarray(e[..., ::-1])  # which NumPy adds pairwise too
        total = (e if x.size == x.shape[axis] else reverse).sum(-1, keepdims=True)
        return np.ascontiguousarray(np.moveaxis(e / total, -1, axis)).astype(x.dtype)


def test_bounds_are_told_apart_from_promises():
    report = pk.check("softmax", fn=rows_by_blas, max_examples=200)
    (failure,) = report.failures
    assert failure.kind == "promises" and failure.what.startswith("law rows_are_independent: a row alone: ")
    assert report.verdicts == {"bounds": True, "edges": True, "promises": False}
    assert report.verdict == "FAILED: promises; bounds and edges held"
    report = pk.check("softmax", fn=rows_by_blas, max_examples=200, promises=False)
    assert report.passed and report.verdict.startswith("passed: bounds and edges") and not report.laws
    assert report.verdicts == {"bounds": True, "edges": True, "promises": None}


def test_a_broken_promise_does_not_hide_a_wrong_element():
    def wrong_in_16_bits(x, *, axis=-1):
        y = one_buffer(x) if axis in (-1, x.ndim - 1) else right(x, axis=axis)
        return y * x.dtype.type(1 + (x.dtype == np.float16) / 8)

    report = pk.check("softmax", fn=wrong_in_16_bits, max_examples=200)
    assert {f.kind for f in report.failures} >= {"bounds"} and report.verdicts["bounds"] is False


def test_other_semantics_of_nan_are_told_apart_from_wrong_elements():
    def zeros_for_rows_of_nan(x, *, axis=-1):
        return np.nan_to_num(right(x, axis=axis))

    report = pk.check("softmax", fn=zeros_for_rows_of_nan, max_examples=200)
    (failure,) = report.failures
    assert failure.kind == "edges" and "edge semantics differ: y[" in failure.what
    assert report.verdicts == {"bounds": True, "edges": False, "promises": True} and not report.passed


def test_laws_run_for_ordinary_functions_and_most_often_in_float32():
    seen = []

    def spy(x, *, axis=-1):
        seen.append(x.dtype.name)
        return right(x, axis=axis)

    report = pk.check("softmax", fn=spy, max_examples=300)
    assert report.passed and report.laws.keys() == registry.find_spec("softmax").laws.keys()
    del seen[:]
    for seed in range(4):
        case = json.dumps({"law": "rows_are_independent", "dtype": "float32", "seed": seed})
        assert testing.replay("softmax", case, fn=lambda x: right(x)).laws
    without_axis = pk.check("softmax", fn=lambda x: right(x), max_examples=300)
    assert "any_axis_is_the_last_axis" not in without_axis.laws and "shift_invariant" in without_axis.laws
    dtypes = [f["dtype"] for f in _drawn_laws("softmax", 300)]
    assert dtypes.count("float32") * 2 >= len(dtypes) and {"float16", "bfloat16"} <= set(dtypes)


def test_a_law_is_tried_in_the_dtypes_that_are_not_refused():
    def narrow(x, *, axis=-1):
        if x.dtype.itemsize > 2:
            raise pk.UnsupportedError("narrow: no dtype of 32 bits")
        return right(x, axis=axis)

    narrow.refusals = ("no dtype of 32 bits",)
    report = pk.check("softmax", fn=narrow, max_examples=100, seed=0)
    assert report.passed and report.laws.keys() == registry.find_spec("softmax").laws.keys(), report.failures
    narrow.refusals = ()
    report = pk.check("softmax", fn=narrow, max_examples=100, seed=0, dtypes=["float32"])
    assert not report.passed


def test_a_law_of_16_bits_alone_is_tried_in_16_bits_however_few_its_instances(monkeypatch):
    """A single instance is of float32, where such a law has nothing to assert."""
    tried = []

    def of_16_bits(run, draw):
        tried.append(draw.dtype)
        if draw.dtype != "float32":
            draw.same_bits(np.zeros(1), np.ones(1), "what differs in 16 bits")

    monkeypatch.setitem(registry.find_spec("softmax").laws, "of_16_bits", of_16_bits)
    report = pk.check("softmax", backend="triton", device="cpu", max_examples=10, shrink=False)
    assert tried[0] == "float32" and len(tried) == 2
    assert [f.what for f in report.failures] and "what differs in 16 bits" in report.failures[0].what


def _drawn_laws(op, examples):
    found = []

    def never(case):
        found.append({"dtype": case.dtype})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("portakern.testing.runner.run_law", lambda subject, case, limits: never(case))
        pk.check(op, fn=lambda x, axis=-1: right(x, axis=axis), max_examples=examples)
    return found


def drawn(op, examples, **options):
    """The cases of a check, of which none runs, nor any law."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("portakern.testing.runner.run_case", lambda subject, case, report, excused: found.append(case))
        pk.check(op, backend="reference", max_examples=examples, promises=False, **options)
    return found


def test_dtypes_have_fixed_shares():
    for seed, op in enumerate([r.op for r in forward_records() if "float64" in r.spec.dtypes][::4]):
        count = Counter(c.dtype for c in drawn(op, 80, seed=seed))
        wide = count.pop("float64")
        assert sum(count.values()) + wide == 80 and 34 <= count["float32"] <= 46 and min(count.values()) >= 13, count
        assert 4 <= wide <= 12
    assert {c.dtype for c in drawn("softmax", 40, dtypes=["float64"])} == {"float64"}


def test_sizes_that_people_use_are_drawn():
    softmax, attention, matmul = drawn("softmax", 400), drawn("attention", 400), drawn("matmul", 400)
    rows = {n for c in softmax for n in c.shapes["x"]}
    assert max(rows) >= 2048 and len({n for n in rows if n > 128 and n % 128 == 0}) >= 3
    assert {6} <= {len(c.shapes["x"]) for c in softmax} and {6} <= {len(c.shapes["a"]) for c in matmul}
    longest = [max(c.shapes[name][axis] for c in attention) for name, axis in (("k", 1), ("q", 2), ("q", 3))]
    assert longest[0] >= 1024 and longest[1] >= 48 and longest[2] >= 128, longest
    sizes = [np.prod(s) for c in (*softmax, *attention, *matmul) for s in c.shapes.values()]
    assert max(sizes) <= 2**18 and max(rows) >= 32000, "vocabularies"
    free = [c for c in (*softmax, *attention, *matmul) if not c.edge]
    few = [c for c in free if max(map(np.prod, c.shapes.values())) <= 16]
    assert len(few) < 0.07 * len(free) and len({c.seed for c in softmax}) == len(softmax), len(few)


def test_options_reach_the_ends_of_their_ranges():
    free = {
        "limits": Limits(typical_elements=0),
        "only_edges": ["several_block_q"],
    }  # of the checker's cases those that draw fastest; one of 120 has a scale of 0
    scales = [c.options["scale"] for c in drawn("attention", 1000, **free) if c.options.get("scale") is not None]
    assert min(scales) < 0 < max(scales) and 0.0 in scales
    eps = [c.options["eps"] for c in drawn("layernorm", 400) if "eps" in c.options]
    assert max(eps) >= 100 and 0.0 in eps


# --- what a function says of itself ---


def norm(x, weight, eps):
    """No defaults, and a weight of x's dtype, as a kernel of a model has it."""
    if weight.dtype != x.dtype or not x.size:
        raise ValueError(f"weight is {weight.dtype}, x is {x.dtype} {x.shape}")
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        r = 1 / np.sqrt(np.square(wide).mean(-1, keepdims=True) + eps)
        return np.ascontiguousarray((wide * r * weight.astype(np.float64)).astype(x.dtype))


def test_what_has_no_default_is_given_and_told_as_a_concession():
    report = pk.check("rmsnorm", fn=norm, max_examples=150, one_dtype=True, empty=False)
    assert report.passed, report.failures
    assert report.not_required == (
        "rounding (never passed)",
        "calls without eps, which has no default",
        "calls without weight, which has no default",
        "arrays of another dtype than the op's",
        "extents of 0",
    )
    assert report.to_dict()["not_required"] == list(report.not_required)
    assert "rows_of_zeros" not in report.edges  # which is about a call without a weight
    report = pk.check("rmsnorm", fn=norm, max_examples=150, shrink=False)
    assert "ValueError: weight is float32" in report.failures[0].what or "(0," in report.failures[0].what


def test_functions_that_cannot_be_called_are_refused_in_words():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(pk.SpecError, match="is a built-in function without a signature; wrap it in a func"):
        pk.check("softmax", fn=torch.softmax, framework="torch")
    with pytest.raises(pk.SpecError, match="needs dim, which softmax does not have; expected some of x, axis"):
        pk.check("softmax", fn=lambda x, dim: x)
    with pytest.raises(pk.SpecError, match="takes 1 arguments by position; expected 2 for a, b"):
        pk.check("matmul", fn=lambda a: a)


@pytest.mark.parametrize(("said", "meant"), [("fp16", "float16"), ("bf16", "bfloat16"), ("half", "float16"),
                                             ("fp32", "float32"), ("torch.float16", "float16"),
                                             ("flot32", "float32")])  # fmt: skip
def test_a_dtype_by_another_name_is_understood(said, meant):
    with pytest.raises(pk.SpecError, match=f"dtype '{said}' is unknown; did you mean '{meant}'"):
        pk.check("softmax", fn=right, dtypes=[said])


def llama_rmsnorm(x, weight, *, eps=1e-6):
    """As transformers has it: x / sqrt(...) becomes x's dtype again before it meets the weight."""
    wide = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
    with np.errstate(all="ignore"):
        hidden = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True, dtype=np.float64).astype(wide.dtype) + eps)
        product = hidden.astype(x.dtype).astype(wide.dtype) * weight.astype(wide.dtype)
        return np.ascontiguousarray(product.astype(x.dtype))


def test_a_models_own_rounding_is_an_option_of_the_spec():
    how = {"fn": llama_rmsnorm, "empty": False, "dtypes": ["bfloat16", "float16"], "max_examples": 120}
    report = pk.check("rmsnorm", options={"rounding": "before_weight"}, **how)
    assert report.passed and report.worst["y"] > 0.9, report.failures
    assert "values of rounding other than 'before_weight'" in report.not_required
    report = pk.check("rmsnorm", **how)
    assert not report.passed and report.verdicts["bounds"] is False
    with pytest.raises(pk.SpecError, match="rounding is 'twice'; expected one of 'once', 'before_weight'"):
        pk.check("rmsnorm", options={"rounding": "twice"}, **how)


@pytest.mark.parametrize("op", [op for op in registry.ops() if "float64" in registry.find_spec(op).dtypes])
def test_the_oracle_is_right_in_float64(op):
    """Its bound is a number where float64 itself overflows, and no law compares the bits that BLAS leaves unrounded."""
    report = pk.check(op, backend="reference", dtypes=["float64"], max_examples=60 if DEEP else 30, seed=3)
    assert report.passed and not report.laws, report.failures


def writing_nothing(x, *, axis=-1):
    y = softmax_float32(x, axis=axis).astype(x.dtype)
    x[...] = x
    return y


def test_what_fails_in_another_way_alone_is_told_with_that_way():
    report = pk.check("softmax", fn=writing_nothing, max_examples=60, shrink=False)
    (failure,) = report.failures
    assert (failure.kind, failure.cause) == ("promises", "ways"), failure
    assert "on arrays that nobody may write to: raised ValueError: assignment destination is read-only" in failure.what
    assert pk.check("softmax", fn=writing_nothing, max_examples=60, promises=False).passed
