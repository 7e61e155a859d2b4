"""portakern.jax.ragged_paged_attention against JAX's own reference of it, and gradients of packed sequences against
jax.nn's attention of each."""

import inspect
import itertools

import numpy as np
import pytest

import portakern as pk

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

import portakern.jax as twin  # noqa: E402

theirs = pytest.importorskip(
    "jax.experimental.pallas.ops.tpu.ragged_paged_attention", reason="this jax has no ragged_paged_attention"
)

COUNTS, LENS = [1, 3, 0, 5], [7, 3, 4, 11]  # queries and keys of each sequence
BACKENDS = [None, "pallas"]
OPTIONS = [
    {},
    {"sm_scale": 0.3},
    {"sliding_window": 1},
    {"sliding_window": 4, "sm_scale": 0.5},
    {"soft_cap": 2.0},
    {"soft_cap": 1.0, "sliding_window": 3, "mask_value": None},
]


def drawn(heads=4, kv_heads=2, d=8, size=4, dtype=jnp.float32):
    """q, kv_pages, kv_lens, page_indices, cu_q_lens and num_seqs: all sequences, and no room for more."""
    rng = np.random.default_rng(0)
    each, pages = 3, 14
    q = jnp.asarray(rng.standard_normal((sum(COUNTS), heads, d)), dtype)
    kv = jnp.asarray(rng.standard_normal((pages, size, 2 * kv_heads, d)), dtype)
    table = jnp.asarray(rng.permutation(pages)[: len(LENS) * each].reshape(-1, each), jnp.int32)
    integers = jnp.asarray(LENS, jnp.int32), table, jnp.asarray(np.cumsum([0, *COUNTS]), jnp.int32)
    return q, kv, *integers, jnp.asarray([len(LENS)], jnp.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_each_option_is_jaxs(options, backend):
    arrays = drawn()
    got = twin.ragged_paged_attention(*arrays, **options, implementation=backend)
    want = theirs.ref_ragged_paged_attention(*arrays, **options)
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_allclose(got, want, atol=3e-6, rtol=1e-5)


def test_the_default_scale_is_1_as_jaxs():
    q, kv, *integers = drawn()
    wide = pk.op("paged_attention")(q, kv[:, :, ::2], kv[:, :, 1::2], integers[1], integers[0], integers[2], scale=1.0)
    assert jnp.array_equal(twin.ragged_paged_attention(q, kv, *integers), wide)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_lies_behind_the_last_sequence_is_not_read(backend):
    q, kv, lens, table, starts, _ = drawn()
    want = twin.ragged_paged_attention(q, kv, lens, table, starts, jnp.asarray([4]), implementation=backend)
    tail = jnp.full((3, *q.shape[1:]), jnp.nan, q.dtype)

    def attend(number):
        return twin.ragged_paged_attention(
            jnp.concatenate([q, tail]), kv, jnp.concatenate([lens, jnp.asarray([99, -7], jnp.int32)]),
            jnp.concatenate([table, jnp.full((2, table.shape[1]), 10**6, jnp.int32)]),
            jnp.concatenate([starts, jnp.asarray([-3, 10**6], jnp.int32)]), number, implementation=backend,
        )  # fmt: skip

    for f in (attend, jax.jit(attend)):
        got = f(jnp.asarray([4], jnp.int32))
        assert jnp.array_equal(got[: len(q)], want) and not got[len(q) :].any()
    fewer = jax.jit(attend)(jnp.asarray([2], jnp.int32))  # how many there are is data
    assert jnp.array_equal(fewer[:4], want[:4]) and not fewer[4:].any()


def test_bfloat16_under_jit_and_hints_that_change_nothing():
    arrays = drawn(dtype=jnp.bfloat16)
    want = twin.ragged_paged_attention(*arrays, implementation="pallas")
    hints = {"num_kv_pages_per_block": 2, "num_queries_per_block": 8, "vmem_limit_bytes": 1 << 20}
    attend = jax.jit(lambda *a: twin.ragged_paged_attention(*a, **hints, mask_value=-np.inf, implementation="pallas"))
    got = attend(*arrays)
    assert got.dtype == jnp.bfloat16 and jnp.array_equal(got, want)


def test_the_signature_is_that_of_jax():
    mine, given = (
        inspect.signature(f).parameters for f in (twin.ragged_paged_attention, theirs.ragged_paged_attention)
    )
    assert [*mine] == [*given, "implementation"]
    assert {n: (p.kind, p.default) for n, p in given.items()} == {
        n: (p.kind, p.default) for n, p in mine.items() if n in given
    }


def call(**changed):
    names = "q", "kv_pages", "kv_lens", "page_indices", "cu_q_lens", "num_seqs"
    return twin.ragged_paged_attention(**dict(zip(names, drawn(), strict=True)) | changed)


Q, KV, LENGTHS, TABLE, STARTS, NUMBER = drawn()
REFUSED = {
    "k_scale is 0.5; expected None: a scale of 8-bit pages is not passed on; call .*a scale for each key head": {
        "k_scale": 0.5
    },
    "v_scale is 2.0; expected None": {"v_scale": 2.0},
    "mask_value is -1.0; expected .*JAX's default, -inf or None": {"mask_value": -1.0},
    "sliding_window is 0; expected None or a number of keys, 1 or more": {"sliding_window": 0},
    "soft_cap is -2.0; expected None or a number above 0": {"soft_cap": -2.0},
    r"q has shape \(9, 32\); expected \(tokens, heads, d\)": {"q": Q.reshape(9, 32)},
    r"kv_lens has shape \(4, 1\); expected \(sequences,\)": {"kv_lens": LENGTHS[:, None]},
    r"page_indices has shape \(12,\); expected \(sequences, pages_each\)": {"page_indices": TABLE.ravel()},
    "kv_lens is float32; expected int32 or int64": {"kv_lens": LENGTHS.astype(jnp.float32)},
    "kv_pages has 3 heads and q 4; expected keys and values in turns": {"kv_pages": KV[:, :, :3]},
    "kv_pages has heads of 4 elements and q of 8": {"kv_pages": KV[..., :4]},
    "kv_pages is bfloat16 and q float32; expected one dtype": {"kv_pages": KV.astype(jnp.bfloat16)},
    r"kv_lens has shape \(3,\); expected \(4,\)": {"kv_lens": LENGTHS[:3]},
    r"cu_q_lens has shape \(4,\); expected \(5,\)": {"cu_q_lens": STARTS[:4]},
    r"num_seqs has shape \(\); expected \(1,\)": {"num_seqs": NUMBER[0]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_by_the_arguments_name(message):
    with pytest.raises((pk.SpecError, pk.UnsupportedError), match=f"^ragged_paged_attention: {message}"):
        call(**REFUSED[message])


def test_a_gradient_is_refused():
    q, *others = drawn()
    with pytest.raises(pk.UnsupportedError, match="paged_attention has no gradient"):
        jax.grad(lambda q: twin.ragged_paged_attention(q, *others).sum())(q)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_packed_sequences_are_those_of_each_by_jax(backend):
    """JAX has no function for packed sequences: the op itself, under jax.jit and jax.grad."""
    rng = np.random.default_rng(0)
    lens, d = [3, 5, 1], 8
    q, k, v = (jnp.asarray(rng.standard_normal((sum(lens), h, d)), jnp.float32) for h in (4, 2, 2))
    starts, ends = jnp.asarray(np.cumsum([0, *lens]), jnp.int32), np.cumsum([0, *lens])
    attention = pk.op("varlen_attention", backend=backend)

    def mine(q, k, v, starts):
        return jnp.sin(attention(q, k, v, starts, starts, is_causal=True)).sum()

    def each(q, k, v):
        rows = [slice(a, b) for a, b in itertools.pairwise(ends)]
        return sum(
            jnp.sin(jax.nn.dot_product_attention(q[r][None], k[r][None], v[r][None], is_causal=True)).sum()
            for r in rows
        )

    got = jax.jit(jax.value_and_grad(mine, (0, 1, 2)))(q, k, v, starts)
    want = jax.value_and_grad(each, (0, 1, 2))(q, k, v)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)
