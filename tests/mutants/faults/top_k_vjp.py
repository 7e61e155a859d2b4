"""Faults planted in the kernels of top_k_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "zeros-of-the-first-row",
            "the last tile of zeros is not written",
            old="mask=at < size",
            new="mask=at < size - block",
            sample=True,
            at=(0, 60),
        ),
        Planted(
            "first-tile-alone",
            "cotangents beyond the first tile go nowhere",
            old="for first in range(0, k, plan.block_k):",
            new="for first in range(0, tl.minimum(k, plan.block_k), plan.block_k):",
            at=(0, 20),
        ),
        Planted(
            "cotangents-as-far-apart-as-indices",
            "d_values is read with the strides of indices",
            old="d_values, row, extents, d_values_strides, plan",
            new="d_values, row, extents, indices_strides, plan",
            gpu=False,
            at=(0, 60),
        ),
        Planted(
            "rows-of-k",
            "rows of d_x are as far apart as those of the cotangents",
            old="d_x + row[:, None] * n + position",
            new="d_x + row[:, None] * k + position",
            at=(0, 60),
        ),
    ],
    "pallas": [
        Planted(
            "one-cotangent",
            "every chosen number has the first cotangent",
            old="column(bits(ref.d_values[...]), t)",
            new="column(bits(ref.d_values[...]), 0)",
            sample=True,
            at=(0, 20),
        ),
        Planted(
            "last-pass-forgotten",
            "the last cotangent goes nowhere",
            old="    for t in range(k):",
            new="    for t in range(max(k - 1, 1)):",
            at=(0, 30),
        ),
        Planted(
            "columns-beyond-one-register",
            "of many cotangents each is the maximum of all",
            old="jnp.where(positions(x.shape, 1, 0) == t, x, LEAST)",
            new="jnp.where(positions(x.shape, 1, 0) >= t, x, LEAST)",
            at=(0, 20),
        ),
    ],
}
