"""Faults planted in the kernels of add_layernorm."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "padding-centred",
            "lanes beyond a short row count in the variance",
            old="d = tl.where(ok, s - (tl.sum(s, 1) / n)[:, None], 0.0)",
            new="d = s - (tl.sum(s, 1) / n)[:, None]",
        ),
        Planted(
            "mean-over-tile",
            "the mean divides by the tile's extent",
            old="(tl.sum(s, 1) / n)[:, None]",
            new="(tl.sum(s, 1) / block_n)[:, None]",
        ),
        Planted(
            "rows-of-x",
            "the residual is read with the rows of x",
            old="row_start(residual, row, rows_inner, residual_outer, residual_inner, flat, unit)",
            new="row_start(residual, row, rows_inner, x_outer, x_inner, flat, unit)",
            gpu=False,
            small=True,
        ),
        Planted(
            "long-sum-of-x",
            "of a long row the sum that is stored is x",
            old="            tl.store(total + out + at, s.to(",
            new="            tl.store(total + out + at, tl.load(x_row + at * x_n, mask=ok).to(",
            sample=True,
        ),
        Planted(
            "bias-of-weight",
            "the bias of a long row is read with the distances of the weight",
            old="normed = scale_and_shift(xh, weight, bias, weight_n, bias_n, at, n, acc_dtype)",
            new="normed = scale_and_shift(xh, weight, weight, weight_n, weight_n, at, n, acc_dtype)",
        ),
    ],
    "pallas": [
        Planted(
            "eps-ignored",
            "eps is always 1e-5",
            old='eps=call.options["eps"]',
            new="eps=1e-5",
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
