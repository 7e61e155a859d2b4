"""Pallas on Hopper GPUs: held to the bounds in the interpreter, compiled with no GPU, races that raise, and what is
refused or copied said in words. On a GPU, tests/test_conformance.py checks the same kernels as they run there.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import tempfile
import types
from importlib.machinery import PathFinder

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jax", reason="jax is not installed")
from portakern.core import registry

PALLAS = registry.backend("pallas")
FAMILY = next(f for f in PALLAS.declared if f.name == "gpu")
if FAMILY.missing_packages():
    pytest.skip(f"the kernels for Hopper need {FAMILY.missing_packages()}", allow_module_level=True)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import portakern as pk  # noqa: E402
from portakern import testing  # noqa: E402
from portakern.backends.pallas.gpu import attention, matmul, matmul_vjp  # noqa: E402
from portakern.backends.pallas.gpu.toolchain import compiler  # noqa: E402
from portakern.backends.pallas.lib.band import Band  # noqa: E402
from portakern.backends.pallas.lib.mosaic_gpu import chip, flash  # noqa: E402
from portakern.backends.pallas.lib.mosaic_gpu import rows as row_walk  # noqa: E402
from portakern.core import targets, tilings  # noqa: E402
from portakern.core.binder import unchecked  # noqa: E402
from portakern.core.call import shape_of  # noqa: E402
from portakern.core.framework import frameworks  # noqa: E402
from portakern.core.targets import Target  # noqa: E402
from portakern.errors import SpecError, UnsupportedError  # noqa: E402
from portakern.testing.subject import backend_subject  # noqa: E402
from portakern.tools.compile import abstract  # noqa: E402
from tests.drawing import cases  # noqa: E402
from tests.ops import record  # noqa: E402

HOPPER = Target("cuda", "sm_90")
OPS = [op for op in registry.ops() if PALLAS.module_of(op, FAMILY)]
ROWS = [op for op in OPS if "row_warps" in PALLAS.implementation(op, FAMILY).knobs]
SPILLED = {
    "attention": 16,  # bytes: what the walk over tiles knows, stored and read outside the loop over keys
    "attention_vjp": 16,  # d_k and d_v beside each other take all registers, and one by one more products
}
LIMITS = testing.Limits(typical_elements=2**12)
each_op = pytest.mark.parametrize("op", OPS)
has_compiler = pytest.mark.skipif(
    compiler.unavailable(targets.find("sm_90")) is not None, reason=str(compiler.unavailable(targets.find("sm_90")))
)
X = np.random.default_rng(0).standard_normal((5, 300)).astype(np.float32)


def kernels_of(impl, call, tiling):
    """The kernels of a call, compiled in this process, which tells of them where it is told to."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(compiler.DUMP, folder)
        found = compiler.build(impl, call, tiling).kernels
    assert found
    return found


def on_gpu(op, **tiling):
    return pk.op(op, backend="pallas", variant="gpu", tiling=tiling)


def limits_of(op, **more):
    """Limits of calls that kernels for GPUs take: those with sinks or slopes, and pages of other dtypes than the
    queries', are refused, and few are drawn here."""
    spec = registry.find_spec(op)
    names = {a.name for a in spec.arrays} | {o.name for o in spec.options} | {"wants"}
    narrow = any(set(a.or_dtypes) - {"float32"} for a in spec.arrays)
    return dataclasses.replace(LIMITS, arguments=frozenset(names - {"sinks", "alibi_slopes"}), one_dtype=narrow, **more)


# --- right, in the interpreter ---


BRIEFLY = {"varlen_attention_vjp": {"dtypes": ["bfloat16"], "only_edges": ["extents_of_1"], "promises": False}}
"""Of an op whose kernels are another's, which is tried here with its laws: its own laws, and calls of several
sequences, take ten minutes in the interpreter, and passed on an H200."""


@each_op
@pytest.mark.timeout(900)  # the laws of attention's gradients are many calls of three kernels each
def test_within_bounds(op):
    extent = {"max_examples": 4, **BRIEFLY.get(op, {})}
    report = pk.check(op, backend="pallas", variant="gpu", device="cpu", seed=0, limits=limits_of(op), **extent)
    assert report.passed, "\n".join(map(str, report.failures))
    assert report.examples >= 2, report.refused


@pytest.mark.parametrize("variant", ["gpu", "unordered"])
@pytest.mark.parametrize("low", [float(jnp.finfo(jnp.bfloat16).min), -2.2e38, -1e30])
def test_a_bias_of_all_that_numbers_hold_makes_no_weight_of_gradients_infinite(variant, low):
    """A row of it has weights from 0 to 1, and is no reason for NaN in every key's gradient."""
    rng = np.random.default_rng(0)
    q, d_o, o = (jnp.asarray(rng.standard_normal((1, 8, 1, 16)), jnp.bfloat16) for _ in range(3))
    k, v = (jnp.asarray(rng.standard_normal((1, 16, 1, 16)), jnp.bfloat16) for _ in range(2))
    bias = jnp.zeros((1, 1, 8, 16), jnp.bfloat16).at[0, 0, 3].set(low)
    o, lse = pk.op("attention", backend="reference")(q, k, v, bias=bias, return_lse=True)
    op = pk.op("attention_vjp", backend="pallas", variant=variant)
    found = [x for x in op(q, k, v, o, lse, d_o, bias=bias) if x is not None]
    assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in found)
    call = op.bind(q, k, v, o, lse, d_o, bias=bias)
    assert max(testing.compare_call(call, [np.asarray(x) for x in found]).values()) <= 1


@pytest.mark.parametrize("variant", ["gpu", "unordered"])
def test_no_weight_of_gradients_is_above_1_under_a_wide_softcap(variant):
    """The tanh errs by more than the scores are apart."""
    rng = np.random.default_rng(0)
    q, d_o = (jnp.asarray(rng.standard_normal((1, 70, 1, 16)), jnp.bfloat16) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((1, 1, 1, 16)), jnp.bfloat16) for _ in range(2))
    o, lse = pk.op("attention", backend="reference")(q, k, v, softcap=9.8e29, return_lse=True)
    arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "d_o": d_o, "d_lse": jnp.ones_like(lse)}
    op = pk.op("attention_vjp", backend="pallas", variant=variant)
    call, found = op.bind(**arrays, softcap=9.8e29), op(**arrays, softcap=9.8e29)
    assert max(testing.compare_call(call, [np.asarray(x) for x in found if x is not None]).values()) <= 1


@pytest.mark.parametrize("variant", ["gpu", "unordered"])
def test_a_key_whose_segment_no_query_has_reaches_no_gradient(variant):
    """Neither by way of rows that fill the last tile of queries, whatever the key holds and whatever its segment is."""
    rng = np.random.default_rng(0)
    q, d_o = (jnp.asarray(rng.standard_normal((1, 9, 1, 16)), jnp.bfloat16) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((1, 12, 1, 16)), jnp.bfloat16) for _ in range(2))
    k = k.at[:, :3].set(jnp.nan)
    ids = {
        "q_segment_ids": jnp.ones((1, 9), jnp.int32),
        "kv_segment_ids": jnp.ones((1, 12), jnp.int32).at[:, :3].set(0),
    }
    o, lse = pk.op("attention", backend="reference")(q, k, v, **ids, return_lse=True)
    found = pk.op("attention_vjp", backend="pallas", variant=variant)(q, k, v, o, lse, d_o, **ids)
    assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in found[1:3])


@pytest.mark.parametrize("scale", [2.5e38, -3.3e38])
def test_a_scale_whose_product_with_log2_e_overflows(scale):
    """It was inf there, and 0 times inf NaN."""
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((1, 9, 1, 16)), jnp.bfloat16) for _ in range(2))
    q = jnp.zeros_like(k)
    o, lse = on_gpu("attention")(q, k, v, scale=scale, return_lse=True)
    mean = np.asarray(v, np.float32).mean(1, keepdims=True)
    np.testing.assert_allclose(np.asarray(o, np.float32), np.broadcast_to(mean, o.shape), atol=0.01)
    for variant in ("gpu", "unordered"):
        with pytest.raises(UnsupportedError, match=r"times log2\(e\) is beyond float32: multiply q by a part"):
            pk.op("attention_vjp", backend="pallas", variant=variant)(q, k, v, o, lse, o, scale=scale)


@each_op
def test_several_tiles_race_for_nothing(op):
    """Where a race is an error, with tiles smaller than the extents: the rings of buffers are filled anew. Of an op
    whose tiles no extent fills, calls are drawn."""
    spec = registry.find_spec(op)
    edges = [f"several_{name}" for name, tile in spec.tiling.items() if tile.of]
    several = len(edges) == 2  # of heads, each of which takes a minute of processor time
    drawn = (len(edges) + 1) * (2 if spec.is_vjp and not several else 1)  # of wider cotangents products are refused
    limits = limits_of(op, **({"elements": 640} if several else {}))
    report = pk.check(
        op, backend="pallas", variant="gpu", device="cpu", profile="races", max_examples=drawn,
        only_edges=edges or None,
        dtypes=["bfloat16"], seed=1, limits=limits, promises=False,
    )  # fmt: skip
    assert report.passed, "\n".join(map(str, report.failures))
    assert report.examples >= 1, report.refused


@pytest.mark.parametrize("op", ROWS)
def test_rows_that_are_too_long_to_keep_are_read_twice(op, monkeypatch):
    """Of the lengths that an interpreter has time for, all would stay in shared memory."""
    monkeypatch.setattr(row_walk, "KEPT_BYTES", 0)
    jax.clear_caches()
    try:
        report = pk.check(
            op, backend="pallas", variant="gpu", device="cpu", profile="races", max_examples=3,
            only_edges=["several_block_n"], seed=2, limits=LIMITS, promises=False,
        )  # fmt: skip
    finally:
        jax.clear_caches()
    assert report.passed, "\n".join(map(str, report.failures))
    assert report.examples >= 2, report.refused


@pytest.mark.parametrize("op", ROWS)
@pytest.mark.parametrize(("n", "block_n"), [(129, 1024), (257, 128), (1023, 256), (1152 + 127, 128)])
def test_rows_that_the_copy_engine_cannot_take_are_whole(op, n, block_n):
    """What the last threads read of a row is there twice, and counts once. NaN around a row stays out."""
    arrays = _rows_of(op, 3, n)
    run = on_gpu(op, block_n=block_n)
    with PALLAS.profile("races"):
        (whole,) = jax.tree.leaves(run(**arrays))
        nan = {name: x.at[jnp.array([0, 2])].set(jnp.nan) for name, x in arrays.items()}
        (around,) = jax.tree.leaves(run(**nan))
    exact = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
    (want,) = jax.tree.leaves(pk.op(op, backend="reference")(**exact))
    np.testing.assert_allclose(np.asarray(whole, np.float32), want, rtol=2e-2, atol=2e-3)
    assert (np.asarray(around[1]) == np.asarray(whole[1])).all()
    assert np.isnan(np.asarray(around, np.float32)[[0, 2]]).all()


@pytest.mark.parametrize("op", ROWS)
@pytest.mark.parametrize(("cluster", "row_warps"), [(4, 1), (8, 4)])
def test_rows_that_blocks_of_a_cluster_share_are_whole(op, cluster, row_warps):
    """Ten chunks are 3, 3, 3 and 1, or 2 of five blocks while three have none. Five rows leave warps without one, and
    NaN around a row stays out of it."""
    arrays = _rows_of(op, 5, 10 * 128 - 8)
    run = on_gpu(op, block_rows=4 // row_warps, block_n=128, row_warps=row_warps, cluster=cluster)
    with PALLAS.profile("races"):
        (whole,) = jax.tree.leaves(run(**arrays))
        (around,) = jax.tree.leaves(run(**{n: x.at[jnp.array([0, 2])].set(jnp.nan) for n, x in arrays.items()}))
    exact = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
    (want,) = jax.tree.leaves(pk.op(op, backend="reference")(**exact))
    np.testing.assert_allclose(np.asarray(whole, np.float32), want, rtol=2e-2, atol=2e-3)
    assert (np.asarray(around)[[1, 3, 4]] == np.asarray(whole)[[1, 3, 4]]).all()
    assert np.isnan(np.asarray(around, np.float32)[[0, 2]]).all()


def _rows_of(op, rows, n):
    """The arrays of an op on rows that have to be there."""
    rng = np.random.default_rng(n)
    names = [a.name for a in registry.find_spec(op).arrays if not a.optional]
    return {name: jnp.asarray(rng.standard_normal((rows, n)), jnp.bfloat16) for name in names}


@pytest.mark.parametrize(
    ("n", "dtype", "arrays", "block_n", "cluster"),
    [
        (16384, "bfloat16", 1, 16384, 1),
        (32768, "bfloat16", 1, 8192, 1),
        (50304, "bfloat16", 1, 4096, 1),  # 7 chunks of 8192 would leave a multiprocessor one block
        (65536, "bfloat16", 1, 8192, 2),
        (131072, "bfloat16", 1, 8192, 4),
        (131072, "bfloat16", 2, 4096, 8),
        (128256, "float32", 1, 8192, 8),
        (400_000, "float32", 1, 4096, 8),  # one block to a multiprocessor
        (500_000, "float32", 1, 4096, 1),  # read twice
        (50257, "bfloat16", 1, 4096, 1),  # read element by element
    ],
)
def test_long_rows_have_as_many_blocks_as_keep_them(n, dtype, arrays, block_n, cluster):
    found = row_walk.default_tiling(n, dtype, arrays)
    assert (found["block_n"], found["cluster"]) == (block_n, cluster)


@has_compiler
@pytest.mark.parametrize("op", ["softmax", "layernorm_vjp"])
def test_rows_in_clusters_compile_with_their_fences(op):
    """Which no interpreter misses: without them blocks read what was in memory before, on an H100."""
    form = jax.ShapeDtypeStruct((64, 131072), "bfloat16")
    built = on_gpu(op).lower(**dict.fromkeys(_rows_of(op, 1, 1), form), target="sm_90")
    assert built.ok, built.reason
    assert built.tiling["cluster"] > 1 and all(kernel.spills == 0 for kernel in built.kernels)
    assert f".reqnctapercluster {built.tiling['cluster']}," in built.kernels[0].assembly
    assert built.kernels[0].assembly.count("fence.sc.cluster") == 2


@pytest.mark.parametrize("cores", [132, 1], ids=["a block a chunk", "a block a tile"])
@pytest.mark.parametrize(("m", "n", "k", "pair"), [(70, 100, 1100, 0), (200, 260, 1500, 0), (200, 260, 1500, 2)])
def test_a_deep_sum_in_chunks_is_whole(m, n, k, pair, cores, monkeypatch):
    """Of integers every sum is exact, in chunks that blocks share or that one block adds up."""
    monkeypatch.setattr(matmul, "DEEP", 128)
    monkeypatch.setattr(matmul, "HOPPER", dataclasses.replace(matmul.HOPPER, cores=cores))
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-3, 4, shape), jnp.bfloat16) for shape in ((m, k), (k, n)))
    tiling = {"block_m": 128, "block_n": 128, "block_k": 64, "stages": 2, "band": 1, "beside": 1, "pair": pair}
    plan = matmul.plan_of(pk.op("matmul").bind(a=a, b=b), matmul.HopperProductConfig(**tiling))
    assert plan.parts > 4 and plan.num_splits == (plan.parts if cores > 1 else 1)
    jax.clear_caches()
    try:
        with PALLAS.profile("races"):
            c = on_gpu("matmul", **tiling)(a, b, out_dtype="float32")
    finally:
        jax.clear_caches()
    assert (np.asarray(c) == np.asarray(a, np.float32) @ np.asarray(b, np.float32)).all()


@pytest.mark.parametrize("pair", [0, 1, 2], ids=["alone", "pairs share B", "pairs share A"])
@pytest.mark.parametrize("n", [200, 256, 72])
def test_tiles_three_pieces_wide_are_whole(n, pair):
    """Of integers every sum is exact. B comes as one tile where n is a multiple of 64, and else in pieces, of which the
    last may lie beyond its end."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-3, 4, shape), jnp.bfloat16) for shape in ((131, 130), (130, n)))
    tiling = {"block_m": 128, "block_n": 64, "block_k": 64, "stages": 2, "band": 1, "beside": 3, "pair": pair}
    with PALLAS.profile("races"):
        c = on_gpu("matmul", **tiling)(a, b, out_dtype="float32")
    assert (np.asarray(c) == np.asarray(a, np.float32) @ np.asarray(b, np.float32)).all()


def test_parts_of_float32_are_all_of_it():
    """Also of what rounds to infinity in bfloat16; what is not finite is in the first part, and there alone where
    products with other parts would make NaN of it."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(500) * 2.0 ** rng.integers(-90, 120, 500)).astype(np.float32)
    x[:6] = [np.finfo(np.float32).max, -np.finfo(np.float32).max, 0.0, np.inf, -np.inf, np.nan]
    a = np.asarray(matmul.split(jnp.asarray(x[:, None]), 0, -1), np.float64)
    b = np.asarray(matmul.split(jnp.asarray(x[None]), 1, -2), np.float64)
    parts = {product: a[:, i] for i, product in enumerate(matmul.PRODUCTS)}
    assert (parts[0, 0][6:] + parts[1, 0][6:] + parts[2, 0][6:] == x[6:]).all()
    assert (parts[0, 0] + parts[1, 0] + parts[2, 0])[:3].tolist() == x[:3].tolist()
    np.testing.assert_array_equal(parts[0, 0][3:6], x[3:6])
    assert all((parts[product][3:6] == 0).all() for product in matmul.PRODUCTS[:-1])
    np.testing.assert_array_equal(b, [a[:, matmul.PRODUCTS.index((j, i))] for i, j in matmul.PRODUCTS])


@pytest.mark.parametrize("pair", [0, 1, 2], ids=["alone", "pairs share B", "pairs share A"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_float32_products_are_whole(precision, pair):
    """Of integers that tf32 holds every sum is exact, and an infinity times a number is one."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-1000, 1000, shape).astype(np.float32) for shape in ((131, 70), (70, 99)))
    a[7, 3], b[3] = np.inf, 2.0
    tiling = {"block_m": 128, "block_n": 64, "block_k": 64 if precision == "ieee" else 32, "beside": 2}
    with PALLAS.profile("races"):
        c = on_gpu("matmul", **tiling, stages=2, band=1, pair=pair)(jnp.asarray(a), jnp.asarray(b), precision=precision)
    np.testing.assert_array_equal(np.asarray(c), a @ b)


@has_compiler
@pytest.mark.parametrize(("precision", "operands"), [("ieee", "bf16.bf16"), ("tf32", "tf32.tf32")])
def test_float32_products_compile(precision, operands):
    """Of extents that are multiples of nothing, too."""
    for m, n, k in ((4096, 4096, 4096), (1000, 3001, 5003)):
        a, b = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((m, k), (k, n)))
        built = on_gpu("matmul").lower(a, b, precision=precision, target="sm_90")
        assert built.ok, built.reason
        (kernel,) = built.kernels
        assert kernel.spills == 0 and all(name.endswith(operands) for name in kernel.matrix) and kernel.matrix


@pytest.mark.parametrize("pair", [0, 1, 2], ids=["alone", "pairs share B", "pairs share A"])
@pytest.mark.parametrize(("block_m", "block_n", "beside"), [(64, 128, 1), (128, 128, 1), (128, 64, 3), (128, 256, 1)])
def test_gradients_of_products_are_whole(block_m, block_n, beside, pair):
    """Of integers every sum is exact. Operands are read as they lie, of extents that are multiples of nothing."""
    rng = np.random.default_rng(0)
    a, b, d_c = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((2, 67, 140), (140, 201), (2, 67, 201)))
    tiling = {"block_m": block_m, "block_n": block_n, "beside": beside, "pair": pair, "block_k": 64}
    with PALLAS.profile("races"):
        vjp = on_gpu("matmul_vjp", **tiling, stages=2, band=1)
        d_a, d_b = vjp(*(jnp.asarray(x, jnp.bfloat16) for x in (a, b, d_c)))
    assert (np.asarray(d_a, np.float32) == jnp.asarray(d_c @ b.T, jnp.bfloat16).astype(jnp.float32)).all()
    exact = np.einsum("bmk,bmn->kn", a, d_c)
    assert (np.asarray(d_b, np.float32) == jnp.asarray(exact, jnp.bfloat16).astype(jnp.float32)).all()


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize(("a", "b"), [((67, 140), (140, 99)), ((2, 1, 9, 20), (3, 20, 12)), ((9, 20), (2, 20, 12))])
def test_gradients_of_float32_products_are_whole(a, b, precision):
    """Of integers that tf32 holds every sum is exact; of batch axes each operand may lack some."""
    rng = np.random.default_rng(0)
    batch = np.broadcast_shapes(a[:-2], b[:-2])
    a, b, d_c = (rng.integers(-50, 50, s).astype(np.float32) for s in (a, b, (*batch, a[-2], b[-1])))
    found = on_gpu("matmul_vjp")(*map(jnp.asarray, (a, b, d_c)), precision=precision)
    for got, exact in zip(found, jax.vjp(jnp.matmul, a, b)[1](d_c), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(exact))


@has_compiler
@pytest.mark.parametrize(("dtype", "precision", "turned"), [
    ("bfloat16", "ieee", 0), ("float32", "ieee", 0), ("float32", "tf32", 2),
])  # fmt: skip
def test_gradients_of_products_read_what_lies_transposed(dtype, precision, turned):
    """XLA transposes nothing, but for tf32 both operands of d_b; tensor cores spill nothing for it."""
    forms = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, 2048, 1024), (1024, 4096), (2, 2048, 4096))]
    built = on_gpu("matmul_vjp").lower(*forms, precision=precision, target="sm_90")
    assert built.ok, built.reason
    assert len(built.kernels) == 2 and all(kernel.spills == 0 for kernel in built.kernels)
    call = pk.op("matmul_vjp").bind(*forms, precision=precision)

    def gradients(*arrays):
        return matmul_vjp.matmul_vjp(
            call.replace(arrays=dict(zip(call.arrays, arrays, strict=True))), matmul.HopperProductConfig(**built.tiling)
        )

    program = jax.make_jaxpr(gradients)(*forms)
    assert [e.primitive.name for e in program.eqns].count("transpose") == turned


@has_compiler
@pytest.mark.parametrize(("dtype", "k"), [("float32", 15), ("float32", 40), ("bfloat16", 100)])
def test_no_sum_is_read_before_its_products_are_done(dtype, k):
    """Where steps are few, compilers lay them out one after another, and see no register that a wait is for."""
    a, b = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((9, k), (k, 9)))
    built = on_gpu("matmul").lower(a, b, target="sm_90")
    assert built.ok, built.reason
    assert "wgmma.mma_async" in built.kernels[0].assembly and not read_early(built.kernels[0].assembly)


@has_compiler
@pytest.mark.parametrize(
    ("variant", "more"), [("gpu", {"q_segment_ids": (1, 1), "kv_segment_ids": (1, 1)}), ("decode", {})]
)
def test_no_score_changes_its_sign_before_it_is_there(variant, more):
    """Compilers did so with some of the first scores of a tile."""
    x, ids = jnp.zeros((1, 1, 1, 1), jnp.float16), {name: jnp.zeros(shape, jnp.int32) for name, shape in more.items()}
    op = pk.op("attention", backend="pallas", variant=variant)
    built = op.lower(x, x, x, **ids, scale=-0.375, target="sm_90")
    assert built.ok, built.reason
    assert "wgmma.mma_async" in built.kernels[0].assembly and not read_early(built.kernels[0].assembly)


@pytest.mark.parametrize(("first", "last"), [(None, 0), (0, None), (-9, 0), (None, None)])
def test_every_tile_has_one_index_and_those_that_see_most_have_the_first(first, last):
    heads, tiles = 11, 5
    band = Band(first, last, 500, 100, 100)
    found = [tuple(map(int, flash.heaviest_first(jnp.int32(i), heads, tiles, band))) for i in range(heads * tiles)]
    assert sorted(found) == [(head, i) for head in range(heads) for i in range(tiles)]
    if (first, last) in ((None, 0), (0, None)):
        seen = [int(end) - int(begin) for begin, end in (band.span(i) for _, i in found[: flash.TOGETHER * tiles])]
        assert seen == sorted(seen, reverse=True) and seen[0] > seen[-1]


def test_the_tile_is_the_one_that_is_done_first():
    """As an H100 was on 30 products (docs/porting/matmul.md)."""

    def chosen(*extents):
        m, n, k = extents
        call = pk.op("matmul").bind(
            a=jax.ShapeDtypeStruct((m, k), "bfloat16"), b=jax.ShapeDtypeStruct((k, n), "bfloat16")
        )
        return matmul.key(call)["tile"]

    assert {chosen(n, n, n) for n in (2048, 4096, 8192)} == {"128 x 256"}
    assert {chosen(*x) for x in ((3072,) * 3, (2304, 2304, 4096), (6144, 1536, 2048))} == {"128 x 192"}
    assert chosen(300, 4096, 4096) == "128 x 128" and chosen(8192, 128, 4096) == "64 x 128"
    # Rows of b that begin off 128 bytes: pairs of blocks share what they read of them, unless there is one row too few.
    assert chosen(1000, 3000, 5120) == "128 x 192 by pairs" and chosen(4096, 3000, 4096) == "128 x 256 by pairs"
    assert chosen(384, 3000, 4096) == "128 x 128" and chosen(9000, 3000, 4096) in ("128 x 256", "128 x 192")


@has_compiler
@pytest.mark.parametrize("m", [16, 512, 4096])
def test_deep_sums_compile(m, monkeypatch, tmp_path):
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    a, b = (jnp.zeros(shape, jnp.bfloat16) for shape in ((m, 32768), (32768, 512)))
    built = on_gpu("matmul").lower(a, b, target="sm_90")
    assert built.ok, built.reason
    assert [k.name for k in built.kernels] == ["matmul", "matmul_columns"][: 2 if m < 4096 else 1]
    assert all(k.spills == 0 for k in built.kernels)


def test_a_race_is_an_error_and_the_next_kernel_runs(monkeypatch, capfd):
    """Results are sent off before they are committed."""
    softmax, x = on_gpu("softmax"), jnp.asarray(X)
    with PALLAS.profile("races"):
        right = softmax(x)
        with monkeypatch.context() as planted:
            planted.setattr(row_walk.plgpu, "commit_smem", lambda: None)
            with pytest.raises(Exception, match="raced for memory|RACE DETECTED") as e:  # in our words, or by JAX 0.12
                softmax(x[1:])  # another form, so that it is traced anew
        assert "RACE DETECTED" in f"{capfd.readouterr().out}{e.value}"
        assert (softmax(x) == right).all()


def _random(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.bfloat16)


def _attention(q_len, **more):
    arrays = {"q": _random(1, q_len, 1, 64)} | {name: _random(1, 300, 1, 64) for name in "kv"}
    return (
        arrays | {name: _random(1, q_len, 1, 64) for name in more} | ({"lse": jnp.ones((1, 1, q_len))} if more else {})
    )


STARTS = jnp.asarray([0, 200], jnp.int32)
SEQUENCE = {"q": _random(200, 1, 64), "k": _random(200, 1, 64), "v": _random(200, 1, 64)}
PAGES = {"k_pages": _random(5, 50, 1, 64), "v_pages": _random(5, 50, 1, 64), "page_table": jnp.arange(5)[None],
         "kv_lens": jnp.full(1, 230), "q_starts": STARTS}  # fmt: skip

RINGS = [
    ("attention", "gpu", "stages", _attention(200), {"block_kv": 64, "min_split_keys": 64, "max_splits": 2}),
    ("attention", "decode", "stages", _attention(1), {"block_kv": 64, "min_split_keys": 256}),
    ("attention_vjp", "gpu", "stages", _attention(200, o=1, d_o=1), {"block_q": 64, "block_kv": 64}),
    ("varlen_attention", "gpu", "stages", SEQUENCE | {"q_starts": STARTS, "kv_starts": STARTS}, {"block_kv": 64}),
    ("paged_attention", "gpu", "stages", {"q": SEQUENCE["q"], **PAGES}, {"block_kv": 64}),
    ("matmul", "gpu", "stages", {"a": _random(130, 300), "b": _random(300, 130)}, {"block_m": 128, "block_n": 128}),
    ("layernorm_vjp", "fused", "ring", {"x": _random(21, 256), "weight": _random(256), "d_y": _random(21, 256)}, {}),
]


@pytest.mark.parametrize(
    ("op", "variant", "knob", "arrays", "tiling"), RINGS, ids=lambda x: x if type(x) is str else ""
)
def test_the_shortest_ring_that_is_not_refused_waits_for_nothing(op, variant, knob, arrays, tiling):
    """And a shorter one, of at least one buffer, waits for itself."""
    impl = PALLAS.implementation(op, next(f for f in PALLAS.declared if f.name == variant))
    call, least = pk.op(op).bind(**arrays).replace(interpret=True), impl.knobs[knob].lo
    tiling = tilings.resolve(impl, call, tiling).tiling
    with PALLAS.profile("races"):
        jax.block_until_ready(impl.run(call, tiling.replace(**{knob: least})))
        if least > 1:
            with pytest.raises(Exception, match="waits for ever"):
                jax.block_until_ready(impl.run(call, tiling.replace(**{knob: least - 1})))
    with pytest.raises(SpecError, match=f"{knob}'\\] is {least - 1}; expected one of {least}, "):
        pk.op(op, backend="pallas", variant=variant, tiling={knob: least - 1})(**arrays)


def test_waiting_for_one_that_is_done_is_an_error(monkeypatch):
    """The warpgroup that should bring operands ends."""
    monkeypatch.setattr(matmul, "produce", lambda *args: None)
    with PALLAS.profile("races"), pytest.raises(Exception, match="waits for ever"):
        jax.block_until_ready(on_gpu("matmul")(_random(131, 72), _random(72, 72)))


# --- in words ---


def call_on_hopper(op, arrays, **options):
    call = pk.op(op).bind(**arrays, **options)
    return abstract.bind_signature(call.spec, abstract.signature_of(call), frameworks()["jax"], HOPPER)


def resolved(op, tiling, arrays, **options):
    call, impl = call_on_hopper(op, arrays, **options), PALLAS.implementation(op, FAMILY)
    return impl, call, tilings.resolve(impl, call, tiling).tiling


PACKED = {"q": (9, 2, 128), "k": (8, 1, 128), "v": (8, 1, 128), "q_starts": (3,), "kv_starts": (3,)}
PACKED_VJP = PACKED | {"o": (9, 2, 128), "lse": (2, 9), "d_o": (9, 2, 128)}
PAGED = {"q": (9, 2, 128), "k_pages": (4, 16, 1, 128), "v_pages": (4, 16, 1, 128), "page_table": (2, 2),
         "kv_lens": (2,), "q_starts": (3,)}  # fmt: skip
INTEGERS = {"q_starts", "kv_starts", "page_table", "kv_lens"}

REFUSED = [
    ("softmax", {"block_rows": 2, "row_warps": 1}, {"x": (8, 304)}, "bfloat16", "block_rows=2 with row_warps=1 leaves"),
    ("softmax", {"block_rows": 8, "block_n": 8192, "row_warps": 1}, {"x": (8, 8000)}, "float16", "256 a .*128"),
    ("softmax", {"block_rows": 64, "row_warps": 4}, {"x": (8, 1)}, "float32", "waits at 64 barriers.* block_rows=32"),
    ("softmax", {"block_n": 256, "cluster": 4}, {"x": (8, 99_968)}, "bfloat16",
     "cluster=4 leaves a block 98 chunks of"),
    ("softmax", {"block_rows": 128}, {"x": (999, 4096)}, "bfloat16", "has 227: choose smaller block_rows or block_n"),
    ("softmax", {}, {"x": (8, 300)}, "float64", "no float64 here: convert to float32, or use the reference backend"),
    ("matmul", {"block_k": 32}, {"a": (8, 8), "b": (8, 8)}, "float32", "block_k=32 is not the 128 bytes .* use 64"),
    ("softmax_vjp", {"block_n": 16384}, {"y": (8, 9999), "d_y": (8, 9999)}, "bfloat16", "a thread, and 64 fit into"),
    ("matmul_vjp", {"block_k": 32}, {"a": (8, 8), "b": (8, 8), "d_c": (8, 8)}, "bfloat16",
     "d_a: block_k=32 is not the"),
    ("matmul", {"block_k": 32}, {"a": (8, 8), "b": (8, 8)}, "bfloat16", "block_k=32 is not the 128 bytes .* use 64"),
    ("matmul", {"block_m": 16}, {"a": (8, 8), "b": (8, 8)}, "bfloat16", "block_m=16 is not supported .* 64, 128"),
    ("matmul", {"block_m": 256, "block_n": 256}, {"a": (99, 8), "b": (8, 999)}, "bfloat16", "the registers of two"),
    ("matmul", {"block_n": 256}, {"a": (99, 32768), "b": (32768, 999)}, "bfloat16", "two sums of a tile of 128 x 256"),
    ("matmul", {"block_m": 128, "stages": 8}, {"a": (99, 8), "b": (8, 999)}, "bfloat16", "smaller block_m, block_n or"),
    ("attention", {}, dict.fromkeys("qkv", (1, 9, 1, 8)), "float32", "take no float32 operands whole, .* bfloat16, or"),
    ("attention", {}, dict.fromkeys("qkv", (1, 9, 1, 264)), "float16", "of 264 are wider than the 256 elements that"),
    ("attention", {"block_q": 256}, dict.fromkeys("qkv", (1, 9, 1, 8)), "float16", "block_q=256 is not .* 64, 128"),
    ("attention", {"block_kv": 32}, dict.fromkeys("qkv", (1, 9, 1, 8)), "float16", "block_kv=32 is not .* 256"),
    ("attention", {"block_kv": 256}, dict.fromkeys("qkv", (1, 9, 1, 64)), "float16", "64 takes 224 registers a thread"),
    ("attention", {"stages": 8}, dict.fromkeys("qkv", (1, 9, 1, 128)), "float16", "choose smaller block_kv or stages"),
    ("varlen_attention", {}, PACKED | {"sinks": (2,)}, "bfloat16", "sinks are given, which Pallas's kernels for GPUs"),
    ("varlen_attention", {"block_kv": 32}, PACKED, "bfloat16", "block_kv=32 is not supported by wgmma here: use one"),
    ("varlen_attention", {}, PACKED, "float32", "take no float32 operands whole"),
    ("varlen_attention_vjp", {"block_q": 256}, PACKED_VJP, "bfloat16", "block_q=256 is not supported by wgmma here"),
    ("paged_attention", {"stages": 8}, PAGED, "bfloat16", "choose smaller block_kv or stages$"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "tiling", "shapes", "dtype", "words"), REFUSED)
def test_what_is_refused_is_said(op, tiling, shapes, dtype, words):
    with pytest.raises(UnsupportedError, match=words):
        resolved(op, tiling, {n: np.ones(s, _dtype(n, dtype)) for n, s in shapes.items()})


def test_pages_of_8_bits_are_refused():
    arrays = {n: jnp.ones(s, _dtype(n, "bfloat16")) for n, s in PAGED.items()}
    arrays["k_pages"] = arrays["k_pages"].astype("float8_e5m2")
    with pytest.raises(UnsupportedError, match="pages of 8 bits, which .* do not take: use the Triton backend"):
        resolved("paged_attention", {}, arrays)


def _dtype(name, dtype):
    return jnp.dtype("int32" if name in INTEGERS else "float32" if name == "lse" else dtype)


COPIED = [
    ("softmax", {"x": (8, 304)}, {}, None),
    ("softmax", {"x": (8, 301)}, {}, None),
    ("softmax", {"x": (8, 101)}, {}, "rows of 101 elements are padded to 104"),
    ("softmax", {"x": (8, 304)}, {"axis": 0}, "axis 0 is moved to the end, and back in the results$"),
    ("softmax", {"x": (8, 1)}, {"axis": 0}, None),
    ("rmsnorm", {"x": (8, 7)}, {}, "rows of 7 elements are padded to 8"),
    ("matmul", {"a": (5, 8), "b": (8, 64)}, {}, None),
    ("matmul", {"a": (5, 9), "b": (9, 64)}, {}, "k of a and b is padded from 9 to 16$"),
    ("matmul", {"a": (5, 8), "b": (8, 72)}, {}, None),
    ("matmul", {"a": (8193, 8), "b": (8, 72)}, {}, "^n of b is padded from 72 to 128$"),
    ("matmul", {"a": (5, 8), "b": (8, 65)}, {}, "n of b is padded from 65 to 128; c is cut from 72 columns to 65$"),
    ("matmul", {"a": (1, 3, 5, 8), "b": (2, 1, 8, 64)}, {}, "a is repeated .* that it lacks; b is repeated along"),
    ("matmul", {"a": (2, 3, 5, 8), "b": (8, 64)}, {}, None),
    ("attention", dict.fromkeys("qkv", (1, 9, 1, 40)), {}, None),
    ("attention", dict.fromkeys("qkv", (1, 64, 1, 40)), {"return_lse": True}, None),
    ("attention", dict.fromkeys("qkv", (1, 9, 1, 40)), {"return_lse": True}, "^lse is cut from 64 queries to 9$"),
    ("attention", dict.fromkeys("qkv", (1, 9, 1, 41)), {}, "^heads of q and k are padded from 41 to 48; heads of v"),
    ("attention", dict.fromkeys("qkv", (1, 9, 1, 41)), {}, "of v are padded from 41 to 48; o is cut from 48 to 41$"),
    ("attention", dict.fromkeys("qkv", (1, 9, 1, 40)) | {"bias": (1, 1, 1, 9)}, {}, "^bias is padded to whole tiles"),
    ("varlen_attention", PACKED, {}, "^queries are gathered into tiles of their sequences, and o out of them$"),
    ("paged_attention", PAGED | {"v_pages": (4, 16, 1, 9)}, {}, "; heads of v are padded from 9 to 16$"),
    ("varlen_attention_vjp", PACKED_VJP, {}, "^all arrays are moved to 256 places, where sequences begin at multiples"),
    ("softmax_vjp", {"y": (8, 304), "d_y": (8, 304)}, {}, None),
    ("matmul_vjp", {"a": (64, 64), "b": (64, 64), "d_c": (64, 64)}, {}, None),
    ("matmul_vjp", {"a": (2, 8, 64), "b": (64, 64), "d_c": (2, 8, 64)}, {}, None),
    ("matmul_vjp", {"a": (8, 64), "b": (2, 64, 64), "d_c": (2, 8, 64)}, {}, "^d_a: batch axes that are summed"),
    ("matmul_vjp", {"a": (64, 64), "b": (64, 9), "d_c": (64, 9)}, {}, "product of d_a: k of a and b is padded"),
    ("matmul_vjp", {"a": (64, 72), "b": (72, 64), "d_c": (64, 64)}, {}, "^in .* d_b: m of a is padded from 72 to 128$"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "shapes", "options", "words"), COPIED)
def test_what_xla_copies_is_said(op, shapes, options, words):
    arrays = {n: jnp.ones(s, _dtype(n, "bfloat16")) for n, s in shapes.items()}
    impl, call, tiling = resolved(op, {}, arrays, **options)
    said = impl.copies(call, tiling)
    if words is None:
        assert said is None
    else:
        assert said is not None and re.search(words, said), said
        assert f"  copied by JAX: {said}" in on_gpu(op).explain(**arrays, **options)


def test_an_interpreted_call_in_a_traced_function_is_refused():
    """The interpreter orders its steps by calls to the host that a lowering cannot announce."""
    softmax = on_gpu("softmax")
    for transformed in (jax.jit(softmax), jax.vmap(softmax), jax.grad(lambda x: softmax(x).sum())):
        with pytest.raises(UnsupportedError, match="variant 'gpu' calls the host in an order .* outside jit, grad and"):
            transformed(jnp.asarray(X))


@each_op
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 64, 65, 5000])
@pytest.mark.parametrize("n", [1, 128, 129, 2048, 16384, 100_000])
def test_every_call_has_a_tiling_that_serves_it(op, dtype, rows, n):
    spec = registry.find_spec(op)
    dims = {"batch": () if "m" in spec.dims else (rows,), "m": rows, "k": 200, "n": n, "shape": (rows, n)}
    if "kv_heads" in spec.dims:
        dims = {
            "batch": 2,
            "kv_heads": 1,
            "group": 3,
            "q_len": -(-rows // 128) * 128 if spec.is_vjp else rows,  # gradients of others are refused
            "kv_len": -(-rows // 128) * 128 if spec.is_vjp else 4096,
            "d": min(n, 256),
            "dv": min(8 + n // 2, 256),
            "tokens": rows,
            "kv_tokens": 4096,
            "sequences": 3,
            "pages": 40,
            "page_size": 16,
            "pages_each": 9,
        }
    array_of = frameworks()["jax"].abstract
    stored = {
        n: d for n, (_, d, _) in abstract.typical_signature(spec, dtype)["arrays"].items() if d in ("float32", "int32")
    }
    required = (a for a in spec.arrays if not a.optional)
    arrays = {a.name: array_of(shape_of(a.dims, dims), stored.get(a.name, dtype), None) for a in required}
    call = unchecked(spec, **arrays)
    call = call.replace(target=HOPPER, interpret=False, concrete=False)
    assert tilings.resolve(PALLAS.implementation(op, FAMILY), call, {}).tiling


def test_a_tilings_layout_holds_each_element_once():
    """Over all tilings of a row: what a thread holds, times the threads, is the block."""
    for row_warps in (1, 2, 4):
        for block_n in (128, 1024, 4096):
            x = np.ones((7, 1000), jnp.bfloat16)
            _, call, tiling = resolved("softmax", {"block_rows": 4, "block_n": block_n, "row_warps": row_warps},
                                          {"x": x})  # fmt: skip
            walk = row_walk.WarpRowWalk.over(call, tiling, 7, 1000)
            layout = walk.layout.to_mgpu()
            assert math.prod(layout.registers_shape(walk.block)) * layout.vector_length * 128 == math.prod(walk.block)


# --- compiled, with no GPU ---


@has_compiler
@each_op
@settings(max_examples=4)
@given(data=st.data())
def test_drawn_cases_compile_for_hopper(op, data):
    """The interpreter takes shapes that the compiler would refuse."""
    spec, subject = registry.find_spec(op), backend_subject(registry.find_spec(op), "pallas", "gpu", "cpu", None)
    case = data.draw(cases(spec, LIMITS, subject.tiles))
    arrays = {n: jnp.asarray(b.view()) for n, b in case.buffers(spec).items()}
    bound = pk.op(op).bind(**arrays, **case.options)
    if bound.degenerate:
        return
    named, _, _ = subject.tiling(case, bound)
    try:
        impl, call, tiling = resolved(op, named, arrays, **case.options)
    except UnsupportedError as e:
        assert subject.accepts(str(e)), e
        return
    assert not [line for kernel in kernels_of(impl, call, tiling) for line in read_early(kernel.assembly)]


@pytest.mark.parametrize("q_len", [9, 64, 100, 700])
def test_a_tile_of_queries_does_not_end_in_the_next_head(q_len, monkeypatch):
    """The engine that copies contiguous bytes does not know where an axis ends, as the interpreter does: it would write
    the last tile's lse over the next head's first queries."""
    written = {}

    def launch(*args, outputs, **kwargs):
        written.update(outputs)
        return {name: jnp.zeros(form.shape, form.dtype) for name, form in outputs.items()}

    arrays = {name: jnp.ones((1, q_len, 2, 64), jnp.bfloat16) for name in "qkv"}
    impl, call, tiling = resolved("attention", {}, arrays, return_lse=True)
    monkeypatch.setattr(attention, "launch", launch)
    _, lse, *_ = impl.run(call, tiling)
    rows = attention.plan_of(call, tiling).consumers * attention.QUERIES
    assert lse.shape == (1, 2, q_len) and written["lse"].shape[-1] % rows == 0


@has_compiler
@pytest.mark.parametrize("row_warps", [1, 2, 4])
def test_the_tallest_blocks_that_are_not_refused_compile(row_warps):
    arrays = {"x": jnp.ones((1, 1))}
    for block_rows in (256, 128, 64, 32):
        tiling = {"block_rows": block_rows, "block_n": 128, "row_warps": row_warps}
        try:
            found = resolved("softmax", tiling, arrays)
        except UnsupportedError:
            continue
        kernels_of(*found)
        return
    raise AssertionError("every block of 32 rows or more is refused")


@has_compiler
@pytest.mark.parametrize(
    "op, variant", [("attention", "gpu"), ("attention_vjp", "gpu"), ("attention_vjp", "unordered")]
)
def test_they_compile_where_jax_counts_in_64_bits(op, variant):
    """Nothing is masked here, so that extents are known and loops count as JAX does."""
    x = jnp.ones((1, 70, 1, 16), jnp.bfloat16)
    arrays = dict.fromkeys("qkv", x) | ({"o": x, "lse": jnp.ones((1, 1, 70)), "d_o": x} if op != "attention" else {})
    impl = PALLAS.implementation(op, next(f for f in PALLAS.families if f.name == variant))
    with jax.enable_x64(True):
        call = pk.op(op).bind(**arrays).replace(target=HOPPER, interpret=False, concrete=False)
        kernels_of(impl, call, tilings.resolve(impl, call, {}).tiling)


@has_compiler
@pytest.mark.parametrize("more", [{"is_causal": True}, {}], ids=str)
def test_where_buffers_lie_is_not_kept_in_memory(more, monkeypatch, tmp_path):
    """Compilers know a buffer's place before a loop, and spilled 390 to 870 bytes of such numbers for heads of 256. The
    branch for scores far from 0 takes 24 of the 36 that a causal mask's kernel of d_k spills."""
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    x, lse = jnp.zeros((1, 1024, 2, 256), jnp.bfloat16), jnp.zeros((1, 2, 1024))
    built = on_gpu("attention_vjp").lower(x, x, x, x, lse, x, target="sm_90", **more)
    assert built.ok and max(k.spills for k in built.kernels) <= 36, built


def unfenced(ptx: str) -> list[str]:
    """Reads of shared memory by threads after which a buffer is handed back with no fence between, as the code stands.
    Barriers alone do not order what copies write with what threads read; the interpreter does not see it where there
    are products, which are fences there."""
    read, found = "", []
    for line in ptx.splitlines():
        if "ld.shared" in line:
            read = line
        elif "fence.proxy.async.shared" in line:
            read = ""
        elif "mbarrier.arrive" in line and "expect_tx" not in line and read:
            found.append(read)
    return found


def read_early(ptx: str) -> list[str]:
    """What touches a sum of products before the wait for them, as the code stands: no register says what a wait is for,
    and compilers may move an addition before it."""
    groups, issued, found = [], set(), []
    for line in ptx.splitlines():
        if "wgmma.mma_async" in line:
            issued |= set(re.findall(r"%[rf]\d+", line[: line.index("}, ")]))
        elif "wgmma.commit_group" in line:
            groups, issued = [*groups, issued], set()
        elif waited := re.search(r"wgmma\.wait_group\S* (\d+)", line):
            groups = groups[max(len(groups) - int(waited[1]), 0) :]
        elif issued.union(*groups) & set(re.findall(r"%[rf]\d+", line)):
            found.append(line)
    return found


@has_compiler
@each_op
def test_what_it_takes_of_the_chip_is_told(op, monkeypatch, tmp_path):
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    spec = registry.find_spec(op)
    typical = abstract.typical_signature(spec, "bfloat16")["arrays"].items()
    arrays = {n: jnp.zeros(shape, dtype) for n, (shape, dtype, _) in typical}
    built = on_gpu(op).lower(**arrays, target="sm_90")
    assert built.ok, built.reason
    assert built.kernels
    for kernel in built.kernels:
        assert (kernel.name in op or kernel.name.startswith(op)) and 0 < kernel.registers <= 255
        assert kernel.spills <= SPILLED.get(op, 0)
        assert 0 <= kernel.on_chip["shared"] <= targets.find("sm_90").on_chip["shared"] and 0 < kernel.occupancy <= 1
        assert ".target sm_90a" in kernel.assembly and not unfenced(kernel.assembly) + read_early(kernel.assembly)
    multiplying = [kernel.name for kernel in built.kernels if "wgmma" in "".join(kernel.matrix)]
    assert bool(multiplying) == record(op).matrix_units, "products are wgmma's"


MANY_KEYS = {"batch": 1, "q_len": 512, "kv_heads": 1, "group": 2, "kv_len": 4096, "d": 64, "dv": 64}
FEW_QUERIES = {**MANY_KEYS, "q_len": 1}
ESTIMATED = [
    ("gpu", "softmax", {"shape": (64, 96)}, {"block_rows": 1, "block_n": 128, "row_warps": 4}),
    ("gpu", "softmax", {"shape": (64, 64)}, {"block_rows": 2, "block_n": 128, "row_warps": 2}),
    ("fused", "layernorm_vjp", {"batch": (640,), "n": 64}, {"block_n": 128, "ring": 3}),
    ("gpu", "matmul", {"m": 512, "n": 512, "k": 512}, {"block_m": 128, "block_n": 64, "beside": 3, "stages": 3}),
    ("gpu", "attention", MANY_KEYS, {"block_q": 128, "block_kv": 64, "stages": 8}),
    ("gpu", "attention", {**MANY_KEYS, "d": 80, "dv": 96}, {"block_q": 128, "block_kv": 64, "stages": 4}),
    ("decode", "attention", FEW_QUERIES, {"block_q": 64, "block_kv": 64, "stages": 8}),
    ("gpu", "attention_vjp", MANY_KEYS, {"block_q": 64, "block_kv": 64, "stages": 1}),
    ("gpu", "attention_vjp", {**MANY_KEYS, "dv": 128}, {"block_q": 64, "block_kv": 64, "stages": 3}),
    ("unordered", "attention_vjp", MANY_KEYS, {"stages": 4}),
]


@has_compiler
@pytest.mark.parametrize(("variant", "op", "dims", "tiling"), ESTIMATED)
def test_shared_memory_is_estimated_as_mosaic_takes_it(variant, op, dims, tiling, monkeypatch, tmp_path):
    """Never less, so that what is not refused fits, and not much more: barriers, and room to reduce across warps."""
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    spec, found = registry.find_spec(op), []

    def over_shared(needed, names, across_warps=True):
        found.append(needed + chip.BARRIER_BYTES + chip.REDUCTION_BYTES * across_warps)

    impl = PALLAS.implementation(op, next(f for f in PALLAS.declared if f.name == variant))
    form = abstract.named_signature(spec, "bfloat16", dims)
    call, used = abstract.abstract_call(spec, impl, form, targets.find("sm_90"), tiling)
    arrays = {name: x for name, x in call.arrays.items() if x is not None}
    for module in [m for m in sys.modules.values() if getattr(m, "over_shared", None) is chip.over_shared]:
        monkeypatch.setattr(module, "over_shared", over_shared)
    assert impl.supports(call, used) is None
    monkeypatch.undo()
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    more = {"return_lse": True} if op == "attention" else {}
    built = pk.op(op, backend="pallas", variant=variant, tiling=tiling).lower(**arrays, **more, target="sm_90")
    assert built.ok, built.reason
    taken = max(kernel.on_chip["shared"] for kernel in built.kernels)
    assert taken <= max(found) <= taken + chip.BARRIER_BYTES + chip.REDUCTION_BYTES


def test_a_plugin_that_is_not_there_is_named(monkeypatch):
    """Among others of JAX's plugins, and where there are none, which Python's search answers by an error."""
    monkeypatch.setitem(sys.modules, "jax_plugins", types.ModuleType("jax_plugins"))
    sys.modules["jax_plugins"].__path__ = []
    sys.modules["jax_plugins"].__spec__ = types.SimpleNamespace()
    monkeypatch.delitem(sys.modules, "jax_plugins.xla_cuda13", raising=False)
    assert "plugin for CUDA 13" in compiler.unavailable(targets.find("sm_90"))
    monkeypatch.delitem(sys.modules, "jax_plugins")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    assert "plugin for CUDA 13" in compiler.unavailable(targets.find("sm_90"))


def test_what_is_told_of_a_kernel_is_found_by_its_name(tmp_path):
    """Code and resources are numbered apart, in the order of compiling and of lowering."""
    names = "a_d_q_2.ptx", "a_0.ptx", "a_d_q_1.resources.txt", "a_0.resources.txt", "a_5.resources.txt", "a_3.ptx"
    told = {tmp_path / name for name in names}
    found = {p.name: compiler._resources_of(p, told).name for p in told if p.suffix == ".ptx"}
    assert found == {
        "a_d_q_2.ptx": "a_d_q_1.resources.txt",
        "a_0.ptx": "a_0.resources.txt",
        "a_3.ptx": "a_5.resources.txt",
    }


def test_bytes_that_a_warning_says_again_are_spilled_once(tmp_path):
    """In ptxas's words."""
    code = tmp_path / "a_0.ptx"
    code.write_text(".entry a_mosaic_gpu_kernel() .reqntid 384, 1, 1")
    code.with_suffix(".resources.txt").write_text("Resources(smem_scratch_bytes=1024, barrier_counts=Counter())")
    code.with_suffix(".ptxas").write_text("""\
ptxas warning : Registers are spilled to local memory in function 'a', 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Function properties for a
    16 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 16 bytes cumulative stack size, 1 bytes smem
""")
    kernel = compiler._read(code, code.with_suffix(".resources.txt"), targets.find("sm_90"))
    assert (kernel.spills, kernel.registers, kernel.on_chip) == (16, 168, {"shared": 1024})


@has_compiler
def test_a_kernel_is_the_same_program_wherever_in_a_process_it_is_lowered(monkeypatch):
    """Which is what JAX's persistent compilation cache knows it by; who has kernels told has them numbered too."""
    monkeypatch.delenv("MOSAIC_GPU_DUMP_TO", raising=False)
    spec = registry.find_spec("softmax")
    impl, hopper = PALLAS.implementation("softmax", FAMILY), targets.find("sm_90")
    found = abstract.abstract_call(spec, impl, abstract.typical_signature(spec, "bfloat16"), hopper, {})
    first, again = (compiler.lowered(impl, *found).as_text() for _ in range(2))
    assert "mosaic_gpu" in first and first == again


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_no_buffer_is_filled_while_an_earlier_tile_s_copy_of_it_is_on_its_way(count, slots):
    leaving = []  # buffers, from the first that was sent on: those that may not have been read yet
    for _ in range(4):
        for slot, may in chip.in_slots(count, slots):
            leaving = leaving[len(leaving) - may :]
            assert slot not in leaving and may < slots
            leaving.append(slot)


@pytest.mark.parametrize(
    ("name", "shapes", "tiling"),
    [
        pytest.param("matmul", {"a": (9, 8, 16), "b": (9, 16, 8)}, {"block_m": 64, "block_n": 64}, id="matmul"),
        pytest.param("attention", dict.fromkeys("qkv", (3, 40, 2, 64)), {}, id="attention"),
    ],
)
def test_a_block_whose_tiles_are_one_copy_each_waits_for_the_one_before(monkeypatch, name, shapes, tiling):
    """Its buffer is the same each time. On an H100 a batch of 131072 products had rows of a neighbour's in one."""
    waited, wait = [], matmul.plgpu.wait_smem_to_gmem
    monkeypatch.setattr(matmul.plgpu, "wait_smem_to_gmem", lambda n, **kw: (waited.append(n), wait(n, **kw))[1])
    arrays = {n: jnp.ones(shape, jnp.bfloat16) for n, shape in shapes.items()}
    on_gpu(name, **tiling)(**arrays)
    assert waited and not any(waited), waited


# --- on a GPU ---


@pytest.mark.skipif(
    HOPPER not in [frameworks()["jax"].target(d) for d in jax.devices()], reason="needs a Hopper GPU that JAX sees"
)
@pytest.mark.parametrize("extents", [(300, 264, 200), (1000, 3000, 520), (333, 261, 203)])
def test_an_element_of_a_product_has_the_same_bits_in_every_tiling_and_company(extents):
    """Which is why the tile may follow rows and the batch."""
    m, n, k = extents
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((m, k), (k, n)))
    whole = on_gpu("matmul")(a, b)
    for rows in (1, 17, 64, 65, 150):
        assert (on_gpu("matmul")(a[7 : 7 + rows], b) == whole[7 : 7 + rows]).all(), rows
    assert (on_gpu("matmul")(jnp.stack([a, a]), jnp.stack([b, b]))[1] == whole).all()
    for block_m, block_n, stages in ((64, 64, 4), (64, 128, 3), (128, 128, 2), (256, 128, 3), (64, 256, 4)):
        tiled = on_gpu("matmul", block_m=block_m, block_n=block_n, stages=stages, beside=1)
        assert (tiled(a, b) == whole).all(), (block_m, block_n, stages)
    for pair in (0, 1, 2):
        tiled = on_gpu("matmul", block_m=128, block_n=64, stages=4, beside=3, pair=pair)
        assert (tiled(a, b) == whole).all(), pair


@pytest.mark.skipif(
    HOPPER not in [frameworks()["jax"].target(d) for d in jax.devices()], reason="needs a Hopper GPU that JAX sees"
)
def test_tiles_that_follow_each_other_at_once_do_not_meet_in_shared_memory():
    """Each has one copy to send, and little to wait for before it."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((131072, 2, 8), (131072, 8, 8)))
    exact = jnp.einsum("bmk,bkn->bmn", a, b, preferred_element_type=jnp.float32)
    for _ in range(5):
        assert jnp.allclose(on_gpu("matmul")(a, b).astype(jnp.float32), exact, rtol=2**-7, atol=2**-7)
    q, k, v = (jnp.asarray(rng.standard_normal((4096, 64, 2, 64)), jnp.bfloat16) for _ in range(3))
    first = on_gpu("attention")(q, k, v)
    assert (first[:8] == on_gpu("attention")(q[:8], k[:8], v[:8])).all()
    assert all((on_gpu("attention")(q, k, v) == first).all() for _ in range(5))
