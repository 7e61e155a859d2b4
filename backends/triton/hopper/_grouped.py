"""Products of groups of rows by warps that have roles (Gluon), for 16-bit numbers.

    c[i, j] = sum_k a[i, k] b[g, k, j]        or, with ``sums``, c[g, i, j] = sum_r a[r, i] b[r, j]

where g is the group of row i, or a sum over r is over the rows of g. The warps are those of :mod:`._warps`: one copies,
two groups of four multiply half of a tile's rows each, programs stay.

**Which tiles there are** is known on the device alone. Tiles are counted group after group, a group's from its first
row on, and a group without rows has none. Every warp walks along the ends to the group of its program's next tile, from
that of the tile before: a few instructions for each group, and no table that a kernel before this one would have to
write. Rows of no group are one more group, whose tiles have no step of k.

**The end of a group** is one that the copy engine knows (``lib.gluon_sequences``): rows behind it are read as 0 and not
written, so that a tile may reach over it, and no program writes with masks. Where rows are summed, both operands are 0
behind the end: what other groups hold there is not multiplied.

Source: the persistent scheduler of DeepGEMM (DeepSeek), which walks groups of aligned sizes so.
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

from portakern.backends.triton.hopper._warps import fetch, halves, leave, operand_of
from portakern.backends.triton.lib.gluon import (
    ROWS_FROM,
    accumulator,
    acquire,
    await_full,
    boxed,
    load_tile,
    ring_of,
    store_tile,
    tile_layout,
)
from portakern.backends.triton.lib.matmul import tile_index

LOADER_REGISTERS, CONSUMER_REGISTERS = gl.constexpr(40), gl.constexpr(232)


class GroupedPlan(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
      rows, columns, depth: extents of the tiles of a and b; group: rows of tiles that are finished together; stages: of
        the ring; box: columns of c that leave at a time.
      sums: rows are summed. b_across: b's lines run along k.
    """

    rows: int
    columns: int
    depth: int
    group: int
    stages: int
    box: int
    sums: bool = False
    b_across: bool = False


class GroupExtents(NamedTuple):
    """``ends``: where groups end, so far apart (``step``). m: rows of each group's c, where rows are summed; k: what is
    summed, where they are not."""

    ends: Any
    step: Any
    rows: Any
    groups: Any
    m: Any
    n: Any
    k: Any


class GroupedTiles(NamedTuple):
    """Shared memory: a ring's tiles of a and of b, and what waits there of c, half of a tile's rows each."""

    a: Any
    b: Any
    c: Any


@gluon.jit
def numbered(extents, plan: gl.constexpr):
    """How many groups there are, those among them that are rows of no group."""
    if plan.sums:
        return extents.groups
    else:
        return extents.groups + 1


@gluon.jit
def walk(index, group, first, start, stop, count, extents, plan: gl.constexpr):
    """(group, its first tile, its first row, its end, its tiles) of the ``index``-th tile, from those of a tile before
    on; the number of groups where there are fewer tiles. Ends that fall count as the largest before."""
    tiles_n = gl.cdiv(extents.n, plan.columns)
    while (index >= first + count) & (group < numbered(extents, plan)):
        first += count
        group += 1
        start = stop
        at = extents.ends + gl.to_tensor(group).to(gl.int64) * extents.step
        end = gl.load(at, mask=group < extents.groups, other=0)
        end = gl.minimum(gl.maximum(end, start), extents.rows).to(gl.int32)
        stop = gl.where(group < extents.groups, end, extents.rows)
        if plan.sums:
            count = gl.cdiv(extents.m, plan.rows) * tiles_n
        else:
            count = gl.cdiv(stop - start, plan.rows) * tiles_n
    return group, first, start, stop, count


@gluon.jit
def tile_of_group(tile, group, size, extents, plan: gl.constexpr):
    """(row in the group's c, column, steps of the sum) of a group's ``tile``-th tile."""
    tiles_n = gl.cdiv(extents.n, plan.columns)
    if plan.sums:
        tile_m, tile_n = tile_index(tile, gl.cdiv(extents.m, plan.rows), tiles_n, plan.group)
        return tile_m * plan.rows, tile_n * plan.columns, gl.cdiv(size, plan.depth)
    else:
        tile_m, tile_n = tile_index(tile, gl.cdiv(size, plan.rows), tiles_n, plan.group)
        steps = gl.where(group < extents.groups, gl.cdiv(extents.k, plan.depth), 0)
        return tile_m * plan.rows, tile_n * plan.columns, steps


@gluon.jit
def fetch_rows(x, stop, size, i, j, full, tile):
    """Begin to copy the tile at row i of the group of so many rows that ends at ``stop``, and at column j."""
    layout: gl.constexpr = tile_layout(tile.shape[1], 5)
    load_tile(x, [ROWS_FROM, stop, ROWS_FROM - size + i, 0, j], full, boxed(tile, layout))


@gluon.jit
def grouped_loader(a, b, tiles, ring, extents, plan: gl.constexpr):
    """One warp that keeps tiles of a and of b on their way, and waits only for a stage to become free."""
    moved: gl.constexpr = (plan.rows + plan.columns) * plan.depth * 2
    unit, index = 0, gl.program_id(0)
    zero = index * 0  # a number that is not compiled in: loops change it
    group, first, start, stop, count = walk(index, zero - 1, zero, zero, zero, zero, extents, plan)
    while group < numbered(extents, plan):
        size = stop - start
        i, j, steps = tile_of_group(index - first, group, size, extents, plan)
        for step in range(steps):
            stage, full = acquire(ring, unit, moved)
            kk = step * plan.depth
            if plan.sums:
                fetch_rows(a, stop, size, kk, i, full, tiles.a.index(stage))
                fetch_rows(b, stop, size, kk, j, full, tiles.b.index(stage))
            else:
                fetch_rows(a, stop, size, i, kk, full, tiles.a.index(stage))
                fetch(b, group, kk, j, full, tiles.b.index(stage), plan.b_across, True)
            unit += 1
        index += gl.num_programs(0)
        group, first, start, stop, count = walk(index, group, first, start, stop, count, extents, plan)


@gluon.jit
def leave_group(c, group, stop, size, i, j, tile, plan: gl.constexpr):
    """Begin to copy a tile to the group's rows, or its matrix, at (i, j)."""
    if plan.sums:
        leave(c, group, i, j, tile, True)
    else:
        layout: gl.constexpr = tile_layout(tile.shape[1], 5)
        store_tile(c, [ROWS_FROM, stop, ROWS_FROM - size + i, 0, j], boxed(tile, layout))


@gluon.jit
def send_group(c, waiting, acc, group, stop, size, i, j, plan: gl.constexpr):
    """Write an accumulator to c through ``waiting``, which has room for ``plan.box`` of its columns."""
    tma.store_wait(0)  # what was there before has left
    if plan.box == plan.columns:
        waiting.store(acc.to(c.dtype))
        fence_async_shared()
        leave_group(c, group, stop, size, i, j, waiting, plan)
    else:
        left, right = halves(acc.to(c.dtype))
        waiting.store(left)
        fence_async_shared()
        leave_group(c, group, stop, size, i, j, waiting, plan)
        tma.store_wait(0)
        waiting.store(right)
        fence_async_shared()
        leave_group(c, group, stop, size, i, j + plan.box, waiting, plan)


@gluon.jit
def grouped_consumer(c, tiles, ring, extents, plan: gl.constexpr, half: gl.constexpr):
    """Four warps that multiply half of the rows of each tile: a product of one stage is in flight while the next one is
    issued, and the stage before is handed back when its product is done. Where the group ends before these rows, stages
    are handed back as they come."""
    stages: gl.constexpr = plan.stages
    own: gl.constexpr = plan.rows // 2
    columns: gl.constexpr = plan.columns
    unit, index = 0, gl.program_id(0)
    zero = index * 0  # a number that is not compiled in: loops change it
    group, first, start, stop, count = walk(index, zero - 1, zero, zero, zero, zero, extents, plan)
    while group < numbered(extents, plan):
        size = stop - start
        i, j, steps = tile_of_group(index - first, group, size, extents, plan)
        i += half * own
        multiplied = steps
        if not plan.sums:
            multiplied = gl.where(i < size, steps, 0)
        acc = gl.zeros([own, columns], gl.float32, accumulator(columns))
        for step in range(multiplied):
            stage = await_full(ring, unit)
            part = tiles.a.index(stage).slice(half * own, own, 1 if plan.sums else 0)
            b_tile = operand_of(tiles.b.index(stage), plan.b_across)
            acc = warpgroup_mma(operand_of(part, plan.sums), b_tile, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(ring.empty.index((unit + stages - 1) % stages), pred=step > 0)
            unit += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(ring.empty.index((unit + stages - 1) % stages), pred=multiplied > 0)
        for _ in range(multiplied, steps):
            stage = await_full(ring, unit)
            mbarrier.arrive(ring.empty.index(stage))
            unit += 1
        send_group(c, tiles.c.index(half), acc, group, stop, size, i, j, plan)
        index += gl.num_programs(0)
        group, first, start, stop, count = walk(index, group, first, start, stop, count, extents, plan)
    tma.store_wait(0)


@gluon.jit
def ring_tiles(dtype: gl.constexpr, lines: gl.constexpr, length: gl.constexpr, across: gl.constexpr,
               stages: gl.constexpr):  # fmt: skip
    """A ring's tiles of an operand, of so many lines; of lines along the other axis if ``across``."""
    rows: gl.constexpr = length if across else lines
    columns: gl.constexpr = lines if across else length
    return gl.allocate_shared_memory(dtype, [stages, rows, columns], tile_layout(columns))


@gluon.jit
def grouped_by_roles(a, b, c, extents, plan: gl.constexpr):
    """c, by a loader and two consumers."""
    tiles = GroupedTiles(
        ring_tiles(a.dtype, plan.rows, plan.depth, plan.sums, plan.stages),
        ring_tiles(a.dtype, plan.depth, plan.columns, plan.b_across, plan.stages),
        gl.allocate_shared_memory(c.dtype, [2, plan.rows // 2, plan.box], tile_layout(plan.box)),
    )
    ring = ring_of(plan.stages, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (grouped_consumer, (c, tiles, ring, extents, plan, 0)),
            (grouped_consumer, (c, tiles, ring, extents, plan, 1)),
            (grouped_loader, (a, b, tiles, ring, extents, plan)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit(do_not_specialize=["step", "rows", "groups", "n", "k"])
def grouped_matmul_by_roles(a, b, c, ends, step, rows, groups, n, k, plan: gl.constexpr):
    """c = a b_g of the rows of each group g."""
    grouped_by_roles(a, b, c, GroupExtents(ends, step, rows, groups, rows, n, k), plan)


@gluon.jit(do_not_specialize=["step", "rows", "groups", "n", "k"])
def grouped_matmul_vjp_by_roles(a, d_c, d_b, ends, step, rows, groups, n, k, plan: gl.constexpr):
    """d_b_g = a^T d_c, summed over the rows of each group g."""
    grouped_by_roles(a, d_c, d_b, GroupExtents(ends, step, rows, groups, k, n, rows), plan)
