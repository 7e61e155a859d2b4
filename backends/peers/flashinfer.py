"""FlashInfer's attention over keys in pages (Ye et al. 2025), where ``flashinfer-python`` is installed; its kernels are
built when they are first called."""

from __future__ import annotations

from math import log
from typing import Any

from portakern.backends.peers._packed import kept
from portakern.backends.peers.provide import LACKS, provides
from portakern.core.backend import Backend
from portakern.core.call import Call

BACKEND = Backend(
    "flashinfer",
    framework="torch",
    peer=True,
    platforms=("cuda",),
    requires=("torch", "flashinfer"),
    install="flashinfer-python",
    refusals=(LACKS, "FlashInfer takes"),
)
WIDTHS = (64, 128, 256)
WORKSPACE = 256 << 20
"""Bytes, for the parts of results of split keys."""


def kernel_takes(call: Call) -> str | None:
    """What its templates are written for."""
    d, dv, window = call.dims["d"], call.dims["dv"], call.options["window"]
    if call.dtype not in ("float16", "bfloat16"):
        return f"FlashInfer takes float16 and bfloat16, not {call.dtype}"
    if d != dv or d not in WIDTHS:
        return f"FlashInfer takes heads of {', '.join(map(str, WIDTHS))} columns; these have {d} and {dv}"
    if window is not None and (window[0] is None or not call.options["is_causal"]):
        return f"FlashInfer takes a window to the left of a causal mask; this one is {window}"
    return None


@kept
def planned(
    page_table: Any, kv_lens: Any, q_starts: Any, heads: int, kv_heads: int, d: int, page_size: int, dtype: Any,
    causal: bool, window: int, scale: float | None, softcap: float | None,
) -> Any:  # fmt: skip
    """A wrapper that is ready to run: of sequences that have one query each the one for decoding. A model plans once
    for all its layers."""
    import flashinfer
    import torch

    table, lens, starts = (x.cpu().int() for x in (page_table, kv_lens, q_starts))
    pages = (lens + page_size - 1) // page_size
    indices = torch.cat([row[:n] for row, n in zip(table, pages.tolist(), strict=True)])
    indptr = torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)])
    last = torch.where(lens > 0, (lens - 1) % page_size + 1, 0).int()
    memory = torch.empty(WORKSPACE, dtype=torch.uint8, device=page_table.device)
    kinds: dict[str, Any] = {"q_data_type": dtype, "kv_data_type": dtype, "sm_scale": scale, "window_left": window}
    kinds["logits_soft_cap"] = softcap or 0.0
    if torch.equal(starts, torch.arange(len(starts), dtype=torch.int32)):
        made = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory, "NHD", use_tensor_cores=heads > kv_heads)
        made.plan(indptr, indices.to(memory.device), last, heads, kv_heads, d, page_size, **kinds)
    else:
        made = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory, "NHD", backend="fa2")
        made.plan(
            starts, indptr, indices.to(memory.device), last, heads, kv_heads, d, page_size, causal=causal, **kinds
        )
    return made


@provides(BACKEND, refuses=kernel_takes, gradients=False, outputs=2)
def paged_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    kv_lens: Any,
    q_starts: Any,
    *,
    is_causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Its logarithms are to base 2, and (tokens, heads)."""
    left = -1 if window is None or window[0] is None else window[0]
    wrapper = planned(
        page_table, kv_lens, q_starts, q.shape[1], k_pages.shape[2], q.shape[2], k_pages.shape[1], q.dtype,
        is_causal, left, scale, softcap,
    )  # fmt: skip
    if not return_lse:
        return wrapper.run(q, (k_pages, v_pages))
    o, lse = wrapper.run(q, (k_pages, v_pages), return_lse=True)
    return o, lse.T * log(2)
