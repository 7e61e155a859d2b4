"""Pages of 8 bits on chips that are not here: what is refused, and in what tiles they are read."""

from __future__ import annotations

import re

import numpy as np
import pytest

from portakern.core import registry, targets
from portakern.core.binder import bind
from portakern.spec.dtypes import numpy_dtype
from portakern.specs.paged_attention import NARROW
from portakern.testing.verdict import expected


def called(arch, dtype="float32", pages="float8_e4m3fn", heads=2, interpret=False, given=None, tokens=9, **options):
    """A call of so many queries of 4 sequences, pages of 13 keys, on a chip."""
    q = np.zeros((tokens, 2 * heads, 128), numpy_dtype(dtype))
    k, v = (np.zeros((14, 13, heads, 128), numpy_dtype(pages)) for _ in range(2))
    table, lens = np.zeros((4, 30), np.int32), np.full(4, 30, np.int32)
    starts = np.array([0, 4, 5, 7, tokens], np.int32)
    numbers = {n: x.astype(np.float32) for n, x in (given or {}).items()}
    call = bind(registry.find_spec("paged_attention"), q, k, v, table, lens, starts, **numbers, **options)
    return call.replace(target=targets.find(arch).target, interpret=interpret)


@pytest.mark.parametrize(
    ("arch", "dtype", "pages", "words"),
    [
        ("sm_80", "float32", "float8_e4m3fn", "Triton reads no float8_e4m3fn on sm_80"),
        ("sm_86", "bfloat16", "float8_e4m3fn", "Triton reads no float8_e4m3fn on sm_86"),
        ("gfx90a", "float16", "float8_e5m2", "gfx90a reads float16 of less than"),
        ("sm_80", "float32", "float8_e5m2", None),
        ("sm_89", "float32", "float8_e4m3fn", None),
        ("gfx90a", "bfloat16", "float8_e5m2", None),
    ],
)
def test_what_is_refused_is_declared(arch, dtype, pages, words):
    pytest.importorskip("triton", reason="triton is not installed")
    from portakern.backends.triton.lib.paged_attention import narrow_refused

    refused = narrow_refused(called(arch, dtype, pages))
    if words is None:
        assert refused is None
        return
    assert words in refused
    assert any(re.search(pattern, refused) for pattern in registry.backend("triton").refusals)
    assert narrow_refused(called(arch, dtype, pages, interpret=True)) is None


def test_a_sequence_of_sinks_alone_has_a_bound_whatever_scales_there_are():
    """Its tokens are zeros, their lse the sink: no key's score errs, however large k_scale is."""
    call = called("sm_90", return_lse=True, given={"sinks": np.arange(4.0), "k_scale": np.array([1e38, 2.0])})
    call.arrays["kv_lens"][...] = 0
    _, (o, lse), (of_o, of_lse) = expected(call)
    assert not o.any() and (lse == np.arange(4.0)[:, None]).all()
    assert np.isfinite(of_o).all() and np.isfinite(of_lse).all()


@pytest.mark.parametrize("heads", [2, 16, 32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["v5e", "cpu"])
@pytest.mark.parametrize("pages", NARROW)
def test_tiles_on_tpu_are_those_of_wider_pages(pages, arch, dtype, heads):
    """A query's bits depend on where steps begin and on the rows of a tile."""
    pytest.importorskip("jax", reason="jax is not installed")
    from portakern.backends.pallas.configs import TilesConfig
    from portakern.backends.pallas.tpu import paged_attention as tpu

    found = []
    for each in (pages, dtype):
        call = called("v5e", dtype, each, heads, interpret=arch == "cpu")
        if arch == "cpu":
            call = call.replace(target=targets.Target("cpu"))
        fitted = tpu.fit(call, TilesConfig(**tpu.default_tiling(call)))
        if arch != "cpu" or heads < 32:  # of a chip that nobody names, 32 heads of float32 take more than is granted
            assert tpu.supports(call, fitted) is None
        found.append(fitted)
    assert found[0] == found[1]


@pytest.mark.parametrize("wanted", [{"return_lse": True}, {}])
def test_rows_of_sinks_fit_where_no_chip_is_named(wanted):
    """Their tiles lie on lanes, and are not halved off them."""
    pytest.importorskip("jax", reason="jax is not installed")
    from portakern.backends.pallas.configs import TilesConfig
    from portakern.backends.pallas.tpu import paged_attention as tpu

    call = called("v5e", pages="float32", interpret=True, given={"sinks": np.zeros(4)}, tokens=400, **wanted)
    call = call.replace(target=targets.Target("cpu"))
    assert tpu.supports(call, tpu.fit(call, TilesConfig(**tpu.default_tiling(call)))) is None
