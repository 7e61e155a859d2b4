"""portakern's ops as an experts implementation of transformers, by transformers' own interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from portakern.errors import UnsupportedError
from portakern.frameworks.torch.experts import sent_to_experts
from portakern.frameworks.torch.functions import kept_op

__all__ = ["register_experts"]

ACTIVATIONS = ("SiLU", "SiLUActivation")
"""Classes of the gate's function that swiglu has."""


def register_experts(name: str = "portakern", backend: str | None = None) -> None:
    """Register the permute, grouped_matmul, swiglu and unpermute ops with transformers, for models whose config says
    ``experts_implementation``: Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss and others, in inference and in training.

    >>> portakern.torch.register_experts()
    >>> model.config._experts_implementation = "portakern"

    A gate of SiLU is swiglu; another one, as that of gpt-oss, is the module's own between the products. A bias is added
    to each row by the number of its expert.

    Args:
      name: the name to register; an existing registration of this name is replaced.
      backend: the backend that must run it; None: chosen from the arrays.

    Raises:
      UnsupportedError: transformers has no such interface: it is older than 5.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
    except ImportError:
        raise UnsupportedError(
            "register_experts: this transformers has no interface of experts; install transformers 5 or later"
        ) from None

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if getattr(self, "has_post_expert_norm", False):
            raise UnsupportedError(
                f"{name}: {type(self).__name__} norms what each expert gives, which is not served: give the model "
                "another experts_implementation, such as 'grouped_mm'"
            )
        product = kept_op("grouped_matmul", backend)
        plain = type(self)._apply_gate is _default_apply_gate and type(self.act_fn).__name__ in ACTIVATIONS

        def linear(rows: Tensor, which: str, ends: Tensor) -> Tensor:
            weight = getattr(self, which)
            y: Tensor = product(rows, weight if self.is_transposed else weight.mT, ends)
            if not self.has_bias:
                return y
            bias = getattr(self, f"{which}_bias")
            return y + kept_op("embedding", backend)(bias, expert_of_rows(ends, len(rows), len(bias)))

        def experts(rows: Tensor, ends: Tensor) -> Tensor:
            opened = linear(rows, "gate_up_proj" if self.has_gate else "up_proj", ends)
            if self.has_gate and plain:
                opened = kept_op("swiglu", backend)(*opened.chunk(2, -1))
            else:
                opened = self._apply_gate(opened) if self.has_gate else self.act_fn(opened)
            return linear(opened, "down_proj", ends)

        return sent_to_experts(hidden_states, top_k_index, top_k_weights, self.num_experts, experts, backend)

    ALL_EXPERTS_FUNCTIONS.register(name, forward)


def expert_of_rows(ends: Tensor, rows: int, experts: int) -> Tensor:
    """The expert of each row; behind the last expert's rows, which nobody reads, the last one."""
    numbers = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, numbers, right=True, out_int32=True).clamp(max=experts - 1)
