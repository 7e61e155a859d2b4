"""Rotary position embedding, of any strided view of heads.

    y_a = x_a cos - x_b sin        y_b = x_b cos + x_a sin

A program owns block_seq tokens of block_heads heads of one sample, with all their pairs. It reads the columns of a
token once for all of its heads. What is in no pair is copied.

Source: Su et al., "RoFormer" (2021), equation 34.

Gradient of the rotary position embedding: the kernel of rope, with -sin for sin.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import RopeConfig
from portakern.backends.triton.launch import accumulator, cdiv, launch, refuse_common, refuse_over
from portakern.backends.triton.layout import aligned, contiguous_strides, pow2_at_least, result_like
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    from portakern.core.call import Call


LEAST_PAIRS = 16  # of a tile: what passes through is copied as many pairs at a time
USUAL_PAIRS = 64  # of a head, for which the rows of tables are written
USUAL_TILE = 512  # pairs that a warp turns


class RotaryExtents(NamedTuple):
    """``rest``: the numbers of a head that are in no pair; ``tiles_seq``, ``tiles_heads``: of a sample."""

    seq: int
    heads: int
    pairs: int
    rest: int
    tiles_seq: int
    tiles_heads: int


class RotaryStrides(NamedTuple):
    """Of x and y along (batch, seq, heads, d), of cos and sin along (batch, seq, pairs)."""

    x: Any
    y: Any
    cos: Any
    sin: Any


class HeadsTile(NamedTuple):
    """What the kernel is compiled for: the tokens, heads and pairs of a program, what it computes in, and what divides
    the pairs and every distance between heads and tokens."""

    block_seq: int
    block_heads: int
    block_pairs: int
    acc_dtype: tl.dtype
    unit: int


@triton.jit
def pointers(array, batch, s, h, strides, unit: tl.constexpr):
    """Where the heads h of the tokens s begin."""
    of_batch, of_seq, of_heads, _ = strides
    array += batch * aligned(of_batch, unit)
    return array + (s.to(tl.int64) * aligned(of_seq, unit) + h.to(tl.int64) * aligned(of_heads, unit))


@triton.jit
def columns(table, batch, s, p, ok, strides, acc_dtype: tl.constexpr, unit: tl.constexpr):
    """The columns p of a table for the tokens s."""
    of_batch, of_seq, of_pairs = strides
    at = table + batch * aligned(of_batch, unit) + s.to(tl.int64) * aligned(of_seq, unit) + p.to(tl.int64) * of_pairs
    return tl.load(at, mask=ok, other=0.0).to(acc_dtype)


@triton.jit
def rope_kernel(
    x, cos, sin, y, extents, strides, interleaved: tl.constexpr, transposed: tl.constexpr, full: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """``transposed``: by -sin; ``full``: every number of a head is in a pair. Tiles are (tokens, heads, numbers)."""
    index = tl.program_id(0)
    rest, batch = index // extents.tiles_heads, (index // extents.tiles_heads // extents.tiles_seq).to(tl.int64)
    s = rest % extents.tiles_seq * tile.block_seq + tl.arange(0, tile.block_seq)[:, None, None]
    h = index % extents.tiles_heads * tile.block_heads + tl.arange(0, tile.block_heads)[None, :, None]
    p = tl.arange(0, tile.block_pairs)[None, None, :]
    two = tl.arange(0, 2 * tile.block_pairs)[None, None, :]
    pairs = aligned(extents.pairs, tile.unit)
    there, here = (s < extents.seq) & (h < extents.heads), (s < extents.seq) & (p < pairs)
    c = columns(cos, batch, s, p, here, strides.cos, tile.acc_dtype, tile.unit)
    sine = columns(sin, batch, s, p, here, strides.sin, tile.acc_dtype, tile.unit)
    sine = -sine if transposed else sine
    x_at, y_at = pointers(x, batch, s, h, strides.x, tile.unit), pointers(y, batch, s, h, strides.y, tile.unit)
    x_d = strides.x[3]

    if interleaved:
        ok = there & (two < 2 * pairs)
        beside = tl.load(x_at + two.to(tl.int64) * x_d, mask=ok, other=0.0).to(tile.acc_dtype)
        a, b = tl.split(tl.reshape(beside, (tile.block_seq, tile.block_heads, tile.block_pairs, 2)))
        turned = tl.join(a * c - b * sine, b * c + a * sine)
        turned = tl.reshape(turned, (tile.block_seq, tile.block_heads, 2 * tile.block_pairs))
        tl.store(y_at + two, turned.to(y.dtype.element_ty), mask=ok)
    else:
        ok, q = there & (p < pairs), p + pairs
        a = tl.load(x_at + p.to(tl.int64) * x_d, mask=ok, other=0.0).to(tile.acc_dtype)
        b = tl.load(x_at + q.to(tl.int64) * x_d, mask=ok, other=0.0).to(tile.acc_dtype)
        tl.store(y_at + p, (a * c - b * sine).to(y.dtype.element_ty), mask=ok)
        tl.store(y_at + q, (b * c + a * sine).to(y.dtype.element_ty), mask=ok)

    if not full:
        for first in range(0, extents.rest, 2 * tile.block_pairs):
            column, passes = 2 * pairs + first + two, there & (first + two < extents.rest)
            tl.store(y_at + column, tl.load(x_at + column.to(tl.int64) * x_d, mask=passes, other=0.0), mask=passes)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype}


def block_pairs(call: Call) -> int:
    return pow2_at_least(call.dims["pairs"], LEAST_PAIRS)


def fit(call: Call, config: RopeConfig) -> RopeConfig:
    """As many numbers in more tokens, where heads are fewer or shorter than a tile's; fewer, where they are longer, and
    more warps, where they are longer still."""
    least_heads, least_seq = (call.spec.tiling[name].lo for name in ("block_heads", "block_seq"))
    volume = config.block_seq * config.block_heads * USUAL_PAIRS // block_pairs(call)
    block_heads = pow2_at_least(call.dims["heads"], least_heads, max(least_heads, config.block_heads))
    block_seq = pow2_at_least(volume // block_heads, least_seq, 256)
    num_warps = max(config.num_warps, min(32, block_seq * block_heads * block_pairs(call) // USUAL_TILE))
    return config.replace(block_heads=block_heads, block_seq=block_seq, num_warps=num_warps)


def tiles(call: Call, config: RopeConfig) -> tuple[int, int]:
    """The tiles of a sample's tokens, and of its heads."""
    return cdiv(call.dims["seq"], config.block_seq), cdiv(call.dims["heads"], config.block_heads)


def supports(call: Call, config: RopeConfig) -> str | None:
    seq, heads = tiles(call, config)
    tile = config.block_seq * config.block_heads * block_pairs(call)
    name = f"a tile of block_seq * block_heads = {config.block_seq} * {config.block_heads} heads"
    if tile > 1 << 19:
        return f"{name} of {call.dims['pairs']} pairs is over Triton's limit of 2^20 elements; use a smaller tile"
    if not call.interpret and tile > config.num_warps * 32 * 32:
        return (
            f"{name} of {call.dims['pairs']} pairs is over 128 registers a thread at num_warps = "
            f"{config.num_warps}; use a smaller tile or more warps"
        )
    programs = call.dims["batch"] * seq * heads
    return refuse_over(call, config.num_warps, tile) or refuse_common(call, config.num_warps, programs)


def turned(call: Call, config: RopeConfig, x: Any, transposed: bool) -> Any:
    """x, each pair of its numbers turned by the call's tables."""
    dims, y = call.dims, result_like(x, call, call.spec.outputs[0].name)
    cos, sin = (call.arrays[name].expand(dims["batch"], dims["seq"], dims["pairs"]) for name in ("cos", "sin"))
    tiles_seq, tiles_heads = tiles(call, config)
    extents = RotaryExtents(
        dims["seq"], dims["heads"], dims["pairs"], dims["d"] - 2 * dims["pairs"], tiles_seq, tiles_heads
    )
    strides = RotaryStrides(x.stride(), contiguous_strides(x.shape), cos.stride(), sin.stride())
    elements = 16 // numpy_dtype(call.dtype).itemsize
    step = gcd(extents.pairs, *(n for of in strides for n in of[:-1]))
    tile = HeadsTile(config.block_seq, config.block_heads, block_pairs(call), accumulator(call.dtype),
                     1 if step % elements else elements)  # fmt: skip
    launch(rope_kernel, dims["batch"] * tiles_seq * tiles_heads, call, x, cos, sin, y, extents, strides,
           interleaved=call.options["interleaved"], transposed=transposed, full=not extents.rest, tile=tile,
           num_warps=config.num_warps)  # fmt: skip
    return y


@BACKEND.implements("rope", key=key, fit=fit, supports=supports, config=RopeConfig, overwrites=True)
def rope(call: Call, config: RopeConfig) -> tuple[Any, ...]:
    return (turned(call, config, call.arrays["x"], transposed=False),)


@BACKEND.implements("rope_vjp", key=key, fit=fit, supports=supports, config=RopeConfig, overwrites=True)
def rope_vjp(call: Call, config: RopeConfig) -> tuple[Any, ...]:
    return (turned(call, config, call.arrays["d_y"], transposed=True),)
