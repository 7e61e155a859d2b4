"""portakern.jax.scaled_matmul against the formula of JAX's own, which runs on GPUs alone."""

import inspect

import numpy as np
import pytest

import portakern as pk

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

import portakern.jax as twin  # noqa: E402

if not hasattr(jax.nn, "scaled_matmul"):
    pytest.skip("this jax has no scaled_matmul", allow_module_level=True)

B, M, N, K = 2, 5, 7, 96
E4M3, E5M2, E8M0 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu


def drawn(parts=3, dtypes=(E4M3, E5M2), scales=jnp.float32, batch=B):
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.standard_normal((batch, r, K)), d) for r, d in zip((M, N), dtypes, strict=True))
    of = (jnp.asarray(2.0 ** rng.integers(-3, 4, (batch, r, parts)), jnp.float32).astype(scales) for r in (M, N))
    return lhs, rhs, *of


def formula(lhs, rhs, of_a, of_b):
    """As jax.nn says it, in float64."""
    a, b = (np.asarray(x, np.float64) * np.repeat(np.asarray(s, np.float64), K // s.shape[2], 2)
            for x, s in ((lhs, of_a), (rhs, of_b)))  # fmt: skip
    return np.einsum("bmk,bnk->bmn", a, b)


@pytest.mark.parametrize("backend", [None, "pallas"])
@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E5M2)])
@pytest.mark.parametrize("scales", [jnp.float32, E8M0])
@pytest.mark.parametrize("parts", [1, 3])
def test_it_is_what_jax_says(parts, scales, dtypes, backend):
    arrays = drawn(parts, dtypes, scales)
    found = twin.scaled_matmul(*arrays, implementation=backend)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, formula(*arrays), rtol=1e-5, atol=1e-4)


def test_under_jit_and_in_16_bits():
    arrays = drawn()
    run = jax.jit(lambda *a: twin.scaled_matmul(*a, jnp.bfloat16, precision="promoted", implementation="pallas"))
    found = run(*arrays)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), formula(*arrays), rtol=1e-2, atol=1e-1)


def test_it_has_jaxs_arguments():
    own, theirs = (inspect.signature(f).parameters for f in (twin.scaled_matmul, jax.nn.scaled_matmul))
    assert [*own] == [*theirs, "precision", "implementation"]
    assert own["preferred_element_type"].default == theirs["preferred_element_type"].default


def test_wrong_calls_are_refused_in_words():
    lhs, rhs, of_a, of_b = drawn()
    for wrong, why in (
        ((lhs[0], rhs, of_a, of_b), "lhs has shape .*; expected 3 axes"),
        ((lhs, rhs[:1], of_a, of_b), r"rhs has shape .*; expected \(2, 7, 96\)"),
        ((lhs, rhs, of_a, of_b[..., :1]), r"rhs_scales has shape .*; expected \(2, 7, 3\)"),
        ((lhs[..., :95], rhs[..., :95], of_a, of_b), "3 scales along K, which is 95"),
        ((lhs[:0], rhs[:0], of_a[:0], of_b[:0]), "expected an entry or more"),
        ((lhs, rhs.astype(jnp.int8), of_a, of_b), "a is lhs, b is rhs transposed"),
    ):
        with pytest.raises(pk.SpecError, match=why):
            twin.scaled_matmul(*wrong)
