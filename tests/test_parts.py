"""Calls cut into parts: what specs declare of them, the rules that follow, and checks that put parts together."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
import pytest
from jaxtyping import Float, Float32
from typer.testing import CliRunner

import portakern as pk
from portakern import testing
from portakern.cli import app
from portakern.core import partitions, registry
from portakern.core.binder import bind
from portakern.core.partitions import Joined, described, partition_rules
from portakern.errors import SpecError
from portakern.spec import Origin, Range, Sum, Tile, WeightedMean, When, spec
from portakern.spec.tolerance import round_to, units
from portakern.testing import partitioned

A = TypeVar("A")


# --------------------------------------------------------------------------------------------------------------- rules
def rules(name, arrays, dtype=np.float32, **options):
    """Axis -> (axes of arrays that are cut, output -> how it is put together, why not)."""
    op = registry.find_spec(name)
    call = bind(op, **{n: np.zeros(s, dtype) for n, s in arrays.items()}, **options)
    found = {}
    for r in partition_rules(call):
        cut = {n: at.axis for n, at in r.arrays.items() if at is not None}
        results = {n: j.at.axis if j.at is not None else j.kind for n, j in r.outputs.items()}
        found[r.name] = (cut, results, r)
    return found


def test_the_rules_of_a_product():
    found = rules("matmul", {"a": (5, 1, 4, 6), "b": (3, 6, 8)})
    assert {n: f[:2] for n, f in found.items()} == {
        "batch[-2]": ({"a": 0}, {"c": 0}),
        "batch[-1]": ({"b": 0}, {"c": 1}),
        "m": ({"a": 2}, {"c": 2}),
        "n": ({"b": 2}, {"c": 3}),
        "k": ({"a": 3, "b": 1}, {"c": "sum"}),
    }
    assert found["k"][2].options == {}
    half = rules("matmul", {"a": (4, 6), "b": (6, 8)}, np.float16)["k"][2]
    assert half.options == {"out_dtype": "float32"} and half.refusal is None


def test_the_rules_of_its_gradients_follow():
    """A batch axis along which an operand is stretched is one more sum of its gradient."""
    arrays = {"a": (5, 1, 4, 6), "b": (3, 6, 8), "d_c": (5, 3, 4, 8)}
    assert {n: f[:2] for n, f in rules("matmul_vjp", arrays).items()} == {
        "batch[-2]": ({"a": 0, "d_c": 0}, {"d_a": 0, "d_b": "sum"}),
        "batch[-1]": ({"b": 0, "d_c": 1}, {"d_a": "sum", "d_b": 0}),
        "m": ({"a": 2, "d_c": 2}, {"d_a": 2, "d_b": "sum"}),
        "n": ({"b": 2, "d_c": 3}, {"d_a": "sum", "d_b": 2}),
        "k": ({"a": 3, "b": 1}, {"d_a": 3, "d_b": 1}),
    }
    half = {n: np.zeros(s, np.float16) for n, s in arrays.items()}
    asked = {r.name: r.options for r in partition_rules(bind(registry.find_spec("matmul_vjp"), **half))}
    wide = {"gradient_dtype": "float32"}
    assert asked == {"batch[-2]": wide, "batch[-1]": wide, "m": wide, "n": wide, "k": {}}
    alone = partition_rules(bind(registry.find_spec("matmul_vjp"), **half, wants=("d_a",)))
    assert {r.name for r in alone if not r.options} == {"batch[-2]", "m", "k"}
    linear = {"x": (4, 6), "weight": (8, 6)}
    refused = rules("linear", linear, np.float16)["k"][2].refusal
    assert "y is a sum of parts, each of which would be rounded to float16" in refused


def test_gradients_that_are_sums_can_be_float32():
    """Each of an op's own dtype that some rule adds up has the option, and no other has."""
    for op in filter(lambda s: s.is_vjp, map(registry.find_spec, registry.ops())):
        rows = described(op)
        assert not [row for row in rows if "not where the sum has 16 bits" in row["notes"]], op.name
        wide = {o.name for o in op.outputs if o.dtype_option}
        kinds = [words.rpartition(": ") for row in rows for words in row["outputs"].split("; ")]
        added = {n for names, _, kind in kinds if kind == "sum" for n in names.split(", ")}
        own = {o.name for o in op.outputs if o.dtype is None}
        stretched = {n for row in rows for n in own if re.search(rf"and .*\b{n}\b.* a sum", row["notes"])}
        assert wide == (added | stretched) & own, op.name


class TwoGradients(NamedTuple):
    d_x: Float[A, "n"]
    d_lse: Float32[A, "n"]


@pytest.mark.parametrize("names", [("d_z",), ("d_x", "d_lse")])
def test_a_gradient_dtype_of_what_is_none_is_refused(names):
    with pytest.raises(SpecError, match=f"gradient_dtype names '{names[-1]}'; expected gradients that follow .*: d_x"):

        @spec(tiling={}, flops=lambda call: 1.0, gradient_dtype=names)
        def bad_vjp(x: Float[A, "n"]) -> TwoGradients: ...


def test_what_is_added_once_is_given_to_the_first_part():
    arrays = {"x": (4, 6), "weight": (8, 6), "bias": (8,), "residual": (4, 8)}
    found = rules("linear", arrays, return_pre=True)
    assert found["k"][:2] == ({"x": 1, "weight": 1}, {"y": "sum", "pre": "sum"})
    assert found["k"][2].once == ("bias", "residual")
    assert "k" not in rules("linear", arrays, activation="silu")
    gradients = rules("linear_vjp", {"x": (4, 6), "weight": (8, 6), "d_y": (4, 8), "bias": (8,)})
    assert gradients["k"][1] == {"d_x": 1, "d_weight": 1, "d_bias": "first"}
    assert gradients["batch[-1]"][1] == {"d_x": 0, "d_weight": "sum", "d_bias": "sum"}


ATTENTION = {"q": (2, 5, 6, 4), "k": (2, 7, 3, 4), "v": (2, 7, 3, 4), "bias": (1, 1, 5, 7), "sinks": (6,)}


def test_the_rules_of_attention():
    found = rules("attention", ATTENTION)
    assert {n: f[:2] for n, f in found.items()} == {
        "batch": ({"q": 0, "k": 0, "v": 0}, {"o": 0}),
        "kv_heads": ({"q": 2, "k": 2, "v": 2, "sinks": 0}, {"o": 2}),
        "q_len": ({"q": 1, "bias": 2}, {"o": 1}),
        "kv_len": ({"k": 1, "v": 1, "bias": 3}, {"o": "merge"}),
    }
    heads, keys = found["kv_heads"][2], found["kv_len"][2]
    assert heads.equal and heads.extent == 3 and heads.arrays["q"].inner == 2 and heads.arrays["k"].inner == 1
    assert keys.once == ("sinks",) and keys.options == {"return_lse": True} and not keys.equal
    assert keys.options_at(3, 4) == {"return_lse": True}
    for options in ({"is_causal": True}, {"window": (2, None)}):  # positions count from the start of all
        masked = rules("attention", ATTENTION, **options)
        assert {n: f[:2] for n, f in masked.items()} == {n: f[:2] for n, f in found.items()}
        assert masked["kv_len"][2].options_at(3, 4) == {"return_lse": True, "q_start": 2, "kv_start": 3}
        assert masked["q_len"][2].options_at(3, 2) == {"q_start": 5, "kv_start": 0}
    part = rules("attention", ATTENTION, is_causal=True, q_start=10, kv_start=4)["q_len"][2]
    assert part.options_at(1, 2) == {"q_start": 11, "kv_start": 4}


@pytest.mark.parametrize("name", ["attention", "attention_vjp"])
def test_places_count_beside_slopes_whatever_options_say(name):
    """Without a mask a part is told where it stands, and what is taken of a long call are no queries from anywhere."""
    gradients = {"o": (2, 5, 6, 4), "lse": (2, 6, 5), "d_o": (2, 5, 6, 4)} if name == "attention_vjp" else {}
    given = {**ATTENTION, "alibi_slopes": (6,), **gradients}
    found = rules(name, given)
    assert found["q_len"][2].options_at(3, 2) == {"q_start": 5, "kv_start": 0}
    told = found["kv_len"][2].options_at(3, 4)
    assert (told["q_start"], told["kv_start"]) == (2, 3) and found["kv_len"][2].arrays["alibi_slopes"] is None
    assert found["kv_heads"][0]["alibi_slopes"] == 0
    forward = registry.find_spec("attention")
    assert "q_len" in forward.apart_in({}, ("o",), ATTENTION)
    assert forward.apart_in({}, ("o",), given) == ("batch", "kv_heads")
    assert forward.apart_in({"is_causal": True}, ("o",), ATTENTION) == ("batch", "kv_heads")


def test_slopes_whose_parts_count_from_their_own_start_are_found(monkeypatch):
    monkeypatch.setattr(Origin, "matters", lambda self, options, given: self.when is None or self.when.holds(options))
    limits = testing.Limits(always=frozenset({"alibi_slopes"}))
    report = testing.check("attention", backend="reference", parts=3, max_examples=60, shrink=False, limits=limits)
    assert report.outcome == "wrong" and "put together" in report.failures[0].what


def test_the_rules_of_attentions_gradients():
    more = {"o": (2, 5, 6, 4), "lse": (2, 6, 5), "d_o": (2, 5, 6, 4)}
    found = {n: f[1] for n, f in rules("attention_vjp", {**ATTENTION, **more}).items()}
    assert found == {
        "batch": {"d_q": 0, "d_k": 0, "d_v": 0, "d_bias": "sum", "d_sinks": "sum"},
        "kv_heads": {"d_q": 2, "d_k": 2, "d_v": 2, "d_bias": "sum", "d_sinks": 0},
        "q_len": {"d_q": 1, "d_k": "sum", "d_v": "sum", "d_bias": 2, "d_sinks": "sum"},
        "kv_len": {"d_q": "sum", "d_k": 1, "d_v": 1, "d_bias": 3, "d_sinks": "first"},
    }


def test_an_axis_that_an_option_names_is_not_cut():
    assert {*rules("softmax", {"x": (3, 4, 5)}, axis=1)} == {"shape[-3]", "shape[-1]"}
    found = rules("logsumexp_vjp", {"x": (3, 4, 5), "d_y": (3, 5)}, axis=1)
    assert {n: f[:2] for n, f in found.items()} == {
        "shape[-3]": ({"x": 0, "d_y": 0}, {"d_x": 0}),
        "shape[-1]": ({"x": 2, "d_y": 1}, {"d_x": 2}),
    }


def test_what_offsets_number_is_not_cut():
    assert [row["dimension"] for row in described(registry.find_spec("varlen_attention"))] == ["kv_heads"]


def test_an_axis_with_an_element_for_each_block_is_not_cut():
    """Blocks of a dimension would have to end where parts do. One element for all of it is every part's."""
    op = registry.find_spec("matmul")
    call, dims = bind(op, np.ones((4, 6)), np.ones((6, 8))), op.argument("a").dims
    assert partitions._axis(call, dims, (4, 6), "m", None) == (0, 1)
    assert partitions._axis(call, dims, (1, 6), "m", None) is None
    with pytest.raises(partitions._OtherExtent):
        partitions._axis(call, dims, (2, 6), "m", None)


# -------------------------------------------------------------------------------------------- ops made for these tests
class DotOut(NamedTuple):
    y: Float[A, "m"]
    z: Float[A, "m k"]


def declared(**words):
    @spec(tiling={"block_m": Tile(16, 64)}, flops=lambda call: 1.0, **words)
    def dot(
        x: Float[A, "m k"],
        w: Float[A, "k*g"],
        offset: Float[A, "m"] | None = None,
        *,
        first: Annotated[int, Range(0)] = 0,
        scale: float = 1.0,
    ) -> DotOut:
        """A product."""
        raise NotImplementedError

    return dot


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"sums": {"n": "y"}}, "sums names the dimension 'n'; expected one of the arguments': m, k, g"),
        ({"sums": {"g": "y"}}, "sums names 'g', which is 'k*g' in an argument; expected a dimension of one axis"),
        ({"sums": {"k": "z"}}, "names z, which is (m k); what has the dimension lies side by side"),
        ({"sums": {"k": ("y", "c")}}, "sums['k'] names 'c'; expected outputs among y, z"),
        ({"sums": {"k": Sum("y", once=("w",))}}, "once of sums['k'] names 'w'; expected optional arrays without k: of"),
        ({"sums": {"k": (3,)}}, "sums['k'] has 3; expected a name of an output or Sum(output)"),
        ({"merges": {"k": WeightedMean("y", by="y")}}, "merges['k'] weighs y by itself"),
        ({"merges": {"k": WeightedMean("y", by="lse")}}, "merges['k'] names 'lse'; expected outputs among y, z"),
        ({"merges": {"k": ("y",)}}, "merges['k'] has 'y'; expected WeightedMean(output, by=output)"),
        ({"sums": {"k": "y"}, "merges": {"k": WeightedMean("y", by="y")}}, "sums and merges both name k"),
        ({"starts": {"k": "scale"}}, "starts['k'] names 'scale'; expected an option that is an integer: first"),
        ({"starts": {"n": "first"}}, "starts names the dimension 'n'"),
        (
            {"starts": {"k": Origin("first", beside=("w",))}},
            "beside of starts['k'] names 'w'; expected optional arrays",
        ),
        ({"starts": {"k": 3}}, "starts['k'] has 3; expected the name of an option or Origin(option)"),
    ],
)
def test_what_contradicts_itself_is_refused_where_it_is_declared(words, message):
    with pytest.raises(SpecError) as e:
        declared(**words)
    assert message in str(e.value)


class GradientOut(NamedTuple):
    d_x: Float[A, "m k"]


def test_gradients_declare_nothing():
    with pytest.raises(SpecError, match="sums names k in an op of gradients; leave it out"):

        @spec(tiling={}, flops=lambda call: 1.0, sums={"k": "d_x"})
        def dot_vjp(x: Float[A, "m k"], d_y: Float[A, "m"]) -> GradientOut:
            """Gradients."""
            raise NotImplementedError


class PlacedOut(NamedTuple):
    y: Float[A, "m"]


def placed(starts):
    """y_i = sum_j x_ij p_j, p_j 1 + (j + first) mod 7 or with plain=True 1: a factor counts from the start of all."""

    @spec(
        tiling={},
        flops=lambda call: 2.0 * call.dims["m"] * call.dims["k"],
        sums={"k": "y"},
        starts=starts,
        apart=("m",),
    )
    def placed_sum(
        x: Float[A, "m k"], *, first: Annotated[int, Range(0, typical=(3, 8))] | None = None, plain: bool = False
    ) -> PlacedOut:
        """A sum whose terms have factors that count from a start."""
        raise NotImplementedError

    def factors(call):
        j = np.arange(call.dims["k"]) + (call.options["first"] or 0)
        return np.ones(call.dims["k"]) if call.options["plain"] else 1.0 + j % 7

    @placed_sum.tolerance
    def bound(call, ref):
        sizes = np.abs(np.where(np.isfinite(call.arrays["x"]), call.arrays["x"], 0)) @ factors(call)
        unit = units(call)
        err = (call.dims["k"] + 2) * unit.u * sizes + call.dims["k"] * unit.tau
        return (round_to(np.where(sizes < unit.huge, err, np.inf), ref[0], call.dtype),)

    @pk.backends()["reference"].implements("placed_sum")
    def oracle(call, tiling):
        with np.errstate(all="ignore"):
            return (call.arrays["x"] @ factors(call),)

    return placed_sum


COUNTED = When(lambda options: not options["plain"], "without plain")


def test_a_dimension_whose_start_an_option_says_is_cut():
    op = placed({"k": Origin("first", COUNTED)})
    (rule,) = (r for r in partition_rules(bind(op, np.ones((2, 9)), first=4)) if r.name == "k")
    assert rule.options_at(5, 2) == {"first": 9} and rule.outputs == {"y": Joined("sum")}
    (rule,) = (r for r in partition_rules(bind(op, np.ones((2, 9)), plain=True)) if r.name == "k")
    assert rule.options_at(5, 2) == {}
    report = testing.check(op, backend="reference", parts=3, max_examples=40, dtypes=["float32", "float64"])
    assert report.passed, str(report)
    assert report.parts["cut along k (sum): bounds"] > 5


def test_without_such_an_option_it_is_not():
    op = placed({"k": Origin(when=COUNTED)})
    assert [r.name for r in partition_rules(bind(op, np.ones((2, 9))))] == ["m"]
    assert {r.name for r in partition_rules(bind(op, np.ones((2, 9)), plain=True))} == {"m", "k"}
    (row,) = (row for row in described(op) if row["dimension"] == "k")
    assert row["options"] == "only with plain=True"


def test_a_start_that_is_left_out_is_found(monkeypatch):
    op = placed({"k": "first"})
    monkeypatch.setattr(partitioned, "part_options", lambda rule, offset, extent: {})
    report = testing.check(op, backend="reference", parts=3, max_examples=40, shrink=False)
    assert report.outcome == "wrong" and "parts along k put together" in report.failures[0].what


def test_gradients_take_the_forward_ops_start(monkeypatch):
    """Where the gradient op has the option; else they are not cut."""
    forward = placed({"k": Origin("first", COUNTED, lambda dims: 10 * dims["k"])})
    monkeypatch.setattr(registry, "forward_of", lambda s: forward)

    def gradients():
        @spec(tiling={}, flops=lambda call: 1.0)
        def with_start(x: Float[A, "m k"], d_y: Float[A, "m"], *, first: int | None = None) -> GradientOut: ...

        @spec(tiling={}, flops=lambda call: 1.0)
        def without(x: Float[A, "m k"], d_y: Float[A, "m"]) -> GradientOut: ...

        arrays = {"x": np.ones((2, 9)), "d_y": np.ones(2)}
        return [{r.name: r for r in partition_rules(bind(s, **arrays))} for s in (with_start, without)]

    known, unknown = gradients()
    assert known["k"].options_at(4, 5) == {"first": 94} and known["k"].outputs["d_x"].kind == "beside"
    assert {*unknown} == {"m"}


# -------------------------------------------------------------------------------------------------------------- checks
@pytest.mark.parametrize("name", [n for n in registry.loadable() if described(registry.find_spec(n))])
def test_every_op_holds_cut_into_parts(name):
    """The oracle's parts, put together by the rule that follows from the spec, are the call's results."""
    report = pk.check(name, backend="reference", parts=3, max_examples=8, shrink=False)
    assert report.passed, str(report)
    assert report.examples == sum(n for words, n in report.parts.items() if words.startswith("cut along"))


@pytest.mark.parametrize("name", ["matmul", "layernorm", "attention"])
def test_triton_has_the_bits_of_the_full_call(name):
    pytest.importorskip("triton")
    report = pk.check(name, backend="triton", variant="gpu", device="cpu", parts=2, max_examples=5, shrink=False)
    assert report.passed, str(report)
    assert any("bits" in words for words in report.parts)


def cut_where_a_sum_is_due(monkeypatch):
    def wrong(call):
        first = {"sum": Joined("first")}
        return [
            replace(r, outputs={n: first.get(j.kind, j) for n, j in r.outputs.items()}) for r in partition_rules(call)
        ]

    monkeypatch.setattr(partitioned, "partition_rules", wrong)


def a_part_twice(monkeypatch):
    monkeypatch.setattr(partitioned, "ranges", lambda extents: [(0, n) for n in extents])


def order_swapped(monkeypatch):
    right = partitioned.combined
    monkeypatch.setattr(partitioned, "combined", lambda call, rule, results: right(call, rule, results[::-1]))


def added_in_every_part(monkeypatch):
    monkeypatch.setattr(
        partitioned, "partition_rules", lambda call: [replace(r, once=()) for r in partition_rules(call)]
    )


def weights_left_out(monkeypatch):
    def even(call, name, how, some, logs):
        return right(call, name, how, some, [np.zeros_like(x) for x in logs])

    right = partitioned._joined
    monkeypatch.setattr(partitioned, "_joined", even)


def start_left_out(monkeypatch):
    """Each part is taken as if it were all."""
    monkeypatch.setattr(partitioned, "part_options", lambda rule, offset, extent: rule.options)


@pytest.mark.parametrize(
    ("plant", "name", "how"),
    [
        (cut_where_a_sum_is_due, "matmul", {}),
        (cut_where_a_sum_is_due, "layernorm_vjp", {}),
        (a_part_twice, "softmax", {}),
        (a_part_twice, "matmul_vjp", {}),
        (order_swapped, "rope", {}),
        (order_swapped, "attention", {}),
        (added_in_every_part, "linear", {"options": {"activation": "none"}}),
        (start_left_out, "attention", {"options": {"is_causal": True}}),
        (start_left_out, "attention_vjp", {"options": {"is_causal": True}}),
        (start_left_out, "cross_entropy_vjp", {}),
        (weights_left_out, "attention", {"options": {"is_causal": False, "window": None}}),
    ],
)
def test_planted_faults_are_found(monkeypatch, plant, name, how):
    plant(monkeypatch)
    report = pk.check(name, backend="reference", parts=3, max_examples=40, dtypes=["float32"], shrink=False, **how)
    assert report.outcome == "wrong", str(report)
    assert "put together" in report.failures[0].what


def product(a, b, *, out_dtype=None):
    """Right in each part, and in the full call."""
    with np.errstate(all="ignore"):
        wide = np.float64 if a.dtype == np.float64 else np.float32
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(wide).astype(out_dtype or a.dtype)


def test_a_function_is_checked_in_parts():
    how = {"parts": 4, "max_examples": 30, "dtypes": ["float32", "float16"], "promises": False, "shrink": False}
    report = pk.check("matmul", fn=product, **how)
    assert report.passed, str(report)
    assert report.verdict.startswith("passed: bounds and edges")

    def by_size(a, b, *, out_dtype=None):  # a factor that is right for long sums alone
        return (product(a, b, out_dtype=out_dtype) * (1 if a.shape[-1] > 4 else 2)).astype(out_dtype or a.dtype)

    assert pk.check("matmul", fn=by_size, **how).outcome == "wrong"


def test_other_bits_of_a_part_break_a_promise():
    def rounds_by_width(a, b, *, out_dtype=None):
        odd = np.float32(1 + 2.0**-23 * (b.shape[-1] % 2))
        with np.errstate(all="ignore"):
            return (product(a, b) * odd).astype(out_dtype or a.dtype)

    report = pk.check("matmul", fn=rounds_by_width, parts=2, max_examples=30, dtypes=["float32"], shrink=False)
    assert report.outcome == "broke a promise"
    assert "elements have other bits" in report.failures[0].what


def test_a_failure_names_the_line_that_cuts_its_case_again(monkeypatch):
    order_swapped(monkeypatch)
    report = pk.check("rope", backend="reference", parts=2, max_examples=10, dtypes=["float32"])
    case = report.failures[0].case
    ((axis, extents),) = json.loads(case)["parts"].items()
    assert axis in ("batch", "seq", "heads") and len(extents) == 2
    again = testing.replay("rope", case, backend="reference")
    assert again.outcome == "wrong" and "2 parts along" in again.failures[0].what
    monkeypatch.undo()
    assert testing.replay("rope", case, backend="reference").passed


CASE = {"dtype": "float32", "shapes": {"a": [2, 6], "b": [6, 3]}}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"d": [1, 2]}, "parts names 'd'; expected an axis among m, n, k"),
        ({"k": [2, 2]}, "parts along k are [2, 2]; expected extents that add to 6"),
        ({"k": 3}, "the case's parts is {'k': 3}; expected an object of one axis and the extents of its parts"),
    ],
)
def test_a_case_that_cannot_be_cut_so_is_refused(parts, message):
    with pytest.raises(SpecError) as e:
        report = testing.replay("matmul", json.dumps({**CASE, "parts": parts}), backend="reference")
        raise SpecError(report.failures[0].what)
    assert message in str(e.value)


@pytest.mark.parametrize("count", [1, 0, 65, 2.0, True])
def test_a_number_of_parts_that_is_none_is_refused(count):
    with pytest.raises(SpecError, match="expected a whole number from 2 to 64"):
        pk.check("matmul", backend="reference", parts=count)


def test_the_command_line_cuts_and_shows():
    run = CliRunner()
    found = run.invoke(app, ["check", "linear", "--backend", "reference", "--parts", "3", "--max-examples", "8"])
    assert found.exit_code == 0, found.output
    assert "parts of linear" in found.output and "cut along" in found.output
    shown = run.invoke(app, ["show", "linear", "--json"])
    (row,) = (row for row in json.loads(shown.output)["parts"] if row["dimension"] == "k")
    assert row == {
        "dimension": "k",
        "cut": "x, weight",
        "outputs": "y, pre: sum",
        "options": "not with activation other than 'none'",
        "notes": "bias, residual given to the first part alone; not where the sum has 16 bits",
    }
