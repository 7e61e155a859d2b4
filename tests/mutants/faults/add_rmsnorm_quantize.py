"""Faults planted in the kernels of add_rmsnorm_quantize."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "mean-over-tile",
            "the mean of squares divides by the tile's extent",
            old="inverse_rms(s, n, limits.eps)",
            new="inverse_rms(s, tile.block_n, limits.eps)",
            sample=True,
        ),
        Planted(
            "sum-stored-early",
            "a group's sum is stored as its greatest number is sought, before the residual, which it may lie over, is "
            "read again",
            old="    if last:\n",
            new="    if not last:\n",
            sample=True,
        ),
        Planted(
            "long-sum-of-x",
            "of a long row the sum that is stored is x",
            old="tl.store(rows.total + at, s.to(",
            new="tl.store(rows.total + at, tl.load(rows.x + at * rows.x_n, mask=ok).to(",
        ),
        Planted(
            "last-not-summed",
            "the sum of squares of a long row leaves out its last element",
            old="row_ok & (at < n), tile.acc_dtype)",
            new="row_ok & (at < n - 1), tile.acc_dtype)",
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
            "residual-forgotten",
            "the residual is not read",
            old='coded_rows(call, config, kernel, ("x", "residual"), ',
            new='coded_rows(call, config, kernel, ("x",), ',
            sample=True,
            at=(0, 60),
        ),
        Planted(
            "sum-of-twice-x",
            "x is added to itself",
            old='kernel, ("x", "residual"), ("residual_out",), flops=17)',
            new='lambda ref, strip, call: kernel(type(ref)(**{**vars(ref), "residual": ref.x}), strip, call), '
            '("x", "residual"), ("residual_out",), flops=17)',
            at=(0, 60),
        ),
    ],
}
