"""The matrix product by warps that have roles (Gluon), and the linear layer, for large products of 16-bit numbers.

    c[i, j] = sum_k a[i, k] b[k, j]        or, with pre = c + bias[j],    c = f(pre) + residual[i, j]

With entries, of each: c[z, i, j] = sum_k a[z, i, k] b[z, k, j]; an operand may have one entry for all.

One warp loads: it keeps ``stages`` tiles of a (rows x depth) and of b (depth x columns) on their way into shared memory
through the copy engine, and waits only for a stage to become free. Two groups of four warps multiply, each its half of
the rows: an asynchronous product of one stage is in flight while the next one is issued, and the stage before is handed
back as soon as its product is done. So neither copies nor barriers stand between two products. Programs stay, one to a
multiprocessor, and walk the tiles of c; a tile of c leaves through shared memory while the next one is multiplied.

``more``: b's tile has so many columns beside, in an accumulator of their own: 192 or 160 columns, where a tile of
Triton's is a power of two.

Source: the persistent warp-specialised schedules of CUTLASS 3 (Thakkar et al.), "ping-pong" left out; the order of
tiles in "Matrix Multiplication" of the Triton tutorials (Tillet).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from portakern.backends.triton.lib.activations import activated
from portakern.backends.triton.lib.gluon import acquire, await_full, load_tile, ring_of, store_tile
from portakern.backends.triton.lib.matmul import tile_index

together = getattr(gl, "barrier", None) or gl.thread_barrier

_OLD = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "reinterpret"))

LOADER_REGISTERS, CONSUMER_REGISTERS = gl.constexpr(24), gl.constexpr(240)
PART = gl.constexpr(32)  # columns of an accumulator that meet what follows the product at a time


class WarpPlan(NamedTuple):
    """What a kernel by warps with roles is compiled for.

    Attributes:
      rows, columns, depth: extents of the tiles of a and b; more: columns of b beside; group: rows of tiles that are
        finished together; stages: of the ring; slices: boxes of a's tile along k.
      a_across, b_across: an operand's lines run along the first of its axes, m or k.
      batched: there are entries; a_batched, b_batched: 1 where the operand has its own for each, else 0.
      described: c (and pre) is a descriptor, and no pointer. c_in_stages: c leaves through a's stages; c_whole: all
        boxes of a tile of c with ``more`` columns are in shared memory.
      activation: what follows the sums; None: nothing does.
    """

    rows: int
    columns: int
    depth: int
    group: int
    stages: int
    more: int = 0
    slices: int = 1
    a_across: bool = False
    b_across: bool = False
    batched: bool = False
    a_batched: int = 0
    b_batched: int = 0
    described: bool = False
    c_in_stages: bool = False
    c_whole: bool = False
    activation: str | None = None


class GemmExtents(NamedTuple):
    """a is (entries, m, k) and b (entries, k, n); entries: None where there is one."""

    m: Any
    n: Any
    k: Any
    entries: Any


class Operands(NamedTuple):
    """a, b, and b for the columns that are more: described, or their tiles in shared memory."""

    a: Any
    b: Any
    b_more: Any


class Epilogue(NamedTuple):
    """What follows the sums, each None where it is absent: bias, the residual and the step between its rows, and where
    the sums with bias are written (pre)."""

    bias: Any
    residual: Any
    residual_row: Any
    pre: Any


class TileOrigin(NamedTuple):
    """Where a tile of c begins: entry, row and column."""

    z: Any
    i: Any
    j: Any


@gluon.jit
def boxed(tile):
    """A tile in shared memory as the box (1, rows, columns) that the copy engine moves."""
    bits: gl.constexpr = tile.dtype.primitive_bitwidth
    line: gl.constexpr = tile.shape[1] * bits // 8
    layout: gl.constexpr = gl.NVMMASharedLayout(128 if line > 128 else line, bits, 3)
    if _OLD:
        return tile._reinterpret(tile.dtype, [1, tile.shape[0], tile.shape[1]], layout)
    else:
        return tile.reinterpret(tile.dtype, [1, tile.shape[0], tile.shape[1]], layout)


@gluon.jit
def as_tiles(tiles, count: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr):
    """Shared memory as so many tiles of so many rows and columns."""
    if _OLD:
        return tiles._reinterpret(tiles.dtype, [count, rows, columns], layout)
    else:
        return tiles.reinterpret(tiles.dtype, [count, rows, columns], layout)


@gluon.jit
def fetch(x, z, row, column, full, tile, across: gl.constexpr, batched: gl.constexpr):
    """Begin to copy the tile of x, or of its entry z, at (row, column), which lies the other way if ``across``."""
    line, at = (column, row) if across else (row, column)
    if batched:
        load_tile(x, [z, line, at], full, boxed(tile))
    else:
        load_tile(x, [line, at], full, tile)


@gluon.jit
def leave(c, z, i, j, tile, batched: gl.constexpr):
    """Begin to copy a tile to c, or to its entry z, at (i, j)."""
    if batched:
        store_tile(c, [z, i, j], boxed(tile))
    else:
        store_tile(c, [i, j], tile)


@gluon.jit
def grid_of(extents, plan: gl.constexpr):
    """How many tiles c has along its rows and columns, and in how many steps k is walked."""
    return gl.cdiv(extents.m, plan.rows), gl.cdiv(extents.n, plan.columns + plan.more), gl.cdiv(extents.k, plan.depth)


@gluon.jit
def count_of(tiles_m, tiles_n, entries):
    """How many tiles there are in all."""
    if entries is not None:
        return tiles_m * tiles_n * entries
    else:
        return tiles_m * tiles_n


@gluon.jit
def tile_of_c(index, tiles_m, tiles_n, plan: gl.constexpr):
    """(entry, row of tiles, column of tiles) of the ``index``-th tile of c."""
    tile, z = index, 0
    if plan.batched:
        tile, z = index % (tiles_m * tiles_n), index // (tiles_m * tiles_n)
    tile_m, tile_n = tile_index(tile, tiles_m, tiles_n, plan.group)
    return z, tile_m, tile_n


@gluon.jit
def loader(operands, tiles, ring, extents, plan: gl.constexpr):
    """One warp that keeps tiles of a and of b on their way, and waits only for a stage to become free."""
    bits: gl.constexpr = operands.a.dtype.primitive_bitwidth
    moved: gl.constexpr = (plan.rows + plan.columns + plan.more) * plan.depth * bits // 8
    slices: gl.constexpr = plan.slices
    tiles_m, tiles_n, steps = grid_of(extents, plan)
    unit = 0
    for index in range(gl.program_id(0), count_of(tiles_m, tiles_n, extents.entries), gl.num_programs(0)):
        z, tile_m, tile_n = tile_of_c(index, tiles_m, tiles_n, plan)
        i, j = tile_m * plan.rows, tile_n * (plan.columns + plan.more)
        for step in range(steps):
            stage, full = acquire(ring, unit, moved)
            kk = step * plan.depth
            for part in gl.static_range(slices):
                fetch(operands.a, z * plan.a_batched, i, kk + part * (plan.depth // slices), full,
                      tiles.a.index(stage * slices + part), plan.a_across, plan.batched)  # fmt: skip
            fetch(operands.b, z * plan.b_batched, kk, j, full, tiles.b.index(stage), plan.b_across, plan.batched)
            if plan.more:
                fetch(operands.b_more, z * plan.b_batched, kk, j + plan.columns, full, tiles.b_more.index(stage),
                      plan.b_across, plan.batched)  # fmt: skip
            unit += 1


@gluon.jit
def send(c, c_tiles, first: gl.constexpr, apart: gl.constexpr, acc, z, i, j, batched: gl.constexpr):
    """Write an accumulator's columns to c, or to its entry z, from column j on, through the tiles of shared memory from
    ``first`` on, so far ``apart``, or through that one alone if they are 0 apart."""
    box: gl.constexpr = c_tiles.shape[2]
    if acc.shape[1] == box:
        c_tiles.index(first).store(acc.to(c.dtype))
        fence_async_shared()
        leave(c, z, i, j, c_tiles.index(first), batched)
    elif acc.shape[1] > 2 * box:
        left, right = halves(acc)
        send(c, c_tiles, first, apart, left, z, i, j, batched)
        if not apart:
            tma.store_wait(0)
        send(c, c_tiles, first + apart * (acc.shape[1] // (2 * box)), apart, right, z, i, j + acc.shape[1] // 2,
             batched)  # fmt: skip
    else:
        left, right = halves(acc.to(c.dtype))
        c_tiles.index(first).store(left)
        if apart:
            c_tiles.index(first + apart).store(right)
        fence_async_shared()
        leave(c, z, i, j, c_tiles.index(first), batched)
        if not apart:
            tma.store_wait(0)
            c_tiles.index(first).store(right)
            fence_async_shared()
        leave(c, z, i, j + box, c_tiles.index(first + apart), batched)


@gluon.jit
def put(c, acc, z, i, j, m, n):
    """Write an accumulator to the z-th (m, n) array at c, whose rows begin anywhere, a row of a warp's elements at a
    time."""
    laid: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    row = i + gl.arange(0, acc.shape[0], gl.SliceLayout(1, laid))
    column = j + gl.arange(0, acc.shape[1], gl.SliceLayout(0, laid))
    tile = gl.convert_layout(acc.to(c.dtype.element_ty), laid)
    at = (c + (gl.to_tensor(z).to(gl.int64) * m + row) * n)[:, None] + column[None, :]
    gl.store(at, tile, mask=(row < m)[:, None] & (column < n)[None, :])


@gluon.jit
def write(c, c_tiles, acc, acc_more, at, extents, half: gl.constexpr, plan: gl.constexpr):
    """Write a consumer's accumulators to c."""
    z, i, j = at
    boxes: gl.constexpr = c_tiles.shape[0] // 2
    first: gl.constexpr = half if plan.c_in_stages else half * boxes
    apart: gl.constexpr = 2 if plan.c_in_stages else (1 if boxes > 1 else 0)
    if plan.described:
        tma.store_wait(0)  # what was in these tiles before has left
        send(c, c_tiles, first, apart, acc, z, i, j, plan.batched)
        if plan.more:
            if not apart:
                tma.store_wait(0)
            beyond: gl.constexpr = first + apart * (acc.shape[1] // c_tiles.shape[2])
            send(c, c_tiles, beyond, apart, acc_more, z, i, j + acc.shape[1], plan.batched)
    else:
        put(c, acc, z, i, j, extents.m, extents.n)
        if plan.more:
            put(c, acc_more, z, i, j + acc.shape[1], extents.m, extents.n)


@gluon.jit
def halves(tile):
    """The left and the right half of a tile's columns, in the registers that they are in."""
    return tile.reshape([tile.shape[0], 2, tile.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def biased(acc, bias, j, n):
    """An accumulator and the bias of its columns, which begin at j."""
    if bias is not None:
        column = gl.to_tensor(j).to(gl.int64) + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        return acc + gl.load(bias + column, mask=column < n, other=0.0).to(gl.float32)[None, :]
    else:
        return acc


@gluon.jit
def followed(acc, bias, residual, residual_row, i, j, m, n, activation: gl.constexpr, low: gl.constexpr):
    """f(acc + bias) + residual of the tile at (i, j), a few columns after the other: an operation on all of a tile
    takes as many registers again as it has."""
    if acc.shape[1] > PART:
        left, right = halves(acc)
        left = followed(left, bias, residual, residual_row, i, j, m, n, activation, low)
        right = followed(right, bias, residual, residual_row, i, j + acc.shape[1] // 2, m, n, activation, low)
        both = gl.join(left, right).permute([0, 2, 1]).reshape(acc.shape)
        return gl.convert_layout(both, acc.type.layout)
    else:
        y = activated(biased(acc, bias, j, n), activation, low)
        if residual is not None:
            row = i + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
            column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
            at = (residual + (row.to(gl.int64) * residual_row + j))[:, None] + column[None, :]
            y += gl.load(at, mask=(row < m)[:, None] & (j + column < n)[None, :], other=0.0).to(gl.float32)
        return y


@gluon.jit
def complete(c, c_tiles, epilogue, acc, acc_more, at, extents, half: gl.constexpr, plan: gl.constexpr,
             bits: gl.constexpr):  # fmt: skip
    """What follows a consumer's sums, and their way to memory; operands have elements of so many ``bits``."""
    bias, residual, residual_row, pre = epilogue
    m, n, k, entries = extents
    _, i, j = at
    activation: gl.constexpr = plan.activation  # Triton 3.6 hands on no word of a tuple
    if plan.described:
        line: gl.constexpr = 128 // bits
        n = n // line * line  # what c's rows are multiples of: elements that lie side by side are read together
    extents = GemmExtents(m, n, k, entries)
    if pre is not None:
        acc = biased(acc, bias, j, n)
        if plan.more:
            acc_more = biased(acc_more, bias, j + plan.columns, n)
        write(pre, c_tiles, acc, acc_more, at, extents, half, plan)
    if activation is not None:
        rest = bias if pre is None else None
        acc = followed(acc, rest, residual, residual_row, i, j, m, n, activation, bits == 16)
        if plan.more:
            acc_more = followed(acc_more, rest, residual, residual_row, i, j + plan.columns, m, n, activation,
                                bits == 16)  # fmt: skip
    write(c, c_tiles, acc, acc_more, at, extents, half, plan)


@gluon.jit
def operand_of(tile, across: gl.constexpr):
    """A tile in shared memory as the matrix unit takes it."""
    if across:
        tile = tile.permute([1, 0])
    return tile


@gluon.jit
def consumer(tiles, c_tiles, ring, c, epilogue, extents, plan: gl.constexpr, half: gl.constexpr):
    """Four warps that multiply half of the rows of each tile: a product of one stage is in flight while the next one is
    issued, and the stage before is handed back when its product is done."""
    stages: gl.constexpr = plan.stages
    columns: gl.constexpr = plan.columns
    more: gl.constexpr = plan.more
    own: gl.constexpr = plan.rows // 2
    bits: gl.constexpr = tiles.a.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])
    more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, more if more else columns, 256 // bits])
    tiles_m, tiles_n, steps = grid_of(extents, plan)
    unit = 0
    for index in range(gl.program_id(0), count_of(tiles_m, tiles_n, extents.entries), gl.num_programs(0)):
        z, tile_m, tile_n = tile_of_c(index, tiles_m, tiles_n, plan)
        acc = gl.zeros([own, columns], gl.float32, layout)
        if more:
            acc_more = gl.zeros([own, more], gl.float32, more_layout)
        for step in range(steps):
            stage = await_full(ring, unit)
            part = tiles.a.index(stage).slice(half * own, own, 1 if plan.a_across else 0)
            part = operand_of(part, plan.a_across)
            acc = warpgroup_mma(part, operand_of(tiles.b.index(stage), plan.b_across), acc, is_async=True)
            if more:
                b_more = operand_of(tiles.b_more.index(stage), plan.b_across)
                acc_more = warpgroup_mma(part, b_more, acc_more, is_async=True)
                acc, acc_more = warpgroup_mma_wait(2, deps=(acc, acc_more))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(ring.empty.index((unit + stages - 1) % stages), pred=step > 0)
            unit += 1
        if more:
            acc, acc_more = warpgroup_mma_wait(0, deps=(acc, acc_more))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(ring.empty.index((unit + stages - 1) % stages))
        if plan.c_in_stages:
            together()  # a's stages are written over, which other warps' products may still have read
        if not more:
            acc_more = acc
        at = TileOrigin(z, tile_m * plan.rows + half * own, tile_n * (columns + more))
        complete(c, c_tiles, epilogue, acc, acc_more, at, extents, half, plan, bits)
    if plan.described:
        tma.store_wait(0)


@gluon.jit
def operand_tiles(dtype: gl.constexpr, lines: gl.constexpr, length: gl.constexpr, across: gl.constexpr,
                  stages: gl.constexpr):  # fmt: skip
    """A ring's tiles of an operand, of so many lines; of lines along the other axis if ``across``."""
    rows: gl.constexpr = length if across else lines
    columns: gl.constexpr = lines if across else length
    bits: gl.constexpr = dtype.primitive_bitwidth
    line: gl.constexpr = columns * bits // 8
    layout: gl.constexpr = gl.NVMMASharedLayout(128 if line > 128 else line, bits, 2)
    return gl.allocate_shared_memory(dtype, [stages, rows, columns], layout)


@gluon.jit
def result_tiles(c, a_tiles, plan: gl.constexpr):
    """Where c's tile waits on its way to memory, half of its rows a consumer: a's stages, or as much as the box of c
    holds, or all boxes of 192 and of 160 columns."""
    bits: gl.constexpr = c.dtype.primitive_bitwidth
    if plan.c_in_stages:
        layout: gl.constexpr = gl.NVMMASharedLayout(128, bits, 2)
        return as_tiles(a_tiles, 2 * plan.stages, plan.rows // 2, 1024 // bits, layout)
    else:
        box: gl.constexpr = c.block_type.shape[1 + plan.batched]
        boxes: gl.constexpr = (plan.columns + plan.more) // box if plan.more and plan.c_whole else 1
        line: gl.constexpr = box * bits // 8
        boxed_layout: gl.constexpr = gl.NVMMASharedLayout(128 if line > 128 else line, bits, 2)
        return gl.allocate_shared_memory(c.dtype, [2 * boxes, plan.rows // 2, box], boxed_layout)


@gluon.jit
def by_roles(operands, c, epilogue, extents, plan: gl.constexpr):
    """c and what follows it, by a loader and two consumers."""
    dtype: gl.constexpr = operands.a.dtype
    a_tiles = operand_tiles(dtype, plan.rows, plan.depth, plan.a_across, plan.stages)
    b_tiles = operand_tiles(dtype, plan.depth, plan.columns, plan.b_across, plan.stages)
    more_tiles = b_tiles
    if plan.more:
        more_tiles = operand_tiles(dtype, plan.depth, plan.more, plan.b_across, plan.stages)
    c_tiles = a_tiles
    if plan.described:
        c_tiles = result_tiles(c, a_tiles, plan)
    tiles = Operands(a_tiles, b_tiles, more_tiles)
    ring = ring_of(plan.stages, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (tiles, c_tiles, ring, c, epilogue, extents, plan, 0)),
            (consumer, (tiles, c_tiles, ring, c, epilogue, extents, plan, 1)),
            (loader, (operands, tiles, ring, extents, plan)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit(do_not_specialize=["m", "n", "k", "entries"])
def matmul_by_roles(a, b, b_more, c, m, n, k, entries, plan: gl.constexpr):
    """c = a b."""
    by_roles(Operands(a, b, b_more), c, Epilogue(None, None, None, None), GemmExtents(m, n, k, entries), plan)


@gluon.jit(do_not_specialize=["m", "n", "k"])
def linear_by_roles(x, weight, weight_more, bias, residual, y, pre, residual_row, m, n, k, plan: gl.constexpr):
    """y, and pre unless that is None; weight: described as (k, n)."""
    epilogue = Epilogue(bias, residual, residual_row, pre)
    by_roles(Operands(x, weight, weight_more), y, epilogue, GemmExtents(m, n, k, None), plan)
