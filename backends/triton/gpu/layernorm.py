"""Layer normalisation of the last axis.

    y = (x - mean) / sqrt(var + eps) * weight + bias        mean = sum(x) / n        var = sum((x - mean)^2) / n

A program owns ``block_rows`` rows. The variance is that about the mean: E[x^2] - mean^2 cancels when the mean is large.
A row that fits in ``tiles`` tiles is read once and stays in registers, as in softmax. A longer one is read twice:
first its statistics, those of each block about the block's own mean, joined to those of the blocks before it; then its
result.

Sources: Ba, Kiros and Hinton, "Layer Normalization" (2016), section 3; Chan, Golub and LeVeque, "Updating formulae and
a pairwise algorithm for computing sample variances" (1979), equation 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu._rows import centred, columns, load_tiles, refuse_rows, tile_rows, told
from portakern.backends.triton.launch import accumulator, cdiv, launch
from portakern.backends.triton.layout import aligned, fresh_like, row_start, walk_rows
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def beside(w, step, lane, inside, acc_dtype: tl.constexpr, unit: tl.constexpr):
    """What w has in columns ``lane``, those ``inside``. Where rows begin anywhere, it is read along an axis of its own,
    since in a tile it would share the layout of the rows, which is one of narrow accesses."""
    if unit == 1:
        return tl.load(w + lane * step, mask=inside, other=0.0).to(acc_dtype)[None, :]
    else:
        return tl.load(w + lane[None, :] * step, mask=inside[None, :], other=0.0).to(acc_dtype)


@triton.jit
def scale_and_shift(xh, weight, bias, weight_n, bias_n, lane, inside, acc_dtype: tl.constexpr, unit: tl.constexpr):
    """xh * weight + bias in columns ``lane``, those ``inside``, without those of the two that are None."""
    if weight is not None:
        xh = xh * beside(weight, weight_n, lane, inside, acc_dtype, unit)
    if bias is not None:
        xh = xh + beside(bias, bias_n, lane, inside, acc_dtype, unit)
    return xh


@triton.jit
def join(mean, m2, t, ok, start, n, block_n: tl.constexpr, acc_dtype: tl.constexpr):
    """The mean and the sum of squares about it of what rows have shown before column ``start``, and of the block t
    there."""
    width = tl.minimum(n - start, block_n).to(acc_dtype)
    own = tl.sum(t, 1) / width
    d = tl.where(ok, t - own[:, None], 0.0)
    shift, share = own - mean, width / (start + width)
    return mean + shift * share, m2 + (tl.sum(d * d, 1) + shift * shift * (start * share))


@triton.jit
def layernorm_kernel(x, weight, bias, y, rows, rows_inner, n, eps,
                     x_outer, x_inner, x_n, weight_n, bias_n,
                     block_rows: tl.constexpr, block_n: tl.constexpr, tail: tl.constexpr, tiles: tl.constexpr,
                     acc_dtype: tl.constexpr, flat: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    n = aligned(n, unit)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    x_row = row_start(x, row, rows_inner, x_outer, x_inner, flat, unit)
    x_row, y_row, row_ok = x_row[:, None], (y + row * n)[:, None], (row < rows)[:, None]

    if tiles:
        lane, inside = columns(0, n, block_n, tail)
        col, ok = [a[None, :] for a in lane], [row_ok & a[None, :] for a in inside]
        t = load_tiles(x_row, x_n, col, ok, 0.0, acc_dtype)
        d, r = centred(t, ok, n, eps, tiles)
        for i in tl.static_range(tiles):
            out = scale_and_shift(d[i] * r, weight, bias, weight_n, bias_n, lane[i], inside[i], acc_dtype, unit)
            tl.store(y_row + col[i], out.to(y.dtype.element_ty), mask=ok[i])
    else:
        lane = tl.arange(0, block_n).to(tl.int64)
        col = lane[None, :]
        mean = tl.zeros([block_rows], acc_dtype)
        total = tl.zeros([block_rows], acc_dtype)
        for start in range(0, tl.cast(n, tl.int64), block_n):
            ok = row_ok & (start + col < n)
            t = tl.load(x_row + (start + col) * x_n, mask=ok, other=0.0).to(acc_dtype)
            mean, total = join(mean, total, t, ok, start, n, block_n, acc_dtype)
        r = tl.rsqrt(total / n + eps)
        for start in range(0, tl.cast(n, tl.int64), block_n):
            ok = row_ok & (start + col < n)
            t = tl.load(x_row + (start + col) * x_n, mask=ok, other=0.0).to(acc_dtype)
            xh = (t - mean[:, None]) * r[:, None]
            out = scale_and_shift(xh, weight, bias, weight_n, bias_n, start + lane, start + lane < n, acc_dtype, unit)
            tl.store(y_row + (start + col), out.to(y.dtype.element_ty), mask=ok)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"]}


def default_tiling(call: Call) -> dict[str, int]:
    return tile_rows(call.dims["n"], call.target.arch, pairs=True)


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    return refuse_rows(call, tiling, call.dims["n"], call.arrays["x"].numel() // call.dims["n"])


@BACKEND.implements("layernorm", key=key, tiling=default_tiling, supports=supports, knobs={"num_warps": Tile(1, 32)})
def layernorm(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x, weight, bias, n = call.arrays["x"], call.arrays["weight"], call.arrays["bias"], call.dims["n"]
    y = fresh_like(x)
    (x,), rows = walk_rows(x.ndim - 1, x)
    weight_n, bias_n = (0 if w is None else w.stride(0) for w in (weight, bias))
    launch(layernorm_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, weight, bias, y, rows.height, rows.inner,
           n, call.options["eps"], *rows.strides[0], weight_n, bias_n, acc_dtype=accumulator(call.dtype),
           **told(call, n, tiling), **rows.known(call.dtype))  # fmt: skip
    return (y,)
