"""What kv_append promises beside its spec's laws: a cache that is written over is not copied, no slot reaches memory
beyond it, tables give the bits of rope, and 8 bits are what attention reads."""

from __future__ import annotations

import numpy as np
import pytest

import portakern as pk
from portakern.spec.dtypes import DTYPES
from portakern.specs.paged_attention import NARROW

OVER = ("k_pages", "v_pages")


def in_torch(slots):
    """Three tokens, and caches of two pages of two places, each in the middle of memory that holds 7."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    whole = [torch.full((8, 2, 2, d), 7.0) for d in (4, 3)]
    pages = [x[3:5] for x in whole]
    new = [torch.arange(3 * 2 * d, dtype=torch.float32).reshape(3, 2, d) for d in (4, 3)]
    return whole, (*new, *pages, torch.tensor(slots))


def rows_written(whole, before, new):
    """Which rows of memory hold something else than 7, as numbers counted from the cache's first slot; each must be
    that of the token which is there."""
    rows = whole.reshape(-1, *new.shape[1:])
    changed = [int(i) for i in (rows != 7).flatten(1).any(1).nonzero()]
    return {i - before: next(t for t in range(len(new)) if (rows[i] == new[t]).all()) for i in changed}


def test_a_cache_that_is_written_over_is_not_copied():
    from portakern.backends.triton.capture import Capture, capturing

    whole, arrays = in_torch([3, -1, 0])
    run = pk.op("kv_append", backend="triton")
    seen = Capture()
    with capturing(seen):
        found = run(*arrays, overwrite=OVER)
    assert [launch.kernel.__name__ for launch in seen.launches] == ["kv_append_kernel"] and not seen.made
    assert found[0] is arrays[2] and found[1] is arrays[3]
    for x, new in zip(whole, arrays[:2], strict=True):
        assert rows_written(x, 6, new) == {3: 0, 0: 2}


@pytest.mark.parametrize("slots", [[4, 1, -1], [2**40, 1, -(2**40)], [10**6, 1, -6]], ids=str)
def test_slots_beyond_the_cache_are_written_nowhere(slots):
    """No kernel may learn them before: the oracle alone refuses such a call."""
    whole, arrays = in_torch(slots)
    pk.op("kv_append", backend="triton")(*arrays, overwrite=OVER)
    for x, new in zip(whole, arrays[:2], strict=True):
        assert rows_written(x, 6, new) == {1: 1}
    with pytest.raises(pk.SpecError, match="slots must be below pages"):
        pk.op("kv_append", backend="reference")(*arrays)


@pytest.mark.parametrize("slots", [[4, 1, -1], [10**6, 1, 5], [9, 4, -3]], ids=str)
def test_slots_beyond_the_cache_are_written_nowhere_on_tpus(slots):
    pytest.importorskip("jax", reason="jax is not installed")
    import jax.numpy as jnp

    new = [jnp.arange(3 * 2 * d, dtype=jnp.float32).reshape(3, 2, d) for d in (4, 3)]
    pages = [jnp.full((2, 2, 2, d), 7.0) for d in (4, 3)]
    found = pk.op("kv_append", backend="pallas")(*new, *pages, jnp.asarray(slots))
    for out, rows in zip(found, new, strict=True):
        want = np.full((4, *rows.shape[1:]), 7.0, np.float32)
        for t, slot in enumerate(slots):
            if 0 <= slot < 4:
                want[slot] = rows[t]
        np.testing.assert_array_equal(np.asarray(out).reshape(want.shape), want)


# ------------------------------------------------------------------------------------------------ tables, and 8 bits
def turning(seed, tokens=7, heads=3, d=20, pairs=8):
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal((tokens, heads, n)).astype(np.float32) for n in (d, 6))
    pages = [rng.standard_normal((4, 3, heads, n)).astype(np.float32) for n in (d, 6)]
    angle = rng.uniform(-np.pi, np.pi, (tokens, pairs))
    slots = rng.permutation(12)[:tokens].astype(np.int32)
    return k, v, pages, np.where(slots == slots[2], -1, slots), np.cos(angle, dtype=np.float32), np.sin(angle)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("backend", "library"), [("triton", "torch"), ("pallas", "jax.numpy"), ("reference", "torch")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tables_give_the_bits_of_rope_before(backend, library, dtype, interleaved):
    """The kernel turns by the expressions of rope's, and both round once, to the dtype of k."""
    xp = pytest.importorskip(library, reason=f"{library} is not installed")
    if backend != "reference":
        pytest.importorskip({"triton": "triton", "pallas": "jax"}[backend])
    made = xp.tensor if library == "torch" else xp.asarray
    k, v, pages, slots, cos, sin = turning(3)
    k, v, *pages = (made(x).to(xp.__dict__[dtype]) if library == "torch" else made(x, dtype) for x in (k, v, *pages))
    slots, cos, sin = (made(x) for x in (slots, cos, sin.astype(np.float32)))
    append, rope = pk.op("kv_append", backend=backend), pk.op("rope", backend=backend)
    before = rope(k[None], cos[None], sin[None], interleaved=interleaved)[0]
    for a, b in zip(append(before, v, *pages, slots),
                    append(k, v, *pages, slots, cos, sin, interleaved=interleaved), strict=True):  # fmt: skip
        assert a.dtype == b.dtype and bool((a == b).all())


@pytest.mark.parametrize("pages", NARROW)
def test_a_cache_of_8_bits_is_written_over_and_is_what_attention_reads(pages):
    """Of what comes back no number is further from k than half a spacing of its code."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    rng, dtype = np.random.default_rng(5), getattr(torch, pages)
    k, v = (torch.tensor(rng.standard_normal((6, 2, 16)), dtype=torch.float32) for _ in range(2))
    cache = [torch.full((3, 4, 2, 16), 0.5).to(dtype) for _ in range(2)]
    slots = torch.tensor([3, 0, 1, 2, 4, 5])
    scales = [torch.tensor(x, dtype=torch.float32) for x in ([0.02, 0.007], [0.011, 0.03])]
    found = pk.op("kv_append", backend="triton")(k, v, *cache, slots, None, None, *scales, overwrite=OVER)
    assert all(a is b for a, b in zip(found, cache, strict=True))
    for new, pages_of, scale in zip((k, v), cache, scales, strict=True):
        back = pages_of.float().reshape(-1, 2, 16)[slots] * scale[:, None]
        assert ((back - new).abs() <= new.abs() * DTYPES[pages].U + scale[:, None] * DTYPES[pages].least).all()
        assert (pages_of.float().reshape(-1, 2, 16)[6:] == 0.5).all()
    q, lens, starts = k[:1].clone(), torch.tensor([6], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    wide = [x.float() * s[:, None] for x, s in zip(cache, scales, strict=True)]
    attention = pk.op("paged_attention", backend="reference")
    narrow = attention(q, *cache, table, lens, starts, None, *scales)
    torch.testing.assert_close(narrow, attention(q, *wide, table, lens, starts), rtol=1e-5, atol=1e-6)


def test_what_is_beyond_the_codes_saturates():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for pages, most in (("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)):
        k = torch.tensor([[[1e30, -1e30, torch.inf, -torch.inf, torch.nan, 0.9 * most]]])
        cache = torch.zeros(1, 1, 1, 6).to(getattr(torch, pages))
        for backend in ("reference", "triton"):
            out, _ = pk.op("kv_append", backend=backend)(k, k, cache, cache, torch.tensor([0]))
            assert out.flatten()[:4].tolist() == [most, -most, most, -most] and out.flatten()[4].isnan()
