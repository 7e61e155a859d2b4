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
        Planted(
            "last-row-dropped",
            "of a token's rows the last is left out",
            old="for j in range(extents.terms):",
            new="for j in range(tl.maximum(extents.terms - 1, 1)):",
            within="unpermute",
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
        Planted(
            "sums-not-begun",
            "a block of tokens goes on from the one before",
            old="ref.acc[...] = jnp.zeros_like(ref.acc)",
            new="pl.when(pl.program_id(0) == 0)(lambda: ref.acc.__setitem__(..., jnp.zeros_like(ref.acc)))",
            within="unpermute",
        ),
    ],
}
