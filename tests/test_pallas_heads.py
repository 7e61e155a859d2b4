"""Heads in parts on Hopper: the last one as narrow as it may be, with the bits of heads that are padded by zeros."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")
from portakern.core import registry

PALLAS = registry.backend("pallas")
FAMILY = next(f for f in PALLAS.declared if f.name == "gpu")
if FAMILY.missing_packages():
    pytest.skip(f"the kernels for Hopper need {FAMILY.missing_packages()}", allow_module_level=True)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import portakern as pk  # noqa: E402
from portakern.backends.pallas.gpu.toolchain import compiler  # noqa: E402
from portakern.backends.pallas.lib.mosaic_gpu import chip, head_parts  # noqa: E402
from portakern.core import targets  # noqa: E402

has_compiler = pytest.mark.skipif(
    compiler.unavailable(targets.find("sm_90")) is not None, reason=str(compiler.unavailable(targets.find("sm_90")))
)
WIDTHS = {8: (16,), 32: (32,), 64: (64,), 80: (64, 16), 88: (64, 32), 96: (64, 32), 104: (64, 64), 192: (64,) * 3}


@pytest.mark.parametrize("d", WIDTHS)
def test_the_last_part_of_a_head_is_as_wide_as_it_needs_to_be(d):
    assert head_parts.widths_of(d) == WIDTHS[d]


def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), jnp.bfloat16)


def padded(x):
    """Heads of 128, of which the last elements are 0; what has no heads as it is."""
    return jnp.pad(x, [(0, 0)] * 3 + [(0, 128 - x.shape[3])]) if x.ndim == 4 else x


def same_bits_as_padded(op, arrays, skipped=0, **options):
    options |= {"is_causal": True, "scale": 0.125}
    with PALLAS.profile("races"):
        found = op(**arrays, **options)
        full = op(**{name: padded(x) for name, x in arrays.items()}, **options)
    pairs = [(x, y) for x, y in zip(found, full, strict=True) if x is not None][skipped:]
    return all((np.asarray(x) == np.asarray(y)[..., : x.shape[-1]]).all() for x, y in pairs)


@pytest.mark.parametrize(
    ("variant", "q_len", "d", "dv"), [("gpu", 70, 80, 96), ("gpu", 70, 96, 64), ("decode", 3, 96, 80)]
)
def test_narrow_parts_have_the_bits_of_padded_heads(variant, q_len, d, dv):
    """Also where sums of several splits are merged."""
    tiling = {"block_q": 64, "block_kv": 64, "min_split_keys": 64}
    op = pk.op("attention", backend="pallas", variant=variant, tiling=tiling)
    arrays = {"q": normal(1, q_len, 2, d), "k": normal(1, 130, 1, d), "v": normal(1, 130, 1, dv)}
    assert same_bits_as_padded(op, arrays, return_lse=True)


@pytest.mark.parametrize("variant", ["gpu", "unordered"])
def test_gradients_of_narrow_parts_have_the_bits_of_padded_heads(variant):
    """But those of queries that are added up in memory, in any order."""
    arrays = {"q": normal(1, 70, 1, 96), "k": normal(1, 90, 1, 96), "v": normal(1, 90, 1, 96)}
    o, lse = pk.op("attention", backend="reference")(**arrays, is_causal=True, scale=0.125, return_lse=True)
    op = pk.op("attention_vjp", backend="pallas", variant=variant)
    arrays |= {"o": o, "lse": lse, "d_o": normal(*o.shape)}
    assert same_bits_as_padded(op, arrays, skipped=int(variant == "unordered"))


def test_a_buffer_that_parts_leave_by_begins_at_the_same_byte_for_each_width():
    """The interpreter has other bytes for each."""
    form = head_parts.LeavingBuffers((2, 3), 8, (64, 16), jnp.bfloat16)
    memory = np.arange(2 * 3 * 8 * 64)
    seen = {n: SimpleNamespace(at=memory.reshape(shape)) for n, shape in form.shapes.items()}
    views = head_parts.LeavingViews({n: chip.BufferViews(x, x) for n, x in seen.items()}, ())
    assert [views.buffer(n, 1, 2).copied.flat[0] for n in (64, 16)] == [5 * 8 * 64] * 2


@has_compiler
def test_tensor_cores_multiply_no_part_that_a_head_lacks(monkeypatch, tmp_path):
    """80 elements are five products of 16 for scores, and sums of 64 and 16 columns."""
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    x = jax.ShapeDtypeStruct((2, 4096, 4, 80), "bfloat16")
    built = pk.op("attention", backend="pallas", variant="gpu").lower(x, x, x, target="sm_90")
    assert built.ok, built.reason
    (kernel,) = built.kernels
    products = {name.split(".")[4]: count for name, count in kernel.matrix.items()}
    loops = products["m64n64k16"] // (128 // 16)  # of 128 keys, one for each place of the loop
    assert products == {"m64n128k16": 5 * loops, "m64n64k16": 8 * loops, "m64n16k16": 8 * loops}
    assert kernel.spills == 0
