"""Rows about their mean on GPUs: y = x - sum(x) / n.

A program owns ``block_rows`` rows, and reads each twice, ``block_n`` elements at a time: first for its sum, then to
write its result. The second time it comes from cache.
"""

from __future__ import annotations

from math import prod
from typing import Any

import triton
import triton.language as tl

import portakern as pk
from centering.center import key, row_tiles
from portakern.backends.triton.lib import (
    RowsConfig,
    accumulator,
    aligned,
    cdiv,
    fresh_like,
    launch,
    refuse_tile,
    row_start,
    walk_rows,
)


@triton.jit
def center_kernel(x, y, rows, rows_inner, n, x_outer, x_inner, x_n,
                  block_rows: tl.constexpr, block_n: tl.constexpr, acc_dtype: tl.constexpr,
                  flat: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    n = aligned(n, unit)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    x_row = row_start(x, row, rows_inner, x_outer, x_inner, flat, unit)[:, None]
    y_row, row_ok = (y + row * n)[:, None], (row < rows)[:, None]
    col = tl.arange(0, block_n)[None, :].to(tl.int64)

    total = tl.zeros([block_rows], acc_dtype)
    for start in range(0, tl.cast(n, tl.int64), block_n):
        ok = row_ok & (start + col < n)
        total += tl.sum(tl.load(x_row + (start + col) * x_n, mask=ok, other=0.0).to(acc_dtype), 1)
    mean = total / n
    for start in range(0, tl.cast(n, tl.int64), block_n):
        ok = row_ok & (start + col < n)
        t = tl.load(x_row + (start + col) * x_n, mask=ok, other=0.0).to(acc_dtype)
        tl.store(y_row + (start + col), (t - mean[:, None]).to(y.dtype.element_ty), mask=ok)


def tiles(call: pk.Call) -> RowsConfig:
    return RowsConfig(**row_tiles(call), num_warps=8)


def refused(call: pk.Call, config: RowsConfig) -> str | None:
    """Why a program cannot hold such a tile, or None."""
    return refuse_tile(call, config, prod(call.dims["batch"]))


@pk.backends()["triton"].implements("center", key=key, tiling=tiles, supports=refused, config=RowsConfig)
def center(call: pk.Call, config: RowsConfig) -> tuple[Any, ...]:
    x, n = call.arrays["x"], call.dims["n"]
    y = fresh_like(x)
    (x,), rows = walk_rows(x.ndim - 1, x)
    launch(center_kernel, cdiv(rows.height, config.block_rows), call, x, y, rows.height, rows.inner, n,
           *rows.strides[0], block_rows=config.block_rows, block_n=config.block_n,
           acc_dtype=accumulator(call.dtype), num_warps=config.num_warps, **rows.known(call.dtype))  # fmt: skip
    return (y,)
