"""Faults planted in the kernels of geglu_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "cube-not-differentiated",
            "the slope has the cube's factor once",
            old="(1.0 + 3.0 * C * g * g)",
            new="(1.0 + C * g * g)",
            within="lib.activations",
        ),
        Planted(
            "far-gates-as-they-are",
            "the slope is taken of any gate, whose cube overflows",
            old="return tl.where(g > FAR, FAR, tl.where(g < -FAR, -FAR, g))",
            new="return g",
            small=True,
            within="lib.activations",
        ),
        Planted(
            "normal-of-the-gate",
            "the exponent is that of g^2, and not of half of it",
            old="tl.exp(-0.5 * g * g)",
            new="tl.exp(-g * g)",
            sample=True,
            within="lib.activations",
        ),
    ],
    "pallas": [
        Planted(
            "cube-not-differentiated",
            "the slope has the cube's factor once",
            old="(1.0 + 3.0 * C * g * g)",
            new="(1.0 + C * g * g)",
        ),
        Planted(
            "far-gates-as-they-are",
            "the slope is taken of any gate, whose cube overflows",
            old="    g = jnp.where(g > FAR, FAR, jnp.where(g < -FAR, -FAR, g))\n",
            new="",
            small=True,
        ),
        Planted(
            "slope-rounded",
            "the slope is rounded to the result's dtype before it meets d_y up",
            old="* slope).astype(ref.d_gate.dtype)",
            new="* slope.astype(ref.d_gate.dtype).astype(jnp.float32)).astype(ref.d_gate.dtype)",
            sample=True,
        ),
    ],
}
