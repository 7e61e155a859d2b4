"""transformers' own RMSNorm layers on portakern's rmsnorm, by the convention of the ``kernels`` package.

    from portakern.examples.huggingface import norms

    with kernels.use_kernel_mapping(norms.mapping()):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, use_fallback=False)

The layer is what ``kernels`` calls a repository, an object with ``load()``, and :func:`mapping` is what its
``use_kernel_mapping`` takes. Without ``kernels``, and for what else a model has, there is ``portakern.torch.apply``.
Nothing is loaded from a network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from portakern import UnsupportedError
from portakern.frameworks.torch.models.norms import served_norm


@torch.compiler.assume_constant_result
def forward_of(module: nn.Module, backend: str | None) -> Callable[..., torch.Tensor]:
    """The forward that stands for that of a layer's class, found once for the class."""
    kept = _forwards.get((type(module), backend))
    if kept is None:
        found = served_norm(module, backend)
        if found is None:
            raise UnsupportedError(
                f"{type(module).__name__}: no norm is known that computes what it does; expected one whose forward is"
                " that of a prototype of portakern.frameworks.torch.models.norms"
            )
        kept = _forwards[type(module), backend] = found[1].made().forward
    return kept


_forwards: dict[tuple[type, str | None], Callable[..., torch.Tensor]] = {}


@functools.cache
def _layer(backend: str | None) -> type[nn.Module]:
    class RMSNorm(nn.Module):
        """The forward that stands for a layer's own, which is its ``self``; it keeps nothing itself."""

        can_torch_compile = True
        has_backward = True

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return forward_of(self, backend)(self, hidden_states)

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
