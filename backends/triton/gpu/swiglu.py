"""The gated product of a feed-forward layer, element by element over any strided views.

    y = g s u        s = 1 / (1 + exp(-g))

A program owns a tile of block_rows rows by block_n elements of each. Arrays that lie without gaps are one row, and a
tile as many elements of it. exp takes -|g| alone, so that it cannot overflow.

Source: Shazeer, "GLU variants improve transformer" (2020), equation 5.

Gradients of the gated product of a feed-forward layer, element by element over any strided views.

    d_g = d_y u s (1 + g q)        d_u = d_y g s        s = 1 / (1 + exp(-g))        q = 1 / (1 + exp(g))

A program owns a tile as in swiglu.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import RowsConfig
from portakern.backends.triton.launch import accumulator, cdiv, launch, refuse_tile
from portakern.backends.triton.layout import (
    aligned,
    collapse,
    contiguous_strides,
    fresh_like,
    pow2_at_least,
    result_like,
    row_start,
    rows_of,
)
from portakern.backends.triton.lib.activations import of_silu, open_and_shut
from portakern.backends.triton.lib.rows import tile_of

if TYPE_CHECKING:
    from portakern.core.call import Call


class ElementExtents(NamedTuple):
    """Of what programs share element by element: ``height`` rows of n, in ``steps`` tiles each."""

    height: int
    n: int
    steps: int


class ElementStrides(NamedTuple):
    """Of one array: between rows, and along a row."""

    row: int
    n: int


class ElementTile(NamedTuple):
    """What a kernel of elements is compiled for: the extents of a tile, what it computes in, and what divides n and
    every distance between rows."""

    block_rows: int
    block_n: int
    acc_dtype: tl.dtype
    unit: int


@triton.jit
def own_elements(extents, tile: tl.constexpr):
    """The rows and the columns of this program's tile, and which of its elements there are."""
    n = aligned(extents.n, tile.unit)
    row, col = tile_of(extents.steps, tile)
    return row, col, (row < extents.height)[:, None] & (col < n)


@triton.jit
def pointers(x, row, col, strides, tile: tl.constexpr):
    """Where elements of x lie."""
    return row_start(x, row, 1, 0, strides.row, True, tile.unit)[:, None] + col * strides.n


@triton.jit
def open_share(g):
    """s of a gate g."""
    s, _ = open_and_shut(g)
    return s


@triton.jit
def gated(gate, up, y, extents, gate_strides, up_strides, y_strides, opening: tl.constexpr, tile: tl.constexpr):
    """y = g opening(g) u of this program's tile."""
    row, col, ok = own_elements(extents, tile)
    g = tl.load(pointers(gate, row, col, gate_strides, tile), mask=ok, other=0.0)
    u = tl.load(pointers(up, row, col, up_strides, tile), mask=ok, other=0.0)
    g = g.to(tile.acc_dtype)
    y_at = pointers(y, row, col, y_strides, tile)
    tl.store(y_at, (g * opening(g) * u.to(tile.acc_dtype)).to(y.dtype.element_ty), mask=ok)


@triton.jit
def swiglu_kernel(gate, up, y, extents, gate_strides, up_strides, y_strides, tile: tl.constexpr):
    gated(gate, up, y, extents, gate_strides, up_strides, y_strides, open_share, tile)


class ElementTiles(NamedTuple):
    """How programs share the elements of several tensors of one shape, and of a contiguous result.

    Attributes:
      extents: of the rows; strides: of each tensor and, last, of the result; programs: of all rows; tile: of each.
    """

    extents: ElementExtents
    strides: tuple[ElementStrides, ...]
    programs: int
    tile: ElementTile


def share(call: Call, config: RowsConfig, *tensors: Any) -> tuple[tuple[Any, ...], ElementTiles]:
    """The tensors, and how to share their elements. Those that two dimensions do not describe are gathered first."""
    shape = tuple(tensors[0].shape)
    extents, strides = collapse(shape, *[t.stride() for t in tensors], contiguous_strides(shape))
    if len(extents) > 2:
        tensors = tuple(t.contiguous() for t in tensors)
        extents, strides = collapse(shape, *[contiguous_strides(shape)] * (len(tensors) + 1))
    height, n = ((1, 1) + extents)[-2:]
    rows = rows_of(1, (height, n), *[((0, 0) + s)[-2:] for s in strides[:-1]])
    assert rows is not None
    block_rows, block_n = config.block_rows, config.block_n
    if height == 1:
        block_rows, block_n = 1, block_rows * block_n
    steps = cdiv(n, block_n)
    of_arrays = tuple(ElementStrides(s.inner, s.n) for s in rows.strides)
    tile = ElementTile(block_rows, block_n, accumulator(call.dtype), rows.known(call.dtype)["unit"])
    return tensors, ElementTiles(ElementExtents(height, n, steps), of_arrays, cdiv(height, block_rows) * steps, tile)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def fit(call: Call, config: RowsConfig) -> RowsConfig:
    """As many elements in more rows, where rows are shorter than a tile."""
    shape = call.dims["batch"]
    block_n = pow2_at_least(shape[-1] if shape else 1, 128, config.block_n)
    if block_n == config.block_n:
        return config
    block_rows = min(config.block_rows * config.block_n // block_n, 256)
    return config.replace(block_rows=block_rows, block_n=block_n)


def supports(call: Call, config: RowsConfig) -> str | None:
    shape = call.dims["batch"]
    return refuse_tile(call, config, prod(shape[:-1]) * cdiv(shape[-1] if shape else 1, config.block_n))


def product(kernel: Any, call: Call, config: RowsConfig, **forms: Any) -> Any:
    """What a kernel like swiglu's, which may have several ``forms``, makes of the call's gate and up."""
    gate, up = call.arrays["gate"], call.arrays["up"]
    y = fresh_like(gate)
    (gate, up), tiles = share(call, config, gate, up)
    launch(kernel, tiles.programs, call, gate, up, y, tiles.extents, *tiles.strides, **forms, tile=tiles.tile,
           num_warps=config.num_warps)  # fmt: skip
    return y


@BACKEND.implements("swiglu", key=key, fit=fit, supports=supports, config=RowsConfig)
def swiglu(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    return (product(swiglu_kernel, call, config),)


@triton.jit
def gated_vjp(
    gate, up, d_y, d_gate, d_up, extents, gate_strides, up_strides, d_y_strides, out_strides, opening: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Either result may be None; up is None where d_up alone is wanted. ``opening`` of a gate g gives the share of it
    that is open, and the slope of their product."""
    row, col, ok = own_elements(extents, tile)
    g = tl.load(pointers(gate, row, col, gate_strides, tile), mask=ok, other=0.0)
    d = tl.load(pointers(d_y, row, col, d_y_strides, tile), mask=ok, other=0.0)
    g, d = g.to(tile.acc_dtype), d.to(tile.acc_dtype)
    s, slope = opening(g)
    if d_gate is not None:
        u = tl.load(pointers(up, row, col, up_strides, tile), mask=ok, other=0.0)
        d_gate_at = pointers(d_gate, row, col, out_strides, tile)
        tl.store(d_gate_at, (d * u.to(tile.acc_dtype) * slope).to(d_gate.dtype.element_ty), mask=ok)
    if d_up is not None:
        d_up_at = pointers(d_up, row, col, out_strides, tile)
        tl.store(d_up_at, (d * (g * s)).to(d_up.dtype.element_ty), mask=ok)


@triton.jit
def swiglu_vjp_kernel(
    gate, up, d_y, d_gate, d_up, extents, gate_strides, up_strides, d_y_strides, out_strides, tile: tl.constexpr
):  # fmt: skip
    gated_vjp(gate, up, d_y, d_gate, d_up, extents, gate_strides, up_strides, d_y_strides, out_strides, of_silu, tile)


def gradients(kernel: Any, call: Call, config: RowsConfig, **forms: Any) -> tuple[Any, ...]:
    """What a kernel like swiglu_vjp's, which may have several ``forms``, makes of the call's arrays.

    Without fusion: the compiler would contract a product into a sum where nothing else reads the product, and whether
    d_u does depends on what is wanted; the bits of d_g must not.
    """
    gate, up, d_y = (call.arrays[name] for name in ("gate", "up", "d_y"))
    d_gate, d_up = (result_like(gate, call, name) if name in call.wants else None for name in ("d_gate", "d_up"))
    (gate, up, d_y), tiles = share(call, config, gate, up, d_y)
    launch(kernel, tiles.programs, call, gate, None if d_gate is None else up, d_y, d_gate, d_up, tiles.extents,
           *tiles.strides, **forms, tile=tiles.tile, num_warps=config.num_warps,
           enable_fp_fusion=False)  # fmt: skip
    return d_gate, d_up


@BACKEND.implements("swiglu_vjp", key=key, fit=fit, supports=supports, config=RowsConfig, overwrites=True)
def swiglu_vjp(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    return gradients(swiglu_vjp_kernel, call, config)
