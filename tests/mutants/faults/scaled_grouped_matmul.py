"""Faults planted in the kernels of scaled_grouped_matmul."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "neighbours-scales",
            "a group has the scales of the one before",
            old="own * strides.scale_b_group",
            new="tl.maximum(own - 1, 0) * strides.scale_b_group",
            sample=True,
            at=(0, 100),
        ),
        Planted(
            "neighbours-matrix",
            "a group is multiplied with the matrix of the one before",
            old="own * strides.b_group",
            new="tl.maximum(own - 1, 0) * strides.b_group",
            at=(0, 100),
        ),
        Planted(
            "bias-of-the-first-group",
            "all groups have the bias of the first",
            old="own * strides.bias_group",
            new="0 * strides.bias_group",
            at=(0, 100),
        ),
        Planted(
            "scale-of-the-row-before",
            "a row has the scale of the one before",
            old="scale_a + i * strides.scale_a_row",
            new="scale_a + tl.maximum(i - 1, 0) * strides.scale_a_row",
            at=(0, 100),
        ),
        Planted(
            "scale-of-the-tile",
            "rows have the scales of as many at the beginning",
            old="scale_a + i * strides.scale_a_row",
            new="scale_a + (i - at) * strides.scale_a_row",
            at=(0, 100),
        ),
        Planted(
            "rows-of-no-group-unwritten",
            "nobody writes rows behind the last group",
            old="    if group == extents.groups:",
            new="    if group == extents.groups:\n        return\n    if group > extents.groups:",
            at=(0, 100),
        ),
    ],
    "pallas": [
        Planted(
            "neighbours-scales",
            "a group has the scales of the one before",
            old="return 0 if shared else RowVisits(*scalars).matrix[v], 0, j",
            new="return 0 if shared else jnp.maximum(RowVisits(*scalars).matrix[v] - 1, 0), 0, j",
            sample=True,
            at=(0, 100),
        ),
        Planted(
            "bias-of-the-first-group",
            "all groups have the bias of the first",
            old="(RowVisits(*scalars).matrix[v], 0, j))\n        inputs",
            new="(0, 0, j))\n        inputs",
            at=(0, 100),
        ),
        Planted(
            "rows-of-no-group-are-ones",
            "rows behind the last group are written as ones",
            old="write(ref, jnp.zeros(ref.c.shape, jnp.float32), first, end)",
            new="write(ref, jnp.ones(ref.c.shape, jnp.float32), first, end)",
            at=(0, 100),
        ),
        Planted(
            "rows-of-no-group-multiplied",
            "a visit of rows of no group writes what the one before it summed",
            old="write(ref, jnp.zeros(ref.c.shape, jnp.float32), first, end)",
            new="write(ref, scaled.finished(ref, steps), first, end)",
            at=(0, 100),
        ),
    ],
}
