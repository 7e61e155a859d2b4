"""Matrix products of float32 by warps that have roles, where :mod:`._warps` has no way.

    c[z, i, j] = sum_k a[z, i, k] b[z, k, j]

a's lines run along k and b's along j, as both mostly lie. One warp loads, as there; c leaves from registers.

``matmul_turned``, in tf32: the matrix unit reads operands from shared memory along k alone, which b's tile does not lie
along, but its first operand it takes from registers too. So it multiplies c^T = b^T a^T, with fragments of b^T that
threads gather from the tile as it lies, and nobody copies b. While one group of warps gathers, the other's product
runs. A tile has 256 rows of a and 128 columns of b.

``matmul_in_slices``, in ieee, which are the threads' own instructions: a thread has 8 x 8 elements of c, and of the
operands no more in registers than a slice of k has, since all of a step's would not find room. A slice of a is a box of
its own in shared memory: rows of 32 bytes, which four neighbours read without waiting for each other.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from portakern.backends.triton.hopper._warps import (
    CONSUMER_REGISTERS,
    LOADER_REGISTERS,
    PART,
    barriers,
    fetch,
    halves,
    loader,
)
from portakern.backends.triton.lib.gluon import give_back
from portakern.backends.triton.lib.matmul import place

SLICE = gl.constexpr(8)  # of k: 32 bytes


@builtin
def multiply_add(a, b, acc, _semantic=None):
    """acc + a b by the threads' own instructions, one after the other along k. Gluon's own refuses so short a k."""
    made = _semantic.builder.create_dot(a.handle, b.handle, acc.handle, ir.INPUT_PRECISION.IEEE, 0)
    return gl.tensor(made, acc.type)


@gluon.jit
def place_of(index, m, n, rows: gl.constexpr, columns: gl.constexpr, group: gl.constexpr, batched: gl.constexpr):
    """(row, column, entry) of the ``index``-th tile of c."""
    tiles_m, tiles_n = gl.cdiv(m, rows), gl.cdiv(n, columns)
    tile, z = index, 0
    if batched:
        tile, z = index % (tiles_m * tiles_n), index // (tiles_m * tiles_n)
    tile_m, tile_n = place(tile, tiles_m, tiles_n, group)
    return tile_m * rows, tile_n * columns, z


@gluon.jit
def keep(c, acc, z, i, j, m, n):
    """Write an accumulator to the z-th (m, n) array at c, at (i, j)."""
    row = i + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    column = j + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    line = c + (gl.to_tensor(z).to(gl.int64) * m + row) * n
    gl.store(line[:, None] + column[None, :], acc.to(c.dtype.element_ty),
             mask=(row < m)[:, None] & (column < n)[None, :])  # fmt: skip


@gluon.jit
def keep_turned(c, acc, z, i, j, m, n):
    """The same of an accumulator whose columns are rows of c, some after the other: each row is an address."""
    if acc.shape[1] > 2 * PART:
        left, right = halves(acc)
        keep_turned(c, left, z, i, j, m, n)
        keep_turned(c, right, z, i + acc.shape[1] // 2, j, m, n)
    else:
        row = i + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        column = j + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        line = c + (gl.to_tensor(z).to(gl.int64) * m + row) * n
        gl.store(line[None, :] + column[:, None], acc.to(c.dtype.element_ty),
                 mask=(row < m)[None, :] & (column < n)[:, None])  # fmt: skip


@gluon.jit
def turned_consumer(c, a_tiles, b_tiles, full, empty, m, n, k, entries,
                    rows: gl.constexpr, columns: gl.constexpr, depth: gl.constexpr, group: gl.constexpr,
                    batched: gl.constexpr, half: gl.constexpr):  # fmt: skip
    stages: gl.constexpr = full.shape[0]
    own: gl.constexpr = columns // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 8])
    fragments: gl.constexpr = gl.DotOperandLayout(0, layout, 1)
    count = 0
    tiles = gl.cdiv(m, rows) * gl.cdiv(n, columns) * entries
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        i, j, z = place_of(index, m, n, rows, columns, group, batched)
        acc = gl.zeros([own, rows], gl.float32, layout)
        for _ in range(gl.cdiv(k, depth)):
            stage = count % stages
            mbarrier.wait(full.index(stage), count // stages & 1)
            bt = b_tiles.index(stage).slice(half * own, own, 1).permute([1, 0]).load(fragments)
            acc = warpgroup_mma(bt, a_tiles.index(stage).permute([1, 0]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            give_back(empty.index(stage), True)
            count += 1
        keep_turned(c, acc, z, i, j + half * own, m, n)


@gluon.jit(do_not_specialize=["m", "k", "entries"])
def matmul_turned(a, b, c, m, n, k, entries,
                  rows: gl.constexpr, columns: gl.constexpr, depth: gl.constexpr, group: gl.constexpr,
                  stages: gl.constexpr, batched: gl.constexpr, a_batched: gl.constexpr,
                  b_batched: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    a_tiles = gl.allocate_shared_memory(gl.float32, [stages, rows, depth], layout)
    b_tiles = gl.allocate_shared_memory(gl.float32, [stages, depth, columns], layout)
    full, empty = barriers(stages, 2)
    gl.warp_specialize(
        [
            (turned_consumer, (c, a_tiles, b_tiles, full, empty, m, n, k, entries, rows, columns, depth, group, batched,
                               0)),
            (turned_consumer, (c, a_tiles, b_tiles, full, empty, m, n, k, entries, rows, columns, depth, group, batched,
                               1)),
            (loader, (a, b, b, a_tiles, b_tiles, b_tiles, full, empty, m, n, k, entries,
                      rows, columns, depth, group, 0, 0, 0, batched, a_batched, b_batched)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def loader_of_slices(a, b, a_tiles, b_tiles, full, empty, m, n, k, entries,
                     rows: gl.constexpr, columns: gl.constexpr, depth: gl.constexpr, group: gl.constexpr,
                     batched: gl.constexpr, a_batched: gl.constexpr, b_batched: gl.constexpr):  # fmt: skip
    stages: gl.constexpr = full.shape[0]
    slices: gl.constexpr = depth // SLICE
    count = 0
    tiles = gl.cdiv(m, rows) * gl.cdiv(n, columns) * entries
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        i, j, z = place_of(index, m, n, rows, columns, group, batched)
        for step in range(gl.cdiv(k, depth)):
            stage = count % stages
            mbarrier.wait(empty.index(stage), (count // stages & 1) ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, (rows + columns) * depth * 4)
            for part in gl.static_range(slices):
                kk = step * depth + part * SLICE
                fetch(a, z * a_batched, i, kk, arrived, a_tiles.index(stage * slices + part), batched)
            fetch(b, z * b_batched, step * depth, j, arrived, b_tiles.index(stage), batched)
            count += 1


@gluon.jit
def slices_consumer(c, a_tiles, b_tiles, full, empty, m, n, k, entries,
                    rows: gl.constexpr, columns: gl.constexpr, depth: gl.constexpr, group: gl.constexpr,
                    batched: gl.constexpr):  # fmt: skip
    stages: gl.constexpr = full.shape[0]
    slices: gl.constexpr = depth // SLICE
    # Four elements of b side by side, and rows of a that lie in different banks.
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 2], [1, 0])
    of_a: gl.constexpr = gl.DotOperandLayout(0, layout, 0)
    of_b: gl.constexpr = gl.DotOperandLayout(1, layout, 0)
    count = 0
    tiles = gl.cdiv(m, rows) * gl.cdiv(n, columns) * entries
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        i, j, z = place_of(index, m, n, rows, columns, group, batched)
        acc = gl.zeros([rows, columns], gl.float32, layout)
        for _ in range(gl.cdiv(k, depth)):
            stage = count % stages
            mbarrier.wait(full.index(stage), count // stages & 1)
            for part in gl.static_range(slices):
                at = a_tiles.index(stage * slices + part).load(of_a)
                bt = b_tiles.index(stage).slice(part * SLICE, SLICE, 0).load(of_b)
                acc = multiply_add(at, bt, acc)
            give_back(empty.index(stage), True)
            count += 1
        keep(c, acc, z, i, j, m, n)


@gluon.jit(do_not_specialize=["m", "k", "entries"])
def matmul_in_slices(a, b, c, m, n, k, entries,
                     rows: gl.constexpr, columns: gl.constexpr, depth: gl.constexpr, group: gl.constexpr,
                     stages: gl.constexpr, batched: gl.constexpr, a_batched: gl.constexpr,
                     b_batched: gl.constexpr):  # fmt: skip
    """a: described in boxes of a slice's columns. Of ``num_warps`` 8."""
    a_layout: gl.constexpr = gl.NVMMASharedLayout(32, 32, 2)
    b_layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    a_tiles = gl.allocate_shared_memory(gl.float32, [stages * (depth // SLICE), rows, SLICE], a_layout)
    b_tiles = gl.allocate_shared_memory(gl.float32, [stages, depth, columns], b_layout)
    full, empty = barriers(stages, 1)
    gl.warp_specialize(
        [
            (slices_consumer, (c, a_tiles, b_tiles, full, empty, m, n, k, entries, rows, columns, depth, group,
                               batched)),
            (loader_of_slices, (a, b, a_tiles, b_tiles, full, empty, m, n, k, entries, rows, columns, depth, group,
                                batched, a_batched, b_batched)),
        ],
        [1],
        [LOADER_REGISTERS],
    )  # fmt: skip
