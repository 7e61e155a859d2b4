"""Numbers of rows in row-major order, by a kernel: what ``Tensor.contiguous`` copies no capture has (:mod:`.plan`),
so that a call with such an array would be worked out anew each time, in a step of a model for each of its chunks.

The gradient that ``loss.sum()`` hands back is one number with strides of 0, in every training step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from portakern.backends.triton.capture import tracing
from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import collapse, fresh_like

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

__all__ = ["in_order"]

BLOCK = 1024


@triton.jit(do_not_specialize=["numel", "middle", "inner", "x_outer", "x_middle", "x_inner"])
def in_order_kernel(x, y, numel, middle, inner, x_outer, x_middle, x_inner, index: tl.constexpr, block: tl.constexpr):
    """y = x, of three dimensions of which the last two have extents middle and inner. index: of how many bits the
    number of an element is, since a quotient of 64 takes longer than memory."""
    i = tl.program_id(0).to(index) * block + tl.arange(0, block)
    row = i // inner
    at = (row // middle).to(tl.int64) * x_outer + (row % middle).to(tl.int64) * x_middle
    at += (i % inner).to(tl.int64) * x_inner
    tl.store(y + i, tl.load(x + at, mask=i < numel, other=0), mask=i < numel)


def in_order(call: Call, x: torch.Tensor) -> torch.Tensor:
    """``x`` where it lies in row-major order, else a copy that does. More dimensions than three strides describe are
    gathered by its library."""
    if tracing() is not None:
        return x.contiguous()  # an abstract array, whose trace has it
    if x.is_contiguous():
        return x
    extents, (strides,) = collapse(tuple(x.shape), x.stride())
    if len(extents) > 3:
        return x.contiguous()
    (_, middle, inner), steps = (1, 1, *extents)[-3:], (0, 0, *strides)[-3:]
    made = fresh_like(x)
    numel = x.numel()
    launch(in_order_kernel, cdiv(numel, BLOCK), call, x, made, numel, middle, inner, *steps,
           index=tl.int32 if numel < 2**31 - BLOCK else tl.int64, block=BLOCK, num_warps=4)  # fmt: skip
    return made
