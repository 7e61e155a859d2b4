"""Attention over parts of the keys, merged, is attention over all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import portakern as pk


def draw(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("cuts", [(5,), (0,), (3, 9), (4, 4, 11)], ids=str)
def test_parts_of_the_keys_merge_to_all_of_them(backend, cuts):
    """Results of ``return_lse`` as they are, of any number of parts, of which some have no key."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    attention, merge = pk.op("attention", backend=backend), pk.op("merge_states", backend=backend)
    q, k, v = draw(2, 3, 4, 8, seed=0), draw(2, 12, 2, 8, seed=1), draw(2, 12, 2, 5, seed=2)
    whole = attention(q, k, v, return_lse=True)
    ends = (0, *cuts, k.shape[1])
    parts = [slice(*pair) for pair in itertools.pairwise(ends)]
    o, lse = attention(q, k[:, parts[0]], v[:, parts[0]], return_lse=True)
    for keys in parts[1:]:
        o, lse = merge(o, lse, *attention(q, k[:, keys], v[:, keys], return_lse=True))
    np.testing.assert_allclose(o, whole.o, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, whole.lse, rtol=1e-13, atol=1e-14)


def test_the_gradients_of_parts_are_those_of_the_whole():
    """With the whole's cotangents, through the merge and each part's own attention."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    attention, merge = pk.op("attention", backend="reference"), pk.op("merge_states", backend="reference")
    arrays = [
        torch.from_numpy(draw(*shape, seed=i)).requires_grad_()
        for i, shape in enumerate([(2, 3, 4, 8), (2, 12, 2, 8), (2, 12, 2, 5)])
    ]

    def in_parts(q, k, v):
        states = [attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in (slice(0, 7), slice(7, 12))]
        return merge(*states[0], *states[1])

    cotangents = [torch.from_numpy(draw(2, 3, 4, 5, seed=3)), torch.from_numpy(draw(2, 4, 3, seed=4))]
    found = torch.autograd.grad(in_parts(*arrays), arrays, cotangents)
    wanted = torch.autograd.grad(attention(*arrays, return_lse=True), arrays, cotangents)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
