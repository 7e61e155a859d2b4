"""Faults planted in the kernels of layernorm_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "hx-mean-over-tile",
            "mean(h xh) of a short row divides by the tile's extent",
            old="(tl.sum(h * xh, 1) / n)",
            new="(tl.sum(h * xh, 1) / block_n)",
        ),
        Planted(
            "one-pass-variance",
            "the variance of a short row is E[x^2] - mean^2",
            old="r = tl.rsqrt(tl.sum(d * d, 1) / n + eps)[:, None]",
            new=(
                "r = tl.rsqrt(tl.maximum(tl.sum(t * t, 1) / n - (tl.sum(t, 1) / n) * (tl.sum(t, 1) / n), 0.0) "
                "+ eps)[:, None]"
            ),
            small=True,
        ),
        Planted(
            "padding-in-variance",
            "lanes beyond a short row count in the variance",
            old="d = tl.where(ok, t - (tl.sum(t, 1) / n)[:, None], 0.0)",
            new="d = t - (tl.sum(t, 1) / n)[:, None]",
            small=True,
        ),
        Planted(
            "missing-rows-counted",
            "rows beyond the last have an xh, where eps = 0 of 0 inf",
            old="xh = tl.where(row_ok, d * r, 0.0)",
            new="xh = d * r",
            small=True,
        ),
        Planted(
            "weight-float16",
            "the weight of a short row passes through float16",
            old="mask=lane < n, other=0.0).to(acc_dtype)[None, :]\n    w_sum",
            new="mask=lane < n, other=0.0).to(tl.float16).to(acc_dtype)[None, :]\n    w_sum",
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
        ),
        Planted(
            "d-weight-bfloat16",
            "d_weight is summed in bfloat16",
            old="w_sum += g * xh",
            new="w_sum = (w_sum + g * xh).to(tl.bfloat16).to(acc_dtype)",
        ),
    ],
    "pallas": [
        Planted(
            "one-pass-variance",
            "the variance within a block is E[x^2] - mean^2",
            old="along_row(jnp.square(x - block_mean)) +",
            new="along_row(jnp.square(x)) - jnp.float32(here) * jnp.square(block_mean) +",
            small=True,
        ),
        Planted(
            "ragged-count",
            "the merge counts a ragged last block as full",
            old="here = jnp.minimum(n - seen, block_n)",
            new="here = block_n",
        ),
        Planted(
            "hx-not-moved",
            "mean(h xh) forgets that blocks differ in their means",
            old='((delta - delta * share) * block_h - delta * share * ref["h_sum"][...])',
            new="0.0",
        ),
        Planted(
            "missing-rows-counted",
            "rows beyond the last enter d_weight and d_bias",
            old="if height % block_rows:",
            new="if height % block_rows == 1:",
        ),
        Planted(
            "weight-as-x",
            "a float32 weight is rounded to x's dtype",
            old='ref["weight"][...].astype(jnp.float32)',
            new='ref["weight"][...].astype(ref["d_y"].dtype).astype(jnp.float32)',
            small=True,
        ),
        Planted(
            "last-group-dropped",
            "the last of several partial sums is left out",
            old=(
                "if height % x.shape[0]:\n"
                "        x = jnp.where(positions(x.shape, 0, step * x.shape[0]) < height, x, 0.0)"
            ),
            new="x = jnp.where(positions(x.shape, 0, step * x.shape[0]) < max(height - 1, 1), x, 0.0)",
        ),
        Planted(
            "partial-sums-rounded",
            "partial sums of d_weight are rounded to the inputs' dtype",
            old="over_rows(d_y * xh)",
            new='over_rows(d_y * xh).astype(ref["d_y"].dtype).astype(jnp.float32)',
        ),
    ],
}
