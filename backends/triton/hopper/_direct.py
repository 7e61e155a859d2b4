"""Products of small 16-bit matrices, one or a batch, where the copy engine takes them only from a copy or slowly.

    c[z, i, j] = sum_k a[z, i, k] b[z, k, j]

A program computes block_m rows of one entry of c, with all of its columns. Operands go through registers into shared
memory: of a row that begins anywhere one element at a time, else by vectors of ``unit`` elements. A copy of the operand
would be written and read once more, and a small matrix is read by few programs.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import aligned

if TYPE_CHECKING:
    import torch

    from portakern.backends.triton.configs import HopperProductConfig
    from portakern.core.call import Call

REACH = 2**31  # elements of an entry, which 32 bits count
VECTOR = 8  # elements of 16 bits that a thread reads or writes at once


class DirectPlan(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
      block_m, block_n, block_k: extents of a tile; steps: how many tiles k has.
      a_across, b_across: an operand's lines run along the first of its axes.
      a_unit, b_unit, c_unit: so many elements lie side by side from a multiple of as many on, in every line.
    """

    block_m: int
    block_n: int
    block_k: int
    steps: int
    a_across: bool
    b_across: bool
    a_unit: int
    b_unit: int
    c_unit: int


@triton.jit
def direct_tile(x, row, column, rows, columns, line, across: tl.constexpr, unit: tl.constexpr):
    """The tile of x at these rows and columns, 0 beyond its extents; ``line``: from one of its lines to the next."""
    step = aligned(line, unit)
    if across:
        at = row[:, None] + (column * step)[None, :]
        inside = (row < aligned(rows, unit))[:, None] & (column < columns)[None, :]
    else:
        at = (row * step)[:, None] + column[None, :]
        inside = (row < rows)[:, None] & (column < aligned(columns, unit))[None, :]
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["m", "n", "k", "a_batch", "a_line", "b_batch", "b_line"])
def matmul_direct_kernel(a, b, c, m, n, k, a_batch, a_line, b_batch, b_line, plan: tl.constexpr):
    """a_batch, b_batch: from one entry of an operand to the next, 0 where there is one for all."""
    tiles_m = tl.cdiv(m, plan.block_m)
    z, i = (tl.program_id(0) // tiles_m).to(tl.int64), tl.program_id(0) % tiles_m * plan.block_m
    row, column = i + tl.arange(0, plan.block_m), tl.arange(0, plan.block_n)
    a += z * aligned(a_batch, plan.a_unit)
    b += z * aligned(b_batch, plan.b_unit)
    acc = tl.full([plan.block_m, plan.block_n], 0.0, tl.float32)
    steps: tl.constexpr = plan.steps
    for step in tl.static_range(steps):
        kk = step * plan.block_k + tl.arange(0, plan.block_k)
        at = direct_tile(a, row, kk, m, k, a_line, plan.a_across, plan.a_unit)
        bt = direct_tile(b, kk, column, k, n, b_line, plan.b_across, plan.b_unit)
        acc = tl.dot(at, bt, acc)
    c_n = aligned(n, plan.c_unit)
    tl.store(c + z * m * c_n + ((row * c_n)[:, None] + column[None, :]), acc.to(c.dtype.element_ty),
             mask=(row < m)[:, None] & (column < c_n)[None, :])  # fmt: skip


def in_lines(x: torch.Tensor, flattened: bool) -> bool:
    """Whether elements of x lie side by side along one of its last two axes, and 32 bits count those of a matrix, or of
    all (``flattened``)."""
    axes = range(x.ndim) if flattened else (-2, -1)
    last = sum((x.shape[axis] - 1) * x.stride(axis) for axis in axes)
    return last < REACH and any(x.stride(axis) == 1 or x.shape[axis] == 1 for axis in (-1, -2))


def multiply_directly(
    call: Call, a: tuple[torch.Tensor, int], b: tuple[torch.Tensor, int], c: torch.Tensor, extents: tuple[int, int],
    config: HopperProductConfig,
) -> None:  # fmt: skip
    """c = a b. a, b: an operand and the step from one of its entries to the next, 0 where it has one for all.
    extents: batch entries and rows."""
    (entries, m), n, k = extents, call.dims["n"], call.dims["k"]

    def laid(x: torch.Tensor, batch: int) -> tuple[bool, int, int]:
        """Whether lines run across, the step from one to the next, and how many elements begin together."""
        row, column = x.stride()[-2:]
        across = column != 1 and x.shape[-1] != 1
        line, length = (column, x.shape[-2]) if across else (row, x.shape[-1])
        return across, line, gcd(VECTOR, line, batch, length)

    (a_across, a_line, a_unit), (b_across, b_line, b_unit) = laid(*a), laid(*b)
    plan = DirectPlan(
        config.block_m, config.block_n, config.block_k, cdiv(k, config.block_k), a_across, b_across, a_unit, b_unit,
        gcd(VECTOR, n),
    )  # fmt: skip
    launch(matmul_direct_kernel, entries * cdiv(m, config.block_m), call, a[0], b[0], c, m, n, k, a[1], a_line, b[1],
           b_line, plan=plan, num_warps=config.num_warps, num_stages=config.num_stages)  # fmt: skip
