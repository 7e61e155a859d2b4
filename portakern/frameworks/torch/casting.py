"""What torch.autocast makes of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["lowered", "widened"]


def widened(x: Tensor) -> bool:
    """Whether torch.autocast hands a tensor to sums in float32."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)


def lowered(x: Tensor) -> Tensor:
    """A tensor as torch.autocast hands it to matrix products and attention."""
    if not widened(x):
        return x
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
