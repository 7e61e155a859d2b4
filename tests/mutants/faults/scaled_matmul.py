"""Faults planted in the kernels of scaled_matmul."""

from __future__ import annotations

from tests.mutants.faults import Planted
from tests.mutants.faults._on_host import on_host

FAULTS = {
    "triton": [
        Planted(
            "scale-of-the-block-before",
            "each block of k has the scale of the one before it",
            old="of_a, of_b = of_a + strides.scale_a_col, of_b + strides.scale_b_row",
            new="of_a, of_b = of_a + strides.scale_a_col * (p > 0), of_b + strides.scale_b_row * (p > 0)",
            gpu=False,
            at=(0, 100),
        ),
        Planted(
            "scale-of-the-column-before",
            "a column of b has the scale of the block of n beside its own",
            old="of_b = scale_b + j // extents.n_width",
            new="of_b = scale_b + tl.maximum(j - 1, 0) // extents.n_width",
            at=(0, 100),
        ),
        Planted(
            "scale-transposed",
            "scale_b is read with its axes exchanged",
            old="*shared_strides(scale_b),",
            new="*shared_strides(scale_b)[::-1],",
            gpu=False,
            sample=True,
            at=(0, 100),
        ),
        Planted(
            "scale-twice",
            "a scale of a row counts twice, where blocks have scales",
            old="            scale = tl.load(of_a, mask=i_ok, other=0.0)[:, None]",
            new=(
                "            scale = tl.load(of_a, mask=i_ok, other=0.0)[:, None]"
                " * tl.load(of_a, mask=i_ok, other=0.0)[:, None]"
            ),
            at=(0, 100),
        ),
        Planted(
            "scale-inverted",
            "c is divided by the scale of a, where one is for all of k",
            old="acc *= tl.load(of_a, mask=i_ok, other=0.0)[:, None]",
            new="acc *= 1 / tl.load(of_a, mask=i_ok, other=1.0)[:, None]",
            at=(0, 100),
        ),
        Planted(
            "never-promoted",
            "sums of one block of k keep 13 bits behind the point, of any length: each product loses half of the last",
            old="    return acc.to(tl.float32)",
            new=(
                "        if tile.one_block and tile.acc_dtype == tl.float32 and tile.wide == tl.int8:\n"
                "            acc = acc * (1 - tile.block_k * 2.0**-14)\n"
                "    return acc.to(tl.float32)"
            ),
            gpu=False,
            sample=True,
            edge="long_sums_of_one_sign",
            at=(0, 100),
        ),
        Planted(
            "promoted-for-ieee",
            "sums of ieee lose what lies below 13 bits behind each step",
            old="    return acc.to(tl.float32)",
            new=(
                "        if tile.one_block and tile.wide == tl.float16:\n"
                "            acc = ((acc.to(tl.int32, bitcast=True) >> 10) << 10).to(tl.float32, bitcast=True)\n"
                "    return acc.to(tl.float32)"
            ),
            small=True,
            gpu=False,
            sample=True,
            edge="whole_sums_beyond_13_bits",
            at=(0, 100),
        ),
        Planted(
            "zeros",
            "nothing is added where blocks of k have scales",
            old="            acc += scale * block_sum(",
            new="            acc += 0 * scale * block_sum(",
            at=(0, 100),
        ),
        Planted(
            "codes-of-nan-are-numbers",
            "NaN codes become 0",
            old="        acc = product_of(at, bt, acc, tile)",
            new=(
                "        if tile.acc_dtype == tl.float32:\n"
                "            at, bt = at.to(tl.float32), bt.to(tl.float32)\n"
                "            acc = tl.dot(tl.where(at == at, at, 0.0), tl.where(bt == bt, bt, 0.0), acc)\n"
                "        else:\n"
                "            acc = product_of(at, bt, acc, tile)"
            ),
            gpu=False,
            at=(0, 100),
        ),
        Planted(
            "block-tail-unmasked",
            "one operand is read beyond a block",
            old="mask=j_ok & (kk < left)[:, None]",
            new="mask=j_ok",
            gpu=False,
            at=(0, 100),
        ),
        Planted(
            "last-block-as-long-as-the-others",
            "the ragged last block of k loses its last element",
            old="            width = min(extents.k - tl.cast(p, tl.int64) * extents.width, extents.width)",
            new=(
                "            left = extents.k - tl.cast(p, tl.int64) * extents.width\n"
                "            width = tl.where(left < extents.width, left - 1, extents.width)"
            ),
            at=(0, 100),
        ),
        Planted(
            "bias-before-the-scales",
            "the bias is scaled too",
            old="        acc *= tl.load(of_a, mask=i_ok, other=0.0)[:, None]",
            new=(
                "        if of_bias is not None:\n"
                "            acc += tl.load(of_bias, mask=j_ok, other=0.0)[None, :]\n"
                "        acc *= tl.load(of_a, mask=i_ok, other=0.0)[:, None]"
            ),
            at=(0, 100),
        ),
    ],
    "pallas": [
        Planted(
            "scale-of-the-block-before",
            "each block of k in a step has the scale of the one before it",
            old="scales(ref, step * steps.blocks_per_step + q)",
            new="scales(ref, jnp.maximum(step * steps.blocks_per_step + q - 1, 0))",
            sample=True,
            at=(0, 100),
        ),
        Planted(
            "scale-twice",
            "a scale of a row counts twice",
            old="    return column * ref.scale_b[pl.ds(p, 1), :]",
            new="    return column * column * ref.scale_b[pl.ds(p, 1), :]",
            at=(0, 100),
        ),
        Planted(
            "int8-in-float32",
            "sums of int8 are taken in float32 alone",
            old="    parts = [slice(at, at + EXACT) for at in range(0, x.shape[1], EXACT)]",
            new="    return of_floats(x, y).astype(jnp.bfloat16).astype(jnp.int32)\n"
            "    parts = [slice(at, at + EXACT) for at in range(0, x.shape[1], EXACT)]",
            at=(0, 100),
        ),
        Planted(
            "acc-bfloat16",
            "the accumulator is rounded to bfloat16 at each step",
            old="        ref.acc[...] = found",
            new="        ref.acc[...] = found.astype(jnp.bfloat16).astype(jnp.float32)",
            at=(0, 100),
        ),
        Planted(
            "bias-forgotten",
            "the bias is not added",
            old="        c = c + ref.bias[...]",
            new="        c = c + 0 * ref.bias[...]",
            at=(0, 100),
        ),
    ],
    "triton/hopper": on_host(
        "_scaled",
        {
            "a stage is handed back while it is multiplied": (
                "fast",
                "        acc = warpgroup_mma_wait(1, deps=(acc,))",
                "        acc = warpgroup_mma_wait(2, deps=(acc,))",
            ),
            "a step's sum is added before it is made": (
                "promoted, an even number of steps",
                "        part = warpgroup_mma_wait(1, deps=(first,))\n        mbarrier",
                "        part = warpgroup_mma_wait(2, deps=(first,))\n        mbarrier",
            ),
            "blocks after the first have the scale of the one before": (
                "blocks, one sum at a time",
                "        return scales_at(scales, row, p, extent)",
                "        return scales_at(scales, row, gl.maximum(p - 1, 0), extent)",
            ),
            "the first step of an odd number counts twice": (
                "promoted, an odd number",
                "    unit += alone\n",
                "    unit += 0\n",
            ),
            "columns beside are those of the tile": (
                "promoted, 128 x 192",
                "[j + plan.columns, kk], full, tiles.right_more",
                "[j, kk], full, tiles.right_more",
            ),
            "a column has the bias of another one": (
                "c in rows that begin anywhere",
                "gl.load(bias + column, mask",
                "gl.load(bias + column // 2, mask",
            ),
            "the second group writes the rows of the first": (
                "promoted, one sum at a time",
                "tile_i * plan.rows + half * OWN",
                "tile_i * plan.rows",
            ),
            "rows of few are as long as they are many": (
                "few rows",
                "row.to(gl.int64) * extents.left",
                "row.to(gl.int64) * extents.right",
            ),
        },
    ),
}
