"""The gated product of a feed-forward layer, element by element over any strided views.

    y = g s u        s = 1 / (1 + exp(-g))

A program owns a tile of block_rows rows by block_n elements of each. Arrays that lie without gaps are one row, and a
tile as many elements of it. exp takes -|g| alone, so that it cannot overflow.

Source: Shazeer, "GLU variants improve transformer" (2020), equation 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.launch import accumulator, cdiv, launch, refuse_tile
from portakern.backends.triton.layout import (
    Rows,
    aligned,
    collapse,
    contiguous_strides,
    fresh_like,
    pow2_at_least,
    row_start,
    rows_of,
)
from portakern.backends.triton.lib.activations import open_and_shut
from portakern.backends.triton.lib.rows import tile_of
from portakern.spec import Tile

if TYPE_CHECKING:
    from portakern.core.call import Call

KNOBS = {"num_warps": Tile(1, 32)}


@triton.jit
def open_share(g):
    """s of a gate g."""
    s, _ = open_and_shut(g)
    return s


@triton.jit
def gated(gate, up, y, rows, n, steps, gate_row, gate_n, up_row, up_n, y_row, y_n, opening: tl.constexpr,
          block_rows: tl.constexpr, block_n: tl.constexpr, acc_dtype: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    """y = g opening(g) u of this program's tile."""
    n = aligned(n, unit)
    row, col = tile_of(steps, block_rows, block_n)
    ok = (row < rows)[:, None] & (col < n)
    g = tl.load(row_start(gate, row, 1, 0, gate_row, True, unit)[:, None] + col * gate_n, mask=ok, other=0.0)
    u = tl.load(row_start(up, row, 1, 0, up_row, True, unit)[:, None] + col * up_n, mask=ok, other=0.0)
    g = g.to(acc_dtype)
    y_at = row_start(y, row, 1, 0, y_row, True, unit)[:, None] + col * y_n
    tl.store(y_at, (g * opening(g) * u.to(acc_dtype)).to(y.dtype.element_ty), mask=ok)


@triton.jit
def swiglu_kernel(gate, up, y, rows, n, steps, gate_row, gate_n, up_row, up_n, y_row, y_n,
                  block_rows: tl.constexpr, block_n: tl.constexpr, acc_dtype: tl.constexpr,
                  unit: tl.constexpr):  # fmt: skip
    gated(gate, up, y, rows, n, steps, gate_row, gate_n, up_row, up_n, y_row, y_n, open_share,
          block_rows, block_n, acc_dtype, unit)  # fmt: skip


class Tiles(NamedTuple):
    """How programs share the elements of several tensors of one shape, and of a contiguous result.

    Attributes:
      rows: of the tensors, which are flat; n: the length of a row; steps: the tiles of a row; programs: of all rows.
      block_rows, block_n: the extents of a tile.
    """

    rows: Rows
    n: int
    steps: int
    programs: int
    block_rows: int
    block_n: int

    @property
    def strides(self) -> tuple[int, ...]:
        """From row to row and along a row, of each tensor and of the result."""
        return tuple(s for _, across, along in self.rows.strides for s in (across, along))


def share(tiling: Mapping[str, int], *tensors: Any) -> tuple[tuple[Any, ...], Tiles]:
    """The tensors, and how to share their elements. Those that two dimensions do not describe are gathered first."""
    shape = tuple(tensors[0].shape)
    extents, strides = collapse(shape, *[t.stride() for t in tensors], contiguous_strides(shape))
    if len(extents) > 2:
        tensors = tuple(t.contiguous() for t in tensors)
        extents, strides = collapse(shape, *[contiguous_strides(shape)] * (len(tensors) + 1))
    height, n = ((1, 1) + extents)[-2:]
    rows = rows_of(1, (height, n), *[((0, 0) + s)[-2:] for s in strides[:-1]])
    assert rows is not None
    block_rows, block_n = tiling["block_rows"], tiling["block_n"]
    if height == 1:
        block_rows, block_n = 1, block_rows * block_n
    steps = cdiv(n, block_n)
    return tensors, Tiles(rows, n, steps, cdiv(height, block_rows) * steps, block_rows, block_n)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def fit(call: Call, tiling: Mapping[str, int]) -> Mapping[str, int]:
    """As many elements in more rows, where rows are shorter than a tile."""
    shape = call.dims["batch"]
    block_n = pow2_at_least(shape[-1] if shape else 1, 128, tiling["block_n"])
    if block_n == tiling["block_n"]:
        return tiling
    block_rows = min(tiling["block_rows"] * tiling["block_n"] // block_n, 256)
    return {**tiling, "block_rows": block_rows, "block_n": block_n}


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    shape = call.dims["batch"]
    return refuse_tile(call, tiling, prod(shape[:-1]) * cdiv(shape[-1] if shape else 1, tiling["block_n"]))


def product(kernel: Any, call: Call, tiling: Mapping[str, int], **forms: Any) -> Any:
    """What a kernel like swiglu's, which may have several ``forms``, makes of the call's gate and up."""
    gate, up = call.arrays["gate"], call.arrays["up"]
    y = fresh_like(gate)
    (gate, up), tiles = share(tiling, gate, up)
    launch(kernel, tiles.programs, call, gate, up, y, tiles.rows.height, tiles.n, tiles.steps, *tiles.strides, **forms,
           block_rows=tiles.block_rows, block_n=tiles.block_n, acc_dtype=accumulator(call.dtype),
           unit=tiles.rows.known(call.dtype)["unit"], num_warps=tiling["num_warps"])  # fmt: skip
    return y


@BACKEND.implements("swiglu", key=key, fit=fit, supports=supports, knobs=KNOBS)
def swiglu(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    return (product(swiglu_kernel, call, tiling),)
