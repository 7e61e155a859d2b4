"""Faults planted in the kernels of merge_states_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "gradient-of-no-keys",
            "a part without keys has the gradient that its weight of 0 gives: NaN beside a cotangent of NaN",
            old="tl.where(has_a[:, None], w_a[:, None] * d, 0.0)",
            new="w_a[:, None] * d",
        ),
        Planted(
            "slope-beside-no-keys",
            "a part without keys moves the other's gradient: 0 times NaN",
            old="tl.where(both, (w_a * w_b) * tl.sum(d * (a - b), 1), 0.0)",
            new="(w_a * w_b) * tl.sum(d * (a - b), 1)",
            small=True,
        ),
        Planted(
            "one-sign",
            "what one part gains the other does not lose",
            old="tl.fma(w_b, g, -slope)",
            new="tl.fma(w_b, g, slope)",
            sample=True,
            edge="extents_of_1",
        ),
        Planted(
            "products-before-the-difference",
            "the difference of two sums of products: both are large where the parts are almost equal",
            old="tl.sum(d * (a - b), 1)",
            new="(tl.sum(d * a, 1) - tl.sum(d * b, 1))",
            small=True,
            sample=True,
            edge="parts_all_but_equal",
        ),
        Planted("d-lse-forgotten", "d_lse does not reach b", old="tl.fma(w_b, g, -slope)", new="-slope"),
        Planted(
            "one-weight",
            "the slope has one of its two weights",
            old="(w_a * w_b) * tl.sum",
            new="w_a * tl.sum",
        ),
        Planted(
            "weights-rounded",
            "the weight of b is kept in bfloat16",
            old="shares.low, shares.high)\n",
            new="shares.low, shares.high).to(tl.bfloat16).to(tile.acc_dtype)\n",
            small=True,
        ),
    ],
    "pallas": [
        Planted(
            "gradient-of-no-keys",
            "a part without keys has the gradient that a weight of 0 gives: NaN beside a cotangent of NaN",
            old="jnp.where(weight == NO_KEYS, 0.0, weight * o.astype(jnp.float32))",
            new="jnp.maximum(weight, 0.0) * o.astype(jnp.float32)",
        ),
        Planted(
            "slope-beside-no-keys",
            "a part without keys moves the other's gradient",
            old="jnp.where(has_a & has_b, (shares.w_a * shares.w_b) * total, 0.0)",
            new="(shares.w_a * shares.w_b) * total",
        ),
        Planted(
            "one-sign",
            "what one part gains the other does not lose",
            old="shares.w_b * g - slope",
            new="shares.w_b * g + slope",
            sample=True,
        ),
        Planted(
            "difference-rounded",
            "the difference of the parts is rounded to their dtype",
            old="ref.o_b[here, :].astype(jnp.float32)\n",
            new="ref.o_b[here, :].astype(jnp.float32)\n"
            "            apart = apart.astype(ref.o_a.dtype).astype(jnp.float32)\n",
            small=True,
            sample=True,
        ),
    ],
}
