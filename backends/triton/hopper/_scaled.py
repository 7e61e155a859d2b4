"""The matrix product of 8-bit numbers with scales by warps that have roles (Gluon).

    c[i, j] = sum_p scale_a[i, p] scale_b[p, j] (sum_{k in block p} a[i, k] b[k, j]) + bias[j]

One warp loads: it keeps ``stages`` tiles of both operands, whose lines run along k, on their way into shared memory.
Each group of four warps multiplies 64 rows of the tile; the matrix unit takes 128 of k in four instructions.

The unit keeps sums of 8-bit floats to 13 bits behind the point. Where they must leave it (``leaves``), a step of 128 is
a sum of its own, which is added to the others in float32, times its scales where a block has some. Two such sums take
turns (``overlapped``): one is added while the unit makes the other. With ``more`` columns beside, these are the two. A
group that has no second sum leaves the unit to the other group while it adds.

Few rows are multiplied the other way round, c^T = b^T a^T (``turned``). An element of c has the same products in the
same order of k in every tile, and meets its scales in the same operations: its bits do not tell which tile it was in.

Source: DeepSeek-AI, "DeepSeek-V3 technical report" (2024), section 3.3.2, and DeepGEMM, for sums that leave the matrix
unit after 128 products while other warps multiply; the persistent warp-specialised schedules of CUTLASS 3 (Thakkar et
al.).
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

from portakern.backends.triton.hopper._warps import halves, put, send
from portakern.backends.triton.lib.gluon import acquire, await_full, load_tile, ring_of
from portakern.backends.triton.lib.matmul import tile_index

LOADER_REGISTERS, CONSUMER_REGISTERS = gl.constexpr(24), gl.constexpr(240)
OWN = gl.constexpr(64)  # rows of a group of four warps
PART = gl.constexpr(32)  # columns of an accumulator that meet scales and bias at a time


class ScaledPlan(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
      rows, columns, depth: extents of a tile, along the rows of the left operand, those of the right one, and k; more:
        rows of the right operand beside; group: rows of tiles that are finished together; stages: of the ring.
      turned: the left operand is b and the right one a; a tile is of c^T.
      leaves: the sum of each step leaves the matrix unit; blocks: it has scales; overlapped: two of them take turns.
      shared: all rows of a tile's part of the right operand have one scale of a block.
      described: c is a descriptor, and no pointer.
      integers: operands are int8, whose sums are int32.
    """

    rows: int
    columns: int
    depth: int
    group: int
    stages: int
    more: int
    turned: bool
    leaves: bool
    blocks: bool
    overlapped: bool
    shared: bool
    described: bool
    integers: bool


class ScaledOperands(NamedTuple):
    """The left operand, the right one, and the right one for what is more: described, or their tiles."""

    left: Any
    right: Any
    right_more: Any


class ProductExtents(NamedTuple):
    """Rows of the left and of the right operand, and k."""

    left: Any
    right: Any
    k: Any


class ScaleArrays(NamedTuple):
    """Scales of the left and of the right operand."""

    left: Any
    right: Any


class ScaleSteps(NamedTuple):
    """Between scales of two of an operand's blocks of rows, and of two blocks of k, each 0 where one is for all; and
    how many rows share one."""

    row: Any
    block: Any
    width: Any


class OperandScales(NamedTuple):
    """An operand's scales, and where each stands."""

    scale: Any
    steps: Any


@gluon.jit
def scales_at(scales, row, p, extent):
    """The scales of rows, in block ``p`` of k."""
    at = row // scales.steps.width * scales.steps.row + p * scales.steps.block
    return gl.load(scales.scale + at, mask=row < extent, other=0.0)


@gluon.jit
def scale_at(scales, row, p, extent):
    """The one scale of rows that begin at ``row``, in block ``p`` of k."""
    row = gl.minimum(row, extent - 1)
    return gl.load(scales.scale + (row // scales.steps.width * scales.steps.row + p * scales.steps.block))


@gluon.jit
def rows_from(first, count: gl.constexpr, laid: gl.constexpr):
    return gl.to_tensor(first).to(gl.int64) + gl.arange(0, count, laid)


@gluon.jit
def left_scales(scales, i, p, extent, acc_layout: gl.constexpr, plan: gl.constexpr):
    """The left operand's scales of a group's rows; of none where blocks have none."""
    row = rows_from(i, OWN, gl.SliceLayout(1, acc_layout))
    if plan.blocks:
        return scales_at(scales, row, p, extent)
    else:
        return gl.zeros([OWN], gl.float32, gl.SliceLayout(1, acc_layout))


@gluon.jit
def right_scales(scales, j, p, extent, columns: gl.constexpr, acc_layout: gl.constexpr, plan: gl.constexpr):
    """The right operand's scales of a tile's columns, or the one that they share."""
    if plan.blocks:
        if plan.shared:
            return scale_at(scales, gl.to_tensor(j).to(gl.int64), p, extent)
        else:
            return scales_at(scales, rows_from(j, columns, gl.SliceLayout(0, acc_layout)), p, extent)
    else:
        return 0.0


@gluon.jit
def promoted(total, part, of_left, of_right, plan: gl.constexpr):
    """total and the sum of a step, times its scales if it has some."""
    part = part.to(gl.float32)
    if plan.blocks:
        if plan.shared:
            return gl.fma((of_left * of_right)[:, None] + gl.zeros_like(part), part, total)
        else:
            return gl.fma(of_left[:, None] * of_right[None, :], part, total)
    else:
        return total + part


@gluon.jit
def loader(operands, tiles, ring, extents, plan: gl.constexpr):
    """One warp that keeps tiles of both operands on their way, and waits only for a stage to become free."""
    bits: gl.constexpr = operands.left.dtype.primitive_bitwidth
    moved: gl.constexpr = (plan.rows + plan.columns + plan.more) * plan.depth * bits // 8
    tiles_i, tiles_j = gl.cdiv(extents.left, plan.rows), gl.cdiv(extents.right, plan.columns + plan.more)
    steps = gl.cdiv(extents.k, plan.depth)
    unit = 0
    for index in range(gl.program_id(0), tiles_i * tiles_j, gl.num_programs(0)):
        tile_i, tile_j = tile_index(index, tiles_i, tiles_j, plan.group)
        i, j = tile_i * plan.rows, tile_j * (plan.columns + plan.more)
        for step in range(steps):
            stage, full = acquire(ring, unit, moved)
            kk = step * plan.depth
            load_tile(operands.left, [i, kk], full, tiles.left.index(stage))
            load_tile(operands.right, [j, kk], full, tiles.right.index(stage))
            if plan.more:
                load_tile(operands.right_more, [j + plan.columns, kk], full, tiles.right_more.index(stage))
            unit += 1


@gluon.jit
def begun(left, right, stage, zeros, half: gl.constexpr):
    """The products of a group's rows in a stage, on their way, as a sum of its own."""
    part = left.index(stage).slice(half * OWN, OWN, 0)
    return warpgroup_mma(part, right.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def chained(tiles, ring, unit, steps, acc, half: gl.constexpr, plan: gl.constexpr):
    """acc and all products of a tile, which never leave the matrix unit: one step's are in flight while the next one's
    are issued."""
    stages: gl.constexpr = plan.stages
    for step in range(steps):
        stage = await_full(ring, unit)
        part = tiles.left.index(stage).slice(half * OWN, OWN, 0)
        acc = warpgroup_mma(part, tiles.right.index(stage).permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(ring.empty.index((unit + stages - 1) % stages), pred=step > 0)
        unit += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(ring.empty.index((unit + stages - 1) % stages))
    return acc


@gluon.jit
def one_step(tiles, ring, unit, step, total, zeros, scales, at, extents, half: gl.constexpr, plan: gl.constexpr):
    """total and the products of a step, with nothing on its way before or after."""
    i, j = at
    of_left, of_right = scales
    laid: gl.constexpr = total.type.layout
    left = left_scales(of_left, i, step, extents.left, laid, plan)
    right = right_scales(of_right, j, step, extents.right, total.shape[1], laid, plan)
    stage = await_full(ring, unit)
    part = begun(tiles.left, tiles.right, stage, zeros, half)
    part = warpgroup_mma_wait(0, deps=(part,))
    mbarrier.arrive(ring.empty.index(stage))
    return promoted(total, part, left, right, plan)


@gluon.jit
def in_turns(tiles, ring, unit, steps, total, zeros, scales, at, extents, half: gl.constexpr, plan: gl.constexpr):
    """total and all products of a tile. The sums of two steps take turns: one is added while the other is made. The
    first step of an odd number is alone."""
    stages: gl.constexpr = plan.stages
    laid: gl.constexpr = total.type.layout
    columns: gl.constexpr = total.shape[1]
    i, j = at
    of_left, of_right = scales
    alone = steps % 2
    for step in range(alone):
        total = one_step(tiles, ring, unit, step, total, zeros, scales, at, extents, half, plan)
    unit += alone
    # No product is on its way where the loop begins anew: the assembler then makes all of them wait for each other.
    for step in range(alone, steps, 2):
        left = left_scales(of_left, i, step, extents.left, laid, plan)
        right = right_scales(of_right, j, step, extents.right, columns, laid, plan)
        first = begun(tiles.left, tiles.right, await_full(ring, unit), zeros, half)
        second = begun(tiles.left, tiles.right, await_full(ring, unit + 1), zeros, half)
        part = warpgroup_mma_wait(1, deps=(first,))
        mbarrier.arrive(ring.empty.index(unit % stages))
        total = promoted(total, part, left, right, plan)
        left = left_scales(of_left, i, step + 1, extents.left, laid, plan)
        right = right_scales(of_right, j, step + 1, extents.right, columns, laid, plan)
        part = warpgroup_mma_wait(0, deps=(second,))
        mbarrier.arrive(ring.empty.index((unit + 1) % stages))
        total = promoted(total, part, left, right, plan)
        unit += 2
    return total


@gluon.jit
def with_more(tiles, ring, unit, steps, totals, zeros, scales, at, extents, half: gl.constexpr, plan: gl.constexpr):
    """The same of two accumulators, whose sums of a step take turns or are made one after the other."""
    total, total_more = totals
    zero, zero_more = zeros
    i, j = at
    of_left, of_right = scales
    laid: gl.constexpr = total.type.layout
    laid_more: gl.constexpr = total_more.type.layout
    for step in range(steps):
        left = left_scales(of_left, i, step, extents.left, laid, plan)
        right = right_scales(of_right, j, step, extents.right, plan.columns, laid, plan)
        stage = await_full(ring, unit)
        first = begun(tiles.left, tiles.right, stage, zero, half)
        if plan.overlapped:
            second = begun(tiles.left, tiles.right_more, stage, zero_more, half)
            part = warpgroup_mma_wait(1, deps=(first,))
            total = promoted(total, part, left, right, plan)
        else:
            part = warpgroup_mma_wait(0, deps=(first,))
            total = promoted(total, part, left, right, plan)
            second = begun(tiles.left, tiles.right_more, stage, zero_more, half)
        left = left_scales(of_left, i, step, extents.left, laid_more, plan)
        right = right_scales(of_right, j + plan.columns, step, extents.right, plan.more, laid_more, plan)
        part_more = warpgroup_mma_wait(0, deps=(second,))
        mbarrier.arrive(ring.empty.index(stage))
        total_more = promoted(total_more, part_more, left, right, plan)
        unit += 1
    return total, total_more


@gluon.jit
def one_after_the_other(tiles, ring, unit, steps, total, zeros, scales, at, extents, half: gl.constexpr,
                        plan: gl.constexpr):  # fmt: skip
    """The same of one accumulator beside the sum of a step."""
    for step in range(steps):
        total = one_step(tiles, ring, unit, step, total, zeros, scales, at, extents, half, plan)
        unit += 1
    return total


@gluon.jit
def finished(acc, scales, bias, at, extents, plan: gl.constexpr):
    """A group's sums, times the scales of rows and columns unless blocks have had theirs, and with bias: a few columns
    after the other, since an operation on all takes as many registers again."""
    i, j = at
    if acc.shape[1] > PART:
        left, right = halves(acc)
        left = finished(left, scales, bias, (i, j), extents, plan)
        right = finished(right, scales, bias, (i, j + acc.shape[1] // 2), extents, plan)
        both = gl.join(left, right).permute([0, 2, 1]).reshape(acc.shape)
        return gl.convert_layout(both, acc.type.layout)
    else:
        of_left, of_right = scales
        row = rows_from(i, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        column = rows_from(j, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        y = acc.to(gl.float32)
        added = gl.zeros_like(y)
        if bias is not None:
            if plan.turned:
                added += gl.load(bias + row, mask=row < extents.left, other=0.0)[:, None]
            else:
                added += gl.load(bias + column, mask=column < extents.right, other=0.0)[None, :]
        if plan.blocks:
            return y + added
        else:
            left_scale = scales_at(of_left, row, 0, extents.left)
            right_scale = scales_at(of_right, column, 0, extents.right)
            return gl.fma(y, left_scale[:, None] * right_scale[None, :], added)


@gluon.jit
def put_turned(c, acc, i, j, extents):
    """Write an accumulator of c^T to c, whose rows are ``extents.left`` long, a column of a warp's elements at a
    time."""
    laid: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1])
    column = i + gl.arange(0, acc.shape[0], gl.SliceLayout(1, laid))
    row = j + gl.arange(0, acc.shape[1], gl.SliceLayout(0, laid))
    tile = gl.convert_layout(acc.to(c.dtype.element_ty), laid)
    at = (c + row.to(gl.int64) * extents.left)[None, :] + column[:, None]
    gl.store(at, tile, mask=(row < extents.right)[None, :] & (column < extents.left)[:, None])


@gluon.jit
def write(c, c_tiles, acc, at, extents, half: gl.constexpr, plan: gl.constexpr):
    """Write a group's sums to c."""
    i, j = at
    if plan.turned:
        put_turned(c, acc, i, j, extents)
    elif plan.described:
        tma.store_wait(0)  # what was in this tile before has left
        send(c, c_tiles, half, 0, acc, 0, i, j, False)
    else:
        put(c, acc, 0, i, j, extents.left, extents.right)


@gluon.jit
def consumer(tiles, c_tiles, ring, c, scales, bias, extents, plan: gl.constexpr, half: gl.constexpr):
    """Four warps that multiply 64 rows of each tile."""
    columns: gl.constexpr = plan.columns
    more: gl.constexpr = plan.more if plan.more else plan.columns
    laid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])
    summed: gl.constexpr = gl.int32 if plan.integers else gl.float32
    laid_more: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, more, 32])
    tiles_i, tiles_j = gl.cdiv(extents.left, plan.rows), gl.cdiv(extents.right, columns + plan.more)
    steps = gl.cdiv(extents.k, plan.depth)
    unit = 0
    for index in range(gl.program_id(0), tiles_i * tiles_j, gl.num_programs(0)):
        tile_i, tile_j = tile_index(index, tiles_i, tiles_j, plan.group)
        at = (tile_i * plan.rows + half * OWN, tile_j * (columns + plan.more))
        zeros = gl.zeros([OWN, columns], summed, laid)
        if plan.leaves:
            total = gl.zeros([OWN, columns], gl.float32, laid)
            if plan.more:
                totals = total, gl.zeros([OWN, more], gl.float32, laid_more)
                both = zeros, gl.zeros([OWN, more], summed, laid_more)
                total, total_more = with_more(tiles, ring, unit, steps, totals, both, scales, at, extents, half, plan)
                i, j = at
                total_more = finished(total_more, scales, bias, (i, j + columns), extents, plan)
                write(c, c_tiles, total_more, (i, j + columns), extents, half, plan)
            elif plan.overlapped:
                total = in_turns(tiles, ring, unit, steps, total, zeros, scales, at, extents, half, plan)
            else:
                total = one_after_the_other(tiles, ring, unit, steps, total, zeros, scales, at, extents, half, plan)
            total = finished(total, scales, bias, at, extents, plan)
        else:
            total = finished(chained(tiles, ring, unit, steps, zeros, half, plan), scales, bias, at, extents, plan)
        unit += steps
        write(c, c_tiles, total, at, extents, half, plan)
    if plan.described:
        tma.store_wait(0)


@gluon.jit
def tiles_of(described, stages: gl.constexpr):
    """A ring's tiles of an operand."""
    shape: gl.constexpr = described.block_type.shape
    return gl.allocate_shared_memory(described.dtype, [stages, shape[0], shape[1]], gl.NVMMASharedLayout(128, 8, 2))


@gluon.jit
def result_tiles(c, ring_tiles, plan: gl.constexpr):
    """Where a box of c of each group waits on its way to memory; of no use where c is no descriptor."""
    if plan.described:
        bits: gl.constexpr = c.dtype.primitive_bitwidth
        box: gl.constexpr = c.block_type.shape[1]
        line: gl.constexpr = box * bits // 8
        laid: gl.constexpr = gl.NVMMASharedLayout(128 if line > 128 else line, bits, 2)
        return gl.allocate_shared_memory(c.dtype, [plan.rows // OWN, OWN, box], laid)
    else:
        return ring_tiles


@gluon.jit(do_not_specialize=["left_rows", "right_rows", "k"])
def scaled_matmul_by_roles(left, right, right_more, scale_arrays, bias, c, left_steps, right_steps, left_rows,
                           right_rows, k, plan: gl.constexpr):  # fmt: skip
    """c, of operands whose lines run along k; bias may be None."""
    operands, extents = ScaledOperands(left, right, right_more), ProductExtents(left_rows, right_rows, k)
    left_tiles, right_tiles = tiles_of(left, plan.stages), tiles_of(right, plan.stages)
    more_tiles = right_tiles
    if plan.more:
        more_tiles = tiles_of(right_more, plan.stages)
    tiles = ScaledOperands(left_tiles, right_tiles, more_tiles)
    c_tiles = result_tiles(c, left_tiles, plan)
    scales = OperandScales(scale_arrays.left, left_steps), OperandScales(scale_arrays.right, right_steps)
    groups: gl.constexpr = plan.rows // OWN
    ring = ring_of(plan.stages, groups)
    fence_async_shared()
    if groups == 2:
        gl.warp_specialize(
            [
                (consumer, (tiles, c_tiles, ring, c, scales, bias, extents, plan, 0)),
                (consumer, (tiles, c_tiles, ring, c, scales, bias, extents, plan, 1)),
                (loader, (operands, tiles, ring, extents, plan)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (tiles, c_tiles, ring, c, scales, bias, extents, plan, 0)),
                (loader, (operands, tiles, ring, extents, plan)),
            ],
            [1],
            [LOADER_REGISTERS],
        )
