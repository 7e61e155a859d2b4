"""Faults planted in the kernels of permute."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "strangers-have-places",
            "a pair of no expert is given the place behind the last expert's",
            old="tl.where(there, at, -1)",
            new="tl.where(at >= 0, at, -1)",
            sample=True,
            edge="indices_that_are_no_expert",
            at=(0, 6),
        ),
        Planted(
            "rows-of-strangers",
            "the rows behind the last expert's are those of tokens of none",
            old="tl.where(there, pair // k, -1)",
            new="tl.where(at >= 0, pair // k, -1)",
        ),
        Planted(
            "one-row-for-each-pair",
            "a pair's number is taken for its token",
            old="pair // k, -1",
            new="pair // k * 0 + tl.minimum(pair, extents.tokens // k - 1), -1",
        ),
        Planted(
            "starts-for-ends",
            "groups are given by where they begin",
            old="key = (expert + 1) << TOKEN_BITS",
            new="key = expert << TOKEN_BITS",
        ),
        Planted(
            "ends-a-step-short",
            "the search for where an expert ends stops a step early",
            old="SortExtents(pairs, experts, pairs, pairs.bit_length())",
            new="SortExtents(pairs, experts, pairs, pairs.bit_length() - 1)",
        ),
        Planted(
            "rows-without-gaps",
            "rows of x are taken to lie beside each other",
            old="(token * of_token)[:, None]",
            new="(token * extents.d)[:, None]",
            gpu=False,
        ),
        Planted(
            "nan-for-no-token",
            "a row of no token is NaN, as embedding's are",
            old="other=0.0)\n    tl.store(y",
            new='other=float("nan"))\n    tl.store(y',
        ),
        Planted(
            "subnormal-numbers-flushed",
            "numbers pass through float32 arithmetic that flushes",
            old="    tl.store(y + (row",
            new="    found = tl.where(tl.abs(found.to(tl.float32)) < 1.1754943508222875e-38, 0.0, found.to(tl.float32))"
            ".to(y.dtype.element_ty)\n    tl.store(y + (row",
            small=True,
        ),
    ],
    "pallas": [
        Planted(
            "strangers-have-places",
            "a pair of no expert is given the place behind the last expert's",
            old="jnp.where(there, place, -1)",
            new="place",
            sample=True,
            edge="indices_that_are_no_expert",
            at=(0, 4),
        ),
        Planted(
            "starts-for-ends",
            "groups are given by where they begin",
            old='side="right"',
            new='side="left"',
        ),
        Planted(
            "one-row-for-each-pair",
            "a pair's number is taken for its token",
            old='order // call.dims["k"]',
            new='jnp.minimum(order, call.dims["tokens"] - 1)',
        ),
        Planted(
            "nan-for-no-token",
            "a row of no token is NaN, as embedding's are",
            old="token, 0.0)",
            new="token, jnp.nan)",
        ),
        Planted(
            "order-for-positions",
            "which pair has a row is taken for which row has a pair",
            old="jnp.zeros(pairs, jnp.int32).at[order].set(jnp.where(there, place, -1), unique_indices=True)",
            new="jnp.where(there, order, -1)",
        ),
    ],
}
