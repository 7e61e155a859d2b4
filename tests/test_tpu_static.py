"""What is known of a TPU kernel before it runs: cycles and bytes by its code and grid, the VMEM that it may have, even
blocks, and which chip a traced call is lowered for."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from maint import store
from portakern import results, testing
from portakern.api import op
from portakern.backends.pallas.configs import AttentionGradientsConfig, ProductConfig, RowsConfig, TilesConfig
from portakern.backends.pallas.lib.band import Band, dealt
from portakern.backends.pallas.lib.blocks import block, even_block, quotient
from portakern.backends.pallas.lib.mosaic_tpu import chip as tpu_chip
from portakern.backends.pallas.tpu.toolchain import static
from portakern.core import registry, targets, tilings
from portakern.core.framework import frameworks
from portakern.core.machine_code import Kernel
from portakern.core.targets import Target
from portakern.errors import UnsupportedError
from portakern.frameworks.jax import tracing
from portakern.tools.compile.abstract import bind_signature, named_signature, typical_signature
from portakern.tools.compile.build import Build
from tests.ops.record import dtype_for

CODE = """= control target key start
LH: loop header
= control target key end
     0   :  { a }
   0x1 LB: > { b } /* Start region 9 */
   0x2   : > { sbr.rel (%p1) target = $region20 }
   0x3   : > { the copy of a window }
   0x4 PF: > { c } /* Start/End empty region 20 */
   0x5   : > { %1 = sbr.rel (%p2) target = $region28 }
   0x6   : > { d }
   0x7   : > { sbr.rel (!%p3) target = $region40 }
   0x8   : > { e }
   0x9   : > { f }
   0xa PF: > { g } /* Start/End empty region 40 */
   0xb   : > { sbr.rel (!%p4) target = $region44 }
   0xc   : > { h }
   0xd PF: > { i } /* Start/End empty region 44 */
   0xe   : > { j }
   0xf PF: > { k } /* Start/End empty region 28 */
  0x10   :  { sbr.rel (!%p5) target = $region9 }
"""
"""A loop whose body is guarded, with two branches of the kernel's and one of the pipeline's."""


def tpu(op_name):
    """The op's implementation; a newer JAX has one for GPUs beside it."""
    b = registry.backend("pallas")
    return b.implementation(op_name, next(f for f in b.families if "tpu" in f.platforms))


def test_regions_of_code():
    whole = static.regions(CODE)
    assert [r.bundles for r in whole.inner] == [1, 6] and [r.bundles for r in whole.inner[1].inner] == [2, 1]
    assert static._all_bundles(whole) == 17


def condition(steps, work=1, flops=0, *inner):
    return static.Condition(steps, work, flops, inner)


@pytest.mark.parametrize(
    ("body", "inside"),
    [
        # 17 bundles: 3 in branches that 4 and 1 of 8 steps take, the rest straight
        (condition(8, 9, 0, condition(4), condition(1)), 8 * 14 + 4 * 2 + 1),
        # one that is never taken has no region, and so has one that is always taken
        (condition(8, 9, 0, condition(0), condition(4), condition(1)), 8 * 14 + 4 * 2 + 1),
        (condition(8, 9, 0, condition(4), condition(8, 50), condition(1, 9)), None),
        # products take longer than their bundles
        (condition(8, 9, 1000, condition(4), condition(1)), 8 * 100 + 4 * 2 + 1),
    ],
)
def test_cycles_are_bundles_times_trips(body, inside):
    walk = static.GridWalk("kernel", 8, body, moved=0, first=600, program="")
    found = static.cycles(walk, static.regions(CODE), flops_a_cycle=10, bytes_a_cycle=100)
    if inside is not None:
        assert found == inside + 8 * static.STEP + 6


@pytest.mark.parametrize(
    ("conditions", "regions", "pairs"),
    [
        # one that the compiler knows to be never taken, and a region of the compiler's own behind that of the other
        ([(0, 5_700_000), (16, 10_300_000)], [1272, 28], [(16, 1272)]),
        # neither is known
        ([(0, 4_790_000), (16, 7_660_000)], [978, 1096], [(0, 978), (16, 1096)]),
        # the work of one that is always taken stands in the straight code
        ([(16, 1_500_000), (4, 600_000)], [90], [(4, 90)]),
    ],
)
def test_regions_belong_to_conditions_of_their_size(conditions, regions, pairs):
    around = condition(16, 9, 0, *(condition(*c) for c in conditions))
    code = static.Region(300, tuple(static.Region(r, ()) for r in regions))
    found, _ = static._matched(around, code, flops_a_cycle=1000)
    assert [(c.steps, r.bundles) for c, r in found] == pairs


def test_a_kernel_is_walked_by_its_grid():
    def kernel(x, y):
        step = pl.program_id(1)

        @pl.when(step == 0)
        def start():
            y[...] = jnp.zeros_like(y)

        @pl.when(quotient(step * 4 + 3, 8) >= 1)
        def add():
            y[...] += jnp.dot(x[...], x[...].T, precision="highest")

    def call(x):
        return pl.pallas_call(
            kernel,
            grid=(2, 4),
            in_specs=[pl.BlockSpec((8, 128), lambda i, j: (i * 4 + j, 0))],
            out_specs=pl.BlockSpec((8, 8), lambda i, j: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((16, 8), jnp.float32),
            name="some_kernel",
        )(x)

    (walk,) = static.walks_of(jax.make_jaxpr(call)(np.zeros((64, 128), np.float32)).jaxpr)
    assert (walk.name, walk.steps) == ("some_kernel", 8)
    assert [c.steps for c in walk.body.inner] == [2, 4], "the first of 4 steps; 3, 7, 11, 15 over 8: the last two"
    assert walk.body.inner[1].flops == 2 * 8 * 8 * 128 * static.FLOAT32_PASSES
    assert walk.moved == 8 * 8 * 128 * 4 + 2 * 8 * 8 * 4, "a window that stays is not moved again"


def test_a_grid_that_is_data_is_not_followed():
    """How many steps it has is known on the device alone: no cycles are counted."""

    def call(x, steps):
        return pl.pallas_call(
            lambda x, y: None,
            grid=(2, steps),
            in_specs=[pl.BlockSpec((8, 128), lambda i, j: (i, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i, j: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
        )(x)

    x = np.zeros((16, 128), np.float32)
    assert static.walks_of(jax.make_jaxpr(call)(x, np.int32(3)).jaxpr) == []
    assert len(static.walks_of(jax.make_jaxpr(lambda x: call(x, 3))(x).jaxpr)) == 1


def in_blocks(kernel, grid, rows, out_rows, block=(16, 256)):
    """A call of a kernel over blocks of an array of so many rows of 300."""

    def call(x):
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[pl.BlockSpec(block, lambda i: (i, 1))],
            out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((out_rows, 128), jnp.float32),
        )(x)

    (walk,) = static.walks_of(jax.make_jaxpr(call)(np.zeros((rows, 300), np.float32)).jaxpr)
    return walk


def test_a_window_beyond_an_array_s_end_is_moved_as_far_as_that():
    walk = in_blocks(lambda x, y: None, (3,), 35, 8)
    out, lanes = 8 * 128 * 4, 128  # of the second 256 columns 44 are there: one native tile
    assert walk.moved == (16 + 16 + 8) * lanes * 4 + out, "of the last rows three are there: one native tile"
    assert walk.first == 16 * lanes * 4 + out


def test_a_loop_s_code_counts_as_often_as_it_runs():
    def kernel(x, y):
        def add(i, sums):
            return sums + x[pl.ds(i * 8, 8), :128]

        y[...] = jax.lax.fori_loop(0, 4, add, jnp.zeros((8, 128), jnp.float32))
        y[...] += jax.lax.fori_loop(0, 6, add, jnp.zeros((8, 128), jnp.float32), unroll=3)
        y[...] += jax.lax.fori_loop(0, 2, add, jnp.zeros((8, 128), jnp.float32), unroll=2)  # laid out whole

    assert in_blocks(kernel, (3,), 35, 8).body.loops == (4, 2)
    code = """\
 0x1   : { } /* Start region 1 */
 0x2 LB: > { }
 0x3   : > { }
 0x4 LB: >> { }
 0x5   : >> { }
 0x6   : > { }
 0x7 LB: >> { }
 0x8   : >> { }
 0x9   : >> { }
 0xa   : { }
"""
    whole = static.regions(code)
    assert whole.bundles == 11 and whole.loops == ((1, 8), (2, 2), (2, 3))
    body = static.Condition(8, 9, 0, (), (4, 2))
    walk = static.GridWalk("kernel", 8, body, moved=0, first=0, program="")
    issued = static.cycles(walk, whole, flops_a_cycle=10, bytes_a_cycle=100)
    assert issued == 8 * (static.STEP + 11 + 3 * 2 + 1 * 3)


def test_programs_that_differ_in_extents_are_the_same():
    spec, impl = registry.find_spec("matmul"), tpu("matmul")
    tiling = ProductConfig(block_m=128, block_n=128, block_k=128)

    def program(m, k):
        form = typical_signature(spec, "float32", {"m": m, "n": 256, "k": k})
        call = bind_signature(spec, form, frameworks()["jax"], Target("tpu", "v5e"))

        def run(a, b):
            return impl.run(call.replace(arrays={"a": a, "b": b}), tiling)

        (walk,) = static.walks_of(jax.make_jaxpr(run)(call.arrays["a"], call.arrays["b"]).jaxpr)
        return walk.program

    assert program(256, 256) == program(1024, 384) != program(256, 300), "only a k that is cut pays for a mask"


# --------------------------------------------------------------------------------------------------- the chip's limits


def matmul_call(arch, m=4096, n=4096, k=4096, dtype="bfloat16"):
    spec = registry.find_spec("matmul")
    form = typical_signature(spec, dtype, {"m": m, "n": n, "k": k})
    return bind_signature(spec, form, frameworks()["jax"], Target("tpu", arch))


def matmul():
    return tpu("matmul")


CUBE = ProductConfig(block_m=1024, block_n=1024, block_k=1024)


@pytest.mark.parametrize(
    ("arch", "fits"), [("", False), ("v4", False), ("v5e", True), ("v5p", True), ("v6e", True), ("v7x", True)]
)
def test_vmem_is_the_chips(arch, fits):
    """1024 x 1024 x 1024 takes 16 MiB of blocks and up to 18.8 in all: libtpu refuses it where there are 16."""
    reason = matmul().supports(matmul_call(arch), CUBE)
    assert (reason is None) == fits
    assert fits or "needs about 19.6 MiB of VMEM" in reason


@pytest.mark.parametrize(
    ("arch", "tiles", "fits"),
    [
        ("v6e", (1024, 1024, 4096), False),  # 117.7 MiB, as libtpu says
        ("v6e", (512, 1024, 4096), True),
        ("v5e", (1024, 2048, 2048), False),
        ("v6e", (2048, 2048, 1024), False),  # 106.4 MiB of 1792 columns
        ("v6e", (2048, 512, 2048), False),  # 118.4 MiB
        ("v6e", (2048, 512, 1024), True),  # 66.4 MiB
        ("v4", (256, 512, 1024), True),
    ],
)
def test_parts_of_float32_operands_take_vmem(arch, tiles, fits):
    """Of libtpu's own verdicts."""
    tiling = ProductConfig(**dict(zip(CUBE, tiles, strict=True)))
    assert (matmul().supports(matmul_call(arch, dtype="float32"), tiling) is None) == fits


@pytest.mark.parametrize(
    ("tiles", "fits"),
    [((512, 256, 4096), False), ((1024, 256, 2048), False), ((256, 512, 4096), True), ((512, 128, 4096), True)],
)
def test_tall_blocks_of_a_beside_narrow_ones_of_b_take_vmem(tiles, fits):
    """Of libtpu's own verdicts: 16.7 and 16.05 MiB, of blocks of 13 and 12; v4 has 16."""
    reason = matmul().supports(matmul_call("v4"), ProductConfig(**dict(zip(CUBE, tiles, strict=True))))
    assert (reason is None) == fits


@pytest.mark.parametrize(
    ("window", "causal", "keys"),
    [
        (None, False, 1024),
        (None, True, 1024),
        ((1023, 0), False, 512),
        ((1023, None), True, 512),
        ((None, 5), False, 1024),
    ],
)
def test_attention_takes_as_many_keys_at_a_time_as_windows_leave(window, causal, keys):
    spec = registry.find_spec("attention")
    dims = {"d": 128, "dv": 128, "q_len": 4096, "kv_len": 4096, "window": window, "is_causal": causal}
    impl = tpu("attention")
    call = bind_signature(spec, typical_signature(spec, "bfloat16", dims), frameworks()["jax"], Target("tpu", "v6e"))
    assert tilings.default(impl, call).tiling == {"block_q": 1024, "block_kv": keys}


def test_steps_of_many_narrow_blocks_of_keys_are_short():
    """32 blocks of 16 keys a step took 16.5 MiB of v4's 16, and 128 of 32 keys 19."""
    from portakern.backends.pallas.tpu.attention import parts

    spec = registry.find_spec("attention")
    call = bind_signature(spec, typical_signature(spec, "float32", {}), frameworks()["jax"], Target("tpu", "v4"))
    assert [parts(call, *tiles) for tiles in ((512, 16), (64, 32), (16, 512))] == [4, 32, 8]


def test_parts_of_float32_weights_take_vmem():
    """Four blocks of 1024 keys a step took 18.4 MiB of v4's 16."""
    from portakern.backends.pallas.tpu.attention import parts

    spec = registry.find_spec("attention")
    dims = {"group": 1, "d": 108, "dv": 128, "q_len": 4096, "kv_len": 4096}
    call = bind_signature(spec, typical_signature(spec, "float32", dims), frameworks()["jax"], Target("tpu", "v4"))
    assert parts(call, 512, 1024) == 2


def test_a_window_that_hides_nothing_is_none():
    """A query's bits hang on how many keys are taken at a time."""
    from portakern.backends.pallas.tpu.attention import EVERY, reach

    spec = registry.find_spec("attention")
    for length, window, found in ((600, (1023, 0), EVERY), (1024, (1023, 0), EVERY), (1025, (1023, 0), 1024)):
        dims = {"q_len": length, "kv_len": length, "window": window}
        call = bind_signature(
            spec, typical_signature(spec, "bfloat16", dims), frameworks()["jax"], Target("tpu", "v6e")
        )
        assert reach(call) == found


def test_what_a_chip_has_is_the_end():
    reason = matmul().supports(matmul_call("v5p"), ProductConfig(**dict.fromkeys(CUBE, 2048)))
    assert "v5p lets a kernel have 48 MiB" in reason


def test_more_is_asked_for_where_it_is_needed(monkeypatch):
    asked = []

    def record(*args, compiler_params, **more):
        asked.append(compiler_params.vmem_limit_bytes)
        raise UnsupportedError("enough")

    monkeypatch.setattr(tpu_chip.blocks, "launch", record)
    small, wide = ProductConfig(**dict.fromkeys(CUBE, 512)), ProductConfig(block_m=512, block_n=512, block_k=1024)
    cases = [("", small, "bfloat16"), ("v5e", small, "bfloat16"), ("v5e", CUBE, "bfloat16"), ("v6e", small, "bfloat16")]
    # of 13.8 MiB, and libtpu needs more than 16 on v5e, which keeps the parts of float32 operands
    cases += [("v6e", CUBE, "bfloat16"), ("v5e", wide, "float32"), ("v6e", wide, "float32")]
    # 14.4 MiB by the count of blocks: masks of ragged ones come to them
    cases += [("v5e", ProductConfig(block_m=1024, block_n=1024, block_k=512), "bfloat16")]
    for arch, tiling, dtype in cases:
        call = matmul_call(arch, dtype=dtype)
        with pytest.raises(UnsupportedError, match="enough"):
            jax.eval_shape(
                lambda a, b, call=call, tiling=tiling: matmul().fn(call.replace(arrays={"a": a, "b": b}), tiling),
                *call.arrays.values(),
            )
    assert asked == [None, None, 96 << 20, None, None, 96 << 20, None, 96 << 20], "v6e grants 32 MiB unasked"


# ------------------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize(
    ("extent", "tile", "grain", "block"),
    [(2304, 1024, 128, 768), (4096, 1024, 128, 1024), (100, 1024, 128, 128), (1025, 1024, 16, 528), (1, 16, 16, 16)],
)
def test_an_extent_is_cut_evenly(extent, tile, grain, block):
    assert even_block(extent, tile, grain) == block <= max(tile, grain)


@pytest.mark.parametrize(
    ("extent", "tile", "grain", "found"), [(53, 64, 128, 128), (300, 64, 16, 64), (1, 16, 8, 8), (130, 256, 128, 256)]
)
def test_a_tile_that_covers_its_extent_is_on_the_grid(extent, tile, grain, found):
    assert block(extent, tile, grain) == found


@pytest.mark.parametrize("given", [("bias",), ("q_segment_ids", "kv_segment_ids")])
@pytest.mark.parametrize("name", ["attention", "attention_vjp"])
def test_small_tiles_of_short_extents_are_lowered(name, given):
    """Masks have keys along lanes, where a block of 64 for 53 of them is neither all nor a multiple of 128."""
    spec, impl = registry.find_spec(name), tpu(name)
    dims = {"batch": 2, "kv_heads": 1, "group": 2, "d": 64, "dv": 64, "q_len": 300, "kv_len": 53}
    form = typical_signature(spec, "float32", dims | dict.fromkeys(given, True))
    call = bind_signature(spec, form, frameworks()["jax"], Target("tpu", "v5e"))
    tiling = tilings.resolve(impl, call, {}).tiling.replace(block_kv=64)
    assert impl.supports(call, tiling) is None
    names = [n for n, a in call.arrays.items() if a is not None]

    def run(*arrays):
        out = impl.run(call.replace(arrays=call.arrays | dict(zip(names, arrays, strict=True))), tiling)
        return [o for o in out if o is not None]

    jax.jit(run).trace(*(call.arrays[n] for n in names)).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize(("m", "few"), [(1, True), (4, True), (8, False)])
@pytest.mark.parametrize("depth", [128, 1024])
def test_few_rows_of_a_ragged_k_are_masked_in_float32(m, few, depth):
    """Mosaic chooses between 16-bit elements of an array of at most 4 rows nowhere: "Not implemented: Sublane
    broadcast"."""
    call, tiling = matmul_call("v5e", m, 256, 576), ProductConfig(block_m=256, block_n=256, block_k=depth)
    text = str(
        jax.make_jaxpr(lambda a, b: tpu("matmul").fn(call.replace(arrays={"a": a, "b": b}), tiling))(
            *call.arrays.values()
        )
    )
    assert ("f32[16" in " ".join(line for line in text.splitlines() if "select_n" in line)) == few


@pytest.mark.parametrize(("n", "few"), [(1, True), (4, True), (8, False)])
def test_few_columns_of_a_ragged_k_are_masked_in_float32(n, few):
    """XLA keeps such a b column by column, and the kernel reads it as n rows."""
    call, tiling = matmul_call("v6e", 256, n, 3254), ProductConfig(block_m=256, block_n=128, block_k=4096)
    text = str(
        jax.make_jaxpr(lambda a, b: tpu("matmul").fn(call.replace(arrays={"a": a, "b": b}), tiling))(
            *call.arrays.values()
        )
    )
    assert ("f32[128" in " ".join(line for line in text.splitlines() if "select_n" in line)) == few


def of_whole(jaxpr):
    """A program, and all within it."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from of_whole(inner)


@pytest.mark.parametrize("given", ["bias", "residual"])
def test_what_follows_a_product_of_float32_is_added_to_sums_that_lie_in_vmem(given):
    """Mosaic makes of a product and what is added to it one that begins there, and rounds it with every pass."""
    dims = {"batch": (256,), "n": 256, "k": 512} | {name: name == given for name in ("bias", "residual")}
    form = typical_signature(registry.find_spec("linear"), "float32", dims | {"activation": "none"})
    call = bind_signature(registry.find_spec("linear"), form, frameworks()["jax"], Target("tpu", "v5e"))
    arrays = {n: a for n, a in call.arrays.items() if a is not None}
    tiling = tilings.resolve(tpu("linear"), call, {}).tiling

    def run(arrays):
        return tpu("linear").fn(call.replace(arrays=call.arrays | arrays), tiling)[0]

    added = 0
    for jaxpr in of_whole(jax.make_jaxpr(run)(arrays).jaxpr):
        made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        for eqn in jaxpr.eqns:
            terms = {made[v].primitive.name for v in eqn.invars if not hasattr(v, "val") and v in made}
            if eqn.primitive.name == "add" and eqn.outvars[0].aval.shape == (256, 256):
                added += 1
                assert "dot_general" not in terms, terms
    assert added == 1


@pytest.mark.parametrize(("length", "causal", "rows"), [(4000, True, 1024), (4000, False, 1008), (1100, True, 560)])
def test_blocks_of_rows_meet_a_band_s_edge_in_corners(length, causal, rows):
    """Where that costs few rows more than an even cut. v6e issues 44.5k cycles for 49.2k of 1008 rows a block."""
    from portakern.backends.pallas.tpu import attention as module

    spec = registry.find_spec("attention")
    dims = {"kv_heads": 1, "group": 1, "d": 128, "dv": 128, "q_len": length, "kv_len": length, "is_causal": causal}
    call = bind_signature(spec, typical_signature(spec, "bfloat16", dims), frameworks()["jax"], Target("tpu", "v6e"))
    assert module.blocks(call, TilesConfig(block_q=1024, block_kv=512))[0] == rows


@pytest.mark.parametrize("b", [1, 2, 8, 512, 3, 12])
def test_a_quotient_by_a_power_of_two_is_a_shift(b):
    a = jnp.arange(0, 70, dtype=jnp.int32)
    assert (np.asarray(quotient(a, b)) == np.arange(70) // b).all() and quotient(a, b).dtype == jnp.int32
    text = str(jax.make_jaxpr(lambda a: quotient(a, b))(a))
    assert ("shift_right_logical" in text) == (b & (b - 1) == 0)
    assert quotient(13, b) == 13 // b


@pytest.mark.parametrize("arch", ["", "v4", "v5e", "v5p", "v6e", "v7x"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (300, 17), (16384, 1000), (128, 65536)])
def test_the_formula_of_products_is_legal_and_cuts_k_alike_for_any_rows(arch, n, k):
    calls = [matmul_call(arch, m, n, k) for m in (1, 77, 700, 8192)]
    chosen = [tilings.shipped(matmul(), call) for call in calls]
    assert len({tiling["block_k"] for tiling in chosen}) == 1, "a row's bits would depend on how many there are"
    (default,) = {tuple(matmul().tiling(call).items()) for call in calls}
    for call, tiling in zip(calls, chosen, strict=True):
        assert (
            matmul().supports(call, tiling) is None and matmul().supports(call, ProductConfig(**dict(default))) is None
        )


@pytest.mark.parametrize(
    ("m", "k", "n", "blocks"),
    [
        (384, 4064, 448, (512, 512, 1024)),  # 256 x 512 x 4096 waits for its windows: 11.5k cycles for 8.5k
        (704, 3176, 1989, (1024, 512, 4096)),
        (5056, 380, 6080, (2048, 2048, 512)),
        (4096, 4096, 4096, (1024, 1024, 4096)),
    ],
)
def test_a_product_s_blocks_follow_its_rows(m, k, n, blocks):
    call = matmul_call("v6e", m, n, k)
    assert tuple(tilings.default(matmul(), call).tiling.values()) == blocks
    named = ProductConfig(**dict(zip(CUBE, (256, 256, 256), strict=True)))
    assert matmul().fit(call, named) == named, "what a user names stays"
    default = matmul().tiling(call)
    assert matmul().fit(call.replace(interpret=True), default) == default, "on a host the order of sums follows shapes"


def test_rows_of_a_batch_that_share_b_are_one_matrix_for_memory_too():
    """They are in the kernel: blocks of 2048 rows, not of 64."""
    spec, tiling = registry.find_spec("matmul"), ProductConfig(block_m=2048, block_n=2048, block_k=4096)
    form = typical_signature(spec, "bfloat16", {"batch": (64,), "m": 64, "n": 4096, "k": 4096})
    apart = bind_signature(spec, form, frameworks()["jax"], Target("tpu", "v6e"))
    assert matmul().supports(apart, tiling) is None
    (_, *matrix), dtype, strides = form["arrays"]["b"][0], *form["arrays"]["b"][1:]
    form["arrays"]["b"] = [matrix, dtype, strides]
    shared = bind_signature(spec, form, frameworks()["jax"], Target("tpu", "v6e"))
    assert "choose smaller block_m" in matmul().supports(shared, tiling)


# ------------------------------------------------------------------------------------------------- lowered for a chip


def test_a_call_is_lowered_for_this_process_own_chip(monkeypatch):
    chips = [SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")] * 2
    assert tracing._target("tpu") == Target("tpu"), "there is none here"
    monkeypatch.setattr(jax, "local_devices", lambda: chips)
    assert tracing._target("tpu") == Target("tpu", "v6e") and tracing._target("cuda") == Target("cuda")
    assert targets.find("v6e").scoped["vmem"] == 32 << 20


@pytest.mark.parametrize("scale", [1e30, 2e38, 2.5e38, 3.3e38])
def test_a_scale_whose_product_with_log2_e_overflows(scale):
    q, k = jnp.zeros((1, 4, 1, 16)), jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 1, 16)), jnp.float32)
    o = op("attention", backend="pallas")(q, k, k, scale=scale)
    np.testing.assert_allclose(o, np.broadcast_to(k.mean(1, keepdims=True), o.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize(("first", "last"), [(None, None), (None, 2), (-3, 1), (-2, None), (-40, -30)])
def test_a_band_with_several_rows_a_query(heads, first, last):
    queries, kv_len, block_q, block_kv = 10, 21, 16, 8
    band = Band(first, last, kv_len, block_q, block_kv, heads)
    rows = queries * heads
    offset = np.arange(kv_len)[None, :] - (np.arange(rows) // heads)[:, None]
    seen = np.ones((rows, kv_len), bool)
    seen &= offset >= first if first is not None else True
    seen &= offset <= last if last is not None else True
    blocks = -(-rows // block_q)
    for i in range(blocks):
        mine = seen[i * block_q : (i + 1) * block_q]
        low, high = band.span(i)
        columns = np.flatnonzero(mine.any(0)) // block_kv
        assert not len(columns) or (low <= columns.min() and columns.max() <= high)
        assert high - low < band.steps()
        for j in range(-(-kv_len // block_kv)):
            there = mine[:, j * block_kv : (j + 1) * block_kv]
            allowed = band.allowed(jnp.int32(i), jnp.int32(j))
            allowed = np.ones((block_q, block_kv), bool) if allowed is None else np.asarray(allowed)
            np.testing.assert_array_equal(allowed[: there.shape[0], : there.shape[1]], there)
            if bool(band.inside(i, j)):
                assert there.all() and there.shape[1] == block_kv
            small = band._replace(block_kv=4)
            halves = [small.allowed(jnp.int32(i), jnp.int32(2 * j + half)) for half in (0, 1)]
            if halves[0] is not None:
                np.testing.assert_array_equal(np.concatenate(halves, 1), allowed)
            if last is not None and last <= kv_len - queries:
                closed = np.asarray(band.closing(queries).allowed(jnp.int32(i), jnp.int32(j)))
                np.testing.assert_array_equal(closed[: there.shape[0], : there.shape[1]], there)
                assert not closed[: there.shape[0], there.shape[1] :].any(), "it hides what lies beyond the last key"
    assert band.closing(queries).closed == (last is not None and last <= kv_len - queries)


def walk_of_product(arch, m, k, n, blocks):
    """The kernel of a bfloat16 product, with the two cores of v5p, and its program."""
    call, tiling = matmul_call(arch, m, n, k), ProductConfig(**dict(zip(CUBE, blocks, strict=True)))
    jaxpr = jax.make_jaxpr(lambda a, b: matmul().fn(call.replace(arrays={"a": a, "b": b}), tiling)[0])(
        call.arrays["a"], call.arrays["b"]
    ).jaxpr
    (walk,) = static.walks_of(jaxpr, cores=2 if arch == "v5p" else 1)
    return walk, jaxpr


@pytest.mark.parametrize(
    ("k", "n", "turned"),
    [(4096, 3000, True), (256, 50257, True), (380, 6080, True), (4096, 4096, False), (300, 128, False)],
)
def test_a_product_reads_b_as_xla_keeps_it(k, n, turned):
    """Of padding to 8 x 128: asked of libtpu, which lays 4096 x 3000 out as {0,1} and 300 x 128 as {1,0}."""
    _, jaxpr = walk_of_product("v6e", 256, k, n, (256, 512, 512))
    assert ("transpose" in [eqn.primitive.name for eqn in jaxpr.eqns]) == turned


@pytest.mark.parametrize(
    ("m", "n", "blocks", "reads"),
    [
        (1024, 512, (256, 512, 1024), (1, 1)),
        (512, 1024, (512, 256, 1024), (1, 1)),
        (1024, 512, (256, 256, 1024), (2, 1)),
    ],
)
def test_the_operand_of_the_outer_axis_is_read_once(m, n, blocks, reads):
    """How often a and b are read; of the last grid blocks of n come first, and b, of half the bytes, would be read four
    times otherwise."""
    walk, _ = walk_of_product("v6e", m, 1024, n, blocks)
    assert walk.moved == 2 * (reads[0] * m * 1024 + reads[1] * 1024 * n + m * n)


@pytest.mark.parametrize(
    ("m", "n", "blocks", "steps"),
    [
        (2048, 2048, (512, 512, 2048), [8, 8]),  # 4 and 4 blocks
        (1536, 2048, (512, 512, 2048), [6, 6]),  # 3 and 4: those of n are shared
        (1536, 1536, (512, 512, 2048), [6, 6]),  # 3 and 3: 4 and 3
        (384, 256, (512, 512, 2048), [1, 1]),
        (16, 128, (512, 512, 2048), [1]),  # rows of one register
    ],
)
def test_two_cores_get_as_many_blocks_of_a_product(m, n, blocks, steps):
    walk, _ = walk_of_product("v5p", m, 2048, n, blocks)
    assert [one.steps for one in (walk, *walk.beside)] == steps


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("size", "k", "start"), [(512, 300, 0), (512, 900, 512), (128, 100, 0), (256, 512, 256)])
def test_only_what_lies_beyond_k_is_0(axis, size, k, start):
    from portakern.backends.pallas.tpu.matmul import within_k

    x = np.ones((size, 8), np.float32)
    x[max(k - start, 0) :] = np.nan
    expected = np.where(np.arange(start, start + size)[:, None] < k, 1.0, 0.0) + np.zeros((1, 8))
    found = within_k(jnp.asarray(np.moveaxis(x, 0, axis)), axis, start, k)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(found), axis, 0), expected)


def test_a_skipped_step_has_the_next_row_block_s_first_blocks_resident():
    def resident(band, place, order=lambda place: place):
        steps = range(band.steps())
        return [tuple(map(int, band.ahead(jnp.int32(place), jnp.int32(s), 4, order))) for s in steps]

    band = Band(None, 0, 32, 8, 8)
    assert resident(band, 0) == [(0, 0), (1, 0), (1, 0), (1, 0)]
    assert resident(band, 2) == [(2, 0), (2, 1), (2, 2), (3, 0)]
    assert resident(band, 3) == [(3, 0), (3, 1), (3, 2), (3, 3)]
    assert resident(Band(-7, 0, 32, 8, 8), 0) == [(0, 0), (1, 0), (1, 0)]
    dealt_out = partial(dealt, blocks=4)  # 1, 2, 0, 3
    assert resident(Band(-7, None, 32, 8, 8), 1, dealt_out) == [(2, 1), (2, 2), (2, 3), (0, 0)]
    assert resident(band, 2, dealt_out) == [(0, 0), (3, 0), (3, 0), (3, 0)]


@pytest.mark.parametrize("blocks", range(1, 34))
def test_two_cores_are_dealt_as_much_of_a_band_that_grows(blocks):
    """As many blocks as they have places, each block once, each core's in rising order."""
    order = [int(dealt(jnp.int32(place), blocks)) for place in range(blocks)]
    shares = order[: -(-blocks // 2)], order[-(-blocks // 2) :]
    assert sorted(order) == list(range(blocks)) and all(share == sorted(share) for share in shares)
    work = [sum(block + 1 for block in share) for share in shares]
    assert abs(work[0] - work[1]) <= (1 if blocks > 1 else blocks)


@pytest.mark.parametrize(
    ("arch", "options", "batch", "shares"),
    [
        ("v5p", {"is_causal": True}, 1, [5, 5]),
        ("v5p", {"is_causal": True, "q_len": 1536, "kv_len": 1536}, 1, [3, 3]),
        ("v5p", {"is_causal": True}, 2, [10, 10]),
        ("v5p", {}, 1, [4, 4]),
        ("v5e", {"is_causal": True}, 1, [10]),
    ],
)
def test_attention_gives_both_cores_as_many_blocks_of_keys(arch, options, batch, shares):
    """How many steps of each core see keys: by the branches of the kernel's body, of which one starts a row block."""
    from portakern.backends.pallas.tpu.toolchain.compiler import TOGETHER

    spec, impl = registry.find_spec("attention"), tpu("attention")
    dims = {"batch": batch, "kv_heads": 1, "group": 1, "q_len": 2048, "kv_len": 2048, "d": 128, "dv": 128}
    form = typical_signature(spec, "bfloat16", dims | {"is_causal": False, "window": None} | options)
    call = bind_signature(spec, form, frameworks()["jax"], Target("tpu", arch))
    tiling = TilesConfig(block_q=512, block_kv=256)
    arrays = [call.arrays[name] for name in "qkv"]

    def run(q, k, v):
        return impl.fn(call.replace(arrays={**call.arrays, "q": q, "k": k, "v": v}), tiling)[0]

    jaxpr = jax.make_jaxpr(run)(*arrays).jaxpr
    (walk,) = static.walks_of(jaxpr, cores=TOGETHER.get(arch, 1))
    assert [sum(c.steps for c in one.body.inner[1:-1]) for one in (walk, *walk.beside)] == shares


def test_a_call_of_attention_with_keys_in_several_parts_of_a_step():
    """5 queries of 4 heads, in one block of rows; two blocks of 128 keys a step, and of 384 keys the last lies
    beyond."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, h, 16)), jnp.float32) for n, h in ((5, 4), (384, 1), (384, 1)))
    attend = op("attention", backend="pallas")
    weights = jax.nn.softmax(jnp.einsum("bihd,bjkd->bhij", q, k) / 4, -1)
    np.testing.assert_allclose(attend(q, k, v), jnp.einsum("bhij,bjkd->bihd", weights, v), rtol=2e-5, atol=2e-5)


def test_the_larger_of_the_program_s_and_of_memory_s_cycles():
    v6e = targets.find("v6e")
    a_cycle = v6e.bandwidth / v6e.clock
    assert Kernel("k").least(v6e) is None
    assert Kernel("k", issued=1000, moved=0).least(v6e) == 1000
    assert Kernel("k", issued=1000, cycles=800, moved=0).least(v6e) == 800
    assert Kernel("k", issued=1000, cycles=500).least(v6e) == 1000, "the estimate missed branches"
    assert Kernel("k", cycles=500).least(v6e) is None, "nothing is there to hold it to"
    assert Kernel("k", launches=2, issued=1000, cycles=450).least(v6e) == 900, "an estimate is of one launch"
    assert Kernel("k", issued=1000, moved=round(5000 * a_cycle)).least(v6e) == pytest.approx(5000)
    built = Build("op", "forward", "bfloat16", "v6e", "pallas", kernels=[Kernel("a", issued=7), Kernel("b", issued=8)])
    assert built.least == 15 and "15 cycles, not run" in str(built)
    built.kernels.append(Kernel("c"))
    assert built.least is None


def rows_call(name, rows, n, arch):
    spec = registry.find_spec(name)
    shape = {"shape": (rows, n)} if name.startswith("softmax") else {"batch": (rows,), "n": n}
    return bind_signature(spec, typical_signature(spec, "bfloat16", shape), frameworks()["jax"], Target("tpu", arch))


@pytest.mark.parametrize(
    ("name", "rows", "n", "block_rows"),
    [("layernorm", 1024, 23488, 128), ("softmax", 1024, 50257, 128), ("softmax", 100, 50257, 128)]  # kept for sweep 1
    + [("rmsnorm", 1024, 65536, 16), ("rmsnorm", 64, 131072, 16)],
)
def test_rows_of_many_elements_are_read_once(name, rows, n, block_rows):
    call, impl = rows_call(name, rows, n, "v5e"), tpu(name)
    tiling = tilings.resolve(impl, call, {}).tiling
    assert tiling["block_rows"] == block_rows, tiling
    given = {k: v for k, v in call.arrays.items() if v is not None}

    def run(*arrays):
        return impl.fn(call.replace(arrays={**call.arrays, **dict(zip(given, arrays, strict=True))}), tiling)

    (walk,) = static.walks_of(jax.make_jaxpr(run)(*given.values()).jaxpr)
    assert walk.moved == pytest.approx(2 * 2 * rows * n, rel=0.15), "x and y, with what pads their blocks"


def test_every_kernel_that_ships_has_its_cycles_counted_on_every_chip():
    """By bundles times trips where libtpu gives no estimate: of v4, of windows of several heads (rope), of products,
    which are built without."""
    kept = [run for run in store.read(Path(__file__).parent.parent / store.FOLDER) if run.benchmark == "compile-matrix"]
    chips = [name for name, hardware in targets.HARDWARE.items() if hardware.platform == "tpu"]
    rows = [row for run in kept for row in run.rows if row["target"] in chips]
    cells = [(row["op"], row["dtype"], row["target"]) for row in rows]
    assert sorted(cells) == sorted(
        (op, dtype, chip) for op in registry.ops() for dtype in registry.find_spec(op).usual_dtypes for chip in chips
    )
    assert [cell for cell, row in zip(cells, rows, strict=True) if not row["ok"]] == []
    lack = {cell[0] for cell, row in zip(cells, rows, strict=True) if not all(k.get("issued") for k in row["kernels"])}
    assert {op for op in lack if every_grid_is_known(op)} == set()


def every_grid_is_known(name):
    """Whether no kernel of a sample call has a grid whose extent is data, of which no cycles can be counted."""
    arrays, options = testing.sample_arrays(name, dtype=dtype_for(name, "float32"), framework="jax")
    call, impl = op(name, backend="pallas").bind(**arrays, **options), tpu(name)
    call.interpret = True
    tiling = tilings.default(impl, call).tiling
    given = {n: x for n, x in call.arrays.items() if x is not None}
    jaxpr = jax.make_jaxpr(lambda some: impl.fn(call.replace(arrays=call.arrays | some), tiling))(given)
    return len(static.walks_of(jaxpr.jaxpr)) == str(jaxpr).count("pallas_call[")


@pytest.mark.parametrize(
    ("name", "rows", "n", "blocks"),
    [
        ("rmsnorm", 370, 1198, {"v5e": 128, "v6e": 128}),  # by 256 are 512 rows: v5e 5.9k cycles for 4.6k
        ("rmsnorm", 256, 2048, {"v5p": 64}),  # two cores, and short first windows: 2.6k cycles, of one block 4.0k
        ("rmsnorm", 8192, 4096, {"v5p": 128, "v6e": 256}),
        ("softmax", 20, 1000, {"": 256, "v7x": 256}),  # no chip, or one whose clock is in no document
    ],
)
def test_blocks_of_rows_follow_how_many_there_are(name, rows, n, blocks):
    for arch, block_rows in blocks.items():
        call, impl = rows_call(name, rows, n, arch), tpu(name)
        default = impl.tiling(call)
        assert tilings.default(impl, call).tiling["block_rows"] == block_rows, arch
        assert impl.fit(call.replace(interpret=True), default) is default, "on a host the order of sums follows shapes"


@pytest.mark.parametrize("arch", ["", "v4", "v5e", "v5p", "v6e", "v7x"])
@pytest.mark.parametrize("name", ["softmax", "softmax_vjp", "layernorm", "layernorm_vjp", "rmsnorm", "rmsnorm_vjp"])
@pytest.mark.parametrize("n", [128, 1000, 23488, 50257])
def test_rows_are_cut_alike_however_many_there_are(name, n, arch):
    chosen = []
    for rows in (1, 100, 384, 2000):
        call, impl = rows_call(name, rows, n, arch), tpu(name)
        chosen.append(tilings.resolve(impl, call, {}).tiling["block_n"])  # and is legal
    assert len(set(chosen)) == 1, "a row's bits would depend on how many there are"


def gate_call(name, n, dtype, arch):
    spec = registry.find_spec(name)
    form = typical_signature(spec, dtype, {"batch": (4096, n)})
    return bind_signature(spec, form, frameworks()["jax"], Target("tpu", arch))


@pytest.mark.parametrize("arch", ["", "v4", "v5e", "v5p", "v6e", "v7x"])
@pytest.mark.parametrize("name", ["swiglu", "swiglu_vjp", "geglu", "geglu_vjp"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gates_have_long_blocks_on_every_chip(name, dtype, arch):
    for n in (100, 1024, 2048, 4096, 14336):
        tiling = tilings.resolve(tpu(name), gate_call(name, n, dtype, arch), {}).tiling
        assert tiling["block_rows"] * tiling["block_n"] >= 2**18
        assert tiling["block_n"] < 2 * max(n, 1024), "few rows of a narrow array would be few elements"


def test_gates_are_cut_evenly():
    from portakern.backends.pallas.tpu.swiglu import blocks

    call = gate_call("swiglu", 14336, "bfloat16", "v5p")
    assert blocks(call, RowsConfig(block_rows=128, block_n=4096)) == (128, 3584), (
        "four of 4096 would move a seventh more"
    )


def test_a_table_s_blocks_of_few_rows_have_no_array_copied():
    """Where rows lie side by side 128 are turned at a time; a user who names fewer gets them."""
    impl, few = tpu("rmsnorm"), RowsConfig(block_rows=64, block_n=1024)
    assert impl.fit(rows_call("rmsnorm", 4096, 1000, "v6e"), few) == few.replace(block_rows=128)
    assert impl.fit(rows_call("rmsnorm", 100, 1000, "v6e"), few) is few
    call = rows_call("rmsnorm", 4096, 1000, "v6e")
    assert tilings.resolve(impl, call, few).tiling == few


def gradients_call(kv_len, arch="v6e", dtype="bfloat16"):
    dims = {"batch": 1, "kv_heads": 1, "group": 1, "d": 128, "dv": 128, "q_len": 256, "kv_len": kv_len}
    spec = registry.find_spec("attention_vjp")
    return bind_signature(spec, typical_signature(spec, dtype, dims), frameworks()["jax"], Target("tpu", arch))


@pytest.mark.parametrize(
    ("arch", "kv_len", "kernels"), [("v6e", 4096, 1), ("v6e", 16384, 1), ("v6e", 32768, 2), ("v4", 8192, 2)]
)
def test_one_kernel_of_gradients_where_all_keys_sums_fit(arch, kv_len, kernels):
    impl, call = tpu("attention_vjp"), gradients_call(kv_len, arch)
    tiling = tilings.resolve(impl, call, {}).tiling
    assert tiling["kernels"] == kernels and impl.supports(call, tiling) is None
    fewer = call.replace(wants=("d_q",))
    assert impl.supports(fewer, tilings.resolve(impl, fewer, {}).tiling) is None


def test_one_kernel_of_gradients_that_does_not_fit_is_refused_in_words():
    reason = tpu("attention_vjp").supports(
        gradients_call(8192, "v4"), AttentionGradientsConfig(block_q=512, block_kv=512, kernels=1)
    )
    assert reason and "or kernels=2" in reason


def test_all_of_k_in_a_block_is_read_once():
    call = matmul_call("v6e")
    for depth, fetched in ((4096, 1), (2048, 4)):
        tiling = ProductConfig(block_m=1024, block_n=1024, block_k=depth)

        def run(a, b, tiling=tiling):
            return tpu("matmul").fn(call.replace(arrays={"a": a, "b": b}), tiling)

        (walk,) = static.walks_of(jax.make_jaxpr(run)(*call.arrays.values()).jaxpr)
        assert walk.moved == 4096 * 4096 * 2 * (fetched + 4 + 1), "a, b for each block of rows, c"


def test_what_a_kernel_reads_of_constants_in_scalar_memory_is_known():
    """Which blocks are visited stands in an array, as in JAX's splash attention."""
    from jax.experimental.pallas import tpu as pltpu

    def kernel(which, x, y):
        @pl.when(which[pl.program_id(0)] > 0)
        def add():
            y[...] = x[...] + 1

    which = jnp.asarray([2, 0, 0, 3, 1, 0], jnp.int32)
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(6,),
        in_specs=[pl.BlockSpec((8, 128), lambda i, which: (which[i], 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, which: (i, 0)),
    )
    shape = jax.ShapeDtypeStruct((48, 128), jnp.float32)

    def call(x):
        return pl.pallas_call(kernel, grid_spec=spec, out_shape=shape, name="by_map")(which, x)

    closed = jax.make_jaxpr(call)(np.zeros((32, 128), np.float32))
    (walk,) = static.walks_of(closed.jaxpr, closed.consts)
    assert [c.steps for c in walk.body.inner] == [3]
    assert walk.moved == 8 * 128 * 4 * (5 + 6), "2, 0, 3, 1, 0 of the inputs, and every output"


@pytest.mark.parametrize(
    ("grid", "semantics", "steps", "moves"),
    [
        ((4, 8), ("parallel", "arbitrary"), [16, 16], 32),
        ((1, 4, 8), ("parallel", "parallel", "arbitrary"), [16, 16], 32),
        ((3, 2), ("parallel", "arbitrary"), [4, 2], 6),
        ((1, 8), ("parallel", "arbitrary"), [8], 8),
        ((2, 8), ("arbitrary", "parallel"), [8, 8], 16),
        ((4, 8), None, [32], 32),
    ],
)
def test_cores_that_share_a_launch_take_runs_of_its_first_parallel_axis(grid, semantics, steps, moves):
    from jax.experimental.pallas import tpu as pltpu

    def kernel(x, y):
        y[...] = x[...]

    blocks = pl.BlockSpec((8, 128), lambda *at: at[-2:])
    shape = jax.ShapeDtypeStruct((8 * grid[-2], 128 * grid[-1]), jnp.float32)

    def call(x):
        params = pltpu.CompilerParams(dimension_semantics=semantics)
        return pl.pallas_call(
            kernel, grid=grid, in_specs=[blocks], out_specs=blocks, out_shape=shape, compiler_params=params
        )(x)

    jaxpr = jax.make_jaxpr(call)(np.zeros(shape.shape, np.float32)).jaxpr
    (walk,) = static.walks_of(jaxpr, cores=2)
    assert [one.steps for one in (walk, *walk.beside)] == steps
    assert sum(one.moved for one in (walk, *walk.beside)) == 2 * 8 * 128 * 4 * moves
    (alone,) = static.walks_of(jaxpr)
    assert alone.steps == sum(steps) and not alone.beside


def test_memory_takes_the_cores_that_share_a_launch_half_as_long():
    v5p = targets.find("v5p")
    one, both = (Kernel("k", issued=1, moved=2**30, cores=cores).memory(v5p) for cores in (1, 2))
    assert one == 2 * both == pytest.approx(2**31 / (v5p.bandwidth / v5p.clock))


@pytest.mark.parametrize("arch", ["", "v4", "v5e", "v5p", "v6e", "v7x"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("d", [64, 256, 512])
@pytest.mark.parametrize("name", ["attention", "attention_vjp"])
def test_defaults_of_attention_fit_every_chip_beside_a_bias(name, d, dtype, arch):
    spec, impl = registry.find_spec(name), tpu(name)
    for q_len in (1, 4096):
        dims = {"d": d, "dv": d, "q_len": q_len, "is_causal": False, "bias": True}
        call = bind_signature(spec, typical_signature(spec, dtype, dims), frameworks()["jax"], Target("tpu", arch))
        assert impl.supports(call, tilings.resolve(impl, call, {}).tiling) is None


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_a_float32_product_in_full_is_several(precision):
    x = np.zeros((8, 8), np.float32)
    jaxpr = jax.make_jaxpr(lambda a: jax.lax.dot(a, a, precision=precision))(x).jaxpr
    assert static._flops(jaxpr) == 2 * 8**3 * (static.FLOAT32_PASSES if precision == "highest" else 1)


@pytest.mark.parametrize(("causal", "most", "pieces"), [(False, 4, (0, 0)), (True, 2, (2, 1))])
def test_parts_of_keys_and_pieces_of_rows(causal, most, pieces):
    """A half of the rows of a causal block passes by what the other sees where it is as long as a part of the keys."""
    from portakern.backends.pallas.tpu import attention as module

    spec = registry.find_spec("attention")
    dims = {"kv_heads": 1, "group": 1, "d": 128, "dv": 128, "q_len": 4096, "kv_len": 4096, "is_causal": causal}
    call = bind_signature(spec, typical_signature(spec, "bfloat16", dims), frameworks()["jax"], Target("tpu", "v6e"))
    assert module.parts(call, 1024, 512) == most and module.parts(call, 1024, 4096) == 1
    assert tuple(module.pieces_of(call, 1024, bkv) for bkv in (512, 1024)) == pieces
    assert module.pieces_of(call, 16, 1024) == 0, "few rows pass by nothing"


@pytest.mark.parametrize(("arch", "batch", "most"), [("v5e", 1, 3), ("v6e", 1, 3), ("v5e", 16, 9), ("v6e", 16, 9)])
def test_the_keys_of_a_query_alone_come_in_several_steps(arch, batch, most):
    """While those of the first step arrive nothing is done, but where other queries' came before."""
    from portakern.backends.pallas.tpu import attention as module

    spec = registry.find_spec("attention")
    dims = {"batch": batch, "kv_heads": 1, "group": 4, "d": 128, "dv": 128, "q_len": 1, "kv_len": 8782}
    form = typical_signature(spec, "bfloat16", {**dims, "is_causal": True})
    call = bind_signature(spec, form, frameworks()["jax"], Target("tpu", arch))
    assert module.parts(call, 16, 1024) == most


def test_a_step_holds_no_more_keys_than_a_window_reaches():
    from portakern.backends.pallas.tpu import attention as module

    spec = registry.find_spec("attention")
    dims = {"kv_heads": 1, "group": 4, "d": 128, "dv": 128, "q_len": 1, "kv_len": 8192, "is_causal": True}
    for window, keys in ((None, 8192), ((1024, 0), 1536), ((1, 0), 512)):
        form = typical_signature(spec, "bfloat16", {**dims, "window": window})
        call = bind_signature(spec, form, frameworks()["jax"], Target("tpu", "v6e"))
        assert module.parts(call, 16, 512) * 512 == keys and module.pieces_of(call, 1024, 512) == (1 + bool(window))


@pytest.mark.parametrize(
    ("chip", "dtype", "m", "n", "k", "tiles", "took"),
    [
        # More than the 48 MiB that a kernel may have there.
        ("v5p", "bfloat16", 3072, 4096, 8192, (2048, 512, 4096), 50.59),
        ("v5e", "bfloat16", 2432, 4096, 8192, (2048, 512, 4096), 41.68),
        ("v6e", "bfloat16", 4096, 4096, 4096, (1024, 1024, 2048), 28.86),
        ("v6e", "bfloat16", 4096, 4096, 3000, (512, 512, 1024), 7.34),
        ("v6e", "bfloat16", 4096, 4096, 4096, (128, 2048, 2048), 19.52),
        ("v5p", "bfloat16", 4096, 1000, 4096, (1024, 256, 2048), 16.05),
        ("v4", "bfloat16", 4096, 4096, 4096, (1024, 512, 1024), 12.45),
        ("v4", "bfloat16", 4096, 4096, 8192, (64, 512, 4096), 9.93),
        ("v4", "bfloat16", 4096, 2048, 7247, (512, 512, 2048), 12.15),  # the last block of k is masked
        ("v5e", "bfloat16", 4096, 4096, 7247, (16, 2048, 2048), 15.81),
        # Sums of 512 columns at a time, beside a tall block of a: more than a byte for each element of these results.
        ("v7x", "bfloat16", 4096, 3289, 4096, (2048, 1024, 2048), 48.09),  # more than it may have there, too
        ("v7x", "bfloat16", 3289, 4096, 4096, (2048, 1024, 2048), 42.715),
        ("v7x", "bfloat16", 4096, 2048, 2048, (2048, 1024, 1024), 35.11),
        ("v7x", "bfloat16", 4096, 2304, 2048, (2048, 2048, 1024), 38.37),
        ("v7x", "bfloat16", 4096, 3072, 2048, (2048, 2048, 1024), 45.87),
        ("v6e", "bfloat16", 4096, 1280, 4096, (2048, 1024, 2048), 40.83),  # of 256
        # Of float32 operands parts of a tall block of a.
        ("v7x", "float32", 3072, 1536, 1024, (2048, 1024, 512), 39.65),
        ("v7x", "float32", 4096, 1280, 1024, (2048, 1024, 512), 46.36),
    ],
)
def test_the_vmem_of_a_product_is_what_its_compiler_takes_and_not_much_more(chip, dtype, m, n, k, tiles, took):
    """MiB that libtpu 0.0.50 told."""
    spec, impl = registry.find_spec("matmul"), tpu("matmul")
    form = typical_signature(spec, dtype, {"m": m, "n": n, "k": k})
    call = bind_signature(spec, form, frameworks()["jax"], Target("tpu", chip))
    with tpu_chip.estimates() as noted:
        refused = impl.supports(call, ProductConfig(**dict(zip(("block_m", "block_n", "block_k"), tiles, strict=True))))
    ((needed, may_have),) = noted
    assert took * 2**20 <= needed <= 1.1 * took * 2**20
    assert (refused is None) is (needed <= may_have) and (took * 2**20 <= may_have or refused)


@pytest.mark.parametrize(
    ("chip", "dtype", "activation", "given", "steps", "tiles", "took"),
    [
        # Where k takes several steps, what f keeps adds to what the product keeps.
        ("v5p", "float32", "silu", "residual return_pre", 2, (2048, 256, 512), 45.676),
        ("v5p", "float32", "gelu", "residual return_pre", 2, (1024, 512, 768), 39.273),
        ("v5p", "bfloat16", "silu", "residual return_pre", 2, (1024, 1024, 128), 28.789),
        ("v5e", "bfloat16", "silu", "bias residual return_pre", 2, (64, 2048, 4096), 35.863),
        ("v4", "bfloat16", "gelu_tanh", "bias residual return_pre", 2, (512, 768, 128), 13.014),
        ("v6e", "bfloat16", "gelu", "bias residual return_pre", 2, (2048, 1024, 128), 49.301),
        ("v7x", "bfloat16", "silu", "residual return_pre", 2, (2048, 512, 128), 24.129),
        # Where it takes one, that is next to nothing.
        ("v5p", "float32", "silu", "bias residual return_pre", 1, (256, 384, 4096), 38.359),
    ],
)
def test_the_vmem_of_a_linear_layer_is_what_its_compiler_takes_and_not_much_more(
    chip, dtype, activation, given, steps, tiles, took
):
    """MiB that libtpu 0.0.50 told."""
    bm, bn, bk = tiles
    dims = {"batch": (2 * bm,), "n": 2 * bn, "k": steps * bk, "activation": activation}
    there = {name: name in given.split() for name in ("bias", "residual", "return_pre")}
    spec = registry.find_spec("linear")
    call = bind_signature(spec, typical_signature(spec, dtype, dims | there), frameworks()["jax"], Target("tpu", chip))
    with tpu_chip.estimates() as noted:
        tpu("linear").supports(call, ProductConfig(block_m=bm, block_n=bn, block_k=bk))
    ((needed, _),) = noted
    assert took * 2**20 <= needed <= 1.35 * took * 2**20


@pytest.mark.parametrize(
    ("chip", "dtype", "n", "k", "rows"),
    [
        ("v5p", "float32", 4096, 4096, 256),
        ("v7x", "float32", 4096, 4096, 256),
        ("v7x", "float32", 4096, 16384, 256),
        ("v7x", "bfloat16", 4096, 4096, 512),
        ("v5e", "bfloat16", 16384, 4096, 2048),
    ],
)
def test_a_linear_layer_takes_the_rows_of_a_product_as_far_as_there_is_room(chip, dtype, n, k, rows):
    """Half as many rows of float32 at k = 4096 took twice the cycles."""
    spec, dims = registry.find_spec("linear"), {"batch": (4096,), "n": n, "k": k}
    others = {"bias": True, "residual": True, "activation": "gelu", "return_pre": True}
    call = bind_signature(spec, typical_signature(spec, dtype, dims | others), frameworks()["jax"], Target("tpu", chip))
    assert tilings.resolve(tpu("linear"), call, {}).tiling["block_m"] == rows


@pytest.mark.parametrize(
    ("chip", "dtype", "dims", "tiles", "took"),
    [
        ("v5e", "float32", {"group": 5, "dv": 192, "softcap": 2.0}, (1024, 1024), 47.3),  # told of v5p
        ("v5p", "float32", {"d": 256}, (512, 512), 12.62),
        ("v5p", "float32", {"d": 256, "dv": 256}, (1024, 512), 27.84),
        ("v4", "float32", {}, (512, 512), 10.76),
        ("v5p", "float32", {"dv": 192}, (512, 512), 15.36),
        ("v4", "float32", {"batch": 64, "group": 2, "q_len": 3, "dv": 64, "bias": True}, (16, 128), 8.598),
        ("v4", "float32", {"d": 256}, (256, 512), 9.96),
        ("v5p", "bfloat16", {"group": 3, "dv": 198, "bias": True}, (1024, 1024), 40.5),
        ("v5p", "bfloat16", {}, (512, 1024), 10.14),
        # Four blocks of keys at a time; the first of these are two, since four do not fit.
        ("v4", "bfloat16", {"d": 256, "dv": 256}, (512, 1024), 9.94),
        ("v4", "bfloat16", {"group": 2, "dv": 256}, (1024, 512), 13.35),
        ("v7x", "bfloat16", {}, (512, 1024), 12.61),
        ("v7x", "float32", {"group": 2}, (1024, 64), 10.69),
        # Scores and maxima of many small blocks of keys at a time.
        ("v4", "float32", {"group": 2, "dv": 256, "is_causal": True}, (64, 128), 14.39),
        ("v4", "float32", {"group": 2, "kv_len": 8192, "is_causal": True}, (128, 64), 4.37),
        ("v6e", "bfloat16", {"group": 2, "d": 256, "dv": 256, "kv_len": 8192, "is_causal": True}, (64, 128), 10.12),
    ],
)
def test_the_vmem_of_attention_is_what_its_compiler_takes_and_not_much_more(chip, dtype, dims, tiles, took):
    """MiB that libtpu 0.0.50 told; of one program from 10.14 on v5p to 12.61 on v7x."""
    spec, impl = registry.find_spec("attention"), tpu("attention")
    small = {"batch": 1, "q_len": 4096, "kv_heads": 1, "group": 1, "d": 128, "kv_len": 4096, "dv": 128}
    call = bind_signature(spec, named_signature(spec, dtype, small | dims), frameworks()["jax"], Target("tpu", chip))
    with tpu_chip.estimates() as noted:
        impl.supports(call, TilesConfig(block_q=tiles[0], block_kv=tiles[1]))
    ((needed, _),) = noted
    assert took * 2**20 <= needed <= 1.27 * took * 2**20


@pytest.mark.parametrize(
    ("chip", "dtype", "dims", "tiles", "took"),
    [
        ("v4", "bfloat16", {"dv": 192, "softcap": 2.0}, (512, 1024), 13.52),
        ("v5p", "bfloat16", {"d": 256, "dv": 256, "softcap": 2.0}, (1024, 1024), 24.8),
        ("v5p", "bfloat16", {"softcap": 2.0}, (1024, 1024), 19.46),
        ("v4", "bfloat16", {"d": 256, "dv": 256, "softcap": 2.0}, (1024, 512), 13.98),
        ("v5p", "float32", {"dv": 256, "softcap": 2.0}, (512, 512), 14.58),
        ("v5p", "float32", {"dv": 256}, (512, 256), 8.65),
        ("v5p", "float32", {"d": 256, "dv": 256}, (512, 256), 10.83),
        ("v5p", "float32", {"d": 256, "dv": 256}, (256, 512), 10.83),
        ("v5p", "float32", {"d": 256}, (512, 256), 7.57),
        ("v5p", "float32", {}, (512, 256), 5.4),
    ],
)
def test_the_vmem_of_attention_s_gradients_is_what_its_compiler_takes_and_not_much_more(chip, dtype, dims, tiles, took):
    """MiB that libtpu 0.0.50 told, of the kernel of d_k and d_v."""
    spec, impl = registry.find_spec("attention_vjp"), tpu("attention_vjp")
    small = {"batch": 1, "q_len": 4096, "kv_heads": 1, "group": 2, "d": 128, "kv_len": 4096, "dv": 128}
    form = typical_signature(spec, dtype, {**small, "is_causal": True, **dims})
    call = bind_signature(spec, form, frameworks()["jax"], Target("tpu", chip))
    with tpu_chip.estimates() as noted:
        impl.supports(call, AttentionGradientsConfig(block_q=tiles[0], block_kv=tiles[1], kernels=2))
    ((needed, _),) = noted
    assert took * 2**20 <= needed <= 1.2 * took * 2**20


def legal():
    file = Path(__file__).parent.parent / "benchmarks" / "tpu_legal.py"
    found = importlib.util.spec_from_file_location("tpu_legal", file)
    module = sys.modules.setdefault("tpu_legal", importlib.util.module_from_spec(found))
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", registry.ops())
def test_tilings_that_are_accepted_are_drawn_of_every_op(name):
    """No two the same, each with what was estimated of its kernels, also of ops that name no tile."""
    drawn = [*itertools.islice(legal().drawn(name, targets.find("v5e"), 0), 12)]
    assert len({json.dumps([job.signature, job.tiling]) for job, _ in drawn}) == 12
    assert all(noted and all(0 < needed <= limit for needed, limit in noted) for _, noted in drawn)


def test_kept_rows_are_gone_on_from_where_their_calls_are_those_that_are_drawn():
    module = legal()

    def calls():
        return itertools.islice(module.drawn("rmsnorm", targets.find("v5e"), 0), 6)

    noted = [max(needed for needed, _ in noted) for _, noted in calls()]
    pairs = [f"{estimate - 1}/{estimate}" for estimate in noted[:4]]
    row = {"tilings": 4, "seconds": 1.0, "largest_share": 0.5, "refused": []}
    tried, left = module.gone_on(row | {"vmem_bytes": " ".join(reversed(pairs))}, calls())
    assert [tried.count, tried.seconds, len([*left])] == [4, 1.0, 2]
    assert tried.row("rmsnorm", "v5e")["largest_share"] == 0.5
    assert "rmsnorm: 4 tilings, 0 refused, at most 50.0% of what" in module.line_of(tried.row("rmsnorm", "v5e"))
    for takes in (pairs[:3] + ["1/2"], pairs[:3]):
        tried, left = module.gone_on(row | {"vmem_bytes": " ".join(takes)}, calls())
        assert [tried.count, len([*left])] == [0, 6]


def test_rows_of_other_sources_are_not_gone_on_from(tmp_path):
    module, spec = legal(), {"op": "rmsnorm", "target": "v5e", "tilings": 1, "refused": [], "vmem_bytes": "1/2"}
    row = spec | {
        "largest_share": 0.1,
        "large_tilings": 0,
        "smallest_ratio": None,
        "median_ratio": None,
        "seconds": 1.0,
    }
    now = module.fingerprint("rmsnorm", "v5e")
    for n, (more, there) in enumerate(
        [({"sources": now}, 1), ({}, 0), ({"sources": "0" * 16}, 0), ({"sources": now, "refused": ["a call"]}, 0)]
    ):
        file = tmp_path / f"{n}.json"
        kept = results.record("tpu-legal", [row | more], command="", device=results.HOST_CPU, wall_seconds=1.0)
        results.write(file, kept | {"command": "python benchmarks/tpu_legal.py"})
        assert len(module.kept([file])) == there
