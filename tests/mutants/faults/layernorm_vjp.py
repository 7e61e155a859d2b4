"""Faults planted in the kernels of layernorm_vjp."""

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
            "one-pass-variance",
            "the variance of a short row is E[x^2] - mean^2",
            old="tl.rsqrt(row_sum([a * a for a in d]) / n + eps)",
            new=(
                "tl.rsqrt(tl.maximum(row_sum([a * a for a in t]) / n - (row_sum(t) / n) * (row_sum(t) / n), 0.0) + eps)"
            ),
            small=True,
            within="lib.rows",
        ),
        Planted(
            "padding-in-variance",
            "lanes beyond a short row count in the variance",
            old="d = [tl.where(ok[i], t[i] - mean, 0.0) for i in (0, 1)[: len(t)]]",
            new="d = [a - mean for a in t]",
            small=True,
            within="lib.rows",
        ),
        Planted(
            "missing-rows-counted",
            "rows beyond the last have an xh, where eps = 0 of 0 inf",
            old="xh = [tl.where(row_ok, a * r, 0.0) for a in d]",
            new="xh = [a * r for a in d]",
            small=True,
        ),
        Planted(
            "weight-float16",
            "the weight of a short row passes through float16",
            old="w = [k[None, :] for k in load_tiles(",
            new="w = [k[None, :].to(tl.float16).to(tile.acc_dtype) for k in load_tiles(",
            small=True,
        ),
        Planted(
            "unbiased-variance",
            "long rows divide the variance by n - 1",
            old="r = tl.rsqrt(m2 / n + eps)",
            new="r = tl.rsqrt(m2 / (n - 1) + eps)",
        ),
        Planted(
            "hx-not-moved",
            "mean(h xh) of a long row forgets that its tiles differ in their means",
            old="tl.sum(h * d, 1) + ((delta - step) * tile_h - step * h_sum)",
            new="tl.sum(h * d, 1)",
        ),
        Planted(
            "last-group-dropped",
            "the last of several partial sums is left out",
            old="ok = (row < count) & (col < n)",
            new="ok = (row < count - tl.minimum(count // 2, 1)) & (col < n)",
            small=True,
            within="lib.column_sums",
        ),
        Planted(
            "d-weight-bfloat16",
            "d_weight is summed in bfloat16",
            old="w_sum = [w_sum[i] + g[i] * xh[i] for",
            new="w_sum = [(w_sum[i] + g[i] * xh[i]).to(tl.bfloat16).to(tile.acc_dtype) for",
        ),
    ],
    "pallas": [
        Planted(
            "one-pass-variance",
            "the variance within a block is E[x^2] - mean^2",
            old="jnp.square(d)",
            new="(jnp.square(at(ref.x)) - jnp.square(block_mean))",
            times=2,
            small=True,
        ),
        Planted(
            "ragged-count",
            "the merge counts a ragged last block as full",
            old="here = jnp.minimum(walk.n - seen, walk.block_n)",
            new="here = walk.block_n",
            within="layernorm",
        ),
        Planted(
            "hx-not-moved",
            "mean(h xh) forgets that blocks differ in their means",
            old="(delta - moved) * block_h - moved * ref.h_sum[...]",
            new="0.0",
        ),
        Planted(
            "missing-rows-counted",
            "rows beyond the last enter d_weight and d_bias",
            old="at.add_to(",
            new="at._replace(strip=strip._replace(first=-(2**20))).add_to(",
            times=2,
        ),
        Planted(
            "weight-as-x",
            "a float32 weight is rounded to x's dtype",
            old="at(ref.d_y) * at(ref.weight)",
            new="at(ref.d_y) * at(ref.weight).astype(ref.d_y.dtype).astype(jnp.float32)",
            small=True,
        ),
        Planted(
            "last-group-dropped",
            "the last of several partial sums is left out",
            old="    rows = within(partial_sums, 0, step * partial_sums.shape[0], height)\n",
            new=(
                "    place = lax.broadcasted_iota(jnp.int32, partial_sums.shape, 0) + step * partial_sums.shape[0]\n"
                "    rows = jnp.where(place < max(height - 1, 1), partial_sums, 0.0)\n"
            ),
        ),
        Planted(
            "partial-sums-rounded",
            "partial sums of d_weight are rounded to the inputs' dtype",
            old="at.add_to(ref.d_weight, at(ref.d_y) * xh)",
            new=(
                "at.add_to(ref.d_weight, at(ref.d_y) * xh)\n"
                "                    ref.d_weight[...] = ref.d_weight[...].astype(ref.d_y.dtype).astype(jnp.float32)"
            ),
        ),
    ],
    "pallas/gpu": [
        Planted(
            "hx-not-moved",
            "mean(h xh) of a row in chunks forgets that these differ in their means",
            old=" + ((delta - moved) * h_after - moved * h_sum)",
            new="",
            within="lib.mosaic_gpu.norms",
        ),
        Planted(
            "padding-in-h",
            "what lies beyond a row counts in the sums of h where no weight is there to be 0",
            old="walk.within(cotangent(x[1], weights), 0.0, start)",
            new="cotangent(x[1], weights)",
            within="lib.mosaic_gpu.norms",
        ),
        Planted(
            "first-rows-scale",
            "d_weight takes r of the first row for all",
            old="*(ref.told[i, row] for i in range(extra_numbers))",
            new="*(ref.told[i, row if i == 0 else 0] for i in range(extra_numbers))",
        ),
        Planted(
            "mean-h-dropped",
            "d_x is not made orthogonal to a constant",
            old="pull = walk.spread(h_sum / walk.n) + xh",
            new="pull = xh",
            within="lib.mosaic_gpu.norms",
        ),
    ],
    "pallas/fused": [
        Planted(
            "last-rows-sums",
            "sums over rows are those of a block's last row",
            old="tuple(total + terms[name] for",
            new="tuple(terms[name] for",
        ),
        Planted(
            "d-bias-of-xh", "d_bias sums d_y xh, as d_weight does", old='"d_bias": d_y}', new='"d_bias": d_y * xh}'
        ),
        Planted(
            "rows-of-the-first-block",
            "every block reads the rows of the first, and writes its own",
            old="bring_rows(ref, walk, first + i, 0,",
            new="bring_rows(ref, walk, i, 0,",
        ),
    ],
}
