"""transformers' own RMSNorm layers on portakern's rmsnorm, by the convention of the ``kernels`` package.

    from portakern.examples.huggingface import norms

    norms.kernelize(model)  # every RMSNorm of the model, forward and backward

The layer is what ``kernels`` calls a repository, an object with ``load()``, and :func:`mapping` is what its
``use_kernel_mapping`` takes. transformers takes only some releases of ``kernels``; with another one, or with none, its
layers do not know that they may be replaced, and :func:`kernelize` tells them. Nothing is loaded from a network.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn

import portakern
from portakern import UnsupportedError


@dataclass(frozen=True)
class Family:
    """What the RMSNorm layers of a family of models compute.

    Attributes:
      rounding: where 16-bit layers round: "once", at the end, or "before_weight" as well. In float32 it is all one.
      minus_one: the layer keeps its weight less 1.
      eps: the name under which the layer keeps eps.
    """

    rounding: Literal["once", "before_weight"]
    minus_one: bool = False
    eps: str = "variance_epsilon"


_LLAMA = (
    "Llama",
    "Glm4",
    "Granite",
    "Ministral",
    "Mistral",
    "Mixtral",
    "Phi3",
    "Qwen2",
    "Qwen3",
    "Qwen3Moe",
    "SmolLM3",
)
FAMILIES: dict[str, Family] = {
    **{f"{name}RMSNorm": Family("before_weight") for name in _LLAMA},
    "T5LayerNorm": Family("before_weight"),
    **{f"{name}RMSNorm": Family("once") for name in ("FlexOlmo", "GptOss", "NemotronH", "Olmo2", "Olmo3")},
    **{f"{name}RMSNorm": Family("once", True, "eps") for name in ("Gemma", "Gemma2", "Gemma3", "Qwen3_5")},
}
"""Name of a layer's class -> what it computes. A layer that is not here is refused; add its row to have it served."""


def refusal(module: nn.Module, dtype: torch.dtype, rounds: bool) -> str | None:
    """Why a layer cannot be served for input of a dtype, in words; None where it can.

    ``rounds``: the op can round before the weight."""
    name, family = type(module).__name__, FAMILIES.get(type(module).__name__)
    if family is None:
        return (
            f"{name}: no family of norms is known by this name; expected one of {', '.join(sorted(FAMILIES))}: add its "
            "row to norms.FAMILIES"
        )
    if family.rounding == "once" or dtype not in (torch.float16, torch.bfloat16):
        return None
    if module.weight.dtype != dtype:
        return (
            f"{name}: weight is {module.weight.dtype} beside {dtype}, of which transformers makes the former; "
            "expected both alike: cast the model, or the layer's input"
        )
    if not rounds:
        return (
            f"{name}: it rounds to {dtype} before it multiplies with the weight, and the rmsnorm op of this version "
            "rounds once; expected float32: leave this model's norms to transformers"
        )
    return None


@functools.cache
def _layer(backend: str | None) -> type[nn.Module]:
    op = portakern.op("rmsnorm", backend=backend)
    rounds = any(option.name == "rounding" for option in op.spec.options)

    def normalised(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        why = refusal(module, x.dtype, rounds)
        if why is not None:
            raise UnsupportedError(why)
        family = FAMILIES[type(module).__name__]
        weight = module.weight if x.dtype in (torch.float16, torch.bfloat16) else module.weight.to(x.dtype)
        weight = 1.0 + weight.to(torch.float32 if x.dtype != torch.float64 else x.dtype) if family.minus_one else weight
        how = {"rounding": family.rounding} if rounds else {}
        return op(x, weight, eps=getattr(module, family.eps), **how)

    class RMSNorm(nn.Module):
        """The forward that stands for a layer's own, which is its ``self``; it keeps nothing itself."""

        can_torch_compile = True
        has_backward = True

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            kind = hidden_states.device.type
            if not torch.is_autocast_enabled(kind):
                return normalised(self, hidden_states)
            with torch.autocast(kind, enabled=False):  # the layer computes in float32 by itself
                return normalised(self, hidden_states)

    return RMSNorm


@dataclass(frozen=True)
class Layer:
    """portakern's rmsnorm as ``kernels`` has layers: an object that loads a class.

    ``backend``: who must serve it, None: chosen from the arrays."""

    backend: str | None = None

    def load(self) -> type[nn.Module]:
        return _layer(self.backend)

    def __str__(self) -> str:
        return f"portakern's rmsnorm on {self.backend or 'the backend of the arrays'}"


def mapping(backend: str | None = None) -> dict[str, dict[str, Any]]:
    """What ``kernels.use_kernel_mapping`` takes: for every mode, and ahead of the kernels that transformers names for
    some of them."""
    from kernels import Mode

    modes = [Mode.FALLBACK, *(m for base in (Mode.INFERENCE, Mode.TRAINING) for m in (base, base | Mode.TORCH_COMPILE))]
    layers = {mode: Layer(backend) for mode in modes}
    return {name: dict.fromkeys(("cpu", "cuda", "rocm"), layers) for name in ("RMSNorm", "RMSNormZeroCentered")}


def kernelize(model: nn.Module, backend: str | None = None) -> int:
    """Put portakern's rmsnorm under every RMSNorm of a model; their number.

    It goes through ``kernels`` where that is installed, without its fallback, whether or not transformers takes that
    release; without it the forward of each layer is replaced as ``kernels`` would do it.

    Raises:
      UnsupportedError: a layer that is called RMSNorm and is of no known family, or that rounds where the op cannot.
    """
    found = [m for m in model.modules() if type(m).__name__ in FAMILIES or type(m).__name__.endswith("RMSNorm")]
    op = portakern.op("rmsnorm", backend=backend)
    rounds = any(option.name == "rounding" for option in op.spec.options)
    layers = [m for m in found if not isinstance(m, nn.RMSNorm)]  # PyTorch's own is portakern.torch.swapped's to serve
    for module in layers:
        why = refusal(module, module.weight.dtype, rounds)
        if why is not None:
            raise UnsupportedError(why)
    if importlib.util.find_spec("kernels") is None:
        for module in layers:
            module.forward = MethodType(_layer(backend).forward, module)
        return len(layers)
    import kernels

    for kind in {type(m) for m in layers}:
        if not hasattr(kind, "kernel_layer_name"):
            kernels.replace_kernel_forward_from_hub(kind, "RMSNorm")
    with kernels.use_kernel_mapping(mapping(backend)):
        for module in layers:  # one layer serves every mode
            kernels.kernelize(module, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, use_fallback=False)
    return len(layers)
