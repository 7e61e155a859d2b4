"""What follows the product of a linear layer, and the layer's gradients, by whichever products a variant has."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton.configs import RowsConfig
from portakern.backends.triton.launch import accumulator, cdiv, launch, refuse_tile, torch_dtype
from portakern.backends.triton.layout import aligned, fresh, pow2_at_least, walk_rows
from portakern.backends.triton.lib.activations import activated, of_erf_form, of_silu, of_tanh_form
from portakern.backends.triton.lib.column_sums import add_up, scratch
from portakern.backends.triton.lib.linear_cross_entropy import Product, Refused
from portakern.backends.triton.lib.rows import GroupedExtents, RowTile, start_of
from portakern.core.config import Config

if TYPE_CHECKING:
    from portakern.core.call import Call

TILE, WARPS = 1024, 4  # elements of a walk's tile, and the warps that share it


@triton.jit
def finish(z, bias, bias_n, residual_at, y, pre, col, col_ok, at, ok, activation: tl.constexpr,
           acc_dtype: tl.constexpr):  # fmt: skip
    """What follows a tile z of the product: bias, activation, residual. at: where its elements stand in y and pre.
    bias, residual_at and pre may be None."""
    if bias is not None:
        z += tl.load(bias + col * bias_n, mask=col_ok, other=0.0).to(acc_dtype)[None, :]
    if pre is not None:
        tl.store(pre + at, z.to(pre.dtype.element_ty), mask=ok)
    f = activated(z, activation, y.dtype.element_ty.primitive_bitwidth == 16)
    if residual_at is not None:
        f += tl.load(residual_at, mask=ok, other=0.0).to(acc_dtype)
    tl.store(y + at, f.to(y.dtype.element_ty), mask=ok)


@triton.jit
def times_slope(d, z, activation: tl.constexpr):
    """d f'(z)."""
    if activation == "relu":
        return tl.where(z <= 0, 0.0, d)
    elif activation == "gelu":
        _, slope = of_erf_form(z)
        return d * slope
    elif activation == "gelu_tanh":
        _, slope = of_tanh_form(z)
        return d * slope
    else:
        _, slope = of_silu(z)
        return d * slope


@triton.jit
def linear_cotangent_kernel(
    d_y, pre, d_z, sums, extents, d_y_strides, pre_strides, activation: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    """d_z = d_y f'(pre) of this program's columns of a group of rows, and in sums, (groups, n), its sum over them.

    pre and d_z are None where there is no activation; sums may be None."""
    n = aligned(extents.n, tile.unit)
    part, at = (tl.program_id(0) // extents.parts).to(tl.int64), tl.program_id(0) % extents.parts
    lane = at.to(tl.int64) * tile.block_n + tl.arange(0, tile.block_n)
    col, col_ok = lane[None, :], (lane < n)[None, :]
    total = tl.full([tile.block_rows, tile.block_n], 0.0, tile.acc_dtype)
    first = part * extents.group
    for start in tl.range(first, min(first + extents.group, extents.height), tile.block_rows, num_stages=tile.stages):
        row = start + tl.arange(0, tile.block_rows)
        ok = (row < extents.height)[:, None] & col_ok
        d_y_row = start_of(d_y, row, extents, d_y_strides, tile)
        d = tl.load(d_y_row + col * d_y_strides.n, mask=ok, other=0.0)
        found = d
        if pre is not None:
            pre_row = start_of(pre, row, extents, pre_strides, tile)
            z = tl.load(pre_row + col * pre_strides.n, mask=ok, other=0.0)
            found = times_slope(d.to(tile.acc_dtype), z.to(tile.acc_dtype), activation).to(d_y.dtype.element_ty)
            tl.store(d_z + row[:, None] * n + col, found, mask=ok)
        if sums is not None:
            total += found.to(tile.acc_dtype)
    if sums is not None:
        tl.store(sums + part * n + lane, tl.sum(total, 0), mask=lane < n)


class ReductionTiling(NamedTuple):
    """How programs share a walk over rows of n elements: tiles of block_rows x block_n, and ``group`` rows a program.

    Attributes:
      tiles: of a row; stages: tiles whose loads are under way.
    """

    block_rows: int
    block_n: int
    group: int
    tiles: int
    stages: int

    @classmethod
    def of(cls, call: Call) -> ReductionTiling:
        """Tiles of 1024 elements, and groups of up to 64 of them where that leaves 512 programs, four for each of an
        H100's multiprocessors: their sums are then a 50th of what is read and written."""
        rows, n = prod(call.dims["batch"]), call.dims["n"]
        block_n = pow2_at_least(n, 16, TILE)
        block_rows, tiles = TILE // block_n, cdiv(n, block_n)
        steps = min(64, max(1, rows * tiles // (block_rows * 512)))
        stages = 4 if call.target.arch.startswith("sm_") and not call.interpret else 1
        return cls(block_rows, block_n, block_rows * steps, tiles, stages)


def refused(call: Call, m: int, n: int, k: int, refusal: Refused, stored: str | None = None) -> str | None:
    arrays = {"hidden": call.arrays["x"], "weight": call.arrays["weight"]}
    return refusal(call.replace(arrays=arrays), m, n, k, stored)


def supports_gradient(call: Call, config: Config, refusal: Refused) -> str | None:
    rows, n, k = prod(call.dims["batch"]), call.dims["n"], call.dims["k"]
    extents = {"d_x": (rows, k, n), "d_weight": (n, k, rows)}
    stored = call.outputs
    reasons = [refused(call, *extents[name], refusal, stored[name][1]) for name in call.wants if name in extents]
    walk = ReductionTiling.of(call)
    tile = RowsConfig(block_rows=walk.block_rows, block_n=walk.block_n, num_warps=WARPS)
    reasons.append(refuse_tile(call, tile, cdiv(rows, walk.group) * walk.tiles))
    return next(filter(None, reasons), None)


def gradients(call: Call, multiply: Product) -> tuple[Any, ...]:
    weight, x = call.arrays["weight"], call.arrays["x"]
    d_z, d_bias = cotangent(call)
    d_x, d_weight = (
        fresh(like.shape, torch_dtype(call.outputs[name][1]), like.device) if name in call.wants else None
        for name, like in (("d_x", x), ("d_weight", weight))
    )
    if d_x is not None:
        multiply(call, d_z, weight, d_x.reshape(-1, x.shape[-1]))
    if d_weight is not None:
        multiply(call, d_z.mT, x.reshape(-1, x.shape[-1]), d_weight)
    return d_x, d_weight, d_bias


def cotangent(call: Call) -> tuple[Any, Any]:
    """d_z by rows, which is d_y itself where there is no activation, and d_bias, if it is wanted."""
    d_y, pre, n = call.arrays["d_y"], call.arrays["pre"], call.dims["n"]
    bare, summed = call.options["activation"] == "none", "d_bias" in call.wants
    pre = None if bare else pre
    if bare and not summed:
        return d_y.reshape(-1, n), None
    tensors, rows = walk_rows(d_y.ndim - 1, d_y, *(() if bare else (pre,)))
    d_y, pre = (*tensors, None)[:2]
    d_z = None if bare else fresh((rows.height, n), d_y.dtype, d_y.device)
    walk = ReductionTiling.of(call)
    groups = cdiv(rows.height, walk.group)
    sums = scratch(call, groups, n) if summed else None
    tile = RowTile(walk.block_rows, walk.block_n, accumulator(call.dtype), **rows.known(call.dtype), stages=walk.stages)
    launch(linear_cotangent_kernel, groups * walk.tiles, call, d_y, pre, d_z, sums,
           GroupedExtents(rows.height, rows.inner, walk.group, walk.tiles, n), rows.strides[0], rows.strides[1],
           activation=call.options["activation"], tile=tile, num_warps=WARPS, enable_fp_fusion=False)  # fmt: skip
    d_bias = add_up(call, {"d_bias": sums})["d_bias"] if sums is not None else None
    return (d_y.reshape(-1, n) if d_z is None else d_z), d_bias
