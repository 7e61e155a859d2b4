"""portakern.jax against the functions of JAX's own that it stands in for."""

import inspect

import numpy as np
import pytest

import portakern as pk

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

import portakern.jax as twin  # noqa: E402

pytestmark = pytest.mark.usefixtures("jax_on_the_host")


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


@pytest.mark.parametrize("t, s", [(5, 11), (11, 5)])
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


PRODUCTS = {  # shapes of lhs and rhs, and what is contracted and shared
    "a row": ((5,), (5, 3), (((0,), (0,)), ((), ()))),
    "matrices": ((4, 5), (5, 3), (((1,), (0,)), ((), ()))),
    "a layer": ((2, 4, 5), (5, 3), (((2,), (0,)), ((), ()))),
    "several axes": ((2, 4, 3, 5), (3, 5, 2, 6), (((2, 3), (0, 1)), ((), ()))),
    "in another order": ((5, 2, 3), (3, 4, 5), (((2, 0), (0, 2)), ((), ()))),
    "a batch": ((2, 4, 5), (3, 2, 5), (((2,), (2,)), ((0,), (1,)))),
    "batches": ((2, 3, 4, 5), (3, 5, 2), (((3,), (1,)), ((1, 0), (0, 2)))),
    "nothing contracted": ((2, 3), (4,), (((), ()), ((), ()))),
    "nothing left": ((5,), (5,), (((0,), (0,)), ((), ()))),
    "no element": ((4, 0), (0, 3), (((1,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_dot_general(name):
    left, right, numbers = PRODUCTS[name]
    lhs, rhs = normal(*left), normal(*right)
    mine, theirs = (jax.jit(lambda *ab, f=f: f(*ab, numbers)) for f in (twin.dot_general, jax.lax.dot_general))
    want = theirs(lhs, rhs)
    got = mine(lhs, rhs)
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_allclose(got, want, atol=1e-5)
    grads = [jax.grad(lambda *ab, f=f: jnp.sin(f(*ab)).sum(), (0, 1))(lhs, rhs) for f in (mine, theirs)]
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_dot_general_takes_dtypes_and_precisions():
    lhs, rhs, numbers = normal(4, 5, dtype=jnp.bfloat16), normal(5, 3, dtype=jnp.bfloat16), (((1,), (0,)), ((), ()))
    assert twin.dot_general(lhs, rhs, numbers).dtype == jnp.bfloat16
    wide = twin.dot_general(lhs, rhs, numbers, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(wide, lhs.astype(jnp.float32) @ rhs.astype(jnp.float32), atol=1e-5)
    floats = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    for precision in ("highest", jax.lax.Precision.DEFAULT, (None, "high"), "TF32_TF32_F32"):
        got = twin.dot_general(*floats, numbers, precision=precision)
        np.testing.assert_allclose(got, wide, atol=1e-2)


WRONG_PRODUCTS = {
    "extents": ((((0,), (0,)), ((), ())), {}, r"contracted axes of lhs, \(0,\), have extents \(4,\).*\(5,\)"),
    "an axis": ((((2,), (0,)), ((), ())), {}, r"contracted axes are \(2,\); expected .* of 2 axes"),
    "from the end": ((((-1,), (0,)), ((), ())), {}, r"axes are \(-1,\); expected different ones, from 0 up"),
    "twice": ((((1, 1), (0, 0)), ((), ())), {}, r"axes are \(1, 1\); expected different"),
    "precision": ((((1,), (0,)), ((), ())), {"precision": "F16_F16_F16"}, "precision is 'F16_F16_F16'; sums are"),
    "sharding": ((((1,), (0,)), ((), ())), {"out_sharding": "x"}, "out_sharding is 'x'; shard the call"),
}


@pytest.mark.parametrize("name", WRONG_PRODUCTS)
def test_a_wrong_dot_general_is_refused_by_name(name):
    numbers, options, words = WRONG_PRODUCTS[name]
    with pytest.raises(pk.SpecError, match=f"dot_general: .*{words}"):
        twin.dot_general(normal(4, 5), normal(5, 3), numbers, **options)
