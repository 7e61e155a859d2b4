"""PyTorch's ``flex_attention`` (Dong et al. 2024), a kernel that Inductor writes for a mask and a change of scores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from portakern.backends.peers.provide import LACKS, provides
from portakern.backends.peers.torch_compiled import compiled
from portakern.backends.peers.torch_eager import as_asked, attention_wants
from portakern.core.backend import Backend
from portakern.core.call import Call

BACKEND = Backend(
    "flex_attention",
    framework="torch",
    peer=True,
    platforms=("cpu", "cuda", "rocm"),
    requires=("torch",),
    extra="triton",
    refusals=(LACKS, "torch wants", "torch is set", "flex_attention takes"),
)
NARROWEST = 16
BLOCK = 128  # queries and keys of a block of a mask, as ``create_block_mask`` has them
INFINITE = 2**40

Window = tuple[int | None, int | None]


def flex_takes(call: Call) -> str | None:
    """Why it would not take a call."""
    narrow = min(call.dims["d"], call.dims["dv"])
    if call.target.platform == "cpu" and call.spec.is_vjp:
        return "flex_attention takes gradients on a GPU alone"
    if call.target.platform != "cpu" and narrow < NARROWEST:
        return f"flex_attention takes heads at least {NARROWEST} wide on a GPU; these are {narrow} wide"
    return attention_wants(call)


@provides(BACKEND, refuses=flex_takes, around=as_asked)
def attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    sinks: Any = None,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    precision: str = "ieee",
) -> Any:
    """Heads before the sequence; the causal mask is a window's edge. What the mask leaves of each block is found before
    the first call of a shape, or with these segment ids, and kept. Sinks are what the log-sum-exp says that they leave
    of o, as transformers has it. On a CPU it runs uncompiled, as a formula."""
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    left, right = window or (None, None)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    run = compiled_flex() if q.is_cuda else flex_attention
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    seen = None
    if q_segment_ids is not None:
        with torch.no_grad():
            seen = _kept_blocks()(q_segment_ids, kv_segment_ids, left, right)
    elif left is not None or right is not None:
        with torch.no_grad():
            seen = _blocks(left, right, q.shape[1], k.shape[1], q.device)
    more = {} if sinks is None else {"return_aux": AuxRequest(lse=True)}
    pairs = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    o = run(
        query=heads_first[0],
        key=heads_first[1],
        value=heads_first[2],
        score_mod=_changed(softcap, bias if bias is None else bias.expand(pairs)),
        block_mask=seen,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
        **more,
    )
    if sinks is not None:
        o, also = o
        share = torch.sigmoid(also.lse - sinks[:, None]).where(sinks[:, None] < float("inf"), float("nan"))
        o = (o * share[..., None]).to(q.dtype)
    return o.transpose(1, 2)


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return compiled(flex_attention)


@functools.cache
def _blocks(left: int | None, right: int | None, q_len: int, kv_len: int, device: Any) -> Any:
    """The blocks of a window, the last query at the last key: what each block of it sees follows from its corners.
    PyTorch's ``create_block_mask`` writes the mask of all queries and keys first, 268 million entries for 16384 of
    both, and compiled, so that it need not, it took longer than all calls together."""
    some, full = _corners(left, right, q_len, kv_len, device)
    return _mask(some[None], full[None], _window(left, right, q_len, kv_len), q_len, kv_len)


@functools.cache
def _kept_blocks() -> Callable[..., Any]:
    """``_packed``, not made again for the same ids."""
    from portakern.backends.peers._packed import kept

    return kept(_packed)


def _packed(q_segment_ids: Any, kv_segment_ids: Any, left: int | None, right: int | None) -> Any:
    """The blocks of a window within segments: the ids of a block of queries and of one of keys may meet where their
    ranges do, and are all equal where each block has one id, the same."""
    q_len, kv_len = q_segment_ids.shape[1], kv_segment_ids.shape[1]
    some, full = _corners(left, right, q_len, kv_len, q_segment_ids.device)
    q_least, q_most = (x[:, :, None] for x in _extremes(q_segment_ids))
    k_least, k_most = (x[:, None, :] for x in _extremes(kv_segment_ids))
    some = some & (q_least <= k_most) & (k_least <= q_most)
    full = full & (q_least == k_most) & (q_most == k_least)
    inside = _window(left, right, q_len, kv_len)

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return inside(b, h, i, j) & (q_segment_ids[b, i] == kv_segment_ids[b, j])

    return _mask(some, full, seen, q_len, kv_len)


def _window(left: int | None, right: int | None, q_len: int, kv_len: int) -> Callable[..., Any]:
    """Whether a window leaves a pair."""
    before = kv_len - q_len  # keys that stand before query 0

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        ahead = j - i - before
        if left is None:
            return ahead <= (INFINITE if right is None else right)
        return ahead >= -left if right is None else (ahead >= -left) & (ahead <= right)

    return seen


def _corners(left: int | None, right: int | None, q_len: int, kv_len: int, device: Any) -> tuple[Any, Any]:
    """(blocks of queries, blocks of keys): where a window leaves some pairs, and where all of them."""
    import torch

    before = kv_len - q_len
    q_first, k_first = (torch.arange(0, n, BLOCK, device=device) for n in (q_len, kv_len))
    q_last, k_last = (first + BLOCK - 1 for first in (q_first, k_first))
    least = k_first - q_last[:, None] - before  # of what keys of a block are ahead of its queries
    most = k_last - q_first[:, None] - before
    behind, beyond = (-INFINITE if left is None else -left), (INFINITE if right is None else right)
    some = (most >= behind) & (least <= beyond)
    return some, (least >= behind) & (most <= beyond) & (k_last < kv_len) & (q_last < q_len)[:, None]


def _extremes(ids: Any) -> tuple[Any, Any]:
    """The least and the greatest id of each block, (batch, blocks)."""
    import torch

    ragged = -ids.shape[1] % BLOCK
    blocks = torch.cat([ids, ids[:, -1:].expand(-1, ragged)], 1).unflatten(1, (-1, BLOCK))
    return blocks.amin(2), blocks.amax(2)


def _mask(some: Any, full: Any, seen: Callable[..., Any], q_len: int, kv_len: int) -> Any:
    """flex_attention's form of blocks (batch, of queries, of keys) that are seen in part, and in full."""
    from torch.nn.attention.flex_attention import BlockMask

    partly, wholly = (_listed(blocks) for blocks in (some & ~full, full))
    return BlockMask.from_kv_blocks(*partly, *wholly, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(q_len, kv_len))


def _listed(blocks: Any) -> tuple[Any, Any]:
    """(how many blocks of keys a block of queries has, which they are and then the others), for all heads."""
    import torch

    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[:, None].contiguous(), order.int()[:, None].contiguous()


def _changed(softcap: float | None, bias: Any) -> Callable[..., Any] | None:
    """What becomes of a score, if anything."""
    import torch

    def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    def biased(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + bias[b, h, i, j]

    def both(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return softcap * torch.tanh(score / softcap) + bias[b, h, i, j]

    if bias is None:
        return None if softcap is None else capped
    return biased if softcap is None else both
