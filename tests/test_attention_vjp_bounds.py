"""What is attention's gradients' own: hidden pairs, rows without a key, and every kind of mask and bias against finite
differences.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from portakern.api import op
from portakern.core.oracle import as_float64, oracle
from tests.measuring import evidence, simulated
from tests.ops._shared import draw
from tests.ops.attention import with_finfo_min, with_residuals
from tests.ops.record import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_what_a_segment_hides_leaves_no_trace():
    """NaN in keys, values and cotangents of hidden pairs: nothing but products of a 0 with the NaN itself may
    notice.
    """
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, shape, "float32") for shape in ((1, 20, 2, 8), (1, 30, 1, 8), (1, 30, 1, 8)))
    ids = {"q_segment_ids": np.arange(20)[None] % 2, "kv_segment_ids": np.arange(30)[None] % 3}
    v[:, 2::3] = np.nan
    arrays = with_residuals(rng, {"q": q, "k": k, "v": v} | ids, {}, "float32", lse_too=True)
    call = op("attention_vjp").bind(**arrays)
    ref = oracle(call)
    assert all(np.isfinite(x).all() for x in (*ref[:3], *call.spec.bound(as_float64(call), ref)[:3]))
    k[:, 2::3] = np.nan
    arrays |= {"k": k}
    call = op("attention_vjp").bind(**arrays)
    ref = oracle(call)
    d_q, d_k, d_v, *_ = call.spec.bound(as_float64(call), ref)
    assert all(np.isfinite(x).all() for x in (*ref[:3], d_k, d_v)) and np.isinf(d_q).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_in_lse_poisons_what_its_row_reaches(dtype):
    """Also where the row's bias is finfo.min, so that its keys have weights of 0, or of 1."""
    arrays = list(with_finfo_min(np.random.default_rng(0), dtype))
    at = [a.name for a in op("attention_vjp").spec.arrays].index("lse")
    arrays[at][:, :, 3] = np.nan
    assert np.isnan(oracle(op("attention_vjp").bind(*arrays))[1]).all()


# --- the oracle ---


OPTIONS = [
    {},
    {"is_causal": True},
    {"window": (2, 1)},
    {"window": (3, None)},
    {"window": (None, 0)},
    {"scale": -0.7},
    {"softcap": 1.5},
    {"is_causal": True, "window": (4, None), "scale": 0.9, "softcap": 2.0},
]


def loss(arrays, options, d_o, d_lse):
    o, lse = op("attention", backend="reference")(**arrays, **options, return_lse=True)
    return np.sum(o * d_o) + np.sum(np.where(np.isfinite(lse), lse, 0) * d_lse)


@pytest.mark.parametrize("segments", [False, True])
def test_the_oracle_agrees_with_finite_differences_whatever_broadcasts(segments):
    for options, wide in itertools.product(OPTIONS, [None, *itertools.product((False, True), repeat=3)]):
        differs_by_nothing(segments, options, wide)


def differs_by_nothing(segments, options, wide):
    rng = np.random.default_rng(3)
    batch, q_len, kv_len, kv_heads, group, d, dv = 2, 6, 5, 2, 2, 4, 3
    ids = (
        {"q_segment_ids": rng.integers(0, 3, (batch, q_len)), "kv_segment_ids": rng.integers(0, 2, (batch, kv_len))}
        if segments
        else {}
    )
    shapes = {
        "q": (batch, q_len, kv_heads * group, d),
        "k": (batch, kv_len, kv_heads, d),
        "v": (batch, kv_len, kv_heads, dv),
    }
    if wide is not None:
        shapes["bias"] = tuple(n if w else 1 for n, w in zip((batch, kv_heads * group, q_len), wide, strict=True)) + (
            kv_len,
        )
        shapes["sinks"] = (kv_heads * group,)
    floats = {n: rng.standard_normal(s) for n, s in shapes.items()}
    saved = with_residuals(rng, floats | ids, options, "float64", lse_too=True)
    gradients = oracle(op("attention_vjp").bind(**saved, **options))
    for name, gradient in zip(("q", "k", "v", "bias", "sinks"), gradients, strict=True):
        if name in floats:
            way, step = rng.standard_normal(floats[name].shape), 1e-5
            up, down = (
                loss(floats | ids | {name: floats[name] + s * way}, options, saved["d_o"], saved["d_lse"])
                for s in (step, -step)
            )
            assert np.isclose((up - down) / (2 * step), np.sum(gradient * way), rtol=1e-6, atol=1e-7), (name, wide)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_that_are_stored_with_one_error_are_no_evidence(dtype):
    """Where all scores are alike, P is 1/k, and 1/3 leans towards 0 in float16 as every element of d_v then does.
    Truncation is still found wherever weights differ."""

    def found(keys, scale, truncates=False):
        rng = np.random.default_rng(0)
        forms = {"q": (7, 2, 15, 7), "k": (7, keys, 5, 7), "v": (7, keys, 5, 9)}
        arrays = {name: draw(rng, form, dtype) for name, form in forms.items()}
        options = {"scale": scale}
        arrays = tuple(with_residuals(rng, arrays, options, dtype).get(a.name) for a in op("attention_vjp").spec.arrays)
        kernel = partial(simulated, truncates=truncates)
        return evidence("attention_vjp", arrays, options, kernel)["d_v"][0]

    for keys in (3, 5, 6, 7):
        for scale in (0.0, 1e-7):
            assert not found(keys, scale).applies
    assert found(4, 0.0).applies and not found(4, 0.0).reasons  # 1/4 is stored as it is
    assert found(7, 0.5).applies and not found(7, 0.5).reasons
    assert any("errors lean towards 0" in reason for reason in found(7, 0.5, truncates=True).reasons)


@pytest.mark.parametrize("backend", ["triton", "pallas"])
@pytest.mark.parametrize("scale", [1e30, -1e30])
def test_what_says_that_an_lse_has_no_rest_is_small_in_units_of_a_large_scale(backend, scale):
    """Of one key the weight is 1, and d_v the sum of d_o, whatever scores are measured in."""
    rng = np.random.default_rng(0)
    q, k, v = (np.zeros((1, n, 1, 16), np.float32) for n in (5, 1, 1))
    arrays = with_residuals(rng, {"q": q, "k": k, "v": v}, {"scale": scale}, "float32", lse_too=True)
    arrays["d_o"] = np.ones_like(arrays["d_o"])
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if backend == "pallas":
        pytest.importorskip("jax", reason="jax is not installed")
    given = {n: torch.from_numpy(x) if backend == "triton" else x for n, x in arrays.items() if x is not None}
    d_v = op("attention_vjp", backend=backend)(**given, scale=scale)[2]
    assert np.asarray(d_v).ravel().tolist() == [5.0] * 16
