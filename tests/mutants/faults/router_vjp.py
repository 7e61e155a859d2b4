"""Faults planted in the kernels of router_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "others-too",
            "experts that were not chosen have what the formula gives",
            old="    if plan.normalize or not plan.softmax:\n        d = tl.where(chosen, d, 0.0)\n",
            new="",
            sample=True,
            edge="special_logits",
            at=(0, 20),
        ),
        Planted(
            "sum-of-all",
            "softmax is over all experts where it should be over the chosen ones",
            old='exponentials(tl.where(chosen, x, float("-inf")) if plan.normalize else x)',
            new="exponentials(x)",
            sample=True,
            at=(0, 20),
        ),
        Planted(
            "slope-without-the-rest",
            "of sigmoids over their sum 1 - s is left out",
            old="d = q * (h * (g - tl.sum(h * g, 1)[:, None]))",
            new="d = h * (g - tl.sum(h * g, 1)[:, None])",
            at=(0, 40),
        ),
        Planted(
            "cotangents-as-far-apart-as-indices",
            "d_weights is read with the strides of indices",
            old="t * d_weights_strides.n",
            new="t * indices_strides.n",
            gpu=False,
            at=(0, 60),
        ),
        Planted(
            "first-cotangent",
            "every expert has the first cotangent",
            old="tl.load(g_row[:, None] + t * d_weights_strides.n",
            new="tl.load(g_row[:, None] + 0 * t * d_weights_strides.n",
            at=(0, 20),
        ),
    ],
    "pallas": [
        Planted(
            "one-cotangent",
            "every expert has the first cotangent",
            old="column(bits(ref.d_weights[...]), t)",
            new="column(bits(ref.d_weights[...]), 0)",
            sample=True,
            at=(0, 20),
        ),
        Planted(
            "without-the-sum",
            "softmax's sum has no gradient",
            old="        h = p / l\n        d = h * (g - jnp.sum(h * g, axis=1, keepdims=True))\n",
            new="        h = p / l\n        d = h * g\n",
            at=(0, 20),
        ),
    ],
}
