"""portakern.torch.varlen_attn against each sequence by itself, and against what PyTorch declares of its own.

PyTorch's runs on GPUs alone, so that its values are not there to compare with.
"""

import inspect
from typing import NamedTuple

import pytest

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")

import portakern.torch as twin  # noqa: E402

BACKENDS = ["reference", "triton", "pallas"]
Q_LENS, KV_LENS = [3, 0, 7, 1], [5, 4, 7, 6]
WINDOWS = [(-1, -1), (-1, 0), (2, 0), (-1, 3), (1, 2)]


class AuxRequest(NamedTuple):
    """What torch.nn.attention.varlen has by this name, also where torch is older than that."""

    lse: bool = False


def starts(lens, dtype=torch.int32):
    return torch.tensor([0, *lens], dtype=dtype).cumsum(0, dtype=dtype)


def packed(heads=4, kv_heads=2, d=8, dtype=torch.float32, grad=False):
    torch.manual_seed(0)
    shapes = (sum(Q_LENS), heads), (sum(KV_LENS), kv_heads), (sum(KV_LENS), kv_heads)
    return [torch.randn(*shape, d, dtype=dtype, requires_grad=grad) for shape in shapes]


def hints():
    """cu_seq_q, cu_seq_k, max_q, max_k."""
    return starts(Q_LENS), starts(KV_LENS), max(Q_LENS), max(KV_LENS)


def spans(used=KV_LENS):
    q, kv = starts(Q_LENS).tolist(), starts(KV_LENS).tolist()
    return [(slice(a, b), slice(c, c + n)) for a, b, c, n in zip(q, q[1:], kv, used, strict=False)]


def allowed(rows, keys, window):
    """PyTorch's words: (left, right) about the query's own place, the last query at the last key, -1 without an end."""
    left, right = window
    place = torch.arange(rows)[:, None] + keys - rows
    key = torch.arange(keys)[None]
    return ((left < 0) | (key >= place - left)) & ((right < 0) | (key <= place + right))


def each_alone(q, k, v, window=(-1, -1), used=KV_LENS, scale=None):
    """The formula on each sequence, differentiable: o and lse."""
    group = q.shape[1] // k.shape[1]
    o, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full((q.shape[1], len(q)), -torch.inf)
    for rows, keys in spans(used):
        x, y, z = q[rows], k[keys].repeat_interleave(group, 1), v[keys].repeat_interleave(group, 1)
        s = torch.einsum("qhd,khd->hqk", x, y) * (q.shape[2] ** -0.5 if scale is None else scale)
        seen = allowed(x.shape[0], y.shape[0], window)
        some = seen.any(-1)
        s = s.masked_fill(~seen, -torch.inf)[:, some]
        here = torch.arange(len(q))[rows][some]
        o = o.index_put((here,), torch.einsum("hqk,khd->qhd", s.softmax(-1), z))
        lse = lse.index_put((torch.arange(len(lse))[:, None], here[None]), s.logsumexp(-1))
    return o, lse


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_each_window_is_pytorchs(window, backend):
    q, k, v = packed()
    got = twin.varlen_attn(q, k, v, *hints(), window_size=window, enable_gqa=True, backend=backend)
    want, _ = each_alone(*(x.double() for x in (q, k, v)), window)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_has_the_bits_that_attention_gives_it_alone(backend):
    q, k, v = packed(dtype=torch.bfloat16)
    options = {"scale": 0.2, "enable_gqa": True, "backend": backend}
    o, lse = twin.varlen_attn(q, k, v, *hints(), window_size=(3, 0), return_aux=AuxRequest(lse=True), **options)
    assert lse.shape == (4, len(q)) and lse.dtype == torch.float32
    attention = pk.op("varlen_attention", backend=backend)
    for rows, keys in spans():
        if rows.start < rows.stop:
            ends = (torch.tensor([0, x.stop - x.start]) for x in (rows, keys))
            alone = attention(q[rows], k[keys], v[keys], *ends, window=(3, 0), scale=0.2, return_lse=True)
            assert torch.equal(alone.o, o[rows]) and torch.equal(alone.lse, lse[:, rows])


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("used", [None, [4, 0, 7, 2]])
def test_gradients_also_of_the_log_sum_exp(used, backend):
    count = None if used is None else torch.tensor(used, dtype=torch.int32)
    mine, wide = packed(grad=True), [x.double().detach().requires_grad_() for x in packed()]
    found = twin.varlen_attn(
        *mine, *hints(), window_size=(-1, 0), enable_gqa=True, return_aux=AuxRequest(lse=True), seqused_k=count,
        backend=backend,
    )  # fmt: skip
    results = []
    for (o, lse), inputs in ((found, mine), (each_alone(*wide, (-1, 0), used or KV_LENS), wide)):
        sees = lse.detach().isfinite()
        loss = o.sin().sum() + lse[sees].cos().sum()
        results.append([o, lse, *torch.autograd.grad(loss, inputs)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_beyond_those_that_are_used_reach_nothing_and_the_mask_is_aligned_at_the_last_used(backend):
    q, k, v = packed()
    used = [4, 0, 7, 2]
    for n, (_, keys) in zip(used, spans(), strict=True):
        k[keys.start + n : keys.stop], v[keys.start + n : keys.stop] = torch.nan, torch.nan
    clean = [x.double().nan_to_num(0.0) for x in (q, k, v)]
    for dtype in (torch.int32, torch.int64):
        got = twin.varlen_attn(
            q, k, v, *hints(), window_size=(-1, 0), enable_gqa=True, seqused_k=torch.tensor(used, dtype=dtype),
            backend=backend,
        )  # fmt: skip
        torch.testing.assert_close(got.double(), each_alone(*clean, (-1, 0), used)[0], rtol=1e-5, atol=2e-6)


def in_pages(x, lens, size, pages):
    """The sequences of a packed array in a cache of pages, NaN where nobody's keys are, and their table."""
    cache = x.new_full((pages, size, *x.shape[1:]), torch.nan)
    each = -(-max(lens) // size)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1))[: len(lens) * each].reshape(-1, each)
    for s, (first, n) in enumerate(zip(starts(lens).tolist(), lens, strict=False)):
        at = torch.arange(n)
        cache[table[s, at // size], at % size] = x[first : first + n]
    return cache, table.int()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 2)])
def test_keys_in_pages_are_those_of_the_packed_call(window, backend):
    q, k, v = packed()
    (k_pages, table), (v_pages, _) = (in_pages(x, KV_LENS, 4, 12) for x in (k, v))
    cu_q, _, max_q, max_k = hints()
    o, lse = twin.varlen_attn(
        q, k_pages, v_pages, cu_q, None, max_q, max_k, window_size=window, enable_gqa=True, block_table=table,
        seqused_k=torch.tensor(KV_LENS, dtype=torch.int32), return_aux=AuxRequest(lse=True), num_splits=1,
        backend=backend,
    )  # fmt: skip
    want = each_alone(*(x.double() for x in (q, k, v)), window)
    torch.testing.assert_close(o.double(), want[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-5, atol=2e-6)


def test_a_call_as_pytorch_2_10_had_it_is_the_causal_one():
    q, k, v = packed(kv_heads=4)
    want = twin.varlen_attn(q, k, v, *hints(), window_size=(-1, 0))
    assert torch.equal(twin.varlen_attn(q, k, v, *hints(), True), want)
    o, lse = twin.varlen_attn(q, k, v, *hints(), True, AuxRequest(True))
    assert torch.equal(o, want) and lse.shape == (4, len(q))
    assert torch.is_tensor(twin.varlen_attn(q, k, v, *hints(), return_aux=AuxRequest(lse=False)))


def test_the_longest_lengths_and_the_number_of_splits_change_no_bit():
    q, k, v = packed(kv_heads=4)
    cu_q, cu_k, *_ = hints()
    want = twin.varlen_attn(q, k, v, *hints(), backend="triton")
    for max_q, max_k, splits in ((1, 1, 1), (10**6, 10**6, 7), (7, 7, 0)):
        got = twin.varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, num_splits=splits, backend="triton")
        assert torch.equal(got, want)


def theirs():
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason=f"torch {torch.__version__} has no varlen_attn")
    return varlen.varlen_attn, varlen.AuxRequest


def test_the_signature_has_every_argument_of_pytorchs():
    function, _ = theirs()
    mine, given = (inspect.signature(f).parameters for f in (twin.varlen_attn, function))
    assert {n: p.default for n, p in given.items()}.items() <= {n: p.default for n, p in mine.items()}.items()
    positional = [n for n, p in given.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [*mine][: len(positional)] == positional
    assert set(mine) - set(given) >= {"backend"}
    newest = {"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}
    assert set(mine) - set(given) <= {"backend", "is_causal", "return_aux"} | newest


def test_shapes_and_dtypes_are_what_pytorch_declares_of_its_own():
    function, aux = theirs()
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = packed(kv_heads=4, dtype=torch.bfloat16)
    got = twin.varlen_attn(q, k, v, *hints(), return_aux=aux(lse=True))
    with FakeTensorMode() as mode:
        cu_q, cu_k, *most = hints()
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        want = function(*fake, cu_q, cu_k, *most, return_aux=aux(lse=True))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]


def test_torch_compile_makes_one_graph_of_it_and_its_gradients():
    used = torch.tensor([4, 0, 7, 2], dtype=torch.int32)

    def loss(q, k, v, cu_q, cu_k, used):
        o, lse = twin.varlen_attn(
            q, k, v, cu_q, cu_k, 7, 7, window_size=(-1, 0), enable_gqa=True, seqused_k=used, backend="triton",
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return (o.sin().sum() + lse.masked_fill(lse.isinf(), 0).sum()).float()

    cu_q, cu_k, *_ = hints()
    results = []
    for f in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        arrays = packed(grad=True)
        found = f(*arrays, cu_q, cu_k, used)
        results.append([found, *torch.autograd.grad(found, arrays)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_torch_compile_makes_one_graph_of_keys_in_pages():
    q, k, v = packed()
    (k_pages, table), (v_pages, _) = (in_pages(x, KV_LENS, 4, 12) for x in (k, v))
    used, cu_q = torch.tensor(KV_LENS, dtype=torch.int32), starts(Q_LENS)

    def attend(q, k_pages, v_pages, table, used, cu_q):
        return twin.varlen_attn(
            q, k_pages, v_pages, cu_q, None, 7, 7, window_size=(-1, 0), enable_gqa=True, seqused_k=used,
            block_table=table, backend="triton",
        )  # fmt: skip

    arrays = q, k_pages, v_pages, table, used, cu_q
    assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(*arrays), attend(*arrays))


def call(**changed):
    q, k, v = packed()
    cu_q, cu_k, max_q, max_k = hints()
    given = {"query": q, "key": k, "value": v, "cu_seq_q": cu_q, "cu_seq_k": cu_k, "max_q": max_q, "max_k": max_k,
             "enable_gqa": True}  # fmt: skip
    return twin.varlen_attn(**given | changed)


TABLE, USED = torch.zeros(4, 3, dtype=torch.int32), torch.tensor(KV_LENS, dtype=torch.int32)
CACHE = torch.zeros(2, 4, 2, 8)
REFUSED = {
    r"window_size is \(-2, 0\); expected \(left, right\), two integers, -1": {"window_size": (-2, 0)},
    r"window_size is \(1,\); expected": {"window_size": (1,)},
    "window_size is None; expected": {"window_size": None},
    r"is_causal=True and window_size=\(2, -1\) exclude each other; .*window_size=\(2, 0\)": {
        "is_causal": True, "window_size": (2, -1)
    },
    r"query has shape \(1, 11, 4, 8\); expected 3 axes, \(T_q, H_q, D\)": {"query": packed()[0][None]},
    r"key has shape \(22, 2, 8\); expected 4 axes, \(pages, page_size, H_kv, D\) beside block_table": {
        "block_table": TABLE, "seqused_k": USED
    },
    r"key has shape \(2, 4, 2, 8\); expected 3 axes, \(T_k, H_kv, D\) without block_table": {"key": CACHE},
    r"value has shape \(3, 2, 8\) and key \(22, 2, 8\)": {"value": packed()[2][:3]},
    "key has heads of 4 elements and query of 8": {"key": packed()[1][..., :4]},
    "query has 4 heads and key 2; expected as many: pass enable_gqa=True": {"enable_gqa": False},
    "query has 3 heads and key 2; expected key's to divide query's": {"query": packed(heads=3)[0]},
    r"block_table is given and seqused_k is None; .*shape \(4,\): pass seqused_k": {
        "key": CACHE, "value": CACHE, "block_table": TABLE, "cu_seq_k": None
    },
    r"block_table has shape \(3, 3\); expected \(4, any\)": {
        "key": CACHE, "value": CACHE, "block_table": TABLE[:3], "seqused_k": USED
    },
    r"cu_seq_k is None without block_table; .*shape \(5,\)": {"cu_seq_k": None},
    r"cu_seq_k has shape \(4,\); expected \(5,\)": {"cu_seq_k": starts(KV_LENS)[:4]},
    r"seqused_k has shape \(5,\); expected \(4,\)": {"seqused_k": starts(KV_LENS)},
    "seqused_k is torch.float32; expected int32 or int64": {"seqused_k": USED.float()},
    "cu_seq_q is a list; expected a tensor of int32": {"cu_seq_q": [0, 3, 3, 10, 11]},
    "cu_seq_q is empty": {"cu_seq_q": USED[:0]},
    "cu_seq_k is on meta; expected cpu, where cu_seq_q is": {"cu_seq_k": starts(KV_LENS).to("meta")},
    "num_splits is -1; expected None or a number of splits": {"num_splits": -1},
    "num_splits is True; expected": {"num_splits": True},
    r"return_aux is True; expected None or .*AuxRequest\(lse=True\)": {"return_aux": True},
}  # fmt: skip


@pytest.mark.parametrize(
    "changed, argument",
    [
        ({"cu_seq_k": starts(KV_LENS).flip(0)}, "kv_starts is cu_seq_k"),
        ({"cu_seq_q": starts(Q_LENS).flip(0)}, "q_starts is cu_seq_q"),
        ({"seqused_k": USED + 1}, "where keys end that seqused_k counts"),
        ({"key": CACHE, "value": CACHE, "block_table": TABLE - 1, "seqused_k": USED}, "page_table is block_table"),
        ({"key": CACHE, "value": CACHE, "block_table": TABLE, "seqused_k": USED + 99}, "kv_lens is seqused_k"),
        ({"value": packed()[2].double()}, "varlen_attention: v is float64"),
    ],
)
def test_what_the_op_refuses_is_told_by_pytorchs_names(changed, argument):
    """The oracle reads the values of integers; kernels do not."""
    with pytest.raises(pk.SpecError, match=f"^varlen_attn: .*{argument}"):
        call(**changed, backend="reference")


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_by_the_arguments_name(message):
    with pytest.raises(pk.SpecError, match=f"^varlen_attn: {message}"):
        call(**REFUSED[message])


def test_a_gradient_through_pages_is_refused_as_in_pytorch():
    q = packed(grad=True)[0]
    paged = {"query": q, "key": CACHE, "value": CACHE, "cu_seq_k": None, "block_table": TABLE, "seqused_k": USED}
    with pytest.raises(pk.UnsupportedError, match="paged_attention has no gradient"):
        call(**paged)
    with torch.no_grad():
        assert call(**paged).shape == q.shape


# ------------------------------------------------------------------------------------------------------ under swapped()
def pytorchs():
    """PyTorch's own module; its functions run on GPUs alone."""
    return pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0)])
def test_swapped_serves_pytorchs_own_function_and_its_gradients(window):
    theirs = pytorchs()
    leaves, again = packed(grad=True), packed(grad=True)
    options = {"window_size": window, "enable_gqa": True, "scale": 0.3}
    with twin.swapped() as s:
        o = theirs.varlen_attn(*leaves, *hints(), return_aux=theirs.AuxRequest(lse=True), **options)
        sum(x.float().square().sum() for x in o).backward()
    want = twin.varlen_attn(*again, *hints(), return_aux=AuxRequest(lse=True), **options)
    sum(x.float().square().sum() for x in want).backward()
    assert all(torch.equal(x, y) for x, y in zip(o, want, strict=True))
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(leaves, again, strict=True))
    assert sum(s.served.values()) == 1 and "varlen_attention 1: torch_attn._varlen_attn" in s.report()


def test_swapped_serves_keys_in_pages_and_an_output_that_is_given():
    theirs = pytorchs()
    if not hasattr(theirs, "varlen_attn_out"):
        pytest.skip("this torch has no varlen_attn_out")
    q, k, v = packed(heads=2)
    pages = (x[:20].reshape(5, 4, 2, 8) for x in (k, v))
    lens, table = torch.tensor([4, 2, 5, 3], dtype=torch.int32), torch.tensor([[0, 1], [2, 0], [3, 4], [1, 0]])
    call = (q, *pages, starts(Q_LENS), None, 7, 5)
    options = {"window_size": (-1, 0), "seqused_k": lens, "block_table": table.int()}
    out = torch.full_like(q, float("nan"))
    with torch.no_grad(), twin.swapped():
        found, lse = theirs.varlen_attn_out(out, *call, return_aux=theirs.AuxRequest(lse=True), **options)
        plain = theirs.varlen_attn(*call, num_splits=1, **options)
    want = twin.varlen_attn(*call, return_aux=AuxRequest(lse=True), **options)
    assert found is out and torch.equal(out, want[0]) and torch.equal(lse, want[1]) and torch.equal(plain, want[0])


def test_what_swapped_refuses_of_it_has_the_twins_words():
    theirs = pytorchs()
    with twin.swapped(), pytest.raises(pk.SpecError, match="cu_seq_q has shape"):
        theirs.varlen_attn(*packed(heads=2), starts(Q_LENS).reshape(-1, 1), *hints()[1:])
