"""Where tf32's range ends: the largest numbers of float32 become infinite as a matrix unit reads them, and nothing is
promised of what they are multiplied with."""

from __future__ import annotations

import numpy as np
import pytest

import portakern as pk
from portakern.core import registry
from portakern.core.oracle import as_float64, oracle
from portakern.spec.tolerance import TF32_END
from portakern.testing.statistics import examine
from tests.measuring import measure
from tests.ops import matmul as of_matmul
from tests.ops import record

LARGEST = np.finfo(np.float32).max
OPS = sorted(op for op in pk.ops() if any("tf32" in o.choices for o in registry.find_spec(op).options))


def nearest(x, precision):
    """Operands rounded to the nearest number of 10 bits, ties to even, as copy engines round them."""
    if precision != "tf32":
        return x
    bits = x.view(np.uint32)
    up = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    return np.where(np.isfinite(x), (up & np.uint32(0xFFFFE000)).view(np.float32), x)


def test_the_range_ends_where_rounding_overflows():
    below = np.nextafter(np.float32(TF32_END), np.float32(0))
    rounded = nearest(np.array([below, TF32_END, -TF32_END, LARGEST, 1], np.float32), "tf32")
    np.testing.assert_array_equal(rounded, np.array([2.0**128 - 2.0**117, np.inf, -np.inf, np.inf, 1], np.float32))


def operands(name):
    """The matrices that an op multiplies: those of its forward op, and a cotangent that is one."""
    spec = registry.find_spec(name)
    forward = registry.forward_of(spec) if spec.is_vjp else spec
    known = [a.name for a in forward.arrays if not a.optional and "float32" in a.dtypes and len(a.dims) > 1]
    return known + [a.name for a in spec.arrays if a.name == f"d_{forward.outputs[0].name}" and len(a.dims) > 1]


PLANTED = {name: operands(name) for name in OPS}
"""The operands of each op's products: its largest numbers beside zeros and faint ones."""


@pytest.fixture
def on_a_copy_engine(monkeypatch):
    monkeypatch.setattr(of_matmul, "cut", nearest)


def drawn(name, seed):
    """Arrays of a call in tf32, some of whose operands hold the largest numbers, and others zeros and faint numbers."""
    rng = np.random.default_rng(seed)
    arrays, options = record(name).case(rng, "float32", "normal")
    arguments = [a.name for a in registry.find_spec(name).arrays]
    given = dict(zip(arguments, arrays, strict=False))
    for operand in rng.permutation(PLANTED[name])[: rng.integers(1, 3)]:
        x = np.array(given[operand])
        at = rng.random(x.shape)
        x[at < 0.1] = rng.choice([LARGEST, -LARGEST, TF32_END])
        given[operand] = x
    for operand in PLANTED[name]:
        x = np.array(given[operand])
        x[(rng.random(x.shape) < 0.5) & (np.abs(x) < 1e30)] *= rng.choice([0.0, 1e-30])
        given[operand] = x
    return list(given.values()), {**options, "precision": "tf32"}


def fractions(name, arrays, options):
    with np.errstate(all="ignore"):
        return measure(record(name), arrays, options)


def test_every_op_of_products_is_here():
    assert len(OPS) == 13 and all(len(names) >= 2 for names in PLANTED.values())


@pytest.mark.parametrize("name", PLANTED)
def test_operands_that_become_infinite_break_no_bound(name, on_a_copy_engine):
    for seed in range(40):
        arrays, options = drawn(name, seed)
        found = fractions(name, arrays, options)
        assert max(found.values()) <= 1, (seed, found)


@pytest.mark.parametrize("name", PLANTED)
def test_near_overflow_a_copy_engine_is_right(name, on_a_copy_engine):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        arrays, options = record(name).case(rng, "float32", "near_overflow")
        found = fractions(name, arrays, {**options, "precision": "tf32"})
        assert max(found.values()) <= 1, (seed, found)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_no_exact_result_is_demanded_of_what_they_are_multiplied_with(precision):
    """The slope of a row that is ignored is 0 times each weight: NaN where one became infinite."""
    hidden, weight = np.ones((2, 64), np.float32), np.ones((1, 64), np.float32)
    weight[0, 3] = TF32_END
    call = pk.op("linear_cross_entropy").bind(
        hidden, weight, np.array([-100, 0], np.int32), precision=precision, return_slope=True
    )
    call = as_float64(call)
    refs = oracle(call)
    bounds = call.spec.bound(call, refs)
    names = [o.name for o in call.spec.outputs]
    got = [np.array(refs[names.index(n)], np.float32) for n in call.wants]
    slope = got[[n for n in names if n in call.wants].index("slope")]
    assert not slope.any()
    slope[:, 3] = np.nan
    assert bool(examine(call, got, refs, bounds, "special")["slope"].reasons) == (precision == "ieee")


def test_bounds_are_as_tight_as_ever_short_of_the_end(on_a_copy_engine):
    """One ulp below the end everything is promised, and so it is in ieee."""
    below = np.nextafter(np.float32(TF32_END), np.float32(0))
    a, b = np.array([[below, 1]], np.float32), np.array([[0.25], [3]], np.float32)
    for x, precision, promised in ((a, "tf32", True), (np.array([[TF32_END, 1]], np.float32), "tf32", False),
                                   (np.array([[TF32_END, 1]], np.float32), "ieee", True)):  # fmt: skip
        call = pk.op("matmul").bind(x, b, precision=precision)
        (limit,) = call.spec.bound(as_float64(call), oracle(call))
        assert np.isfinite(limit).all() == promised


@pytest.mark.parametrize("name", [name for name in OPS if "attention" in name])
def test_so_does_attention_of_three_products_in_ieee(name, monkeypatch):
    def threefold(a, b, precision="ieee", **how):
        parts = [(x1 := nearest(x, "tf32"), nearest(x - x1, "tf32")) for x in (a, b)]
        (a1, a2), (b1, b2) = parts
        return (a1 @ b1 + (a1 @ b2 + a2 @ b1),)

    plain, seen = of_matmul.simulate, []

    def products(a, b, precision="ieee", **how):
        seen.append(precision)
        return threefold(np.asarray(a, np.float32), np.asarray(b, np.float32)) if precision == "ieee" else plain(a, b)

    monkeypatch.setattr(of_matmul, "simulate", products)
    for seed in range(40):
        arrays, options = drawn(name, seed)
        found = fractions(name, arrays, {**options, "precision": "ieee"})
        assert max(found.values()) <= 1, (seed, found)
    assert set(seen) == {"ieee"}
