"""Faults of slopes, planted in attention and in its gradients: where the text lies that both kernels have."""

from __future__ import annotations

from tests.mutants.faults import Planted

LOWERED = [
    Planted(
        "slopes-of-other-sign",
        "keys gain by their distance",
        old="tl.broadcast_to(-slope, s.shape)",
        new="tl.broadcast_to(slope, s.shape)",
        within="lib.heads",
    ),
    Planted(
        "slopes-in-natural-units",
        "slopes are taken for numbers in the unit of the scores",
        old="        slope = slope * scores.per_unit\n",
        new="        slope = slope * 1.0\n",
        within="lib.heads",
    ),
]

SLOPES = {
    "triton": [
        *LOWERED,
        Planted(
            "slopes-from-the-first-query",
            "distances count from the first key on, wherever queries stand",
            old="slope_of(slopes, heads, scores), row + extents.first_place",
            new="slope_of(slopes, heads, scores), row",
            sample=True,
            edge="slopes_in_a_window",
        ),
        Planted(
            "slopes-of-key-heads",
            "query heads of a group take the slope of their key head",
            old="slope_of(slopes, heads, scores), row",
            new="slope_of(slopes, heads // extents.group, scores), row",
        ),
    ],
    "pallas": [
        Planted(
            "slopes-of-other-sign",
            "keys gain by their distance",
            old="    return slope * jnp.abs(position",
            new="    return -slope * jnp.abs(position",
            sample=True,
            edge="slopes_in_a_window",
        ),
        Planted(
            "slopes-from-the-first-query",
            "distances count from the first key on, wherever queries stand",
            old="(np.arange(q_len) + first_place(call))",
            new="(np.arange(q_len) + 0)",
        ),
        Planted(
            "slopes-head-by-head",
            "rows have slopes head by head, and are query by query",
            old="    return jnp.stack(rows, 1).reshape(",
            new=(
                "    rows[0] = jnp.swapaxes(rows[0], 1, 2).reshape(rows[1].shape)\n"
                "    return jnp.stack(rows, 1).reshape("
            ),
        ),
    ],
}

SLOPES_VJP = {
    "triton": [
        *LOWERED,
        Planted(
            "slopes-of-keys-on-the-other-side",
            "a key stands among queries as far on as it is back",
            old="slope_of(slopes, head, scores), col - extents.first_place",
            new="slope_of(slopes, head, scores), col + extents.first_place",
            sample=True,
            edge="slopes_in_a_window",
        ),
        Planted(
            "slopes-of-key-heads",
            "d_k and d_v take the slope of the key head",
            old="slope_of(slopes, head, scores), col",
            new="slope_of(slopes, kv_head, scores), col",
        ),
        Planted(
            "slopes-of-d-bias-from-the-first-query",
            "distances of the bias's gradient count from the first key on",
            old="slope_of(slopes, head, scores), row + extents.first_place",
            new="slope_of(slopes, head, scores), row",
        ),
    ],
    "pallas": [
        Planted(
            "slopes-of-keys-of-another-sign",
            "where keys are rows they gain by their distance",
            old="    return ref.of_rows[SLOPE, :] * jnp.abs(",
            new="    return -ref.of_rows[SLOPE, :] * jnp.abs(",
            sample=True,
            edge="slopes_in_a_window",
        ),
        Planted(
            "slopes-of-the-first-block-of-keys",
            "d_q has the distances of the first block of keys in all of them",
            old="fall_of(ref.of_rows[SLOPE, :].T, ref.of_rows[PLACE, :].T, j * band.block_kv, band.block_kv)",
            new="fall_of(ref.of_rows[SLOPE, :].T, ref.of_rows[PLACE, :].T, 0, band.block_kv)",
        ),
        Planted(
            "slopes-of-another-head",
            "every head has the slope of the head before",
            old="            every = jnp.broadcast_to(slopes,",
            new="            every = jnp.broadcast_to(jnp.roll(slopes, 1, 1),",
        ),
    ],
}
