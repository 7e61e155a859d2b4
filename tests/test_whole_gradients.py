"""Gradients as users call them: forward and backward together, against the derivative of the forward's formula.

A gradient op is held to its formula on what the forward call saved. That what is saved can carry the gradient shows
only where both run: on every corner of an op and of its gradient, on samples, on drawn calls, and where scores and
logits are large. ``python -m tests.whole`` runs more of the same. The derivative is the gradient's oracle in float64 on
what the forward's oracle saves unrounded; test_vjp_bounds.py holds that to finite differences.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

import portakern as pk
from portakern import testing
from portakern.core.binder import bind
from portakern.testing.cases import Case
from portakern.testing.whole_gradients import cotangents_of, fraction, whole_gradients
from tests.ops import forward_records
from tests.whole import DRAWN, NARROW, cases, gradients, worst

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BACKENDS = ("reference", "triton", "pallas")
OPS = [r.op for r in forward_records() if r.spec.vjp]
FRAMEWORKS = [pytest.param("torch", id="torch"), pytest.param("jax", id="jax")]


def held(op, backend, given, options, cotangents, framework="torch"):
    """Gradients by input, within their bounds."""
    if backend == "triton" and framework == "jax":
        pytest.skip("Triton takes JAX's arrays on a GPU alone")
    pytest.importorskip(framework)
    got = gradients(op, backend, framework, "cpu", given, options, cotangents)
    whole = whole_gradients(op, given, options, cotangents)
    assert got.keys() and got.keys() <= whole.keys()
    assert {n: fraction(whole[n], a) for n, a in got.items() if fraction(whole[n], a) > 1} == {}
    return got, whole


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_samples_and_corners_are_within_the_bound_of_both(op, backend):
    """All on the oracle and on Triton; a fifth of each on Pallas, whose interpreter compiles each."""
    pytest.importorskip("torch")
    spec, some = pk.op(op).spec, 5 if backend == "pallas" else 1
    for name in list(testing.samples(op))[::some]:
        case = testing.sample_case(op, name, dtype="float32")
        given = {n: np.array(b.view()) for n, b in case.buffers(spec).items()}
        call = bind(spec, **given, **case.options)
        held(op, backend, given, dict(case.options), cotangents_of(spec, np.random.default_rng(0), call))
    drawn = list(cases(op, 5))[::some]
    assert len({edge for edge, _, _ in drawn} - {DRAWN}) > 12 / some
    for edge, of, case in drawn:
        found = worst(op, of, case, backend=backend, framework="torch", device="cpu")
        refused = found is None and case.dtype == "float64"  # which tf32 is none of
        assert refused or found[0] <= 1, (edge, of.name, found, case.to_json())


@pytest.mark.parametrize("op", OPS)
def test_corners_are_within_the_bound_in_jax(op):
    pytest.importorskip("jax")
    for edge, of, case in list(cases(op, 2, NARROW))[::4]:
        found = worst(op, of, case, backend="reference", framework="jax", device="cpu")
        assert found is not None and found[0] <= 1, (edge, of.name, found, case.to_json())


@pytest.mark.parametrize("op", OPS)
def test_a_gradient_that_is_off_by_a_thousandth_is_outside(op):
    spec = pk.op(op).spec
    case = testing.sample_case(op, next(iter(testing.samples(op))), dtype="float32")
    given = {n: np.array(b.view()) for n, b in case.buffers(spec).items()}
    call = bind(spec, **given, **case.options)
    whole = whole_gradients(op, given, case.options, cotangents_of(spec, np.random.default_rng(0), call))
    for name, found in whole.items():
        assert fraction(found, (found.exact * (1 + 2.0**-10)).astype(np.float32)) > 1, name
        assert fraction(found, found.exact.astype(np.float32)) <= 1, name


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_output_that_the_gradient_does_not_read_may_be_asked_for(framework):
    """linear's pre without an activation is no input of its gradient, and its cotangent is none."""
    given = {"x": np.ones((3, 5), np.float32), "weight": np.ones((4, 5), np.float32)}
    for activation in ("none", "gelu"):
        options = {"return_pre": True, "activation": activation}
        held("linear", "reference", given, options, {"y": np.ones((3, 4), np.float32)}, framework)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [0.0, 1e5, -1e8, 1e8])
def test_losses_of_logits_with_a_common_offset(offset, backend, framework):
    """p is as exact as at 0: the logits are, and what rounding takes from lse is kept."""
    rng = np.random.default_rng(1)
    x = (8 * rng.integers(-1, 2, (6, 70)) + offset).astype(np.float32)
    given = {"logits": x, "labels": rng.integers(0, 70, 6).astype(np.int32)}
    cotangents = {"loss": rng.standard_normal(6).astype(np.float32)}
    got, whole = held("cross_entropy", backend, given, {}, cotangents, framework)
    np.testing.assert_allclose(got["logits"], whole["logits"].exact, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(got["logits"].sum(-1), 0, atol=1e-6)  # the shares of a row add up to 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4, 1e6])
def test_weights_add_up_to_1_however_large_scores_are(scale, backend, framework):
    """d_v of cotangents of 1 is what each key weighs: as many as there are queries in all. Scores are whole numbers, so
    that every kernel has the same."""
    rng = np.random.default_rng(2)
    q, k = (rng.integers(-3, 4, (1, n, 2, 16)).astype(np.float32) for n in (40, 70))
    given = {"q": q * np.float32(scale), "k": k, "v": rng.standard_normal((1, 70, 2, 16)).astype(np.float32)}
    options, cotangents = {"scale": 1.0}, {"o": np.ones((1, 40, 2, 16), np.float32)}
    got, whole = held("attention", backend, given, options, cotangents, framework)
    np.testing.assert_allclose(got["v"].sum(1), 40, rtol=1e-5)
    np.testing.assert_allclose(got["v"], whole["v"].exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("low", [float(np.finfo(np.float32).min), -1e8, 1e8])
def test_rows_that_a_finite_mask_hides(low, backend, framework):
    """A row whose every key has the same large bias weighs all keys alike, as float32 makes all its scores equal."""
    rng = np.random.default_rng(3)
    given = {n: rng.standard_normal((1, 33, 1, 16)).astype(np.float32) for n in ("q", "k", "v")}
    given["bias"] = np.zeros((1, 1, 33, 33), np.float32)
    given["bias"][:, :, 2] = low
    cotangents = {"o": np.zeros((1, 33, 1, 16), np.float32)}
    cotangents["o"][:, 2] = 1
    got, _ = held("attention", backend, given, {}, cotangents, framework)
    np.testing.assert_allclose(got["v"].sum(1), 1, rtol=1e-5)
    assert got["v"].max() <= 1 and np.isfinite(got["q"]).all()


def test_float64_keeps_its_digits_in_units_of_a_huge_scale():
    """What stands for a rest of 0 is 1e-8 of float32's least number times a scale of 1e30, and nothing of float64's."""
    pytest.importorskip("triton", reason="triton is not installed")
    shapes = {"q": [1, 9, 7, 12], "k": [1, 9, 1, 12], "v": [1, 9, 1, 8]}
    told = {"dtype": "float64", "shapes": shapes, "regime": "subnormal", "seed": 3, "options": {"scale": -1e30}}
    case = Case.from_json(json.dumps(told))
    found = worst("attention", pk.op("attention").spec, case, backend="triton", framework="torch", device="cpu")
    assert found is not None and found[0] <= 1, found
