"""The gradients' oracles against finite differences, and what NaN, infinities and
integers do to them.

Their bounds and spreads are held to simulated kernels in test_bounds.py and test_statistics.py, with everybody else's.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from portakern.api import op
from portakern.core.oracle import as_float64, oracle
from tests.measuring import differentiated, evidence, simulated
from tests.ops import forward_records, gradient_records, record
from tests.ops._shared import BF16, draw

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FORWARD = [r for r in forward_records() if r.spec.vjp]


# --- the oracles ---


@pytest.mark.parametrize("r", FORWARD, ids=lambda r: r.op)
def test_gradients_are_finite_differences(r):
    """Without any library's derivative, to nine digits: each input moved along each of its axes, or along random
    directions where they are many, in a stencil of fourth order."""
    step, stencil = 1e-3, ((1, 8 / 12), (2, -1 / 12))
    for key, sample in (r.small | r.derived).items():
        arrays, options, cotangents, call = differentiated(r, sample)
        rng = np.random.default_rng(2)

        def loss(moved, arrays=arrays, options=options, cotangents=cotangents):
            outputs = oracle(op(r.op).bind(**arrays | moved, **options))
            named = [(o.name, y) for o, y in zip(r.spec.outputs, outputs, strict=True) if o.name in cotangents]
            return sum((np.where(np.isfinite(y), y, 0) * cotangents[n]).sum() for n, y in named)

        for o, gradient in zip(call.spec.outputs, oracle(call), strict=True):
            assert (gradient is not None) == (o.gradient_of in arrays)
            for name in (o.gradient_of, *call.spec.also.get(o.name, ())) if gradient is not None else ():
                x = arrays[name]
                ways = np.eye(x.size) if x.size <= 24 else rng.standard_normal((6, x.size))
                for way in ways.reshape(-1, *x.shape):
                    up, down = ([w * loss({name: x + s * n * step * way}) for n, w in stencil] for s in (1, -1))
                    slope = (sum(up) - sum(down)) / step
                    assert (gradient * way).sum() == pytest.approx(slope, rel=1e-9, abs=1e-9), (key, name)


def there(call, values):
    """The names of the gradients that are there."""
    return {o.name for o, value in zip(call.spec.outputs, values, strict=True) if value is not None}


@pytest.mark.parametrize("r", gradient_records(), ids=lambda r: r.op)
def test_only_wanted_gradients_are_computed(r):
    arrays, options = r.typical(np.random.default_rng(0), "float32")
    every = op(r.op).bind(*arrays, **options)
    forced = there(every, every.spec.forced(as_float64(every), oracle(every))) if every.spec.forced else set()
    for n in range(1, len(every.wants) + 1):
        for wants in itertools.combinations(every.wants, n):
            call = op(r.op).bind(*arrays, **options, wants=wants)
            ref, wide = oracle(call), as_float64(call)
            for got in (ref, call.spec.bound(wide, ref), call.spec.spread(wide, ref)):
                assert there(call, got) == set(wants)
            if call.spec.forced:
                assert there(call, call.spec.forced(wide, ref)) == forced & set(wants)


def test_what_nan_and_inf_reach():
    rng = np.random.default_rng(0)
    x, d_y, weight = (rng.standard_normal(s) for s in ((4, 5), (4, 5), 5))
    bad = x.copy()
    bad[1, 2] = np.inf
    d_x, d_weight, d_bias = oracle(op("layernorm_vjp").bind(bad, d_y, weight, weight))
    assert (
        np.isnan(d_x[1]).all()
        and np.isnan(d_weight).all()
        and np.isfinite(d_bias).all()
        and np.isfinite(np.delete(d_x, 1, 0)).all()
    )
    d_x, d_weight = oracle(op("rmsnorm_vjp").bind(bad, d_y, weight))
    assert (
        np.isnan(d_x[1]).all()
        and np.flatnonzero(np.isnan(d_weight)).tolist() == [2]
        and np.isfinite(np.delete(d_x, 1, 0)).all()
    )
    bad = d_y.copy()
    bad[1, 2] = np.nan
    d_x, d_weight, d_bias = oracle(op("layernorm_vjp").bind(x, bad, weight, weight))
    assert np.isnan(d_x[1]).all() and np.isfinite(np.delete(d_x, 1, 0)).all()
    assert np.flatnonzero(np.isnan(d_weight)).tolist() == np.flatnonzero(np.isnan(d_bias)).tolist() == [2]
    (d_x,) = oracle(op("softmax_vjp").bind(np.full((4, 5), 0.2), bad))
    assert np.isnan(d_x[1]).all() and np.isfinite(np.delete(d_x, 1, 0)).all()
    d_a, d_b = oracle(op("matmul_vjp").bind(rng.standard_normal((4, 3)), rng.standard_normal((3, 5)), bad))
    assert (
        np.isnan(d_a[1]).all()
        and np.isfinite(np.delete(d_a, 1, 0)).all()
        and np.isnan(d_b[:, 2]).all()
        and np.isfinite(np.delete(d_b, 2, 1)).all()
    )


@pytest.mark.parametrize("backend", ["reference", "triton", "pallas"])
def test_no_p_exceeds_1_whatever_lse_is(backend):
    """exp(93), of a logit beside the lse of another row, is beyond float32: p is 1, in losses of logits and of hidden
    states."""
    x, labels = np.array([[93, 0], [1000, 0]], np.float32), np.ones(2, np.int32)
    lse, d_loss = np.zeros(2, np.float32), np.array([1e-3, 1], np.float32)
    d_logits = op("cross_entropy_vjp", backend=backend)(x, labels, lse, d_loss).d_logits
    np.testing.assert_array_equal(d_logits, np.array([[1e-3, 0], [1, 0]], np.float32))
    hidden, weight = x[:, :1], np.array([[1], [0]], np.float32)
    of_linear = op("linear_cross_entropy_vjp", backend=backend)
    d_weight = of_linear(hidden, weight, labels, lse, hidden, d_loss, wants=["d_weight"]).d_weight
    np.testing.assert_allclose(d_weight, np.array([[93e-3 + 1000], [0]]), rtol=1e-6)


# --- exact results, and cotangents of another dtype ---


def exact_share(name, arrays, **options):
    call = op(name).bind(*arrays, **options)
    return [None if f is None else f.mean() for f in call.spec.forced(as_float64(call), oracle(call))]


def test_what_has_to_be_exact():
    rng = np.random.default_rng(0)
    a, b, d_c = (draw(rng, s, "bfloat16", "integers") for s in ((3, 8, 5), (5, 6), (3, 8, 6)))
    assert exact_share("matmul_vjp", (a, b, d_c)) == [1, 1]
    wide = np.full((3, 8, 6), 2.0**11 + 1, np.float32)  # 12 significant bits
    assert exact_share("matmul_vjp", (a, b, wide)) == [1, 1] and exact_share(
        "matmul_vjp", (a, b, wide), precision="tf32"
    ) == [0, 0]
    assert exact_share("matmul_vjp", (a, b, wide * 2**12)) == [0, 0]  # sums beyond 2^24
    d_y = draw(rng, (600, 5), "float32", "integers")
    d_y[3, 1], d_y[4, 2] = 0.5, np.nan
    assert exact_share("layernorm_vjp", (d_y, d_y, d_y[0], d_y[0])) == [None, None, 3 / 5]


def reasons(name, arrays, kernel=simulated, **how):
    """Everything that statistics hold against a kernel's integers."""
    found = evidence(name, arrays, {}, partial(kernel, **how), "integers")
    return [reason for e, _ in found.values() for reason in e.reasons]


def test_inexact_integers_are_found():
    rng = np.random.default_rng(0)
    a, b = (draw(rng, s, "bfloat16", "integers") for s in ((40, 5), (5, 70)))
    d_c = rng.integers(-5000, 5001, (3, 40, 70)).astype(np.float32)
    arrays = np.broadcast_to(a, (3, 40, 5)), b, d_c
    rounded_first = (arrays[0], b, d_c.astype(BF16))
    for fault in ({"low": BF16}, {"cut": True}):
        assert not reasons("matmul_vjp", arrays)
        assert any("not exact" in reason for reason in reasons("matmul_vjp", arrays, **fault)), fault
    found = reasons("matmul_vjp", arrays, lambda *_: record("matmul_vjp").simulate(*rounded_first))
    assert any("not exact" in reason for reason in found)
    arrays = tuple(draw(rng, s, "float32", "integers") for s in ((300, 5), (300, 5), 5, 5))
    assert any("not exact" in reason for reason in reasons("layernorm_vjp", arrays, skip_rows=1, group=1))


@pytest.mark.parametrize(
    ("dtypes", "product"),
    [
        (("bfloat16", "float32"), "float32"),
        (("float16", "bfloat16"), "float32"),
        (("float32", "float16"), "float32"),
        (("float64", "float32"), "float64"),
        (("float16", "float16"), "float16"),
    ],
)
def test_products_are_taken_in_the_dtype_that_holds_both(dtypes, product):
    from portakern.specs.matmul import folded, product_dtype

    rng = np.random.default_rng(0)
    a, b, d_c = (
        draw(rng, s, d) for s, d in (((2, 1, 4, 3), dtypes[0]), ((5, 3, 6), dtypes[0]), ((2, 5, 4, 6), dtypes[1]))
    )
    call = op("matmul_vjp").bind(a, b, d_c, precision="tf32")
    wide = as_float64(call)
    assert product_dtype(call) == product_dtype(wide) == product
    assert [folded(wide, name).dims["k"] for name in ("d_a", "d_b")] == [5 * 6, 2 * 4]
    for name, exact_value in zip(("d_a", "d_b"), oracle(call), strict=True):
        inner = folded(wide, name)
        np.testing.assert_allclose(
            (inner.arrays["a"] @ inner.arrays["b"]).reshape(exact_value.shape), exact_value, rtol=1e-12
        )
        assert inner.outputs["c"][1] == dtypes[0] and inner.dtype == product
