"""Liger's Triton kernels (Hsu et al. 2024, Liger Kernel), where ``liger-kernel`` is installed."""

from __future__ import annotations

from typing import Any

from portakern.backends.peers.provide import LACKS, provides
from portakern.backends.peers.torch_eager import as_asked, as_precise, two_terms
from portakern.core.backend import Backend
from portakern.core.call import Call

BACKEND = Backend(
    "liger",
    framework="torch",
    peer=True,
    platforms=("cuda", "rocm"),
    requires=("torch", "triton", "liger_kernel"),
    refusals=(LACKS, "Liger computes", "Liger takes", "torch is set"),
)


def narrow(call: Call) -> str | None:
    """Its kernels compute in float32, whatever the arrays are."""
    return "Liger computes in float32, which is less than float64" if call.dtype == "float64" else None


def along_rows(call: Call) -> str | None:
    """Why its softmax does not take a call."""
    x = call.arrays["x"]
    if call.options["axis"] not in (-1, x.ndim - 1):
        return "Liger takes the last axis only: move yours there, x.movedim(axis, -1)"
    return narrow(call)


def affine(call: Call) -> str | None:
    """Why its layer norm does not take a call."""
    if call.arrays["weight"] is None or call.arrays["bias"] is None:
        return "Liger takes a layer norm with both weight and bias: pass ones and zeros"
    return narrow(call)


@provides(BACKEND, refuses=along_rows, gradients=False)
def softmax(x: Any, *, axis: int = -1) -> Any:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


@provides(BACKEND, refuses=affine)
def layernorm(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, eps)


@provides(BACKEND, refuses=narrow)
def rmsnorm(x: Any, weight: Any = None, *, eps: float = 1e-6, rounding: str = "once") -> Any:
    """Gemma's casts are all in float32 and round once; Llama's round before the product with the weight.

    Not in place, where it would write d_x over d_y.
    """
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    casts = {"once": "gemma", "before_weight": "llama"}[rounding]
    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, casts, False)


def weighed(call: Call) -> str | None:
    """Why its norm of a sum does not take a call."""
    if call.arrays["weight"] is None:
        return "Liger takes a norm of a sum with a weight: pass ones"
    return narrow(call)


@provides(BACKEND, refuses=weighed, outputs=2, before=two_terms)
def add_rmsnorm(x: Any, residual: Any, weight: Any = None, *, eps: float = 1e-6, rounding: str = "once") -> Any:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    casts = {"once": "gemma", "before_weight": "llama"}[rounding]
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, 0.0, casts, False)


def of_tanh(call: Call) -> str | None:
    """Why its gated product does not take a call."""
    if call.options["approximate"] != "tanh":
        return "Liger takes gelu's tanh form only: pass approximate='tanh'"
    return narrow(call)


@provides(BACKEND, refuses=of_tanh, gradients=False)
def geglu(gate: Any, up: Any, *, approximate: str = "none") -> Any:
    """Its backward pass writes the gradients over gate and up, so that it is no gradient op, and its rotary embedding,
    which is written over q and k, is no op here at all.
    """
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)


@provides(BACKEND, refuses=narrow, gradients=False)
def cross_entropy(
    logits: Any, labels: Any, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Any:
    """Its losses have the dtype of the logits. Where a gradient is wanted it writes that over the logits in the forward
    pass, so that its backward pass alone is no gradient op.
    """
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    rows, label = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    loss = LigerCrossEntropyFunction.apply(rows, label, None, ignore_index, z_loss, label_smoothing, "none")[0]
    return loss.reshape(labels.shape).float()


def by_torch(call: Call) -> str | None:
    """Its products are torch's."""
    return narrow(call) or as_precise(call)


@provides(BACKEND, refuses=by_torch, around=as_asked)
def linear_cross_entropy(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    precision: str = "ieee",
) -> Any:
    """A loss a row. Its gradients then take all logits again, three products; only of the mean or the sum of losses
    does it make them in the forward pass.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    rows, label = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
    arguments = rows, weight, label, None, None, ignore_index, z_loss, label_smoothing, "none"
    return LigerFusedLinearCrossEntropyFunction.apply(*arguments)[0].reshape(labels.shape)
