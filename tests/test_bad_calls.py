"""Wrong calls: every message names the op, the argument, what came, what was expected and what to do about it."""

from __future__ import annotations

import decimal
import fractions
import logging

import ml_dtypes
import numpy as np
import pytest

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")
jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q, K = zeros(2, 5, 4, 8), zeros(2, 7, 2, 8)
M, X = zeros(2, 2), zeros(2, 3)
INT32 = np.int32


def attention(*args, **options):
    return pk.op("attention")(*args, **options)


def matmul(*args, **options):
    return pk.op("matmul")(*args, **options)


def softmax(*args, **options):
    return pk.op("softmax")(*args, **options)


def layernorm(*args, **options):
    return pk.op("layernorm")(*args, **options)


def deleted():
    x = jnp.zeros(3)
    x.delete()
    return x


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no words")


class Unreadable:
    @property
    def name(self):
        raise RuntimeError("no name")


SHAPES = {
    "rank": (lambda: attention(zeros(2, 3), K, K), r"attention: q has 2 axes, shape \(2, 3\); expected 4: \(batch, q_len, kv_heads\*group, d\); reshape it"),
    "rank of a bias": (lambda: attention(Q, K, K, zeros(7)), r"bias has 1 axis, shape \(7,\); expected 4: \(#batch, #kv_heads\*group, #q_len, kv_len\)"),
    "least rank": (lambda: matmul(zeros(2), M), r"matmul: a has 1 axis, shape \(2,\); expected at least 2: \(\*#batch, m, k\)"),
    "no axes": (lambda: layernorm(zeros()), r"layernorm: x has 0 axes, shape \(\); expected at least 1"),
    "axis": (lambda: attention(Q, zeros(2, 7, 2, 9), K), r"attention: k axis 3 \(d\) is 9; expected 8, as set by q axis 3; make them agree: k is \(batch, "),
    "batch": (lambda: attention(Q, zeros(3, 7, 2, 8), zeros(3, 7, 2, 8)), r"k axis 0 \(batch\) is 3; expected 2, as set by q axis 0"),
    "inner": (lambda: matmul(X, X), r"matmul: b axis -2 \(k\) is 2; expected 3, as set by a axis -1; make them agree: b is \(\*#batch, k, n\)"),
    "weight": (lambda: layernorm(X, zeros(4)), r"layernorm: weight axis 0 \(n\) is 4; expected 3, as set by x axis -1"),
    "heads that do not divide": (lambda: attention(zeros(2, 5, 3, 8), K, K),
                                 r"q axis 2 \(kv_heads\*group\) is 3, which kv_heads = 2 does not divide; make it a multiple of 2"),
    "no heads": (lambda: attention(Q, zeros(2, 7, 0, 8), zeros(2, 7, 0, 8)), r"kv_heads is 0 \(k axis 2\); expected at least 1: an array without any"),
    "no query heads": (lambda: attention(zeros(2, 5, 0, 8), K, K), r"group is 0 \(q axis 2\); expected at least 1"),
    "no head_dim": (lambda: attention(zeros(1, 1, 1, 0), zeros(1, 1, 1, 0), zeros(1, 1, 1, 1)), r"attention: d is 0 \(q axis 3\); expected at least 1"),
    "leading axes": (lambda: matmul(zeros(3, 2, 2), zeros(4, 2, 2)), r"leading axes \(4,\) of b do not broadcast with \(3,\) of a; make them equal, or 1"),
    "bias heads": (lambda: attention(Q, K, K, zeros(2, 3, 5, 7)), r"bias axis 1 \(kv_heads\*group\) is 3; expected 4 or 1, as set by k axis 2"),
    "bias keys": (lambda: attention(Q, K, K, zeros(1, 1, 1, 1)), r"bias axis 3 \(kv_len\) is 1; expected 7, as set by k axis 1"),
    "segment length": (lambda: attention(Q, K, K, None, zeros(2, 4, dtype=INT32), zeros(2, 7, dtype=INT32)), r"q_segment_ids axis 1 \(q_len\) is 4; expected 5"),
    "one segment array": (lambda: attention(Q, K, K, q_segment_ids=zeros(2, 5, dtype=INT32)), r"q_segment_ids and kv_segment_ids come together; pass both, or"),
}  # fmt: skip

DTYPES = {
    "dtypes that differ": (lambda: matmul(M, M.astype(np.float16)), r"matmul: b is float16 but a is float32; expected float32: cast one of them"),
    "a bias too wide": (lambda: attention(Q, K, K, zeros(1, 1, 1, 7, dtype=np.float64)), r"bias is float64 but q is float32; expected float32: cast one"),
    "a bias too narrow": (lambda: layernorm(X.astype(np.float16), zeros(3, dtype=ml_dtypes.bfloat16)),
                          r"weight is bfloat16 but x is float16; expected float16 or float32: cast one"),
    "integers": (lambda: softmax(zeros(3, dtype=INT32)), r"softmax: x is int32; expected one of float32, float16, bfloat16, float64: cast it"),
    "an integer bias": (lambda: attention(Q, K, K, zeros(1, 1, 1, 7, dtype=INT32)), r"bias is int32 but q is float32"),
    "booleans": (lambda: softmax(zeros(3, dtype=bool)), r"softmax: x is bool; expected one of float32"),
    "complex": (lambda: softmax(zeros(3, dtype=np.complex64)), r"softmax: x is complex64; expected one of float32"),
    "objects": (lambda: softmax(np.array([1.0, None])), r"softmax: x is object; expected one of float32"),
    "text": (lambda: softmax(np.array(["a"])), r"softmax: x is <U1; expected one of float32"),
    "structured": (lambda: softmax(np.zeros(3, [("a", "f4")])), r"softmax: x is \[\('a', '<f4'\)\]; expected one of float32"),
    "dates": (lambda: softmax(np.zeros(3, "M8[s]")), r"softmax: x is datetime64\[s\]; expected one of float32"),
    "fp8": (lambda: softmax(zeros(3, dtype=ml_dtypes.float8_e4m3fn)), r"softmax: x is float8_e4m3fn; expected one of float32"),
    "byte order": (lambda: softmax(zeros(3, dtype=">f4")), r"x is >f4, which is not this machine's byte order; pass x.astype\(x.dtype.newbyteorder\('='\)\)"),
    "float segments": (lambda: attention(Q, K, K, q_segment_ids=zeros(2, 5)), r"q_segment_ids is float32; expected one of int32, int64: cast it"),
    "unsigned segments": (lambda: attention(Q, K, K, None, zeros(2, 5, dtype=np.uint32)), r"q_segment_ids is uint32; expected one of int32, int64"),
}  # fmt: skip

OPTIONS = {
    "a word out of a list": (lambda: attention(Q, K, K, precision="fp8"), r"attention: precision is 'fp8'; expected one of 'ieee', 'tf32': leave it out for 'ieee'"),
    "None where it is none": (lambda: matmul(M, M, precision=None), r"precision is None; expected one of 'ieee', 'tf32'"),
    "window below zero": (lambda: attention(Q, K, K, window=(1, -2)),
                          r"window is \(1, -2\); expected a tuple of 2 integers >= 0 \(None for no limit\), or None: leave it out for None"),
    "window of one": (lambda: attention(Q, K, K, window=3), r"window is 3; expected a tuple of 2 integers"),
    "window of three": (lambda: attention(Q, K, K, window=(1, 2, 3)), r"window is \(1, 2, 3\); expected a tuple of 2 integers"),
    "window of booleans": (lambda: attention(Q, K, K, window=(True, 1)), r"window is \(True, 1\)"),
    "window without end": (lambda: attention(Q, K, K, window=(float("inf"), None)), r"window is \(inf, None\); expected .* \(None for no limit\)"),
    "softcap of zero": (lambda: attention(Q, K, K, softcap=0.0), r"softcap is 0.0; expected a finite number .*or None"),
    "softcap below zero": (lambda: attention(Q, K, K, softcap=-1), r"softcap is -1; expected a finite number .*or None"),
    "scale nan": (lambda: attention(Q, K, K, scale=float("nan")), r"scale is nan; expected a finite number in float32's range, or None: leave it out for None"),
    "scale that no float holds": (lambda: attention(Q, K, K, scale=10**400), r"scale is 1000.*\.\.\. \(int\); expected a finite number in float32's range, or None"),
    "scale beyond float32": (lambda: attention(Q, K, K, scale=1e300), r"scale is 1e\+300; expected a finite number in float32's range"),
    "softcap below float32": (lambda: attention(Q, K, K, softcap=1e-300), r"softcap is 1e-300; expected a finite number .*or None"),
    "scale as text": (lambda: attention(Q, K, K, scale="1"), r"scale is '1'; expected a finite number"),
    "scale as an array": (lambda: attention(Q, K, K, scale=np.ones(3)), r"scale is array\(\[1., 1., 1.\]\); expected a finite number"),
    "scale as a decimal": (lambda: attention(Q, K, K, scale=decimal.Decimal(1)), r"scale is Decimal\('1'\); expected a finite number"),
    "scale as a boolean": (lambda: attention(Q, K, K, scale=True), r"scale is True; expected a finite number"),
    "an integer for a boolean": (lambda: attention(Q, K, K, is_causal=1), r"is_causal is 1; expected True or False: leave it out for False"),
    "an array for a boolean": (lambda: attention(Q, K, K, is_causal=np.array(True)), r"is_causal is array\(True\); expected True or False"),
    "eps below zero": (lambda: layernorm(X, eps=-1.0), r"layernorm: eps is -1.0; expected a finite number in float32's range >= 0: leave it out for 1e-05"),
    "axis too large": (lambda: softmax(X, axis=2), r"softmax: axis is 2; expected an integer from -2 to 1: x has shape \(2, 3\)"),
    "axis too small": (lambda: softmax(X, axis=-3), r"axis is -3; expected an integer from -2 to 1"),
    "axis of none": (lambda: softmax(zeros()), r"axis is -1; expected an integer but the array has no axes: x has shape \(\)"),
    "axis as a float": (lambda: softmax(X, axis=1.0), r"axis is 1.0; expected an integer"),
    "axis as a boolean": (lambda: softmax(X, axis=True), r"axis is True; expected an integer"),
    "axis as NumPy's boolean": (lambda: softmax(X, axis=np.bool_(True)), r"axis is np.True_; expected an integer"),
    "axes": (lambda: softmax(X, axis=(0, 1)), r"axis is \(0, 1\); expected an integer"),
    "a long value": (lambda: softmax(X, axis=[0] * 10**6), r"axis is \[0, 0, 0.{50,80}\.\.\. \(list\); expected an integer"),
    "a value without words": (lambda: softmax(X, axis=Unprintable()), r"axis is a Unprintable; expected an integer"),
    "out_dtype": (lambda: matmul(M, M, out_dtype="int8"), r"out_dtype is 'int8'; expected a floating-point dtype \(float32, float16, bfloat16, float64\), or None"),
    "out_dtype as a type": (lambda: matmul(M, M, out_dtype=float), r"out_dtype is <class 'float'>; expected a floating-point dtype"),
    "out_dtype's byte order": (lambda: matmul(M, M, out_dtype=np.dtype(">f4")), r"out_dtype is dtype\('>f4'\); expected a floating-point dtype"),
    "out_dtype that raises": (lambda: matmul(M, M, out_dtype=Unreadable()), r"out_dtype is <.*Unreadable object"),
}  # fmt: skip

ARGUMENTS = {
    "a list": (lambda: softmax([1.0, 2.0]), r"softmax: x has type list; expected a NumPy, PyTorch or JAX array: wrap it with numpy.asarray\(x\), torch.tensor\(x\)"),
    "None": (lambda: attention(Q, None, K), r"attention: k has type NoneType; expected a NumPy, PyTorch or JAX array"),
    "a string": (lambda: softmax("text"), r"softmax: x has type str; expected a NumPy"),
    "a number": (lambda: softmax(3.0), r"softmax: x has type float; expected a NumPy"),
    "NumPy's scalar": (lambda: softmax(np.float32(1)), r"softmax: x has type numpy.float32; expected a NumPy"),
    "a masked array": (lambda: softmax(np.ma.masked_equal(zeros(3), 1)), r"x is a numpy.ma.MaskedArray, whose mask no kernel sees; pass x.filled\(...\) instead"),
    "an unknown keyword": (lambda: softmax(zeros(3), dim=0), r"softmax\(\) got an unexpected keyword argument 'dim'; arrays: x; keyword options: axis"),
    "the keyword self": (lambda: softmax(self=zeros(3)), r"softmax\(\) got an unexpected keyword argument 'self'; arrays: x"),
    "a missing array": (lambda: matmul(M), r"matmul\(\) missing 1 required positional argument: 'b'; arrays: a, b"),
    "too many arrays": (lambda: softmax(X, X), r"softmax\(\) takes 1 positional argument but 2 were given; arrays: x"),
    "a positional option": (lambda: layernorm(X, None, None, 1e-5), r"layernorm\(\) takes from 1 to 3 positional arguments but 4 were given"),
    "an array given twice": (lambda: softmax(X, x=X), r"softmax\(\) got multiple values for argument 'x'; arrays: x"),
    "an unknown op": (lambda: pk.op("conv"), r"op 'conv' is unknown; expected one of attention, .*, or a spec"),
    "an op by number": (lambda: pk.op(3), r"op '3' is unknown"),
    "an unknown backend": (lambda: pk.op("softmax", backend="cuda"), r"backend 'cuda' is unknown; expected one of .*reference.*, or a Backend object"),
    "a backend by number": (lambda: pk.op("softmax", backend=3), r"backend 3 is unknown"),
    "an unknown tile": (lambda: pk.op("softmax", tiling={"block_m": 16}), r"tiling has no 'block_m'; expected one of block_rows, block_n \(launch knobs need backend=\)"),
    "a tile that is no power of two": (lambda: pk.op("softmax", tiling={"block_n": 100}), r"tiling\['block_n'\] is 100; expected one of 128, 256.*: leave it out"),
    "a tile as a float": (lambda: pk.op("softmax", tiling={"block_n": 128.0}), r"tiling\['block_n'\] is 128.0; expected one of 128, 256"),
    "a tile as a boolean": (lambda: pk.op("softmax", tiling={"block_rows": True}), r"tiling\['block_rows'\] is True; expected one of 1, 2"),
    "a list of tiles": (lambda: pk.op("softmax", tiling=[128]), r"tiling is \[128\]; expected a dict from tile name to extent: \{'block_rows': 128\}"),
}  # fmt: skip

FRAMEWORKS = {
    "torch beside NumPy": (lambda: matmul(M, torch.zeros(2, 2)), r"matmul: b is a torch array but a is a numpy array; convert one so that all arrays are of one"),
    "torch beside jax": (lambda: matmul(jnp.zeros((2, 2)), torch.zeros(2, 2)), r"b is a torch array but a is a jax array; convert one"),
    "devices": (lambda: matmul(torch.zeros(2, 2), torch.zeros(2, 2, device="meta")), r"b is on meta but a is on cpu; move one so that all arrays are on one device"),
    "meta": (lambda: softmax(torch.zeros(3, device="meta")), r"softmax: x is on meta, where there are no values; expected one on a device: torch.empty_like"),
    "sparse": (lambda: softmax(torch.zeros(2, 2).to_sparse()), r"softmax: x has layout torch.sparse_coo; expected a strided tensor: pass x.to_dense\(\)"),
    "nested": (lambda: softmax(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])), r"x is a Tensor without a shape \(.*\); expected a dense array"),
    "uninitialised": (lambda: softmax(torch.nn.parameter.UninitializedParameter()), r"x is a UninitializedParameter without a shape"),
    "lazily negated": (lambda: softmax(torch.zeros(3, dtype=torch.complex64).conj().imag), r"x is a lazily negated view; pass x.resolve_neg\(\)"),
    "torch's fp8": (lambda: softmax(torch.zeros(3, dtype=torch.float8_e4m3fn)), r"softmax: x is float8_e4m3fn; expected one of float32"),
    "torch's booleans": (lambda: softmax(torch.zeros(3, dtype=torch.bool)), r"softmax: x is bool"),
    "a deleted array": (lambda: softmax(deleted()), r"softmax: x was deleted, or donated to another computation; pass an array that still has its values"),
    "a shape without values": (lambda: softmax(jax.ShapeDtypeStruct((3,), np.float32)), r"x is a jax.ShapeDtypeStruct, which has no values; pass the op and it to"),
    "a random key": (lambda: softmax(jax.random.key(0)), r"softmax: x is key<fry>; expected one of float32"),
    "jax's fp8": (lambda: softmax(jnp.zeros(3, jnp.float8_e4m3fn)), r"softmax: x is float8_e4m3fn"),
    "an axis under vmap": (lambda: jax.vmap(lambda x: softmax(x, axis=1))(jnp.zeros((2, 3))), r"axis is 1; expected an integer from -1 to 0: x has shape \(3,\)"),
    "a traced option": (lambda: jax.jit(lambda x, s: attention(x, x, x, scale=s))(jnp.zeros((1, 2, 1, 4)), 0.5), r"scale is .*Tracer.*; expected a finite number"),
    "an unknown knob": (lambda: pk.op("softmax", backend="triton", tiling={"num_wraps": 4})(X),
                        r"tiling has no 'num_wraps' on triton; expected one of block_rows, block_n, num_warps"),
    "a knob's value": (lambda: pk.op("softmax", backend="triton", tiling={"num_warps": 3})(X), r"tiling\['num_warps'\] is 3; expected one of 1, 2, 4"),
}  # fmt: skip

WRONG = {**SHAPES, **DTYPES, **OPTIONS, **ARGUMENTS, **FRAMEWORKS}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_say_what_is_wrong(name):
    call, message = WRONG[name]
    with pytest.raises(pk.SpecError, match=message) as caught:
        call()
    assert len(str(caught.value)) < 500


def test_the_table_is_whole():
    assert len(WRONG) == len(SHAPES) + len(DTYPES) + len(OPTIONS) + len(ARGUMENTS) + len(FRAMEWORKS) >= 100


UNSUPPORTED = {
    "a gradient's gradient": (lambda: pk.op("softmax_vjp")(*[torch.zeros(3, requires_grad=True)] * 2),
                              r"softmax_vjp: y requires grad, and softmax_vjp is a gradient itself, and no op differentiates it.*; use torch.no_grad\(\), or pass y.detach"),
    "forward mode": (lambda: torch.func.jvp(softmax, (torch.zeros(3),), (torch.zeros(3),)), r"softmax: forward-mode derivatives \(jvp, .*; use reverse mode: torch.func.vjp"),
    "a fake tensor": (lambda: softmax(fake()), r"x is a FakeTensor, which has no memory of its own; pass a plain torch.Tensor"),
    "a float64 that jax narrows": (lambda: pk.op("softmax", backend="pallas")(X.astype(np.float64)), r"JAX would narrow this float64 array to float32; cast it first"),
    "a kernel under jit": (lambda: jax.jit(pk.op("softmax", backend="triton"))(jnp.zeros(3)), r"backend 'triton' runs torch kernels, which JAX cannot stage"),
    "a gradient's gradient in jax": (lambda: jax.grad(lambda y: pk.op("softmax_vjp")(y, y).sum())(jnp.zeros(3)),
                                     r"softmax_vjp is a gradient itself, and no op differentiates it.*JAX: jax.lax.stop_gradient"),
    "a gradient of a gradient in jax": (lambda: jax.hessian(lambda x: softmax(x).sum())(jnp.zeros(3)), r"softmax.*first order"),
}  # fmt: skip


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_right_calls_that_nobody_serves_say_why(name):
    call, message = UNSUPPORTED[name]
    with pytest.raises(pk.UnsupportedError, match=message):
        call()


def test_spec_errors_are_value_and_type_errors():
    for kind in (ValueError, TypeError):
        with pytest.raises(kind):
            pk.op("softmax")("text")


GOOD = {
    "NumPy's integers": lambda: softmax(X, axis=np.int8(-1)),
    "a 0-d integer": lambda: softmax(X, axis=np.array(1)),
    "NumPy's booleans": lambda: attention(Q, K, K, is_causal=np.bool_(True)),
    "NumPy's floats": lambda: layernorm(X, eps=np.float32(1e-5)),
    "a fraction": lambda: attention(Q, K, K, scale=fractions.Fraction(1, 3)),
    "a window as a list": lambda: attention(Q, K, K, window=[1, None]),
    "a window beyond int64": lambda: attention(Q, K, K, window=(10**30, None)),
    "NumPy's tiles": lambda: pk.op("softmax", backend="triton", tiling={"block_n": np.int64(256)})(X),
    "torch's dtype": lambda: matmul(M, M, out_dtype=torch.bfloat16),
    "a subclass": lambda: softmax(X.view(type("Ours", (np.ndarray,), {}))),
    "a parameter": lambda: softmax(torch.nn.Parameter(torch.zeros(3), requires_grad=False)),
    "arrays by keyword": lambda: attention(v=K, k=K, q=Q),
    "segment ids of two widths": lambda: attention(
        Q, K, K, None, zeros(2, 5, dtype=INT32), zeros(2, 7, dtype=np.int64)
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_generous_where_it_is_clear(name, caplog):
    caplog.set_level(logging.ERROR, "portakern")
    assert GOOD[name]() is not None
