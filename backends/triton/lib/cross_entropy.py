"""The cross entropy of rows of logits, and its gradient, into memory that the caller has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.configs import RowsConfig
from portakern.backends.triton.launch import accumulator, cdiv, lanes, launch, torch_dtype
from portakern.backends.triton.layout import aligned, fresh, pow2_at_least, row_start, walk_rows
from portakern.backends.triton.lib.columns import (
    StripStrides,
    begin,
    joined,
    load_block,
    product,
    side_by_side,
    strip_of,
    strips_of,
    sum_parts,
    tree_sum,
)
from portakern.backends.triton.lib.rows import (
    RowExtents,
    TiledExtents,
    block_tile,
    exp_or_zero,
    finite_or_zero,
    load_tiles,
    maximum_and_sum,
    of_long_rows,
    own_rows,
    row_sum,
    row_tile,
    start_of,
    tile_of,
    whole_rows,
)
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call


class LossWeights(NamedTuple):
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
    def of(cls, call: Call) -> LossWeights:
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
    at = label_logit(x_at, x_strides.n, label, counted, n, terms.acc_dtype)  # first: nobody waits for it at the end
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

    write_losses(Losses(loss, lse, low), row, row < extents.height, counted, at, (m, l, total), n, terms)


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
    at = label_logit(x_row, x_n, label, counted, extents.n, terms.acc_dtype)
    write_losses(Losses(loss, lse, low), row, inside, counted, at, (top, sums, total), extents.n, terms)


@triton.jit
def label_logit(x_at, x_n, label, counted, n, acc_dtype: tl.constexpr):
    """x_t of rows that begin at ``x_at``. A label that is no class is not followed: its logit is NaN."""
    is_class = (label >= 0) & (label < n)
    return tl.load(x_at + label * x_n, mask=counted & is_class, other=float("nan")).to(acc_dtype)


@triton.jit
def write_losses(out, row, present, counted, at, found, n, terms: tl.constexpr):
    """The loss and the lse of rows, with x_t, which is ``at``, the maximum m, l and the sum ``total`` of each; of the
    last only where e is above 0. lse and low may be None."""
    m, l, total = found
    shift, log = finite_or_zero(m), tl.log(l)
    if terms.even > 0:
        value = log + (1.0 - terms.even) * (shift - at) + terms.even * (shift - total / n)
    else:
        value = log + (shift - at)
    if terms.z > 0:
        value += terms.z * (shift + log) * (shift + log)
    tl.store(out.loss + row, tl.where(counted, value, 0.0).to(out.loss.dtype.element_ty), mask=present)
    if out.lse is not None or out.low is not None:
        total = shift + log
        if out.lse is not None:
            tl.store(out.lse + row, tl.where(counted, total, 0.0).to(out.lse.dtype.element_ty), mask=present)
        if out.low is not None:  # what rounding took from the sum: Knuth, volume 2, section 4.2.2, theorem B
            added = total - shift
            rest = (shift - (total - added)) + (log - added)
            rest = tl.where(counted & (tl.abs(total) < float("inf")), rest, 0.0)
            tl.store(out.low + row, rest.to(out.low.dtype.element_ty), mask=present)


def losses_into(
    call: Call, x: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor | None,
    lse: tuple[torch.Tensor | None, torch.Tensor | None], config: RowsConfig,
) -> None:  # fmt: skip
    """Write the loss, and lse and lse_low, of each row of logits x, of a call with this op's options. Contiguous
    labels."""
    n, beside = x.shape[-1], side_by_side(x, x.ndim - 1)
    (x,), rows = walk_rows(x.ndim - 1, x)
    terms, ignored = LossWeights.of(call), call.options["ignore_index"]
    if beside:
        strips = strips_of(call, rows._replace(strides=rows.strides[:1]), n, config)  # no result has such rows
        m, l = sum_parts(call, strips, n, x)
        launch(cross_entropy_columns_kernel, strips.programs // max(strips.parts, 1), call, x, labels, loss, *lse, m, l,
               strips.extents(n), ignored, ColumnStrides(strips.strides[0], strips.numbers), terms=terms,
               tile=strips.tile(call), num_warps=strips.num_warps)  # fmt: skip
        return
    launch(cross_entropy_kernel, cdiv(rows.height, config.block_rows), call, x, labels, loss, *lse,
           RowExtents(rows.height, rows.inner, n), ignored, rows.strides[0], terms=terms,
           tile=row_tile(call, rows, n, config), num_warps=config.num_warps)  # fmt: skip


def numbers(call: Call, x: torch.Tensor) -> torch.Tensor:
    """A fresh tensor of one number a row, in the dtype of losses."""
    return fresh(call.dims["batch"], torch_dtype("float64" if call.dtype == "float64" else "float32"), x.device)


class OfRows(NamedTuple):
    """What lies in memory of each row, a number each: its label, lse and lse_low, and its cotangent. low and d_loss may
    be None."""

    labels: Any
    lse: Any
    low: Any
    d_loss: Any


class Classes(NamedTuple):
    """``classes`` in all, of which logits are given from ``first`` on. Rows whose label is ``ignored`` do not count."""

    ignored: int
    first: int
    classes: int


class LongExtents(NamedTuple):
    """Of rows that lie one after another."""

    height: int
    n: int


class LongTile(NamedTuple):
    """Of rows that lie one after another: the elements of a program, those that a thread moves at once, and the threads
    that take what no whole vector holds."""

    width: int
    vector: int
    edges: int


@triton.jit
def begun(classes, start):
    """``classes`` from where ``start`` says, unless that is None."""
    first = classes.first
    if start is not None:
        first += tl.load(start)
    return Classes(classes.ignored, first, classes.classes)


@triton.jit
def gradient(t, is_label, log_sum, low, g, counted, classes, terms: tl.constexpr):
    """By logits t of rows, those that are ``counted``. None for what is the same everywhere: g that is 1, no label
    among t, all rows counted."""
    apart = (t - log_sum) - low
    p = exp_or_zero(tl.where(apart > 0.0, 0.0, apart))
    if terms.z > 0:
        p = product(p, tl.broadcast_to(1.0 + 2.0 * terms.z * log_sum, p.shape))  # in a row as where two meet
    if is_label is not None:
        p = tl.where(is_label, p - (1.0 - terms.even), p)
    if terms.even > 0:
        p = p - terms.even / tl.cast(classes, terms.acc_dtype)
    if g is not None:
        p = g * p
    if counted is not None:
        p = tl.where(counted, p, 0.0)
    return p


@triton.jit
def of_row(saved, row, present, ignored, acc_dtype: tl.constexpr):
    """A row's label, whether it counts, its lse and lse_low, and its cotangent, 1 where there is none."""
    label = tl.load(saved.labels + row, mask=present, other=ignored).to(tl.int64)
    log_sum, rest = log_sum_of(saved, row, present, acc_dtype)
    if saved.d_loss is not None:
        g = tl.load(saved.d_loss + row, mask=present, other=0.0).to(acc_dtype)
    else:  # a tuple that is returned holds no None where JAX's programs are compiled; compilers drop a factor of 1
        g = tl.full(row.shape, 1.0, acc_dtype)
    return label, label != ignored, log_sum, rest, g


@triton.jit
def log_sum_of(saved, row, present, acc_dtype: tl.constexpr):
    """lse of rows, and lse_low, which is 0 where there is none."""
    rest = tl.zeros(row.shape, acc_dtype)
    if saved.low is not None:
        rest = tl.load(saved.low + row, mask=present, other=0.0).to(acc_dtype)
    return tl.load(saved.lse + row, mask=present, other=0.0).to(acc_dtype), rest


@triton.jit
def within_a_row(x, saved, d_x, begin, row, classes, terms: tl.constexpr, tile: tl.constexpr):
    """A tile of one row that counts, whose label is elsewhere."""
    at = begin + tl.arange(0, tile.width)
    row = row + tl.arange(0, 1)
    _, _, log_sum, low, g = of_row(saved, row, row >= 0, classes.ignored, terms.acc_dtype)
    t = tl.load(x + at).to(terms.acc_dtype)
    out = gradient(t, None, log_sum, low, g, None, classes.classes, terms)
    tl.store(d_x + at, out.to(d_x.dtype.element_ty))


@triton.jit
def column(at, width: tl.constexpr):
    """``at`` in 32 bits, -1 where that is no column of the tile."""
    return tl.where((at >= 0) & (at < width), at, -1).to(tl.int32)


@triton.jit
def where_rows_meet(x, saved, d_x, begin, row, extents, classes, terms: tl.constexpr, tile: tl.constexpr):
    """A tile of any two rows, but what the last whole vector of all leaves."""
    row = row + tl.arange(0, 1)
    border = (row + 1) * extents.n - begin
    limit = tl.minimum(extents.height * extents.n - begin, tile.width).to(tl.int32) // tile.vector * tile.vector
    label, counted, log_sum, rest, g = of_row(saved, row, row < extents.height, classes.ignored, terms.acc_dtype)
    label_2, counted_2, log_sum_2, rest_2, g_2 = of_row(
        saved, row + 1, row + 1 < extents.height, classes.ignored, terms.acc_dtype
    )
    hit = column(label - classes.first + border - extents.n, tile.width)
    hit_2 = column(label_2 - classes.first + border, tile.width)
    border = tl.minimum(border, tile.width).to(tl.int32)
    col = tl.arange(0, tile.width)
    own, at = col < border, col // tile.vector * tile.vector  # of a vector all that is read, or nothing: one mask
    inside = at < limit
    read = inside & ((counted & (at < border)) | (counted_2 & (at + tile.vector > border)))
    t = tl.load(x + begin + col, mask=read, other=float("-inf")).to(terms.acc_dtype)
    is_label = col == tl.where(own, hit, hit_2)
    out = gradient(t, is_label, tl.where(own, log_sum, log_sum_2), tl.where(own, rest, rest_2), tl.where(own, g, g_2),
                   tl.where(own, counted, counted_2), classes.classes, terms)  # fmt: skip
    tl.store(d_x + begin + col, out.to(d_x.dtype.element_ty), mask=inside)


@triton.jit
def behind_vectors(x, saved, d_x, extents, classes, terms: tl.constexpr, tile: tl.constexpr):
    """The elements behind the last whole vector of all rows; ``edges``: the threads, of which few have one."""
    at = extents.height * extents.n // tile.vector * tile.vector + tl.arange(0, tile.edges)
    there = at < extents.height * extents.n
    row = extents.height - 1 + tl.arange(0, 1)
    label, counted, log_sum, rest, g = of_row(saved, row, row >= 0, classes.ignored, terms.acc_dtype)
    t = tl.load(x + at, mask=there & counted, other=float("-inf")).to(terms.acc_dtype)
    out = gradient(t, at - row * extents.n == label - classes.first, log_sum, rest, g, counted, classes.classes, terms)
    tl.store(d_x + at, out.to(d_x.dtype.element_ty), mask=there)


@triton.jit
def cross_entropy_vjp_long_kernel(
    x, labels, lse, low, d_loss, start, d_x, extents, classes, terms: tl.constexpr, tile: tl.constexpr
):
    """Rows that lie one after another, of ``width`` elements or more, are one row: a tile begins at a multiple of its
    width wherever rows do, and has elements of two of them at most. Most tiles have those of one, without its label,
    and compare and select nothing. The other arguments: as in :func:`cross_entropy_vjp_kernel`."""
    classes, of = begun(classes, start), OfRows(labels, lse, low, d_loss)
    extents = LongExtents(tl.cast(extents.height, tl.int64), tl.cast(extents.n, tl.int64))
    begin = tl.program_id(0).to(tl.int64) * tile.width
    row = begin // extents.n
    label = tl.load(labels + row).to(tl.int64)
    hit = label - classes.first + row * extents.n - begin
    own = (begin + tile.width <= (row + 1) * extents.n) & (label != classes.ignored)
    if own & ((hit < 0) | (hit >= tile.width)):
        within_a_row(x, of, d_x, begin, row, classes, terms, tile)
    else:
        where_rows_meet(x, of, d_x, begin, row, extents, classes, terms, tile)
    if begin + tile.width >= extents.height * extents.n:
        behind_vectors(x, of, d_x, extents, classes, terms, tile)


@triton.jit
def cross_entropy_vjp_kernel(
    x, labels, lse, low, d_loss, start, d_x, extents, classes, x_strides, terms: tl.constexpr, tile: tl.constexpr
):
    """x: the n logits from class ``first`` on. start: None, or where more lies to be added to first. d_loss: None for
    ones."""
    n, rows = aligned(extents.n, tile.unit), extents.height
    classes = begun(classes, start)
    row, col = tile_of(extents.steps, tile)
    row_ok = row < rows
    label = tl.load(labels + row, mask=row_ok, other=classes.ignored).to(tl.int64)
    counted = (row_ok & (label != classes.ignored))[:, None]
    label, row_ok = label[:, None] - classes.first, row_ok[:, None]
    log_sum, rest = log_sum_of(OfRows(labels, lse, low, d_loss), row, row < rows, terms.acc_dtype)
    if d_loss is not None:
        g = tl.load(d_loss + row, mask=row < rows, other=0.0).to(terms.acc_dtype)[:, None]
    else:
        g = None
    x_row = start_of(x, row, extents, x_strides, tile)
    read = row_ok if terms.reads_ignored else counted
    t = tl.load(x_row + col * x_strides.n, mask=read & (col < n), other=float("-inf")).to(terms.acc_dtype)
    out = gradient(t, col == label, log_sum[:, None], rest[:, None], g, counted, classes.classes, terms)
    tl.store(d_x + (row * n)[:, None] + col, out.to(d_x.dtype.element_ty), mask=row_ok & (col < n))


def tile_brackets(n: int, arch: str) -> RowsConfig:
    """Tiles of 4096 elements, 16 a thread, of one row where that is so long."""
    block_n = pow2_at_least(n, 128, 4096)
    block_rows = pow2_at_least(4096 // block_n, 1, 16)
    width = lanes(arch)
    return RowsConfig(block_rows=block_rows, block_n=block_n,
            num_warps=pow2_at_least(block_rows * block_n // (16 * width), 1, 512 // width))  # fmt: skip


def tile_turned(call: Call) -> RowsConfig:
    """Tiles of logits whose rows lie side by side: 128 bytes, a line of the cache, of what lies beside each other where
    they are read, and no less where the gradient, whose rows lie one after the other, is written."""
    block_rows, block_n = 128 // numpy_dtype(call.dtype).itemsize, 128
    return RowsConfig(block_rows=block_rows, block_n=block_n,
            num_warps=block_rows * block_n // (16 * lanes(call.target.arch)))  # fmt: skip


def fitted(call: Call, n: int, config: RowsConfig) -> RowsConfig:
    """A tiling's tile of rows that lie side by side, no longer than a row of few classes, and warps that fill it."""
    block_rows, block_n = config.block_rows, min(config.block_n, pow2_at_least(n))
    num_warps = min(config.num_warps, max(block_rows * block_n // (16 * lanes(call.target.arch)), 1))
    return RowsConfig(block_rows=block_rows, block_n=block_n, num_warps=num_warps)


def gradient_into(
    call: Call, x: torch.Tensor, labels: torch.Tensor, lse: tuple[torch.Tensor, torch.Tensor | None],
    d_loss: torch.Tensor | None, d_x: torch.Tensor, config: RowsConfig, first: int, classes: int,
    start: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradient by logits x, those from class ``first`` on of ``classes``, of a call with this op's options.
    ``lse``: with lse_low, or None for that. d_x is contiguous, as are the numbers of rows, and may be x itself; no
    d_loss means ones. ``start``: one int32 that is added to first, where it is not known before the launch."""
    n, beside = x.shape[-1], side_by_side(x, x.ndim - 1)
    (x,), rows = walk_rows(x.ndim - 1, x)
    if beside:
        config = fitted(call, n, config)
    num_warps, terms = config.num_warps, LossWeights.of(call)._replace(reads_ignored=beside)
    width, vector = config.block_rows * config.block_n, 16 // numpy_dtype(call.dtype).itemsize
    of_classes = Classes(call.options["ignore_index"], first, classes)
    if rows.strides[0] == rows.strides[1] and n >= width >= vector and not beside:
        edges = max(vector, num_warps * lanes(call.target.arch))
        launch(cross_entropy_vjp_long_kernel, cdiv(rows.height * n, width), call, x, labels, *lse, d_loss, start, d_x,
               LongExtents(rows.height, n), of_classes, terms=terms, tile=LongTile(width, vector, edges),
               num_warps=num_warps)  # fmt: skip
        return
    steps = cdiv(n, config.block_n)
    launch(cross_entropy_vjp_kernel, cdiv(rows.height, config.block_rows) * steps, call, x, labels, *lse, d_loss,
           start, d_x, TiledExtents(rows.height, rows.inner, n, steps), of_classes, rows.strides[0], terms=terms,
           tile=block_tile(call, rows, config), num_warps=num_warps)  # fmt: skip
