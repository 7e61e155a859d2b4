"""Google DeepMind's kernels for GPUs and TPUs, where ``tokamax`` is installed; it chooses which of them runs."""

from __future__ import annotations

from typing import Any

from portakern.backends.peers.jax_xla import PRECISION
from portakern.backends.peers.provide import LACKS, provides
from portakern.core.backend import Backend
from portakern.core.call import Call

BACKEND = Backend(
    "tokamax",
    framework="jax",
    peer=True,
    platforms=("cuda", "tpu"),
    requires=("jax", "tokamax"),
    refusals=(LACKS, "tokamax caps", "tokamax computes"),
)


def float32_at_most(call: Call) -> str | None:
    """Its kernels compute in float32, whatever the arrays are."""
    return "tokamax computes in float32, which is less than float64" if call.dtype == "float64" else None


def attention_takes(call: Call) -> str | None:
    """Why it would not give what the spec says."""
    if call.options["softcap"] is not None and call.arrays["bias"] is not None:
        return "tokamax caps scores after the bias, and the op before it: leave one of the two out"
    return float32_at_most(call)


@provides(BACKEND, refuses=attention_takes)
def attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    precision: str = "ieee",
) -> Any:
    """Its causal mask is aligned at the top left: unless there are as many queries as keys, the spec's goes in as a
    mask."""
    import jax.numpy as jnp
    import tokamax

    (q_len, kv_len), mask = (q.shape[1], k.shape[1]), None
    if is_causal and q_len != kv_len:
        mask, is_causal = jnp.tril(jnp.ones((1, 1, q_len, kv_len), bool), kv_len - q_len), False
    return tokamax.dot_product_attention(
        q,
        k,
        v,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        logits_soft_cap=softcap,
        precision=PRECISION[precision] if q.dtype == jnp.float32 else None,
    )


@provides(BACKEND, refuses=float32_at_most)
def layernorm(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
    import tokamax

    return tokamax.layer_norm(x, weight, bias, epsilon=eps)


@provides(BACKEND, refuses=float32_at_most)
def rmsnorm(x: Any, weight: Any = None, *, eps: float = 1e-6) -> Any:
    import tokamax

    return tokamax.layer_norm(x, weight, None, epsilon=eps, subtract_mean=False)
