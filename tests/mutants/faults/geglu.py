"""Faults planted in the kernels of geglu."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "tanh-for-erf",
            "the tanh form serves both",
            old="    if tanh:\n        gated(",
            new="    if tanh or True:\n        gated(",
            small=True,
        ),
        Planted(
            "cube-left-out", "t is that of the gate alone", old="K * g * (1.0 + C * g * g)", new="K * g", sample=True
        ),
        Planted(
            "erf-of-the-gate",
            "erf takes the gate, and not its quotient by sqrt 2",
            old="tl.erf(g * ROOT_HALF)",
            new="tl.erf(g)",
            within="lib.activations",
        ),
        Planted(
            "argument-in-bfloat16",
            "erf takes its argument in bfloat16",
            old="tl.erf(g * ROOT_HALF)",
            new="tl.erf((g * ROOT_HALF).to(tl.bfloat16).to(g.dtype))",
            within="lib.activations",
            small=True,
            sample=True,
        ),
    ],
    "pallas": [
        Planted(
            "tanh-for-erf",
            "the tanh form serves both",
            old='gate that is open."""\n    if approximate == "tanh":',
            new='gate that is open."""\n    if approximate:',
            small=True,
        ),
        Planted(
            "gelu-rounded",
            "gelu is rounded to the result's dtype before it meets up",
            old="(g * share(g, approximate) * ref.up[...].astype(jnp.float32)).astype",
            new="((g * share(g, approximate)).astype(ref.y.dtype).astype(jnp.float32)"
            " * ref.up[...].astype(jnp.float32)).astype",
            sample=True,
        ),
        Planted(
            "erf-of-the-gate",
            "erf takes the gate, and not its quotient by sqrt 2",
            old="lax.erf(g * sqrt(0.5))",
            new="lax.erf(g)",
        ),
    ],
}
