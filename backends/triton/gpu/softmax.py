"""Softmax over one axis of any strided view.

    y_j = exp(x_j - m) / l        m = max_j x_j        l = sum_j exp(x_j - m)

A program owns ``block_rows`` rows. A row that fits in ``block_n`` is read once and stays in registers. A longer one is
read twice: first its statistics, by online normalisation, which rescales l whenever m grows; then its result.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.launch import accumulator, cdiv, lanes, launch, refuse_common, refuse_over
from portakern.backends.triton.layout import SHAPES, aligned, fresh_like, pow2_at_least, row_start, walk_rows
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call


@triton.jit
def softmax_kernel(x, y, rows, rows_inner, n,
                   x_outer, x_inner, x_n, y_outer, y_inner, y_n,
                   block_rows: tl.constexpr, block_n: tl.constexpr, acc_dtype: tl.constexpr, one_tile: tl.constexpr,
                   flat: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    n = aligned(n, unit)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    row_ok = (row < rows)[:, None]
    x_row = row_start(x, row, rows_inner, x_outer, x_inner, flat, unit)[:, None]
    y_row = row_start(y, row, rows_inner, y_outer, y_inner, flat, unit)[:, None]
    col = tl.arange(0, block_n)[None, :].to(tl.int64)

    if one_tile:
        ok = row_ok & (col < n)
        t = tl.load(x_row + col * x_n, mask=ok, other=float("-inf")).to(acc_dtype)
        p = tl.exp(t - tl.max(t, 1)[:, None])
        tl.store(y_row + col * y_n, (p / tl.sum(p, 1)[:, None]).to(y.dtype.element_ty), mask=ok)
    else:
        m = tl.full([block_rows], float("-inf"), acc_dtype)
        l = tl.zeros([block_rows], acc_dtype)
        for start in range(0, tl.cast(n, tl.int64), block_n):
            t = tl.load(x_row + (start + col) * x_n, mask=row_ok & (start + col < n), other=float("-inf")).to(acc_dtype)
            m_new = tl.maximum(m, tl.max(t, 1))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing but -inf so far: -inf - -inf would be NaN
            l = l * tl.exp(m - shift) + tl.sum(tl.exp(t - shift[:, None]), 1)
            m = m_new
        for start in range(0, tl.cast(n, tl.int64), block_n):
            ok = row_ok & (start + col < n)
            t = tl.load(x_row + (start + col) * x_n, mask=ok, other=float("-inf")).to(acc_dtype)
            tl.store(y_row + (start + col) * y_n, (tl.exp(t - m[:, None]) / l[:, None]).to(y.dtype.element_ty), mask=ok)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["shape"][call.options["axis"]]}


def default_tiling(call: Call) -> dict[str, int]:
    return tile_rows(call.dims["shape"][call.options["axis"]], call.target.arch)


def tile_rows(n: int, arch: str, pairs: bool = False) -> dict[str, int]:
    """A formula of n instead of a table: nothing that was timed asked for another choice at some n, or on some chip.

    A program takes a whole row where 1024 threads can hold it, and about 2048 elements of short rows; a thread takes 16
    elements, or 32 of rows longer than 16384 and of rows that are not aligned, which are read one element at a time and
    want more reads under way in each thread (H100, n = 4097: 40 us where 16 take 47). Longer rows are read twice, in
    blocks that half of a multiprocessor's threads hold (H100, n = 131072: 74 us in blocks of 16384, 82 in blocks of
    8192; n = 21775, which is not aligned: 76 us in blocks of 4096, 121 in blocks of 8192).

    ``pairs``: two rows of 2049 to 16384 elements that are not aligned a program. Norms gain by it (H100, 4928 x 4041:
    42 us, 50 one at a time; 2304 x 10186: 67 and 76; 192 x 14500: 12.7 and 13.4), softmax loses (641 x 6926: 18 and
    13)."""
    whole, width = pow2_at_least(n, 128), lanes(arch)
    if n % 8:
        block_n, elements = (whole, 32) if whole <= 16384 else (4096, 16)
    else:
        block_n, elements = (whole if whole <= 32768 else 16384), (16 if whole <= 8192 else 32)
    block_rows = pow2_at_least(2048 // block_n, 1, 16)
    if pairs and n % 8 and 2048 < n <= 16384:
        block_rows, elements = 2, (64 if whole <= 8192 else 32)
    num_warps = pow2_at_least(block_rows * block_n // (elements * width), max(64 // elements, 1), 1024 // width)
    return {"block_rows": block_rows, "block_n": block_n, "num_warps": num_warps}


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    shape, axis = call.dims["shape"], call.options["axis"]
    return refuse_tile(call, tiling, prod(shape) // shape[axis])


def refuse_tile(call: Call, tiling: Mapping[str, int], rows: int) -> str | None:
    block_rows, num_warps = tiling["block_rows"], tiling["num_warps"]
    reason = _refuse_tile(block_rows * tiling["block_n"], num_warps, call.interpret)
    reason = reason or refuse_over(call, num_warps, block_rows * tiling["block_n"])
    return reason or refuse_common(call, num_warps, cdiv(rows, block_rows))


@functools.lru_cache(SHAPES)
def _refuse_tile(tile: int, num_warps: int, interpret: bool) -> str | None:
    if tile > 1 << 20:
        return f"a tile of block_rows * block_n = {tile} elements is over Triton's limit of 2^20"
    if not interpret and tile > num_warps * 32 * 128:
        return (
            f"a tile of {tile} elements is over 128 registers a thread at num_warps = {num_warps}; "
            "use a smaller block_n or more warps"
        )
    return None


@BACKEND.implements("softmax", key=key, tiling=default_tiling, supports=supports, knobs={"num_warps": Tile(1, 32)})
def softmax(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    x, axis = call.arrays["x"], call.options["axis"]
    y, n = fresh_like(x), x.shape[axis]
    (x,), rows = walk_rows(axis, x)
    launch(softmax_kernel, cdiv(rows.height, tiling["block_rows"]), call, x, y, rows.height, rows.inner, n,
           *rows.strides[0], *rows.strides[1], block_rows=tiling["block_rows"], block_n=tiling["block_n"],
           acc_dtype=accumulator(call.dtype), one_tile=n <= tiling["block_n"], num_warps=tiling["num_warps"],
           **rows.known(call.dtype))  # fmt: skip
    return (y,)
