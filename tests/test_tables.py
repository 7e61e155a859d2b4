"""Rows of tables: the twins of PyTorch's embedding and of JAX's take, and the order in which a gradient is summed."""

import numpy as np
import pytest

import portakern as pk
from tests.ops.embedding import simulate_vjp

BACKENDS = ["reference", "triton", "pallas"]
ROWS, D = 7, 5
IDS = [[2, 0, 6], [2, 5, 2]]


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def jax():
    return pytest.importorskip("jax", reason="jax is not installed")


def needs(backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")


# ------------------------------------------------------------------------------------------------- the order of the sum
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_a_gradient_is_summed_by_chunks_of_32_tokens_in_order_whatever_the_tiles(torch, block_tokens):
    """4400 tokens are three levels of runs of 16 x 16; the simulated kernel adds as the page says, in float32."""
    needs("triton")
    rng = np.random.default_rng(0)
    tokens, rows = 4400, 60
    ids = np.where(rng.random(tokens) < 0.3, 17, rng.integers(-2, rows + 2, tokens))
    d_y, weight = rng.standard_normal((tokens, 2)).astype(np.float32), np.zeros((rows, 2), np.float32)
    op = pk.op("embedding_vjp", backend="triton", tiling={"block_tokens": block_tokens, "block_n": 128, "num_warps": 4})
    found = op(*map(torch.from_numpy, (weight, ids, d_y)), padding_index=3)
    (want,) = simulate_vjp(weight, ids, d_y, 3)
    assert (found[0] if isinstance(found, tuple) else found).numpy().tobytes() == want.tobytes()


def test_pallas_adds_one_token_after_the_other(jax):
    rng = np.random.default_rng(1)
    ids, d_y = rng.integers(0, 9, 300).astype(np.int32), rng.standard_normal((300, 3)).astype(np.float32)
    weight, jnp = np.zeros((9, 3), np.float32), jax.numpy
    found = pk.op("embedding_vjp", backend="pallas")(*map(jnp.asarray, (weight, ids, d_y)))
    (want,) = simulate_vjp(weight, ids, d_y, chunk=1000)
    assert np.asarray(found[0] if isinstance(found, tuple) else found).tobytes() == want.tobytes()


# -------------------------------------------------------------------------------------------------------------- PyTorch
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("padding", [None, 2, -1])
def test_embedding_is_pytorchs_and_so_is_its_gradient(torch, backend, padding):
    import portakern.torch as twin

    needs(backend)
    found = []
    for function in (lambda *a, **how: twin.embedding(*a, backend=backend, **how), torch.nn.functional.embedding):
        torch.manual_seed(0)
        weight = torch.randn(ROWS, D, requires_grad=True)
        y = function(torch.tensor(IDS), weight, padding)
        y.sin().sum().backward()
        found.append((y.detach(), weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])


def test_what_is_no_row_is_nan(torch):
    import portakern.torch as twin

    y = twin.embedding(torch.tensor([-1, 0, ROWS]), torch.ones(ROWS, D))
    assert y.isnan().all(1).tolist() == [True, False, True]


def test_embedding_refuses_in_its_own_words(torch):
    import portakern.torch as twin

    weight, ids = torch.ones(ROWS, D), torch.tensor(IDS)
    for how, error, words in (
        ({"max_norm": 1.0}, pk.UnsupportedError, "max_norm is 1.0; expected None: call torch.nn.functional.embedding"),
        ({"scale_grad_by_freq": True}, pk.UnsupportedError, "scale_grad_by_freq is True; expected False"),
        ({"sparse": True}, pk.UnsupportedError, "sparse is True; expected False"),
        ({"padding_idx": ROWS}, pk.SpecError, f"padding_idx is {ROWS}; expected a row of weight, from -7 to 6"),
    ):
        with pytest.raises(error, match=words):
            twin.embedding(ids, weight, **how)
    with pytest.raises(pk.SpecError, match="ids is float32.*ids is input"):
        twin.embedding(weight, weight)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_tied_table_has_both_gradients(torch, backend):
    """The head's and the embedding's, which autograd adds."""
    import portakern.torch as twin

    needs(backend)
    grads = []
    for function in (lambda ids, w: twin.embedding(ids, w, backend=backend), torch.nn.functional.embedding):
        torch.manual_seed(0)
        weight = torch.randn(ROWS, D, requires_grad=True)
        hidden = function(torch.tensor(IDS), weight)
        (hidden @ weight.T).logsumexp(-1).sum().backward()
        grads.append(weight.grad)
    torch.testing.assert_close(*grads)


def test_tables_that_are_changed_by_a_call_stay_pytorchs(torch):
    import portakern.torch as twin

    model = torch.nn.ModuleList([torch.nn.Embedding(ROWS, D), torch.nn.Embedding(ROWS, D, max_norm=1.0)])
    with twin.apply(model, backend="reference", parts=["embeddings"]) as applied:
        rows = {(row.part, row.op): row for row in applied.rows}
        assert rows["embeddings", "embedding"].number == 1
        assert rows["embeddings", None].by == "a table with max_norm"
        assert torch.equal(model[0](torch.tensor(IDS)), model[0].weight[torch.tensor(IDS)])


# ------------------------------------------------------------------------------------------------------------------ JAX
@pytest.mark.parametrize("backend", ["reference", "pallas"])
@pytest.mark.parametrize("mode", [None, "fill", "clip", "wrap"])
def test_take_is_jaxs_and_so_is_its_gradient(jax, backend, mode):
    import portakern.jax as twin

    jnp = jax.numpy
    table = jax.random.normal(jax.random.key(0), (ROWS, D))
    ids = jnp.array([[-1, 0, 2], [2, -ROWS, ROWS - 1], [-ROWS - 1, ROWS, 3 * ROWS + 2]], jnp.int32)
    found = []
    for take in (lambda a, i: twin.take(a, i, mode=mode, implementation=backend),
                 lambda a, i: jnp.take(a, i, axis=0, mode=mode)):  # fmt: skip
        y = take(table, ids)
        found.append((y, jax.grad(lambda a, take=take: jnp.nansum(jnp.sin(take(a, ids))))(table)))
    assert jnp.array_equal(found[0][0], found[1][0], equal_nan=True)
    assert jnp.allclose(found[0][1], found[1][1], atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_take_has_indices_of_any_width(jax, dtype):
    import portakern.jax as twin

    table = jax.random.normal(jax.random.key(0), (200, 2))
    ids = jax.numpy.array([0, 100, 3], dtype)
    assert jax.numpy.array_equal(jax.jit(twin.take)(table, ids), table[ids.astype("int32")])


def test_take_refuses_in_its_own_words(jax):
    import portakern.jax as twin

    table, ids = jax.numpy.ones((ROWS, D)), jax.numpy.zeros(3, "int32")
    for arrays, how, error, words in (
        ((table, ids), {"axis": 1}, pk.UnsupportedError, "take: axis is 1; expected 0: call jax.numpy.take"),
        ((table, ids), {"fill_value": 0.0}, pk.UnsupportedError, "take: fill_value is 0.0; expected None"),
        ((table, ids), {"mode": "raise"}, pk.SpecError, "take: mode is 'raise'; expected None, 'fill'"),
        ((table, table), {}, pk.SpecError, "take: indices are float32; expected integers"),
        ((table, ids.astype("uint32")), {}, pk.SpecError, "take: indices are uint32; expected integers that int32"),
        ((table[0], ids), {}, pk.SpecError, r"take: a has shape \(5,\); expected \(rows, d\), a table"),
    ):
        with pytest.raises(error, match=words):
            twin.take(*arrays, **how)
