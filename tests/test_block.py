"""A two-layer transformer on portakern ops under torch.compile and under jax.jit(jax.grad): each op call within its bound, and end to end no more than twice the
error of the frameworks' own ops in the same dtype, both against float64."""

import functools

import numpy as np
import pytest

import portakern as pk
from portakern import testing

HEADS, WIDTH, LENGTH, BATCH = 2, 32, 24, 2
SHAPES = {
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, 2 * WIDTH),
    "down": (2 * WIDTH, WIDTH),
    "norm1": (WIDTH,),
    "norm2": (WIDTH,),
}
OPS = ("matmul", "softmax", "layernorm", "attention")


def parameters():
    rng = np.random.default_rng(7)
    layers = [
        {n: rng.standard_normal(s) / (1 if len(s) == 1 else s[0] ** 0.5) for n, s in SHAPES.items()} for _ in range(2)
    ]
    return layers, rng.standard_normal((BATCH, LENGTH, WIDTH))


def block(ops, p, x):
    """Attention and a gated perceptron, each behind a layernorm; the gate is a softmax, so that all four ops take part."""
    matmul, softmax, layernorm, attention = ops
    q, k, v = (
        a.reshape(*a.shape[:2], HEADS, -1)
        for a in (matmul(layernorm(x, p["norm1"]), p["qkv"][:, i * WIDTH : (i + 1) * WIDTH]) for i in range(3))
    )
    x = x + matmul(attention(q, k, v).reshape(x.shape), p["out"])
    h = matmul(layernorm(x, p["norm2"]), p["up"])
    return x + matmul(h * softmax(h), p["down"])


def within_bounds(served):
    names = set()
    for s in served:
        names.add(s.call.spec.name)
        outputs = [s.call.framework.to_numpy(o) for o in s.outputs if o is not None]
        testing.compare_call(s.call, outputs, s.tiling)
    assert names == {*OPS, *(f"{o}_vjp" for o in OPS)}


def errors(mine, theirs, exact):
    """RMS error of each array relative to the exact one, of portakern and of the framework."""
    for a, b, e in zip(mine, theirs, exact, strict=True):
        size = np.sqrt(np.mean(np.square(e)))
        ours, other = (float(np.sqrt(np.mean(np.square(x - e))) / size) for x in (a, b))
        assert ours <= 2 * other + 1e-7, (ours, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_compile(dtype):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import torch.nn.functional as F

    def plain_attention(q, k, v):
        return F.scaled_dot_product_attention(*(a.transpose(1, 2) for a in (q, k, v)), is_causal=True).transpose(1, 2)

    attention = pk.op("attention", backend="triton")
    mine = (*(pk.op(o, backend="triton") for o in OPS[:3]), lambda q, k, v: attention(q, k, v, is_causal=True))
    plain = (torch.matmul, lambda x: torch.softmax(x, -1), lambda x, w: F.layer_norm(x, w.shape, w), plain_attention)
    layers, x = parameters()

    def run(ops, dtype, compile=False):
        tensors = [{n: torch.tensor(a, dtype=dtype, requires_grad=True) for n, a in p.items()} for p in layers]
        start = torch.tensor(x, dtype=dtype, requires_grad=True)

        def net(x, tensors):
            for p in tensors:
                x = block(ops, p, x)
            return x

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_jit_of_grad(dtype):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    import jax.numpy as jnp

    def plain_attention(q, k, v):
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        s = jnp.where(jnp.tril(jnp.ones(s.shape[2:], bool)), s, -jnp.inf)
        return jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(s.astype(jnp.promote_types(s.dtype, jnp.float32))).astype(q.dtype), v
        )

    def plain_layernorm(x, w):
        x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return ((x32 - x32.mean(-1, keepdims=True)) * jax.lax.rsqrt(x32.var(-1, keepdims=True) + 1e-5)).astype(
            x.dtype
        ) * w

    attention = functools.partial(pk.op("attention", backend="pallas"), is_causal=True)
    mine = (*(pk.op(o, backend="pallas") for o in OPS[:3]), attention)
    plain = (jnp.matmul, jax.nn.softmax, plain_layernorm, plain_attention)
    layers, x = parameters()

    def run(ops, dtype):
        def net(x, arrays):
            for p in arrays:
                x = block(ops, p, x)
            return jnp.sum(x.astype(jnp.promote_types(x.dtype, jnp.float32))), x

        given = [
            {n: jnp.asarray(a, jnp.bfloat16 if "bf" in str(dtype) else dtype) for n, a in p.items()} for p in layers
        ]
        grads, out = jax.jit(jax.grad(net, (0, 1), has_aux=True))(jnp.asarray(x, dtype), given)
        return [np.asarray(a, np.float64) for a in (out, grads[0], *(p[n] for p in grads[1] for n in SHAPES))]

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        served = []
        with pk.observe(served.append):
            got = run(mine, dtype)
            jax.effects_barrier()
        within_bounds(served)
        theirs = run(plain, dtype)
        layers = [{n: np.asarray(jnp.asarray(a, dtype), np.float64) for n, a in p.items()} for p in layers]
        x = np.asarray(jnp.asarray(x, dtype), np.float64)
        with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
            exact = run(plain, "float64")
    errors(got, theirs, exact)
