"""Faults planted in the modules of rope_vjp, whose kernel is rope's."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    name: [
        Planted(
            "turned-forward",
            "the gradient is turned as the forward pass is",
            old="transposed=True",
            new="transposed=False",
            sample=True,
        )
    ]
    for name in ("triton", "pallas")
}
