"""portakern.jax against the functions of JAX's own that it stands in for."""

import inspect

import numpy as np
import pytest

import portakern as pk

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

import portakern.jax as twin  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_host():
    """Arrays live on the CPU, also on a machine with a GPU, which Pallas does not serve yet."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


RNG = np.random.default_rng(3)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def qkv(t, s, heads=4, kv_heads=2):
    return normal(2, t, heads, 8), normal(2, s, kv_heads, 8), normal(2, s, kv_heads, 8)


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (3, 2)},
    "one number": {"local_window_size": 2},
    "causal window": {"local_window_size": (2, 4), "is_causal": True},
    "no window": {"local_window_size": (0, 0)},
    "lengths": {"query_seq_lengths": jnp.array([3, 5]), "key_value_seq_lengths": jnp.array([4, 0])},
    "key lengths": {"key_value_seq_lengths": jnp.array([2, 5]), "is_causal": True},
}


@pytest.mark.parametrize("t, s", [(7, 7), (5, 11), (11, 5)])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_gradients_and_residuals_are_those_of_jax(name, t, s):
    arrays, options = qkv(t, s), OPTIONS[name]

    def both(f):
        out, lse = f(*arrays, **options, return_residual=True)
        grads = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a, **options))), (0, 1, 2))(*arrays)
        return f(*arrays, **options), out, lse, grads

    for got, want in zip(
        jax.tree.leaves(both(twin.dot_product_attention)),
        jax.tree.leaves(jax.jit(lambda: both(jax.nn.dot_product_attention))()),  # one program, not one an operation
        strict=True,
    ):
        np.testing.assert_allclose(got, want, atol=3e-6, rtol=2e-6)


@pytest.mark.parametrize("shape", [(2, 4, 6, 9), (1, 4, 1, 9), (2, 1, 6, 1), (1, 1, 1, 9)])
def test_masks_and_biases_broadcast(shape):
    q, k, v = qkv(6, 9)
    mask = jnp.asarray(RNG.random(shape) < 0.6).at[..., :1, :].set(False)
    bias = normal(*shape)
    for given in ({"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias}):
        got, want = (f(q, k, v, **given) for f in (twin.dot_product_attention, jax.nn.dot_product_attention))
        np.testing.assert_allclose(got, want, atol=2e-6)
    grads = [
        jax.grad(lambda b, f=f: jnp.sum(f(q, k, v, b, mask) ** 2))(bias)
        for f in (twin.dot_product_attention, jax.nn.dot_product_attention)
    ]
    np.testing.assert_allclose(*grads, atol=1e-5)


def test_three_axes_bfloat16_jit_and_a_named_backend():
    q, k, v = (a[0].astype(jnp.bfloat16) for a in qkv(5, 5))
    got = jax.jit(lambda q, k, v: twin.dot_product_attention(q, k, v, is_causal=True, implementation="pallas"))(q, k, v)
    assert got.dtype == jnp.bfloat16 and got.shape == q.shape
    np.testing.assert_allclose(
        got.astype(jnp.float32), jax.nn.dot_product_attention(q, k, v, is_causal=True).astype(jnp.float32), atol=2e-2
    )


def test_the_signature_is_that_of_jax():
    mine, theirs = (inspect.signature(f).parameters for f in (twin.dot_product_attention, jax.nn.dot_product_attention))
    assert {n: (p.kind, p.default) for n, p in mine.items() if n in theirs} == {
        n: (p.kind, p.default) for n, p in theirs.items()
    }
    assert [*mine][: len(theirs)] == [*theirs]  # what follows is what flax's layers pass on


def test_bad_masks_are_named():
    q, k, v = qkv(5, 5)
    with pytest.raises(pk.SpecError, match="mask is float32; expected bool"):
        twin.dot_product_attention(q, k, v, mask=normal(1, 1, 5, 5))
    with pytest.raises(pk.SpecError, match=r"bias has shape \(5, 5\); expected 4 axes"):
        twin.dot_product_attention(q, k, v, normal(5, 5))
    with pytest.raises(pk.SpecError, match="backend 'cudnn' is unknown"):
        twin.dot_product_attention(q, k, v, implementation="cudnn")
