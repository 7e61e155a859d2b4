"""Packed documents on Hopper, in Pallas's interpreter: of keys, or queries, no more tiles come by than may hold a
segment of the resident ones, all warpgroups agree on how many, and no bit hangs on that."""

from __future__ import annotations

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
from portakern.backends.pallas.decode import attention as decode  # noqa: E402
from portakern.backends.pallas.gpu import attention as gpu  # noqa: E402
from portakern.backends.pallas.gpu.toolchain import compiler  # noqa: E402
from portakern.backends.pallas.lib.mosaic_gpu import bias_gradient, pairs  # noqa: E402
from portakern.core import targets  # noqa: E402
from tests.packing import IDS, packed_arrays, same_bits  # noqa: E402

SMALL = {"block_q": 64, "block_kv": 64, "stages": 2}
has_compiler = pytest.mark.skipif(
    compiler.unavailable(targets.find("sm_90")) is not None, reason=str(compiler.unavailable(targets.find("sm_90")))
)


def arrays_of(kind, *extents, bias=None):
    """JAX's arrays, bfloat16 and int32."""
    arrays = packed_arrays(kind, *extents, bias=bias)
    return {name: jnp.asarray(x, jnp.int32 if name in IDS else jnp.bfloat16) for name, x in arrays.items()}


def forward(arrays, variant="gpu", **options):
    tiling = SMALL | options.pop("tiling", {})
    return pk.op("attention", backend="pallas", variant=variant, tiling=tiling)(**arrays, **options, return_lse=True)


def backward(arrays, variant="gpu", **options):
    o, lse = pk.op("attention", backend="reference")(**arrays, **options, return_lse=True)
    op = pk.op("attention_vjp", backend="pallas", variant=variant, tiling=SMALL)
    return op(**arrays, o=o, lse=lse, d_o=jnp.cos(o), **options)


def without_spans(run):
    """What a run gives to which every tile comes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (gpu, decode, pairs, bias_gradient):
            patch.setattr(module, "spans_of", lambda *call, **how: {})
        jax.clear_caches()
        found = run()
    jax.clear_caches()
    return found


FORWARD = {
    "shuffled": ("shuffled", (1, 130, 1, 1, 200), {}),
    "documents": ("documents", (2, 130, 2, 1, 330), {"is_causal": True}),
    "documents in splits": ("documents", (1, 70, 1, 2, 700), {"tiling": {"max_splits": 8, "min_split_keys": 128}}),
    "documents, window, softcap, bias": (
        "documents", (1, 200, 1, 2, 260), {"window": (100, 20), "softcap": 2.0, "bias": (1, 1, 200, 260)},
    ),
    "no key": ("disjoint", (1, 70, 1, 1, 200), {}),
    "few queries": ("documents", (2, 3, 1, 2, 700), {"variant": "decode"}),
    "few queries, no key": ("disjoint", (2, 2, 1, 2, 300), {"variant": "decode", "is_causal": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_no_bit_hangs_on_keys_that_are_passed_by(name):
    kind, extents, more = FORWARD[name]
    arrays = arrays_of(kind, *extents, bias=more.get("bias"))
    options = {option: value for option, value in more.items() if option != "bias"}
    with PALLAS.profile("races"):
        found = forward(arrays, **options)
    assert same_bits(found, without_spans(lambda: forward(arrays, **options)))


GRADIENTS = {
    "documents": ("documents", (2, 200, 1, 2, 260), {"is_causal": True}),
    "documents, window": ("documents", (1, 300, 1, 1, 200), {"window": (90, 70), "softcap": 3.0}),
    "documents, bias": ("documents", (2, 150, 1, 1, 100), {"bias": (1, 1, 150, 100)}),
    "documents, bias of one row": ("documents", (2, 150, 1, 2, 100), {"bias": (1, 2, 1, 100), "is_causal": True}),
    "documents, bias of a batch": ("documents", (2, 150, 1, 1, 100), {"bias": (2, 1, 1, 100)}),
    "no key": ("disjoint", (1, 70, 1, 1, 200), {"bias": (1, 1, 1, 200)}),
}


@pytest.mark.parametrize(
    ("name", "variant"), [*((name, "gpu") for name in GRADIENTS), ("documents", "unordered"), ("no key", "unordered")]
)
def test_no_bit_of_gradients_hangs_on_tiles_that_are_passed_by(name, variant):
    kind, extents, more = GRADIENTS[name]
    arrays = arrays_of(kind, *extents, bias=more.get("bias"))
    options = {option: value for option, value in more.items() if option != "bias"}
    with PALLAS.profile("races"):
        found = backward(arrays, variant, **options)
    every = without_spans(lambda: backward(arrays, variant, **options))
    unordered = int(variant == "unordered")  # its d_q is added up in the order in which blocks come
    assert same_bits(found[unordered:], every[unordered:])
    np.testing.assert_allclose(*(np.asarray(x[0], np.float32) for x in (found, every)), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_of_tiles_in_no_span_are_not_read(is_causal):
    """They hold NaN, and 0 times NaN is NaN."""
    arrays = arrays_of("shuffled", 1, 250, 1, 1, 512)
    keys = np.repeat([0, 9, 1, 9], 128)[None]  # 128 keys are the tile of a block of gradients
    queries = np.repeat([0, 1], 128)[None, :250]
    arrays |= {name: jnp.asarray(x, jnp.int32) for name, x in zip(IDS, (queries, keys), strict=True)}
    hidden = jnp.asarray(keys == 9)[..., None, None]
    arrays |= {name: jnp.where(hidden, jnp.nan, arrays[name]) for name in "kv"}
    plain = arrays | {name: jnp.nan_to_num(arrays[name]) for name in "kv"}
    assert same_bits(forward(arrays, is_causal=is_causal), forward(plain, is_causal=is_causal))
    few = arrays | {name: arrays[name][:, -2:] for name in ("q", IDS[0])}
    o, _ = forward(few, "decode", tiling={"max_splits": 1})
    assert bool(jnp.isfinite(o.astype(jnp.float32)).all())
    for variant in ("gpu", "unordered"):
        found = backward(arrays, variant, is_causal=is_causal)
        assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in found if x is not None)


@has_compiler
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_walk_of_segments_compiles_for_hopper(is_causal):
    def form(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    q, k, ids = form(2, 4096, 8, 128), form(2, 4096, 2, 128), form(2, 4096, dtype="int32")
    more = dict.fromkeys(IDS, ids) | {"is_causal": is_causal, "target": "sm_90"}
    built = [pk.op("attention", backend="pallas", variant="gpu").lower(q, k, k, **more)]
    of_rows = form(2, 8, 4096, dtype="float32")
    op = pk.op("attention_vjp", backend="pallas", variant="gpu")
    built += [op.lower(q, k, k, q, of_rows, q, bias=form(1, 1, 1, 4096), **more)]
    for one in built:
        assert one.ok, one.reason
        assert not any(kernel.serialised for kernel in one.kernels)
