"""Faults planted in the kernels of rmsnorm."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "mean-over-tile",
            "the mean of squares divides by the tile's extent",
            old="tl.rsqrt(row_sum([a * a for a in t]) / n + eps)",
            new="tl.rsqrt(row_sum([a * a for a in t]) / t[0].shape[1] + eps)",
        ),
        Planted(
            "eps-outside",
            "eps is added to the root",
            old="tl.rsqrt(row_sum([a * a for a in t]) / n + eps)",
            new="(1.0 / (tl.sqrt(row_sum([a * a for a in t]) / n) + eps))",
            small=True,
        ),
        Planted(
            "squares-rounded",
            "squares are rounded to bfloat16",
            old="tl.rsqrt(row_sum([a * a for a in t]) / n + eps)",
            new="tl.rsqrt(row_sum([(a * a).to(tl.bfloat16).to(a.dtype) for a in t]) / n + eps)",
            small=True,
        ),
        Planted(
            "last-not-summed",
            "the sum of a long row leaves out its last element",
            old="total += t[i] * t[i]",
            new="total += tl.where(start + i * col.shape[1] + col < n - 1, t[i] * t[i], 0.0)",
        ),
    ],
    "pallas": [
        Planted(
            "mean-over-blocks",
            "the mean of squares divides by the extent of all blocks",
            old="lax.rsqrt(ref.squares[...] / strip.n + eps)",
            new="lax.rsqrt(ref.squares[...] / (strip.n + -strip.n % strip.walk.block_n) + eps)",
        ),
        Planted(
            "eps-outside",
            "eps is added to the root",
            old="lax.rsqrt(ref.squares[...] / strip.n + eps)",
            new="1 / (jnp.sqrt(ref.squares[...] / strip.n) + eps)",
            small=True,
        ),
        Planted(
            "eps-ignored",
            "eps is always 1e-6",
            old='(kernel, eps=call.options["eps"], narrow',
            new="(kernel, eps=1e-6, narrow",
            small=True,
        ),
        Planted(
            "weight-as-x",
            "a float32 weight is rounded to x's dtype",
            old="y *= at(ref.weight)",
            new="y *= at(ref.weight).astype(ref.x.dtype).astype(jnp.float32)",
            small=True,
        ),
    ],
    "pallas/gpu": [
        Planted(
            "weight-before-rounding",
            "x r is not rounded before the weight where it should be",
            old="        y = narrowed(y, self.narrow)\n",
            new="",
            small=True,
        ),
        Planted("padding-squared", "what lies beyond a row counts", old="x = walk.within(x, 0.0, start)\n", new=""),
        Planted(
            "mean-over-the-chunk",
            "the squares are divided by the chunk's length and not by the row's",
            old="walk.spread(lax.rsqrt(statistics[0] / walk.n + self.eps))",
            new="walk.spread(lax.rsqrt(statistics[0] / (walk.chunk * walk.chunks) + self.eps))",
        ),
    ],
}
