"""Layer normalisation of the last axis, and its gradients.

    y = xh * weight + bias        xh = (x - mean) r        r = (var + eps)^-1/2
    mean = sum(x) / n        var = sum((x - mean)^2) / n

A program owns ``block_rows`` rows. The variance is that about the mean: E[x^2] - mean^2 cancels when the mean is large.
Each mean is a sum over a count and the mean of what that leaves of every number, so that a constant row leaves 0.
A row that fits in ``tiles`` tiles is read once and stays in registers, as in softmax. A longer one is read twice:
first its statistics, those of each place of a tile about the place's own mean, joined block by block and at last with
those of all places; then its result.

    d_x = r (h - mean(h) - xh mean(h xh))        h = weight d_y
    d_weight = sum over rows of d_y xh        d_bias = sum over rows of d_y

A program of the gradients owns a group of rows, ``blocks_per_program`` times ``block_rows``, and ``block_n`` columns.
It loads its weights once, keeps its sums for d_weight and d_bias in registers while it walks the group, and writes
them as one row of partial sums; a second kernel adds those up. Groups are counted in rows and every sum has one order,
so that two runs give the same bits. A row that fits in ``block_n`` is read once and its statistics are two-pass. For
longer rows a kernel of its own finds the statistics first, merging tiles so that it, too, reads the row once.

Sources: Ba, Kiros and Hinton, "Layer Normalization" (2016), section 3; Chan, Golub and LeVeque, "Updating formulae and
a pairwise algorithm for computing sample variances" (1979), equation 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import RowGradientsConfig, RowsConfig
from portakern.backends.triton.launch import cdiv, lanes, launch, shared_limit
from portakern.backends.triton.layout import (
    RowStrides,
    TensorRows,
    aligned,
    fresh,
    fresh_like,
    pow2_at_least,
    walk_rows,
)
from portakern.backends.triton.lib.column_sums import add_up, scratch
from portakern.backends.triton.lib.rows import (
    GroupedExtents,
    RowExtents,
    block_tile,
    centred,
    columns,
    load_columns,
    load_tiles,
    own_rows,
    places_of,
    refuse_rows,
    row_sum,
    row_tile,
    shared_tile,
    start_of,
    starts_of,
    tile_rows,
    tiles_of,
    whole_rows,
)

if TYPE_CHECKING:
    from portakern.core.call import Call


class Affine(NamedTuple):
    """What follows a norm: weight and bias with their strides. Either may be None."""

    weight: Any
    weight_n: Any
    bias: Any
    bias_n: Any


@triton.jit
def beside(w, step, lane, inside, tile: tl.constexpr):
    """What w has in columns ``lane``, those ``inside``. Where rows begin anywhere, it is read along an axis of its own,
    since in a tile it would share the layout of the rows, which is one of narrow accesses."""
    if tile.unit == 1:
        return tl.load(w + lane * step, mask=inside, other=0.0).to(tile.acc_dtype)[None, :]
    else:
        return tl.load(w + lane[None, :] * step, mask=inside[None, :], other=0.0).to(tile.acc_dtype)


@triton.jit
def scale_and_shift(xh, affine, lane, inside, tile: tl.constexpr):
    """xh * weight + bias in columns ``lane``, those ``inside``, without those of the two that are None."""
    if affine.weight is not None:
        xh = xh * beside(affine.weight, affine.weight_n, lane, inside, tile)
    if affine.bias is not None:
        xh = xh + beside(affine.bias, affine.bias_n, lane, inside, tile)
    return xh


@triton.jit
def join(mean, m2, t, ok, start, n, tile: tl.constexpr):
    """The mean and the sum of squares about it of what rows have shown before column ``start``, and of the block t
    there."""
    width = tl.minimum(n - start, tile.block_n).to(tile.acc_dtype)
    own = tl.sum(t, 1) / width
    own += tl.sum(tl.where(ok, t - own[:, None], 0.0), 1) / width
    d = tl.where(ok, t - own[:, None], 0.0)
    shift, share = own - mean, width / (start + width)
    # shift is squared last: it is the whole mean in the first block, where its weight is 0
    total = m2 + (tl.sum(d * d, 1) + shift * (shift * (start * share)))
    return tl.where(start == 0, own, mean + shift * share), total


@triton.jit
def moments_of_long_rows(x_row, x_n, n, row_ok, tile: tl.constexpr):
    """The mean and the sum of squares about it of rows that are read ``block_n`` numbers at a time: those of each place
    of a tile, of which no other is asked, and at last of all of them."""
    places: tl.constexpr = tile.block_n // tile.deep
    col, mean, n, whole = places_of(n, row_ok, tile)
    m2 = mean
    for ends in tl.static_range(2):
        for start in range(whole if ends else 0, n if ends else whole, tile.block_n):
            t = load_columns(x_row, start, col, x_n, n, row_ok, ends, 0.0, tile)
            before = (start // places).to(tile.acc_dtype)
            count = (
                numbers_at(n - start, col, places).to(tile.acc_dtype) if ends else tl.cast(tile.deep, tile.acc_dtype)
            )
            own = t[0]
            for i in tl.static_range(1, len(t)):
                own += t[i]
            count_or_one = tl.maximum(count, 1.0) if ends else count
            own = own / count_or_one
            rest = tl.zeros_like(own)
            for i in tl.static_range(len(t)):
                d = t[i] - own
                if ends:
                    d = tl.where(start + i * places + col < n, d, 0.0)
                rest += d
            own += rest / count_or_one
            shift, share = own - mean, count / (before + count)
            if ends:
                share = tl.where(count > 0, share, 0.0)
            for i in tl.static_range(len(t)):
                d = t[i] - own
                if ends:
                    d = tl.where(start + i * places + col < n, d, 0.0)
                m2 += d * d
            m2 += shift * (shift * (before * share))
            moved = mean + shift * share
            mean = tl.where((start == 0) & (count > 0), own, moved)
    count = numbers_at(n, col, places).to(tile.acc_dtype)
    middle = tl.sum(mean * count, 1) / n
    middle += tl.sum((mean - middle[:, None]) * count, 1) / n
    shift = mean - middle[:, None]
    return middle, tl.sum(m2 + shift * shift * count, 1)


@triton.jit
def numbers_at(n, col, columns: tl.constexpr):
    """How many of n numbers come to each place ``col``, one after another."""
    return tl.maximum((n - col + columns - 1) // columns, 0)


@triton.jit
def narrowed(values, x, narrow: tl.constexpr):
    """Rounded to the dtype of what x points to."""
    if narrow:
        values = values.to(x.dtype.element_ty).to(values.dtype)
    return values


@triton.jit
def normalise_long_rows(x_row, x_n, y_row, affine, mean, r, n, row_ok, narrow: tl.constexpr, tile: tl.constexpr):
    """(x - mean) r weight + bias of long rows, from their ends, where what was read last is still near."""
    places: tl.constexpr = tile.block_n // tile.deep
    lane = tl.arange(0, places).to(tl.int64)  # an axis of its own, for the weights
    _, _, n, whole = places_of(n, row_ok, tile)
    for others in tl.static_range(2):
        for back in range(0, whole if others else n - whole, tile.block_n):
            start = whole - tile.block_n - back if others else whole
            t = load_columns(x_row, start, lane[None, :], x_n, n, row_ok, not others, 0.0, tile)
            for i in tl.static_range(len(t)):
                at = start + i * places + lane
                inside = tl.full([places], 1, tl.int1) if others else at < n
                xh = t[i] * r[:, None] if mean is None else (t[i] - mean[:, None]) * r[:, None]
                xh = narrowed(xh, y_row, narrow)
                out = scale_and_shift(xh, affine, at, inside, tile)
                tl.store(y_row + at[None, :], out.to(y_row.dtype.element_ty), mask=row_ok & inside[None, :])


@triton.jit
def layernorm_kernel(x, weight, bias, y, extents, eps, x_strides, weight_n, bias_n, tile: tl.constexpr):
    n, x_row, y_row, row_ok = starts_of(x, y, extents, x_strides, tile)
    affine = Affine(weight, weight_n, bias, bias_n)

    if tile.tiles:
        lane, inside, col, ok = whole_rows(n, row_ok, tile)
        t = load_tiles(x_row, x_strides.n, col, ok, 0.0, tile.acc_dtype)
        d, r = centred(t, ok, n, eps)
        for i in tl.static_range(len(t)):
            out = scale_and_shift(d[i] * r, affine, lane[i], inside[i], tile)
            tl.store(y_row + col[i], out.to(y.dtype.element_ty), mask=ok[i])
    else:
        mean, total = moments_of_long_rows(x_row, x_strides.n, n, row_ok, tile)
        r = tl.rsqrt(total / n + eps)
        normalise_long_rows(x_row, x_strides.n, y_row, affine, mean, r, n, row_ok, False, tile)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"]}


def default_tiling(call: Call) -> RowsConfig:
    return tile_rows(call.dims["n"], call.target.arch, norm=True)


def supports(call: Call, config: RowsConfig) -> str | None:
    return refuse_rows(call, config, call.dims["n"], call.arrays["x"].numel() // call.dims["n"])


@BACKEND.implements("layernorm", key=key, tiling=default_tiling, supports=supports, config=RowsConfig)
def layernorm(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    x, weight, bias, n = call.arrays["x"], call.arrays["weight"], call.arrays["bias"], call.dims["n"]
    y = fresh_like(x)
    (x,), rows = walk_rows(x.ndim - 1, x)
    weight_n, bias_n = (0 if w is None else w.stride(0) for w in (weight, bias))
    launch(layernorm_kernel, cdiv(rows.height, config.block_rows), call, x, weight, bias, y,
           RowExtents(rows.height, rows.inner, n), call.options["eps"], rows.strides[0], weight_n, bias_n,
           tile=row_tile(call, rows, n, config), num_warps=config.num_warps)  # fmt: skip
    return (y,)


LONGER = {4096: (128, 1024), 8192: (0, 4096)}
"""First tile -> by how much a row of 16 bits may be longer to lie in two tiles, where it is not aligned and where it
is. H100, layernorm_vjp in bfloat16: 4095 x 4097 93.7 us, 101.4 in one tile; 4095 x 5000 63.5 and 69.0; 4096 x 12288
168, and 213 in blocks of 4096. Other rows lost: 4095 x 5001 at best 111.9 and 109.6, 8192 x 1001 88.8 and 74.2,
1024 x 8195 117 and 97 in blocks; aligned rows of 6144 spill."""


class GradientStrides(NamedTuple):
    """Strides of the arrays that a norm's gradient reads; those of an array that is absent are 1. Of weight only ``n``
    is used. It is a group all the same: Triton 3.6 loses the constants of a group that follows a plain number."""

    x: RowStrides
    d_y: RowStrides
    weight: RowStrides
    past: RowStrides


@triton.jit
def layernorm_vjp_statistics_kernel(
    x, d_y, weight, stats, extents, eps, x_strides, d_y_strides, weight_n, tile: tl.constexpr
):
    """stats: (4, rows): mean, r and, where d_y is given, mean(h) and mean(h xh) of each row."""
    row, n = own_rows(extents, tile)
    row_ok = row < extents.height
    x_row = start_of(x, row, extents, x_strides, tile)
    if d_y is not None:
        d_y_row = start_of(d_y, row, extents, d_y_strides, tile)
    mean = tl.full([tile.block_rows], 0.0, tile.acc_dtype)
    m2, h_sum, hx = mean, mean, mean  # so far the sums of (x - mean)^2, of h and of h (x - mean)
    for start in range(0, tl.cast(n, tl.int64), tile.block_n):
        lane = start + tl.arange(0, tile.block_n)
        col, ok = lane[None, :], row_ok[:, None] & (lane < n)[None, :]
        before, here = tl.cast(start, tile.acc_dtype), tl.cast(min(n - start, tile.block_n), tile.acc_dtype)
        t = tl.load(x_row + col * x_strides.n, mask=ok, other=0.0).to(tile.acc_dtype)
        tile_mean = tl.sum(t, 1) / here
        tile_mean += tl.sum(tl.where(ok, t - tile_mean[:, None], 0.0), 1) / here
        d = tl.where(ok, t - tile_mean[:, None], 0.0)
        delta = tile_mean - mean
        step = delta * (here / (before + here))
        # delta is squared last: it is the whole mean in the first tile, where its weight is 0.
        m2 += tl.sum(d * d, 1) + delta * (step * before)
        if d_y is not None:
            h = tl.load(d_y_row + col * d_y_strides.n, mask=ok, other=0.0).to(tile.acc_dtype)
            if weight is not None:
                h = h * tl.load(weight + lane * weight_n, mask=lane < n, other=0.0).to(tile.acc_dtype)[None, :]
            tile_h = tl.sum(h, 1)
            hx += tl.sum(h * d, 1) + ((delta - step) * tile_h - step * h_sum)  # both sums, about the new mean
            h_sum += tile_h
        mean = tl.where(start == 0, tile_mean, mean + step)
    r = tl.rsqrt(m2 / n + eps)
    out = stats + row
    tl.store(out, mean, mask=row_ok)
    tl.store(out + extents.height, r, mask=row_ok)
    if d_y is not None:
        tl.store(out + tl.cast(extents.height, tl.int64) * 2, h_sum / n, mask=row_ok)
        tl.store(out + tl.cast(extents.height, tl.int64) * 3, r * (hx / n), mask=row_ok)


@triton.jit
def layernorm_vjp_kernel(
    d_y, x, weight, past, stats, d_x, d_weights, d_biases, extents, eps, strides, tile: tl.constexpr
):
    """d_weights, d_biases: (groups, n) partial sums. Any of the three results may be None; x is None where d_bias alone
    is wanted. past: a cotangent of x itself, which went past the norm, or None. stats: None where a program keeps whole
    rows, else it has one of ``parts`` of them."""
    n, rows = aligned(extents.n, tile.unit), extents.height
    part, at = (tl.program_id(0) // extents.parts).to(tl.int64), tl.program_id(0) % extents.parts
    # Columns on one axis: a layout of their own where rows of x are not aligned and weight is.
    lane, inside = columns(at.to(tl.int64) * tile.block_n, n, tile)
    col = [k[None, :] for k in lane]
    if weight is not None:
        w = [k[None, :] for k in load_tiles(weight, strides.weight.n, lane, inside, 0.0, tile.acc_dtype)]
    w_sum = [tl.full([tile.block_rows, k.shape[0]], 0.0, tile.acc_dtype) for k in lane]
    b_sum = w_sum
    first = part * extents.group
    for start in tl.range(first, min(first + extents.group, rows), tile.block_rows, num_stages=tile.stages):
        row = start + tl.arange(0, tile.block_rows)
        row_ok = (row < rows)[:, None]
        ok = [row_ok & a[None, :] for a in inside]
        d_y_row = start_of(d_y, row, extents, strides.d_y, tile)
        g = load_tiles(d_y_row, strides.d_y.n, col, ok, 0.0, tile.acc_dtype)
        if x is not None:
            x_row = start_of(x, row, extents, strides.x, tile)
            t = load_tiles(x_row, strides.x.n, col, ok, 0.0, tile.acc_dtype)
            if stats is None:
                d, r = centred(t, ok, n, eps)
            else:
                mean = tl.load(stats + row[:, None], mask=row_ok, other=0.0)
                d = [a - mean for a in t]
                r = tl.load(stats + rows + row[:, None], mask=row_ok, other=0.0)
            # r of no row may be infinite, and 0 * inf would enter the sums over rows
            xh = [tl.where(row_ok, a * r, 0.0) for a in d]
            if d_x is not None:
                h = g
                if weight is not None:
                    h = [g[i] * w[i] for i in (0, 1)[: tile.tiles]]
                if stats is None:
                    h_mean = (row_sum(h) / n)[:, None]
                    hx_mean = (row_sum([h[i] * xh[i] for i in (0, 1)[: tile.tiles]]) / n)[:, None]
                else:
                    h_mean = tl.load(stats + tl.cast(rows, tl.int64) * 2 + row[:, None], mask=row_ok, other=0.0)
                    hx_mean = tl.load(stats + tl.cast(rows, tl.int64) * 3 + row[:, None], mask=row_ok, other=0.0)
                d_t = [r * (h[i] - h_mean - xh[i] * hx_mean) for i in (0, 1)[: tile.tiles]]
                if past is not None:
                    past_row = start_of(past, row, extents, strides.past, tile)
                    c = load_tiles(past_row, strides.past.n, col, ok, 0.0, tile.acc_dtype)
                    d_t = [d_t[i] + c[i] for i in (0, 1)[: tile.tiles]]
                for i in tl.static_range(len(col)):
                    tl.store(d_x + row[:, None] * n + col[i], d_t[i].to(d_x.dtype.element_ty), mask=ok[i])
            if d_weights is not None:
                w_sum = [w_sum[i] + g[i] * xh[i] for i in (0, 1)[: tile.tiles]]
        if d_biases is not None:
            b_sum = [b_sum[i] + g[i] for i in (0, 1)[: tile.tiles]]
    for i in tl.static_range(len(col)):
        if d_weights is not None:
            tl.store(d_weights + part * n + lane[i], tl.sum(w_sum[i], 0), mask=inside[i])
        if d_biases is not None:
            tl.store(d_biases + part * n + lane[i], tl.sum(b_sum[i], 0), mask=inside[i])


def gradient_tiling(call: Call) -> RowGradientsConfig:
    """A formula of n, as softmax's.

    A program takes a whole row where 512 threads can hold it and its sums, 16 elements a thread, and 32 rows after one
    another, 64 of up to 512 columns, so that partial sums add about a 20th to the traffic and a few thousand rows are
    programs enough for every multiprocessor (H100, layernorm: 6000 x 128 14.9 us, 36.0 in groups of 512 rows, 32768 x
    128 27.4 and 37.1, 6000 x 1024 29.8, 40.0 in groups of 64, 32768 x 1024 98.8 and 91.1). Stages: an H100 has room for
    one such program a multiprocessor, so rows must be under way ahead of it: with four stages and 16 bits 10 to 22 %
    less time than with two, at n from 4096 to 8192; float32 gains nothing.

    Rows of 16 bits that are not aligned cannot be copied ahead. Where a multiprocessor has room for two programs their
    groups are of 16 steps, so that one waits while the other computes: of 4095 rows there are only 128 groups of 32.

    Rows in two tiles (``LONGER``) have 32 elements of the first a thread; those of more than 8192 are read once so,
    with nothing ahead, on NVIDIA alone: an RX 7900 (gfx1100) would spill 268 bytes a thread.
    """
    n, arch, short = call.dims["n"], call.target.arch, call.dtype in ("float16", "bfloat16")
    nvidia = arch.startswith("sm_")
    one = pow2_at_least(n, 128)
    block_n = one if n <= 8192 else 4096
    half = one // 2
    two = short and (nvidia or n <= 8192) and half < n <= half + LONGER.get(half, (0, 0))[n % 8 == 0]
    if two:
        block_n = half
    block_rows = pow2_at_least(2048 // block_n, 1, 16)
    elements = block_rows * (block_n + pow2_at_least(n - block_n) if two else block_n)
    num_warps = pow2_at_least(block_rows * block_n // ((32 if two else 16) * lanes(arch)), 4, 512 // lanes(arch))
    steps = max((64 if one <= 512 else 32) // block_rows, 4)
    if short and n % 8 and num_warps <= 4:
        steps = min(steps, 16)
    stages = (4 if short else 2) if nvidia and n <= 8192 else 1
    ahead = streams(call) * elements * (2 if short else 4)  # bytes of a stage beyond the first
    stages = min(stages, 1 + shared_limit(arch) // ahead) if stages > 1 else 1
    return RowGradientsConfig(
        block_rows=block_rows, block_n=block_n, blocks_per_program=steps, num_stages=stages, num_warps=num_warps
    )


def streams(call: Call) -> int:
    """The arrays of whole rows that a program may read in each step."""
    return sum(a.name not in ("weight", "bias") for a in call.spec.arrays)


def supports_gradient(call: Call, config: RowGradientsConfig) -> str | None:
    n, d_y = call.dims["n"], call.arrays["d_y"]
    tile = config.block_rows * (config.block_n + tiles_of(call, n, config)[0])
    buffers = streams(call) * (config.num_stages - 1) * tile * d_y.element_size()
    if not call.interpret and buffers > shared_limit(call.target.arch):
        return (
            f"num_stages = {config.num_stages} of {config.block_rows} x {config.block_n} take {buffers} bytes "
            "of shared memory; use fewer or a smaller block_n"
        )
    return refuse_rows(call, config, n, d_y.numel() // n * cdiv(n, config.block_n))


@BACKEND.implements(
    "layernorm_vjp", key=key, tiling=gradient_tiling, supports=supports_gradient, config=RowGradientsConfig
)
def layernorm_vjp(call: Call, config: RowGradientsConfig) -> tuple[Any, ...]:
    return gradients(call, config, call.arrays["x"], None)


def gradients(call: Call, config: RowGradientsConfig, x: Any, past: Any) -> tuple[Any, ...]:
    """d_x, d_weight and d_bias of the norm of x, those that the call wants; ``past``: what is added to d_x, or None."""
    d_y, weight, n = call.arrays["d_y"], call.arrays["weight"], call.dims["n"]
    want_x, want_weight = "d_x" in call.wants, "d_weight" in call.wants
    sums: list[str] = [name for name in ("d_weight", "d_bias") if name in call.wants]
    d_x = fresh(x.shape, x.dtype, x.device) if want_x else None
    (x, d_y, past), rows = walk_beside(x, d_y, past if want_x else None)
    group = config.block_rows * (config.blocks_per_program if sums else 1)
    groups, (parts, tile), read_x = cdiv(rows.height, group), shared_tile(call, rows, n, config), want_x or want_weight
    strides = strides_of(rows, weight, past)
    stats = scratch(call, 4, rows.height) if parts > 1 and read_x else None
    if stats is not None:
        launch(layernorm_vjp_statistics_kernel, cdiv(rows.height, config.block_rows), call, x,
               d_y if want_x else None, weight, stats, RowExtents(rows.height, rows.inner, n), call.options["eps"],
               *strides[:2], strides.weight.n, tile=block_tile(call, rows, config),
               num_warps=config.num_warps)  # fmt: skip
    partial = {name: scratch(call, groups, n) for name in sums}
    launch(layernorm_vjp_kernel, groups * parts, call, d_y, x if read_x else None, weight if want_x else None, past,
           stats, d_x, partial.get("d_weight"), partial.get("d_bias"),
           GroupedExtents(rows.height, rows.inner, group, parts, n), call.options["eps"], strides,
           tile=tile._replace(stages=config.num_stages), num_warps=config.num_warps)  # fmt: skip
    result = add_up(call, partial)
    return (d_x, result.get("d_weight"), result.get("d_bias"))


def strides_of(rows: TensorRows, weight: Any, past: Any) -> GradientStrides:
    """Of what :func:`walk_beside` gave."""
    x, d_y, *others = rows.strides
    none = RowStrides(1, 1, 1)
    of_weight = none if weight is None else none._replace(n=weight.stride(0))
    return GradientStrides(x, d_y, of_weight, none if past is None else others[0])


def walk_beside(x: Any, d_y: Any, past: Any) -> tuple[tuple[Any, Any, Any], TensorRows]:
    """x, d_y and past, which may be None, and how to walk their rows."""
    tensors, rows = walk_rows(x.ndim - 1, x, d_y, *(() if past is None else (past,)))
    return (tensors[0], tensors[1], None if past is None else tensors[2]), rows
