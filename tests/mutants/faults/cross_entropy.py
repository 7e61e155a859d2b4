"""Faults planted in the kernels of cross_entropy."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "lse-less-the-label",
            "the loss is lse - x_t, which has lost the digits of a certain label",
            old="value = log + (shift - at)",
            new="value = (shift + log) - at",
            small=True,
            sample=True,
            edge="certain_rows",
            at=(0, 20),
            within="lib.cross_entropy",
        ),
        Planted(
            "long-row-not-rescaled",
            "the sum of a long row is not rescaled where the maximum grows",
            old="tl.fma(l, exp_or_zero(tl.minimum(m - shift, 0.0)), found)",
            new="l + found",
            within="lib.rows",
        ),
        Planted(
            "mean-over-tiles",
            "the mean of a row is over its tiles' extent",
            old="total / n",
            new="total / ((n + 127) // 128 * 128)",
            within="lib.cross_entropy",
        ),
        Planted(
            "ignored-counted",
            "the lse of an ignored row is what masked lanes make of it",
            old="tl.where(counted, total, 0.0)",
            new="total",
            within="lib.cross_entropy",
        ),
        Planted(
            "z-of-the-maximum",
            "z meets m^2 and not lse^2",
            old="z * (shift + log) * (shift + log)",
            new="z * shift * shift",
            within="lib.cross_entropy",
        ),
        Planted(
            "smoothing-of-the-rest",
            "the label keeps the whole target beside what all classes share",
            old="log + (1.0 - terms.even) * (shift - at)",
            new="log + (shift - at)",
            within="lib.cross_entropy",
        ),
        Planted(
            "stride-forgotten",
            "the label's logit is looked for as if a row lay without gaps",
            old="x_at + label * x_n",
            new="x_at + label",
            gpu=False,
            within="lib.cross_entropy",
        ),
        Planted(
            "mean-of-the-last-tile",
            "the mean of a long row in a strip is that of its last tile",
            old="acc += t[i]",
            new="acc = t[i]",
            sample=True,
            edge="all_of_the_target_is_even",
            within="lib.cross_entropy",
        ),
        Planted(
            "labels-of-other-groups",
            "rows in strips take the labels of the first group of them",
            old="group * strides.numbers.group + lane * strides.numbers.lane",
            new="lane * strides.numbers.lane",
            within="lib.cross_entropy",
        ),
    ],
    "pallas": [
        Planted(
            "lse-less-the-label",
            "the loss is lse - x_t, which has lost the digits of a certain label",
            old="loss = log + (1.0 - even) * (shift - ref.at[...])",
            new="loss = (shift + log) - (1.0 - even) * ref.at[...] - even * shift",
            small=True,
        ),
        Planted(
            "label-in-every-block",
            "the label's place is counted anew in each block",
            old=" + step * walk.block_n",
            new="",
        ),
        Planted(
            "padding-summed",
            "what lies beyond a row counts in its mean",
            old="walk.sum_along_rows(x, step)",
            new="jnp.sum(jnp.maximum(x, -1e30), axis=walk.along, keepdims=True)",
        ),
        Planted(
            "ignored-counted",
            "an ignored row has the lse of its logits",
            old="jnp.where(labels == ignored, 0.0, found)",
            new='jnp.where((labels == ignored) & (name == "loss"), 0.0, found)',
            sample=True,
        ),
    ],
}
