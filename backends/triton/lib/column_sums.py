"""Sums over rows: each group of rows leaves its own, and one kernel adds these up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from portakern.backends.triton.launch import accumulator, cdiv, launch, torch_dtype
from portakern.backends.triton.layout import fresh

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

SUMMED = 1024  # partial sums that one program of layernorm_vjp_sum_kernel adds up


@triton.jit
def layernorm_vjp_sum_kernel(
    a, b, a_sum, b_sum, count, n, tiles, summed: tl.constexpr, block_rows: tl.constexpr, block_n: tl.constexpr,
    acc_dtype: tl.constexpr,
):  # fmt: skip
    """Sums over ``summed`` rows at a time of a and b, (count, n); b may be None."""
    part, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    col = tile.to(tl.int64) * block_n + tl.arange(0, block_n)[None, :]
    a_acc, b_acc = tl.zeros([block_rows, block_n], acc_dtype), tl.zeros([block_rows, block_n], acc_dtype)
    first = part * summed
    for start in range(first, min(first + summed, count), block_rows):
        row = start + tl.arange(0, block_rows)[:, None]
        ok = (row < count) & (col < n)
        a_acc += tl.load(a + row * n + col, mask=ok, other=0.0)
        if b is not None:
            b_acc += tl.load(b + row * n + col, mask=ok, other=0.0)
    tl.store(a_sum + part * n + col, tl.sum(a_acc, 0)[None, :].to(a_sum.dtype.element_ty), mask=col < n)
    if b is not None:
        tl.store(b_sum + part * n + col, tl.sum(b_acc, 0)[None, :].to(b_sum.dtype.element_ty), mask=col < n)


def scratch(call: Call, *shape: int) -> torch.Tensor:
    """A fresh tensor for sums, in the dtype that they are kept in."""
    return fresh(shape, torch_dtype("float64" if call.dtype == "float64" else "float32"), call.arrays["d_y"].device)


def add_up(call: Call, partial: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients by name from (groups, n) partial sums of each, all of one shape."""
    block_n, parts = 32, 0
    while partial and parts != 1:
        count, n = next(iter(partial.values())).shape
        parts, tiles = cdiv(count, SUMMED), cdiv(n, block_n)
        sums = {
            name: fresh((n,), torch_dtype(call.outputs[name][1]), p.device) if parts == 1 else scratch(call, parts, n)
            for name, p in partial.items()
        }
        (a, b), (a_sum, b_sum) = ((*of.values(), None)[:2] for of in (partial, sums))
        launch(layernorm_vjp_sum_kernel, parts * tiles, call, a, b, a_sum, b_sum, count, n, tiles, summed=SUMMED,
               block_rows=64, block_n=block_n, acc_dtype=accumulator(call.dtype), num_warps=8)  # fmt: skip
        partial = sums
    return partial
