"""Gradients and autocast under PyTorch, eagerly; torch.func is tests/test_torch_func.py, torch.compile
tests/test_torch_compile.py.
"""

from __future__ import annotations

import gc
import weakref
from typing import NamedTuple, TypeVar

import numpy as np
import pytest
from jaxtyping import Float, Float32

import portakern as pk
from portakern.core import registry
from portakern.core.framework import convert, frameworks
from portakern.core.gradients import wiring
from portakern.spec import When, spec

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
fn = torch.nn.functional

from tests.ops import forward_records  # noqa: E402
from tests.ops._shared import results  # noqa: E402

A = TypeVar("A")
BACKENDS = ("reference", "triton")


def f64(*shape, grad=True, seed=0):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))
    ).requires_grad_(grad)


IDS = torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 1, 1]])
QKV = f64(1, 3, 2, 2), f64(1, 4, 1, 2, seed=1), f64(1, 4, 1, 3, seed=2)
FORWARD = [r for r in forward_records() if r.spec.vjp]
SMALL = [pytest.param(r, key, id=f"{r.op}: {key}") for r in FORWARD for key in r.small]


def tensors(r, sample, grad=True):
    """The float64 tensors of a record's sample, in the order of the spec's arguments; None for an absent one."""
    arrays = {
        n: convert(a, frameworks()["numpy"], frameworks()["torch"]) for n, a in sample.arrays(r.op, "float64").items()
    }
    for i, x in enumerate(arrays.values()):
        x.requires_grad_(grad and i in r.differentiable(sample))
    return tuple(arrays.get(a.name) for a in r.spec.arrays)


def grads(f, *inputs, weight=None):
    y = f(*inputs)
    return torch.autograd.grad(y, inputs, torch.ones_like(y) if weight is None else weight)


every_op = pytest.mark.parametrize("r", FORWARD, ids=lambda r: r.op)


def beside_torch(r):
    """The op on Triton and in plain torch, as functions of the arrays, and the arrays of the record's call."""
    options, given = r.compared.options, [a for a in tensors(r, r.compared) if a is not None]
    floating = [i for i, a in enumerate(given) if a.requires_grad]

    def of_floats(f):
        """f as a function of the arrays that have gradients, with several results as one."""

        def run(*a):
            whole = {**dict(enumerate(given)), **dict(zip(floating, a, strict=True))}
            found = results(f(*whole.values(), **options))
            if len({y.shape for y in found}) > 1:
                return torch.cat([y.flatten() for y in found])
            return torch.stack(found) if len(found) > 1 else found[0]

        return run

    return of_floats(pk.op(r.op, backend="triton")), of_floats(r.in_torch), [given[i] for i in floating]


LAYOUTS = {
    "contiguous": lambda y: y.clone(),
    "of a sum": lambda y: torch.ones((), dtype=y.dtype).expand(y.shape),
    "transposed": lambda y: y.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced": lambda y: torch.stack([y, y], -1)[..., 1],
    "lazily negated": lambda y: torch.complex(y, y).conj().imag,
}


@every_op
def test_gradients_are_torch_s_whatever_the_cotangent_s_strides(r):
    ours, theirs, arrays = beside_torch(r)
    given = [a.name for a in r.spec.arrays if a.name in r.compared.shapes]
    passed, names = wiring(r.spec).vjp.passes, [given[i] for i in r.differentiable(r.compared)]
    for layout, laid in LAYOUTS.items():
        weight = laid(theirs(*arrays).detach())
        found, wanted = (grads(f, *arrays, weight=weight) for f in (ours, theirs))
        for name, mine, its, x in zip(names, found, wanted, arrays, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12, msg=lambda m, at=layout: f"{at}: {m}")
            assert mine.data_ptr() != x.data_ptr() and mine.dtype == x.dtype, layout
            assert mine.is_contiguous() or name in passed, "a cotangent that is passed on is the caller's"


@pytest.mark.parametrize("backend", ["reference", "pallas"])
def test_backends_of_other_frameworks_differentiate_torch_tensors(backend):
    if backend == "pallas":
        pytest.importorskip("jax", reason="jax is not installed")
    x = f64(3, 4).detach().float().requires_grad_()
    got, want = (
        grads(pk.op("softmax", backend=backend), x, weight=x.detach()),
        grads(lambda x: torch.softmax(x, -1), x, weight=x.detach()),
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def served(f):
    seen = []
    with pk.observe(seen.append):
        f()
    return [(s.call.spec.name, s.call.wants, dict(s.tiling), s.backend) for s in seen]


@pytest.mark.parametrize("needed", [(0,), (1, 2), (3,), (0, 1, 2, 3)])
def test_only_the_gradients_that_are_needed_are_computed(needed):
    arrays = [x.detach().requires_grad_(i in needed) for i, x in enumerate((*QKV, f64(1, 2, 3, 4)))]
    calls = served(lambda: pk.op("attention", backend="reference")(*arrays).sum().backward())
    forward = registry.find_spec("attention")
    assert [name for name, *_ in calls] == [forward.name, forward.vjp]
    assert calls[0][1] == ("o", "lse", "lse_low") and calls[1][1] == tuple(
        ("d_q", "d_k", "d_v", "d_bias")[i] for i in needed
    )
    assert [x.grad is not None for x in arrays] == [i in needed for i in range(4)]


def test_a_tiling_and_a_backend_reach_the_gradient_where_it_has_the_tile():
    x, w = f64(4, 5), f64(5)
    op = pk.op("layernorm", backend="triton", tiling={"block_rows": 2, "num_warps": 2})
    forward, backward = served(lambda: op(x, w).sum().backward())
    assert forward[3] == backward[3] == "triton" and forward[2]["block_rows"] == backward[2]["block_rows"] == 2
    assert forward[2]["num_warps"] == 2  # a knob is one kernel's own


def test_the_user_gets_what_was_asked_for():
    q, k, v = QKV
    attention = pk.op("attention", backend="reference")
    assert isinstance(attention(q, k, v), torch.Tensor)
    o, lse = attention(q, k, v, return_lse=True)
    assert (
        o.requires_grad
        and lse.requires_grad
        and o.grad_fn is lse.grad_fn
        and type(o.grad_fn).__name__ == "attentionBackward"
    )
    alone = torch.autograd.grad(lse.sum(), (q, k, v), retain_graph=True)
    assert not alone[2].any() and alone[0].any()


def test_nothing_is_recorded_that_nobody_asked_for():
    x = f64(3)
    softmax = pk.op("softmax", backend="reference")
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert softmax(x).grad_fn is None
    assert softmax(x.detach()).grad_fn is None
    assert served(lambda: pk.op("attention", backend="reference")(*(a.detach() for a in QKV)))[0][1] == ("o",)


def test_a_graph_may_be_walked_twice_and_saved_tensors_may_not_change():
    x = f64(3).detach().requires_grad_()
    y = pk.op("layernorm", backend="reference")(x * 1)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(y.sum(), x)[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y.sum(), x)
    z = x * 1
    y = pk.op("layernorm", backend="reference")(z)
    z += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("r", FORWARD, ids=lambda r: r.op)
def test_a_graph_of_the_first_call_of_a_form_is_decided_about_once(r, monkeypatch):
    """A graph that is kept may be walked often: who serves its gradients is decided on the first walk."""
    from portakern.frameworks.torch import eager

    decided = []
    decide = eager.decide
    monkeypatch.setattr(eager, "decide", lambda call, choice: decided.append(call.spec.name) or decide(call, choice))
    sample = next(iter(r.small.values()))
    options = {n: v for n, v in sample.options.items() if r.spec.option(n).kind != "dtype"}
    op, arrays = pk.op(r.op, backend="triton"), tensors(r, sample)
    wanted = [a for a in arrays if a is not None and a.requires_grad]
    y = results(op(*arrays, **options))[0]
    walks = [torch.autograd.grad(y.sum(), wanted, retain_graph=True, allow_unused=True) for _ in range(3)]
    assert decided.count(op.spec.vjp) == 1, decided
    for walk in walks:
        assert all(a is b or torch.equal(a, b) for a, b in zip(walk, walks[0], strict=True))


def test_a_graph_holds_what_the_gradient_reads_and_no_more():
    x = f64(3)
    inner = x * 1
    alive = weakref.ref(inner)
    y = pk.op("softmax", backend="reference")(inner)  # its gradient reads y alone
    del inner
    gc.collect()
    assert alive() is None and y.grad_fn is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    attention = lambda *given: pk.op("attention", backend="reference")(*given, is_causal=True)  # noqa: E731
    copies = [x.detach().requires_grad_() for x in QKV]
    checkpoint(attention, *copies, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(c.grad, want) for c, want in zip(copies, grads(attention, *QKV), strict=True))


def test_second_order_is_refused_when_somebody_differentiates_twice():
    x = f64(3)
    g = torch.autograd.grad(pk.op("softmax", backend="reference")(x).pow(2).sum(), x, create_graph=True)[0]
    assert g.requires_grad
    with pytest.raises(
        pk.UnsupportedError,
        match="softmax: second-order gradients are not given: softmax_vjp is what computes the first",
    ):
        g.pow(2).sum().backward()
    with pytest.raises(pk.UnsupportedError, match="softmax_vjp: y requires grad, and softmax_vjp is a gradient itself"):
        pk.op("softmax_vjp", backend="reference")(x, x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA or AMD GPU")
@every_op
def test_forward_and_backward_are_captured_in_a_cuda_graph(r):
    ours, _, arrays = beside_torch(r)
    arrays = [x.detach().float().cuda().requires_grad_() for x in arrays]
    weight = torch.randn_like(ours(*arrays))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            grads(ours, *arrays, weight=weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):  # whatever synchronises is an error here
        got = grads(ours, *arrays, weight=weight)
    with torch.no_grad():
        for x in arrays:
            x.mul_(2)
    graph.replay()
    assert all(map(torch.equal, got, grads(ours, *arrays, weight=weight)))


# ------------------------------------------------------------------------------------------------------------- autocast
def test_autocast_follows_torch():
    x = torch.randn(4, 4, requires_grad=True)
    q = torch.randn(1, 3, 2, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = [
            pk.op("matmul", backend="reference")(x, x.bfloat16()),
            pk.op("attention", backend="reference")(q, q, v=q),
        ]
        full = [
            call(of(x))
            for call in (
                pk.op("softmax", backend="reference"),
                lambda z: pk.op("layernorm", backend="reference")(z, x[0]),
                pk.op("rmsnorm", backend="reference"),
            )
            for of in (torch.Tensor.bfloat16, torch.Tensor.float)
        ]
        theirs = [
            f(of(x))
            for f in (lambda x: x.softmax(-1), lambda x: fn.layer_norm(x, (4,)), lambda x: fn.rms_norm(x, (4,)))
            for of in (torch.Tensor.bfloat16, torch.Tensor.float)
        ]
        wide = pk.op("matmul", backend="reference")(x.double(), x.double())
        with torch.autocast("cpu", enabled=False):
            assert pk.op("matmul", backend="reference")(x, x).dtype == torch.float32
    assert [y.dtype for y in (*low, wide)] == [torch.bfloat16] * 2 + [torch.float64]
    assert [y.dtype for y in full] == [y.dtype for y in theirs] == [torch.bfloat16, torch.float32] * 3
    assert torch.equal(low[0], pk.op("matmul", backend="reference")(x.bfloat16(), x.bfloat16()))
    torch.autograd.backward([y.sum() for y in (*low, *full)])
    assert x.grad.dtype == q.grad.dtype == torch.float32
    # PyTorch's lists name what it has, but for functions of 8-bit operands and those that compute nothing
    twins = [r for r in forward_records() if r.twin and r.twin.package == "torch"]
    assert all((r.spec.autocast is not None) == ("float16" in r.spec.dtypes and not r.exact) for r in twins)


# -------------------------------------------------------------------------------------------------- somebody's own spec
class PairOut(NamedTuple):
    y: Float[A, "*batch n"]
    norm: Float32[A, "*batch"]


class DoubleOut(NamedTuple):
    y: Float[A, "*batch n"]


class PairVjpOut(NamedTuple):
    d_x: Float[A, "*batch n"]


class SumVjpOut(NamedTuple):
    d_a: Float[A, "*batch n"]


def flops(call):
    return 1.0


@pytest.fixture
def pair(monkeypatch):
    """y = shift + x |x|^2 and norm = |x|^2: a residual, a cotangent that must be there, an input without a gradient."""

    @spec(tiling={}, flops=flops, vjp="pair_vjp")
    def pair(x: Float[A, "*batch n"], shift: Float[A, "n"] | None = None) -> PairOut:
        """y = shift + x |x|^2."""

    @spec(tiling={}, flops=flops)
    def pair_vjp(x: Float[A, "*batch n"], norm: Float32[A, "*batch"], d_y: Float[A, "*batch n"]) -> PairVjpOut:
        """d_x = norm d_y + 2 x (x . d_y)."""

    find = registry.find_spec
    monkeypatch.setattr(
        registry, "find_spec", lambda name: {"pair": pair, "pair_vjp": pair_vjp}.get(name) or find(name)
    )
    backend = pk.Backend("own", framework="torch")

    @backend.implements("pair")
    def _pair(call, tiling):
        x, shift = call.arrays["x"], call.arrays["shift"]
        norm = (x * x).sum(-1)
        return x * norm[..., None] + (0 if shift is None else shift), norm.to(
            torch.float64 if call.dtype == "float64" else torch.float32
        )

    def _vjp(call, tiling):
        x, norm, d_y = (call.arrays[n] for n in ("x", "norm", "d_y"))
        return (norm[..., None] * d_y + 2 * x * (x * d_y).sum(-1, keepdim=True),)

    def make(vjp=True):
        if vjp:
            backend.implements("pair_vjp")(_vjp)
        return pk.op(pair, backend=backend)

    return make


def test_a_third_party_s_gradient(pair):
    op, x = pair(), f64(2, 3)
    assert torch.autograd.gradcheck(lambda x: op(x).y, x)
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(lambda x: op(x).y.sum()))(x.detach()), grads(lambda x: op(x).y, x)[0]
    )
    with pytest.raises(pk.UnsupportedError, match="pair: pair_vjp takes no cotangent of norm; detach norm"):
        op(x).norm.sum().backward()


def test_a_cotangent_that_must_be_there_is_zeros(pair):
    x = f64(2, 3)
    y, norm = pair()(x)
    assert norm.requires_grad and torch.autograd.grad(y, x, torch.zeros_like(y))[0].count_nonzero() == 0


def test_what_has_no_gradient_is_refused_at_the_call(pair):
    op, x, shift = pair(), f64(2, 3), f64(3)
    with pytest.raises(
        pk.UnsupportedError,
        match=(
            r"pair: shift requires grad, and .*no gradient with respect to shift, only to x; .* pass "
            r"shift.detach\(\)"
        ),
    ):
        op(x.detach(), shift)
    with pytest.raises(pk.UnsupportedError, match=r"pair: shift requires grad, and .*; .* pass shift.detach\(\)"):
        op(x, shift)
    op(x, shift.detach())
    with torch.no_grad():
        op(x, shift)


def test_a_backend_without_the_gradient_is_refused_at_the_call(pair):
    op = pair(vjp=False)
    op(f64(2, 3, grad=False))
    with pytest.raises(
        pk.UnsupportedError,
        match="pair: x requires grad, and pair_vjp on cpu: backend 'own' cannot: it has no pair_vjp",
    ):
        op(f64(2, 3))


def test_an_op_without_a_gradient_is_refused_at_the_call_and_may_be_mapped():
    @spec(tiling={}, flops=flops)
    def double(x: Float[A, "*batch n"]) -> DoubleOut:
        """2 x."""

    backend = pk.Backend("own", framework="torch")
    backend.implements("double")(lambda call, tiling: (call.arrays["x"] * 2,))
    op = pk.op(double, backend=backend)
    with pytest.raises(
        pk.UnsupportedError,
        match="double: x requires grad, and double has no gradient; cut the graph before its inputs",
    ):
        op(f64(2, 3))
    with pytest.raises(pk.UnsupportedError, match="double: x requires grad"):
        torch.func.grad(lambda x: op(x).sum())(f64(2, 3, grad=False))
    x = f64(2, 3, grad=False)
    torch.testing.assert_close(torch.func.vmap(op)(x), 2 * x)


def test_a_vjp_that_gives_every_gradient_its_name():
    for name in pk.ops():
        found = registry.find_spec(name)
        if found.vjp:
            wired = wiring(found)
            given = {*wired.gradients.values()} - {*wired.vjp.passes.values()}
            assert given == {o.name for o in wired.vjp.outputs}


def test_a_cotangent_that_is_a_gradient_is_passed_on_without_a_copy_and_without_a_call():
    x, weight, residual = f64(3, 4), f64(5, 4), f64(3, 5)
    d_y = torch.ones(3, 5, dtype=torch.float64)
    linear = pk.op("linear", backend="reference")
    for _ in range(3):  # the first call of a form, and those after it
        y = linear(x.detach(), weight.detach(), None, residual, activation="silu")
        found = []
        assert not served(lambda y=y, found=found: found.extend(torch.autograd.grad(y, residual, d_y)))
        found += torch.autograd.grad(linear(x, weight, None, residual, activation="silu"), (residual, x), d_y)
        assert found[0].data_ptr() == found[1].data_ptr() == d_y.data_ptr() and found[2].shape == x.shape


def test_what_is_saved_hangs_on_options():
    x, weight = f64(3, 4), f64(5, 4)
    wants = {
        activation: served(lambda a=activation: pk.op("linear", backend="reference")(x, weight, activation=a))[0][1]
        for activation in ("none", "gelu")
    }
    assert wants == {"none": ("y",), "gelu": ("y", "pre")}
    with pytest.raises(pk.SpecError, match="linear_vjp: pre is read where there is an activation: pass it then"):
        pk.op("linear_vjp")(x.detach(), weight.detach(), f64(3, 5).detach(), activation="gelu")


@pytest.mark.parametrize("passes", [{"c": "d_y"}, {"b": "d_z"}, {"b": "y"}])
def test_a_gradient_that_is_no_cotangent_is_refused(passes, monkeypatch):
    @spec(tiling={}, flops=flops, vjp="sum_vjp")
    def sum(a: Float[A, "*batch n"], b: Float[A, "*batch n"]) -> DoubleOut:
        """y = a + b."""

    @spec(tiling={}, flops=flops, passes=passes)
    def sum_vjp(d_y: Float[A, "*batch n"]) -> SumVjpOut:
        """d_a = d_y."""

    monkeypatch.setattr(registry, "find_spec", lambda name: sum_vjp)
    wiring.cache_clear()
    with pytest.raises(pk.SpecError, match="sum_vjp: passes declares .* as the gradient of .; expected an input of"):
        wiring(sum)


def test_an_argument_that_is_always_there_cannot_be_read_now_and_then():
    with pytest.raises(pk.SpecError, match="reads names d_y; expected an optional array argument"):

        @spec(tiling={}, flops=flops, reads={"d_y": When(lambda options: True, "always")})
        def sum_vjp(d_y: Float[A, "*batch n"]) -> SumVjpOut:
            """d_a = d_y."""


@pytest.mark.parametrize("also", [{"d_y": ["b"]}, {"d_a": ["c"]}, {"y": ["b"]}])
def test_a_shared_gradient_that_is_none_or_of_no_input_is_refused(also, monkeypatch):
    @spec(tiling={}, flops=flops, vjp="sum_vjp")
    def sum(a: Float[A, "*batch n"], b: Float[A, "*batch n"]) -> DoubleOut:
        """y = a + b."""

    def of_sum(also):
        @spec(tiling={}, flops=flops, also=also)
        def sum_vjp(d_y: Float[A, "*batch n"]) -> SumVjpOut:
            """d_a = d_y, and so is the gradient of b."""

        monkeypatch.setattr(registry, "find_spec", lambda name: sum_vjp)
        wiring.cache_clear()
        return wiring(sum)

    assert of_sum({"d_a": ["b"]}).gradients == {"a": "d_a", "b": "d_a"}
    ((output, others),) = also.items()
    words = (
        f"sum_vjp: also declares {output} as the gradient of {others[0]} too; expected a gradient among its outputs, "
    )
    with pytest.raises(pk.SpecError, match=words + "and inputs of sum: a, b"):
        of_sum(also)


def test_numpy_and_jax_arrays_pay_nothing_for_it():
    x = np.ones((2, 3), np.float32)
    with torch.autocast("cpu"), torch.utils._python_dispatch.TorchDispatchMode():
        assert isinstance(pk.op("softmax")(x), np.ndarray)
