"""Gradients of norms in Pallas on Hopper GPUs that read every row once: bounds, rings and blocks' sums in Pallas's
interpreter, and what the compiler makes of them."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")
from portakern.core import registry

PALLAS = registry.backend("pallas")
FAMILY = next(f for f in PALLAS.declared if f.name == "fused")
if FAMILY.missing_packages():
    pytest.skip(f"the kernels for Hopper need {FAMILY.missing_packages()}", allow_module_level=True)

import jax.numpy as jnp  # noqa: E402

import portakern as pk  # noqa: E402
from portakern import testing  # noqa: E402
from portakern.backends.pallas.fused import layernorm_vjp  # noqa: E402
from portakern.core import targets, tilings  # noqa: E402
from portakern.core.framework import frameworks  # noqa: E402
from portakern.core.targets import Target  # noqa: E402
from portakern.errors import UnsupportedError  # noqa: E402
from portakern.tools.compile import abstract  # noqa: E402

OPS = [op for op in registry.ops() if PALLAS.module_of(op, FAMILY)]
each_op = pytest.mark.parametrize("op", OPS)
COMPILER = FAMILY.load_compiler()
has_compiler = pytest.mark.skipif(
    COMPILER.unavailable(targets.find("sm_90")) is not None, reason=str(COMPILER.unavailable(targets.find("sm_90")))
)


def arrays_of(op, rows, n, dtype=jnp.bfloat16):
    rng = np.random.default_rng(rows + n)
    forms_of = {"x": (rows, n), "d_y": (rows, n), "weight": (n,), "bias": (n,)}
    names = [a.name for a in registry.find_spec(op).arrays if a.name in forms_of]
    return {name: jnp.asarray(rng.standard_normal(forms_of[name]), dtype) for name in names}


def fused(op, **tiling):
    return pk.op(op, backend="pallas", variant="fused", tiling=tiling)


@each_op
@pytest.mark.timeout(900)
def test_within_bounds(op):
    report = pk.check(
        op, backend="pallas", variant="fused", device="cpu", max_examples=6, seed=0, edges=False,
        limits=testing.Limits(typical_elements=2**12),
    )  # fmt: skip
    assert report.passed, "\n".join(map(str, report.failures))
    assert report.examples >= 3, report.refused


@each_op
@pytest.mark.parametrize(("rows", "n", "tiling"), [(21, 256, {"ring": 3}), (9, 200, {}), (1, 128, {"ring": 2})])
def test_rows_of_several_blocks_race_for_nothing(op, rows, n, tiling):
    """More rows in a block than in its ring, and a last block that is not full."""
    arrays = arrays_of(op, rows, n)
    with PALLAS.profile("races"):
        found = fused(op, **tiling)(**arrays)
    want = pk.op(op, backend="reference")(**{name: np.asarray(x, np.float32) for name, x in arrays.items()})
    for got, right in zip(found, want, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), right, rtol=2e-2, atol=2e-2)


@each_op
def test_a_sums_bits_do_not_tell_what_else_is_wanted(op):
    spec, arrays = registry.find_spec(op), arrays_of(op, 21, 256)
    impl = PALLAS.implementation(op, FAMILY)
    call = pk.op(op).bind(**arrays).replace(interpret=True)
    tiling = tilings.default(impl, call).tiling
    whole = impl.run(call, tiling)
    for i, output in enumerate(spec.outputs):
        alone = impl.run(call.replace(wants=(output.name,)), tiling)
        assert [x is None for x in alone] == [j != i for j in range(len(whole))]
        assert (alone[i] == whole[i]).all()


@pytest.mark.parametrize(("n", "of_block"), [(4096, 128), (2048, 128), (1024, 64), (384, 32), (128, 32)])
def test_shorter_rows_have_more_blocks(n, of_block):
    call = pk.op("layernorm_vjp").bind(**arrays_of("layernorm_vjp", 1, n))
    call = call.replace(dims={**call.dims, "batch": (2**15,)})
    assert layernorm_vjp.walk_of(call, layernorm_vjp.default_tiling(call)).block_rows == of_block


@pytest.mark.parametrize(
    ("n", "tiling", "words"),
    [
        (8192, {}, "rows of 8192 elements do not fit the registers that 4096 take: use variant 'gpu'"),
        (2048, {"block_n": 1024}, "rows of 2048 elements do not fit the registers that 1024 take"),
        (1001, {}, "rows of 1001 elements are no whole pieces of 16 bytes, as the ring wants them: use variant 'gpu'"),
        (4096, {"ring": 8}, None),
    ],
)
def test_what_is_refused_is_said(n, tiling, words):
    call = pk.op("layernorm_vjp").bind(**arrays_of("layernorm_vjp", 3, n))
    call = abstract.bind_signature(call.spec, abstract.signature_of(call), frameworks()["jax"], Target("cuda", "sm_90"))
    impl = PALLAS.implementation("layernorm_vjp", FAMILY)
    if words is None:
        assert tilings.resolve(impl, call, tiling).tiling["ring"] == 8
        return
    with pytest.raises(UnsupportedError, match=words):
        tilings.resolve(impl, call, tiling)


@has_compiler
@each_op
def test_what_it_takes_of_the_chip(op, monkeypatch, tmp_path):
    """Two blocks have a multiprocessor, and nothing is spilled."""
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    built = fused(op).lower(**arrays_of(op, 4096, 4096), target="sm_90")
    assert built.ok, built.reason
    rows, total = built.kernels
    assert [rows.name, total.name] == [op, f"{op}_sum"]
    assert rows.spills == total.spills == 0 and rows.occupancy >= 2 * 4 / 64


@has_compiler
@pytest.mark.parametrize("variant", ["fused", "gpu"])
@each_op
def test_a_kernel_is_the_same_code_whichever_gradients_are_wanted(op, variant, monkeypatch, tmp_path):
    """What the compiler fuses hangs on what stands beside it, which the interpreter does not see. Where d_bias alone is
    wanted nothing is multiplied."""
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    arrays = arrays_of(op, 20, 128, jnp.float32)
    outputs = [o.name for o in registry.find_spec(op).outputs]
    found = {}
    for wants in (tuple(outputs), *((name,) for name in outputs)):
        built = pk.op(op, backend="pallas", variant=variant).lower(**arrays, wants=wants, target="sm_90")
        assert built.ok, built.reason
        for kernel in built.kernels:
            found.setdefault(kernel.name, {})[wants] = kernel.assembly
    assert len(found) == 2
    for codes in found.values():
        different = [wants for wants, code in codes.items() if code != codes[tuple(outputs)]]
        multiplying = [wants for wants in different if re.search(r"\b(mul|fma)\.(rn\.)?f32", codes[wants])]
        assert set(different) <= {("d_bias",)} and not multiplying
