"""Faults planted in the kernels of linear_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "open-at-0",
            "relu has a slope of 1 at 0",
            old="tl.where(z <= 0, 0.0, d)",
            new="tl.where(z < 0, 0.0, d)",
            sample=True,
            within="lib.linear",
        ),
        Planted(
            "forms-swapped",
            "the slope of the tanh form is that of erf",
            old="_, slope = of_tanh_form(z)",
            new="_, slope = of_erf_form(z)",
            within="lib.linear",
        ),
        Planted(
            "bias-of-d-y",
            "d_bias adds up the cotangent of y",
            old="total += found.to(tile.acc_dtype)",
            new="total += d.to(tile.acc_dtype)",
            within="lib.linear",
        ),
        Planted(
            "slope-rounded",
            "the slope is rounded to the result's dtype before it meets d_y",
            old="times_slope(d.to(tile.acc_dtype), z.to(tile.acc_dtype), activation)",
            new=(
                "(d.to(tile.acc_dtype) * "
                "times_slope(tl.full(d.shape, 1.0, tile.acc_dtype), z.to(tile.acc_dtype), activation)"
                ".to(tl.bfloat16).to(tile.acc_dtype))"
            ),
            within="lib.linear",
        ),
    ],
    "pallas": [
        Planted(
            "open-at-0", "relu has a slope of 1 at 0", old="jnp.where(z <= 0, 0.0, d)", new="jnp.where(z < 0, 0.0, d)"
        ),
        Planted(
            "forms-swapped",
            "the slope of the tanh form is that of erf",
            old='opening(z, "tanh" if activation == "gelu_tanh" else "none")',
            new='opening(z, "none")',
        ),
        Planted(
            "last-row-dropped",
            "d_weight leaves out the last row where there are many",
            old='multiply(call, d_z.T, x.reshape(-1, x.shape[-1]), stored["d_weight"][1])',
            new=(
                "multiply(call, d_z[: len(d_z) - (len(d_z) > 64)].T, "
                'x.reshape(-1, x.shape[-1])[: len(d_z) - (len(d_z) > 64)], stored["d_weight"][1])'
            ),
            sample=True,
        ),
    ],
}
