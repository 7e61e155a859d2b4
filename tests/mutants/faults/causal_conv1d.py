"""Faults planted in the kernels of causal_conv1d."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "taps-turned",
            "the first tap meets the output's own input",
            old="z += of_own_segment(inputs[first + j], own, other) * weights[j]",
            new="z += of_own_segment(inputs[first + j], own, other) * weights[len(weights) - 1 - j]",
            sample=True,
        ),
        Planted(
            "state-one-late",
            "the initial state is read one position late",
            old="row = (t + tile.past).to(tl.int64) * strides.state.position",
            new="row = (t + tile.past - (t + tile.past > 0)).to(tl.int64) * strides.state.position",
        ),
        Planted(
            "sum-in-bfloat16",
            "what the activation is given is rounded",
            old="out = activated(z, activation, False)",
            new="out = activated(z.to(tl.bfloat16).to(tile.acc_dtype), activation, False)",
            small=True,
        ),
        Planted(
            "segments-see-each-other",
            "an output sees the segment before its own",
            old="        return tl.where(own == other, value, 0.0)",
            new="        return tl.where(own >= other, value, 0.0)",
            edge="segments_of_few_inputs",
            sample=True,
        ),
        Planted(
            "final-state-of-the-first-tile",
            "the final state lacks the inputs before the last tile",
            old="state = load_inputs(x, taps.state, batch, last, c, c_ok, extents, strides, tile)",
            new="state = load_inputs(x, taps.state, batch, tl.maximum(last, first), c, c_ok, extents, strides, tile)",
        ),
        Planted(
            "last-channel-not-written",
            "the last channel is not written",
            old="tl.store(at, out, mask=(t < extents.length)[:, None] & c_ok[None, :])",
            new=(
                "tl.store(at, out, mask=(t < extents.length)[:, None] "
                "& (c < extents.channels - (extents.channels > 1)))"
            ),
        ),
    ],
    "pallas": [
        Planted(
            "halo-one-early",
            "taps begin one position early",
            old="x = ref.inputs[pl.ds(halo - past + j, height), :]\n        z +=",
            new="x = ref.inputs[pl.ds(max(halo - past + j - 1, 0), height), :]\n        z +=",
            sample=True,
        ),
        Planted(
            "state-in-every-block",
            "each block begins at the initial state",
            old="jnp.where(step_along(2) == 0, early,",
            new="jnp.where(step_along(2) >= 0, early,",
            edge="several_ragged_tiles",
            sample=True,
        ),
        Planted(
            "sum-in-bfloat16",
            "what the activation is given is rounded",
            old="ref.y[...] = activated(z, activation)",
            new="ref.y[...] = activated(z.astype(jnp.bfloat16).astype(jnp.float32), activation)",
            small=True,
        ),
        Planted(
            "segments-of-the-next-tap",
            "an input's segment is that of the one beside it",
            old="return jnp.where((bits >> lag) & 1 == 1, value, 0.0)",
            new="return jnp.where((bits >> (lag - 1)) & 1 == 1, value, 0.0)",
        ),
        Planted(
            "no-bias",
            "the bias is left out",
            old="z += ref.bias[...].astype(jnp.float32)",
            new="z += 0.0 * ref.bias[...].astype(jnp.float32)",
        ),
    ],
}
