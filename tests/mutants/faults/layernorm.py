"""Faults planted in the kernels of layernorm."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "one-pass-variance",
            "the variance is E[x^2] - mean^2",
            old="tl.rsqrt(row_sum([a * a for a in d]) / n + eps)",
            new=(
                "tl.rsqrt(tl.maximum(row_sum([a * a for a in t]) / n - (row_sum(t) / n) * (row_sum(t) / n), 0.0) + eps)"
            ),
            small=True,
            sample=True,
            edge="large_mean",
            within="lib.rows",
        ),
        Planted(
            "padding-in-variance",
            "lanes beyond the row count in the variance",
            old="d = [tl.where(ok[i], t[i] - mean, 0.0) for i in (0, 1)[: len(t)]]",
            new="d = [a - mean for a in t]",
            small=True,
            within="lib.rows",
        ),
        Planted(
            "eps-outside",
            "eps is added to the standard deviation",
            old="tl.rsqrt(row_sum([a * a for a in d]) / n + eps)",
            new="(1.0 / (tl.sqrt(row_sum([a * a for a in d]) / n) + eps))",
            small=True,
            within="lib.rows",
        ),
        Planted(
            "mean-over-tile",
            "the mean divides by the tile's extent",
            old="mean = (rounded + rest / n)[:, None]",
            new="mean = (row_sum(t) / t[0].shape[1])[:, None]",
            within="lib.rows",
        ),
        Planted(
            "unbiased-variance",
            "long rows divide the variance by n - 1",
            old="r = tl.rsqrt(total / n + eps)",
            new="r = tl.rsqrt(total / (n - 1) + eps)",
            small=True,
        ),
        Planted(
            "weight-float16",
            "the weight passes through float16",
            old="xh * beside(affine.weight, affine.weight_n, lane, inside, tile)",
            new="xh * beside(affine.weight, affine.weight_n, lane, inside, tile).to(tl.float16).to(tile.acc_dtype)",
            small=True,
        ),
        Planted(
            "long-row-padding",
            "lanes beyond a long row count in the variance",
            old="                    d = tl.where(start + i * places + col < n, d, 0.0)\n                m2 += d * d",
            new="                    d = d + 0.0\n                m2 += d * d",
            small=True,
        ),
    ],
    "pallas": [
        Planted(
            "one-pass-variance",
            "the variance within a block is E[x^2] - mean^2",
            old="(jnp.square(x(at) - block_mean),)",
            new="(jnp.square(x(at)) - jnp.square(block_mean),)",
            small=True,
        ),
        Planted(
            "eps-outside",
            "eps is added to the standard deviation",
            old="lax.rsqrt(ref.m2[...] / strip.n + eps)",
            new="1 / (jnp.sqrt(ref.m2[...] / strip.n) + eps)",
            small=True,
        ),
        Planted(
            "eps-ignored",
            "eps is always 1e-5",
            old='(kernel, eps=call.options["eps"])',
            new="(kernel, eps=1e-5)",
            small=True,
        ),
        Planted(
            "weight-as-x",
            "a float32 weight is rounded to x's dtype",
            old="y *= at(ref.weight)",
            new="y *= at(ref.weight).astype(ref.x.dtype).astype(jnp.float32)",
            small=True,
        ),
        Planted(
            "ragged-count",
            "the merge counts a ragged last block as full",
            old="here = jnp.minimum(walk.n - seen, walk.block_n)",
            new="here = walk.block_n",
            small=True,
            sample=True,
        ),
        Planted(
            "between-blocks",
            "the merge forgets that blocks differ in their means",
            old="+= m2 + between\n",
            new="+= m2\n",
        ),
    ],
    "pallas/gpu": [
        Planted(
            "padding-centred",
            "what lies beyond a short row is centred with the rest, and so counted as mean^2 each",
            old="centred = walk.within(x - walk.spread(mean), 0.0)",
            new="centred = walk.within(x, 0.0) - walk.spread(mean)",
        ),
        Planted(
            "merge-without-delta",
            "chunks are merged as if they had one mean",
            old=" + m2_after + delta * (delta * weight)\n",
            new=" + m2_after\n",
        ),
        Planted(
            "mean-of-a-whole-chunk",
            "the mean of a last, shorter chunk is taken over a whole one",
            old="walk.counted(start)[1] if at else",
            new="walk.chunk if at else",
            within="lib.mosaic_gpu.norms",
        ),
        Planted(
            "eps-outside",
            "eps is added to the deviation instead of the variance",
            old="lax.rsqrt(m2 / walk.n + self.eps)",
            new="1.0 / (jnp.sqrt(m2 / walk.n) + self.eps)",
            small=True,
        ),
    ],
}
