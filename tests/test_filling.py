"""Cases that fill a chip: what is drawn, that a part of a call is compared, and that faults of large sizes show."""

from typing import NamedTuple, TypeVar

import numpy as np
import pytest
from jaxtyping import Float

import portakern as pk
from portakern import testing
from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.call import shape_of
from portakern.core.oracle import oracle
from portakern.spec import spec
from portakern.testing import Limits, threads
from portakern.testing.layouts import Buffer
from portakern.testing.sampled import LARGE, SampledCall, part_call, part_of, picked, pieces, repeated, taken
from portakern.testing.verdict import expected
from tests.ops import forward_records
from tests.ops.record import dtype_for

FILL = 2**20
HOW = {"limits": Limits(fill=FILL, layouts=("contiguous",)), "dtypes": ["float32"], "promises": False, "shrink": False}


def torch_softmax(x, *, axis=-1):
    import torch

    return torch.softmax(x, axis).contiguous()


def elements(case):
    return max(int(np.prod(s)) for s in case.shapes.values())


def results(op, case):
    """The elements of the largest result of a case."""
    shapes = [shape for shape, _ in case.bound_alone(pk.op(op).spec).outputs.values()]
    return max(int(np.prod(s)) for s in shapes)


def drawn(op, examples, **limits):
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("portakern.testing.runner.run_case", lambda subject, case, report, excused: found.append(case))
        pk.check(op, backend="reference", max_examples=examples, limits=Limits(**limits))
    return found


@pytest.mark.parametrize("op", [r.op for r in forward_records()])
def test_a_third_of_the_cases_fill_a_chip(op):
    cases = drawn(op, 60, fill=FILL)
    sizes = sorted((max(elements(c), results(op, c)) for c in cases), reverse=True)
    assert len(cases) == 60 and max(map(elements, cases)) <= 8 * FILL
    assert sizes[12] >= FILL // 16 and sizes[5] >= FILL - 64 * 1024, sizes[:20]
    assert max(max(s, default=1) for c in cases for s in c.shapes.values()) >= 16000


@pytest.mark.parametrize("op", [op for op in pk.ops() if registry.find_spec(op).apart])
def test_the_oracle_of_a_part_is_a_part_of_the_oracle(op, monkeypatch):
    """What a spec says of dimensions that do not see each other, on its samples."""
    monkeypatch.setattr("portakern.testing.sampled.WORK", 1.0)  # a part as small as any
    spec = registry.find_spec(op)
    compared = 0
    for name in testing.samples(op):
        for wants in [None, *((o.name,) for o in spec.outputs)] if spec.is_vjp else [None]:
            case = testing.sample_case(op, name, dtype=dtype_for(op, "float64"))
            forward = registry.forward_of(spec)
            absent = {a.name for a in forward.arrays if a.optional and a.name not in case.shapes} if forward else set()
            if any(o.name in (wants or ()) and o.gradient_of in absent for o in spec.outputs):
                continue
            buffers = case.buffers(spec)
            options = {**case.options, **({"wants": wants} if wants else {})}
            call = bind(spec, **{n: b.view() for n, b in buffers.items()}, **options)
            chosen = part_of(call, np.random.default_rng(0))
            if not chosen or not call.wants:
                continue
            part = oracle(part_call(call, buffers, chosen, options))
            for o, whole, some in zip(spec.outputs, oracle(call), part, strict=True):
                if whole is not None:
                    np.testing.assert_allclose(taken(whole, o.dims, call, chosen), some, rtol=1e-12, atol=1e-12)
                    compared += 1
    assert compared


def test_indices_lie_at_ends_and_borders():
    some = picked(np.random.default_rng(0), 100_000, 24)
    assert {0, 99_999} <= set(some) and len(some) == len(set(some)) <= 24
    assert sum(i & (i + 1) == 0 or i & (i - 1) == 0 for i in map(int, some)) >= 6
    assert list(picked(np.random.default_rng(0), 3, 24)) == [0, 1, 2]


def test_a_part_that_is_all_of_a_call_is_no_part():
    """One long row: nothing is copied, and nothing stands for anything."""
    softmax, x = registry.find_spec("softmax"), np.zeros((1, 2 * LARGE), np.float32)
    assert SampledCall.from_call(bind(softmax, x), 0).chosen == {}
    assert SampledCall.from_call(bind(softmax, np.zeros((64, LARGE // 16), np.float32)), 0).chosen


def test_the_oracle_multiplies_in_one_thread_and_whoever_comes_after_in_as_many_as_before(monkeypatch):
    asked = threads._openblas()
    if asked is None:
        pytest.skip("this NumPy multiplies with another library than OpenBLAS")
    get, put = asked
    before, seen = get(), []
    put(2)
    monkeypatch.setattr("portakern.testing.verdict.oracle", lambda call: seen.append(get()) or oracle(call))
    try:
        x = np.ones((3, 4), np.float32)
        with threads.one_thread():
            expected(bind(registry.find_spec("matmul"), x, x.T))
            assert get() == 1, "whoever leaves first leaves the others as they are"
        assert seen == [1] and get() == 2
    finally:
        put(before)


def past_the_grid(x, *, axis=-1):
    """Rows beyond 65,535 are never computed, as where one axis of a grid has no more."""
    import torch

    y = torch_softmax(x, axis=axis)
    if y.numel():
        y.view(-1, y.shape[-1])[65_535:] = torch.nan
    return y


def long_rows_cut(x, *, axis=-1):
    """The sum of a row leaves out what lies beyond 16,384 elements."""
    import torch

    if x.shape[axis] <= 16_384:
        return torch_softmax(x, axis=axis)
    top = x.amax(axis, keepdim=True)
    total = torch.exp(x.narrow(axis, 0, 16_384) - top).sum(axis, keepdim=True)
    return (torch.exp(x - top) / total).contiguous()


def a_counter_of_16_bits(x, *, axis=-1):
    """The last element is written where the first 2^20 - 1 elements fit."""
    y = torch_softmax(x, axis=axis)
    if y.numel() >= 2**20:
        y.view(-1)[-1] *= 1.5
    return y


FAULTS = [past_the_grid, long_rows_cut, a_counter_of_16_bits]


@pytest.mark.parametrize("fault", FAULTS, ids=[f.__name__ for f in FAULTS])
def test_faults_of_large_sizes_show_there_alone(fault):
    pytest.importorskip("torch", reason="torch is not installed")
    small = {**HOW, "limits": Limits(layouts=("contiguous",), longest=0)}
    assert pk.check("softmax", fn=fault, framework="torch", device="cpu", max_examples=60, **small).passed
    for seed in range(3):
        report = pk.check("softmax", fn=fault, framework="torch", device="cpu", max_examples=150, seed=seed, **HOW)
        assert not report.passed, seed


def test_right_functions_pass_where_they_fill_a_chip():
    pytest.importorskip("torch", reason="torch is not installed")
    report = pk.check("softmax", fn=torch_softmax, framework="torch", device="cpu", max_examples=60, **HOW)
    assert report.passed, report.failures


MASKS = [
    {},
    {"is_causal": True},
    {"window": (40, 0)},
    {"window": (9, 25)},
    {"window": (None, 3)},
    {"is_causal": True, "window": (30, 7)},
]


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(90, 90), (50, 130), (130, 70)])
@pytest.mark.parametrize("name", [op for op in pk.ops() if registry.find_spec(op).stretches])
def test_a_stretch_of_a_masked_call_is_a_part_of_it(name, q_len, kv_len, options, monkeypatch):
    """What a spec says of stretches: the oracle and the bound there are the call's, and no bound is looser."""
    monkeypatch.setattr("portakern.testing.sampled.LARGE", 1)
    spec = registry.find_spec(name)
    dims = {"batch": 2, "kv_heads": 2, "group": 2, "q_len": q_len, "kv_len": kv_len, "d": 8, "dv": 4}
    given = [a for a in spec.arrays if not a.optional]
    shapes = {a.name: shape_of(a.dims, dims) for a in given}
    buffers = testing.Case("float32", shapes, options=options).buffers(spec)
    call = bind(spec, **{n: b.view() for n, b in buffers.items()}, **options)
    _, whole, bounds = expected(call)
    position = {o.name: i for i, o in enumerate(spec.outputs)}
    notation = {o.name: o.dims for o in spec.outputs}
    seen = {n: np.zeros(whole[position[n]].shape, bool) for n in call.wants}
    for piece in pieces(call, np.random.default_rng(0)):
        part = part_call(call, buffers, piece.chosen, {**options, **piece.options}).replace(wants=piece.wants)
        _, exact, tight = expected(part)
        for n in piece.wants:
            at = position[n]
            np.testing.assert_allclose(exact[at], taken(whole[at], notation[n], call, piece.chosen), 1e-9, 1e-12)
            there = taken(np.broadcast_to(bounds[at], whole[at].shape), notation[n], call, piece.chosen)
            assert (tight[at] <= there * (1 + 1e-6)).all()
            marks = np.arange(seen[n].size).reshape(seen[n].shape)
            seen[n].reshape(-1)[taken(marks, notation[n], call, piece.chosen).reshape(-1)] = True
    assert all(s.any() for s in seen.values())
    if q_len == kv_len:  # the first, the last and some between: no mask hides all of a query or a key
        ends = {n: s.any(axis=tuple(i for i in range(s.ndim) if i != 1)) for n, s in seen.items()}
        assert all(e[0] and e[-1] for e in ends.values())


def test_one_array_for_both_factors_of_a_large_product_is_compared_in_part():
    """Rows of it are repeated as the first factor's, and columns as the second's."""
    shapes = {"a": (640, 640), "b": (640, 640)}
    case = testing.Case("float32", shapes, "normal", 3, edge="a_is_b", aliased=("a", "b"))
    assert testing.replay("matmul", case, fn=np.matmul).passed
    assert not testing.replay("matmul", case, fn=lambda a, b: a @ (b + (a is b) * 0.01)).passed


A = TypeVar("A")


class DistancesOut(NamedTuple):
    d: Float[A, "rows columns"]


def test_one_array_along_one_axis_of_which_lie_two_dimensions_is_chosen_once():
    """Else what repeats it as the first argument undoes what repeats it as the second."""

    @spec(tiling={}, flops=lambda call: 1.0, apart=("rows", "columns"), typical={"rows": 640, "columns": 640})
    def distances(x: Float[A, "rows"], y: Float[A, "columns"]) -> DistancesOut:
        """d = |x - y| of every two."""
        raise NotImplementedError

    x = np.random.default_rng(0).normal(size=640)
    call = bind(distances, x, x)
    part = SampledCall.from_call(call, 0, ("x", "y"))
    buffer = Buffer(x, x.shape, (1,), 0)
    repeated_x = repeated({"x": buffer, "y": buffer}, call, part.chosen, part.stands)["x"].view()
    d = np.abs(repeated_x[:, None] - repeated_x)
    assert 0 < len(np.unique(repeated_x)) < 640
    assert np.array_equal(part.spread("d", part.part_of_output("d", d)), d)
