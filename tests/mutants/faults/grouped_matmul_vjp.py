"""Faults planted in the kernels of gradients of products of groups of rows."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "empty-group-unwritten",
            "the gradient of a matrix whose group has no row is left as it was",
            old="    steps = (size + tile.block_k - 1) // tile.block_k\n",
            new="    steps = (size + tile.block_k - 1) // tile.block_k\n    i_ok = i_ok & (size > 0)\n",
            sample=True,
        ),
        Planted(
            "begins-a-row-late",
            "the sum over a group's rows leaves out the first, unless it is the first of all",
            old="    size = tl.maximum(end_of(ends, strides.ends, group, extents.rows) - start, 0)\n",
            new=(
                "    start += (start > 0).to(tl.int64)\n"
                "    size = tl.maximum(end_of(ends, strides.ends, group, extents.rows) - start, 0)\n"
            ),
        ),
        Planted(
            "ends-a-row-late",
            "the sum over a group's rows has the next one's first row",
            old="    size = tl.maximum(end_of(ends, strides.ends, group, extents.rows) - start, 0)\n",
            new=(
                "    size = tl.maximum(end_of(ends, strides.ends, group, extents.rows) - start, 0)\n"
                "    size = tl.where(size > 0, tl.minimum(size + 1, extents.rows - start), 0)\n"
            ),
        ),
        Planted(
            "last-step-dropped",
            "rows of a group beyond its last whole step are left out",
            old="    steps = (size + tile.block_k - 1) // tile.block_k\n",
            new="    steps = tl.maximum(size // tile.block_k, 1)\n",
        ),
        Planted(
            "neighbours-matrix",
            "a group's gradient lies where that of the one before belongs",
            old="d_b + group.to(tl.int64) * k * n",
            new="d_b + tl.maximum(group - 1, 0).to(tl.int64) * k * n",
        ),
        Planted(
            "matrix-not-transposed",
            "d_a of square matrices is a product with b, not with its transpose",
            old="b.to(dtype).mT, d_a",
            new="(b.to(dtype) if b.shape[1] == b.shape[2] else b.to(dtype).mT), d_a",
        ),
        Planted(
            "cotangent-as-a",
            "a wider d_c is rounded to a's dtype first",
            old="    dtype, d_a, d_b = torch_dtype(one.dtype), None, None\n",
            new=(
                "    dtype, d_a, d_b = torch_dtype(one.dtype), None, None\n"
                '    call = call.replace(arrays=call.arrays | {"d_c": call.arrays["d_c"].to(call.arrays["a"].dtype)})\n'
            ),
        ),
    ],
    "pallas": [
        Planted(
            "empty-group-unwritten",
            "the gradient of a matrix whose group has no row is left as it was",
            old="begins, finishes = there & (at == 0), there & (step == after[group] - 1)",
            new="begins, finishes = there & (at == 0), there & (step == after[group] - 1) & (sizes[group] > 0)",
            edge="no_group_has_a_row",
            sample=True,
        ),
        Planted(
            "sum-not-begun",
            "the sum over a group's rows goes on from the one before where that fits a block",
            old="begins, finishes = there & (at == 0),",
            new="begins, finishes = there & (at == 0) & ((group == 0) | (sizes[group - 1] > block)),",
        ),
        Planted(
            "rows-of-the-next-group",
            "what lies behind a group's last row is summed too",
            old="pl.when((size > 0) & (size < height))(lambda: add(size))",
            new="pl.when((size > 0) & (size < height))(lambda: add(None))",
        ),
        Planted(
            "last-block-dropped",
            "rows of a group beyond its last whole block are left out, where it has one",
            old="size = jnp.where(there, jnp.clip(sizes[group] - at, 0, block), 0)",
            new="size = jnp.where(there & ((at == 0) | (sizes[group] - at >= block)), "
            "jnp.clip(sizes[group] - at, 0, block), 0)",
        ),
        Planted(
            "last-row-dropped",
            "a group that fills no whole tile of rows lacks its last row",
            old="jnp.where(within < groups.sizes[group], groups.starts[group] + within, rows)",
            new="jnp.where(within < groups.sizes[group] - (groups.sizes[group] % grain == 1), "
            "groups.starts[group] + within, rows)",
        ),
        Planted(
            "neighbours-matrix",
            "d_a of a group is a product with the matrix of the one before",
            old="matrix = jnp.minimum(group[read], number - 1)",
            new="matrix = jnp.clip(group[read] - 1, 0, number - 1)",
        ),
        Planted(
            "cotangent-as-a",
            "a wider d_c is rounded to a's dtype first",
            old='    a, b, d_c = (call.arrays[name].astype(dtype) for name in ("a", "b", "d_c"))\n',
            new=(
                '    a, b, d_c = (call.arrays[name].astype(dtype) for name in ("a", "b", "d_c"))\n'
                "    d_c = d_c.astype(call.dtype).astype(dtype)\n"
            ),
        ),
    ],
}
