"""The matrix product by warps that have roles (Gluon), and the linear layer, for large products of 16-bit numbers.

    c[i, j] = sum_k a[i, k] b[k, j]        or, with pre = c + bias[j],    c = f(pre) + residual[i, j]

``batched``: of each of some entries, c[z, i, j] = sum_k a[z, i, k] b[z, k, j]; an operand that has one entry for all is
not ``a_batched`` or not ``b_batched``.

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
from portakern.backends.triton.lib.gluon import load_tile, store_tile
from portakern.backends.triton.lib.matmul import place

together = getattr(gl, "barrier", None) or gl.thread_barrier

_OLD = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "reinterpret"))

LOADER_REGISTERS, CONSUMER_REGISTERS = gl.constexpr(24), gl.constexpr(240)
PART = gl.constexpr(32)  # columns of an accumulator that meet what follows the product at a time


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
def fetch(x, z, line, column, arrived, tile, batched: gl.constexpr):
    """Begin to copy the tile of x, or of its entry z, at (line, column)."""
    if batched:
        load_tile(x, [z, line, column], arrived, boxed(tile))
    else:
        load_tile(x, [line, column], arrived, tile)


@gluon.jit
def leave(c, z, i, j, tile, batched: gl.constexpr):
    """Begin to copy a tile to c, or to its entry z, at (i, j)."""
    if batched:
        store_tile(c, [z, i, j], boxed(tile))
    else:
        store_tile(c, [i, j], tile)


@gluon.jit
def barriers(stages: gl.constexpr, readers: gl.constexpr):
    """(full, empty): of each stage whether its operands have come, and whether all who read them are done."""
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=readers)
    fence_async_shared()  # copies arrive at them by the way that threads' writes take
    return full, empty


@gluon.jit
def loader(a, b, b_more, a_tiles, b_tiles, more_tiles, full, empty, m, n, k, entries,
           rows: gl.constexpr, columns: gl.constexpr, depth: gl.constexpr, group: gl.constexpr,
           a_across: gl.constexpr, b_across: gl.constexpr, more: gl.constexpr, batched: gl.constexpr,
           a_batched: gl.constexpr, b_batched: gl.constexpr):  # fmt: skip
    stages: gl.constexpr = full.shape[0]
    width: gl.constexpr = columns + more
    moved: gl.constexpr = (rows + width) * depth * a.dtype.primitive_bitwidth // 8
    tiles_m, tiles_n = gl.cdiv(m, rows), gl.cdiv(n, width)
    steps = gl.cdiv(k, depth)
    count = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n * entries, gl.num_programs(0)):
        tile, z = index, 0
        if batched:
            tile, z = index % (tiles_m * tiles_n), index // (tiles_m * tiles_n)
        tile_m, tile_n = place(tile, tiles_m, tiles_n, group)
        i, j = tile_m * rows, tile_n * width
        for step in range(steps):
            stage = count % stages
            mbarrier.wait(empty.index(stage), (count // stages & 1) ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, moved)
            kk = step * depth
            if a_across:
                fetch(a, z * a_batched, kk, i, arrived, a_tiles.index(stage), batched)
            else:
                fetch(a, z * a_batched, i, kk, arrived, a_tiles.index(stage), batched)
            if b_across:
                fetch(b, z * b_batched, j, kk, arrived, b_tiles.index(stage), batched)
            else:
                fetch(b, z * b_batched, kk, j, arrived, b_tiles.index(stage), batched)
            if more:
                if b_across:
                    fetch(b_more, z * b_batched, j + columns, kk, arrived, more_tiles.index(stage), batched)
                else:
                    fetch(b_more, z * b_batched, kk, j + columns, arrived, more_tiles.index(stage), batched)
            count += 1


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
def write(c, c_tiles, acc, acc_more, z, i, j, m, n, half: gl.constexpr, more: gl.constexpr, described: gl.constexpr,
          batched: gl.constexpr, single: gl.constexpr):  # fmt: skip
    """Write a consumer's accumulators to c, or to its entry z, at (i, j). ``single``: the tiles are a's stages."""
    boxes: gl.constexpr = c_tiles.shape[0] // 2
    first: gl.constexpr = half if single else half * boxes
    apart: gl.constexpr = 2 if single else (1 if boxes > 1 else 0)
    if described:
        tma.store_wait(0)  # what was in these tiles before has left
        send(c, c_tiles, first, apart, acc, z, i, j, batched)
        if more:
            if not apart:
                tma.store_wait(0)
            beyond: gl.constexpr = first + apart * (acc.shape[1] // c_tiles.shape[2])
            send(c, c_tiles, beyond, apart, acc_more, z, i, j + acc.shape[1], batched)
    else:
        put(c, acc, z, i, j, m, n)
        if more:
            put(c, acc_more, z, i, j + acc.shape[1], m, n)


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
def complete(c, bias, residual, residual_row, pre, c_tiles, acc, acc_more, z, i, j, m, n, columns: gl.constexpr,
             half: gl.constexpr, more: gl.constexpr, described: gl.constexpr, batched: gl.constexpr,
             single: gl.constexpr, activation: gl.constexpr, bits: gl.constexpr):  # fmt: skip
    """What follows a consumer's sums at (i, j), and their way to memory; operands have elements of so many ``bits``."""
    if described:
        line: gl.constexpr = 128 // bits
        n = n // line * line  # what c's rows are multiples of: elements that lie side by side are read together
    if pre is not None:
        acc = biased(acc, bias, j, n)
        if more:
            acc_more = biased(acc_more, bias, j + columns, n)
        write(pre, c_tiles, acc, acc_more, z, i, j, m, n, half, more, described, batched, single)
    if activation is not None:
        rest = bias if pre is None else None
        acc = followed(acc, rest, residual, residual_row, i, j, m, n, activation, bits == 16)
        if more:
            acc_more = followed(acc_more, rest, residual, residual_row, i, j + columns, m, n, activation, bits == 16)
    write(c, c_tiles, acc, acc_more, z, i, j, m, n, half, more, described, batched, single)


@gluon.jit
def consumer(a, b, b_more, c, bias, residual, residual_row, pre, a_tiles, b_tiles, more_tiles, c_tiles, full, empty,
             m, n, k, entries,
             rows: gl.constexpr, columns: gl.constexpr, depth: gl.constexpr, group: gl.constexpr,
             a_across: gl.constexpr, b_across: gl.constexpr, more: gl.constexpr, described: gl.constexpr,
             batched: gl.constexpr, single: gl.constexpr, activation: gl.constexpr, half: gl.constexpr):  # fmt: skip
    stages: gl.constexpr = full.shape[0]
    width: gl.constexpr = columns + more
    own: gl.constexpr = rows // 2
    unit: gl.constexpr = 256 // a.dtype.primitive_bitwidth  # of k, in one instruction
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, unit])
    more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, more if more else columns, unit])
    tiles_m, tiles_n = gl.cdiv(m, rows), gl.cdiv(n, width)
    steps = gl.cdiv(k, depth)
    count = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n * entries, gl.num_programs(0)):
        tile, z = index, 0
        if batched:
            tile, z = index % (tiles_m * tiles_n), index // (tiles_m * tiles_n)
        tile_m, tile_n = place(tile, tiles_m, tiles_n, group)
        acc = gl.zeros([own, columns], gl.float32, layout)
        if more:
            acc_more = gl.zeros([own, more], gl.float32, more_layout)
        for step in range(steps):
            stage = count % stages
            mbarrier.wait(full.index(stage), count // stages & 1)
            if a_across:
                at = a_tiles.index(stage).slice(half * own, own, 1).permute([1, 0])
            else:
                at = a_tiles.index(stage).slice(half * own, own, 0)
            bt = b_tiles.index(stage)
            if b_across:
                bt = bt.permute([1, 0])
            acc = warpgroup_mma(at, bt, acc, is_async=True)
            if more:
                bt_more = more_tiles.index(stage)
                if b_across:
                    bt_more = bt_more.permute([1, 0])
                acc_more = warpgroup_mma(at, bt_more, acc_more, is_async=True)
                acc, acc_more = warpgroup_mma_wait(2, deps=(acc, acc_more))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((count + stages - 1) % stages), pred=step > 0)
            count += 1
        if more:
            acc, acc_more = warpgroup_mma_wait(0, deps=(acc, acc_more))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((count + stages - 1) % stages))
        if single:
            together()  # a's stages are written over, which other warps' products may still have read
        if not more:
            acc_more = acc
        complete(c, bias, residual, residual_row, pre, c_tiles, acc, acc_more, z, tile_m * rows + half * own,
                 tile_n * width, m, n, columns, half, more, described, batched, single, activation,
                 a.dtype.primitive_bitwidth)  # fmt: skip
    if described:
        tma.store_wait(0)


@gluon.jit
def by_roles(a, b, b_more, c, bias, residual, residual_row, pre, m, n, k, entries,
             rows: gl.constexpr, columns: gl.constexpr, depth: gl.constexpr, group: gl.constexpr,
             stages: gl.constexpr, a_across: gl.constexpr, b_across: gl.constexpr, more: gl.constexpr,
             described: gl.constexpr, batched: gl.constexpr, a_batched: gl.constexpr, b_batched: gl.constexpr,
             single: gl.constexpr, spread: gl.constexpr, activation: gl.constexpr):  # fmt: skip
    """described: c and pre are descriptors, and no pointers. bias, residual and pre may be None."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, a.dtype.primitive_bitwidth, 2)
    if a_across:
        a_tiles = gl.allocate_shared_memory(a.dtype, [stages, depth, rows], layout)
    else:
        a_tiles = gl.allocate_shared_memory(a.dtype, [stages, rows, depth], layout)
    if b_across:
        b_tiles = gl.allocate_shared_memory(b.dtype, [stages, columns, depth], layout)
    else:
        b_tiles = gl.allocate_shared_memory(b.dtype, [stages, depth, columns], layout)
    more_tiles = b_tiles
    if more:
        if b_across:
            more_tiles = gl.allocate_shared_memory(b.dtype, [stages, more, depth], layout)
        else:
            bits: gl.constexpr = b.dtype.primitive_bitwidth
            narrow: gl.constexpr = gl.NVMMASharedLayout(128 if more * bits > 1024 else more * bits // 8, bits, 2)
            more_tiles = gl.allocate_shared_memory(b.dtype, [stages, depth, more], narrow)
    c_tiles = a_tiles
    if described and single:
        layout_of_c: gl.constexpr = gl.NVMMASharedLayout(128, c.dtype.primitive_bitwidth, 2)
        box_of_c: gl.constexpr = 1024 // c.dtype.primitive_bitwidth
        c_tiles = as_tiles(a_tiles, 2 * stages, rows // 2, box_of_c, layout_of_c)
    elif described:
        # As much of c's tile is in shared memory as its box holds, or all boxes of 192 and of 160 columns.
        box: gl.constexpr = c.block_type.shape[1 + batched]
        boxes: gl.constexpr = (columns + more) // box if more and spread else 1
        line: gl.constexpr = box * c.dtype.primitive_bitwidth // 8
        boxed_layout: gl.constexpr = gl.NVMMASharedLayout(128 if line > 128 else line, c.dtype.primitive_bitwidth, 2)
        c_tiles = gl.allocate_shared_memory(c.dtype, [2 * boxes, rows // 2, box], boxed_layout)
    full, empty = barriers(stages, 2)
    gl.warp_specialize(
        [
            (consumer, (a, b, b_more, c, bias, residual, residual_row, pre, a_tiles, b_tiles, more_tiles, c_tiles,
                        full, empty, m, n, k, entries,
                        rows, columns, depth, group, a_across, b_across, more, described, batched, single, activation,
                        0)),
            (consumer, (a, b, b_more, c, bias, residual, residual_row, pre, a_tiles, b_tiles, more_tiles, c_tiles,
                        full, empty, m, n, k, entries,
                        rows, columns, depth, group, a_across, b_across, more, described, batched, single, activation,
                        1)),
            (loader, (a, b, b_more, a_tiles, b_tiles, more_tiles, full, empty, m, n, k, entries,
                      rows, columns, depth, group, a_across, b_across, more, batched, a_batched, b_batched)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["m", "n", "k", "entries"])
def matmul_by_roles(a, b, b_more, c, m, n, k, entries,
                    rows: gl.constexpr, columns: gl.constexpr, depth: gl.constexpr, group: gl.constexpr,
                    stages: gl.constexpr, a_across: gl.constexpr, b_across: gl.constexpr, more: gl.constexpr,
                    described: gl.constexpr, batched: gl.constexpr, a_batched: gl.constexpr,
                    b_batched: gl.constexpr, single: gl.constexpr, spread: gl.constexpr):  # fmt: skip
    by_roles(a, b, b_more, c, None, None, 0, None, m, n, k, entries, rows, columns, depth, group, stages,
             a_across, b_across, more, described, batched, a_batched, b_batched, single, spread, None)  # fmt: skip


@gluon.jit(do_not_specialize=["m", "n", "k"])
def linear_by_roles(x, weight, weight_more, y, bias, residual, pre, residual_row, m, n, k,
                    rows: gl.constexpr, columns: gl.constexpr, depth: gl.constexpr, group: gl.constexpr,
                    stages: gl.constexpr, a_across: gl.constexpr, b_across: gl.constexpr, more: gl.constexpr,
                    described: gl.constexpr, single: gl.constexpr, spread: gl.constexpr,
                    activation: gl.constexpr):  # fmt: skip
    by_roles(x, weight, weight_more, y, bias, residual, residual_row, pre, m, n, k, 1, rows, columns, depth, group,
             stages, a_across, b_across, more, described, 0, 0, 0, single, spread, activation)  # fmt: skip
