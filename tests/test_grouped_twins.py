"""portakern.torch.grouped_mm and portakern.jax.ragged_dot against the frameworks' own functions."""

import inspect

import numpy as np
import pytest

import portakern as pk

BACKENDS = ["reference", "triton", "pallas"]
SIZES = [3, 0, 6, 3]
ROWS, GROUPS, K, N = 14, len(SIZES), 8, 16  # two rows belong to no group
INSIDE = sum(SIZES)


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    return torch


@pytest.fixture
def jax():
    return pytest.importorskip("jax", reason="jax is not installed")


def drawn(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def in_torch(torch, *shapes, grad=False):
    return [torch.tensor(x, requires_grad=grad) for x in drawn(*shapes)]


FORMS = {
    "groups of rows": ((INSIDE, K), (GROUPS, K, N), True),
    "groups of columns": ((GROUPS, N, K), (K, INSIDE), True),
    "a batch": ((GROUPS, N, K), (GROUPS, K, N), False),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_pytorchs_and_so_are_its_gradients(torch, form, backend):
    import portakern.torch as twin

    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    *shapes, ragged = FORMS[form]
    found, kinds = [], (lambda a, b, **how: twin.grouped_mm(a, b, backend=backend, **how),
                        torch.nn.functional.grouped_mm)  # fmt: skip
    for function in kinds:
        a, b = in_torch(torch, *shapes, grad=True)
        offs = torch.tensor(SIZES, dtype=torch.int32).cumsum(0, dtype=torch.int32) if ragged else None
        c = function(a, b, offs=offs)
        c.backward(torch.arange(c.numel(), dtype=torch.float32).view(c.shape) / c.numel())
        found.append((c.detach(), a.grad, b.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_what_belongs_to_no_group_is_zeros_in_torch(torch):
    import portakern.torch as twin

    a, b = in_torch(torch, (ROWS, K), (GROUPS, K, N))
    a[INSIDE:] = torch.nan
    offs = torch.tensor(SIZES).cumsum(0)
    rows = twin.grouped_mm(a, b, offs=offs)
    assert not rows[INSIDE:].any() and rows[:INSIDE].all()
    columns = twin.grouped_mm(b.mT, a.mT, offs=offs)
    assert torch.equal(columns, rows.mT)


def test_the_result_is_rounded_once_to_another_dtype(torch):
    import portakern.torch as twin

    a, b = in_torch(torch, (INSIDE, K), (GROUPS, K, N))
    c = twin.grouped_mm(a.half(), b.half(), offs=torch.tensor(SIZES).cumsum(0), out_dtype=torch.float32)
    assert c.dtype == torch.float32 and not torch.equal(c, c.half().float())


def test_the_twins_take_the_arguments_of_their_originals(torch, jax):
    import portakern.jax
    import portakern.torch

    for mine, theirs, own in (
        (portakern.torch.grouped_mm, torch.nn.functional.grouped_mm, "backend"),
        (portakern.jax.ragged_dot, jax.lax.ragged_dot, "implementation"),
    ):
        try:
            there = inspect.signature(theirs).parameters
        except ValueError:  # a builtin function says its arguments in its text alone
            names = "mat_a, mat_b, *, offs=None, bias=None, out_dtype=None"
            assert f"({names})" in theirs.__doc__
            there = dict.fromkeys(n.split("=")[0] for n in names.split(", ") if n != "*")
        assert [n for n in inspect.signature(mine).parameters if n != own] == [*there]


def refusals(torch):
    a, b = in_torch(torch, (ROWS, K), (GROUPS, K, N))
    offs = torch.tensor(SIZES).cumsum(0)
    spec, unsupported = pk.SpecError, pk.UnsupportedError
    return [
        ((a, b), {}, spec, "offs is None beside a matrix; expected where each group ends"),
        ((b.mT, b), {"offs": offs}, spec, "offs is given beside mat_a and mat_b of 3 axes"),
        ((b.mT, b[:2]), {}, spec, r"shapes \(4, 16, 8\) and \(2, 8, 16\); expected as many groups of both"),
        ((a.mT, a), {"offs": offs}, unsupported, "two matrices.*the backward pass of"),
        ((a, b), {"offs": offs, "bias": a}, unsupported, "bias is given, of shape .14, 8.; it is not served"),
        ((a[0], b), {"offs": offs}, spec, "expected .rows, k. and .groups, k, n."),
        ((a[:, 1:], b), {"offs": offs}, spec, "grouped_mm: .*a is mat_a, b is mat_b and group_ends is offs"),
        ((b.mT, a.mT[1:]), {"offs": offs}, spec, "grouped_mm: .*a is mat_b.mT, b is mat_a.mT"),
        ((a, b), {"offs": offs.float()}, spec, "grouped_mm: .*group_ends"),
    ]


def test_torchs_twin_refuses_in_its_own_words(torch):
    import portakern.torch as twin

    for arrays, options, kind, words in refusals(torch):
        with pytest.raises(kind, match=words):
            twin.grouped_mm(*arrays, **options)


def test_torch_compile_traces_it_whole(torch):
    import portakern.torch as twin

    run = torch.compile(lambda a, b, offs: twin.grouped_mm(a, b, offs=offs), fullgraph=True, backend="aot_eager")
    a, b = in_torch(torch, (ROWS, K), (GROUPS, K, N), grad=True)
    offs = torch.tensor(SIZES).cumsum(0)
    c = run(a, b, offs)
    c.sum().backward()
    assert torch.equal(c, twin.grouped_mm(a, b, offs=offs)) and a.grad[:INSIDE].any() and not a.grad[INSIDE:].any()


@pytest.mark.parametrize("backend", [None, "pallas"])
@pytest.mark.parametrize("sizes", [SIZES, [0, 0, 0, 0], [12, 0, 0, 0]], ids=str)
def test_ragged_dot_is_jaxs_and_so_are_its_gradients(jax, sizes, backend):
    import portakern.jax as twin

    jnp = jax.numpy
    a, b, d_c = map(jnp.asarray, drawn((ROWS, K), (GROUPS, K, N), (ROWS, N)))
    at = jnp.asarray(sizes)

    def both(function, **how):
        c, pull = jax.vjp(lambda a, b: function(a, b, at, **how), a, b)
        return c, *pull(d_c)

    for mine, theirs in zip(both(twin.ragged_dot, implementation=backend), both(jax.lax.ragged_dot), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_ragged_dot_sums_sizes_that_few_bits_hold(jax):
    import portakern.jax as twin

    a, b = map(jax.numpy.asarray, drawn((400, 2), (4, 2, 3)))
    sizes = np.array([100, 100, 100, 100])
    want = twin.ragged_dot(a, b, sizes)
    for dtype in (np.int8, np.uint8, np.uint32):
        assert jax.numpy.array_equal(jax.jit(twin.ragged_dot)(a, b, sizes.astype(dtype)), want)


def test_ragged_dot_takes_jaxs_precisions_and_result_dtypes(jax):
    import portakern.jax as twin

    a, b = (jax.numpy.asarray(x, jax.numpy.bfloat16) for x in drawn((ROWS, K), (GROUPS, K, N)))
    sizes = jax.numpy.asarray(SIZES)
    c = twin.ragged_dot(a, b, sizes, jax.lax.Precision.HIGHEST, preferred_element_type=jax.numpy.float32)
    want = jax.lax.ragged_dot(a, b, sizes, preferred_element_type=jax.numpy.float32)
    assert c.dtype == want.dtype
    np.testing.assert_allclose(c, want, rtol=1e-5, atol=1e-5)


def test_ragged_dot_refuses_in_its_own_words(jax):
    import portakern.jax as twin

    a, b = map(jax.numpy.asarray, drawn((ROWS, K), (GROUPS, K, N)))
    sizes = jax.numpy.asarray(SIZES)
    for arrays, options, words in (
        ((a, b, sizes), {"group_offset": sizes[:1]}, "group_offset is .*expected None: pass"),
        ((a, b, sizes), {"out_sharding": "x"}, "out_sharding is .*jax.shard_map"),
        ((a, b, sizes.astype(float)), {}, "group_sizes is float.*expected integers of shape"),
        ((a, b, sizes[None]), {}, r"of shape \(1, 4\); expected integers of shape"),
        ((a, b[:3], sizes), {}, "ragged_dot: .*a is lhs, b is rhs"),
        ((a, b, sizes), {"precision": "BF16_BF16_F32"}, "ragged_dot: precision is .*TF32_TF32_F32"),
    ):
        with pytest.raises(pk.SpecError, match=words):
            twin.ragged_dot(*arrays, **options)
