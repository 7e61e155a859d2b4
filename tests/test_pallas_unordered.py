"""Attention's gradients by Pallas on Hopper in five products, d_q added up in memory: bounds, barriers and buffers in
Pallas's interpreter, which is told what the copy engine adds; what the compiler makes of it; who is served.

On a GPU, tests/test_conformance.py checks the same kernel as it runs there.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")
from portakern.core import registry

PALLAS = registry.backend("pallas")
FAMILY = next(f for f in PALLAS.declared if f.name == "unordered")
if FAMILY.missing_packages():
    pytest.skip(f"the kernels for Hopper need {FAMILY.missing_packages()}", allow_module_level=True)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import portakern as pk  # noqa: E402
from portakern import testing  # noqa: E402
from portakern.backends.pallas.gpu import attention_vjp as ordered  # noqa: E402
from portakern.backends.pallas.unordered import attention_vjp as unordered  # noqa: E402
from portakern.core import dispatch, targets, tilings  # noqa: E402
from portakern.core.binder import unchecked  # noqa: E402
from portakern.core.framework import frameworks  # noqa: E402
from portakern.core.targets import Target  # noqa: E402
from portakern.errors import UnsupportedError  # noqa: E402

VARIANT = PALLAS.implementation("attention_vjp", FAMILY)
HOPPER = Target("cuda", "sm_90")
COMPILER = FAMILY.load_compiler()
has_compiler = pytest.mark.skipif(
    COMPILER.unavailable(targets.find("sm_90")) is not None, reason=str(COMPILER.unavailable(targets.find("sm_90")))
)


def arrays_of(batch, q_len, kv_heads, group, kv_len, d, dv=None, *, dtype="bfloat16", ids=False, bias=None, **options):
    """Inputs of a call, o and lse by the oracle."""
    rng = np.random.default_rng(q_len + kv_len)
    shapes = {"q": (kv_heads * group, q_len, d), "k": (kv_heads, kv_len, d), "v": (kv_heads, kv_len, dv or d)}
    arrays = {n: rng.standard_normal((batch, rows, heads, w)).astype(dtype) for n, (heads, rows, w) in shapes.items()}
    if bias:
        arrays["bias"] = rng.standard_normal(bias).astype(dtype)
    if ids:
        for side, length in (("q", q_len), ("kv", kv_len)):
            arrays[f"{side}_segment_ids"] = np.sort(rng.integers(0, 3, (batch, length)), 1).astype(np.int32)
    o, lse = pk.op("attention", backend="reference")(**arrays, return_lse=True, **options)
    d_o = rng.standard_normal(o.shape).astype(dtype)
    return {name: jnp.asarray(x) for name, x in {**arrays, "o": o, "lse": lse, "d_o": d_o}.items()}


def gradients(shape, tiling=None, **more):
    """A call, and what a run of it in the interpreter gives, where races and waiting for ever are errors."""
    options = {n: x for n, x in more.items() if n not in ("dtype", "ids", "bias")}
    arrays = arrays_of(*shape, **more)
    call = pk.op("attention_vjp").bind(**arrays, **options)
    call = call.replace(interpret=True)
    assert VARIANT.supports(call, resolved(call, tiling)) is None
    with PALLAS.profile("races"):
        serving, tiling = VARIANT.resolve(call, resolved(call, tiling))
        return call, jax.block_until_ready(serving.run(call, tiling))


def resolved(call, tiling=None):
    return tilings.resolve(VARIANT, call, tiling or {}).tiling


def worst(shape, tiling=None, **more):
    """The largest share of its bound that the error of an element takes."""
    call, outputs = gradients(shape, tiling, **more)
    return max(testing.compare_call(call, [np.asarray(x) for x in outputs if x is not None]).values())


CASES = {
    "causal": ((1, 200, 1, 2, 260, 128), {"is_causal": True}),
    "causal, narrow": ((1, 200, 1, 2, 260, 64), {"is_causal": True}),
    "no mask": ((1, 130, 2, 1, 300, 128), {}),
    "band": ((1, 100, 1, 2, 170, 64), {"window": (40, 10)}),
    "band, wide": ((1, 150, 1, 1, 140, 96), {"window": (30, 20)}),
    "more queries than keys": ((2, 330, 1, 3, 40, 72, 40), {"is_causal": True, "dtype": "float16"}),
    "narrow q, wide v": ((1, 90, 1, 1, 140, 40, 100), {}),
    "softcap": ((1, 150, 1, 2, 200, 64), {"window": (70, None), "softcap": 5.0}),
    "segments": ((1, 150, 1, 1, 200, 128), {"ids": True, "is_causal": True}),
    "segments, narrow": ((1, 150, 1, 1, 200, 32), {"ids": True}),
    "bias": ((1, 70, 1, 2, 140, 128), {"bias": (1, 1, 70, 140), "scale": -0.2}),
    "one": ((1, 1, 1, 1, 1, 64), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_role_meets_the_bound_and_races_for_nothing(name):
    shape, more = CASES[name]
    assert worst(shape, **more) <= 1


@pytest.mark.parametrize("name", ["causal", "causal, narrow", "band", "band, wide"])
def test_products_with_d_k_last_give_the_same_bits(name):
    """What differs is when they are issued; and every tile is visited once, with a mask or without, in order."""
    shape, more = CASES[name]
    (call, first), (_, last) = (gradients(shape, {"last": x}, **more) for x in (0, 1))
    of_keys = ordered.attention_vjp(call.replace(wants=("d_k", "d_v")), resolved(call))
    for i in (1, 2):
        assert jnp.array_equal(first[i], last[i]) and jnp.array_equal(first[i], of_keys[i])


@pytest.mark.parametrize(("name", "stages"), [("causal, narrow", 3), ("causal, narrow", 2)])
def test_other_stages_meet_the_bound(name, stages):
    shape, more = CASES[name]
    assert worst(shape, {"stages": stages}, **more) <= 1


def test_queries_that_no_rounding_of_minus_lse_holds_do_not_reach_d_q():
    """Beyond the last key lies 0: a weight exp(0 - lse) there is infinite, and 0 times it would be added to d_q."""
    shape = (1, 64, 1, 1, 70, 64)
    arrays = arrays_of(*shape)
    k = jnp.full_like(arrays["k"], -12.0)
    q = jnp.full_like(arrays["q"], 12.0)
    o, lse = pk.op("attention", backend="reference")(*map(np.asarray, (q, k, arrays["v"])), return_lse=True)
    assert np.asarray(lse).max() < -1000
    arrays |= {"q": q, "k": k, "o": jnp.asarray(o), "lse": jnp.asarray(lse)}
    found = pk.op("attention_vjp", backend="pallas", variant="unordered")(**arrays)
    assert all(bool(jnp.isfinite(x).all()) for x in found if x is not None)


def both_read_one_group(ref, how, warpgroup, tile, turn, acc):
    ordered.issue_product(acc, ref.shown.at[jax.lax.rem(turn, jnp.int32(2)), 0, 0].T, ref.resident_first[0].tiled(0))


def handed_back_at_once(ref, how, place, *tiles):
    return tiles


FAULTS = {
    "one group's keys are left out": ("query_gradients", both_read_one_group),
    "no pair is masked": ("kept", handed_back_at_once),
    "a tile's d_q is left out": ("leave", lambda *args: None),
    "queries are not handed back": ("free", lambda *args: None),
    "D is shown in one buffer": ("lax", SimpleNamespace(**{**vars(jax.lax), "rem": lambda x, y: (
        x * 0 if isinstance(y, jax.Array) and y == 2 else jax.lax.rem(x, y))})),
}  # fmt: skip


WAITS = {"queries are not handed back", "D is shown in one buffer"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, monkeypatch):
    name, wrong = FAULTS[fault]
    monkeypatch.setattr(unordered, name, wrong)
    shape, more = CASES["causal"]
    error, words = (Exception, "raced|waits for ever|phase") if fault in WAITS else (AssertionError, None)
    jax.clear_caches()
    try:
        with pytest.raises(error, match=words):
            assert worst(shape, **more) <= 1
    finally:
        jax.clear_caches()


# --- in words ---


def abstract_call(batch, q_len, kv_heads, group, kv_len, d, dv=None, dtype="bfloat16", **options):
    abstract, dv = frameworks()["jax"].abstract, dv or d
    heads = kv_heads * group
    shapes = {"q": (batch, q_len, heads, d), "k": (batch, kv_len, kv_heads, d), "v": (batch, kv_len, kv_heads, dv),
              "o": (batch, q_len, heads, dv), "d_o": (batch, q_len, heads, dv)}  # fmt: skip
    arrays = {name: abstract(shape, dtype, None) for name, shape in shapes.items()}
    lse = abstract((batch, heads, q_len), "float32", None)
    call = unchecked(registry.find_spec("attention_vjp"), **arrays, lse=lse, **options)
    return call.replace(target=HOPPER, interpret=False, concrete=False)


def test_it_serves_calls_that_name_it_and_no_others():
    call = abstract_call(1, 260, 1, 2, 260, 128, is_causal=True)
    names = [r.impl.family.name for r in dispatch.find_routes(PALLAS, call, HOPPER, None)]
    assert "unordered" not in names and "gpu" in names
    assert [r.impl.family.name for r in dispatch.find_routes(PALLAS, call, HOPPER, "unordered")] == ["unordered"]
    assert VARIANT.unordered == {"d_q": unordered.ADDED}


def test_what_has_no_room_is_refused():
    for more, named, why in (
        ({"d": 136}, {}, "136 are wider than the 128 elements that fit here"),
        ({"d": 128}, {"stages": 8}, "or stages"),
        ({"d": 128}, {"stages": 3}, "needs 227 KiB"),
        ({"d": 128}, {"block_q": 128}, "take 64 and 64"),
        ({"d": 64, "dtype": "float32"}, {}, "float32"),
    ):
        call = abstract_call(1, 90, 1, 1, 90, **more)
        assert why in VARIANT.supports(call, tilings.default(VARIANT, call).tiling.replace(**named))
    with pytest.raises(UnsupportedError, match="float32"):
        pk.op("attention_vjp", backend="pallas", variant="unordered")(
            **{n: x.astype(jnp.float32) for n, x in arrays_of(1, 9, 1, 1, 9, 64).items()}
        )


def test_what_xla_copies_is_said():
    told = [VARIANT.copies(call, resolved(call)) for call in (
        abstract_call(1, 64, 1, 1, 64, 64), abstract_call(1, 64, 1, 1, 64, 64, 128))]  # fmt: skip
    assert all("d_q's sums, in float32, are set to 0 before the kernel" in x for x in told)
    assert "heads of q and k are padded from 64 to 72" in told[1] and "padded" not in told[0]


def test_short_queries_take_little_memory_for_sums(monkeypatch):
    """Of a query each of many sequences: whole tiles of queries would be 128 times what they fill."""
    call, sums = abstract_call(512, 1, 1, 1, 1, 64), []

    class Seen(Exception):
        pass

    def launched(call, how, inputs):
        sums.append(inputs["sums"].shape)
        raise Seen

    monkeypatch.setattr(unordered, "launched", launched)
    with pytest.raises(Seen):
        jax.eval_shape(lambda arrays: VARIANT.run(call.replace(arrays=arrays), resolved(call)), dict(call.arrays))
    assert sums == [(512, 8, 1, 64)]


@pytest.mark.parametrize("given", [{}, {"last": 1}])
def test_gradients_of_keys_alone_are_the_ordered_kernel_s(given):
    """Whatever tiling the caller gave: the ordered kernel has no parameter ``last``."""
    arrays = arrays_of(1, 70, 1, 1, 70, 64)
    call = pk.op("attention_vjp").bind(**arrays).replace(interpret=True, wants=("d_k", "d_v"))
    own = resolved(call, given)
    serving, tiling = VARIANT.resolve(call, own)
    assert serving.family.name == "gpu" and serving.fn is ordered.attention_vjp
    assert dict(tiling) == {name: value for name, value in own.items() if name != "last"}
    assert VARIANT.resolve(call.replace(wants=("d_q", "d_k")), own) == (VARIANT, own)
    assert serving.run(call, tiling)[0] is None


# --- compiled, with no GPU ---

LIMITS = [
    (64, {"is_causal": True}, 0),
    (64, {"is_causal": True, "softcap": 30.0}, 48),
    (64, {}, 0),
    (128, {"is_causal": True}, 0),
    (128, {}, 0),
]


@has_compiler
@pytest.mark.parametrize(("d", "more", "spills"), LIMITS)
def test_it_compiles_for_hopper_and_products_do_not_wait(d, more, spills, monkeypatch, tmp_path):
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    arrays = {n: x for n, x in abstract_call(4, 4096, 16, 1, 4096, d).arrays.items() if x is not None}
    built = pk.op("attention_vjp", backend="pallas", variant="unordered").lower(**arrays, target="sm_90", **more)
    assert built.ok, built.reason
    (kernel,) = [k for k in built.kernels if k.name.endswith("unordered")]
    assert not kernel.serialised and kernel.spills <= spills
    assert "cp.reduce.async.bulk.tensor" in kernel.assembly and ".add." in kernel.assembly


# --- on a GPU ---


@pytest.mark.skipif(
    HOPPER not in [frameworks()["jax"].target(d) for d in jax.devices()], reason="needs a Hopper GPU that JAX sees"
)
@pytest.mark.parametrize("d", [64, 128])
def test_keys_gradients_have_the_same_bits_in_every_run(d):
    """Those of queries need not, and stay within a few roundings of the ordered kernel's."""
    arrays = arrays_of(2, 1000, 2, 2, 1000, d, is_causal=True)
    run = pk.op("attention_vjp", backend="pallas", variant="unordered")
    first, again = run(**arrays, is_causal=True), run(**arrays, is_causal=True)
    same = pk.op("attention_vjp", backend="pallas", variant="gpu")(**arrays, is_causal=True)
    assert all((first[i] == again[i]).all() for i in (1, 2))
    scale = float(jnp.abs(same[0].astype(jnp.float32)).max())
    assert float(jnp.abs(first[0].astype(jnp.float32) - same[0].astype(jnp.float32)).max()) <= 2**-7 * scale


@has_compiler
def test_a_last_tile_that_is_not_whole_makes_no_loop_of_its_own(monkeypatch, tmp_path):
    """Queries that are not there have weights of 0 whatever hides them: the loop stood there twice. Of 999 the sums'
    rows are no whole tiles of the copy engine's."""
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    products = []
    for q_len in (1024, 999):
        x, lse = jnp.zeros((1, q_len, 2, 128), jnp.bfloat16), jnp.zeros((1, 2, q_len))
        op = pk.op("attention_vjp", backend="pallas", variant="unordered")
        built = op.lower(x, x, x, x, lse, x, target="sm_90")
        assert built.ok, built.reason
        products.append(sum(sum(k.matrix.values()) for k in built.kernels))
    assert products[0] == products[1] > 0
