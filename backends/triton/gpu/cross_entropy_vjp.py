"""Gradient of the cross entropy of logits with integer labels, over the last axis of any strided view.

    d_x_j = d_loss [p_j (1 + 2 z lse) - (1 - e) [j = t] - e / n]        p = exp(x - lse)

lse was saved, so that no element waits for another: a program owns a tile of ``block_rows`` rows by ``block_n``
elements of each, and what an ignored row holds counts nowhere. Where rows lie side by side, logits are read along
memory and the gradient is written along its own. e and z are known to the compiler.

Source: the derivative of the formula of cross_entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu._columns import product, side_by_side
from portakern.backends.triton.gpu._rows import blocks, tile_of
from portakern.backends.triton.gpu.softmax import key, lead
from portakern.backends.triton.launch import accumulator, cdiv, lanes, launch, refuse_tile
from portakern.backends.triton.layout import aligned, pow2_at_least, result_like, row_start, walk_rows
from portakern.spec import Tile
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


@triton.jit
def gradient(t, is_label, log_sum, g, counted, classes, even: tl.constexpr, z: tl.constexpr, acc_dtype: tl.constexpr):
    """By logits t of rows, those that are ``counted``; g may be None for 1."""
    p = tl.exp(t - log_sum)
    if z > 0:
        p = product(p, tl.broadcast_to(1.0 + 2.0 * z * log_sum, p.shape))  # at an end as within a vector
    p = tl.where(is_label, p - (1.0 - even), p)
    if even > 0:
        p = p - even / tl.cast(classes, acc_dtype)
    if g is not None:
        p = g * p
    return tl.where(counted, p, 0.0)


@triton.jit
def in_vectors(row, col, n, vector: tl.constexpr, edges: tl.constexpr):
    """Of rows that lie one after another from a multiple of ``vector`` on, wherever each begins: the last such multiple
    that is not behind its first element, by how much that is before it, and, counted from there, which of ``col`` lie
    in whole vectors of the row, and where the others are, in a tile of ``edges``, -1 for none."""
    base = row * n // vector * vector
    off = (row * n - base)[:, None]
    first, last = (off + vector - 1) // vector * vector, (off + n) // vector * vector
    lane = tl.arange(0, edges)[None, :].to(tl.int64)
    before = (lane >= off) & (lane < tl.minimum(first, off + n)) & (lane < vector)
    behind = last + lane - vector
    after = (lane >= vector) & (lane < 2 * vector) & (behind >= first) & (behind < off + n)
    return base, off, (col >= first) & (col < last), tl.where(before, lane, tl.where(after, behind, -1))


@triton.jit
def cross_entropy_vjp_kernel(x, labels, lse, d_loss, start, d_x, rows, rows_inner, n, steps, ignored, first, classes,
                             x_outer, x_inner, x_n,
                             block_rows: tl.constexpr, block_n: tl.constexpr, acc_dtype: tl.constexpr,
                             even: tl.constexpr, z: tl.constexpr, vector: tl.constexpr, edges: tl.constexpr,
                             beside: tl.constexpr, flat: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    """x: the n logits from class ``first`` on, of ``classes``. start: None, or where more lies to be added to first.
    d_loss: None for ones. even: the share e of the target that all classes divide. vector: 0, or how many elements of
    rows that lie one after another are moved at once (:func:`in_vectors`). beside: rows lie side by side, and those
    that are ignored are read too, as a mask of each row's own would leave a thread one number at a time."""
    n = aligned(n, unit)
    if start is not None:
        first += tl.load(start)
    row, col = tile_of(steps, block_rows, block_n)
    row_ok = row < rows
    label = tl.load(labels + row, mask=row_ok, other=ignored).to(tl.int64)
    counted = (row_ok & (label != ignored))[:, None]
    label, row_ok = label[:, None] - first, row_ok[:, None]
    log_sum = tl.load(lse + row, mask=row < rows, other=0.0).to(acc_dtype)[:, None]
    if d_loss is not None:
        g = tl.load(d_loss + row, mask=row < rows, other=0.0).to(acc_dtype)[:, None]
    else:
        g = None
    if vector:
        base, off, inside, edge = in_vectors(row, col, n, vector, edges)
        x_row, d_x_row = x + base[:, None], d_x + base[:, None]
        if tl.program_id(0) % steps == 0:
            t_edge = tl.load(x_row + edge, mask=counted & (edge >= 0), other=float("-inf")).to(acc_dtype)
            at_ends = gradient(t_edge, edge - off == label, log_sum, g, counted, classes, even, z, acc_dtype)
            tl.store(d_x_row + edge, at_ends.to(d_x.dtype.element_ty), mask=row_ok & (edge >= 0))
        t = tl.load(x_row + col, mask=counted & inside, other=float("-inf")).to(acc_dtype)
        out = gradient(t, col - off == label, log_sum, g, counted, classes, even, z, acc_dtype)
        tl.store(d_x_row + col, out.to(d_x.dtype.element_ty), mask=row_ok & inside)
    else:
        x_row = row_start(x, row, rows_inner, x_outer, x_inner, flat, unit)[:, None]
        read = row_ok if beside else counted
        t = tl.load(x_row + col * x_n, mask=read & (col < n), other=float("-inf")).to(acc_dtype)
        out = gradient(t, col == label, log_sum, g, counted, classes, even, z, acc_dtype)
        tl.store(d_x + (row * n)[:, None] + col, out.to(d_x.dtype.element_ty), mask=row_ok & (col < n))


def tile_brackets(n: int, arch: str) -> dict[str, int]:
    """Tiles of 4096 elements, 16 a thread, of one row where that is so long."""
    block_n = pow2_at_least(n, 128, 4096)
    block_rows = pow2_at_least(4096 // block_n, 1, 16)
    width = lanes(arch)
    return {"block_rows": block_rows, "block_n": block_n,
            "num_warps": pow2_at_least(block_rows * block_n // (16 * width), 1, 512 // width)}  # fmt: skip


def tile_turned(call: Call) -> dict[str, int]:
    """Tiles of logits whose rows lie side by side: 128 bytes, a line of the cache, of what lies beside each other where
    they are read, and no less where the gradient, whose rows lie one after the other, is written."""
    block_rows, block_n = 128 // numpy_dtype(call.dtype).itemsize, 128
    return {"block_rows": block_rows, "block_n": block_n,
            "num_warps": block_rows * block_n // (16 * lanes(call.target.arch))}  # fmt: skip


def fitted(call: Call, n: int, tiling: Mapping[str, int]) -> dict[str, int]:
    """A tiling's tile of rows that lie side by side, no longer than a row of few classes, and warps that fill it."""
    block_rows, block_n = tiling["block_rows"], min(tiling["block_n"], pow2_at_least(n))
    num_warps = min(tiling["num_warps"], max(block_rows * block_n // (16 * lanes(call.target.arch)), 1))
    return {"block_rows": block_rows, "block_n": block_n, "num_warps": num_warps}


def default_tiling(call: Call) -> dict[str, int]:
    x, axis = lead(call)
    return tile_turned(call) if side_by_side(x, axis) else tile_brackets(x.shape[axis], call.target.arch)


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    n, block_n = call.dims["n"], tiling["block_n"]
    return refuse_tile(call, tiling, call.arrays["labels"].numel() * (cdiv(n, block_n) + (n > block_n)))


@BACKEND.implements(
    "cross_entropy_vjp",
    key=key,
    tiling=default_tiling,
    supports=supports,
    knobs={"num_warps": Tile(1, 32)},
    overwrites=True,
)
def cross_entropy_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x = call.arrays["logits"]
    labels, lse, d_loss = (call.arrays[name].contiguous() for name in ("labels", "lse", "d_loss"))
    d_x = result_like(x, call, "d_logits")
    gradient_into(call, x, labels, lse, d_loss, d_x, tiling, 0, call.dims["n"])
    return (d_x,)


def gradient_into(
    call: Call, x: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor, d_loss: torch.Tensor | None,
    d_x: torch.Tensor, tiling: Mapping[str, int], first: int, classes: int, start: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradient by logits x, those from class ``first`` on of ``classes``, of a call with this op's options.
    d_x is contiguous, as are the numbers of rows, and may be x itself; no d_loss means ones. ``start``: one int32 that
    is added to first, where it is not known before the launch."""
    n, beside = x.shape[-1], side_by_side(x, x.ndim - 1)
    (x,), rows = walk_rows(x.ndim - 1, x)
    tile, known, elements = blocks(tiling), rows.known(call.dtype), 16 // numpy_dtype(call.dtype).itemsize
    if beside:
        tile = fitted(call, n, tiling)
    # Rows that begin anywhere: where they lie as those of the result do, and are long, all but their ends in vectors.
    vector = elements if known["unit"] == 1 and rows.strides[0] == rows.strides[1] and n > tile["block_n"] else 0
    steps = cdiv(n + max(vector - 1, 0), tile["block_n"])
    launch(cross_entropy_vjp_kernel, cdiv(rows.height, tile["block_rows"]) * steps, call, x, labels, lse, d_loss, start,
           d_x, rows.height, rows.inner, n, steps, call.options["ignore_index"], first, classes, *rows.strides[0],
           **tile, acc_dtype=accumulator(call.dtype), even=call.options["label_smoothing"], z=call.options["z_loss"],
           vector=vector, edges=max(2 * vector, tile["num_warps"] * lanes(call.target.arch)), beside=beside,
           **known)  # fmt: skip
