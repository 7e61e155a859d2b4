"""What is kept for calls of one form serves all of them, and no others."""

import gc
import importlib
import math
import threading
import weakref
from types import SimpleNamespace

import pytest

import portakern as pk
from portakern import testing
from portakern.core import cache, registry, tilings
from portakern.core.backend import Backend
from portakern.core.gradients import wiring
from portakern.core.signatures import option_key
from tests.ops import forward_records

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton.plan import LaunchPlan  # noqa: E402
from tests.ops.record import dtype_for  # noqa: E402

OPS = [op for op in pk.ops() if any(pk.backends()["triton"].families_with(op))]
SAMPLES = [(op, name) for op in OPS for name in testing.samples(op)]


def drawn(op, name, seed):
    """A sample's arguments: arrays of new values, and the options."""
    made = [
        testing.sample_arrays(op, name, dtype=dtype_for(op, "float32"), seed=s, framework="torch") for s in (0, seed)
    ]
    (first, options), (arrays, _) = made  # the dtype of integers is drawn too
    return {n: a.to(first[n].dtype).contiguous() for n, a in arrays.items()}, options


def made_anew(op):
    """The same op, for which nothing was decided yet."""
    return type(op)(op.spec, type(op.choice)(op.choice.backend))


def flat(result):
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


def is_planned(kept):
    """Whether calls are served by a launch plan, and not by the implementation."""
    return isinstance(getattr(kept.serve, "__self__", None), LaunchPlan)


def same_bits(actual, expected):
    return len(actual) == len(expected) and all(
        a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize(("op", "sample"), SAMPLES)
def test_later_calls_of_a_form_have_the_bits_of_a_first(op, sample):
    kept = pk.op(op, backend="triton")
    for seed in range(3):  # decided, learned, replayed
        arrays, options = drawn(op, sample, seed)
        cache.forget() if seed == 0 else None
        got = flat(kept(**arrays, **options))
        plans = dict(kept.choice.plans)
        assert same_bits(got, flat(made_anew(kept)(**arrays, **options))), (seed, plans)
    (plan,) = plans.values()
    assert is_planned(plan) or options  # along another axis rows may be gathered, which no plan knows


def test_one_array_given_thrice_teaches_nothing_wrong():
    op = pk.op("attention", backend="triton")
    q, k, v = (torch.randn(1, 5, 2, 4) for _ in range(3))
    for _ in range(2):
        op(q, q, q)
    assert torch.equal(op(q, k, v), made_anew(op)(q, k, v))
    a = torch.randn(2, 3, 3)
    product = pk.op("matmul", backend="triton")
    for _ in range(2):
        product(a, a[0])
    torch.testing.assert_close(product(a, a[1]), a @ a[1])


@pytest.mark.parametrize(
    "values", [(1, 1.0, True), (0.0, -0.0), (0, 0.0, False), ((5, None), (5.0, None)), ("a", None), ((1,), 1)]
)
def test_values_that_are_equal_are_not_one_form(values):
    assert len({option_key(v) for v in values}) == len(values)


def test_options_of_every_spelling_keep_their_meaning():
    op, q = pk.op("attention", backend="triton"), torch.randn(1, 4, 1, 4)
    causal = op(q, q, q, is_causal=True)
    for _ in range(3):
        assert torch.equal(op(q, q, q, is_causal=True), causal) and not torch.equal(op(q, q, q), causal)
        assert torch.equal(op(q, q, q, window=[None, 0]), causal)  # a list has no form, and is bound each time
        with pytest.raises(pk.SpecError, match="is_causal"):
            op(q, q, q, is_causal="yes")


def test_what_is_refused_is_refused_beside_kept_forms():
    op, x = pk.op("softmax", backend="triton"), torch.randn(4, 4)
    for _ in range(3):
        op(x)
    for bad, message in (
        (x.to_sparse(), "layout"),
        (x.to_mkldnn(), "layout"),
        (x.to("meta"), "meta"),
        (x.long(), "int64"),
        ([1.0], "list"),
    ):
        for _ in range(2):
            with pytest.raises(pk.SpecError, match=message):
                op(bad)
    with pytest.raises(pk.SpecError, match="axis"):
        op(x, axis=2)
    with pytest.raises(pk.SpecError, match="unexpected keyword argument 'axs'"):
        op(x, axs=0)
    with pytest.raises(pk.SpecError, match="missing"):
        op()


def test_parts_of_arrays_are_planned():
    """Rows in chunks, a ragged last one among them, and classes in chunks; of arrays that begin within others too."""
    loss = registry.find_spec("linear_cross_entropy")
    for spec, chunk in ((loss, "chunk_rows"), (registry.find_spec(loss.vjp), "chunk_n")):
        kept = pk.op(spec.name, backend="triton", tiling={chunk: 16})
        dims, options = {"batch": (40,), "n": (50,), "d": (24,)}, {} if spec.is_vjp else {"return_slope": True}
        cache.forget()
        for seed in range(4):
            rng = torch.Generator().manual_seed(seed)
            arrays = {}
            for a in spec.arrays:
                if not spec.reads_under(a.name, {}, True):
                    continue
                shape = [n for d in a.dims for n in dims[d.factors[0]]]
                x = torch.randn(8 + math.prod(shape), generator=rng)[8:].view(shape)
                arrays[a.name] = x.argsort(0) if a.name == "labels" else x
            got = flat(kept(**arrays, **options))
            assert same_bits(got, flat(made_anew(kept)(**arrays, **options))), (spec.name, seed)
        (plan,) = kept.choice.plans.values()
        assert is_planned(plan), spec.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize(
    "seen",
    [
        lambda x: x, lambda x: x[0, 0], lambda x: x[:, :-1], lambda x: x[:, 1:, ::2], lambda x: x.transpose(0, 1),
        lambda x: x.permute(2, 1, 0), lambda x: x[0].T, lambda x: x[:1, :1, :1].expand(3, 5, 700), lambda x: x[:, :0],
        lambda x: x[..., :1].expand(-1, -1, 9), lambda x: x.view(3, 5, 7, 100).permute(3, 1, 2, 0)[1:, :, ::2],
    ],
)  # fmt: skip
def test_a_copy_in_order_holds_the_numbers_of_what_was_seen(seen, dtype):
    copies = importlib.import_module("portakern.backends.triton.copies")
    x = seen(torch.arange(3 * 5 * 700).reshape(3, 5, 700).to(dtype))
    made = copies.in_order(SimpleNamespace(interpret=True), x)
    assert made.is_contiguous() and made.shape == x.shape and torch.equal(made, x)
    assert (made is x) == x.is_contiguous()


@pytest.mark.parametrize("turned", [False, True])
def test_losses_of_words_that_follow_are_planned(turned, monkeypatch):
    """hidden[:, :-1] and labels[:, 1:], of which no view has rows in one dimension; or both with words first."""
    plans, learned = importlib.import_module("portakern.backends.triton.plan"), []
    planned = plans.planned
    monkeypatch.setattr(plans, "planned", lambda *a: learned.append(planned(*a)) or learned[-1])
    kept = pk.op("linear_cross_entropy", backend="triton")
    cache.forget()
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        hidden, weight = (torch.randn(shape, generator=rng) for shape in ((2, 5, 8), (30, 8)))
        labels = torch.randint(30, (2, 5), generator=rng)
        found = []
        for op in (kept, made_anew(kept)):
            leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
            views = leaves[0][:, :-1], labels[:, 1:]
            words, aims = (v.transpose(0, 1) for v in views) if turned else views
            loss = op(words, leaves[1], aims)
            loss = loss.T if turned else loss
            loss.mean().backward()
            found.append([loss, *(leaf.grad for leaf in leaves)])
        assert same_bits(*found), seed
        expected = torch.nn.functional.cross_entropy((hidden[:, :-1] @ weight.T).mT, labels[:, 1:], reduction="none")
        assert torch.allclose(found[0][0], expected, atol=1e-5)
    assert len(learned) == 2 and None not in learned  # the loss, and its gradients


def test_losses_of_labels_that_are_cut_are_planned():
    kept = pk.op("cross_entropy", backend="triton")
    cache.forget()
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        logits, labels = torch.randn(2, 5, 30, generator=rng)[:, :-1], torch.randint(30, (2, 5), generator=rng)[:, 1:]
        expected = torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none")
        assert torch.allclose(kept(logits, labels), expected, atol=1e-5)
    (plan,) = kept.choice.plans.values()
    assert is_planned(plan)


@pytest.mark.parametrize(("op", "sample"), [(op, name) for op, name in SAMPLES if registry.find_spec(op).is_vjp])
def test_gradients_of_a_sum_are_planned(op, sample):
    """What a sum or a mean hands back is one number, seen as an array whose strides are 0: it may have to be copied."""
    kept = pk.op(op, backend="triton")
    for seed in range(4):
        arrays, options = drawn(op, sample, seed)
        of_sum = {
            n: torch.tensor(seed + 0.5, dtype=a.dtype).expand(a.shape) for n, a in arrays.items() if n[:2] == "d_"
        }
        assert of_sum
        cache.forget() if seed == 0 else None
        got = flat(kept(**arrays | of_sum, **options))
        assert same_bits(got, flat(made_anew(kept)(**arrays | of_sum, **options))), seed
    (plan,) = kept.choice.plans.values()
    assert is_planned(plan)


def test_gradients_of_later_calls_are_those_of_a_first():
    torch.manual_seed(0)
    for name in (r.op for r in forward_records() if registry.find_spec(r.op).vjp):
        kept = pk.op(name, backend="triton")
        differentiated = wiring(kept.spec).gradients
        arrays, _ = drawn(name, next(iter(testing.samples(name))), 0)
        for step in range(6):  # with weight's gradient and without: decided, learned, gone straight
            values = [torch.randn_like(a) if a.is_floating_point() else a for a in arrays.values()]
            found = []
            for op in (kept, made_anew(kept)) if step > 1 else (kept,):
                leaves = [
                    v.clone().requires_grad_(n in differentiated and (i != 1 or step % 2 == 0))
                    for i, (n, v) in enumerate(zip(arrays, values, strict=True))
                ]
                out = op(*leaves)
                out = out[0] if isinstance(out, tuple) else out
                out.backward(torch.linspace(-1, 1, out.numel()).reshape(out.shape))
                found.append([out.detach()] + [x.grad for x in leaves if x.grad is not None])
            assert step < 2 or same_bits(*found), (name, step)


def test_a_kept_form_is_watched_only_while_autograd_watches():
    op, x = pk.op("softmax", backend="triton"), torch.randn(2, 3, requires_grad=True)
    for _ in range(3):
        assert op(x).requires_grad
        with torch.no_grad():
            assert not op(x).requires_grad
    (g,) = torch.autograd.grad(op(x).square().sum(), x, create_graph=True)
    with pytest.raises(pk.UnsupportedError, match="second-order"):
        g.sum().backward()
    batched = torch.autograd.grad(op(x), x, torch.eye(6).reshape(6, 2, 3), is_grads_batched=True)[0]
    one = torch.autograd.grad(op(x), x, torch.eye(6)[1].reshape(2, 3))[0]
    torch.testing.assert_close(batched[1], one)
    assert torch.func.vmap(op)(torch.randn(4, 2, 3)).shape == (4, 2, 3)


def test_nothing_kept_holds_an_array():
    op = pk.op("layernorm", backend="triton")
    gone = []
    for _ in range(3):
        x, w = torch.randn(2, 4, requires_grad=True), torch.randn(4, requires_grad=True)
        op(x, w).sum().backward()
        gone += [weakref.ref(x), weakref.ref(w)]
        del x, w
    gc.collect()
    assert not [r for r in gone if r() is not None]


def test_the_tables_do_not_grow_with_the_forms():
    op = pk.op("softmax", backend="triton")
    cache.forget()
    op.choice.plans.limit = 8
    for n in range(1, 30):
        x = torch.randn(1, n)
        for _ in range(2):
            torch.testing.assert_close(op(x), torch.softmax(x, -1))
        assert len(op.choice.plans) <= 8
    op.choice.plans.limit = cache.BoundedCache().limit


def test_threads_share_what_is_kept():
    op, wrong = pk.op("rmsnorm", backend="triton"), []
    cache.forget()

    def serve(n):
        for i in range(12):
            x = torch.randn(2, 3 + (n + i) % 4)
            if not torch.allclose(op(x), torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6), atol=1e-4):
                wrong.append((n, i))

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_what_changes_later_is_asked_anew():
    mine = Backend("mine", "torch")

    def says(value):
        def softmax(call, tiling):
            return (torch.full_like(call.arrays["x"], value),)

        return softmax

    mine.implements("softmax")(says(1.0))
    op, x = pk.op("softmax", backend=mine), torch.randn(2, 3)
    assert [float(op(x)[0, 0]) for _ in range(3)] == [1.0] * 3
    mine.implements("softmax")(says(2.0))
    assert float(op(x)[0, 0]) == 2.0
    assert op.choice.plans
    tilings.forget()
    assert not op.choice.plans


def test_observers_see_calls_of_kept_forms():
    op, x, seen = pk.op("softmax", backend="triton"), torch.randn(2, 3), []
    for _ in range(3):
        op(x)
    with pk.observe(seen.append):
        op(x), op(x)
    assert [s.call.arrays["x"] is x for s in seen] == [True, True]
