"""Plans in which many programs add to a result: only where they are named, within the bounds, and said to be so."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import portakern as pk
from portakern import testing
from portakern.core import dispatch, registry, targets, tilings
from portakern.core.backend import Backend
from portakern.core.binder import unchecked
from portakern.core.explain import explain
from portakern.testing.laws import LawCase, run_law
from portakern.testing.verdict import BrokenPromise
from portakern.tools.bench import contenders

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton import interpreter, plan  # noqa: E402
from portakern.backends.triton.launch import recording  # noqa: E402
from portakern.backends.triton.lib import gluon, gluon_gradients  # noqa: E402
from portakern.backends.triton.unordered import _flash_unordered  # noqa: E402
from portakern.backends.triton.unordered import attention_vjp as unordered  # noqa: E402
from tests import gluon_on_host as host  # noqa: E402
from tests.test_hopper_gradients import (  # noqa: E402
    bound,
    clean,
    compiles,
    two_documents,
    under_a_wide_softcap,
    worst_share,
)

BACKEND = registry.backend("triton")
(FAMILY,) = (f for f in BACKEND.families if f.name == "unordered")
VARIANT = BACKEND.implementation("attention_vjp", FAMILY)
ORDERED = "attention_vjp_gradients_kernel"
KERNELS = ["attention_vjp_statistics_kernel", "attention_vjp_unordered_kernel", "attention_vjp_unordered_round_kernel"]


def on_the_host(module: Any, kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
    """What a launch does, on the host: kernels of ``tl`` interpreted, the others by threads."""
    if kernel.__name__ != "attention_vjp_unordered_kernel":
        interpreter.run(kernel, grid, *args, **constexprs)
        return
    host.launched(kernel, [module, gluon_gradients, gluon], grid, args, plan=constexprs["plan"])


CASES = {
    "causal": ((1, 260, 1, 2, 260, 128), {"is_causal": True}),
    "causal, narrow": ((1, 260, 1, 2, 260, 64), {"is_causal": True}),
    "band": ((1, 100, 1, 2, 170, 64), {"window": (40, 10), "given": ("d_lse",)}),
    "more queries than keys": ((2, 90, 1, 3, 40, 72, 40), {"is_causal": True, "dtype": torch.float16}),
    "softcap": ((1, 150, 1, 2, 200, 128), {"is_causal": True, "softcap": 5.0}),
    "softcap, narrow": ((1, 150, 1, 2, 200, 64), {"window": (70, None), "softcap": 5.0}),
    "narrow values": ((1, 70, 1, 1, 140, 128, 64), {"window": (None, 90), "scale": -0.2}),
    "programs that stay": ((2, 200, 2, 1, 300, 64), {}),
    "programs that stay, wide": ((1, 130, 2, 1, 300, 128), {}),
    "one": ((1, 1, 1, 1, 1, 64), {}),
    "a part of the keys": ((1, 200, 1, 2, 130, 64), {"is_causal": True, "q_start": 90, "kv_start": 130}),
    "keys that queries have passed": ((1, 130, 1, 1, 300, 64), {"window": (40, 3), "q_start": 230}),
    "documents": ((2, 200, 1, 2, 200, 64), {"is_causal": True, "segments": "documents"}),
    "documents, more keys": ((1, 130, 2, 1, 300, 128), {"segments": "documents", "dtype": torch.float16}),
    "segments in any order": ((1, 200, 1, 2, 150, 64), {"segments": "shuffled", "window": (90, 30), "softcap": 4.0}),
    "segments of nobody": ((1, 130, 1, 1, 130, 64), {"segments": "scattered"}),
}


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch):
    monkeypatch.setattr(unordered, "processors", lambda device: 2)


def tiling_of(call: Any, **named: int) -> Any:
    return tilings.resolve(VARIANT, call, named).tiling


def worst(call: Any, module: Any = _flash_unordered, **named: int) -> float:
    """:func:`worst_share` of a run on the host."""
    with recording(partial(on_the_host, module)):
        return worst_share(call, VARIANT.run(call, tiling_of(call, **named)))


@pytest.mark.parametrize("name", CASES)
def test_every_role_meets_the_bound(name):
    """Barriers that are waited for, buffers that are handed back, what groups show each other, rows that are masked."""
    shape, more = CASES[name]
    assert worst(bound(*shape, **more)) <= 1


@pytest.mark.parametrize(
    ("length", "dirty", "gradients"), [(128, ("q", "k", "v", "d_o"), 3), (1, ("v",), 2)], ids=["tiles", "a tile"]
)
def test_other_documents_leave_no_trace(length, dirty, gradients):
    """Their tiles are not visited, and in a tile of several their values do not count."""
    call = two_documents(bound(1, 256, 1, 1, 256, 64), length, dirty)
    with recording(partial(on_the_host, _flash_unordered)):
        assert clean(VARIANT.run(call, tiling_of(call))[:gradients], length)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("behind", [0, 1])
def test_a_role_may_be_late(late, behind, monkeypatch):
    monkeypatch.setattr(host, "LATE", {late: 5e-3})
    shape, more = CASES["causal"]
    assert worst(bound(*shape, **more), behind=behind) <= 1


def test_no_weight_is_above_1_under_a_wide_softcap():
    assert worst(under_a_wide_softcap().replace(wants=("d_q", "d_k", "d_v"))) <= 1


def test_one_stage_meets_the_bound():
    shape, more = CASES["causal"]
    assert worst(bound(*shape, **more), num_stages=1) <= 1


@pytest.mark.parametrize("name", ["causal", "causal, narrow", "softcap, narrow", "programs that stay, wide", "one"])
def test_the_walk_that_the_table_does_not_take_meets_the_bound(name):
    """Behind the weights of the next tile at heads of 128, and each tile's d_q before the next at 64."""
    shape, more = CASES[name]
    call = bound(*shape, **more)
    assert worst(call, behind=1 - tiling_of(call)["behind"]) <= 1


def test_keys_that_are_not_there_give_a_query_nothing():
    """Beyond the last key lies 0: a weight exp(0 - lse) there is infinite, and 0 times it would be added to d_q."""
    for d, options in ((64, {}), (128, {"window": (40, None)}), (128, {"window": (None, 90)})):
        call = bound(1, 70, 1, 1, 70, d, **options)
        q, k = torch.full_like(call.arrays["q"], 12.0), torch.full_like(call.arrays["k"], -12.0)
        o, lse = pk.op("attention", backend="triton")(q, k, call.arrays["v"], return_lse=True, **options)
        assert lse.max() < -900
        for behind in (0, 1):
            assert worst(call.replace(arrays={**call.arrays, "q": q, "k": k, "o": o, "lse": lse}), behind=behind) <= 1


def finds_on_host(module, case):
    """Whether a kernel's module with a fault in it shows that on the host, whichever group is late: see
    tests/mutants/faults."""
    shape, more = CASES["causal" if case == "behind" else case]
    named = {"behind": 1} if case == "behind" else {}
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(unordered, "processors", lambda device: 2)
            patched.setattr(host, "PATIENCE", 0.7)
            patched.setattr(host, "LAZY", True)
            for group in (0, 1):
                patched.setattr(host, "LATE", {group: 5e-3})
                if worst(bound(*shape, **more), module, **named) > 1:
                    return True
    except (testing.Broken, AssertionError, TimeoutError):
        return True
    return False


SM_90 = targets.find("sm_90").target
CALL = bound(1, 260, 1, 2, 260, 128, device="meta", is_causal=True)


def variants(call: Any, variant: str | None = None) -> list[str]:
    return [r.impl.family.name for r in dispatch.find_routes(BACKEND, call, SM_90, variant)]


def test_it_serves_calls_that_name_it_and_no_others():
    assert variants(CALL) == ["hopper", "gpu"]
    assert variants(CALL, "unordered") == ["unordered"]
    forward = CALL.replace(spec=registry.find_spec("attention"))
    assert variants(forward, "unordered") == ["hopper", "unsplit", "gpu"], "it has the gradients alone"
    with pytest.raises(pk.UnsupportedError, match=r"it has no softmax in portakern.backends.triton.unordered"):
        variants(CALL.replace(spec=registry.find_spec("softmax")), "unordered")


def test_gradients_go_where_the_forward_call_was_told():
    vjp, forward = CALL.spec, registry.find_spec("attention")
    for named, taken in (("unordered", "unordered"), ("gpu", "gpu"), (None, None)):
        choice = dispatch.Choice.from_names(forward, "triton", named, {"block_q": 64})
        of = dispatch.gradient_choice(BACKEND, vjp, choice)
        assert (of.backend, of.variant, of.tiling) == (BACKEND, taken, {"block_q": 64})
    named, softmax_vjp = dispatch.Choice(BACKEND, "unordered"), registry.find_spec("softmax_vjp")
    assert dispatch.gradient_choice(BACKEND, softmax_vjp, named).variant is None, "it has no such gradients"
    x = torch.ones(1, 8, 2, 16, requires_grad=True)
    pk.op("attention", backend="triton", variant="gpu")(x, x, x).sum().backward()
    with pytest.raises(pk.UnsupportedError, match="variant 'unordered' is not for cpu"):
        pk.op("attention", backend="triton", variant="unordered")(x, x, x)


def test_explain_says_whose_bits_may_change(monkeypatch):
    monkeypatch.setattr(type(CALL.framework), "target", lambda self, device: SM_90)

    def told(call: Any, variant: str | None) -> str:
        return explain(call, dispatch.Choice.from_names(call.spec, "triton", variant, None))

    named, unnamed = told(CALL, "unordered"), told(CALL, None)
    assert f"  not deterministic: d_q: {unordered.ADDED}" in named
    assert "variant unordered: serves this call (named)" in named
    assert "  bits of" not in unnamed
    assert "variant unordered: used only when named: not deterministic: bits of d_q may change from run" in unnamed
    forward = unchecked(registry.find_spec("attention"), *(CALL.arrays[n] for n in "qkv"))
    assert "variant unordered: has no attention; serves its gradients" in told(forward, "unordered")
    assert "variant hopper: serves this call\n" in told(forward, "unordered")


def test_what_has_no_room_is_refused():
    assert tiling_of(CALL)["block_q"] == 64
    assert tiling_of(bound(1, 90, 1, 1, 90, 64, 40, device="meta"))["block_q"] == 128
    capped = bound(1, 90, 1, 1, 90, 64, device="meta", softcap=5.0)
    assert unordered.supports(capped, tiling_of(capped)) is None, "it has 64 scores of a row at a time, of 128 queries"
    for more, named, why in (
        ({"d": 136}, {}, "no room beside each other"),
        ({"d": 128}, {"num_stages": 8}, "bytes of shared memory"),
        ({"d": 128}, {"block_q": 32}, "tiles of 32 queries at 128 columns; expected 64"),
        ({"d": 64, "dtype": torch.float32}, {}, "dtype float32: this kernel takes"),
        ({"d": 64, "given": ("bias",)}, {}, "bias is given"),
    ):
        call = bound(1, 90, 1, 1, 90, **more, device="meta")
        assert why in unordered.supports(call, tilings.default(VARIANT, call).tiling.replace(**named))


def test_short_queries_take_little_memory_for_sums():
    """Of a query each of many sequences: whole tiles of sums would be 128 times what they fill."""
    call, sums = bound(512, 1, 1, 1, 1, 64, device="meta"), []
    with recording(lambda kernel, grid, args, constexprs: sums.append(args[0]) if "round" in kernel.__name__ else None):
        VARIANT.run(call, tiling_of(call))
    assert [x.shape for x in sums] == [(512, 1, 4, 64)]


def test_a_gradient_that_nobody_wants_is_not_written():
    call = bound(1, 130, 1, 2, 140, 64, is_causal=True)
    for wants, kernels in ((("d_q",), KERNELS), (("d_q", "d_v"), KERNELS), (("d_k", "d_v"), [KERNELS[0], ORDERED])):
        some, ran = call.replace(wants=wants), []
        with recording(lambda kernel, grid, args, constexprs, ran=ran: ran.append(kernel.__name__)):
            serving, tiling = VARIANT.resolve(some, tiling_of(some))
            out = serving.run(some, tiling)
        assert serving.family.name == ("unordered" if "d_q" in wants else "hopper")
        assert ran == kernels
        assert [x is not None for x in out] == [n in wants for n in ("d_q", "d_k", "d_v", "d_bias", "d_sinks")]
    some = call.replace(wants=("d_q", "d_v"))
    assert worst(some) <= 1


def test_calls_of_a_signature_are_planned():
    call = bound(1, 130, 2, 2, 130, 64, is_causal=True)
    launches: list[tuple[str, int]] = []
    with recording(lambda kernel, grid, args, constexprs: launches.append((kernel.__name__, grid))):
        _, again = plan.learn(VARIANT, call, tiling_of(call))
        first = list(launches)
        assert [name for name, _ in first] == KERNELS and again is not None
        launches.clear()
        again(call.arrays)
    assert launches == first


@compiles
@pytest.mark.parametrize(("d", "more", "spills"), [
    (64, {"is_causal": True}, 64), (64, {"is_causal": True, "softcap": 30.0}, 700), (128, {"is_causal": True}, 160),
])  # fmt: skip
def test_it_compiles_for_hopper_and_products_do_not_wait(d, more, spills):
    call = bound(4, 4096, 8, 4, 4096, d, device="meta", **more)
    built = FAMILY.load_compiler().build(VARIANT, call, tiling_of(call))
    assert [k.name for k in built.kernels] == KERNELS
    for kernel in built.kernels:
        assert kernel.over(targets.find("sm_90")) is None and not kernel.serialised
        assert (kernel.spills or 0) <= spills
    assert "UTMAREDG.4D.ADD" in built.kernels[1].assembly


def planted(**how: Any) -> Backend:
    """Softmax whose last bits change from call to call."""
    backend, turn = Backend("planted", framework="numpy", platforms=("cpu",)), [0]

    @backend.implements("softmax", **how)
    def softmax(call: Any, tiling: Any) -> tuple[Any, ...]:
        turn[0] += 1
        with np.errstate(all="ignore"):
            x = call.arrays["x"].astype(np.float64)
            e = np.exp(x - x.max(call.options["axis"], keepdims=True))
            y = (e / e.sum(call.options["axis"], keepdims=True)).astype(call.arrays["x"].dtype)
            return (np.ascontiguousarray(np.nextafter(y, y.dtype.type(turn[0] % 2))),)

    return backend


def test_the_checker_holds_such_outputs_to_their_bounds_alone():
    how = {"dtypes": ["float32"], "max_examples": 30, "shrink": False}
    report = testing.check("softmax", backend=planted(), **how)
    assert {f.cause for f in report.failures} & {"same_bits", "laws"}, report.failures
    report = testing.check("softmax", backend=planted(unordered={"y": "in any order"}), **how)
    assert report.passed, report.failures
    assert "the same bits of y in each call: in any order" in report.not_required
    assert sum(report.laws.values()), "laws are asked all the same"
    with pytest.raises(pk.UnsupportedError, match="bits of y may change from run to run: name variant='own'"):
        pk.op("softmax", backend=planted(unordered={"y": "in any order"}))(np.ones((2, 3), np.float32))


def test_laws_hold_what_is_not_said_to_change():
    class Output:
        spec, arguments, always, device, framework = CALL.spec, None, frozenset(), torch.device("cpu"), CALL.framework

        def __init__(self, unordered: dict[str, str]) -> None:
            self.unordered, self.turn = unordered, 0

        def run(self, tiling: Any) -> Any:
            def gradients(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
                self.turn += 1
                return q * 0 + self.turn, k * 0, v * 0, None

            return gradients

    case = LawCase("heads_may_change_places", "float32", 3)
    with pytest.raises(BrokenPromise, match="d_q of heads"):
        run_law(Output({}), case)
    run_law(Output({"d_q": "in any order"}), case)
    with pytest.raises(BrokenPromise, match="d_q of heads"):
        run_law(Output({"d_k": "in any order"}), case)


def test_no_figure_is_of_a_variant_that_nobody_named(monkeypatch):
    monkeypatch.setattr(contenders, "backend_variants", lambda spec, b, platform: ("hopper", "unordered", "gpu"))
    found = contenders.contenders(CALL.spec, [BACKEND], [], SM_90)
    assert [c.variant for c in found] == ["hopper", "gpu"]
