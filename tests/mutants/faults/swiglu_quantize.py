"""Faults planted in the kernels of swiglu_quantize."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "gate-not-opened",
            "the gate itself is multiplied with up",
            old="y = [g[i] * open_share(g[i]) * u[i]",
            new="y = [g[i] * u[i]",
            sample=True,
        ),
        Planted(
            "long-gate-twice",
            "of a row that is read group by group the gate is multiplied with itself",
            old="    u = tl.load(rows.up + lane[None, :] * rows.up_n,",
            new="    u = tl.load(rows.gate + lane[None, :] * rows.gate_n,",
            sample=True,
        ),
        Planted(
            "up-by-the-rows-of-gate",
            "up is read with the rows of gate",
            old="start_of(up, row, extents, strides.up, tile)",
            new="start_of(up, row, extents, strides.gate, tile)",
            gpu=False,
        ),
        Planted(
            "scales-of-one-row",
            "each row's scales lie over those of the first",
            old="(scale + row * extents.groups)",
            new="(scale + row * 0)",
        ),
    ],
    "pallas": [
        Planted(
            "up-forgotten",
            "silu alone is quantised",
            old="    return g * s * at(ref.up)",
            new="    return g * s",
            sample=True,
            at=(0, 60),
        ),
        Planted(
            "the-other-share",
            "the gate is multiplied with what is shut",
            old="    s, _ = open_and_shut(g)",
            new="    _, s = open_and_shut(g)",
            at=(0, 60),
        ),
    ],
}
