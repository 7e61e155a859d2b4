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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from portakern.backends.triton.hopper._warps import (
    CONSUMER_REGISTERS,
    LOADER_REGISTERS,
    PART,
    GemmExtents,
    Operands,
    count_of,
    grid_of,
    halves,
    loader,
    tile_of_c,
)
from portakern.backends.triton.lib.gluon import await_full, give_back, ring_of

SLICE = gl.constexpr(8)  # of k: 32 bytes


@builtin
def multiply_add(a, b, acc, _semantic=None):
    """acc + a b by the threads' own instructions, one after the other along k. Gluon's own refuses so short a k."""
    made = _semantic.builder.create_dot(a.handle, b.handle, acc.handle, ir.INPUT_PRECISION.IEEE, 0)
    return gl.tensor(made, acc.type)


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
def turned_consumer(tiles, ring, c, extents, plan: gl.constexpr, half: gl.constexpr):
    """Four warps that multiply half of the columns of each tile."""
    rows: gl.constexpr = plan.rows
    own: gl.constexpr = plan.columns // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 8])
    fragments: gl.constexpr = gl.DotOperandLayout(0, layout, 1)
    tiles_m, tiles_n, steps = grid_of(extents, plan)
    unit = 0
    for index in range(gl.program_id(0), count_of(tiles_m, tiles_n, extents.entries), gl.num_programs(0)):
        z, tile_m, tile_n = tile_of_c(index, tiles_m, tiles_n, plan)
        i, j = tile_m * plan.rows, tile_n * plan.columns
        acc = gl.zeros([own, rows], gl.float32, layout)
        for _ in range(steps):
            stage = await_full(ring, unit)
            bt = tiles.b.index(stage).slice(half * own, own, 1).permute([1, 0]).load(fragments)
            acc = warpgroup_mma(bt, tiles.a.index(stage).permute([1, 0]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            give_back(ring.empty.index(stage), True)
            unit += 1
        keep_turned(c, acc, z, i, j + half * own, extents.m, extents.n)


@gluon.jit(do_not_specialize=["m", "k", "entries"])
def matmul_turned(a, b, c, m, n, k, entries, plan: gl.constexpr):
    """c = a b in tf32."""
    extents, operands = GemmExtents(m, n, k, entries), Operands(a, b, None)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    a_tiles = gl.allocate_shared_memory(gl.float32, [plan.stages, plan.rows, plan.depth], layout)
    b_tiles = gl.allocate_shared_memory(gl.float32, [plan.stages, plan.depth, plan.columns], layout)
    tiles = Operands(a_tiles, b_tiles, None)
    ring = ring_of(plan.stages, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (turned_consumer, (tiles, ring, c, extents, plan, 0)),
            (turned_consumer, (tiles, ring, c, extents, plan, 1)),
            (loader, (operands, tiles, ring, extents, plan)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def slices_consumer(tiles, ring, c, extents, plan: gl.constexpr):
    """Eight warps that multiply a slice of k after the other."""
    rows: gl.constexpr = plan.rows
    columns: gl.constexpr = plan.columns
    slices: gl.constexpr = plan.slices
    # Four elements of b side by side, and rows of a that lie in different banks.
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 2], [1, 0])
    of_a: gl.constexpr = gl.DotOperandLayout(0, layout, 0)
    of_b: gl.constexpr = gl.DotOperandLayout(1, layout, 0)
    tiles_m, tiles_n, steps = grid_of(extents, plan)
    unit = 0
    for index in range(gl.program_id(0), count_of(tiles_m, tiles_n, extents.entries), gl.num_programs(0)):
        z, tile_m, tile_n = tile_of_c(index, tiles_m, tiles_n, plan)
        i, j = tile_m * plan.rows, tile_n * plan.columns
        acc = gl.zeros([rows, columns], gl.float32, layout)
        for _ in range(steps):
            stage = await_full(ring, unit)
            for part in gl.static_range(slices):
                at = tiles.a.index(stage * slices + part).load(of_a)
                bt = tiles.b.index(stage).slice(part * SLICE, SLICE, 0).load(of_b)
                acc = multiply_add(at, bt, acc)
            give_back(ring.empty.index(stage), True)
            unit += 1
        keep(c, acc, z, i, j, extents.m, extents.n)


@gluon.jit(do_not_specialize=["m", "k", "entries"])
def matmul_in_slices(a, b, c, m, n, k, entries, plan: gl.constexpr):
    """c = a b in ieee. a: described in boxes of a slice's columns. Of ``num_warps`` 8."""
    extents, operands = GemmExtents(m, n, k, entries), Operands(a, b, None)
    a_layout: gl.constexpr = gl.NVMMASharedLayout(32, 32, 2)
    b_layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    a_tiles = gl.allocate_shared_memory(gl.float32, [plan.stages * plan.slices, plan.rows, SLICE], a_layout)
    b_tiles = gl.allocate_shared_memory(gl.float32, [plan.stages, plan.depth, plan.columns], b_layout)
    tiles = Operands(a_tiles, b_tiles, None)
    ring = ring_of(plan.stages, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (slices_consumer, (tiles, ring, c, extents, plan)),
            (loader, (operands, tiles, ring, extents, plan)),
        ],
        [1],
        [LOADER_REGISTERS],
    )
