"""The kernels behind PyTorch's ``scaled_dot_product_attention``, each by itself.

They are FlashAttention-2 (Dao 2023), xFormers' memory-efficient one and cuDNN's; on a CPU torch has a flash kernel too.
"""

from __future__ import annotations

import warnings
from typing import Any

from portakern.backends.peers.provide import LACKS, provides
from portakern.backends.peers.torch_eager import arranged, as_asked, attention_wants
from portakern.core.backend import Backend
from portakern.core.call import Call


def _kernel(name: str, backend: str, platforms: tuple[str, ...]) -> Backend:
    """The peer for one of ``torch.nn.attention.SDPBackend``."""
    peer = Backend(
        name,
        framework="torch",
        peer=True,
        platforms=platforms,
        requires=("torch",),
        extra="triton",
        refusals=(LACKS, "torch wants", "torch is set", "torch says"),
    )

    def refuses(call: Call) -> str | None:
        return attention_wants(call) or _torchs_reason(backend, call)

    @provides(peer, refuses=refuses, around=as_asked)
    def attention(
        q: Any,
        k: Any,
        v: Any,
        bias: Any = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        precision: str = "ieee",
    ) -> Any:
        from torch.nn import functional
        from torch.nn.attention import SDPBackend, sdpa_kernel

        args, kwargs = arranged(q, k, v, bias, is_causal, scale)
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return functional.scaled_dot_product_attention(*args, **kwargs).transpose(1, 2)

    return peer


def _torchs_reason(backend: str, call: Call) -> str | None:
    """Why this kernel does not take a call, in the words in which torch warns of it; None where it does."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    given = (call.arrays[n] for n in ("q", "k", "v", "bias"))
    q, k, v, bias = (a if a is None else a.detach().requires_grad_(call.spec.is_vjp) for a in given)
    args, kwargs = arranged(q, k, v, bias, call.options["is_causal"], call.options["scale"])
    with warnings.catch_warnings(record=True) as said, sdpa_kernel(getattr(SDPBackend, backend)):
        warnings.simplefilter("always")
        try:
            torch._fused_sdp_choice(*args, **kwargs)  # what scaled_dot_product_attention asks before it runs anything
            return None
        except RuntimeError as e:
            error = str(e)
    reasons = [str(w.message).partition(" (Triggered internally")[0] for w in said]
    told = [r for r in reasons if not r.endswith("not used because:")]
    return f"torch says: {' '.join(told) or error}"


FLASH = _kernel("sdpa_flash", "FLASH_ATTENTION", ("cpu", "cuda", "rocm"))
EFFICIENT = _kernel("sdpa_efficient", "EFFICIENT_ATTENTION", ("cuda", "rocm"))
CUDNN = _kernel("sdpa_cudnn", "CUDNN_ATTENTION", ("cuda",))

WIDEST, GRAIN, PAGE = 256, 8, 256


def pages_wanted(call: Call) -> str | None:
    """Why torch's flash kernel would not take keys in pages."""
    import inspect

    from torch.nn import attention
    from torch.nn.attention import varlen

    dims = call.dims
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        return "torch wants a release whose varlen_attn has a block_table; this one has none"
    if call.target.platform != "cuda" or call.dtype not in ("float16", "bfloat16"):
        return f"torch wants float16 or bfloat16 on a CUDA GPU; this is {call.dtype} on {call.target.platform}"
    if dims["d"] != dims["dv"] or dims["d"] > WIDEST or dims["d"] % GRAIN:
        return (
            f"torch wants keys as wide as values, up to {WIDEST} and a multiple of {GRAIN}; these are {dims['d']} and "
            f"{dims['dv']} wide"
        )
    if wide := [n for n in ("page_table", "kv_lens", "q_starts") if call.dtype_of(n) != "int32"]:
        return f"torch wants {wide[0]} in int32: cast it"
    if dims["page_size"] % PAGE and attention.current_flash_attention_impl() != "FA3":
        return (
            f"torch wants pages of a multiple of {PAGE} keys, or FlashAttention-3: "
            "torch.nn.attention.activate_flash_attention_impl('FA3')"
        )
    return None


@provides(FLASH, refuses=pages_wanted, gradients=False)
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
) -> Any:
    """``varlen_attn`` with a block table. It takes the longest lengths from the host: those that the arrays have room
    for, which is right for all. Its number of splits is its own choice, with which bits depend on the batch. What it
    writes for tokens behind the last sequence is not known."""
    from torch.nn.attention.varlen import varlen_attn

    left, right = (-1 if edge is None else edge for edge in window or (None, None))
    room = page_table.shape[1] * k_pages.shape[1]
    return varlen_attn(
        q, k_pages, v_pages, q_starts, None, q.shape[0], room, scale=scale,
        window_size=(left, 0 if is_causal else right), enable_gqa=q.shape[1] != k_pages.shape[2], seqused_k=kv_lens,
        block_table=page_table,
    )  # fmt: skip
