"""Faults planted in the kernels of unpermute."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "last-term-dropped",
            "of a token's terms the last is left out",
            old="for j in range(extents.terms):",
            new="for j in range(tl.maximum(extents.terms - 1, 1)):",
        ),
        Planted(
            "strangers-in-the-first-row",
            "a position that is no row is the first",
            old="        there = (row >= 0) & (row < extents.rows)\n        at = x",
            new="        row = tl.where((row >= 0) & (row < extents.rows), row, 0)\n"
            "        there = token_ok\n        at = x",
            sample=True,
            edge="positions_behind_the_last_row",
            at=(0, 6),
        ),
        Planted(
            "weights-of-the-first-term",
            "every term has the weight of its token's first",
            old="tl.load(weights + term, mask=there, other=0.0).to(tile.acc_dtype)[:, None]",
            new="tl.load(weights + token * extents.terms, mask=there, other=0.0).to(tile.acc_dtype)[:, None]",
        ),
        Planted(
            "sums-in-the-rows-dtype",
            "each sum is rounded to the dtype of rows",
            old="        acc += found\n    ok",
            new="        acc = (acc + found).to(y.dtype.element_ty).to(tile.acc_dtype)\n    ok",
        ),
        Planted(
            "rows-without-gaps",
            "rows are taken to lie beside each other",
            old="at = x + (row * of_row)[:, None]",
            new="at = x + (row * extents.d)[:, None]",
            gpu=False,
        ),
        Planted(
            "weights-of-no-row",
            "the weight of a position that is no row counts: NaN times 0",
            old="tl.load(weights + term, mask=there, other=0.0).to(tile.acc_dtype)[:, None]",
            new="tl.load(weights + term, mask=token_ok, other=0.0).to(tile.acc_dtype)[:, None]",
            edge="tokens_without_rows",
            sample=True,
        ),
    ],
    "pallas": [
        Planted(
            "sums-not-begun",
            "a block of tokens goes on from the one before",
            old="ref.acc[...] = jnp.zeros_like(ref.acc)",
            new="pl.when(pl.program_id(0) == 0)(lambda: ref.acc.__setitem__(..., jnp.zeros_like(ref.acc)))",
        ),
        Planted(
            "strangers-in-the-first-row",
            "a position that is no row is the first",
            old="return jnp.where((slots >= 0) & (slots < rows), slots, -1)",
            new="return jnp.where((slots >= 0) & (slots < rows), slots, 0)",
            sample=True,
            edge="positions_behind_the_last_row",
            at=(0, 4),
        ),
        Planted(
            "weights-of-the-first-term",
            "every term has the weight of its token's first",
            old="jnp.where(positions(weights.shape, 1, 0) == j, weights, 0.0)",
            new="jnp.where(positions(weights.shape, 1, 0) == 0, weights, 0.0)",
        ),
        Planted(
            "terms-of-the-first-block",
            "each block of tokens has the weights of the first",
            old="pl.BlockSpec((tokens, terms), lambda i, c, j, _: (i, 0)),\n            )\n"
            "        },\n        outputs={"
            '"y"',
            new="pl.BlockSpec((tokens, terms), lambda i, c, j, _: (0, 0)),\n            )\n"
            "        },\n        outputs={"
            '"y"',
        ),
    ],
}
