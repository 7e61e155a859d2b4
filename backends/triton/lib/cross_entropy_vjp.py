"""The gradient of the cross entropy of rows of logits, into memory that its caller has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from portakern.backends.triton.launch import accumulator, cdiv, lanes, launch
from portakern.backends.triton.layout import aligned, pow2_at_least, row_start, walk_rows
from portakern.backends.triton.lib.columns import product, side_by_side
from portakern.backends.triton.lib.rows import blocks, exp_or_zero, tile_of
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


@triton.jit
def gradient(t, is_label, log_sum, low, g, counted, classes, even: tl.constexpr, z: tl.constexpr,
             acc_dtype: tl.constexpr):  # fmt: skip
    """By logits t of rows, those that are ``counted``. None for what is the same everywhere: g that is 1, no label
    among t, all rows counted."""
    apart = (t - log_sum) - low
    p = exp_or_zero(tl.where(apart > 0.0, 0.0, apart))
    if z > 0:
        p = product(p, tl.broadcast_to(1.0 + 2.0 * z * log_sum, p.shape))  # in a row as where two meet
    if is_label is not None:
        p = tl.where(is_label, p - (1.0 - even), p)
    if even > 0:
        p = p - even / tl.cast(classes, acc_dtype)
    if g is not None:
        p = g * p
    if counted is not None:
        p = tl.where(counted, p, 0.0)
    return p


@triton.jit
def of_row(labels, lse, low, d_loss, row, there, ignored, acc_dtype: tl.constexpr):
    """A row's label, whether it counts, its lse and lse_low, and its cotangent, 1 where there is none."""
    label = tl.load(labels + row, mask=there, other=ignored).to(tl.int64)
    log_sum, rest = log_sum_of(lse, low, row, there, acc_dtype)
    if d_loss is not None:
        g = tl.load(d_loss + row, mask=there, other=0.0).to(acc_dtype)
    else:  # a tuple that is returned holds no None where JAX's programs are compiled; compilers drop a factor of 1
        g = tl.full(row.shape, 1.0, acc_dtype)
    return label, label != ignored, log_sum, rest, g


@triton.jit
def log_sum_of(lse, low, row, there, acc_dtype: tl.constexpr):
    """lse of rows, and lse_low, which is 0 where there is none."""
    rest = tl.zeros(row.shape, acc_dtype)
    if low is not None:
        rest = tl.load(low + row, mask=there, other=0.0).to(acc_dtype)
    return tl.load(lse + row, mask=there, other=0.0).to(acc_dtype), rest


@triton.jit
def within_a_row(x, labels, lse, low, d_loss, d_x, begin, row, ignored, classes, width: tl.constexpr,
                 acc_dtype: tl.constexpr, even: tl.constexpr, z: tl.constexpr):  # fmt: skip
    """A tile of one row that counts, whose label is elsewhere."""
    at = begin + tl.arange(0, width)
    row = row + tl.arange(0, 1)
    _, _, log_sum, low, g = of_row(labels, lse, low, d_loss, row, row >= 0, ignored, acc_dtype)
    t = tl.load(x + at).to(acc_dtype)
    out = gradient(t, None, log_sum, low, g, None, classes, even, z, acc_dtype)
    tl.store(d_x + at, out.to(d_x.dtype.element_ty))


@triton.jit
def column(at, width: tl.constexpr):
    """``at`` in 32 bits, -1 where that is no column of the tile."""
    return tl.where((at >= 0) & (at < width), at, -1).to(tl.int32)


@triton.jit
def where_rows_meet(x, labels, lse, low, d_loss, d_x, begin, row, rows, n, ignored, first, classes, width: tl.constexpr,
                    acc_dtype: tl.constexpr, even: tl.constexpr, z: tl.constexpr, vector: tl.constexpr):  # fmt: skip
    """A tile of any two rows, but what the last whole vector of all leaves."""
    row = row + tl.arange(0, 1)
    border = (row + 1) * n - begin
    limit = tl.minimum(rows * n - begin, width).to(tl.int32) // vector * vector
    label, counted, log_sum, rest, g = of_row(labels, lse, low, d_loss, row, row < rows, ignored, acc_dtype)
    label_2, counted_2, log_sum_2, rest_2, g_2 = of_row(
        labels, lse, low, d_loss, row + 1, row + 1 < rows, ignored, acc_dtype
    )
    hit, hit_2 = column(label - first + border - n, width), column(label_2 - first + border, width)
    border = tl.minimum(border, width).to(tl.int32)
    col = tl.arange(0, width)
    own, at = col < border, col // vector * vector  # of a vector all that is read, or nothing: one mask
    inside = at < limit
    read = inside & ((counted & (at < border)) | (counted_2 & (at + vector > border)))
    t = tl.load(x + begin + col, mask=read, other=float("-inf")).to(acc_dtype)
    is_label = col == tl.where(own, hit, hit_2)
    out = gradient(t, is_label, tl.where(own, log_sum, log_sum_2), tl.where(own, rest, rest_2), tl.where(own, g, g_2),
                   tl.where(own, counted, counted_2), classes, even, z, acc_dtype)  # fmt: skip
    tl.store(d_x + begin + col, out.to(d_x.dtype.element_ty), mask=inside)


@triton.jit
def behind_vectors(x, labels, lse, low, d_loss, d_x, rows, n, ignored, first, classes, acc_dtype: tl.constexpr,
                   even: tl.constexpr, z: tl.constexpr, vector: tl.constexpr, edges: tl.constexpr):  # fmt: skip
    """The elements behind the last whole vector of all rows; ``edges``: the threads, of which few have one."""
    at = rows * n // vector * vector + tl.arange(0, edges)
    there = at < rows * n
    row = rows - 1 + tl.arange(0, 1)
    label, counted, log_sum, rest, g = of_row(labels, lse, low, d_loss, row, row >= 0, ignored, acc_dtype)
    t = tl.load(x + at, mask=there & counted, other=float("-inf")).to(acc_dtype)
    out = gradient(t, at - row * n == label - first, log_sum, rest, g, counted, classes, even, z, acc_dtype)
    tl.store(d_x + at, out.to(d_x.dtype.element_ty), mask=there)


@triton.jit
def cross_entropy_vjp_long_kernel(x, labels, lse, low, d_loss, start, d_x, rows, n, ignored, first, classes,
                                  width: tl.constexpr, acc_dtype: tl.constexpr, even: tl.constexpr, z: tl.constexpr,
                                  vector: tl.constexpr, edges: tl.constexpr):  # fmt: skip
    """Rows that lie one after another, of ``width`` elements or more, are one row: a tile begins at a multiple of its
    width wherever rows do, and has elements of two of them at most. Most tiles have those of one, without its label,
    and compare and select nothing. The other arguments: as in :func:`cross_entropy_vjp_kernel`."""
    if start is not None:
        first += tl.load(start)
    rows, n = tl.cast(rows, tl.int64), tl.cast(n, tl.int64)
    begin = tl.program_id(0).to(tl.int64) * width
    row = begin // n
    label = tl.load(labels + row).to(tl.int64)
    hit = label - first + row * n - begin
    if (begin + width <= (row + 1) * n) & (label != ignored) & ((hit < 0) | (hit >= width)):
        within_a_row(x, labels, lse, low, d_loss, d_x, begin, row, ignored, classes, width, acc_dtype, even, z)
    else:
        where_rows_meet(x, labels, lse, low, d_loss, d_x, begin, row, rows, n, ignored, first, classes, width,
        acc_dtype,
                        even, z, vector)  # fmt: skip
    if begin + width >= rows * n:
        behind_vectors(x, labels, lse, low, d_loss, d_x, rows, n, ignored, first, classes, acc_dtype, even, z, vector,
                       edges)  # fmt: skip


@triton.jit
def cross_entropy_vjp_kernel(x, labels, lse, low, d_loss, start, d_x, rows, rows_inner, n, steps, ignored, first,
classes,
                             x_outer, x_inner, x_n,
                             block_rows: tl.constexpr, block_n: tl.constexpr, acc_dtype: tl.constexpr,
                             even: tl.constexpr, z: tl.constexpr, beside: tl.constexpr, flat: tl.constexpr,
                             unit: tl.constexpr):  # fmt: skip
    """x: the n logits from class ``first`` on, of ``classes``. start: None, or where more lies to be added to first.
    d_loss: None for ones. even: the share e of the target that all classes divide. beside: rows lie side by side, and
    those that are ignored are read too, as a mask of each row's own would leave a thread one number at a time."""
    n = aligned(n, unit)
    if start is not None:
        first += tl.load(start)
    row, col = tile_of(steps, block_rows, block_n)
    row_ok = row < rows
    label = tl.load(labels + row, mask=row_ok, other=ignored).to(tl.int64)
    counted = (row_ok & (label != ignored))[:, None]
    label, row_ok = label[:, None] - first, row_ok[:, None]
    log_sum, rest = log_sum_of(lse, low, row, row < rows, acc_dtype)
    if d_loss is not None:
        g = tl.load(d_loss + row, mask=row < rows, other=0.0).to(acc_dtype)[:, None]
    else:
        g = None
    x_row = row_start(x, row, rows_inner, x_outer, x_inner, flat, unit)[:, None]
    read = row_ok if beside else counted
    t = tl.load(x_row + col * x_n, mask=read & (col < n), other=float("-inf")).to(acc_dtype)
    out = gradient(t, col == label, log_sum[:, None], rest[:, None], g, counted, classes, even, z, acc_dtype)
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


def gradient_into(
    call: Call, x: torch.Tensor, labels: torch.Tensor, lse: tuple[torch.Tensor, torch.Tensor | None],
    d_loss: torch.Tensor | None, d_x: torch.Tensor, tiling: Mapping[str, int], first: int, classes: int,
    start: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradient by logits x, those from class ``first`` on of ``classes``, of a call with this op's options.
    ``lse``: with lse_low, or None for that. d_x is contiguous, as are the numbers of rows, and may be x itself; no
    d_loss means ones. ``start``: one int32 that is added to first, where it is not known before the launch."""
    n, beside = x.shape[-1], side_by_side(x, x.ndim - 1)
    (x,), rows = walk_rows(x.ndim - 1, x)
    tile, known = blocks(tiling), rows.known(call.dtype)
    if beside:
        tile = fitted(call, n, tiling)
    forms = {"num_warps": tile["num_warps"], "acc_dtype": accumulator(call.dtype),
             "even": call.options["label_smoothing"], "z": call.options["z_loss"]}  # fmt: skip
    width, vector = tile["block_rows"] * tile["block_n"], 16 // numpy_dtype(call.dtype).itemsize
    ignored = call.options["ignore_index"]
    if rows.strides[0] == rows.strides[1] and n >= width >= vector and not beside:
        launch(cross_entropy_vjp_long_kernel, cdiv(rows.height * n, width), call, x, labels, *lse, d_loss, start, d_x,
               rows.height, n, ignored, first, classes, **forms, width=width, vector=vector,
               edges=max(vector, tile["num_warps"] * lanes(call.target.arch)))  # fmt: skip
        return
    steps = cdiv(n, tile["block_n"])
    launch(cross_entropy_vjp_kernel, cdiv(rows.height, tile["block_rows"]) * steps, call, x, labels, *lse, d_loss,
    start,
           d_x, rows.height, rows.inner, n, steps, ignored, first, classes, *rows.strides[0], **forms,
           block_rows=tile["block_rows"], block_n=tile["block_n"], beside=beside, **known)  # fmt: skip
