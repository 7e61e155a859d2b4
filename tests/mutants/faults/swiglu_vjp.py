"""Faults planted in the kernels of swiglu_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "slope-rounded",
            "the slope is rounded to bfloat16 before it meets d_y up",
            old="(s * (1.0 + g * q))",
            new="(s * (1.0 + g * q)).to(tl.bfloat16).to(tl.float32)",
            sample=True,
            within="lib.activations",
        ),
        Planted(
            "q-by-difference",
            "q is 1 - s, which has lost what is small",
            old="s, q = open_and_shut(g)",
            new="s, q = open_and_shut(g)\n    q = 1.0 - s",
            small=True,
            within="lib.activations",
        ),
        Planted(
            "slope-of-a-sigmoid",
            "the slope is that of a sigmoid times the gate, without the sigmoid itself",
            old="(s * (1.0 + g * q))",
            new="(s * g * q)",
            within="lib.activations",
        ),
        Planted(
            "d-up-in-bfloat16",
            "silu is kept in bfloat16 for d_up",
            old="(d * (g * s)).to",
            new="(d * (g * s).to(tl.bfloat16).to(tile.acc_dtype)).to",
        ),
        Planted(
            "rows-of-the-gate",
            "d_y is read with the rows of the gate",
            old="pointers(d_y, row, col, d_y_strides, tile)",
            new="pointers(d_y, row, col, gate_strides, tile)",
            gpu=False,
            small=True,
        ),
        Planted(
            "gate-read-again",
            "the gate is read again for d_up, where d_gate may lie over it by then",
            old="    if d_up is not None:\n",
            new="    if d_up is not None:\n"
            "        g = tl.load(pointers(gate, row, col, gate_strides, tile), mask=ok)\n"
            "        g = g.to(tile.acc_dtype)\n",
            sample=True,
        ),
    ],
    "pallas": [
        Planted(
            "slope-rounded",
            "the slope is rounded to the result's dtype before it meets d_y up",
            old="(s * (1.0 + g * q))",
            new="(s * (1.0 + g * q)).astype(ref.d_gate.dtype).astype(jnp.float32)",
            sample=True,
        ),
        Planted(
            "q-by-difference",
            "q is 1 - s, which has lost what is small",
            old="s, q = open_and_shut(g)",
            new="s, q = open_and_shut(g)\n    q = 1.0 - s",
            small=True,
        ),
        Planted(
            "slope-of-a-sigmoid",
            "the slope is that of a sigmoid times the gate, without the sigmoid itself",
            old="(s * (1.0 + g * q))",
            new="(s * g * q)",
        ),
        Planted(
            "d-up-in-bfloat16",
            "silu is kept in bfloat16 for d_up",
            old="(d_y * (g * s)).astype",
            new="(d_y * (g * s).astype(jnp.bfloat16).astype(jnp.float32)).astype",
        ),
    ],
}
