"""torch.compile, torch.export and dispatch modes: the custom ops that derive from the specs."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys

import numpy as np
import pytest

import portakern as pk
from portakern.core import cache, observe, registry

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
fn = torch.nn.functional

import portakern.torch as twin  # noqa: E402
from portakern.frameworks.torch import custom_ops, memory  # noqa: E402
from tests import test_torch  # noqa: E402
from tests.ops import of_each_kind, records  # noqa: E402
from tests.test_torch import FORWARD, IDS, QKV, f64, tensors  # noqa: E402
from tests.test_torch_func import loop  # noqa: E402

OPS = torch.ops.portakern


@pytest.fixture(autouse=True)
def fresh():
    for name in records():
        custom_ops.define(registry.find_spec(name))
    torch.compiler.reset()


def compiled(f, **kwargs):
    return torch.compile(f, fullgraph=True, **{"backend": "aot_eager", **kwargs})


# ------------------------------------------------------------------------------------------------------- the custom ops
SMALL = [pytest.param(r, key, id=f"{r.op}: {key}") for r in records().values() for key in r.small]


def custom(r, key):
    """The custom op, and the arrays and options of a record's sample as its schema wants them."""
    sample = r.small[key]
    options = {n: custom_ops._encode(r.spec.option(n), v) for n, v in sample.options.items()}
    if sample.wants is not None:
        options["wants"] = ",".join(sample.wants)
    return getattr(OPS, r.op), tensors(r, sample, grad=r.spec.vjp is not None), options


CHOSEN = [pytest.param(*p.values, {}, id=f"{p.id}-chosen") for p in SMALL]
ROUTED = [pytest.param(r, next(iter(r.small)), {"backend": "triton"}, id=f"{r.op}-triton") for r in of_each_kind()]


@pytest.mark.parametrize(("r", "key", "routing"), CHOSEN + ROUTED)
def test_opcheck(r, key, routing):
    """Every sample where the backend is chosen, and a call of each kind whose backend and tiling are named. An op's
    first sample is traced too: how the others are is the same."""
    pytest.importorskip("expecttest", reason="expecttest is not installed, which torch.library.opcheck imports")
    op, arrays, options = custom(r, key)
    if routing:  # a tiling is a string of the tiles' names
        routing = routing | {"tiling": ",".join(f"{tile}={t.values[1]}" for tile, t in r.spec.tiling.items())}
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    tests += ("test_aot_dispatch_dynamic",) if key == next(iter(r.small)) and not routing else ()
    done = torch.library.opcheck(op.default, arrays, options | routing, test_utils=tests)
    assert done == dict.fromkeys(tests, "SUCCESS")


def test_schemas_derive_from_specs():
    assert (
        str(OPS.softmax.default._schema)
        == 'portakern::softmax(Tensor x, *, SymInt axis=-1, str wants="", str backend="", str variant="", '
        'str tiling="") -> Tensor y'
    )
    attention = str(OPS.attention.default._schema)
    assert (
        "Tensor? bias=None" in attention
        and "SymInt[]? window=None" in attention
        and attention.endswith("-> (Tensor o, Tensor lse, Tensor lse_low)")
    )


def test_unwanted_outputs_are_empty_tensors_and_wants_names_outputs():
    o, lse, low = OPS.attention(*QKV)
    assert lse.shape == low.shape == (0,) and not lse.requires_grad and o.requires_grad
    assert OPS.attention(*QKV, wants="lse")[0].shape == (0,)
    assert OPS.layernorm_vjp(f64(2, 3, grad=False), f64(2, 3, grad=False))[1].shape == (0,)
    with pytest.raises(pk.SpecError, match="attention: wants names 'p'; expected names among o, lse, lse_low"):
        OPS.attention(*QKV, wants="p")


@pytest.mark.parametrize("r", [pytest.param(r, id=r.op) for r in records().values()])
def test_later_calls_of_a_form_are_not_bound_again(r, monkeypatch):
    """And those of another form, options among it, are not taken for them."""
    cache.forget()
    served, decide, found = [], custom_ops.decide, {}
    monkeypatch.setattr(custom_ops, "decide", lambda *a: served.append(r.op) or decide(*a))
    for turn in range(4):  # bound, learned, replayed
        before = len(served)
        for key in r.small:
            op, arrays, options = custom(r, key)
            with torch.no_grad():
                got = op(*arrays, **options, backend="triton")
            got = got if isinstance(got, tuple) else (got,)
            for ours, theirs in zip(got, found.setdefault(key, got), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert turn < 2 or len(served) == before  # the first tensor of a process is not known for one


@pytest.mark.parametrize(("r", "key"), [p for p in test_torch.SMALL if p.values[0] in of_each_kind()])
def test_gradcheck_of_the_custom_ops(r, key):
    op, arrays, options = custom(r, key)
    options = {n: v for n, v in options.items() if r.spec.option(n).kind != "dtype"}
    call = pk.op(r.op).bind(*arrays, **r.small[key].options)
    wanted = [o.name in call.wants for o in r.spec.outputs]

    def f(*given):
        outputs = op(*given, **options)
        return outputs if len(wanted) == 1 else tuple(y for y, wants in zip(outputs, wanted, strict=True) if wants)

    batched = len(arrays) == 1
    assert torch.autograd.gradcheck(f, arrays, fast_mode=True, check_batched_grad=batched)


def test_torch_func_sees_through_custom_ops():
    x = f64(2, 3, grad=False)
    loss = lambda f: lambda x: f(x).pow(2).sum()  # noqa: E731
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(loss(OPS.softmax)))(x), torch.func.grad(loss(lambda x: torch.softmax(x, -1)))(x)
    )
    torch.testing.assert_close(torch.func.jacrev(OPS.softmax)(x), torch.func.jacrev(lambda x: torch.softmax(x, -1))(x))
    q, k, v = (torch.stack([a, 2 * a]).detach() for a in QKV)
    torch.testing.assert_close(
        torch.func.vmap(OPS.attention)(q, k, v)[0], loop(lambda *a: OPS.attention(*a)[0], (0, 0, 0), (q, k, v))
    )
    with pytest.raises(pk.UnsupportedError, match="softmax: second-order gradients"):
        torch.func.grad(lambda x: torch.func.grad(loss(OPS.softmax))(x).sum())(x)
    for what in (
        lambda: torch.func.jvp(OPS.softmax, (x,), (x,)),
        lambda: torch.func.jvp(torch.func.grad(loss(OPS.softmax)), (x,), (x,)),
    ):
        with pytest.raises(pk.UnsupportedError, match="softmax: forward-mode"):
            what()


def test_no_gradient_of_a_gradient():
    x = f64(2, 3)
    g = torch.autograd.grad(OPS.softmax(x).pow(2).sum(), x, create_graph=True)[0]
    with pytest.raises(pk.UnsupportedError, match="softmax: second-order gradients are not given"):
        g.sum().backward()


# -------------------------------------------------------------------------------------------------------- torch.compile
WIDTH = 6


def in_a_row(backend, beside=False):
    """Every op once, one after another, on a hidden state and the parameters that they name; or ``beside`` each other
    on one hidden state, between which a compiler has less to make of its own."""
    steps = [(r.layer, pk.op(r.op, backend=backend), list(r.layer.parameters(WIDTH))) for r in FORWARD]

    def model(x, *weights):
        given, y = iter(weights), x
        for layer, op, names in steps:
            y = y + layer.run(op, x if beside else y, {name: next(given) for name in names})
        return y

    return model


def weights():
    shapes = [shape for r in FORWARD for shape in r.layer.parameters(WIDTH).values()]
    return (f64(2, 3, WIDTH), *(f64(*shape, seed=i) for i, shape in enumerate(shapes)))


@pytest.mark.parametrize(
    ("compiler", "backend", "dynamic"),
    [
        ("aot_eager", "reference", False),
        ("inductor", "triton", True),
    ],
)
def test_every_op_in_a_row_compiles_whole(compiler, backend, dynamic):
    beside = compiler == "inductor"  # which calls a C++ compiler for each kernel
    f, arrays = in_a_row(backend, beside), weights()
    want = f(*arrays)
    from torch._inductor import config

    # a dozen kernels include the same headers, which are compiled ahead here, where that pays
    with config.patch(cpp_cache_precompile_headers=True):
        got = compiled(f, backend=compiler, dynamic=dynamic)(*arrays)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        weight = torch.cos(torch.arange(got.numel(), dtype=torch.float64)).view(got.shape)
        grads, wanted = (torch.autograd.grad(y, arrays, weight) for y in (got, want))
    for g, w in zip(grads, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12)


def test_outputs_that_an_option_asks_for_compile_beside_the_others():
    attention = pk.op("attention", backend="reference")

    def both(q, k, v):
        o, lse = attention(q, k, v, is_causal=True, window=(2, None), return_lse=True)
        return o.sum() + lse[..., 1:].sum()

    want = torch.autograd.grad(both(*QKV), QKV)
    assert all(map(torch.equal, torch.autograd.grad(compiled(both)(*QKV), QKV), want))


def test_the_graph_holds_the_ops_and_the_residuals_only_when_training():
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(module, inputs):
        graphs.append(module)
        return module

    attention = pk.op("attention", backend="triton", tiling={"block_q": 16})
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, inference_compiler=keep)
    compiled(attention, backend=backend)(*(x.detach() for x in QKV))
    assert (
        "portakern.attention.default" in graphs[0].code
        and "attention_vjp" not in graphs[0].code
        and "o,lse" not in graphs[0].code
    )
    compiled(attention, backend=backend)(*QKV).sum().backward()
    assert "wants = 'o,lse,lse_low', backend = 'triton', tiling = 'block_q=16'" in graphs[1].code
    assert (
        "portakern.attention_vjp.default" in graphs[2].code
        and "wants = 'd_q,d_k,d_v', backend = 'triton', tiling = 'block_q=16'" in graphs[2].code
    )


def test_one_compilation_serves_layers_with_an_op_each_and_dynamic_sizes():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.op = pk.op("softmax", backend="reference")

        def forward(self, x):
            return self.op(x) + 1

    counter = importlib.import_module("torch._dynamo.testing").CompileCounterWithBackend("aot_eager")
    first, second = Layer(), Layer()
    run = torch.compile(Layer.forward, backend=counter, fullgraph=True, dynamic=True)
    for one in (first, second):
        for n in (3, 4, 5):
            torch.testing.assert_close(
                run(one, f64(n, n + 1, grad=False)), torch.softmax(f64(n, n + 1, grad=False), -1) + 1
            )
    assert counter.frame_count == 1


def test_torch_func_inside_compile():
    softmax = pk.op("softmax", backend="reference")
    x = f64(2, 3, grad=False)
    g = torch.func.grad(lambda x: softmax(x).pow(2).sum())
    torch.testing.assert_close(compiled(lambda x: torch.func.vmap(g)(x))(x), g(x))


def test_autocast_inside_and_outside_compile():
    matmul, softmax = pk.op("matmul", backend="reference"), pk.op("softmax", backend="reference")

    def both(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = matmul(x, x.half())
            return y, softmax(y)

    x = torch.randn(3, 3, requires_grad=True)
    y, p = compiled(both)(x)
    assert (y.dtype, p.dtype) == (torch.bfloat16, torch.bfloat16)
    (p * p).sum().backward()
    want = torch.autograd.grad((both(x)[1] ** 2).sum(), x)[0]
    assert x.grad.dtype == torch.float32 and torch.equal(x.grad, want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(lambda x: matmul(x, x))(x).dtype == torch.bfloat16


WRONG = {
    "an axis": (lambda x: pk.op("softmax")(x, axis=5), r"softmax: axis is 5; expected an integer from -2 to 1"),
    "an option's name": (
        lambda x: pk.op("softmax")(x, axs=0),
        r"softmax\(\) got an unexpected keyword argument 'axs'; arrays: x; keyword options: axis",
    ),
    "a missing array": (lambda x: pk.op("matmul")(x), r"matmul\(\) missing a required argument: 'b'; arrays: a, b"),
    "an option's value": (
        lambda x: pk.op("matmul")(x, x.T, precision="bf16"),
        r"precision is 'bf16'; expected one of 'ieee', 'tf32'",
    ),
    "dtypes": (
        lambda x: pk.op("matmul")(x, x.float()),
        r"matmul: b is float32 but a is float64; expected float64: cast one of them",
    ),
    "shapes": (lambda x: pk.op("matmul")(x, x), r"b axis -2 \(k\) is 2; expected 3, as set by a axis -1"),
    "a window": (
        lambda x: pk.op("attention")(x[None, None], x[None, None], x[None, None], window=(1, 2, 3)),
        r"window is \(1, 2, 3\); expected a tuple of 2",
    ),
    "an op": (lambda x: pk.op("conv")(x), r"op 'conv' is unknown; expected one of"),
    "a tile": (
        lambda x: pk.op("softmax", tiling={"block_n": 100})(x),
        r"tiling\['block_n'\] is 100; expected one of 128",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_say_what_is_wrong(name):
    f, message = WRONG[name]
    with pytest.raises(Exception, match=message):
        compiled(f)(f64(2, 3, grad=False))


def test_statistics_are_float64_beside_float64_and_else_float32():
    """A log-sum-exp is float32, and float64 beside arrays of float64, in a graph as elsewhere."""
    attention, vjp = pk.op("attention", backend="reference"), pk.op("attention_vjp", backend="reference")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        given = tuple(x.detach().to(dtype) for x in QKV)
        o, lse = attention(*given, return_lse=True)
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert all(map(torch.equal, compiled(vjp)(*given, o, lse, o)[:3], vjp(*given, o, lse, o)[:3]))
    expected = "expected float32, or float64 where q is float64: cast it"
    with pytest.raises(Exception, match=f"attention_vjp: lse is torch.bfloat16; {expected}"):
        compiled(vjp)(*given, o, lse.bfloat16(), o)


def test_options_in_every_spelling():
    q, k, v = QKV
    attention = pk.op("attention", backend="reference")
    for options in (
        {"window": [1, 0]},
        {"window": (None, 2)},
        {"window": None, "scale": 2},
        {"softcap": 3.0, "is_causal": True},
    ):
        assert torch.equal(compiled(functools.partial(attention, **options))(q, k, v), attention(q, k, v, **options))
    masked = lambda *a: attention(*a, *IDS).sum()  # noqa: E731
    given = (*QKV, f64(1, 1, 1, 4))
    assert all(
        map(
            torch.equal,
            torch.autograd.grad(compiled(masked)(*given), given),
            torch.autograd.grad(masked(*given), given),
        )
    )
    matmul, x = pk.op("matmul", backend="reference"), f64(3, 3)
    for dtype in (torch.float16, "bfloat16", None):
        assert (
            compiled(lambda x, dtype=dtype: matmul(x, b=x, out_dtype=dtype))(x).dtype
            == matmul(x, x, out_dtype=dtype).dtype
        )
    vjp = pk.op("layernorm_vjp", backend="reference")
    given = f64(2, 3, grad=False), f64(2, 3, grad=False), f64(3, grad=False)
    got = compiled(lambda *a: vjp(*a, wants=("d_weight",)))(*given)
    assert (
        type(got) is vjp.spec.result
        and got.d_x is None
        and got.d_bias is None
        and torch.equal(got.d_weight, vjp(*given).d_weight)
    )
    assert compiled(lambda *a: vjp(*a))(*given).d_bias is None


def test_backends_that_nobody_registered():
    backends = [pk.Backend("mine", framework="torch") for _ in range(2)]
    for n, b in enumerate(backends):
        b.implements("softmax")(lambda call, tiling, n=n: (torch.full_like(call.arrays["x"], n),))
        op = pk.op("softmax", backend=b)
        assert torch.equal(compiled(op)(torch.ones(3)), torch.full((3,), float(n)))
        with pytest.raises(
            Exception,
            match="softmax: x requires grad, and softmax_vjp on cpu: backend 'mine' cannot: it has no softmax_vjp",
        ):
            compiled(op)(torch.ones(3, requires_grad=True))


# ----------------------------------------------------------------------------------------------------- modes and export
def test_dispatch_modes_see_the_op_and_fakes_pass_through_it():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    softmax, x = pk.op("softmax", backend="reference"), f64(2, 3)
    with Names():
        softmax(x).sum().backward()
    assert "portakern.softmax.default" in names and "portakern.softmax_vjp.default" in names
    with FakeTensorMode() as mode:
        y = softmax(mode.from_tensor(torch.ones(2, 3)))
        assert y.shape == (2, 3) and type(y).__name__ == "FakeTensor"
    assert "portakern.softmax.default" in make_fx(lambda x: softmax(x))(x.detach()).code


def test_export():
    class Net(torch.nn.Module):
        def forward(self, x):
            return pk.op("softmax", backend="reference")(x, axis=0) * 2

    x = f64(2, 3, grad=False)
    for strict in (True, False):
        program = torch.export.export(Net(), (x,), strict=strict, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        assert "portakern.softmax.default" in program.graph_module.code
        torch.testing.assert_close(program.module()(f64(4, 3, grad=False)), torch.softmax(f64(4, 3, grad=False), 0) * 2)


def test_selective_checkpointing_may_keep_an_op_s_result():
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    runs = []
    softmax = pk.op("softmax", backend="reference")
    context = functools.partial(create_selective_checkpoint_contexts, [OPS.softmax.default])
    x = f64(2, 3)
    with pk.observe(lambda served: runs.append(served.call.spec.name)):
        checkpoint(lambda x: softmax(x).pow(2), x, use_reentrant=False, context_fn=context).sum().backward()
    assert runs == [softmax.spec.name, softmax.spec.vjp]


def test_an_op_is_made_without_torch_and_compiles_once_it_is_imported():
    code = """
import sys
import portakern as pk
softmax = pk.op("softmax", backend="reference")
assert not {"torch", "portakern.autograd"} & {*sys.modules}
import torch
x = torch.ones(2, 3)
print(torch.equal(torch.compile(lambda x: softmax(x), fullgraph=True, backend="aot_eager")(x), torch.softmax(x, -1)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    ("op", "option", "value"),
    [
        pytest.param("layernorm", "eps", np.float32(1e-5)),
        pytest.param("layernorm", "eps", np.float64(1e-5)),
        pytest.param("attention", "scale", torch.tensor(0.5)),
        pytest.param("attention", "is_causal", np.bool_(True)),
    ],
)
def test_numbers_of_numpy_are_refused_in_a_graph_in_words(op, option, value):
    """Eager calls take NumPy's; a graph sees tensors in their place."""
    call = pk.op(op, backend="reference")
    arrays = QKV if op == "attention" else (QKV[0],)
    python = {option: value.item()}
    assert torch.equal(compiled(lambda *a: call(*a, **python))(*arrays), call(*arrays, **python))
    if isinstance(value, np.generic):
        assert torch.equal(call(*arrays, **{option: value}), call(*arrays, **python))
    with pytest.raises(
        Exception, match=rf"{op}: {option} is a tensor in a graph.*expected .*: {option} = \w+\({option}\)"
    ):
        compiled(lambda *a: call(*a, **{option: value}))(*arrays)


def test_names_with_dots_compile():
    results = []
    for name, value in {"a.b": 1.0, "a_b": 2.0, "a-b": 3.0}.items():
        backend = pk.Backend(name, framework="torch")
        backend.implements("softmax")(lambda call, tiling, v=value: (torch.full_like(call.arrays["x"], v),))
        softmax = pk.op("softmax", backend=backend)
        results.append(compiled(lambda x, softmax=softmax: softmax(x) + 1)(torch.zeros(3))[0].item())
        results.append(compiled(lambda x, b=backend: pk.op("softmax", backend=b)(x) + 1)(torch.zeros(3))[0].item())
    assert results == [2, 2, 3, 3, 4, 4]


def test_a_compiled_function_makes_an_op_of_a_spec():
    spec, x = pk.op("softmax").spec, torch.randn(2, 5)
    f = compiled(lambda x: pk.op(spec, backend="reference")(x))
    assert torch.allclose(f(x)[0], torch.softmax(x, -1)[0])
    with pytest.raises(Exception, match=r"backend \('x',\) is unknown"):
        compiled(lambda x: pk.op("softmax", backend=("x",))(x))(x)


# --- what is traced of the twins and of swapped(), on any torch ---
PACKED, STARTS = torch.randn(8, 2, 8), torch.tensor([0, 3, 8])
X, Q, LABELS = torch.randn(4, 8), torch.randn(1, 2, 4, 8), torch.tensor([3, 0, 7, 1])
MASK, COS = torch.ones(4, 4).tril() > 0, X[None]
CODES = X.to(torch.float8_e4m3fn)
TENSOR_WISE = fn.ScalingType.TensorWise if hasattr(fn, "ScalingType") else "TensorWise"
TWINS = {
    "softmax": lambda x: twin.softmax(x, -1, dtype=torch.float64, backend="triton"),
    "logsumexp": lambda x: twin.logsumexp(x, (0, 1), keepdim=True, backend="triton"),
    "cross_entropy": lambda x: twin.cross_entropy(x, LABELS, label_smoothing=0.1, backend="triton"),
    "linear_cross_entropy": lambda x: twin.linear_cross_entropy(x, X, LABELS % 4, backend="triton"),
    "layer_norm": lambda x: twin.layer_norm(x, (4, 8), backend="triton"),
    "rms_norm": lambda x: twin.rms_norm(x, (8,), X[0], backend="triton"),
    "matmul": lambda x: twin.matmul(x, X[0], backend="triton"),
    "matmul into out": lambda x: twin.matmul(x, X.T, out=torch.empty(4, 4), backend="triton"),
    "attention": lambda x: twin.scaled_dot_product_attention(Q * x[0], Q, Q, is_causal=True, backend="triton"),
    "attention with a mask": lambda x: twin.scaled_dot_product_attention(Q * x[0], Q, Q, MASK, backend="triton"),
    "attention with a bias": lambda x: twin.scaled_dot_product_attention(Q * x[0], Q, Q, X[:, :4], backend="triton"),
    "varlen_attn": lambda x: twin.varlen_attn(
        PACKED * x[0], PACKED, PACKED, STARTS, STARTS, 5, 5, window_size=(2, 0), backend="triton"
    ),
    "scaled_mm": lambda x: twin.scaled_mm(
        CODES, CODES.t(), x[0, :1], TENSOR_WISE, X[0, :1], "TensorWise", backend="triton"
    ),
    "apply_rotary_pos_emb": lambda x: twin.apply_rotary_pos_emb(Q * x[0], Q, COS, COS, backend="triton")[0],
}
SWAPPED = {
    "softmax by NumPy's name": lambda x: torch.softmax(x, axis=-1),
    "a product of einsum's": lambda x: torch.einsum("ij,kj->ik", x, X),
    "einsum that is no product": lambda x: torch.einsum("ij->j", x),
    "attention with a mask": lambda x: fn.scaled_dot_product_attention(Q * x[0], Q, Q, MASK),
    "refused: weights of classes": lambda x: fn.cross_entropy(x, LABELS, weight=X[0] ** 2),
}
DOUBTFUL = torch.zeros(1, 4, 200, 8)  # the layout of PyTorch's attention, which is another than the op's


@pytest.fixture
def strict(monkeypatch):
    """Dynamo meets no logger, and no class of tensors was looked at before."""
    from torch._dynamo.variables import misc

    def met(self, value, **kwargs):
        raise AssertionError(f"{value} is traced")

    monkeypatch.setattr(misc.LoggingLoggerVariable, "__init__", met)
    monkeypatch.setattr(observe, "_said", set())
    kept = memory.READABLE.copy()
    memory.READABLE.clear()
    yield
    memory.READABLE.update(kept)


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_is_one_graph_whatever_ran_before(strict, name):
    torch.testing.assert_close(compiled(TWINS[name])(X), TWINS[name](X))


@pytest.mark.parametrize("name", SWAPPED)
def test_a_swapped_function_is_one_graph_whoever_serves_it(strict, name):
    def run(x):
        with twin.swapped(backend="triton", otherwise="torch"):
            return SWAPPED[name](x)

    torch.testing.assert_close(compiled(run)(X), SWAPPED[name](X))


def test_a_doubtful_call_is_one_graph_and_says_so(strict, caplog):
    run = pk.op("attention", backend="triton")
    assert compiled(lambda x: run(x, x, x))(DOUBTFUL).shape == DOUBTFUL.shape
    assert "look like PyTorch's layout" in caplog.text
