"""Codes of 8 bits, and the scales of their blocks.

    scale = max |x| / L        q = x / scale, no further from 0 than L, rounded to nearest, ties to even

x: (m, n) of blocks of (height, width), any strides. Two ways:

* Blocks of ``block_n`` numbers or less: a program owns ``block_rows`` of them, each a row of its tile, and reads x
  once. So for groups, for tokens whose row fits, and for blocks of 128 by 128.
* Other blocks: the first kernel finds the greatest number of each tile of ``block_rows`` by ``block_n``, of which a
  block has ``parts``, and the second takes the greatest of those and writes codes. Given scales need no first kernel.

The greatest magnitude is that of the bits of floats taken for integers, which order numbers alike and put NaN last: no
NaN is lost, in any order. By the same integers the least power of two above max |x| / L needs no logarithm:
(bits(max) - bits(L)) / 2^23, rounded up, is its exponent.

Codes are made by the hardware's conversion where it has one (``native``), and else from the bits of v: those of a
normal code by adding half a spacing to them, those of a subnormal one by adding a number beside which the spacing of
float32 is theirs. Both round to nearest, ties to even. NVIDIA's conversion saturates and others do not: v is clipped
before.

Sources: Micikevicius et al., "FP8 formats for deep learning" (2022); vLLM's ``scaled_fp8_quant`` and
``per_token_group_quant_fp8`` for the recipes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import RowsConfig
from portakern.backends.triton.launch import accumulator, cdiv, lanes, launch, refuse_tile, torch_dtype
from portakern.backends.triton.layout import fresh, pow2_at_least
from portakern.spec.dtypes import DTYPES
from portakern.specs.quantize import largest, scale_limits

if TYPE_CHECKING:
    from portakern.core.call import Call


class QuantizeExtents(NamedTuple):
    """``columns``: blocks beside each other; ``blocks``: all of them; ``parts``: tiles of a block, ``across`` of them
    side by side."""

    columns: int
    blocks: int
    height: int
    width: int
    parts: int
    across: int


class QuantizeStrides(NamedTuple):
    """Of x, between rows and along one; of given scales, between those of blocks (0: one for all)."""

    row: int
    n: int
    scale_row: int
    scale_column: int


class CodeFormat(NamedTuple):
    """A dtype of 8 bits.

    Attributes:
      code: 0 of int8; else the significand bits of the float. code_bias: of its exponent.
      largest: its largest number.
    """

    code: int
    code_bias: int
    largest: float

    @classmethod
    def of(cls, dtype: str) -> CodeFormat:
        code, code_bias = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15), "int8": (0, 0)}[dtype]
        return cls(code, code_bias, DTYPES[dtype].largest)


class CodePlan(NamedTuple):
    """How codes and scales are made of numbers.

    Attributes:
      acc_dtype: what is computed in; word: the integer as wide; mantissa: bits of its significand; bias: of its
        exponent.
      largest: L; largest_bits: its bits; power_of_two: scales are.
      code, code_bias: as in :class:`CodeFormat`; native: floats are converted by the hardware.
      lanes: of a tile of rows, those that hold a group of numbers with one scale; 0: the whole row is one.
    """

    acc_dtype: tl.dtype
    word: tl.dtype
    mantissa: int
    bias: int
    largest: float
    largest_bits: int
    power_of_two: bool
    code: int
    code_bias: int
    native: bool
    lanes: int = 0


class QuantizePlan(NamedTuple):
    """What the kernels are compiled for.

    Attributes:
      block_rows, block_n: the extents of a tile.
      parts: the power of two that covers the tiles of a block, at most 1024; flat: a block is a part of one row.
    """

    block_rows: int
    block_n: int
    parts: int
    flat: bool


@triton.jit
def magnitude_bits(x, plan: tl.constexpr):
    """|x| as an integer of its bits."""
    every: tl.constexpr = (1 << (plan.mantissa + 8 if plan.mantissa == 23 else plan.mantissa + 11)) - 1
    return x.to(plan.word, bitcast=True) & every


@triton.jit
def scale_of(top_bits, limits, plan: tl.constexpr):
    """The scale of blocks of which the greatest magnitude is known, by its bits."""
    top = top_bits.to(plan.acc_dtype, bitcast=True)
    if plan.power_of_two:
        exponent = (top_bits - plan.largest_bits + ((1 << plan.mantissa) - 1)) >> plan.mantissa
        field = tl.maximum(exponent + plan.bias, 1)
        scale = (field << plan.mantissa).to(plan.acc_dtype, bitcast=True)
        scale = tl.where(top < float("inf"), scale, top)
    else:
        scale = tl.div_rn(top, plan.largest)
    scale = tl.where(scale > limits.most, limits.most, scale)
    scale = tl.where(scale < limits.least, limits.least, scale)
    return tl.where(top_bits == 0, limits.zeros, scale)


@triton.jit
def code_of(v, code: tl.constexpr, code_bias: tl.constexpr, largest: tl.constexpr, plan: tl.constexpr):
    """Codes of numbers, as their dtype where hardware converts, else as int8 or as the bits of a float in uint8.

    ``code``, ``code_bias``, ``largest``: as in :class:`CodeFormat`; ``plan``: its ``word``, ``mantissa`` and
    ``native``."""
    v = tl.where(v > largest, largest, v)
    v = tl.where(v < -largest, -largest, v)
    if code == 0:
        # beside this number the spacing is 1, and the last bits are the integer
        near = v + 1.5 * (1 << plan.mantissa)
        return near.to(plan.word, bitcast=True).to(tl.int8)
    elif plan.native:
        return v
    else:
        dropped: tl.constexpr = 23 - code
        bits = magnitude_bits(v, plan)
        normal = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped
        normal -= (127 - code_bias) << code
        beside: tl.constexpr = 1 << (24 - code_bias - code)
        subnormal = magnitude_bits(tl.abs(v) + beside, plan) & 0x7F
        found = tl.where(bits < ((128 - code_bias) << 23), subnormal, normal)
        found = tl.where(v != v, 0x7F, found)
        return (found | ((v.to(plan.word, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def inverse_of(scale):
    """What numbers are multiplied with, of blocks of these scales."""
    return tl.div_rn(tl.full(scale.shape, 1.0, scale.dtype), scale)


@triton.jit
def coded(x, inverse, plan: tl.constexpr):
    """Codes of numbers by the inverses of their scales (:func:`code_of`)."""
    return code_of(x * inverse, plan.code, plan.code_bias, plan.largest, plan)


@triton.jit
def own_tile(extents, plan: tl.constexpr):
    """Of the block of which this program owns a tile its number, row and column, which tile it is, and of the tile
    which of the block's rows and columns it has and whether they are there."""
    pid = tl.program_id(0).to(tl.int64)
    block, part = pid // extents.parts, pid % extents.parts
    row = part // extents.across * plan.block_rows + tl.arange(0, plan.block_rows)[:, None]
    n = part % extents.across * plan.block_n + tl.arange(0, plan.block_n)[None, :]
    ok = (row < extents.height) & (n < extents.width)
    return block, block // extents.columns, block % extents.columns, part, row, n, ok


@triton.jit
def quantize_groups_kernel(
    x, static_scale, q, scale, extents, limits, strides, plan: tl.constexpr, codes: tl.constexpr
):
    """Whole blocks."""
    block = tl.program_id(0).to(tl.int64) * plan.block_rows + tl.arange(0, plan.block_rows)
    n = tl.arange(0, plan.block_n)[None, :]
    there = block < extents.blocks
    ok = there[:, None] & (n < extents.height * extents.width)
    row, column = block // extents.columns, block % extents.columns
    if plan.flat:
        down, along = row[:, None], (column * extents.width)[:, None] + n
    else:
        down = (row * extents.height)[:, None] + n // extents.width
        along = (column * extents.width)[:, None] + n % extents.width
    t = tl.load(x + down * strides.row + along * strides.n, mask=ok, other=0.0).to(codes.acc_dtype)
    if static_scale is None:
        s = scale_of(tl.max(magnitude_bits(t, codes), 1), limits, codes)
    else:
        given = row * strides.scale_row + column * strides.scale_column
        s = tl.load(static_scale + given, mask=there, other=1.0).to(codes.acc_dtype)
    tl.store(scale + block, s, mask=there)
    code = coded(t, inverse_of(s)[:, None], codes)
    tl.store(q + down * (extents.columns * extents.width) + along, code.to(q.dtype.element_ty), mask=ok)


@triton.jit
def quantize_maxima_kernel(x, top, extents, strides, plan: tl.constexpr, codes: tl.constexpr):
    """top: (blocks, parts), the bits of the greatest magnitude of each tile."""
    block, of_row, of_column, part, row, n, ok = own_tile(extents, plan)
    at = (of_row * extents.height + row) * strides.row + (of_column * extents.width + n) * strides.n
    t = tl.load(x + at, mask=ok, other=0.0).to(codes.acc_dtype)
    tl.store(top + block * extents.parts + part, tl.max(tl.max(magnitude_bits(t, codes), 1), 0))


@triton.jit
def quantize_blocks_kernel(
    x, static_scale, top, q, scale, extents, limits, strides, plan: tl.constexpr, codes: tl.constexpr
):  # fmt: skip
    """Codes of a tile, by the scale of its block."""
    block, of_row, of_column, part, row, n, ok = own_tile(extents, plan)
    if static_scale is None:
        found = tl.full([plan.parts], 0, codes.word)
        for first in range(0, extents.parts, plan.parts):
            each = first + tl.arange(0, plan.parts)
            found = tl.maximum(found, tl.load(top + block * extents.parts + each, mask=each < extents.parts, other=0))
        s = scale_of(tl.max(found, 0) + tl.zeros([1], codes.word), limits, codes)
    else:
        given = static_scale + of_row * strides.scale_row + of_column * strides.scale_column
        s = tl.load(given + tl.zeros([1], tl.int32)).to(codes.acc_dtype)
    tl.store(scale + block + tl.zeros([1], tl.int32), s, mask=part == 0)
    row, n = of_row * extents.height + row, of_column * extents.width + n
    t = tl.load(x + row * strides.row + n * strides.n, mask=ok, other=0.0).to(codes.acc_dtype)
    code = coded(t, inverse_of(s)[:, None], codes)
    tl.store(q + row * (extents.columns * extents.width) + n, code.to(q.dtype.element_ty), mask=ok)


NATIVE = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
"""Where Triton converts float32 to both floats of 8 bits in hardware."""


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "height": call.dims["height"], "width": call.dims["width"]}


def in_one_pass(call: Call, config: RowsConfig) -> bool:
    return bool(call.dims["height"] * call.dims["width"] <= config.block_n)


def default_tiling(call: Call) -> dict[str, int]:
    """Not measured: a thread has 32 numbers; a block that 1024 threads can hold is read once."""
    height, width, threads = call.dims["height"], call.dims["width"], lanes(call.target.arch)
    if height * width <= 16384:
        block_n = pow2_at_least(height * width, 128)
        block_rows = max(4096 // block_n, 1)
    else:
        block_n = pow2_at_least(width, 128, 1024)
        block_rows = pow2_at_least(height, 1, max(4096 // block_n, 1))
    num_warps = pow2_at_least(block_rows * block_n // (32 * threads), 1, 1024 // threads)
    return {"block_rows": block_rows, "block_n": block_n, "num_warps": num_warps}


def supports(call: Call, config: RowsConfig) -> str | None:
    return refuse_tile(call, config, extents_of(call, config).parts * blocks(call) * config.block_rows)


def blocks(call: Call) -> int:
    found: int = call.dims["row_blocks"] * call.dims["column_blocks"]
    return found


def extents_of(call: Call, config: RowsConfig) -> QuantizeExtents:
    dims = call.dims
    across = cdiv(dims["width"], config.block_n)
    parts = across * cdiv(dims["height"], config.block_rows)
    return QuantizeExtents(dims["column_blocks"], blocks(call), dims["height"], dims["width"], parts, across)


def word_of(call: Call) -> tuple[tl.dtype, int]:
    """The integer that is as wide as what a call computes in, and the bits of that one's significand."""
    return (tl.int64, 52) if call.dtype == "float64" else (tl.int32, 23)


def converts(call: Call) -> bool:
    """Whether Triton converts what a call computes in to floats of 8 bits by itself."""
    return bool(call.dtype == "float64" or (not call.interpret and call.target.arch in NATIVE))


def codes_of(call: Call) -> CodePlan:
    """How the codes and the scales of a call are made."""
    double, to = call.dtype == "float64", CodeFormat.of(call.options["to"])
    most = np.array(largest(call), "float64" if double else "float32")
    return CodePlan(
        accumulator(call.dtype), *word_of(call), 1023 if double else 127, float(most),
        int(most.view(f"i{most.itemsize}")), call.options["scales"] == "power_of_two", to.code, to.code_bias,
        to.code > 0 and converts(call),
    )  # fmt: skip


def plan_of(call: Call, config: RowsConfig, parts: int) -> QuantizePlan:
    return QuantizePlan(config.block_rows, config.block_n, pow2_at_least(parts, 1, 1024), call.dims["height"] == 1)


def as_stored(q: Any, plan: CodePlan) -> Any:
    """The codes as kernels write them: the bits of floats that no hardware converts to are bytes."""
    return q.view(torch_dtype("uint8")) if plan.code and not plan.native else q


def strides_of(call: Call) -> QuantizeStrides:
    x, given = call.arrays["x"], call.arrays["static_scale"]
    of_scale = (0, 0) if given is None else tuple(
        0 if extent == 1 else step for extent, step in zip(given.shape, given.stride(), strict=True)
    )  # fmt: skip
    return QuantizeStrides(*x.stride(), *of_scale)


@BACKEND.implements("quantize", tiling=default_tiling, key=key, supports=supports, config=RowsConfig)
def quantize(call: Call, config: RowsConfig) -> tuple[Any, ...]:
    x, given = call.arrays["x"], call.arrays["static_scale"]
    (q_shape, q_dtype), (scale_shape, scale_dtype) = call.outputs["q"], call.outputs["scale"]
    q, scale = fresh(q_shape, torch_dtype(q_dtype), x.device), fresh(scale_shape, torch_dtype(scale_dtype), x.device)
    extents, limits, strides = extents_of(call, config), scale_limits(call), strides_of(call)
    plan, codes = plan_of(call, config, extents.parts), codes_of(call)
    stored = as_stored(q, codes)
    if in_one_pass(call, config):
        grid = cdiv(extents.blocks, config.block_rows)
        launch(quantize_groups_kernel, grid, call, x, given, stored, scale, extents, limits, strides, plan=plan,
               codes=codes, num_warps=config.num_warps)  # fmt: skip
        return q, scale
    grid, top = extents.blocks * extents.parts, None
    if given is None:
        word = torch_dtype("int64" if call.dtype == "float64" else "int32")
        top = fresh((extents.blocks, extents.parts), word, x.device)
        launch(quantize_maxima_kernel, grid, call, x, top, extents, strides, plan=plan, codes=codes,
               num_warps=config.num_warps)  # fmt: skip
    launch(quantize_blocks_kernel, grid, call, x, given, top, stored, scale, extents, limits, strides, plan=plan,
           codes=codes, num_warps=config.num_warps)  # fmt: skip
    return q, scale
