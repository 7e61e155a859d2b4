"""A model in each of whose layers every op takes part as its record says, under torch.compile and under
jax.jit(jax.grad).

Each op call is within its bound, and end to end the error of an array is no more than twice that of the frameworks' own
ops in the same dtype, or where chance makes that small of theirs on all arrays; all of them against float64.
"""

import functools

import numpy as np
import pytest

import portakern as pk
from portakern import testing
from tests.ops import forward_records

WIDTH, LENGTH, BATCH = 32, 24, 2
RECORDS = [r for r in forward_records() if r.spec.vjp]


def parameters():
    """The parameters of each op in each layer, of a size that leaves that of the hidden state; and a hidden state."""
    rng = np.random.default_rng(7)
    layers = [
        {
            (r.op, name): rng.standard_normal(shape) / (1 if len(shape) == 1 else shape[-2] ** 0.5)
            for r in RECORDS
            for name, shape in r.layer.parameters(WIDTH).items()
        }
        for _ in range(2)
    ]
    return layers, rng.standard_normal((BATCH, LENGTH, WIDTH))


def model(ops, layers, x):
    """Every op in a row, each beside what it is given; halved, so that the hidden state and attention's scores stay
    near 1.
    """
    for p in layers:
        for r in RECORDS:
            own = {name: value for (op, name), value in p.items() if op == r.op}
            x = (x + r.layer.run(ops[r.op], x, own)) * 0.5
    return x


def within_bounds(served):
    names = set()
    for s in served:
        names.add(s.call.spec.name)
        outputs = [s.call.framework.to_numpy(o) for o in s.outputs if o is not None]
        testing.compare_call(s.call, outputs, s.tiling)
    assert names == {r.op for r in RECORDS} | {r.spec.vjp for r in RECORDS}


def errors(mine, theirs, exact):
    """RMS error of each array relative to the exact one, of portakern and of the framework."""

    def rms(x):
        return float(np.sqrt(np.mean(np.square(x))))

    ours, other = ([rms(x - e) / rms(e) for x, e in zip(some, exact, strict=True)] for some in (mine, theirs))
    assert all(a <= 2 * max(b, rms(other)) + 1e-7 for a, b in zip(ours, other, strict=True)), (ours, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_compile(dtype):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    mine, plain = {r.op: pk.op(r.op, backend="triton") for r in RECORDS}, {r.op: r.in_torch for r in RECORDS}
    layers, x = parameters()

    def run(ops, dtype, compile=False):
        tensors = [{n: torch.tensor(a, dtype=dtype, requires_grad=True) for n, a in p.items()} for p in layers]
        start = torch.tensor(x, dtype=dtype, requires_grad=True)
        net = lambda x, tensors: model(ops, tensors, x)  # noqa: E731
        out = (torch.compile(net, fullgraph=True, backend="aot_eager") if compile else net)(start, tensors)
        out.backward(torch.ones_like(out))
        return [a.detach().double().numpy() for a in (out, start.grad, *(t.grad for p in tensors for t in p.values()))]

    served = []
    with pk.observe(served.append):
        got = run(mine, getattr(torch, dtype), compile=True)
    within_bounds(served)
    rounded = [
        {n: np.asarray(torch.tensor(a, dtype=getattr(torch, dtype)).double()) for n, a in p.items()} for p in layers
    ]
    layers, x = rounded, np.asarray(torch.tensor(x, dtype=getattr(torch, dtype)).double())
    errors(got, run(plain, getattr(torch, dtype)), run(plain, torch.float64))


@functools.cache
def gradients_in_jax(ours):
    """Of portakern's ops, or of JAX's own: compiled once for each dtype, whoever asks."""
    import jax
    import jax.numpy as jnp

    ops = {r.op: pk.op(r.op, backend="pallas") if ours else r.in_jax for r in RECORDS}
    names = [list(p) for p in parameters()[0][:1]]

    def net(x, arrays):
        y = model(ops, [dict(zip(n, a, strict=True)) for n, a in zip(names, arrays, strict=True)], x)
        return jnp.sum(y.astype(jnp.promote_types(y.dtype, jnp.float32))), y

    return jax.jit(jax.grad(net, (0, 1), has_aux=True))


def test_jax_jit_of_grad(dtype="bfloat16"):
    """In one dtype and one layer, for which XLA compiles every kernel in one program."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    import jax.numpy as jnp

    layers, x = parameters()
    layers = layers[:1]

    def run(ours, dtype):
        given = [[jnp.asarray(a, dtype) for a in p.values()] for p in layers]
        grads, out = gradients_in_jax(ours)(jnp.asarray(x, dtype), given)
        return [np.asarray(a, np.float64) for a in (out, grads[0], *(g for p in grads[1] for g in p))]

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        served = []
        with pk.observe(served.append):
            got = run(True, dtype)
            jax.effects_barrier()
        within_bounds(served)
        theirs = run(False, dtype)
        layers = [{n: np.asarray(jnp.asarray(a, dtype), np.float64) for n, a in p.items()} for p in layers]
        x = np.asarray(jnp.asarray(x, dtype), np.float64)
        with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
            exact = run(False, "float64")
    errors(got, theirs, exact)
