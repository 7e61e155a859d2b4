"""Faults planted in the kernels of causal_conv1d_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "taps-turned",
            "the gradient of inputs meets the taps in the other order",
            old="d += of_own_segment(d_z[tile.past - j], own, other) * weights[j]",
            new="d += of_own_segment(d_z[tile.past - j], own, other) * weights[tile.past - j]",
            sample=True,
        ),
        Planted(
            "no-slope",
            "the cotangent does not meet the slope of the activation",
            old="d * slope, 0.0)",
            new="d, 0.0)",
        ),
        Planted(
            "slope-in-bfloat16",
            "the slope is rounded",
            old="d * slope, 0.0)",
            new="d * slope.to(tl.bfloat16).to(tile.acc_dtype), 0.0)",
            small=True,
        ),
        Planted(
            "segments-of-the-input-alone",
            "cotangents cross the border of a segment",
            old="own = None if ids is None else ids[2 * tile.past - j]",
            new="own = None if ids is None else ids[tile.past]",
            edge="segments_of_few_inputs",
            sample=True,
        ),
        Planted(
            "final-cotangent-one-late",
            "the cotangent of the final state is added one position late",
            old="row = t - (extents.length - tile.past)",
            new="row = t - (extents.length - tile.past) - 1",
        ),
        Planted(
            "last-tile-of-a-group-lost",
            "a program leaves out its last tile",
            old="min(first + extents.group, extents.length), tile.block_length):",
            new=(
                "min(first + extents.group, extents.length) - (extents.length > tile.block_length), tile.block_length):"
            ),
        ),
    ],
    "pallas": [
        Planted(
            "taps-turned",
            "the gradient of inputs meets the taps in the other order",
            old="d_x += ref.d_z[pl.ds(halo + past - j, height), :] * weight",
            new="d_x += ref.d_z[pl.ds(halo + j, height), :] * weight",
            sample=True,
        ),
        Planted(
            "beyond-the-sequence",
            "positions beyond the sequence have cotangents",
            old="d_z = jnp.where(there, d_z, 0.0)\n\n",
            new="d_z = jnp.where(there | True, d_z, 0.0)\n\n",
        ),
        Planted(
            "sums-of-one-sample",
            "sums begin anew with each sample",
            old="begins = (pl.program_id(1) == 0) & (pl.program_id(2) == 0)",
            new="begins = pl.program_id(2) == 0",
            edge="many_positions_of_integers",
            sample=True,
        ),
        Planted(
            "no-final-cotangent",
            "the cotangent of the final state does not reach the initial one",
            old="d_state = with_final(ref, d_state, -halo, past, length)",
            new="d_state = with_final(ref, d_state, 0, past, length)",
        ),
        Planted(
            "cotangent-in-bfloat16",
            "d_z is rounded before it is spread",
            old="ref.d_z[halo:, :] = masked(d_z, bits, past - j)",
            new="ref.d_z[halo:, :] = masked(d_z, bits, past - j).astype(jnp.bfloat16).astype(jnp.float32)",
            small=True,
        ),
    ],
}
