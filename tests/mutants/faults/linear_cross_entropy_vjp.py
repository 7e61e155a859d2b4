"""Faults planted in the kernels of linear_cross_entropy_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "label-in-every-chunk",
            "the label's place is counted anew in each chunk of classes",
            old="d_x, walk, first, n, start)",
            new="d_x, walk, 0, n, None)",
            within="lib.linear_cross_entropy",
        ),
        Planted(
            "smoothing-over-a-chunk",
            "the share of all classes is divided by the chunk's extent",
            old="d_x, walk, first, n, start)",
            new="d_x, walk, first, length, start)",
            within="lib.linear_cross_entropy",
        ),
        Planted(
            "ignored-counted",
            "an ignored row has its cotangent times 0",
            old="out = tl.where(counted, g * t, 0.0)",
            new="out = g * t",
            within="lib.linear_cross_entropy",
        ),
        Planted(
            "cotangent-rounded",
            "the cotangent is rounded to the slope's dtype first",
            old="g = tl.load(factor + row, mask=row_ok, other=0.0).to(tile.acc_dtype)[:, None]",
            new="g = tl.load(factor + row, mask=row_ok, other=0.0).to(x.dtype.element_ty).to(tile.acc_dtype)[:, None]",
            small=True,
            within="lib.linear_cross_entropy",
        ),
        Planted(
            "kept-not-weighed",
            "what was kept meets hidden without the cotangent",
            old="multiply(call, b.mT, weighed.reshape(rows, d), d_weight)",
            new="multiply(call, b.mT, call.arrays['hidden'].reshape(rows, d), d_weight)",
            within="lib.linear_cross_entropy",
        ),
    ],
    "pallas": [
        Planted(
            "label-in-every-chunk",
            "the label's place is counted anew in each chunk of classes",
            old="labels - classes[0]",
            new="labels",
        ),
        Planted(
            "smoothing-over-a-chunk",
            "the share of all classes is divided by the chunk's extent",
            old="losses.gradient(of, tiles, n)",
            new="losses.gradient(of, tiles, len(w))",
        ),
        Planted(
            "ignored-counted",
            "an ignored row has its cotangent times its slope",
            old="jnp.where(walk.turned(ref.labels[...]) == ignored, 0.0, y)",
            new="y",
        ),
        Planted(
            "kept-not-weighed",
            "what was kept meets hidden without the cotangent",
            old='weighed = scaled_rows(call, call.arrays["hidden"])',
            new='weighed = call.arrays["hidden"]',
        ),
    ],
}
