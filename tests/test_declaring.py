"""What a signature may say of names, extents and offsets, tried on small ops that only the oracle has."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import pytest
from jaxtyping import Float, Int, Num

import portakern as pk
from portakern.core import registry
from portakern.core.framework import frameworks
from portakern.core.oracle import oracle
from portakern.errors import SpecError
from portakern.spec import Dim, Extent, Range, Rule, spec
from portakern.spec.dtypes import DTYPES
from portakern.spec.options import DType
from portakern.spec.tolerance import round_to, rounded, units
from portakern.testing import Limits, replay
from portakern.testing.cases import Case
from portakern.testing.sampled import apart, part_call, part_of, taken
from portakern.testing.samples import sample_arrays, sample_case
from portakern.testing.sizes import PAIRS
from portakern.testing.strategies import drawn
from portakern.tools.bench.fresh import turning
from portakern.tools.bench.inputs import make
from portakern.tools.bench.roof import moved
from portakern.tools.bench.rows import describe
from portakern.tools.bench.suites import TimedCase
from portakern.tools.compile.abstract import typical_signature
from tests.word_kernels import declared

A = TypeVar("A")

# ---------------------------------------------------------------------------------------------------------------- names


class OddOut(NamedTuple):
    y: Float[A, "call"]


def test_generated_code_has_no_name_of_a_signature():
    """Each of these was a variable, a function or a constant of what is written from a signature."""

    @spec(tiling={}, flops=lambda call: 1.0)
    def strange(
        tuple: Float[A, "call"],
        SPEC: Float[A, "call"],
        *,
        dtype: Literal["up", "down"] = "up",
        framework: bool = False,
        device: Annotated[int, Range(typical=(3,))] = 0,
        len: bool = False,
        type: bool = False,
    ) -> OddOut:
        """y = tuple + SPEC."""
        raise NotImplementedError

    pk.backends()["reference"].implements("strange")(lambda call, tiling: (call.arrays["tuple"] + call.arrays["SPEC"],))
    x, options = np.ones(3, np.float32), {"dtype": "down", "framework": True, "device": 3, "len": True, "type": True}
    call = pk.op(strange).bind(x, x, **options)
    assert call.dtype == "float32" and call.options == options and call.dims == {"call": 3}
    for _ in range(2):  # the second time by the plan that is kept
        np.testing.assert_array_equal(pk.op(strange)(x, x, **options), 2 * x)


def test_generated_code_of_torch_has_no_name_of_a_signature():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from portakern.core.dispatch import Choice
    from portakern.frameworks.torch.custom_ops import staged

    array = Float[A, "n"]
    odd = declared({"result": array, "custom_op": array}, {"y": array}, {"Tensor": int, "type": float})
    pk.backends()["reference"].implements("odd")(lambda call, tiling: (call.arrays["result"],))
    function = staged(odd, Choice.from_names(odd, "reference", None, None))
    y = function(torch.ones(3), torch.ones(3), Tensor=2, type=2.0)
    assert y.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "arrays, options, message",
    [
        ({"x": "n"}, {"wants": bool}, "option 'wants' has the name of a keyword that calls have .*; rename it"),
        ({"tiling": "n"}, {}, "array 'tiling' has the name of a keyword .*; rename it"),
        ({"x": "n"}, {"_y": bool}, "option '_y' begins with an underscore, as names of generated code do; rename it"),
        ({"x": "n"}, {"n": float}, "'n' is an option and a dimension; rename one"),
        ({"x": "n m", "m": "n?"}, {}, "'m' is an optional array and a dimension; rename one"),
    ],
)
def test_names_of_two_things_are_refused(arrays, options, message):
    hints = {n: Float[A, s.rstrip("?")] | None if s.endswith("?") else Float[A, s] for n, s in arrays.items()}
    with pytest.raises(SpecError, match=message):
        declared(hints, {"y": Float[A, "n"]}, options)


# -------------------------------------------------------------------------------------------------------------- extents


def zeros(*shape):
    return np.zeros(shape, np.float32)


def hints(shapes, kind=Float):
    """Annotations of shapes; a shape that ends in a question mark is an optional array's."""
    return {n: kind[A, s.rstrip("?")] | None if s.endswith("?") else kind[A, s] for n, s in shapes.items()}


def test_an_axis_is_longer_than_a_dimension_by_a_number():
    summed = declared(hints({"x": "rows", "starts": "sequences+1"}), hints({"y": "sequences"}))
    call = pk.op(summed).bind(zeros(7), zeros(4))
    assert call.dims == {"rows": 7, "sequences": 3} and call.outputs["y"][0] == (3,)
    with pytest.raises(SpecError, match=r"starts axis 0 \(sequences\+1\) is 0; expected at least 1"):
        pk.op(summed).bind(zeros(7), zeros(0))
    both = declared(hints({"starts": "n+1", "x": "n"}), hints({"y": "n+2"}))
    assert pk.op(both).bind(zeros(3), zeros(2)).outputs["y"][0] == (4,)
    with pytest.raises(SpecError, match=r"x axis 0 \(n\) is 3; expected 2, as set by starts axis 0 \(n\+1\)"):
        pk.op(both).bind(zeros(3), zeros(3))
    assert str(Dim.parse("a*b+12")) == "a*b+12"
    for wrong in ("n+", "n+0", "+1", "#n+1", "*n+1", "n+m", "1+n"):
        with pytest.raises(ValueError, match="shape notation"):
            Dim.parse(wrong)


class CountedOut(NamedTuple):
    y: Float[A, "k"]


def test_an_axis_counts_blocks_of_another():
    """One number for each block of ``width``, of which the last may be short, or one for all."""

    @spec(tiling={}, flops=lambda call: call.dims["k"], apart=("k",), budget="flops", typical={"k": 96, "width": 32})
    def counted(scale: Float[A, "#k/width"], x: Float[A, "k"], *, width: Annotated[int, Extent()] = 8) -> CountedOut:
        """y = x, each block times its scale."""
        raise NotImplementedError

    @counted.tolerance
    def bound(call, ref):
        return (4e-2 * np.abs(ref[0]) + 1e-3,)

    def reference(call, tiling):
        scale, k = call.arrays["scale"], call.dims["k"]
        seen.add((len(scale), -(-k // call.dims["width"])))
        with np.errstate(all="ignore"):
            return (call.arrays["x"] * np.broadcast_to(np.repeat(scale, call.dims["width"])[:k], (k,))
                    if len(scale) > 1 else call.arrays["x"] * scale,)  # fmt: skip

    seen = set()
    pk.backends()["reference"].implements("counted")(reference)
    op = pk.op(counted)
    assert counted.dims == ("k", "width")
    for extent, number in ((24, 3), (17, 3), (8, 1), (24, 1)):
        assert op.bind(zeros(number), zeros(extent)).dims == {"k": extent, "width": 8}
    assert op.bind(zeros(6), zeros(24), width=4).outputs["y"][0] == (24,)
    with pytest.raises(SpecError, match=r"\(k/width\) is 2; expected 3 or 1, as set by x axis 0 and the option width"):
        op.bind(zeros(2), zeros(24))
    assert typical_signature(counted, "float32")["arrays"]["scale"][0] == [3]
    counted.sample("short", dims={"k": 7, "width": 3})
    assert sample_case(counted).shapes == {"scale": (3,), "x": (7,)}
    assert pk.check(counted, backend="reference", max_examples=30).passed
    assert {whole for one, whole in seen if one == whole} > {1, 2} and any(one < whole for one, whole in seen)
    for width, names in ((1, ("k",)), (8, ())):  # blocks that share a scale are not taken apart
        assert apart(counted, {"width": width}, ("y",)) == names
    assert str(Dim.parse("#k/width")) == "#k/width" and Dim.parse("k/width").names == ("k", "width")
    for wrong in ("k/", "/k", "a*b/c", "k/8", "*k/width", "k/width+1", "k/a/b"):
        with pytest.raises(ValueError, match="shape notation"):
            Dim.parse(wrong)


def test_blocks_are_of_an_axis_and_as_wide_as_an_option_says():
    for shapes in ({"x": "k", "scale": "k/rows"}, {"x": "rows", "scale": "k/width"}):
        with pytest.raises(SpecError, match="counts blocks of k; expected an axis 'k' of a required argument and an"):
            declared(hints(shapes), hints({"y": "rows" if "rows" in shapes["x"] else "k"}))


def test_an_option_is_an_extent():
    @spec(tiling={}, flops=lambda call: 1.0, typical={"blocks": 4, "width": 32})
    def blocked(x: Float[A, "blocks*width"], *, width: Annotated[int, Extent()] = 8) -> BlockedOut:
        """y = the sum of each block."""
        raise NotImplementedError

    @blocked.tolerance
    def bound(call, ref):
        return (np.full(ref[0].shape, np.inf),)

    def reference(call, tiling):
        widths.add(call.options["width"])
        return (call.arrays["x"].reshape(call.dims["blocks"], call.dims["width"]).sum(1),)

    widths = set()
    pk.backends()["reference"].implements("blocked")(reference)
    call = pk.op(blocked).bind(zeros(24))
    assert call.dims == {"blocks": 3, "width": 8} and call.outputs["y"][0] == (3,)
    assert pk.op(blocked).bind(zeros(24), width=4).dims == {"blocks": 6, "width": 4}
    with pytest.raises(SpecError, match=r"x axis 0 \(blocks\*width\) is 24; expected a multiple of width = 5"):
        pk.op(blocked).bind(zeros(24), width=5)
    with pytest.raises(SpecError, match="width is 0; expected an integer >= 1"):
        pk.op(blocked).bind(zeros(24), width=0)
    assert typical_signature(blocked, "float32")["options"] == {"width": 32}
    blocked.sample("two", dims={"blocks": 2, "width": 3})
    assert sample_case(blocked).options == {"width": 3} and sample_case(blocked).shapes == {"x": (6,)}
    assert pk.check(blocked, backend="reference", max_examples=15).passed and len(widths) > 3


class BlockedOut(NamedTuple):
    y: Float[A, "blocks"]


def test_dimensions_of_optional_arrays_alone():
    masked = declared(hints({"x": "n", "bias": "n m?", "other": "m*n?"}), hints({"y": "n"}))
    x, bind = zeros(2), pk.op(masked).bind
    assert bind(x).dims == {"n": 2, "m": 0} and not bind(x).degenerate
    assert bind(x, zeros(2, 3)).dims == bind(x, other=zeros(6)).dims == bind(x, zeros(2, 3), zeros(6)).dims
    assert bind(x, zeros(2, 3)).dims == {"n": 2, "m": 3}
    with pytest.raises(SpecError, match=r"other axis 0 \(m\*n\) is 8; expected 6"):
        bind(x, zeros(2, 3), zeros(8))
    with pytest.raises(SpecError, match=r"other axis 0 \(m\*n\) is 3; expected a multiple of n = 2"):
        bind(x, other=zeros(3))
    ranked = declared(hints({"x": "n", "bias": "*run?", "other": "*run n?"}), hints({"y": "n"}))
    assert pk.op(ranked).bind(x).dims["run"] == () and pk.op(ranked).bind(x, other=zeros(4, 5, 2)).dims["run"] == (4, 5)
    with pytest.raises(SpecError, match="'m' of y is a dimension of optional arrays alone"):
        declared(hints({"x": "n", "bias": "m?"}), hints({"y": "n m"}))


def test_a_divisor_of_0():
    grouped = declared(hints({"x": "heads*group", "y": "heads"}), hints({"z": "heads group"}))
    call = pk.op(grouped).bind(zeros(0), zeros(0))
    assert call.dims == {"heads": 0, "group": 0} and call.degenerate
    with pytest.raises(SpecError, match=r"x axis 0 \(heads\*group\) is 6; expected a multiple of heads = 0"):
        pk.op(grouped).bind(zeros(6), zeros(0))
    known = declared(hints({"y": "heads", "x": "heads*group", "z": "group"}), hints({"w": "heads group"}))
    assert pk.op(known).bind(zeros(0), zeros(0), zeros(3)).dims == {"heads": 0, "group": 3}


def test_an_axis_that_broadcasts_is_learned_from_the_argument_that_has_it_whole():
    scaled = declared(hints({"x": "#n", "y": "#n", "z": "#n?"}), hints({"w": "n"}))
    x, bind = zeros(1), pk.op(scaled).bind
    assert bind(x, x).dims == {"n": 1} and bind(x, zeros(5)).dims == bind(zeros(5), x).dims == {"n": 5}
    assert bind(x, x, zeros(5)).dims == {"n": 5} and bind(x, zeros(0)).dims == {"n": 0}
    with pytest.raises(SpecError, match=r"z axis 0 \(n\) is 4; expected 5 or 1"):
        bind(x, zeros(5), zeros(4))
    whole = declared(hints({"x": "#n", "y": "n"}), hints({"w": "n"}))
    assert pk.op(whole).bind(x, zeros(5)).dims == {"n": 5}
    with pytest.raises(SpecError, match=r"x axis 0 \(n\) is 5; expected 1 or 1, as set by y axis 0"):
        pk.op(whole).bind(zeros(5), x)
    blocks = declared(hints({"a": "k*w", "s": "#k", "t": "#k", "b": "k*w"}), hints({"c": "k w"}))
    assert pk.op(blocks).bind(zeros(12), x, zeros(3), zeros(12)).dims == {"k": 3, "w": 4}


# -------------------------------------------------------------------------------------------------------------- offsets


class SegmentSumOut(NamedTuple):
    y: Float[A, "sequences n"]


def fits(call):
    starts, lens = call.arrays["starts"], call.arrays["lens"]
    lengths = np.diff(starts)
    return starts[0] == 0 and starts[-1] <= call.dims["rows"] and bool(((lens >= 0) & (lens <= lengths)).all())


def read(call):
    """How many rows are read, at most where nobody knows."""
    lens = call.integers("lens")
    return call.dims["rows"] if lens is None else lens.sum()


@spec(
    tiling={},
    flops=lambda call: float(read(call) * call.dims["n"]),
    bytes_moved=lambda call: 4 * (read(call) + call.dims["sequences"]) * call.dims["n"],
    apart=("n", "sequences"),
    require=[Rule(fits, "starts rise from 0, and lens are at most the lengths", values=True)],
)
def segment_sum(x: Float[A, "rows n"], starts: Int[A, "sequences+1"], lens: Int[A, "sequences"]) -> SegmentSumOut:
    """y = the sum of the first lens rows of each sequence; sequences begin at starts."""
    raise NotImplementedError


@segment_sum.values("starts")
def rising(rng, shape, dims, options):
    return np.sort(np.append(rng.integers(0, dims["rows"] + 1, shape[0] - 1), 0))


@segment_sum.values("lens", "starts")
def within(rng, shape, dims, options, starts):
    return rng.integers(0, np.diff(starts) + 1)


@segment_sum.values("starts", measured=True)
def equal(rng, shape, dims, options):
    return np.arange(shape[0]) * (dims["rows"] // dims["sequences"])


@segment_sum.values("lens", "starts", measured=True)
def full(rng, shape, dims, options, starts):
    return np.diff(starts)


@segment_sum.rewrite
def rows_come_along(call, chosen):
    """The rows of the chosen sequences, one sequence behind the other."""
    starts, sequences = call.arrays["starts"], chosen["sequences"]
    rows = ranges(starts[sequences], starts[sequences + 1] - starts[sequences])
    return {"rows": np.concatenate(rows)}, {"starts": np.cumsum([0, *map(len, rows)])}


@segment_sum.edge(dims={"rows": (20, 40), "sequences": (2, 4), "n": (1, 3)})
def a_large_row(arrays, rng, options):
    """A row that is counted where it does not belong shows."""
    arrays["x"][rng.integers(len(arrays["x"]))] = 1000


def ranges(starts, lens):
    return [np.arange(s, s + n) for s, n in zip(starts, lens, strict=False)]


@segment_sum.tolerance
def segment_sum_bound(call, ref):
    rows = ranges(call.arrays["starts"], call.arrays["lens"])
    size = np.array([np.abs(call.arrays["x"][r]).sum(0) for r in rows]).reshape(ref[0].shape)
    err = (call.dims["rows"] + 2) * (units(call).u * size + units(call).tau)
    return (round_to(np.where(size < units(call).huge, err, np.inf), ref[0], call.dtype),)


@pk.backends()["reference"].implements("segment_sum")
def segment_sum_reference(call, tiling):
    rows = ranges(call.arrays["starts"], call.arrays["lens"])
    with np.errstate(all="ignore"):
        return (np.array([call.arrays["x"][r].sum(0) for r in rows]).reshape(len(rows), call.dims["n"]),)


def test_values_depend_on_values_drawn_before():
    seen = []

    def fn(x, starts, lens):
        seen.append(sum(int(n) < int(full) for n, full in zip(lens, np.diff(starts), strict=True)))
        with np.errstate(all="ignore"):
            rows = ranges(starts, lens)
            sums = [x[r].astype(np.float64).sum(0) for r in rows]
            return np.array(sums).reshape(len(lens), x.shape[1]).astype(x.dtype)

    assert pk.check(segment_sum, fn=fn, max_examples=40).passed and sum(n > 0 for n in seen) > 20

    def whole(x, starts, lens):
        return fn(x, starts, np.diff(starts))

    report = pk.check(segment_sum, fn=whole, max_examples=40)
    assert not report.passed
    assert not replay(segment_sum, report.failures[0].case, fn=whole).passed
    assert replay(segment_sum, report.failures[0].case, fn=fn).passed


def test_a_sample_has_values_that_depend_on_each_other():
    segment_sum.sample("three", dims={"rows": 9, "n": 2, "sequences": 3})
    arrays, _ = sample_arrays(segment_sum)
    assert arrays["starts"].shape == (4,) and (arrays["lens"] <= np.diff(arrays["starts"])).all()
    np.testing.assert_array_equal(sample_case(segment_sum).drawn(segment_sum, "lens"), arrays["lens"])


def test_values_are_declared_after_those_that_they_see():
    two = declared(hints({"x": "n", "a": "n", "b": "n"}), hints({"y": "n"}))
    two.values("a", "b")(rising)
    with pytest.raises(SpecError, match="the values of a see those of b; declare the values of b before"):
        two.values("b", "a")
    with pytest.raises(SpecError, match="values are declared for 'c'; expected one of x, a, b"):
        two.values("b", "c")


# --------------------------------------------------------------------------------------------------------------- budget


class GatheredOut(NamedTuple):
    y: Float[A, "sequences d"]


def counted(call):
    """Whatever is read of pages, and what is done to it."""
    assert call.arrays["lens"].max(initial=0) <= call.dims["slots"], "integers as they are drawn"
    return 2.0 * int(call.arrays["lens"].sum()) * call.dims["d"] + call.dims["heads"] * call.dims["group"]


def heaped(budget):
    """An op of seven dimensions, of which no step works on more than three together."""

    @spec(tiling={}, flops=counted, budget=budget)
    def gathered(
        x: Float[A, "pages slots d"],
        sinks: Float[A, "heads group"],
        table: Int[A, "sequences pages_each"],
        lens: Int[A, "sequences"],
    ) -> GatheredOut:
        """y = sums of slots."""
        raise NotImplementedError

    gathered.values("lens")(lambda rng, shape, dims, options: rng.integers(0, dims["slots"] + 1, shape))
    return gathered


def test_flops_limit_what_is_drawn_where_a_spec_says_so():
    by_extents, by_flops = heaped("extents"), heaped("flops")

    def sizes(op, limits, fills=False):
        cases = [drawn(seed, op, limits, {}, fills=fills)[0] for seed in range(60)]
        assert max(op.flops(case.with_integers(op)) for case in cases) <= 2 * (PAIRS if fills else limits.flops)
        return np.median([[np.prod(shape) for shape in case.shapes.values()] for case in cases], 0)

    assert (sizes(by_flops, Limits()) > [1000, 100, 100, 8]).all()
    assert (sizes(by_extents, Limits()) < sizes(by_flops, Limits())).all()
    fill = Limits(fill=2**19)
    assert sizes(by_extents, fill, True)[0] < 2**18 < sizes(by_flops, fill, True)[0]


# ------------------------------------------------------------------------------------------------------------ measuring


def test_a_benchmark_takes_the_values_to_measure_with(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: segment_sum)
    case = TimedCase("mine", "segment_sum", "float32", {"rows": 12, "n": 2, "sequences": 3})
    inputs = make(case, frameworks()["numpy"], "cpu")
    assert inputs.buffers["starts"].view().tolist() == [0, 4, 8, 12]
    assert inputs.buffers["lens"].view().tolist() == [4, 4, 4]
    counted = inputs.counted(inputs.call)
    assert counted.flops == 24 and moved(counted) == 4 * (12 + 3) * 2
    assert turning(inputs.call, inputs.runs) == ("n", 0)
    assert counted.integers("x") is None and counted.replace(concrete=False).integers("lens") is None
    given = replace(case, values={"lens": [1, 2, 3]})
    assert given.text != case.text and "lens = [1, 2, 3]" in describe(given, inputs.call)
    inputs = make(given, frameworks()["numpy"], "cpu")
    assert inputs.buffers["lens"].view().tolist() == [1, 2, 3] and inputs.counted(inputs.call).flops == 12
    assert inputs.counted(inputs.call).replace(concrete=False).flops == 24, "the most"
    assert make(replace(case, values={"lens": 2}), frameworks()["numpy"], "cpu").buffers["lens"].view().max() == 2
    with pytest.raises(SpecError, match=r"the values of lens have shape \(2,\) .* or a list of shape \(3,\)"):
        make(replace(case, values={"lens": [1, 2]}), frameworks()["numpy"], "cpu")


# ---------------------------------------------------------------------------------------------------------------- parts


def large(sequences=400, rows=3000, n=3):
    case = Case("float32", {"x": (rows, n), "starts": (sequences + 1,), "lens": (sequences,)}, seed=1)
    return case, case.buffers(segment_sum)


def test_offsets_are_rewritten_where_some_sequences_are_taken(monkeypatch):
    monkeypatch.setattr("portakern.testing.sampled.WORK", 1.0)  # a part as small as any
    _, buffers = large()
    call = pk.op(segment_sum).bind(**{n: b.view() for n, b in buffers.items()})
    chosen = part_of(call, np.random.default_rng(0))
    assert len(chosen["sequences"][0]) == 2 and len(chosen["rows"][0]) < 3000
    part = part_call(call, buffers, chosen, {})
    assert part.dims["sequences"] == 2 and part.dims["rows"] == len(chosen["rows"][0]) == part.arrays["starts"][-1]
    (output,), ((whole,), (some,)) = segment_sum.outputs, (oracle(call), oracle(part))
    np.testing.assert_allclose(taken(whole, output.dims, call, chosen), some, 1e-12, 1e-12)
    monkeypatch.setattr(segment_sum, "rewriter", None)
    assert {*part_of(call, np.random.default_rng(0))} == {"n"}, "nobody says what becomes of offsets"


def test_a_large_call_over_offsets_is_compared_in_part(monkeypatch):
    monkeypatch.setattr("portakern.testing.sampled.LARGE", 1000)
    case, _ = large()

    def fn(x, starts, lens, shift=0.0):
        rows = ranges(starts, lens)
        return np.array([x[r].astype(np.float64).sum(0) for r in rows], x.dtype) + x.dtype.type(shift)

    assert replay(segment_sum, case, fn=fn).passed
    report = replay(segment_sum, case, fn=lambda *arrays: fn(*arrays, shift=1.0))
    assert not report.passed and "the oracle says" in report.failures[0].what


# --------------------------------------------------------------------------------------------------------------- codes
class CodedOut(NamedTuple):
    q: Num[A, "n"]


def coded_reference(call, tiling):
    return (np.clip(call.arrays["x"], -100, 100),)


def test_an_option_names_the_dtype_of_codes_and_codes_are_judged_as_sets():
    @spec(tiling={}, flops=lambda call: 1.0, result_dtype={"q": "to"}, codes=("q",))
    def coded(x: Float[A, "n"], *, to: Annotated[Any, DType(("float8_e5m2", "int8"))] = "float8_e5m2") -> CodedOut:
        """q = x, clipped at 100 and rounded to ``to``."""
        raise NotImplementedError

    @coded.tolerance
    def bound(call, ref):
        return (np.zeros(ref[0].shape) + np.where(np.isfinite(ref[0]), 0.0, np.inf),)

    pk.backends()["reference"].implements("coded")(coded_reference)
    x = np.array([0.3, 2.5, -1e4], np.float32)
    for to in ("int8", np.int8, np.dtype("int8")):
        assert pk.op(coded)(x, to=to).tolist() == [0, 2, -100]
    assert pk.op(coded)(x).dtype.name == "float8_e5m2"
    with pytest.raises(SpecError, match=r"to is 'float32'; expected a dtype \(float8_e5m2, int8\)"):
        pk.op(coded)(x, to="float32")
    assert pk.check(coded, backend="reference", max_examples=15).passed

    def kernel(x, to="float8_e5m2", rounding=rounded):
        return rounding(np.clip(np.nan_to_num(x.astype(np.float64)), -100, 100), to)

    case = Case("float32", {"x": (300,)}, seed=1)
    assert replay(coded, case, fn=kernel).passed
    away = lambda x, to: rounded(np.trunc(x * 8) / 8, to)  # noqa: E731
    report = replay(coded, case, fn=lambda x, to="float8_e5m2": kernel(x, to, away))
    assert not report.passed and "the oracle says" in report.failures[0].what


def test_codes_are_of_outputs():
    with pytest.raises(SpecError, match="coded: codes names x; expected some of the outputs q"):

        @spec(tiling={}, flops=lambda call: 1.0, result_dtype={"q": "to"}, codes=("x",))
        def coded(x: Float[A, "n"], *, to: Annotated[Any, DType(("int8",))] = "int8") -> CodedOut:
            """q = x."""
            raise NotImplementedError


# ------------------------------------------------------------------------------------------------- a dtype of its own
class PutOut(NamedTuple):
    out: Float[A, "n d"]


def declared_put():
    @spec(
        tiling={}, flops=lambda call: 1.0, aliases={"out": "rows"}, codes=("out",), positive=("n",),
        or_dtypes={"rows": ("float8_e4m3fn", "float8_e5m2")},
    )  # fmt: skip
    def put(x: Float[A, "d"], rows: Float[A, "n d"]) -> PutOut:
        """out = rows with x in the first, clipped at 100."""
        raise NotImplementedError

    @put.tolerance
    def bound(call, ref):
        return (np.zeros(ref[0].shape),)

    def reference(call, tiling):
        out = np.array(call.arrays["rows"])
        out[0] = np.clip(call.arrays["x"], -100, 100)
        return (out,)

    pk.backends()["reference"].implements("put")(reference)
    return put


def test_a_result_has_the_dtype_of_the_input_that_it_may_overwrite():
    """Also where that is not the op's own: of fewer bits than x."""
    put, x = declared_put(), np.array([0.3, -1e4, 2.0], np.float32)
    for name in ("float8_e4m3fn", "float8_e5m2", "float32"):
        dtype = DTYPES[name].numpy
        rows = np.array([[1, 2, 3], [4, 5, 6]], np.float32).astype(dtype)
        call = pk.op(put).bind(x, rows)
        assert call.dtype == "float32" and call.outputs == {"out": ((2, 3), name)}
        out = pk.op(put)(x, rows)
        assert (
            out.dtype == dtype and (out[1] == rows[1]).all() and (out[0] == np.clip(x, -100, 100).astype(dtype)).all()
        )
    with pytest.raises(
        SpecError, match="rows is float16 but x is float32; expected float32 or float8_e4m3fn or float8_e5m2"
    ):
        pk.op(put)(x, rows.astype(np.float16))
    report = pk.check(put, backend="reference", max_examples=40)
    assert report.passed, report.failures


def test_a_result_of_another_dtype_than_its_input_is_told():
    put = declared_put()
    case = Case("float32", {"x": (30,), "rows": (4, 30)}, seed=1, dtypes={"rows": "float8_e4m3fn"})

    def kernel(x, rows, to=None, shift=0.0):
        out = rows.copy()
        out[0] = rounded(np.clip(x.astype(np.float64) + shift, -100, 100), rows.dtype.name)
        return out.astype(to or rows.dtype)

    assert replay(put, case, fn=kernel).passed
    for fault, words in (
        ({"to": np.float32}, "out is float32; expected float8_e4m3fn"),
        ({"shift": 0.1}, "the oracle"),
    ):
        report = replay(put, case, fn=lambda x, rows, fault=fault: kernel(x, rows, **fault))
        assert not report.passed and words in report.failures[0].what


class RowsOut(NamedTuple):
    y: Float[A, "n"]


def test_arrays_that_are_one_have_one_shape_where_a_rule_mends_extents():
    """Of a and b one extent is mended, and b's is c's: the edge on which a is b has no call then: it is drawn again."""
    mended = Rule(lambda call: call.dims["d"] > 3, "d must be above 3", mends=lambda dims: {"d": max(dims["d"], 4)})

    @spec(tiling={}, flops=lambda call: 1.0, require=(mended,), positive=("d", "e"))
    def rows(a: Float[A, "n d"], b: Float[A, "n e"], c: Float[A, "e"]) -> RowsOut:
        """y = 0."""
        raise NotImplementedError

    @rows.tolerance
    def bound(call, ref):
        return (np.zeros(ref[0].shape),)

    pk.backends()["reference"].implements("rows")(lambda call, tiling: (np.zeros(call.dims["n"]),))
    report = pk.check(rows, backend="reference", max_examples=60, only_edges=["a_is_b"])
    assert report.passed and report.examples, report.failures
