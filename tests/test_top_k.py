"""top_k beside PyTorch's and JAX's own, what autograd makes of its integers, and rows and k of any length in Triton."""

import numpy as np
import pytest

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")


def triton_of(x, **options):
    pytest.importorskip("triton", reason="triton is not installed")
    return pk.op("top_k", backend="triton")(x, **options)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_it_is_the_first_part_of_a_stable_sort(dtype, k, largest):
    draw = torch.Generator().manual_seed(k)
    x = torch.randint(-50, 50, (3, 400), generator=draw).to(dtype) / 4
    values, indices = triton_of(x, k=k, largest=largest)
    expected = torch.sort(x, dim=-1, descending=largest, stable=True)
    assert torch.equal(values, expected.values[:, :k]) and torch.equal(indices.long(), expected.indices[:, :k])


@pytest.mark.parametrize("n", [2**16 - 1, 2**16, 2**16 + 5])
def test_positions_of_long_rows_of_16_bits(n):
    """Up to 2^16 - 1 numbers a rank has 32 bits."""
    x = torch.zeros(1, n, dtype=torch.bfloat16)
    x[0, [n - 1, 5, n - 2]] = torch.tensor([2.0, 1.0, -1.0], dtype=torch.bfloat16)
    values, indices = triton_of(x, k=4)
    assert values.tolist() == [[2, 1, 0, 0]] and indices.tolist() == [[n - 1, 5, 0, 1]]
    values, indices = triton_of(x, k=3, largest=False)
    assert values.tolist() == [[-1, 0, 0]] and indices.tolist() == [[n - 2, 0, 1]]


def test_numbers_come_back_to_the_bit():
    """Of NaN what they hold, of zeros the sign, and what is subnormal."""
    bits = np.array([[0x7FC12345, 0x80000000, 0xFFC00001, 0x00000001, 0x00000000, 0x80000001]], np.uint32)
    x = torch.from_numpy(bits.view(np.int32)).view(torch.float32)
    values, indices = triton_of(x, k=6)
    assert indices.tolist() == [[0, 2, 3, 1, 4, 5]]
    assert torch.equal(values.view(torch.int32), x[:, indices[0].long()].view(torch.int32))


def test_places_have_no_gradient_in_torch():
    x = torch.randn(2, 9, requires_grad=True)
    values, indices = pk.op("top_k", backend="reference")(x, k=3)
    assert values.requires_grad and not indices.requires_grad
    (values * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    expected = torch.zeros(2, 9).scatter(1, indices.long(), torch.tensor([[1.0, 2.0, 3.0]] * 2))
    assert torch.equal(x.grad, expected)


def test_places_have_no_gradient_in_jax():
    """A cotangent of theirs is of JAX's type without values."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x = jax.numpy.asarray([[3.0, 1.0, 2.0]])
    (_, indices), pulled = jax.vjp(lambda x: tuple(pk.op("top_k", backend="reference")(x, k=2)), x)
    (d_x,) = pulled((jax.numpy.asarray([[5.0, 7.0]]), np.zeros(indices.shape, jax.dtypes.float0)))
    assert d_x.tolist() == [[5, 0, 7]]


def test_one_kernel_reads_a_row_once_and_one_k_times():
    """What the tests above meet both of."""
    pytest.importorskip("triton", reason="triton is not installed")
    from portakern.backends.triton.gpu.top_k import MOST, in_passes

    for dtype, k, passes in ((torch.float32, MOST, False), (torch.float32, MOST + 1, True), (torch.float64, 1, True)):
        assert in_passes(pk.op("top_k").bind(torch.zeros(1, 400, dtype=dtype), k=k)) == passes
