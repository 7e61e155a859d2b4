"""Faults planted in the kernels of swiglu."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "low-by-difference",
            "s of a gate below 0 is 1 - 1 / (1 + exp(g)), and what is small is lost",
            old="low = e * high",
            new="low = 1.0 - high",
            within="lib.activations",
            small=True,
        ),
        Planted(
            "silu-rounded",
            "silu is rounded to the result's dtype before it meets up",
            old="(g * opening(g) * u.to(tile.acc_dtype)).to",
            new="((g * opening(g)).to(y.dtype.element_ty).to(tile.acc_dtype) * u.to(tile.acc_dtype)).to",
            sample=True,
        ),
        Planted(
            "exp-clamped",
            "the exponent is clamped at -20",
            old="e = tl.exp(-tl.abs(g))",
            new="e = tl.exp(tl.maximum(-tl.abs(g), -20.0))",
            within="lib.activations",
            small=True,
        ),
        Planted(
            "gelu-for-silu",
            "silu is that of 1.702 gate, as an approximation of gelu has it",
            old="s, _ = open_and_shut(g)",
            new="s, _ = open_and_shut(1.702 * g)",
        ),
        Planted(
            "rows-of-the-gate",
            "up is read with the rows of the gate",
            old="\n    u = tl.load(pointers(up, row, col, up_strides, tile)",
            new="\n    u = tl.load(pointers(up, row, col, gate_strides, tile)",
            gpu=False,
            small=True,
        ),
        Planted(
            "ragged-end-not-written",
            "the last element of a row is not written",
            old="(row < extents.height)[:, None] & (col < n)",
            new="(row < extents.height)[:, None] & (col < n - (n > 1))",
        ),
    ],
    "pallas": [
        Planted(
            "low-by-difference",
            "s of a gate below 0 is 1 - 1 / (1 + exp(g)), and what is small is lost",
            old="low = e * high",
            new="low = 1.0 - high",
            small=True,
        ),
        Planted(
            "silu-rounded",
            "silu is rounded to the result's dtype before it meets up",
            old="(g * s * ref.up[...].astype(jnp.float32)).astype",
            new="((g * s).astype(ref.y.dtype).astype(jnp.float32) * ref.up[...].astype(jnp.float32)).astype",
            sample=True,
        ),
        Planted(
            "exp-clamped",
            "the exponent is clamped at -20",
            old="e = jnp.exp(-jnp.abs(g))",
            new="e = jnp.exp(jnp.maximum(-jnp.abs(g), -20.0))",
            small=True,
        ),
        Planted(
            "gate-in-bfloat16",
            "exp takes the gate in bfloat16",
            old="s, _ = open_and_shut(g)",
            new="s, _ = open_and_shut(g.astype(jnp.bfloat16).astype(jnp.float32))",
            small=True,
        ),
        Planted(
            "one-column-of-blocks",
            "all blocks of a row are its first",
            old="lambda row, column: (row, column)",
            new="lambda row, column: (row, 0)",
        ),
    ],
}
