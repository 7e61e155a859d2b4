"""Codes of 8 bits on TPUs, and the scales of their blocks, in two sweeps over a block.

    scale = max |x| / L        q = x / scale, no further from 0 than L, rounded to nearest, ties to even

x: (m, n) of blocks of (height, width), which are the rows of a walk (`BlockWalk`): (blocks, height * width). XLA lays
them out so where a block is not all of a row. Sweep 0 keeps max |x|, and whether a NaN was there, and sweep 1 writes.
Given scales need no sweep 0.

Codes are made of the bits of x / scale in 32-bit integers, which every TPU has, and stored as int8, of which XLA sees
the bits as a float of 8 bits: no conversion is asked of the chip, of which only the latest have one. A normal code has
half a spacing added; a subnormal one a number beside which the spacing of float32 is its own; an integer too.

block_rows: blocks of x that a step holds, a multiple of 32 as 8-bit results lie; block_n: numbers of each.

Source: Micikevicius et al., "FP8 formats for deep learning" (2022).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import RowsConfig
from portakern.backends.pallas.lib.blocks import Refs
from portakern.backends.pallas.lib.mosaic_tpu.chip import off_grid, vmem_granted
from portakern.backends.pallas.lib.mosaic_tpu.rows import BlockWalk, VmemUse, launched
from portakern.core.call import Call
from portakern.specs.quantize import ScaleLimits, largest, scale_limits

HELD = VmemUse(streamed=2, computed=6)
PACKED = 32  # rows of one native tile of 8-bit values


def bits(x: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.int32)


def number(x: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.float32)


def scale_of(top: Any, largest: float, limits: ScaleLimits, power_of_two: bool) -> Any:
    """The scale of blocks of which the greatest magnitude is known."""
    if power_of_two:
        most = int(np.float32(largest).view(np.int32))
        exponent = (bits(top) - most + (2**23 - 1)) >> 23
        scale = jnp.where(top < jnp.inf, number(jnp.maximum(exponent + 127, 1) << 23), top)
    else:
        scale = top / largest
    scale = jnp.where(scale > limits.most, limits.most, scale)
    scale = jnp.where(scale < limits.least, limits.least, scale)
    return jnp.where(top == 0, limits.zeros, scale)


def inverse(scale: Any) -> Any:
    """1 / scale, exact of powers of two, of which a chip's own division need not be."""
    exact = ((bits(scale) & 0x7FFFFF) == 0) & (scale < jnp.inf)
    return jnp.where(exact, number((254 << 23) - bits(scale)), 1.0 / scale)


def code_of(v: Any, to: str, most: float) -> Any:
    """The codes of numbers, as int8."""
    v = jnp.where(v > most, most, v)
    v = jnp.where(v < -most, -most, v)
    if to == "int8":
        near = 1.5 * 2.0**23  # beside it the spacing is 1
        whole = bits(jnp.where(v == v, v, 0.0) + near) - int(np.float32(near).view(np.int32))
        return whole.astype(jnp.int8)
    kept, bias = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15)}[to]
    dropped, size = 23 - kept, bits(jnp.abs(v))
    normal = (size + (2 ** (dropped - 1) - 1) + ((size >> dropped) & 1)) >> dropped
    normal = normal - ((127 - bias) << kept)
    subnormal = bits(jnp.abs(v) + 2.0 ** (24 - bias - kept)) & 0x7F
    code = jnp.where(size < ((128 - bias) << 23), subnormal, normal)
    code = jnp.where(v == v, code, 0x7F)
    return jnp.where(bits(v) < 0, code - 128, code).astype(jnp.int8)


def kernel(ref: Refs, *, walk: BlockWalk, call: Call) -> None:
    most, two = largest(call), call.options["scales"] == "power_of_two"
    sweep, step = walk.sweep_and_step()
    given = "static_scale" in ref

    if not given:

        @pl.when((sweep == 0) & (step == 0))
        def start() -> None:
            ref.top[...] = jnp.zeros_like(ref.top)
            ref.lost[...] = jnp.zeros_like(ref.lost)

        @pl.when(sweep == 0)
        def gather() -> None:
            x = walk.within_rows(ref.x[...].astype(jnp.float32), step)
            nan = jnp.where(x == x, 0.0, 1.0)
            size = jnp.where(x == x, jnp.abs(x), 0.0)
            ref.top[...] = jnp.maximum(ref.top[...], jnp.max(size, axis=walk.along, keepdims=True))
            ref.lost[...] = jnp.maximum(ref.lost[...], jnp.max(nan, axis=walk.along, keepdims=True))

    @pl.when(sweep == walk.sweeps - 1)
    def write() -> None:
        if given:
            scale = walk.turned(ref.static_scale[...])
        else:
            scale = jnp.where(ref.lost[...] > 0, jnp.nan, scale_of(ref.top[...], most, scale_limits(call), two))
        ref.scale[...] = walk.turned(scale)
        ref.q[...] = code_of(ref.x[...].astype(jnp.float32) * inverse(scale), call.options["to"], most)


def shape_of(call: Call) -> tuple[int, int]:
    """The array as rows, each a block."""
    dims = call.dims
    return dims["row_blocks"] * dims["column_blocks"], dims["height"] * dims["width"]


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "height": call.dims["height"], "width": call.dims["width"]}


def default_tiling(call: Call) -> RowsConfig:
    """As much of 32 blocks as a kernel gets VMEM for unasked, and as many more blocks as fit then."""
    rows, parts = call.spec.tiling["block_rows"].values, call.spec.tiling["block_n"].values

    def fits(block_rows: int, block_n: int) -> bool:
        return HELD.bytes(call, block_rows * block_n) <= vmem_granted(call)

    n = shape_of(call)[1]
    block_n = max((v for v in parts if fits(PACKED, v) and v < 2 * n), default=parts[0])
    return RowsConfig(block_rows=max(v for v in rows if v == PACKED or fits(v, block_n)), block_n=block_n)


def walk_of(call: Call, config: RowsConfig) -> BlockWalk:
    walk = BlockWalk.over(call, config, shape_of(call), 1)
    return walk if call.arrays["static_scale"] is None else walk._replace(sweeps=1)


def supports(call: Call, config: RowsConfig) -> str | None:
    walk = walk_of(call, config)
    return walk.refused(call, config, HELD) or off_grid("block_rows", config.block_rows, walk.height, PACKED)


def rows_of(call: Call, x: jax.Array) -> jax.Array:
    """x by blocks: (blocks, height * width)."""
    dims = call.dims
    x = x.reshape([dims[n] for n in ("row_blocks", "height", "column_blocks", "width")])
    return jnp.swapaxes(x, 1, 2).reshape(shape_of(call))


def restored(call: Call, q: jax.Array) -> jax.Array:
    dims = call.dims
    q = q.reshape([dims[n] for n in ("row_blocks", "column_blocks", "height", "width")])
    return jnp.swapaxes(q, 1, 2).reshape(call.arrays["x"].shape)


@BACKEND.implements("quantize", key=key, config=RowsConfig, tiling=default_tiling, supports=supports)
def quantize(call: Call, config: RowsConfig) -> tuple[jax.Array, ...]:
    given, to = call.arrays["static_scale"], call.options["to"]
    scale_shape = call.dims["row_blocks"], call.dims["column_blocks"]
    walk = walk_of(call, config)
    numbers, blocks = walk.numbers()
    inputs = {}
    if given is not None:
        inputs["static_scale"] = walk.to_numbers(jnp.broadcast_to(given, scale_shape)), blocks
    found = launched(
        call,
        partial(kernel, call=call),
        walk,
        HELD,
        rows={"x": rows_of(call, call.arrays["x"])},
        written={"q": jnp.int8},
        inputs=inputs,
        outputs={"scale": (jax.ShapeDtypeStruct(numbers, jnp.float32), blocks)},
        statistics=() if given is not None else ("top", "lost"),
        flops=12,
        transcendentals=0,
    )
    q = restored(call, found["q"])
    q = q if to == "int8" else lax.bitcast_convert_type(q, jnp.dtype(to))
    return q, walk.from_numbers(found["scale"], scale_shape)
