"""cuDNN's attention kernel as ``jax.nn.dot_product_attention(implementation="cudnn")`` calls it."""

from __future__ import annotations

from typing import Any

from portakern.backends.peers.jax_xla import attend
from portakern.backends.peers.provide import LACKS, provides
from portakern.core.backend import Backend
from portakern.core.call import Call

BACKEND = Backend(
    "jax_cudnn",
    framework="jax",
    peer=True,
    platforms=("cuda",),
    requires=("jax",),
    extra="cuda",
    refusals=(LACKS, "cuDNN takes"),
)


def cudnn_takes(call: Call) -> str | None:
    """The limits that JAX checks before it calls the kernel; its error would come from within a traced call."""
    d, dv = call.dims["d"], call.dims["dv"]
    if call.dtype not in ("float16", "bfloat16"):
        return f"cuDNN takes float16 and bfloat16, not {call.dtype}"
    if d != dv or d % 8 or d > 128:
        return f"cuDNN takes heads of q, k and v of one width, a multiple of 8 up to 128; these are {d} and {dv} wide"
    if call.arrays["bias"] is not None and call.arrays["bias"].dtype != call.arrays["q"].dtype:
        return "cuDNN takes a bias in the dtype of q: cast it, bias.astype(q.dtype)"
    return None


@provides(BACKEND, refuses=cudnn_takes)
def attention(q: Any, k: Any, v: Any, bias: Any = None, *, is_causal: bool = False, scale: float | None = None) -> Any:
    return attend(q, k, v, bias, is_causal, scale, "cudnn")
