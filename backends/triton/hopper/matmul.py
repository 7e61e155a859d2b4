"""Matrix product with batch broadcasting, on Hopper's asynchronous copy engine and matrix unit.

    c[.., i, j] = sum_k a[.., i, k] b[.., k, j]

a: (*#batch, m, k), b: (*#batch, k, n) -> c: (*batch, m, n). A program computes block_m x block_n tiles of c, walking k
in steps of block_k; tiles of operands are described, and arrive in shared memory while the ones before are multiplied.
Programs stay, and take one tile after another. Large products are by warps that have roles (:mod:`._warps`; of float32
:mod:`._float32` too).

Few rows are multiplied the other way round, c^T = b^T a^T (``swap_ab``): the matrix unit takes 64 rows at a time, and
then these are columns of b, where m is filled up to 16.

A long k and few columns make too few tiles. There the sum over k goes in ``chunk`` long parts, each summed alone, which
programs of their own compute or, where there are tiles enough, one program one after another; the same sums in the same
order. How long a chunk is follows from n and k. All else may follow m and the batch: an element's bits depend on the
order of k alone, which the matrix unit and every tile keep (tests/test_gpu.py tries it).

Operands that cannot be described, and 32-bit ones that lie the wrong way (``ALONG``), are copied (:mod:`._scratch`);
small ones are read as they lie (:mod:`._direct`).

Gradients are one product each, which takes the tiles that suit it: d_a = d_c b^T and d_b = a^T d_c, both summed over
the batch axes along which their operand was broadcast. Transposed operands are strided views, which are described as
they lie in memory; summed axes are folded into the contraction.

Source: the order of tiles in "Matrix Multiplication" of the Triton tutorials (Tillet).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import EpilogueSubtile, HopperProductConfig
from portakern.backends.triton.descriptors import describe
from portakern.backends.triton.hopper import _tiles
from portakern.backends.triton.hopper._direct import multiply_directly
from portakern.backends.triton.hopper._scratch import Operand, operand
from portakern.backends.triton.hopper._tiles import (
    ALONG,
    box_columns,
    chunk_of,
    copied,
    extents,
    fit,
    key,
    key_of_batches,
    more_columns,
    reads_directly,
    refuse_roles,
    size_of,
    split,
    supports,
    warp_specialized,
    without_idle_roles,
)
from portakern.backends.triton.hopper.family import FAMILY
from portakern.backends.triton.launch import (
    MAX_GRID,
    accumulator,
    cdiv,
    dot_precision,
    launch,
    torch_dtype,
)
from portakern.backends.triton.layout import collapse, fresh
from portakern.backends.triton.lib.matmul import product, products, tile_index
from portakern.backends.triton.trace import AbstractArray
from portakern.core.framework import DTYPE_NAME
from portakern.core.tilings import default
from portakern.specs.matmul import product_dtype

if TYPE_CHECKING:
    import torch

    from portakern.backends.triton.hopper._warps import WarpPlan
    from portakern.core.call import Call

ADDED = 512  # elements of c whose parts a program adds

TORCH = {tl.float32: "float32", tl.float64: "float64"}
ELEMENTS = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32, "float64": tl.float64}


class TilePlan(NamedTuple):
    """What a product by warps that all do the same is compiled for.

    Attributes:
      block_m, block_n, block_k: extents of a tile; group: rows of tiles that are finished together.
      a_across, b_across: an operand's lines run along the first of its axes.
      swap_ab: tiles are of c^T. chunked: a program sums all chunks of k, one after another.
      precision, acc_dtype: how products are taken and sums kept.
      batched: there are entries; a_batched, b_batched: 1 where the operand has its own for each, else 0.
      flat: the loops over tiles and over k are one. c_described: c is a descriptor, and no pointer; c_dtype: of c.
      activation: what a linear layer applies to its sums.
    """

    block_m: int
    block_n: int
    block_k: int
    group: int
    a_across: bool
    b_across: bool
    swap_ab: bool
    chunked: bool
    precision: str
    acc_dtype: Any
    batched: bool = False
    a_batched: int = 0
    b_batched: int = 0
    flat: bool = False
    c_described: bool = False
    c_dtype: Any = None
    activation: str | None = None


@triton.jit
def described_tile(x, z, row, column, rows: tl.constexpr, columns: tl.constexpr, across: tl.constexpr,
                   batched: tl.constexpr):  # fmt: skip
    """The tile of x at (row, column), which lies the other way in memory if ``across``."""
    if across:
        if batched:
            return x.load([z, column, row]).reshape(columns, rows).T
        else:
            return x.load([column, row]).T
    else:
        if batched:
            return x.load([z, row, column]).reshape(rows, columns)
        else:
            return x.load([row, column])


@triton.jit
def no_sums(plan: tl.constexpr):
    """What the sums of a tile begin with."""
    rows: tl.constexpr = plan.block_n if plan.swap_ab else plan.block_m
    columns: tl.constexpr = plan.block_m if plan.swap_ab else plan.block_n
    return tl.zeros([rows, columns], plan.acc_dtype)


@triton.jit
def summed(a, b, a_z, b_z, i, j, first, last, plan: tl.constexpr):
    """The tile of c at (i, j), of the steps first .. last - 1 of k; its transpose if ``plan.swap_ab``."""
    acc = no_sums(plan)
    for step in range(first, last):
        kk = step * plan.block_k
        at = described_tile(a, a_z, i, kk, plan.block_m, plan.block_k, plan.a_across, plan.batched)
        bt = described_tile(b, b_z, kk, j, plan.block_k, plan.block_n, plan.b_across, plan.batched)
        if plan.swap_ab:
            acc = tl.dot(bt.T, at.T, acc, input_precision=plan.precision, out_dtype=plan.acc_dtype)
        else:
            acc = tl.dot(at, bt, acc, input_precision=plan.precision, out_dtype=plan.acc_dtype)
    return acc


@triton.jit
def in_chunks(a, b, a_z, b_z, i, j, part, steps, chunk, plan: tl.constexpr):
    """The ``part``-th chunk of the sum, or with ``plan.chunked`` all of them, each summed alone."""
    if plan.chunked:
        acc = no_sums(plan)
        for first in range(0, steps, chunk):
            acc += summed(a, b, a_z, b_z, i, j, first, min(first + chunk, steps), plan)
    else:
        first = part * chunk
        acc = summed(a, b, a_z, b_z, i, j, first, min(first + chunk, steps), plan)
    return acc


@triton.jit(do_not_specialize=["m", "n", "k", "chunk", "parts", "entries"])
def matmul_kernel(a, b, c, m, n, k, chunk, parts, entries, c_m, plan: tl.constexpr):
    """chunk: steps of k that are summed alone. parts: how many chunks programs of their own take, each of which has its
    own c, of rows that are c_m apart; ``plan.chunked``: one program takes them all."""
    tiles_m, tiles_n = tl.cdiv(m, plan.block_m), tl.cdiv(n, plan.block_n)
    steps, tiles = tl.cdiv(k, plan.block_k), tiles_m * tiles_n
    for index in tl.range(tl.program_id(0), tiles * parts * entries, tl.num_programs(0), flatten=plan.flat):
        tile_m, tile_n = tile_index(index % tiles, tiles_m, tiles_n, plan.group)
        i, j = tile_m * plan.block_m, tile_n * plan.block_n
        part, z = index // tiles % parts, index // tiles // parts
        acc = in_chunks(a, b, z * plan.a_batched, z * plan.b_batched, i, j, part, steps, chunk, plan)
        if plan.swap_ab:
            c_tile = acc.T.to(plan.c_dtype)
        else:
            c_tile = acc.to(plan.c_dtype)
        if plan.c_described:
            if plan.batched:
                c.store([z, i, j], c_tile.reshape(1, plan.block_m, plan.block_n))
            else:
                c.store([i, j], c_tile)
        else:
            row, column = i + tl.arange(0, plan.block_m), j + tl.arange(0, plan.block_n)
            c_row = c + ((part * entries + z).to(tl.int64) * m + row) * c_m
            tl.store(c_row[:, None] + column[None, :], c_tile, mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def matmul_add_parts_kernel(partial, c, numel, parts: tl.constexpr, block: tl.constexpr):
    """c = the sum of its parts, in order. All of them are on their way before the first is needed."""
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < numel
    read = ()
    for part in tl.static_range(parts):
        at = partial + tl.cast(part, tl.int64) * numel + i
        read = read + (tl.load(at, mask=inside, other=0.0),)  # type: ignore[assignment]
    tl.debug_barrier()  # else each part is read when the one before is added, and waited for
    acc = tl.zeros([block], partial.dtype.element_ty)
    for part in tl.static_range(parts):
        acc += read[part]
    tl.store(c + i, acc.to(c.dtype.element_ty), mask=inside)


@BACKEND.implements(
    "matmul", key=key_of_batches, fit=fit, supports=supports, config=HopperProductConfig, same_bits=True
)
def matmul(call: Call, config: HopperProductConfig, into: torch.Tensor | None = None) -> tuple[Any, ...]:
    """``into``: contiguous memory for c, where another op has some."""
    dims, dtype = call.dims, call.options["out_dtype"]
    a, b, n, k = call.arrays["a"], call.arrays["b"], dims["n"], dims["k"]
    if into is None:
        into = fresh((*dims["batch"], dims["m"], n), torch_dtype(dtype) if dtype else a.dtype, a.device)
    c = into
    entries, m = extents(call)
    kind = products(call, call.dtype)
    along_a, along_b = (None, None) if config.swap_ab else ALONG.get(kind, (None, None))
    if warp_specialized(call, config) and kind == "tf32":
        along_b = None
    if reads_directly(config):
        a_matrices, b_matrices = _matrices(call, a, m, m != dims["m"]), _matrices(call, b, k, False)
        multiply_directly(call, a_matrices[:2], b_matrices[:2], c, (entries, m), config)
        return (c,)
    whole = copied(call) if warp_specialized(call, config) else None
    of_a = _operand(call, a, (entries, m, k), along_a, whole == "a", flattened=m != dims["m"])
    of_b = _operand(call, b, (entries, k, n), along_b, whole == "b")
    if warp_specialized(call, config) and (kind == "ieee" or (kind == "tf32" and not of_b.across)):
        _launch_float32(call, of_a, of_b, c, (entries, m), config)
    elif warp_specialized(call, config):
        _launch_roles(call, of_a, of_b, c, (entries, m), config)
    else:
        _launch(call, of_a, of_b, c, (entries, m), config)
    return (c,)


def _operand(
    call: Call, x: torch.Tensor, extents: tuple[int, int, int], along: int | None, full: bool, flattened: bool = False
) -> Operand:
    """``x`` as it can be described. ``full``: lines begin where lines of the cache do."""
    entries, rows, columns = extents
    x, batch, has_entries = _matrices(call, x, rows, flattened)
    return operand(call, x, batch, (entries if has_entries else 1, rows, columns), along, full)


def _matrices(call: Call, x: torch.Tensor, rows: int, flattened: bool) -> tuple[torch.Tensor, int, bool]:
    """``x`` with its batch axes as one, or as so many rows (``flattened``), the step along that axis, and whether it
    has one. Axes that one stride does not walk are gathered."""
    columns = x.shape[-1]
    if flattened:
        x = x.expand(*call.dims["batch"], -1, -1)
        shape, (strides,) = collapse(x.shape[:-1], x.stride()[:-1])
        if len(shape) > 1:
            x, strides = x.contiguous(), (columns,)
        return x.as_strided((rows, columns), (strides[0] if shape else columns, x.stride(-1))), 0, False
    if prod(x.shape[:-2]) == 1:
        return x, 0, False
    x = x.expand(*call.dims["batch"], -1, -1)
    shape, (strides,) = collapse(x.shape[:-2], x.stride()[:-2])
    if len(shape) > 1:
        x = x.contiguous()
        strides = (x.shape[-2] * columns,)
    return x, strides[0], True


def described(x: Operand, shape: tuple[int, int, int], block: tuple[int, int], batched: bool, **how: Any) -> Any:
    """The descriptor of an operand whose two axes have these extents, in tiles ``block``."""
    entries, rows, columns = shape
    lines, length = (columns, rows) if x.across else (rows, columns)
    tile = block[::-1] if x.across else block
    if batched:
        strides = (x.batch or x.row * lines, x.row, 1)
        return describe(x.memory, (entries if x.batch else 1, lines, length), strides, (1, *tile), **how)
    return describe(x.memory, (lines, length), (x.row, 1), tile, **how)


class Roles(NamedTuple):
    """A product as warps with roles take it.

    Attributes:
      operands: what describes a and b, and b for the columns that are more.
      result: the descriptor of memory for c, or the memory where that cannot be described.
      plan: what the kernel is compiled for.
    """

    grid: int
    operands: tuple[Any, Any, Any]
    result: Callable[[torch.Tensor], Any]
    plan: WarpPlan


def roles_of(call: Call, a: Operand, b: Operand, extents: tuple[int, int], config: HopperProductConfig) -> Roles:
    """How warps with roles take the product of a and b. extents: batch entries and rows."""
    from triton.experimental.gluon import language as gl

    from portakern.backends.triton.hopper._warps import WarpPlan

    (entries, m), n, k, given = extents, call.dims["n"], call.dims["k"], DTYPE_NAME[a.memory.dtype]
    rows, columns, depth, more = config.block_m, config.block_n, config.block_k, more_columns(config)
    tf32, batched = given == "float32", entries > 1

    def tile(x: Operand, shape: tuple[int, int], block: tuple[int, int], tf32: bool = tf32) -> Any:
        laid = [1] * batched + list(block[::-1] if x.across else block)
        layout = gl.NVMMASharedLayout.get_default_for(laid, getattr(gl, given))
        return described(x, (entries, *shape), block, batched, layout=layout, tf32=tf32)

    size = size_of(call.dtype)
    box = (rows // 2, box_columns(config, size))
    in_boxes = n * size % 16 == 0

    def result(c: torch.Tensor) -> Any:
        return tile(Operand(c, m * n * batched, n, False), (m, n), box, tf32=False) if in_boxes else c

    of_a, of_b = tile(a, (m, k), (rows, depth)), tile(b, (k, n), (depth, columns))
    of_more = tile(b, (k, n), (depth, more)) if more else of_b
    grid = min(_tiles.MULTIPROCESSORS, cdiv(m, rows) * cdiv(n, columns + more) * entries)
    plan = WarpPlan(
        rows, columns, depth, config.group, config.num_stages, more=more, a_across=a.across, b_across=b.across,
        batched=batched, a_batched=int(a.batch > 0), b_batched=int(b.batch > 0), described=in_boxes,
        c_in_stages=config.epilogue_subtile == EpilogueSubtile.IN_STAGES,
        c_whole=config.epilogue_subtile == EpilogueSubtile.WHOLE,
    )  # fmt: skip
    return Roles(grid, (of_a, of_b, of_more), result, plan)


def _launch_roles(
    call: Call, a: Operand, b: Operand, c: torch.Tensor, extents: tuple[int, int], config: HopperProductConfig
) -> None:
    from portakern.backends.triton.hopper._warps import matmul_by_roles

    (entries, m), roles = extents, roles_of(call, a, b, extents, config)
    launch(matmul_by_roles, roles.grid, call, *roles.operands, roles.result(c), m, call.dims["n"], call.dims["k"],
           entries, plan=roles.plan, num_warps=4)  # fmt: skip


def _launch_float32(
    call: Call, a: Operand, b: Operand, c: torch.Tensor, extents: tuple[int, int], config: HopperProductConfig
) -> None:
    """Of operands whose lines run along k and n. In tf32 the longer side of a tile is rows, and what c does not take of
    shared memory holds a stage more."""
    from triton.experimental.gluon import language as gl

    from portakern.backends.triton.hopper import _float32
    from portakern.backends.triton.hopper._warps import WarpPlan

    (entries, m), n, k, tf32 = extents, call.dims["n"], call.dims["k"], dot_precision(call) == "tf32"
    rows, columns, depth, batched = config.block_m, config.block_n, config.block_k, entries > 1
    kernel, stages, slices, warps = _float32.matmul_in_slices, config.num_stages, depth // _float32.SLICE.value, 8
    if tf32:
        kernel, stages, slices, warps, rows, columns = _float32.matmul_turned, stages + 1, 1, 4, columns, rows

    def tile(x: Operand, shape: tuple[int, int], block: tuple[int, int]) -> Any:
        layout = gl.NVMMASharedLayout.get_default_for([1] * batched + list(block), gl.float32)
        return described(x, (entries, *shape), block, batched, layout=layout, tf32=tf32)

    grid = min(_tiles.MULTIPROCESSORS, cdiv(m, rows) * cdiv(n, columns) * entries)
    plan = WarpPlan(rows, columns, depth, config.group, stages, slices=slices, batched=batched,
                     a_batched=int(a.batch > 0), b_batched=int(b.batch > 0))  # fmt: skip
    launch(kernel, grid, call, tile(a, (m, k), (rows, depth // slices)), tile(b, (k, n), (depth, columns)), c, m, n, k,
           entries, plan=plan, num_warps=warps)  # fmt: skip


def _launch(
    call: Call, a: Operand, b: Operand, c: torch.Tensor, rows: tuple[int, int], config: HopperProductConfig
) -> None:
    (entries, m), n, k = rows, call.dims["n"], call.dims["k"]
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    tiles = entries * cdiv(m, block_m) * cdiv(n, block_n)
    parts, chunk = split(tiles, n, k), cdiv(chunk_of(n, k), block_k)
    chunked = parts == 1 and chunk * block_k < k
    acc = accumulator(call.dtype)
    target = c if parts == 1 else fresh((parts, entries * m, n), torch_dtype(TORCH[acc]), c.device)
    batched, swapped = entries > 1, config.swap_ab
    in_boxes = parts == 1 and n * c.element_size() % 16 == 0
    stays = in_boxes and not swapped
    how: dict[str, Any] = {"tf32": True} if dot_precision(call) == "tf32" else {}
    of_a = described(a, (entries, m, k), (block_m, block_k), batched, **how)
    of_b = described(b, (entries, k, n), (block_k, block_n), batched, **how)
    of_c = Operand(c, m * n * batched, n, False)
    grid = min(_tiles.MULTIPROCESSORS if stays else MAX_GRID, tiles * parts)
    plan = TilePlan(
        block_m, block_n, block_k, config.group, a.across, b.across, swapped, chunked, dot_precision(call), acc,
        batched=batched, a_batched=int(a.batch > 0), b_batched=int(b.batch > 0), flat=stays and not chunked,
        c_described=in_boxes, c_dtype=ELEMENTS[DTYPE_NAME[target.dtype]],
    )  # fmt: skip
    launch(matmul_kernel, grid, call, of_a, of_b,
           described(of_c, (entries, m, n), (block_m, block_n), batched) if in_boxes else target,
           m, n, k, chunk, parts, entries, n, plan=plan, num_warps=config.num_warps,
           num_stages=config.num_stages)  # fmt: skip
    if parts > 1:
        launch(matmul_add_parts_kernel, cdiv(c.numel(), ADDED), call, target, c, c.numel(), parts=parts, block=ADDED,
               num_warps=4, maxnreg=128)  # fmt: skip


def bare_products(call: Call) -> dict[str, Call]:
    """The matmul that gives each gradient that is wanted, on arrays without memory."""

    def bare(x: Any) -> Any:
        if isinstance(x, AbstractArray):
            return x.apart()
        return sys.modules["torch"].empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    arrays = {n: None if x is None else bare(x) for n, x in call.arrays.items()}
    return {name: product(call.replace(arrays=arrays), name) for name in call.wants}


def gradient_key(call: Call) -> dict[str, str | int]:
    """matmul's, of the first gradient that is wanted; see :func:`own_tiling`."""
    if call.interpret or not call.wants:
        return {"products": products(call, product_dtype(call)), "tile": "any", "rounds": 1, "k": 1}
    return key(next(iter(bare_products(call).values())))


def own_tiling(call: Call, product_call: Call, config: HopperProductConfig) -> HopperProductConfig:
    """The tiling of a gradient's product: matmul's own for it, unless somebody named or found another for the call,
    which is then for both; warps have roles in the products that have a use for them."""
    gradients, forward = (BACKEND.implementation(op, FAMILY) for op in ("matmul_vjp", "matmul"))
    assert gradients is not None and forward is not None
    if default(gradients, call).tiling != config:
        return without_idle_roles(product_call, config)
    return default(forward, product_call).tiling


def supports_gradient(call: Call, config: HopperProductConfig) -> str | None:
    if call.interpret and warp_specialized(call, config):
        return refuse_roles(call, config)
    for name, of in bare_products(call).items():
        reason = supports(of, own_tiling(call, of, config))
        if reason:
            return f"{name}: {reason}"
    return None


@BACKEND.implements(
    "matmul_vjp", key=gradient_key, supports=supports_gradient, config=HopperProductConfig, same_bits=True
)
def matmul_vjp(call: Call, config: HopperProductConfig) -> tuple[Any, ...]:
    def gradient(name: str) -> torch.Tensor | None:
        if name not in call.wants:
            return None
        of = product(call, name)
        (c,) = matmul(of, own_tiling(call, of, config))
        return c.reshape(call.outputs[name][0])

    return gradient("d_a"), gradient("d_b")
