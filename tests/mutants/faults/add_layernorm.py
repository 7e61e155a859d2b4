"""Faults planted in the kernels of add_layernorm."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "padding-centred",
            "lanes beyond a short row count in the variance",
            old="d = [tl.where(ok[i], t[i] - mean, 0.0) for i in (0, 1)[: len(t)]]",
            new="d = [a - mean for a in t]",
            within="lib.rows",
        ),
        Planted(
            "mean-over-tile",
            "the mean divides by the tile's extent",
            old="mean = (rounded + rest / n)[:, None]",
            new="mean = (row_sum(t) / t[0].shape[1])[:, None]",
            within="lib.rows",
        ),
        Planted(
            "rows-of-x",
            "the residual is read with the rows of x",
            old="start_of(residual, row, extents, strides.residual, tile)",
            new="start_of(residual, row, extents, strides.x, tile)",
            gpu=False,
            small=True,
            within="add_rmsnorm",
        ),
        Planted(
            "long-sum-of-x",
            "of a long row the sum that is stored is x",
            old="            tl.store(total + out + at, s.to(",
            new="            tl.store(total + out + at, tl.load(x_row + at * strides.x.n, mask=ok).to(",
            sample=True,
        ),
        Planted(
            "bias-of-weight",
            "the bias of a long row is read with the distances of the weight",
            old="affine = Affine(weight, strides.weight, bias, strides.bias)",
            new="affine = Affine(weight, strides.weight, weight, strides.weight)",
        ),
    ],
    "pallas": [
        Planted(
            "eps-ignored",
            "eps is always 1e-5",
            old='(kernel, eps=call.options["eps"]',
            new="(kernel, eps=1e-5",
            small=True,
        ),
        Planted(
            "bias-forgotten",
            "the bias is not added",
            old="    run = partial(kernel,",
            new="    call = call.replace(arrays={**call.arrays, 'bias': None})\n    run = partial(kernel,",
        ),
    ],
}
