"""What only a GPU can show: compiled and interpreted calls side by side, DLPack between frameworks, more than 2^31 elements, strides past 2^31."""

import numpy as np
import pytest

import portakern as pk
from portakern import testing

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA or AMD GPU")
large = pytest.mark.xdist_group("large")  # tens of GiB each: `--dist loadgroup` runs them one after another

BIG = 2**31


def normal(*shape, dtype=torch.float32, device="cuda"):
    return torch.randn(*shape, dtype=torch.float32, device=device).to(dtype)


def within_bound(op, outputs, *args, **options):
    """Hold outputs to the bound of the call on ``args``; returns the worst fraction."""
    call = pk.op(op).bind(*args, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return max(testing.compare_call(call, [call.framework.to_numpy(o) for o in outputs]).values())


def rows_to_sample(rows, row_length):
    """First, last, both sides of element 2^31, and 64 at random."""
    edge = BIG // row_length
    chosen = {0, rows - 1, edge - 1, edge, *np.random.default_rng(0).integers(0, rows, 64).tolist()}
    return torch.tensor(sorted(r for r in chosen if r < rows), device="cuda")


def test_gpu_tensors_are_compiled_and_cpu_tensors_interpreted_in_one_process():
    served = []
    with pk.observe(served.append):
        for device in ("cuda", "cpu", "cuda", "cpu"):
            x = normal(5, 300, dtype=torch.bfloat16, device=device)
            y = pk.op("softmax", backend="triton")(x)
            assert y.device == x.device and within_bound("softmax", y, x) <= 1
    assert [s.interpret for s in served] == [False, True, False, True]
    assert pk.op("softmax")(normal(3, 4)).is_cuda


def test_a_jax_gpu_array_is_refused_by_itself_and_served_when_named(monkeypatch):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("this jax has no GPU support")
    x = jax.numpy.asarray(np.random.default_rng(0).standard_normal((4, 200)), jax.numpy.bfloat16)
    for op in (pk.op("softmax"), pk.op("softmax", backend="pallas")):
        with pytest.raises(pk.UnsupportedError, match="nothing for cuda yet.*triton"):
            op(x)
    y = pk.op("softmax", backend="triton")(x)
    assert isinstance(y, jax.Array) and y.dtype == x.dtype and y.devices() == x.devices()
    assert within_bound("softmax", y, x) <= 1


def test_the_oracle_takes_gpu_tensors_when_named():
    x = normal(4, 9)
    y = pk.op("softmax", backend="reference")(x)
    assert y.is_cuda and within_bound("softmax", y, x) <= 1


def test_float64_is_refused_when_compiled():
    with pytest.raises(pk.UnsupportedError, match="float64"):
        pk.op("softmax")(normal(3, 4).double())


@large
def test_grids_beyond_65535():
    x = normal(70000 * 16, 8)
    pick = torch.tensor([0, 65534, 65535, 65536, 70000 * 16 - 1], device="cuda")
    assert within_bound("softmax", pk.op("softmax", tiling={"block_rows": 1})(x)[pick], x[pick]) <= 1
    a, b = normal(70000, 2, 3), normal(70000, 3, 2)
    assert within_bound("matmul", pk.op("matmul")(a, b)[-3:], a[-3:], b[-3:]) <= 1
    q = normal(70000, 2, 1, 16)
    assert within_bound("attention", pk.op("attention")(q, q, q)[-3:], *[q[-3:]] * 3) <= 1


@large
@pytest.mark.parametrize("op", ["softmax", "layernorm", "rmsnorm"])
def test_rows_past_two_to_the_31_elements(op):
    rows, n = 2**23 + 16, 256
    x = torch.randn(rows, n, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > BIG
    pick = rows_to_sample(rows, n)
    assert within_bound(op, pk.op(op)(x)[pick], x[pick]) <= 1


@large
def test_matmul_past_two_to_the_31_elements():
    rows, k = 2**22 + 16, 512
    a, b = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda"), normal(k, 24, dtype=torch.bfloat16)
    assert a.numel() > BIG
    pick = rows_to_sample(rows, k)
    assert within_bound("matmul", pk.op("matmul")(a, b)[pick], a[pick], b) <= 1
    wide = torch.randn(24, 2**27 + 16, dtype=torch.bfloat16, device="cuda")  # 3.2e9 elements of output
    c = pk.op("matmul")(b.T[:, :24].contiguous(), wide)
    assert c.numel() > BIG
    columns = rows_to_sample(wide.shape[1], 24)
    assert (
        within_bound("matmul", c[:, columns].contiguous(), b.T[:, :24].contiguous(), wide[:, columns].contiguous()) <= 1
    )


@large
def test_attention_past_two_to_the_31_elements():
    length, heads, d, left = 2**18 + 64, 64, 128, 63
    q, k, v = (torch.randn(1, length, heads, d, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    assert q.numel() > BIG
    o = pk.op("attention")(q, k, v, is_causal=True, window=(left, 0))
    for i in rows_to_sample(length, heads * d).tolist():
        keys = slice(max(i - left, 0), i + 1)
        part = (q[:, i : i + 1], k[:, keys], v[:, keys])
        assert within_bound("attention", o[:, i : i + 1].contiguous(), *(t.contiguous() for t in part)) <= 1


def sampled(x, pick):
    """Zero but for the rows ``pick``, which are random: cotangents whose sums over all rows are sums over these."""
    d = torch.zeros_like(x)
    d[pick] = normal(len(pick), *x.shape[1:], dtype=x.dtype)
    return d


@large
@pytest.mark.parametrize("op", ["softmax_vjp", "layernorm_vjp", "rmsnorm_vjp"])
def test_gradients_of_rows_past_two_to_the_31_elements(op):
    rows, n = 2**23 + 16, 256
    pick = rows_to_sample(rows, n)
    x = torch.randn(rows, n, dtype=torch.bfloat16, device="cuda")
    if op == "softmax_vjp":
        x = pk.op("softmax")(x)
    d_y, rest = sampled(x, pick), () if op == "softmax_vjp" else (normal(n, dtype=torch.bfloat16),)
    d_x, *sums = outputs if isinstance(outputs := pk.op(op)(x, d_y, *rest), tuple) else (outputs,)
    assert d_x.numel() > BIG
    assert within_bound(op, (d_x[pick], *(s for s in sums if s is not None)), x[pick], d_y[pick], *rest) <= 1


@large
def test_gradients_of_matmul_past_two_to_the_31_elements():
    rows, k = 2**22 + 16, 512
    pick = rows_to_sample(rows, k)
    a, b = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda"), normal(k, 24, dtype=torch.bfloat16)
    d_c = sampled(a[:, :24], pick)
    d_a, d_b = pk.op("matmul_vjp")(a, b, d_c)
    assert d_a.numel() > BIG
    assert within_bound("matmul_vjp", (d_a[pick], d_b), a[pick], b, d_c[pick]) <= 1


@large
def test_gradients_of_attention_past_two_to_the_31_elements():
    length, heads, d, left = 2**18 + 64, 64, 128, 63
    q, k, v = (torch.randn(1, length, heads, d, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    band = {"is_causal": True, "window": (left, 0)}
    o, lse = pk.op("attention")(q, k, v, return_lse=True, **band)
    edge = BIG // (heads * d)
    pick = torch.tensor([0, *range(left + 1, edge - 2 * left, edge // 61), edge - 1, length - 1], device="cuda")
    assert pick.diff().min() > left  # no key meets two of them
    d_o = sampled(q[0], pick)[None]
    d_q, d_k, d_v = pk.op("attention_vjp")(q, k, v, o, lse, d_o, **band)[:3]
    assert d_k.numel() > BIG
    for i in pick.tolist():
        row, keys = slice(i, i + 1), slice(max(i - left, 0), i + 1)
        part = (q[:, row], k[:, keys], v[:, keys], o[:, row], lse[..., row], d_o[:, row])
        gradients = (d_q[:, row], d_k[:, keys], d_v[:, keys])
        assert (
            within_bound("attention_vjp", tuple(t.contiguous() for t in gradients), *(t.contiguous() for t in part))
            <= 1
        )


def far(shape, dtype=torch.bfloat16):
    """A small view whose first stride is 2^30 elements, so that its last rows lie past 2^31."""
    memory = torch.empty(2**30 * (shape[0] - 1) + 2**20, dtype=dtype, device="cuda")
    strides, step = [], 1
    for extent in reversed(shape[1:]):
        strides.append(step)
        step *= extent
    view = memory.as_strided(shape, (2**30, *reversed(strides)))
    view.copy_(torch.randn(shape, device="cuda"))
    assert (shape[0] - 1) * view.stride(0) >= BIG
    return view


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d, dv", [(19, 13), (64, 16), (100, 7), (13, 64)])
@pytest.mark.parametrize("tiling", [None, {"block_q": 128, "block_kv": 64, "num_warps": 4, "num_stages": 1}])
def test_value_heads_unlike_query_heads(d, dv, dtype, tiling):
    """Code of ptxas 12.8 for them read the wrong values past the 16th key, or left shared memory."""
    q, k, v = normal(2, 70, 4, d, dtype=dtype), normal(2, 300, 2, d, dtype=dtype), normal(2, 300, 2, dv, dtype=dtype)
    for options in (
        {},
        {"is_causal": True, "window": (30, 0)},
        {"softcap": 3.0, "bias": normal(2, 1, 1, 600)[..., ::2]},
    ):
        o = pk.op("attention", backend="triton", tiling=tiling)(q, k, v, **options)
        assert within_bound("attention", o, q, k, v, **options) <= 1


@large
def test_strides_past_two_to_the_31():
    x = far((4, 300))
    for op, args in {
        "softmax": (x,),
        "layernorm": (x,),
        "rmsnorm": (x,),
        "matmul": (x, normal(300, 20, dtype=torch.bfloat16)),
    }.items():
        assert within_bound(op, pk.op(op)(*args), *args) <= 1
    q = far((4, 33, 2, 64))
    assert within_bound("attention", pk.op("attention")(q, q, q), q, q, q) <= 1
    columns = far((4, 300)).T  # the far stride innermost
    assert within_bound("softmax", pk.op("softmax")(columns), columns) <= 1


@large
def test_strides_of_gradients_past_two_to_the_31():
    x, d_y, weight = far((4, 300)), far((4, 300)), normal(300, dtype=torch.bfloat16)
    operands = {"softmax_vjp": (x, d_y), "layernorm_vjp": (x, d_y, weight, weight), "rmsnorm_vjp": (x, d_y, weight)}
    operands["matmul_vjp"] = (x, normal(300, 20, dtype=torch.bfloat16), d_y[:, :20])
    for op, args in operands.items():
        assert within_bound(op, pk.op(op)(*args), *args) <= 1
    del x, d_y, operands, args
    q, near, d_o, lse = (
        far((4, 33, 2, 64)),
        normal(4, 33, 2, 64, dtype=torch.bfloat16),
        far((4, 33, 2, 64)),
        far((4, 2, 33), torch.float32),
    )
    for args in ((q, near, near), (near, q, q)):
        o, of_rows = pk.op("attention")(*args, return_lse=True)
        args = (*args, d_o.copy_(o), lse.copy_(of_rows), d_o)  # one far buffer is both o and its cotangent
        assert within_bound("attention_vjp", pk.op("attention_vjp")(*args)[:3], *args) <= 1


def test_inference_of_dispatch_is_per_device():
    op = pk.op("softmax")
    op(normal(2, 3))
    op(normal(2, 3, device="cpu"))
    assert {r.target.platform for r in op._routes.values()} == {"cuda", "cpu"}
    assert pk.op("softmax").backend is None
