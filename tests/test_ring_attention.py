"""Attention around a ring of processes: what each has of a sequence gives its rows of the attention of all of it, in
either direction, within the bounds of the full call.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest

from portakern.core.ring import Visible, chunks, pairs, steps
from portakern.errors import SpecError

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this build of PyTorch has no torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import portakern as pk  # noqa: E402
import portakern.torch as twins  # noqa: E402
from portakern.core.oracle import as_float64, oracle  # noqa: E402
from portakern.core.ring import zigzag_order  # noqa: E402
from portakern.errors import UnsupportedError  # noqa: E402
from tests.ranks import on_ranks  # noqa: E402

WORLD = 4
TOKENS = 32


class Case(NamedTuple):
    name: str
    options: dict
    dtype: str = "float32"
    order: str = "zigzag"
    lengths: dict | None = None
    backend: str = "reference"


UNEVEN = {2: [15, 17], 4: [9, 0, 16, 7]}
CASES = [
    *(Case(f"causal_{d}", {"is_causal": True}, d) for d in ("float32", "bfloat16")),
    Case("no_mask", {"scale": 0.3, "softcap": 2.0}, "bfloat16"),
    Case("causal_window", {"is_causal": True, "window": (6, None)}),
    Case("window", {"window": (9, 3)}, "bfloat16", "contiguous"),
    Case("uneven", {"is_causal": True}, "bfloat16", "contiguous", UNEVEN),
    Case("uneven_window", {"window": (5, 0)}, "float32", "contiguous", UNEVEN),
    Case("near", {"window": (2, 0)}, "float32", "contiguous"),
    Case("causal_triton", {"is_causal": True}, "bfloat16", backend="triton"),
]


def qkvd(dtype):
    """Queries, keys, values and the cotangents of o and lse, of two query heads to a key head."""
    rng = torch.Generator().manual_seed(3)
    shapes = (2, TOKENS, 4, 16), (2, TOKENS, 2, 16), (2, TOKENS, 2, 8), (2, TOKENS, 4, 8), (2, 4, TOKENS)
    *arrays, d_lse = (torch.randn(s, generator=rng) for s in shapes)
    return [*(a.to(getattr(torch, dtype)) for a in arrays), d_lse]


def indices(case, count):
    """Of each process the tokens that it holds."""
    if case.order == "zigzag":
        return np.array(zigzag_order(TOKENS, count)).reshape(count, -1).tolist()
    lengths = case.lengths[count] if case.lengths else [TOKENS // count] * count
    return [list(range(sum(lengths[:r]), sum(lengths[: r + 1]))) for r in range(count)]


def ring(case, group):
    """What this process gets: o, lse, d_q, d_k, d_v."""
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    held = torch.tensor(indices(case, count)[rank], dtype=torch.int64)
    q, k, v, d_o = (x.index_select(1, held) for x in qkvd(case.dtype)[:4])
    d_lse = qkvd(case.dtype)[4].index_select(2, held)
    given = [x.requires_grad_() for x in (q, k, v)]
    lengths = case.lengths[count] if case.lengths else None
    how = {"order": case.order, "lengths": lengths, "return_lse": True, "backend": case.backend}
    o, lse = twins.ring_attention(*given, group, **how, **case.options)
    return o.detach(), lse.detach(), *torch.autograd.grad((o, lse), given, (d_o, d_lse))


def under_context_parallel(rank):
    """PyTorch's own ring hands its DTensors to the twin; past it a twin is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (WORLD,))
    full = [torch.randn(2, 4, TOKENS, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    for causal in (True, False):
        given = [x.clone().requires_grad_() for x in full[:3]]
        o = F.scaled_dot_product_attention(*given, is_causal=causal)
        want = [o.detach(), *torch.autograd.grad(o, given, full[3])]
        parts = [x.clone() for x in full]
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4):
            given = [x.detach().clone().requires_grad_() for x in parts[:3]]
            with twins.swapped(backend="reference"):
                o = F.scaled_dot_product_attention(*given, is_causal=causal)
                found = [o.detach(), *torch.autograd.grad(o, given, parts[3])]
            with pytest.raises(UnsupportedError, match="is given what one device holds"):
                twins.scaled_dot_product_attention(*given, is_causal=causal, backend="reference")
            with twins.swapped(backend="reference"), pytest.raises(UnsupportedError, match="expected None: keys of"):
                F.scaled_dot_product_attention(*given, attn_mask=torch.zeros(1, 1, 8, 8))
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, twins.to_zigzag(b, WORLD, 2).chunk(WORLD, 2)[rank], rtol=1e-5, atol=5e-6)


def wrong_calls():
    """All processes refuse, so that none waits for another."""
    q, k, v, *_ = qkvd("float32")
    how = {"backend": "reference"}
    with pytest.raises(SpecError, match="tokens in order='zigzag'; expected the same even number"):
        twins.ring_attention(q[:, :5], k[:, :5], v[:, :5], **how)
    with pytest.raises(SpecError, match=r"lengths is \[8, 8, 8, 8\] and process \d of 4 holds 32 tokens"):
        twins.ring_attention(q, k, v, lengths=[8] * 4, order="contiguous", **how)
    for lengths in ([32, 32], [32.5] * 4, [32, 32, 32, -32], 32):
        with pytest.raises(SpecError, match=r"lengths is .* on 4 devices; expected an integer from 0 up for each"):
            twins.ring_attention(q, k, v, lengths=lengths, order="contiguous", **how)
    for window in ((-100, None), (3,), 3):  # the first would hide every key
        with pytest.raises(SpecError, match="attention: window is .*; expected a tuple of 2 integers >= 0"):
            twins.ring_attention(q, k, v, window=window, **how)
    with pytest.raises(SpecError, match="precision is 'low'"):  # also on a process without tokens
        twins.ring_attention(*(x[:, :0] for x in (q, k, v)), precision="low", **how)
    with pytest.raises(SpecError, match="query is a list; expected a torch.Tensor"):
        twins.ring_attention([q], k, v, **how)
    with pytest.raises(SpecError, match="order is 'striped'; expected one of 'zigzag', 'contiguous'"):
        twins.ring_attention(q, k, v, order="striped", **how)
    with pytest.raises(SpecError, match=r"key has shape \(2, 31, 2, 16\) beside query of \(2, 32, 4, 16\)"):
        twins.ring_attention(q, k[:, 1:], v, **how)
    with pytest.raises(SpecError, match="value is torch.float64 on cpu; expected torch.float32 on cpu"):
        twins.ring_attention(q, k, v.double(), **how)


def under_autocast():
    """Of float32 beside bfloat16, as rotary tables leave queries and keys, autocast makes one dtype."""
    given = qkvd("float32")[:3]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = twins.ring_attention(*given[:2], given[2].bfloat16(), backend="reference")
    assert torch.equal(mixed, twins.ring_attention(*(x.bfloat16() for x in given), backend="reference"))


def every_case(folder):
    """On each process: what it gets in each case is left in a folder."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for case in CASES:
        for group, count in ((None, WORLD), (halves[rank // 2], 2)):
            found, again = ring(case, group), ring(case, group)
            for a, b in zip(found, again, strict=True):
                assert torch.equal(a, b), f"{case.name}: two runs have other bits"
            if count == WORLD or rank < count:
                torch.save(found, f"{folder}/{case.name}-{count}-{rank}")
    wrong_calls()
    under_autocast()
    under_context_parallel(rank)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What all processes of all cases found."""
    pytest.importorskip("triton", reason="triton is not installed")
    path = tmp_path_factory.mktemp("ring")
    on_ranks(every_case, WORLD, str(path))
    return path


def numpy(x):
    return x.view(torch.int16).numpy().view("bfloat16") if x.dtype == torch.bfloat16 else x.numpy()


def shares(name, found, arrays, options):
    """The largest share of its bound that each result of the full call errs by."""
    call = pk.op(name, backend="reference").bind(**arrays, **options)
    ref = oracle(call)
    bounds = call.spec.bound(as_float64(call), ref)
    return [
        float(np.max(np.abs(np.asarray(x, np.float64) - want) / bound))
        for x, want, bound in zip(found, ref, bounds, strict=False)
        if x is not None
    ]


@pytest.mark.parametrize("count", [2, WORLD])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_ring_is_within_the_bound_of_one_device(folder, case, count):
    import ml_dtypes  # noqa: F401  names bfloat16 to NumPy

    each = [torch.load(f"{folder}/{case.name}-{count}-{r}") for r in range(count)]
    home = torch.tensor([*itertools.chain(*indices(case, count))]).argsort()
    axes = (1, 2, 1, 1, 1)
    o, lse, *gradients = (
        numpy(torch.cat(found, axis).index_select(axis, home))
        for axis, found in zip(axes, zip(*each, strict=True), strict=True)
    )
    q, k, v, d_o, d_lse = (numpy(x) for x in qkvd(case.dtype))
    arrays = {"q": q, "k": k, "v": v}
    forward = shares("attention", (o, lse), arrays, {"return_lse": True, **case.options})
    arrays |= {"o": o, "lse": lse, "d_o": d_o, "d_lse": d_lse}
    backward = shares("attention_vjp", gradients, arrays, case.options)
    print(f"{case.name} on {count}: o, lse, d_q, d_k, d_v at", ", ".join(f"{s:.2f}" for s in forward + backward))
    assert max(forward + backward) <= 1


# ------------------------------------------------------------------------------------------ the plan, without processes
LENGTHS = ([6] * 4, [5, 0, 8, 2], [0, 3], [4], [1] * 8)
MASKS = list(itertools.product((True, False), (None, (3, 0), (None, 4), (9, 2), (0, 0), (2, None), (None, None))))


def tokens(own):
    return np.array([t for p in own for t in range(p.start, p.start + p.end - p.first)], int)


def seen(apart, visible):
    """Of distances of keys from queries, which a mask shows."""
    left = np.inf if visible.left is None else visible.left
    right = np.inf if visible.right is None else visible.right
    return (apart >= -left) & (apart <= right)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("is_causal", "window"), MASKS)
def test_every_visible_pair_is_met_once(order, is_causal, window):
    visible = Visible.of(is_causal, window)
    for lengths in LENGTHS:
        if order == "zigzag" and (len(set(lengths)) > 1 or lengths[0] % 2):
            continue
        held = chunks(order, lengths)
        for rank, step in itertools.product(range(len(lengths)), range(len(lengths))):
            source = (rank - step) % len(lengths)
            want = seen(tokens(held[source])[None] - tokens(held[rank])[:, None], visible)
            met = np.zeros(want.shape, int)
            for pair in pairs(held, visible, rank, source):
                assert step < steps(held, visible)
                rows, keys = slice(pair.q_first, pair.q_end), slice(pair.kv_first, pair.kv_end)
                apart = np.arange(pair.kv_end - pair.kv_first)[None] - np.arange(pair.q_end - pair.q_first)[:, None]
                met[rows, keys] += True if pair.q_start is None else seen(apart - pair.q_start, visible)
            np.testing.assert_array_equal(met, want)


def test_zigzag_gives_all_devices_equal_work_at_each_step():
    held = chunks("zigzag", [8] * 4)
    for step in range(4):
        calls = [pairs(held, Visible.of(True, None), r, (r - step) % 4) for r in range(4)]
        work = {sum((p.q_end - p.q_first) * (p.kv_end - p.kv_first) for p in each) for each in calls}
        assert len(work) == 1 and all(len(each) == 1 for each in calls)


def test_a_ring_stops_where_no_window_reaches():
    held = chunks("contiguous", [8] * 4)
    assert [steps(held, Visible.of(True, w)) for w in ((0, 0), (7, 0), (9, 0), None)] == [1, 2, 3, 4]


def test_zigzag_and_back():
    x = torch.arange(24).reshape(2, 12)
    cut = twins.to_zigzag(x, 3)
    assert cut[0].tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert torch.equal(twins.from_zigzag(cut, 3), x)
    with pytest.raises(SpecError, match="12 tokens on 4 devices; expected a multiple of twice"):
        twins.to_zigzag(x, 4)
