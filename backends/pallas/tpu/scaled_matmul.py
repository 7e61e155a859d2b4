"""Matrix product of 8-bit numbers with scales, on TPUs.

    c[i, j] = sum_p scale_a[i, p] scale_b[p, j] (sum_{k in block p} a[i, k] b[k, j]) + bias[j]

a: (m, k), b: (k, n), scales by blocks -> c: (m, n). The grid is (m blocks, n blocks, k steps), k innermost. Where
blocks of k have scales of their own, a step holds as many of them as block_k has room for, or a part of one: each
block's sum meets its scales and is added to a float32 accumulator in VMEM. Otherwise the accumulator meets the two
scales at the last step. A block that does not fill whole lanes is filled up with zeros by XLA, in a copy.

XLA repeats the scales for each row of a and each column of b, which is little beside the operands. A block of rows has
its scales of all blocks of k resident, and selects a column of them by its index; of b's a row is read.

The matrix unit takes int8 on v5e, v5p and v6e, and 8-bit floats on v7x. Elsewhere, and under "ieee", operands are
widened to bfloat16, which holds float8_e4m3fn, float8_e5m2 and int8 exactly. Sums of at most 1024 widened products of
int8 are exact in float32; the sums of these are int32's.

Source: the blocked product of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008), as
matmul's.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import ProductConfig
from portakern.backends.pallas.lib.blocks import Refs, even_block, padded, positions, row_block, step_along
from portakern.backends.pallas.lib.mosaic_tpu.chip import (
    LANES,
    dtype_refused,
    launch,
    off_grid,
    over_vmem,
    sublanes,
)
from portakern.core import targets
from portakern.core.call import Call
from portakern.specs.scaled_matmul import of_integers, scale_blocks

EXACT = 1024
"""Widened products of int8 whose sum float32 holds: 2^14 each."""


class BlockSteps(NamedTuple):
    """How k is walked: in ``blocks`` with scales of their own, each of ``parts`` steps of ``depth`` elements, or
    ``blocks_per_step`` of them in a step; ``alone``: one scale of a row and of a column for all k."""

    blocks: int
    parts: int
    blocks_per_step: int
    depth: int
    alone: bool

    @classmethod
    def of(cls, call: Call, config: ProductConfig) -> BlockSteps:
        blocks, width = scale_blocks(call)
        parts = pl.cdiv(width, config.block_k)
        depth = padded(pl.cdiv(width, parts), LANES)
        blocks_per_step = 1 if blocks == 1 or parts > 1 else max(min(config.block_k // depth, blocks), 1)
        return cls(blocks, parts, blocks_per_step, depth, blocks == 1)

    @property
    def number(self) -> int:
        return pl.cdiv(self.blocks, self.blocks_per_step) * self.parts

    @property
    def resident(self) -> int:
        """Elements along k of a step."""
        return self.depth * self.blocks_per_step


def multiplies(call: Call) -> bool:
    """Whether the chip's matrix unit takes both operands as they are."""
    hardware = targets.HARDWARE.get(call.target.arch)
    if call.interpret or hardware is None:
        return False
    if of_integers(call):
        return bool("int8" in hardware.matrix_dtypes)
    native = {call.dtype, call.dtype_of("b")} <= {*hardware.matrix_dtypes}
    return native and "float8_e4m3fn" in hardware.matrix_dtypes and call.options["precision"] != "ieee"


def wide_dtype(call: Call) -> Any:
    """What operands are multiplied as; None for their own dtype. A host's interpreter multiplies float32."""
    return None if multiplies(call) else jnp.float32 if call.interpret else jnp.bfloat16


def product(x: Any, y: Any, wide: Any, integers: bool) -> Any:
    """x y, of integers in int32, else in float32."""
    if integers and wide is None:
        return lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    if wide is not None:
        x, y = (widened(of, wide, integers) for of in (x, y))
    precision = lax.Precision.HIGHEST if wide == jnp.float32 else lax.Precision.DEFAULT

    def of_floats(x: Any, y: Any) -> Any:
        dims = (((1,), (0,)), ((), ()))
        return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)

    if not integers:
        return of_floats(x, y)
    parts = [slice(at, at + EXACT) for at in range(0, x.shape[1], EXACT)]
    sums = [of_floats(x[:, part], y[part]).astype(jnp.int32) for part in parts]
    return sum(sums[1:], sums[0])


def widened(x: Any, wide: Any, integers: bool) -> Any:
    """An operand in another dtype, which holds its numbers; int8 by way of int32 and float32, as Mosaic converts it."""
    return x.astype(jnp.int32).astype(jnp.float32).astype(wide) if integers else x.astype(wide)


def scales(ref: Refs, p: Any) -> Any:
    """scale_a scale_b of one block of k: a column of a's, which is chosen, and a row of b's."""
    of_a = ref.scale_a[...]
    column = jnp.where(positions(of_a.shape, 1, 0) == p, of_a, 0.0).sum(1, keepdims=True)
    return column * ref.scale_b[pl.ds(p, 1), :]


def add_step(ref: Refs, step: Any, steps: BlockSteps, wide: Any, integers: bool) -> None:
    """Add to the sum in ``ref.acc`` what a step of the grid has along k."""
    sums = ref.part if "part" in ref else ref.acc

    @pl.when(step == 0)
    def start() -> None:
        ref.acc[...] = jnp.zeros_like(ref.acc)

    def part_of(q: int) -> Any:
        own = slice(q * steps.depth, (q + 1) * steps.depth)
        return product(ref.a[:, own], ref.b[own, :], wide, integers)

    if steps.alone:
        ref.acc[...] += part_of(0)
    elif steps.parts > 1:
        place = lax.rem(step, jnp.int32(steps.parts))

        @pl.when(place == 0)
        def begin() -> None:
            sums[...] = jnp.zeros_like(sums)

        sums[...] += part_of(0)

        @pl.when(place == steps.parts - 1)
        def leave() -> None:
            ref.acc[...] += sums[...].astype(jnp.float32) * scales(ref, lax.div(step, jnp.int32(steps.parts)))
    else:
        found = ref.acc[...]
        for q in range(steps.blocks_per_step):
            found += part_of(q).astype(jnp.float32) * scales(ref, step * steps.blocks_per_step + q)
        ref.acc[...] = found


def finished(ref: Refs, steps: BlockSteps) -> Any:
    """The sum after the last step, with the scales that meet it whole, and the bias."""
    c = ref.acc[...].astype(jnp.float32)
    if steps.alone:
        c = c * scales(ref, 0)
    if "bias" in ref:
        c = c + ref.bias[...]
    return c


def kernel(ref: Refs, *, steps: BlockSteps, wide: Any, integers: bool) -> None:
    step, last = step_along(2), pl.num_programs(2) - 1
    add_step(ref, step, steps, wide, integers)

    @pl.when(step == last)
    def finish() -> None:
        ref.c[...] = finished(ref, steps).astype(ref.c.dtype)


def blocks(call: Call, config: ProductConfig, rows: int) -> tuple[int, int]:
    """(block_m, block_n) of a call on so many rows."""
    block_m = row_block(call, rows, config.block_m, sublanes(jnp.int8), even=True)
    return block_m, even_block(call.dims["n"], config.block_n, LANES)


def resident(call: Call, config: ProductConfig, rows: int) -> int:
    """The VMEM, in bytes, of one step: two blocks of each operand, what they are widened to, two of c, the sums and
    what is added to them, and the scales of a's rows and b's columns."""
    steps, (bm, bn) = BlockSteps.of(call, config), blocks(call, config, rows)
    operands = (bm + bn) * steps.resident
    wide = wide_dtype(call)
    widths = 2 + (0 if wide is None else (8 if of_integers(call) else jnp.dtype(wide).itemsize))
    out = jnp.dtype(call.outputs["c"][1]).itemsize
    count = padded(steps.blocks, steps.blocks_per_step)
    of_scales = 2 * 4 * (bm * padded(count, LANES) + padded(count, 8) * bn)
    return widths * operands + (2 * out + 4 * 4) * bm * bn + of_scales + 2 * 4 * 8 * bn


LEAST = 32
"""The least width of a block of k: each fills whole lanes, 128, and a narrow one little of them."""


def supports(call: Call, config: ProductConfig) -> str | None:
    return refused(call, config, call.dims["m"])


def refused(call: Call, config: ProductConfig, rows: int) -> str | None:
    """Why a product of so many rows is refused, or None."""
    n, (count, width) = call.dims["n"], scale_blocks(call)
    if count > 1 and width < LEAST:
        return (
            f"blocks of {width} elements along k are too narrow for a TPU's {LANES} lanes: of {LEAST} on they are "
            "written; convert and scale the operands, and multiply them in 16 bits"
        )
    return (
        dtype_refused(call, call.outputs["c"][1])
        or off_grid("block_m", config.block_m, rows, sublanes(jnp.int8))
        or off_grid("block_n", config.block_n, n, LANES)
        or off_grid("block_k", config.block_k, width, LANES)
        or over_vmem(call, resident(call, config, rows), "block_m, block_n or block_k")
    )


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"], "k": call.dims["k"]}


def laid_out(x: jax.Array, axis: int, steps: BlockSteps, width: int) -> jax.Array:
    """An operand whose blocks along ``axis`` are each as long as their steps, the last too, and filled up with
    zeros."""
    k, each = x.shape[axis], steps.parts * steps.depth
    count = padded(steps.blocks, steps.blocks_per_step)
    if each == width and k == count * width:
        return x
    rest = (0, 0)
    x = jnp.pad(x, [(0, steps.blocks * width - k) if i == axis else rest for i in range(x.ndim)])
    x = x.reshape(*x.shape[:axis], steps.blocks, width, *x.shape[axis + 1 :])
    more = {axis: (0, count - steps.blocks), axis + 1: (0, each - width)}
    x = jnp.pad(x, [more.get(i, rest) for i in range(x.ndim)])
    return x.reshape(*x.shape[:axis], count * each, *x.shape[axis + 2 :])


def repeated(scale: jax.Array, lines: tuple[int, int], steps: BlockSteps, axis: int) -> jax.Array:
    """A scale for each row of a, or, with ``axis`` 0 that of k, for each column of b, and for each block of k.
    ``lines``: how many share one, and how many there are."""
    width, extent = lines
    if scale.shape[1 - axis] > 1:
        scale = jnp.repeat(scale, width, 1 - axis)
        scale = lax.slice_in_dim(scale, 0, extent, axis=1 - axis)
    shape = (extent, steps.blocks) if axis else (steps.blocks, extent)
    count = padded(steps.blocks, steps.blocks_per_step)
    more = [(0, count - steps.blocks) if i == axis else (0, 0) for i in range(2)]
    return jnp.pad(jnp.broadcast_to(scale, shape), more)


def sums_of(steps: BlockSteps, tile: tuple[int, int], integers: bool) -> dict[str, Any]:
    """What is kept from step to step: the sum of all blocks, and, where one takes several steps, its own."""
    sums = jax.ShapeDtypeStruct(tile, jnp.int32 if integers else jnp.float32)
    scratch: dict[str, Any] = {"acc": sums if steps.alone else tile}
    return scratch if steps.alone or steps.parts == 1 else {**scratch, "part": sums}


@BACKEND.implements("scaled_matmul", key=key, supports=supports, config=ProductConfig)
def scaled_matmul(call: Call, config: ProductConfig) -> tuple[jax.Array]:
    dims, bias = call.dims, call.arrays["bias"]
    (m, n), dtype = call.outputs["c"]
    steps, (bm, bn), (_, width) = BlockSteps.of(call, config), blocks(call, config, m), scale_blocks(call)
    a, b = (laid_out(call.arrays[name], axis, steps, width) for axis, name in ((1, "a"), (0, "b")))
    if call.interpret:  # a host converts all of an 8-bit array at each step, since it computes with none
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    scale_a = repeated(call.arrays["scale_a"], (dims["m_width"], m), steps, 1)
    scale_b = repeated(call.arrays["scale_b"], (dims["n_width"], n), steps, 0)
    grid, integers = (pl.cdiv(m, bm), pl.cdiv(n, bn), steps.number), of_integers(call)
    inputs = {
        "a": (a, pl.BlockSpec((bm, steps.resident), lambda i, j, s: (i, s))),
        "b": (b, pl.BlockSpec((steps.resident, bn), lambda i, j, s: (s, j))),
        "scale_a": (scale_a, pl.BlockSpec((bm, scale_a.shape[1]), lambda i, j, s: (i, 0))),
        "scale_b": (scale_b, pl.BlockSpec((scale_b.shape[0], bn), lambda i, j, s: (0, j))),
    }
    if bias is not None:
        inputs["bias"] = (bias.reshape(1, n), pl.BlockSpec((1, bn), lambda i, j, s: (0, j)))
    found = launch(
        call,
        partial(kernel, steps=steps, wide=wide_dtype(call), integers=integers),
        "portakern_scaled_matmul",
        grid,
        in_order=1,
        inputs=inputs,
        outputs={"c": (jax.ShapeDtypeStruct((m, n), dtype), pl.BlockSpec((bm, bn), lambda i, j, s: (i, j)))},
        scratch=sums_of(steps, (bm, bn), integers),
        vmem=resident(call, config, m),
        cost=pl.CostEstimate(
            flops=2 * m * n * dims["k"], transcendentals=0, bytes_accessed=a.size * grid[1] + b.size * grid[0]
        ),
    )
    return (found["c"],)
