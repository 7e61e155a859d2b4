"""Rows that XLA lays side by side on TPUs: by which rule, and that the way they lie changes no bit of any."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp

import portakern as pk
from portakern.backends.pallas.lib.mosaic_tpu import rows as row_walk
from portakern.backends.pallas.lib.mosaic_tpu.layout import SideBySide, native_axes
from portakern.core import registry

LAID_OUT = {
    (1, 1000): (0, 1), (8, 1000): (0, 1), (100, 1000): (0, 1), (128, 1000): (1, 0), (129, 1000): (0, 1),
    (200, 1000): (0, 1), (256, 1000): (1, 0), (1000, 1000): (0, 1), (1024, 50257): (1, 0), (4096, 129): (1, 0),
    (127, 129): (1, 0), (300, 129): (1, 0), (4096, 4): (1, 0), (4096, 127): (0, 1), (5000, 1001): (0, 1),
    (4095, 1000): (1, 0), (4100, 1000): (0, 1), (4096, 1016): (1, 0), (128, 1008): (1, 0), (4096, 1024): (0, 1),
    (8, 512, 1000): (2, 1), (4, 100, 1000): (0, 2), (512, 8, 1000): (2, 0), (512, 100, 1000): (2, 0),
    (2, 3, 128, 1000): (3, 2), (128, 3, 2, 1000): (3, 0), (3, 5, 1000): (0, 2), (2, 1000, 1000): (1, 2),
    (1, 4096, 1000): (2, 1), (4096, 1, 1000): (2, 0), (512, 8, 1001): (1, 0), (512, 7, 1001): (2, 0),
    (128, 128, 100): (0, 1), (3, 128, 4, 100): (2, 1), (130, 2, 1001): (1, 2), (2, 129, 1000): (0, 2),
}  # fmt: skip
"""Shape -> the axes along sublanes and along lanes, as libtpu 0.0.50 compiled a program of one such argument."""


def test_the_rule_is_that_of_libtpu():
    assert {shape: native_axes(shape) for shape in LAID_OUT} == LAID_OUT


def test_rows_are_side_by_side_where_xla_puts_them_so():
    assert SideBySide.of((4096, 1000)).rows == (1, 4096, 1000)
    assert SideBySide.of((512, 7, 1001)).rows == (7, 512, 1001)  # the first axis lies along lanes
    for shape in ((4096, 1024), (100, 1000), (1000,), (512, 8, 1001)):
        assert SideBySide.of(shape) is None
    x = np.arange(3 * 128 * 130).reshape(3, 128, 130)
    for view in (SideBySide(x.shape, 0), SideBySide(x.shape, 1)):
        assert view.as_it_lies(x).shape == (view.rows[0], view.rows[2], view.rows[1])
        assert (view.back(view.as_it_lies(x)) == x).all()
        assert (view.numbers_back(view.numbers(x[..., 0])) == x[..., 0]).all()


def dims_of(array):
    return tuple(name for d in array.dims for name in d.factors)


def walks(spec):
    """Whether an op's arrays are rows of one length, and weights of that length, which a TPU reads block by block."""
    pallas = registry.backend("pallas")
    config = pallas.implementation(spec.name, next(f for f in pallas.families if not f.targets)).config
    return {*config.__annotations__} == {"block_rows", "block_n"} and all(dims_of(a) in ROWS for a in spec.arrays)


ROWS = {("shape",): 0, ("batch", "n"): 0, ("n",): 1}
OPS = [name for name in registry.ops() if walks(registry.find_spec(name))]


def made(name, x, g, w, block_n):
    """The first result, of x and g for the arrays of rows in turn, and of w for weights."""
    op = pk.op(name, backend="pallas", tiling={"block_rows": 128, "block_n": block_n})
    rows = itertools.cycle((x, g))
    given = {a.name: w if ROWS[dims_of(a)] else next(rows) for a in op.spec.arrays}
    found = op(**given)
    return np.asarray(found[0] if isinstance(found, tuple) else found)


def arrays(m, n, dtype):
    rng = np.random.default_rng(n)
    x, g, w = (jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in ((*m, n), (*m, n), (n,)))
    return (3 * x + 1).astype(dtype), g.astype(dtype), w


@pytest.mark.parametrize(
    ("name", "m", "n", "dtype", "block_n"),
    [
        *((name, (256,), 300, "float32", 128) for name in OPS),  # three blocks, the last ragged
        *((name, (128,), 1000, "bfloat16", 1024) for name in OPS[::3]),
        *((name, (3, 128), 200, "float32", 256) for name in OPS[1::3]),
    ],
)
def test_a_row_alone_has_the_same_bits(name, m, n, dtype, block_n):
    """A row alone lies along lanes, and many lie side by side."""
    x, g, w = arrays(m, n, dtype)
    assert SideBySide.of(x.shape) and SideBySide.of((1, n)) is None
    together = made(name, x, g, w, block_n)
    together = together.reshape(x.size // n, -1)  # logsumexp has a number a row
    flat = x.reshape(-1, n), g.reshape(-1, n)
    for row in (0, len(flat[0]) - 1):
        alone = made(name, *(a[row : row + 1] for a in flat), w, block_n)
        assert alone.tobytes() == together[row].tobytes()


def test_a_row_is_summed_in_one_order_whatever_rows_come_with_it():
    """Pieces are as long as few rows let them be."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(256, 1152)).astype(np.float32))

    def of(height):
        strip = row_walk.Strip(row_walk.BlockWalk((height, 1100), 1, height, 1152, 1), 0, 0, height)
        (found,) = strip.by_register(lambda at: (at.within(at(x[:height])),), jnp.add)
        return np.asarray(found)[0]

    by_height = {height: of(height) for height in (8, 16, 32, 256)}
    assert len({found.tobytes() for found in by_height.values()}) == 1, by_height


@pytest.mark.parametrize("m", [96, 100])
def test_no_strip_sums_rows_beyond_the_last(m):
    """A block of 128 rows is worked on in strips, of which the last ones have rows of nobody."""
    x, g, w = arrays((m,), 256, "float32")
    op = pk.op("layernorm_vjp", backend="pallas", tiling={"block_rows": 128, "block_n": 256})
    _, d_weight, d_bias = (np.asarray(found) for found in op(x, g, w, w))
    normed = (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(d_bias, np.asarray(g).sum(0), atol=1e-4)
    np.testing.assert_allclose(d_weight, np.asarray(g * normed).sum(0), atol=1e-4)


NORMS = [name for name in OPS if "norm" in name][::3]


@pytest.mark.parametrize(("name", "m"), [*zip(NORMS, itertools.cycle((128, 3)), strict=False)])
def test_rows_that_are_kept_have_the_bits_of_rows_read_again(name, m, monkeypatch):
    x, g, w = arrays((m,), 300, "float32")
    kept = []
    replaced = row_walk.BlockWalk._replace

    def watched(self, **fields):
        kept.extend(fields.get("kept") for _ in [0] if "kept" in fields)
        return replaced(self, **fields)

    monkeypatch.setattr(row_walk.BlockWalk, "_replace", watched)
    first = made(name, x, g, w, 128)
    jax.clear_caches()
    assert kept == [True]
    monkeypatch.setattr(
        row_walk.BlockWalk, "keeps", lambda self, dtype: jax.ShapeDtypeStruct((1 << 40,), dtype)
    )  # no room
    again = made(name, x, g, w, 128)
    jax.clear_caches()
    assert kept == [True] and again.tobytes() == first.tobytes()
