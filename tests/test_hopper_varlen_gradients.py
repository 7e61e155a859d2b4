"""Gradients of packed sequences on Hopper where there is no GPU: on the host, and what is compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import portakern as pk
from portakern import testing
from portakern.core import registry, targets, tilings
from portakern.core.binder import unchecked
from portakern.core.call import Call

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton import interpreter  # noqa: E402
from portakern.backends.triton.hopper import _flash_gradients  # noqa: E402
from portakern.backends.triton.hopper import varlen_attention as hopper  # noqa: E402
from portakern.backends.triton.launch import recording  # noqa: E402
from portakern.backends.triton.lib import gluon, gluon_gradients, gluon_sequences, tma  # noqa: E402
from tests import gluon_on_host as host  # noqa: E402
from tests import test_hopper_varlen as forward  # noqa: E402
from tests.test_hopper_varlen import compiles  # noqa: E402

VARIANT = forward.BACKEND.implementation("varlen_attention_vjp", forward.FAMILY)
MODULES = [_flash_gradients, gluon_gradients, gluon_sequences, gluon]
KERNELS = "varlen_attention_vjp_gradients_kernel", "varlen_attention_vjp_pieces_kernel"


def bound(*shape: Any, d_lse: bool = False, **options: Any) -> Call:
    """As ``bound`` of the forward tests, with o and lse as the portable kernel gives them."""
    call = forward.bound(*shape, **options)
    arrays = {n: call.arrays[n] for n in ("q", "k", "v", "q_starts", "kv_starts")}
    given = {n: x for n, x in call.options.items() if n != "return_lse"}
    if arrays["q"].device.type == "meta":
        o = arrays["q"].new_empty(*arrays["q"].shape[:2], arrays["v"].shape[2])
        lse = torch.empty(o.shape[1], o.shape[0], device="meta")
    else:
        o, lse = pk.op("varlen_attention", backend="triton")(*arrays.values(), return_lse=True, **given)
    made = torch.Generator().manual_seed(1)
    arrays |= {"o": o, "lse": lse, "d_o": torch.empty_like(o) if o.is_meta else
               torch.randn(o.shape, generator=made).to(o.dtype)}  # fmt: skip
    if d_lse:
        arrays["d_lse"] = torch.randn(lse.shape, generator=made)
    made_call: Call = unchecked(registry.find_spec("varlen_attention_vjp"), **arrays, **given)
    return made_call.replace(target=targets.find("sm_90").target, interpret=False)


def tiling_of(call: Call, **named: int) -> Any:
    return tilings.resolve(VARIANT, call, named).tiling


def on_the_host(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any], ran: list[str]) -> None:
    ran.append(kernel.__name__)
    if kernel.__name__ not in KERNELS:
        interpreter.run(kernel, grid, *args, **constexprs)
        return
    host.launched(kernel, MODULES, grid, args, plan=constexprs["plan"])


def run(call: Call, ran: list[str] | None = None, **named: int) -> Any:
    with recording(partial(on_the_host, ran=[] if ran is None else ran)):
        return VARIANT.run(call, tiling_of(call, **named))


def worst_share(call: Call, outputs: Any) -> float:
    arrays = [call.framework.to_numpy(x) for x in outputs if x is not None]
    return max(testing.compare_call(call, arrays).values())


CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]] = {
    "full": (([130, 70, 131], [90, 200, 40], 2, 1, 64), {"d_lse": True}, {}),
    "causal": (([200, 65, 130], None, 1, 2, 64), {"is_causal": True}, {}),
    "not ahead": (([150, 65], None, 1, 2, 64), {"is_causal": True}, {"ahead": 0, "dq_block_kv": 64}),
    "a sequence without keys": (([100, 130, 90], [80, 0, 130], 1, 1, 64), {"is_causal": True}, {}),
    "a sequence without queries": (([130, 0, 90], [80, 200, 100], 1, 2, 64), {}, {}),
    "more queries than keys": (([190, 130], [60, 131], 1, 1, 128), {"is_causal": True}, {}),
    "a band": (([150, 130], [190, 140], 1, 2, 72, 40), {"window": (60, 30), "softcap": 5.0}, {}),
    "tokens of no sequence": (([130, 90], [140, 100], 1, 1, 64), {"around": 5, "is_causal": True}, {}),
    "two pieces": (([130, 70], [90, 110], 1, 2, 96), {}, {}),
    "two pieces, values of one": (([90, 80], [80, 150], 1, 2, 192, 128), {"is_causal": True}, {}),
    "wide": (([90, 40], [80, 100], 1, 1, 256), {"dtype": torch.float16, "scale": -0.1}, {}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch):
    monkeypatch.setattr(hopper, "processors", lambda device: 2)


@pytest.fixture(autouse=True)
def _heads_in_pieces(monkeypatch):
    monkeypatch.setitem(tma.MEASURED, "gradients", tuple(tma.SUMS))


@pytest.mark.parametrize("name", CASES)
def test_every_role_meets_the_bound(name):
    shape, options, named = CASES[name]
    call, ran = bound(*shape, **options), []
    assert worst_share(call, run(call, ran, **named)) <= 1
    assert any(kernel in ran for kernel in KERNELS)


def test_queries_with_an_lse_far_from_0():
    """Flags lie at multiples of 64 tokens, wherever a sequence begins. Of resident queries the host does not read what
    is left of lse."""
    call = bound([90, 140, 33], [80, 100, 200], 1, 2, 64, scale=90.0).replace(wants=("d_k", "d_v"))
    assert worst_share(call, run(call)) <= 1


@pytest.mark.parametrize("d", [64, 96])
def test_a_sequence_has_the_bits_that_it_has_alone(d):
    call = bound([130, 61, 97], [110, 160, 64], 1, 2, d, dtype=torch.float16, is_causal=True)
    whole = run(call)
    for s in range(3):
        (q0, q1), (k0, k1) = (call.arrays[n][s : s + 2].tolist() for n in ("q_starts", "kv_starts"))
        of = {"q": (q0, q1), "o": (q0, q1), "d_o": (q0, q1), "k": (k0, k1), "v": (k0, k1)}
        arrays = {n: call.arrays[n][slice(*ends)] for n, ends in of.items()}
        arrays |= {"lse": call.arrays["lse"][:, q0:q1].contiguous()}
        arrays |= {"q_starts": forward.starts_of([q1 - q0], "cpu"), "kv_starts": forward.starts_of([k1 - k0], "cpu")}
        one: Call = unchecked(call.spec, **arrays, **call.options)
        own = run(one.replace(target=call.target, interpret=False))
        ends = {"d_q": (q0, q1), "d_k": (k0, k1), "d_v": (k0, k1)}
        for output, x, y in zip(call.spec.outputs, own, whole, strict=True):
            assert (x is None) == (y is None) == (output.name not in ends), output.name
            assert x is None or torch.equal(x, y[slice(*ends[output.name])]), output.name


def test_what_other_sequences_hold_reaches_nothing():
    call = bound([130, 70, 90], [90, 90, 100], 1, 1, 64, is_causal=True)
    arrays = {n: None if x is None else x.clone() for n, x in call.arrays.items()}
    for n in ("q", "o", "d_o"):
        arrays[n][130:200] = float("nan")
    for n in ("k", "v"):
        arrays[n][90:180] = float("nan")
    arrays["lse"][:, 130:200] = float("nan")
    d_q, d_k, d_v, d_sinks = run(call.replace(arrays=arrays))
    assert d_sinks is None
    assert all(torch.isfinite(x[: n]).all() and torch.isfinite(x[m:]).all()
               for x, n, m in ((d_q, 130, 200), (d_k, 90, 180), (d_v, 90, 180)))  # fmt: skip
    assert torch.isnan(d_v[90:180]).any()


@pytest.mark.parametrize("seed", range(4))
def test_drawn_sequences_meet_the_bound(seed):
    call, _ = forward.drawn(seed)
    given = {n: x for n, x in call.options.items() if n != "return_lse"}
    around = int(call.arrays["q_starts"][0])
    lens = (call.arrays[n].diff().tolist() for n in ("q_starts", "kv_starts"))
    d, dv = call.dims["d"], call.dims["dv"]
    given |= {"dtype": call.arrays["q"].dtype, "around": around, "seed": seed, "d_lse": bool(seed % 2)}
    gradients = bound(*lens, call.dims["kv_heads"], call.dims["group"], d, dv, **given)
    assert worst_share(gradients, run(gradients)) <= 1


@compiles
@pytest.mark.parametrize(("d", "wants", "spilled"), [(64, ("d_k", "d_v"), 0), (128, ("d_q",), 32)])
def test_they_compile_for_hopper_and_products_do_not_wait(d, wants, spilled):
    call = bound([4096] * 4, None, 8, 4, d, device="meta", is_causal=True).replace(wants=wants)
    built = forward.FAMILY.load_compiler().build(VARIANT, call, tiling_of(call))
    names = ["attention_vjp_statistics_kernel", "varlen_attention_schedule_kernel", KERNELS[0]]
    assert [k.name for k in built.kernels] == names
    for kernel in built.kernels:
        assert kernel.over(targets.find("sm_90")) is None and not kernel.serialised and not kernel.undefined
        assert (kernel.spills or 0) <= spilled
