"""Matrix product of rows in 16 or 32 bits with weights in codes of 8 or 4 bits, which become numbers in registers.

    c[i, j] = sum_p scale_b[p, j] (sum_{k in p} a[i, k] q[k, j] - zeros[p, j] sum_{k in p} a[i, k]) + bias[j]

a: (m, k), codes b: (k, n) or, two in a byte, (k / 2, n) -> c: (m, n). A program computes the transpose of a block_m x
block_n tile of c: codes are the left operand, which the matrix units of Hopper read from registers, and up to 16 rows
of a are one instruction wide. The sum of a step, block_k products of one group, meets its scale in float32, and of the
codes less their zeros no weight is rounded.

Few rows are bound by the bytes of b, and n gives too few programs to read them: k is cut into chunks of whole steps, as
many as n and k say, and never m. A program sums one chunk and ``weight_only_matmul_sum_kernel`` adds the chunks in
their order, or, where there are tiles enough, a program sums all, in the same order. No bit of a row hangs on which of
the two happens.

Source: the transposed product and codes that stay in registers: Frantar et al., "MARLIN" (2024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import WeightOnlyConfig
from portakern.backends.triton.launch import accumulator, cdiv, launch, refuse_common, shared_limit, torch_dtype
from portakern.backends.triton.layout import fresh, pow2_at_least
from portakern.backends.triton.lib.matmul import tile_index
from portakern.backends.triton.lib.scaled_matmul import shared_strides
from portakern.specs.weight_only_matmul import weight_groups

if TYPE_CHECKING:
    from portakern.core.call import Call


class WeightExtents(NamedTuple):
    """Of a product; ``tiles_m``, ``tiles_n``: the tiles of c; ``width``: of a group of k, ``width_bytes``: what its
    codes take, ``parts``: its steps; ``steps``: those of all k, ``chunk``: of a chunk, ``chunks``: how many there
    are."""

    m: int
    n: int
    k: int
    tiles_m: int
    tiles_n: int
    width: int
    width_bytes: int
    parts: int
    steps: int
    chunk: int
    chunks: int


class WeightStrides(NamedTuple):
    """Of the operands, between rows and between columns, of scales and zeros, 0 along an axis that shares one, and of
    the bias."""

    a_row: int
    a_col: int
    b_row: int
    b_col: int
    scale_row: int
    scale_col: int
    zero_row: int
    zero_col: int
    bias: int


BESIDE = {"bfloat16": 0x4300, "float16": 0x6400}
"""The numbers, as 16 bits, in whose last bits codes of 4 bits are written."""


class WeightTile(NamedTuple):
    """What a product is compiled for: the extents of a tile, how many rows of tiles make a group, what is summed in,
    codes in a byte and the number that two of 4 bits are written into (0: they are converted one by one), whether the
    transpose is multiplied, whether no step is ragged, and whether a program sums one chunk."""

    block_m: int
    block_n: int
    block_k: int
    group: int
    acc_dtype: tl.dtype
    codes: int
    beside: int
    swap_ab: bool
    whole_k: bool
    one_chunk: bool

    @classmethod
    def of(cls, call: Call, config: WeightOnlyConfig, one_chunk: bool) -> WeightTile:
        _, width = weight_groups(call)
        whole_k = call.dims["k"] % width == width % config.block_k == 0
        return cls(config.block_m, config.block_n, config.block_k, config.group, accumulator(call.dtype),
                   call.dims["codes_per_byte"], BESIDE.get(call.dtype, 0), config.swap_ab, whole_k,
                   one_chunk)  # fmt: skip


@triton.jit
def halves(x, unsigned: tl.constexpr, dtype: tl.constexpr, tile: tl.constexpr):
    """The codes of 4 bits of bytes (columns, k / 2), as numbers (columns, k).

    In 16 bits both codes of a byte become numbers together: written into the last bits of 128 (bfloat16) or 1024
    (float16), beside which they are whole, they are that number more, or 8 more where their sign bit is turned over."""
    if tile.beside != 0:
        beside: tl.constexpr = tile.beside if unsigned else tile.beside + 8
        more: tl.constexpr = (128 if dtype == tl.bfloat16 else 1024) + (0 if unsigned else 8)
        x = x.to(tl.int32)
        both = ((x & 15) | ((x & 240) << 12)) ^ (beside * 65537)
        low, high = (both & 65535).to(tl.uint16), (both >> 16).to(tl.uint16)
        found = tl.join(low, high).to(dtype, bitcast=True) - tl.full([1], more, dtype)
    elif unsigned:
        found = tl.join(x & 15, (x >> 4) & 15).to(dtype)
    else:
        found = tl.join((x << 4) >> 4, x >> 4).to(dtype)
    return tl.reshape(found, [x.shape[0], 2 * x.shape[1]])


@triton.jit
def product(q, x, tile: tl.constexpr):
    """q x."""
    if tile.swap_ab:
        found = tl.dot(q, x, input_precision="ieee", out_dtype=tile.acc_dtype)
    else:
        found = tl.trans(tl.dot(tl.trans(x), tl.trans(q), input_precision="ieee", out_dtype=tile.acc_dtype))
    return found


@triton.jit
def sums_of(x, tile: tl.constexpr):
    """The sum over k of each column of x, (1, block_m). The matrix unit makes it, in an order that is the same in a
    tile of any width, as a reduction's is not."""
    alike = product(tl.full([16, tile.block_k], 1.0, x.dtype), x, tile)
    return tl.sum(tl.where((tl.arange(0, 16) == 0)[:, None], alike, 0.0), 0)[None, :]


@triton.jit
def step_sum(a_tile, b_tile, i_ok, j_ok, left, zero, zeros, tile: tl.constexpr):
    """The transpose of a times codes less ``zero`` (columns; without, where ``zeros`` is None), (block_n, block_m),
    over ``left`` elements of k. Beyond them both operands are read as 0, and no product with a NaN is taken."""
    kk = tl.arange(0, tile.block_k)
    bytes_k: tl.constexpr = tile.block_k // tile.codes
    if tile.whole_k:
        x, q = tl.load(a_tile, mask=i_ok, other=0.0), tl.load(b_tile, mask=j_ok, other=0)
    else:
        held = tl.arange(0, bytes_k) * tile.codes < left
        x = tl.load(a_tile, mask=i_ok & (kk < left)[:, None], other=0.0)
        q = tl.load(b_tile, mask=j_ok & held[None, :], other=0)
    if tile.codes == 2:
        q = halves(q, zeros is not None, x.dtype, tile)
    else:
        q = q.to(x.dtype)
    part = product(q, x, tile)
    if zeros is not None:
        part = tl.fma(tl.broadcast_to(-zero[:, None], part.shape), tl.broadcast_to(sums_of(x, tile), part.shape), part)
    return part


@triton.jit
def scale_and_zero(scale, zeros, step, last, j, j_ok, extents, strides, tile: tl.constexpr):
    """Those of the columns j in a step before ``last``, in what is summed in; the zero is the scale where zeros is
    None."""
    p, ok = tl.cast(step // extents.parts, tl.int64), j_ok & (step < last)
    found = tl.load(scale + p * strides.scale_row + j * strides.scale_col, mask=ok, other=0.0).to(tile.acc_dtype)
    zero = found
    if zeros is not None:
        zero = tl.load(zeros + p * strides.zero_row + j * strides.zero_col, mask=ok, other=0.0).to(tile.acc_dtype)
    return found, zero


@triton.jit
def chunk_sum(a, b, scale, zeros, i, j, chunk, extents, strides, tile: tl.constexpr):
    """The sum of one chunk of k of the columns j of b and the rows i of a, (block_n, block_m). Scales are loaded a step
    before they are needed."""
    bytes_k: tl.constexpr = tile.block_k // tile.codes
    kk, byte = tl.arange(0, tile.block_k).to(tl.int64), tl.arange(0, bytes_k).to(tl.int64)
    i_ok, j_ok = (i < extents.m)[None, :], j < extents.n
    a_rows, b_columns = a + i[None, :] * strides.a_row, b + j[:, None] * strides.b_col
    begin, end = chunk * extents.chunk, min((chunk + 1) * extents.chunk, extents.steps)
    factor, zero = scale_and_zero(scale, zeros, begin, end, j, j_ok, extents, strides, tile)
    acc = tl.full([tile.block_n, tile.block_m], 0.0, tile.acc_dtype)
    for step in range(begin, end):
        now, zero_now = factor, zero
        factor, zero = scale_and_zero(scale, zeros, step + 1, end, j, j_ok, extents, strides, tile)
        p, part = tl.cast(step // extents.parts, tl.int64), step % extents.parts
        first = p * extents.width + part * tile.block_k
        left = min(extents.width - part * tile.block_k, extents.k - first)
        a_tile = a_rows + (first + kk)[:, None] * strides.a_col
        b_tile = b_columns + (p * extents.width_bytes + part * bytes_k + byte)[None, :] * strides.b_row
        found = step_sum(a_tile, b_tile, i_ok, j_ok[:, None], left, zero_now, zeros, tile)
        # Written out, lest one of two kernels that sum in the same order fuses and the other does not.
        acc = tl.fma(found, tl.broadcast_to(now[:, None], acc.shape), acc)
    return acc


@triton.jit
def weight_only_matmul_kernel(a, b, scale, zeros, bias, c, extents, strides, tile: tl.constexpr):
    """zeros and bias may be None. Where a tile has a program for each chunk, c is (chunks, m, n) in what is summed in,
    and bias None."""
    program, tiles = tl.program_id(0), extents.tiles_m * extents.tiles_n
    share = program // tiles
    tile_m, tile_n = tile_index(program % tiles, extents.tiles_m, extents.tiles_n, tile.group)
    i = tile_m.to(tl.int64) * tile.block_m + tl.arange(0, tile.block_m)
    j = tile_n.to(tl.int64) * tile.block_n + tl.arange(0, tile.block_n)
    j_ok = j < extents.n
    if tile.one_chunk:
        total = chunk_sum(a, b, scale, zeros, i, j, share, extents, strides, tile)
    else:
        total = tl.full([tile.block_n, tile.block_m], 0.0, tile.acc_dtype)
        for chunk in range(extents.chunks):
            total += chunk_sum(a, b, scale, zeros, i, j, chunk, extents, strides, tile)
    if bias is not None:
        total += tl.load(bias + j * strides.bias, mask=j_ok, other=0.0).to(tile.acc_dtype)[:, None]
    at = (share.to(tl.int64) * extents.m + i)[None, :] * extents.n + j[:, None]
    tl.store(c + at, total.to(c.dtype.element_ty), mask=(i < extents.m)[None, :] & j_ok[:, None])


@triton.jit
def weight_only_matmul_sum_kernel(parts, bias, c, m, n, chunks, bias_stride, block: tl.constexpr):
    """c = the sum of parts (chunks, m, n), one after the other, + bias."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    ok = at < tl.cast(m, tl.int64) * n
    total = tl.full([block], 0.0, parts.dtype.element_ty)
    for chunk in range(chunks):
        total += tl.load(parts + tl.cast(chunk, tl.int64) * m * n + at, mask=ok, other=0.0)
    if bias is not None:
        total += tl.load(bias + at % n * bias_stride, mask=ok, other=0.0).to(total.dtype)
    tl.store(c + at, total.to(c.dtype.element_ty), mask=ok)


SUMMED = 1024
"""Elements of c of which a program adds up the chunks."""


def products(call: Call) -> str:
    """How products are taken, which decides what a tile costs: "16-bit" or "ieee"."""
    return "16-bit" if call.dtype in ("float16", "bfloat16") else "ieee"


def key(call: Call) -> dict[str, str | int]:
    """Of n, k, the bits of a code and the dtype of a, never of m: the same row gives the same bits in any company."""
    n, k = call.dims["n"], call.dims["k"]
    return {"products": products(call), "codes": f"{8 // call.dims['codes_per_byte']} bits", "n": n, "k": k}


def fit(call: Call, config: WeightOnlyConfig) -> WeightOnlyConfig:
    """Steps no longer than a group, and, where no bit hangs on it, no more rows than there are: an instruction of
    NVIDIA's matrix units adds 16 products at a time, whichever the rows of a tile, while CDNA's may have another
    depth in another tile."""
    _, width = weight_groups(call)
    config = config.replace(block_k=pow2_at_least(width, 32, config.block_k))
    if not call.interpret and call.target.platform == "cuda":
        config = config.replace(block_m=pow2_at_least(call.dims["m"], 16, config.block_m))
    return config


def chunks_of(call: Call, config: WeightOnlyConfig) -> tuple[int, int]:
    """(steps of a chunk, how many chunks there are), as n and k say."""
    count, width = weight_groups(call)
    steps = count * cdiv(width, config.block_k)
    most = max(config.split_programs // cdiv(call.dims["n"], config.block_n), 1)
    chunk = cdiv(steps, min(most, cdiv(steps, LEAST)))
    return chunk, cdiv(steps, chunk)


LEAST = 4
"""Steps of a chunk at least: below, its partial sum costs what it saves."""


IN_TF32 = ("sm_100", "sm_103")
"""Chips for which Triton 3.6 and 3.9 give tcgen05 a product of float32 whose left operand is in registers, in tf32."""


def supports(call: Call, config: WeightOnlyConfig) -> str | None:
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    if max(block_m * block_n, block_m * block_k, block_k * block_n) > 1 << 20:
        return f"a tile of {block_m} x {block_n} x {block_k} has an operand over Triton's limit of 2^20 elements"
    if not call.interpret:
        size = {"float64": 8, "float32": 4}.get(call.dtype, 2)
        operands = block_m * block_k * size + block_n * block_k // call.dims["codes_per_byte"]
        shared, limit = config.num_stages * operands, shared_limit(call.target.arch)
        if shared > limit:
            return (
                f"{config.num_stages} stages of {block_m} x {block_n} x {block_k} take {shared} bytes "
                f"of shared memory; {call.target.arch} has {limit}"
            )
        if config.swap_ab and call.dtype == "float32" and call.target.arch in IN_TF32:
            return (
                f"swap_ab=1 of float32 on {call.target.arch}: of a left operand that is made in registers Triton takes "
                "products in tf32, though ieee is asked for; use swap_ab=0"
            )
        if 2 * block_m * block_n > config.num_warps * 32 * 256:  # the sum of a step beside that of all
            return (
                f"two {block_m} x {block_n} accumulators do not fit in the registers of {config.num_warps} warps; "
                "use a smaller tile or more warps"
            )
    tiles = cdiv(call.dims["m"], block_m) * cdiv(call.dims["n"], block_n)
    return refuse_common(call, config.num_warps, tiles * chunks_of(call, config)[1])


@BACKEND.implements("weight_only_matmul", key=key, fit=fit, supports=supports, config=WeightOnlyConfig)
def weight_only_matmul(call: Call, config: WeightOnlyConfig) -> tuple[Any, ...]:
    a, b, scale, zeros, bias = (call.arrays[name] for name in ("a", "b", "scale_b", "zeros", "bias"))
    m, n, k = (call.dims[name] for name in ("m", "n", "k"))
    c = fresh((m, n), torch_dtype(call.outputs["c"][1]), a.device)
    tiles_m, tiles_n = cdiv(m, config.block_m), cdiv(n, config.block_n)
    count, width = weight_groups(call)
    (chunk, chunks), parts = chunks_of(call, config), cdiv(width, config.block_k)
    alone = chunks == 1 or tiles_m * tiles_n >= config.split_programs
    programs = 1 if alone else chunks
    wide = torch_dtype("float64" if call.dtype == "float64" else "float32")
    sums = c if alone else fresh((chunks, m, n), wide, a.device)
    step = 0 if bias is None else bias.stride(0)
    strides = WeightStrides(  # type: ignore[call-arg]
        *a.stride(), *b.stride(), *shared_strides(scale), *((0, 0) if zeros is None else shared_strides(zeros)), step
    )
    launch(weight_only_matmul_kernel, tiles_m * tiles_n * programs, call, a, b, scale, zeros, bias if alone else None,
           sums, WeightExtents(m, n, k, tiles_m, tiles_n, width, cdiv(width, call.dims["codes_per_byte"]), parts,
                               count * parts, chunk, chunks),
           strides, tile=WeightTile.of(call, config, programs == chunks), num_warps=config.num_warps,
           num_stages=config.num_stages)  # fmt: skip
    if not alone:
        launch(weight_only_matmul_sum_kernel, cdiv(m * n, SUMMED), call, sums, bias, c, m, n, chunks, step,
               block=SUMMED, num_warps=4)  # fmt: skip
    return (c,)
