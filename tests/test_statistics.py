"""Typical errors: right kernels, simulated and real, pass on fresh seeds; faults that hide within the bound do not."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from portakern.api import op
from portakern.core import registry
from portakern.core.framework import convert, frameworks
from portakern.core.oracle import as_float64, oracle
from portakern.core.targets import Target
from portakern.spec.dtypes import numpy_dtype
from portakern.spec.tolerance import compare
from portakern.testing.cases import REGIMES
from portakern.testing.statistics import examine, judge, largest_right
from tests.places import device_at, places
from tests.simulated import SIMS, truncate

DTYPES = ("float32", "float16", "bfloat16")
BF16 = numpy_dtype("bfloat16")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def draw(rng, shape, dtype, regime="normal"):
    return REGIMES[regime](rng, shape, numpy_dtype(dtype)).astype(numpy_dtype(dtype))


def matmul_case(rng, dtype, regime):
    m, k, n = rng.choice([64, 65, 96, 128, 192], 3)
    return (draw(rng, (m, k), dtype, regime), draw(rng, (k, n), dtype, regime)), {} if rng.random() < 0.6 else {
        "out_dtype": "float32"
    }


def softmax_case(rng, dtype, regime):
    return (draw(rng, (rng.choice([1, 7, 64]), rng.choice([64, 257, 1030])), dtype, regime),), {}


def layernorm_case(rng, dtype, regime):
    n = rng.choice([64, 257, 1030])
    affine = (draw(rng, (n,), dtype, regime), draw(rng, (n,), "float32", regime)) if rng.random() < 0.5 else ()
    return (draw(rng, (rng.choice([1, 7, 64]), n), dtype, regime), *affine), {}


def rmsnorm_case(rng, dtype, regime):
    (x, *affine), options = layernorm_case(rng, dtype, regime)
    return (x, *affine[:1]), options


def attention_case(rng, dtype, regime, softcap=None):
    q_len, kv_len, d, dv, group = (
        rng.choice(x) for x in ([64, 97, 130], [64, 97, 130], [16, 40, 64, 128], [16, 40], [1, 2])
    )
    options = {"return_lse": True, "is_causal": bool(rng.random() < 0.4), "softcap": softcap or rng.choice([None, None, 2.0, 30.0]),
               "scale": rng.choice([None, None, 0.3, 1.0])}  # fmt: skip
    arrays = [
        draw(rng, (1, n, heads, size), dtype, regime)
        for n, heads, size in ((q_len, 2 * group, d), (kv_len, 2, d), (kv_len, 2, dv))
    ]
    if rng.random() < 0.4:
        arrays.append(
            draw(rng, (1, 1, q_len, kv_len), dtype, rng.choice(["normal", "mask", "mask_finfo_min", "very_negative"]))
        )
    return tuple(arrays), options


CASES = {
    "matmul": matmul_case,
    "softmax": softmax_case,
    "layernorm": layernorm_case,
    "rmsnorm": rmsnorm_case,
    "attention": attention_case,
}


def simulated(name, arrays, options, store=lambda y, dtype: y.astype(numpy_dtype(dtype)), **faults):
    call = op(name).bind(*arrays, **options)
    known = {k: v for k, v in options.items() if k != "out_dtype"}
    got = SIMS[name](*arrays, **known, **faults)
    return [
        store(y, dtype) if dtype != "float32" else y for (y, (_, dtype)) in zip(got, call.outputs.values(), strict=True)
    ]


def on_backend(backend, platform, name, arrays, options):
    numpy, framework = frameworks()["numpy"], frameworks()[registry.backends()[backend].framework]
    ours = (
        arrays if framework is numpy else [convert(a, numpy, framework, device_at(backend, platform)) for a in arrays]
    )
    out = op(name, backend=backend)(*ours, **options)
    return [framework.to_numpy(y) for y in (out if isinstance(out, tuple) else (out,))]


def evidence(name, arrays, options, kernel, regime="normal", target=None, interpret=True):
    """Output name -> (what the statistics say, the worst fraction of the bound)."""
    call = op(name).bind(*arrays, **options)
    call = call.replace(target=target or call.target, interpret=interpret)
    refs = oracle(call)
    bounds = call.spec.bound(as_float64(call), refs)
    got = kernel(name, arrays, options)
    found = examine(as_float64(call), got, refs, bounds, regime)
    outputs = dict(zip(call.wants, got, strict=True))
    return {
        n: (e, compare(outputs[n], refs[i], bounds[i], call.outputs[n][1]).worst)
        for i, (n, e) in enumerate(found.items())
    }


# --- right kernels ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SIMS)
def test_right_simulated_kernels_pass(name, dtype):
    z = []
    for seed in range(30):
        regime = ("normal", "wide")[seed % 2]
        rng = np.random.default_rng([seed, 3])
        for output, (e, _) in evidence(name, *CASES[name](rng, dtype, regime), simulated, regime).items():
            assert not e.reasons, (seed, output, e)
            z.append(e.z)
    assert max(z) >= (0.4 if dtype == "float32" else 0.9), "sigma is slack: four times less would still pass"


def served(backend, platform, name, arrays, options, regime):
    b = registry.backends()[backend]
    target = frameworks()[b.framework].target(device_at(backend, platform))
    return evidence(
        name, arrays, options, partial(on_backend, backend, platform), regime, target, b.families_for(target)[0][1]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SIMS)
@pytest.mark.parametrize(("backend", "platform"), list(places()))
def test_right_backends_pass(backend, platform, name, dtype):
    for seed in range(6):
        regime = ("normal", "wide")[seed % 3 == 2]
        arrays, options = CASES[name](
            np.random.default_rng([seed // 3, 4]), dtype, regime
        )  # two shapes in all: JAX compiles for each
        arrays = tuple(
            np.random.default_rng([seed, i]).permuted(a, axis=-2 if a.ndim > 1 else 0) for i, a in enumerate(arrays)
        )
        if dtype == "float32" and name in ("matmul", "attention") and seed % 2:
            options = options | {"precision": "tf32"}
        for output, (e, _) in served(backend, platform, name, arrays, options, regime).items():
            assert e.applies or regime == "wide" or output == "lse"
            assert not e.reasons, (seed, output, e)


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16"])
def test_operands_that_tf32_cuts_may_lean(out_dtype):
    options = {"precision": "tf32", "out_dtype": out_dtype}
    for seed in range(30):
        rng = np.random.default_rng([seed, 8])
        arrays = draw(rng, (rng.choice([1, 64]), 2), "float32"), draw(rng, (2, 127), "float32")
        e, _ = evidence("matmul", arrays, options, simulated)["c"]
        assert e.applies and not e.reasons, (seed, e)


# --- faults ---


def rounded_tanh(x):
    """A tanh good to 11 bits, as the hardware's is."""
    return np.tanh(x).astype(np.float16).astype(np.float32)


HIDING = {
    "o truncated": ("attention", ("float16", "bfloat16"), {"store": truncate}, "lean towards 0"),
    "P truncated": ("attention", ("float16", "bfloat16"), {"truncate_p": True}, "lean towards 0"),
    "scale 0.3 % off": ("attention", DTYPES, {"factor": 1.003}, "typical"),
    "scale 1e-5 off": ("attention", DTYPES, {"factor": 1 + 1e-5}, "typical"),
    "tf32 scores for ieee": ("attention", ("float32",), {"precision": "tf32"}, "typical"),
    "q scaled and rounded": ("attention", ("float16", "bfloat16"), {"round_q": True}, "typical"),
    "o accumulated in bfloat16": ("attention", DTYPES, {"low": BF16}, "typical"),
    "tanh of 11 bits": ("attention", DTYPES, {"tanh": rounded_tanh}, "typical"),
    "c truncated": ("matmul", ("float16", "bfloat16"), {"store": truncate}, "lean towards 0"),
    "tf32 for ieee": ("matmul", ("float32",), {"precision": "tf32"}, "typical"),
    "c accumulated in bfloat16": ("matmul", DTYPES, {"low": BF16}, "typical"),
    "y truncated": ("softmax", ("float16", "bfloat16"), {"store": truncate}, "lean towards 0"),
    "y 3e-6 off": ("softmax", ("float32",), {"factor": 1 + 3e-6}, "typical"),
    "xh truncated": ("layernorm", ("float16", "bfloat16"), {"store": truncate}, "lean towards 0"),
    "variance over n - 1": ("layernorm", DTYPES, {"ddof": 1}, "typical"),
    "y of rmsnorm truncated": ("rmsnorm", ("float16", "bfloat16"), {"store": truncate}, "lean towards 0"),
    "mean of squares over n + 1": ("rmsnorm", DTYPES, {"over": 1}, "typical"),
}  # fmt: skip
TYPICAL = {
    "matmul": (64, 128, 64),
    "softmax": (64, 257),
    "layernorm": (64, 64),
    "rmsnorm": (64, 64),
    "attention": (80, 97, 40, 16),
}


def typical(name, rng, dtype, fault):
    """Arrays of an ordinary call, no option set but what the fault needs."""
    sizes = TYPICAL[name]
    if name == "attention":
        q_len, kv_len, d, dv = sizes
        shapes = (1, q_len, 2, d), (1, kv_len, 1, d), (1, kv_len, 1, dv)
        options = {"return_lse": True, "softcap": 2.0 if "tanh" in fault else None}
    else:
        shapes, options = ((sizes[:2], sizes[1:]) if name == "matmul" else (sizes,)), {}
    return tuple(draw(rng, s, dtype) for s in shapes), options


@pytest.mark.parametrize(("fault", "dtype"), [(f, dtype) for f, (_, dtypes, *_) in HIDING.items() for dtype in dtypes])
def test_faults_that_hide_are_found(fault, dtype):
    name, _, plant, words = HIDING[fault]
    for seed in range(3):
        arrays, options = typical(name, np.random.default_rng([seed, 6]), dtype, fault)
        assert not any(e.reasons for e, _ in evidence(name, arrays, options, simulated).values())
        found = evidence(name, arrays, options, partial(simulated, **plant))
        assert any(words in reason for e, _ in found.values() for reason in e.reasons), found


# --- exact results ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("backend", "platform"), list(places()))
def test_dots_of_integers_are_exact(backend, platform, dtype):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        arrays = draw(rng, (70, 150), dtype, "integers"), draw(rng, (150, 66), dtype, ("integers", "spikes")[seed % 2])
        for options in ({}, {"out_dtype": "bfloat16"}, {"precision": "tf32"}):
            e, _ = served(backend, platform, "matmul", arrays, options, "integers")["c"]
            assert not e.reasons and not e.applies


def exact_share(a, b, **options):
    call = op("matmul").bind(a, b, **options)
    return call.spec.forced(as_float64(call), oracle(call))[0].mean()


def test_what_has_to_be_exact():
    rng = np.random.default_rng(0)
    small, wide = draw(rng, (8, 16), "float32", "integers"), np.full((16, 4), 2.0**11 + 1, np.float32)
    assert exact_share(small, small.T) == 1 and exact_share(small, small.T, precision="tf32") == 1
    assert exact_share(small, wide) == 1 and exact_share(small, wide, precision="tf32") == 0  # 12 significant bits
    assert exact_share(small, wide * 2**12) == 0  # sums beyond 2^24
    assert exact_share(small + np.float32(0.5), wide) == 0
    part = small.copy()
    part[0, 0], part[1, 1], part[2, 2] = 0.5, np.nan, np.inf
    assert exact_share(part, wide) == 5 / 8


@pytest.mark.parametrize(
    ("dtype", "options", "fault"),
    [
        ("float32", {}, {"precision": "tf32"}),
        ("float32", {}, {"low": BF16}),
        ("float32", {"out_dtype": "bfloat16"}, {"store": truncate}),
        ("float16", {"out_dtype": "bfloat16"}, {"store": truncate}),
    ],
)
def test_inexact_integers_are_found(dtype, options, fault):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-2000, 2001, (16, 20)) * 2 + 1, rng.integers(-15, 16, (20, 16))
    if dtype != "float32":
        a = a % 512
    arrays = a.astype(numpy_dtype(dtype)), b.astype(numpy_dtype(dtype))
    assert not evidence("matmul", arrays, options, simulated)["c"][0].reasons
    assert "not exact" in evidence("matmul", arrays, options, partial(simulated, **fault))["c"][0].reasons[-1]


# --- the judgement itself ---


def test_statistics_need_random_values_and_enough_of_them():
    rng = np.random.default_rng(0)
    ref, ones = rng.standard_normal(1000), np.ones(1000)
    wrong = ref + 30
    assert judge(wrong, ref, ones, ones, unbiased=False).reasons
    assert (
        judge(np.repeat(wrong[:63], 20), np.repeat(ref[:63], 20), np.ones(1260), np.ones(1260), unbiased=False).reasons
        == ()
    )
    for unknown in (np.inf, 0.0):
        assert not judge(wrong, ref, ones, ones * unknown, unbiased=False).applies
    assert not judge(wrong, ref, ones * np.inf, ones, unbiased=False).applies
    arrays, options = typical("matmul", rng, "float32", "")
    got = partial(simulated, precision="tf32")
    assert (
        evidence("matmul", arrays, options, got, "normal")["c"][0].reasons
        and not evidence("matmul", arrays, options, got, "constant")["c"][0].applies
    )


def test_each_statistic_has_its_reason():
    rng = np.random.default_rng(0)
    ref, ones = rng.standard_normal(10000), np.ones(10000)
    noise = rng.standard_normal(10000)
    assert judge(ref + 1.45 * noise, ref, ones, ones, unbiased=True).reasons == ()
    (reason,) = judge(ref + 1.6 * noise, ref, ones, ones, unbiased=True).reasons
    assert "typical" in reason
    (reason,) = judge(ref - 0.5 * np.sign(ref), ref, ones, ones, unbiased=True).reasons
    assert "towards 0" in reason and judge(ref - 0.5 * np.sign(ref), ref, ones, ones, unbiased=False).reasons == ()
    noise[7] = largest_right(10000) + 1
    (reason,) = judge(ref + noise, ref, ones, ones, unbiased=True).reasons
    assert "largest" in reason


def test_compiled_matrix_units_round_unlike_numpy():
    """sigma allows a compiled 16-bit dot the matrix unit's truncation, and nobody else."""
    rng = np.random.default_rng(0)
    arrays, cuda = (draw(rng, (64, 256), "bfloat16"), draw(rng, (256, 64), "bfloat16")), Target("cuda", "sm_90")
    call = as_float64(op("matmul").bind(*arrays, out_dtype="float32"))
    here, compiled, interpreted = (
        call.spec.spread(c, oracle(c))[0]
        for c in (call, call.replace(target=cuda), call.replace(target=cuda, interpret=True))
    )
    assert (compiled > 2 * here).all() and (interpreted == here).all()
