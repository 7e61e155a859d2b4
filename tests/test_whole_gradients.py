"""Gradients as users call them: forward and backward together, against the derivative of the forward's formula.

A gradient op is held to its formula on what the forward call saved. That what is saved can carry the gradient shows
only where both run: here on the samples of every op, and where scores and logits are large. The derivative is the
gradient's oracle in float64 on what the forward's oracle saves unrounded; test_vjp_bounds.py holds that to finite
differences and to PyTorch.
"""

from __future__ import annotations

import numpy as np
import pytest

import portakern as pk
from portakern import testing
from portakern.core.gradients import wiring
from portakern.core.oracle import as_float64, oracle
from tests.ops import forward_records

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BACKENDS = ("reference", "triton", "pallas")
SAMPLES = [
    pytest.param(r.op, name, id=f"{r.op}: {name}")
    for r in forward_records()
    if r.spec.vjp
    for name in testing.samples(r.op)
]


def exact_gradients(op, given, options, cotangents):
    """d_x by name of the float64 derivative, all of the forward's outputs that the gradient reads in float64 too."""
    call = pk.op(op).bind(**given, **options)
    wired = wiring(call.spec)
    wide = as_float64(wired.training(call))
    saved = dict(zip((o.name for o in call.spec.outputs), oracle(wired.training(call)), strict=True))
    arrays = {n: wide.arrays[n] for n in wired.inputs} | {n: saved[n] for n in wired.saves(call.options)}
    if saved.get("lse_low") is not None:  # the rest of an lse that is stored in float32: here lse is whole
        arrays["lse_low"] = wide_low(call, wide, saved)
    arrays |= {
        argument: cotangents[n].astype(np.float64) for n, argument in wired.cotangents.items() if n in cotangents
    }
    arrays = {n: a for n, a in arrays.items() if a is not None}
    vjp = pk.op(wired.vjp.name).bind(**arrays, **{n: call.options[n] for n in wired.options})
    found = arrays | dict(zip((o.name for o in wired.vjp.outputs), oracle(vjp), strict=True))  # a cotangent may pass on
    return {name: found[output] for name, output in wired.gradients.items() if found.get(output) is not None}


def wide_low(call, wide, saved):
    """What float64 lacks of lse."""
    arrays = {n: a for n, a in wide.arrays.items() if a is not None}
    double = pk.op(call.spec.name).bind(**arrays, **call.options)
    names = [o.name for o in call.spec.outputs]
    return oracle(wiring(call.spec).training(double))[names.index("lse_low")]


def torch_gradients(op, backend, given, options, cotangents):
    """Gradients by name, by autograd, of what an op gives its caller."""
    torch = pytest.importorskip("torch")
    leaves = {n: torch.from_numpy(np.array(a)) for n, a in given.items()}
    differentiable = wiring(pk.op(op).spec).gradients
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in differentiable)
    out = pk.op(op, backend=backend)(**leaves, **options)
    outputs = out if isinstance(out, tuple) else (out,)
    names = [o.name for o in pk.op(op).spec.shown]
    pairs = [(y, torch.from_numpy(cotangents[n])) for n, y in zip(names, outputs, strict=False) if n in cotangents]
    torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    return {n: leaf.grad.numpy() for n, leaf in leaves.items() if leaf.grad is not None}


def jax_gradients(op, backend, given, options, cotangents):
    jax = pytest.importorskip("jax")
    names = [o.name for o in pk.op(op).spec.shown]
    differentiable = [n for n in given if n in wiring(pk.op(op).spec).gradients]

    def f(arrays):
        out = pk.op(op, backend=backend)(**{**given, **arrays}, **options)
        outputs = out if isinstance(out, tuple) else (out,)
        return [y for n, y in zip(names, outputs, strict=False) if n in cotangents]

    given = {n: jax.numpy.asarray(a) for n, a in given.items()}
    _, back = jax.vjp(f, {n: given[n] for n in differentiable})
    (found,) = back([jax.numpy.asarray(cotangents[n]) for n in names if n in cotangents])
    return {n: np.asarray(a) for n, a in found.items()}


def drawn_cotangents(op, given, options, seed=0):
    """Of the outputs that the gradient takes cotangents of, and the caller is shown under these options."""
    rng, call = np.random.default_rng(seed), pk.op(op).bind(**given, **options)
    wired = wiring(call.spec)
    return {n: rng.standard_normal(call.outputs[n][0]).astype(np.float32) for n in wired.cotangents if n in call.wants}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("op", "sample"), SAMPLES)
def test_samples(op, sample, backend):
    """Within 64 units of roundoff of float32, of the largest gradient of an array: samples are of order 1."""
    case = testing.sample_case(op, sample, dtype="float32")
    spec = pk.op(op).spec
    given = {n: np.array(b.view()) for n, b in case.buffers(spec).items()}
    options, cotangents = dict(case.options), drawn_cotangents(op, given, dict(case.options))
    exact = exact_gradients(op, given, options, cotangents)
    got = torch_gradients(op, backend, given, options, cotangents)
    assert got.keys() and got.keys() <= exact.keys()
    for name, gradient in got.items():
        largest = max(np.abs(exact[name]).max(initial=0), 1.0)
        np.testing.assert_allclose(gradient, exact[name], rtol=0, atol=64 * 2.0**-24 * largest, err_msg=name)


@pytest.mark.parametrize("gradients", [torch_gradients, jax_gradients])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [0.0, 1e5, -1e8, 1e8])
def test_losses_of_logits_with_a_common_offset(offset, backend, gradients):
    """p is as exact as at 0: the logits are, and what rounding takes from lse is kept."""
    if gradients is jax_gradients and backend == "triton":
        pytest.skip("Triton takes JAX's arrays on a GPU alone")
    rng = np.random.default_rng(1)
    x = (8 * rng.integers(-1, 2, (6, 70)) + offset).astype(np.float32)
    given = {"logits": x, "labels": rng.integers(0, 70, 6).astype(np.int32)}
    cotangents = drawn_cotangents("cross_entropy", given, {})
    got = gradients("cross_entropy", backend, given, {}, cotangents)["logits"]
    exact = exact_gradients("cross_entropy", given, {}, cotangents)["logits"]
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(got.sum(-1), 0, atol=1e-6)  # the shares of a row add up to 1


@pytest.mark.parametrize("gradients", [torch_gradients, jax_gradients])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4, 1e6])
def test_weights_add_up_to_1_however_large_scores_are(scale, backend, gradients):
    """d_v of cotangents of 1 is what each key weighs: as many as there are queries in all. Scores are whole numbers, so
    that every kernel has the same."""
    if gradients is jax_gradients and backend == "triton":
        pytest.skip("Triton takes JAX's arrays on a GPU alone")
    rng = np.random.default_rng(2)
    q, k = (rng.integers(-3, 4, (1, n, 2, 16)).astype(np.float32) for n in (40, 70))
    given = {"q": q * np.float32(scale), "k": k, "v": rng.standard_normal((1, 70, 2, 16)).astype(np.float32)}
    options, cotangents = {"scale": 1.0}, {"o": np.ones((1, 40, 2, 16), np.float32)}
    got = gradients("attention", backend, given, options, cotangents)
    exact = exact_gradients("attention", given, options, cotangents)
    np.testing.assert_allclose(got["v"].sum(1), 40, rtol=1e-5)
    np.testing.assert_allclose(got["v"], exact["v"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradients", [torch_gradients, jax_gradients])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("low", [float(np.finfo(np.float32).min), -1e8, 1e8])
def test_rows_that_a_finite_mask_hides(low, backend, gradients):
    """A row whose every key has the same large bias weighs all keys alike, as float32 makes all its scores equal."""
    if gradients is jax_gradients and backend == "triton":
        pytest.skip("Triton takes JAX's arrays on a GPU alone")
    rng = np.random.default_rng(3)
    given = {n: rng.standard_normal((1, 33, 1, 16)).astype(np.float32) for n in ("q", "k", "v")}
    given["bias"] = np.zeros((1, 1, 33, 33), np.float32)
    given["bias"][:, :, 2] = low
    cotangents = {"o": np.zeros((1, 33, 1, 16), np.float32)}
    cotangents["o"][:, 2] = 1
    got = gradients("attention", backend, given, {}, cotangents)
    np.testing.assert_allclose(got["v"].sum(1), 1, rtol=1e-5)
    assert got["v"].max() <= 1 and np.isfinite(got["q"]).all()
