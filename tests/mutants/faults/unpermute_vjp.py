"""Faults planted in the kernels of the gradient of unpermute."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "rows-of-no-token-unwritten",
            "a row of no token is left as it was",
            old="tl.store(d_x + (row * extents.d)[:, None] + n[None, :], found, mask=row_ok[:, None] & n_ok[None, :])",
            new="tl.store(d_x + (row * extents.d)[:, None] + n[None, :], found, mask=there[:, None] & n_ok[None, :])",
            sample=True,
            edge="more_rows_than_terms",
            at=(0, 6),
        ),
        Planted(
            "terms-for-tokens",
            "a term's number is taken for its token",
            old="at = d_y + (term // extents.terms * of_token)[:, None]",
            new="at = d_y + (tl.minimum(term, extents.tokens - 1) * of_token)[:, None]",
        ),
        Planted(
            "without-weights",
            "the weight of a term is 1",
            old="found = (g * weight[:, None])",
            new="found = (g * (weight * 0 + 1)[:, None])",
        ),
        Planted(
            "first-tile-alone",
            "a dot ends with its first tile",
            old="for first in range(0, extents.d, tile.block_n):",
            new="for first in range(0, tl.minimum(extents.d, tile.block_n), tile.block_n):",
            edge="long_rows",
            sample=True,
        ),
        Planted(
            "cotangents-as-far-apart-as-rows",
            "cotangents are read with the strides of x",
            old="of_token, g_number = d_y_strides",
            new="of_token, g_number = x_strides",
            gpu=False,
        ),
        Planted(
            "products-in-the-rows-dtype",
            "each product is rounded to the dtype of rows",
            old="        acc += found * tl.load(g_row + n * g_number, mask=ok, other=0.0).to(tile.acc_dtype)\n",
            new="        product = found * tl.load(g_row + n * g_number, mask=ok, other=0.0).to(tile.acc_dtype)\n"
            "        acc += product.to(x.dtype.element_ty).to(tile.acc_dtype)\n",
        ),
    ],
    "pallas": [
        Planted(
            "owners-of-no-row",
            "a row of no token has the first token's cotangent",
            old="jnp.where(owner < 0, -1, owner // slots.shape[1])",
            new="jnp.maximum(owner, 0) // slots.shape[1]",
            sample=True,
            edge="more_rows_than_terms",
            at=(0, 4),
        ),
        Planted(
            "dots-of-the-first-term",
            "dots of all terms are added up in the first's column",
            old="column = positions(ref.d_weights.shape, 1, 0) == j",
            new="column = positions(ref.d_weights.shape, 1, 0) == 0",
        ),
        Planted(
            "numbers-behind-the-last",
            "what lies behind the last number of a row counts",
            old="product = jnp.where(positions(product.shape, 1, c * product.shape[1]) < d, product, 0.0)",
            new="product = product + 0 * c",
        ),
        Planted(
            "terms-for-tokens",
            "a term's number is taken for its token",
            old="owner // slots.shape[1])",
            new="jnp.minimum(owner, len(slots) - 1))",
        ),
    ],
}
