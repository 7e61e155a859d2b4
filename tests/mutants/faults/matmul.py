"""Faults planted in the kernels of matmul."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "tf32-for-ieee",
            "float32 operands lose 13 bits although precision is ieee",
            old="        acc = tl.dot(at, bt, acc,",
            new=(
                "        if at.dtype == tl.float32:\n"
                "            at = (at.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)\n"
                "            bt = (bt.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)\n"
                "        acc = tl.dot(at, bt, acc,"
            ),
            sample=True,
        ),
        Planted(
            "k-tail-unmasked",
            "one operand is read beyond k",
            old="mask=j_ok & (kk < left)[:, None]",
            new="mask=j_ok",
            gpu=False,
        ),
        Planted(
            "group-unclamped",
            "the last group of row tiles is numbered as if it were full",
            old="min(tiles_m - first_m, group)",
            new="group",
            gpu=False,
            within="lib.matmul",
        ),
        Planted(
            "group-clamped-once",
            "the last group of row tiles is numbered as if it were full, where it is not the only one",
            old="min(tiles_m - first_m, group)",
            new="min(tiles_m, group)",
            small=True,
            gpu=False,
            within="lib.matmul",
        ),
        Planted(
            "acc-bfloat16",
            "the accumulator is rounded to bfloat16 at each step",
            old="input_precision=tile.precision, out_dtype=tile.acc_dtype)\n        a_tile",
            new=(
                "input_precision=tile.precision, out_dtype=tile.acc_dtype)"
                ".to(tl.bfloat16).to(tile.acc_dtype)\n        a_tile"
            ),
        ),
        Planted(
            "k-tail-short",
            "the ragged end of k loses its last product",
            old="a_tile, mask=i_ok & (kk < left)",
            new="a_tile, mask=i_ok & (kk < left - (k > 64).to(tl.int64))",
        ),
        Planted(
            "batch-stride",
            "b walks the inner batch axis with a's stride",
            old="begin(b, outer, inner, b_strides)",
            new="begin(b, outer, inner, a_strides if b_strides.inner != 0 else b_strides)",
            gpu=False,
        ),
        Planted(
            "rounded-twice",
            "the result passes through the operands' dtype before out_dtype",
            old="acc.to(c.dtype.element_ty)",
            new="acc.to(a.dtype.element_ty).to(c.dtype.element_ty)",
        ),
        Planted(
            "store-truncated",
            "a bfloat16 result is cut instead of rounded to nearest",
            old="    tl.store(c_tile, acc.to(",
            new=(
                "    if c.dtype.element_ty == tl.bfloat16:\n"
                "        acc = (acc.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n"
                "    tl.store(c_tile, acc.to("
            ),
        ),
    ],
    "pallas": [
        Planted(
            "acc-bfloat16",
            "the accumulator is rounded to bfloat16 after each block",
            old="ref.acc[...] += dot(x, y, (1, k_of_b))",
            new="ref.acc[...] = (ref.acc[...] + dot(x, y, (1, k_of_b))).astype(jnp.bfloat16).astype(jnp.float32)",
        ),
        Planted(
            "tf32-for-ieee",
            "float32 operands keep 10 bits although precision is ieee",
            old="    ref.acc[...] += dot(x, y, (1, k_of_b))",
            new=(
                "    if x.dtype == jnp.float32:\n"
                "        x, y = jax.lax.reduce_precision(x, 8, 10), jax.lax.reduce_precision(y, 8, 10)\n"
                "    ref.acc[...] += dot(x, y, (1, k_of_b))"
            ),
        ),
        Planted(
            "batch-from-the-left",
            "batch axes broadcast aligned at the left",
            old="first = rank - 3 - len(batch)",
            new="first = 0",
            sample=True,
            edge="no_tile_divides",
        ),
        Planted(
            "rounded-twice",
            "the result passes through the operands' dtype before out_dtype",
            old="c.astype(ref.c.dtype)",
            new="c.astype(ref.a.dtype).astype(ref.c.dtype)",
        ),
        Planted(
            "k-tail-short",
            "the ragged end of a long k loses its last product",
            old="        return within_k(of_a, 1, start_of_k",
            new=(
                "        place = jax.lax.broadcasted_iota(jnp.int32, of_a.shape, 1) + start_of_k\n"
                "        of_a = jnp.where(place < k - (k > 64 and k % of_a.shape[1] != 0), of_a, 0)\n"
                "        return within_k(of_a, 1, start_of_k"
            ),
        ),
    ],
    "pallas/gpu": [
        Planted(
            "rounded-before-output",
            "the accumulator is rounded to bfloat16 before it is written as float32",
            old="tuple(x.astype(plan.written) for x in c)",
            new="tuple(x.astype(jnp.bfloat16).astype(plan.written) for x in c)",
            small=True,
        ),
        Planted(
            "last-step-dropped",
            "of several steps along k the last is left out",
            old="plgpu.wgmma(acc, left(buffer), right(buffer, i))",
            new=(
                "pl.when((step == 0) | (step < steps - 1))("
                "lambda acc=acc, i=i: plgpu.wgmma(acc, left(buffer), right(buffer, i)))"
            ),
        ),
        Planted(
            "batch-of-b-ignored",
            "b is that of the first entry of the batch",
            old="of_a, of_b = (tile.entry if batch > 1 else 0 for batch in (plan.a_batch, plan.b_batch))",
            new="of_a, of_b = tile.entry if plan.a_batch > 1 else 0, 0",
        ),
        Planted(
            "columns-swapped",
            "the pieces of a tile are written one beside the other, from the second",
            old="pl.ds(first_column + j, plan.out_columns)",
            new="pl.ds(first_column + (j + plan.out_columns) % columns, plan.out_columns)",
        ),
    ],
}
