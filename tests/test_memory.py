"""Tensors without memory of their own, with memory that holds other values, or whose memory was given back: PyTorch's
ZeroTensors, lazily negated views, samples of torch.func, results of collectives, freed parameters. Each is read as
PyTorch reads it, or refused by name, wherever it enters."""

from __future__ import annotations

import pytest

import portakern as pk
from portakern import testing
from portakern.core.binder import bind
from portakern.core.gradients import wiring
from portakern.core.oracle import as_float64, broken_rule
from portakern.errors import SpecError, UnsupportedError

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("jax", reason="jax is not installed")

import torch.nn.functional as F  # noqa: E402
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import portakern.torch as twins  # noqa: E402
from tests.ops.record import dtype_for  # noqa: E402

BACKENDS = ["reference", "triton", "pallas"]
SAMPLES = [(op, name) for op in pk.ops() for name in testing.samples(op)]
FIRST = [(op, next(iter(testing.samples(op)))) for op in pk.ops()]
FORWARD = [(op, name) for op, name in SAMPLES if pk.op(op).spec.vjp]


def drawn(op, name):
    """A sample's arguments: contiguous arrays, and the options."""
    arrays, options = testing.sample_arrays(op, name, dtype=dtype_for(op, "float32"), framework="torch")
    return {n: a.contiguous() for n, a in arrays.items()}, options


def flat(result):
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


def floating(arrays):
    return [n for n, a in arrays.items() if a.is_floating_point() and a.itemsize > 1]


def zeroed(op, arrays, options):
    """The floating arrays that the op's rules on values let be zeros, of which there is one at least."""
    found = []
    for n in floating(arrays):
        given = arrays | {m: torch.zeros_like(arrays[m]) for m in (*found, n)}
        if broken_rule(as_float64(bind(pk.op(op).spec, **given, **options))) is None:
            found.append(n)
    assert found or not floating(arrays)
    return found


def negated(x):
    """The values of ``x``, of which memory holds the negatives."""
    return torch._neg_view(-x)


def nothing(x):
    """Zeros that take no memory."""
    made = torch._efficientzerotensor(x.shape, dtype=x.dtype)
    assert made._is_zerotensor()
    return made


def freed(x):
    """A tensor like ``x``, whose memory was given back."""
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def same(actual, expected):
    actual, expected = flat(actual), flat(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


EACH = [pytest.param(op, name, b, id=f"{op} {name} {b}")
        for b in BACKENDS for op, name in (FIRST if b == "pallas" else SAMPLES)]  # fmt: skip


@pytest.mark.parametrize(("op", "name", "backend"), EACH)
def test_lazily_held_values_are_read_as_they_are(op, name, backend):
    arrays, options = drawn(op, name)
    call, names = pk.op(op, backend=backend), floating(arrays)
    expected = call(**arrays, **options)
    for _ in range(2):  # decided, and decided again: nothing is kept for such tensors
        same(call(**arrays | {n: negated(arrays[n]) for n in names}, **options), expected)
    same(call(**arrays, **options), expected)
    names = zeroed(op, arrays, options)
    zeros = call(**arrays | {n: torch.zeros_like(arrays[n]) for n in names}, **options)
    same(call(**arrays | {n: nothing(arrays[n]) for n in names}, **options), zeros)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("op", "name"), FIRST)
def test_memory_that_was_given_back_is_never_read(op, name, backend):
    arrays, options = drawn(op, name)
    call = pk.op(op, backend=backend)
    for seen in range(2):  # a call of this form was not served before, and was
        for n, x in arrays.items():
            gone = torch.cat([x.reshape(-1)] * 2)[x.numel() :].view(x.shape)  # a view, not at its beginning
            gone.untyped_storage().resize_(0)
            for lost in (freed(x), gone):
                with pytest.raises(SpecError, match=rf"{op}: {n} needs \d+ bytes and its storage holds 0: the memory"):
                    call(**arrays | {n: lost}, **options)
        if not seen:
            for _ in range(3):
                call(**arrays, **options)


def test_a_storage_that_is_too_short_is_refused():
    x = torch.ones(3, 5)
    x.untyped_storage().resize_(8)
    for backend in BACKENDS:
        with pytest.raises(SpecError, match="softmax: x needs 60 bytes and its storage holds 8"):
            type(pk.op("softmax"))(pk.op("softmax").spec, type(pk.op("softmax").choice)(pk.backends()[backend]))(x)


@pytest.mark.parametrize(("op", "name", "backend"), [p for p in EACH if p.values[:2] in FORWARD])
def test_cotangents_without_memory_of_their_own(op, name, backend):
    arrays, options = drawn(op, name)
    wired, call = wiring(pk.op(op).spec), pk.op(op, backend=backend)
    leaves = [n for n in wired.gradients if n in arrays]
    arrays |= {n: arrays[n].requires_grad_() for n in leaves}
    outputs = pk.op(op).spec.outputs
    result = call(**arrays, **options)
    named = dict(zip((o.name for o in outputs), result if isinstance(result, tuple) else (result,), strict=False))
    outs = [y for n, y in named.items() if y is not None and n in wired.cotangents]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outs]
    inputs = [arrays[n] for n in leaves]

    def gradients(cotangents):
        return torch.autograd.grad(outs, inputs, cotangents, retain_graph=True, allow_unused=True)

    for plain, lazy in ((values, [negated(v) for v in values]),
                        ([torch.zeros_like(v) for v in values], [nothing(v) for v in values])):  # fmt: skip
        expected = gradients(plain)
        for _ in range(3):  # the long way, what is kept of it, and what is kept again
            same(gradients(lazy), expected)
            same(gradients(plain), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sign_has_no_gradient_and_its_cotangent_no_memory(backend):
    x = torch.randn(3, 5, requires_grad=True)
    for _ in range(3):
        x.grad = None
        torch.sgn(twins.softmax(x, -1, backend=backend)).sum().backward()
        assert x.grad.eq(0).all() and not x.grad._is_zerotensor()
    with twins.swapped(backend=backend):
        x.grad = None
        torch.sgn(F.layer_norm(x, (5,))).sum().backward()
        assert x.grad.eq(0).all()
    for reentrant in (False, True):
        x.grad = None
        torch.sgn(checkpoint(pk.op("softmax", backend=backend), x, use_reentrant=reentrant)).sum().backward()
        assert x.grad.eq(0).all()
    x.grad = None
    torch.compile(lambda x: torch.sgn(pk.op("softmax", backend=backend)(x)).sum(), backend="aot_eager")(x).backward()
    assert x.grad.eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_imaginary_parts_of_conjugates_are_read_by_twins(backend):
    z = torch.randn(4, 4, dtype=torch.complex64)
    x = z.conj().imag
    assert x.is_neg()
    torch.testing.assert_close(twins.softmax(x, -1, backend=backend), torch.softmax(x, -1))
    torch.testing.assert_close(twins.matmul(x, x, backend=backend), x @ x)
    torch.testing.assert_close(twins.layer_norm(x, (4,), backend=backend), F.layer_norm(x, (4,)))
    torch.testing.assert_close(twins.logsumexp(x, 0, backend=backend), torch.logsumexp(x, 0))
    leaf = z.requires_grad_()
    (ours,) = torch.autograd.grad(twins.softmax(leaf.conj().imag, -1, backend=backend)[:, 0].sum(), leaf)
    (theirs,) = torch.autograd.grad(torch.softmax(leaf.conj().imag, -1)[:, 0].sum(), leaf)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_transforms_hand_lazy_tensors_on(backend):
    f, g = pk.op("softmax", backend=backend), lambda x: torch.softmax(x, -1)
    x, lazy, zero = torch.randn(2, 5), negated(torch.randn(2, 5)), nothing(torch.empty(2, 5))
    for transform in (
        lambda f, given: torch.func.grad(lambda x: f(x).pow(2).sum())(given),
        lambda f, given: torch.vmap(f)(given),
        lambda f, given: torch.func.vjp(f, x)[1](given)[0],
        lambda f, given: torch.vmap(torch.func.vjp(f, x)[1])(given.expand(3, 2, 5))[0],
        lambda f, given: torch.func.functionalize(f)(given),
        lambda f, given: torch.compile(lambda x: f(x) * 2, backend="aot_eager")(given),
    ):
        for given in (lazy, zero):
            torch.testing.assert_close(transform(f, given), transform(g, given))
    leaf = torch.randn(2, 5, requires_grad=True)
    for given in (negated(torch.randn(3, 2, 5)), nothing(torch.empty(3, 2, 5))):
        ours, theirs = (torch.autograd.grad(h(leaf), leaf, given, is_grads_batched=True)[0] for h in (f, g))
        torch.testing.assert_close(ours, theirs)


def test_samples_that_outlive_their_transform():
    held = []
    torch.vmap(lambda x: held.append(x) or x)(torch.ones(3, 5))
    torch.func.grad(lambda x: held.append(x) or x.sum())(torch.ones(3, 5))
    softmax = pk.op("softmax", backend="triton")
    with pytest.raises(SpecError, match="softmax: x is one sample of a torch.func transform that is over; return it"):
        softmax(held[0])
    torch.testing.assert_close(softmax(held[1]), torch.full((3, 5), 0.2))  # PyTorch's functions read it too


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_of_collectives_are_waited_for(backend, monkeypatch):
    values, softmax = torch.randn(3, 5), pk.op("softmax", backend=backend)
    for _ in range(3):
        pending = AsyncCollectiveTensor(values)
        torch.testing.assert_close(softmax(pending), torch.softmax(values, -1))
        assert pending.completed
        torch.testing.assert_close(twins.softmax(AsyncCollectiveTensor(values), -1, backend=backend),
                                   torch.softmax(values, -1))  # fmt: skip
    q, mask = torch.randn(1, 2, 3, 4), torch.tensor([[True, False, True]] * 3)
    masked = twins.scaled_dot_product_attention(q, q, q, AsyncCollectiveTensor(mask), backend=backend)
    torch.testing.assert_close(masked, torch.nn.functional.scaled_dot_product_attention(q, q, q, mask))
    pending = AsyncCollectiveTensor(values).requires_grad_()
    theirs = values.clone().requires_grad_()
    softmax(pending)[:, 0].sum().backward()
    torch.softmax(theirs, -1)[:, 0].sum().backward()
    torch.testing.assert_close(pending.grad, theirs.grad)
    theirs.grad = None
    softmax(theirs).backward(AsyncCollectiveTensor(values))
    torch.testing.assert_close(theirs.grad, torch.autograd.grad(torch.softmax(theirs, -1), theirs, values)[0])


LAYOUTS = {
    "sparse_coo": (lambda x: x.to_sparse(), "layout torch.sparse_coo; expected a strided tensor: pass x.to_dense()"),
    "sparse_csr": (lambda x: x.to_sparse_csr(), "layout torch.sparse_csr; .* pass x.to_dense()"),
    "sparse_csc": (lambda x: x.to_sparse_csc(), "layout torch.sparse_csc; .* pass x.to_dense()"),
    "sparse_bsr": (lambda x: x.to_sparse_bsr(2), "layout torch.sparse_bsr; .* pass x.to_dense()"),
    "sparse_bsc": (lambda x: x.to_sparse_bsc(2), "layout torch.sparse_bsc; .* pass x.to_dense()"),
    "mkldnn": (lambda x: x.to_mkldnn(), "layout torch._mkldnn; .* pass x.to_dense()"),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
        r"layout torch.jagged; .* pass x.to_padded_tensor\(0.0\)",
    ),
    "nested": (lambda x: torch.nested.nested_tensor([x, x[:2]]), "x is a Tensor without a shape"),
    "quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), "x is torch.quint8; .* cast it"),
    "conjugate": (lambda x: torch.complex(x, x).conj(), "x is torch.complex64; .* cast it"),
    "meta": (lambda x: x.to("meta"), "x is on meta, where there are no values"),
    "functional": (torch._to_functional_tensor, "x has no memory: it stands for a tensor in a program that PyTorch"),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_what_no_kernel_reads_is_refused_by_name(kind, backend):
    make, said = LAYOUTS[kind]
    softmax, x = pk.op("softmax", backend=backend), torch.eye(4)
    for _ in range(3):
        with pytest.raises(SpecError, match=said):
            softmax(make(x))
        softmax(x)


@pytest.mark.filterwarnings("error")
def test_classes_without_values_are_refused_by_name():
    from torch._subclasses import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    with FakeTensorMode():
        fake = torch.ones(3, 5)
    with FunctionalTensorMode():
        functional = FunctionalTensor.to_functional(torch.ones(3, 5))
    for x in (fake, functional):
        for _ in range(2):  # of a class that was seen before too: a FakeTensor warns where it is asked for its address
            with pytest.raises(UnsupportedError, match=f"softmax: x is a {type(x).__name__}, which has no memory of"):
                pk.op("softmax", backend="triton")(x)


def test_what_lies_in_a_copy_is_not_written_over():
    gate, up, d_y = torch.ones(3, 5), torch.ones(3, 5), torch.ones(3, 5)
    for lazy in (negated(up), nothing(up)):
        with pytest.raises(SpecError, match=r"overwrite names up, whose values are not in its memory .* up\.clone\(\)"):
            pk.op("swiglu_vjp", backend="triton")(gate, lazy, d_y, overwrite="up")
