"""What the kernels of products with scales share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def shared_strides(scale: torch.Tensor) -> tuple[int, ...]:
    """The strides of a scale array, 0 along an axis of 1."""
    return tuple(0 if extent == 1 else stride for extent, stride in zip(scale.shape, scale.stride(), strict=True))
