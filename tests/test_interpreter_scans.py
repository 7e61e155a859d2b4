"""Scans, sorts and reductions with places in Triton's interpreter, beside NumPy's; compiled, they are Triton's own."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402

from portakern.backends.triton import interpreter  # noqa: E402

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SHAPE = (4, 8, 16)


@triton.jit
def tile_of(x, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr):
    """Where the elements of an (a, b, c) array of x lie."""
    return x + (tl.arange(0, a)[:, None, None] * b + tl.arange(0, b)[None, :, None]) * c + tl.arange(0, c)


@triton.jit
def sums_kernel(x, y, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, axis: tl.constexpr, reverse: tl.constexpr):
    values = tl.cumsum(tl.load(tile_of(x, a, b, c)), axis, reverse=reverse)
    tl.store(tile_of(y, a, b, c), values.to(y.dtype.element_ty))


@triton.jit
def products_kernel(x, y, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, axis: tl.constexpr, reverse: tl.constexpr):
    values = tl.load(tile_of(x, a, b, c)).cumprod(axis, reverse=reverse)
    tl.store(tile_of(y, a, b, c), values.to(y.dtype.element_ty))


@triton.jit
def after(a1, b1, a2, b2):
    """First z a1 + b1, then z a2 + b2: associative, and not commutative."""
    return a1 * a2, a2 * b1 + b2


@triton.jit
def recurrence_kernel(
    a, b, h, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr, axis: tl.constexpr, reverse: tl.constexpr
):
    pair = tl.load(tile_of(a, m, n, k)), tl.load(tile_of(b, m, n, k))
    tl.store(tile_of(h, m, n, k), tl.associative_scan(pair, axis, after, reverse=reverse)[1])


@triton.jit
def greatest_since_a_start(x1, s1, x2, s2):
    """Segments: s is whether one starts here. The logical operators meet scalars when compiled."""
    return tl.where((not s2) and (x1 > x2), x1, x2), s1 or s2


@triton.jit
def segments_kernel(x, starts, y, n: tl.constexpr):
    at = tl.arange(0, n)
    pair = tl.load(x + at), tl.load(starts + at) != 0
    tl.store(y + at, tl.associative_scan(pair, 0, greatest_since_a_start)[0])


@triton.jit
def sort_kernel(x, y, m: tl.constexpr, n: tl.constexpr, descending: tl.constexpr):
    at = tl.arange(0, m)[:, None] * n + tl.arange(0, n)
    tl.store(y + at, tl.sort(tl.load(x + at), descending=descending))


@triton.jit
def topk_kernel(x, y, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr):
    row = tl.arange(0, m)[:, None]
    values = tl.topk(tl.load(x + row * n + tl.arange(0, n)), k)
    tl.store(y + row * k + tl.arange(0, k), values.to(y.dtype.element_ty))


@triton.jit
def places_kernel(x, top, place, m: tl.constexpr, n: tl.constexpr, axis: tl.constexpr, least: tl.constexpr):
    values = tl.load(x + tl.arange(0, m)[:, None] * n + tl.arange(0, n))
    if least:
        t, i = tl.min(values, axis, return_indices=True, keep_dims=True)
        same = tl.argmin(values, axis)
    else:
        t, i = tl.max(values, axis, return_indices=True, keep_dims=True)
        same = values.argmax(axis)
    kept: tl.constexpr = m * n // values.shape[axis]
    tl.device_assert(tl.reshape(i, [kept]) == same)
    tl.store(top + tl.arange(0, kept), tl.reshape(t, [kept]).to(top.dtype.element_ty))
    tl.store(place + tl.arange(0, kept), same)


@triton.jit
def any_place_kernel(x, place, m: tl.constexpr, n: tl.constexpr):
    values = tl.load(x + tl.arange(0, m)[:, None] * n + tl.arange(0, n))
    tl.store(place + tl.arange(0, m), tl.argmax(values, 1, tie_break_left=False))


def numbers(dtype: torch.dtype, shape: tuple[int, ...], most: int = 8, seed: int = 0) -> torch.Tensor:
    """Small integers, with many ties: their sums are exact in every dtype."""
    draw: Any = torch.Generator().manual_seed(seed)
    least = 0 if dtype == torch.uint8 else -most
    return torch.randint(least, most + 1, shape, generator=draw).to(dtype)


def like_numpy(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy() if x.is_floating_point() else x.numpy()


def flipped(x: np.ndarray, axis: int, reverse: bool) -> np.ndarray:
    return np.flip(x, axis) if reverse else x


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_sums_of_prefixes_and_suffixes(dtype, axis, reverse):
    x = numbers(dtype, SHAPE)
    y = torch.zeros(SHAPE, dtype=dtype if dtype.is_floating_point else torch.int64)
    interpreter.run(sums_kernel, 1, x, y, *SHAPE, axis, reverse)
    expected = flipped(np.cumsum(flipped(like_numpy(x), axis, reverse), axis), axis, reverse)
    np.testing.assert_array_equal(like_numpy(y), expected)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32], ids=str)
def test_products_of_prefixes_and_suffixes(dtype, axis, reverse):
    draw: Any = torch.Generator().manual_seed(1)
    x = torch.tensor([-1, 1, 1, 2])[torch.randint(0, 4, SHAPE, generator=draw)].to(dtype)
    y = torch.zeros_like(x)
    interpreter.run(products_kernel, 1, x, y, *SHAPE, axis, reverse)
    expected = flipped(np.cumprod(flipped(like_numpy(x), axis, reverse), axis), axis, reverse)
    np.testing.assert_array_equal(like_numpy(y), expected)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_combiner_that_does_not_commute_keeps_its_order(axis, reverse):
    """h_t = a_t h_(t-1) + b_t."""
    draw = np.random.default_rng(2)
    a, b = draw.uniform(-1, 1, SHAPE), draw.normal(size=SHAPE)
    h = torch.zeros(SHAPE, dtype=torch.float64)
    interpreter.run(recurrence_kernel, 1, torch.from_numpy(a), torch.from_numpy(b), h, *SHAPE, axis, reverse)
    state, expected = 0.0, []
    for a_t, b_t in zip(*(flipped(np.moveaxis(v, axis, 0), 0, reverse) for v in (a, b)), strict=True):
        state = a_t * state + b_t
        expected.append(state)
    np.testing.assert_allclose(np.moveaxis(h.numpy(), axis, 0), flipped(np.array(expected), 0, reverse), rtol=1e-12)


def test_logical_operators_of_a_combiner_work_element_by_element():
    x, n = numbers(torch.float32, (64,), seed=3), 64
    starts = (torch.arange(n) % 7 == 3).to(torch.int32)
    y = torch.zeros(n)
    interpreter.run(segments_kernel, 1, x, starts, y, n)
    top, expected = -np.inf, []
    for value, start in zip(x.tolist(), starts.tolist(), strict=True):
        top = value if start else max(top, value)
        expected.append(top)
    assert y.tolist() == expected


@triton.jit
def wider(a, b):
    return (a + b).to(tl.float64)


@triton.jit
def wider_kernel(x, y, n: tl.constexpr):
    tl.store(y + tl.arange(0, n), tl.associative_scan(tl.load(x + tl.arange(0, n)), 0, wider))


def test_a_combiner_of_another_dtype_is_refused():
    """As a compiler refuses it."""
    with pytest.raises(TypeError, match=r"wider combines \['fp32'\] into \['fp64'\]: convert its results"):
        interpreter.run(wider_kernel, 1, torch.ones(8), torch.ones(8), 8)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_sorts(dtype, descending):
    x = numbers(dtype, (4, 32), most=100, seed=4)
    y = torch.zeros_like(x)
    interpreter.run(sort_kernel, 1, x, y, 4, 32, descending)
    assert torch.equal(y, torch.sort(x, descending=descending).values)


@pytest.mark.parametrize("k", [1, 4, 32])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32], ids=str)
def test_the_greatest_in_order(dtype, k):
    x = numbers(dtype, (4, 32), most=100, seed=5)
    y = torch.zeros(4, k, dtype=dtype)
    interpreter.run(topk_kernel, 1, x, y, 4, 32, k)
    assert torch.equal(y, torch.topk(x, k).values)


@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_of_ties_the_first_place_is_found(dtype, axis, least):
    x = numbers(dtype, (8, 16), most=2, seed=6)
    kept = 16 if axis == 0 else 8
    top, place = torch.zeros(kept, dtype=dtype), torch.zeros(kept, dtype=torch.int32)
    interpreter.run(places_kernel, 1, x, top, place, 8, 16, axis, least)
    v = like_numpy(x)
    np.testing.assert_array_equal(like_numpy(top), (np.min if least else np.max)(v, axis))
    np.testing.assert_array_equal(place.numpy(), (np.argmin if least else np.argmax)(v, axis))


def test_without_an_order_of_ties_any_of_them_is_found():
    x, place = numbers(torch.float32, (64, 16), most=1, seed=7), torch.zeros(64, dtype=torch.int32)
    interpreter.run(any_place_kernel, 1, x, place, 64, 16)
    found = x[torch.arange(64), place.long()]
    assert torch.equal(found, x.amax(1))
    assert not torch.equal(place.long(), x.argmax(1)), "nothing here tells it from tie_break_left"


def test_a_nan_is_greater_than_nothing():
    """tl.max passes it over. The place of a NaN hangs on the order of combinations, and is a place."""
    x, place = torch.ones(4, 16), torch.zeros(4, dtype=torch.int32)
    x[0, 3], x[1] = torch.nan, torch.nan
    top = torch.zeros(4)
    interpreter.run(greatest_kernel, 1, x, top, 4, 16)
    assert top[[0, 2, 3]].tolist() == [1, 1, 1] and bool(top[1].isnan())
    interpreter.run(any_place_kernel, 1, x, place, 4, 16)
    assert bool(((place >= 0) & (place < 16)).all())


@triton.jit
def greatest_kernel(x, top, m: tl.constexpr, n: tl.constexpr):
    values = tl.load(x + tl.arange(0, m)[:, None] * n + tl.arange(0, n))
    tl.store(top + tl.arange(0, m), tl.max(values, 1))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
def test_sums_of_small_integers_are_of_32_bits(dtype):
    x, y = numbers(dtype, (256,), most=100, seed=8), torch.zeros(1, dtype=torch.int32)
    interpreter.run(sum_kernel, 1, x, y, 256)
    assert y.item() == x.long().sum().item()


@triton.jit
def sum_kernel(x, y, n: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, n)), 0))


def test_a_sum_in_a_16_bit_float_is_refused():
    with pytest.raises(NotImplementedError, match="sum of fp16: convert it to float32 first"):
        interpreter.run(sum_kernel, 1, torch.ones(8, dtype=torch.float16), torch.zeros(1), 8)


SIZES = dict(zip("abc", SHAPE, strict=True))
COMPILED = [
    (sums_kernel, {"x": "*fp32", "y": "*fp32"}, {**SIZES, "axis": 1, "reverse": True}),
    (products_kernel, {"x": "*bf16", "y": "*bf16"}, {**SIZES, "axis": 0, "reverse": False}),
    (recurrence_kernel, dict.fromkeys("abh", "*fp32"), {"m": 4, "n": 8, "k": 16, "axis": 2, "reverse": True}),
    (segments_kernel, {"x": "*fp32", "starts": "*i32", "y": "*fp32"}, {"n": 64}),
    (sort_kernel, {"x": "*fp16", "y": "*fp16"}, {"m": 4, "n": 32, "descending": True}),
    (topk_kernel, {"x": "*fp32", "y": "*fp32"}, {"m": 4, "n": 32, "k": 4}),
    (
        places_kernel,
        {"x": "*bf16", "top": "*bf16", "place": "*i32"},
        {"m": 8, "n": 16, "axis": 1, "least": False},
    ),
    (any_place_kernel, {"x": "*fp32", "place": "*i32"}, {"m": 8, "n": 16}),
]


@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=["sm_90", "gfx942"])
@pytest.mark.parametrize(("kernel", "pointers", "sizes"), COMPILED, ids=lambda v: getattr(v, "__name__", ""))
def test_what_is_interpreted_compiles(kernel, pointers, sizes, target):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {**pointers, **dict.fromkeys(sizes, "constexpr")}
    compiled = compile(ASTSource(kernel, signature, constexprs=sizes), target=GPUTarget(*target))
    assert compiled.asm["ptx" if target[0] == "cuda" else "amdgcn"]
