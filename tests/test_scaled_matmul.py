"""scaled_matmul's kernels on chips that are not here: where sums leave the matrix unit, what operands become."""

from __future__ import annotations

import numpy as np
import pytest

import portakern as pk
from portakern.core import targets
from portakern.core.binder import bind
from portakern.core.registry import find_spec
from portakern.spec.dtypes import numpy_dtype

E4M3, E5M2 = numpy_dtype("float8_e4m3fn"), numpy_dtype("float8_e5m2")
ROWS, BLOCKS = ((8, 1), (1, 32)), ((8, 4), (4, 1))


def called(arch, dtype=E4M3, scales=ROWS, k=512, **options):
    """A call of 8 x 512 x 32 on a chip."""
    of_a, of_b = (np.ones(s, np.float32) for s in scales)
    widths = {"n_width": 32} if scales == BLOCKS else {}
    call = bind(find_spec("scaled_matmul"), np.zeros((8, k), dtype), np.zeros((k, 32), dtype), of_a, of_b,
                **widths, **options)  # fmt: skip
    return call.replace(target=targets.find(arch).target, interpret=False)


def triton():
    pytest.importorskip("triton", reason="triton is not installed")
    from portakern.backends.triton.configs import ProductConfig
    from portakern.backends.triton.gpu import scaled_matmul

    config = ProductConfig(block_m=64, block_n=32, block_k=128, num_warps=4, num_stages=3, group=8)
    return scaled_matmul, lambda call: scaled_matmul.ScaledTile.of(call, config), config


@pytest.mark.parametrize(
    ("arch", "scales", "precision", "run", "leaves"),
    [
        ("sm_90", ROWS, "promoted", 128, False),
        ("sm_90", ROWS, "fast", 0, False),
        ("sm_90", ROWS, "ieee", 0, False),
        ("sm_90", BLOCKS, "promoted", 0, False),  # 128 products begin at 0
        ("sm_89", ROWS, "promoted", 128, True),
        ("sm_120", ROWS, "promoted", 128, True),
        ("sm_89", ROWS, "fast", 0, False),
        ("gfx950", ROWS, "promoted", 0, False),
    ],
)
def test_long_sums_leave_the_matrix_unit(arch, scales, precision, run, leaves):
    _, tile_of, _ = triton()
    tile = tile_of(called(arch, scales=scales, precision=precision))
    assert (tile.run, tile.leaves) == (run, leaves)


@pytest.mark.parametrize(
    ("arch", "dtype", "precision", "kind", "wide"),
    [
        ("sm_90", E4M3, "promoted", "8-bit", "int8"),
        ("sm_90", E5M2, "ieee", "16-bit", "fp16"),
        ("gfx942", E4M3, "fast", "16-bit", "fp16"),
        ("gfx90a", E5M2, "promoted", "16-bit", "bf16"),  # it flushes subnormals of float16
        ("sm_80", E5M2, "promoted", "16-bit", "fp16"),
        ("sm_80", np.int8, "ieee", "int8", "int8"),
    ],
)
def test_operands_are_widened_where_no_unit_takes_them(arch, dtype, precision, kind, wide):
    module, tile_of, _ = triton()
    call = called(arch, dtype, precision=precision)
    assert module.products(call) == kind and tile_of(call).wide.name == wide


def test_what_triton_cannot_read_is_refused_in_words():
    module, _, config = triton()
    assert "Triton reads no float8_e4m3fn on sm_80" in module.supports(called("sm_80"), config)
    assert module.supports(called("sm_80", E5M2), config) is None
    assert module.supports(called("sm_89"), config) is None


@pytest.mark.parametrize(
    ("arch", "dtype", "precision", "wide"),
    [
        ("v5e", np.int8, "ieee", None),
        ("v4", np.int8, "promoted", "bfloat16"),
        ("v7x", np.int8, "promoted", "bfloat16"),
        ("v7x", E4M3, "promoted", None),
        ("v7x", E4M3, "ieee", "bfloat16"),
        ("v6e", E4M3, "promoted", "bfloat16"),
        ("v5e", E5M2, "promoted", "bfloat16"),
    ],
)
def test_a_tpu_multiplies_what_its_unit_takes(arch, dtype, precision, wide):
    pytest.importorskip("jax", reason="jax is not installed")
    from portakern.backends.pallas.tpu.scaled_matmul import wide_dtype

    found = wide_dtype(called(arch, dtype, precision=precision))
    assert (found and np.dtype(found).name) == wide


def test_narrow_blocks_are_refused_on_a_tpu():
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    a, b = jnp.zeros((8, 64), jnp.int8), jnp.zeros((64, 8), jnp.int8)
    scales = jnp.ones((8, 4)), jnp.ones((4, 8))
    with pytest.raises(pk.UnsupportedError, match="blocks of 16 elements along k are too narrow for a TPU's 128 lanes"):
        pk.op("scaled_matmul", backend="pallas")(a, b, *scales, k_width=16)


def test_exact_sums_of_int8_reach_the_end_of_int32():
    """-128 -128 at 131071 products; int32 holds the sum, float32 would not."""
    k = 131071
    a, b, one = np.full((1, k), -128, np.int8), np.full((k, 1), -128, np.int8), np.ones((1, 1), np.float32)
    b[0] = -127
    (c,) = pk.op("scaled_matmul", backend="reference")(a, b, one, one, out_dtype="float64")
    assert c.item() == 2**14 * k - 128
