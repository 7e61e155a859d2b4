"""Gradients of attention on Hopper where there is no GPU: on the host, compiled, and what is left to others."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest

import portakern as pk
from portakern import testing
from portakern.core import registry, targets, tilings
from portakern.core.binder import unchecked
from portakern.core.call import Call
from portakern.testing.verdict import expected

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton import interpreter, plan  # noqa: E402
from portakern.backends.triton.hopper import _flash_gradients  # noqa: E402
from portakern.backends.triton.hopper import attention as hopper  # noqa: E402
from portakern.backends.triton.launch import recording  # noqa: E402
from portakern.backends.triton.lib import attention_vjp_gluon, gluon, gluon_gradients, tma  # noqa: E402
from tests import gluon_on_host as host  # noqa: E402
from tests.gluon_on_host import compiles  # noqa: E402
from tests.packing import ids_of  # noqa: E402

BACKEND = registry.backend("triton")
(FAMILY,) = (f for f in BACKEND.families if f.name == "hopper")
VARIANT = BACKEND.implementation("attention_vjp", FAMILY)


@functools.cache
def bound(
    batch: int, q_len: int, kv_heads: int, group: int, kv_len: int, d: int, dv: int | None = None, *,
    dtype: Any = torch.bfloat16, device: str = "cpu", given: tuple[str, ...] = (), segments: str | None = None,
    **options: Any,
) -> Call:  # fmt: skip
    """A call as on a Hopper GPU, whose arrays are the host's or have no memory (meta). given: optional arrays.
    segments: of ``tests.packing``."""
    made, heads, dv = torch.Generator().manual_seed(q_len + kv_len), kv_heads * group, dv or d

    def normal(*shape: int, dtype: Any = dtype) -> Any:
        return torch.empty(shape, dtype=dtype, device=device) if device == "meta" else torch.randn(
            shape, generator=made).to(dtype)  # fmt: skip

    arrays = {
        "q": normal(batch, q_len, heads, d),
        "k": normal(batch, kv_len, kv_heads, d),
        "v": normal(batch, kv_len, kv_heads, dv),
        "d_o": normal(batch, q_len, heads, dv),
    }
    if segments is not None:
        arrays |= {n: torch.tensor(x, device=device) for n, x in ids_of(segments, batch, q_len, kv_len).items()}
    if device == "meta":
        lse = normal(batch, heads, q_len, dtype=torch.float32)
        arrays |= {"o": arrays["d_o"], "lse": lse}
    else:
        forward = pk.op("attention", backend="triton")
        o, lse = forward(**{n: x for n, x in arrays.items() if n != "d_o"}, return_lse=True, **options)
        arrays |= {"o": o, "lse": lse}
    more = {
        "d_lse": lambda: normal(batch, heads, q_len, dtype=torch.float32),
        "bias": lambda: normal(1, 1, 1, kv_len, dtype=torch.float32),
    }
    arrays |= {n: more[n]() for n in given}
    call: Call = unchecked(registry.find_spec("attention_vjp"), **arrays, **options)
    return call.replace(target=targets.find("sm_90").target, interpret=False)


def tiling_of(call: Call, named: dict[str, int] | None = None) -> Any:
    return tilings.resolve(VARIANT, call, named or {}).tiling


def on_the_host(module: Any, kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
    """What a launch does, on the host: kernels of ``tl`` interpreted, the others by threads."""
    if kernel.__name__ not in ("attention_vjp_gradients_kernel", "attention_vjp_pieces_kernel"):
        interpreter.run(kernel, grid, *args, **constexprs)
        return

    host.launched(kernel, [module, _flash_gradients, gluon_gradients, gluon], grid, args, plan=constexprs["plan"])


CASES = {
    "causal": ((1, 130, 1, 2, 130, 64), {"is_causal": True}),
    "band": ((1, 100, 1, 2, 170, 64), {"window": (40, 10), "softcap": 5.0, "given": ("d_lse",)}),
    "more queries than keys": ((2, 90, 1, 3, 40, 72, 40), {"is_causal": True, "dtype": torch.float16}),
    "wide": ((1, 70, 1, 1, 140, 256), {"window": (None, 90), "scale": -0.2}),
    "two pieces": ((2, 130, 2, 1, 100, 96), {"given": ("d_lse",)}),
    "two pieces of grouped heads": ((1, 130, 1, 3, 150, 88, 72), {"is_causal": True, "dtype": torch.float16}),
    "two pieces, values of one": ((1, 90, 1, 2, 150, 192, 128), {"window": (100, 20)}),
    "two pieces of documents": ((1, 200, 1, 2, 200, 80), {"is_causal": True, "segments": "documents"}),
    "programs that stay": ((2, 300, 2, 1, 100, 64), {}),
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
    monkeypatch.setattr(hopper, "processors", lambda device: 2)


@pytest.fixture(autouse=True)
def _heads_in_pieces(monkeypatch):
    monkeypatch.setitem(tma.MEASURED, "gradients", tuple(tma.SUMS))


EXPECTED: dict[int, tuple[Call, Any]] = {}


def worst_share(call: Call, outputs: Any) -> float:
    """The largest share of its bound that the error of an element takes; a call has one oracle for all its kernels."""
    if id(call) not in EXPECTED:
        EXPECTED[id(call)] = call, expected(call)  # the call is held, and its id with it
    arrays = [call.framework.to_numpy(x) for x in outputs if x is not None]
    return max(testing.compare_call(call, arrays, known=EXPECTED[id(call)][1]).values())


def worst(call: Call, module: Any = _flash_gradients, **named: int) -> float:
    """:func:`worst_share` of a run on the host."""
    with recording(partial(on_the_host, module)):
        return worst_share(call, VARIANT.run(call, tiling_of(call, named)))


@pytest.mark.parametrize("name", CASES)
def test_every_role_meets_the_bound(name):
    """Barriers that are waited for, buffers that are handed back, rows that are masked: see ``gluon_on_host`` for what
    is not looked at."""
    shape, more = CASES[name]
    assert worst(bound(*shape, **more)) <= 1


def two_documents(call: Call, length: int, dirty: tuple[str, ...]) -> Call:
    """The call with documents of so many positions, which have two ids in turn, and NaN in the arrays ``dirty`` where
    the second id is. o and lse are those of arrays without NaN."""
    arrays = {n: None if x is None else x.clone() for n, x in call.arrays.items()}
    ids = torch.arange(arrays["q"].shape[1])[None] // length % 2
    arrays |= {"q_segment_ids": ids, "kv_segment_ids": ids}
    forward = {n: arrays[n] for n in ("q", "k", "v", "q_segment_ids", "kv_segment_ids")}
    arrays["o"], arrays["lse"] = pk.op("attention", backend="triton")(**forward, return_lse=True)
    for n in dirty:
        arrays[n][:, ids[0] == 1] = float("nan")
    return call.replace(arrays=arrays)


def clean(gradients: Any, length: int) -> bool:
    """Whether gradients of rows with the first id are finite."""
    return all(torch.isfinite(x[:, torch.arange(x.shape[1]) // length % 2 == 0]).all() for x in gradients)


def test_tiles_of_other_documents_are_not_visited():
    call = two_documents(bound(1, 256, 1, 1, 256, 64), 128, ("q", "k", "v", "d_o"))
    with recording(partial(on_the_host, _flash_gradients)):
        assert clean(VARIANT.run(call, tiling_of(call))[:3], 128)


def test_values_of_other_segments_in_a_tile_leave_no_trace():
    call = two_documents(bound(1, 128, 1, 1, 128, 64), 1, ("v",))
    with recording(partial(on_the_host, _flash_gradients)):
        assert clean(VARIANT.run(call, tiling_of(call))[:2], 1)


def under_a_wide_softcap() -> Call:
    """A call whose tanh errs by more than its scores are apart, with the o and lse of an exact forward pass."""
    call = bound(1, 90, 1, 1, 1, 64, softcap=9.8e29, given=("d_lse",))
    o, lse = pk.op("attention", backend="reference")(*(call.arrays[n] for n in "qkv"), return_lse=True, softcap=9.8e29)
    return call.replace(arrays={**call.arrays, "o": o, "lse": lse}, wants=("d_k", "d_v"))


def test_no_weight_is_above_1_under_a_wide_softcap():
    assert worst(under_a_wide_softcap()) <= 1


def test_the_plain_walk_meets_the_bound():
    shape, more = CASES["causal"]
    call = bound(*shape, **more)
    assert tiling_of(call)["ahead"]
    assert worst(call, ahead=0, dq_block_kv=64) <= 1


def finds_on_host(module, case):
    """Whether a kernel's module with a fault in it shows that on the host: see tests/mutants/faults."""
    shape, more = CASES[case]
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(hopper, "processors", lambda device: 2)
            patched.setitem(tma.MEASURED, "gradients", tuple(tma.SUMS))
            patched.setattr(host, "PATIENCE", 2.0)
            patched.setattr(host, "LAZY", True)
            return worst(bound(*shape, **more), module) > 1
    except (testing.Broken, AssertionError, TimeoutError):
        return True


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"dtype": torch.float32}, "dtype float32: this kernel takes"),
        ({"given": ("bias",)}, "bias is given"),
        ({"segments": "documents"}, None),
        ({"scale": -3e38}, "scale = -3e+38: its product"),
        ({"d": 12}, "head dimensions 12 and 12: this kernel takes multiples of 8 up to 256"),
        ({"d": 264}, "up to 256"),
        ({"d": 136, "dv": 72}, None),
        ({"d": 256, "softcap": 3.0, "window": (9, 0), "given": ("d_lse",)}, None),
        ({"d": 128, "is_causal": True, "dtype": torch.float16}, None),
    ],
    ids=str,
)
def test_what_is_left_to_the_portable_kernel(more, why):
    call = bound(1, 90, 1, 2, 100, **{"d": 64, **more}, device="meta")
    found = attention_vjp_gluon.supports(call, tilings.default(VARIANT, call).tiling)
    assert found is None if why is None else why in found


def test_what_has_no_room_is_refused():
    call = bound(1, 90, 1, 1, 1000, 128, device="meta")
    tiling = tiling_of(call)
    for named, why in (
        ({"block_q": 256}, "takes 32, 64 or 128"),
        ({"block_q": 128}, "registers a thread"),
        ({"num_stages": 8}, "bytes of shared memory"),
        ({"dq_num_stages": 8}, "bytes of shared memory"),
        ({"num_stages": 1, "ahead": 1}, "needs a second buffer"),
    ):
        assert why in attention_vjp_gluon.supports(call, tiling.replace(**named))
    capped = bound(1, 90, 1, 1, 1000, 128, device="meta", softcap=5.0)
    assert tiling_of(capped)["dq_block_kv"] < tiling["dq_block_kv"]  # slopes take registers beside scores
    assert tiling_of(capped)["block_q"] == tiling["block_q"]


@pytest.mark.parametrize("more", [{}, {"given": ("d_lse",)}, {"segments": "documents"}], ids=str)
def test_calls_of_a_signature_are_planned(more):
    call = bound(1, 130, 2, 2, 130, 64, is_causal=True, **more)
    launches: list[tuple[str, int]] = []
    with recording(lambda kernel, grid, args, constexprs: launches.append((kernel.__name__, grid))):
        _, again = plan.learn(VARIANT, call, tiling_of(call))
        first = list(launches)
        ranges = ["attention_segment_ranges_kernel"] * 2 if "segments" in more else []
        assert [name for name, _ in first] == [
            "attention_vjp_statistics_kernel",
            *ranges,
            "attention_vjp_gradients_kernel",
            "attention_vjp_gradients_kernel",
        ]
        # Of queries' ids, where they come first among the keys, is found once: 3 tiles of ranges a side, and 3 of keys.
        assert [grid for name, grid in first if name in ranges] == ([6, 3] if ranges else [])
        assert again is not None
        launches.clear()
        again(call.arrays)
    assert launches == first


def test_a_gradient_that_nobody_wants_is_not_computed():
    call = bound(1, 130, 2, 2, 130, 64, device="meta", is_causal=True)
    tiling = tiling_of(call)
    for wants in (("d_q",), ("d_k",), ("d_v",), ("d_k", "d_v")):
        (plan,) = attention_vjp_gluon.plans(call.replace(wants=wants), tiling).values()
        assert plan.by_key == ("d_q" not in wants)
        assert (plan.want_first, plan.want_second) == (wants[0] != "d_v", "d_v" in wants)
    wide = bound(1, 130, 2, 2, 130, 256, device="meta")
    assert len(attention_vjp_gluon.plans(wide, tiling_of(wide))) == 3, "sums of both do not fit beside each other"


@compiles
@pytest.mark.parametrize(("d", "wants", "spilled"), [
    (64, ("d_k", "d_v"), 0), (128, ("d_q",), 8), (96, ("d_k", "d_v"), 0), (80, ("d_q",), 0),
])  # fmt: skip
def test_they_compile_for_hopper_and_products_do_not_wait(d, wants, spilled):
    call = bound(4, 4096, 8, 4, 4096, d, device="meta", is_causal=True).replace(wants=wants)
    built = FAMILY.load_compiler().build(VARIANT, call, tiling_of(call))
    kernel = "attention_vjp_pieces_kernel" if d in tma.SUMS else "attention_vjp_gradients_kernel"
    assert [k.name for k in built.kernels] == ["attention_vjp_statistics_kernel", kernel]
    for kernel in built.kernels:
        assert kernel.over(targets.find("sm_90")) is None and not kernel.serialised
        assert (kernel.spills or 0) <= spilled
    assert any("GMMA" in i for i in kernel.matrix)
    if d in tma.SUMS:  # s, dP, and for each gradient a piece of it, of each group
        block, products = (128, 1) if wants == ("d_q",) else (64, 2)
        assert sum(kernel.matrix.values()) == 2 * (2 * d // 16 + products * 2 * block // 16)
