"""Root mean square normalisation of the last axis.

    y = x r weight        r = (sum(x^2) / n + eps)^-1/2        (``narrow``: x r is rounded to x's dtype)

A program owns ``block_rows`` rows. A row that fits in ``tiles`` tiles is read once and stays in registers, as in
softmax; a longer one is read twice (squares, result), the second time from cache. Masked lanes read 0, which adds
nothing to a sum of squares.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.gpu.layernorm import (
    Affine,
    default_tiling,
    key,
    narrowed,
    normalise_long_rows,
    scale_and_shift,
    supports,
)
from portakern.backends.triton.launch import cdiv, launch
from portakern.backends.triton.layout import fresh_like, walk_rows
from portakern.backends.triton.lib.rows import (
    Extents,
    load_columns,
    load_tiles,
    own_rows,
    places_of,
    row_sum,
    row_tile,
    start_of,
    whole_rows,
)
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call


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
    row, n = own_rows(extents, tile)
    x_row = start_of(x, row, extents, x_strides, tile)
    y_row, row_ok = (y + row * n)[:, None], (row < extents.height)[:, None]
    affine = Affine(weight, weight_n, None, None)

    if tile.tiles:
        lane, inside, col, ok = whole_rows(n, row_ok, tile)
        t = load_tiles(x_row, x_strides.n, col, ok, 0.0, tile.acc_dtype)
        r = tl.rsqrt(row_sum([a * a for a in t]) / n + eps)[:, None]
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


@BACKEND.implements("rmsnorm", key=key, tiling=default_tiling, supports=supports, knobs={"num_warps": Tile(1, 32)})
def rmsnorm(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x, weight, n = call.arrays["x"], call.arrays["weight"], call.dims["n"]
    y = fresh_like(x)
    (x,), rows = walk_rows(x.ndim - 1, x)
    launch(rmsnorm_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, weight, y,
           Extents(rows.height, rows.inner, n), call.options["eps"], rows.strides[0],
           0 if weight is None else weight.stride(0), narrow=rounds_before(call), tile=row_tile(call, rows, n, tiling),
           num_warps=tiling["num_warps"])  # fmt: skip
    return (y,)
