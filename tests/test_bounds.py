"""The specs' error bounds against simulated kernels: right ones stay inside and come near enough to matter, wrong ones
break out.
"""

from __future__ import annotations

import numpy as np
import pytest

from portakern import bounds, testing
from portakern.api import op
from portakern.core.oracle import oracle
from portakern.spec.dtypes import DTYPES as DTYPES_OF
from portakern.spec.dtypes import numpy_dtype
from portakern.spec.tolerance import BLOCK, compare, format_of, permitted_error, rounded
from tests.measuring import measure
from tests.ops import forward_records, record, records
from tests.ops._shared import pick, sweep, with_specials
from tests.ops.record import ANY, DTYPES, EVERY

F32 = np.float32
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
every_op = pytest.mark.parametrize("name", records())
every_dtype = pytest.mark.parametrize("dtype", [*DTYPES, "float64"])


def entries(field):
    """(op, entry) for each entry of a field of the records that is a mapping, for each dtype that it is for."""
    return [
        pytest.param(name, key, dtype, id=f"{name}: {key}-{dtype}")
        for name, r in records().items()
        for key, entry in getattr(r, field).items()
        for dtype in entry.dtypes
    ]


# --- right kernels ---


@every_dtype
@every_op
def test_right_kernels_stay_inside_and_the_bound_is_not_vacuous(name, dtype):
    r, reached, rounded = record(name), {}, set()
    for regime in r.regimes:
        for seed in range(8):
            rng = np.random.default_rng([seed, len(regime)])
            (arrays, options), variant = r.case(rng, dtype, regime), pick(rng, r.variants)
            worst = measure(r, arrays, options, **variant)
            assert max(worst.values()) <= 1, (regime, seed, options, variant, worst)
            if "ftz" in variant or (r.telling and regime not in r.telling):
                continue  # a flush alone reaches the whole bound of a number next to subnormal
            reached |= {output: max(fraction, reached.get(output, 0)) for output, fraction in worst.items()}
            rounded |= {
                n for n, (_, stored) in op(name).bind(*arrays, **options).outputs.items() if stored != "float32"
            }
    assert reached.keys() == {o.name for o in r.spec.shown}
    for output, fraction in reached.items():
        if r.spec.output(output).codes:
            continue  # a code is right, or so near a tie that it is right too
        if r.never_off(output):
            assert fraction == 0.0
            continue
        if dtype == "float64" and fraction == 0.0:
            continue  # the oracle's own operation, in its own precision
        if dtype == "float64":  # the units of float64 are doubled, for the oracle's own rounding
            assert fraction >= r.least_float64, reached
        elif dtype == "float32" or output not in rounded:
            assert fraction >= 0.03, reached
        else:
            assert fraction >= 0.26, f"a bound four times as wide would pass: {reached}"


@every_dtype
@every_op
def test_nan_and_inf_follow_the_reference(name, dtype):
    r = record(name)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        if r.special:
            arrays, options = r.special(rng, dtype, seed)
        else:
            arrays, options = r.case(rng, dtype, pick(rng, r.regimes))
            arrays = with_specials(rng, arrays)
        worst = measure(r, arrays, options, **pick(rng, r.variants))
        assert max(worst.values()) <= 1, (seed, worst)


@every_dtype
@every_op
def test_the_rounded_reference_is_inside(name, dtype):
    r = record(name)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        arrays, options = r.case(rng, dtype, pick(rng, r.regimes))
        exact = oracle(op(name).bind(*arrays, **options))
        assert max(measure(r, arrays, options, actual=exact).values()) <= 1


@pytest.mark.parametrize(("name", "corner", "dtype"), entries("corners"))
def test_corners_that_right_kernels_reach(name, corner, dtype):
    r = record(name)
    c = r.corners[corner]
    worst = measure(r, c.arrays(np.random.default_rng(0), dtype), c.options, **c.variant)
    assert c.least <= max(worst.values()) <= c.most, worst


@pytest.mark.parametrize("name", [r.op for r in forward_records() if "weight" in (r.rows or ())])
def test_a_subnormal_weight_may_flush_whatever_it_scales(name):
    x, weight = np.zeros((2, 200), np.float32), np.full(200, 0.9 * 2.0**-126, np.float32)
    x[:, 3] = 5  # 14 times the row's deviation
    required = {a.name: np.zeros_like(x) for a in op(name).spec.arrays if not a.optional}
    call = op(name).bind(**required | {"x": x, "weight": weight})
    sums = [x] * (len(call.wants) - 1)  # what comes beside y is x, to which nothing was added
    assert 0.1 < testing.compare_call(call, [np.zeros_like(x), *sums])["y"] <= 1
    with pytest.raises(testing.Broken, match="out of bounds"):
        testing.compare_call(call, [np.full_like(x, 2.0**-120), *sums])


def test_scores_far_from_0():
    """-1e5 beside nothing else is exact; finfo.min makes a convex average or zeros."""
    attention, rng = record("attention"), np.random.default_rng(0)
    q, k, v = (sweep(rng, shape, "float32") for shape in ((1, 8, 1, 16), (1, 40, 1, 16), (1, 40, 1, 4)))
    outside = np.full((1, 8, 1, 4), np.float32(50)), np.zeros((1, 1, 8), np.float32)
    for low in (-1e4, -1e5, float(np.finfo(np.float32).min)):
        some, every = np.where(np.arange(40) % 3, low, 0).astype(np.float32), np.full(40, low, np.float32)
        for bias in (some, every):
            arrays, options = (q, k, v, np.broadcast_to(bias, (1, 1, 8, 40))), {"return_lse": True}
            assert max(measure(attention, arrays, options).values()) <= 1
            assert measure(attention, arrays, options, actual=outside)["o"] > 1


# --- faults ---


@pytest.mark.parametrize("name", [name for name, r in records().items() if not r.exact])
def test_float32_faults_that_a_bound_four_times_as_wide_would_miss(name):
    r = record(name)
    for seed in range(4):
        arrays, options = r.near.arrays(np.random.default_rng(seed)), r.near.options
        got = r.simulate(*arrays, **options, **r.near.plant)
        off = [r.near.off.get(o.name, 0.0) for o in r.spec.shown]
        got = [y if y is None else y * np.float32(1 + e) for y, e in zip(got, off, strict=True)]
        worst = measure(r, arrays, options, got)
        assert worst.keys() == {o.name for o in r.spec.shown}
        worst = [fraction for output, fraction in worst.items() if not r.spec.output(output).codes]
        assert min(worst) > 1 and max(worst) < 4, worst


@pytest.mark.parametrize(("name", "fault", "dtype"), entries("faults"))
def test_faults_break_the_bound(name, fault, dtype):
    r = record(name)
    f = r.faults[fault]
    arrays = f.arrays(np.random.default_rng(7), dtype)
    assert max(measure(r, arrays, f.options).values()) <= 1
    worst = measure(r, arrays, f.options, **f.plant)
    assert {ANY: max, EVERY: min}.get(f.breaks, lambda _: worst[f.breaks])(worst.values()) > 1, worst


# --- the comparison itself ---


def test_compare_measures_the_worst_fraction():
    c = compare(np.array([1.0, 2.5, 0.0], F32), np.array([1.0, 2.0, 0.0]), np.array([0.1, 1.0, 0.0]), "float32")
    assert c.ok and c.worst == 0.5 and list(c.err) == [0, 0.5, 0]
    c = compare(np.array([1.0, 2.5], F32), np.array([1.0, 2.0]), np.array([0.0, 0.25]), "float32")
    assert list(c.bad) == [False, True] and c.worst == 2


@pytest.mark.parametrize(
    ("got", "ref", "bound", "ok"),
    [
        (np.nan, 1.0, np.inf, True),
        (np.nan, np.nan, np.inf, True),
        (np.nan, 1.0, 5.0, False),
        (np.inf, 1.0, 5.0, False),
        (np.nan, np.nan, 0.0, True),
        (1.0, np.nan, 0.0, False),
        (np.inf, np.nan, 0.0, False),
        (np.inf, np.inf, 0.0, True),
        (-np.inf, np.inf, 0.0, False),
        (65504.0, np.inf, 0.0, False),
        (np.nan, np.inf, 0.0, False),
        (65504.0, 65519.0, 32.0, True),
        (np.inf, 65519.0, 32.0, True),
        (-np.inf, 65519.0, 32.0, False),
        (np.inf, 65480.0, 32.0, False),
        (np.inf, 65600.0, 32.0, True),
        (65504.0, 65600.0, 100.0, True),
        (65504.0, 65600.0, 32.0, False),
        (np.nan, 65600.0, 100.0, False),
        (0.0, -0.0, 0.0, True),
        (-np.inf, 70000.0, 200000.0, True),
        (-np.inf, 70000.0, 100000.0, False),
        (np.nan, 70000.0, 100000.0, False),
        (np.nan, 70000.0, 200000.0, True),
        (np.nan, -70000.0, 200000.0, True),
    ],
)  # fmt: skip
def test_compare_on_nan_inf_and_overflow(got, ref, bound, ok):
    c = compare(np.array([got], np.float16), np.array([ref]), np.array([bound]), "float16")
    assert c.ok is ok
    assert c.worst == 0 or np.isfinite([got, ref, bound]).all()


def test_compare_is_the_same_wherever_a_block_ends():
    """One element that is no number has no say in how the others are compared, and no block forgets an earlier one's
    worst."""
    rng, size = np.random.default_rng(0), 3 * BLOCK + 5
    ref = rng.standard_normal(size)
    got, bound = (ref + 1e-3).astype(F32), np.full(size, 2e-3)
    got[[7, BLOCK - 1, BLOCK, size - 1]] = ref[[7, BLOCK - 1, BLOCK, size - 1]] + 1.0
    ref[[3, 2 * BLOCK]], got[[3, 2 * BLOCK + 1]] = np.nan, np.inf
    bound[[BLOCK, 11]] = np.inf, 0.0
    c = compare(got, ref, bound, "float32")
    assert [*np.flatnonzero(c.bad)] == [3, 7, 11, BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, size - 1]
    assert (
        c.worst == np.inf and c.err[2 * BLOCK + 1] == np.inf and np.allclose(c.err[BLOCK + 1 : 2 * BLOCK], 1e-3, 1e-3)
    )
    bound[11] = 1e-3
    assert compare(got, ref, bound, "float32").worst == pytest.approx(500, rel=1e-3)
    found = compare(*(a[: 2 * BLOCK].reshape(2, BLOCK).T for a in (got, ref, bound)), "float32")
    assert found.bad.shape == (BLOCK, 2) and [*np.argwhere(found.bad)[-1]] == [BLOCK - 1, 0] and found.bad.sum() == 4
    with pytest.raises(ValueError, match="bound is NaN"):
        compare(got, ref, np.where(np.arange(size) == BLOCK + 2, np.nan, bound), "float32")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "bfloat16"])
def test_codes_are_those_to_which_a_value_within_the_bound_rounds(dtype):
    """Against the set that rounding many values gives: at ties, beside them, in the middle, and with wide bounds."""
    kind, rng = DTYPES_OF[dtype], np.random.default_rng(0)
    every = np.arange(2**kind.bits).astype(f"u{kind.bits // 8}").view(kind.numpy)
    every = np.unique(every[np.isfinite(every.astype(np.float64))].astype(np.float64))
    every = every[every.size // 2 :][:300]
    at = rng.choice(every.size - 1, 20)
    refs = np.concatenate([every[at], (every[at] + every[at + 1]) / 2, every[at] * 0.3 + every[at + 1] * 0.7])
    for share in (0.0, 1e-6, 0.2, 3.0):
        for ref in refs:
            bound = share * abs(ref)
            tried = np.concatenate([every, (every[:-1] + every[1:]) / 2])
            tried = np.array([*tried[np.abs(tried - ref) <= bound], ref - bound, ref, ref + bound])
            right = {*rounded(tried, dtype).astype(np.float64)} & {*every}
            found = compare(every, np.full(every.shape, ref), np.full(every.shape, bound), dtype, codes=True)
            assert {*every[~found.bad]} == right and right, (ref, bound)
            alone = compare(every[~found.bad], *np.full((2, len(right)), [[ref], [bound]]), dtype, codes=True)
            assert alone.worst <= 1 + 1e-12 and not alone.bad.any()


@pytest.mark.parametrize(
    ("got", "ref", "bound", "dtype", "ok"),
    [
        (2.0, 2.5, 0.0, "int8", True),  # a tie goes to the even code
        (3.0, 2.5, 0.0, "int8", False),
        (3.0, 2.5, 1e-9, "int8", True),
        (2.0, 2.51, 0.005, "int8", False),
        (127.0, 127.4, 0.0, "int8", True),
        (np.nan, 463.9, 0.0, "float8_e4m3fn", False),
        (448.0, 463.9, 0.2, "float8_e4m3fn", True),
        (np.nan, 463.9, 0.2, "float8_e4m3fn", True),  # beyond 464 it overflows, and to NaN
        (np.nan, 470.0, 0.2, "float8_e4m3fn", True),
        (448.0, 470.0, 0.2, "float8_e4m3fn", False),
        (np.inf, 61439.0, 2.0, "float8_e5m2", True),
        (np.inf, 61439.0, 0.5, "float8_e5m2", False),
        (np.nan, np.nan, 0.0, "float8_e4m3fn", True),
        (0.0, np.nan, 0.0, "float8_e4m3fn", False),
        (np.nan, np.inf, 0.0, "float8_e4m3fn", True),
        (5.0, np.nan, np.inf, "int8", True),
    ],
)  # fmt: skip
def test_codes_at_ties_and_ends(got, ref, bound, dtype, ok):
    c = compare(np.array([got]), np.array([ref]), np.array([bound]), dtype, codes=True)
    assert c.ok is ok
    with pytest.raises(ValueError, match="bound is NaN"):
        compare(np.zeros(1), np.zeros(1), np.array([np.nan]), dtype, codes=True)


def test_the_share_of_a_code_is_the_error_that_it_takes():
    """1.9 lies 0.0375 from the tie between 1.875, to which it rounds, and 2."""
    got, ref = np.array([1.875, 2.0]), np.full(2, 1.9)
    c = compare(got, ref, np.full(2, 0.075), "float8_e4m3fn", codes=True)
    assert c.ok and c.worst == pytest.approx(0.5)
    c = compare(got, ref, np.full(2, 0.03), "float8_e4m3fn", codes=True)
    assert [*c.bad] == [False, True] and c.worst == pytest.approx(1.25)
    assert [*permitted_error(np.array([0.03, 0.075]), ref, "float8_e4m3fn", True)] == pytest.approx([0.025, 0.1])
    most = np.array([1.5e308])  # twice that is no number
    c = compare(np.nextafter(most, np.inf), most, most * 2.0**-50, "float64", codes=True)
    assert c.ok and c.worst < 0.25


def test_compare_refuses_a_bound_that_is_nan():
    with pytest.raises(ValueError, match="bound is NaN"):
        compare(np.zeros(1), np.zeros(1), np.array([np.nan]), "float32")
    assert compare(np.array([np.nan]), np.array([np.nan]), np.array([np.nan]), "float32").ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_formats(dtype):
    f, to = format_of(dtype), numpy_dtype(dtype)
    assert np.isfinite(np.float64(f.overflow * (1 - 2.0**-23)).astype(to)) and np.isinf(
        np.float64(f.overflow).astype(to)
    )
    assert to.type(1 + f.U) == 1 != to.type(1 + 2 * f.U)


def test_nothing_is_promised_of_an_lse_whose_dot_is_nan_by_overflow():
    """In float64, where infinities of both signs meet in the oracle's dot; a fused multiply-add has one of them."""
    q, k = (np.reshape(x, (1, 1, 1, 2)) for x in ([-2e307, -1e308], [2e307, -6e307]))
    found = bounds.attention(q, k, k, return_lse=True)
    lse = found.outputs["lse"]
    assert np.isnan(lse.reference).all() and np.isposinf(lse.error).all()
