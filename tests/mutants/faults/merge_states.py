"""Faults planted in the kernels of merge_states."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "reads-parts-without-keys",
            "o of a part without keys is read, and 0 times NaN is NaN",
            old="has_a & inside[None, :], strides.o_a",
            new="has_token[:, None] & inside[None, :], strides.o_a",
            sample=True,
            edge="parts_without_keys",
            at=(0, 8),
        ),
        Planted(
            "no-key-at-all-is-nan",
            "the lse of two parts without keys are subtracted: -inf - -inf",
            old="tl.where(nothing, 0.0, lse_a - lse_b)",
            new="lse_a - lse_b",
        ),
        Planted(
            "base-2",
            "lse is taken for a logarithm of base 2",
            old="tl.exp(-tl.abs(apart))",
            new="tl.exp2(-tl.abs(apart))",
            sample=True,
        ),
        Planted(
            "weights-rounded",
            "the smaller weight is kept in bfloat16",
            old="PartShares(high, e * high,",
            new="PartShares(high, (e * high).to(tl.bfloat16).to(high.dtype),",
            small=True,
        ),
        Planted(
            "weights-exchanged",
            "each part has the weight of the other",
            old="tl.where(leads, a, b), tl.where(leads, b, a)",
            new="tl.where(leads, b, a), tl.where(leads, a, b)",
        ),
        Planted("larger-lse", "lse is the larger of the two", old=" + grown", new=" + 0.0 * grown"),
        Planted(
            "lse-of-base-2",
            "the logarithm of the sum is one of base 2 beside natural ones",
            old="grown = tl.log(1.0",
            new="grown = tl.log2(1.0",
        ),
        Planted(
            "two-infinite-lse",
            "two lse of +inf have the sum NaN",
            old="tl.where(log_a == log_b, 1.0, shares.e)",
            new="shares.e",
            small=True,
        ),
        Planted(
            "last-number-not-merged",
            "the last number of a head is neither read nor written",
            old="s < extents.tokens, p < d",
            new="s < extents.tokens, p < d - 1",
            sample=True,
        ),
        Planted(
            "product-rounded",
            "a product is rounded to the result's dtype before it is added",
            old="less * shares.low[:, None])",
            new="(less * shares.low[:, None]).to(o.dtype.element_ty).to(tile.acc_dtype))",
            small=True,
        ),
        Planted(
            "one-layout",
            "lse_b is read with the strides of lse_a",
            old="s, has_token, strides.lse_b, tile)",
            new="s, has_token, strides.lse_a, tile)",
            times=2,
            gpu=False,
            small=True,
        ),
    ],
    "pallas": [
        Planted(
            "reads-parts-without-keys",
            "o of a part without keys is multiplied by 0, and 0 times NaN is NaN",
            old="jnp.where(weight == NO_KEYS, 0.0, weight * o.astype(jnp.float32))",
            new="jnp.maximum(weight, 0.0) * o.astype(jnp.float32)",
            sample=True,
            edge="parts_without_keys",
            at=(0, 8),
        ),
        Planted(
            "base-2",
            "lse is taken for a logarithm of base 2",
            old="jnp.exp(-jnp.abs(apart))",
            new="jnp.exp2(-jnp.abs(apart))",
        ),
        Planted(
            "weights-rounded",
            "the smaller weight is kept in bfloat16",
            old="low, a_leads = e * high,",
            new="low, a_leads = (e * high).astype(jnp.bfloat16).astype(jnp.float32),",
            small=True,
            sample=True,
        ),
        Planted("larger-lse", "lse is the larger of the two", old=" + grown", new=" + 0.0 * grown"),
        Planted(
            "two-infinite-lse",
            "two lse of +inf have the sum NaN",
            old="jnp.where(lse_a == lse_b, 1.0, e)",
            new="e",
            small=True,
        ),
        Planted(
            "heads-not-turned",
            "o is taken for (batch, heads, tokens, d)",
            old="jnp.swapaxes(array, -3, -2).reshape(self.shape)",
            new="array.reshape(self.shape)",
        ),
    ],
}
