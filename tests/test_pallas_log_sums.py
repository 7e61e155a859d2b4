"""The log-sum-exp that Pallas's kernels keep in two numbers, and gradients that measure large scores from it: in the
interpreter, on scores that float32 holds. On Hopper, where jax has its interpreter."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp

import portakern as pk
from portakern.backends.pallas.lib.double_float import UnitOf, in_two
from portakern.core import registry, tilings

PALLAS = registry.backend("pallas")
FAMILIES = {f.name: f for f in PALLAS.declared if f.name in ("tpu", "gpu", "decode", "unordered")}
LARGE = [1e2, 1e3, 1e5, 1e8]
FINFO = np.finfo(np.float32)


def serving(op, variant):
    """The implementation of a family; the test is left out where the machine lacks what that needs."""
    if reason := FAMILIES[variant].missing_packages():
        pytest.skip(f"pallas/{variant} needs {reason}")
    return PALLAS.implementation(op, FAMILIES[variant])


def run(op, variant, wants, *arrays, **options):
    """The outputs in ``wants`` by name, those that only gradients read among them."""
    implementation = serving(op, variant)
    call = pk.op(op, backend="pallas", variant=variant).bind(*arrays, **options)
    call = call.replace(wants=wants, interpret=True)
    found = implementation.fn(call, tilings.default(implementation, call).tiling)
    return {o.name: np.asarray(y) for o, y in zip(call.spec.outputs, found, strict=True) if y is not None}


def exact_scores(size, dtype=jnp.bfloat16, q_len=5, kv_len=9):
    """(q, k, v) of integers, whose products float32 holds, and which ``size`` times a power of 2 makes scores."""
    rng = np.random.default_rng(int(size))
    q, k = (jnp.asarray(rng.integers(-8, 9, (1, n, 1, 16)), dtype) for n in (q_len, kv_len))
    return q, k, jnp.asarray(rng.standard_normal((1, kv_len, 1, 16)), dtype)


def two_of_float64(s):
    """(m, log of the sum of exp(s - m)) of rows of scores: beside a large m float64 holds no log."""
    m = s.max(-1)
    return m, np.log(np.exp(s - m[..., None]).sum(-1))


def assert_log_sum(lse, low, m, log):
    """lse is their sum as it rounds, and both together are off by 2^-40 of lse, and 4 units of roundoff of the log."""
    error = np.abs((lse.astype(np.float64) - m) + low - log)
    assert (error <= 2.0**-40 * np.abs(m) + 2.0**-22 * (1 + log)).all(), error
    assert (lse == lse + low).all()


@pytest.mark.parametrize("factor", [1.0, 16**-0.5, 7**-0.5, 1 / 3e-5, -2.0 / 3])
def test_two_numbers_hold_a_product_and_a_sum_to_twice_the_precision(factor):
    """Under jit, where a compiler may fuse a product with a sum, and change none of these for it."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(999) * 10.0 ** rng.integers(-3, 20, 999)).astype(np.float32)
    low, more = (x * rng.uniform(-1, 1, 999) * 2.0**-25).astype(np.float32), rng.random(999).astype(np.float32)
    wide = np.longdouble
    for rest, plus in ((None, more), (low, None)):
        high, lost = jax.jit(lambda x: in_two(x, rest, factor, plus))(x)  # noqa: B023
        exact = (wide(x) + (0 if rest is None else wide(rest))) * wide(factor) + (0 if plus is None else wide(plus))
        error = np.abs(wide(np.asarray(high)) + wide(np.asarray(lost)) - exact)
        assert (error <= 2.0**-44 * np.abs(exact) + 2.0**-46).all()
        assert np.mean(np.asarray(lost) != 0) > 0.5


def test_where_two_numbers_are_not_finite_the_second_is_0():
    high, low = in_two(jnp.float32([np.inf, -np.inf, np.nan, FINFO.min, FINFO.max]), None, 1.5, None)
    np.testing.assert_array_equal(high, [np.inf, -np.inf, np.nan, -np.inf, np.inf])
    np.testing.assert_array_equal(low, 0)


@pytest.mark.parametrize(
    ("scale", "softcap"),
    [
        *((scale, None) for scale in (2e-38, 1e-13, 0.3, 1e31, 3e38, -3e38, 0.0)),
        (0.3, 1e-13),
        (0.3, 20.0),
        (1e31, 9e29),
    ],
)
def test_a_unit_of_gradients_has_an_inverse_and_is_the_scale_with_what_dots_are_multiplied_by(scale, softcap):
    q, k, v = exact_scores(1)
    unit = UnitOf.gradients(pk.op("attention", backend="pallas").bind(q, k, v, scale=scale, softcap=softcap))
    assert FINFO.tiny < 1 / unit.unit < FINFO.max
    whole = (1.0 if unit.pre is None else unit.pre) * (unit.factor or 1.0) * unit.unit
    np.testing.assert_allclose(whole, scale, rtol=1e-12)


@pytest.mark.parametrize(
    ("variant", "size"),
    [*(("tpu", size) for size in LARGE), ("gpu", 1e3), ("gpu", 1e8), ("decode", 1e3), ("decode", 1e8)],
)
def test_attention_keeps_the_log_sum_exp_to_twice_the_precision(variant, size):
    q, k, v = exact_scores(size)
    found = run("attention", variant, ("o", "lse", "lse_low"), q, k, v, scale=size / 7)
    dots = np.einsum("bqhd,bkhd->bhqk", *(np.asarray(x, np.float64) for x in (q, k)))
    m, log = two_of_float64(dots * (size / 7))
    assert_log_sum(found["lse"], found["lse_low"], m, log)


@pytest.mark.parametrize(
    ("variant", "size", "biased"),
    [
        *(("tpu", size, biased) for size in LARGE for biased in (False, True)),
        ("gpu", 1e3, False),
        ("gpu", 1e8, False),
        ("gpu", 1e5, True),
        ("unordered", 1e8, False),
    ],
)
def test_weights_of_gradients_add_up_to_one(variant, size, biased):
    """d_v of a sum of o: each key's weights, and all together are as many as there are queries. Half of the keys have
    twins, with whom they share the weight of a row."""
    q, k, v = exact_scores(size)
    k, scale = jnp.concatenate([k, k], axis=1), size / 8
    v = jnp.concatenate([v, v], axis=1)
    bias = jnp.full((1, 1, 5, 18), -size * 1.5, jnp.float32) if biased else None
    forward = "tpu" if variant == "tpu" else "gpu"
    found = run("attention", forward, ("o", "lse", "lse_low"), q, k, v, bias, scale=scale)
    o, lse, low = (jnp.asarray(found[name]) for name in ("o", "lse", "lse_low"))
    given = q, k, v, o, lse, jnp.ones_like(o), bias, None, None, None, low
    of = run("attention_vjp", variant, ("d_q", "d_k", "d_v"), *given, scale=scale)
    d_v = of["d_v"].astype(np.float64)
    np.testing.assert_allclose(d_v.sum(1), 5, rtol=2**-7)
    np.testing.assert_array_equal(d_v[:, :9], d_v[:, 9:])


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [("tpu", jnp.float32), ("tpu", jnp.bfloat16), ("gpu", jnp.bfloat16), ("unordered", jnp.bfloat16)],
)
def test_a_row_whose_every_bias_is_the_least_number_has_weights_that_add_up_to_one(variant, dtype):
    """Rounded to float32, its lse is that number, and exp(s - lse) would be 1 for every key."""
    q, k, v = exact_scores(1, dtype, 4, 4)
    bias = jnp.zeros((1, 1, 4, 4), jnp.float32).at[:, :, 2].set(FINFO.min)
    forward = "tpu" if variant == "tpu" else "gpu"
    found = run("attention", forward, ("o", "lse", "lse_low"), q, k, v, bias)
    o, lse, low = (jnp.asarray(found[name]) for name in ("o", "lse", "lse_low"))
    np.testing.assert_allclose(low[0, 0, 2], np.log(4), rtol=1e-6)
    given = q, k, v, o, lse, jnp.zeros_like(o).at[0, 2].set(1), bias, None, None, None, low
    of = run("attention_vjp", variant, ("d_q", "d_k", "d_v", "d_bias"), *given)
    np.testing.assert_array_equal(of["d_v"].astype(np.float64), 0.25)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in of.values())


@pytest.mark.parametrize("size", LARGE)
def test_losses_keep_the_log_sum_exp_to_twice_the_precision(size):
    rng = np.random.default_rng(0)
    logits = (rng.integers(-3, 4, (6, 40)) + np.float32(size)).astype(np.float32)
    labels = jnp.asarray([3, 1, -100, 7, 0, 39], jnp.int32)
    found = run("cross_entropy", "tpu", ("loss", "lse", "lse_low"), jnp.asarray(logits), labels)
    counted = np.asarray(labels) >= 0
    m, log = two_of_float64(logits.astype(np.float64))
    assert_log_sum(found["lse"][counted], found["lse_low"][counted], m[counted], log[counted])
    assert not found["lse_low"][~counted].any()
    given = jnp.asarray(logits), labels, *(jnp.asarray(found[n]) for n in ("lse", "loss", "lse_low"))
    given = *given[:3], jnp.ones(6, jnp.float32), given[4]
    d_x = run("cross_entropy_vjp", "tpu", ("d_logits",), *given)["d_logits"].astype(np.float64)
    np.testing.assert_allclose(d_x.sum(1), 0, atol=1e-5)  # weights that add up to 1, less the target


@pytest.mark.parametrize("size", LARGE)
def test_losses_of_a_linear_layer_measure_logits_from_two_numbers(size):
    rng = np.random.default_rng(1)
    grain = 16 if size > 1e7 else 1  # float32 holds every sum
    others = grain * rng.integers(-2, 3, (6, 3))
    hidden = jnp.asarray(np.concatenate([np.full((6, 1), size), others], 1), jnp.float32)
    weight = jnp.asarray(np.concatenate([np.ones((20, 1)), rng.integers(-1, 2, (20, 3))], 1), jnp.float32)
    labels = jnp.asarray([3, 1, -100, 7, 0, 19], jnp.int32)
    wants = ("loss", "lse", "slope", "lse_low")
    found = run("linear_cross_entropy", "tpu", wants, hidden, weight, labels, return_lse=True, return_slope=True)
    x = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
    counted = np.asarray(labels) >= 0
    m, log = two_of_float64(np.asarray(x, np.float32).astype(np.float64))
    assert_log_sum(found["lse"][counted], found["lse_low"][counted], m[counted], log[counted])
    np.testing.assert_allclose(found["slope"][:, 0], 0, atol=1e-5)  # all weights begin with 1
    lse, slope, low = (jnp.asarray(found[n]) for n in ("lse", "slope", "lse_low"))
    given = hidden, weight, labels, lse, slope, jnp.ones(6, jnp.float32), low
    d_weight = run("linear_cross_entropy_vjp", "tpu", ("d_hidden", "d_weight"), *given)["d_weight"]
    np.testing.assert_allclose(d_weight.astype(np.float64).sum(0) / size, 0, atol=1e-5)
