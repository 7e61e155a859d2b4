"""Faults planted in the kernels of rope."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "second-half-not-turned",
            "the second number of a pair loses what the first gives it",
            old="tl.store(y_at + q, (b * c + a * sine).to",
            new="tl.store(y_at + q, (b * c).to",
            sample=True,
        ),
        Planted(
            "tables-rounded",
            "the tables are read in the dtype of x",
            old="mask=ok, other=0.0).to(acc_dtype)\n\n\n@triton.jit\ndef rope_kernel",
            new="mask=ok, other=0.0).to(tl.bfloat16).to(acc_dtype)\n\n\n@triton.jit\ndef rope_kernel",
            small=True,
        ),
        Planted(
            "first-table-for-all",
            "every sample has the tables of the first",
            old="at = table + batch * aligned(of_batch, unit) + ",
            new="at = table + ",
        ),
        Planted(
            "sine-of-neighbours-not-turned",
            "the first of two neighbours is turned the other way",
            old="turned = tl.join(a * c - b * sine,",
            new="turned = tl.join(a * c + b * sine,",
        ),
        Planted(
            "rest-not-copied-whole",
            "of what passes through the last number is not written",
            old="there & (first + two < extents.rest)",
            new="there & (first + two < extents.rest - 1)",
        ),
        Planted(
            "product-rounded",
            "a product is rounded to the result's dtype before it is added",
            old="(a * c - b * sine).to(y.dtype.element_ty)",
            new="(a * c - (b * sine).to(y.dtype.element_ty).to(tile.acc_dtype)).to(y.dtype.element_ty)",
            sample=True,
            small=True,
        ),
        Planted(
            "last-head-not-written",
            "where several heads share a tile, the last is not written",
            old="(s < extents.seq) & (h < extents.heads), (s",
            new="(s < extents.seq) & (h < extents.heads - (extents.heads > 1)), (s",
        ),
    ],
    "pallas": [
        Planted(
            "partner-from-the-right-alone",
            "both numbers of a pair take what lies to their right",
            old="jnp.where(first, jnp.roll(x, -apart, 1), jnp.roll(x, apart, 1))",
            new="jnp.roll(x, -apart, 1)",
            sample=True,
        ),
        Planted(
            "one-sign", "sin has the same sign for both numbers of a pair", old="wide(-sin, sin,", new="wide(sin, sin,"
        ),
        Planted(
            "first-table-for-all",
            "every sample has the tables of the first",
            old="shared = table.shape[0] == 1",
            new="shared = True",
        ),
        Planted(
            "product-rounded",
            "a product is rounded to the result's dtype before it is added",
            old="(x * cos + partner * sin)",
            new="(x * cos + (partner * sin).astype(stored.dtype).astype(jnp.float32))",
            sample=True,
            small=True,
        ),
        Planted(
            "one-head-of-a-block",
            "all heads of a block are its first",
            old="stored = ref.x[head]",
            new="stored = ref.x[0]",
        ),
        Planted(
            "rest-zeroed",
            "what is in no pair is multiplied by the tables' padding",
            old="ref.y[head] = y if 2 * pairs == x.shape[1] else jnp.where(lane < 2 * pairs, y, stored)",
            new="ref.y[head] = y",
        ),
    ],
}
