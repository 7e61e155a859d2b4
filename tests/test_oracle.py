"""The float64 oracle against formulas written another way: scalar loops, PyTorch in float64, and the rows of the
edge-case table.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from portakern.api import op
from portakern.core.framework import convert, frameworks
from portakern.core.oracle import oracle, rounded
from tests.ops import forward_records
from tests.ops._shared import normal64 as normal
from tests.ops._shared import results

inf, nan = math.inf, math.nan
pytestmark = pytest.mark.filterwarnings("error")


def run(name, *arrays, **given):
    """The outputs that callers are shown."""
    call = op(name).bind(*arrays, **given)
    return oracle(call)[: len(call.spec.shown)]


# --- every op ---


@pytest.mark.parametrize(
    ("r", "arguments"),
    [pytest.param(r, make, id=f"{r.op}: {key}") for r in forward_records() for key, make in r.formula_calls.items()],
)
def test_the_oracle_is_the_formula_written_another_way(r, arguments):
    arrays, options = arguments()
    relative, absolute = r.formula_tolerance
    for mine, theirs in zip(run(r.op, *arrays, **options), r.formula(*arrays, **options), strict=True):
        assert mine.shape == theirs.shape
        np.testing.assert_allclose(mine, theirs, rtol=relative, atol=absolute)


@pytest.mark.parametrize("r", forward_records(), ids=lambda r: r.op)
def test_against_torch_in_float64(r):
    pytest.importorskip("torch")
    arrays, options = r.compared.arrays(r.op, "float64"), r.compared.options
    numpy, framework = frameworks()["numpy"], frameworks()["torch"]
    call = op(r.op).bind(**arrays, **options)
    codes = any(r.spec.output(name).codes for name in call.wants)
    in_float64 = {n: v for n, v in options.items() if codes or r.spec.option(n).kind != "dtype"}
    theirs = r.in_torch(*(convert(a, numpy, framework) for a in arrays.values()), **in_float64)
    for name, mine, its in zip(call.wants, results(run(r.op, **arrays, **options)), results(theirs), strict=True):
        if r.spec.output(name).codes:  # which the oracle has before they are rounded
            mine, its = rounded(mine, call.outputs[name][1]).astype(np.float64), its.double()
        np.testing.assert_allclose(mine, its, rtol=1e-12, atol=1e-14)


# --- matmul ---


def test_matmul_of_nan_and_inf_stays_in_its_row():
    a, b = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32)
    a[0, 1], a[1, 0], a[2, :2], b[0, 1] = nan, inf, (inf, -inf), 0
    (c,) = run("matmul", a, b)
    np.testing.assert_array_equal(c, [[nan, nan], [inf, nan], [nan, nan], [3, 2]])


def test_matmul_of_16_bit_integers_is_exact_and_unrounded():
    a = np.full((1, 3000), 11, np.float16)
    assert run("matmul", a, a.T)[0].item() == 121 * 3000  # beyond float16
    assert run("matmul", np.ones((2, 0)), np.ones((0, 3)))[0].tolist() == [[0] * 3] * 2


# --- softmax ---


def test_softmax_takes_every_finite_x():
    big = np.finfo(np.float32).max
    x = np.array([[big, -big, 0], [big, big, -big], [-1e5, -1e5, -1e5 - 2], [5e-45, 0, -5e-45]], np.float32)
    (y,) = run("softmax", x)
    e = math.exp(-2)
    np.testing.assert_allclose(
        y, [[1, 0, 0], [0.5, 0.5, 0], [1 / (2 + e), 1 / (2 + e), e / (2 + e)], [1 / 3] * 3], rtol=1e-14
    )


@pytest.mark.parametrize("row", [[-inf, -inf, -inf], [inf, 0, 1], [inf, inf, -inf], [nan, 0, -inf]])
def test_softmax_rows_that_are_nan(row):
    (y,) = run("softmax", np.array([row, [0, 0, -inf]], np.float32))
    assert np.isnan(y[0]).all() and y[1].tolist() == [0.5, 0.5, 0]


def test_softmax_of_nothing_is_nothing():
    assert run("softmax", np.ones((0, 3)))[0].shape == (0, 3)
    assert run("softmax", np.ones((3, 0)))[0].shape == (3, 0)


# --- layernorm ---


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_layernorm_rows_that_are_nan(bad):
    x = normal(3, 5).astype(np.float32)
    x[1, 2] = bad
    (y,) = run("layernorm", x, np.ones(5, np.float32))
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


def test_layernorm_of_constant_rows():
    x = np.full((2, 301), np.float32(1.1))
    assert (run("layernorm", x)[0] == 0).all()
    assert np.isnan(run("layernorm", x, eps=0.0)[0]).all()  # 0 / 0
    assert run("layernorm", np.ones((4, 1)), None, np.full(1, 2.5))[0].tolist() == [[2.5]] * 4


# --- rmsnorm ---


def test_rmsnorm_of_nan_inf_and_zeros():
    x = np.array([[1, nan, 2], [1, -inf, 2], [0, 0, 0], [3, -3, 3]], np.float32)
    np.testing.assert_array_equal(
        run("rmsnorm", x, eps=0.0)[0], [[nan] * 3, [0, nan, 0], [nan] * 3, [1, -1, 1]]
    )  # zeros: 0 / 0
    assert (run("rmsnorm", x[2:3])[0] == 0).all()


# --- attention ---


def test_attention_lse_only_when_asked():
    q = normal(1, 2, 1, 3)
    assert run("attention", q, q, q)[1] is None


def test_attention_row_without_keys_is_zeros_whatever_it_holds():
    q, k, v = normal(1, 5, 1, 4), normal(1, 2, 1, 4), normal(1, 2, 1, 3)
    q[0, 0], k[0, 1], v[0, 1] = nan, inf, nan
    o, lse = run("attention", q, k, v, is_causal=True, return_lse=True)
    assert (o[0, :3] == 0).all() and (lse[0, 0, :3] == -inf).all()
    np.testing.assert_allclose(o[0, 3, 0], v[0, 0, 0])
    assert np.isnan(o[0, 4]).all()


def test_attention_without_any_key():
    o, lse = run("attention", normal(1, 2, 1, 3), normal(1, 0, 1, 3), normal(1, 0, 1, 4), return_lse=True)
    assert o.shape == (1, 2, 1, 4) and (o == 0).all() and (lse == -inf).all()


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_attention_k_at_a_masked_pair_never_leaks(bad):
    q, k, v = normal(1, 4, 1, 3), normal(1, 4, 1, 3), normal(1, 4, 1, 2)
    clean = run("attention", q, k, v, is_causal=True, return_lse=True)
    k[0, 3] = bad
    o, lse = run("attention", q, k, v, is_causal=True, return_lse=True)
    np.testing.assert_array_equal(o[:, :3], clean[0][:, :3])
    np.testing.assert_array_equal(lse[..., :3], clean[1][..., :3])


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_attention_v_reaches_the_rows_that_see_its_key(bad):
    q, k, v = normal(1, 4, 1, 3), normal(1, 4, 1, 3), normal(1, 4, 1, 2)
    clean = run("attention", q, k, v, is_causal=True)[0]
    v[0, 2, 0, 1] = bad
    o = run("attention", q, k, v, is_causal=True)[0]
    np.testing.assert_array_equal(o[0, :2], clean[0, :2])
    np.testing.assert_array_equal(o[..., 0], clean[..., 0])
    np.testing.assert_array_equal(o[0, 2:, 0, 1], [bad, bad])


def test_attention_nan_and_inf_scores():
    q, k, v = normal(1, 3, 1, 2), np.ones((1, 3, 1, 2)), normal(1, 3, 1, 2)
    q[0, 0, 0, 0] = nan
    bias = np.zeros((1, 1, 3, 3))
    bias[0, 0, 1, 2] = inf
    bias[0, 0, 2, :2] = -inf
    o, lse = run("attention", q, k, v, bias, return_lse=True)
    assert np.isnan(o[0, :2]).all() and np.isnan(lse[0, 0, :2]).all()
    np.testing.assert_allclose(o[0, 2], v[0, 2])
    assert lse[0, 0, 2] == pytest.approx(q[0, 2].sum() / math.sqrt(2))


@pytest.mark.parametrize("score", [nan, inf])
def test_attention_bias_of_minus_inf_does_not_hide_a_nan_or_inf_score(score):
    q, k = np.ones((1, 2, 1, 1)), np.array([score, 1]).reshape(1, 2, 1, 1)
    bias = np.array([-inf, 0]).reshape(1, 1, 1, 2)
    o, lse = run("attention", q, k, np.ones((1, 2, 1, 1)), bias, return_lse=True)
    assert np.isnan(o).all() and np.isnan(lse).all()


def test_attention_score_of_minus_inf_counts_as_masked():
    q, k, v = np.ones((1, 1, 1, 1)), np.array([-inf, 2]).reshape(1, 2, 1, 1), np.array([nan, 7]).reshape(1, 2, 1, 1)
    o, lse = run("attention", q, k, v, return_lse=True)
    assert o.item() == 7 and lse.item() == 2
    o, lse = run("attention", q, k[:, :1], v[:, :1], return_lse=True)
    assert o.item() == 0 and lse.item() == -inf


def test_attention_far_scores_and_finfo_min():
    q, k, v = normal(1, 2, 1, 4), normal(1, 5, 1, 4), normal(1, 5, 1, 3)
    near, far = (run("attention", q, k, v, np.full((1, 1, 1, 5), c), return_lse=True) for c in (0.0, -1e5))
    np.testing.assert_allclose(far[0], near[0], rtol=1e-9)
    np.testing.assert_allclose(far[1], near[1] - 1e5, rtol=1e-14)
    lowest = np.full((1, 1, 1, 5), np.finfo(np.float32).min, np.float32)
    o = run("attention", *(x.astype(np.float32) for x in (q, k, v)), lowest)[0]
    np.testing.assert_allclose(o[0, :, 0], np.tile(v[0, :, 0].mean(0), (2, 1)), rtol=1e-5)


# --- PyTorch's own kernel in float64 ---


def test_attention_against_torchs_own():
    torch = pytest.importorskip("torch")
    from torch.nn import functional as F

    q, k, v = (torch.from_numpy(normal(2, n, h, 8, seed=h)) for n, h in ((6, 4), (9, 2), (9, 2)))
    mask = torch.ones(6, 9, dtype=torch.bool).tril(9 - 6)
    theirs = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    np.testing.assert_allclose(run("attention", q, k, v, is_causal=True)[0], theirs, rtol=1e-12, atol=1e-14)
