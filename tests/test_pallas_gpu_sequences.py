"""Sequences of any lengths on Hopper, in Pallas's interpreter where a race is an error: what lies behind a sequence's
last key, and beside its pages, reaches nothing; pages of any size compile."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")
from portakern.core import registry

PALLAS = registry.backend("pallas")
FAMILY = next(f for f in PALLAS.declared if f.name == "gpu")
if FAMILY.missing_packages():
    pytest.skip(f"the kernels for Hopper need {FAMILY.missing_packages()}", allow_module_level=True)

import jax.numpy as jnp  # noqa: E402

import portakern as pk  # noqa: E402
from portakern import testing  # noqa: E402
from portakern.backends.pallas.gpu.toolchain import compiler  # noqa: E402
from portakern.core import targets  # noqa: E402
from tests.ops.paged_attention import in_pages  # noqa: E402

SMALL = {"block_q": 64, "block_kv": 64, "stages": 2}
has_compiler = pytest.mark.skipif(
    compiler.unavailable(targets.find("sm_90")) is not None, reason=str(compiler.unavailable(targets.find("sm_90")))
)


def on_gpu(op):
    return pk.op(op, backend="pallas", variant="gpu", tiling=SMALL)


def normal(*shape):
    return np.random.default_rng(shape[0]).standard_normal(shape).astype(np.float32)


def pages_of(size, d=16):
    """Two sequences, of 70 and of 3 keys; every slot that holds none is NaN."""
    dense = [(normal(1, n, 2, d), normal(1, m, 1, d), normal(1, m, 1, d)) for n, m in ((2, 70), (3, 3))]
    q, k, v, *integers = in_pages(np.random.default_rng(0), *dense, size=size)
    arrays = [jnp.asarray(np.where(x == 9, np.nan, x), jnp.bfloat16) for x in (q, k, v)]
    return [*arrays, *map(jnp.asarray, integers)]


def within(op, arrays, **options):
    """What an op gives, which is within its bounds."""
    run = on_gpu(op)
    with PALLAS.profile("races"):
        found = run(*arrays, **options)
    call = run.bind(*arrays, **options)
    given = [np.asarray(x) for x in (found if isinstance(found, tuple) else (found,))]
    assert max(testing.compare_call(call, given).values()) <= 1
    return given


@pytest.mark.parametrize("size", [5, 16, 100])
def test_pages_of_any_size_beside_nan(size):
    """Several pages a tile, some rows of which no page fills; and several tiles a page, the last one shorter."""
    (o,) = within("paged_attention", pages_of(size))
    assert np.isfinite(o.astype(np.float32)).all()


def test_a_neighbours_nan_stays_there():
    """The last tile of keys of a sequence holds the first ones of the next."""
    starts = [jnp.asarray(x, jnp.int32) for x in ((0, 4, 9), (0, 70, 80))]
    q, k, v = normal(9, 2, 16), normal(80, 1, 16), normal(80, 1, 16)
    plain = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    (whole,) = within("varlen_attention", [*plain, *starts], is_causal=True)
    beside = [plain[0].at[4:].set(jnp.nan), *(x.at[70:].set(jnp.nan) for x in plain[1:])]
    with PALLAS.profile("races"):
        found = np.asarray(on_gpu("varlen_attention")(*beside, *starts, is_causal=True), np.float32)
    assert (found[:4] == whole[:4].astype(np.float32)).all() and np.isnan(found[4:]).all()


@has_compiler
@pytest.mark.parametrize(("size", "d"), [(1, 16), (5, 40), (16, 256), (100, 128)])
def test_pages_of_any_size_compile(size, d, monkeypatch, tmp_path):
    """A copy begins at any row of a swizzled buffer, and rows of narrow parts are too few bytes for some."""
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    built = pk.op("paged_attention", backend="pallas", variant="gpu").lower(*pages_of(size, d), target="sm_90")
    assert built.ok, built.reason
    assert all(kernel.spills <= 16 for kernel in built.kernels), built  # in the producer, which has 40 registers
