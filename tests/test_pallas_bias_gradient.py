"""The gradient of attention's bias by Pallas on Hopper: bounds, barriers and buffers in Pallas's interpreter, what
masked pairs leave, whose bits hang on what, and what the compiler makes of it.

On a GPU, tests/test_conformance.py checks the same kernel as it runs there.
"""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")
from portakern.core import registry

PALLAS = registry.backend("pallas")
FAMILY = next(f for f in PALLAS.declared if f.name == "gpu")
if FAMILY.missing_packages():
    pytest.skip(f"the kernels for Hopper need {FAMILY.missing_packages()}", allow_module_level=True)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import portakern as pk  # noqa: E402
from portakern import testing  # noqa: E402
from portakern.backends.pallas.gpu.toolchain import compiler  # noqa: E402
from portakern.backends.pallas.lib.mosaic_gpu import bias_gradient, chip  # noqa: E402
from portakern.core import targets, tilings  # noqa: E402
from portakern.core.binder import unchecked  # noqa: E402
from portakern.core.framework import frameworks  # noqa: E402
from portakern.core.targets import Target  # noqa: E402
from tests.test_pallas_gpu import kernels_of, read_early, unfenced  # noqa: E402

VARIANT = PALLAS.implementation("attention_vjp", FAMILY)
HOPPER = Target("cuda", "sm_90")
D_BIAS = ("d_bias",)
has_compiler = pytest.mark.skipif(
    compiler.unavailable(targets.find("sm_90")) is not None, reason=str(compiler.unavailable(targets.find("sm_90")))
)


def arrays_of(
    batch, q_len, kv_heads, group, kv_len, d, dv=None, *, bias, low=None, dtype="bfloat16", ids=None, **options
):
    """Inputs of a call, o and lse by the oracle. low: bias's dtype, where it is another; ids: of queries and keys."""
    rng = np.random.default_rng(q_len + kv_len)
    shapes = {"q": (kv_heads * group, q_len, d), "k": (kv_heads, kv_len, d), "v": (kv_heads, kv_len, dv or d)}
    arrays = {n: rng.standard_normal((batch, rows, heads, w)).astype(dtype) for n, (heads, rows, w) in shapes.items()}
    arrays["bias"] = rng.standard_normal(bias).astype(low or dtype)
    if ids is not None:
        names = "q_segment_ids", "kv_segment_ids"
        arrays |= {name: np.broadcast_to(x, (batch, len(x))) for name, x in zip(names, ids, strict=True)}
    o, lse = pk.op("attention", backend="reference")(**arrays, return_lse=True, **options)
    d_o = rng.standard_normal(o.shape).astype(dtype)
    return {name: jnp.asarray(x) for name, x in {**arrays, "o": o, "lse": lse, "d_o": d_o}.items()}


def run(arrays, wants=D_BIAS, tiling=None, **options):
    """A call, and what a run of it in the interpreter gives, where races and waiting for ever are errors."""
    call = pk.op("attention_vjp").bind(**arrays, **options, wants=wants).replace(interpret=True)
    found = tilings.resolve(VARIANT, call, tiling or {}).tiling
    assert VARIANT.supports(call, found) is None
    with PALLAS.profile("races"):
        return call, jax.block_until_ready(VARIANT.run(call, found))


def gradient(arrays, **more):
    return np.asarray(run(arrays, **more)[1][3])


def worst(shape, more):
    """The largest share of its bound that the error of an element takes."""
    options = {n: x for n, x in more.items() if n not in ("bias", "low", "dtype", "ids")}
    call, outputs = run(arrays_of(*shape, **more), **options)
    return max(testing.compare_call(call, [np.asarray(x) for x in outputs if x is not None]).values())


def sorted_ids(*lengths):
    return [np.sort(np.random.default_rng(n).integers(0, 3, n)).astype(np.int32) for n in lengths]


CASES = {
    "each pair its own": ((2, 130, 1, 2, 72, 64), {"bias": (2, 2, 130, 72), "is_causal": True}),
    "shared by sequences": ((3, 70, 2, 1, 130, 64), {"bias": (1, 2, 70, 130), "softcap": 5.0}),
    "shared by heads": ((2, 70, 2, 3, 90, 128), {"bias": (2, 1, 70, 90), "is_causal": True}),
    "shared by heads of one group": ((1, 70, 1, 4, 64, 64), {"bias": (1, 1, 70, 64)}),
    "shared by all": ((2, 200, 2, 2, 140, 64), {"bias": (1, 1, 200, 140), "window": (40, 10)}),
    "shared by all, tiles that nobody sees": ((1, 140, 2, 1, 330, 64), {"bias": (1, 1, 140, 330), "window": (20, 9)}),
    "more queries than keys": ((1, 330, 2, 2, 40, 72, 40), {"bias": (1, 1, 330, 40), "is_causal": True}),
    "float32 beside bfloat16": ((1, 70, 2, 1, 133, 64), {"bias": (1, 2, 70, 133), "low": "float32", "softcap": 4.0}),
    "segments": ((2, 90, 1, 2, 133, 64), {"bias": (1, 2, 90, 133), "ids": sorted_ids(90, 133), "is_causal": True}),
    "wide": ((1, 70, 1, 2, 70, 256), {"bias": (1, 1, 70, 70), "low": "float32", "is_causal": True}),
    "one query": ((3, 1, 2, 2, 70, 64), {"bias": (1, 4, 1, 70)}),
    "one row": ((2, 130, 2, 2, 72, 64), {"bias": (2, 4, 1, 72), "is_causal": True}),
    "one row for all": ((2, 333, 2, 2, 133, 64), {"bias": (1, 1, 1, 133), "window": (90, 40), "dtype": "float16"}),
    "one row, no mask": ((2, 64, 1, 3, 130, 128), {"bias": (2, 1, 1, 130), "low": "float32"}),
    "one row, segments": ((2, 90, 1, 1, 133, 64), {"bias": (1, 1, 1, 133), "ids": sorted_ids(90, 133)}),
    "one row, more keys than queries see": ((1, 9, 1, 1, 200, 64), {"bias": (1, 1, 1, 200), "window": (5, 0)}),
    "one row, wide": ((1, 130, 1, 1, 70, 256, 40), {"bias": (1, 1, 1, 70), "is_causal": True}),
    "one": ((1, 1, 1, 1, 1, 8), {"bias": (1, 1, 1, 1)}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_sum_meets_the_bound_and_races_for_nothing(name):
    shape, more = CASES[name]
    assert worst(shape, more) <= 1


@pytest.mark.parametrize("rows", [1, 150])
def test_what_does_not_see_each_other_leaves_0(rows):
    """NaN and inf in q, k, v, d_o and bias at masked pairs; segment 0 has keys alone."""
    ids = np.repeat([1, 2], [100, 50]).astype(np.int32), np.repeat([1, 0, 2], [70, 40, 90]).astype(np.int32)
    arrays = arrays_of(1, 150, 1, 1, 200, 64, bias=(1, 1, rows, 200), ids=ids, is_causal=True)
    clean = gradient(arrays, is_causal=True)
    hidden = slice(70, 110)
    odd = jnp.asarray([jnp.nan, jnp.inf, -jnp.inf, jnp.nan] * 10, jnp.bfloat16)
    arrays["k"] = arrays["k"].at[:, hidden].set(odd[None, :, None, None])
    arrays["v"] = arrays["v"].at[:, hidden].set(odd[None, ::-1, None, None])
    arrays["bias"] = arrays["bias"].at[..., hidden].set(odd)
    found = gradient(arrays, is_causal=True)
    assert (found[..., hidden] == 0).all() and (clean == found).all()
    causal = np.arange(200)[None] > np.arange(150)[:, None] + 50
    if rows > 1:
        arrays["bias"] = jnp.where(causal, jnp.nan, arrays["bias"])
        again = gradient(arrays, is_causal=True)
        assert (again == clean).all() and (again[..., causal] == 0).all()


def test_queries_that_are_not_there_leave_0():
    """A key at minus infinity has no weight for queries above 0. Those beyond the last are 0: 0 times it is NaN."""
    arrays = arrays_of(1, 150, 1, 1, 200, 64, bias=(1, 1, 1, 200), is_causal=True)
    arrays["q"] = jnp.abs(arrays["q"])
    arrays["k"] = arrays["k"].at[:, 199].set(-jnp.inf)
    found = gradient(arrays, is_causal=True)
    assert np.isfinite(found).all() and (found[..., 199] == 0).all()


def test_tiles_that_nobody_sees_are_written_and_nothing_is_read():
    """All that is in their reach is NaN."""
    arrays = arrays_of(1, 256, 1, 1, 256, 64, bias=(1, 1, 256, 256), window=(0, 0))
    arrays["bias"] = jnp.where(np.eye(256, dtype=bool), arrays["bias"], jnp.nan)
    found = gradient(arrays, window=(0, 0))
    assert (found[0, 0][~np.eye(256, dtype=bool)] == 0).all() and np.isfinite(np.diagonal(found[0, 0])).all()


@pytest.mark.parametrize("rows", [1, 130])
def test_bits_hang_on_neither_company_nor_stages(rows):
    """With the other gradients or alone, whose bits stay what they are too; as a variant that adds up d_q has it."""
    arrays = arrays_of(2, 130, 1, 2, 20, 64, bias=(1, 1, rows, 20), is_causal=True)
    alone = gradient(arrays, is_causal=True)
    _, all_four = run(arrays, ("d_q", "d_k", "d_v", "d_bias"), is_causal=True)
    _, three = run(arrays, ("d_q", "d_k", "d_v"), is_causal=True)
    assert three[3] is None and all((x == y).all() for x, y in zip(three[:3], all_four[:3], strict=True))
    assert (alone == np.asarray(all_four[3])).all()
    for stages in (1, 3):
        assert (alone == gradient(arrays, tiling={"stages": stages}, is_causal=True)).all()
    unordered = pk.op("attention_vjp", backend="pallas", variant="unordered")
    for wants in (D_BIAS, ("d_q", "d_bias")):
        assert (alone == np.asarray(unordered(**arrays, is_causal=True, wants=wants)[3])).all()


def of_one_consumer(ref, plan, warpgroup, block, sums):
    def write():
        for part, total in enumerate(sums):
            keys = bias_gradient._query_and_key_rows(plan, block, 0, part)[1]
            row = jnp.sum(total, axis=0).astype(plan.dtype)
            chip.store(ref.d_bias.at[block.batch, block.head, 0, keys], row)

    bias_gradient.pl.when(warpgroup == 0)(write)


def with_a_slope(ref, plan, place, lse, dots, bias):
    p, t = weights(ref, plan, place, lse, dots, bias)
    return p * (1.0 - t * t), t


weights, bias_of = bias_gradient.weights, bias_gradient.bias_of
FAULTS = {
    "one turn alone": ("shared by sequences", bias_gradient.BiasPlan, "iterations", property(lambda plan: 1)),
    "one head of a group alone": (
        "shared by heads of one group", bias_gradient.ResidentTile, "steps", property(lambda tile: tile.span)),
    "queries of one consumer alone": ("one row", bias_gradient, "write_row", of_one_consumer),
    "the softcap's slope": ("shared by sequences", bias_gradient, "weights", with_a_slope),
    "a part of bias twice": ("float32 beside bfloat16", bias_gradient, "bias_of", lambda ref, plan, warpgroup, part: (
        bias_of(ref, plan, warpgroup, 0))),
    "bias is not brought": ("each pair its own", bias_gradient, "bring_bias", lambda *args: None),
    "nothing is handed back": ("shared by all", bias_gradient, "plgpu", SimpleNamespace(**{
        **vars(bias_gradient.plgpu), "barrier_arrive": lambda barrier: None})),
    "nothing is fenced": ("shared by all", bias_gradient, "plgpu", SimpleNamespace(**{
        **vars(bias_gradient.plgpu), "commit_smem": lambda: None})),
}  # fmt: skip
WAITS = {"bias is not brought", "nothing is handed back", "nothing is fenced"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, monkeypatch):
    case, where, name, wrong = FAULTS[fault]
    monkeypatch.setattr(where, name, wrong)
    error, words = (Exception, "raced|RACE DETECTED|waits for ever") if fault in WAITS else (AssertionError, None)
    jax.clear_caches()
    try:
        with pytest.raises(error, match=words):
            assert worst(*CASES[case]) <= 1
    finally:
        jax.clear_caches()


@pytest.mark.parametrize(
    ("name", "wrong", "test"),
    [
        ("within", lambda x, *args, **more: x, test_queries_that_are_not_there_leave_0),
        (
            "kept",
            lambda ref, plan, place, unseen, *tiles: tiles,
            partial(test_what_does_not_see_each_other_leaves_0, rows=150),
        ),
    ],
    ids=["queries that are not there count", "no pair is masked"],
)
def test_a_fault_of_masks_is_found(name, wrong, test, monkeypatch):
    monkeypatch.setattr(bias_gradient, name, wrong)
    jax.clear_caches()
    try:
        with pytest.raises(AssertionError):
            test()
    finally:
        jax.clear_caches()


# --- in words ---


def abstract_call(q_len, kv_len, d, dv, bias, low, dtype="bfloat16", wants=D_BIAS, heads=2, **options):
    abstract = frameworks()["jax"].abstract
    shapes = {"q": (1, q_len, heads, d), "k": (1, kv_len, heads, d), "v": (1, kv_len, heads, dv),
              "o": (1, q_len, heads, dv), "d_o": (1, q_len, heads, dv)}  # fmt: skip
    arrays = {name: abstract(shape, dtype, None) for name, shape in shapes.items()}
    arrays |= {"lse": abstract((1, heads, q_len), "float32", None), "bias": abstract(bias, low, None)}
    call = unchecked(registry.find_spec("attention_vjp"), **arrays, wants=wants, **options)
    return call.replace(target=HOPPER, interpret=False, concrete=False)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("low", ["bfloat16", "float32"])
@pytest.mark.parametrize(("d", "dv"), [(8, 8), (64, 128), (128, 128), (256, 8), (192, 200), (256, 256)])
def test_there_is_room_for_heads_of_any_width(d, dv, low, rows):
    call = abstract_call(70, 90, d, dv, (1, 1, rows, 90), low)
    for stages in (1, 2, 8):
        tiling = tilings.default(VARIANT, call).tiling.replace(stages=stages)
        plan = bias_gradient.bias_plan(call, tiling)
        assert VARIANT.supports(call, tiling) is None
        assert plan.fits and 1 <= plan.pairs.stages <= stages


@pytest.mark.parametrize(
    ("rows", "kv_len", "low", "words"),
    [
        (70, 96, "bfloat16", None),
        (70, 100, "bfloat16", "^for d_bias, bias is padded from 100 keys to 104, and d_bias cut again$"),
        (70, 100, "float32", None),
        (1, 128, "bfloat16", None),
        (1, 136, "float32", "^for d_bias, bias is padded from 136 keys to 192, and d_bias cut again$"),
    ],
)
def test_what_xla_copies_is_said(rows, kv_len, low, words):
    call = abstract_call(70, kv_len, 64, 64, (1, 1, rows, kv_len), low)
    tiling = tilings.default(VARIANT, call).tiling
    said = VARIANT.copies(call, tiling)
    assert said is None if words is None else re.search(words, said), said
    beside = VARIANT.copies(call.replace(wants=("d_q", "d_bias")), tiling)
    assert beside.startswith("bias is padded to whole tiles") and beside.endswith(said or "tiles")


# --- compiled, with no GPU ---

COMPILED = [
    (1024, 1024, 64, {}),
    (999, 999, 64, {"is_causal": True}),
    (700, 999, 128, {"window": (100, 30), "softcap": 30.0}),
    (1024, 1024, 128, {"is_causal": True}),
    (999, 1001, 256, {"is_causal": True}),
]


@has_compiler
@pytest.mark.parametrize("rows", ["a row for each query", "one row"])
@pytest.mark.parametrize("low", ["bfloat16", "float32"])
@pytest.mark.parametrize(("q_len", "kv_len", "d", "more"), COMPILED)
def test_it_compiles_for_hopper_and_nothing_spills(q_len, kv_len, d, more, low, rows, monkeypatch, tmp_path):
    """And takes the shared memory that it was expected to, waits for no product of its own, and fences what it reads.
    Of 999 keys a row is no multiple of 16 bytes, which the copy engine refuses and the interpreter does not."""
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    call = abstract_call(q_len, kv_len, d, d, (1, 1, 1 if rows == "one row" else q_len, kv_len), low, **more)
    arrays = {name: x for name, x in call.arrays.items() if x is not None}
    op = pk.op("attention_vjp", backend="pallas", variant="gpu")
    built = op.lower(**arrays, **more, wants=D_BIAS, target="sm_90")
    assert built.ok, built.reason
    assert [kernel.name for kernel in built.kernels if kernel.matrix] == ["attention_vjp_d_bias"]
    (kernel,) = [kernel for kernel in built.kernels if kernel.matrix]
    assert kernel.spills == 0 and not kernel.serialised and not unfenced(kernel.assembly) + read_early(kernel.assembly)
    plan = bias_gradient.bias_plan(call, tilings.default(VARIANT, call).tiling)
    expected = plan.shared + chip.BARRIER_BYTES + chip.REDUCTION_BYTES * plan.one_row
    assert kernel.on_chip["shared"] <= expected <= kernel.on_chip["shared"] + chip.BARRIER_BYTES


@has_compiler
@pytest.mark.parametrize("rows", [1, 70])
def test_it_compiles_where_jax_counts_in_64_bits(rows):
    x = jnp.ones((1, 70, 1, 16), jnp.bfloat16)
    arrays = dict.fromkeys(("q", "k", "v", "o", "d_o"), x) | {"lse": jnp.ones((1, 1, 70))}
    arrays["bias"] = jnp.ones((1, 1, rows, 70))
    ids = dict.fromkeys(("q_segment_ids", "kv_segment_ids"), np.ones((1, 70), np.int64))
    with jax.enable_x64(True):
        call = pk.op("attention_vjp").bind(**arrays, **{n: jnp.asarray(i) for n, i in ids.items()}, wants=D_BIAS)
        call = call.replace(target=HOPPER, interpret=False, concrete=False)
        kernels_of(VARIANT, call, tilings.resolve(VARIANT, call, {}).tiling)
