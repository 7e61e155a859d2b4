"""torch.func over eager calls: vmap, per-sample gradients, Jacobians; forward mode and second orders refused."""

from __future__ import annotations

import functools
import logging

import pytest

import portakern as pk
from portakern.core import observe

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tests.ops import of_each_kind  # noqa: E402
from tests.ops._shared import results  # noqa: E402
from tests.test_torch import FORWARD, f64, fn, served  # noqa: E402


def loop(f, in_dims, arrays):
    n = next(a.shape[d] for a, d in zip(arrays, in_dims, strict=True) if d is not None)
    outs = [f(*(a if d is None else a.select(d, i) for a, d in zip(arrays, in_dims, strict=True))) for i in range(n)]
    return tuple(map(torch.stack, zip(*outs, strict=True))) if isinstance(outs[0], tuple) else torch.stack(outs)


MAPPED = [pytest.param(r, key, id=f"{r.op}: {key}") for r in FORWARD for key in r.mapped]


@pytest.mark.parametrize(("r", "key"), MAPPED)
def test_vmap_and_per_sample_gradients(r, key, caplog):
    mapped = r.mapped[key]
    given = {name: torch.from_numpy(x) for name, x in mapped.arrays(r.op, "float64").items()}
    arrays, in_dims = tuple(given.values()), tuple(mapped.in_dims.get(name) for name in given)
    observe._said.clear()
    caplog.set_level(logging.INFO, "portakern")
    call = pk.op(r.op, backend="reference")
    f = lambda *a: call(**dict(zip(given, a, strict=True)), **mapped.sample.options)  # noqa: E731
    seen = served(
        lambda: torch.testing.assert_close(
            torch.func.vmap(f, in_dims)(*arrays), loop(f, in_dims, arrays), rtol=1e-13, atol=1e-13
        )
    )
    n = next(a.shape[d] for a, d in zip(arrays, in_dims, strict=True) if d is not None)
    assert len(seen) == n + (1 if mapped.folds else n)
    assert ("runs sample by sample" in caplog.text) is not mapped.folds
    every = r.differentiable(mapped.sample)
    g = torch.func.grad(lambda *a: sum(y.pow(2).sum() for y in results(f(*a))), argnums=every)
    torch.testing.assert_close(torch.func.vmap(g, in_dims)(*arrays), loop(g, in_dims, arrays), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("r", "key"), [p for p in MAPPED if p.values[0] in of_each_kind()])
def test_maps_over_no_sample(r, key):
    mapped = r.mapped[key]
    given = {name: torch.from_numpy(x) for name, x in mapped.arrays(r.op, "float64").items()}
    in_dims = tuple(mapped.in_dims.get(name) for name in given)
    none = tuple(x if d is None else x.narrow(d, 0, 0) for x, d in zip(given.values(), in_dims, strict=True))
    every = r.differentiable(mapped.sample)
    for backend in ("reference", "triton"):
        call = pk.op(r.op, backend=backend)
        f = lambda *a: results(call(**dict(zip(given, a, strict=True)), **mapped.sample.options))  # noqa: B023, E731
        # 0 + x, with which sum() begins, is an error of PyTorch's for no sample
        total = lambda *a: functools.reduce(torch.add, [y.pow(2).sum() for y in f(*a)])  # noqa: B023, E731
        g = torch.func.grad(total, every)
        for transformed in (f, g):
            some = torch.func.vmap(transformed, in_dims)(*given.values())
            found = torch.func.vmap(transformed, in_dims)(*none)
            assert [(y.shape, y.dtype) for y in found] == [((0, *y.shape[1:]), y.dtype) for y in some]
    compiled = torch.compile(torch.func.vmap(f, in_dims), backend="aot_eager")(*none)
    assert all(y.shape[0] == 0 for y in compiled)


def test_a_loop_over_samples_is_said_once(caplog):
    observe._said.clear()
    caplog.set_level(logging.INFO, "portakern")
    g = torch.func.vmap(torch.func.grad(lambda w, x: pk.op("layernorm", backend="reference")(x, w).sum()), (None, 0))
    for _ in range(2):
        g(f64(4, grad=False), f64(2, 3, 4, grad=False))
    said = [r for r in caplog.records if "torch.vmap over" in r.message]
    assert (
        len(said) == 1 and said[0].levelno == logging.INFO and "layernorm_vjp runs sample by sample" in said[0].message
    )


def test_maps_nest_and_jacobians_follow():
    x = f64(2, 3, 4, grad=False)
    softmax = pk.op("softmax", backend="triton")
    torch.testing.assert_close(torch.func.vmap(torch.func.vmap(softmax))(x), torch.softmax(x, -1))
    torch.testing.assert_close(
        torch.func.jacrev(softmax)(x[0]), torch.func.jacrev(lambda x: torch.softmax(x, -1))(x[0])
    )
    _, pullback = torch.func.vjp(softmax, x)
    torch.testing.assert_close(pullback(x)[0], torch.func.vjp(lambda x: torch.softmax(x, -1), x)[1](x)[0])
    leaf = x[0].detach().requires_grad_()
    batched = torch.autograd.grad(
        softmax(leaf), leaf, torch.eye(12, dtype=torch.float64).view(12, 3, 4), is_grads_batched=True
    )[0]
    torch.testing.assert_close(batched.view(3, 4, 3, 4), torch.func.jacrev(softmax)(leaf.detach()))


@pytest.mark.parametrize(
    "what",
    [
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.jvp(torch.func.grad(lambda x: f(x).sum()), (x,), (x,)),
    ],
)
def test_forward_mode_is_refused(what):
    with pytest.raises(
        pk.UnsupportedError,
        match=r"softmax: forward-mode derivatives \(jvp, jacfwd, hessian\) are not given; use reverse mode",
    ):
        what(pk.op("softmax", backend="reference"), f64(3, grad=False))


def test_dual_tensors_are_refused_too():
    import torch.autograd.forward_ad as forward

    x = f64(3, grad=False)
    with forward.dual_level():
        for context in (torch.no_grad(), torch.enable_grad()):
            with context, pytest.raises(pk.UnsupportedError, match="softmax: forward-mode"):
                pk.op("softmax", backend="reference")(forward.make_dual(x, x))
        pk.op("softmax", backend="reference")(x)


def test_orders_beyond_the_first_are_refused_under_torch_func():
    f = pk.op("softmax", backend="reference")
    with pytest.raises(pk.UnsupportedError, match="softmax: second-order gradients"):
        torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).pow(2).sum())(x).pow(2).sum())(f64(3, grad=False))


def test_functional_call():
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))

        def forward(self, x):
            return pk.op("layernorm", backend="reference")(x, self.weight)

    weight = f64(5, grad=False)
    loss = lambda w, x: torch.func.functional_call(Norm(), {"weight": w}, (x,)).pow(2).sum()  # noqa: E731
    want = torch.func.grad(lambda w, x: fn.layer_norm(x, (5,), w).pow(2).sum())
    x = f64(4, 5, grad=False)
    torch.testing.assert_close(torch.func.grad(loss)(weight, x), want(weight, x))
