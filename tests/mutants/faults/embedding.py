"""Faults planted in the kernels of embedding."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "negative-ids-from-the-end",
            "a negative id counts from the end of the table, as an index of Python's does",
            old="    there = (row >= 0) & (row < extents.rows)\n    at = weight",
            new="    row = tl.where(row < 0, row + extents.rows, row)\n"
            "    there = (row >= 0) & (row < extents.rows)\n    at = weight",
            sample=True,
            edge="ids_that_are_no_row",
            at=(0, 10),
        ),
        Planted(
            "zeros-for-no-row",
            "an id that is no row gives zeros",
            old='other=float("nan"))',
            new="other=0.0)",
        ),
        Planted(
            "ids-clipped",
            "an id that is no row is the nearest that is one",
            old="    there = (row >= 0) & (row < extents.rows)\n    at = weight",
            new="    row = tl.minimum(tl.maximum(row, 0), extents.rows - 1)\n"
            "    there = (row >= 0) & (row < extents.rows)\n    at = weight",
        ),
        Planted(
            "rows-without-gaps",
            "rows of the table are taken to lie beside each other",
            old="(row * of_row)[:, None] + (n * of_number)",
            new="(row * extents.d)[:, None] + (n * of_number)",
            gpu=False,
        ),
        Planted(
            "first-tile-alone",
            "every tile of a row is the first",
            old="    at = weight + (row * of_row)[:, None] + (n * of_number)[None, :]\n",
            new="    at = weight + (row * of_row)[:, None] + (n % tile.block_n * of_number)[None, :]\n",
        ),
        Planted(
            "subnormal-numbers-flushed",
            "numbers pass through float32 arithmetic that flushes",
            old="    tl.store(y + (token",
            new="    x = tl.where(tl.abs(x.to(tl.float32)) < 1.1754943508222875e-38, 0.0, x.to(tl.float32))"
            ".to(y.dtype.element_ty)\n    tl.store(y + (token",
            small=True,
        ),
    ],
    "pallas": [
        Planted(
            "negative-ids-from-the-end",
            "a negative id counts from the end of the table",
            old='jnp.where((ids >= 0) & (ids < call.dims["rows"]), ids, -1)',
            new='jnp.where((ids >= -call.dims["rows"]) & (ids < call.dims["rows"]), ids % call.dims["rows"], -1)',
            sample=True,
            edge="ids_that_are_no_row",
            at=(0, 6),
        ),
        Planted(
            "ids-clipped",
            "an id behind the last row is the last row",
            old='jnp.where((ids >= 0) & (ids < call.dims["rows"]), ids, -1)',
            new='jnp.minimum(ids, call.dims["rows"] - 1)',
        ),
        Planted(
            "zeros-for-no-row",
            "an id that is no row gives zeros",
            old="jnp.where(row < 0, nothing, word_of",
            new="jnp.where(row < 0, 0, word_of",
        ),
        Planted(
            "first-row-of-a-tile",
            "of the rows that are read for a token the first is taken",
            old='vars(ref)[f"row{j}"], row & (TALL - 1)',
            new='vars(ref)[f"row{j}"], row & 0',
        ),
        Planted(
            "halves-exchanged",
            "of two rows of 16-bit numbers in a word the other is taken",
            old="(at & 1) * 16",
            new="16 - (at & 1) * 16",
        ),
        Planted(
            "tokens-of-the-first-block",
            "each block of tokens has the rows of the first",
            old="lambda j, i, c: i * tokens + j",
            new="lambda j, i, c: j",
        ),
    ],
}
