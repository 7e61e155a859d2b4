"""What is attention's gradients' own: hidden pairs, rows without a key, and every kind of mask and bias against finite
differences.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from portakern.api import op
from portakern.core.oracle import as_float64, oracle
from tests.ops._shared import draw
from tests.ops.attention_vjp import with_finfo_min, with_residuals
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
    d_q, d_k, d_v, _ = call.spec.bound(as_float64(call), ref)
    assert all(np.isfinite(x).all() for x in (*ref[:3], d_k, d_v)) and np.isinf(d_q).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_in_lse_poisons_what_its_row_reaches(dtype):
    """Also where the row's bias is finfo.min, so that its keys have weights of 0, or of 1."""
    arrays = list(with_finfo_min(np.random.default_rng(0), dtype))
    at = [a.name for a in op("attention_vjp").spec.arrays].index("lse")
    arrays[at][:, :, 3] = np.nan
    assert np.isnan(oracle(op("attention_vjp").bind(*arrays))[1]).all()


# --- the oracle ---


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (2, 1)},
    "left": {"window": (3, None)},
    "right": {"window": (None, 0)},
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 1.5},
    "all": {"is_causal": True, "window": (4, None), "scale": 0.9, "softcap": 2.0},
}


def loss(arrays, options, d_o, d_lse):
    o, lse = op("attention", backend="reference")(**arrays, **options, return_lse=True)
    return np.sum(o * d_o) + np.sum(np.where(np.isfinite(lse), lse, 0) * d_lse)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_oracle_agrees_with_finite_differences(options, segments):
    rng = np.random.default_rng(3)
    batch, q_len, kv_len, kv_heads, group, d, dv = 2, 6, 5, 2, 2, 4, 3
    ids = (
        {"q_segment_ids": rng.integers(0, 3, (batch, q_len)), "kv_segment_ids": rng.integers(0, 2, (batch, kv_len))}
        if segments
        else {}
    )
    for wide in [None, *itertools.product((False, True), repeat=3)]:
        shapes = {
            "q": (batch, q_len, kv_heads * group, d),
            "k": (batch, kv_len, kv_heads, d),
            "v": (batch, kv_len, kv_heads, dv),
        }
        if wide is not None:
            shapes["bias"] = tuple(
                n if w else 1 for n, w in zip((batch, kv_heads * group, q_len), wide, strict=True)
            ) + (kv_len,)
        floats = {n: rng.standard_normal(s) for n, s in shapes.items()}
        saved = with_residuals(rng, floats | ids, options, "float64", lse_too=True)
        gradients = oracle(op("attention_vjp").bind(**saved, **options))
        for name, gradient in zip(("q", "k", "v", "bias"), gradients, strict=True):
            if name in floats:
                way, step = rng.standard_normal(floats[name].shape), 1e-5
                up, down = (
                    loss(floats | ids | {name: floats[name] + s * way}, options, saved["d_o"], saved["d_lse"])
                    for s in (step, -step)
                )
                assert np.isclose((up - down) / (2 * step), np.sum(gradient * way), rtol=1e-6, atol=1e-7), (name, wide)
