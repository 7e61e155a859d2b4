"""Rows of one number, and of large numbers that differ in their last digits: what is left of them after their mean."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import portakern as pk
from portakern import testing
from portakern.core import registry
from portakern.core.binder import unchecked

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
BACKENDS = [name for name, b in registry.backends().items() if b.auto and not b.unavailable()]  # which have every op
WAYS = [
    (name, tiling) for name in BACKENDS for tiling in (None, {"block_n": 128}) if tiling is None or name != "reference"
]
NUMBERS = (1e6, 1e6 + 0.3, 1000.0, -1234.567, 3.0, 0.1, 1e20, 1e34)
"""Of few digits and of as many as there are: the sum of the latter rounds."""

WAYS_NAMED = pytest.mark.parametrize(
    ("backend", "tiling"), WAYS, ids=[f"{b}{'' if t is None else ' in blocks'}" for b, t in WAYS]
)


def constant(dtype, n, numbers=NUMBERS):
    with np.errstate(over="ignore"):
        rows = [np.full(n, x, np.float32).astype(DTYPES[dtype]) for x in numbers]
    return np.stack([row for row in rows if np.isfinite(row.astype(np.float32)).all()])


@WAYS_NAMED
@pytest.mark.parametrize(("dtype", "n"), [("float32", 1), ("float32", 1000), ("float16", 300), ("bfloat16", 300)])
def test_a_constant_row_is_its_bias_to_the_bit(backend, tiling, dtype, n):
    x, bias = constant(dtype, n), np.arange(n).astype(DTYPES[dtype])
    weight = np.linspace(-2, 2, n).astype(DTYPES[dtype])
    y = pk.op("layernorm", backend=backend, tiling=tiling)(x, weight, bias, eps=1e-12)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, x.shape))
    half, bias = constant(dtype, n, NUMBERS[:-1]), bias + np.zeros((), DTYPES[dtype])
    y, total = pk.op("add_layernorm", backend=backend, tiling=tiling)(half, half, weight, bias, eps=1e-12)
    np.testing.assert_array_equal(total, half + half)
    np.testing.assert_array_equal(
        y[np.isfinite(total).all(1)], np.broadcast_to(bias, half.shape)[np.isfinite(total).all(1)]
    )


@WAYS_NAMED
@pytest.mark.parametrize("n", [7, 1000])
def test_a_constant_row_has_no_variance_in_gradients(backend, tiling, n):
    """d_weight is 0, and eps alone scales d_x."""
    x = constant("float32", n, NUMBERS[:6])
    d_y, ones = np.random.default_rng(n).standard_normal(x.shape).astype(np.float32), np.ones(n, np.float32)
    exact = 100 * (d_y - d_y.astype(np.float64).mean(-1, keepdims=True))
    for op in (op for op in pk.ops() if op.endswith("layernorm_vjp")):
        given = x, d_y, ones, ones
        d_x, d_weight, _ = pk.op(op, backend=backend, tiling=tiling)(*given, eps=1e-4)
        assert not d_weight.any()
        np.testing.assert_allclose(d_x, exact, rtol=1e-6, atol=1e-4)


@WAYS_NAMED
def test_a_large_offset_costs_no_more_than_the_rounding_of_the_mean(backend, tiling):
    """1e6 and a little: float32 has 1/16 between two numbers there, and no other mean is nearer."""
    few = np.arange(600) % 5 / 16 - 1 / 8
    few[-1] += 3 / 16
    y = pk.op("layernorm", backend=backend, tiling=tiling)((1e6 + few).astype(np.float32)[None], eps=0.0)
    spread = few.std()
    assert np.abs(y - (few - few.mean()) / spread).max() <= (1 / 32 if tiling is None else 1 / 8) / spread + 0.02


def by_a_rounded_reciprocal(x, weight=None, bias=None, *, eps=1e-5):
    """As compilers write a division by a number that they know."""
    wide, n = x.astype(np.float32), np.float32(x.shape[-1])
    with np.errstate(all="ignore"):
        centred = wide - wide.sum(-1, keepdims=True) * (1 / n)
        y = centred / np.sqrt(np.square(centred).sum(-1, keepdims=True) / n + np.float32(eps))
        y = y if weight is None else y * weight.astype(np.float32)
        return np.ascontiguousarray((y if bias is None else y + bias.astype(np.float32)).astype(x.dtype))


def test_the_checker_finds_a_mean_that_is_no_number_of_a_constant_row():
    assert abs(float(by_a_rounded_reciprocal(np.full((1, 7), 1e6, np.float32))[0, 0])) > 0.9
    for seed in range(4):
        report = pk.check(
            "layernorm", fn=by_a_rounded_reciprocal, max_examples=40, dtypes=["float32"], seed=seed, shrink=False
        )
        assert [f for f in report.failures if "constant" in f.what or "constant" in f.case], (seed, report)


def test_the_bound_admits_no_error_of_the_mean_of_large_equal_numbers():
    call = unchecked(registry.find_spec("layernorm"), np.full((1, 7), 1e6, np.float32))
    with pytest.raises(AssertionError, match=r"y\[0, 0\] is -0.998722374; the oracle says 0"):
        testing.compare_call(call, [by_a_rounded_reciprocal(call.arrays["x"])])
