"""portakern.torch.swapped: what it takes, where it holds, and what it tells of itself."""

import contextlib
import math
import threading

import pytest

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")
import torch.nn.functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from portakern.torch import swapped  # noqa: E402


def serving(served):
    return pk.observe(lambda s: served.append(s.call.spec.name))


def tensors(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


TAKEN = {  # the op that serves a call, and the call -> the shapes of its tensors
    "matmul: F.linear(a, b, c)": [(2, 3, 4), (5, 4), (5,)],
    "matmul: F.linear(a, b)": [(4,), (5, 4)],
    "matmul: F.linear(a, b)  # a number a row": [(3, 4), (4,)],
    "matmul: torch.mm(a, b)": [(3, 4), (4, 5)],
    "matmul: a.mm(b)": [(3, 4), (4, 5)],
    "matmul: torch.bmm(a, b)": [(2, 3, 4), (2, 4, 5)],
    "matmul: a.bmm(mat2=b)": [(2, 3, 4), (2, 4, 5)],
    "matmul: torch.addmm(c, a, b, beta=0.5, alpha=2)": [(3, 4), (4, 5), (5,)],
    "matmul: c.addmm(a, b)": [(3, 4), (4, 5), (3, 5)],
    "matmul: torch.baddbmm(c, a, b, alpha=0.25)": [(2, 3, 4), (2, 4, 5), (2, 1, 5)],
    "matmul: c.baddbmm(a, b)": [(2, 3, 4), (2, 4, 5), (2, 3, 5)],
    "matmul: torch.linalg.matmul(a, b)": [(2, 3, 4), (4, 5)],
    "matmul: torch.matmul(a, b)": [(2, 3, 4), (4,)],
    "matmul: torch.einsum('bhqd,bhkd->bhqk', a, b)": [(2, 3, 4, 5), (2, 3, 6, 5)],
    "matmul: torch.einsum('qhd, khd -> hqk', [a, b])": [(4, 3, 5), (6, 3, 5)],
    "matmul: torch.einsum('...ij,...jk', a, b)": [(2, 1, 3, 4), (5, 4, 6)],
    "matmul: torch.einsum(a, [0, 1], b, [2, 1], [2, 0])": [(3, 4), (5, 4)],
    "matmul: torch.einsum('ab,ab', a, b)": [(3, 4), (3, 4)],
    "matmul: torch.einsum('xay,yb...x->ab...', a, b)": [(2, 3, 4), (4, 5, 6, 2)],
    "grouped_matmul: F.grouped_mm(a, b.mT, offs=torch.tensor([1, 1, 3], dtype=torch.int32))": [(3, 4), (3, 8, 4)],
    "softmax: torch.softmax(a, -1)": [(3, 4)],
    "softmax: torch.softmax(a, axis=0)": [(3, 4)],
    "softmax: torch.softmax(a, 0, torch.float64)": [(3, 4)],
    "softmax: torch.special.softmax(a, dim=1, dtype=torch.float64)": [(3, 4)],
    "softmax: F.softmin(a, dim=1)": [(3, 4)],
    "logsumexp: torch.logsumexp(a, -1)": [(3, 4)],
    "logsumexp: torch.special.logsumexp(a, axis=0, keepdim=True)": [(3, 4)],
    "logsumexp: a.logsumexp((0, -1), True)": [(3, 4, 2)],
    "softmax: torch.nn.Softmin(0)(a)": [(3, 4)],
    "cross_entropy: F.cross_entropy(a, a.argmax(-1), label_smoothing=0.1)": [(3, 4)],
    "cross_entropy: F.cross_entropy(a, a.argmax(1), None, ignore_index=1, reduction='sum')": [(3, 4, 2)],
    "cross_entropy: torch.nn.CrossEntropyLoss(reduction='none')(a, a.argmin())": [(4,)],
    "linear_cross_entropy: F.linear_cross_entropy(a, b, a.argmax(-1), label_smoothing=0.1)": [(3, 4), (5, 4)],
    "linear_cross_entropy: F.linear_cross_entropy(a, b, a.argmax(-1), ignore_index=1, reduction='none')": [
        (3, 4),
        (5, 4),
    ],
    "embedding: F.embedding(torch.tensor([[2, 0], [2, 1]]), a)": [(3, 4)],
    "embedding: F.embedding(torch.tensor([2, 0, 2]), a, padding_idx=-3)": [(3, 4)],
    "rmsnorm: torch.rms_norm(a, (4,), b)": [(3, 4), (4,)],
    "layernorm: torch.layer_norm(a, (4,), b, b, 1e-5, False)": [(3, 4), (4,)],
}


@pytest.mark.parametrize("call", TAKEN)
def test_a_function_is_taken_with_its_gradients(call):
    shapes, results = TAKEN[call], []
    op, _, call = call.partition(": ")
    for context in (None, swapped()):
        given = tensors(*shapes)
        names = {"torch": torch, "F": F, **dict(zip("abc", given, strict=False))}
        served = []
        if context is None:
            out = eval(call, names)
        else:
            with serving(served), context:
                out = eval(call, names)
            assert served == [op]
        assert out.is_contiguous() or "einsum" in call
        results.append([out, *torch.autograd.grad(out.sin().sum(), given)])
    for got, want in zip(*reversed(results), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "call", ["F.linear(a, b.mT, c)", "torch.addmm(c, a, b)", "torch.baddbmm(c, a[None], b[None])[0]"]
)
def test_a_16_bit_product_and_what_is_added_round_once(call):
    a, b = tensors((3, 64), (64, 5), dtype=torch.bfloat16)
    with torch.no_grad():
        c = -(a @ b)[0].clone()  # the first row cancels but for what its rounding left
        with swapped():
            got = eval(call, {"torch": torch, "F": F, "a": a, "b": b, "c": c})
        want = (a.double() @ b.double() + c.double()).bfloat16()
    torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-5)
    assert got[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_is_pytorchs(dtype):
    a, b, c = (x.detach() for x in tensors((2, 3, 4), (2, 4, 5), (2, 3, 5), dtype=dtype))
    results = []
    for context in (torch.no_grad(), swapped()):
        with torch.autocast("cpu", dtype=torch.bfloat16), context:
            results.append(
                [
                    a @ b,
                    F.linear(a, b[0].mT, c[0, 0]),
                    torch.addmm(c[0], a[0], b[0]),
                    torch.bmm(a, b),
                    torch.einsum("bij,bjk->bik", a, b),
                    F.scaled_dot_product_attention(a, a, a, c[:, :, :3]),
                    F.scaled_dot_product_attention(a[:0], a[:0], a[:0]),
                    torch.softmax(a, -1),
                    torch.softmax(a, -1, dtype=torch.bfloat16),
                    F.softmin(a, -1),
                    torch.logsumexp(a, -1),
                    F.cross_entropy(a, c.argmax(1)[:, :4]),
                    F.cross_entropy(a, c.argmax(1)[:, :4], reduction="none"),
                    F.layer_norm(a, (4,)),
                    F.rms_norm(a, (4,)),
                ]
            )
    for want, got in zip(*results, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)


def test_functions_of_pytorchs_write_to_out():
    a, b, served = torch.randn(3, 4), torch.randn(4, 5), []
    for f, given in (
        (torch.mm, (a, b)),
        (torch.bmm, (a[None], b[None])),
        (torch.addmm, (torch.ones(5), a, b)),
        (torch.softmax, (a, -1)),
        (torch.logsumexp, (a, 0)),
    ):
        want = f(*given)
        out = torch.empty_like(want)
        with serving(served), swapped():
            assert f(*given, out=out) is out
        torch.testing.assert_close(out, want)
    assert " ".join(served) == "matmul matmul matmul softmax logsumexp"


def test_out_without_elements_is_given_its_shape():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    for f, given in ((torch.mm, (a, b)), (torch.bmm, (a[None], b[None])), (torch.addmm, (torch.ones(5), a, b)),
                     (torch.matmul, (a, b)), (torch.softmax, (a, -1)), (torch.logsumexp, (a, 0))):  # fmt: skip
        out = torch.empty(0)
        with swapped(backend="reference"):
            assert f(*given, out=out) is out
        torch.testing.assert_close(out, f(*given))
    freed = torch.empty(3, 5)
    freed.untyped_storage().resize_(0)
    for out, words in (
        (torch.empty(2, 2), r"mm: out is torch.float32 \(2, 2\) on cpu; expected torch.float32 \(3, 5\) on cpu"),
        (torch.empty(0, dtype=torch.float64), r"mm: out is torch.float64 \(0,\)"),
        (torch.empty(3, 5, device="meta"), r"mm: out is torch.float32 \(3, 5\) on meta; expected .* on cpu"),
        (freed, "mm: out needs 60 bytes and its storage holds 0"),
    ):
        with swapped(backend="reference"), pytest.raises(pk.SpecError, match=words):
            torch.mm(a, b, out=out)


SMALL = {
    "F.linear(a, b)": "3,4 5,4; 4 4; 4 5,4; 2,3,4 4; 2,3,1 5,1; 1 1; 0,4 5,4; 3,0 5,0",
    "a @ b": "3,4 4,5; 4 4; 3,1 1,5; 4 4,2; 2,3,4 4; 1 1; 3,0 0,5",
    "torch.mm(a, b)": "3,1 1,5; 3,0 0,5",
    "torch.bmm(a, b)": "2,3,4 2,4,5; 2,3,1 2,1,5; 0,3,4 0,4,5",
    "torch.einsum('ij,jk', a, b)": "3,4 4,5; 3,1 1,5; 3,1 4,5; 3,0 0,5",
    "torch.einsum('ijm,jmk->ik', a, b)": "3,4,1 4,1,5; 3,1,1 1,1,5; 3,1,2 4,1,5; 3,4,2 4,1,5",
    "torch.einsum('bij,bjk->bik', a, b)": "2,3,1 2,1,5; 2,3,4 2,4,5; 1,3,4 2,4,5",
    "torch.einsum('i,i', a, b)": "4 4; 1 1; 1 4",
    "torch.addmm(c, a, b)": "3,4 4,5; 3,1 1,5; 3,0 0,5",
    "torch.addmm(c, a, b, beta=0)": "3,4 4,5; 3,1 1,5; 3,0 0,5",
    "torch.addmm(c[0], a, b, beta=0)": "3,4 4,5",
    "torch.addmm(c * math.nan, a, b, beta=0)": "3,4 4,5",
    "torch.addmm(c, a, b, alpha=0)": "3,4 4,5",
    "torch.addmm(c, a, b, alpha=0, beta=0)": "3,4 4,5",
    "torch.addmm(c, a, b, alpha=2, beta=0)": "3,4 4,5",
    "c.addmm(a, b, beta=0, alpha=0.5)": "3,4 4,5",
    "torch.baddbmm(c[None], a[None], b[None], beta=0)": "3,4 4,5",
    "torch.baddbmm(c[None], a[None], b[None], alpha=0)": "3,4 4,5",
}


@pytest.mark.parametrize("call", SMALL)
@pytest.mark.parametrize("cast", [False, True], ids=["as they come", "autocast"])
def test_products_of_few_elements_have_pytorchs_shapes_dtypes_and_gradients(call, cast):
    names = {"torch": torch, "F": F, "math": math}
    for shapes in SMALL[call].split(";"):
        forms = [[int(n) for n in shape.split(",")] for shape in shapes.split()]
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            values = [torch.randn(shape).to(dtype) for shape in [*forms, (3, 5)]]
            found = []
            for served in (False, True):
                given = [x.clone().requires_grad_() for x in values]
                with (
                    torch.autocast("cpu", torch.bfloat16, enabled=cast),
                    swapped(backend="reference") if served else contextlib.nullcontext(),
                ):
                    y = eval(call, names | dict(zip("abc", given, strict=True)))
                found.append((y, *torch.autograd.grad(y.double().sum(), given, allow_unused=True)))
            for theirs, ours in zip(*found, strict=True):
                assert (ours is None) == (theirs is None), (shapes, dtype)
                if ours is not None:
                    assert ours.dtype == theirs.dtype, (shapes, dtype)
                    torch.testing.assert_close(ours, theirs, rtol=2**-5, atol=2**-5, equal_nan=True)


def test_products_in_other_words_are_refused_as_pytorch_refuses_them():
    a = torch.randn(2, 3, 4)
    for call, words in {
        "torch.mm(a, a)": r"mm: input has shape \(2, 3, 4\).*torch.matmul broadcasts",
        "torch.bmm(a[:1], a.mT)": r"bmm: input has shape \(1, 3, 4\)",
        "torch.addmm(a, a[0], a[0].T)": r"addmm: input has shape \(2, 3, 4\); expected one that broadcasts",
        "F.linear(a, a)": r"linear: input has shape .* and weight \(2, 3, 4\)",
        "F.linear(a, a[0], a[0])": r"linear: bias has shape \(3, 4\); expected \(3,\)",
        "F.linear(a, a[0], a[0, 0, :3].double())": "linear: bias is torch.float64; expected torch.float32",
        "torch.addmm(a[0], a[0], a[0, :, :3], out_dtype=torch.float32)": "'out_dtype'; expected arguments of PyTorch's",
    }.items():
        with swapped(), pytest.raises(pk.SpecError, match=words):
            eval(call, {"torch": torch, "F": F, "a": a})


def test_what_pytorchs_operator_would_lose_is_said():
    with swapped(), pytest.raises(ValueError, match=r"matmul: b axis -2 \(k\) is 2; expected 3") as caught:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert isinstance(caught.value.__cause__, pk.SpecError)


def test_arguments_that_a_twin_lacks_are_pytorchs_where_it_may_serve():
    x = torch.randn(2, 3)
    with swapped(otherwise="torch") as s, pytest.warns(UserWarning, match="deprecated"):
        got = torch.addmm(2, x, 1, x[:, :2], x)  # beta, input, alpha: the signature of old
    torch.testing.assert_close(got, 2 * x + x[:, :2] @ x)
    assert "too many positional arguments" in s.report()


def test_what_the_loss_does_not_take_is_refused_with_the_name_of_what_does():
    x, classes = torch.randn(2, 3), torch.tensor([1, 2])
    for given, words in {
        (x, x.softmax(-1)): "target is torch.float32, probabilities of classes; .* torch.nn.functional.cross_entropy",
        (x, classes, x[0]): "weight is given; expected None: call torch.nn.functional.cross_entropy",
    }.items():
        with swapped(), pytest.raises(pk.UnsupportedError, match=words):
            F.cross_entropy(*given)
        with swapped(otherwise="torch") as s:
            got = F.cross_entropy(*given)
        torch.testing.assert_close(got, F.cross_entropy(*given))
        assert "refused, PyTorch served them:\n  torch.nn.functional.cross_entropy 1: cross_entropy: " in s.report()


def test_einsum_that_is_no_product_is_pytorchs():
    a, b, served = torch.randn(3, 4), torch.randn(3, 4), []
    with serving(served), swapped() as s:
        for equation, operands in {
            "ij->ji": [a],
            "i,j->ij": [a[0], b[0]],
            "ij,ij->ij": [a, b],
            "ij,kl->kl": [a, b],
            "ij,kj,kj->i": [a, b, b],
            "ii,ij->j": [a[:, :3], b],
        }.items():
            with_mode = torch.einsum(equation, *operands)
            assert torch.isfinite(with_mode).all()
    assert served == [] and "sums over no index of both" in s.report() and "a diagonal" in s.report()


def test_code_of_pytorchs_calls_what_is_swapped():
    torch.manual_seed(0)
    attention, x, served = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8), []
    want = [attention(x, x, x, need_weights=needed)[0] for needed in (False, True)]
    with serving(served), swapped():
        got = [attention(x, x, x, need_weights=needed)[0] for needed in (False, True)]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert " ".join(served) == "matmul attention matmul" + " matmul matmul softmax matmul matmul"
    with serving(served), swapped():
        F.gumbel_softmax(x)  # by a method of x
    assert served[-1] == "softmax"


def test_functions_that_call_nothing_swapped_are_left_as_they_are():
    from portakern.frameworks.torch.swapping import _entered

    entered = {f.__name__ for f in vars(F).values() if callable(f) and _entered(f) is not None}
    assert {"multi_head_attention_forward", "gumbel_softmax"} <= entered and not entered & {"silu", "dropout", "gelu"}


class Twice(torch.autograd.Function):
    """softmax(x), whose backward calls PyTorch's functions too."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.softmax(x, -1)

    @staticmethod
    def backward(ctx, g):
        y = torch.softmax(ctx.saved_tensors[0], -1)
        return y * (g - (g * y).sum(-1, keepdim=True))


@pytest.mark.parametrize("how", ["method", "backward", "grad", "func"])
def test_it_holds_inside_backward(how):
    x, served = torch.randn(2, 3, requires_grad=True), []
    (want,) = torch.autograd.grad(x.softmax(-1).sin().sum(), x)
    with serving(served), swapped():
        if how == "func":
            got = torch.func.grad(lambda x: torch.softmax(x, -1).sin().sum())(x.detach())
        else:
            y = Twice.apply(x).sin().sum()
            if how == "grad":
                (got,) = torch.autograd.grad(y, x)
            else:
                torch.autograd.backward(y) if how == "backward" else y.backward()
                got = x.grad
    torch.testing.assert_close(got, want)
    assert served == ["softmax", "softmax_vjp" if how == "func" else "softmax"]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_a_checkpoint_is_recomputed_as_it_ran(reentrant, inside):
    norm, x, served = torch.nn.LayerNorm(8), torch.randn(2, 8, requires_grad=True), []
    (want,) = torch.autograd.grad(norm(x).sin().sum(), x)
    with serving(served):
        with swapped():
            y = checkpoint(norm, x, use_reentrant=reentrant).sin().sum()
            if inside:
                y.backward()
        if not inside:
            y.backward()
    torch.testing.assert_close(x.grad, want, rtol=1e-4, atol=1e-6)
    assert " ".join(served) == "layernorm layernorm layernorm_vjp"
    served.clear()
    with serving(served):
        checkpoint(norm, x, use_reentrant=reentrant).sum().backward()  # outside of any context it is PyTorch's, as ever
    assert served == []


def test_another_thread_calls_pytorchs_functions_until_it_enters_its_own():
    x, seen = torch.randn(2, 3), {}

    def work():
        served = []
        with serving(served):
            torch.softmax(x, -1)
            with swapped():
                torch.softmax(x, -1)
        seen["served"] = served

    with swapped():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen["served"] == ["softmax"]


def test_a_report_says_what_was_served_and_what_was_not_and_why():
    x, ids = torch.randn(2, 4, 4), torch.ones(2, 2, dtype=torch.int32)
    with swapped(otherwise="torch") as s:
        torch.softmax(x @ x, -1)
        x.softmax(-1)
        F.silu(F.linear(x, x[0])).exp().reshape(-1).cumsum(0)
        ids @ ids
        torch.einsum("i,j->ij", x[0, 0], x[0, 0])
    assert s.report().splitlines() == [
        "portakern served 4 calls",
        "  matmul 2: torch.Tensor.matmul 1, torch.nn.functional.linear 1",
        "  softmax 2: torch.softmax 1, torch.Tensor.softmax 1",
        "refused, PyTorch served them:",
        "  torch.Tensor.matmul 1: matmul: a is int32; expected one of float32, float16, bfloat16, float64: cast it",
        "not what an op computes, PyTorch served them:",
        "  torch.functional.einsum 1: einsum: 'i,j->ij' sums over no index of both operands",
        "not swapped, PyTorch's own: torch.Tensor.cumsum 1, elementwise functions 2",
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_what_torch_compile_traces_is_left_to_pytorch_too(dtype):
    x = torch.ones(3, 3, dtype=dtype)

    def product(x):
        return torch.softmax((x @ x).real.float(), -1)

    with swapped(otherwise="torch"):
        compiled = torch.compile(product, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), product(x))
    with swapped(), pytest.raises(Exception, match="expected one of float32, float16, bfloat16, float64: cast it"):
        torch.compile(lambda x: x @ x, backend="eager")(x)


def test_a_report_takes_no_more_memory_for_more_reasons(caplog):
    with swapped(otherwise="torch") as s:
        for n in range(1, 400):
            torch.einsum("ij->ji", torch.ones(1, n))
            try:
                torch.mm(torch.ones(1, n), torch.ones(n + 1, 1))
            except RuntimeError:  # PyTorch's own
                continue
    assert len(s.refused) == 257 and s.refused[None] == 143 and "  143 for more reasons" in s.report()
    assert sum("PyTorch serves" in r.message for r in caplog.records) == 256
    assert len(s.elsewhere) == 1


def test_a_refusal_of_a_tensor_without_values_is_the_ops():
    x = torch.empty(2, 3, device="meta")
    with swapped(), pytest.raises(pk.SpecError, match="a is on meta, where there are no values"):
        F.linear(x, x, x[:, 0])


# ------------------------------------------------------------------------------------------------- under torch.compile
def compiled(function, full=True):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=full)


def entered_inside(a, b):
    with swapped():
        return torch.softmax(a @ b, -1)


def entered_twice(a, b):
    with swapped("reference"):
        x = torch.softmax(a, -1)
        with swapped("reference", otherwise="torch"):
            return x @ b


GIVEN = swapped()


def given_from_outside(a, b):
    with GIVEN:
        return torch.softmax(a @ b, -1)


@pytest.mark.parametrize("function", [entered_inside, entered_twice, given_from_outside])
def test_a_context_inside_a_compiled_function_is_one_graph(function):
    results = []
    for call in (function, compiled(function)):
        served, given = [], tensors((3, 4), (4, 5))
        with serving(served):
            out = call(*given)
            results.append([out, *torch.autograd.grad(out.sin().sum(), given)])
        assert sorted(served) == ["matmul", "matmul_vjp", "softmax", "softmax_vjp"]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def refuses(a, b):
    with swapped():
        return F.cross_entropy(a, a.sigmoid())


def allows(a, b):
    with swapped(otherwise="torch"):
        return F.cross_entropy(a, a.sigmoid())


def test_what_is_refused_while_it_is_traced_is_told_in_portakerns_words(caplog):
    given = tensors((3, 4), (4, 5))
    with pytest.raises(Exception, match="cross_entropy: target is torch.float32, probabilities of classes"):
        compiled(refuses)(*given)
    torch.testing.assert_close(compiled(allows)(*given), F.cross_entropy(given[0], given[0].sigmoid()))
    assert "PyTorch serves a swapped call: cross_entropy: target" in caplog.text


HEADS = torch.nn.MultiheadAttention(4, 2)


def attends(a, b, **more):
    with swapped("reference", **more):
        return HEADS(a, a, a)[0]


def recomputes(a, b, **more):
    with swapped("reference", **more):
        return checkpoint(lambda a, b: torch.softmax(a @ b, -1), a, b, use_reentrant=False)


@pytest.mark.parametrize("function, name", [(attends, "multi_head_attention_forward"), (recomputes, "checkpoint")])
def test_what_a_compiler_passes_over_is_refused_or_served_outside_of_the_graph(function, name, caplog):
    given = tensors((3, 4), (4, 5))
    counts = []
    for call in (function, compiled(function, full=False)):
        served = []
        with serving(served):
            out = call(*given)
            out.sin().sum().backward()
        counts.append(sorted({*served}))
    torch.testing.assert_close(out, function(*given), rtol=1e-5, atol=1e-6)
    assert counts[0] == counts[1] and "softmax" in counts[0]
    with pytest.raises(Exception, match=f"{name}.*: torch.compile traces what it calls without swapped"):
        compiled(function)(*given)
    served = []
    with serving(served):
        compiled(function)(*given, otherwise="torch")
    assert not served and "torch.compile traces what it calls without swapped()" in caplog.text


def test_a_graph_that_breaks_inside_a_context_goes_on_with_it():
    def breaks(a, b):
        with swapped("reference"):
            x = HEADS(a, a, a)[0]
            torch._dynamo.graph_break()
            return torch.softmax(x @ b, -1)

    given = tensors((3, 4), (4, 5))
    torch.testing.assert_close(compiled(breaks, full=False)(*given), breaks(*given), rtol=1e-5, atol=1e-6)


def test_what_torch_compile_shows_to_no_context_is_pytorchs():
    """If this fails, torch.compile has learnt to: then take grouped_mm out of what docs/how-to/pytorch.md excepts."""
    offs, graphs = torch.tensor([1, 1, 3], dtype=torch.int32), []

    def kept(graph, inputs):
        graphs.append(graph.code)
        return graph

    a, b = torch.randn(3, 8).bfloat16(), torch.randn(3, 8, 16).bfloat16()
    with swapped():
        torch.compile(lambda a, b: F.grouped_mm(a, b, offs=offs), fullgraph=True, backend=kept)(a, b)
    assert len(graphs) == 1 and "torch._grouped_mm" in graphs[0]
