"""Faults planted in the kernels of cross_entropy_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "p-rounded",
            "p is rounded to 16 bits before the target is subtracted",
            old="p = tl.exp(t - log_sum)",
            new="p = tl.exp(t - log_sum).to(tl.float16).to(acc_dtype)",
            sample=True,
            small=True,
        ),
        Planted(
            "z-once",
            "the derivative of lse^2 without its 2",
            old="2.0 * z * log_sum",
            new="z * log_sum",
            small=True,
        ),
        Planted(
            "smoothing-over-tile",
            "the share of all classes is divided by the tile's extent",
            old="even / tl.cast(classes, acc_dtype)",
            new="even / t.shape[1]",
            small=True,
        ),
        Planted(
            "ignored-counted",
            "an ignored row has its cotangent",
            old="tl.where(counted, p, 0.0)",
            new="p",
        ),
        Planted(
            "ragged-end-not-written",
            "the last element of a row is not written",
            old="mask=row_ok & (col < n))",
            new="mask=row_ok & (col < n - (n > 1)))",
        ),
        Planted(
            "end-beside-vectors-not-written",
            "of a row in vectors the last element behind them is not written",
            old="(behind < off + n)",
            new="(behind < off + n - 1)",
        ),
        Planted(
            "label-from-the-vector",
            "in a row that begins within a vector the label is counted from where that begins",
            old="gradient(t, col - off == label,",
            new="gradient(t, col == label,",
        ),
    ],
    "pallas": [
        Planted(
            "z-once",
            "the derivative of lse^2 without its 2",
            old="2.0 * z * lse",
            new="z * lse",
            small=True,
        ),
        Planted(
            "p-rounded",
            "p is rounded to the result's dtype before the target is subtracted",
            old="p = jnp.exp(x - lse)",
            new="p = jnp.exp(x - lse).astype(ref.d_x.dtype).astype(jnp.float32)",
            small=True,
        ),
        Planted(
            "ignored-counted",
            "an ignored row has its cotangent",
            old="jnp.where(walk.turned(labels) == ignored, 0.0, g * p)",
            new="g * p",
        ),
    ],
}
