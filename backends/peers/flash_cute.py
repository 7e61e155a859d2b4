"""FlashAttention-4, the kernels in CuTe DSL for Hopper and Blackwell (Dao et al.), where ``flash-attn-4`` is
installed."""

from __future__ import annotations

from typing import Any

from portakern.backends.peers.provide import LACKS, provides
from portakern.core.backend import Backend
from portakern.core.call import Call

BACKEND = Backend(
    "flash_cute",
    framework="torch",
    peer=True,
    platforms=("cuda",),
    requires=("torch", "flash_attn.cute"),
    install="flash-attn-4",
    refusals=(LACKS, "FlashAttention takes", "FlashAttention has"),
)
WIDEST, GRAIN = 256, 8


def kernel_takes(call: Call) -> str | None:
    """The limits that it asserts before it compiles anything."""
    d, dv = call.dims["d"], call.dims["dv"]
    if call.dtype not in ("float16", "bfloat16"):
        return f"FlashAttention takes float16 and bfloat16, not {call.dtype}"
    if max(d, dv) > WIDEST or d % GRAIN or dv % GRAIN:
        return f"FlashAttention takes heads up to {WIDEST} wide, a multiple of {GRAIN}; these are {d} and {dv} wide"
    if call.spec.is_vjp and call.options["softcap"] is not None:
        return "FlashAttention has no gradients under a softcap"
    return None


@provides(BACKEND, refuses=kernel_takes)
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    sinks: Any = None,
) -> Any:
    """The spec's own layout and alignment. Of segments it takes documents of neighbouring rows, by their ends."""
    from flash_attn import cute

    modes = {
        "softmax_scale": scale, "causal": is_causal, "window_size": window or (None, None), "softcap": softcap or 0.0,
    } | ({} if sinks is None else {"learnable_sink": sinks})  # fmt: skip
    if q_segment_ids is None:
        return _first(cute.flash_attn_func(q, k, v, **modes))
    from portakern.backends.peers._packed import documents

    packed = documents(q_segment_ids, kv_segment_ids, "FlashAttention")
    ends = {
        "cu_seqlens_q": packed.starts, "cu_seqlens_k": packed.starts,
        "max_seqlen_q": packed.longest, "max_seqlen_k": packed.longest,
    }  # fmt: skip
    o = _first(cute.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), **ends, **modes))
    return o.view(*q.shape[:-1], v.shape[-1])


@provides(BACKEND, refuses=kernel_takes)
def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    q_starts: Any,
    kv_starts: Any,
    *,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Any:
    """The spec's own layout and alignment, of sequences that fill their arrays."""
    from flash_attn import cute

    from portakern.backends.peers._packed import filling

    queries, keys = filling(q_starts, len(q), "FlashAttention"), filling(kv_starts, len(k), "FlashAttention")
    ends = {
        "cu_seqlens_q": queries.starts, "cu_seqlens_k": keys.starts,
        "max_seqlen_q": queries.longest, "max_seqlen_k": keys.longest,
    }  # fmt: skip
    modes = {
        "softmax_scale": scale, "causal": is_causal, "window_size": window or (None, None), "softcap": softcap or 0.0,
    }  # fmt: skip
    return _first(cute.flash_attn_varlen_func(q, k, v, **ends, **modes))


def _first(result: Any) -> Any:
    """o, which comes with lse in some versions."""
    return result[0] if isinstance(result, tuple) else result
