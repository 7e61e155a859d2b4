"""Faults planted in the kernels of the gradient of permute, whose sums are unpermute's."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "weighted-by-positions",
            "positions are taken for weights",
            old='call.arrays["positions"], None)',
            new='call.arrays["positions"], call.arrays["positions"])',
            sample=True,
            at=(0, 6),
        ),
    ],
    "pallas": [
        Planted(
            "half-weights",
            "rows count half",
            old="jnp.ones(slots.shape, jnp.float32)",
            new="jnp.full(slots.shape, 0.5, jnp.float32)",
            sample=True,
            at=(0, 4),
        ),
    ],
}
