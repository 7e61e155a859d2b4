"""Typical errors: right kernels, simulated and real, pass on fresh seeds; faults that hide within the bound do not."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from portakern import inventory
from portakern.api import op
from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.framework import convert, frameworks
from portakern.core.oracle import as_float64, oracle
from portakern.core.targets import Target
from portakern.spec.dtypes import numpy_dtype
from portakern.spec.tolerance import units
from portakern.testing.statistics import any_order, judge, largest_right
from tests.measuring import evidence, evidences, in_order, simulated
from tests.ops import record, records
from tests.ops._shared import BF16, draw, pick
from tests.ops.record import DTYPES
from tests.places import DEEP, device_at, runnable_platforms

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
every_op = pytest.mark.parametrize("name", records())
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def on_backend(backend, platform, name, arrays, options):
    numpy, framework = frameworks()["numpy"], frameworks()[registry.backends()[backend].framework]
    where = device_at(backend, platform)
    ours = [a if a is None or framework is numpy else convert(a, numpy, framework, where) for a in arrays]
    out = op(name, backend=backend)(*ours, **options)
    return [framework.to_numpy(y) for y in (out if isinstance(out, tuple) else (out,)) if y is not None]


# --- right kernels ---


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
@every_op
def test_right_simulated_kernels_pass(name, dtype):
    r, z, rounded = record(name), {}, set()
    for seed in range(16 if DEEP else 10):
        regime, rng = ("normal", "wide")[seed % 2], np.random.default_rng([seed, 3])
        arrays, options = r.large_case(rng, dtype, regime)
        how = pick(rng, [v for v in r.variants if "ftz" not in v])
        for output, (e, _) in evidence(name, arrays, options, partial(simulated, **how), regime).items():
            assert not e.reasons, (seed, output, how, e)
            z[output] = max(e.z * e.applies, z.get(output, 0))
        rounded |= {n for n, (_, stored) in op(name).bind(*arrays, **options).outputs.items() if stored != "float32"}
    assert z.keys() == {o.name for o in r.spec.shown}
    for output, most in z.items():
        if r.never_off(output) or r.spec.output(output).codes:
            assert most == 0.0
            continue
        least = r.least_z.get(output, 0.9) if output in rounded else 0.4
        if dtype == "float64":
            continue  # the oracle's own precision: how far products differ from its own is the machine's BLAS's choice
        assert most >= least, f"sigma is slack: four times less would still pass: {z}"


@every_op
def test_right_kernels_that_add_one_term_after_the_other_pass(name):
    r = record(name)
    for dtype, seed in itertools.product(("float32", "bfloat16"), range(6 if DEEP else 4)):
        regime, rng = ("normal", "wide")[seed % 2], np.random.default_rng([seed, 5])
        arrays, options = r.large_case(rng, dtype, regime)
        how = pick(rng, [v for v in r.variants if "ftz" not in v])
        for output, (e, _) in evidence(name, arrays, options, partial(in_order, **how), regime).items():
            assert not e.reasons, (dtype, seed, output, how, e)


@pytest.mark.parametrize(("name", "rows"), [("layernorm", 3), ("rmsnorm", 3), ("softmax", 3), ("logsumexp", 90)])
def test_long_rows_whose_sums_run_in_order_pass(name, rows):
    """Their errors are a random walk of as many steps as there are terms; a sum of blocks walks a 25th of them."""
    for seed in range(12):
        arrays = (draw(np.random.default_rng([seed, 7]), (rows, 4096), "float32"),)
        for output, (e, worst) in evidence(name, arrays, {}, in_order).items():
            assert e.applies and not e.reasons and worst < 1, (seed, output, e)


def test_a_sum_in_order_may_lose_every_term_that_is_small_beside_what_came_before():
    """Squares of a row whose numbers lie far apart: thousands are lost, each by all of itself. Where that leaves the
    bound of shared sums, the promise of those is broken, and nothing is asked of statistics."""
    for seed, rows in itertools.product(range(6), (1, 4)):
        arrays = (draw(np.random.default_rng([seed, 12]), (rows, 4160), "float32", "wide"),)
        for name in ("layernorm", "rmsnorm"):
            for output, (e, worst) in evidence(name, arrays, {}, in_order, "wide").items():
                assert worst > 1 or (e.applies and not e.reasons), (seed, rows, output, e)


def served(backend, platform, name, arrays, options, regime):
    b = registry.backends()[backend]
    target = frameworks()[b.framework].target(device_at(backend, platform))
    return evidence(
        name, arrays, options, partial(on_backend, backend, platform), regime, target, b.families_for(target)[0][1]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_op
@pytest.mark.parametrize(("backend", "platform"), list(runnable_platforms()))
def test_right_backends_pass(backend, platform, name, dtype):
    if backend not in inventory.backends_with(name):
        pytest.skip(f"{backend} has no {name}")
    r = record(name)
    for seed in range(3 if not r.spec.is_vjp else 2):
        regime = ("normal", "wide")[seed == 2] if not r.spec.is_vjp else "normal"
        if r.spec.is_vjp:  # what the forward call saved belongs together
            arrays, options = r.typical(np.random.default_rng([seed, 4]), dtype)
        else:  # one shape in all: JAX compiles for each
            arrays, options = r.large_case(np.random.default_rng([0, 4]), dtype, regime)
            made = r.spec.generators  # their values stand where they do for a reason
            mixed = (
                a
                if a is None or of.name in made
                else np.random.default_rng([seed, i]).permuted(a, axis=-2 if a.ndim > 1 else 0)
                for i, (of, a) in enumerate(zip(r.spec.arrays, arrays, strict=False))
            )
            arrays = tuple(mixed)
        if dtype == "float32" and seed % 2 and any("tf32" in o.choices for o in r.spec.options):
            options = options | {"precision": "tf32"}
        for output, (e, _) in served(backend, platform, name, arrays, options, regime).items():
            assert e.applies or regime == "wide" or r.never_off(output) or r.spec.output(output).codes
            assert not e.reasons, (seed, output, e)


def test_a_rounding_that_a_long_row_shares_is_no_lean():
    """Of one hidden row and two classes that are likely, d_weight's errors are those of one number's rounding."""
    for seed in range(12):
        rng = np.random.default_rng([seed, 9])
        hidden, weight = draw(rng, (1, 4096), "float16"), draw(rng, (64, 4096), "float16")
        weight[1] = weight[0] + (hidden[0] * np.float32(rng.uniform(-2, 2) / 4096)).astype(np.float16)
        weight[2:] -= hidden[0] / 8
        labels, one = np.array([seed % 2]), np.ones(1, np.float32)
        _, lse, slope, *_ = oracle(
            op("linear_cross_entropy").bind(hidden, weight, labels, return_lse=True, return_slope=True)
        )
        arrays = hidden, weight, labels, lse.astype(np.float32), slope.astype(np.float16), one
        e, _ = evidence("linear_cross_entropy_vjp", arrays, {}, simulated)["d_weight"]
        assert e.applies and not e.reasons, (seed, e)


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16"])
def test_operands_that_tf32_cuts_may_lean(out_dtype):
    options = {"precision": "tf32", "out_dtype": out_dtype}
    for seed in range(30):
        rng = np.random.default_rng([seed, 8])
        arrays = draw(rng, (rng.choice([1, 64]), 2), "float32"), draw(rng, (2, 127), "float32")
        e, _ = evidence("matmul", arrays, options, simulated)["c"]
        assert e.applies and not e.reasons, (seed, e)


# --- faults ---


HIDING = [
    pytest.param(name, fault, dtype, id=f"{name}: {fault}-{dtype}")
    for name, r in records().items()
    for fault, hiding in r.hiding.items()
    for dtype in hiding.dtypes
]


@pytest.mark.parametrize(("name", "fault", "dtype"), HIDING)
def test_faults_that_hide_are_found(name, fault, dtype):
    r = record(name)
    hiding = r.hiding[fault]
    wrong = partial(simulated, truncates=hiding.truncates, **hiding.plant)
    for seed in range(3):
        arrays, options = r.typical(np.random.default_rng([seed, 6]), dtype, **hiding.options)
        right, found = evidences(name, arrays, options, (simulated, wrong))
        assert not any(e.reasons for e, _ in right.values())
        assert any(hiding.words in reason for e, _ in found.values() for reason in e.reasons), found


# --- exact results ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("backend", "platform"), list(runnable_platforms()))
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
        ("float32", {"out_dtype": "bfloat16"}, {"truncates": True}),
        ("float16", {"out_dtype": "bfloat16"}, {"truncates": True}),
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
    arrays, options = record("matmul").typical(rng, "float32")
    got = partial(simulated, precision="tf32")
    assert (
        evidence("matmul", arrays, options, got, "normal")["c"][0].reasons
        and not evidence("matmul", arrays, options, got, "constant")["c"][0].applies
    )


def test_one_rounding_in_all_elements_is_no_evidence():
    """A norm of rows of one number: +w or -w in nearly every row, and w is 0.45 of a unit from what 16 bits hold."""
    rng, unit = np.random.default_rng(0), 2.0**-10
    got = np.where(rng.random(10_000) < 0.5, 1.0, -1.0)
    got[:200] = np.round(rng.standard_normal(200) / unit) * unit
    lean = np.full(got.size, 0.45 * unit)
    lean[:200] = rng.uniform(-0.5, 0.5, 200) * unit
    sigma = np.full(got.size, unit / np.sqrt(12))
    assert not judge(got, got + np.sign(got) * lean, 4 * sigma, sigma, unbiased=True).applies
    spread = np.sign(got) * np.round(rng.uniform(1, 2, got.size) / unit) * unit  # the same lean of values that differ
    found = judge(spread, spread + np.sign(got) * 0.45 * unit, 4 * sigma, sigma, unbiased=True)
    assert found.applies and any("errors lean towards 0" in r for r in found.reasons)


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


def test_sums_in_any_order_are_one_draw_for_all_that_does_not_see_each_other():
    """The chain is that of a loop over the row; the fewer rows, the more one of them may err. What each element does by
    itself has no room."""
    rows = op("softmax").bind
    call = rows(np.zeros((4, 2, 4096), np.float32))
    assert units(call).chain(4096) == 160 and units(call.replace(any_order=True)).chain(4096) == 4096
    own, order = np.full(3, 2.0), np.full(3, np.hypot(2.0, 3.0))
    assert any_order(call, own, own) == pytest.approx(own)
    assert any_order(call, own, order) == pytest.approx(np.hypot(own, 3 * np.sqrt(2)))
    along = rows(np.zeros((4, 2, 4096), np.float32), axis=0)
    assert any_order(along, own, order) == pytest.approx(np.hypot(own, 3 * np.sqrt(1 + 8 / 8192)))
    assert np.isinf(any_order(call, np.full(3, np.inf), np.full(3, np.inf))).all()


def test_nothing_is_typical_where_rounding_alone_decides_what_a_key_weighs():
    """lse near 1e31 is off by 1e17 as two numbers: the one key that a row sees weighs 0 by the formula, and 1 by a
    kernel whose scores and lse err alike."""
    spec = record("attention_vjp").spec
    q, k, v = (np.full((1, n, 1, 8), 1.0, np.float32) for n in (4, 1, 1))
    lse, low = np.full((1, 1, 4), np.float32(8e30)), np.full((1, 1, 4), np.float32(1e17))
    sinks = lse[0, :, 0]
    with np.errstate(all="ignore"):
        call = as_float64(bind(spec, q, k, v, q, lse, 2 * q, lse_low=low, sinks=sinks, scale=1e30))
        ref = oracle(call)
        assert spec.spread is not None and not any(x is not None and x.any() for x in ref)
        assert all(np.isinf(x).all() for x in spec.spread(call, ref) if x is not None)


def test_errors_that_digits_repeat_are_one_draw():
    """A row times one number rounds alike wherever its elements have the same digits: of bfloat16's there are 128."""
    from portakern.testing import replay

    case = '{"dtype":"bfloat16","shapes":{"x":[1,2,4160]},"regime":"normal","seed":585302433}'

    def rmsnorm(x, *, eps=1e-6):
        wide = x.astype(np.float64)
        return (wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + eps)).astype(x.dtype)

    assert not replay("rmsnorm", case, fn=rmsnorm).failures
