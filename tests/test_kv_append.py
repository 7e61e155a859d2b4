"""What kv_append promises beside its spec's laws: a cache that is written over is not copied, and no slot reaches
memory beyond it."""

from __future__ import annotations

import numpy as np
import pytest

import portakern as pk

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
