"""Functions of PyTorch and JAX that people write as kernels are right: whatever the checker says of them is no bound and
no typical error. Where they lead NaN and infinities, and whose bits they keep, is another matter."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import portakern as pk
from portakern.core.oracle import as_float64, oracle
from portakern.spec.tolerance import compare
from portakern.specs import geglu

torch = pytest.importorskip("torch", reason="torch is not installed")
F = torch.nn.functional
without_onednn = pytest.mark.filterwarnings("ignore:Please use the new API")


def library(onednn):
    return contextlib.nullcontext() if onednn else torch.backends.mkldnn.flags(enabled=False)


def wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def geglu_of(onednn):
    def geglu(gate, up, *, approximate="none"):
        with library(onednn):
            return (F.gelu(wide(gate), approximate=approximate) * wide(up)).to(gate.dtype).contiguous()

    return geglu


def geglu_vjp_of(onednn):
    def geglu_vjp(gate, up, d_y, *, approximate="none"):
        with library(onednn), torch.enable_grad():
            g = wide(gate).detach().clone().requires_grad_()
            gelu = F.gelu(g, approximate=approximate)
            (d_gate,) = torch.autograd.grad(gelu, g, wide(d_y) * wide(up))
        return tuple(d.to(gate.dtype).contiguous() for d in (d_gate, wide(d_y) * gelu.detach()))

    return geglu_vjp


TORCH = {"geglu": geglu_of, "geglu_vjp": geglu_vjp_of}


@pytest.mark.parametrize("onednn", [True, False], ids=["oneDNN", "vectors"])
@pytest.mark.parametrize("op", TORCH)
@without_onednn
def test_gelu_of_pytorch_is_right(op, onednn):
    for seed in range(3):
        fn = TORCH[op](onednn)
        how = {"edges": False, "promises": False, "shrink": False, "dtypes": ["float32"]}
        report = pk.check(op, fn=fn, framework="torch", max_examples=100, seed=seed, **how)
        assert report.passed, report.failures


def gelus():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    for onednn in (True, False):
        yield (
            f"PyTorch, oneDNN {onednn}",
            lambda g, onednn=onednn: geglu_of(onednn)(torch.tensor(g), torch.ones(len(g))),
        )
    yield "erf of PyTorch", lambda g: 0.5 * torch.tensor(g) * (1 + torch.erf(torch.tensor(g) * 0.5**0.5))
    yield "JAX", lambda g: jax.nn.gelu(jax.device_put(g, jax.devices("cpu")[0]), approximate=False)
    yield "erf of JAX", lambda g: 0.5 * g * (1 + np.asarray(jax.lax.erf(g * np.float32(0.5**0.5))))


@without_onednn
def test_erf_of_every_library_is_within_what_the_bound_of_gelu_has_for_it(monkeypatch):
    """Half of it would not do."""
    g = np.concatenate([np.linspace(-8, 8, 200_001), np.geomspace(1e-6, 1, 4000)]).astype(np.float32)
    call = pk.op("geglu").bind(g, np.ones_like(g))
    (ref,) = oracle(call)

    def shares():
        (bound,) = call.spec.bound(as_float64(call), (ref,))
        return {name: compare(np.asarray(gelu(g)), ref, bound, "float32").worst for name, gelu in gelus()}

    assert max(shares().values()) < 1, shares()
    monkeypatch.setattr(geglu, "ERF", geglu.ERF / 2)
    assert max(shares().values()) > 1, shares()
