"""Faults planted in the kernels of logsumexp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "maximum-of-inf-subtracted",
            "a maximum of +inf is subtracted like any other: inf - inf",
            old='return tl.where(tl.abs(m) == float("inf"), 0.0, m)',
            new='return tl.where(m == float("-inf"), 0.0, m)',
            small=True,
            within="lib.rows",
        ),
        Planted(
            "finite-padding",
            "lanes beyond a short row hold -1e4 instead of -inf",
            old='maximum_and_sum(load_tiles(x_row, x_strides.n, col, ok, float("-inf"), tile.acc_dtype)',
            new="maximum_and_sum(load_tiles(x_row, x_strides.n, col, ok, -1e4, tile.acc_dtype)",
            small=True,
        ),
        Planted(
            "last-not-summed",
            "the sum of a long row leaves out its last element",
            old="mask=row_ok & (a < n), other",
            new="mask=row_ok & (a < n - 1), other",
            small=True,
            within="lib.rows",
        ),
        Planted(
            "l-not-rescaled",
            "the running sum keeps its unit when the maximum grows",
            old="tl.fma(l, exp_or_zero(tl.minimum(m - shift, 0.0)), found)",
            new="l + found",
            within="lib.rows",
        ),
        Planted(
            "log2e-rounded",
            "exp is exp2 with log2(e) of five digits",
            old="row_sum([tl.exp(a - shift) for a in t])",
            new="row_sum([tl.exp2((a - shift) * 1.4427) for a in t])",
            small=True,
            within="lib.rows",
        ),
        Planted(
            "log-rounded",
            "the logarithm is rounded to the output's dtype before the maximum is added",
            old="(finite_or_zero(m) + tl.log(l)).to",
            new="(finite_or_zero(m) + tl.log(l).to(y.dtype.element_ty).to(tile.acc_dtype)).to",
            small=True,
            sample=True,
        ),
        Planted(
            "parts-joined-as-softmax",
            "parts of a row in a strip are joined as those of softmax, whose row is NaN anyway: inf - inf",
            old="inside, tile.parts, True)",
            new="inside, tile.parts, False)",
            small=True,
            sample=True,
            edge="infinities_in_later_tiles",
            at=(0, 20),
        ),
    ],
    "pallas": [
        Planted(
            "maximum-of-inf-subtracted",
            "a maximum of +inf is subtracted like any other: inf - inf",
            old="return jnp.where(jnp.abs(m) == jnp.inf, 0.0, m)",
            new="return jnp.where(m == -jnp.inf, 0.0, m)",
            small=True,
        ),
        Planted(
            "finite-padding",
            "lanes beyond a row hold -1e4 instead of -inf",
            old="step, -jnp.inf)\n\n",
            new="step, -1e4)\n\n",
            small=True,
        ),
        Planted("padding-counts", "lanes beyond a row hold 0", old="step, -jnp.inf)\n\n", new="step, 0.0)\n\n"),
        Planted(
            "l-not-rescaled",
            "the running sum keeps its unit when the maximum grows",
            old="ref.l[...] * jnp.exp(ref.m[...] - shift) + ",
            new="ref.l[...] + ",
        ),
        Planted(
            "weights-rounded",
            "the sum is one of weights rounded to x's dtype",
            old="jnp.sum(jnp.exp(x - shift), ",
            new="jnp.sum(jnp.exp(x - shift).astype(ref.x.dtype).astype(jnp.float32), ",
            small=True,
            sample=True,
            edge="infinite_elements",
            at=(2, 200),
        ),
        Planted(
            "written-after-the-first-step",
            "y is written after the first block of a row, and never again",
            old="pl.when(step == walk.grid[-1] - 1)",
            new="pl.when(step == 0)",
        ),
    ],
}
