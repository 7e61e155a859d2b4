"""Faults planted in the kernels of rmsnorm_quantize."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "mean-over-tile",
            "the mean of squares divides by the tile's extent",
            old="inverse_rms(t, n, limits.eps)",
            new="inverse_rms(t, tile.block_n, limits.eps)",
            sample=True,
        ),
        Planted(
            "long-mean-over-group",
            "of a row that is read group by group the mean divides by the numbers of a group",
            old="n, row_ok, tile) / n + limits.eps)",
            new="n, row_ok, tile) / extents.width + limits.eps)",
        ),
        Planted(
            "y-of-16-bits",
            "y is rounded to the dtype of x before it is quantised",
            old="    return scale_and_shift(narrowed(t * r, x, narrow), affine, lane, inside, tile)",
            new="    y = scale_and_shift(narrowed(t * r, x, narrow), affine, lane, inside, tile)\n"
            "    return y.to(x.dtype.element_ty).to(tile.acc_dtype)",
            sample=True,
        ),
        Planted(
            "rounding-ignored",
            "x r is never rounded before the weight",
            old="narrow=rounds_before(call)",
            new="narrow=False",
        ),
        Planted(
            "scale-of-the-first-tile",
            "of a row in two tiles the first one's greatest number counts",
            old="row_max([magnitude_bits(a, codes) for a in y])",
            new="tl.max(magnitude_bits(y[0], codes), 1)",
            edge="tokens_whose_last_number_is_greatest",
            sample=True,
        ),
        Planted(
            "second-tile-over-the-first",
            "scales of a second tile's groups lie over those of the first",
            old="store_groups(y[i], q, scale, i * (y[0].shape[1] // codes.lanes), col[i]",
            new="store_groups(y[i], q, scale, 0, col[i]",
        ),
        Planted(
            "scale-inverted",
            "the scale of a group is the one to multiply y with",
            old="    tl.store(scale + group, s, mask=",
            new="    tl.store(scale + group, inverse_of(s), mask=",
        ),
        Planted(
            "last-part-alone",
            "of a group that takes several reads the last one's greatest number counts",
            old="found = tl.maximum(found, magnitude_bits(read(",
            new="found = tl.maximum(found * 0, magnitude_bits(read(",
        ),
        Planted(
            "short-group-reads-on",
            "the last group of a row, which is short, counts what the next row begins with",
            old="tl.minimum((group + 1).to(tl.int64) * extents.width, extents.n)",
            new="(group + 1).to(tl.int64) * extents.width",
            gpu=False,
        ),
    ],
    "pallas": [
        Planted(
            "eps-ignored",
            "eps is always 1e-6",
            old='strip.n + call.options["eps"])',
            new="strip.n + 1e-6)",
            at=(0, 60),
        ),
        Planted(
            "rounding-ignored",
            "x r is never rounded before the weight",
            old="narrow = rounds_before(call)",
            new="narrow = False",
            at=(0, 60),
        ),
        Planted(
            "nan-lost",
            "a NaN does not reach the scale of its group",
            old="    return jnp.where(lost > 0, jnp.nan, found)",
            new="    return found",
            at=(0, 60),
        ),
        Planted(
            "group-of-the-next",
            "a masked group counts the number behind it",
            old="jnp.minimum(first + width, strip.n)",
            new="jnp.minimum(first + width + 1, strip.n)",
            sample=True,
            at=(0, 60),
        ),
        Planted(
            "scale-inverted",
            "the scale of a group is the one to multiply y with",
            old="        ref.scale[:, group : group + 1] = scale\n",
            new="        ref.scale[:, group : group + 1] = inverse(scale)\n",
            at=(0, 60),
        ),
    ],
}
