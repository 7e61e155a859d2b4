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
