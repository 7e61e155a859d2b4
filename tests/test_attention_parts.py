"""Attention of parts of a sequence, each of which knows where it stands: what parts of the queries give are rows of the
whole, and what parts of the keys give adds up to it.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import portakern as pk
from portakern.core.oracle import as_float64, oracle
from tests.ops._shared import draw

MASKS = [{"is_causal": True}, {"window": (20, 0)}, {"window": (None, 5)}, {"window": (9, 30)}]
Q_LEN, KV_LEN, CUTS = 70, 90, (0, 33, 40, 90)
Q_START = KV_LEN - Q_LEN


def framework(backend):
    """What makes arrays of NumPy's, and NumPy's of those."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
        torch = pytest.importorskip("torch", reason="torch is not installed")
        return torch.from_numpy
    if backend == "pallas":
        return pytest.importorskip("jax.numpy", reason="jax is not installed").asarray
    return np.asarray


def qkv(dtype="float32"):
    rng = np.random.default_rng(0)
    return [draw(rng, s, dtype) for s in ((1, Q_LEN, 2, 24), (1, KV_LEN, 1, 24), (1, KV_LEN, 1, 16))]


def shares(name, found, *arrays, **options):
    """The largest share of its bound that each of these results of the whole call errs by."""
    call = pk.op(name, backend="reference").bind(*arrays, **options)
    ref = oracle(call)
    bounds = call.spec.bound(as_float64(call), ref)
    return [
        float(np.max(np.abs(np.asarray(x, np.float64) - want) / bound))
        for x, want, bound in zip(found, ref, bounds, strict=False)
        if x is not None
    ]


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("backend", ["reference", "triton", "pallas"])
def test_parts_of_the_keys_merge_to_all_of_them(backend, options):
    """In the order of the sequence and against it, within the bound of the whole call."""
    to = framework(backend)
    attention, merge = pk.op("attention", backend=backend), pk.op("merge_states", backend=backend)
    q, k, v = qkv()
    keys = [slice(*pair) for pair in itertools.pairwise(CUTS)]
    for parts in (keys, keys[::-1]):
        states = []
        for part in parts:
            arrays = (to(np.ascontiguousarray(x)) for x in (q, k[:, part], v[:, part]))
            states.append(attention(*arrays, return_lse=True, q_start=Q_START, kv_start=part.start, **options))
        o, lse = states[0]
        for state in states[1:]:
            o, lse = merge(o, lse, *state)
        assert max(shares("attention", (o, lse), q, k, v, return_lse=True, **options)) <= 1


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("backend", ["reference", "triton", "pallas"])
def test_gradients_of_parts_of_the_keys_add_up(backend, options):
    """Given o and lse of the whole: d_q is the parts' sum, and d_k and d_v lie side by side."""
    to, vjp = framework(backend), pk.op("attention_vjp", backend=backend)
    q, k, v = qkv()
    o, lse = pk.op("attention", backend="reference")(q, k, v, return_lse=True, **options)
    d_o = draw(np.random.default_rng(1), o.shape, "float32")
    parts = []
    for part in (slice(*pair) for pair in itertools.pairwise(CUTS)):
        arrays = (to(np.ascontiguousarray(x)) for x in (q, k[:, part], v[:, part], o, lse, d_o))
        parts.append([np.asarray(x) for x in vjp(*arrays, q_start=Q_START, kv_start=part.start, **options)[:3]])
    d_q, d_k, d_v = zip(*parts, strict=True)
    found = sum(d_q), np.concatenate(d_k, 1), np.concatenate(d_v, 1)
    assert max(shares("attention_vjp", found, q, k, v, o, lse, d_o, **options)) <= 1


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("backend", ["reference", "triton", "pallas"])
def test_gradients_of_parts_of_the_queries_add_up(backend, options):
    """d_q of a part is the whole's, to the bit; d_k and d_v are the parts' sums."""
    to, vjp = framework(backend), pk.op("attention_vjp", backend=backend)
    q, k, v = qkv()
    o, lse = pk.op("attention", backend="reference")(q, k, v, return_lse=True, **options)
    d_o = draw(np.random.default_rng(1), o.shape, "float32")
    whole = np.asarray(vjp(*map(to, (q, k, v, o, lse, d_o)), **options)[0])
    sums = 0.0, 0.0
    for first, last in ((0, 17), (17, 60), (60, Q_LEN)):
        here = slice(first, last)
        arrays = q[:, here], k, v, o[:, here], lse[..., here], d_o[:, here]
        found = vjp(*(to(np.ascontiguousarray(x)) for x in arrays), q_start=Q_START + first, **options)
        np.testing.assert_array_equal(np.asarray(found[0]), whole[:, here])
        sums = tuple(a + np.asarray(b) for a, b in zip(sums, found[1:3], strict=True))
    assert max(shares("attention_vjp", (None, *sums), q, k, v, o, lse, d_o, **options)) <= 1


def wide_parts(backend, to, arrays, options):
    """(d_q, d_k, d_v) of parts of the keys as float32, added up and side by side, from o and lse of the whole."""
    vjp, (q, k, v, o, lse, d_o) = pk.op("attention_vjp", backend=backend), arrays
    parts = []
    for part in (slice(*pair) for pair in itertools.pairwise(CUTS)):
        given = (to(np.ascontiguousarray(x)) for x in (q, k[:, part], v[:, part], o, lse, d_o))
        found = vjp(*given, q_start=Q_START, kv_start=part.start, gradient_dtype="float32", **options)[:3]
        parts.append([np.asarray(x) for x in found])
    d_q, d_k, d_v = zip(*parts, strict=True)
    return sum(d_q), np.concatenate(d_k, 1), np.concatenate(d_v, 1)


@pytest.mark.parametrize("backend", ["reference", "triton", "pallas"])
def test_parts_of_16_bits_add_up_in_float32(backend):
    """Stored in 16 bits, parts would be rounded before they are added."""
    to = framework(backend)
    if backend == "triton":
        torch = pytest.importorskip("torch")

        def to(x):
            return torch.from_numpy(x.astype(np.float32)).bfloat16() if x.dtype != np.float32 else torch.from_numpy(x)

    attention, merge = pk.op("attention", backend=backend), pk.op("merge_states", backend=backend)
    q, k, v = qkv("bfloat16")
    options = {"is_causal": True}
    states = []
    for part in (slice(*pair) for pair in itertools.pairwise(CUTS)):
        arrays = (to(np.ascontiguousarray(x)) for x in (q, k[:, part], v[:, part]))
        place = {"q_start": Q_START, "kv_start": part.start, "out_dtype": "float32"}
        states.append(attention(*arrays, return_lse=True, **place, **options))
    o, lse = states[0]
    for state in states[1:]:
        o, lse = merge(o, lse, *state)
    assert np.asarray(o).dtype == np.float32
    assert max(shares("attention", (o, lse), q, k, v, return_lse=True, out_dtype="float32", **options)) <= 1
    o, lse = pk.op("attention", backend="reference")(q, k, v, return_lse=True, **options)
    given = q, k, v, o, lse, draw(np.random.default_rng(1), o.shape, "bfloat16")
    found = wide_parts(backend, to, given, options)
    assert all(x.dtype == np.float32 for x in found)
    assert max(shares("attention_vjp", found, *given, gradient_dtype="float32", **options)) <= 1


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_gradients_of_a_wide_result_have_the_inputs_dtype(backend):
    """Autograd hands a cotangent of float32 to inputs of 16 bits."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays = [torch.from_numpy(x).bfloat16().requires_grad_() for x in qkv()]
    o = pk.op("attention", backend=backend)(*arrays, is_causal=True, out_dtype=torch.float32)
    assert o.dtype == torch.float32
    found = torch.autograd.grad(o.sin().sum(), arrays)
    narrow = pk.op("attention", backend=backend)(*arrays, is_causal=True)
    wanted = torch.autograd.grad(narrow.float().sin().sum(), arrays)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


def test_a_start_is_a_number_of_the_kernel_and_not_compiled_in():
    """As windows are: Triton compiles for what divides it, and not for each value."""
    pytest.importorskip("triton", reason="triton is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    q = torch.zeros(1, 256, 1, 64, dtype=torch.bfloat16)
    attention = pk.op("attention", backend="triton")
    built = [attention.lower(q, q, q, target="sm_80", is_causal=True, q_start=n) for n in (163, 165, -37)]
    assert all(b.ok for b in built) and len({b.assembly for b in built}) == 1


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_starts_pass_through_torch_compile(backend):
    """As numbers of a graph that one compilation serves, and with gradients."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    attention = pk.op("attention", backend=backend)
    arrays = [torch.from_numpy(x).requires_grad_() for x in qkv()]

    def part(q, k, v, q_start, kv_start):
        return attention(q, k, v, is_causal=True, q_start=q_start, kv_start=kv_start).sum()

    graphs = []

    def keep(module, inputs):
        graphs.append(module)
        return module.forward

    run = torch.compile(part, backend=keep, fullgraph=True, dynamic=True)
    for start in (20, 37, 58):
        got, want = (torch.autograd.grad(f(*arrays, start, 3), arrays) for f in (run, part))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    assert len(graphs) == 1


@pytest.mark.usefixtures("jax_on_the_host")
def test_starts_pass_through_jit():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    attention = pk.op("attention", backend="pallas")
    arrays = [jax.numpy.asarray(x) for x in qkv()]

    def part(q, k, v):
        return attention(q, k, v, is_causal=True, q_start=40, kv_start=3)

    np.testing.assert_array_equal(jax.jit(part)(*arrays), part(*arrays))
    assert all(map(np.any, jax.jit(jax.grad(lambda *a: part(*a).sum(), (0, 1, 2)))(*arrays)))
