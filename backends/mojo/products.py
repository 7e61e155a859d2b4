"""Matrix products: operands are packed into panels, and threads share the tiles of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from portakern.backends.mojo.configs import ProductConfig
from portakern.backends.mojo.launch import MojoFunction, accumulator, in_parts, layout, new
from portakern.core.call import Call
from portakern.core.oracle import rounded
from portakern.spec.dtypes import numpy_dtype

__all__ = ["Panels", "over_tiles", "packed", "product", "tiling"]

PACK, PANEL, MATMUL = MojoFunction("matmul", "pack"), MojoFunction("matmul", "panel"), MojoFunction("matmul")


def tiling(call: Call) -> Mapping[str, int]:
    """Tiles whose operands fit the first two caches of most processors: 32 KB of a panel of b, 256 KB of a."""
    return {"block_m": 256, "block_n": 512, "block_k": 256}


@dataclass(frozen=True)
class Panels:
    """Matrices of a batch in panels: (panels of all, k, rows of a panel). ``rows``: how many each matrix has."""

    panels: np.ndarray
    rows: int


def packed(x: np.ndarray, rows: int, dtype: str, right: bool) -> Panels:
    """Matrices of so many ``rows`` of k numbers, (..., k), in panels. ``right``: they are a right operand,
    transposed."""
    k, matrices = x.shape[-1], prod(x.shape[:-1]) // rows
    size = PANEL(int(dtype == "float64"), int(right))
    to = np.empty((matrices * -(-rows // size), k, size), accumulator(dtype))
    of = layout(x)
    in_parts(lambda first, end: PACK(of, int(right), rows, k, to, first, end), len(to), to.size)
    return Panels(to, rows)


def over_tiles(kernel: MojoFunction, a: Panels, b: Panels, *args: Any, batch: int, config: ProductConfig) -> None:
    """``kernel(a, b, *args, whether they are float64, extents, tiles, memory for a tile and a row, first tile, end)``:
    threads share the tiles of all products of a batch. Tiles are whole panels."""
    (_, k, step_m), (_, _, step_n), dtype = a.panels.shape, b.panels.shape, a.panels.dtype
    block_m, block_n = (-(-t // step) * step for t, step in ((config.block_m, step_m), (config.block_n, step_n)))
    tiles = batch * -(-a.rows // block_m) * -(-b.rows // block_n)
    extents = (int(dtype == np.float64), a.rows, b.rows, k, block_m, block_n, config.block_k)

    def run(first: int, end: int) -> None:
        space = np.empty((1 + min(block_m, a.rows + step_m), block_n), dtype)
        kernel(a.panels, b.panels, *args, *extents, space, first, end)

    in_parts(run, tiles, batch * a.rows * b.rows * k / 8)


def product(a: np.ndarray, b: np.ndarray, dtype: str, out_dtype: str, config: ProductConfig) -> np.ndarray:
    """a (*batch, m, k) times b (*batch, k, n), whose batches broadcast."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    (m, k), n = a.shape[-2:], b.shape[-1]
    one = prod(b.shape[:-2]) == 1  # then it is a product of all rows
    rows, b = (prod(batch) * m, b.reshape(k, n)) if one else (m, np.broadcast_to(b, (*batch, k, n)))
    narrows = dtype == "float64" != out_dtype
    c = new((prod(batch) * m // rows, rows, n), "float64" if narrows else out_dtype)
    left = packed(np.broadcast_to(a, (*batch, m, k)), rows, dtype, right=False)
    right = packed(np.swapaxes(b, -1, -2), n, dtype, right=True)
    over_tiles(MATMUL, left, right, layout(c), batch=len(c), config=config)
    found = c.reshape(*batch, m, n)
    return rounded(found, out_dtype).astype(numpy_dtype(out_dtype)) if narrows else found
