"""Norms of a model on the rmsnorm and layernorm ops, alone or with the residual that is added before them.

A norm is called as it was, ``norm(x)``, or by a block of :mod:`.blocks` as ``norm(x, residual)``, which gives the norm
of the sum and the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from portakern.frameworks.torch.casting import widened
from portakern.frameworks.torch.functions import kept_op, layer_norm, rms_norm
from portakern.frameworks.torch.models.prototypes import find
from portakern.frameworks.torch.models.served import Heart, Recipe, expected

__all__ = ["NORMS", "RmsNormLayer", "served_norm"]

SIXTEEN = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class RmsNormLayer:
    """What the RMSNorm layers of a family of models compute.

    Attributes:
      rounding: where 16-bit layers round: "once", at the end, or "before_weight" as well. In float32 it is all one.
      minus_one: the layer keeps its weight less 1.
      eps: the name under which the layer keeps eps.
    """

    rounding: Literal["once", "before_weight"]
    minus_one: bool = False
    eps: str = "variance_epsilon"


NORMS = {
    "llama.LlamaRMSNorm": RmsNormLayer("before_weight"),
    "t5.T5LayerNorm": RmsNormLayer("before_weight"),
    "olmo2.Olmo2RMSNorm": RmsNormLayer("once"),
    "nemotron_h.NemotronHRMSNorm": RmsNormLayer("once"),
    "gemma.GemmaRMSNorm": RmsNormLayer("once", minus_one=True, eps="eps"),
}
"""Prototype -> what it computes."""


def served_norm(module: nn.Module, backend: str | None) -> tuple[str, Recipe] | None:
    """The op that serves a norm, and the forward that stands for the module's own; None for what is no norm known
    here."""
    kind: Any = type(module)
    if kind.forward is nn.LayerNorm.forward:
        return "layernorm", Recipe(_layer_norm, kind, (backend,))
    if kind.forward is nn.RMSNorm.forward:
        return "rmsnorm", Recipe(_rms_norm, kind, (backend,))
    return None if find(kind, NORMS) is None else ("rmsnorm", Recipe(_transformers_norm, kind, (backend,)))


def _transformers_norm(original_class: type, backend: str | None) -> Heart:
    kind: RmsNormLayer = expected(find(original_class, NORMS), original_class)
    norm, added = kept_op("rmsnorm", backend), kept_op("add_rmsnorm", backend)

    def normed(module: nn.Module, x: Tensor, residual: Tensor | None) -> Any:
        eps, weight = getattr(module, kind.eps), module.weight
        if residual is not None and residual.dtype != x.dtype:
            wide = torch.promote_types(x.dtype, residual.dtype)
            x, residual = x.to(wide), residual.to(wide)
        if kind.minus_one:
            weight = 1.0 + weight.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        elif x.dtype not in SIXTEEN:
            weight = weight.to(x.dtype)
        elif weight.dtype != x.dtype and kind.rounding == "before_weight":  # the product is of the weight's dtype
            y = normed_without_weight(x, residual, eps)
            return weight * y if residual is None else (weight * y[0], y[1])
        if residual is None:
            return norm(x, weight, eps=eps, rounding=kind.rounding)
        y, total = added(x, residual, weight, eps=eps, rounding=kind.rounding)
        return y, total

    def normed_without_weight(x: Tensor, residual: Tensor | None, eps: float) -> Any:
        return norm(x, None, eps=eps) if residual is None else added(x, residual, None, eps=eps)

    def forward(self: nn.Module, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        if not widened(hidden_states):
            return normed(self, hidden_states, residual)
        with torch.autocast(hidden_states.device.type, enabled=False):  # the layer computes in float32 by itself
            return normed(self, hidden_states, residual)

    return Heart(forward)


def _layer_norm(kind: type, backend: str | None) -> Heart:
    added = kept_op("add_layernorm", backend)

    def forward(self: nn.LayerNorm, input: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, backend=backend)
        wide = torch.promote_types(input.dtype, residual.dtype)
        y, total = added(input.to(wide), residual.to(wide), self.weight, self.bias, eps=self.eps)
        return y, total

    return Heart(forward)


def _rms_norm(kind: type, backend: str | None) -> Heart:
    def forward(self: nn.RMSNorm, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, backend=backend)

    return Heart(forward)
