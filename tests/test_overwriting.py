"""Results over inputs: every op that declares it, in PyTorch's eager calls and in its backward passes.

What a spec may say and a call may ask: tests/test_word_shapes.py. The checker runs each drawn case both ways.
"""

from __future__ import annotations

import types
import weakref
from typing import TypeVar

import pytest
from jaxtyping import Float

import portakern as pk
from portakern import testing
from portakern.core import registry
from tests.word_kernels import declared

torch = pytest.importorskip("torch", reason="torch is not installed")

import portakern.torch  # noqa: E402
from portakern.frameworks.torch import autograd  # noqa: E402
from portakern.frameworks.torch.functions import kept_op  # noqa: E402
from portakern.frameworks.torch.models.gates import served_gate  # noqa: E402

A = TypeVar("A")
ALIASED = [name for name in registry.ops() if registry.find_spec(name).aliases]


def outputs_of(result):
    return [o for o in (result if isinstance(result, tuple) else (result,)) if o is not None]


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("name", ALIASED)
def test_the_same_bits_there_and_nothing_else_changes(name, backend):
    """The first call of a form, the second, from which others are learned, and one of those."""
    pytest.importorskip(backend if backend == "triton" else "numpy", reason="triton is not installed")
    spec, run = registry.find_spec(name), pk.op(name, backend=backend)
    over = tuple(spec.aliases.values())
    for seed in range(3):
        arrays, options = testing.sample_arrays(spec, framework="torch", seed=seed)
        before = {n: a.clone() for n, a in arrays.items()}
        want = [o.clone() for o in outputs_of(run(**arrays, **options))]
        assert not any(a._version for a in arrays.values())
        found = outputs_of(run(**arrays, **options, overwrite=over))
        assert len(found) == len(want) and all(map(torch.equal, found, want))
        for n, a in arrays.items():
            assert any(o is a for o in found) == (n in over) == (a._version > 0), n
            assert n in over or torch.equal(a, before[n]), n


def test_a_graph_that_saved_what_was_written_over_refuses_in_pytorchs_words():
    x = torch.randn(1, 3, 2, 4, requires_grad=True)
    y, tables = x.exp(), torch.ones(1, 3, 2)  # exp reads its result in its backward pass
    run = pk.op("rope", backend="reference")
    with pytest.raises(pk.SpecError, match="rope: overwrite names x, but PyTorch records this call for gradients"):
        run(y, tables, tables, overwrite="x")
    for _ in range(2):
        with torch.no_grad():
            run(y, tables, tables, overwrite="x")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_autocast_casts_cannot_be_written_over():
    spec = declared({"x": Float[A, "n"]}, {"y": Float[A, "n"]}, aliases={"y": "x"}, autocast="lower")
    x = torch.ones(3)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(pk.SpecError, match="casts to torch.bfloat16: the resu"):
        pk.op(spec)(x, overwrite="x")


# ------------------------------------------------------------------------------------------------- backward passes
@pytest.fixture
def written(monkeypatch):
    """What backward passes wrote gradients over: (op, names) of each step that might."""
    seen, room = [], autograd.WatchedCall.may_overwrite

    def watched(self, *args):
        found = room(self, *args)
        if self.over:
            seen.append((self.spec.name, found))
        return found

    monkeypatch.setattr(autograd.WatchedCall, "may_overwrite", watched)
    return seen


class Layer(torch.nn.Module):
    """A feed-forward layer as the models have it."""

    def __init__(self, wide=24, act=None):
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj = torch.nn.Linear(16, wide, bias=False), torch.nn.Linear(16, wide, bias=False)
        self.down_proj, self.act_fn = torch.nn.Linear(wide, 16, bias=False), act or torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.fixture
def layer(monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[demo]'")
    from portakern.frameworks.torch.models import gates

    monkeypatch.setattr(gates, "find", lambda module, among: gates.GatedProjections() if among is gates.GATES else None)

    def make(backend="reference", **more):
        made = Layer(**more)
        made.forward = types.MethodType(served_gate(made, backend)[1].made().forward, made)
        return made

    return make


def passes(layer, x, **more):
    layer.zero_grad()
    layer(x).square().sum().backward(**more)
    return [p.grad.clone() for p in layer.parameters()]


def plain(layer, x):
    layer.zero_grad()
    y = layer.down_proj(layer.act_fn(layer.gate_proj(x)) * layer.up_proj(x))
    y.square().sum().backward()
    return [p.grad.clone() for p in layer.parameters()]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


X = torch.arange(80.0).sin().reshape(5, 16)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("act", [torch.nn.SiLU, None], ids=["silu", "gelu"])
def test_a_layer_writes_its_gates_gradients_over_them(layer, written, backend, act):
    pytest.importorskip("triton" if backend == "triton" else "numpy", reason="triton is not installed")
    if act is None:
        activations = pytest.importorskip("transformers.activations", reason="transformers is not installed")
        act = activations.GELUActivation
    made = layer(backend, act=act())
    for _ in range(4):
        close(passes(made, X), plain(made, X))
    assert {names for _, names in written} == {("gate", "up")} and len(written) >= 4


def test_a_layer_of_8_bit_projections_does_so_too(layer, written):
    made = layer()
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(made, name, portakern.torch.Float8Linear.from_linear(getattr(made, name), "dynamic"))
    found = passes(made, X)
    assert written and {names for _, names in written} == {("gate", "up")}
    del written[:]
    made.gate_proj.register_forward_hook(lambda *_: None)  # who sees what it returns sees it unharmed
    for g, e in zip(passes(made, X), found, strict=True):
        assert torch.equal(g, e)
    assert not written


def test_a_kept_graph_is_gone_through_again(layer, written):
    """Only the last pass writes over what was saved, and PyTorch refuses one after it."""
    made = layer()
    want = plain(made, X)
    for _ in range(3):
        made.zero_grad()
        loss = made(X).square().sum()
        for last in (False, False, True):
            made.zero_grad()
            loss.backward(retain_graph=not last)
            close([p.grad for p in made.parameters()], want)
            assert written[-1] == ("swiglu", ("gate", "up") if last else ())
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


SEEN = {
    "a hook of the gate": lambda m, keep: m.gate_proj.register_forward_hook(lambda _, x, y: keep.append(y)),
    "a hook of up": lambda m, keep: m.up_proj.register_forward_hook(lambda _, x, y: keep.append(y.detach())),
    "a hook of all modules": lambda m, keep: torch.nn.modules.module.register_module_forward_hook(
        lambda module, x, y: keep.append(y) if module is m.gate_proj else None
    ),
    "a forward of somebody's": lambda m, keep: setattr(
        m.gate_proj, "forward", lambda x: keep.append(y := torch.nn.functional.linear(x, m.gate_proj.weight)) or y
    ),
    "another class": lambda m, keep: setattr(m, "gate_proj", Keeping(m.gate_proj, keep)),
}


class Keeping(torch.nn.Module):
    def __init__(self, inner, keep):
        super().__init__()
        self.inner, self.keep = inner, keep

    def forward(self, x):
        self.keep.append(self.inner(x))
        return self.keep[-1]


@pytest.mark.parametrize("how", SEEN)
def test_what_somebody_sees_is_not_written_over(layer, written, how):
    made, kept = layer(), []
    want = plain(made, X)
    handle = SEEN[how](made, kept)
    try:
        for _ in range(3):
            close(passes(made, X), want)
        assert kept and not any(y._version for y in kept)
        weight = dict(made.named_parameters())["up_proj.weight" if "up" in how else next(iter(made.state_dict()))]
        close(kept[-1].detach(), torch.nn.functional.linear(X, weight.detach()))
        assert not written
    finally:
        if how == "a hook of all modules":
            handle.remove()


class Silent(torch.overrides.TorchFunctionMode):
    def __init__(self, keep):
        super().__init__()
        self.keep = keep

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            self.keep.append(out)
        return out


def test_what_a_mode_or_a_packing_hook_keeps_is_not_written_over(layer, written):
    made, kept = layer(), []
    want = plain(made, X)
    with Silent(kept):
        loss = made(X).square().sum()
    made.zero_grad()
    loss.backward()
    close([p.grad for p in made.parameters()], want)
    assert len(kept) == 3 and not any(y._version for y in kept) and not written
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append((x, x.detach().clone())) or x, lambda x: x):
        loss = made(X).square().sum()
    made.zero_grad()
    loss.backward()
    close([p.grad for p in made.parameters()], want)
    assert kept and all(torch.equal(x, before) for x, before in kept) and {names for _, names in written} == {()}


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_are_kept(layer, written, reentrant):
    made = layer()
    want = plain(made, X)
    for _ in range(3):
        made.zero_grad()
        x = X.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(made, x, use_reentrant=reentrant).square().sum().backward()
        close([p.grad for p in made.parameters()], want)
    assert {names for _, names in written} == {("gate", "up") if reentrant else ()}


def test_a_layer_without_gradients_and_one_that_is_frozen_are_right(layer, written):
    made = layer()
    with torch.no_grad():
        y = made(X)
    close(y, made.down_proj(made.act_fn(made.gate_proj(X)) * made.up_proj(X)).detach())
    want = plain(made, X)
    made.gate_proj.requires_grad_(False)
    for _ in range(3):
        made.zero_grad(set_to_none=True)
        made(X).square().sum().backward()
        close([made.up_proj.weight.grad, made.down_proj.weight.grad], want[1:])
    assert {names for _, names in written} == {("up",)}


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_what_only_a_backward_pass_sees_is_written_over(written, backend):
    """slope of linear_cross_entropy, unless the caller has it."""
    pytest.importorskip("triton" if backend == "triton" else "numpy", reason="triton is not installed")
    run = pk.op("linear_cross_entropy", backend=backend)
    x, weight, labels = X.clone().requires_grad_(), torch.randn(30, 16, requires_grad=True), torch.arange(5)
    want = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ weight.T, labels, reduction="sum"), (x, weight))
    for _ in range(4):
        close(torch.autograd.grad(run(x, weight, labels).sum(), (x, weight)), want)
    assert {names for _, names in written} == {("slope",)}
    written.clear()
    loss, _, slope, _ = run(x, weight, labels, return_slope=True)
    before = slope.clone()
    close(torch.autograd.grad(loss.sum(), (x, weight)), want)
    assert torch.equal(slope, before) and not written


def test_a_kernel_that_refuses_makes_gradients_of_their_own(written, monkeypatch):
    """Nobody asked for it, so that nobody is refused."""
    run, refusals = kept_op("swiglu", "reference", ("gate", "up")), []
    whole = autograd.WatchedCall._found

    def refusing(self, run, arrays, over, wants):
        def inner(arrays, options, wants):
            if "overwrite" in options:
                refusals.append(options["overwrite"])
                raise pk.UnsupportedError("not in this tiling")
            return run(arrays, options, wants)

        return whole(self, inner, arrays, over, wants)

    monkeypatch.setattr(autograd.WatchedCall, "_found", refusing)
    leaf = X.clone().requires_grad_()
    gate, up = leaf * 1.5, leaf * 0.5
    (found,) = torch.autograd.grad(run(gate, up).sum(), leaf)
    (want,) = torch.autograd.grad((torch.nn.functional.silu(leaf * 1.5) * (leaf * 0.5)).sum(), leaf)
    close(found, want)
    assert refusals == [("gate", "up")]


def most_memory(step):
    """The most bytes that PyTorch held at a time beside those before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_a_layer_holds_an_array_less_at_its_peak(layer):
    """Without it the gradients of gate and up lie beside both and the cotangent; with it the peak comes before, where
    down_proj's backward pass holds its input and the cotangent beside them."""
    pytest.importorskip("triton", reason="triton is not installed")
    made, x = layer("triton", wide=1024), X.repeat(32, 1).requires_grad_()
    for _ in range(2):
        passes(made, x)

    def step():
        made(x).sum().backward()

    own = most_memory(step)
    handle = made.gate_proj.register_forward_hook(lambda *_: None)
    shared = most_memory(step)
    handle.remove()
    one = 160 * 1024 * 4
    assert 0.75 * one < shared - own < 1.25 * one, (own, shared, one)


def test_saved_tensors_are_freed_as_before(layer):
    made, kept = layer(), []
    product = made.down_proj.register_forward_pre_hook(lambda _, x: kept.append(weakref.ref(x[0])))
    passes(made, X)
    product.remove()
    assert kept and kept[-1]() is None
