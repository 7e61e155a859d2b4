"""The TPU kernel that JAX ships, ``jax.experimental.pallas.ops.tpu.flash_attention``.

On a CPU it runs in Pallas's TPU interpreter.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from portakern.backends.peers.provide import LACKS, provides
from portakern.core.backend import Backend
from portakern.core.call import Call

HERE = "portakern.backends.peers"
BACKEND = Backend(
    "pallas_flash",
    framework="jax",
    peer=True,
    compiles={"tpu": HERE},
    interprets=HERE,
    requires=("jax",),
    extra="pallas",
    refusals=(LACKS, "the kernel takes"),
)
BLOCK = 128  # key lengths are multiples of it, and heads wider than it


def kernel_takes(call: Call) -> str | None:
    """Why the kernel would not take a call."""
    width = max(call.dims["d"], call.dims["dv"])
    if width > BLOCK and width % BLOCK:
        return f"the kernel takes heads up to {BLOCK} wide and multiples of {BLOCK}; these are {width} wide"
    return None


def interpreted(call: Call) -> AbstractContextManager[Any]:
    """Pallas's interpreter where there is no TPU."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.force_tpu_interpret_mode() if call.interpret else nullcontext()


@provides(BACKEND, refuses=kernel_takes, around=interpreted)
def attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Any:
    """The spec's (batch, sequence, heads, d) to the kernel's (batch, heads, sequence, d) and back.

    It wants key lengths that are multiples of 128, v as wide as k, as many key heads as query heads, and its causal
    mask is aligned at the top left. So both sequences get padding in front, up to one multiple of 128, where the two
    alignments agree; segment ids hide the padding. It scales after the bias: the bias goes in divided by the scale.
    """
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds, flash_attention

    (batch, q_len, heads, d), (kv_len, dv) = q.shape, (k.shape[1], v.shape[3])
    scale = d**-0.5 if scale is None else scale
    length, width = -(-max(q_len, kv_len) // BLOCK) * BLOCK, max(d, dv)

    def ready(x: Any) -> Any:
        x = jnp.repeat(x, heads // x.shape[2], axis=2).transpose(0, 2, 1, 3)
        return jnp.pad(x, ((0, 0), (0, 0), (length - x.shape[2], 0), (0, width - x.shape[3])))

    if bias is not None:
        bias = jnp.broadcast_to(bias, (batch, heads, q_len, kv_len)).astype(jnp.float32) / scale
        bias = jnp.pad(bias, ((0, 0), (0, 0), (length - q_len, 0), (length - kv_len, 0)))
    ids = jnp.ones((batch, length), jnp.int32)
    segments = SegmentIds(ids, ids.at[:, : length - kv_len].set(0))
    o = flash_attention(ready(q), ready(k), ready(v), bias, segments, causal=is_causal, sm_scale=scale)
    return o[:, :, length - q_len :, :dv].transpose(0, 2, 1, 3)
