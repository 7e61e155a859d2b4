"""portakern.torch against PyTorch's own functions, on hand-made calls and on PyTorch's own sample inputs."""

import inspect
from collections import Counter

import numpy as np
import pytest

import portakern as pk
from portakern.core import registry
from portakern.core.framework import frameworks
from tests.ops import forward_records

torch = pytest.importorskip("torch", reason="torch is not installed")
import torch.nn.functional as F  # noqa: E402

import portakern.torch as twin  # noqa: E402

ALL_TWINS = [r.twin for r in forward_records() if r.twin]
TWINS = [own for own in ALL_TWINS if own.sampled]
every_twin = pytest.mark.parametrize(
    "own",
    [
        pytest.param(
            own,
            id=own.name,
            marks=pytest.mark.skipif(
                not (hasattr(F, own.name) or hasattr(torch, own.name)),
                reason=f"{own.name} is compared with PyTorch's own, and torch {torch.__version__} is older than that",
            ),
        )
        for own in TWINS
    ],
)


def test_every_function_has_its_record():
    assert {own.name for own in ALL_TWINS} == set(frameworks()["torch"].twins)


def samples(own):
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if info.name == own.sampled:
            for i, sample in enumerate(info.sample_inputs("cpu", torch.float32, requires_grad=True)):
                yield info, i, sample


def run(f, sample):
    """The result and the gradients of everything that requires one."""
    tensors = [
        x
        for x in (sample.input, *sample.args, *sample.kwargs.values())
        if isinstance(x, torch.Tensor) and x.requires_grad
    ]
    out = f(sample.input, *sample.args, **sample.kwargs)
    grads = (
        torch.autograd.grad(
            out, tensors, torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape), allow_unused=True
        )
        if tensors
        else ()
    )
    return [out, *(g for g in grads if g is not None)]


@every_twin
def test_pytorchs_own_samples_run_and_are_right_or_refused_for_a_known_reason(own):
    pytest.importorskip("expecttest", reason="expecttest is not installed, which PyTorch's samples import")
    ran, refused = 0, Counter()
    for info, i, sample in samples(own):
        try:
            got = run(getattr(twin, own.name), sample)
        except (pk.SpecError, pk.UnsupportedError) as e:
            reason = next((r for r in own.refusals if r in str(e)), None)
            assert reason, f"{info.name} {info.variant_test_name} sample {i}: {e}"
            refused[own.refusals[reason]] += 1
            continue
        exact = run(
            info.op,
            sample.transform(
                lambda x: (
                    x.detach().double().requires_grad_(x.requires_grad)
                    if isinstance(x, torch.Tensor) and x.is_floating_point()
                    else x
                )
            ),
        )
        for a, b, e in zip(got, run(info.op, sample), exact, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape, (info.name, i)
            torch.testing.assert_close(
                a.double(), e.double(), rtol=1e-5, atol=1e-5, msg=lambda m, i=i: f"{own.sampled} sample {i}: {m}"
            )
        ran += 1
    assert set(refused) == set(own.refusals.values()), "a refusal that no sample meets, or none of these"
    assert ran >= (own.least if own.least > 1 else own.least * (ran + refused.total())) > 0, (ran, refused)


SHAPES = [
    ((2, 3, 5, 8), (2, 3, 7, 8)),
    ((2, 3, 7, 8), (2, 3, 5, 8)),
    ((3, 5, 8), (3, 5, 8)),
    ((5, 8), (6, 8)),
    ((1, 3, 5, 8), (2, 1, 7, 8)),
    ((2, 2, 3, 4, 8), (2, 2, 3, 4, 8)),
]


@pytest.mark.parametrize("backend", ["reference", "triton", "pallas"])
@pytest.mark.parametrize("q_shape, k_shape", SHAPES)
def test_attention(q_shape, k_shape, backend):
    torch.manual_seed(0)
    q, k, v = torch.randn(q_shape), torch.randn(k_shape), torch.randn(k_shape)
    lead = torch.broadcast_shapes(q_shape[:-2], k_shape[:-2])
    full = (*lead, q_shape[-2], k_shape[-2])
    masks = [
        None,
        torch.rand(full[-2:]) < 0.7,
        torch.rand(full) < 0.5,
        torch.randn(*full[:-2], 1, full[-1]),
        torch.randn(full[-2], 1),
    ]
    for given in [{"is_causal": True}, {"scale": 0.2}, *({"attn_mask": m} for m in masks)]:
        torch.testing.assert_close(
            twin.scaled_dot_product_attention(q, k, v, **given, backend=backend),
            F.scaled_dot_product_attention(q, k, v, **given),
            rtol=2e-5,
            atol=2e-5,
        )


def test_grouped_heads_and_gradients_of_a_mask():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 5, 8, requires_grad=True) for h in (6, 2, 2))
    mask = torch.randn(6, 5, 5, requires_grad=True)
    results = []
    for f in (twin.scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = f(q, k, v, attn_mask=mask, enable_gqa=True)
        results.append([out, *torch.autograd.grad(out.sin().sum(), (q, k, v, mask))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_a_causal_bias_is_what_it_says_and_not_what_its_memory_holds(variant, lengths):
    torch.manual_seed(0)
    make = getattr(torch.nn.attention.bias, variant)
    q, k, v = (torch.randn(2, 2, n, 8) for n in (lengths[0], lengths[1], lengths[1]))
    mask = make(*lengths)._materialize()
    want = F.scaled_dot_product_attention(q, k, v, mask).nan_to_num(0.0)  # a row that sees nothing is zeros
    for got in (
        twin.scaled_dot_product_attention(q, k, v, make(*lengths)),
        twin.scaled_dot_product_attention(q, k, v, attn_mask=make(*lengths)),
    ):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    with twin.swapped():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, make(*lengths)), want, rtol=2e-5, atol=2e-5)
    with pytest.raises(pk.SpecError, match=r"CausalBias of shape \(7, 7\); expected"):
        twin.scaled_dot_product_attention(q, k, v, make(7, 7))


def test_a_subclass_is_taken_by_what_it_changes():
    class Named(torch.Tensor):
        """Changes nothing."""

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs)

    x = torch.randn(2, 3)
    want = torch.softmax(x, -1)
    for array in (x.as_subclass(Named), torch.nn.Parameter(x), torch.nn.Buffer(x)):
        torch.testing.assert_close(pk.op("softmax")(array).as_subclass(torch.Tensor), want)
    for call in (
        lambda: pk.op("softmax")(x.as_subclass(Loud)),
        lambda: twin.softmax(x.as_subclass(Loud), -1),
        lambda: twin.scaled_dot_product_attention(x, x, x, torch.ones(2, 2).as_subclass(Loud)),
        lambda: pk.op("attention")(*[x[:, None, None]] * 3, torch.zeros(2, 1, 1, 1).as_subclass(Loud)),
    ):
        with pytest.raises(pk.UnsupportedError, match=r"is a Loud, .*pass .as_subclass\(torch.Tensor\)"):
            call()


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_attention_of_nothing_is_empty_and_has_gradients(shape):
    batch, heads, length, width = shape
    q = torch.randn(batch, heads, length, 5, requires_grad=True)
    k, v = torch.randn(batch, heads, 6, 5), torch.randn(batch, heads, 6, width)
    for mask in (
        None,
        torch.ones(length, 6, dtype=torch.bool),
        torch.ones(batch, 1, length, 6, dtype=torch.bool),
        torch.zeros(batch, heads, 1, 6),
    ):
        got, want = (f(q, k, v, mask) for f in (twin.scaled_dot_product_attention, F.scaled_dot_product_attention))
        assert got.shape == want.shape and got.dtype == want.dtype
        assert torch.equal(torch.autograd.grad(got.sum(), q)[0], torch.zeros_like(q))


def test_attention_over_no_keys_is_zeros_whatever_the_mask():
    q, k, v = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 0, 4), torch.randn(2, 2, 0, 5)
    for mask in (None, torch.ones(3, 0, dtype=torch.bool), torch.zeros(2, 1, 1, 0)):
        assert torch.equal(twin.scaled_dot_product_attention(q, k, v, mask), torch.zeros(2, 2, 3, 5))


def test_a_row_that_no_mask_lets_see_is_zeros():
    q = torch.randn(1, 1, 3, 8)
    mask = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    out = twin.scaled_dot_product_attention(q, q, q, mask)
    assert not out[0, 0, 1].any() and out.isfinite().all()


def test_refusals_name_the_argument():
    q, at = torch.randn(1, 2, 3, 8), torch.arange(3)
    for message, call in {
        "dropout_p is 0.1; expected 0.0": lambda: twin.scaled_dot_product_attention(q, q, q, dropout_p=0.1),
        "exclude each other": lambda: twin.scaled_dot_product_attention(
            q, q, q, torch.ones(3, 3, dtype=torch.bool), is_causal=True
        ),
        "attn_mask is torch.int64; expected torch.bool, True where a pair takes part": lambda: (
            twin.scaled_dot_product_attention(q, q, q, torch.ones(3, 3, dtype=torch.int64))
        ),
        "attn_mask is a list; expected a tensor": lambda: twin.scaled_dot_product_attention(q, q, q, [[True] * 3] * 3),
        r"attn_mask has shape \(4, 3\)": lambda: twin.scaled_dot_product_attention(q, q, q, torch.ones(4, 3)),
        "or enable_gqa=True": lambda: twin.scaled_dot_product_attention(torch.randn(1, 4, 3, 8), q, q),
        "to divide query's": lambda: twin.scaled_dot_product_attention(torch.randn(1, 3, 3, 8), q, q, enable_gqa=True),
        "query has shape": lambda: twin.scaled_dot_product_attention(q[0, 0, 0], q, q),
        "dim is None": lambda: twin.softmax(q),
        "expected the last axes of input": lambda: twin.layer_norm(q, [9]),
        "weight has shape": lambda: twin.layer_norm(q, [8], torch.ones(7)),
        "rms_norm: weight has shape": lambda: twin.rms_norm(q, [8], torch.ones(7)),
        "size_average is given; .*, or pass reduction": lambda: twin.cross_entropy(q[0, 0], at, None, True),
        "reduce is given": lambda: twin.cross_entropy(q[0, 0], at, reduce=False),
        "reduction is 'max'; expected": lambda: twin.cross_entropy(q[0, 0], at, reduction="max"),
        r"target has shape \(2,\) and input \(3, 8\)": lambda: twin.cross_entropy(q[0, 0], at[:2]),
        r"target has shape \(3,\) and input \(\)": lambda: twin.cross_entropy(q[0, 0, 0, 0], at),
        "input is a number": lambda: twin.matmul(torch.tensor(1.0), q),
        "out is torch.float32": lambda: twin.matmul(q, q.mT, out=torch.empty(2)),
    }.items():
        with pytest.raises((pk.SpecError, pk.UnsupportedError), match=message):
            call()


def test_matmul_writes_to_out():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    out = torch.empty(3, 5)
    assert twin.matmul(a, b, out=out) is out
    torch.testing.assert_close(out, a @ b)


@every_twin
def test_signatures_are_those_of_torch(own):
    theirs, mine = (
        getattr(F, own.name, None) or getattr(torch, own.name),
        list(inspect.signature(getattr(twin, own.name)).parameters),
    )
    of_torch, further = mine[: -1 - len(own.further)], (*own.further, "backend")
    assert tuple(mine[len(of_torch) :]) == further
    try:
        assert of_torch == list(inspect.signature(theirs).parameters)
    except ValueError:  # a function of C has its documentation alone
        assert all(name in theirs.__doc__ for name in of_torch)


def test_what_a_loss_keeps_changes_its_memory_and_not_its_gradients():
    """The logits' gradient is kept where the limit has room for it, and the backward pass reads what was kept."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    target, found, sizes = torch.randint(0, 7, (9,)), {}, {}
    for keep, limit in ((False, 9 * 7 * 4 - 1), (True, 9 * 7 * 4)):
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            loss = twin.linear_cross_entropy(hidden, weight, target, memory_limit=limit, backend="reference")
        found[keep], sizes[keep] = torch.autograd.grad(loss, (hidden, weight)), {tuple(x.shape) for x in saved}
    assert (9, 7) in sizes[True] and (9, 7) not in sizes[False]
    for mine, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(mine, other)
    with pytest.raises(pk.SpecError, match="memory_limit is -1; expected a number of bytes"):
        twin.linear_cross_entropy(hidden, weight, target, memory_limit=-1, backend="reference")


def test_rms_norm_without_eps_takes_that_of_the_dtype_it_computes_in():
    for dtype, eps in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ):
        x = torch.full((2, 8), 1e-3, dtype=dtype)
        torch.testing.assert_close(
            twin.rms_norm(x, [8], backend="reference"), F.rms_norm(x, [8], eps=torch.finfo(eps).eps)
        )


@pytest.mark.parametrize("backend", ["reference", "triton", "pallas"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_and_its_gradient_are_as_pytorchs_of_ignored_rows_and_of_none(backend, dtype):
    torch.manual_seed(0)
    for reduction in ("none", "mean", "sum"):
        for ignored in (torch.tensor([False, True, False]), torch.ones(3, dtype=torch.bool)):
            x = torch.randn(3, 7).to(dtype).requires_grad_()
            target, results = torch.randint(0, 7, (3,)).masked_fill(ignored, -1), []
            for f, more in ((F.cross_entropy, {}), (twin.cross_entropy, {"backend": backend})):
                loss = f(x, target, ignore_index=-1, reduction=reduction, label_smoothing=0.1, **more)
                results.append([loss, *torch.autograd.grad(loss.sum(), x)])
            want, got = results
            assert got[0].dtype == want[0].dtype == dtype
            near = 2**-6 if dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(got, want, rtol=near, atol=near, equal_nan=True)


def test_targets_of_bytes_and_losses_of_no_rows_are_as_pytorchs():
    x, target = torch.randn(3, 7), torch.tensor([1, 6, 0], dtype=torch.uint8)
    torch.testing.assert_close(twin.cross_entropy(x, target), F.cross_entropy(x, target.long()))
    for reduction, want in (("none", torch.empty(0)), ("sum", torch.tensor(0.0)), ("mean", torch.tensor(torch.nan))):
        got = twin.cross_entropy(x[:0], target[:0], reduction=reduction)
        torch.testing.assert_close(got, want, equal_nan=True)


def test_a_module_swapped_runs_on_rmsnorm():
    norm, x, served = torch.nn.RMSNorm((2, 8)), torch.randn(3, 2, 8), []
    want = norm(x), torch.rms_norm(x, (8,))
    with pk.observe(lambda s: served.append(s.call.spec.name)), twin.swapped():
        got = norm(x), torch.rms_norm(x, (8,))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert served == ["rmsnorm", "rmsnorm"]


ENCODER = ("layer_norm", "scaled_dot_product_attention")  # what an encoder layer of PyTorch calls by these names


def model():
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("backend", [None, "triton"])
def test_a_model_swapped_runs_on_portakern(backend):
    layer, x = model(), torch.randn(2, 6, 16)
    want = layer(x)
    served = []
    with pk.observe(lambda s: served.append(s.call.spec.name)), twin.swapped(backend=backend):
        got = layer(x)
        (got**2).sum().backward()
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    forward = {r.op for r in forward_records() if r.twin and r.twin.name in ENCODER}
    assert len(forward) == len(ENCODER) and forward | {registry.find_spec(name).vjp for name in forward} <= set(served)
    mine = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    (layer(x) ** 2).sum().backward()
    for a, p in zip(mine, layer.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-4)


def test_what_portakern_refuses_raises_unless_torch_may_serve_it(caplog):
    ids = torch.arange(6).reshape(2, 3)
    with twin.swapped(), pytest.raises(pk.SpecError, match="int64"):
        torch.matmul(ids, ids.T)
    with twin.swapped(otherwise="torch"):
        assert (ids @ ids.T).dtype == torch.int64
        ids @ ids.T
    assert sum("PyTorch serves a swapped call" in r.message for r in caplog.records) == 1
    np.testing.assert_array_equal(ids @ ids.T, ids.numpy() @ ids.numpy().T)
