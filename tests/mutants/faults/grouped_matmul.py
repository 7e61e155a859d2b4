"""Faults planted in the kernels of products of groups of rows."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "rows-of-no-group-multiplied",
            "rows behind the last group are multiplied with the last matrix",
            old="    steps_k = tl.where(group < extents.groups, extents.steps_k, 0)\n",
            new="    steps_k, group = extents.steps_k, tl.minimum(group, extents.groups - 1)\n",
            sample=True,
        ),
        Planted(
            "rows-of-no-group-unwritten",
            "nobody writes rows behind the last group",
            old="    if (at < 0) | (at >= stop):",
            new="    if (at < 0) | (at >= stop) | (group == extents.groups):",
        ),
        Planted(
            "begins-a-row-early",
            "a group's tiles begin at the last row of the one before",
            old="    start = end_of(ends, step, group - 1, rows)\n    stop =",
            new=("    start = end_of(ends, step, group - 1, rows)\n    start -= (start > 0).to(tl.int64)\n    stop ="),
        ),
        Planted(
            "last-row-dropped",
            "of a group that ends beside a tile's border the last row is written by nobody",
            old="        stop = end_of(ends, step, group, rows)\n",
            new=(
                "        stop = end_of(ends, step, group, rows)\n"
                "        stop -= ((stop - start) % block_m == 1).to(tl.int64)\n"
            ),
        ),
        Planted(
            "neighbours-matrix",
            "a group is multiplied with the matrix of the one before",
            old="group.to(tl.int64) * b_g",
            new="tl.maximum(group - 1, 0).to(tl.int64) * b_g",
        ),
        Planted(
            "groups-beyond-256-forgotten",
            "a program counts the first 256 groups alone",
            old="for begin in range(0, groups, COUNTED):",
            new="for begin in range(0, tl.minimum(groups, COUNTED), COUNTED):",
            sample=True,
            edge="hundreds_of_groups",
            gpu=False,
        ),
        Planted(
            "tiles-miscounted",
            "a group that begins at a tile's border has no room for a last ragged tile",
            old="(tl.int64) // block_m + g + 1",
            new="(tl.int64) // block_m + g + (g > 0)",
            gpu=False,
        ),
        Planted(
            "ends-without-stride",
            "ends are read as if they were adjacent",
            old="tl.load(ends + g.to(tl.int64) * step,",
            new="tl.load(ends + g,",
            gpu=False,
        ),
        Planted(
            "rounded-twice",
            "the result passes through the operands' dtype before out_dtype",
            old="tl.store(c + (i[:, None] * n + j[None, :]), acc.to(c.dtype.element_ty)",
            new="tl.store(c + (i[:, None] * n + j[None, :]), acc.to(a.dtype.element_ty).to(c.dtype.element_ty)",
        ),
        Planted(
            "acc-bfloat16",
            "the accumulator is rounded to bfloat16 at each step",
            old="input_precision=tile.precision, out_dtype=tile.acc_dtype)\n        a_tile",
            new=(
                "input_precision=tile.precision, out_dtype=tile.acc_dtype)"
                ".to(tl.bfloat16).to(tile.acc_dtype)\n        a_tile"
            ),
            within="matmul",
        ),
    ],
    "pallas": [
        Planted(
            "rows-of-no-group-multiplied",
            "rows behind the last group are multiplied with the last matrix",
            old="cls(at, first, end, (step < after[-2]).astype(jnp.int32),",
            new="cls(at, first, end, there.astype(jnp.int32),",
            edge="rows_of_no_group",
            sample=True,
        ),
        Planted(
            "first-row-dropped",
            "a group that begins within a block lacks its first row",
            old="held = (row >= first) & (row < end)",
            new="held = (row >= first + (first > 0)) & (row < end)",
        ),
        Planted(
            "whole-block-written",
            "a visit writes all rows of a block that it shares",
            old="whole = end - first == c.shape[0]",
            new="whole = end - first > 0",
        ),
        Planted(
            "neighbours-matrix",
            "a group is multiplied with the matrix of the one before",
            old="matrix = jnp.minimum(group[read], number - 1)",
            new="matrix = jnp.clip(group[read] - 1, 0, number - 1)",
        ),
        Planted(
            "rounded-twice",
            "the result passes through the operands' dtype before out_dtype",
            old="    whole = end - first == c.shape[0]\n",
            new=("    c = c.astype(ref.a.dtype).astype(jnp.float32)\n    whole = end - first == c.shape[0]\n"),
        ),
    ],
}
