"""The twin of ``jax.nn.dot_product_attention`` where flax's layers take an ``attention_fn``: what they pass on means
nothing here, or is refused by name.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import portakern as pk

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

import portakern.jax as twin  # noqa: E402

RNG = np.random.default_rng(8)

# What flax 0.12's layers pass by keyword beside the mask; linen's leave out what the function's signature lacks.
NNX = ("dropout_rng", "dropout_rate", "broadcast_dropout", "deterministic", "dtype", "precision", "module", "is_causal")
LINEN = (
    *NNX[:-2],
    *("module", "force_fp32_for_softmax", "qk_attn_weights_einsum", "attn_weights_value_einsum", "einsum_dot_general"),
)


pytestmark = pytest.mark.usefixtures("jax_on_the_host")


def qkv(dtype=jnp.float32):
    return [jnp.asarray(RNG.standard_normal((2, 5, 4, 8)), dtype) for _ in range(3)]


def test_every_keyword_of_a_layer_is_in_the_signature():
    """linen looks there: a keyword that it lacks, such as a dropout rate, would be dropped in silence."""
    assert {*NNX, *LINEN, "promote_dtype", "mask", "bias"} <= set(
        inspect.signature(twin.dot_product_attention).parameters
    )


def test_what_means_nothing_is_taken():
    arrays, mask = qkv(), jnp.asarray(RNG.random((2, 1, 5, 5)) < 0.7).at[..., 0].set(True)
    plain = twin.dot_product_attention(*arrays, mask=mask)
    layer = {
        "dropout_rng": jax.random.key(0),
        "dropout_rate": 0.5,
        "broadcast_dropout": True,
        "deterministic": True,
        "dtype": jnp.float32,
        "precision": jax.lax.Precision.HIGHEST,
        "module": None,
        "force_fp32_for_softmax": False,
    }
    np.testing.assert_array_equal(twin.dot_product_attention(*arrays, mask=mask, **layer), plain)
    layer |= {"dropout_rate": 0.0, "deterministic": False, "precision": ("high", None)}
    np.testing.assert_array_equal(twin.dot_product_attention(*arrays, mask=mask, **layer), plain)
    numbers = mask.astype(jnp.float32)  # as flax's make_causal_mask and combine_masks give them
    np.testing.assert_array_equal(twin.dot_product_attention(*arrays, mask=numbers, **layer), plain)
    with pytest.raises(pk.SpecError, match="mask is float32; expected bool"):
        twin.dot_product_attention(*arrays, mask=numbers)


def test_a_dtype_is_cast_to():
    arrays = qkv()
    want = twin.dot_product_attention(*(a.astype(jnp.bfloat16) for a in arrays))
    for options in ({}, {"promote_dtype": lambda given, dtype: tuple(a.astype(dtype) for a in given)}):
        got = twin.dot_product_attention(*arrays, dtype=jnp.bfloat16, **options)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, want)


MEANT = {
    "dropout_rate": (
        {"dropout_rate": 0.1, "dropout_rng": None},
        "dropout_rate is 0.1; attention here drops no weights",
    ),
    "module": ({"module": object()}, "module is <object.*pass sow_weights=False"),
    "precision": ({"precision": "F16_F16_F16"}, "precision is 'F16_F16_F16'; sums are as exact as float32"),
    "a product": (
        {"qk_attn_weights_einsum": jnp.einsum},
        "qk_attn_weights_einsum is .*; the products are the kernel's",
    ),
    "another": ({"attn_weights_value_einsum": jnp.einsum}, "attn_weights_value_einsum is "),
    "a third": ({"einsum_dot_general": jax.lax.dot_general}, "einsum_dot_general is "),
}


@pytest.mark.parametrize("name", MEANT)
def test_what_would_mean_something_is_refused_by_name(name):
    given, words = MEANT[name]
    with pytest.raises(pk.SpecError, match=f"dot_product_attention: {words}"):
        twin.dot_product_attention(*qkv(), **given)


@pytest.mark.parametrize("causal", [False, True])
def test_layers_of_flax_agree(causal):
    flax = pytest.importorskip("flax", reason="flax is not installed")
    from flax import linen, nnx

    x = jnp.asarray(RNG.standard_normal((2, 6, 16)), jnp.float32)
    mask = linen.make_causal_mask(x[..., 0]) if causal else None

    def nnx_layer(**options):
        layer = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0), dropout_rate=0.3, **options)
        return lambda x: layer(x, mask=mask, deterministic=True)

    def linen_layer(**options):
        layer = linen.MultiHeadDotProductAttention(2, dropout_rate=0.3, **options)
        weights = layer.init(jax.random.key(0), x, deterministic=True)
        return lambda x: layer.apply(weights, x, mask=mask, deterministic=True)

    for made in (nnx_layer, linen_layer):
        mine, theirs = made(attention_fn=twin.dot_product_attention), made()
        np.testing.assert_allclose(mine(x), theirs(x), atol=2e-6)
        np.testing.assert_allclose(*(jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (mine, theirs)), atol=2e-5)
    assert flax
    layer = linen.MultiHeadDotProductAttention(2, dropout_rate=0.3, attention_fn=twin.dot_product_attention)
    with pytest.raises(pk.SpecError, match="dropout_rate is 0.3"):
        layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x, deterministic=False)


def projections(library):
    """Of a library's layers, those that take a ``dot_general``: a function of it and x each, with the same weights."""
    flax = pytest.importorskip("flax", reason="flax is not installed")
    from flax import linen, nnx

    assert flax
    if library == "nnx":
        made = {
            "Linear": lambda f: nnx.Linear(8, 6, dot_general=f, rngs=nnx.Rngs(0)),
            "LinearGeneral": lambda f: nnx.LinearGeneral(
                (4, 8), (2, 3), axis=(-2, -1), batch_axis={0: 3}, dot_general=f, rngs=nnx.Rngs(0)
            ),
            "MultiHeadAttention": lambda f: nnx.MultiHeadAttention(
                2, 8, decode=False, qkv_dot_general=f, out_dot_general=f, rngs=nnx.Rngs(0)
            ),
        }
        return {name: lambda f, x, layer=layer: layer(f)(x) for name, layer in made.items()}
    made = {
        "Dense": lambda f: linen.Dense(6, dot_general=f),
        "DenseGeneral": lambda f: linen.DenseGeneral((2, 3), axis=(-2, -1), batch_dims=(0,), dot_general=f),
        "MultiHeadDotProductAttention": lambda f: linen.MultiHeadDotProductAttention(
            2, qkv_dot_general=f, out_dot_general=f
        ),
    }

    def applied(layer):
        weights = layer(jax.lax.dot_general).init(jax.random.key(0), jnp.ones((3, 4, 8)))
        return lambda f, x: layer(f).apply(weights, x)

    return {name: applied(layer) for name, layer in made.items()}


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_projections_of_flax_agree(library):
    x = jnp.asarray(RNG.standard_normal((3, 4, 8)), jnp.float32)
    for name, layer in projections(library).items():
        found = []
        for f in (twin.dot_general, jax.lax.dot_general):
            step = jax.jit(jax.value_and_grad(lambda x, f=f, layer=layer: jnp.sin(layer(f, x)).sum()))
            found.append([layer(f, x), *step(x)])
        for ours, theirs in zip(*found, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=name)


def test_attention_of_equinox_agrees():
    """Its layer takes no function: one that inherits from it calls the twin between the layer's projections."""
    equinox = pytest.importorskip("equinox", reason="equinox is not installed")

    class Served(equinox.nn.MultiheadAttention):
        def __call__(self, query, key_, value, mask=None, **options):
            q, k, v = (
                jax.vmap(project)(x).reshape(x.shape[0], self.num_heads, -1)
                for project, x in ((self.query_proj, query), (self.key_proj, key_), (self.value_proj, value))
            )
            mask = None if mask is None else jnp.broadcast_to(mask, (1, *mask.shape[-2:]))
            out = twin.dot_product_attention(q, k, v, mask=mask)
            return jax.vmap(self.output_proj)(out.reshape(out.shape[0], -1))

    x = jnp.asarray(RNG.standard_normal((3, 6, 8)), jnp.float32)
    for mask in (None, jnp.tril(jnp.ones((6, 6), bool))):
        found = []
        for kind in (Served, equinox.nn.MultiheadAttention):
            layer = kind(2, 8, key=jax.random.key(0))

            def loss(layer, x, mask=mask):
                return jnp.sin(jax.vmap(lambda x: layer(x, x, x, mask))(x)).sum()

            found.append([loss(layer, x), *jax.tree.leaves(equinox.filter_grad(loss)(layer, x)), jax.grad(
                lambda x, layer=layer, loss=loss: loss(layer, x)
            )(x)])  # fmt: skip
        for ours, theirs in zip(*found, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_the_loss_of_optax_agrees():
    optax = pytest.importorskip("optax", reason="optax is not installed")
    logits = jnp.asarray(RNG.standard_normal((5, 7)), jnp.float32)
    labels = jnp.asarray(RNG.integers(0, 7, 5), jnp.int32)
    cross_entropy = pk.op("cross_entropy", backend="reference")
    found = [
        jax.value_and_grad(lambda x, f=f: jnp.sin(f(x, labels)).sum())(logits)
        for f in (cross_entropy, optax.softmax_cross_entropy_with_integer_labels)
    ]
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def layernorms_of(library):
    """A library's own LayerNorm and one that differs in the op alone: a function of scale, bias and x each."""
    norm = pk.op("layernorm", backend="reference")
    if library == "equinox":
        equinox = pytest.importorskip("equinox", reason="equinox is not installed")

        class Served(equinox.nn.LayerNorm):
            def __call__(self, x, state=None, *, key=None):
                return norm(x, self.weight, self.bias, eps=self.eps)

        def made(kind):
            layer = kind(8, eps=1e-5)
            return lambda w, b, x: jax.vmap(equinox.tree_at(lambda of: (of.weight, of.bias), layer, (w, b)))(x)

        return made(Served), made(equinox.nn.LayerNorm)
    pytest.importorskip("flax", reason="flax is not installed")
    from flax import linen, nnx

    if library == "nnx":

        class Module(nnx.LayerNorm):
            def __call__(self, x, mask=None):
                return norm(x, self.scale[...], self.bias[...], eps=self.epsilon)

        def applied(kind):
            def call(w, b, x):
                layer = kind(8, epsilon=1e-5, rngs=nnx.Rngs(0))
                layer.scale[...], layer.bias[...] = w, b
                return layer(x)

            return call

        return applied(Module), applied(nnx.LayerNorm)

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x):
            scale, bias = (
                self.param("scale", linen.initializers.ones, (8,)),
                self.param("bias", linen.initializers.zeros, (8,)),
            )
            return norm(x, scale, bias, eps=1e-5)

    return tuple(
        lambda w, b, x, layer=layer: layer.apply({"params": {"scale": w, "bias": b}}, x)
        for layer in (Layer(), linen.LayerNorm(epsilon=1e-5))
    )


def norms_of(library):
    """A library's own RMSNorm and one that differs in the op alone: a function of weight and x each."""
    norm = pk.op("rmsnorm", backend="reference")
    if library == "equinox":
        equinox = pytest.importorskip("equinox", reason="equinox is not installed")

        class Served(equinox.nn.RMSNorm):
            def __call__(self, x, state=None, *, key=None):
                return norm(x, self.weight, eps=self.eps)

        def made(kind):
            layer = kind(8, eps=1e-5, use_bias=False)
            return lambda w, x: jax.vmap(equinox.tree_at(lambda layer: layer.weight, layer, w))(x)

        return made(Served), made(equinox.nn.RMSNorm)
    pytest.importorskip("flax", reason="flax is not installed")
    from flax import linen, nnx

    if library == "nnx":

        class Module(nnx.RMSNorm):
            def __call__(self, x, mask=None):
                return norm(x, self.scale[...], eps=self.epsilon)

        def layer(kind):
            graph, state = nnx.split(kind(8, epsilon=1e-5, rngs=nnx.Rngs(0)))
            return lambda w, x: nnx.merge(graph, jax.tree.map(lambda _: w, state))(x)

        return layer(Module), layer(nnx.RMSNorm)

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x):
            return norm(x, self.param("scale", linen.initializers.ones, (8,)), eps=1e-5)

    return tuple(
        lambda w, x, layer=layer: layer.apply({"params": {"scale": w}}, x)
        for layer in (Layer(), linen.RMSNorm(epsilon=1e-5))
    )


@pytest.mark.parametrize("library", ["equinox", "nnx", "linen"])
@pytest.mark.parametrize("norms", [norms_of, layernorms_of])
def test_norms_of_jax_libraries_agree(norms, library):
    weights = ((8,),) * (1 if norms is norms_of else 2)
    arrays = [jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in (*weights, (3, 8))]
    found = []
    for f in norms(library):
        step = jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), tuple(range(len(arrays)))))
        found.append([f(*arrays), *jax.tree.leaves(step(*arrays))])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
