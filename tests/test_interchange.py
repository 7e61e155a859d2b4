"""Crossing frameworks: the same kind of array comes back, memory is shared where it can be, and values that would not survive are refused."""

import ml_dtypes
import numpy as np
import pytest

import portakern as pk
from portakern.frameworks import FRAMEWORKS, convert

torch = pytest.importorskip("torch", reason="torch is not installed")
jax = pytest.importorskip("jax", reason="jax is not installed")

NUMPY, TORCH, JAX = FRAMEWORKS["numpy"], FRAMEWORKS["torch"], FRAMEWORKS["jax"]
X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
FLOATS = ("float32", "float16", "bfloat16")


def as_kind(kind, x, dtype):
    x = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if kind == "numpy":
        return x
    fw = FRAMEWORKS[kind]
    fw.load()
    return fw.from_numpy(x, None)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("backend", ["reference", "triton", "pallas"])
def test_the_same_kind_comes_back(kind, backend, dtype):
    x = as_kind(kind, X, dtype)
    y = pk.op("softmax", backend=backend)(x)
    assert type(y) is type(x) and y.dtype == x.dtype and y.shape == x.shape
    got = FRAMEWORKS[kind].to_numpy(y).astype(np.float64)
    wide = FRAMEWORKS[kind].to_numpy(x).astype(np.float64)
    want = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    np.testing.assert_allclose(got, want, rtol=1e-2 if dtype == "bfloat16" else 2e-3 if dtype == "float16" else 1e-6)


def pointer(x):
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr() if isinstance(x, torch.Tensor) else x.unsafe_buffer_pointer()


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "sliced": lambda x: x[1:, 2:5],
    "strided": lambda x: x[::2, ::3],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_to_torch_shares_memory(layout, dtype, recwarn):
    x = LAYOUTS[layout](as_kind("numpy", X, dtype))
    t = convert(x, NUMPY, TORCH)
    assert t.shape == x.shape and str(t.dtype) == f"torch.{dtype}"
    assert x.size == 0 or pointer(t) == pointer(x)
    np.testing.assert_array_equal(TORCH.to_numpy(t), x)
    assert not recwarn.list


def test_negative_strides_are_copied_for_torch():
    x = X[::-1]
    np.testing.assert_array_equal(convert(x, NUMPY, TORCH).numpy(), x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_torch_and_jax_to_numpy_share_memory(dtype):
    t = as_kind("torch", X, dtype).T
    n = convert(t, TORCH, NUMPY)
    assert pointer(n) == pointer(t) and n.strides == t.numpy().strides if dtype != "bfloat16" else True
    j = as_kind("jax", X, dtype)
    assert pointer(JAX.to_numpy(j)) == pointer(j)


def test_results_are_writable_and_not_aliases():
    for backend in ("reference", "triton", "pallas"):
        y = pk.op("softmax", backend=backend)(X)
        y[0, 0] = 7.0
        t = torch.from_numpy(X.copy())
        s = pk.op("softmax", backend=backend)(t)
        s[0, 0] = 7.0
        assert s.is_contiguous() and not np.shares_memory(s.numpy(), t.numpy())


def test_what_jax_would_narrow_is_refused():
    with pytest.raises(pk.UnsupportedError, match="float64"):
        pk.op("softmax", backend="pallas")(X.astype(np.float64))
    q = np.zeros((1, 2, 1, 8), np.float32)
    ids = np.array([[1, 2**40]])
    with pytest.raises(pk.UnsupportedError, match="int64 array to int32 and its values do not fit"):
        pk.op("attention", backend="pallas")(q, q, q, q_segment_ids=ids, kv_segment_ids=ids)


def test_frameworks_and_devices_do_not_mix():
    q = np.zeros((1, 2, 1, 8), np.float32)
    with pytest.raises(pk.SpecError, match="k is a torch array but q is a numpy array"):
        pk.op("attention")(q, torch.zeros(1, 2, 1, 8), q)
    with pytest.raises(pk.SpecError, match="b is on meta but a is on cpu"):
        pk.op("matmul")(torch.zeros(2, 2), torch.zeros(2, 2, device="meta"))


def test_torch_tensors_that_no_kernel_can_read_are_refused():
    x = torch.randn(3, 4)
    with pytest.raises(pk.UnsupportedError, match=r"softmax: x requires grad.*torch.no_grad\(\), or pass x.detach\(\)"):
        pk.op("softmax")(x.clone().requires_grad_())
    with torch.no_grad():
        pk.op("softmax")(x.clone().requires_grad_())
    pk.op("softmax")(torch.nn.Parameter(x, requires_grad=False))
    with pytest.raises(pk.SpecError, match="layout torch.sparse_coo"):
        pk.op("softmax")(x.to_sparse())
    with pytest.raises(pk.SpecError, match="lazily negated"):
        pk.op("softmax")(torch.randn(3, dtype=torch.complex64).conj().imag)
    with pytest.raises(pk.UnsupportedError, match="no backend serves torch arrays on meta"):
        pk.op("softmax")(torch.zeros(3, device="meta"))
