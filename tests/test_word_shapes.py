"""An axis that disappears and outputs that take an input's memory: binding, the checker, torch and JAX."""

from __future__ import annotations

from typing import Annotated, TypeVar

import numpy as np
import pytest
from jaxtyping import Float, Int

import portakern as pk
from portakern import inventory, testing
from portakern.core import registry
from portakern.core.binder import bind
from portakern.spec.options import Axis
from portakern.tools.compile.abstract import typical_signature
from tests import word_ops as ops
from tests.word_kernels import (
    IN_PLACE,
    PEAKS,
    backend,
    declared,
    failure,
    in_jax,
    in_place,
    in_torch,
    masked_sum,
    passes,
    peak_in_jax,
    peak_in_torch,
    peak_of,
    segment_sums,
)

A = TypeVar("A")
X = np.random.default_rng(1).standard_normal((3, 4, 5)).astype(np.float32)


def test_the_shape_loses_the_axis_that_is_named():
    for axis, rest in ((-1, (3, 4)), (0, (4, 5)), (-2, (3, 5))):
        call = bind(ops.peak, X, axis=axis, return_at=True)
        assert call.dims == {"shape": (3, 4, 5), "rest": rest, "axis": X.shape[axis]}
        assert call.outputs == {"y": (rest, "float32"), "at": (rest, "int32")}
    assert bind(ops.peak, X[0, 0]).outputs["y"][0] == ()
    bind(ops.peak, X, X[:, 0], axis=1)
    with pytest.raises(
        pk.SpecError, match=r"floor axis 0 \(rest\) is \(3, 4\); expected \(3, 5\), as set by x and axis"
    ):
        bind(ops.peak, X, X[:, :, 0], axis=1)


def test_an_empty_axis_has_its_declared_value_and_an_empty_rest_is_empty():
    y, at = pk.op(ops.peak)(np.zeros((3, 0), np.float32), return_at=True)
    assert y.tolist() == [-np.inf] * 3 and at.tolist() == [-1] * 3 and y.dtype == np.float32
    assert pk.op(ops.peak)(np.zeros((0, 3), np.float32)).shape == (0,)
    assert pk.op(ops.peak)(np.zeros((0, 3), np.float32), axis=0).tolist() == [-np.inf] * 3


@pytest.mark.parametrize("framework", PEAKS)
def test_the_checker_finds_its_way_with_an_axis_that_goes(framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    report = passes(ops.peak, backend("peak", PEAKS[framework], framework), 30 if framework == "jax" else 80)
    assert {"no_axis", "empty_rest", "several_block"} <= set(report.edges)
    shapes = testing.cases.edges(ops.peak)
    assert shapes["several_block"].dims == {"axis": (257, 300)}


def test_wrong_axes_are_caught():
    def first(call, tiling):
        return peak_of(call.replace(options={**call.options, "axis": 0}), tiling)

    said = failure(ops.peak, first).partition(": ")[2]
    assert said.startswith("y") or "returned y of shape" in said or "could not be broadcast" in said

    def kept(call, tiling):
        y, at = peak_of(call, tiling)
        return np.expand_dims(y, call.options["axis"]), at

    assert "returned y of shape" in failure(ops.peak, kept)

    def short(call, tiling):
        first_tile = np.moveaxis(np.moveaxis(call.arrays["x"], call.options["axis"], 0)[:16], 0, call.options["axis"])
        return peak_of(call.replace(arrays={**call.arrays, "x": first_tile}), tiling)

    assert failure(ops.peak, short, only_edges=["several_block"])


def test_a_typical_call_and_its_lines_on_show(monkeypatch, capsys):
    assert typical_signature(ops.peak, "float16")["arrays"] == {"x": [[4, 8], "float16", None]}
    monkeypatch.setattr(registry, "find_spec", lambda name: getattr(ops, name))
    shown = inventory.show("peak")
    assert shown["dimensions"] == {"rest": "shape without the axis axis"} and shown["samples"][0] == "rows"
    assert inventory.show("segment_add")["outputs"][0]["memory"] == "new, or that of total with overwrite"
    assert inventory.show("segment_add")["outputs"][0]["dtype"] == "that of total"
    assert inventory.show("masked_add")["outputs"][0]["dtype"] == "int32"


def test_a_cotangent_takes_the_shape_without_the_axis():
    """An argument of ``*rest``, required or not, waits for the option."""
    arrays = {"x": Float[A, "*shape"], "d_y": Float[A, "*rest"], "counts": Int[A, "*rest"] | None}
    axis = {"axis": Annotated[int, Axis("x")]}
    total_vjp = declared(arrays, {"d_x": Float[A, "*shape"]}, axis, drops={"rest": "axis"})
    assert bind(total_vjp, X, X[:, 0], axis=1).outputs == {"d_x": ((3, 4, 5), "float32")}
    with pytest.raises(pk.SpecError, match=r"d_y axis 0 \(rest\) is \(3, 4\); expected \(4, 5\), as set by x and axis"):
        bind(total_vjp, X, X[..., 0], axis=0)
    with pytest.raises(pk.SpecError, match=r"counts axis 0 \(rest\) is \(1,\); expected \(3, 4\)"):
        bind(total_vjp, X, X[..., 0], np.zeros(1, np.int32))
    refusing = declared(arrays, {"y": Float[A, "*rest"]}, axis, drops={"rest": "axis"}, positive=("axis",))
    with pytest.raises(pk.SpecError, match=r"the extent along axis is 0 \(x axis 1\); expected at least 1"):
        bind(refusing, np.zeros((3, 0), np.float32), np.zeros(3, np.float32))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vmap_shifts_the_axis(axis, dim):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    y, at = pk.op(ops.peak)(np.moveaxis(X, dim, 0)[0], axis=axis % 2, return_at=True)
    runs = []

    def kernel(call, tiling):
        runs.append(call.dims["shape"])
        return peak_in_torch(call, tiling)

    run = pk.op(ops.peak, backend=backend("peak", kernel, "torch"))
    joined = torch.func.vmap(lambda x: run(x, axis=axis % 2, return_at=True), in_dims=dim)(torch.from_numpy(X))
    assert len(runs) == 1 and len(runs[0]) == 3  # one call, whose batch is one axis more
    run = pk.op(ops.peak, backend=backend("peak", peak_in_jax, "jax"))
    mapped = jax.vmap(lambda x: run(x, axis=axis % 2, return_at=True), in_axes=dim)(jax.numpy.asarray(X))
    for tops, places in (joined, mapped):
        assert tops.shape == np.moveaxis(X, dim, 0).max(1 + axis % 2).shape
        np.testing.assert_array_equal(tops[0], y)
        np.testing.assert_array_equal(places[0], at)


def test_compiled_and_staged_calls_know_the_shape():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    run = pk.op(ops.peak, backend=backend("peak", peak_in_torch, "torch"))
    y, at = torch.compile(lambda x: run(x, axis=1, return_at=True), fullgraph=True, backend="aot_eager")(
        torch.from_numpy(X)
    )
    np.testing.assert_array_equal(y, X.max(1))
    np.testing.assert_array_equal(at, X.argmax(1))
    for name in ("mine", "reference"):
        made = backend("peak", peak_in_jax, "jax") if name == "mine" else name
        run = pk.op(ops.peak, backend=made)
        y, at = jax.jit(lambda x, run=run: run(x, axis=0, return_at=True))(X)
        np.testing.assert_array_equal(at, X.argmax(0))
        assert y.shape == (4, 5) and at.dtype == np.int32
        empty = jax.jit(lambda x, run=run: run(x, axis=0))(X[:0])
        assert empty.tolist() == [[-np.inf] * 5] * 4


# ------------------------------------------------------------------------------------------------------ shared memory
def small(framework="numpy", **changes):
    arrays, _ = testing.sample_arrays(ops.segment_add, framework=framework, seed=2)
    return arrays | changes


@pytest.mark.parametrize("framework", IN_PLACE)
def test_a_result_is_written_over_an_input_where_the_call_asks(framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    run = pk.op(ops.segment_add, backend=backend("segment_add", IN_PLACE[framework], framework))
    want = pk.op(ops.segment_add)(**small())
    for ask in ("total", ("total",), ["total"]) * 2:  # the second time as it was decided the first
        arrays = small(framework)
        out = run(**arrays, overwrite=ask)
        assert out is arrays["total"]
        np.testing.assert_allclose(out, want, rtol=1e-5)
        if framework == "torch":
            assert out._version > 0 and not any(a._version for n, a in arrays.items() if n != "total")
    arrays = small(framework)
    np.testing.assert_allclose(run(**arrays), want, rtol=1e-5)
    np.testing.assert_array_equal(arrays["total"], small()["total"])
    passes(ops.segment_add, backend("segment_add", IN_PLACE[framework], framework))


def read_only(x):
    x.flags.writeable = False
    return x


REFUSED = {
    "another name": (dict, "out", "overwrite names 'out'; expected names among total"),
    "no name": (dict, 3, "overwrite is 3; expected names among total: leave it out"),
    "a constant": (lambda: small(total=read_only(small()["total"])), "total", "is read-only, or has elements"),
    "repeated rows": (
        lambda: small(total=np.lib.stride_tricks.as_strided(np.ones(4, np.float32), (3, 4), (0, 4))),
        "total",
        "is read-only, or has elements that share memory",
    ),
    "gaps": (lambda: small(total=np.ones((3, 8), np.float32)[:, ::2]), "total", "is not contiguous"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_result_cannot_lie_over_is_refused(what):
    make, ask, why = REFUSED[what]
    arrays = small() | make()
    before = arrays["total"].copy()
    for made in ("reference", backend("segment_add", in_place), backend("segment_add", in_torch, "torch")):
        with pytest.raises(pk.SpecError, match=f"segment_add: .*{why}"):
            pk.op(ops.segment_add, backend=made)(**arrays, overwrite=ask)
    np.testing.assert_array_equal(arrays["total"], before)


def test_an_array_that_is_two_arguments_is_not_written_over():
    same = np.ones((3, 3), np.float32)
    arrays = {"q": np.ones((3, 3), np.int8), "scales": same[0], "starts": np.array([0, 1, 2]), "total": same}
    run = pk.op(ops.segment_add, backend=backend("segment_add", in_place))
    with pytest.raises(pk.SpecError, match="total, which shares memory with scales"):
        run(**arrays, overwrite="total")
    assert run(**arrays).tolist() == [[2.0] * 3] * 3 and same.tolist() == [[1.0] * 3] * 3


def test_who_makes_new_arrays_alone_is_not_asked_for_others():
    run = pk.op(ops.segment_add, backend=backend("segment_add", segment_sums))
    with pytest.raises(
        pk.UnsupportedError, match="'mine' cannot: it cannot write a result over an input; leave out overwrite"
    ):
        run(**small(), overwrite="total")


def test_arrays_of_another_library_and_of_the_oracle_are_written_over():
    want = pk.op(ops.segment_add)(**small())
    for framework, made in (("numpy", backend("segment_add", in_torch, "torch")), ("torch", "reference")):
        arrays = small(framework)
        assert pk.op(ops.segment_add, backend=made)(**arrays, overwrite="total") is arrays["total"]
        np.testing.assert_allclose(arrays["total"], want, rtol=1e-5)


def test_immutable_recorded_and_watched_inputs_keep_their_values():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    run = pk.op(ops.segment_add, backend=backend("segment_add", in_torch, "torch"))
    want = np.asarray(run(**small()))
    with pytest.raises(pk.SpecError, match="JAX arrays are immutable; leave it out, .*donate_argnums"):
        run(**small("jax"), overwrite="total")
    staged = pk.op(ops.segment_add, backend=backend("segment_add", in_jax, "jax"))
    with pytest.raises(pk.SpecError, match="JAX arrays are immutable"):
        jax.jit(lambda a: staged(**a, overwrite="total"))(small("jax"))
    np.testing.assert_allclose(jax.jit(lambda a: staged(**a))(small("jax")), want, rtol=1e-5)
    arrays = small("torch")
    compiled = torch.compile(lambda a: (run(**a), a["total"] + 1), fullgraph=True, backend="aot_eager")
    out, later = compiled(arrays)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(later, small()["total"] + 1)
    with pytest.raises(Exception, match="segment_add: overwrite is given in a call that PyTorch records"):
        torch.compile(lambda a: run(**a, overwrite="total"), fullgraph=True, backend="eager")(arrays)
    torch.library.opcheck(torch.ops.portakern.segment_add.default, tuple(small("torch").values()))
    with pytest.raises(pk.SpecError, match="PyTorch records this call"):
        torch.func.vmap(lambda total: run(**(arrays | {"total": total}), overwrite="total"))(
            torch.stack([arrays["total"]] * 2)
        )
    np.testing.assert_array_equal(arrays["total"], small()["total"])


def test_who_looks_on_sees_what_was_given():
    pytest.importorskip("torch")
    run = pk.op(ops.segment_add, backend=backend("segment_add", in_torch, "torch"))
    for _ in range(2):
        arrays = small("torch")
        with testing.audit() as seen:
            run(**arrays, overwrite="total")
        assert not seen.broken and seen.worst
        np.testing.assert_allclose(arrays["total"], pk.op(ops.segment_add)(**small()), rtol=1e-5)


def test_other_sharing_and_writing_is_still_wrong():
    def shares_another(call, tiling):
        call.arrays["total"][...] = segment_sums(call, tiling)[0]
        return (call.arrays["total"],)

    assert "in memory that it shares with the call's total" in failure(ops.segment_add, shares_another)

    def writes_elsewhere(call, tiling):
        out = segment_sums(call, tiling)
        call.arrays["scales"][...] = 0
        return out

    assert "the input scales was written to" in failure(ops.segment_add, writes_elsewhere)

    def scratch(call, tiling):
        out = segment_sums(call, tiling)
        call.arrays["total"][...] = 7
        return out

    assert "the input total was written to" in failure(ops.segment_add, scratch)


def over_another(call, tiling):
    (out,), over = segment_sums(call, tiling), call.overwritten("out")
    if over is not None:
        call.arrays["scales"][...] = 0
        over[...] = out
        out = over
    return (out,)


def reading_what_it_wrote(call, tiling):
    over = call.overwritten("out")
    if over is None:
        return segment_sums(call, tiling)
    over[:1] = segment_sums(call, tiling)[0][:1]
    over[...] = segment_sums(call, tiling)[0]  # the first segment's sums twice
    return (over,)


def beside_it(call, tiling):
    out = in_place(call, tiling)
    base = call.arrays["total"].base
    if call.over and base is not None and base.ndim == 1 and base.size > out[0].size:
        base[-1] = 7
    return out


def elsewhere(call, tiling):
    return segment_sums(call, tiling)


WRITES_WRONGLY = {
    over_another: "the input scales was written to",
    reading_what_it_wrote: "with overwrite of total",
    beside_it: "memory outside the input total was written to",
    elsewhere: "in other memory; expected total itself, written over",
}


@pytest.mark.parametrize("kernel", WRITES_WRONGLY, ids=lambda k: k.__name__)
def test_the_checker_sees_what_is_wrong_only_where_results_lie_over_inputs(kernel):
    kernel.overwrites = True
    assert WRITES_WRONGLY[kernel] in failure(ops.segment_add, kernel)


def test_what_is_shared_with_others_is_still_wrong():
    assert "shares with the call's keep" in failure(
        ops.masked_add,
        lambda call, tiling: (masked_sum(call, np.int32)[0], call.arrays["keep"], masked_sum(call, np.int32)[2]),
    )
