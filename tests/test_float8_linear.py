"""The linear layer of 8-bit floats: its errors against derived ones, what moves and saves it, and its gradients."""

import copy
import io

import pytest

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")

import portakern.torch  # noqa: E402
from portakern.frameworks.torch import float8  # noqa: E402
from portakern.frameworks.torch.float8 import HISTORIES, RECIPES, STEPS  # noqa: E402

Float8Linear = portakern.torch.Float8Linear
TRAINED = [name for name, kind in RECIPES.items() if kind.trains]
INFERRED = [name for name in RECIPES if name not in TRAINED]
BACKENDS = ("reference", "triton", "pallas")
IN, OUT = 256, 200  # blocks of 128 rows, the last of which is short

E4M3_RMS, E5M2_RMS = 0.0265, 0.053
"""The root mean square of a code's relative error: ulp / sqrt 12 of 2^-3 and 2^-2, over mantissas of 1 to 2."""


def linear(recipe, dtype=torch.float32, bias=True, shape=(IN, OUT)):
    torch.manual_seed(0)
    made = torch.nn.Linear(*shape, bias=bias).to(dtype)
    with torch.no_grad():  # numbers of all sizes, so that scales of rows and of blocks differ
        made.weight *= torch.exp2(torch.randint(-14, 8, (shape[1], 1)).float())
    return made.train(recipe in TRAINED)


def numbers(*shape, dtype=torch.float32, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).to(dtype) * torch.exp2(torch.arange(shape[-2]) % 7)[:, None].to(dtype)


def bits(x):
    return x.contiguous().view(torch.uint8)


def code_error(x, height, width, dtype=torch.float8_e4m3fn):
    """The most by which what codes stand for differs from x (m, n): half a spacing of codes, relative above the least
    normal one and absolute below, and three roundings of the scale in float32."""
    info, (m, n) = torch.finfo(dtype), x.shape
    spacing, least = info.eps, info.smallest_normal * info.eps
    tall = torch.nn.functional.pad(x.double().abs(), (0, -n % width, 0, -m % height))
    top = tall.view(len(tall) // height, height, -1, width).amax((1, 3))
    scale = (top / info.max).repeat_interleave(height, 0).repeat_interleave(width, 1)[:m, :n]
    return (x.double().abs() * spacing / 2).maximum(scale * least / 2) + 2.0**-21 * x.double().abs()


def product_error(a, of_a, b, of_b, out_dtype):
    """The most by which a product (m, k) x (k, n) differs whose factors differ by ``of_a`` and ``of_b``: theirs, sums
    of 128 products kept to 13 bits behind the point in steps of 32 (scaled_matmul's bound), and the last rounding."""
    a, b = a.double().abs(), b.double().abs()
    steps = -(-min(128, a.shape[1]) // 32)
    summed = (a + of_a) @ (b + of_b) * (34 * steps * 2.0**-13 + a.shape[1] * 2.0**-23)
    return (of_a @ b + a @ of_b + of_a @ of_b + summed) + (a @ b) * torch.finfo(out_dtype).eps


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_results_are_within_the_errors_of_codes(recipe, backend):
    pytest.importorskip({"reference": "numpy", "pallas": "jax"}.get(backend, backend))
    given = linear(recipe)
    layer = Float8Linear.from_linear(given, recipe, backend=backend)
    x = numbers(6, IN)
    with torch.no_grad():
        y = layer(x)
    assert y.dtype == x.dtype
    error = y.double() - (x.double() @ given.weight.double().T + given.bias.double())
    sizes = {"rows": ((1, IN), (1, IN)), "blocks": ((1, 128), (128, 128))}.get(recipe, ((6, IN), (OUT, IN)))
    of_x, of_weight = (code_error(t.detach(), *size) for t, size in zip((x, given.weight), sizes, strict=True))
    bound = product_error(x, of_x, given.weight.T, of_weight.T, torch.float32)
    assert (error.abs() <= bound + given.bias.abs() * 2.0**-23).all()
    if recipe == "rows":  # what other scales would give is seen: those of blocks are not within this bound
        tensors = Float8Linear.from_linear(given.train(), "dynamic", backend=backend)
        wrong = tensors(x).double() - (x.double() @ given.weight.double().T + given.bias.double())
        assert (wrong.abs() > bound).any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_any_shape_has_its_dtype_and_a_row_its_bits(recipe, dtype):
    layer = Float8Linear.from_linear(linear(recipe, dtype), recipe)
    x = numbers(3, 4, IN, dtype=dtype)
    with torch.no_grad():
        y = layer(x)
        assert y.dtype == dtype and y.shape == (3, 4, OUT)
        assert layer(x[0, 0]).shape == (OUT,)
        assert layer(x[:0]).shape == (0, 4, OUT) and layer(x[:0]).dtype == dtype
        if recipe in INFERRED:
            assert torch.equal(layer(x[1, 2]), y[1, 2])
    assert layer.bias is not None and Float8Linear.from_linear(linear(recipe, bias=False), recipe).bias is None


def test_an_empty_batch_has_gradients_of_zeros():
    given = linear("dynamic")
    x = torch.empty(0, IN, requires_grad=True)
    Float8Linear.from_linear(given, "dynamic")(x).sum().backward()
    assert x.grad.shape == (0, IN) and not given.weight.grad.any()


def saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def moved(layer, how):
    return {
        "bfloat16": lambda m: m.to(torch.bfloat16), "half": lambda m: m.half(), "double": lambda m: m.double(),
        "type": lambda m: m.type(torch.float16), "device": lambda m: m.to("cpu"), "copy": copy.deepcopy,
        "file": saved, "inside": lambda m: torch.nn.Sequential(m).to(torch.half)[0],
    }[how](layer)  # fmt: skip


@pytest.mark.parametrize("how", ["bfloat16", "half", "double", "type", "device", "copy", "file", "inside"])
@pytest.mark.parametrize("recipe", ["rows", "blocks", "delayed"])
def test_conversions_and_copies_leave_codes_scales_and_histories(recipe, how):
    layer = Float8Linear.from_linear(linear(recipe), recipe)
    if recipe == "delayed":
        layer(numbers(5, IN))
    before = {name: x.clone() for name, x in layer.named_buffers() if x.numel()}
    after = dict(moved(layer, how).named_buffers())
    for name, x in before.items():
        assert after[name].dtype == x.dtype and torch.equal(bits(after[name]), bits(x)), name
    converted = {"bfloat16": torch.bfloat16, "half": torch.half, "double": torch.double, "type": torch.half}
    if how in converted:
        assert layer.bias.dtype == converted[how]


def test_to_empty_and_meta_keep_dtypes():
    layer = Float8Linear.from_linear(linear("rows"), "rows").to("meta")
    assert layer.weight.is_meta and layer.weight.dtype == torch.float8_e4m3fn
    empty = layer.to_empty(device="cpu")
    assert empty.weight.device.type == "cpu" and empty.weight.dtype == torch.float8_e4m3fn
    with torch.device("meta"):
        given = torch.nn.Linear(IN, OUT)
    assert Float8Linear.from_linear(given.eval()).weight_scale.shape == (OUT, 1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_saved_layer_is_loaded(recipe):
    layer = Float8Linear.from_linear(linear(recipe), recipe)
    x = numbers(5, IN)
    with torch.no_grad():
        layer(x)
    other = Float8Linear(IN, OUT, recipe=recipe).train(layer.training)
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x), layer(x))
    empty = Float8Linear(IN, OUT, device="meta", recipe=recipe).train(layer.training)
    empty.load_state_dict(layer.state_dict(), assign=True)
    names = {"weight", "bias"} | ({"weight_scale"} if recipe in INFERRED else set())
    assert layer.state_dict().keys() == names | (set(HISTORIES) if recipe == "delayed" else set())
    assert bits(empty.weight.detach()).equal(bits(layer.weight.detach()))


@pytest.mark.parametrize("strict", [True, False])
def test_a_plain_weight_is_not_rounded_into_codes(strict):
    given = linear("rows")
    layer = Float8Linear.from_linear(given)
    before = bits(layer.weight).clone()
    with pytest.raises(RuntimeError, match=r"weight is torch.float32; expected torch.float8_e4m3fn.*from_linear"):
        layer.load_state_dict(given.state_dict(), strict=strict)
    assert torch.equal(bits(layer.weight), before)


# --------------------------------------------------------------------------------------------------------- in training


def gradients(layer, x, d_y, weight):
    x = x.clone().requires_grad_()
    weight.grad = layer.bias.grad = None
    y = layer(x)
    y.backward(d_y)
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad.clone(), "bias": layer.bias.grad.clone()}


def in_float64(given, x, d_y):
    wide = copy.deepcopy(given).double()
    return gradients(wide, x.double(), d_y.double(), wide.weight)


def apart(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", TRAINED)
def test_gradients_are_within_the_errors_of_codes(recipe, backend):
    pytest.importorskip({"reference": "numpy", "pallas": "jax"}.get(backend, backend))
    given = linear(recipe)
    layer = Float8Linear.from_linear(given, recipe, backend=backend)
    x, d_y = numbers(48, IN), numbers(48, OUT, seed=2)
    actual, expected = gradients(layer, x, d_y, given.weight), in_float64(given, x, d_y)
    weight = given.weight.detach()
    of_x, of_weight = code_error(x, *x.shape), code_error(weight, *weight.shape)
    of_d_y = code_error(d_y, *d_y.shape, torch.float8_e5m2)
    bounds = {
        "x": product_error(d_y, of_d_y, weight, of_weight, torch.float32),
        "weight": product_error(d_y.T, of_d_y.T, x, of_x, torch.float32),
        "bias": d_y.double().abs().sum(0) * 48 * 2.0**-24,
    }
    for name, bound in bounds.items():
        assert ((actual[name].double() - expected[name]).abs() <= bound).all(), name
    # as e4m3 codes would be, those of gradients are not
    assert ((actual["x"].double() - expected["x"]).abs() > bounds["x"] / 64).any()


@pytest.mark.parametrize("recipe", TRAINED)
def test_errors_are_of_the_size_that_codes_have_and_bfloat16s_are_less(recipe):
    torch.manual_seed(0)
    given = torch.nn.Linear(256, 192).bfloat16()
    x, d_y = torch.randn(128, 256).bfloat16(), torch.randn(128, 192).bfloat16()
    layer = Float8Linear.from_linear(given, recipe)
    exact, plain = in_float64(given, x, d_y), gradients(given, x, d_y, given.weight)
    actual = gradients(layer, x, d_y, given.weight)
    both = {"y": (E4M3_RMS, E4M3_RMS), "x": (E5M2_RMS, E4M3_RMS), "weight": (E5M2_RMS, E4M3_RMS)}
    for name, (a, b) in both.items():
        size = (a**2 + b**2) ** 0.5
        assert 0.8 * size < apart(actual[name], exact[name]) < 1.2 * size, name
        assert apart(plain[name], exact[name]) < 0.1 * size, name
        assert actual[name].dtype == torch.bfloat16
    assert apart(actual["bias"], exact["bias"]) < 2.0**-8


def share_of(actual, expected):
    """What multiplies the expected numbers in the actual ones, which have errors of their own besides."""
    return float((actual.double() * expected.double()).sum() / expected.double().square().sum())


@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_are_no_factor(recipe):
    """Codes are the middles of what they stand for: their errors go with the numbers, and not with the codes, so that a
    share of the errors' square is missing. Else they are of either sign, those of 24576 codes at least."""
    torch.manual_seed(0)
    given = torch.nn.Linear(256, 192, bias=False).train(recipe in TRAINED)
    x, d_y = torch.randn(128, 256, requires_grad=True), torch.randn(128, 192)
    y, exact = Float8Linear.from_linear(given, recipe)(x), given(x)
    size = (2 * E4M3_RMS**2) ** 0.5
    assert 0.8 * size < apart(y.detach(), exact.detach()) < 1.2 * size
    found = [(y.detach(), exact.detach())]
    if recipe in TRAINED:
        found += zip(*(torch.autograd.grad(of, (x, given.weight), d_y) for of in (y, exact)), strict=True)
    for actual, expected in found:
        error = apart(actual, expected)
        chance = 6 * error / 24576**0.5
        assert -(error**2) - chance < share_of(actual, expected) - 1 < chance


def test_scales_of_past_steps():
    given = linear("delayed")
    layer, dynamic = Float8Linear.from_linear(given, "delayed"), Float8Linear.from_linear(given, "dynamic")
    x, d_y = numbers(32, IN), numbers(32, OUT, seed=2)
    # a first step has no past, and takes its own numbers
    first, expected = (gradients(m, x, d_y, given.weight) for m in (layer, dynamic))
    for name, g in first.items():
        assert apart(g, expected[name]) < 1e-3, name
    tops = {"input_history": x, "weight_history": given.weight, "gradient_history": d_y}
    for name, of in tops.items():
        assert getattr(layer, name)[0] == of.abs().max() and not getattr(layer, name)[1:].any()
    # numbers beyond those of the past saturate: what is 8 times as large comes out as the largest before
    beyond = gradients(layer, 8 * x, d_y, given.weight)["y"]
    assert apart(beyond, gradients(dynamic, 8 * x, d_y, given.weight)["y"]) > 0.1
    again = gradients(layer, 8 * x, d_y, given.weight)["y"]
    assert apart(again, gradients(dynamic, 8 * x, d_y, given.weight)["y"]) < 0.06
    assert (layer.input_history[:3] == torch.stack([8 * x.abs().max(), 8 * x.abs().max(), x.abs().max()])).all()
    for _ in range(STEPS):  # the large numbers are forgotten
        layer(x)
    assert layer.input_history.max() == x.abs().max()
    layer.eval()(2 * x)
    assert layer.input_history.max() == x.abs().max()


@pytest.mark.parametrize("recipe", TRAINED)
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_an_overflow_is_seen_and_not_remembered(recipe, number):
    given = linear(recipe)
    layer = Float8Linear.from_linear(given, recipe)
    x, d_y = numbers(8, IN), numbers(8, OUT, seed=2)
    for _ in range(2):
        before = gradients(layer, x, d_y, given.weight)
    d_y[3, 5] = number
    assert not gradients(layer, x, d_y, given.weight)["weight"].isfinite().all()
    x[3, 5] = number
    assert not layer(x).isfinite().all()
    x, d_y = numbers(8, IN), numbers(8, OUT, seed=2)
    after = gradients(layer, x, d_y, given.weight)
    for name, g in after.items():
        assert torch.equal(g, before[name]), name


def test_only_the_gradients_that_are_wanted_are_computed():
    given = linear("dynamic")
    given.weight.requires_grad_(False)
    layer = Float8Linear.from_linear(given, "dynamic")
    seen = []
    with pk.observe(lambda s: seen.append(s.call.spec.name)):
        x = numbers(4, IN).requires_grad_()
        layer(x).sum().backward()
    assert x.grad is not None and given.weight.grad is None
    assert seen.count("scaled_matmul") == 2


# ------------------------------------------------------------------------------------------------- refusals, frameworks


@pytest.mark.parametrize("recipe", INFERRED)
def test_a_layer_for_inference_does_not_train(recipe):
    layer = Float8Linear.from_linear(linear(recipe), recipe)
    x = numbers(5, IN)
    with torch.no_grad():
        expected = layer(x)
    watched = x.clone().requires_grad_()
    y = layer(watched)
    assert torch.equal(y, expected)
    with pytest.raises(pk.UnsupportedError, match="a gradient is wanted of a layer for inference"):
        y.sum().backward()
    layer.train()
    with pytest.raises(pk.UnsupportedError, match="the module is in training.*'dynamic', 'delayed'"):
        layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_says_the_dtype_as_it_does_of_pytorchs(recipe):
    given = linear(recipe)
    layer = Float8Linear.from_linear(given, recipe)
    x = numbers(5, IN).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == given(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32
    if recipe in TRAINED:
        y.sum().backward()
        assert x.grad.dtype == torch.float32 and given.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_compiles_to_one_graph(recipe):
    given = linear(recipe)
    eager, other = (Float8Linear.from_linear(given, recipe) for _ in range(2))
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    x, d_y = numbers(5, IN), numbers(5, OUT, seed=2)
    if recipe in INFERRED:
        with torch.no_grad():
            assert torch.equal(compiled(x), eager(x))
        return
    compiled.bias = other.bias
    for k in range(3):
        found = gradients(compiled, x * 2**k, d_y, given.weight)
        for name, g in gradients(eager, x * 2**k, d_y, given.weight).items():
            assert torch.equal(found[name], g), name
    for name in HISTORIES if recipe == "delayed" else ():
        assert torch.equal(getattr(other, name), getattr(eager, name))


def test_wrong_calls_are_refused_in_words():
    layer = Float8Linear.from_linear(linear("rows"))
    for wrong, error, why in (
        (lambda: layer(torch.zeros(3, IN + 1)), pk.SpecError, r"x is torch.float32 \(3, 257\).* \(..., 256\)"),
        (lambda: layer(torch.zeros(3, IN).double()), pk.SpecError, "x is torch.float64"),
        (lambda: layer(torch.zeros(3, IN).to(torch.float8_e4m3fn)), pk.SpecError, "x is torch.float8_e4m3fn"),
        (lambda: Float8Linear(8, 8, recipe="tensor"), pk.SpecError, "recipe is 'tensor'; expected one of 'rows': inf"),
        (lambda: Float8Linear(200, 8, recipe="blocks"), pk.UnsupportedError, "in_features is 200; .* multiple of 128"),
        (lambda: Float8Linear(0, 8), pk.UnsupportedError, "it is 8 x 0; expected at least 1 x 1"),
        (lambda: Float8Linear.from_linear(linear("rows").double()), pk.UnsupportedError, "weight is torch.float64"),
        (lambda: Float8Linear.from_linear(torch.nn.Identity()), pk.SpecError, "linear is a Identity; expected a torch"),
    ):  # fmt: skip
        with pytest.raises(error, match=why):
            wrong()


def test_what_the_devices_kernels_refuse_is_said(monkeypatch):
    def refused(*_):
        raise pk.UnsupportedError("Triton reads no float8_e4m3fn on sm_80")

    monkeypatch.setattr(float8, "taking", refused)
    with pytest.raises(pk.UnsupportedError, match="Float8Linear: Triton reads no float8_e4m3fn on sm_80"):
        Float8Linear.from_linear(linear("rows"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_tells_what_it_is_and_what_serves_it(recipe):
    layer = Float8Linear.from_linear(linear(recipe), recipe, backend="triton")
    text = f"Float8Linear(in_features=256, out_features=200, bias=True, recipe='{recipe}', backend='triton')"
    assert repr(layer) == text
    explained = layer.explain(numbers(2, 3, IN))
    assert "quantize(" in explained and "scaled_matmul(" in explained and "m=6, k=256, n=200" in explained
    assert "backend: triton" in explained
