"""portakern.bounds: the bounds of every op for other people's tests."""

from __future__ import annotations

import doctest
import subprocess
import sys

import numpy as np
import pytest

import portakern as pk
from portakern import bounds
from portakern.core import registry
from portakern.core.oracle import rounded_oracle
from portakern.spec.dtypes import DTYPES
from portakern.testing import sample_arrays
from portakern.testing.verdict import Broken, expected


def test_its_examples_run() -> None:
    assert doctest.testmod(bounds, optionflags=doctest.ELLIPSIS).failed == 0


def test_no_array_library_is_imported() -> None:
    code = (
        "import sys, numpy; from portakern import bounds; bounds.softmax(numpy.ones((2, 3), numpy.float32)); "
        "print({'torch', 'jax', 'triton', 'typer', 'hypothesis'} & {*sys.modules})"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == "set()"


@pytest.mark.parametrize("op", registry.loadable())
def test_every_op_has_bounds_that_the_rounded_result_meets(op: str) -> None:
    spec = registry.find_spec(op)
    dtype = next(d for d in ("bfloat16", *spec.dtypes) if d in spec.dtypes)
    arrays, options = sample_arrays(op, dtype=dtype)
    found = getattr(bounds, op)(**arrays, **options)
    assert found.call.spec is spec and found.derivation.strip()
    right = [y for y in rounded_oracle(found.call) if y is not None]
    assert found.accepts(*right) and found.share(*right) <= 1
    found.check(*right)
    exact, errors = expected(found.call.replace(any_order=True))[1:]
    for o in found.outputs.values():
        at = [x.name for x in spec.outputs].index(o.name)
        assert np.array_equal(o.reference, exact[at], equal_nan=True) and (o.error == errors[at]).all()
        assert o.typical is None or o.typical.shape == o.reference.shape


def test_wide_arrays_stand_for_narrow_ones() -> None:
    rng = np.random.default_rng(0)
    x, weight = bounds.rounded(rng.normal(size=(3, 40)), "bfloat16"), rng.normal(size=40).astype(np.float32)
    narrow = bounds.of("rmsnorm", x, weight=weight)
    wide = bounds.of("rmsnorm", x.astype(np.float32), weight=weight, dtype={"x": "bfloat16"})
    assert (narrow.error == wide.error).all() and wide.output().dtype == "bfloat16"
    all_narrow = bounds.of("rmsnorm", x.astype(np.float64), weight=np.ones(40), dtype="bfloat16")
    assert {all_narrow.call.dtype_of(n) for n in ("x", "weight")} == {"bfloat16"}
    for op, given in (("softmax", ["x"]), ("softmax_vjp", ["y", "d_y"])):
        arrays, options = sample_arrays(op, dtype="bfloat16")
        found = bounds.of(op, *(arrays[n].astype(np.float32) for n in given), dtype="bfloat16", **options)
        assert {found.call.dtype_of(n) for n in given} == {"bfloat16"} and DTYPES[found.output().dtype].bits == 16


def test_the_target_and_the_order_of_sums_count() -> None:
    rng = np.random.default_rng(0)
    a, b = (bounds.rounded(rng.normal(size=(64, 64)), "float16") for _ in range(2))
    host, gpu, cdna = (bounds.matmul(a, b, target=t) for t in (None, "sm_90", "gfx90a"))
    assert (gpu.typical > host.typical).any() and (cdna.error > host.error).all()
    x = rng.normal(size=(2, 4000)).astype(np.float32)
    assert (bounds.logsumexp(x, any_order=False).error < bounds.logsumexp(x).error).all()


def test_what_is_wrong_is_told() -> None:
    x = np.full((2, 3), 0.1, np.float32)
    wrong = (
        (
            lambda: bounds.softmax(x, dtype="bfloat16"),
            r"x\[0, 0\] is 0.1.*which bfloat16 does not hold.*bounds.rounded",
        ),
        (lambda: bounds.softmax(x, x), "2 arrays came; expected x"),
        (lambda: bounds.softmax(x, dtype="bf16"), "dtype is 'bf16'; expected one of"),
        (lambda: bounds.softmax(x).output("z"), "no output 'z'; expected one of y"),
        (lambda: bounds.softmax(x).accepts(x, x), "2 outputs came; expected 1: y"),
        (lambda: bounds.softmax(x).accepts(x[:1]), r"y has shape \(1, 3\); expected \(2, 3\)"),
        (lambda: bounds.softmax(x, target="sm_1"), "target 'sm_1' is unknown"),
    )
    for call, words in wrong:
        with pytest.raises(pk.SpecError, match=words):
            call()
    with pytest.raises(AttributeError, match="has no 'soft'; expected of, rounded, or an op"):
        bounds.soft  # noqa: B018
    assert {"of", "softmax", "attention"} <= {*dir(bounds)}


def test_typical_errors_tell_of_a_kernel_that_rounds_too_often() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 256)).astype(np.float32)
    found = bounds.softmax(x)
    y = found.reference.astype(np.float32)
    assert found.output().typical_share(y) < 1.2
    with pytest.raises(Broken, match=r"y\[0, 0\] is 0; the oracle says"):
        found.check(np.zeros_like(y))
    assert found.output().typical_share(y * np.float32(1 + 2**-18)) > 4
