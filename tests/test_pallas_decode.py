"""Decoding in Pallas on Hopper GPUs: shares of keys follow from lengths alone, their sums have one order, which is that
of the kernel for many queries, and nothing is written where nothing is. Bounds and laws are checked in Pallas's
interpreter.
"""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jax", reason="jax is not installed")
from portakern.core import registry

PALLAS = registry.backend("pallas")
FAMILY, GPU = (next(f for f in PALLAS.declared if f.name == name) for name in ("decode", "gpu"))
if FAMILY.missing_packages():
    pytest.skip(f"the kernels for Hopper need {FAMILY.missing_packages()}", allow_module_level=True)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402

import portakern as pk  # noqa: E402
from portakern import testing  # noqa: E402
from portakern.backends.pallas.decode import attention as decode  # noqa: E402
from portakern.backends.pallas.lib.mosaic_gpu.flash import tiles_of_split  # noqa: E402
from portakern.backends.pallas.lib.mosaic_gpu.head_parts import widths_of  # noqa: E402
from portakern.core import explain, targets, tilings  # noqa: E402
from portakern.core.dispatch import Choice, find_routes  # noqa: E402
from portakern.core.framework import frameworks  # noqa: E402
from portakern.core.targets import Target  # noqa: E402
from portakern.errors import UnsupportedError  # noqa: E402
from portakern.testing.subject import backend_subject  # noqa: E402
from portakern.tools.compile import abstract  # noqa: E402
from tests.drawing import cases  # noqa: E402

HOPPER = Target("cuda", "sm_90")
SPEC = registry.find_spec("attention")
REFUSED = {"sinks", "alibi_slopes", "out_dtype"}
LIMITS = testing.Limits(
    typical_elements=2**12, arguments=frozenset({x.name for x in (*SPEC.arrays, *SPEC.options)} - REFUSED)
)
COMPILER = FAMILY.load_compiler()
IMPL = PALLAS.implementation("attention", FAMILY)
has_compiler = pytest.mark.skipif(
    COMPILER.unavailable(targets.find("sm_90")) is not None, reason=str(COMPILER.unavailable(targets.find("sm_90")))
)


def arrays_of(batch, q_len, kv_heads, group, kv_len, d, dv=None, dtype=jnp.bfloat16):
    rng = np.random.default_rng(q_len + kv_len + d)
    forms_of = {
        "q": (batch, q_len, kv_heads * group, d),
        "k": (batch, kv_len, kv_heads, d),
        "v": (batch, kv_len, kv_heads, dv or d),
    }
    return {name: jnp.asarray(rng.standard_normal(form), dtype) for name, form in forms_of.items()}


def decoding(**tiling):
    return pk.op("attention", backend="pallas", variant="decode", tiling=tiling)


def on_hopper(arrays, tiling, *, impl=IMPL, **options):
    call = pk.op("attention").bind(**arrays, **options)
    call = abstract.bind_signature(call.spec, abstract.signature_of(call), frameworks()["jax"], HOPPER)
    return call, tilings.resolve(impl, call, tiling).tiling


def plan_for(shape, tiling=None, **options):
    return decode.plan_of(*on_hopper(arrays_of(*shape), tiling or {}, **options))


# --- right, in the interpreter ---


@pytest.mark.timeout(900)
def test_within_bounds():
    report = pk.check(
        "attention", backend="pallas", variant="decode", device="cpu", max_examples=9, seed=0, limits=LIMITS,
        dtypes=["bfloat16"], edges=False,
    )  # fmt: skip
    assert report.passed, "\n".join(map(str, report.failures))
    assert report.examples >= 4, report.refused


CALLS = [
    ((2, 1, 2, 4, 500, 64), {}, {}),
    ((1, 3, 2, 2, 400, 72, 40), {"is_causal": True, "softcap": 2.0}, {}),
    ((1, 5, 1, 3, 450, 128), {"window": (140, 2)}, {"block_kv": 64, "max_splits": 3, "min_split_keys": 64}),
    ((1, 2, 1, 2, 300, 16, 136), {"window": (None, 0)}, {"block_kv": 64, "max_splits": 1}),
    ((1, 9, 1, 2, 4, 24), {"is_causal": True}, {}),
]


@pytest.mark.parametrize(("shape", "options", "tiling"), CALLS, ids=str)
def test_shares_race_for_nothing_and_add_up(shape, options, tiling):
    arrays = arrays_of(*shape)
    with PALLAS.profile("races"):
        got = decoding(**tiling)(**arrays, return_lse=True, **options)
    exact = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
    want = pk.op("attention", backend="reference")(**exact, return_lse=True, **options)
    for a, b, within in zip(got, want, (1e-2, 2e-5), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=within, atol=within)


def test_every_mask_at_once():
    """A bias of each head and query, one that all share, and segments in several shares."""
    arrays, rng = arrays_of(2, 2, 2, 2, 300, 32), np.random.default_rng(0)
    ids = {
        "q_segment_ids": jnp.asarray(rng.integers(0, 2, (2, 2)), jnp.int32),
        "kv_segment_ids": jnp.asarray(rng.integers(0, 2, (2, 300)), jnp.int32),
    }
    for form in ((2, 4, 2, 300), (1, 4, 1, 300), (1, 1, 2, 300), (2, 1, 1, 300)):
        bias = jnp.asarray(rng.standard_normal(form), jnp.float32)
        served = decoding(block_kv=64, max_splits=3, min_split_keys=64)
        got = served(**arrays, bias=bias, **ids, window=(250, 0), return_lse=True)
        exact = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
        own = {name: np.asarray(x) for name, x in ids.items()}
        want = pk.op("attention", backend="reference")(
            **exact, bias=np.asarray(bias), **own, window=(250, 0), return_lse=True
        )
        for a, b, within in zip(got, want, (1e-2, 2e-5), strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=within, atol=within, err_msg=str(form))


def test_a_querys_bits_do_not_tell_its_company():
    arrays = arrays_of(3, 2, 2, 4, 400, 64)
    short = decoding(min_split_keys=64)
    whole, lse = short(**arrays, return_lse=True)
    for b, i, h in ((0, 1, 0), (2, 0, 1)):
        heads = slice(4 * h + 1, 4 * h + 3)  # two of a group
        q = arrays["q"][b : b + 1, i : i + 1, heads]
        k, v = (arrays[name][b : b + 1, :, h : h + 1] for name in "kv")
        alone, lse_alone = short(q, k, v, return_lse=True)
        assert (alone[0, 0] == whole[b, i, heads]).all() and (lse_alone[0, :, 0] == lse[b, heads, i]).all()


SHARES = [
    ((1, 3, 2, 2, 300, 64), {}, {"max_splits": 1}),
    ((2, 3, 1, 2, 400, 72, 40), {"is_causal": True, "softcap": 2.0}, {"block_kv": 64, "min_split_keys": 64}),
    ((1, 5, 1, 3, 450, 128), {"window": (140, 2)}, {"block_kv": 64, "min_split_keys": 64, "max_splits": 3}),
    ((1, 16, 1, 4, 450, 64), {"window": (0, 30)}, {"block_kv": 64, "min_split_keys": 64}),
    (
        (1, 1, 1, 2, 1200, 16),
        {},
        {"block_kv": 64, "min_split_keys": 64, "max_splits": 19},
    ),  # more than are on their way at a time
]


@pytest.mark.parametrize(("shape", "options", "tiling"), SHARES, ids=str)
def test_a_querys_bits_do_not_tell_which_kernel_it_was(shape, options, tiling):
    """Nor how many queries there are: those of a long call's end are here a few."""
    arrays = arrays_of(*shape)
    many = pk.op("attention", backend="pallas", variant="gpu", tiling=tiling | {"block_q": 128})
    with PALLAS.profile("races"):
        (o, lse), (o_many, lse_many) = (run(**arrays, return_lse=True, **options) for run in (decoding(**tiling), many))
    assert np.array_equal(np.asarray(o).view(np.uint16), np.asarray(o_many).view(np.uint16))
    np.testing.assert_array_max_ulp(np.asarray(lse), np.asarray(lse_many), 1)  # the host has two logarithms


def test_the_last_of_many_queries_have_the_bits_of_a_few():
    arrays, tiling = arrays_of(1, 70, 1, 2, 300, 24), {"block_kv": 64, "min_split_keys": 64}
    many = pk.op("attention", backend="pallas", variant="gpu", tiling=tiling)(**arrays, is_causal=True)
    few = decoding(**tiling)(**arrays | {"q": arrays["q"][:, -5:]}, is_causal=True)
    assert (few == many[:, -5:]).all()


@pytest.mark.parametrize("d", [16, 64, 128, 136, 256])
def test_both_kernels_have_the_same_shares(d):
    """By default: tables of the two have to agree in what a query's bits follow from."""
    gpu = PALLAS.implementation("attention", GPU)
    for target in (HOPPER, targets.HOST):
        call, _ = on_hopper(arrays_of(1, 2, 1, 2, 5000, d), {})
        call = call.replace(target=target)
        found = [tilings.resolve(impl, call, {}).tiling for impl in (gpu, IMPL)]
        assert len({(t["block_kv"], tiles_of_split(call, t)) for t in found}) == 1


# --- shares ---


def test_a_share_sees_neither_queries_nor_heads_nor_samples():
    lengths = {
        plan_for((b, q, h, g, 5000, 64), **options).split_tiles
        for options in ({}, {"is_causal": True}, {"window": (None, 3)})
        for b, q, h, g in ((1, 1, 1, 1), (9, 1, 2, 8), (1, 30, 3, 2))
    }
    assert lengths == {8}  # tiles of 128 keys: 1024, of which 16 shares hold more than there are


@pytest.mark.parametrize("options", [{}, {"window": (99, 0)}, {"window": (700, 3)}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 8192), (7, 1000), (8, 5), (3, 129)])
def test_shares_hold_every_tile_that_is_seen_once(q_len, kv_len, options):
    plan = plan_for((2, q_len, 3, 2, kv_len, 64), {"max_splits": 8, "min_split_keys": 64}, **options)
    found = {}
    for index in range(plan.tiles):
        tile = plan.tile(jnp.int32(index), SimpleNamespace())  # of a call without segments
        begin, steps = int(tile.first), int(tile.steps)
        assert steps >= 1 and begin // plan.split_tiles == (begin + steps - 1) // plan.split_tiles, (
            "a split begins at a multiple"
        )
        assert int(plan.split_index(tile)) == index % plan.splits and int(tile.row) == 0
        found.setdefault((int(tile.batch), int(tile.head)), []).extend(range(begin, begin + steps))
    first, last = plan.seen
    assert found == {(b, h): [*range(first, last + 1)] for b in range(2) for h in range(3)}
    assert plan.splits <= 8 + 1, "one more where a window lies across"


@pytest.mark.parametrize("shape", [(2, 1, 3, 1, 500, 64), (1, 3, 2, 5, 300, 40, 24), (1, 1, 2, 8, 200, 256)], ids=str)
def test_nothing_is_written_beyond_an_axis(shape, monkeypatch):
    """The copy engine does not know where an axis ends, as the interpreter does: what it takes away must fit."""
    written = []

    def spy(source, there, *args, **kwargs):
        (indexer,) = (t for t in there.transforms if hasattr(t, "indices"))
        for index, extent in zip(indexer.indices, there.ref.shape, strict=True):
            if isinstance(index, type(pl.ds(0, 1))):
                assert isinstance(index.start, int) and index.start + index.size <= extent
        assert source.shape == there.shape
        written.append(there.shape)
        return copy(source, there, *args, **kwargs)

    copy = decode.plgpu.copy_smem_to_gmem
    monkeypatch.setattr(decode.plgpu, "copy_smem_to_gmem", spy)
    jax.clear_caches()
    _, q_len, _, group, _, _, *dv = shape
    decoding(min_split_keys=64, max_splits=16)(**arrays_of(*shape))
    jax.clear_caches()
    parts = Counter((q_len * group, width) for width in widths_of((dv or shape[-1:])[0]))
    assert {*written} == {(2, 64), *parts}
    (splits,) = {written.count(part) / count for part, count in parts.items()}
    assert splits.is_integer()


# --- who is served, and what is said ---


@pytest.mark.parametrize(("q_len", "variant"), [(1, "decode"), (16, "decode"), (17, "gpu")])
def test_up_to_64_queries_of_a_group_decode(q_len, variant):
    call, _ = on_hopper(arrays_of(1, q_len, 1, 4, 8192, 64), {}, impl=PALLAS.implementation("attention", GPU))
    served = find_routes(PALLAS, call, HOPPER)
    assert [route.impl.family.name for route in served] == ["decode", "gpu"]
    said = "\n".join(explain._plan(call, Choice(PALLAS), served))
    assert f"variant {variant}: serves this call" in said
    other = (
        "gpu: decode comes first" if variant == "decode" else "decode: .*rows, more than the 64 that decode together"
    )
    assert re.search(f"variant {other}", said), said


@pytest.mark.parametrize(
    ("shape", "tiling", "words"),
    [
        ((1, 17, 1, 4, 300, 64), {}, "17 queries of 4 heads are 68 rows, more than the 64 .*: use variant 'gpu'"),
        ((1, 1, 1, 4, 300, 64), {"block_q": 128}, "block_q=128 is not .* use 64, which all queries of a group"),
        ((1, 1, 1, 4, 300, 64), {"block_kv": 32}, "block_kv=32 is not supported"),
        ((1, 1, 1, 4, 300, 264), {}, "wider than the 256"),
        ((1, 1, 1, 4, 300, 256), {"stages": 3}, "choose smaller block_kv or stages"),
    ],
)
def test_what_is_refused_is_said(shape, tiling, words):
    with pytest.raises(UnsupportedError, match=words):
        on_hopper(arrays_of(*shape), tiling)


@pytest.mark.parametrize(
    ("shape", "bias", "words"),
    [
        ((1, 1, 8, 4, 8192, 128), None, None),
        ((1, 1, 8, 4, 8192, 128), (1, 1, 1, 8192), None),
        ((1, 4, 8, 4, 8192, 128), None, "queries of a group are gathered"),
        ((1, 4, 1, 4, 8192, 128), None, None),
        ((1, 1, 8, 4, 8192, 41, 64), None, "heads of q and k are padded from 41 to 48; o is cut from 128 to 64"),
        ((1, 1, 8, 4, 8192, 128), (1, 32, 1, 8192), "bias is gathered and padded to whole tiles of 64 x 128"),
    ],
)
def test_what_xla_copies_is_said(shape, bias, words):
    arrays = arrays_of(*shape) | ({} if bias is None else {"bias": jnp.zeros(bias, jnp.bfloat16)})
    assert decode.copies(*on_hopper(arrays, {})) == words


# --- compiled, with no GPU ---


@has_compiler
@pytest.mark.parametrize("d", [64, 128, 256])
def test_what_it_takes_of_the_chip(d, monkeypatch, tmp_path):
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    built = decoding().lower(**arrays_of(1, 1, 8, 4, 8192, d), return_lse=True, target="sm_90")
    assert built.ok, built.reason
    shares, combine = built.kernels
    assert [shares.name, combine.name] == ["attention_shares", "attention_combine"]
    assert shares.spills == combine.spills == 0 and 0 < combine.registers <= 128
    assert "wgmma" in "".join(shares.matrix) and not combine.matrix
    assert shares.on_chip["shared"] <= targets.find("sm_90").on_chip["shared"] and combine.on_chip["shared"] == 0


@has_compiler
def test_many_shares_take_no_more_code_than_a_few(monkeypatch, tmp_path):
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    arrays = arrays_of(1, 1, 1, 4, 4096, 64)
    cut = {"block_kv": 64, "min_split_keys": 64}
    few, many = (decoding(**cut, max_splits=n).lower(**arrays, target="sm_90") for n in (16, 64))
    assert len(many.kernels[1].assembly) < 1.1 * len(few.kernels[1].assembly)


@has_compiler
@settings(max_examples=4)
@given(data=st.data())
def test_drawn_cases_compile_for_hopper(data):
    """The interpreter takes shapes that the compiler would refuse."""
    spec = registry.find_spec("attention")
    subject = backend_subject(spec, "pallas", "decode", "cpu", None)
    case = data.draw(cases(spec, testing.Limits(typical_elements=2**12, drawn=subject.drawn), subject.tiles))
    arrays = {n: jnp.asarray(b.view()) for n, b in case.buffers(spec).items()}
    bound = pk.op("attention").bind(**arrays, **case.options)
    if bound.degenerate:
        return
    named, _, _ = subject.tiling(case, bound)
    try:
        call, tiling = on_hopper(arrays, named, **case.options)
    except UnsupportedError as e:
        assert subject.accepts(str(e)), e
        return
    assert COMPILER.build(IMPL, call, tiling) is not None
