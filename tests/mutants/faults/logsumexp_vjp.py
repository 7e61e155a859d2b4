"""Faults planted in the kernels of logsumexp_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "one-cotangent-a-strip",
            "all rows of a strip take the cotangent of its first",
            old="begin(g, group, lane, g_strides",
            new="begin(g, group, lane - tl.arange(0, tile.block_rows)[None, :], g_strides",
            within="lib.columns",
        ),
        Planted(
            "no-minus-inf-guard",
            "a first tile of nothing but -inf subtracts -inf from -inf",
            old="    shift = finite_or_zero(top)\n    found",
            new="    shift = top\n    found",
            small=True,
            within="lib.rows",
        ),
        Planted(
            "last-not-summed",
            "the sum of a long row leaves out its last element",
            old="mask=row_ok & (a < n), other",
            new="mask=row_ok & (a < n - 1), other",
            small=True,
            within="lib.rows",
        ),
        Planted(
            "one-cotangent",
            "all rows of a program take the cotangent of its first",
            old="g = tl.load(d_y + row, mask=row < extents.height, other=0.0)",
            new="g = tl.load(d_y + row - tl.arange(0, tile.block_rows), mask=row < extents.height, other=0.0)",
        ),
        Planted(
            "p-rounded",
            "the weights of a short row are rounded to the result's dtype before they meet the cotangent",
            old="(g * (p[i] / l)).to",
            new="(g * (p[i] / l).to(d_x.dtype.element_ty).to(tile.acc_dtype)).to",
            small=True,
            sample=True,
        ),
        Planted(
            "l-bfloat16",
            "the running sums of a long row are rounded to bfloat16 after each block",
            old="return top, tl.fma(l, exp_or_zero(tl.minimum(m - shift, 0.0)), found)",
            new="return top, tl.fma(l, exp_or_zero(tl.minimum(m - shift, 0.0)), found).to(tl.bfloat16).to(l.dtype)",
            small=True,
            within="lib.rows",
        ),
    ],
    "pallas": [
        Planted(
            "finite-padding",
            "lanes beyond a row hold -1e4 instead of -inf",
            old="step, -jnp.inf)\n        m, p",
            new="step, -1e4)\n        m, p",
            small=True,
        ),
        Planted(
            "p-rounded",
            "the weights are rounded to the result's dtype before they meet the cotangent",
            old="(jnp.exp(x - ref.m[...]) / ref.l[...])",
            new="(jnp.exp(x - ref.m[...]) / ref.l[...]).astype(ref.d_x.dtype).astype(jnp.float32)",
            small=True,
            sample=True,
        ),
        Planted(
            "l-not-rescaled",
            "the running sum keeps its unit when the maximum grows",
            old="ref.l[...] * shrink + ",
            new="ref.l[...] + ",
        ),
        Planted(
            "one-cotangent",
            "all rows of a block take the cotangent of its first",
            old="d_y = walk.turned(ref.d_y[...].astype(jnp.float32))",
            new="d_y = ref.d_y[:, :1].astype(jnp.float32)",
        ),
        Planted(
            "last-not-summed",
            "the sum of a long ragged row leaves out its last element",
            old="        ref.l[...] = ref.l[...] * shrink",
            new=(
                "        place = jax.lax.broadcasted_iota(jnp.int32, p.shape, walk.along) + step * walk.block_n\n"
                "        p = jnp.where(place < walk.n - (walk.n > 128), p, 0.0)\n"
                "        ref.l[...] = ref.l[...] * shrink"
            ),
            small=True,
        ),
    ],
}
