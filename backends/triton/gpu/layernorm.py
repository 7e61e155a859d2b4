"""Layer normalisation of the last axis.

    y = (x - mean) / sqrt(var + eps) * weight + bias        mean = sum(x) / n        var = sum((x - mean)^2) / n

A program owns ``block_rows`` rows. The variance is that about the mean: E[x^2] - mean^2 cancels when the mean is large.
Each mean is a sum over a count and the mean of what that leaves of every number, so that a constant row leaves 0.
A row that fits in ``tiles`` tiles is read once and stays in registers, as in softmax. A longer one is read twice:
first its statistics, those of each place of a tile about the place's own mean, joined block by block and at last with
those of all places; then its result.

Sources: Ba, Kiros and Hinton, "Layer Normalization" (2016), section 3; Chan, Golub and LeVeque, "Updating formulae and
a pairwise algorithm for computing sample variances" (1979), equation 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import fresh_like, walk_rows
from portakern.backends.triton.lib.rows import (
    Extents,
    centred,
    load_columns,
    load_tiles,
    own_rows,
    places_of,
    refuse_rows,
    row_tile,
    start_of,
    tile_rows,
    whole_rows,
)
from portakern.spec import Tile

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
def numbers_at(n, col, places: tl.constexpr):
    """How many of n numbers come to each place ``col``, one after another."""
    return tl.maximum((n - col + places - 1) // places, 0)


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
    row, n = own_rows(extents, tile)
    x_row = start_of(x, row, extents, x_strides, tile)
    y_row, row_ok = (y + row * n)[:, None], (row < extents.height)[:, None]
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


def default_tiling(call: Call) -> dict[str, int]:
    return tile_rows(call.dims["n"], call.target.arch, norm=True)


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    return refuse_rows(call, tiling, call.dims["n"], call.arrays["x"].numel() // call.dims["n"])


@BACKEND.implements("layernorm", key=key, tiling=default_tiling, supports=supports, knobs={"num_warps": Tile(1, 32)})
def layernorm(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x, weight, bias, n = call.arrays["x"], call.arrays["weight"], call.arrays["bias"], call.dims["n"]
    y = fresh_like(x)
    (x,), rows = walk_rows(x.ndim - 1, x)
    weight_n, bias_n = (0 if w is None else w.stride(0) for w in (weight, bias))
    launch(layernorm_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, weight, bias, y,
           Extents(rows.height, rows.inner, n), call.options["eps"], rows.strides[0], weight_n, bias_n,
           tile=row_tile(call, rows, n, tiling), num_warps=tiling["num_warps"])  # fmt: skip
    return (y,)
