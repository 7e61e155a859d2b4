"""Matrix product of 8-bit numbers with scales.

    c[i, j] = sum_p scale_a[i, p] scale_b[p, j] (sum_{k in block p} a[i, k] b[k, j]) + bias[j]

a: (m, k), b: (k, n), scales by blocks -> c: (m, n). A program computes one block_m x block_n tile of c, in matmul's
order of tiles. Where blocks of k have scales of their own, the sum of a block is made by itself, block_k at a time, and
added to the others times its scales, in float32: one step and one addition a block where a block is no longer than
block_k. Otherwise the whole sum meets its two scales at the end, as a product of tensors or of rows and columns costs
no more than matmul's.

Hopper's matrix unit, and Ada's, keep sums of 8-bit products to 13 bits behind the point. "promoted" sums leave it after
at most 128 products: by ``max_num_imprecise_acc`` on Hopper, where Triton keeps two accumulators, elsewhere by an
addition behind each step. "ieee" widens operands to float16 (bfloat16 on gfx90a, which flushes subnormals of float16);
both hold both 8-bit floats. So do "promoted" and "fast" where a chip multiplies no such floats. int8 is summed in
int32, exactly.

Source: DeepSeek-AI, "DeepSeek-V3 technical report" (2024), section 3.3.2, for sums that leave the matrix unit; the
order of tiles in "Matrix Multiplication" of the Triton tutorials (Tillet).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import ProductConfig
from portakern.backends.triton.launch import WITHOUT_E4M3, cdiv, launch, refuse_common, shared_limit, torch_dtype
from portakern.backends.triton.layout import fresh, pow2_at_least
from portakern.backends.triton.lib.matmul import tile_index
from portakern.backends.triton.lib.scaled_matmul import shared_strides
from portakern.core import targets
from portakern.specs.scaled_matmul import RUN, of_integers, scale_blocks

if TYPE_CHECKING:
    from portakern.core.call import Call


class ScaledExtents(NamedTuple):
    """Of a product; ``tiles_m``, ``tiles_n``: the tiles of c; ``blocks``: those of k that have scales; ``width``: of
    such a block, ``steps``: of its sum; ``m_width``, ``n_width``: rows and columns that share a scale."""

    m: int
    n: int
    k: int
    tiles_m: int
    tiles_n: int
    blocks: int
    width: int
    steps: int
    m_width: int
    n_width: int


class ScaledStrides(NamedTuple):
    """Of the operands, between rows and between columns, of the scales, 0 along an axis that shares one, and of the
    bias."""

    a_row: int
    a_col: int
    b_row: int
    b_col: int
    scale_a_row: int
    scale_a_col: int
    scale_b_row: int
    scale_b_col: int
    bias: int


class ScaledTile(NamedTuple):
    """What a product is compiled for: the extents of a tile, how many rows of tiles make a group, what is summed in,
    what operands are widened to (their own dtype: not at all), how sums leave the matrix unit, whether the whole
    sum has one scale of a and of b, or each block one step, and whether no step is ragged."""

    block_m: int
    block_n: int
    block_k: int
    group: int
    acc_dtype: tl.dtype
    wide: tl.dtype
    run: int
    leaves: bool
    one_block: bool
    one_step: bool
    whole_k: bool

    @classmethod
    def of(cls, call: Call, config: ProductConfig) -> ScaledTile:
        block_m, block_n, block_k, group = (config[name] for name in ("block_m", "block_n", "block_k", "group"))
        blocks, width = scale_blocks(call)
        one_block, one_step = blocks == 1, width <= block_k
        eight = products(call) == "8-bit" and not call.interpret and call.target.platform == "cuda"
        long = eight and call.options["precision"] == "promoted" and not (one_step and block_k <= RUN)
        hopper = call.target.arch == "sm_90"
        run = min(RUN, block_k) if long else 0
        acc_dtype = tl.int32 if of_integers(call) else tl.float32
        whole_k = call.dims["k"] % width == width % block_k == 0
        return cls(block_m, block_n, block_k, group, acc_dtype, wide_dtype(call), run, long and not hopper, one_block,
                   one_step, whole_k)  # fmt: skip


@triton.jit
def product_of(at, bt, acc, tile: tl.constexpr):
    """acc and the product of two tiles."""
    if tile.wide != tl.int8:
        at, bt = at.to(tile.wide), bt.to(tile.wide)
    if tile.leaves:
        # By a name of its own, and with a limit, lest Triton begins the product at what is added to it.
        part = tl.dot(at, bt, max_num_imprecise_acc=tile.run, out_dtype=tile.acc_dtype)
        acc = acc + part
    elif tile.run > 0:
        acc = tl.dot(at, bt, acc, max_num_imprecise_acc=tile.run, out_dtype=tile.acc_dtype)
    else:
        acc = tl.dot(at, bt, acc, out_dtype=tile.acc_dtype)
    return acc


@triton.jit
def block_sum(a_tile, b_tile, i_ok, j_ok, width, steps, a_k, b_k, tile: tl.constexpr):
    """The product of the rows of a and the columns of b over ``width`` elements, whose first tiles along k are a_tile
    and b_tile."""
    kk = tl.arange(0, tile.block_k)
    acc = tl.full([tile.block_m, tile.block_n], 0, tile.acc_dtype)
    for step in range(steps):
        if tile.whole_k:
            at, bt = tl.load(a_tile, mask=i_ok, other=0.0), tl.load(b_tile, mask=j_ok, other=0.0)
        else:
            left = width - step * tile.block_k
            # Both operands read 0 beyond the block: a NaN there times 0 would be NaN.
            at = tl.load(a_tile, mask=i_ok & (kk < left)[None, :], other=0.0)
            bt = tl.load(b_tile, mask=j_ok & (kk < left)[:, None], other=0.0)
        acc = product_of(at, bt, acc, tile)
        a_tile += tl.cast(a_k, tl.int64) * tile.block_k
        b_tile += tl.cast(b_k, tl.int64) * tile.block_k
    return acc.to(tl.float32)


@triton.jit
def scaled_sum(a_tile, b_tile, of_a, of_b, of_bias, i_ok, j_ok, extents, strides, tile: tl.constexpr):
    """The product of rows of a and columns of b times their scales, and the bias, which may be None; all where the
    first block of k has them."""
    if tile.one_block:
        acc = block_sum(a_tile, b_tile, i_ok[:, None], j_ok[None, :], extents.k, extents.steps, strides.a_col,
                        strides.b_row, tile)  # fmt: skip
        acc *= tl.load(of_a, mask=i_ok, other=0.0)[:, None] * tl.load(of_b, mask=j_ok, other=0.0)[None, :]
    else:
        acc = tl.full([tile.block_m, tile.block_n], 0.0, tl.float32)
        a_next = tl.cast(strides.a_col, tl.int64) * extents.width
        b_next = tl.cast(strides.b_row, tl.int64) * extents.width
        for p in range(extents.blocks):
            width = min(extents.k - tl.cast(p, tl.int64) * extents.width, extents.width)
            scale = tl.load(of_a, mask=i_ok, other=0.0)[:, None] * tl.load(of_b, mask=j_ok, other=0.0)[None, :]
            steps = 1 if tile.one_step else extents.steps
            acc += scale * block_sum(a_tile, b_tile, i_ok[:, None], j_ok[None, :], width, steps, strides.a_col,
                                     strides.b_row, tile)  # fmt: skip
            a_tile, b_tile = a_tile + a_next, b_tile + b_next
            of_a, of_b = of_a + strides.scale_a_col, of_b + strides.scale_b_row
    if of_bias is not None:
        acc += tl.load(of_bias, mask=j_ok, other=0.0)[None, :]
    return acc


@triton.jit
def scaled_matmul_kernel(a, b, scale_a, scale_b, bias, c, extents, strides, tile: tl.constexpr):
    """bias may be None."""
    tile_m, tile_n = tile_index(tl.program_id(0), extents.tiles_m, extents.tiles_n, tile.group)
    i = tile_m.to(tl.int64) * tile.block_m + tl.arange(0, tile.block_m)
    j = tile_n.to(tl.int64) * tile.block_n + tl.arange(0, tile.block_n)
    kk = tl.arange(0, tile.block_k).to(tl.int64)
    i_ok, j_ok = i < extents.m, j < extents.n
    a_tile = a + (i[:, None] * strides.a_row + kk[None, :] * strides.a_col)
    b_tile = b + (kk[:, None] * strides.b_row + j[None, :] * strides.b_col)
    of_a = scale_a + i // extents.m_width * strides.scale_a_row
    of_b = scale_b + j // extents.n_width * strides.scale_b_col
    acc = scaled_sum(a_tile, b_tile, of_a, of_b, None if bias is None else bias + j * strides.bias, i_ok, j_ok, extents,
                     strides, tile)  # fmt: skip
    c_tile = c + (i * extents.n)[:, None] + j[None, :]
    tl.store(c_tile, acc.to(c.dtype.element_ty), mask=i_ok[:, None] & j_ok[None, :])


def multiplies(call: Call) -> bool:
    """Whether the chip's matrix unit takes both operands as they are; the interpreter does."""
    taken = targets.family(call.target.arch).matrix_dtypes
    return call.interpret or {call.dtype, call.dtype_of("b")} <= {*taken}


def products(call: Call) -> str:
    """How products are taken, which decides what a tile costs: "int8", "8-bit", or "16-bit" of operands that are
    widened."""
    if of_integers(call):
        return "int8"
    return "8-bit" if call.options["precision"] != "ieee" and multiplies(call) else "16-bit"


def wide_dtype(call: Call) -> tl.dtype:
    """What operands are multiplied as; tl.int8 where it is as they are."""
    if products(call) != "16-bit":
        return tl.int8
    return tl.bfloat16 if call.target.arch == "gfx90a" else tl.float16


def key(call: Call) -> dict[str, str | int]:
    """Of n, k and the dtypes, never of m: the same row gives the same bits in any company. ``aligned``: n and k are
    multiples of 16; else operands arrive element by element, through registers."""
    n, k = call.dims["n"], call.dims["k"]
    return {"products": products(call), "aligned": n % 16 == k % 16 == 0, "n": n, "k": k}


def fit(call: Call, config: ProductConfig) -> ProductConfig:
    """Tiles no wider than n and a block of k need."""
    return config.replace(
        block_n=pow2_at_least(call.dims["n"], 16, config.block_n),
        block_k=pow2_at_least(scale_blocks(call)[1], 32, config.block_k),
    )


def supports(call: Call, config: ProductConfig) -> str | None:
    return refused(call, config, cdiv(call.dims["m"], config.block_m))


def refused(call: Call, config: ProductConfig, tiles_m: int) -> str | None:
    """Why a product of so many rows of tiles is refused, or None."""
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    if max(block_m * block_n, block_m * block_k, block_k * block_n) > 1 << 20:
        return f"a tile of {block_m} x {block_n} x {block_k} has an operand over Triton's limit of 2^20 elements"
    if not call.interpret:
        arch = call.target.arch
        if arch in WITHOUT_E4M3 and "float8_e4m3fn" in (call.dtype, call.dtype_of("b")):
            return f"Triton reads no float8_e4m3fn on {arch}; use float8_e5m2 or int8, or a GPU from sm_89 on"
        size = 2 if products(call) == "16-bit" else 1
        in_registers = arch not in ("sm_90", "sm_100", "sm_103")
        shared = max(1, config.num_stages - in_registers) * (block_m + block_n) * block_k * size
        if shared > shared_limit(arch):
            return (
                f"{config.num_stages} stages of {block_m} x {block_n} x {block_k} take {shared} bytes "
                f"of shared memory; {arch} has {shared_limit(arch)}"
            )
        if 2 * block_m * block_n > config.num_warps * 32 * 256:  # the sum of a block beside the sum of all
            return (
                f"two {block_m} x {block_n} accumulators do not fit in the registers of {config.num_warps} warps; "
                "use a smaller tile or more warps"
            )
    return refuse_common(call, config.num_warps, tiles_m * cdiv(call.dims["n"], block_n))


@BACKEND.implements("scaled_matmul", key=key, fit=fit, supports=supports, config=ProductConfig)
def scaled_matmul(call: Call, config: ProductConfig) -> tuple[Any, ...]:
    a, b, scale_a, scale_b, bias = (call.arrays[name] for name in ("a", "b", "scale_a", "scale_b", "bias"))
    m, n, k = (call.dims[name] for name in ("m", "n", "k"))
    c = fresh((m, n), torch_dtype(call.options["out_dtype"]), a.device)
    tiles_m, tiles_n = cdiv(m, config.block_m), cdiv(n, config.block_n)
    blocks, width = scale_blocks(call)
    strides = ScaledStrides(  # type: ignore[call-arg]
        *a.stride(),
        *b.stride(),
        *shared_strides(scale_a),
        *shared_strides(scale_b),
        0 if bias is None else bias.stride(0),
    )
    launch(scaled_matmul_kernel, tiles_m * tiles_n, call, a, b, scale_a, scale_b, bias, c,
           ScaledExtents(m, n, k, tiles_m, tiles_n, blocks, width, cdiv(width, config.block_k), call.dims["m_width"],
                         call.dims["n_width"]),
           strides, tile=ScaledTile.of(call, config), num_warps=config.num_warps,
           num_stages=config.num_stages)  # fmt: skip
    return (c,)
