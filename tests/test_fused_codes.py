"""Ops that give another op's result in codes: they are those of quantize of that result in float32, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

import portakern as pk
from portakern.core import registry

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

ENDING = "_quantize"
FUSED = [name for name in pk.ops() if name.endswith(ENDING) and name.removesuffix(ENDING) in pk.ops()]
CALLS = {"a token": (300, 300), "groups": (256, 32), "two tiles": (4608, 128), "groups of no power": (288, 96)}


def test_there_are_such_ops():
    assert FUSED


@pytest.mark.parametrize(("n", "width"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("scales", ["float32", "power_of_two"])
@pytest.mark.parametrize("to", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("op", FUSED)
def test_codes_are_those_of_the_result_in_float32(op, to, scales, n, width):
    base, rng = op.removesuffix(ENDING), np.random.default_rng(n)
    names = [a.name for a in registry.find_spec(op).arrays]
    shapes = {name: (n,) if name == "weight" else (3, n) for name in names}
    arrays = [torch.tensor(rng.standard_normal(shapes[name]), dtype=torch.float32) for name in names]
    first, *others = results(pk.op(base, backend="triton")(*arrays))
    found = results(pk.op(op, backend="triton")(*arrays, width=width, to=to, scales=scales))
    want = pk.op("quantize", backend="triton")(first, width=width, to=to, scales=scales)
    for one, other in zip(found, (*want, *others), strict=True):
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("op", FUSED)
def test_scales_are_those_that_scaled_matmul_takes(op):
    """(m, 1) of tokens, and (m, k / width) of groups, the last of which may be short."""
    names, n = [a.name for a in registry.find_spec(op).arrays], 300
    arrays = [torch.ones((n,) if name == "weight" else (5, n)) for name in names]
    for width, groups in ((n, 1), (128, 3)):
        q, scale = results(pk.op(op, backend="reference")(*arrays, width=width))[:2]
        b, scale_b = torch.ones(n, 4).to(q.dtype), torch.ones(groups, 1)
        c = pk.op("scaled_matmul", backend="reference")(q, b, scale, scale_b, n_width=4, k_width=width)
        assert c.shape == (5, 4)


def results(found):
    return found if isinstance(found, tuple) else (found,)
