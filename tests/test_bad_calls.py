"""Wrong calls: every message names the op, the argument, what came, what was expected and what to do about it."""

from __future__ import annotations

import fractions
import logging

import ml_dtypes
import numpy as np
import pytest

import portakern as pk
from tests.ops import forward_records, records

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


DTYPES = {
    "integers": (
        lambda: softmax(zeros(3, dtype=INT32)),
        r"softmax: x is int32; expected one of float32, float16, bfloat16, float64: cast it",
    ),
    "a mask for a bias": (
        lambda: attention(*[zeros(1, 2, 1, 4)] * 3, zeros(1, 1, 2, 2, dtype=bool)),
        r"attention: bias is bool but q is float32; .*a cast would add ones and zeros\); pass where\(bias, 0, -inf\)",
    ),
    "a mask of integers for a bias": (
        lambda: attention(*[zeros(1, 2, 1, 4)] * 3, zeros(1, 1, 2, 2, dtype="int64")),
        r"attention: bias is int64 but q is float32; .*pass where\(bias != 0, 0, -inf\)",
    ),
    "booleans": (lambda: softmax(zeros(3, dtype=bool)), r"softmax: x is bool; expected one of float32"),
    "complex": (lambda: softmax(zeros(3, dtype=np.complex64)), r"softmax: x is complex64; expected one of float32"),
    "objects": (lambda: softmax(np.array([1.0, None])), r"softmax: x is object; expected one of float32"),
    "text": (lambda: softmax(np.array(["a"])), r"softmax: x is <U1; expected one of float32"),
    "structured": (
        lambda: softmax(np.zeros(3, [("a", "f4")])),
        r"softmax: x is \[\('a', '<f4'\)\]; expected one of float32",
    ),
    "dates": (lambda: softmax(np.zeros(3, "M8[s]")), r"softmax: x is datetime64\[s\]; expected one of float32"),
    "fp8": (
        lambda: softmax(zeros(3, dtype=ml_dtypes.float8_e4m3fn)),
        r"softmax: x is float8_e4m3fn; expected one of float32",
    ),
    "byte order": (
        lambda: softmax(zeros(3, dtype=">f4")),
        r"x is >f4, not in the native byte order; pass x.astype\(x.dtype.newbyteorder\('='\)\)",
    ),
}

ARGUMENTS = {
    "a list": (
        lambda: softmax([1.0, 2.0]),
        r"softmax: x has type list; expected a NumPy, PyTorch or JAX array: "
        r"wrap it with numpy.asarray\(x\), torch.tensor\(x\)",
    ),
    "a string": (lambda: softmax("text"), r"softmax: x has type str; expected a NumPy"),
    "a number": (lambda: softmax(3.0), r"softmax: x has type float; expected a NumPy"),
    "NumPy's scalar": (lambda: softmax(np.float32(1)), r"softmax: x has type numpy.float32; expected a NumPy"),
    "a masked array": (
        lambda: softmax(np.ma.masked_equal(zeros(3), 1)),
        r"x is a numpy.ma.MaskedArray, whose mask no kernel sees; pass x.filled\(...\) instead",
    ),
    "an unknown keyword": (
        lambda: softmax(zeros(3), dim=0),
        r"softmax\(\) got an unexpected keyword argument 'dim'; arrays: x; keyword options: axis",
    ),
    "the keyword self": (
        lambda: softmax(self=zeros(3)),
        r"softmax\(\) got an unexpected keyword argument 'self'; arrays: x",
    ),
    "too many arrays": (lambda: softmax(X, X), r"softmax\(\) takes 1 positional argument but 2 were given; arrays: x"),
    "an array given twice": (lambda: softmax(X, x=X), r"softmax\(\) got multiple values for argument 'x'; arrays: x"),
    "an unknown op": (lambda: pk.op("conv"), r"op 'conv' is unknown; expected one of .*attention, .*, or a spec"),
    "an op by number": (lambda: pk.op(3), r"op '3' is unknown"),
    "an unknown backend": (
        lambda: pk.op("softmax", backend="cuda"),
        r"backend 'cuda' is unknown; expected one of .*reference.*, or a Backend object",
    ),
    "a backend by number": (lambda: pk.op("softmax", backend=3), r"backend 3 is unknown"),
    "an unknown tile": (
        lambda: pk.op("softmax", tiling={"block_m": 16}),
        r"tiling has no 'block_m'; expected one of block_rows, block_n \(launch knobs need backend=\)",
    ),
    "a tile that is no power of two": (
        lambda: pk.op("softmax", tiling={"block_n": 100}),
        r"tiling\['block_n'\] is 100; expected one of 128, 256.*: leave it out",
    ),
    "a tile as a float": (
        lambda: pk.op("softmax", tiling={"block_n": 128.0}),
        r"tiling\['block_n'\] is 128.0; expected one of 128, 256",
    ),
    "a tile as a boolean": (
        lambda: pk.op("softmax", tiling={"block_rows": True}),
        r"tiling\['block_rows'\] is True; expected one of 1, 2",
    ),
    "a list of tiles": (
        lambda: pk.op("softmax", tiling=[128]),
        r"tiling is \[128\]; expected a dict from tile name to extent: \{'block_rows': 128\}",
    ),
}

FRAMEWORKS = {
    "torch beside NumPy": (
        lambda: matmul(M, torch.zeros(2, 2)),
        r"matmul: b is a torch array but a is a numpy array; convert one so that all arrays are of one",
    ),
    "torch beside jax": (
        lambda: matmul(jnp.zeros((2, 2)), torch.zeros(2, 2)),
        r"b is a torch array but a is a jax array; convert one",
    ),
    "devices": (
        lambda: matmul(torch.zeros(2, 2), torch.zeros(2, 2, device="meta")),
        r"b is on meta but a is on cpu; move one so that all arrays are on one device",
    ),
    "meta": (
        lambda: softmax(torch.zeros(3, device="meta")),
        r"softmax: x is on meta, where there are no values; expected one on a device: torch.empty_like",
    ),
    "sparse": (
        lambda: softmax(torch.zeros(2, 2).to_sparse()),
        r"softmax: x has layout torch.sparse_coo; expected a strided tensor: pass x.to_dense\(\)",
    ),
    "nested": (
        lambda: softmax(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])),
        r"x is a Tensor without a shape \(.*\); expected a dense array",
    ),
    "uninitialised": (
        lambda: softmax(torch.nn.parameter.UninitializedParameter()),
        r"x is a UninitializedParameter without a shape",
    ),
    "torch's fp8": (
        lambda: softmax(torch.zeros(3, dtype=torch.float8_e4m3fn)),
        r"softmax: x is float8_e4m3fn; expected one of float32",
    ),
    "torch's booleans": (lambda: softmax(torch.zeros(3, dtype=torch.bool)), r"softmax: x is bool"),
    "a deleted array": (
        lambda: softmax(deleted()),
        r"softmax: x was deleted, or donated to another computation; pass an array that still has its values",
    ),
    "a shape without values": (
        lambda: softmax(jax.ShapeDtypeStruct((3,), np.float32)),
        r"x is a jax.ShapeDtypeStruct, which has no values; pass the op and it to",
    ),
    "a random key": (lambda: softmax(jax.random.key(0)), r"softmax: x is key<fry>; expected one of float32"),
    "jax's fp8": (lambda: softmax(jnp.zeros(3, jnp.float8_e4m3fn)), r"softmax: x is float8_e4m3fn"),
    "an axis under vmap": (
        lambda: jax.vmap(lambda x: softmax(x, axis=1))(jnp.zeros((2, 3))),
        r"axis is 1; expected an integer from -1 to 0: x has shape \(3,\)",
    ),
    "a traced option": (
        lambda: jax.jit(lambda x, s: attention(x, x, x, scale=s))(jnp.zeros((1, 2, 1, 4)), 0.5),
        r"scale is .*Tracer.*; expected a finite number",
    ),
    "an unknown knob": (
        lambda: pk.op("softmax", backend="triton", tiling={"num_wraps": 4})(X),
        r"tiling has no 'num_wraps' on triton; expected one of block_rows, block_n, num_warps",
    ),
    "a knob's value": (
        lambda: pk.op("softmax", backend="triton", tiling={"num_warps": 3})(X),
        r"tiling\['num_warps'\] is 3; expected one of 1, 2, 4",
    ),
}

OF_OPS = {f"{r.op}: {key}": wrong for r in forward_records() for key, wrong in r.wrong.items()}
WRONG = {**DTYPES, **ARGUMENTS, **FRAMEWORKS, **OF_OPS}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_say_what_is_wrong(name):
    call, message = WRONG[name]
    with pytest.raises(pk.SpecError, match=message) as caught:
        call()
    assert len(str(caught.value)) < 500


def test_the_table_is_whole():
    assert len(WRONG) == len(DTYPES) + len(ARGUMENTS) + len(FRAMEWORKS) + len(OF_OPS) >= 100


def mistakes(r):
    """(a wrong call, what its message says) for each argument of an op, as its signature alone tells."""
    op, sample = pk.op(r.op), next(iter(r.small.values()))
    right = sample.arrays(r.op)
    for name, a in right.items():
        yield {**right, name: a.tolist()}, sample.options, f"{name} has type list; expected a NumPy"
        yield {**right, name: a.astype(complex)}, sample.options, f"{name} is complex128"
        if not any(d.variadic for d in next(x for x in r.spec.arrays if x.name == name).dims):
            yield {**right, name: a[None]}, sample.options, f"{name} has {a.ndim + 1} axes"
    for a in r.spec.arrays:
        if not a.optional:
            yield (
                {n: x for n, x in right.items() if n != a.name},
                sample.options,
                rf"missing 1 required positional argument: '{a.name}'",
            )
    for o in r.spec.options:
        yield right, {**sample.options, o.name: object()}, rf"{o.name} is <object object at"
    yield right, {"no_such_option": 1}, "unexpected keyword argument 'no_such_option'"
    assert op(**right, **sample.options) is not None


@pytest.mark.parametrize("r", records().values(), ids=lambda r: r.op)
def test_every_argument_of_every_op_is_named_where_it_is_wrong(r):
    for arrays, options, message in mistakes(r):
        with pytest.raises(pk.SpecError, match=rf"^{r.op}(\(\))?:? .*{message}"):
            pk.op(r.op)(**arrays, **options)


UNSUPPORTED = {
    "a gradient's gradient": (
        lambda: pk.op("softmax_vjp")(*[torch.zeros(3, requires_grad=True)] * 2),
        r"softmax_vjp: y requires grad, and softmax_vjp is a gradient itself, and no op differentiates it.*; "
        r"use torch.no_grad\(\), or pass y.detach",
    ),
    "forward mode": (
        lambda: torch.func.jvp(softmax, (torch.zeros(3),), (torch.zeros(3),)),
        r"softmax: forward-mode derivatives \(jvp, .*; use reverse mode: torch.func.vjp",
    ),
    "a fake tensor": (
        lambda: softmax(fake()),
        r"x is a FakeTensor, which has no memory of its own; pass a plain torch.Tensor",
    ),
    "a float64 that jax narrows": (
        lambda: pk.op("softmax", backend="pallas")(X.astype(np.float64)),
        r"JAX would narrow this float64 array to float32; cast it first",
    ),
    "a kernel under jit": (
        lambda: jax.jit(pk.op("softmax", backend="triton"))(jnp.zeros(3)),
        r"backend 'triton' runs torch kernels, which JAX cannot stage into a traced function for cpu",
    ),
    "a gradient's gradient in jax": (
        lambda: jax.grad(lambda y: pk.op("softmax_vjp")(y, y).sum())(jnp.zeros(3)),
        r"softmax_vjp is a gradient itself, and no op differentiates it.*JAX: jax.lax.stop_gradient",
    ),
    "a gradient of a gradient in jax": (
        lambda: jax.hessian(lambda x: softmax(x).sum())(jnp.zeros(3)),
        r"softmax.*first order",
    ),
}


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
