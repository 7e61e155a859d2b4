"""Root mean square normalisation of the last axis, and its gradients.

    y = xh weight        xh = x r        r = (sum(x^2) / n + eps)^-1/2        (``narrow``: xh is rounded to x's dtype)

A program owns ``block_rows`` rows. A row that fits in ``tiles`` tiles is read once and stays in registers, as in
softmax; a longer one is read twice (squares, result), the second time from cache. Masked lanes read 0, which adds
nothing to a sum of squares.

    d_x = r (h - xh mean(h xh))        h = weight d_y        d_weight = sum over rows of d_y xh
    (``narrow``: h, and xh where d_weight meets it, are rounded to x's dtype)

Programs, groups of rows, partial sums and tiles of the gradients are those of layernorm's. A row that fits in
``block_n`` is read once; for longer rows a kernel of its own finds r and mean(h xh) first, and the main kernel has one
program a column tile.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import RowGradientsConfig, RowsConfig
from portakern.backends.triton.gpu.layernorm import (
    Affine,
    default_tiling,
    gradient_tiling,
    key,
    narrowed,
    normalise_long_rows,
    scale_and_shift,
    strides_of,
    supports,
    supports_gradient,
    walk_beside,
)
from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import aligned, fresh, fresh_like, walk_rows
from portakern.backends.triton.lib.column_sums import add_up, scratch
from portakern.backends.triton.lib.rows import (
    GroupedExtents,
    RowExtents,
    block_tile,
    columns,
    load_columns,
    load_tiles,
    own_rows,
    places_of,
    row_sum,
    row_tile,
    shared_tile,
    start_of,
    starts_of,
    whole_rows,
)

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def inverse_rms(t, n, eps):
    """r of rows that stay in registers."""
    return tl.rsqrt(row_sum([a * a for a in t]) / n + eps)[:, None]


@triton.jit
def squares_of_long_rows(x_row, x_n, n, row_ok, tile: tl.constexpr):
    """The sum of squares of rows that are read ``block_n`` numbers at a time: of each place of a tile, and of all."""
    col, total, n, whole = places_of(n, row_ok, tile)
    for ends in tl.static_range(2):
        for start in range(whole if ends else 0, n if ends else whole, tile.block_n):
            t = load_columns(x_row, start, col, x_n, n, row_ok, ends, 0.0, tile)
            for i in tl.static_range(len(t)):
                total += t[i] * t[i]
    return tl.sum(total, 1)


@triton.jit
def rmsnorm_kernel(x, weight, y, extents, eps, x_strides, weight_n, narrow: tl.constexpr, tile: tl.constexpr):
    n, x_row, y_row, row_ok = starts_of(x, y, extents, x_strides, tile)
    affine = Affine(weight, weight_n, None, None)

    if tile.tiles:
        lane, inside, col, ok = whole_rows(n, row_ok, tile)
        t = load_tiles(x_row, x_strides.n, col, ok, 0.0, tile.acc_dtype)
        r = inverse_rms(t, n, eps)
        for i in tl.static_range(len(t)):
            xh = narrowed(t[i] * r, x, narrow)
            out = scale_and_shift(xh, affine, lane[i], inside[i], tile)
            tl.store(y_row + col[i], out.to(y.dtype.element_ty), mask=ok[i])
    else:
        r = tl.rsqrt(squares_of_long_rows(x_row, x_strides.n, n, row_ok, tile) / n + eps)
        normalise_long_rows(x_row, x_strides.n, y_row, affine, None, r, n, row_ok, narrow, tile)


def rounds_before(call: Call) -> bool:
    """Whether x r is rounded before it meets the weight, and is not as wide as what it is computed in."""
    return call.options["rounding"] == "before_weight" and call.dtype in ("float16", "bfloat16")


@BACKEND.implements("rmsnorm", key=key, tiling=default_tiling, supports=supports, config=RowsConfig)
def rmsnorm(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    x, weight, n = call.arrays["x"], call.arrays["weight"], call.dims["n"]
    y = fresh_like(x)
    (x,), rows = walk_rows(x.ndim - 1, x)
    launch(rmsnorm_kernel, cdiv(rows.height, config.block_rows), call, x, weight, y,
           RowExtents(rows.height, rows.inner, n), call.options["eps"], rows.strides[0],
           0 if weight is None else weight.stride(0), narrow=rounds_before(call), tile=row_tile(call, rows, n, config),
           num_warps=config.num_warps)  # fmt: skip
    return (y,)


@triton.jit
def rmsnorm_vjp_statistics_kernel(
    x, d_y, weight, stats, extents, eps, x_strides, d_y_strides, weight_n, narrow: tl.constexpr, tile: tl.constexpr
):
    """stats: (2, rows): r and, where d_y is given, mean(h xh) of each row."""
    row, n = own_rows(extents, tile)
    row_ok = row < extents.height
    x_row = start_of(x, row, extents, x_strides, tile)
    if d_y is not None:
        d_y_row = start_of(d_y, row, extents, d_y_strides, tile)
    squares = tl.full([tile.block_rows], 0.0, tile.acc_dtype)
    hx = squares
    for start in range(0, tl.cast(n, tl.int64), tile.block_n):
        lane = start + tl.arange(0, tile.block_n)
        col, ok = lane[None, :], row_ok[:, None] & (lane < n)[None, :]
        t = tl.load(x_row + col * x_strides.n, mask=ok, other=0.0).to(tile.acc_dtype)
        squares += tl.sum(t * t, 1)
        if d_y is not None:
            h = tl.load(d_y_row + col * d_y_strides.n, mask=ok, other=0.0).to(tile.acc_dtype)
            if weight is not None:
                h = h * tl.load(weight + lane * weight_n, mask=lane < n, other=0.0).to(tile.acc_dtype)[None, :]
                h = narrowed(h, x, narrow)
            hx += tl.sum(h * t, 1)
    r = tl.rsqrt(squares / n + eps)
    tl.store(stats + row, r, mask=row_ok)
    if d_y is not None:
        tl.store(stats + extents.height + row, r * (hx / n), mask=row_ok)


@triton.jit
def rmsnorm_vjp_kernel(
    d_y, x, weight, past, stats, d_x, d_weights, extents, eps, strides, narrow: tl.constexpr, tile: tl.constexpr
):
    """d_weights: (groups, n) partial sums. Either of the two results may be None. past: a cotangent of x itself, which
    went past the norm, or None. stats: None where a program keeps whole rows, else it has one of ``parts`` of them.
    """
    n, rows = aligned(extents.n, tile.unit), extents.height
    part, at = (tl.program_id(0) // extents.parts).to(tl.int64), tl.program_id(0) % extents.parts
    # Columns on one axis, which gives them a layout of their own where rows of x are not aligned and weight is.
    lane, inside = columns(at.to(tl.int64) * tile.block_n, n, tile)
    col = [k[None, :] for k in lane]
    if weight is not None:
        w = [k[None, :] for k in load_tiles(weight, strides.weight.n, lane, inside, 0.0, tile.acc_dtype)]
    w_sum = [tl.full([tile.block_rows, k.shape[0]], 0.0, tile.acc_dtype) for k in lane]
    first = part * extents.group
    for start in tl.range(first, min(first + extents.group, rows), tile.block_rows, num_stages=tile.stages):
        row = start + tl.arange(0, tile.block_rows)
        row_ok = (row < rows)[:, None]
        ok = [row_ok & a[None, :] for a in inside]
        d_y_row = start_of(d_y, row, extents, strides.d_y, tile)
        x_row = start_of(x, row, extents, strides.x, tile)
        g = load_tiles(d_y_row, strides.d_y.n, col, ok, 0.0, tile.acc_dtype)
        t = load_tiles(x_row, strides.x.n, col, ok, 0.0, tile.acc_dtype)
        if stats is None:
            r = inverse_rms(t, n, eps)
        else:
            r = tl.load(stats + row[:, None], mask=row_ok, other=0.0)
        # of no row, r may be infinite, and 0 * inf would enter the sums over rows
        xh = [tl.where(row_ok, a * r, 0.0) for a in t]
        if d_x is not None:
            h = g
            if weight is not None:
                h = [narrowed(g[i] * w[i], x, narrow) for i in (0, 1)[: tile.tiles]]
            if stats is None:
                hx_mean = (row_sum([h[i] * xh[i] for i in (0, 1)[: tile.tiles]]) / n)[:, None]
            else:
                hx_mean = tl.load(stats + rows + row[:, None], mask=row_ok, other=0.0)
            d_t = [r * (h[i] - xh[i] * hx_mean) for i in (0, 1)[: tile.tiles]]
            if past is not None:
                past_row = start_of(past, row, extents, strides.past, tile)
                c = load_tiles(past_row, strides.past.n, col, ok, 0.0, tile.acc_dtype)
                d_t = [d_t[i] + c[i] for i in (0, 1)[: tile.tiles]]
            for i in tl.static_range(len(col)):
                tl.store(d_x + row[:, None] * n + col[i], d_t[i].to(d_x.dtype.element_ty), mask=ok[i])
        if d_weights is not None:
            w_sum = [w_sum[i] + g[i] * narrowed(xh[i], x, narrow) for i in (0, 1)[: tile.tiles]]
    if d_weights is not None:
        for i in tl.static_range(len(col)):
            tl.store(d_weights + part * n + lane[i], tl.sum(w_sum[i], 0), mask=inside[i])


@BACKEND.implements(
    "rmsnorm_vjp", key=key, tiling=gradient_tiling, supports=supports_gradient, config=RowGradientsConfig
)
def rmsnorm_vjp(call: Call, config: RowGradientsConfig) -> tuple[Any, ...]:
    return gradients(call, config, call.arrays["x"], None)


def gradients(call: Call, config: RowGradientsConfig, x: Any, past: Any) -> tuple[Any, ...]:
    """d_x and d_weight of the norm of x, those that the call wants; ``past``: what is added to d_x, or None."""
    d_y, weight, n, eps = call.arrays["d_y"], call.arrays["weight"], call.dims["n"], call.options["eps"]
    want_x, want_weight = "d_x" in call.wants, "d_weight" in call.wants
    d_x = fresh(x.shape, x.dtype, x.device) if want_x else None
    (x, d_y, past), rows = walk_beside(x, d_y, past if want_x else None)
    group = config.block_rows * (config.blocks_per_program if want_weight else 1)
    groups, (parts, tile) = cdiv(rows.height, group), shared_tile(call, rows, n, config)
    strides, narrow = strides_of(rows, weight, past), rounds_before(call)
    stats = scratch(call, 2, rows.height) if parts > 1 else None
    if stats is not None:
        launch(rmsnorm_vjp_statistics_kernel, cdiv(rows.height, config.block_rows), call, x, d_y if want_x else None,
               weight if want_x else None, stats, RowExtents(rows.height, rows.inner, n), eps, *strides[:2],
               strides.weight.n, narrow=narrow, tile=block_tile(call, rows, config),
               num_warps=config.num_warps)  # fmt: skip
    partial = {"d_weight": scratch(call, groups, n)} if want_weight else {}
    launch(rmsnorm_vjp_kernel, groups * parts, call, d_y, x, weight if want_x else None, past,
           stats, d_x, partial.get("d_weight"), GroupedExtents(rows.height, rows.inner, group, parts, n), eps, strides,
           narrow=narrow, tile=tile._replace(stages=config.num_stages), num_warps=config.num_warps)  # fmt: skip
    return (d_x, add_up(call, partial).get("d_weight"))
