"""Faults planted in the kernels of softmax_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "part-alone",
            "a part of a row in a strip takes its own sum for Delta",
            old="delta = added(total, group * lanes + lane, inside, tile.parts)",
            new="delta = tl.load(total + (group * lanes + lane) * tile.parts + part, mask=inside, other=0.0)",
        ),
        Planted(
            "delta-of-rounded-terms",
            "Delta of a short row sums terms that were rounded to y's dtype",
            old="row_sum([p[i] * g[i] for i in (0, 1)[: tile.tiles]])",
            new="row_sum([(p[i] * g[i]).to(y.dtype.element_ty).to(tile.acc_dtype) for i in (0, 1)[: tile.tiles]])",
            small=True,
        ),
        Planted(
            "last-not-summed",
            "Delta of a long row leaves out its last element",
            old="delta += tl.sum(p * g, 1)",
            new="delta += tl.sum(tl.where(start + col < n - 1, p * g, 0.0), 1)",
            small=True,
        ),
        Planted(
            "delta-bfloat16",
            "the running Delta of a long row is rounded to bfloat16 after each tile",
            old="delta += tl.sum(p * g, 1)",
            new="delta = (delta + tl.sum(p * g, 1)).to(tl.bfloat16).to(tile.acc_dtype)",
            small=True,
        ),
        Planted(
            "rounded-twice",
            "the difference is rounded to the result's dtype before it meets y",
            old="(p[i] * (g[i] - delta)).to",
            new="(p[i] * (g[i] - delta).to(d_x.dtype.element_ty).to(tile.acc_dtype)).to",
            small=True,
        ),
    ],
    "pallas": [
        Planted(
            "delta-of-rounded-terms",
            "Delta sums terms that were rounded to y's dtype",
            old="(at(ref.y) * at(ref.d_y),)",
            new="((at(ref.y) * at(ref.d_y)).astype(ref.y.dtype).astype(jnp.float32),)",
            small=True,
        ),
        Planted(
            "last-not-summed",
            "Delta of a long ragged row leaves out its last element",
            old="strip.sums(lambda at: (at(ref.y) * at(ref.d_y),))",
            new=(
                "strip.sums(lambda at: (jnp.where("
                "jax.lax.broadcasted_iota(jnp.int32, at(ref.y).shape, strip.walk.along)"
                " + strip.step * strip.walk.block_n + at.start"
                " < strip.n - (strip.n > 128 and strip.n % strip.walk.block_n != 0), at(ref.y) * at(ref.d_y), 0.0),))"
            ),
            small=True,
        ),
        Planted(
            "last-block-alone",
            "Delta starts anew at each block",
            old="ref.delta[...] += delta",
            new="ref.delta[...] = delta",
            small=True,
        ),
        Planted(
            "padding-summed",
            "lanes beyond a row enter Delta",
            old="(delta,) = strip.sums(lambda at: (at(ref.y) * at(ref.d_y),))",
            new=(
                "delta = sum(jnp.sum(at(ref.y) * at(ref.d_y), strip.walk.along, keepdims=True)"
                " for at in strip.pieces())"
            ),
        ),
    ],
    "pallas/gpu": [
        Planted(
            "products-rounded",
            "products are rounded before they are added up to Delta",
            old="walk.within(y * d_y, 0.0, start)",
            new="walk.within((y * d_y).astype(jnp.bfloat16).astype(jnp.float32), 0.0, start)",
            small=True,
        ),
        Planted(
            "last-chunk-alone",
            "Delta starts anew at each chunk",
            old="0.0, start), axis=1),)\n\n    def result(",
            new=(
                "0.0, start), axis=1),)\n\n    def merged(self, before, after, seen, here):\n        return after\n\n"
                "    def result("
            ),
            small=True,
        ),
        Planted(
            "padding-summed", "lanes beyond a row enter Delta", old="walk.within(y * d_y, 0.0, start)", new="y * d_y"
        ),
    ],
}
