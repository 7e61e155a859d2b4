"""The specs' error bounds against simulated kernels: right ones stay inside and come near enough to matter, wrong ones break out."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from portakern import testing
from portakern.api import op
from portakern.core.oracle import as_float64, oracle
from portakern.spec.dtypes import numpy_dtype
from portakern.spec.tolerance import compare, format_of
from tests import simulated
from tests.simulated import REGIMES, SIMS, draw, sim_attention, sim_matmul

F32 = np.float32
DTYPES = ("float32", "float16", "bfloat16")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def measure(name, arrays, options=None, simulate=None, **faults):
    """The worst fraction of the bound that a simulated kernel reaches, per output; inf where an element breaks it by NaN or inf."""
    call = op(name).bind(*arrays, **(options or {}))
    ref = oracle(call)
    bounds = call.spec.bound(as_float64(call), ref)
    known = {k: v for k, v in (options or {}).items() if k != "out_dtype"}
    got = (simulate or SIMS[name])(*arrays, **known, **faults)
    worst = []
    for y, exact, limit, (shape, dtype) in zip(got, ref, bounds, call.outputs.values(), strict=True):
        if exact is not None:
            assert limit.shape == exact.shape == shape and limit.dtype == exact.dtype == np.float64
            c = compare(y.astype(numpy_dtype(dtype)), exact, limit, dtype)
            worst.append(max(c.worst, np.inf if c.bad.any() and c.worst <= 1 else 0))
    return worst


def matmul_case(rng, dtype, regime):
    m, k, n = rng.integers(1, 48), rng.choice([1, 7, 64, 300, 1024]), rng.integers(1, 48)
    return draw(rng, (m, k), dtype, regime), draw(rng, (k, n), dtype, regime)


def layernorm_case(rng, dtype, regime):
    n = rng.choice([1, 5, 64, 300, 1024, 4096])
    affine = (
        (draw(rng, (n,), rng.choice([dtype, "float32"])), draw(rng, (n,), rng.choice([dtype, "float32"])))
        if rng.random() < 0.7
        else (None, None)
    )
    return (draw(rng, (rng.integers(1, 24), n), dtype, regime), *affine)


def rmsnorm_case(rng, dtype, regime):
    return layernorm_case(rng, dtype, regime)[:2]


def softmax_case(rng, dtype, regime):
    return (draw(rng, (rng.integers(1, 24), rng.choice([1, 5, 64, 300, 1024, 4096])), dtype, regime),)


def attention_case(rng, dtype, regime, kv_len=None, depth=None):
    kv_len, depth = kv_len or rng.choice([1, 5, 64, 200, 500]), depth or rng.choice([1, 8, 40, 64, 128])
    q_len, group, dv = rng.integers(1, 24), rng.integers(1, 3), rng.integers(1, 33)
    qk = regime if regime != "spread" else "wide"
    q, k = (
        draw(rng, (1, q_len, group, depth), dtype, qk),
        draw(rng, (1, kv_len, 1, depth), dtype, "normal" if regime == "rising" else regime),
    )
    return q, k, draw(rng, (1, kv_len, 1, dv), dtype, rng.choice(["normal", qk]))


CASES = {
    "matmul": matmul_case,
    "softmax": softmax_case,
    "layernorm": layernorm_case,
    "rmsnorm": rmsnorm_case,
    "attention": attention_case,
}
VARIANTS = {
    "matmul": ({}, {"block": 16}, {"ftz": True}),
    "softmax": ({}, {"block": 128}, {"base2": False, "block": 1024}, {"ftz": True}),
    "layernorm": ({}, {"block": 128}, {"block": 16}, {"ftz": True}),
    "rmsnorm": ({}, {"block": 128}, {"block": 16}, {"ftz": True}),
    "attention": ({}, {"block": 64}, {"block": 1024}, {"ftz": True}),
}
OPTIONS = {
    "matmul": ({}, {"out_dtype": "float32"}),
    "softmax": ({},),
    "layernorm": ({}, {"eps": 0.0}, {"eps": 1e-12}),
    "rmsnorm": ({}, {"eps": 0.0}, {"eps": 1e-12}),
    "attention": tuple(
        {"return_lse": True, "is_causal": causal, "softcap": cap, "scale": scale}
        for causal, cap, scale in itertools.product((False, True), (None, 2.0, 30.0), (None, -0.3, 40.0))
    ),
}


@pytest.fixture(params=[*DTYPES, "float64"])
def dtype(request, monkeypatch):
    if request.param == "float64":  # the same kernels with a float64 accumulator
        monkeypatch.setattr(simulated, "F32", np.float64)
        monkeypatch.setattr(simulated, "TAU", np.float64(2.0**-1022))
    return request.param


def always(outputs):
    return lambda *arrays, **options: outputs


def pick(rng, choices):
    return choices[rng.integers(len(choices))]


@pytest.mark.parametrize("name", SIMS)
def test_right_kernels_stay_inside_and_the_bound_is_not_vacuous(name, dtype):
    reached = []
    for regime in REGIMES:
        for seed in range(8):
            rng = np.random.default_rng([seed, len(regime)])
            arrays, options, variant = (
                CASES[name](rng, dtype, regime),
                pick(rng, OPTIONS[name]),
                pick(rng, VARIANTS[name]),
            )
            worst = measure(name, arrays, options, **variant)
            assert max(worst) <= 1, (regime, seed, options, variant, worst)
            if "ftz" not in variant:  # a flush alone reaches the whole bound of a number next to subnormal
                reached.append(worst)
    least = 0.015 if dtype == "float64" else 0.03  # the units of float64 are doubled, for the oracle's own rounding
    assert (np.max(reached, axis=0) >= least).all(), np.max(reached, axis=0)
    if dtype in ("float16", "bfloat16"):
        assert np.max(reached, axis=0)[0] >= 0.26, "a bound four times as wide would pass"


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_a_subnormal_weight_may_flush_whatever_it_scales(name):
    x, weight = np.zeros((2, 200), np.float32), np.full(200, 0.9 * 2.0**-126, np.float32)
    x[:, 3] = 5  # 14 times the row's deviation
    call = op(name).bind(x, weight)
    assert 0.1 < testing.compare_call(call, [np.zeros_like(x)])["y"] <= 1
    with pytest.raises(testing.Broken, match="out of bounds"):
        testing.compare_call(call, [np.full_like(x, 2.0**-120)])


def positive(rng, *shape):
    return np.abs(draw(rng, shape, "float32"))


NEAR = {
    "matmul": (lambda r: (positive(r, 40, 64), positive(r, 64, 40)), lambda *a: (sim_matmul(*a)[0] * F32(1 + 1e-5),)),
    "softmax": (lambda r: (draw(r, (40, 257), "float32"),), partial(SIMS["softmax"], factor=1 + 7e-6)),
    "layernorm": (lambda r: (draw(r, (40, 64), "float32"),), lambda *a: (SIMS["layernorm"](*a)[0] * F32(1 + 6e-6),)),
    "rmsnorm": (lambda r: (draw(r, (40, 64), "float32"),), lambda *a: (SIMS["rmsnorm"](*a)[0] * F32(1 + 4e-6),)),
    "attention": (
        lambda r: tuple(draw(r, (1, n, 1, d), "float32") for n, d in ((80, 40), (97, 40), (97, 16))),
        partial(sim_attention, factor=1 + 4e-5),
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_float32_faults_that_a_bound_four_times_as_wide_would_miss(name):
    build, simulate = NEAR[name]
    options = {"return_lse": True} if name == "attention" else {}
    for seed in range(4):
        arrays = build(np.random.default_rng(seed))
        worst = measure(name, arrays, options, simulate=lambda *a, **_: simulate(*a))
        assert min(worst) > 1 and max(worst) < 4, worst


@pytest.mark.parametrize("name", SIMS)
def test_nan_and_inf_follow_the_reference(name, dtype):
    for seed in range(40):
        rng = np.random.default_rng(seed)
        arrays, options = (
            [a if a is None else a.copy() for a in CASES[name](rng, dtype, pick(rng, REGIMES))],
            pick(rng, OPTIONS[name]),
        )
        for a in arrays:
            if a is not None and rng.random() < 0.5:
                a[tuple(rng.integers(extent) for extent in a.shape)] = rng.choice([np.nan, np.inf, -np.inf])
        if name == "attention" and seed % 2:
            bias = draw(rng, (1, arrays[0].shape[2], 1, arrays[1].shape[1]), dtype)
            bias[rng.random(bias.shape) < 0.3] = -np.inf
            arrays.append(bias)
        assert max(measure(name, arrays, options)) <= 1, seed


@pytest.mark.parametrize("name", SIMS)
def test_the_rounded_reference_is_inside(name, dtype):
    for seed in range(12):
        rng = np.random.default_rng(seed)
        arrays, options = CASES[name](rng, dtype, pick(rng, REGIMES)), pick(rng, OPTIONS[name])
        exact = oracle(op(name).bind(*arrays, **options))
        assert max(measure(name, arrays, options, simulate=always(exact))) <= 1


@pytest.mark.parametrize("slope", [0.003, 0.03, 0.3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_maximum_that_rises_in_every_tile(dtype, slope):
    """Each tile rescales what came before: the longest chain of roundings that a legal tiling has."""
    rng, n, to = np.random.default_rng(0), 4096, numpy_dtype(dtype)
    rising = (np.arange(n) * slope).astype(to)
    q = np.array([1, -1], to).reshape(1, 2, 1, 1)
    v = draw(rng, (1, n, 1, 4), dtype, "large mean")
    assert max(measure("attention", (q, rising.reshape(1, n, 1, 1), v), {"return_lse": True}, block=16)) <= 0.5
    assert max(measure("softmax", (np.stack([rising, rising[::-1]]),), block=128)) <= 1


def test_tf32_has_its_own_terms():
    rng, near_1 = (
        np.random.default_rng(0),
        np.full((8, 512), F32(1 + 2.0**-10 - 2.0**-23)),
    )  # the 10 bits that stay are all 0
    tf32 = {"precision": "tf32"}
    assert 0.9 < measure("matmul", (near_1, near_1.T), tf32)[0] <= 1
    q, k, v = (
        draw(rng, (1, 40, 2, 64), "float32"),
        draw(rng, (1, 200, 1, 64), "float32"),
        np.broadcast_to(near_1[0, 0], (1, 200, 1, 4)),
    )
    arrays, cut_products = (q, k, v), partial(sim_attention, precision="tf32")
    assert (
        max(measure("attention", arrays, tf32 | {"return_lse": True}))
        <= 1
        < min(measure("attention", arrays, {"return_lse": True}, simulate=cut_products))
    )


def test_scores_far_from_0():
    """-1e5 beside nothing else is exact; finfo.min makes a convex average or zeros."""
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, shape, "float32") for shape in ((1, 8, 1, 16), (1, 40, 1, 16), (1, 40, 1, 4)))
    for low in (-1e4, -1e5, float(np.finfo(F32).min)):
        some, every = np.where(np.arange(40) % 3, low, 0).astype(F32), np.full(40, low, F32)
        for bias in (some, every):
            arrays = q, k, v, np.broadcast_to(bias, (1, 1, 8, 40))
            assert max(measure("attention", arrays, {"return_lse": True})) <= 1
            outside = np.full((1, 8, 1, 4), F32(50)), np.zeros((1, 1, 8), F32)
            assert measure("attention", arrays, {"return_lse": True}, simulate=always(outside))[0] > 1


# --- faults ---


def spikes(rng, dtype, n, depth=16, where=None):
    """q, k, v for which each query sees one key alone: o is that key's row of v."""
    keys = np.eye(depth)[np.arange(n) % depth] * 0
    q, v = np.zeros((1, 4, 1, depth)), rng.standard_normal((1, n, 1, 8))
    keys[where, 0] = q[..., 0] = 30
    return (
        q.astype(numpy_dtype(dtype)),
        keys.reshape(1, n, 1, depth).astype(numpy_dtype(dtype)),
        v.astype(numpy_dtype(dtype)),
    )


def integers(rng, shape, dtype, top):
    return rng.integers(-top, top + 1, shape).astype(numpy_dtype(dtype))


FAULTS = {
    "matmul without its tail": ("matmul", lambda r, t: (draw(r, (8, 70), t), draw(r, (70, 8), t)), {}, {"tail": False}),
    "matmul accumulating in 16 bits": ("matmul", lambda r, t: (draw(r, (8, 512), t), draw(r, (512, 8), t)), {}, {"low": numpy_dtype("bfloat16")}),
    "softmax without its tail": ("softmax", lambda r, t: (draw(r, (4, 300), t),), {}, {"tail": False, "block": 128}),
    "softmax without the maximum": ("softmax", lambda r, t: (draw(r, (4, 300), t) + numpy_dtype(t).type(200),), {}, {"shift": False}),
    "softmax 1 % off": ("softmax", lambda r, t: (draw(r, (4, 300), t),), {}, {"factor": 1.01}),
    "layernorm over n - 1": ("layernorm", lambda r, t: (draw(r, (4, 40), t),), {}, {"ddof": 1}),
    "layernorm with another eps": ("layernorm", lambda r, t: (draw(r, (4, 40), t, "wide"),), {"eps": 1e-2}, {"wrong": {"eps": 1e-3}}),
    "rmsnorm over one more": ("rmsnorm", lambda r, t: (draw(r, (4, 40), t),), {}, {"over": 1}),
    "rmsnorm without its tail": ("rmsnorm", lambda r, t: (draw(r, (4, 300), t),), {}, {"tail": False, "block": 128}),
    "rmsnorm adding up in 16 bits": ("rmsnorm", lambda r, t: (draw(r, (4, 300), t),), {}, {"low": numpy_dtype("bfloat16"), "block": 16}),
    "rmsnorm with eps outside the root": ("rmsnorm", lambda r, t: (draw(r, (4, 40), t),), {"eps": 1e-1}, {"outside": True}),
    "attention that drops the last key": ("attention", lambda r, t: spikes(r, t, 65, where=64), {}, {"drop": 64}),
    "attention without its tail": ("attention", lambda r, t: spikes(r, t, 65, where=64), {}, {"tail": False}),
    "attention without the maximum": ("attention", lambda r, t: spikes(r, t, 65, where=64), {"scale": 1.0}, {"shift": False}),
    "attention with scale 1 % off": ("attention", lambda r, t: attention_case(r, t, "normal", 40, 16), {"scale": 1.0}, {"factor": 1.01}),
    "attention with a finite mask": ("attention", lambda r, t: attention_case(r, t, "normal", 1, 16), {"is_causal": True}, {"sentinel": -1e4}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_break_the_bound(fault, dtype):
    name, build, options, plant = FAULTS[fault]
    options = options | ({"return_lse": True} if name == "attention" else {})
    wrong = plant.get("wrong")
    arrays = build(np.random.default_rng(7), dtype)
    assert max(measure(name, arrays, options)) <= 1
    simulate = (lambda *a, **o: SIMS[name](*a, **(o | wrong))) if wrong else partial(SIMS[name], **plant)
    assert max(measure(name, arrays, options, simulate=simulate)) > 1


def test_layernorm_from_raw_moments_breaks_the_bound():
    x = (np.random.default_rng(0).standard_normal((8, 256)) + 3000).astype(F32)
    assert max(measure("layernorm", (x,))) <= 1 < max(measure("layernorm", (x,), moments=True))


def test_masks_that_data_can_reach_break_the_bound():
    """Scores near -1e5 lose to a sentinel of -1e4; -inf stays below everything."""
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, shape, "float32") for shape in ((1, 8, 1, 16), (1, 8, 1, 16), (1, 8, 1, 4)))
    arrays, options = (q, k, v, np.full((1, 1, 1, 8), -1e5, F32)), {"is_causal": True, "return_lse": True}
    assert max(measure("attention", arrays, options)) <= 1 < max(measure("attention", arrays, options, sentinel=-1e4))


def test_a_query_that_is_scaled_and_rounded_first_breaks_the_bound_of_lse():
    rng = np.random.default_rng(0)
    arrays, options = (
        tuple(draw(rng, s, "bfloat16") for s in ((1, 32, 1, 40), (1, 8, 1, 40), (1, 8, 1, 4))),
        {"return_lse": True},
    )
    assert max(measure("attention", arrays, options)) <= 1 < measure("attention", arrays, options, round_q=True)[1]


def test_tf32_in_place_of_ieee_breaks_the_bound():
    rng = np.random.default_rng(0)
    a, b = integers(rng, (8, 16), "float32", 2**14), integers(rng, (16, 8), "float32", 2)
    assert (
        max(measure("matmul", (a, b)))
        <= 1
        < max(measure("matmul", (a, b), simulate=partial(sim_matmul, precision="tf32")))
    )


# --- the comparison itself ---


def test_compare_measures_the_worst_fraction():
    c = compare(np.array([1.0, 2.5, 0.0], F32), np.array([1.0, 2.0, 0.0]), np.array([0.1, 1.0, 0.0]), "float32")
    assert c.ok and c.worst == 0.5 and list(c.err) == [0, 0.5, 0]
    c = compare(np.array([1.0, 2.5], F32), np.array([1.0, 2.0]), np.array([0.0, 0.25]), "float32")
    assert list(c.bad) == [False, True] and c.worst == 2


@pytest.mark.parametrize(
    ("got", "ref", "bound", "ok"),
    [
        (np.nan, 1.0, np.inf, True), (np.nan, np.nan, np.inf, True), (np.nan, 1.0, 5.0, False), (np.inf, 1.0, 5.0, False),
        (np.nan, np.nan, 0.0, True), (1.0, np.nan, 0.0, False), (np.inf, np.nan, 0.0, False),
        (np.inf, np.inf, 0.0, True), (-np.inf, np.inf, 0.0, False), (65504.0, np.inf, 0.0, False), (np.nan, np.inf, 0.0, False),
        (65504.0, 65519.0, 32.0, True), (np.inf, 65519.0, 32.0, True), (-np.inf, 65519.0, 32.0, False), (np.inf, 65480.0, 32.0, False),
        (np.inf, 65600.0, 32.0, True), (65504.0, 65600.0, 100.0, True), (65504.0, 65600.0, 32.0, False), (np.nan, 65600.0, 100.0, False),
        (0.0, -0.0, 0.0, True), (-np.inf, 70000.0, 200000.0, True), (-np.inf, 70000.0, 100000.0, False),
    ],
)  # fmt: skip
def test_compare_on_nan_inf_and_overflow(got, ref, bound, ok):
    c = compare(np.array([got], np.float16), np.array([ref]), np.array([bound]), "float16")
    assert c.ok is ok
    assert c.worst == 0 or np.isfinite([got, ref, bound]).all()


def test_compare_refuses_a_bound_that_is_nan():
    with pytest.raises(ValueError, match="bound is NaN"):
        compare(np.zeros(1), np.zeros(1), np.array([np.nan]), "float32")
    assert compare(np.array([np.nan]), np.array([np.nan]), np.array([np.nan]), "float32").ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_formats(dtype):
    f, to = format_of(dtype), numpy_dtype(dtype)
    assert np.isfinite(np.float64(f.overflow * (1 - 2.0**-23)).astype(to)) and np.isinf(
        np.float64(f.overflow).astype(to)
    )
    assert to.type(1 + f.U) == 1 != to.type(1 + 2 * f.U)
