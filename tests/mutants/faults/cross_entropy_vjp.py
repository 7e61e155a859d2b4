"""Faults planted in the kernels of cross_entropy_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "p-rounded",
            "p is rounded to 16 bits before the target is subtracted",
            old="p = exp_or_zero(tl.where(apart > 0.0, 0.0, apart))",
            new="p = exp_or_zero(tl.where(apart > 0.0, 0.0, apart)).to(tl.float16).to(terms.acc_dtype)",
            sample=True,
            small=True,
            within="lib.cross_entropy",
        ),
        Planted(
            "z-once",
            "the derivative of lse^2 without its 2",
            old="2.0 * terms.z * log_sum",
            new="terms.z * log_sum",
            small=True,
            within="lib.cross_entropy",
        ),
        Planted(
            "smoothing-over-tile",
            "the share of all classes is divided by the tile's extent",
            old="terms.even / tl.cast(classes, terms.acc_dtype)",
            new="terms.even / t.shape[1]",
            small=True,
            within="lib.cross_entropy",
        ),
        Planted(
            "ignored-counted",
            "an ignored row has its cotangent",
            old="p = tl.where(counted, p, 0.0)",
            new="p = p",
            within="lib.cross_entropy",
        ),
        Planted(
            "ragged-end-not-written",
            "the last element of a row is not written",
            old="mask=row_ok & (col < n))",
            new="mask=row_ok & (col < n - (n > 1)))",
            within="lib.cross_entropy",
        ),
        Planted(
            "end-behind-vectors-not-written",
            "of long rows the last element behind whole vectors is not written",
            old="there = at < extents.height * extents.n",
            new="there = at < extents.height * extents.n - 1",
            within="lib.cross_entropy",
        ),
        Planted(
            "label-of-the-first-row-alone",
            "where two rows meet the second has no label",
            old="tl.where(own, hit, hit_2)",
            new="hit",
            within="lib.cross_entropy",
        ),
        Planted(
            "label-within-a-row-missed",
            "a tile of one row that has its label subtracts no target",
            old="((hit < 0) | (hit >= tile.width))",
            new="(tile.width > 0)",
            within="lib.cross_entropy",
        ),
    ],
    "pallas": [
        Planted("z-once", "the derivative of lse^2 without its 2", old="2.0 * z * lse", new="z * lse", small=True),
        Planted(
            "p-rounded",
            "p is rounded to the result's dtype before the target is subtracted",
            old="p = jnp.exp(jnp.minimum(apart, 0.0))",
            new="p = jnp.exp(jnp.minimum(apart, 0.0)).astype(ref.d_x.dtype).astype(jnp.float32)",
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
