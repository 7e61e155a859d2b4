"""Root mean square normalisation of the last axis, in codes of 8 bits and one scale for each group of a row.

    y = xh weight        xh = x r        r = (sum(x^2) / n + eps)^-1/2        (``narrow``: xh is rounded to x's dtype)
    scale = max |y| / L of a group        q = y / scale, no further from 0 than L, rounded to nearest, ties to even

A program owns ``block_rows`` rows, as in rmsnorm. A row that fits in ``tiles`` tiles is read once, and y stays in
registers until its scales are known: the maximum of the whole row, or of every ``lanes`` places of a tile where a group
has so many numbers. Of other rows x is read three times, the last two group by group, from cache: the squares, the
greatest magnitude of ``block_n`` places of groups side by side, and their codes.

Maxima are of bits as integers, and codes made as in quantize.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4; Micikevicius et al., "FP8
formats for deep learning" (2022).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import CodedRowsConfig
from portakern.backends.triton.gpu.layernorm import (
    Affine,
    default_tiling,
    key,
    narrowed,
    scale_and_shift,
    supports,
)
from portakern.backends.triton.gpu.quantize import (
    CodePlan,
    as_stored,
    coded,
    codes_of,
    inverse_of,
    magnitude_bits,
    scale_of,
)
from portakern.backends.triton.gpu.rmsnorm import inverse_rms, rounds_before, squares_of_long_rows
from portakern.backends.triton.launch import cdiv, launch, torch_dtype
from portakern.backends.triton.layout import RowStrides, TensorRows, fresh, pow2_at_least, walk_rows
from portakern.backends.triton.lib.rows import (
    RowTile,
    load_tiles,
    own_rows,
    row_max,
    row_tile,
    start_of,
    whole_rows,
)
from portakern.specs.quantize import scale_limits

if TYPE_CHECKING:
    from portakern.core.call import Call


class CodedExtents(NamedTuple):
    """``height``: how many rows there are, ``inner`` of them in the inner row dimension; ``n``: the numbers of each, in
    ``groups`` of ``width``, of which the last may lack some."""

    height: int
    inner: int
    n: int
    groups: int
    width: int

    @classmethod
    def of(cls, call: Call, rows: TensorRows) -> CodedExtents:
        n = call.dims["n"]
        width = min(call.options["width"], n)
        return cls(rows.height, rows.inner, n, cdiv(n, width), width)


class NormLimits(NamedTuple):
    """``eps`` of a norm, and the limits of scales, as :class:`portakern.specs.quantize.ScaleLimits` has them."""

    eps: float
    least: float
    most: float
    zeros: float

    @classmethod
    def of(cls, call: Call) -> NormLimits:
        return cls(call.options["eps"], *scale_limits(call))


class NormStrides(NamedTuple):
    """Of x, and of weight."""

    x: RowStrides
    weight: int


class NormedRows(NamedTuple):
    """Rows to norm: where they begin, their step, which of them there are, their r, and what follows the norm."""

    x: Any
    step: Any
    ok: Any
    r: Any
    affine: Any


@triton.jit
def normed(t, r, x, affine, lane, inside, narrow: tl.constexpr, tile: tl.constexpr):
    """y of numbers in columns ``lane``, those ``inside``."""
    return scale_and_shift(narrowed(t * r, x, narrow), affine, lane, inside, tile)


@triton.jit
def normed_columns(rows, lane, inside, last: tl.constexpr, narrow: tl.constexpr, tile: tl.constexpr):
    """:func:`normed`, of rows that are read again. ``last``: for the last time."""
    t = tl.load(rows.x + lane[None, :] * rows.step, mask=rows.ok & inside[None, :], other=0.0).to(tile.acc_dtype)
    return normed(t, rows.r, rows.x, rows.affine, lane, inside, narrow, tile)


@triton.jit
def store_groups(y, q, scale, first, col, ok, groups, limits, codes: tl.constexpr):
    """Codes and scales of a tile of rows whose groups, from ``first`` on, have ``lanes`` places each."""
    beside: tl.constexpr = y.shape[1] // codes.lanes
    parts = tl.reshape(y, [y.shape[0], beside, codes.lanes])
    s = scale_of(tl.max(magnitude_bits(parts, codes), 2), limits, codes)
    group = first + tl.arange(0, beside)[None, :]
    tl.store(scale + group, s, mask=(tl.max(ok.to(tl.int32), 1)[:, None] > 0) & (group < groups))
    code = tl.reshape(coded(parts, inverse_of(s)[:, :, None], codes), [y.shape[0], y.shape[1]])
    tl.store(q + col, code.to(q.dtype.element_ty), mask=ok)


@triton.jit
def store_codes(y, q, scale, col, ok, groups, limits, codes: tl.constexpr):
    """Codes and scales of rows that stay in registers, a tile at a time. ``q``, ``scale``: where the rows' begin."""
    if codes.lanes:
        for i in tl.static_range(len(y)):
            store_groups(y[i], q, scale, i * (y[0].shape[1] // codes.lanes), col[i], ok[i], groups, limits, codes)
    else:
        s = scale_of(row_max([magnitude_bits(a, codes) for a in y]), limits, codes)[:, None]
        tl.store(scale, s, mask=tl.max(ok[0].to(tl.int32), 1)[:, None] > 0)
        for i in tl.static_range(len(y)):
            tl.store(q + col[i], coded(y[i], inverse_of(s), codes).to(q.dtype.element_ty), mask=ok[i])


@triton.jit
def walk_groups(
    read: tl.constexpr, rows, q, scale, extents, limits, narrow: tl.constexpr, codes: tl.constexpr, tile: tl.constexpr
):
    """Codes and scales of rows that are read group by group, so many side by side as a tile has places for. ``read``
    gives y in some columns of ``rows``."""
    beside: tl.constexpr = tile.block_n // codes.lanes
    place = tl.arange(0, tile.block_n)
    own, within = place // codes.lanes, (place % codes.lanes).to(tl.int64)
    for first in range(0, extents.groups, beside):
        group, found = first + own, tl.full([tile.block_rows, tile.block_n], 0, codes.word)
        begin, end = group.to(tl.int64) * extents.width, tl.minimum((group + 1).to(tl.int64) * extents.width, extents.n)
        for start in range(0, extents.width, codes.lanes):
            lane = begin + start + within
            found = tl.maximum(found, magnitude_bits(read(rows, lane, lane < end, False, narrow, tile), codes))
        s = scale_of(tl.max(tl.reshape(found, [tile.block_rows, beside, codes.lanes]), 2), limits, codes)
        column = first + tl.arange(0, beside)[None, :]
        tl.store(scale + column, s, mask=rows.ok & (column < extents.groups))
        inverse = tl.broadcast_to(inverse_of(s)[:, :, None], [tile.block_rows, beside, codes.lanes])
        inverse = tl.reshape(inverse, [tile.block_rows, tile.block_n])
        for start in range(0, extents.width, codes.lanes):
            lane = begin + start + within
            code = coded(read(rows, lane, lane < end, True, narrow, tile), inverse, codes)
            tl.store(q + lane[None, :], code.to(q.dtype.element_ty), mask=rows.ok & (lane < end)[None, :])


@triton.jit
def rmsnorm_quantize_kernel(
    x, weight, q, scale, extents, strides, limits, narrow: tl.constexpr, codes: tl.constexpr, tile: tl.constexpr
):
    row, n = own_rows(extents, tile)
    x_row, row_ok = start_of(x, row, extents, strides.x, tile), (row < extents.height)[:, None]
    q_row, scale_row = (q + row * n)[:, None], (scale + row * extents.groups)[:, None]
    affine = Affine(weight, strides.weight, None, None)

    if tile.tiles:
        lane, inside, col, ok = whole_rows(n, row_ok, tile)
        t = load_tiles(x_row, strides.x.n, col, ok, 0.0, tile.acc_dtype)
        r = inverse_rms(t, n, limits.eps)
        y = [normed(t[i], r, x, affine, lane[i], inside[i], narrow, tile) for i in (0, 1)[: len(t)]]
        store_codes(y, q_row, scale_row, col, ok, extents.groups, limits, codes)
    else:
        r = tl.rsqrt(squares_of_long_rows(x_row, strides.x.n, n, row_ok, tile) / n + limits.eps)[:, None]
        rows = NormedRows(x_row, strides.x.n, row_ok, r, affine)
        walk_groups(normed_columns, rows, q_row, scale_row, extents, limits, narrow, codes, tile)


def group_plans(call: Call, width: int, tile: RowTile) -> tuple[CodePlan, RowTile]:
    """How the codes of rows in groups of ``width`` are made, and the tile: without any where a row's groups do not lie
    on a grid of its tiles, for which it is read group by group. Of the call's shapes along a row alone."""
    lanes, codes = pow2_at_least(width, 1), codes_of(call)
    if tile.tiles and width == call.dims["n"]:
        return codes, tile
    if lanes == width <= min(tile.block_n, tile.tail or tile.block_n):
        return codes._replace(lanes=lanes), tile
    return codes._replace(lanes=min(lanes, tile.block_n)), tile._replace(tiles=0, tail=0)


def fresh_codes(call: Call, like: Any, codes: CodePlan) -> tuple[Any, Any, Any]:
    """Memory for codes and scales, and the codes as a kernel writes them."""
    (q_shape, q_dtype), (scale_shape, scale_dtype) = call.outputs["q"], call.outputs["scale"]
    q, scale = (fresh(s, torch_dtype(d), like.device) for s, d in ((q_shape, q_dtype), (scale_shape, scale_dtype)))
    return q, scale, as_stored(q, codes)


@BACKEND.implements("rmsnorm_quantize", key=key, tiling=default_tiling, supports=supports, config=CodedRowsConfig)
def rmsnorm_quantize(call: Call, config: CodedRowsConfig) -> tuple[Any, ...]:
    x, weight = call.arrays["x"], call.arrays["weight"]
    (x,), rows = walk_rows(x.ndim - 1, x)
    extents = CodedExtents.of(call, rows)
    codes, tile = group_plans(call, extents.width, row_tile(call, rows, extents.n, config))
    q, scale, stored = fresh_codes(call, x, codes)
    launch(rmsnorm_quantize_kernel, cdiv(rows.height, config.block_rows), call, x, weight, stored, scale, extents,
           NormStrides(rows.strides[0], 0 if weight is None else weight.stride(0)), NormLimits.of(call),
           narrow=rounds_before(call), codes=codes, tile=tile, num_warps=config.num_warps)  # fmt: skip
    return q, scale
