"""portakern.torch.scaled_mm beside the product of what codes stand for, by the recipes of PyTorch's own function, which
runs on GPUs alone."""

import inspect

import pytest

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")
functional = torch.nn.functional
if not hasattr(functional, "scaled_mm"):
    pytest.skip("this PyTorch has no scaled_mm", allow_module_level=True)

import portakern.torch as twin  # noqa: E402
from portakern.frameworks.torch import scaled  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
M, N, K = 37, 150, 300
Recipe = functional.ScalingType
T, R, ROW, SQUARE = Recipe.TensorWise, Recipe.RowWise, Recipe.BlockWise1x128, Recipe.BlockWise128x128
BACKENDS = ["reference", "triton", "pallas"]


def operands(dtype_a=E4M3, dtype_b=E5M2):
    made = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=made).to(d) for s, d in (((M, K), dtype_a), ((N, K), dtype_b)))
    return a, b.t()


def scales(recipe, rows, swapped):
    """A scale for each block of an operand of so many rows, of which the second axis is k, and it spread."""
    made = torch.Generator().manual_seed(rows)
    blocks, along = {T: (1, 1), R: (rows, 1), ROW: (rows, 3), SQUARE: (-(-rows // 128), 3)}[recipe], 128
    scale = torch.rand(blocks, generator=made) + 0.5
    spread = scale if recipe is not SQUARE else scale.repeat_interleave(128, 0)[:rows]
    spread = spread if blocks[1] == 1 else spread.repeat_interleave(along, 1)[:, :K]
    return (scale.t(), spread.t()) if swapped else (scale, spread)


def exact(a, b, spread_a, spread_b, bias=None):
    c = (a.double() * spread_a) @ (b.double() * spread_b)
    return c if bias is None else c + bias.double()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pair", [(T, T), (R, R), (ROW, SQUARE), (ROW, ROW), (SQUARE, ROW), (R, SQUARE), (T, R)],
                         ids=lambda p: f"{p[0].name} {p[1].name}")  # fmt: skip
def test_recipes_are_the_product_of_what_codes_stand_for(pair, backend):
    pytest.importorskip({"reference": "numpy", "pallas": "jax"}.get(backend, backend))
    a, b = operands()
    (of_a, spread_a), (of_b, spread_b) = scales(pair[0], M, False), scales(pair[1], N, True)
    bias = torch.randn(N)
    try:
        c = twin.scaled_mm(a, b, of_a, pair[0], of_b, pair[1], bias=bias, output_dtype=torch.float32, backend=backend)
    except pk.UnsupportedError as e:
        assert backend == "pallas", e
        pytest.skip(str(e))
    torch.testing.assert_close(c.double(), exact(a, b, spread_a, spread_b, bias), rtol=2e-3, atol=2e-2)


def test_what_callers_of_pytorchs_pass_besides():
    a, b = operands(E4M3, E4M3)
    of_a, of_b = scales(ROW, M, False)[0], scales(SQUARE, N, True)[0]
    want = twin.scaled_mm(a, b, of_a, ROW, of_b, SQUARE, output_dtype=torch.float32)
    padded = torch.nn.functional.pad(of_b, (0, 0, 0, 1), value=float("nan"))
    none = functional.SwizzleType.NO_SWIZZLE
    for more in (
        {"scale_b": padded.t().contiguous().t()}, {"scale_a": [of_a], "scale_recipe_a": [ROW]},
        {"swizzle_a": none, "swizzle_b": [none]}, {"contraction_dim": (1, 0)}, {"contraction_dim": [-1, -2]},
    ):  # fmt: skip
        given = {"scale_a": of_a, "scale_recipe_a": ROW, "scale_b": of_b, "scale_recipe_b": SQUARE} | more
        assert torch.equal(twin.scaled_mm(a, b, output_dtype=torch.float32, **given), want)
    assert twin.scaled_mm(a, b, torch.tensor(2.0), T, torch.ones(1), T).dtype == torch.bfloat16
    bias = torch.ones(N, dtype=torch.bfloat16)
    with_bias = twin.scaled_mm(a, b, of_a, ROW, of_b, SQUARE, bias=bias, output_dtype=torch.float32)
    torch.testing.assert_close(with_bias, want + 1)


@pytest.mark.parametrize(("fast", "precision"), [(False, "promoted"), (True, "fast")])
def test_fast_sums_are_fast(fast, precision, monkeypatch):
    asked = []
    kept_op = scaled.kept_op
    monkeypatch.setattr(
        scaled, "kept_op", lambda *w: lambda *a, **options: (asked.append(options), kept_op(*w)(*a, **options))[1]
    )
    a, b = operands()
    twin.scaled_mm(a, b, torch.ones(()), T, torch.ones(()), T, use_fast_accum=fast)
    assert [options["precision"] for options in asked] == [precision]


def test_it_has_pytorchs_arguments():
    own, theirs = (inspect.signature(f).parameters for f in (twin.scaled_mm, functional.scaled_mm))
    assert [*own] == [*theirs, "backend"]
    for name, parameter in theirs.items():
        assert own[name].default == parameter.default, name


def test_wrong_calls_are_refused_in_words():
    a, b = operands()
    one, rows, refused = torch.ones(()), torch.ones(M, 1), pk.UnsupportedError
    for wrong, error, why in (
        (lambda: twin.scaled_mm(a, b, one, Recipe.BlockWise1x32, one, T), pk.UnsupportedError, "with k_width=32"),
        (lambda: twin.scaled_mm(a, b, one, "rows", one, T), pk.SpecError, "scale_recipe_a is 'rows'; expected one of"),
        (lambda: twin.scaled_mm(a, b, rows, T, one, T), pk.SpecError, r"scale_a has shape .*; expected one number"),
        (lambda: twin.scaled_mm(a, b, rows, R, rows, R), pk.SpecError, r"scale_b has shape .*; expected \(1, 150\)"),
        (lambda: twin.scaled_mm(a, b, one.double(), T, one, T), pk.SpecError, "scale_a is torch.float64"),
        (lambda: twin.scaled_mm(a, b, [one, one], T, one, T), pk.UnsupportedError, "a list of 2; expected one"),
        (lambda: twin.scaled_mm(a, b, one, T, one, T, functional.SwizzleType.SWIZZLE_32_4_4), pk.UnsupportedError,
         "no kernel reads swizzled"),
        (lambda: twin.scaled_mm(a, b, one, T, one, T, output_dtype=None), pk.UnsupportedError, "output_dtype is None"),
        (lambda: twin.scaled_mm(a, b, one, T, one, T, contraction_dim=(0, 1)), refused, "contraction_dim is"),
        (lambda: twin.scaled_mm(a[0], b, one, T, one, T), pk.SpecError, "mat_a has shape"),
        (lambda: twin.scaled_mm(a, b[:5], one, T, one, T), pk.SpecError, "a is mat_a, b is mat_b"),
    ):  # fmt: skip
        with pytest.raises(error, match=why):
            wrong()


# ------------------------------------------------------------------------------------------------------- groups of rows
ENDS = torch.tensor([5, 5, 30], dtype=torch.int32)  # a group without rows, and seven rows of none


def experts():
    made = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=made).to(d) for s, d in (((M, K), E4M3), ((3, N, K), E5M2)))
    return a, b.mT


def scales_of_groups(recipe):
    """A scale for each block of three matrices, and it spread."""
    each = [scales(recipe, N, True) for _ in range(3)]
    scale, spread = (torch.stack([pair[i] for pair in each]) for i in (0, 1))
    factor = torch.arange(1.0, 4.0)[:, None, None]
    scale, spread = scale * factor, spread * factor
    return {T: scale.flatten(), R: scale[:, 0] if recipe is R else scale}.get(recipe, scale), spread


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pair", [(R, R), (T, T), (ROW, SQUARE), (R, ROW)], ids=lambda p: f"{p[0].name} {p[1].name}")
def test_each_group_is_the_product_of_what_its_codes_stand_for(pair, backend):
    pytest.importorskip({"reference": "numpy", "pallas": "jax"}.get(backend, backend))
    a, b = experts()
    (of_a, spread_a), (of_b, spread_b) = scales(pair[0], M, False), scales_of_groups(pair[1])
    bias = torch.randn(3, N)
    of_a = of_a[:, 0] if pair[0] is R else of_a
    c = twin.scaled_grouped_mm(a, b, of_a, pair[0], of_b, pair[1], bias=bias, offs=ENDS, output_dtype=torch.float32,
                               backend=backend)  # fmt: skip
    start = 0
    for g, end in enumerate(ENDS.tolist()):
        part = spread_a if len(spread_a) == 1 else spread_a[start:end]
        want = exact(a[start:end], b[g], part, spread_b[g], bias[g])
        torch.testing.assert_close(c[start:end].double(), want, rtol=2e-3, atol=5e-2)
        start = end
    assert not c[start:].any()


def test_groups_take_what_callers_of_pytorchs_pass_besides():
    own, theirs = (inspect.signature(f).parameters for f in (twin.scaled_grouped_mm, functional.scaled_grouped_mm))
    assert [*own] == [*theirs, "backend"]
    assert all(own[name].default == parameter.default for name, parameter in theirs.items())
    a, b = experts()
    (of_a, _), (of_b, _) = scales(ROW, M, False), scales_of_groups(SQUARE)
    want = twin.scaled_grouped_mm(a, b, of_a, ROW, of_b, SQUARE, offs=ENDS)
    padded = torch.nn.functional.pad(of_b, (0, 0, 0, 1), value=float("nan"))
    assert torch.equal(twin.scaled_grouped_mm(a, b, [of_a], [ROW], padded, [SQUARE], offs=ENDS.long()), want)
    rows = twin.scaled_grouped_mm(a, b, torch.ones(M, 1), R, torch.ones(3, 1, N), R, offs=ENDS)
    assert torch.equal(twin.scaled_grouped_mm(a, b, torch.ones(M), R, torch.ones(3, N), R, offs=ENDS), rows)


def test_wrong_calls_of_groups_are_refused_in_words():
    a, b = experts()
    one, rows, columns = torch.ones(()), torch.ones(M), torch.ones(3, N)

    def call(*given, offs=ENDS, **options):
        return twin.scaled_grouped_mm(*given, offs=offs, **options)

    for wrong, error, why in (
        (lambda: call(a, b[0], rows, R, columns, R), pk.UnsupportedError, r"expected \(rows, k\) and \(groups, k, n\)"),
        (lambda: call(a, b, rows, R, columns, R, offs=None), pk.SpecError, "offs is None; expected where each"),
        (lambda: call(a, b, one, SQUARE, columns, R), pk.UnsupportedError, "scale_recipe_a is BlockWise128x128"),
        (lambda: call(a, b, rows, R, columns, Recipe.BlockWise1x32), pk.UnsupportedError,
         'op."scaled_grouped_matmul". with k_width=32'),
        (lambda: call(a, b, rows, R, columns[:2], R), pk.SpecError, r"scale_b has shape \(2, 150\); .* \(3, 150\)"),
        (lambda: call(a, b, rows, T, columns, R), pk.SpecError, r"scale_a has shape \(37,\); expected one number"),
        (lambda: call(a, b, one, T, torch.ones(2), T), pk.SpecError, r"scale_b has shape \(2,\); expected \(3,\)"),
        (lambda: call(a, b, rows, R, columns, R, output_dtype=None), pk.UnsupportedError, "output_dtype is None"),
        (lambda: call(a, b, rows, R, columns, R, offs=ENDS[:2]), pk.SpecError, "group_ends is offs"),
    ):  # fmt: skip
        with pytest.raises(error, match=why):
            wrong()
