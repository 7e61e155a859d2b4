"""Tensor descriptors in interpreted kernels: tiles of an array, clipped at its edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl

from portakern.backends.triton.interpreter.values import PROGRAM, InterpretedTensor, convert, made

__all__ = ["Described"]


class Described:
    """What ``triton.language`` calls a tensor descriptor: an array that is read and written in tiles. Beyond its
    extents there are zeros, and nothing is written.

    Attributes:
      dtype: of its elements; block_shape: a tile's extents.
    """

    def __init__(self, descriptor: Any, dtype: tl.dtype) -> None:
        if getattr(descriptor, "layout", None) is not None:
            raise NotImplementedError("a descriptor with a layout is Gluon's, whose kernels are compiled alone")
        base = descriptor.base
        array = base.as_strided(descriptor.shape, descriptor.strides, base.storage_offset())
        bits = {torch.bfloat16: torch.int16}.get(base.dtype)
        self._array = array.view(bits).numpy().view(np.uint16) if bits else array.numpy()
        self.dtype, self.block_shape = dtype, list(descriptor.block_shape)

    def load(self, offsets: Sequence[Any]) -> InterpretedTensor:
        """The tile whose first element lies at ``offsets``."""
        tile = np.zeros(self.block_shape, self._array.dtype)
        inside, there = self._common(offsets)
        tile[inside] = self._array[there]
        return made(tile, self.dtype)

    def store(self, offsets: Sequence[Any], value: InterpretedTensor) -> None:
        """Write a tile, of the array's dtype, there."""
        if value.handle.data.shape != tuple(self.block_shape) or value.dtype.name != self.dtype.name:
            raise ValueError(
                f"a tile of {value.dtype} {value.handle.data.shape} is stored where tiles are {self.dtype} "
                f"{tuple(self.block_shape)}"
            )
        inside, there = self._common(offsets)
        self._array[there] = convert(value.handle.data, value.dtype, self.dtype)[inside]

    def _common(self, offsets: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What a tile and the array have in common, in the tile and in the array."""
        first = [int(o) for o in offsets]
        if len(first) != len(self.block_shape):
            raise ValueError(f"program {PROGRAM.index}: {len(first)} offsets for tiles of {self.block_shape}")
        low = [max(o, 0) for o in first]
        high = [
            max(min(o + b, n), m) for o, b, n, m in zip(first, self.block_shape, self._array.shape, low, strict=True)
        ]
        inside = tuple(slice(m - o, h - o) for o, m, h in zip(first, low, high, strict=True))
        there = tuple(slice(m, h) for m, h in zip(low, high, strict=True))
        return inside, there
