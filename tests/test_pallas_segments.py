"""Packed documents on TPUs: of keys no more tiles are visited than may hold a segment of the queries, and no bit hangs
on that."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp

import portakern as pk
from portakern.backends.pallas.configs import TilesConfig
from portakern.backends.pallas.lib.segments import spans
from portakern.backends.pallas.tpu import _heads, attention
from portakern.backends.pallas.tpu.toolchain import static
from portakern.backends.pallas.tpu.toolchain.compiler import WIDEST, _counted
from portakern.core import registry
from portakern.core.machine_code import Kernel
from portakern.core.targets import Target
from portakern.tools.compile.build import Build
from tests.packing import IDS, packed_arrays, same_bits

TILES = {"block_q": 128, "block_kv": 128}


# --- spans ---


@st.composite
def packed(draw):
    ids = st.sampled_from([0, 1, 2, 7, -3, 2**31 - 1, -(2**31)])
    lengths = [draw(st.integers(1, 40)) for _ in range(2)]
    made = [np.array([[draw(ids) for _ in range(n)] for _ in range(2)], np.int32) for n in lengths]
    if draw(st.booleans()):
        made = [np.sort(x, 1) for x in made]
    return made, [draw(st.sampled_from([1, 3, 8, 64])) for _ in range(2)]


@settings(deadline=None, max_examples=60)
@given(packed(), st.booleans())
def test_a_span_holds_every_tile_that_shares_a_segment_and_ends_at_tiles_whose_ranges_meet(drawn, across_batch):
    (rows, columns), blocks = drawn
    found = np.asarray(spans((jnp.asarray(rows), blocks[0]), (jnp.asarray(columns), blocks[1]), across_batch))
    tiles = [
        [x[:, i : i + block] for i in range(0, x.shape[1], block)] for x, block in zip(drawn[0], blocks, strict=True)
    ]
    assert found.dtype == np.int32 and found.shape == (1 if across_batch else 2, len(tiles[0]), 2)
    for i, row in enumerate(tiles[0]):
        meet = [
            [r.min() <= c.max() and c.min() <= r.max() for r, c in zip(row, column, strict=True)] for column in tiles[1]
        ]
        for entry, (first, after) in enumerate(found[:, i]):
            those = [j for j, m in enumerate(meet) if (any(m) if across_batch else m[entry])]
            assert (first, after) == ((those[0], those[-1] + 1) if those else (0, 0))
        for j, column in enumerate(tiles[1]):
            for entry in range(2):
                first, after = found[0 if across_batch else entry, i]
                assert first <= j < after or not np.isin(row[entry], column[entry]).any()


def test_wide_ids_are_compared_whole():
    """The lowest words of 2^32 and 0 agree, and an int32 beside an int64 is the number that it is."""
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        wide, narrow = jnp.asarray([[0, 0, 2**32, 2**32]]), jnp.asarray([[-1, 0, 1, 2]], jnp.int32)
        assert wide.dtype == jnp.int64
        assert spans((wide, 2), (wide, 1)).tolist() == [[[0, 2], [2, 4]]]
        assert spans((wide, 2), (narrow, 1)).tolist() == [[[1, 2], [0, 0]]]
        assert spans((narrow, 1), (wide, 2)).dtype == jnp.int32


# --- the same bits ---


def arrays_of(kind, *extents, bias=None):
    """JAX's arrays, float32 and int32."""
    arrays = packed_arrays(kind, *extents, bias=bias)
    return {name: jnp.asarray(x, jnp.int32 if name in IDS else jnp.float32) for name, x in arrays.items()}


def forward(arrays, **options):
    return pk.op("attention", backend="pallas", variant="tpu", tiling=TILES)(**arrays, **options, return_lse=True)


def backward(arrays, kernels, **options):
    o, lse = pk.op("attention", backend="reference")(**arrays, **options, return_lse=True)
    saved = {"o": o, "lse": lse, "d_o": jnp.cos(o)}
    op = pk.op("attention_vjp", backend="pallas", variant="tpu", tiling=TILES | {"kernels": kernels})
    return op(**arrays, **saved, **options)


def without_spans(run, monkeypatch):
    """What a run gives that visits every tile."""
    with monkeypatch.context() as patch:
        patch.setattr(_heads, "spans_of", lambda *call, **how: {})
        jax.clear_caches()
        found = run()
    jax.clear_caches()
    return found


CASES = {
    "shuffled": ("shuffled", (1, 300, 1, 1, 300), {}),
    "documents": ("documents", (2, 600, 1, 1, 600), {}),
    "documents, groups, causal": ("documents", (1, 400, 2, 2, 400), {"is_causal": True}),
    "documents, fewer queries, window": ("documents", (2, 260, 1, 2, 500), {"window": (200, 30)}),
    "documents, fewer keys, softcap": ("documents", (1, 500, 1, 1, 300), {"softcap": 2.0, "is_causal": True}),
    "documents, bias": ("documents", (2, 300, 1, 2, 400), {"bias": (1, 2, 300, 400), "is_causal": True}),
    "documents, bias of one row": ("documents", (2, 300, 2, 1, 400), {"bias": (1, 1, 1, 400)}),
    "shuffled, bias of a batch": ("shuffled", (2, 260, 1, 1, 260), {"bias": (2, 1, 260, 260), "window": (100, 40)}),
    "apart": ("disjoint", (1, 200, 1, 2, 300), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_no_bit_hangs_on_the_tiles_that_are_passed_by(name, monkeypatch):
    kind, extents, more = CASES[name]
    arrays = arrays_of(kind, *extents, bias=more.get("bias"))
    options = {option: value for option, value in more.items() if option != "bias"}
    run = partial(forward, arrays, **options)
    assert same_bits(run(), without_spans(run, monkeypatch))
    for kernels in (1, 2):
        run = partial(backward, arrays, kernels, **options)
        assert same_bits(run(), without_spans(run, monkeypatch))


def test_spans_that_scalar_memory_has_no_room_for_are_left_out(monkeypatch):
    arrays = arrays_of("documents", 1, 300, 1, 1, 300)
    found = forward(arrays)
    monkeypatch.setattr(_heads, "MOST_SCALARS", 3 * 2 * 4 - 1)
    jax.clear_caches()
    assert _heads.spans_in_scalar_memory(pk.op("attention").bind(**arrays), 128, 128) == {}
    assert same_bits(found, forward(arrays))
    jax.clear_caches()


# --- what is visited ---


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (700, 700)}])
@pytest.mark.parametrize("bias", [None, (1, 1, 1, 700)])
def test_tiles_that_no_query_s_span_holds_are_not_computed(options, bias):
    """Their keys hold NaN, and 0 times NaN is NaN."""
    arrays = arrays_of("shuffled", 1, 500, 1, 2, 700, bias=bias)
    keys = np.repeat([0, 9, 1, 9, 2, 3], 128)[None, :700]
    queries = np.repeat([0, 1, 2, 3], 128)[None, :500]
    arrays |= {name: jnp.asarray(x, jnp.int32) for name, x in zip(IDS, (queries, keys), strict=True)}
    hidden = jnp.asarray(keys == 9)[..., None, None]
    arrays |= {name: jnp.where(hidden, jnp.nan, arrays[name]) for name in "kv"}  # a step has two tiles, one with NaN
    plain = {name: jnp.nan_to_num(x) for name, x in arrays.items()}
    o, lse = forward(arrays, **options)
    assert bool(jnp.isfinite(o).all()) and same_bits((o, lse), forward(plain, **options))
    for kernels in (1, 2):
        found = [x for x in backward(arrays, kernels, **options) if x is not None]
        assert len(found) == 3 + (bias is not None) and all(bool(jnp.isfinite(x).all()) for x in found)


def program(arrays, constant=(), **options):
    """A call as it is traced, some of whose arrays are constants."""
    backend = registry.backend("pallas")
    impl = backend.implementation("attention", next(f for f in backend.families if "tpu" in f.platforms))
    call = pk.op("attention", backend="pallas").bind(**arrays, **options).replace(interpret=True)

    def run(traced):
        return impl.run(call.replace(arrays=call.arrays | traced), TilesConfig(**TILES))[0]

    return jax.make_jaxpr(run)({name: x for name, x in arrays.items() if name not in constant})


def walks(arrays, constant=()):
    """Its kernels, as their grids walk them; spans of ids that are constants are known."""

    def known(*call, **how):
        with jax.ensure_compile_time_eval():
            return _heads.spans_in_scalar_memory(*call, **how)

    with pytest.MonkeyPatch.context() as patch:
        if constant:
            patch.setattr(attention, "spans_in_scalar_memory", known)
        closed = program(arrays, constant)
    return static.walks_of(closed.jaxpr, closed.consts)


def test_steps_that_are_passed_by_fetch_no_keys_and_what_is_not_known_is_the_widest():
    """Four documents of 256 tokens: of 8 tiles of keys a tile of queries visits two, in steps of two tiles."""
    arrays = arrays_of("shuffled", 1, 1024, 1, 1, 1024)
    plain = {name: x for name, x in arrays.items() if name not in IDS}
    sorted_ids = jnp.asarray(np.arange(1024)[None] // 256, jnp.int32)
    arrays |= dict.fromkeys(IDS, sorted_ids)
    (known,), (unknown,), (none,) = walks(arrays, IDS), walks(arrays), walks(plain)
    assert (known.widest, unknown.widest, none.widest) == (False, True, False)
    assert known.steps == unknown.steps == none.steps
    taken = [{c.steps for c in walk.body.inner} for walk in (known, unknown, none)]
    assert 8 in taken[0] and 32 not in taken[0], "each of 8 tiles of queries computes in one step of 4"
    assert 32 in taken[1] and 32 in taken[2]
    of_keys, of_queries = 2 * 1024 * 16 * 4, 2 * 1024 * 16 * 4
    assert none.moved == 8 * of_keys + of_queries
    assert unknown.moved - none.moved == 8 * 1024 * 4 + 1024 * 4, "ids of all keys for each tile of queries"
    assert known.moved == of_keys + of_queries + 2 * 1024 * 4, "neighbours share their keys"


def test_a_count_of_what_segments_decide_says_so():
    """`portakern compile` prints it below the kernel's line, and it is read again as it was written."""
    kernel = Kernel("attention", issued=5, moved=3, assumed=WIDEST)
    build = Build("attention", "forward", "bfloat16", "v6e", "pallas", ok=True, kernels=[kernel])
    assert f"3 bytes moved\n    counted at most: {WIDEST}" in str(build)
    assert Build.from_dict(build.to_dict()).kernels[0].assumed == WIDEST
    code = static.regions("   0x1   :  { a }\n")
    for widest in (True, False):
        walk = static.GridWalk("attention", 1, static.Condition(1, 1, 0, ()), 3, 3, "", widest=widest)
        (counted,) = _counted([Kernel("attention")], [walk], [code], Target("tpu", "v6e"))
        assert counted.moved == 3 and counted.assumed == (WIDEST if widest else "")


@pytest.mark.parametrize("name", CASES)
def test_what_a_call_costs_is_said_as_before(name, monkeypatch):
    kind, extents, more = CASES[name]
    arrays = arrays_of(kind, *extents, bias=more.get("bias"))
    options = {option: value for option, value in more.items() if option != "bias"}

    def cost():
        found = [eqn.params["cost_estimate"] for eqn, _ in static._calls(program(arrays, **options).jaxpr, {})]
        assert len(found) == 1
        return found

    assert cost() == without_spans(cost, monkeypatch)
