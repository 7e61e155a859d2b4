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
    default_tiling,
    key,
    narrowed,
    normalise_long_rows,
    scale_and_shift,
    supports,
)
from portakern.backends.triton.launch import accumulator, cdiv, launch
from portakern.backends.triton.layout import aligned, fresh_like, row_start, walk_rows
from portakern.backends.triton.lib.rows import columns, load_columns, load_tiles, places_of, row_sum, walked
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def squares_of_long_rows(x_row, x_n, n, row_ok, block_n: tl.constexpr, deep: tl.constexpr, acc_dtype: tl.constexpr):
    """The sum of squares of rows that are read ``block_n`` numbers at a time: of each place of a tile, and of all."""
    col, total, n, whole = places_of(n, row_ok, block_n, deep, acc_dtype)
    for ends in tl.static_range(2):
        for start in range(whole if ends else 0, n if ends else whole, block_n):
            t = load_columns(x_row, start, col, x_n, n, row_ok, ends, 0.0, acc_dtype, deep)
            for i in tl.static_range(deep):
                total += t[i] * t[i]
    return tl.sum(total, 1)


@triton.jit
def rmsnorm_kernel(x, weight, y, rows, rows_inner, n, eps,
                   x_outer, x_inner, x_n, weight_n,
                   block_rows: tl.constexpr, block_n: tl.constexpr, tail: tl.constexpr, tiles: tl.constexpr,
                   deep: tl.constexpr, acc_dtype: tl.constexpr, narrow: tl.constexpr, flat: tl.constexpr,
                   unit: tl.constexpr):  # fmt: skip
    n = aligned(n, unit)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    x_row = row_start(x, row, rows_inner, x_outer, x_inner, flat, unit)
    x_row, y_row, row_ok = x_row[:, None], (y + row * n)[:, None], (row < rows)[:, None]

    if tiles:
        lane, inside = columns(0, n, block_n, tail)
        col, ok = [a[None, :] for a in lane], [row_ok & a[None, :] for a in inside]
        t = load_tiles(x_row, x_n, col, ok, 0.0, acc_dtype)
        r = tl.rsqrt(row_sum([a * a for a in t]) / n + eps)[:, None]
        for i in tl.static_range(tiles):
            xh = narrowed(t[i] * r, x, narrow)
            out = scale_and_shift(xh, weight, None, weight_n, 0, lane[i], inside[i], acc_dtype, unit)
            tl.store(y_row + col[i], out.to(y.dtype.element_ty), mask=ok[i])
    else:
        r = tl.rsqrt(squares_of_long_rows(x_row, x_n, n, row_ok, block_n, deep, acc_dtype) / n + eps)
        normalise_long_rows(x_row, x_n, y_row, weight, weight_n, None, 0, None, r, n, row_ok, block_n, deep,
                            narrow, acc_dtype, unit)  # fmt: skip


def rounds_before(call: Call) -> bool:
    """Whether x r is rounded before it meets the weight, and is not as wide as what it is computed in."""
    return call.options["rounding"] == "before_weight" and call.dtype in ("float16", "bfloat16")


@BACKEND.implements("rmsnorm", key=key, tiling=default_tiling, supports=supports, knobs={"num_warps": Tile(1, 32)})
def rmsnorm(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x, weight, n = call.arrays["x"], call.arrays["weight"], call.dims["n"]
    y = fresh_like(x)
    (x,), rows = walk_rows(x.ndim - 1, x)
    launch(rmsnorm_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, weight, y, rows.height, rows.inner, n,
           call.options["eps"], *rows.strides[0], 0 if weight is None else weight.stride(0),
           acc_dtype=accumulator(call.dtype), narrow=rounds_before(call), **walked(call, n, tiling),
           **rows.known(call.dtype))  # fmt: skip
    return (y,)
