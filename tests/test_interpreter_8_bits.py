"""Triton kernels of 8-bit floats and integers in the interpreter: conversions, loads without ``other``, products."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402

from portakern.backends.triton import interpreter  # noqa: E402
from portakern.spec.dtypes import DTYPES  # noqa: E402

FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def convert_kernel(x, y, n, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(y + at, tl.load(x + at, mask=at < n).to(y.dtype.element_ty), mask=at < n)


@triton.jit
def product_kernel(a, b, c, m: tl.constexpr, k: tl.constexpr, n: tl.constexpr):
    row, column, inner = tl.arange(0, m), tl.arange(0, n), tl.arange(0, k)
    x = tl.load(a + row[:, None] * k + inner[None, :])
    y = tl.load(b + inner[:, None] * n + column[None, :])
    c_at = c + row[:, None] * n + column[None, :]
    tl.store(c_at, tl.dot(x, y, out_dtype=c.dtype.element_ty))


@triton.jit
def whole_kernel(x, y, n, block: tl.constexpr):
    """The lanes beyond n, which no kernel may use."""
    at = tl.arange(0, block)
    tl.store(y + at, tl.load(x + at, mask=at < n).to(tl.float32))


def every(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a dtype of 8 bits."""
    return torch.arange(256, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", FLOATS8, ids=str)
@pytest.mark.parametrize("wide", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_float_of_8_bits_is_widened_exactly_and_comes_back(dtype, wide):
    x, y, back = every(dtype), torch.zeros(256, dtype=wide), torch.zeros(256, dtype=dtype)
    interpreter.run(convert_kernel, 1, x, y, 256, 256, num_warps=4)
    assert torch.equal(y.double().nan_to_num(7e9), x.to(torch.float64).nan_to_num(7e9))
    interpreter.run(convert_kernel, 1, y, back, 256, 256, num_warps=4)
    finite = x.float().isfinite()
    assert torch.equal(back.view(torch.uint8)[finite], x.view(torch.uint8)[finite])
    assert torch.equal(back.float().isnan(), x.float().isnan())


@pytest.mark.parametrize("dtype", FLOATS8, ids=str)
def test_conversion_rounds_once_to_even_and_stops_at_the_largest(dtype):
    kind = DTYPES[str(dtype).removeprefix("torch.")]
    finite = np.unique(every(dtype).double().numpy()[np.isfinite(every(dtype).double().numpy())])
    ties = (finite[:-1] + finite[1:]) / 2
    x = np.concatenate([ties, np.nextafter(ties, np.inf), [1e6, -1e6, np.inf, -np.inf]])
    y = torch.zeros(len(x), dtype=dtype)
    interpreter.run(convert_kernel, 1, torch.from_numpy(x), y, len(x), 1024, num_warps=4)
    even = finite[:-1].astype(kind.numpy).view(np.uint8) % 2 == 0
    most = [kind.largest, -kind.largest] * 2
    expected = np.concatenate([np.where(even, finite[:-1], finite[1:]), finite[1:], most])
    np.testing.assert_array_equal(y.double().numpy(), expected)


@pytest.mark.parametrize("a", [*FLOATS8, torch.int8], ids=str)
@pytest.mark.parametrize("b", [*FLOATS8, torch.int8], ids=str)
def test_products_are_exact_of_small_integers(a, b):
    """Sums stay below 2^24, so that no order of them rounds; the two floats of 8 bits may be mixed."""
    draw: Any = torch.Generator().manual_seed(3)
    x = torch.randint(-8, 9, (16, 32), generator=draw).to(torch.float32).to(a)
    y = torch.randint(-8, 9, (32, 16), generator=draw).to(torch.float32).to(b)
    whole = torch.int8 in (a, b)
    c = torch.zeros(16, 16, dtype=torch.int32 if whole else torch.float32)
    if whole and a != b:
        with pytest.raises(ValueError, match="dtypes must be equal"):
            interpreter.run(product_kernel, 1, x, y, c, 16, 32, 16, num_warps=4)
        return
    interpreter.run(product_kernel, 1, x, y, c, 16, 32, 16, num_warps=4)
    assert torch.equal(c.double(), x.double() @ y.double())


def test_a_product_of_16_bit_results_is_rounded_once():
    x = (torch.arange(16 * 32).reshape(16, 32) % 7 - 3).float().to(torch.bfloat16)
    c = torch.zeros(16, 16, dtype=torch.float16)
    interpreter.run(product_kernel, 1, x, x.reshape(32, 16), c, 16, 32, 16, num_warps=4)
    assert torch.equal(c.double(), (x.double() @ x.reshape(32, 16).double()).half().double())


@pytest.mark.parametrize("dtype", FLOATS8, ids=str)
def test_masked_elements_are_nan(dtype):
    x, y = torch.ones(8, dtype=torch.float32).to(dtype), torch.zeros(16)
    interpreter.run(whole_kernel, 1, x, y, 5, 16, num_warps=4)
    assert y[:5].tolist() == [1] * 5 and bool(y[5:].isnan().all())
