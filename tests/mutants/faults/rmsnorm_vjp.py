"""Faults planted in the kernels of rmsnorm_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "hx-mean-over-tile",
            "mean(h xh) of a short row divides by the tile's extent",
            old="(row_sum([h[i] * xh[i] for i in (0, 1)[: tile.tiles]]) / n)",
            new="(row_sum([h[i] * xh[i] for i in (0, 1)[: tile.tiles]]) / tile.block_n)",
        ),
        Planted(
            "missing-rows-counted",
            "rows beyond the last have an xh, where eps = 0 of 0 inf",
            old="xh = [tl.where(row_ok, a * r, 0.0) for a in t]",
            new="xh = [a * r for a in t]",
            small=True,
        ),
        Planted(
            "last-not-summed",
            "mean(h xh) of a long row leaves out its last element",
            old="hx += tl.sum(h * t, 1)",
            new="hx += tl.sum(tl.where(col < n - 1, h * t, 0.0), 1)",
            small=True,
        ),
        Planted(
            "weight-float16",
            "the weight of d_x passes through float16",
            old="w = [k[None, :] for k in load_tiles(",
            new="w = [k[None, :].to(tl.float16).to(tile.acc_dtype) for k in load_tiles(",
            small=True,
        ),
        Planted(
            "d-weight-bfloat16",
            "d_weight is summed in bfloat16",
            old="w_sum = [w_sum[i] + g[i] * narrowed(xh[i], x, narrow) for",
            new="w_sum = [(w_sum[i] + g[i] * xh[i]).to(tl.bfloat16).to(tile.acc_dtype) for",
        ),
    ],
    "pallas": [
        Planted(
            "padding-summed",
            "lanes beyond a row enter its sums",
            old="strip.sums(sums)",
            new=(
                "map(sum, zip(*([jnp.sum(v, axis=1, keepdims=True) for v in sums(at)] for at in strip.pieces()), "
                "strict=True))"
            ),
        ),
        Planted(
            "last-block-alone",
            "the sums of a row start anew at each block",
            old="ref.squares[...] += squares\n        if",
            new="ref.squares[...] = squares\n        if",
        ),
        Planted(
            "missing-rows-counted",
            "rows beyond the last enter d_weight",
            old="at.add_to(",
            new="at._replace(strip=strip._replace(first=-(2**20))).add_to(",
        ),
        Planted(
            "weight-as-x",
            "a float32 weight is rounded to x's dtype",
            old="at(ref.d_y) * at(ref.weight)",
            new="at(ref.d_y) * at(ref.weight).astype(ref.d_y.dtype).astype(jnp.float32)",
            small=True,
        ),
        Planted(
            "partial-sums-rounded",
            "partial sums of d_weight are rounded to the inputs' dtype",
            old="at.add_to(ref.d_weight, at(ref.d_y) * narrowed(xh, ref.x.dtype, narrow))",
            new=(
                "at.add_to(ref.d_weight, at(ref.d_y) * narrowed(xh, ref.x.dtype, narrow))\n"
                "                ref.d_weight[...] = ref.d_weight[...].astype(ref.d_y.dtype).astype(jnp.float32)"
            ),
        ),
    ],
    "pallas/gpu": [
        Planted(
            "hx-of-xh",
            "mean(h xh) has one r too few",
            old="walk.spread(r * (statistics[1] / walk.n))",
            new="walk.spread(statistics[1] / walk.n)",
            within="lib.mosaic_gpu.norms",
        ),
        Planted(
            "cotangent-not-narrowed",
            "h is not rounded as the forward pass rounds what the weight meets",
            old='return narrowed(cotangent(d_y, weights), self.narrow) if "weight" in weights else d_y',
            new="return cotangent(d_y, weights)",
            small=True,
            within="lib.mosaic_gpu.norms",
        ),
        Planted(
            "d-weight-not-narrowed",
            "xh of d_weight is not rounded as the forward pass rounds it",
            old="return narrowed(x * r, narrow)",
            new="return x * r",
            small=True,
        ),
    ],
    "pallas/fused": [
        Planted(
            "d-weight-without-r",
            "d_weight sums d_y x",
            old="return narrowed(x * r, narrow)",
            new="return narrowed(x, narrow)",
        )
    ],
}
