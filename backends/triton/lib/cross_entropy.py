"""The cross entropy of rows of logits, into memory that its caller has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.launch import accumulator, cdiv, launch, torch_dtype
from portakern.backends.triton.layout import aligned, fresh, row_start, walk_rows
from portakern.backends.triton.lib.columns import (
    StripStrides,
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
    Extents,
    finite_or_zero,
    load_tiles,
    maximum_and_sum,
    of_long_rows,
    own_rows,
    row_sum,
    row_tile,
    whole_rows,
)

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


class Terms(NamedTuple):
    """What a loss is made of: ``even``, the share e of the target that all classes divide, and ``z``, of log-sums.

    Attributes:
      acc_dtype: what it is computed in.
      reads_ignored: of a gradient: whether rows that are ignored are read too. Where rows lie side by side, a mask of
        each row's own would leave a thread one number at a time.
    """

    even: float
    z: float
    acc_dtype: tl.dtype
    reads_ignored: bool = False

    @classmethod
    def of(cls, call: Call) -> Terms:
        return cls(call.options["label_smoothing"], call.options["z_loss"], accumulator(call.dtype))


class Losses(NamedTuple):
    """Where results go; lse and low, for lse_low, may be None."""

    loss: Any
    lse: Any
    low: Any


class ColumnStrides(NamedTuple):
    """Of logits whose rows lie side by side, and of one number a row."""

    x: StripStrides
    numbers: StripStrides


@triton.jit
def cross_entropy_kernel(
    x, labels, loss, lse, low, extents, ignored, x_strides, terms: tl.constexpr, tile: tl.constexpr
):
    """lse and low, for lse_low, may be None."""
    row, n = own_rows(extents, tile)
    label = tl.load(labels + row, mask=row < extents.height, other=ignored).to(tl.int64)
    counted = (row < extents.height) & (label != ignored)
    x_at = row_start(x, row, extents.inner, x_strides.outer, x_strides.inner, tile.flat, tile.unit)
    x_row, row_ok = x_at[:, None], counted[:, None]
    total = tl.full([tile.block_rows], 0.0, tile.acc_dtype)

    if tile.tiles:
        _, _, col, ok = whole_rows(n, row_ok, tile)
        t = load_tiles(x_row, x_strides.n, col, ok, float("-inf"), tile.acc_dtype)
        m, l = maximum_and_sum(t)
        if terms.even > 0:
            total = row_sum([tl.where(ok[i], t[i], 0.0) for i in (0, 1)[: tile.tiles]])
    else:
        m, l, total = of_long_rows(x_row, x_strides.n, n, row_ok, terms.even > 0, tile)

    out = Losses(loss, lse, low)
    write_losses(out, row, row < extents.height, x_at, x_strides.n, label, counted, (m, l, total), n, terms)


@triton.jit
def cross_entropy_columns_kernel(
    x, labels, loss, lse, low, m, l, extents, ignored, strides, terms: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    """Rows that lie side by side, whole or joined from their parts, which do not say what a mean needs.

    Those that are ignored are read with their neighbours: a mask that differs from row to row leaves a thread one
    number at a time."""
    lanes, x_n = aligned(extents.lanes, tile.unit), aligned(strides.x.n, tile.unit)
    lane, _, group = strip_of(tl.program_id(0), lanes, 0, tile)
    inside, row = lane < lanes, group * strides.numbers.group + lane * strides.numbers.lane
    label = tl.load(labels + row, mask=inside, other=ignored).to(tl.int64)
    counted = inside & (label != ignored)
    x_row = begin(x, group, lane, strides.x, tile.unit)
    places: tl.constexpr = tile.block_n // tile.deep
    step = tl.arange(0, places)[:, None].to(tl.int64)
    total = tl.full([1, tile.block_rows], 0.0, tile.acc_dtype)
    if tile.parts:
        top, sums = joined(m, l, group * lanes + lane, inside, tile.parts, True)
        if terms.even > 0:
            acc = tl.full([places, tile.block_rows], 0.0, tile.acc_dtype)
            for start in range(0, tl.cast(extents.n, tl.int64), tile.block_n):
                t = load_block(x_row, start, step, x_n, extents.n, inside, 0.0, tile)
                for i in tl.static_range(len(t)):
                    acc += t[i]
            total = tree_sum(acc)
    else:
        t = load_block(x_row, tl.cast(0, tl.int64), step, x_n, extents.n, inside, float("-inf"), tile)
        top = tl.max(t[0], 0)[None, :]
        sums = tree_sum(tl.exp(t[0] - finite_or_zero(top)))
        if terms.even > 0:
            total = tree_sum(tl.where(step < extents.n, t[0], 0.0))
    out, found = Losses(loss, lse, low), (top, sums, total)
    write_losses(out, row, inside, x_row, x_n, label, counted, found, extents.n, terms)


@triton.jit
def write_losses(out, row, there, x_at, x_n, label, counted, found, n, terms: tl.constexpr):
    """The loss and the lse of rows that begin at ``x_at``, with the maximum m, l and the sum ``total`` of each; of the
    first only where e is above 0. lse and low may be None."""
    m, l, total = found
    # A label that is no class is not followed: its logit is NaN.
    is_class = (label >= 0) & (label < n)
    at = tl.load(x_at + label * x_n, mask=counted & is_class, other=float("nan")).to(terms.acc_dtype)
    shift, log = finite_or_zero(m), tl.log(l)
    if terms.even > 0:
        value = log + (1.0 - terms.even) * (shift - at) + terms.even * (shift - total / n)
    else:
        value = log + (shift - at)
    if terms.z > 0:
        value += terms.z * (shift + log) * (shift + log)
    tl.store(out.loss + row, tl.where(counted, value, 0.0).to(out.loss.dtype.element_ty), mask=there)
    if out.lse is not None or out.low is not None:
        total = shift + log
        if out.lse is not None:
            tl.store(out.lse + row, tl.where(counted, total, 0.0).to(out.lse.dtype.element_ty), mask=there)
        if out.low is not None:  # what rounding took from the sum: Knuth, volume 2, section 4.2.2, theorem B
            added = total - shift
            rest = (shift - (total - added)) + (log - added)
            rest = tl.where(counted & (tl.abs(total) < float("inf")), rest, 0.0)
            tl.store(out.low + row, rest.to(out.low.dtype.element_ty), mask=there)


def losses_into(
    call: Call, x: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor | None,
    lse: tuple[torch.Tensor | None, torch.Tensor | None], tiling: Mapping[str, int],
) -> None:  # fmt: skip
    """Write the loss, and lse and lse_low, of each row of logits x, of a call with this op's options. Contiguous
    labels."""
    n, beside = x.shape[-1], side_by_side(x, x.ndim - 1)
    (x,), rows = walk_rows(x.ndim - 1, x)
    terms, ignored = Terms.of(call), call.options["ignore_index"]
    if beside:
        strips = strips_of(call, rows._replace(strides=rows.strides[:1]), n, tiling)  # no result has such rows
        m, l = sum_parts(call, strips, n, x)
        launch(cross_entropy_columns_kernel, strips.programs // max(strips.parts, 1), call, x, labels, loss, *lse, m, l,
               strips.extents(n), ignored, ColumnStrides(strips.strides[0], strips.numbers), terms=terms,
               tile=strips.tile(call), num_warps=strips.num_warps)  # fmt: skip
        return
    launch(cross_entropy_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, labels, loss, *lse,
           Extents(rows.height, rows.inner, n), ignored, rows.strides[0], terms=terms,
           tile=row_tile(call, rows, n, tiling), num_warps=tiling["num_warps"])  # fmt: skip


def numbers(call: Call, x: torch.Tensor) -> torch.Tensor:
    """A fresh tensor of one number a row, in the dtype of losses."""
    return fresh(call.dims["batch"], torch_dtype("float64" if call.dtype == "float64" else "float32"), x.device)
