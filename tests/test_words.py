"""The words of a spec that the shipped ops leave unsaid: narrow dtypes, values, what contradicts itself, samples.

An axis that disappears and memory that is shared: tests/test_word_shapes.py.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import ml_dtypes
import numpy as np
import pytest
from jaxtyping import Bool, Float, Float32, Int, Int8, Num, UInt16

import portakern as pk
from portakern import testing
from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.framework import convert, frameworks
from portakern.core.oracle import rounded
from portakern.spec import Rule
from portakern.spec.dtypes import DTYPES, FLOATS
from portakern.spec.options import Axis
from portakern.spec.tolerance import compare, format_of, round_to
from portakern.testing import Case
from portakern.tools.bench.suites import requested_cases
from tests import word_ops as ops
from tests.ops.record import dtype_for
from tests.word_kernels import (
    KERNELS,
    PRODUCTS,
    backend,
    declared,
    failure,
    failure_case,
    masked_sum,
    masked_sum_in_jax,
    passes,
    product_of_8_bits,
    segment_sums,
)

A = TypeVar("A")


# ------------------------------------------------------------------------------------------------------------- dtypes
EIGHT = ("float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("dtype", [*EIGHT, "bfloat16", "float16"])
def test_rounding_is_once_and_to_even(dtype):
    """Every tie of two neighbours, and the float64 numbers beside it, which by way of float32 would land on the tie."""
    kind = DTYPES[dtype]
    bits = f"u{kind.bits // 8}"
    every = np.arange(2**kind.bits, dtype=bits).view(kind.numpy).astype(np.float64)
    finite = np.unique(every[np.isfinite(every)])
    low, high = finite[:-1], finite[1:]
    ties = (low + high) / 2
    even = low.astype(kind.numpy).view(bits) % 2 == 0
    np.testing.assert_array_equal(rounded(ties, dtype).astype(float), np.where(even, low, high))
    np.testing.assert_array_equal(rounded(np.nextafter(ties, -np.inf), dtype).astype(float), low)
    np.testing.assert_array_equal(rounded(np.nextafter(ties, np.inf), dtype).astype(float), high)


@pytest.mark.parametrize("dtype", FLOATS[:3] + EIGHT)
def test_the_threshold_of_overflow_is_the_least_that_overflows(dtype):
    over, kind = format_of(dtype).overflow, DTYPES[dtype]
    inside, beyond = rounded(np.array([np.nextafter(over, 0), over]), dtype).astype(float)
    assert inside == kind.largest and np.array_equal(beyond, kind.overflows_to, equal_nan=True)
    assert np.isnan(kind.overflows_to) == (dtype == "float8_e4m3fn")


def test_rounding_to_integers_stops_at_their_ends():
    values = np.array([2.5, 3.5, -0.5, 1e30, -1e30, np.inf, -np.inf, np.nan])
    assert rounded(values, "int8").tolist() == [2, 4, 0, 127, -128, 127, -128, 0]
    assert rounded(values, "uint8").tolist() == [2, 4, 0, 255, 0, 255, 0, 0]
    assert rounded(values, "int64").tolist()[3:5] == [2**63 - 1, -(2**63)]


def test_comparing_what_has_no_infinity():
    def bad(actual, ref, bound, dtype="float8_e4m3fn"):
        return bool(compare(np.array([actual], DTYPES[dtype].numpy), np.array([ref]), np.array([bound]), dtype).bad[0])

    assert not bad(np.nan, 500.0, 0.0) and not bad(np.nan, np.inf, 0.0) and not bad(np.nan, -np.inf, 0.0)
    assert bad(448.0, 500.0, 20.0)  # stopping at the largest is right only where the formula says so
    assert not bad(448.0, 464.0, 16.0) and not bad(np.nan, 460.0, 5.0) and bad(np.nan, 400.0, 5.0)
    assert not bad(np.inf, 70000.0, 0.0, "float8_e5m2") and bad(np.nan, 70000.0, 0.0, "float8_e5m2")
    bound = round_to(np.zeros(1), np.array([3.0]), "int8")
    assert not bad(3, 3.0, bound[0], "int8") and bad(4, 3.0, bound[0], "int8")


NAMES = ("numpy", "torch", "jax")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("to", NAMES)
def test_every_bit_crosses(source, to, dtype):
    for name in (source, to):
        pytest.importorskip(name, reason=f"{name} is not installed")
    kind, (src, dst) = DTYPES[dtype], (frameworks()[source], frameworks()[to])
    raw = np.arange(2 if dtype == "bool" else 2 ** min(kind.bits, 16), dtype=f"u{kind.bits // 8}")
    x = raw.view(kind.numpy)
    if dtype == "float64" and "jax" in (source, to):
        return  # refused, as JAX would narrow it: tests/test_interchange.py
    host, array = frameworks()["numpy"], src.from_numpy(x, None)
    crossed = convert(array, src, dst)
    assert dst.owns(crossed) and host.contiguous(dst.to_numpy(crossed))
    back = dst.to_numpy(crossed)
    held = dst.stored_dtype(src.stored_dtype(dtype))
    assert back.dtype == DTYPES[held].numpy and back.astype(kind.numpy).tobytes() == x.tobytes()


def test_annotations_name_dtypes_and_the_op_has_that_of_its_first_float():
    call = bind(ops.segment_add, *testing.sample_arrays(ops.segment_add, dtype="bfloat16")[0].values())
    assert call.dtype == "bfloat16" and call.outputs == {"out": ((3, 4), "bfloat16")}
    assert [a.dtypes for a in ops.segment_add.arrays[:3:2]] == [("int8",), ("int32", "int64")]
    assert ops.masked_add.dtypes == ("int8",) and ops.from_fp8.dtypes == ("float8_e5m2",)
    with pytest.raises(pk.SpecError, match=r"masked_add: b is int8; expected one of uint8"):
        pk.op(ops.masked_add)(np.zeros(2, np.int8), np.zeros(2, np.int8), np.zeros(2, bool))
    with pytest.raises(pk.SpecError, match=r"segment_add: total is float16 but scales is float32"):
        arrays, _ = testing.sample_arrays(ops.segment_add)
        pk.op(ops.segment_add)(**arrays | {"total": arrays["total"].astype(np.float16)})


@pytest.mark.parametrize("framework", NAMES)
def test_narrow_dtypes_in_and_out(framework):
    library = pytest.importorskip(framework, reason=f"{framework} is not installed")
    fw = frameworks()[framework]
    a, b, keep = np.array([100, -100, 3], np.int8), np.array([200, 250, 9], np.uint8), np.array([True, True, False])
    s, kept, wide = pk.op(ops.masked_add)(*(fw.from_numpy(x, None) for x in (a, b, keep)))
    assert type(s) is type(kept) and s.dtype == (library if framework != "jax" else library.numpy).int32
    assert fw.to_numpy(s).tolist() == [300, 150, 0] and fw.to_numpy(kept).tolist() == [True, True, False]
    assert fw.to_numpy(wide).tolist() == [65536 * 100, -65536 * 100, 65536 * 3]
    assert fw.to_numpy(wide).dtype.name == fw.stored_dtype("int64")
    q, scale = pk.op(ops.to_fp8)(fw.from_numpy(np.array([[1.0, -3.5]], np.float32), None))
    assert fw.to_numpy(q).dtype == ml_dtypes.float8_e4m3fn and fw.to_numpy(q).astype(float).tolist() == [[128, -448]]
    assert fw.to_numpy(scale).tolist() == [0.0078125]


@pytest.mark.parametrize("name", ["mine", "reference"])
def test_jax_stages_integers_as_it_holds_them(name):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    made = backend("masked_add", masked_sum_in_jax, "jax")
    run = pk.op(ops.masked_add, backend=made if name == "mine" else name)
    s, kept, wide = jax.jit(lambda *arrays: run(*arrays))(
        np.array([3], np.int8), np.array([4], np.uint8), np.ones(1, bool)
    )
    assert (s.dtype, kept.dtype, wide.dtype) == (np.int32, bool, np.int32)
    assert (int(s[0]), bool(kept[0]), int(wide[0])) == (7, True, 3 * 65536)
    passes(ops.masked_add, made, 20)


@pytest.mark.parametrize("framework", NAMES)
def test_an_op_of_8_bits_is_checked_in_each_of_its_dtypes(framework):
    """Floats and int8 in one op: the oracle sees both as float64, in which products of int8 do not wrap."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    report = passes(ops.product, backend("product", PRODUCTS[framework], framework))
    assert {c.partition(" ")[0] for c in report.combinations} >= set(ops.product.dtypes)


def test_a_product_of_8_bits_that_is_rounded_too_often_is_found():
    def half(call, tiling):
        (c,) = product_of_8_bits(call, tiling)
        with np.errstate(all="ignore"):
            return (c.astype(np.float16).astype(np.float32),)

    assert "c[" in failure(ops.product, half)


def test_an_array_may_have_fewer_bits_than_the_op():
    def widened(call, tiling):
        q, k = (x.astype(np.float64 if call.dtype == "float64" else np.float32) for x in call.arrays.values())
        with np.errstate(all="ignore"):
            return (np.ascontiguousarray(q * k),)

    def as_e4m3(call, tiling):  # e5m2's bits mean other numbers
        k = call.arrays["k"]
        k = k.view(ml_dtypes.float8_e4m3fn) if k.dtype == ml_dtypes.float8_e5m2 else k
        return widened(call.replace(arrays={**call.arrays, "k": k}), tiling)

    passes(ops.scores, backend("scores", widened), 100)
    assert '"dtypes":{"k":"float8_e5m2"}' in failure_case(ops.scores, as_e4m3)
    q, k = np.ones(2, np.float16), np.ones(2, ml_dtypes.float8_e5m2)
    assert pk.op(ops.scores)(q, k).tolist() == [1, 1]
    with pytest.raises(
        pk.SpecError, match=r"k is int8 but q is float16; expected float16 or float8_e4m3fn or float8_e"
    ):
        pk.op(ops.scores)(q, np.ones(2, np.int8))
    with pytest.raises(pk.SpecError, match=r"k is float32 but q is float16"):
        pk.op(ops.scores)(q, np.ones(2, np.float32))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_fewer_bits_cross_into_each_framework(framework):
    fw = frameworks()[framework]
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    q, k = np.full(2, 3, np.float16), np.full(2, 0.5, ml_dtypes.float8_e4m3fn)
    assert fw.to_numpy(pk.op(ops.scores)(fw.from_numpy(q, None), fw.from_numpy(k, None))).tolist() == [1.5, 1.5]


def test_dtypes_that_an_annotation_cannot_hold_are_told():
    with pytest.raises(pk.SpecError, match=r"odd: or_dtypes names z; expected Float arguments among x"):
        declared({"x": Float[A, "n"]}, {"y": Float[A, "n"]}, or_dtypes={"z": ("float32",)})
    with pytest.raises(pk.SpecError, match=r"odd: or_dtypes gives x the dtype 'int8'; expected floating-point dtypes"):
        declared({"x": Float[A, "n"]}, {"y": Float[A, "n"]}, or_dtypes={"x": ("int8",)})
    with pytest.raises(pk.SpecError, match=r"odd: x has the op's dtype, which may be int8, .* annotate it Num"):
        declared({"x": Float[A, "n"]}, {"y": Float32[A, "n"]}, dtypes=("float16", "int8"))
    with pytest.raises(pk.SpecError, match=r"odd: y has the op's dtype, which may be int8, .* annotate it Num"):
        declared({"x": Num[A, "n"]}, {"y": Float[A, "n"]}, dtypes=("float16", "int8"))
    with pytest.raises(pk.SpecError, match=r"odd: dtypes names 'int4'; expected dtypes among float32"):
        declared({"x": Num[A, "n"]}, {"y": Num[A, "n"]}, dtypes=("int4",))
    assert declared({"x": Num[A, "n"]}, {"y": Num[A, "n"]}, dtypes=("float16", "int8")).dtypes == ("float16", "int8")


def test_what_is_compiled_and_measured_where_nobody_names_a_dtype():
    assert pk.op("softmax").spec.usual_dtypes == ("bfloat16", "float32")
    assert ops.product.usual_dtypes == ops.product.dtypes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "find_spec", lambda name: ops.product)
        assert [c.dtype for c in requested_cases("product", {}, None)] == list(ops.product.dtypes)


def test_the_checker_draws_narrow_dtypes_and_sees_wrong_ones():
    def dequantise(call, tiling):
        with np.errstate(all="ignore"):
            return (np.ascontiguousarray(call.arrays["q"].astype(np.float32) * call.arrays["scale"][:, None]),)

    assert "float8_e5m2" in next(iter(passes(ops.from_fp8, backend("from_fp8", dequantise)).combinations))
    passes(ops.to_fp8, backend("to_fp8", lambda call, tiling: ops.to_fp8_kernel(call.arrays["x"])))

    def towards_zero(call, tiling):
        q, scale = ops.to_fp8_kernel(call.arrays["x"])
        with np.errstate(all="ignore"):
            exact = np.abs(call.arrays["x"].astype(float) / scale[:, None].astype(float))
        up = np.abs(q.astype(float)) > exact
        return (q.view(np.uint8) - up).view(q.dtype), scale

    assert "q[" in failure(ops.to_fp8, towards_zero)

    assert "s[" in failure(ops.masked_add, lambda call, tiling: masked_sum(call, np.int8))
    right = backend("masked_add", lambda call, tiling: masked_sum(call, np.int32))
    assert "int8" in next(iter(passes(ops.masked_add, right).combinations))
    with pytest.raises(pk.SpecError, match="dtypes are float16; expected some of int8"):
        testing.check(ops.masked_add, backend=right, dtypes=["float16"])


# ------------------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("framework", KERNELS)
def test_a_right_kernel_passes_and_all_its_offsets_are_legal(framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    seen = []

    def kernel(call, tiling):
        if call.concrete:
            starts = call.framework.to_numpy(call.arrays["starts"])
            seen.append(starts[0] == 0 and starts[-1] <= call.dims["rows"] and (np.diff(starts) >= 0).all())
        return KERNELS[framework](call, tiling)

    report = passes(ops.segment_add, backend("segment_add", kernel, framework), 24 if framework == "jax" else 60)
    assert all(seen) and report.edges["one_large_scale"]  # values that are planted lie beside those that are made


WRONG = {
    "offsets that are one too large": lambda starts: np.minimum(starts + 1, starts[-1]) * (starts > 0),
    "the last segment lost": lambda starts: np.where(np.arange(len(starts)) == len(starts) - 1, 10**6, starts),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_offsets_are_caught(wrong):
    assert "out[" in failure(ops.segment_add, lambda call, tiling: segment_sums(call, tiling, WRONG[wrong]))


def test_the_oracle_refuses_what_breaks_a_rule_on_values_and_binding_does_not_look():
    arrays, _ = testing.sample_arrays(ops.segment_add)
    arrays["starts"] = np.array([0, 5, 2])
    assert bind(ops.segment_add, **arrays).dims["rows"] == 7
    with pytest.raises(pk.SpecError, match="segment_add: starts must rise from 0 and stay within the rows"):
        pk.op(ops.segment_add, backend="reference")(**arrays)


def test_cases_that_break_a_rule_are_drawn_again():
    sums = []

    def kernel(call, tiling):
        rows = call.arrays["rows_of"]
        sums.append(int(rows.sum()))
        return (np.where((rows >= 0)[:, None], call.arrays["pool"][rows], 0).astype(call.arrays["pool"].dtype),)

    def with_rule(holds):
        made = {"rows_of": lambda rng, shape, dims, options: rng.integers(0, dims["rows"], shape)}
        rule = Rule(holds, "their sum must be even", values=True)
        return type(ops.pick_rows)(**{**vars(ops.pick_rows), "require": (rule,), "generators": made})

    passes(with_rule(lambda call: call.arrays["rows_of"].sum() % 2 == 0), backend("pick_rows", kernel))
    assert len(sums) > 40 and all(s % 2 == 0 for s in sums)
    never = with_rule(lambda call: False)
    with pytest.raises(pk.SpecError, match=r"no case that was drawn .*obeys the op's rules; declare how to make"):
        testing.check(never, backend=backend("pick_rows", kernel), max_examples=5)


@pytest.fixture
def labels():
    """pick_rows with a generator that reads dims and options."""

    @ops.pick_rows.values("rows_of")
    def labelled(rng, shape, dims, options):
        ids = rng.permutation(dims["rows"] + shape[0])[: shape[0]] % dims["rows"]
        return np.where(rng.random(shape) < 0.5, -1, ids) if options["ignore"] else ids

    yield
    ops.pick_rows.generators.clear()


def test_a_generator_sees_dimensions_and_options_and_is_held_to_its_form(labels):
    case = Case("float32", {"pool": (5, 2), "rows_of": (40,)}, seed=3)
    assert set(case.buffers(ops.pick_rows)["rows_of"].view().tolist()) == set(range(5))
    ignoring = Case("float32", {"pool": (5, 2), "rows_of": (40,)}, seed=3, options={"ignore": True})
    assert -1 in ignoring.buffers(ops.pick_rows)["rows_of"].view()
    assert Case.from_json(ignoring.to_json()).buffers(ops.pick_rows)["rows_of"].view().tolist() == (
        ignoring.buffers(ops.pick_rows)["rows_of"].view().tolist()
    )
    for wrong, words in {
        (lambda rng, shape, dims, options: np.zeros(3, int)): r"have shape \(3,\); expected \(40,\)",
        (lambda rng, shape, dims, options: np.full(shape, 0.5)): r"are float64; expected integers that int\d\d holds",
    }.items():
        ops.pick_rows.values("rows_of")(wrong)
        with pytest.raises(pk.SpecError, match=f"pick_rows: the values of rows_of {words}"):
            case.buffers(ops.pick_rows)
    with pytest.raises(pk.SpecError, match="values are declared for 'rows'; expected one of pool, rows_of"):
        ops.pick_rows.values("rows")


def test_a_gradient_op_has_its_forwards_values_rules_and_saved_outputs(monkeypatch, labels):
    arrays = {
        "pool": Float[A, "rows n"],
        "y": Float[A, "picked n"],
        "rows_of": Int[A, "picked"],
        "d_y": Float[A, "picked n"],
    }
    gradient = declared(arrays, {"d_pool": Float[A, "rows n"]})
    monkeypatch.setattr(registry, "forward_of", lambda vjp: ops.pick_rows)
    shapes = {"pool": (5, 2), "y": (40, 2), "rows_of": (40,), "d_y": (40, 2)}
    case = Case("float32", shapes, seed=3)
    drawn = {n: b.view() for n, b in case.buffers(gradient).items()}
    assert set(drawn["rows_of"].tolist()) == set(range(5)) and case.obeys(gradient)
    np.testing.assert_array_equal(drawn["y"], drawn["pool"][drawn["rows_of"]])
    ops.pick_rows.values("rows_of")(lambda rng, shape, dims, options: np.full(shape, dims["rows"]))
    assert not case.obeys(gradient)


# ------------------------------------------------------------------------------------- declarations that contradict
AXIS = {"axis": Annotated[int, Axis("x")]}
SHAPE, REST, Y = {"x": Float[A, "*shape"]}, {"y": Float[A, "*rest"]}, {"y": Float[A, "n"]}
ODD = {
    "an output of its own": (
        lambda: declared(SHAPE, REST),
        "odd: 'rest' of y is not an argument's dimension; declare it as an axis of an argument, or as drops={'rest': ",
    ),
    "an axis that no option names": (
        lambda: declared(SHAPE, REST, drops={"rest": "axis"}),
        "expected the name of an option",
    ),
    "an axis without a value": (
        lambda: declared(SHAPE, REST, AXIS, drops={"rest": "axis"}),
        "odd: no output has the axis that axis names; declare the result for extent 0",
    ),
    "an axis of many arrays": (
        lambda: declared({"x": Float[A, "*shape n"]}, REST, AXIS, drops={"rest": "axis"}),
        "expected a required argument of one run of axes, '*shape'",
    ),
    "an unknown dtype": (
        lambda: declared({"x": UInt16[A, "n"]}, Y),
        "odd: x is uint16; expected a dtype that a spec can name",
    ),
    "no annotation": (
        lambda: declared({"x": int}, Y),
        "odd: x is annotated <class 'int'>; expected one of jaxtyping's",
    ),
    "a result of two dtypes": (
        lambda: declared({"x": Float[A, "n"]}, {"y": Int[A, "n"]}),
        "odd: the output y may be int32 or int64 or int16 or int8; expected one dtype",
    ),
    "a result that follows nothing": (
        lambda: declared({"x": Int8[A, "n"]}, Y),
        "odd: the output y is Float, but no argument is",
    ),
    "dtypes that are no numbers": (
        lambda: declared({"x": Float[A, "n"]}, Y, dtypes=["bool"]),
        "odd: dtypes names 'bool'",
    ),
    "an alias of another shape": (
        lambda: declared({"x": Float[A, "n"], "z": Float[A, "n n"]}, Y, aliases={"y": "z"}),
        "odd: y cannot overwrite z: it is Float[..., 'n'] and z is Float[..., 'n n']",
    ),
    "an alias of another dtype": (
        lambda: declared({"x": Float[A, "n"], "z": Float32[A, "n"]}, Y, aliases={"y": "z"}),
        "odd: y cannot overwrite z: it is Float[..., 'n'] and z is Float32[..., 'n']",
    ),
    "an alias of nothing": (
        lambda: declared({"x": Float[A, "n"]}, Y, aliases={"y": "w"}),
        "odd: aliases has y over w; expected an output among y and an array argument among x",
    ),
    "two aliases of one": (
        lambda: declared({"x": Bool[A, "n"]}, {"y": Bool[A, "n"], "z": Bool[A, "n"]}, aliases={"y": "x", "z": "x"}),
        "odd: aliases has two outputs over one input",
    ),
    "a sample without an extent": (
        lambda: ops.peak.sample("odd", dims={}),
        "peak: sample 'odd' gives an extent to nothing; expected every dimension: shape",
    ),
}


@pytest.mark.parametrize("what", ODD)
def test_what_contradicts_itself_is_told_where_it_is_declared(what):
    make, words = ODD[what]
    with pytest.raises(pk.SpecError) as caught:
        make()
    assert words in str(caught.value)


# ------------------------------------------------------------------------------------------------------------ samples
SHIPPED = list(pk.ops())


@pytest.mark.parametrize("framework", NAMES)
@pytest.mark.parametrize("op", SHIPPED)
def test_every_sample_is_a_call(op, framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    spec = registry.find_spec(op)
    for name in testing.samples(op):
        for dtype in (dtype_for(op, "float32"), dtype_for(op, "bfloat16")):
            arrays, options = testing.sample_arrays(op, name, dtype=dtype, framework=framework)
            call = bind(spec, **arrays, **options)
            assert call.dtype == dtype and call.framework.name == framework
            assert set(arrays) >= {a.name for a in spec.arrays if not a.optional}
        report = testing.replay(op, testing.sample_case(op, name), backend="reference")
        assert report.passed, report.failures


def test_samples_say_what_they_are_and_what_they_are_not():
    arrays, options = testing.sample_arrays("layernorm", "wider_weight", dtype="float16")
    assert arrays["weight"].dtype == np.float32 and arrays["x"].shape == (3, 5) and options == {}
    arrays, options = testing.sample_arrays("softmax_vjp", "another_axis")
    np.testing.assert_allclose(arrays["y"].sum(1), 1, rtol=1e-6)  # what its forward gave
    assert options == {"axis": 1}
    assert testing.sample_arrays("matmul_vjp", dtype="float16")[0]["d_c"].dtype == np.float16
    first, second = (testing.sample_arrays("softmax", seed=s)[0]["x"] for s in (1, 2))
    assert not np.array_equal(first, second)
    with pytest.raises(pk.SpecError, match="softmax has no sample 'tall'; expected one of rows, another_axis"):
        testing.sample_arrays("softmax", "tall")
    with pytest.raises(pk.SpecError, match="softmax: dtype 'int8' is none of float32"):
        testing.sample_arrays("softmax", dtype="int8")
    with pytest.raises(pk.SpecError, match="from_fp8 declares no sample; add one: from_fp8.sample"):
        testing.samples(ops.from_fp8)
    with pytest.raises(pk.SpecError, match="peak: two samples are called 'rows'; rename one"):
        ops.peak.sample("rows", dims={"shape": (2,)})
    with pytest.raises(pk.SpecError, match="sample 'odd': given names 'x'; expected some of: floor"):
        ops.peak.sample("odd", dims={"shape": (2,)}, given=("x",))
    arrays, options = testing.sample_arrays(ops.peak, "columns_with_a_floor")
    assert arrays["floor"].shape == (3, 5) and options == {"axis": 1}
