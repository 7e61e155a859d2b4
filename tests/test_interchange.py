"""Crossing frameworks: the same kind of array comes back, memory is shared where it can be, and values that would not
survive are refused.
"""

import ml_dtypes
import numpy as np
import pytest

import portakern as pk
from portakern.core.framework import convert, frameworks
from portakern.spec.dtypes import numpy_dtype

torch = pytest.importorskip("torch", reason="torch is not installed")
jax = pytest.importorskip("jax", reason="jax is not installed")

NUMPY, TORCH, JAX = frameworks()["numpy"], frameworks()["torch"], frameworks()["jax"]
X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
FLOATS = ("float32", "float16", "bfloat16")


def as_kind(kind, x, dtype):
    x = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if kind == "numpy":
        return x
    fw = frameworks()[kind]
    fw.load()
    return fw.from_numpy(x, None)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("backend", ["reference", "triton", "pallas"])
def test_the_same_kind_comes_back(kind, backend, dtype):
    x = as_kind(kind, X, dtype)
    y = pk.op("softmax", backend=backend)(x)
    assert type(y) is type(x) and y.dtype == x.dtype and y.shape == x.shape
    got = frameworks()[kind].to_numpy(y).astype(np.float64)
    wide = frameworks()[kind].to_numpy(x).astype(np.float64)
    want = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    np.testing.assert_allclose(got, want, rtol=1e-2 if dtype == "bfloat16" else 2e-3 if dtype == "float16" else 1e-6)


def pointer(x):
    return (
        x.ctypes.data
        if isinstance(x, np.ndarray)
        else x.data_ptr()
        if isinstance(x, torch.Tensor)
        else x.unsafe_buffer_pointer()
    )


def aligned(x):
    """A copy that starts at a multiple of 64 bytes, as JAX demands of memory that it shares; torch and JAX allocate so,
    NumPy by luck.
    """
    memory = np.zeros(x.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def read_only(x):
    x.flags.writeable = False
    return x


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "sliced": lambda x: x[1:, 2:5],
    "strided": lambda x: x[::2, ::3],
    "broadcast": lambda x: x[:1].expand(x.shape) if isinstance(x, torch.Tensor) else np.broadcast_to(x[:1], x.shape),
    "off by one": lambda x: x.reshape(-1)[1:13].reshape(3, 4),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[0, 0, ...],
    "negative strides": lambda x: x[::-1],
    "read-only": read_only,
    "requires_grad": lambda x: x.requires_grad_(),
}
VIEWS = ("contiguous", "transposed", "sliced", "strided", "broadcast", "off by one", "scalar")
CROSSINGS = {  # (from, to) -> layout -> whether the memory is shared
    ("numpy", "torch"): dict.fromkeys((*VIEWS, "read-only"), True)
    | {"negative strides": False},  # torch has no negative strides
    ("numpy", "jax"): dict.fromkeys((*VIEWS, "negative strides"), False)
    | {"contiguous": True, "read-only": True, "scalar": True},
    ("torch", "numpy"): dict.fromkeys((*VIEWS, "requires_grad"), True),
    ("torch", "jax"): dict.fromkeys(VIEWS, False) | {"contiguous": True, "requires_grad": True, "scalar": True},
    ("jax", "numpy"): {"contiguous": False},  # NumPy's arrays are writable, JAX's never
    ("jax", "torch"): {"contiguous": True},
}  # to JAX: it has no strides, and shares only memory that starts at a multiple of 64 bytes
ROWS = [(*crossing, layout) for crossing, layouts in CROSSINGS.items() for layout in (*layouts, "empty")]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("source", "to", "layout"), ROWS, ids=[" ".join(row) for row in ROWS])
def test_crossings_share_memory_or_copy(source, to, layout, dtype, recwarn):
    src, dst = frameworks()[source], frameworks()[to]
    x = aligned(as_kind("numpy", X, dtype))
    x = LAYOUTS[layout](src.from_numpy(x, None))
    before = src.to_numpy(x).copy()
    y, apart = convert(x, src, dst), convert(x, src, dst, copy=True)
    for z in (y, apart):
        assert dst.owns(z) and tuple(z.shape) == tuple(x.shape) and dst.to_numpy(z).dtype == before.dtype
        np.testing.assert_array_equal(dst.to_numpy(z), before)
    if before.size:
        assert (pointer(y) == pointer(x)) == CROSSINGS[source, to][layout] and pointer(apart) != pointer(x)
    assert not recwarn.list


@pytest.mark.parametrize(
    "make", [lambda: X.astype(">f4"), lambda: X.astype(ml_dtypes.float8_e4m3fn)], ids=["byte order", "fp8"]
)
def test_dtypes_that_no_op_takes_are_refused_by_name(make):
    with pytest.raises(pk.SpecError, match=r"softmax: x is (>f4|float8_e4m3fn)"):
        pk.op("softmax")(make())


def test_results_are_writable_and_not_aliases():
    for backend in ("reference", "triton", "pallas"):
        y = pk.op("softmax", backend=backend)(X)
        y[0, 0] = 7.0
        t = torch.from_numpy(X.copy())
        s = pk.op("softmax", backend=backend)(t)
        s[0, 0] = 7.0
        assert s.is_contiguous() and not np.shares_memory(s.numpy(), t.numpy())


@pytest.fixture
def keeper():
    """Backends that keep the memory they hand out: a torch workspace that the next call overwrites, a JAX constant."""
    workspace, constant = torch.zeros(16), JAX.from_numpy(np.arange(16.0, dtype=np.float32), None)
    in_torch, in_jax = pk.Backend("keeper", framework="torch"), pk.Backend("keeper", framework="jax")
    in_torch.implements("softmax")(lambda call, tiling: (workspace.copy_(call.arrays["x"]),))
    in_jax.implements("softmax")(lambda call, tiling: (constant,))
    in_jax.implements("layernorm")(lambda call, tiling: (call.arrays["x"],))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield in_torch, in_jax, constant


def test_a_jax_array_never_changes_in_its_holders_hands(keeper):
    in_torch, in_jax, constant = keeper
    first = pk.op("softmax", backend=in_torch)(jax.numpy.zeros(16))
    pk.op("softmax", backend=in_torch)(jax.numpy.ones(16))
    assert not np.asarray(first).any()
    for x in (torch.zeros(16), np.zeros(16, np.float32)):
        y = pk.op("softmax", backend=in_jax)(x)
        y[...] = 99.0
    np.testing.assert_array_equal(constant, np.arange(16.0))


def test_writing_to_a_result_leaves_the_argument_alone(keeper):
    x = torch.zeros(16)
    pk.op("layernorm", backend=keeper[1])(x)[0] = 1.0
    assert not x.any()


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
    with pytest.raises(
        pk.UnsupportedError, match=r"softmax_vjp: y requires grad.*torch.no_grad\(\), or pass y.detach\(\)"
    ):
        pk.op("softmax_vjp")(x.clone().requires_grad_(), x)
    with torch.no_grad():
        pk.op("softmax")(x.clone().requires_grad_())
    pk.op("softmax")(torch.nn.Parameter(x, requires_grad=False))
    with pytest.raises(pk.SpecError, match="layout torch.sparse_coo"):
        pk.op("softmax")(x.to_sparse())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "triton", "pallas"])
def test_tensors_can_be_resized_after_a_call(backend, dtype):
    """Sharding frees and refills the memory of parameters: neither what a call read nor what it gave may be tied."""
    x, empty = torch.randn(2, 8, dtype=dtype), torch.zeros(0, 8, dtype=dtype)
    op = pk.op("softmax", backend=backend)
    y, nothing = op(x), op(empty)
    want = y.clone()
    for tensor in (x, empty, nothing):
        tensor.resize_(4, 8)
    x.fill_(0)
    assert torch.equal(y, want)
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(2 * 8 * y.itemsize)


def test_saved_tensors_can_be_resized_after_a_gradient():
    w = torch.nn.Parameter(torch.ones(8))
    x = torch.randn(2, 8, requires_grad=True)
    pk.op("layernorm")(x, w).sum().backward()
    for tensor in (w, x, w.grad, x.grad):
        tensor.data.resize_(16)


@pytest.mark.parametrize("backend", ["reference", "triton", "pallas"])
def test_fields_of_packed_records_are_read(backend):
    """Their strides are no multiples of an element, and none of them may be aligned."""
    for name in ("float32", "float64", "bfloat16"):
        element = numpy_dtype(name)
        records = np.zeros((3, 5), np.dtype([("tag", np.int8), ("x", element)]))
        records["x"] = np.linspace(-1, 1, 15).reshape(3, 5)
        for field in (records["x"], records["x"][:, ::-1], records["x"].T):
            assert field.strides[0] % element.itemsize or field.strides[1] % element.itemsize
            if backend == "pallas" and name == "float64":
                continue  # JAX has none
            call = pk.op("softmax", backend=backend)
            np.testing.assert_array_equal(call(field).astype(float), call(np.array(field, order="C")).astype(float))
