"""The cross entropy of rows of logits, into memory that its caller has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from portakern.backends.triton.launch import accumulator, cdiv, launch, torch_dtype
from portakern.backends.triton.layout import aligned, fresh, row_start, walk_rows
from portakern.backends.triton.lib.columns import (
    begin,
    joined,
    load_block,
    side_by_side,
    strip_of,
    strips_of,
    sum_parts,
    tree_sum,
)
from portakern.backends.triton.lib.rows import (
    columns,
    finite_or_zero,
    load_tiles,
    maximum_and_sum,
    of_long_rows,
    row_sum,
    walked,
)

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


@triton.jit
def cross_entropy_kernel(x, labels, loss, lse, low, rows, rows_inner, n, ignored, x_outer, x_inner, x_n,
                         block_rows: tl.constexpr, block_n: tl.constexpr, tail: tl.constexpr, tiles: tl.constexpr,
                         deep: tl.constexpr, acc_dtype: tl.constexpr, even: tl.constexpr, z: tl.constexpr,
                         flat: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    """lse and low, for lse_low, may be None. even: the share e of the target that all classes divide."""
    n = aligned(n, unit)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    label = tl.load(labels + row, mask=row < rows, other=ignored).to(tl.int64)
    counted = (row < rows) & (label != ignored)
    x_at = row_start(x, row, rows_inner, x_outer, x_inner, flat, unit)
    x_row, row_ok = x_at[:, None], counted[:, None]
    total = tl.zeros([block_rows], acc_dtype)

    if tiles:
        lane, inside = columns(0, n, block_n, tail)
        col, ok = [a[None, :] for a in lane], [row_ok & a[None, :] for a in inside]
        t = load_tiles(x_row, x_n, col, ok, float("-inf"), acc_dtype)
        m, l = maximum_and_sum(t)
        if even > 0:
            total = row_sum([tl.where(ok[i], t[i], 0.0) for i in (0, 1)[:tiles]])
    else:
        m, l, total = of_long_rows(x_row, x_n, n, row_ok, block_n, deep, even > 0, acc_dtype)

    write_losses(loss, lse, low, row, row < rows, x_at, x_n, label, counted, m, l, total, n, acc_dtype, even, z)


@triton.jit
def cross_entropy_columns_kernel(x, labels, loss, lse, low, m, l, lanes, n, ignored, x_group, x_lane, x_n,
                                 row_group, row_lane,
                                 block_rows: tl.constexpr, block_n: tl.constexpr, parts: tl.constexpr,
                                 deep: tl.constexpr, acc_dtype: tl.constexpr, even: tl.constexpr, z: tl.constexpr,
                                 unit: tl.constexpr):  # fmt: skip
    """Rows that lie side by side, whole or joined from their parts, which do not say what a mean needs.

    Those that are ignored are read with their neighbours: a mask that differs from row to row leaves a thread one
    number at a time."""
    lanes, x_n = aligned(lanes, unit), aligned(x_n, unit)
    lane, _, group = strip_of(tl.program_id(0), lanes, 0, block_rows)
    inside, row = lane < lanes, group * row_group + lane * row_lane
    label = tl.load(labels + row, mask=inside, other=ignored).to(tl.int64)
    counted = inside & (label != ignored)
    x_row = begin(x, group, lane, x_group, x_lane, unit)
    places: tl.constexpr = block_n // deep
    step = tl.arange(0, places)[:, None].to(tl.int64)
    total = tl.zeros([1, block_rows], acc_dtype)
    if parts:
        top, sums = joined(m, l, group * lanes + lane, inside, parts, True)
        if even > 0:
            acc = tl.zeros([places, block_rows], acc_dtype)
            for start in range(0, tl.cast(n, tl.int64), block_n):
                t = load_block(x_row, start, step, x_n, n, inside, 0.0, acc_dtype, deep)
                for i in tl.static_range(deep):
                    acc += t[i]
            total = tree_sum(acc)
    else:
        t = load_block(x_row, tl.cast(0, tl.int64), step, x_n, n, inside, float("-inf"), acc_dtype, deep)
        top = tl.max(t[0], 0)[None, :]
        sums = tree_sum(tl.exp(t[0] - finite_or_zero(top)))
        if even > 0:
            total = tree_sum(tl.where(step < n, t[0], 0.0))
    write_losses(loss, lse, low, row, inside, x_row, x_n, label, counted, top, sums, total, n, acc_dtype, even, z)


@triton.jit
def write_losses(loss, lse, low, row, there, x_at, x_n, label, counted, m, l, total, n,
                 acc_dtype: tl.constexpr, even: tl.constexpr, z: tl.constexpr):  # fmt: skip
    """The loss and the lse of rows that begin at ``x_at``, with the maximum m, l and the sum ``total`` of each; of the
    first only where e is above 0. lse and low may be None."""
    # A label that is no class is not followed: its logit is NaN.
    is_class = (label >= 0) & (label < n)
    at = tl.load(x_at + label * x_n, mask=counted & is_class, other=float("nan")).to(acc_dtype)
    shift, log = finite_or_zero(m), tl.log(l)
    if even > 0:
        out = log + (1.0 - even) * (shift - at) + even * (shift - total / n)
    else:
        out = log + (shift - at)
    if z > 0:
        out += z * (shift + log) * (shift + log)
    tl.store(loss + row, tl.where(counted, out, 0.0).to(loss.dtype.element_ty), mask=there)
    if lse is not None or low is not None:
        total = shift + log
        if lse is not None:
            tl.store(lse + row, tl.where(counted, total, 0.0).to(lse.dtype.element_ty), mask=there)
        if low is not None:  # what rounding took from the sum: Knuth, volume 2, section 4.2.2, theorem B
            added = total - shift
            rest = (shift - (total - added)) + (log - added)
            rest = tl.where(counted & (tl.abs(total) < float("inf")), rest, 0.0)
            tl.store(low + row, rest.to(low.dtype.element_ty), mask=there)


def losses_into(
    call: Call, x: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor | None,
    lse: tuple[torch.Tensor | None, torch.Tensor | None], tiling: Mapping[str, int],
) -> None:  # fmt: skip
    """Write the loss, and lse and lse_low, of each row of logits x, of a call with this op's options. Contiguous
    labels."""
    n, beside = x.shape[-1], side_by_side(x, x.ndim - 1)
    (x,), rows = walk_rows(x.ndim - 1, x)
    known = {"even": call.options["label_smoothing"], "z": call.options["z_loss"], "acc_dtype": accumulator(call.dtype)}
    if beside:
        strips = strips_of(call, rows._replace(strides=rows.strides[:1]), n, tiling)  # no result has such rows
        m, l = sum_parts(call, strips, n, x)
        launch(cross_entropy_columns_kernel, strips.programs // max(strips.parts, 1), call, x, labels, loss, *lse, m, l,
               strips.lanes, n, call.options["ignore_index"], *strips.strides[0], *strips.numbers, **known,
               **strips.constants)  # fmt: skip
        return
    launch(cross_entropy_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, labels, loss, *lse, rows.height,
           rows.inner, n, call.options["ignore_index"], *rows.strides[0], **known, **walked(call, n, tiling),
           **rows.known(call.dtype))  # fmt: skip


def numbers(call: Call, x: torch.Tensor) -> torch.Tensor:
    """A fresh tensor of one number a row, in the dtype of losses."""
    return fresh(call.dims["batch"], torch_dtype("float64" if call.dtype == "float64" else "float32"), x.device)
