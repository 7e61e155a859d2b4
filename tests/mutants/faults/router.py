"""Faults planted in the kernels of router."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "last-of-ties",
            "of equal experts the last comes first",
            old="at = tl.min(tl.where(key == top, lane, plan.groups * plan.width), 1)[:, None]",
            new="at = tl.max(tl.where(key == top, lane, 0), 1)[:, None]",
            at=(0, 40),
        ),
        Planted(
            "weights-of-sums",
            "the experts are those with the best scores, whatever the bias",
            old="key = tl.where(known, turned(x if bias is None else score, plan), plan.least)",
            new="key = tl.where(known, turned(x, plan), plan.least)",
            sample=True,
            at=(0, 40),
        ),
        Planted(
            "group-of-its-best",
            "a group counts by its best expert alone",
            old="total = turned(number_of(first, plan) + number_of(second, plan), plan)",
            new="total = turned(number_of(first, plan) + number_of(first, plan), plan)",
            sample=True,
            edge="one_great_expert_is_no_great_group",
            at=(0, 20),
        ),
        Planted(
            "second-is-the-first",
            "the second of a group is its first again where two are equal",
            old="second = tl.max(tl.where(expert == at[:, :, None], plan.least, key), 2)",
            new="second = tl.max(tl.where(key == first[:, :, None], plan.least, key), 2)",
            at=(0, 100),
        ),
        Planted(
            "last-of-equal-groups",
            "of equal groups the last is kept",
            old="(group[None, None, :] < group[None, :, None])",
            new="(group[None, None, :] > group[None, :, None])",
            at=(0, 100),
        ),
        Planted(
            "padding-is-a-group",
            "groups that fill up a power of two count",
            old="    total = tl.where((group < groups.groups)[None, :], total, plan.least)\n",
            new="",
            at=(0, 60),
        ),
        Planted(
            "padding-is-an-expert",
            "experts that fill up a power of two may be chosen",
            old="key = tl.where(known, turned(x if bias is None else score, plan), plan.least)",
            new="key = turned(x if bias is None else score, plan)",
            gpu=False,
            at=(0, 100),
        ),
        Planted(
            "filled-groups",
            "experts of a group are counted as those of one that is filled up",
            old="place = (found // plan.width * groups.width + found % plan.width).to(tl.int64)",
            new="place = found.to(tl.int64)",
            gpu=False,
            at=(0, 60),
        ),
        Planted(
            "sum-of-all",
            "weights that should add up to 1 are divided by the sum over all experts",
            old="            p, l, _ = exponentials(x)\n            w = p / l\n",
            new="            w = tl.exp(x - m) / l\n",
            at=(0, 20),
        ),
        Planted(
            "sum-of-the-power",
            "a sum of sigmoids counts those that fill up a power of two",
            old="tl.sum(tl.where(ok, w, 0.0), 1)",
            new="tl.sum(tl.where(ok, w, 1.0), 1)",
            at=(0, 60),
        ),
    ],
    "pallas": [
        Planted(
            "group-of-its-best",
            "a group counts by its best expert alone",
            old="number_of(first) + number_of(second)",
            new="number_of(first) + number_of(first)",
            at=(0, 40),
        ),
        Planted(
            "one-group",
            "the first pass alone keeps a group",
            old="lax.fori_loop(np.int32(0), np.int32(kept), one_pass, start)[2]",
            new="lax.fori_loop(np.int32(0), np.int32(1), one_pass, start)[2]",
            at=(0, 40),
        ),
        Planted(
            "no-bias",
            "the experts are those with the best scores, whatever the bias",
            old="turned(s + ref.bias[...] if biased else s, True)",
            new="turned(s, True)",
            at=(0, 20),
        ),
        Planted(
            "others-as-zeros",
            "experts of groups that are left out have a key of 0",
            old="ref.key[...] if biased else turned(x, True), LEAST)",
            new="ref.key[...] if biased else turned(x, True), 0)",
            sample=True,
            edge="sums_below_zero",
            at=(0, 20),
        ),
        Planted(
            "not-scaled",
            "weights are not scaled",
            old="ref.weights[...] = w * scale",
            new="ref.weights[...] = w",
            at=(0, 20),
        ),
    ],
}
